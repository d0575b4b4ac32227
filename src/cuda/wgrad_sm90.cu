/* wgrad_sm90.cu - weight gradients of ragged experts on Hopper's matrix units.

   c[e,m,n] (+)= sum over rows r of e of p[pmap(r),m] q[qmap(r),n], 16-bit operands, sums in FP32 in ascending r.

   A cluster of 2 blocks, one for each multiprocessor, takes tiles of 256 m x 256 n of one expert, 128 m a block, all
   its rows at 64 a stage; m and n are the contiguous dimensions, which wgmma reads as they lie.  Warps 0-3 copy into a
   ring of 3 stages: TMA where an operand has no map, half of q by each block to both of them; cp.async where it has
   one, which is p (the launcher swaps p and q, and c is stored turned): 128 m of a row instead of 256 n.  They run
   ahead into the next tile while warps 4-7 and 8-11, 64 m each, multiply and store through TMA, which adds where FP32
   is accumulated and clips at the edges.  Rows past the expert's end are zeros in both operands, by TMA's clipping and
   cp.async's: a zero times whatever lies there need not be 0.

   Experts are taken longest first, and every other round of the clusters backwards, so that the last tiles are short
   and no block has much more than another.  Tiles that run at the same time are up to 8 tiles of m by as many of n as
   fill the device, mostly of one expert: p and q of an expert come from memory about once, and from the L2 cache
   (128 + 128) * 2 bytes a row for each tile.  Experts without rows cost a store of zeros, or nothing. */
#include "cuda/ggemm_sm90.h"
#include "cuda/ptx.cuh"
#include "cuda/ring.cuh"

namespace
{

enum {
  BLOCKS = 2, /* of a cluster: neighbours along m */
  TILE_M = 128,
  TILE_N = 256,
  STEP = 64,       /* rows of a stage */
  MINE = STEP / 4, /* of these, of a warp that gathers */
  GROUP = 4,       /* pairs of tiles of m that share one of n, one after the other */
  STAGES = 3,
  BOX_BYTES = STEP * 128, /* what a copy moves: rows of 128 bytes */
  P_BYTES = TILE_M / 64 * BOX_BYTES,
  Q_BYTES = TILE_N / 64 * BOX_BYTES,
  STAGE_BYTES = P_BYTES + Q_BYTES,
  C_BYTES = 64 * 128, /* what a store moves */
  C_BLOCKS = 4,       /* of these, of a warpgroup */
  C_AT = STAGES * STAGE_BYTES,
  FULL_AT = C_AT + 2 * C_BLOCKS * C_BYTES,
  EMPTY_AT = FULL_AT + 8 * STAGES,
  PLACE_AT = EMPTY_AT + 8 * STAGES,
  ORDER_AT = PLACE_AT + 16 * STAGES,
  SHARED = ORDER_AT + 2 * MOE__SM90_EXPERTS,
  THREADS = 384,
  COPYING = 88, /* registers of a thread, of the 168 of each that a launch gives */
  MULTIPLYING = 208
};
static_assert(COPYING + 2 * MULTIPLYING <= 3 * 168, "a warpgroup would wait for registers for ever");

using ring = ring_of<STAGES>;

/* A tile: its expert and that one's rows, its number along m (of both halves where they are split) and n.  Expert -1:
   there are no more. */
struct place {
  int e, rows, m, n;
};

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

/* The number, as the map has it, of a row of an expert that begins at `first`; -1 past its end. */
PTX int look(const moe__sm90_rows_of &of, int first, int row, int rows)
{
  return row < rows ? __ldg(of.map + first + row) : -1;
}
/* The row of the operand that a number stands for; row 0 past the end. */
PTX int row_of(const moe__sm90_rows_of &of, int number)
{
  return number < 0 ? 0 : (int)((uint64_t)number * of.div_mul >> of.div_shift);
}

/* Warp 0 alone, or the first four where an operand has a map: then warp w copies rows MINE*w.. of each stage of p,
   lane i 16 bytes of row i / 16 and of every other one after it.  Its lanes read the numbers of the rows of two stages
   at once, two stages before their copy, and have the addresses ready before the stage is free. */
PTX void copy_operands(const moe__sm90_wgrad &p, unsigned char *shared)
{
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, block = block_of_cluster();
  const int clusters = gridDim.x / BLOCKS, cluster = blockIdx.x / BLOCKS;
  const int mine = MINE * warp + lane % MINE; /* the row whose number this lane reads */
  const int own = MINE * warp + lane / 16;    /* the first row that it copies */
  const uint32_t base = shared_address(shared);
  const uint16_t *order = (const uint16_t *)(shared + ORDER_AT);
  uint32_t spot[4]; /* of its 16 bytes of rows own, own + 2, .. in a stage */
  ring r = { 0, 1 };
#pragma unroll
  for (int i = 0; i < 4; i++)
    spot[i] = lane % 16 / 8 * BOX_BYTES + (own + 2 * i) * 128 + ((lane % 8 ^ ((own + 2 * i) & 7)) << 4);
  for (int round = 0;; round++) {
    const int tile = round * clusters + (round % 2 ? clusters - 1 - cluster : cluster);
    place t = { -1, 0, 0, 0 };
    int first = 0, m = 0, n = 0, now = 0, next = -1; /* rows of two stages of p, numbers of those of the next two */
    bool wanted = false;                             /* p: m may lie outside */
    const unsigned char *from = NULL;
    if (tile < p.E * p.pairs * p.columns) {
      const int within = tile % (p.pairs * p.columns), group = within / (GROUP * p.columns),
                rest = within % (GROUP * p.columns), size = min(GROUP, p.pairs - group * GROUP);
      t.e = order[tile / (p.pairs * p.columns)];
      first = __ldg(p.offs + t.e);
      t.rows = __ldg(p.offs + t.e + 1) - first;
      t.m = (group * GROUP + rest % size) * BLOCKS + block;
      t.n = rest / size;
      if (t.rows == 0 && p.accumulate) continue;
      wanted = t.m % p.m_tiles * TILE_M < p.M;
      m = t.m / p.m_tiles * p.M + t.m % p.m_tiles * TILE_M;
      n = t.n / p.n_tiles * p.N + t.n % p.n_tiles * TILE_N;
      if (p.p.map) {
        from = p.p.x + (int64_t)min(m + lane % 16 * 8, p.p.columns - 8) * 2;
        next = look(p.p, first, lane / MINE * STEP + mine, t.rows);
      }
    }
    for (int s = 0; s < stages_of(t.rows); s++) {
      const uint32_t full = base + FULL_AT + 8 * r.stage, to = base + r.stage * STAGE_BYTES;
      const int left = t.rows - s * STEP;
      const unsigned char *row[MINE / 2];
      uint32_t at[MINE / 2];
      if (p.p.map) {
        if (s % 2 == 0) {
          now = row_of(p.p, next);
          next = look(p.p, first, (s + 2 + lane / MINE) * STEP + mine, t.rows);
        }
#pragma unroll
        for (int i = 0; i < MINE / 2; i++) {
          const uint32_t k = __shfl_sync(~0u, now, s % 2 * MINE + 2 * i + lane / 16);
          row[i] = from + (uint64_t)k * p.p.stride;
          at[i] = to + spot[i % 4] + i / 4 * 8 * 128;
        }
      }
      barrier_wait(base + EMPTY_AT + 8 * r.stage, r.parity);
      __syncwarp(); /* every lane has seen the phase, which then may pass */
      if (thread == 0) {
        const bool p_loaded = left > 0 && !p.p.map && wanted, q_loaded = left > 0 && !p.q.map;
        const int y = p.R - left, z = first + t.rows; /* of this stage in the tensors: see the launcher */
        if (s == 0) *(place *)(shared + PLACE_AT + 16 * r.stage) = t;
        barrier_arrive_expect(full, (p_loaded ? P_BYTES : 0) + (q_loaded ? Q_BYTES : 0));
        if (q_loaded)
          for (int i = 2 * block; i < 2 * block + 2; i++)
            tma_load_3d_both(to + P_BYTES + i * BOX_BYTES, &p.q.tensor, full, n + 64 * i, y, z);
        if (p_loaded)
          for (int i = 0; i < 2; i++) tma_load_3d(to + i * BOX_BYTES, &p.p.tensor, full, m + 64 * i, y, z);
      }
      if (p.p.map && left > 0 && wanted)
#pragma unroll
        for (int i = 0; i < MINE / 2; i++) copy_16(at[i], row[i], 2 * i < left - own);
      if (p.q.map && left > 0) { /* both have one, which is rare: row by row */
        const int number = row_of(p.q, look(p.q, first, s * STEP + mine, t.rows));
        const unsigned char *q = p.q.x + (int64_t)min(n + lane * 8, p.q.columns - 8) * 2;
#pragma unroll 1
        for (int i = 0; i < MINE; i++) {
          const uint32_t k = __shfl_sync(~0u, number, i), slot = MINE * warp + i;
          copy_16(to + P_BYTES + lane / 8 * BOX_BYTES + slot * 128 + ((lane % 8 ^ (slot & 7)) << 4),
                  q + (uint64_t)k * p.q.stride, (int)slot < left);
        }
      }
      if (p.p.map) barrier_arrive_copies(full);
      r.next();
    }
    if (t.e < 0) return;
  }
}

/* Adds what c has, in 16 bits, to the sums of a warpgroup, whose first element is m, n. */
template <bool half>
PTX void add_old(const moe__sm90_wgrad &p, float (&d)[128], int part, int e, int m, int n, int warp, int lane)
{
  const unsigned char *c = p.y[part] + e * p.y_stride[part][0];
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int row = m + warp * 16 + lane / 4 + i % 2 * 8, column = n + i / 2 * 8 + lane % 4 * 2;
    const unsigned char *at = c + row * p.y_stride[part][1] + column * p.y_stride[part][2];
    if (row >= p.M || column >= p.N) continue;
    const float2 old = unpack<half>(*(const uint16_t *)at | *(const uint16_t *)(at + p.y_stride[part][2]) << 16);
    d[2 * i] += old.x;
    d[2 * i + 1] += old.y;
  }
}

/* 32 n of a warpgroup's 64 m in FP32 to its block: 64 rows of 32 n or, turned, twice 32 rows of 32 m.  Odd rows in
   another order: no two of a half warp in the same banks. */
PTX void put_floats(const float *d, uint32_t block, bool turned, int warp, int lane)
{
  if (turned) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int n = i / 4 * 8 + lane % 4 * 2 + i % 2, m = warp % 2 * 16 + i / 2 % 2 * 8 + lane / 4;
      store_shared_4(block + warp / 2 * 32 * 128 + n * 128 + ((m / 4 ^ (n & 7)) << 4) + m % 4 * 4, d[i]);
    }
    return;
  }
  const int at = warp * 16 + lane / 4, odd = at & 1;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float *v = d + 4 * j, *w = d + 4 * (j ^ 2);
    const uint32_t to = block + at * 128 + (((2 * (odd ? j ^ 2 : j) + lane % 4 / 2) ^ (at & 7)) << 4) + lane % 2 * 8;
    store_shared_8(to, odd ? w[0] : v[0], odd ? w[1] : v[1]);
    store_shared_8(to + 8 * 128, odd ? w[2] : v[2], odd ? w[3] : v[3]);
  }
}

/* 64 n of a warpgroup's 64 m in 16 bits to its block, in rows of n or, turned, of m. */
template <bool half> PTX void put_halves(const float *d, uint32_t block, bool turned, int warp, int lane)
{
  uint32_t v[16];
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = pack<half>(d[2 * i], d[2 * i + 1]);
  if (turned)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = 16 * j + lane / 16 * 8 + lane % 8, unit = 2 * warp + lane / 8 % 2;
      store_matrices_turned(block + at * 128 + ((unit ^ (at & 7)) << 4), v[4 * j], v[4 * j + 1], v[4 * j + 2],
                            v[4 * j + 3]);
    }
  else
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = warp * 16 + lane % 16, unit = 2 * j + lane / 16;
      store_matrices(block + at * 128 + ((unit ^ (at & 7)) << 4), v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
}

/* Rows m 64*group.. of a tile from the sums of its warpgroup, 128 bytes of them to each of the blocks that it has at
   `blocks`: whole in 16 bits, so that the stores run under the next tile's product, in two rounds in FP32. */
template <bool half, bool wide>
PTX void store_tile(const moe__sm90_wgrad &p, float (&d)[128], const place &t, uint32_t blocks, int group)
{
  enum { COLUMNS = wide ? 32 : 64, PASSES = TILE_N / COLUMNS };
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int part = t.m / p.m_tiles + t.n / p.n_tiles, m = t.m % p.m_tiles * TILE_M + 64 * group,
            n = t.n % p.n_tiles * TILE_N;
  if (!wide && p.accumulate) add_old<half>(p, d, part, t.e, m, n, warp, lane);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass += C_BLOCKS) {
    if (thread == 0) tma_store_wait_read<0>();
    named_barrier(1 + group, 128);
#pragma unroll
    for (int i = 0; i < C_BLOCKS; i++)
      if (pass + i < PASSES && n + (pass + i) * COLUMNS < p.N) {
        const float *v = d + COLUMNS / 2 * (pass + i);
        if (wide) put_floats(v, blocks + i * C_BYTES, p.turned, warp, lane);
        else put_halves<half>(v, blocks + i * C_BYTES, p.turned, warp, lane);
      }
    fence_async();
    named_barrier(1 + group, 128);
    if (thread == 0) {
      for (int i = 0; i < C_BLOCKS; i++) {
        const int column = n + (pass + i) * COLUMNS, x = p.turned ? m : column, y = p.turned ? column : m;
        if (pass + i < PASSES && column < p.N)
          for (int j = 0; j < (wide && p.turned ? 2 : 1); j++)
            if (wide && p.accumulate) tma_add_3d(&p.c[part], blocks + i * C_BYTES + j * 32 * 128, x + j * 32, y, t.e);
            else tma_store_3d(&p.c[part], blocks + i * C_BYTES + j * 32 * 128, x + j * 32, y, t.e);
      }
      tma_store_commit();
    }
  }
}

/* A warpgroup: m 64*group.. of each tile. */
template <bool half, bool wide> PTX void multiply(const moe__sm90_wgrad &p, unsigned char *shared, int group)
{
  const uint32_t base = shared_address(shared), blocks = base + C_AT + group * C_BLOCKS * C_BYTES;
  const int lane = threadIdx.x % 32;
  const bool maps = p.p.map;
  float d[128];
  ring r = { 0, 0 };
  for (;;) {
    barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
    const place t = read_place<place>(shared + PLACE_AT + 16 * r.stage, lane);
    const int steps = stages_of(t.rows);
    if (t.e < 0) break;
    if (t.m % p.m_tiles * TILE_M + 64 * group < p.M) {
      int last = 0;
#pragma unroll
      for (int i = 0; i < 128; i++) d[i] = 0;
      for (int s = 0; s < steps; s++) {
        barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
        if (maps) fence_async();
        const uint32_t at = base + r.stage * STAGE_BYTES;
        const uint64_t a = matrix_descriptor(at + group * BOX_BYTES, BOX_BYTES);
        const uint64_t b = matrix_descriptor(at + P_BYTES, BOX_BYTES);
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
        if (s > 0) give_back<BLOCKS>(base + EMPTY_AT + 8 * last, lane);
        last = r.stage;
        r.next();
      }
      wgmma_wait<0>();
      wgmma_hold(d);
      give_back<BLOCKS>(base + EMPTY_AT + 8 * last, lane);
      store_tile<half, wide>(p, d, t, blocks, group);
    } else
      for (int s = 0; s < steps; s++) {
        barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
        __syncwarp(); /* every lane has seen the phase, which then may pass */
        give_back<BLOCKS>(base + EMPTY_AT + 8 * r.stage, lane);
        r.next();
      }
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
}

template <bool half, bool wide>
__global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    wgrad(const __grid_constant__ moe__sm90_wgrad p)
{
  DYNAMIC_SHARED(shared);
  const uint32_t base = shared_address(shared);
  const bool maps = p.p.map;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(base + FULL_AT + 8 * s, maps ? 1 + 128 : 1);
      barrier_init(base + EMPTY_AT + 8 * s, 8 * BLOCKS); /* warps that multiply */
    }
    barrier_init_fence();
  }
  sort_experts(p, shared);
  cluster_barrier();
  if (threadIdx.x < 128) {
    registers_down<COPYING>();
    if (maps || threadIdx.x < 32) copy_operands(p, shared);
  } else {
    registers_up<MULTIPLYING>();
    multiply<half, wide>(p, shared, threadIdx.x / 128 - 1);
  }
  cluster_barrier(); /* the other block may still copy to this one, or arrive here */
}

} // namespace

#define KERNEL(half, wide)                                                                                             \
  {                                                                                                                    \
    (const void *)wgrad<half, wide>, THREADS, SHARED                                                                   \
  }
extern "C" const struct moe__sm90_kernel moe__sm90_wgrad_kernels[2][2] = {
  { KERNEL(false, false), KERNEL(false, true) }, { KERNEL(true, false), KERNEL(true, true) }
};
