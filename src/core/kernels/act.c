/* act.c - launches the kernels of act.cl. */
#include "core/kernels/kernels.h"

#include <math.h>

/* The parameters as the kernels take them: no clamp is an infinite limit. */
static double alpha_of(const struct moe__act *act)
{
  return act->alpha == 0.0 ? 1.0 : act->alpha;
}
static double limit_of(const struct moe__act *act)
{
  return act->limit == 0.0 ? HUGE_VAL : act->limit;
}

static int is_swiglu(const struct moe__act *act)
{
  return act->gated && act->kind == MOE__ACT_SILU;
}

static moe_status run_act_fwd(moe_queue *q, const struct moe__args_act_fwd *args)
{
  static const struct moe__kernel ANY = { "act", "act_fwd" }, SWIGLU = { "act", "swiglu_fwd" };
  const struct moe__act *act = &args->act;
  const int lanes = moe__lanes(q, args->dtype, args->F);
  return LAUNCH(q, is_swiglu(act) ? &SWIGLU : &ANY, args->dtype, moe__row_groups(q, args->R, lanes), 1, 1,
                q->ctx->info->reduce_local, T_(args->a), T_(args->h), T_(args->offs), L_(args->R), L_(args->F),
                L_(args->E), I_(act->kind), I_(act->gated), R_(alpha_of(act)), R_(limit_of(act)), R_(act->up_offset),
                I_(lanes));
}
MOE__PORTABLE_IMPL(act_fwd, "act")

static moe_status run_act_bwd(moe_queue *q, const struct moe__args_act_bwd *args)
{
  static const struct moe__kernel ANY = { "act", "act_bwd" }, SWIGLU = { "act", "swiglu_bwd" },
                                  SERIAL = { "act", "act_bwd_serial" };
  const struct moe__act *act = &args->act;
  const int most = moe__lanes(q, args->dtype, args->F),
            lanes = most < 32 ? most : 32; /* a row has a price of its own */
  const int serial = !args->plane && args->dweights.handle;
  return LAUNCH(q,
                serial           ? &SERIAL
                : is_swiglu(act) ? &SWIGLU
                                 : &ANY,
                args->dtype, moe__row_groups(q, args->R, lanes), 1, 1, q->ctx->info->reduce_local, T_(args->dh),
                T_(args->aw), T_(args->dweights), T_(args->da), T_(args->h), T_(args->weights), T_(args->row2slot),
                T_(args->offs), L_(args->R), L_(args->F), L_(args->E), I_(args->accumulate), I_(act->kind),
                I_(act->gated), R_(alpha_of(act)), R_(limit_of(act)), R_(act->up_offset), I_(lanes));
}
MOE__PORTABLE_IMPL(act_bwd, "act")
