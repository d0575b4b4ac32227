/* small.h - a small expert branch and a small layer with all the memory that their calls want, for white-box tests:
   6 tokens, D 8, F 16, 4 experts, 2 chosen, SwiGLU with every bias. */
#ifndef MOE_TEST_SMALL_H
#define MOE_TEST_SMALL_H

#include "core/arena.h"

#include <moe/moe.h>

enum { SMALL_T = 6, SMALL_D = 8, SMALL_F = 16, SMALL_E = 4, SMALL_K = 2 };

struct small {
  moe_context *ctx;
  moe_queue *q;
  moe_selection_options selection;
  moe_weights_options weights;
  moe_activation activation;
  moe_router_desc router_desc;
  moe_experts_desc experts_desc; /* what small_options wrote; a test may change any of it before create */
  moe_layer_desc layer_desc;
  moe_span memory;
  struct moe__arena arena; /* over `memory` */
  /* The branch's calls. */
  moe_experts_io io;
  moe_experts_grads grads;
  moe_state state;
  /* The layer's. */
  moe_layer_io layer_io;
  moe_layer_state layer_state;
  moe_tensor ids, loss_scale;
};

/* Descriptors; softmax top-2, renormalized. */
void small_options(struct small *s, int64_t dtype);
/* One block of device memory, all tensors of io and grads, and the layer's spans. */
moe_status small_memory(struct small *s, moe_context *ctx, moe_queue *q);
void small_free(struct small *s);

#endif
