/* move_cpu.cl - rows of tokens by index on CPU devices. */

/* y[t,:] = add[t,:] + sum_k w[t,k] rows[slot2row[t,k],:], k ascending, in REAL, rounded once; a slot without a row adds
   0, or NaN where its weight is not finite (kernels/move.cl).
   A work-group is one work-item and takes a run of tokens; for each token STEP vectors of sums go over its K rows, in
   explicit vectors with the storage type converted on the way.  Rows are packed.  Bytes: K rows (and add) in, one row
   out. */
#define STEP 4

/* Sums of n vectors from column c on. */
#define SUM(n)                                                                                                         \
  do {                                                                                                                 \
    VEC s[n];                                                                                                          \
    UNROLL for (int v = 0; v < n; v++) s[v] = R(0.0);                                                                  \
    for (long k = 0; k < K; k++) {                                                                                     \
      const long r = slot2row ? slot2row[t * K + k] : t * K + k;                                                       \
      const REAL given = weights ? weights[t * K + k] : R(1.0), w = unweighted ? R(1.0) : given;                       \
      if (r >= 0) {                                                                                                    \
        UNROLL for (int v = 0; v < n; v++) s[v] += w * ldv(rows + r * r_row + c + v * VW);                             \
      } else if (!IS_FINITE(given)) {                                                                                  \
        UNROLL for (int v = 0; v < n; v++) s[v] = REAL_NAN;                                                            \
      }                                                                                                                \
    }                                                                                                                  \
    if (add) {                                                                                                         \
      UNROLL for (int v = 0; v < n; v++) s[v] += ldv(add + t * a_row + c + v * VW);                                    \
    }                                                                                                                  \
    UNROLL for (int v = 0; v < n; v++) stv(y + t * y_row + c + v * VW, s[v]);                                          \
  } while (0)

LOCAL_SIZE(1)
KERNEL(combine_rows)
(TENSOR(ST, y), long y_row, TENSOR(const ST, rows), long r_row, TENSOR(const REAL, weights),
 TENSOR(const int, slot2row), TENSOR(const ST, add), long a_row, long T, long K, long D, int unweighted)
{
  AT(y);
  AT(rows);
  AT_OPT(weights);
  AT_OPT(slot2row);
  AT_OPT(add);
  for (long t = T * GROUP(0) / GROUPS(0); t < T * (GROUP(0) + 1) / GROUPS(0); t++) {
    long c = 0;
    for (; c + STEP * VW <= D; c += STEP * VW) SUM(STEP);
    for (; c + VW <= D; c += VW) SUM(1);
    for (; c < D; c++) {
      REAL s = R(0.0);
      for (long k = 0; k < K; k++) {
        const long r = slot2row ? slot2row[t * K + k] : t * K + k;
        const REAL given = weights ? weights[t * K + k] : R(1.0);
        if (r >= 0) s += (unweighted ? R(1.0) : given) * ld(rows, r * r_row + c);
        else if (!IS_FINITE(given)) s = REAL_NAN;
      }
      if (add) s += ld(add, t * a_row + c);
      st(y, t * y_row + c, s);
    }
  }
}
