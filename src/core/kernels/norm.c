/* norm.c - launches the kernels of norm.cl. */
#include "core/kernels/kernels.h"

/* HELD of norm.cl: chunks of a row that an item of a GPU keeps in registers. */
enum { HELD = 4 };
static int held_lanes(const moe_queue *q, int64_t dtype, int64_t D)
{
  int lanes = q->ctx->info->reduce_local;
  while (lanes > 1 && lanes / 2 * moe__chunk(dtype) >= D) lanes /= 2;
  while (lanes > 32 && lanes / 2 * HELD * moe__chunk(dtype) >= D) lanes /= 2;
  return lanes;
}

static moe_status run_rms_fwd(moe_queue *q, const struct moe__args_rms_fwd *args)
{
  static const struct moe__kernel K = { "norm", "rms_fwd" };
  const int lanes = held_lanes(q, args->dtype, args->D);
  return LAUNCH(q, &K, args->dtype, moe__row_groups(q, args->T, lanes), 1, 1, q->ctx->info->reduce_local, T_(args->y),
                L_(args->y.stride[0]), L_(args->y.stride[1]), T_(args->rstd), T_(args->x), L_(args->x.stride[0]),
                L_(args->x.stride[1]), T_(args->w), L_(args->T), L_(args->D), R_(args->eps), I_(lanes));
}
MOE__PORTABLE_IMPL(rms_fwd, "norm")

static moe_status rms_bwd_dx(moe_queue *q, const struct moe__args_rms_bwd *args)
{
  static const struct moe__kernel K = { "norm", "rms_bwd_dx" };
  const int lanes = moe__lanes(q, args->dtype, args->D);
  return LAUNCH(q, &K, args->dtype, moe__row_groups(q, args->T, lanes), 1, 1, q->ctx->info->reduce_local, T_(args->dx),
                L_(args->dx.stride[0]), L_(args->dx.stride[1]), T_(args->dy), L_(args->dy.stride[0]),
                L_(args->dy.stride[1]), T_(args->x), L_(args->x.stride[0]), L_(args->x.stride[1]), T_(args->w),
                T_(args->rstd), L_(args->T), L_(args->D), I_(lanes));
}

static moe_status rms_bwd_dw(moe_queue *q, const struct moe__args_rms_bwd *args, int with_dx)
{
  static const struct moe__kernel PARTS = { "norm", "rms_bwd_dw_parts" }, FINAL = { "norm", "rms_bwd_dw_final" },
                                  ROWS = { "norm", "rms_bwd_rows" };
  const int local = q->ctx->info->reduce_local, lanes = held_lanes(q, args->dtype, args->D);
  const int64_t items = moe__ceil_div(args->D, moe__chunk(args->dtype)), columns = local < 32 ? local : 32;
  int64_t length = moe__ceil_div(args->T, MOE__PARTS), parts;
  if (length < 16) length = 16;
  parts = moe__ceil_div(args->T, length);
  if (with_dx)
    MOE__TRY(LAUNCH(q, &ROWS, args->dtype, parts, 1, 1, local, T_(args->scratch), T_(args->dx), L_(args->dx.stride[0]),
                    T_(args->dy), L_(args->dy.stride[0]), T_(args->x), L_(args->x.stride[0]), T_(args->w),
                    T_(args->rstd), L_(args->T), L_(args->D), L_(length), I_(lanes)));
  else
    MOE__TRY(LAUNCH(q, &PARTS, args->dtype, moe__ceil_div(items, local), parts, 1, local, T_(args->scratch),
                    T_(args->dy), L_(args->dy.stride[0]), L_(args->dy.stride[1]), T_(args->x), L_(args->x.stride[0]),
                    L_(args->x.stride[1]), T_(args->rstd), L_(args->T), L_(args->D), L_(length)));
  return LAUNCH(q, &FINAL, args->dtype, moe__ceil_div(args->D, columns), 1, 1, local, T_(args->dw), I_(args->dw.dtype),
                T_(args->scratch), L_(args->D), I_(parts), I_(args->accumulate));
}

/* Whether all chunks of the rows are. */
static int wide(const moe_queue *q, int64_t dtype, const moe_tensor *t)
{
  const uint64_t n = (uint64_t)moe__chunk(dtype);
  const int last = t->rank - 1;
  return t->stride[last] == 1 && t->shape[last] % (int64_t)n == 0 && (last == 0 || t->stride[0] % (int64_t)n == 0) &&
         moe__begin(q, t) % (n * moe_dtype_size(dtype)) == 0;
}

static moe_status run_rms_bwd(moe_queue *q, const struct moe__args_rms_bwd *args)
{
  /* Both in one pass over the rows, where a GPU can keep them. */
  const int together = args->dx.handle && args->dw.handle && q->ctx->info->pub.kind != MOE_DEVICE_CPU &&
                       args->D <= q->ctx->info->reduce_local * HELD * moe__chunk(args->dtype) &&
                       wide(q, args->dtype, &args->dx) && wide(q, args->dtype, &args->dy) &&
                       wide(q, args->dtype, &args->x) && wide(q, args->dtype, &args->w);
  if (args->dx.handle && !together) MOE__TRY(rms_bwd_dx(q, args));
  return args->dw.handle ? rms_bwd_dw(q, args, together) : MOE_OK;
}
MOE__PORTABLE_IMPL(rms_bwd, "norm")
