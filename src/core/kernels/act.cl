/* act.cl - activations of the expert MLP and their gradients.

   Rows of h are [gate 0..F-1 | up F..2F-1] (gated) or [0..F-1] (plain).  With g = min(gate, limit) and
   u = clamp(up, -limit, limit):  a = f(g) * (u + up_offset), or f(g).  The gradient passes where a clamp is
   exactly met.  `lanes` items share a row, each taking every lanes-th chunk. */
#ifndef MOE_CUDA
#pragma OPENCL FP_CONTRACT OFF /* for the serial sum; nvcc does not fuse through local memory */
#endif

/* What of the rows is computed: those of experts. */
#define ROWS(offs, E, rows) ((offs) ? (long)(offs)[E] : (rows))

/* a from h.  Bytes: h in, a out. */
KERNEL(act_fwd)(TENSOR(ST, a), TENSOR(const ST, h), TENSOR(const int, offs), long rows, long F, long E, int kind,
                int gated, REAL alpha, REAL limit, REAL up_offset, int lanes)
{
  AT(a);
  AT(h);
  AT_OPT(offs);
  const int a_wide = CHUNK_OK_ST(a, F, 1), h_wide = CHUNK_OK_ST(h, F, 1);
  const long r = ROW(lanes);
  if (r >= ROWS(offs, E, rows)) return;
  a += r * F;
  h += r * (gated ? 2 * F : F);
  for (long c = LANE(lanes) * CHUNK; c < F; c += lanes * CHUNK) {
    chunk g = ld_chunk(h, c, 1, F - c, h_wide), f, df;
    UNROLL EACH(j) g.v[j] = g.v[j] > limit ? limit : g.v[j];
    activate(g, kind, alpha, &f, &df);
    if (gated) {
      const chunk u = ld_chunk(h, F + c, 1, F - c, h_wide);
      UNROLL EACH(j) {
        const REAL clamped = u.v[j] > limit ? limit : u.v[j] < -limit ? -limit : u.v[j];
        f.v[j] *= clamped + up_offset;
      }
    }
    st_chunk(a, c, 1, F - c, a_wide, f);
  }
}

/* One chunk of a row of act_bwd: stores dh and aw, returns the products da*a.  da, h, dh and aw point at the
   row.  dh may be h: the chunk, both halves, is read before it is written. */
FN chunk act_grad(GLOBAL ST *dh, GLOBAL ST *aw, const GLOBAL ST *da, const GLOBAL ST *h, long c, long F, REAL w,
                  int kind, int gated, REAL alpha, REAL limit, REAL up_offset, int wide)
{
  chunk d = ld_chunk(da, c, 1, F - c, wide);
  const chunk gate = ld_chunk(h, c, 1, F - c, wide);
  chunk g, f, df, dg, a;
  UNROLL EACH(j) g.v[j] = gate.v[j] > limit ? limit : gate.v[j];
  activate(g, kind, alpha, &f, &df);
  if (gated) {
    const chunk up = ld_chunk(h, F + c, 1, F - c, wide);
    chunk du;
    UNROLL EACH(j) {
      const REAL clamped = up.v[j] > limit ? limit : up.v[j] < -limit ? -limit : up.v[j];
      const REAL u = clamped + up_offset;
      a.v[j] = f.v[j] * u;
      dg.v[j] = w * d.v[j] * u * df.v[j];
      du.v[j] = up.v[j] > limit || up.v[j] < -limit ? R(0.0) : w * d.v[j] * f.v[j];
    }
    st_chunk(dh, F + c, 1, F - c, wide, du);
  } else {
    a = f;
    UNROLL EACH(j) dg.v[j] = w * d.v[j] * df.v[j];
  }
  UNROLL EACH(j) dg.v[j] = gate.v[j] > limit ? R(0.0) : dg.v[j];
  st_chunk(dh, c, 1, F - c, wide, dg);
  UNROLL EACH(j) d.v[j] *= a.v[j];
  if (aw) {
    UNROLL EACH(j) a.v[j] *= w;
    st_chunk(aw, c, 1, F - c, wide, a);
  }
  return d;
}

/* dh = f'(h) * w da, aw = w a (rounded once), dweights[slot] (+)= <da, a>: a is recomputed in REAL from h and
   never rounded for the dot.  The row's products are added by each lane over its chunks, then by a tree over
   the lanes.  Bytes: da, h in, dh, aw out: all of it in one pass, where separate kernels read h three times. */
KERNEL(act_bwd)(TENSOR(ST, dh), TENSOR(ST, aw), TENSOR(REAL, dweights), TENSOR(const ST, da), TENSOR(const ST, h),
                TENSOR(const REAL, weights), TENSOR(const int, row2slot), TENSOR(const int, offs), long rows, long F,
                long E, int accumulate, int kind, int gated, REAL alpha, REAL limit, REAL up_offset, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(dh);
  AT_OPT(aw);
  AT_OPT(dweights);
  AT(da);
  AT(h);
  AT_OPT(weights);
  AT_OPT(row2slot);
  AT_OPT(offs);
  const int wide = CHUNK_OK_ST(dh, F, 1) && CHUNK_OK_ST(aw, F, 1) && CHUNK_OK_ST(da, F, 1) && CHUNK_OK_ST(h, F, 1);
  const long r = ROW(lanes), width = gated ? 2 * F : F;
  const int mine = r < ROWS(offs, E, rows);
  const long slot = mine && row2slot ? row2slot[r] : r;
  REAL sum = R(0.0);
  if (mine) {
    const REAL w = weights ? weights[slot] : R(1.0);
    for (long c = LANE(lanes) * CHUNK; c < F; c += lanes * CHUNK) {
      const chunk t = act_grad(dh + r * width, aw ? aw + r * F : aw, da + r * F, h + r * width, c, F, w, kind, gated,
                               alpha, limit, up_offset, wide);
      UNROLL EACH(j) sum += t.v[j];
    }
  }
  ROW_SUM(sum, sum, buf, lanes);
  if (mine && dweights && LANE(lanes) == 0) dweights[slot] = (accumulate ? dweights[slot] : R(0.0)) + sum;
}

/* The same with <da, a> as one accumulator over ascending F: the products of a step of all lanes go through
   local memory and the row's first lane adds them in order, bit for bit what a plain loop gives. */
KERNEL(act_bwd_serial)(TENSOR(ST, dh), TENSOR(ST, aw), TENSOR(REAL, dweights), TENSOR(const ST, da),
                       TENSOR(const ST, h), TENSOR(const REAL, weights), TENSOR(const int, row2slot),
                       TENSOR(const int, offs), long rows, long F, long E, int accumulate, int kind, int gated,
                       REAL alpha, REAL limit, REAL up_offset, int lanes)
{
  LOCAL_ARRAY(REAL, products, 256 * CHUNK);
  AT(dh);
  AT_OPT(aw);
  AT(dweights);
  AT(da);
  AT(h);
  AT_OPT(weights);
  AT_OPT(row2slot);
  AT_OPT(offs);
  const int wide = CHUNK_OK_ST(dh, F, 1) && CHUNK_OK_ST(aw, F, 1) && CHUNK_OK_ST(da, F, 1) && CHUNK_OK_ST(h, F, 1);
  const long r = ROW(lanes), width = gated ? 2 * F : F;
  const int mine = r < ROWS(offs, E, rows);
  const long slot = mine && row2slot ? row2slot[r] : r;
  const REAL w = mine && weights ? weights[slot] : R(1.0);
  REAL sum = R(0.0);
  for (long first = 0; first < F; first += lanes * CHUNK) {
    const long c = first + LANE(lanes) * CHUNK, left = F - first;
    GROUP_BARRIER();
    if (mine && c < F) {
      const chunk t = act_grad(dh + r * width, aw ? aw + r * F : aw, da + r * F, h + r * width, c, F, w, kind, gated,
                               alpha, limit, up_offset, wide);
      UNROLL EACH(j) products[LID * CHUNK + j] = t.v[j];
    }
    GROUP_BARRIER();
    if (mine && LANE(lanes) == 0) {
      for (int j = 0; j < lanes * CHUNK && j < left; j++) sum += products[LID * CHUNK + j];
    }
  }
  if (mine && LANE(lanes) == 0) dweights[slot] = (accumulate ? dweights[slot] : R(0.0)) + sum;
}
