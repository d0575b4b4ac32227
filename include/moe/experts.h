/* moe/experts.h - the routed expert branch: selection, routing weights, expert MLPs, ordered combine, and
   every gradient.  Tensors in, tensors out; memory is the caller's; calls only enqueue.

   T tokens, D model width, F expert width, E experts, K experts chosen per token, R = T*K < 2^31 routed
   rows.  Formulas: doc/math.md. */
#ifndef MOE_EXPERTS_H
#define MOE_EXPERTS_H

#include <moe/context.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- options ---------------------------------------------------------------------------------------------- */
typedef enum moe_scoring {
  MOE_SOFTMAX = 1,        /* softmax over every expert, then the chosen are taken */
  MOE_SIGMOID = 2,        /* pointwise */
  MOE_SOFTMAX_CHOSEN = 3, /* softmax over the K chosen slots */
  MOE_SQRT_SOFTPLUS = 4   /* sqrt(log(1 + exp(l))) */
} moe_scoring;

/* Routing weights w[t,k] = scale * score(l) / (renormalize ? sum over the K slots + epsilon : 1), in FP32
   (FP64 for f64).  Nothing is inferred: scoring and scale must be set. */
typedef struct moe_weights_options {
  uint64_t size;
  int64_t scoring;     /* moe_scoring */
  int64_t renormalize; /* over the slots of the token; with MOE_SOFTMAX_CHOSEN it changes nothing */
  double scale;        /* finite, > 0; after renormalization */
  double epsilon;      /* >= 0; 0: the shifted form, finite and exact however negative the logits are */
} moe_weights_options;
MOE_INIT(moe_weights_options)

typedef enum moe_selection {
  MOE_SELECT_SOFTMAX = 1,        /* the K largest of softmax(logits) */
  MOE_SELECT_GROUPED_SIGMOID = 2 /* the K largest of sigmoid(logits) + bias within the best groups */
} moe_selection;

/* Exact ties go to the lower expert id; a NaN logit ranks last; slots are ordered by descending selection
   score, then id. */
typedef struct moe_selection_options {
  uint64_t size;
  int64_t kind;  /* moe_selection */
  int64_t top_k; /* 1..E */
  /* Grouped sigmoid only (0 elsewhere): */
  int64_t groups;          /* a divisor of E, at most 1024 */
  int64_t selected_groups; /* 1..groups; top_k <= selected_groups * E/groups */
  int64_t group_top_two;   /* a group scores by the sum of its two best (E/groups >= 2), else by its best */
  /* The selection's own inference weights (moe_router_select): */
  int64_t renormalize;
  double scale; /* grouped sigmoid: finite, > 0; softmax: 0 or 1 */
  /* 1: a correction bias is legal with softmax selection too, added to the probabilities. */
  int64_t softmax_bias;
} moe_selection_options;
MOE_INIT(moe_selection_options)

typedef enum moe_activation_kind {
  MOE_IDENTITY = 1,
  MOE_RELU = 2,
  MOE_RELU2 = 3, /* relu(x)^2 */
  MOE_GELU = 4,  /* x * (1 + erf(x/sqrt 2)) / 2 */
  MOE_GELU_TANH = 5,
  MOE_SILU = 6, /* x * sigmoid(alpha x) */
  MOE_ACT_SIGMOID = 7
} moe_activation_kind;

/* Gated: a = f(min(g, limit)) * (clamp(u, -limit, limit) + up_offset), g and u the gate's and the up
   projection's outputs (SwiGLU: SILU; GEGLU: GELU; ReGLU: RELU; gpt-oss: SILU, alpha 1.702, limit 7,
   up_offset 1).  Plain: a = f(min(u, limit)).  Exactly at the limit the gradient passes. */
typedef struct moe_activation {
  uint64_t size;
  int64_t kind; /* moe_activation_kind */
  int64_t gated;
  double alpha;     /* SILU; 0 means 1 */
  double limit;     /* 0: none; > 0 */
  double up_offset; /* gated */
} moe_activation;
MOE_INIT(moe_activation)

/* Which kernels the products get: SCALAR the portable FP32-accumulating ones; AUTO the best by capability (a failure
   is an error, never retried); TENSOR matrix-unit kernels, refused at create where there are none.  Tensors that none
   of these can read are MOE_ERR_INVALID before anything runs; those of NVIDIA GPUs read every layout. */
typedef enum moe_strategy { MOE_AUTO = 0, MOE_SCALAR = 1, MOE_TENSOR = 2 } moe_strategy;
/* How <dA', A> of a row is summed for the routing-weight gradient: one accumulator over ascending F, or a
   fixed tree. */
typedef enum moe_reduction { MOE_SERIAL = 0, MOE_PLANE = 1 } moe_reduction;

/* Gradients, as bits. */
typedef enum moe_grad {
  MOE_GRAD_INPUT = 1,
  MOE_GRAD_LOGITS = 2,
  MOE_GRAD_GATE = 4,
  MOE_GRAD_UP = 8,
  MOE_GRAD_DOWN = 16,
  MOE_GRAD_GATE_BIAS = 32,
  MOE_GRAD_UP_BIAS = 64,
  MOE_GRAD_DOWN_BIAS = 128
} moe_grad;

/* ---- routing alone ------------------------------------------------------------------------------------------ */
typedef struct moe_router moe_router;
typedef struct moe_router_desc {
  uint64_t size;
  int64_t n_experts;
  int64_t dtype;        /* of the arithmetic and of weights: F32 or F64 */
  int64_t logits_dtype; /* 0: as dtype */
  const moe_selection_options *selection;
  const moe_weights_options *weights;
} moe_router_desc;
MOE_INIT(moe_router_desc)

MOE_API MOE_CHECKED moe_status moe_router_create(moe_router **out, moe_context *ctx, const moe_router_desc *desc);
MOE_API void moe_router_free(moe_router *router);
/* ids [T,K] I32 and, where given, the selection's own inference weights [T,K]; all packed.  logits [T,E].
   bias [E] FP32 (FP64 in f64), or no tensor. */
MOE_API MOE_CHECKED moe_status moe_router_select(moe_router *router, moe_queue *queue, const moe_tensor *ids,
                                                 const moe_tensor *weights, const moe_tensor *logits,
                                                 const moe_tensor *bias);
/* Weights [T,K] for given ids [T,K], which may repeat.  An id outside 0..E-1 makes its token's row NaN and sets
   MOE_HEALTH_ID; other rows are right. */
MOE_API MOE_CHECKED moe_status moe_router_weights(moe_router *router, moe_queue *queue, const moe_tensor *weights,
                                                  const moe_tensor *logits, const moe_tensor *ids);
/* dlogits [T,E] (every element written; the logits' dtype or FP32) from dweights [T,K] for fixed ids; with
   MOE_SOFTMAX experts that were not chosen have theirs too. */
MOE_API MOE_CHECKED moe_status moe_router_weights_backward(moe_router *router, moe_queue *queue,
                                                           const moe_tensor *dlogits, const moe_tensor *dweights,
                                                           const moe_tensor *logits, const moe_tensor *ids);

/* ---- the branch --------------------------------------------------------------------------------------------- */
typedef struct moe_experts moe_experts;
typedef struct moe_experts_desc {
  uint64_t size;
  int64_t d_model, d_ff, n_experts; /* D, F, E */
  int64_t dtype;                    /* storage of x, y, weights, kept and scratch data: F64, F32, BF16, F16 */
  int64_t logits_dtype;             /* 0: F32 (F64 in f64) */
  int64_t weight_grad_dtype;        /* 0: F32 (F64 in f64); BF16, F16 */
  const moe_selection_options *selection;
  const moe_weights_options *weights;
  const moe_activation *activation;
  int64_t hidden_bias; /* 1: gate_bias (gated) and up_bias are given */
  int64_t down_bias;
  int64_t forward_strategy, backward_strategy; /* moe_strategy */
  int64_t reduction;                           /* moe_reduction */
  int64_t wanted;                              /* gradients ever asked for (moe_grad bits); 0: all there are */
  /* Layouts of the weights that will come: gate and up [E,F,D], down [E,D,F], strides in elements, so that
     halves of one [E,2F,D], interleaved rows and transposed [E,D,2F] are views.  Rank 0: packed. */
  moe_tensor gate, up, down;
} moe_experts_desc;
MOE_INIT(moe_experts_desc)

/* Checks every range, resolves and compiles every kernel that forward and backward can need; a call after
   it cannot return MOE_ERR_UNSUPPORTED.  MOE_ERR_INVALID names the member, wanted and got. */
MOE_API MOE_CHECKED moe_status moe_experts_create(moe_experts **out, moe_context *ctx, const moe_experts_desc *desc);
MOE_API void moe_experts_free(moe_experts *experts);

typedef struct moe_experts_bytes {
  uint64_t size;
  uint64_t saved;   /* lives from forward to the last backward: H [R,F or 2F], weights, ids, offs and the two maps */
  uint64_t scratch; /* lives inside a call; forward and backward may share it */
} moe_experts_bytes;
MOE_INIT(moe_experts_bytes)
/* For T tokens and the gradients wanted (0: inference, saved 0). */
MOE_API MOE_CHECKED moe_status moe_experts_measure(moe_experts_bytes *out, const moe_experts *experts, int64_t tokens,
                                                   int64_t wanted);

typedef struct moe_experts_io {
  uint64_t size;
  moe_tensor x;               /* [T,D] in */
  moe_tensor logits;          /* [T,E] in */
  moe_tensor correction_bias; /* [E] in, FP32 (FP64 in f64); only with grouped sigmoid (or softmax_bias) */
  moe_tensor ids;             /* [T,K] in, I32, packed: replay of these choices; no selection runs */
  moe_tensor gate, up, down;  /* in, laid out as declared; plain activations have no gate */
  moe_tensor gate_bias, up_bias, down_bias; /* [E,F], [E,F], [E,D] in, where declared */
  moe_tensor y;                             /* [T,D] out (forward) */
  moe_span saved, scratch;                  /* offsets multiples of 16 */
} moe_experts_io;
MOE_INIT(moe_experts_io)

/* What a forward left for its backward: a value the caller owns.  It names the caller's x, logits and saved
   span, holds no copy of the model, and serves any number of backward calls, from any thread.  Weights,
   x, logits and saved must not change in between. */
typedef struct moe_state {
  uint64_t size;
  const moe_experts *experts;
  int64_t tokens, wanted;
  moe_tensor x, logits;
  moe_span saved;
} moe_state;
MOE_INIT(moe_state)

/* forward keeps what the descriptor's gradients need; forward_selected what `wanted` needs; inference
   nothing (saved may be absent).  No token is dropped.  On an error *state is unchanged. */
MOE_API MOE_CHECKED moe_status moe_experts_forward(moe_experts *experts, moe_queue *queue, const moe_experts_io *io,
                                                   moe_state *state);
MOE_API MOE_CHECKED moe_status moe_experts_forward_selected(moe_experts *experts, moe_queue *queue,
                                                            const moe_experts_io *io, int64_t wanted, moe_state *state);
MOE_API MOE_CHECKED moe_status moe_experts_inference(moe_experts *experts, moe_queue *queue, const moe_experts_io *io);
/* View of the chosen ids [T,K] I32 inside the state's saved span.  No copy, no wait. */
MOE_API MOE_CHECKED moe_status moe_experts_route_ids(moe_tensor *ids, const moe_state *state);
/* View of the routing weights [T,K] likewise. */
MOE_API MOE_CHECKED moe_status moe_experts_route_weights(moe_tensor *weights, const moe_state *state);

typedef struct moe_experts_grads {
  uint64_t size;
  moe_tensor dy;                /* [T,D] in */
  moe_tensor dx;                /* [T,D] out, overwritten; overlaps neither x nor dy */
  moe_tensor dlogits;           /* [T,E] out, overwritten; the logits' dtype or FP32 */
  moe_tensor dgate, dup, ddown; /* out, weight_grad_dtype, any strides */
  moe_tensor dgate_bias, dup_bias, ddown_bias;
  int64_t accumulate; /* 1: weight and bias gradients are added to what is there */
} moe_experts_grads;
MOE_INIT(moe_experts_grads)

/* All gradients of the state's `wanted`; or the subset `wanted` of it.  What is not asked for is neither
   launched nor written.  io: weights, biases and scratch are read.  MOE_ERR_NO_DERIVATIVE where the state
   was made for fewer gradients. */
MOE_API MOE_CHECKED moe_status moe_experts_backward(moe_experts *experts, moe_queue *queue, const moe_state *state,
                                                    const moe_experts_io *io, const moe_experts_grads *grads);
MOE_API MOE_CHECKED moe_status moe_experts_backward_selected(moe_experts *experts, moe_queue *queue,
                                                             const moe_state *state, const moe_experts_io *io,
                                                             const moe_experts_grads *grads, int64_t wanted);

/* One line per step, "forward up: ggemm_rows:portable", with the reason where a better implementation does
   not serve.  Writes at most `bytes` with a closing NUL; *needed, where given, is the full length + 1. */
MOE_API MOE_CHECKED moe_status moe_experts_explain(const moe_experts *experts, int64_t tokens, char *text,
                                                   uint64_t bytes, uint64_t *needed);

/* Parameters of a layer: all, and those one token uses: router + (E or K) * per_expert + shared. */
MOE_API MOE_CHECKED moe_status moe_parameter_counts(int64_t *all, int64_t *active, int64_t router, int64_t per_expert,
                                                    int64_t n_experts, int64_t top_k, int64_t shared);

#ifdef __cplusplus
}
#endif
#endif
