/* optim.c - launches the kernels of optim.cl. */
#include "core/kernels/kernels.h"

#include <math.h>

static moe_status run_adamw(moe_queue *q, const struct moe__args_adamw *args)
{
  static const struct moe__kernel K = { "optim", "adamw" };
  return LAUNCH(q, &K, args->dtype, moe__chunk_groups(q, args->dtype, args->n), 1, 1, moe__map_local(q), T_(args->p),
                I_(args->p.dtype), T_(args->master), T_(args->m), T_(args->v), T_(args->g), I_(args->g.dtype),
                T_(args->lr), T_(args->step), T_(args->gscale), L_(args->n), I_(moe__map_run(q)), R_(args->beta1),
                R_(args->beta2), R_(1.0 - args->beta1), R_(1.0 - args->beta2), R_(log(args->beta1)),
                R_(log(args->beta2)), R_(args->eps), R_(args->decay), R_(args->lr_mult));
}
MOE__PORTABLE_IMPL(adamw, "optim")

static moe_status run_sqnorm(moe_queue *q, const struct moe__args_sqnorm *args)
{
  return moe__sum(q, args->dtype, &args->y, &args->a, &args->scratch, args->n, 1, args->accumulate, 1.0);
}
MOE__PORTABLE_IMPL(sqnorm, "elt")

static moe_status run_clip(moe_queue *q, const struct moe__args_clip *args)
{
  static const struct moe__kernel K = { "optim", "clip" };
  return LAUNCH(q, &K, args->dtype, 1, 1, 1, 1, T_(args->y), T_(args->sq), T_(args->loss_scale), T_(args->health),
                R_(args->max_norm));
}
MOE__PORTABLE_IMPL(clip, "optim")

static moe_status run_lr_step(moe_queue *q, const struct moe__args_lr_step *args)
{
  static const struct moe__kernel K = { "optim", "lr_step" };
  return LAUNCH(q, &K, args->dtype, 1, 1, 1, 1, T_(args->lr), T_(args->step), T_(args->gscale), L_(args->warmup),
                L_(args->total), R_(args->peak), R_(args->floor));
}
MOE__PORTABLE_IMPL(lr_step, "optim")
