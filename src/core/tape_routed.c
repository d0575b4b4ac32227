/* tape_routed.c - operations on the rows of a layer's routed branch, for its expansion.  The routing is a constant of
   them.  They come in pairs, each the adjoint of the other, so every derivative exists:

     dispatch  y[r,:] = x[row2slot[r]/div,:]             collect  y[i,:] = sum over j of x[slot2row[i*div+j],:]
     pick      y[t,k] = x[t,ids[t,k]]                    put      y[t,e] = sum over k with ids[t,k] = e of x[t,k]
     grouped   y[r,:] = a[r,:] b[e(r)]'  (or b[e(r)])    outer    y[e] = sum over rows r of e of p[r,:]' q[r,:]

   A token that left the plan is NaN in what collect gives.  Rows at and past offs[E] are nobody's: grouped leaves them
   undefined, and neither collect nor outer reads them. */
#include "core/experts.h"
#include "core/tape.h"

typedef struct moe__node node;
typedef struct moe__routed routed;

static moe_tensor tensor_of(const moe_tape *t, moe_value v)
{
  return moe__tape_at(t, v)->t;
}

static moe_value record(moe_tape *t, const struct moe__rule *rule, routed *r, int64_t flag, moe_value a, moe_value b,
                        moe_tensor y)
{
  node *n = moe__tape_node(t, rule, b.id ? 2 : 1, (const moe_value[]){ a, b }, 1);
  if (!n) return (moe_value){ 0 };
  n->more = r;
  n->flag[0] = flag;
  return moe__tape_record(t, n, y);
}

/* ---- rows of tokens and rows of experts ------------------------------------------------------------------------------ */
static void back_dispatch(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe__tape_collect(t, n->more, d[0], n->flag[0]));
}
static const struct moe__rule rule_dispatch = { "dispatch", back_dispatch, NULL, 0 };
moe_value moe__tape_dispatch(moe_tape *t, routed *r, moe_value x, int64_t div)
{
  if (t->status) return (moe_value){ 0 };
  const moe_tensor tx = tensor_of(t, x);
  const int64_t R = r->T * r->K, D = tx.shape[1];
  moe_tensor y = moe__tape_fresh(t, tx.dtype, 2, (const int64_t[]){ R, D });
  TAPE_RUN(t, gather_rows, .dtype = tx.dtype, .y = y, .x = tx, .map = r->row2slot, .n = R, .rows = R / div, .D = D,
           .div = div);
  return record(t, &rule_dispatch, r, div, x, (moe_value){ 0 }, y);
}

static void back_collect(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe__tape_dispatch(t, n->more, d[0], n->flag[0]));
}
static const struct moe__rule rule_collect = { "collect", back_collect, NULL, 0 };
moe_value moe__tape_collect(moe_tape *t, routed *r, moe_value rows, int64_t div)
{
  if (t->status) return (moe_value){ 0 };
  const moe_tensor x = tensor_of(t, rows), w = r->weights, map = r->slot2row;
  const int64_t n = r->T * r->K / div, D = x.shape[1];
  moe_tensor y = moe__tape_fresh(t, x.dtype, 2, (const int64_t[]){ n, D });
  TAPE_RUN(t, combine, .dtype = x.dtype, .y = y, .rows = x, .weights = moe__matrix(w.handle, w.offset, w.dtype, n, div),
           .slot2row = moe__matrix(map.handle, map.offset, MOE_I32, n, div), .T = n, .K = div, .D = D, .unweighted = 1);
  return record(t, &rule_collect, r, div, rows, (moe_value){ 0 }, y);
}

/* ---- what belongs to the chosen experts of a token ---------------------------------------------------------------------- */
static moe_value put(moe_tape *t, routed *r, moe_value x);
static void back_pick(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], put(t, n->more, d[0]));
}
static const struct moe__rule rule_pick = { "pick", back_pick, NULL, 0 };
moe_value moe__tape_pick(moe_tape *t, routed *r, moe_value x)
{
  if (t->status) return (moe_value){ 0 };
  const moe_tensor tx = tensor_of(t, x);
  moe_tensor y = moe__tape_fresh(t, tx.dtype, 2, (const int64_t[]){ r->T, r->K });
  TAPE_RUN(t, gather_cols, .dtype = tx.dtype, .y = y, .x = tx, .ids = r->ids, .T = r->T, .E = r->E, .K = r->K);
  return record(t, &rule_pick, r, 0, x, (moe_value){ 0 }, y);
}

static void back_put(moe_tape *t, node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe__tape_pick(t, n->more, d[0]));
}
static const struct moe__rule rule_put = { "put", back_put, NULL, 0 };
static moe_value put(moe_tape *t, routed *r, moe_value x)
{
  if (t->status) return (moe_value){ 0 };
  const moe_tensor tx = tensor_of(t, x);
  moe_tensor y = moe__tape_fresh(t, tx.dtype, 2, (const int64_t[]){ r->T, r->E });
  TAPE_RUN(t, scatter_cols, .dtype = tx.dtype, .y = y, .x = tx, .ids = r->ids, .T = r->T, .E = r->E, .K = r->K);
  return record(t, &rule_put, r, 0, x, (moe_value){ 0 }, y);
}

/* ---- products with each expert's matrix --------------------------------------------------------------------------------- */
/* c (+)= the sum of outer products of rows p [R,M] and q [R,N], expert by expert: [E,M,N]. */
static void sum_outer(moe_tape *t, const routed *r, moe_tensor c, moe_tensor p, moe_tensor q, int64_t accumulate)
{
  TAPE_RUN(t, ggemm_wgrad, .dtype = p.dtype, .c = { c }, .p = p, .q = q, .offs = r->offs, .R = r->T * r->K, .E = r->E,
           .M = p.shape[1], .N = q.shape[1], .pdiv = 1, .qdiv = 1, .accumulate = accumulate);
}

static void back_outer(moe_tape *t, node *n, const moe_value *d)
{
  moe_value p = n->in[0], q = n->in[1];
  if (moe__tape_wants(t, p)) moe__tape_contribute(t, p, moe__tape_grouped(t, n->more, q, d[0], 0));
  if (moe__tape_wants(t, q)) moe__tape_contribute(t, q, moe__tape_grouped(t, n->more, p, d[0], 1));
}
static const struct moe__rule rule_outer = { "outer", back_outer, NULL, 0 };
static moe_value outer(moe_tape *t, routed *r, moe_value p, moe_value q)
{
  if (t->status) return (moe_value){ 0 };
  const moe_tensor tp = tensor_of(t, p), tq = tensor_of(t, q);
  moe_tensor y = moe__tape_fresh(t, tp.dtype, 3, (const int64_t[]){ r->E, tp.shape[1], tq.shape[1] });
  sum_outer(t, r, y, tp, tq, 0);
  return record(t, &rule_outer, r, 0, p, q, y);
}

static void back_grouped(moe_tape *t, node *n, const moe_value *d)
{
  moe_value a = n->in[0], b = n->in[1], p = n->flag[0] ? a : d[0], q = n->flag[0] ? d[0] : a;
  moe_tensor to;
  int64_t accumulate;
  if (moe__tape_wants(t, a)) moe__tape_contribute(t, a, moe__tape_grouped(t, n->more, d[0], b, !n->flag[0]));
  if (!moe__tape_wants(t, b)) return;
  if (moe__tape_sink(t, b, &to, &accumulate)) {
    sum_outer(t, n->more, to, tensor_of(t, p), tensor_of(t, q), accumulate);
    moe__tape_sunk(t, b);
  } else {
    moe__tape_contribute(t, b, outer(t, n->more, p, q));
  }
}
static const struct moe__rule rule_grouped = { "grouped", back_grouped, NULL, 0 };
moe_value moe__tape_grouped(moe_tape *t, routed *r, moe_value a, moe_value b, int64_t transpose)
{
  if (t->status) return (moe_value){ 0 };
  const moe_tensor ta = tensor_of(t, a), tb = transpose ? moe__swapped(tensor_of(t, b), 1, 2) : tensor_of(t, b);
  const int64_t R = r->T * r->K;
  moe_tensor y = moe__tape_fresh(t, ta.dtype, 2, (const int64_t[]){ R, tb.shape[1] });
  TAPE_RUN(t, ggemm_rows, .dtype = ta.dtype, .c = y, .a = ta, .b = { tb }, .offs = r->offs, .R = R, .E = r->E,
           .N = tb.shape[1], .K = tb.shape[2], .div = 1);
  return record(t, &rule_grouped, r, transpose, a, b, y);
}
