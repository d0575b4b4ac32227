/* t_tape_custom.c - the caller's own functions on the tape (values, first and second derivatives, errors, release), and
   recomputed segments: gradients equal to the last bit to those of the same operations without them, in less memory. */
#include "fixture.h"
#include "tape_fixture.h"

#include "core/tape.h"

/* A tensor that holds these values once sent. */
static moe_tensor put(const double *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&m, MOE_F32, T_PACKED, rank, shape);
  t_put(&m, &t, nums_of(&m, moe_tensor_count(&t), values));
  return t;
}
static moe_tensor random_tensor(double size, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&m, MOE_F32, T_PACKED, rank, shape);
  t_put(&m, &t, t_uniform(&m, moe_tensor_count(&t), MOE_F32, size));
  return t;
}
static moe_tensor gradient_tensor(int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&m, MOE_F32, T_PACKED, rank, shape); /* NaN */
  t_own(&m, &t);
  return t;
}

#define assert_values(v, ...)                                                                                          \
  do {                                                                                                                 \
    const double want_values_[] = { __VA_ARGS__ };                                                                     \
    double got_values_[sizeof want_values_ / sizeof(double)];                                                          \
    const int64_t n_ = (int64_t)(sizeof want_values_ / sizeof(double));                                                \
    OK(moe_tape_read(tape, v, got_values_, n_));                                                                       \
    for (int64_t i_ = 0; i_ < n_; i_++) assert_near(got_values_[i_], want_values_[i_], 0);                             \
  } while (0)

/* The tape is as if nothing had been running. */
static void assert_outside(int recording)
{
  assert_int_equal(tape->recording, recording);
  assert_int_equal(tape->depth, 0);
  assert_int_equal(tape->callbacks, 0);
  assert_null(tape->segment);
  assert_null(tape->walking);
}

/* ---- functions ------------------------------------------------------------------------------------------------------- */
static moe_function function_of(const char *name, moe_status (*forward)(void *, const moe_tape_call *),
                                moe_status (*backward)(void *, const moe_tape_call *, const moe_value *, moe_value *))
{
  moe_function f = moe_function_init();
  f.name = name;
  f.forward = forward;
  f.backward = backward;
  f.n_out = 1;
  return f;
}
static moe_value call1(const moe_function *f, moe_value x)
{
  moe_value y;
  OK(moe_tape_custom(&y, tape, f, &x, 1));
  return y;
}

/* How often each callback ran. */
static struct {
  int forward, backward, release;
} ran;

static moe_status cube_forward(void *user, const moe_tape_call *c)
{
  (void)user;
  ran.forward++;
  c->out[0] = moe_tape_mul(c->tape, moe_tape_mul(c->tape, c->in[0], c->in[0]), c->in[0]);
  return MOE_OK;
}
static moe_status cube_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  (void)user;
  ran.backward++;
  moe_value slope = moe_tape_scale(c->tape, moe_tape_mul(c->tape, c->in[0], c->in[0]), 3);
  din[0] = moe_tape_mul(c->tape, dout[0], slope);
  return MOE_OK;
}
static void count_release(void *user)
{
  (void)user;
  ran.release++;
}
static moe_function cube_function(void)
{
  moe_function f = function_of("cube", cube_forward, cube_backward);
  f.release = count_release;
  return f;
}
static moe_value cube(moe_value x)
{
  const moe_function f = cube_function();
  return call1(&f, x);
}

/* p = a b + a and r = a - 2 b, with s = a b saved. */
static moe_status two_forward(void *user, const moe_tape_call *c)
{
  double seen[3];
  assert_ptr_equal(user, &ran);
  assert_int_equal(c->size, sizeof *c);
  assert_int_equal(c->n_in, 2);
  assert_int_equal(c->n_out, 2);
  assert_int_equal(c->n_saved, 3);
  moe_value a = c->in[0], b = c->in[1];
  c->saved[1] = moe_tape_mul(c->tape, a, b);
  OK(moe_tape_read(c->tape, c->saved[1], seen, 3)); /* reads and waits are allowed */
  OK(moe_queue_wait(q));
  for (int i = 0; i < 3; i++) assert_near(seen[i], ((const double[]){ 4, -10, 18 })[i], 0);
  c->out[0] = moe_tape_add(c->tape, c->saved[1], a);
  c->out[1] = moe_tape_sub(c->tape, a, moe_tape_scale(c->tape, b, 2));
  return MOE_OK;
}
static moe_status two_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  moe_tape *t = c->tape;
  moe_value a = c->in[0], b = c->in[1];
  (void)user;
  assert_true(!c->saved[0].id && !c->saved[2].id);
  assert_values(c->saved[1], 4, -10, 18);
  assert_values(c->out[0], 5, -8, 21);
  if (dout[0].id) {
    din[0] = moe_tape_add(t, moe_tape_mul(t, dout[0], b), dout[0]);
    din[1] = moe_tape_mul(t, dout[0], a);
  }
  if (dout[1].id) {
    moe_value db = moe_tape_scale(t, dout[1], -2);
    din[0] = din[0].id ? moe_tape_add(t, din[0], dout[1]) : dout[1];
    din[1] = din[1].id ? moe_tape_add(t, din[1], db) : db;
  }
  return MOE_OK;
}
static void several_inputs_and_outputs(void **state)
{
  static const double as[] = { 1, 2, 3 }, bs[] = { 4, -5, 6 };
  moe_tensor ta = put(as, SHAPE(3)), tb = put(bs, SHAPE(3)), db = gradient_tensor(SHAPE(3));
  moe_function f = function_of("two", two_forward, two_backward);
  moe_value y[2];
  (void)state;
  send(&m);
  f.user = &ran;
  f.n_out = 2;
  f.n_saved = 3;
  moe_value a = moe_tape_leaf(tape, &ta, 1), b = moe_tape_param(tape, &tb, &db);
  OK(moe_tape_custom(y, tape, &f, (const moe_value[]){ a, b }, 2));
  assert_int_equal(tape->n_nodes, 1);
  assert_values(y[0], 5, -8, 21);
  assert_values(y[1], -7, 12, -9);
  moe_value of[3];
  for (int i = 0; i < 2; i++) of[i] = moe_tape_sum(tape, y[i]);
  of[2] = moe_tape_add(tape, of[0], of[1]);
  static const double want[3][6] = { { 5, -4, 7, 1, 2, 3 }, { 1, 1, 1, -2, -2, -2 }, { 6, -3, 8, -1, 0, 1 } };
  for (int i = 0; i < 3; i++) {
    double got[3];
    OK(moe_tape_backward(tape, of[i], none, 0));
    OK(moe_tape_read(tape, moe_tape_grad(tape, a), got, 3));
    fetch(&m);
    for (int k = 0; k < 3; k++) assert_near(got[k], want[i][k], 0);
    for (int k = 0; k < 3; k++) assert_near(values_of(&m, &db)[k], want[i][3 + k], 0);
  }
  assert_outside(1);
}

/* x^3 at 2: 8, 12, 12, 6. */
static void higher_derivatives(void **state)
{
  static const double two[] = { 2 };
  moe_tensor t = put(two, SHAPE(1));
  (void)state;
  send(&m);
  moe_value x = moe_tape_leaf(tape, &t, 1), g = cube(x);
  assert_values(g, 8);
  for (int order = 1; order < 4; order++) {
    OK(moe_tape_backward(tape, g, none, MOE_CREATE_GRAPH));
    g = moe_tape_grad(tape, x);
    assert_near(number_of(g), order == 3 ? 6 : 12, 0);
  }
  moe_value y = cube(cube(x)); /* x^9: x 9 x^8 / x = 2304, 72 x^7 = 9216 */
  OK(moe_tape_gradients(&g, tape, &y, NULL, 1, &x, 1, MOE_CREATE_GRAPH));
  assert_values(g, 2304);
  OK(moe_tape_gradients(&g, tape, &g, NULL, 1, &x, 1, 0));
  assert_values(g, 9216);
}

/* Newton's method inside: what it records for that is forgotten.  The square root of x, whose slope is 1/(2 y). */
static moe_status root_forward(void *user, const moe_tape_call *c)
{
  moe_tape *t = c->tape;
  (void)user;
  moe_value y = moe_tape_scale(t, c->in[0], 1);
  for (int i = 0; i < 8; i++) {
    assert_int_equal(moe_tape_set_recording(t, 1), 0);
    moe_tensor at;
    moe_value slope;
    OK(moe_tape_tensor(&at, t, y));
    moe_value u = moe_tape_leaf(t, &at, 1), f = moe_tape_sub(t, moe_tape_mul(t, u, u), c->in[0]);
    OK(moe_tape_gradients(&slope, t, &f, NULL, 1, &u, 1, 0));
    moe_tape_set_recording(t, 0);
    y = moe_tape_sub(t, y, moe_tape_div(t, f, slope));
  }
  moe_tape_set_recording(t, 1); /* left on */
  c->out[0] = moe_tape_scale(t, y, 1);
  return MOE_OK;
}
static moe_status root_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  (void)user;
  din[0] = moe_tape_div(c->tape, dout[0], moe_tape_scale(c->tape, c->out[0], 2));
  return MOE_OK;
}
static void nothing_inside_forward_is_recorded(void **state)
{
  static const double nine[] = { 9 };
  moe_tensor t = put(nine, SHAPE(1));
  const moe_function root = function_of("root", root_forward, root_backward);
  moe_value g;
  (void)state;
  send(&m);
  for (int recording = 0; recording < 2; recording++) {
    moe_tape_reset(tape);
    moe_tape_set_recording(tape, recording);
    moe_value x = moe_tape_leaf(tape, &t, 1), y = call1(&root, x);
    assert_near(number_of(y), 3, 1e-6);
    assert_int_equal(tape->n_nodes, recording);
    assert_outside(recording);
    if (!recording) {
      FAILS(MOE_ERR_INVALID, "depends on nothing that needs a gradient (gradients do with MOE_CREATE_GRAPH only)",
            moe_tape_backward(tape, y, none, 0));
      continue;
    }
    OK(moe_tape_gradients(&g, tape, &y, NULL, 1, &x, 1, MOE_CREATE_GRAPH));
    assert_near(number_of(g), 1.0 / 6, 1e-7);
    OK(moe_tape_gradients(&g, tape, &g, NULL, 1, &x, 1, 0)); /* through y, which depends on x by its own node */
    assert_near(number_of(g), -0.25 / 27, 1e-8);
  }
}

static moe_status same_forward(void *user, const moe_tape_call *c)
{
  (void)user;
  c->out[0] = c->in[0];
  return MOE_OK;
}
static moe_status same_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  (void)user;
  c->out[0] = c->saved[0] = none; /* of no consequence */
  din[0] = dout[0];
  return MOE_OK;
}
static void a_function_may_return_its_input(void **state)
{
  static const double xs[] = { 3, -2 };
  moe_tensor t = put(xs, SHAPE(2)), d = gradient_tensor(SHAPE(2));
  moe_function same = function_of("same", same_forward, same_backward);
  (void)state;
  send(&m);
  same.n_saved = 1;
  moe_value x = moe_tape_param(tape, &t, &d), y = call1(&same, x), z = call1(&same, y);
  assert_true(y.id != x.id && z.id != y.id);
  for (int i = 0; i < 2; i++) {
    OK(moe_tape_backward(tape, moe_tape_sum(tape, moe_tape_mul(tape, x, moe_tape_mul(tape, y, z))), none, 0)); /* x^3 */
    assert_values(moe_tape_grad(tape, x), 27, 12);
    assert_values(moe_tape_grad(tape, z), 9, 4);
  }
  moe_value v = x;
  for (int i = 0; i < 3; i++) OK(moe_tape_custom(&v, tape, &same, &v, 1)); /* results where the inputs were */
  OK(moe_tape_backward(tape, square(v), none, 0));
  assert_values(moe_tape_grad(tape, x), 6, -4);
}

/* Its first input gets no gradient, the second one all. */
static moe_status second_only(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  (void)user;
  (void)c;
  din[1] = dout[0];
  return MOE_OK;
}
static moe_status add_forward(void *user, const moe_tape_call *c)
{
  (void)user;
  c->out[0] = moe_tape_add(c->tape, c->in[0], c->in[1]);
  return MOE_OK;
}
static void gradients_may_be_absent(void **state)
{
  static const double xs[] = { 3, -2 };
  moe_tensor t = put(xs, SHAPE(2));
  moe_function f = function_of("sum of two", add_forward, second_only);
  moe_value x[2], y, g[2];
  (void)state;
  send(&m);
  for (int i = 0; i < 2; i++) x[i] = moe_tape_leaf(tape, &t, 1);
  OK(moe_tape_custom(&y, tape, &f, x, 2));
  OK(moe_tape_gradients(g, tape, &y, &x[0], 1, x, 2, 0));
  assert_int_equal(g[0].id, 0);
  assert_values(g[1], 3, -2);

  f.backward = NULL; /* no matter until one is wanted */
  OK(moe_tape_custom(&y, tape, &f, x, 2));
  moe_value loss = moe_tape_add(tape, square(y), square(x[0]));
  moe_value aside = square(x[1]);
  OK(moe_tape_backward(tape, aside, none, 0));
  FAILS(MOE_ERR_NO_DERIVATIVE, "sum of two", moe_tape_backward(tape, loss, none, 0));
  moe_tape_reset(tape);
  for (int i = 0; i < 2; i++) x[i] = moe_tape_leaf(tape, &t, 0); /* constants: nobody asks */
  moe_value w = moe_tape_leaf(tape, &t, 1);
  OK(moe_tape_custom(&y, tape, &f, x, 2));
  OK(moe_tape_backward(tape, moe_tape_sum(tape, moe_tape_mul(tape, y, w)), none, 0));
  assert_values(moe_tape_grad(tape, w), 6, -4);
}

/* Its backward differentiates its own forward, recorded for that; so it is right to any order. */
static moe_status again_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  (void)user;
  const int64_t graph = moe_tape_set_recording(c->tape, 1);
  moe_value y = moe_tape_mul(c->tape, moe_tape_mul(c->tape, c->in[0], c->in[0]), c->in[0]);
  return moe_tape_gradients(din, c->tape, &y, dout, 1, c->in, 1, graph ? MOE_CREATE_GRAPH : 0);
}
static moe_status own_output_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  (void)user;
  return moe_tape_gradients(din, c->tape, c->out, dout, 1, c->in, 1, 0); /* which asks this function again */
}
static void gradients_inside_a_backward(void **state)
{
  static const double two[] = { 2 };
  moe_tensor t = put(two, SHAPE(1)), d = gradient_tensor(SHAPE(1));
  moe_function f = function_of("again", cube_forward, again_backward);
  (void)state;
  send(&m);
  /* x^3 + (x^3)^2 + x^2, whose other parts come before and after: 12 + 192 + 4. */
  moe_value x = moe_tape_param(tape, &t, &d), s = square(x), y = call1(&f, x);
  moe_value loss = moe_tape_add(tape, moe_tape_add(tape, y, s), square(y));
  const int64_t nodes = tape->n_nodes;
  OK(moe_tape_backward(tape, loss, none, 0));
  assert_values(moe_tape_grad(tape, x), 208);
  assert_int_equal(tape->n_nodes, nodes); /* what backward recorded is forgotten */
  fetch(&m);
  assert_near(values_of(&m, &d)[0], 208, 0);
  moe_value g;
  OK(moe_tape_gradients(&g, tape, &loss, NULL, 1, &x, 1, MOE_CREATE_GRAPH)); /* 6x + 30x^4 + 2 */
  assert_values(g, 208);
  OK(moe_tape_gradients(&g, tape, &g, NULL, 1, &x, 1, 0));
  assert_values(g, 494);
  assert_outside(1);

  f.backward = own_output_backward;
  FAILS(MOE_ERR_STATE, "again: 64 functions inside one another", moe_tape_backward(tape, call1(&f, x), none, 0));
  assert_null(strstr(moe_last_error(), "again: again"));
  assert_outside(1);
}

/* ---- errors in functions --------------------------------------------------------------------------------------------- */
enum fault {
  FINE,
  RETURNS,       /* a status of its own */
  OPERATION,     /* one of the tape's, returned */
  OPERATION_HID, /* the same, but it says that all is well */
  NULL_OUT,
  STALE_OUT,
  STALE_SAVED,
  RESET,
  BACKWARD,
  FREE,
  BACK_RETURNS,
  BACK_OPERATION,
  BACK_SHAPE,
  BACK_DTYPE,
  BACK_STALE,
  BACK_RESET,
  BACK_BACKWARD,
  FAULTS
};
struct faulty {
  enum fault fault;
  moe_value stale;
};
static moe_status faulty_forward(void *user, const moe_tape_call *c)
{
  const struct faulty *f = user;
  moe_tape *t = c->tape;
  c->out[0] = moe_tape_scale(t, c->in[0], 2);
  c->out[1] = moe_tape_scale(t, c->in[0], 3);
  moe_tape_set_recording(t, 1);
  switch (f->fault) {
  case RETURNS: return MOE_ERR_DATA;
  case OPERATION: (void)moe_tape_permute(t, c->in[0], NULL); return moe_tape_status(t);
  case OPERATION_HID: (void)moe_tape_permute(t, c->in[0], NULL); break;
  case NULL_OUT: c->out[1] = none; break;
  case STALE_OUT: c->out[1] = f->stale; break;
  case STALE_SAVED: c->saved[0] = f->stale; break;
  case RESET: moe_tape_reset(t); break;
  case FREE: moe_tape_free(t); break;
  case BACKWARD: return moe_tape_backward(t, moe_tape_sum(t, c->out[0]), none, 0);
  default: break;
  }
  return MOE_OK;
}
static moe_status faulty_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  const struct faulty *f = user;
  moe_tape *t = c->tape;
  const int64_t four = 4;
  din[0] = dout[0].id ? moe_tape_scale(t, dout[0], 2) : none;
  moe_tape_set_recording(t, 1);
  switch (f->fault) {
  case BACK_RETURNS: return MOE_ERR_NO_DERIVATIVE;
  case BACK_OPERATION: din[0] = moe_tape_permute(t, c->in[0], NULL); break;
  case BACK_SHAPE: din[0] = moe_tape_empty(t, MOE_F32, 1, &four); break;
  case BACK_DTYPE: din[0] = moe_tape_cast(t, din[0], MOE_BF16); break;
  case BACK_STALE: din[0] = f->stale; break;
  case BACK_RESET: moe_tape_reset(t); break;
  case BACK_BACKWARD: return moe_tape_backward(t, din[0], none, 0);
  default: break;
  }
  return MOE_OK;
}
static void errors_in_functions(void **state)
{
  static const struct {
    moe_status status;
    const char *text;
  } want[FAULTS] = {
    [RETURNS] = { MOE_ERR_DATA, "faulty: bad data" },
    [OPERATION] = { MOE_ERR_INVALID, "faulty: moe_tape_permute: order" },
    [OPERATION_HID] = { MOE_ERR_INVALID, "faulty: moe_tape_permute: order" },
    [NULL_OUT] = { MOE_ERR_INVALID, "faulty: out[1]: the null value" },
    [STALE_OUT] = { MOE_ERR_STATE, "faulty: out[1]: a value from before" },
    [STALE_SAVED] = { MOE_ERR_STATE, "faulty: saved[0]: a value from before" },
    [RESET] = { MOE_ERR_STATE, "faulty: moe_tape_reset: inside" },
    [BACKWARD] = { MOE_ERR_STATE, "faulty: moe_tape_backward: inside" },
    [FREE] = { MOE_ERR_STATE, "faulty: moe_tape_free: inside" },
    [BACK_RETURNS] = { MOE_ERR_NO_DERIVATIVE, "faulty: the state cannot" },
    [BACK_OPERATION] = { MOE_ERR_INVALID, "faulty: moe_tape_permute: order" },
    [BACK_SHAPE] = { MOE_ERR_INVALID, "faulty: din[0] differs" },
    [BACK_DTYPE] = { MOE_ERR_INVALID, "faulty: din[0] differs" },
    [BACK_STALE] = { MOE_ERR_STATE, "faulty: din[0]: a value from before" },
    [BACK_RESET] = { MOE_ERR_STATE, "faulty: moe_tape_reset: inside" },
    [BACK_BACKWARD] = { MOE_ERR_STATE, "faulty: moe_tape_backward: inside" },
  };
  static const double two[] = { 2 };
  moe_tensor t = put(two, SHAPE(1));
  struct faulty faulty = { FINE, moe_tape_leaf(tape, &t, 0) };
  moe_function f = function_of("faulty", faulty_forward, faulty_backward);
  (void)state;
  send(&m);
  f.n_out = 2;
  f.n_saved = 1;
  f.user = &faulty;
  f.release = count_release;
  ran.release = 0;
  for (int i = 1; i < FAULTS; i++)
    for (int graph = 0; graph < 2; graph++) {
      const int backward = i >= BACK_RETURNS, before = ran.release;
      moe_value y[2] = { { 7 }, { 7 } };
      moe_tape_reset(tape);
      assert_int_equal(ran.release, before);
      moe_value x = moe_tape_leaf(tape, &t, 1), loss = none;
      faulty.fault = FINE;
      OK(moe_tape_custom(y, tape, &f, &x, 1));
      faulty.fault = (enum fault)i;
      if (backward) {
        loss = square(y[0]);
        FAILS(want[i].status, want[i].text, moe_tape_backward(tape, loss, none, graph ? MOE_CREATE_GRAPH : 0));
      } else FAILS(want[i].status, want[i].text, moe_tape_custom(y, tape, &f, &x, 1));
      FAILS(want[i].status, want[i].text, moe_tape_status(tape));
      assert_outside(1);
      if (!backward) assert_true(!y[0].id && !y[1].id);
      assert_int_equal(moe_tape_scale(tape, x, 1).id, 0); /* it sticks */
      assert_int_equal(ran.release, before);
      moe_tape_reset(tape);
      assert_int_equal(ran.release, before + (backward ? 1 : 2));
      x = moe_tape_leaf(tape, &t, 1); /* as new */
      faulty.fault = FINE;
      OK(moe_tape_custom(y, tape, &f, &x, 1));
      OK(moe_tape_backward(tape, square(y[0]), none, 0));
      assert_values(moe_tape_grad(tape, x), 16);
      moe_tape_reset(tape);
      assert_int_equal(ran.release, before + (backward ? 2 : 3));
    }
}

/* One function inside another: both names. */
static moe_status outer_forward(void *user, const moe_tape_call *c)
{
  return moe_tape_custom(c->out, c->tape, user, c->in, c->n_in);
}
static void functions_in_functions(void **state)
{
  static const double two[] = { 2 };
  moe_tensor t = put(two, SHAPE(1));
  struct faulty faulty = { .fault = FINE };
  moe_function inner = function_of("inner", faulty_forward, faulty_backward), cubed = cube_function();
  moe_function f = function_of("outer", outer_forward, cube_backward);
  moe_value y[2];
  (void)state;
  send(&m);
  f.user = &cubed;
  moe_value x = moe_tape_leaf(tape, &t, 1), z = call1(&f, x);
  assert_int_equal(tape->n_nodes, 1);
  OK(moe_tape_backward(tape, z, none, 0));
  assert_values(moe_tape_grad(tape, x), 12);

  inner.n_out = f.n_out = 2;
  inner.n_saved = 1;
  inner.user = &faulty;
  f.user = &inner;
  faulty.fault = OPERATION;
  FAILS(MOE_ERR_INVALID, "outer: inner: moe_tape_permute: order", moe_tape_custom(y, tape, &f, &x, 1));
  assert_outside(1);
}

/* ---- lifetimes ------------------------------------------------------------------------------------------------------- */
static int released[8], n_released;
static void note_release(void *user)
{
  assert_true(n_released < 8);
  released[n_released++] = *(const int *)user;
}
static void release_comes_once_for_each_call(void **state)
{
  static int who[] = { 0, 1, 2, 3, 4, 5 };
  static const double two[] = { 2 };
  moe_tensor t = put(two, SHAPE(1));
  moe_function f = function_of("cube", cube_forward, cube_backward);
  moe_value y;
  (void)state;
  send(&m);
  f.release = note_release;
  n_released = 0;
  moe_value x = moe_tape_leaf(tape, &t, 1), constant = moe_tape_leaf(tape, &t, 0);
  f.user = &who[0];
  OK(moe_tape_custom(&y, tape, &f, &x, 1));
  for (int i = 0; i < 3; i++) OK(moe_tape_backward(tape, y, none, 0));
  f.user = &who[1]; /* nothing needs a gradient */
  OK(moe_tape_custom(&y, tape, &f, &constant, 1));
  f.user = &who[2];
  moe_tape_set_recording(tape, 0);
  OK(moe_tape_custom(&y, tape, &f, &x, 1));
  f.user = &who[3]; /* refused */
  FAILS(MOE_ERR_INVALID, "in[0]: the null value", moe_tape_custom(&y, tape, &f, &none, 1));
  f.user = &who[4]; /* the tape has failed already */
  FAILS(MOE_ERR_INVALID, "in[0]: the null value", moe_tape_custom(&y, tape, &f, &x, 1));
  assert_int_equal(y.id, 0);
  assert_int_equal(n_released, 0);
  moe_tape_reset(tape);
  assert_int_equal(n_released, 5);
  for (int i = 0; i < 5; i++) assert_int_equal(released[i], 4 - i); /* the last one first */
  moe_tape_reset(tape);
  assert_int_equal(n_released, 5);

  moe_tape *other;
  OK(moe_tape_create(&other, q, NULL));
  x = moe_tape_leaf(other, &t, 1);
  f.user = &who[5];
  OK(moe_tape_custom(&y, other, &f, &x, 1));
  assert_int_equal(n_released, 5);
  moe_tape_free(other);
  assert_int_equal(n_released, 6);
  assert_int_equal(released[5], 5);
}

static void what_is_given_is_copied(void **state)
{
  static const double two[] = { 2 };
  moe_tensor t = put(two, SHAPE(1));
  char name[200];
  struct {
    moe_function f;
    uint64_t more;
  } later = { .f = cube_function() };
  moe_value y;
  (void)state;
  send(&m);
  moe_value x = moe_tape_leaf(tape, &t, 1), in = x;
  later.f.size = sizeof later; /* of a newer header, saying nothing new */
  later.f.name = strcpy(name, "mine");
  later.f.backward = NULL;
  OK(moe_tape_custom(&y, tape, &later.f, &in, 1));
  in = none;
  memset(name, 'x', sizeof name - 1);
  memset(&later, 0xff, sizeof later);
  FAILS(MOE_ERR_NO_DERIVATIVE, "mine", moe_tape_backward(tape, y, none, 0));

  moe_tape_reset(tape);
  later.f = cube_function();
  later.f.size = sizeof later;
  FAILS(MOE_ERR_VERSION, "moe_tape_custom: function", moe_tape_custom(&y, tape, &later.f, &x, 1));
  moe_tape_reset(tape);
  name[sizeof name - 1] = 0; /* a long one is cut */
  moe_function f = function_of(name, cube_forward, NULL);
  x = moe_tape_leaf(tape, &t, 1);
  y = call1(&f, x);
  name[63] = 0;
  FAILS(MOE_ERR_NO_DERIVATIVE, name, moe_tape_backward(tape, y, none, 0));
  moe_tape_reset(tape);
  f.name = NULL;
  x = moe_tape_leaf(tape, &t, 1);
  FAILS(MOE_ERR_NO_DERIVATIVE, "custom", moe_tape_backward(tape, call1(&f, x), none, 0));
}

static moe_status segment_of_nothing(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                                     int64_t n_out);

static void arguments_that_are_refused(void **state)
{
  static const double two[] = { 2 };
  static const int64_t shape[] = { 2, -1 };
  moe_tensor t = put(two, SHAPE(1));
  moe_function f = cube_function();
  moe_value x, y = { 7 };
  (void)state;
  send(&m);
#define REFUSED(text, call)                                                                                            \
  do {                                                                                                                 \
    moe_tape_reset(tape);                                                                                              \
    f = cube_function();                                                                                               \
    x = moe_tape_leaf(tape, &t, 1);                                                                                    \
    FAILS(MOE_ERR_INVALID, text, call);                                                                                \
    FAILS(MOE_ERR_INVALID, text, moe_tape_status(tape));                                                               \
    assert_outside(1);                                                                                                 \
  } while (0)
  FAILS(MOE_ERR_INVALID, "tape is NULL", moe_tape_custom(&y, NULL, &f, &x, 1));
  REFUSED("function is NULL", moe_tape_custom(&y, tape, NULL, &x, 1));
  REFUSED("forward is NULL", (f.forward = NULL, moe_tape_custom(&y, tape, &f, &x, 1)));
  REFUSED("out is NULL", moe_tape_custom(NULL, tape, &f, &x, 1));
  REFUSED("in is NULL", moe_tape_custom(&y, tape, &f, NULL, 1));
  REFUSED("-1 inputs", moe_tape_custom(&y, tape, &f, &x, -1));
  REFUSED("0 outputs", (f.n_out = 0, moe_tape_custom(&y, tape, &f, &x, 1)));
  REFUSED("outputs of 1 inputs", (f.n_out = INT64_MAX / 8, moe_tape_custom(&y, tape, &f, &x, 1)));
  REFUSED("n_saved -1", (f.n_saved = -1, moe_tape_custom(&y, tape, &f, &x, 1)));
  REFUSED("n_saved", (f.n_saved = INT64_MAX, moe_tape_custom(&y, tape, &f, &x, 1)));
  REFUSED("in[1]: the null value", moe_tape_custom(&y, tape, &f, (const moe_value[]){ x, none }, 2));
  assert_int_equal(y.id, 0);
  FAILS(MOE_ERR_INVALID, "tape is NULL", moe_tape_recompute(&y, 1, NULL, segment_of_nothing, NULL, &x, 1));
  REFUSED("segment is NULL", moe_tape_recompute(&y, 1, tape, NULL, NULL, &x, 1));
  REFUSED("out is NULL", moe_tape_recompute(NULL, 1, tape, segment_of_nothing, NULL, &x, 1));
  REFUSED("in is NULL", moe_tape_recompute(&y, 1, tape, segment_of_nothing, NULL, NULL, 1));
  REFUSED("0 outputs", moe_tape_recompute(&y, 0, tape, segment_of_nothing, NULL, &x, 1));
  REFUSED("in[0]: the null value", moe_tape_recompute(&y, 1, tape, segment_of_nothing, NULL, &none, 1));
  REFUSED("moe_tape_recompute: out[0]: the null value",
          moe_tape_recompute(&y, 1, tape, segment_of_nothing, NULL, &x, 1));
  assert_int_equal(moe_tape_empty(NULL, MOE_F32, 1, shape).id, 0);
  REFUSED("extent -1 of dimension 1", (moe_tape_empty(tape, MOE_F32, 2, shape), moe_tape_status(tape)));
  REFUSED("rank 7", (moe_tape_empty(tape, MOE_F32, 7, shape), moe_tape_status(tape)));
  REFUSED("no shape", (moe_tape_empty(tape, MOE_F32, 2, NULL), moe_tape_status(tape)));
  REFUSED("dtype 99", (moe_tape_empty(tape, 99, 1, shape), moe_tape_status(tape)));
}

/* As many values as there may be. */
static moe_status many_forward(void *user, const moe_tape_call *c)
{
  (void)user;
  for (int64_t i = 0; i < c->n_out; i++) c->out[i] = moe_tape_scale(c->tape, c->in[i], (double)i);
  for (int64_t i = 0; i < c->n_saved; i++) c->saved[i] = c->in[0];
  return MOE_OK;
}
static moe_status many_backward(void *user, const moe_tape_call *c, const moe_value *dout, moe_value *din)
{
  (void)user;
  for (int64_t i = 0; i < c->n_out; i++)
    if (dout[i].id) din[i] = moe_tape_scale(c->tape, dout[i], (double)i);
  return MOE_OK;
}
static moe_status many_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                               int64_t n_out)
{
  (void)n_out;
  return moe_tape_custom(out, t, user, in, n_in);
}
static void as_many_values_as_there_may_be(void **state)
{
  enum { IN = 4096, OUT = 512 };
  static const double two[] = { 2 };
  static moe_value in[IN + 1], out[OUT + 1];
  moe_tensor t = put(two, SHAPE(1));
  moe_function f = function_of("many", many_forward, many_backward);
  (void)state;
  send(&m);
  f.n_out = OUT;
  f.n_saved = IN;
  for (int recompute = 0; recompute < 2; recompute++) {
    moe_tape_reset(tape);
    for (int i = 0; i <= IN; i++) in[i] = moe_tape_leaf(tape, &t, 1);
    if (recompute) OK(moe_tape_recompute(out, OUT, tape, many_segment, &f, in, IN));
    else OK(moe_tape_custom(out, tape, &f, in, IN));
    OK(moe_tape_backward(tape, square(out[OUT - 1]), none, 0));
    assert_values(moe_tape_grad(tape, in[OUT - 1]), 4. * (OUT - 1) * (OUT - 1));
    assert_int_equal(moe_tape_grad(tape, in[OUT]).id, 0);
    FAILS(MOE_ERR_INVALID, "512 outputs of 4097 inputs", moe_tape_custom(out, tape, &f, in, IN + 1));
    moe_tape_reset(tape);
    f.n_out++;
    in[0] = moe_tape_leaf(tape, &t, 1);
    FAILS(MOE_ERR_INVALID, "513 outputs of 1 inputs", moe_tape_custom(out, tape, &f, in, 1));
    f.n_out--;
  }
}

/* Filled by the host. */
static moe_status filled_forward(void *user, const moe_tape_call *c)
{
  static const float values[] = { 1.5f, -2, 0.25f };
  static const int32_t ids[] = { 2, 0 };
  static const int64_t shape[] = { 1, 3 }, two = 2, many[] = { 0, 5 };
  moe_tensor t;
  (void)user;
  c->out[0] = moe_tape_empty(c->tape, MOE_F32, 2, shape);
  OK(moe_tape_tensor(&t, c->tape, c->out[0]));
  OK(moe_span_write(q, (moe_span){ t.handle, t.offset, sizeof values }, values, sizeof values));
  c->out[1] = moe_tape_empty(c->tape, MOE_I32, 1, &two);
  OK(moe_tape_tensor(&t, c->tape, c->out[1]));
  OK(moe_span_write(q, (moe_span){ t.handle, t.offset, sizeof ids }, ids, sizeof ids));
  c->out[2] = moe_tape_empty(c->tape, MOE_BF16, 2, many);
  return MOE_OK;
}
static void a_forward_may_fill_tensors_itself(void **state)
{
  moe_function f = function_of("filled", filled_forward, NULL);
  moe_value y[3];
  moe_tensor t;
  (void)state;
  f.n_out = 3;
  OK(moe_tape_custom(y, tape, &f, NULL, 0)); /* of nothing */
  assert_values(y[0], 1.5, -2, 0.25);
  assert_values(y[1], 2, 0);
  OK(moe_tape_tensor(&t, tape, y[2]));
  assert_true(t.dtype == MOE_BF16 && t.rank == 2 && t.shape[0] == 0 && t.shape[1] == 5);
  assert_int_equal(tape->n_nodes, 0);
}

/* ---- segments -------------------------------------------------------------------------------------------------------- */
/* Whether segments are recomputed ones, or plain calls: the results must be the same bits. */
static int recomputing;
static void run_segment(moe_segment *segment, void *user, const moe_value *in, int64_t n_in, moe_value *out,
                        int64_t n_out)
{
  if (recomputing) OK(moe_tape_recompute(out, n_out, tape, segment, user, in, n_in));
  else OK(segment(user, tape, in, n_in, out, n_out));
}

static moe_status segment_of_nothing(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                                     int64_t n_out)
{
  (void)user;
  (void)t;
  (void)in;
  (void)n_in;
  (void)out;
  (void)n_out;
  return MOE_OK;
}

/* A net of PARTS residual parts.  Parameters: w of each part, made before it; one that all parts share; and b, made
   inside.  Dropout by a step on the device. */
enum { PARTS = 8, N = 48 };
struct net {
  moe_tensor x, step, w[PARTS + 1], dw[PARTS + 1], b[PARTS], db[PARTS];
  moe_value wv[PARTS + 1], xv, loss;
};
struct part {
  const struct net *net;
  int i;
};
/* out: the result, and a number for the loss. */
static moe_status part_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                               int64_t n_out)
{
  const struct part *p = user;
  const struct net *n = p->net;
  moe_value step = moe_tape_leaf(t, &n->step, 0);
  if (n_in != 1 || n_out != 2) return MOE_ERR_INVALID;
  moe_value b = moe_tape_param(t, &n->b[p->i], &n->db[p->i]);
  moe_value h = moe_tape_tanh(t, moe_tape_matmul(t, in[0], n->wv[p->i], 0, 0));
  h = moe_tape_gelu(t, moe_tape_matmul(t, h, n->wv[PARTS], 0, 1));
  h = moe_tape_dropout(t, moe_tape_add(t, h, b), 0.25, 7, p->i, step);
  h = moe_tape_softmax(t, moe_tape_mul(t, h, h), 1);
  out[0] = moe_tape_add(t, in[0], h);
  out[1] = moe_tape_mean(t, moe_tape_mul(t, out[0], h));
  return MOE_OK;
}
static struct net net_of(void)
{
  static const int32_t step = 3;
  struct net n = { .x = random_tensor(1, SHAPE(N, N)), .step = t_tensor(&m, MOE_I32, T_PACKED, SHAPE(1)) };
  t_put_ints(&m, &n.step, &step);
  for (int i = 0; i <= PARTS; i++) {
    n.w[i] = random_tensor(0.3, SHAPE(N, N));
    n.dw[i] = gradient_tensor(SHAPE(N, N));
    if (i == PARTS) break;
    n.b[i] = random_tensor(1, SHAPE(N));
    n.db[i] = gradient_tensor(SHAPE(N));
  }
  return n;
}
static void record_net(struct net *n)
{
  static struct part part[PARTS]; /* lives as long as the tape's values do */
  for (int i = 0; i <= PARTS; i++) n->wv[i] = moe_tape_param(tape, &n->w[i], &n->dw[i]);
  moe_value h = n->xv = moe_tape_leaf(tape, &n->x, 1);
  n->loss = moe_tape_scale(tape, square(n->wv[PARTS]), 0.01); /* shared with what is outside too */
  for (int i = 0; i < PARTS; i++) {
    moe_value out[2];
    part[i] = (struct part){ n, i };
    run_segment(part_segment, &part[i], &h, 1, out, 2);
    h = out[0];
    n->loss = moe_tape_add(tape, n->loss, out[1]);
  }
  n->loss = moe_tape_add(tape, n->loss, moe_tape_scale(tape, square(h), 1e-3));
  OK(moe_tape_status(tape));
}
/* Every gradient there is: x's, then the parameters'. */
enum { NET_VALUES = N * N * (PARTS + 2) + N * PARTS };
static double *net_gradients(const struct net *n)
{
  double *all = t_host(&m, NET_VALUES, sizeof *all), *to = all;
  OK(moe_tape_read(tape, moe_tape_grad(tape, n->xv), to, N * N));
  to += N * N;
  fetch(&m);
  for (int i = 0; i <= PARTS; i++, to += N * N) memcpy(to, values_of(&m, &n->dw[i]), N * N * sizeof *to);
  for (int i = 0; i < PARTS; i++, to += N) memcpy(to, values_of(&m, &n->db[i]), N * sizeof *to);
  for (int64_t k = 0; k < NET_VALUES; k++) assert_true(isfinite(all[k]));
  return all;
}
static void same_gradients_in_less_memory(void **state)
{
  struct net n = net_of();
  double loss[2], *first[2], *twice[2];
  uint64_t held[2];
  (void)state;
  for (recomputing = 0; recomputing < 2; recomputing++) {
    moe_tape_desc desc = moe_tape_desc_init();
    desc.block = 4 * N * N; /* as large as a matrix: held is what was needed at once */
    moe_tape_free(tape);
    OK(moe_tape_create(&tape, q, &desc));
    send(&m); /* gradients are NaN */
    record_net(&n);
    assert_outside(1);
    OK(moe_tape_read(tape, n.loss, &loss[recomputing], 1));
    OK(moe_tape_backward(tape, n.loss, none, 0));
    assert_outside(1);
    moe_tape_memory(tape, &held[recomputing], NULL);
    first[recomputing] = net_gradients(&n);
    OK(moe_tape_backward(tape, n.loss, none, MOE_ACCUMULATE));
    twice[recomputing] = net_gradients(&n);
  }
  assert_same(&loss[1], &loss[0], 1);
  assert_same(first[1], first[0], NET_VALUES);
  assert_same(twice[1], twice[0], NET_VALUES);
  double largest = 0;
  for (int64_t k = 0; k < NET_VALUES; k++) largest = fmax(largest, fabs(first[0][k]));
  for (int64_t k = N * N; k < NET_VALUES; k++) assert_near(twice[1][k], 2 * first[1][k], 1e-6 * largest);
  if (held[1] * 3 > held[0])
    fail_msg("%llu bytes held with recomputed segments, %llu without", (unsigned long long)held[1],
             (unsigned long long)held[0]);
}

/* By moe_tape_gradients: of a parameter that the segments take from outside, and of none else. */
static void gradients_with_respect_to_what_segments_use(void **state)
{
  struct net n = net_of();
  double *got[2][3];
  (void)state;
  send(&m);
  for (recomputing = 0; recomputing < 2; recomputing++) {
    moe_value g[3];
    moe_tape_reset(tape);
    record_net(&n);
    const moe_value wrt[3] = { n.wv[2], n.wv[PARTS], n.xv };
    OK(moe_tape_gradients(g, tape, &n.loss, NULL, 1, wrt, 3, 0));
    for (int i = 0; i < 3; i++) {
      got[recomputing][i] = t_host(&m, N * N, sizeof(double));
      OK(moe_tape_read(tape, g[i], got[recomputing][i], N * N));
      moe_value one;
      OK(moe_tape_gradients(&one, tape, &n.loss, NULL, 1, &wrt[i], 1, 0));
      double *alone = t_host(&m, N * N, sizeof *alone);
      OK(moe_tape_read(tape, one, alone, N * N));
      assert_same(alone, got[recomputing][i], N * N);
    }
    fetch(&m); /* no parameter's tensor was touched */
    assert_true(isnan(values_of(&m, &n.dw[2])[0]) && isnan(values_of(&m, &n.db[0])[0]));
  }
  for (int i = 0; i < 3; i++) assert_same(got[1][i], got[0][i], N * N);
}

/* ---- the layer in segments --------------------------------------------------------------------------------------------- */
static const int64_t tokens = 12, width = 8;
struct nest {
  struct layer *l;
  moe_value w; /* made outside */
  struct nest *below;
  int calls;
};
/* Two calls of the layer; or the segment below, twice, and something between.  out[1]: the experts' loads. */
static moe_status nest_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                               int64_t n_out)
{
  struct nest *n = user;
  moe_value h[2] = { in[0] };
  if (n_in != 1 || n_out != 2) return MOE_ERR_INVALID;
  n->calls++;
  if (n->below) {
    run_segment(nest_segment, n->below, h, 1, h, 2);
    h[0] = moe_tape_dropout(t, moe_tape_tanh(t, moe_tape_mul(t, h[0], n->w)), 0.125, 3, 0, none);
    run_segment(nest_segment, n->below, h, 1, h, 2);
    out[0] = h[0];
    out[1] = h[1];
    return MOE_OK;
  }
  moe_tape_moe options = moe_tape_moe_init();
  moe_layer_state state = moe_layer_state_init();
  moe_tensor counts;
  options.params = n->l->io.params;
  options.grads = n->l->io.grads;
  options.sequences = 1;
  for (int i = 0; i < 2; i++) {
    moe_value y = moe_tape_moe_layer(t, n->l->layer, h[0], &options, &state);
    h[0] = moe_tape_add(t, moe_tape_tanh(t, y), h[0]);
  }
  if (moe_tape_status(t)) return MOE_ERR_INVALID;
  OK(moe_layer_counts(&counts, &state));
  out[0] = h[0];
  out[1] = moe_tape_leaf(t, &counts, 0);
  return MOE_OK;
}

/* The bias that moves choices: e.g. after a step that other micro-batches made. */
static void set_bias(struct layer *l, int moved)
{
  const moe_tensor *b = &l->param[REF_CORRECTION_BIAS];
  float bias[6];
  for (int e = 0; e < 6; e++) bias[e] = moved ? (float)(5 - e) : (float)l->value[REF_CORRECTION_BIAS][e].v;
  OK(moe_span_write(q, (moe_span){ b->handle, b->offset, sizeof bias }, bias, sizeof bias));
}
static void biased_layer(struct layer *l)
{
  *l = layer_of(options_of(MOE_F32, tokens, width, 16, 6, 2));
  options_sigmoid(&l->o);
  l->desc.correction_bias = l->desc.hidden_bias = l->desc.down_bias = l->desc.shared_gate = 1;
  l->desc.d_shared = 4;
  l->desc.balance_coef = 0.1;
  layer_make(l, ctx, q, 1);
  t_own(&l->m, &l->param[REF_CORRECTION_BIAS]);
}
static void choices_are_made_once(void **state)
{
  struct layer l;
  (void)state;
  biased_layer(&l);
  moe_tensor w = random_tensor(1, SHAPE(width));
  send(&m);
  for (int depth = 0; depth < 4; depth++) {
    double *grads[2][REF_PARAMS], dx[2][96], dw[2][8], counts[2][6], moved[6];
    for (recomputing = 0; recomputing < 2; recomputing++) {
      struct nest n[4];
      moe_value out[2];
      moe_tape_reset(tape);
      layer_send(&l);
      moe_value x = moe_tape_leaf(tape, &l.io.x, 1), dy = moe_tape_leaf(tape, &l.io.dy, 0);
      const moe_value wv = moe_tape_leaf(tape, &w, 1);
      for (int i = 0; i < 4; i++) n[i] = (struct nest){ &l, wv, i ? &n[i - 1] : NULL, 0 };
      run_segment(nest_segment, &n[depth], &x, 1, out, 2);
      OK(moe_tape_read(tape, out[1], counts[recomputing], 6));
      moe_value loss = moe_tape_sum(tape, moe_tape_mul(tape, out[0], dy));
      set_bias(&l, 1);
      const int calls = n[0].calls;
      OK(moe_tape_backward(tape, loss, none, 0));
      assert_outside(1);
      assert_int_equal(n[0].calls, (recomputing ? depth + 2 : 1) * calls); /* so often for each segment around */
      OK(moe_tape_read(tape, moe_tape_grad(tape, x), dx[recomputing], 96));
      if (depth) OK(moe_tape_read(tape, moe_tape_grad(tape, wv), dw[recomputing], 8));
      fetch(&l.m);
      for (int p = 0; p < REF_PARAMS; p++)
        if (l.grad[p].handle) grads[recomputing][p] = values_of(&l.m, &l.grad[p]);
      if (recomputing) { /* the layer alone would choose others now */
        moe_tape_reset(tape);
        x = moe_tape_leaf(tape, &l.io.x, 0);
        n[depth].w = moe_tape_leaf(tape, &w, 0);
        for (int i = 0; i < depth; i++) n[i].w = n[depth].w;
        run_segment(nest_segment, &n[depth], &x, 1, out, 2);
        OK(moe_tape_read(tape, out[1], moved, 6));
        assert_memory_not_equal(moved, counts[0], sizeof moved);
      }
    }
    assert_same(counts[1], counts[0], 6);
    assert_same(dx[1], dx[0], 96);
    if (depth) assert_same(dw[1], dw[0], 8);
    for (int p = 0; p < REF_PARAMS; p++)
      if (l.grad[p].handle) {
        for (int64_t k = 0; k < moe_tensor_count(&l.grad[p]); k++) assert_true(isfinite(grads[0][p][k]));
        assert_same(grads[1][p], grads[0][p], moe_tensor_count(&l.grad[p]));
      }
  }
  layer_free(&l);
}

static void same_up_to_order(const double *a, const double *b, int64_t n)
{
  double largest = 0;
  for (int64_t k = 0; k < n; k++) largest = fmax(largest, fabs(b[k]));
  assert_true(largest > 0);
  for (int64_t k = 0; k < n; k++) assert_near(a[k], b[k], 1e-5 * largest);
}
/* The gradient of |gradient|^2 with layers decomposed: sums in another order, the same choices. */
static void second_derivatives_through_layers(void **state)
{
  struct layer l;
  (void)state;
  biased_layer(&l);
  moe_tensor w = random_tensor(1, SHAPE(width));
  send(&m);
  for (int depth = 0; depth < 3; depth++) {
    double *grads[2][REF_PARAMS], first[2][96], second[2][96];
    for (recomputing = 0; recomputing < 2; recomputing++) {
      struct nest n[3];
      moe_value out[2], g;
      moe_tape_reset(tape);
      layer_send(&l);
      moe_value x = moe_tape_leaf(tape, &l.io.x, 1), dy = moe_tape_leaf(tape, &l.io.dy, 0);
      const moe_value wv = moe_tape_leaf(tape, &w, 1);
      for (int i = 0; i < 3; i++) n[i] = (struct nest){ &l, wv, i ? &n[i - 1] : NULL, 0 };
      run_segment(nest_segment, &n[depth], &x, 1, out, 2);
      moe_value loss = moe_tape_sum(tape, moe_tape_mul(tape, moe_tape_mul(tape, out[0], out[0]), dy));
      set_bias(&l, 1);
      OK(moe_tape_gradients(&g, tape, &loss, NULL, 1, &x, 1, MOE_CREATE_GRAPH | MOE_DECOMPOSE));
      OK(moe_tape_read(tape, g, first[recomputing], 96));
      OK(moe_tape_backward(tape, square(g), none, MOE_DECOMPOSE));
      OK(moe_tape_read(tape, moe_tape_grad(tape, x), second[recomputing], 96));
      fetch(&l.m);
      for (int p = 0; p < REF_PARAMS; p++)
        if (l.grad[p].handle) grads[recomputing][p] = values_of(&l.m, &l.grad[p]);
    }
    assert_same(first[1], first[0], 96);
    same_up_to_order(second[1], second[0], 96);
    for (int p = 0; p < REF_PARAMS; p++)
      if (l.grad[p].handle) same_up_to_order(grads[1][p], grads[0][p], moe_tensor_count(&l.grad[p]));
  }
  layer_free(&l);
}

/* ---- other things in segments ------------------------------------------------------------------------------------------ */
/* x^2 inside so many segments. */
static int levels[] = { 0, 1, 2, 3, 4, 5, 6, 7 };
static moe_status tower_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                                int64_t n_out)
{
  int *level = user;
  if (*level) return moe_tape_recompute(out, n_out, t, tower_segment, level - 1, in, n_in);
  out[0] = moe_tape_mul(t, in[0], in[0]);
  return MOE_OK;
}
static void segments_inside_one_another(void **state)
{
  static const double two[] = { 2 };
  moe_tensor t = put(two, SHAPE(1));
  (void)state;
  send(&m);
  for (int depth = 0; depth < MOE__TAPE_DEPTH; depth++) {
    moe_value y;
    moe_tape_reset(tape);
    moe_value x = moe_tape_leaf(tape, &t, 1);
    moe_status st = moe_tape_recompute(&y, 1, tape, tower_segment, &levels[depth], &x, 1);
    assert_outside(1);
    if (depth == MOE__TAPE_DEPTH - 1) {
      FAILS(MOE_ERR_STATE, "moe_tape_recompute: more than 7 segments", st);
      FAILS(MOE_ERR_STATE, "moe_tape_recompute: more than 7 segments", moe_tape_status(tape));
      continue;
    }
    OK(st);
    assert_values(y, 4);
    for (int graph = 0; graph < 2; graph++) {
      OK(moe_tape_backward(tape, y, none, graph ? MOE_CREATE_GRAPH : 0));
      assert_values(moe_tape_grad(tape, x), 4);
    }
    OK(moe_tape_backward(tape, moe_tape_grad(tape, x), none, 0));
    assert_values(moe_tape_grad(tape, x), 2);
  }
}

/* <gradient, x> of the net, differentiated: as without segments, by a graph that the first backward kept. */
static void second_derivatives_through_segments(void **state)
{
  struct net n = net_of();
  double *got[2];
  (void)state;
  for (recomputing = 0; recomputing < 2; recomputing++) {
    moe_tape_reset(tape);
    send(&m);
    record_net(&n);
    OK(moe_tape_backward(tape, n.loss, none, MOE_CREATE_GRAPH));
    moe_value gx = moe_tape_grad(tape, n.xv), gw = moe_tape_grad(tape, n.wv[3]);
    moe_value along = moe_tape_add(tape, moe_tape_sum(tape, moe_tape_mul(tape, gx, n.xv)), square(gw));
    OK(moe_tape_backward(tape, along, none, 0));
    assert_outside(1);
    got[recomputing] = net_gradients(&n);
  }
  double largest = 0;
  for (int64_t k = 0; k < NET_VALUES; k++) largest = fmax(largest, fabs(got[0][k]));
  assert_true(largest > 0);
  for (int64_t k = 0; k < NET_VALUES; k++)
    assert_near(got[1][k], got[0][k], 1e-5 * largest); /* sums in another order */
}

/* A segment that differentiates inside itself: |d(sum x^3)/dx|^2 = 9 x^4, whose slope is 36 x^3. */
static moe_status force_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                                int64_t n_out)
{
  moe_value energy = moe_tape_sum(t, moe_tape_mul(t, moe_tape_mul(t, in[0], in[0]), in[0])), force;
  (void)user;
  (void)n_in;
  (void)n_out;
  moe_status st = moe_tape_gradients(&force, t, &energy, NULL, 1, in, 1, MOE_CREATE_GRAPH);
  if (!st) out[0] = moe_tape_sum(t, moe_tape_mul(t, force, force));
  return st;
}
static void gradients_inside_a_segment(void **state)
{
  static const double xs[] = { 2, -1 };
  moe_tensor t = put(xs, SHAPE(2));
  moe_value y;
  (void)state;
  send(&m);
  moe_value x = moe_tape_leaf(tape, &t, 1);
  OK(moe_tape_recompute(&y, 1, tape, force_segment, NULL, &x, 1));
  assert_values(y, 153);
  assert_int_equal(tape->n_nodes, 1);
  moe_value loss = moe_tape_add(tape, y, square(x));
  OK(moe_tape_backward(tape, loss, none, 0));
  assert_values(moe_tape_grad(tape, x), 292, -38);
  OK(moe_tape_backward(tape, loss, none, MOE_CREATE_GRAPH));
  moe_value g = moe_tape_grad(tape, x);
  assert_values(g, 292, -38);
  OK(moe_tape_backward(tape, moe_tape_sum(tape, g), none, 0)); /* 108 x^2 + 2 */
  assert_values(moe_tape_grad(tape, x), 434, 110);
}

/* What is looked at for health in a segment is looked at before its memory is used again. */
static moe_status root_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                               int64_t n_out)
{
  (void)user;
  (void)n_in;
  (void)n_out;
  out[0] = moe_tape_sqrt(t, moe_tape_mul(t, in[0], in[0]));
  return MOE_OK;
}
static moe_status tanh_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                               int64_t n_out)
{
  (void)user;
  (void)n_in;
  (void)n_out;
  out[0] = in[0];
  for (int i = 0; i < 8; i++) out[0] = moe_tape_tanh(t, out[0]);
  return MOE_OK;
}
static void health_in_segments(void **state)
{
  static const double xs[] = { 1, 0, 4 };
  moe_tensor t = put(xs, SHAPE(3));
  moe_tape_desc desc = moe_tape_desc_init();
  (void)state;
  send(&m);
  moe_tape_free(tape);
  desc.health_policy = MOE_HEALTH_POLICY_COUNT;
  desc.health_activations = 1;
  OK(moe_tape_create(&tape, q, &desc));
  for (int graph = 0; graph < 2; graph++) {
    moe_tape_health_info info = moe_tape_health_info_init();
    moe_value y;
    moe_tape_reset(tape);
    moe_value x = moe_tape_leaf(tape, &t, 1);
    OK(moe_tape_recompute(&y, 1, tape, tanh_segment, NULL, &x, 1));
    OK(moe_tape_backward(tape, moe_tape_sum(tape, y), none, graph ? MOE_CREATE_GRAPH : 0));
    OK(moe_tape_health(&info, tape));
    assert_int_equal(info.bad, 0);
    OK(moe_tape_recompute(&y, 1, tape, root_segment, NULL, &y, 1)); /* by its root: 1/0 at element 1 */
    OK(moe_tape_backward(tape, moe_tape_sum(tape, y), none, graph ? MOE_CREATE_GRAPH : 0));
    OK(moe_tape_health(&info, tape));
    assert_true(info.bad > 0);
    assert_string_equal(info.name, "recomputed segment: sqrt");
    assert_int_equal(info.input, 0);
    assert_int_equal(info.index, 1);
  }
}

/* Outputs of every sort: an input itself, a value from outside, an integer, a constant; and a function called inside. */
struct mixed {
  moe_value outside, ids, inner[3];
  int runs;
};
static moe_status mixed_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                                int64_t n_out)
{
  struct mixed *s = user;
  const moe_function f = cube_function();
  moe_tensor inner;
  (void)n_in;
  (void)n_out;
  s->runs++;
  out[0] = in[0];
  out[1] = s->outside;
  out[2] = s->ids;
  s->inner[0] = moe_tape_scale(t, in[0], 2);
  OK(moe_tape_tensor(&inner, t, s->inner[0]));
  s->inner[1] = moe_tape_leaf(t, &inner, 1); /* over memory that will be gone */
  OK(moe_tape_custom(&s->inner[2], t, &f, &s->inner[1], 1));
  out[3] = moe_tape_mul(t, s->inner[2], in[0]); /* 8 x^3 for u = 2x, times x */
  out[4] = moe_tape_detach(t, out[3]);
  return MOE_OK;
}
static void what_segments_give(void **state)
{
  static const double xs[] = { 2, -1 };
  static const int32_t id = 5;
  moe_tensor t = put(xs, SHAPE(2)), i = t_tensor(&m, MOE_I32, T_PACKED, SHAPE(1)), gone;
  (void)state;
  t_put_ints(&m, &i, &id);
  send(&m);
  for (int graph = 0; graph < 2; graph++) {
    moe_value y[5];
    moe_tape_reset(tape);
    memset(&ran, 0, sizeof ran);
    moe_value x = moe_tape_leaf(tape, &t, 1), w = moe_tape_leaf(tape, &t, 1);
    struct mixed s = { .outside = w, .ids = moe_tape_leaf(tape, &i, 0) };
    OK(moe_tape_recompute(y, 5, tape, mixed_segment, &s, &x, 1));
    assert_int_equal(tape->n_nodes, 1);
    assert_values(y[0], 2, -1);
    assert_values(y[1], 2, -1);
    assert_values(y[2], 5);
    assert_values(y[3], 128, 8);
    assert_values(y[4], 128, 8);
    moe_value loss = moe_tape_mul(tape, moe_tape_mul(tape, y[0], y[1]), moe_tape_mul(tape, y[3], y[4]));
    FAILS(MOE_ERR_STATE, "inside a recomputed segment", moe_tape_tensor(&gone, tape, s.inner[0]));
    FAILS(MOE_ERR_STATE, "inside a recomputed segment", moe_tape_tensor(&gone, tape, s.inner[1]));
    /* x w p c with p = u^3 x, c = p held: by x twice, by w, by u. */
    OK(moe_tape_backward(tape, moe_tape_sum(tape, loss), none, graph ? MOE_CREATE_GRAPH : 0));
    assert_values(moe_tape_grad(tape, x), 2 * 2. * 128 * 128, 2 * -1. * 64);
    assert_values(moe_tape_grad(tape, w), 2. * 128 * 128, -1. * 64);
    assert_values(moe_tape_grad(tape, s.inner[1]), 2 * 2. * 128 * 3 * 16 * 2, -1. * -1 * 8 * 3 * 4 * -1);
    assert_int_equal(ran.forward, 2);
    assert_int_equal(ran.backward, 1);
    assert_int_equal(s.runs, 2);
    if (!graph) FAILS(MOE_ERR_STATE, "inside a recomputed segment", moe_tape_tensor(&gone, tape, s.inner[2]));
    FAILS(MOE_ERR_INVALID, "depends on nothing", moe_tape_backward(tape, moe_tape_sum(tape, y[4]), none, 0));
    moe_tape_reset(tape);
    assert_int_equal(ran.release, 2);

    moe_tape_set_recording(tape, 0); /* nothing is kept, the results are */
    x = moe_tape_leaf(tape, &t, 1);
    s.outside = x;
    s.ids = moe_tape_leaf(tape, &i, 0);
    OK(moe_tape_recompute(y, 5, tape, mixed_segment, &s, &x, 1));
    assert_outside(0);
    assert_int_equal(tape->n_nodes, 0);
    assert_values(y[3], 128, 8);
    const moe_value before = y[3];
    assert_int_equal(moe_tape_mul(tape, y[3], s.inner[0]).id, 0);
    FAILS(MOE_ERR_STATE, "moe_tape_mul: a value from inside a recomputed segment", moe_tape_status(tape));
    moe_tape_reset(tape);
    FAILS(MOE_ERR_STATE, "from before", moe_tape_tensor(&gone, tape, before));
  }
}

/* A parameter that nothing outside knows; constants go in. */
struct hidden {
  moe_tensor w, dw;
};
static moe_status hidden_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                                 int64_t n_out)
{
  const struct hidden *h = user;
  (void)n_in;
  (void)n_out;
  moe_value w = moe_tape_param(t, &h->w, &h->dw);
  out[0] = moe_tape_mul(t, moe_tape_mul(t, w, in[0]), moe_tape_param(t, &h->w, &h->dw)); /* the same one twice */
  return MOE_OK;
}
static void parameters_made_inside(void **state)
{
  static const double xs[] = { 2, -1 }, ws[] = { 3, 5 };
  moe_tensor t = put(xs, SHAPE(2));
  struct hidden h = { put(ws, SHAPE(2)), gradient_tensor(SHAPE(2)) };
  (void)state;
  send(&m);
  for (int graph = 0; graph < 2; graph++) {
    moe_value y;
    moe_tape_reset(tape);
    moe_value x = moe_tape_leaf(tape, &t, 0);
    OK(moe_tape_recompute(&y, 1, tape, hidden_segment, &h, &x, 1));
    moe_value loss = moe_tape_add(tape, moe_tape_sum(tape, y), square(moe_tape_param(tape, &h.w, &h.dw)));
    for (int times = 1; times < 4; times++) { /* 2 w x + 2 w, clean and added to */
      const int64_t flags = (times > 1 ? MOE_ACCUMULATE : 0) | (graph ? MOE_CREATE_GRAPH : 0);
      OK(moe_tape_backward(tape, loss, none, flags));
      fetch(&m);
      assert_near(values_of(&m, &h.dw)[0], times * 18, 0);
      assert_near(values_of(&m, &h.dw)[1], 0, 0);
    }
    assert_int_equal(tape->n_params, 3);
    OK(moe_tape_backward(tape, square(moe_tape_leaf(tape, &t, 1)), none, 0)); /* depends on none of them */
    fetch(&m);
    assert_near(values_of(&m, &h.dw)[0], 0, 0);
  }
}

/* ---- segments that are not the same twice ----------------------------------------------------------------------------- */
enum oddity {
  EVEN,
  ODD_SHAPE,
  ODD_DEPENDS,
  MORE_LAYERS,
  FEWER_LAYERS,
  MORE_LEAVES,
  FEWER_LEAVES,
  OTHER_LEAF, /* in the order of odd.w */
  LEAF_SHAPE,
  LEAF_DTYPE,
  LEAF_FOR_LAYER,
  LATE_RETURN,
  LATE_OPERATION,
  LATE_RESET,
  EARLY_RETURN,
  EARLY_OPERATION,
  EARLY_RESET,
  EARLY_BACKWARD,
  ODDITIES
};
struct odd {
  enum oddity oddity;
  int again;
  struct layer *l;
  moe_tensor w[4], dw[4]; /* the second: another; then the first one's gradient with another tensor */
};
static moe_status odd_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out, int64_t n_out)
{
  struct odd *o = user;
  const int late = o->again++ > 0, early = !late;
  const enum oddity now = o->oddity;
  int layers = 1, leaves = 1;
  moe_value h = in[0];
  moe_tape_moe options = moe_tape_moe_init();
  (void)n_in;
  (void)n_out;
  options.params = o->l->io.params; /* without gradients: no leaves */
  layers += late && now == MORE_LAYERS ? 1 : late && (now == FEWER_LAYERS || now == LEAF_FOR_LAYER) ? -1 : 0;
  leaves += late && now == MORE_LEAVES ? 1 : late && now == FEWER_LEAVES ? -1 : 0;
  for (int i = 0; i < layers; i++) h = moe_tape_moe_layer(t, o->l->layer, h, &options, NULL);
  for (int i = 0; i < leaves; i++) {
    const int other = late && now >= OTHER_LEAF && now <= LEAF_DTYPE ? (int)(now - OTHER_LEAF) + 1 : 0;
    moe_value w = moe_tape_param(t, &o->w[other], &o->dw[other]);
    h = moe_tape_mul(t, h, moe_tape_cast(t, w, MOE_F32));
  }
  if (late && now == ODD_SHAPE) h = moe_tape_slice(t, h, 0, 0, 1);
  moe_tape_set_recording(t, 0);
  if ((late && now == LATE_RETURN) || (early && now == EARLY_RETURN)) return MOE_ERR_DATA;
  if ((late && now == LATE_OPERATION) || (early && now == EARLY_OPERATION)) (void)moe_tape_permute(t, h, NULL);
  if ((late && now == LATE_RESET) || (early && now == EARLY_RESET)) moe_tape_reset(t);
  if (early && now == EARLY_BACKWARD) return moe_tape_backward(t, h, none, 0);
  if (late && now == ODD_DEPENDS) h = moe_tape_detach(t, h);
  out[0] = h;
  return MOE_OK;
}
static void segments_that_are_not_the_same_twice(void **state)
{
  static const struct {
    moe_status status;
    const char *text;
  } want[ODDITIES] = {
    [ODD_SHAPE] = { MOE_ERR_STATE, "moe_tape_recompute: out[0] has another shape" },
    [ODD_DEPENDS] = { MOE_ERR_STATE, "moe_tape_recompute: out[0] has another shape or dtype than" },
    [MORE_LAYERS] = { MOE_ERR_STATE, "that its first run had not" },
    [FEWER_LAYERS] = { MOE_ERR_STATE, "that its first run had not" },
    [MORE_LEAVES] = { MOE_ERR_STATE, "that its first run had not" },
    [FEWER_LEAVES] = { MOE_ERR_STATE, "moe_tape_recompute: fewer" },
    [OTHER_LEAF] = { MOE_ERR_STATE, "is not that of the first run" },
    [LEAF_SHAPE] = { MOE_ERR_STATE, "is not that of the first run" },
    [LEAF_DTYPE] = { MOE_ERR_STATE, "is not that of the first run" },
    [LEAF_FOR_LAYER] = { MOE_ERR_STATE, "that its first run had not" },
    [LATE_RETURN] = { MOE_ERR_DATA, "moe_tape_recompute: bad data" },
    [LATE_OPERATION] = { MOE_ERR_INVALID, "moe_tape_permute: order" },
    [LATE_RESET] = { MOE_ERR_STATE, "moe_tape_reset: inside" },
    [EARLY_RETURN] = { MOE_ERR_DATA, "moe_tape_recompute: bad data" },
    [EARLY_OPERATION] = { MOE_ERR_INVALID, "moe_tape_permute: order" },
    [EARLY_RESET] = { MOE_ERR_STATE, "moe_tape_reset: inside" },
    [EARLY_BACKWARD] = { MOE_ERR_STATE, "moe_tape_backward: inside" },
  };
  struct layer l = layer_of(options_of(MOE_F32, tokens, width, 16, 6, 2));
  struct odd odd = { .l = &l };
  (void)state;
  layer_make(&l, ctx, q, 1);
  for (int i = 0; i < 2; i++) {
    odd.w[i] = random_tensor(1, SHAPE(width));
    odd.dw[i] = gradient_tensor(SHAPE(width));
  }
  odd.w[2] = random_tensor(1, SHAPE(1, width));
  odd.dw[2] = moe__matrix(odd.dw[0].handle, odd.dw[0].offset, MOE_F32, 1, width);
  odd.w[3] = t_tensor(&m, MOE_BF16, T_PACKED, SHAPE(width));
  odd.dw[3] = odd.dw[0];
  send(&m);
  for (int i = EVEN; i < ODDITIES; i++)
    for (int graph = 0; graph < 2; graph++) {
      moe_value y = none;
      moe_tape_reset(tape);
      moe_value x = moe_tape_leaf(tape, &l.io.x, 1);
      odd.oddity = (enum oddity)i;
      odd.again = 0;
      if (i >= EARLY_RETURN) {
        FAILS(want[i].status, want[i].text, moe_tape_recompute(&y, 1, tape, odd_segment, &odd, &x, 1));
        assert_int_equal(y.id, 0);
      } else {
        OK(moe_tape_recompute(&y, 1, tape, odd_segment, &odd, &x, 1));
        moe_value loss = square(y);
        if (i) FAILS(want[i].status, want[i].text, moe_tape_backward(tape, loss, none, graph ? MOE_CREATE_GRAPH : 0));
        else OK(moe_tape_backward(tape, loss, none, graph ? MOE_CREATE_GRAPH : 0));
      }
      assert_outside(1);
    }
  layer_free(&l);
}

/* ---- memory ------------------------------------------------------------------------------------------------------------ */
struct lives {
  uint64_t held, used;
  int64_t host, pages, nodes, params, releases, blocks;
};
static struct lives lives_now(void)
{
  struct lives now = { .host = tape->n_host,
                       .pages = tape->n_pages,
                       .nodes = tape->room_nodes,
                       .params = tape->room_params,
                       .releases = tape->room_releases };
  moe_tape_memory(tape, &now.held, &now.used);
  for (int d = 0; d < MOE__TAPE_DEPTH; d++) now.blocks += tape->pools[d].n_blocks;
  return now;
}

/* A step of training: custom functions and segments; every fifth one fails in one of them. */
static void step(struct odd *odd, const moe_tensor *t, int i)
{
  moe_value y, z;
  moe_tape_reset(tape);
  moe_value x = moe_tape_leaf(tape, &odd->l->io.x, 1), w = moe_tape_leaf(tape, t, 1);
  odd->again = 0;
  odd->oddity = i % 5 == 4 ? i % 10 == 4 ? LATE_RETURN : EARLY_OPERATION : EVEN;
  moe_status st = moe_tape_recompute(&y, 1, tape, odd_segment, odd, &x, 1);
  if (odd->oddity == EARLY_OPERATION) {
    assert_int_equal(st, MOE_ERR_INVALID);
    return;
  }
  OK(st);
  OK(moe_tape_recompute(&z, 1, tape, tower_segment, &levels[2], &w, 1));
  moe_value loss = moe_tape_add(tape, square(y), cube(z));
  if (odd->oddity == LATE_RETURN) FAILS(MOE_ERR_DATA, "moe_tape_recompute", moe_tape_backward(tape, loss, none, 0));
  else OK(moe_tape_backward(tape, loss, none, i % 5 == 3 ? MOE_CREATE_GRAPH : 0));
}
static void nothing_grows(void **state)
{
  static const double half[] = { 0.5 };
  const int steps = test_short() ? 500 : 10000;
  struct layer l = layer_of(options_of(MOE_F32, 3, 4, 4, 4, 2));
  struct odd odd = { .l = &l, .w[0] = random_tensor(1, SHAPE(4)), .dw[0] = gradient_tensor(SHAPE(4)) };
  const moe_tensor t = put(half, SHAPE(1));
  struct lives warm[10];
  (void)state;
  layer_make(&l, ctx, q, 1);
  send(&m);
  memset(&ran, 0, sizeof ran);
  for (int i = 0; i < steps; i++) {
    step(&odd, &t, i);
    const struct lives now = lives_now();
    if (i < 20) warm[i % 10] = now;
    if (memcmp(&now, &warm[i % 10], sizeof now))
      fail_msg(
          "step %d: %lld chunks and %lld pages of host memory, %llu of %llu bytes of the device's; after warming up "
          "%lld, %lld, %llu, %llu",
          i, (long long)now.host, (long long)now.pages, (unsigned long long)now.used, (unsigned long long)now.held,
          (long long)warm[i % 10].host, (long long)warm[i % 10].pages, (unsigned long long)warm[i % 10].used,
          (unsigned long long)warm[i % 10].held);
    if (i % 50 == 49) OK(moe_queue_wait(q));
  }
  moe_tape_reset(tape);
  assert_int_equal(ran.release, ran.forward); /* none left behind, none called twice */
  OK(moe_queue_wait(q));
  layer_free(&l);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    TEST(several_inputs_and_outputs),
    TEST(higher_derivatives),
    TEST(nothing_inside_forward_is_recorded),
    TEST(a_function_may_return_its_input),
    TEST(gradients_may_be_absent),
    TEST(gradients_inside_a_backward),
    TEST(errors_in_functions),
    TEST(functions_in_functions),
    TEST(release_comes_once_for_each_call),
    TEST(what_is_given_is_copied),
    TEST(arguments_that_are_refused),
    TEST(as_many_values_as_there_may_be),
    TEST(a_forward_may_fill_tensors_itself),
    TEST(same_gradients_in_less_memory),
    TEST(gradients_with_respect_to_what_segments_use),
    TEST(choices_are_made_once),
    TEST(second_derivatives_through_layers),
    TEST(health_in_segments),
    TEST(segments_inside_one_another),
    TEST(second_derivatives_through_segments),
    TEST(gradients_inside_a_segment),
    TEST(what_segments_give),
    TEST(parameters_made_inside),
    TEST(segments_that_are_not_the_same_twice),
    TEST(nothing_grows),
  };
  if (!test_open(&ctx, &q)) return 77;
  int rc = TEST_MAIN(tests);
  test_close(ctx, q);
  return rc;
}
