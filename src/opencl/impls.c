/* impls.c - the tuned implementations of the OpenCL backend, by op; the portable ones stand behind them. */
#include "opencl/impls.h"
#include "opencl/loader.h"

const struct moe__ops moe__opencl_ops = {
  .combine = moe__cl_combine,
  .gemm = moe__cl_gemm,
  .select = moe__cl_select,
  .weights = moe__cl_weights,
  .weights_bwd = moe__cl_weights_bwd,
  .balance_fwd = moe__cl_balance_fwd,
  .balance_bwd = moe__cl_balance_bwd,
  .ggemm_rows = moe__cl_ggemm_rows,
  .ggemm_wgrad = moe__cl_ggemm_wgrad,
  .ggemm_colsum = moe__cl_ggemm_colsum,
};
