/* layer.c - see layer.h. */
#include "layer.h"

const char *const ref_param_names[REF_PARAMS] = {
  "router",  "router_bias", "correction_bias",  "gate",      "up",          "down",       "gate_bias",
  "up_bias", "down_bias",   "shared_gate_proj", "shared_up", "shared_down", "shared_gate"
};

/* a as the next op reads it: rounded to a 16-bit storage type. */
static num *stored(num *a, int64_t n, int64_t dtype)
{
  for (int64_t i = 0; i < n && (dtype == MOE_BF16 || dtype == MOE_F16); i++)
    a[i].e += ref_rounding(fabs(a[i].v) + a[i].e, dtype);
  return a;
}

static num *copied(struct t_memory *m, const num *a, int64_t n)
{
  num *c = t_nums(m, n);
  memcpy(c, a, (size_t)n * sizeof *c);
  return c;
}

/* `count` matrices [rows,cols], each transposed. */
static num *flipped(struct t_memory *m, const num *a, int64_t count, int64_t rows, int64_t cols)
{
  num *t = t_nums(m, count * rows * cols);
  for (int64_t e = 0; e < count; e++, a += rows * cols)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < cols; j++) t[(e * cols + j) * rows + i] = a[i * cols + j];
  return t;
}

/* [count,na+nb] of a [count,na] (or nothing) and b [count,nb]; NULL where there is no b. */
static num *joined(struct t_memory *m, const num *a, int64_t na, const num *b, int64_t nb, int64_t count)
{
  if (!b) return NULL;
  num *c = t_nums(m, count * (na + nb));
  for (int64_t e = 0; e < count; e++) {
    if (na) memcpy(c + e * (na + nb), a + e * na, (size_t)na * sizeof *c);
    memcpy(c + e * (na + nb) + na, b + e * nb, (size_t)nb * sizeof *c);
  }
  return c;
}

static num *columns(struct t_memory *m, const num *a, int64_t rows, int64_t width, int64_t from, int64_t n)
{
  num *c = t_nums(m, rows * n);
  for (int64_t r = 0; r < rows; r++) memcpy(c + r * n, a + r * width + from, (size_t)n * sizeof *c);
  return c;
}

/* c (+)= a b, a [M,K], b [K,N] */
static void product(struct t_memory *m, num *c, const num *a, const num *b, const num *bias, int64_t M, int64_t N,
                    int64_t K, int64_t accumulate)
{
  ref_gemm(c, a, flipped(m, b, 1, K, N), bias, M, N, K, accumulate, 1);
}

static int64_t width_of(const struct ref_layer *l, int64_t F)
{
  return l->act.gated ? 2 * F : F;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */
static num *shared_forward(struct ref_layer *l, struct t_memory *m)
{
  int64_t T = l->T, D = l->D, Fs = l->Fs, Hs = width_of(l, Fs);
  const num *const *p = l->p;
  num *w = joined(m, p[REF_SHARED_GATE_PROJ], (Hs - Fs) * D, p[REF_SHARED_UP], Fs * D, 1);
  num *a = t_nums(m, T * Fs), *y = t_nums(m, T * D);
  ref_gemm(l->hs = t_nums(m, T * Hs), l->x, w, NULL, T, Hs, D, 0, 1);
  ref_act_fwd(a, stored(l->hs, T * Hs, l->dtype), T, Fs, l->act);
  ref_gemm(y, stored(a, T * Fs, l->dtype), p[REF_SHARED_DOWN], NULL, T, D, Fs, 0, 1);
  stored(y, T * D, l->dtype);
  if (!p[REF_SHARED_GATE]) return y;
  struct moe__weigh sigmoid = { MOE__SIGMOID, 0, 1, 0 };
  int32_t *zeros = t_ints(m, T);
  ref_gemm(l->z = t_nums(m, T), l->x, p[REF_SHARED_GATE], NULL, T, 1, D, 0, 1);
  ref_weights(l->sg = t_nums(m, T), &l->health, l->z, zeros, T, 1, 1, sigmoid);
  for (int64_t i = 0; i < T * D; i++) y[i] = n_mul(l->sg[i / D], y[i]);
  return stored(y, T * D, l->dtype);
}

void ref_layer_forward(struct ref_layer *l, struct t_memory *m)
{
  int64_t T = l->T, D = l->D, F = l->F, E = l->E, K = l->K, R = T * K, H = width_of(l, F), S = l->S ? l->S : 1;
  const num *const *p = l->p;
  if (p[REF_ROUTER]) {
    num *logits = t_nums(m, T * E);
    ref_gemm(logits, l->x, p[REF_ROUTER], p[REF_ROUTER_BIAS], T, E, D, 0, 1);
    l->logits = logits;
  }
  ref_weights(l->weights = t_nums(m, R), &l->health, l->logits, l->ids, T, E, K, l->weigh);
  l->offs = t_ints(m, E + 1);
  l->row2slot = t_ints(m, R);
  l->slot2row = t_ints(m, R);
  ref_plan(l->offs, l->row2slot, l->slot2row, &l->health, l->ids, l->weights, T, K, E);

  num *w = joined(m, p[REF_GATE], (H - F) * D, p[REF_UP], F * D, E);
  num *bias = joined(m, p[REF_GATE_BIAS], H - F, p[REF_UP_BIAS], F, E);
  num *a = t_nums(m, R * F), *rows = t_nums(m, R * D), *shared = l->Fs ? shared_forward(l, m) : NULL;
  ref_ggemm_rows(l->h = t_nums(m, R * H), l->x, w, bias, l->offs, l->row2slot, E, H, D, K);
  ref_act_fwd(a, stored(l->h, R * H, l->dtype), l->offs[E], F, l->act);
  ref_ggemm_rows(rows, stored(a, R * F, l->dtype), p[REF_DOWN], p[REF_DOWN_BIAS], l->offs, NULL, E, D, F, 1);
  ref_combine(l->y = t_nums(m, T * D), stored(rows, R * D, l->dtype), l->weights, l->slot2row, shared, T, K, D, 0);

  l->counts = t_ints(m, S * E);
  l->tokens = t_ints(m, S);
  ref_balance_fwd(l->losses = t_nums(m, 2), l->counts, t_nums(m, S * E), l->tokens, l->logits, l->ids, l->mask, T, S, E,
                  K, l->balance_scoring ? l->balance_scoring : MOE__SOFTMAX);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */
/* Gradients of the shared expert; returns its part of dx. */
static num *shared_backward(struct ref_layer *l, struct t_memory *m)
{
  int64_t T = l->T, D = l->D, Fs = l->Fs, Hs = width_of(l, Fs), n = T * D;
  const num *const *p = l->p;
  num *da = t_nums(m, T * Fs), *dh = t_nums(m, T * Hs), *aw = t_nums(m, T * Fs), *dsg = t_nums(m, T);
  num *dx = t_nums(m, n);
  product(m, da, l->dy, p[REF_SHARED_DOWN], NULL, T, Fs, D, 0);
  ref_act_bwd(dh, aw, dsg, stored(da, T * Fs, l->dtype), l->hs, l->sg, NULL, T, Fs, 0, l->act, l->dtype);
  stored(dh, T * Hs, l->dtype);
  product(m, l->d[REF_SHARED_DOWN] = t_nums(m, D * Fs), flipped(m, l->dy, 1, T, D), stored(aw, T * Fs, l->dtype), NULL,
          D, Fs, T, 0);
  num *up = columns(m, dh, T, Hs, Hs - Fs, Fs);
  product(m, l->d[REF_SHARED_UP] = t_nums(m, Fs * D), flipped(m, up, 1, T, Fs), l->x, NULL, Fs, D, T, 0);
  product(m, dx, up, p[REF_SHARED_UP], NULL, T, D, Fs, 0);
  stored(dx, n, l->dtype);
  if (l->act.gated) {
    num *gate = columns(m, dh, T, Hs, 0, Fs);
    product(m, l->d[REF_SHARED_GATE_PROJ] = t_nums(m, Fs * D), flipped(m, gate, 1, T, Fs), l->x, NULL, Fs, D, T, 0);
    product(m, dx, gate, p[REF_SHARED_GATE_PROJ], NULL, T, D, Fs, 1);
    stored(dx, n, l->dtype);
  }
  if (p[REF_SHARED_GATE]) {
    struct moe__weigh sigmoid = { MOE__SIGMOID, 0, 1, 0 };
    num *dz = t_nums(m, T);
    ref_weights_bwd(dz, dsg, l->z, t_ints(m, T), T, 1, 1, 0, sigmoid);
    stored(dz, T, l->dtype);
    product(m, l->d[REF_SHARED_GATE] = t_nums(m, D), dz, l->x, NULL, 1, D, T, 0);
    product(m, dx, dz, p[REF_SHARED_GATE], NULL, T, D, 1, 1);
    stored(dx, n, l->dtype);
  }
  return dx;
}

static void router_backward(struct ref_layer *l, struct t_memory *m)
{
  int64_t T = l->T, D = l->D, E = l->E;
  num *dl = stored(copied(m, l->dlogits, T * E), T * E, l->dtype), *one = t_nums(m, T);
  for (int64_t t = 0; t < T; t++) one[t].v = 1;
  product(m, l->d[REF_ROUTER] = t_nums(m, E * D), flipped(m, dl, 1, T, E), l->x, NULL, E, D, T, 0);
  if (l->p[REF_ROUTER_BIAS]) product(m, l->d[REF_ROUTER_BIAS] = t_nums(m, E), one, dl, NULL, 1, E, T, 0);
  stored(l->dx, T * D, l->dtype);
  product(m, l->dx, dl, l->p[REF_ROUTER], NULL, T, D, E, 1);
}

void ref_layer_backward(struct ref_layer *l, struct t_memory *m)
{
  int64_t T = l->T, D = l->D, F = l->F, E = l->E, K = l->K, R = T * K, H = width_of(l, F), S = l->S ? l->S : 1;
  const num *const *p = l->p;
  num *da = t_nums(m, R * F), *dh = t_nums(m, R * H), *aw = t_nums(m, R * F), *dw = t_nums(m, R);
  num *rows = t_nums(m, R * D), *shared = l->Fs ? shared_backward(l, m) : NULL;
  ref_ggemm_rows(da, l->dy, flipped(m, p[REF_DOWN], E, D, F), NULL, l->offs, l->row2slot, E, F, D, K);
  stored(da, R * F, l->dtype);
  if (p[REF_DOWN_BIAS]) {
    ref_row_dot(dw, l->dy, p[REF_DOWN_BIAS], l->ids, T, K, E, D);
    ref_ggemm_colsum(l->d[REF_DOWN_BIAS] = t_nums(m, E * D), l->dy, l->weights, l->offs, l->row2slot, E, D, K, 0);
  }
  ref_act_bwd(dh, aw, dw, da, l->h, l->weights, l->row2slot, l->offs[E], F, 1, l->act, l->dtype);
  stored(dh, R * H, l->dtype);
  ref_weights_bwd(l->dlogits = t_nums(m, T * E), dw, l->logits, l->ids, T, E, K, 0, l->weigh);
  ref_ggemm_wgrad(l->d[REF_DOWN] = t_nums(m, E * D * F), l->dy, stored(aw, R * F, l->dtype), l->offs, l->row2slot, NULL,
                  E, D, F, K, 1, 0);
  for (int half = l->act.gated ? 0 : 1; half < 2; half++) {
    num *part = columns(m, dh, R, H, half ? H - F : 0, F);
    ref_ggemm_wgrad(l->d[half ? REF_UP : REF_GATE] = t_nums(m, E * F * D), part, l->x, l->offs, NULL, l->row2slot, E, F,
                    D, 1, K, 0);
    if (p[REF_UP_BIAS])
      ref_ggemm_colsum(l->d[half ? REF_UP_BIAS : REF_GATE_BIAS] = t_nums(m, E * F), part, NULL, l->offs, NULL, E, F, 1,
                       0);
  }
  num *w = joined(m, p[REF_GATE], (H - F) * D, p[REF_UP], F * D, E);
  ref_ggemm_rows(rows, dh, flipped(m, w, E, H, D), NULL, l->offs, NULL, E, D, H, 1);
  ref_combine(l->dx = t_nums(m, T * D), stored(rows, R * D, l->dtype), l->weights, l->slot2row, shared, T, K, D, 1);
  if (!p[REF_ROUTER]) return;
  if (l->balance_coef != 0 || l->z_coef != 0)
    ref_balance_bwd(l->dlogits, l->logits, l->counts, l->tokens, l->mask, l->aux_scale, T, S, E, K,
                    l->balance_scoring ? l->balance_scoring : MOE__SOFTMAX, 1, l->balance_coef, l->z_coef);
  router_backward(l, m);
}
