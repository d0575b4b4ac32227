/* experts.h - what the layer knows of the branch beyond its public face. */
#ifndef MOE_CORE_EXPERTS_H
#define MOE_CORE_EXPERTS_H

#include "core/router.h"

/* Forward with y = add + routed sum (add [T,D], or none; may be y). */
moe_status moe__experts_forward(moe_experts *e, moe_queue *q, const moe_experts_io *io, int64_t wanted,
                                moe_state *state, const moe_tensor *add, const char *fn);
/* Backward with dx = add + routed sum. */
moe_status moe__experts_backward(moe_experts *e, moe_queue *q, const moe_state *state, const moe_experts_io *io,
                                 const moe_experts_grads *grads, int64_t wanted, const moe_tensor *add, const char *fn);
/* How forward chose, weighed and planned: views into the state's saved span. */
struct moe__routed {
  moe_tensor ids, weights;             /* [T,K] */
  moe_tensor offs, row2slot, slot2row; /* [E+1], [R], [T,K] */
  int64_t T, E, K;
  struct moe__weigh weigh;
};
moe_status moe__experts_routed(struct moe__routed *out, const moe_state *state, const char *fn);
/* Gradients this branch has. */
int64_t moe__experts_all(const moe_experts *e);
/* Appends the explain lines for T tokens. */
moe_status moe__experts_explain(const moe_experts *e, struct moe__walk *w, int64_t T);

#endif
