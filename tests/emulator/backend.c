/* backend.c - the backend "emulated" in place of all others, for moe-conform-emulated: device memory is the host's, and
   of the kernels there are those on NVIDIA's matrix units (mma.cpp; sm90.c), behind their own launchers. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "core/dlpack.h"
#include "core/kernels/kernels.h"

#include "launch.h"

#include "config.h"

#if MOE_HAVE_CUDA
#include "cuda/impls.h"
#else
#include "opencl/loader.h"
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Six multiprocessors: every block has several tiles. */
enum { PAGE = 4096, UNITS = 6, MOST_ARGUMENTS = 64 };

struct moe__dev {
  struct moe__dev_info info;
};
struct moe__queue_be {
  struct moe__dev *dev;
};

/* ---- devices ----------------------------------------------------------------------------------------------------- */
static struct moe__dev_info the_info(void)
{
  struct moe__dev_info info = { .pub = moe_device_info_init() };
  strcpy(info.pub.backend, "emulated");
  strcpy(info.pub.id, "emulated");
  strcpy(info.pub.name, "emulator of NVIDIA's matrix units");
  strcpy(info.pub.driver, "tests/emulator");
  info.pub.kind = MOE_DEVICE_GPU;
  info.pub.compute_units = UNITS;
  info.pub.tensor = 1;
  info.pub.arch = 90;
  info.vector_width = 1;
  info.reduce_local = 256;
  info.ptx = 1;
  info.dl_type = MOE__DL_CUDA; /* a handle is an address */
  return info;
}

static moe_status count(int *n)
{
  *n = 1;
  return MOE_OK;
}

static moe_status probe(int index, moe_device_info *out)
{
  (void)index;
  *out = the_info().pub;
  return MOE_OK;
}

static moe_status dev_open(struct moe__dev **out, const struct moe__open *how)
{
  (void)how;
  *out = calloc(1, sizeof **out);
  if (!*out) return moe__fail(MOE_ERR_NO_MEMORY, "emulated: no host memory");
  (*out)->info = the_info();
  return MOE_OK;
}

static void dev_close(struct moe__dev *dev)
{
  free(dev);
}

static const struct moe__dev_info *dev_info(const struct moe__dev *dev)
{
  return &dev->info;
}

/* ---- memory: between pages that nobody may touch, its end at the second ------------------------------------------- */
struct memory {
  struct memory *next;
  unsigned char *pages;
  size_t bytes; /* of the pages */
  void *handle;
};
static struct memory *memories;

static moe_status dev_alloc(struct moe__dev *dev, uint64_t bytes, void **handle)
{
  const size_t room = (size_t)(bytes + PAGE) / PAGE * PAGE;
  struct memory *m = calloc(1, sizeof *m);
  (void)dev;
  *handle = NULL;
  if (!m) return moe__fail(MOE_ERR_NO_MEMORY, "emulated: no host memory");
  m->bytes = room + 2 * PAGE;
  m->pages = mmap(NULL, m->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m->pages == MAP_FAILED || mprotect(m->pages + PAGE, room, PROT_READ | PROT_WRITE)) {
    free(m);
    return moe__fail(MOE_ERR_NO_MEMORY, "emulated: no memory for %llu bytes", (unsigned long long)bytes);
  }
  memset(m->pages + PAGE, 0xff, room);
  m->handle = *handle = m->pages + PAGE + room - (bytes + 15) / 16 * 16;
  m->next = memories;
  memories = m;
  return MOE_OK;
}

static void dev_release(struct moe__dev *dev, void *handle)
{
  struct memory **at = &memories, *m;
  (void)dev;
  while (*at && (*at)->handle != handle) at = &(*at)->next;
  m = *at;
  if (!m) abort(); /* never given out, or given back before */
  *at = m->next;
  munmap(m->pages, m->bytes);
  free(m);
}

static moe_status adopt(struct moe__dev *dev, const struct moe__foreign *there, struct moe__adopted *here)
{
  (void)dev;
  (void)there;
  (void)here;
  return moe__fail(MOE_ERR_UNSUPPORTED, "emulated: no memory of others");
}

/* ---- queues: everything is done at once -------------------------------------------------------------------------- */
static moe_status queue_open(struct moe__dev *dev, int is_lent, void *lent, struct moe__queue_be **out)
{
  (void)is_lent;
  (void)lent;
  *out = calloc(1, sizeof **out);
  if (!*out) return moe__fail(MOE_ERR_NO_MEMORY, "emulated: no host memory");
  (*out)->dev = dev;
  return MOE_OK;
}

static void queue_close(struct moe__queue_be *q)
{
  free(q);
}

static void *queue_native(const struct moe__queue_be *q)
{
  return q->dev;
}

static unsigned char *place(moe_span s)
{
  return (unsigned char *)s.handle + s.offset;
}

static moe_status queue_write(struct moe__queue_be *q, moe_span to, const void *from, uint64_t bytes)
{
  (void)q;
  memcpy(place(to), from, bytes);
  return MOE_OK;
}

static moe_status queue_read(struct moe__queue_be *q, void *to, moe_span from, uint64_t bytes)
{
  (void)q;
  memcpy(to, place(from), bytes);
  return MOE_OK;
}

static moe_status queue_copy(struct moe__queue_be *q, moe_span to, moe_span from, uint64_t bytes)
{
  (void)q;
  memmove(place(to), place(from), bytes);
  return MOE_OK;
}

static moe_status queue_fill(struct moe__queue_be *q, moe_span to, uint8_t byte, uint64_t bytes)
{
  (void)q;
  memset(place(to), byte, bytes);
  return MOE_OK;
}

static moe_status nothing_to_do(struct moe__queue_be *q)
{
  (void)q;
  return MOE_OK;
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */
static moe_status program(struct moe__dev *dev, const char *name, int dtype)
{
  (void)dev;
  (void)name;
  (void)dtype;
  return MOE_OK;
}

static moe_status launch(struct moe__queue_be *q, const struct moe__kernel *k, int dtype, const int64_t groups[3],
                         int local, const struct moe__karg *args, int n)
{
  uint64_t words[2 * MOST_ARGUMENTS];
  struct emulator_launch l = { k->name, (int)groups[0], local, 0, words };
  (void)q;
  if (n > MOST_ARGUMENTS || groups[1] != 1 || groups[2] != 1)
    return moe__fail(MOE_ERR_LAUNCH, "emulated: %s has a grid or arguments of another kind", k->name);
  for (int i = 0; i < n; i++) {
    if (args[i].kind == 0) {
      words[l.n++] = (uint64_t)(uintptr_t)args[i].u.buf.handle;
      words[l.n++] = (uint64_t)args[i].u.buf.offset;
    } else words[l.n++] = (uint64_t)(args[i].kind == 1 ? args[i].u.i : args[i].u.l);
  }
  if (strcmp(k->program, "ggemm_mma") || !(dtype == MOE_BF16 ? emulator_start_bf16 : emulator_start_f16)(&l))
    return moe__fail(MOE_ERR_UNSUPPORTED, "emulated: there is no kernel %s of %s", k->name, k->program);
  return MOE_OK;
}

/* ---- what takes the place of the library's own (ld --wrap) -------------------------------------------------------- */
/* Without CUDA the OpenCL backend's, of which a GPU is served by mma.sync alone. */
#if MOE_HAVE_CUDA
#define OPS moe__cuda_ops
#else
#define OPS moe__opencl_ops
#endif
static const struct moe__backend emulated = { .name = "emulated",
                                              .count = count,
                                              .probe = probe,
                                              .open = dev_open,
                                              .close = dev_close,
                                              .info = dev_info,
                                              .alloc = dev_alloc,
                                              .release = dev_release,
                                              .adopt = adopt,
                                              .queue_open = queue_open,
                                              .queue_close = queue_close,
                                              .queue_native = queue_native,
                                              .write = queue_write,
                                              .read = queue_read,
                                              .copy = queue_copy,
                                              .fill = queue_fill,
                                              .wait = nothing_to_do,
                                              .program = program,
                                              .launch = launch,
                                              .flush = nothing_to_do,
                                              .ops = &OPS };
extern const struct moe__backend *const __wrap_moe__backends[];
const struct moe__backend *const __wrap_moe__backends[] = { &emulated, NULL };
