/* t_cases.c - faults that users of other MoE and OpenCL libraries reported, each as a small input with its right
   answer; a test is named after the kind of fault. */
#include "fixture.h"

#include "config.h"
#include "core/backend.h"
#include "core/convert.h"
#include "core/tensor.h"

#include <moe/optim.h>
#include <moe/tape.h>

#include <ctype.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

static moe_context *ctx;
static moe_queue *queue;
extern char **environ;

#define EPS 0x1p-24
#define DIGITS (5e-8 + 8 * EPS) /* answers of seven digits; exp and a division in f32 */

/* ---- routing ----------------------------------------------------------------------------------------------------- */
/* One router over host arrays: choices, the selection's own weights, the weights, and (of dweights) dlogits. */
struct routed {
  int32_t *ids;
  double *own, *weights, *dlogits;
};
static struct routed route(struct t_memory *m, struct options *o, const double *logits, const double *bias,
                           const double *dweights)
{
  moe_router *router;
  moe_router_desc desc = moe_router_desc_init();
  moe_tensor l, b = { 0 }, ids, own, weights, dw, dl;
  struct routed r;
  desc.n_experts = o->E;
  desc.dtype = o->dtype;
  desc.selection = &o->selection;
  desc.weights = &o->weights;
  OK(moe_router_create(&router, m->ctx, &desc));
  l = t_tensor(m, o->dtype, T_PAD, SHAPE(o->T, o->E));
  if (bias) b = t_tensor(m, o->dtype, T_PACKED, SHAPE(o->E));
  ids = output_of(m, MOE_I32, SHAPE(o->T, o->K));
  own = output_of(m, o->dtype, SHAPE(o->T, o->K));
  weights = output_of(m, o->dtype, SHAPE(o->T, o->K));
  dw = t_tensor(m, o->dtype, T_PACKED, SHAPE(o->T, o->K));
  dl = output_of(m, o->dtype, SHAPE(o->T, o->E));
  t_put(m, &l, nums_of(m, o->T * o->E, logits));
  if (bias) t_put(m, &b, nums_of(m, o->E, bias));
  if (dweights) t_put(m, &dw, nums_of(m, o->T * o->K, dweights));
  send(m);
  OK(moe_router_select(router, m->q, &ids, &own, &l, &b));
  OK(moe_router_weights(router, m->q, &weights, &l, &ids));
  if (dweights) OK(moe_router_weights_backward(router, m->q, &dl, &dw, &l, &ids));
  fetch(m);
  r = (struct routed){ ints_of(m, &ids), values_of(m, &own), values_of(m, &weights), values_of(m, &dl) };
  moe_router_free(router);
  return r;
}

static struct t_memory memory(void)
{
  struct t_memory m;
  t_memory_init(&m, ctx, queue, 1);
  ref_arithmetic(MOE_F32);
  return m;
}

static void correction_bias_stays_out_of_the_weights(void **state)
{
  static const double logits[] = { .4054651, 0, -.4054651 }, bias[] = { 0, 0, .3 }; /* scores .6 .5 .4 */
  struct t_memory m = memory();
  struct options o = options_of(MOE_F32, 1, 1, 1, 3, 2);
  struct layer l;
  (void)state;
  options_sigmoid(&o);
  o.selection.renormalize = 1;
  struct routed r = route(&m, &o, logits, bias, NULL);
  assert_int_equal(r.ids[0], 2);
  assert_int_equal(r.ids[1], 0);
  for (int k = 0; k < 2; k++) {
    assert_near(r.weights[k], k ? .6 : .4, DIGITS);
    assert_near(r.own[k], k ? .6 : .4, DIGITS);
  }
  t_memory_free(&m);
  /* In a layer the bias has no gradient at all. */
  l = layer_of(o);
  l.desc.correction_bias = 1;
  layer_make(&l, ctx, queue, 0);
  assert_null(l.grad[REF_CORRECTION_BIAS].handle);
  layer_check(&l);
  layer_free(&l);
}

/* 7.0 and 7.01 are one number in bf16; so are nearly all of 256 biases between 6.817 and 7.063. */
static void correction_bias_keeps_its_digits(void **state)
{
  static const int64_t dtypes[] = { MOE_BF16, MOE_F16, MOE_F32 };
  (void)state;
  for (int i = 0; i < 6; i++) {
    int64_t E = i < 3 ? 2 : 256;
    struct layer l = layer_of(options_of(dtypes[i % 3], 3, 8, 8, E, 1));
    moe_tensor *bias = &l.param[REF_CORRECTION_BIAS], ids;
    options_sigmoid(&l.o);
    l.desc.correction_bias = 1;
    layer_make(&l, ctx, queue, 0);
    assert_int_equal(bias->dtype, MOE_F32);
    for (int64_t k = 0; k < 3 * 8; k++) l.x[k].v = 0;
    for (int64_t e = 0; e < E; e++)
      l.value[REF_CORRECTION_BIAS][e].v = (double)(E == 2 ? 7 + .01f * (float)e : 6.817f + .00096f * (float)e);
    layer_send(&l);
    layer_forward(&l);
    layer_backward(&l);
    fetch(&l.m);
    OK(moe_layer_route_ids(&ids, &l.state));
    for (int t = 0; t < 3; t++) assert_int_equal(ints_of(&l.m, &ids)[t], E - 1);
    for (int64_t e = 0; e < E; e++) assert_true(values_of(&l.m, bias)[e] == l.value[REF_CORRECTION_BIAS][e].v);
    layer_free(&l);
  }
}

static void more_experts_than_threads(void **state)
{
  static const int64_t counts[] = { 1, 3, 129, 255, 256, 257, 512, 1000 };
  struct t_memory m = memory();
  (void)state;
  for (int sigmoid = 0; sigmoid < 2; sigmoid++) {
    double x[512] = { 0 };
    struct options o = options_of(MOE_F32, 1, 1, 1, 512, 2);
    if (sigmoid) options_sigmoid(&o);
    x[300] = 5;
    x[511] = 4;
    struct routed r = route(&m, &o, x, NULL, NULL);
    assert_true(r.ids[0] == 300 && r.ids[1] == 511);
    o.E = 256;
    o.K = o.selection.top_k = 1;
    x[300] = 0;
    x[255] = 1;
    assert_int_equal(route(&m, &o, x, NULL, NULL).ids[0], 255);

    for (int i = 0; i < 8; i++) {
      o.T = 5;
      o.E = counts[i];
      o.K = o.selection.top_k = o.E < 4 ? o.E : 4;
      num *logits = t_uniform(&m, o.T * o.E, MOE_F32, 3);
      double *values = t_host(&m, o.T * o.E, sizeof *values);
      for (int64_t k = 0; k < o.T * o.E; k++) values[k] = logits[k].v;
      int32_t *ids = route(&m, &o, values, NULL, NULL).ids;
      for (int64_t t = 0; t < o.T; t++) {
        const char *wrong = ref_select_check(ids + t * o.K, logits + t * o.E, NULL, o.E, select_of(&o));
        if (wrong) fail_msg("%lld experts: %s", (long long)o.E, wrong);
      }
    }
  }
  t_memory_free(&m);
}

static int64_t warnings;
static void count_warnings(void *user, int64_t level, const char *line)
{
  (void)user;
  warnings += level == 1 && strstr(line, "top_k 1") != NULL;
}

static void softmax_then_renormalize_then_scale(void **state)
{
  static const double three[] = { 2, 1, 0 }, zeros[4] = { 0 }, two[] = { 1, 0 }, one = 1;
  struct t_memory m = memory();
  struct options o = options_of(MOE_F32, 1, 1, 1, 3, 2);
  (void)state;
  o.weights.renormalize = 0;
  double *w = route(&m, &o, three, NULL, NULL).weights;
  assert_near(w[0], .6652410, DIGITS);
  assert_near(w[1], .2447285, DIGITS);
  o.weights.renormalize = 1;
  w = route(&m, &o, three, NULL, NULL).weights;
  assert_near(w[0], .7310586, DIGITS);
  assert_near(w[1], .2689414, DIGITS);

  o.E = 4;
  o.weights.scale = 2.5;
  w = route(&m, &o, zeros, NULL, NULL).weights;
  assert_true(w[0] == 1.25 && w[1] == 1.25);
  o.weights.renormalize = 0;
  w = route(&m, &o, zeros, NULL, NULL).weights;
  assert_true(w[0] == .625 && w[1] == .625);

  /* Top-1: without renormalization the router learns; with it nothing can, which is said. */
  o.E = 2;
  o.K = o.selection.top_k = 1;
  o.weights.scale = 1;
  struct routed r = route(&m, &o, two, NULL, &one);
  assert_near(r.dlogits[0], .1966119, DIGITS);
  assert_near(r.dlogits[1], -.1966119, DIGITS);
  t_memory_free(&m);

  moe_context *loud;
  moe_queue *q;
  moe_context_desc desc = moe_context_desc_init();
  desc.device = getenv("MOE_TEST_DEVICE");
  desc.log = count_warnings;
  OK(moe_context_create(&loud, &desc));
  OK(moe_queue_create(&q, loud));
  t_memory_init(&m, loud, q, 1);
  o.weights.renormalize = 1;
  warnings = 0;
  r = route(&m, &o, two, NULL, &one);
  assert_int_equal(warnings, 1);
  assert_true(r.weights[0] == 1 && r.dlogits[0] == 0 && r.dlogits[1] == 0);
  t_memory_free(&m);
  moe_queue_free(q);
  moe_context_free(loud);
}

static double logit(double p)
{
  return log(p / (1 - p));
}

static moe_status try_router(struct options *o)
{
  moe_router *router;
  moe_router_desc desc = moe_router_desc_init();
  desc.n_experts = o->E;
  desc.dtype = MOE_F32;
  desc.selection = &o->selection;
  desc.weights = &o->weights;
  moe_status status = moe_router_create(&router, ctx, &desc);
  moe_router_free(router);
  return status;
}

static void groups_score_by_their_best_or_best_two(void **state)
{
  const double x[] = { logit(.9), -40, logit(.6), logit(.6) };
  struct t_memory m = memory();
  struct options o = options_of(MOE_F32, 1, 1, 1, 4, 1);
  (void)state;
  options_sigmoid(&o);
  o.selection.groups = 2;
  assert_int_equal(route(&m, &o, x, NULL, NULL).ids[0], 0);
  o.selection.group_top_two = 1;
  assert_int_equal(route(&m, &o, x, NULL, NULL).ids[0], 2);
  /* Groups of one expert have a best, but no best two. */
  o.selection.groups = 4;
  FAILS(MOE_ERR_INVALID, "group_top_two", try_router(&o));
  o.selection.group_top_two = 0;
  assert_int_equal(route(&m, &o, x, NULL, NULL).ids[0], 0);
  /* Too few experts in the selected groups; groups of unequal size. */
  o.E = 8;
  o.selection.top_k = 3;
  FAILS(MOE_ERR_INVALID, "top_k 3 > 2 experts", try_router(&o));
  o.selection.top_k = 1;
  o.selection.groups = 3;
  FAILS(MOE_ERR_INVALID, "groups 3", try_router(&o));
  t_memory_free(&m);
}

/* ---- losses ------------------------------------------------------------------------------------------------------ */
/* The router's gradient of one pass, or of the same batch as two micro-batches of half the weight; dy and the losses
   scaled alike. */
static double *router_gradient(struct layer *l, int64_t dtype, double coef, double scale, int halves)
{
  static const int32_t ids[] = { 0, 1, 0, 0 }; /* an even load would have no gradient */
  *l = layer_of(options_of(dtype, 4, 8, 8, 2, 1));
  l->o.weights.renormalize = 0;
  l->desc.balance_coef = coef;
  layer_make(l, ctx, queue, 0);
  layer_replay(l, ids);
  layer_aux_scale(l, halves ? scale / 2 : scale);
  for (int i = 0; i < 4 * 8; i++) l->dy[i].v *= halves ? scale / 2 : scale;
  layer_send(l);
  for (int i = 0; i < (halves ? 2 : 1); i++) {
    l->io.accumulate = i;
    layer_forward(l);
    layer_backward(l);
  }
  fetch(&l->m);
  return values_of(&l->m, &l->grad[REF_ROUTER]);
}

static void balance_loss_reaches_the_router_once(void **state)
{
  static const int64_t dtypes[] = { MOE_F32, MOE_BF16 };
  (void)state;
  for (int d = 0; d < 2; d++) {
    struct layer l[5];
    double *none = router_gradient(&l[0], dtypes[d], 0, 1, 0), *one = router_gradient(&l[1], dtypes[d], 1, 1, 0);
    double *two = router_gradient(&l[2], dtypes[d], 2, 1, 0), *split = router_gradient(&l[3], dtypes[d], 1, 1, 1);
    double *scaled = router_gradient(&l[4], dtypes[d], 1, 1024, 0), moved = 0;
    double bound = dtypes[d] == MOE_BF16 ? 0x1p-6 : 0x1p-20;
    for (int i = 0; i < 2 * 8; i++) {
      moved = fmax(moved, fabs(one[i] - none[i]));
      assert_near(two[i] - none[i], 2 * (one[i] - none[i]), bound * (1 + fabs(two[i])));
      assert_true(split[i] == one[i]);         /* halves are exact */
      assert_true(scaled[i] == 1024 * one[i]); /* a loss scale is one of both losses */
    }
    assert_true(moved > .01);
    for (int i = 0; i < 5; i++) layer_free(&l[i]);
  }
}

/* Two layers, each with all tokens on one expert: 1.8 each, which the mean of joined layers (1.0) would hide.  A masked
   token leaves counts, probabilities and the divisor alike. */
static void balance_loss_is_of_one_layer_and_of_real_tokens(void **state)
{
  static const int32_t mask[] = { 1, 0, 0 };
  (void)state;
  for (int64_t T = 1; T <= 3; T++) /* below, equal to and above E */
    for (int which = 0; which < 2; which++)
      for (int masked = 0; masked < 2; masked++) {
        struct layer l = layer_of(options_of(MOE_F32, T, 2, 2, 2, 1));
        moe_tensor losses, counts;
        l.desc.balance_coef = 1;
        layer_make(&l, ctx, queue, 0);
        if (masked) layer_mask(&l, mask);
        for (int i = 0; i < 4; i++) l.value[REF_ROUTER][i].v = i % 3 == 0; /* x are the logits */
        for (int64_t i = 0; i < 2 * T; i++) l.x[i].v = i % 2 == which ? (double)logf(9) : 0;
        layer_send(&l);
        layer_forward(&l);
        fetch(&l.m);
        OK(moe_layer_losses(&losses, &l.state));
        OK(moe_layer_counts(&counts, &l.state));
        assert_near(values_of(&l.m, &losses)[0], 1.8, 4 * EPS);
        assert_int_equal(ints_of(&l.m, &counts)[which], masked ? 1 : T);
        assert_int_equal(ints_of(&l.m, &counts)[1 - which], 0);
        layer_free(&l);
      }
}

/* ---- experts ----------------------------------------------------------------------------------------------------- */
static void odd_token_counts(void **state)
{
  static const int64_t T[] = { 0, 1, 2, 3, 9, 31, 33, 63, 65, 99, 127, 129 };
  (void)state;
  for (size_t i = 0; i < sizeof T / sizeof *T; i++)
    for (int bf16 = 0; bf16 < 2; bf16++) {
      struct branch b = branch_of(options_of(bf16 ? MOE_BF16 : MOE_F32, T[i], 16, 32, 8, 8));
      b.desc.hidden_bias = b.desc.down_bias = 1;
      branch_make(&b, ctx, queue);
      branch_check(&b); /* of no tokens: weight gradients 0 */
      branch_free(&b);
    }
}

/* gpt-oss's activation by itself: D = 2, one expert whose gate is x0, whose up is x1, whose output is a. */
static void gpt_oss_activation(void **state)
{
  static const double x[] = { 1, 2, 8, -9, -8, 9, .5, -3, 7, 7, 7, -7 };
  static const double a[] = { 2.5373873, -41.9997188, -7.8131e-5, -.7007769 };
  static const double dx[] = { 3.2033388, .8457958, 0, 0, -1.2321e-4, 0, -1.7584438, .3503884 };
  double *first[2] = { NULL };
  struct branch b[PLACES];
  (void)state;
  for (int place = PACKED; place < PLACES; place++) {
    struct branch *c = &b[place];
    *c = branch_of(options_of(MOE_F32, 6, 2, 1, 1, 1));
    c->place = (enum place)place;
    c->o.activation.alpha = 1.702;
    c->o.activation.limit = 7;
    c->o.activation.up_offset = 1;
    branch_make(c, ctx, queue);
    for (int i = 0; i < 12; i++) {
      c->x[i].v = x[i];
      c->dy[i].v = i % 2 == 0;
    }
    for (int i = 0; i < 2; i++) {
      c->value[REF_GATE][i].v = c->value[REF_DOWN][i].v = i == 0;
      c->value[REF_UP][i].v = i == 1;
    }
    branch_send(c);
    branch_check(c);
    double *y = values_of(&c->m, &c->io.y), *d = values_of(&c->m, &c->g.dx);
    for (int t = 0; t < 4; t++) {
      assert_near(y[2 * t], a[t], 1e-6 * (1e-3 + fabs(a[t])));
      for (int i = 2 * t; i < 2 * t + 2; i++) assert_near(d[i], dx[i], 1e-6 * (1e-2 + fabs(dx[i])));
    }
    /* Exactly at the limit the gradient passes. */
    assert_true(fabs(d[8]) > 1 && fabs(d[9]) > 1 && fabs(d[10]) > 1 && fabs(d[11]) > 1);
    /* However the weights lie, the same numbers. */
    if (place == PACKED) first[0] = y, first[1] = d;
    for (int i = 0; i < 12; i++) {
      assert_near(y[i], first[0][i], 8 * EPS * fabs(y[i]));
      assert_near(d[i], first[1][i], 8 * EPS * fabs(d[i]));
    }
  }
  for (int place = PACKED; place < PLACES; place++) branch_free(&b[place]);
}

/* A gradient broadcast from one element, transposed and padded views, rows that are not 16-byte aligned, tensors that
   begin one element late. */
static void strides_and_odd_offsets(void **state)
{
  static const int64_t dtypes[] = { MOE_F32, MOE_BF16, MOE_F16 };
  static const int x[] = { T_SWAP, T_PAD, T_STEP, T_ODD, T_ODD | T_PAD },
                   y[] = { T_PAD, T_SWAP, T_ODD, T_STEP, T_PACKED },
                   dy[] = { T_SCALAR, T_ODD, T_SWAP, T_PAD, T_SCALAR | T_ODD };
  (void)state;
  for (int i = 0; i < 3; i++)
    for (int kind = 0; kind < 5; kind++)
      for (int wide = 0; wide < 2; wide++) {
        struct branch b = branch_of(options_of(dtypes[i], 8, wide ? 1025 : 24, 16, 4, 2));
        int64_t T = b.o.T, D = b.o.D;
        b.place = (enum place)(kind % PLACES);
        b.desc.hidden_bias = b.desc.down_bias = 1;
        branch_make(&b, ctx, queue);
        b.io.x = t_tensor(&b.m, b.o.dtype, x[kind], SHAPE(T, D));
        b.io.y = t_tensor(&b.m, b.o.dtype, y[kind], SHAPE(T, D));
        b.g.dy = t_tensor(&b.m, b.o.dtype, dy[kind], SHAPE(T, D));
        b.g.dx = t_tensor(&b.m, b.o.dtype, y[4 - kind], SHAPE(T, D));
        b.io.logits = t_tensor(&b.m, MOE_F32, x[4 - kind], SHAPE(T, 4));
        b.g.dlogits = t_tensor(&b.m, MOE_F32, y[kind], SHAPE(T, 4));
        t_own(&b.m, &b.io.y);
        t_own(&b.m, &b.g.dx);
        t_own(&b.m, &b.g.dlogits);
        for (int64_t k = 0; (dy[kind] & T_SCALAR) && k < T * D; k++) b.dy[k].v = .5;
        branch_send(&b);
        branch_check(&b);
        branch_free(&b);
      }
}

/* ---- 64-bit offsets ---------------------------------------------------------------------------------------------- */
/* Enough memory for `bytes`, the largest block `block`; else a skip with the reason. */
static void wants_memory(double bytes, double block)
{
  moe_device_info info = moe_device_info_init();
  OK(moe_context_info(ctx, &info));
  if (test_long() && (double)info.memory > bytes && (double)info.max_alloc > block) return;
  print_message("needs MOE_TEST_LONG and a device with %.0f GiB (%.1f GiB in one block); this one has %.0f (%.1f)\n",
                bytes / (1 << 30), block / (1 << 30), (double)info.memory / (1 << 30),
                (double)info.max_alloc / (1 << 30));
  skip();
}

struct big { /* a moe_experts with spans of its own, without mirrors */
  moe_experts *experts;
  moe_experts_desc desc;
  moe_experts_io io;
  moe_experts_grads g;
  moe_state state;
  struct options o;
  moe_span spans[16];
  int n;
};

static moe_tensor big_tensor(struct big *b, int64_t dtype, int rank, const int64_t *shape)
{
  moe_tensor t;
  int64_t count = 1;
  for (int d = 0; d < rank; d++) count *= shape[d];
  moe_span *s = &b->spans[b->n++];
  OK(moe_span_alloc(s, ctx, (uint64_t)count * moe_dtype_size(dtype)));
  OK(moe_tensor_packed(&t, *s, dtype, rank, shape));
  return t;
}

/* Plain SiLU experts of bf16, everything allocated; weights, x, logits and dy left to the caller. */
static void big_make(struct big *b, int64_t T, int64_t D, int64_t F, int64_t E, int64_t K)
{
  moe_experts_bytes bytes = moe_experts_bytes_init();
  memset(b, 0, sizeof *b);
  b->o = options_of(MOE_BF16, T, D, F, E, K);
  b->o.activation.gated = 0;
  b->desc = moe_experts_desc_init();
  b->desc.d_model = D;
  b->desc.d_ff = F;
  b->desc.n_experts = E;
  b->desc.dtype = MOE_BF16;
  b->desc.selection = &b->o.selection;
  b->desc.weights = &b->o.weights;
  b->desc.activation = &b->o.activation;
  OK(moe_experts_create(&b->experts, ctx, &b->desc));
  OK(moe_experts_measure(&bytes, b->experts, T, 1 | 2 | 8 | 16));
  b->io = moe_experts_io_init();
  b->g = moe_experts_grads_init();
  b->state = moe_state_init();
  b->io.x = big_tensor(b, MOE_BF16, SHAPE(T, D));
  b->io.y = big_tensor(b, MOE_BF16, SHAPE(T, D));
  b->io.logits = big_tensor(b, MOE_F32, SHAPE(T, E));
  b->io.ids = big_tensor(b, MOE_I32, SHAPE(T, K));
  b->io.up = big_tensor(b, MOE_BF16, SHAPE(E, F, D));
  b->io.down = big_tensor(b, MOE_BF16, SHAPE(E, D, F));
  b->g.dy = big_tensor(b, MOE_BF16, SHAPE(T, D));
  b->g.dx = big_tensor(b, MOE_BF16, SHAPE(T, D));
  b->g.dlogits = big_tensor(b, MOE_F32, SHAPE(T, E));
  b->g.dup = big_tensor(b, MOE_F32, SHAPE(E, F, D));
  b->g.ddown = big_tensor(b, MOE_F32, SHAPE(E, D, F));
  OK(moe_span_alloc(&b->io.saved, ctx, bytes.saved));
  OK(moe_span_alloc(&b->io.scratch, ctx, bytes.scratch));
  b->spans[b->n++] = b->io.saved;
  b->spans[b->n++] = b->io.scratch;
  for (int i = 0; i < b->n; i++) OK(moe_span_fill(queue, b->spans[i], 0xff));
}

static void big_free(struct big *b)
{
  for (int i = 0; i < b->n; i++) moe_span_free(ctx, &b->spans[i]);
  moe_experts_free(b->experts);
}

static void fill_normal(const moe_tensor *t, int64_t stream, double stddev)
{
  const struct moe__args_elt_normal args = {
    .dtype = MOE_F32,
    .y = *t,
    .n = moe_tensor_count(t),
    .seed = 1,
    .stream = stream,
    .stddev = stddev,
  };
  struct moe__args_elt_normal flat = args;
  flat.y.rank = 1;
  flat.y.shape[0] = args.n;
  flat.y.stride[0] = 1;
  OK(moe__prepare_elt_normal(ctx, &flat, MOE_AUTO));
  OK(moe__run_elt_normal(queue, &flat, MOE_AUTO));
}

/* `rows` rows, from `from` of a packed tensor to `to` of another of the same row length. */
static void copy_rows(const moe_tensor *out, int64_t to, const moe_tensor *in, int64_t from, int64_t rows)
{
  uint64_t row = (uint64_t)in->stride[0] * moe_dtype_size(in->dtype), bytes = (uint64_t)rows * row;
  OK(moe_span_copy(queue, (moe_span){ out->handle, out->offset + (uint64_t)to * row, bytes },
                   (moe_span){ in->handle, in->offset + (uint64_t)from * row, bytes }, bytes));
}

static unsigned char *row_of(const moe_tensor *t, int64_t row)
{
  uint64_t bytes = (uint64_t)t->stride[0] * moe_dtype_size(t->dtype);
  unsigned char *data = malloc(bytes);
  assert_non_null(data);
  OK(moe_span_read(queue, data, (moe_span){ t->handle, t->offset + (uint64_t)row * bytes, bytes }, bytes));
  return data;
}

/* Rows of two packed tensors of one dtype, each row by its relative L2. */
static void compare_rows(const char *name, const moe_tensor *a, int64_t at_a, const moe_tensor *b, int64_t at_b,
                         int64_t rows, double bound)
{
  for (int64_t r = 0; r < rows; r++) {
    unsigned char *mine = row_of(a, at_a + r), *other = row_of(b, at_b + r);
    double error = 0, size = 0;
    for (int64_t i = 0; i < a->stride[0]; i++) {
      double v = moe__to_double(mine, a->dtype, i), w = moe__to_double(other, b->dtype, i);
      error += (v - w) * (v - w);
      size += w * w;
    }
    free(mine);
    free(other);
    if (!(sqrt(error) <= bound * sqrt(size)) || size == 0)
      fail_msg("%s, row %lld: off by %.3g of %.3g", name, (long long)(at_a + r), sqrt(error), sqrt(size));
  }
}

/* Rows of the plan times D pass 2^31: the first and last eight tokens are those of a run of just these.  dy is zero
   elsewhere, so the weight gradients are those of the small run too. */
static void more_than_2_31_elements_of_rows(void **state)
{
  enum { T = 131073, D = 2048, F = 64, E = 8, K = 8, ENDS = 8 };
  struct big large, small;
  int32_t *ids;
  (void)state;
  wants_memory(12e9, 5.5e9);
  big_make(&large, T, D, F, E, K);
  big_make(&small, 2 * ENDS, D, F, E, K);
  fill_normal(&large.io.x, 0, 1);
  fill_normal(&large.io.logits, 1, 1);
  fill_normal(&large.io.up, 2, .02);
  fill_normal(&large.io.down, 3, .1);
  OK(moe_span_fill(queue, large.spans[6], 0)); /* dy */
  fill_normal(&small.g.dy, 4, 1);
  copy_rows(&small.io.up, 0, &large.io.up, 0, E);
  copy_rows(&small.io.down, 0, &large.io.down, 0, E);
  for (int end = 0; end < 2; end++) {
    copy_rows(&small.io.x, end * ENDS, &large.io.x, end * (T - ENDS), ENDS);
    copy_rows(&small.io.logits, end * ENDS, &large.io.logits, end * (T - ENDS), ENDS);
    copy_rows(&large.g.dy, end * (T - ENDS), &small.g.dy, end * ENDS, ENDS);
  }
  ids = malloc(sizeof *ids * T * K);
  assert_non_null(ids);
  for (int64_t i = 0; i < (int64_t)T * K; i++) ids[i] = (int32_t)((i % K * 3 + i / K) % E);
  OK(moe_span_write(queue, large.spans[3], ids, sizeof *ids * T * K));
  for (int end = 0; end < 2; end++) copy_rows(&small.io.ids, end * ENDS, &large.io.ids, end * (T - ENDS), ENDS);
  free(ids);
  for (int i = 0; i < 2; i++) {
    struct big *b = i ? &small : &large;
    OK(moe_experts_forward(b->experts, queue, &b->io, &b->state));
    OK(moe_experts_backward(b->experts, queue, &b->state, &b->io, &b->g));
    OK(moe_queue_wait(queue));
  }
  for (int end = 0; end < 2; end++) {
    /* One rounding to bf16 of values that may differ by one rounding before it. */
    compare_rows("y", &large.io.y, end * (T - ENDS), &small.io.y, end * ENDS, ENDS, 0x1p-7);
    compare_rows("dx", &large.g.dx, end * (T - ENDS), &small.g.dx, end * ENDS, ENDS, 0x1p-7);
    compare_rows("dlogits", &large.g.dlogits, end * (T - ENDS), &small.g.dlogits, end * ENDS, ENDS, 0x1p-7);
  }
  compare_rows("dup", &large.g.dup, 0, &small.g.dup, 0, E, 0x1p-7);
  compare_rows("ddown", &large.g.ddown, 0, &small.g.ddown, 0, E, 0x1p-7);
  big_free(&small);
  big_free(&large);
}

/* Weights of more than 2^31 elements: the last expert's results are those of a branch of that expert alone. */
static void more_than_2_31_elements_of_weights(void **state)
{
  enum { T = 64, D = 4096, F = 16448, E = 33 };
  struct big large, small;
  int32_t ids[T];
  (void)state;
  wants_memory(40e9, 10e9);
  big_make(&large, T, D, F, E, 1);
  big_make(&small, T, D, F, 1, 1);
  fill_normal(&large.io.x, 0, 1);
  fill_normal(&large.io.up, 1, .02);
  fill_normal(&large.io.down, 2, .02);
  fill_normal(&large.g.dy, 3, 1);
  OK(moe_span_fill(queue, large.spans[2], 0)); /* logits */
  OK(moe_span_fill(queue, small.spans[2], 0));
  copy_rows(&small.io.x, 0, &large.io.x, 0, T);
  copy_rows(&small.g.dy, 0, &large.g.dy, 0, T);
  copy_rows(&small.io.up, 0, &large.io.up, E - 1, 1);
  copy_rows(&small.io.down, 0, &large.io.down, E - 1, 1);
  for (int i = 0; i < T; i++) ids[i] = E - 1;
  OK(moe_span_write(queue, large.spans[3], ids, sizeof ids));
  memset(ids, 0, sizeof ids);
  OK(moe_span_write(queue, small.spans[3], ids, sizeof ids));
  for (int i = 0; i < 2; i++) {
    struct big *b = i ? &small : &large;
    OK(moe_experts_forward(b->experts, queue, &b->io, &b->state));
    OK(moe_experts_backward(b->experts, queue, &b->state, &b->io, &b->g));
    OK(moe_queue_wait(queue));
  }
  compare_rows("y", &large.io.y, 0, &small.io.y, 0, T, 0x1p-7);
  compare_rows("dx", &large.g.dx, 0, &small.g.dx, 0, T, 0x1p-7);
  compare_rows("dup", &large.g.dup, E - 1, &small.g.dup, 0, 1, 0x1p-7);
  compare_rows("ddown", &large.g.ddown, E - 1, &small.g.ddown, 0, 1, 0x1p-7);
  big_free(&small);
  big_free(&large);
}

/* ---- determinism, accumulation ----------------------------------------------------------------------------------- */
/* Gradients of a whole step on NaN-filled memory, then once more on top: exactly twice.  (t_layer has the runs that
   must be bit-equal.) */
static void gradients_start_clean_and_add_up(void **state)
{
  (void)state;
  for (int bf16 = 0; bf16 < 2; bf16++) {
    int64_t dtype = bf16 ? MOE_BF16 : MOE_F32;
    struct layer l = layer_of(options_of(dtype, 9, 16, 8, 4, 2));
    struct t_memory *m = &l.m;
    moe_tape_moe options = moe_tape_moe_init();
    moe_tape *tape;
    double *once[8], *twice;
    l.desc.router_bias = l.desc.hidden_bias = l.desc.down_bias = 1;
    l.desc.balance_coef = .5;
    layer_make(&l, ctx, queue, 0);
    moe_tensor w = t_tensor(m, dtype, T_PACKED, SHAPE(16, 16)), dw = output_of(m, MOE_F32, SHAPE(16, 16));
    moe_tensor gain = t_tensor(m, dtype, T_PACKED, SHAPE(16)), dgain = output_of(m, MOE_F32, SHAPE(16));
    t_put(m, &w, t_uniform(m, 256, dtype, 1));
    t_put(m, &gain, t_uniform(m, 16, dtype, 1));
    layer_send(&l);
    options.params = l.io.params;
    options.grads = l.io.grads;
    const moe_tensor *grad[] = { &dw,
                                 &dgain,
                                 &l.grad[REF_ROUTER],
                                 &l.grad[REF_ROUTER_BIAS],
                                 &l.grad[REF_GATE],
                                 &l.grad[REF_DOWN],
                                 &l.grad[REF_UP_BIAS],
                                 &l.grad[REF_DOWN_BIAS] };
    OK(moe_tape_create(&tape, queue, NULL));
    for (int pass = 0; pass < 2; pass++) {
      moe_tape_reset(tape);
      moe_value x = moe_tape_matmul(tape, moe_tape_leaf(tape, &l.io.x, 0), moe_tape_param(tape, &w, &dw), 0, 0);
      x = moe_tape_rms_norm(tape, x, moe_tape_param(tape, &gain, &dgain), 1e-5);
      moe_value y = moe_tape_moe_layer(tape, l.layer, x, &options, NULL);
      OK(moe_tape_backward(tape, moe_tape_mean(tape, y), (moe_value){ 0 }, pass ? MOE_ACCUMULATE : 0));
      fetch(m);
      for (int i = 0; i < 8; i++)
        if (pass == 0) once[i] = values_of(m, grad[i]);
        else {
          twice = values_of(m, grad[i]);
          for (int64_t k = 0; k < moe_tensor_count(grad[i]); k++)
            if (!(twice[k] == 2 * once[i][k])) fail_msg("gradient %d: %g is not twice %g", i, twice[k], once[i][k]);
        }
    }
    moe_tape_free(tape);
    layer_free(&l);
  }
}

/* ---- devices without double precision ---------------------------------------------------------------------------- */
/* The same device, said to have none. */
static void without_fp64(void **state)
{
  static const int64_t dtypes[] = { MOE_F32, MOE_BF16, MOE_F16 };
  moe_context *poor;
  moe_queue *q;
  moe_context_desc desc = moe_context_desc_init();
  struct moe__dev_info *info;
  struct options o = options_of(MOE_F64, 4, 8, 8, 4, 2);
  struct branch b = branch_of(o);
  struct layer l = layer_of(o);
  (void)state;
  desc.device = getenv("MOE_TEST_DEVICE");
  OK(moe_context_create(&poor, &desc));
  memcpy(&info, &poor->info, sizeof info); /* without its const */
  info->pub.fp64 = 0;
  OK(moe_queue_create(&q, poor));
  b.desc.d_model = l.desc.d_model = b.desc.d_ff = l.desc.d_ff = 8;
  b.desc.n_experts = l.desc.n_experts = 4;
  b.desc.dtype = l.desc.dtype = MOE_F64;
  b.desc.selection = l.desc.selection = &o.selection;
  b.desc.weights = l.desc.weights = &o.weights;
  b.desc.activation = l.desc.activation = &o.activation;
  FAILS(MOE_ERR_UNSUPPORTED, "f64", moe_experts_create(&b.experts, poor, &b.desc));
  assert_null(b.experts);
  FAILS(MOE_ERR_UNSUPPORTED, "f64", moe_layer_create(&l.layer, poor, &l.desc));
  assert_null(l.layer);
  moe_router_desc router = moe_router_desc_init();
  moe_adamw_desc adamw = moe_adamw_desc_init();
  moe_router *r = NULL;
  moe_adamw *opt = NULL;
  router.n_experts = 4;
  router.dtype = adamw.dtype = MOE_F64;
  router.selection = &o.selection;
  router.weights = &o.weights;
  adamw.peak = 1;
  if (!strcmp(poor->be->name, "opencl")) { /* no CUDA device is without */
    FAILS(MOE_ERR_UNSUPPORTED, "f64", moe_router_create(&r, poor, &router));
    FAILS(MOE_ERR_UNSUPPORTED, "f64", moe_adamw_create(&opt, poor, &adamw));
    assert_true(!r && !opt);
  }

  for (int i = 0; i < 3; i++) {
    l = layer_of(options_of(dtypes[i], 4, 8, 8, 4, 2));
    l.desc.d_shared = 4;
    layer_make(&l, poor, q, 0);
    layer_check(&l);
    layer_free(&l);
  }
  moe_queue_free(q);
  moe_context_free(poor);
}

#if MOE_HAVE_OPENCL
extern const struct moe__source moe__cl_sources[];

/* What the F32 variant of a source compiles: lines under MOE_ST_F64 and comments blanked. */
static void blank_f64(char *text)
{
  enum { MAX = 16 };
  int depth = 0, f64[MAX] = { 0 }; /* 1: this branch is F64's; -1: it is the other one */
  for (char *p = text; *p; p++)
    if (p[0] == '/' && p[1] == '*') {
      char *end = strstr(p, "*/");
      assert_non_null(end);
      for (; p < end + 2; p++)
        if (*p != '\n') *p = ' ';
      p--;
    }
  for (char *line = text, *next; *line; line = next) {
    char *hash = line + strspn(line, " \t");
    next = strchr(line, '\n');
    next = next ? next + 1 : line + strlen(line);
    char saved = *next;
    *next = 0;
    if (*hash == '#') {
      const char *word = hash + 1 + strspn(hash + 1, " ");
      int names = strstr(word, "MOE_ST_F64") != NULL;
      if (!strncmp(word, "if", 2)) {
        assert_true(++depth < MAX);
        f64[depth] = !names ? 0 : strstr(word, "ifndef") || strstr(word, "!defined") ? -1 : 1;
      } else if (!strncmp(word, "el", 2)) {
        f64[depth] = !strncmp(word, "elif", 4) && names ? 1 : -f64[depth];
      } else if (!strncmp(word, "endif", 5)) {
        depth--;
      }
    }
    int out = 0;
    for (int d = 1; d <= depth; d++) out |= f64[d] == 1;
    for (char *p = line; out && p < next; p++)
      if (*p != '\n') *p = ' ';
    *next = saved;
  }
}

/* In what is left neither `double` nor a floating literal without an f, outside R(...), which adds it. */
static void no_doubles_in_single_precision_programs(void **state)
{
  (void)state;
  for (const struct moe__source *s = moe__cl_sources; s->name; s++) {
    char *text = malloc(s->size + 1);
    assert_non_null(text);
    memcpy(text, s->data, s->size);
    text[s->size] = 0;
    blank_f64(text);
    for (char *p = text; *p;) {
      if (isalpha((unsigned char)*p) || *p == '_') {
        size_t n = 0;
        while (isalnum((unsigned char)p[n]) || p[n] == '_') n++;
        if (!strncmp(p, "double", 6) && n <= 8) fail_msg("%s.cl: %.60s", s->name, p);
        p += n;
      } else if (isdigit((unsigned char)*p) || (*p == '.' && isdigit((unsigned char)p[1]))) {
        const char *begin = p;
        int hex = p[0] == '0' && (p[1] == 'x' || p[1] == 'X'), real = 0;
        while (isalnum((unsigned char)*p) || *p == '.' ||
               ((*p == '-' || *p == '+') && strchr(hex ? "pP" : "eE", p[-1]))) {
          real |= *p == '.' || strchr(hex ? "pP" : "eE", *p) != NULL;
          p++;
        }
        const char *before = begin;
        while (before > text && (before[-1] == '-' || before[-1] == ' ')) before--;
        int wrapped = before - text >= 2 && before[-1] == '(' && before[-2] == 'R';
        if (real && !wrapped && p[-1] != 'f' && p[-1] != 'F') fail_msg("%s.cl: %.40s", s->name, begin);
      } else {
        p++;
      }
    }
    free(text);
  }
}
#endif

/* ---- work-groups and barriers ------------------------------------------------------------------------------------ */
/* Runs `call` many times from the same memory: each time the same bits, which the caller then compares. */
#define MANY(m, call)                                                                                                  \
  do {                                                                                                                 \
    for (int run_ = 0; run_ < runs(); run_++) {                                                                        \
      send(m);                                                                                                         \
      OK(call);                                                                                                        \
      fetch(m);                                                                                                        \
      if (run_ && !t_repeats(m)) fail_msg("run %d gave other bits", run_);                                             \
    }                                                                                                                  \
  } while (0)

static int runs(void)
{
  return test_short() ? 3 : getenv("POCL_WORK_GROUP_METHOD") ? 25 : 100;
}

static moe_tensor put_of(struct t_memory *m, int64_t dtype, const num *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(m, dtype, T_PACKED, rank, shape);
  t_put(m, &t, values);
  return t;
}

static moe_tensor put_ints_of(struct t_memory *m, const int32_t *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(m, MOE_I32, T_PACKED, rank, shape);
  t_put_ints(m, &t, values);
  return t;
}

static void sums(struct t_memory *m, int64_t n)
{
  num *a = t_uniform(m, n, MOE_F32, 1), sum = { 0 }, square = { 0 };
  struct moe__args_elt_sum s = { .dtype = MOE_F32, .n = n, .alpha = 1 };
  struct moe__args_sqnorm q = { .dtype = MOE_F32, .n = n };
  s.a = q.a = put_of(m, MOE_F32, a, SHAPE(n));
  s.y = output_of(m, MOE_F32, SHAPE(1));
  q.y = output_of(m, MOE_F32, SHAPE(1));
  s.scratch = q.scratch = output_of(m, MOE_F32, SHAPE(MOE__PARTS));
  OK(moe__prepare_elt_sum(ctx, &s, MOE_AUTO));
  OK(moe__prepare_sqnorm(ctx, &q, MOE_AUTO));
  MANY(m, moe__run_elt_sum(queue, &s, MOE_AUTO));
  ref_elt_sum(&sum, a, n, 0, 1);
  check_tensor(m, "sum", &s.y, &sum);
  MANY(m, moe__run_sqnorm(queue, &q, MOE_AUTO));
  ref_sqnorm(&square, a, n, 0);
  check_tensor(m, "sum of squares", &q.y, &square);
}

/* The counting sort: a scan over experts, a stable place for each slot. */
static void sorts(struct t_memory *m, int64_t n)
{
  int64_t E = n < 40 ? n : 40;
  int32_t *ids = t_ints(m, n), *want = t_ints(m, 2 * n + E + 1), health = 0;
  struct moe__args_plan p = { .dtype = MOE_F32, .T = n, .K = 1, .E = E };
  for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)t_below(m, E);
  p.ids = put_ints_of(m, ids, SHAPE(n, 1));
  p.offs = output_of(m, MOE_I32, SHAPE(E + 1));
  p.row2slot = output_of(m, MOE_I32, SHAPE(n));
  p.slot2row = output_of(m, MOE_I32, SHAPE(n));
  p.scratch = output_of(m, MOE_I32, SHAPE(moe__plan_scratch(n, E)));
  OK(moe__prepare_plan(ctx, &p, MOE_AUTO));
  MANY(m, moe__run_plan(queue, &p, MOE_AUTO));
  ref_plan(want, want + E + 1, want + E + 1 + n, &health, ids, NULL, n, 1, E);
  assert_memory_equal(ints_of(m, &p.offs), want, (size_t)(E + 1) * sizeof *want);
  assert_memory_equal(ints_of(m, &p.row2slot), want + E + 1, (size_t)n * sizeof *want);
  assert_memory_equal(ints_of(m, &p.slot2row), want + E + 1 + n, (size_t)n * sizeof *want);
}

/* Top-k and softmax over n experts, and its backward. */
static void rows_of_experts(struct t_memory *m, int64_t n)
{
  int64_t K = n < 5 ? n : 5, T = 3;
  struct options o = options_of(MOE_F32, T, 1, 1, n, K);
  num *logits = t_uniform(m, T * n, MOE_F32, 4), *dw = t_uniform(m, T * K, MOE_F32, 1), *want = t_nums(m, T * n);
  int32_t health = 0;
  struct moe__args_select s = { .dtype = MOE_F32, .T = T, .E = n, .select = select_of(&o) };
  struct moe__args_weights w = { .dtype = MOE_F32, .T = T, .E = n, .K = K, .weigh = { MOE__SOFTMAX, 0, 1, 0 } };
  struct moe__args_weights_bwd b = { .dtype = MOE_F32, .T = T, .E = n, .K = K, .weigh = w.weigh };
  s.logits = w.logits = b.logits = put_of(m, MOE_F32, logits, SHAPE(T, n));
  s.ids = output_of(m, MOE_I32, SHAPE(T, K));
  w.weights = output_of(m, MOE_F32, SHAPE(T, K));
  b.dweights = put_of(m, MOE_F32, dw, SHAPE(T, K));
  b.dlogits = output_of(m, MOE_F32, SHAPE(T, n));
  OK(moe__prepare_select(ctx, &s, MOE_AUTO));
  MANY(m, moe__run_select(queue, &s, MOE_AUTO));
  int32_t *ids = checked_ids(m, &o, &s.ids, logits, NULL);
  w.ids = b.ids = put_ints_of(m, ids, SHAPE(T, K));
  OK(moe__prepare_weights(ctx, &w, MOE_AUTO));
  MANY(m, moe__run_weights(queue, &w, MOE_AUTO));
  ref_weights(want, &health, logits, ids, T, n, K, w.weigh);
  check_tensor(m, "weights", &w.weights, want);
  OK(moe__prepare_weights_bwd(ctx, &b, MOE_AUTO));
  MANY(m, moe__run_weights_bwd(queue, &b, MOE_AUTO));
  ref_weights_bwd(want, dw, logits, ids, T, n, K, 0, w.weigh);
  check_tensor(m, "dlogits", &b.dlogits, want);
}

/* Sums over n tokens and over a vocabulary of n. */
static void losses(struct t_memory *m, int64_t n)
{
  int64_t E = 5, T = 4;
  num *logits = t_uniform(m, n * E, MOE_F32, 3), *probs = t_nums(m, E), loss[2] = { { 0 } };
  int32_t *ids = random_ids(m, n, E, 2), *counts = t_ints(m, E), tokens = 0, health = 0;
  struct moe__args_balance_fwd b = { .dtype = MOE_F32, .T = n, .S = 1, .E = E, .K = 2, .scoring = MOE__SOFTMAX };
  b.losses = output_of(m, MOE_F32, SHAPE(2));
  b.counts = output_of(m, MOE_I32, SHAPE(1, E));
  b.probs = output_of(m, MOE_F32, SHAPE(1, E));
  b.tokens = output_of(m, MOE_I32, SHAPE(1));
  b.logits = put_of(m, MOE_F32, logits, SHAPE(n, E));
  b.ids = put_ints_of(m, ids, SHAPE(n, 2));
  b.scratch = output_of(m, MOE_F32, SHAPE(moe__balance_scratch(n, 1, E)));
  OK(moe__prepare_balance_fwd(ctx, &b, MOE_AUTO));
  MANY(m, moe__run_balance_fwd(queue, &b, MOE_AUTO));
  ref_balance_fwd(loss, counts, probs, &tokens, logits, ids, NULL, n, 1, E, 2, MOE__SOFTMAX);
  check_tensor(m, "balance", &b.losses, loss);
  check_tensor(m, "probabilities", &b.probs, probs);
  assert_memory_equal(ints_of(m, &b.counts), counts, (size_t)E * sizeof *counts);

  num *words = t_uniform(m, T * n, MOE_F32, 4), *lse = t_nums(m, T), *rowloss = t_nums(m, T);
  int32_t *targets = t_ints(m, T);
  struct moe__args_xent_fwd x = { .dtype = MOE_F32, .T = T, .V = n };
  for (int64_t t = 0; t < T; t++) targets[t] = (int32_t)t_below(m, n);
  x.loss = output_of(m, MOE_F32, SHAPE(1));
  x.lse = output_of(m, MOE_F32, SHAPE(T));
  x.rowloss = output_of(m, MOE_F32, SHAPE(T));
  x.logits = put_of(m, MOE_F32, words, SHAPE(T, n));
  x.targets = put_ints_of(m, targets, SHAPE(T));
  OK(moe__prepare_xent_fwd(ctx, &x, MOE_AUTO));
  MANY(m, moe__run_xent_fwd(queue, &x, MOE_AUTO));
  num counted;
  ref_xent_fwd(loss, lse, rowloss, &counted, &health, words, targets, &(struct ref_xent){ .T = T, .V = n });
  check_tensor(m, "cross-entropy", &x.loss, loss);
  check_tensor(m, "logsumexp", &x.lse, lse);
}

/* Sums along rows of n, and down columns of n rows. */
static void norms(struct t_memory *m, int64_t n)
{
  int64_t T = 6;
  for (int down = 0; down < 2; down++) {
    int64_t rows = down ? n : T, D = down ? T : n;
    num *x = t_uniform(m, rows * D, MOE_F32, 1), *w = t_uniform(m, D, MOE_F32, 1), *y = t_nums(m, rows * D);
    num *rstd = t_nums(m, rows), *dy = t_uniform(m, rows * D, MOE_F32, 1), *dw = t_nums(m, D);
    struct moe__args_rms_fwd f = { .dtype = MOE_F32, .T = rows, .D = D, .eps = 1e-5 };
    struct moe__args_rms_bwd b = { .dtype = MOE_F32, .T = rows, .D = D };
    f.x = b.x = put_of(m, MOE_F32, x, SHAPE(rows, D));
    f.w = b.w = put_of(m, MOE_F32, w, SHAPE(D));
    f.y = output_of(m, MOE_F32, SHAPE(rows, D));
    f.rstd = output_of(m, MOE_F32, SHAPE(rows));
    OK(moe__prepare_rms_fwd(ctx, &f, MOE_AUTO));
    MANY(m, moe__run_rms_fwd(queue, &f, MOE_AUTO));
    ref_rms_fwd(y, rstd, x, w, rows, D, 1e-5);
    check_tensor(m, "rms_norm", &f.y, y);
    double *got = values_of(m, &f.rstd);
    for (int64_t t = 0; t < rows; t++) rstd[t] = n_exact(got[t]);
    b.rstd = put_of(m, MOE_F32, rstd, SHAPE(rows));
    b.dy = put_of(m, MOE_F32, dy, SHAPE(rows, D));
    b.dx = output_of(m, MOE_F32, SHAPE(rows, D));
    b.dw = output_of(m, MOE_F32, SHAPE(D));
    b.scratch = output_of(m, MOE_F32, SHAPE(MOE__PARTS, D));
    OK(moe__prepare_rms_bwd(ctx, &b, MOE_AUTO));
    MANY(m, moe__run_rms_bwd(queue, &b, MOE_AUTO));
    ref_rms_bwd(y, dw, dy, x, w, rstd, rows, D, 0);
    check_tensor(m, "rms_norm dx", &b.dx, y);
    check_tensor(m, "rms_norm dw", &b.dw, dw);
  }
}

/* <da, a> over n, both ways; bias gradients over n rows. */
static void dots(struct t_memory *m, int64_t n)
{
  int64_t R = 5, N = 7;
  for (int plane = 0; plane < 2; plane++) {
    num *da = t_uniform(m, R * n, MOE_F32, 1), *h = t_uniform(m, R * n, MOE_F32, 2), *dw = t_nums(m, R);
    struct moe__args_act_bwd a = { .dtype = MOE_F32, .R = R, .F = n, .plane = plane, .act = { .kind = MOE__ACT_SILU } };
    a.da = put_of(m, MOE_F32, da, SHAPE(R, n));
    a.h = put_of(m, MOE_F32, h, SHAPE(R, n));
    a.dh = output_of(m, MOE_F32, SHAPE(R, n));
    a.dweights = output_of(m, MOE_F32, SHAPE(R));
    OK(moe__prepare_act_bwd(ctx, &a, MOE_AUTO));
    MANY(m, moe__run_act_bwd(queue, &a, MOE_AUTO));
    ref_act_bwd(t_nums(m, R * n), NULL, dw, da, h, NULL, NULL, R, n, 0, a.act, MOE_F32);
    check_tensor(m, plane ? "plane" : "serial", &a.dweights, dw);
  }
  int32_t offs[3] = { 0, (int32_t)(n / 3), (int32_t)n };
  num *p = t_uniform(m, n * N, MOE_F32, 1), *want = t_nums(m, 2 * N);
  struct moe__args_ggemm_colsum c = { .dtype = MOE_F32, .R = n, .E = 2, .N = N, .div = 1 };
  c.p = put_of(m, MOE_F32, p, SHAPE(n, N));
  c.offs = put_ints_of(m, offs, SHAPE(3));
  c.c[0] = output_of(m, MOE_F32, SHAPE(2, N));
  OK(moe__prepare_ggemm_colsum(ctx, &c, MOE_AUTO));
  MANY(m, moe__run_ggemm_colsum(queue, &c, MOE_AUTO));
  ref_ggemm_colsum(want, p, NULL, offs, NULL, 2, N, 1, 0);
  check_tensor(m, "column sums", &c.c[0], want);
}

/* Partly filled work-groups around barriers, on every reduction, scan and sort. */
static void partly_filled_groups(void **state)
{
  static const int64_t sizes[] = { 1, 16, 255, 256, 257 };
  static void (*const kinds[])(struct t_memory *, int64_t) = { sums, sorts, rows_of_experts, losses, norms, dots };
  (void)state;
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
      struct t_memory m = memory();
      kinds[k](&m, sizes[i]);
      t_memory_free(&m);
    }
}

/* Wherever it begins and ends: devices fill in patterns of many bytes. */
static void fills_reach_all_of_a_span_and_nothing_else(void **state)
{
  enum { ALL = 1024 };
  static const uint64_t firsts[] = { 0, 1, 16, 127, 128, 130 }, lengths[] = { 0, 1, 100, 127, 128, 129, 300, 640 };
  unsigned char before[ALL], got[ALL];
  moe_span span;
  (void)state;
  memset(before, 0x11, sizeof before);
  OK(moe_span_alloc(&span, ctx, ALL));
  for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++)
    for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) {
      OK(moe_span_write(queue, span, before, ALL));
      OK(moe_span_fill(queue, (moe_span){ span.handle, span.offset + firsts[i], lengths[j] }, 0xa5));
      OK(moe_span_read(queue, got, span, ALL));
      for (uint64_t k = 0; k < ALL; k++)
        assert_int_equal(got[k], k >= firsts[i] && k < firsts[i] + lengths[j] ? 0xa5 : 0x11);
    }
  moe_span_free(ctx, &span);
}

/* The same in a process whose PoCL makes work-groups its other way. */
static void partly_filled_groups_cbs(void **state)
{
  static char self[] = "/proc/self/exe", only[] = "--groups", method[] = "POCL_WORK_GROUP_METHOD=cbs",
              cache[] = "POCL_KERNEL_CACHE=0"; /* it does not know one method's code from the other's */
  char *argv[] = { self, only, NULL }, line[512], last[512] = "";
  moe_device_info info = moe_device_info_init();
  posix_spawn_file_actions_t actions;
  int n = 0, status = -1, ends[2], unknown = 0;
  pid_t child;
  (void)state;
  OK(moe_context_info(ctx, &info));
  if (!strstr(info.driver, "PoCL")) {
    print_message("the device is not PoCL's\n");
    skip();
  }
  while (environ[n]) n++;
  char **env = calloc((size_t)n + 3, sizeof *env);
  assert_non_null(env);
  env[0] = method;
  env[1] = cache;
  memcpy(env + 2, environ, (size_t)n * sizeof *env);
  assert_int_equal(pipe(ends), 0);
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
  posix_spawn_file_actions_addclose(&actions, ends[0]);
  assert_int_equal(posix_spawn(&child, self, &actions, NULL, argv, env), 0);
  posix_spawn_file_actions_destroy(&actions);
  free(env);
  close(ends[1]);
  FILE *said = fdopen(ends[0], "r");
  assert_non_null(said);
  while (!unknown && fgets(line, sizeof line, said)) {
    unknown = strstr(line, "Unknown work group") != NULL;
    if (strstr(line, "ERROR")) memcpy(last, line, sizeof last);
  }
  if (unknown) kill(child, SIGTERM);
  fclose(said);
  assert_int_equal(waitpid(child, &status, 0), child);
  if (unknown) {
    print_message("this PoCL knows no other way\n");
    skip();
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status)) fail_msg("wait status 0x%x: %s", (unsigned)status, last);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */
/* Device memory of the library's own, through the caller's hooks. */
static struct {
  moe_context *of;
  int64_t blocks, bytes;
} owned;
static void *take(void *user, uint64_t bytes)
{
  void *handle = NULL;
  (void)user;
  if (owned.of->be->alloc(owned.of->dev, bytes, &handle)) return NULL;
  owned.blocks++;
  owned.bytes += (int64_t)bytes;
  return handle;
}
static void give(void *user, void *handle)
{
  (void)user;
  owned.blocks--;
  owned.of->be->release(owned.of->dev, handle);
}

/* Resident bytes of the process. */
static int64_t resident(void)
{
  long long size = 0, pages = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  if (f && fscanf(f, "%lld %lld", &size, &pages) != 2) pages = 0;
  if (f) fclose(f);
  return pages * sysconf(_SC_PAGESIZE);
}

struct cycle {
  struct layer l;
  moe_tape *tape;
  moe_tape_moe options;
  int64_t number;
};

/* Forward and backward over a tape, and the layer by itself; every fifth call fails; a queue comes and goes. */
static void one_cycle(struct cycle *c, moe_context *own)
{
  struct layer *l = &c->l;
  moe_queue *q = l->m.q;
  c->number++;
  moe_tape_reset(c->tape);
  moe_value x = moe_tape_leaf(c->tape, &l->io.x, 1);
  moe_value y = moe_tape_moe_layer(c->tape, l->layer, x, &c->options, NULL);
  OK(moe_tape_backward(c->tape, moe_tape_mean(c->tape, y), (moe_value){ 0 }, 0));
  moe_layer_io io = l->io;
  if (c->number % 5 == 0) io.saved.bytes /= 2;
  moe_status status = moe_layer_forward(l->layer, q, &io, &l->state);
  assert_int_equal(status, c->number % 5 ? MOE_OK : MOE_ERR_TOO_SMALL);
  OK(moe_layer_inference(l->layer, q, &l->io));
  if (c->number % 5) layer_backward(l);
  if (c->number % 50 == 0) {
    moe_queue *brief;
    moe_layer *again;
    OK(moe_queue_wait(q)); /* the other queue uses the same memory */
    OK(moe_queue_create(&brief, own));
    OK(moe_layer_create(&again, own, &l->desc));
    OK(moe_layer_inference(again, brief, &l->io));
    moe_layer_free(again);
    moe_queue_free(brief);
  }
  if (c->number % 16 == 0) OK(moe_queue_wait(q));
}

static void thousands_of_cycles_grow_nothing(void **state)
{
  int64_t cycles = test_long() ? 10000 : test_short() ? 100 : 1000, warm = test_short() ? 50 : 500;
  moe_context_desc desc = moe_context_desc_init();
  struct cycle c = { .l = layer_of(options_of(MOE_F32, 16, 16, 16, 4, 2)) };
  moe_context *own;
  moe_queue *q;
  uint64_t held, held_then;
  int64_t blocks, bytes;
  (void)state;
  desc.device = getenv("MOE_TEST_DEVICE");
  desc.alloc = take;
  desc.release = give;
  OK(moe_context_create(&own, &desc));
  owned.of = own;
  OK(moe_queue_create(&q, own));
  c.l.desc.balance_coef = .01;
  layer_make(&c.l, own, q, 0);
  c.options = moe_tape_moe_init();
  c.options.params = c.l.io.params;
  c.options.grads = c.l.io.grads;
  OK(moe_tape_create(&c.tape, q, NULL));
  for (int64_t i = 0; i < warm; i++) one_cycle(&c, own);
  OK(moe_queue_wait(q));
  moe_tape_memory(c.tape, &held, NULL);
  blocks = owned.blocks;
  bytes = owned.bytes;
  int64_t grown = -resident();
  for (int64_t i = 0; i < cycles; i++) one_cycle(&c, own);
  OK(moe_queue_wait(q));
  grown += resident();
  moe_tape_memory(c.tape, &held_then, NULL);
  assert_int_equal(held_then, held);
  assert_int_equal(owned.blocks, blocks);
  assert_int_equal(owned.bytes - bytes,
                   (cycles + warm) / 50 * 16 - warm / 50 * 16); /* the brief queues' health words */
#ifdef __SANITIZE_ADDRESS__
  (void)grown; /* freed memory is kept for a while */
#else
  /* About 60 commands a cycle: an object forgotten with each would be megabytes. */
  if (grown > 4 << 20) fail_msg("%lld cycles grew the process by %lld KiB", (long long)cycles, (long long)grown >> 10);
#endif
  moe_tape_free(c.tape);
  layer_free(&c.l);
  moe_queue_free(q);
  assert_int_equal(owned.blocks, 0);
  moe_context_free(own);
}

int main(int argc, char **argv)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(correction_bias_stays_out_of_the_weights),
    cmocka_unit_test(correction_bias_keeps_its_digits),
    cmocka_unit_test(more_experts_than_threads),
    cmocka_unit_test(softmax_then_renormalize_then_scale),
    cmocka_unit_test(groups_score_by_their_best_or_best_two),
    cmocka_unit_test(balance_loss_reaches_the_router_once),
    cmocka_unit_test(balance_loss_is_of_one_layer_and_of_real_tokens),
    cmocka_unit_test(odd_token_counts),
    cmocka_unit_test(gpt_oss_activation),
    cmocka_unit_test(strides_and_odd_offsets),
    cmocka_unit_test(more_than_2_31_elements_of_rows),
    cmocka_unit_test(more_than_2_31_elements_of_weights),
    cmocka_unit_test(gradients_start_clean_and_add_up),
    cmocka_unit_test(without_fp64),
#if MOE_HAVE_OPENCL
    cmocka_unit_test(no_doubles_in_single_precision_programs),
#endif
    cmocka_unit_test(fills_reach_all_of_a_span_and_nothing_else),
    cmocka_unit_test(partly_filled_groups),
    cmocka_unit_test(partly_filled_groups_cbs),
    cmocka_unit_test(thousands_of_cycles_grow_nothing),
  };
  const struct CMUnitTest groups[] = { cmocka_unit_test(partly_filled_groups) };
  if (!test_open(&ctx, &queue)) return 77;
  int only_groups = argc > 1 && !strcmp(argv[1], "--groups");
  int rc = only_groups ? TEST_MAIN(groups) : TEST_MAIN(tests);
  test_close(ctx, queue);
  return rc;
}
