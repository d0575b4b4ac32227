/* values.c - filling and reading tensors: conveniences for set-up and inspection, outside the hot path. */
#include "core/convert.h"
#include "core/tensor.h"
#include "core/walk.h"

#include <math.h>
#include <stdlib.h>

static moe_status check(const char *fn, const moe_queue *q, const moe_tensor *t)
{
  if (!q || !t) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, q ? "t" : "queue");
  if (t->rank < 0 || t->rank > MOE_RANK_MAX || !moe_dtype_size(t->dtype) || moe_tensor_count(t) < 0)
    return moe__fail(MOE_ERR_INVALID, "%s: t is no tensor: rank %d, dtype %d", fn, t->rank, t->dtype);
  if (!t->handle && moe_tensor_count(t)) return moe__fail(MOE_ERR_INVALID, "%s: t is not given", fn);
  if (!moe_tensor_is_packed(t)) return moe__fail(MOE_ERR_INVALID, "%s: t is not packed", fn);
  return MOE_OK;
}

static moe_status check_float(const char *fn, const moe_queue *q, const moe_tensor *t, double value)
{
  MOE__TRY(check(fn, q, t));
  if (!moe__is_float(t->dtype))
    return moe__fail(MOE_ERR_INVALID, "%s: t is %s, f64, f32, bf16 or f16 is wanted", fn, moe_dtype_name(t->dtype));
  if (t->dtype == MOE_F64 && !q->ctx->info->pub.fp64)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: %s has no fp64", fn, q->ctx->info->pub.id);
  if (!isfinite(value)) return moe__fail(MOE_ERR_INVALID, "%s: %g is not finite", fn, value);
  return MOE_OK;
}

moe_status moe_tensor_fill(moe_queue *q, const moe_tensor *t, double value)
{
  MOE__TRY(check_float("moe_tensor_fill", q, t, value));
  struct moe__args_elt_map args = { .dtype = t->dtype == MOE_F64 ? MOE_F64 : MOE_F32,
                                    .y = moe__flatten(*t),
                                    .op = MOE__ELT_FILL,
                                    .n = moe_tensor_count(t),
                                    .alpha = value };
  MOE__TRY(moe__prepare_elt_map(q->ctx, &args, MOE_AUTO));
  MOE__TRY(moe__run_elt_map(q, &args, MOE_AUTO));
  return q->ctx->be->flush(q->be);
}

moe_status moe_tensor_normal(moe_queue *q, const moe_tensor *t, uint64_t seed, int64_t stream, double stddev)
{
  static const char fn[] = "moe_tensor_normal";
  MOE__TRY(check_float(fn, q, t, stddev));
  if (stddev < 0) return moe__fail(MOE_ERR_INVALID, "%s: stddev %g, wanted >= 0", fn, stddev);
  if (stream < 0 || stream > INT32_MAX)
    return moe__fail(MOE_ERR_INVALID, "%s: stream %lld outside 0..2^31-1", fn, (long long)stream);
  struct moe__args_elt_normal args = { .dtype = t->dtype == MOE_F64 ? MOE_F64 : MOE_F32,
                                       .y = moe__flatten(*t),
                                       .n = moe_tensor_count(t),
                                       .seed = (int64_t)seed,
                                       .stream = stream,
                                       .stddev = stddev };
  MOE__TRY(moe__prepare_elt_normal(q->ctx, &args, MOE_AUTO));
  MOE__TRY(moe__run_elt_normal(q, &args, MOE_AUTO));
  return q->ctx->be->flush(q->be);
}

moe_status moe_tensor_read(moe_queue *q, double *out, const moe_tensor *t, int64_t n)
{
  static const char fn[] = "moe_tensor_read";
  MOE__TRY(check(fn, q, t));
  if (n < 0 || (n && !out)) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL or n < 0", fn);
  if (n > moe_tensor_count(t)) n = moe_tensor_count(t);
  uint64_t bytes = (uint64_t)n * moe_dtype_size(t->dtype);
  void *raw = malloc(bytes ? bytes : 1);
  if (!raw) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  moe_status st = moe_span_read(q, raw, (moe_span){ t->handle, t->offset, bytes }, bytes);
  for (int64_t i = 0; !st && i < n; i++) out[i] = moe__to_double(raw, t->dtype, i);
  free(raw);
  return st;
}
