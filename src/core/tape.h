/* tape.h - the tape from inside: values, nodes and rules, and what the files that add operations use.

   tape.c         memory, values, recording, and backward as a walk over the rules in reverse
   tape_ops.c     primitive operations: rules written in the tape's own operations, so any derivative exists
   tape_fused.c   operations with kernels of their own for forward and backward
   tape_layer.c   the Mixture-of-Experts layer, and its expansion into primitives
   tape_routed.c  primitives of that expansion: rows by expert
   tape_custom.c  the caller's own functions, and recomputed segments
   tape_health.c  gradients that are not finite, found on the device
   tape_check.c   moe_gradcheck, moe_hvp */
#ifndef MOE_CORE_TAPE_H
#define MOE_CORE_TAPE_H

#include "core/backend.h"
#include "core/tensor.h"

#include <moe/tape.h>

#define MOE__TAPE_DEPTH 8 /* recomputed segments inside one another */

struct moe__node;

/* How an operation is differentiated.
   backward adds to the gradients of the node's inputs, given those of its outputs (0: none flows there).
   expand computes the same outputs again from the same inputs by operations that have derivatives; it runs while
   they are recorded.
   A rule has one or both.  With both, backward is the fast one of a first derivative, and expand is taken where the
   gradient itself will be differentiated (MOE_CREATE_GRAPH): at once, or, where `fused`, only if
   MOE_DECOMPOSE is given, else the gradient is a value whose derivative is MOE_ERR_NO_SECOND_DERIVATIVE. */
struct moe__rule {
  const char *name;
  void (*backward)(moe_tape *, struct moe__node *, const moe_value *dout);
  void (*expand)(moe_tape *, struct moe__node *, moe_value *out);
  int fused;
};

/* Lives in the tape's host memory until reset: the address is stable. */
struct moe__node {
  const struct moe__rule *rule;
  const char *name; /* in messages: the rule's, or a custom function's */
  int64_t n_in, n_out;
  moe_value *in, *out;
  int order; /* walks that were open when it was recorded: 0 the caller's, 1 of a gradient, .. */
  double alpha;
  int64_t flag[2 * MOE_RANK_MAX]; /* axes, extents, switches */
  moe_tensor kept;                /* rstd, lse, a map */
  void *more;                     /* the rule's own, in the tape's host memory */
};

struct moe__value {
  moe_tensor t;     /* no handle: a value of a segment whose memory is gone */
  moe_tensor bound; /* a parameter's gradient tensor */
  int64_t node;     /* that made it; -1: leaf, or not recorded */
  int depth;        /* of the pool it came from */
  int needs_grad;
  int skip;    /* the present walk asks for nothing behind it */
  int written; /* bound was written by the present walk */
  int joins;   /* the present walk's root depends on it, and not by way of gradients only */
  int listed;  /* while a segment lists what it depends on */
  moe_value grad;
};

/* Device memory that grows by blocks and is given back as a stack. */
struct moe__mark {
  int64_t block;
  uint64_t used;
};
struct moe__pool {
  moe_span *blocks;
  int64_t n_blocks;
  struct moe__mark at;
};

struct moe__release { /* what to call when the tape forgets: the caller's, of custom functions */
  void (*call)(void *user);
  void *user;
};

struct moe_tape {
  moe_queue *q;
  uint64_t block_bytes;
  struct moe__pool pools[MOE__TAPE_DEPTH];
  int depth; /* the pool that new tensors come from */

  struct moe__value **values; /* pages of MOE__PAGE: addresses are stable */
  int64_t n_values, n_pages;
  struct moe__node **nodes;
  int64_t n_nodes, room_nodes;
  int64_t *params; /* values with a bound gradient */
  int64_t n_params, room_params;
  void **host; /* chunks of host memory for nodes */
  int64_t n_host, at_host;
  uint64_t used_host;
  struct moe__release *releases;
  int64_t n_releases, room_releases;
  moe_value ones[2]; /* [1] constants, FP32 and FP64, made when first wanted */

  uint64_t generation;
  int recording; /* 0 inside a backward without MOE_CREATE_GRAPH, in custom functions, and in no-grad regions */
  int64_t flags; /* of the present walk */
  int direct;    /* the present walk writes parameters' gradients to their bound tensors */
  int order;     /* walks that are open */
  struct moe__node *walking;
  const struct moe__node *expanded; /* the outermost node whose expansion is walked */
  struct moe__segment *segment;     /* the recomputed segment that is running (tape_custom.c) */
  int callbacks;                    /* the caller's functions that are running, one inside the other */
  struct moe__health *health;       /* NULL: the policy is off */
  moe_status status;
  char error[512];
};

#define MOE__PAGE 256

/* ---- errors ---------------------------------------------------------------------------------------------------- */
/* Keeps the first error, with the text of moe_last_error. */
void moe__tape_fail(moe_tape *t, moe_status st);
#define TAPE_FAIL(t, st, ...) (moe__tape_fail(t, moe__fail(st, __VA_ARGS__)), (moe_value){ 0 })
/* Runs an op on the tape's queue; compiles it where this is its first use.  Its arguments are not evaluated where the tape
   has failed: tensors of it may be {0}. */
#define TAPE_RUN(t, op, ...)                                                                                           \
  do {                                                                                                                 \
    if ((t)->status) break;                                                                                            \
    const struct moe__args_##op args_ = { __VA_ARGS__ };                                                               \
    moe_status st_;                                                                                                    \
    st_ = moe__prepare_##op((t)->q->ctx, &args_, MOE_AUTO);                                                            \
    if (!st_) st_ = moe__run_##op((t)->q, &args_, MOE_AUTO);                                                           \
    moe__tape_fail(t, st_);                                                                                            \
  } while (0)

/* moe_tape_free, and what the wait in it says. */
moe_status moe__tape_close(moe_tape *t);

/* ---- values ---------------------------------------------------------------------------------------------------- */
/* NULL, with the tape failed, for the null value, a stale one, or one whose memory is gone; NULL for a NULL or a
   failed tape too. */
struct moe__value *moe__tape_look(moe_tape *t, moe_value v, const char *fn);
/* The value, known to be good. */
struct moe__value *moe__tape_at(const moe_tape *t, moe_value v);
moe_value moe__tape_value(moe_tape *t, moe_tensor tensor, int needs_grad);
/* Zeroed host memory until reset; NULL with the tape failed. */
void *moe__tape_host(moe_tape *t, uint64_t bytes);
/* Device memory until reset, or until the mark is restored; {0} with the tape failed. */
moe_span moe__tape_take(moe_tape *t, uint64_t bytes);
moe_tensor moe__tape_fresh(moe_tape *t, int64_t dtype, int64_t rank, const int64_t *shape);
moe_tensor moe__tape_flat(moe_tape *t, int64_t dtype, int64_t n);
/* A copy of packed x, in the present pool. */
moe_tensor moe__tape_copy(moe_tape *t, const moe_tensor *x);
void moe__health_rewind(moe_tape *t, struct moe__mark mark);
static inline struct moe__mark moe__tape_mark(const moe_tape *t)
{
  return t->pools[t->depth].at;
}
/* Gradients above the mark are looked at first. */
static inline void moe__tape_rewind(moe_tape *t, struct moe__mark mark)
{
  if (t->health) moe__health_rewind(t, mark);
  t->pools[t->depth].at = mark;
}
/* FP64 for F64, else FP32: what sums and losses come in. */
static inline int64_t moe__real_of(int64_t dtype)
{
  return dtype == MOE_F64 ? MOE_F64 : MOE_F32;
}
int moe__same_shape(const moe_tensor *a, const moe_tensor *b);
/* [1] of ones. */
moe_value moe__tape_one(moe_tape *t, int64_t dtype);
/* [1] of x, in the dtype of `like`. */
moe_value moe__tape_constant(moe_tape *t, moe_value like, double x);

/* ---- recording --------------------------------------------------------------------------------------------------- */
/* A node with copies of its inputs, for the caller to fill; NULL with the tape failed. */
struct moe__node *moe__tape_node(moe_tape *t, const struct moe__rule *rule, int64_t n_in, const moe_value *in,
                                 int64_t n_out);
/* The values of its outputs; the node is recorded where a gradient can flow through it.  Outputs that are no
   floats never need one. */
void moe__tape_record_all(moe_tape *t, struct moe__node *n, const moe_tensor *tensors);
moe_value moe__tape_record(moe_tape *t, struct moe__node *n, moe_tensor tensor);
/* Forgets the nodes from `node` on; what they made, values from number `value` on, becomes constants. */
void moe__tape_forget(moe_tape *t, int64_t node, int64_t value);
/* Has `call` called at the next reset, or at the end: also where the tape has failed; at once where there is no memory. */
void moe__tape_on_reset(moe_tape *t, void (*call)(void *user), void *user);

/* ---- the caller's functions ------------------------------------------------------------------------------------------- */
/* MOE_ERR_STATE, and the tape failed, where one of them is running: fn is not for them. */
moe_status moe__tape_outside(moe_tape *t, const char *fn);

/* ---- inside a rule ------------------------------------------------------------------------------------------------- */
/* Whether the walk wants the gradient of v. */
int moe__tape_wants(const moe_tape *t, moe_value v);
/* Whether losses that belong to n (a layer's: balance, z) are part of what the walk differentiates: they are where its
   root depends on n's results, but not where it does so through gradients only, which have had them. */
int moe__tape_joins(const moe_tape *t, const struct moe__node *n);
/* grad(v) += g; a null g adds nothing. */
void moe__tape_contribute(moe_tape *t, moe_value v, moe_value g);
/* Where a rule may write the gradient of parameter v at once: its bound tensor; *accumulate says whether to add.
   0 where v is no such parameter, or gradients are to be values.  Write it, then call moe__tape_sunk. */
int moe__tape_sink(moe_tape *t, moe_value v, moe_tensor *to, int64_t *accumulate);
void moe__tape_sunk(moe_tape *t, moe_value v);
/* A gradient computed by kernels: a value whose derivative is an error that names the present node. */
void moe__tape_contribute_fused(moe_tape *t, moe_value v, moe_tensor g);
/* The node's outputs once more by its rule's `expand`, and back through what that recorded. */
void moe__tape_through_expansion(moe_tape *t, struct moe__node *n, const moe_value *dout);

/* ---- rows by expert (tape_routed.c) ---------------------------------------------------------------------------------- */
/* The routing lives as long as the tape's host memory; div: 1 or its K, where x is [T*K/div,D] and rows [T*K,D]. */
struct moe__routed;
moe_value moe__tape_dispatch(moe_tape *t, struct moe__routed *r, moe_value x, int64_t div);
moe_value moe__tape_collect(moe_tape *t, struct moe__routed *r, moe_value rows, int64_t div);
/* [T,E] to [T,K] */
moe_value moe__tape_pick(moe_tape *t, struct moe__routed *r, moe_value x);
/* a [R,K] times b [E,N,K], or, transposed, times b [E,K,N]: [R,N] */
moe_value moe__tape_grouped(moe_tape *t, struct moe__routed *r, moe_value a, moe_value b, int64_t transpose);

/* ---- health (tape_health.c): called where t->health is there -------------------------------------------------------- */
/* Sets t->health where the policy is not off. */
moe_status moe__health_create(moe_tape *t, const moe_tape_desc *desc);
void moe__health_free(moe_tape *t);
/* Has `g`, the gradient of node n's input v as n just left it, looked at before the walk ends (n NULL: the seed). */
void moe__health_watch(moe_tape *t, const struct moe__node *n, moe_value v, const moe_tensor *g);
/* The same for results of a recorded node, where activations are wanted. */
void moe__health_results(moe_tape *t, const struct moe__node *n);
/* Launches what is still to be looked at. */
void moe__health_flush(moe_tape *t);
/* The same where it lies in memory that is about to change: `soon` (moe__health_rewind: what is above a mark of the
   present pool). */
void moe__health_settle(moe_tape *t, const moe_tensor *soon);

/* ---- segments (tape_custom.c) ------------------------------------------------------------------------------------------ */
/* What a recomputed segment must find again in its later runs, in order, is kept by its first; outside segments these do
   nothing, and where there is nothing to replay they return nothing. */
/* The ids that a layer call has to choose. */
moe_tensor moe__segment_replay(moe_tape *t);
void moe__segment_keep(moe_tape *t, const moe_tensor *ids);
/* A leaf that needs a gradient is one value in all runs: now of this tensor. */
moe_value moe__segment_replay_leaf(moe_tape *t, const moe_tensor *tensor, const moe_tensor *grad);
void moe__segment_keep_leaf(moe_tape *t, moe_value leaf);

#endif
