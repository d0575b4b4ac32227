/* t_grad.c - every gradient of the branch and of the layer against finite differences, in f64.

   L = sum y*dy (+ aux_scale * losses), a scalar function of every input and parameter once the choices are fixed
   (replayed ids).  The derivative along one element is taken by the five-point rule

     L' = (8 (L(+h) - L(-h)) - (L(+2h) - L(-2h))) / 12h + O(h^4 L'''''/30),  h = 2^-10

   whose truncation is about 1e-12/30 L''''' and whose rounding, since differences are taken of each y before they
   are summed, about 1e-16 |y| / h = 1e-13.  With |n - a| / max(|n| + |a|, 1e-8), as contract C4 measures it, 1e-6
   leaves room for gradients down to a few millionths; a wrong rule is off by a factor.  Values are drawn anew while
   an activation is within 8h of a kink (relu, clamps): no probe moves one that far. */
#include "fixture.h"

#include <math.h>

#define STEP (1.0 / 1024)
#define TOLERANCE 1e-6
#define KINK (8 * STEP)

static moe_context *ctx;
static moe_queue *queue;

/* Single elements of a tensor that are probed: all where it has no more, else so many at random. */
static int64_t probes(void)
{
  return test_long() ? 1000000 : test_short() ? 2 : 8;
}

/* ---- one probe --------------------------------------------------------------------------------------------------- */
/* What is differentiated: a forward whose outputs are y and, where there are losses, two numbers. */
struct scalar {
  void (*forward)(void *of);
  void *of;
  struct t_memory *m;
  moe_tensor y;
  const num *dy;
  moe_tensor losses; /* no handle: none */
  double coef[2];
};

static moe_span span_around(const moe_tensor *t)
{
  return (moe_span){ t->handle, t->offset, moe_tensor_extent(t) };
}

static void read_f64(const struct scalar *s, double *to, const moe_tensor *t)
{
  moe_span from = span_around(t);
  OK(moe_span_read(s->m->q, to, from, from.bytes));
}

static void write_f64(const struct scalar *s, const moe_tensor *t, const double *from)
{
  moe_span to = span_around(t);
  OK(moe_span_write(s->m->q, to, from, to.bytes));
}

/* Index of element i (counted with the last dimension fastest) in what lies around t. */
static int64_t index_of(const moe_tensor *t, int64_t i)
{
  int64_t at = 0;
  for (int d = t->rank - 1; d >= 0; d--) {
    at += i % t->shape[d] * t->stride[d];
    i /= t->shape[d];
  }
  return at;
}

static void *room(int64_t n)
{
  void *p = malloc((size_t)n * sizeof(double));
  if (!p) abort();
  return p;
}

/* dL along `direction` [count] from the present values of t, which are left as they were. */
static double numeric(const struct scalar *s, const moe_tensor *t, const double *direction)
{
  static const double step[4] = { STEP, -STEP, 2 * STEP, -2 * STEP };
  int64_t count = moe_tensor_count(t), around = (int64_t)(moe_tensor_extent(t) / sizeof(double));
  int64_t n = moe_tensor_count(&s->y), all = n + 2;
  double *before = room(around), *moved = room(around), *out = room(4 * all), sum = 0;
  read_f64(s, before, t);
  for (int k = 0; k < 4; k++) {
    double *y = out + k * all;
    memcpy(moved, before, (size_t)around * sizeof *moved);
    for (int64_t i = 0; i < count; i++) moved[index_of(t, i)] += step[k] * direction[i];
    write_f64(s, t, moved);
    s->forward(s->of);
    read_f64(s, y, &s->y);
    y[n] = y[n + 1] = 0;
    if (s->losses.handle) read_f64(s, y + n, &s->losses);
  }
  write_f64(s, t, before);
  for (int64_t i = 0; i < all; i++) {
    /* Differences first: what does not depend on t cancels exactly. */
    double d = 8 * (out[i] - out[all + i]) - (out[2 * all + i] - out[3 * all + i]);
    sum += d * (i < n ? s->dy[i].v : s->coef[i - n]);
  }
  free(before);
  free(moved);
  free(out);
  return sum / (12 * STEP);
}

static void check_along(const struct scalar *s, const char *name, int64_t element, const moe_tensor *t,
                        const double *direction, const double *gradient)
{
  double n = numeric(s, t, direction), a = 0, error;
  for (int64_t i = 0; i < moe_tensor_count(t); i++) a += gradient[i] * direction[i];
  error = fabs(n - a) / fmax(fabs(n) + fabs(a), 1e-8);
  if (!(error <= TOLERANCE))
    fail_msg("d%s, element %lld: %.12g, the difference quotient is %.12g: off by %.2g", name, (long long)element, a, n,
             error);
}

/* The gradient of L by t: single elements, then all of them at once along random directions. */
static void probe(const struct scalar *s, const char *name, const moe_tensor *t, const double *gradient)
{
  int64_t count = moe_tensor_count(t), all = count <= probes();
  double *direction = t_host(s->m, count, sizeof *direction);
  for (int64_t p = 0; p < (all ? count : probes()); p++) {
    int64_t i = all ? p : t_below(s->m, count);
    direction[i] = 1;
    check_along(s, name, i, t, direction, gradient);
    direction[i] = 0;
  }
  for (int r = 0; r < 2; r++) {
    for (int64_t i = 0; i < count; i++) direction[i] = t_below(s->m, 2) ? 0.25 : -0.25;
    check_along(s, name, -1, t, direction, gradient);
  }
}

/* ---- the branch -------------------------------------------------------------------------------------------------- */
static void infer_branch(void *of)
{
  struct branch *b = of;
  OK(moe_experts_inference(b->experts, b->m.q, &b->io));
}

/* Fixes the choices and draws values until no activation is near a kink. */
static void branch_ready(struct branch *b)
{
  branch_replay(b, random_ids(&b->m, b->o.T, b->o.E, b->o.K));
  b->ref.ids = b->ids;
  do {
    branch_values(b);
    ref_layer_forward(&b->ref, &b->m);
  } while (any_kink(&b->o.activation, b->ref.h, b->o.T * b->o.K, b->o.F, KINK));
  branch_send(b);
}

static void probe_branch(struct branch *b)
{
  struct scalar s = { infer_branch, b, &b->m, b->io.y, b->dy, { 0 }, { 0 } };
  struct t_memory *m = &b->m;
  int64_t wanted = b->state.wanted;
  if (wanted & MOE_GRAD_INPUT) probe(&s, "x", &b->io.x, values_of(m, &b->g.dx));
  if (wanted & MOE_GRAD_LOGITS) probe(&s, "logits", &b->io.logits, values_of(m, &b->g.dlogits));
  for (int p = 0; p < REF_PARAMS; p++)
    if (wanted & branch_bit(p)) probe(&s, ref_param_names[p], branch_param(b, p), values_of(m, branch_grad(b, p)));
}

/* All gradients of one branch. */
static void check_branch(struct branch b)
{
  branch_make(&b, ctx, queue);
  branch_ready(&b);
  branch_forward(&b);
  branch_backward(&b);
  fetch(&b.m);
  probe_branch(&b);
  branch_free(&b);
}

static struct options small(uint64_t seed)
{
  struct options o = options_of(MOE_F64, 5, 6, 4, 4, 2);
  o.seed = seed;
  return o;
}

static void scorings(void **state)
{
  (void)state;
  for (int64_t scoring = MOE_SOFTMAX; scoring <= MOE_SQRT_SOFTPLUS; scoring++)
    for (int form = 0; form < 3; form++) {
      struct branch b = branch_of(small(10 * (uint64_t)scoring + (uint64_t)form));
      b.o.weights.scoring = scoring;
      b.o.weights.renormalize = form > 0;
      b.o.weights.epsilon = form == 2 ? 0.125 : 0;
      b.o.weights.scale = 1.5;
      check_branch(b);
    }
}

static void activations(void **state)
{
  (void)state;
  for (int64_t kind = MOE_IDENTITY; kind <= MOE_ACT_SIGMOID; kind++)
    for (int gated = 0; gated < 2; gated++) {
      struct branch b = branch_of(small(100 + 2 * (uint64_t)kind + (uint64_t)gated));
      b.o.activation.kind = kind;
      b.o.activation.gated = gated;
      b.desc.hidden_bias = b.desc.down_bias = 1;
      check_branch(b);
    }
}

/* Clamps that hold back about a third of the values, alpha and offset; plain activations clamp too. */
static void activation_parameters(void **state)
{
  (void)state;
  for (int gated = 0; gated < 2; gated++)
    for (int plane = 0; plane < 2; plane++) {
      struct branch b = branch_of(small(200 + 2 * (uint64_t)gated + (uint64_t)plane));
      b.o.activation.gated = gated;
      b.o.activation.alpha = 1.702;
      b.o.activation.limit = 0.5;
      b.o.activation.up_offset = gated;
      b.desc.hidden_bias = b.desc.down_bias = 1;
      b.desc.reduction = plane ? MOE_PLANE : MOE_SERIAL;
      check_branch(b);
    }
}

static void strided_weights(void **state)
{
  (void)state;
  for (int place = PACKED; place < PLACES; place++)
    for (int gated = 0; gated < 2; gated++) {
      struct branch b = branch_of(small(300 + 2 * (uint64_t)place + (uint64_t)gated));
      b.place = (enum place)place;
      b.o.activation.gated = gated;
      b.desc.hidden_bias = b.desc.down_bias = 1;
      b.desc.reduction = place % 2 ? MOE_PLANE : MOE_SERIAL;
      check_branch(b);
    }
}

/* Ids that repeat inside a token: each slot weighs its own, the gradient of a logit is of both. */
static void repeated_ids(void **state)
{
  (void)state;
  for (int64_t scoring = MOE_SOFTMAX; scoring <= MOE_SQRT_SOFTPLUS; scoring++) {
    struct branch b = branch_of(small(400 + (uint64_t)scoring));
    b.o.weights.scoring = scoring;
    branch_make(&b, ctx, queue);
    branch_ready(&b);
    for (int64_t t = 0; t < b.o.T; t++) b.ids[t * b.o.K + 1] = b.ids[t * b.o.K];
    branch_send(&b);
    branch_forward(&b);
    branch_backward(&b);
    fetch(&b.m);
    probe_branch(&b);
    branch_free(&b);
  }
}

/* Every subset of the gradients: what was asked for is what it is among all of them, what was not stays as it lay in
   memory, whether the forward kept everything or only what the subset needs.  Subsets may run other kernels, so
   values agree to rounding, not to the bit. */
static void subsets(void **state)
{
  struct branch b = branch_of(small(500));
  double *full[REF_PARAMS + 2];
  const moe_tensor *to[REF_PARAMS + 2];
  int64_t bit[REF_PARAMS + 2], n = 0;
  (void)state;
  b.desc.hidden_bias = b.desc.down_bias = 1;
  branch_make(&b, ctx, queue);
  branch_ready(&b);
  branch_forward(&b);
  branch_backward(&b);
  fetch(&b.m);
  to[n] = &b.g.dx, bit[n++] = MOE_GRAD_INPUT;
  to[n] = &b.g.dlogits, bit[n++] = MOE_GRAD_LOGITS;
  for (int p = 0; p < REF_PARAMS; p++)
    if (branch_bit(p)) to[n] = branch_grad(&b, p), bit[n++] = branch_bit(p);
  for (int64_t i = 0; i < n; i++) full[i] = values_of(&b.m, to[i]);

  for (int64_t wanted = 0; wanted <= b.all; wanted += test_short() ? 37 : 1)
    for (int kept = 0; kept < 2; kept++) {
      if (kept && !wanted) continue;
      branch_send(&b);
      if (kept) OK(moe_experts_forward_selected(b.experts, queue, &b.io, wanted, &b.state));
      else branch_forward(&b);
      OK(moe_experts_backward_selected(b.experts, queue, &b.state, &b.io, &b.g, wanted));
      fetch(&b.m);
      for (int64_t i = 0; i < n; i++) {
        double *got = values_of(&b.m, to[i]);
        for (int64_t k = 0; k < moe_tensor_count(to[i]); k++)
          if (!(wanted & bit[i])) assert_true(isnan(got[k]));
          else assert_near(got[k], full[i][k], 64 * 0x1p-53 * (1 + fabs(full[i][k])));
      }
    }
  branch_free(&b);
}

/* Weight gradients are added to what lies there; dx and dlogits are not. */
static void accumulated(void **state)
{
  (void)state;
  for (int place = PACKED; place < PLACES; place++) {
    struct branch b = branch_of(small(600 + (uint64_t)place));
    double *once[REF_PARAMS], *dx, *dlogits;
    b.place = (enum place)place;
    b.desc.hidden_bias = b.desc.down_bias = 1;
    branch_make(&b, ctx, queue);
    branch_ready(&b);
    branch_forward(&b);
    branch_backward(&b);
    fetch(&b.m);
    dx = values_of(&b.m, &b.g.dx);
    dlogits = values_of(&b.m, &b.g.dlogits);
    for (int p = 0; p < REF_PARAMS; p++)
      if (branch_bit(p)) once[p] = values_of(&b.m, branch_grad(&b, p));
    b.g.accumulate = 1;
    branch_backward(&b);
    fetch(&b.m);
    assert_same(values_of(&b.m, &b.g.dx), dx, b.o.T * b.o.D);
    assert_same(values_of(&b.m, &b.g.dlogits), dlogits, b.o.T * b.o.E);
    for (int p = 0; p < REF_PARAMS; p++) {
      if (!branch_bit(p)) continue;
      double *twice = values_of(&b.m, branch_grad(&b, p));
      for (int64_t i = 0; i < moe_tensor_count(branch_grad(&b, p)); i++)
        if (twice[i] != 2 * once[p][i]) fail_msg("%s[%lld] is not twice itself", ref_param_names[p], (long long)i);
    }
    branch_free(&b);
  }
}

/* ---- the layer --------------------------------------------------------------------------------------------------- */
static void forward_layer(void *of)
{
  struct layer *l = of;
  OK(moe_layer_forward(l->layer, l->m.q, &l->io, &l->state));
}

static void check_layer(struct layer l, int64_t sequences, int mask)
{
  static const int32_t some[] = { 1, 0, 1, 1, 1, 0, 0, 1, 1, 1 };
  struct t_memory *m = &l.m;
  layer_make(&l, ctx, queue, sequences);
  layer_replay(&l, random_ids(m, l.o.T, l.o.E, l.o.K));
  if (mask) layer_mask(&l, some);
  layer_aux_scale(&l, 0.75);
  l.ref.ids = l.ids;
  do {
    for (int p = 0; p < REF_PARAMS; p++)
      if (l.param[p].handle) {
        int64_t n = moe_tensor_count(&l.param[p]);
        memcpy(l.value[p], t_uniform(m, n, MOE_F64, 0.8), (size_t)n * sizeof(num));
      }
    ref_layer_forward(&l.ref, m);
  } while (any_kink(&l.o.activation, l.ref.h, l.o.T * l.o.K, l.o.F, KINK) ||
           any_kink(&l.o.activation, l.ref.hs, l.o.T, l.desc.d_shared, KINK));
  layer_send(&l);
  layer_forward(&l);
  layer_backward(&l);
  fetch(m);

  struct scalar s = { forward_layer, &l, m, l.io.y, l.dy, { 0 }, { 0.75 * l.desc.balance_coef, 0.75 * l.desc.z_coef } };
  OK(moe_layer_losses(&s.losses, &l.state));
  probe(&s, "x", &l.io.x, values_of(m, &l.io.dx));
  for (int p = 0; p < REF_PARAMS; p++)
    if (l.grad[p].handle) probe(&s, ref_param_names[p], &l.param[p], values_of(m, &l.grad[p]));
  layer_free(&l);
}

static void layer_with_everything(void **state)
{
  (void)state;
  for (int plane = 0; plane < 2; plane++) {
    struct layer l = layer_of(small(700 + (uint64_t)plane));
    l.o.T = 10;
    l.desc.router_bias = l.desc.hidden_bias = l.desc.down_bias = l.desc.shared_gate = 1;
    l.desc.d_shared = 3;
    l.desc.balance_coef = 0.7;
    l.desc.z_coef = 0.3;
    l.desc.reduction = plane ? MOE_PLANE : MOE_SERIAL;
    l.desc.forward_strategy = l.desc.backward_strategy = plane ? MOE_SCALAR : MOE_AUTO;
    check_layer(l, 0, 0);
  }
}

/* Balance over the micro-batch and per sequence, of both kinds of probabilities, with and without a mask; each loss
   on its own too. */
static void layer_losses(void **state)
{
  static const double coef[3][2] = { { 1, 0 }, { 0, 1 }, { 0.5, 0.25 } };
  (void)state;
  for (int64_t scoring = MOE_SOFTMAX; scoring <= MOE_SIGMOID; scoring++)
    for (int which = 0; which < 3; which++)
      for (int mask = 0; mask < 2; mask++) {
        struct layer l = layer_of(small(800 + 12 * (uint64_t)scoring + 2 * (uint64_t)which + (uint64_t)mask));
        l.o.T = 10;
        l.desc.balance_coef = coef[which][0];
        l.desc.z_coef = coef[which][1];
        l.desc.balance_scoring = scoring;
        check_layer(l, which == 1 ? 0 : 5, mask);
        if (which == 0) check_layer(l, 0, mask);
      }
}

/* DeepSeek-V3's layer; plain activations in the shared expert; no biases. */
static void layer_kinds(void **state)
{
  (void)state;
  for (int kind = 0; kind < 3; kind++) {
    struct layer l = layer_of(small(900 + (uint64_t)kind));
    if (kind == 0) {
      options_sigmoid(&l.o);
      l.o.weights.scale = 2.5;
      l.desc.correction_bias = 1;
    }
    if (kind == 1) {
      l.o.activation.kind = MOE_RELU2;
      l.o.activation.gated = 0;
      l.desc.hidden_bias = 1;
      l.desc.shared_gate = 1;
    }
    if (kind == 2) {
      l.o.activation.alpha = 1.702;
      l.o.activation.limit = 0.5;
      l.o.activation.up_offset = 1;
      l.o.weights.scoring = MOE_SOFTMAX_CHOSEN;
      l.desc.router_bias = l.desc.down_bias = 1;
    }
    l.desc.d_shared = 5;
    check_layer(l, 0, 0);
  }
}

/* Frozen experts: no gradient of theirs is laid out, the others are right. */
static void layer_frozen(void **state)
{
  struct layer l = layer_of(small(1000));
  (void)state;
  l.desc.frozen_experts = 1;
  l.desc.d_shared = 3;
  l.desc.hidden_bias = l.desc.down_bias = l.desc.router_bias = 1;
  check_layer(l, 0, 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(scorings),        cmocka_unit_test(activations),           cmocka_unit_test(activation_parameters),
    cmocka_unit_test(strided_weights), cmocka_unit_test(repeated_ids),          cmocka_unit_test(subsets),
    cmocka_unit_test(accumulated),     cmocka_unit_test(layer_with_everything), cmocka_unit_test(layer_losses),
    cmocka_unit_test(layer_kinds),     cmocka_unit_test(layer_frozen),
  };
  if (!test_open(&ctx, &queue)) return 77;
  if (!test_has_fp64(ctx)) {
    test_close(ctx, queue);
    printf("SKIP: the device has no fp64\n");
    return 77;
  }
  int rc = TEST_MAIN(tests);
  test_close(ctx, queue);
  return rc;
}
