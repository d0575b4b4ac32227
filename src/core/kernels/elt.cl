/* elt.cl - element-wise maps, counter-based normal numbers, and the sum of a tensor. */
#ifndef MOE_CUDA
#pragma OPENCL FP_CONTRACT OFF
#endif

/* enum moe__elt of args.h */
#define COPY 0
#define FILL 1
#define ADD 2
#define MUL 3
#define AXPY 4
#define SIGMOID 5

/* y[n] = op(a, b), see moe__args_elt_map.  An item takes runs of chunks, each access is 16 bytes of storage;
   each operand is moved once.  y may be a or b: a chunk is read before it is written.  The types are uniform
   run-time arguments, so the tests on them cost a predicted branch a chunk; one kernel per combination of types was
   not kept. */
KERNEL(elt_map)(TENSOR(uchar, y), int ydt, TENSOR(const uchar, a), int adt, TENSOR(const uchar, b), int bdt,
                TENSOR(const REAL, scale), int op, long n, int run, REAL alpha)
{
  AT_OPT(scale);
  const REAL factor = scale ? alpha * scale[0] : alpha;
  const int y_wide = CHUNK_OK(y, y_at, ydt, 0, 1), a_wide = CHUNK_OK(a, a_at, adt, 0, 1);
  const int b_wide = CHUNK_OK(b, b_at, bdt, 0, 1);
  MAP_CHUNKS(i, n, run) {
    chunk r;
    if (op == FILL) {
      UNROLL EACH(j) r.v[j] = alpha;
    } else {
      r = ldx_chunk(a, a_at + i, 1, n - i, a_wide, adt);
    }
    if (op == COPY) {
      UNROLL EACH(j) r.v[j] *= factor;
    } else if (op == SIGMOID) {
      r = sigmoid_chunk(r, R(1.0), 0);
    } else if (op != FILL) {
      const chunk s = ldx_chunk(b, b_at + i, 1, n - i, b_wide, bdt);
      if (op == ADD) {
        UNROLL EACH(j) r.v[j] += s.v[j];
      } else if (op == MUL) {
        UNROLL EACH(j) r.v[j] *= s.v[j];
      } else {
        UNROLL EACH(j) r.v[j] = factor * r.v[j] + s.v[j];
      }
    }
    stx_chunk(y, y_at + i, 1, n - i, y_wide, ydt, r);
  }
}

/* The sum of the eight half-words of Philox, added to sum[j], for the counters (first + 2j, stream) of a chunk. */
FN void philox_sums(int *sum, ulong first, ulong stream, ulong seed)
{
  uint a[CHUNK], b[CHUNK], c[CHUNK], d[CHUNK];
  philox(a, b, c, d, CHUNK, first, 2, stream, seed);
  UNROLL EACH(j) {
    sum[j] += (int)((a[j] & 0xffffu) + (a[j] >> 16) + (b[j] & 0xffffu) + (b[j] >> 16) + (c[j] & 0xffffu) +
                    (c[j] >> 16) + (d[j] & 0xffffu) + (d[j] >> 16));
  }
}

/* y[i] = stddev * z.  With the 64-bit counters 2i and 2i+1 (low words first), the stream as the upper half
   of the counter and the seed as key, Philox gives eight words, 16 half-words h uniform in 0..65535:
     k = sum h - 16*65535/2 = sum h - 524280        an exact integer, |k| <= 524280
     z = k / sqrt(16 (2^32-1)/12)
   z has mean 0, variance 1, skewness 0, kurtosis 3 - (6/5)/16 = 2.925 (to 1e-9) and |z| < 6.93: a normal for
   any initialization.  The host folds stddev and the root into one constant, so that a value is one correctly
   rounded product (and one rounding to storage): the same bits on every device, which logarithms and cosines
   would not give.  Bytes: y once; the integer work (2 x 10 rounds) bounds it. */
KERNEL(elt_normal)(TENSOR(uchar, y), int ydt, long n, int run, long seed, long stream, REAL factor)
{
  const int wide = CHUNK_OK(y, y_at, ydt, 0, 1);
  MAP_CHUNKS(i, n, run) {
    int k[CHUNK];
    chunk r;
    UNROLL EACH(j) k[j] = -524280;
    philox_sums(k, 2 * (ulong)i, (ulong)stream, (ulong)seed);
    philox_sums(k, 2 * (ulong)i + 1, (ulong)stream, (ulong)seed);
    UNROLL EACH(j) r.v[j] = (REAL)k[j] * factor;
    stx_chunk(y, y_at + i, 1, n - i, wide, ydt, r);
  }
}

/* Sum of a, or of its squares, over [begin, end), this item's chunks of it.  Four chunks are in flight: there
   are few groups (MOE__PARTS), so each item must have that much on the way to fill a GPU's memory. */
FN REAL item_sum(const GLOBAL uchar *a, long at, int dt, long begin, long end, int wide, int square)
{
  const long step = (long)LSIZE * CHUNK;
  REAL sum[4];
  UNROLL for (int u = 0; u < 4; u++) sum[u] = R(0.0);
  for (long i = begin + LID * CHUNK; i < end; i += 4 * step) {
    chunk c[4];
    UNROLL for (int u = 0; u < 4; u++) c[u] = ldx_chunk(a, at + i + u * step, 1, end - i - u * step, wide, dt);
    UNROLL for (int u = 0; u < 4; u++) {
      UNROLL EACH(j) sum[u] += square ? c[u].v[j] * c[u].v[j] : c[u].v[j];
    }
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
/* First step of y = sum(a) or sum(a^2): group p sums elements [p*length, (p+1)*length) into scratch[p]: items
   serially over their chunks, then a tree.  The shape depends on n and the local size only.  Reads a once; one
   dispatch on the type, so that the loop has no branch on it. */
KERNEL(elt_sum_parts)(TENSOR(REAL, scratch), TENSOR(const uchar, a), int adt, long n, long length, int square)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(scratch);
  const int wide = CHUNK_OK(a, a_at, adt, length, 1);
  const long begin = GROUP(0) * length, end = MIN2(n, begin + length);
  REAL sum;
  if (adt == DT_F32) sum = item_sum(a, a_at, DT_F32, begin, end, wide, square);
  else if (adt == DT_BF16) sum = item_sum(a, a_at, DT_BF16, begin, end, wide, square);
  else if (adt == DT_F16) sum = item_sum(a, a_at, DT_F16, begin, end, wide, square);
  else sum = item_sum(a, a_at, DT_F64, begin, end, wide, square);
  GROUP_SUM(sum, sum, buf);
  if (LID == 0) scratch[GROUP(0)] = sum;
}
/* Second step: y[0] (+)= alpha * sum of the parts, by one group. */
KERNEL(elt_sum_final)(TENSOR(REAL, y), TENSOR(const REAL, scratch), int parts, int accumulate, REAL alpha)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(y);
  AT(scratch);
  REAL sum = R(0.0);
  for (int p = LID; p < parts; p += LSIZE) sum += scratch[p];
  GROUP_SUM(sum, sum, buf);
  if (LID == 0) y[0] = (accumulate ? y[0] : R(0.0)) + alpha * sum;
}
