/* norm.c - launches the kernels of norm.cl. */
#include "core/kernels/kernels.h"

static moe_status run_rms_fwd(moe_queue *q, const struct moe__args_rms_fwd *args)
{
  static const struct moe__kernel K = { "norm", "rms_fwd" };
  const int lanes = moe__lanes(q, args->dtype, args->D);
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

static moe_status rms_bwd_dw(moe_queue *q, const struct moe__args_rms_bwd *args)
{
  static const struct moe__kernel PARTS = { "norm", "rms_bwd_dw_parts" }, FINAL = { "norm", "rms_bwd_dw_final" };
  const int local = q->ctx->info->reduce_local;
  const int64_t items = moe__ceil_div(args->D, moe__chunk(args->dtype)), columns = local < 32 ? local : 32;
  int64_t length = moe__ceil_div(args->T, MOE__PARTS), parts;
  if (length < 16) length = 16;
  parts = moe__ceil_div(args->T, length);
  MOE__TRY(LAUNCH(q, &PARTS, args->dtype, moe__ceil_div(items, local), parts, 1, local, T_(args->scratch), T_(args->dy),
                  L_(args->dy.stride[0]), L_(args->dy.stride[1]), T_(args->x), L_(args->x.stride[0]),
                  L_(args->x.stride[1]), T_(args->rstd), L_(args->T), L_(args->D), L_(length)));
  return LAUNCH(q, &FINAL, args->dtype, moe__ceil_div(args->D, columns), 1, 1, local, T_(args->dw), I_(args->dw.dtype),
                T_(args->scratch), L_(args->D), I_(parts), I_(args->accumulate));
}

static moe_status run_rms_bwd(moe_queue *q, const struct moe__args_rms_bwd *args)
{
  if (args->dx.handle) MOE__TRY(rms_bwd_dx(q, args));
  if (args->dw.handle) MOE__TRY(rms_bwd_dw(q, args));
  return MOE_OK;
}
MOE__PORTABLE_IMPL(rms_bwd, "norm")
