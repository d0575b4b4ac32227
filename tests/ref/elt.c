/* elt.c - reference of the elementwise maps and of the full sum. */
#include "ref.h"

void ref_elt_map(num *y, const num *a, const num *b, const num *scale, int64_t op, int64_t n, double alpha)
{
  num by = scale ? n_mul(n_real(alpha), scale[0]) : n_real(alpha);
  for (int64_t i = 0; i < n; i++) switch (op) {
    case MOE__ELT_COPY: y[i] = by.v == 1 ? a[i] : n_mul(by, a[i]); break;
    case MOE__ELT_FILL: y[i] = n_real(alpha); break;
    case MOE__ELT_ADD: y[i] = n_add(a[i], b[i]); break;
    case MOE__ELT_MUL: y[i] = n_mul(a[i], b[i]); break;
    case MOE__ELT_AXPY: y[i] = n_add(n_mul(by, a[i]), b[i]); break;
    default: y[i] = n_sigmoid(a[i]);
    }
}

/* By 64-bit products. */
void ref_philox(uint32_t words[4], uint64_t counter, uint64_t stream, uint64_t key)
{
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  uint32_t x[4] = { (uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)stream, (uint32_t)(stream >> 32) };
  for (int round = 0; round < 10; round++) {
    uint64_t p = (uint64_t)x[0] * 0xD2511F53u, q = (uint64_t)x[2] * 0xCD9E8D57u;
    uint32_t next[4] = { (uint32_t)(q >> 32) ^ x[1] ^ k0, (uint32_t)q, (uint32_t)(p >> 32) ^ x[3] ^ k1, (uint32_t)p };
    memcpy(x, next, sizeof next);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  memcpy(words, x, sizeof x);
}

/* The sum of 16 uniform half-words less its mean, over its standard deviation.  The integer and the one product
   are exact and correctly rounded, so the result is known to the bit. */
void ref_elt_normal_at(num *y, int64_t first, int64_t n, int64_t seed, int64_t stream, double stddev)
{
  double factor = ref_real(stddev / sqrt(16 * 4294967295.0 / 12));
  for (int64_t i = 0; i < n; i++) {
    int32_t k = -16 * 65535 / 2;
    for (uint64_t half = 0; half < 2; half++) {
      uint32_t x[4];
      ref_philox(x, 2 * (uint64_t)(first + i) + half, (uint64_t)stream, (uint64_t)seed);
      for (int j = 0; j < 4; j++) k += (int32_t)(x[j] & 0xffff) + (int32_t)(x[j] >> 16);
    }
    y[i] = n_exact(ref_real(k * factor));
  }
}

void ref_elt_normal(num *y, int64_t n, int64_t seed, int64_t stream, double stddev)
{
  ref_elt_normal_at(y, 0, n, seed, stream, stddev);
}

void ref_elt_sum(num *y, const num *a, int64_t n, int64_t accumulate, double alpha)
{
  struct sum s = { 0 };
  for (int64_t i = 0; i < n; i++) sum_add(&s, a[i]);
  num total = n_mul(n_real(alpha), sum_end(&s));
  y[0] = accumulate ? n_add(y[0], total) : total;
}
