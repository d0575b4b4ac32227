/* norm.cl - RMS norm over rows: y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps), and its gradients.

   `lanes` items share a row; sums are in REAL, each lane over its chunks and then a tree over the lanes. */

#ifndef MOE_CPU
/* On GPUs a row of up to lanes*HELD chunks stays in registers.  Chunk u of a lane: its first column and the distance of
   its elements; where not all rows are `wide` (a constant), neighbours belong to neighbouring lanes. */
#define HELD 4
#define COLUMN(u) (wide ? (LANE(lanes) + (u)*lanes) * CHUNK : LANE(lanes) + (u)*lanes * CHUNK)
#define APART (wide ? 1 : lanes)
#define EACH_HELD(u) for (int u = 0; u < HELD; u++)

/* A chunk as it lies in memory: 16-bit types take half the registers so. */
#if CHUNK == 8
typedef uint4 held;
FN chunk open(held h)
{
  chunk c;
  c.v[0] = half_in(h.x & 0xffffu, DT_ST), c.v[1] = half_in(h.x >> 16, DT_ST);
  c.v[2] = half_in(h.y & 0xffffu, DT_ST), c.v[3] = half_in(h.y >> 16, DT_ST);
  c.v[4] = half_in(h.z & 0xffffu, DT_ST), c.v[5] = half_in(h.z >> 16, DT_ST);
  c.v[6] = half_in(h.w & 0xffffu, DT_ST), c.v[7] = half_in(h.w >> 16, DT_ST);
  return c;
}
FN held closed(chunk c)
{
  held h;
  h.x = halves_out(c.v[0], c.v[1], DT_ST), h.y = halves_out(c.v[2], c.v[3], DT_ST);
  h.z = halves_out(c.v[4], c.v[5], DT_ST), h.w = halves_out(c.v[6], c.v[7], DT_ST);
  return h;
}
FN held held_at(const GLOBAL ST *p)
{
#ifdef MOE_PTX
  return load_16(p);
#else
  return *(const GLOBAL held *)p;
#endif
}
#else
typedef chunk held;
#define open(h) (h)
#define closed(c) (c)
#define held_at(p) ld_chunk(p, 0, 1, CHUNK, 1)
#endif

/* Chunk u of a row of D elements; what is past the row, is 0 or, where `wide`, anything. */
FN held load_held(const GLOBAL ST *row, long col, int u, long D, int lanes, int wide)
{
  const long c = COLUMN(u);
  if (wide) return held_at(row + MIN2(c, D - CHUNK));
  return closed(ld_chunk(row, c * col, col * lanes, c < D ? (D - c + lanes - 1) / lanes : 0, 0));
}
FN void store_held(GLOBAL ST *row, long col, int u, long D, int lanes, int wide, chunk a)
{
  const long c = COLUMN(u);
  if (c < D) st_chunk(row, c * col, col * APART, wide ? CHUNK : (D - c + lanes - 1) / lanes, wide, a);
}

FN void rms_fwd_held(GLOBAL ST *y, long y_row, long y_col, GLOBAL REAL *rstd, const GLOBAL ST *x, long x_row,
                     long x_col, const GLOBAL ST *w, long T, long D, REAL eps, int lanes, int wide, LOCAL REAL *buf)
{
  const long t = ROW(lanes), live = MIN2(t, T - 1);
  held a[HELD];
  REAL sum = R(0.0);
  UNROLL EACH_HELD(u) a[u] = load_held(x + live * x_row, x_col, u, D, lanes, wide);
  UNROLL EACH_HELD(u) if (COLUMN(u) < D) {
    const chunk c = open(a[u]);
    UNROLL EACH(j) sum += c.v[j] * c.v[j];
  }
  ROW_SUM(sum, sum, buf, lanes);
  if (t >= T) return;
  const REAL scale = R(1.0) / sqrt(sum / (REAL)D + eps);
  if (LANE(lanes) == 0) rstd[t] = scale;
  UNROLL EACH_HELD(u) {
    const chunk b = open(load_held(w, 1, u, D, lanes, wide));
    chunk c = open(a[u]);
    UNROLL EACH(j) c.v[j] = c.v[j] * scale * b.v[j];
    store_held(y + t * y_row, y_col, u, D, lanes, wide, c);
  }
}
#endif

/* Two passes over the row; the second finds it in cache.  Bytes: x in, y out, w from cache. */
KERNEL(RESIDENT(4) rms_fwd)(TENSOR(ST, y), long y_row, long y_col, TENSOR(REAL, rstd), TENSOR(const ST, x), long x_row,
                long x_col, TENSOR(const ST, w), long T, long D, REAL eps, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(y);
  AT(rstd);
  AT(x);
  AT(w);
  const int y_wide = CHUNK_OK_ST(y, y_row, y_col), x_wide = CHUNK_OK_ST(x, x_row, x_col);
  const int w_wide = CHUNK_OK_ST(w, 0, 1);
#ifndef MOE_CPU
  if (D <= lanes * HELD * CHUNK) {
    if (y_wide && x_wide && w_wide && D % CHUNK == 0)
      rms_fwd_held(y, y_row, y_col, rstd, x, x_row, x_col, w, T, D, eps, lanes, 1, buf);
    else rms_fwd_held(y, y_row, y_col, rstd, x, x_row, x_col, w, T, D, eps, lanes, 0, buf);
    return;
  }
#endif
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

#ifndef MOE_CPU
/* Both gradients in one pass over rows [p*length, (p+1)*length), all chunks wide: dx, and the part of dw, summed in
   registers, that goes to scratch[p,:].  Each column belongs to one item of each row that is on its way,
   LSIZE/lanes of them, whose sums are added last, in order.  Bytes: dy, x in, dx out. */
KERNEL(RESIDENT(2) rms_bwd_rows)(TENSOR(REAL, scratch), TENSOR(ST, dx), long dx_row, TENSOR(const ST, dy), long dy_row,
                                 TENSOR(const ST, x), long x_row, TENSOR(const ST, w), TENSOR(const REAL, rstd), long T,
                                 long D, long length, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  LOCAL_ARRAY(REAL, sums, 256 * CHUNK);
  AT(scratch);
  AT(dx);
  AT(dy);
  AT(x);
  AT(w);
  AT(rstd);
  const int wide = 1, together = LSIZE >> LOG2(lanes), slot = LID >> LOG2(lanes);
  const long p = GROUP(0), end = MIN2(T, (p + 1) * length);
  chunk dw[HELD];
  UNROLL EACH_HELD(u) {
    UNROLL EACH(j) dw[u].v[j] = R(0.0);
  }
  for (long first = p * length; first < end; first += together) {
    const long t = first + slot, live = MIN2(t, end - 1);
    const REAL scale = rstd[live];
    held a[HELD], g[HELD];
    REAL sum = R(0.0);
    UNROLL EACH_HELD(u) a[u] = load_held(x + live * x_row, 1, u, D, lanes, wide);
    UNROLL EACH_HELD(u) g[u] = load_held(dy + live * dy_row, 1, u, D, lanes, wide);
    UNROLL EACH_HELD(u) if (t < end && COLUMN(u) < D) {
      const chunk b = open(load_held(w, 1, u, D, lanes, wide)), c = open(a[u]), d = open(g[u]);
      UNROLL EACH(j) {
        dw[u].v[j] += d.v[j] * (c.v[j] * scale);
        sum += d.v[j] * b.v[j] * c.v[j];
      }
    }
    ROW_SUM(sum, sum, buf, lanes);
    const REAL slope = scale * scale * (sum / (REAL)D);
    UNROLL EACH_HELD(u) if (t < end && COLUMN(u) < D) {
      const chunk b = open(load_held(w, 1, u, D, lanes, wide)), c = open(a[u]);
      chunk d = open(g[u]);
      UNROLL EACH(j) d.v[j] = scale * (d.v[j] * b.v[j] - c.v[j] * slope);
      store_held(dx + t * dx_row, 1, u, D, lanes, wide, d);
    }
  }
  UNROLL EACH_HELD(u) {
    const long c = COLUMN(u);
    GROUP_BARRIER();
    UNROLL EACH(j) sums[LID * CHUNK + j] = dw[u].v[j];
    GROUP_BARRIER();
    if (slot == 0 && c < D) {
      chunk sum = dw[u];
      for (int s = 1; s < together; s++) {
        UNROLL EACH(j) sum.v[j] += sums[(s * lanes + LID) * CHUNK + j];
      }
      UNROLL EACH(j) scratch[p * D + c + j] = sum.v[j];
    }
  }
}
#endif

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
