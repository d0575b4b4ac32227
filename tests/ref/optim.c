/* optim.c - reference of AdamW, the gradient norm and its clipping, and the learning-rate schedule. */
#include "ref.h"

/* 1 - beta^t, without the cancellation. */
static num unbias(double beta, int64_t t)
{
  return n_neg(n_expm1(n_mul(n_exact((double)t), n_real(log(beta)))));
}

void ref_adamw(num *p, num *master, num *m, num *v, const num *g, int64_t n, const struct ref_adamw *how)
{
  if (!isfinite(how->gscale.v) || how->gscale.v < 0) return;
  num b1 = n_real(how->beta1), b2 = n_real(how->beta2), rest1 = n_real(1 - how->beta1), rest2 = n_real(1 - how->beta2);
  num c1 = unbias(how->beta1, how->step), c2 = unbias(how->beta2, how->step);
  num lr = n_mul(how->lr, n_real(how->lr_mult));
  for (int64_t i = 0; i < n; i++) {
    num gi = n_mul(how->gscale, g[i]);
    m[i] = n_add(n_mul(b1, m[i]), n_mul(rest1, gi));
    v[i] = n_add(n_mul(b2, v[i]), n_mul(rest2, n_mul(gi, gi)));
    num old = master ? master[i] : p[i];
    num step = n_div(n_div(m[i], c1), n_add(n_sqrt(n_div(v[i], c2)), n_real(how->eps)));
    num now = n_sub(old, n_mul(lr, n_add(step, n_mul(n_real(how->decay), old))));
    p[i] = now;
    if (master) {
      master[i] = now;
      p[i].e += ref_rounding(fabs(now.v) + now.e, MOE_F32);
    }
  }
}

void ref_sqnorm(num *y, const num *a, int64_t n, int64_t accumulate)
{
  struct sum s = { 0 };
  for (int64_t i = 0; i < n; i++) sum_mul(&s, a[i], a[i]);
  y[0] = accumulate ? n_add(y[0], sum_end(&s)) : sum_end(&s);
}

void ref_clip(num y[2], int32_t *health, num sq, const num *loss_scale, double max_norm)
{
  num inv = loss_scale ? n_div(n_exact(1), loss_scale[0]) : n_exact(1), top = n_real(max_norm);
  y[1] = n_mul(n_sqrt(sq), inv);
  y[0] = top.v > 0 && y[1].v > top.v ? n_mul(inv, n_div(top, y[1])) : inv;
  if (isfinite(y[1].v) && inv.v > 0) return;
  y[0] = n_exact(-1);
  y[1] = n_exact(y[1].v);
  *health |= MOE_HEALTH_OVERFLOW;
}

int64_t ref_lr_step(num *lr, int64_t step, const num *gscale, int64_t warmup, int64_t total, double peak, double floor)
{
  if (!gscale || !(gscale->v < 0)) step++;
  num top = n_real(peak), low = n_real(floor);
  if (step < warmup) {
    *lr = n_div(n_mul(top, n_exact((double)step)), n_exact((double)warmup));
    return step;
  }
  double x = total ? (double)(step - warmup) / (double)(total - warmup) : 0;
  num pi = n_ulps(acos(-1), 0, 0.5), angle = n_mul(pi, x < 1 ? n_ulps(x, 0, 2.5) : n_exact(1));
  num half = n_mul(n_exact(0.5), n_add(n_exact(1), n_cos(angle)));
  *lr = n_add(low, n_mul(n_sub(top, low), half));
  return step;
}
