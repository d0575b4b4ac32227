/* move.cl - rows of tokens by index: gather, weighted combine, and dot products with indexed rows; and elements of each
   row by index.

   In those of whole rows `lanes` items share a row, each taking every lanes-th chunk of it: neighbouring items read
   neighbouring addresses whatever the width, and narrow rows still fill a group.  One item per element was
   not kept: it divides by D for every element and reads the index as often. */

#define HEALTH_ID 2 /* MOE_HEALTH_ID */

/* y[i,:] = x[map[i]/div,:] for i < n; NaN and the health bit where map[i] is outside [0, rows*div).
   Bytes: a row in, a row out. */
KERNEL(gather_rows)(TENSOR(ST, y), long y_row, long y_col, TENSOR(const ST, x), long x_row, long x_col,
                    TENSOR(const int, map), TENSOR(int, health), long n, long rows, long D, long div, int lanes)
{
  AT(y);
  AT(x);
  AT(map);
  AT_OPT(health);
  const long i = ROW(lanes);
  if (i >= n) return;
  const long from = map[i];
  const int valid = from >= 0 && from < rows * div;
  if (!valid && health && LANE(lanes) == 0) ATOMIC_OR(health, HEALTH_ID);
  const long source = valid ? from / div * x_row : 0;
#define GATHER(c, wide, left)                                                                                          \
  chunk r;                                                                                                             \
  if (valid) {                                                                                                         \
    r = ld_chunk(x, source + c * x_col, x_col, left, wide);                                                            \
  } else {                                                                                                             \
    UNROLL EACH(j) r.v[j] = REAL_NAN;                                                                                  \
  }                                                                                                                    \
  st_chunk(y, i * y_row + c * y_col, y_col, left, wide, r)
  ROW_CHUNKS(c, D, lanes, CHUNK_OK_ST(y, y_row, y_col) && CHUNK_OK_ST(x, x_row, x_col), GATHER)
}

/* y[t,:] = add[t,:] + sum_k w[t,k] rows[slot2row[t,k],:], k ascending, in REAL, rounded once.  A slot without a
   row adds 0, or NaN where its weight is not finite; without slot2row slot s is row s.  Each token gathers its own
   rows: scattering rows into tokens needs float atomics, is not deterministic, and was 20 times slower on a CPU.
   `add` may be y: an item reads its chunk before it writes it.  Bytes: K rows (and add) in, one row out. */
#define FLYING 4 /* rows that are on their way to an item */
KERNEL(combine)(TENSOR(ST, y), long y_row, long y_col, TENSOR(const ST, rows), long r_row, long r_col,
                TENSOR(const REAL, weights), TENSOR(const int, slot2row), TENSOR(const ST, add), long a_row,
                long a_col, long T, long K, long D, int unweighted, int lanes)
{
  AT(y);
  AT(rows);
  AT_OPT(weights);
  AT_OPT(slot2row);
  AT_OPT(add);
  const long t = ROW(lanes);
  if (t >= T) return;
  if (slot2row) slot2row += t * K;
  if (weights) weights += t * K;
#define COMBINE(c, wide, left)                                                                                         \
  chunk sum;                                                                                                           \
  UNROLL EACH(j) sum.v[j] = R(0.0);                                                                                    \
  for (long first = 0; first < K; first += FLYING) {                                                                   \
    chunk x[FLYING];                                                                                                   \
    REAL w[FLYING];                                                                                                    \
    UNROLL for (int u = 0; u < FLYING; u++) {                                                                          \
      const long k = MIN2(first + u, K - 1), r = slot2row ? slot2row[k] : t * K + k;                                   \
      const REAL given = weights ? weights[k] : R(1.0);                                                                \
      w[u] = r < 0 ? (IS_FINITE(given) ? R(0.0) : REAL_NAN) : unweighted ? R(1.0) : given;                             \
      x[u] = ld_chunk(rows, MAX2(r, 0) * r_row + c * r_col, r_col, left, wide);                                        \
      if (r < 0) {                                                                                                     \
        UNROLL EACH(j) x[u].v[j] = R(0.0);                                                                             \
      }                                                                                                                \
    }                                                                                                                  \
    UNROLL for (int u = 0; u < FLYING; u++) if (first + u < K) {                                                       \
      UNROLL EACH(j) sum.v[j] += w[u] * x[u].v[j];                                                                     \
    }                                                                                                                  \
  }                                                                                                                    \
  if (add) {                                                                                                           \
    const chunk x = ld_chunk(add, t * a_row + c * a_col, a_col, left, wide);                                           \
    UNROLL EACH(j) sum.v[j] += x.v[j];                                                                                 \
  }                                                                                                                    \
  st_chunk(y, t * y_row + c * y_col, y_col, left, wide, sum)
  ROW_CHUNKS(c, D, lanes,
             CHUNK_OK_ST(y, y_row, y_col) && CHUNK_OK_ST(rows, r_row, r_col) &&
                 (!add || CHUNK_OK_ST(add, a_row, a_col)), COMBINE)
}

/* y[s] = <a[s/K,:], b[ids[s],:]>, 0 for an id outside [0,E).  Sums in REAL: each lane over its chunks, then a
   tree over the lanes.  Bytes: two rows in (b's rows mostly from cache). */
KERNEL(row_dot)(TENSOR(REAL, y), TENSOR(const ST, a), long a_row, long a_col, TENSOR(const ST, b), long b_row,
                long b_col, TENSOR(const int, ids), long slots, long K, long E, long D, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(y);
  AT(a);
  AT(b);
  AT(ids);
  const int a_wide = CHUNK_OK_ST(a, a_row, a_col), b_wide = CHUNK_OK_ST(b, b_row, b_col);
  const long s = ROW(lanes);
  const long e = s < slots ? ids[s] : -1;
  REAL sum = R(0.0);
  if (e >= 0 && e < E) {
    for (long c = LANE(lanes) * CHUNK; c < D; c += lanes * CHUNK) {
      const chunk x = ld_chunk(a, s / K * a_row + c * a_col, a_col, D - c, a_wide);
      const chunk z = ld_chunk(b, e * b_row + c * b_col, b_col, D - c, b_wide);
      UNROLL EACH(j) sum += x.v[j] * z.v[j];
    }
  }
  ROW_SUM(sum, sum, buf, lanes);
  if (s < slots && LANE(lanes) == 0) y[s] = sum;
}

/* y[t,k] = x[t,ids[t,k]]; NaN for an id outside [0,E).  An item takes one element.  Bytes: ids, y, and of x what is
   chosen. */
KERNEL(gather_cols)(TENSOR(ST, y), long y_row, long y_col, TENSOR(const ST, x), long x_row, long x_col,
                    TENSOR(const int, ids), long T, long E, long K)
{
  AT(y);
  AT(x);
  AT(ids);
  for (long i = GID; i < T * K; i += GSIZE) {
    const long t = i / K, k = i - t * K, e = ids[i];
    st(y, t * y_row + k * y_col, e >= 0 && e < E ? ld(x, t * x_row + e * x_col) : REAL_NAN);
  }
}

/* y[t,e] = sum over k with ids[t,k] = e of x[t,k], k ascending, in REAL.  An item takes one element and looks for its
   expert among the K ids of the token, so ids may repeat and nothing is added twice to memory.  Bytes: y once; ids
   and x once, from cache E times. */
KERNEL(scatter_cols)(TENSOR(ST, y), long y_row, long y_col, TENSOR(const ST, x), long x_row, long x_col,
                     TENSOR(const int, ids), long T, long E, long K)
{
  AT(y);
  AT(x);
  AT(ids);
  for (long i = GID; i < T * E; i += GSIZE) {
    const long t = i / E, e = i - t * E;
    REAL sum = R(0.0);
    for (long k = 0; k < K; k++)
      if (ids[t * K + k] == e) sum += ld(x, t * x_row + k * x_col);
    st(y, t * y_row + e * y_col, sum);
  }
}
