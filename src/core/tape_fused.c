/* tape_fused.c - operations with kernels of their own for the first derivative: RMS norm and cross-entropy.  Each can
   be expanded into primitive operations, from which every further derivative comes. */
#include "core/tape.h"

#include <math.h>

/* ---- rms_norm ---------------------------------------------------------------------------------------------------- */
static moe_tensor rows_of(moe_tensor x)
{
  const int64_t D = x.shape[x.rank - 1], T = D ? moe_tensor_count(&x) / D : 0;
  return moe__matrix(x.handle, x.offset, x.dtype, T, D);
}

static void back_rms(moe_tape *t, struct moe__node *n, const moe_value *dout)
{
  moe_value vx = n->in[0], vw = n->in[1];
  moe_tensor x = moe__tape_at(t, vx)->t, w = moe__tape_at(t, vw)->t, d = moe__tape_at(t, dout[0])->t, dx = { 0 },
             dw = { 0 }, scratch = { 0 };
  int64_t accumulate = 0, D = w.shape[0];
  int direct = 0;
  if (moe__tape_wants(t, vx)) dx = moe__tape_fresh(t, x.dtype, x.rank, x.shape);
  if (moe__tape_wants(t, vw)) {
    direct = moe__tape_sink(t, vw, &dw, &accumulate);
    if (!direct) dw = moe__tape_flat(t, w.dtype, D);
  }
  struct moe__mark mark = moe__tape_mark(t);
  if (dw.handle) scratch = moe__tape_fresh(t, moe__real_of(x.dtype), 2, (const int64_t[]){ MOE__PARTS, D });
  TAPE_RUN(t, rms_bwd, .dtype = x.dtype, .dx = dx.handle ? rows_of(dx) : dx, .dw = dw, .dy = rows_of(d),
           .x = rows_of(x), .w = w, .rstd = n->kept, .scratch = scratch, .T = rows_of(x).shape[0], .D = D,
           .accumulate = accumulate);
  moe__tape_rewind(t, mark);
  if (dx.handle) moe__tape_contribute_fused(t, vx, dx);
  if (direct) moe__tape_sunk(t, vw);
  else if (dw.handle) moe__tape_contribute_fused(t, vw, dw);
}

/* x * (mean(x^2) + eps)^(-1/2) * w, in FP32 (FP64) */
static void expand_rms(moe_tape *t, struct moe__node *n, moe_value *out)
{
  const moe_tensor like = moe__tape_at(t, n->in[0])->t;
  const int64_t last = like.rank - 1, real = n->kept.dtype;
  moe_value x = moe_tape_cast(t, n->in[0], real), w = moe_tape_cast(t, n->in[1], real);
  moe_value square = moe_tape_mean_axes(t, moe_tape_mul(t, x, x), 1, &last, 1);
  moe_value rstd = moe_tape_pow(t, moe_tape_add(t, square, moe__tape_constant(t, x, n->alpha)), -0.5);
  out[0] = moe_tape_cast(t, moe_tape_mul(t, moe_tape_mul(t, x, rstd), w), like.dtype);
}

static const struct moe__rule rule_rms = { "rms_norm", back_rms, expand_rms, 0 };
moe_value moe_tape_rms_norm(moe_tape *t, moe_value x, moe_value w, double eps)
{
  static const char fn[] = "moe_tape_rms_norm";
  const struct moe__value *vx = moe__tape_look(t, x, fn), *vw = moe__tape_look(t, w, fn);
  if (!vx || !vw) return (moe_value){ 0 };
  moe_tensor tx = vx->t, tw = vw->t;
  if (tx.rank < 1 || !moe__is_float(tx.dtype) || tw.rank != 1 || tw.dtype != tx.dtype ||
      tw.shape[0] != tx.shape[tx.rank - 1])
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: wanted x [..,D] and w [D] of one float dtype", fn);
  moe_tensor rows = rows_of(tx), y = moe__tape_fresh(t, tx.dtype, tx.rank, tx.shape),
             rstd = moe__tape_flat(t, moe__real_of(tx.dtype), rows.shape[0]);
  TAPE_RUN(t, rms_fwd, .dtype = tx.dtype, .y = rows_of(y), .rstd = rstd, .x = rows, .w = tw, .T = rows.shape[0],
           .D = rows.shape[1], .eps = eps);
  struct moe__node *n = moe__tape_node(t, &rule_rms, 2, (const moe_value[]){ x, w }, 1);
  if (!n) return (moe_value){ 0 };
  n->kept = rstd;
  n->alpha = eps;
  return moe__tape_record(t, n, y);
}

/* ---- cross_entropy ------------------------------------------------------------------------------------------------ */
struct xent { /* node->more */
  moe_cross_entropy options;
  moe_tensor counted;
};

static void back_xent(moe_tape *t, struct moe__node *n, const moe_value *dout)
{
  const struct xent *x = n->more;
  moe_tensor logits = moe__tape_at(t, n->in[0])->t, targets = moe__tape_at(t, n->in[1])->t;
  moe_tensor d = moe__tape_fresh(t, logits.dtype, 2, logits.shape);
  TAPE_RUN(t, xent_bwd, .dtype = moe__real_of(logits.dtype), .dlogits = d, .dloss = moe__tape_at(t, dout[0])->t,
           .logits = logits, .lse = n->kept, .targets = targets, .counted = x->counted, .T = logits.shape[0],
           .V = logits.shape[1], .ignoring = x->options.ignore, .ignore_index = x->options.ignore_index,
           .smoothing = x->options.smoothing);
  moe__tape_contribute_fused(t, n->in[0], d);
}

/* <q, log_softmax(logits)> with constants q = -((1-smoothing) onehot + smoothing/V) / counted, which are what xent_bwd
   gives where softmax is 0: with lse = infinity. */
static void expand_xent(moe_tape *t, struct moe__node *n, moe_value *out)
{
  const struct xent *x = n->more;
  const moe_tensor l = moe__tape_at(t, n->in[0])->t;
  const int64_t real = moe__real_of(l.dtype);
  moe_tensor q = moe__tape_fresh(t, real, 2, l.shape), lse = moe__tape_flat(t, real, l.shape[0]);
  TAPE_RUN(t, elt_map, .dtype = real, .y = lse, .op = MOE__ELT_FILL, .n = l.shape[0], .alpha = INFINITY);
  moe_value one = moe__tape_one(t, real);
  if (t->status) return;
  TAPE_RUN(t, xent_bwd, .dtype = real, .dlogits = q, .dloss = moe__tape_at(t, one)->t, .logits = l, .lse = lse,
           .targets = moe__tape_at(t, n->in[1])->t, .counted = x->counted, .T = l.shape[0], .V = l.shape[1],
           .ignoring = x->options.ignore, .ignore_index = x->options.ignore_index, .smoothing = x->options.smoothing);
  moe_value logp = moe_tape_log_softmax(t, moe_tape_cast(t, n->in[0], real), 1);
  out[0] = moe_tape_sum(t, moe_tape_mul(t, logp, moe__tape_value(t, q, 0)));
}

static const struct moe__rule rule_xent = { "cross_entropy", back_xent, expand_xent, 0 };
moe_value moe_tape_cross_entropy_options(moe_tape *t, moe_value logits, moe_value targets,
                                         const moe_cross_entropy *given)
{
  static const char fn[] = "moe_tape_cross_entropy";
  const struct moe__value *vl = moe__tape_look(t, logits, fn), *vt = moe__tape_look(t, targets, fn);
  struct xent *x = vl && vt ? moe__tape_host(t, sizeof *x) : NULL;
  if (!x) return (moe_value){ 0 };
  moe_tensor l = vl->t, y = vt->t;
  x->options = moe_cross_entropy_init();
  if (given) moe__tape_fail(t, moe__struct_in(&x->options, sizeof x->options, given, fn, "options"));
  if (l.rank != 2 || !moe__is_float(l.dtype) || y.rank != 1 || y.dtype != MOE_I32 || y.shape[0] != l.shape[0] ||
      l.shape[1] < 1)
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: wanted float logits [T,V] and i32 targets [T]", fn);
  if (!(x->options.smoothing >= 0 && x->options.smoothing < 1))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: smoothing %g, wanted 0 <= s < 1", fn, x->options.smoothing);
  const int64_t real = moe__real_of(l.dtype), T = l.shape[0];
  moe_tensor loss = moe__tape_flat(t, real, 1), lse = moe__tape_flat(t, real, T);
  if (x->options.ignore) x->counted = moe__tape_flat(t, real, 1);
  struct moe__mark mark = moe__tape_mark(t);
  moe_tensor rows = moe__tape_flat(t, real, T);
  TAPE_RUN(t, xent_fwd, .dtype = real, .loss = loss, .lse = lse, .rowloss = rows, .logits = l, .targets = y,
           .health = t->q->health, .counted = x->counted, .T = T, .V = l.shape[1], .ignoring = x->options.ignore,
           .ignore_index = x->options.ignore_index, .smoothing = x->options.smoothing);
  moe__tape_rewind(t, mark);
  struct moe__node *n = moe__tape_node(t, &rule_xent, 2, (const moe_value[]){ logits, targets }, 1);
  if (!n) return (moe_value){ 0 };
  n->kept = lse;
  n->more = x;
  return moe__tape_record(t, n, loss);
}

moe_value moe_tape_cross_entropy(moe_tape *t, moe_value logits, moe_value targets)
{
  return moe_tape_cross_entropy_options(t, logits, targets, NULL);
}
