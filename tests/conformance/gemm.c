/* gemm.c - cases of the dense product: all layouts, strides, types of c, bias, accumulation and batches. */
#include "conform.h"

struct how {
  int64_t M, N, K;
  int a, b, c; /* layouts */
  int64_t c_type;
  int bias, accumulate, whole;
  double alpha;
  int64_t batch;
  int repeat; /* of a batch: 1 the same a, 2 the same b, 3 both */
};

/* Of [batch,m,n], or [m,n] without a batch. */
static moe_tensor matrix(struct conform *c, const struct how *h, int64_t dtype, int layout, int repeat, int64_t m,
                         int64_t n)
{
  moe_tensor t;
  if (!h->batch) return t_tensor(&c->m, dtype, layout, SHAPE(m, n));
  t = t_tensor(&c->m, dtype, layout, SHAPE(repeat ? 1 : h->batch, m, n));
  if (repeat) t.shape[0] = h->batch, t.stride[0] = 0;
  return t;
}
/* Whole or not, for each of a batch. */
static num *values(struct conform *c, const struct how *h, int64_t dtype, int repeat, int64_t n, int64_t size)
{
  const int64_t batch = h->batch ? h->batch : 1;
  num *v = h->whole ? t_whole(&c->m, batch * n, size) : t_uniform(&c->m, batch * n, dtype, 1);
  for (int64_t i = n; i < batch * n && repeat; i++) v[i] = v[i - n];
  return v;
}

static void one(struct conform *c, int64_t dtype, struct how h)
{
  if (!c_begin(c, dtype, "%lldx%lldx%lld layouts %d,%d->%d %s%s%s%s%s batch %lld/%d", (long long)h.M, (long long)h.N,
               (long long)h.K, h.a, h.b, h.c, moe_dtype_name(h.c_type), h.bias ? " bias" : "",
               h.accumulate ? " +=" : "", h.alpha == 1 ? "" : " alpha", h.whole ? " whole numbers" : "",
               (long long)h.batch, h.repeat))
    return;
  if (h.whole) c_exact();
  struct moe__args_gemm args = {
    .dtype = dtype, .M = h.M, .N = h.N, .K = h.K, .accumulate = h.accumulate, .alpha = h.alpha, .batch = h.batch
  };
  num *a = values(c, &h, dtype, h.repeat & 1, h.M * h.K, 3), *b = values(c, &h, dtype, h.repeat & 2, h.N * h.K, 3);
  num *bias = h.whole ? t_whole(&c->m, h.N, 9) : t_uniform(&c->m, h.N, MOE_F32, 1);
  num *want = values(c, &h, h.c_type, 0, h.M * h.N, 9);
  args.a = matrix(c, &h, dtype, h.a, h.repeat & 1, h.M, h.K);
  args.b = matrix(c, &h, dtype, h.b, h.repeat & 2, h.N, h.K);
  args.c = matrix(c, &h, h.c_type, h.c, 0, h.M, h.N);
  t_put(&c->m, &args.a, a);
  t_put(&c->m, &args.b, b);
  t_own(&c->m, &args.c);
  if (h.accumulate) t_put(&c->m, &args.c, want);
  for (int64_t n = 0; n < h.N && h.bias == 2; n++) bias[n] = bias[0];
  if (h.bias) args.bias = c_in(c, MOE_F32, h.bias == 2 ? T_SCALAR : T_STEP, bias, SHAPE(h.N));
  if (c_run_gemm(c, &args)) {
    for (int64_t i = 0; i < (h.batch ? h.batch : 1); i++)
      ref_gemm(want + i * h.M * h.N, a + i * h.M * h.K, b + i * h.N * h.K, h.bias ? bias : NULL, h.M, h.N, h.K,
               h.accumulate, h.alpha);
    c_check(c, "c", &args.c, want);
  }
  c_end(c);
}

void conform_gemm(struct conform *c)
{
  static const int64_t shapes[][3] = {
    { 1, 1, 1 },    { 3, 5, 7 },    { 64, 64, 64 },  { 65, 63, 33 }, { 1, 129, 65 }, { 127, 1, 31 },   { 33, 128, 1 },
    { 0, 5, 3 },    { 5, 0, 3 },    { 5, 3, 0 },     { 7, 13, 129 }, { 2, 64, 127 }, { 128, 127, 16 }, { 6, 100, 63 },
    { 129, 65, 9 }, { 12, 32, 64 }, { 31, 257, 17 }, { 9, 33, 99 },  { 4, 4, 521 },  { 63, 65, 128 },
  };
  for (int64_t d = 0; d < C_DTYPES; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < (c->effort == SMALL ? 8 : 20); i++) {
      struct how h = { shapes[i][0],
                       shapes[i][1],
                       shapes[i][2],
                       c_layout(i),
                       c_layout(i / 2),
                       c_layout(i / 3),
                       c_float(dtype, i),
                       (int)(i % 3),
                       (int)(i % 2),
                       (int)(i % 4 == 3),
                       i % 5 ? 1 : 0.5,
                       0,
                       0 };
      one(c, dtype, h);
      if (i % 5 == d) {
        h.whole = 1;
        one(c, dtype, h);
      }
    }
    /* The four packed layouts: forward, gradient of the input, gradient of the weight. */
    for (int i = 0; i < 4; i++) {
      struct how h = {
        70, 66, 130, i & 1 ? T_SWAP : 0, i & 2 ? T_SWAP : 0, 0, c_float(dtype, i), 0, i == 3, 0, 1, 0, 0
      };
      if (c->effort == SMALL) h.M = 20, h.N = 18, h.K = 34;
      one(c, dtype, h);
    }
    /* Sizes, strides and beginnings that kernels with wide accesses take. */
    static const int64_t aligned[][3] = { { 128, 128, 64 }, { 129, 8, 8 },     { 1, 136, 128 },
                                          { 127, 256, 72 }, { 300, 120, 264 }, { 64, 264, 16 } };
    for (int i = 0; i < (c->effort == SMALL ? 2 : 6); i++) {
      const int64_t *s = aligned[i];
      struct how h = {
        s[0], s[1], s[2], i % 2 ? T_PAD8 : 0, i % 3 ? 0 : T_SWAP, 0, i % 2 ? MOE_F32 : dtype, 0, i % 4 == 3, 0, 1, 0, 0
      };
      if (dtype == MOE_F64) h.c_type = dtype;
      one(c, dtype, h);
    }
    /* Batches: more products than tiles and the other way round, strides of 0. */
    static const int64_t batches[][4] = { { 1, 65, 33, 17 }, { 2, 130, 66, 40 }, { 7, 9, 70, 31 }, { 300, 3, 5, 7 },
                                          { 2, 1, 0, 3 },    { 7, 5, 64, 0 },    { 2, 0, 3, 5 },   { 300, 1, 16, 16 } };
    for (int i = 0; i < (c->effort == SMALL ? 3 : 8); i++) {
      const int64_t *s = batches[i];
      struct how h = {
        s[1], s[2], s[3], c_layout(i + d), c_layout(i / 2), c_layout(i / 3 + d), c_float(dtype, i + d), i % 3, i % 2, 0,
        1,    s[0], i % 4
      };
      one(c, dtype, h);
      h.a = h.b = T_PACKED, h.c = i % 2 ? T_SWAP : T_PACKED, h.repeat = 3 - h.repeat;
      h.accumulate = !h.accumulate, h.whole = 1;
      one(c, dtype, h);
    }
    /* Enough large tiles to fill a large GPU, where kernels with large tiles are chosen. */
    if (c->effort != SMALL && dtype != MOE_F64)
      one(c, dtype,
          (struct how){ 1473, 1441, 24 + d, d ? T_SWAP : T_ODD, d % 2 ? T_PAD : 0, 0, dtype, 1, 0, 0, 1, 0, 0 });
    if (c->effort != SMALL) one(c, dtype, (struct how){ 263, 137, 150, 0, 0, 0, dtype, 1, 0, 0, 1, 0, 0 });
    for (int i = 0; i < 4 && c->effort == LONG; i++) {
      struct how h = { 389, 261, 517, i & 1 ? T_SWAP : 0, i & 2 ? T_SWAP : 0, T_PAD, dtype, 0, 0, 0, 1, 0, 0 };
      one(c, dtype, h);
      h.whole = 1;
      one(c, dtype, h);
    }
  }
  huge_gemm(c);
}
