/* norm.c - reference of RMS norm: y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps). */
#include "ref.h"

void ref_rms_fwd(num *y, num *rstd, const num *x, const num *w, int64_t T, int64_t D, double eps)
{
  for (int64_t t = 0; t < T; t++, x += D, y += D) {
    struct sum s = { 0 };
    for (int64_t d = 0; d < D; d++) sum_mul(&s, x[d], x[d]);
    num mean = n_div(sum_end(&s), n_exact((double)D));
    rstd[t] = n_div(n_exact(1), n_sqrt(n_add(mean, n_real(eps))));
    for (int64_t d = 0; d < D; d++) y[d] = n_mul(n_mul(x[d], rstd[t]), w[d]);
  }
}

/* dx = rstd * (w*dy - xhat * mean(w*dy*xhat)),  dw (+)= sum over t of dy * xhat,  xhat = x * rstd. */
void ref_rms_bwd(num *dx, num *dw, const num *dy, const num *x, const num *w, const num *rstd, int64_t T, int64_t D,
                 int64_t accumulate)
{
  for (int64_t t = 0; t < T && dx; t++) {
    const num *dyt = dy + t * D, *xt = x + t * D;
    struct sum s = { 0 };
    for (int64_t d = 0; d < D; d++) sum_mul(&s, n_mul(w[d], dyt[d]), n_mul(xt[d], rstd[t]));
    num mean = n_div(sum_end(&s), n_exact((double)D));
    for (int64_t d = 0; d < D; d++)
      dx[t * D + d] = n_mul(rstd[t], n_sub(n_mul(w[d], dyt[d]), n_mul(n_mul(xt[d], rstd[t]), mean)));
  }
  for (int64_t d = 0; d < D && dw; d++) {
    struct sum s = { 0 };
    for (int64_t t = 0; t < T; t++) sum_mul(&s, dy[t * D + d], n_mul(x[t * D + d], rstd[t]));
    dw[d] = accumulate ? n_add(dw[d], sum_end(&s)) : sum_end(&s);
  }
}
