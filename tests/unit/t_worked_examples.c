/* t_worked_examples.c - small examples with known answers, through the public API: mixture of experts (routing,
   outputs, parameter counts), the raw layout of files, second derivatives, a custom function with an implicit
   derivative, and checked gradients. */
#include "moe_test.h"
#include "../ref/device.h"

#include <unistd.h>

static moe_context *ctx;
static moe_queue *q;

static moe_tensor put(struct t_memory *m, int64_t dtype, const double *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(m, dtype, T_PACKED, rank, shape);
  int64_t n = moe_tensor_count(&t);
  num *numbers = t_nums(m, n);
  for (int64_t i = 0; i < n; i++) numbers[i].v = values[i];
  t_put(m, &t, numbers);
  return t;
}
#define PUT(m, dtype, values, ...) put(m, dtype, values, SHAPE(__VA_ARGS__))

/* A span of device memory from the same pool. */
static moe_span room(struct t_memory *m, uint64_t bytes)
{
  moe_tensor t = t_tensor(m, MOE_U8, T_PACKED, SHAPE((int64_t)bytes));
  t_own(m, &t);
  return (moe_span){ t.handle, t.offset, bytes };
}

static void read_doubles(moe_tensor t, double *out, int n)
{
  assert_int_equal(moe_tensor_count(&t), n);
  OK(moe_tensor_read(q, out, &t, n));
}

/* ---- mixture of experts ---------------------------------------------------------------------------------------------
   x = [1,2]; expert e maps x to x E_e, through two layers: up = E_e', identity, down = identity. */
static const double x_values[2] = { 1, 2 };
static const double router_values[8] = { 1, 0, 0, 1, -1, 0, 0, -1 }; /* [E,D] */
static const double up_values[16] = { 2, 0, 0, 2, /* E0' */ 1, 1, 1, -1, /* E1' */ .5, 0, 0, .5, /* E2' */ 1, 0, 0, 1 };
static const double down_values[16] = { 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1 };

struct example {
  moe_selection_options selection;
  moe_weights_options weights;
  moe_activation activation;
  double bound; /* of values near 1 */
};

static struct example example_of(int64_t dtype, int64_t top_k)
{
  struct example e;
  e.selection = moe_selection_options_init();
  e.selection.kind = MOE_SELECT_SOFTMAX;
  e.selection.top_k = top_k;
  e.weights = moe_weights_options_init();
  e.weights.scoring = MOE_SOFTMAX;
  e.weights.renormalize = 1;
  e.weights.scale = 1;
  e.activation = moe_activation_init();
  e.activation.kind = MOE_IDENTITY;
  e.bound = dtype == MOE_F64 ? 1e-12 : 1e-6;
  return e;
}

static void mixture_by_the_layer(int64_t dtype, int64_t top_k)
{
  struct example e = example_of(dtype, top_k);
  struct t_memory m;
  moe_layer *layer;
  moe_layer_desc desc = moe_layer_desc_init();
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_layer_io io = moe_layer_io_init();
  moe_layer_state state = moe_layer_state_init();
  moe_tensor t;
  double got[8];
  int64_t all, active;
  desc.d_model = desc.d_ff = 2;
  desc.n_experts = 4;
  desc.dtype = dtype;
  desc.selection = &e.selection;
  desc.weights = &e.weights;
  desc.activation = &e.activation;
  t_memory_init(&m, ctx, q, 1);
  OK(moe_layer_create(&layer, ctx, &desc));
  OK(moe_layer_measure(&bytes, layer, 1, 1));
  io.x = PUT(&m, dtype, x_values, 1, 2);
  io.y = t_tensor(&m, dtype, T_PACKED, SHAPE(1, 2));
  io.params = room(&m, bytes.params);
  io.saved = room(&m, bytes.saved);
  io.scratch = room(&m, bytes.scratch);
  t_upload(&m);
  assert_int_equal(m.status, MOE_OK);

  static const struct {
    const char *name;
    const double *values;
    int n;
  } params[] = { { "router", router_values, 8 }, { "up", up_values, 16 }, { "down", down_values, 16 } };
  for (int i = 0; i < 3; i++) {
    moe_layer_param_info info = moe_layer_param_info_init();
    float narrow[16];
    OK(moe_layer_param(&t, NULL, &info, layer, io.params, (moe_span){ 0 }, i));
    assert_string_equal(info.name, params[i].name);
    assert_int_equal(moe_tensor_count(&t), params[i].n);
    for (int k = 0; k < params[i].n; k++) narrow[k] = (float)params[i].values[k];
    uint64_t size = moe_tensor_extent(&t);
    OK(moe_span_write(q, (moe_span){ t.handle, t.offset, size },
                      dtype == MOE_F64 ? (const void *)params[i].values : narrow, size));
  }
  FAILS(MOE_ERR_INVALID, "past the last", moe_layer_param(&t, NULL, NULL, layer, io.params, (moe_span){ 0 }, 3));
  OK(moe_layer_forward(layer, q, &io, &state));
  OK(moe_queue_wait(q));

  OK(moe_layer_logits(&t, &state));
  read_doubles(t, got, 4);
  for (int i = 0; i < 4; i++) assert_near(got[i], ((const double[]){ 1, 2, -1, -2 })[i], 0);
  OK(moe_layer_route_ids(&t, &state));
  read_doubles(t, got, (int)top_k);
  assert_near(got[0], 1, 0);
  if (top_k == 2) assert_near(got[1], 0, 0);
  OK(moe_layer_route_weights(&t, &state));
  read_doubles(t, got, (int)top_k);
  const double w = 1 / (1 + exp(-1.0)); /* sigmoid(1) */
  if (top_k == 2) {
    assert_near(got[0], w, e.bound);
    assert_near(got[1], 1 - w, e.bound);
  } else assert_near(got[0], 1, 0);
  read_doubles(io.y, got, 2);
  if (top_k == 2) {
    assert_near(got[0], 2 + w, e.bound);
    assert_near(got[1], 4 - 5 * w, e.bound);
    assert_near(got[0], 2.7310585786, e.bound + 5e-11);
    assert_near(got[1], 0.3447071068, e.bound + 5e-11);
  } else {
    assert_near(got[0], 3, 0);
    assert_near(got[1], -1, 0);
  }
  /* The balance loss: E sum f P, with the chosen each a share 1/K of the slots. */
  const double sum = exp(1) + exp(2) + exp(-1) + exp(-2);
  OK(moe_layer_losses(&t, &state));
  read_doubles(t, got, 2);
  assert_near(got[0], top_k == 2 ? 2 * (exp(1) + exp(2)) / sum : 4 * exp(2) / sum, 3 * e.bound);
  assert_near(got[1], log(sum) * log(sum), 6 * e.bound);
  OK(moe_layer_parameter_counts(&all, &active, layer)); /* two matrices of 4 an expert */
  assert_int_equal(all, 8 + 4 * 8);
  assert_int_equal(active, 8 + top_k * 8);
  moe_layer_free(layer);
  t_memory_free(&m);
}

/* The branch alone: logits given; what was not chosen is NaN and nobody looks at it. */
static void mixture_by_the_branch(int64_t dtype, int64_t renormalize)
{
  static const double logits[4] = { 1, 2, -1, -2 };
  struct example e = example_of(dtype, 2);
  struct t_memory m;
  moe_experts *experts;
  moe_experts_desc desc = moe_experts_desc_init();
  moe_experts_bytes bytes = moe_experts_bytes_init(), inference = bytes;
  moe_experts_io io = moe_experts_io_init();
  moe_state state = moe_state_init();
  moe_tensor t;
  double up[16], got[2];
  e.weights.renormalize = renormalize;
  for (int i = 0; i < 16; i++) up[i] = i < 8 ? up_values[i] : (double)NAN;
  desc.d_model = desc.d_ff = 2;
  desc.n_experts = 4;
  desc.dtype = dtype;
  desc.selection = &e.selection;
  desc.weights = &e.weights;
  desc.activation = &e.activation;
  t_memory_init(&m, ctx, q, 1);
  OK(moe_experts_create(&experts, ctx, &desc));
  OK(moe_experts_measure(&bytes, experts, 1, MOE_GRAD_INPUT));
  OK(moe_experts_measure(&inference, experts, 1, 0));
  io.x = PUT(&m, dtype, x_values, 1, 2);
  io.logits = PUT(&m, dtype, logits, 1, 4);
  io.up = PUT(&m, dtype, up, 4, 2, 2);
  io.down = PUT(&m, dtype, down_values, 4, 2, 2);
  io.y = t_tensor(&m, dtype, T_PACKED, SHAPE(1, 2));
  io.saved = room(&m, bytes.saved);
  io.scratch = room(&m, bytes.scratch > inference.scratch ? bytes.scratch : inference.scratch);
  t_own(&m, &io.y);
  t_upload(&m);
  OK(moe_experts_forward_selected(experts, q, &io, MOE_GRAD_INPUT, &state));
  OK(moe_queue_wait(q));
  t_download(&m);
  assert_int_equal(m.status, MOE_OK);
  assert_null(t_guards(&m));
  OK(moe_experts_route_ids(&t, &state));
  read_doubles(t, got, 2);
  assert_near(got[0], 1, 0);
  assert_near(got[1], 0, 0);
  const double sum = exp(1) + exp(2) + exp(-1) + exp(-2);
  const double w1 = renormalize ? 1 / (1 + exp(-1.0)) : exp(2) / sum;
  const double w0 = renormalize ? 1 - w1 : exp(1) / sum;
  if (!renormalize) {
    assert_near(w1, 0.6964, 5e-5);
    assert_near(w0, 0.2562, 5e-5);
    assert_near(w0 + w1, 0.9526, 5e-5);
  }
  OK(moe_experts_route_weights(&t, &state));
  read_doubles(t, got, 2);
  assert_near(got[0], w1, e.bound);
  assert_near(got[1], w0, e.bound);
  read_doubles(io.y, got, 2);
  assert_near(got[0], 3 * w1 + 2 * w0, e.bound);
  assert_near(got[1], -w1 + 4 * w0, e.bound);
  OK(moe_experts_inference(experts, q, &io)); /* the same without keeping anything */
  read_doubles(io.y, got, 2);
  assert_near(got[0], 3 * w1 + 2 * w0, e.bound);
  moe_experts_free(experts);
  t_memory_free(&m);
}

static void mixture_top_2_f32(void **state)
{
  (void)state;
  mixture_by_the_layer(MOE_F32, 2);
  mixture_by_the_branch(MOE_F32, 1);
  mixture_by_the_branch(MOE_F32, 0);
}
static void mixture_top_2_f64(void **state)
{
  (void)state;
  if (!test_has_fp64(ctx)) skip();
  mixture_by_the_layer(MOE_F64, 2);
  mixture_by_the_branch(MOE_F64, 1);
  mixture_by_the_branch(MOE_F64, 0);
}
static void mixture_top_1(void **state)
{
  (void)state;
  mixture_by_the_layer(MOE_F32, 1);
  if (test_has_fp64(ctx)) mixture_by_the_layer(MOE_F64, 1);
}

static void mixture_parameter_counts(void **state)
{
  int64_t all, active;
  (void)state;
  OK(moe_parameter_counts(&all, &active, 8, 4, 4, 2, 0));
  assert_int_equal(all, 24);
  assert_int_equal(active, 16);
  OK(moe_parameter_counts(&all, &active, 8, 4, 4, 1, 0));
  assert_int_equal(all, 24);
  assert_int_equal(active, 12);
}

/* ---- serialization ------------------------------------------------------------------------------------------------
   W1 [3,2] = .1 ... .6 and W2 [2,1] = .7 .8: 72 bytes, each number in its place, and back. */
static void raw_layout_of_two_matrices(void **state)
{
  static const double w1[6] = { .1f, .2f, .3f, .4f, .5f, .6f }, w2[2] = { .7f, .8f };
  static const struct {
    size_t at;
    int64_t is;
  } numbers[] = { { 0, 2 }, { 8, 3 }, { 16, 2 }, { 48, 2 }, { 56, 1 } };
  char folder[] = "/tmp/moe-test.XXXXXX", path[64];
  unsigned char bytes[80];
  double back[6];
  struct t_memory m;
  moe_checkpoint *c;
  (void)state;
  assert_non_null(mkdtemp(folder));
  snprintf(path, sizeof path, "%s/raw", folder);
  t_memory_init(&m, ctx, q, 1);
  moe_tensor w[2] = { PUT(&m, MOE_F32, w1, 3, 2), PUT(&m, MOE_F32, w2, 2, 1) };
  moe_tensor to[2] = { t_tensor(&m, MOE_F32, T_PACKED, SHAPE(3, 2)), t_tensor(&m, MOE_F32, T_PACKED, SHAPE(2, 1)) };
  t_upload(&m);
  OK(moe_raw_save(path, q, w, 2));
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  assert_int_equal(fread(bytes, 1, sizeof bytes, f), 72);
  fclose(f);
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
    assert_memory_equal(bytes + numbers[i].at, &numbers[i].is, 8);
  for (int i = 0; i < 8; i++) {
    const float value = (float)(i < 6 ? w1[i] : w2[i - 6]);
    assert_memory_equal(bytes + (i < 6 ? 24 + 4 * i : 64 + 4 * (i - 6)), &value, 4);
  }
  OK(moe_raw_open(&c, path));
  OK(moe_checkpoint_load(c, q, (const moe_checkpoint_item[]){ { "0", to[0] }, { "1", to[1] } }, 2, 0));
  moe_checkpoint_close(c);
  read_doubles(to[0], back, 6);
  assert_memory_equal(back, w1, sizeof w1);
  read_doubles(to[1], back, 2);
  assert_memory_equal(back, w2, sizeof w2);
  t_memory_free(&m);
  unlink(path);
  rmdir(folder);
}

/* ---- second derivatives ------------------------------------------------------------------------------------------ */
static double number_of(moe_tape *tape, moe_value v)
{
  double x = NAN;
  OK(moe_tape_read(tape, v, &x, 1));
  return x;
}

/* g(x) = x^3 at 2: 8, 12, 12, and 6 where one goes on. */
static void second_derivative_of_a_cube(int64_t dtype)
{
  static const double two[1] = { 2 };
  static const double want[4] = { 8, 12, 12, 6 };
  struct t_memory m;
  moe_tape *tape;
  t_memory_init(&m, ctx, q, 1);
  OK(moe_tape_create(&tape, q, NULL));
  moe_tensor t = PUT(&m, dtype, two, 1);
  t_upload(&m);
  moe_value x = moe_tape_leaf(tape, &t, 1), g = moe_tape_mul(tape, moe_tape_mul(tape, x, x), x);
  assert_near(number_of(tape, g), want[0], 0);
  for (int order = 1; order < 4; order++) {
    OK(moe_tape_backward(tape, g, (moe_value){ 0 }, MOE_CREATE_GRAPH));
    g = moe_tape_grad(tape, x);
    assert_near(number_of(tape, g), want[order], 0);
  }
  moe_tape_free(tape);
  t_memory_free(&m);
}

/* L = w1^2 w2 at (2,3), H = [[6,4],[4,0]], v = [1,0]: H v = [6,4] by a second backward, which starts from clean
   gradients: with those of the first it would give 42. */
static void hessian_times_vector(int64_t dtype)
{
  static const double two[1] = { 2 }, three[1] = { 3 }, one[1] = { 1 }, zero[1] = { 0 };
  struct t_memory m;
  moe_tape *tape;
  t_memory_init(&m, ctx, q, 1);
  OK(moe_tape_create(&tape, q, NULL));
  moe_tensor t1 = PUT(&m, dtype, two, 1), t2 = PUT(&m, dtype, three, 1), a = PUT(&m, dtype, one, 1),
             b = PUT(&m, dtype, zero, 1), d1 = t_tensor(&m, dtype, 0, SHAPE(1)), d2 = t_tensor(&m, dtype, 0, SHAPE(1));
  double bound_gradient;
  t_upload(&m);
  moe_value w1 = moe_tape_param(tape, &t1, &d1), w2 = moe_tape_param(tape, &t2, &d2);
  moe_value loss = moe_tape_mul(tape, moe_tape_mul(tape, w1, w1), w2);
  assert_near(number_of(tape, loss), 12, 0);
  OK(moe_tape_backward(tape, loss, (moe_value){ 0 }, MOE_CREATE_GRAPH));
  moe_value g1 = moe_tape_grad(tape, w1), g2 = moe_tape_grad(tape, w2);
  assert_near(number_of(tape, g1), 12, 0);
  assert_near(number_of(tape, g2), 4, 0);
  read_doubles(d1, &bound_gradient, 1);
  assert_near(bound_gradient, 12, 0);

  moe_value v1 = moe_tape_leaf(tape, &a, 0), v2 = moe_tape_leaf(tape, &b, 0);
  moe_value along = moe_tape_add(tape, moe_tape_mul(tape, g1, v1), moe_tape_mul(tape, g2, v2));
  OK(moe_tape_backward(tape, along, (moe_value){ 0 }, 0));
  assert_near(number_of(tape, moe_tape_grad(tape, w1)), 6, 0);
  assert_near(number_of(tape, moe_tape_grad(tape, w2)), 4, 0);
  read_doubles(d1, &bound_gradient, 1);
  assert_near(bound_gradient, 6, 0);
  read_doubles(d2, &bound_gradient, 1);
  assert_near(bound_gradient, 4, 0);
  assert_near(number_of(tape, g1), 12, 0); /* the first gradients are as they were */

  moe_value hv[2], wrt[2] = { w1, w2 }, v[2] = { v1, v2 };
  OK(moe_hvp(hv, tape, loss, wrt, v, 2, 0));
  assert_near(number_of(tape, hv[0]), 6, 0);
  assert_near(number_of(tape, hv[1]), 4, 0);
  read_doubles(d1, &bound_gradient, 1);
  assert_near(bound_gradient, 6, 0); /* no parameter's gradient is written */
  moe_tape_free(tape);
  t_memory_free(&m);
}

static void second_derivatives_f32(void **state)
{
  (void)state;
  second_derivative_of_a_cube(MOE_F32);
  hessian_times_vector(MOE_F32);
}
static void second_derivatives_f64(void **state)
{
  (void)state;
  if (!test_has_fp64(ctx)) skip();
  second_derivative_of_a_cube(MOE_F64);
  hessian_times_vector(MOE_F64);
}

/* ---- a custom function with an implicit derivative ------------------------------------------------------------------ */
/* The spread s at which a bond has the given price: 2 years, `coupon` a quarter, risk-free rate 3%.  Solved by bisection,
   on the host, in double; its derivative is that of the equation price(s) = p: ds/dp = 1 / (dprice/ds). */
struct bond {
  double coupon, notional;
  int iterations, solved, differentiated;
  double slope; /* dprice/ds, as backward took it */
};
static double bond_price(const struct bond *b, double s)
{
  const double factor = 1 / (1 + (0.03 + s) / 4);
  double discount = 1, sum = 0;
  for (int quarter = 1; quarter <= 8; quarter++) sum += b->coupon * (discount *= factor);
  return sum + b->notional * discount;
}

/* A number of the host's as a value like another one. */
static moe_value number_like(moe_tape *tape, moe_value like, double x)
{
  const float narrow = (float)x;
  moe_tensor t;
  OK(moe_tape_tensor(&t, tape, like));
  moe_value v = moe_tape_empty(tape, t.dtype, t.rank, t.shape);
  OK(moe_tape_tensor(&t, tape, v));
  const uint64_t bytes = moe_tensor_extent(&t);
  OK(moe_span_write(q, (moe_span){ t.handle, t.offset, bytes }, t.dtype == MOE_F64 ? (const void *)&x : &narrow,
                    bytes));
  return v;
}

static moe_status spread_forward(void *user, const moe_tape_call *c)
{
  struct bond *b = user;
  double price, low = -0.1, high = 0.1;
  OK(moe_tape_read(c->tape, c->in[0], &price, 1));
  for (b->iterations = 0; high - low > 1e-9; b->iterations++) {
    const double middle = (low + high) / 2;
    *(bond_price(b, middle) > price ? &low : &high) = middle;
  }
  b->solved++;
  c->out[0] = number_like(c->tape, c->in[0], (low + high) / 2);
  return MOE_OK;
}
static moe_status spread_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  struct bond *b = user;
  double s;
  OK(moe_tape_read(c->tape, c->out[0], &s, 1));
  b->differentiated++;
  b->slope = (bond_price(b, s + 1e-6) - bond_price(b, s - 1e-6)) / 2e-6;
  din[0] = moe_tape_div(c->tape, dout[0], number_like(c->tape, dout[0], b->slope));
  return MOE_OK;
}

/* s, and ds/dp; the wait tells whether that is finite. */
static void solve_bond(struct bond *b, int64_t dtype, double price, double *s, double *slope)
{
  struct t_memory m;
  moe_tape *tape;
  moe_tape_desc desc = moe_tape_desc_init();
  moe_value out;
  moe_function f = moe_function_init();
  f.name = "spread";
  f.forward = spread_forward;
  f.backward = spread_backward;
  f.user = b;
  f.n_out = 1;
  t_memory_init(&m, ctx, q, 1);
  desc.health_policy = MOE_HEALTH_POLICY_FAIL;
  OK(moe_tape_create(&tape, q, &desc));
  moe_tensor t = PUT(&m, dtype, &price, 1);
  t_upload(&m);
  moe_value p = moe_tape_leaf(tape, &t, 1);
  b->solved = b->differentiated = 0;
  OK(moe_tape_custom(&out, tape, &f, &p, 1));
  OK(moe_tape_read(tape, out, s, 1));
  OK(moe_tape_backward(tape, out, (moe_value){ 0 }, 0));
  OK(moe_tape_read(tape, moe_tape_grad(tape, p), slope, 1));
  assert_int_equal(b->solved, 1);
  assert_int_equal(b->differentiated, 1); /* 28 steps, one node */
  if (b->slope == 0)
    FAILS(MOE_ERR_DATA, "moe_queue_wait: gradient of spread, input 0, element 0 is not finite", moe_queue_wait(q));
  OK(moe_queue_wait(q));
  moe_tape_free(tape);
  t_memory_free(&m);
}

static void implicit_derivative_of_a_bond(int64_t dtype)
{
  const double rounding = dtype == MOE_F64 ? 0 : 1e-9; /* of s in storage */
  struct bond bond = { .coupon = 0.75, .notional = 100 };
  double s, slope, moved, unused;
  solve_bond(&bond, dtype, 98, &s, &slope);
  assert_int_equal(bond.iterations, 28);
  assert_near(s, 0.010460525, 5e-10 + rounding);
  assert_near(bond.slope, -188.9937, 5e-5);
  assert_near(slope, -0.0052912, 5e-8);
  solve_bond(&bond, dtype, 99, &moved, &unused);
  assert_int_equal(bond.iterations, 28);
  assert_near(moved, 0.005200024, 5e-10 + rounding);
  assert_near(s - moved, 0.0052605, 5e-8);
  assert_near(-slope - (s - moved), 0.0000307, 5e-8);

  /* A bond that pays nothing: its price depends on nothing, the rule divides by 0, and the wait names the function. */
  struct bond nothing = { 0 };
  solve_bond(&nothing, dtype, 98, &s, &slope);
  assert_near(nothing.slope, 0, 0);
  assert_true(isinf(slope));
}
static void implicit_derivative_f32(void **state)
{
  (void)state;
  implicit_derivative_of_a_bond(MOE_F32);
}
static void implicit_derivative_f64(void **state)
{
  (void)state;
  if (!test_has_fp64(ctx)) skip();
  implicit_derivative_of_a_bond(MOE_F64);
}

/* ---- checked gradients ----------------------------------------------------------------------------------------------- */
/* f(x) = x^2, as an operation of the tape, and as a function of the caller's whose rule is wrong: x for 2x. */
static moe_value square(void *user, moe_tape *tape, const moe_value *in, int64_t n)
{
  (void)user;
  (void)n;
  return moe_tape_mul(tape, in[0], in[0]);
}
static moe_status wrong_forward(void *user, const moe_tape_call *c)
{
  (void)user;
  c->out[0] = moe_tape_mul(c->tape, c->in[0], c->in[0]);
  return MOE_OK;
}
static moe_status wrong_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  (void)user;
  din[0] = moe_tape_mul(c->tape, dout[0], c->in[0]);
  return MOE_OK;
}
static moe_value wrong_square(void *user, moe_tape *tape, const moe_value *in, int64_t n)
{
  moe_value out;
  moe_function f = moe_function_init();
  (void)user;
  f.name = "wrong square";
  f.forward = wrong_forward;
  f.backward = wrong_backward;
  f.n_out = 1;
  (void)!moe_tape_custom(&out, tape, &f, in, n); /* an error is the tape's */
  return out;
}

static void gradient_check(void **state)
{
  static const double three[1] = { 3 };
  moe_gradcheck_result r = moe_gradcheck_result_init();
  struct t_memory m;
  (void)state;
  t_memory_init(&m, ctx, q, 1);
  if (!test_has_fp64(ctx)) {
    const int64_t one = 1;
    moe_tensor x;
    OK(moe_tensor_packed(&x, room(&m, 8), MOE_F64, 1, &one));
    FAILS(MOE_ERR_UNSUPPORTED, "has no fp64", moe_gradcheck(&r, q, square, NULL, &x, 1, NULL));
    t_memory_free(&m);
    return;
  }
  moe_tensor x = PUT(&m, MOE_F64, three, 1);
  t_upload(&m);
  OK(moe_gradcheck(&r, q, square, NULL, &x, 1, NULL));
  assert_near(r.analytic, 6, 0);
  assert_near(r.numeric, 6, 1e-10);
  assert_true(r.error < 1e-11); /* about 1e-12 */
  assert_int_equal(r.checked, 1);
  FAILS(MOE_ERR_CHECK, "input 0, element 0: 6 by differences, 3 by the tape: error 0.3333 > 0.0001",
        moe_gradcheck(&r, q, wrong_square, NULL, &x, 1, NULL));
  assert_near(r.analytic, 3, 0);
  assert_near(r.error, 1.0 / 3, 1e-10);
  t_memory_free(&m);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(mixture_top_2_f32),       cmocka_unit_test(mixture_top_2_f64),
    cmocka_unit_test(mixture_top_1),           cmocka_unit_test(mixture_parameter_counts),
    cmocka_unit_test(second_derivatives_f32),  cmocka_unit_test(second_derivatives_f64),
    cmocka_unit_test(implicit_derivative_f32), cmocka_unit_test(implicit_derivative_f64),
    cmocka_unit_test(gradient_check),          cmocka_unit_test(raw_layout_of_two_matrices),
  };
  if (!test_open(&ctx, &q)) return 77;
  int rc = TEST_MAIN(tests);
  test_close(ctx, q);
  return rc;
}
