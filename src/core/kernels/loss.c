/* loss.c - launches the kernels of loss.cl. */
#include "core/kernels/kernels.h"

static moe_status run_xent_fwd(moe_queue *q, const struct moe__args_xent_fwd *args)
{
  static const struct moe__kernel ROWS = { "loss", "xent_fwd_rows" }, MEAN = { "loss", "xent_fwd_mean" };
  const int local = q->ctx->info->reduce_local, lanes = moe__lanes(q, args->dtype, args->V);
  MOE__TRY(LAUNCH(q, &ROWS, args->dtype, moe__row_groups(q, args->T, lanes), 1, 1, local, T_(args->lse),
                  T_(args->rowloss), T_(args->logits), I_(args->logits.dtype), L_(args->logits.stride[0]),
                  L_(args->logits.stride[1]), T_(args->targets), T_(args->health), L_(args->T), L_(args->V),
                  I_(args->ignoring != 0), L_(args->ignore_index), R_(args->smoothing), I_(lanes)));
  return LAUNCH(q, &MEAN, args->dtype, 1, 1, 1, local, T_(args->loss), T_(args->counted), T_(args->rowloss),
                T_(args->targets), L_(args->T), I_(args->ignoring != 0), L_(args->ignore_index));
}
MOE__PORTABLE_IMPL(xent_fwd, "loss")

static moe_status run_xent_bwd(moe_queue *q, const struct moe__args_xent_bwd *args)
{
  static const struct moe__kernel K = { "loss", "xent_bwd" };
  const int lanes = moe__lanes(q, args->dtype, args->V);
  return LAUNCH(q, &K, args->dtype, moe__row_groups(q, args->T, lanes), 1, 1, q->ctx->info->reduce_local,
                T_(args->dlogits), I_(args->dlogits.dtype), L_(args->dlogits.stride[0]), L_(args->dlogits.stride[1]),
                T_(args->dloss), T_(args->counted), T_(args->logits), I_(args->logits.dtype),
                L_(args->logits.stride[0]), L_(args->logits.stride[1]), T_(args->lse), T_(args->targets), L_(args->T),
                L_(args->V), I_(args->ignoring != 0), L_(args->ignore_index), R_(args->smoothing), I_(lanes));
}
MOE__PORTABLE_IMPL(xent_bwd, "loss")
