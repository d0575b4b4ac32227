/* loss.c - reference of softmax cross-entropy. */
#include "ref.h"

/* log of the sum of exp(l[0..V)), shifted by the largest. */
static num logsumexp(const num *l, int64_t V)
{
  num top = n_exact(-INFINITY);
  for (int64_t v = 0; v < V; v++) top = n_max(top, l[v]);
  struct sum s = { 0 };
  for (int64_t v = 0; v < V; v++) sum_add(&s, n_exp(n_sub(l[v], top)));
  return n_add(n_log(sum_end(&s)), top);
}

static int counts(const struct ref_xent *how, int32_t target)
{
  return !how->ignoring || target != how->ignore_index;
}

/* (1 - smoothing) * nll of the target + smoothing * mean of every nll; nll(v) = lse - l[v] */
static num loss_of(const num *l, num lse, int64_t target, const struct ref_xent *how)
{
  num nll = n_sub(lse, l[target]), s = n_real(how->smoothing);
  struct sum all = { 0 };
  if (how->smoothing == 0) return nll;
  for (int64_t v = 0; v < how->V; v++) sum_add(&all, l[v]);
  num mean = n_sub(lse, n_div(sum_end(&all), n_exact((double)how->V)));
  return n_add(n_mul(n_sub(n_exact(1), s), nll), n_mul(s, mean));
}

void ref_xent_fwd(num *loss, num *lse, num *rowloss, num *counted, int32_t *health, const num *logits,
                  const int32_t *targets, const struct ref_xent *how)
{
  struct sum s = { 0 };
  double n = 0;
  for (int64_t t = 0; t < how->T; t++) {
    const num *l = logits + t * how->V;
    int good = targets[t] >= 0 && targets[t] < how->V;
    lse[t] = logsumexp(l, how->V);
    if (!counts(how, targets[t])) {
      rowloss[t] = n_exact(0);
      continue;
    }
    if (!good) *health |= MOE_HEALTH_ID;
    rowloss[t] = good ? loss_of(l, lse[t], targets[t], how) : n_exact(NAN);
    sum_add(&s, rowloss[t]);
    n++;
  }
  loss[0] = n > 0 ? n_div(sum_end(&s), n_exact(n)) : n_exact(0);
  *counted = n_exact(n);
}

void ref_xent_bwd(num *dlogits, num dloss, num counted, const num *logits, const num *lse, const int32_t *targets,
                  const struct ref_xent *how)
{
  int64_t V = how->V;
  num by = n_div(dloss, counted), s = n_real(how->smoothing), each = n_div(s, n_exact((double)V));
  num most = n_add(n_sub(n_exact(1), s), each);
  for (int64_t t = 0; t < how->T; t++)
    for (int64_t v = 0; v < V; v++) {
      num p = n_exp(n_sub(logits[t * V + v], lse[t]));
      int good = targets[t] >= 0 && targets[t] < V;
      dlogits[t * V + v] = !counts(how, targets[t]) ? n_exact(0)
                           : good                   ? n_mul(n_sub(p, targets[t] == v ? most : each), by)
                                                    : n_exact(NAN);
    }
}
