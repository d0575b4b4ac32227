/* plan.c - cases of the plan: sizes, skew, unknown ids, weights that are not finite. */
#include "conform.h"

struct how {
  int64_t T, K, E;
  int pattern, weighted, bad;
};

static void one(struct conform *c, int64_t dtype, struct how h)
{
  if (!c_begin(c, dtype, "T=%lld K=%lld E=%lld pattern=%d%s%s", (long long)h.T, (long long)h.K, (long long)h.E,
               h.pattern, h.weighted ? " weights" : "", h.bad ? " bad tokens" : ""))
    return;
  struct moe__args_plan args = { .dtype = dtype, .T = h.T, .K = h.K, .E = h.E };
  int64_t R = h.T * h.K;
  int32_t *ids = c_ids(c, h.T, h.K, h.E, h.pattern), health = 0;
  int32_t *offs = t_ints(&c->m, h.E + 1), *row2slot = t_ints(&c->m, R), *slot2row = t_ints(&c->m, R);
  num *weights = t_uniform(&c->m, R, c_real(dtype), 1);
  for (int64_t i = 0; i < R && h.bad; i += 1 + t_below(&c->m, 7)) {
    int64_t what = t_below(&c->m, h.weighted ? 5 : 3);
    if (what == 0) ids[i] = -1;
    else if (what == 1) ids[i] = (int32_t)h.E;
    else if (what == 2) ids[i] = INT32_MAX;
    else weights[i].v = what == 3 ? NAN : -INFINITY;
  }
  args.ids = c_in_ints(c, ids, SHAPE(h.T, h.K));
  if (h.weighted) args.weights = c_in(c, c_real(dtype), T_ODD, weights, SHAPE(h.T, h.K));
  args.offs = c_out(c, MOE_I32, T_ODD, SHAPE(h.E + 1));
  args.row2slot = c_out(c, MOE_I32, T_PACKED, SHAPE(R));
  args.slot2row = c_out(c, MOE_I32, T_PACKED, SHAPE(R));
  args.scratch = c_out(c, MOE_I32, T_PACKED, SHAPE(moe__plan_scratch(R, h.E)));
  args.health = c_health(c);
  if (c_run_plan(c, &args)) {
    ref_plan(offs, row2slot, slot2row, &health, ids, h.weighted ? weights : NULL, h.T, h.K, h.E);
    c_check_ints(c, "offs", &args.offs, offs);
    c_check_ints(c, "row2slot", &args.row2slot, row2slot);
    c_check_ints(c, "slot2row", &args.slot2row, slot2row);
    c_check_ints(c, "health", &args.health, &health);
  }
  c_end(c);
}

void conform_plan(struct conform *c)
{
  static const struct how small[] = {
    { 0, 2, 8, 0, 1, 0 },  { 1, 1, 1, 0, 0, 0 },  { 1, 8, 8, 0, 1, 0 },    { 2, 3, 7, 1, 0, 0 }, { 33, 2, 8, 0, 1, 0 },
    { 63, 1, 3, 0, 1, 1 }, { 64, 2, 4, 2, 0, 0 }, { 65, 2, 129, 0, 1, 1 }, { 9, 4, 4, 0, 0, 1 }, { 31, 1, 1, 0, 1, 1 },
  };
  static const struct how middle[] = {
    { 255, 1, 16, 0, 1, 0 }, { 256, 1, 16, 1, 1, 0 },  { 257, 1, 16, 2, 1, 1 }, { 127, 8, 64, 0, 1, 1 },
    { 129, 8, 8, 0, 0, 0 },  { 1000, 1, 64, 1, 1, 0 }, { 99, 2, 257, 0, 1, 0 }, { 513, 2, 256, 0, 1, 1 },
    { 64, 2, 512, 0, 0, 0 }, { 700, 6, 160, 0, 1, 1 }, { 2048, 2, 8, 0, 1, 0 }, { 1, 1, 1000, 0, 0, 0 },
    { 1025, 1, 2, 2, 0, 0 }, { 511, 3, 255, 1, 1, 1 },
  };
  static const struct how large[] = {
    { 9001, 8, 256, 0, 1, 1 }, { 40000, 2, 64, 1, 0, 0 }, { 131073, 1, 8, 0, 1, 1 }, { 4096, 8, 1024, 0, 1, 0 }
  };
  for (int64_t d = 0; d < 2; d++) {
    int64_t dtype = c_dtypes[d];
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) one(c, dtype, small[i]);
    for (size_t i = 0; i < sizeof middle / sizeof *middle && c->effort != SMALL; i++) one(c, dtype, middle[i]);
    if (c->effort == SHORT) one(c, dtype, large[0]);
    for (size_t i = 0; i < sizeof large / sizeof *large && c->effort == LONG; i++) one(c, dtype, large[i]);
  }
}
