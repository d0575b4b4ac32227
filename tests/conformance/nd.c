/* nd.c - cases of the maps and reductions over tensors of any shape and strides, and of dropout. */
#include "conform.h"

#include <stdio.h>

/* How one tensor lies in memory: a layout, its dimensions in the order-th order, those of `repeat` with stride 0. */
struct lie {
  int64_t type;
  int layout, order, repeat;
};

/* The k-th order of n dimensions. */
static void order_of(int order[MOE_RANK_MAX], int k, int n)
{
  int left[MOE_RANK_MAX];
  for (int d = 0; d < n; d++) left[d] = d;
  for (int d = 0; d < n; d++) {
    int at = k % (n - d);
    k /= n - d;
    order[d] = left[at];
    for (; at < n - d - 1; at++) left[at] = left[at + 1];
  }
}

/* A tensor of `shape` that lies so. */
static moe_tensor tensor_of(struct conform *c, const struct lie *lie, int rank, const int64_t *shape)
{
  int64_t lying[MOE_RANK_MAX] = { 0 };
  int order[MOE_RANK_MAX];
  order_of(order, lie->order, rank);
  for (int d = 0; d < rank; d++) lying[d] = lie->repeat >> order[d] & 1 ? 1 : shape[order[d]];
  moe_tensor t = t_tensor(&c->m, lie->type, lie->layout, rank, lying), view = t;
  for (int d = 0; d < rank; d++) {
    view.shape[order[d]] = shape[order[d]];
    view.stride[order[d]] = lie->repeat >> order[d] & 1 ? 0 : t.stride[d];
  }
  return view;
}

/* Repeats what a tensor with such strides repeats: values[i] for the first index of each. */
static void spread(num *values, int repeat, int rank, const int64_t *shape)
{
  int64_t n = 1;
  for (int d = 0; d < rank; d++) n *= shape[d];
  for (int64_t i = 0; i < n; i++) {
    int64_t at = 0, left = i, stride = 1;
    for (int d = rank - 1; d >= 0; stride *= shape[d--]) {
      at += repeat >> d & 1 ? 0 : left % shape[d] * stride;
      left /= shape[d];
    }
    values[i] = values[at];
  }
}

/* "[2,3,5]" */
static const char *shape_text(char text[64], int rank, const int64_t *shape)
{
  int n = snprintf(text, 64, "[");
  for (int d = 0; d < rank; d++) n += snprintf(text + n, 64 - (size_t)n, d ? ",%lld" : "%lld", (long long)shape[d]);
  snprintf(text + n, 64 - (size_t)n, "]");
  return text;
}

/* ---- maps ---------------------------------------------------------------------------------------------------- */
enum { APART, Y_IS_A, Y_IS_B, Y_IS_C };
enum { MAP_OPS = MOE__ND_GELU_TANH + 1 };
struct map_how {
  int rank;
  int64_t shape[MOE_RANK_MAX], op, accumulate;
  struct lie y, a, b, c;
  int alias, special;
  double alpha;
};

static int inputs_of(int64_t op)
{
  return op == MOE__ND_WHERE ? 3 : op >= MOE__ND_ADD && op < MOE__ND_WHERE ? 2 : 1;
}

/* Values that the operation is asked for, and where `special` those it is not. */
static num *values_of(struct conform *c, const struct map_how *h, const struct lie *lie, int which, int64_t n)
{
  static const double specials[] = { 0, 1, -1, NAN, INFINITY, -INFINITY, 0.5, -2, 3, 30, -30, 1e30, -1e30 };
  enum { SPECIALS = sizeof specials / sizeof *specials };
  int whole = lie->type == MOE_I32 || lie->type == MOE_U8;
  int even = h->op == MOE__ND_EQUAL || h->op == MOE__ND_GREATER || (h->op == MOE__ND_WHERE && which == 0);
  double size = h->op >= MOE__ND_EXP ? 8 : 2;
  num *v = whole || even ? t_whole(&c->m, n, 1) : t_uniform(&c->m, n, lie->type, size);
  for (int64_t i = 0; i < n; i++) {
    if (lie->type == MOE_U8) v[i].v = fabs(v[i].v) * 200;
    if (lie->type == MOE_I32) v[i].v *= 1234;
    if (h->special && !whole) v[i].v = ref_round(specials[(which ? i / SPECIALS : i) % SPECIALS], lie->type);
    /* Negative where that is right only for whole exponents; roots and logarithms of positive numbers. */
    else if (h->op == MOE__ND_SQRT || h->op == MOE__ND_LOG || (h->op == MOE__ND_POW && rint(h->alpha) != h->alpha))
      v[i].v = fabs(v[i].v);
  }
  spread(v, lie->repeat, h->rank, h->shape);
  return v;
}

static void map_case(struct conform *c, int64_t dtype, struct map_how h)
{
  static const char *const names[MAP_OPS] = { "copy",  "add",   "sub",     "mul",  "div",  "max",      "greater",
                                              "equal", "where", "pow",     "exp",  "log",  "sqrt",     "tanh",
                                              "erf",   "relu",  "sigmoid", "silu", "gelu", "gelu_tanh" };
  char text[64];
  int inputs = inputs_of(h.op);
  struct lie *in[3] = { &h.a, &h.b, &h.c };
  if (h.alias > inputs) return;
  if (h.alias) h.y = *in[h.alias - 1];
  if (h.y.repeat || h.y.type == MOE_I32 || h.y.type == MOE_U8) return;
  if (!c_begin(c, dtype, "%s%s %s %s/%d/%d<-%s/%d/%d/%d,%s/%d/%d/%d%s%s alpha=%g", names[h.op],
               h.accumulate ? " +=" : "", shape_text(text, h.rank, h.shape), moe_dtype_name(h.y.type), h.y.layout,
               h.y.order, moe_dtype_name(h.a.type), h.a.layout, h.a.order, h.a.repeat, moe_dtype_name(h.b.type),
               h.b.layout, h.b.order, h.b.repeat, h.alias ? " in place" : "", h.special ? " special values" : "",
               h.alpha))
    return;
  struct moe__args_nd_map args = { .dtype = dtype, .op = h.op, .accumulate = h.accumulate, .alpha = h.alpha };
  moe_tensor *tensors[3] = { &args.a, &args.b, &args.c };
  num *values[3] = { 0 }, *want;
  int64_t n = 1;
  for (int d = 0; d < h.rank; d++) n *= h.shape[d];
  for (int i = 0; i < inputs; i++) {
    values[i] = values_of(c, &h, in[i], i, n);
    *tensors[i] = tensor_of(c, in[i], h.rank, h.shape);
    t_put(&c->m, tensors[i], values[i]);
  }
  args.y = h.alias ? *tensors[h.alias - 1] : tensor_of(c, &h.y, h.rank, h.shape);
  t_own(&c->m, &args.y);
  want = t_uniform(&c->m, n, h.y.type, 2);
  if (h.alias) memcpy(want, values[h.alias - 1], (size_t)n * sizeof *want);
  else if (h.accumulate) t_put(&c->m, &args.y, want);
  if (c_run_nd_map(c, &args)) {
    ref_nd_map(want, values[0], values[1], values[2], h.op, n, h.accumulate, h.alpha);
    c_check(c, "y", &args.y, want);
  }
  c_end(c);
}

static const double powers[] = { 3, -1, 0.3, 0, 2, -2, 0.5 };
enum { POWERS = sizeof powers / sizeof *powers };

/* Types of a call that follow from a number. */
static struct map_how of_types(int64_t dtype, int64_t op, int64_t i)
{
  struct map_how h = { .op = op, .alpha = 1, .accumulate = i % 3 == 1 };
  h.y.type = c_float(dtype, i);
  h.a.type = c_float(dtype, i / 3);
  h.b.type = c_float(dtype, i / 2);
  h.c.type = c_float(dtype, i / 5);
  if ((op == MOE__ND_WHERE || op == MOE__ND_COPY) && i % 3) h.a.type = i % 3 == 1 ? MOE_U8 : MOE_I32;
  if (op == MOE__ND_POW) h.alpha = powers[i % POWERS];
  if (op == MOE__ND_COPY && i % 2) h.alpha = -0.7;
  return h;
}

void conform_nd_map(struct conform *c)
{
  static const int64_t sizes[] = { 1, 0, 65, 127, 64, 1009, 63, 128, 257 };
  static const struct {
    int rank;
    int64_t shape[MOE_RANK_MAX];
  } shapes[] = {
    { 0, { 0 } },
    { 1, { 1 } },
    { 2, { 7, 9 } },
    { 3, { 2, 0, 3 } },
    { 3, { 5, 1, 11 } },
    { 4, { 2, 3, 5, 7 } },
    { 4, { 3, 4, 8, 16 } },
    { 6, { 2, 3, 1, 2, 5, 3 } },
    { 6, { 2, 3, 2, 2, 3, 4 } },
    { 2, { 67, 129 } },
  };
  const int64_t most = c->effort == LONG ? 9 : c->effort == SHORT ? 3 : 1;
  int64_t at = 0;
  for (int64_t d = 0; d < C_DTYPES; d++) {
    int64_t dtype = c_dtypes[d];
    /* Packed, all operations and types; in place. */
    for (int64_t op = 0; op < MAP_OPS; op++)
      for (int64_t i = 0; i < (d < 2 ? most : 1); i++, at++) {
        struct map_how h = of_types(dtype, op, at);
        h.rank = 1;
        h.shape[0] = sizes[at % 9];
        h.y.layout = at % 4 ? T_PACKED : T_ODD;
        map_case(c, dtype, h);
        h.b = h.c = h.a;
        if (i % 2) h.b.layout = T_ODD;
        h.alias = (int)(1 + at % inputs_of(op));
        map_case(c, dtype, h);
        if (i > 0) continue;
        h = of_types(dtype, op, at);
        h.rank = 1, h.shape[0] = 13 * 13, h.special = 1, h.accumulate = 0;
        for (int power = 0; power < (op == MOE__ND_POW ? POWERS : 1); power++) {
          if (op == MOE__ND_POW) h.alpha = powers[power];
          map_case(c, dtype, h);
        }
      }
    /* Shapes: each dimension in turn repeated in each input, orders and layouts. */
    for (int64_t s = 0; s < (c->effort == SMALL ? 6 : 10); s++)
      for (int axis = -1; axis <= shapes[s].rank; axis++, at++) {
        static const int64_t ops[] = { MOE__ND_ADD, MOE__ND_COPY, MOE__ND_WHERE, MOE__ND_DIV, MOE__ND_EXP };
        const int all = (1 << shapes[s].rank) - 1, repeat = axis < 0 ? 0 : axis == shapes[s].rank ? all : 1 << axis;
        if (c->effort == SMALL && at % 2) continue;
        struct map_how h = of_types(dtype, ops[at % 5], at);
        h.rank = shapes[s].rank;
        memcpy(h.shape, shapes[s].shape, sizeof h.shape);
        h.a.repeat = at % 3 ? 0 : repeat;
        h.b.repeat = at % 3 == 1 ? 0 : repeat;
        h.c.repeat = at % 3 == 2 ? 0 : all ^ repeat;
        h.y.order = axis < 0 || s % 2 ? 0 : (int)(at * 7);
        h.a.order = axis < 0 ? 0 : (int)(at * 5);
        h.b.order = at % 2 ? 0 : (int)(at * 11);
        h.y.layout = c_layout(at), h.a.layout = c_layout(at / 2), h.b.layout = c_layout(at / 3);
        map_case(c, dtype, h);
        /* All in one order, padded by whole chunks. */
        h.a.order = h.b.order = h.c.order = h.y.order;
        h.y.layout = h.a.layout = h.b.layout = axis % 2 ? T_PAD8 : T_PACKED;
        h.accumulate = !h.accumulate;
        map_case(c, dtype, h);
      }
    if (c->effort != SMALL) {
      struct map_how h = of_types(dtype, MOE__ND_MUL, 3 * d);
      h.rank = 2, h.shape[0] = 1, h.shape[1] = 100003;
      map_case(c, dtype, h);
      h.shape[0] = 301, h.shape[1] = 128, h.b.repeat = 1, h.a.repeat = 2;
      map_case(c, dtype, h);
    }
  }
  huge_nd_map(c);
}

/* ---- reductions ---------------------------------------------------------------------------------------------- */
struct reduce_how {
  int rank;
  int64_t shape[MOE_RANK_MAX], op, axes, accumulate;
  struct lie y, a;
  int whole, nan;
  double alpha;
};

static void reduce_case(struct conform *c, int64_t dtype, struct reduce_how h)
{
  char text[64];
  if (h.op == MOE__ND_LARGEST) h.accumulate = 0;
  if (!c_begin(c, dtype, "%s%s %s over %llx %s/%d/%d<-%s/%d/%d/%d%s%s%s", h.op == MOE__ND_SUM ? "sum" : "largest",
               h.accumulate ? " +=" : "", shape_text(text, h.rank, h.shape), (unsigned long long)h.axes,
               moe_dtype_name(h.y.type), h.y.layout, h.y.order, moe_dtype_name(h.a.type), h.a.layout, h.a.order,
               h.a.repeat, h.alpha == 1 ? "" : " alpha", h.whole ? " whole numbers" : "", h.nan ? " NaN" : ""))
    return;
  if (h.whole) c_exact();
  struct moe__args_nd_reduce args = {
    .dtype = dtype, .op = h.op, .axes = h.axes, .accumulate = h.accumulate, .alpha = h.alpha
  };
  int64_t shape[MOE_RANK_MAX], n = 1, outputs = 1;
  for (int d = 0; d < h.rank; d++) {
    shape[d] = h.axes >> d & 1 ? 1 : h.shape[d];
    n *= h.shape[d];
    outputs *= shape[d];
  }
  num *a = h.whole ? t_whole(&c->m, n, 3) : t_uniform(&c->m, n, h.a.type, 2);
  num *y = h.whole ? t_whole(&c->m, outputs, 9) : t_uniform(&c->m, outputs, h.y.type, 2);
  if (h.nan && n > 0) a[n / 2].v = NAN;
  spread(a, h.a.repeat, h.rank, h.shape);
  args.a = tensor_of(c, &h.a, h.rank, h.shape);
  t_put(&c->m, &args.a, a);
  args.y = tensor_of(c, &h.y, h.rank, shape);
  t_own(&c->m, &args.y);
  if (h.accumulate) t_put(&c->m, &args.y, y);
  const int64_t scratch = moe__nd_reduce_scratch(&args.a, args.axes);
  if (scratch) args.scratch = c_out(c, c_real(dtype), T_ODD, SHAPE(scratch));
  if (c_run_nd_reduce(c, &args)) {
    ref_nd_reduce(y, a, h.op, h.axes, h.rank, h.shape, h.accumulate, h.alpha);
    c_check(c, "y", &args.y, y);
  }
  c_end(c);
}

void conform_nd_reduce(struct conform *c)
{
  static const struct {
    int rank;
    int64_t shape[MOE_RANK_MAX];
    int64_t axes; /* -1: every set of them */
  } shapes[] = {
    { 4, { 3, 5, 2, 7 }, -1 },
    { 0, { 0 }, -1 },
    { 1, { 1 }, -1 },
    { 3, { 3, 0, 5 }, -1 },
    { 2, { 37, 5 }, 1 },
    { 1, { 16500 }, 1 },
    { 6, { 2, 3, 1, 2, 3, 4 }, -1 },
    { 4, { 2, 6, 4, 16 }, -1 },
    { 2, { 67, 129 }, -1 },
    { 1, { 70001 }, 1 },
    { 2, { 3, 40000 }, 2 },
    { 2, { 20011, 7 }, 1 },
    { 3, { 33, 37, 64 }, 3 },
    { 3, { 33, 37, 64 }, 5 },
    { 3, { 5, 131, 129 }, 2 },
  };
  int64_t at = 0;
  for (int64_t d = 0; d < C_DTYPES; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t s = 0; s < (c->effort == SMALL ? 6 : 15); s++) {
      const int large = shapes[s].axes >= 0, all = (1 << shapes[s].rank) - 1;
      for (int64_t axes = large ? shapes[s].axes : 0; axes <= (large ? shapes[s].axes : all); axes++, at++) {
        if (c->effort == SMALL ? !large && at % 3 != 0 : c->effort == SHORT && s == 6 && (at + d) % 4) continue;
        struct reduce_how h = { .rank = shapes[s].rank, .axes = axes, .op = at % 3 == 2, .accumulate = at % 2 };
        memcpy(h.shape, shapes[s].shape, sizeof h.shape);
        h.alpha = at % 5 == 3 ? 0.3 : 1;
        h.y.type = c_float(dtype, at);
        h.a.type = c_float(dtype, at / 2);
        h.nan = at % 7 == 3;
        if (large) {
          reduce_case(c, dtype, h);
          h.op = !h.op, h.alpha = 1, h.nan = 0;
          reduce_case(c, dtype, h);
          h.op = MOE__ND_SUM, h.whole = 1;
          h.y.type = c_real(dtype);
          reduce_case(c, dtype, h);
          continue;
        }
        reduce_case(c, dtype, h);
        h.op = !h.op, h.nan = 0;
        h.a.order = (int)(at * 5), h.y.order = (int)(at * 3);
        h.a.layout = c_layout(at), h.y.layout = c_layout(at / 2);
        if (at % 4 == 1) h.a.repeat = (int)(at / 4) & all;
        reduce_case(c, dtype, h);
      }
    }
  }
  huge_nd_reduce(c);
}

/* ---- dropout ------------------------------------------------------------------------------------------------- */
struct dropout_how {
  int64_t n, y, a, step_type, step, seed, stream;
  double p;
  int in_place;
};

static void dropout_case(struct conform *c, int64_t dtype, struct dropout_how h)
{
  if (!c_begin(c, dtype, "n=%lld %s<-%s p=%g seed=%lld stream=%lld step=%s:%lld%s", (long long)h.n, moe_dtype_name(h.y),
               moe_dtype_name(h.a), h.p, (long long)h.seed, (long long)h.stream, moe_dtype_name(h.step_type),
               (long long)h.step, h.in_place ? " in place" : ""))
    return;
  struct moe__args_nd_dropout args = { .dtype = dtype, .n = h.n, .seed = h.seed, .stream = h.stream, .p = h.p };
  num *a = t_uniform(&c->m, h.n, h.a, 2), *want = t_nums(&c->m, h.n), step = { (double)h.step, 0 };
  if (h.step_type) args.step = c_in(c, h.step_type, T_ODD, &step, SHAPE(1));
  args.a = h.in_place ? c_inout(c, h.a, T_PACKED, a, SHAPE(h.n)) : c_in(c, h.a, T_ODD, a, SHAPE(h.n));
  args.y = h.in_place ? args.a : c_out(c, h.y, T_PACKED, SHAPE(h.n));
  if (c_run_nd_dropout(c, &args)) {
    ref_nd_dropout_at(want, a, 0, h.n, h.seed, h.stream, h.step, h.p);
    c_check(c, "y", &args.y, want);
  }
  c_end(c);
}

void conform_nd_dropout(struct conform *c)
{
  static const int64_t sizes[] = { 1, 0, 65, 127, 64, 31, 1009, 32, 257, 4097 };
  static const double p[] = { 0.1, 0.5, 0, 0.9, 1, 1e-3 };
  for (int64_t d = 0; d < C_DTYPES; d++)
    for (int64_t i = 0; i < (c->effort == SMALL ? 3 : 10); i++) {
      static const int64_t types[] = { MOE_NONE, MOE_I32, MOE_I64 };
      struct dropout_how h = { .n = sizes[i], .seed = 0x123456789abcdef * i - 5, .stream = i * 0x300000007 };
      h.y = c_float(c_dtypes[d], i), h.a = c_float(c_dtypes[d], i / 3);
      h.step_type = types[i % 3];
      h.step = h.step_type == MOE_I64 ? (int64_t)1 << 40 : h.step_type ? 1 - i : 0;
      h.p = p[i % 6];
      dropout_case(c, c_dtypes[d], h);
      h.in_place = 1, h.y = h.a;
      dropout_case(c, c_dtypes[d], h);
    }
  huge_nd_dropout(c);
}
