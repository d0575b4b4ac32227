/* stats.cl - looks for values that are NaN, infinite or too large, in many tensors at once. */

/* Magnitudes of IEEE 754 numbers order as their bits without the sign do, infinity and NaN above all others; so
   elements are compared as integers with the bits of the limit, and no type needs its arithmetic (nor a device
   fp64). */
#define NOT_BAD 0xffffffffu
#define TILE 16384 /* bytes that a group takes at a time */
#define TILES(n, dt) (((n)*DT_SIZE(dt) + TILE - 1) / TILE)

#define EACH_WATCHED(X) \
  X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

FN ulong magnitude(const GLOBAL uchar *a, long i, int width)
{
  if (width == 2) return ((const GLOBAL ushort *)a)[i] & 0x7fffu;
  if (width == 4) return ((const GLOBAL uint *)a)[i] & 0x7fffffffu;
  return ((const GLOBAL ulong *)a)[i] & 0x7fffffffffffffffUL;
}

/* The largest magnitude in this item's 16-byte chunks: of f64 the upper words, of bf16 and f16 both halves of a word.
   Four streams, so that a CPU has pages on the way while it waits for others; its only item goes by vectors. */
FN uint largest(const GLOBAL uchar *a, int chunks, int width)
{
  const GLOBAL uint *p = (const GLOBAL uint *)a;
  const uint mask = width == 2 ? 0x7fff0000u : 0x7fffffffu, even = width == 8 ? 0 : mask;
  uint most = 0;
#ifdef MOE_CPU
  const uint16 masks = (uint16)((uint2)(even, mask), (uint2)(even, mask), (uint2)(even, mask), (uint2)(even, mask),
                                (uint2)(even, mask), (uint2)(even, mask), (uint2)(even, mask), (uint2)(even, mask));
  const int words = 4 * chunks, part = words / 64 * 16;
  uint16 in[4] = { 0, 0, 0, 0 };
  uint lanes[16];
  for (int w = 0; w < part; w += 16) {
    UNROLL for (int k = 0; k < 4; k++) {
      const uint16 v = vload16(0, p + k * part + w);
      in[k] = max(in[k], v & masks);
      if (width == 2) in[k] = max(in[k], v << 16 & masks);
    }
  }
  vstore16(max(max(in[0], in[1]), max(in[2], in[3])), 0, lanes);
  for (int j = 0; j < 16; j++) most = MAX2(most, lanes[j]);
  for (int c = part; c < chunks; c++)
#else
  for (int c = LID; c < chunks; c += LSIZE)
#endif
  {
    const uint4 v = ((const GLOBAL uint4 *)p)[c];
    most = MAX2(most, v.x & even), most = MAX2(most, v.y & mask);
    most = MAX2(most, v.z & even), most = MAX2(most, v.w & mask);
    if (width == 2) {
      most = MAX2(most, v.x << 16 & mask), most = MAX2(most, v.y << 16 & mask);
      most = MAX2(most, v.z << 16 & mask), most = MAX2(most, v.w << 16 & mask);
    }
  }
  return width == 2 ? most >> 16 : most;
}

/* first[k] = min(first[k], index of the first bad element of a_k), for tensors of n elements of type dt (n 0: none).
   A tile is 16 KB of one tensor: the group's items take its 16-byte chunks in turn, keep the largest magnitude (of
   f64 the upper lower), and only where that reaches the limit go through their chunks again.  The minimum is an integer
   atomic, so the answer does not depend on the order.  Bytes: each tensor once. */
#define WATCHED(k) , TENSOR(const uchar, a##k), int dt##k, long n##k
KERNEL(watch)(TENSOR(uint, first), long tiles, long limit_f64, long limit_f32, long limit_bf16,
              long limit_f16 EACH_WATCHED(WATCHED))
{
  AT(first);
  for (long t = GROUP(0); t < tiles; t += GROUPS(0)) {
    const GLOBAL uchar *a = a0;
    long tile = t, n = 0;
    int which = -1, dt = DT_F32;
#define PICK(k)                                                                                                        \
  if (which < 0) {                                                                                                     \
    const long own = TILES(n##k, dt##k);                                                                               \
    if (tile < own) which = k, a = a##k + a##k##_at * DT_SIZE(dt##k), dt = dt##k, n = n##k;                            \
    else tile -= own;                                                                                                  \
  }
    EACH_WATCHED(PICK)
    const ulong limit =
        (ulong)(dt == DT_F64 ? limit_f64 : dt == DT_F32 ? limit_f32 : dt == DT_BF16 ? limit_bf16 : limit_f16);
    const int width = DT_SIZE(dt), per_chunk = 16 / width;
    const long begin = tile * (TILE / width), end = MIN2(n, begin + TILE / width);
    const int chunks = (ulong)a % 16 == 0 ? (int)((end - begin) / per_chunk) : 0; /* the rest goes one by one */
    const uint most = largest(a + begin * width, chunks, width);
    long bad = end;
    if (most >= (width == 8 ? (uint)(limit >> 32) : (uint)limit)) {
      for (int c = LID; c < chunks && bad == end; c += LSIZE)
        for (long i = begin + (long)c * per_chunk; i < begin + (long)(c + 1) * per_chunk && bad == end; i++)
          if (magnitude(a, i, width) >= limit) bad = i;
    }
    for (long i = begin + (long)chunks * per_chunk + LID; i < end && bad == end; i += LSIZE)
      if (magnitude(a, i, width) >= limit) bad = i;
    if (bad < end) ATOMIC_MIN(first + which, (uint)MIN2(bad, (long)NOT_BAD - 1));
  }
}

/* Adds what `first` holds to the record, in order, and clears it: one item. */
#define TAG(k) , long tag##k
KERNEL(watch_fold)(TENSOR(long, record), TENSOR(uint, first) EACH_WATCHED(TAG))
{
  AT(record);
  AT(first);
#define FOLD(k)                                                                                                        \
  if (first[k] != NOT_BAD) {                                                                                           \
    if (record[0] == 0) record[1] = tag##k, record[2] = (long)first[k];                                                \
    record[0]++;                                                                                                       \
    first[k] = NOT_BAD;                                                                                                \
  }
  EACH_WATCHED(FOLD)
}
