/* moe/tape.h - a tape for gradients: operations run as they are recorded, and backward walks them in
   reverse.  The easy door: the tape owns its memory, an arena that grows while warming up and is reused
   after every reset.

   A value is an id.  Errors are sticky: after the first failure every operation returns the null value and
   does nothing, so a chain is checked once, by moe_tape_status.  A value used after moe_tape_reset is an
   error, never undefined. */
#ifndef MOE_TAPE_H
#define MOE_TAPE_H

#include <moe/layer.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moe_tape moe_tape;
typedef struct moe_value { /* {0}: no value */
  uint64_t id;
} moe_value;

/* What happens when a gradient is NaN, infinite, or >= health_limit in magnitude.  Each is looked at on the device, as
   every operation of a backward leaves it; the answer is there at the next wait of the queue.  What a tape has met and
   not told is lost when it is freed. */
typedef enum moe_health_policy {
  MOE_HEALTH_POLICY_OFF = 0,
  MOE_HEALTH_POLICY_COUNT = 1, /* moe_tape_health tells */
  MOE_HEALTH_POLICY_FAIL = 2   /* moe_queue_wait too: MOE_ERR_DATA, naming the node and the first bad element */
} moe_health_policy;

typedef struct moe_tape_desc {
  uint64_t size;
  uint64_t block;             /* bytes of an arena block; 0: 64 MiB */
  int64_t health_policy;      /* moe_health_policy */
  double health_limit;        /* > 0, of a gradient's values; 0: 1e10 */
  int64_t health_activations; /* 1: results are looked at as well, of operations that gradients can flow through; where
                                 they share a caller's memory it must live until the next backward, wait or reset */
} moe_tape_desc;
MOE_INIT(moe_tape_desc)

/* desc may be NULL.  All work of the tape goes to `queue`, which must outlive it. */
MOE_API MOE_CHECKED moe_status moe_tape_create(moe_tape **out, moe_queue *queue, const moe_tape_desc *desc);
/* NULL is fine.  Blocks until the work of its queue is done. */
MOE_API void moe_tape_free(moe_tape *tape);
/* Forgets all values and the error, and records again; keeps the memory.  Does not wait: the memory is reused in queue
   order. */
MOE_API void moe_tape_reset(moe_tape *tape);
/* The first error since create or reset, with its text in moe_last_error; MOE_OK where there is none. */
MOE_API MOE_CHECKED moe_status moe_tape_status(const moe_tape *tape);
/* 0: what follows is not recorded, so no gradient flows through it (a region without gradients); 1: it is.  Returns
   what was set before. */
MOE_API int64_t moe_tape_set_recording(moe_tape *tape, int64_t on);
/* Bytes of device memory held, and of it used since the last reset. */
MOE_API void moe_tape_memory(const moe_tape *tape, uint64_t *held, uint64_t *used);

/* ---- values ------------------------------------------------------------------------------------------------ */
/* The caller's packed tensor, which must stay unchanged until backward is done (in queue order).
   needs_grad 0: a constant. */
MOE_API moe_value moe_tape_leaf(moe_tape *tape, const moe_tensor *tensor, int64_t needs_grad);
/* A parameter: backward writes its gradient to `grad` (packed, same shape; F64 for an F64 tensor, else F32, BF16 or F16). */
MOE_API moe_value moe_tape_param(moe_tape *tape, const moe_tensor *tensor, const moe_tensor *grad);
/* The same tensor as a constant: no gradient flows through it. */
MOE_API moe_value moe_tape_detach(moe_tape *tape, moe_value v);
/* The tensor behind a value; valid until the next reset. */
MOE_API MOE_CHECKED moe_status moe_tape_tensor(moe_tensor *out, const moe_tape *tape, moe_value v);
/* Blocks; reads up to n elements, converted to double. */
MOE_API MOE_CHECKED moe_status moe_tape_read(moe_tape *tape, moe_value v, double *out, int64_t n);

/* ---- operations ------------------------------------------------------------------------------------------------
   Results are packed and new (reshape and detach share memory).  Floats keep their dtype; a and b of one call have the
   same one.  Dimensions count from 0; a double that is given is finite.  Each is differentiable any number of times. */
/* Shapes broadcast as numpy's do: aligned at the last dimension, an extent of 1 repeats. */
MOE_API moe_value moe_tape_add(moe_tape *tape, moe_value a, moe_value b);
MOE_API moe_value moe_tape_sub(moe_tape *tape, moe_value a, moe_value b);
MOE_API moe_value moe_tape_mul(moe_tape *tape, moe_value a, moe_value b);
MOE_API moe_value moe_tape_div(moe_tape *tape, moe_value a, moe_value b);
/* The larger one; NaN where either is.  Where they are equal each gets half of the gradient. */
MOE_API moe_value moe_tape_maximum(moe_tape *tape, moe_value a, moe_value b);
/* condition != 0 ? a : b.  condition: U8, I32 or a float; it has no gradient. */
MOE_API moe_value moe_tape_where(moe_tape *tape, moe_value condition, moe_value a, moe_value b);
/* a > b as 1 or 0, in their dtype; no gradient. */
MOE_API moe_value moe_tape_greater(moe_tape *tape, moe_value a, moe_value b);
MOE_API moe_value moe_tape_broadcast(moe_tape *tape, moe_value a, int64_t rank, const int64_t *shape);

MOE_API moe_value moe_tape_neg(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_scale(moe_tape *tape, moe_value a, double factor);
/* a^exponent; 0^0 is 1; a negative a wants a whole exponent, else NaN. */
MOE_API moe_value moe_tape_pow(moe_tape *tape, moe_value a, double exponent);
MOE_API moe_value moe_tape_exp(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_log(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_sqrt(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_tanh(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_sigmoid(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_relu(moe_tape *tape, moe_value a); /* derivative 0 at 0 */
MOE_API moe_value moe_tape_silu(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_erf(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_gelu(moe_tape *tape, moe_value a);      /* a (1 + erf(a/sqrt 2)) / 2 */
MOE_API moe_value moe_tape_gelu_tanh(moe_tape *tape, moe_value a); /* the tanh form */
/* The values in another float dtype (F64 <-> F32, and F32, BF16, F16 among each other); a itself in its own. */
MOE_API moe_value moe_tape_cast(moe_tape *tape, moe_value a, int64_t dtype);

/* Over all elements: [1], FP32 (FP64 in f64).  The sum and the mean of nothing are 0, the largest of nothing -infinity. */
MOE_API moe_value moe_tape_sum(moe_tape *tape, moe_value a);
MOE_API moe_value moe_tape_mean(moe_tape *tape, moe_value a);
/* Over n axes, which become extents of 1, or vanish unless `keep`.  In a's dtype, summed in FP32 (FP64).  The gradient
   of the largest goes to it, in equal parts where several are equal. */
MOE_API moe_value moe_tape_sum_axes(moe_tape *tape, moe_value a, int64_t n, const int64_t *axes, int64_t keep);
MOE_API moe_value moe_tape_mean_axes(moe_tape *tape, moe_value a, int64_t n, const int64_t *axes, int64_t keep);
MOE_API moe_value moe_tape_max_axes(moe_tape *tape, moe_value a, int64_t n, const int64_t *axes, int64_t keep);

MOE_API moe_value moe_tape_reshape(moe_tape *tape, moe_value a, int64_t rank, const int64_t *shape);
/* Dimension d of the result is dimension order[d] of a; `rank` entries. */
MOE_API moe_value moe_tape_permute(moe_tape *tape, moe_value a, const int64_t *order);
MOE_API moe_value moe_tape_slice(moe_tape *tape, moe_value a, int64_t dim, int64_t begin, int64_t end);
MOE_API moe_value moe_tape_concat(moe_tape *tape, const moe_value *parts, int64_t n, int64_t dim);
/* y[i,:] = x[ids[i],:], x [V,D], ids [n] I32: [n,D]; an id out of range gives a NaN row and MOE_HEALTH_ID. */
MOE_API moe_value moe_tape_gather_rows(moe_tape *tape, moe_value x, moe_value ids);
/* y[v,:] = sum over i with ids[i] = v of x[i,:], in order of i: [rows,D], x [n,D].  An id out of range sets
   MOE_HEALTH_ID and its row is left out. */
MOE_API moe_value moe_tape_scatter_rows(moe_tape *tape, moe_value x, moe_value ids, int64_t rows);
/* gather_rows under its usual name. */
MOE_API moe_value moe_tape_embedding(moe_tape *tape, moe_value table, moe_value ids);

/* op(a) op(b): the last two dimensions, each transposed if asked; those before them broadcast. */
MOE_API moe_value moe_tape_matmul(moe_tape *tape, moe_value a, moe_value b, int64_t transpose_a, int64_t transpose_b);

/* Over dimension `dim`. */
MOE_API moe_value moe_tape_softmax(moe_tape *tape, moe_value a, int64_t dim);
MOE_API moe_value moe_tape_log_softmax(moe_tape *tape, moe_value a, int64_t dim);
/* Over the last dimension, of extent D.  x * w / sqrt(mean(x^2) + eps), w [D]; and (x - mean) / sqrt(var + eps) * w + b,
   var the mean of (x - mean)^2, b the null value for none. */
MOE_API moe_value moe_tape_rms_norm(moe_tape *tape, moe_value x, moe_value w, double eps);
MOE_API moe_value moe_tape_layer_norm(moe_tape *tape, moe_value x, moe_value w, moe_value b, double eps);

/* mean over T of -log softmax(logits)[target]: logits [T,V], targets [T] (I32): [1], FP32 (FP64 in f64). */
MOE_API moe_value moe_tape_cross_entropy(moe_tape *tape, moe_value logits, moe_value targets);
typedef struct moe_cross_entropy {
  uint64_t size;
  int64_t ignore;       /* 1: rows whose target is ignore_index count for nothing; none left: the loss is 0 */
  int64_t ignore_index; /* any I32 */
  double smoothing;     /* s in [0,1): (1-s) * loss + s * mean over the classes of -log softmax */
} moe_cross_entropy;
MOE_INIT(moe_cross_entropy)
MOE_API moe_value moe_tape_cross_entropy_options(moe_tape *tape, moe_value logits, moe_value targets,
                                                 const moe_cross_entropy *options);

/* Each element is 0 with probability p, else a/(1-p).  Which ones is a function of (seed, stream, step, index) alone:
   the same on every device, and again in a recomputed segment.  step: [1] I32 or I64 on the device, or the null
   value.  p in [0,1). */
MOE_API moe_value moe_tape_dropout(moe_tape *tape, moe_value a, double p, uint64_t seed, int64_t stream,
                                   moe_value step);

/* ---- the Mixture-of-Experts layer ---------------------------------------------------------------------------------- */
typedef struct moe_tape_moe {
  uint64_t size;
  moe_span params, grads; /* the layer's; grads may be absent: nothing is written, dx still flows */
  moe_tensor mask, ids, aux_scale;
  int64_t sequences;
  /* 1: parameters need gradients though grads is absent; ask moe_tape_gradients for them. */
  int64_t differentiate;
} moe_tape_moe;
MOE_INIT(moe_tape_moe)
/* x [T,D] to [T,D].  The parameters' gradients go to `grads`.  state, where not NULL, receives the
   layer's state (views and metrics), valid until the next reset.  A fused operation: its gradients are differentiable
   with MOE_DECOMPOSE only, which computes the layer again by primitive operations, the choice of experts fixed.
   The balance and z losses are part of whatever is differentiated that depends on y; what depends on y through gradients
   only has had them already, in those. */
MOE_API moe_value moe_tape_moe_layer(moe_tape *tape, moe_layer *layer, moe_value x, const moe_tape_moe *options,
                                     moe_layer_state *state);
/* The parameter `index` of moe_layer_param, as the call that made y used it: what moe_tape_gradients and moe_hvp take.
   The null value where it is not trainable. */
MOE_API moe_value moe_tape_moe_param(moe_tape *tape, moe_value y, int64_t index);

/* ---- the caller's own functions -------------------------------------------------------------------------------------- */
/* What a function's callbacks are given.
   forward sets out[i], each a result of the tape's operations, a moe_tape_empty that it has filled, or any other value of
   the tape (an input too: the caller receives a new value of the same memory).  It may read and wait.  Nothing that it
   does is recorded, and moe_tape_set_recording is put back.  saved[i] is for values that backward needs besides inputs
   and outputs; null at first, and may stay so.
   backward is given the gradients of the outputs, dout[i] (null: none flows there), and sets din[i] (null at first, and
   where none flows) to those of the inputs, in their shapes and dtypes, by the tape's operations.  With MOE_CREATE_GRAPH
   they are recorded: a second derivative exists, by way of in, out and dout, not of saved.  A backward that differentiates
   operations of its own calls moe_tape_set_recording(tape, 1) before them, then moe_tape_gradients, with MOE_CREATE_GRAPH
   where set_recording returned 1 (without it the second derivative lacks that part, and nothing says so).
   It may run more than once, and so may forward, inside a recomputed segment.
   An error that either returns, or that an operation in it meets, is the tape's status, with the function's name before
   its text; after moe_tape_reset the tape is as new.  A callback returns to its caller (no longjmp, no exception), and
   moe_tape_backward, moe_tape_reset and moe_tape_free of the same tape are refused in it (MOE_ERR_STATE). */
typedef struct moe_tape_call {
  uint64_t size;
  moe_tape *tape;
  const moe_value *in;
  moe_value *out, *saved;
  int64_t n_in, n_out, n_saved;
} moe_tape_call;

typedef struct moe_function {
  uint64_t size;
  const char *name; /* copied, 63 bytes at most; NULL: "custom" */
  moe_status (*forward)(void *user, const moe_tape_call *call);
  /* NULL: MOE_ERR_NO_DERIVATIVE where a gradient is wanted. */
  moe_status (*backward)(void *user, const moe_tape_call *call, const moe_value *dout, moe_value *din);
  /* Called once for each moe_tape_custom, also for one that failed, when nothing will call the others any more: at the
     tape's next reset (which does not wait for the device) or its end, the last call's first; at once where there is no
     memory to note it.  May be NULL. */
  void (*release)(void *user);
  void *user;
  int64_t n_out, n_saved; /* 1..512 and 0..4096 */
} moe_function;
MOE_INIT(moe_function)
/* One node, of n_in values (0..4096) that give n_out.  out may be `in`; null values after an error. */
MOE_API MOE_CHECKED moe_status moe_tape_custom(moe_value *out, moe_tape *tape, const moe_function *function,
                                               const moe_value *in, int64_t n_in);
/* A new packed tensor in the tape's memory, of any dtype, its contents undefined: for a custom forward to fill. */
MOE_API moe_value moe_tape_empty(moe_tape *tape, int64_t dtype, int64_t rank, const int64_t *shape);

/* A segment whose intermediate results are not kept: they are computed again in backward (gradient checkpointing), with
   the same choice of experts (even where the correction bias has moved since) and the same dropout, so gradients are the
   same to the last bit.  segment sets
   out[0..n_out-1] from `in`; it runs now, and once more in each backward that passes it, until the next reset, so `user`
   must live as long.  It must do the same each time: other shapes, or other layer calls, are MOE_ERR_STATE.  What a
   custom function's callbacks may not do, it may not either.
   Gradients flow to `in`, to values from outside that it uses, and to parameters, made before or inside.
   Values made inside, and states of layers, are gone when it ends (but for leaves of the caller's memory that need
   gradients): what is wanted later, of any dtype, is to be an output.  With MOE_CREATE_GRAPH the second run is kept, to be differentiated.
   Segments may lie inside one another, 7 deep. */
typedef moe_status moe_segment(void *user, moe_tape *tape, const moe_value *in, int64_t n_in, moe_value *out,
                               int64_t n_out);
/* n_out: 1..512, n_in: 0..4096.  out may be `in`; null values after an error. */
MOE_API MOE_CHECKED moe_status moe_tape_recompute(moe_value *out, int64_t n_out, moe_tape *tape, moe_segment *segment,
                                                  void *user, const moe_value *in, int64_t n_in);

/* ---- backward ---------------------------------------------------------------------------------------------------- */
typedef enum moe_backward_flags {
  MOE_CREATE_GRAPH = 1, /* gradients are values that can be differentiated again */
  MOE_ACCUMULATE = 2,   /* parameters' gradient tensors and layers' grads are added to, not overwritten */
  MOE_DECOMPOSE = 4     /* fused operations too: their gradients come from primitive operations */
} moe_backward_flags;

/* Gradients of `of` for every value it depends on, the parameters' written to their tensors.  seed: the gradient of
   `of`, in its shape and dtype; the null value, for one element: 1.  Each call starts from clean gradients.
   Differentiating a gradient of a fused operation is MOE_ERR_NO_SECOND_DERIVATIVE, naming the node; MOE_DECOMPOSE in the
   call that gave the gradient avoids it. */
MOE_API MOE_CHECKED moe_status moe_tape_backward(moe_tape *tape, moe_value of, moe_value seed, int64_t flags);
/* The gradient of v from the last moe_tape_backward; the null value where none flowed.  Of a parameter, without
   MOE_CREATE_GRAPH: its gradient tensor. */
MOE_API moe_value moe_tape_grad(const moe_tape *tape, moe_value v);
/* grads[i] = sum over j of the gradient of of[j], times seeds[j], with respect to wrt[i]; the null value where none
   flows.  Writes no parameter's gradient tensor.  seeds may be NULL: each `of` has one element, and 1 is meant.
   MOE_ERR_INVALID where an `of` depends on nothing that needs a gradient, as gradients do not without MOE_CREATE_GRAPH.
   flags: MOE_CREATE_GRAPH, MOE_DECOMPOSE.  May be called inside custom functions (what is to be differentiated there
   must have been recorded) and segments.  grads may be `of` or wrt. */
MOE_API MOE_CHECKED moe_status moe_tape_gradients(moe_value *grads, moe_tape *tape, const moe_value *of,
                                                  const moe_value *seeds, int64_t n_of, const moe_value *wrt,
                                                  int64_t n_wrt, int64_t flags);

/* Hessian-vector products: hv[i] = d/d wrt[i] of sum over j of <d of/d wrt[j], v[j]>, by two backward passes, in the
   memory of two.  of: one element.  v[j]: shape and dtype of wrt[j].  The null value where it is identically 0.
   flags: MOE_DECOMPOSE. */
MOE_API MOE_CHECKED moe_status moe_hvp(moe_value *hv, moe_tape *tape, moe_value of, const moe_value *wrt,
                                       const moe_value *v, int64_t n, int64_t flags);

/* ---- checks -------------------------------------------------------------------------------------------------------- */
typedef struct moe_tape_health_info {
  uint64_t size;
  int64_t bad;    /* gradients (and results) with a bad element, since the last call; one that several operations add
                     to counts each time, one that an operation hands on as it is does not */
  char name[64];  /* the operation that gave the first one, in order of the work, "" where there is none; "silu: mul"
                     for an operation inside the expansion of another, "seed" for a seed given to backward */
  int64_t node;   /* its place on the tape; -1: it has none */
  int64_t input;  /* it was the gradient of that input; -1: a result */
  int64_t output; /* it was that result; -1: a gradient */
  int64_t index;  /* of the first bad element, in packed order; at most 2^32-2 */
} moe_tape_health_info;
MOE_INIT(moe_tape_health_info)
/* Blocks; clears what it tells, which includes what moe_queue_wait has failed for.  Any number of steps and resets may lie
   between two calls.  MOE_ERR_STATE for a tape whose policy is off. */
MOE_API MOE_CHECKED moe_status moe_tape_health(moe_tape_health_info *out, moe_tape *tape);

/* Records the function under test: n inputs to one value (any float shape). */
typedef moe_value moe_recorded(void *user, moe_tape *tape, const moe_value *in, int64_t n);
typedef struct moe_gradcheck_desc {
  uint64_t size;
  double step;      /* of the central differences; 0: 1e-4 */
  double threshold; /* of |n - a| / max(|n| + |a|, 1e-8); 0: 1e-4 */
  int64_t second;   /* 1: the gradient of <gradient, random direction> is checked instead */
  int64_t flags;    /* MOE_DECOMPOSE */
  uint64_t seed;    /* of the random weights that make one number of the output, and of the direction */
  int64_t elements; /* at most so many of each input, evenly spread; 0: all */
} moe_gradcheck_desc;
MOE_INIT(moe_gradcheck_desc)
typedef struct moe_gradcheck_result {
  uint64_t size;
  int64_t checked;          /* elements */
  int64_t input, index;     /* the worst one */
  double numeric, analytic; /* there */
  double error;
} moe_gradcheck_result;
MOE_INIT(moe_gradcheck_result)
/* Central differences in f64 against the tape's gradients, on a tape of its own.  inputs: n packed F64 tensors, changed
   while it runs and put back.  MOE_ERR_CHECK where the worst error is over the threshold, with input, index and both
   numbers; out (may be NULL) is filled then too.  MOE_ERR_UNSUPPORTED on a device without fp64.
   Differences see values only.  They are no measure across a jump or a kink (another choice of experts), and of a layer
   with balance or z losses only with `second`: those are part of its gradient and not of y. */
MOE_API MOE_CHECKED moe_status moe_gradcheck(moe_gradcheck_result *out, moe_queue *queue, moe_recorded *function,
                                             void *user, const moe_tensor *inputs, int64_t n,
                                             const moe_gradcheck_desc *desc);

#ifdef __cplusplus
}
#endif
#endif
