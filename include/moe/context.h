/* moe/context.h - devices, contexts and queues: where work runs and in which order. */
#ifndef MOE_CONTEXT_H
#define MOE_CONTEXT_H

#include <moe/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moe_context moe_context; /* one device of one backend; may be shared by threads */
typedef struct moe_queue moe_queue;     /* an order of work; belongs to one thread at a time */

typedef struct moe_context_desc {
  uint64_t size;
  /* "cuda", "cuda:1", "opencl", "opencl:gpu", "opencl:cpu", "opencl:PLATFORM:DEVICE" (numbers);
     NULL: CUDA, else an OpenCL GPU, else an OpenCL CPU. */
  const char *device;
  /* Device memory that the library itself needs (a few hundred bytes for a queue; the tape's arena);
     NULL: the runtime's own.  alloc returns a handle (device pointer or cl_mem), or NULL for "none left". */
  void *(*alloc)(void *user, uint64_t bytes);
  void (*release)(void *user, void *handle);
  /* One line, without a newline.  level: 0 note, 1 warning.  NULL: silent. */
  void (*log)(void *user, int64_t level, const char *line);
  void *user;
  /* Built OpenCL programs, kept by the caller from one process to the next; NULL: not.  Other backends carry built
     kernels and call neither.  `key` is 32 hexadecimal digits, made of all that a program depends on: every line of its
     text, the build options, library version, device, driver and platform (but not environment variables that a
     driver's compiler may read).
     cache_load gives the entry's bytes, copied to `to` where `room` suffices, and its size; 0: there is none.  It is
     called twice, first with room 0.  cache_store returns MOE_OK, or anything else for "not kept".  An entry that is not
     whole, not of this key, or refused by the driver is never an error: a log line, and the program is built and
     stored anew.
     They are called by whichever thread creates an object, one at a time for one context but side by side for
     several, and must not call libmoe with that context. */
  uint64_t (*cache_load)(void *user, const char *key, void *to, uint64_t room);
  moe_status (*cache_store)(void *user, const char *key, const void *from, uint64_t bytes);
} moe_context_desc;
MOE_INIT(moe_context_desc)

/* Opens a device.  MOE_ERR_NO_DEVICE with the reason (no driver, no ICD, ordinal too large),
   MOE_ERR_INVALID for a malformed name. */
MOE_API MOE_CHECKED moe_status moe_context_create(moe_context **out, const moe_context_desc *desc);
/* Drops the caller's hold; queues, layers and tapes keep their context alive until they are freed. */
MOE_API void moe_context_free(moe_context *ctx);

typedef enum moe_device_kind { MOE_DEVICE_GPU = 1, MOE_DEVICE_CPU = 2, MOE_DEVICE_OTHER = 3 } moe_device_kind;

typedef struct moe_device_info {
  uint64_t size;
  char backend[16];  /* "cuda", "opencl" */
  char id[32];       /* what moe_context_desc.device takes: "opencl:0:0" */
  char name[128];    /* the device's own name */
  char driver[128];  /* driver or platform version */
  int64_t kind;      /* moe_device_kind */
  int64_t memory;    /* bytes */
  int64_t max_alloc; /* bytes of the largest single allocation */
  int64_t local_memory;
  int64_t compute_units;
  int64_t fp64;   /* 1: MOE_F64 works */
  int64_t tensor; /* 1: matrix-unit kernels are there */
  int64_t arch;   /* NVIDIA: 10 * major + minor (90 for Hopper); 0 elsewhere */
} moe_device_info;
MOE_INIT(moe_device_info)

MOE_API MOE_CHECKED moe_status moe_context_info(const moe_context *ctx, moe_device_info *out);
/* Device `index` over all backends in order of preference; MOE_ERR_INVALID past the last.  Opens nothing. */
MOE_API MOE_CHECKED moe_status moe_device_list(moe_device_info *out, int64_t index);
/* Why a backend ("cuda", "opencl") has no device, or "" where it has one; never NULL.  The text names
   what to install.  Valid until the next call on the thread. */
MOE_API const char *moe_backend_reason(const char *backend);

MOE_API MOE_CHECKED moe_status moe_queue_create(moe_queue **out, moe_context *ctx);
/* NULL is fine.  Blocks until the work of the queue is done. */
MOE_API void moe_queue_free(moe_queue *queue);
/* Blocks until all work enqueued so far is done.  Reports asynchronous faults of earlier work
   (MOE_ERR_BACKEND, with the op's name where it is known), then the health word, and bad gradients of tapes whose
   policy is MOE_HEALTH_POLICY_FAIL (MOE_ERR_DATA; the text says what was met).  No later wait reports them again. */
MOE_API MOE_CHECKED moe_status moe_queue_wait(moe_queue *queue);

/* Bits of the health word: data problems that kernels met.  Never undefined behaviour: the rows
   concerned are NaN, all others are right. */
typedef enum moe_health {
  MOE_HEALTH_ROUTE = 1,   /* a token's routing weights were not finite: it left the plan */
  MOE_HEALTH_ID = 2,      /* a given id (expert, embedding row, class) was out of range */
  MOE_HEALTH_OVERFLOW = 4 /* an optimizer step was skipped: gradients were not finite */
} moe_health;
/* Waits, returns the bits and clears them. */
MOE_API MOE_CHECKED moe_status moe_health_read(moe_queue *queue, uint64_t *bits);

/* Device memory for callers that have no allocator of their own. */
MOE_API MOE_CHECKED moe_status moe_span_alloc(moe_span *out, moe_context *ctx, uint64_t bytes);
/* Zeroes *span.  {0} and NULL are fine. */
MOE_API void moe_span_free(moe_context *ctx, moe_span *span);
/* Copies.  moe_span_write has read `from` when it returns; moe_span_read blocks until `to` is filled. */
MOE_API MOE_CHECKED moe_status moe_span_write(moe_queue *queue, moe_span to, const void *from, uint64_t bytes);
MOE_API MOE_CHECKED moe_status moe_span_read(moe_queue *queue, void *to, moe_span from, uint64_t bytes);
/* Enqueued. */
MOE_API MOE_CHECKED moe_status moe_span_copy(moe_queue *queue, moe_span to, moe_span from, uint64_t bytes);
/* Sets every byte; enqueued. */
MOE_API MOE_CHECKED moe_status moe_span_fill(moe_queue *queue, moe_span to, uint8_t byte);

/* Values of packed float tensors (F64, F32, BF16, F16), for set-up and inspection: the first call of a kind
   compiles its kernel. */
/* Every element becomes `value`, a finite one; enqueued. */
MOE_API MOE_CHECKED moe_status moe_tensor_fill(moe_queue *queue, const moe_tensor *t, double value);
/* Normal values of standard deviation stddev, a function of (seed, stream, index) alone: the same bits on every
   device.  Give each tensor its own stream, 0..2^31-1.  Enqueued. */
MOE_API MOE_CHECKED moe_status moe_tensor_normal(moe_queue *queue, const moe_tensor *t, uint64_t seed, int64_t stream,
                                                 double stddev);
/* Blocks; the first n elements (or all, if fewer) as doubles.  Takes integer tensors too. */
MOE_API MOE_CHECKED moe_status moe_tensor_read(moe_queue *queue, double *out, const moe_tensor *t, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
