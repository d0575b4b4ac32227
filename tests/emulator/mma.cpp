/* mma.cpp - core/kernels/ggemm_mma.cl for one storage type (MOE_ST_BF16 or MOE_ST_F16), compiled for the emulator: what
   src/cuda/opencl_c.cuh is for nvcc, and the instructions that the file otherwise has as PTX. */
#include "emulator.h"
#include "launch.h"

#include <math.h>
#include <string.h>

#include <utility>

namespace
{

enum { LOCAL_BYTES = 48 << 10 }; /* as much as a group may have */

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned short half;
struct alignas(8) uint2 {
  uint x, y;
};
struct alignas(16) uint4 {
  uint x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

#define MOE_CUDA 1
#define GLOBAL
#define LOCAL
#define KERNEL(name) void name
#define FN inline __attribute__((always_inline))
#define LOCAL_SIZE(n)
#define RESIDENT(n)
#define LOCAL_ARRAY(type, name, n)                                                                                     \
  static_assert(sizeof(type) * (n) <= LOCAL_BYTES, "more than a group may have");                                      \
  type *name = (type *)emulator::now->block->shared
#define BARRIER() emulator::block_barrier()
#define GROUP_BARRIER() emulator::block_barrier()
#define GROUP_BARRIER_GLOBAL() emulator::block_barrier()
#define GROUP(d) ((long)((d) == 0 ? emulator::now->block->number : 0))
#define GROUPS(d) ((long)((d) == 0 ? emulator::running->blocks : 1))
#define LID (emulator::now->number)
#define LSIZE (emulator::now->block->threads)
#define UNROLL
#define UNROLL_BY(n)
#define AS_UINT(x) emulator::to_bits(x)
#define AS_FLOAT(x) emulator::from_bits(x)

FN float vload_half(long i, const half *p)
{
  return emulator::from_half(p[i]);
}
FN void vstore_half_rte(float f, long i, half *p)
{
  p[i] = emulator::to_half(f);
}
FN int as_int(float f)
{
  return (int)emulator::to_bits(f);
}
FN int clz(int i)
{
  return i ? __builtin_clz((uint)i) : 32;
}
FN int popcount(uint i)
{
  return __builtin_popcount(i);
}
FN uint4 load_16(const void *p)
{
  if ((uintptr_t)p % 16) emulator::die("a load of 16 bytes from %p", p);
  return *(const uint4 *)p;
}

#include "core/kernels/common.clh"

/* ---- the instructions of ggemm_mma.cl ----------------------------------------------------------------------------- */
#define MMA_INSTRUCTIONS
#define LOCAL_ADDRESS(p) emulator::shared_address(p)
#define WAIT_GROUP(n) emulator::copy_wait(n)
#define HIDE_INT(x)
#define HIDE_LONG(x)
enum { LDMATRIX = 1, LDMATRIX_TRANS, MMA };

FN void copy_16(uint to, const ST *from, int bytes)
{
  emulator::copy_begin(to, from, bytes);
}
FN void end_group()
{
  emulator::copy_commit();
}
FN void wait_all()
{
  emulator::copy_commit();
  emulator::copy_wait(0);
}
FN void load_if(int *v, const int *from, int there)
{
  if (there) *v = *from;
}
FN int divided(int entry, uint mul, int shift)
{
  return (int)((ulong)(uint)entry * mul >> shift);
}
FN const ST *row_at(const ST *x, int row, int bytes)
{
  return (const ST *)((const uchar *)x + (long)row * bytes);
}
FN void put_16(uint to, const uint *w)
{
  memcpy(emulator::shared_at(emulator::now->block, to, 16, 16), w, 16);
}

void ldmatrix(uint *r, uint from, int trans)
{
  emulator::now->given.words[0] = from;
  emulator::now->given.to = r;
  emulator::of_warp("ldmatrix", trans ? LDMATRIX_TRANS : LDMATRIX, [=](emulator::thread *warp) {
    ushort m[4][8][8];
    for (int l = 0; l < 32; l++)
      memcpy(m[l / 8][l % 8], emulator::shared_at(warp->block, warp[l].given.words[0], 16, 16), 16);
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) {
        const int g = l / 4, t = l % 4 * 2;
        ((uint *)warp[l].given.to)[i] =
            trans ? m[i][t][g] | (uint)m[i][t + 1][g] << 16 : m[i][g][t] | (uint)m[i][g][t + 1] << 16;
      }
  });
}

void mma(float *c, const uint *a, uint b0, uint b1)
{
  emulator::operand *given = &emulator::now->given;
  for (int i = 0; i < 4; i++) given->words[i] = a[i];
  given->words[4] = b0, given->words[5] = b1;
  given->to = c;
  emulator::of_warp("mma", MMA, [](emulator::thread *warp) {
    float left[16][16], right[16][8], sum[16][8] = {};
    for (int l = 0; l < 32; l++) {
      const int g = l / 4, t = l % 4 * 2;
      for (int h = 0; h < 2; h++) {
        const uint *w = warp[l].given.words;
        for (int i = 0; i < 4; i++) left[g + i % 2 * 8][t + h + i / 2 * 8] = half_in(w[i] >> 16 * h & 0xffffu, DT_ST);
        for (int i = 0; i < 2; i++) right[t + h + i * 8][g] = half_in(w[4 + i] >> 16 * h & 0xffffu, DT_ST);
      }
    }
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 16; k++)
        for (int j = 0; j < 8; j++) sum[i][j] += left[i][k] * right[k][j];
    for (int l = 0; l < 32; l++)
      for (int q = 0; q < 4; q++) ((float *)warp[l].given.to)[q] += sum[l / 4 + q / 2 * 8][l % 4 * 2 + q % 2];
  });
}

#include "core/kernels/ggemm_mma.cl"

/* ---- launches ------------------------------------------------------------------------------------------------------ */
/* A kernel's arguments are words of 64 bits, a tensor's two. */
template <size_t... i, class... A> void call(void (*kernel)(A...), const uint64_t *words, std::index_sequence<i...>)
{
  kernel((A)words[i]...);
}
template <class... A> void start(void (*kernel)(A...), const struct emulator_launch *l)
{
  static void (*const of)(const void *, const void *) = [](const void *function, const void *words) {
    call((void (*)(A...))function, (const uint64_t *)words, std::index_sequence_for<A...>());
  };
  if (l->n != (int)sizeof...(A)) emulator::die("%s takes %d words, got %d", l->name, (int)sizeof...(A), l->n);
  emulator::run({ l->name, l->groups, l->local, LOCAL_BYTES, 1, 1, of, (const void *)kernel, l->words });
}

} // namespace

#ifdef MOE_ST_BF16
int emulator_start_bf16(const struct emulator_launch *l)
#else
int emulator_start_f16(const struct emulator_launch *l)
#endif
{
#define NAMED(kernel)                                                                                                  \
  if (!strcmp(l->name, #kernel)) {                                                                                     \
    start(kernel, l);                                                                                                  \
    return 1;                                                                                                          \
  }
  NAMED(rows_nt)
  NAMED(rows_nn)
  NAMED(rows_nt_any)
  NAMED(rows_nn_any)
  NAMED(wgrad)
  NAMED(wgrad_any)
  return 0;
}
