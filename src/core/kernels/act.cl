/* act.cl - activations of the expert MLP and their gradients.

   Rows of h are [gate 0..F-1 | up F..2F-1] (gated) or [0..F-1] (plain).  With g = min(gate, limit) and
   u = clamp(up, -limit, limit):  a = f(g) * (u + up_offset), or f(g).  The gradient passes where a clamp is
   exactly met.  `lanes` items share a row, each taking every lanes-th chunk.
   Kernels come for every activation and, with that of most layers as a constant, for gated SiLU: that leaves registers
   for twice as many items. */
#ifndef MOE_CUDA
#pragma OPENCL FP_CONTRACT OFF /* for the serial sum; nvcc does not fuse through local memory */
#endif

/* What of the rows is computed: those of experts. */
#define ROWS(offs, E, rows) ((offs) ? (long)(offs)[E] : (rows))

/* ---- forward ------------------------------------------------------------------------------------------------ */
#define FWD_PARAMETERS                                                                                                 \
  TENSOR(ST, a), TENSOR(const ST, h), TENSOR(const int, offs), long rows, long F, long E, int kind, int gated,         \
      REAL alpha, REAL limit, REAL up_offset, int lanes

/* a from h.  Bytes: h in, a out. */
FN void forward(GLOBAL ST *a, long a_at, const GLOBAL ST *h, long h_at, const GLOBAL int *offs, long offs_at, long rows,
                long F, long E, int kind, int gated, REAL alpha, REAL limit, REAL up_offset, int lanes)
{
  AT(a);
  AT(h);
  AT_OPT(offs);
  const long r = ROW(lanes);
  if (r >= ROWS(offs, E, rows)) return;
  a += r * F;
  h += r * (gated ? 2 * F : F);
#define FORWARD(c, wide, left)                                                                                         \
  chunk g = ld_chunk(h, c, 1, left, wide), u = g, f, df;                                                               \
  if (gated) u = ld_chunk(h, F + c, 1, left, wide);                                                                    \
  UNROLL EACH(j) g.v[j] = at_most(g.v[j], limit);                                                                      \
  activate(g, kind, alpha, 1, &f, &df);                                                                                \
  if (gated) {                                                                                                         \
    UNROLL EACH(j) f.v[j] *= at_least(at_most(u.v[j], limit), -limit) + up_offset;                                     \
  }                                                                                                                    \
  st_chunk(a, c, 1, left, wide, f)
  ROW_CHUNKS(c, F, lanes, CHUNK_OK_ST(a, F, 1) && CHUNK_OK_ST(h, F, 1), FORWARD)
}

KERNEL(act_fwd)(FWD_PARAMETERS)
{
  forward(a, a_at, h, h_at, offs, offs_at, rows, F, E, kind, gated, alpha, limit, up_offset, lanes);
}
KERNEL(RESIDENT(5) swiglu_fwd)(FWD_PARAMETERS)
{
  forward(a, a_at, h, h_at, offs, offs_at, rows, F, E, ACT_SILU, 1, alpha, limit, up_offset, lanes);
}

/* ---- backward ----------------------------------------------------------------------------------------------- */
#define BWD_PARAMETERS                                                                                                 \
  TENSOR(ST, dh), TENSOR(ST, aw), TENSOR(REAL, dweights), TENSOR(const ST, da), TENSOR(const ST, h),                   \
      TENSOR(const REAL, weights), TENSOR(const int, row2slot), TENSOR(const int, offs), long rows, long F, long E,    \
      int accumulate, int kind, int gated, REAL alpha, REAL limit, REAL up_offset, int lanes
#define BWD_ARGUMENTS(kind, gated)                                                                                     \
  dh, dh_at, aw, aw_at, dweights, dweights_at, da, da_at, h, h_at, weights, weights_at, row2slot, row2slot_at, offs,   \
      offs_at, rows, F, E, accumulate, kind, gated, alpha, limit, up_offset, lanes
#define BWD_WIDE                                                                                                       \
  (CHUNK_OK_ST(dh, F, 1) && CHUNK_OK_ST(aw, F, 1) && CHUNK_OK_ST(da, F, 1) && CHUNK_OK_ST(h, F, 1))

/* So many elements of a chunk at a time: a GPU's items have no registers for all, a CPU wants vectors. */
#ifdef MOE_CPU
#define PIECE CHUNK
#else
#define PIECE 2
#endif

/* One chunk of a row: stores dh and aw, returns the products da*a.  da, h, dh and aw point at the row.  dh may be h:
   the chunk, both halves, is read before it is written. */
FN chunk act_grad(GLOBAL ST *dh, GLOBAL ST *aw, const GLOBAL ST *da, const GLOBAL ST *h, long c, long F, REAL w,
                  int kind, int gated, REAL alpha, REAL limit, REAL up_offset, int wide, long left)
{
  chunk d = ld_chunk(da, c, 1, left, wide);
  const chunk gate = ld_chunk(h, c, 1, left, wide);
  chunk up = gate, dg, du, a;
  if (gated) up = ld_chunk(h, F + c, 1, left, wide);
  UNROLL for (int first = 0; first < CHUNK; first += PIECE) {
    chunk g, f, df;
    UNROLL EACH(j) g.v[j] = j >= first && j < first + PIECE ? at_most(gate.v[j], limit) : R(0.0);
    activate(g, kind, alpha, 1, &f, &df);
    UNROLL for (int j = first; j < first + PIECE; j++) {
      const REAL flow = w * d.v[j];
      if (gated) {
        const REAL u = at_least(at_most(up.v[j], limit), -limit) + up_offset;
        a.v[j] = f.v[j] * u;
        dg.v[j] = flow * u * df.v[j];
        du.v[j] = fabs(up.v[j]) > limit ? R(0.0) : flow * f.v[j];
      } else {
        a.v[j] = f.v[j];
        dg.v[j] = flow * df.v[j];
      }
      dg.v[j] = gate.v[j] > limit ? R(0.0) : dg.v[j];
      d.v[j] *= a.v[j];
      a.v[j] *= w;
    }
  }
  st_chunk(dh, c, 1, left, wide, dg);
  if (gated) st_chunk(dh, F + c, 1, left, wide, du);
  if (aw) st_chunk(aw, c, 1, left, wide, a);
  return d;
}

/* dh = f'(h) * w da, aw = w a (rounded once), dweights[slot] (+)= <da, a>: a is recomputed in REAL from h and
   never rounded for the dot.  The row's products are added by each lane over its chunks, then by a tree over
   the lanes.  Bytes: da, h in, dh, aw out: all of it in one pass, where separate kernels read h three times. */
FN void backward(BWD_PARAMETERS, LOCAL REAL *buf)
{
  AT(dh);
  AT_OPT(aw);
  AT_OPT(dweights);
  AT(da);
  AT(h);
  AT_OPT(weights);
  AT_OPT(row2slot);
  AT_OPT(offs);
  const int wide = BWD_WIDE;
  const long r = ROW(lanes), width = gated ? 2 * F : F;
  const int mine = r < ROWS(offs, E, rows);
  const long slot = mine && row2slot ? row2slot[r] : r;
  REAL sum = R(0.0);
  if (mine) {
    const REAL w = weights ? weights[slot] : R(1.0);
    dh += r * width;
    h += r * width;
    da += r * F;
    if (aw) aw += r * F;
#define BACKWARD(c, wide, left)                                                                                        \
  const chunk t = act_grad(dh, aw, da, h, c, F, w, kind, gated, alpha, limit, up_offset, wide, left);                  \
  UNROLL EACH(j) sum += t.v[j]
    ROW_CHUNKS(c, F, lanes, wide, BACKWARD)
  }
  ROW_SUM(sum, sum, buf, lanes);
  if (mine && dweights && LANE(lanes) == 0) dweights[slot] = (accumulate ? dweights[slot] : R(0.0)) + sum;
}

KERNEL(act_bwd)(BWD_PARAMETERS)
{
  LOCAL_ARRAY(REAL, buf, 256);
  backward(BWD_ARGUMENTS(kind, gated), buf);
}
KERNEL(RESIDENT(4) swiglu_bwd)(BWD_PARAMETERS)
{
  LOCAL_ARRAY(REAL, buf, 256);
  backward(BWD_ARGUMENTS(ACT_SILU, 1), buf);
}

/* The same with <da, a> as one accumulator over ascending F: the products of a step of all lanes go through
   local memory and the row's first lane adds them in order, bit for bit what a plain loop gives. */
KERNEL(act_bwd_serial)(BWD_PARAMETERS)
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
  const int wide = BWD_WIDE;
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
                               alpha, limit, up_offset, wide, F - c);
      UNROLL EACH(j) products[LID * CHUNK + j] = t.v[j];
    }
    GROUP_BARRIER();
    if (mine && LANE(lanes) == 0) {
      for (int j = 0; j < lanes * CHUNK && j < left; j++) sum += products[LID * CHUNK + j];
    }
  }
  if (mine && LANE(lanes) == 0) dweights[slot] = (accumulate ? dweights[slot] : R(0.0)) + sum;
}
