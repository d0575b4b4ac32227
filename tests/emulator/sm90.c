/* sm90.c - what the launchers of Hopper's kernels (cuda/ggemm_sm90.c) find in place of the CUDA backend, runtime and
   driver (ld --wrap), on the emulated backend. */
#include "cuda/ggemm_sm90.h"
#include "cuda/impls.h"

#include "launch.h"

#include <cudaTypedefs.h>

_Static_assert(sizeof(struct emulator_tensor_map) <= sizeof(CUtensorMap), "a CUtensorMap has room for ours");

#define WRAPPED(type, name, ...)                                                                                       \
  type __wrap_##name(__VA_ARGS__);                                                                                     \
  type __wrap_##name(__VA_ARGS__)

WRAPPED(moe_status, moe__cuda_enter, struct moe__queue_be *q, int *pushed)
{
  (void)q;
  *pushed = 0;
  return MOE_OK;
}

WRAPPED(void, moe__cuda_leave, struct moe__queue_be *q, int pushed)
{
  (void)q;
  (void)pushed;
}

/* Every fourth launch has none. */
WRAPPED(int32_t, moe__cuda_slot, struct moe__queue_be *q, int32_t slots)
{
  static int32_t n;
  (void)q;
  n = (n + 1) % slots;
  return n % 4 == 3 ? -1 : n;
}

/* The tables of rows_sm90.cpp and wgrad_sm90.cpp; like the library's, whose entries launchers name. */
extern const struct moe__sm90_kernel emulated_sm90_rows_kernels[2][2][2][2], emulated_sm90_act_grad_kernels[2][2][2],
    emulated_sm90_sums_kernel, emulated_sm90_wgrad_kernels[2][2];

static const void *emulated_function(const void *function)
{
#define TABLE(name)                                                                                                    \
  {                                                                                                                    \
    (const struct moe__sm90_kernel *)&moe__sm90_##name, (const struct moe__sm90_kernel *)&emulated_sm90_##name,        \
        sizeof moe__sm90_##name / sizeof(struct moe__sm90_kernel)                                                      \
  }
  static const struct {
    const struct moe__sm90_kernel *library, *emulated;
    size_t n;
  } tables[] = { TABLE(rows_kernels), TABLE(act_grad_kernels), TABLE(sums_kernel), TABLE(wgrad_kernels) };
#undef TABLE
  for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
    for (size_t i = 0; i < tables[t].n; i++)
      if (tables[t].library[i].function == function) return tables[t].emulated[i].function;
  return NULL;
}

WRAPPED(moe_status, moe__cuda_start, struct moe__queue_be *q, const struct moe__kernel *k,
        const struct moe__cuda_object *object, int64_t groups, const void *argument)
{
  const struct emulator_launch_sm90 l = { k->name,        emulated_function(object->function),
                                          (int)groups,    object->threads,
                                          object->shared, argument };
  (void)q;
  if (groups == 0) return MOE_OK;
  if (l.function && !strcmp(k->program, "sm90_rows") && emulator_start_sm90_rows(&l)) return MOE_OK;
  if (l.function && !strcmp(k->program, "sm90_wgrad") && emulator_start_sm90_wgrad(&l)) return MOE_OK;
  return moe__fail(MOE_ERR_LAUNCH, "emulated: no kernel %s of %s, or counters that are not as they were", k->name,
                   k->program);
}

/* Keeps what it is given, and refuses what the driver does. */
static CUresult encode(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *size,
                       const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *every,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill)
{
  struct emulator_tensor_map map = { .base = base, .rank = rank };
  (void)promotion;
  map.bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  if (rank < 2 || rank > 3 || (uintptr_t)base % 16 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
      box[0] * map.bytes != 128)
    return CUDA_ERROR_INVALID_VALUE;
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return CUDA_ERROR_INVALID_VALUE;
  map.size[2] = map.box[2] = 1;
  map.stride[0] = map.bytes;
  for (cuuint32_t d = 0; d < rank; d++) {
    map.size[d] = size[d];
    map.box[d] = box[d];
    if (d > 0) map.stride[d] = stride[d - 1];
    if (size[d] == 0 || size[d] > (cuuint64_t)1 << 32 || box[d] == 0 || box[d] > 256 || every[d] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    if (d > 0 && (map.stride[d] % 16 || map.stride[d] >= (cuuint64_t)1 << 40)) return CUDA_ERROR_INVALID_VALUE;
  }
  memset(out, 0, sizeof *out);
  memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

WRAPPED(cudaError_t, cudaGetDriverEntryPointByVersion, const char *symbol, void **f, unsigned version,
        unsigned long long flags, enum cudaDriverEntryPointQueryResult *found)
{
  const PFN_cuTensorMapEncodeTiled_v12000 ours = encode;
  (void)version;
  (void)flags;
  if (strcmp(symbol, "cuTensorMapEncodeTiled")) return cudaErrorInvalidValue;
  memcpy(f, &ours, sizeof ours);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
