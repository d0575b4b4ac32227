/* ggemm_cpu.cl - sums of columns over ragged experts on CPU devices (products are in gemm_cpu.cl). */

/* Columns of a block; rows that are summed up before they are added to the total. */
#define BLOCK 512
#define CHUNK_ROWS 64

/* c[e,n] (+)= sum over the rows r of expert e, ascending, of w[m] * p[m/div,n] with m = map[r] (r, and r/1, without a
   map; w = 1 where not given), for n < N in each of `halves`: columns 0..N-1 of p to c0, N..2N-1 to c1.  A chunk of
   rows is summed, then the chunks.
   A work-group is one work-item; blocks of columns of all experts form one line, weighted by rows, and a group takes
   the blocks that begin in its share.  Blocks are so narrow that the largest is no more than a share.  Rows are read in
   runs of a block; an item for each column, the obvious version, reads a row's neighbours at different times, and a
   scatter of rows needs atomics: 20 times slower.  Bytes: p once; c once. */
LOCAL_SIZE(1)
KERNEL(colsum)
(TENSOR(uchar, c0), TENSOR(uchar, c1), TENSOR(const ST, p), TENSOR(const REAL, weights), TENSOR(const int, offs),
 TENSOR(const int, map), long E, long N, long c0_expert, long c0_col, long c1_expert, long c1_col, long p_row,
 int c0_type, int c1_type, int halves, int div, int accumulate)
{
  LOCAL_ARRAY(REAL, chunk_sum, BLOCK);
  LOCAL_ARRAY(REAL, sum, BLOCK);
  AT(p);
  AT_OPT(weights);
  AT(offs);
  AT_OPT(map);
  long most = 0, line = 0, blocks = (N + BLOCK - 1) / BLOCK, width;
  for (long e = 0; e < E; e++) most = MAX2(most, (long)(offs[e + 1] - offs[e]));
  for (;; blocks *= 2) {
    width = ((N + blocks - 1) / blocks + VW - 1) / VW * VW;
    if (width == VW || most * GROUPS(0) <= blocks * halves * (offs[E] - offs[0])) break;
  }
  blocks = (N + width - 1) / width;
  const long all = halves * blocks * (offs[E] - offs[0] + E * CHUNK_ROWS);
  for (long e = 0; e < E; e++) {
    const long begin = offs[e], end = offs[e + 1];
    for (long b = 0; b < halves * blocks; b++, line += end - begin + CHUNK_ROWS) {
      if (line * GROUPS(0) / all != GROUP(0) || (accumulate && begin == end)) continue;
      const int second = b >= blocks;
      const long n = b % blocks * width;
      const int w = (int)MIN2(N - n, width), whole = w / VW;
      for (int j = 0; j < w; j++) sum[j] = R(0.0);
      for (long r0 = begin; r0 < end; r0 += CHUNK_ROWS) {
        for (int j = 0; j < w; j++) chunk_sum[j] = R(0.0);
        for (long r = r0; r < MIN2(r0 + CHUNK_ROWS, end); r++) {
          const long m = map ? map[r] : r;
          const REAL weight = weights ? weights[m] : R(1.0);
          const GLOBAL ST *x = p + (map ? m / div : m) * p_row + second * N + n;
          for (int v = 0; v < whole; v++) VSTORE(VLOAD(v, chunk_sum) + weight * ldv(x + v * VW), v, chunk_sum);
          for (int j = whole * VW; j < w; j++) chunk_sum[j] += weight * ld(x, j);
        }
        for (int j = 0; j < w; j++) sum[j] += chunk_sum[j];
      }
      GLOBAL uchar *c = second ? c1 : c0;
      const long at = second ? c1_at + e * c1_expert + n * c1_col : c0_at + e * c0_expert + n * c0_col;
      const long step = second ? c1_col : c0_col;
      const int type = second ? c1_type : c0_type;
      for (int j = 0; j < w; j++)
        stx(c, at + j * step, type, accumulate ? ldx(c, at + j * step, type) + sum[j] : sum[j]);
    }
  }
}
