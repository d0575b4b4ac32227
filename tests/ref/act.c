/* act.c - reference of the activations of the expert MLP and their derivatives. */
#include "ref.h"

/* An irrational constant, rounded once to the arithmetic. */
static num constant(double c)
{
  return n_ulps(c, 0, 0.5);
}

/* 1 + tanh(sqrt(2/pi) * (g + 0.044715 g^3)); *slope: the derivative of the tanh's argument. */
static num one_plus_tanh(num g, num *slope)
{
  num c = constant(sqrt(2 / acos(-1))), cube = n_mul(constant(0.044715), n_mul(g, n_mul(g, g)));
  num square = n_mul(constant(3 * 0.044715), n_mul(g, g));
  *slope = n_mul(c, n_add(n_exact(1), square));
  return n_add(n_exact(1), n_tanh(n_mul(c, n_add(g, cube))));
}

static num one_plus_erf(num g)
{
  return n_add(n_exact(1), n_erf(n_mul(g, constant(sqrt(0.5)))));
}

static num alpha_of(struct moe__act act)
{
  return act.alpha == 0 ? n_exact(1) : n_real(act.alpha);
}

num ref_activation(struct moe__act act, num g)
{
  num slope, half = n_exact(0.5);
  switch (act.kind) {
  case MOE__ACT_IDENTITY: return g;
  case MOE__ACT_RELU: return n_max(g, n_exact(0));
  case MOE__ACT_RELU2: return n_mul(n_max(g, n_exact(0)), n_max(g, n_exact(0)));
  case MOE__ACT_GELU: return n_mul(n_mul(half, g), one_plus_erf(g));
  case MOE__ACT_GELU_TANH: return n_mul(n_mul(half, g), one_plus_tanh(g, &slope));
  case MOE__ACT_SILU: return n_mul(g, n_sigmoid(n_mul(alpha_of(act), g)));
  default: return n_sigmoid(g);
  }
}

/* f'(g) */
static num derivative(struct moe__act act, num g)
{
  num half = n_exact(0.5), one = n_exact(1), slope, t, s;
  switch (act.kind) {
  case MOE__ACT_IDENTITY: return one;
  case MOE__ACT_RELU: return n_exact(g.v > 0);
  case MOE__ACT_RELU2: return g.v > 0 ? n_mul(n_exact(2), g) : n_exact(0);
  case MOE__ACT_GELU: /* Phi(g) + g * phi(g) */
    t = n_mul(constant(1 / sqrt(2 * acos(-1))), n_exp(n_mul(n_exact(-0.5), n_mul(g, g))));
    return n_add(n_mul(half, one_plus_erf(g)), n_mul(g, t));
  case MOE__ACT_GELU_TANH: /* (1 + t)/2 + g/2 * (1 - t^2) * slope, with 1 - t^2 = (1 + t)(2 - (1 + t)) */
    t = one_plus_tanh(g, &slope);
    s = n_mul(t, n_sub(n_exact(2), t));
    return n_add(n_mul(half, t), n_mul(n_mul(n_mul(half, g), s), slope));
  case MOE__ACT_SILU: /* s + alpha*g * s * (1 - s) */
    t = n_mul(alpha_of(act), g);
    s = n_sigmoid(t);
    return n_add(s, n_mul(t, n_mul(s, n_sub(one, s))));
  default: s = n_sigmoid(g); return n_mul(s, n_sub(one, s));
  }
}

/* What the parts of one h become: a = ref_activation(g) * u; where the clamps hold a value back, no gradient flows. */
struct parts {
  num g, u; /* clamped; u with its offset, 1 where not gated */
  int g_flows, u_flows;
};
static struct parts parts_of(struct moe__act act, const num *h, int64_t f, int64_t F)
{
  struct parts p = { h[f], n_exact(1), 1, 0 };
  double limit = ref_real(act.limit);
  p.g_flows = !(limit > 0 && p.g.v > limit);
  if (!p.g_flows) p.g = n_exact(limit);
  if (!act.gated) return p;
  num up = h[F + f];
  p.u_flows = !(limit > 0 && fabs(up.v) > limit);
  if (!p.u_flows) up = n_exact(copysign(limit, up.v));
  p.u = act.up_offset == 0 ? up : n_add(up, n_real(act.up_offset));
  return p;
}

static num whole(struct moe__act act, struct parts p)
{
  return act.gated ? n_mul(ref_activation(act, p.g), p.u) : ref_activation(act, p.g);
}

void ref_act_fwd(num *a, const num *h, int64_t rows, int64_t F, struct moe__act act)
{
  int64_t width = act.gated ? 2 * F : F;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t f = 0; f < F; f++) a[r * F + f] = whole(act, parts_of(act, h + r * width, f, F));
}

void ref_act_bwd(num *dh, num *aw, num *dweights, const num *da, const num *h, const num *weights,
                 const int32_t *row2slot, int64_t rows, int64_t F, int64_t accumulate, struct moe__act act, int64_t st)
{
  int64_t width = act.gated ? 2 * F : F;
  for (int64_t r = 0; r < rows; r++) {
    int64_t slot = row2slot ? row2slot[r] : r;
    num w = weights ? weights[slot] : n_exact(1);
    struct sum dot = { 0 };
    for (int64_t f = 0; f < F; f++) {
      struct parts p = parts_of(act, h + r * width, f, F);
      num a = whole(act, p), d = n_mul(w, da[r * F + f]);
      if (ref_u) a.e += ref_rounding(a.v, st);
      num dg = n_mul(d, derivative(act, p.g));
      dh[r * width + f] = !p.g_flows ? n_exact(0) : act.gated ? n_mul(dg, p.u) : dg;
      if (act.gated) dh[r * width + F + f] = p.u_flows ? n_mul(d, ref_activation(act, p.g)) : n_exact(0);
      if (aw) aw[r * F + f] = n_mul(w, a);
      sum_mul(&dot, da[r * F + f], a);
    }
    if (dweights) dweights[slot] = accumulate ? n_add(dweights[slot], sum_end(&dot)) : sum_end(&dot);
  }
}
