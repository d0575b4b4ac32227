/* tape_ops.c - primitive operations.  Their rules are written in the tape's own operations, so that with
   MOE_CREATE_GRAPH gradients are recorded like anything else and every derivative exists. */
#include "core/tape.h"

#include <math.h>

typedef struct moe__node node;
static const moe_value none;

static moe_tensor tensor_of(const moe_tape *t, moe_value v)
{
  return moe__tape_at(t, v)->t;
}

/* A value that must be a float; NULL with the tape failed. */
static const struct moe__value *look_float(moe_tape *t, moe_value v, const char *fn, const char *name)
{
  const struct moe__value *x = moe__tape_look(t, v, fn);
  if (!x || moe__is_float(x->t.dtype)) return x;
  TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %s is %s, a float is wanted", fn, name, moe_dtype_name(x->t.dtype));
  return NULL;
}

/* ---- element-wise maps with broadcasting ----------------------------------------------------------------------------- */
/* The shape that a and b broadcast to: *out holds rank and extents.  0 with the tape failed. */
static int broadcast_shape(moe_tape *t, moe_tensor *out, const moe_tensor *b, const char *fn)
{
  const int rank = out->rank > b->rank ? out->rank : b->rank;
  moe_tensor a = *out;
  out->rank = rank;
  for (int d = 0; d < rank; d++) {
    const int da = d - (rank - a.rank), db = d - (rank - b->rank);
    const int64_t na = da < 0 ? 1 : a.shape[da], nb = db < 0 ? 1 : b->shape[db];
    if (na != nb && na != 1 && nb != 1)
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: extents %lld and %lld do not broadcast (dimension %d of the result)",
                       fn, (long long)na, (long long)nb, d),
             0;
    out->shape[d] = na == 1 ? nb : na;
  }
  return 1;
}

/* x as a view of `shape`, repeated by strides of 0. */
static moe_tensor spread(moe_tensor x, int rank, const int64_t *shape)
{
  moe_tensor y = x;
  y.rank = rank;
  for (int d = 0; d < rank; d++) {
    const int dx = d - (rank - x.rank);
    y.shape[d] = shape[d];
    y.stride[d] = dx < 0 || (x.shape[dx] == 1 && shape[d] != 1) ? 0 : x.stride[dx];
  }
  return y;
}

/* v in the dtype of sums: what several maps in a row are computed in, so that bf16 and f16 are rounded once. */
static moe_value widened(moe_tape *t, moe_value v)
{
  return t->status ? none : moe_tape_cast(t, v, moe__real_of(tensor_of(t, v).dtype));
}
/* The result of such, in the dtype that `like` has. */
static moe_value narrowed(moe_tape *t, moe_value y, moe_value like)
{
  return t->status ? none : moe_tape_cast(t, y, tensor_of(t, like).dtype);
}

/* y = op(in[0], in[1], in[2]) in the shape they broadcast to, recorded under `rule`. */
static moe_value map(moe_tape *t, const struct moe__rule *rule, int64_t op, int n, const moe_value *in, double alpha,
                     const char *fn)
{
  static const char *const names[] = { "a", "b", "c" };
  const int condition = op == MOE__ND_WHERE; /* in[0] is no operand of the arithmetic */
  moe_tensor x[3] = { { 0 } }, shape = { 0 };
  if (t && !t->status && !isfinite(alpha)) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %g is not finite", fn, alpha);
  for (int i = 0; i < n; i++) {
    const struct moe__value *v = condition && !i ? moe__tape_look(t, in[i], fn) : look_float(t, in[i], fn, names[i]);
    if (!v) return none;
    x[i] = v->t;
    if (i > condition && x[i].dtype != x[condition].dtype)
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %s and %s, one dtype is wanted", fn, moe_dtype_name(x[condition].dtype),
                       moe_dtype_name(x[i].dtype));
    if (!i) shape = x[0];
    else if (!broadcast_shape(t, &shape, &x[i], fn)) return none;
  }
  if (condition && !moe__is_float(x[0].dtype) && x[0].dtype != MOE_U8 && x[0].dtype != MOE_I32)
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: condition is %s, wanted u8, i32 or a float", fn,
                     moe_dtype_name(x[0].dtype));
  if (condition && moe__is_float(x[0].dtype) && (x[0].dtype == MOE_F64) != (x[1].dtype == MOE_F64))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: condition is %s, a and b %s", fn, moe_dtype_name(x[0].dtype),
                     moe_dtype_name(x[1].dtype));
  for (int i = 0; i < n; i++) x[i] = spread(x[i], shape.rank, shape.shape);
  moe_tensor y = moe__tape_fresh(t, x[condition].dtype, shape.rank, shape.shape);
  TAPE_RUN(t, nd_map, .dtype = moe__real_of(y.dtype), .y = y, .a = x[0], .b = x[1], .c = x[2], .op = op,
           .alpha = alpha);
  node *made = moe__tape_node(t, rule, n, in, 1);
  if (made) made->alpha = alpha;
  return moe__tape_record(t, made, y);
}

static moe_value map1(moe_tape *t, const struct moe__rule *rule, int64_t op, moe_value a, double alpha, const char *fn)
{
  return map(t, rule, op, 1, &a, alpha, fn);
}
static moe_value map2(moe_tape *t, const struct moe__rule *rule, int64_t op, moe_value a, moe_value b, const char *fn)
{
  return map(t, rule, op, 2, (const moe_value[]){ a, b }, 0, fn);
}

/* g, summed over the dimensions along which v was repeated. */
static moe_value sum_to(moe_tape *t, moe_value g, moe_value v)
{
  if (t->status || !g.id) return none;
  const moe_tensor want = tensor_of(t, v), have = tensor_of(t, g);
  int64_t axes[MOE_RANK_MAX], n = 0;
  for (int d = 0; d < have.rank; d++) {
    const int dv = d - (have.rank - want.rank);
    if (dv < 0 || (want.shape[dv] == 1 && have.shape[d] != 1)) axes[n++] = d;
  }
  if (n) g = moe_tape_sum_axes(t, g, n, axes, 1);
  return have.rank == want.rank ? g : moe_tape_reshape(t, g, want.rank, want.shape);
}

static void give(moe_tape *t, moe_value v, moe_value g)
{
  if (moe__tape_wants(t, v)) moe__tape_contribute(t, v, sum_to(t, g, v));
}

moe_value moe__tape_constant(moe_tape *t, moe_value like, double x)
{
  if (t->status) return none;
  const int64_t dtype = tensor_of(t, like).dtype;
  moe_value one = moe_tape_cast(t, moe__tape_one(t, dtype), dtype);
  return x == 1 ? one : moe_tape_scale(t, one, x);
}

static void back_add(moe_tape *t, node *n, const moe_value *d)
{
  give(t, n->in[0], d[0]);
  give(t, n->in[1], d[0]);
}
static const struct moe__rule rule_add = { "add", back_add, NULL, 0 };
moe_value moe_tape_add(moe_tape *t, moe_value a, moe_value b)
{
  return map2(t, &rule_add, MOE__ND_ADD, a, b, "moe_tape_add");
}

static void back_sub(moe_tape *t, node *n, const moe_value *d)
{
  give(t, n->in[0], d[0]);
  if (moe__tape_wants(t, n->in[1])) give(t, n->in[1], moe_tape_neg(t, d[0]));
}
static const struct moe__rule rule_sub = { "sub", back_sub, NULL, 0 };
moe_value moe_tape_sub(moe_tape *t, moe_value a, moe_value b)
{
  return map2(t, &rule_sub, MOE__ND_SUB, a, b, "moe_tape_sub");
}

static void back_mul(moe_tape *t, node *n, const moe_value *d)
{
  for (int i = 0; i < 2; i++)
    if (moe__tape_wants(t, n->in[i])) give(t, n->in[i], moe_tape_mul(t, d[0], n->in[!i]));
}
static const struct moe__rule rule_mul = { "mul", back_mul, NULL, 0 };
moe_value moe_tape_mul(moe_tape *t, moe_value a, moe_value b)
{
  return map2(t, &rule_mul, MOE__ND_MUL, a, b, "moe_tape_mul");
}

/* y = a/b: da = d/b, db = -d y/b */
static void back_div(moe_tape *t, node *n, const moe_value *d)
{
  moe_value by = moe_tape_div(t, d[0], n->in[1]);
  give(t, n->in[0], by);
  if (moe__tape_wants(t, n->in[1])) give(t, n->in[1], moe_tape_neg(t, moe_tape_mul(t, by, n->out[0])));
}
static const struct moe__rule rule_div = { "div", back_div, NULL, 0 };
moe_value moe_tape_div(moe_tape *t, moe_value a, moe_value b)
{
  return map2(t, &rule_div, MOE__ND_DIV, a, b, "moe_tape_div");
}

static const struct moe__rule rule_step = { "greater", NULL, NULL, 0 };
/* 1 where a > b (or a = b), never recorded: it has no derivative. */
static moe_value compare(moe_tape *t, int64_t op, moe_value a, moe_value b, const char *fn)
{
  const int64_t recording = moe_tape_set_recording(t, 0);
  moe_value y = map2(t, &rule_step, op, a, b, fn);
  moe_tape_set_recording(t, recording);
  return y;
}
moe_value moe_tape_greater(moe_tape *t, moe_value a, moe_value b)
{
  return compare(t, MOE__ND_GREATER, a, b, "moe_tape_greater");
}

static moe_value equal(moe_tape *t, moe_value a, moe_value b)
{
  return compare(t, MOE__ND_EQUAL, a, b, "moe_tape");
}

/* da = d where a > b, d/2 where they are equal */
static void back_maximum(moe_tape *t, node *n, const moe_value *d)
{
  moe_value tie = moe_tape_scale(t, equal(t, n->in[0], n->in[1]), 0.5);
  for (int i = 0; i < 2; i++)
    if (moe__tape_wants(t, n->in[i]))
      give(t, n->in[i], moe_tape_mul(t, d[0], moe_tape_add(t, moe_tape_greater(t, n->in[i], n->in[!i]), tie)));
}
static const struct moe__rule rule_maximum = { "maximum", back_maximum, NULL, 0 };
moe_value moe_tape_maximum(moe_tape *t, moe_value a, moe_value b)
{
  return map2(t, &rule_maximum, MOE__ND_MAX, a, b, "moe_tape_maximum");
}

static void back_where(moe_tape *t, node *n, const moe_value *d)
{
  moe_value zero = moe__tape_constant(t, d[0], 0);
  if (moe__tape_wants(t, n->in[1])) give(t, n->in[1], moe_tape_where(t, n->in[0], d[0], zero));
  if (moe__tape_wants(t, n->in[2])) give(t, n->in[2], moe_tape_where(t, n->in[0], zero, d[0]));
}
static const struct moe__rule rule_where = { "where", back_where, NULL, 0 };
moe_value moe_tape_where(moe_tape *t, moe_value condition, moe_value a, moe_value b)
{
  return map(t, &rule_where, MOE__ND_WHERE, 3, (const moe_value[]){ condition, a, b }, 0, "moe_tape_where");
}

/* ---- maps of one value ------------------------------------------------------------------------------------------------ */
static void back_scale(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe_tape_scale(t, d[0], n->alpha));
}
static const struct moe__rule rule_scale = { "scale", back_scale, NULL, 0 }, rule_neg = { "neg", back_scale, NULL, 0 };
moe_value moe_tape_scale(moe_tape *t, moe_value a, double factor)
{
  return map1(t, &rule_scale, MOE__ND_COPY, a, factor, "moe_tape_scale");
}
moe_value moe_tape_neg(moe_tape *t, moe_value a)
{
  return map1(t, &rule_neg, MOE__ND_COPY, a, -1, "moe_tape_neg");
}

/* Each of these: the derivative f'(a), from a and y = f(a), times d. */
static void through(moe_tape *t, node *n, moe_value d, moe_value slope)
{
  moe__tape_contribute(t, n->in[0], moe_tape_mul(t, d, slope));
}

static void back_pow(moe_tape *t, node *n, const moe_value *d)
{
  if (n->alpha == 0) through(t, n, d[0], moe__tape_constant(t, d[0], 0));
  else through(t, n, d[0], moe_tape_scale(t, moe_tape_pow(t, n->in[0], n->alpha - 1), n->alpha));
}
static const struct moe__rule rule_pow = { "pow", back_pow, NULL, 0 };
moe_value moe_tape_pow(moe_tape *t, moe_value a, double exponent)
{
  return map1(t, &rule_pow, MOE__ND_POW, a, exponent, "moe_tape_pow");
}

static void back_exp(moe_tape *t, node *n, const moe_value *d)
{
  through(t, n, d[0], n->out[0]);
}
static void back_log(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe_tape_div(t, d[0], n->in[0]));
}
static void back_sqrt(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe_tape_div(t, moe_tape_scale(t, d[0], 0.5), n->out[0]));
}
/* 1 - y^2 */
static void back_tanh(moe_tape *t, node *n, const moe_value *d)
{
  moe_value y = n->out[0];
  through(t, n, d[0], moe_tape_sub(t, moe__tape_constant(t, y, 1), moe_tape_mul(t, y, y)));
}
/* y (1-y) */
static void back_sigmoid(moe_tape *t, node *n, const moe_value *d)
{
  moe_value y = n->out[0];
  through(t, n, d[0], moe_tape_mul(t, y, moe_tape_sub(t, moe__tape_constant(t, y, 1), y)));
}
static void back_relu(moe_tape *t, node *n, const moe_value *d)
{
  moe_value zero = moe__tape_constant(t, d[0], 0);
  moe__tape_contribute(t, n->in[0], moe_tape_where(t, moe_tape_greater(t, n->in[0], zero), d[0], zero));
}
/* 2/sqrt(pi) exp(-a^2) */
static void back_erf(moe_tape *t, node *n, const moe_value *d)
{
  moe_value square = moe_tape_mul(t, n->in[0], n->in[0]);
  through(t, n, d[0], moe_tape_scale(t, moe_tape_exp(t, moe_tape_neg(t, square)), 1.12837916709551257390));
}
/* a sigmoid(a) */
static void expand_silu(moe_tape *t, node *n, moe_value *out)
{
  moe_value a = widened(t, n->in[0]);
  out[0] = narrowed(t, moe_tape_mul(t, a, moe_tape_sigmoid(t, a)), n->in[0]);
}
/* a/2 (1 + erf(a/sqrt 2)) */
static void expand_gelu(moe_tape *t, node *n, moe_value *out)
{
  moe_value a = widened(t, n->in[0]), e = moe_tape_erf(t, moe_tape_scale(t, a, 0.70710678118654752440));
  moe_value y = moe_tape_mul(t, moe_tape_scale(t, a, 0.5), moe_tape_add(t, moe__tape_constant(t, a, 1), e));
  out[0] = narrowed(t, y, n->in[0]);
}
/* a/2 (1 + tanh q) = a sigmoid(2q), q = sqrt(2/pi) (a + 0.044715 a^3): sigmoid is exactly 0 and 1 at the ends, as tanh
   need not be */
static void expand_gelu_tanh(moe_tape *t, node *n, moe_value *out)
{
  moe_value a = widened(t, n->in[0]), cubic = moe_tape_scale(t, moe_tape_pow(t, a, 3), 0.044715);
  moe_value s = moe_tape_sigmoid(t, moe_tape_scale(t, moe_tape_add(t, a, cubic), 2 * 0.79788456080286535588));
  out[0] = narrowed(t, moe_tape_mul(t, a, s), n->in[0]);
}

#define UNARY(name, OP, backward, expand)                                                                              \
  static const struct moe__rule rule_##name = { #name, backward, expand, 0 };                                          \
  moe_value moe_tape_##name(moe_tape *t, moe_value a)                                                                  \
  {                                                                                                                    \
    return map1(t, &rule_##name, MOE__ND_##OP, a, 0, "moe_tape_" #name);                                               \
  }
UNARY(exp, EXP, back_exp, NULL)
UNARY(log, LOG, back_log, NULL)
UNARY(sqrt, SQRT, back_sqrt, NULL)
UNARY(tanh, TANH, back_tanh, NULL)
UNARY(sigmoid, SIGMOID, back_sigmoid, NULL)
UNARY(relu, RELU, back_relu, NULL)
UNARY(erf, ERF, back_erf, NULL)
UNARY(silu, SILU, NULL, expand_silu)
UNARY(gelu, GELU, NULL, expand_gelu)
UNARY(gelu_tanh, GELU_TANH, NULL, expand_gelu_tanh)

/* ---- copies into another shape or dtype ---------------------------------------------------------------------------------- */
/* y = x, element by element. */
static void copy(moe_tape *t, moe_tensor y, moe_tensor x)
{
  TAPE_RUN(t, nd_map, .dtype = moe__real_of(y.dtype), .y = y, .a = x, .op = MOE__ND_COPY, .alpha = 1);
}

static void back_cast(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe_tape_cast(t, d[0], tensor_of(t, n->in[0]).dtype));
}
static const struct moe__rule rule_cast = { "cast", back_cast, NULL, 0 };
moe_value moe_tape_cast(moe_tape *t, moe_value a, int64_t dtype)
{
  static const char fn[] = "moe_tape_cast";
  const struct moe__value *v = look_float(t, a, fn, "a");
  if (!v) return none;
  if (!moe__is_float(dtype))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: dtype %s is no float", fn, moe_dtype_name(dtype));
  if (v->t.dtype == dtype) return a;
  const int64_t real = v->t.dtype == MOE_F64 || dtype == MOE_F64 ? MOE_F64 : MOE_F32;
  if (real == MOE_F64 && v->t.dtype != MOE_F32 && dtype != MOE_F32)
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %s to %s goes by way of f32", fn, moe_dtype_name(v->t.dtype),
                     moe_dtype_name(dtype));
  moe_tensor x = v->t, y = moe__tape_fresh(t, dtype, x.rank, x.shape);
  TAPE_RUN(t, nd_map, .dtype = real, .y = y, .a = x, .op = MOE__ND_COPY, .alpha = 1);
  return moe__tape_record(t, moe__tape_node(t, &rule_cast, 1, &a, 1), y);
}

static void back_broadcast(moe_tape *t, node *n, const moe_value *d)
{
  give(t, n->in[0], d[0]);
}
static const struct moe__rule rule_broadcast = { "broadcast", back_broadcast, NULL, 0 };
moe_value moe_tape_broadcast(moe_tape *t, moe_value a, int64_t rank, const int64_t *shape)
{
  static const char fn[] = "moe_tape_broadcast";
  const struct moe__value *v = look_float(t, a, fn, "a");
  if (!v) return none;
  moe_tensor x = v->t, want = { 0 };
  if (rank < x.rank || rank > MOE_RANK_MAX || (rank && !shape))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: rank %lld, wanted %d to %d, or no shape", fn, (long long)rank, x.rank,
                     MOE_RANK_MAX);
  want.rank = (int32_t)rank;
  for (int64_t d = 0; d < rank; d++) {
    const int64_t dx = d - (rank - x.rank);
    want.shape[d] = shape[d];
    if (shape[d] < 0 || (dx >= 0 && x.shape[dx] != 1 && x.shape[dx] != shape[d]))
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: extent %lld of dimension %lld, a has %lld", fn, (long long)shape[d],
                       (long long)d, (long long)(dx < 0 ? 1 : x.shape[dx]));
  }
  moe_tensor y = moe__tape_fresh(t, x.dtype, rank, want.shape);
  copy(t, y, spread(x, want.rank, want.shape));
  return moe__tape_record(t, moe__tape_node(t, &rule_broadcast, 1, &a, 1), y);
}

static void back_reshape(moe_tape *t, node *n, const moe_value *d)
{
  const moe_tensor x = tensor_of(t, n->in[0]);
  moe__tape_contribute(t, n->in[0], moe_tape_reshape(t, d[0], x.rank, x.shape));
}
static const struct moe__rule rule_reshape = { "reshape", back_reshape, NULL, 0 };
moe_value moe_tape_reshape(moe_tape *t, moe_value a, int64_t rank, const int64_t *shape)
{
  static const char fn[] = "moe_tape_reshape";
  moe_tensor y;
  const struct moe__value *v = moe__tape_look(t, a, fn);
  if (!v) return none;
  moe_status st = moe_tensor_packed(&y, (moe_span){ v->t.handle, v->t.offset, UINT64_MAX }, v->t.dtype, rank, shape);
  if (st) return moe__tape_fail(t, moe__fail_in(st, fn)), none;
  if (moe_tensor_count(&y) != moe_tensor_count(&v->t))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %lld elements, shape has %lld", fn, (long long)moe_tensor_count(&v->t),
                     (long long)moe_tensor_count(&y));
  return moe__tape_record(t, moe__tape_node(t, &rule_reshape, 1, &a, 1), y);
}

static void back_permute(moe_tape *t, node *n, const moe_value *d)
{
  int64_t inverse[MOE_RANK_MAX] = { 0 };
  for (int64_t i = 0; i < tensor_of(t, d[0]).rank; i++) inverse[n->flag[i]] = i;
  moe__tape_contribute(t, n->in[0], moe_tape_permute(t, d[0], inverse));
}
static const struct moe__rule rule_permute = { "permute", back_permute, NULL, 0 };
moe_value moe_tape_permute(moe_tape *t, moe_value a, const int64_t *order)
{
  static const char fn[] = "moe_tape_permute";
  const struct moe__value *v = look_float(t, a, fn, "a");
  int64_t shape[MOE_RANK_MAX];
  unsigned seen = 0;
  if (!v) return none;
  moe_tensor x = v->t, view = x;
  for (int i = 0; i < x.rank; i++) {
    const int64_t from = order ? order[i] : -1;
    if (from < 0 || from >= x.rank || (seen >> from & 1))
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: order is no permutation of 0..%d", fn, x.rank - 1);
    seen |= 1u << from;
    shape[i] = view.shape[i] = x.shape[from];
    view.stride[i] = x.stride[from];
  }
  moe_tensor y = moe__tape_fresh(t, x.dtype, x.rank, shape);
  copy(t, y, view);
  node *n = moe__tape_node(t, &rule_permute, 1, &a, 1);
  for (int i = 0; n && i < x.rank; i++) n->flag[i] = order[i];
  return moe__tape_record(t, n, y);
}

/* 0 but for a slice, where it is the value; the inverse of slice. */
static moe_value pad(moe_tape *t, moe_value a, moe_tensor like, int64_t dim, int64_t begin);

static void back_slice(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], pad(t, d[0], tensor_of(t, n->in[0]), n->flag[0], n->flag[1]));
}
static const struct moe__rule rule_slice = { "slice", back_slice, NULL, 0 };
moe_value moe_tape_slice(moe_tape *t, moe_value a, int64_t dim, int64_t begin, int64_t end)
{
  const struct moe__value *v = look_float(t, a, "moe_tape_slice", "a");
  moe_tensor view;
  if (!v) return none;
  moe_status st = moe_tensor_slice(&view, &v->t, dim, begin, end);
  if (st) return moe__tape_fail(t, moe__fail_in(st, "moe_tape_slice")), none;
  moe_tensor y = moe__tape_fresh(t, view.dtype, view.rank, view.shape);
  copy(t, y, view);
  node *n = moe__tape_node(t, &rule_slice, 1, &a, 1);
  if (n) n->flag[0] = dim, n->flag[1] = begin;
  return moe__tape_record(t, n, y);
}

static void back_pad(moe_tape *t, node *n, const moe_value *d)
{
  const moe_tensor x = tensor_of(t, n->in[0]);
  moe__tape_contribute(t, n->in[0], moe_tape_slice(t, d[0], n->flag[0], n->flag[1], n->flag[1] + x.shape[n->flag[0]]));
}
static const struct moe__rule rule_pad = { "pad", back_pad, NULL, 0 };
static moe_value pad(moe_tape *t, moe_value a, moe_tensor like, int64_t dim, int64_t begin)
{
  if (t->status) return none;
  moe_tensor x = tensor_of(t, a), y = moe__tape_fresh(t, x.dtype, like.rank, like.shape), part = { 0 };
  TAPE_RUN(t, elt_map, .dtype = moe__real_of(y.dtype), .y = moe__flatten(y), .op = MOE__ELT_FILL,
           .n = moe_tensor_count(&y));
  if (!t->status) moe__tape_fail(t, moe_tensor_slice(&part, &y, dim, begin, begin + x.shape[dim]));
  if (!t->status) copy(t, part, x);
  node *n = moe__tape_node(t, &rule_pad, 1, &a, 1);
  if (n) n->flag[0] = dim, n->flag[1] = begin;
  return moe__tape_record(t, n, y);
}

static void back_concat(moe_tape *t, node *n, const moe_value *d)
{
  for (int64_t i = 0, at = 0; i < n->n_in; i++) {
    const int64_t extent = t->status ? 0 : tensor_of(t, n->in[i]).shape[n->flag[0]];
    if (moe__tape_wants(t, n->in[i]))
      moe__tape_contribute(t, n->in[i], moe_tape_slice(t, d[0], n->flag[0], at, at + extent));
    at += extent;
  }
}
static const struct moe__rule rule_concat = { "concat", back_concat, NULL, 0 };
moe_value moe_tape_concat(moe_tape *t, const moe_value *parts, int64_t n, int64_t dim)
{
  static const char fn[] = "moe_tape_concat";
  moe_tensor y = { 0 }, first = { 0 };
  if (!t || t->status) return none;
  if (!parts || n < 1) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: at least one part is wanted", fn);
  for (int64_t i = 0; i < n; i++) {
    const struct moe__value *v = look_float(t, parts[i], fn, "a part");
    if (!v) return none;
    moe_tensor x = v->t;
    if (!i) y = first = x;
    if (dim < 0 || dim >= x.rank)
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: dim %lld of rank %d", fn, (long long)dim, x.rank);
    if (i) y.shape[dim] += x.shape[dim];
    x.shape[dim] = first.shape[dim];
    if (x.dtype != first.dtype || !moe__same_shape(&x, &first))
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: part %lld differs from the first in dtype or shape", fn, (long long)i);
  }
  y = moe__tape_fresh(t, y.dtype, y.rank, y.shape);
  for (int64_t i = 0, at = 0; i < n && !t->status; i++) {
    const moe_tensor x = tensor_of(t, parts[i]);
    moe_tensor part;
    moe__tape_fail(t, moe_tensor_slice(&part, &y, dim, at, at + x.shape[dim]));
    if (!t->status) copy(t, part, x);
    at += x.shape[dim];
  }
  node *made = moe__tape_node(t, &rule_concat, n, parts, 1);
  if (made) made->flag[0] = dim;
  return moe__tape_record(t, made, y);
}

/* ---- reductions ------------------------------------------------------------------------------------------------------------ */
/* y = alpha * (sum or largest of a) over `axes`, with extents of 1 there. */
static moe_tensor reduce(moe_tape *t, moe_tensor x, int64_t op, int64_t axes, double alpha)
{
  int64_t shape[MOE_RANK_MAX];
  for (int d = 0; d < x.rank; d++) shape[d] = axes >> d & 1 ? 1 : x.shape[d];
  moe_tensor y = moe__tape_fresh(t, x.dtype, x.rank, shape), scratch = { 0 };
  struct moe__mark mark = moe__tape_mark(t);
  const int64_t room = moe__nd_reduce_scratch(&x, axes);
  if (room) scratch = moe__tape_flat(t, moe__real_of(x.dtype), room);
  TAPE_RUN(t, nd_reduce, .dtype = moe__real_of(x.dtype), .y = y, .a = x, .scratch = scratch, .op = op, .axes = axes,
           .alpha = alpha);
  moe__tape_rewind(t, mark);
  return y;
}

/* Axes as bits: 0 with the tape failed, where they are not good or there is none. */
static int64_t axis_bits(moe_tape *t, int64_t rank, int64_t n, const int64_t *axes, const char *fn)
{
  int64_t bits = 0;
  for (int64_t i = 0; axes && i < n; i++) {
    if (axes[i] < 0 || axes[i] >= rank || (bits >> axes[i] & 1))
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: axis %lld of rank %lld, or twice", fn, (long long)axes[i],
                       (long long)rank),
             0;
    bits |= (int64_t)1 << axes[i];
  }
  if (!bits) TAPE_FAIL(t, MOE_ERR_INVALID, "%s: at least one axis is wanted", fn);
  return bits;
}

/* Without the extents of 1 that a reduction left. */
static moe_value squeeze(moe_tape *t, moe_value y, int64_t axes)
{
  int64_t shape[MOE_RANK_MAX], rank = 0;
  if (t->status) return none;
  const moe_tensor x = tensor_of(t, y);
  for (int d = 0; d < x.rank; d++)
    if (!(axes >> d & 1)) shape[rank++] = x.shape[d];
  return moe_tape_reshape(t, y, rank, shape);
}

static void back_sum_axes(moe_tape *t, node *n, const moe_value *d)
{
  const moe_tensor x = tensor_of(t, n->in[0]);
  moe_value g = n->alpha == 1 ? d[0] : moe_tape_scale(t, d[0], n->alpha);
  moe__tape_contribute(t, n->in[0], moe_tape_broadcast(t, g, x.rank, x.shape));
}
static const struct moe__rule rule_sum_axes = { "sum_axes", back_sum_axes, NULL, 0 },
                              rule_mean_axes = { "mean_axes", back_sum_axes, NULL, 0 };
static moe_value sum_axes(moe_tape *t, const struct moe__rule *rule, moe_value a, int64_t n, const int64_t *axes,
                          int64_t keep, const char *fn)
{
  const struct moe__value *v = look_float(t, a, fn, "a");
  const int64_t bits = v ? axis_bits(t, v->t.rank, n, axes, fn) : 0;
  double alpha = 1;
  if (!bits) return none;
  if (rule == &rule_mean_axes)
    for (int d = 0; d < v->t.rank; d++)
      if (bits >> d & 1) alpha = v->t.shape[d] ? alpha / (double)v->t.shape[d] : 0;
  moe_tensor y = reduce(t, v->t, MOE__ND_SUM, bits, alpha);
  node *made = moe__tape_node(t, rule, 1, &a, 1);
  if (made) made->alpha = alpha;
  moe_value sum = moe__tape_record(t, made, y);
  return keep ? sum : squeeze(t, sum, bits);
}
moe_value moe_tape_sum_axes(moe_tape *t, moe_value a, int64_t n, const int64_t *axes, int64_t keep)
{
  return sum_axes(t, &rule_sum_axes, a, n, axes, keep, "moe_tape_sum_axes");
}
moe_value moe_tape_mean_axes(moe_tape *t, moe_value a, int64_t n, const int64_t *axes, int64_t keep)
{
  return sum_axes(t, &rule_mean_axes, a, n, axes, keep, "moe_tape_mean_axes");
}

/* d, in equal parts, where a is the largest */
static void back_max_axes(moe_tape *t, node *n, const moe_value *d)
{
  int64_t axes[MOE_RANK_MAX], count = 0;
  for (int i = 0; i < MOE_RANK_MAX; i++)
    if (n->flag[0] >> i & 1) axes[count++] = i;
  moe_value largest = equal(t, n->in[0], n->out[0]);
  const int64_t recording = moe_tape_set_recording(t, 0), dtype = tensor_of(t, n->in[0]).dtype;
  largest = moe_tape_cast(t, largest, moe__real_of(dtype)); /* in F16 a count of 65520 is infinite */
  moe_value share = moe_tape_div(t, largest, moe_tape_sum_axes(t, largest, count, axes, 1));
  share = moe_tape_cast(t, share, dtype);
  moe_tape_set_recording(t, recording);
  through(t, n, d[0], share);
}
static const struct moe__rule rule_max_axes = { "max_axes", back_max_axes, NULL, 0 };
moe_value moe_tape_max_axes(moe_tape *t, moe_value a, int64_t n, const int64_t *axes, int64_t keep)
{
  static const char fn[] = "moe_tape_max_axes";
  const struct moe__value *v = look_float(t, a, fn, "a");
  const int64_t bits = v ? axis_bits(t, v->t.rank, n, axes, fn) : 0;
  if (!bits) return none;
  moe_tensor y = reduce(t, v->t, MOE__ND_LARGEST, bits, 1);
  node *made = moe__tape_node(t, &rule_max_axes, 1, &a, 1);
  if (made) made->flag[0] = bits;
  moe_value largest = moe__tape_record(t, made, y);
  return keep ? largest : squeeze(t, largest, bits);
}

/* Over all elements, in FP32 or FP64. */
static void back_sum(moe_tape *t, node *n, const moe_value *d)
{
  const moe_tensor x = tensor_of(t, n->in[0]);
  moe_value g = moe_tape_cast(t, d[0], x.dtype);
  moe__tape_contribute(t, n->in[0],
                       x.rank ? moe_tape_broadcast(t, g, x.rank, x.shape) : moe_tape_reshape(t, g, 0, x.shape));
}
static const struct moe__rule rule_sum = { "sum", back_sum, NULL, 0 };
moe_value moe_tape_sum(moe_tape *t, moe_value a)
{
  const struct moe__value *v = look_float(t, a, "moe_tape_sum", "a");
  if (!v) return none;
  const moe_tensor x = v->t;
  const int64_t real = moe__real_of(x.dtype);
  moe_tensor y = moe__tape_flat(t, real, 1);
  struct moe__mark mark = moe__tape_mark(t);
  moe_tensor parts = moe__tape_flat(t, real, MOE__PARTS);
  TAPE_RUN(t, elt_sum, .dtype = real, .y = y, .a = moe__flatten(x), .scratch = parts, .n = moe_tensor_count(&x),
           .alpha = 1);
  moe__tape_rewind(t, mark);
  return moe__tape_record(t, moe__tape_node(t, &rule_sum, 1, &a, 1), y);
}

moe_value moe_tape_mean(moe_tape *t, moe_value a)
{
  const struct moe__value *v = look_float(t, a, "moe_tape_mean", "a");
  if (!v) return none;
  const int64_t n = moe_tensor_count(&v->t);
  return moe_tape_scale(t, moe_tape_sum(t, a), n ? 1.0 / (double)n : 0);
}

/* ---- matmul ---------------------------------------------------------------------------------------------------------------- */
/* c (+)= op(a) op(b) over the last two dimensions; those before are one batch, or none. */
static void product(moe_tape *t, moe_tensor c, moe_tensor a, moe_tensor b, int64_t ta, int64_t tb, int64_t accumulate)
{
  const int r = c.rank - 2;
  if (t->status) return; /* c may be {0} */
  if (ta) a = moe__swapped(a, r, r + 1);
  if (!tb) b = moe__swapped(b, r, r + 1);
  if (r && !c.shape[0]) return;
  TAPE_RUN(t, gemm, .dtype = a.dtype, .c = c, .a = a, .b = b, .M = a.shape[r], .N = b.shape[r], .K = a.shape[r + 1],
           .accumulate = accumulate, .batch = r ? c.shape[0] : 0, .alpha = 1);
}

/* The gradient of v is op(a) op(b), summed over the batch dimensions along which v was repeated: written where it
   belongs, or as a value. */
static void contribute_product(moe_tape *t, moe_value v, moe_value a, moe_value b, int64_t ta, int64_t tb)
{
  moe_tensor to;
  int64_t accumulate;
  if (!moe__tape_wants(t, v)) return;
  if (tensor_of(t, a).rank == 2 && tensor_of(t, b).rank == 2 && moe__tape_sink(t, v, &to, &accumulate)) {
    product(t, to, tensor_of(t, a), tensor_of(t, b), ta, tb, accumulate);
    moe__tape_sunk(t, v);
  } else {
    give(t, v, moe_tape_matmul(t, a, b, ta, tb));
  }
}

static void back_matmul(moe_tape *t, node *n, const moe_value *dout)
{
  moe_value a = n->in[0], b = n->in[1], d = dout[0];
  const int64_t ta = n->flag[0], tb = n->flag[1];
  if (ta) contribute_product(t, a, b, d, tb, 1);
  else contribute_product(t, a, d, b, 0, !tb);
  if (tb) contribute_product(t, b, d, a, 1, ta);
  else contribute_product(t, b, a, d, !ta, 0);
}
static const struct moe__rule rule_matmul = { "matmul", back_matmul, NULL, 0 };

/* x [..,m,n] as [batch,m,n], where its batch dimensions are those of `shape` or all absent (a stride of 0); repeated by
   a copy where only some of them are. */
static moe_tensor as_batch(moe_tape *t, moe_tensor x, const moe_tensor *shape, int64_t batch)
{
  moe_tensor full = *shape;
  full.shape[shape->rank - 2] = x.shape[x.rank - 2];
  full.shape[shape->rank - 1] = x.shape[x.rank - 1];
  int64_t own = 1;
  for (int d = 0; d < x.rank - 2; d++) own *= x.shape[d];
  const int repeated = own == 1 && batch != 1;
  if (!repeated && own != batch) {
    moe_tensor copied = moe__tape_fresh(t, x.dtype, full.rank, full.shape);
    if (t->status) return x;
    copy(t, copied, spread(x, full.rank, full.shape));
    x = copied;
  }
  const int64_t m = x.shape[x.rank - 2], n = x.shape[x.rank - 1];
  return moe__view(x, 0, 3, (const int64_t[]){ batch, m, n }, (const int64_t[]){ repeated ? 0 : m * n, n, 1 });
}

moe_value moe_tape_matmul(moe_tape *t, moe_value a, moe_value b, int64_t transpose_a, int64_t transpose_b)
{
  static const char fn[] = "moe_tape_matmul";
  const struct moe__value *va = moe__tape_look(t, a, fn), *vb = moe__tape_look(t, b, fn);
  if (!va || !vb) return none;
  moe_tensor ta = va->t, tb = vb->t, shape = ta, other = tb;
  const int64_t flip_a = transpose_a != 0, flip_b = transpose_b != 0;
  if (ta.rank < 2 || tb.rank < 2 || ta.dtype != tb.dtype || !moe__is_float(ta.dtype))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: wanted matrices of one float dtype, got rank %d %s and rank %d %s", fn,
                     ta.rank, moe_dtype_name(ta.dtype), tb.rank, moe_dtype_name(tb.dtype));
  const int64_t M = ta.shape[ta.rank - 2 + flip_a], K = ta.shape[ta.rank - 1 - flip_a],
                N = tb.shape[tb.rank - 1 - flip_b];
  if (K != tb.shape[tb.rank - 2 + flip_b])
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: inner extents %lld and %lld", fn, (long long)K,
                     (long long)tb.shape[tb.rank - 2 + flip_b]);
  if (ta.rank > 2 && tb.rank == 2 && !flip_a) { /* one product of all rows */
    int64_t rows = 1;
    for (int d = 0; d < ta.rank - 1; d++) rows *= ta.shape[d];
    moe_value flat = moe_tape_reshape(t, a, 2, (const int64_t[]){ rows, K });
    shape.shape[ta.rank - 1] = N;
    return moe_tape_reshape(t, moe_tape_matmul(t, flat, b, 0, flip_b), ta.rank, shape.shape);
  }
  shape.shape[ta.rank - 2] = other.shape[tb.rank - 2] = M;
  shape.shape[ta.rank - 1] = other.shape[tb.rank - 1] = N;
  if (!broadcast_shape(t, &shape, &other, fn)) return none;
  moe_tensor y = moe__tape_fresh(t, ta.dtype, shape.rank, shape.shape), c = y;
  struct moe__mark mark = moe__tape_mark(t);
  if (shape.rank > 2) {
    int64_t batch = 1;
    for (int d = 0; d < shape.rank - 2; d++) batch *= shape.shape[d];
    ta = as_batch(t, ta, &shape, batch);
    tb = as_batch(t, tb, &shape, batch);
    c = moe__view(y, 0, 3, (const int64_t[]){ batch, M, N }, (const int64_t[]){ M * N, N, 1 });
  }
  product(t, c, ta, tb, flip_a, flip_b, 0);
  moe__tape_rewind(t, mark);
  node *n = moe__tape_node(t, &rule_matmul, 2, (const moe_value[]){ a, b }, 1);
  if (n) n->flag[0] = flip_a, n->flag[1] = flip_b;
  return moe__tape_record(t, n, y);
}

/* ---- rows ------------------------------------------------------------------------------------------------------------------- */
/* to (+)= the rows of x [n,D] summed by id [n] into [rows,D]: a plan of n slots on `rows` experts, then column sums. */
static void scatter(moe_tape *t, moe_tensor to, moe_tensor x, moe_tensor ids, int64_t accumulate)
{
  const int64_t rows = to.shape[0], D = to.shape[1], n = x.shape[0], real = moe__real_of(x.dtype);
  struct moe__mark mark = moe__tape_mark(t);
  moe_tensor offs = moe__tape_flat(t, MOE_I32, rows + 1), row2slot = moe__tape_flat(t, MOE_I32, n),
             slot2row = moe__tape_flat(t, MOE_I32, n), scratch = moe__tape_flat(t, MOE_I32, moe__plan_scratch(n, rows));
  TAPE_RUN(t, plan, .dtype = real, .offs = offs, .row2slot = row2slot, .slot2row = slot2row,
           .ids = moe__matrix(ids.handle, ids.offset, MOE_I32, n, 1), .health = t->q->health, .scratch = scratch,
           .T = n, .K = 1, .E = rows);
  TAPE_RUN(t, ggemm_colsum, .dtype = x.dtype, .c = { to }, .p = x, .offs = offs, .map = row2slot, .R = n, .E = rows,
           .N = D, .div = 1, .accumulate = accumulate);
  moe__tape_rewind(t, mark);
}

/* x [..,D] float and ids [n] I32; 0 with the tape failed. */
static int rows_and_ids(moe_tape *t, moe_value x, moe_value ids, moe_tensor *tx, moe_tensor *ti, const char *fn)
{
  const struct moe__value *vx = moe__tape_look(t, x, fn), *vi = moe__tape_look(t, ids, fn);
  if (!vx || !vi) return 0;
  *tx = vx->t;
  *ti = vi->t;
  if (tx->rank == 2 && moe__is_float(tx->dtype) && ti->rank == 1 && ti->dtype == MOE_I32) return 1;
  TAPE_FAIL(t, MOE_ERR_INVALID, "%s: wanted float rows [n,D] and i32 ids [n], got rank %d %s and rank %d %s", fn,
            tx->rank, moe_dtype_name(tx->dtype), ti->rank, moe_dtype_name(ti->dtype));
  return 0;
}

static void back_gather(moe_tape *t, node *n, const moe_value *d)
{
  moe_tensor to;
  int64_t accumulate;
  if (moe__tape_sink(t, n->in[0], &to, &accumulate)) {
    scatter(t, to, tensor_of(t, d[0]), tensor_of(t, n->in[1]), accumulate);
    moe__tape_sunk(t, n->in[0]);
  } else {
    moe__tape_contribute(t, n->in[0], moe_tape_scatter_rows(t, d[0], n->in[1], tensor_of(t, n->in[0]).shape[0]));
  }
}
static const struct moe__rule rule_gather = { "gather_rows", back_gather, NULL, 0 },
                              rule_embedding = { "embedding", back_gather, NULL, 0 };
static moe_value gather(moe_tape *t, const struct moe__rule *rule, moe_value x, moe_value ids, const char *fn)
{
  moe_tensor tx, ti;
  if (!rows_and_ids(t, x, ids, &tx, &ti, fn)) return none;
  if (tx.shape[0] < 1) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: there is no row", fn);
  const int64_t n = ti.shape[0], D = tx.shape[1];
  moe_tensor y = moe__tape_fresh(t, tx.dtype, 2, (const int64_t[]){ n, D });
  TAPE_RUN(t, gather_rows, .dtype = tx.dtype, .y = y, .x = tx, .map = ti, .health = t->q->health, .n = n,
           .rows = tx.shape[0], .D = D, .div = 1);
  return moe__tape_record(t, moe__tape_node(t, rule, 2, (const moe_value[]){ x, ids }, 1), y);
}
moe_value moe_tape_gather_rows(moe_tape *t, moe_value x, moe_value ids)
{
  return gather(t, &rule_gather, x, ids, "moe_tape_gather_rows");
}
moe_value moe_tape_embedding(moe_tape *t, moe_value table, moe_value ids)
{
  return gather(t, &rule_embedding, table, ids, "moe_tape_embedding");
}

/* Rows whose id is out of range had no part in the sum: forward has told so, and their gradient is NaN. */
static void back_scatter(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe_tape_gather_rows(t, d[0], n->in[1]));
}
static const struct moe__rule rule_scatter = { "scatter_rows", back_scatter, NULL, 0 };
moe_value moe_tape_scatter_rows(moe_tape *t, moe_value x, moe_value ids, int64_t rows)
{
  static const char fn[] = "moe_tape_scatter_rows";
  moe_tensor tx, ti;
  if (!rows_and_ids(t, x, ids, &tx, &ti, fn)) return none;
  if (tx.shape[0] != ti.shape[0] || rows < 1)
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %lld rows, %lld ids, to %lld rows", fn, (long long)tx.shape[0],
                     (long long)ti.shape[0], (long long)rows);
  moe_tensor y = moe__tape_fresh(t, tx.dtype, 2, (const int64_t[]){ rows, tx.shape[1] });
  if (!t->status) scatter(t, y, tx, ti, 0);
  return moe__tape_record(t, moe__tape_node(t, &rule_scatter, 2, (const moe_value[]){ x, ids }, 1), y);
}

/* ---- softmax, layer norm: several maps, one node --------------------------------------------------------------------------- */
/* d - sum(d) exp(y) */
static void back_log_softmax(moe_tape *t, node *n, const moe_value *d)
{
  moe_value sum = moe_tape_sum_axes(t, d[0], 1, n->flag, 1);
  moe__tape_contribute(t, n->in[0], moe_tape_sub(t, d[0], moe_tape_mul(t, sum, moe_tape_exp(t, n->out[0]))));
}
/* y (d - sum(d y)) */
static void back_softmax(moe_tape *t, node *n, const moe_value *d)
{
  moe_value sum = moe_tape_sum_axes(t, moe_tape_mul(t, d[0], n->out[0]), 1, n->flag, 1);
  through(t, n, moe_tape_sub(t, d[0], sum), n->out[0]);
}
static const struct moe__rule rule_softmax = { "softmax", back_softmax, NULL, 0 },
                              rule_log_softmax = { "log_softmax", back_log_softmax, NULL, 0 };
static moe_value softmax(moe_tape *t, const struct moe__rule *rule, moe_value a, int64_t dim, const char *fn)
{
  const struct moe__value *v = look_float(t, a, fn, "a");
  if (!v) return none;
  if (dim < 0 || dim >= v->t.rank)
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: dim %lld of rank %d", fn, (long long)dim, v->t.rank);
  const int64_t recording = moe_tape_set_recording(t, 0);
  moe_value wide = widened(t, a), shifted = moe_tape_sub(t, wide, moe_tape_max_axes(t, wide, 1, &dim, 1));
  moe_value e = moe_tape_exp(t, shifted);
  moe_value sum = moe_tape_sum_axes(t, e, 1, &dim, 1);
  moe_value y = rule == &rule_softmax ? moe_tape_div(t, e, sum) : moe_tape_sub(t, shifted, moe_tape_log(t, sum));
  y = narrowed(t, y, a);
  moe_tape_set_recording(t, recording);
  if (t->status) return none;
  node *n = moe__tape_node(t, rule, 1, &a, 1);
  if (n) n->flag[0] = dim;
  return moe__tape_record(t, n, tensor_of(t, y));
}
moe_value moe_tape_softmax(moe_tape *t, moe_value a, int64_t dim)
{
  return softmax(t, &rule_softmax, a, dim, "moe_tape_softmax");
}
moe_value moe_tape_log_softmax(moe_tape *t, moe_value a, int64_t dim)
{
  return softmax(t, &rule_log_softmax, a, dim, "moe_tape_log_softmax");
}

/* In FP32, as rms_norm's kernels are: the square of 256 is infinite in F16. */
static void expand_layer_norm(moe_tape *t, node *n, moe_value *out)
{
  if (t->status) return;
  const int64_t last = tensor_of(t, n->in[0]).rank - 1;
  moe_value x = widened(t, n->in[0]), centred = moe_tape_sub(t, x, moe_tape_mean_axes(t, x, 1, &last, 1));
  moe_value var = moe_tape_mean_axes(t, moe_tape_mul(t, centred, centred), 1, &last, 1);
  moe_value rstd = moe_tape_pow(t, moe_tape_add(t, var, moe__tape_constant(t, x, n->alpha)), -0.5);
  moe_value y = moe_tape_mul(t, moe_tape_mul(t, centred, rstd), widened(t, n->in[1]));
  if (n->in[2].id) y = moe_tape_add(t, y, widened(t, n->in[2]));
  out[0] = narrowed(t, y, n->in[0]);
}
static const struct moe__rule rule_layer_norm = { "layer_norm", NULL, expand_layer_norm, 0 };
moe_value moe_tape_layer_norm(moe_tape *t, moe_value x, moe_value w, moe_value b, double eps)
{
  static const char fn[] = "moe_tape_layer_norm";
  const struct moe__value *vx = look_float(t, x, fn, "x"), *vw = moe__tape_look(t, w, fn),
                          *vb = b.id ? moe__tape_look(t, b, fn) : NULL;
  if (!vx || !vw || (b.id && !vb)) return none;
  const moe_tensor tx = vx->t;
  const int64_t D = tx.rank ? tx.shape[tx.rank - 1] : 0;
  if (!tx.rank || vw->t.dtype != tx.dtype || vw->t.rank != 1 || vw->t.shape[0] != D ||
      (vb && (vb->t.dtype != tx.dtype || vb->t.rank != 1 || vb->t.shape[0] != D)))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: wanted x [..,D], w [D] and b [D] of one float dtype", fn);
  node *n = moe__tape_node(t, &rule_layer_norm, 3, (const moe_value[]){ x, w, b }, 1);
  moe_value y = none;
  if (!n) return none;
  n->alpha = eps;
  const int64_t recording = moe_tape_set_recording(t, 0);
  expand_layer_norm(t, n, &y);
  moe_tape_set_recording(t, recording);
  return t->status ? none : moe__tape_record(t, n, tensor_of(t, y));
}

/* ---- dropout ----------------------------------------------------------------------------------------------------------------- */
struct dropout { /* node->more */
  double p;
  uint64_t seed;
  int64_t stream;
};

/* Linear: the same elements are dropped from the gradient. */
static void back_dropout(moe_tape *t, node *n, const moe_value *d)
{
  const struct dropout *o = n->more;
  moe__tape_contribute(t, n->in[0], moe_tape_dropout(t, d[0], o->p, o->seed, o->stream, n->in[1]));
}
static const struct moe__rule rule_dropout = { "dropout", back_dropout, NULL, 0 };
moe_value moe_tape_dropout(moe_tape *t, moe_value a, double p, uint64_t seed, int64_t stream, moe_value step)
{
  static const char fn[] = "moe_tape_dropout";
  const struct moe__value *v = look_float(t, a, fn, "a"), *vs = step.id ? moe__tape_look(t, step, fn) : NULL;
  if (!v || (step.id && !vs)) return none;
  if (!(p >= 0 && p < 1)) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: p %g, wanted 0 <= p < 1", fn, p);
  if (vs && ((vs->t.dtype != MOE_I32 && vs->t.dtype != MOE_I64) || moe_tensor_count(&vs->t) != 1))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: step is %lld of %s, wanted one i32 or i64", fn,
                     (long long)moe_tensor_count(&vs->t), moe_dtype_name(vs->t.dtype));
  const moe_tensor x = v->t, s = vs ? moe__flatten(vs->t) : (moe_tensor){ 0 };
  moe_tensor y = moe__tape_fresh(t, x.dtype, x.rank, x.shape);
  TAPE_RUN(t, nd_dropout, .dtype = moe__real_of(x.dtype), .y = moe__flatten(y), .a = moe__flatten(x), .step = s,
           .n = moe_tensor_count(&x), .seed = (int64_t)seed, .stream = stream, .p = p);
  node *n = moe__tape_node(t, &rule_dropout, 2, (const moe_value[]){ a, step }, 1);
  struct dropout *o = moe__tape_host(t, sizeof *o);
  if (!o) return none;
  *o = (struct dropout){ p, seed, stream };
  n->more = o;
  return moe__tape_record(t, n, y);
}
