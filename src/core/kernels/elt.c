/* elt.c - launches the kernels of elt.cl. */
#include "core/kernels/kernels.h"

#include <math.h>

static moe_status run_elt_map(moe_queue *q, const struct moe__args_elt_map *args)
{
  static const struct moe__kernel K = { "elt", "elt_map" };
  return LAUNCH(q, &K, args->dtype, moe__chunk_groups(q, args->dtype, args->n), 1, 1, moe__map_local(q), T_(args->y),
                I_(args->y.dtype), T_(args->a), I_(args->a.dtype), T_(args->b), I_(args->b.dtype), T_(args->scale),
                I_(args->op), L_(args->n), I_(moe__map_run(q)), R_(args->alpha));
}
MOE__PORTABLE_IMPL(elt_map, "elt")

static moe_status run_elt_normal(moe_queue *q, const struct moe__args_elt_normal *args)
{
  static const struct moe__kernel K = { "elt", "elt_normal" };
  const double sigma = sqrt(16.0 * 4294967295.0 / 12.0); /* of the integer sum in elt.cl */
  return LAUNCH(q, &K, args->dtype, moe__chunk_groups(q, args->dtype, args->n), 1, 1, moe__map_local(q), T_(args->y),
                I_(args->y.dtype), L_(args->n), I_(moe__map_run(q)), L_(args->seed), L_(args->stream),
                R_(args->stddev / sigma));
}
MOE__PORTABLE_IMPL(elt_normal, "elt")

moe_status moe__sum(moe_queue *q, int64_t dtype, const moe_tensor *y, const moe_tensor *a, const moe_tensor *scratch,
                    int64_t n, int square, int64_t accumulate, double alpha)
{
  static const struct moe__kernel PARTS = { "elt", "elt_sum_parts" }, FINAL = { "elt", "elt_sum_final" };
  const int local = q->ctx->info->reduce_local;
  const int narrow = q->ctx->info->pub.kind == MOE_DEVICE_CPU ? 1 : local; /* a CPU streams each part */
  /* Chunks stay whole and aligned in every part; small tensors take few parts. */
  int64_t length = moe__ceil_div(moe__ceil_div(n, MOE__PARTS), 64) * 64, parts;
  if (length < 4096) length = 4096;
  parts = moe__ceil_div(n, length);
  MOE__TRY(
      LAUNCH(q, &PARTS, dtype, parts, 1, 1, narrow, T_(*scratch), T_(*a), I_(a->dtype), L_(n), L_(length), I_(square)));
  return LAUNCH(q, &FINAL, dtype, 1, 1, 1, local, T_(*y), T_(*scratch), I_(parts), I_(accumulate), R_(alpha));
}

static moe_status run_elt_sum(moe_queue *q, const struct moe__args_elt_sum *args)
{
  return moe__sum(q, args->dtype, &args->y, &args->a, &args->scratch, args->n, 0, args->accumulate, args->alpha);
}
MOE__PORTABLE_IMPL(elt_sum, "elt")
