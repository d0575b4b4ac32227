/* optim.h - the optimizer's state as a list of named tensors, for checkpoints. */
#ifndef MOE_CORE_OPTIM_H
#define MOE_CORE_OPTIM_H

#include "core/backend.h"

#include <moe/optim.h>

struct moe__adamw_part {
  char name[32]; /* "step", "rate"; of parameter 3 "3.m", "3.v" and, where it has one, "3.master" */
  moe_tensor t;  /* I64 [1]; [1]; shaped as the parameter, packed */
};
/* *out: a new array of *n, which the caller frees.  MOE_ERR_STATE before bind. */
moe_status moe__adamw_parts(struct moe__adamw_part **out, int64_t *n, const moe_adamw *opt, const moe_queue *q,
                            const char *fn);

#endif
