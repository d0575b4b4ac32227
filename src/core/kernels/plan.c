/* plan.c - launches the kernels of plan.cl. */
#include "core/kernels/kernels.h"

/* ---- two launches: chunks of tokens ------------------------------------------------------------------------------ */
/* Chunks are of so many slots or more; what a GPU has multiprocessors.  Each group adds up the table of all. */
enum { FEW_EXPERTS = 1024, SLOTS = 512, GROUPS = 128, CPU_GROUPS = 16 };
static int64_t few_chunks(int64_t R, int64_t most)
{
  const int64_t chunks = moe__ceil_div(R, SLOTS);
  return chunks < 1 ? 1 : chunks < most ? chunks : most;
}

/* EXPERTS of plan.cl */
static int64_t few_experts(const struct moe__dev_info *info)
{
  return info->pub.local_memory < 40960 ? FEW_EXPERTS / 2 : FEW_EXPERTS;
}

static moe_status plan_few(moe_queue *q, const struct moe__args_plan *args)
{
  static const struct moe__kernel COUNT = { "plan", "plan_count" }, PLACE = { "plan", "plan_place" };
  const int64_t dtype = moe__real(args->dtype), R = args->T * args->K;
  const int local = q->ctx->info->reduce_local;
  int64_t chunks = few_chunks(R, q->ctx->info->pub.kind == MOE_DEVICE_CPU ? CPU_GROUPS : GROUPS);
  const int64_t length = args->T ? moe__ceil_div(args->T, chunks) : 1; /* tokens */
  if (args->T) chunks = moe__ceil_div(args->T, length);
  MOE__TRY(LAUNCH(q, &COUNT, dtype, chunks, 1, 1, local, T_(args->slot2row), T_(args->scratch), T_(args->ids),
                  T_(args->weights), T_(args->health), L_(args->T), I_(args->K), I_(args->E), L_(length)));
  return LAUNCH(q, &PLACE, dtype, chunks, 1, 1, local, T_(args->row2slot), T_(args->slot2row), T_(args->offs),
                T_(args->scratch), T_(args->ids), L_(R), I_(args->E), I_(chunks), L_(length * args->K));
}

/* ---- five launches ----------------------------------------------------------------------------------------------- */
/* Runs of neighbouring slots that are counted apart: 256 slots or more each, and a table [E, chunks] of at most
   2^20 counts (one run where E alone is more). */
enum { LENGTH = 256, MOST_CHUNKS = 4096, CELLS = 1 << 20 };
static int64_t chunks_of(int64_t R, int64_t E)
{
  int64_t chunks = moe__ceil_div(R, LENGTH);
  if (chunks > MOST_CHUNKS) chunks = MOST_CHUNKS;
  if (chunks > CELLS / E) chunks = CELLS / E;
  return chunks > 1 ? chunks : 1;
}

int64_t moe__plan_scratch(int64_t R, int64_t E)
{
  const int64_t many = E * chunks_of(R, E), few = E <= FEW_EXPERTS ? E * few_chunks(R, GROUPS) : 0;
  return many > few ? many : few;
}

static moe_status plan_many(moe_queue *q, const struct moe__args_plan *args)
{
  static const struct moe__kernel CHECK = { "plan", "plan_check" }, RANKS = { "plan", "plan_ranks" },
                                  SCAN = { "plan", "plan_scan" }, OFFSETS = { "plan", "plan_offsets" },
                                  ROWS = { "plan", "plan_rows" };
  const int64_t dtype = moe__real(args->dtype), E = args->E, R = args->T * args->K;
  const int64_t chunks = chunks_of(R, E), length = moe__ceil_div(R, chunks);
  const int local = q->ctx->info->reduce_local, map = moe__map_local(q);
  const int tile = local < 128 ? local : 128; /* costs its square in compares */
  int lanes = 1;
  while (lanes < local && lanes * 8 < chunks) lanes *= 2;

  MOE__TRY(LAUNCH(q, &CHECK, dtype, moe__map_groups(q, args->T > E * chunks ? args->T : E * chunks), 1, 1, map,
                  T_(args->slot2row), T_(args->scratch), T_(args->ids), T_(args->weights), T_(args->health),
                  L_(args->T), I_(args->K), I_(E), L_(E * chunks)));
  MOE__TRY(LAUNCH(q, &RANKS, dtype, R ? chunks : 0, 1, 1, tile, T_(args->slot2row), T_(args->scratch), L_(R),
                  L_(length), L_(chunks)));
  MOE__TRY(LAUNCH(q, &SCAN, dtype, moe__row_groups(q, E, lanes), 1, 1, local, T_(args->scratch), T_(args->offs), I_(E),
                  I_(chunks), I_(lanes)));
  MOE__TRY(LAUNCH(q, &OFFSETS, dtype, 1, 1, 1, local, T_(args->offs), I_(E)));
  return LAUNCH(q, &ROWS, dtype, moe__map_groups(q, R), 1, 1, map, T_(args->row2slot), T_(args->slot2row),
                T_(args->offs), T_(args->scratch), T_(args->ids), L_(R), I_(E), L_(length), L_(chunks));
}

static moe_status run_plan(moe_queue *q, const struct moe__args_plan *args)
{
  return args->E <= few_experts(q->ctx->info) ? plan_few(q, args) : plan_many(q, args);
}
MOE__PORTABLE_IMPL(plan, "plan")
