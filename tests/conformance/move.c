/* move.c - cases of the ops that move rows between tokens and experts. */
#include "conform.h"

static const int64_t widths[] = { 1, 7, 64, 129, 65, 127, 16, 63, 128, 1025 };
#define WIDTHS ((int64_t)(sizeof widths / sizeof *widths))

static void gather_case(struct conform *c, int64_t dtype, int64_t n, int64_t rows, int64_t D, int64_t div, int layout,
                        int bad)
{
  if (!c_begin(c, dtype, "n=%lld rows=%lld D=%lld div=%lld layout=%d%s", (long long)n, (long long)rows, (long long)D,
               (long long)div, layout, bad ? " ids out of range" : ""))
    return;
  struct moe__args_gather_rows args = { .dtype = dtype, .n = n, .rows = rows, .D = D, .div = div };
  num *x = t_uniform(&c->m, rows * D, dtype, 1), *want = t_nums(&c->m, n * D);
  int32_t *map = t_ints(&c->m, n), health = 0;
  for (int64_t i = 0; i < n; i++) map[i] = (int32_t)t_below(&c->m, rows * div);
  const int32_t unknown[] = { -1, (int32_t)(rows * div), INT32_MIN, INT32_MAX };
  if (bad && n > 0) map[n / 2] = unknown[(n + D + dtype) % 4];
  args.x = c_in(c, dtype, layout, x, SHAPE(rows, D));
  args.map = c_in_ints(c, map, SHAPE(n));
  args.y = c_out(c, dtype, layout ^ T_PAD, SHAPE(n, D));
  if (bad) args.health = c_health(c);
  if (c_run_gather_rows(c, &args)) {
    ref_gather_rows(want, &health, x, map, n, rows, D, div);
    c_check(c, "y", &args.y, want);
    if (bad) c_check_ints(c, "health", &args.health, &health);
  }
  c_end(c);
}

void conform_gather_rows(struct conform *c)
{
  static const int64_t counts[] = { 3, 1, 64, 0, 65, 33, 2, 127, 9, 257 };
  for (int64_t d = 0; d < C_DTYPES; d++)
    for (int64_t i = 0; i < (c->effort == SMALL ? 4 : 10); i++) {
      gather_case(c, c_dtypes[d], counts[i], 1 + i * 5, widths[(i + d) % WIDTHS], 1 + i % 3, c_layout(i), 0);
      gather_case(c, c_dtypes[d], counts[i], 1 + i * 2, widths[(i + 3) % WIDTHS], 1 + i % 8, c_layout(i + 1), 1);
    }
  huge_gather_rows(c);
}

struct combine_how {
  int64_t T, K, D;
  int weighted, unweighted, add, in_place, dropped, layout;
};

static void combine_case(struct conform *c, int64_t dtype, struct combine_how h, int whole)
{
  if (!c_begin(c, dtype, "T=%lld K=%lld D=%lld layout=%d%s%s%s%s%s%s", (long long)h.T, (long long)h.K, (long long)h.D,
               h.layout, h.weighted ? " weights" : "", h.unweighted ? " unweighted" : "", h.add ? " add" : "",
               h.in_place ? " in place" : "", h.dropped ? " dropped" : "", whole ? " whole numbers" : ""))
    return;
  if (whole) c_exact();
  struct moe__args_combine args = { .dtype = dtype, .T = h.T, .K = h.K, .D = h.D, .unweighted = h.unweighted };
  int64_t R = h.T * h.K;
  num *rows = whole ? t_whole(&c->m, R * h.D, 4) : t_uniform(&c->m, R * h.D, dtype, 1);
  num *weights = whole ? t_whole(&c->m, R, 2) : t_uniform(&c->m, R, c_real(dtype), 1);
  num *add = whole ? t_whole(&c->m, h.T * h.D, 4) : t_uniform(&c->m, h.T * h.D, dtype, 1);
  num *want = t_nums(&c->m, h.T * h.D);
  int32_t *slot2row = t_ints(&c->m, R);
  /* A shuffle of the rows; where slots are dropped, every third has none, and some of those no finite weight. */
  for (int64_t i = 0; i < R; i++) slot2row[i] = (int32_t)i;
  for (int64_t i = R - 1; i > 0; i--) {
    int64_t j = t_below(&c->m, i + 1);
    int32_t old = slot2row[i];
    slot2row[i] = slot2row[j], slot2row[j] = old;
  }
  for (int64_t i = 0; i < R && h.dropped; i += 3) {
    slot2row[i] = -1;
    if (i % 2) weights[i].v = i % 4 == 1 ? NAN : INFINITY;
  }
  args.rows = c_in(c, dtype, h.layout, rows, SHAPE(R, h.D));
  if (h.weighted) args.weights = c_in(c, c_real(dtype), T_PACKED, weights, SHAPE(h.T, h.K));
  args.slot2row = c_in_ints(c, slot2row, SHAPE(h.T, h.K));
  if (h.in_place) args.y = c_inout(c, dtype, h.layout, add, SHAPE(h.T, h.D));
  else args.y = c_out(c, dtype, h.layout, SHAPE(h.T, h.D));
  if (h.in_place) args.add = args.y;
  else if (h.add) args.add = c_in(c, dtype, c_layout(h.T), add, SHAPE(h.T, h.D));
  if (c_run_combine(c, &args)) {
    ref_combine(want, rows, h.weighted ? weights : NULL, slot2row, h.add || h.in_place ? add : NULL, h.T, h.K, h.D,
                h.unweighted);
    c_check(c, "y", &args.y, want);
  }
  c_end(c);
}

void conform_combine(struct conform *c)
{
  static const int64_t tokens[] = { 2, 1, 0, 63, 3, 33, 9, 65, 31, 129 }, chosen[] = { 1, 2, 8, 3, 6 };
  for (int64_t d = 0; d < C_DTYPES; d++)
    for (int64_t i = 0; i < (c->effort == SMALL ? 4 : 10); i++)
      for (int variant = 0; variant < 6; variant++) {
        struct combine_how h = { .T = tokens[(i + d) % 10], .K = chosen[(i + variant) % 5], .D = widths[i] };
        h.weighted = variant != 0;
        h.unweighted = variant == 2 || (variant == 4 && i % 2);
        h.add = variant == 3 || variant == 5;
        h.dropped = variant >= 4;
        h.in_place = h.add && i % 2;
        h.layout = c_layout(i + variant);
        combine_case(c, c_dtypes[d], h, 0);
        if (variant == 1) combine_case(c, c_dtypes[d], h, 1);
      }
  huge_combine(c);
}

static void dot_case(struct conform *c, int64_t dtype, int64_t T, int64_t K, int64_t E, int64_t D, int layout,
                     int whole)
{
  if (!c_begin(c, dtype, "T=%lld K=%lld E=%lld D=%lld layout=%d%s", (long long)T, (long long)K, (long long)E,
               (long long)D, layout, whole ? " whole numbers" : ""))
    return;
  if (whole) c_exact();
  struct moe__args_row_dot args = { .dtype = dtype, .T = T, .K = K, .E = E, .D = D };
  num *a = whole ? t_whole(&c->m, T * D, 4) : t_uniform(&c->m, T * D, dtype, 1);
  num *b = whole ? t_whole(&c->m, E * D, 4) : t_uniform(&c->m, E * D, dtype, 1), *want = t_nums(&c->m, T * K);
  int32_t *ids = c_ids(c, T, K, E, 0);
  if (T > 2) ids[1] = -1, ids[T * K - 1] = (int32_t)E;
  args.a = c_in(c, dtype, layout, a, SHAPE(T, D));
  args.b = c_in(c, dtype, c_layout(D), b, SHAPE(E, D));
  args.ids = c_in_ints(c, ids, SHAPE(T * K));
  args.y = c_out(c, c_real(dtype), T_ODD, SHAPE(T * K));
  if (c_run_row_dot(c, &args)) {
    ref_row_dot(want, a, b, ids, T, K, E, D);
    c_check(c, "y", &args.y, want);
  }
  c_end(c);
}

void conform_row_dot(struct conform *c)
{
  static const int64_t tokens[] = { 2, 0, 1, 63, 3, 33, 9, 65, 31, 129 };
  for (int64_t d = 0; d < C_DTYPES; d++)
    for (int64_t i = 0; i < (c->effort == SMALL ? 4 : 10); i++) {
      dot_case(c, c_dtypes[d], tokens[i], 1 + i % 4, 4 + i, widths[(i + d) % WIDTHS], c_layout(i), 0);
      dot_case(c, c_dtypes[d], tokens[i], 1 + i % 3, 3, widths[(i + 5) % WIDTHS], c_layout(i + 2), 1);
    }
}

/* ids [T,K] with repetitions in a row, and some out of range. */
static int32_t *column_ids(struct conform *c, int64_t T, int64_t E, int64_t K, int bad)
{
  int32_t *ids = t_ints(&c->m, T * K);
  const int32_t unknown[] = { -1, (int32_t)E, INT32_MIN, INT32_MAX };
  for (int64_t i = 0; i < T * K; i++) ids[i] = (int32_t)t_below(&c->m, E);
  for (int64_t i = 1; i < T * K; i += 3)
    if (i % K) ids[i] = ids[i - 1];
  for (int64_t i = 0; bad && i < T * K; i += 5) ids[i] = unknown[i % 4];
  return ids;
}

struct columns_how {
  int64_t T, E, K;
  int layout, bad;
};

static void gather_cols_case(struct conform *c, int64_t dtype, struct columns_how h)
{
  if (!c_begin(c, dtype, "T=%lld E=%lld K=%lld layout=%d%s", (long long)h.T, (long long)h.E, (long long)h.K, h.layout,
               h.bad ? " ids out of range" : ""))
    return;
  struct moe__args_gather_cols args = { .dtype = dtype, .T = h.T, .E = h.E, .K = h.K };
  num *x = t_uniform(&c->m, h.T * h.E, dtype, 1), *want = t_nums(&c->m, h.T * h.K);
  int32_t *ids = column_ids(c, h.T, h.E, h.K, h.bad);
  args.x = c_in(c, dtype, h.layout, x, SHAPE(h.T, h.E));
  args.ids = c_in_ints(c, ids, SHAPE(h.T, h.K));
  args.y = c_out(c, dtype, c_layout(h.E), SHAPE(h.T, h.K));
  if (c_run_gather_cols(c, &args)) {
    ref_gather_cols(want, x, ids, h.T, h.E, h.K);
    c_check(c, "y", &args.y, want);
  }
  c_end(c);
}

static void scatter_cols_case(struct conform *c, int64_t dtype, struct columns_how h)
{
  if (!c_begin(c, dtype, "T=%lld E=%lld K=%lld layout=%d%s", (long long)h.T, (long long)h.E, (long long)h.K, h.layout,
               h.bad ? " ids out of range" : ""))
    return;
  struct moe__args_scatter_cols args = { .dtype = dtype, .T = h.T, .E = h.E, .K = h.K };
  num *x = t_uniform(&c->m, h.T * h.K, dtype, 1), *want = t_nums(&c->m, h.T * h.E);
  int32_t *ids = column_ids(c, h.T, h.E, h.K, h.bad);
  args.x = c_in(c, dtype, h.layout, x, SHAPE(h.T, h.K));
  args.ids = c_in_ints(c, ids, SHAPE(h.T, h.K));
  args.y = c_out(c, dtype, c_layout(h.E), SHAPE(h.T, h.E));
  if (c_run_scatter_cols(c, &args)) {
    ref_scatter_cols(want, x, ids, h.T, h.E, h.K);
    c_check(c, "y", &args.y, want);
  }
  c_end(c);
}

static void each_columns(struct conform *c, void (*one)(struct conform *, int64_t, struct columns_how))
{
  static const int64_t tokens[] = { 3, 1, 33, 0, 65, 2, 127, 9 }, experts[] = { 4, 1, 64, 3, 7, 129, 8, 257 },
                       chosen[] = { 2, 1, 8, 3, 6 };
  for (int64_t d = 0; d < C_DTYPES; d++)
    for (int64_t i = 0; i < (c->effort == SMALL ? 4 : 8); i++)
      for (int bad = 0; bad < 2; bad++)
        one(c, c_dtypes[d],
            (struct columns_how){ tokens[(i + d) % 8], experts[i], chosen[(i + bad) % 5], c_layout(i + bad), bad });
}

void conform_gather_cols(struct conform *c)
{
  each_columns(c, gather_cols_case);
}

void conform_scatter_cols(struct conform *c)
{
  each_columns(c, scatter_cols_case);
}
