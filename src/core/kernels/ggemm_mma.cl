/* ggemm_mma.cl - products over ragged experts on NVIDIA's matrix units, for 16-bit storage: mma.sync, ldmatrix and
   cp.async of sm_80 and later, as inline PTX that nvcc and NVIDIA's OpenCL compile alike.

   All stand on one engine: a work-group of 128 items (4 warps, 2 x 2) makes one tile of 128 x 128 outputs, a warp 64 x
   64 of them in 128 registers an item.  Along k both operands come 32 at a time into local memory, in chunks of 8
   neighbours in storage: 8 KiB an operand, 16 KiB a stage, three stages (48 KiB): two steps of copies are under way
   while one is multiplied, one barrier a step is enough, and two groups fit in a multiprocessor.
   An operand whose neighbours lie along k stands there as lines of 32 k (64 bytes); one whose neighbours are lines, as
   32 rows of 128 lines (256 bytes), which ldmatrix transposes.  Chunks are swizzled so that copies and ldmatrix meet
   no bank twice.  What is absent is zero in both operands.
   Each product has two kernels.  Where all chunks are 16 aligned bytes, whole or absent (the launcher looks at sizes,
   strides and addresses), each is one cp.async, and fragments of one half of a step are loaded while the other half is
   multiplied.  The `_any` kernels serve every layout: chunks go through registers, from two aligned loads of 16 bytes
   that are shifted, or element by element where neighbours are apart and near a line's end.
   An output has one FP32 accumulator that takes its products in ascending k, 16 at once: its bits do not depend on
   the grid or on the other rows.  Bytes moved: each operand once for each tile across the other.
   Why not simpler: warps of 64 x 32 read half more from local memory, which moves much as it is (16 KiB of fragments
   and 8 KiB of copies for 128 mma's); an mma's two words of b that do not lie in neighbouring registers cost two moves
   each; chunks by words are four times as many accesses to the same lines. */

#define ROLLED _Pragma("unroll 1")
#define TILE_M 128
#define TILE_N 128
#define GROUP_ITEMS (TILE_M * TILE_N / 128)
#define STEP 32
#define A_BYTES (TILE_M * STEP * 2)
#define STAGE_BYTES ((TILE_M + TILE_N) * STEP * 2)
#define STAGES 3
#define TILES(name) LOCAL_ARRAY(uint4, name, STAGES *STAGE_BYTES / 16)

/* Of 64 x 64 outputs of a warp an item has 4 x 8 quads: rows WARP_LANE/4 and 8 on, columns WARP_LANE%4*2 and 1 on. */
#define WARP_LANE (LID & 31)
#define WARP_M ((LID >> 5) % (TILE_M / 64))
#define WARP_N ((LID >> 5) / (TILE_M / 64))

/* ---- instructions ------------------------------------------------------------------------------------------------ */
#ifndef MMA_INSTRUCTIONS /* tests/emulator has its own */
/* The 32-bit address that PTX knows local memory by. */
#ifdef MOE_CUDA
#define LOCAL_ADDRESS(p) ((uint)__cvta_generic_to_shared(p))
#else
#define LOCAL_ADDRESS(p) ((uint)(ulong)(p))
#endif
/* The first `bytes` of 16, and zeros. */
FN void copy_16(uint to, const GLOBAL ST *from, int bytes)
{
  __asm__ volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"((ulong)from), "r"(bytes)
                   : "memory");
}
/* v becomes what is there, if something is. */
FN void load_if(int *v, const GLOBAL int *from, int there)
{
  __asm__ volatile("{\n\t.reg .pred there;\n\tsetp.ne.s32 there, %2, 0;\n\t"
                   "@there ld.global.u32 %0, [%1];\n\t}"
                   : "+r"(*v)
                   : "l"((ulong)from), "r"(there));
}
/* entry * mul >> shift, and row `row` of those that begin so many bytes apart. */
FN int divided(int entry, uint mul, int shift)
{
  int row;
  __asm__("{\n\t.reg .u64 t;\n\tmul.wide.u32 t, %1, %2;\n\tshr.u64 t, t, %3;\n\tcvt.u32.u64 %0, t;\n\t}"
          : "=r"(row)
          : "r"(entry), "r"(mul), "r"(shift));
  return row;
}
FN const GLOBAL ST *row_at(const GLOBAL ST *x, int row, int bytes)
{
  ulong at;
  __asm__("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(bytes), "l"((ulong)x));
  return (const GLOBAL ST *)at;
}
/* Hides where a value comes from: what is made of it is made here, neither before a loop that this stands in (which
   takes registers for as long as the loop runs) nor again in each step of a loop behind. */
#define HIDE_INT(x) __asm__ volatile("" : "+r"(x))
#define HIDE_LONG(x) __asm__ volatile("" : "+l"(x))
FN void put_16(uint to, const uint *w)
{
  __asm__ volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                   : "memory");
}
/* The copies begun so far are one more group; waits until all but the newest n groups are there. */
FN void end_group(void)
{
  __asm__ volatile("cp.async.commit_group;" ::: "memory");
}
#define WAIT_GROUP(n) __asm__ volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")
FN void wait_all(void)
{
  __asm__ volatile("cp.async.wait_all;" ::: "memory");
}
/* Four 8 x 8 matrices, the rows of each at the addresses of 8 lanes. */
#define LDMATRIX(trans)                                                                                                \
  __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0, %1, %2, %3}, [%4];"                         \
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                    \
                   : "r"(from)                                                                                         \
                   : "memory")
FN void ldmatrix(uint *r, uint from, int trans)
{
  if (trans) LDMATRIX(".trans");
  else LDMATRIX("");
}
#ifdef MOE_ST_BF16
#define MMA_TYPE "bf16"
#else
#define MMA_TYPE "f16"
#endif
/* c[16,8] += a[16,16] b[8,16]' */
FN void mma(float *c, const uint *a, uint b0, uint b1)
{
  __asm__("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE
          ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

/* ---- operands ---------------------------------------------------------------------------------------------------- */
/* Row i of a tensor is row at[i]/div; the division is by a multiplication (moe__divide). */
typedef struct {
  const GLOBAL int *at; /* NULL: the identity */
  uint mul;
  int shift;
} row_map;
FN row_map map_of(const GLOBAL int *at, long mul, int shift)
{
  row_map m;
  m.at = at, m.mul = at ? (uint)mul : 1, m.shift = at ? shift : 0;
  return m;
}
FN int map_row(const row_map *map, int entry)
{
  return divided(entry, map->mul, map->shift);
}

/* One operand of a tile: LINES "lines" (rows of a, of b) by all k, as one item sees it: CHUNKS chunks a step.
   Along k: of lines LID/4 + LINES/CHUNKS*i, at k = LID%4*8.  Across: of k = LID/(LINES/8) + 32/CHUNKS*i, at line
   LID%(LINES/8)*8. */
#define CHUNKS(lines) ((lines)*STEP / 8 / GROUP_ITEMS)
#define MAX_CHUNKS 4
typedef struct {
  const GLOBAL ST *x[MAX_CHUNKS]; /* across: only the first, at row 0 where there are maps, else at the present k */
  long step, next;                /* elements between the neighbours of a chunk; from k to k + 1 */
  int k, lines;                   /* the first chunk's k in a step; across: how many lines from its first on */
  uint slot;                      /* the first chunk's place; the others are LINES*STEP*2/CHUNKS bytes apart */
  row_map map;                    /* across, with maps: from the item's first k of the next step on */
  int entry[MAX_CHUNKS];          /* what it holds for the next step; the k's themselves where it is NULL */
  int load_k, add;                /* k + STEP, and 0; more than any k, and STEP where it is NULL */
} operand;

/* Lines first.. of x, `stride` apart, of which `lines` exist, by K; along k they go by a map where `rows` has one, and
   repeat the last line past the end, as wide chunks across do: those outputs are dropped. */
FN void operand_of(operand *o, const GLOBAL ST *x, long stride, long next, long first, int lines, const row_map *rows,
                   int across, int wide, int LINES)
{
  o->next = next;
  if (across) {
    int line = LID % (LINES / 8) * 8;
    HIDE_INT(line);
    o->k = LID / (LINES / 8);
    o->step = stride;
    o->slot = o->k * LINES * 2 + ((line / 8 ^ (o->k & 7)) << 4);
    if (wide) line = MIN2(line, lines - 8);
    o->lines = lines - line;
    o->x[0] = x + (first + line) * stride + o->k * next;
  } else {
    int line = LID / 4;
    HIDE_INT(line);
    o->k = LID % 4 * 8;
    o->step = next;
    o->slot = line * STEP * 2 + ((LID % 4 ^ (line >> 1 & 3)) << 4);
    UNROLL for (int i = 0; i < CHUNKS(LINES); i++)
    {
      long row = first + MIN2(line + GROUP_ITEMS / 4 * i, lines - 1);
      if (rows->at) row = map_row(rows, rows->at[row]);
      o->x[i] = x + row * stride + o->k * next;
    }
  }
}
/* k's (across only) are rows of the tensor by a map, entries first.., K of them. */
FN void along_map(operand *o, const row_map *rows, long first, int K, int LINES)
{
  const int apart = STEP / CHUNKS(LINES);
  o->x[0] -= o->k * o->next;
  o->map = *rows;
  o->map.at += first + o->k;
  o->load_k = rows->at ? o->k + STEP : 0x7fffffff - STEP;
  o->add = rows->at ? 0 : STEP;
  HIDE_INT(o->load_k);
  HIDE_INT(o->add);
  UNROLL for (int i = 0; i < CHUNKS(LINES); i++)
  {
    o->entry[i] = rows->at ? 0 : o->k + apart * i;
    load_if(&o->entry[i], o->map.at + apart * i, o->load_k - STEP + apart * i < K);
  }
  o->map.at += STEP;
}
/* Where this item's chunks of the next step begin, of which `left` k's exist, and how many elements there are from
   there on (wide: whether there are any); moves on. */
FN void advance(operand *o, const GLOBAL ST **p, int *n, int left, int across, int maps, int wide, int LINES)
{
  const int apart = STEP / CHUNKS(LINES);
  UNROLL for (int i = 0; i < CHUNKS(LINES); i++)
  {
    if (across) {
      n[i] = o->k + apart * i < left ? wide ? 1 : o->lines : 0;
      if (maps) {
        const int row = map_row(&o->map, o->entry[i]);
        p[i] = wide ? row_at(o->x[0], row, 2 * (int)o->next) : o->x[0] + row * o->next;
        o->entry[i] += o->add;
        load_if(&o->entry[i], o->map.at + apart * i, o->load_k + apart * i < left);
      } else {
        p[i] = i ? p[MAX2(i - 1, 0)] + apart * o->next : o->x[0];
      }
    } else {
      n[i] = left - o->k;
      p[i] = o->x[i];
      o->x[i] += wide ? STEP : STEP * o->next;
    }
  }
  if (maps) o->map.at += STEP;
  else if (across) o->x[0] += STEP * o->next;
}

/* Begins the copies of chunks of 16 bytes; absent ones are 0. */
FN void fetch_wide(operand *o, uint to, int left, int across, int maps, int LINES)
{
  const GLOBAL ST *p[MAX_CHUNKS];
  int n[MAX_CHUNKS];
  advance(o, p, n, left, across, maps, 1, LINES);
  to += o->slot;
  UNROLL for (int i = 0; i < CHUNKS(LINES); i++)
      copy_16(to + STEP * LINES * 2 / CHUNKS(LINES) * i, p[i], n[i] > 0 ? 16 : 0);
}

/* Chunks on their way through registers, each in two aligned ones: it begins `odd` elements (4 bits) into the first. */
typedef struct {
  uint w[MAX_CHUNKS][8];
  int odd;
} chunks;

/* Begins the loads of chunks of any kind.  An aligned load may touch what stands before the chunk in its 16 bytes,
   which are of the same memory, and nothing behind the line. */
FN void fetch_any(operand *o, chunks *t, int left, int across, int maps, int LINES)
{
  const GLOBAL ST *p[MAX_CHUNKS];
  int n[MAX_CHUNKS];
  advance(o, p, n, left, across, maps, 0, LINES);
  t->odd = 0;
  UNROLL for (int i = 0; i < CHUNKS(LINES); i++)
  {
    const int odd = (int)((ulong)p[i] >> 1 & 7);
    if (o->step == 1 && n[i] + odd >= 16) {
      const uint4 low = load_16(p[i] - odd), high = load_16(p[i] - odd + 8);
      t->w[i][0] = low.x, t->w[i][1] = low.y, t->w[i][2] = low.z, t->w[i][3] = low.w;
      t->w[i][4] = high.x, t->w[i][5] = high.y, t->w[i][6] = high.z, t->w[i][7] = high.w;
      t->odd |= odd << 4 * i;
    } else {
#define PART(j) ((j) < n[i] ? (uint)p[i][(j)*step] : 0u)
      long step = o->step;
      HIDE_LONG(step);
      UNROLL for (int w = 0; w < 4; w++) t->w[i][w] = PART(2 * w) | PART(2 * w + 1) << 16;
#undef PART
    }
  }
}
FN uint either(int first, uint a, uint b)
{
  return first ? a : b;
}
FN void put_chunks(const operand *o, const chunks *t, uint to, int LINES)
{
  UNROLL for (int i = 0; i < CHUNKS(LINES); i++)
  {
    const int odd = t->odd >> 4 * i;
    uint w[8];
    UNROLL for (int j = 0; j < 8; j++) w[j] = t->w[i][j];
    UNROLL for (int j = 0; j < 6; j++) w[j] = either(odd & 4, w[j + 2], w[j]);
    UNROLL for (int j = 0; j < 5; j++) w[j] = either(odd & 2, w[j + 1], w[j]);
    UNROLL for (int j = 0; j < 4; j++) w[j] = (uint)(((ulong)w[j + 1] << 32 | w[j]) >> 16 * (odd & 1));
    put_16(to + o->slot + STEP * LINES * 2 / CHUNKS(LINES) * i, w);
  }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */
/* Where this lane finds its row of the four matrices of lines first..first+15, k 0..15 of a tile.  Their order is that
   of an mma's a (both halves of the lines, then the next 8 k), or of two mma's b (both halves of k, then 8 more lines),
   so that what one mma takes lies in neighbouring registers. */
FN uint fragment_at(int first, int across, int is_b, int LINES)
{
  const int low = WARP_LANE >> 3 & 1, high = WARP_LANE >> 4;
  const int half_line = is_b ? high : low, half_k = is_b ? low : high;
  const int line = first + (WARP_LANE & 7) + 8 * half_line, k = (WARP_LANE & 7) + 8 * half_k;
  if (across) return k * LINES * 2 + first * 2 + ((half_line ^ (WARP_LANE & 7)) << 4);
  return line * STEP * 2 + ((half_k ^ (line >> 1 & 3)) << 4);
}
/* Lines 16i.. from there, k 16h... */
FN void fragment(uint *r, uint tile, uint at, int i, int h, int across, int LINES)
{
  ldmatrix(r, across ? tile + (at ^ 32 * i) + 32 * LINES * h : tile + (at ^ 32 * h) + 32 * STEP * i, across);
}

/* What a warp multiplies at once: its 64 lines of each operand by 16 k. */
typedef struct {
  uint a[4][4], b[4][4];
} fragments;
FN void load_half(fragments *f, uint tiles, uint at_a, uint at_b, int h, int across_a, int across_b)
{
  UNROLL for (int i = 0; i < 4; i++)
  {
    fragment(f->b[i], tiles + A_BYTES, at_b, i, h, across_b, TILE_N);
    fragment(f->a[i], tiles, at_a, i, h, across_a, TILE_M);
  }
}
/* acc[32i + 4j + q] is element q of quad j in the warp's lines 16i.. */
FN void multiply_lines(float *acc, const fragments *f, int i)
{
  UNROLL for (int j = 0; j < 4; j++)
  {
    mma(acc + 32 * i + 8 * j, f->a[i], f->b[j][0], f->b[j][1]);
    mma(acc + 32 * i + 8 * j + 4, f->a[i], f->b[j][2], f->b[j][3]);
  }
}
FN void multiply_half(float *acc, const fragments *f)
{
  UNROLL for (int i = 0; i < 4; i++) multiply_lines(acc, f, i);
}
FN uint before(uint stage, uint tiles)
{
  return stage == tiles ? tiles + (STAGES - 1) * STAGE_BYTES : stage - STAGE_BYTES;
}
FN uint after(uint stage, uint tiles)
{
  return stage == tiles + (STAGES - 1) * STAGE_BYTES ? tiles : stage + STAGE_BYTES;
}

/* acc += a b' over K.  A stage is free once every warp has loaded its second half, which the one barrier of a step
   says, and takes what comes STAGES steps later; the fragments of each half are loaded while the half before is
   multiplied.  Past the last step zeros are copied. */
FN void multiply_wide(float *acc, uint tiles, operand *a, operand *b, int K, int across_a, int across_b, int maps)
{
  uint at_a = fragment_at(64 * WARP_M, across_a, 0, TILE_M), at_b = fragment_at(64 * WARP_N, across_b, 1, TILE_N);
  uint now = tiles;
  int left = K;
  fragments f[2];
  HIDE_INT(at_a);
  HIDE_INT(at_b);
  ROLLED for (int s = 0; s < STAGES; s++)
  {
    fetch_wide(a, tiles + s * STAGE_BYTES, left, across_a, maps, TILE_M);
    fetch_wide(b, tiles + s * STAGE_BYTES + A_BYTES, left, across_b, maps, TILE_N);
    end_group();
    left -= STEP;
  }
  WAIT_GROUP(STAGES - 1);
  BARRIER();
  load_half(&f[0], now, at_a, at_b, 0, across_a, across_b);
  ROLLED for (int steps = (K + STEP - 1) / STEP; steps > 0; steps--)
  {
    load_half(&f[1], now, at_a, at_b, 1, across_a, across_b);
    multiply_half(acc, &f[0]);
    WAIT_GROUP(STAGES - 2);
    BARRIER();
    const uint free = now;
    now = after(now, tiles);
    load_half(&f[0], now, at_a, at_b, 0, across_a, across_b);
    fetch_wide(a, free, left, across_a, maps, TILE_M);
    fetch_wide(b, free + A_BYTES, left, across_b, maps, TILE_N);
    end_group();
    multiply_half(acc, &f[1]);
    left -= STEP;
  }
}

/* The same for chunks of any kind, which are on their way during half of a step's products: b's, of STAGES - 1 steps
   later, during the first half, then a's, of STAGES steps later. */
FN void multiply_any(float *acc, uint tiles, operand *a, operand *b, int K, int across_a, int across_b, int maps)
{
  const uint at_a = fragment_at(64 * WARP_M, across_a, 0, TILE_M);
  const uint at_b = fragment_at(64 * WARP_N, across_b, 1, TILE_N);
  uint now = tiles;
  int left = K;
  fragments f;
  chunks t;
  ROLLED for (int s = 0; s < STAGES; s++)
  {
    fetch_any(a, &t, left, across_a, maps, TILE_M);
    put_chunks(a, &t, tiles + s * STAGE_BYTES, TILE_M);
    if (s < STAGES - 1) {
      fetch_any(b, &t, left, across_b, maps, TILE_N);
      put_chunks(b, &t, tiles + s * STAGE_BYTES + A_BYTES, TILE_N);
      left -= STEP;
    }
  }
  BARRIER();
  while (left + (STAGES - 1) * STEP > 0) {
    load_half(&f, now, at_a, at_b, 0, across_a, across_b);
    fetch_any(b, &t, left, across_b, maps, TILE_N);
    left -= STEP;
    multiply_half(acc, &f);
    put_chunks(b, &t, before(now, tiles) + A_BYTES, TILE_N);
    load_half(&f, now, at_a, at_b, 1, across_a, across_b);
    BARRIER();
    multiply_lines(acc, &f, 0);
    fetch_any(a, &t, left, across_a, maps, TILE_M);
    UNROLL for (int i = 1; i < 4; i++) multiply_lines(acc, &f, i);
    put_chunks(a, &t, now, TILE_M);
    now = after(now, tiles);
  }
}

FN void multiply(float *acc, uint tiles, operand *a, operand *b, int K, int across_a, int across_b, int maps, int wide)
{
  if (wide) multiply_wide(acc, tiles, a, b, K, across_a, across_b, maps);
  else multiply_any(acc, tiles, a, b, K, across_a, across_b, maps);
  wait_all(); /* zeros past the end */
  BARRIER();
}

/* ---- results ----------------------------------------------------------------------------------------------------- */
/* A tile's place in the result: c[m * ms + n * ns] (+)= acc + bias[n * bias_ns], m < rows, n < columns. */
typedef struct {
  GLOBAL uchar *c;
  long at, ms, ns;
  int rows, columns, dt, accumulate;
  const GLOBAL ST *bias; /* or NULL */
  long bias_ns;
} result;

/* Through local memory, 64 lines at a time, so that neighbouring items write neighbouring chunks of a line; where those
   are not aligned, neighbouring elements of a line, or of a column where lines are nearer. */
FN void store_tile(const result *r, const float *acc, LOCAL float *tile)
{
  const int column = LID % (TILE_N / 8) * 8, wide = CHUNK_OK(r->c, r->at, r->dt, r->ms, r->ns), by_m = r->ms < r->ns;
  for (int part = 0; part < TILE_M / 64; part++) {
    if (WARP_M == part) {
      UNROLL for (int q = 0; q < 128; q += 2)
      {
        const int m = q / 32 * 16 + q / 2 % 2 * 8 + WARP_LANE / 4, n = 64 * WARP_N + q / 4 % 8 * 8 + WARP_LANE % 4 * 2;
        float2 pair;
        pair.x = acc[q], pair.y = acc[q + 1];
        *(LOCAL float2 *)(tile + m * TILE_N + (n ^ (m & 7) * 8)) = pair;
      }
    }
    BARRIER();
    const int rows = MIN2(r->rows - 64 * part, 64);
    const long at = r->at + 64 * part * r->ms;
    if (!wide) {
      ROLLED for (int s = LID; s < 64 * TILE_N; s += 4 * GROUP_ITEMS)
      {
        long place[4];
        float v[4];
        UNROLL for (int j = 0; j < 4; j++)
        {
          const int i = s + j * GROUP_ITEMS, m = by_m ? i % 64 : i / TILE_N, n = by_m ? i / 64 : i % TILE_N;
          place[j] = m < rows && n < r->columns ? at + m * r->ms + n * r->ns : -1;
          v[j] = tile[m * TILE_N + (n ^ (m & 7) * 8)];
          if (place[j] >= 0 && r->bias) v[j] += ld(r->bias, n * r->bias_ns);
          if (place[j] >= 0 && r->accumulate) v[j] += ldx(r->c, place[j], r->dt);
        }
        UNROLL for (int j = 0; j < 4; j++) if (place[j] >= 0) stx(r->c, place[j], r->dt, v[j]);
      }
    } else if (column < r->columns) {
      chunk bias;
      UNROLL EACH(j) bias.v[j] = r->bias && column + j < r->columns ? ld(r->bias, (column + j) * r->bias_ns) : 0.0f;
      ROLLED for (int m = LID / (TILE_N / 8); m < rows; m += GROUP_ITEMS / (TILE_N / 8))
      {
        const LOCAL float *from = tile + m * TILE_N + (column ^ (m & 7) * 8);
        const long place = at + m * r->ms + column;
        chunk v, old;
        UNROLL EACH(j) v.v[j] = from[j] + bias.v[j];
        if (r->accumulate) {
          old = ldx_chunk(r->c, place, 1, r->columns - column, 1, r->dt);
          UNROLL EACH(j) v.v[j] += old.v[j];
        }
        stx_chunk(r->c, place, 1, r->columns - column, 1, r->dt, v);
      }
    }
    BARRIER();
  }
}

/* Tile `group` of down x across: 16 rows of tiles at a time, column by column, so that groups that run together share
   both operands in the cache. */
FN void place_of(int group, int down, int across, int *row, int *column)
{
  const int of_band = 16 * across, band = group / of_band, height = MIN2(down - 16 * band, 16);
  *row = 16 * band + group % of_band % height;
  *column = group % of_band / height;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */
/* c[r,n] = sum_k a[map(r),k] b[e(r),n,k] + bias[e(r),n]: a [M,K], b [E,N,K]; e(r) is the expert whose rows hold r.
   SPLIT_N: N is that of one half, columns N..2N-1 are b1's.  SPLIT_K: K is that of one half, k in K..2K-1 is b1's.

   A group takes one tile.  Row tiles begin anew at each expert: tile number t belongs to the last expert e with
   e + offs[e]/128 <= t.  These starts ascend with e, leave each expert room for ceil(rows/128) tiles and end at
   E + R/128, so that a binary search finds the expert and the host need not know the split; tiles past an expert's
   rows end at once.  rows_nt: b's chunks lie along k; rows_nn: along n. */
#define ROWS_PARAMETERS                                                                                                \
  TENSOR(uchar, c), long c_ms, long c_ns, TENSOR(const ST, a), long a_ms, long a_ks, TENSOR(const ST, b0), long b0_es, \
      long b0_ns, long b0_ks, TENSOR(const ST, b1), long b1_es, long b1_ns, long b1_ks, TENSOR(const ST, bias0),       \
      long bias0_es, long bias0_ns, TENSOR(const ST, bias1), long bias1_es, long bias1_ns, TENSOR(const int, offs),    \
      TENSOR(const int, map), long map_mul, int map_shift, long R, int E, long N, long K, int split
#define ROWS_ARGUMENTS                                                                                                 \
  c, c_at, c_ms, c_ns, a, a_at, a_ms, a_ks, b0, b0_at, b0_es, b0_ns, b0_ks, b1, b1_at, b1_es, b1_ns, b1_ks, bias0,     \
      bias0_at, bias0_es, bias0_ns, bias1, bias1_at, bias1_es, bias1_ns, offs, offs_at, map, map_at, map_mul,          \
      map_shift, R, E, N, K, split
#define SPLIT_N 1
#define SPLIT_K 2

FN void products(ROWS_PARAMETERS, LOCAL uint4 *tiles, int across_b, int wide)
{
  AT(a);
  AT(b0);
  AT_OPT(b1);
  AT_OPT(bias0);
  AT_OPT(bias1);
  AT(offs);
  AT_OPT(map);
  const int columns_of = (int)((N + TILE_N - 1) / TILE_N);
  int row_tile, column_tile, e = 0, last = E - 1;
  place_of((int)GROUP(0), E + (int)(R / TILE_M), columns_of * (split == SPLIT_N ? 2 : 1), &row_tile, &column_tile);
  while (e < last) {
    const int middle = e + (last - e + 1) / 2;
    if (middle + offs[middle] / TILE_M <= row_tile) e = middle;
    else last = middle - 1;
  }
  const int second = column_tile >= columns_of;
  const long begin = offs[e] + (long)(row_tile - e - offs[e] / TILE_M) * TILE_M;
  if (begin < offs[e + 1]) {
    result r;
    operand oa, ob;
    float acc[128];
    int m0 = (int)begin, n0 = (column_tile - second * columns_of) * TILE_N;
    const int rows = MIN2(offs[e + 1] - m0, TILE_M), columns = (int)MIN2(N - n0, TILE_N);
    const row_map mapped = map_of(map, map_mul, map_shift), none = map_of(0, 0, 0);
    UNROLL for (int i = 0; i < 128; i++) acc[i] = 0.0f;
    ROLLED for (int part = 0; part < (split == SPLIT_K ? 2 : 1); part++)
    {
      const int which = second + part;
      const GLOBAL ST *b = which ? b1 : b0;
      const long es = which ? b1_es : b0_es, ns = which ? b1_ns : b0_ns, ks = which ? b1_ks : b0_ks;
      operand_of(&oa, a + part * K * a_ks, a_ms, a_ks, m0, rows, &mapped, 0, wide, TILE_M);
      operand_of(&ob, b + e * es, ns, ks, n0, columns, &none, across_b, wide, TILE_N);
      multiply(acc, LOCAL_ADDRESS(tiles), &oa, &ob, (int)K, 0, across_b, 0, wide);
    }
    HIDE_INT(m0);
    HIDE_INT(n0);
    r.c = c, r.at = c_at + m0 * c_ms + (second * N + n0) * c_ns, r.ms = c_ms, r.ns = c_ns;
    r.rows = MIN2(offs[e + 1] - m0, TILE_M), r.columns = (int)MIN2(N - n0, TILE_N);
    r.dt = DT_ST, r.accumulate = 0;
    r.bias_ns = second ? bias1_ns : bias0_ns;
    r.bias = second ? bias1 : bias0;
    if (r.bias) r.bias += e * (second ? bias1_es : bias0_es) + n0 * r.bias_ns;
    store_tile(&r, acc, (LOCAL float *)tiles);
  }
}

KERNEL(LOCAL_SIZE(GROUP_ITEMS) rows_nt)(ROWS_PARAMETERS)
{
  TILES(tiles);
  products(ROWS_ARGUMENTS, tiles, 0, 1);
}
KERNEL(LOCAL_SIZE(GROUP_ITEMS) rows_nn)(ROWS_PARAMETERS)
{
  TILES(tiles);
  products(ROWS_ARGUMENTS, tiles, 1, 1);
}
KERNEL(LOCAL_SIZE(GROUP_ITEMS) rows_nt_any)(ROWS_PARAMETERS)
{
  TILES(tiles);
  products(ROWS_ARGUMENTS, tiles, 0, 0);
}
KERNEL(LOCAL_SIZE(GROUP_ITEMS) rows_nn_any)(ROWS_PARAMETERS)
{
  TILES(tiles);
  products(ROWS_ARGUMENTS, tiles, 1, 0);
}

/* ---- wgrad ------------------------------------------------------------------------------------------------------- */
/* c[e,m,n] (+)= sum over rows r of e of p[pmap(r),m] q[qmap(r),n]: k goes over the expert's rows.  An expert without
   rows gives 0.  parts = 2: M is that of one half, p's columns M..2M-1 go to c1.
   A group takes one tile of one expert and reads p and q of its rows once; map entries are loaded one step ahead of
   the rows. */
#define WGRAD_PARAMETERS                                                                                               \
  TENSOR(uchar, c0), long c0_es, long c0_ms, long c0_ns, TENSOR(uchar, c1), long c1_es, long c1_ms, long c1_ns,        \
      int c_dt, TENSOR(const ST, p), long p_rs, long p_ms, TENSOR(const ST, q), long q_rs, long q_ns,                  \
      TENSOR(const int, offs), TENSOR(const int, pmap), long pmap_mul, int pmap_shift, TENSOR(const int, qmap),        \
      long qmap_mul, int qmap_shift, long M, long N, int parts, int accumulate
#define WGRAD_ARGUMENTS                                                                                                \
  c0, c0_at, c0_es, c0_ms, c0_ns, c1, c1_at, c1_es, c1_ms, c1_ns, c_dt, p, p_at, p_rs, p_ms, q, q_at, q_rs, q_ns,      \
      offs, offs_at, pmap, pmap_at, pmap_mul, pmap_shift, qmap, qmap_at, qmap_mul, qmap_shift, M, N, parts, accumulate

FN void gradients(WGRAD_PARAMETERS, LOCAL uint4 *tiles, int wide)
{
  AT_OPT(p);
  AT_OPT(q);
  AT(offs);
  AT_OPT(pmap);
  AT_OPT(qmap);
  const int down = (int)((M + TILE_M - 1) / TILE_M), across = (int)((N + TILE_N - 1) / TILE_N), group = (int)GROUP(0);
  const long e = group / (down * parts * across);
  int row_tile, column_tile;
  place_of(group % (down * parts * across), down * parts, across, &row_tile, &column_tile);
  const int second = row_tile >= down;
  const int m0 = (row_tile - second * down) * TILE_M, n0 = column_tile * TILE_N;
  const int begin = offs[e], K = offs[e + 1] - begin;
  if (K > 0 || !accumulate) {
    result r;
    operand oa, ob;
    float acc[128];
    r.rows = (int)MIN2(M - m0, TILE_M), r.columns = (int)MIN2(N - n0, TILE_N);
    const row_map pm = map_of(pmap, pmap_mul, pmap_shift), qm = map_of(qmap, qmap_mul, qmap_shift);
    UNROLL for (int i = 0; i < 128; i++) acc[i] = 0.0f;
    operand_of(&oa, pmap ? p : p + begin * p_rs, p_ms, p_rs, second * M + m0, r.rows, &pm, 1, wide, TILE_M);
    operand_of(&ob, qmap ? q : q + begin * q_rs, q_ns, q_rs, n0, r.columns, &qm, 1, wide, TILE_N);
    along_map(&oa, &pm, begin, K, TILE_M);
    along_map(&ob, &qm, begin, K, TILE_N);
    multiply(acc, LOCAL_ADDRESS(tiles), &oa, &ob, K, 1, 1, 1, wide);
    r.c = second ? c1 : c0, r.ms = second ? c1_ms : c0_ms, r.ns = second ? c1_ns : c0_ns, r.dt = c_dt;
    r.at = (second ? c1_at + e * c1_es : c0_at + e * c0_es) + m0 * r.ms + n0 * r.ns;
    r.accumulate = accumulate;
    r.bias = 0, r.bias_ns = 0;
    store_tile(&r, acc, (LOCAL float *)tiles);
  }
}

KERNEL(LOCAL_SIZE(GROUP_ITEMS) wgrad)(WGRAD_PARAMETERS)
{
  TILES(tiles);
  gradients(WGRAD_ARGUMENTS, tiles, 1);
}
KERNEL(LOCAL_SIZE(GROUP_ITEMS) wgrad_any)(WGRAD_PARAMETERS)
{
  TILES(tiles);
  gradients(WGRAD_ARGUMENTS, tiles, 0);
}
