/* dlpack.h - DLPack's structs and numbers, from its specification (1.1).  An ABI: nothing here is ours to change. */
#ifndef MOE_CORE_DLPACK_H
#define MOE_CORE_DLPACK_H

#include <stdint.h>

enum { MOE__DL_MAJOR = 1, MOE__DL_MINOR = 0 }; /* 1.0 is all that an export needs */
enum { MOE__DL_READ_ONLY = 1, MOE__DL_IS_COPIED = 2 };

enum moe__dl_device_type {
  MOE__DL_CPU = 1,
  MOE__DL_CUDA = 2,
  MOE__DL_CUDA_HOST = 3,
  MOE__DL_OPENCL = 4,
  MOE__DL_CUDA_MANAGED = 13
};

enum moe__dl_code {
  MOE__DL_INT = 0,
  MOE__DL_UINT = 1,
  MOE__DL_FLOAT = 2,
  MOE__DL_BFLOAT = 4,
  MOE__DL_BOOL = 6,
  MOE__DL_FLOAT8_E4M3FN = 10,
  MOE__DL_FLOAT8_E5M2 = 12
};

struct moe__dl_tensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides; /* strides: in elements; NULL: packed */
  uint64_t byte_offset;
};

struct DLManagedTensor {
  struct moe__dl_tensor t;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensor *self);
};

struct DLManagedTensorVersioned {
  uint32_t major, minor; /* of another major version no more than deleter is where it is here */
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags;
  struct moe__dl_tensor t;
};

#endif
