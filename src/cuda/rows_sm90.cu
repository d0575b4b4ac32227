/* rows_sm90.cu - products over the rows of ragged experts on Hopper's matrix units.

   c[r,n] = sum_k a[map(r),k] b[e(r),n,k] + bias[e(r),n], 16-bit operands, sums in FP32 in ascending k.

   One block for each multiprocessor takes every gridDim.x-th tile of 128 rows x 256 columns; a tile's rows are of one
   expert.  Which tile is which follows from offs alone, so the host never waits.  Warps 0-3 copy operands, 64 k at a
   time, into a ring of 4 stages: b by TMA, a by TMA or, gathered, by cp.async; they run ahead into the next tile while
   warps 4-7 and 8-11, 64 rows each, multiply (wgmma) and store.  The tile's place travels with its first stage.

   With SPLIT_N a tile is 128 columns of each half, so gate and up of an element are sums of one thread.
   Bytes moved: each tile reads (128 + 256) * K elements, mostly from the L2 cache: tiles that run at the same time are
   up to 8 row tiles by as many column tiles as fill the device.  Rows past the expert's end are read where a is not
   gathered, and never written; a tile of at most 64 rows costs half of the multiplications. */
#include "cuda/ggemm_sm90.h"
#include "cuda/ptx.cuh"

namespace
{

enum {
  TILE_M = 128,
  TILE_N = 256,
  STEP = 64, /* k of a stage: rows of 128 bytes */
  GROUP = 8, /* row tiles that share a column tile, one after the other */
  STAGES = 4,
  A_BYTES = TILE_M * STEP * 2,
  STAGE_BYTES = A_BYTES + TILE_N * STEP * 2,
  BLOCK_BYTES = 64 * 64 * 2, /* 64 rows of 128 bytes: what one store writes */
  C_AT = STAGES * STAGE_BYTES,
  FULL_AT = C_AT + 4 * BLOCK_BYTES,
  EMPTY_AT = FULL_AT + 8 * STAGES,
  PLACE_AT = EMPTY_AT + 8 * STAGES,
  SHARED = PLACE_AT + 16 * STAGES,
  THREADS = 384,
  SPLIT_N = 1, /* enum moe__split */
  SPLIT_K = 2
};

/* Position in the ring of stages. */
struct ring {
  int stage, parity;
  __device__ __forceinline__ void next()
  {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

/* Where a tile lies: its expert, first row, rows (1 to 128), column tile.  Expert -1: there are no more. */
struct place {
  int e, row, rows, column;
};
/* Lane 0 reads it, the one that gives the stage back: its read is over before its arrival is seen. */
PTX place read_place(const unsigned char *from, int lane)
{
  int4 words = { 0, 0, 0, 0 };
  if (lane == 0) words = *(const int4 *)from;
  return { __shfl_sync(~0u, words.x, 0), __shfl_sync(~0u, words.y, 0), __shfl_sync(~0u, words.z, 0),
           __shfl_sync(~0u, words.w, 0) };
}

/* All tiles in order of their experts.  The lanes of a warp share the experts out, `per` to each. */
struct schedule {
  const int32_t *offs;
  int E, columns, per, before; /* before: row tiles of the experts of lower lanes */
  int total;                   /* tiles */

  __device__ __forceinline__ int row_tiles(int e) const
  {
    return (__ldg(offs + e + 1) - __ldg(offs + e) + TILE_M - 1) / TILE_M;
  }
  static __device__ __forceinline__ int scan(int v, int lane)
  {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int below = __shfl_up_sync(~0u, v, d);
      if (lane >= d) v += below;
    }
    return v;
  }
  __device__ __forceinline__ schedule(const moe__sm90_rows &p, int lane)
      : offs(p.offs), E(p.E),
        columns((p.N + (p.split == SPLIT_N ? TILE_N / 2 : TILE_N) - 1) / (p.split == SPLIT_N ? TILE_N / 2 : TILE_N)),
        per((p.E + 31) / 32)
  {
    int own = 0;
    for (int e = lane * per; e < min(E, (lane + 1) * per); e++) own += row_tiles(e);
    const int sum = scan(own, lane);
    before = sum - own;
    total = __shfl_sync(~0u, sum, 31) * columns;
  }
  /* Of a tile below total; called by whole warps. */
  __device__ __forceinline__ place at(int tile, int lane) const
  {
    const int holder = __popc(__ballot_sync(~0u, before * columns <= tile)) - 1;
    const int e = holder * per + lane, here = lane < per && e < E;
    const int own = here ? row_tiles(e) : 0;
    const int start = __shfl_sync(~0u, before, holder) + scan(own, lane) - own;
    const int found = __popc(__ballot_sync(~0u, here && start * columns <= tile)) - 1;
    const int tiles = __shfl_sync(~0u, own, found);
    const int within = tile - __shfl_sync(~0u, start, found) * columns;
    const int group = within / (GROUP * columns), rest = within % (GROUP * columns);
    const int size = min(GROUP, tiles - group * GROUP);
    place t;
    t.e = holder * per + found;
    t.row = __ldg(offs + t.e) + (group * GROUP + rest % size) * TILE_M;
    t.rows = min(TILE_M, __ldg(offs + t.e + 1) - t.row);
    t.column = rest / size;
    return t;
  }
};

/* Announces nothing and begins the copies of b[e, n.., k..k+63] of `half`. */
template <bool n_first>
PTX void load_b(const moe__sm90_rows &p, uint32_t to, uint32_t full, const place &t, int half, int k)
{
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const CUtensorMap *map = &p.b[p.split == SPLIT_N ? j : half];
    const int n = p.split == SPLIT_N ? t.column * (TILE_N / 2) : t.column * TILE_N + j * (TILE_N / 2);
    if (n_first) {
      tma_load_3d(to + 2 * j * BLOCK_BYTES, map, full, n, k, t.e);
      tma_load_3d(to + (2 * j + 1) * BLOCK_BYTES, map, full, n + 64, k, t.e);
    } else tma_load_3d(to + 2 * j * BLOCK_BYTES, map, full, k, n, t.e);
  }
}

/* Warp 0 alone, or the first four warps where a is gathered. */
template <bool gathered, bool n_first> PTX void copy_operands(const moe__sm90_rows &p, unsigned char *shared)
{
  const int thread = threadIdx.x, lane = thread % 32, unit = thread % 8;
  const uint32_t base = shared_address(shared);
  const int halves = p.split == SPLIT_K ? 2 : 1, steps = (p.K + STEP - 1) / STEP;
  const schedule tiles(p, lane);
  const unsigned char *from[8]; /* rows thread/8 + 16*i of the tile */
  ring r = { 0, 1 };
  for (int tile = blockIdx.x;; tile += gridDim.x) {
    place t = { -1, 0, 0, 0 };
    if (tile < tiles.total) t = tiles.at(tile, lane);
    if (gathered && t.e >= 0)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int row = thread / 8 + 16 * i;
        from[i] = NULL;
        if (row < t.rows)
          from[i] = p.x + ((uint64_t)__ldg(p.map + t.row + row) * p.div_mul >> p.div_shift) * p.x_stride + unit * 16;
      }
    for (int s = 0; s < (t.e < 0 ? 1 : halves * steps); s++) {
      const uint32_t full = base + FULL_AT + 8 * r.stage, to = base + r.stage * STAGE_BYTES;
      const int half = s >= steps, k = (s - half * steps) * STEP;
      if (gathered || lane == 0) barrier_wait(base + EMPTY_AT + 8 * r.stage, r.parity);
      if (thread == 0) {
        if (s == 0) *(place *)(shared + PLACE_AT + 16 * r.stage) = t;
        if (t.e < 0) barrier_arrive(full);
        else {
          barrier_arrive_expect(full, gathered ? STAGE_BYTES - A_BYTES : STAGE_BYTES);
          load_b<n_first>(p, to + A_BYTES, full, t, half, k);
          if (!gathered) tma_load_2d(to, &p.a[half], full, k, t.row);
        }
      }
      if (gathered) {
        if (t.e >= 0) {
          const bool there = k + unit * 8 < p.K;
          const int64_t at = ((int64_t)half * p.K + k) * 2;
#pragma unroll
          for (int i = 0; i < 8; i++)
            copy_16(to + (thread / 8 + 16 * i) * 128 + ((unit ^ (thread / 8 & 7)) << 4),
                    from[i] && there ? from[i] + at : p.x, from[i] && there);
        }
        barrier_arrive_copies(full);
      }
      r.next();
    }
    if (t.e < 0) return;
  }
}

/* Rows 64*group.. of a tile from the sums of its warpgroup, 64 columns at a time through the two blocks that it has
   at `blocks`, `turn` and then the other. */
template <bool half>
PTX void store_tile(const moe__sm90_rows &p, float (&d)[128], const place &t, uint32_t blocks, int group, int &turn)
{
  const int thread = threadIdx.x % 128, lane = thread % 32, rows = t.rows - 64 * group;
  const int row = t.row + 64 * group;
#pragma unroll
  for (int pass = 0; pass < 4; pass++) {
    const int part = p.split == SPLIT_N ? pass / 2 : 0;
    const int n = p.split == SPLIT_N ? t.column * (TILE_N / 2) + pass % 2 * 64 : t.column * TILE_N + pass * 64;
    const uint32_t block = blocks + turn * BLOCK_BYTES;
    if (n >= p.N) continue;
    turn ^= 1;
    if (thread == 0) tma_store_wait_read<1>(); /* the store before last, of this block, has read it */
    named_barrier(1 + group, 128);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float *v = d + 32 * pass + 4 * (j + i);
        const int column = n + 8 * (j + i) + 2 * (lane % 4);
        float2 b = make_float2(0, 0);
        if (p.bias[part] && column < p.N)
          b = unpack<half>(__ldg((const uint32_t *)(p.bias[part] + t.e * p.bias_stride[part] + column * 2)));
        m[2 * i] = pack<half>(v[0] + b.x, v[1] + b.y);
        m[2 * i + 1] = pack<half>(v[2] + b.x, v[3] + b.y);
      }
      const int at = thread / 32 * 16 + lane % 16;
      store_matrices(block + at * 128 + (((j + lane / 16) ^ (at & 7)) << 4), m[0], m[1], m[2], m[3]);
    }
    fence_async();
    named_barrier(1 + group, 128);
    if (thread == 0) {
      if (rows >= 64) tma_store_2d(&p.c[part], block, n, row);
      tma_store_commit();
    }
    if (rows < 64) {
      const int unit = thread % 8;
      for (int at = thread / 8; at < rows; at += 16)
        if (n + 8 * unit < p.N)
          *(uint4 *)(p.y + (row + at) * p.y_stride + ((int64_t)part * p.N + n + 8 * unit) * 2) =
              load_shared_16(block + at * 128 + ((unit ^ (at & 7)) << 4));
    }
  }
}

/* A warpgroup: rows 64*group.. of each tile. */
template <bool half, bool gathered, bool n_first>
PTX void multiply(const moe__sm90_rows &p, unsigned char *shared, int group)
{
  const uint32_t base = shared_address(shared), blocks = base + C_AT + 2 * group * BLOCK_BYTES;
  const int lane = threadIdx.x % 32, steps = (p.split == SPLIT_K ? 2 : 1) * ((p.K + STEP - 1) / STEP);
  float d[128];
  ring r = { 0, 0 };
  int turn = 0;
#pragma unroll
  for (int i = 0; i < 128; i++) d[i] = 0;
  for (;;) {
    barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
    const place t = read_place(shared + PLACE_AT + 16 * r.stage, lane);
    if (t.e < 0) break;
    if (t.rows > 64 * group) {
      int last = 0;
      for (int s = 0; s < steps; s++) {
        barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
        if (gathered) fence_async();
        const uint32_t at = base + r.stage * STAGE_BYTES;
        const uint64_t a = matrix_descriptor(at + group * BLOCK_BYTES, 16);
        const uint64_t b = matrix_descriptor(at + A_BYTES, n_first ? BLOCK_BYTES : 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP / 16; k++)
          wgmma_256<half, 0, n_first>(d, a + k * (32 >> 4), b + k * ((n_first ? 2048 : 32) >> 4), s + k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (s > 0 && lane == 0) barrier_arrive(base + EMPTY_AT + 8 * last);
        last = r.stage;
        r.next();
      }
      wgmma_wait<0>();
      wgmma_hold(d);
      if (lane == 0) barrier_arrive(base + EMPTY_AT + 8 * last);
      store_tile<half>(p, d, t, blocks, group, turn);
    } else
      for (int s = 0; s < steps; s++) {
        barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
        __syncwarp(); /* every lane has seen the phase, which then may pass */
        if (lane == 0) barrier_arrive(base + EMPTY_AT + 8 * r.stage);
        r.next();
      }
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
}

template <bool half, bool gathered, bool n_first>
__global__ void __launch_bounds__(THREADS, 1) rows(const __grid_constant__ moe__sm90_rows p)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(base + FULL_AT + 8 * s, gathered ? 1 + 128 : 1);
      barrier_init(base + EMPTY_AT + 8 * s, 8); /* warps that multiply */
    }
    barrier_init_fence();
    for (int i = 0; i < 2; i++) {
      prefetch_map(&p.a[i]);
      prefetch_map(&p.b[i]);
      prefetch_map(&p.c[i]);
    }
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<gathered ? 56 : 40>();
    if (gathered || threadIdx.x < 32) copy_operands<gathered, n_first>(p, shared);
  } else {
    registers_up<gathered ? 224 : 232>();
    multiply<half, gathered, n_first>(p, shared, threadIdx.x / 128 - 1);
  }
}

} // namespace

#define KERNEL(half, gathered, n_first)                                                                                \
  {                                                                                                                    \
    (const void *)rows<half, gathered, n_first>, THREADS, SHARED                                                       \
  }
#define KERNELS(half)                                                                                                  \
  {                                                                                                                    \
    { KERNEL(half, false, false), KERNEL(half, false, true) },                                                         \
    {                                                                                                                  \
      KERNEL(half, true, false), KERNEL(half, true, true)                                                              \
    }                                                                                                                  \
  }
extern "C" const struct moe__sm90_kernel moe__sm90_rows_kernels[2][2][2] = { KERNELS(false), KERNELS(true) };
