/* loss.cl - softmax cross-entropy over rows of logits: loss, log-sum-exp, gradient. */

#define HEALTH_ID 2 /* MOE_HEALTH_ID */

/* lse[t] = log sum_v exp(l[t,v]),  rowloss[t] = (1-smoothing) nll(target[t]) + smoothing * mean_v nll(v) with
   nll(v) = lse[t] - l[t,v]; 0 where `ignoring` and the target is `ignored`, NaN and the health bit for other targets
   outside [0,V).  `lanes` items share a row; each keeps a running maximum m and s = sum exp(l - m), so that the
   logits are read once (two passes, maximum then sum, read them twice: at V = 100,000 from memory).  The lanes'
   pairs meet in two trees, the sum of the logits in a third.  A reference of 0 stands in for a maximum of -inf, so
   that -inf - (-inf) never arises; a NaN logit makes s NaN for good.  Bytes: logits in. */
KERNEL(xent_fwd_rows)(TENSOR(REAL, lse), TENSOR(REAL, rowloss), TENSOR(const uchar, logits), int ldt, long l_row,
                      long l_col, TENSOR(const int, targets), TENSOR(int, health), long T, long V, int ignoring,
                      long ignored, REAL smoothing, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(lse);
  AT(rowloss);
  AT(targets);
  AT_OPT(health);
  const int wide = CHUNK_OK(logits, logits_at, ldt, l_row, l_col);
  const long t = ROW(lanes), n = t < T ? V : 0, row = logits_at + t * l_row;
  REAL m = -REAL_INF, s = R(0.0), linear = R(0.0), top, sum, total;
  for (long c = LANE(lanes) * CHUNK; c < n; c += lanes * CHUNK) {
    chunk l = ldx_chunk(logits, row + c * l_col, l_col, V - c, wide, ldt);
    REAL above = m;
    if (smoothing > R(0.0)) {
      UNROLL EACH(j) linear += l.v[j];
    }
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
  ROW_SUM(total, linear, buf, lanes);
  if (t < T && LANE(lanes) == 0) {
    const REAL value = at + log(sum);
    const long target = targets[t];
    lse[t] = value;
    if (ignoring && target == ignored) {
      rowloss[t] = R(0.0);
    } else if (target >= 0 && target < V) {
      REAL loss = value - ldx(logits, row + target * l_col, ldt);
      if (smoothing > R(0.0)) loss = (R(1.0) - smoothing) * loss + smoothing * (value - total / (REAL)V);
      rowloss[t] = loss;
    } else {
      rowloss[t] = REAL_NAN;
      if (health) ATOMIC_OR(health, HEALTH_ID);
    }
  }
}
/* loss[0] = mean of rowloss over the rows that count, 0 for none: one group, a fixed tree. */
KERNEL(xent_fwd_mean)(TENSOR(REAL, loss), TENSOR(REAL, counted), TENSOR(const REAL, rowloss),
                      TENSOR(const int, targets), long T, int ignoring, long ignored)
{
  LOCAL_ARRAY(REAL, buf, 256);
  LOCAL_ARRAY(int, counts, 256);
  AT(loss);
  AT_OPT(counted);
  AT(rowloss);
  AT(targets);
  REAL sum = R(0.0);
  int n = 0;
  for (long t = LID; t < T; t += LSIZE) {
    sum += rowloss[t];
    if (!ignoring || targets[t] != ignored) n++;
  }
  GROUP_SUM(sum, sum, buf);
  GROUP_SUM(n, n, counts);
  if (LID == 0) {
    loss[0] = n > 0 ? sum / (REAL)n : R(0.0);
    if (counted) counted[0] = (REAL)n;
  }
}

/* dlogits[t,v] = (exp(l[t,v] - lse[t]) - ((1-smoothing) [v = target[t]] + smoothing/V)) * dloss[0] / counted[0] (T
   where not given); rows that are ignored are 0, and NaN those with other targets outside [0,V).
   Bytes: logits in, dlogits out. */
KERNEL(xent_bwd)(TENSOR(uchar, dlogits), int ddt, long d_row, long d_col, TENSOR(const REAL, dloss),
                 TENSOR(const REAL, counted), TENSOR(const uchar, logits), int ldt, long l_row, long l_col,
                 TENSOR(const REAL, lse), TENSOR(const int, targets), long T, long V, int ignoring, long ignored,
                 REAL smoothing, int lanes)
{
  AT(dloss);
  AT_OPT(counted);
  AT(lse);
  AT(targets);
  const int d_wide = CHUNK_OK(dlogits, dlogits_at, ddt, d_row, d_col);
  const int l_wide = CHUNK_OK(logits, logits_at, ldt, l_row, l_col);
  const long t = ROW(lanes);
  if (t >= T) return;
  const long target = targets[t];
  const int counts = !(ignoring && target == ignored);
  const REAL at = lse[t], n = counted ? counted[0] : (REAL)T;
  const REAL scale = target >= 0 && target < V ? dloss[0] / n : REAL_NAN, all = smoothing / (REAL)V;
  for (long c = LANE(lanes) * CHUNK; c < V; c += lanes * CHUNK) {
    chunk l = ldx_chunk(logits, logits_at + t * l_row + c * l_col, l_col, V - c, l_wide, ldt);
    UNROLL EACH(j) l.v[j] -= at;
    l = exp_chunk(l);
    UNROLL EACH(j) {
      const REAL wanted = c + j == target ? R(1.0) - smoothing + all : all;
      l.v[j] = counts ? (l.v[j] - wanted) * scale : R(0.0);
    }
    stx_chunk(dlogits, dlogits_at + t * d_row + c * d_col, d_col, V - c, d_wide, ddt, l);
  }
}
