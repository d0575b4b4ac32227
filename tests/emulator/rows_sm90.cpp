/* rows_sm90.cpp - cuda/rows_sm90.cu, compiled for the emulator. */
#define moe__sm90_rows_kernels emulated_sm90_rows_kernels
#define moe__sm90_act_grad_kernels emulated_sm90_act_grad_kernels
#define moe__sm90_sums_kernel emulated_sm90_sums_kernel
#include "cuda/rows_sm90.cu"

#include "launch.h"

template <class A> static void call(const void *function, const void *argument)
{
  ((void (*)(A))function)(*(const A *)argument);
}

/* The second half of each table is in clusters of two. */
template <class T> static bool in_second(const T (&table)[2], const void *function)
{
  const auto *k = (const struct moe__sm90_kernel *)&table[1];
  for (size_t i = 0; i < sizeof table[1] / sizeof *k; i++)
    if (k[i].function == function) return true;
  return false;
}

int emulator_start_sm90_rows(const struct emulator_launch_sm90 *l)
{
  if (l->function == moe__sm90_sums_kernel.function) {
    emulator::run({ l->name, l->groups, l->threads, l->shared, 1, 1, call<moe__sm90_sums>, l->function, l->argument });
    return 1;
  }
  const int cluster =
      1 + (in_second(moe__sm90_rows_kernels, l->function) || in_second(moe__sm90_act_grad_kernels, l->function));
  emulator::run(
      { l->name, l->groups, l->threads, l->shared, cluster, 0, call<moe__sm90_rows>, l->function, l->argument });
  for (const unsigned &counter : counters)
    if (counter) return 0; /* the next launch would begin where this one ended */
  return 1;
}
