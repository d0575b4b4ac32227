/* t_layer.c - what moe_layer and moe_experts promise beyond their formulas: the same bits everywhere and every time,
   states that outlive their call, empty and lopsided batches, counts and metrics, and 16-bit storage whose results
   stay within the bounds that its roundings allow. */
#include "fixture.h"

#include <math.h>
#include <pthread.h>

static moe_context *ctx;
static moe_queue *queue;

static const int64_t dtypes[] = { MOE_F32, MOE_BF16, MOE_F16, MOE_F64 };
static int n_dtypes(void)
{
  return test_has_fp64(ctx) ? 4 : 3;
}

/* A layer with every part there is. */
static struct layer whole(int64_t dtype, int64_t T, int64_t D, int64_t F, int64_t E, int64_t K)
{
  struct layer l = layer_of(options_of(dtype, T, D, F, E, K));
  l.desc.router_bias = l.desc.hidden_bias = l.desc.down_bias = l.desc.shared_gate = 1;
  l.desc.d_shared = F / 2 + 1;
  l.desc.balance_coef = 0.25;
  l.desc.z_coef = 0.125;
  return l;
}

static struct layer usual(void)
{
  return whole(MOE_F32, 13, 17, 11, 5, 2);
}

/* Every gradient and dx of a layer, as last fetched. */
struct results {
  double *dx, *grad[REF_PARAMS];
};
static struct results results_of(struct layer *l)
{
  struct results r = { values_of(&l->m, &l->io.dx), { 0 } };
  for (int p = 0; p < REF_PARAMS; p++)
    if (l->grad[p].handle) r.grad[p] = values_of(&l->m, &l->grad[p]);
  return r;
}

/* b's gradients are `times` those of a, to the bit; dx is the same. */
static void assert_times(struct layer *l, const struct results *a, const struct results *b, double times)
{
  assert_same(a->dx, b->dx, l->o.T * l->o.D);
  for (int p = 0; p < REF_PARAMS; p++)
    for (int64_t i = 0; l->grad[p].handle && i < moe_tensor_count(&l->grad[p]); i++)
      if (!(b->grad[p][i] == times * a->grad[p][i]))
        fail_msg("%s[%lld] is %.9g, wanted %.9g", ref_param_names[p], (long long)i, b->grad[p][i],
                 times * a->grad[p][i]);
}

/* ---- parameters -------------------------------------------------------------------------------------------------- */
/* FNV-1a of a parameter's bytes, continued from `hash`. */
static uint64_t bits_of(struct layer *l, int p, uint64_t hash)
{
  moe_span at = { l->param[p].handle, l->param[p].offset, moe_tensor_extent(&l->param[p]) };
  unsigned char *bytes = t_host(&l->m, (int64_t)at.bytes, 1);
  OK(moe_span_read(queue, bytes, at, at.bytes));
  for (uint64_t i = 0; i < at.bytes; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

#define FNV 0xcbf29ce484222325u

static void initial_values_are_the_same_bits_on_every_device(void **state)
{
  static const uint64_t pinned[] = { [MOE_F64] = 0x81e40dfdf88c62fau,
                                     [MOE_F32] = 0x34283ca0d236d62cu,
                                     [MOE_BF16] = 0x70cc227fdc50220bu,
                                     [MOE_F16] = 0xd14d6db908b8d640u };
  const uint64_t seed = 0x0123456789abcdef;
  (void)state;
  for (int i = 0; i < n_dtypes(); i++) {
    struct layer l = whole(dtypes[i], 1, 12, 20, 4, 2);
    uint64_t hash = FNV, gate;
    options_sigmoid(&l.o);
    l.desc.correction_bias = 1;
    layer_make(&l, ctx, queue, 0);
    for (int p = 0; p < REF_PARAMS; p++) t_own(&l.m, &l.param[p]);
    OK(moe_layer_init(l.layer, queue, l.io.params, seed, 0.02));
    fetch(&l.m);
    for (int p = 0; p < REF_PARAMS; p++) {
      int64_t n = moe_tensor_count(&l.param[p]);
      num *want = t_nums(&l.m, n); /* exact: no error is allowed */
      if (!strstr(ref_param_names[p], "bias")) ref_elt_normal(want, n, (int64_t)seed, p, 0.02);
      check_tensor(&l.m, ref_param_names[p], &l.param[p], want);
      hash = bits_of(&l, p, hash);
    }
    if (hash != pinned[dtypes[i]])
      fail_msg("%s: the bits hash to 0x%016llx", moe_dtype_name(dtypes[i]), (unsigned long long)hash);
    gate = bits_of(&l, REF_GATE, FNV);
    assert_true(gate != bits_of(&l, REF_UP, FNV));
    OK(moe_layer_init(l.layer, queue, l.io.params, seed + 1, 0.02));
    assert_true(gate != bits_of(&l, REF_GATE, FNV));
    layer_free(&l);
  }
}

static void parameters_are_counted(void **state)
{
  struct layer l = usual();
  int64_t all, active, router = 5 * 17 + 5, expert = 3 * 17 * 11 + 2 * 11 + 17, shared = 3 * 17 * 6 + 17;
  (void)state;
  layer_make(&l, ctx, queue, 0);
  OK(moe_layer_parameter_counts(&all, &active, l.layer));
  assert_int_equal(all, router + 5 * expert + shared);
  assert_int_equal(active, router + 2 * expert + shared);
  layer_free(&l);
  /* The correction bias does not train. */
  l = layer_of(options_of(MOE_F32, 1, 2, 2, 4, 2));
  options_sigmoid(&l.o);
  l.desc.correction_bias = 1;
  l.o.activation.gated = 0;
  layer_make(&l, ctx, queue, 0);
  OK(moe_layer_parameter_counts(&all, &active, l.layer));
  assert_int_equal(all, 8 + 4 * 8);
  assert_int_equal(active, 8 + 2 * 8);
  assert_null(l.grad[REF_CORRECTION_BIAS].handle);
  layer_free(&l);
}

/* ---- losses, counts, metrics, bias ------------------------------------------------------------------------------- */
static void metrics_are_of_the_load(void **state)
{
  static const int32_t ids[] = { 0, 0, 1, 0, 1, 2, 3 }, mask[] = { 1, 1, 1, 1, 1, 1, 0 };
  (void)state;
  for (int masked = 0; masked < 2; masked++) {
    struct layer l = layer_of(options_of(MOE_F32, 7, 8, 8, 4, 1));
    moe_layer_metrics metrics = moe_layer_metrics_init();
    int32_t load[4], want[4] = { 3, 2, 1, 1 - masked };
    double n = 7 - masked, entropy = 0;
    moe_tensor losses;
    layer_make(&l, ctx, queue, 0);
    layer_replay(&l, ids);
    if (masked) layer_mask(&l, mask);
    layer_send(&l);
    layer_forward(&l);
    OK(moe_layer_metrics_read(&metrics, load, l.layer, queue, &l.state));
    fetch(&l.m);
    OK(moe_layer_losses(&losses, &l.state));
    for (int e = 0; e < 4; e++)
      if (want[e]) entropy -= want[e] / n * log(want[e] / n);
    assert_memory_equal(load, want, sizeof load);
    assert_near(metrics.entropy, entropy, 8 * 0x1p-24);
    assert_near(metrics.imbalance, 3 * 4 / n, 8 * 0x1p-24);
    assert_int_equal(metrics.dead, masked);
    assert_int_equal(metrics.slots, 7 - masked);
    assert_true(metrics.balance == values_of(&l.m, &losses)[0] && metrics.z == values_of(&l.m, &losses)[1]);
    OK(moe_layer_metrics_read(&metrics, NULL, l.layer, queue, &l.state));
    layer_free(&l);
  }
}

/* Against the reference, of both kinds of probabilities; a sequence without a token does not count. */
static void losses_and_counts_are_per_sequence(void **state)
{
  static const int32_t mask[12] = { 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1 }, nothing[12] = { 0 };
  static const int64_t sequences[] = { 0, 2, 3, 12 };
  (void)state;
  for (int i = 0; i < n_dtypes(); i++)
    for (int s = 0; s < 4; s++)
      for (int masked = 0; masked < 3; masked++) {
        struct layer l = whole(dtypes[i], 12, 16, 8, 6, 3);
        l.desc.balance_scoring = s == 2 ? MOE_SIGMOID : 0;
        layer_make(&l, ctx, queue, sequences[s]);
        if (masked) layer_mask(&l, masked == 1 ? mask : nothing);
        layer_aux_scale(&l, 3);
        layer_send(&l);
        layer_check(&l);
        if (masked == 2) assert_true(l.ref.losses[0].v == 0 && l.ref.losses[1].v == 0);
        layer_free(&l);
      }
}

/* Integer comparison of E*count with the sum: a tie moves nothing, however large the counts. */
static void correction_bias_moves_by_integer_counts(void **state)
{
  enum { S = 3, E = 5 };
  static const int32_t counts[][S * E] = {
    { 1, 0, 2, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0 }, /* 3 1 2 2 2, mean 2 */
    { 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0 }, /* 1 1 0 0 1, mean .6 */
    { 0 },                                           /* nothing */
    { 2000000000, 2000000000, 2000000000, 2000000000, 2000000000, 2000000000, 2000000000, 2000000000, 2000000000,
      2000000000, 2000000001, 2000000000, 2000000000, 2000000000, 1999999999 }, /* past 2^31, 2^32 */
  };
  static const int sign[][E] = { { -1, 1, 0, 0, 0 }, { -1, -1, 1, 1, -1 }, { 0 }, { -1, 0, 0, 0, 1 } };
  (void)state;
  for (int i = 0; i < n_dtypes(); i++)
    for (int which = 0; which < 4; which++) {
      struct layer l = layer_of(options_of(dtypes[i], 6, 8, 8, E, 2));
      moe_tensor *bias = &l.param[REF_CORRECTION_BIAS], given;
      options_sigmoid(&l.o);
      l.desc.correction_bias = 1;
      layer_make(&l, ctx, queue, 0);
      t_own(&l.m, bias);
      given = t_tensor(&l.m, MOE_I32, T_PACKED, SHAPE(S, E));
      t_put_ints(&l.m, &given, counts[which]);
      layer_send(&l);
      layer_forward(&l);
      layer_backward(&l);
      fetch(&l.m); /* training and evaluation do not move it */
      OK(moe_layer_inference(l.layer, queue, &l.io));
      fetch(&l.m);
      check_tensor(&l.m, "correction_bias", bias, l.value[REF_CORRECTION_BIAS]);
      OK(moe_layer_bias_step(l.layer, queue, l.io.params, &given, 1e-3));
      fetch(&l.m);
      for (int e = 0; e < E; e++) {
        double was = l.value[REF_CORRECTION_BIAS][e].v, got = values_of(&l.m, bias)[e];
        double want =
            dtypes[i] == MOE_F64 ? was + sign[which][e] * 1e-3 : (double)((float)was + (float)sign[which][e] * 1e-3f);
        if (got != want) fail_msg("case %d, expert %d: %.9g, wanted %.9g", which, e, got, want);
      }
      layer_free(&l);
    }
}

/* The counts of a state go into the step without a wait; they are of unmasked tokens. */
static void correction_bias_moves_by_a_states_counts(void **state)
{
  static const int32_t mask[6] = { 1, 1, 1, 0, 1, 1 };
  struct layer l = layer_of(options_of(MOE_F32, 6, 8, 8, 5, 2));
  moe_tensor counts;
  num *want;
  (void)state;
  options_sigmoid(&l.o);
  l.desc.correction_bias = 1;
  layer_make(&l, ctx, queue, 2);
  layer_mask(&l, mask);
  layer_send(&l);
  t_own(&l.m, &l.param[REF_CORRECTION_BIAS]);
  layer_forward(&l);
  OK(moe_layer_counts(&counts, &l.state));
  OK(moe_layer_bias_step(l.layer, queue, l.io.params, &counts, 0.5));
  layer_check_forward(&l);
  want = t_nums(&l.m, 5);
  memcpy(want, l.value[REF_CORRECTION_BIAS], 5 * sizeof *want);
  ref_bias_step(want, l.ref.counts, 2, 5, 0.5);
  check_tensor(&l.m, "correction_bias", &l.param[REF_CORRECTION_BIAS], want);
  layer_free(&l);
}

/* ---- states ------------------------------------------------------------------------------------------------------ */
static void inference_is_forward_bit_for_bit(void **state)
{
  (void)state;
  for (int i = 0; i < 2 * n_dtypes(); i++) { /* odd widths, and those that matrix units take */
    struct layer l = i % 2 ? whole(dtypes[i / 2], 70, 40, 72, 5, 2) : whole(dtypes[i / 2], 13, 17, 11, 5, 2);
    double *y;
    layer_make(&l, ctx, queue, 0);
    layer_forward(&l);
    fetch(&l.m);
    y = values_of(&l.m, &l.io.y);
    layer_send(&l);
    l.io.saved = (moe_span){ 0 };
    OK(moe_layer_inference(l.layer, queue, &l.io));
    fetch(&l.m);
    assert_same(values_of(&l.m, &l.io.y), y, l.o.T * l.o.D);
    layer_free(&l);
  }
}

/* Sizes that the tuned kernels take too; batches on both sides of their tiles. */
static void a_token_does_not_see_its_batch(void **state)
{
  static const int64_t batches[] = { 1, 3, 64, 129 };
  (void)state;
  for (int i = 0; i < n_dtypes(); i++) {
    struct layer l = whole(dtypes[i], 150, 64, 48, 8, 2);
    double *y;
    layer_make(&l, ctx, queue, 0);
    layer_forward(&l);
    fetch(&l.m);
    y = values_of(&l.m, &l.io.y);
    l.io.saved = (moe_span){ 0 };
    for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
      layer_send(&l);
      l.io.x.shape[0] = l.io.y.shape[0] = batches[b];
      OK(moe_layer_inference(l.layer, queue, &l.io));
      fetch(&l.m);
      assert_same(values_of(&l.m, &l.io.y), y, batches[b] * l.o.D);
    }
    layer_free(&l);
  }
}

static void backward_repeats_and_accumulates_exactly(void **state)
{
  (void)state;
  for (int i = 0; i < n_dtypes(); i++) {
    struct layer l = whole(dtypes[i], 13, 17, 11, 5, 2);
    struct results first, second, twice;
    layer_make(&l, ctx, queue, 0);
    layer_forward(&l);
    layer_backward(&l);
    fetch(&l.m);
    first = results_of(&l);
    OK(moe_span_fill(queue, l.io.grads, 0xff));
    OK(moe_span_fill(queue, l.io.scratch, 0xff));
    layer_backward(&l);
    fetch(&l.m);
    second = results_of(&l);
    assert_times(&l, &first, &second, 1);
    l.io.accumulate = 1;
    layer_backward(&l);
    fetch(&l.m);
    twice = results_of(&l);
    assert_times(&l, &first, &twice, 2);
    layer_free(&l);
  }
}

/* Two forwards, then both backwards: each as if alone, gradients of both added up. */
static void micro_batches_may_be_in_flight(void **state)
{
  struct layer l = usual();
  moe_layer_io second;
  moe_layer_state other = moe_layer_state_init();
  struct results a, b, both;
  num *x, *dy;
  int64_t n = l.o.T * l.o.D;
  (void)state;
  layer_make(&l, ctx, queue, 0);
  second = l.io;
  second.x = t_tensor(&l.m, MOE_F32, T_PACKED, SHAPE(l.o.T, l.o.D));
  second.dy = t_tensor(&l.m, MOE_F32, T_PACKED, SHAPE(l.o.T, l.o.D));
  second.y = output_of(&l.m, MOE_F32, SHAPE(l.o.T, l.o.D));
  second.dx = output_of(&l.m, MOE_F32, SHAPE(l.o.T, l.o.D));
  second.saved = span_of(&l.m, l.bytes.saved);
  x = t_uniform(&l.m, n, MOE_F32, 1);
  dy = t_uniform(&l.m, n, MOE_F32, 1);
  t_put(&l.m, &second.x, x);
  t_put(&l.m, &second.dy, dy);

  layer_send(&l);
  OK(moe_layer_forward(l.layer, queue, &second, &other));
  OK(moe_layer_backward(l.layer, queue, &other, &second));
  fetch(&l.m);
  b = results_of(&l);
  b.dx = values_of(&l.m, &second.dx);
  layer_send(&l);
  layer_forward(&l);
  layer_backward(&l);
  fetch(&l.m);
  a = results_of(&l);

  layer_send(&l);
  second.accumulate = 1;
  layer_forward(&l);
  OK(moe_layer_forward(l.layer, queue, &second, &other));
  layer_backward(&l);
  OK(moe_layer_backward(l.layer, queue, &other, &second));
  fetch(&l.m);
  both = results_of(&l);
  assert_same(both.dx, a.dx, n);
  assert_same(values_of(&l.m, &second.dx), b.dx, n);
  for (int p = 0; p < REF_PARAMS; p++)
    for (int64_t i = 0; l.grad[p].handle && i < moe_tensor_count(&l.grad[p]); i++)
      assert_true(both.grad[p][i] == (double)((float)a.grad[p][i] + (float)b.grad[p][i]));
  layer_free(&l);
}

/* The choices of a state, given to another forward, give its bits; other ids are followed. */
static void ids_replay(void **state)
{
  struct layer l = usual();
  moe_tensor ids;
  double *y;
  struct results first, again;
  (void)state;
  layer_make(&l, ctx, queue, 0);
  layer_forward(&l);
  layer_backward(&l);
  fetch(&l.m);
  y = values_of(&l.m, &l.io.y);
  first = results_of(&l);
  OK(moe_layer_route_ids(&ids, &l.state));
  layer_replay(&l, ints_of(&l.m, &ids));
  layer_send(&l);
  layer_forward(&l);
  layer_backward(&l);
  fetch(&l.m);
  again = results_of(&l);
  assert_same(values_of(&l.m, &l.io.y), y, l.o.T * l.o.D);
  assert_times(&l, &first, &again, 1);
  layer_replay(&l, random_ids(&l.m, l.o.T, l.o.E, l.o.K));
  layer_send(&l);
  layer_check(&l);
  layer_free(&l);
}

struct errand {
  struct layer *l;
  moe_layer_state state; /* a copy: the value is all there is */
  moe_status status;
};
static void *backward_elsewhere(void *of)
{
  struct errand *e = of;
  moe_queue *own = NULL;
  e->status = moe_queue_create(&own, ctx);
  if (!e->status) e->status = moe_layer_backward(e->l->layer, own, &e->state, &e->l->io);
  if (!e->status) e->status = moe_queue_wait(own);
  moe_queue_free(own);
  return NULL;
}
static void state_moves_to_another_thread(void **state)
{
  struct layer l = usual();
  struct errand errand = { 0 };
  struct results here, there;
  pthread_t thread;
  (void)state;
  layer_make(&l, ctx, queue, 0);
  layer_forward(&l);
  layer_backward(&l);
  fetch(&l.m);
  here = results_of(&l);
  OK(moe_span_fill(queue, l.io.grads, 0xff));
  OK(moe_queue_wait(queue));
  errand.l = &l;
  errand.state = l.state;
  memset(&l.state, 0, sizeof l.state);
  assert_int_equal(pthread_create(&thread, NULL, backward_elsewhere, &errand), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(errand.status, MOE_OK);
  fetch(&l.m);
  there = results_of(&l);
  assert_times(&l, &here, &there, 1);
  layer_free(&l);
}

/* ---- what a state keeps ------------------------------------------------------------------------------------------ */
static void forward_selected_keeps_less(void **state)
{
  struct branch b = branch_of(options_of(MOE_F32, 13, 16, 8, 5, 2));
  moe_experts_bytes all = moe_experts_bytes_init(), some = all;
  double *ddown_bias;
  uint64_t h = 4 * 13 * 2 * 2 * 8;
  (void)state;
  b.desc.hidden_bias = b.desc.down_bias = 1;
  branch_make(&b, ctx, queue);
  branch_forward(&b);
  branch_backward(&b);
  fetch(&b.m);
  ddown_bias = values_of(&b.m, &b.g.ddown_bias);

  OK(moe_experts_measure(&all, b.experts, 13, b.all));
  OK(moe_experts_measure(&some, b.experts, 13, MOE_GRAD_DOWN_BIAS));
  assert_true(some.saved + h <= all.saved);
  branch_send(&b);
  b.io.saved.bytes = some.saved;
  OK(moe_experts_forward_selected(b.experts, queue, &b.io, MOE_GRAD_DOWN_BIAS, &b.state));
  OK(moe_experts_backward(b.experts, queue, &b.state, &b.io, &b.g));
  fetch(&b.m);
  assert_same(values_of(&b.m, &b.g.ddown_bias), ddown_bias, b.o.E * b.o.D);
  assert_true(isnan(values_of(&b.m, &b.g.dx)[0]));
  FAILS(MOE_ERR_TOO_SMALL, "saved", moe_experts_forward(b.experts, queue, &b.io, &b.state));
  branch_free(&b);
}

/* Asked for what the forward did not keep: an error that says so, and nothing is written. */
static void a_gradient_not_kept_is_an_error(void **state)
{
  static const int64_t kept[] = { MOE_GRAD_INPUT, MOE_GRAD_LOGITS, MOE_GRAD_DOWN, MOE_GRAD_GATE | MOE_GRAD_UP };
  struct branch b = branch_of(options_of(MOE_F32, 6, 8, 4, 4, 2)), other = b;
  moe_tensor ids;
  (void)state;
  branch_make(&b, ctx, queue);
  branch_make(&other, ctx, queue);
  FAILS(MOE_ERR_STATE, "moe_experts_backward", moe_experts_backward(b.experts, queue, &b.state, &b.io, &b.g));
  FAILS(MOE_ERR_STATE, "moe_experts_route_ids", moe_experts_route_ids(&ids, &b.state));
  for (int i = 0; i < 4; i++) {
    OK(moe_experts_forward_selected(b.experts, queue, &b.io, kept[i], &b.state));
    for (int64_t wanted = 1; wanted <= b.all; wanted *= 2)
      if (!(wanted & kept[i]))
        FAILS(MOE_ERR_NO_DERIVATIVE, "moe_experts_backward_selected",
              moe_experts_backward_selected(b.experts, queue, &b.state, &b.io, &b.g, wanted));
    FAILS(MOE_ERR_NO_DERIVATIVE, "kept", moe_experts_backward_selected(b.experts, queue, &b.state, &b.io, &b.g, b.all));
    fetch(&b.m);
    assert_true(isnan(values_of(&b.m, &b.g.dx)[0]) && isnan(values_of(&b.m, &b.g.ddown)[0]));
  }
  FAILS(MOE_ERR_STATE, "another", moe_experts_backward(other.experts, queue, &b.state, &other.io, &other.g));
  OK(moe_experts_forward_selected(b.experts, queue, &b.io, 0, &b.state));
  FAILS(MOE_ERR_NO_DERIVATIVE, "kept nothing", moe_experts_backward(b.experts, queue, &b.state, &b.io, &b.g));
  branch_free(&b);
  branch_free(&other);
}

static void explain_names_every_step(void **state)
{
  struct layer l = usual();
  char text[8192], part[64];
  uint64_t needed = 0, again = 0;
  (void)state;
  layer_make(&l, ctx, queue, 0);
  OK(moe_layer_explain(l.layer, 13, text, sizeof text, &needed));
  assert_int_equal(needed, strlen(text) + 1);
  assert_int_equal(text[needed - 2], '\n');
  static const char *const steps[] = { "router: gemm:", "select: select:",         "plan: plan:",
                                       "forward up: ",  "shared up: gemm:",        "forward combine: combine:",
                                       "losses: ",      "backward down weights: ", "router weights: gemm:" };
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
    if (!strstr(text, steps[i])) fail_msg("no \"%s\" in:\n%s", steps[i], text);
  /* Cut short, and asked for its length only. */
  OK(moe_layer_explain(l.layer, 13, part, sizeof part, &again));
  assert_int_equal(again, needed);
  assert_int_equal(strlen(part), sizeof part - 1);
  assert_memory_equal(part, text, sizeof part - 1);
  OK(moe_layer_explain(l.layer, 13, NULL, 0, &again));
  assert_int_equal(again, needed);
  layer_free(&l);
}

/* ---- batches of every kind --------------------------------------------------------------------------------------- */
static void no_tokens_are_a_batch_too(void **state)
{
  (void)state;
  for (int i = 0; i < n_dtypes(); i++) {
    struct layer l = whole(dtypes[i], 0, 17, 11, 5, 2);
    moe_layer_metrics metrics = moe_layer_metrics_init();
    int32_t load[5];
    layer_make(&l, ctx, queue, 0);
    layer_forward(&l);
    layer_backward(&l);
    OK(moe_layer_inference(l.layer, queue, &l.io));
    OK(moe_layer_metrics_read(&metrics, load, l.layer, queue, &l.state));
    layer_check_forward(&l);
    assert_true(metrics.balance == 0 && metrics.z == 0 && metrics.entropy == 0 && metrics.imbalance == 0);
    assert_true(metrics.dead == 5 && metrics.slots == 0);
    for (int e = 0; e < 5; e++) assert_int_equal(load[e], 0);
    for (int p = 0; p < REF_PARAMS; p++)
      for (int64_t k = 0; l.grad[p].handle && k < moe_tensor_count(&l.grad[p]); k++)
        if (values_of(&l.m, &l.grad[p])[k] != 0) fail_msg("%s is not zero", ref_param_names[p]);
    layer_free(&l);
  }
}

/* Every dtype against the reference: the bounds are those of the dtype's roundings along the way. */
static void results_are_within_the_dtypes_bounds(void **state)
{
  static const int64_t sizes[][5] = {
    { 13, 17, 11, 5, 2 }, { 33, 32, 48, 8, 3 }, { 1, 1, 1, 1, 1 }, { 64, 24, 16, 7, 7 }
  };
  (void)state;
  for (int i = 0; i < n_dtypes(); i++)
    for (int s = 0; s < (test_short() ? 1 : 4); s++)
      for (int kind = 0; kind < 2; kind++) {
        const int64_t *n = sizes[s];
        struct layer l = whole(dtypes[i], n[0], n[1], n[2], n[3], n[4]);
        l.o.seed = (uint64_t)(10 * s + kind);
        if (kind) { /* DeepSeek-V3's router, gpt-oss's activation, portable kernels */
          options_sigmoid(&l.o);
          l.desc.correction_bias = 1;
          l.o.weights.scale = 2.5;
          l.o.activation.alpha = 1.702;
          l.o.activation.limit = 7;
          l.o.activation.up_offset = 1;
          l.desc.reduction = MOE_PLANE;
          l.desc.forward_strategy = l.desc.backward_strategy = MOE_SCALAR;
        }
        layer_make(&l, ctx, queue, 0);
        layer_check(&l);
        layer_free(&l);
      }
}

/* Widths that matrix units take: where products have epilogues the activation's gradient is taken there, and by a
   kernel of its own under MOE_SCALAR.  Both are within the bounds, and keep as many bytes. */
static void the_gradient_of_the_activation_may_be_part_of_a_product(void **state)
{
  static const moe_activation activations[] = {
    { .kind = MOE_SILU, .gated = 1 },
    { .kind = MOE_SILU, .gated = 1, .alpha = 1.702, .limit = 7, .up_offset = 1 },
    { .kind = MOE_GELU_TANH, .gated = 1 },
    { .kind = MOE_RELU2 }
  };
  (void)state;
  for (int i = 1; i < 3; i++)
    for (size_t a = 0; a < (test_short() ? 2 : sizeof activations / sizeof *activations); a++) {
      uint64_t saved[2];
      for (int scalar = 0; scalar < 2; scalar++) {
        struct layer l = whole(dtypes[i], 70, 40, 72, 5, 2);
        char text[8192];
        l.o.seed = a;
        l.o.activation.kind = activations[a].kind;
        l.o.activation.gated = activations[a].gated;
        l.o.activation.alpha = activations[a].alpha;
        l.o.activation.limit = activations[a].limit;
        l.o.activation.up_offset = activations[a].up_offset;
        l.desc.reduction = MOE_PLANE;
        if (scalar) l.desc.forward_strategy = l.desc.backward_strategy = MOE_SCALAR;
        layer_make(&l, ctx, queue, 0);
        OK(moe_layer_explain(l.layer, 70, text, sizeof text, NULL));
        if (strstr(text, "forward down: ggemm_rows:sm90"))
          assert_non_null(strstr(text, "backward through down and activation: ggemm_rows:sm90"));
        else assert_non_null(strstr(text, "backward activation: act_bwd:"));
        layer_check(&l);
        saved[scalar] = l.io.saved.bytes;
        layer_free(&l);
      }
      assert_int_equal(saved[0], saved[1]);
    }
}

static void experts_may_have_no_token_or_all(void **state)
{
  (void)state;
  for (int i = 0; i < n_dtypes(); i++)
    for (int pattern = 0; pattern < 3; pattern++) {
      struct layer l = whole(dtypes[i], 37, 16, 24, 6, 2);
      layer_make(&l, ctx, queue, 0);
      int32_t *ids = t_ints(&l.m, l.o.T * 2);
      for (int64_t t = 0; t < l.o.T; t++) {
        ids[2 * t] = pattern == 0 ? 5 : pattern == 1 ? 0 : (int32_t)(t % 2 ? 4 : 1);
        ids[2 * t + 1] = pattern == 0 ? 4 : pattern == 1 ? 3 : (int32_t)(t % 2 ? 1 : 4);
      }
      layer_replay(&l, ids);
      layer_send(&l);
      layer_check(&l);
      layer_free(&l);
    }
}

/* A token whose logits are NaN, or whose given id is out of range, is NaN in y, dx and dlogits; other rows and the
   weight gradients are what they would be without it; the health word says which it was. */
static void bad_tokens_stay_alone(void **state)
{
  (void)state;
  for (int i = 0; i < n_dtypes(); i++)
    for (int id = 0; id < 2; id++) {
      struct branch b = branch_of(options_of(dtypes[i], 9, 16, 8, 5, 2));
      uint64_t bits;
      b.desc.hidden_bias = b.desc.down_bias = 1;
      branch_make(&b, ctx, queue);
      if (id) {
        branch_replay(&b, random_ids(&b.m, 9, 5, 2));
        b.ids[2 * 4 + 1] = 5;
        b.ids[2 * 7] = -1;
      } else
        for (int e = 0; e < 5; e++) b.logits[4 * 5 + e].v = NAN;
      branch_send(&b);
      branch_forward(&b);
      OK(moe_health_read(queue, &bits));
      if (id) assert_true(bits & MOE_HEALTH_ID); /* such a token's weights are NaN too */
      else assert_int_equal(bits, MOE_HEALTH_ROUTE);
      branch_forward(&b);
      FAILS(MOE_ERR_DATA, id ? "an id out of range" : "not finite", moe_queue_wait(queue));
      branch_backward(&b);
      fetch(&b.m);
      moe_tensor ids;
      OK(moe_experts_route_ids(&ids, &b.state));
      b.ref.ids = ints_of(&b.m, &ids);
      ref_arithmetic(dtypes[i]);
      ref_layer_forward(&b.ref, &b.m);
      ref_layer_backward(&b.ref, &b.m);
      assert_true(isnan(b.ref.y[4 * 16].v) && isnan(b.ref.dlogits[4 * 5].v) && !isnan(b.ref.y[3 * 16].v));
      check_tensor(&b.m, "y", &b.io.y, b.ref.y);
      check_tensor(&b.m, "dx", &b.g.dx, b.ref.dx);
      check_tensor(&b.m, "dlogits", &b.g.dlogits, b.ref.dlogits);
      for (int p = REF_GATE; p <= REF_DOWN_BIAS; p++)
        check_tensor(&b.m, ref_param_names[p], branch_grad(&b, p), b.ref.d[p]);
      branch_free(&b);
    }
}

/* ---- the same bits every time ------------------------------------------------------------------------------------ */
/* dy is written by a kernel just in front, without a wait: an early start would read it half written. */
static void twenty_runs_are_bit_equal(void **state)
{
  int64_t T = test_short() ? 256 : 4096;
  int runs = 20;
  (void)state;
  for (int i = 0; i < 2; i++) {
    struct layer l = layer_of(options_of(i ? MOE_BF16 : MOE_F32, T, 64, 64, 8, 2));
    moe_layer_io front;
    struct results first, again;
    double *y = NULL;
    memset(&first, 0, sizeof first);
    l.desc.hidden_bias = l.desc.down_bias = l.desc.router_bias = 1;
    l.desc.balance_coef = 0.01;
    layer_make(&l, ctx, queue, 0);
    t_own(&l.m, &l.io.dy);
    front = l.io; /* another pass over the layer, whose y is dy */
    front.x = t_tensor(&l.m, l.o.dtype, T_PACKED, SHAPE(T, 64));
    front.y = l.io.dy;
    front.scratch = span_of(&l.m, l.bytes.inference);
    t_put(&l.m, &front.x, t_uniform(&l.m, T * 64, l.o.dtype, 1));
    for (int run = 0; run < runs; run++) {
      layer_send(&l);
      layer_forward(&l);
      OK(moe_layer_inference(l.layer, queue, &front));
      layer_backward(&l);
      fetch(&l.m);
      again = results_of(&l);
      if (run == 0) {
        first = again;
        y = values_of(&l.m, &l.io.y);
        continue;
      }
      assert_same(values_of(&l.m, &l.io.y), y, T * 64);
      assert_times(&l, &first, &again, 1);
    }
    layer_free(&l);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(initial_values_are_the_same_bits_on_every_device),
    cmocka_unit_test(parameters_are_counted),
    cmocka_unit_test(metrics_are_of_the_load),
    cmocka_unit_test(losses_and_counts_are_per_sequence),
    cmocka_unit_test(correction_bias_moves_by_integer_counts),
    cmocka_unit_test(correction_bias_moves_by_a_states_counts),
    cmocka_unit_test(inference_is_forward_bit_for_bit),
    cmocka_unit_test(a_token_does_not_see_its_batch),
    cmocka_unit_test(backward_repeats_and_accumulates_exactly),
    cmocka_unit_test(micro_batches_may_be_in_flight),
    cmocka_unit_test(ids_replay),
    cmocka_unit_test(state_moves_to_another_thread),
    cmocka_unit_test(forward_selected_keeps_less),
    cmocka_unit_test(a_gradient_not_kept_is_an_error),
    cmocka_unit_test(explain_names_every_step),
    cmocka_unit_test(no_tokens_are_a_batch_too),
    cmocka_unit_test(results_are_within_the_dtypes_bounds),
    cmocka_unit_test(the_gradient_of_the_activation_may_be_part_of_a_product),
    cmocka_unit_test(experts_may_have_no_token_or_all),
    cmocka_unit_test(bad_tokens_stay_alone),
    cmocka_unit_test(twenty_runs_are_bit_equal),
  };
  if (!test_open(&ctx, &queue)) return 77;
  int rc = TEST_MAIN(tests);
  test_close(ctx, queue);
  return rc;
}
