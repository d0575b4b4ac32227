/* gemm.c - reference of the dense product: c[m,n] = alpha * sum_k a[m,k] b[n,k] + bias[n] (+ c). */
#include "ref.h"

void ref_gemm(num *c, const num *a, const num *b, const num *bias, int64_t M, int64_t N, int64_t K, int64_t accumulate,
              double alpha)
{
  for (int64_t m = 0; m < M; m++)
    for (int64_t n = 0; n < N; n++) {
      struct sum s = { 0 };
      for (int64_t k = 0; k < K; k++) sum_mul(&s, a[m * K + k], b[n * K + k]);
      num v = n_mul(n_real(alpha), sum_end(&s));
      if (bias) v = n_add(v, bias[n]);
      c[m * N + n] = accumulate ? n_add(c[m * N + n], v) : v;
    }
}
