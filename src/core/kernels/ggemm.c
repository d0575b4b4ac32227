/* ggemm.c - launchers of the portable products and sums over ragged experts. */
#include "core/kernels/kernels.h"

static moe_status can_ggemm_rows(const struct moe__dev_info *info, const struct moe__args_ggemm_rows *a,
                                 struct moe__why *why)
{
  (void)info;
  return moe__can_plain(a, why);
}

static moe_status run_ggemm_rows(moe_queue *q, const struct moe__args_ggemm_rows *a)
{
  return moe__gemm(q, a, 0, 0, 1.0, 0);
}

static moe_status run_ggemm_wgrad(moe_queue *q, const struct moe__args_ggemm_wgrad *a)
{
  static const struct moe__kernel large = { "gemm", "wgrad_128" }, small = { "gemm", "wgrad_64" };
  const int64_t halves = a->split ? 2 : 1, M = a->M / halves;
  const int tile = moe__tile(q, a->dtype, M, a->N, a->E * halves);
  const struct moe__divisor pdiv = moe__divide(a->pmap.handle ? a->pdiv : 1);
  const struct moe__divisor qdiv = moe__divide(a->qmap.handle ? a->qdiv : 1);
  return LAUNCH(q, tile == 128 ? &large : &small, a->dtype,
                a->E * halves * moe__ceil_div(M, tile) * moe__ceil_div(a->N, tile), 1, 1, 256, T_(a->c[0]),
                L_(a->c[0].stride[0]), L_(a->c[0].stride[1]), L_(a->c[0].stride[2]), T_(a->c[1]), L_(a->c[1].stride[0]),
                L_(a->c[1].stride[1]), L_(a->c[1].stride[2]), I_(a->c[0].dtype), T_(a->p), L_(a->p.stride[0]),
                L_(a->p.stride[1]), T_(a->q), L_(a->q.stride[0]), L_(a->q.stride[1]), T_(a->offs), T_(a->pmap),
                L_(pdiv.mul), I_(pdiv.shift), T_(a->qmap), L_(qdiv.mul), I_(qdiv.shift), L_(M), L_(a->N), I_(halves),
                I_(a->accumulate));
}

#define LANES 32 /* of ggemm.cl */

static moe_status run_ggemm_colsum(moe_queue *q, const struct moe__args_ggemm_colsum *a)
{
  static const struct moe__kernel k = { "ggemm", "colsum" };
  const int64_t halves = a->split ? 2 : 1, N = a->N / halves;
  return LAUNCH(q, &k, a->dtype, a->E * halves * moe__ceil_div(N, LANES), 1, 1, q->ctx->info->reduce_local, T_(a->c[0]),
                L_(a->c[0].stride[0]), L_(a->c[0].stride[1]), T_(a->c[1]), L_(a->c[1].stride[0]), L_(a->c[1].stride[1]),
                I_(a->c[0].dtype), I_(a->c[1].dtype), T_(a->p), L_(a->p.stride[0]), L_(a->p.stride[1]), T_(a->weights),
                T_(a->offs), T_(a->map), I_(a->div < INT32_MAX ? a->div : INT32_MAX), L_(N), I_(halves),
                I_(a->accumulate));
}

const struct moe__impl_ggemm_rows moe__portable_ggemm_rows = { "ggemm_rows:portable", "gemm",
                                                               MOE__PORTABLE | MOE__TOTAL, can_ggemm_rows,
                                                               run_ggemm_rows };
MOE__PORTABLE_IMPL(ggemm_wgrad, "gemm")
MOE__PORTABLE_IMPL(ggemm_colsum, "ggemm")
