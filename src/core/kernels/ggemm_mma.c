/* ggemm_mma.c - launchers of the products over ragged experts on matrix units (mma.sync). */
#include "core/kernels/kernels.h"

enum { TILE_M = 128, TILE_N = 128, ITEMS = TILE_M * TILE_N / 128 }; /* of ggemm_mma.cl */

static moe_status can_run(const struct moe__dev_info *info, int64_t dtype, struct moe__why *why)
{
  if (!info->ptx) return moe__cannot(why, "wants mma.sync in inline PTX, got %.80s", info->pub.name);
  if (dtype == MOE_BF16 || dtype == MOE_F16) return MOE_OK;
  return moe__cannot(why, "wants bf16 or f16, got %s", moe_dtype_name(dtype));
}

moe_status moe__mma_can_ggemm_rows(const struct moe__dev_info *info, const struct moe__args_ggemm_rows *a,
                                   struct moe__why *why)
{
  MOE__TRY(moe__can_plain(a, why));
  return can_run(info, a->dtype, why);
}

moe_status moe__mma_can_ggemm_wgrad(const struct moe__dev_info *info, const struct moe__args_ggemm_wgrad *a,
                                    struct moe__why *why)
{
  return can_run(info, a->dtype, why);
}

/* Chunks lie along k, unless lines (n) are nearer to each other than k's are. */
static int n_first(const moe_tensor *b)
{
  return b->stride[2] != 1 && (b->stride[1] == 1 || b->stride[1] < b->stride[2]);
}

/* Every chunk of 8 along dimension `fast` is 16 aligned bytes, whole or absent. */
static int is_wide(const moe_queue *q, const moe_tensor *t, int fast)
{
  if (t->stride[fast] != 1 || t->shape[fast] % 8 || moe__begin(q, t) % 16) return 0;
  for (int i = 0; i < t->rank; i++)
    if (i != fast && t->shape[i] > 1 && (t->stride[i] % 8 || t->stride[i] >= 1 << 30)) return 0;
  return 1;
}

moe_status moe__mma_run_ggemm_rows(moe_queue *q, const struct moe__args_ggemm_rows *a)
{
  static const struct moe__kernel kernels[2][2] = {
    { { "ggemm_mma", "rows_nt_any" }, { "ggemm_mma", "rows_nn_any" } },
    { { "ggemm_mma", "rows_nt" }, { "ggemm_mma", "rows_nn" } },
  };
  const int64_t N = a->split == MOE__SPLIT_N ? a->N / 2 : a->N, K = a->split == MOE__SPLIT_K ? a->K / 2 : a->K;
  const int64_t halves = a->split == MOE__SPLIT_N ? 2 : 1;
  const struct moe__divisor div = moe__divide(a->map.handle ? a->div : 1);
  const int across = n_first(&a->b[0]);
  const int wide = K % 8 == 0 && is_wide(q, &a->a, 1) && is_wide(q, &a->b[0], across ? 1 : 2) &&
                   (a->split == MOE__SPLIT_NONE || is_wide(q, &a->b[1], across ? 1 : 2));
  if (a->R == 0) return MOE_OK;
  return LAUNCH(q, &kernels[wide][across], a->dtype, (a->E + a->R / TILE_M) * halves * moe__ceil_div(N, TILE_N), 1, 1,
                ITEMS, T_(a->c), L_(a->c.stride[0]), L_(a->c.stride[1]), T_(a->a), L_(a->a.stride[0]),
                L_(a->a.stride[1]), T_(a->b[0]), L_(a->b[0].stride[0]), L_(a->b[0].stride[1]), L_(a->b[0].stride[2]),
                T_(a->b[1]), L_(a->b[1].stride[0]), L_(a->b[1].stride[1]), L_(a->b[1].stride[2]), T_(a->bias[0]),
                L_(a->bias[0].stride[0]), L_(a->bias[0].stride[1]), T_(a->bias[1]), L_(a->bias[1].stride[0]),
                L_(a->bias[1].stride[1]), T_(a->offs), T_(a->map), L_(div.mul), I_(div.shift), L_(a->R), I_(a->E),
                L_(N), L_(K), I_(a->split));
}

moe_status moe__mma_run_ggemm_wgrad(moe_queue *q, const struct moe__args_ggemm_wgrad *a)
{
  static const struct moe__kernel kernels[2] = { { "ggemm_mma", "wgrad_any" }, { "ggemm_mma", "wgrad" } };
  const int64_t halves = a->split ? 2 : 1, M = a->M / halves;
  const struct moe__divisor pdiv = moe__divide(a->pmap.handle ? a->pdiv : 1);
  const struct moe__divisor qdiv = moe__divide(a->qmap.handle ? a->qdiv : 1);
  const int wide = M % 8 == 0 && is_wide(q, &a->p, 1) && is_wide(q, &a->q, 1);
  return LAUNCH(q, &kernels[wide], a->dtype, a->E * halves * moe__ceil_div(M, TILE_M) * moe__ceil_div(a->N, TILE_N), 1,
                1, ITEMS, T_(a->c[0]), L_(a->c[0].stride[0]), L_(a->c[0].stride[1]), L_(a->c[0].stride[2]), T_(a->c[1]),
                L_(a->c[1].stride[0]), L_(a->c[1].stride[1]), L_(a->c[1].stride[2]), I_(a->c[0].dtype), T_(a->p),
                L_(a->p.stride[0]), L_(a->p.stride[1]), T_(a->q), L_(a->q.stride[0]), L_(a->q.stride[1]), T_(a->offs),
                T_(a->pmap), L_(pdiv.mul), I_(pdiv.shift), T_(a->qmap), L_(qdiv.mul), I_(qdiv.shift), L_(M), L_(a->N),
                I_(halves), I_(a->accumulate));
}
