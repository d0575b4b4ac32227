/* gemm_cpu.cl - matrix products on CPU devices: dense, over the rows of ragged experts, and weight gradients, all by
   one kernel, since each big unrolled body costs a second of compilation at its first launch.

   A work-group is one work-item.  It packs a block of B (BLOCK_K x BLOCK_N, panels of NR columns) and one of A
   (BLOCK_M rows, strips of MR) into local memory, which on a CPU is plain memory of the size of the second-level
   cache, and multiplies strip by panel in registers: MR x NR sums in explicit vectors.  Storage types are converted,
   rows gathered and layouts transposed while packing, so all of that is free of cost behind it.  Kernels in the style
   of a GPU (tile in local memory, barriers, an element for each work-item) reach 3% of this one. */

/* ---- sizes --------------------------------------------------------------------------------------------------- */
#ifdef MOE_ST_F64
typedef double4 REAL4;
#define LOCAL_REALS (MOE_LOCAL_BYTES / 8)
#else
typedef float4 REAL4;
#define LOCAL_REALS (MOE_LOCAL_BYTES / 4)
#endif

/* The register tile: MR rows x NV vectors of sums, NV vectors of B and one element of A.  32 registers of AVX-512,
   16 of the others.  FEW: rows of the smaller tile for what is left. */
#if MOE_VW >= 16
#define MR 12
#define NV 2
#else
#define MR 4
#define NV 3
#endif
#define FEW 4
#define NR (NV * VW)

/* Blocks: (BLOCK_M + BLOCK_N) * BLOCK_K + BLOCK_M * BLOCK_N + BLOCK_N elements of local memory.  Sums over k run in
   ascending order inside a block of K and then over the blocks, whatever the number of rows. */
#if LOCAL_REALS >= 131072
#define BLOCK_K 256
#define BLOCK_M 96
#define BLOCK_N (256 / NR * NR)
#elif LOCAL_REALS >= 32768
#define BLOCK_K 128
#define BLOCK_M 48
#define BLOCK_N (128 / NR * NR)
#else
#define BLOCK_K 64
#define BLOCK_M 12
#define BLOCK_N (32 / NR * NR)
#endif

#define THIN_STEP 64 /* over k where there is one strip of rows: a divisor of BLOCK_K */
#define LA (BLOCK_M * BLOCK_K)

/* OpenCL's prefetch() does nothing on PoCL, its compiler's own does. */
#ifdef POCL_DEVICE_ADDRESS_BITS
#define PREFETCH(p) __builtin_prefetch((const void *)(ulong)(p), 0, 2) /* to the second-level cache */
#else
#define PREFETCH(p) (void)0
#endif
#define AHEAD 32 /* rows */

/* ---- packing ------------------------------------------------------------------------------------------------- */
FN REAL4 ld4(const GLOBAL ST *p)
{
#if defined(MOE_ST_BF16)
  return as_float4(convert_uint4(vload4(0, p)) << 16);
#elif defined(MOE_ST_F16)
  return vload_half4(0, (const GLOBAL half *)p);
#else
  return vload4(0, p);
#endif
}

/* x[i,k] is at i*i_stride + k*k_stride, where i or k goes through a map (one of them at most): map[i]/div. */
struct operand {
  const GLOBAL ST *x;
  const GLOBAL int *i_map, *k_map;
  long i_stride, k_stride;
  int div;
};
FN long mapped(const GLOBAL int *map, int div, long i)
{
  return map ? (long)(map[i] / div) : i;
}

#if VW == 16
/* 4 rows of 16 elements to 16 rows of 4, `step` apart: transposed inside the four 128-bit lanes, stored lane by lane.
   A whole 16 x 16 transposition has a quarter of the stores and twice the shuffles: no faster. */
FN void transpose(LOCAL REAL *p, int step, VEC a, VEC b, VEC c, VEC d)
{
#define EVEN(a, b) (VEC)(a.s01, b.s01, a.s45, b.s45, a.s89, b.s89, a.scd, b.scd)
#define ODD(a, b) (VEC)(a.s23, b.s23, a.s67, b.s67, a.sab, b.sab, a.sef, b.sef)
  const VEC ab0 = (VEC)(a.s0, b.s0, a.s1, b.s1, a.s4, b.s4, a.s5, b.s5, a.s8, b.s8, a.s9, b.s9, a.sc, b.sc, a.sd, b.sd);
  const VEC ab2 = (VEC)(a.s2, b.s2, a.s3, b.s3, a.s6, b.s6, a.s7, b.s7, a.sa, b.sa, a.sb, b.sb, a.se, b.se, a.sf, b.sf);
  const VEC cd0 = (VEC)(c.s0, d.s0, c.s1, d.s1, c.s4, d.s4, c.s5, d.s5, c.s8, d.s8, c.s9, d.s9, c.sc, d.sc, c.sd, d.sd);
  const VEC cd2 = (VEC)(c.s2, d.s2, c.s3, d.s3, c.s6, d.s6, c.s7, d.s7, c.sa, d.sa, c.sb, d.sb, c.se, d.se, c.sf, d.sf);
  const VEC w[4] = { EVEN(ab0, cd0), ODD(ab0, cd0), EVEN(ab2, cd2), ODD(ab2, cd2) };
  UNROLL for (int k = 0; k < 4; k++)
  {
    vstore4(w[k].s0123, 0, p + k * step);
    vstore4(w[k].s4567, 0, p + (k + 4) * step);
    vstore4(w[k].s89ab, 0, p + (k + 8) * step);
    vstore4(w[k].scdef, 0, p + (k + 12) * step);
  }
}
#endif

/* to[i/width][k][i%width] = x[i0+i, k0+k] for i < n, k < depth; `width` is MR or NR.  Past n, up to the next multiple
   of 4, stands row n-1 again, behind that anything: such sums are not stored. */
FN void pack(LOCAL REAL *to, int width, struct operand o, long i0, int n, long k0, int depth)
{
  if (!o.k_map && (o.k_stride == 1 || o.i_map)) {
    const long s = o.k_stride, ahead = o.i_map ? 0 : AHEAD * o.i_stride;
    for (int i = 0; i < n; i += 4) {
      const GLOBAL ST *x = o.x + k0 * s;
      const GLOBAL ST *x0 = x + mapped(o.i_map, o.div, i0 + i) * o.i_stride;
      const GLOBAL ST *x1 = x + mapped(o.i_map, o.div, i0 + MIN2(i + 1, n - 1)) * o.i_stride;
      const GLOBAL ST *x2 = x + mapped(o.i_map, o.div, i0 + MIN2(i + 2, n - 1)) * o.i_stride;
      const GLOBAL ST *x3 = x + mapped(o.i_map, o.div, i0 + MIN2(i + 3, n - 1)) * o.i_stride;
      LOCAL REAL *p = to + i / width * width * depth + i % width;
      int k = 0;
#if VW == 16
      for (; s == 1 && k + 16 <= depth; k += 16) {
        PREFETCH(x0 + k + ahead);
        PREFETCH(x1 + k + ahead);
        PREFETCH(x2 + k + ahead);
        PREFETCH(x3 + k + ahead);
        transpose(p + k * width, width, ldv(x0 + k), ldv(x1 + k), ldv(x2 + k), ldv(x3 + k));
      }
#endif
      for (; s == 1 && k + 4 <= depth; k += 4) {
        const REAL4 a = ld4(x0 + k), b = ld4(x1 + k), c = ld4(x2 + k), d = ld4(x3 + k);
        vstore4((REAL4)(a.x, b.x, c.x, d.x), 0, p + k * width);
        vstore4((REAL4)(a.y, b.y, c.y, d.y), 0, p + (k + 1) * width);
        vstore4((REAL4)(a.z, b.z, c.z, d.z), 0, p + (k + 2) * width);
        vstore4((REAL4)(a.w, b.w, c.w, d.w), 0, p + (k + 3) * width);
      }
      for (; k < depth; k++)
        vstore4((REAL4)(ld(x0, k * s), ld(x1, k * s), ld(x2, k * s), ld(x3, k * s)), 0, p + k * width);
    }
  } else {
    const long s = o.i_stride;
    for (int k = 0; k < depth; k++) {
      const GLOBAL ST *x = o.x + mapped(o.k_map, o.div, k0 + k) * o.k_stride + i0 * s;
      const int later = o.k_map ? MIN2(k + AHEAD / 2, depth - 1) : k + AHEAD / 2;
      const GLOBAL ST *next = o.x + mapped(o.k_map, o.div, k0 + later) * o.k_stride + i0 * s;
      LOCAL REAL *p = to + k * width;
      if (s == 1)
        for (int i = 0; i < n; i += 64 / (int)sizeof(ST)) PREFETCH(next + i);
      for (int i = 0; i < n; i += width, p += width * depth, x += width * s) {
        const int w = MIN2(width, n - i);
        int j = 0;
        for (; s == 1 && j + VW <= w; j += VW) VSTORE(ldv(x + j), 0, p + j);
        for (; s == 1 && j + 4 <= w; j += 4) vstore4(ld4(x + j), 0, p + j);
        for (; j < w; j++) p[j] = ld(x, j * s);
      }
    }
  }
}

/* ---- the register tile ----------------------------------------------------------------------------------------
   sums[i][j] = (go_on ? sums[i][j] : 0) + sum_k a[k][i] b[k][j], k ascending, i < ROWS of a strip of MR, j < NR.
   a*b + sum is contracted to fma; mad() is 0.6 times as fast on PoCL. */
#define TILE(name, ROWS)                                                                                               \
  FN void name(LOCAL REAL *sums, const LOCAL REAL *a, const LOCAL REAL *b, int depth, int go_on)                       \
  {                                                                                                                    \
    VEC s[ROWS][NV];                                                                                                   \
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int v = 0; v < NV; v++) s[i][v] = R(0.0);                        \
    if (go_on) {                                                                                                       \
      UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int v = 0; v < NV; v++) s[i][v] = VLOAD(i * NV + v, sums);     \
    }                                                                                                                  \
    for (int k = 0; k < depth; k++) {                                                                                  \
      VEC x[NV];                                                                                                       \
      UNROLL for (int v = 0; v < NV; v++) x[v] = VLOAD(v, b + k * NR);                                                 \
      UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int v = 0; v < NV; v++) s[i][v] += a[k * MR + i] * x[v];       \
    }                                                                                                                  \
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int v = 0; v < NV; v++) VSTORE(s[i][v], i *NV + v, sums);        \
  }
TILE(tile_few, FEW)
#if MR > FEW
TILE(tile, MR)
#else
#define tile tile_few
#endif

/* ---- the kernel ------------------------------------------------------------------------------------------------ */
/* One product: C of any float type and strides. */
struct product {
  struct operand a[2], b[2]; /* [1]: the second part of the sum over k, where there are two */
  GLOBAL uchar *c;
  const GLOBAL uchar *bias;
  long c_at, c_row, c_col, bias_at, bias_stride;
  long a_row, c_first, k_first, depth; /* where the expert's rows begin in A, in C and along k; extent of k */
  int parts, c_type, bias_type, bias_rows, accumulate;
  REAL alpha;
};

/* Rows of C as vectors can be stored: no, as REAL, in storage type. */
enum { SCALARS, REALS, STORED };
/* C[i.., j..] = alpha * sums + bias (+ C) for h x w elements.  bias is that of the columns; that of a row is read from
   the tensor. */
FN void store(const struct product *p, const LOCAL REAL *sums, const LOCAL REAL *bias, long i, long j, int h, int w,
              int rows, int biased, int add)
{
  for (int r = 0; r < h; r++) {
    const long at = p->c_at + (p->c_first + i + r) * p->c_row + j * p->c_col;
    const REAL shift =
        biased && p->bias_rows ? ldx(p->bias, p->bias_at + (i + r) * p->bias_stride, p->bias_type) : R(0.0);
    if (rows != SCALARS && w == NR) {
      GLOBAL REAL *c = (GLOBAL REAL *)p->c + at;
      GLOBAL ST *stored = (GLOBAL ST *)p->c + at;
      for (int v = 0; v < NR; v += VW) {
        VEC x = p->alpha * VLOAD(0, sums + r * NR + v);
        if (biased) x += VLOAD(0, bias + v) + shift;
        if (add) x += rows == REALS ? VLOAD(0, c + v) : ldv(stored + v);
        if (rows == REALS) VSTORE(x, 0, c + v);
        else stv(stored + v, x);
      }
    } else {
      for (int n = 0; n < w; n++) {
        REAL x = p->alpha * sums[r * NR + n];
        if (biased) x += bias[n] + shift;
        if (add) x += ldx(p->c, at + n * p->c_col, p->c_type);
        stx(p->c, at + n * p->c_col, p->c_type, x);
      }
    }
  }
}

/* Rows i0..i0+m-1, columns j0..j0+n-1 (n <= BLOCK_N) of a product.  Where C is stored as REAL along rows, the sums
   over each BLOCK_K are added up in C; else they go on in local memory, for BLOCK_M rows at a time. */
FN void block(const struct product *p, LOCAL REAL *la, LOCAL REAL *lb, LOCAL REAL *lc, LOCAL REAL *bias, long i0,
              long m, long j0, int n)
{
  const int c_rows = p->c_col != 1 ? SCALARS : p->c_type == DT_REAL ? REALS : p->c_type == DT_ST ? STORED : SCALARS;
  const int in_c = c_rows == REALS || (p->parts == 1 && p->depth <= BLOCK_K);
  /* One strip of rows uses B once, as fast as memory gives it: short steps, so that memory does not wait for the
     multiplication, in runs along B's rows.  A's strip is kept where it fits. */
  const int thin = m <= MR, step = thin ? THIN_STEP : BLOCK_K;
  const int columns = thin && p->b[0].k_stride == 1 ? NR : n;
  const int steps = (int)MAX2((p->depth + step - 1) / step, 1L), keep_a = thin && steps * p->parts * step <= LA / MR;
  const long rows = in_c ? m : BLOCK_M;
  for (int j = 0; j < n; j++)
    bias[j] = p->bias && !p->bias_rows ? ldx(p->bias, p->bias_at + (j0 + j) * p->bias_stride, p->bias_type) : R(0.0);
  for (long r0 = 0; r0 < m; r0 += rows) {
    const long r1 = MIN2(m, r0 + rows);
    for (int n0 = 0; n0 < n; n0 += columns) {
      const int n1 = MIN2(n, n0 + columns);
      for (int s = 0; s < steps * p->parts; s++) {
        const int part = s / steps;
        const long k = (long)(s % steps) * step;
        const int depth = (int)MIN2(p->depth - k, (long)step);
        const int first = part == 0 && k < BLOCK_K, end = k + depth == p->depth;
        const int go_on = in_c ? k % BLOCK_K != 0 : s > 0;
        const int done = in_c ? end || (k + step) % BLOCK_K == 0 : end && part == p->parts - 1;
        LOCAL REAL *a = la + (keep_a ? s * step * MR : 0);
        pack(lb, NR, p->b[part], j0 + n0, n1 - n0, p->k_first + k, depth);
        for (long m0 = r0; m0 < r1; m0 += BLOCK_M) {
          const long i1 = i0 + m0;
          const int high = (int)MIN2(r1 - m0, (long)BLOCK_M);
          if (!keep_a || n0 == 0) pack(a, MR, p->a[part], p->a_row + i1, high, p->k_first + k, depth);
          for (int j = n0; j < n1; j += NR) {
            for (int i = 0; i < high; i += MR) {
              LOCAL REAL *sums = lc + (in_c && !thin ? 0 : i * BLOCK_N + (j - n0) * MR);
              const LOCAL REAL *strip = a + i * depth, *panel = lb + (j - n0) * depth;
              const int left = MIN2(MR, high - i);
              if (MR > FEW && left > 2 * FEW) tile(sums, strip, panel, depth, go_on);
              else
                for (int r = 0; r < left; r += FEW) tile_few(sums + r * NR, strip + r, panel, depth, go_on);
              if (done)
                store(p, sums, bias + j, i1 + i, j0 + j, left, MIN2(NR, n1 - j), c_rows,
                      p->bias && (in_c ? first : done), p->accumulate || (in_c && !first));
            }
          }
        }
      }
    }
  }
}

#define DENSE 0
#define ROWS 1
#define WGRAD 2
#define STRIPS(rows) (((rows) + MR - 1) / MR)
/* What packing a block of B costs, in strips of A multiplied by it; what a block costs beside its depth, in k. */
#define PACK_COST 4
#define DEPTH_COST 16

/* C[e] = alpha * A[e] B[e]' + bias[e] (+ C[e]) for E experts, A [M,K], B [N,K], C [M,N], each with any strides:
     DENSE  M rows for each expert: one, or a batch
     ROWS   A's rows are those of the expert, offs[e]..offs[e+1], through the map if any; C's rows likewise
     WGRAD  k is a row of the expert, in A and in B, each through its map if any
   halves 2: two products an expert (a0 b0 to c0, a1 b1 to c1).  parts 2: one, summed over a0 b0 and then a1 b1.
   The grid is a few groups for each compute unit, whatever the shape.  All strips of all blocks of columns of all
   experts form one line, weighted by their cost; each group takes its share of it, to the strip, so that groups are
   equal whatever the experts' sizes, with the offsets read here.  A grid of tiles loses half of that where experts are
   skewed (PoCL gives the first half of a grid to one thread), and loses the reuse of a packed block of B.
   Bytes: A once for each BLOCK_N columns, B once for each group that has a share of it, C once (REAL) for each
   BLOCK_K. */
LOCAL_SIZE(1)
KERNEL(multiply)
(TENSOR(uchar, c0), TENSOR(uchar, c1), TENSOR(const ST, a0), TENSOR(const ST, a1), TENSOR(const ST, b0),
 TENSOR(const ST, b1), TENSOR(const uchar, bias0), TENSOR(const uchar, bias1), TENSOR(const int, offs),
 TENSOR(const int, a_map), TENSOR(const int, b_map), long E, long M, long N, long K, long c_expert, long c_row,
 long c_col, long a_expert, long a_row, long a_k, long b_expert, long b_row, long b_k, long bias_expert,
 long bias_stride, int mode, int halves, int parts, int a_div, int b_div, int c_type, int bias_type, int bias_rows,
 int accumulate, REAL alpha)
{
  LOCAL_ARRAY(REAL, la, BLOCK_M * BLOCK_K);
  LOCAL_ARRAY(REAL, lb, BLOCK_N * BLOCK_K);
  LOCAL_ARRAY(REAL, lc, BLOCK_M * BLOCK_N);
  LOCAL_ARRAY(REAL, bias, BLOCK_N);
  AT(a0);
  AT(a1);
  AT(b0);
  AT(b1);
  AT_OPT(offs);
  AT_OPT(a_map);
  AT_OPT(b_map);
  const GLOBAL int *none = 0;
  struct product p;
  p.c_row = c_row;
  p.c_col = c_col;
  p.bias_stride = bias_stride;
  p.parts = parts;
  p.c_type = c_type;
  p.bias_type = bias_type;
  p.bias_rows = bias_rows;
  p.accumulate = accumulate;
  p.alpha = alpha;

  /* Width of the blocks of columns: BLOCK_N at most, and no wider than a group's share of the rows is high. */
  long strips = 0, blocks = (N + BLOCK_N - 1) / BLOCK_N, width, line = 0;
  for (long e = 0; e < E; e++) strips += STRIPS(mode == ROWS ? offs[e + 1] - offs[e] : M);
  for (;; blocks *= 2) {
    width = ((N + blocks - 1) / blocks + NR - 1) / NR * NR;
    if (width == NR || 2 * strips * MR * blocks * halves >= GROUPS(0) * width) break;
  }
  blocks = (N + width - 1) / width;
  for (long e = 0; e < E; e++) {
    const long rows = mode == DENSE ? 0 : offs[e + 1] - offs[e], high = STRIPS(mode == ROWS ? rows : M);
    if (high) line += halves * blocks * (PACK_COST + high) * ((mode == WGRAD ? rows : K) + DEPTH_COST);
  }

  /* This group's share [from, to) of the line, as seen from the present place on it. */
  long from = line * GROUP(0) / GROUPS(0), to = line * (GROUP(0) + 1) / GROUPS(0);
  for (long e = 0; e < E && to > 0; e++) {
    const long begin = mode == DENSE ? 0 : offs[e], rows = mode == DENSE ? 0 : offs[e + 1] - begin;
    const long m = mode == ROWS ? rows : M, high = STRIPS(m);
    p.depth = mode == WGRAD ? rows : K;
    p.k_first = mode == WGRAD ? begin : 0;
    p.a_row = p.c_first = mode == ROWS ? begin : 0;
    if (high == 0) continue;
    const long unit = p.depth + DEPTH_COST, cost = (PACK_COST + high) * unit;
    for (long b = 0; b < halves * blocks; b++, from -= cost, to -= cost) {
      if (from >= cost || to <= 0) continue;
      const long first = MAX2(from / unit - PACK_COST, 0L), end = to >= cost ? high : MAX2(to / unit - PACK_COST, 0L);
      if (first >= end || (mode == WGRAD && accumulate && rows == 0)) continue;
      const int other = b >= blocks;
      const long j = b % blocks * width, i = first * MR;
      for (int part = 0; part < 2; part++) {
        const int second = other || part;
        struct operand *a = &p.a[part], *o = &p.b[part];
        a->x = (second ? a1 : a0) + e * a_expert;
        a->i_map = mode == ROWS ? a_map : none;
        a->k_map = mode == ROWS ? none : a_map;
        a->i_stride = a_row;
        a->k_stride = a_k;
        a->div = a_div;
        o->x = (second ? b1 : b0) + e * b_expert;
        o->i_map = none;
        o->k_map = b_map;
        o->i_stride = b_row;
        o->k_stride = b_k;
        o->div = b_div;
      }
      p.c = other ? c1 : c0;
      p.c_at = (other ? c1_at : c0_at) + e * c_expert;
      p.bias = other ? bias1 : bias0;
      p.bias_at = (other ? bias1_at : bias0_at) + e * bias_expert;
      block(&p, la, lb, lc, bias, i, MIN2(m, end * MR) - i, j, (int)MIN2(N - j, width));
    }
  }
}
