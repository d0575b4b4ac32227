/* arena.h - lays tensors out one after the other inside one span; used by measure (no handle) and by the
   run (with the caller's span) alike, so that the two cannot disagree. */
#ifndef MOE_CORE_ARENA_H
#define MOE_CORE_ARENA_H

#include "core/status.h"

#include <moe/tensor.h>

#define MOE__ALIGN 256

struct moe__arena {
  moe_span span; /* handle NULL: only measures */
  uint64_t used; /* bytes; saturates at UINT64_MAX on overflow */
};

struct moe__arena moe__arena_over(moe_span span);
/* Packed [n] / [rows,cols] / any shape.  Where the span is too small the tensor still has its place, and
   moe__arena_check fails. */
moe_tensor moe__arena_flat(struct moe__arena *a, int64_t dtype, int64_t n);
moe_tensor moe__arena_matrix(struct moe__arena *a, int64_t dtype, int64_t rows, int64_t cols);
moe_tensor moe__arena_tensor(struct moe__arena *a, int64_t dtype, int64_t rank, const int64_t *shape);
/* MOE_ERR_TOO_SMALL naming the span, wanted and got; MOE_ERR_INVALID where the sizes overflow. */
moe_status moe__arena_check(const struct moe__arena *a, const char *function, const char *name);

#endif
