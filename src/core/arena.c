/* arena.c - see arena.h. */
#include "core/arena.h"

#include "core/tensor.h"

struct moe__arena moe__arena_over(moe_span span)
{
  struct moe__arena a = { span, 0 };
  return a;
}

moe_tensor moe__arena_tensor(struct moe__arena *a, int64_t dtype, int64_t rank, const int64_t *shape)
{
  moe_tensor t;
  int64_t count = 1;
  uint64_t bytes, end;
  memset(&t, 0, sizeof t);
  t.dtype = (int32_t)dtype;
  t.rank = (int32_t)rank;
  for (int64_t d = rank - 1; d >= 0; d--) {
    t.shape[d] = shape[d];
    t.stride[d] = count;
    if (moe__mul(&count, count, shape[d])) {
      a->used = UINT64_MAX;
      return t;
    }
  }
  t.handle = a->span.handle;
  t.offset = a->span.offset + a->used;
  if (__builtin_mul_overflow((uint64_t)count, moe_dtype_size(dtype), &bytes) || bytes > UINT64_MAX - MOE__ALIGN ||
      __builtin_add_overflow(a->used, (bytes + MOE__ALIGN - 1) / MOE__ALIGN * MOE__ALIGN, &end))
    end = UINT64_MAX;
  a->used = end;
  return t;
}

moe_tensor moe__arena_flat(struct moe__arena *a, int64_t dtype, int64_t n)
{
  return moe__arena_tensor(a, dtype, 1, &n);
}

moe_tensor moe__arena_matrix(struct moe__arena *a, int64_t dtype, int64_t rows, int64_t cols)
{
  const int64_t shape[2] = { rows, cols };
  return moe__arena_tensor(a, dtype, 2, shape);
}

moe_status moe__arena_check(const struct moe__arena *a, const char *function, const char *name)
{
  if (a->used > INT64_MAX)
    return moe__fail(MOE_ERR_INVALID, "%s: %s would need more than 2^63-1 bytes", function, name);
  if (a->used && !a->span.handle)
    return moe__fail(MOE_ERR_INVALID, "%s: %s is not given, %llu bytes wanted", function, name,
                     (unsigned long long)a->used);
  if (a->used > a->span.bytes)
    return moe__fail(MOE_ERR_TOO_SMALL, "%s: %s has %llu bytes, %llu wanted", function, name,
                     (unsigned long long)a->span.bytes, (unsigned long long)a->used);
  if (a->span.offset % 16)
    return moe__fail(MOE_ERR_INVALID, "%s: %s begins at offset %llu, a multiple of 16 is wanted", function, name,
                     (unsigned long long)a->span.offset);
  return MOE_OK;
}
