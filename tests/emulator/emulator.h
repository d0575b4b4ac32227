/* emulator.h - NVIDIA GPUs as far as the kernels on matrix units need them, on the host: every thread is a fibre, and
   what one fibre does between two waits is one step.

   Steps of warps come in random order, with warps that are slow and lanes that fall behind.  What is asynchronous is
   as early and as late as it may be: a copy spoils its target when it begins and lands at a random time, at the
   latest when it is waited for; a matrix product reads its operands when it is committed or when it is waited for.
   Shared memory is NaN before it is written.  A launch's randomness follows from its number and MOE_EMULATOR_SEED.
   What the hardware would not take (addresses out of place, diverged warps, barriers that are told too much) and what
   would never end is said on stderr, with who waits for what, and aborts.

   Not here: bank conflicts, registers, the order of plain accesses (memory is as the host's), fences between proxies. */
#ifndef MOE_EMULATOR_H
#define MOE_EMULATOR_H

#include <stdint.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace emulator
{

enum {
  WARP = 32,
  MOST_IN_CLUSTER = 2,
  SHARED_BYTES = 227 << 10,
  SHARED_BASE = 1024 /* the 32-bit address of a block's first byte of shared memory */
};

[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint32_t random_bits();
/* Of `times` in 256. */
bool by_chance(unsigned times);

/* Some threads that go on when all are there. */
struct meeting {
  int here;
  unsigned round;
};
struct mbarrier {
  int expected, pending, bytes;
  unsigned phase;
};
/* 16 bytes that a cp.async brings. */
struct copy {
  uint32_t to;
  unsigned char data[16];
};
/* A product of a warpgroup (wgmma) as a thread of it issued it. */
struct product {
  uint64_t a, b;
  bool add, half, a_m_first, b_n_first;
  float *d;
};
/* What a lane hands to an instruction of its whole warp. */
struct operand {
  int instruction;
  uint32_t words[6];
  void *to;
};

struct block;
struct thread {
  void *stack_pointer;
  unsigned char *stack;
  struct block *block;
  int number; /* in its block */
  bool done;
  int arrivals;          /* at other blocks, under way */
  const char *waits_for; /* NULL: for nothing */
  bool (*over)(const thread &);
  const void *on;
  unsigned long value;
  operand given;
  std::vector<copy> copies;                /* begun, in no group */
  std::deque<std::vector<copy>> groups;    /* committed */
  std::shared_ptr<int> store;              /* begun stores that have not read their shared memory, in no group */
  std::deque<std::shared_ptr<int>> stores; /* committed */
  std::vector<product> products;
  std::deque<std::vector<product>> product_groups;
};
struct block {
  int number, rank, threads, alive;
  struct block *cluster[MOST_IN_CLUSTER];
  unsigned char *shared;
  std::map<uint32_t, mbarrier> mbarriers;
  meeting all, whole_cluster, named[16], warps[32];
  std::vector<thread> thread_at;
};

/* A grid of `blocks`, in clusters, of which `resident` run at a time (0: by chance).  The kernel's type is known to
   `kernel`, which calls it. */
struct grid {
  const char *name;
  int blocks, threads, shared, cluster, resident;
  void (*kernel)(const void *function, const void *argument);
  const void *function, *argument;
};
void run(const grid &g);
extern const grid *running;
extern thread *now; /* the one that runs */

/* ---- waiting ----------------------------------------------------------------------------------------------------- */
void maybe_yield();
void wait(const char *what, bool (*over)(const thread &), const void *on, unsigned long value);
/* The last of n threads calls `last`, then all go on. */
template <class F> void meet(const char *what, meeting *m, int n, F last)
{
  if (++m->here == n) {
    last();
    m->here = 0;
    m->round++;
  } else
    wait(
        what, [](const thread &t) { return ((const meeting *)t.on)->round != t.value; }, m, m->round);
}
inline void meet(const char *what, meeting *m, int n)
{
  meet(what, m, n, [] {});
}
/* An instruction of the whole warp: `all` gets its 32 threads. */
template <class F> void of_warp(const char *name, int instruction, F all)
{
  thread *warp = &now->block->thread_at[now->number / WARP * WARP];
  now->given.instruction = instruction;
  meet(name, &now->block->warps[now->number / WARP], WARP, [&] {
    for (int i = 1; i < WARP; i++)
      if (warp[i].given.instruction != instruction) die("lanes at different instructions of their warp: %s", name);
    all(warp);
  });
}
inline void block_barrier()
{
  meet("barrier of the block", &now->block->all, now->block->threads);
}
/* Happens at some time, in no order. */
void later(std::function<void()> what);

/* ---- shared memory ----------------------------------------------------------------------------------------------- */
unsigned char *shared_at(block *b, uint32_t address, int bytes, int aligned);
uint32_t shared_address(const void *p);
/* 16 bytes, the first `bytes` from there and zeros; then as cp.async has it. */
void copy_begin(uint32_t to, const void *from, int bytes);
void copy_commit();
void copy_wait(int left);
void copy_arrive(uint32_t bar);
void barrier_arrive(block *b, uint32_t bar, int arrivals, int bytes);
mbarrier *barrier_at(block *b, uint32_t bar);

/* ---- numbers ----------------------------------------------------------------------------------------------------- */
uint16_t to_half(float f);
uint16_t to_bf16(float f);
float from_half(uint16_t h);
inline float from_bits(uint32_t u)
{
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
inline uint32_t to_bits(float f)
{
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}
inline float from_bf16(uint16_t b)
{
  return from_bits((uint32_t)b << 16);
}

} // namespace emulator

#endif
