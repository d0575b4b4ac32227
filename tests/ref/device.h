/* device.h - device memory for tests: tensors in blocks between guard bands, mirrored on the host.

   A block is filled with a pattern that is NaN in every float type and a negative number in every integer type:
   guard bands, gaps between strided rows, outputs before they are written and rows that must not be read all look
   like that.  t_own says which elements a kernel may write; t_guards finds every other byte that has changed.
   Errors are sticky in `status`: call on, check once. */
#ifndef MOE_T_DEVICE_H
#define MOE_T_DEVICE_H

#include "ref.h"

#include <moe/context.h>

struct t_memory {
  moe_context *ctx;
  moe_queue *q;
  moe_status status;
  uint64_t guard; /* bytes of a guard band, a multiple of 16; 0: memory checkers see every access outside */
  uint64_t seed;  /* of the random values */
  struct t_block *blocks;
  struct t_host *hosts;
  moe_context *twin_ctx; /* a second device with the same blocks, set before the first; NULL: none */
  moe_queue *twin_q;
  int has_huge; /* a block without mirror, which the twin does not have */
};
void t_memory_init(struct t_memory *m, moe_context *ctx, moe_queue *q, uint64_t seed);
/* Frees every block and host array. */
void t_memory_free(struct t_memory *m);

/* How a tensor lies in its block; bits. */
enum t_layout {
  T_PACKED = 0,
  T_PAD = 1,     /* three elements more between the rows of each dimension */
  T_SWAP = 2,    /* the last two dimensions exchanged: a transposed view */
  T_STEP = 4,    /* every second element */
  T_ODD = 8,     /* begins one element past the aligned place */
  T_SCALAR = 16, /* all strides 0: one element, broadcast */
  T_PAD8 = 32    /* eight elements more between rows: strides that aligned kernels take */
};
#define SHAPE(...)                                                                                                     \
  (int)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[])                                 \
  {                                                                                                                    \
    __VA_ARGS__                                                                                                        \
  }

/* A tensor in a new block, `guard` bytes into it.  On failure the handle is NULL. */
moe_tensor t_tensor(struct t_memory *m, int64_t dtype, int layout, int rank, const int64_t *shape);
/* A packed tensor too large for the host: every byte is `byte`; no guard bands, no mirror, and the functions for
   whole blocks leave it alone.  Its rows (of dimension 0) are written and read directly. */
moe_tensor t_huge(struct t_memory *m, int64_t dtype, uint8_t byte, int rank, const int64_t *shape);
void t_write_rows(struct t_memory *m, const moe_tensor *t, int64_t row, int64_t n, const num *values);
void t_read_rows(struct t_memory *m, const moe_tensor *t, int64_t row, int64_t n, double *values);
/* The kernel may write the elements of this tensor (or view of one). */
void t_own(struct t_memory *m, const moe_tensor *t);
/* Values (rounded to the dtype; packed in `values`) into the host's mirror; t_get: out of what was downloaded. */
void t_put(struct t_memory *m, const moe_tensor *t, const num *values);
void t_put_ints(struct t_memory *m, const moe_tensor *t, const int32_t *values);
void t_get(struct t_memory *m, const moe_tensor *t, double *values);
void t_get_ints(struct t_memory *m, const moe_tensor *t, int32_t *values);
/* All blocks, to the device and back (waits). */
void t_upload(struct t_memory *m);
void t_download(struct t_memory *m);
/* The same for the twin, and what came from it. */
void t_upload_twin(struct t_memory *m);
void t_download_twin(struct t_memory *m);
void t_get_twin(struct t_memory *m, const moe_tensor *t, double *values);
/* Arguments of a kernel, `bytes` of them: every tensor in them becomes the twin's. */
void t_for_twin(const struct t_memory *m, void *args, size_t bytes);
/* NULL, or what was written where nothing may be (the text is the thread's until the next call). */
const char *t_guards(struct t_memory *m);
/* Are the last two downloads equal, bit for bit? */
int t_repeats(struct t_memory *m);

/* ---- host arrays, freed with the memory ------------------------------------------------------------------------ */
void *t_host(struct t_memory *m, int64_t n, size_t size); /* zeroed */
num *t_nums(struct t_memory *m, int64_t n);
int32_t *t_ints(struct t_memory *m, int64_t n);
uint64_t t_random(struct t_memory *m);
int64_t t_below(struct t_memory *m, int64_t n);
/* Uniform in (-size, size), rounded to the dtype. */
num *t_uniform(struct t_memory *m, int64_t n, int64_t dtype, double size);
/* Whole numbers in [-size, size]: sums of their products are exact. */
num *t_whole(struct t_memory *m, int64_t n, int64_t size);

#endif
