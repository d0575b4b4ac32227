/* convert.c - see convert.h: every float is decoded into a double, which is exact, and encoded with one rounding. */
#include "core/convert.h"

#include "core/tensor.h"

#include <math.h>

/* A float of `mantissa` bits of fraction and `exponent` bits, IEEE 754 in all but the width. */
static double decode(uint32_t bits, int exponent, int mantissa)
{
  const uint32_t top = (1u << exponent) - 1, e = bits >> mantissa & top, m = bits & ((1u << mantissa) - 1);
  const int bias = (int)(top >> 1);
  const uint64_t sign = (uint64_t)(bits >> (exponent + mantissa) & 1) << 63;
  uint64_t out;
  double v;
  if (e == 0) { /* a subnormal: m steps of 2^(1 - bias - mantissa), all of which a double holds */
    uint64_t step_bits = (uint64_t)(1023 + 1 - bias - mantissa) << 52;
    memcpy(&v, &step_bits, sizeof v);
    v *= (double)m;
    return sign ? -v : v;
  }
  out = sign | (uint64_t)m << (52 - mantissa) | (e == top ? (uint64_t)0x7ff : e - (uint64_t)bias + 1023) << 52;
  memcpy(&v, &out, sizeof v);
  return v;
}

static double load(const unsigned char *at, int64_t dtype)
{
  uint16_t h;
  switch (dtype) {
  case MOE_F64: {
    double v;
    memcpy(&v, at, sizeof v);
    return v;
  }
  case MOE_F32: {
    float v;
    memcpy(&v, at, sizeof v);
    return (double)v;
  }
  case MOE_BF16: memcpy(&h, at, sizeof h); return decode(h, 8, 7);
  case MOE_F16: memcpy(&h, at, sizeof h); return decode(h, 5, 10);
  case MOE_F8E5M2: return decode(*at, 5, 2);
  case MOE_F8E4M3: { /* no infinity: the top exponent is a number, but for the one NaN */
    const int e = *at >> 3 & 15, m = *at & 7;
    const double v = e == 15 ? (m == 7 ? (double)NAN : 256 * (1 + m / 8.0)) : decode(*at & 127, 4, 3);
    return *at & 128 ? -v : v;
  }
  case MOE_I64: {
    int64_t v;
    memcpy(&v, at, sizeof v);
    return (double)v;
  }
  case MOE_I32: {
    int32_t v;
    memcpy(&v, at, sizeof v);
    return (double)v;
  }
  case MOE_U8:
  case MOE_BOOL: return (double)*at;
  default: return NAN;
  }
}

/* The nearest float of 16 bits, ties to the even one: the significand, cut to what the result has room for.  A carry
   out of it runs into the exponent, where it belongs. */
static uint16_t encode(double v, int exponent, int mantissa)
{
  const int bias = (1 << (exponent - 1)) - 1;
  uint64_t bits;
  memcpy(&bits, &v, sizeof bits);
  const uint64_t fraction = bits & (((uint64_t)1 << 52) - 1), inf = (uint64_t)((1 << exponent) - 1) << mantissa;
  const uint16_t sign = (uint16_t)(bits >> 63 << 15);
  const int e = (int)(bits >> 52 & 0x7ff), to = e - 1023 + bias; /* to: the exponent field of a normal result */
  const int drop = 52 - mantissa + (to > 0 ? 0 : 1 - to);        /* bits of the significand that go */
  if (e == 0x7ff)
    return (uint16_t)(sign | inf | (fraction ? (uint64_t)1 << (mantissa - 1) | fraction >> (52 - mantissa) : 0));
  if (e == 0 || drop > 53) return sign; /* less than half the smallest */
  const uint64_t significand = (uint64_t)1 << 52 | fraction, rest = significand & (((uint64_t)1 << drop) - 1),
                 half = (uint64_t)1 << (drop - 1);
  uint64_t out = significand >> drop;
  out += rest > half || (rest == half && (out & 1));
  if (to > 0) out += (uint64_t)(to - 1) << mantissa; /* the leading one adds 1 */
  return (uint16_t)(sign | (out < inf ? out : inf));
}

static void store(unsigned char *at, int64_t dtype, double v)
{
  uint16_t h;
  float f;
  switch (dtype) {
  case MOE_F64: memcpy(at, &v, sizeof v); return;
  case MOE_F32:
    f = (float)v;
    memcpy(at, &f, sizeof f);
    return;
  default: h = dtype == MOE_BF16 ? encode(v, 8, 7) : encode(v, 5, 10); memcpy(at, &h, sizeof h);
  }
}

double moe__to_double(const void *data, int64_t dtype, int64_t i)
{
  return load((const unsigned char *)data + i * (int64_t)moe_dtype_size(dtype), dtype);
}

int moe__converts(int64_t to_dtype, int64_t from_dtype)
{
  return moe_dtype_size(to_dtype) &&
         (to_dtype == from_dtype ||
          (moe__is_float(to_dtype) &&
           (moe__is_float(from_dtype) || from_dtype == MOE_F8E4M3 || from_dtype == MOE_F8E5M2)));
}

void moe__convert(void *to, int64_t to_dtype, int64_t to_stride, const void *from, int64_t from_dtype,
                  int64_t from_stride, int64_t n)
{
  const int64_t size = (int64_t)moe_dtype_size(to_dtype), to_step = to_stride * size,
                from_step = from_stride * (int64_t)moe_dtype_size(from_dtype);
  unsigned char *t = to;
  const unsigned char *f = from;
  if (to_dtype == from_dtype && to_step == size && from_step == size) memcpy(t, f, (size_t)(n * size));
  else if (to_dtype == from_dtype)
    for (int64_t i = 0; i < n; i++) memcpy(t + i * to_step, f + i * from_step, (size_t)size);
  else
    for (int64_t i = 0; i < n; i++) store(t + i * to_step, to_dtype, load(f + i * from_step, from_dtype));
}
