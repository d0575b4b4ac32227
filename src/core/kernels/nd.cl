/* nd.cl - maps and reductions over strided tensors, and dropout.

   The launcher drops extents of 1, puts the dimensions in the order of their strides and merges those that are
   contiguous in every operand.  What is left is an inner dimension of N elements, walked in chunks (the last one of
   a row may be short), and up to OUTER others, fastest first.  A place in them is a number in rows of
   CHUNK*ceil(N/CHUNK), so that a tensor that is packed, as most are, is one row and needs no division. */

#define OUTER 5

/* enum moe__nd of args.h; from ND_RELU on: an activation */
#define ND_COPY 0
#define ND_ADD 1
#define ND_SUB 2
#define ND_MUL 3
#define ND_DIV 4
#define ND_MAX 5
#define ND_GREATER 6
#define ND_EQUAL 7
#define ND_WHERE 8
#define ND_POW 9
#define ND_EXP 10
#define ND_LOG 11
#define ND_SQRT 12
#define ND_TANH 13
#define ND_ERF 14
#define ND_RELU 15
#define ND_SIGMOID 16
#define ND_SILU 17
#define ND_GELU 18

/* more dtype codes of moe/tensor.h */
#define DT_I64 7
#define DT_I32 8
#define DT_U8 9

CHUNK_FN(log)
CHUNK_FN(sqrt)
CHUNK_FN(tanh)
CHUNK_FN(erf)

FN chunk pow_chunk(chunk c, REAL exponent)
{
#ifdef MOE_CUDA
  UNROLL EACH(j) c.v[j] = pow(c.v[j], exponent);
#else
  chunk e;
  UNROLL EACH(j) e.v[j] = exponent;
  CHUNK_STORE(pow(CHUNK_LOAD(0, c.v), CHUNK_LOAD(0, e.v)), 0, c.v);
#endif
  return c;
}

/* ---- places -------------------------------------------------------------------------------------------- */
/* Five numbers of one operand, as arguments of a kernel and as an array. */
#define FIVE(name) long name##0, long name##1, long name##2, long name##3, long name##4
#define FIVE_ARRAY(name) const long name[OUTER] = { name##0, name##1, name##2, name##3, name##4 }
/* ... as one that a power of two divides where it divides all: for CHUNK_OK */
#define FIVE_OR(name) (name##0 | name##1 | name##2 | name##3 | name##4)

/* n/d for n >= 0, d > 0: most numbers are short, and the division of those is several times faster. */
FN long quotient(long n, long d)
{
  return (n | d) >> 32 ? n / d : (long)((uint)n / (uint)d);
}
/* The index of row number `row` in the first n dimensions; 0 in the others. */
FN void unravel(long *index, long row, const long *extent, int n)
{
  UNROLL for (int d = 0; d < OUTER; d++) {
    const long next = d + 1 < n ? quotient(row, extent[d]) : 0;
    index[d] = d < n ? row - next * extent[d] : 0;
    row = next;
  }
}
FN long place(const long *index, const long *stride)
{
  long at = 0;
  UNROLL for (int d = 0; d < OUTER; d++) at += index[d] * stride[d];
  return at;
}
/* Where row number `row` begins. */
FN long row_place(long row, int n, const long *extent, const long *stride)
{
  long index[OUTER];
  if (n == 0) return 0;
  if (n == 1) return row * stride[0];
  unravel(index, row, extent, n);
  return place(index, stride);
}
/* The row of place i of a walk over rows of `width`; n: the dimensions that number the rows. */
FN long row_of(long i, long width, int n)
{
  return n ? quotient(i, width) : 0;
}
FN long width_of(long N)
{
  return (N + CHUNK - 1) / CHUNK * CHUNK;
}

/* A chunk as of ldx_chunk; of a stride of 0, one element. */
FN REAL nd_value(const GLOBAL uchar *p, long i, int dt)
{
  if (dt == DT_U8) return (REAL)p[i];
  if (dt == DT_I32) return (REAL)((const GLOBAL int *)p)[i];
  return ldx(p, i, dt);
}
FN chunk nd_chunk(const GLOBAL uchar *p, long i, long stride, long left, int wide, int dt)
{
  chunk c;
  if (stride == 0) {
    const REAL v = nd_value(p, i, dt);
    UNROLL EACH(j) c.v[j] = v;
  } else if (dt == DT_U8 || dt == DT_I32) {
    UNROLL EACH(j) c.v[j] = j < left ? nd_value(p, i + j * stride, dt) : R(0.0);
  } else {
    c = ldx_chunk(p, i, stride, left, wide, dt);
  }
  return c;
}

/* ---- maps ---------------------------------------------------------------------------------------------- */
FN chunk nd_apply(int op, chunk a, chunk b, chunk c, REAL alpha)
{
  chunk slope;
  if (op == ND_COPY) {
    UNROLL EACH(j) a.v[j] *= alpha;
  } else if (op == ND_ADD) {
    UNROLL EACH(j) a.v[j] += b.v[j];
  } else if (op == ND_SUB) {
    UNROLL EACH(j) a.v[j] -= b.v[j];
  } else if (op == ND_MUL) {
    UNROLL EACH(j) a.v[j] *= b.v[j];
  } else if (op == ND_DIV) {
    UNROLL EACH(j) a.v[j] /= b.v[j];
  } else if (op == ND_MAX) {
    UNROLL EACH(j) a.v[j] = a.v[j] > b.v[j] || IS_NAN(a.v[j]) ? a.v[j] : b.v[j];
  } else if (op == ND_GREATER) {
    UNROLL EACH(j) a.v[j] = a.v[j] > b.v[j] ? R(1.0) : R(0.0);
  } else if (op == ND_EQUAL) {
    UNROLL EACH(j) a.v[j] = a.v[j] == b.v[j] ? R(1.0) : R(0.0);
  } else if (op == ND_WHERE) {
    UNROLL EACH(j) a.v[j] = a.v[j] != R(0.0) ? b.v[j] : c.v[j];
  } else if (op == ND_POW) {
    a = pow_chunk(a, alpha);
  } else if (op == ND_EXP) {
    a = exp_chunk(a);
  } else if (op == ND_LOG) {
    a = log_chunk(a);
  } else if (op == ND_SQRT) {
    a = sqrt_chunk(a);
  } else if (op == ND_TANH) {
    a = tanh_chunk(a);
  } else if (op == ND_ERF) {
    a = erf_chunk(a);
  } else {
    activate(a,
             op == ND_RELU      ? ACT_RELU
             : op == ND_SIGMOID ? ACT_SIGMOID
             : op == ND_SILU    ? ACT_SILU
             : op == ND_GELU    ? ACT_GELU
                                : ACT_GELU_TANH,
             R(1.0), 0, &a, &slope);
  }
  return a;
}

/* y (+)= op(a, b, c), see moe__args_nd_map: `outer` dimensions of rows, y's order.  An item takes runs of chunks; a
   chunk is read before it is written, so that y may be an input.  Bytes: each operand once, where it is not
   broadcast.  The operation and the types are uniform run-time arguments: a predicted branch a chunk. */
KERNEL(nd_map)(TENSOR(uchar, y), int ydt, TENSOR(const uchar, a), int adt, TENSOR(const uchar, b), int bdt,
               TENSOR(const uchar, c), int cdt, int op, int accumulate, REAL alpha, long N, long y_col, long a_col,
               long b_col, long c_col, int outer, FIVE(extent), FIVE(y_row), FIVE(a_row), FIVE(b_row), FIVE(c_row),
               long total, int run)
{
  FIVE_ARRAY(extent);
  FIVE_ARRAY(y_row);
  FIVE_ARRAY(a_row);
  FIVE_ARRAY(b_row);
  FIVE_ARRAY(c_row);
  const int y_wide = CHUNK_OK(y, y_at, ydt, FIVE_OR(y_row), y_col);
  const int a_wide = CHUNK_OK(a, a_at, adt, FIVE_OR(a_row), a_col);
  const int b_wide = CHUNK_OK(b, b_at, bdt, FIVE_OR(b_row), b_col);
  const int c_wide = CHUNK_OK(c, c_at, cdt, FIVE_OR(c_row), c_col);
  const long width = width_of(N);
  MAP_CHUNKS(i, total, run) {
    const long row = row_of(i, width, outer), col = i - row * width, left = N - col;
    long y_i = y_at + col * y_col, a_i = a_at + col * a_col, b_i = b_at + col * b_col, c_i = c_at + col * c_col;
    if (outer) {
      long index[OUTER];
      unravel(index, row, extent, outer);
      y_i += place(index, y_row), a_i += place(index, a_row), b_i += place(index, b_row), c_i += place(index, c_row);
    }
    chunk x = nd_chunk(a, a_i, a_col, left, a_wide, adt), u = x, v = x;
    if (op >= ND_ADD && op <= ND_WHERE) u = nd_chunk(b, b_i, b_col, left, b_wide, bdt);
    if (op == ND_WHERE) v = nd_chunk(c, c_i, c_col, left, c_wide, cdt);
    x = nd_apply(op, x, u, v, alpha);
    if (accumulate) {
      u = ldx_chunk(y, y_i, y_col, left, y_wide, ydt);
      UNROLL EACH(j) x.v[j] += u.v[j];
    }
    stx_chunk(y, y_i, y_col, left, y_wide, ydt, x);
  }
}

/* ---- reductions ------------------------------------------------------------------------------------------
   y[o] (+)= alpha * (sum or largest of a[o,r] over r): places o in the kept dimensions (`out_` of them), r in the
   others (`in_`).  r is cut in parts of `length`, by GROUP(1); part p writes p*y_part elements further on.  Where
   there is more than one, y is a scratch of REALs [parts, outputs], and a second launch reduces that.  The shape of
   a sum depends on the tensors and the device only. */
#define ND_LARGEST 1
#define AHEAD 4 /* loads of an item that are under way at once */

FN REAL nd_nothing(int op)
{
  return op == ND_LARGEST ? -REAL_INF : R(0.0);
}
FN REAL nd_both(int op, REAL a, REAL b)
{
  return op != ND_LARGEST ? a + b : b > a || IS_NAN(b) ? b : a;
}
#define ND_BOTH(a, b) nd_both(op, a, b)
/* A chunk; behind its first `left` elements is nothing. */
FN chunk nd_some(const GLOBAL uchar *a, long i, long stride, long left, int wide, int dt, int op)
{
  chunk c = ldx_chunk(a, i, stride, left, wide, dt);
  if (op == ND_LARGEST) {
    UNROLL EACH(j) c.v[j] = j < left ? c.v[j] : -REAL_INF;
  }
  return c;
}
FN chunk nd_combine(int op, chunk a, chunk b)
{
  UNROLL EACH(j) a.v[j] = nd_both(op, a.v[j], b.v[j]);
  return a;
}

/* a's inner dimension of N is one of those reduced: `lanes` items share an output, each taking every lanes-th chunk,
   and then a tree.  `outputs` is the number of o, `end` the places r.  Bytes: a once. */
KERNEL(nd_reduce_rows)(TENSOR(uchar, y), int ydt, long y_part, TENSOR(const uchar, a), int adt, int op, int accumulate,
                       REAL alpha, long N, long a_col, int in, FIVE(in_extent), FIVE(a_in), int out, FIVE(out_extent),
                       FIVE(y_out), FIVE(a_out), long outputs, long end, long length, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  FIVE_ARRAY(in_extent);
  FIVE_ARRAY(a_in);
  FIVE_ARRAY(out_extent);
  FIVE_ARRAY(y_out);
  FIVE_ARRAY(a_out);
  const int wide = CHUNK_OK(a, a_at, adt, FIVE_OR(a_in) | FIVE_OR(a_out), a_col);
  const long o = ROW(lanes), part = GROUP(1), width = width_of(N), step = (long)lanes * CHUNK;
  const long stop = o < outputs ? MIN2(end, (part + 1) * length) : 0;
  long index[OUTER];
  unravel(index, o < outputs ? o : 0, out_extent, out);
  const long from = a_at + place(index, a_out), to = y_at + part * y_part + place(index, y_out);
  chunk sum;
  UNROLL EACH(j) sum.v[j] = nd_nothing(op);
  for (long i = part * length + LANE(lanes) * CHUNK; i < stop; i += AHEAD * step) {
    chunk c[AHEAD];
    UNROLL for (int u = 0; u < AHEAD; u++) {
      const long at = i + u * step, row = row_of(at, width, in), col = at - row * width;
      const long k_at = from + row_place(row, in, in_extent, a_in) + col * a_col;
      c[u] = nd_some(a, k_at, a_col, at < stop ? N - col : 0, wide, adt, op);
    }
    UNROLL for (int u = 0; u < AHEAD; u++) sum = nd_combine(op, sum, c[u]);
  }
  REAL all = sum.v[0];
  UNROLL for (int j = 1; j < CHUNK; j++) all = nd_both(op, all, sum.v[j]);
  ROW_TREE(all, all, buf, lanes, ND_BOTH);
  if (o < outputs && LANE(lanes) == 0) {
    all *= alpha;
    stx(y, to, ydt, accumulate ? ldx(y, to, ydt) + all : all);
  }
}

/* a's inner dimension of N is kept: an item takes a chunk of outputs and goes through r, `end` of them, in ascending
   order.  Neighbouring items take neighbouring chunks.  Bytes: a once. */
KERNEL(nd_reduce_columns)(TENSOR(uchar, y), int ydt, long y_part, TENSOR(const uchar, a), int adt, int op,
                          int accumulate, REAL alpha, long N, long y_col, long a_col, int in, FIVE(in_extent),
                          FIVE(a_in), int out, FIVE(out_extent), FIVE(y_out), FIVE(a_out), long total, long end,
                          long length)
{
  FIVE_ARRAY(in_extent);
  FIVE_ARRAY(a_in);
  FIVE_ARRAY(out_extent);
  FIVE_ARRAY(y_out);
  FIVE_ARRAY(a_out);
  const int a_wide = CHUNK_OK(a, a_at, adt, FIVE_OR(a_in) | FIVE_OR(a_out), a_col);
  const int y_wide = CHUNK_OK(y, y_at, ydt, FIVE_OR(y_out) | y_part, y_col);
  const long i = GID * CHUNK, part = GROUP(1), stop = MIN2(end, (part + 1) * length);
  if (i >= total) return;
  const long row = row_of(i, width_of(N), out), col = i - row * width_of(N), left = N - col;
  long index[OUTER];
  unravel(index, row, out_extent, out);
  const long from = a_at + place(index, a_out) + col * a_col;
  const long to = y_at + part * y_part + place(index, y_out) + col * y_col;
  chunk sum;
  UNROLL EACH(j) sum.v[j] = nd_nothing(op);
  for (long r = part * length; r < stop; r += AHEAD) {
    chunk c[AHEAD];
    UNROLL for (int u = 0; u < AHEAD; u++) {
      const long k_at = from + row_place(r + u, in, in_extent, a_in);
      c[u] = nd_some(a, k_at, a_col, r + u < stop ? left : 0, a_wide, adt, op);
    }
    UNROLL for (int u = 0; u < AHEAD; u++) sum = nd_combine(op, sum, c[u]);
  }
  UNROLL EACH(j) sum.v[j] *= alpha;
  if (accumulate) {
    const chunk old = ldx_chunk(y, to, y_col, left, y_wide, ydt);
    UNROLL EACH(j) sum.v[j] += old.v[j];
  }
  stx_chunk(y, to, y_col, left, y_wide, ydt, sum);
}

/* ---- dropout ----------------------------------------------------------------------------------------------
   y[i] = keep(i) ? a[i] * scale : 0, keep as in moe__args_nd_dropout: an integer comparison, and a product that is
   rounded once, so that the bits are the same everywhere.  Bytes: a in, y out; ten rounds for every four elements. */
KERNEL(nd_dropout)(TENSOR(uchar, y), int ydt, TENSOR(const uchar, a), int adt, TENSOR(const uchar, step), int sdt,
                   long n, int run, long seed, long stream, long threshold, REAL scale)
{
  const int y_wide = CHUNK_OK(y, y_at, ydt, 0, 1), a_wide = CHUNK_OK(a, a_at, adt, 0, 1);
  ulong key = (ulong)seed;
  if (step) {
    const long now = sdt == DT_I64 ? ((const GLOBAL long *)step)[step_at] : ((const GLOBAL int *)step)[step_at];
    key += (ulong)now * 0x9E3779B97F4A7C15ul;
  }
  MAP_CHUNKS(i, n, run) {
    uint words[4][CHUNK / 4];
    chunk c = ldx_chunk(a, a_at + i, 1, n - i, a_wide, adt);
    philox(words[0], words[1], words[2], words[3], CHUNK / 4, (ulong)i / 4, 1, (ulong)stream, key);
    UNROLL EACH(j) c.v[j] = (long)words[j % 4][j / 4] >= threshold ? c.v[j] * scale : R(0.0);
    stx_chunk(y, y_at + i, 1, n - i, y_wide, ydt, c);
  }
}
