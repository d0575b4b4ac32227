/* impls.c - the tuned implementations of the CUDA backend, by op; the portable ones stand behind them. */
#include "cuda/impls.h"
#include "cuda/ggemm_sm90.h"

#include "config.h"

static const struct moe__impl_ggemm_rows ggemm_rows[] = {
#if MOE_HAVE_SM90
  { "ggemm_rows:sm90", "sm90_rows", MOE__TENSOR, moe__sm90_can_ggemm_rows, moe__sm90_run_ggemm_rows },
#endif
  MOE__MMA_IMPL(ggemm_rows),
  { 0 },
};

static const struct moe__impl_ggemm_wgrad ggemm_wgrad[] = {
#if MOE_HAVE_SM90
  { "ggemm_wgrad:sm90", "sm90_wgrad", MOE__TENSOR, moe__sm90_can_ggemm_wgrad, moe__sm90_run_ggemm_wgrad },
#endif
  MOE__MMA_IMPL(ggemm_wgrad),
  { 0 },
};

const struct moe__ops moe__cuda_ops = {
  .ggemm_rows = ggemm_rows,
  .ggemm_wgrad = ggemm_wgrad,
};

int moe__cuda_object_at(int i, struct moe__cuda_object *out)
{
#if MOE_HAVE_SM90
  static const struct {
    const char *program;
    const struct moe__sm90_kernel *kernels;
    int n;
  } sets[] = {
    { "sm90_rows", &moe__sm90_rows_kernels[0][0][0][0],
      sizeof moe__sm90_rows_kernels / sizeof(struct moe__sm90_kernel) },
    { "sm90_rows", &moe__sm90_act_grad_kernels[0][0][0],
      sizeof moe__sm90_act_grad_kernels / sizeof(struct moe__sm90_kernel) },
    { "sm90_rows", &moe__sm90_sums_kernel, 1 },
    { "sm90_wgrad", &moe__sm90_wgrad_kernels[0][0], sizeof moe__sm90_wgrad_kernels / sizeof(struct moe__sm90_kernel) },
  };
  for (size_t set = 0; set < sizeof sets / sizeof *sets; i -= sets[set++].n)
    if (i < sets[set].n) {
      const struct moe__sm90_kernel *k = sets[set].kernels + i;
      *out = (struct moe__cuda_object){ sets[set].program, k->function, k->threads, k->shared };
      return 1;
    }
#endif
  (void)i;
  (void)out;
  return 0;
}
