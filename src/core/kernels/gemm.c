/* gemm.c - launcher of the portable matrix product, dense and over the rows of ragged experts. */
#include "core/kernels/kernels.h"

moe_status moe__gemm(moe_queue *q, const struct moe__args_ggemm_rows *a, int64_t a_expert, int64_t c_expert,
                     double alpha, int64_t accumulate)
{
  static const struct moe__kernel large = { "gemm", "gemm_128" }, small = { "gemm", "gemm_64" };
  const int64_t N = a->split == MOE__SPLIT_N ? a->N / 2 : a->N, K = a->split == MOE__SPLIT_K ? a->K / 2 : a->K;
  const int64_t halves = a->split == MOE__SPLIT_N ? 2 : 1;
  const int tile = moe__tile(q, a->dtype, a->offs.handle ? a->R / a->E : a->R, N, a->E * halves);
  const int64_t row_tiles = a->offs.handle ? a->E + a->R / tile : a->E * moe__ceil_div(a->R, tile);
  const struct moe__divisor div = moe__divide(a->map.handle ? a->div : 1);
  if (a->R == 0) return MOE_OK;
  return LAUNCH(q, tile == 128 ? &large : &small, a->dtype, row_tiles * halves * moe__ceil_div(N, tile), 1, 1, 256,
                T_(a->c), L_(c_expert), L_(a->c.stride[0]), L_(a->c.stride[1]), I_(a->c.dtype), T_(a->a), L_(a_expert),
                L_(a->a.stride[0]), L_(a->a.stride[1]), T_(a->b[0]), L_(a->b[0].stride[0]), L_(a->b[0].stride[1]),
                L_(a->b[0].stride[2]), T_(a->b[1]), L_(a->b[1].stride[0]), L_(a->b[1].stride[1]), L_(a->b[1].stride[2]),
                T_(a->bias[0]), L_(a->bias[0].stride[0]), L_(a->bias[0].stride[1]), T_(a->bias[1]),
                L_(a->bias[1].stride[0]), L_(a->bias[1].stride[1]), I_(a->bias[0].dtype), T_(a->offs), T_(a->map),
                L_(div.mul), I_(div.shift), L_(a->R), I_(a->E), L_(N), L_(K), I_(a->split), R_(alpha), I_(accumulate));
}

/* A vector or matrix as the only one of a stack. */
static moe_tensor stacked(moe_tensor t)
{
  for (int i = 2; i > 0; i--) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
  t.shape[0] = 1, t.stride[0] = 0, t.rank++;
  return t;
}

/* The first of a stack. */
static moe_tensor one_of(moe_tensor t)
{
  t.rank--;
  for (int i = 0; i < t.rank; i++) t.shape[i] = t.shape[i + 1], t.stride[i] = t.stride[i + 1];
  return t;
}

static moe_status run_gemm(moe_queue *q, const struct moe__args_gemm *args)
{
  struct moe__args_gemm a = *args;
  if (!a.batch) a.batch = 1, a.c = stacked(a.c), a.a = stacked(a.a), a.b = stacked(a.b);
  struct moe__args_ggemm_rows rows = {
    .dtype = a.dtype, .c = one_of(a.c), .a = one_of(a.a), .R = a.M, .E = a.batch, .N = a.N, .K = a.K
  };
  rows.b[0] = a.b;
  rows.bias[0] = stacked(a.bias);
  return moe__gemm(q, &rows, a.a.stride[0], a.c.stride[0], a.alpha, a.accumulate);
}

MOE__PORTABLE_IMPL(gemm, "gemm")
