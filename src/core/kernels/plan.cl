/* plan.cl - the plan: a stable counting sort of the R = T*K slots by expert, in a few launches and no readback.

   The slots are cut into `chunks` runs of neighbours.  A table first counts the slots of each chunk that chose each
   expert, then tells what the chunks before it have of it.  Then
     row of slot i = offs[e] + (expert's slots in the chunks before) + (rank of i among the chunk's slots of e)
   which is ascending in i inside an expert: stable, and the same on every device.  slot2row carries a slot's rank on
   its way to the row.  Up to EXPERTS experts, whose counts have room in local memory, it is two launches (plan_count,
   plan_place), above five.
   A sort by global atomics, the obvious version, needs a second sort to be stable; a look-back scan in one launch
   needs progress between groups, which OpenCL does not promise. */
#ifndef MOE_CUDA
#pragma OPENCL FP_CONTRACT OFF
#endif

#define HEALTH_ROUTE 1
#define HEALTH_ID 2

/* Why token t leaves the plan: health bits, 0 where it does not. */
FN int token_fault(const GLOBAL int *ids, const GLOBAL REAL *weights, long t, int K, int E)
{
  int bad = 0;
  UNROLL_BY(1) for (long i = t * K; i < (t + 1) * K; i++) {
    if (ids[i] < 0 || ids[i] >= E) bad |= HEALTH_ID;
    if (weights && !IS_FINITE(weights[i])) bad |= HEALTH_ROUTE;
  }
  return bad;
}

/* Exclusive sum of `value` over the lanes before this one; `buf` is LOCAL_ARRAY(int, buf, 256). */
#define SUM_BEFORE(result, value, buf, lane, lanes)                                                                    \
  do {                                                                                                                 \
    GROUP_BARRIER();                                                                                                   \
    buf[LID] = (value);                                                                                                \
    for (int h_ = 1; h_ < (lanes); h_ <<= 1) {                                                                         \
      GROUP_BARRIER();                                                                                                 \
      const int add_ = (lane) >= h_ ? buf[LID - h_] : 0;                                                               \
      GROUP_BARRIER();                                                                                                 \
      buf[LID] += add_;                                                                                                \
    }                                                                                                                  \
    result = buf[LID] - (value);                                                                                       \
  } while (0)

/* ---- up to EXPERTS experts: two launches ---------------------------------------------------------------------- */
#if defined(MOE_LOCAL_BYTES) && MOE_LOCAL_BYTES < 40960
#define EXPERTS 512
#else
#define EXPERTS 1024
#endif
/* Items that take a run of neighbouring slots together, so many at a time; a group has STRANDS of them. */
#ifdef MOE_CPU
#define STRAND 1
#define STRANDS 1
#else
#define STRAND 32
#define STRANDS 8
#endif
/* mask: which items of the strand have the same e. */
#ifdef MOE_PTX
#define STRAND_BARRIER() WARP_BARRIER()
#define STRAND_MATCH(mask, e, tile) mask = warp_match(e)
#else
#define STRAND_BARRIER() GROUP_BARRIER()
#define STRAND_MATCH(mask, e, tile)                                                                                    \
  do {                                                                                                                 \
    tile[LID] = (e);                                                                                                   \
    GROUP_BARRIER();                                                                                                   \
    mask = 0;                                                                                                          \
    for (int j_ = 0; j_ < STRAND; j_++) mask |= (uint)(tile[LID / STRAND * STRAND + j_] == (e)) << j_;                 \
  } while (0)
#endif

/* Group c, over tokens [c*length, (c+1)*length): table[c,e] = its slots with expert e; slot2row[i] = rank of slot i
   among them, -1 for the slots of a token that leaves the plan.  A strand takes a run of neighbouring slots: first all
   are counted, in integers, whose sum knows no order; the sums of the strands before give where each begins; then the
   strands go through their runs, so many slots at once as they have items, which find their like by comparing.  Tokens
   are looked at one by one only in a group in which some slot is bad; slot2row then says which leave.
   Bytes: ids three times (from cache but once), weights, slot2row, the table. */
KERNEL(plan_count)(TENSOR(int, slot2row), TENSOR(int, table), TENSOR(const int, ids), TENSOR(const REAL, weights),
                   TENSOR(int, health), long T, int K, int E, long length)
{
  LOCAL_ARRAY(int, counts, STRANDS * EXPERTS);
  LOCAL_ARRAY(int, spoiled, 1);
#ifndef MOE_PTX
  LOCAL_ARRAY(int, tile, 256);
#endif
  AT(slot2row);
  AT(table);
  AT(ids);
  AT_OPT(weights);
  AT_OPT(health);
  const long first = GROUP(0) * length, last = MIN2(T, first + length);
  const int n = last > first ? (int)((last - first) * K) : 0;
  const int lane = LID % STRAND, run = (n + LSIZE - 1) / LSIZE * STRAND, from = LID / STRAND * run + lane;
  const int until = MIN2(LID / STRAND * run + run, n);
  LOCAL int *count = counts + LID / STRAND * E;
  slot2row += first * K;
  ids += first * K;
  if (weights) weights += first * K;

  UNROLL_BY(1) for (int i = LID; i < STRANDS * E; i += LSIZE) counts[i] = 0;
  if (LID == 0) spoiled[0] = 0;
  GROUP_BARRIER();
  int bad = 0;
  UNROLL_BY(8) for (int i = from; i < until; i += STRAND) {
    bad |= ids[i] < 0 || ids[i] >= E;
    if (weights) bad |= !IS_FINITE(weights[i]);
  }
  if (bad) spoiled[0] = 1;
  GROUP_BARRIER();
  const int ask = spoiled[0];
  UNROLL_BY(1) for (long t = LID; ask && t < last - first; t += LSIZE) {
    const int fault = token_fault(ids, weights, t, K, E);
    UNROLL_BY(1) for (long i = t * K; i < (t + 1) * K; i++) slot2row[i] = fault ? -1 : 0;
    if (fault && health) ATOMIC_OR(health, fault);
  }
  GROUP_BARRIER_GLOBAL();
#define EXPERT_OF(i) ((i) >= until || (ask && slot2row[i] < 0) ? -1 : ids[i])
#if STRANDS > 1
  UNROLL_BY(8) for (int i = from; i < until; i += STRAND) {
    const int e = EXPERT_OF(i);
    if (e >= 0) atomic_inc(&count[e]);
  }
  GROUP_BARRIER();
  UNROLL_BY(1) for (int e = LID; e < E; e += LSIZE) {
    int sum = 0;
    for (int s = 0; s < STRANDS; s++) {
      const int own = counts[s * E + e];
      counts[s * E + e] = sum;
      sum += own;
    }
    table[GROUP(0) * E + e] = sum;
  }
  GROUP_BARRIER();
#endif
  int e = EXPERT_OF(from);
  for (int j = 0; j < run; j += STRAND) {
    const int i = from + j, next = EXPERT_OF(i + STRAND);
    uint mask;
    STRAND_MATCH(mask, e, tile);
    const int rank = e < 0 ? -1 : count[e] + popcount(mask & ((1u << lane) - 1));
    STRAND_BARRIER();
    if (e >= 0 && mask >> lane == 1) count[e] = rank + 1;
    STRAND_BARRIER();
    if (i < until) slot2row[i] = rank;
    e = next;
  }
#if STRANDS == 1
  for (int x = 0; x < E; x++) table[GROUP(0) * E + x] = counts[x];
#endif
}

/* Group c finds where each expert begins and what the chunks before c have of it, and puts the slots
   [c*length, (c+1)*length) into their rows: slot2row, and row2slot, its inverse, -1 past the last row.  The first
   group also stores offs.  Every group adds up the whole table, from cache: a launch of its own for the sums costs more.
   Bytes: slot2row twice, ids and row2slot (scattered) once, the table. */
KERNEL(plan_place)(TENSOR(int, row2slot), TENSOR(int, slot2row), TENSOR(int, offs), TENSOR(const int, table),
                   TENSOR(const int, ids), long R, int E, int chunks, long length)
{
  LOCAL_ARRAY(int, total, EXPERTS);
  LOCAL_ARRAY(int, start, EXPERTS);
  LOCAL_ARRAY(int, buf, 256);
  AT(row2slot);
  AT(slot2row);
  AT(offs);
  AT(table);
  AT(ids);
  const int chunk = (int)GROUP(0), parts = MAX2(1, LSIZE / E);
  UNROLL_BY(1) for (int e = LID; e < E; e += LSIZE) total[e] = start[e] = 0;
  GROUP_BARRIER();
  for (int x = LID; x < parts * E; x += LSIZE) {
    const int e = x % E;
    int all = 0, before = 0;
    UNROLL_BY(32) for (int c = x / E; c < chunks; c += parts) { /* latencies of L2, one for 32 loads */
      const int own = table[c * E + e];
      all += own;
      before += c < chunk ? own : 0;
    }
    atomic_add(&total[e], all);
    atomic_add(&start[e], before);
  }
  GROUP_BARRIER();
  const int run = (E + LSIZE - 1) / LSIZE, begin = MIN2(LID * run, E), end = MIN2(begin + run, E);
  int sum = 0, before;
  UNROLL_BY(1) for (int e = begin; e < end; e++) sum += total[e];
  SUM_BEFORE(before, sum, buf, LID, LSIZE);
  UNROLL_BY(1) for (int e = begin; e < end; e++) {
    start[e] += before;
    before += total[e];
    if (chunk == 0) offs[e + 1] = before;
  }
  if (chunk == 0 && LID == 0) offs[0] = 0;
  GROUP_BARRIER();
  const int rows = buf[LSIZE - 1];
  const long until = MIN2(R, (chunk + 1) * length);
  for (long first = chunk * length + LID; first < until; first += 8 * LSIZE) {
    int e[8], rank[8]; /* all on their way at once */
    UNROLL for (int u = 0; u < 8; u++) {
      const long i = MIN2(first + u * LSIZE, until - 1);
      e[u] = ids[i];
      rank[u] = slot2row[i];
    }
    UNROLL for (int u = 0; u < 8; u++) {
      const long i = first + u * LSIZE;
      if (i < until) {
        const int row = rank[u] < 0 ? -1 : start[e[u]] + rank[u];
        slot2row[i] = row;
        if (row >= 0) row2slot[row] = (int)i;
        if (i >= rows) row2slot[i] = -1;
      }
    }
  }
}

/* ---- more experts: five launches ---------------------------------------------------------------------------------
   table[e,c], [E,chunks]; slot2row carries a slot's expert (after `check`) and its rank (after `ranks`). */
/* slot2row[t,k] = ids[t,k], or -1 for a token that leaves the plan: an id outside [0,E) or a weight that is not
   finite.  An item takes a token at a time.  Clears the table, a run of cells a group.  Bytes: ids, weights, slot2row,
   table once. */
KERNEL(plan_check)(TENSOR(int, slot2row), TENSOR(int, table), TENSOR(const int, ids), TENSOR(const REAL, weights),
                   TENSOR(int, health), long T, int K, int E, long cells)
{
  AT(slot2row);
  AT(table);
  AT(ids);
  AT_OPT(weights);
  AT_OPT(health);
  for (long t = GID; t < T; t += GSIZE) {
    const int bad = token_fault(ids, weights, t, K, E);
    for (long i = t * K; i < (t + 1) * K; i++) slot2row[i] = bad ? -1 : ids[i];
    if (bad && health) ATOMIC_OR(health, bad);
  }
  const long run = (cells + GROUPS(0) - 1) / GROUPS(0), end = MIN2((GROUP(0) + 1) * run, cells);
  for (long i = GROUP(0) * run + LID; i < end; i += LSIZE) table[i] = 0;
}

/* Group c: table[e,c] = slots of chunk c with expert e; slot2row[i] = rank of slot i among them.  The chunk goes by
   tiles of LSIZE slots: an item compares its expert with all others of the tile in local memory, adds what the
   table has from the tiles before, and the last one of an expert writes the new count.  LSIZE compares a slot (none
   with groups of one item: then this is the serial loop), no atomics, no histogram whose size would limit E.
   Bytes: slot2row read and written; the table twice a tile, scattered, in cache. */
KERNEL(plan_ranks)(TENSOR(int, slot2row), TENSOR(int, table), long R, long length, long chunks)
{
  LOCAL_ARRAY(int, tile, 256);
  AT(slot2row);
  AT(table);
  const long c = GROUP(0), end = MIN2((c + 1) * length, R);
  for (long begin = c * length; begin < end; begin += LSIZE) {
    const long i = begin + LID;
    const int e = i < end ? slot2row[i] : -1;
    int rank = 0, later = 0;
    tile[LID] = e;
    GROUP_BARRIER_GLOBAL();
    for (int j = 0; j < LID; j++) rank += tile[j] == e;
    for (int j = LID + 1; j < LSIZE; j++) later |= tile[j] == e;
    if (e >= 0) {
      rank += table[e * chunks + c];
      slot2row[i] = rank;
    }
    GROUP_BARRIER_GLOBAL();
    if (e >= 0 && !later) table[e * chunks + c] = rank + 1;
  }
}

/* table[e,:] becomes its exclusive sum over the chunks, offs[e+1] its total.  `lanes` items share an expert, each
   with a run of neighbouring chunks.  Bytes: the table twice. */
KERNEL(plan_scan)(TENSOR(int, table), TENSOR(int, offs), int E, int chunks, int lanes)
{
  LOCAL_ARRAY(int, buf, 256);
  AT(table);
  AT(offs);
  const int lane = LANE(lanes), run = (chunks + lanes - 1) / lanes;
  const int begin = MIN2(lane * run, chunks), end = MIN2(begin + run, chunks);
  const long e = ROW(lanes);
  GLOBAL int *row = table + (e < E ? e : 0) * chunks;
  int sum = 0, before;
  if (e < E)
    for (int c = begin; c < end; c++) sum += row[c];
  SUM_BEFORE(before, sum, buf, lane, lanes);
  if (e >= E) return;
  if (lane == lanes - 1) offs[e + 1] = before + sum;
  for (int c = begin; c < end; c++) {
    const int count = row[c];
    row[c] = before;
    before += count;
  }
}

/* offs[1..E], totals, become their inclusive sum; offs[0] = 0.  One group; an item takes a run of experts. */
KERNEL(plan_offsets)(TENSOR(int, offs), int E)
{
  LOCAL_ARRAY(int, buf, 256);
  AT(offs);
  const int run = (E + LSIZE - 1) / LSIZE, begin = MIN2(LID * run, E), end = MIN2(begin + run, E);
  int sum = 0, before;
  for (int e = begin; e < end; e++) sum += offs[e + 1];
  SUM_BEFORE(before, sum, buf, LID, LSIZE);
  for (int e = begin; e < end; e++) {
    before += offs[e + 1];
    offs[e + 1] = before;
  }
  if (LID == 0) offs[0] = 0;
}

/* slot2row[i] and row2slot, its inverse; -1 in slots that are not in the plan and in rows past the last.  A map over
   the slots.  Bytes: slot2row twice, ids once, row2slot once (scattered), table and offs from cache. */
KERNEL(plan_rows)(TENSOR(int, row2slot), TENSOR(int, slot2row), TENSOR(const int, offs), TENSOR(const int, table),
                  TENSOR(const int, ids), long R, int E, long length, long chunks)
{
  AT(row2slot);
  AT(slot2row);
  AT(offs);
  AT(table);
  AT(ids);
  const int rows = offs[E];
  for (long i = GID; i < R; i += GSIZE) {
    if (slot2row[i] >= 0) {
      const int e = ids[i], row = offs[e] + table[e * chunks + (uint)i / (uint)length] + slot2row[i];
      slot2row[i] = row;
      row2slot[row] = (int)i;
    }
    if (i >= rows) row2slot[i] = -1;
  }
}
