/* route.c - reference of routing: choice, weights and their gradient, balance losses, bias update, statistics. */
#include "ref.h"

#include <stdlib.h>

/* ---- scores ---------------------------------------------------------------------------------------------------- */
static num largest(const num *x, int64_t n)
{
  num top = n_exact(-INFINITY);
  for (int64_t i = 0; i < n; i++) top = n_max(top, x[i]);
  return top;
}

/* p = softmax(l); returns logsumexp(l). */
static num softmax(num *p, const num *l, int64_t n)
{
  num top = largest(l, n);
  struct sum s = { 0 };
  for (int64_t i = 0; i < n; i++) sum_add(&s, p[i] = n_exp(n_sub(l[i], top)));
  for (int64_t i = 0; i < n; i++) p[i] = n_div(p[i], sum_end(&s));
  return n_add(n_log(sum_end(&s)), top);
}

/* exp(min(l,0) - shift) / (1 + exp(-|l|)): the sigmoid, times exp(-shift). */
static num shifted_sigmoid(num l, double shift)
{
  num top = n_exp(n_sub(n_exact(fmin(l.v, 0)), n_exact(shift)));
  return isnan(l.v) ? l : n_div(top, n_add(n_exact(1), n_exp(n_exact(-fabs(l.v)))));
}

/* log(1 + exp(l)) / exp(min(l,0)): goes to 1 where l is very negative. */
static num scaled_softplus(num l)
{
  if (l.v > 0) return n_add(l, n_log1p(n_exp(n_neg(l))));
  if (l.v < -40) return n_ulps(1, 0, 3);
  return n_div(n_log1p(n_exp(l)), n_exp(l));
}

/* sqrt(log(1 + exp(l))), times exp(-shift/2). */
static num shifted_sqrt_softplus(num l, double shift)
{
  return n_mul(n_sqrt(scaled_softplus(l)), n_exp(n_mul(n_exact(0.5), n_exact(fmin(l.v, 0) - shift))));
}

/* Scores of K logits of one token; those of a softmax over all experts are found in `all`.  Where `shift`, each
   is divided by one and the same factor, so that the largest is near 1. */
static void scores_of(num *score, const num *chosen, const num *all, const int32_t *ids, int64_t K, int64_t scoring,
                      int shift)
{
  double low = shift ? fmin(largest(chosen, K).v, 0) : 0;
  if (scoring == MOE__SOFTMAX_CHOSEN || (scoring == MOE__SOFTMAX && shift)) {
    softmax(score, chosen, K);
    return;
  }
  for (int64_t k = 0; k < K; k++)
    score[k] = scoring == MOE__SOFTMAX   ? all[ids[k]]
               : scoring == MOE__SIGMOID ? shifted_sigmoid(chosen[k], low)
                                         : shifted_sqrt_softplus(chosen[k], low);
}

/* d log(score) / d logit, for the pointwise scorings. */
static num log_slope(num l, int64_t scoring)
{
  if (scoring == MOE__SIGMOID) return shifted_sigmoid(n_neg(l), 0);
  /* sigmoid(l) / (2 softplus(l)), with exp(min(l,0)) taken out of both */
  num s = shifted_sigmoid(l, fmin(l.v, 0));
  return n_div(s, n_mul(n_exact(2), scaled_softplus(l)));
}

/* One token: weights[K] without the scale; returns the divisor (1 where there is none). */
static num weigh_token(num *weights, num *score, num *chosen, num *p, const num *logits, const int32_t *ids, int64_t E,
                       int64_t K, struct moe__weigh w)
{
  int shift = w.renormalize && w.epsilon == 0;
  for (int64_t k = 0; k < K; k++) chosen[k] = logits[ids[k]];
  softmax(p, logits, E);
  scores_of(score, chosen, p, ids, K, w.scoring, shift);
  num divisor = n_exact(1);
  if (w.renormalize && !(w.scoring == MOE__SOFTMAX_CHOSEN && w.epsilon == 0)) {
    struct sum s = { 0 };
    for (int64_t k = 0; k < K; k++) sum_add(&s, score[k]);
    divisor = w.epsilon == 0 ? sum_end(&s) : n_add(sum_end(&s), n_real(w.epsilon));
  }
  for (int64_t k = 0; k < K; k++) weights[k] = n_div(score[k], divisor);
  return divisor;
}

struct work {
  num *r, *score, *chosen, *p, *q;
};
static struct work work_for(int64_t E, int64_t K)
{
  num *all = malloc((size_t)(4 * K + E) * sizeof *all);
  if (!all) abort();
  return (struct work){ all, all + K, all + 2 * K, all + 4 * K, all + 3 * K };
}

static int ids_known(const int32_t *ids, int64_t E, int64_t K)
{
  for (int64_t k = 0; k < K; k++)
    if (ids[k] < 0 || ids[k] >= E) return 0;
  return 1;
}

void ref_weights(num *weights, int32_t *health, const num *logits, const int32_t *ids, int64_t T, int64_t E, int64_t K,
                 struct moe__weigh w)
{
  struct work x = work_for(E, K);
  for (int64_t t = 0; t < T; t++, logits += E, ids += K, weights += K) {
    int known = ids_known(ids, E, K);
    if (known) weigh_token(x.r, x.score, x.chosen, x.p, logits, ids, E, K, w);
    else *health |= MOE_HEALTH_ID;
    for (int64_t k = 0; k < K; k++) weights[k] = known ? n_mul(n_real(w.scale), x.r[k]) : n_exact(NAN);
  }
  free(x.r);
}

/* With r_k the weight without the scale, g_k its gradient times the scale, and where renormalized
   q_k = g_k - sum_j g_j r_j, else q_k = g_k:
     renormalized, no epsilon   dl[id_k] += r_k q_k dlog(s_k)/dl            (softmax: dlog s/dl = 1, nothing to others)
     else                       ds_k = q_k / divisor, then
       pointwise                dl[id_k] += ds_k s_k dlog(s_k)/dl
       softmax                  dl[e] += p_e (sum of ds_k of slots of e - sum_k ds_k s_k)
       softmax over the chosen  dl[id_k] += s_k (ds_k - sum_j ds_j s_j) */
void ref_weights_bwd(num *dlogits, const num *dweights, const num *logits, const int32_t *ids, int64_t T, int64_t E,
                     int64_t K, int64_t accumulate, struct moe__weigh w)
{
  struct work x = work_for(E, K);
  int pointwise = w.scoring == MOE__SIGMOID || w.scoring == MOE__SQRT_SOFTPLUS;
  int shifted = w.renormalize && w.epsilon == 0;
  for (int64_t t = 0; t < T; t++, logits += E, ids += K, dweights += K, dlogits += E) {
    int good = ids_known(ids, E, K);
    num divisor = n_exact(1);
    if (good) divisor = weigh_token(x.r, x.score, x.chosen, x.p, logits, ids, E, K, w);
    for (int64_t k = 0; k < K && good; k++) good = isfinite(x.r[k].v);
    struct sum dot = { 0 }, through = { 0 };
    for (int64_t k = 0; k < K && good; k++) sum_mul(&dot, n_mul(n_real(w.scale), dweights[k]), x.r[k]);
    for (int64_t k = 0; k < K && good; k++) {
      num g = n_mul(n_real(w.scale), dweights[k]);
      x.q[k] = w.renormalize && w.scoring != MOE__SOFTMAX_CHOSEN ? n_sub(g, sum_end(&dot)) : g;
      if (!shifted) x.q[k] = n_div(x.q[k], divisor);
      sum_mul(&through, x.q[k], x.score[k]);
    }
    for (int64_t e = 0; e < E; e++) {
      struct sum s = { 0 };
      for (int64_t k = 0; k < K && good; k++) {
        if (ids[k] != e) continue;
        num slope = pointwise ? log_slope(x.chosen[k], w.scoring) : n_exact(1);
        if (w.scoring == MOE__SOFTMAX_CHOSEN) sum_mul(&s, x.score[k], n_sub(x.q[k], sum_end(&through)));
        else if (shifted) sum_mul(&s, x.r[k], n_mul(x.q[k], slope));
        else if (pointwise) sum_mul(&s, n_mul(x.q[k], x.score[k]), slope);
        else sum_mul(&s, x.q[k], x.p[e]);
      }
      if (good && w.scoring == MOE__SOFTMAX && !shifted) sum_add(&s, n_neg(n_mul(x.p[e], sum_end(&through))));
      num d = good ? sum_end(&s) : n_exact(NAN);
      dlogits[e] = accumulate ? n_add(dlogits[e], d) : d;
    }
  }
  free(x.r);
}

/* ---- choice ------------------------------------------------------------------------------------------------------ */
/* Which of two candidates goes first?  -1: the first, 1: the second, 0: their scores are within their bounds.
   Equal scores (same inputs, so the same bits in a kernel) go to the lower number; NaN goes last. */
static int order(num a, num b, int64_t at_a, int64_t at_b)
{
  if (isnan(a.v) != isnan(b.v)) return isnan(a.v) ? 1 : -1;
  if (a.v == b.v || isnan(a.v)) return at_a < at_b ? -1 : 1;
  if (fabs(a.v - b.v) <= a.e + b.e) return 0;
  return a.v > b.v ? -1 : 1;
}

/* Score of a group: its best, or the sum of its two best; NaN counts as -inf. */
static num group_score(const num *score, int64_t n, int64_t top_two)
{
  num first = n_exact(-INFINITY), second = first;
  for (int64_t i = 0; i < n; i++) {
    if (score[i].v > first.v) {
      second = first;
      first = score[i];
    } else if (score[i].v > second.v) {
      second = score[i];
    }
  }
  if (!top_two) return first;
  return isinf(second.v) ? second : n_add(first, second);
}

/* Marks the groups that may be searched; 0 where scores are too close to say which. */
static int choose_groups(char *in, const num *score, int64_t size, struct moe__select s)
{
  num *group = malloc((size_t)s.groups * sizeof *group);
  int sure = group != NULL;
  for (int64_t g = 0; g < s.groups && sure; g++) group[g] = group_score(score + g * size, size, s.group_top_two);
  for (int64_t g = 0; g < s.groups && sure; g++) {
    int64_t before = 0, close = 0;
    for (int64_t o = 0; o < s.groups; o++) {
      int which = o == g ? 1 : order(group[o], group[g], o, g);
      before += which < 0;
      close += which == 0;
    }
    in[g] = before < s.selected_groups;
    if (before < s.selected_groups && before + close >= s.selected_groups) sure = 0;
  }
  free(group);
  return sure;
}

/* What selection compares. */
static void selection_scores(num *score, const num *logits, const num *bias, int64_t E, struct moe__select s)
{
  if (s.kind == MOE__SELECT_SOFTMAX && bias) softmax(score, logits, E);
  for (int64_t e = 0; e < E; e++) {
    if (s.kind == MOE__SELECT_GROUPED_SIGMOID) score[e] = shifted_sigmoid(logits[e], 0);
    else if (!bias) score[e] = logits[e];
    if (bias) score[e] = n_add(score[e], bias[e]);
    if (isnan(logits[e].v)) score[e] = logits[e];
  }
}

const char *ref_select_check(const int32_t *ids, const num *logits, const num *bias, int64_t E, struct moe__select s)
{
  int64_t groups = s.kind == MOE__SELECT_GROUPED_SIGMOID ? s.groups : 1, size = E / groups;
  num *score = malloc((size_t)E * sizeof *score);
  char *taken = calloc((size_t)(E + groups), 1), *in = taken + E;
  const char *wrong = score && taken ? NULL : "out of host memory";
  for (int64_t k = 0; k < s.K && !wrong; k++) {
    if (ids[k] < 0 || ids[k] >= E) wrong = "an id is out of range";
    else if (taken[ids[k]]++) wrong = "an id is chosen twice";
  }
  if (!wrong) {
    memset(in, 1, (size_t)groups);
    selection_scores(score, logits, bias, E, s);
    int sure = groups == 1 || choose_groups(in, score, size, s);
    for (int64_t k = 0; k < s.K && !wrong; k++) {
      if (sure && !in[ids[k] / size]) wrong = "an id is of a group that was not selected";
      if (k > 0 && order(score[ids[k]], score[ids[k - 1]], ids[k], ids[k - 1]) < 0) wrong = "slots are out of order";
      for (int64_t e = 0; e < E && !wrong && sure; e++)
        if (!taken[e] && in[e / size] && order(score[e], score[ids[k]], e, ids[k]) < 0)
          wrong = "a better expert was passed over";
    }
  }
  free(score);
  free(taken);
  return wrong;
}

void ref_select_weights(num *weights, const int32_t *ids, const num *logits, int64_t T, int64_t E, struct moe__select s)
{
  int32_t health = 0;
  struct moe__weigh w = { s.kind == MOE__SELECT_SOFTMAX ? MOE__SOFTMAX : MOE__SIGMOID, s.renormalize, s.scale, 0 };
  ref_weights(weights, &health, logits, ids, T, E, s.K, w);
}

/* ---- balance ---------------------------------------------------------------------------------------------------- */
/* p of one token, its logsumexp, and in slope d log(s)/dl (1 for softmax). */
static num token_probs(num *p, num *slope, const num *logits, int64_t E, int64_t scoring)
{
  num lse = softmax(p, logits, E);
  for (int64_t e = 0; e < E; e++) slope[e] = n_exact(1);
  if (scoring != MOE__SIGMOID) return lse;
  struct sum s = { 0 };
  for (int64_t e = 0; e < E; e++) {
    sum_add(&s, p[e] = shifted_sigmoid(logits[e], 0));
    slope[e] = log_slope(logits[e], scoring);
  }
  for (int64_t e = 0; e < E; e++) p[e] = n_div(p[e], sum_end(&s));
  return lse;
}

void ref_balance_fwd(num *losses, int32_t *counts, num *probs, int32_t *tokens, const num *logits, const int32_t *ids,
                     const num *mask, int64_t T, int64_t S, int64_t E, int64_t K, int64_t scoring)
{
  int64_t N = T / S, present = 0, all = 0;
  num *p = malloc((size_t)(2 * E) * sizeof *p);
  struct sum *column = malloc((size_t)E * sizeof *column), balance = { 0 }, z = { 0 };
  if (!p || !column) abort();
  for (int64_t s = 0; s < S; s++) {
    memset(column, 0, (size_t)E * sizeof *column);
    memset(counts + s * E, 0, (size_t)E * sizeof *counts);
    tokens[s] = 0;
    for (int64_t t = s * N; t < (s + 1) * N; t++) {
      if (mask && mask[t].v == 0) continue;
      tokens[s]++;
      num lse = token_probs(p, p + E, logits + t * E, E, scoring);
      sum_mul(&z, lse, lse);
      for (int64_t e = 0; e < E; e++) sum_add(&column[e], p[e]);
      for (int64_t k = 0; k < K; k++)
        if (ids[t * K + k] >= 0 && ids[t * K + k] < E) counts[s * E + ids[t * K + k]]++;
    }
    struct sum dot = { 0 };
    for (int64_t e = 0; e < E; e++) {
      probs[s * E + e] = sum_end(&column[e]);
      sum_mul(&dot, n_exact(counts[s * E + e]), probs[s * E + e]);
    }
    all += tokens[s];
    present += tokens[s] > 0;
    /* E * sum_e (count_e / (K n)) (probs_e / n) */
    num n = n_exact(tokens[s]), of = n_mul(n_mul(n_exact((double)K), n), n);
    if (tokens[s] > 0) sum_add(&balance, n_div(n_mul(n_exact((double)E), sum_end(&dot)), of));
  }
  losses[0] = present ? n_div(sum_end(&balance), n_exact((double)present)) : n_exact(0);
  losses[1] = all ? n_div(sum_end(&z), n_exact((double)all)) : n_exact(0);
  free(p);
  free(column);
}

/* d balance/dl_j = p_j slope_j (c_j - sum_e c_e p_e) with c_e = E count_e / (K n_s^2 sequences),
   d z/dl_j = 2 lse softmax_j / tokens. */
void ref_balance_bwd(num *dlogits, const num *logits, const int32_t *counts, const int32_t *tokens, const num *mask,
                     const num *scale, int64_t T, int64_t S, int64_t E, int64_t K, int64_t scoring, int64_t accumulate,
                     double balance_coef, double z_coef)
{
  int64_t N = T / S, present = 0, all = 0;
  num *p = malloc((size_t)(3 * E) * sizeof *p);
  if (!p) abort();
  num *slope = p + E, *soft = p + 2 * E;
  for (int64_t s = 0; s < S; s++) {
    present += tokens[s] > 0;
    all += tokens[s];
  }
  for (int64_t t = 0; t < T; t++) {
    int64_t s = t / N;
    int masked = mask && mask[t].v == 0;
    num lse = softmax(soft, logits + t * E, E);
    token_probs(p, slope, logits + t * E, E, scoring);
    num n = n_exact(tokens[s]), of = n_mul(n_mul(n_mul(n_exact((double)K), n), n), n_exact((double)present));
    num by = masked ? n_exact(0) : n_div(n_mul(n_real(balance_coef), n_exact((double)E)), of);
    num zby = masked ? n_exact(0) : n_div(n_mul(n_mul(n_exact(2), n_real(z_coef)), lse), n_exact((double)all));
    struct sum dot = { 0 };
    for (int64_t e = 0; e < E; e++) sum_mul(&dot, n_exact(counts[s * E + e]), p[e]);
    for (int64_t e = 0; e < E; e++) {
      num d = n_sub(n_exact(counts[s * E + e]), sum_end(&dot));
      d = n_add(n_mul(by, n_mul(n_mul(p[e], slope[e]), d)), n_mul(zby, soft[e]));
      if (scale) d = n_mul(scale[0], d);
      if (masked) d = n_exact(0);
      num *to = dlogits + t * E + e;
      *to = accumulate ? n_add(*to, d) : d;
    }
  }
  free(p);
}

/* ---- integer counts ------------------------------------------------------------------------------------------------ */
static int64_t count_of(const int32_t *counts, int64_t S, int64_t E, int64_t e)
{
  int64_t n = 0;
  for (int64_t s = 0; s < S; s++) n += counts[s * E + e];
  return n;
}

void ref_bias_step(num *bias, const int32_t *counts, int64_t S, int64_t E, double rate)
{
  int64_t all = 0;
  for (int64_t e = 0; e < E; e++) all += count_of(counts, S, E, e);
  for (int64_t e = 0; e < E; e++) {
    int64_t mine = E * count_of(counts, S, E, e);
    if (mine != all) bias[e] = n_add(bias[e], n_real(mine < all ? rate : -rate));
  }
}

void ref_load_stats(num *stats, const int32_t *counts, int64_t S, int64_t E)
{
  int64_t all = 0, most = 0, dead = 0;
  for (int64_t e = 0; e < E; e++) {
    int64_t n = count_of(counts, S, E, e);
    all += n;
    most = n > most ? n : most;
    dead += n == 0;
  }
  num total = n_ulps((double)all, 0, 0.5);
  struct sum entropy = { 0 };
  for (int64_t e = 0; e < E; e++) {
    int64_t n = count_of(counts, S, E, e);
    num p = n_div(n_ulps((double)n, 0, 0.5), total);
    if (n > 0) sum_mul(&entropy, n_neg(p), n_log(p));
  }
  stats[0] = sum_end(&entropy);
  stats[1] = all ? n_div(n_ulps((double)(most * E), 0, 1), total) : n_exact(0);
  stats[2] = n_exact((double)dead);
  stats[3] = n_exact((double)all);
}
