/* ptx.cuh - src/cuda/ptx.cuh and what of CUDA's own language its users need, on the emulator.  What each does is said
   there. */
#ifndef MOE_CUDA_PTX_CUH
#define MOE_CUDA_PTX_CUH

#include "emulator.h"
#include "launch.h"

#include <cuda.h>
#include <math.h>
#include <string.h>

/* ---- CUDA ---------------------------------------------------------------------------------------------------------- */
#define __device__
#define __global__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct emulated_index {
  unsigned x;
};
#define threadIdx (emulated_index{ (unsigned)emulator::now->number })
#define blockIdx (emulated_index{ (unsigned)emulator::now->block->number })
#define blockDim (emulated_index{ (unsigned)emulator::running->threads })
#define gridDim (emulated_index{ (unsigned)emulator::running->blocks })

#define PTX static inline
#define DYNAMIC_SHARED(name) unsigned char *const name = emulator::now->block->shared

PTX float2 make_float2(float x, float y)
{
  return { x, y };
}
PTX uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
  return { x, y, z, w };
}
PTX int min(int a, int b)
{
  return a < b ? a : b;
}
PTX int max(int a, int b)
{
  return a > b ? a : b;
}
PTX int __popc(unsigned v)
{
  return __builtin_popcount(v);
}
PTX float __uint_as_float(uint32_t v)
{
  return emulator::from_bits(v);
}
template <class T> PTX T __ldg(const T *p)
{
  return *p;
}
PTX unsigned atomicInc(unsigned *p, unsigned most)
{
  emulator::maybe_yield();
  const unsigned old = *p;
  *p = old >= most ? 0 : old + 1;
  return old;
}

enum emulated_instruction {
  SHFL = 1,
  BALLOT,
  SYNC_WARP,
  STMATRIX,
  STMATRIX_TRANS,
  WGMMA_FENCE,
  WGMMA_COMMIT,
  WGMMA_WAIT
};

PTX uint32_t from_lane(uint32_t v, int lane)
{
  uint32_t r;
  emulator::operand *given = &emulator::now->given;
  given->words[0] = v, given->words[1] = (uint32_t)lane;
  given->to = &r;
  emulator::of_warp("shfl", SHFL, [](emulator::thread *warp) {
    for (int l = 0; l < 32; l++) *(uint32_t *)warp[l].given.to = warp[warp[l].given.words[1] % 32].given.words[0];
  });
  return r;
}
PTX int __shfl_sync(unsigned, int v, int lane)
{
  return (int)from_lane((uint32_t)v, lane);
}
PTX float __shfl_sync(unsigned, float v, int lane)
{
  return emulator::from_bits(from_lane(emulator::to_bits(v), lane));
}
PTX int __shfl_up_sync(unsigned, int v, int by)
{
  const int lane = emulator::now->number % 32;
  return (int)from_lane((uint32_t)v, lane < by ? lane : lane - by);
}
PTX float __shfl_xor_sync(unsigned all, float v, int lanes)
{
  return __shfl_sync(all, v, emulator::now->number % 32 ^ lanes);
}
PTX unsigned __ballot_sync(unsigned, bool v)
{
  uint32_t r;
  emulator::now->given.words[0] = v;
  emulator::now->given.to = &r;
  emulator::of_warp("ballot", BALLOT, [](emulator::thread *warp) {
    uint32_t bits = 0;
    for (int l = 0; l < 32; l++) bits |= warp[l].given.words[0] << l;
    for (int l = 0; l < 32; l++) *(uint32_t *)warp[l].given.to = bits;
  });
  return r;
}
PTX void __syncwarp()
{
  emulator::of_warp("barrier of the warp", SYNC_WARP, [](emulator::thread *) {});
}
PTX void __syncthreads()
{
  emulator::block_barrier();
}

PTX uint32_t shared_address(const void *p)
{
  return emulator::shared_address(p);
}

/* ---- mbarriers ----------------------------------------------------------------------------------------------------- */
PTX void barrier_init(uint32_t bar, int arrivals)
{
  emulator::now->block->mbarriers[bar] = { arrivals, arrivals, 0, 0 };
}
PTX void barrier_init_fence()
{
}
PTX void barrier_arrive(uint32_t bar)
{
  emulator::maybe_yield();
  emulator::barrier_arrive(emulator::now->block, bar, 1, 0);
}
PTX void barrier_expect(uint32_t bar, int bytes)
{
  emulator::maybe_yield();
  emulator::barrier_at(emulator::now->block, bar)->bytes += bytes;
}
PTX void barrier_arrive_expect(uint32_t bar, int bytes)
{
  barrier_expect(bar, bytes);
  emulator::barrier_arrive(emulator::now->block, bar, 1, 0);
}
PTX void barrier_arrive_copies(uint32_t bar)
{
  emulator::copy_arrive(bar);
}
PTX void barrier_wait(uint32_t bar, int parity)
{
  emulator::maybe_yield();
  emulator::wait(
      "mbarrier", [](const emulator::thread &t) { return (((const emulator::mbarrier *)t.on)->phase & 1) != t.value; },
      emulator::barrier_at(emulator::now->block, bar), (unsigned long)parity);
}
PTX void barrier_arrive_at(uint32_t bar, uint32_t block)
{
  emulator::maybe_yield();
  emulator::thread *t = emulator::now;
  emulator::block *b = t->block->cluster[block];
  if (b == t->block) emulator::barrier_arrive(b, bar, 1, 0);
  else {
    t->arrivals++;
    emulator::later([=] {
      emulator::barrier_arrive(b, bar, 1, 0);
      t->arrivals--;
    });
  }
}
/* It releases: what a thread has arrived at before is over. */
PTX void cluster_barrier()
{
  emulator::block *b = emulator::now->block;
  emulator::wait(
      "arrival at the other block", [](const emulator::thread &t) { return t.arrivals == 0; }, NULL, 0);
  emulator::meet("barrier of the cluster", &b->cluster[0]->whole_cluster, b->threads * emulator::running->cluster);
}
PTX uint32_t block_of_cluster()
{
  return (uint32_t)emulator::now->block->rank;
}
PTX void store_at(uint32_t to, uint32_t bar, uint32_t block, int v)
{
  emulator::maybe_yield();
  emulator::block *b = emulator::now->block->cluster[block];
  emulator::later([=] {
    memcpy(emulator::shared_at(b, to, 4, 4), &v, 4);
    emulator::barrier_arrive(b, bar, 0, 4);
  });
}
PTX void named_barrier(int id, int threads)
{
  emulator::meet("named barrier", &emulator::now->block->named[id], threads);
}

/* ---- copies -------------------------------------------------------------------------------------------------------- */
enum { ROW_BYTES = 128 }; /* of a box */

/* Byte `at` of a matrix of rows of 128 bytes, swizzled. */
PTX unsigned char *swizzled(emulator::block *b, uint32_t at, int bytes)
{
  return emulator::shared_at(b, at ^ (at >> 3 & 0x70), bytes, bytes);
}
/* Calls element(place in shared memory, address in the tensor or NULL) for each of a box. */
template <class F>
PTX void for_box(const CUtensorMap *map, emulator::block *b, uint32_t shared, const int (&at)[3], F element)
{
  emulator_tensor_map m;
  memcpy(&m, map, sizeof m);
  for (uint32_t z = 0; z < m.box[2]; z++)
    for (uint32_t y = 0; y < m.box[1]; y++)
      for (uint32_t x = 0; x < m.box[0]; x++, shared += m.bytes) {
        const int64_t i = at[0] + (int64_t)x, j = at[1] + (int64_t)y, k = at[2] + (int64_t)z;
        const bool there =
            i >= 0 && j >= 0 && k >= 0 && (uint64_t)i < m.size[0] && (uint64_t)j < m.size[1] && (uint64_t)k < m.size[2];
        element(swizzled(b, shared, (int)m.bytes),
                there ? m.base + (uint64_t)i * m.stride[0] + (uint64_t)j * m.stride[1] + (uint64_t)k * m.stride[2]
                      : NULL,
                m.bytes);
      }
}
PTX int box_bytes(const CUtensorMap *map, uint32_t rank)
{
  emulator_tensor_map m;
  memcpy(&m, map, sizeof m);
  if (m.rank != rank) emulator::die("a tensor of %u dimensions for a copy of %u", m.rank, rank);
  return (int)(m.box[0] * m.box[1] * m.box[2] * m.bytes);
}
PTX void load_box_to(emulator::block *b, uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y, int z,
                     uint32_t rank)
{
  const int bytes = box_bytes(map, rank);
  memset(emulator::shared_at(b, to, bytes, 1024), 0xff, (size_t)bytes);
  emulator::later([=] {
    for_box(map, b, to, { x, y, z }, [](unsigned char *shared, const unsigned char *from, uint32_t n) {
      if (from) memcpy(shared, from, n);
      else memset(shared, 0, n);
    });
    emulator::barrier_arrive(b, bar, 0, bytes);
  });
}
PTX void prefetch_map(const CUtensorMap *)
{
}
PTX void tma_load_2d(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y)
{
  emulator::maybe_yield();
  load_box_to(emulator::now->block, to, map, bar, x, y, 0, 2);
}
PTX void tma_load_3d(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y, int z)
{
  emulator::maybe_yield();
  load_box_to(emulator::now->block, to, map, bar, x, y, z, 3);
}
PTX void tma_load_3d_both(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y, int z)
{
  emulator::maybe_yield();
  for (int i = 0; i < 2; i++) load_box_to(emulator::now->block->cluster[i], to, map, bar, x, y, z, 3);
}
template <class F>
PTX void store_box(const CUtensorMap *map, uint32_t from, int x, int y, int z, uint32_t rank, F element)
{
  emulator::thread *t = emulator::now;
  emulator::block *b = t->block;
  emulator::shared_at(b, from, box_bytes(map, rank), 1024);
  if (!t->store) t->store = std::make_shared<int>(0);
  const std::shared_ptr<int> unread = t->store;
  ++*unread;
  emulator::later([=] {
    for_box(map, b, from, { x, y, z }, element);
    --*unread;
  });
}
PTX void store_element(const unsigned char *shared, unsigned char *to, uint32_t n)
{
  if (to) memcpy(to, shared, n);
}
PTX void add_element(const unsigned char *shared, unsigned char *to, uint32_t n)
{
  if (n != 4) emulator::die("an addition of %u bytes", n);
  if (to) *(float *)to += *(const float *)shared;
}
PTX void tma_store_2d(const CUtensorMap *map, uint32_t from, int x, int y)
{
  store_box(map, from, x, y, 0, 2, store_element);
}
PTX void tma_store_3d(const CUtensorMap *map, uint32_t from, int x, int y, int z)
{
  store_box(map, from, x, y, z, 3, store_element);
}
PTX void tma_add_3d(const CUtensorMap *map, uint32_t from, int x, int y, int z)
{
  store_box(map, from, x, y, z, 3, add_element);
}
PTX void tma_store_commit()
{
  emulator::thread *t = emulator::now;
  t->stores.push_back(t->store ? t->store : std::make_shared<int>(0));
  t->store.reset();
}
template <int left> PTX void tma_store_wait_read()
{
  emulator::wait(
      "store to read its shared memory",
      [](const emulator::thread &t) {
        for (size_t i = 0; i + left < t.stores.size(); i++)
          if (*t.stores[i]) return false;
        return true;
      },
      NULL, left);
  while (emulator::now->stores.size() > left) emulator::now->stores.pop_front();
}
PTX void copy_16(uint32_t to, const void *from, bool there)
{
  emulator::copy_begin(to, from, there ? 16 : 0);
}
PTX void fence_async()
{
}
template <int registers> PTX void registers_up()
{
}
template <int registers> PTX void registers_down()
{
}

/* ---- wgmma ----------------------------------------------------------------------------------------------------------- */
PTX uint64_t matrix_descriptor(uint32_t address, uint32_t leading)
{
  return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}
/* A warp's 16 rows of a product, as its lanes issued it. */
PTX void multiply_now(emulator::thread *warp, int group, int i)
{
  static float left[16][16], right[16][256], sum[16][256];
  const emulator::product &p = warp[0].product_groups[(size_t)group][(size_t)i];
  emulator::block *b = warp->block;
  const int first = warp->number / 32 % 4 * 16;
  const uint32_t a = (uint32_t)(p.a & 0x3fff) << 4, at_b = (uint32_t)(p.b & 0x3fff) << 4;
  const uint32_t leading = (uint32_t)(p.b >> 16 & 0x3fff) << 4;
  const auto value = [&](uint32_t at) {
    const uint16_t v = *(const uint16_t *)swizzled(b, at, 2);
    return p.half ? emulator::from_half(v) : emulator::from_bf16(v);
  };
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < 16; k++)
      left[m][k] =
          value(a + (uint32_t)(p.a_m_first ? k * ROW_BYTES + (first + m) * 2 : (first + m) * ROW_BYTES + k * 2));
  for (int k = 0; k < 16; k++)
    for (int n = 0; n < 256; n++)
      right[k][n] = value(at_b + (p.b_n_first ? (uint32_t)n / 64 * leading + (uint32_t)(k * ROW_BYTES + n % 64 * 2)
                                              : (uint32_t)(n * ROW_BYTES + k * 2)));
  memset(sum, 0, sizeof sum);
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 256; n++) sum[m][n] += left[m][k] * right[k][n];
  for (int l = 0; l < 32; l++) {
    float *d = warp[l].product_groups[(size_t)group][(size_t)i].d;
    for (int q = 0; q < 128; q++) d[q] = (p.add ? d[q] : 0) + sum[l / 4 + q / 2 % 2 * 8][q / 4 * 8 + l % 4 * 2 + q % 2];
  }
}
/* All committed products but those of the last `left` groups. */
PTX void multiply_all(emulator::thread *warp, size_t left)
{
  for (size_t group = 0; group + left < warp->product_groups.size(); group++) {
    const size_t n = warp->product_groups[group].size();
    for (size_t i = 0; i < n; i++) multiply_now(warp, (int)group, (int)i);
    for (int l = 0; l < 32; l++) warp[l].product_groups[group].clear();
  }
}
PTX void wgmma_fence()
{
  emulator::of_warp("wgmma.fence", WGMMA_FENCE, [](emulator::thread *) {});
}
PTX void wgmma_commit()
{
  emulator::thread *t = emulator::now;
  t->product_groups.push_back(std::move(t->products));
  t->products.clear();
  emulator::of_warp("wgmma.commit_group", WGMMA_COMMIT, [](emulator::thread *warp) {
    if (emulator::by_chance(128)) multiply_all(warp, 0);
  });
}
template <int left> PTX void wgmma_wait()
{
  emulator::maybe_yield();
  emulator::of_warp("wgmma.wait_group", WGMMA_WAIT, [](emulator::thread *warp) {
    multiply_all(warp, left);
    for (int l = 0; l < 32; l++)
      while (warp[l].product_groups.size() > left) warp[l].product_groups.pop_front();
  });
}
template <int n> PTX void wgmma_hold(float (&)[n])
{
}
template <bool half, int a_m_first, int b_n_first> PTX void wgmma_256(float (&d)[128], uint64_t a, uint64_t b, bool add)
{
  emulator::now->products.push_back({ a, b, add, half, a_m_first != 0, b_n_first != 0, d });
}

/* ---- results --------------------------------------------------------------------------------------------------------- */
template <bool half> PTX uint32_t pack(float low, float high)
{
  return half ? emulator::to_half(low) | (uint32_t)emulator::to_half(high) << 16
              : emulator::to_bf16(low) | (uint32_t)emulator::to_bf16(high) << 16;
}
template <bool half> PTX float2 unpack(uint32_t v)
{
  return half ? make_float2(emulator::from_half((uint16_t)v), emulator::from_half((uint16_t)(v >> 16)))
              : make_float2(emulator::from_bf16((uint16_t)v), emulator::from_bf16((uint16_t)(v >> 16)));
}
PTX void give_matrices(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3)
{
  uint32_t *words = emulator::now->given.words;
  words[0] = m0, words[1] = m1, words[2] = m2, words[3] = m3, words[4] = row;
}
PTX void store_matrices(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3)
{
  give_matrices(row, m0, m1, m2, m3);
  emulator::of_warp("stmatrix", STMATRIX, [](emulator::thread *warp) {
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++)
        memcpy(emulator::shared_at(warp->block, warp[8 * i + l / 4].given.words[4], 16, 16) + l % 4 * 4,
               &warp[l].given.words[i], 4);
  });
}
PTX void store_matrices_turned(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3)
{
  give_matrices(row, m0, m1, m2, m3);
  emulator::of_warp("stmatrix.trans", STMATRIX_TRANS, [](emulator::thread *warp) {
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++)
          memcpy(emulator::shared_at(warp->block, warp[8 * i + l % 4 * 2 + h].given.words[4], 16, 16) + l / 4 * 2,
                 (const unsigned char *)&warp[l].given.words[i] + 2 * h, 2);
  });
}
PTX uint4 load_shared_16(uint32_t at)
{
  return *(const uint4 *)emulator::shared_at(emulator::now->block, at, 16, 16);
}
PTX void store_shared_4(uint32_t at, float x)
{
  *(float *)emulator::shared_at(emulator::now->block, at, 4, 4) = x;
}
PTX void store_shared_8(uint32_t at, float x, float y)
{
  *(float2 *)emulator::shared_at(emulator::now->block, at, 8, 8) = { x, y };
}
/* ---- arithmetic ------------------------------------------------------------------------------------------------------ */
PTX float power_of_2(float x)
{
  return exp2f(x);
}
PTX float reciprocal(float x)
{
  return 1 / x;
}
PTX float smaller(float x, float y)
{
  return x != x || x < y ? x : y;
}
PTX float larger(float x, float y)
{
  return x != x || x > y ? x : y;
}

#endif
