/* t_tape_ops.c - every operation of the tape on a device: values against a plain C computation with error bounds (also
   with a NaN in the input), gradients and their gradients against central differences, gradients in f32 against those
   in f64; ties, and refusals.

   A line of the table is one operation with shapes and parameters: how to record it, and how to compute it. */
#include "tape_fixture.h"
#include "../ref/compare.h"

static int wrong; /* lines of this test */

/* ---- lines --------------------------------------------------------------------------------------------------------- */
enum { INPUTS = 3, IDS = 5, MOST = 64 }; /* elements of an input */
struct shape {
  int rank;
  int64_t n[5];
};
#define S(...)                                                                                                         \
  {                                                                                                                    \
    (int)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),                                                 \
    {                                                                                                                  \
      __VA_ARGS__                                                                                                      \
    }                                                                                                                  \
  }
#define SCALAR                                                                                                         \
  {                                                                                                                    \
    0,                                                                                                                 \
    {                                                                                                                  \
      0                                                                                                                \
    }                                                                                                                  \
  }

/* Numbers in C: the last dimension fastest. */
struct array {
  int rank;
  int64_t n[MOE_RANK_MAX];
  num *v;
};

struct line {
  const char *name;
  moe_value (*record)(moe_tape *, const moe_value *in);
  struct array (*plain)(const struct array *in);
  int n;
  struct shape in[INPUTS];
  double low, high; /* of the values; both 0: -1 to 1 */
  int64_t op;       /* enum moe__nd, where the operation is one map */
  union {
    moe_value (*one)(moe_tape *, moe_value);
    moe_value (*two)(moe_tape *, moe_value, moe_value);
  } f;
  int64_t i[6]; /* axes, extents, switches */
  double p;
  int32_t ids[IDS]; /* conditions, rows, targets */
  int64_t n_ids, ids_dtype;
  int rough; /* no derivative */
};
static const struct line *line; /* the present one */
static int64_t dtype;           /* of its values */
static moe_tensor ids;          /* its ids on the device */

/* What is wrong with the present line; the test goes on with the others. */
static void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void tell(const char *format, ...)
{
  va_list list;
  va_start(list, format);
  printf("  %s", line->name);
  for (int i = 0; i < line->n; i++) {
    printf(" [");
    for (int d = 0; d < line->in[i].rank; d++) printf("%s%lld", d ? "," : "", (long long)line->in[i].n[d]);
    printf("]");
  }
  printf(", %s: ", moe_dtype_name(dtype));
  vprintf(format, list);
  printf("\n");
  va_end(list);
  wrong++;
}
static void none_wrong(void)
{
  const int n = wrong;
  wrong = 0;
  assert_int_equal(n, 0);
}

static moe_value id_value(moe_tape *t)
{
  return moe_tape_leaf(t, &ids, 0);
}

/* ---- plain C ------------------------------------------------------------------------------------------------------- */
static int64_t count_of(const struct array *a)
{
  int64_t n = 1;
  for (int d = 0; d < a->rank; d++) n *= a->n[d];
  return n;
}
static struct array array_of(int rank, const int64_t *n)
{
  struct array a = { .rank = rank };
  for (int d = 0; d < rank; d++) a.n[d] = n[d];
  a.v = t_nums(&m, count_of(&a) + 1);
  return a;
}
static void index_of(const struct array *a, int64_t i, int64_t *index)
{
  for (int d = a->rank - 1; d >= 0; d--) {
    index[d] = i % a->n[d];
    i /= a->n[d];
  }
}
/* a's element at that index of an array of `rank` dimensions, which a is repeated along. */
static num *at(const struct array *a, const int64_t *index, int rank)
{
  int64_t i = 0;
  for (int d = 0; d < a->rank; d++) i = i * a->n[d] + (a->n[d] == 1 ? 0 : index[rank - a->rank + d]);
  return &a->v[i];
}
static struct array spread(const struct array *a, int rank, const int64_t *n)
{
  struct array y = array_of(rank, n);
  int64_t index[MOE_RANK_MAX];
  for (int64_t i = 0; i < count_of(&y); i++) {
    index_of(&y, i, index);
    y.v[i] = *at(a, index, rank);
  }
  return y;
}
static void broadcast(const struct array *a, int *rank, int64_t *n)
{
  for (; *rank < a->rank; ++*rank) {
    memmove(n + 1, n, (size_t)*rank * sizeof *n);
    n[0] = 1;
  }
  for (int d = 0; d < a->rank; d++)
    if (a->n[d] != 1) n[*rank - a->rank + d] = a->n[d];
}
static struct array map_all(int64_t op, const struct array *in, int n, double alpha)
{
  int rank = 0;
  int64_t shape[MOE_RANK_MAX + 1] = { 0 };
  struct array x[3] = { { 0 } };
  for (int i = 0; i < n; i++) broadcast(&in[i], &rank, shape);
  for (int i = 0; i < n; i++) x[i] = spread(&in[i], rank, shape);
  struct array y = array_of(rank, shape);
  ref_nd_map(y.v, x[0].v, x[1].v, x[2].v, op, count_of(&y), 0, alpha);
  return y;
}
static struct array plain_map(const struct array *in)
{
  return map_all(line->op, in, line->n, line->p);
}
/* One map of one or two arrays. */
static struct array inner(int64_t op, const struct array *a, const struct array *b)
{
  return map_all(op, (const struct array[]){ *a, b ? *b : *a }, b ? 2 : 1, 1);
}
static struct array reduced(const struct array *a, int64_t op, int64_t axes, double alpha)
{
  int64_t n[MOE_RANK_MAX];
  for (int d = 0; d < a->rank; d++) n[d] = axes >> d & 1 ? 1 : a->n[d];
  struct array y = array_of(a->rank, n);
  ref_nd_reduce(y.v, a->v, op, axes, a->rank, a->n, 0, alpha);
  return y;
}
static struct array ids_array(void)
{
  struct array y = array_of(1, (const int64_t[]){ line->n_ids });
  for (int64_t i = 0; i < line->n_ids; i++) y.v[i].v = line->ids[i];
  return y;
}
static struct array plain_where(const struct array *in)
{
  struct array x[3] = { ids_array(), in[0], in[1] };
  x[0].rank = (int)line->i[0]; /* as a column or a row of the matrix */
  x[0].n[0] = line->n_ids;
  x[0].n[1] = 1;
  return map_all(MOE__ND_WHERE, x, 3, 0);
}
static struct array plain_broadcast(const struct array *in)
{
  return spread(&in[0], (int)line->i[0], &line->i[1]);
}
/* i: axes in bits, keep */
static struct array reduce_axes(const struct array *in, int64_t op, int mean)
{
  double alpha = 1;
  int rank = 0;
  for (int d = 0; d < in[0].rank; d++)
    if (mean && (line->i[0] >> d & 1)) alpha /= (double)in[0].n[d];
  struct array y = reduced(&in[0], op, line->i[0], alpha);
  for (int d = 0; d < y.rank; d++)
    if (line->i[1] || !(line->i[0] >> d & 1)) y.n[rank++] = y.n[d];
  y.rank = rank;
  return y;
}
static struct array plain_sum_axes(const struct array *in)
{
  return reduce_axes(in, MOE__ND_SUM, 0);
}
static struct array plain_mean_axes(const struct array *in)
{
  return reduce_axes(in, MOE__ND_SUM, 1);
}
static struct array plain_max_axes(const struct array *in)
{
  return reduce_axes(in, MOE__ND_LARGEST, 0);
}
static struct array total(const struct array *in, double alpha)
{
  struct array y = array_of(1, (const int64_t[]){ 1 });
  ref_elt_sum(y.v, in[0].v, count_of(&in[0]), 0, 1);
  if (alpha != 1) y.v[0] = n_mul(n_real(alpha), y.v[0]);
  return y;
}
static struct array plain_sum(const struct array *in)
{
  return total(in, 1);
}
static struct array plain_mean(const struct array *in)
{
  return total(in, count_of(&in[0]) ? 1.0 / (double)count_of(&in[0]) : 0);
}
static struct array plain_reshape(const struct array *in)
{
  struct array y = in[0];
  y.rank = (int)line->i[0];
  for (int d = 0; d < y.rank; d++) y.n[d] = line->i[1 + d];
  return y;
}
static struct array plain_permute(const struct array *in)
{
  int64_t n[MOE_RANK_MAX], to[MOE_RANK_MAX], from[MOE_RANK_MAX];
  for (int d = 0; d < in[0].rank; d++) n[d] = in[0].n[line->i[d]];
  struct array y = array_of(in[0].rank, n);
  for (int64_t i = 0; i < count_of(&y); i++) {
    index_of(&y, i, to);
    for (int d = 0; d < y.rank; d++) from[line->i[d]] = to[d];
    y.v[i] = *at(&in[0], from, y.rank);
  }
  return y;
}
/* The part of `from` that begins at `begin` of dimension dim, or the other way round. */
static void copy_part(struct array *part, const struct array *whole, int64_t dim, int64_t begin, int into)
{
  int64_t index[MOE_RANK_MAX];
  for (int64_t i = 0; i < count_of(part); i++) {
    index_of(part, i, index);
    index[dim] += begin;
    if (into) *at(whole, index, whole->rank) = part->v[i];
    else part->v[i] = *at(whole, index, whole->rank);
  }
}
static struct array plain_slice(const struct array *in)
{
  int64_t n[MOE_RANK_MAX];
  memcpy(n, in[0].n, sizeof n);
  n[line->i[0]] = line->i[2] - line->i[1];
  struct array y = array_of(in[0].rank, n);
  copy_part(&y, &in[0], line->i[0], line->i[1], 0);
  return y;
}
static struct array plain_concat(const struct array *in)
{
  int64_t n[MOE_RANK_MAX], dim = line->i[0], begin = 0;
  memcpy(n, in[0].n, sizeof n);
  for (int i = 1; i < line->n; i++) n[dim] += in[i].n[dim];
  struct array y = array_of(in[0].rank, n);
  for (int i = 0; i < line->n; begin += in[i++].n[dim]) {
    struct array part = in[i];
    copy_part(&part, &y, dim, begin, 1);
  }
  return y;
}
static struct array plain_gather(const struct array *in)
{
  const int64_t D = in[0].n[1];
  struct array y = array_of(2, (const int64_t[]){ line->n_ids, D });
  for (int64_t i = 0; i < line->n_ids * D; i++) y.v[i] = in[0].v[line->ids[i / D] * D + i % D];
  return y;
}
static struct array plain_scatter(const struct array *in)
{
  const int64_t D = in[0].n[1], rows = line->i[0];
  struct array y = array_of(2, (const int64_t[]){ rows, D });
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < D; d++) {
      struct sum s = { 0 };
      for (int64_t i = 0; i < line->n_ids; i++)
        if (line->ids[i] == r) sum_add(&s, in[0].v[i * D + d]);
      y.v[r * D + d] = sum_end(&s);
    }
  return y;
}
/* i: transposes */
static struct array plain_matmul(const struct array *in)
{
  const struct array *a = &in[0], *b = &in[1];
  const int ra = a->rank, rb = b->rank;
  const int64_t M = a->n[ra - 2 + line->i[0]], K = a->n[ra - 1 - line->i[0]], N = b->n[rb - 1 - line->i[1]];
  int rank = 0;
  int64_t n[MOE_RANK_MAX + 1] = { 0 }, index[MOE_RANK_MAX];
  struct array xa = *a, xb = *b;
  xa.rank -= 2;
  xb.rank -= 2;
  broadcast(&xa, &rank, n);
  broadcast(&xb, &rank, n);
  n[rank] = M;
  n[rank + 1] = N;
  struct array y = array_of(rank + 2, n);
  for (int64_t i = 0; i < count_of(&y); i++) {
    struct sum s = { 0 };
    index_of(&y, i, index);
    const int64_t row = index[rank], column = index[rank + 1];
    for (int64_t k = 0; k < K; k++) {
      index[rank + line->i[0]] = row, index[rank + 1 - line->i[0]] = k;
      const num u = *at(a, index, rank + 2);
      index[rank + line->i[1]] = k, index[rank + 1 - line->i[1]] = column;
      sum_mul(&s, u, *at(b, index, rank + 2));
    }
    y.v[i] = n_mul(n_exact(1), sum_end(&s));
  }
  return y;
}
static struct array plain_softmax(const struct array *in)
{
  const int64_t axis = (int64_t)1 << line->i[0];
  struct array top = reduced(&in[0], MOE__ND_LARGEST, axis, 1), shifted = inner(MOE__ND_SUB, &in[0], &top);
  struct array e = inner(MOE__ND_EXP, &shifted, NULL), sum = reduced(&e, MOE__ND_SUM, axis, 1);
  return map_all(MOE__ND_DIV, (const struct array[]){ e, sum }, 2, 0);
}
static struct array plain_log_softmax(const struct array *in)
{
  const int64_t axis = (int64_t)1 << line->i[0];
  struct array top = reduced(&in[0], MOE__ND_LARGEST, axis, 1), shifted = inner(MOE__ND_SUB, &in[0], &top);
  struct array e = inner(MOE__ND_EXP, &shifted, NULL), sum = reduced(&e, MOE__ND_SUM, axis, 1);
  sum = inner(MOE__ND_LOG, &sum, NULL);
  return map_all(MOE__ND_SUB, (const struct array[]){ shifted, sum }, 2, 0);
}
static struct array plain_rms_norm(const struct array *in)
{
  const int64_t D = in[1].n[0], T = D ? count_of(&in[0]) / D : 0;
  struct array y = array_of(in[0].rank, in[0].n);
  ref_rms_fwd(y.v, t_nums(&m, T + 1), in[0].v, in[1].v, T, D, line->p);
  return y;
}
static struct array plain_layer_norm(const struct array *in)
{
  const int64_t last = (int64_t)1 << (in[0].rank - 1);
  const double part = 1.0 / (double)in[0].n[in[0].rank - 1];
  struct array mean = reduced(&in[0], MOE__ND_SUM, last, part);
  struct array centred = inner(MOE__ND_SUB, &in[0], &mean), square = inner(MOE__ND_MUL, &centred, &centred);
  struct array var = reduced(&square, MOE__ND_SUM, last, part), eps = array_of(0, NULL);
  eps.v[0] = n_real(line->p);
  var = inner(MOE__ND_ADD, &var, &eps);
  struct array rstd = map_all(MOE__ND_POW, &var, 1, -0.5);
  struct array y = inner(MOE__ND_MUL, &centred, &rstd);
  y = map_all(MOE__ND_MUL, (const struct array[]){ y, in[1] }, 2, 0);
  if (line->n < 3) return y;
  return map_all(MOE__ND_ADD, (const struct array[]){ y, in[2] }, 2, 0);
}
/* i: ignoring, index; p: smoothing */
static struct array plain_cross_entropy(const struct array *in)
{
  const int64_t T = in[0].n[0], V = in[0].n[1];
  struct array y = array_of(1, (const int64_t[]){ 1 });
  struct sum loss = { 0 };
  int64_t counted = 0;
  for (int64_t t = 0; t < T; t++) {
    const num *row = in[0].v + t * V;
    num top = row[0];
    struct sum e = { 0 }, all = { 0 };
    if (line->i[0] && line->ids[t] == line->i[1]) continue;
    for (int64_t v = 0; v < V; v++) top = n_max(top, row[v]);
    for (int64_t v = 0; v < V; v++) sum_add(&e, n_exp(n_sub(row[v], top)));
    const num lse = n_add(top, n_log(sum_end(&e)));
    for (int64_t v = 0; v < V; v++) sum_add(&all, row[v]);
    const num nll = n_sub(lse, row[line->ids[t]]);
    const num mean = n_sub(lse, n_mul(n_real(1.0 / (double)V), sum_end(&all)));
    sum_add(&loss, n_add(n_mul(n_real(1 - line->p), nll), n_mul(n_real(line->p), mean)));
    counted++;
  }
  if (counted) y.v[0] = n_div(sum_end(&loss), n_exact((double)counted));
  return y;
}
static struct array plain_dropout(const struct array *in)
{
  struct array y = array_of(in[0].rank, in[0].n);
  ref_nd_dropout_at(y.v, in[0].v, 0, count_of(&y), line->i[0], line->i[1], line->n_ids ? line->ids[0] : 0, line->p);
  return y;
}

/* ---- recording ------------------------------------------------------------------------------------------------------- */
static moe_value rec_one(moe_tape *t, const moe_value *in)
{
  return line->f.one(t, in[0]);
}
static moe_value rec_two(moe_tape *t, const moe_value *in)
{
  return line->f.two(t, in[0], in[1]);
}
static moe_value rec_scale(moe_tape *t, const moe_value *in)
{
  return moe_tape_scale(t, in[0], line->p);
}
static moe_value rec_pow(moe_tape *t, const moe_value *in)
{
  return moe_tape_pow(t, in[0], line->p);
}
static moe_value rec_where(moe_tape *t, const moe_value *in)
{
  moe_value c = moe_tape_reshape(t, id_value(t), line->i[0], (const int64_t[]){ line->n_ids, 1 });
  return moe_tape_where(t, c, in[0], in[1]);
}
static moe_value rec_broadcast(moe_tape *t, const moe_value *in)
{
  return moe_tape_broadcast(t, in[0], line->i[0], &line->i[1]);
}
static int64_t list_axes(int64_t *axes)
{
  int64_t n = 0;
  for (int64_t d = MOE_RANK_MAX - 1; d >= 0; d--) /* in any order */
    if (line->i[0] >> d & 1) axes[n++] = d;
  return n;
}
static moe_value rec_sum_axes(moe_tape *t, const moe_value *in)
{
  int64_t axes[MOE_RANK_MAX], n = list_axes(axes);
  return moe_tape_sum_axes(t, in[0], n, axes, line->i[1]);
}
static moe_value rec_mean_axes(moe_tape *t, const moe_value *in)
{
  int64_t axes[MOE_RANK_MAX], n = list_axes(axes);
  return moe_tape_mean_axes(t, in[0], n, axes, line->i[1]);
}
static moe_value rec_max_axes(moe_tape *t, const moe_value *in)
{
  int64_t axes[MOE_RANK_MAX], n = list_axes(axes);
  return moe_tape_max_axes(t, in[0], n, axes, line->i[1]);
}
static moe_value rec_reshape(moe_tape *t, const moe_value *in)
{
  return moe_tape_reshape(t, in[0], line->i[0], &line->i[1]);
}
static moe_value rec_permute(moe_tape *t, const moe_value *in)
{
  return moe_tape_permute(t, in[0], line->i);
}
static moe_value rec_slice(moe_tape *t, const moe_value *in)
{
  return moe_tape_slice(t, in[0], line->i[0], line->i[1], line->i[2]);
}
static moe_value rec_concat(moe_tape *t, const moe_value *in)
{
  return moe_tape_concat(t, in, line->n, line->i[0]);
}
static moe_value rec_gather(moe_tape *t, const moe_value *in)
{
  return line->f.two(t, in[0], id_value(t));
}
static moe_value rec_scatter(moe_tape *t, const moe_value *in)
{
  return moe_tape_scatter_rows(t, in[0], id_value(t), line->i[0]);
}
static moe_value rec_matmul(moe_tape *t, const moe_value *in)
{
  return moe_tape_matmul(t, in[0], in[1], line->i[0], line->i[1]);
}
static moe_value rec_softmax(moe_tape *t, const moe_value *in)
{
  return moe_tape_softmax(t, in[0], line->i[0]);
}
static moe_value rec_log_softmax(moe_tape *t, const moe_value *in)
{
  return moe_tape_log_softmax(t, in[0], line->i[0]);
}
static moe_value rec_rms_norm(moe_tape *t, const moe_value *in)
{
  return moe_tape_rms_norm(t, in[0], in[1], line->p);
}
static moe_value rec_layer_norm(moe_tape *t, const moe_value *in)
{
  return moe_tape_layer_norm(t, in[0], in[1], line->n > 2 ? in[2] : none, line->p);
}
static moe_value rec_cross_entropy(moe_tape *t, const moe_value *in)
{
  moe_cross_entropy o = moe_cross_entropy_init();
  o.ignore = line->i[0];
  o.ignore_index = line->i[1];
  o.smoothing = line->p;
  return moe_tape_cross_entropy_options(t, in[0], id_value(t), &o);
}
static moe_value rec_dropout(moe_tape *t, const moe_value *in)
{
  return moe_tape_dropout(t, in[0], line->p, (uint64_t)line->i[0], line->i[1], line->n_ids ? id_value(t) : none);
}

/* ---- the table ------------------------------------------------------------------------------------------------------- */
#define UNARY(fn, OP, from, to)                                                                                        \
  {                                                                                                                    \
#fn, rec_one, plain_map, 1, { S(3, 5) }, from, to, .op = MOE__ND_##OP, .f.one = moe_tape_##fn                      \
  }
#define BINARY(fn, OP, from, to, ...)                                                                                  \
  {                                                                                                                    \
#fn, rec_two, plain_map, 2, { __VA_ARGS__ }, from, to, .op = MOE__ND_##OP, .f.two = moe_tape_##fn                  \
  }
/* One that broadcasts: equal shapes, a missing dimension, both repeated, a scalar, nothing at all. */
#define BROADCASTING(fn, OP, from, to)                                                                                 \
  BINARY(fn, OP, from, to, S(2, 3), S(2, 3)), BINARY(fn, OP, from, to, S(2, 3), S(3)),                                 \
      BINARY(fn, OP, from, to, S(3), S(4, 2, 3)), BINARY(fn, OP, from, to, S(2, 1), S(1, 3)),                          \
      BINARY(fn, OP, from, to, S(3, 1), S(2, 1, 4)), BINARY(fn, OP, from, to, S(2, 2), SCALAR),                        \
      BINARY(fn, OP, from, to, SCALAR, SCALAR), BINARY(fn, OP, from, to, S(1), S(2, 1, 2, 1, 2)),                      \
      BINARY(fn, OP, from, to, S(0, 3), S(3))
#define POW(exponent, from, to)                                                                                        \
  {                                                                                                                    \
    "pow " #exponent, rec_pow, plain_map, 1, { S(7) }, from, to, .op = MOE__ND_POW, .p = exponent                      \
  }
#define ON_AXES(fn, shape, axes, keep)                                                                                 \
  {                                                                                                                    \
#fn " " #axes " " #keep, rec_##fn, plain_##fn, 1, { shape }, .i = { axes, keep }                                   \
  }
#define EACH_AXES(fn)                                                                                                  \
  ON_AXES(fn, S(2, 3, 4), 1, 0), ON_AXES(fn, S(2, 3, 4), 2, 1), ON_AXES(fn, S(2, 3, 4), 4, 0),                         \
      ON_AXES(fn, S(2, 3, 4), 5, 1), ON_AXES(fn, S(2, 3, 4), 6, 0), ON_AXES(fn, S(2, 3, 4), 7, 0),                     \
      ON_AXES(fn, S(5), 1, 0), ON_AXES(fn, S(2, 1, 3), 2, 0), ON_AXES(fn, S(3, 0), 1, 0)
#define MATMUL(flip_a, flip_b, ...)                                                                                    \
  {                                                                                                                    \
    "matmul " #flip_a #flip_b, rec_matmul, plain_matmul, 2, { __VA_ARGS__ }, .i = { flip_a, flip_b }                   \
  }
#define LAYOUTS(mk, km, kn, nk) MATMUL(0, 0, mk, kn), MATMUL(0, 1, mk, nk), MATMUL(1, 0, km, kn), MATMUL(1, 1, km, nk)
#define OVER(fn, dim, shape)                                                                                           \
  {                                                                                                                    \
#fn " over " #dim, rec_##fn, plain_##fn, 1, { shape }, -3, 3, .i = { dim }                                         \
  }

static const struct line lines[] = {
  BROADCASTING(add, ADD, -1, 1),
  BROADCASTING(sub, SUB, -1, 1),
  BROADCASTING(mul, MUL, -1, 1),
  BROADCASTING(div, DIV, 0.5, 2),
  BROADCASTING(maximum, MAX, -1, 1),
  { "greater", rec_two, plain_map, 2, { S(2, 3), S(3) }, .op = MOE__ND_GREATER, .f.two = moe_tape_greater, .rough = 1 },
  { "where u8",
    rec_where,
    plain_where,
    2,
    { S(3, 2), S(2) },
    .i = { 2 },
    .ids = { 1, 0, 7 },
    .n_ids = 3,
    .ids_dtype = MOE_U8 },
  { "where i32",
    rec_where,
    plain_where,
    2,
    { S(1), S(2, 3) },
    .i = { 1 },
    .ids = { -1, 0, 2 },
    .n_ids = 3,
    .ids_dtype = MOE_I32 },
  { "where float",
    rec_where,
    plain_where,
    2,
    { S(2, 4), S(2, 1) },
    .i = { 2 },
    .ids = { 0, 3 },
    .n_ids = 2,
    .ids_dtype = MOE_NONE },
  { "broadcast", rec_broadcast, plain_broadcast, 1, { S(3) }, .i = { 2, 4, 3 } },
  { "broadcast", rec_broadcast, plain_broadcast, 1, { S(2, 1) }, .i = { 4, 3, 1, 2, 5 } },
  { "broadcast", rec_broadcast, plain_broadcast, 1, { SCALAR }, .i = { 2, 2, 2 } },
  { "neg", rec_one, plain_map, 1, { S(2, 3) }, .op = MOE__ND_COPY, .p = -1, .f.one = moe_tape_neg },
  { "scale", rec_scale, plain_map, 1, { S(2, 3) }, .op = MOE__ND_COPY, .p = -1.7 },
  { "scale 0", rec_scale, plain_map, 1, { S(3) }, .op = MOE__ND_COPY, .p = 0 },
  POW(2, -2, 2),
  POW(3, -2, -0.6),
  POW(1, -2, 2),
  POW(0, -2, 2),
  POW(-2, 0.5, 2),
  POW(0.5, 0.2, 3),
  POW(-0.5, 0.5, 3),
  POW(2.7, 0.2, 2),
  UNARY(exp, EXP, -2, 2),
  UNARY(log, LOG, 0.2, 5),
  UNARY(sqrt, SQRT, 0.2, 5),
  UNARY(tanh, TANH, -2, 2),
  UNARY(sigmoid, SIGMOID, -4, 4),
  UNARY(relu, RELU, -1, 1),
  UNARY(silu, SILU, -4, 4),
  UNARY(erf, ERF, -1.5, 1.5),
  UNARY(gelu, GELU, -3, 3),
  UNARY(gelu_tanh, GELU_TANH, -3, 3),
  { "sum", rec_one, plain_sum, 1, { S(3, 5) }, .f.one = moe_tape_sum },
  { "mean", rec_one, plain_mean, 1, { S(3, 5) }, .f.one = moe_tape_mean },
  { "mean of nothing", rec_one, plain_mean, 1, { S(0, 5) }, .f.one = moe_tape_mean },
  EACH_AXES(sum_axes),
  EACH_AXES(mean_axes),
  ON_AXES(max_axes, S(2, 3, 4), 1, 0),
  ON_AXES(max_axes, S(2, 3, 4), 2, 1),
  ON_AXES(max_axes, S(2, 3, 4), 4, 0),
  ON_AXES(max_axes, S(2, 3, 4), 5, 0),
  ON_AXES(max_axes, S(5), 1, 1),
  { "reshape", rec_reshape, plain_reshape, 1, { S(2, 6) }, .i = { 3, 3, 1, 4 } },
  { "reshape", rec_reshape, plain_reshape, 1, { S(1, 1) }, .i = { 0 } },
  { "permute", rec_permute, plain_permute, 1, { S(2, 3, 4) }, .i = { 2, 0, 1 } },
  { "permute", rec_permute, plain_permute, 1, { S(2, 3) }, .i = { 1, 0 } },
  { "permute", rec_permute, plain_permute, 1, { S(2, 1, 3, 2) }, .i = { 3, 1, 0, 2 } },
  { "slice", rec_slice, plain_slice, 1, { S(5, 3) }, .i = { 0, 1, 4 } },
  { "slice", rec_slice, plain_slice, 1, { S(2, 3, 4) }, .i = { 1, 2, 3 } },
  { "slice", rec_slice, plain_slice, 1, { S(2, 5) }, .i = { 1, 0, 5 } },
  { "slice of nothing", rec_slice, plain_slice, 1, { S(2, 5) }, .i = { 1, 3, 3 } },
  { "concat", rec_concat, plain_concat, 3, { S(1, 3), S(2, 3), S(1, 3) }, .i = { 0 } },
  { "concat", rec_concat, plain_concat, 2, { S(2, 1, 2), S(2, 3, 2) }, .i = { 1 } },
  { "concat", rec_concat, plain_concat, 3, { S(3, 2), S(3, 0), S(3, 1) }, .i = { 1 } },
  { "concat of one", rec_concat, plain_concat, 1, { S(3) }, .i = { 0 } },
  { "gather_rows",
    rec_gather,
    plain_gather,
    1,
    { S(4, 3) },
    .ids = { 3, 0, 3, 1, 3 },
    .n_ids = 5,
    .f.two = moe_tape_gather_rows },
  { "gather_rows",
    rec_gather,
    plain_gather,
    1,
    { S(1, 2) },
    .ids = { 0, 0 },
    .n_ids = 2,
    .f.two = moe_tape_gather_rows },
  { "embedding",
    rec_gather,
    plain_gather,
    1,
    { S(5, 2) },
    .ids = { 4, 4, 0, 2 },
    .n_ids = 4,
    .f.two = moe_tape_embedding },
  { "scatter_rows", rec_scatter, plain_scatter, 1, { S(5, 3) }, .i = { 4 }, .ids = { 3, 0, 3, 1, 3 }, .n_ids = 5 },
  { "scatter_rows", rec_scatter, plain_scatter, 1, { S(3, 2) }, .i = { 1 }, .ids = { 0, 0, 0 }, .n_ids = 3 },
  LAYOUTS(S(2, 3), S(3, 2), S(3, 4), S(4, 3)),
  LAYOUTS(S(3, 2, 3), S(3, 3, 2), S(3, 3, 2), S(3, 2, 3)),
  LAYOUTS(S(3, 2, 3), S(3, 3, 2), S(3, 2), S(2, 3)),
  LAYOUTS(S(2, 3), S(3, 2), S(2, 3, 2), S(2, 2, 3)),
  LAYOUTS(S(2, 1, 2, 3), S(2, 1, 3, 2), S(3, 3, 2), S(3, 2, 3)),
  LAYOUTS(S(1, 2, 3), S(1, 3, 2), S(2, 3, 1), S(2, 1, 3)),
  MATMUL(0, 0, S(2, 0), S(0, 3)),
  MATMUL(0, 1, S(0, 2), S(3, 2)),
  MATMUL(0, 0, S(0, 2, 2), S(1, 2, 2)),
  OVER(softmax, 0, S(2, 3, 2)),
  OVER(softmax, 1, S(2, 3, 2)),
  OVER(softmax, 2, S(2, 3, 4)),
  OVER(softmax, 0, S(5)),
  OVER(softmax, 1, S(3, 1)),
  OVER(log_softmax, 0, S(2, 3, 2)),
  OVER(log_softmax, 1, S(2, 3, 2)),
  OVER(log_softmax, 2, S(2, 3, 4)),
  OVER(log_softmax, 0, S(5)),
  { "rms_norm", rec_rms_norm, plain_rms_norm, 2, { S(3, 5), S(5) }, .p = 1e-3 },
  { "rms_norm", rec_rms_norm, plain_rms_norm, 2, { S(4), S(4) }, .p = 1e-3 },
  { "rms_norm", rec_rms_norm, plain_rms_norm, 2, { S(2, 2, 3), S(3) }, .p = 1e-3 },
  { "layer_norm", rec_layer_norm, plain_layer_norm, 3, { S(3, 5), S(5), S(5) }, .p = 1e-3 },
  { "layer_norm, no b", rec_layer_norm, plain_layer_norm, 2, { S(2, 2, 3), S(3) }, .p = 1e-3 },
  { "layer_norm", rec_layer_norm, plain_layer_norm, 3, { S(4), S(4), S(4) }, .p = 1e-3 },
  { "cross_entropy", rec_cross_entropy, plain_cross_entropy, 1, { S(4, 5) }, -2, 2, .ids = { 2, 0, 4, 2 }, .n_ids = 4 },
  { "cross_entropy, ignore",
    rec_cross_entropy,
    plain_cross_entropy,
    1,
    { S(4, 5) },
    -2,
    2,
    .i = { 1, -100 },
    .ids = { 2, -100, 4, -100 },
    .n_ids = 4 },
  { "cross_entropy, ignore all",
    rec_cross_entropy,
    plain_cross_entropy,
    1,
    { S(2, 3) },
    -2,
    2,
    .i = { 1, 1 },
    .ids = { 1, 1 },
    .n_ids = 2 },
  { "cross_entropy, smoothing",
    rec_cross_entropy,
    plain_cross_entropy,
    1,
    { S(4, 5) },
    -2,
    2,
    .p = 0.3,
    .ids = { 2, 0, 4, 2 },
    .n_ids = 4 },
  { "cross_entropy, both",
    rec_cross_entropy,
    plain_cross_entropy,
    1,
    { S(4, 3) },
    -2,
    2,
    .i = { 1, 0 },
    .p = 0.1,
    .ids = { 2, 0, 1, 2 },
    .n_ids = 4 },
  { "dropout", rec_dropout, plain_dropout, 1, { S(3, 7) }, .p = 0.4, .i = { 12345, 6 } },
  { "dropout, step",
    rec_dropout,
    plain_dropout,
    1,
    { S(3, 7) },
    .p = 0.4,
    .i = { 12345, 6 },
    .ids = { 9 },
    .n_ids = 1 },
  { "dropout 0", rec_dropout, plain_dropout, 1, { S(3) }, .p = 0, .i = { 1, 1 } },
};
#define LINES ((int)(sizeof lines / sizeof *lines))

/* ---- a line on the device -------------------------------------------------------------------------------------------- */
static moe_tensor in_tensor[INPUTS];
static struct array in_array[INPUTS];

/* Inputs of the line in dtype d: random, the same ones each time. */
static void prepare(const struct line *l, int64_t d)
{
  line = l;
  dtype = d;
  ref_arithmetic(d);
  t_memory_free(&m);
  t_memory_init(&m, ctx, q, (uint64_t)(l - lines) + 1);
  for (int i = 0; i < l->n; i++) {
    const double low = l->low != l->high ? l->low : -1, high = l->low != l->high ? l->high : 1;
    in_array[i] = array_of(l->in[i].rank, l->in[i].n);
    const int64_t n = count_of(&in_array[i]);
    assert_true(n <= MOST);
    const num *random = t_uniform(&m, n, MOE_F64, 0.5);
    for (int64_t k = 0; k < n; k++) in_array[i].v[k].v = ref_round(low + (high - low) * (0.5 + random[k].v), MOE_BF16);
    in_tensor[i] = t_tensor(&m, d, T_PACKED, l->in[i].rank, l->in[i].n);
    t_put(&m, &in_tensor[i], in_array[i].v);
  }
  const int64_t ids_dtype = l->n_ids && !l->ids_dtype && l->record == rec_where ? d
                            : l->ids_dtype                                      ? l->ids_dtype
                                                                                : MOE_I32;
  ids = t_tensor(&m, ids_dtype, T_PACKED, SHAPE(l->n_ids));
  const struct array as_numbers = ids_array();
  t_put(&m, &ids, as_numbers.v);
  t_upload(&m);
  assert_int_equal(m.status, MOE_OK);
}

/* Makes an element of input i NaN. */
static void poison(int i, int64_t element)
{
  const int64_t n = count_of(&in_array[i]);
  if (n) in_array[i].v[element % n].v = (double)NAN;
  t_put(&m, &in_tensor[i], in_array[i].v);
  t_upload(&m);
}

static void leaves(moe_value *in, int needs_grad)
{
  moe_tape_reset(tape);
  for (int i = 0; i < line->n; i++) in[i] = moe_tape_leaf(tape, &in_tensor[i], needs_grad);
}

static void check_values(const char *how)
{
  moe_value in[INPUTS];
  moe_tensor t;
  leaves(in, 1);
  moe_value y = line->record(tape, in);
  if (moe_tape_tensor(&t, tape, y)) {
    tell("%s", moe_last_error());
    return;
  }
  const int is_loss = line->plain == plain_sum || line->plain == plain_mean || line->plain == plain_cross_entropy;
  if (t.dtype != (is_loss && dtype != MOE_F64 ? MOE_F32 : dtype)) tell("the result is %s", moe_dtype_name(t.dtype));
  const struct array want = line->plain(in_array);
  int same = want.rank == t.rank;
  for (int d = 0; same && d < t.rank; d++) same = want.n[d] == t.shape[d];
  if (!same) {
    tell("rank %d, wanted %d, or other extents", t.rank, want.rank);
    return;
  }
  const int64_t n = count_of(&want);
  double *got = t_host(&m, n + 1, sizeof *got);
  OK(moe_tape_read(tape, y, got, n));
  const struct ref_worst w = ref_compare(got, want.v, n, t.dtype);
  if (w.failed) tell("%selement %lld is %.17g, wanted %.17g within %.3g", how, (long long)w.at, w.got, w.want, w.bound);
}

static const int64_t dtypes[] = { MOE_F64, MOE_F32, MOE_BF16, MOE_F16 };
static int has(int64_t d)
{
  return d != MOE_F64 || test_has_fp64(ctx);
}

static void values(void **state)
{
  (void)state;
  for (int d = 0; d < 4; d++)
    for (int l = 0; l < LINES && has(dtypes[d]); l++) {
      prepare(&lines[l], dtypes[d]);
      check_values("");
    }
  none_wrong();
}
/* A NaN goes where C's arithmetic takes it, and nowhere else. */
static void values_with_a_nan(void **state)
{
  (void)state;
  for (int l = 0; l < LINES; l++)
    for (int i = 0; i < lines[l].n; i++)
      for (int64_t k = 0; k < 3; k++) {
        prepare(&lines[l], MOE_F32);
        poison(i, 7 * k);
        check_values("with a NaN, ");
      }
  none_wrong();
}

/* ---- gradients ------------------------------------------------------------------------------------------------------- */
static moe_value recorded(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  moe_value y = line->record(t, in);
  (void)n;
  return user ? moe_tape_mul(t, moe_tape_mul(t, y, y), y)
              : y; /* cubed: so that what is linear has a second derivative */
}

static void check_gradients(int second, int cubed)
{
  for (int l = 0; l < LINES; l++) {
    moe_gradcheck_desc desc = moe_gradcheck_desc_init();
    moe_gradcheck_result r = moe_gradcheck_result_init();
    int64_t all = 0;
    if (lines[l].rough) continue;
    prepare(&lines[l], MOE_F64);
    desc.second = second;
    moe_status st = moe_gradcheck(&r, q, recorded, cubed ? &desc : NULL, in_tensor, line->n, &desc);
    if (st) tell("%s", moe_last_error());
    for (int i = 0; i < line->n; i++) all += count_of(&in_array[i]);
    if (!st && r.checked != all) tell("%lld of %lld elements checked", (long long)r.checked, (long long)all);
  }
  none_wrong();
}
static void first_derivatives(void **state)
{
  (void)state;
  NEEDS_FP64;
  check_gradients(0, 0);
}
static void second_derivatives(void **state)
{
  (void)state;
  NEEDS_FP64;
  check_gradients(1, 0);
}
static void second_derivatives_of_cubes(void **state)
{
  (void)state;
  NEEDS_FP64;
  check_gradients(1, 1);
}

/* Gradients of the line's inputs in d, for a seed of whole numbers; absent: 0. */
static void gradients_in(int64_t d, int64_t flags, double out[INPUTS][MOST])
{
  moe_value in[INPUTS], grads[INPUTS];
  moe_tensor t;
  memset(out, 0, INPUTS * sizeof *out);
  prepare(line, d);
  leaves(in, 1);
  moe_value y = line->record(tape, in);
  OK(moe_tape_tensor(&t, tape, y));
  moe_tensor seed = t_tensor(&m, t.dtype, T_PACKED, t.rank, t.shape);
  t_put(&m, &seed, t_whole(&m, moe_tensor_count(&seed), 3));
  t_upload(&m);
  moe_value s = moe_tape_leaf(tape, &seed, 0);
  OK(moe_tape_gradients(grads, tape, &y, &s, 1, in, line->n, flags));
  for (int i = 0; i < line->n; i++)
    if (grads[i].id) OK(moe_tape_read(tape, grads[i], out[i], count_of(&in_array[i])));
}

/* Relative to the largest part of the gradient, which sums of it may have met: a few dozen roundings of u. */
static void assert_alike(double got[INPUTS][MOST], double want[INPUTS][MOST], double times, double u)
{
  for (int i = 0; i < line->n; i++) {
    double largest = 1;
    for (int64_t k = 0; k < count_of(&in_array[i]); k++) largest = fmax(largest, fabs(times * want[i][k]));
    for (int64_t k = 0; k < count_of(&in_array[i]); k++)
      if (!(fabs(got[i][k] - times * want[i][k]) <= 64 * u * largest))
        tell("input %d, element %lld: %.9g, wanted %.9g", i, (long long)k, got[i][k], times * want[i][k]);
  }
}

static void gradients_in_f32(void **state)
{
  (void)state;
  NEEDS_FP64;
  for (line = lines; line < lines + LINES; line++) {
    double wide[INPUTS][MOST], narrow[INPUTS][MOST];
    if (line->rough) continue;
    gradients_in(MOE_F64, 0, wide);
    gradients_in(MOE_F32, 0, narrow);
    assert_alike(narrow, wide, 1, 0x1p-24);
  }
  none_wrong();
}

/* Gradients that can be differentiated again are those that cannot. */
static void gradients_as_a_graph(void **state)
{
  (void)state;
  for (line = lines; line < lines + LINES; line++) {
    double plain[INPUTS][MOST], graph[INPUTS][MOST];
    if (line->rough) continue;
    gradients_in(MOE_F32, 0, plain);
    gradients_in(MOE_F32, MOE_CREATE_GRAPH, graph);
    assert_alike(graph, plain, 1, 0x1p-24);
  }
  none_wrong();
}

/* Parameters: written to their tensors, or added to what is there. */
static void gradients_of_parameters(void **state)
{
  (void)state;
  for (line = lines; line < lines + LINES; line++) {
    double plain[INPUTS][MOST], bound[INPUTS][MOST];
    moe_tensor t, grad[INPUTS];
    moe_value in[INPUTS];
    if (line->rough) continue;
    gradients_in(MOE_F32, 0, plain);
    prepare(line, MOE_F32);
    for (int i = 0; i < line->n; i++) grad[i] = t_tensor(&m, MOE_F32, T_PACKED, line->in[i].rank, line->in[i].n);
    moe_tape_reset(tape);
    for (int i = 0; i < line->n; i++) in[i] = moe_tape_param(tape, &in_tensor[i], &grad[i]);
    moe_value y = line->record(tape, in);
    OK(moe_tape_tensor(&t, tape, y));
    moe_tensor seed = t_tensor(&m, t.dtype, T_PACKED, t.rank, t.shape);
    t_put(&m, &seed, t_whole(&m, moe_tensor_count(&seed), 3));
    t_upload(&m);
    moe_value s = moe_tape_leaf(tape, &seed, 0);
    for (int pass = 0; pass < 3; pass++) {
      OK(moe_tape_backward(tape, y, s, pass ? MOE_ACCUMULATE : 0));
      for (int i = 0; i < line->n; i++) OK(moe_tensor_read(q, bound[i], &grad[i], MOST));
      assert_alike(bound, plain, pass + 1, 0x1p-24);
    }
  }
  none_wrong();
}

/* ---- where derivatives break ------------------------------------------------------------------------------------------- */
/* The gradient of sum(y) for one input, in f32. */
static void gradient_of(moe_value y, moe_value x, double *out, int64_t n)
{
  moe_value g, loss = moe_tape_sum(tape, y);
  OK(moe_tape_gradients(&g, tape, &loss, NULL, 1, &x, 1, 0));
  assert_true(g.id != 0);
  OK(moe_tape_read(tape, g, out, n));
}
static moe_value leaf_of(int64_t d, const double *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&m, d, T_PACKED, rank, shape);
  const int64_t n = moe_tensor_count(&t);
  num *numbers = t_nums(&m, n + 1);
  for (int64_t i = 0; i < n; i++) numbers[i].v = values[i];
  t_put(&m, &t, numbers);
  t_upload(&m);
  assert_int_equal(m.status, MOE_OK);
  return moe_tape_leaf(tape, &t, moe_dtype_size(d) && d <= MOE_F16);
}
#define LEAF(d, ...)                                                                                                   \
  leaf_of(d, (const double[]){ __VA_ARGS__ },                                                                          \
          SHAPE((int64_t)(sizeof((const double[]){ __VA_ARGS__ }) / sizeof(double))))
#define EXPECT(got, ...)                                                                                               \
  do {                                                                                                                 \
    const double want_[] = { __VA_ARGS__ };                                                                            \
    for (size_t i_ = 0; i_ < sizeof want_ / sizeof *want_; i_++)                                                       \
      if (!((got)[i_] == want_[i_] || (isnan((got)[i_]) && isnan(want_[i_]))))                                         \
        fail_msg("element %zu is %.9g, wanted %.9g", i_, (got)[i_], want_[i_]);                                        \
  } while (0)

static void equal_ones_share_the_gradient(void **state)
{
  double g[6];
  (void)state;
  moe_value a = LEAF(MOE_F32, 1, 2, 3), b = LEAF(MOE_F32, 1, 0, 5), y = moe_tape_maximum(tape, a, b);
  gradient_of(y, a, g, 3);
  EXPECT(g, 0.5, 1, 0);
  gradient_of(y, b, g, 3);
  EXPECT(g, 0.5, 0, 1);
  moe_value x = moe_tape_reshape(tape, LEAF(MOE_F32, 1, 3, 3, 2, NAN, 2), 2, (const int64_t[]){ 2, 3 });
  y = moe_tape_max_axes(tape, x, 1, (const int64_t[]){ 1 }, 0);
  OK(moe_tape_read(tape, y, g, 2));
  EXPECT(g, 3, NAN);
  gradient_of(y, x, g, 6);
  EXPECT(g, 0, 0.5, 0.5, NAN, NAN, NAN);
  y = moe_tape_max_axes(tape, LEAF(MOE_F32, 2, 2, 2, 2), 1, (const int64_t[]){ 0 }, 0);
  OK(moe_tape_read(tape, y, g, 1));
  EXPECT(g, 2);
}

static void values_at_the_edges(void **state)
{
  double y[8];
  (void)state;
#define OF(op, ...)                                                                                                    \
  OK(moe_tape_read(tape, op, y, 8));                                                                                   \
  EXPECT(y, __VA_ARGS__)
  moe_value edge = LEAF(MOE_F32, 0, -2, NAN, INFINITY);
  OF(moe_tape_pow(tape, edge, 0), 1, 1, 1, 1);
  OF(moe_tape_pow(tape, edge, 3), 0, -8, NAN, INFINITY);
  OF(moe_tape_pow(tape, edge, 0.5), 0, NAN, NAN, INFINITY);
  OF(moe_tape_pow(tape, edge, -1), INFINITY, -0.5, NAN, 0);
  OF(moe_tape_log(tape, edge), -INFINITY, NAN, NAN, INFINITY);
  OF(moe_tape_sqrt(tape, edge), 0, NAN, NAN, INFINITY);
  OF(moe_tape_relu(tape, edge), 0, 0, NAN, INFINITY);
  OF(moe_tape_maximum(tape, edge, LEAF(MOE_F32, NAN, -2, 1, 1)), NAN, -2, NAN, INFINITY);
  OF(moe_tape_greater(tape, edge, LEAF(MOE_F32, -1, -2, 1, NAN)), 1, 0, 0, 0);
  OF(moe_tape_where(tape, edge, LEAF(MOE_F32, 1), LEAF(MOE_F32, 2)), 2, 1, 1, 1);
  OF(moe_tape_softmax(tape, LEAF(MOE_F32, -1e30, 0, -1e30, 0), 0), 0, 0.5, 0, 0.5);
  OF(moe_tape_softmax(tape, LEAF(MOE_F32, -INFINITY, 3, -INFINITY), 0), 0, 1, 0);
  OF(moe_tape_log_softmax(tape, LEAF(MOE_F32, 1e30, 0), 0), 0, -1e30f);
  OF(moe_tape_sigmoid(tape, LEAF(MOE_F32, -1000, 1000)), 0, 1);
  OF(moe_tape_max_axes(tape, moe_tape_slice(tape, edge, 0, 1, 1), 1, (const int64_t[]){ 0 }, 1), -INFINITY);
  OF(moe_tape_cast(tape, LEAF(MOE_F32, 1e6, -1e6, 1 + 0x1p-11, NAN), MOE_F16), INFINITY, -INFINITY, 1, NAN);
  moe_value scalar = leaf_of(MOE_F32, (const double[]){ 3 }, 0, NULL); /* of rank 0 */
  OF(moe_tape_sum(tape, scalar), 3);
  gradient_of(scalar, scalar, y, 1);
  EXPECT(y, 1);
}

static void gradients_at_the_edges(void **state)
{
  double g[4];
  (void)state;
#define GRADIENT(op, x, ...)                                                                                           \
  do {                                                                                                                 \
    moe_value x_ = x;                                                                                                  \
    gradient_of(op(tape, x_), x_, g, 4);                                                                               \
    EXPECT(g, __VA_ARGS__);                                                                                            \
  } while (0)
  GRADIENT(moe_tape_relu, LEAF(MOE_F32, 0, -0.0, 1, -1), 0, 0, 1, 0);
  GRADIENT(moe_tape_sqrt, LEAF(MOE_F32, 0, 4), INFINITY, 0.25);
  GRADIENT(moe_tape_log, LEAF(MOE_F32, 0, 4), INFINITY, 0.25);
  GRADIENT(moe_tape_sigmoid, LEAF(MOE_F32, -1000, 1000), 0, 0);
  GRADIENT(moe_tape_silu, LEAF(MOE_F32, -1000, 1000), 0, 1);
  GRADIENT(moe_tape_gelu, LEAF(MOE_F32, -1000, 1000), 0, 1);
  /* In f16 a^2 would overflow. */
  GRADIENT(moe_tape_gelu_tanh, LEAF(MOE_F16, -1000, 1000), 0, 1);
  GRADIENT(moe_tape_gelu, LEAF(MOE_F16, -1000, 1000), 0, 1);
  moe_value x = LEAF(MOE_F16, 2000, -2000, 2000, -2000), w = LEAF(MOE_F16, 1, 1, 1, 1);
  OK(moe_tape_read(tape, moe_tape_layer_norm(tape, x, w, none, 1e-5), g, 4));
  EXPECT(g, 1, -1, 1, -1);
  moe_value d, y = moe_tape_rms_norm(tape, x, w, 1e-5), seed = LEAF(MOE_F16, 2, 0, 0, 0);
  OK(moe_tape_gradients(&d, tape, &y, &seed, 1, &x, 1, MOE_CREATE_GRAPH)); /* seed/2000 - x y (seed y)/4/2000 */
  OK(moe_tape_read(tape, d, g, 4));
  for (int i = 0; i < 4; i++) assert_near(g[i], (i == 0 ? 1e-3 : 0) - (i % 2 ? -1 : 1) * 0.25e-3, 1e-6);
  x = LEAF(MOE_F32, 0, 3);
  gradient_of(moe_tape_pow(tape, x, 0), x, g, 2);
  EXPECT(g, 0, 0);
  gradient_of(moe_tape_pow(tape, x, 1), x, g, 2);
  EXPECT(g, 1, 1);
  gradient_of(moe_tape_pow(tape, x, 2), x, g, 2);
  EXPECT(g, 0, 6);
  /* By way of another type, and back in its own. */
  x = LEAF(MOE_BF16, 1, 2);
  moe_value wide = moe_tape_cast(tape, x, MOE_F32);
  moe_tensor t;
  gradient_of(moe_tape_mul(tape, wide, LEAF(MOE_F32, 1 + 0x1p-10, 3)), x, g, 2);
  EXPECT(g, 1, 3);
  OK(moe_tape_tensor(&t, tape, wide));
  assert_int_equal(t.dtype, MOE_F32);
}

/* One value with several parts in an operation: each is counted. */
static void an_input_used_twice(void **state)
{
  double g[2];
  (void)state;
  moe_value x = LEAF(MOE_F32, 2, 3);
  gradient_of(moe_tape_mul(tape, x, x), x, g, 2);
  EXPECT(g, 4, 6);
  gradient_of(moe_tape_div(tape, x, x), x, g, 2);
  EXPECT(g, 0, 0);
  gradient_of(moe_tape_sub(tape, x, x), x, g, 2);
  EXPECT(g, 0, 0);
  gradient_of(moe_tape_maximum(tape, x, x), x, g, 2);
  EXPECT(g, 1, 1);
  gradient_of(moe_tape_concat(tape, (const moe_value[]){ x, x, x }, 3, 0), x, g, 2);
  EXPECT(g, 3, 3);
  moe_value row = moe_tape_reshape(tape, x, 2, (const int64_t[]){ 1, 2 });
  gradient_of(moe_tape_matmul(tape, row, row, 0, 1), x, g, 2);
  EXPECT(g, 4, 6);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------------- */
static void refusals(void **state)
{
  static const int64_t two[] = { 2, 2 }, negative[] = { -1 }, six[] = { 1, 1, 1, 1, 1, 1, 1 };
  (void)state;
  moe_tensor t23 = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(2, 3)), t32 = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(3, 2)),
             t3 = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(3)), h3 = t_tensor(&m, MOE_F16, T_PACKED, SHAPE(3)),
             i3 = t_tensor(&m, MOE_I32, T_PACKED, SHAPE(3)), l3 = t_tensor(&m, MOE_I64, T_PACKED, SHAPE(3)),
             t0 = t_tensor(&m, MOE_F32, T_PACKED, SHAPE(0, 2)), bad = t_tensor(&m, MOE_F32, T_PAD, SHAPE(2, 2));
  t_upload(&m);
#define REFUSED(text, call)                                                                                            \
  do {                                                                                                                 \
    moe_tape_reset(tape);                                                                                              \
    moe_value x23 = moe_tape_leaf(tape, &t23, 1), x32 = moe_tape_leaf(tape, &t32, 1),                                  \
              x3 = moe_tape_leaf(tape, &t3, 1), f16 = moe_tape_leaf(tape, &h3, 1), i32 = moe_tape_leaf(tape, &i3, 0),  \
              i64 = moe_tape_leaf(tape, &l3, 0), empty = moe_tape_leaf(tape, &t0, 1);                                  \
    OK(moe_tape_status(tape));                                                                                         \
    assert_int_equal((call).id, 0);                                                                                    \
    FAILS(MOE_ERR_INVALID, text, moe_tape_status(tape));                                                               \
    (void)x23, (void)x32, (void)x3, (void)f16, (void)i32, (void)i64, (void)empty;                                      \
  } while (0)
  REFUSED("moe_tape_leaf: tensor is not a packed", moe_tape_leaf(tape, &bad, 1));
  REFUSED("moe_tape_leaf: i32 has no gradient", moe_tape_leaf(tape, &i3, 1));
  REFUSED("moe_tape_param: grad is NULL", moe_tape_param(tape, &t3, NULL));
  REFUSED("moe_tape_param: grad has extent 3 in dimension 0, 2", moe_tape_param(tape, &t23, &t32));
  REFUSED("moe_tape_add: extents 2 and 3", moe_tape_add(tape, x23, x32));
  REFUSED("moe_tape_sub: f32 and f16", moe_tape_sub(tape, x3, f16));
  REFUSED("moe_tape_mul: a is i32, a float", moe_tape_mul(tape, i32, x3));
  REFUSED("moe_tape_div: the null value", moe_tape_div(tape, x3, none));
  REFUSED("moe_tape_maximum: b is i64", moe_tape_maximum(tape, x3, i64));
  REFUSED("moe_tape_greater: extents", moe_tape_greater(tape, x23, moe_tape_leaf(tape, &t32, 0)));
  REFUSED("moe_tape_where: condition is i64", moe_tape_where(tape, i64, x3, x3));
  REFUSED("moe_tape_where: f32 and f16", moe_tape_where(tape, i32, x3, f16));
  REFUSED("moe_tape_broadcast: extent 2 of dimension 1, a has 3", moe_tape_broadcast(tape, x3, 2, two));
  REFUSED("moe_tape_broadcast: rank 1, wanted 2 to 6", moe_tape_broadcast(tape, x23, 1, two));
  REFUSED("moe_tape_broadcast: rank 7", moe_tape_broadcast(tape, x23, 7, six));
  REFUSED("moe_tape_broadcast: extent -1", moe_tape_broadcast(tape, x3, 1, negative));
  REFUSED("moe_tape_neg: a is i32", moe_tape_neg(tape, i32));
  REFUSED("moe_tape_scale: inf is not finite", moe_tape_scale(tape, x3, INFINITY));
  REFUSED("moe_tape_pow: nan is not finite", moe_tape_pow(tape, x3, (double)NAN));
  REFUSED("moe_tape_exp: a is i64", moe_tape_exp(tape, i64));
  REFUSED("moe_tape_gelu: a is i32", moe_tape_gelu(tape, i32));
  REFUSED("moe_tape_cast: dtype i32 is no float", moe_tape_cast(tape, x3, MOE_I32));
  REFUSED("moe_tape_cast: a is i32", moe_tape_cast(tape, i32, MOE_F32));
  REFUSED("moe_tape_cast: f16 to f64 goes by way of f32", moe_tape_cast(tape, f16, MOE_F64));
  REFUSED("moe_tape_sum: a is i32", moe_tape_sum(tape, i32));
  REFUSED("moe_tape_mean: a is i32", moe_tape_mean(tape, i32));
  REFUSED("moe_tape_sum_axes: axis 2 of rank 2", moe_tape_sum_axes(tape, x23, 2, two, 0));
  REFUSED("moe_tape_mean_axes: axis 1 of rank 2, or twice",
          moe_tape_mean_axes(tape, x23, 2, (const int64_t[]){ 1, 1 }, 0));
  REFUSED("moe_tape_max_axes: at least one axis", moe_tape_max_axes(tape, x23, 0, NULL, 0));
  REFUSED("moe_tape_sum_axes: at least one axis", moe_tape_sum_axes(tape, x23, 3, NULL, 0));
  REFUSED("moe_tape_sum_axes: axis -1", moe_tape_sum_axes(tape, x23, 1, negative, 0));
  REFUSED("moe_tape_reshape: 6 elements, shape has 4", moe_tape_reshape(tape, x23, 2, two));
  REFUSED("rank 7", moe_tape_reshape(tape, x23, 7, six));
  REFUSED("moe_tape_permute: order is no permutation", moe_tape_permute(tape, x23, two));
  REFUSED("moe_tape_permute: order is no permutation", moe_tape_permute(tape, x23, (const int64_t[]){ 1, 1 }));
  REFUSED("moe_tape_permute: order is no permutation", moe_tape_permute(tape, x23, NULL));
  REFUSED("moe_tape_slice", moe_tape_slice(tape, x23, 2, 0, 1));
  REFUSED("moe_tape_slice", moe_tape_slice(tape, x23, 1, 2, 4));
  REFUSED("moe_tape_slice", moe_tape_slice(tape, x23, 1, 2, 1));
  REFUSED("moe_tape_slice: a is i32", moe_tape_slice(tape, i32, 0, 0, 1));
  REFUSED("moe_tape_concat: at least one part", moe_tape_concat(tape, &x23, 0, 0));
  REFUSED("moe_tape_concat: at least one part", moe_tape_concat(tape, NULL, 2, 0));
  REFUSED("moe_tape_concat: dim 2 of rank 2", moe_tape_concat(tape, &x23, 1, 2));
  REFUSED("moe_tape_concat: part 1 differs", moe_tape_concat(tape, (const moe_value[]){ x23, x32 }, 2, 0));
  REFUSED("moe_tape_concat: part 1 differs", moe_tape_concat(tape, (const moe_value[]){ x3, f16 }, 2, 0));
  REFUSED("moe_tape_concat: part 1 differs", moe_tape_concat(tape, (const moe_value[]){ x23, x3 }, 2, 0));
  REFUSED("moe_tape_gather_rows: wanted float rows", moe_tape_gather_rows(tape, x3, i32));
  REFUSED("moe_tape_gather_rows: wanted float rows", moe_tape_gather_rows(tape, x32, i64));
  REFUSED("moe_tape_gather_rows: there is no row", moe_tape_gather_rows(tape, empty, i32));
  REFUSED("moe_tape_embedding: wanted float rows", moe_tape_embedding(tape, x32, x3));
  REFUSED("moe_tape_scatter_rows: 2 rows, 3 ids", moe_tape_scatter_rows(tape, x23, i32, 4));
  REFUSED("moe_tape_scatter_rows: 3 rows, 3 ids, to 0 rows", moe_tape_scatter_rows(tape, x32, i32, 0));
  REFUSED("moe_tape_matmul: wanted matrices", moe_tape_matmul(tape, x23, x3, 0, 0));
  REFUSED("moe_tape_matmul: inner extents 3 and 2", moe_tape_matmul(tape, x23, x23, 0, 0));
  REFUSED("moe_tape_matmul: inner extents 2 and 3", moe_tape_matmul(tape, x23, x32, 1, 0));
  REFUSED("moe_tape_softmax: dim 1 of rank 1", moe_tape_softmax(tape, x3, 1));
  REFUSED("moe_tape_log_softmax: dim -1 of rank 1", moe_tape_log_softmax(tape, x3, -1));
  REFUSED("moe_tape_rms_norm: wanted x [..,D]", moe_tape_rms_norm(tape, x32, x3, 1e-5));
  REFUSED("moe_tape_rms_norm: wanted x [..,D]", moe_tape_rms_norm(tape, x23, f16, 1e-5));
  REFUSED("moe_tape_layer_norm: wanted x [..,D]", moe_tape_layer_norm(tape, x23, x3, x23, 1e-5));
  REFUSED("moe_tape_layer_norm: x is i32", moe_tape_layer_norm(tape, i32, x3, none, 1e-5));
  REFUSED("moe_tape_cross_entropy: wanted float logits", moe_tape_cross_entropy(tape, x23, i32));
  REFUSED("moe_tape_cross_entropy: wanted float logits", moe_tape_cross_entropy(tape, x32, i64));
  REFUSED("moe_tape_dropout: p 1", moe_tape_dropout(tape, x3, 1, 0, 0, none));
  REFUSED("moe_tape_dropout: p -0.1", moe_tape_dropout(tape, x3, -0.1, 0, 0, none));
  REFUSED("moe_tape_dropout: p nan", moe_tape_dropout(tape, x3, (double)NAN, 0, 0, none));
  REFUSED("moe_tape_dropout: step is 3 of i32", moe_tape_dropout(tape, x3, 0.5, 0, 0, i32));
  moe_cross_entropy o = moe_cross_entropy_init();
  o.smoothing = 1;
  REFUSED("moe_tape_cross_entropy: smoothing 1", moe_tape_cross_entropy_options(tape, x32, i32, &o));
  o.smoothing = (double)NAN;
  REFUSED("moe_tape_cross_entropy: smoothing nan", moe_tape_cross_entropy_options(tape, x32, i32, &o));
  o.size = 4;
  REFUSED("moe_tape_cross_entropy: options->size", moe_tape_cross_entropy_options(tape, x32, i32, &o));

  /* Without a tape: nothing, and no crash. */
  moe_value v = { 1 };
  assert_int_equal(moe_tape_add(NULL, v, v).id, 0);
  assert_int_equal(moe_tape_exp(NULL, v).id, 0);
  assert_int_equal(moe_tape_where(NULL, v, v, v).id, 0);
  assert_int_equal(moe_tape_concat(NULL, &v, 1, 0).id, 0);
  assert_int_equal(moe_tape_softmax(NULL, v, 0).id, 0);
  assert_int_equal(moe_tape_matmul(NULL, v, v, 0, 0).id, 0);
  assert_int_equal(moe_tape_layer_norm(NULL, v, v, v, 0).id, 0);
  assert_int_equal(moe_tape_cross_entropy(NULL, v, v).id, 0);
  assert_int_equal(moe_tape_dropout(NULL, v, 0, 0, 0, v).id, 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    TEST(values),
    TEST(values_with_a_nan),
    TEST(first_derivatives),
    TEST(second_derivatives),
    TEST(second_derivatives_of_cubes),
    TEST(gradients_in_f32),
    TEST(gradients_as_a_graph),
    TEST(gradients_of_parameters),
    TEST(equal_ones_share_the_gradient),
    TEST(values_at_the_edges),
    TEST(gradients_at_the_edges),
    TEST(an_input_used_twice),
    TEST(refusals),
  };
  if (!test_open(&ctx, &q)) return 77;
  int rc = TEST_MAIN(tests);
  test_close(ctx, q);
  return rc;
}
