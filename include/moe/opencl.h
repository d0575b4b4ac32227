/* moe/opencl.h - lend an OpenCL context or queue.  Needs no OpenCL header. */
#ifndef MOE_OPENCL_H
#define MOE_OPENCL_H

#include <moe/context.h>

#ifdef __cplusplus
extern "C" {
#endif

struct _cl_context;
struct _cl_device_id;
struct _cl_command_queue;
/* A context over the caller's cl_context and one of its devices; both are retained.  desc->device is
   ignored; desc may be NULL. */
MOE_API MOE_CHECKED moe_status moe_context_from_opencl(moe_context **out, struct _cl_context *context,
                                                       struct _cl_device_id *device, const moe_context_desc *desc);
/* A queue over the caller's in-order command queue, which is retained.  MOE_ERR_INVALID: out of order,
   or of another context or device. */
MOE_API MOE_CHECKED moe_status moe_queue_from_opencl(moe_queue **out, moe_context *ctx,
                                                     struct _cl_command_queue *queue);
/* The command queue of a queue, lent or its own; not retained. */
MOE_API MOE_CHECKED moe_status moe_queue_to_opencl(struct _cl_command_queue **out, const moe_queue *queue);

#ifdef __cplusplus
}
#endif
#endif
