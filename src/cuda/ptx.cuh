/* ptx.cuh - the Hopper instructions of the tuned kernels, one wrapper each: mbarriers, TMA copies, wgmma, the fences
   between them, and fast arithmetic.  For sm_90a only.

   Shared memory is addressed by its 32-bit window address (shared_address).  Matrices lie in it in rows of 128
   bytes, 16-byte unit u of row r at place u ^ (r & 7): the 128-byte swizzle of TMA and wgmma, whose pattern wants
   blocks of 8 rows to begin at multiples of 1024. */
#ifndef MOE_CUDA_PTX_CUH
#define MOE_CUDA_PTX_CUH

#include <cuda.h>
#include <stdint.h>

#define PTX static __device__ __forceinline__
/* The block's dynamic shared memory (a macro, since tests/emulator has another kind). */
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

PTX uint32_t shared_address(const void *p)
{
  return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- mbarriers: a phase ends when its arrivals and its announced bytes are there ------------------------------ */

PTX void barrier_init(uint32_t bar, int arrivals)
{
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
/* Makes barrier_init visible to TMA and, in a cluster, to the other block. */
PTX void barrier_init_fence()
{
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
PTX void barrier_arrive(uint32_t bar)
{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/* Arrives and announces bytes of copies that will complete on the barrier. */
PTX void barrier_arrive_expect(uint32_t bar, int bytes)
{
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* Announces bytes without arriving. */
PTX void barrier_expect(uint32_t bar, int bytes)
{
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* Arrives once this thread's cp.async copies so far are done. */
PTX void barrier_arrive_copies(uint32_t bar)
{
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
/* Waits for the end of the phase of that parity (0 first). */
PTX void barrier_wait(uint32_t bar, int parity)
{
  asm volatile("{\n\t.reg .pred p;\n"
               "again:\n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
               "@p bra done;\n\t"
               "bra again;\n"
               "done:\n\t}" ::"r"(bar),
               "r"(parity)
               : "memory");
}
/* Arrives at the barrier that lies at this address in block `block` of the cluster.  It orders no ordinary access of
   the other block: cluster scope would cost a fence of the whole device (MEMBAR.ALL.GPU) each time. */
PTX void barrier_arrive_at(uint32_t bar, uint32_t block)
{
  asm volatile("{\n\t.reg .b32 there;\n\t"
               "mapa.shared::cluster.u32 there, %0, %1;\n\t"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(bar),
               "r"(block)
               : "memory");
}
/* All threads of all blocks of the cluster. */
PTX void cluster_barrier()
{
  asm volatile("barrier.cluster.arrive;\n\tbarrier.cluster.wait;" ::: "memory");
}
PTX uint32_t block_of_cluster()
{
  uint32_t i;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(i));
  return i;
}
/* Writes v to that address in block `block` of the cluster, and counts 4 bytes on the barrier at `bar` there. */
PTX void store_at(uint32_t to, uint32_t bar, uint32_t block, int v)
{
  asm volatile("{\n\t.reg .b32 there, b;\n\t"
               "mapa.shared::cluster.u32 there, %0, %2;\n\t"
               "mapa.shared::cluster.u32 b, %1, %2;\n\t"
               "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [b];\n\t}" ::"r"(to),
               "r"(bar), "r"(block), "r"(v)
               : "memory");
}
/* Barrier `id` (1 to 15) of so many threads of the block. */
PTX void named_barrier(int id, int threads)
{
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

PTX void prefetch_map(const CUtensorMap *map)
{
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* A box of a tensor to shared memory, zeros where it lies outside; x is the coordinate of the fastest dimension. */
PTX void tma_load_2d(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y)
{
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}
PTX void tma_load_3d(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y, int z)
{
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}
/* The same to both blocks of a cluster of 2, each at this address and with this barrier. */
PTX void tma_load_3d_both(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y, int z)
{
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
               "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"((uint16_t)3)
               : "memory");
}
/* A box of shared memory to the tensor; what lies outside is not written. */
PTX void tma_store_2d(const CUtensorMap *map, uint32_t from, int x, int y)
{
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y)
               : "memory");
}
PTX void tma_store_3d(const CUtensorMap *map, uint32_t from, int x, int y, int z)
{
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
/* The tensor's elements become theirs plus the box's. */
PTX void tma_add_3d(const CUtensorMap *map, uint32_t from, int x, int y, int z)
{
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
PTX void tma_store_commit()
{
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until all but `left` of this thread's committed stores have read their shared memory. */
template <int left> PTX void tma_store_wait_read()
{
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}
/* 16 bytes to shared memory, or 16 zeros. */
PTX void copy_16(uint32_t to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
/* Shared memory written by ordinary stores or cp.async becomes visible to TMA and wgmma. */
PTX void fence_async()
{
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- registers of a warpgroup ----------------------------------------------------------------------------------- */

template <int registers> PTX void registers_up()
{
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> PTX void registers_down()
{
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

/* ---- wgmma ------------------------------------------------------------------------------------------------------- */

/* Descriptor of an operand in the 128-byte swizzle.  K contiguous: rows of 64 k, `leading` unused, 1024 bytes from 8
   rows to the next 8.  M or N contiguous: rows are k and hold 64 of M or N, 1024 bytes from 8 k to the next 8,
   `leading` bytes from 64 of M or N to the next 64. */
PTX uint64_t matrix_descriptor(uint32_t address, uint32_t leading)
{
  return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}
PTX void wgmma_fence()
{
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
PTX void wgmma_commit()
{
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int left> PTX void wgmma_wait()
{
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}
/* Keeps the compiler from moving uses of the accumulators over a wait. */
template <int n> PTX void wgmma_hold(float (&d)[n])
{
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define WG_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define WG_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WG_D16(i) WG_D4(i), WG_D4(i + 4), WG_D4(i + 8), WG_D4(i + 12)
#define WG_D64(i) WG_D16(i), WG_D16(i + 16), WG_D16(i + 32), WG_D16(i + 48)
#define WG_N256(type)                                                                                                  \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"                                                     \
               "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" WG_TEN() WG_TEN(1) WG_TEN(2)          \
                   WG_TEN(3) WG_TEN(4) WG_TEN(5) WG_TEN(6) WG_TEN(7) WG_TEN(8) WG_TEN(9) WG_TEN(10)                    \
                       WG_TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, %131, %132;\n\t}"    \
               : WG_D64(0), WG_D64(64)                                                                                 \
               : "l"(a), "l"(b), "r"((int)add), "n"(a_m_first), "n"(b_n_first))

/* d[64,256] = (add ? d : 0) + a[64,16] b[16,256].  d[4*j + 2*h + i] of a thread is row 16*warp + lane/4 + 8*h, column
   8*j + 2*(lane%4) + i.  a_m_first, b_n_first: M or N is the contiguous one. */
template <bool half, int a_m_first, int b_n_first> PTX void wgmma_256(float (&d)[128], uint64_t a, uint64_t b, bool add)
{
  if constexpr (half) WG_N256("f16");
  else WG_N256("bf16");
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

/* Two floats as a pair of the storage type, `low` first. */
template <bool half> PTX uint32_t pack(float low, float high)
{
  uint32_t v;
  if constexpr (half) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
template <bool half> PTX float2 unpack(uint32_t v)
{
  float2 f;
  if constexpr (half)
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;\n\t}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(v));
  else f = make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000));
  return f;
}
/* Four 8x8 matrices of 16-bit elements, rows of 16 bytes; lane 8*i + r holds the address of row r of matrix i. */
PTX void store_matrices(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3)
{
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1), "r"(m2),
               "r"(m3)
               : "memory");
}
/* Each of them transposed. */
PTX void store_matrices_turned(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3)
{
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}
PTX uint4 load_shared_16(uint32_t at)
{
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
PTX void store_shared_4(uint32_t at, float x)
{
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
PTX void store_shared_8(uint32_t at, float x, float y)
{
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

/* ---- arithmetic --------------------------------------------------------------------------------------------------- */

/* ex2 and rcp err by less than 4u and 2u (u = 2^-24). */
PTX float power_of_2(float x)
{
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PTX float reciprocal(float x)
{
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/* NaN where either is. */
PTX float smaller(float x, float y)
{
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
PTX float larger(float x, float y)
{
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
#endif
