/* wgrad_sm90.cpp - cuda/wgrad_sm90.cu, compiled for the emulator. */
#define moe__sm90_wgrad_kernels emulated_sm90_wgrad_kernels
#include "cuda/wgrad_sm90.cu"

#include "launch.h"

static void call(const void *function, const void *argument)
{
  ((void (*)(moe__sm90_wgrad))function)(*(const moe__sm90_wgrad *)argument);
}

int emulator_start_sm90_wgrad(const struct emulator_launch_sm90 *l)
{
  emulator::run({ l->name, l->groups, l->threads, l->shared, BLOCKS, 0, call, l->function, l->argument });
  return 1;
}
