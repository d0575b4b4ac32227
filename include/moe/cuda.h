/* moe/cuda.h - CUDA streams, lent and given.  Needs no CUDA header: cudaStream_t is struct CUstream_st *. */
#ifndef MOE_CUDA_H
#define MOE_CUDA_H

#include <moe/context.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;
/* A queue over the caller's stream (NULL: the default stream), which must outlive the queue.  The
   context must be a CUDA one; it uses the device's primary context, as the CUDA runtime does. */
MOE_API MOE_CHECKED moe_status moe_queue_from_cuda(moe_queue **out, moe_context *ctx, struct CUstream_st *stream);
/* The stream of a queue, lent or its own: to order other work before or after it.  NULL is the default stream. */
MOE_API MOE_CHECKED moe_status moe_queue_to_cuda(struct CUstream_st **out, const moe_queue *queue);

#ifdef __cplusplus
}
#endif
#endif
