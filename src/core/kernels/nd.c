/* nd.c - launches the kernels of nd.cl. */
#include "core/kernels/kernels.h"

int64_t moe__nd_reduce_scratch(const moe_tensor *a, int64_t axes)
{
  (void)axes;
  return moe_tensor_count(a) / 8;
}

#define PENDING(op)                                                                                                    \
  static moe_status run_##op(moe_queue *q, const struct moe__args_##op *args)                                          \
  {                                                                                                                    \
    (void)q;                                                                                                           \
    (void)args;                                                                                                        \
    return moe__fail(MOE_ERR_UNSUPPORTED, #op ": has no kernel yet");                                                  \
  }                                                                                                                    \
  MOE__PORTABLE_IMPL(op, "nd")
PENDING(nd_map)
PENDING(nd_reduce)
PENDING(nd_dropout)
