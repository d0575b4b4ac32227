/* backend.c - the device half of the OpenCL backend: devices, memory, queues, programs and launches.

   A device holds the context and the built programs; any number of threads may use it.  A queue holds
   its own kernel objects, because setting the arguments of one is not thread safe.  Programs are built
   from the embedded sources in `program` and nowhere else, one per storage type. */
#include "core/backend.h"
#include "core/dlpack.h"
#include "opencl/loader.h"
#include "opencl/program.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

extern const struct moe__source moe__cl_sources[]; /* the first is common.clh */

enum { MIN_GROUP = 256, MIN_LOCAL_MEMORY = 32 << 10 }; /* what the portable kernels stand on */

struct program {
  struct program *next;
  const struct moe__source *source;
  int dtype;
  cl_program program;
};

struct moe__dev {
  struct moe__dev_info info;
  cl_device_id device;
  cl_context context;
  struct program *_Atomic programs; /* only ever grows: read without the lock */
  pthread_mutex_t building;
  const moe_context_desc *hooks;
};

struct made_kernel {
  const struct moe__kernel *key; /* NULL: free */
  int dtype;
  cl_kernel kernel;
};

struct moe__queue_be {
  struct moe__dev *dev;
  cl_command_queue queue;
  struct made_kernel *kernels; /* open addressing; capacity is a power of two, or 0 */
  size_t capacity, used;
  const struct moe__kernel *last; /* the latest launch since the last wait */
};

static moe_status fail(moe_status status, const struct moe__dev *dev, cl_int code, const char *what)
{
  if (code == CL_MEM_OBJECT_ALLOCATION_FAILURE || code == CL_OUT_OF_HOST_MEMORY) status = MOE_ERR_NO_MEMORY;
  return moe__fail(status, "%s: %s: %s (%d)", dev->info.pub.id, what, moe__cl_error(code), (int)code);
}

static moe_status no_memory(void)
{
  return moe__fail(MOE_ERR_NO_MEMORY, "the OpenCL backend has no host memory left");
}

/* ---- devices --------------------------------------------------------------------------------------- */

struct found {
  cl_device_id device;
  int platform, index;
  int64_t kind;
  char id[32];
};
struct list {
  struct found *at; /* GPUs, then CPUs, then others; else in the order of OpenCL */
  int n, platforms;
};

/* A cl_uint, cl_bool, cl_ulong, cl_bitfield or size_t. */
static int64_t device_number(cl_device_id device, cl_device_info what)
{
  union {
    cl_uint narrow;
    cl_ulong wide;
  } value = { 0 };
  size_t size = 0;
  if (moe__cl.clGetDeviceInfo(device, what, sizeof value, &value, &size)) return 0;
  return size == sizeof value.narrow ? (int64_t)value.narrow : (int64_t)value.wide;
}

static void device_text(cl_device_id device, cl_device_info what, char *text, size_t size)
{
  if (moe__cl.clGetDeviceInfo(device, what, size, text, NULL)) text[0] = 0;
  text[size - 1] = 0;
}

static void platform_text(cl_device_id device, cl_platform_info what, char *text, size_t size)
{
  cl_platform_id platform = NULL;
  if (moe__cl.clGetDeviceInfo(device, CL_DEVICE_PLATFORM, sizeof platform, &platform, NULL) ||
      moe__cl.clGetPlatformInfo(platform, what, size, text, NULL))
    text[0] = 0;
  text[size - 1] = 0;
}

static int64_t kind_of(cl_device_id device)
{
  int64_t type = device_number(device, CL_DEVICE_TYPE);
  return type & CL_DEVICE_TYPE_GPU ? MOE_DEVICE_GPU : type & CL_DEVICE_TYPE_CPU ? MOE_DEVICE_CPU : MOE_DEVICE_OTHER;
}

/* Appends the devices of one platform. */
static moe_status list_platform(struct list *list, cl_platform_id platform, int ordinal)
{
  cl_uint n = 0;
  cl_device_id *devices;
  struct found *more;
  if (moe__cl.clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, NULL, &n) || n == 0) return MOE_OK;
  devices = malloc(n * sizeof *devices);
  more = realloc(list->at, ((size_t)list->n + n) * sizeof *more);
  if (more) list->at = more;
  if (!devices || !more) {
    free(devices);
    return no_memory();
  }
  if (moe__cl.clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, n, devices, NULL)) n = 0;
  for (int i = 0; i < (int)n; i++) {
    struct found new = { devices[i], ordinal, i, kind_of(devices[i]), "" };
    int at = list->n++;
    snprintf(new.id, sizeof new.id, "opencl:%d:%d", ordinal, i);
    for (; at > 0 && list->at[at - 1].kind > new.kind; at--) list->at[at] = list->at[at - 1];
    list->at[at] = new;
  }
  free(devices);
  return MOE_OK;
}

/* All devices, at least one; the caller frees list->at, also after a failure. */
static moe_status list_devices(struct list *list)
{
  cl_uint n = 0;
  cl_platform_id *platforms;
  moe_status status = MOE_OK;
  memset(list, 0, sizeof *list);
  MOE__TRY(moe__cl_load());
  if (moe__cl.clGetPlatformIDs(0, NULL, &n) || n == 0)
    return moe__fail(MOE_ERR_NO_DEVICE, "no OpenCL platform: apt install pocl-opencl-icd");
  platforms = malloc(n * sizeof *platforms);
  if (!platforms) return no_memory();
  if (moe__cl.clGetPlatformIDs(n, platforms, NULL)) n = 0;
  list->platforms = (int)n;
  for (int i = 0; i < (int)n && status == MOE_OK; i++) status = list_platform(list, platforms[i], i);
  free(platforms);
  if (status == MOE_OK && list->n == 0)
    status = moe__fail(MOE_ERR_NO_DEVICE, "no OpenCL platform has a device (PoCL needs a writable cache folder)");
  return status;
}

/* MOE_ERR_UNSUPPORTED with the reason where the portable kernels cannot run. */
static moe_status usable(const struct found *f)
{
  int64_t group = device_number(f->device, CL_DEVICE_MAX_WORK_GROUP_SIZE);
  int64_t local = device_number(f->device, CL_DEVICE_LOCAL_MEM_SIZE);
  char version[256];
  int major = 0, minor = 0;
  if (!device_number(f->device, CL_DEVICE_AVAILABLE))
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: the device is not available", f->id);
  if (!device_number(f->device, CL_DEVICE_COMPILER_AVAILABLE))
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: no compiler for the device", f->id);
  device_text(f->device, CL_DEVICE_OPENCL_C_VERSION, version, sizeof version);
  if (sscanf(version, "OpenCL C %d.%d", &major, &minor) != 2 || major * 10 + minor < 12)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: OpenCL C 1.2 wanted, got \"%s\"", f->id, version);
  if (group < MIN_GROUP)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: work-groups of %d wanted, the device has at most %lld", f->id, MIN_GROUP,
                     (long long)group);
  if (local < MIN_LOCAL_MEMORY)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: %d bytes of local memory wanted, the device has %lld", f->id,
                     MIN_LOCAL_MEMORY, (long long)local);
  return MOE_OK;
}

/* 10 * major + minor; 0 where the device has no such number, which is NVIDIA's. */
static int64_t compute_capability(cl_device_id device)
{
  enum { MAJOR = 0x4000, MINOR = 0x4001 }; /* of cl_nv_device_attribute_query */
  char extensions[4096];
  device_text(device, CL_DEVICE_EXTENSIONS, extensions, sizeof extensions);
  if (!strstr(extensions, "cl_nv_device_attribute_query")) return 0;
  return 10 * device_number(device, MAJOR) + device_number(device, MINOR);
}

static void describe(moe_device_info *out, const struct found *f)
{
  char version[256], driver[256];
  memset(out, 0, sizeof *out);
  out->size = sizeof *out;
  strcpy(out->backend, "opencl");
  memcpy(out->id, f->id, sizeof out->id);
  device_text(f->device, CL_DEVICE_NAME, driver, sizeof driver);
  snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, driver);
  platform_text(f->device, CL_PLATFORM_VERSION, version, sizeof version);
  device_text(f->device, CL_DRIVER_VERSION, driver, sizeof driver);
  snprintf(out->driver, sizeof out->driver, "%.80s, driver %.30s", version, driver);
  out->kind = f->kind;
  out->memory = device_number(f->device, CL_DEVICE_GLOBAL_MEM_SIZE);
  out->max_alloc = device_number(f->device, CL_DEVICE_MAX_MEM_ALLOC_SIZE);
  out->local_memory = device_number(f->device, CL_DEVICE_LOCAL_MEM_SIZE);
  out->compute_units = device_number(f->device, CL_DEVICE_MAX_COMPUTE_UNITS);
  out->fp64 = device_number(f->device, CL_DEVICE_DOUBLE_FP_CONFIG) != 0;
  out->arch = compute_capability(f->device);
  out->tensor = out->arch >= 80;
}

/* Device `index` of those that are usable, with their number; found->device is NULL past the last. */
static moe_status find_usable(struct found *found, int index, int *n)
{
  struct list list;
  moe_status status = list_devices(&list);
  memset(found, 0, sizeof *found);
  *n = 0;
  for (int i = 0; i < list.n && status == MOE_OK; i++)
    if (usable(&list.at[i]) == MOE_OK && (*n)++ == index) *found = list.at[i];
  free(list.at);
  return status;
}

static moe_status opencl_count(int *n)
{
  struct found first;
  moe_status status = find_usable(&first, 0, n);
  return status == MOE_ERR_NO_DEVICE ? MOE_OK : status;
}

static moe_status opencl_probe(int index, moe_device_info *out)
{
  struct found found;
  int n;
  MOE__TRY(find_usable(&found, index, &n));
  if (!found.device) return moe__fail(MOE_ERR_INVALID, "opencl: device %d of %d", index, n);
  describe(out, &found);
  return MOE_OK;
}

/* A number of a device name, at *text; -1 where there is none.  Ordinals past 10^6 are all alike. */
static int ordinal(const char **text)
{
  int value = 0;
  if (**text < '0' || **text > '9') return -1;
  for (; **text >= '0' && **text <= '9'; ++*text)
    if (value < 1000000) value = value * 10 + (**text - '0');
  return value;
}

static moe_status pick_numbered(struct found *out, const struct list *list, const char *spec)
{
  const char *text = spec;
  int platform = ordinal(&text), index = -1, devices = 0;
  if (platform >= 0 && *text++ == ':') index = ordinal(&text);
  if (index < 0 || *text)
    return moe__fail(MOE_ERR_INVALID,
                     "device \"opencl:%s\": wanted opencl, opencl:gpu, opencl:cpu or opencl:PLATFORM:DEVICE", spec);
  if (platform >= list->platforms)
    return moe__fail(MOE_ERR_NO_DEVICE, "device \"opencl:%s\": the number of OpenCL platforms is %d", spec,
                     list->platforms);
  for (int i = 0; i < list->n; i++) {
    if (list->at[i].platform != platform) continue;
    devices++;
    if (list->at[i].index != index) continue;
    *out = list->at[i];
    return usable(out);
  }
  return moe__fail(MOE_ERR_NO_DEVICE, "device \"opencl:%s\": the number of devices of platform %d is %d", spec,
                   platform, devices);
}

static moe_status pick(struct found *out, const struct list *list, const char *spec)
{
  int64_t kind = strcmp(spec, "gpu") == 0 ? MOE_DEVICE_GPU : strcmp(spec, "cpu") == 0 ? MOE_DEVICE_CPU : 0;
  moe_status status = MOE_ERR_NO_DEVICE;
  if (*spec && !kind) return pick_numbered(out, list, spec);
  for (int i = 0; i < list->n; i++) {
    *out = list->at[i];
    if (kind && out->kind != kind) continue;
    status = usable(out);
    if (status == MOE_OK) return MOE_OK;
  }
  if (status == MOE_ERR_NO_DEVICE)
    moe__fail(status, "device \"opencl:%s\": no %s among the OpenCL devices (%d)", spec,
              kind == MOE_DEVICE_GPU ? "GPU" : "CPU", list->n);
  return status;
}

/* The lent device under the name it has among all devices. */
static moe_status pick_lent(struct found *out, const struct list *list, cl_context context, cl_device_id device)
{
  size_t size = 0, at = 0;
  cl_device_id *devices;
  cl_int code = moe__cl.clGetContextInfo(context, CL_CONTEXT_DEVICES, 0, NULL, &size);
  if (code) return moe__fail(MOE_ERR_INVALID, "the lent cl_context is none: %s (%d)", moe__cl_error(code), (int)code);
  devices = malloc(size);
  if (!devices) return no_memory();
  if (moe__cl.clGetContextInfo(context, CL_CONTEXT_DEVICES, size, devices, NULL)) size = 0;
  while (at < size / sizeof *devices && devices[at] != device) at++;
  free(devices);
  if (at == size / sizeof *devices)
    return moe__fail(MOE_ERR_INVALID, "the lent cl_device_id is none of the context's %zu devices",
                     size / sizeof *devices);
  *out = (struct found){ device, -1, -1, kind_of(device), "opencl:sub-device" };
  for (int i = 0; i < list->n; i++)
    if (list->at[i].device == device) *out = list->at[i];
  return usable(out);
}

static void opencl_close(struct moe__dev *dev)
{
  struct program *p = dev->programs, *next;
  for (; p; p = next) {
    next = p->next;
    moe__cl_drop(Program, p->program);
    free(p);
  }
  moe__cl_drop(Context, dev->context);
  moe__cl_drop(Device, dev->device);
  pthread_mutex_destroy(&dev->building);
  free(dev);
}

static moe_status open_found(struct moe__dev **out, const struct found *f, const struct moe__open *how)
{
  struct moe__dev *dev = calloc(1, sizeof *dev);
  int cpu = f->kind == MOE_DEVICE_CPU;
  cl_int code;
  if (!dev) return no_memory();
  pthread_mutex_init(&dev->building, NULL);
  describe(&dev->info.pub, f);
  dev->hooks = how->hooks;
  dev->device = moe__cl_keep(Device, f->device, &code);
  if (dev->device && how->lent_context) dev->context = moe__cl_keep(Context, (cl_context)how->lent_context, &code);
  else if (dev->device) dev->context = moe__cl_made(moe__cl.clCreateContext(NULL, 1, &f->device, NULL, NULL, &code));
  if (!dev->context) {
    moe_status status = fail(MOE_ERR_BACKEND, dev, code, "no context");
    opencl_close(dev);
    return status;
  }
  dev->info.vector_width = cpu ? (int)device_number(f->device, CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT) : 1;
  if (dev->info.vector_width < 1) dev->info.vector_width = 1;
  dev->info.reduce_local = cpu ? 1 : 256;
  dev->info.ptx = !cpu && dev->info.pub.arch >= 80;
  dev->info.dl_type = MOE__DL_OPENCL;
  dev->info.dl_id = f->index < 0 ? 0 : f->index; /* a lent sub-device has no number */
  *out = dev;
  return MOE_OK;
}

static moe_status opencl_open(struct moe__dev **out, const struct moe__open *how)
{
  struct list list;
  struct found found;
  moe_status status = list_devices(&list);
  *out = NULL;
  if (status == MOE_OK)
    status = how->lent_context ? pick_lent(&found, &list, how->lent_context, how->lent_device)
                               : pick(&found, &list, how->spec ? how->spec : "");
  free(list.at);
  return status == MOE_OK ? open_found(out, &found, how) : status;
}

static const struct moe__dev_info *opencl_info(const struct moe__dev *dev)
{
  return &dev->info;
}

/* ---- memory ---------------------------------------------------------------------------------------- */

static moe_status opencl_alloc(struct moe__dev *dev, uint64_t bytes, void **handle)
{
  cl_int code = CL_SUCCESS;
  *handle = moe__cl_made(moe__cl.clCreateBuffer(dev->context, CL_MEM_READ_WRITE, bytes ? bytes : 1, NULL, &code));
  if (*handle) return MOE_OK;
  return moe__fail(code == CL_INVALID_CONTEXT ? MOE_ERR_BACKEND : MOE_ERR_NO_MEMORY,
                   "%s: a buffer of %llu bytes (largest single allocation: %lld): %s (%d)", dev->info.pub.id,
                   (unsigned long long)bytes, (long long)dev->info.pub.max_alloc, moe__cl_error(code), (int)code);
}

static void opencl_release(struct moe__dev *dev, void *handle)
{
  (void)dev;
  moe__cl_drop(MemObject, (cl_mem)handle);
}

/* A cl_mem of this context, with one more reference. */
static moe_status adopt_buffer(struct moe__dev *dev, const struct moe__foreign *there, struct moe__adopted *here)
{
  cl_mem memory = there->data;
  cl_context context = NULL;
  size_t size = 0;
  cl_int code = moe__cl.clGetMemObjectInfo(memory, CL_MEM_CONTEXT, sizeof context, &context, NULL);
  if (!code) code = moe__cl.clGetMemObjectInfo(memory, CL_MEM_SIZE, sizeof size, &size, NULL);
  if (code) return fail(MOE_ERR_INVALID, dev, code, "the cl_mem is none");
  if (context != dev->context)
    return moe__fail(MOE_ERR_INVALID, "%s: the cl_mem belongs to another cl_context", dev->info.pub.id);
  if (there->offset > size || there->bytes > size - there->offset)
    return moe__fail(MOE_ERR_INVALID, "%s: the cl_mem has %zu bytes, %llu from byte %llu are wanted", dev->info.pub.id,
                     size, (unsigned long long)there->bytes, (unsigned long long)there->offset);
  *here = (struct moe__adopted){ moe__cl_keep(MemObject, memory, &code), there->offset, 1 };
  return here->handle ? MOE_OK : fail(MOE_ERR_BACKEND, dev, code, "the cl_mem cannot be retained");
}

/* Host memory, on CPU devices, which use it where it is.  The buffer begins at the alignment that buffers have, within
   the same page, and nothing before the tensor is touched. */
static moe_status adopt_host(struct moe__dev *dev, const struct moe__foreign *there, struct moe__adopted *here)
{
  int64_t alignment = device_number(dev->device, CL_DEVICE_MEM_BASE_ADDR_ALIGN) / 8;
  unsigned char *start = (unsigned char *)there->data + there->offset;
  cl_int code = CL_SUCCESS;
  if (alignment < 1 || alignment > 4096) alignment = 4096;
  here->offset = (uintptr_t)start % (uintptr_t)alignment;
  here->handle = moe__cl_made(moe__cl.clCreateBuffer(dev->context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR,
                                                     here->offset + there->bytes, start - here->offset, &code));
  here->is_new = 1;
  return here->handle ? MOE_OK : fail(MOE_ERR_UNSUPPORTED, dev, code, "no buffer over host memory");
}

static moe_status opencl_adopt(struct moe__dev *dev, const struct moe__foreign *there, struct moe__adopted *here)
{
  const int is_host = there->dl_type == MOE__DL_CPU || there->dl_type == MOE__DL_CUDA_HOST;
  if (there->dl_type == MOE__DL_OPENCL) return adopt_buffer(dev, there, here);
  if (is_host && dev->info.pub.kind == MOE_DEVICE_CPU) return adopt_host(dev, there, here);
  return moe__fail(MOE_ERR_UNSUPPORTED, "%s: the device cannot use memory of DLPack's device type %d", dev->info.pub.id,
                   there->dl_type);
}

/* ---- queues ---------------------------------------------------------------------------------------- */

static moe_status check_lent(const struct moe__dev *dev, cl_command_queue queue)
{
  cl_context context = NULL;
  cl_device_id device = NULL;
  cl_command_queue_properties properties = 0;
  cl_int code = CL_INVALID_COMMAND_QUEUE;
  if (queue) code = moe__cl.clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof context, &context, NULL);
  if (!code) code = moe__cl.clGetCommandQueueInfo(queue, CL_QUEUE_DEVICE, sizeof device, &device, NULL);
  if (!code) code = moe__cl.clGetCommandQueueInfo(queue, CL_QUEUE_PROPERTIES, sizeof properties, &properties, NULL);
  if (code) return fail(MOE_ERR_INVALID, dev, code, "the lent cl_command_queue is none");
  if (context != dev->context || device != dev->device)
    return moe__fail(MOE_ERR_INVALID, "%s: the lent cl_command_queue belongs to another %s", dev->info.pub.id,
                     context != dev->context ? "cl_context" : "device");
  if (properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE)
    return moe__fail(MOE_ERR_INVALID, "%s: the lent cl_command_queue is out of order, an in-order one is wanted",
                     dev->info.pub.id);
  return MOE_OK;
}

static moe_status opencl_queue_open(struct moe__dev *dev, int is_lent, void *lent, struct moe__queue_be **out)
{
  struct moe__queue_be *q;
  cl_int code;
  *out = NULL;
  if (is_lent) MOE__TRY(check_lent(dev, lent));
  q = calloc(1, sizeof *q);
  if (!q) return no_memory();
  q->dev = dev;
  if (is_lent) q->queue = moe__cl_keep(CommandQueue, (cl_command_queue)lent, &code);
  else q->queue = moe__cl_made(moe__cl.clCreateCommandQueue(dev->context, dev->device, 0, &code));
  if (!q->queue) {
    free(q);
    return fail(MOE_ERR_BACKEND, dev, code, "no command queue");
  }
  *out = q;
  return MOE_OK;
}

static void opencl_queue_close(struct moe__queue_be *q)
{
  for (size_t i = 0; i < q->capacity; i++) moe__cl_drop(Kernel, q->kernels[i].kernel);
  moe__cl_drop(CommandQueue, q->queue);
  free(q->kernels);
  free(q);
}

static void *opencl_queue_native(const struct moe__queue_be *q)
{
  return q->queue;
}

/* The result of a queue's call: a fault may be that of earlier work, so the last kernel is named. */
static moe_status done(const struct moe__queue_be *q, cl_int code, const char *what)
{
  char text[160];
  if (code == CL_SUCCESS) return MOE_OK;
  if (!q->last) return fail(MOE_ERR_BACKEND, q->dev, code, what);
  snprintf(text, sizeof text, "%s, or work before it (last kernel: %s of %s)", what, q->last->name, q->last->program);
  return fail(MOE_ERR_BACKEND, q->dev, code, text);
}

static moe_status opencl_write(struct moe__queue_be *q, moe_span to, const void *from, uint64_t bytes)
{
  cl_int code = CL_SUCCESS;
  if (bytes) code = moe__cl.clEnqueueWriteBuffer(q->queue, to.handle, CL_TRUE, to.offset, bytes, from, 0, NULL, NULL);
  return done(q, code, "write");
}

static moe_status opencl_read(struct moe__queue_be *q, void *to, moe_span from, uint64_t bytes)
{
  cl_int code = CL_SUCCESS;
  if (bytes) code = moe__cl.clEnqueueReadBuffer(q->queue, from.handle, CL_TRUE, from.offset, bytes, to, 0, NULL, NULL);
  return done(q, code, "read");
}

static moe_status opencl_copy(struct moe__queue_be *q, moe_span to, moe_span from, uint64_t bytes)
{
  cl_int code = CL_SUCCESS;
  if (bytes)
    code = moe__cl.clEnqueueCopyBuffer(q->queue, from.handle, to.handle, from.offset, to.offset, bytes, 0, NULL, NULL);
  return done(q, code, "copy");
}

/* In patterns of 128 bytes, and by single bytes before and behind them: by single bytes alone NVIDIA's driver had not
   filled 2 GiB within a minute. */
static moe_status opencl_fill(struct moe__queue_be *q, moe_span to, uint8_t byte, uint64_t bytes)
{
  unsigned char pattern[128];
  const uint64_t before = (sizeof pattern - to.offset % sizeof pattern) % sizeof pattern;
  const uint64_t head = before < bytes ? before : bytes, tail = (bytes - head) % sizeof pattern;
  const struct {
    uint64_t bytes, size;
  } parts[] = { { head, 1 }, { bytes - head - tail, sizeof pattern }, { tail, 1 } };
  cl_int code = CL_SUCCESS;
  memset(pattern, byte, sizeof pattern);
  for (int i = 0; i < 3 && code == CL_SUCCESS; i++) {
    if (parts[i].bytes)
      code = moe__cl.clEnqueueFillBuffer(q->queue, to.handle, pattern, parts[i].size, to.offset, parts[i].bytes, 0,
                                         NULL, NULL);
    to.offset += parts[i].bytes;
  }
  return done(q, code, "fill");
}

static moe_status opencl_flush(struct moe__queue_be *q)
{
  return done(q, moe__cl.clFlush(q->queue), "flush");
}

static moe_status opencl_wait(struct moe__queue_be *q)
{
  MOE__TRY(done(q, moe__cl.clFinish(q->queue), "wait"));
  q->last = NULL;
  return MOE_OK;
}

/* ---- programs -------------------------------------------------------------------------------------- */

static const char *const variants[] = { [MOE_F64] = "F64", [MOE_F32] = "F32", [MOE_BF16] = "BF16", [MOE_F16] = "F16" };

static const struct moe__source *find_source(const char *name)
{
  const struct moe__source *s = moe__cl_sources;
  while (s->name && strcmp(s->name, name)) s++;
  return s->name ? s : NULL;
}

static cl_program find_program(struct moe__dev *dev, const char *name, int dtype)
{
  const struct program *p = atomic_load(&dev->programs);
  while (p && (p->dtype != dtype || strcmp(p->source->name, name))) p = p->next;
  return p ? p->program : NULL;
}

/* MOE_ERR_BUILD with the first lines of the log from its first error on; all of it to the log hook. */
static moe_status build_failed(const struct moe__dev *dev, cl_program program, const char *what, cl_int code)
{
  size_t size = 0;
  char text[640], *log, *line;
  int length = snprintf(text, sizeof text, "build of %s", what);
  moe__cl.clGetProgramBuildInfo(program, dev->device, CL_PROGRAM_BUILD_LOG, 0, NULL, &size);
  log = malloc(size + 1);
  if (!log) return no_memory();
  if (moe__cl.clGetProgramBuildInfo(program, dev->device, CL_PROGRAM_BUILD_LOG, size, log, NULL)) size = 0;
  log[size] = 0;

  line = strstr(log, "error");
  while (line && line > log && line[-1] != '\n') line--;
  if (!line) line = log;
  for (int lines = 0; lines < 3 && *line && length < (int)sizeof text - 1; line += *line == '\n') {
    int width = (int)strcspn(line, "\n");
    if (width) {
      length += snprintf(text + length, sizeof text - (size_t)length, " | %.*s", width, line);
      lines++;
    }
    line += width;
  }
  if (dev->hooks->log)
    for (char *next = log; next;) {
      line = next;
      next = strchr(line, '\n');
      if (next) *next++ = 0;
      if (*line) dev->hooks->log(dev->hooks->user, 1, line);
    }
  free(log);
  return fail(MOE_ERR_BUILD, dev, code, text);
}

/* A built cl_program, or NULL with the status. */
static moe_status build(struct moe__dev *dev, const struct moe__source *source, int dtype, cl_program *out)
{
  const struct moe__source *common = &moe__cl_sources[0];
  /* Division and square root rounded correctly, as CUDA does them, where the device can. */
  const int rounds =
      (device_number(dev->device, CL_DEVICE_SINGLE_FP_CONFIG) & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT) != 0;
  char second[96], what[96], options[200];
  const struct moe__cl_text text = {
    { "#line 1 \"common.clh\"\n", (const char *)common->data, second, (const char *)source->data }, options, what
  };
  cl_int code;
  moe_status status;
  snprintf(second, sizeof second, "\n#line 1 \"%.64s.cl\"\n", source->name);
  snprintf(what, sizeof what, "program %.64s (%s)", source->name, moe_dtype_name(dtype));
  snprintf(options, sizeof options, "-cl-std=CL1.2 -DMOE_ST_%s -DMOE_VW=%d -DMOE_LOCAL_BYTES=%lld%s%s", variants[dtype],
           dev->info.vector_width, (long long)dev->info.pub.local_memory,
           rounds ? " -cl-fp32-correctly-rounded-divide-sqrt" : "",
           dev->info.pub.kind == MOE_DEVICE_CPU ? " -DMOE_CPU=1"
           : dev->info.ptx                      ? " -DMOE_PTX=1"
                                                : "");
  code = moe__cl_build(out, dev->context, dev->device, &text, dev->hooks);
  if (!code) return MOE_OK;
  status = *out ? build_failed(dev, *out, what, code) : fail(MOE_ERR_BUILD, dev, code, what);
  moe__cl_drop(Program, *out);
  *out = NULL;
  return status;
}

/* Under the lock: builds what is not there and puts it at the head of the list. */
static moe_status build_once(struct moe__dev *dev, const struct moe__source *source, int dtype)
{
  struct program *p;
  moe_status status;
  if (find_program(dev, source->name, dtype)) return MOE_OK;
  p = malloc(sizeof *p);
  if (!p) return no_memory();
  p->next = dev->programs;
  p->source = source;
  p->dtype = dtype;
  status = build(dev, source, dtype, &p->program);
  if (status == MOE_OK) atomic_store(&dev->programs, p);
  else free(p);
  return status;
}

static moe_status opencl_program(struct moe__dev *dev, const char *name, int dtype)
{
  const struct moe__source *source;
  moe_status status;
  if (find_program(dev, name, dtype)) return MOE_OK;
  source = find_source(name);
  if (!source || dtype < MOE_F64 || dtype > MOE_F16)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: there is no program %s (%s)", dev->info.pub.id, name,
                     moe_dtype_name(dtype));
  if (dtype == MOE_F64 && !dev->info.pub.fp64)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: %s has no double precision (f64), wanted by program %s",
                     dev->info.pub.id, dev->info.pub.name, name);
  pthread_mutex_lock(&dev->building);
  status = build_once(dev, source, dtype);
  pthread_mutex_unlock(&dev->building);
  return status;
}

/* ---- launches -------------------------------------------------------------------------------------- */

/* Where (key, dtype) is or belongs; there is a free place. */
static struct made_kernel *slot(const struct moe__queue_be *q, const struct moe__kernel *key, int dtype)
{
  size_t at = ((uintptr_t)key / sizeof *key + (size_t)dtype * 0x9e3779b9u) & (q->capacity - 1);
  while (q->kernels[at].key && (q->kernels[at].key != key || q->kernels[at].dtype != dtype))
    at = (at + 1) & (q->capacity - 1);
  return &q->kernels[at];
}

static moe_status grow(struct moe__queue_be *q)
{
  struct moe__queue_be larger = *q;
  larger.capacity = q->capacity ? 2 * q->capacity : 64;
  larger.kernels = calloc(larger.capacity, sizeof *larger.kernels);
  if (!larger.kernels) return no_memory();
  for (size_t i = 0; i < q->capacity; i++)
    if (q->kernels[i].key) *slot(&larger, q->kernels[i].key, q->kernels[i].dtype) = q->kernels[i];
  free(q->kernels);
  *q = larger;
  return MOE_OK;
}

static moe_status find_kernel(struct moe__queue_be *q, const struct moe__kernel *key, int dtype, cl_kernel *out)
{
  struct made_kernel *made;
  cl_program from;
  cl_int code = CL_SUCCESS;
  if (2 * q->used >= q->capacity) MOE__TRY(grow(q));
  made = slot(q, key, dtype);
  *out = made->kernel;
  if (made->key) return MOE_OK;
  from = find_program(q->dev, key->program, dtype);
  if (!from)
    return moe__fail(MOE_ERR_STATE, "%s: program %s (%s) was not made ready for kernel %s", q->dev->info.pub.id,
                     key->program, moe_dtype_name(dtype), key->name);
  *out = moe__cl_made(moe__cl.clCreateKernel(from, key->name, &code));
  if (!*out) {
    char text[160];
    snprintf(text, sizeof text, "kernel %s of %s", key->name, key->program);
    return fail(MOE_ERR_LAUNCH, q->dev, code, text);
  }
  *made = (struct made_kernel){ key, dtype, *out };
  q->used++;
  return MOE_OK;
}

/* *at: the position of the argument that was refused. */
static cl_int set_args(cl_kernel kernel, int dtype, const struct moe__karg *args, int n, cl_uint *at)
{
  cl_int code = CL_SUCCESS;
  *at = 0;
  for (int i = 0; i < n; i++) {
    const struct moe__karg *a = &args[i];
    const cl_float narrow = a->kind == 3 ? (cl_float)a->u.r : 0;
    const cl_mem base = a->kind == 0 ? a->u.buf.handle : NULL;
    switch (a->kind) {
    case 0:
      code = moe__cl.clSetKernelArg(kernel, *at, sizeof base, base ? &base : NULL);
      if (!code) code = moe__cl.clSetKernelArg(kernel, ++*at, sizeof a->u.buf.offset, &a->u.buf.offset);
      break;
    case 1: code = moe__cl.clSetKernelArg(kernel, *at, sizeof a->u.i, &a->u.i); break;
    case 2: code = moe__cl.clSetKernelArg(kernel, *at, sizeof a->u.l, &a->u.l); break;
    default:
      code = dtype == MOE_F64 ? moe__cl.clSetKernelArg(kernel, *at, sizeof a->u.r, &a->u.r)
                              : moe__cl.clSetKernelArg(kernel, *at, sizeof narrow, &narrow);
    }
    if (code) break;
    ++*at;
  }
  return code;
}

static moe_status opencl_launch(struct moe__queue_be *q, const struct moe__kernel *k, int dtype,
                                const int64_t groups[3], int local, const struct moe__karg *args, int n)
{
  const size_t local_size[3] = { (size_t)local, 1, 1 };
  const size_t global_size[3] = { (size_t)groups[0] * (size_t)local, (size_t)groups[1], (size_t)groups[2] };
  cl_kernel kernel;
  cl_uint at;
  cl_int code;
  char text[160];
  if (groups[0] <= 0 || groups[1] <= 0 || groups[2] <= 0) return MOE_OK;
  MOE__TRY(find_kernel(q, k, dtype, &kernel));
  code = set_args(kernel, dtype, args, n, &at);
  if (code) {
    snprintf(text, sizeof text, "kernel %s of %s, argument %u", k->name, k->program, (unsigned)at);
    return fail(MOE_ERR_LAUNCH, q->dev, code, text);
  }
  code = moe__cl.clEnqueueNDRangeKernel(q->queue, kernel, 3, NULL, global_size, local_size, 0, NULL, NULL);
  if (code) {
    snprintf(text, sizeof text, "kernel %s of %s, %lld x %lld x %lld groups of %d", k->name, k->program,
             (long long)groups[0], (long long)groups[1], (long long)groups[2], local);
    return fail(MOE_ERR_LAUNCH, q->dev, code, text);
  }
  q->last = k;
  return MOE_OK;
}

const struct moe__backend moe__opencl_backend = {
  .name = "opencl",
  .count = opencl_count,
  .probe = opencl_probe,
  .open = opencl_open,
  .close = opencl_close,
  .info = opencl_info,
  .alloc = opencl_alloc,
  .release = opencl_release,
  .adopt = opencl_adopt,
  .queue_open = opencl_queue_open,
  .queue_close = opencl_queue_close,
  .queue_native = opencl_queue_native,
  .write = opencl_write,
  .read = opencl_read,
  .copy = opencl_copy,
  .fill = opencl_fill,
  .wait = opencl_wait,
  .program = opencl_program,
  .launch = opencl_launch,
  .flush = opencl_flush,
  .ops = &moe__opencl_ops,
};
