/* elt.c - cases of the elementwise maps, the normal numbers and the full sum. */
#include "conform.h"

static const int64_t sizes[] = { 1, 0, 65, 127, 64, 129, 63, 128, 1009, 257 };
#define SIZES ((int64_t)(sizeof sizes / sizeof *sizes))

enum alias { APART, Y_IS_A, Y_IS_B };

static void map_case(struct conform *c, int64_t dtype, int64_t op, int64_t n, int64_t y, int64_t a, int64_t b,
                     enum alias alias, int scaled)
{
  static const char *const names[] = { "copy", "fill", "add", "mul", "axpy", "sigmoid" };
  int has_a = op != MOE__ELT_FILL, has_b = op == MOE__ELT_ADD || op == MOE__ELT_MUL || op == MOE__ELT_AXPY;
  if ((alias == Y_IS_A && (y != a || !has_a)) || (alias == Y_IS_B && (y != b || !has_b))) return;
  if (!c_begin(c, dtype, "%s n=%lld %s<-%s,%s%s%s", names[op], (long long)n, moe_dtype_name(y), moe_dtype_name(a),
               moe_dtype_name(b), alias ? " in place" : "", scaled ? " scale" : ""))
    return;
  struct moe__args_elt_map args = {
    .dtype = dtype, .op = op, .n = n, .alpha = op == MOE__ELT_COPY && !scaled ? 1 : 0.7
  };
  num *va = t_uniform(&c->m, n, a, op == MOE__ELT_SIGMOID ? 30 : 2), *vb = t_uniform(&c->m, n, b, 2);
  num *scale = t_uniform(&c->m, 1, c_real(dtype), 1), *want = t_nums(&c->m, n);
  int layout = n % 2 ? T_ODD : T_PACKED;
  if (has_a && alias != Y_IS_A) args.a = c_in(c, a, T_PACKED, va, SHAPE(n));
  if (has_b && alias != Y_IS_B) args.b = c_in(c, b, layout, vb, SHAPE(n));
  if (scaled) args.scale = c_in(c, c_real(dtype), T_ODD, scale, SHAPE(1));
  if (alias == APART) args.y = c_out(c, y, layout, SHAPE(n));
  else args.y = c_inout(c, y, layout, alias == Y_IS_A ? va : vb, SHAPE(n));
  if (alias == Y_IS_A) args.a = args.y;
  if (alias == Y_IS_B) args.b = args.y;
  if (c_run_elt_map(c, &args)) {
    ref_elt_map(want, va, vb, scaled ? scale : NULL, op, n, args.alpha);
    c_check(c, "y", &args.y, want);
  }
  c_end(c);
}

void conform_elt_map(struct conform *c)
{
  int64_t at = 0, most = c->effort == LONG ? SIZES : c->effort == SHORT ? 2 : 1;
  for (int64_t d = 0; d < 2; d++) {
    int64_t dtype = c_dtypes[d], kinds = dtype == MOE_F64 ? 2 : 3;
    for (int64_t op = MOE__ELT_COPY; op <= MOE__ELT_SIGMOID; op++)
      for (int64_t i = 0; i < kinds * kinds; i++)
        for (int64_t s = 0; s < most; s++, at++) {
          int64_t y = c_float(dtype, i), a = c_float(dtype, i / kinds), b = c_float(dtype, at), n = sizes[at % SIZES];
          int scaled = at % 3 == 0 && (op == MOE__ELT_COPY || op == MOE__ELT_AXPY);
          map_case(c, dtype, op, n, y, a, b, APART, scaled);
          map_case(c, dtype, op, n, y, a, y, at % 2 ? Y_IS_A : Y_IS_B, scaled);
        }
    if (c->effort != SMALL) map_case(c, dtype, MOE__ELT_AXPY, 100003, MOE_F32, MOE_F32, MOE_F32, APART, 1);
  }
  huge_elt_map(c);
}

static void normal_case(struct conform *c, int64_t dtype, int64_t y, int64_t n, int64_t seed, int64_t stream)
{
  if (!c_begin(c, dtype, "%s n=%lld seed=%lld stream=%lld", moe_dtype_name(y), (long long)n, (long long)seed,
               (long long)stream))
    return;
  struct moe__args_elt_normal args = { .dtype = dtype, .n = n, .seed = seed, .stream = stream, .stddev = 0.02 };
  num *want = t_nums(&c->m, n);
  args.y = c_out(c, y, n % 2 ? T_ODD : T_PACKED, SHAPE(n));
  if (c_run_elt_normal(c, &args)) {
    ref_elt_normal(want, n, seed, stream, args.stddev);
    c_check(c, "y", &args.y, want);
  }
  c_end(c);
}

void conform_elt_normal(struct conform *c)
{
  for (int64_t d = 0; d < 2; d++)
    for (int64_t i = 0; i < (c->effort == SMALL ? 2 : SIZES); i++)
      normal_case(c, c_dtypes[d], c_float(c_dtypes[d], i), sizes[i], 0x123456789abcdef * i, i * 0x300000007);
  normal_case(c, MOE_F32, MOE_F32, 33, -1, -1);
  huge_elt_normal(c);
}

static void sum_case(struct conform *c, int64_t dtype, int64_t a, int64_t n, int64_t accumulate, int whole)
{
  if (!c_begin(c, dtype, "%s n=%lld%s%s", moe_dtype_name(a), (long long)n, accumulate ? " +=" : "",
               whole ? " whole numbers" : ""))
    return;
  if (whole) c_exact();
  struct moe__args_elt_sum args = { .dtype = dtype, .n = n, .accumulate = accumulate, .alpha = whole ? 2 : 0.3 };
  num *va = whole ? t_whole(&c->m, n, 8) : t_uniform(&c->m, n, a, 1), *y = t_whole(&c->m, 1, 9);
  args.a = c_in(c, a, n % 2 ? T_ODD : T_PACKED, va, SHAPE(n));
  if (accumulate) args.y = c_inout(c, c_real(dtype), T_ODD, y, SHAPE(1));
  else args.y = c_out(c, c_real(dtype), T_PACKED, SHAPE(1));
  args.scratch = c_out(c, c_real(dtype), T_PACKED, SHAPE(MOE__PARTS));
  if (c_run_elt_sum(c, &args)) {
    ref_elt_sum(y, va, n, accumulate, args.alpha);
    c_check(c, "y", &args.y, y);
  }
  c_end(c);
}

void conform_elt_sum(struct conform *c)
{
  static const int64_t large[] = { 4095, 4096, 4097, 8193, 70001, 300007 };
  for (int64_t d = 0; d < 2; d++)
    for (int64_t i = 0; i < SIZES + (c->effort == LONG ? 6 : c->effort == SHORT ? 5 : 1); i++) {
      int64_t n = i < SIZES ? sizes[i] : large[i - SIZES];
      sum_case(c, c_dtypes[d], c_float(c_dtypes[d], i), n, i % 2, 0);
      sum_case(c, c_dtypes[d], c_float(c_dtypes[d], i + 1), n, i % 2, 1);
    }
  huge_elt_sum(c);
}
