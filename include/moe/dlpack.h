/* moe/dlpack.h - tensors to and from other libraries through DLPack (1.x, and the older struct as input).  Needs no DLPack
   header: its structs are only named here.

   Order.  DLPack's C structs carry no stream, so each side says what it waits for:
   - Import: what the producer has enqueued on the tensor must come before what libmoe enqueues on `queue`.  On CUDA
     lend the producer's stream (moe_queue_from_cuda), or hand it the queue's (moe_queue_to_cuda; that is the `stream`
     of Python's __dlpack__); elsewhere, or without either, wait for the producer first.
   - Export: the consumer must come after the work of `queue`: the same stream, or moe_queue_wait first.
   - Back to the producer: moe_dlpack_wait.
   - Before moe_dlpack_free, and before an exported tensor's memory is reused, the work that uses it must be done. */
#ifndef MOE_DLPACK_H
#define MOE_DLPACK_H

#include <moe/context.h>

#ifdef __cplusplus
extern "C" {
#endif

struct DLManagedTensorVersioned; /* DLPack 1.x */
struct DLManagedTensor;          /* DLPack before 1.0: Python's capsule "dltensor" */

typedef struct moe_dlpack moe_dlpack; /* holds an imported tensor; belongs to one thread at a time */

typedef enum moe_dlpack_flags {
  MOE_DLPACK_READ_ONLY = 1, /* import: it will only be read; export: the consumer may only read it */
  MOE_DLPACK_COPY = 2       /* import: host memory that the device cannot use in place is copied to it;
                               export: a packed copy in host memory (kDLCPU) instead of device memory */
} moe_dlpack_flags;

/* *out views the producer's memory until moe_dlpack_free(*holder), which calls the deleter (NULL is fine), once.  On
   failure `managed` is still the caller's.
   In place: CUDA contexts take kDLCUDA of their ordinal, kDLCUDAManaged and kDLCUDAHost; OpenCL contexts take kDLOpenCL
   (data is a cl_mem of their cl_context, which is retained; the device id is not looked at) and, on CPU devices, kDLCPU
   and kDLCUDAHost.  With MOE_DLPACK_COPY every context takes kDLCPU and kDLCUDAHost; a copy holds the values of
   the time of the import, which blocks for it.  Tensors without elements may lie anywhere.
   Types: float of 64, 32, 16 bits, bfloat, float8_e4m3fn, float8_e5m2, int of 64 and 32 bits, uint of 8 bits, bool; one
   lane.  Rank 0..6, strides NULL (packed) or not negative.
   MOE_ERR_INVALID: any of this broken, a tensor that is read-only (without MOE_DLPACK_READ_ONLY), memory of another
   device or context.  MOE_ERR_VERSION: another major version than 1.  MOE_ERR_UNSUPPORTED: a type of memory that the
   device cannot use, or only as a copy. */
MOE_API MOE_CHECKED moe_status moe_dlpack_import(moe_dlpack **holder, moe_tensor *out, moe_queue *queue,
                                                 struct DLManagedTensorVersioned *managed, int64_t flags);
/* The same for the older struct, which cannot be read-only. */
MOE_API MOE_CHECKED moe_status moe_dlpack_import_unversioned(moe_dlpack **holder, moe_tensor *out, moe_queue *queue,
                                                             struct DLManagedTensor *managed, int64_t flags);
/* Blocks until the work of the queue is done and what it wrote into the tensor lies in the producer's memory, also
   where that is host memory and the tensor is a copy.  Of a tensor imported with MOE_DLPACK_READ_ONLY nothing is
   written.  The health word is not looked at. */
MOE_API MOE_CHECKED moe_status moe_dlpack_wait(moe_dlpack *holder, moe_queue *queue);
/* NULL is fine. */
MOE_API void moe_dlpack_free(moe_dlpack *holder);

/* *out: a tensor of DLPack 1.0 over the memory of t (any dtype and strides), or over a copy, for which the call blocks.
   Whoever ends up with it calls its deleter, on any thread; that calls release(user) (NULL: nothing to release).  The
   context stays alive until then.  On failure *out is NULL and release is not called.
   CUDA: kDLCUDA with the ordinal; OpenCL: kDLOpenCL, data is the cl_mem, the device id is its number in the platform. */
MOE_API MOE_CHECKED moe_status moe_dlpack_export(struct DLManagedTensorVersioned **out, moe_queue *queue,
                                                 const moe_tensor *t, int64_t flags, void (*release)(void *user),
                                                 void *user);

#ifdef __cplusplus
}
#endif
#endif
