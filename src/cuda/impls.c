/* impls.c - the tuned implementations of the CUDA backend, by op; the portable ones stand behind them. */
#include "cuda/impls.h"
#include "cuda/ggemm_sm90.h"

#include "config.h"

const struct moe__ops moe__cuda_ops = {
#if MOE_HAVE_SM90
  .ggemm_rows = moe__cuda_ggemm_rows,
#else
  0
#endif
};

int moe__cuda_object_at(int i, struct moe__cuda_object *out)
{
#if MOE_HAVE_SM90
  enum { ROWS = sizeof moe__sm90_rows_kernels / sizeof(struct moe__sm90_kernel) };
  const struct moe__sm90_kernel *k = &moe__sm90_rows_kernels[0][0][0] + i;
  if (i < ROWS) {
    *out = (struct moe__cuda_object){ "sm90_rows", k->function, k->threads, k->shared };
    return 1;
  }
#endif
  (void)i;
  (void)out;
  return 0;
}
