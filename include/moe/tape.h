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

typedef struct moe_tape_desc {
  uint64_t size;
  uint64_t block; /* bytes of an arena block; 0: 64 MiB */
} moe_tape_desc;
MOE_INIT(moe_tape_desc)

/* desc may be NULL.  All work of the tape goes to `queue`, which must outlive it. */
MOE_API MOE_CHECKED moe_status moe_tape_create(moe_tape **out, moe_queue *queue, const moe_tape_desc *desc);
/* NULL is fine.  Blocks until the work of its queue is done. */
MOE_API void moe_tape_free(moe_tape *tape);
/* Forgets all values and the error; keeps the memory.  Does not wait: the memory is reused in queue order. */
MOE_API void moe_tape_reset(moe_tape *tape);
/* The first error since create or reset, with its text in moe_last_error; MOE_OK where there is none. */
MOE_API MOE_CHECKED moe_status moe_tape_status(const moe_tape *tape);
/* Bytes of device memory held, and of it used since the last reset. */
MOE_API void moe_tape_memory(const moe_tape *tape, uint64_t *held, uint64_t *used);

/* ---- values ------------------------------------------------------------------------------------------------ */
/* The caller's packed tensor, which must stay unchanged until backward is done (in queue order).
   needs_grad 0: a constant. */
MOE_API moe_value moe_tape_leaf(moe_tape *tape, const moe_tensor *tensor, int64_t needs_grad);
/* A parameter: backward writes its gradient to `grad` (packed, same shape, any float). */
MOE_API moe_value moe_tape_param(moe_tape *tape, const moe_tensor *tensor, const moe_tensor *grad);
/* The tensor behind a value; valid until the next reset. */
MOE_API MOE_CHECKED moe_status moe_tape_tensor(moe_tensor *out, const moe_tape *tape, moe_value v);
/* Blocks; reads up to n elements, converted to double. */
MOE_API MOE_CHECKED moe_status moe_tape_read(moe_tape *tape, moe_value v, double *out, int64_t n);

/* ---- operations; shapes as written, packed; floats keep their dtype ------------------------------------------- */
MOE_API moe_value moe_tape_add(moe_tape *tape, moe_value a, moe_value b); /* same shape */
MOE_API moe_value moe_tape_mul(moe_tape *tape, moe_value a, moe_value b); /* same shape */
MOE_API moe_value moe_tape_scale(moe_tape *tape, moe_value a, double factor);
MOE_API moe_value moe_tape_reshape(moe_tape *tape, moe_value a, int64_t rank, const int64_t *shape);
/* op(a) op(b), rank 2, each transposed if asked. */
MOE_API moe_value moe_tape_matmul(moe_tape *tape, moe_value a, moe_value b, int64_t transpose_a, int64_t transpose_b);
/* rows of table [V,D] at ids [n] (I32): [n,D]; an id out of range gives a NaN row and MOE_HEALTH_ID. */
MOE_API moe_value moe_tape_embedding(moe_tape *tape, moe_value table, moe_value ids);
/* x * w / sqrt(mean(x^2) + eps) over the last dimension; x [T,D], w [D]. */
MOE_API moe_value moe_tape_rms_norm(moe_tape *tape, moe_value x, moe_value w, double eps);
/* mean over T of -log softmax(logits)[target]: logits [T,V], targets [T] (I32): [1], FP32 (FP64 in f64). */
MOE_API moe_value moe_tape_cross_entropy(moe_tape *tape, moe_value logits, moe_value targets);
MOE_API moe_value moe_tape_sum(moe_tape *tape, moe_value a);  /* [1], FP32 (FP64 in f64) */
MOE_API moe_value moe_tape_mean(moe_tape *tape, moe_value a); /* [1] */

typedef struct moe_tape_moe {
  uint64_t size;
  moe_span params, grads; /* the layer's; grads may be absent: a frozen layer whose dx still flows */
  moe_tensor mask, ids, aux_scale;
  int64_t sequences;
} moe_tape_moe;
MOE_INIT(moe_tape_moe)
/* x [T,D] to [T,D].  The parameters' gradients go to `grads`.  state, where not NULL, receives the
   layer's state (views and metrics), valid until the next reset. */
MOE_API moe_value moe_tape_moe_layer(moe_tape *tape, moe_layer *layer, moe_value x, const moe_tape_moe *options,
                                     moe_layer_state *state);

/* ---- backward ---------------------------------------------------------------------------------------------------- */
typedef enum moe_backward_flags {
  MOE_CREATE_GRAPH = 1, /* gradients are values that can be differentiated again */
  MOE_ACCUMULATE = 2    /* parameters' gradient tensors and layers' grads are added to, not overwritten */
} moe_backward_flags;

/* Gradients of the scalar `of` [1] (seed 1, or the value `seed` [1]) for every value it depends on.  Each call
   starts from clean gradients.  Fused operations (embedding, rms_norm, cross_entropy, the layer) have first
   derivatives only: differentiating their gradients is MOE_ERR_NO_SECOND_DERIVATIVE, naming the node. */
MOE_API MOE_CHECKED moe_status moe_tape_backward(moe_tape *tape, moe_value of, moe_value seed, int64_t flags);
/* The gradient of v from the last backward; the null value where none flowed. */
MOE_API moe_value moe_tape_grad(const moe_tape *tape, moe_value v);

#ifdef __cplusplus
}
#endif
#endif
