/* loss.cl - softmax cross-entropy over rows of logits: loss, log-sum-exp, gradient. */

#define HEALTH_ID 2 /* MOE_HEALTH_ID */

/* lse[t] = log sum_v exp(l[t,v]),  rowloss[t] = lse[t] - l[t,target[t]]; NaN and the health bit for a target
   outside [0,V).  `lanes` items share a row; each keeps a running maximum m and s = sum exp(l - m), so that
   the logits are read once (two passes, maximum then sum, read them twice: at V = 100,000 from memory).  The
   lanes' pairs meet in two trees.  A reference of 0 stands in for a maximum of -inf, so that -inf - (-inf)
   never arises; a NaN logit makes s NaN for good.  Bytes: logits in. */
KERNEL(xent_fwd_rows)(TENSOR(REAL, lse), TENSOR(REAL, rowloss), TENSOR(const uchar, logits), int ldt, long l_row,
                      long l_col, TENSOR(const int, targets), TENSOR(int, health), long T, long V, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(lse);
  AT(rowloss);
  AT(targets);
  AT_OPT(health);
  const int wide = CHUNK_OK(logits, logits_at, ldt, l_row, l_col);
  const long t = ROW(lanes), n = t < T ? V : 0, row = logits_at + t * l_row;
  REAL m = -REAL_INF, s = R(0.0), top, sum;
  for (long c = LANE(lanes) * CHUNK; c < n; c += lanes * CHUNK) {
    chunk l = ldx_chunk(logits, row + c * l_col, l_col, V - c, wide, ldt);
    REAL above = m;
    UNROLL EACH(j) {
      if (c + j >= V) l.v[j] = -REAL_INF;
      above = MAX2(above, l.v[j]);
    }
    const REAL at = above == -REAL_INF ? R(0.0) : above;
    s *= exp(m - at);
    UNROLL EACH(j) l.v[j] -= at;
    l = exp_chunk(l);
    UNROLL EACH(j) s += l.v[j];
    m = above;
  }
  ROW_MAX(top, m, buf, lanes);
  const REAL at = top == -REAL_INF ? R(0.0) : top;
  s *= exp(m - at);
  ROW_SUM(sum, s, buf, lanes);
  if (t < T && LANE(lanes) == 0) {
    const REAL value = at + log(sum);
    const long target = targets[t];
    lse[t] = value;
    if (target >= 0 && target < V) {
      rowloss[t] = value - ldx(logits, row + target * l_col, ldt);
    } else {
      rowloss[t] = REAL_NAN;
      if (health) ATOMIC_OR(health, HEALTH_ID);
    }
  }
}
/* loss[0] = mean of rowloss, 0 for no rows: one group, a fixed tree. */
KERNEL(xent_fwd_mean)(TENSOR(REAL, loss), TENSOR(const REAL, rowloss), long T)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(loss);
  AT(rowloss);
  REAL sum = R(0.0);
  for (long t = LID; t < T; t += LSIZE) sum += rowloss[t];
  GROUP_SUM(sum, sum, buf);
  if (LID == 0) loss[0] = T > 0 ? sum / (REAL)T : R(0.0);
}

/* dlogits[t,v] = (exp(l[t,v] - lse[t]) - [v = target[t]]) * dloss[0] / T; NaN rows for targets outside [0,V).
   Bytes: logits in, dlogits out. */
KERNEL(xent_bwd)(TENSOR(uchar, dlogits), int ddt, long d_row, long d_col, TENSOR(const REAL, dloss),
                 TENSOR(const uchar, logits), int ldt, long l_row, long l_col, TENSOR(const REAL, lse),
                 TENSOR(const int, targets), long T, long V, int lanes)
{
  AT(dloss);
  AT(lse);
  AT(targets);
  const int d_wide = CHUNK_OK(dlogits, dlogits_at, ddt, d_row, d_col);
  const int l_wide = CHUNK_OK(logits, logits_at, ldt, l_row, l_col);
  const long t = ROW(lanes);
  if (t >= T) return;
  const long target = targets[t];
  const REAL at = lse[t], scale = target >= 0 && target < V ? dloss[0] / (REAL)T : REAL_NAN;
  for (long c = LANE(lanes) * CHUNK; c < V; c += lanes * CHUNK) {
    chunk l = ldx_chunk(logits, logits_at + t * l_row + c * l_col, l_col, V - c, l_wide, ldt);
    UNROLL EACH(j) l.v[j] -= at;
    l = exp_chunk(l);
    UNROLL EACH(j) l.v[j] = (l.v[j] - (c + j == target ? R(1.0) : R(0.0))) * scale;
    stx_chunk(dlogits, dlogits_at + t * d_row + c * d_col, d_col, V - c, d_wide, ddt, l);
  }
}
