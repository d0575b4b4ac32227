/* plan.cl - the plan: a stable counting sort of the R = T*K slots by expert, in five launches and no readback.

   The slots are cut into `chunks` runs of `length` neighbours.  table[e,c], [E,chunks], first counts the slots of
   chunk c that chose e, then holds what the chunks before c have of e.  Then
     row of slot i = offs[e] + table[e,c] + (rank of i among the slots of chunk c with expert e)
   which is ascending in i inside an expert: stable, and the same on every device.  slot2row carries a slot's
   expert (after `check`) and its rank (after `ranks`) on its way to the row.
   A sort by global atomics, the obvious version, needs a second sort to be stable; a look-back scan in one launch
   needs progress between groups, which OpenCL does not promise. */
#ifndef MOE_CUDA
#pragma OPENCL FP_CONTRACT OFF
#endif

#define HEALTH_ROUTE 1
#define HEALTH_ID 2

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
    int bad = 0;
    for (long i = t * K; i < (t + 1) * K; i++) {
      if (ids[i] < 0 || ids[i] >= E) bad |= HEALTH_ID;
      if (weights && !IS_FINITE(weights[i])) bad |= HEALTH_ROUTE;
    }
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
