/* act.c - cases of the activations: each kind, plain and gated, with clamps, offsets and rows past the last. */
#include "conform.h"

struct how {
  int64_t R, F, E, rows; /* rows: offs[E], where E > 0 */
  struct moe__act act;
  int in_place, aw, dweights, weighted, mapped, plane, accumulate;
};

static const struct moe__act gpt_oss = { MOE__ACT_SILU, 1, 1.702, 7, 1 };

/* offs[E+1]: any split of `rows` rows; only the last entry matters here. */
static moe_tensor offsets(struct conform *c, int64_t E, int64_t rows)
{
  int32_t *offs = t_ints(&c->m, E + 1);
  for (int64_t e = 0; e <= E; e++) offs[e] = (int32_t)(rows * e / E);
  return c_in_ints(c, offs, SHAPE(E + 1));
}

/* The rows of t below `rows`. */
static moe_tensor below(const moe_tensor *t, int64_t rows)
{
  moe_tensor head = *t;
  head.shape[0] = rows;
  return head;
}

static int begin(struct conform *c, int64_t dtype, const struct how *h)
{
  static const char *const names[] = { "", "identity", "relu", "relu2", "gelu", "gelu_tanh", "silu", "sigmoid" };
  return c_begin(c, dtype, "%s%s%s R=%lld F=%lld%s%s%s%s%s%s%s%s", names[h->act.kind], h->act.gated ? " gated" : "",
                 h->act.limit > 0 ? " clamped" : "", (long long)h->R, (long long)h->F, h->E ? " offs" : "",
                 h->in_place ? " in place" : "", h->aw ? " aw" : "", h->dweights ? " dweights" : "",
                 h->weighted ? " weights" : "", h->mapped ? " mapped" : "", h->plane ? " plane" : "",
                 h->accumulate ? " +=" : "");
}

/* h in a range where every branch is met; the first values are those of cases.md's gpt-oss example. */
static num *inputs(struct conform *c, int64_t dtype, const struct how *h)
{
  static const double gate[] = { 1, 8, -8, 0.5, 7, -7 }, up[] = { 2, -9, 9, -3, 7, -7 };
  int64_t width = h->act.gated ? 2 * h->F : h->F;
  num *x = t_uniform(&c->m, h->R * width, dtype, h->act.limit > 0 ? 10 : 4);
  for (int64_t f = 0; f < 6 && f < h->F && h->R > 0; f++) {
    x[f].v = gate[f];
    if (h->act.gated) x[h->F + f].v = up[f];
  }
  if (h->R > 1) x[width].v = 0;
  return x;
}

static void fwd_case(struct conform *c, int64_t dtype, struct how h)
{
  if (!begin(c, dtype, &h)) return;
  struct moe__args_act_fwd args = { .dtype = dtype, .R = h.R, .F = h.F, .E = h.E, .act = h.act };
  int64_t rows = h.E ? h.rows : h.R, width = h.act.gated ? 2 * h.F : h.F;
  num *in = inputs(c, dtype, &h), *want = t_nums(&c->m, rows * h.F);
  int layout = h.F % 2 ? T_ODD : T_PACKED;
  args.h = t_tensor(&c->m, dtype, layout, SHAPE(h.R, width));
  args.a = t_tensor(&c->m, dtype, layout, SHAPE(h.R, h.F));
  moe_tensor h_head = below(&args.h, rows), a_head = below(&args.a, rows);
  t_put(&c->m, &h_head, in);
  t_own(&c->m, &a_head);
  if (h.E) args.offs = offsets(c, h.E, rows);
  if (c_run_act_fwd(c, &args)) {
    ref_act_fwd(want, in, rows, h.F, h.act);
    c_check(c, "a", &a_head, want);
  }
  c_end(c);
}

static void bwd_case(struct conform *c, int64_t dtype, struct how h)
{
  if (!begin(c, dtype, &h)) return;
  struct moe__args_act_bwd args = { .dtype = dtype, .R = h.R, .F = h.F, .E = h.E, .plane = h.plane };
  args.accumulate = h.accumulate;
  args.act = h.act;
  int64_t rows = h.E ? h.rows : h.R, width = h.act.gated ? 2 * h.F : h.F, real = c_real(dtype);
  num *in = inputs(c, dtype, &h), *da = t_uniform(&c->m, rows * h.F, dtype, 1);
  num *weights = t_uniform(&c->m, h.R, real, 1), *dweights = t_uniform(&c->m, h.R, real, 1);
  num *dh = t_nums(&c->m, rows * width), *aw = t_nums(&c->m, rows * h.F);
  int32_t *row2slot = t_ints(&c->m, h.R);
  /* Rows in reverse; those past the last have no slot, and their slots' gradients are not written. */
  for (int64_t r = 0; r < h.R; r++) row2slot[r] = r < rows ? (int32_t)(h.R - 1 - r) : -1;
  args.h = t_tensor(&c->m, dtype, T_PACKED, SHAPE(h.R, width));
  args.da = t_tensor(&c->m, dtype, T_PACKED, SHAPE(h.R, h.F));
  args.dh = h.in_place ? args.h : t_tensor(&c->m, dtype, h.F % 2 ? T_ODD : T_PACKED, SHAPE(h.R, width));
  moe_tensor h_head = below(&args.h, rows), da_head = below(&args.da, rows), dh_head = below(&args.dh, rows), aw_head;
  t_put(&c->m, &h_head, in);
  t_put(&c->m, &da_head, da);
  t_own(&c->m, &dh_head);
  if (h.aw) {
    args.aw = t_tensor(&c->m, dtype, T_PACKED, SHAPE(h.R, h.F));
    aw_head = below(&args.aw, rows);
    t_own(&c->m, &aw_head);
  }
  if (h.weighted) args.weights = c_in(c, real, T_ODD, weights, SHAPE(h.R));
  if (h.mapped) args.row2slot = c_in_ints(c, row2slot, SHAPE(h.R));
  if (h.dweights) args.dweights = c_inout(c, real, T_ODD, dweights, SHAPE(h.R));
  if (h.E) args.offs = offsets(c, h.E, rows);
  if (c_run_act_bwd(c, &args)) {
    ref_act_bwd(dh, h.aw ? aw : NULL, h.dweights ? dweights : NULL, da, in, h.weighted ? weights : NULL,
                h.mapped ? row2slot : NULL, rows, h.F, h.accumulate, h.act, dtype);
    c_check(c, "dh", &dh_head, dh);
    if (h.aw) c_check(c, "aw", &aw_head, aw);
    if (h.dweights) c_check(c, "dweights", &args.dweights, dweights);
  }
  c_end(c);
}

/* The numbers of cases.md B19 themselves, so that the reference is checked too. */
static void known_case(struct conform *c, int64_t dtype)
{
  static const double a[] = { 2.5373873, -41.9997188, -7.8131e-5, -.7007769 };
  static const double dgate[] = { 3.2033388, 0, -1.2321e-4, -1.7584438 }, dup[] = { .8457958, 0, 0, .3503884 };
  static const double in[] = { 1, 8, -8, .5, 2, -9, 9, -3 };
  num h[8], da[4], got_a[4], dh[8];
  if (!c_begin(c, dtype, "gpt-oss numbers")) return;
  for (int i = 0; i < 8; i++) h[i] = n_exact(in[i]);
  for (int i = 0; i < 4; i++) da[i] = n_exact(1);
  ref_act_fwd(got_a, h, 1, 4, gpt_oss);
  ref_act_bwd(dh, NULL, NULL, da, h, NULL, NULL, 1, 4, 0, gpt_oss, dtype);
  for (int i = 0; i < 4; i++) {
    double scale = 1e-7 * fabs(a[i]) + 1e-8;
    if (!(fabs(got_a[i].v - a[i]) <= 2 * scale)) c_fail(c, "the reference's a[%d] is %.9g", i, got_a[i].v);
    if (!(fabs(dh[i].v - dgate[i]) <= 1e-7)) c_fail(c, "the reference's dgate[%d] is %.9g", i, dh[i].v);
    if (!(fabs(dh[4 + i].v - dup[i]) <= 1e-7)) c_fail(c, "the reference's dup[%d] is %.9g", i, dh[4 + i].v);
  }
  c_end(c);
}

static const int64_t tokens[] = { 3, 1, 0, 9, 33, 65, 2, 127 }, widths[] = { 7, 64, 16, 129, 1, 65, 127, 63 };

static struct moe__act kind_of(int64_t i)
{
  struct moe__act act = { MOE__ACT_IDENTITY + i % 7, i / 7 % 2, 0, 0, 0 };
  if (i == 14) return gpt_oss;
  if (i == 15) act = (struct moe__act){ MOE__ACT_GELU, 1, 0, 3, 0 };
  if (i == 16) act = (struct moe__act){ MOE__ACT_SILU, 0, 1.5, 0, 0 };
  return act;
}

void conform_act_fwd(struct conform *c)
{
  for (int64_t d = 0; d < C_DTYPES; d++) {
    known_case(c, c_dtypes[d]);
    for (int64_t i = 0; i < 17; i++) {
      int64_t R = tokens[(i + d) % 8], F = widths[(i + 2 * d) % 8];
      fwd_case(c, c_dtypes[d], (struct how){ .R = R, .F = F, .act = kind_of(i) });
      if (c->effort != SMALL)
        fwd_case(c, c_dtypes[d], (struct how){ .R = R + 8, .F = 9, .E = 3, .rows = R, .act = kind_of(i) });
    }
    fwd_case(c, c_dtypes[d], (struct how){ .R = 8, .F = 6, .E = 2, .rows = 0, .act = gpt_oss });
    if (c->effort == LONG) fwd_case(c, c_dtypes[d], (struct how){ .R = 521, .F = 1031, .act = gpt_oss });
  }
  huge_act_fwd(c);
}

void conform_act_bwd(struct conform *c)
{
  for (int64_t d = 0; d < C_DTYPES; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < 17; i++) {
      struct how h = { .R = tokens[(i + d) % 8], .F = widths[(i + 3 * d) % 8], .act = kind_of(i) };
      h.aw = h.dweights = h.weighted = 1;
      h.plane = (int)(i + d) % 2;
      h.accumulate = (int)(i / 2) % 2;
      bwd_case(c, dtype, h);
      if (c->effort == SMALL && i < 14) continue;
      h.R += 9, h.E = 2, h.rows = h.R - 7, h.mapped = 1, h.plane ^= 1, h.in_place = (int)i % 3 == 0;
      bwd_case(c, dtype, h);
      h.mapped = h.weighted = h.aw = 0, h.dweights = (int)i % 2;
      bwd_case(c, dtype, h);
    }
    for (int plane = 0; plane < 2; plane++)
      bwd_case(c, dtype, (struct how){ 8, 6, 2, 0, gpt_oss, 0, 1, 1, 1, 1, plane, 1 });
    if (c->effort == LONG) bwd_case(c, dtype, (struct how){ 521, 1031, 5, 500, gpt_oss, 1, 1, 1, 1, 1, 1, 0 });
  }
  huge_act_bwd(c);
}
