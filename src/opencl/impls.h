/* impls.h - the tuned implementations of the OpenCL backend and what their launchers share. */
#ifndef MOE_OPENCL_IMPLS_H
#define MOE_OPENCL_IMPLS_H

#include "core/kernels/kernels.h"

/* Lists for moe__opencl_ops; each ends with {0}. */
extern const struct moe__impl_gemm moe__cl_gemm[];
extern const struct moe__impl_ggemm_rows moe__cl_ggemm_rows[];
extern const struct moe__impl_ggemm_wgrad moe__cl_ggemm_wgrad[];
extern const struct moe__impl_ggemm_colsum moe__cl_ggemm_colsum[];
extern const struct moe__impl_select moe__cl_select[];
extern const struct moe__impl_weights moe__cl_weights[];
extern const struct moe__impl_weights_bwd moe__cl_weights_bwd[];
extern const struct moe__impl_balance_fwd moe__cl_balance_fwd[];
extern const struct moe__impl_balance_bwd moe__cl_balance_bwd[];
extern const struct moe__impl_combine moe__cl_combine[];

/* Groups of a kernel that shares its work out by itself: two for each compute unit, so that one that is late has
   less to be late with. */
static inline int64_t moe__cl_groups(const moe_queue *q)
{
  return 2 * (q->ctx->info->pub.compute_units > 0 ? q->ctx->info->pub.compute_units : 1);
}
static inline moe_status moe__cl_on_cpu(const struct moe__dev_info *info, struct moe__why *why)
{
  if (info->pub.kind == MOE_DEVICE_CPU) return MOE_OK;
  return moe__cannot(why, "wants a CPU device, got %.80s", info->pub.name);
}
/* The tensor from `elements` behind its first element on; none stays none. */
static inline moe_tensor moe__cl_behind(moe_tensor t, int64_t elements)
{
  if (t.handle) t.offset += (uint64_t)elements * moe_dtype_size(t.dtype);
  return t;
}
/* 1 where the strides of both are the same, extents of 1 aside. */
static inline int moe__cl_same_strides(const moe_tensor *a, const moe_tensor *b)
{
  for (int d = 0; d < a->rank; d++)
    if (a->shape[d] > 1 && a->stride[d] != b->stride[d]) return 0;
  return 1;
}

/* What the kernel `multiply` of gemm_cpu.cl computes; the terms are explained there. */
enum moe__cl_mode { MOE__CL_DENSE, MOE__CL_ROWS, MOE__CL_WGRAD };
struct moe__cl_operand {
  moe_tensor x[2], map;
  int64_t expert, row, k, div; /* strides */
};
struct moe__cl_product {
  int mode, halves, parts;
  moe_tensor c[2], bias[2], offs;
  struct moe__cl_operand a, b;
  int64_t E, M, N, K, c_expert, c_row, c_col, bias_expert, bias_stride, bias_rows, accumulate;
  double alpha;
};
moe_status moe__cl_multiply(moe_queue *q, int64_t dtype, const struct moe__cl_product *p);
/* The same product as C' = B A'. */
void moe__cl_swap(struct moe__cl_product *p);

#endif
