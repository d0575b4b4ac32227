/* stats.c - launches the kernels of stats.cl. */
#include "core/kernels/kernels.h"
#include "core/convert.h"

#define TILE 16384 /* as in stats.cl */

/* Bits of the smallest magnitude of that dtype that is >= limit; infinity's where no other is. */
static int64_t limit_bits(int64_t dtype, double limit)
{
  int64_t low = 0, high = dtype == MOE_F32 ? 0x7f800000 : dtype == MOE_BF16 ? 0x7f80 : 0x7c00;
  if (dtype == MOE_F64) return memcpy(&high, &limit, sizeof high), high;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    const uint32_t word = (uint32_t)middle;
    const uint16_t half = (uint16_t)middle;
    if (moe__to_double(dtype == MOE_F32 ? (const void *)&word : &half, dtype, 0) >= limit) high = middle;
    else low = middle + 1;
  }
  return high;
}

static moe_status run_watch(moe_queue *q, const struct moe__args_watch *args)
{
  static const struct moe__kernel SEARCH = { "stats", "watch" }, FOLD = { "stats", "watch_fold" };
  enum { BEFORE = 6 };
  struct moe__karg search[BEFORE + 3 * MOE__WATCHED], fold[2 + MOE__WATCHED] = { T_(args->record), T_(args->scratch) };
  int64_t tiles = 0;
  for (int i = 0; i < MOE__WATCHED; i++) {
    const moe_tensor *a = &args->a[i];
    const int64_t n = a->handle ? a->shape[0] : 0;
    struct moe__karg *arg = search + BEFORE + 3 * i;
    tiles += moe__ceil_div(n * (int64_t)moe_dtype_size(a->dtype), TILE);
    arg[0] = T_(*a);
    arg[1] = I_(a->dtype);
    arg[2] = L_(n);
    fold[2 + i] = L_(args->tag[i]);
  }
  if (!tiles) return MOE_OK;
  search[0] = T_(args->scratch);
  search[1] = L_(tiles);
  for (int64_t dtype = MOE_F64; dtype <= MOE_F16; dtype++) search[1 + dtype] = L_(limit_bits(dtype, args->limit));
  const int64_t full = moe__map_groups(q, tiles * moe__map_local(q));
  MOE__TRY(moe__launch(q, &SEARCH, MOE_F32, full, 1, 1, q->ctx->info->reduce_local, search, BEFORE + 3 * MOE__WATCHED));
  return moe__launch(q, &FOLD, MOE_F32, 1, 1, 1, 1, fold, 2 + MOE__WATCHED);
}
MOE__PORTABLE_IMPL(watch, "stats")
