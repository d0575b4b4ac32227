/* huge.c - cases whose tensors have more than 2^31 elements: an index that wraps at 32 bits reads or writes wrong rows.

   Only the first and last rows of a tensor get values of their own, and only those are compared (the rest is one
   byte repeated).  The full sizes run in the long mode on GPUs with room for them; elsewhere the same cases run
   small, so that they themselves are tested. */
#include "conform.h"

enum { ENDS = 8 }; /* rows at either end */

static int is_full(const struct conform *c, double bytes, double largest)
{
  const moe_device_info *info = &c->ctx->info->pub;
  return c->effort == LONG && info->kind == MOE_DEVICE_GPU && bytes * 1.1 < (double)info->memory &&
         largest < (double)info->max_alloc;
}

/* Rows of `width` elements that pass 2^31 elements, where bytes_per_element (of all tensors of that length) fit;
   a multiple of 8. */
static int64_t rows_past(const struct conform *c, int64_t width, double bytes_per_element)
{
  double elements = 0x1p31 + 16.0 * (double)width;
  int64_t rows = ((int64_t)(elements / (double)width) + 7) / 8 * 8;
  return is_full(c, elements * bytes_per_element, elements * 4) ? rows : 40;
}

/* [2*ENDS,width] values, written to the first and last rows of t. */
static num *put_ends(struct conform *c, const moe_tensor *t, num *values)
{
  t_write_rows(&c->m, t, 0, ENDS, values);
  t_write_rows(&c->m, t, t->shape[0] - ENDS, ENDS, values + ENDS * t->stride[0]);
  return values;
}

/* The first and last n rows of t against want[2*n,width]. */
static void check_ends(struct conform *c, const char *what, const moe_tensor *t, int64_t n, const num *want)
{
  int64_t half = n * t->stride[0];
  double *got = t_host(&c->m, 2 * half, sizeof *got);
  t_read_rows(&c->m, t, 0, n, got);
  t_read_rows(&c->m, t, t->shape[0] - n, n, got + half);
  moe_tensor ends = *t;
  ends.shape[0] = 2 * n;
  c_check_values(c, what, &ends, got, want);
}

/* Values for the ends of a tensor with rows of `width`. */
static num *end_values(struct conform *c, int64_t width, int64_t dtype)
{
  return t_uniform(&c->m, 2 * ENDS * width, dtype, 1);
}

/* 0, 1, ..., n-1 */
static int32_t *counting(struct conform *c, int64_t n)
{
  int32_t *x = t_ints(&c->m, n);
  for (int64_t i = 0; i < n; i++) x[i] = (int32_t)i;
  return x;
}

#define BYTE 0x3c /* 0x3c3c is 0.0115 in bf16 */
#define NAN_BYTE 0xff

void huge_elt_map(struct conform *c)
{
  int64_t width = 4096, rows = rows_past(c, width, 4), n = rows * width;
  if (!c_begin(c, MOE_F32, "huge: copy n=%lld", (long long)n)) return;
  struct moe__args_elt_map args = { .dtype = MOE_F32, .op = MOE__ELT_COPY, .n = n, .alpha = 1 };
  moe_tensor a = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(rows, width)),
             y = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(rows, width));
  num *values = put_ends(c, &a, end_values(c, width, MOE_BF16));
  args.a = c_flat(&a), args.y = c_flat(&y);
  if (c_run_elt_map(c, &args)) check_ends(c, "y", &y, ENDS, values);
  c_end(c);
}

void huge_elt_normal(struct conform *c)
{
  int64_t width = 4096, rows = rows_past(c, width, 2), n = rows * width;
  if (!c_begin(c, MOE_F32, "huge: n=%lld", (long long)n)) return;
  struct moe__args_elt_normal args = { .dtype = MOE_F32, .n = n, .seed = 5, .stream = 6, .stddev = 1 };
  moe_tensor y = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(rows, width));
  num *want = t_nums(&c->m, 2 * width);
  args.y = c_flat(&y);
  if (c_run_elt_normal(c, &args)) {
    ref_elt_normal_at(want, 0, width, args.seed, args.stream, args.stddev);
    ref_elt_normal_at(want + width, n - width, width, args.seed, args.stream, args.stddev);
    check_ends(c, "y", &y, 1, want);
  }
  c_end(c);
}

/* Zeros but for whole numbers at the ends: the sum is exact. */
static moe_tensor mostly_zero(struct conform *c, num **ends)
{
  int64_t width = 4096, rows = rows_past(c, width, 2);
  moe_tensor a = t_huge(&c->m, MOE_BF16, 0, SHAPE(rows, width));
  *ends = put_ends(c, &a, t_whole(&c->m, 2 * ENDS * width, 3));
  return c_flat(&a);
}

void huge_elt_sum(struct conform *c)
{
  num *ends, want = { 0, 0 };
  if (!c_begin(c, MOE_F32, "huge")) return;
  c_exact();
  moe_tensor a = mostly_zero(c, &ends);
  struct moe__args_elt_sum args = { .dtype = MOE_F32, .a = a, .n = a.shape[0], .alpha = 1 };
  args.y = c_out(c, MOE_F32, T_PACKED, SHAPE(1));
  args.scratch = c_out(c, MOE_F32, T_PACKED, SHAPE(MOE__PARTS));
  if (c_run_elt_sum(c, &args)) {
    ref_elt_sum(&want, ends, 2 * ENDS * 4096, 0, 1);
    c_check(c, "y", &args.y, &want);
  }
  c_end(c);
}

/* A matrix and a row that is repeated: more rows than one walk of 2^31. */
void huge_nd_map(struct conform *c)
{
  int64_t width = 4099, rows = rows_past(c, width, 4);
  if (!c_begin(c, MOE_BF16, "huge: add %lldx%lld", (long long)rows, (long long)width)) return;
  struct moe__args_nd_map args = { .dtype = MOE_BF16, .op = MOE__ND_ADD, .alpha = 1 };
  args.a = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(rows, width));
  args.y = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(rows, width));
  num *a = put_ends(c, &args.a, end_values(c, width, MOE_BF16)), *b = t_uniform(&c->m, width, MOE_BF16, 1);
  num *want = t_nums(&c->m, 2 * ENDS * width), *row = t_nums(&c->m, 2 * ENDS * width);
  args.b = c_in(c, MOE_BF16, T_PACKED, b, SHAPE(1, width));
  args.b.shape[0] = rows, args.b.stride[0] = 0;
  for (int64_t i = 0; i < 2 * ENDS * width; i++) row[i] = b[i % width];
  if (c_run_nd_map(c, &args)) {
    ref_nd_map(want, a, row, NULL, MOE__ND_ADD, 2 * ENDS * width, 0, 1);
    check_ends(c, "y", &args.y, ENDS, want);
  }
  c_end(c);
}

/* Rows, columns and all: zeros but for whole numbers at the ends. */
void huge_nd_reduce(struct conform *c)
{
  for (int64_t axes = 1; axes <= 3; axes++) {
    int64_t width = 4096, rows = rows_past(c, width, 2);
    if (!c_begin(c, MOE_BF16, "huge: sum over %lld", (long long)axes)) return;
    c_exact();
    struct moe__args_nd_reduce args = { .dtype = MOE_BF16, .axes = axes, .alpha = 1 };
    args.a = t_huge(&c->m, MOE_BF16, 0, SHAPE(rows, width));
    num *ends = put_ends(c, &args.a, t_whole(&c->m, 2 * ENDS * width, 3)), *want = t_nums(&c->m, rows + width);
    const int64_t kept[] = { axes & 1 ? 1 : rows, axes & 2 ? 1 : width }, few[] = { 2 * ENDS, width };
    const int64_t scratch = moe__nd_reduce_scratch(&args.a, axes);
    args.y = c_out(c, MOE_F32, T_PACKED, 2, kept);
    if (scratch) args.scratch = c_out(c, MOE_F32, T_PACKED, SHAPE(scratch));
    if (c_run_nd_reduce(c, &args)) {
      ref_nd_reduce(want, ends, MOE__ND_SUM, axes, 2, few, 0, 1);
      if (axes == 2) {
        memmove(want + rows - ENDS, want + ENDS, ENDS * sizeof *want);
        for (int64_t i = ENDS; i < rows - ENDS; i++) want[i] = n_exact(0);
      }
      c_check(c, "y", &args.y, want);
    }
    c_end(c);
  }
}

void huge_nd_dropout(struct conform *c)
{
  int64_t width = 4096, rows = rows_past(c, width, 4), n = rows * width;
  if (!c_begin(c, MOE_BF16, "huge: n=%lld", (long long)n)) return;
  struct moe__args_nd_dropout args = { .dtype = MOE_BF16, .n = n, .seed = 5, .stream = 6, .p = 0.3 };
  moe_tensor a = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(rows, width)),
             y = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(rows, width));
  num *values = put_ends(c, &a, end_values(c, width, MOE_BF16)), *want = t_nums(&c->m, 2 * ENDS * width);
  args.a = c_flat(&a), args.y = c_flat(&y);
  if (c_run_nd_dropout(c, &args)) {
    for (int64_t end = 0; end < 2; end++)
      ref_nd_dropout_at(want + end * ENDS * width, values + end * ENDS * width, end * (n - ENDS * width), ENDS * width,
                        args.seed, args.stream, 0, args.p);
    check_ends(c, "y", &y, ENDS, want);
  }
  c_end(c);
}

void huge_sqnorm(struct conform *c)
{
  num *ends, want = { 0, 0 };
  if (!c_begin(c, MOE_F32, "huge")) return;
  c_exact();
  moe_tensor a = mostly_zero(c, &ends);
  struct moe__args_sqnorm args = { .dtype = MOE_F32, .a = a, .n = a.shape[0] };
  args.y = c_out(c, MOE_F32, T_PACKED, SHAPE(1));
  args.scratch = c_out(c, MOE_F32, T_PACKED, SHAPE(MOE__PARTS));
  if (c_run_sqnorm(c, &args)) {
    ref_sqnorm(&want, ends, 2 * ENDS * 4096, 0);
    c_check(c, "y", &args.y, &want);
  }
  c_end(c);
}

/* cases.md B17: 131073 tokens of 2048, 8 experts each. */
void huge_gather_rows(struct conform *c)
{
  int64_t D = 2048, n = rows_past(c, D, 2.3), rows = n / 8;
  if (!c_begin(c, MOE_BF16, "huge: n=%lld D=%lld", (long long)n, (long long)D)) return;
  struct moe__args_gather_rows args = { .dtype = MOE_BF16, .n = n, .rows = rows, .D = D, .div = 8 };
  args.x = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(rows, D));
  args.y = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(n, D));
  num *x = end_values(c, D, MOE_BF16), *want = t_nums(&c->m, 2 * ENDS * D);
  t_write_rows(&c->m, &args.x, 0, 1, x);
  t_write_rows(&c->m, &args.x, rows - 1, 1, x + D);
  for (int64_t i = 0; i < 2 * ENDS * D; i++) want[i] = x[i % D + (i < ENDS * D ? 0 : D)];
  args.map = c_in_ints(c, counting(c, n), SHAPE(n));
  if (c_run_gather_rows(c, &args)) check_ends(c, "y", &args.y, ENDS, want);
  c_end(c);
}

void huge_combine(struct conform *c)
{
  int64_t D = 2048, K = 8, R = rows_past(c, D, 2.3), T = R / K;
  if (!c_begin(c, MOE_BF16, "huge: T=%lld K=%lld D=%lld", (long long)T, (long long)K, (long long)D)) return;
  struct moe__args_combine args = { .dtype = MOE_BF16, .T = T, .K = K, .D = D };
  args.rows = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(R, D));
  args.y = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(T, D));
  args.weights = t_huge(&c->m, MOE_F32, BYTE, SHAPE(T, K));
  num *rows = put_ends(c, &args.rows, end_values(c, D, MOE_BF16)), *weights = t_uniform(&c->m, 2 * K, MOE_F32, 1);
  num *want = t_nums(&c->m, 2 * D);
  t_write_rows(&c->m, &args.weights, 0, 1, weights);
  t_write_rows(&c->m, &args.weights, T - 1, 1, weights + K);
  args.slot2row = c_in_ints(c, counting(c, R), SHAPE(T, K));
  if (c_run_combine(c, &args)) {
    ref_combine(want, rows, weights, counting(c, 2 * K), NULL, 2, K, D, 0);
    check_ends(c, "y", &args.y, 1, want);
  }
  c_end(c);
}

void huge_rms_fwd(struct conform *c)
{
  int64_t D = 2048, T = rows_past(c, D, 4);
  if (!c_begin(c, MOE_BF16, "huge: T=%lld D=%lld", (long long)T, (long long)D)) return;
  struct moe__args_rms_fwd args = { .dtype = MOE_BF16, .T = T, .D = D, .eps = 1e-5 };
  num *w = t_uniform(&c->m, D, MOE_BF16, 1), *want = t_nums(&c->m, 2 * ENDS * D), *rstd = t_nums(&c->m, 2 * ENDS);
  args.x = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(T, D));
  args.y = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(T, D));
  args.rstd = t_huge(&c->m, MOE_F32, NAN_BYTE, SHAPE(T));
  args.w = c_in(c, MOE_BF16, T_PACKED, w, SHAPE(D));
  num *x = put_ends(c, &args.x, end_values(c, D, MOE_BF16));
  if (c_run_rms_fwd(c, &args)) {
    ref_rms_fwd(want, rstd, x, w, 2 * ENDS, D, args.eps);
    check_ends(c, "y", &args.y, ENDS, want);
    check_ends(c, "rstd", &args.rstd, ENDS, rstd);
  }
  c_end(c);
}

/* dy is 0 but at the ends: dw is the sum over them. */
void huge_rms_bwd(struct conform *c)
{
  int64_t D = 2048, T = rows_past(c, D, 6);
  if (!c_begin(c, MOE_BF16, "huge: T=%lld D=%lld", (long long)T, (long long)D)) return;
  struct moe__args_rms_bwd args = { .dtype = MOE_BF16, .T = T, .D = D };
  num *ones = t_nums(&c->m, 2 * ENDS + D), *dw = t_nums(&c->m, D);
  for (int64_t i = 0; i < 2 * ENDS + D; i++) ones[i].v = 1;
  args.x = t_huge(&c->m, MOE_BF16, 0, SHAPE(T, D));
  args.dy = t_huge(&c->m, MOE_BF16, 0, SHAPE(T, D));
  args.dx = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(T, D));
  args.rstd = t_huge(&c->m, MOE_F32, 0, SHAPE(T));
  put_ends(c, &args.rstd, ones);
  num *x = put_ends(c, &args.x, t_whole(&c->m, 2 * ENDS * D, 1));
  num *dy = put_ends(c, &args.dy, t_whole(&c->m, 2 * ENDS * D, 2)), *dx = t_nums(&c->m, 2 * ENDS * D);
  args.w = c_in(c, MOE_BF16, T_PACKED, ones, SHAPE(D));
  args.dw = c_out(c, MOE_F32, T_PACKED, SHAPE(D));
  args.scratch = c_out(c, MOE_F32, T_PACKED, SHAPE(MOE__PARTS, D));
  if (c_run_rms_bwd(c, &args)) {
    ref_rms_bwd(dx, dw, dy, x, ones, ones, 2 * ENDS, D, 0);
    c_check(c, "dw", &args.dw, dw);
    check_ends(c, "dx", &args.dx, ENDS, dx);
  }
  c_end(c);
}

static const struct moe__act silu = { MOE__ACT_SILU, 1, 0, 0, 0 };

void huge_act_fwd(struct conform *c)
{
  int64_t F = 1024, R = rows_past(c, 2 * F, 3);
  if (!c_begin(c, MOE_BF16, "huge: R=%lld F=%lld", (long long)R, (long long)F)) return;
  struct moe__args_act_fwd args = { .dtype = MOE_BF16, .R = R, .F = F, .act = silu };
  args.h = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(R, 2 * F));
  args.a = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(R, F));
  num *h = put_ends(c, &args.h, end_values(c, 2 * F, MOE_BF16)), *want = t_nums(&c->m, 2 * ENDS * F);
  if (c_run_act_fwd(c, &args)) {
    ref_act_fwd(want, h, 2 * ENDS, F, silu);
    check_ends(c, "a", &args.a, ENDS, want);
  }
  c_end(c);
}

void huge_act_bwd(struct conform *c)
{
  int64_t F = 1024, R = rows_past(c, 2 * F, 5);
  if (!c_begin(c, MOE_BF16, "huge: R=%lld F=%lld", (long long)R, (long long)F)) return;
  struct moe__args_act_bwd args = { .dtype = MOE_BF16, .R = R, .F = F, .plane = 1, .act = silu };
  args.h = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(R, 2 * F));
  args.dh = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(R, 2 * F));
  args.da = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(R, F));
  args.aw = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(R, F));
  args.dweights = t_huge(&c->m, MOE_F32, NAN_BYTE, SHAPE(R));
  args.weights = t_huge(&c->m, MOE_F32, BYTE, SHAPE(R));
  num *h = put_ends(c, &args.h, end_values(c, 2 * F, MOE_BF16)), *dh = t_nums(&c->m, 2 * ENDS * 2 * F);
  num *da = put_ends(c, &args.da, end_values(c, F, MOE_BF16)), *aw = t_nums(&c->m, 2 * ENDS * F);
  num *w = put_ends(c, &args.weights, end_values(c, 1, MOE_F32)), *dw = t_nums(&c->m, 2 * ENDS);
  if (c_run_act_bwd(c, &args)) {
    ref_act_bwd(dh, aw, dw, da, h, w, NULL, 2 * ENDS, F, 0, silu, MOE_BF16);
    check_ends(c, "dh", &args.dh, ENDS, dh);
    check_ends(c, "aw", &args.aw, ENDS, aw);
    check_ends(c, "dweights", &args.dweights, ENDS, dw);
  }
  c_end(c);
}

void huge_gemm(struct conform *c)
{
  int64_t N = 2048, K = 16, M = rows_past(c, N, 2.1);
  if (!c_begin(c, MOE_BF16, "huge: %lldx%lldx%lld", (long long)M, (long long)N, (long long)K)) return;
  struct moe__args_gemm args = { .dtype = MOE_BF16, .M = M, .N = N, .K = K, .alpha = 1 };
  num *b = t_uniform(&c->m, N * K, MOE_BF16, 1), *want = t_nums(&c->m, 2 * ENDS * N);
  args.a = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(M, K));
  args.b = c_in(c, MOE_BF16, T_PACKED, b, SHAPE(N, K));
  args.c = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(M, N));
  num *a = put_ends(c, &args.a, end_values(c, K, MOE_BF16));
  if (c_run_gemm(c, &args)) {
    ref_gemm(want, a, b, NULL, 2 * ENDS, N, K, 0, 1);
    check_ends(c, "c", &args.c, ENDS, want);
  }
  c_end(c);
}

void huge_select(struct conform *c)
{
  int64_t E = 256, T = rows_past(c, E, 2.1);
  if (!c_begin(c, MOE_F32, "huge: T=%lld E=%lld", (long long)T, (long long)E)) return;
  struct moe__select s = { MOE__SELECT_SOFTMAX, 2, 1, 1, 0, 1, 1 };
  struct moe__args_select args = { .dtype = MOE_F32, .T = T, .E = E, .select = s };
  args.logits = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(T, E));
  args.ids = t_huge(&c->m, MOE_I32, NAN_BYTE, SHAPE(T, 2));
  num *logits = put_ends(c, &args.logits, end_values(c, E, MOE_BF16));
  double got[4 * ENDS];
  if (c_run_select(c, &args)) {
    t_read_rows(&c->m, &args.ids, 0, ENDS, got);
    t_read_rows(&c->m, &args.ids, T - ENDS, ENDS, got + 2 * ENDS);
    for (int t = 0; t < 2 * ENDS; t++) {
      const char *wrong =
          ref_select_check((int32_t[]){ (int32_t)got[2 * t], (int32_t)got[2 * t + 1] }, logits + t * E, NULL, E, s);
      if (wrong) c_fail(c, "token %d of the ends: %s", t, wrong);
    }
  }
  c_end(c);
}

void huge_weights(struct conform *c)
{
  int64_t E = 256, T = rows_past(c, E, 2.1);
  if (!c_begin(c, MOE_F32, "huge: T=%lld E=%lld", (long long)T, (long long)E)) return;
  struct moe__args_weights args = { .dtype = MOE_F32, .T = T, .E = E, .K = 2, .weigh = { MOE__SOFTMAX, 0, 1, 0 } };
  args.logits = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(T, E));
  args.ids = t_huge(&c->m, MOE_I32, 0, SHAPE(T, 2)); /* expert 0, twice */
  args.weights = t_huge(&c->m, MOE_F32, NAN_BYTE, SHAPE(T, 2));
  num *logits = put_ends(c, &args.logits, end_values(c, E, MOE_BF16)), *want = t_nums(&c->m, 4 * ENDS);
  int32_t health = 0;
  if (c_run_weights(c, &args)) {
    ref_weights(want, &health, logits, t_ints(&c->m, 4 * ENDS), 2 * ENDS, E, 2, args.weigh);
    check_ends(c, "weights", &args.weights, ENDS, want);
  }
  c_end(c);
}

void huge_weights_bwd(struct conform *c)
{
  int64_t E = 256, T = rows_past(c, E, 4.2);
  if (!c_begin(c, MOE_F32, "huge: T=%lld E=%lld", (long long)T, (long long)E)) return;
  struct moe__args_weights_bwd args = { .dtype = MOE_F32, .T = T, .E = E, .K = 2, .weigh = { MOE__SOFTMAX, 0, 1, 0 } };
  args.logits = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(T, E));
  args.dlogits = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(T, E));
  args.ids = t_huge(&c->m, MOE_I32, 0, SHAPE(T, 2));
  args.dweights = t_huge(&c->m, MOE_F32, BYTE, SHAPE(T, 2));
  num *logits = put_ends(c, &args.logits, end_values(c, E, MOE_BF16)), *want = t_nums(&c->m, 2 * ENDS * E);
  num *dweights = put_ends(c, &args.dweights, end_values(c, 2, MOE_F32));
  if (c_run_weights_bwd(c, &args)) {
    ref_weights_bwd(want, dweights, logits, t_ints(&c->m, 4 * ENDS), 2 * ENDS, E, 2, 0, args.weigh);
    check_ends(c, "dlogits", &args.dlogits, ENDS, want);
  }
  c_end(c);
}

/* Rows past 2^31 elements, in two experts with one row between them. */
void huge_ggemm_rows(struct conform *c)
{
  int64_t N = 2048, K = 16, R = rows_past(c, N, 2.1), E = 3;
  if (!c_begin(c, MOE_BF16, "huge: R=%lld N=%lld K=%lld", (long long)R, (long long)N, (long long)K)) return;
  struct moe__args_ggemm_rows args = { .dtype = MOE_BF16, .R = R, .E = E, .N = N, .K = K };
  int32_t offs[] = { 0, ENDS, (int32_t)(R - ENDS), (int32_t)R }, ends[] = { 0, ENDS, ENDS, 2 * ENDS };
  num *b = t_uniform(&c->m, E * N * K, MOE_BF16, 1), *want = t_nums(&c->m, 2 * ENDS * N);
  args.a = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(R, K));
  args.b[0] = c_in(c, MOE_BF16, T_PACKED, b, SHAPE(E, N, K));
  args.c = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(R, N));
  args.offs = c_in_ints(c, offs, SHAPE(E + 1));
  num *a = put_ends(c, &args.a, end_values(c, K, MOE_BF16));
  if (c_run_ggemm_rows(c, &args)) {
    ref_ggemm_rows(want, a, b, NULL, ends, NULL, E, N, K, 1);
    check_ends(c, "c", &args.c, ENDS, want);
  }
  c_end(c);

  /* Weights past 2^31 elements: rows for the first and the last expert only. */
  N = 64, K = 512, E = rows_past(c, N * K, 2.1);
  if (!c_begin(c, MOE_BF16, "huge: E=%lld N=%lld K=%lld", (long long)E, (long long)N, (long long)K)) return;
  struct moe__args_ggemm_rows wide = { .dtype = MOE_BF16, .R = 2 * ENDS, .E = E, .N = N, .K = K };
  int32_t *starts = t_ints(&c->m, E + 1), two[] = { 0, ENDS, 2 * ENDS };
  for (int64_t e = 1; e <= E; e++) starts[e] = e == E ? 2 * ENDS : ENDS;
  a = end_values(c, K, MOE_BF16), b = t_uniform(&c->m, 2 * N * K, MOE_BF16, 1), want = t_nums(&c->m, 2 * ENDS * N);
  wide.a = c_in(c, MOE_BF16, T_PACKED, a, SHAPE(2 * ENDS, K));
  wide.b[0] = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(E, N, K));
  t_write_rows(&c->m, &wide.b[0], 0, 1, b);
  t_write_rows(&c->m, &wide.b[0], E - 1, 1, b + N * K);
  wide.c = c_out(c, MOE_BF16, T_PACKED, SHAPE(2 * ENDS, N));
  wide.offs = c_in_ints(c, starts, SHAPE(E + 1));
  if (c_run_ggemm_rows(c, &wide)) {
    ref_ggemm_rows(want, a, b, NULL, two, NULL, 2, N, K, 1);
    c_check(c, "c", &wide.c, want);
  }
  c_end(c);
}

void huge_ggemm_wgrad(struct conform *c)
{
  int64_t M = 64, N = 512, E = rows_past(c, M * N, 4.2);
  if (!c_begin(c, MOE_BF16, "huge: E=%lld M=%lld N=%lld", (long long)E, (long long)M, (long long)N)) return;
  struct moe__args_ggemm_wgrad args = { .dtype = MOE_BF16, .R = 2 * ENDS, .E = E, .M = M, .N = N };
  int32_t *offs = t_ints(&c->m, E + 1), two[] = { 0, ENDS, 2 * ENDS };
  for (int64_t e = 1; e <= E; e++) offs[e] = e == E ? 2 * ENDS : ENDS;
  num *p = end_values(c, M, MOE_BF16), *q = end_values(c, N, MOE_BF16), *want = t_nums(&c->m, 2 * M * N);
  args.p = c_in(c, MOE_BF16, T_PACKED, p, SHAPE(2 * ENDS, M));
  args.q = c_in(c, MOE_BF16, T_PACKED, q, SHAPE(2 * ENDS, N));
  args.c[0] = t_huge(&c->m, MOE_F32, NAN_BYTE, SHAPE(E, M, N));
  args.offs = c_in_ints(c, offs, SHAPE(E + 1));
  if (c_run_ggemm_wgrad(c, &args)) {
    ref_ggemm_wgrad(want, p, q, two, NULL, NULL, 2, M, N, 1, 1, 0);
    check_ends(c, "c", &args.c[0], 1, want);
  }
  c_end(c);
}

void huge_ggemm_colsum(struct conform *c)
{
  int64_t N = 2048, R = rows_past(c, N, 2.1), E = 3;
  if (!c_begin(c, MOE_BF16, "huge: R=%lld N=%lld", (long long)R, (long long)N)) return;
  struct moe__args_ggemm_colsum args = { .dtype = MOE_BF16, .R = R, .E = E, .N = N };
  int32_t offs[] = { 0, ENDS, (int32_t)(R - ENDS), (int32_t)R }, two[] = { 0, ENDS, 2 * ENDS };
  num *want = t_nums(&c->m, 2 * N);
  args.p = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(R, N));
  args.c[0] = t_huge(&c->m, MOE_F32, NAN_BYTE, SHAPE(E, N));
  args.offs = c_in_ints(c, offs, SHAPE(E + 1));
  num *p = put_ends(c, &args.p, end_values(c, N, MOE_BF16));
  if (c_run_ggemm_colsum(c, &args)) {
    ref_ggemm_colsum(want, p, NULL, two, NULL, 2, N, 1, 0);
    check_ends(c, "c", &args.c[0], 1, want);
  }
  c_end(c);
}

void huge_xent(struct conform *c, int backward)
{
  int64_t V = 2048, T = rows_past(c, V, 4.2);
  if (!c_begin(c, MOE_F32, "huge: T=%lld V=%lld", (long long)T, (long long)V)) return;
  struct moe__args_xent_fwd fwd = { .dtype = MOE_F32, .T = T, .V = V };
  struct moe__args_xent_bwd bwd = { .dtype = MOE_F32, .T = T, .V = V };
  struct ref_xent how = { .T = 2 * ENDS, .V = V };
  num loss, counted, *lse = t_nums(&c->m, 2 * ENDS), *row = t_nums(&c->m, 2 * ENDS), one = n_exact((double)T);
  num *want = t_nums(&c->m, 2 * ENDS * V);
  int32_t health = 0, *targets = t_ints(&c->m, 2 * ENDS); /* all 0 */
  fwd.logits = bwd.logits = t_huge(&c->m, MOE_BF16, BYTE, SHAPE(T, V));
  fwd.targets = bwd.targets = t_huge(&c->m, MOE_I32, 0, SHAPE(T));
  fwd.lse = bwd.lse = t_huge(&c->m, MOE_F32, BYTE, SHAPE(T));
  num *logits = put_ends(c, &fwd.logits, end_values(c, V, MOE_BF16));
  ref_xent_fwd(&loss, lse, row, &counted, &health, logits, targets, &how);
  if (!backward) {
    fwd.rowloss = t_huge(&c->m, MOE_F32, NAN_BYTE, SHAPE(T));
    fwd.loss = c_out(c, MOE_F32, T_PACKED, SHAPE(1));
    if (c_run_xent_fwd(c, &fwd)) {
      check_ends(c, "lse", &fwd.lse, ENDS, lse);
      check_ends(c, "rowloss", &fwd.rowloss, ENDS, row);
    }
  } else {
    for (int t = 0; t < 2 * ENDS; t++) lse[t] = n_exact(ref_round(lse[t].v, MOE_F32));
    put_ends(c, &bwd.lse, lse);
    bwd.dlogits = t_huge(&c->m, MOE_BF16, NAN_BYTE, SHAPE(T, V));
    bwd.dloss = c_in(c, MOE_F32, T_PACKED, &one, SHAPE(1)); /* T: what the mean divides by */
    if (c_run_xent_bwd(c, &bwd)) {
      ref_xent_bwd(want, counted, counted, logits, lse, targets, &how);
      check_ends(c, "dlogits", &bwd.dlogits, ENDS, want);
    }
  }
  c_end(c);
}

void huge_adamw(struct conform *c)
{
  int64_t width = 4096, rows = rows_past(c, width, 14), n = rows * width, ends = 2 * ENDS * width;
  if (!c_begin(c, MOE_F32, "huge: n=%lld", (long long)n)) return;
  struct moe__args_adamw args = { .dtype = MOE_F32, .n = n, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .lr_mult = 1 };
  struct ref_adamw how = { 0.9, 0.95, 1e-8, 0, 1, n_exact(0.5), n_exact(1), 1 };
  moe_tensor p = t_huge(&c->m, MOE_F32, 0, SHAPE(rows, width)), m = t_huge(&c->m, MOE_F32, 0, SHAPE(rows, width));
  moe_tensor v = t_huge(&c->m, MOE_F32, 0, SHAPE(rows, width)), g = t_huge(&c->m, MOE_BF16, 0, SHAPE(rows, width));
  num *vp = t_nums(&c->m, ends), *vm = t_nums(&c->m, ends), *vv = t_nums(&c->m, ends);
  num *vg = put_ends(c, &g, end_values(c, width, MOE_BF16));
  int32_t step = 1;
  args.p = c_flat(&p), args.m = c_flat(&m), args.v = c_flat(&v), args.g = c_flat(&g);
  args.lr = c_in(c, MOE_F32, T_PACKED, &how.lr, SHAPE(1));
  args.step = t_tensor(&c->m, MOE_I64, T_PACKED, SHAPE(1));
  t_put_ints(&c->m, &args.step, &step);
  if (c_run_adamw(c, &args)) {
    /* Huge tensors keep what a run wrote. */
    for (int run = 0; run < c->runs; run++) ref_adamw(vp, NULL, vm, vv, vg, ends, &how);
    check_ends(c, "p", &p, ENDS, vp);
    check_ends(c, "m", &m, ENDS, vm);
  }
  c_end(c);
}
