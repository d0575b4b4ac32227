/* moe/cuda.h - lend a CUDA stream.  Needs no CUDA header: cudaStream_t is struct CUstream_st *. */
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

#ifdef __cplusplus
}
#endif
#endif
