/* t_plan.c - what the branch and the layer will do, without a device: bytes that measure gives, ops that a call
   launches (nothing that was not asked for), the choice of implementations, and lifetimes. */
#include "moe_test.h"

#include "config.h"
#include "core/arena.h"
#include "core/experts.h"
#include "core/kernels/kernels.h"
#include "fake.h"
#include "small.h"

static uint64_t up256(uint64_t bytes)
{
  return (bytes + 255) / 256 * 256;
}

/* A queue on a new fake device; both are the test's to free. */
static moe_queue *open_queue(void)
{
  moe_context *ctx = fake_open();
  moe_queue *q = NULL;
  assert_non_null(ctx);
  OK(moe_queue_create(&q, ctx));
  moe_context_free(ctx); /* the queue keeps it */
  fake_clear();
  return q;
}

static int setup(void **state)
{
  (void)state;
  fake_reset();
  return 0;
}

/* A test leaves nothing alive (one that fails does, and is forgiven for the sake of the next). */
static int teardown(void **state)
{
  static long left;
  long more = fake.devices + fake.queues + fake.blocks - left;
  (void)state;
  left += more;
  return more != 0;
}

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */
static void plan_scratch(void **state)
{
  static const int64_t R[] = { 0, 1, 255, 256, 257, 65536, 1048577, 2147483647 };
  static const int64_t E[] = { 1, 2, 8, 127, 512, 4096, 1 << 20 };
  (void)state;
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < 7; k++) {
      int64_t n = moe__plan_scratch(R[i], E[k]);
      assert_true(n >= E[k] && n % E[k] == 0);             /* whole tables of counts, one at least */
      assert_true(n <= (E[k] > 1 << 20 ? E[k] : 1 << 20)); /* and never many megabytes */
      if (i) assert_true(n >= moe__plan_scratch(R[i - 1], E[k]));
    }
}

static void balance_scratch(void **state)
{
  (void)state;
  for (int64_t S = 1; S <= 64; S *= 2)
    for (int64_t E = 1; E <= 512; E *= 8)
      for (int64_t n = 0; n < 4; n++) {
        int64_t here = moe__balance_scratch(n * S, S, E), more = moe__balance_scratch((n + 1) * S, S, E);
        assert_true(here >= 0 && more > here);
      }
  assert_true(moe__balance_scratch(2147483647, 1, 512) > 0);
  assert_true(moe__balance_scratch(2147483647, 2147483647, 1 << 20) > 0);
}

static void slots_past_2_to_the_31_are_refused(void **state)
{
  static int place;
  moe_tensor any = { &place, 0, MOE_I32, 1, { 0 }, { 1 } };
  struct moe__args_plan plan = { .dtype = MOE_F32,
                                 .offs = any,
                                 .row2slot = any,
                                 .slot2row = any,
                                 .ids = any,
                                 .scratch = any,
                                 .T = 1 << 30,
                                 .K = 2,
                                 .E = 4 };
  struct moe__args_combine combine = { .dtype = MOE_F32, .y = any, .rows = any, .T = 1 << 30, .K = 4, .D = 1 };
  (void)state;
  FAILS(MOE_ERR_INVALID, "plan: T*K past 2^31-1", moe__check_plan(&plan));
  plan.K = INT32_MAX;
  plan.T = INT32_MAX;
  FAILS(MOE_ERR_INVALID, "plan: T*K past 2^31-1", moe__check_plan(&plan));
  plan.K = 0;
  FAILS(MOE_ERR_INVALID, "plan: K 0", moe__check_plan(&plan));
  plan.K = 1;
  plan.T = (int64_t)1 << 31;
  FAILS(MOE_ERR_INVALID, "plan: T 2147483648", moe__check_plan(&plan));
  FAILS(MOE_ERR_INVALID, "combine: T*K past 2^31-1", moe__check_combine(&combine));
}

static void primitive_ops_refuse(void **state)
{
  static int place;
  const moe_tensor t = { &place, 0, MOE_F32, 2, { 3, 4 }, { 4, 1 } };
  struct moe__args_nd_map map = { .dtype = MOE_F32, .y = t, .a = t, .b = t, .c = t, .op = MOE__ND_WHERE };
  struct moe__args_nd_reduce sum = { .dtype = MOE_F32, .y = t, .a = t, .axes = 2 };
  struct moe__args_nd_dropout drop = { .dtype = MOE_F32, .p = 1.5 };
  struct moe__args_gemm batch = { .dtype = MOE_F32, .c = t, .a = t, .b = t, .M = 3, .N = 3, .K = 4, .batch = 2 };
  struct moe__args_xent_fwd loss = { .dtype = MOE_F32, .V = 1, .smoothing = 1 };
  struct moe__args_gather_cols pick = { .dtype = MOE_F32, .y = t, .x = t, .ids = t, .T = 3, .E = 4, .K = 4 };
  struct moe__args_scatter_cols put = { .dtype = MOE_F32, .y = t, .x = t, .ids = t, .T = 3, .E = 4, .K = 4 };
  (void)state;
  OK(moe__check_nd_map(&map));
  map.a.dtype = MOE_U8;
  OK(moe__check_nd_map(&map));
  map.a.dtype = MOE_I64;
  FAILS(MOE_ERR_INVALID, "nd_map: a is i64, f32, bf16, f16, i32 or u8 is wanted", moe__check_nd_map(&map));
  map.a.dtype = MOE_I32;
  map.op = MOE__ND_COPY;
  OK(moe__check_nd_map(&map));
  map.op = MOE__ND_ADD;
  FAILS(MOE_ERR_INVALID, "nd_map: a is i32, f32, bf16 or f16 is wanted", moe__check_nd_map(&map));
  map.a = t;
  map.b.shape[0] = 1;
  FAILS(MOE_ERR_INVALID, "nd_map: b has extent 1 in dimension 0, 3 is wanted", moe__check_nd_map(&map));
  map.op = MOE__ND_EXP;
  OK(moe__check_nd_map(&map));
  map.y.stride[0] = 0;
  FAILS(MOE_ERR_INVALID, "nd_map: y is written, and has stride 0 over extent 3 in dimension 0",
        moe__check_nd_map(&map));
  map.y.rank = 7;
  FAILS(MOE_ERR_INVALID, "nd_map: y has rank 7, wanted 0..6", moe__check_nd_map(&map));
  map.y = map.a = (moe_tensor){ &place, 0, MOE_F32, 2, { INT64_MAX / 2, 3 }, { 3, 1 } };
  FAILS(MOE_ERR_INVALID, "nd_map: y has a negative extent, or too many elements", moe__check_nd_map(&map));

  FAILS(MOE_ERR_INVALID, "nd_reduce: y has extent 4 in dimension 1, 1 is wanted", moe__check_nd_reduce(&sum));
  sum.y.shape[1] = 1;
  OK(moe__check_nd_reduce(&sum));
  sum.axes = 4;
  FAILS(MOE_ERR_INVALID, "nd_reduce: axes 4 outside 0..3", moe__check_nd_reduce(&sum));
  sum.axes = 2;
  sum.op = MOE__ND_LARGEST;
  sum.accumulate = 1;
  FAILS(MOE_ERR_INVALID, "nd_reduce: accumulate 1 outside 0..0", moe__check_nd_reduce(&sum));
  sum.accumulate = 0;
  sum.a.shape[1] = 16385;
  assert_int_equal(moe__nd_reduce_scratch(&sum.a, 2), 6);
  FAILS(MOE_ERR_INVALID, "nd_reduce: scratch is not given", moe__check_nd_reduce(&sum));

  FAILS(MOE_ERR_INVALID, "nd_dropout: p 1.5, wanted 0..1", moe__check_nd_dropout(&drop));
  FAILS(MOE_ERR_INVALID, "gemm: c has rank 2, 3 is wanted", moe__check_gemm(&batch));
  batch.c = (moe_tensor){ &place, 0, MOE_F32, 3, { 2, 3, 3 }, { 0, 3, 1 } };
  FAILS(MOE_ERR_INVALID, "gemm: c is written, and has stride 0 over extent 2 in dimension 0", moe__check_gemm(&batch));
  FAILS(MOE_ERR_INVALID, "xent_fwd: smoothing 1, wanted 0 <= smoothing < 1", moe__check_xent_fwd(&loss));

  FAILS(MOE_ERR_INVALID, "gather_cols: ids is f32, i32 is wanted", moe__check_gather_cols(&pick));
  FAILS(MOE_ERR_INVALID, "scatter_cols: ids is f32, i32 is wanted", moe__check_scatter_cols(&put));
  pick.ids.dtype = put.ids.dtype = MOE_I32;
  OK(moe__check_gather_cols(&pick));
  OK(moe__check_scatter_cols(&put));
  pick.ids.stride[0] = 5;
  FAILS(MOE_ERR_INVALID, "gather_cols: ids is not packed", moe__check_gather_cols(&pick));
  put.y.stride[1] = 0;
  FAILS(MOE_ERR_INVALID, "scatter_cols: y is written, and has stride 0", moe__check_scatter_cols(&put));
}

/* ---- measure ----------------------------------------------------------------------------------------------------- */
static void saved_is_h_and_the_routing_and_nothing_else(void **state)
{
  static const int64_t tokens[] = { 0, 1, 5, 6, 64, 1000, 131073 };
  static const struct {
    int64_t dtype, gated;
    uint64_t h; /* bytes of H for each of the R*F */
    uint64_t weight;
  } cases[] = { { MOE_BF16, 1, 4, 4 }, { MOE_F16, 1, 4, 4 }, { MOE_BF16, 0, 2, 4 },
                { MOE_F32, 1, 8, 4 },  { MOE_F32, 0, 4, 4 }, { MOE_F64, 1, 16, 8 } };
  moe_queue *q = open_queue();
  (void)state;
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    struct small s;
    moe_experts *experts;
    moe_experts_bytes bytes = moe_experts_bytes_init();
    small_options(&s, cases[c].dtype);
    s.activation.gated = cases[c].gated;
    OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
      uint64_t R = (uint64_t)tokens[i] * SMALL_K;
      uint64_t metadata = up256(cases[c].weight * R) + 3 * up256(4 * R) + up256(4 * (SMALL_E + 1));
      OK(moe_experts_measure(&bytes, experts, tokens[i], MOE_GRAD_INPUT | MOE_GRAD_UP));
      assert_int_equal(bytes.saved, up256(cases[c].h * R * SMALL_F) + metadata);
      OK(moe_experts_measure(&bytes, experts, tokens[i], MOE_GRAD_LOGITS));
      assert_int_equal(bytes.saved, up256(cases[c].h * R * SMALL_F) + metadata);
      OK(moe_experts_measure(&bytes, experts, tokens[i], MOE_GRAD_DOWN_BIAS)); /* needs no H */
      assert_int_equal(bytes.saved, metadata);
      OK(moe_experts_measure(&bytes, experts, tokens[i], 0));
      assert_int_equal(bytes.saved, 0);
    }
    moe_experts_free(experts);
  }
  moe_queue_free(q);
}

static void scratch_is_what_the_wanted_gradients_need(void **state)
{
  struct small s;
  moe_experts *experts;
  moe_queue *q = open_queue();
  const uint64_t R = 1000 * SMALL_K, a = up256(4 * R * SMALL_F), x = up256(4 * R * SMALL_D), w = up256(4 * R);
  struct {
    int64_t wanted;
    uint64_t backward;
  } cases[] = {
    { MOE_GRAD_UP, 3 * a },
    { MOE_GRAD_DOWN, 4 * a },
    { MOE_GRAD_INPUT, 3 * a + x },
    { MOE_GRAD_LOGITS, 3 * a + w },
    { MOE_GRAD_LOGITS | MOE_GRAD_INPUT | MOE_GRAD_DOWN | MOE_GRAD_UP, 4 * a + x + w },
  };
  (void)state;
  small_options(&s, MOE_F32);
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    moe_experts_bytes bytes = moe_experts_bytes_init();
    OK(moe_experts_measure(&bytes, experts, 1000, cases[i].wanted));
    uint64_t forward = a + x + up256(4 * (uint64_t)moe__plan_scratch((int64_t)R, SMALL_E));
    assert_int_equal(bytes.scratch, forward > cases[i].backward ? forward : cases[i].backward);
  }
  moe_experts_free(experts);
  moe_queue_free(q);
}

static void measure_refuses_too_many_tokens(void **state)
{
  struct small s;
  moe_experts *experts;
  moe_layer *layer;
  moe_queue *q = open_queue();
  moe_experts_bytes bytes = moe_experts_bytes_init(), before = bytes;
  moe_layer_bytes layer_bytes = moe_layer_bytes_init();
  (void)state;
  small_options(&s, MOE_BF16);
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
  OK(moe_layer_create(&layer, q->ctx, &s.layer_desc));
  FAILS(MOE_ERR_INVALID, "1073741824 tokens of top_k 2", moe_experts_measure(&bytes, experts, 1 << 30, 0));
  FAILS(MOE_ERR_INVALID, "T*K < 2^31", moe_experts_measure(&bytes, experts, INT64_MAX, 0));
  FAILS(MOE_ERR_INVALID, "-1 tokens", moe_experts_measure(&bytes, experts, -1, 0));
  assert_memory_equal(&bytes, &before, sizeof bytes);
  OK(moe_experts_measure(&bytes, experts, (1 << 30) - 1, MOE_GRAD_INPUT));
  assert_true(bytes.saved > (uint64_t)4 * SMALL_F * INT32_MAX - 4096); /* 64-bit sizes */
  FAILS(MOE_ERR_INVALID, "T*K < 2^31", moe_layer_measure(&layer_bytes, layer, 1 << 30, 1));
  FAILS(MOE_ERR_INVALID, "3 sequences do not divide 4 tokens", moe_layer_measure(&layer_bytes, layer, 4, 3));
  OK(moe_layer_measure(&layer_bytes, layer, 1 << 20, 1 << 10));
  moe_layer_free(layer);
  moe_experts_free(experts);
  moe_queue_free(q);
}

static void sizes_past_2_to_the_63_are_refused(void **state)
{
  struct small s;
  moe_experts *experts;
  moe_experts_bytes bytes = moe_experts_bytes_init();
  moe_queue *q = open_queue();
  (void)state;
  small_options(&s, MOE_F64);
  s.experts_desc.d_ff = 1 << 24;
  s.experts_desc.d_model = 1 << 24;
  s.experts_desc.n_experts = 1 << 20; /* 2^68 elements */
  FAILS(MOE_ERR_INVALID, "moe_experts_create: gate has more than 2^63-1 bytes",
        moe_experts_create(&experts, q->ctx, &s.experts_desc));
  assert_null(experts);
  s.experts_desc.n_experts = 2;
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc)); /* 2^49: fine */
  OK(moe_experts_measure(&bytes, experts, (1 << 30) - 1, MOE_GRAD_UP));
  moe_experts_free(experts);
  moe_queue_free(q);
}

/* ---- what a call launches ---------------------------------------------------------------------------------------- */
static long sum_of_ops(void)
{
  long sum = 0;
  for (int i = 0; i < FAKE_OPS; i++) sum += fake.ops[i];
  return sum;
}

static void forward_launches_its_six_ops(void **state)
{
  struct small s;
  moe_experts *experts;
  (void)state;
  fake.own_ops = 1;
  moe_queue *q = open_queue();
  small_options(&s, MOE_F32);
  OK(small_memory(&s, q->ctx, q));
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
  for (int how = 0; how < 4; how++) { /* forward, selected, inference, replay of given ids */
    fake_clear();
    if (how == 3) s.io.ids = s.ids;
    if (how == 1) OK(moe_experts_forward_selected(experts, q, &s.io, MOE_GRAD_DOWN_BIAS, &s.state));
    else if (how == 2) OK(moe_experts_inference(experts, q, &s.io));
    else OK(moe_experts_forward(experts, q, &s.io, &s.state));
    assert_int_equal(fake.ops[FAKE_select], how != 3);
    assert_int_equal(fake.writes, how == 3);            /* the copy of the ids */
    assert_int_equal(fake.ops[FAKE_weights], how == 3); /* else the selection's */
    assert_int_equal(fake.ops[FAKE_plan], 1);
    assert_int_equal(fake.ops[FAKE_ggemm_rows], 2);
    assert_int_equal(fake.ops[FAKE_act_fwd], 1);
    assert_int_equal(fake.ops[FAKE_combine], 1);
    assert_int_equal(sum_of_ops(), 6);
  }
  moe_experts_free(experts);
  small_free(&s);
  moe_queue_free(q);
}

/* Every subset of the eight gradients. */
static void backward_launches_nothing_that_was_not_asked_for(void **state)
{
  struct small s;
  moe_experts *experts;
  (void)state;
  fake.own_ops = 1;
  moe_queue *q = open_queue();
  small_options(&s, MOE_F32);
  OK(small_memory(&s, q->ctx, q));
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
  OK(moe_experts_forward(experts, q, &s.io, &s.state));
  for (int64_t wanted = 0; wanted < 256; wanted++) {
    moe_experts_grads g = moe_experts_grads_init();
    g.dy = s.grads.dy;
#define ASKED(bit, field)                                                                                              \
  int field = (wanted & (bit)) != 0;                                                                                   \
  if (field) g.field = s.grads.field
    ASKED(MOE_GRAD_INPUT, dx);
    ASKED(MOE_GRAD_LOGITS, dlogits);
    ASKED(MOE_GRAD_GATE, dgate);
    ASKED(MOE_GRAD_UP, dup);
    ASKED(MOE_GRAD_DOWN, ddown);
    ASKED(MOE_GRAD_GATE_BIAS, dgate_bias);
    ASKED(MOE_GRAD_UP_BIAS, dup_bias);
    ASKED(MOE_GRAD_DOWN_BIAS, ddown_bias);
    const int through = dx || dlogits || dgate || dup || ddown || dgate_bias || dup_bias; /* more than db_down */
    fake_clear();
    OK(moe_experts_backward_selected(experts, q, &s.state, &s.io, &g, wanted));
    assert_int_equal(fake.ops[FAKE_ggemm_rows], through + dx);
    assert_int_equal(fake.ops[FAKE_act_bwd], through);
    assert_int_equal(fake.ops[FAKE_row_dot], dlogits);
    assert_int_equal(fake.ops[FAKE_weights_bwd], dlogits);
    assert_int_equal(fake.ops[FAKE_combine], dx);
    assert_int_equal(fake.ops[FAKE_ggemm_wgrad], ddown + (dgate || dup));
    assert_int_equal(fake.ops[FAKE_ggemm_colsum], ddown_bias + (dgate_bias || dup_bias));
    assert_int_equal(sum_of_ops(), 2 * through + 2 * dx + 2 * dlogits + ddown + (dgate || dup) + ddown_bias +
                                       (dgate_bias || dup_bias));
    assert_int_equal(fake.writes, 0);
    if (!through) continue;
    assert_int_equal(fake.last.act_bwd.dweights.handle != NULL, dlogits);
    assert_int_equal(fake.last.act_bwd.aw.handle != NULL, ddown);
    if (dgate || dup) { /* only the columns that are wanted */
      assert_int_equal(fake.last.ggemm_wgrad.split, dgate && dup);
      assert_int_equal(fake.last.ggemm_wgrad.M, (dgate + dup) * SMALL_F);
      assert_int_equal(fake.last.ggemm_wgrad.c[0].offset, dgate ? g.dgate.offset : g.dup.offset);
    }
  }
  moe_experts_free(experts);
  small_free(&s);
  moe_queue_free(q);
}

static void the_state_outlives_several_backwards(void **state)
{
  struct small s;
  moe_experts *experts;
  (void)state;
  fake.own_ops = 1;
  moe_queue *q = open_queue();
  small_options(&s, MOE_F32);
  OK(small_memory(&s, q->ctx, q));
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
  OK(moe_experts_forward(experts, q, &s.io, &s.state));
  moe_state before = s.state;
  s.grads.accumulate = 1;
  for (int i = 0; i < 3; i++) {
    fake_clear();
    OK(moe_experts_backward(experts, q, &s.state, &s.io, &s.grads));
    assert_int_equal(sum_of_ops(), 10);
    assert_true(fake.last.ggemm_wgrad.accumulate && fake.last.ggemm_colsum.accumulate);
    assert_int_equal(fake.last.weights_bwd.accumulate, 0); /* dlogits and dx are overwritten */
  }
  assert_memory_equal(&before, &s.state, sizeof before);
  moe_experts_free(experts);
  small_free(&s);
  moe_queue_free(q);
}

/* A state of a caller that knows fewer members: not a byte past its end is read or written. */
static void a_shorter_state_is_filled_as_far_as_it_goes(void **state)
{
  const uint64_t size = offsetof(moe_state, x), layer_size = offsetof(moe_layer_state, x);
  unsigned char *shorter = malloc(size), *layer_shorter = malloc(layer_size);
  const void *maker;
  int64_t tokens;
  struct small s;
  moe_experts *experts;
  moe_layer *layer;
  (void)state;
  moe_queue *q = open_queue();
  small_options(&s, MOE_F32);
  OK(small_memory(&s, q->ctx, q));
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
  OK(moe_layer_create(&layer, q->ctx, &s.layer_desc));
  assert_true(shorter && layer_shorter);
  memcpy(shorter, &size, 8);
  memcpy(layer_shorter, &layer_size, 8);
  OK(moe_experts_forward(experts, q, &s.io, (void *)shorter));
  memcpy(&maker, shorter + offsetof(moe_state, experts), sizeof maker);
  memcpy(&tokens, shorter + offsetof(moe_state, tokens), sizeof tokens);
  assert_ptr_equal(maker, experts);
  assert_int_equal(tokens, SMALL_T);
  OK(moe_layer_forward(layer, q, &s.layer_io, (void *)layer_shorter));
  memcpy(&maker, layer_shorter + offsetof(moe_layer_state, layer), sizeof maker);
  assert_ptr_equal(maker, layer);
  free(shorter);
  free(layer_shorter);
  moe_layer_free(layer);
  moe_experts_free(experts);
  small_free(&s);
  moe_queue_free(q);
}

static void a_frozen_layer_launches_no_weight_gradients(void **state)
{
  struct small s;
  moe_layer *layer;
  (void)state;
  fake.own_ops = 1;
  moe_queue *q = open_queue();
  small_options(&s, MOE_F32);
  s.layer_desc.frozen_experts = 1;
  OK(small_memory(&s, q->ctx, q));
  OK(moe_layer_create(&layer, q->ctx, &s.layer_desc));
  OK(moe_layer_forward(layer, q, &s.layer_io, &s.layer_state));
  fake_clear();
  OK(moe_layer_backward(layer, q, &s.layer_state, &s.layer_io));
  assert_int_equal(fake.ops[FAKE_ggemm_wgrad] + fake.ops[FAKE_ggemm_colsum], 0);
  assert_int_equal(fake.ops[FAKE_ggemm_rows], 2); /* dx still flows */
  s.layer_io.dx.handle = NULL;
  fake_clear();
  OK(moe_layer_backward(layer, q, &s.layer_state, &s.layer_io));
  assert_int_equal(fake.ops[FAKE_ggemm_rows], 1); /* and is not computed where it is not wanted */
  assert_int_equal(fake.ops[FAKE_combine], 0);
  moe_layer_free(layer);
  small_free(&s);
  moe_queue_free(q);
}

/* ---- choice of implementations ----------------------------------------------------------------------------------- */
static void matrix_units_are_refused_where_there_are_none(void **state)
{
  moe_queue *q = open_queue();
  moe_experts *experts = (moe_experts *)q;
  struct small s;
  (void)state;
  small_options(&s, MOE_BF16);
  s.experts_desc.forward_strategy = MOE_TENSOR;
  FAILS(MOE_ERR_UNSUPPORTED, "there is no matrix-unit kernel for ggemm_rows",
        moe_experts_create(&experts, q->ctx, &s.experts_desc));
  assert_null(experts);
  s.experts_desc.forward_strategy = MOE_AUTO;
  s.experts_desc.backward_strategy = MOE_TENSOR;
  FAILS(MOE_ERR_INVALID, "reduction MOE_PLANE", moe_experts_create(&experts, q->ctx, &s.experts_desc));
  s.experts_desc.reduction = MOE_PLANE;
  FAILS(MOE_ERR_UNSUPPORTED, "there is no matrix-unit kernel", moe_experts_create(&experts, q->ctx, &s.experts_desc));
  s.experts_desc.dtype = MOE_F32;
  FAILS(MOE_ERR_UNSUPPORTED, "wants dtype bf16 or f16, got f32", moe_experts_create(&experts, q->ctx, &s.experts_desc));
  assert_null(experts);
  moe_queue_free(q);
}

/* Forward and backward choose apart from each other. */
/* The device's own clipping, said to be experimental: chosen where the build asks for such, and listed everywhere. */
static void experimental_kernels_are_for_builds_that_ask(void **state)
{
  struct moe__impl_clip list[2] = { { 0 } };
  struct moe__ops ops = { .clip = list };
  struct moe__args_clip args = { .dtype = MOE_F32 };
  struct moe__why why;
  (void)state;
  fake.own_ops = 1;
  moe_queue *q = open_queue();
  const struct moe__backend *be = q->ctx->be;
  struct moe__backend changed = *be;
  list[0] = be->ops->clip[0];
  list[0].flags |= MOE__EXPERIMENTAL;
  changed.ops = &ops;
  q->ctx->be = &changed;
  assert_ptr_equal(moe__impl_clip_at(q->ctx, 0), list);
  assert_ptr_equal(moe__pick_clip(q->ctx, &args, MOE_AUTO, &why), MOE_WITH_EXPERIMENTAL ? list : &moe__portable_clip);
  assert_ptr_equal(moe__pick_clip(q->ctx, &args, MOE_TENSOR, &why), MOE_WITH_EXPERIMENTAL ? list : NULL);
  q->ctx->be = be;
  assert_ptr_equal(moe__pick_clip(q->ctx, &args, MOE_AUTO, &why), &be->ops->clip[0]);
  moe_queue_free(q);
}

/* Chosen before the portable kernel where the device has it, and for 16-bit types only. */
static void mma_kernels_are_for_16_bits_and_devices_that_have_them(void **state)
{
  static const struct moe__impl_ggemm_rows list[] = { MOE__MMA_IMPL(ggemm_rows), { 0 } };
  static const int64_t halves[] = { MOE_BF16, MOE_F16 };
  const struct moe__ops ops = { .ggemm_rows = list };
  struct moe__args_ggemm_rows args = { .dtype = MOE_F32, .R = 3, .E = 1, .N = 5, .K = 7 };
  struct moe__why why;
  (void)state;
  moe_queue *q = open_queue();
  const struct moe__backend *be = q->ctx->be;
  const struct moe__dev_info *info = q->ctx->info;
  struct moe__backend changed = *be;
  struct moe__dev_info with = *info;
  changed.ops = &ops;
  with.ptx = 1;
  q->ctx->be = &changed;
  q->ctx->info = &with;
  assert_ptr_equal(moe__pick_ggemm_rows(q->ctx, &args, MOE_AUTO, &why), &moe__portable_ggemm_rows);
  assert_string_equal(why.text, "ggemm_rows:mma: wants bf16 or f16, got f32");
  assert_null(moe__pick_ggemm_rows(q->ctx, &args, MOE_TENSOR, &why));
  for (int i = 0; i < 2; i++) {
    args.dtype = halves[i];
    assert_ptr_equal(moe__pick_ggemm_rows(q->ctx, &args, MOE_AUTO, &why), list);
    assert_ptr_equal(moe__pick_ggemm_rows(q->ctx, &args, MOE_TENSOR, &why), list);
    assert_ptr_equal(moe__pick_ggemm_rows(q->ctx, &args, MOE_SCALAR, &why), &moe__portable_ggemm_rows);
  }
  q->ctx->info = info;
  assert_ptr_equal(moe__pick_ggemm_rows(q->ctx, &args, MOE_AUTO, &why), &moe__portable_ggemm_rows);
  assert_string_equal(why.text, "ggemm_rows:mma: wants mma.sync in inline PTX, got no device at all");
  q->ctx->be = be;
  moe_queue_free(q);
}

#if MOE_HAVE_CUDA && MOE_HAVE_SM90
/* On Hopper wgmma where widths allow it, mma.sync where they do not; elsewhere mma.sync. */
static void matrix_units_by_the_best_that_can(void **state)
{
  (void)state;
  for (int64_t width = 64; width <= 65; width++) {
    struct moe__args_ggemm_rows args = { .dtype = MOE_BF16, .R = 3, .E = 2, .N = width, .K = width };
    moe_queue *q = open_queue();
    const struct moe__backend *be = q->ctx->be;
    const struct moe__dev_info *info = q->ctx->info;
    struct moe__backend changed = *be;
    struct moe__dev_info with = *info;
    struct moe__why why;
    args.a = args.c = (moe_tensor){ .dtype = MOE_BF16, .rank = 2, .shape = { 3, width }, .stride = { width, 1 } };
    args.b[0] = (moe_tensor){
      .dtype = MOE_BF16, .rank = 3, .shape = { 2, width, width }, .stride = { width * width, width, 1 }
    };
    changed.ops = moe__cuda_backend.ops;
    with.ptx = 1;
    q->ctx->be = &changed;
    q->ctx->info = &with;
    for (with.pub.arch = 80; with.pub.arch <= 90; with.pub.arch += 10)
      for (int64_t strategy = MOE_AUTO; strategy <= MOE_TENSOR; strategy++)
        if (strategy != MOE_SCALAR)
          assert_string_equal(moe__pick_ggemm_rows(q->ctx, &args, strategy, &why)->id,
                              with.pub.arch == 90 && width == 64 ? "ggemm_rows:sm90" : "ggemm_rows:mma");
    q->ctx->be = be;
    q->ctx->info = info;
    moe_queue_free(q);
  }
}
#endif

static void strategies_choose_their_implementations(void **state)
{
  (void)state;
  fake.own_ops = 1;
  moe_queue *q = open_queue();
  for (int64_t forward = MOE_AUTO; forward <= MOE_TENSOR; forward++)
    for (int64_t backward = MOE_AUTO; backward <= MOE_TENSOR; backward++) {
      struct small s;
      moe_experts *experts;
      small_options(&s, MOE_BF16);
      OK(small_memory(&s, q->ctx, q));
      s.experts_desc.forward_strategy = forward;
      s.experts_desc.backward_strategy = backward;
      s.experts_desc.reduction = MOE_PLANE;
      OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
      fake_clear();
      OK(moe_experts_forward(experts, q, &s.io, &s.state));
      assert_int_equal(fake.ops[FAKE_ggemm_rows], forward == MOE_SCALAR ? 0 : 2);
      fake_clear();
      OK(moe_experts_backward(experts, q, &s.state, &s.io, &s.grads));
      assert_int_equal(fake.ops[FAKE_ggemm_wgrad], backward == MOE_SCALAR ? 0 : 2);
      assert_int_equal(fake.ops[FAKE_ggemm_colsum], 2); /* no products */
      assert_true(fake.launches > 5);                   /* the portable ones ran instead */
      moe_experts_free(experts);
      small_free(&s);
    }
  moe_queue_free(q);
}

static void what_cannot_serve_is_passed_over_or_refused(void **state)
{
  struct small s;
  moe_experts *experts = NULL;
  char text[4096];
  (void)state;
  fake.own_ops = fake.refuse = 1;
  moe_queue *q = open_queue();
  small_options(&s, MOE_BF16);
  s.experts_desc.forward_strategy = MOE_TENSOR;
  FAILS(MOE_ERR_UNSUPPORTED, "ggemm_rows:fake: was told to refuse bf16",
        moe_experts_create(&experts, q->ctx, &s.experts_desc));
  assert_null(experts);
  s.experts_desc.forward_strategy = MOE_AUTO;
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
  OK(moe_experts_explain(experts, 6, text, sizeof text, NULL));
  assert_non_null(strstr(text, "forward up: ggemm_rows:portable (ggemm_rows:fake: was told to refuse bf16)\n"));
  moe_experts_free(experts);
  moe_queue_free(q);
}

/* Where the products have epilogues they take the activation's gradient, and nothing else changes; a serial sum of
   <da, a> they do not have. */
static void products_take_the_gradient_of_the_activation_where_they_can(void **state)
{
  (void)state;
  fake.own_ops = 1;
  moe_queue *q = open_queue();
  for (int64_t reduction = MOE_SERIAL; reduction <= MOE_PLANE; reduction++) {
    struct small s;
    moe_experts *experts;
    moe_experts_bytes separate = moe_experts_bytes_init(), fused = moe_experts_bytes_init();
    char text[4096];
    const int serial = reduction == MOE_SERIAL;
    small_options(&s, MOE_BF16);
    OK(small_memory(&s, q->ctx, q));
    s.experts_desc.reduction = reduction;
    fake.fuse = 0;
    OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
    OK(moe_experts_measure(&separate, experts, 6, moe__experts_all(experts)));
    moe_experts_free(experts);
    fake.fuse = 1;
    OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
    OK(moe_experts_measure(&fused, experts, 6, moe__experts_all(experts)));
    assert_int_equal(fused.saved, separate.saved);
    assert_int_equal(fused.scratch, separate.scratch);
    OK(moe_experts_explain(experts, 6, text, sizeof text, NULL));
    assert_int_equal(strstr(text, "backward through down and activation: ggemm_rows:fake\n") == NULL, serial);
    assert_int_equal(strstr(text, "backward activation: act_bwd:fake\n") != NULL, serial);

    fake_clear();
    OK(moe_experts_forward(experts, q, &s.io, &s.state));
    assert_int_equal(sum_of_ops(), 6);
    fake_clear();
    OK(moe_experts_backward(experts, q, &s.state, &s.io, &s.grads));
    assert_int_equal(fake.ops[FAKE_ggemm_rows], 2);
    assert_int_equal(fake.ops[FAKE_act_bwd], serial);
    fake_clear(); /* without the sum nothing is serial */
    OK(moe_experts_backward_selected(experts, q, &s.state, &s.io, &s.grads, MOE_GRAD_DOWN));
    assert_int_equal(fake.ops[FAKE_ggemm_rows], 1);
    assert_int_equal(fake.ops[FAKE_act_bwd], 0);
    assert_int_equal(fake.last.ggemm_rows.epilogue, MOE__ACT_GRAD);
    assert_null(fake.last.ggemm_rows.dweights.handle);
    assert_non_null(fake.last.ggemm_rows.aw.handle);
    moe_experts_free(experts);
    small_free(&s);
  }
  moe_queue_free(q);
}

static void explain_names_every_step(void **state)
{
  static const char *const branch[] = { "select: select:fake\n",
                                        "weights of given ids: weights:fake\n",
                                        "plan: plan:fake\n",
                                        "forward up: ggemm_rows:portable\n",
                                        "forward activation: act_fwd:fake\n",
                                        "forward down: ggemm_rows:portable\n",
                                        "forward combine: combine:fake\n",
                                        "backward through down: ggemm_rows:fake\n",
                                        "backward down weights: ggemm_wgrad:fake\n",
                                        "backward weights: weights_bwd:fake\n",
                                        "backward up bias: ggemm_colsum:fake\n" };
  struct small s;
  moe_experts *experts;
  moe_layer *layer;
  uint64_t needed = 0, lines = 0;
  char text[4096], cut[101];
  (void)state;
  fake.own_ops = 1;
  moe_queue *q = open_queue();
  small_options(&s, MOE_BF16);
  s.experts_desc.forward_strategy = s.layer_desc.forward_strategy = MOE_SCALAR;
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc));
  OK(moe_layer_create(&layer, q->ctx, &s.layer_desc));
  fake_clear();
  OK(moe_experts_explain(experts, 6, text, sizeof text, &needed));
  assert_int_equal(needed, strlen(text) + 1);
  for (size_t i = 0; i < sizeof branch / sizeof branch[0]; i++)
    if (!strstr(text, branch[i])) fail_msg("no \"%s\" in:\n%s", branch[i], text);
  for (const char *c = text; *c; c++) lines += *c == '\n';
  assert_int_equal(lines, 7 + 10);

  memset(cut, 'x', sizeof cut);
  OK(moe_experts_explain(experts, 6, cut, 100, &needed)); /* cut, closed, and the full length known */
  assert_int_equal(needed, strlen(text) + 1);
  assert_int_equal(strlen(cut), 99);
  assert_memory_equal(cut, text, 99);
  assert_int_equal(cut[100], 'x');
  OK(moe_experts_explain(experts, 6, cut, 1, NULL));
  assert_int_equal(cut[0], 0);
  needed = 0;
  OK(moe_experts_explain(experts, 6, NULL, 0, &needed));
  assert_int_equal(needed, strlen(text) + 1);

  OK(moe_layer_explain(layer, 6, NULL, 0, &needed));
  assert_in_range(needed, strlen(text) + 100, sizeof text);
  OK(moe_layer_explain(layer, 6, text, sizeof text, NULL));
  assert_non_null(strstr(text, "router: gemm:fake\n"));
  assert_non_null(strstr(text, "losses: balance_fwd:fake\n"));
  assert_non_null(strstr(text, "forward up: ggemm_rows:portable\n"));
  assert_non_null(strstr(text, "shared down: gemm:fake\n"));
  assert_non_null(strstr(text, "backward through router: gemm:fake\n"));
  assert_int_equal(fake.launches, 0);
  moe_layer_free(layer);
  moe_experts_free(experts);
  moe_queue_free(q);
}

static void no_double_precision_is_a_clear_refusal(void **state)
{
  struct small s;
  moe_experts *experts;
  moe_layer *layer;
  moe_router *router;
  moe_adamw *opt;
  moe_adamw_desc desc = moe_adamw_desc_init();
  (void)state;
  fake.no_fp64 = 1;
  moe_queue *q = open_queue();
  small_options(&s, MOE_F64);
  FAILS(MOE_ERR_UNSUPPORTED, "no fp64", moe_experts_create(&experts, q->ctx, &s.experts_desc));
  FAILS(MOE_ERR_UNSUPPORTED, "no fp64", moe_layer_create(&layer, q->ctx, &s.layer_desc));
  FAILS(MOE_ERR_UNSUPPORTED, "no fp64", moe_router_create(&router, q->ctx, &s.router_desc));
  desc.dtype = MOE_F64;
  desc.peak = 1;
  FAILS(MOE_ERR_UNSUPPORTED, "no fp64", moe_adamw_create(&opt, q->ctx, &desc));
  small_options(&s, MOE_F16);
  OK(moe_experts_create(&experts, q->ctx, &s.experts_desc)); /* everything else works */
  moe_experts_free(experts);
  moe_queue_free(q);
}

/* ---- lifetimes --------------------------------------------------------------------------------------------------- */
static void children_keep_their_parents(void **state)
{
  struct small s;
  moe_context *ctx = fake_open();
  moe_queue *q;
  moe_layer *layer;
  moe_tape *tape;
  moe_router *router;
  (void)state;
  small_options(&s, MOE_F32);
  OK(moe_queue_create(&q, ctx));
  OK(moe_layer_create(&layer, ctx, &s.layer_desc));
  OK(moe_router_create(&router, ctx, &s.router_desc));
  OK(moe_tape_create(&tape, q, NULL));
  moe_context_free(ctx);
  assert_int_equal(fake.devices, 1);
  moe_router_free(router);
  moe_tape_free(tape);
  moe_layer_free(layer);
  assert_int_equal(fake.devices, 1);
  OK(moe_queue_wait(q));
  moe_queue_free(q);
  assert_int_equal(fake.devices, 0);
  moe_context_free(NULL);
  moe_queue_free(NULL);
  moe_router_free(NULL);
  moe_experts_free(NULL);
  moe_layer_free(NULL);
  moe_tape_free(NULL);
  moe_adamw_free(NULL);
  moe_span_free(NULL, NULL);
}

/* ---- parameters of the layer ------------------------------------------------------------------------------------- */
static void parameters_in_order_inside_their_spans(void **state)
{
  static const char *const names[] = { "router",    "router_bias", "gate",
                                       "up",        "down",        "gate_bias",
                                       "up_bias",   "down_bias",   "shared_gate_proj",
                                       "shared_up", "shared_down", "shared_gate" };
  const int n = (int)(sizeof names / sizeof names[0]);
  struct small s;
  moe_layer *layer;
  moe_queue *q = open_queue();
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_tensor p, g;
  uint64_t at = 0, grad_at = 0;
  int64_t count = 0, all, active;
  (void)state;
  small_options(&s, MOE_BF16);
  OK(small_memory(&s, q->ctx, q));
  OK(moe_layer_create(&layer, q->ctx, &s.layer_desc));
  OK(moe_layer_measure(&bytes, layer, 6, 1));
  for (int i = 0; i < n; i++) {
    moe_layer_param_info info = moe_layer_param_info_init();
    OK(moe_layer_param(&p, &g, &info, layer, s.layer_io.params, s.layer_io.grads, i));
    assert_string_equal(info.name, names[i]);
    assert_int_equal(info.trainable, 1);
    assert_int_equal(info.decays, p.rank > 1 && !strstr(names[i], "bias"));
    assert_int_equal(p.dtype, MOE_BF16);
    assert_int_equal(g.dtype, MOE_F32);
    assert_int_equal(p.offset, s.layer_io.params.offset + at);
    assert_int_equal(g.offset, s.layer_io.grads.offset + grad_at);
    assert_memory_equal(p.shape, g.shape, sizeof p.shape);
    assert_true(moe_tensor_is_packed(&p) && moe_tensor_is_packed(&g));
    at += up256(moe_tensor_extent(&p));
    grad_at += up256(moe_tensor_extent(&g));
    count += moe_tensor_count(&p);
  }
  assert_int_equal(at, bytes.params);
  assert_int_equal(grad_at, bytes.grads);
  FAILS(MOE_ERR_INVALID, "index 12", moe_layer_param(&p, &g, NULL, layer, s.layer_io.params, s.layer_io.grads, n));
  FAILS(MOE_ERR_INVALID, "index -1", moe_layer_param(&p, &g, NULL, layer, s.layer_io.params, s.layer_io.grads, -1));
  OK(moe_layer_parameter_counts(&all, &active, layer));
  assert_int_equal(all, count);
  const int64_t per_expert = 3 * SMALL_F * SMALL_D + 2 * SMALL_F + SMALL_D;
  assert_int_equal(active, count - (SMALL_E - SMALL_K) * per_expert);
  /* Spans of absent outputs are ignored. */
  OK(moe_layer_param(NULL, &g, NULL, layer, (moe_span){ 0 }, s.layer_io.grads, 0));
  OK(moe_layer_param(&p, NULL, NULL, layer, s.layer_io.params, (moe_span){ 0 }, 0));
  moe_layer_free(layer);
  small_free(&s);
  moe_queue_free(q);
}

static void parameter_counts(void **state)
{
  int64_t all = -1, active = -1;
  (void)state;
  OK(moe_parameter_counts(&all, &active, 8, 4, 4, 2, 0));
  assert_int_equal(all, 24);
  assert_int_equal(active, 16);
  OK(moe_parameter_counts(&all, NULL, 8, 4, 4, 1, 5));
  assert_int_equal(all, 29);
  OK(moe_parameter_counts(NULL, &active, 8, 4, 4, 1, 5));
  assert_int_equal(active, 17);
  all = active = -1;
  FAILS(MOE_ERR_INVALID, "top_k 5", moe_parameter_counts(&all, &active, 8, 4, 4, 5, 0));
  FAILS(MOE_ERR_INVALID, "top_k 0", moe_parameter_counts(&all, &active, 8, 4, 4, 0, 0));
  FAILS(MOE_ERR_INVALID, "n_experts", moe_parameter_counts(&all, &active, 8, 4, 0, 0, 0));
  FAILS(MOE_ERR_INVALID, ">= 0", moe_parameter_counts(&all, &active, -1, 4, 4, 2, 0));
  FAILS(MOE_ERR_INVALID, ">= 0", moe_parameter_counts(&all, &active, 1, -4, 4, 2, 0));
  FAILS(MOE_ERR_INVALID, "2^63-1", moe_parameter_counts(&all, &active, 1, INT64_MAX / 2, 3, 1, 0));
  FAILS(MOE_ERR_INVALID, "2^63-1", moe_parameter_counts(&all, &active, INT64_MAX, 1, 1, 1, 0));
  assert_true(all == -1 && active == -1);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
  const struct CMUnitTest tests[] = {
    TEST(plan_scratch),
    TEST(balance_scratch),
    TEST(primitive_ops_refuse),
    TEST(slots_past_2_to_the_31_are_refused),
    TEST(saved_is_h_and_the_routing_and_nothing_else),
    TEST(scratch_is_what_the_wanted_gradients_need),
    TEST(measure_refuses_too_many_tokens),
    TEST(sizes_past_2_to_the_63_are_refused),
    TEST(forward_launches_its_six_ops),
    TEST(backward_launches_nothing_that_was_not_asked_for),
    TEST(the_state_outlives_several_backwards),
    TEST(a_shorter_state_is_filled_as_far_as_it_goes),
    TEST(a_frozen_layer_launches_no_weight_gradients),
    TEST(matrix_units_are_refused_where_there_are_none),
    TEST(experimental_kernels_are_for_builds_that_ask),
    TEST(mma_kernels_are_for_16_bits_and_devices_that_have_them),
#if MOE_HAVE_CUDA && MOE_HAVE_SM90
    TEST(matrix_units_by_the_best_that_can),
#endif
    TEST(strategies_choose_their_implementations),
    TEST(what_cannot_serve_is_passed_over_or_refused),
    TEST(products_take_the_gradient_of_the_activation_where_they_can),
    TEST(explain_names_every_step),
    TEST(no_double_precision_is_a_clear_refusal),
    TEST(children_keep_their_parents),
    TEST(parameters_in_order_inside_their_spans),
    TEST(parameter_counts),
  };
  return TEST_MAIN(tests);
}
