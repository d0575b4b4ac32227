/* moe/layer.h - one Mixture-of-Experts layer: router, routed experts, shared experts, balance losses.

     logits = x router' + router_bias                       [T,E], FP32 (FP64 in f64)
     y      = routed experts(x, logits) + gate_s(x) * shared expert(x)
   where gate_s(x) = sigmoid(x shared_gate') if asked for, else 1, and the shared expert is one MLP of width
   d_shared with the activation of the routed ones (several shared experts are one of their summed width).
   The losses are reported and their gradients added to the logits gradient; they are not part of y. */
#ifndef MOE_LAYER_H
#define MOE_LAYER_H

#include <moe/experts.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moe_layer moe_layer;

typedef struct moe_layer_desc {
  uint64_t size;
  int64_t d_model, d_ff, n_experts; /* D, F, E */
  int64_t dtype;                    /* F64, F32, BF16, F16: x, y, parameters, kept data */
  const moe_selection_options *selection;
  const moe_weights_options *weights;
  const moe_activation *activation;
  int64_t router_bias, hidden_bias, down_bias; /* 1: there are such parameters */
  int64_t correction_bias;                     /* 1: there is one (grouped sigmoid, or softmax_bias) */
  int64_t d_shared;                            /* width of the shared expert; 0: none */
  int64_t shared_gate;                         /* 1: it is scaled by sigmoid(x shared_gate') */
  /* Gradients of balance_coef * balance + z_coef * z join the logits gradient (0: none).  Probabilities of the
     balance loss: MOE_SOFTMAX, or MOE_SIGMOID normalized over the experts. */
  double balance_coef, z_coef;
  int64_t balance_scoring; /* 0: MOE_SOFTMAX */
  int64_t frozen_experts;  /* 1: routed experts' parameters get no gradients (dx still flows) */
  int64_t forward_strategy, backward_strategy, reduction;
} moe_layer_desc;
MOE_INIT(moe_layer_desc)

/* Resolves and compiles all that forward and backward need; see moe_experts_create. */
MOE_API MOE_CHECKED moe_status moe_layer_create(moe_layer **out, moe_context *ctx, const moe_layer_desc *desc);
MOE_API void moe_layer_free(moe_layer *layer);

typedef struct moe_layer_bytes {
  uint64_t size;
  uint64_t params, grads; /* do not depend on T */
  uint64_t saved;         /* FP32 logits, the branch's kept set, the shared expert's hidden rows, losses, counts */
  uint64_t scratch;       /* forward and backward may share it */
  uint64_t inference;     /* scratch of moe_layer_inference */
} moe_layer_bytes;
MOE_INIT(moe_layer_bytes)
/* For T tokens in `sequences` equal sequences (0: 1). */
MOE_API MOE_CHECKED moe_status moe_layer_measure(moe_layer_bytes *out, const moe_layer *layer, int64_t tokens,
                                                 int64_t sequences);

typedef struct moe_layer_param_info {
  uint64_t size;
  const char *name;  /* static */
  int64_t trainable; /* 0: no gradient (correction_bias; frozen experts) */
  int64_t decays;    /* 1: a matrix, to which weight decay is usually applied */
} moe_layer_param_info;
MOE_INIT(moe_layer_param_info)
/* Parameters in order, packed, `index` from 0 (MOE_ERR_INVALID past the last): router [E,D], router_bias [E],
   correction_bias [E] (FP32, or FP64), gate, up [E,F,D], down [E,D,F], gate_bias, up_bias [E,F], down_bias [E,D],
   shared_gate_proj, shared_up [Fs,D], shared_down [D,Fs], shared_gate [1,D]; absent ones are not listed.
   param: in dtype, inside params.  grad: FP32 (FP64 in f64), inside grads; no tensor where not trainable.
   Either may be NULL, with its span ignored. */
MOE_API MOE_CHECKED moe_status moe_layer_param(moe_tensor *param, moe_tensor *grad, moe_layer_param_info *info,
                                               const moe_layer *layer, moe_span params, moe_span grads, int64_t index);
/* All parameters (frozen ones too, correction_bias not), and those that one token uses. */
MOE_API MOE_CHECKED moe_status moe_layer_parameter_counts(int64_t *all, int64_t *active, const moe_layer *layer);
/* Matrices: normal, standard deviation stddev; biases and correction_bias 0.  The same seed gives the same
   bits on every device of every backend. */
MOE_API MOE_CHECKED moe_status moe_layer_init(moe_layer *layer, moe_queue *queue, moe_span params, uint64_t seed,
                                              double stddev);

typedef struct moe_layer_io {
  uint64_t size;
  moe_tensor x, y;      /* [T,D] in, out (forward) */
  moe_tensor dy, dx;    /* [T,D] in, out (backward); dx may be absent: not computed.  No output overlaps an input */
  moe_tensor ids;       /* [T,K] in, I32, packed: replay of these choices */
  moe_tensor mask;      /* [T] in, U8: 0 leaves the token out of the losses and counts (it is still routed) */
  moe_tensor aux_scale; /* [1] in, FP32 (FP64): multiplies the losses' gradients, as the main loss is scaled */
  int64_t sequences;    /* S: T is S equal sequences, losses are per sequence; 0: 1, the micro-batch form */
  int64_t accumulate;   /* backward: parameter gradients are added to what grads holds */
  moe_span params, grads, saved, scratch;
} moe_layer_io;
MOE_INIT(moe_layer_io)

/* A caller-owned value, as moe_state. */
typedef struct moe_layer_state {
  uint64_t size;
  const moe_layer *layer;
  int64_t tokens, sequences;
  moe_tensor x, mask;
  moe_span saved;
} moe_layer_state;
MOE_INIT(moe_layer_state)

/* Enqueue only: nothing is allocated, nothing waits, so both may be captured in a CUDA graph. */
MOE_API MOE_CHECKED moe_status moe_layer_forward(moe_layer *layer, moe_queue *queue, const moe_layer_io *io,
                                                 moe_layer_state *state);
MOE_API MOE_CHECKED moe_status moe_layer_inference(moe_layer *layer, moe_queue *queue, const moe_layer_io *io);
/* Reads io->dy, params, aux_scale, scratch; writes dx and grads. */
MOE_API MOE_CHECKED moe_status moe_layer_backward(moe_layer *layer, moe_queue *queue, const moe_layer_state *state,
                                                  const moe_layer_io *io);

/* Views inside a state's saved span; no wait. */
MOE_API MOE_CHECKED moe_status moe_layer_route_ids(moe_tensor *ids, const moe_layer_state *state); /* [T,K] I32 */
MOE_API MOE_CHECKED moe_status moe_layer_route_weights(moe_tensor *weights, const moe_layer_state *state); /* [T,K] */
MOE_API MOE_CHECKED moe_status moe_layer_logits(moe_tensor *logits, const moe_layer_state *state);         /* [T,E] */
MOE_API MOE_CHECKED moe_status moe_layer_counts(moe_tensor *counts, const moe_layer_state *state); /* [S,E] I32 */
MOE_API MOE_CHECKED moe_status moe_layer_losses(moe_tensor *losses, const moe_layer_state *state); /* [2]: balance, z */

typedef struct moe_layer_metrics {
  uint64_t size;
  double balance, z; /* losses, without coefficients */
  double entropy;    /* of the load, in nats; log(E) is even */
  double imbalance;  /* largest load over mean load; 1 is even */
  int64_t dead;      /* experts without a token */
  int64_t slots;     /* counted: unmasked tokens times K */
} moe_layer_metrics;
MOE_INIT(moe_layer_metrics)
/* Blocks.  load, where not NULL, receives E counts. */
MOE_API MOE_CHECKED moe_status moe_layer_metrics_read(moe_layer_metrics *out, int32_t *load, moe_layer *layer,
                                                      moe_queue *queue, const moe_layer_state *state);

/* correction_bias[e] += rate * sign(mean load - load[e]); counts [S,E] I32 packed, summed over S (the views of
   several micro-batches, copied together).  Only calls of this function move the bias: evaluation and
   recompute never count. */
MOE_API MOE_CHECKED moe_status moe_layer_bias_step(moe_layer *layer, moe_queue *queue, moe_span params,
                                                   const moe_tensor *counts, double rate);

/* As moe_experts_explain, for the whole layer. */
MOE_API MOE_CHECKED moe_status moe_layer_explain(const moe_layer *layer, int64_t tokens, char *text, uint64_t bytes,
                                                 uint64_t *needed);

#ifdef __cplusplus
}
#endif
#endif
