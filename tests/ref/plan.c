/* plan.c - reference of the plan: a stable counting sort of the slots by expert, here as the plainest search. */
#include "ref.h"

void ref_plan(int32_t *offs, int32_t *row2slot, int32_t *slot2row, int32_t *health, const int32_t *ids,
              const num *weights, int64_t T, int64_t K, int64_t E)
{
  int32_t row = 0;
  for (int64_t i = 0; i < T * K; i++) row2slot[i] = slot2row[i] = -1;
  for (int64_t e = 0; e <= E; e++) {
    offs[e] = row;
    for (int64_t t = 0; t < T && e < E; t++) {
      int in = 1;
      for (int64_t k = 0; k < K; k++) {
        int64_t i = t * K + k;
        int known = ids[i] >= 0 && ids[i] < E, finite = !weights || isfinite(weights[i].v);
        if (!known) *health |= MOE_HEALTH_ID;
        if (!finite) *health |= MOE_HEALTH_ROUTE;
        in = in && known && finite;
      }
      for (int64_t k = 0; k < K && in; k++)
        if (ids[t * K + k] == e) {
          row2slot[row] = (int32_t)(t * K + k);
          slot2row[t * K + k] = row++;
        }
    }
  }
}
