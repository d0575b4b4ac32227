/* fake.h - a backend without a device, for white-box tests: its memory is the host's, its kernels are counted and
   not run, and the n-th of its calls can be made to fail.

   With `fake.own_ops` the device has an implementation of its own for every op, so that ops are counted by name and
   their arguments kept; without, the portable launchers run and launches are counted. */
#ifndef MOE_TEST_FAKE_H
#define MOE_TEST_FAKE_H

#include "core/backend.h"

enum { FAKE_DL_TYPE = 12 }; /* DLPack's "device of an extension": the data is a handle */

enum fake_op {
#define OP(name, family) FAKE_##name,
#include "core/ops.def"
#undef OP
  FAKE_OPS
};
/* The arguments of the last call of each op. */
struct fake_args {
#define OP(name, family) struct moe__args_##name name;
#include "core/ops.def"
#undef OP
};

extern struct fake {
  /* Set before fake_open. */
  int own_ops; /* 1: every op has an implementation "OP:fake", on matrix units as far as the core knows */
  int no_fp64;
  moe_context_desc desc; /* of the context: hooks */
  int refuse;            /* 1: those implementations cannot */
  int fuse;              /* 1: those of products have epilogues */
  /* Counters; fake_clear zeroes them. */
  _Atomic long calls;    /* that can fail, all kinds */
  _Atomic long launches; /* of kernels, or of own ops */
  _Atomic long writes;   /* copies, fills, transfers: whatever else touches device memory */
  _Atomic long ops[FAKE_OPS];
  /* What is alive, whatever was cleared. */
  _Atomic long devices, queues, blocks, bytes;
  _Atomic long fail_at;      /* call number `fail_at` fails; 0: none */
  _Atomic moe_status failed; /* with this; MOE_OK: it did not come to it */
  struct fake_args last;     /* where own_ops; one thread only */
} fake;

/* All of `fake` but what is alive back to zero. */
void fake_reset(void);
/* The counters and fail_at to zero. */
void fake_clear(void);
/* A context on a new fake device; NULL where there is no memory. */
moe_context *fake_open(void);
/* Host memory of a block of device memory. */
void *fake_data(void *handle);

#endif
