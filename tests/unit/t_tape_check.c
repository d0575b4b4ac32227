/* t_tape_check.c - what makes gradients trustworthy, on a device: bad ones are found and named (every dtype, place and
   policy, over steps and resets), moe_gradcheck tells right rules from wrong ones and leaves its inputs alone, and
   moe_hvp. */
#include "tape_fixture.h"

#include "core/tape.h"

#include <math.h>

static moe_tensor put(int64_t dtype, const double *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&m, dtype, T_PACKED, rank, shape);
  const int64_t n = moe_tensor_count(&t);
  num *numbers = t_nums(&m, n + 1);
  for (int64_t i = 0; i < n; i++) numbers[i].v = values[i];
  t_put(&m, &t, numbers);
  t_upload(&m);
  assert_int_equal(m.status, MOE_OK);
  return t;
}
#define PUT(dtype, ...)                                                                                                \
  put(dtype, (const double[]){ __VA_ARGS__ },                                                                          \
      SHAPE((int64_t)(sizeof((const double[]){ __VA_ARGS__ }) / sizeof(double))))
/* n elements of `value`. */
static moe_tensor filled(int64_t dtype, double value, int64_t n)
{
  moe_tensor t = t_tensor(&m, dtype, T_PACKED, SHAPE(n));
  t_upload(&m);
  OK(moe_tensor_fill(q, &t, value));
  return t;
}
static moe_tape *tape_of(int64_t policy, double limit, int64_t activations)
{
  moe_tape_desc desc = moe_tape_desc_init();
  moe_tape *t;
  desc.block = 1 << 16;
  desc.health_policy = policy;
  desc.health_limit = limit;
  desc.health_activations = activations;
  OK(moe_tape_create(&t, q, &desc));
  return t;
}
static moe_tape_health_info health_of(moe_tape *t)
{
  moe_tape_health_info h = moe_tape_health_info_init();
  OK(moe_tape_health(&h, t));
  return h;
}
static void assert_health(moe_tape_health_info h, int64_t bad, const char *name, int64_t input, int64_t index)
{
  if (h.bad != bad || strcmp(h.name, name) || h.input != input || h.index != index)
    fail_msg("%lld bad, first of \"%s\", input %lld, output %lld, element %lld; wanted %lld of \"%s\", input %lld, "
             "element %lld",
             (long long)h.bad, h.name, (long long)h.input, (long long)h.output, (long long)h.index, (long long)bad,
             name, (long long)input, (long long)index);
}
static void assert_healthy(moe_tape *t)
{
  assert_health(health_of(t), 0, "", 0, 0);
}

/* ---- health: what is bad ------------------------------------------------------------------------------------------- */
/* The neighbours of the limit in a dtype: the smallest value that is bad, the largest that is not. */
static double just_bad(double limit, int64_t dtype)
{
  double x = ref_round(limit, dtype);
  while (x < limit) x = ref_round(x + 2 * ref_rounding(limit, dtype), dtype);
  return x;
}
static double just_good(double limit, int64_t dtype)
{
  double x = ref_round(limit, dtype);
  if (isinf(x)) return 65504;
  while (!(x < limit)) x = ref_round(x - 2 * ref_rounding(limit, dtype), dtype);
  return x;
}

/* d sum(x c)/dx = c: element `at` of n is `value`. */
static moe_value product_with(moe_tape *t, int64_t dtype, double value, int64_t at, int64_t n, const moe_tensor *grad)
{
  double *c = t_host(&m, n, sizeof *c);
  for (int64_t i = 0; i < n; i++) c[i] = i % 2 ? -0.5 : 2;
  c[at] = value;
  moe_tensor tx = filled(dtype, 1, n), tc = put(dtype, c, SHAPE(n));
  moe_value x = grad ? moe_tape_param(t, &tx, grad) : moe_tape_leaf(t, &tx, 1);
  return moe_tape_sum(t, moe_tape_mul(t, x, moe_tape_leaf(t, &tc, 0)));
}

static void every_bad_value_in_every_place(void **state)
{
  static const int64_t dtypes[] = { MOE_F64, MOE_F32, MOE_BF16, MOE_F16 }, sizes[] = { 1, 5, 4099 };
  static const double limits[] = { 0, 100 };
  (void)state;
  for (int l = 0; l < 2; l++) {
    moe_tape *t = tape_of(MOE_HEALTH_POLICY_COUNT, limits[l], 0);
    const double limit = l ? 100 : 1e10;
    for (int d = 0; d < 4; d++) {
      const double bad = just_bad(limit, dtypes[d]), good = just_good(limit, dtypes[d]);
      const double kinds[] = { NAN, INFINITY, -INFINITY, bad, -bad, good, -good };
      if (dtypes[d] == MOE_F64 && !test_has_fp64(ctx)) continue;
      for (int kind = 0; kind < 7; kind++)
        for (int s = 0; s < 3; s++)
          for (int last = 0; last < 2; last++) {
            const int64_t n = sizes[s], at = last ? n - 1 : n / 3;
            moe_tape_reset(t);
            OK(moe_tape_backward(t, product_with(t, dtypes[d], kinds[kind], at, n, NULL), none, 0));
            if (kind < 5) assert_health(health_of(t), 1, "mul", 0, at);
            else assert_healthy(t);
          }
      t_memory_free(&m);
    }
    moe_tape_free(t);
  }
}

/* Into a parameter's tensor, of its own dtype; the operation's own kernel (a product of matrices), or a copy. */
static void in_a_parameters_tensor(void **state)
{
  static const double bad[] = { 1, 2, INFINITY, 4, 5, 6 };
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_COUNT, 0, 0);
  (void)state;
  for (int wide = 0; wide < 2; wide++) {
    moe_tensor grad = t_tensor(&m, wide ? MOE_F32 : MOE_BF16, T_ODD, SHAPE(7));
    OK(moe_tape_backward(t, product_with(t, MOE_BF16, -INFINITY, 3, 7, &grad), none, 0));
    assert_health(health_of(t), 1, "mul", 0, 3);
    moe_tape_reset(t);
  }
  moe_tensor tx = put(MOE_F32, bad, SHAPE(3, 2)), tw = put(MOE_F32, bad, SHAPE(2, 3)),
             grad = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(2, 3));
  t_upload(&m);
  moe_value x = moe_tape_leaf(t, &tx, 0), w = moe_tape_param(t, &tw, &grad);
  OK(moe_tape_backward(t, moe_tape_sum(t, moe_tape_matmul(t, x, w, 0, 0)), none, 0));
  assert_health(health_of(t), 1, "matmul", 1, 0); /* x' 1: its first row, [1 + inf + 5] */
  moe_tape_free(t);
}

/* ---- health: who did it ---------------------------------------------------------------------------------------------- */
/* Operations before and after the culprit: its consumers in the walk get NaN from it, and are not blamed. */
static void the_culprit_is_named_not_its_consumers(void **state)
{
  double values[40];
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_FAIL, 0, 0);
  (void)state;
  for (int i = 0; i < 40; i++) values[i] = i == 17 ? 0 : 1 + i;
  moe_tensor tx = put(MOE_F32, values, SHAPE(40));
  moe_value x = moe_tape_leaf(t, &tx, 1);
  moe_value before = moe_tape_scale(t, moe_tape_neg(t, moe_tape_neg(t, x)), 2); /* nodes 0 to 2 */
  moe_value y = moe_tape_exp(t, moe_tape_tanh(t, moe_tape_sqrt(t, moe_tape_log(t, before))));
  (void)y;
  moe_value loss = moe_tape_sum(t, moe_tape_exp(t, moe_tape_scale(t, moe_tape_log(t, before), 3)));
  OK(moe_tape_backward(t, loss, none, 0));
  FAILS(MOE_ERR_DATA, "moe_queue_wait: gradient of log, input 0, element 17 is not finite or >= 1e+10 (tape node 7)",
        moe_queue_wait(q));
  OK(moe_queue_wait(q)); /* told once */
  moe_tape_health_info h = health_of(t);
  assert_health(h, 4, "log", 0, 17); /* log, scale, neg, neg */
  assert_int_equal(h.node, 7);
  assert_int_equal(h.output, -1);
  assert_healthy(t);
  moe_tape_free(t);
}

/* Two operations give to one parameter: the second is blamed for what it adds, the first is not. */
static void of_two_that_add_to_one_gradient(void **state)
{
  (void)state;
  for (int direct = 0; direct < 2; direct++)
    for (int first = 0; first < 2; first++) {
      moe_tape *t = tape_of(MOE_HEALTH_POLICY_COUNT, 0, 0);
      moe_tensor tw = PUT(MOE_F32, 1, 2, 3), good = PUT(MOE_F32, 1, 2, 3), bad = PUT(MOE_F32, 1, NAN, 3),
                 grad = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(3));
      moe_value w = direct ? moe_tape_param(t, &tw, &grad) : moe_tape_leaf(t, &tw, 1);
      moe_value a = moe_tape_sum(t, moe_tape_mul(t, w, moe_tape_leaf(t, first ? &good : &bad, 0)));
      moe_value b = moe_tape_sum(t, moe_tape_div(t, w, moe_tape_leaf(t, first ? &bad : &good, 0)));
      OK(moe_tape_backward(t, moe_tape_add(t, a, b), none, 0)); /* div, recorded last, is walked first */
      assert_health(health_of(t), first ? 2 : 1, first ? "div" : "mul", 0, 1);
      moe_tape_free(t);
    }
}

/* Each part is finite; their sum, in f16, is not. */
static void sums_that_overflow(void **state)
{
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_COUNT, 0, 0);
  moe_tensor tx = PUT(MOE_F16, 1), tc = PUT(MOE_F16, 60000);
  (void)state;
  moe_value x = moe_tape_leaf(t, &tx, 1), c = moe_tape_leaf(t, &tc, 0);
  moe_value y = moe_tape_add(t, moe_tape_mul(t, x, c), moe_tape_mul(t, x, c));
  OK(moe_tape_backward(t, moe_tape_sum(t, y), none, 0));
  assert_health(health_of(t), 1, "mul", 0, 0);
  moe_tape_free(t);
}

static void seeds_expansions_and_other_names(void **state)
{
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_COUNT, 0, 0);
  moe_tensor tx = PUT(MOE_F32, 1, NAN, 3), good = PUT(MOE_F32, 1, 2, 3), ones = PUT(MOE_F32, 1, 1, 1);
  (void)state;
  moe_value x = moe_tape_leaf(t, &good, 1), y = moe_tape_neg(t, x);
  OK(moe_tape_backward(t, y, moe_tape_leaf(t, &tx, 0), 0));
  moe_tape_health_info h = health_of(t);
  assert_health(h, 2, "seed", 0, 1);
  assert_int_equal(h.node, -1);
  moe_tape_reset(t);
  x = moe_tape_leaf(t, &tx, 1);
  OK(moe_tape_backward(t, moe_tape_silu(t, moe_tape_neg(t, x)), moe_tape_leaf(t, &ones, 0), 0));
  h = health_of(t);
  assert_true(h.bad > 0 && h.node == 1 && h.index == 1);
  assert_string_equal(h.name, "silu: mul");
  /* Only what is wanted is computed, and looked at. */
  moe_tape_reset(t);
  x = moe_tape_leaf(t, &good, 1);
  moe_value loss = moe_tape_sum(t, moe_tape_mul(t, x, moe_tape_leaf(t, &tx, 1))), g;
  OK(moe_tape_gradients(&g, t, &loss, NULL, 1, &x, 1, 0));
  assert_health(health_of(t), 1, "mul", 0, 1);
  /* Gradients of gradients. */
  moe_tape_reset(t);
  static const double at_zero[] = { 0, 1 };
  moe_tensor edge = put(MOE_F32, at_zero, SHAPE(2));
  x = moe_tape_leaf(t, &edge, 1);
  loss = moe_tape_sum(t, moe_tape_pow(t, x, 1.5));
  OK(moe_tape_gradients(&g, t, &loss, NULL, 1, &x, 1, MOE_CREATE_GRAPH));
  assert_healthy(t);
  loss = moe_tape_sum(t, g);
  OK(moe_tape_gradients(&g, t, &loss, NULL, 1, &x, 1, 0)); /* 0.75 / sqrt(0) */
  h = health_of(t);
  assert_true(h.bad > 0 && h.index == 0);
  assert_string_equal(h.name, "pow");
  moe_tape_free(t);
}

/* A layer whose weights are so large that a gradient passes the limit. */
static void in_a_layers_gradient(void **state)
{
  moe_selection_options selection = moe_selection_options_init();
  moe_weights_options weights = moe_weights_options_init();
  moe_activation activation = moe_activation_init();
  moe_layer_desc desc = moe_layer_desc_init();
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_tape_moe options = moe_tape_moe_init();
  moe_layer *layer;
  (void)state;
  selection.kind = MOE_SELECT_SOFTMAX;
  selection.top_k = 2;
  weights.scoring = MOE_SOFTMAX;
  weights.renormalize = 1;
  weights.scale = 1;
  activation.kind = MOE_SILU;
  activation.gated = 1;
  desc.d_model = desc.d_ff = 4;
  desc.n_experts = 3;
  desc.dtype = MOE_F32;
  desc.selection = &selection;
  desc.weights = &weights;
  desc.activation = &activation;
  OK(moe_layer_create(&layer, ctx, &desc));
  OK(moe_layer_measure(&bytes, layer, 3, 1));
  OK(moe_span_alloc(&options.params, ctx, bytes.params));
  OK(moe_span_alloc(&options.grads, ctx, bytes.grads));
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_FAIL, 0, 0);
  moe_tensor x = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(3, 4));
  t_upload(&m);
  OK(moe_tensor_normal(q, &x, 1, 1, 1));
  for (int large = 0; large < 2; large++) {
    moe_tensor up;
    OK(moe_layer_init(layer, q, options.params, 7, 0.4));
    OK(moe_layer_param(&up, NULL, NULL, layer, options.params, (moe_span){ 0 }, 1));
    if (large) OK(moe_tensor_fill(q, &up, 1e11));
    moe_tape_reset(t);
    moe_value y = moe_tape_moe_layer(t, layer, moe_tape_leaf(t, &x, 1), &options, NULL);
    OK(moe_tape_backward(t, moe_tape_sum(t, y), none, 0));
    if (!large) OK(moe_queue_wait(q));
    else FAILS(MOE_ERR_DATA, "gradient of moe_layer, input ", moe_queue_wait(q));
  }
  moe_tape_free(t);
  moe_span_free(ctx, &options.params);
  moe_span_free(ctx, &options.grads);
  moe_layer_free(layer);
}

/* ---- health: when it is told ------------------------------------------------------------------------------------------- */
/* One good step, one with a bad element, one with nothing but NaN; memory is used again each time, and filled. */
static void steps_and_resets_before_the_wait(void **state)
{
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_FAIL, 0, 0);
  moe_tensor good = PUT(MOE_F32, 1, 2, 3), zero = PUT(MOE_F32, 1, 2, 0), bad = PUT(MOE_F32, NAN, NAN, NAN);
  const moe_tensor *const steps[] = { &good, &zero, &bad, &good };
  (void)state;
  for (int s = 0; s < 4; s++) {
    moe_value x = moe_tape_leaf(t, steps[s], 1);
    OK(moe_tape_backward(t, moe_tape_sum(t, moe_tape_neg(t, s == 1 ? moe_tape_log(t, x) : moe_tape_exp(t, x))), none,
                         0));
    moe_tape_reset(t);
    moe_value fill = moe_tape_leaf(t, &good, 1);
    for (int i = 0; i < 50; i++) fill = moe_tape_scale(t, fill, 1.01);
    OK(moe_tape_status(t));
    moe_tape_reset(t);
  }
  FAILS(MOE_ERR_DATA, "gradient of log, input 0, element 2 ", moe_queue_wait(q));
  assert_health(health_of(t), 2, "log", 0, 2); /* and exp in the third step */
  /* The wait tells what came since the last wait, moe_tape_health since the last moe_tape_health. */
  for (int s = 0; s < 2; s++) {
    moe_value x = moe_tape_leaf(t, &bad, 1);
    OK(moe_tape_backward(t, moe_tape_sum(t, s ? moe_tape_sqrt(t, x) : moe_tape_exp(t, x)), none, 0));
    FAILS(MOE_ERR_DATA, s ? "gradient of sqrt, input 0, element 0 " : "gradient of exp, input 0, element 0 ",
          moe_queue_wait(q));
  }
  assert_health(health_of(t), 2, "exp", 0, 0);
  moe_tape_free(t);
  OK(moe_queue_wait(q));
}

/* Far more than one launch takes: the number is right, and the first. */
static void thousands_of_gradients(void **state)
{
  enum { N = 3000, AT = 1234 };
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_COUNT, 0, 0);
  moe_tensor tx = PUT(MOE_F32, 1, 2, 3), bad = PUT(MOE_F32, 1, 2, INFINITY);
  (void)state;
  moe_value x = moe_tape_leaf(t, &tx, 1), y = x, c = moe_tape_leaf(t, &bad, 0);
  for (int i = 0; i < N; i++) y = i == AT ? moe_tape_mul(t, y, c) : moe_tape_neg(t, y);
  OK(moe_tape_backward(t, moe_tape_sum(t, y), none, 0));
  moe_tape_health_info h = health_of(t);
  assert_health(h, AT + 1, "mul", 0, 2);
  assert_int_equal(h.node, AT);
  moe_tape_free(t);
}

static void policies(void **state)
{
  (void)state;
  for (int64_t policy = 0; policy < 3; policy++) {
    moe_tape *t = tape_of(policy, 0, 0);
    moe_tape_health_info h = moe_tape_health_info_init();
    OK(moe_tape_backward(t, product_with(t, MOE_F32, NAN, 1, 3, NULL), none, 0));
    if (policy == MOE_HEALTH_POLICY_FAIL) FAILS(MOE_ERR_DATA, "gradient of mul", moe_queue_wait(q));
    OK(moe_queue_wait(q));
    if (policy == MOE_HEALTH_POLICY_OFF) FAILS(MOE_ERR_STATE, "health_policy is off", moe_tape_health(&h, t));
    else assert_health(health_of(t), 1, "mul", 0, 1);
    moe_tape_free(t);
  }
  /* Beside the health word, and with several tapes on the queue. */
  static const int32_t outside[] = { 0, 7 };
  moe_tape *a = tape_of(MOE_HEALTH_POLICY_FAIL, 0, 0), *b = tape_of(MOE_HEALTH_POLICY_FAIL, 0, 0);
  moe_tensor rows = put(MOE_F32, (const double[]){ 1, 2 }, SHAPE(2, 1)),
             ids = t_tensor(&m, MOE_I32, T_PACKED, SHAPE(2));
  t_put_ints(&m, &ids, outside);
  t_upload(&m);
  (void)moe_tape_gather_rows(a, moe_tape_leaf(a, &rows, 1), moe_tape_leaf(a, &ids, 0));
  OK(moe_tape_backward(b, product_with(b, MOE_F32, NAN, 1, 3, NULL), none, 0));
  FAILS(MOE_ERR_DATA, "(tape node 0); bad data since the last wait: [an id out of range", moe_queue_wait(q));
  OK(moe_tape_backward(a, product_with(a, MOE_F32, NAN, 0, 3, NULL), none, 0));
  moe_tape_free(a); /* takes what it knows with it */
  OK(moe_queue_wait(q));
  assert_health(health_of(b), 1, "mul", 0, 1);
  moe_tape_free(b);
}

static void results_are_looked_at_where_asked(void **state)
{
  moe_tensor tx = PUT(MOE_F32, 1, -2, 3);
  (void)state;
  for (int on = 0; on < 2; on++) {
    moe_tape *t = tape_of(MOE_HEALTH_POLICY_FAIL, 0, on);
    moe_value y = moe_tape_exp(t, moe_tape_log(t, moe_tape_neg(t, moe_tape_leaf(t, &tx, 1))));
    OK(moe_tape_status(t));
    if (on)
      FAILS(MOE_ERR_DATA, "result of log, output 0, element 0 is not finite or >= 1e+10 (tape node 1)",
            moe_queue_wait(q));
    else OK(moe_queue_wait(q));
    if (on) {
      moe_tape_health_info h = health_of(t);
      assert_health(h, 2, "log", -1, 0); /* and exp of it */
      assert_int_equal(h.output, 0);
    }
    /* A reset, and work in the same memory, come before the wait. */
    moe_tape_reset(t);
    y = moe_tape_log(t, moe_tape_leaf(t, &tx, 1));
    moe_tape_reset(t);
    for (int i = 0; i < 5; i++) y = moe_tape_leaf(t, &tx, 1), y = moe_tape_neg(t, y);
    if (on) FAILS(MOE_ERR_DATA, "result of log, output 0, element 1 ", moe_queue_wait(q));
    else OK(moe_queue_wait(q));
    /* Not recorded: constants, regions without gradients, the inside of operations. */
    moe_tape_reset(t);
    (void)moe_tape_log(t, moe_tape_leaf(t, &tx, 0));
    (void)moe_tape_set_recording(t, 0);
    (void)moe_tape_log(t, moe_tape_leaf(t, &tx, 1));
    (void)moe_tape_set_recording(t, 1);
    (void)moe_tape_softmax(t, moe_tape_leaf(t, &tx, 1), 0);
    OK(moe_tape_status(t));
    OK(moe_queue_wait(q));
    moe_tape_free(t);
    /* What backward computes on its way to gradients is no result, recorded or not. */
    t = tape_of(MOE_HEALTH_POLICY_COUNT, 2, on);
    moe_value x = moe_tape_leaf(t, &tx, 1);
    OK(moe_tape_backward(t, moe_tape_sum(t, moe_tape_scale(t, moe_tape_pow(t, x, -3), 0.1)), none, MOE_CREATE_GRAPH));
    assert_healthy(t); /* 0.1 (-3 x^-4), by way of -3 */
    moe_tape_free(t);
  }
}

/* Memory that is given back as a stack: what lies above the mark is looked at before others write there. */
static void memory_that_is_given_back(void **state)
{
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_COUNT, 0, 0);
  moe_tensor tx = PUT(MOE_F32, 1, 2), bad = PUT(MOE_F32, 1, NAN);
  const moe_span from = { bad.handle, bad.offset, 8 };
  (void)state;
  moe_value x = moe_tape_leaf(t, &tx, 1);
  (void)moe_tape_neg(t, x);
  OK(moe_tape_status(t));
  struct moe__mark mark = moe__tape_mark(t);
  moe_tensor g = moe__tape_flat(t, MOE_F32, 2);
  OK(moe_span_copy(q, (moe_span){ g.handle, g.offset, 8 }, from, 8));
  moe__health_watch(t, t->nodes[0], x, &g);
  moe__tape_rewind(t, mark);
  g = moe__tape_flat(t, MOE_F32, 2);
  OK(moe_tensor_fill(q, &g, 0));
  assert_health(health_of(t), 1, "neg", 0, 1);
  moe_tape_free(t);
}

/* In a segment that is computed again the gradients live in memory of its own, which the next one takes over. */
static moe_status segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out, int64_t n_out)
{
  (void)n_in;
  (void)n_out;
  out[0] = moe_tape_neg(t, user ? moe_tape_log(t, moe_tape_neg(t, in[0])) : moe_tape_exp(t, moe_tape_neg(t, in[0])));
  return MOE_OK;
}
static void recomputed_segments(void **state)
{
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_FAIL, 0, 0);
  moe_tensor tx = PUT(MOE_F32, -1, -2, 0, -3);
  (void)state;
  moe_value x = moe_tape_leaf(t, &tx, 1), y, z;
  int yes = 1;
  OK(moe_tape_recompute(&y, 1, t, segment, NULL, &x, 1));
  OK(moe_tape_recompute(&z, 1, t, segment, &yes, &x, 1));
  OK(moe_tape_backward(t, moe_tape_sum(t, moe_tape_add(t, y, z)), none, 0));
  FAILS(MOE_ERR_DATA, "gradient of recomputed segment: log, input 0, element 2 is not finite or >= 1e+10 (tape node 1)",
        moe_queue_wait(q));
  assert_health(health_of(t), 3, "recomputed segment: log", 0, 2); /* then neg, and the other segment's neg, in a sum */
  moe_tape_free(t);
}

/* The caller's function is named as the caller names it.  Where it stops the walk, what came before is told; its
   memory may be gone by then. */
static moe_status copy_forward(void *user, const moe_tape_call *c)
{
  (void)user;
  c->out[0] = moe_tape_scale(c->tape, c->in[0], 1);
  return MOE_OK;
}
static moe_status stop_or_divide(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  if (!user) return MOE_ERR_DATA;
  din[0] = moe_tape_div(c->tape, dout[0], moe_tape_scale(c->tape, dout[0], 0));
  return MOE_OK;
}
static void functions_of_the_caller(void **state)
{
  moe_tape *t = tape_of(MOE_HEALTH_POLICY_COUNT, 0, 0);
  moe_tensor tx = PUT(MOE_F32, 1, 2, 3), bad = PUT(MOE_F32, 1, 1, NAN);
  (void)state;
  for (int divides = 0; divides < 2; divides++) {
    char name[] = "the caller's";
    moe_function f = moe_function_init();
    moe_value x = moe_tape_leaf(t, &tx, 1), y;
    f.name = name;
    f.forward = copy_forward;
    f.backward = stop_or_divide;
    f.user = divides ? &f : NULL;
    f.n_out = 1;
    OK(moe_tape_custom(&y, t, &f, &x, 1));
    memset(name, '-', sizeof name - 1);
    if (divides) {
      OK(moe_tape_backward(t, moe_tape_sum(t, y), none, 0));
      moe_tape_reset(t);
      assert_health(health_of(t), 1, "the caller's", 0, 0);
    } else {
      moe_value loss = moe_tape_sum(t, moe_tape_mul(t, y, moe_tape_leaf(t, &bad, 0)));
      FAILS(MOE_ERR_DATA, "the caller's", moe_tape_backward(t, loss, none, 0));
      moe_tape_reset(t);
      assert_health(health_of(t), 1, "mul", 0, 2);
    }
  }
  moe_tape_free(t);
}

static void descriptors(void **state)
{
  moe_tape_desc desc = moe_tape_desc_init();
  moe_tape_health_info h = moe_tape_health_info_init();
  moe_tape *t = (moe_tape *)&desc;
  (void)state;
  desc.health_policy = 3;
  FAILS(MOE_ERR_INVALID, "moe_tape_create: health_policy 3", moe_tape_create(&t, q, &desc));
  assert_null(t);
  desc.health_policy = -1;
  FAILS(MOE_ERR_INVALID, "health_policy -1", moe_tape_create(&t, q, &desc));
  desc.health_policy = MOE_HEALTH_POLICY_COUNT;
  desc.health_limit = -1;
  FAILS(MOE_ERR_INVALID, "moe_tape_create: health_limit -1", moe_tape_create(&t, q, &desc));
  desc.health_limit = (double)NAN;
  FAILS(MOE_ERR_INVALID, "health_limit nan", moe_tape_create(&t, q, &desc));
  desc.health_limit = (double)INFINITY; /* only what is not finite */
  desc.health_activations = 2;
  FAILS(MOE_ERR_INVALID, "health_activations 2", moe_tape_create(&t, q, &desc));
  desc.health_activations = 0;
  OK(moe_tape_create(&t, q, &desc));
  OK(moe_tape_backward(t, product_with(t, MOE_F32, 3e38, 1, 3, NULL), none, 0));
  assert_healthy(t);
  OK(moe_tape_backward(t, product_with(t, MOE_F32, INFINITY, 1, 3, NULL), none, 0));
  FAILS(MOE_ERR_INVALID, "moe_tape_health: out is NULL", moe_tape_health(NULL, t));
  FAILS(MOE_ERR_INVALID, "moe_tape_health: tape is NULL", moe_tape_health(&h, NULL));
  h.size = 3;
  FAILS(MOE_ERR_INVALID, "moe_tape_health: out->size", moe_tape_health(&h, t));
  assert_health(health_of(t), 1, "mul", 0, 1); /* nothing was lost */
  moe_tape_free(t);
}

/* ---- gradcheck --------------------------------------------------------------------------------------------------------- */
static moe_value squares(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  (void)user;
  (void)n;
  return moe_tape_mul(t, in[0], in[0]);
}
/* x times a constant x: a rule that forgets half of the derivative. */
static moe_value half_of_square(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  (void)user;
  (void)n;
  return moe_tape_mul(t, in[0], moe_tape_detach(t, in[0]));
}
/* Right but for element 2 of input 1. */
static moe_value wrong_in_one_place(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  const moe_value rest = moe_tape_slice(t, in[1], 0, 0, 2), one = moe_tape_slice(t, in[1], 0, 2, 3);
  const moe_value cubes = moe_tape_pow(t, moe_tape_concat(t, (const moe_value[]){ in[0], rest }, 2, 0), 3);
  (void)user;
  (void)n;
  return moe_tape_concat(t, (const moe_value[]){ cubes, half_of_square(NULL, t, &one, 1) }, 2, 0);
}

static void gradcheck_of_right_and_wrong_rules(void **state)
{
  moe_gradcheck_result r = moe_gradcheck_result_init();
  (void)state;
  NEEDS_FP64;
  moe_tensor in[2] = { PUT(MOE_F64, 1.1, -2.2, 3.3, 0.7), PUT(MOE_F64, 0.4, -1.5, 1.2) };
  OK(moe_gradcheck(&r, q, squares, NULL, in, 1, NULL));
  assert_int_equal(r.checked, 4);
  assert_true(r.error < 1e-8);
  FAILS(MOE_ERR_CHECK, "error 0.3333 > 0.0001", moe_gradcheck(&r, q, half_of_square, NULL, in, 1, NULL));
  assert_near(r.error, 1.0 / 3, 1e-9);
  assert_near(r.numeric, 2 * r.analytic, 1e-7);
  FAILS(MOE_ERR_CHECK,
        "moe_gradcheck: input 1, element 2: ", moe_gradcheck(&r, q, wrong_in_one_place, NULL, in, 2, NULL));
  assert_int_equal(r.checked, 7);
  assert_int_equal(r.input, 1);
  assert_int_equal(r.index, 2);
  FAILS(MOE_ERR_CHECK, "input 1, element 2", moe_gradcheck(NULL, q, wrong_in_one_place, NULL, in, 2, NULL));
  /* The threshold, and the step, are the caller's. */
  moe_gradcheck_desc desc = moe_gradcheck_desc_init();
  desc.threshold = 0.34;
  OK(moe_gradcheck(&r, q, half_of_square, NULL, in, 1, &desc));
  assert_near(r.error, 1.0 / 3, 1e-9);
  desc.threshold = 0;
  desc.step = 0.5; /* of x^3: the differences are off by step^2 */
  FAILS(MOE_ERR_CHECK, "input 1", moe_gradcheck(&r, q, wrong_in_one_place, NULL, in, 2, &desc));
  /* Second derivatives: of this wrong rule 0 for 1. */
  desc = moe_gradcheck_desc_init();
  desc.second = 1;
  OK(moe_gradcheck(&r, q, squares, NULL, in, 1, &desc));
  FAILS(MOE_ERR_CHECK, "error 1 > 0.0001", moe_gradcheck(&r, q, half_of_square, NULL, in, 1, &desc));
  assert_near(r.analytic, 0, 0);
}

/* Elements from the first to the last, evenly spread. */
static void gradcheck_of_some_elements(void **state)
{
  static const struct {
    int64_t count, most, checked;
  } cases[] = { { 10, 0, 10 }, { 10, 3, 3 }, { 10, 1, 1 }, { 10, 10, 10 }, { 10, 100, 10 }, { 1, 2, 1 }, { 0, 2, 0 } };
  (void)state;
  NEEDS_FP64;
  for (int c = 0; c < 7; c++) {
    moe_gradcheck_desc desc = moe_gradcheck_desc_init();
    moe_gradcheck_result r = moe_gradcheck_result_init();
    moe_tensor in = t_tensor(&m, MOE_F64, T_PACKED, SHAPE(cases[c].count));
    t_put(&m, &in, t_uniform(&m, cases[c].count, MOE_F64, 1));
    t_upload(&m);
    desc.elements = cases[c].most;
    OK(moe_gradcheck(&r, q, squares, NULL, &in, 1, &desc));
    assert_int_equal(r.checked, cases[c].checked);
  }
  /* The last one is among them: there the rule is wrong. */
  moe_gradcheck_desc desc = moe_gradcheck_desc_init();
  moe_gradcheck_result r = moe_gradcheck_result_init();
  moe_tensor in[2] = { PUT(MOE_F64, 1.1, -2.2, 3.3, 0.7), PUT(MOE_F64, 0.4, -1.5, 1.2) };
  desc.elements = 2;
  FAILS(MOE_ERR_CHECK, "input 1, element 2", moe_gradcheck(&r, q, wrong_in_one_place, NULL, in, 2, &desc));
  assert_int_equal(r.checked, 4);
}

static moe_value fails_later(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  int *left = user;
  (void)n;
  return (*left)-- ? moe_tape_exp(t, in[0]) : moe_tape_matmul(t, in[0], in[0], 0, 0);
}
static moe_value gives_nothing(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  (void)user;
  (void)t;
  (void)in;
  (void)n;
  return none;
}
static moe_value gives_a_constant(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  (void)user;
  (void)n;
  return moe_tape_detach(t, in[0]);
}
static moe_value gives_a_linear_one(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  (void)user;
  (void)n;
  return moe_tape_scale(t, in[0], 3);
}

/* Bit for bit what they were, after success, a found error and a failure. */
static void gradcheck_puts_inputs_back(void **state)
{
  static const double values[] = { 1.0 / 3, -0.0, 0x1p-1060, 5 };
  double now[4];
  moe_gradcheck_result r = moe_gradcheck_result_init();
  (void)state;
  NEEDS_FP64;
  moe_tensor in = put(MOE_F64, values, SHAPE(4)), odd = PUT(MOE_F64, NAN, INFINITY, 3);
  const moe_span where = { in.handle, in.offset, sizeof now };
  OK(moe_gradcheck(NULL, q, squares, NULL, &in, 1, NULL));
  OK(moe_span_read(q, now, where, sizeof now));
  assert_memory_equal(now, values, sizeof now);
  FAILS(MOE_ERR_CHECK, "", moe_gradcheck(NULL, q, half_of_square, NULL, &in, 1, NULL));
  OK(moe_span_read(q, now, where, sizeof now));
  assert_memory_equal(now, values, sizeof now);
  for (int after = 0; after < 4; after++) {
    int left = after;
    FAILS(MOE_ERR_INVALID, "moe_gradcheck: moe_tape_matmul: wanted matrices",
          moe_gradcheck(&r, q, fails_later, &left, &in, 1, NULL));
    OK(moe_span_read(q, now, where, sizeof now));
    assert_memory_equal(now, values, sizeof now);
    assert_int_equal(r.checked, 0);
  }
  /* What cannot be told is no pass. */
  FAILS(MOE_ERR_CHECK, "input 0, element 0", moe_gradcheck(&r, q, squares, NULL, &odd, 1, NULL));
  assert_true(isinf(r.error));
  FAILS(MOE_ERR_INVALID, "the function's result: the null value",
        moe_gradcheck(&r, q, gives_nothing, NULL, &in, 1, NULL));
  /* Against a constant everything but 0 is wrong. */
  FAILS(MOE_ERR_CHECK, "0 by the tape", moe_gradcheck(&r, q, gives_a_constant, NULL, &in, 1, NULL));
  moe_gradcheck_desc desc = moe_gradcheck_desc_init();
  desc.second = 1;
  OK(moe_gradcheck(&r, q, gives_a_constant, NULL, &in, 1, &desc));
  OK(moe_gradcheck(&r, q, gives_a_linear_one, NULL, &in, 1, &desc));
  assert_int_equal(r.checked, 4);
}

static void gradcheck_refusals(void **state)
{
  moe_gradcheck_desc desc = moe_gradcheck_desc_init();
  moe_gradcheck_result r = moe_gradcheck_result_init();
  moe_tensor narrow = PUT(MOE_F32, 1, 2), in = t_tensor(&m, MOE_F64, T_PACKED, SHAPE(2)),
             strided = t_tensor(&m, MOE_F64, T_STEP, SHAPE(2)), absent = { 0 };
  (void)state;
  if (!test_has_fp64(ctx)) {
    FAILS(MOE_ERR_UNSUPPORTED, "has no fp64", moe_gradcheck(&r, q, squares, NULL, &in, 1, NULL));
    return;
  }
  FAILS(MOE_ERR_INVALID, "moe_gradcheck: queue is NULL", moe_gradcheck(&r, NULL, squares, NULL, &in, 1, NULL));
  FAILS(MOE_ERR_INVALID, "moe_gradcheck: function is NULL", moe_gradcheck(&r, q, NULL, NULL, &in, 1, NULL));
  FAILS(MOE_ERR_INVALID, "moe_gradcheck: inputs is NULL", moe_gradcheck(&r, q, squares, NULL, NULL, 1, NULL));
  FAILS(MOE_ERR_INVALID, "moe_gradcheck: n 0", moe_gradcheck(&r, q, squares, NULL, &in, 0, NULL));
  FAILS(MOE_ERR_INVALID, "inputs[0] is not a packed f64", moe_gradcheck(&r, q, squares, NULL, &narrow, 1, NULL));
  FAILS(MOE_ERR_INVALID, "inputs[0] is not a packed f64", moe_gradcheck(&r, q, squares, NULL, &strided, 1, NULL));
  FAILS(MOE_ERR_INVALID, "inputs[0] is not a packed f64", moe_gradcheck(&r, q, squares, NULL, &absent, 1, NULL));
#define WITH(field, value, text)                                                                                       \
  do {                                                                                                                 \
    desc = moe_gradcheck_desc_init();                                                                                  \
    desc.field = value;                                                                                                \
    FAILS(MOE_ERR_INVALID, text, moe_gradcheck(&r, q, squares, NULL, &in, 1, &desc));                                  \
  } while (0)
  WITH(step, -1, "step -1");
  WITH(step, (double)INFINITY, "step inf");
  WITH(step, (double)NAN, "step nan");
  WITH(threshold, -1, "threshold -1");
  WITH(threshold, (double)NAN, "threshold nan");
  WITH(second, 2, "second 2");
  WITH(elements, -1, "elements -1");
  WITH(flags, MOE_CREATE_GRAPH, "flags 0x1");
  WITH(size, 4, "desc->size");
  /* A device without fp64 says so. */
  const struct moe__dev_info *info = ctx->info;
  struct moe__dev_info less = *info;
  less.pub.fp64 = 0;
  ctx->info = &less;
  moe_status st = moe_gradcheck(&r, q, squares, NULL, &in, 1, NULL);
  ctx->info = info;
  assert_int_equal(st, MOE_ERR_UNSUPPORTED);
  assert_non_null(strstr(moe_last_error(), "has no fp64"));
}

/* ---- hvp ----------------------------------------------------------------------------------------------------------------- */
/* f = x'Ax/2 + sum(y^3): H is (A + A')/2 and diag(6y), and nothing between x and y. */
static void hessian_vector_products(void **state)
{
  static const double a[] = { 1, 2, 3, 0, 4, -1, 5, 2, 1 }, v[] = { 1, -2, 3 };
  moe_tape *t = tape_of(0, 0, 0);
  moe_value hv[3];
  double got[3];
  (void)state;
  moe_tensor ta = put(MOE_F32, a, SHAPE(3, 3)), tx = put(MOE_F32, (const double[]){ 2, 1, -1 }, SHAPE(1, 3)),
             tv = put(MOE_F32, v, SHAPE(1, 3)), ty = PUT(MOE_F32, 1, -2), tu = PUT(MOE_F32, 3, 5), tz = PUT(MOE_F32, 7);
  moe_value A = moe_tape_leaf(t, &ta, 0), x = moe_tape_leaf(t, &tx, 1), y = moe_tape_leaf(t, &ty, 1),
            z = moe_tape_leaf(t, &tz, 1);
  moe_value quadratic =
      moe_tape_scale(t, moe_tape_sum(t, moe_tape_matmul(t, moe_tape_matmul(t, x, A, 0, 0), x, 0, 1)), 0.5);
  moe_value f = moe_tape_add(t, moe_tape_add(t, quadratic, moe_tape_sum(t, moe_tape_pow(t, y, 3))), z);
  const moe_value wrt[] = { x, y, z },
                  along[] = { moe_tape_leaf(t, &tv, 0), moe_tape_leaf(t, &tu, 0), moe_tape_leaf(t, &tz, 0) };
  OK(moe_hvp(hv, t, f, wrt, along, 3, 0));
  OK(moe_tape_read(t, hv[0], got, 3));
  for (int i = 0; i < 3; i++) {
    double want = 0;
    for (int k = 0; k < 3; k++) want += (a[3 * i + k] + a[3 * k + i]) / 2 * v[k];
    assert_near(got[i], want, 0);
  }
  OK(moe_tape_read(t, hv[1], got, 2));
  assert_near(got[0], 6 * 1 * 3, 0);
  assert_near(got[1], 6 * -2 * 5, 0);
  assert_int_equal(hv[2].id, 0); /* z is linear */
  OK(moe_hvp(hv, t, z, &z, &along[2], 1, 0));
  assert_int_equal(hv[0].id, 0);
  /* Again, in another order: nothing of the first call is left. */
  OK(moe_hvp(hv, t, f, (const moe_value[]){ z, y }, (const moe_value[]){ along[2], along[1] }, 2, 0));
  assert_int_equal(hv[0].id, 0);
  OK(moe_tape_read(t, hv[1], got, 2));
  assert_near(got[0], 18, 0);
  assert_near(got[1], -60, 0);

#define REFUSED(text, call)                                                                                            \
  do {                                                                                                                 \
    moe_tape_reset(t);                                                                                                 \
    moe_value x2 = moe_tape_leaf(t, &ty, 1), loss = moe_tape_sum(t, moe_tape_mul(t, x2, x2)),                          \
              v2 = moe_tape_leaf(t, &tu, 0), v1 = moe_tape_leaf(t, &tz, 0);                                            \
    hv[0] = v1;                                                                                                        \
    FAILS(MOE_ERR_INVALID, text, call);                                                                                \
    FAILS(MOE_ERR_INVALID, text, moe_tape_status(t));                                                                  \
    (void)loss, (void)v2;                                                                                              \
  } while (0)
  REFUSED("moe_hvp: v[0] differs from wrt[0]", moe_hvp(hv, t, loss, &x2, &v1, 1, 0));
  assert_int_equal(hv[0].id, 0);
  REFUSED("moe_hvp: the null value", moe_hvp(hv, t, loss, &x2, &none, 1, 0));
  REFUSED("moe_hvp: hv, wrt and v", moe_hvp(hv, t, loss, &x2, &v2, 0, 0));
  REFUSED("moe_hvp: hv, wrt and v", moe_hvp(NULL, t, loss, &x2, &v2, 1, 0));
  REFUSED("moe_hvp: flags 0x1", moe_hvp(hv, t, loss, &x2, &v2, 1, MOE_CREATE_GRAPH));
  REFUSED("`of` has 2 elements", moe_hvp(hv, t, x2, &x2, &v2, 1, 0));
  FAILS(MOE_ERR_INVALID, "moe_hvp: tape is NULL", moe_hvp(hv, NULL, f, wrt, along, 3, 0));
  moe_tape_free(t);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    TEST(every_bad_value_in_every_place),
    TEST(in_a_parameters_tensor),
    TEST(the_culprit_is_named_not_its_consumers),
    TEST(of_two_that_add_to_one_gradient),
    TEST(sums_that_overflow),
    TEST(seeds_expansions_and_other_names),
    TEST(in_a_layers_gradient),
    TEST(steps_and_resets_before_the_wait),
    TEST(thousands_of_gradients),
    TEST(policies),
    TEST(results_are_looked_at_where_asked),
    TEST(memory_that_is_given_back),
    TEST(recomputed_segments),
    TEST(functions_of_the_caller),
    TEST(descriptors),
    TEST(gradcheck_of_right_and_wrong_rules),
    TEST(gradcheck_of_some_elements),
    TEST(gradcheck_puts_inputs_back),
    TEST(gradcheck_refusals),
    TEST(hessian_vector_products),
  };
  if (!test_open(&ctx, &q)) return 77;
  int rc = TEST_MAIN(tests);
  test_close(ctx, q);
  return rc;
}
