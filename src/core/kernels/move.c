/* move.c - launches the kernels of move.cl. */
#include "core/kernels/kernels.h"

static moe_status run_gather_rows(moe_queue *q, const struct moe__args_gather_rows *args)
{
  static const struct moe__kernel K = { "move", "gather_rows" };
  const int lanes = moe__lanes(q, args->dtype, args->D);
  return LAUNCH(q, &K, args->dtype, moe__row_groups(q, args->n, lanes), 1, 1, q->ctx->info->reduce_local, T_(args->y),
                L_(args->y.stride[0]), L_(args->y.stride[1]), T_(args->x), L_(args->x.stride[0]), L_(args->x.stride[1]),
                T_(args->map), T_(args->health), L_(args->n), L_(args->rows), L_(args->D), L_(args->div), I_(lanes));
}
MOE__PORTABLE_IMPL(gather_rows, "move")

static moe_status run_combine(moe_queue *q, const struct moe__args_combine *args)
{
  static const struct moe__kernel K = { "move", "combine" };
  const int lanes = moe__lanes(q, args->dtype, args->D);
  return LAUNCH(q, &K, args->dtype, moe__row_groups(q, args->T, lanes), 1, 1, q->ctx->info->reduce_local, T_(args->y),
                L_(args->y.stride[0]), L_(args->y.stride[1]), T_(args->rows), L_(args->rows.stride[0]),
                L_(args->rows.stride[1]), T_(args->weights), T_(args->slot2row), T_(args->add), L_(args->add.stride[0]),
                L_(args->add.stride[1]), L_(args->T), L_(args->K), L_(args->D), I_(args->unweighted), I_(lanes));
}
MOE__PORTABLE_IMPL(combine, "move")

static moe_status run_row_dot(moe_queue *q, const struct moe__args_row_dot *args)
{
  static const struct moe__kernel K = { "move", "row_dot" };
  const int lanes = moe__lanes(q, args->dtype, args->D);
  return LAUNCH(q, &K, args->dtype, moe__row_groups(q, args->T * args->K, lanes), 1, 1, q->ctx->info->reduce_local,
                T_(args->y), T_(args->a), L_(args->a.stride[0]), L_(args->a.stride[1]), T_(args->b),
                L_(args->b.stride[0]), L_(args->b.stride[1]), T_(args->ids), L_(args->T * args->K), L_(args->K),
                L_(args->E), L_(args->D), I_(lanes));
}
MOE__PORTABLE_IMPL(row_dot, "move")

static moe_status run_gather_cols(moe_queue *q, const struct moe__args_gather_cols *args)
{
  static const struct moe__kernel K = { "move", "gather_cols" };
  return LAUNCH(q, &K, args->dtype, moe__map_groups(q, args->T * args->K), 1, 1, moe__map_local(q), T_(args->y),
                L_(args->y.stride[0]), L_(args->y.stride[1]), T_(args->x), L_(args->x.stride[0]), L_(args->x.stride[1]),
                T_(args->ids), L_(args->T), L_(args->E), L_(args->K));
}
MOE__PORTABLE_IMPL(gather_cols, "move")

static moe_status run_scatter_cols(moe_queue *q, const struct moe__args_scatter_cols *args)
{
  static const struct moe__kernel K = { "move", "scatter_cols" };
  return LAUNCH(q, &K, args->dtype, moe__map_groups(q, args->T * args->E), 1, 1, moe__map_local(q), T_(args->y),
                L_(args->y.stride[0]), L_(args->y.stride[1]), T_(args->x), L_(args->x.stride[0]), L_(args->x.stride[1]),
                T_(args->ids), L_(args->T), L_(args->E), L_(args->K));
}
MOE__PORTABLE_IMPL(scatter_cols, "move")
