/* moe/optim.h - AdamW with decoupled decay, FP32 master weights, global norm clipping and a warm-up and
   cosine schedule, all on the device: step, rate and clip factor are device scalars, so that a whole step can
   be captured in a CUDA graph. */
#ifndef MOE_OPTIM_H
#define MOE_OPTIM_H

#include <moe/context.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moe_adamw moe_adamw;

/* t = 1, 2, ...: m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
   p -= rate(t) * (m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) + decay * p)     (Loshchilov and Hutter, 1711.05101)
   rate(t): peak*t/warmup while t < warmup, then floor + (peak-floor)*(1 + cos(pi*min(1, (t-warmup)/(total-warmup))))/2;
   total 0: constant at peak after the warm-up. */
typedef struct moe_adamw_desc {
  uint64_t size;
  int64_t dtype;            /* of m, v, rate: F32, or F64 for f64 parameters */
  double beta1, beta2, eps; /* 0: 0.9, 0.95, 1e-8 */
  double peak, floor;       /* learning rates; peak > 0 */
  int64_t warmup, total;    /* steps */
  double max_norm;          /* gradients are scaled so that their global norm is at most this; 0: not clipped */
  /* [1] FP32 (FP64): gradients are divided by it (loss scaling for f16); no tensor: 1.  Read at each step. */
  moe_tensor loss_scale;
} moe_adamw_desc;
MOE_INIT(moe_adamw_desc)

MOE_API MOE_CHECKED moe_status moe_adamw_create(moe_adamw **out, moe_context *ctx, const moe_adamw_desc *desc);
MOE_API void moe_adamw_free(moe_adamw *opt);
/* One parameter (packed, any float) and its gradient (packed, as many elements, any float).  decay: its weight
   decay; rate_scale multiplies the rate (a parameter group is a pair of these).  Before moe_adamw_bind.
   BF16 and F16 parameters get FP32 master weights inside the state. */
MOE_API MOE_CHECKED moe_status moe_adamw_add(moe_adamw *opt, const moe_tensor *param, const moe_tensor *grad,
                                             double decay, double rate_scale);
/* Bytes of state for what was added. */
MOE_API MOE_CHECKED moe_status moe_adamw_measure(uint64_t *bytes, const moe_adamw *opt);
/* Lends the state's memory and fills it: moments 0, step 0, masters from the parameters.  Enqueued.  After a failure to
   do so it is bound to no memory. */
MOE_API MOE_CHECKED moe_status moe_adamw_bind(moe_adamw *opt, moe_queue *queue, moe_span state);
/* One step over all parameters; enqueued, no wait, no allocation.  Where the global gradient norm is not
   finite nothing changes (step and moments included) and MOE_HEALTH_OVERFLOW is set. */
MOE_API MOE_CHECKED moe_status moe_adamw_step(moe_adamw *opt, moe_queue *queue);

typedef struct moe_adamw_info {
  uint64_t size;
  int64_t step; /* steps taken */
  double rate;  /* of the last step */
  double norm;  /* global gradient norm of the last step, before clipping, after loss_scale */
} moe_adamw_info;
MOE_INIT(moe_adamw_info)
/* Blocks. */
MOE_API MOE_CHECKED moe_status moe_adamw_read(moe_adamw_info *out, moe_adamw *opt, moe_queue *queue);

#ifdef __cplusplus
}
#endif
#endif
