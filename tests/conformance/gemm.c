/* gemm.c - cases of the dense product: all layouts, strides, types of c, bias and accumulation. */
#include "conform.h"

struct how {
  int64_t M, N, K;
  int a, b, c; /* layouts */
  int64_t c_type;
  int bias, accumulate, whole;
  double alpha;
};

static void one(struct conform *c, int64_t dtype, struct how h)
{
  if (!c_begin(c, dtype, "%lldx%lldx%lld layouts %d,%d->%d %s%s%s%s%s", (long long)h.M, (long long)h.N, (long long)h.K,
               h.a, h.b, h.c, moe_dtype_name(h.c_type), h.bias ? " bias" : "", h.accumulate ? " +=" : "",
               h.alpha == 1 ? "" : " alpha", h.whole ? " whole numbers" : ""))
    return;
  if (h.whole) c_exact();
  struct moe__args_gemm args = { .dtype = dtype, .M = h.M, .N = h.N, .K = h.K, .accumulate = h.accumulate };
  args.alpha = h.alpha;
  num *a = h.whole ? t_whole(&c->m, h.M * h.K, 3) : t_uniform(&c->m, h.M * h.K, dtype, 1);
  num *b = h.whole ? t_whole(&c->m, h.N * h.K, 3) : t_uniform(&c->m, h.N * h.K, dtype, 1);
  num *bias = h.whole ? t_whole(&c->m, h.N, 9) : t_uniform(&c->m, h.N, MOE_F32, 1);
  num *want = h.whole ? t_whole(&c->m, h.M * h.N, 9) : t_uniform(&c->m, h.M * h.N, h.c_type, 1);
  args.a = c_in(c, dtype, h.a, a, SHAPE(h.M, h.K));
  args.b = c_in(c, dtype, h.b, b, SHAPE(h.N, h.K));
  for (int64_t n = 0; n < h.N && h.bias == 2; n++) bias[n] = bias[0];
  if (h.bias) args.bias = c_in(c, MOE_F32, h.bias == 2 ? T_SCALAR : T_STEP, bias, SHAPE(h.N));
  if (h.accumulate) args.c = c_inout(c, h.c_type, h.c, want, SHAPE(h.M, h.N));
  else args.c = c_out(c, h.c_type, h.c, SHAPE(h.M, h.N));
  if (c_run_gemm(c, &args)) {
    ref_gemm(want, a, b, h.bias ? bias : NULL, h.M, h.N, h.K, h.accumulate, h.alpha);
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
      struct how h = { shapes[i][0],    shapes[i][1],      shapes[i][2],      c_layout(i),
                       c_layout(i / 2), c_layout(i / 3),   c_float(dtype, i), (int)(i % 3),
                       (int)(i % 2),    (int)(i % 4 == 3), i % 5 ? 1 : 0.5 };
      one(c, dtype, h);
      if (i % 5 == d) {
        h.whole = 1;
        one(c, dtype, h);
      }
    }
    /* The four packed layouts: forward, gradient of the input, gradient of the weight. */
    for (int i = 0; i < 4; i++) {
      struct how h = { 70, 66, 130, i & 1 ? T_SWAP : 0, i & 2 ? T_SWAP : 0, 0, c_float(dtype, i), 0, i == 3, 0, 1 };
      if (c->effort == SMALL) h.M = 20, h.N = 18, h.K = 34;
      one(c, dtype, h);
    }
    /* Sizes, strides and beginnings that kernels with wide accesses take. */
    static const int64_t aligned[][3] = { { 128, 128, 64 }, { 129, 8, 8 },     { 1, 136, 128 },
                                          { 127, 256, 72 }, { 300, 120, 264 }, { 64, 264, 16 } };
    for (int i = 0; i < (c->effort == SMALL ? 2 : 6); i++) {
      const int64_t *s = aligned[i];
      struct how h = { s[0],       s[1], s[2], i % 2 ? T_PAD8 : 0, i % 3 ? 0 : T_SWAP, 0, i % 2 ? MOE_F32 : dtype, 0,
                       i % 4 == 3, 0,    1 };
      if (dtype == MOE_F64) h.c_type = dtype;
      one(c, dtype, h);
    }
    /* Enough large tiles to fill a large GPU, where kernels with large tiles are chosen. */
    if (c->effort != SMALL && dtype != MOE_F64)
      one(c, dtype, (struct how){ 1473, 1441, 24 + d, d ? T_SWAP : T_ODD, d % 2 ? T_PAD : 0, 0, dtype, 1, 0, 0, 1 });
    if (c->effort != SMALL) one(c, dtype, (struct how){ 263, 137, 150, 0, 0, 0, dtype, 1, 0, 0, 1 });
    for (int i = 0; i < 4 && c->effort == LONG; i++) {
      struct how h = { 389, 261, 517, i & 1 ? T_SWAP : 0, i & 2 ? T_SWAP : 0, T_PAD, dtype, 0, 0, 0, 1 };
      one(c, dtype, h);
      h.whole = 1;
      one(c, dtype, h);
    }
  }
  huge_gemm(c);
}
