/* layer.h - what the tape knows of the layer beyond its public face. */
#ifndef MOE_CORE_LAYER_H
#define MOE_CORE_LAYER_H

#include "core/experts.h"

#include <moe/layer.h>

/* What the formulas of doc/math.md need besides x and the parameters, of one forward. */
struct moe__layer_view {
  struct moe__routed routed;
  struct moe__act act;
  moe_tensor counts, tokens; /* of the balance loss: [S,E], [S] I32 */
  int64_t balance_scoring;
  double balance_coef, z_coef;
};
moe_status moe__layer_view(struct moe__layer_view *out, const moe_layer_state *state, const char *fn);

#endif
