/* t_tape_layer.c - derivatives of the layer on the tape, in f64: what MOE_DECOMPOSE gives against the fused backward,
   and Hessian-vector products against differences of the fused gradient.

   The objective is

     L = sum of y*dy + sum of y*y/2   (+ aux_scale * losses)

   so that its gradient by y depends on y.  Differences of the gradient G along the direction v are taken by the
   five-point rule of t_grad.c, with the choices of the middle point replayed: no probe changes one.  Values are drawn
   anew while an activation is within 8h of a kink, where G itself jumps. */
#include "fixture.h"
#include "tape_fixture.h"

#include <math.h>

#define STEP (1.0 / 1024)
#define KINK (8 * STEP)

/* ---- layers ------------------------------------------------------------------------------------------------------ */
struct kind {
  const char *name;
  int64_t T, E, K; /* 0: 6, 4, 2 */
  int64_t scoring, plain;
  double epsilon, scale; /* 0: 1 */
  int sigmoid_selection, correction, random_ids, repeated_ids;
  int64_t activation, ungated;
  double alpha, limit, up_offset;
  int router_bias, hidden_bias, down_bias, frozen, shared, shared_gate;
  double shift; /* added to every logit */
  int no_router;
  double balance, z, aux_scale;
  int64_t balance_scoring, sequences;
  int mask; /* 1: some tokens; 2: none counts */
};
static const struct kind kinds[] = {
  { .name = "softmax" },
  { "softmax, plain", .plain = 1, .scale = 1.5 },
  { "softmax, epsilon", .epsilon = 0.125, .scale = 1.5 },
  { "sigmoid", .scoring = MOE_SIGMOID, .sigmoid_selection = 1, .correction = 1, .scale = 2.5 },
  { "sigmoid, plain", .scoring = MOE_SIGMOID, .plain = 1 },
  { "sigmoid, epsilon", .scoring = MOE_SIGMOID, .epsilon = 0.125, .sigmoid_selection = 1 },
  { "sigmoid, far below 0", .scoring = MOE_SIGMOID, .shift = -300, .router_bias = 1 },
  { "softmax of the chosen", .scoring = MOE_SOFTMAX_CHOSEN, .plain = 1 },
  { "softmax of the chosen, epsilon", .scoring = MOE_SOFTMAX_CHOSEN, .epsilon = 0.125, .scale = 1.5 },
  { "sqrt softplus", .scoring = MOE_SQRT_SOFTPLUS },
  { "sqrt softplus, plain", .scoring = MOE_SQRT_SOFTPLUS, .plain = 1, .scale = 1.5 },
  { "sqrt softplus, epsilon", .scoring = MOE_SQRT_SOFTPLUS, .epsilon = 0.125 },
  { "sqrt softplus, far below 0", .scoring = MOE_SQRT_SOFTPLUS, .shift = -300, .router_bias = 1 },
  { "sqrt softplus, around -40", .scoring = MOE_SQRT_SOFTPLUS, .shift = -40, .router_bias = 1 },
  { "logits of 0, sigmoid", .no_router = 1, .random_ids = 1, .scoring = MOE_SIGMOID, .balance = 1,
    .balance_scoring = MOE_SIGMOID },
  { "logits of 0, sqrt softplus", .no_router = 1, .random_ids = 1, .scoring = MOE_SQRT_SOFTPLUS, .z = 1 },
  { "softmax, repeated ids", .random_ids = 1, .repeated_ids = 1 },
  { "softmax, plain, repeated ids", .random_ids = 1, .repeated_ids = 1, .plain = 1 },
  { "sigmoid, repeated ids", .random_ids = 1, .repeated_ids = 1, .scoring = MOE_SIGMOID },

  { "identity", .activation = MOE_IDENTITY },
  { "identity, ungated", .activation = MOE_IDENTITY, .ungated = 1, .hidden_bias = 1 },
  { "relu", .activation = MOE_RELU, .hidden_bias = 1 },
  { "relu, ungated", .activation = MOE_RELU, .ungated = 1 },
  { "relu2", .activation = MOE_RELU2, .down_bias = 1 },
  { "relu2, ungated", .activation = MOE_RELU2, .ungated = 1, .shared = 1, .shared_gate = 1 },
  { "gelu", .activation = MOE_GELU },
  { "gelu, ungated", .activation = MOE_GELU, .ungated = 1, .hidden_bias = 1, .down_bias = 1 },
  { "gelu tanh", .activation = MOE_GELU_TANH },
  { "gelu tanh, ungated, limit", .activation = MOE_GELU_TANH, .ungated = 1, .limit = 0.5 },
  { "silu, ungated", .ungated = 1 },
  { "sigmoid activation", .activation = MOE_ACT_SIGMOID },
  { "sigmoid activation, ungated", .activation = MOE_ACT_SIGMOID, .ungated = 1 },
  { "gpt-oss", .alpha = 1.702, .limit = 0.5, .up_offset = 1, .scoring = MOE_SOFTMAX_CHOSEN, .plain = 1,
    .hidden_bias = 1, .down_bias = 1, .router_bias = 1 },

  { "shared", .shared = 1 },
  { "shared, gate", .shared = 1, .shared_gate = 1, .router_bias = 1 },
  { "balance", .balance = 1 },
  { "balance, sigmoid, scale", .balance = 1, .balance_scoring = MOE_SIGMOID, .aux_scale = 0.75 },
  { "balance, sequences", .balance = 0.5, .sequences = 3, .aux_scale = 0.75 },
  { "z", .z = 1 },
  { "z, mask", .z = 0.5, .mask = 1, .aux_scale = 0.75 },
  { "losses, mask, sequences", .balance = 0.7, .z = 0.3, .mask = 1, .sequences = 3 },
  { "losses, nothing counts", .balance = 0.7, .z = 0.3, .mask = 2 },
  { "everything", .T = 12, .router_bias = 1, .hidden_bias = 1, .down_bias = 1, .shared = 1, .shared_gate = 1,
    .balance = 0.7, .z = 0.3, .aux_scale = 0.75, .sequences = 2, .mask = 1 },
  { "frozen experts", .frozen = 1, .hidden_bias = 1, .down_bias = 1, .router_bias = 1, .shared = 1, .balance = 1 },

  { "K 1", .K = 1, .balance = 0.5 },
  { "K 1, plain", .K = 1, .plain = 1 },
  { "K = E", .K = 4, .z = 0.5 },
  { "K = E, plain sigmoid", .K = 4, .plain = 1, .scoring = MOE_SIGMOID },
  { "E 1", .E = 1, .K = 1, .plain = 1, .scoring = MOE_SIGMOID, .balance = 1, .z = 1 },
  { "T 1", .T = 1, .balance = 1, .z = 1, .shared = 1, .shared_gate = 1 },
  { "T 0", .T = -1, .balance = 1, .z = 1, .shared = 1, .shared_gate = 1, .hidden_bias = 1 },
};
#define KINDS ((int)(sizeof kinds / sizeof *kinds))

static void draw(struct layer *l, const struct kind *k)
{
  struct t_memory *m = &l->m;
  for (int p = 0; p < REF_PARAMS; p++) {
    if (!l->param[p].handle) continue;
    int64_t n = moe_tensor_count(&l->param[p]);
    memcpy(l->value[p], t_uniform(m, n, l->o.dtype, 0.8), (size_t)n * sizeof(num));
    for (int64_t i = 0; i < n && p == REF_ROUTER && k->no_router; i++) l->value[p][i].v = 0;
    for (int64_t i = 0; i < n && p == REF_ROUTER_BIAS; i++)
      l->value[p][i].v = ref_round(l->value[p][i].v + k->shift, l->o.dtype);
  }
  layer_send(l);
}

/* The layer with its choice made, far from kinks. */
static void make(struct layer *l, const struct kind *k, int64_t dtype, uint64_t seed)
{
  static const int32_t some[] = { 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1 }, nobody[12];
  const int64_t T = k->T < 0 ? 0 : k->T ? k->T : 6;
  moe_tensor ids;
  *l = layer_of(options_of(dtype, T, 5, 4, k->E ? k->E : 4, k->K ? k->K : 2));
  l->o.seed = seed;
  if (k->sigmoid_selection) options_sigmoid(&l->o);
  l->o.weights.scoring = k->scoring ? k->scoring : MOE_SOFTMAX;
  l->o.weights.renormalize = !k->plain;
  l->o.weights.epsilon = k->epsilon;
  l->o.weights.scale = k->scale > 0 ? k->scale : 1;
  l->o.activation.kind = k->activation ? k->activation : MOE_SILU;
  l->o.activation.gated = !k->ungated;
  l->o.activation.alpha = k->alpha;
  l->o.activation.limit = k->limit;
  l->o.activation.up_offset = k->up_offset;
  l->desc.router_bias = k->router_bias;
  l->desc.correction_bias = k->correction;
  l->desc.hidden_bias = k->hidden_bias;
  l->desc.down_bias = k->down_bias;
  l->desc.frozen_experts = k->frozen;
  l->desc.d_shared = k->shared ? 3 : 0;
  l->desc.shared_gate = k->shared_gate;
  l->desc.balance_coef = k->balance;
  l->desc.balance_scoring = k->balance_scoring;
  l->desc.z_coef = k->z;
  layer_make(l, ctx, q, k->sequences ? k->sequences : 1);
  if (k->mask) layer_mask(l, k->mask == 1 ? some : nobody);
  if (k->aux_scale > 0) layer_aux_scale(l, k->aux_scale);
  if (k->random_ids) {
    int32_t *chosen = random_ids(&l->m, T, l->o.E, l->o.K);
    for (int64_t i = 0; k->repeated_ids && i < T * l->o.K; i += i % 4 + 1) chosen[i] = chosen[i / l->o.K * l->o.K];
    layer_replay(l, chosen);
  }
  do {
    draw(l, k);
    layer_forward(l);
    fetch(&l->m);
    OK(moe_layer_route_ids(&ids, &l->state));
    l->ref.ids = ints_of(&l->m, &ids);
    ref_arithmetic(dtype);
    ref_layer_forward(&l->ref, &l->m);
  } while (any_kink(&l->o.activation, l->ref.h, T * l->o.K, l->o.F, KINK) ||
           any_kink(&l->o.activation, l->ref.hs, T, l->desc.d_shared, KINK));
}

/* ---- on the tape ------------------------------------------------------------------------------------------------- */
/* What is differentiated by: x, and the trainable parameters. */
struct on_tape {
  struct layer *l;
  int n;
  int64_t count[1 + REF_PARAMS];
  const char *name[1 + REF_PARAMS];
  num *value[1 + REF_PARAMS];
  moe_value v[1 + REF_PARAMS], y, loss;
};

/* Records the layer and L on a tape that has forgotten everything. */
static struct on_tape record(struct layer *l, int with_grads)
{
  struct on_tape r = { .l = l };
  moe_tape_moe options = moe_tape_moe_init();
  moe_tape_reset(tape);
  options.params = l->io.params;
  if (with_grads) options.grads = l->io.grads;
  options.differentiate = 1;
  options.mask = l->io.mask;
  options.ids = l->io.ids;
  options.aux_scale = l->io.aux_scale;
  options.sequences = l->io.sequences;
  moe_value x = moe_tape_leaf(tape, &l->io.x, 1), dy = moe_tape_leaf(tape, &l->io.dy, 0);
  /* By way of another operation: its gradient comes after the layer's, which must survive. */
  r.y = moe_tape_moe_layer(tape, l->layer, moe_tape_scale(tape, x, 1), &options, NULL);
  r.loss = moe_tape_add(tape, moe_tape_sum(tape, moe_tape_mul(tape, r.y, dy)),
                        moe_tape_scale(tape, moe_tape_sum(tape, moe_tape_mul(tape, r.y, r.y)), 0.5));
  OK(moe_tape_status(tape));
  r.v[r.n] = x;
  r.name[r.n] = "x";
  r.value[r.n] = l->x;
  r.count[r.n++] = moe_tensor_count(&l->io.x);
  for (int p = 0, index = 0; p < REF_PARAMS; p++) {
    if (!l->param[p].handle) continue;
    moe_value v = moe_tape_moe_param(tape, r.y, index++);
    assert_int_equal(v.id != 0, l->grad[p].handle != NULL);
    if (!v.id) continue;
    r.v[r.n] = v;
    r.name[r.n] = ref_param_names[p];
    r.value[r.n] = l->value[p];
    r.count[r.n++] = moe_tensor_count(&l->param[p]);
  }
  return r;
}

/* The values of an array of gradients; zeros for those that do not flow. */
static void read_all(struct on_tape *r, const moe_value *g, double **to)
{
  for (int i = 0; i < r->n; i++) {
    to[i] = t_host(&r->l->m, r->count[i], sizeof **to);
    if (g[i].id) OK(moe_tape_read(tape, g[i], to[i], r->count[i]));
  }
}

/* Those that the fused backward wrote to where they belong. */
static void fused_gradient(struct layer *l, double **to)
{
  struct on_tape r = record(l, 1);
  OK(moe_tape_backward(tape, r.loss, none, 0));
  int i = 0;
  to[i] = t_host(&l->m, r.count[i], sizeof **to);
  OK(moe_tape_read(tape, moe_tape_grad(tape, r.v[0]), to[i], r.count[i]));
  fetch(&l->m);
  for (int p = 0; p < REF_PARAMS; p++)
    if (l->grad[p].handle) to[++i] = values_of(&l->m, &l->grad[p]);
  assert_int_equal(i + 1, r.n);
}

static double largest(const double *a, int64_t n)
{
  double most = 0;
  for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(a[i]));
  return most;
}

/* Element by element, relative to the largest of its tensor, or to `least` where all are less. */
static void compare(const struct kind *k, const char *what, const struct on_tape *r, double *const *got,
                    double *const *want, double tolerance, double least)
{
  for (int i = 0; i < r->n; i++) {
    const double bound = tolerance * fmax(largest(want[i], r->count[i]), least);
    double worst = 0;
    int64_t at = -1;
    for (int64_t j = 0; j < r->count[i]; j++) {
      const double error = fabs(got[i][j] - want[i][j]);
      if (!(error <= bound) && (at < 0 || !(error <= worst))) worst = error, at = j;
    }
    if (at >= 0)
      fail_msg("%s: %s by %s[%lld] is %.15g, wanted %.15g: off by %.2g of the largest", k->name, what, r->name[i],
               (long long)at, got[i][at], want[i][at], worst / (bound / tolerance));
  }
}

/* ---- first derivatives ------------------------------------------------------------------------------------------- */
/* A gradient by operations is the fused one up to rounding, where it is written and as a value. */
static void decomposed_gradients(void **state)
{
  (void)state;
  for (int i = 0; i < KINDS; i++) {
    const struct kind *k = &kinds[i];
    struct layer l;
    double *fused[1 + REF_PARAMS] = { 0 }, *got[1 + REF_PARAMS] = { 0 };
    moe_value g[1 + REF_PARAMS];
    make(&l, k, MOE_F64, 1000 + (uint64_t)i);
    fused_gradient(&l, fused);
    struct on_tape r = record(&l, 1);
    OK(moe_tape_gradients(g, tape, &r.loss, NULL, 1, r.v, r.n, MOE_CREATE_GRAPH | MOE_DECOMPOSE));
    read_all(&r, g, got);
    compare(k, "dL", &r, got, fused, 1e-12, 1e-3);
    layer_send(&l); /* gradients are NaN again */
    r = record(&l, 1);
    OK(moe_tape_backward(tape, r.loss, none, MOE_CREATE_GRAPH | MOE_DECOMPOSE));
    OK(moe_tape_read(tape, moe_tape_grad(tape, r.v[0]), got[0], r.count[0]));
    fetch(&l.m);
    for (int p = 0, at = 1; p < REF_PARAMS; p++)
      if (l.grad[p].handle) got[at++] = values_of(&l.m, &l.grad[p]);
    compare(k, "dL, written", &r, got, fused, 1e-12, 1e-3);
    layer_free(&l);
  }
}

/* Without decomposition gradients are values too: those of the fused backward, with no span to write them to. */
static void fused_gradients_as_values(void **state)
{
  (void)state;
  for (int i = 0; i < KINDS; i++) {
    struct layer l;
    double *fused[1 + REF_PARAMS] = { 0 }, *got[1 + REF_PARAMS] = { 0 };
    moe_value g[1 + REF_PARAMS];
    make(&l, &kinds[i], MOE_F64, 2000 + (uint64_t)i);
    fused_gradient(&l, fused);
    for (int64_t flags = 0; flags <= MOE_CREATE_GRAPH; flags += MOE_CREATE_GRAPH) {
      layer_send(&l);
      struct on_tape r = record(&l, 0);
      OK(moe_tape_gradients(g, tape, &r.loss, NULL, 1, r.v, r.n, flags));
      for (int j = 0; j < r.n; j++) assert_true(g[j].id != 0);
      read_all(&r, g, got);
      for (int j = 0; j < r.n; j++)
        if (memcmp(got[j], fused[j], (size_t)r.count[j] * sizeof **got))
          fail_msg("%s: the gradient by %s differs", kinds[i].name, r.name[j]);
    }
    layer_free(&l);
  }
}

/* One of them alone: by a parameter, by x. */
static void one_gradient(void **state)
{
  (void)state;
  const struct kind *k = &kinds[0];
  struct layer l;
  double *all[1 + REF_PARAMS];
  moe_value g[1 + REF_PARAMS], one;
  make(&l, k, MOE_F64, 5);
  struct on_tape r = record(&l, 0);
  OK(moe_tape_gradients(g, tape, &r.loss, NULL, 1, r.v, r.n, 0));
  read_all(&r, g, all);
  for (int64_t flags = 0; flags <= (MOE_CREATE_GRAPH | MOE_DECOMPOSE); flags += MOE_CREATE_GRAPH | MOE_DECOMPOSE)
    for (int i = 0; i < r.n; i++) {
      double *got = t_host(&l.m, r.count[i], sizeof *got);
      r = record(&l, 0);
      OK(moe_tape_gradients(&one, tape, &r.loss, NULL, 1, &r.v[i], 1, flags));
      OK(moe_tape_read(tape, one, got, r.count[i]));
      for (int64_t j = 0; j < r.count[i]; j++)
        assert_near(got[j], all[i][j], flags ? 1e-12 * largest(all[i], r.count[i]) : 0);
    }
  layer_free(&l);
}

/* In the other types the bounds are the reference's, and one rounding for a parameter's gradient, which is a value of
   its type first.  Left out: in 16-bit types hidden biases, which the expansion adds after h was rounded; and logits
   whose own rounding the reference's weights do not count. */
static void decomposed_in_other_types(void **state)
{
  static const int64_t dtypes[] = { MOE_F32, MOE_BF16, MOE_F16 };
  (void)state;
  for (int d = 0; d < 3; d++)
    for (int i = 0; i < KINDS; i++) {
      const struct kind *k = &kinds[i];
      const int64_t dtype = dtypes[d];
      struct layer l;
      if ((k->hidden_bias && dtype != MOE_F32) || k->shift < -100) continue;
      make(&l, k, dtype, 6000 + (uint64_t)i);
      layer_send(&l);
      struct on_tape r = record(&l, 1);
      moe_value dy = moe_tape_leaf(tape, &l.io.dy, 0);
      OK(moe_tape_backward(tape, r.y, dy, MOE_CREATE_GRAPH | MOE_DECOMPOSE));
      double *dx = t_host(&l.m, r.count[0], sizeof *dx);
      OK(moe_tape_read(tape, moe_tape_grad(tape, r.v[0]), dx, r.count[0]));
      fetch(&l.m);
      ref_arithmetic(dtype);
      ref_layer_backward(&l.ref, &l.m);
      for (int p = -1; p < REF_PARAMS; p++) {
        if (p >= 0 && !l.grad[p].handle) continue;
        const double *got = p < 0 ? dx : values_of(&l.m, &l.grad[p]);
        const int64_t n = p < 0 ? r.count[0] : moe_tensor_count(&l.grad[p]);
        struct ref_worst w = ref_compare(got, p < 0 ? l.ref.dx : l.ref.d[p], n, dtype);
        if (w.failed)
          fail_msg("%s, %s: d%s[%lld] is %.9g, wanted %.9g within %.3g", k->name, moe_dtype_name(dtype),
                   p < 0 ? "x" : ref_param_names[p], (long long)w.at, w.got, w.want, w.bound);
      }
      layer_free(&l);
    }
}

/* Exactly at a limit the gradient passes, at relu's corner it does not, on both ways. */
static void gradients_at_kinks(void **state)
{
  static const struct kind at[] = {
    { "at the limit", .limit = 0.5, .hidden_bias = 1, .up_offset = 1 },
    { "at the limit, ungated", .limit = 0.5, .hidden_bias = 1, .ungated = 1 },
    { "at the corner", .activation = MOE_RELU, .hidden_bias = 1 },
    { "at the corner, ungated", .activation = MOE_RELU2, .hidden_bias = 1, .ungated = 1 },
  };
  (void)state;
  for (int i = 0; i < 4; i++)
    for (int sign = -1; sign < 2; sign += 2) {
      struct layer l;
      double *fused[1 + REF_PARAMS] = { 0 }, *got[1 + REF_PARAMS] = { 0 };
      moe_value g[1 + REF_PARAMS];
      make(&l, &at[i], MOE_F64, 5000 + (uint64_t)i);
      for (int p = REF_GATE; p <= REF_UP_BIAS; p++)
        for (int64_t j = 0; p != REF_DOWN && l.value[p] && j < moe_tensor_count(&l.param[p]); j++)
          l.value[p][j].v = p == REF_GATE_BIAS ? at[i].limit : p == REF_UP_BIAS ? sign * at[i].limit : 0;
      layer_send(&l);
      fused_gradient(&l, fused);
      struct on_tape r = record(&l, 0);
      OK(moe_tape_gradients(g, tape, &r.loss, NULL, 1, r.v, r.n, MOE_CREATE_GRAPH | MOE_DECOMPOSE));
      read_all(&r, g, got);
      compare(&at[i], "dL", &r, got, fused, 1e-12, 1e-3);
      double up = 0;
      for (int j = 0; j < r.n; j++)
        if (!strcmp(r.name[j], "up_bias")) up = largest(got[j], r.count[j]);
      assert_int_equal(up > 0, at[i].limit > 0);
      layer_free(&l);
    }
}

/* A token with an id that is none: NaN in its row of dx and in the router's gradient, nothing anywhere else. */
static void a_bad_token_stays_alone(void **state)
{
  static const struct kind k = { "a bad token", .random_ids = 1, .scoring = MOE_SIGMOID,
                                 .plain = 1,    .down_bias = 1,  .hidden_bias = 1 };
  struct layer l;
  double *fused[1 + REF_PARAMS] = { 0 }, *got[1 + REF_PARAMS] = { 0 };
  moe_value g[1 + REF_PARAMS];
  uint64_t bits;
  (void)state;
  make(&l, &k, MOE_F64, 8);
  l.ids[2 * l.o.K + 1] = 4; /* of 0..3 */
  layer_send(&l);
  for (int decomposed = 0; decomposed < 2; decomposed++) {
    struct on_tape r = record(&l, 0);
    moe_value dy = moe_tape_leaf(tape, &l.io.dy, 0);
    OK(moe_tape_gradients(g, tape, &r.y, &dy, 1, r.v, r.n, decomposed ? MOE_CREATE_GRAPH | MOE_DECOMPOSE : 0));
    OK(moe_health_read(q, &bits));
    assert_true(bits & MOE_HEALTH_ID);
    read_all(&r, g, decomposed ? got : fused);
    for (int i = 0; decomposed && i < r.n; i++) {
      int nan = 0;
      for (int64_t j = 0; j < r.count[i]; j++) {
        const int bad = i == 0 ? j / l.o.D == 2 : !strcmp(r.name[i], "router");
        nan += isnan(got[i][j]) != 0;
        assert_true(bad || !isnan(got[i][j]));
        if (!bad) assert_near(got[i][j], fused[i][j], 1e-12);
        else if (i == 0) assert_true(isnan(got[i][j]) && isnan(fused[i][j]));
      }
      assert_int_equal(nan > 0, i == 0 || !strcmp(r.name[i], "router"));
    }
  }
  layer_free(&l);
}

/* ---- second derivatives ------------------------------------------------------------------------------------------ */
/* sum of <g, v>, v being constants. */
static moe_value along(const struct on_tape *r, const moe_value *g, const moe_tensor *v)
{
  moe_value sum = none;
  for (int i = 0; i < r->n; i++) {
    if (!g[i].id) continue;
    moe_value part = moe_tape_sum(tape, moe_tape_mul(tape, g[i], moe_tape_leaf(tape, &v[i], 0)));
    sum = sum.id ? moe_tape_add(tape, sum, part) : part;
  }
  return sum;
}

struct direction {
  num *v[1 + REF_PARAMS];
  moe_tensor t[1 + REF_PARAMS];
};
/* Random; the next send has it. */
static struct direction direction_of(const struct on_tape *r)
{
  struct direction d = { 0 };
  for (int i = 0; i < r->n; i++) {
    moe_tensor like;
    OK(moe_tape_tensor(&like, tape, r->v[i]));
    d.v[i] = t_uniform(&r->l->m, r->count[i], like.dtype, 1);
    d.t[i] = t_tensor(&r->l->m, like.dtype, T_PACKED, like.rank, like.shape);
    t_put(&r->l->m, &d.t[i], d.v[i]);
  }
  return d;
}

/* Differences of the fused gradient along d. */
static void numeric_product(struct layer *l, const struct direction *d, double **to)
{
  static const double step[4] = { STEP, -STEP, 2 * STEP, -2 * STEP }, factor[4] = { 8, -8, -1, 1 };
  struct on_tape r = record(l, 1);
  num *middle[1 + REF_PARAMS] = { 0 };
  for (int i = 0; i < r.n; i++) {
    to[i] = t_host(&l->m, r.count[i], sizeof **to);
    middle[i] = t_nums(&l->m, r.count[i]);
    memcpy(middle[i], r.value[i], (size_t)r.count[i] * sizeof(num));
  }
  layer_replay(l, l->ref.ids);
  for (int s = 0; s < 4; s++) {
    double *g[1 + REF_PARAMS];
    for (int i = 0; i < r.n; i++)
      for (int64_t j = 0; j < r.count[i]; j++) r.value[i][j].v = middle[i][j].v + step[s] * d->v[i][j].v;
    layer_send(l);
    fused_gradient(l, g);
    for (int i = 0; i < r.n; i++)
      for (int64_t j = 0; j < r.count[i]; j++) to[i][j] += factor[s] * g[i][j] / (12 * STEP);
  }
  for (int i = 0; i < r.n; i++) memcpy(r.value[i], middle[i], (size_t)r.count[i] * sizeof(num));
  layer_send(l);
}

/* The Hessian of L times a vector, where the second walk meets the layer fused, and where it is decomposed again. */
static void hessian_vector_products(void **state)
{
  (void)state;
  for (int i = 0; i < KINDS; i++) {
    const struct kind *k = &kinds[i];
    struct layer l;
    double *numeric[1 + REF_PARAMS], *got[1 + REF_PARAMS] = { 0 };
    moe_value g[1 + REF_PARAMS], hv[1 + REF_PARAMS];
    make(&l, k, MOE_F64, 3000 + (uint64_t)i);
    struct on_tape r = record(&l, 0);
    struct direction d = direction_of(&r);
    layer_send(&l);
    for (int64_t flags = 0; flags <= (MOE_CREATE_GRAPH | MOE_DECOMPOSE); flags += MOE_CREATE_GRAPH | MOE_DECOMPOSE) {
      if (flags) layer_send(&l);
      r = record(&l, 0);
      OK(moe_tape_gradients(g, tape, &r.loss, NULL, 1, r.v, r.n, MOE_CREATE_GRAPH | MOE_DECOMPOSE));
      moe_value slope = along(&r, g, d.t);
      OK(moe_tape_gradients(hv, tape, &slope, NULL, 1, r.v, r.n, flags));
      read_all(&r, hv, got);
      if (!flags) numeric_product(&l, &d, numeric);
      compare(k, flags ? "Hv, decomposed" : "Hv", &r, got, numeric, 1e-8, 1e-3);
    }
    layer_free(&l);
  }
}

/* A penalty on the gradient: the losses are in L's gradient once, and in that of the penalty through its own only. */
static void losses_join_once(void **state)
{
  (void)state;
  const struct kind k = { "penalty",         .T = 12,        .balance = 0.7, .z = 0.3,
                          .aux_scale = 0.75, .sequences = 2, .mask = 1,      .shared = 1 };
  struct layer l;
  double *fused[1 + REF_PARAMS] = { 0 }, *hv[1 + REF_PARAMS], *want[1 + REF_PARAMS], *got[1 + REF_PARAMS] = { 0 };
  moe_value g[1 + REF_PARAMS], p[1 + REF_PARAMS];
  struct direction d = { 0 };
  make(&l, &k, MOE_F64, 4000);
  fused_gradient(&l, fused);
  struct on_tape r = record(&l, 0);
  d = direction_of(&r);
  for (int i = 0; i < r.n; i++) {
    want[i] = t_host(&l.m, r.count[i], sizeof **want);
    for (int64_t j = 0; j < r.count[i]; j++) d.v[i][j].v = fused[i][j];
  }
  numeric_product(&l, &d, hv); /* of the penalty |G|^2/2 */
  for (int both = 0; both < 2; both++) {
    r = record(&l, 0);
    OK(moe_tape_gradients(g, tape, &r.loss, NULL, 1, r.v, r.n, MOE_CREATE_GRAPH | MOE_DECOMPOSE));
    moe_value sum = both ? r.loss : none;
    for (int i = 0; i < r.n; i++) {
      moe_value half = moe_tape_scale(tape, square(g[i]), 0.5);
      sum = sum.id ? moe_tape_add(tape, sum, half) : half;
      for (int64_t j = 0; j < r.count[i]; j++) want[i][j] = hv[i][j] + both * fused[i][j];
    }
    OK(moe_tape_gradients(p, tape, &sum, NULL, 1, r.v, r.n, 0));
    read_all(&r, p, got);
    compare(&k, both ? "d(L + penalty)" : "d(penalty)", &r, got, want, 1e-8, 1e-3);
  }
  layer_free(&l);
}

/* Without MOE_DECOMPOSE no gradient of a layer has a derivative: an error that says whose it is, never a zero. */
static void no_second_derivative_of_fused_gradients(void **state)
{
  (void)state;
  struct layer l;
  moe_value g[1 + REF_PARAMS], h[1 + REF_PARAMS];
  make(&l, &kinds[0], MOE_F64, 6);
  struct on_tape r = record(&l, 0);
  for (int i = 0, n = r.n; i < n; i++) {
    r = record(&l, 0);
    OK(moe_tape_gradients(g, tape, &r.loss, NULL, 1, r.v, r.n, MOE_CREATE_GRAPH));
    moe_value s = square(g[i]);
    FAILS(MOE_ERR_NO_SECOND_DERIVATIVE, "moe_layer", moe_tape_gradients(h, tape, &s, NULL, 1, r.v, r.n, 0));
    assert_non_null(strstr(moe_last_error(), "node "));
    assert_non_null(strstr(moe_last_error(), "MOE_DECOMPOSE"));
    FAILS(MOE_ERR_NO_SECOND_DERIVATIVE, "moe_layer", moe_tape_status(tape));
  }
  layer_free(&l);
}

/* ---- in a recomputed segment, and in a function that does the same by hand ---------------------------------------- */
struct inner {
  struct layer *l;
  moe_tape_moe options;
};
static moe_status inner_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                                int64_t n_out)
{
  const struct inner *s = user;
  (void)n_in;
  (void)n_out;
  out[0] = moe_tape_moe_layer(t, s->l->layer, in[0], &s->options, NULL);
  return MOE_OK;
}
static moe_status inner_forward(void *user, const moe_tape_call *call)
{
  const struct inner *s = user;
  call->out[0] = moe_tape_moe_layer(call->tape, s->l->layer, call->in[0], &s->options, NULL);
  return MOE_OK;
}
static moe_status inner_backward(void *user, const moe_tape_call *call, const moe_value *dout, moe_value *din)
{
  const struct inner *s = user;
  moe_tape_set_recording(call->tape, 1);
  moe_value y = moe_tape_moe_layer(call->tape, s->l->layer, call->in[0], &s->options, NULL);
  return moe_tape_gradients(din, call->tape, &y, dout, 1, call->in, 1, MOE_CREATE_GRAPH | MOE_DECOMPOSE);
}

/* The losses join there as they do in the open: in the gradient once, in its derivative through its own only. */
static void through_segments_and_functions(void **state)
{
  (void)state;
  const struct kind k = { "segments",        .T = 12,        .balance = 0.7, .z = 0.3,
                          .aux_scale = 0.75, .sequences = 2, .mask = 1,      .shared = 1 };
  struct layer l;
  double *got[3][2];
  make(&l, &k, MOE_F64, 4100);
  const int64_t n = moe_tensor_count(&l.io.x);
  moe_tensor v = t_tensor(&l.m, MOE_F64, T_PACKED, 2, l.io.x.shape);
  t_put(&l.m, &v, t_uniform(&l.m, n, MOE_F64, 1));
  layer_send(&l);
  for (int way = 0; way < 3; way++) {
    struct inner in = { &l, moe_tape_moe_init() };
    moe_function f = moe_function_init();
    moe_tape_reset(tape);
    in.options.params = l.io.params;
    in.options.mask = l.io.mask;
    in.options.aux_scale = l.io.aux_scale;
    in.options.sequences = l.io.sequences;
    f.name = "by hand";
    f.forward = inner_forward;
    f.backward = inner_backward;
    f.user = &in;
    f.n_out = 1;
    moe_value x = moe_tape_leaf(tape, &l.io.x, 1), y = none, g, hv;
    if (way == 0) y = moe_tape_moe_layer(tape, l.layer, x, &in.options, NULL);
    else if (way == 1) OK(moe_tape_recompute(&y, 1, tape, inner_segment, &in, &x, 1));
    else OK(moe_tape_custom(&y, tape, &f, &x, 1));
    moe_value loss = moe_tape_sum(tape, moe_tape_mul(tape, y, moe_tape_mul(tape, y, y)));
    OK(moe_tape_gradients(&g, tape, &loss, NULL, 1, &x, 1, MOE_CREATE_GRAPH | MOE_DECOMPOSE));
    moe_value slope = moe_tape_sum(tape, moe_tape_mul(tape, g, moe_tape_leaf(tape, &v, 0)));
    OK(moe_tape_gradients(&hv, tape, &slope, NULL, 1, &x, 1, way == 1 ? MOE_DECOMPOSE : 0));
    for (int w = 0; w < 2; w++) {
      got[way][w] = t_host(&l.m, n, sizeof(double));
      OK(moe_tape_read(tape, w ? hv : g, got[way][w], n));
      for (int64_t i = 0; i < n; i++) assert_near(got[way][w][i], got[0][w][i], 1e-12 * largest(got[0][w], n));
    }
  }
  layer_free(&l);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    TEST(decomposed_gradients),
    TEST(fused_gradients_as_values),
    TEST(one_gradient),
    TEST(decomposed_in_other_types),
    TEST(gradients_at_kinks),
    TEST(a_bad_token_stays_alone),
    TEST(hessian_vector_products),
    TEST(losses_join_once),
    TEST(no_second_derivative_of_fused_gradients),
    TEST(through_segments_and_functions),
  };
  if (!test_open(&ctx, &q)) return 77;
  if (!test_has_fp64(ctx)) {
    test_close(ctx, q);
    printf("SKIP: the device has no fp64\n");
    return 77;
  }
  int rc = TEST_MAIN(tests);
  test_close(ctx, q);
  return rc;
}
