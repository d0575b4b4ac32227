/* impls.h - the tuned implementations of the CUDA backend and what their launchers share. */
#ifndef MOE_CUDA_IMPLS_H
#define MOE_CUDA_IMPLS_H

#include "core/kernels/kernels.h"

#include <cuda_runtime_api.h>

extern const struct moe__ops moe__cuda_ops;

/* ggemm_sm90.c, for the lists of impls.c. */
#define SM90(op)                                                                                                       \
  moe_status moe__sm90_can_##op(const struct moe__dev_info *info, const struct moe__args_##op *args,                   \
                                struct moe__why *why);                                                                 \
  moe_status moe__sm90_run_##op(moe_queue *q, const struct moe__args_##op *args);
SM90(ggemm_rows)
SM90(ggemm_wgrad)
#undef SM90

/* A kernel of the library's own objects, which the runtime would load at its first launch: too late under graph
   capture.  `program` of an implementation names those that it may launch. */
struct moe__cuda_object {
  const char *program;
  const void *function;
  int32_t threads, shared; /* shared: dynamic, bytes */
};
/* Entry i of all of them; 0 past the last. */
int moe__cuda_object_at(int i, struct moe__cuda_object *out);

/* Of backend.c.  Makes the device's context the thread's current one, for calls of the driver, and takes it off
   again where enter put it on. */
moe_status moe__cuda_enter(struct moe__queue_be *q, int *pushed);
void moe__cuda_leave(struct moe__queue_be *q, int pushed);
/* A number below `slots` that no other launch has which may run at the same time: the queue's own or, under capture,
   one that is not given again.  -1 where all are given, for the rest of the process's life. */
int32_t moe__cuda_slot(struct moe__queue_be *q, int32_t slots);
/* Launches such a kernel on the queue; `k` names it in the text of faults. */
moe_status moe__cuda_start(struct moe__queue_be *q, const struct moe__kernel *k, const struct moe__cuda_object *object,
                           int64_t groups, const void *argument);

#endif
