/* ggemm.cl - sums over the rows of ragged experts.  The matrix products of this family stand in gemm.cl, beside the
   engine they share with the dense one.

   colsum: c[e,n] (+)= sum over rows r of e of w[r] * p[map(r)/div,n], p [R,N] or [rows,N], c [E,N]; where `parts` is
   2, N is that of one half and columns N..2N-1 go to c1.  w is the weight of slot map(r), of row r without a map,
   1 without weights.
   A group takes LANES columns of one expert; LANES of its 256 sums read neighbouring columns of every 8th row, in
   ascending order, then each column adds its 8 sums in order: the shape does not depend on the local size.
   Bytes moved: p once, in runs of LANES; sums are REALs.  One item a column would leave most of a device idle and
   one long chain of additions. */

#define LANES 32
#define ROWS_AT_ONCE 8

KERNEL(colsum)
(TENSOR(uchar, c0), long c0_es, long c0_ns, TENSOR(uchar, c1), long c1_es, long c1_ns, int c0_dt, int c1_dt,
 TENSOR(const ST, p), long p_rs, long p_ns, TENSOR(const REAL, weights), TENSOR(const int, offs),
 TENSOR(const int, map), int div, long N, int parts, int accumulate)
{
  LOCAL_ARRAY(REAL, sums, ROWS_AT_ONCE * LANES);
  AT_OPT(p);
  AT_OPT(weights);
  AT(offs);
  AT_OPT(map);
  const int blocks = (int)((N + LANES - 1) / LANES), group = (int)GROUP(0);
  const int second = group / blocks % parts;
  const long e = group / blocks / parts, n0 = (long)(group % blocks) * LANES;
  const long begin = offs[e], end = offs[e + 1];
  for (int s = LID; s < ROWS_AT_ONCE * LANES; s += LSIZE) {
    const long n = n0 + s % LANES;
    REAL sum = R(0.0);
    if (n < N) {
      for (long r = begin + s / LANES; r < end; r += ROWS_AT_ONCE) {
        const long slot = map ? map[r] : r;
        sum += (weights ? weights[slot] : R(1.0)) * ld(p, (map ? slot / div : r) * p_rs + (second * N + n) * p_ns);
      }
    }
    sums[s] = sum;
  }
  BARRIER();
  for (int j = LID; j < LANES; j += LSIZE) {
    const long n = n0 + j;
    if (n < N && !(accumulate && begin == end)) {
      GLOBAL uchar *c = second ? c1 : c0;
      const long at = second ? c1_at + e * c1_es + n * c1_ns : c0_at + e * c0_es + n * c0_ns;
      const int dt = second ? c1_dt : c0_dt;
      REAL sum = sums[j];
      for (int i = 1; i < ROWS_AT_ONCE; i++) sum += sums[i * LANES + j];
      stx(c, at, dt, accumulate ? ldx(c, at, dt) + sum : sum);
    }
  }
}
