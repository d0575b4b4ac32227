/* loss.c - cases of softmax cross-entropy, with rows that are ignored and with smoothing. */
#include "conform.h"

/* Which rows are ignored: by an index that is no class, by one that is, or all of them. */
enum { NONE, OUTSIDE, INSIDE, ALL };
struct how {
  int64_t T, V, type; /* type of the logits */
  double size;
  int layout, bad, ignored;
  double smoothing;
};

static int begin(struct conform *c, int64_t dtype, const struct how *h)
{
  static const char *const ignored[] = { "", " ignoring -100", " ignoring 0", " all ignored" };
  return c_begin(c, dtype, "T=%lld V=%lld %s layout=%d size=%g smoothing=%g%s%s", (long long)h->T, (long long)h->V,
                 moe_dtype_name(h->type), h->layout, h->size, h->smoothing, ignored[h->ignored],
                 h->bad ? " bad targets" : "");
}

static struct ref_xent ref_of(const struct how *h)
{
  return (struct ref_xent){ h->T, h->V, h->ignored != NONE, h->ignored == INSIDE ? 0 : -100, h->smoothing };
}

static int32_t *targets_of(struct conform *c, const struct how *h)
{
  int32_t *targets = t_ints(&c->m, h->T);
  for (int64_t t = 0; t < h->T; t++) {
    targets[t] = (int32_t)t_below(&c->m, h->V);
    if (h->ignored == ALL || (h->ignored && t % 3 == 0)) targets[t] = (int32_t)ref_of(h).ignore_index;
  }
  if (h->bad && h->T > 0) targets[h->T / 2] = h->T % 2 ? -1 : (int32_t)h->V;
  return targets;
}

static void fwd_case(struct conform *c, int64_t dtype, struct how h)
{
  if (!begin(c, dtype, &h)) return;
  struct ref_xent ref = ref_of(&h);
  struct moe__args_xent_fwd args = { .dtype = dtype,
                                     .T = h.T,
                                     .V = h.V,
                                     .ignoring = ref.ignoring,
                                     .ignore_index = ref.ignore_index,
                                     .smoothing = h.smoothing };
  int64_t real = c_real(dtype);
  num *logits = t_uniform(&c->m, h.T * h.V, h.type, h.size), *lse = t_nums(&c->m, h.T), *row = t_nums(&c->m, h.T);
  num loss, counted;
  int32_t *targets = targets_of(c, &h), health = 0;
  args.logits = c_in(c, h.type, h.layout, logits, SHAPE(h.T, h.V));
  args.targets = c_in_ints(c, targets, SHAPE(h.T));
  args.loss = c_out(c, real, T_ODD, SHAPE(1));
  args.lse = c_out(c, real, T_ODD, SHAPE(h.T));
  args.rowloss = c_out(c, real, T_PACKED, SHAPE(h.T));
  if (h.bad) args.health = c_health(c);
  if (h.ignored || h.bad) args.counted = c_out(c, real, T_ODD, SHAPE(1));
  if (c_run_xent_fwd(c, &args)) {
    ref_xent_fwd(&loss, lse, row, &counted, &health, logits, targets, &ref);
    c_check(c, "lse", &args.lse, lse);
    c_check(c, "rowloss", &args.rowloss, row);
    c_check(c, "loss", &args.loss, &loss);
    if (args.counted.handle) c_check(c, "counted", &args.counted, &counted);
    if (h.bad) c_check_ints(c, "health", &args.health, &health);
  }
  c_end(c);
}

static void bwd_case(struct conform *c, int64_t dtype, struct how h)
{
  if (!begin(c, dtype, &h)) return;
  struct ref_xent ref = ref_of(&h);
  struct moe__args_xent_bwd args = { .dtype = dtype,
                                     .T = h.T,
                                     .V = h.V,
                                     .ignoring = ref.ignoring,
                                     .ignore_index = ref.ignore_index,
                                     .smoothing = h.smoothing };
  int64_t real = c_real(dtype), out = c_float(dtype, h.T);
  num *logits = t_uniform(&c->m, h.T * h.V, h.type, h.size), *dloss = t_uniform(&c->m, 1, real, 3);
  num *lse = t_nums(&c->m, h.T), *row = t_nums(&c->m, h.T), loss, counted, *want = t_nums(&c->m, h.T * h.V);
  int32_t *targets = targets_of(c, &h), health = 0;
  /* The forward's lse, as it would be stored. */
  ref_xent_fwd(&loss, lse, row, &counted, &health, logits, targets, &ref);
  for (int64_t t = 0; t < h.T; t++) lse[t] = n_exact(ref_round(lse[t].v, real));
  args.logits = c_in(c, h.type, h.layout, logits, SHAPE(h.T, h.V));
  args.targets = c_in_ints(c, targets, SHAPE(h.T));
  args.dloss = c_in(c, real, T_ODD, dloss, SHAPE(1));
  args.lse = c_in(c, real, T_ODD, lse, SHAPE(h.T));
  args.dlogits = c_out(c, out, h.layout ^ T_PAD, SHAPE(h.T, h.V));
  if (h.ignored) args.counted = c_in(c, real, T_ODD, &counted, SHAPE(1));
  if (c_run_xent_bwd(c, &args)) {
    ref_xent_bwd(want, dloss[0], counted, logits, lse, targets, &ref);
    c_check(c, "dlogits", &args.dlogits, want);
  }
  c_end(c);
}

static void each(struct conform *c, void (*one)(struct conform *, int64_t, struct how))
{
  static const int64_t tokens[] = { 3, 1, 0, 9, 33, 65, 2, 127, 31, 64 },
                       classes[] = { 7, 1, 5, 256, 65, 63, 129, 257, 2, 128 };
  for (int64_t d = 0; d < 2; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < (c->effort == SMALL ? 5 : 10); i++) {
      struct how h = { tokens[i], classes[i], c_float(dtype, i), 5, c_layout(i), 0, NONE, 0 };
      one(c, dtype, h);
      h.smoothing = i % 3 ? 0.1 : 0.9;
      h.ignored = (int)(i + d) % 4;
      one(c, dtype, h);
      h.size = i % 2 ? 1000 : 1e-3;
      h.bad = (int)(i + 1) % 2;
      h.type = c_float(dtype, i + 1);
      h.ignored = (int)i / 2 % 3;
      if (i % 3) h.smoothing = 0;
      one(c, dtype, h);
    }
    if (c->effort != SMALL) one(c, dtype, (struct how){ 1000, 300, MOE_F32, 8, T_PACKED, 0, OUTSIDE, 0.1 });
    if (c->effort == LONG) one(c, dtype, (struct how){ 67, 50257, MOE_F32, 8, T_PACKED, 0, INSIDE, 0.1 });
  }
}

void conform_xent_fwd(struct conform *c)
{
  each(c, fwd_case);
  huge_xent(c, 0);
}

void conform_xent_bwd(struct conform *c)
{
  each(c, bwd_case);
  huge_xent(c, 1);
}
