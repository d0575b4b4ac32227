/* t_refuse.c - every bad argument of every public function: the right status, a text that names it, *out NULL, and
   no kernel launched nor a byte of device memory touched. */
#include "moe_test.h"

#include "core/backend.h"
#include "fake.h"
#include "small.h"

#include <moe/cuda.h>
#include <moe/opencl.h>

#include <math.h>

/* Objects of every kind, good ones; a test works on a copy. */
struct rig {
  struct small s;
  moe_context *ctx, *other_ctx;
  moe_queue *q, *other_q;
  moe_router *router;
  moe_experts *experts, *other_experts;
  moe_layer *layer, *other_layer;
  moe_adamw *opt;
  moe_tape *tape;
};
static struct rig good;

/* A copy whose descriptors point into itself. */
static void copy_rig(struct rig *r)
{
  *r = good;
  r->s.router_desc.selection = r->s.experts_desc.selection = r->s.layer_desc.selection = &r->s.selection;
  r->s.router_desc.weights = r->s.experts_desc.weights = r->s.layer_desc.weights = &r->s.weights;
  r->s.experts_desc.activation = r->s.layer_desc.activation = &r->s.activation;
  fake_clear();
}

static void assert_untouched(const char *what)
{
  if (fake.launches || fake.writes) fail_msg("%s: launched or wrote before it refused", what);
}

#define REFUSED_AS(status, text, spoil, call)                                                                          \
  do {                                                                                                                 \
    struct rig r, *before_ = &r;                                                                                       \
    copy_rig(before_);                                                                                                 \
    spoil;                                                                                                             \
    FAILS(status, text, call);                                                                                         \
    assert_untouched(#spoil);                                                                                          \
  } while (0)
#define REFUSED(text, spoil, call) REFUSED_AS(MOE_ERR_INVALID, text, spoil, call)

static int open_rig(void **state)
{
  (void)state;
  fake_reset();
  small_options(&good.s, MOE_F32);
  good.ctx = fake_open();
  good.other_ctx = fake_open();
  OK(moe_queue_create(&good.q, good.ctx));
  OK(moe_queue_create(&good.other_q, good.other_ctx));
  OK(small_memory(&good.s, good.ctx, good.q));
  copy_rig(&good);
  OK(moe_router_create(&good.router, good.ctx, &good.s.router_desc));
  OK(moe_experts_create(&good.experts, good.ctx, &good.s.experts_desc));
  OK(moe_experts_create(&good.other_experts, good.ctx, &good.s.experts_desc));
  OK(moe_layer_create(&good.layer, good.ctx, &good.s.layer_desc));
  OK(moe_layer_create(&good.other_layer, good.ctx, &good.s.layer_desc));
  OK(moe_experts_forward(good.experts, good.q, &good.s.io, &good.s.state));
  OK(moe_layer_forward(good.layer, good.q, &good.s.layer_io, &good.s.layer_state));
  moe_adamw_desc desc = moe_adamw_desc_init();
  desc.dtype = MOE_F32;
  desc.peak = 1e-3;
  OK(moe_adamw_create(&good.opt, good.ctx, &desc));
  OK(moe_tape_create(&good.tape, good.q, NULL));
  return 0;
}

static int close_rig(void **state)
{
  (void)state;
  moe_tape_free(good.tape);
  moe_adamw_free(good.opt);
  moe_layer_free(good.layer);
  moe_layer_free(good.other_layer);
  moe_experts_free(good.experts);
  moe_experts_free(good.other_experts);
  moe_router_free(good.router);
  small_free(&good.s);
  moe_queue_free(good.q);
  moe_queue_free(good.other_q);
  moe_context_free(good.ctx);
  moe_context_free(good.other_ctx);
  return fake.devices || fake.queues || fake.blocks;
}

/* ---- contexts, queues, spans ------------------------------------------------------------------------------------- */
static void nothing(void *user, void *handle)
{
  (void)user;
  (void)handle;
}

static void contexts(void **state)
{
  static const char *const malformed[] = { "", ":", "cuda0", "opencl ", "vulkan:0", "CUDA" };
  moe_context_desc desc = moe_context_desc_init();
  moe_context *ctx = good.ctx;
  moe_device_info info = moe_device_info_init();
  (void)state;
  FAILS(MOE_ERR_INVALID, "moe_context_create: out is NULL", moe_context_create(NULL, &desc));
  for (size_t i = 0; i < sizeof malformed / sizeof malformed[0]; i++) {
    ctx = good.ctx;
    desc.device = malformed[i];
    FAILS(MOE_ERR_INVALID, "moe_context_create: device", moe_context_create(&ctx, &desc));
    assert_null(ctx);
  }
  if (!moe_backend_reason("opencl")[0]) {
    static const char *const of_opencl[] = { "opencl:x",     "opencl:0",    "opencl:0:",
                                             "opencl:0:0:0", "opencl:-1:0", "opencl:0:0 " };
    for (size_t i = 0; i < sizeof of_opencl / sizeof of_opencl[0]; i++) {
      desc.device = of_opencl[i];
      FAILS(MOE_ERR_INVALID, of_opencl[i], moe_context_create(&ctx, &desc));
      assert_null(ctx);
    }
    desc.device = "opencl:99:0";
    FAILS(MOE_ERR_NO_DEVICE, "opencl:99:0", moe_context_create(&ctx, &desc));
  }
  desc.device = "opencl";
  desc.release = nothing;
  FAILS(MOE_ERR_INVALID, "alloc and release go together", moe_context_create(&ctx, &desc));
  FAILS(MOE_ERR_INVALID, "ctx is NULL", moe_context_info(NULL, &info));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_context_info(good.ctx, NULL));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_device_list(NULL, 0));
  FAILS(MOE_ERR_INVALID, "index 1000000", moe_device_list(&info, 1000000));
  FAILS(MOE_ERR_INVALID, "index -1", moe_device_list(&info, -1));
  assert_string_equal(moe_backend_reason("abacus"), "there is no such backend");
  assert_string_equal(moe_backend_reason(NULL), "there is no such backend");
  ctx = good.ctx;
  FAILS(MOE_ERR_INVALID, "context is NULL", moe_context_from_opencl(&ctx, NULL, NULL, NULL));
  assert_null(ctx);
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_context_from_opencl(NULL, NULL, NULL, NULL));
}

static void queues(void **state)
{
  moe_queue *q = good.q;
  uint64_t bits;
  (void)state;
  FAILS(MOE_ERR_INVALID, "moe_queue_create: out is NULL", moe_queue_create(NULL, good.ctx));
  FAILS(MOE_ERR_INVALID, "moe_queue_create: ctx is NULL", moe_queue_create(&q, NULL));
  assert_null(q);
  q = good.q;
  FAILS(MOE_ERR_INVALID, "ctx is on fake, wanted cuda", moe_queue_from_cuda(&q, good.ctx, NULL));
  assert_null(q);
  q = good.q;
  FAILS(MOE_ERR_INVALID, "ctx is on fake, wanted opencl", moe_queue_from_opencl(&q, good.ctx, NULL));
  assert_null(q);
  FAILS(MOE_ERR_INVALID, "ctx is NULL", moe_queue_from_cuda(&q, NULL, NULL));
  FAILS(MOE_ERR_INVALID, "ctx is NULL", moe_queue_from_opencl(&q, NULL, NULL));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_queue_wait(NULL));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_health_read(NULL, &bits));
  FAILS(MOE_ERR_INVALID, "bits is NULL", moe_health_read(good.q, NULL));
}

static void spans(void **state)
{
  moe_span span = good.s.memory, absent = { NULL, 0, 64 }, other = span;
  unsigned char host[8];
  (void)state;
  fake_clear();
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_span_alloc(NULL, good.ctx, 8));
  FAILS(MOE_ERR_INVALID, "ctx is NULL", moe_span_alloc(&other, NULL, 8));
  span.bytes = 7;
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_span_write(NULL, span, host, 1));
  FAILS(MOE_ERR_INVALID, "to is not given", moe_span_write(good.q, absent, host, 1));
  FAILS(MOE_ERR_TOO_SMALL, "to has 7 bytes, 8 wanted", moe_span_write(good.q, span, host, 8));
  FAILS(MOE_ERR_INVALID, "from is NULL", moe_span_write(good.q, span, NULL, 1));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_span_read(NULL, host, span, 1));
  FAILS(MOE_ERR_INVALID, "from is not given", moe_span_read(good.q, host, absent, 1));
  FAILS(MOE_ERR_TOO_SMALL, "from has 7 bytes, 8 wanted", moe_span_read(good.q, host, span, 8));
  FAILS(MOE_ERR_INVALID, "to is NULL", moe_span_read(good.q, NULL, span, 1));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_span_copy(NULL, span, span, 1));
  FAILS(MOE_ERR_TOO_SMALL, "to has 7", moe_span_copy(good.q, span, good.s.memory, 8));
  FAILS(MOE_ERR_TOO_SMALL, "from has 7", moe_span_copy(good.q, good.s.memory, span, 8));
  FAILS(MOE_ERR_INVALID, "from is not given", moe_span_copy(good.q, span, absent, 1));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_span_fill(NULL, span, 0));
  FAILS(MOE_ERR_INVALID, "to is not given", moe_span_fill(good.q, absent, 0));
  assert_untouched("spans");
  OK(moe_span_write(good.q, (moe_span){ 0 }, NULL, 0)); /* nothing is fine anywhere */
  OK(moe_span_read(good.q, NULL, (moe_span){ 0 }, 0));
  OK(moe_span_copy(good.q, (moe_span){ 0 }, (moe_span){ 0 }, 0));
  OK(moe_span_fill(good.q, (moe_span){ 0 }, 0));
  assert_untouched("empty spans");
}

static void values_of_tensors(void **state)
{
  moe_tensor bad, x = good.s.io.x;
  double out[8];
  (void)state;
  fake_clear();
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_tensor_fill(NULL, &x, 1));
  FAILS(MOE_ERR_INVALID, "t is NULL", moe_tensor_fill(good.q, NULL, 1));
  FAILS(MOE_ERR_INVALID, "nan is not finite", moe_tensor_fill(good.q, &x, NAN));
  FAILS(MOE_ERR_INVALID, "i32", moe_tensor_fill(good.q, &good.s.ids, 1));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_tensor_normal(NULL, &x, 1, 0, 1));
  FAILS(MOE_ERR_INVALID, "t is NULL", moe_tensor_normal(good.q, NULL, 1, 0, 1));
  FAILS(MOE_ERR_INVALID, "i32", moe_tensor_normal(good.q, &good.s.ids, 1, 0, 1));
  FAILS(MOE_ERR_INVALID, "stream -1", moe_tensor_normal(good.q, &x, 1, -1, 1));
  FAILS(MOE_ERR_INVALID, "stream 2147483648", moe_tensor_normal(good.q, &x, 1, (int64_t)1 << 31, 1));
  FAILS(MOE_ERR_INVALID, "stddev -1", moe_tensor_normal(good.q, &x, 1, 0, -1));
  FAILS(MOE_ERR_INVALID, "inf is not finite", moe_tensor_normal(good.q, &x, 1, 0, INFINITY));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_tensor_read(NULL, out, &x, 8));
  FAILS(MOE_ERR_INVALID, "t is NULL", moe_tensor_read(good.q, out, NULL, 8));
  FAILS(MOE_ERR_INVALID, "n < 0", moe_tensor_read(good.q, out, &x, -1));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_tensor_read(good.q, NULL, &x, 1));
#define BAD(text, spoil)                                                                                               \
  do {                                                                                                                 \
    bad = x;                                                                                                           \
    bad.spoil;                                                                                                         \
    FAILS(MOE_ERR_INVALID, text, moe_tensor_fill(good.q, &bad, 1));                                                    \
    FAILS(MOE_ERR_INVALID, text, moe_tensor_normal(good.q, &bad, 1, 0, 1));                                            \
    FAILS(MOE_ERR_INVALID, text, moe_tensor_read(good.q, out, &bad, 8));                                               \
  } while (0)
  BAD("t is not given", handle = NULL);
  BAD("t is not packed", stride[0] = 9);
  BAD("t is no tensor", rank = 7);
  BAD("t is no tensor", dtype = 0);
  BAD("t is no tensor", shape[0] = -6);
  assert_untouched("values");
}

/* ---- descriptors ------------------------------------------------------------------------------------------------- */
/* What a selection and weights can be wrong in, for each of the three creates. */
static moe_status create_router(struct rig *r)
{
  moe_router *out = good.router;
  moe_status st = moe_router_create(&out, r->ctx, &r->s.router_desc);
  assert_null(out);
  return st;
}
static moe_status create_experts(struct rig *r)
{
  moe_experts *out = good.experts;
  moe_status st = moe_experts_create(&out, r->ctx, &r->s.experts_desc);
  assert_null(out);
  return st;
}
static moe_status create_layer(struct rig *r)
{
  moe_layer *out = good.layer;
  moe_status st = moe_layer_create(&out, r->ctx, &r->s.layer_desc);
  assert_null(out);
  return st;
}

static void grouped(struct rig *r, int64_t E, int64_t groups, int64_t selected, int64_t top_k)
{
  r->s.router_desc.n_experts = r->s.experts_desc.n_experts = r->s.layer_desc.n_experts = E;
  r->s.selection.kind = MOE_SELECT_GROUPED_SIGMOID;
  r->s.selection.groups = groups;
  r->s.selection.selected_groups = selected;
  r->s.selection.top_k = top_k;
  r->s.selection.scale = 1;
}

static void selections_and_weights(void **state)
{
  static moe_status (*const creates[])(struct rig *) = { create_router, create_experts, create_layer };
  (void)state;
  for (int i = 0; i < 3; i++) {
    moe_status (*create)(struct rig *) = creates[i];
    moe_selection_options *s;
#define SEL(text, spoil) REFUSED(text, (s = &r.s.selection, spoil), create(&r))
    SEL("selection->kind 0", s->kind = 0);
    SEL("selection->kind 3", s->kind = 3);
    SEL("selection->top_k 0 outside 1..4", s->top_k = 0);
    SEL("selection->top_k 5 outside 1..4", s->top_k = 5);
    SEL("selection->top_k -1", s->top_k = -1);
    SEL("belong to grouped sigmoid", s->groups = 2);
    SEL("belong to grouped sigmoid", s->selected_groups = 1);
    SEL("belong to grouped sigmoid", s->group_top_two = 1);
    SEL("selection->scale 2 with softmax", s->scale = 2);
    SEL("selection->scale nan", s->scale = NAN);
    SEL("_init", s->size = 0);
#define GROUPED(text, E, groups, selected, k, spoil)                                                                   \
  REFUSED(text, (s = &r.s.selection, grouped(&r, E, groups, selected, k), spoil), create(&r))
    GROUPED("selection->scale 0", 4, 2, 1, 1, s->scale = 0);
    GROUPED("selection->scale -1", 4, 2, 1, 1, s->scale = -1);
    GROUPED("selection->scale inf", 4, 2, 1, 1, s->scale = INFINITY);
    GROUPED("selection->scale nan", 4, 2, 1, 1, s->scale = NAN);
    GROUPED("selection->groups 3, wanted 1..1024 and a divisor of 8", 8, 3, 1, 1, s->scale = 1);
    GROUPED("selection->groups 0", 8, 0, 0, 1, s->scale = 1);
    GROUPED("selection->groups -2", 8, -2, 1, 1, s->scale = 1);
    GROUPED("selection->groups 2048", 4096, 2048, 1, 1, s->scale = 1);
    GROUPED("selection->selected_groups 0", 8, 4, 0, 1, s->scale = 1);
    GROUPED("selection->selected_groups 5 outside 1..4", 8, 4, 5, 1, s->scale = 1);
    GROUPED("selection->top_k 3 > 2 experts in the selected groups", 8, 4, 1, 3, s->scale = 1);
    GROUPED("group_top_two wants groups of 2", 4, 4, 2, 2, s->group_top_two = 1);
    GROUPED("selection->softmax_bias", 4, 2, 1, 1, s->softmax_bias = 1);
#define WEIGH(text, spoil) REFUSED(text, r.s.weights.spoil, create(&r))
    WEIGH("weights->scoring 0", scoring = 0);
    WEIGH("weights->scoring 5", scoring = 5);
    WEIGH("weights->scale 0", scale = 0);
    WEIGH("weights->scale -2", scale = -2);
    WEIGH("weights->scale inf", scale = INFINITY);
    WEIGH("weights->scale nan", scale = NAN);
    WEIGH("weights->epsilon -1", epsilon = -1);
    WEIGH("weights->epsilon nan", epsilon = NAN);
    WEIGH("weights->epsilon inf", epsilon = INFINITY);
    REFUSED("n_experts 0", (r.s.router_desc.n_experts = r.s.experts_desc.n_experts = r.s.layer_desc.n_experts = 0),
            create(&r));
    REFUSED("n_experts 1048577",
            (r.s.router_desc.n_experts = r.s.experts_desc.n_experts = r.s.layer_desc.n_experts = (1 << 20) + 1),
            create(&r));
    REFUSED("selection is NULL",
            (r.s.router_desc.selection = r.s.experts_desc.selection = r.s.layer_desc.selection = NULL), create(&r));
    REFUSED("weights is NULL", (r.s.router_desc.weights = r.s.experts_desc.weights = r.s.layer_desc.weights = NULL),
            create(&r));
    REFUSED("ctx is NULL", r.ctx = NULL, create(&r));
  }
  REFUSED("dtype bf16, wanted f32 or f64", r.s.router_desc.dtype = MOE_BF16, create_router(&r));
  REFUSED("dtype ?", r.s.router_desc.dtype = 0, create_router(&r));
  REFUSED("logits_dtype f64 with dtype f32", r.s.router_desc.logits_dtype = MOE_F64, create_router(&r));
  REFUSED("logits_dtype i32", r.s.router_desc.logits_dtype = MOE_I32, create_router(&r));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_router_create(NULL, good.ctx, &good.s.router_desc));
  REFUSED("desc is NULL", moe_router * out, moe_router_create(&out, good.ctx, NULL));
}

static void experts_descriptors(void **state)
{
  (void)state;
#define DESC(text, spoil) REFUSED(text, r.s.experts_desc.spoil, create_experts(&r))
  DESC("d_model 0 outside", d_model = 0);
  DESC("d_model -1 outside", d_model = -1);
  DESC("d_model 16777217", d_model = (1 << 24) + 1);
  DESC("d_ff 0 outside", d_ff = 0);
  DESC("d_ff 16777217", d_ff = (1 << 24) + 1);
  DESC("dtype ?, wanted f64, f32, bf16 or f16", dtype = 0);
  DESC("dtype i32", dtype = MOE_I32);
  DESC("dtype f8e4m3", dtype = MOE_F8E4M3);
  DESC("logits_dtype f64 with dtype f32", logits_dtype = MOE_F64);
  DESC("logits_dtype u8", logits_dtype = MOE_U8);
  DESC("weight_grad_dtype f64 with dtype f32", weight_grad_dtype = MOE_F64);
  DESC("weight_grad_dtype i64", weight_grad_dtype = MOE_I64);
  DESC("forward_strategy 3", forward_strategy = 3);
  DESC("forward_strategy -1", forward_strategy = -1);
  DESC("backward_strategy 3", backward_strategy = 3);
  DESC("reduction 2", reduction = 2);
  DESC("wanted 0x100", wanted = 256);
  DESC("activation is NULL", activation = NULL);
  DESC("_init", size = 8 + 1);
  REFUSED("wanted 0x20", (r.s.experts_desc.hidden_bias = 0, r.s.experts_desc.wanted = MOE_GRAD_GATE_BIAS),
          create_experts(&r));
  REFUSED("wanted 0x80", (r.s.experts_desc.down_bias = 0, r.s.experts_desc.wanted = MOE_GRAD_DOWN_BIAS),
          create_experts(&r));
  REFUSED("wanted 0x4", (r.s.activation.gated = 0, r.s.experts_desc.wanted = MOE_GRAD_GATE), create_experts(&r));
  REFUSED("weight_grad_dtype f32 with dtype f64",
          (r.s.experts_desc.dtype = MOE_F64, r.s.experts_desc.weight_grad_dtype = MOE_F32), create_experts(&r));
#define LAYOUT(text, field, spoil)                                                                                     \
  REFUSED(text, (r.s.experts_desc.field = r.s.io.field, r.s.experts_desc.field.spoil), create_experts(&r))
  LAYOUT("gate has rank 2", gate, rank = 2);
  LAYOUT("gate has extent 5 in dimension 0, 4 is wanted", gate, shape[0] = 5);
  LAYOUT("up has extent 15 in dimension 1, 16 is wanted", up, shape[1] = 15);
  LAYOUT("up has stride -1", up, stride[2] = -1);
  LAYOUT("down has extent 16 in dimension 1, 8 is wanted", down, shape[1] = 16);
#define ACT(text, spoil)                                                                                               \
  do {                                                                                                                 \
    REFUSED(text, r.s.activation.spoil, create_experts(&r));                                                           \
    REFUSED(text, r.s.activation.spoil, create_layer(&r));                                                             \
  } while (0)
  ACT("activation->kind 0", kind = 0);
  ACT("activation->kind 8", kind = 8);
  ACT("limit -1", limit = -1);
  ACT("limit nan", limit = NAN);
  ACT("limit inf", limit = INFINITY);
  ACT("alpha nan", alpha = NAN);
  ACT("up_offset inf", up_offset = INFINITY);
  REFUSED("alpha 2 belongs to MOE_SILU", (r.s.activation.kind = MOE_GELU, r.s.activation.alpha = 2),
          create_experts(&r));
  REFUSED("up_offset 1 without gated", (r.s.activation.gated = 0, r.s.activation.up_offset = 1), create_experts(&r));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_experts_create(NULL, good.ctx, &good.s.experts_desc));
  REFUSED("desc is NULL", moe_experts * out, moe_experts_create(&out, good.ctx, NULL));
}

static void layer_descriptors(void **state)
{
  (void)state;
#define LAYER(text, spoil) REFUSED(text, r.s.layer_desc.spoil, create_layer(&r))
  LAYER("d_model 0", d_model = 0);
  LAYER("d_ff -5", d_ff = -5);
  LAYER("dtype i64", dtype = MOE_I64);
  LAYER("d_shared -1", d_shared = -1);
  LAYER("d_shared 16777217", d_shared = (1 << 24) + 1);
  LAYER("shared_gate without d_shared", d_shared = 0);
  LAYER("balance_coef -1", balance_coef = -1);
  LAYER("balance_coef nan", balance_coef = NAN);
  LAYER("z_coef inf", z_coef = INFINITY);
  LAYER("z_coef -1", z_coef = -1);
  LAYER("balance_scoring 3", balance_scoring = MOE_SOFTMAX_CHOSEN);
  LAYER("correction_bias belongs to grouped sigmoid", correction_bias = 1);
  LAYER("activation is NULL", activation = NULL);
  LAYER("forward_strategy 7", forward_strategy = 7);
  LAYER("reduction -1", reduction = -1);
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_layer_create(NULL, good.ctx, &good.s.layer_desc));
  REFUSED("desc is NULL", moe_layer * out, moe_layer_create(&out, good.ctx, NULL));
}

/* ---- tensors of calls -------------------------------------------------------------------------------------------- */
/* Each tensor that a call takes is spoilt in every way in turn. */
struct field {
  const char *name;
  size_t at; /* in struct rig */
  int flags;
};
enum { OPTIONAL = 1, ROWS = 2 /* its extent 0 says how many tokens there are */, ANY_FLOAT = 4, PACKED = 8 };
#define FIELD(name, member, flags)                                                                                     \
  {                                                                                                                    \
    name, offsetof(struct rig, member), flags                                                                          \
  }

static void refuses_spoilt(const struct field *f, moe_status (*call)(struct rig *))
{
  enum { MISSING, DTYPE, FLOAT, RANK, FIRST, LAST, STRIDE, OFFSET, HOLES, KINDS };
  for (int kind = 0; kind < KINDS; kind++) {
    struct rig r;
    copy_rig(&r);
    moe_tensor *t = (moe_tensor *)(void *)((char *)&r + f->at);
    assert_non_null(t->handle);
    switch (kind) {
    case MISSING:
      if (f->flags & OPTIONAL) continue;
      t->handle = NULL;
      break;
    case DTYPE: t->dtype = MOE_I64; break;
    case FLOAT:
      if (f->flags & ANY_FLOAT) continue;
      t->dtype = MOE_F16;
      break;
    case RANK:
      t->shape[t->rank] = t->stride[t->rank] = 1;
      t->rank++;
      break;
    case FIRST:
      if (f->flags & ROWS) continue;
      t->shape[0]++;
      break;
    case LAST:
      if ((f->flags & ROWS) && t->rank == 1) continue;
      t->shape[t->rank - 1]--;
      break;
    case STRIDE: t->stride[0] = -8; break;
    case OFFSET:
      if (t->dtype == MOE_U8) continue;
      t->offset++;
      break;
    case HOLES:
      if (!(f->flags & PACKED)) continue;
      t->stride[0]++;
      break;
    }
    moe_status st = call(&r);
    if (st != MOE_ERR_INVALID) fail_msg("%s spoilt in way %d: \"%s\"", f->name, kind, moe_strerror(st));
    if (!strstr(moe_last_error(), f->name))
      fail_msg("%s spoilt in way %d is not named: %s", f->name, kind, moe_last_error());
    assert_untouched(f->name);
  }
}
#define REFUSES_SPOILT(fields, call)                                                                                   \
  for (size_t i_ = 0; i_ < sizeof(fields) / sizeof(fields)[0]; i_++) refuses_spoilt(&(fields)[i_], call)

static moe_status call_select(struct rig *r)
{
  return moe_router_select(r->router, r->q, &r->s.ids, &r->s.grads.dgate_bias, &r->s.io.logits, &r->s.loss_scale);
}
static moe_status call_weights(struct rig *r)
{
  return moe_router_weights(r->router, r->q, &r->s.loss_scale, &r->s.io.logits, &r->s.ids);
}
static moe_status call_weights_backward(struct rig *r)
{
  return moe_router_weights_backward(r->router, r->q, &r->s.grads.dlogits, &r->s.loss_scale, &r->s.io.logits,
                                     &r->s.ids);
}
static void shape_as(moe_tensor *t, int64_t rows, int64_t cols)
{
  t->rank = cols ? 2 : 1;
  t->shape[0] = rows;
  t->shape[1] = cols;
  t->stride[0] = cols ? cols : 1;
  t->stride[1] = cols != 0;
}

static void router_calls(void **state)
{
  static const struct field select[] = { FIELD("ids", s.ids, PACKED), FIELD("logits", s.io.logits, ROWS),
                                         FIELD("weights", s.grads.dgate_bias, OPTIONAL | PACKED),
                                         FIELD("correction_bias", s.loss_scale, OPTIONAL) };
  static const struct field weights[] = { FIELD("weights", s.loss_scale, PACKED), FIELD("ids", s.ids, PACKED) };
  static const struct field backward[] = { FIELD("dweights", s.loss_scale, PACKED), FIELD("ids", s.ids, PACKED),
                                           FIELD("dlogits", s.grads.dlogits, ANY_FLOAT) };
  static moe_status (*const calls[])(struct rig *) = { call_select, call_weights, call_weights_backward };
  struct rig saved = good;
  (void)state;
  REFUSED("belongs to grouped sigmoid",
          (shape_as(&r.s.grads.dgate_bias, SMALL_T, SMALL_K), shape_as(&r.s.loss_scale, SMALL_E, 0)), call_select(&r));
  moe_router_free(good.router);
  grouped(&good, SMALL_E, 2, 1, SMALL_K);
  OK(moe_router_create(&good.router, good.ctx, &good.s.router_desc));
  saved.router = good.router;
  shape_as(&good.s.grads.dgate_bias, SMALL_T, SMALL_K);
  shape_as(&good.s.loss_scale, SMALL_E, 0);
  OK(call_select(&good));
  REFUSES_SPOILT(select, call_select);
  shape_as(&good.s.loss_scale, SMALL_T, SMALL_K);
  OK(call_weights(&good));
  OK(call_weights_backward(&good));
  REFUSES_SPOILT(weights, call_weights);
  REFUSES_SPOILT(backward, call_weights_backward);
  REFUSED("correction_bias is not packed", (shape_as(&r.s.loss_scale, SMALL_E, 0), r.s.loss_scale.stride[0] = 2),
          call_select(&r));
  for (int i = 0; i < 3; i++) {
    REFUSED("router is NULL", r.router = NULL, calls[i](&r));
    REFUSED("queue is NULL", r.q = NULL, calls[i](&r));
    REFUSED("different contexts", r.q = r.other_q, calls[i](&r));
  }
  fake_clear();
  const moe_tensor *t = &good.s.io.logits, *ids = &good.s.ids, *w = &good.s.loss_scale;
  FAILS(MOE_ERR_INVALID, "ids is NULL", moe_router_select(good.router, good.q, NULL, NULL, t, NULL));
  FAILS(MOE_ERR_INVALID, "logits is NULL", moe_router_select(good.router, good.q, ids, NULL, NULL, NULL));
  FAILS(MOE_ERR_INVALID, "weights is NULL", moe_router_weights(good.router, good.q, NULL, t, ids));
  FAILS(MOE_ERR_INVALID, "logits is NULL", moe_router_weights(good.router, good.q, w, NULL, ids));
  FAILS(MOE_ERR_INVALID, "ids is NULL", moe_router_weights(good.router, good.q, w, t, NULL));
  FAILS(MOE_ERR_INVALID, "dlogits is NULL", moe_router_weights_backward(good.router, good.q, NULL, w, t, ids));
  FAILS(MOE_ERR_INVALID, "dweights is NULL", moe_router_weights_backward(good.router, good.q, t, NULL, t, ids));
  assert_untouched("router");
  good = saved;
  copy_rig(&good);
}

/* ---- the branch -------------------------------------------------------------------------------------------------- */
static moe_status call_forward(struct rig *r)
{
  moe_state before = r->s.state;
  moe_status st = moe_experts_forward(r->experts, r->q, &r->s.io, &r->s.state);
  if (st) assert_memory_equal(&before, &r->s.state, sizeof before);
  return st;
}
static moe_status call_selected(struct rig *r)
{
  return moe_experts_forward_selected(r->experts, r->q, &r->s.io, MOE_GRAD_INPUT, &r->s.state);
}
static moe_status call_inference(struct rig *r)
{
  return moe_experts_inference(r->experts, r->q, &r->s.io);
}
static moe_status call_backward(struct rig *r)
{
  return moe_experts_backward(r->experts, r->q, &r->s.state, &r->s.io, &r->s.grads);
}

static void branch_forward(void **state)
{
  static const struct field tensors[] = {
    FIELD("x", s.io.x, ROWS),
    FIELD("logits", s.io.logits, 0),
    FIELD("y", s.io.y, 0),
    FIELD("gate", s.io.gate, 0),
    FIELD("up", s.io.up, 0),
    FIELD("down", s.io.down, 0),
    FIELD("gate_bias", s.io.gate_bias, 0),
    FIELD("up_bias", s.io.up_bias, 0),
    FIELD("down_bias", s.io.down_bias, 0),
    FIELD("ids", s.io.ids, OPTIONAL | PACKED),
  };
  static moe_status (*const calls[])(struct rig *) = { call_forward, call_selected, call_inference };
  (void)state;
  good.s.io.ids = good.s.ids;
  for (int i = 0; i < 3; i++) {
    OK(calls[i](&good));
    REFUSES_SPOILT(tensors, calls[i]);
    REFUSED("experts is NULL", r.experts = NULL, calls[i](&r));
    REFUSED("queue is NULL", r.q = NULL, calls[i](&r));
    REFUSED("different contexts", r.q = r.other_q, calls[i](&r));
    REFUSED("gate has stride 9 in dimension 1, declared 8", r.s.io.gate.stride[1] = 9, calls[i](&r));
    REFUSED("correction_bias", r.s.io.correction_bias = r.s.io.logits, calls[i](&r));
    REFUSED("scratch is not given", r.s.io.scratch.handle = NULL, calls[i](&r));
    REFUSED("scratch begins at offset", r.s.io.scratch.offset += 8, calls[i](&r));
    REFUSED_AS(MOE_ERR_TOO_SMALL, "scratch has 100 bytes", r.s.io.scratch.bytes = 100, calls[i](&r));
    REFUSED("_init", r.s.io.size = 0, calls[i](&r));
    REFUSED("tokens of top_k 2", r.s.io.x.shape[0] = 1 << 30, calls[i](&r));
    REFUSED("tokens of top_k 2", r.s.io.x.shape[0] = -1, calls[i](&r));
    if (calls[i] == call_inference) continue;
    REFUSED("saved is not given", r.s.io.saved.handle = NULL, calls[i](&r));
    REFUSED("saved begins at offset", r.s.io.saved.offset += 4, calls[i](&r));
    REFUSED_AS(MOE_ERR_TOO_SMALL, "saved has 0 bytes", r.s.io.saved.bytes = 0, calls[i](&r));
    REFUSED("state", r.s.state.size = 0, calls[i](&r));
  }
  REFUSED_AS(
      MOE_ERR_VERSION, "io sets byte",
      struct {
        moe_experts_io io;
        int64_t later;
      } newer = { .later = 1 };
      newer.io = r.s.io; newer.io.size = sizeof newer, moe_experts_inference(r.experts, r.q, &newer.io));
  REFUSED("io is NULL", (void)0, moe_experts_inference(r.experts, r.q, NULL));
  REFUSED("state is NULL", (void)0, moe_experts_forward(r.experts, r.q, &r.s.io, NULL));
  REFUSED("state is NULL", (void)0, moe_experts_forward_selected(r.experts, r.q, &r.s.io, 1, NULL));
  REFUSED("wanted 0x100", (void)0, moe_experts_forward_selected(r.experts, r.q, &r.s.io, 256, &r.s.state));
  good.s.io.ids.handle = NULL;
}

static void branch_backward(void **state)
{
  static const struct field tensors[] = {
    FIELD("gate", s.io.gate, 0),
    FIELD("up", s.io.up, 0),
    FIELD("down", s.io.down, 0),
    FIELD("gate_bias", s.io.gate_bias, 0),
    FIELD("up_bias", s.io.up_bias, 0),
    FIELD("down_bias", s.io.down_bias, 0),
    FIELD("dy", s.grads.dy, 0),
    FIELD("dx", s.grads.dx, 0),
    FIELD("dlogits", s.grads.dlogits, 0),
    FIELD("dgate", s.grads.dgate, 0),
    FIELD("dup", s.grads.dup, 0),
    FIELD("ddown", s.grads.ddown, 0),
    FIELD("dgate_bias", s.grads.dgate_bias, 0),
    FIELD("dup_bias", s.grads.dup_bias, 0),
    FIELD("ddown_bias", s.grads.ddown_bias, 0),
  };
  moe_state selected = moe_state_init();
  (void)state;
  OK(call_forward(&good));
  OK(call_backward(&good));
  REFUSES_SPOILT(tensors, call_backward);
  REFUSED("dx lies where dy does", r.s.grads.dx = r.s.grads.dy, call_backward(&r));
  REFUSED("dx lies where x does", r.s.grads.dx = r.s.io.x, call_backward(&r));
  REFUSED("y lies where x does", r.s.io.y = r.s.io.x, call_forward(&r));
  REFUSED("is written and has stride 0", r.s.grads.dx.stride[0] = 0, call_backward(&r));
  REFUSED("is written and has stride 0", r.s.grads.ddown.stride[1] = 0, call_backward(&r));
  REFUSED("is written and has stride 0", r.s.io.y.stride[1] = 0, call_forward(&r));
  REFUSED("experts is NULL", r.experts = NULL, call_backward(&r));
  REFUSED("queue is NULL", r.q = NULL, call_backward(&r));
  REFUSED("different contexts", r.q = r.other_q, call_backward(&r));
  REFUSED("scratch is not given", r.s.io.scratch.handle = NULL, call_backward(&r));
  REFUSED_AS(MOE_ERR_TOO_SMALL, "scratch has 5 bytes", r.s.io.scratch.bytes = 5, call_backward(&r));
  REFUSED_AS(MOE_ERR_STATE, "not filled", r.s.state = moe_state_init(), call_backward(&r));
  REFUSED_AS(MOE_ERR_STATE, "of another moe_experts", r.experts = r.other_experts, call_backward(&r));
  REFUSED("state is NULL", (void)0, moe_experts_backward(r.experts, r.q, NULL, &r.s.io, &r.s.grads));
  REFUSED("io is NULL", (void)0, moe_experts_backward(r.experts, r.q, &r.s.state, NULL, &r.s.grads));
  REFUSED("grads is NULL", (void)0, moe_experts_backward(r.experts, r.q, &r.s.state, &r.s.io, NULL));

  /* Less was kept than is asked for: never a zero. */
#define SELECTED(wanted) moe_experts_backward_selected(r.experts, r.q, &selected, &r.s.io, &r.s.grads, wanted)
  OK(moe_experts_forward_selected(good.experts, good.q, &good.s.io, MOE_GRAD_DOWN_BIAS, &selected));
  REFUSED_AS(MOE_ERR_NO_DERIVATIVE, "wanted 0x10, the forward kept what 0x80 needs", (void)0, SELECTED(MOE_GRAD_DOWN));
  REFUSED_AS(MOE_ERR_NO_DERIVATIVE, "wanted 0x81", (void)0, SELECTED(MOE_GRAD_INPUT | MOE_GRAD_DOWN_BIAS));
  OK(moe_experts_forward_selected(good.experts, good.q, &good.s.io, MOE_GRAD_INPUT, &selected));
  REFUSED_AS(MOE_ERR_NO_DERIVATIVE, "wanted 0x80", (void)0, SELECTED(MOE_GRAD_DOWN_BIAS));
  REFUSED_AS(MOE_ERR_NO_DERIVATIVE, "wanted 0x400", (void)0, SELECTED(1024));
  OK(moe_experts_forward_selected(good.experts, good.q, &good.s.io, 0, &selected));
  REFUSED_AS(MOE_ERR_NO_DERIVATIVE, "kept nothing", (void)0, SELECTED(MOE_GRAD_INPUT));
  REFUSED_AS(MOE_ERR_NO_DERIVATIVE, "kept nothing", moe_tensor t, moe_experts_route_ids(&t, &selected));
}

static void branch_views_and_texts(void **state)
{
  moe_tensor t;
  moe_state empty = moe_state_init();
  moe_experts_bytes bytes = moe_experts_bytes_init();
  char text[8];
  (void)state;
  fake_clear();
  FAILS(MOE_ERR_INVALID, "ids is NULL", moe_experts_route_ids(NULL, &good.s.state));
  FAILS(MOE_ERR_INVALID, "weights is NULL", moe_experts_route_weights(NULL, &good.s.state));
  FAILS(MOE_ERR_INVALID, "state is NULL", moe_experts_route_ids(&t, NULL));
  FAILS(MOE_ERR_STATE, "not filled", moe_experts_route_ids(&t, &empty));
  FAILS(MOE_ERR_STATE, "not filled", moe_experts_route_weights(&t, &empty));
  FAILS(MOE_ERR_INVALID, "experts is NULL", moe_experts_measure(&bytes, NULL, 6, 0));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_experts_measure(NULL, good.experts, 6, 0));
  FAILS(MOE_ERR_INVALID, "wanted 0x100", moe_experts_measure(&bytes, good.experts, 6, 256));
  FAILS(MOE_ERR_INVALID, "experts is NULL", moe_experts_explain(NULL, 6, text, sizeof text, NULL));
  FAILS(MOE_ERR_INVALID, "text is NULL", moe_experts_explain(good.experts, 6, NULL, 4, NULL));
  FAILS(MOE_ERR_INVALID, "-6 tokens", moe_experts_explain(good.experts, -6, text, sizeof text, NULL));
  FAILS(MOE_ERR_INVALID, "layer is NULL", moe_layer_explain(NULL, 6, text, sizeof text, NULL));
  FAILS(MOE_ERR_INVALID, "text is NULL", moe_layer_explain(good.layer, 6, NULL, 4, NULL));
  FAILS(MOE_ERR_INVALID, "tokens of top_k", moe_layer_explain(good.layer, INT64_MAX, text, sizeof text, NULL));
  assert_untouched("views");
}

/* ---- the layer --------------------------------------------------------------------------------------------------- */
static moe_status call_layer_forward(struct rig *r)
{
  moe_layer_state before = r->s.layer_state;
  moe_status st = moe_layer_forward(r->layer, r->q, &r->s.layer_io, &r->s.layer_state);
  if (st) assert_memory_equal(&before, &r->s.layer_state, sizeof before);
  return st;
}
static moe_status call_layer_inference(struct rig *r)
{
  return moe_layer_inference(r->layer, r->q, &r->s.layer_io);
}
static moe_status call_layer_backward(struct rig *r)
{
  return moe_layer_backward(r->layer, r->q, &r->s.layer_state, &r->s.layer_io);
}

static void layer_calls(void **state)
{
  static const struct field forward[] = { FIELD("x", s.layer_io.x, ROWS), FIELD("y", s.layer_io.y, 0),
                                          FIELD("ids", s.layer_io.ids, OPTIONAL | PACKED),
                                          FIELD("mask", s.layer_io.mask, OPTIONAL | PACKED) };
  static const struct field backward[] = { FIELD("dy", s.layer_io.dy, 0), FIELD("dx", s.layer_io.dx, OPTIONAL),
                                           FIELD("aux_scale", s.layer_io.aux_scale, OPTIONAL) };
  static moe_status (*const calls[])(struct rig *) = { call_layer_forward, call_layer_inference, call_layer_backward };
  (void)state;
  good.s.layer_io.ids = good.s.ids;
  good.s.layer_io.aux_scale = good.s.loss_scale;
  for (int i = 0; i < 3; i++) {
    OK(calls[i](&good));
    REFUSED("layer is NULL", r.layer = NULL, calls[i](&r));
    REFUSED("queue is NULL", r.q = NULL, calls[i](&r));
    REFUSED("different contexts", r.q = r.other_q, calls[i](&r));
    REFUSED("_init", r.s.layer_io.size = 20, calls[i](&r));
    REFUSED("params is not given", r.s.layer_io.params.handle = NULL, calls[i](&r));
    REFUSED("params begins at offset", r.s.layer_io.params.offset += 4, calls[i](&r));
    REFUSED_AS(MOE_ERR_TOO_SMALL, "params has 9 bytes", r.s.layer_io.params.bytes = 9, calls[i](&r));
    REFUSED("scratch is not given", r.s.layer_io.scratch.handle = NULL, calls[i](&r));
    REFUSED_AS(MOE_ERR_TOO_SMALL, "scratch has 9 bytes", r.s.layer_io.scratch.bytes = 9, calls[i](&r));
    if (calls[i] == call_layer_backward) break;
    REFUSES_SPOILT(forward, calls[i]);
    REFUSED("5 sequences do not divide 6 tokens", r.s.layer_io.sequences = 5, calls[i](&r));
    REFUSED("-1 sequences", r.s.layer_io.sequences = -1, calls[i](&r));
    REFUSED("tokens of top_k 2", r.s.layer_io.x.shape[0] = 1 << 30, calls[i](&r));
  }
  REFUSED("saved is not given", r.s.layer_io.saved.handle = NULL, call_layer_forward(&r));
  REFUSED_AS(MOE_ERR_TOO_SMALL, "saved has 9 bytes", r.s.layer_io.saved.bytes = 9, call_layer_forward(&r));
  REFUSED("state", r.s.layer_state.size = 4, call_layer_forward(&r));
  REFUSED("state is NULL", (void)0, moe_layer_forward(r.layer, r.q, &r.s.layer_io, NULL));
  REFUSED("io is NULL", (void)0, moe_layer_inference(r.layer, r.q, NULL));

  REFUSES_SPOILT(backward, call_layer_backward);
  REFUSED("grads is not given", r.s.layer_io.grads.handle = NULL, call_layer_backward(&r));
  REFUSED_AS(MOE_ERR_TOO_SMALL, "grads has 9 bytes", r.s.layer_io.grads.bytes = 9, call_layer_backward(&r));
  REFUSED_AS(MOE_ERR_STATE, "not filled", r.s.layer_state = moe_layer_state_init(), call_layer_backward(&r));
  REFUSED_AS(MOE_ERR_STATE, "of another layer", r.layer = r.other_layer, call_layer_backward(&r));
  REFUSED_AS(MOE_ERR_TOO_SMALL, "saved has 9 bytes", r.s.layer_state.saved.bytes = 9, call_layer_backward(&r));
  REFUSED("state is NULL", (void)0, moe_layer_backward(r.layer, r.q, NULL, &r.s.layer_io));
  good.s.layer_io.ids.handle = good.s.layer_io.aux_scale.handle = NULL;
}

static void layer_helpers(void **state)
{
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_layer_metrics metrics = moe_layer_metrics_init();
  moe_layer_state empty = moe_layer_state_init();
  moe_span small = good.s.layer_io.params;
  moe_tensor t, counts;
  int64_t n;
  (void)state;
  small.bytes = 16;
  fake_clear();
  FAILS(MOE_ERR_INVALID, "layer is NULL", moe_layer_measure(&bytes, NULL, 6, 1));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_layer_measure(NULL, good.layer, 6, 1));
  FAILS(MOE_ERR_INVALID, "-6 tokens", moe_layer_measure(&bytes, good.layer, -6, 1));
  FAILS(MOE_ERR_INVALID, "-1 sequences", moe_layer_measure(&bytes, good.layer, 6, -1));
  FAILS(MOE_ERR_INVALID, "layer is NULL", moe_layer_param(&t, NULL, NULL, NULL, small, small, 0));
  FAILS(MOE_ERR_TOO_SMALL, "params has 16 bytes", moe_layer_param(&t, NULL, NULL, good.layer, small, small, 0));
  FAILS(MOE_ERR_TOO_SMALL, "grads has 16 bytes", moe_layer_param(NULL, &t, NULL, good.layer, small, small, 0));
  FAILS(MOE_ERR_INVALID, "index", moe_layer_param(&t, NULL, NULL, good.layer, small, small, INT64_MIN));
  FAILS(MOE_ERR_INVALID, "layer is NULL", moe_layer_parameter_counts(&n, &n, NULL));
  FAILS(MOE_ERR_INVALID, "layer is NULL", moe_layer_init(NULL, good.q, good.s.layer_io.params, 1, 1));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_layer_init(good.layer, NULL, good.s.layer_io.params, 1, 1));
  FAILS(MOE_ERR_INVALID, "stddev nan", moe_layer_init(good.layer, good.q, good.s.layer_io.params, 1, NAN));
  FAILS(MOE_ERR_INVALID, "stddev -1", moe_layer_init(good.layer, good.q, good.s.layer_io.params, 1, -1));
  FAILS(MOE_ERR_TOO_SMALL, "params has 16 bytes", moe_layer_init(good.layer, good.q, small, 1, 1));
  FAILS(MOE_ERR_INVALID, "NULL", moe_layer_route_ids(NULL, &good.s.layer_state));
  FAILS(MOE_ERR_INVALID, "NULL", moe_layer_logits(NULL, &good.s.layer_state));
  FAILS(MOE_ERR_INVALID, "state is NULL", moe_layer_counts(&t, NULL));
  FAILS(MOE_ERR_STATE, "not filled", moe_layer_losses(&t, &empty));
  FAILS(MOE_ERR_STATE, "not filled", moe_layer_route_weights(&t, &empty));
  FAILS(MOE_ERR_STATE, "not filled", moe_layer_metrics_read(&metrics, NULL, good.layer, good.q, &empty));
  FAILS(MOE_ERR_STATE, "of another layer",
        moe_layer_metrics_read(&metrics, NULL, good.other_layer, good.q, &good.s.layer_state));
  FAILS(MOE_ERR_INVALID, "queue is NULL",
        moe_layer_metrics_read(&metrics, NULL, good.layer, NULL, &good.s.layer_state));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_layer_metrics_read(NULL, NULL, good.layer, good.q, &good.s.layer_state));

  OK(moe_layer_counts(&counts, &good.s.layer_state));
  FAILS(MOE_ERR_INVALID, "has no correction_bias",
        moe_layer_bias_step(good.layer, good.q, good.s.layer_io.params, &counts, 0.1));
  struct rig r;
  moe_layer *biased;
  copy_rig(&r);
  r.s.selection.softmax_bias = r.s.layer_desc.correction_bias = 1;
  OK(moe_layer_create(&biased, r.ctx, &r.s.layer_desc));
  fake_clear();
#define STEP(span, tensor, rate) moe_layer_bias_step(biased, good.q, span, tensor, rate)
  FAILS(MOE_ERR_INVALID, "counts", STEP(good.s.layer_io.params, NULL, 0.1));
  FAILS(MOE_ERR_INVALID, "rate is not finite", STEP(good.s.layer_io.params, &counts, NAN));
  FAILS(MOE_ERR_TOO_SMALL, "params has 16 bytes", STEP(small, &counts, 0.1));
  t = counts;
  t.dtype = MOE_F32;
  FAILS(MOE_ERR_INVALID, "counts is f32", STEP(good.s.layer_io.params, &t, 0.1));
  t = counts;
  t.shape[1] = 3;
  FAILS(MOE_ERR_INVALID, "counts has extent 3", STEP(good.s.layer_io.params, &t, 0.1));
  t = counts;
  t.shape[0] = 2;
  t.stride[0] = 64;
  FAILS(MOE_ERR_INVALID, "counts is not packed", STEP(good.s.layer_io.params, &t, 0.1));
  FAILS(MOE_ERR_INVALID, "layer is NULL", moe_layer_bias_step(NULL, good.q, small, &counts, 0.1));
  moe_layer_free(biased);
  assert_untouched("layer helpers");
}

/* ---- the optimizer ----------------------------------------------------------------------------------------------- */
static void optimizer(void **state)
{
  moe_adamw *out = good.opt;
  moe_adamw_info info = moe_adamw_info_init();
  moe_tensor p = good.s.io.x, g = good.s.grads.dx, bad;
  uint64_t bytes;
  (void)state;
  fake_clear();
#define ADAMW(text, spoil)                                                                                             \
  do {                                                                                                                 \
    moe_adamw_desc d = moe_adamw_desc_init();                                                                          \
    out = good.opt;                                                                                                    \
    d.dtype = MOE_F32;                                                                                                 \
    d.peak = 0.5;                                                                                                      \
    d.spoil;                                                                                                           \
    FAILS(MOE_ERR_INVALID, text, moe_adamw_create(&out, good.ctx, &d));                                                \
    assert_null(out);                                                                                                  \
  } while (0)
  ADAMW("dtype bf16", dtype = MOE_BF16);
  ADAMW("dtype ?", dtype = 0);
  ADAMW("beta1 1,", beta1 = 1);
  ADAMW("beta1 -0.5", beta1 = -0.5);
  ADAMW("beta2 nan", beta2 = NAN);
  ADAMW("eps -1", eps = -1);
  ADAMW("eps inf", eps = INFINITY);
  ADAMW("peak 0", peak = 0);
  ADAMW("peak inf", peak = INFINITY);
  ADAMW("floor 0.75", floor = 0.75);
  ADAMW("floor -1", floor = -1);
  ADAMW("warmup -1", warmup = -1);
  ADAMW("total -1", total = -1);
  ADAMW("warmup 6, total 5: wanted 0 <= warmup <= total", total = 5; d.warmup = 6);
  ADAMW("max_norm -1", max_norm = -1);
  ADAMW("max_norm inf", max_norm = INFINITY);
  ADAMW("loss_scale has rank 2", loss_scale = p);
  ADAMW("loss_scale is i32", loss_scale = good.s.ids);
  ADAMW("_init", size = 1);
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_adamw_create(NULL, good.ctx, NULL));
  FAILS(MOE_ERR_INVALID, "ctx is NULL", moe_adamw_create(&out, NULL, NULL));
  FAILS(MOE_ERR_INVALID, "desc is NULL", moe_adamw_create(&out, good.ctx, NULL));

  FAILS(MOE_ERR_INVALID, "opt is NULL", moe_adamw_add(NULL, &p, &g, 0, 1));
  FAILS(MOE_ERR_INVALID, "param is not given", moe_adamw_add(good.opt, NULL, &g, 0, 1));
  FAILS(MOE_ERR_INVALID, "grad is not given", moe_adamw_add(good.opt, &p, NULL, 0, 1));
  FAILS(MOE_ERR_INVALID, "decay -1", moe_adamw_add(good.opt, &p, &g, -1, 1));
  FAILS(MOE_ERR_INVALID, "decay nan", moe_adamw_add(good.opt, &p, &g, NAN, 1));
  FAILS(MOE_ERR_INVALID, "rate_scale inf", moe_adamw_add(good.opt, &p, &g, 0, INFINITY));
  FAILS(MOE_ERR_INVALID, "rate_scale -2", moe_adamw_add(good.opt, &p, &g, 0, -2));
#define ADD(text, which, spoil)                                                                                        \
  bad = which;                                                                                                         \
  bad.spoil;                                                                                                           \
  FAILS(MOE_ERR_INVALID, text, moe_adamw_add(good.opt, &which == &p ? &bad : &p, &which == &p ? &g : &bad, 0, 1))
  ADD("param is i64", p, dtype = MOE_I64);
  ADD("param is f64", p, dtype = MOE_F64);
  ADD("param is not packed", p, stride[0] = 9);
  ADD("param", p, offset += 2);
  ADD("param", p, rank = 7);
  ADD("param", p, shape[0] = -6);
  ADD("grad is u8", g, dtype = MOE_U8);
  ADD("grad is not packed", g, stride[0] = 9);
  ADD("grad", g, offset += 1);
  ADD("grad", g, shape[0] = 5);
  FAILS(MOE_ERR_INVALID, "opt is NULL", moe_adamw_measure(&bytes, NULL));
  FAILS(MOE_ERR_INVALID, "bytes is NULL", moe_adamw_measure(NULL, good.opt));
  OK(moe_adamw_add(good.opt, &p, &g, 0, 1));
  FAILS(MOE_ERR_STATE, "before moe_adamw_bind", moe_adamw_step(good.opt, good.q));
  FAILS(MOE_ERR_STATE, "before moe_adamw_bind", moe_adamw_read(&info, good.opt, good.q));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_adamw_bind(good.opt, NULL, good.s.layer_io.saved));
  FAILS(MOE_ERR_INVALID, "different contexts", moe_adamw_bind(good.opt, good.other_q, good.s.layer_io.saved));
  FAILS(MOE_ERR_TOO_SMALL, "state has 9 bytes", moe_adamw_bind(good.opt, good.q, (moe_span){ p.handle, 0, 9 }));
  FAILS(MOE_ERR_INVALID, "state is not given", moe_adamw_bind(good.opt, good.q, (moe_span){ NULL, 0, 1 << 20 }));
  FAILS(MOE_ERR_INVALID, "a multiple of 16", moe_adamw_bind(good.opt, good.q, (moe_span){ p.handle, 8, 1 << 15 }));
  assert_untouched("optimizer");
  OK(moe_adamw_bind(good.opt, good.q, good.s.layer_io.saved));
  fake_clear();
  FAILS(MOE_ERR_STATE, "after moe_adamw_bind", moe_adamw_add(good.opt, &p, &g, 0, 1));
  FAILS(MOE_ERR_INVALID, "opt is NULL", moe_adamw_step(NULL, good.q));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_adamw_step(good.opt, NULL));
  FAILS(MOE_ERR_INVALID, "different contexts", moe_adamw_step(good.opt, good.other_q));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_adamw_read(&info, good.opt, NULL));
  assert_untouched("optimizer");
}

/* ---- the tape ---------------------------------------------------------------------------------------------------- */
/* The operation fails, everything after it does nothing and says the same, and reset makes the tape good again. */
#define TAPE(status, text, operation)                                                                                  \
  do {                                                                                                                 \
    moe_tape *t = good.tape;                                                                                           \
    moe_tape_reset(t);                                                                                                 \
    moe_value x = moe_tape_leaf(t, &good.s.io.x, 1), w = moe_tape_leaf(t, &good.s.grads.dgate_bias, 0),                \
              ids = moe_tape_leaf(t, &flat_ids, 0);                                                                    \
    assert_true(x.id &&w.id &&ids.id);                                                                                 \
    fake_clear();                                                                                                      \
    moe_value v_ = (operation);                                                                                        \
    assert_true(v_.id == 0);                                                                                           \
    FAILS(status, text, moe_tape_status(t));                                                                           \
    assert_true(moe_tape_add(t, x, x).id == 0 && moe_tape_sum(t, x).id == 0);                                          \
    assert_true(moe_tape_leaf(t, &good.s.io.x, 1).id == 0 && moe_tape_grad(t, x).id == 0);                             \
    FAILS(status, text, moe_tape_backward(t, x, (moe_value){ 0 }, 0));                                                 \
    FAILS(status, text, moe_tape_tensor(&bad, t, x));                                                                  \
    FAILS(status, text, moe_tape_read(t, x, &number, 1));                                                              \
    assert_untouched(#operation);                                                                                      \
    moe_tape_reset(t);                                                                                                 \
    OK(moe_tape_status(t));                                                                                            \
  } while (0)
#define NO_VALUE ((moe_value){ 0 })

static moe_value backward_of(moe_tape *t, moe_value of, moe_value seed, int64_t flags)
{
  (void)!moe_tape_backward(t, of, seed, flags); /* the error sticks */
  return NO_VALUE;
}

static void tape(void **state)
{
  static const int64_t shape[8] = { 48, 1, 1, 1, 1, 1, 1, 1 }, wrong[1] = { 47 }, negative[2] = { -6, -8 };
  moe_tensor flat_ids = good.s.ids, bad = good.s.io.x, grad = good.s.grads.dx;
  moe_tape_moe options = moe_tape_moe_init(), none = options;
  double number;
  (void)state;
  flat_ids.rank = 1;
  flat_ids.shape[0] = SMALL_T * SMALL_K;
  flat_ids.stride[0] = 1;
  options.params = good.s.layer_io.params;
  options.grads = good.s.layer_io.grads;

#define SPOILT(tensor, spoil) (bad = tensor, bad.spoil, &bad)
#define INVALID(text, operation) TAPE(MOE_ERR_INVALID, text, operation)
  INVALID("not given", moe_tape_leaf(t, NULL, 1));
  INVALID("not given", moe_tape_leaf(t, SPOILT(good.s.io.x, handle = NULL), 1));
  INVALID("not a packed", moe_tape_leaf(t, SPOILT(good.s.io.x, stride[0] = 9), 1));
  INVALID("moe_tape_leaf: tensor has rank 7", moe_tape_leaf(t, SPOILT(good.s.io.x, rank = 7), 1));
  INVALID("tensor has rank -1", moe_tape_leaf(t, SPOILT(good.s.io.x, rank = -1), 1));
  INVALID("tensor has dtype 0", moe_tape_leaf(t, SPOILT(good.s.io.x, dtype = 0), 1));
  INVALID("extent -6 in dimension 0", moe_tape_leaf(t, SPOILT(good.s.io.x, shape[0] = -6), 1));
  INVALID("in dimension 0", moe_tape_leaf(t, SPOILT(good.s.io.x, shape[0] = (int64_t)1 << 62), 1));
  INVALID("begins at byte", moe_tape_leaf(t, SPOILT(good.s.io.x, offset += 1), 1));
  INVALID("i32 has no gradient", moe_tape_leaf(t, &good.s.ids, 1));
  INVALID("grad is NULL", moe_tape_param(t, &good.s.io.x, NULL));
  INVALID("grad is not given", moe_tape_param(t, &good.s.io.x, SPOILT(grad, handle = NULL)));
  INVALID("grad has extent 5 in dimension 0, 6", moe_tape_param(t, &good.s.io.x, SPOILT(grad, shape[0] = 5)));
  INVALID("grad is f64 of a tensor of f32", moe_tape_param(t, &good.s.io.x, SPOILT(grad, dtype = MOE_F64)));
  INVALID("grad is i32, f64, f32", moe_tape_param(t, &good.s.io.x, SPOILT(grad, dtype = MOE_I32)));
  INVALID("grad is not packed", moe_tape_param(t, &good.s.io.x, SPOILT(grad, stride[0] = 10)));
  INVALID("grad begins at byte", moe_tape_param(t, &good.s.io.x, SPOILT(grad, offset += 1)));
  INVALID("moe_tape_add: the null value", moe_tape_add(t, x, NO_VALUE));
  INVALID("moe_tape_add: the null value", moe_tape_add(t, NO_VALUE, x));
  INVALID("do not broadcast", moe_tape_add(t, x, w));
  INVALID("do not broadcast", moe_tape_mul(t, w, x));
  INVALID("a is i32", moe_tape_mul(t, ids, ids));
  INVALID("moe_tape_scale: a is i32", moe_tape_scale(t, ids, 2));
  INVALID("moe_tape_scale: the null value", moe_tape_scale(t, NO_VALUE, 2));
  INVALID("48 elements, shape has 47", moe_tape_reshape(t, x, 1, wrong));
  INVALID("moe_tape_reshape: 48 elements, shape has 96", moe_tape_reshape(t, x, 1, (const int64_t[]){ 96 }));
  INVALID("moe_tape_reshape: moe_tensor_packed: ", moe_tape_reshape(t, x, 2, NULL));
  INVALID("at least one axis", moe_tape_sum_axes(t, x, 1, NULL, 0));
  INVALID("at least one axis", moe_tape_max_axes(t, x, 2, NULL, 1));
  INVALID("rank 7", moe_tape_reshape(t, x, 7, shape));
  INVALID("shape[1] is -8", moe_tape_reshape(t, x, 2, negative));
  INVALID("inner extents 8 and 6", moe_tape_matmul(t, x, x, 0, 0));
  INVALID("inner extents 6 and 8", moe_tape_matmul(t, x, x, 1, 1));
  INVALID("wanted matrices", moe_tape_matmul(t, x, ids, 0, 0));
  INVALID("moe_tape_matmul: the null value", moe_tape_matmul(t, x, NO_VALUE, 0, 1));
  INVALID("moe_tape_embedding", moe_tape_embedding(t, ids, ids));
  INVALID("moe_tape_embedding", moe_tape_embedding(t, x, x));
  INVALID("moe_tape_rms_norm", moe_tape_rms_norm(t, x, x, 1e-6));
  INVALID("moe_tape_rms_norm: the null value", moe_tape_rms_norm(t, x, NO_VALUE, 1e-6));
  INVALID("moe_tape_cross_entropy", moe_tape_cross_entropy(t, x, ids));
  INVALID("moe_tape_cross_entropy", moe_tape_cross_entropy(t, x, w));
  INVALID("moe_tape_sum: a is i32", moe_tape_sum(t, ids));
  INVALID("moe_tape_sum: the null value", moe_tape_sum(t, NO_VALUE));
  INVALID("moe_tape_mean: the null value", moe_tape_mean(t, NO_VALUE));
  INVALID("layer is NULL", moe_tape_moe_layer(t, NULL, x, &options, NULL));
  INVALID("options is NULL", moe_tape_moe_layer(t, good.layer, x, NULL, NULL));
  INVALID("params is not given", moe_tape_moe_layer(t, good.layer, x, &none, NULL));
  INVALID("x has extent 16", moe_tape_moe_layer(t, good.layer, w, &options, NULL));
  INVALID("x has rank 1", moe_tape_moe_layer(t, good.layer, ids, &options, NULL));
  none = options;
  none.grads.bytes = 64;
  TAPE(MOE_ERR_TOO_SMALL, "grads has 64 bytes", moe_tape_moe_layer(t, good.layer, x, &none, NULL));
  INVALID("moe_tape_backward: the null value", backward_of(t, NO_VALUE, NO_VALUE, 0));
  INVALID("`of` has 48 elements", backward_of(t, x, NO_VALUE, 0));
  INVALID("flags 0x8", backward_of(t, x, NO_VALUE, 8));
  TAPE(MOE_ERR_STATE, "from before moe_tape_reset", moe_tape_add(t, x, (moe_value){ x.id + 100 }));

  moe_tape *out = good.tape;
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_tape_create(&out, NULL, NULL));
  assert_null(out);
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_tape_create(NULL, good.q, NULL));
  FAILS(MOE_ERR_INVALID, "tape is NULL", moe_tape_status(NULL));
  FAILS(MOE_ERR_INVALID, "tape is NULL", moe_tape_tensor(&bad, NULL, NO_VALUE));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_tape_tensor(NULL, good.tape, NO_VALUE));
  FAILS(MOE_ERR_INVALID, "tape is NULL", moe_tape_backward(NULL, NO_VALUE, NO_VALUE, 0));
  FAILS(MOE_ERR_INVALID, "tape is NULL", moe_tape_read(NULL, NO_VALUE, &number, 1));
  assert_true(moe_tape_add(NULL, NO_VALUE, NO_VALUE).id == 0 && moe_tape_leaf(NULL, &bad, 0).id == 0);
  assert_true(moe_tape_grad(NULL, NO_VALUE).id == 0);
  uint64_t held = 1, used = 1;
  moe_tape_reset(NULL);
  moe_tape_memory(NULL, &held, &used);
  assert_true(held == 0 && used == 0);
}

static void tape_values(void **state)
{
  moe_tape *t = good.tape;
  moe_tensor tensor;
  double number;
  (void)state;
  moe_tape_reset(t);
  moe_value x = moe_tape_leaf(t, &good.s.io.x, 0), y = moe_tape_leaf(t, &good.s.io.x, 1);
  fake_clear();
  FAILS(MOE_ERR_INVALID, "the null value", moe_tape_tensor(&tensor, t, NO_VALUE));
  FAILS(MOE_ERR_INVALID, "n < 0", moe_tape_read(t, x, &number, -1));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_tape_read(t, x, NULL, 1));
  OK(moe_tape_status(t)); /* reading wrongly spoils nothing */
  assert_true(moe_tape_grad(t, NO_VALUE).id == 0 && moe_tape_grad(t, y).id == 0);
  assert_untouched("values");
  moe_value constant = moe_tape_sum(t, x);
  FAILS(MOE_ERR_INVALID, "depends on nothing that needs a gradient", moe_tape_backward(t, constant, NO_VALUE, 0));
  moe_tape_reset(t);
  y = moe_tape_leaf(t, &good.s.io.x, 1);
  moe_value sum = moe_tape_sum(t, y);
  FAILS(MOE_ERR_INVALID, "seed differs", moe_tape_backward(t, sum, y, 0));
  moe_tape_reset(t);
  FAILS(MOE_ERR_STATE, "from before moe_tape_reset", moe_tape_tensor(&tensor, t, x));
  const moe_value number_0 = { y.id >> 32 << 32 };
  FAILS(MOE_ERR_STATE, "from before moe_tape_reset", moe_tape_tensor(&tensor, t, number_0));
  assert_int_equal(moe_tape_grad(t, number_0).id, 0);
  OK(moe_tape_status(t));
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(contexts),
    cmocka_unit_test(queues),
    cmocka_unit_test(spans),
    cmocka_unit_test(values_of_tensors),
    cmocka_unit_test(selections_and_weights),
    cmocka_unit_test(experts_descriptors),
    cmocka_unit_test(layer_descriptors),
    cmocka_unit_test(router_calls),
    cmocka_unit_test(branch_forward),
    cmocka_unit_test(branch_backward),
    cmocka_unit_test(branch_views_and_texts),
    cmocka_unit_test(layer_calls),
    cmocka_unit_test(layer_helpers),
    cmocka_unit_test(optimizer),
    cmocka_unit_test(tape),
    cmocka_unit_test(tape_values),
  };
  return cmocka_run_group_tests(tests, open_rig, close_rig) ? 1 : 0;
}
