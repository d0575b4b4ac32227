/* norm.cl - RMS norm over rows: y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps), and its gradients.

   `lanes` items share a row; sums are in REAL, each lane over its chunks and then a tree over the lanes. */

/* Two passes over the row; the second finds it in cache.  Keeping the row in registers was not kept: it fixes
   the largest D.  Bytes: x in, y out, w from cache. */
KERNEL(rms_fwd)(TENSOR(ST, y), long y_row, long y_col, TENSOR(REAL, rstd), TENSOR(const ST, x), long x_row,
                long x_col, TENSOR(const ST, w), long T, long D, REAL eps, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(y);
  AT(rstd);
  AT(x);
  AT(w);
  const int y_wide = CHUNK_OK_ST(y, y_row, y_col), x_wide = CHUNK_OK_ST(x, x_row, x_col);
  const int w_wide = CHUNK_OK_ST(w, 0, 1);
  const long t = ROW(lanes), n = t < T ? D : 0;
  REAL sum = R(0.0);
  for (long c = LANE(lanes) * CHUNK; c < n; c += lanes * CHUNK) {
    const chunk a = ld_chunk(x, t * x_row + c * x_col, x_col, D - c, x_wide);
    UNROLL EACH(j) sum += a.v[j] * a.v[j];
  }
  ROW_SUM(sum, sum, buf, lanes);
  const REAL scale = R(1.0) / sqrt(sum / (REAL)D + eps);
  if (t < T && LANE(lanes) == 0) rstd[t] = scale;
  for (long c = LANE(lanes) * CHUNK; c < n; c += lanes * CHUNK) {
    chunk a = ld_chunk(x, t * x_row + c * x_col, x_col, D - c, x_wide);
    const chunk b = ld_chunk(w, c, 1, D - c, w_wide);
    UNROLL EACH(j) a.v[j] = a.v[j] * scale * b.v[j];
    st_chunk(y, t * y_row + c * y_col, y_col, D - c, y_wide, a);
  }
}

/* dx = rstd * (dy*w - x * rstd^2 * mean(dy*w*x)), two passes as above.  Bytes: dy, x in, dx out. */
KERNEL(rms_bwd_dx)(TENSOR(ST, dx), long dx_row, long dx_col, TENSOR(const ST, dy), long dy_row, long dy_col,
                   TENSOR(const ST, x), long x_row, long x_col, TENSOR(const ST, w), TENSOR(const REAL, rstd),
                   long T, long D, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(dx);
  AT(dy);
  AT(x);
  AT(w);
  AT(rstd);
  const int dx_wide = CHUNK_OK_ST(dx, dx_row, dx_col), dy_wide = CHUNK_OK_ST(dy, dy_row, dy_col);
  const int x_wide = CHUNK_OK_ST(x, x_row, x_col), w_wide = CHUNK_OK_ST(w, 0, 1);
  const long t = ROW(lanes), n = t < T ? D : 0;
  const REAL scale = t < T ? rstd[t] : R(0.0);
  REAL sum = R(0.0);
  for (long c = LANE(lanes) * CHUNK; c < n; c += lanes * CHUNK) {
    const chunk a = ld_chunk(x, t * x_row + c * x_col, x_col, D - c, x_wide);
    const chunk g = ld_chunk(dy, t * dy_row + c * dy_col, dy_col, D - c, dy_wide);
    const chunk b = ld_chunk(w, c, 1, D - c, w_wide);
    UNROLL EACH(j) sum += g.v[j] * b.v[j] * a.v[j];
  }
  ROW_SUM(sum, sum, buf, lanes);
  const REAL slope = scale * scale * (sum / (REAL)D);
  for (long c = LANE(lanes) * CHUNK; c < n; c += lanes * CHUNK) {
    const chunk a = ld_chunk(x, t * x_row + c * x_col, x_col, D - c, x_wide);
    chunk g = ld_chunk(dy, t * dy_row + c * dy_col, dy_col, D - c, dy_wide);
    const chunk b = ld_chunk(w, c, 1, D - c, w_wide);
    UNROLL EACH(j) g.v[j] = scale * (g.v[j] * b.v[j] - a.v[j] * slope);
    st_chunk(dx, t * dx_row + c * dx_col, dx_col, D - c, dx_wide, g);
  }
}

/* First step of dw[d] = sum_t dy[t,d] x[t,d] rstd[t]: group (i, p) sums rows [p*length, (p+1)*length) into
   scratch[p,:], an item a chunk of columns, rows ascending.  One group walking all rows of its columns leaves
   a GPU idle, and float atomics are not deterministic.  Bytes: dy, x in. */
KERNEL(rms_bwd_dw_parts)(TENSOR(REAL, scratch), TENSOR(const ST, dy), long dy_row, long dy_col, TENSOR(const ST, x),
                         long x_row, long x_col, TENSOR(const REAL, rstd), long T, long D, long length)
{
  AT(scratch);
  AT(dy);
  AT(x);
  AT(rstd);
  const int dy_wide = CHUNK_OK_ST(dy, dy_row, dy_col), x_wide = CHUNK_OK_ST(x, x_row, x_col);
  const long c = GID * CHUNK, part = GROUP(1);
  const long begin = part * length, end = MIN2(T, begin + length);
  if (c >= D) return;
  chunk sum;
  UNROLL EACH(j) sum.v[j] = R(0.0);
  for (long t = begin; t < end; t++) {
    const chunk a = ld_chunk(x, t * x_row + c * x_col, x_col, D - c, x_wide);
    const chunk g = ld_chunk(dy, t * dy_row + c * dy_col, dy_col, D - c, dy_wide);
    const REAL scale = rstd[t];
    UNROLL EACH(j) sum.v[j] += g.v[j] * (a.v[j] * scale);
  }
  UNROLL EACH(j) if (c + j < D) scratch[part * D + c + j] = sum.v[j];
}
/* Second step: dw[d] (+)= sum over parts.  A group takes min(32, LSIZE) columns; the items of a column take
   every LSIZE/columns-th part and a tree adds them. */
KERNEL(rms_bwd_dw_final)(TENSOR(uchar, dw), int dwdt, TENSOR(const REAL, scratch), long D, int parts, int accumulate)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(scratch);
  const int columns = MIN2(LSIZE, 32);
  const long d = GROUP(0) * columns + LID % columns;
  REAL sum = R(0.0);
  if (d < D) {
    for (int p = LID / columns; p < parts; p += LSIZE / columns) sum += scratch[p * D + d];
  }
  buf[LID] = sum;
  for (int gs = LSIZE >> 1; gs >= columns; gs >>= 1) {
    GROUP_BARRIER();
    if (LID < gs) buf[LID] += buf[LID + gs];
  }
  if (LID < columns && d < D) {
    stx(dw, dw_at + d, dwdt, (accumulate ? ldx(dw, dw_at + d, dwdt) : R(0.0)) + buf[LID]);
  }
}
