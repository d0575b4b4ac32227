/* wgrad_sm90.cu - weight gradients of ragged experts on Hopper's matrix units.

   c[e,m,n] (+)= sum over rows r of e of p[pmap(r),m] q[qmap(r),n], 16-bit operands, sums in FP32 in ascending r.

   One block for each multiprocessor takes tiles of 128 m x 256 n of one expert, all its rows at 64 a stage; m and n
   are the contiguous dimensions, which wgmma reads as they lie.  Warps 0-3 copy into a ring of 4 stages: TMA where an
   operand has no map, cp.async where it has one, and for the last stage of an expert, whose missing rows are zeros in
   both operands (a zero times whatever lies there need not be 0).  They run ahead into the next tile while warps 4-7
   and 8-11, 64 m each, multiply and store through TMA, which adds where FP32 is accumulated and clips at the edges.

   Experts are taken longest first, and every other round of the blocks backwards, so that the last tiles are short and
   no block has much more than another.  Tiles that run at the same time are up to 8 tiles of m by as many of n as fill
   the device, mostly of one expert: p and q of an expert come from memory about once, and from the L2 cache
   (128 + 256) * 2 bytes a row for each tile.  Experts without rows cost a store of zeros, or nothing. */
#include "cuda/ggemm_sm90.h"
#include "cuda/ptx.cuh"

namespace
{

enum {
  TILE_M = 128,
  TILE_N = 256,
  STEP = 64, /* rows of a stage */
  GROUP = 8, /* tiles of m that share one of n, one after the other */
  STAGES = 4,
  BLOCK_BYTES = 64 * 128, /* 64 rows of 128 bytes: what one copy or store moves */
  P_BYTES = TILE_M / 64 * BLOCK_BYTES,
  Q_BYTES = TILE_N / 64 * BLOCK_BYTES,
  STAGE_BYTES = P_BYTES + Q_BYTES,
  C_AT = STAGES * STAGE_BYTES,
  FULL_AT = C_AT + 4 * BLOCK_BYTES,
  EMPTY_AT = FULL_AT + 8 * STAGES,
  PLACE_AT = EMPTY_AT + 8 * STAGES,
  ORDER_AT = PLACE_AT + 16 * STAGES,
  SHARED = ORDER_AT + 2 * MOE__SM90_EXPERTS,
  THREADS = 384
};

/* Position in the ring of stages. */
struct ring {
  int stage, parity;
  __device__ __forceinline__ void next()
  {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

/* A tile: its expert and that one's rows, its number along m (of both halves where they are split) and n.  Expert -1:
   there are no more. */
struct place {
  int e, rows, m, n;
};
/* Lane 0 reads it, the one that gives the stage back: its read is over before its arrival is seen. */
PTX place read_place(const unsigned char *from, int lane)
{
  int4 words = { 0, 0, 0, 0 };
  if (lane == 0) words = *(const int4 *)from;
  return { __shfl_sync(~0u, words.x, 0), __shfl_sync(~0u, words.y, 0), __shfl_sync(~0u, words.z, 0),
           __shfl_sync(~0u, words.w, 0) };
}

PTX int tiles_of(int n, int tile)
{
  return (n + tile - 1) / tile;
}
PTX int stages_of(int rows)
{
  return rows > STEP ? (rows + STEP - 1) / STEP : 1; /* an empty one carries the place */
}

/* The experts by falling number of rows, then ascending; by all threads, in memory of the stages. */
PTX void sort_experts(const moe__sm90_wgrad &p, unsigned char *shared)
{
  uint32_t *key = (uint32_t *)shared;
  uint16_t *order = (uint16_t *)(shared + ORDER_AT);
  int size = 1;
  while (size < p.E) size *= 2;
  for (int e = threadIdx.x; e < size; e += THREADS) {
    const int rows = e < p.E ? __ldg(p.offs + e + 1) - __ldg(p.offs + e) : -1;
    key[e] = (uint32_t)(min(rows, (1 << 21) - 1) + 1) << 10 | (MOE__SM90_EXPERTS - 1 - e);
  }
  __syncthreads();
  for (int k = 2; k <= size; k *= 2)
    for (int j = k / 2; j > 0; j /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
        const int i = 2 * pair - (pair & (j - 1)); /* the pair is i and i + j */
        const uint32_t a = key[i], b = key[i + j];
        if ((a < b) == !(i & k)) key[i] = b, key[i + j] = a;
      }
      __syncthreads();
    }
  for (int e = threadIdx.x; e < p.E; e += THREADS)
    order[e] = (uint16_t)(MOE__SM90_EXPERTS - 1 - key[e] % MOE__SM90_EXPERTS);
  fence_async(); /* TMA writes here next */
}

/* An operand as warps 0-3 see it: the columns of a tile and, in lane i of warp w, row 16*w + i % 16 of the next
   stage. */
template <int columns> /* 128 or 256 */
struct operand {
  const moe__sm90_rows_of &of;
  const unsigned char *from; /* this lane's 16 bytes of row 0 */
  int number;                /* of the row, as map has it */
  bool inside;               /* of the operand's columns */

  __device__ __forceinline__ operand(const moe__sm90_rows_of &of_) : of(of_)
  {
  }
  __device__ __forceinline__ void begin(int column, int total, int lane)
  {
    const int c = column + lane % (columns / 8) * 8;
    from = of.x + (int64_t)c * 2;
    inside = c < total;
  }
  __device__ __forceinline__ void look(int row, bool there)
  {
    number = !there ? -1 : of.map ? __ldg(of.map + row) : row;
  }
  /* Begins the copies of the rows that look() named to a stage's blocks at `to`. */
  __device__ __forceinline__ void copy(uint32_t to, int warp, int lane) const
  {
    const int wide = columns / 8, at_once = 32 / wide;
    const int mine = number < 0 ? -1 : of.map ? (int)((uint64_t)number * of.div_mul >> of.div_shift) : number;
    const uint32_t block = to + lane % wide / 8 * BLOCK_BYTES + 16 * warp * 128;
#pragma unroll
    for (int i = 0; i < 16; i += at_once) {
      const int k = i + lane / wide, row = __shfl_sync(~0u, mine, k);
      const bool there = row >= 0 && inside;
      copy_16(block + k * 128 + ((lane % 8 ^ (k & 7)) << 4), there ? from + row * of.stride : of.x, there);
    }
  }
};

PTX void copy_operands(const moe__sm90_wgrad &p, unsigned char *shared)
{
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, blocks = gridDim.x;
  const uint32_t base = shared_address(shared);
  const uint16_t *order = (const uint16_t *)(shared + ORDER_AT);
  const int m_half = tiles_of(p.M, TILE_M), n_half = tiles_of(p.N, TILE_N);
  const int m_tiles = m_half * (p.split == MOE__SM90_BY_M ? 2 : 1),
            n_tiles = n_half * (p.split == MOE__SM90_BY_N ? 2 : 1);
  operand<TILE_M> a(p.p);
  operand<TILE_N> b(p.q);
  ring r = { 0, 1 };
  for (int round = 0;; round++) {
    const int tile = round * blocks + (round % 2 ? blocks - 1 - (int)blockIdx.x : (int)blockIdx.x);
    place t = { -1, 0, 0, 0 };
    int first = 0, m = 0, n = 0;
    if (tile < p.E * m_tiles * n_tiles) {
      const int within = tile % (m_tiles * n_tiles), group = within / (GROUP * n_tiles),
                rest = within % (GROUP * n_tiles);
      const int size = min(GROUP, m_tiles - group * GROUP);
      t.e = order[tile / (m_tiles * n_tiles)];
      first = __ldg(p.offs + t.e);
      t.rows = __ldg(p.offs + t.e + 1) - first;
      t.m = group * GROUP + rest % size;
      t.n = rest / size;
      if (t.rows == 0 && p.accumulate) continue;
      m = t.m / m_half * p.M + t.m % m_half * TILE_M;
      n = t.n / n_half * p.N + t.n % n_half * TILE_N;
      a.begin(m, p.p.columns, lane);
      b.begin(n, p.q.columns, lane);
    }
    const int mine = 16 * warp + lane % 16;
    a.look(first + mine, mine < t.rows);
    b.look(first + mine, mine < t.rows);
    for (int s = 0; s < stages_of(t.rows); s++) {
      const uint32_t full = base + FULL_AT + 8 * r.stage, to = base + r.stage * STAGE_BYTES;
      const bool whole = t.rows >= (s + 1) * STEP, p_copied = p.p.map || !whole, q_copied = p.q.map || !whole;
      barrier_wait(base + EMPTY_AT + 8 * r.stage, r.parity);
      if (thread == 0) {
        if (s == 0) *(place *)(shared + PLACE_AT + 16 * r.stage) = t;
        barrier_arrive_expect(full, (p_copied ? 0 : P_BYTES) + (q_copied ? 0 : Q_BYTES));
        if (!p_copied)
          for (int i = 0; i < TILE_M / 64; i++)
            tma_load_2d(to + i * BLOCK_BYTES, &p.p.tensor, full, m + 64 * i, first + s * STEP);
        if (!q_copied)
          for (int i = 0; i < TILE_N / 64; i++)
            tma_load_2d(to + P_BYTES + i * BLOCK_BYTES, &p.q.tensor, full, n + 64 * i, first + s * STEP);
      }
      __syncwarp();
      if (s * STEP < t.rows) {
        if (p_copied) a.copy(to, warp, lane);
        if (q_copied) b.copy(to + P_BYTES, warp, lane);
      }
      barrier_arrive_copies(full);
      const int next = (s + 1) * STEP + mine;
      a.look(first + next, next < t.rows);
      b.look(first + next, next < t.rows);
      r.next();
    }
    if (t.e < 0) return;
  }
}

/* c[part][e,m,n..n+1] before this product, in 16 bits; zeros outside. */
template <bool half> PTX float2 old_pair(const moe__sm90_wgrad &p, int part, int e, int m, int n)
{
  if (m >= p.M || n >= p.N) return make_float2(0, 0);
  return unpack<half>(*(const uint32_t *)(p.y[part] + e * p.y_stride[part][0] + m * p.y_stride[part][1] + n * 2));
}

/* Rows m 64*group.. of a tile from the sums of its warpgroup, 128 bytes of them at a time through the two blocks that
   it has at `blocks`, `turn` and then the other. */
template <bool half, bool wide>
PTX void store_tile(const moe__sm90_wgrad &p, float (&d)[128], const place &t, uint32_t blocks, int group, int &turn)
{
  enum { COLUMNS = wide ? 32 : 64 };
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int m_half = tiles_of(p.M, TILE_M), n_half = tiles_of(p.N, TILE_N);
  const int part = p.split == MOE__SM90_BY_N ? t.n / n_half : t.m / m_half;
  const int m = t.m % m_half * TILE_M + 64 * group;
#pragma unroll
  for (int pass = 0; pass < TILE_N / COLUMNS; pass++) {
    const int n = t.n % n_half * TILE_N + pass * COLUMNS;
    const uint32_t block = blocks + turn * BLOCK_BYTES;
    if (n >= p.N) continue;
    turn ^= 1;
    if (thread == 0) tma_store_wait_read<1>(); /* the store before last, of this block, has read it */
    named_barrier(1 + group, 128);
    if (wide) {
      const int at = thread / 32 * 16 + lane / 4, odd = at & 1;
#pragma unroll
      for (int j = 0; j < 4; j++) { /* odd rows in another order: no two of a half warp in the same banks */
        const float *v = d + 16 * pass + 4 * j, *w = d + 16 * pass + 4 * (j ^ 2);
        const uint32_t to =
            block + at * 128 + (((2 * (odd ? j ^ 2 : j) + lane % 4 / 2) ^ (at & 7)) << 4) + lane % 2 * 8;
        store_shared_8(to, odd ? w[0] : v[0], odd ? w[1] : v[1]);
        store_shared_8(to + 8 * 128, odd ? w[2] : v[2], odd ? w[3] : v[3]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float *s = d + 32 * pass + 4 * j + 2 * i;
          float2 old = make_float2(0, 0);
          if (p.accumulate)
            old = old_pair<half>(p, part, t.e, m + thread / 32 * 16 + lane / 4 + i % 2 * 8,
                                 n + 8 * (j + i / 2) + 2 * (lane % 4));
          v[i] = pack<half>(s[0] + old.x, s[1] + old.y);
        }
        const int at = thread / 32 * 16 + lane % 16;
        store_matrices(block + at * 128 + (((j + lane / 16) ^ (at & 7)) << 4), v[0], v[1], v[2], v[3]);
      }
    }
    fence_async();
    named_barrier(1 + group, 128);
    if (thread == 0) {
      if (wide && p.accumulate) tma_add_3d(&p.c[part], block, n, m, t.e);
      else tma_store_3d(&p.c[part], block, n, m, t.e);
      tma_store_commit();
    }
  }
}

/* A warpgroup: m 64*group.. of each tile. */
template <bool half, bool wide> PTX void multiply(const moe__sm90_wgrad &p, unsigned char *shared, int group)
{
  const uint32_t base = shared_address(shared), blocks = base + C_AT + 2 * group * BLOCK_BYTES;
  const int lane = threadIdx.x % 32, m_half = tiles_of(p.M, TILE_M);
  float d[128];
  ring r = { 0, 0 };
  int turn = 0;
  for (;;) {
    barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
    const place t = read_place(shared + PLACE_AT + 16 * r.stage, lane);
    const int steps = stages_of(t.rows);
    if (t.e < 0) break;
    if (t.m % m_half * TILE_M + 64 * group < p.M) {
      int last = 0;
#pragma unroll
      for (int i = 0; i < 128; i++) d[i] = 0;
      for (int s = 0; s < steps; s++) {
        barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
        fence_async();
        const uint32_t at = base + r.stage * STAGE_BYTES;
        const uint64_t a = matrix_descriptor(at + group * BLOCK_BYTES, BLOCK_BYTES);
        const uint64_t b = matrix_descriptor(at + P_BYTES, BLOCK_BYTES);
        if (t.rows >= (s + 1) * STEP) {
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < STEP / 16; k++)
            wgmma_256<half, 1, 1>(d, a + k * (16 * 128 >> 4), b + k * (16 * 128 >> 4), true);
          wgmma_commit();
        } else
#pragma unroll 1
          for (int k = 0; s * STEP + k * 16 < t.rows; k++) {
            wgmma_fence();
            wgmma_256<half, 1, 1>(d, a + k * (16 * 128 >> 4), b + k * (16 * 128 >> 4), true);
            wgmma_commit();
          }
        wgmma_wait<1>();
        if (s > 0 && lane == 0) barrier_arrive(base + EMPTY_AT + 8 * last);
        last = r.stage;
        r.next();
      }
      wgmma_wait<0>();
      wgmma_hold(d);
      if (lane == 0) barrier_arrive(base + EMPTY_AT + 8 * last);
      store_tile<half, wide>(p, d, t, blocks, group, turn);
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

template <bool half, bool wide>
__global__ void __launch_bounds__(THREADS, 1) wgrad(const __grid_constant__ moe__sm90_wgrad p)
{
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(base + FULL_AT + 8 * s, 1 + 128);
      barrier_init(base + EMPTY_AT + 8 * s, 8); /* warps that multiply */
    }
    barrier_init_fence();
  }
  sort_experts(p, shared);
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<56>();
    copy_operands(p, shared);
  } else {
    registers_up<224>();
    multiply<half, wide>(p, shared, threadIdx.x / 128 - 1);
  }
}

} // namespace

#define KERNEL(half, wide)                                                                                             \
  {                                                                                                                    \
    (const void *)wgrad<half, wide>, THREADS, SHARED                                                                   \
  }
extern "C" const struct moe__sm90_kernel moe__sm90_wgrad_kernels[2][2] = {
  { KERNEL(false, false), KERNEL(false, true) }, { KERNEL(true, false), KERNEL(true, true) }
};
