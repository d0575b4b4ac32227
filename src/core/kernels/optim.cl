/* optim.cl - AdamW, clipping and the learning rate, all steered by scalars on the device.

   sqnorm has no kernel here: it is elt.cl's sum, of squares. */

#define HEALTH_OVERFLOW 4 /* MOE_HEALTH_OVERFLOW */
/* A step is skipped where clip said so (a negative scale) or the scale is not finite. */
#define SKIPPED(gscale) (!((gscale) >= R(0.0)) || !IS_FINITE(gscale))

/* AdamW, see moe__args_adamw: an item takes runs of chunks of all five arrays; the moments and the
   master stay in REAL and float, p is rounded from the master.  1 - b^t is -expm1(t log b), with log b from
   the host in double: 1 - pow(b, t) would lose all digits of b = 0.9999 at t = 1 in float, a loop over t grows
   with training.  Bytes, f32: p, m, v in and out, g in: 28 an element (bf16 with a master: 28 too). */
KERNEL(adamw)(TENSOR(uchar, p), int pdt, TENSOR(float, master), TENSOR(REAL, m), TENSOR(REAL, v),
              TENSOR(const uchar, g), int gdt, TENSOR(const REAL, lr), TENSOR(const long, t),
              TENSOR(const REAL, gscale), long n, int run, REAL beta1, REAL beta2, REAL rest1, REAL rest2,
              REAL log1, REAL log2, REAL eps, REAL decay, REAL lr_mult)
{
  AT_OPT(master);
  AT(m);
  AT(v);
  AT(lr);
  AT(t);
  AT_OPT(gscale);
  const REAL scale = gscale ? gscale[0] : R(1.0), rate = lr[0] * lr_mult, steps = (REAL)t[0];
  const REAL m_unbias = R(-1.0) / expm1(steps * log1), v_unbias = R(-1.0) / expm1(steps * log2);
  GLOBAL uchar *w = master ? (GLOBAL uchar *)master : p;
  const long w_at = master ? 0 : p_at;
  const int wdt = master ? DT_F32 : pdt;
  const int m_wide = CHUNK_OK(m, 0, DT_REAL, 0, 1), v_wide = CHUNK_OK(v, 0, DT_REAL, 0, 1);
  const int g_wide = CHUNK_OK(g, g_at, gdt, 0, 1), p_wide = CHUNK_OK(p, p_at, pdt, 0, 1);
  const int w_wide = CHUNK_OK(w, w_at, wdt, 0, 1);
  if (SKIPPED(scale)) return;
  MAP_CHUNKS(i, n, run) {
    const chunk d = ldx_chunk(g, g_at + i, 1, n - i, g_wide, gdt);
    chunk a = ldx_chunk((GLOBAL uchar *)m, i, 1, n - i, m_wide, DT_REAL);
    chunk b = ldx_chunk((GLOBAL uchar *)v, i, 1, n - i, v_wide, DT_REAL);
    chunk x = ldx_chunk(w, w_at + i, 1, n - i, w_wide, wdt);
    UNROLL EACH(j) {
      const REAL slope = scale * d.v[j];
      a.v[j] = beta1 * a.v[j] + rest1 * slope;
      b.v[j] = beta2 * b.v[j] + rest2 * slope * slope;
      x.v[j] -= rate * (a.v[j] * m_unbias / (sqrt(b.v[j] * v_unbias) + eps) + decay * x.v[j]);
    }
    stx_chunk((GLOBAL uchar *)m, i, 1, n - i, m_wide, DT_REAL, a);
    stx_chunk((GLOBAL uchar *)v, i, 1, n - i, v_wide, DT_REAL, b);
    stx_chunk(w, w_at + i, 1, n - i, w_wide, wdt, x);
    if (master) {
      UNROLL EACH(j) x.v[j] = (float)x.v[j];
      stx_chunk(p, p_at + i, 1, n - i, p_wide, pdt, x);
    }
  }
}

/* norm = sqrt(sq[0]) / loss_scale; y = {1/loss_scale, times max_norm/norm where norm > max_norm > 0; norm}.
   A norm that is not finite, or a loss_scale that is not positive: y[0] = -1 and the health bit.  One item. */
KERNEL(clip)(TENSOR(REAL, y), TENSOR(const REAL, sq), TENSOR(const REAL, loss_scale), TENSOR(int, health),
             REAL max_norm)
{
  AT(y);
  AT(sq);
  AT_OPT(loss_scale);
  AT_OPT(health);
  if (GID != 0) return;
  const REAL inverse = loss_scale ? R(1.0) / loss_scale[0] : R(1.0);
  const REAL norm = sqrt(sq[0]) * inverse;
  y[1] = norm;
  if (IS_FINITE(norm) && inverse > R(0.0)) {
    y[0] = max_norm > R(0.0) && norm > max_norm ? inverse * (max_norm / norm) : inverse;
  } else {
    y[0] = R(-1.0);
    if (health) ATOMIC_OR(health, HEALTH_OVERFLOW);
  }
}

/* step[0] += 1 unless this step is skipped; lr[0] of the new step by linear warm-up, then a cosine from peak
   to floor at `total`, then floor; total 0: peak for ever.  The fraction is taken in integers: t passes 2^24.
   One item. */
KERNEL(lr_step)(TENSOR(REAL, lr), TENSOR(long, step), TENSOR(const REAL, gscale), long warmup, long total, REAL peak,
                REAL lowest)
{
  AT(lr);
  AT(step);
  AT_OPT(gscale);
  if (GID != 0) return;
  const long t = step[0] + (gscale && SKIPPED(gscale[0]) ? 0 : 1);
  step[0] = t;
  if (t < warmup) {
    lr[0] = peak * ((REAL)t / (REAL)warmup);
  } else {
    const REAL done = total == 0 ? R(0.0) : t < total ? (REAL)(t - warmup) / (REAL)(total - warmup) : R(1.0);
    lr[0] = lowest + (peak - lowest) * (R(0.5) * (R(1.0) + cos(R(3.14159265358979323846) * done)));
  }
}
