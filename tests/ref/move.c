/* move.c - reference of the ops that move rows between tokens and experts. */
#include "ref.h"

void ref_gather_rows(num *y, int32_t *health, const num *x, const int32_t *map, int64_t n, int64_t rows, int64_t D,
                     int64_t div)
{
  for (int64_t i = 0; i < n; i++) {
    int good = map[i] >= 0 && map[i] < rows * div;
    if (!good) *health |= MOE_HEALTH_ID;
    for (int64_t d = 0; d < D; d++) y[i * D + d] = good ? x[map[i] / div * D + d] : n_exact(NAN);
  }
}

void ref_combine(num *y, const num *rows, const num *weights, const int32_t *slot2row, const num *add, int64_t T,
                 int64_t K, int64_t D, int64_t unweighted)
{
  for (int64_t t = 0; t < T; t++)
    for (int64_t d = 0; d < D; d++) {
      struct sum s = { 0 };
      if (add) sum_add(&s, add[t * D + d]);
      for (int64_t k = 0; k < K; k++) {
        int64_t slot = t * K + k, row = slot2row[slot];
        num w = weights ? weights[slot] : n_exact(1);
        if (row >= 0) sum_mul(&s, unweighted ? n_exact(1) : w, rows[row * D + d]);
        else sum_add(&s, n_exact(isfinite(w.v) ? 0 : NAN));
      }
      y[t * D + d] = sum_end(&s);
    }
}

void ref_row_dot(num *y, const num *a, const num *b, const int32_t *ids, int64_t T, int64_t K, int64_t E, int64_t D)
{
  for (int64_t i = 0; i < T * K; i++) {
    struct sum s = { 0 };
    for (int64_t d = 0; d < D && ids[i] >= 0 && ids[i] < E; d++) sum_mul(&s, a[i / K * D + d], b[ids[i] * D + d]);
    y[i] = sum_end(&s);
  }
}

void ref_gather_cols(num *y, const num *x, const int32_t *ids, int64_t T, int64_t E, int64_t K)
{
  for (int64_t i = 0; i < T * K; i++) y[i] = ids[i] >= 0 && ids[i] < E ? x[i / K * E + ids[i]] : n_exact(NAN);
}

void ref_scatter_cols(num *y, const num *x, const int32_t *ids, int64_t T, int64_t E, int64_t K)
{
  for (int64_t t = 0; t < T; t++)
    for (int64_t e = 0; e < E; e++) {
      struct sum s = { 0 };
      for (int64_t k = 0; k < K; k++)
        if (ids[t * K + k] == e) sum_add(&s, x[t * K + k]);
      y[t * E + e] = sum_end(&s);
    }
}
