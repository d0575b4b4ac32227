/* tensor.c - dtypes and shape arithmetic, every product checked for overflow. */
#include "core/tensor.h"

#include "core/status.h"

static const struct {
  const char *name;
  int size;
} dtypes[] = {
  [MOE_F64] = { "f64", 8 },       [MOE_F32] = { "f32", 4 },       [MOE_BF16] = { "bf16", 2 }, [MOE_F16] = { "f16", 2 },
  [MOE_F8E4M3] = { "f8e4m3", 1 }, [MOE_F8E5M2] = { "f8e5m2", 1 }, [MOE_I64] = { "i64", 8 },   [MOE_I32] = { "i32", 4 },
  [MOE_U8] = { "u8", 1 },         [MOE_BOOL] = { "bool", 1 },
};
#define N_DTYPES ((int64_t)(sizeof dtypes / sizeof dtypes[0]))

uint64_t moe_dtype_size(int64_t dtype)
{
  return dtype > 0 && dtype < N_DTYPES ? (uint64_t)dtypes[dtype].size : 0;
}

const char *moe_dtype_name(int64_t dtype)
{
  return dtype > 0 && dtype < N_DTYPES ? dtypes[dtype].name : "?";
}

int moe__is_float(int64_t dtype)
{
  return dtype >= MOE_F64 && dtype <= MOE_F16;
}

moe_status moe__mul(int64_t *out, int64_t a, int64_t b)
{
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, out)) return MOE_ERR_INVALID;
  return MOE_OK;
}

moe_status moe_tensor_packed(moe_tensor *out, moe_span at, int64_t dtype, int64_t rank, const int64_t *shape)
{
  static const char fn[] = "moe_tensor_packed";
  moe_tensor t;
  int64_t count = 1, bytes;
  uint64_t size = moe_dtype_size(dtype);
  int64_t dims[MOE_RANK_MAX] = { 0 }; /* shape may lie in *out */
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  if (shape && rank > 0 && rank <= MOE_RANK_MAX) memcpy(dims, shape, (size_t)rank * sizeof *dims);
  memset(out, 0, sizeof *out);
  memset(&t, 0, sizeof t);
  if (!size) return moe__fail(MOE_ERR_INVALID, "%s: dtype %lld is none", fn, (long long)dtype);
  if (rank < 0 || rank > MOE_RANK_MAX || (rank && !shape))
    return moe__fail(MOE_ERR_INVALID, "%s: rank %lld outside 0..%d, or no shape", fn, (long long)rank, MOE_RANK_MAX);
  if (at.offset % size)
    return moe__fail(MOE_ERR_INVALID, "%s: offset %llu is no multiple of %s's %llu bytes", fn,
                     (unsigned long long)at.offset, moe_dtype_name(dtype), (unsigned long long)size);
  for (int64_t d = rank - 1; d >= 0; d--) {
    t.shape[d] = dims[d];
    t.stride[d] = count;
    if (dims[d] < 0) return moe__fail(MOE_ERR_INVALID, "%s: shape[%lld] is %lld", fn, (long long)d, (long long)dims[d]);
    if (moe__mul(&count, count, dims[d] ? dims[d] : 1))
      return moe__fail(MOE_ERR_INVALID, "%s: more than 2^63-1 elements", fn);
  }
  if (moe__mul(&bytes, count, (int64_t)size)) return moe__fail(MOE_ERR_INVALID, "%s: more than 2^63-1 bytes", fn);
  t.handle = at.handle;
  t.offset = at.offset;
  t.dtype = (int32_t)dtype;
  t.rank = (int32_t)rank;
  if (moe_tensor_count(&t) == 0) bytes = 0;
  if ((uint64_t)bytes > at.bytes)
    return moe__fail(MOE_ERR_TOO_SMALL, "%s: needs %lld bytes, the span has %llu", fn, (long long)bytes,
                     (unsigned long long)at.bytes);
  *out = t;
  return MOE_OK;
}

int64_t moe_tensor_count(const moe_tensor *t)
{
  int64_t count = 1;
  for (int d = 0; d < t->rank; d++) count *= t->shape[d];
  return count;
}

uint64_t moe_tensor_extent(const moe_tensor *t)
{
  uint64_t last = 0;
  for (int d = 0; d < t->rank; d++) {
    if (t->shape[d] == 0) return 0;
    last += (uint64_t)(t->shape[d] - 1) * (uint64_t)t->stride[d];
  }
  return (last + 1) * moe_dtype_size(t->dtype);
}

int moe_tensor_is_packed(const moe_tensor *t)
{
  int64_t stride = 1;
  for (int d = t->rank - 1; d >= 0; d--) {
    if (t->shape[d] != 1 && t->stride[d] != stride) return 0;
    if (moe__mul(&stride, stride, t->shape[d] ? t->shape[d] : 1)) return 0; /* as moe_tensor_packed */
  }
  return 1;
}

static moe_status bad_dim(const char *fn, const moe_tensor *t, int64_t dim)
{
  if (dim < 0 || dim >= t->rank)
    return moe__fail(MOE_ERR_INVALID, "%s: dimension %lld outside 0..%d", fn, (long long)dim, t->rank - 1);
  return MOE_OK;
}

moe_status moe_tensor_slice(moe_tensor *out, const moe_tensor *t, int64_t dim, int64_t begin, int64_t end)
{
  static const char fn[] = "moe_tensor_slice";
  if (!out || !t) return moe__fail(MOE_ERR_INVALID, "%s: out or t is NULL", fn);
  MOE__TRY(bad_dim(fn, t, dim));
  if (begin < 0 || end < begin || end > t->shape[dim])
    return moe__fail(MOE_ERR_INVALID, "%s: [%lld, %lld) outside [0, %lld)", fn, (long long)begin, (long long)end,
                     (long long)t->shape[dim]);
  moe_tensor view = *t;
  view.offset += (uint64_t)(begin * t->stride[dim]) * moe_dtype_size(t->dtype);
  view.shape[dim] = end - begin;
  *out = view;
  return MOE_OK;
}

moe_status moe_tensor_every(moe_tensor *out, const moe_tensor *t, int64_t dim, int64_t begin, int64_t step)
{
  static const char fn[] = "moe_tensor_every";
  if (!out || !t) return moe__fail(MOE_ERR_INVALID, "%s: out or t is NULL", fn);
  MOE__TRY(bad_dim(fn, t, dim));
  if (step < 1 || begin < 0 || begin > t->shape[dim])
    return moe__fail(MOE_ERR_INVALID, "%s: begin %lld, step %lld for extent %lld", fn, (long long)begin,
                     (long long)step, (long long)t->shape[dim]);
  int64_t left = t->shape[dim] - begin;
  moe_tensor view = *t;
  view.offset += (uint64_t)(begin * t->stride[dim]) * moe_dtype_size(t->dtype);
  view.shape[dim] = left ? (left - 1) / step + 1 : 0;
  if (view.shape[dim] > 1) view.stride[dim] = t->stride[dim] * step; /* else the product may be past 2^63 */
  *out = view;
  return MOE_OK;
}

moe_status moe_tensor_transpose(moe_tensor *out, const moe_tensor *t, int64_t dim0, int64_t dim1)
{
  static const char fn[] = "moe_tensor_transpose";
  if (!out || !t) return moe__fail(MOE_ERR_INVALID, "%s: out or t is NULL", fn);
  MOE__TRY(bad_dim(fn, t, dim0));
  MOE__TRY(bad_dim(fn, t, dim1));
  *out = moe__swapped(*t, (int)dim0, (int)dim1);
  return MOE_OK;
}

moe_tensor moe__view(moe_tensor base, int64_t element, int64_t rank, const int64_t *shape, const int64_t *stride)
{
  moe_tensor t = base;
  if (!base.handle) return t;
  t.offset += (uint64_t)element * moe_dtype_size(base.dtype);
  t.rank = (int32_t)rank;
  memset(t.shape, 0, sizeof t.shape);
  memset(t.stride, 0, sizeof t.stride);
  for (int64_t d = 0; d < rank; d++) {
    t.shape[d] = shape[d];
    t.stride[d] = stride[d];
  }
  return t;
}

moe_tensor moe__flat(void *handle, uint64_t offset, int64_t dtype, int64_t n)
{
  moe_tensor t;
  memset(&t, 0, sizeof t);
  t.handle = handle;
  t.offset = offset;
  t.dtype = (int32_t)dtype;
  t.rank = 1;
  t.shape[0] = n;
  t.stride[0] = 1;
  return t;
}

moe_tensor moe__matrix(void *handle, uint64_t offset, int64_t dtype, int64_t rows, int64_t cols)
{
  moe_tensor t = moe__flat(handle, offset, dtype, rows);
  t.rank = 2;
  t.shape[1] = cols;
  t.stride[0] = cols;
  t.stride[1] = 1;
  return t;
}

moe_status moe__want(const char *fn, const char *name, const moe_tensor *t, int64_t dtype, int64_t rank,
                     const int64_t *shape)
{
  int64_t count = 1;
  for (int64_t d = 0; d < rank; d++) count = shape[d] ? count : 0;
  if (!t->handle) {
    if (!count) return MOE_OK;
    return moe__fail(MOE_ERR_INVALID, "%s: %s is not given", fn, name);
  }
  if (dtype ? t->dtype != dtype : !moe__is_float(t->dtype))
    return moe__fail(MOE_ERR_INVALID, "%s: %s is %s, %s is wanted", fn, name, moe_dtype_name(t->dtype),
                     dtype ? moe_dtype_name(dtype) : "f64, f32, bf16 or f16");
  if (t->offset % moe_dtype_size(t->dtype))
    return moe__fail(MOE_ERR_INVALID, "%s: %s begins at byte %llu, no multiple of %s's %llu", fn, name,
                     (unsigned long long)t->offset, moe_dtype_name(t->dtype),
                     (unsigned long long)moe_dtype_size(t->dtype));
  if (t->rank != rank)
    return moe__fail(MOE_ERR_INVALID, "%s: %s has rank %d, %lld is wanted", fn, name, t->rank, (long long)rank);
  for (int64_t d = 0; d < rank; d++) {
    if (t->shape[d] != shape[d])
      return moe__fail(MOE_ERR_INVALID, "%s: %s has extent %lld in dimension %lld, %lld is wanted", fn, name,
                       (long long)t->shape[d], (long long)d, (long long)shape[d]);
    if (t->stride[d] < 0)
      return moe__fail(MOE_ERR_INVALID, "%s: %s has stride %lld in dimension %lld", fn, name, (long long)t->stride[d],
                       (long long)d);
  }
  return MOE_OK;
}

moe_tensor moe__flatten(moe_tensor t)
{
  return t.handle ? moe__flat(t.handle, t.offset, t.dtype, moe_tensor_count(&t)) : t;
}

moe_tensor moe__columns(moe_tensor t, int64_t from, int64_t n)
{
  return moe__view(t, from * t.stride[1], 2, (const int64_t[]){ t.shape[0], n },
                   (const int64_t[]){ t.stride[0], t.stride[1] });
}

moe_tensor moe__swapped(moe_tensor t, int d0, int d1)
{
  moe_tensor view = t;
  view.shape[d0] = t.shape[d1];
  view.stride[d0] = t.stride[d1];
  view.shape[d1] = t.shape[d0];
  view.stride[d1] = t.stride[d0];
  return view;
}

moe_status moe__want_out(const char *fn, const char *name, const moe_tensor *t, int64_t dtype, int64_t rank,
                         const int64_t *shape)
{
  MOE__TRY(moe__want(fn, name, t, dtype, rank, shape));
  for (int64_t d = 0; t->handle && d < rank; d++)
    if (t->shape[d] > 1 && t->stride[d] == 0)
      return moe__fail(MOE_ERR_INVALID, "%s: %s is written and has stride 0 in dimension %lld", fn, name, (long long)d);
  return MOE_OK;
}

moe_status moe__want_array(const char *fn, const char *name, const moe_tensor *t, int written)
{
  int64_t last = 1, count = 1, reach, empty = 0; /* last: elements from the first to past the last */
  if (!moe_dtype_size(t->dtype)) return moe__fail(MOE_ERR_INVALID, "%s: %s has dtype %d", fn, name, t->dtype);
  if (t->rank < 0 || t->rank > MOE_RANK_MAX) return moe__fail(MOE_ERR_INVALID, "%s: %s has rank %d", fn, name, t->rank);
  for (int d = 0; d < t->rank; d++) {
    if (t->shape[d] < 0)
      return moe__fail(MOE_ERR_INVALID, "%s: %s has extent %lld in dimension %d", fn, name, (long long)t->shape[d], d);
    empty |= !t->shape[d];
  }
  for (int d = 0; d < t->rank && !empty; d++)
    if (moe__mul(&reach, t->shape[d] - 1, t->stride[d]) || __builtin_add_overflow(last, reach, &last) ||
        moe__mul(&count, count, t->shape[d]))
      return moe__fail(MOE_ERR_INVALID, "%s: %s has extent %lld and stride %lld in dimension %d", fn, name,
                       (long long)t->shape[d], (long long)t->stride[d], d);
  if (moe__mul(&last, last, (int64_t)moe_dtype_size(t->dtype)) ||
      moe__mul(&count, count, (int64_t)moe_dtype_size(t->dtype)))
    return moe__fail(MOE_ERR_INVALID, "%s: %s reaches past 2^63-1 bytes", fn, name);
  return empty && !t->handle ? MOE_OK : (written ? moe__want_out : moe__want)(fn, name, t, t->dtype, t->rank, t->shape);
}

moe_status moe__apart(const char *fn, const char *out_name, const moe_tensor *out, const char *in_name,
                      const moe_tensor *in)
{
  if (!out->handle || out->handle != in->handle || out->offset != in->offset || !moe_tensor_count(in)) return MOE_OK;
  return moe__fail(MOE_ERR_INVALID, "%s: %s lies where %s does, which is read after it", fn, out_name, in_name);
}
