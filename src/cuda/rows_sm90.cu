/* rows_sm90.cu - products over the rows of ragged experts on Hopper's matrix units.

   c[r,n] = sum_k a[map(r),k] b[e(r),n,k] + bias[e(r),n], 16-bit operands, sums in FP32 in ascending k.

   One block for each multiprocessor takes one tile of 128 rows x 256 columns after the other; a tile's rows are of one
   expert.  Which tile is which follows from offs alone, so the host never waits.  Warps 0-3 copy operands, 64 k at a
   time, into a ring of 4 stages: b by TMA, a by TMA or, gathered, by cp.async; they run ahead into the next tile while
   warps 4-7 and 8-11, 64 rows each, multiply (wgmma) and store.  The tile's place travels with its first stage.

   Block i begins with tile i and draws its further ones, in order, from a counter in device memory: neighbours in the
   order begin at about the same time, however far the blocks have drifted apart, and find each other's operands in the
   L2 cache.  Launches that may run at the same time have counters of their own (moe__cuda_slot); one without takes
   every gridDim.x-th tile.  What a tile gives does not depend on who takes it when.

   In clusters of two blocks (kernels `pairs`) a tile is 256 rows, 128 for each block, or half of them for each where no
   more than 128 are left of an expert.  Each block copies the b of half of the columns, to both: b comes from the L2
   cache once for both, and a stage is free where both have multiplied it.

   With SPLIT_N a tile is 128 columns of each half, so gate and up of an element are sums of one thread.
   Bytes moved: a block's tile reads (128 + 256) * K elements, in clusters (128 + 128) * K, mostly from the L2 cache:
   tiles that run at the same time are up to 8 row tiles by as many column tiles as fill the device.  Rows past the
   expert's end are read where a is not gathered, and never written; a tile of at most 64 rows costs half of the
   multiplications.

   Epilogues (enum moe__epilogue): with ACT_GRAD the sums pass through the same blocks in FP32, 64 columns at a time; h
   comes through the ring of stages, behind the tile's operands.  There threads hold 8 neighbours of a row, and write 16
   bytes each: 128 in a row. */
#include "cuda/act.cuh"
#include "cuda/ggemm_sm90.h"
#include "cuda/ptx.cuh"
#include "cuda/ring.cuh"

namespace
{

enum {
  TILE_M = 128,
  TILE_N = 256,
  STEP = 64, /* k of a stage: rows of 128 bytes */
  GROUP = 8, /* row tiles that share a column tile, at the same time or one after the other */
  STAGES = 4,
  A_BYTES = TILE_M * STEP * 2,
  STAGE_BYTES = A_BYTES + TILE_N * STEP * 2,
  BLOCK_BYTES = 64 * 64 * 2,     /* 64 rows of 128 bytes */
  PIECE_BYTES = BLOCK_BYTES / 4, /* 16 of them: what one store writes */
  C_AT = STAGES * STAGE_BYTES,
  FULL_AT = C_AT + 4 * BLOCK_BYTES,
  EMPTY_AT = FULL_AT + 8 * STAGES,
  PLACE_AT = EMPTY_AT + 8 * STAGES,
  NEXT_AT = PLACE_AT + 16 * STAGES, /* by stage and parity */
  SHARED = NEXT_AT + 8 * STAGES,
  THREADS = 384,
  COPYING = 56, /* registers of a thread, of the 168 of each that a launch gives */
  MULTIPLYING = 224,
  PASSES = TILE_N / 64, /* of 64 columns, and stages of h */
  SPLIT_N = 1,          /* enum moe__split */
  SPLIT_K = 2,
  PLAIN = 0, /* enum moe__epilogue */
  ACT_GRAD = 1
};
static_assert(COPYING + 2 * MULTIPLYING <= 3 * 168, "a warpgroup would wait for registers for ever");

using ring = ring_of<STAGES>;

/* Where a block's tile lies: its expert, first row, rows (0 to 128), column tile.  Expert -1: there are no more. */
struct place {
  int e, row, rows, column;
};

/* All tiles in order of their experts, those of the blocks of a cluster as one: neighbouring rows of an expert, half
   for each block where there are no more than one block takes.  The lanes of a warp share the experts out, `per` to
   each. */
template <int blocks> struct schedule {
  enum { ROWS = blocks * TILE_M, SIZE = GROUP / blocks };
  const int32_t *offs;
  int E, columns, per, before; /* before: row tiles of the experts of lower lanes */
  int total;                   /* tiles */

  __device__ __forceinline__ int row_tiles(int e) const
  {
    return (__ldg(offs + e + 1) - __ldg(offs + e) + ROWS - 1) / ROWS;
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
  /* What block `rank` of the cluster has of a tile below total; called by whole warps. */
  __device__ __forceinline__ place at(int tile, int lane, int rank) const
  {
    const int holder = __popc(__ballot_sync(~0u, before * columns <= tile)) - 1;
    const int e = holder * per + lane, here = lane < per && e < E;
    const int own = here ? row_tiles(e) : 0;
    const int start = __shfl_sync(~0u, before, holder) + scan(own, lane) - own;
    const int found = __popc(__ballot_sync(~0u, here && start * columns <= tile)) - 1;
    const int tiles = __shfl_sync(~0u, own, found);
    const int within = tile - __shfl_sync(~0u, start, found) * columns;
    const int group = within / (SIZE * columns), rest = within % (SIZE * columns);
    const int size = min(SIZE, tiles - group * SIZE);
    place t;
    t.e = holder * per + found;
    const int first = __ldg(offs + t.e) + (group * SIZE + rest % size) * ROWS, end = __ldg(offs + t.e + 1);
    const int most = blocks > 1 && end - first <= TILE_M ? TILE_M / 2 : TILE_M;
    t.row = first + rank * most;
    t.rows = max(0, min(most, end - t.row));
    t.column = rest / size;
    return t;
  }
};

template <int blocks> PTX void load_box(uint32_t to, const CUtensorMap *map, uint32_t full, int x, int y, int z)
{
  if (blocks > 1) tma_load_3d_both(to, map, full, x, y, z);
  else tma_load_3d(to, map, full, x, y, z);
}
/* Announces nothing and begins the copies of b[e, n.., k..k+63] of `half`; in a cluster each block those of half of
   the columns, to both. */
template <bool n_first, int blocks>
PTX void load_b(const moe__sm90_rows &p, uint32_t to, uint32_t full, const place &t, int half, int k, int rank)
{
#pragma unroll
  for (int i = 0; i < 2 / blocks; i++) {
    const int j = blocks > 1 ? rank : i;
    const CUtensorMap *map = &p.b[p.split == SPLIT_N ? j : half];
    const int n = p.split == SPLIT_N ? t.column * (TILE_N / 2) : t.column * TILE_N + j * (TILE_N / 2);
    const uint32_t at = to + 2 * j * BLOCK_BYTES;
    if (n_first) {
      load_box<blocks>(at, map, full, n, k, t.e);
      load_box<blocks>(at + BLOCK_BYTES, map, full, n + 64, k, t.e);
    } else load_box<blocks>(at, map, full, k, n, t.e);
  }
}

/* Announces and begins the copies of h's columns of one pass, gate and then up. */
PTX void load_h(const moe__sm90_rows &p, uint32_t to, uint32_t full, const place &t, int pass)
{
  const int n = t.column * TILE_N + 64 * pass;
  if (n >= p.N) {
    barrier_arrive(full);
    return;
  }
  barrier_arrive_expect(full, p.act.gated ? 2 * A_BYTES : A_BYTES);
  tma_load_2d(to, &p.h[0], full, n, t.row);
  if (p.act.gated) tma_load_2d(to + A_BYTES, &p.h[1], full, n, t.row);
}

/* Where a number that travels with a stage lies. */
PTX int next_at(const ring &r)
{
  return NEXT_AT + 8 * r.stage + 4 * r.parity;
}
/* Gives it to a stage of each block of the cluster, by a thread of each, before that arrives. */
template <int blocks> PTX void tell(unsigned char *shared, const ring &r, int rank, int number)
{
  const uint32_t base = shared_address(shared), full = base + FULL_AT + 8 * r.stage;
  if (blocks == 1) *(int *)(shared + next_at(r)) = number;
  else {
    barrier_expect(full, 4);
    if (rank == 0)
      for (int block = 0; block < blocks; block++) store_at(base + next_at(r), full, block, number);
  }
}

/* By slot: tiles drawn, 0 between launches. */
__device__ unsigned counters[MOE__SM90_SLOTS];

/* Warp 0 alone, or the first four warps where a is gathered.  For each tile one is drawn, by the cluster that has
   it, so that the last of all draws sets the counter back to 0.  The number travels with a stage, to both blocks
   like b: the last but three of the tile, which has arrived when the next tile may begin, and two after the draw, so
   that nobody waits for the atomic.  Its place is written again 8 stages later at the earliest; by then all who read
   it have copied for the one 4 later, which is of another tile. */
template <bool gathered, bool n_first, int epilogue, int blocks>
PTX void copy_operands(const moe__sm90_rows &p, unsigned char *shared)
{
  const int thread = threadIdx.x, lane = thread % 32, unit = thread % 8;
  const int rank = blocks > 1 ? block_of_cluster() : 0, clusters = gridDim.x / blocks;
  const uint32_t base = shared_address(shared);
  const int halves = p.split == SPLIT_K ? 2 : 1, steps = (p.K + STEP - 1) / STEP;
  const int all = halves * steps + (epilogue == ACT_GRAD ? PASSES : 0); /* stages of a tile */
  const schedule<blocks> tiles(p, lane);
  const unsigned char *from[8]; /* rows thread/8 + 16*i of the tile */
  ring r = { 0, 1 }, told = r;
  int tile = blockIdx.x / blocks;
  for (;;) {
    place t = { -1, 0, 0, 0 };
    unsigned drawn = 0;
    if (tile < tiles.total) t = tiles.at(tile, lane, rank);
    if (gathered && t.e >= 0)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int row = thread / 8 + 16 * i;
        from[i] = NULL;
        if (row < t.rows)
          from[i] = p.x + ((uint64_t)__ldg(p.map + t.row + row) * p.div_mul >> p.div_shift) * p.x_stride + unit * 16;
      }
    for (int s = 0; s < (t.e < 0 ? 1 : all); s++) {
      const uint32_t full = base + FULL_AT + 8 * r.stage, to = base + r.stage * STAGE_BYTES;
      const int half = s >= steps, k = (s - half * steps) * STEP;
      if (gathered || lane == 0) barrier_wait(base + EMPTY_AT + 8 * r.stage, r.parity);
      if (thread == 0) {
        const bool draws = p.slot >= 0 && t.e >= 0;
        if (s == 0) *(place *)(shared + PLACE_AT + 16 * r.stage) = t;
        if (draws && rank == 0 && s == max(all - STAGES - 2, 0)) drawn = atomicInc(counters + p.slot, tiles.total - 1);
        if (draws && s == max(all - STAGES, 0)) tell<blocks>(shared, r, rank, clusters + drawn);
        if (t.e < 0) barrier_arrive(full);
        else if (epilogue == ACT_GRAD && s >= halves * steps) load_h(p, to, full, t, s - halves * steps);
        else {
          barrier_arrive_expect(full, gathered ? STAGE_BYTES - A_BYTES : STAGE_BYTES);
          load_b<n_first, blocks>(p, to + A_BYTES, full, t, half, k, rank);
          if (!gathered) tma_load_2d(to, &p.a[half], full, k, t.row);
        }
      }
      if (gathered) {
        if (t.e >= 0 && !(epilogue == ACT_GRAD && s >= halves * steps)) {
          const bool there = k + unit * 8 < p.K;
          const int64_t at = ((int64_t)half * p.K + k) * 2;
#pragma unroll
          for (int i = 0; i < 8; i++)
            copy_16(to + (thread / 8 + 16 * i) * 128 + ((unit ^ (thread / 8 & 7)) << 4),
                    from[i] && there ? from[i] + at : p.x, from[i] && there);
        }
        barrier_arrive_copies(full);
      }
      if (s == max(all - STAGES, 0)) told = r;
      r.next();
    }
    if (t.e < 0) return;
    tile += clusters;
    if (p.slot >= 0) {
      if (lane == 0) { /* without a map it alone has waited for stages, and the others may be phases ahead */
        barrier_wait(base + FULL_AT + 8 * told.stage, told.parity ^ 1);
        tile = *(const int *)(shared + next_at(told));
      }
      tile = __shfl_sync(~0u, tile, 0);
    }
  }
}

/* Where 16-byte unit u of a row lies in a block. */
PTX uint32_t unit_at(uint32_t block, int row, int unit)
{
  return block + row * 128 + ((unit ^ (row & 7)) << 4);
}

/* Adds the bias of columns n.. to the sums of `pass`. */
template <bool half> PTX void add_bias(const moe__sm90_rows &p, float (&d)[128], int pass, int e, int part, int n)
{
  const unsigned char *bias = p.bias[part] + e * p.bias_stride[part];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int column = n + 8 * j + threadIdx.x % 4 * 2;
    float *v = d + 32 * pass + 4 * j;
    if (column >= p.N) break;
    const float2 b = unpack<half>(__ldg((const uint32_t *)(bias + column * 2)));
    v[0] += b.x, v[1] += b.y, v[2] += b.x, v[3] += b.y;
  }
}

/* A warp's 16 rows of a tile from its sums, 64 columns at a time through the two pieces of shared memory that it has,
   `turn` and then the other: by TMA, which lane 0 commits, or up to `rows` rows by all.  A warp does so by itself:
   with the warpgroup, by 64 rows, and a look for the bias at each column, a tile took 4400 cycles instead of 2700. */
template <bool half>
PTX void store_tile(const moe__sm90_rows &p, float (&d)[128], const place &t, uint32_t pieces, int group, int &turn)
{
  const int thread = threadIdx.x % 128, lane = thread % 32, unit = lane % 8;
  const int above = 64 * group + thread / 32 * 16, row = t.row + above, rows = t.rows - above;
  const uint32_t mine = unit_at(pieces, lane % 16, lane / 16);
  if (rows <= 0) return;
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int part = p.split == SPLIT_N ? pass / 2 : 0;
    const int n = p.split == SPLIT_N ? t.column * (TILE_N / 2) + pass % 2 * 64 : t.column * TILE_N + pass * 64;
    const uint32_t piece = turn * PIECE_BYTES;
    if (n >= p.N) continue;
    turn ^= 1;
    if (p.bias[part]) add_bias<half>(p, d, pass, t.e, part, n);
    if (lane == 0) tma_store_wait_read<1>(); /* the store before last, of this piece, has read it */
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float *v = d + 32 * pass + 4 * j;
      store_matrices((mine ^ j << 4) + piece, pack<half>(v[0], v[1]), pack<half>(v[2], v[3]), pack<half>(v[4], v[5]),
                     pack<half>(v[6], v[7]));
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
      if (rows >= 16) tma_store_2d(&p.c[part], pieces + piece, n, row);
      tma_store_commit();
    }
    if (rows < 16 && n + 8 * unit < p.N)
      for (int at = lane / 8; at < rows; at += 4)
        *(uint4 *)(p.y + (row + at) * p.y_stride + ((int64_t)part * p.N + n + 8 * unit) * 2) =
            load_shared_16(unit_at(pieces + piece, at, unit));
    if (rows < 16) __syncwarp(); /* all have read the piece */
  }
}

/* A warpgroup's sums of one pass in FP32: columns 8*u..8*u+3 are unit u of the first block, the next four unit u ^ 4 of
   the second, so that neither these writes nor the reads of whole units meet in a bank. */
PTX void put_sums(const float (&d)[128], int pass, uint32_t blocks)
{
  const int thread = threadIdx.x % 128, lane = thread % 32, second = lane % 4 / 2;
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = thread / 32 * 16 + lane / 4 + 8 * i;
      const float *v = d + 32 * pass + 4 * j + 2 * i;
      store_shared_8(unit_at(blocks + second * BLOCK_BYTES, at, j ^ 4 * second) + lane % 2 * 8, v[0], v[1]);
    }
}
PTX void get_sums(float (&v)[8], uint32_t at)
{
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4 four = load_shared_16((at ^ i * (4 << 4)) + i * BLOCK_BYTES);
    v[4 * i] = __uint_as_float(four.x);
    v[4 * i + 1] = __uint_as_float(four.y);
    v[4 * i + 2] = __uint_as_float(four.z);
    v[4 * i + 3] = __uint_as_float(four.w);
  }
}

/* dh, aw and the row's share of <da, a> from da, the sums.  A warp takes the 16 rows whose sums it has, 4 at a time:
   8 lanes have a row's 64 columns, and lane i of them keeps what belongs to their row i of 4. */
template <bool half, int blocks>
PTX void store_gradient(const moe__sm90_rows &p, const float (&d)[128], const place &t, uint32_t base, uint32_t store,
                        int group, ring &r)
{
  const int thread = threadIdx.x % 128, lane = thread % 32, unit = thread % 8;
  const int row = t.row + 64 * group, rows = min(64, t.rows - 64 * group);
  const int first = thread / 32 * 16 + lane / 8, own = first + 4 * unit;
  const uint32_t there = unit_at(0, first, unit);
  const float alpha = p.act.alpha, limit = p.act.limit;
  float weight = 1, share = 0;
  if (p.weights && unit < 4 && own < rows) weight = p.weights[__ldg(p.map + row + own)];
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
    const int column = t.column * TILE_N + 64 * pass + 8 * unit;
    uint32_t sums = store + there, gates = base + r.stage * STAGE_BYTES + group * BLOCK_BYTES + there;
    unsigned char *dh = p.dh + (row + first) * p.dh_stride + column * 2;
    unsigned char *aw = p.aw + (row + first) * p.aw_stride + column * 2;
    if (pass == 0) put_sums(d, 0, store);
    else if (pass == 1) put_sums(d, 1, store);
    else if (pass == 2) put_sums(d, 2, store);
    else put_sums(d, 3, store);
    __syncwarp();
    barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
      const float w = __shfl_sync(~0u, weight, lane / 8 * 8 + i);
      float sum = 0;
      if (first + 4 * i < rows && column < p.N) {
        float v[8], gate[8], g[8], f[8], df[8], a[8];
        get_sums(v, sums);
        unpack_8<half>(gate, load_shared_16(gates));
#pragma unroll
        for (int j = 0; j < 8; j++) g[j] = smaller(gate[j], limit);
        activate(g, p.act.kind, alpha, f, df);
        if (p.act.gated) {
          float up[8], du[8];
          unpack_8<half>(up, load_shared_16(gates + A_BYTES));
#pragma unroll
          for (int j = 0; j < 8; j++) {
            const float u = larger(smaller(up[j], limit), -limit) + p.act.up_offset, dv = w * v[j];
            a[j] = f[j] * u;
            df[j] *= dv * u;
            du[j] = fabsf(up[j]) > limit ? 0 : dv * f[j];
          }
          *(uint4 *)(dh + (int64_t)p.N * 2) = pack_8<half>(du);
        } else
#pragma unroll
          for (int j = 0; j < 8; j++) a[j] = f[j], df[j] *= w * v[j];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          if (gate[j] > limit) df[j] = 0;
          sum += v[j] * a[j];
          a[j] *= w;
        }
        *(uint4 *)dh = pack_8<half>(df);
        if (p.aw) *(uint4 *)aw = pack_8<half>(a);
      }
#pragma unroll
      for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      if (unit == i) share += sum;
      sums = (sums ^ 4 << 4) + 4 * 128; /* the swizzle of a row 4 further */
      gates = (gates ^ 4 << 4) + 4 * 128;
      dh += 4 * p.dh_stride;
      aw += 4 * p.aw_stride;
    }
    __syncwarp(); /* every lane has read the stage and the blocks */
    give_back<blocks>(base + EMPTY_AT + 8 * r.stage, lane);
    r.next();
  }
  if (p.parts && unit < 4 && own < rows) ((float *)(p.parts + (row + own) * p.parts_stride))[t.column] = share;
}

/* A warpgroup: rows 64*group.. of each tile. */
template <bool half, bool gathered, bool n_first, int epilogue, int blocks>
PTX void multiply(const moe__sm90_rows &p, unsigned char *shared, int group)
{
  const uint32_t base = shared_address(shared), store = base + C_AT + 2 * group * BLOCK_BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int steps = (p.split == SPLIT_K ? 2 : 1) * ((p.K + STEP - 1) / STEP);
  float d[128];
  ring r = { 0, 0 };
  int turn = 0;
#pragma unroll
  for (int i = 0; i < 128; i++) d[i] = 0;
  for (;;) {
    barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
    const place t = read_place<place>(shared + PLACE_AT + 16 * r.stage, lane);
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
        if (s > 0) give_back<blocks>(base + EMPTY_AT + 8 * last, lane);
        last = r.stage;
        r.next();
      }
      wgmma_wait<0>();
      wgmma_hold(d);
      give_back<blocks>(base + EMPTY_AT + 8 * last, lane);
      if constexpr (epilogue == ACT_GRAD) store_gradient<half, blocks>(p, d, t, base, store, group, r);
      else store_tile<half>(p, d, t, store + warp * 2 * PIECE_BYTES, group, turn);
    } else
      for (int s = 0; s < steps + (epilogue == ACT_GRAD ? PASSES : 0); s++) {
        barrier_wait(base + FULL_AT + 8 * r.stage, r.parity);
        __syncwarp(); /* every lane has seen the phase, which then may pass */
        give_back<blocks>(base + EMPTY_AT + 8 * r.stage, lane);
        r.next();
      }
  }
  if (lane == 0) tma_store_wait_read<0>();
}

template <bool half, bool gathered, bool n_first, int epilogue, int blocks> PTX void run(const moe__sm90_rows &p)
{
  DYNAMIC_SHARED(shared);
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(base + FULL_AT + 8 * s, gathered ? 1 + 128 : 1);
      barrier_init(base + EMPTY_AT + 8 * s, 8 * blocks); /* warps that multiply */
    }
    barrier_init_fence();
    for (int i = 0; i < 2; i++) {
      prefetch_map(&p.a[i]);
      prefetch_map(&p.b[i]);
      prefetch_map(epilogue == ACT_GRAD ? &p.h[i] : &p.c[i]);
    }
  }
  if (blocks > 1) cluster_barrier();
  else __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<COPYING>();
    if (gathered || threadIdx.x < 32) copy_operands<gathered, n_first, epilogue, blocks>(p, shared);
  } else {
    registers_up<MULTIPLYING>();
    multiply<half, gathered, n_first, epilogue, blocks>(p, shared, threadIdx.x / 128 - 1);
  }
  if (blocks > 1) cluster_barrier(); /* the other block may still copy to this one, or arrive here */
}

template <bool half, bool gathered, bool n_first, int epilogue>
__global__ void __launch_bounds__(THREADS, 1) rows(const __grid_constant__ moe__sm90_rows p)
{
  run<half, gathered, n_first, epilogue, 1>(p);
}
template <bool half, bool gathered, bool n_first, int epilogue>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) pairs(const __grid_constant__ moe__sm90_rows p)
{
  run<half, gathered, n_first, epilogue, 2>(p);
}

/* A thread for a row: what its column tiles gave, in their order. */
__global__ void sums(const __grid_constant__ moe__sm90_sums p)
{
  const int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= __ldg(p.offs + p.E)) return;
  const float *parts = (const float *)(p.parts + r * p.stride);
  float *to = p.sums + p.map[r], sum = p.accumulate ? *to : 0;
  for (int i = 0; i < p.n; i++) sum += parts[i];
  *to = sum;
}

} // namespace

#define KERNEL_WITH(kernel, half, gathered, n_first, epilogue)                                                         \
  {                                                                                                                    \
    (const void *)kernel<half, gathered, n_first, epilogue>, THREADS, SHARED                                           \
  }
#define BY_N(kernel, half, gathered, epilogue)                                                                         \
  {                                                                                                                    \
    KERNEL_WITH(kernel, half, gathered, false, epilogue), KERNEL_WITH(kernel, half, gathered, true, epilogue)          \
  }
#define KERNELS(kernel, half)                                                                                          \
  {                                                                                                                    \
    BY_N(kernel, half, false, PLAIN), BY_N(kernel, half, true, PLAIN)                                                  \
  }
#define GATHERED(kernel, epilogue)                                                                                     \
  {                                                                                                                    \
    BY_N(kernel, false, true, epilogue), BY_N(kernel, true, true, epilogue)                                            \
  }
extern "C" const struct moe__sm90_kernel moe__sm90_rows_kernels[2][2][2][2] = {
  { KERNELS(rows, false), KERNELS(rows, true) }, { KERNELS(pairs, false), KERNELS(pairs, true) }
};
extern "C" const struct moe__sm90_kernel moe__sm90_act_grad_kernels[2][2][2] = { GATHERED(rows, ACT_GRAD),
                                                                                 GATHERED(pairs, ACT_GRAD) };
extern "C" const struct moe__sm90_kernel moe__sm90_sums_kernel = { (const void *)sums, 256, 0 };
