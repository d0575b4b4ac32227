/* num.c - numbers with a bound on their error: the functions of ref.h that are too long for a header. */
#include "ref.h"

#include <float.h>

/* Largest errors in ULP that OpenCL C 1.2 allows (table 7.4); CUDA's are smaller. */
enum { EXP = 3, EXPM1 = 3, LOG = 3, LOG1P = 2, TANH = 5, ERF = 16, POW = 16, COS = 4, SQRT = 3 };
#define DIV 2.5

_Thread_local double ref_u = 0x1p-53, ref_tiny = DBL_MIN, ref_addition = 1;

void ref_arithmetic(int64_t dtype)
{
  ref_u = dtype == MOE_NONE ? 0 : dtype == MOE_F64 ? 0x1p-53 : 0x1p-24;
  ref_tiny = dtype == MOE_NONE ? 0 : dtype == MOE_F64 ? DBL_MIN : (double)FLT_MIN;
}

double ref_real(double x)
{
  return ref_u == 0x1p-53 ? x : (double)(float)x;
}

/* Significant bits, exponent of the smallest normal number, and the largest number. */
struct format {
  int bits, lowest;
  double largest;
};
static struct format format_of(int64_t dtype)
{
  switch (dtype) {
  case MOE_F32: return (struct format){ 24, -126, FLT_MAX };
  case MOE_BF16: return (struct format){ 8, -126, 0x1.fep127 };
  case MOE_F16: return (struct format){ 11, -14, 65504 };
  default: return (struct format){ 53, -1022, DBL_MAX };
  }
}

double ref_round(double x, int64_t dtype)
{
  struct format f = format_of(dtype);
  if (!isfinite(x) || x == 0 || f.bits == 53) return x;
  int exponent = ilogb(x) < f.lowest ? f.lowest : ilogb(x);
  double y = ldexp(nearbyint(ldexp(x, f.bits - 1 - exponent)), exponent - f.bits + 1);
  return fabs(y) > f.largest ? copysign(INFINITY, x) : y;
}

double ref_rounding(double x, int64_t dtype)
{
  struct format f = format_of(dtype);
  double smallest = ldexp(1, f.lowest);
  /* Below the normal numbers half the fixed step; where bf16, f32 and f64 may be flushed, the whole number. */
  if (fabs(x) < smallest) return dtype == MOE_F16 ? ldexp(smallest, -f.bits) : smallest;
  return ldexp(fabs(x), -f.bits);
}

num sum_end(const struct sum *s)
{
  double nu = (double)s->n * ref_u * ref_addition;
  return (num){ s->v, s->e + nu / (1 - nu) * s->mag };
}

num n_div(num a, num b)
{
  double v = a.v / b.v;
  if (a.e == 0 && b.e == 0) return n_ulps(v, 0, DIV);
  if (!(fabs(b.v) > b.e)) return (num){ v, INFINITY };
  return n_ulps(v, (a.e + fabs(v) * b.e) / (fabs(b.v) - b.e), DIV);
}

num n_sqrt(num a)
{
  double v = sqrt(a.v), low = sqrt(fmax(a.v - a.e, 0));
  return n_ulps(v, a.e == 0 ? 0 : fmin(a.e / (v + low), sqrt(a.v + a.e)), SQRT);
}

num n_exp(num a)
{
  double v = exp(a.v);
  return n_ulps(v, a.e == 0 || v == 0 ? 0 : v * expm1(a.e), EXP);
}

num n_expm1(num a)
{
  return n_ulps(expm1(a.v), a.e == 0 ? 0 : exp(a.v) * expm1(a.e), EXPM1);
}

num n_log(num a)
{
  if (!(a.v > a.e)) return (num){ log(a.v), a.e == 0 ? 0 : INFINITY };
  return n_ulps(log(a.v), -log1p(-a.e / a.v), LOG);
}

num n_log1p(num a)
{
  if (!(1 + a.v > a.e)) return (num){ log1p(a.v), a.e == 0 ? 0 : INFINITY };
  return n_ulps(log1p(a.v), -log1p(-a.e / (1 + a.v)), LOG1P);
}

num n_tanh(num a)
{
  double v = tanh(a.v), inner = tanh(fmax(fabs(a.v) - a.e, 0));
  return n_ulps(v, a.e * (1 - inner * inner), TANH);
}

num n_erf(num a)
{
  double inner = fmax(fabs(a.v) - a.e, 0);
  return n_ulps(erf(a.v), a.e * 2 / sqrt(acos(-1)) * exp(-inner * inner), ERF);
}

num n_pow(num a, num b)
{
  double v = pow(a.v, b.v), e = 0;
  if (a.e != 0) e += fabs(b.v * pow(a.v, b.v - 1)) * a.e;
  if (b.e != 0 && v != 0) e += fabs(v * log(fabs(a.v))) * b.e;
  return n_ulps(v, e, POW);
}

num n_cos(num a)
{
  return n_ulps(cos(a.v), a.e, COS);
}

num n_sigmoid(num a)
{
  return n_div(n_exact(1), n_add(n_exact(1), n_exp(n_neg(a))));
}
