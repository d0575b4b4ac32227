/* moe/tensor.h - tensors and spans: values that name device memory and own nothing. */
#ifndef MOE_TENSOR_H
#define MOE_TENSOR_H

#include <moe/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types.  The F8 kinds and BOOL (a byte, 0 or 1) are storage only (checkpoints); kernels compute in F64 and F32
   and store F64, F32, BF16 and F16. */
typedef enum moe_dtype {
  MOE_NONE = 0,
  MOE_F64 = 1,
  MOE_F32 = 2,
  MOE_BF16 = 3,
  MOE_F16 = 4,
  MOE_F8E4M3 = 5,
  MOE_F8E5M2 = 6,
  MOE_I64 = 7,
  MOE_I32 = 8,
  MOE_U8 = 9,
  MOE_BOOL = 10
} moe_dtype;

#define MOE_RANK_MAX 6

/* A block of device memory: `handle` is a device pointer (CUDA) or a cl_mem (OpenCL); the block begins
   `offset` bytes behind it.  Frozen: 24 bytes. */
typedef struct moe_span {
  void *handle;
  uint64_t offset, bytes;
} moe_span;

/* An array in device memory.  Strides are in elements and always explicit (moe_tensor_packed fills
   them); 0 repeats one element along the dimension; negative strides are refused.  A tensor whose handle
   is NULL is "not given".  `offset` is in bytes and must be a multiple of the element size.
   Frozen: 120 bytes. */
typedef struct moe_tensor {
  void *handle;
  uint64_t offset;
  int32_t dtype, rank;
  int64_t shape[MOE_RANK_MAX];
  int64_t stride[MOE_RANK_MAX];
} moe_tensor;

/* Bytes of one element; 0 for a value that is no dtype. */
MOE_API uint64_t moe_dtype_size(int64_t dtype);
/* "f32", "bf16", ...; "?" for a value that is no dtype. */
MOE_API const char *moe_dtype_name(int64_t dtype);

/* A packed tensor (last dimension fastest) at the start of `at`.  The span may be larger than needed.
   MOE_ERR_INVALID: rank outside 0..6, a negative extent, an unknown dtype, a misaligned offset, or a
   byte count past 2^63-1.  MOE_ERR_TOO_SMALL: the span does not hold it. */
MOE_API MOE_CHECKED moe_status moe_tensor_packed(moe_tensor *out, moe_span at, int64_t dtype, int64_t rank,
                                                 const int64_t *shape);
/* Elements: the product of the extents (1 for rank 0). */
MOE_API int64_t moe_tensor_count(const moe_tensor *t);
/* Bytes from the first to past the last addressed element; 0 where an extent is 0. */
MOE_API uint64_t moe_tensor_extent(const moe_tensor *t);
/* 1 where the strides are those moe_tensor_packed gives (extents of 1 aside). */
MOE_API int moe_tensor_is_packed(const moe_tensor *t);
/* View of elements [begin, end) along `dim`.  MOE_ERR_INVALID outside the extent. */
MOE_API MOE_CHECKED moe_status moe_tensor_slice(moe_tensor *out, const moe_tensor *t, int64_t dim, int64_t begin,
                                                int64_t end);
/* View with every `step`-th element along `dim`, from `begin`: the interleaved gate of [E,2F,D] is
   (dim 1, begin 0, step 2). */
MOE_API MOE_CHECKED moe_status moe_tensor_every(moe_tensor *out, const moe_tensor *t, int64_t dim, int64_t begin,
                                                int64_t step);
/* View with two dimensions exchanged. */
MOE_API MOE_CHECKED moe_status moe_tensor_transpose(moe_tensor *out, const moe_tensor *t, int64_t dim0, int64_t dim1);

#ifdef __cplusplus
}
#endif
#endif
