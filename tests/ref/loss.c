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

void ref_xent_fwd(num *loss, num *lse, num *rowloss, int32_t *health, const num *logits, const int32_t *targets,
                  int64_t T, int64_t V)
{
  struct sum s = { 0 };
  for (int64_t t = 0; t < T; t++) {
    int good = targets[t] >= 0 && targets[t] < V;
    if (!good) *health |= MOE_HEALTH_ID;
    lse[t] = logsumexp(logits + t * V, V);
    rowloss[t] = good ? n_sub(lse[t], logits[t * V + targets[t]]) : n_exact(NAN);
    sum_add(&s, rowloss[t]);
  }
  loss[0] = T > 0 ? n_div(sum_end(&s), n_exact((double)T)) : n_exact(0);
}

void ref_xent_bwd(num *dlogits, num dloss, const num *logits, const num *lse, const int32_t *targets, int64_t T,
                  int64_t V)
{
  num by = n_div(dloss, n_exact((double)T));
  for (int64_t t = 0; t < T; t++)
    for (int64_t v = 0; v < V; v++) {
      num p = n_exp(n_sub(logits[t * V + v], lse[t]));
      int good = targets[t] >= 0 && targets[t] < V;
      dlogits[t * V + v] = good ? n_mul(n_sub(p, n_exact(targets[t] == v)), by) : n_exact(NAN);
    }
}
