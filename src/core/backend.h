/* backend.h - what the core knows of a backend: the device half (one vtable, all required) and the lists
   of implementations of each op (tuned ones of the backend, then the portable one).

   The core never asks which backend it is on.  A new backend needs this vtable and the embedded text (or
   a compiled form) of src/core/kernels/; tuned implementations are optional. */
#ifndef MOE_CORE_BACKEND_H
#define MOE_CORE_BACKEND_H

#include "core/args.h"
#include "core/status.h"

#include <moe/context.h>

/* ---- embedded kernels (generated tables) ---------------------------------------------------------- */
struct moe__source { /* OpenCL C text; ends with {0} */
  const char *name;
  const unsigned char *data;
  size_t size;
};
struct moe__image { /* fatbins of the same files, one per storage type; ends with {0} */
  const char *name;
  int dtype;
  const unsigned char *data;
  size_t size;
};

/* ---- launches ------------------------------------------------------------------------------------- */
/* A kernel by name.  `program` is the stem of its .cl file.  Launchers keep these static: backends key
   their caches on the address. */
struct moe__kernel {
  const char *program, *name;
};
/* One kernel argument.  A tensor is two arguments on the device: base pointer and element offset (long).
   REAL is double in the F64 variant of a program and float elsewhere. */
struct moe__karg {
  int kind; /* 0 tensor, 1 int, 2 long, 3 REAL */
  union {
    struct {
      void *handle;
      int64_t offset; /* elements */
    } buf;
    int32_t i;
    int64_t l;
    double r;
  } u;
};
struct moe__karg moe__arg_tensor(const moe_tensor *t); /* NULL handle: NULL base */
struct moe__karg moe__arg_int(int64_t v);
struct moe__karg moe__arg_long(int64_t v);
struct moe__karg moe__arg_real(double v);
#define T_(t) moe__arg_tensor(&(t))
#define I_(v) moe__arg_int(v)
#define L_(v) moe__arg_long(v)
#define R_(v) moe__arg_real(v)

/* ---- the device half ------------------------------------------------------------------------------- */
struct moe__dev;      /* a backend's own */
struct moe__queue_be; /* a backend's own queue */

struct moe__dev_info {
  moe_device_info pub;
  int vector_width;   /* floats in a native vector (OpenCL CPU), else 1 */
  int reduce_local;   /* work-group size for reductions: fixed per device; 1 on CPUs, else a power of two <= 256 */
  int ptx;            /* kernels are built with MOE_PTX (common.clh) and may use instructions of sm_80 */
  int dl_type, dl_id; /* what DLPack calls the device (core/dlpack.h) */
};

struct moe__open {
  const char *spec; /* what follows "backend:" in the device name, or "" */
  void *lent_context, *lent_device;
  const moe_context_desc *hooks; /* the caller's functions; alive as long as the device */
};

/* Memory that another library owns: `bytes` from `offset` behind `data`, whose meaning follows from the type. */
struct moe__foreign {
  int dl_type, dl_id;
  void *data;
  uint64_t offset, bytes;
};
struct moe__adopted {
  void *handle; /* aligned to more than any element */
  uint64_t offset;
  int is_new; /* the handle is given back through `release` */
};

struct moe__ops; /* tuned implementations, below */

struct moe__backend {
  const char *name; /* "cuda" */
  /* Devices this backend could open; *n = 0 with the reason in moe_last_error when there is none. */
  moe_status (*count)(int *n);
  /* Facts of device `index` without opening it. */
  moe_status (*probe)(int index, moe_device_info *out);
  moe_status (*open)(struct moe__dev **out, const struct moe__open *how);
  void (*close)(struct moe__dev *dev);
  const struct moe__dev_info *(*info)(const struct moe__dev *dev);
  /* Device memory; zero bytes give a handle too. */
  moe_status (*alloc)(struct moe__dev *dev, uint64_t bytes, void **handle);
  void (*release)(struct moe__dev *dev, void *handle);
  /* Foreign memory as device memory, in place.  MOE_ERR_UNSUPPORTED: the device cannot use such memory;
     MOE_ERR_INVALID: it is not what it says. */
  moe_status (*adopt)(struct moe__dev *dev, const struct moe__foreign *there, struct moe__adopted *here);
  /* lent: cudaStream_t or cl_command_queue when `is_lent`, else the backend makes its own. */
  moe_status (*queue_open)(struct moe__dev *dev, int is_lent, void *lent, struct moe__queue_be **out);
  void (*queue_close)(struct moe__queue_be *q);
  void *(*queue_native)(const struct moe__queue_be *q); /* cudaStream_t or cl_command_queue */
  /* Host to device (reads `from` before returning), device to host (blocks), device to device, byte fill. */
  moe_status (*write)(struct moe__queue_be *q, moe_span to, const void *from, uint64_t bytes);
  moe_status (*read)(struct moe__queue_be *q, void *to, moe_span from, uint64_t bytes);
  moe_status (*copy)(struct moe__queue_be *q, moe_span to, moe_span from, uint64_t bytes);
  moe_status (*fill)(struct moe__queue_be *q, moe_span to, uint8_t byte, uint64_t bytes);
  moe_status (*wait)(struct moe__queue_be *q);
  /* Makes every kernel of a program launchable: compiles, loads.  `dtype` picks the variant (a program
     without that variant: F16 and BF16 fall to F32).  Cached; thread safe; the only call that compiles. */
  moe_status (*program)(struct moe__dev *dev, const char *name, int dtype);
  /* Enqueues.  groups: work-groups in three dimensions (any 0: nothing to do, MOE_OK); local: work-items
     of a group, one-dimensional.  MOE_ERR_STATE where the program was not made ready. */
  moe_status (*launch)(struct moe__queue_be *q, const struct moe__kernel *k, int dtype, const int64_t groups[3],
                       int local, const struct moe__karg *args, int n);
  /* Starts what was enqueued; public calls that enqueue end with it (CUDA: nothing to do). */
  moe_status (*flush)(struct moe__queue_be *q);
  const struct moe__ops *ops; /* tuned lists; NULL: none */
};

extern const struct moe__backend moe__cuda_backend, moe__opencl_backend;
/* All compiled-in backends in order of preference, ends with NULL. */
extern const struct moe__backend *const moe__backends[];

/* ---- core's queue and context, as implementations see them ----------------------------------------- */
struct moe_context {
  const struct moe__backend *be;
  struct moe__dev *dev;
  const struct moe__dev_info *info;
  moe_context_desc desc;
  long refs; /* atomic */
};
struct moe__health; /* of a tape (tape_health.c) */
struct moe_queue {
  moe_context *ctx;
  struct moe__queue_be *be;
  struct moe__health *tapes; /* those that look for bad gradients */
  moe_span health_span;
  moe_tensor health; /* I32 [4]: [0] the bits */
  /* Where set: called after each step of a walk (walk.h) is enqueued; benchmarks take times there. */
  void (*on_step)(void *user, const char *label);
  void *on_step_user;
};
/* Takes the records of the queue's tapes; text (of `room` bytes) becomes what the first of those that fail has met since
   the last time, "" for nothing. */
moe_status moe__queue_gradients(moe_queue *q, char *text, size_t room);
void moe__context_ref(moe_context *ctx);
void moe__context_unref(moe_context *ctx);
/* Through the caller's hooks if set. */
moe_status moe__alloc(moe_context *ctx, uint64_t bytes, moe_span *out);
void moe__release(moe_context *ctx, moe_span *span);

/* Launch on a core queue; the shape most launchers want. */
moe_status moe__launch(moe_queue *q, const struct moe__kernel *k, int64_t dtype, int64_t gx, int64_t gy, int64_t gz,
                       int local, const struct moe__karg *args, int n);
#define LAUNCH(q, k, dtype, gx, gy, gz, local, ...)                                                                    \
  moe__launch(q, k, dtype, gx, gy, gz, local, (const struct moe__karg[]){ __VA_ARGS__ },                               \
              (int)(sizeof((const struct moe__karg[]){ __VA_ARGS__ }) / sizeof(struct moe__karg)))
/* Work-group size for maps: 16 on CPUs, 256 elsewhere (kernels step by the global size). */
int moe__map_local(const moe_queue *q);
/* Groups for a map over n items with that local size, at most what fills the device (kernels step). */
int64_t moe__map_groups(const moe_queue *q, int64_t n);

/* ---- implementations -------------------------------------------------------------------------------- */
/* Why an implementation cannot serve: one sentence, "wants D a multiple of 8, got 1025". */
struct moe__why {
  char text[160];
};
moe_status moe__cannot(struct moe__why *why, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* TOTAL: `can` looks at the device, dtypes, the epilogue and the strides of expert weights only: what create knows.  Never at
   counts, addresses or other strides; so where it said yes at create, nothing behind it in the list needs to be
   compiled. */
/* EXPERIMENTAL: passed over but in builds with --enable-experimental; tested like any other (moe-conform forces it). */
enum { MOE__PORTABLE = 1, MOE__TENSOR = 2, MOE__TOTAL = 4, MOE__EXPERIMENTAL = 8 };

/* For each op: a list of these, best first.  `can` returns MOE_OK or MOE_ERR_UNSUPPORTED with the reason;
   it looks at args (shapes, strides, dtypes, alignment of handle and offset) and device facts only, and with all
   counts 0 (at create) answers whether it may serve some count.  `run` enqueues.  `program`: which program must be
   ready ("" none). */
#define OP(name, family)                                                                                               \
  struct moe__impl_##name {                                                                                            \
    const char *id; /* "gemm:cpu" */                                                                                   \
    const char *program;                                                                                               \
    int flags;                                                                                                         \
    moe_status (*can)(const struct moe__dev_info *, const struct moe__args_##name *, struct moe__why *);               \
    moe_status (*run)(moe_queue *, const struct moe__args_##name *);                                                   \
  };                                                                                                                   \
  extern const struct moe__impl_##name moe__portable_##name; /* src/core/kernels/<family>.c */
#include "core/ops.def"
#undef OP

struct moe__ops { /* each: NULL, or an array that ends with {0} */
#define OP(name, family) const struct moe__impl_##name *name;
#include "core/ops.def"
#undef OP
};

/* Dispatch, generated in backend.c.
   moe__impl_<op>_at: entry i of the device's list (portable last), NULL past the end.
   moe__pick_<op>: first that can under the strategy; NULL where none.  `why` (opt): the reason of the last
   one passed over, "" where the first serves.
   moe__prepare_<op>: makes ready every program that a call with such args may need; refuses where none can.
   moe__run_<op>: check, pick, run. */
#define OP(name, family)                                                                                               \
  const struct moe__impl_##name *moe__impl_##name##_at(const moe_context *ctx, int i);                                 \
  const struct moe__impl_##name *moe__pick_##name(const moe_context *ctx, const struct moe__args_##name *args,         \
                                                  int64_t strategy, struct moe__why *why);                             \
  moe_status moe__check_##name(const struct moe__args_##name *args);                                                   \
  moe_status moe__prepare_##name(moe_context *ctx, const struct moe__args_##name *args, int64_t strategy);             \
  moe_status moe__run_##name(moe_queue *q, const struct moe__args_##name *args, int64_t strategy);
#include "core/ops.def"
#undef OP

#endif
