/* launch.h - what the emulated backend (C) asks of the kernels (C++). */
#ifndef MOE_EMULATOR_LAUNCH_H
#define MOE_EMULATOR_LAUNCH_H

#include <stdint.h>

/* A kernel of ggemm_mma.cl: arguments as words of 64 bits, a tensor as two. */
struct emulator_launch {
  const char *name;
  int groups, local, n;
  const uint64_t *words;
};

/* A kernel of cuda/, and its argument. */
struct emulator_launch_sm90 {
  const char *name;
  const void *function; /* as compiled for the emulator */
  int groups, threads, shared;
  const void *argument;
};
/* What stands in a CUtensorMap here: the fastest dimension first, strides in bytes. */
struct emulator_tensor_map {
  unsigned char *base;
  uint64_t size[3], stride[3];
  uint32_t box[3], rank, bytes; /* bytes: of an element */
};

#ifdef __cplusplus
extern "C" {
#endif
/* 0: there is no such kernel. */
int emulator_start_bf16(const struct emulator_launch *l);
int emulator_start_f16(const struct emulator_launch *l);
int emulator_start_sm90_rows(const struct emulator_launch_sm90 *l);
int emulator_start_sm90_wgrad(const struct emulator_launch_sm90 *l);
#ifdef __cplusplus
}
#endif

#endif
