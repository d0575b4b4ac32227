/* nd.c - launches the kernels of nd.cl: brings tensors of any shape and strides into the few dimensions that those
   walk over. */
#include "core/kernels/kernels.h"
#include "core/tensor.h"

#include <math.h>

/* ---- dimensions --------------------------------------------------------------------------------------------- */
/* Dimensions that operands share, each with its strides of its own; 0 for an operand that is not given. */
enum { OPERANDS = 4 };
struct dim {
  int64_t extent, stride[OPERANDS];
};
struct dims {
  int n;
  struct dim d[MOE_RANK_MAX];
};

/* Dimension d of tensors of one shape. */
static void take(struct dims *dims, const moe_tensor *const *tensors, int n, int d)
{
  struct dim *to = &dims->d[dims->n];
  if (tensors[0]->shape[d] == 1) return;
  *to = (struct dim){ .extent = tensors[0]->shape[d] };
  for (int k = 0; k < n; k++) to->stride[k] = tensors[k]->handle ? tensors[k]->stride[d] : 0;
  dims->n++;
}

/* Is `outer` a continuation of `inner` in every operand? */
static int continues(const struct dim *outer, const struct dim *inner)
{
  for (int k = 0; k < OPERANDS; k++) {
    int64_t next;
    if (moe__mul(&next, inner->stride[k], inner->extent) || outer->stride[k] != next) return 0;
  }
  return 1;
}

/* Order by the first operand: stride 0 repeats, so it comes last. */
static int before(const struct dim *x, const struct dim *y)
{
  return (uint64_t)x->stride[0] - 1 < (uint64_t)y->stride[0] - 1;
}

/* The fastest dimension first, and as few as there can be. */
static void settle(struct dims *dims)
{
  struct dim *d = dims->d;
  int n = 0;
  for (int i = 1; i < dims->n; i++)
    for (int j = i; j > 0 && before(&d[j], &d[j - 1]); j--) {
      const struct dim swap = d[j];
      d[j] = d[j - 1];
      d[j - 1] = swap;
    }
  for (int i = 0; i < dims->n; i++) {
    if (n > 0 && continues(&d[i], &d[n - 1])) d[n - 1].extent *= d[i].extent;
    else d[n++] = d[i];
  }
  dims->n = n;
}

/* Takes the first dimension out; one of extent 1 where there is none. */
static struct dim inner_of(struct dims *dims)
{
  const struct dim first = dims->n ? dims->d[0] : (struct dim){ .extent = 1 };
  if (dims->n > 0) dims->n--;
  for (int i = 0; i < dims->n; i++) dims->d[i] = dims->d[i + 1];
  return first;
}

static int64_t count_of(const struct dims *dims)
{
  int64_t count = 1;
  for (int i = 0; i < dims->n; i++) count *= dims->d[i].extent;
  return count;
}

/* FIVE of nd.cl: of the extents, or of the strides of operand k. */
static int64_t extent_of(const struct dims *dims, int i)
{
  return i < dims->n ? dims->d[i].extent : 1;
}
static int64_t stride_of(const struct dims *dims, int i, int k)
{
  return i < dims->n ? dims->d[i].stride[k] : 0;
}
#define EXTENTS(x)                                                                                                     \
  L_(extent_of(x, 0)), L_(extent_of(x, 1)), L_(extent_of(x, 2)), L_(extent_of(x, 3)), L_(extent_of(x, 4))
#define STRIDES(x, k)                                                                                                  \
  L_(stride_of(x, 0, k)), L_(stride_of(x, 1, k)), L_(stride_of(x, 2, k)), L_(stride_of(x, 3, k)), L_(stride_of(x, 4, k))

/* width_of in nd.cl */
static int64_t width_of(int64_t dtype, int64_t N)
{
  return moe__ceil_div(N, moe__chunk(dtype)) * moe__chunk(dtype);
}

/* ---- maps --------------------------------------------------------------------------------------------------- */
static moe_status run_nd_map(moe_queue *q, const struct moe__args_nd_map *given)
{
  static const struct moe__kernel K = { "nd", "nd_map" };
  struct moe__args_nd_map square = *given;
  const struct moe__args_nd_map *args = given->op == MOE__ND_POW && given->alpha == 2 ? &square : given;
  square.op = MOE__ND_MUL, square.b = square.a; /* many times as fast */
  const moe_tensor *const tensors[OPERANDS] = { &args->y, &args->a, &args->b, &args->c };
  const moe_tensor *y = &args->y;
  const int two = args->op >= MOE__ND_ADD && args->op <= MOE__ND_WHERE, where = args->op == MOE__ND_WHERE;
  struct dims rows = { 0 };
  for (int d = 0; d < y->rank; d++) take(&rows, tensors, 2 + two + where, d);
  settle(&rows);
  const struct dim in = inner_of(&rows);
  const int64_t total = count_of(&rows) * width_of(args->dtype, in.extent);
  return LAUNCH(q, &K, args->dtype, moe__chunk_groups(q, args->dtype, total), 1, 1, moe__map_local(q), T_(*y),
                I_(y->dtype), T_(args->a), I_(args->a.dtype), T_(args->b), I_(args->b.dtype), T_(args->c),
                I_(args->c.dtype), I_(args->op), I_(args->accumulate), R_(args->alpha), L_(in.extent), L_(in.stride[0]),
                L_(in.stride[1]), L_(in.stride[2]), L_(in.stride[3]), I_(rows.n), EXTENTS(&rows), STRIDES(&rows, 0),
                STRIDES(&rows, 1), STRIDES(&rows, 2), STRIDES(&rows, 3), L_(total), I_(moe__map_run(q)));
}
MOE__PORTABLE_IMPL(nd_map, "nd")

/* ---- reductions --------------------------------------------------------------------------------------------- */
/* Operands of the kept dimensions: a, y; of the reduced ones: a. */
struct reduction {
  struct dims kept, reduced;
  int64_t outputs, terms, parts; /* terms of an output; parts they are cut in */
  int columns;                   /* a's inner dimension is kept */
};

static struct reduction reduction_of(const moe_tensor *a, const moe_tensor *y, int64_t axes)
{
  const moe_tensor *const tensors[2] = { a, y };
  struct reduction r = { 0 };
  for (int d = 0; d < a->rank; d++) {
    if (axes >> d & 1) take(&r.reduced, tensors, 1, d);
    else take(&r.kept, tensors, 2, d);
  }
  settle(&r.kept);
  settle(&r.reduced);
  r.outputs = count_of(&r.kept);
  r.terms = count_of(&r.reduced);
  r.columns = r.terms > 0 && r.kept.n > 0 && (r.reduced.n == 0 || before(&r.kept.d[0], &r.reduced.d[0]));
  /* One output's part is worth a group; in columns, an item takes a part of some outputs, and about 2^17 fill a GPU. */
  int64_t most = r.columns && r.outputs > 0 ? ((int64_t)1 << 19) / r.outputs : MOE__PARTS;
  r.parts = moe__ceil_div(r.terms, r.columns ? 16 : 16384);
  if (most > MOE__PARTS) most = MOE__PARTS;
  if (r.parts > most) r.parts = most;
  if (r.parts < 1) r.parts = 1;
  return r;
}

int64_t moe__nd_reduce_scratch(const moe_tensor *a, int64_t axes)
{
  const struct reduction r = reduction_of(a, &(moe_tensor){ 0 }, axes);
  return r.parts > 1 ? r.parts * r.outputs : 0;
}

/* Where the outputs go: y, or parts of them to the scratch. */
struct target {
  const moe_tensor *y;
  int64_t part, op, accumulate;
  double alpha;
};

static moe_status rows(moe_queue *q, int64_t dtype, const struct target *to, const moe_tensor *a, struct reduction r)
{
  static const struct moe__kernel K = { "nd", "nd_reduce_rows" };
  const struct dim in = inner_of(&r.reduced);
  const int64_t chunk = moe__chunk(dtype), end = r.terms > 0 ? count_of(&r.reduced) * width_of(dtype, in.extent) : 0;
  const int64_t length = moe__ceil_div(moe__ceil_div(end, r.parts), chunk) * chunk;
  const int lanes = moe__lanes(q, dtype, length);
  return LAUNCH(q, &K, dtype, moe__row_groups(q, r.outputs, lanes), r.parts, 1, q->ctx->info->reduce_local, T_(*to->y),
                I_(to->y->dtype), L_(to->part), T_(*a), I_(a->dtype), I_(to->op), I_(to->accumulate), R_(to->alpha),
                L_(in.extent), L_(in.stride[0]), I_(r.reduced.n), EXTENTS(&r.reduced), STRIDES(&r.reduced, 0),
                I_(r.kept.n), EXTENTS(&r.kept), STRIDES(&r.kept, 1), STRIDES(&r.kept, 0), L_(r.outputs), L_(end),
                L_(length), I_(lanes));
}

static moe_status columns(moe_queue *q, int64_t dtype, const struct target *to, const moe_tensor *a, struct reduction r)
{
  static const struct moe__kernel K = { "nd", "nd_reduce_columns" };
  const struct dim in = inner_of(&r.kept);
  const int local = q->ctx->info->reduce_local;
  const int64_t total = count_of(&r.kept) * width_of(dtype, in.extent);
  return LAUNCH(q, &K, dtype, moe__ceil_div(total / moe__chunk(dtype), local), r.parts, 1, local, T_(*to->y),
                I_(to->y->dtype), L_(to->part), T_(*a), I_(a->dtype), I_(to->op), I_(to->accumulate), R_(to->alpha),
                L_(in.extent), L_(in.stride[1]), L_(in.stride[0]), I_(r.reduced.n), EXTENTS(&r.reduced),
                STRIDES(&r.reduced, 0), I_(r.kept.n), EXTENTS(&r.kept), STRIDES(&r.kept, 1), STRIDES(&r.kept, 0),
                L_(total), L_(r.terms), L_(moe__ceil_div(r.terms, r.parts)));
}

static moe_status run_nd_reduce(moe_queue *q, const struct moe__args_nd_reduce *args)
{
  struct reduction r = reduction_of(&args->a, &args->y, args->axes);
  const struct target last = { &args->y, 0, args->op, args->accumulate, args->alpha };
  if (r.parts == 1) return (r.columns ? columns : rows)(q, args->dtype, &last, &args->a, r);
  /* The outputs packed, and behind them the next part's. */
  const struct target first = { &args->scratch, r.outputs, args->op, 0, 1 };
  struct reduction parts = r, second = r;
  int64_t packed = 1;
  for (int i = 0; i < r.kept.n; packed *= r.kept.d[i++].extent)
    parts.kept.d[i].stride[1] = second.kept.d[i].stride[0] = packed;
  MOE__TRY((r.columns ? columns : rows)(q, args->dtype, &first, &args->a, parts));
  second.reduced = (struct dims){ 1, { { r.parts, { r.outputs } } } };
  second.terms = r.parts;
  second.parts = 1;
  return rows(q, args->dtype, &last, &args->scratch, second);
}
MOE__PORTABLE_IMPL(nd_reduce, "nd")

/* ---- dropout ------------------------------------------------------------------------------------------------ */
static moe_status run_nd_dropout(moe_queue *q, const struct moe__args_nd_dropout *args)
{
  static const struct moe__kernel K = { "nd", "nd_dropout" };
  return LAUNCH(q, &K, args->dtype, moe__chunk_groups(q, args->dtype, args->n), 1, 1, moe__map_local(q), T_(args->y),
                I_(args->y.dtype), T_(args->a), I_(args->a.dtype), T_(args->step), I_(args->step.dtype), L_(args->n),
                I_(moe__map_run(q)), L_(args->seed), L_(args->stream), L_(rint(args->p * 0x1p32)),
                R_(args->p < 1 ? 1 / (1 - args->p) : 0));
}
MOE__PORTABLE_IMPL(nd_dropout, "nd")
