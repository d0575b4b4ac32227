/* small.c - see small.h. */
#include "small.h"

#define BYTES ((uint64_t)1 << 18)
#define TENSOR(dtype, ...)                                                                                             \
  moe__arena_tensor(a, dtype, (int64_t)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),                   \
                    (const int64_t[]){ __VA_ARGS__ })

void small_options(struct small *s, int64_t dtype)
{
  memset(s, 0, sizeof *s);
  s->selection = moe_selection_options_init();
  s->selection.kind = MOE_SELECT_SOFTMAX;
  s->selection.top_k = SMALL_K;
  s->weights = moe_weights_options_init();
  s->weights.scoring = MOE_SOFTMAX;
  s->weights.renormalize = 1;
  s->weights.scale = 1;
  s->activation = moe_activation_init();
  s->activation.kind = MOE_SILU;
  s->activation.gated = 1;

  s->router_desc = moe_router_desc_init();
  s->router_desc.n_experts = SMALL_E;
  s->router_desc.dtype = dtype == MOE_F64 ? MOE_F64 : MOE_F32;
  s->router_desc.selection = &s->selection;
  s->router_desc.weights = &s->weights;

  s->experts_desc = moe_experts_desc_init();
  s->experts_desc.d_model = SMALL_D;
  s->experts_desc.d_ff = SMALL_F;
  s->experts_desc.n_experts = SMALL_E;
  s->experts_desc.dtype = dtype;
  s->experts_desc.selection = &s->selection;
  s->experts_desc.weights = &s->weights;
  s->experts_desc.activation = &s->activation;
  s->experts_desc.hidden_bias = s->experts_desc.down_bias = 1;

  s->layer_desc = moe_layer_desc_init();
  s->layer_desc.d_model = SMALL_D;
  s->layer_desc.d_ff = SMALL_F;
  s->layer_desc.n_experts = SMALL_E;
  s->layer_desc.dtype = dtype;
  s->layer_desc.selection = &s->selection;
  s->layer_desc.weights = &s->weights;
  s->layer_desc.activation = &s->activation;
  s->layer_desc.router_bias = s->layer_desc.hidden_bias = s->layer_desc.down_bias = 1;
  s->layer_desc.d_shared = 4;
  s->layer_desc.shared_gate = 1;
  s->layer_desc.balance_coef = 0.01;
  s->layer_desc.z_coef = 0.001;
}

static moe_span span_of(struct moe__arena *a, int64_t bytes)
{
  moe_tensor t = moe__arena_flat(a, MOE_U8, bytes);
  return (moe_span){ t.handle, t.offset, (uint64_t)bytes };
}

moe_status small_memory(struct small *s, moe_context *ctx, moe_queue *q)
{
  const int64_t T = SMALL_T, D = SMALL_D, F = SMALL_F, E = SMALL_E, K = SMALL_K;
  const int64_t dtype = s->experts_desc.dtype, real = dtype == MOE_F64 ? MOE_F64 : MOE_F32;
  struct moe__arena *a = &s->arena;
  s->ctx = ctx;
  s->q = q;
  MOE__TRY(moe_span_alloc(&s->memory, ctx, BYTES));
  *a = moe__arena_over(s->memory);

  s->io = moe_experts_io_init();
  s->io.x = TENSOR(dtype, T, D);
  s->io.y = TENSOR(dtype, T, D);
  s->io.logits = TENSOR(real, T, E);
  s->io.gate = TENSOR(dtype, E, F, D);
  s->io.up = TENSOR(dtype, E, F, D);
  s->io.down = TENSOR(dtype, E, D, F);
  s->io.gate_bias = TENSOR(dtype, E, F);
  s->io.up_bias = TENSOR(dtype, E, F);
  s->io.down_bias = TENSOR(dtype, E, D);
  s->io.saved = span_of(a, 8192);
  s->io.scratch = span_of(a, 16384);
  s->ids = TENSOR(MOE_I32, T, K);
  s->loss_scale = TENSOR(real, 1);

  s->grads = moe_experts_grads_init();
  s->grads.dy = TENSOR(dtype, T, D);
  s->grads.dx = TENSOR(dtype, T, D);
  s->grads.dlogits = TENSOR(real, T, E);
  s->grads.dgate = TENSOR(real, E, F, D);
  s->grads.dup = TENSOR(real, E, F, D);
  s->grads.ddown = TENSOR(real, E, D, F);
  s->grads.dgate_bias = TENSOR(real, E, F);
  s->grads.dup_bias = TENSOR(real, E, F);
  s->grads.ddown_bias = TENSOR(real, E, D);
  s->state = moe_state_init();

  s->layer_io = moe_layer_io_init();
  s->layer_io.x = s->io.x;
  s->layer_io.y = s->io.y;
  s->layer_io.dy = s->grads.dy;
  s->layer_io.dx = s->grads.dx;
  s->layer_io.mask = TENSOR(MOE_U8, T);
  s->layer_io.params = span_of(a, 32768);
  s->layer_io.grads = span_of(a, 32768);
  s->layer_io.saved = span_of(a, 16384);
  s->layer_io.scratch = span_of(a, 32768);
  s->layer_state = moe_layer_state_init();
  return moe__arena_check(a, "small_memory", "memory");
}

void small_free(struct small *s)
{
  moe_span_free(s->ctx, &s->memory);
}
