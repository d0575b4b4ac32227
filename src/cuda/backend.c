/* backend.c - the CUDA half of libmoe: devices, memory, streams, and launches of the embedded images.

   Plain C over the CUDA runtime.  The driver is found at run time, so the library loads without one and
   says why there is no device.  Work is done in the device's primary context, the one the CUDA runtime
   uses; each function pushes it where it is not the thread's current one and pops it again, so that the
   calling thread keeps its current device (cudaSetDevice, called to go back, would start a context on a
   device that the application never used).  The runtime's last error is never read, so it stays the
   application's. */
#include "core/backend.h"
#include "core/dlpack.h"
#include "cuda/impls.h"

#include <cuda_runtime_api.h>
#include <cudaTypedefs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* The fatbins of src/core/kernels, from build-aux/embed.sh. */
extern const struct moe__image moe__cuda_images[];

enum {
  OLDEST = 80,      /* compute capability, 10 * major + minor: images begin with sm_80 */
  PARAMS_MAX = 128, /* parameters of one kernel: a tensor is two */
  CACHE = 256,      /* kernels that a queue finds without the device's lock */
  STAGED = 65536    /* bytes of pageable memory that the driver has copied aside when an async copy returns */
};

/* Driver functions, each with the CUDA version of the interface used here. */
#define DRIVER(X)                                                                                                      \
  X(cuDeviceGet, 2000)                                                                                                 \
  X(cuDevicePrimaryCtxRetain, 7000)                                                                                    \
  X(cuDevicePrimaryCtxRelease, 11000)                                                                                  \
  X(cuCtxGetCurrent, 4000)                                                                                             \
  X(cuCtxPushCurrent, 4000)                                                                                            \
  X(cuCtxPopCurrent, 4000)                                                                                             \
  X(cuKernelGetFunction, 12000)                                                                                        \
  X(cuKernelGetParamInfo, 12040)                                                                                       \
  X(cuFuncLoad, 12040)

struct driver {
#define X(name, version) PFN_##name##_v##version name;
  DRIVER(X)
#undef X
};

struct kernel {
  const char *name;
  cudaKernel_t handle;
  int params;
  unsigned char size[PARAMS_MAX]; /* bytes of each parameter */
};

/* One loaded image. */
struct program {
  struct program *next;
  const struct moe__image *image;
  cudaLibrary_t library;
  unsigned count;
  struct kernel kernels[];
};

struct moe__dev {
  struct moe__dev_info info;
  struct driver cu;
  CUdevice device;
  CUcontext primary;
  pthread_mutex_t lock; /* of programs; a program in the list does not change and stays until close */
  struct program *programs;
  uint64_t objects; /* of the library's own kernels (moe__cuda_object_at), those loaded, as bits */
};

struct moe__queue_be {
  struct moe__dev *dev;
  cudaStream_t stream;
  int own;                        /* the stream is ours */
  const struct moe__kernel *last; /* what was launched last, for the text of faults */
  int32_t slot;                   /* moe__cuda_slot; -1: none yet */
  struct {
    const struct moe__kernel *key;
    int dtype;
    const struct kernel *kernel;
  } cache[CACHE];
};

static void *at(moe_span span)
{
  return (char *)span.handle + span.offset;
}

/* ---- devices ------------------------------------------------------------------------------------------ */

/* Driver and runtime number their errors alike. */
static cudaError_t error_of(CUresult result)
{
  return (cudaError_t)(int)result;
}

/* GPUs that the driver shows, usable or not; the reason where there are none. */
static moe_status count_all(int *n)
{
  int driver = 0;
  cudaError_t e = cudaGetDeviceCount(n);
  if (e == cudaSuccess && *n > 0) return MOE_OK;
  *n = 0; /* a failed call leaves it alone */
  if (e == cudaSuccess || e == cudaErrorNoDevice)
    return moe__fail(MOE_ERR_NO_DEVICE, "the driver shows no NVIDIA GPU (none in this machine or container, or "
                                        "hidden by CUDA_VISIBLE_DEVICES)");
  if (e == cudaErrorStubLibrary)
    return moe__fail(MOE_ERR_NO_DEVICE, "the libcuda.so.1 that was found is the toolkit's stub, which only serves "
                                        "linking: take its folder out of the library path");
  if (e == cudaErrorInsufficientDriver) {
    if (cudaDriverGetVersion(&driver) != cudaSuccess || !driver)
      return moe__fail(MOE_ERR_NO_DEVICE, "no NVIDIA driver: libcuda.so.1 is not there (it comes with the driver; "
                                          "in a container, from the NVIDIA container toolkit)");
    return moe__fail(MOE_ERR_NO_DEVICE, "the NVIDIA driver is too old: it serves CUDA up to %d.%d, wanted %d.%d",
                     driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  return moe__fail(MOE_ERR_NO_DEVICE, "%s (%s)", cudaGetErrorString(e), cudaGetErrorName(e));
}

/* 10 * major + minor; 0 where the driver does not say. */
static int capability(int ordinal)
{
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal) != cudaSuccess) return 0;
  return 10 * major + minor;
}

/* Ordinal of usable device `index`; how many there are up to it is *n.  -1 past the last. */
static int ordinal_of(int index, int all, int *n)
{
  *n = 0;
  for (int i = 0; i < all; i++)
    if (capability(i) >= OLDEST && (*n)++ == index) return i;
  return -1;
}

static moe_status too_old(int ordinal)
{
  int arch = capability(ordinal);
  return moe__fail(MOE_ERR_NO_DEVICE, "cuda:%d: compute capability %d.%d, wanted %d.%d or later", ordinal, arch / 10,
                   arch % 10, OLDEST / 10, OLDEST % 10);
}

static moe_status cuda_count(int *n)
{
  int all;
  *n = 0;
  if (count_all(&all) != MOE_OK) return MOE_OK;
  ordinal_of(-1, all, n);
  if (*n == 0) too_old(0);
  return MOE_OK;
}

static moe_status facts(int ordinal, moe_device_info *out)
{
  struct cudaDeviceProp prop;
  int driver = 0, runtime = 0;
  cudaError_t e = cudaGetDeviceProperties(&prop, ordinal);
  if (!e) e = cudaDriverGetVersion(&driver);
  if (!e) e = cudaRuntimeGetVersion(&runtime);
  if (e) return moe__fail(MOE_ERR_NO_DEVICE, "cuda:%d: %s", ordinal, cudaGetErrorString(e));
  *out = moe_device_info_init();
  snprintf(out->backend, sizeof out->backend, "cuda");
  snprintf(out->id, sizeof out->id, "cuda:%d", ordinal);
  snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, prop.name);
  snprintf(out->driver, sizeof out->driver, "driver %d.%d, runtime %d.%d", driver / 1000, driver % 1000 / 10,
           runtime / 1000, runtime % 1000 / 10);
  out->kind = MOE_DEVICE_GPU;
  out->memory = out->max_alloc = (int64_t)prop.totalGlobalMem;
  out->local_memory = (int64_t)prop.sharedMemPerBlock;
  out->compute_units = prop.multiProcessorCount;
  out->fp64 = 1;
  out->tensor = 1;
  out->arch = 10 * prop.major + prop.minor;
  return MOE_OK;
}

static moe_status cuda_probe(int index, moe_device_info *out)
{
  int all, n, ordinal;
  MOE__TRY(count_all(&all));
  ordinal = ordinal_of(index, all, &n);
  if (ordinal < 0) return moe__fail(MOE_ERR_NO_DEVICE, "device %d wanted, there are %d", index, n);
  return facts(ordinal, out);
}

/* Ordinal that `spec` names, "" being the first usable one. */
static moe_status choose(const char *spec, int *ordinal)
{
  unsigned long wanted = strtoul(spec, NULL, 10);
  int all, n, first;
  if (spec[strspn(spec, "0123456789")])
    return moe__fail(MOE_ERR_INVALID, "device wants \"cuda\" or \"cuda:NUMBER\", got \"cuda:%s\"", spec);
  MOE__TRY(count_all(&all));
  if (wanted >= (unsigned)all)
    return moe__fail(MOE_ERR_NO_DEVICE, "device \"cuda:%s\" wanted, the last of %d is \"cuda:%d\"", spec, all, all - 1);
  first = ordinal_of(0, all, &n);
  *ordinal = *spec ? (int)wanted : first < 0 ? 0 : first;
  return capability(*ordinal) >= OLDEST ? MOE_OK : too_old(*ordinal);
}

static moe_status find_driver(struct driver *cu)
{
  void *f;
  enum cudaDriverEntryPointQueryResult found;
#define X(name, version)                                                                                               \
  f = NULL;                                                                                                            \
  if (cudaGetDriverEntryPointByVersion(#name, &f, version, cudaEnableDefault, &found) || !f)                           \
    return moe__fail(MOE_ERR_NO_DEVICE, "the NVIDIA driver is too old: it has no " #name);                             \
  memcpy(&cu->name, &f, sizeof f);
  DRIVER(X)
#undef X
  return MOE_OK;
}

static moe_status cuda_open(struct moe__dev **out, const struct moe__open *how)
{
  int ordinal = 0;
  moe_status status;
  CUresult result;
  struct moe__dev *dev;
  *out = NULL;
  MOE__TRY(choose(how->spec, &ordinal));
  dev = calloc(1, sizeof *dev);
  if (!dev) return moe__fail(MOE_ERR_NO_MEMORY, "cuda:%d: out of host memory", ordinal);
  status = facts(ordinal, &dev->info.pub);
  if (status == MOE_OK) status = find_driver(&dev->cu);
  if (status == MOE_OK) {
    result = dev->cu.cuDeviceGet(&dev->device, ordinal);
    if (result == CUDA_SUCCESS) result = dev->cu.cuDevicePrimaryCtxRetain(&dev->primary, dev->device);
    if (result != CUDA_SUCCESS)
      status = moe__fail(MOE_ERR_NO_DEVICE, "cuda:%d: no context: %s", ordinal, cudaGetErrorString(error_of(result)));
  }
  if (status != MOE_OK) {
    free(dev);
    return status;
  }
  dev->info.vector_width = 1;
  dev->info.reduce_local = 256;
  dev->info.ptx = 1;
  dev->info.dl_type = MOE__DL_CUDA;
  dev->info.dl_id = ordinal;
  pthread_mutex_init(&dev->lock, NULL);
  *out = dev;
  return MOE_OK;
}

/* Makes the device current for the calling thread; `leave` undoes it, also after a failure. */
static cudaError_t enter(const struct moe__dev *dev, int *pushed)
{
  CUcontext now = NULL;
  CUresult result = dev->cu.cuCtxGetCurrent(&now);
  *pushed = 0;
  if (result != CUDA_SUCCESS || now == dev->primary) return error_of(result);
  result = dev->cu.cuCtxPushCurrent(dev->primary);
  *pushed = result == CUDA_SUCCESS;
  return error_of(result);
}

static void leave(const struct moe__dev *dev, int pushed)
{
  CUcontext popped;
  if (pushed) dev->cu.cuCtxPopCurrent(&popped);
}

static void cuda_close(struct moe__dev *dev)
{
  int pushed;
  if (!dev) return;
  enter(dev, &pushed);
  while (dev->programs) {
    struct program *program = dev->programs;
    dev->programs = program->next;
    cudaLibraryUnload(program->library);
    free(program);
  }
  leave(dev, pushed);
  dev->cu.cuDevicePrimaryCtxRelease(dev->device);
  pthread_mutex_destroy(&dev->lock);
  free(dev);
}

static const struct moe__dev_info *cuda_info(const struct moe__dev *dev)
{
  return &dev->info;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static moe_status cuda_alloc(struct moe__dev *dev, uint64_t bytes, void **handle)
{
  int pushed;
  size_t unused = 0, total = 0;
  cudaError_t e = enter(dev, &pushed);
  *handle = NULL;
  if (!e) e = cudaMalloc(handle, bytes ? bytes : 1);
  if (e == cudaErrorMemoryAllocation && cudaMemGetInfo(&unused, &total) != cudaSuccess) unused = total = 0;
  leave(dev, pushed);
  if (!e) return MOE_OK;
  *handle = NULL;
  if (e == cudaErrorMemoryAllocation)
    return moe__fail(MOE_ERR_NO_MEMORY, "%s: %llu bytes wanted, %llu of %llu free", dev->info.pub.id,
                     (unsigned long long)bytes, (unsigned long long)unused, (unsigned long long)total);
  return moe__fail(MOE_ERR_BACKEND, "%s: alloc: %s", dev->info.pub.id, cudaGetErrorString(e));
}

static void cuda_release(struct moe__dev *dev, void *handle)
{
  int pushed;
  if (!handle) return;
  if (enter(dev, &pushed) == cudaSuccess) cudaFree(handle);
  leave(dev, pushed);
}

/* The address as the device knows it, in two parts. */
static moe_status cuda_adopt(struct moe__dev *dev, const struct moe__foreign *there, struct moe__adopted *here)
{
  enum { ALIGNMENT = 256 }; /* that of cudaMalloc */
  struct cudaPointerAttributes facts = { 0 };
  const int type = there->dl_type;
  int pushed;
  cudaError_t e;
  if (type != MOE__DL_CUDA && type != MOE__DL_CUDA_MANAGED && type != MOE__DL_CUDA_HOST)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: the device cannot use memory of DLPack's device type %d",
                     dev->info.pub.id, type);
  e = enter(dev, &pushed);
  if (!e) e = cudaPointerGetAttributes(&facts, (char *)there->data + there->offset);
  leave(dev, pushed);
  if (e) return moe__fail(MOE_ERR_INVALID, "%s: data: %s", dev->info.pub.id, cudaGetErrorString(e));
  if (facts.type == cudaMemoryTypeUnregistered || !facts.devicePointer)
    return moe__fail(MOE_ERR_INVALID, "%s: data is no memory of CUDA's", dev->info.pub.id);
  if (type == MOE__DL_CUDA && (there->dl_id != dev->info.dl_id || facts.device != dev->info.dl_id))
    return moe__fail(MOE_ERR_INVALID, "%s: the tensor says that it lies on device %d, and its data does on device %d",
                     dev->info.pub.id, there->dl_id, facts.device);
  here->offset = (uintptr_t)facts.devicePointer % ALIGNMENT;
  here->handle = (char *)facts.devicePointer - here->offset;
  here->is_new = 0;
  return MOE_OK;
}

/* ---- programs ----------------------------------------------------------------------------------------- */

/* The variant that serves `dtype`: its own, else that of float for the 16-bit types. */
static const struct moe__image *image_of(const char *name, int dtype)
{
  const struct moe__image *image;
  for (image = moe__cuda_images; image->name; image++)
    if (image->dtype == dtype && !strcmp(image->name, name)) return image;
  return dtype == MOE_BF16 || dtype == MOE_F16 ? image_of(name, MOE_F32) : NULL;
}

static const struct program *loaded(const struct moe__dev *dev, const struct moe__image *image)
{
  const struct program *program = dev->programs;
  while (program && program->image != image) program = program->next;
  return program;
}

/* The driver loads kernels lazily, at their first launch; under graph capture that would be too late. */
static cudaError_t load_kernel(const struct moe__dev *dev, struct kernel *kernel)
{
  CUfunction function;
  size_t offset, size;
  CUresult result = dev->cu.cuKernelGetFunction(&function, (CUkernel)kernel->handle);
  if (result == CUDA_SUCCESS) result = dev->cu.cuFuncLoad(function);
  if (result != CUDA_SUCCESS) return error_of(result);
  while (kernel->params < PARAMS_MAX &&
         dev->cu.cuKernelGetParamInfo((CUkernel)kernel->handle, (size_t)kernel->params, &offset, &size) == CUDA_SUCCESS)
    kernel->size[kernel->params++] = (unsigned char)size;
  return cudaFuncGetName(&kernel->name, kernel->handle);
}

static cudaError_t load(const struct moe__dev *dev, const struct moe__image *image, struct program **out)
{
  cudaLibrary_t library;
  cudaKernel_t *handles = NULL;
  struct program *program = NULL;
  unsigned count = 0;
  cudaError_t e = cudaLibraryLoadData(&library, image->data, NULL, NULL, 0, NULL, NULL, 0);
  if (e) return e;
  e = cudaLibraryGetKernelCount(&count, library);
  if (!e) {
    handles = calloc(count + 1, sizeof *handles);
    program = calloc(1, sizeof *program + count * sizeof program->kernels[0]);
    if (!handles || !program) e = cudaErrorMemoryAllocation;
  }
  if (!e) e = cudaLibraryEnumerateKernels(handles, count, library);
  for (unsigned i = 0; i < count && !e; i++) {
    program->kernels[i].handle = handles[i];
    e = load_kernel(dev, &program->kernels[i]);
  }
  free(handles);
  if (e) {
    free(program);
    cudaLibraryUnload(library);
    return e;
  }
  program->image = image;
  program->library = library;
  program->count = count;
  *out = program;
  return cudaSuccess;
}

/* Loads those of the library's own kernels that belong to a program: the runtime would load them at their first
   launch, too late under graph capture.  *known: there are such. */
static cudaError_t load_objects(struct moe__dev *dev, const char *name, int *known)
{
  struct moe__cuda_object object;
  struct cudaFuncAttributes facts;
  cudaError_t e = cudaSuccess;
  int pushed;
  *known = 0;
  for (int i = 0; !e && moe__cuda_object_at(i, &object); i++) {
    if (strcmp(object.program, name)) continue;
    *known = 1;
    if (dev->objects >> i & 1) continue;
    e = enter(dev, &pushed);
    if (!e) e = cudaFuncSetAttribute(object.function, cudaFuncAttributeMaxDynamicSharedMemorySize, object.shared);
    if (!e) e = cudaFuncGetAttributes(&facts, object.function);
    leave(dev, pushed);
    if (!e) dev->objects |= (uint64_t)1 << i;
  }
  return e;
}

static moe_status cuda_program(struct moe__dev *dev, const char *name, int dtype)
{
  int known;
  pthread_mutex_lock(&dev->lock);
  const cudaError_t failed = load_objects(dev, name, &known);
  pthread_mutex_unlock(&dev->lock);
  if (known && failed)
    return moe__fail(MOE_ERR_BUILD, "%s: %s does not load: %s", dev->info.pub.id, name, cudaGetErrorString(failed));
  if (known) return MOE_OK;
  const struct moe__image *image = image_of(name, dtype);
  struct program *program;
  int pushed;
  cudaError_t e = cudaSuccess;
  if (!image)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: no program %s for %s", dev->info.pub.id, name, moe_dtype_name(dtype));
  pthread_mutex_lock(&dev->lock);
  if (!loaded(dev, image)) {
    e = enter(dev, &pushed);
    if (!e) e = load(dev, image, &program);
    leave(dev, pushed);
    if (!e) {
      program->next = dev->programs;
      dev->programs = program;
    }
  }
  pthread_mutex_unlock(&dev->lock);
  if (!e) return MOE_OK;
  return moe__fail(e == cudaErrorMemoryAllocation ? MOE_ERR_NO_MEMORY : MOE_ERR_BUILD,
                   "%s: program %s for %s does not load: %s", dev->info.pub.id, name, moe_dtype_name(image->dtype),
                   cudaGetErrorString(e));
}

/* ---- queues ------------------------------------------------------------------------------------------- */

static moe_status cuda_queue_open(struct moe__dev *dev, int is_lent, void *lent, struct moe__queue_be **out)
{
  int pushed;
  cudaError_t e;
  struct moe__queue_be *q = calloc(1, sizeof *q);
  *out = NULL;
  if (!q) return moe__fail(MOE_ERR_NO_MEMORY, "%s: out of host memory", dev->info.pub.id);
  q->dev = dev;
  q->own = !is_lent;
  q->stream = lent;
  q->slot = -1;
  if (q->own) {
    e = enter(dev, &pushed);
    if (!e) e = cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking);
    leave(dev, pushed);
    if (e) {
      free(q);
      return moe__fail(MOE_ERR_BACKEND, "%s: no stream: %s", dev->info.pub.id, cudaGetErrorString(e));
    }
  }
  *out = q;
  return MOE_OK;
}

static void cuda_queue_close(struct moe__queue_be *q)
{
  int pushed;
  if (!q) return;
  if (q->own) {
    if (enter(q->dev, &pushed) == cudaSuccess) cudaStreamDestroy(q->stream);
    leave(q->dev, pushed);
  }
  free(q);
}

static void *cuda_queue_native(const struct moe__queue_be *q)
{
  return q->stream;
}

/* Status of a call on a queue.  Faults of earlier work come up in later calls, so the text names it. */
static moe_status result_of(const struct moe__queue_be *q, const char *what, cudaError_t e)
{
  if (!e) return MOE_OK;
  if (e == cudaErrorStreamCaptureUnsupported || e == cudaErrorStreamCaptureImplicit)
    return moe__fail(MOE_ERR_STATE, "%s: %s: the stream is being captured", q->dev->info.pub.id, what);
  if (!q->last) return moe__fail(MOE_ERR_BACKEND, "%s: %s: %s", q->dev->info.pub.id, what, cudaGetErrorString(e));
  return moe__fail(MOE_ERR_BACKEND, "%s: %s: %s (last kernel: %s of %s)", q->dev->info.pub.id, what,
                   cudaGetErrorString(e), q->last->name, q->last->program);
}

/* For calls that block: an error, told before the capture is broken, where the stream is being captured. */
static cudaError_t not_captured(const struct moe__queue_be *q)
{
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t e = cudaStreamIsCapturing(q->stream, &capture);
  return !e && capture != cudaStreamCaptureStatusNone ? cudaErrorStreamCaptureUnsupported : e;
}

static moe_status cuda_write(struct moe__queue_be *q, moe_span to, const void *from, uint64_t bytes)
{
  int pushed;
  struct cudaPointerAttributes memory;
  cudaError_t e;
  if (!bytes) return MOE_OK;
  e = enter(q->dev, &pushed);
  if (!e) e = not_captured(q); /* a captured copy would read `from` at each replay */
  if (!e) e = cudaPointerGetAttributes(&memory, from);
  if (!e) e = cudaMemcpyAsync(at(to), from, bytes, cudaMemcpyHostToDevice, q->stream);
  /* A small copy of pageable memory is staged before the call returns; anything else may be read later. */
  if (!e && (memory.type != cudaMemoryTypeUnregistered || bytes > STAGED)) e = cudaStreamSynchronize(q->stream);
  leave(q->dev, pushed);
  return result_of(q, "write", e);
}

static moe_status cuda_read(struct moe__queue_be *q, void *to, moe_span from, uint64_t bytes)
{
  int pushed;
  cudaError_t e;
  if (!bytes) return MOE_OK;
  e = enter(q->dev, &pushed);
  if (!e) e = not_captured(q);
  if (!e) e = cudaMemcpyAsync(to, at(from), bytes, cudaMemcpyDeviceToHost, q->stream);
  if (!e) e = cudaStreamSynchronize(q->stream);
  leave(q->dev, pushed);
  return result_of(q, "read", e);
}

static moe_status cuda_copy(struct moe__queue_be *q, moe_span to, moe_span from, uint64_t bytes)
{
  int pushed;
  cudaError_t e;
  if (!bytes) return MOE_OK;
  e = enter(q->dev, &pushed);
  if (!e) e = cudaMemcpyAsync(at(to), at(from), bytes, cudaMemcpyDeviceToDevice, q->stream);
  leave(q->dev, pushed);
  return result_of(q, "copy", e);
}

static moe_status cuda_fill(struct moe__queue_be *q, moe_span to, uint8_t byte, uint64_t bytes)
{
  int pushed;
  cudaError_t e;
  if (!bytes) return MOE_OK;
  e = enter(q->dev, &pushed);
  if (!e) e = cudaMemsetAsync(at(to), byte, bytes, q->stream);
  leave(q->dev, pushed);
  return result_of(q, "fill", e);
}

static moe_status cuda_wait(struct moe__queue_be *q)
{
  int pushed;
  cudaError_t e = enter(q->dev, &pushed);
  if (!e) e = not_captured(q);
  if (!e) e = cudaStreamSynchronize(q->stream);
  leave(q->dev, pushed);
  return result_of(q, "wait", e);
}

/* ---- launches ----------------------------------------------------------------------------------------- */

static moe_status find_kernel(struct moe__queue_be *q, const struct moe__kernel *k, int dtype,
                              const struct kernel **out)
{
  struct moe__dev *dev = q->dev;
  const struct moe__image *image;
  const struct program *program = NULL;
  size_t slot = (((uintptr_t)k >> 4) * 5 + (unsigned)dtype) % CACHE;
  if (q->cache[slot].key == k && q->cache[slot].dtype == dtype) {
    *out = q->cache[slot].kernel;
    return MOE_OK;
  }
  image = image_of(k->program, dtype);
  if (image) {
    pthread_mutex_lock(&dev->lock);
    program = loaded(dev, image);
    pthread_mutex_unlock(&dev->lock);
  }
  if (!program)
    return moe__fail(MOE_ERR_STATE, "%s: %s: program %s for %s was not made ready", dev->info.pub.id, k->name,
                     k->program, moe_dtype_name(dtype));
  for (unsigned i = 0; i < program->count; i++)
    if (!strcmp(program->kernels[i].name, k->name)) {
      *out = q->cache[slot].kernel = &program->kernels[i];
      q->cache[slot].key = k;
      q->cache[slot].dtype = dtype;
      return MOE_OK;
    }
  return moe__fail(MOE_ERR_LAUNCH, "%s: program %s has no kernel %s", dev->info.pub.id, k->program, k->name);
}

union param {
  void *pointer;
  int64_t l;
  int32_t i;
  double d;
  float f;
};

/* The parameters of a launch from its arguments; -1 where they are not the kernel's. */
static int spread(const struct kernel *kernel, const struct moe__karg *args, int n, int is_f64, union param *params)
{
  int p = 0;
  for (int a = 0; a < n; a++) {
    size_t size = 8;
    if (p + 2 > PARAMS_MAX) return -1;
    switch (args[a].kind) {
    case 0:
      params[p].pointer = args[a].u.buf.handle;
      if (p == kernel->params || kernel->size[p++] != size) return -1;
      params[p].l = args[a].u.buf.offset;
      break;
    case 1:
      params[p].i = args[a].u.i;
      size = sizeof(int32_t);
      break;
    case 2: params[p].l = args[a].u.l; break;
    default:
      if (is_f64) {
        params[p].d = args[a].u.r;
      } else {
        params[p].f = (float)args[a].u.r;
        size = sizeof(float);
      }
    }
    if (p == kernel->params || kernel->size[p++] != size) return -1;
  }
  return p == kernel->params ? p : -1;
}

static moe_status cuda_launch(struct moe__queue_be *q, const struct moe__kernel *k, int dtype, const int64_t groups[3],
                              int local, const struct moe__karg *args, int n)
{
  const char *id = q->dev->info.pub.id;
  const struct kernel *kernel = NULL;
  union param params[PARAMS_MAX];
  void *pointers[PARAMS_MAX];
  cudaLaunchConfig_t config = { 0 };
  cudaError_t e;
  int pushed, used;
  if (groups[0] == 0 || groups[1] == 0 || groups[2] == 0) return MOE_OK;
  MOE__TRY(find_kernel(q, k, dtype, &kernel));
  if (groups[0] < 0 || groups[1] < 0 || groups[2] < 0 || groups[0] > INT32_MAX || groups[1] > 65535 ||
      groups[2] > 65535)
    return moe__fail(MOE_ERR_LAUNCH, "%s: %s: wanted at most %d x 65535 x 65535 groups, got %lld x %lld x %lld", id,
                     k->name, INT32_MAX, (long long)groups[0], (long long)groups[1], (long long)groups[2]);
  used = spread(kernel, args, n, dtype == MOE_F64, params);
  if (used < 0)
    return moe__fail(MOE_ERR_LAUNCH, "%s: %s of %s: %d arguments do not fit its %d parameters", id, k->name, k->program,
                     n, kernel->params);
  for (int i = 0; i < used; i++) pointers[i] = &params[i];
  config.gridDim.x = (unsigned)groups[0];
  config.gridDim.y = (unsigned)groups[1];
  config.gridDim.z = (unsigned)groups[2];
  config.blockDim.x = (unsigned)local;
  config.blockDim.y = config.blockDim.z = 1;
  config.stream = q->stream;
  e = enter(q->dev, &pushed);
  if (!e) e = cudaLaunchKernelExC(&config, kernel->handle, pointers);
  leave(q->dev, pushed);
  if (e)
    return moe__fail(MOE_ERR_LAUNCH, "%s: %s of %s, %lld x %lld x %lld groups of %d: %s (kernel before: %s)", id,
                     k->name, k->program, (long long)groups[0], (long long)groups[1], (long long)groups[2], local,
                     cudaGetErrorString(e), q->last ? q->last->name : "none");
  q->last = k;
  return MOE_OK;
}

moe_status moe__cuda_enter(struct moe__queue_be *q, int *pushed)
{
  const cudaError_t e = enter(q->dev, pushed);
  if (!e) return MOE_OK;
  return moe__fail(MOE_ERR_BACKEND, "%s: its context: %s", q->dev->info.pub.id, cudaGetErrorString(e));
}

void moe__cuda_leave(struct moe__queue_be *q, int pushed)
{
  leave(q->dev, pushed);
}

int32_t moe__cuda_slot(struct moe__queue_be *q, int32_t slots)
{
  static _Atomic int32_t given;
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  int32_t slot = atomic_load(&given);
  if (cudaStreamIsCapturing(q->stream, &capture)) return -1;
  if (capture == cudaStreamCaptureStatusNone && q->slot >= 0) return q->slot;
  while (slot < slots && !atomic_compare_exchange_weak(&given, &slot, slot + 1)) continue;
  if (slot >= slots) return -1;
  if (capture == cudaStreamCaptureStatusNone) q->slot = slot;
  return slot;
}

moe_status moe__cuda_start(struct moe__queue_be *q, const struct moe__kernel *k, const struct moe__cuda_object *object,
                           int64_t groups, const void *argument)
{
  void *arguments[1];
  cudaLaunchConfig_t config = { 0 };
  cudaError_t e;
  int pushed;
  memcpy(arguments, &argument, sizeof argument); /* the runtime's prototype knows no const */
  config.gridDim.x = (unsigned)groups;
  config.gridDim.y = config.gridDim.z = 1;
  config.blockDim.x = (unsigned)object->threads;
  config.blockDim.y = config.blockDim.z = 1;
  config.dynamicSmemBytes = (size_t)object->shared;
  config.stream = q->stream;
  e = enter(q->dev, &pushed);
  if (!e) e = cudaLaunchKernelExC(&config, object->function, arguments);
  leave(q->dev, pushed);
  if (e)
    return moe__fail(MOE_ERR_LAUNCH, "%s: %s of %s, %lld groups of %d: %s", q->dev->info.pub.id, k->name, k->program,
                     (long long)groups, object->threads, cudaGetErrorString(e));
  q->last = k;
  return MOE_OK;
}

/* Work starts when it is enqueued. */
static moe_status cuda_flush(struct moe__queue_be *q)
{
  (void)q;
  return MOE_OK;
}

const struct moe__backend moe__cuda_backend = {
  .name = "cuda",
  .count = cuda_count,
  .probe = cuda_probe,
  .open = cuda_open,
  .close = cuda_close,
  .info = cuda_info,
  .alloc = cuda_alloc,
  .release = cuda_release,
  .adopt = cuda_adopt,
  .queue_open = cuda_queue_open,
  .queue_close = cuda_queue_close,
  .queue_native = cuda_queue_native,
  .write = cuda_write,
  .read = cuda_read,
  .copy = cuda_copy,
  .fill = cuda_fill,
  .wait = cuda_wait,
  .program = cuda_program,
  .launch = cuda_launch,
  .flush = cuda_flush,
  .ops = &moe__cuda_ops,
};
