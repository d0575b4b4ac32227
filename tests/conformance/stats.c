/* stats.c - cases of the search for values that are not finite: every kind of bad value and the largest good one, at
   the first, the last and inner elements, in tensors of every dtype, aligned or not, that fill tiles or do not. */
#include "conform.h"

enum { MOST = 3 * 4096 + 7 };

struct how {
  int64_t tensors, n; /* lengths are near n */
  int64_t bad;        /* of `tensors`, so many have bad elements */
  int64_t before;     /* bad tensors on record already */
  double limit;
};

/* The largest value of dtype below limit. */
static double just_below(double limit, int64_t dtype)
{
  double step = ref_rounding(limit, dtype), x = ref_round(limit, dtype);
  if (isinf(x)) return 65504;
  while (!(x < limit)) x = ref_round(x - step, dtype);
  return x;
}

static double bad_value(int64_t i, double limit)
{
  const double kinds[] = { NAN, INFINITY, -INFINITY, limit, -limit, 2 * limit, -NAN };
  return kinds[i % 7];
}

static void one(struct conform *c, struct how h)
{
  if (!c_begin(c, MOE_F32, "%lld tensors of about %lld, %lld bad, %lld before, limit %g", (long long)h.tensors,
               (long long)h.n, (long long)h.bad, (long long)h.before, h.limit))
    return;
  struct moe__args_watch args = { .dtype = MOE_F32, .limit = h.limit };
  int32_t none[MOE__WATCHED];
  int64_t record[3] = { h.before, h.before ? 77 : 0, h.before ? 88 : 0 }, made = 0;
  num *now = t_nums(&c->m, 3), *want = t_nums(&c->m, 3);
  for (int i = 0; i < 3; i++) now[i].v = (double)record[i];
  for (int i = 0; i < MOE__WATCHED; i++) none[i] = -1;
  args.record = c_inout(c, MOE_I64, T_ODD, now, SHAPE(3));
  args.scratch = c_in_ints(c, none, SHAPE(MOE__WATCHED));
  t_own(&c->m, &args.scratch);
  for (int64_t i = 0; i < MOE__WATCHED; i++) {
    if (t_below(&c->m, MOE__WATCHED - i) >= h.tensors - made) continue; /* absent */
    int64_t dtype = 1 + t_below(&c->m, 4), n = h.n + t_below(&c->m, 4) - 1;
    if (n < 0 || made == 0) n = h.n;
    num *values = t_uniform(&c->m, n, dtype, h.limit < 1 ? h.limit : 1);
    double *rounded = t_host(&c->m, n, sizeof *rounded);
    for (int64_t k = 0; k < n; k += 1 + t_below(&c->m, 9)) values[k].v = (k % 2 ? 1 : -1) * just_below(h.limit, dtype);
    if (n && t_below(&c->m, h.tensors - made) < h.bad) {
      const int64_t places[] = { 0, n - 1, n / 2, t_below(&c->m, n) };
      h.bad--;
      for (int64_t k = t_below(&c->m, 4), more = 1; more && k < 4; k++, more = t_below(&c->m, 2))
        values[places[k]].v = bad_value(t_below(&c->m, 7), h.limit);
    }
    args.tag[i] = ((int64_t)1 << 50) + 10 * i;
    args.a[i] = c_in(c, dtype, t_below(&c->m, 3) ? T_PACKED : T_ODD, values, SHAPE(n));
    for (int64_t k = 0; k < n; k++) rounded[k] = ref_round(values[k].v, dtype);
    ref_watch(record, rounded, n, args.tag[i], h.limit);
    made++;
  }
  if (c_run_watch(c, &args)) {
    for (int i = 0; i < 3; i++) want[i].v = (double)record[i];
    c_check(c, "record", &args.record, want);
    c_check_ints(c, "scratch", &args.scratch, none);
  }
  c_end(c);
}

void conform_watch(struct conform *c)
{
  static const int64_t sizes[] = { 1, 4097, 0, 7, 8, 65, 2047, 2048, 4096, 8191, 8193, MOST };
  static const double limits[] = { 1e10, 1000.5, INFINITY, 0.3 };
  int64_t most = c->effort == SMALL ? 3 : (int64_t)(sizeof sizes / sizeof *sizes);
  for (int64_t s = 0; s < most; s++)
    for (int64_t l = 0; l < 4; l++)
      for (int64_t k = 0; k < (c->effort == LONG ? 4 : 1); k++) {
        one(c, (struct how){ 1, sizes[s], 1, 0, limits[l] });
        one(c, (struct how){ 1, sizes[s], 0, k, limits[l] });
        one(c, (struct how){ MOE__WATCHED, sizes[s], s + l, 0, limits[l] });
        one(c, (struct how){ 7, sizes[s], 2, 3, limits[l] });
      }
  one(c, (struct how){ 0, 5, 0, 0, 1 });
}
