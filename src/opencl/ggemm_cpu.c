/* ggemm_cpu.c - products over ragged experts on CPU devices: rows and weight gradients by the kernel of gemm_cpu.cl,
   column sums by ggemm_cpu.cl. */
#include "opencl/impls.h"

static moe_status can_ggemm_rows(const struct moe__dev_info *info, const struct moe__args_ggemm_rows *args,
                                 struct moe__why *why)
{
  if (moe__cl_on_cpu(info, why)) return MOE_ERR_UNSUPPORTED;
  if (args->split && !moe__cl_same_strides(&args->b[0], &args->b[1]))
    return moe__cannot(why, "wants b[0] and b[1] with the same strides");
  return moe__can_plain(args, why);
}

static moe_status run_ggemm_rows(moe_queue *q, const struct moe__args_ggemm_rows *args)
{
  const int split_n = args->split == MOE__SPLIT_N, split_k = args->split == MOE__SPLIT_K;
  const int64_t N = split_n ? args->N / 2 : args->N, K = split_k ? args->K / 2 : args->K;
  const moe_tensor *a = &args->a, *b = args->b, *c = &args->c;
  const moe_tensor *bias = args->bias[0].handle || !split_n ? &args->bias[0] : &args->bias[1];
  if (split_n && args->bias[0].handle && args->bias[1].handle &&
      !moe__cl_same_strides(&args->bias[0], &args->bias[1])) {
    struct moe__args_ggemm_rows half = *args; /* each by itself */
    half.N = N;
    half.split = MOE__SPLIT_NONE;
    MOE__TRY(run_ggemm_rows(q, &half));
    half.c = moe__cl_behind(*c, N * c->stride[1]);
    half.b[0] = b[1];
    half.bias[0] = args->bias[1];
    return run_ggemm_rows(q, &half);
  }
  struct moe__cl_product p = {
    .mode = MOE__CL_ROWS,
    .halves = 1 + split_n,
    .parts = 1 + split_k,
    .E = args->E,
    .N = N,
    .K = K,
    .c = { *c, moe__cl_behind(*c, N * c->stride[1]) },
    .c_row = c->stride[0],
    .c_col = c->stride[1],
    .bias = { args->bias[0], args->bias[split_n] },
    .bias_expert = bias->stride[0],
    .bias_stride = bias->stride[1],
    .a = { .x = { *a, split_k ? moe__cl_behind(*a, K * a->stride[1]) : *a },
           .map = args->map,
           .row = a->stride[0],
           .k = a->stride[1],
           .div = args->div },
    .b = { .x = { b[0], b[args->split != 0] },
           .expert = b->stride[0],
           .row = b->stride[1],
           .k = b->stride[2],
           .div = 1 },
    .offs = args->offs,
    .alpha = 1,
  };
  return moe__cl_multiply(q, args->dtype, &p);
}

const struct moe__impl_ggemm_rows moe__cl_ggemm_rows[] = {
  { "ggemm_rows:cpu", "gemm_cpu", MOE__TOTAL, can_ggemm_rows, run_ggemm_rows },
  MOE__MMA_IMPL(ggemm_rows),
  { 0 },
};

static moe_status can_ggemm_wgrad(const struct moe__dev_info *info, const struct moe__args_ggemm_wgrad *args,
                                  struct moe__why *why)
{
  (void)args;
  return moe__cl_on_cpu(info, why);
}

static moe_status run_ggemm_wgrad(moe_queue *q, const struct moe__args_ggemm_wgrad *args)
{
  const int64_t M = args->split ? args->M / 2 : args->M;
  const moe_tensor *c = args->c, *x = &args->p, *y = &args->q;
  if (args->split && !moe__cl_same_strides(&c[0], &c[1])) {
    struct moe__args_ggemm_wgrad half = *args; /* each by itself */
    half.M = M;
    half.split = 0;
    MOE__TRY(run_ggemm_wgrad(q, &half));
    half.c[0] = c[1];
    half.p = moe__cl_behind(*x, M * x->stride[1]);
    return run_ggemm_wgrad(q, &half);
  }
  struct moe__cl_product p = {
    .mode = MOE__CL_WGRAD,
    .halves = 1 + (args->split != 0),
    .parts = 1,
    .E = args->E,
    .M = M,
    .N = args->N,
    .c = { c[0], c[args->split != 0] },
    .c_expert = c->stride[0],
    .c_row = c->stride[1],
    .c_col = c->stride[2],
    .a = { .x = { *x, moe__cl_behind(*x, M * x->stride[1]) },
           .map = args->pmap,
           .row = x->stride[1],
           .k = x->stride[0],
           .div = args->pdiv },
    .b = { .x = { *y, *y }, .map = args->qmap, .row = y->stride[1], .k = y->stride[0], .div = args->qdiv },
    .offs = args->offs,
    .accumulate = args->accumulate,
    .alpha = 1,
  };
  if (c->stride[1] == 1 && (c->stride[2] != 1 || args->N == 1)) moe__cl_swap(&p);
  return moe__cl_multiply(q, args->dtype, &p);
}

const struct moe__impl_ggemm_wgrad moe__cl_ggemm_wgrad[] = {
  { "ggemm_wgrad:cpu", "gemm_cpu", MOE__TOTAL, can_ggemm_wgrad, run_ggemm_wgrad },
  MOE__MMA_IMPL(ggemm_wgrad),
  { 0 },
};

static moe_status can_ggemm_colsum(const struct moe__dev_info *info, const struct moe__args_ggemm_colsum *args,
                                   struct moe__why *why)
{
  if (moe__cl_on_cpu(info, why)) return MOE_ERR_UNSUPPORTED;
  if (args->N > 1 && args->p.stride[1] != 1)
    return moe__cannot(why, "wants rows of p packed, got stride %lld", (long long)args->p.stride[1]);
  return MOE_OK;
}

static moe_status run_ggemm_colsum(moe_queue *q, const struct moe__args_ggemm_colsum *args)
{
  static const struct moe__kernel K = { "ggemm_cpu", "colsum" };
  const int64_t halves = args->split ? 2 : 1;
  const moe_tensor *c = args->c;
  if (args->N == 0) return MOE_OK;
  return LAUNCH(q, &K, args->dtype, moe__cl_groups(q), 1, 1, 1, T_(c[0]), T_(c[1]), T_(args->p), T_(args->weights),
                T_(args->offs), T_(args->map), L_(args->E), L_(args->N / halves), L_(c[0].stride[0]),
                L_(c[0].stride[1]), L_(c[1].stride[0]), L_(c[1].stride[1]), L_(args->p.stride[0]), I_(c[0].dtype),
                I_(c[1].dtype), I_(halves), I_(args->div < INT32_MAX ? args->div : INT32_MAX), I_(args->accumulate));
}

const struct moe__impl_ggemm_colsum moe__cl_ggemm_colsum[] = {
  { "ggemm_colsum:cpu", "ggemm_cpu", 0, can_ggemm_colsum, run_ggemm_colsum }, { 0 }
};
