/* check.c - validates argument structs: every backend refuses the same calls with the same words.
   The functions below restate args.h field by field; a tensor given to an op is never trusted. */
#include "core/backend.h"
#include "core/tensor.h"

#include <math.h>

enum {
  ST = 1,    /* the dtype of the call */
  REAL = 2,  /* F64 for F64 calls, else F32 */
  FLOAT = 4, /* any float; no F64 outside F64 calls */
  INT = 8,   /* I32 */
  LONG = 16, /* I64 */
  BYTE = 32, /* U8 */
  OPT = 64,  /* may be missing */
  PACKED = 128,
  LAST = 256,     /* last dimension has unit stride */
  DISTINCT = 512, /* no element twice by a stride of 0 */
};

struct want {
  const char *op;
  int64_t dtype;
};

static int type_fits(int64_t call, int64_t given, int flags)
{
  int64_t real = call == MOE_F64 ? MOE_F64 : MOE_F32;
  return (flags & ST && given == call) || (flags & REAL && given == real) ||
         (flags & FLOAT && moe__is_float(given) && (given != MOE_F64 || call == MOE_F64)) ||
         (flags & INT && given == MOE_I32) || (flags & LONG && given == MOE_I64) || (flags & BYTE && given == MOE_U8);
}

static const char *type_text(int64_t call, int flags)
{
  if (flags & FLOAT && flags & BYTE) return call == MOE_F64 ? "a float, i32 or u8" : "f32, bf16, f16, i32 or u8";
  if (flags & INT && flags & LONG) return "i32 or i64";
  if (flags & ST) return moe_dtype_name(call);
  if (flags & REAL) return call == MOE_F64 ? "f64" : "f32";
  if (flags & FLOAT) return call == MOE_F64 ? "a float" : "f32, bf16 or f16";
  if (flags & INT) return "i32";
  if (flags & LONG) return "i64";
  return "u8";
}

static moe_status tensor(const struct want *w, const char *field, const moe_tensor *t, int flags, int rank,
                         const int64_t *shape)
{
  int64_t count = 1;
  for (int d = 0; d < rank; d++) {
    if (shape[d] < 0)
      return moe__fail(MOE_ERR_INVALID, "%s: %s wants a negative extent %lld", w->op, field, (long long)shape[d]);
    count = shape[d] ? count : 0;
  }
  if (!t->handle) {
    if ((flags & OPT) || !count) return MOE_OK;
    return moe__fail(MOE_ERR_INVALID, "%s: %s is not given", w->op, field);
  }
  if (!type_fits(w->dtype, t->dtype, flags))
    return moe__fail(MOE_ERR_INVALID, "%s: %s is %s, %s is wanted", w->op, field, moe_dtype_name(t->dtype),
                     type_text(w->dtype, flags));
  if (t->offset % moe_dtype_size(t->dtype))
    return moe__fail(MOE_ERR_INVALID, "%s: %s begins at byte %llu, no multiple of its %llu-byte elements", w->op, field,
                     (unsigned long long)t->offset, (unsigned long long)moe_dtype_size(t->dtype));
  if (t->rank != rank)
    return moe__fail(MOE_ERR_INVALID, "%s: %s has rank %d, %d is wanted", w->op, field, t->rank, rank);
  for (int d = 0; d < rank; d++) {
    if (t->shape[d] != shape[d])
      return moe__fail(MOE_ERR_INVALID, "%s: %s has extent %lld in dimension %d, %lld is wanted", w->op, field,
                       (long long)t->shape[d], d, (long long)shape[d]);
    if (t->stride[d] < 0)
      return moe__fail(MOE_ERR_INVALID, "%s: %s has stride %lld in dimension %d", w->op, field, (long long)t->stride[d],
                       d);
    if ((flags & DISTINCT) && count && t->shape[d] > 1 && t->stride[d] == 0)
      return moe__fail(MOE_ERR_INVALID, "%s: %s is written, and has stride 0 over extent %lld in dimension %d", w->op,
                       field, (long long)t->shape[d], d);
  }
  if ((flags & PACKED) && !moe_tensor_is_packed(t))
    return moe__fail(MOE_ERR_INVALID, "%s: %s is not packed", w->op, field);
  if ((flags & LAST) && rank && t->shape[rank - 1] > 1 && t->stride[rank - 1] != 1)
    return moe__fail(MOE_ERR_INVALID, "%s: %s has stride %lld in its last dimension, 1 is wanted", w->op, field,
                     (long long)t->stride[rank - 1]);
  return MOE_OK;
}

static moe_status range(const struct want *w, const char *field, int64_t v, int64_t low, int64_t high)
{
  if (v >= low && v <= high) return MOE_OK;
  return moe__fail(MOE_ERR_INVALID, "%s: %s %lld outside %lld..%lld", w->op, field, (long long)v, (long long)low,
                   (long long)high);
}

static moe_status is_finite(const struct want *w, const char *field, double v)
{
  if (isfinite(v)) return MOE_OK;
  return moe__fail(MOE_ERR_INVALID, "%s: %s is not finite", w->op, field);
}

/* A check function: CHECK(op) { lines } ; each line names a field of `a`. */
#define CHECK(which)                                                                                                   \
  static moe_status body_##which(const struct want *w, const struct moe__args_##which *a);                             \
  moe_status moe__check_##which(const struct moe__args_##which *a)                                                     \
  {                                                                                                                    \
    const struct want w = { #which, a->dtype };                                                                        \
    if (!moe__is_float(a->dtype))                                                                                      \
      return moe__fail(MOE_ERR_INVALID, "%s: dtype %s, wanted f64, f32, bf16 or f16", w.op, moe_dtype_name(a->dtype)); \
    return body_##which(&w, a);                                                                                        \
  }                                                                                                                    \
  static moe_status body_##which(const struct want *w, const struct moe__args_##which *a)
#define N(field, flags, rank, shape) MOE__TRY(tensor(w, #field, &a->field, flags, rank, shape))
#define V(field, flags, n) N(field, flags, 1, ((const int64_t[]){ n }))
#define M(field, flags, m, n) N(field, flags, 2, ((const int64_t[]){ m, n }))
#define C(field, flags, e, m, n) N(field, flags, 3, ((const int64_t[]){ e, m, n }))
#define IN(field, low, high) MOE__TRY(range(w, #field, a->field, low, high))
#define FINITE(field) MOE__TRY(is_finite(w, #field, a->field))
#define BIG INT64_MAX
#define ROWS 2147483647 /* rows and slots are counted in int32 */

CHECK(elt_map)
{
  int two = a->op == MOE__ELT_ADD || a->op == MOE__ELT_MUL || a->op == MOE__ELT_AXPY;
  IN(op, MOE__ELT_COPY, MOE__ELT_SIGMOID);
  IN(n, 0, BIG);
  V(y, FLOAT | PACKED, a->n);
  V(a, FLOAT | PACKED | (a->op == MOE__ELT_FILL ? OPT : 0), a->n);
  V(b, FLOAT | PACKED | (two ? 0 : OPT), a->n);
  V(scale, REAL | OPT, 1);
  return MOE_OK;
}
CHECK(elt_normal)
{
  IN(n, 0, BIG);
  V(y, FLOAT | PACKED, a->n);
  FINITE(stddev);
  return MOE_OK;
}
CHECK(elt_sum)
{
  IN(n, 0, BIG);
  V(y, REAL, 1);
  V(a, FLOAT | PACKED, a->n);
  V(scratch, REAL | PACKED, MOE__PARTS);
  return MOE_OK;
}
/* A rank that exists, and so few elements that walks over them can be counted. */
static moe_status shape(const struct want *w, const char *field, const moe_tensor *t)
{
  int64_t count = 1;
  if (t->rank < 0 || t->rank > MOE_RANK_MAX)
    return moe__fail(MOE_ERR_INVALID, "%s: %s has rank %d, wanted 0..%d", w->op, field, t->rank, MOE_RANK_MAX);
  for (int d = 0; d < t->rank; d++)
    if (moe__mul(&count, count, t->shape[d]) || count > BIG / 16)
      return moe__fail(MOE_ERR_INVALID, "%s: %s has a negative extent, or too many elements", w->op, field);
  return MOE_OK;
}
CHECK(nd_map)
{
  int two = a->op >= MOE__ND_ADD && a->op <= MOE__ND_WHERE, where = a->op == MOE__ND_WHERE;
  int whole = where || a->op == MOE__ND_COPY;
  IN(op, MOE__ND_COPY, MOE__ND_GELU_TANH);
  FINITE(alpha);
  MOE__TRY(shape(w, "y", &a->y));
  N(y, FLOAT | DISTINCT, a->y.rank, a->y.shape);
  N(a, FLOAT | (whole ? INT | BYTE : 0), a->y.rank, a->y.shape);
  if (two) N(b, FLOAT, a->y.rank, a->y.shape);
  if (where) N(c, FLOAT, a->y.rank, a->y.shape);
  return MOE_OK;
}
CHECK(nd_reduce)
{
  int64_t kept[MOE_RANK_MAX], scratch;
  IN(op, MOE__ND_SUM, MOE__ND_LARGEST);
  IN(accumulate, 0, a->op == MOE__ND_SUM);
  FINITE(alpha);
  MOE__TRY(shape(w, "a", &a->a));
  IN(axes, 0, ((int64_t)1 << a->a.rank) - 1);
  N(a, FLOAT, a->a.rank, a->a.shape);
  for (int d = 0; d < a->a.rank; d++) kept[d] = a->axes >> d & 1 ? 1 : a->a.shape[d];
  N(y, FLOAT | DISTINCT, a->a.rank, kept);
  scratch = moe__nd_reduce_scratch(&a->a, a->axes);
  V(scratch, REAL | PACKED, scratch);
  return MOE_OK;
}
CHECK(nd_dropout)
{
  IN(n, 0, BIG);
  V(y, FLOAT | PACKED, a->n);
  V(a, FLOAT | PACKED, a->n);
  V(step, INT | LONG | OPT, 1);
  if (!(a->p >= 0 && a->p <= 1)) return moe__fail(MOE_ERR_INVALID, "%s: p %g, wanted 0..1", w->op, a->p);
  return MOE_OK;
}
CHECK(gather_rows)
{
  IN(n, 0, ROWS);
  IN(rows, 0, BIG);
  IN(D, 0, BIG);
  IN(div, 1, BIG);
  M(y, ST, a->n, a->D);
  M(x, ST, a->rows, a->D);
  V(map, INT | PACKED, a->n);
  V(health, INT | OPT, 1);
  return MOE_OK;
}
CHECK(combine)
{
  int64_t R = 0;
  IN(T, 0, ROWS);
  IN(K, 1, ROWS);
  IN(D, 0, BIG);
  if (moe__mul(&R, a->T, a->K) || R > ROWS) return moe__fail(MOE_ERR_INVALID, "%s: T*K past 2^31-1", w->op);
  M(y, ST, a->T, a->D);
  M(rows, ST, R, a->D);
  M(weights, REAL | PACKED | OPT, a->T, a->K);
  M(slot2row, INT | PACKED | OPT, a->T, a->K);
  M(add, ST | OPT, a->T, a->D);
  return MOE_OK;
}
CHECK(row_dot)
{
  IN(T, 0, ROWS);
  IN(K, 1, ROWS);
  IN(E, 1, ROWS);
  IN(D, 0, BIG);
  V(y, REAL | PACKED, a->T * a->K);
  M(a, ST, a->T, a->D);
  M(b, ST, a->E, a->D);
  V(ids, INT | PACKED, a->T * a->K);
  return MOE_OK;
}
CHECK(gather_cols)
{
  IN(T, 0, ROWS);
  IN(E, 0, ROWS);
  IN(K, 0, ROWS);
  M(y, ST | DISTINCT, a->T, a->K);
  M(x, ST, a->T, a->E);
  M(ids, INT | PACKED, a->T, a->K);
  return MOE_OK;
}
CHECK(scatter_cols)
{
  IN(T, 0, ROWS);
  IN(E, 0, ROWS);
  IN(K, 0, ROWS);
  M(y, ST | DISTINCT, a->T, a->E);
  M(x, ST, a->T, a->K);
  M(ids, INT | PACKED, a->T, a->K);
  return MOE_OK;
}
CHECK(rms_fwd)
{
  IN(T, 0, ROWS);
  IN(D, 1, ROWS);
  FINITE(eps);
  M(y, ST, a->T, a->D);
  V(rstd, REAL | PACKED, a->T);
  M(x, ST, a->T, a->D);
  V(w, ST | PACKED, a->D);
  return MOE_OK;
}
CHECK(rms_bwd)
{
  IN(T, 0, ROWS);
  IN(D, 1, ROWS);
  M(dx, ST | OPT, a->T, a->D);
  V(dw, FLOAT | PACKED | OPT, a->D);
  M(dy, ST, a->T, a->D);
  M(x, ST, a->T, a->D);
  V(w, ST | PACKED, a->D);
  V(rstd, REAL | PACKED, a->T);
  M(scratch, REAL | PACKED | (a->dw.handle ? 0 : OPT), MOE__PARTS, a->D);
  return MOE_OK;
}

static moe_status act(const struct want *w, const struct moe__act *act)
{
  if (act->kind < MOE__ACT_IDENTITY || act->kind > MOE__ACT_SIGMOID)
    return moe__fail(MOE_ERR_INVALID, "%s: activation %lld is none", w->op, (long long)act->kind);
  if (!isfinite(act->alpha) || !isfinite(act->limit) || act->limit < 0 || !isfinite(act->up_offset))
    return moe__fail(MOE_ERR_INVALID, "%s: activation parameters must be finite, limit >= 0", w->op);
  return MOE_OK;
}
CHECK(act_fwd)
{
  IN(R, 0, ROWS);
  IN(F, 0, ROWS);
  MOE__TRY(act(w, &a->act));
  M(a, ST | PACKED, a->R, a->F);
  M(h, ST | PACKED, a->R, a->act.gated ? 2 * a->F : a->F);
  V(offs, INT | PACKED | OPT, a->E + 1);
  return MOE_OK;
}
CHECK(act_bwd)
{
  int64_t n = a->act.gated ? 2 * a->F : a->F;
  IN(R, 0, ROWS);
  IN(F, 0, ROWS);
  MOE__TRY(act(w, &a->act));
  M(dh, ST | PACKED, a->R, n);
  M(aw, ST | PACKED | OPT, a->R, a->F);
  V(dweights, REAL | PACKED | OPT, a->R);
  M(da, ST | PACKED, a->R, a->F);
  M(h, ST | PACKED, a->R, n);
  V(weights, REAL | PACKED | OPT, a->R);
  V(row2slot, INT | PACKED | OPT, a->R);
  V(offs, INT | PACKED | OPT, a->E + 1);
  return MOE_OK;
}
CHECK(gemm)
{
  IN(M, 0, BIG);
  IN(N, 0, BIG);
  IN(K, 0, BIG);
  IN(batch, 0, ROWS);
  FINITE(alpha);
  if (a->batch) {
    C(c, FLOAT | DISTINCT, a->batch, a->M, a->N);
    C(a, ST, a->batch, a->M, a->K);
    C(b, ST, a->batch, a->N, a->K);
  } else {
    M(c, FLOAT, a->M, a->N);
    M(a, ST, a->M, a->K);
    M(b, ST, a->N, a->K);
  }
  V(bias, FLOAT | OPT, a->N);
  return MOE_OK;
}

static moe_status scoring(const struct want *w, const struct moe__weigh *v)
{
  if (v->scoring < MOE__SOFTMAX || v->scoring > MOE__SQRT_SOFTPLUS)
    return moe__fail(MOE_ERR_INVALID, "%s: scoring %lld is none", w->op, (long long)v->scoring);
  if (!isfinite(v->scale) || v->scale <= 0)
    return moe__fail(MOE_ERR_INVALID, "%s: scale %g, wanted finite and > 0", w->op, v->scale);
  if (!isfinite(v->epsilon) || v->epsilon < 0)
    return moe__fail(MOE_ERR_INVALID, "%s: epsilon %g, wanted finite and >= 0", w->op, v->epsilon);
  return MOE_OK;
}
CHECK(select)
{
  const struct moe__select *s = &a->select;
  if (a->weigh.scoring) MOE__TRY(scoring(w, &a->weigh));
  IN(T, 0, ROWS);
  IN(E, 1, 1 << 20);
  if (s->kind != MOE__SELECT_SOFTMAX && s->kind != MOE__SELECT_GROUPED_SIGMOID)
    return moe__fail(MOE_ERR_INVALID, "%s: selection %lld is none", w->op, (long long)s->kind);
  if (s->K < 1 || s->K > a->E)
    return moe__fail(MOE_ERR_INVALID, "%s: top_k %lld outside 1..%lld experts", w->op, (long long)s->K,
                     (long long)a->E);
  if (!isfinite(s->scale) || s->scale <= 0)
    return moe__fail(MOE_ERR_INVALID, "%s: scale %g, wanted finite and > 0", w->op, s->scale);
  if (s->kind == MOE__SELECT_GROUPED_SIGMOID) {
    if (s->groups < 1 || s->groups > 1024 || a->E % s->groups)
      return moe__fail(MOE_ERR_INVALID, "%s: groups %lld, wanted 1..1024 and a divisor of %lld experts", w->op,
                       (long long)s->groups, (long long)a->E);
    if (s->selected_groups < 1 || s->selected_groups > s->groups)
      return moe__fail(MOE_ERR_INVALID, "%s: selected_groups %lld outside 1..%lld", w->op,
                       (long long)s->selected_groups, (long long)s->groups);
    if (s->K > s->selected_groups * (a->E / s->groups))
      return moe__fail(MOE_ERR_INVALID, "%s: top_k %lld > %lld experts in the selected groups", w->op, (long long)s->K,
                       (long long)(s->selected_groups * (a->E / s->groups)));
    if (s->group_top_two && a->E / s->groups < 2)
      return moe__fail(MOE_ERR_INVALID, "%s: group_top_two with groups of one expert", w->op);
  }
  M(ids, INT | PACKED, a->T, s->K);
  M(weights, REAL | PACKED | OPT, a->T, s->K);
  M(logits, FLOAT, a->T, a->E);
  V(bias, REAL | PACKED | OPT, a->E);
  return MOE_OK;
}
CHECK(weights)
{
  IN(T, 0, ROWS);
  IN(E, 1, ROWS);
  IN(K, 1, ROWS);
  MOE__TRY(scoring(w, &a->weigh));
  M(weights, REAL | PACKED, a->T, a->K);
  M(logits, FLOAT, a->T, a->E);
  M(ids, INT | PACKED, a->T, a->K);
  V(health, INT | OPT, 1);
  return MOE_OK;
}
CHECK(weights_bwd)
{
  IN(T, 0, ROWS);
  IN(E, 1, ROWS);
  IN(K, 1, ROWS);
  MOE__TRY(scoring(w, &a->weigh));
  M(dlogits, FLOAT, a->T, a->E);
  M(dweights, REAL | PACKED, a->T, a->K);
  M(logits, FLOAT, a->T, a->E);
  M(ids, INT | PACKED, a->T, a->K);
  return MOE_OK;
}

static moe_status sequences(const struct want *w, int64_t T, int64_t S, int64_t kind)
{
  if (S < 1 || T % S)
    return moe__fail(MOE_ERR_INVALID, "%s: %lld sequences do not divide %lld tokens", w->op, (long long)S,
                     (long long)T);
  if (kind != MOE__SOFTMAX && kind != MOE__SIGMOID)
    return moe__fail(MOE_ERR_INVALID, "%s: scoring %lld, wanted softmax or sigmoid", w->op, (long long)kind);
  return MOE_OK;
}
CHECK(balance_fwd)
{
  IN(T, 0, ROWS);
  IN(E, 1, ROWS);
  IN(K, 1, ROWS);
  MOE__TRY(sequences(w, a->T, a->S, a->scoring));
  V(losses, REAL | PACKED, 2);
  M(counts, INT | PACKED, a->S, a->E);
  M(probs, REAL | PACKED, a->S, a->E);
  V(tokens, INT | PACKED, a->S);
  M(logits, FLOAT, a->T, a->E);
  M(ids, INT | PACKED, a->T, a->K);
  V(mask, BYTE | PACKED | OPT, a->T);
  V(scratch, REAL | PACKED, moe__balance_scratch(a->T, a->S, a->E));
  return MOE_OK;
}
CHECK(balance_bwd)
{
  IN(T, 0, ROWS);
  IN(E, 1, ROWS);
  IN(K, 1, ROWS);
  MOE__TRY(sequences(w, a->T, a->S, a->scoring));
  FINITE(balance_coef);
  FINITE(z_coef);
  M(dlogits, FLOAT, a->T, a->E);
  M(logits, FLOAT, a->T, a->E);
  M(counts, INT | PACKED, a->S, a->E);
  M(probs, REAL | PACKED, a->S, a->E);
  V(tokens, INT | PACKED, a->S);
  V(mask, BYTE | PACKED | OPT, a->T);
  V(scale, REAL | OPT, 1);
  return MOE_OK;
}
CHECK(bias_step)
{
  IN(S, 0, ROWS);
  IN(E, 1, ROWS);
  FINITE(rate);
  V(bias, REAL | PACKED, a->E);
  M(counts, INT | PACKED, a->S, a->E);
  return MOE_OK;
}
CHECK(load_stats)
{
  IN(S, 0, ROWS);
  IN(E, 1, ROWS);
  V(stats, REAL | PACKED, 4);
  M(counts, INT | PACKED, a->S, a->E);
  return MOE_OK;
}
CHECK(plan)
{
  int64_t R = 0;
  IN(T, 0, ROWS);
  IN(K, 1, ROWS);
  IN(E, 1, 1 << 20);
  if (moe__mul(&R, a->T, a->K) || R > ROWS) return moe__fail(MOE_ERR_INVALID, "%s: T*K past 2^31-1", w->op);
  V(offs, INT | PACKED, a->E + 1);
  V(row2slot, INT | PACKED, R);
  V(slot2row, INT | PACKED, R);
  M(ids, INT | PACKED, a->T, a->K);
  M(weights, REAL | PACKED | OPT, a->T, a->K);
  V(health, INT | OPT, 1);
  V(scratch, INT | PACKED, moe__plan_scratch(R, a->E));
  return MOE_OK;
}

static moe_status halves(const struct want *w, const char *field, int64_t n)
{
  if (n % 2) return moe__fail(MOE_ERR_INVALID, "%s: %s %lld is odd and split in halves", w->op, field, (long long)n);
  return MOE_OK;
}
static moe_status epilogue(const struct want *w, const struct moe__args_ggemm_rows *a)
{
  const int64_t width = a->act.gated ? 2 * a->N : a->N;
  IN(epilogue, MOE__PLAIN, MOE__ACT_GRAD);
  if (a->epilogue == MOE__PLAIN) return MOE_OK;
  MOE__TRY(act(w, &a->act));
  IN(split, MOE__SPLIT_NONE, MOE__SPLIT_NONE);
  M(dh, ST | LAST, a->R, width);
  M(aw, ST | LAST | OPT, a->R, a->N);
  V(dweights, REAL | PACKED | OPT, a->R);
  M(h, ST | LAST, a->R, width);
  V(weights, REAL | PACKED | OPT, a->R);
  return MOE_OK;
}
CHECK(ggemm_rows)
{
  int64_t nb = a->split == MOE__SPLIT_N ? a->N / 2 : a->N, kb = a->split == MOE__SPLIT_K ? a->K / 2 : a->K;
  IN(R, 0, ROWS);
  IN(E, 1, ROWS);
  IN(N, 0, ROWS);
  IN(K, 0, ROWS);
  IN(split, MOE__SPLIT_NONE, MOE__SPLIT_K);
  if (a->split == MOE__SPLIT_N) MOE__TRY(halves(w, "N", a->N));
  if (a->split == MOE__SPLIT_K) MOE__TRY(halves(w, "K", a->K));
  MOE__TRY(epilogue(w, a));
  M(c, ST | LAST, a->R, a->N);
  if (a->map.handle) {
    IN(div, 1, BIG);
    M(a, ST, a->a.shape[0], a->K);
  } else M(a, ST, a->R, a->K);
  C(b[0], ST, a->E, nb, kb);
  if (a->split) C(b[1], ST, a->E, nb, kb);
  M(bias[0], ST | OPT, a->E, nb);
  if (a->split == MOE__SPLIT_N) M(bias[1], ST | OPT, a->E, nb);
  V(offs, INT | PACKED, a->E + 1);
  V(map, INT | PACKED | OPT, a->R);
  return MOE_OK;
}
CHECK(ggemm_wgrad)
{
  int64_t m = a->split ? a->M / 2 : a->M;
  IN(R, 0, ROWS);
  IN(E, 1, ROWS);
  IN(M, 0, ROWS);
  IN(N, 0, ROWS);
  IN(split, 0, 1);
  if (a->split) MOE__TRY(halves(w, "M", a->M));
  C(c[0], FLOAT, a->E, m, a->N);
  if (a->split) {
    C(c[1], FLOAT, a->E, m, a->N);
    if (a->c[0].dtype != a->c[1].dtype) return moe__fail(MOE_ERR_INVALID, "%s: c[0] and c[1] differ in dtype", w->op);
  }
  if (a->pmap.handle) {
    IN(pdiv, 1, BIG);
    M(p, ST, a->p.shape[0], a->M);
  } else M(p, ST, a->R, a->M);
  if (a->qmap.handle) {
    IN(qdiv, 1, BIG);
    M(q, ST, a->q.shape[0], a->N);
  } else M(q, ST, a->R, a->N);
  V(offs, INT | PACKED, a->E + 1);
  V(pmap, INT | PACKED | OPT, a->R);
  V(qmap, INT | PACKED | OPT, a->R);
  return MOE_OK;
}
CHECK(ggemm_colsum)
{
  int64_t n = a->split ? a->N / 2 : a->N;
  IN(R, 0, ROWS);
  IN(E, 1, ROWS);
  IN(N, 0, ROWS);
  IN(split, 0, 1);
  if (a->split) MOE__TRY(halves(w, "N", a->N));
  M(c[0], FLOAT, a->E, n);
  if (a->split) M(c[1], FLOAT, a->E, n);
  if (a->map.handle) {
    IN(div, 1, BIG);
    M(p, ST, a->p.shape[0], a->N);
  } else M(p, ST, a->R, a->N);
  V(weights, REAL | PACKED | OPT, a->R);
  V(offs, INT | PACKED, a->E + 1);
  V(map, INT | PACKED | OPT, a->R);
  return MOE_OK;
}

static moe_status smoothing(const struct want *w, double s)
{
  if (s >= 0 && s < 1) return MOE_OK;
  return moe__fail(MOE_ERR_INVALID, "%s: smoothing %g, wanted 0 <= smoothing < 1", w->op, s);
}
CHECK(xent_fwd)
{
  MOE__TRY(smoothing(w, a->smoothing));
  IN(T, 0, ROWS);
  IN(V, 1, ROWS);
  V(loss, REAL, 1);
  V(lse, REAL | PACKED, a->T);
  V(rowloss, REAL | PACKED, a->T);
  M(logits, FLOAT, a->T, a->V);
  V(targets, INT | PACKED, a->T);
  V(health, INT | OPT, 1);
  V(counted, REAL | OPT, 1);
  return MOE_OK;
}
CHECK(xent_bwd)
{
  MOE__TRY(smoothing(w, a->smoothing));
  IN(T, 0, ROWS);
  IN(V, 1, ROWS);
  M(dlogits, FLOAT, a->T, a->V);
  V(dloss, REAL, 1);
  M(logits, FLOAT, a->T, a->V);
  V(lse, REAL | PACKED, a->T);
  V(targets, INT | PACKED, a->T);
  V(counted, REAL | (a->ignoring ? 0 : OPT), 1);
  return MOE_OK;
}
CHECK(adamw)
{
  IN(n, 0, BIG);
  V(p, FLOAT | PACKED, a->n);
  const struct want f32 = { w->op, MOE_F32 };
  MOE__TRY(tensor(&f32, "master", &a->master, REAL | PACKED | OPT, 1, &a->n));
  if (a->n && !a->master.handle && (a->p.dtype == MOE_BF16 || a->p.dtype == MOE_F16))
    return moe__fail(MOE_ERR_INVALID, "%s: %s parameters want F32 master weights", w->op, moe_dtype_name(a->p.dtype));
  V(m, REAL | PACKED, a->n);
  V(v, REAL | PACKED, a->n);
  V(g, FLOAT | PACKED, a->n);
  V(lr, REAL, 1);
  V(step, LONG, 1);
  V(gscale, REAL | OPT, 1);
  if (!(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1 && a->eps > 0 && a->decay >= 0 &&
        isfinite(a->eps) && isfinite(a->decay) && isfinite(a->lr_mult)))
    return moe__fail(MOE_ERR_INVALID, "%s: wanted 0 <= beta1, beta2 < 1, eps > 0, decay >= 0, all finite", w->op);
  return MOE_OK;
}
CHECK(sqnorm)
{
  IN(n, 0, BIG);
  V(y, REAL, 1);
  V(a, FLOAT | PACKED, a->n);
  V(scratch, REAL | PACKED, MOE__PARTS);
  return MOE_OK;
}
CHECK(clip)
{
  FINITE(max_norm);
  V(y, REAL | PACKED, 2);
  V(sq, REAL, 1);
  V(loss_scale, REAL | OPT, 1);
  V(health, INT | OPT, 1);
  return MOE_OK;
}
CHECK(lr_step)
{
  FINITE(peak);
  FINITE(floor);
  IN(warmup, 0, BIG);
  IN(total, 0, BIG);
  V(lr, REAL, 1);
  V(step, LONG, 1);
  V(gscale, REAL | OPT, 1);
  return MOE_OK;
}
CHECK(watch)
{
  const struct want any = { w->op, MOE_F64 };
  IN(dtype, MOE_F32, MOE_F32);
  V(record, LONG | PACKED, 3);
  V(scratch, INT | PACKED, MOE__WATCHED);
  for (int i = 0; i < MOE__WATCHED; i++) MOE__TRY(tensor(&any, "a", &a->a[i], FLOAT | PACKED | OPT, 1, a->a[i].shape));
  if (!(a->limit > 0)) return moe__fail(MOE_ERR_INVALID, "%s: limit %g, wanted > 0", w->op, a->limit);
  return MOE_OK;
}
