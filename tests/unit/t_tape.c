/* t_tape.c - the tape on a device: gradients of every operation against finite differences in f64, second
   derivatives and their refusal, accumulation, stale values, initial values, and memory that does not grow. */
#include "tape_fixture.h"

#include "config.h"
#include "core/backend.h"
#if MOE_HAVE_OPENCL
#include "opencl/loader.h"
#endif

static void set(const moe_tensor *t, const double *values)
{
  int64_t n = moe_tensor_count(t);
  num *numbers = malloc((size_t)(n ? n : 1) * sizeof *numbers);
  assert_non_null(numbers);
  for (int64_t i = 0; i < n; i++) numbers[i] = n_exact(values[i]);
  t_put(&m, t, numbers);
  free(numbers);
}
static moe_tensor put(int64_t dtype, const double *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&m, dtype, T_PACKED, rank, shape);
  set(&t, values);
  return t;
}
static moe_tensor put_ids(const int32_t *values, int n)
{
  moe_tensor t = t_tensor(&m, MOE_I32, T_PACKED, SHAPE(n));
  t_put_ints(&m, &t, values);
  return t;
}
static void upload(void)
{
  t_upload(&m);
  assert_int_equal(m.status, MOE_OK);
}
/* What a caller's tensor holds now. */
static void fetch(const moe_tensor *t, double *values)
{
  t_download(&m);
  assert_int_equal(m.status, MOE_OK);
  t_get(&m, t, values);
}

/* ---- finite differences ------------------------------------------------------------------------------------------ */
enum { MOST = 3, ELEMENTS = 64 };
struct problem {
  int n;
  struct {
    int rank;
    int64_t shape[2];
    double size; /* of the random values */
  } in[MOST];
  moe_value (*loss)(const moe_value *in);
  /* Filled in: */
  int64_t count[MOST];
  double x[MOST][ELEMENTS];
  moe_tensor t[MOST], grad[MOST];
  moe_value v[MOST];
};

static void prepare(struct problem *p)
{
  for (int i = 0; i < p->n; i++) {
    p->t[i] = t_tensor(&m, MOE_F64, T_PACKED, p->in[i].rank, p->in[i].shape);
    p->grad[i] = t_tensor(&m, MOE_F64, T_PACKED, p->in[i].rank, p->in[i].shape);
    p->count[i] = moe_tensor_count(&p->t[i]);
    assert_true(p->count[i] <= ELEMENTS);
    num *random = t_uniform(&m, p->count[i], MOE_F64, p->in[i].size);
    for (int64_t k = 0; k < p->count[i]; k++) p->x[i][k] = random[k].v;
  }
}

/* The loss as a value of a fresh tape. */
static moe_value record(struct problem *p)
{
  moe_tape_reset(tape);
  for (int i = 0; i < p->n; i++) set(&p->t[i], p->x[i]);
  upload();
  for (int i = 0; i < p->n; i++) p->v[i] = moe_tape_param(tape, &p->t[i], &p->grad[i]);
  moe_value loss = p->loss(p->v);
  OK(moe_tape_status(tape));
  return loss;
}

/* Central differences against the analytic gradient: step 1e-4, relative error at most 1e-6 of the larger part of the
   gradient of that input. */
static void compare(const char *what, int input, const double *numeric, const double *analytic, int64_t n)
{
  double largest = 1e-8;
  for (int64_t k = 0; k < n; k++) largest = fmax(largest, fabs(numeric[k]));
  for (int64_t k = 0; k < n; k++)
    if (!(fabs(numeric[k] - analytic[k]) <= 1e-6 * largest))
      fail_msg("%s, input %d, element %lld: %.12g by differences, %.12g by the tape", what, input, (long long)k,
               numeric[k], analytic[k]);
}

static void check_gradients(const char *what, struct problem *p)
{
  const double step = 1e-4;
  double analytic[MOST][ELEMENTS], bound[ELEMENTS], numeric[ELEMENTS];
  prepare(p);
  moe_value loss = record(p);
  OK(moe_tape_backward(tape, loss, none, 0));
  for (int i = 0; i < p->n; i++) {
    OK(moe_tape_read(tape, moe_tape_grad(tape, p->v[i]), analytic[i], p->count[i]));
    fetch(&p->grad[i], bound); /* written into the parameter's own tensor */
    for (int64_t k = 0; k < p->count[i]; k++) assert_near(bound[k], analytic[i][k], 0);
  }
  for (int i = 0; i < p->n; i++) {
    for (int64_t k = 0; k < p->count[i]; k++) {
      const double x = p->x[i][k];
      p->x[i][k] = x + step;
      double above = number_of(record(p));
      p->x[i][k] = x - step;
      double below = number_of(record(p));
      p->x[i][k] = x;
      numeric[k] = (above - below) / (2 * step);
    }
    compare(what, i, numeric, analytic[i], p->count[i]);
  }
}

/* sum over inputs of <gradient, direction>, the directions being constants. */
static moe_value slope(struct problem *p, const moe_tensor *direction)
{
  moe_value sum = none;
  OK(moe_tape_backward(tape, record(p), none, MOE_CREATE_GRAPH));
  for (int i = 0; i < p->n; i++) {
    moe_value g = moe_tape_grad(tape, p->v[i]);
    assert_true(g.id != 0);
    moe_value part = moe_tape_sum(tape, moe_tape_mul(tape, g, moe_tape_leaf(tape, &direction[i], 0)));
    sum = i ? moe_tape_add(tape, sum, part) : part;
  }
  return sum;
}

/* Hessian times vector by a second backward, against differences of the slope. */
static void check_second(const char *what, struct problem *p)
{
  const double step = 1e-4;
  double analytic[MOST][ELEMENTS], numeric[ELEMENTS];
  moe_tensor direction[MOST];
  prepare(p);
  for (int i = 0; i < p->n; i++) {
    double values[ELEMENTS];
    num *random = t_uniform(&m, p->count[i], MOE_F64, 1);
    for (int64_t k = 0; k < p->count[i]; k++) values[k] = random[k].v;
    direction[i] = put(MOE_F64, values, p->in[i].rank, p->in[i].shape);
  }
  moe_value along = slope(p, direction);
  OK(moe_tape_backward(tape, along, none, 0));
  for (int i = 0; i < p->n; i++) OK(moe_tape_read(tape, moe_tape_grad(tape, p->v[i]), analytic[i], p->count[i]));
  for (int i = 0; i < p->n; i++) {
    for (int64_t k = 0; k < p->count[i]; k++) {
      const double x = p->x[i][k];
      p->x[i][k] = x + step;
      double above = number_of(slope(p, direction));
      p->x[i][k] = x - step;
      double below = number_of(slope(p, direction));
      p->x[i][k] = x;
      numeric[k] = (above - below) / (2 * step);
    }
    compare(what, i, numeric, analytic[i], p->count[i]);
  }
}
/* ---- primitive operations ---------------------------------------------------------------------------------------- */
static moe_value loss_of_maps(const moe_value *in)
{
  static const int64_t shape[2] = { 2, 3 };
  moe_value a = moe_tape_reshape(tape, in[0], 2, shape), b = in[1];
  moe_value y = moe_tape_add(tape, moe_tape_mul(tape, a, b), moe_tape_scale(tape, moe_tape_add(tape, a, a), -1.75));
  return moe_tape_add(tape, square(y), moe_tape_mul(tape, moe_tape_mean(tape, b), moe_tape_sum(tape, a)));
}
static struct problem maps_problem(void)
{
  return (struct problem){ .n = 2, .in = { { 1, { 6 }, 1 }, { 2, { 2, 3 }, 1 } }, .loss = loss_of_maps };
}
static void gradients_of_maps(void **state)
{
  (void)state;
  NEEDS_FP64;
  struct problem p = maps_problem();
  check_gradients("maps", &p);
}
static void second_derivatives_of_maps(void **state)
{
  (void)state;
  NEEDS_FP64;
  struct problem p = maps_problem();
  check_second("maps", &p);
}

static int flip_a, flip_b;
static moe_value loss_of_matmul(const moe_value *in)
{
  return square(moe_tape_matmul(tape, in[0], in[1], flip_a, flip_b));
}
static void each_matmul(void (*check)(const char *, struct problem *))
{
  for (flip_a = 0; flip_a < 2; flip_a++)
    for (flip_b = 0; flip_b < 2; flip_b++) {
      struct problem p = { .n = 2, .loss = loss_of_matmul };
      char what[64];
      snprintf(what, sizeof what, "matmul (transposes %d %d)", flip_a, flip_b);
      p.in[0].rank = p.in[1].rank = 2;
      p.in[0].size = p.in[1].size = 1;
      p.in[0].shape[flip_a] = 3;
      p.in[0].shape[!flip_a] = p.in[1].shape[flip_b] = 4;
      p.in[1].shape[!flip_b] = 2;
      check(what, &p);
    }
}
static void gradients_of_matmul(void **state)
{
  (void)state;
  NEEDS_FP64;
  each_matmul(check_gradients);
}
static void second_derivatives_of_matmul(void **state)
{
  (void)state;
  NEEDS_FP64;
  each_matmul(check_second);
}

static moe_value loss_of_a_used_twice(const moe_value *in)
{
  moe_value y = moe_tape_matmul(tape, in[0], in[0], 0, 0); /* a's gradient has two parts, and a third */
  return moe_tape_add(tape, square(y), moe_tape_sum(tape, in[0]));
}
static void gradients_of_a_parameter_used_three_times(void **state)
{
  (void)state;
  NEEDS_FP64;
  struct problem p = { .n = 1, .in = { { 2, { 3, 3 }, 1 } }, .loss = loss_of_a_used_twice };
  check_gradients("used three times", &p);
  struct problem again = { .n = 1, .in = { { 2, { 3, 3 }, 1 } }, .loss = loss_of_a_used_twice };
  check_second("used three times", &again);
}

/* ---- fused operations -------------------------------------------------------------------------------------------- */
static moe_tensor ids_tensor;
static moe_value loss_of_embedding(const moe_value *in)
{
  return square(moe_tape_embedding(tape, in[0], moe_tape_leaf(tape, &ids_tensor, 0)));
}
static void gradients_of_embedding(void **state)
{
  static const int32_t ids[] = { 3, 0, 3, 3, 4, 0 }; /* one often, two never */
  (void)state;
  NEEDS_FP64;
  ids_tensor = put_ids(ids, 6);
  struct problem p = { .n = 1, .in = { { 2, { 5, 3 }, 1 } }, .loss = loss_of_embedding };
  check_gradients("embedding", &p);
}

static moe_value loss_of_rms_norm(const moe_value *in)
{
  return square(moe_tape_mul(tape, moe_tape_rms_norm(tape, in[0], in[1], 1e-3), in[2]));
}
static void gradients_of_rms_norm(void **state)
{
  (void)state;
  NEEDS_FP64;
  struct problem p = { .n = 3,
                       .in = { { 2, { 3, 5 }, 1 }, { 1, { 5 }, 1 }, { 2, { 3, 5 }, 1 } },
                       .loss = loss_of_rms_norm };
  check_gradients("rms_norm", &p);
}

static moe_value loss_of_cross_entropy(const moe_value *in)
{
  moe_value logits = moe_tape_matmul(tape, in[0], in[1], 0, 1);
  return moe_tape_scale(tape, moe_tape_cross_entropy(tape, logits, moe_tape_leaf(tape, &ids_tensor, 0)), 3);
}
static void gradients_of_cross_entropy(void **state)
{
  static const int32_t targets[] = { 2, 0, 6, 2 };
  (void)state;
  NEEDS_FP64;
  ids_tensor = put_ids(targets, 4);
  struct problem p = { .n = 2, .in = { { 2, { 4, 3 }, 2 }, { 2, { 7, 3 }, 2 } }, .loss = loss_of_cross_entropy };
  check_gradients("cross_entropy", &p);
}

/* A bad id: its row is NaN, the others are right, and the health word tells. */
static void ids_out_of_range(void **state)
{
  static const double table[] = { 1, 2, 3, 4, 5, 6 };
  static const int32_t ids[] = { 2, 3, 0, -1 };
  double rows[8], grad[6];
  (void)state;
  moe_tensor t = put(MOE_F32, table, SHAPE(3, 2)), d = t_tensor(&m, MOE_F32, 0, SHAPE(3, 2));
  ids_tensor = put_ids(ids, 4);
  upload();
  moe_value w = moe_tape_param(tape, &t, &d);
  moe_value y = moe_tape_embedding(tape, w, moe_tape_leaf(tape, &ids_tensor, 0));
  OK(moe_tape_read(tape, y, rows, 8));
  assert_near(rows[0], 5, 0);
  assert_near(rows[1], 6, 0);
  assert_near(rows[4], 1, 0);
  assert_near(rows[5], 2, 0);
  for (int i = 0; i < 4; i++) assert_true(isnan(rows[i < 2 ? 2 + i : 4 + i]));
  FAILS(MOE_ERR_DATA, "an id out of range", moe_queue_wait(q));
  OK(moe_tape_backward(tape, moe_tape_sum(tape, y), none, 0));
  fetch(&d, grad);
  for (int i = 0; i < 6; i++) assert_near(grad[i], i < 2 || i > 3, 0);
}

/* ---- gradients that start clean, or are added to ----------------------------------------------------------------- */
static void accumulation_doubles_exactly(void **state)
{
  static const double a[] = { 0.1, -0.2, 0.3, 0.7, 0.5, -0.9 }, b[] = { 1.1, 0.3, -0.6, 0.2, 0.9, 1.7 };
  static const int32_t ids[] = { 1, 0, 1 };
  static const int64_t dtypes[] = { MOE_F32, MOE_BF16, MOE_F16 };
  (void)state;
  for (int kind = 0; kind < 3; kind++) {
    double first[2][6], now[6];
    moe_tensor t[2], d[2];
    t[0] = put(dtypes[kind], a, SHAPE(3, 2));
    t[1] = put(dtypes[kind], b, SHAPE(3, 2));
    for (int i = 0; i < 2; i++) d[i] = t_tensor(&m, MOE_F32, 0, SHAPE(3, 2)); /* NaN */
    ids_tensor = put_ids(ids, 3);
    upload();
    moe_tape_reset(tape);
    moe_value x = moe_tape_embedding(tape, moe_tape_param(tape, &t[0], &d[0]), moe_tape_leaf(tape, &ids_tensor, 0));
    moe_value y = moe_tape_matmul(tape, x, moe_tape_param(tape, &t[1], &d[1]), 0, 1);
    moe_value loss = moe_tape_cross_entropy(tape, y, moe_tape_leaf(tape, &ids_tensor, 0));
    static const struct {
      int64_t flags;
      double times;
    } calls[] = { { 0, 1 }, { MOE_ACCUMULATE, 2 },   { MOE_ACCUMULATE, 3 },
                  { 0, 1 }, { MOE_CREATE_GRAPH, 1 }, { MOE_CREATE_GRAPH | MOE_ACCUMULATE, 2 } };
    for (int c = 0; c < 6; c++) {
      OK(moe_tape_backward(tape, loss, none, calls[c].flags));
      for (int i = 0; i < 2; i++) {
        fetch(&d[i], now);
        for (int k = 0; k < 6; k++) {
          if (c == 0) first[i][k] = now[k];
          assert_true(isfinite(now[k]));
          /* Twice is exact in any float; with values of the storage type in between, as near as it rounds. */
          double bound = calls[c].times == 3 ? ref_rounding(3 * first[i][k], MOE_F32) : 0;
          /* Through the expansion of cross_entropy: (softmax - onehot)/T, a sum of T products with |x| < 2; exp, log and
             division of at most 3 ULP each, seven roundings of numbers below 1. */
          if (calls[c].flags & MOE_CREATE_GRAPH)
            bound = 4 * ref_rounding(first[i][k], dtypes[kind]) + 2 * 16 * ref_rounding(1, MOE_F32);
          assert_near(now[k], calls[c].times * first[i][k], bound);
        }
      }
    }
  }
}

/* A parameter that the loss does not depend on has gradient 0, not what an earlier step left there. */
static void an_unused_parameter_has_no_stale_gradient(void **state)
{
  static const double a[] = { 2, 3 };
  double now[2];
  (void)state;
  moe_tensor t = put(MOE_F32, a, SHAPE(2)), unused = put(MOE_F32, a, SHAPE(2));
  moe_tensor d = t_tensor(&m, MOE_F32, 0, SHAPE(2)), stale = t_tensor(&m, MOE_F32, 0, SHAPE(2));
  upload();
  moe_value x = moe_tape_param(tape, &t, &d), y = moe_tape_param(tape, &unused, &stale);
  OK(moe_tape_backward(tape, square(moe_tape_mul(tape, x, y)), none, 0));
  fetch(&stale, now);
  assert_near(now[0], 16, 0);
  OK(moe_tape_backward(tape, square(x), none, MOE_ACCUMULATE)); /* adds 0 */
  fetch(&stale, now);
  assert_near(now[0], 16, 0);
  OK(moe_tape_backward(tape, square(x), none, 0));
  fetch(&stale, now);
  assert_near(now[0], 0, 0);
  assert_near(now[1], 0, 0);
  fetch(&d, now);
  assert_near(now[0], 4, 0);
  assert_int_equal(moe_tape_grad(tape, y).id, 0);
}

static void a_seed_multiplies(void **state)
{
  static const double a[] = { 2, 3 }, s[] = { -5 };
  double now[2];
  (void)state;
  moe_tensor t = put(MOE_F32, a, SHAPE(2)), seed = put(MOE_F32, s, SHAPE(1));
  upload();
  moe_value x = moe_tape_leaf(tape, &t, 1), loss = square(x);
  OK(moe_tape_backward(tape, loss, moe_tape_leaf(tape, &seed, 0), 0));
  OK(moe_tape_read(tape, moe_tape_grad(tape, x), now, 2));
  assert_near(now[0], -20, 0);
  assert_near(now[1], -30, 0);
  OK(moe_tape_backward(tape, loss, none, 0)); /* clean, without the seed */
  OK(moe_tape_read(tape, moe_tape_grad(tape, x), now, 2));
  assert_near(now[0], 4, 0);
  assert_true(moe_tape_grad(tape, loss).id != 0);
}

static void empty_tensors(void **state)
{
  double row[3];
  (void)state;
  moe_tensor t = t_tensor(&m, MOE_F32, 0, SHAPE(0, 3)), w = t_tensor(&m, MOE_F32, 0, SHAPE(3, 3)),
             d = t_tensor(&m, MOE_F32, 0, SHAPE(3, 3)), ids = t_tensor(&m, MOE_I32, 0, SHAPE(0));
  static const double eye[] = { 1, 0, 0, 0, 1, 0, 0, 0, 1 };
  double grad[9];
  set(&w, eye);
  upload();
  moe_value x = moe_tape_leaf(tape, &t, 1), p = moe_tape_param(tape, &w, &d);
  moe_value y = moe_tape_matmul(tape, x, p, 0, 0);
  moe_value loss = moe_tape_add(tape, moe_tape_cross_entropy(tape, y, moe_tape_leaf(tape, &ids, 0)),
                                moe_tape_add(tape, moe_tape_sum(tape, y), moe_tape_mean(tape, y)));
  assert_near(number_of(loss), 0, 0); /* not 0/0 */
  OK(moe_tape_backward(tape, loss, none, 0));
  fetch(&d, grad);
  for (int i = 0; i < 9; i++) assert_near(grad[i], 0, 0); /* NaN before */
  OK(moe_tape_read(tape, y, row, 3));
  moe_tensor of_y;
  OK(moe_tape_tensor(&of_y, tape, y));
  assert_true(of_y.shape[0] == 0 && of_y.shape[1] == 3);
}

/* ---- stale values ------------------------------------------------------------------------------------------------ */
static void values_from_before_reset_are_errors(void **state)
{
  static const double a[] = { 2, 3 };
  moe_tensor t = put(MOE_F32, a, SHAPE(2)), out;
  double number;
  (void)state;
  upload();
  for (int round = 0; round < 5; round++) {
    moe_value old = moe_tape_leaf(tape, &t, 1);
    moe_tape_reset(tape);
    moe_value new = moe_tape_leaf(tape, &t, 1);
    assert_true(new.id != old.id);
    FAILS(MOE_ERR_STATE, "from before moe_tape_reset", moe_tape_tensor(&out, tape, old));
    FAILS(MOE_ERR_STATE, "from before moe_tape_reset", moe_tape_read(tape, old, &number, 1));
    assert_int_equal(moe_tape_grad(tape, old).id, 0);
    OK(moe_tape_status(tape));
    assert_int_equal(moe_tape_add(tape, new, old).id, 0);
    FAILS(MOE_ERR_STATE, "moe_tape_add: a value from before moe_tape_reset", moe_tape_status(tape));
    (void)!moe_queue_wait(NULL); /* another failure of the thread */
    FAILS(MOE_ERR_STATE, "moe_tape_add: a value from before", moe_tape_status(tape)); /* the text is the tape's */
    moe_tape_reset(tape);
    new = moe_tape_leaf(tape, &t, 1);
    assert_near(number_of(square(new)), 13, 0);
    moe_tape_reset(tape);
    FAILS(MOE_ERR_STATE, "moe_tape_backward: a value from before", moe_tape_backward(tape, new, none, 0));
    moe_tape_reset(tape);
  }
}

/* Each reset of one tape is followed by a look at another's value of the same number. */
static void values_of_another_tape_are_errors(void **state)
{
  static const double a[] = { 2, 3 };
  moe_tensor t = put(MOE_F32, a, SHAPE(2)), out;
  moe_tape *other;
  (void)state;
  upload();
  OK(moe_tape_create(&other, q, NULL));
  const moe_value theirs = moe_tape_leaf(other, &t, 1);
  for (int i = 0; i < 10000; i++) {
    assert_true(moe_tape_leaf(tape, &t, 1).id != theirs.id);
    FAILS(MOE_ERR_STATE, "or of another tape", moe_tape_tensor(&out, tape, theirs));
    moe_tape_reset(tape);
  }
  moe_tape_free(other);
}

/* ---- what moe_tape_grad tells ------------------------------------------------------------------------------------ */
static void gradients_leave_those_of_backward(void **state)
{
  static const double a[] = { 2, 3 };
  double now[2];
  (void)state;
  moe_tensor t = put(MOE_F32, a, SHAPE(2));
  upload();
  moe_value x = moe_tape_leaf(tape, &t, 1), loss = square(x), other = moe_tape_sum(tape, moe_tape_scale(tape, x, 9)), g;
  OK(moe_tape_backward(tape, loss, none, 0));
  const moe_value before = moe_tape_grad(tape, x);
  OK(moe_tape_gradients(&g, tape, &other, NULL, 1, &x, 1, 0));
  OK(moe_tape_read(tape, g, now, 2));
  assert_near(now[1], 9, 0);
  assert_true(moe_tape_grad(tape, x).id == before.id && moe_tape_grad(tape, other).id == 0);
  OK(moe_tape_read(tape, moe_tape_grad(tape, x), now, 2));
  assert_near(now[1], 6, 0);
}

/* ---- what FP16 cannot count ---------------------------------------------------------------------------------------- */
/* Sums and squares inside an operation may be past FP16's 65504 where its result is not. */
static void operations_have_the_range_of_their_results(void **state)
{
  enum { MANY = 70000 };
  static double zeros[MANY];
  static const double large[] = { 300, -300, 600, -600 }, small[] = { 1e-3, -1e-3, 2e-3, -2e-3 },
                      ones[] = { 1, 1, 1, 1 }, s[] = { 1, 2, 0, 1 };
  const double deviation = sqrt(225000), tiny = sqrt(2.5e-6 + 1e-9);
  double kernel[4], primitive[4];
  (void)state;
  moe_tensor many = put(MOE_F16, zeros, SHAPE(MANY)), tl = put(MOE_F16, large, SHAPE(1, 4)),
             ts = put(MOE_F16, small, SHAPE(1, 4)), tw = put(MOE_F16, ones, SHAPE(4)),
             seed = put(MOE_F16, s, SHAPE(1, 4));
  upload();
  moe_value x = moe_tape_leaf(tape, &many, 1), w = moe_tape_leaf(tape, &tw, 1), l = moe_tape_leaf(tape, &tl, 1);
  assert_near(number_of(moe_tape_softmax(tape, x, 0)), 1.0 / MANY, 0x1p-24);
  assert_near(number_of(moe_tape_log_softmax(tape, x, 0)), -log(MANY), 0x1p-7);
  moe_value largest = moe_tape_max_axes(tape, x, 1, (const int64_t[]){ 0 }, 1);
  OK(moe_tape_backward(tape, largest, none, 0));
  assert_near(number_of(moe_tape_grad(tape, x)), 1.0 / MANY, 0x1p-24);
  assert_near(number_of(moe_tape_layer_norm(tape, l, w, none, 1e-5)), 300 / deviation, 0x1p-10);
  assert_near(number_of(moe_tape_layer_norm(tape, moe_tape_leaf(tape, &ts, 1), w, none, 1e-9)), 1e-3 / tiny, 0x1p-10);
  moe_value y = moe_tape_rms_norm(tape, l, w, 1e-5);
  OK(moe_tape_backward(tape, y, moe_tape_leaf(tape, &seed, 0), 0));
  OK(moe_tape_read(tape, moe_tape_grad(tape, l), kernel, 4));
  OK(moe_tape_backward(tape, y, moe_tape_leaf(tape, &seed, 0), MOE_CREATE_GRAPH));
  OK(moe_tape_read(tape, moe_tape_grad(tape, l), primitive, 4));
  for (int i = 0; i < 4; i++) {
    assert_true(kernel[i] > 5e-4);
    assert_near(primitive[i], kernel[i], 4e-6);
  }
}

static void reductions_of_nothing(void **state)
{
  static const int64_t axis[] = { 0 };
  double row[3];
  (void)state;
  moe_tensor t = t_tensor(&m, MOE_F32, 0, SHAPE(0, 3));
  upload();
  moe_value x = moe_tape_leaf(tape, &t, 1), y = moe_tape_mean_axes(tape, x, 1, axis, 0);
  OK(moe_tape_read(tape, y, row, 3));
  for (int i = 0; i < 3; i++) assert_near(row[i], 0, 0);
  OK(moe_tape_read(tape, moe_tape_max_axes(tape, x, 1, axis, 0), row, 3));
  for (int i = 0; i < 3; i++) assert_true(row[i] < 0 && isinf(row[i]));
  OK(moe_tape_backward(tape, moe_tape_sum(tape, y), none, 0));
  assert_near(number_of(moe_tape_broadcast(tape, moe_tape_reshape(tape, moe_tape_sum(tape, x), 0, NULL), 0, NULL)), 0,
              0);
}

/* ---- the layer --------------------------------------------------------------------------------------------------- */
enum { T = 5, D = 4, F = 6, E = 4, K = 2 };
struct small {
  moe_selection_options selection;
  moe_weights_options weights;
  moe_activation activation;
  moe_layer *layer;
  moe_layer_bytes bytes;
  moe_tape_moe options;
  moe_tensor x[2];
  int n_grads; /* floats */
};
static moe_span room(uint64_t bytes)
{
  moe_tensor t = t_tensor(&m, MOE_U8, T_PACKED, SHAPE((int64_t)bytes));
  return (moe_span){ t.handle, t.offset, bytes };
}
static void small_layer(struct small *s)
{
  moe_layer_desc desc = moe_layer_desc_init();
  s->selection = moe_selection_options_init();
  s->selection.kind = MOE_SELECT_SOFTMAX;
  s->selection.top_k = K;
  s->weights = moe_weights_options_init();
  s->weights.scoring = MOE_SOFTMAX;
  s->weights.renormalize = 1;
  s->weights.scale = 1;
  s->activation = moe_activation_init();
  s->activation.kind = MOE_SILU;
  s->activation.gated = 1;
  desc.d_model = D;
  desc.d_ff = F;
  desc.n_experts = E;
  desc.dtype = MOE_F32;
  desc.selection = &s->selection;
  desc.weights = &s->weights;
  desc.activation = &s->activation;
  desc.balance_coef = 0.1;
  OK(moe_layer_create(&s->layer, ctx, &desc));
  s->bytes = moe_layer_bytes_init();
  OK(moe_layer_measure(&s->bytes, s->layer, T, 1));
  s->options = moe_tape_moe_init();
  s->options.params = room(s->bytes.params);
  s->options.grads = room(s->bytes.grads);
  for (int i = 0; i < 2; i++) {
    s->x[i] = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(T, D));
    t_put(&m, &s->x[i], t_uniform(&m, T * D, MOE_F32, 1));
  }
  upload();
  OK(moe_layer_init(s->layer, q, s->options.params, 7, 0.4));
  s->n_grads = (int)(s->bytes.grads / 4);
}
static float *grads_of(const struct small *s)
{
  float *g = malloc(s->bytes.grads);
  assert_non_null(g);
  OK(moe_span_read(q, g, s->options.grads, s->bytes.grads));
  return g;
}
static moe_value through(struct small *s, int which, int needs_grad, moe_value *x)
{
  moe_value in = moe_tape_leaf(tape, &s->x[which], needs_grad);
  if (x) *x = in;
  return square(moe_tape_moe_layer(tape, s->layer, in, &s->options, NULL));
}

static void the_layer_on_the_tape(void **state)
{
  struct small s;
  double dx[T * D];
  (void)state;
  small_layer(&s);
  OK(moe_span_fill(q, s.options.grads, 0)); /* the padding between parameters is nobody's */
  moe_value x, first = through(&s, 0, 1, &x);
  OK(moe_tape_backward(tape, first, none, 0));
  float *one = grads_of(&s);
  OK(moe_tape_read(tape, moe_tape_grad(tape, x), dx, T * D));
  double sum = 0;
  for (int i = 0; i < T * D; i++) sum += fabs(dx[i]);
  assert_true(sum > 0 && isfinite(sum));

  OK(moe_tape_backward(tape, first, none, MOE_ACCUMULATE));
  float *two = grads_of(&s);
  for (int i = 0; i < s.n_grads; i++) assert_true(two[i] == 2 * one[i]);

  /* A constant x: the layer's parameters train all the same. */
  moe_tape_reset(tape);
  OK(moe_tape_backward(tape, through(&s, 0, 0, &x), none, 0));
  float *constant = grads_of(&s);
  assert_memory_equal(constant, one, s.bytes.grads);
  assert_int_equal(moe_tape_grad(tape, x).id, 0);

  /* One layer used twice: its gradient is the sum, whatever accumulation is asked for. */
  moe_tape_reset(tape);
  OK(moe_tape_backward(tape, through(&s, 1, 1, NULL), none, 0));
  OK(moe_tape_backward(tape, through(&s, 0, 1, NULL), none, MOE_ACCUMULATE));
  float *apart = grads_of(&s);
  moe_tape_reset(tape);
  moe_value a = through(&s, 0, 1, NULL), b = through(&s, 1, 1, NULL);
  OK(moe_tape_backward(tape, moe_tape_add(tape, a, b), none, 0));
  float *together = grads_of(&s);
  assert_memory_equal(together, apart, s.bytes.grads);
  assert_memory_not_equal(together, one, s.bytes.grads);

  /* First derivatives only. */
  moe_tape_reset(tape);
  OK(moe_tape_backward(tape, through(&s, 0, 1, &x), none, MOE_CREATE_GRAPH));
  FAILS(MOE_ERR_NO_SECOND_DERIVATIVE, "moe_layer", moe_tape_backward(tape, square(moe_tape_grad(tape, x)), none, 0));

  /* Frozen: no grads span, dx still flows. */
  moe_tape_reset(tape);
  s.options.grads = (moe_span){ 0 };
  OK(moe_tape_backward(tape, through(&s, 0, 1, &x), none, 0));
  double frozen[T * D];
  OK(moe_tape_read(tape, moe_tape_grad(tape, x), frozen, T * D));
  for (int i = 0; i < T * D; i++) assert_near(frozen[i], dx[i], 0);
  free(one);
  free(two);
  free(constant);
  free(apart);
  free(together);
  moe_layer_free(s.layer);
}

/* A layer's initial values are those of moe_tensor_normal, one stream a parameter; same seed, same bits. */
static void filled_and_normal_values(void **state)
{
  enum { N = 4096 };
  static const int64_t dtypes[] = { MOE_F32, MOE_BF16, MOE_F16, MOE_F64 };
  static double a[N], b[N];
  (void)state;
  for (int i = 0; i < 4; i++) {
    if (dtypes[i] == MOE_F64 && !test_has_fp64(ctx)) continue;
    moe_tensor t = t_tensor(&m, dtypes[i], T_PACKED, SHAPE(N));
    double mean = 0, square_sum = 0;
    upload();
    OK(moe_tensor_fill(q, &t, -2.5));
    OK(moe_tensor_read(q, a, &t, N));
    for (int k = 0; k < N; k++) assert_near(a[k], -2.5, 0);
    OK(moe_tensor_normal(q, &t, 11, 3, 0.5));
    OK(moe_tensor_read(q, a, &t, N));
    OK(moe_tensor_normal(q, &t, 11, 3, 0.5));
    OK(moe_tensor_read(q, b, &t, N));
    assert_memory_equal(a, b, sizeof a);
    for (int k = 0; k < N; k++) mean += a[k] / N, square_sum += a[k] * a[k] / N;
    assert_near(mean, 0, 5 * 0.5 / 64); /* five standard errors */
    assert_near(sqrt(square_sum), 0.5, 5 * 0.5 / 64);
    OK(moe_tensor_normal(q, &t, 11, 4, 0.5));
    OK(moe_tensor_read(q, b, &t, N));
    assert_memory_not_equal(a, b, sizeof a);
    OK(moe_tensor_normal(q, &t, 12, 3, 0.5));
    OK(moe_tensor_read(q, b, &t, N));
    assert_memory_not_equal(a, b, sizeof a);
  }
  struct small s;
  moe_tensor router, same = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(E, D));
  small_layer(&s);
  OK(moe_layer_param(&router, NULL, NULL, s.layer, s.options.params, (moe_span){ 0 }, 0));
  OK(moe_tensor_read(q, a, &router, E * D));
  OK(moe_tensor_normal(q, &same, 7, 0, 0.4));
  OK(moe_tensor_read(q, b, &same, N)); /* as many as there are */
  assert_memory_equal(a, b, E * D * sizeof *a);
  moe_layer_free(s.layer);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */
/* What is alive: blocks of device memory, counted between the core and the backend, and OpenCL's objects. */
static long blocks;
static struct moe__backend counting;
static const struct moe__backend *counted;
static moe_status count_alloc(struct moe__dev *dev, uint64_t bytes, void **handle)
{
  moe_status st = counted->alloc(dev, bytes, handle);
  blocks += st == MOE_OK;
  return st;
}
static void count_release(struct moe__dev *dev, void *handle)
{
  counted->release(dev, handle);
  blocks--;
}
static void count_blocks(int on)
{
  if (on) {
    counted = ctx->be;
    counting = *counted;
    counting.alloc = count_alloc;
    counting.release = count_release;
    ctx->be = &counting;
  } else ctx->be = counted;
  blocks = 0;
}

struct living {
  long blocks, refs, objects;
  uint64_t held, used;
};
static struct living living_now(void)
{
  struct living l = { .blocks = blocks, .refs = ctx->refs };
#if MOE_HAVE_OPENCL && defined MOE_DEBUG
  if (strcmp(ctx->be->name, "opencl") == 0) l.objects = moe__cl_live();
#endif
  moe_tape_memory(tape, &l.held, &l.used);
  return l;
}
/* Kilobytes that the process has in memory; 0 where that means little (sanitizers keep freed memory). */
static long resident(void)
{
  long pages = 0, all;
  FILE *f = test_short() ? NULL : fopen("/proc/self/statm", "r");
  if (!f) return 0;
  if (fscanf(f, "%ld %ld", &all, &pages) != 2) pages = 0;
  fclose(f);
  return pages * 4;
}

/* A step of training: forward, backward and reset; forward alone; and calls that fail. */
static void cycle(struct small *s, int i)
{
  moe_tape_reset(tape);
  switch (i % 5) {
  case 4: { /* x is of the wrong width: sticky, then gone */
    moe_value x = moe_tape_leaf(tape, &s->x[0], 1), y = moe_tape_matmul(tape, x, x, 0, 1);
    assert_int_equal(moe_tape_moe_layer(tape, s->layer, y, &s->options, NULL).id, 0);
    FAILS(MOE_ERR_INVALID, "x has extent", moe_tape_status(tape));
    break;
  }
  case 3:
    (void)through(s, 1, 0, NULL);
    OK(moe_tape_status(tape));
    break;
  case 2: { /* a node without a second derivative, met half way */
    moe_value x;
    OK(moe_tape_backward(tape, through(s, 0, 1, &x), none, MOE_CREATE_GRAPH));
    moe_value g = square(moe_tape_grad(tape, x));
    FAILS(MOE_ERR_NO_SECOND_DERIVATIVE, "MOE_DECOMPOSE in the call that made it", moe_tape_backward(tape, g, none, 0));
    break;
  }
  default: OK(moe_tape_backward(tape, through(s, i % 2, 1, NULL), none, 0));
  }
}

static void nothing_grows_over_thousands_of_cycles(void **state)
{
  const int cycles = test_short() ? 1000 : 10000;
  struct small s;
  struct living warm[5], now;
  long before = 0, leaked;
  (void)state;
  count_blocks(1);
  small_layer(&s);
  for (int i = 0; i < cycles; i++) {
    cycle(&s, i);
    now = living_now();
    if (i < 20) warm[i % 5] = now;
    if (memcmp(&now, &warm[i % 5], sizeof now))
      fail_msg("cycle %d: %ld blocks, %ld references, %ld objects, %llu of %llu bytes; after warming up %ld, %ld, %ld, "
               "%llu of %llu",
               i, now.blocks, now.refs, now.objects, (unsigned long long)now.used, (unsigned long long)now.held,
               warm[i % 5].blocks, warm[i % 5].refs, warm[i % 5].objects, (unsigned long long)warm[i % 5].used,
               (unsigned long long)warm[i % 5].held);
    if (i % 50 == 49) OK(moe_queue_wait(q));
    if (i == cycles / 4) before = resident();
  }
  OK(moe_queue_wait(q));
  leaked = (resident() - before) * 1024 / (cycles - cycles / 4);
  if (before && leaked > 200) fail_msg("the process grows by %ld bytes a cycle", leaked); /* less than any object */
  moe_layer_free(s.layer);
  count_blocks(0);
}

/* A small block: blocks are added while warming up and never again; a large value gets one of its own. */
static void the_arena_is_reused(void **state)
{
  moe_tape_desc desc = moe_tape_desc_init();
  uint64_t held = 0, used = 0, first = 0;
  moe_tensor t = t_tensor(&m, MOE_F32, 0, SHAPE(30, 30));
  (void)state;
  t_put(&m, &t, t_uniform(&m, 900, MOE_F32, 1));
  upload();
  moe_tape_free(tape);
  desc.block = 1024;
  OK(moe_tape_create(&tape, q, &desc));
  moe_tape_memory(tape, &held, &used);
  assert_true(held == 0 && used == 0); /* nothing before it is needed */
  for (int i = 0; i < 10; i++) {
    moe_tape_reset(tape);
    moe_tape_memory(tape, &held, &used);
    assert_true(held == first && used == 0);
    moe_value x = moe_tape_leaf(tape, &t, 1);
    OK(moe_tape_backward(tape, moe_tape_sum(tape, moe_tape_mul(tape, x, x)), none, 0));
    moe_tape_memory(tape, &held, &used);
    assert_true(held >= used && used >= 2 * 3600);
    if (i == 0) first = held;
    assert_int_equal(held, first);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    TEST(gradients_of_maps),
    TEST(second_derivatives_of_maps),
    TEST(gradients_of_matmul),
    TEST(second_derivatives_of_matmul),
    TEST(gradients_of_a_parameter_used_three_times),
    TEST(gradients_of_embedding),
    TEST(gradients_of_rms_norm),
    TEST(gradients_of_cross_entropy),
    TEST(ids_out_of_range),
    TEST(accumulation_doubles_exactly),
    TEST(an_unused_parameter_has_no_stale_gradient),
    TEST(a_seed_multiplies),
    TEST(empty_tensors),
    TEST(values_from_before_reset_are_errors),
    TEST(values_of_another_tape_are_errors),
    TEST(gradients_leave_those_of_backward),
    TEST(operations_have_the_range_of_their_results),
    TEST(reductions_of_nothing),
    TEST(the_layer_on_the_tape),
    TEST(filled_and_normal_values),
    TEST(nothing_grows_over_thousands_of_cycles),
    TEST(the_arena_is_reused),
  };
  if (!test_open(&ctx, &q)) return 77;
  int rc = TEST_MAIN(tests);
  test_close(ctx, q);
  return rc;
}
