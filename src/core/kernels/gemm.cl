/* gemm.cl - matrix products: dense, over the rows of ragged experts, and weight gradients.

   All stand on one engine: a work-group of 256 items, as 16 x 16, makes one tile of 16T x 16T outputs, T x T
   of them in each item's registers.  Along k both operands come TK = 64/T at a time into local memory, one quad
   (four neighbours in storage) an item, whatever the strides; there it stands k by k, TK lines of 16T, so that
   an item reads its 2T values in vectors.  Two buffers make one barrier a step enough, and the next step's loads
   are under way during the present one.  T is 8, or 4 for small products and for doubles; local memory is 32 KiB
   at most.
   An output has one accumulator, a REAL, that takes its products in ascending k: its bits do not depend on T,
   on the grid or on the other rows.  Bytes moved: each operand once for each tile across the other.
   Why not simpler: without register tiles local memory is the limit (a third of this speed), and without loads
   ahead every step waits for memory. */

#define GROUP_ITEMS 256
#define ROLLED _Pragma("unroll 1")
#define TK(T) (64 / (T))
#define TILE_REALS 1024 /* 16T * TK */
#ifdef MOE_ST_F64
#define VEC double2
#else
#define VEC float4
#endif
/* Two buffers of two tiles, or at the end 64 lines of outputs; vectors for their alignment. */
#define TILES(name, T) LOCAL_ARRAY(VEC, name, (T)*1024 * sizeof(REAL) / sizeof(VEC))

/* Lines of a tile are swizzled every 4 k's: then the transposing stores and the vector loads are both free of
   bank conflicts, without padding. */
#define SWIZZLED(k, i, T) ((i) ^ ((k) / 4 * 2 * (T)))

/* This item's place among the 16 x 16: a warp of 32 is 4 x 8, so that it reads few different words. */
#define ITEM_M ((LID >> 3 & 3) | LID >> 6 << 2)
#define ITEM_N ((LID & 7) | (LID >> 5 & 1) << 3)

/* for q < T/4, in a form that can be unrolled before T is known to be a constant */
#define QUADS(q, T)                                                                                                    \
  for (int q = 0; q < 2; q++)                                                                                          \
    if (q < (T) / 4)

/* ---- quads: four neighbours of an operand -------------------------------------------------------------- */
/* As they stand in storage: conversion waits until they go to local memory, else it would wait for the load. */
typedef struct {
#if defined(MOE_ST_F64)
  double2 lo, hi;
#elif defined(MOE_ST_F32)
  float4 v;
#else
  uint2 v;
#endif
} quad;

/* The first n, `step` apart; the rest are 0.  wide: adjacent and aligned. */
FN void ld_quad(quad *q, const GLOBAL ST *p, long step, int n, int wide)
{
#define PART(i) (i < n ? p[i * step] : 0)
#if defined(MOE_ST_F64)
  if (wide && n >= 4) q->lo = *(const GLOBAL double2 *)p, q->hi = *(const GLOBAL double2 *)(p + 2);
  else q->lo.x = PART(0), q->lo.y = PART(1), q->hi.x = PART(2), q->hi.y = PART(3);
#elif defined(MOE_ST_F32)
  if (wide && n >= 4) q->v = *(const GLOBAL float4 *)p;
  else q->v.x = PART(0), q->v.y = PART(1), q->v.z = PART(2), q->v.w = PART(3);
#else
  if (wide && n >= 4) q->v = *(const GLOBAL uint2 *)p;
  else q->v.x = PART(0) | (uint)PART(1) << 16, q->v.y = PART(2) | (uint)PART(3) << 16;
#endif
#undef PART
}

FN void quad_values(REAL *v, const quad *q)
{
#if defined(MOE_ST_F64)
  v[0] = q->lo.x, v[1] = q->lo.y, v[2] = q->hi.x, v[3] = q->hi.y;
#elif defined(MOE_ST_F32)
  v[0] = q->v.x, v[1] = q->v.y, v[2] = q->v.z, v[3] = q->v.w;
#elif defined(MOE_ST_BF16)
  v[0] = AS_FLOAT(q->v.x << 16), v[1] = AS_FLOAT(q->v.x & 0xffff0000u);
  v[2] = AS_FLOAT(q->v.y << 16), v[3] = AS_FLOAT(q->v.y & 0xffff0000u);
#else
  v[0] = half_to_float((ushort)q->v.x), v[1] = half_to_float((ushort)(q->v.x >> 16));
  v[2] = half_to_float((ushort)q->v.y), v[3] = half_to_float((ushort)(q->v.y >> 16));
#endif
}

FN void local_get(REAL *v, const LOCAL REAL *p)
{
#ifdef MOE_ST_F64
  const double2 lo = *(const LOCAL double2 *)p, hi = *(const LOCAL double2 *)(p + 2);
  v[0] = lo.x, v[1] = lo.y, v[2] = hi.x, v[3] = hi.y;
#else
  const float4 q = *(const LOCAL float4 *)p;
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
#endif
}
FN void local_put(LOCAL REAL *p, const REAL *v)
{
#ifdef MOE_ST_F64
  double2 lo, hi;
  lo.x = v[0], lo.y = v[1], hi.x = v[2], hi.y = v[3];
  *(LOCAL double2 *)p = lo, *(LOCAL double2 *)(p + 2) = hi;
#else
  float4 q;
  q.x = v[0], q.y = v[1], q.z = v[2], q.w = v[3];
  *(LOCAL float4 *)p = q;
#endif
}

/* ---- operands ------------------------------------------------------------------------------------------- */
/* Row i of a tensor is row at[i]/div; the division is by a multiplication (moe__divide). */
typedef struct {
  const GLOBAL int *at; /* NULL: the identity */
  long mul;
  int shift;
} row_map;
FN long map_row(const row_map *map, int entry)
{
  return (long)((ulong)entry * (ulong)map->mul >> map->shift);
}

/* One operand of a tile: 16T "lines" (rows of a, of b) by all k, as one item sees it.  Its quads lie along k or
   across, along the lines. */
typedef struct {
  const GLOBAL ST *x;
  long at;         /* of the present quad in x; at row 0 where k goes by a map */
  long step, next; /* elements between the neighbours of a quad; from k to k + 1 */
  int k, lines;    /* the quad's first k in a step; how many of its elements are on lines that exist */
  int slot;        /* its place in the tile */
  int across, wide;
  row_map map; /* of the k's, from the item's present one on */
  int entry;   /* what it holds there */
} operand;

/* Lines first.. of x, `stride` apart, of which `lines` exist; quads along k go by a map where `rows` has one, and
   repeat the last line past the end: those outputs are dropped. */
FN void operand_of(operand *o, const GLOBAL ST *x, long stride, long next, long first, int lines, const row_map *rows,
                   int across, int T)
{
  const int line = across ? LID % (4 * T) * 4 : LID / (16 / T);
  long row = first + (across ? line : MIN2(line, lines - 1));
  if (!across && rows->at) row = map_row(rows, rows->at[row]);
  o->k = across ? LID / (4 * T) : LID % (16 / T) * 4;
  o->x = x, o->at = row * stride + o->k * next;
  o->step = across ? stride : next, o->next = next;
  o->lines = across ? MAX2(MIN2(lines - line, 4), 0) : 4;
  o->slot = o->k * 16 * T + SWIZZLED(o->k, line, T);
  o->across = across;
  o->wide = o->step == 1 && (ulong)(x + o->at) % (sizeof(ST) == 2 ? 8 : 16) == 0;
}
/* k's are rows of the tensor by a map: entries first.., K of them. */
FN void along_map(operand *o, const row_map *rows, long first, long K)
{
  o->map = *rows;
  if (rows->at) {
    o->map.at += first + o->k;
    o->at -= o->k * o->next;
    o->wide = o->wide && o->next % 4 == 0;
    o->entry = o->k < K ? *o->map.at : 0;
  }
}
/* Quads lie along k, unless lines are nearer to each other than k's are. */
#define ACROSS(stride, next) ((next) != 1 && ((stride) == 1 || (stride) < (next)))

/* Loads this item's quad of the next step, of which `left` k's exist (absent elements are 0), and moves on. */
FN void fetch(quad *q, operand *o, int left, int maps, int T)
{
  long at = o->at;
  if (maps && o->map.at) {
    at += map_row(&o->map, o->entry) * o->next;
    o->map.at += TK(T);
    o->entry = o->k + TK(T) < left ? *o->map.at : 0;
  } else if (left > TK(T)) o->at += TK(T) * o->next;
  left -= o->k;
  ld_quad(q, o->x + at, o->step, left <= 0 ? 0 : o->across ? o->lines : left, o->wide);
}

FN void put(LOCAL REAL *tile, const quad *q, const operand *o, int T)
{
  LOCAL REAL *p = tile + o->slot;
  REAL v[4];
  quad_values(v, q);
  if (o->across) local_put(p, v);
  else UNROLL for (int i = 0; i < 4; i++) p[i * 16 * T] = v[i];
}

FN void multiply_quads(REAL *acc, const REAL *x, const REAL *y)
{
  UNROLL for (int i = 0; i < 16; i++) acc[i] = fma(x[i / 4], y[i % 4], acc[i]);
}
FN void multiply_step(REAL *acc, const LOCAL REAL *a, const LOCAL REAL *b, int T)
{
  UNROLL for (int k = 0; k < 16; k++) if (k < TK(T))
  {
    REAL x[8], y[8];
    UNROLL QUADS(q, T)
    {
      local_get(x + 4 * q, a + (k * 16 * T + 64 * q) + SWIZZLED(k, 4 * ITEM_M, T));
      local_get(y + 4 * q, b + (k * 16 * T + 64 * q) + SWIZZLED(k, 4 * ITEM_N, T));
    }
    UNROLL QUADS(i, T) UNROLL QUADS(j, T) multiply_quads(acc + 32 * i + 16 * j, x + 4 * i, y + 4 * j);
  }
}

/* acc += a b' over K.  Item (m, n) has T/4 x T/4 quads of 4 x 4: acc[32p + 16q + 4i + j] is line 64p + 4m + i of a
   with line 64q + 4n + j of b. */
FN void multiply(REAL *acc, LOCAL REAL *tiles, operand *a, operand *b, long K, int maps, int T)
{
  LOCAL REAL *now = tiles, *then = tiles + 2 * TILE_REALS;
  const int first = (int)MIN2(K, 2 * TK(T));
  quad qa, qb;
  fetch(&qa, a, first, maps, T);
  fetch(&qb, b, first, maps, T);
  put(now, &qa, a, T);
  put(now + TILE_REALS, &qb, b, T);
  BARRIER();
  for (long left = K - TK(T); left > -TK(T); left -= TK(T)) {
    LOCAL REAL *was = now;
    const int some = (int)MIN2(left, 2 * TK(T));
    fetch(&qa, a, some, maps, T);
    fetch(&qb, b, some, maps, T);
    multiply_step(acc, now, now + TILE_REALS, T);
    put(then, &qa, a, T);
    put(then + TILE_REALS, &qb, b, T);
    BARRIER();
    now = then, then = was;
  }
}

/* ---- results --------------------------------------------------------------------------------------------- */
/* A tile's place in the result: c[m * ms + n * ns] (+)= alpha * acc + bias[n * bias_ns], m < rows, n < columns. */
typedef struct {
  GLOBAL uchar *c;
  long at, ms, ns;
  int rows, columns, dt, accumulate;
  REAL alpha;
  const GLOBAL uchar *bias; /* or NULL */
  long bias_at, bias_ns;
  int bias_dt;
} result;

/* Through local memory, 64 lines at a time, so that neighbouring items write neighbouring elements whichever way
   c lies; four elements of an item at once, so that reads of c overlap. */
FN void store_tile(const result *r, REAL *acc, LOCAL REAL *tiles, int T)
{
  const int down = r->ms < r->ns; /* neighbouring items take neighbouring lines */
  REAL bias[8];
  UNROLL for (int j = 0; j < 8; j++)
  {
    const int n = 64 * (j / 4) + 4 * ITEM_N + j % 4;
    bias[j] = r->bias && n < r->columns ? ldx(r->bias, r->bias_at + n * r->bias_ns, r->bias_dt) : R(0.0);
  }
  UNROLL QUADS(part, T)
  {
    UNROLL for (int i = 0; i < 4; i++)
    {
      const int m = 4 * ITEM_M + i;
      UNROLL QUADS(q, T)
      {
        REAL v[4];
        UNROLL for (int j = 0; j < 4; j++) v[j] = fma(r->alpha, acc[32 * part + 16 * q + 4 * i + j], bias[4 * q + j]);
        local_put(tiles + m * 16 * T + 64 * q + (4 * ITEM_N ^ (m & 7) * 4), v);
      }
    }
    BARRIER();
    ROLLED for (int s = LID; s < 64 * 16 * T; s += 4 * GROUP_ITEMS)
    {
      REAL v[4];
      long at[4];
      UNROLL for (int j = 0; j < 4; j++)
      {
        const int i = s + j * GROUP_ITEMS;
        const int m = down ? i % 64 : i / (16 * T), n = down ? i / 64 : i % (16 * T);
        at[j] = 64 * part + m < r->rows && n < r->columns ? r->at + (64 * part + m) * r->ms + n * r->ns : -1;
        v[j] = tiles[m * 16 * T + (n ^ (m & 7) * 4)];
      }
      if (r->accumulate) {
        UNROLL for (int j = 0; j < 4; j++) if (at[j] >= 0) v[j] += ldx(r->c, at[j], r->dt);
      }
      UNROLL for (int j = 0; j < 4; j++) if (at[j] >= 0) stx(r->c, at[j], r->dt, v[j]);
    }
    BARRIER();
  }
}

/* ---- gemm ------------------------------------------------------------------------------------------------ */
/* c[r,n] = alpha * sum_k a[map(r),k] b[e(r),n,k] + bias[e(r),n] (+ c): a [M,K], b [E,N,K]; e(r) is the expert whose
   rows hold r.  Without offs each of the E experts has M rows of its own, a [E,M,K] and c [E,M,N]: gemm and its batch.
   SPLIT_N: N is that of one half, columns N..2N-1 are b1's.  SPLIT_K: K is that of one half, k in K..2K-1 is b1's.

   A group takes one tile; groups of the same rows are neighbours, so that they share a's rows in the cache.
   With offs the row tiles begin anew at each expert: tile number t belongs to the last expert e with
   e + offs[e]/16T <= t.  These starts ascend with e, leave each expert room for ceil(rows/16T) tiles and end
   at E + R/16T, so that a binary search finds the expert and the host need not know the split; tiles past an
   expert's rows end at once. */
#define GEMM_PARAMETERS                                                                                                \
  TENSOR(uchar, c), long c_es, long c_ms, long c_ns, int c_dt, TENSOR(const ST, a), long a_es, long a_ms, long a_ks,   \
      TENSOR(const ST, b0), long b0_es, long b0_ns, long b0_ks, TENSOR(const ST, b1), long b1_es, long b1_ns,          \
      long b1_ks, TENSOR(const uchar, bias0), long bias0_es, long bias0_ns, TENSOR(const uchar, bias1), long bias1_es, \
      long bias1_ns, int bias_dt, TENSOR(const int, offs), TENSOR(const int, map), long map_mul, int map_shift,        \
      long M, int E, long N, long K, int split, REAL alpha, int accumulate
#define GEMM_ARGUMENTS                                                                                                 \
  c, c_at, c_es, c_ms, c_ns, c_dt, a, a_at, a_es, a_ms, a_ks, b0, b0_at, b0_es, b0_ns, b0_ks, b1, b1_at, b1_es,        \
      b1_ns, b1_ks, bias0, bias0_at, bias0_es, bias0_ns, bias1, bias1_at, bias1_es, bias1_ns, bias_dt, offs,           \
      offs_at, map, map_at, map_mul, map_shift, M, E, N, K, split, alpha, accumulate
#define SPLIT_N 1
#define SPLIT_K 2

FN void gemm(GEMM_PARAMETERS, LOCAL REAL *tiles, int T)
{
  AT(a);
  AT(b0);
  AT_OPT(b1);
  AT_OPT(offs);
  AT_OPT(map);
  const int across = (int)((N + 16 * T - 1) / (16 * T)), of_rows = across * (split == SPLIT_N ? 2 : 1);
  const int group = (int)GROUP(0), row_tile = group / of_rows, column_tile = group % of_rows;
  const int second = column_tile >= across, down = (int)((M + 16 * T - 1) / (16 * T));
  const long n0 = (long)(column_tile - second * across) * 16 * T;
  int e = offs ? 0 : row_tile / down;
  long begin = (long)(row_tile - e * down) * 16 * T, end = M;
  if (offs) {
    int last = E - 1;
    while (e < last) {
      const int middle = e + (last - e + 1) / 2;
      if (middle + offs[middle] / (16 * T) <= row_tile) e = middle;
      else last = middle - 1;
    }
    begin = offs[e] + (long)(row_tile - e - offs[e] / (16 * T)) * 16 * T;
    end = offs[e + 1];
  }
  if (begin < end) {
    const int rows = (int)MIN2(end - begin, 16 * T), columns = (int)MIN2(N - n0, 16 * T);
    row_map mapped, none;
    mapped.at = map, mapped.mul = map_mul, mapped.shift = map_shift;
    none.at = 0, none.mul = 0, none.shift = 0;
    REAL acc[64];
    UNROLL for (int i = 0; i < 64; i++) acc[i] = R(0.0);
    for (int part = 0; part < (split == SPLIT_K ? 2 : 1); part++) {
      const int which = second + part;
      const GLOBAL ST *b = which ? b1 : b0;
      const long es = which ? b1_es : b0_es, ns = which ? b1_ns : b0_ns, ks = which ? b1_ks : b0_ks;
      operand oa, ob;
      operand_of(&oa, a + e * a_es + part * K * a_ks, a_ms, a_ks, begin, rows, &mapped, !map && ACROSS(a_ms, a_ks), T);
      operand_of(&ob, b + e * es, ns, ks, n0, columns, &none, ACROSS(ns, ks), T);
      multiply(acc, tiles, &oa, &ob, K, 0, T);
    }
    result r;
    r.c = c, r.at = c_at + e * c_es + begin * c_ms + (second * N + n0) * c_ns, r.ms = c_ms, r.ns = c_ns, r.dt = c_dt;
    r.rows = rows, r.columns = columns, r.accumulate = accumulate, r.alpha = alpha;
    r.bias = second ? bias1 : bias0, r.bias_dt = bias_dt, r.bias_ns = second ? bias1_ns : bias0_ns;
    r.bias_at = second ? bias1_at + e * bias1_es : bias0_at + e * bias0_es;
    r.bias_at += n0 * r.bias_ns;
    store_tile(&r, acc, tiles, T);
  }
}

KERNEL(LOCAL_SIZE(GROUP_ITEMS) gemm_64)(GEMM_PARAMETERS)
{
  TILES(tiles, 4);
  gemm(GEMM_ARGUMENTS, (LOCAL REAL *)tiles, 4);
}
#ifndef MOE_ST_F64
KERNEL(LOCAL_SIZE(GROUP_ITEMS) gemm_128)(GEMM_PARAMETERS)
{
  TILES(tiles, 8);
  gemm(GEMM_ARGUMENTS, (LOCAL REAL *)tiles, 8);
}
#endif

/* ---- wgrad ------------------------------------------------------------------------------------------------ */
/* c[e,m,n] (+)= sum over rows r of e of p[pmap(r),m] q[qmap(r),n]: k goes over the expert's rows.  An expert without
   rows gives 0.  parts = 2: M is that of one half, p's columns M..2M-1 go to c1.
   A group takes one tile of one expert and reads p and q of its rows once; the map entries are loaded two
   tiles ahead, the rows one. */
#define WGRAD_PARAMETERS                                                                                               \
  TENSOR(uchar, c0), long c0_es, long c0_ms, long c0_ns, TENSOR(uchar, c1), long c1_es, long c1_ms, long c1_ns,        \
      int c_dt, TENSOR(const ST, p), long p_rs, long p_ms, TENSOR(const ST, q), long q_rs, long q_ns,                  \
      TENSOR(const int, offs), TENSOR(const int, pmap), long pmap_mul, int pmap_shift, TENSOR(const int, qmap),        \
      long qmap_mul, int qmap_shift, long M, long N, int parts, int accumulate
#define WGRAD_ARGUMENTS                                                                                                \
  c0, c0_at, c0_es, c0_ms, c0_ns, c1, c1_at, c1_es, c1_ms, c1_ns, c_dt, p, p_at, p_rs, p_ms, q, q_at, q_rs, q_ns,      \
      offs, offs_at, pmap, pmap_at, pmap_mul, pmap_shift, qmap, qmap_at, qmap_mul, qmap_shift, M, N, parts, accumulate

FN void wgrad(WGRAD_PARAMETERS, LOCAL REAL *tiles, int T)
{
  AT_OPT(p);
  AT_OPT(q);
  AT(offs);
  AT_OPT(pmap);
  AT_OPT(qmap);
  const int down = (int)((M + 16 * T - 1) / (16 * T)), across = (int)((N + 16 * T - 1) / (16 * T));
  const int group = (int)GROUP(0), row_tile = group / across % (down * parts);
  const long e = group / across / (down * parts);
  const int second = row_tile >= down;
  const long m0 = (long)(row_tile - second * down) * 16 * T, n0 = (long)(group % across) * 16 * T;
  const int rows = (int)MIN2(M - m0, 16 * T), columns = (int)MIN2(N - n0, 16 * T);
  const long begin = offs[e], K = offs[e + 1] - begin;
  row_map pm, qm;
  pm.at = pmap, pm.mul = pmap_mul, pm.shift = pmap_shift;
  qm.at = qmap, qm.mul = qmap_mul, qm.shift = qmap_shift;
  REAL acc[64];
  UNROLL for (int i = 0; i < 64; i++) acc[i] = R(0.0);
  operand oa, ob;
  operand_of(&oa, pmap ? p : p + begin * p_rs, p_ms, p_rs, second * M + m0, rows, &pm, 1, T);
  operand_of(&ob, qmap ? q : q + begin * q_rs, q_ns, q_rs, n0, columns, &qm, 1, T);
  along_map(&oa, &pm, begin, K);
  along_map(&ob, &qm, begin, K);
  multiply(acc, tiles, &oa, &ob, K, 1, T);
  result r;
  r.c = second ? c1 : c0, r.ms = second ? c1_ms : c0_ms, r.ns = second ? c1_ns : c0_ns, r.dt = c_dt;
  r.at = (second ? c1_at + e * c1_es : c0_at + e * c0_es) + m0 * r.ms + n0 * r.ns;
  r.rows = rows, r.columns = columns, r.accumulate = accumulate, r.alpha = R(1.0);
  r.bias = 0, r.bias_at = 0, r.bias_ns = 0, r.bias_dt = 0;
  store_tile(&r, acc, tiles, T);
}

KERNEL(LOCAL_SIZE(GROUP_ITEMS) wgrad_64)(WGRAD_PARAMETERS)
{
  TILES(tiles, 4);
  wgrad(WGRAD_ARGUMENTS, (LOCAL REAL *)tiles, 4);
}
#ifndef MOE_ST_F64
KERNEL(LOCAL_SIZE(GROUP_ITEMS) wgrad_128)(WGRAD_PARAMETERS)
{
  TILES(tiles, 8);
  wgrad(WGRAD_ARGUMENTS, (LOCAL REAL *)tiles, 8);
}
#endif
