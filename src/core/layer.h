/* layer.h - what the tape and the checkpoints know of the layer beyond its public face. */
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

/* The dimensions of the parameter with this name, slowest first: "EFD" of E experts, F their width, D the model's
   width, S the shared expert's width, 1.  NULL: there is none such. */
const char *moe__param_dims(const char *name);
/* Fails where the queue is of another context than the layer. */
moe_status moe__layer_check(const char *fn, const moe_layer *l, const moe_queue *q);

#endif
