/* router.h - public option structs checked and turned into the ops' own; shared by router, branch and layer. */
#ifndef MOE_CORE_ROUTER_H
#define MOE_CORE_ROUTER_H

#include "core/args.h"
#include "core/walk.h"

#include <moe/experts.h>

moe_status moe__read_selection(struct moe__select *out, int64_t *softmax_bias, const moe_selection_options *given,
                               int64_t n_experts, const char *fn);
moe_status moe__read_weights(struct moe__weigh *out, const moe_weights_options *given, const char *fn);
moe_status moe__read_activation(struct moe__act *out, const moe_activation *given, const char *fn);
/* bias [E] legal for this selection, of dtype `real`. */
moe_status moe__check_bias(const moe_tensor *bias, const struct moe__select *select, int64_t softmax_bias, int64_t E,
                           int64_t real, const char *fn);
/* One log line where the weights are constant (top-1 renormalized). */
void moe__warn_constant_weights(const moe_context *ctx, const struct moe__select *select,
                                const struct moe__weigh *weigh);

#endif
