/* ggemm.c - reference of the products over ragged experts: rows offs[e]..offs[e+1] belong to expert e. */
#include "ref.h"

/* The row of an operand that stands at row r. */
static int64_t source(const int32_t *map, int64_t r, int64_t div)
{
  return map ? map[r] / div : r;
}

void ref_ggemm_rows(num *c, const num *a, const num *b, const num *bias, const int32_t *offs, const int32_t *map,
                    int64_t E, int64_t N, int64_t K, int64_t div)
{
  for (int64_t e = 0; e < E; e++)
    for (int64_t r = offs[e]; r < offs[e + 1]; r++)
      for (int64_t n = 0; n < N; n++) {
        struct sum s = { 0 };
        const num *ar = a + source(map, r, div) * K, *bn = b + (e * N + n) * K;
        for (int64_t k = 0; k < K; k++) sum_mul(&s, ar[k], bn[k]);
        c[r * N + n] = bias ? n_add(sum_end(&s), bias[e * N + n]) : sum_end(&s);
      }
}

void ref_ggemm_wgrad(num *c, const num *p, const num *q, const int32_t *offs, const int32_t *pmap, const int32_t *qmap,
                     int64_t E, int64_t M, int64_t N, int64_t pdiv, int64_t qdiv, int64_t accumulate)
{
  for (int64_t e = 0; e < E; e++)
    for (int64_t m = 0; m < M; m++)
      for (int64_t n = 0; n < N; n++) {
        struct sum s = { 0 };
        for (int64_t r = offs[e]; r < offs[e + 1]; r++)
          sum_mul(&s, p[source(pmap, r, pdiv) * M + m], q[source(qmap, r, qdiv) * N + n]);
        num *to = c + (e * M + m) * N + n;
        *to = accumulate ? n_add(*to, sum_end(&s)) : sum_end(&s);
      }
}

void ref_ggemm_colsum(num *c, const num *p, const num *weights, const int32_t *offs, const int32_t *map, int64_t E,
                      int64_t N, int64_t div, int64_t accumulate)
{
  for (int64_t e = 0; e < E; e++)
    for (int64_t n = 0; n < N; n++) {
      struct sum s = { 0 };
      for (int64_t r = offs[e]; r < offs[e + 1]; r++) {
        num x = p[source(map, r, div) * N + n];
        if (weights) sum_mul(&s, weights[map ? map[r] : r], x);
        else sum_add(&s, x);
      }
      c[e * N + n] = accumulate ? n_add(c[e * N + n], sum_end(&s)) : sum_end(&s);
    }
}
