/* ggemm.c - cases of the products over ragged experts: splits of rows over experts, maps, split operands, layouts of
   the weights (separate, halves of one block, interleaved, transposed), poisoned rows past the last. */
#include "conform.h"

enum split { EVEN, RANDOM, ONE_EXPERT, HOLES };

/* offs[E+1] with `rows` rows in all. */
static int32_t *offsets(struct conform *c, int64_t E, int64_t rows, enum split split)
{
  int32_t *offs = t_ints(&c->m, E + 1);
  for (int64_t e = 1; e <= E; e++) {
    if (split == EVEN) offs[e] = (int32_t)(rows * e / E);
    else if (split == RANDOM) offs[e] = offs[e - 1] + (int32_t)t_below(&c->m, rows - offs[e - 1] + 1);
    else if (split == ONE_EXPERT) offs[e] = e > E / 2 ? (int32_t)rows : 0;
    else offs[e] = (int32_t)(rows * (e / 2 * 2) / E);
  }
  offs[E] = (int32_t)rows;
  return offs;
}

/* Rows of an operand with a map: as many as there may be of `used`, and two that it never leads to. */
static int64_t source_of(int64_t used, int64_t div)
{
  return used / div + 3;
}
/* map[R] into all of `rows` but the first and the last, `div` places each; -1 past `used`. */
static int32_t *map_of(struct conform *c, int64_t R, int64_t used, int64_t rows, int64_t div)
{
  int32_t *map = t_ints(&c->m, R);
  for (int64_t r = 0; r < R; r++) map[r] = r < used ? (int32_t)(div + t_below(&c->m, (rows - 2) * div)) : -1;
  return map;
}
/* The rows of t that are read: those that a map leads to, or the first `used`; the others stay poisoned. */
static void put_rows(struct conform *c, const moe_tensor *t, const num *all, int mapped, int64_t used)
{
  moe_tensor read = *t;
  read.shape[0] = mapped ? t->shape[0] - 2 : used;
  if (mapped) read.offset += (uint64_t)t->stride[0] * moe_dtype_size(t->dtype);
  t_put(&c->m, &read, mapped ? all + t->shape[1] : all);
}

/* How a pair of halves lies: two tensors, halves of one block, or every second row (or column) of one. */
enum pair { WHOLE, SEPARATE, HALVES, INTERLEAVED };

/* [E,n,k] in one or two tensors: dim is the one that is split. */
static void pair_of(struct conform *c, moe_tensor out[2], int64_t dtype, int layout, enum pair pair, int dim, int64_t E,
                    int64_t n, int64_t k)
{
  int64_t shape[3] = { E, n, k }, half[3] = { E, n, k };
  half[dim] /= 2;
  if (pair == SEPARATE) {
    out[0] = t_tensor(&c->m, dtype, layout, 3, half);
    out[1] = t_tensor(&c->m, dtype, layout & T_PAD8 ? layout : layout ^ T_PAD, 3, half);
    return;
  }
  moe_tensor all = t_tensor(&c->m, dtype, layout, 3, shape);
  moe_status status = MOE_OK;
  if (pair == WHOLE) out[0] = all;
  for (int64_t i = 0; i < 2 && pair != WHOLE && !status; i++)
    status = pair == HALVES ? moe_tensor_slice(&out[i], &all, dim, i * half[dim], (i + 1) * half[dim])
                            : moe_tensor_every(&out[i], &all, dim, i, 2);
  if (status) c_fail(c, "%s", moe_last_error());
}

/* Values [E,n,k] of the two halves: those of half i. */
static num *half_of(struct conform *c, const num *all, int dim, int64_t i, int64_t E, int64_t n, int64_t k)
{
  int64_t hn = dim == 1 ? n / 2 : n, hk = dim == 2 ? k / 2 : k;
  num *half = t_nums(&c->m, E * hn * hk);
  for (int64_t e = 0; e < E; e++)
    for (int64_t y = 0; y < hn; y++)
      for (int64_t x = 0; x < hk; x++)
        half[(e * hn + y) * hk + x] = all[(e * n + y + (dim == 1 ? i * hn : 0)) * k + x + (dim == 2 ? i * hk : 0)];
  return half;
}

static void put_pair(struct conform *c, const moe_tensor t[2], const num *all, enum pair pair, int dim, int64_t E,
                     int64_t n, int64_t k)
{
  if (pair == WHOLE) t_put(&c->m, &t[0], all);
  for (int64_t i = 0; i < 2 && pair != WHOLE; i++) t_put(&c->m, &t[i], half_of(c, all, dim, i, E, n, k));
}

static num *values(struct conform *c, int64_t n, int64_t dtype, int whole)
{
  return whole ? t_whole(&c->m, n, 3) : t_uniform(&c->m, n, dtype, 1);
}

static const char *const pair_names[] = { "", " separate", " halves", " interleaved" };

/* ---- ggemm_rows -------------------------------------------------------------------------------------------------- */
struct rows_how {
  int64_t E, rows, past, N, K; /* R = rows + past */
  enum split split;
  int64_t div; /* 0: no map */
  int parts;   /* MOE__SPLIT_* */
  enum pair pair;
  int a, b, c, bias, whole;
};

static void rows_case(struct conform *c, int64_t dtype, struct rows_how h)
{
  if (!c_begin(c, dtype, "E=%lld R=%lld+%lld N=%lld K=%lld split=%d div=%lld parts=%d%s layouts %d,%d->%d%s%s",
               (long long)h.E, (long long)h.rows, (long long)h.past, (long long)h.N, (long long)h.K, h.split,
               (long long)h.div, h.parts, pair_names[h.pair], h.a, h.b, h.c, h.bias ? " bias" : "",
               h.whole ? " whole numbers" : ""))
    return;
  if (h.whole) c_exact();
  int64_t R = h.rows + h.past, source = h.div ? source_of(h.rows, h.div) : R, dim = h.parts == MOE__SPLIT_K ? 2 : 1;
  struct moe__args_ggemm_rows args = { .dtype = dtype, .R = R, .E = h.E, .N = h.N, .K = h.K, .split = h.parts };
  args.div = h.div;
  int32_t *offs = offsets(c, h.E, h.rows, h.split), *map = map_of(c, R, h.rows, source, h.div ? h.div : 1);
  num *a = values(c, source * h.K, dtype, h.whole), *b = values(c, h.E * h.N * h.K, dtype, h.whole);
  num *bias = values(c, h.E * h.N, dtype, h.whole), *want = t_nums(&c->m, R * h.N);
  args.a = t_tensor(&c->m, dtype, h.a, SHAPE(source, h.K));
  moe_tensor c_head;
  put_rows(c, &args.a, a, h.div != 0, h.rows);
  pair_of(c, args.b, dtype, h.b, h.pair, (int)dim, h.E, h.N, h.K);
  put_pair(c, args.b, b, h.pair, (int)dim, h.E, h.N, h.K);
  if (h.bias && h.parts == MOE__SPLIT_N) {
    args.bias[0] = c_in(c, dtype, T_STEP, half_of(c, bias, 2, 0, h.E, 1, h.N), SHAPE(h.E, h.N / 2));
    args.bias[1] = c_in(c, dtype, T_PAD, half_of(c, bias, 2, 1, h.E, 1, h.N), SHAPE(h.E, h.N / 2));
  } else if (h.bias) {
    args.bias[0] = c_in(c, dtype, T_ODD, bias, SHAPE(h.E, h.N));
  }
  args.offs = c_in_ints(c, offs, SHAPE(h.E + 1));
  if (h.div) args.map = c_in_ints(c, map, SHAPE(R));
  args.c = c_head = t_tensor(&c->m, dtype, h.c, SHAPE(R, h.N));
  c_head.shape[0] = h.rows;
  t_own(&c->m, &c_head);
  if (c_run_ggemm_rows(c, &args)) {
    ref_ggemm_rows(want, a, b, h.bias ? bias : NULL, offs, h.div ? map : NULL, h.E, h.N, h.K, h.div);
    c_check(c, "c", &c_head, want);
  }
  c_end(c);
}

/* With the gradient of an activation behind it. */
struct epilogue_how {
  int64_t E, rows, past, F, K, div;
  enum split split;
  struct moe__act act;
  int b, pad, accumulate, bare; /* bare: nothing that is optional */
};

/* slots[R]: each of R once, -1 past `used`. */
static int32_t *slots_of(struct conform *c, int64_t R, int64_t used)
{
  int32_t *slots = t_ints(&c->m, R);
  for (int64_t i = 0; i < R; i++) {
    int64_t j = t_below(&c->m, i + 1);
    slots[i] = slots[j];
    slots[j] = (int32_t)i;
  }
  for (int64_t i = used; i < R; i++) slots[i] = -1;
  return slots;
}

/* Rows that the kernel may write; those past the last stay as they are. */
static moe_tensor rows_out(struct conform *c, moe_tensor *whole, int64_t dtype, int pad, int64_t R, int64_t rows,
                           int64_t columns)
{
  moe_tensor head = *whole = t_tensor(&c->m, dtype, pad, SHAPE(R, columns));
  head.shape[0] = rows;
  t_own(&c->m, &head);
  return head;
}

static void act_grad_case(struct conform *c, int64_t dtype, struct epilogue_how h)
{
  const int64_t R = h.rows + h.past, source = R / h.div + 1, N = h.act.gated ? 2 * h.F : h.F, real = c_real(dtype);
  if (!c_begin(c, dtype,
               "gradient E=%lld R=%lld+%lld F=%lld K=%lld div=%lld split=%d kind=%lld%s %g,%g,%g layouts %d,%d%s%s",
               (long long)h.E, (long long)h.rows, (long long)h.past, (long long)h.F, (long long)h.K, (long long)h.div,
               h.split, (long long)h.act.kind, h.act.gated ? " gated" : "", h.act.alpha, h.act.limit, h.act.up_offset,
               h.b, h.pad, h.accumulate ? " accumulate" : "", h.bare ? " bare" : ""))
    return;
  struct moe__args_ggemm_rows args = { .dtype = dtype, .R = R, .E = h.E, .N = h.F, .K = h.K, .div = h.div };
  moe_tensor dh, aw = { 0 }, head;
  int32_t *offs = offsets(c, h.E, h.rows, h.split), *map = slots_of(c, R, h.rows);
  num *a = values(c, source * h.K, dtype, 0), *b = values(c, h.E * h.F * h.K, dtype, 0);
  num *hidden = t_uniform(&c->m, R * N, dtype, 4), *weights = t_uniform(&c->m, R, real, 1);
  num *dweights = t_uniform(&c->m, R, real, 1), *da = t_nums(&c->m, R * h.F);
  num *want_dh = t_nums(&c->m, R * N), *want_aw = t_nums(&c->m, R * h.F);
  args.epilogue = MOE__ACT_GRAD;
  args.act = h.act;
  args.a = c_in(c, dtype, h.pad, a, SHAPE(source, h.K));
  pair_of(c, args.b, dtype, h.b, WHOLE, 1, h.E, h.F, h.K);
  put_pair(c, args.b, b, WHOLE, 1, h.E, h.F, h.K);
  args.offs = c_in_ints(c, offs, SHAPE(h.E + 1));
  args.map = c_in_ints(c, map, SHAPE(R));
  args.c = c_out(c, dtype, h.pad, SHAPE(R, h.F));
  head = args.h = t_tensor(&c->m, dtype, h.pad, SHAPE(R, N));
  head.shape[0] = h.rows; /* the rest stays poisoned */
  t_put(&c->m, &head, hidden);
  dh = rows_out(c, &args.dh, dtype, h.pad, R, h.rows, N);
  if (!h.bare) {
    aw = rows_out(c, &args.aw, dtype, h.pad, R, h.rows, h.F);
    args.weights = c_in(c, real, T_ODD, weights, SHAPE(R));
    args.dweights = c_inout(c, real, T_ODD, dweights, SHAPE(R));
    args.accumulate = h.accumulate;
  }
  if (c_run_ggemm_rows(c, &args)) {
    ref_ggemm_rows(da, a, b, NULL, offs, map, h.E, h.F, h.K, h.div);
    ref_act_bwd(want_dh, want_aw, dweights, da, hidden, h.bare ? NULL : weights, map, h.rows, h.F, h.accumulate, h.act,
                dtype);
    c_check(c, "dh", &dh, want_dh);
    if (!h.bare) {
      c_check(c, "aw", &aw, want_aw);
      c_check(c, "dweights", &args.dweights, dweights); /* of other slots as they were */
    }
  }
  c_end(c);
}

static void epilogue_cases(struct conform *c, int64_t dtype)
{
  static const int64_t sizes[][4] = {
    /* rows, F, K, E */
    { 130, 136, 64, 4 }, { 1, 8, 8, 1 },      { 300, 128, 144, 8 }, { 257, 264, 72, 3 },  { 128, 64, 256, 33 },
    { 0, 128, 64, 2 },   { 255, 520, 72, 5 }, { 129, 72, 16, 2 },   { 384, 256, 128, 1 }, { 64, 16, 320, 65 }
  };
  for (int64_t i = 0; i < (c->effort == SMALL ? 3 : 20); i++) {
    const int64_t *s = sizes[(i + dtype) % 10];
    struct epilogue_how h = { .E = s[3], .rows = s[0], .past = i % 3 * 40, .F = s[1], .K = s[2], .div = 1 + i % 4 };
    h.split = (enum split)(i % 4);
    h.act.kind = i < 8 ? MOE__ACT_SILU : 1 + i % 7;
    h.act.gated = i % 5 != 4;
    h.act.alpha = i % 4 == 1 ? 1.702 : 0;
    h.act.limit = i % 3 == 1 ? 1.5 : 0;
    h.act.up_offset = i % 4 == 1;
    h.b = (i % 4 < 2 ? 0 : T_SWAP) | (i % 2 ? T_PAD8 : 0), h.pad = i % 3 ? 0 : T_PAD8;
    h.accumulate = (int)(i / 2) % 2;
    h.bare = i % 6 == 5 && h.act.limit == 0;
    act_grad_case(c, dtype, h);
  }
}

/* For kernels with large tiles: many rows of an expert; but for the first, more tiles than a GPU works on at once. */
static void tile_cases(struct conform *c, int64_t dtype)
{
  static const int64_t sizes[][4] = {
    /* rows, N, K, E */
    { 1100, 272, 144, 2 },
    { 200, 528, 320, 65 },
    { 520, 5648, 80, 1 },
    { 1600, 4112, 208, 3 },
  };
  for (int64_t i = 0; i < (c->effort == SMALL ? 1 : 4); i++) {
    const int64_t *s = sizes[i], k = i + (dtype == MOE_F16);
    struct rows_how h = { .E = s[3], .rows = s[0], .past = i * 8, .N = s[1], .K = s[2], .div = k % 3 };
    struct epilogue_how with = { .E = s[3], .rows = s[0], .past = i * 8, .F = s[1], .K = s[2], .div = 1 + k % 2 };
    h.split = with.split = i == 3 ? RANDOM : EVEN;
    h.parts = (int)((k + 1) % 3);
    h.pair = h.parts ? HALVES : WHOLE;
    h.b = with.b = k % 2 ? T_SWAP : 0;
    rows_case(c, dtype, h);
    with.act.kind = MOE__ACT_SILU;
    with.act.gated = i != 2;
    act_grad_case(c, dtype, with);
  }
}

void conform_ggemm_rows(struct conform *c)
{
  static const int64_t rows[] = { 5, 0, 1, 65, 33, 130, 9, 64, 3, 127 };
  static const int64_t widths[][2] = { { 7, 5 },  { 64, 64 },  { 66, 130 }, { 1, 33 },   { 128, 31 },
                                       { 18, 1 }, { 130, 16 }, { 62, 66 },  { 16, 129 }, { 6, 64 } };
  for (int64_t d = 0; d < C_DTYPES; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < (c->effort == SMALL ? 6 : 20); i++) {
      const int64_t *w = widths[(i + d) % 10];
      struct rows_how h = { .E = 1 + i * 3 % 9, .rows = rows[i % 10], .past = i % 3 * 5, .N = w[0], .K = w[1] };
      h.split = (enum split)(i % 4);
      h.div = i % 4 == 1 ? 1 : i % 4 == 3 ? 2 + i % 7 : 0;
      h.parts = i % 5 < 2 ? MOE__SPLIT_NONE : i % 5 == 4 ? MOE__SPLIT_K : MOE__SPLIT_N;
      h.pair = h.parts ? (enum pair)(SEPARATE + i % 3) : WHOLE;
      if (h.parts == MOE__SPLIT_N) h.N += h.N % 2;
      if (h.parts == MOE__SPLIT_K) h.K += h.K % 2;
      h.a = c_layout(i), h.b = c_layout(i / 2), h.c = i % 2 ? T_PAD : i % 4 ? T_ODD : T_PACKED;
      h.bias = (int)(i / 2) % 2;
      h.whole = (int)(i + d) % 5 == 0;
      rows_case(c, dtype, h);
    }
    /* Sizes, strides and beginnings that kernels with wide accesses take; the first ones fill rings of stages. */
    for (int64_t i = 0; i < (c->effort == SMALL ? 3 : 10); i++) {
      static const int64_t aligned[][4] = { { 130, 256, 64, 4 }, { 257, 272, 328, 3 }, { 300, 128, 144, 8 },
                                            { 1, 16, 8, 1 },     { 128, 64, 256, 33 }, { 0, 128, 64, 2 },
                                            { 255, 520, 72, 5 }, { 129, 144, 16, 2 },  { 384, 256, 128, 1 },
                                            { 64, 16, 320, 65 } };
      struct rows_how h = {
        .E = aligned[i][3], .rows = aligned[i][0], .past = i % 3 * 40, .N = aligned[i][1], .K = aligned[i][2]
      };
      h.split = (enum split)(i % 4);
      h.div = i % 2 ? 1 + i % 8 : 0;
      h.parts = (int)(i % 3);
      h.pair = h.parts ? i % 4 < 2 ? HALVES : SEPARATE : WHOLE;
      h.a = i % 3 ? 0 : T_PAD8, h.b = i % 4 < 2 ? 0 : T_SWAP, h.c = i % 4 ? 0 : T_PAD8;
      if (h.pair == SEPARATE) h.b |= T_PAD8;
      h.whole = i == 4;
      rows_case(c, dtype, h);
    }
    epilogue_cases(c, dtype);
    if (c->tensor) tile_cases(c, dtype);
    if (c->effort == SMALL) continue;
    /* Widths and beginnings that wide accesses do not take, or narrower ones do, over many steps of k. */
    for (int64_t i = 0; i < 6; i++) {
      static const int64_t odd[][2] = {
        { 261, 203 }, { 258, 202 }, { 136, 328 }, { 141, 260 }, { 330, 101 }, { 3, 397 }
      };
      static const int layouts[] = { 0, 0, T_ODD, T_SWAP, T_SWAP | T_ODD, T_PAD };
      struct rows_how h = { .E = 3, .rows = 300, .past = 7, .N = odd[i][0], .K = odd[i][1], .split = RANDOM };
      h.div = i % 2 ? 2 : 0;
      h.parts = i == 2 ? MOE__SPLIT_K : i == 4 ? MOE__SPLIT_N : MOE__SPLIT_NONE;
      h.pair = h.parts ? SEPARATE : WHOLE;
      h.a = layouts[i] & ~T_SWAP, h.b = layouts[i], h.c = i % 3 ? 0 : T_ODD;
      h.bias = (int)i % 2;
      rows_case(c, dtype, h);
    }
    /* As the library calls it: halves of [E,2F,D] forward with a map, transposed views backward; many experts. */
    struct rows_how up = { 8, 200, 0, 96, 64, RANDOM, 2, MOE__SPLIT_N, HALVES, 0, 0, 0, 0, 0 };
    struct rows_how dx = { 8, 200, 0, 64, 96, RANDOM, 0, MOE__SPLIT_K, HALVES, 0, T_SWAP, 0, 0, 0 };
    struct rows_how many = { 129, 260, 4, 24, 40, RANDOM, 2, MOE__SPLIT_N, SEPARATE, 0, 0, 0, 1, 0 };
    struct rows_how tall = { 4, 517, 0, 33, 70, ONE_EXPERT, 0, MOE__SPLIT_NONE, WHOLE, 0, T_SWAP, 0, 0, 0 };
    rows_case(c, dtype, up);
    rows_case(c, dtype, dx);
    rows_case(c, dtype, many);
    rows_case(c, dtype, tall);
    /* Enough large tiles to fill a large GPU, where kernels with large tiles are chosen. */
    struct rows_how tiles = { 33, 2311, 9, 262, 24 + d, RANDOM, d ? 2 : 0, MOE__SPLIT_N, INTERLEAVED, 0, 0, 0, 1, 0 };
    if (dtype != MOE_F64) rows_case(c, dtype, tiles);
    if (c->effort != LONG) continue;
    rows_case(c, dtype, (struct rows_how){ 8, 2048, 0, 512, 256, RANDOM, 2, MOE__SPLIT_N, HALVES, 0, 0, 0, 0, 0 });
    up.rows = 2050, up.N = 514, up.K = 257;
    many.E = 512, many.rows = 4099, many.N = 130;
    rows_case(c, dtype, up);
    rows_case(c, dtype, many);
  }
  huge_ggemm_rows(c);
}

/* ---- ggemm_wgrad ------------------------------------------------------------------------------------------------- */
struct wgrad_how {
  int64_t E, rows, past, M, N;
  enum split split;
  int64_t pdiv, qdiv; /* 0: no map */
  enum pair pair;     /* of c, over M */
  int p, q, c, accumulate, whole;
};

static void wgrad_case(struct conform *c, int64_t dtype, int64_t c_type, struct wgrad_how h)
{
  if (!c_begin(c, dtype, "E=%lld R=%lld+%lld M=%lld N=%lld split=%d divs %lld,%lld%s layouts %d,%d->%d %s%s%s",
               (long long)h.E, (long long)h.rows, (long long)h.past, (long long)h.M, (long long)h.N, h.split,
               (long long)h.pdiv, (long long)h.qdiv, pair_names[h.pair], h.p, h.q, h.c, moe_dtype_name(c_type),
               h.accumulate ? " +=" : "", h.whole ? " whole numbers" : ""))
    return;
  if (h.whole) c_exact();
  int64_t R = h.rows + h.past, prows = h.pdiv ? source_of(h.rows, h.pdiv) : R,
          qrows = h.qdiv ? source_of(h.rows, h.qdiv) : R;
  struct moe__args_ggemm_wgrad args = {
    .dtype = dtype, .R = R, .E = h.E, .M = h.M, .N = h.N, .split = h.pair != WHOLE
  };
  args.pdiv = h.pdiv, args.qdiv = h.qdiv, args.accumulate = h.accumulate;
  int32_t *offs = offsets(c, h.E, h.rows, h.split);
  int32_t *pmap = map_of(c, R, h.rows, prows, h.pdiv ? h.pdiv : 1),
          *qmap = map_of(c, R, h.rows, qrows, h.qdiv ? h.qdiv : 1);
  num *p = values(c, prows * h.M, dtype, h.whole), *q = values(c, qrows * h.N, dtype, h.whole);
  num *want = values(c, h.E * h.M * h.N, c_type, h.whole);
  args.p = t_tensor(&c->m, dtype, h.p, SHAPE(prows, h.M));
  args.q = t_tensor(&c->m, dtype, h.q, SHAPE(qrows, h.N));
  put_rows(c, &args.p, p, h.pdiv != 0, h.rows);
  put_rows(c, &args.q, q, h.qdiv != 0, h.rows);
  args.offs = c_in_ints(c, offs, SHAPE(h.E + 1));
  if (h.pdiv) args.pmap = c_in_ints(c, pmap, SHAPE(R));
  if (h.qdiv) args.qmap = c_in_ints(c, qmap, SHAPE(R));
  pair_of(c, args.c, c_type, h.c, h.pair, 1, h.E, h.M, h.N);
  if (h.accumulate) put_pair(c, args.c, want, h.pair, 1, h.E, h.M, h.N);
  for (int i = 0; i < (h.pair == WHOLE ? 1 : 2); i++) t_own(&c->m, &args.c[i]);
  if (c_run_ggemm_wgrad(c, &args)) {
    ref_ggemm_wgrad(want, p, q, offs, h.pdiv ? pmap : NULL, h.qdiv ? qmap : NULL, h.E, h.M, h.N, h.pdiv, h.qdiv,
                    h.accumulate);
    if (h.pair == WHOLE) c_check(c, "c", &args.c[0], want);
    for (int i = 0; i < 2 && h.pair != WHOLE; i++)
      c_check(c, i ? "c[1]" : "c[0]", &args.c[i], half_of(c, want, 1, i, h.E, h.M, h.N));
  }
  c_end(c);
}

void conform_ggemm_wgrad(struct conform *c)
{
  static const int64_t rows[] = { 5, 0, 1, 65, 33, 130, 9, 64, 3, 127 };
  static const int64_t widths[][2] = { { 7, 5 },  { 64, 64 }, { 66, 33 }, { 1, 33 },   { 32, 31 },
                                       { 18, 1 }, { 34, 65 }, { 62, 66 }, { 16, 129 }, { 130, 6 } };
  for (int64_t d = 0; d < C_DTYPES; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < (c->effort == SMALL ? 6 : 20); i++) {
      const int64_t *w = widths[(i + d) % 10];
      struct wgrad_how h = { .E = 1 + i * 3 % 8, .rows = rows[i % 10], .past = i % 3 * 5, .M = w[0], .N = w[1] };
      h.split = (enum split)(i % 4);
      h.pdiv = i % 3 == 1 ? 1 + i % 4 : 0;
      h.qdiv = i % 3 == 2 ? 1 + i % 5 : 0;
      h.pair = i % 2 ? (enum pair)(SEPARATE + i / 2 % 3) : WHOLE;
      if (h.pair != WHOLE) h.M += h.M % 2;
      h.p = c_layout(i), h.q = c_layout(i / 3), h.c = c_layout(i / 2);
      h.accumulate = (int)(i / 2) % 2;
      h.whole = (int)(i + d) % 5 == 0;
      wgrad_case(c, dtype, i % 3 ? c_real(dtype) : c_float(dtype, i), h);
    }
    /* Sizes, strides and beginnings that kernels with wide accesses take; the first ones fill rings of stages. */
    for (int64_t i = 0; i < (c->effort == SMALL ? 3 : 10); i++) {
      static const int64_t aligned[][4] = { { 130, 128, 64, 4 }, { 257, 64, 264, 1 }, { 300, 144, 128, 8 },
                                            { 1, 16, 8, 1 },     { 128, 32, 72, 33 }, { 0, 128, 64, 2 },
                                            { 255, 272, 56, 5 }, { 129, 16, 144, 2 }, { 513, 128, 128, 1 },
                                            { 64, 8, 32, 65 } };
      struct wgrad_how h = {
        .E = aligned[i][3], .rows = aligned[i][0], .past = i % 3 * 40, .M = aligned[i][1], .N = aligned[i][2]
      };
      h.split = (enum split)(i % 4);
      h.pdiv = i % 2 ? 1 + i % 8 : 0, h.qdiv = i % 3 == 1 ? 1 + i % 3 : 0;
      h.pair = i % 3 == 0 ? WHOLE : i % 3 == 1 ? HALVES : SEPARATE;
      h.p = i % 3 ? 0 : T_PAD8, h.q = i % 4 ? 0 : T_PAD8,
      h.c = (h.pair == SEPARATE ? T_PAD8 : 0) | (i % 4 == 3 ? T_SWAP : 0);
      h.accumulate = (int)(i / 2) % 2;
      h.whole = i == 4;
      wgrad_case(c, dtype, i % 4 == 2 ? dtype : c_real(dtype), h);
    }
    if (c->effort == SMALL) continue;
    /* Widths and beginnings that wide accesses do not take, or narrower ones do, over many steps of k. */
    for (int64_t i = 0; i < 6; i++) {
      static const int64_t odd[][2] = {
        { 261, 131 }, { 258, 130 }, { 136, 144 }, { 141, 12 }, { 330, 101 }, { 3, 257 }
      };
      static const int layouts[] = { 0, 0, T_ODD, T_PAD, T_SWAP, T_ODD };
      struct wgrad_how h = { .E = 3, .rows = 431, .past = 7, .M = odd[i][0], .N = odd[i][1], .split = RANDOM };
      h.pdiv = i % 3 == 1 ? 1 : 0, h.qdiv = i % 2 ? 2 : 0;
      h.pair = i == 2 ? HALVES : i == 4 ? SEPARATE : WHOLE;
      h.p = layouts[i], h.q = layouts[(i + 2) % 6], h.c = i % 2 ? layouts[i] : 0;
      h.accumulate = (int)i % 2;
      wgrad_case(c, dtype, i % 3 ? c_real(dtype) : dtype, h);
    }
    struct wgrad_how up = { 8, 300, 0, 96, 40, RANDOM, 0, 2, HALVES, 0, 0, 0, 1, 0 };
    struct wgrad_how down = { 8, 300, 10, 40, 66, HOLES, 2, 0, WHOLE, 0, 0, T_SWAP, 0, 0 };
    struct wgrad_how tall = { 3, 1031, 0, 33, 34, ONE_EXPERT, 0, 0, WHOLE, 0, 0, 0, 0, 0 };
    wgrad_case(c, dtype, c_real(dtype), up);
    wgrad_case(c, dtype, c_real(dtype), down);
    wgrad_case(c, dtype, c_real(dtype), tall);
    struct wgrad_how tiles = { 33, 331, 9, 262, 131, RANDOM, d ? 2 : 0, 0, HALVES, 0, 0, T_PAD, 0, 0 };
    if (dtype != MOE_F64) wgrad_case(c, dtype, c_real(dtype), tiles);
    if (c->effort != LONG) continue;
    wgrad_case(c, dtype, c_real(dtype),
               (struct wgrad_how){ 8, 2048, 0, 512, 256, RANDOM, 0, 2, HALVES, 0, 0, 0, 1, 0 });
    up.rows = 3000, up.M = 258, up.N = 130;
    down.E = 257;
    wgrad_case(c, dtype, c_real(dtype), up);
    wgrad_case(c, dtype, c_real(dtype), down);
  }
  huge_ggemm_wgrad(c);
}

/* ---- ggemm_colsum ------------------------------------------------------------------------------------------------ */
struct colsum_how {
  int64_t E, rows, past, N;
  enum split split;
  int64_t div;
  int halves, weighted, p, accumulate, whole;
};

static void colsum_case(struct conform *c, int64_t dtype, int64_t c_type, struct colsum_how h)
{
  if (!c_begin(c, dtype, "E=%lld R=%lld+%lld N=%lld split=%d div=%lld%s%s layout=%d %s%s%s", (long long)h.E,
               (long long)h.rows, (long long)h.past, (long long)h.N, h.split, (long long)h.div,
               h.halves ? " halves" : "", h.weighted ? " weights" : "", h.p, moe_dtype_name(c_type),
               h.accumulate ? " +=" : "", h.whole ? " whole numbers" : ""))
    return;
  if (h.whole) c_exact();
  int64_t R = h.rows + h.past, source = h.div ? R / h.div + 1 : R;
  struct moe__args_ggemm_colsum args = { .dtype = dtype, .R = R, .E = h.E, .N = h.N, .split = h.halves, .div = h.div };
  args.accumulate = h.accumulate;
  /* The map holds slots: below R, where weights are found. */
  int32_t *offs = offsets(c, h.E, h.rows, h.split), *map = map_of(c, R, h.rows, R ? R : 1, 1);
  num *p = values(c, source * h.N, dtype, h.whole), *weights = values(c, R, c_real(dtype), h.whole);
  num *want = values(c, h.E * h.N, c_type, h.whole);
  args.p = t_tensor(&c->m, dtype, h.p, SHAPE(source, h.N));
  moe_tensor p_head = args.p;
  if (!h.div) p_head.shape[0] = h.rows;
  t_put(&c->m, &p_head, p);
  if (h.weighted) args.weights = c_in(c, c_real(dtype), T_ODD, weights, SHAPE(R));
  args.offs = c_in_ints(c, offs, SHAPE(h.E + 1));
  if (h.div) args.map = c_in_ints(c, map, SHAPE(R));
  enum pair pair = h.halves ? h.rows % 2 ? INTERLEAVED : HALVES : WHOLE;
  moe_tensor both[2] = { { 0 }, { 0 } };
  pair_of(c, both, c_type, h.p & T_PAD, pair, 2, 1, h.E, h.N);
  for (int i = 0; i < (h.halves ? 2 : 1); i++) {
    moe_tensor *t = &args.c[i];
    *t = both[i];
    t->rank = 2;
    for (int k = 0; k < 2; k++) t->shape[k] = t->shape[k + 1], t->stride[k] = t->stride[k + 1];
    t->shape[2] = t->stride[2] = 0;
    if (h.accumulate) t_put(&c->m, t, h.halves ? half_of(c, want, 2, i, 1, h.E, h.N) : want);
    t_own(&c->m, t);
  }
  if (c_run_ggemm_colsum(c, &args)) {
    ref_ggemm_colsum(want, p, h.weighted ? weights : NULL, offs, h.div ? map : NULL, h.E, h.N, h.div, h.accumulate);
    if (!h.halves) c_check(c, "c", &args.c[0], want);
    for (int i = 0; i < 2 && h.halves; i++)
      c_check(c, i ? "c[1]" : "c[0]", &args.c[i], half_of(c, want, 2, i, 1, h.E, h.N));
  }
  c_end(c);
}

void conform_ggemm_colsum(struct conform *c)
{
  static const int64_t rows[] = { 5, 0, 1, 65, 33, 130, 9, 64, 3, 127 },
                       widths[] = { 7, 64, 66, 1, 128, 257, 130, 62, 16, 34 };
  for (int64_t d = 0; d < C_DTYPES; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < (c->effort == SMALL ? 6 : 20); i++) {
      struct colsum_how h = { .E = 1 + i * 3 % 9, .rows = rows[i % 10], .past = i % 3 * 5, .N = widths[(i + d) % 10] };
      h.split = (enum split)(i % 4);
      h.div = i % 3 ? 1 + i % 4 : 0;
      h.halves = (int)i % 2;
      if (h.halves) h.N += h.N % 2;
      h.weighted = (int)(i / 2) % 2;
      h.p = c_layout(i);
      h.accumulate = (int)(i / 3) % 2;
      h.whole = (int)(i + d) % 4 == 0;
      colsum_case(c, dtype, c_float(dtype, i), h);
    }
    if (c->effort == SMALL) continue;
    colsum_case(c, dtype, c_real(dtype), (struct colsum_how){ 3, 2053, 3, 33, ONE_EXPERT, 0, 0, 1, 0, 0, 0 });
    colsum_case(c, dtype, c_real(dtype), (struct colsum_how){ 129, 700, 0, 64, RANDOM, 2, 1, 1, 0, 1, 0 });
  }
  huge_ggemm_colsum(c);
}
