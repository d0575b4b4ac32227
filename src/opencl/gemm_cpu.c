/* gemm_cpu.c - the dense product on CPU devices, and the launch of the kernel that all matrix products share. */
#include "opencl/impls.h"

/* Map entries are below 2^31: a larger divisor makes them 0 as this one does. */
static int64_t divisor(int64_t div)
{
  return div < INT32_MAX ? div : INT32_MAX;
}

moe_status moe__cl_multiply(moe_queue *q, int64_t dtype, const struct moe__cl_product *p)
{
  static const struct moe__kernel K = { "gemm_cpu", "multiply" };
  if (p->N == 0 || (p->mode != MOE__CL_ROWS && p->M == 0)) return MOE_OK;
  return LAUNCH(q, &K, dtype, moe__cl_groups(q), 1, 1, 1, T_(p->c[0]), T_(p->c[1]), T_(p->a.x[0]), T_(p->a.x[1]),
                T_(p->b.x[0]), T_(p->b.x[1]), T_(p->bias[0]), T_(p->bias[1]), T_(p->offs), T_(p->a.map), T_(p->b.map),
                L_(p->E), L_(p->M), L_(p->N), L_(p->K), L_(p->c_expert), L_(p->c_row), L_(p->c_col), L_(p->a.expert),
                L_(p->a.row), L_(p->a.k), L_(p->b.expert), L_(p->b.row), L_(p->b.k), L_(p->bias_expert),
                L_(p->bias_stride), I_(p->mode), I_(p->halves), I_(p->parts), I_(divisor(p->a.div)),
                I_(divisor(p->b.div)), I_(p->c[0].dtype), I_(p->bias[!p->bias[0].handle].dtype), I_(p->bias_rows),
                I_(p->accumulate), R_(p->alpha));
}

void moe__cl_swap(struct moe__cl_product *p)
{
  const struct moe__cl_operand a = p->a;
  const int64_t M = p->M, c_row = p->c_row;
  p->a = p->b;
  p->b = a;
  p->M = p->N;
  p->N = M;
  p->c_row = p->c_col;
  p->c_col = c_row;
  p->bias_rows = !p->bias_rows;
}

static moe_status can_gemm(const struct moe__dev_info *info, const struct moe__args_gemm *args, struct moe__why *why)
{
  (void)args;
  return moe__cl_on_cpu(info, why);
}

static moe_status run_gemm(moe_queue *q, const struct moe__args_gemm *args)
{
  const int batched = args->batch > 0; /* the dimension in front */
  const int64_t *a = args->a.stride + batched, *b = args->b.stride + batched, *c = args->c.stride + batched;
  struct moe__cl_product p = {
    .mode = MOE__CL_DENSE,
    .halves = 1,
    .parts = 1,
    .E = batched ? args->batch : 1,
    .M = args->M,
    .N = args->N,
    .K = args->K,
    .c = { args->c },
    .c_expert = args->c.stride[0],
    .c_row = c[0],
    .c_col = c[1],
    .bias = { args->bias },
    .bias_stride = args->bias.stride[0],
    .a = { .x = { args->a }, .expert = args->a.stride[0], .row = a[0], .k = a[1], .div = 1 },
    .b = { .x = { args->b }, .expert = args->b.stride[0], .row = b[0], .k = b[1], .div = 1 },
    .accumulate = args->accumulate,
    .alpha = args->alpha,
  };
  if (c[0] == 1 && (c[1] != 1 || args->N == 1)) moe__cl_swap(&p);
  return moe__cl_multiply(q, args->dtype, &p);
}

const struct moe__impl_gemm moe__cl_gemm[] = { { "gemm:cpu", "gemm_cpu", MOE__TOTAL, can_gemm, run_gemm }, { 0 } };
