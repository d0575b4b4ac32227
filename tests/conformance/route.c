/* route.c - cases of routing: choice of experts, weights and their gradient, balance losses, bias update, statistics. */
#include "conform.h"

/* ---- select ---------------------------------------------------------------------------------------------------- */
enum logits { SPREAD, TIES, NANS, EQUAL, EXTREME };

struct select_how {
  int64_t T, E, type; /* type of the logits */
  struct moe__select s;
  enum logits logits;
  int layout, bias, weights;
  struct moe__weigh weigh; /* scoring 0: the selection's own weights */
};

static num *make_logits(struct conform *c, int64_t T, int64_t E, int64_t type, enum logits what)
{
  num *l = what == TIES ? t_whole(&c->m, T * E, 2) : t_uniform(&c->m, T * E, type, what == EXTREME ? 80 : 4);
  for (int64_t i = 0; i < T * E && what == NANS; i++)
    if (t_below(&c->m, 4) == 0) l[i].v = i % 7 == 0 ? -INFINITY : NAN;
  for (int64_t i = 0; i < T * E && what == EQUAL; i++) l[i].v = 0.5;
  return l;
}

/* Runs select and checks its ids (and weights) whatever the inputs. */
/* Of the other device's ids: each token's are the same, or as right. */
static int same_ids(struct conform *c, const struct select_how *h, const moe_tensor *t, const int32_t *ids,
                    const num *logits, const num *bias)
{
  int64_t K = h->s.K;
  double *other = t_host(&c->m, h->T * K, sizeof *other);
  int32_t *theirs = t_ints(&c->m, h->T * K);
  int same = 1;
  if (!c_other(c, t, other)) return 1;
  for (int64_t i = 0; i < h->T * K; i++) {
    theirs[i] = (int32_t)other[i];
    same &= theirs[i] == ids[i];
  }
  for (int64_t i = 0; i < h->T && !same; i++) {
    const char *wrong = ref_select_check(theirs + i * K, logits + i * h->E, bias, h->E, h->s);
    if (wrong) {
      c_fail(c, "token %lld on %s: %s (first id %d)", (long long)i, c->other->info->pub.id, wrong, (int)theirs[i * K]);
      break;
    }
  }
  return same;
}

static void select_run(struct conform *c, int64_t dtype, struct select_how h, const num *logits, const num *bias)
{
  struct moe__args_select args = { .dtype = dtype, .T = h.T, .E = h.E, .select = h.s, .weigh = h.weigh };
  int64_t K = h.s.K, real = c_real(dtype);
  int32_t health = 0;
  int32_t *ids = t_ints(&c->m, h.T * K);
  num *want = t_nums(&c->m, h.T * K);
  args.logits = c_in(c, h.type, h.layout, logits, SHAPE(h.T, h.E));
  if (bias) args.bias = c_in(c, real, T_ODD, bias, SHAPE(h.E));
  args.ids = c_out(c, MOE_I32, T_ODD, SHAPE(h.T, K));
  if (h.weights) args.weights = c_out(c, real, T_PACKED, SHAPE(h.T, K));
  if (!c_run_select(c, &args)) return;
  t_get_ints(&c->m, &args.ids, ids);
  for (int64_t t = 0; t < h.T; t++) {
    const char *wrong = ref_select_check(ids + t * K, logits + t * h.E, bias, h.E, h.s);
    if (wrong) {
      c_fail(c, "token %lld: %s (first id %d)", (long long)t, wrong, (int)ids[t * K]);
      return;
    }
  }
  if (!same_ids(c, &h, &args.ids, ids, logits, bias)) c->compare = 0; /* other ids, other weights */
  /* With NaN among the logits a renormalized weight may or may not see it: the plan drops what is not finite. */
  if (h.weights && h.logits != NANS) {
    if (h.weigh.scoring) ref_weights(want, &health, logits, ids, h.T, h.E, K, h.weigh);
    else ref_select_weights(want, ids, logits, h.T, h.E, h.s);
    c_check(c, "weights", &args.weights, want);
  }
}

static void select_case(struct conform *c, int64_t dtype, struct select_how h)
{
  static const char *const kinds[] = { "", "softmax", "sigmoid" }, *const inputs[] = { "", " ties", " NaN", " equal",
                                                                                       " extreme" };
  if (!c_begin(c, dtype, "%s T=%lld E=%lld K=%lld groups=%lld/%lld%s%s %s layout=%d%s%s%s scoring=%lld",
               kinds[h.s.kind], (long long)h.T, (long long)h.E, (long long)h.s.K, (long long)h.s.selected_groups,
               (long long)h.s.groups, h.s.group_top_two ? " top two" : "", inputs[h.logits], moe_dtype_name(h.type),
               h.layout, h.bias ? " bias" : "", h.weights ? " weights" : "", h.s.renormalize ? " renormalized" : "",
               (long long)h.weigh.scoring))
    return;
  num *logits = make_logits(c, h.T, h.E, h.type, h.logits), *bias = t_uniform(&c->m, h.E, c_real(dtype), 0.3);
  for (int64_t e = 0; e < h.E && h.logits == EQUAL; e++) bias[e].v = 0.25;
  select_run(c, dtype, h, logits, h.bias ? bias : NULL);
  c_end(c);
}

/* One token whose right ids are known. */
static void known_ids(struct conform *c, int64_t dtype, int64_t type, const char *what, struct moe__select s, int64_t E,
                      const double *logits, const double *bias, const int32_t *want)
{
  if (!c_begin(c, dtype, "%s (%s logits)", what, moe_dtype_name(type))) return;
  struct moe__args_select args = { .dtype = dtype, .T = 1, .E = E, .select = s };
  num *l = t_nums(&c->m, E), *b = t_nums(&c->m, E);
  for (int64_t e = 0; e < E; e++) l[e].v = ref_round(logits[e], type);
  for (int64_t e = 0; e < E && bias; e++) b[e].v = ref_round(bias[e], c_real(dtype));
  args.logits = c_in(c, type, T_PACKED, l, SHAPE(1, E));
  if (bias) args.bias = c_in(c, c_real(dtype), T_PACKED, b, SHAPE(E));
  args.ids = c_out(c, MOE_I32, T_PACKED, SHAPE(1, s.K));
  if (c_run_select(c, &args)) {
    c_check_ints(c, "ids", &args.ids, want);
    const char *wrong = ref_select_check(want, l, bias ? b : NULL, E, s);
    if (wrong) c_fail(c, "the reference says of the known answer: %s", wrong);
  }
  c_end(c);
}

#define TOPK(k) ((struct moe__select){ MOE__SELECT_SOFTMAX, k, 1, 1, 0, 0, 1 })
#define GROUPED(k, groups, keep, two) ((struct moe__select){ MOE__SELECT_GROUPED_SIGMOID, k, groups, keep, two, 0, 1 })
#define IDS(...)                                                                                                       \
  (const int32_t[])                                                                                                    \
  {                                                                                                                    \
    __VA_ARGS__                                                                                                        \
  }

static void known_selections(struct conform *c, int64_t dtype, int64_t type)
{
  double wide[512] = { 0 }, edge[256] = { 0 };
  wide[300] = 5, wide[511] = 4, edge[255] = 1;
  /* logit of a score: sigmoid(l) = s */
  const double nine = log(9), six = log(1.5), low = -30;
  known_ids(c, dtype, type, "correction bias chooses", GROUPED(2, 1, 1, 0), 3, (double[]){ .4054651, 0, -.4054651 },
            (double[]){ 0, 0, .3 }, IDS(2, 0));
  known_ids(c, dtype, type, "fine correction bias", GROUPED(1, 1, 1, 0), 2, (double[]){ 0, 0 }, (double[]){ 7.0, 7.01 },
            IDS(1));
  known_ids(c, dtype, type, "more experts than threads", TOPK(2), 512, wide, NULL, IDS(300, 511));
  known_ids(c, dtype, type, "as many experts as threads", TOPK(1), 256, edge, NULL, IDS(255));
  known_ids(c, dtype, type, "groups by their maximum", GROUPED(1, 2, 1, 0), 4, (double[]){ nine, low, six, six }, NULL,
            IDS(0));
  known_ids(c, dtype, type, "groups by their two best", GROUPED(1, 2, 1, 1), 4, (double[]){ nine, low, six, six }, NULL,
            IDS(2));
  known_ids(c, dtype, type, "groups of one expert", GROUPED(2, 4, 2, 0), 4, (double[]){ 1, 3, 2, 0 }, NULL, IDS(1, 2));
  known_ids(c, dtype, type, "ties go to the lower id", TOPK(3), 5, (double[]){ 1, 2, 2, 2, 1 }, NULL, IDS(1, 2, 3));
  known_ids(c, dtype, type, "-0 ties with 0", TOPK(2), 3, (double[]){ -0.0, 0, -1 }, NULL, IDS(0, 1));
  known_ids(c, dtype, type, "NaN ranks last", TOPK(4), 4, (double[]){ NAN, -INFINITY, NAN, 3 }, NULL, IDS(3, 1, 0, 2));
  known_ids(c, dtype, type, "all NaN", GROUPED(3, 2, 2, 1), 4, (double[]){ NAN, NAN, NAN, NAN }, NULL, IDS(0, 1, 2));
}

void conform_select(struct conform *c)
{
  static const int64_t experts[] = { 8, 1, 2, 3, 64, 129, 255, 256, 257, 512 },
                       tokens[] = { 3, 1, 0, 9, 33, 65, 127, 2, 31, 129 };
  for (int64_t d = 0; d < 2; d++) {
    int64_t dtype = c_dtypes[d];
    known_selections(c, dtype, c_real(dtype));
    if (dtype == MOE_F32) known_selections(c, dtype, MOE_BF16);
    for (int64_t i = 0; i < (c->effort == SMALL ? 5 : 10); i++)
      for (int64_t v = 0; v < 4; v++) {
        int64_t E = experts[i], K = v == 0 ? 1 : v == 1 ? (E + 1) / 2 : v == 2 ? (E < 8 ? E : 8) : (E < 40 ? E : 2);
        struct select_how h = { tokens[(i + v) % 10],
                                E,
                                c_float(dtype, i + v),
                                TOPK(K),
                                (enum logits)((i + v) % 5),
                                c_layout(i + v),
                                0,
                                1,
                                { 0 } };
        if (K > 64) K = 64, h.s.K = K;
        h.s.renormalize = v % 2;
        h.s.scale = v == 3 ? 2.5 : 1;
        select_case(c, dtype, h);
        h.bias = 1, h.logits = v % 2 ? EQUAL : SPREAD;
        select_case(c, dtype, h);
        h.s.kind = MOE__SELECT_GROUPED_SIGMOID, h.bias = (int)v % 2, h.logits = (enum logits)(v + i % 2);
        select_case(c, dtype, h);
      }
    static const int64_t weighed[][2] = { { 5, 3 }, { 64, 4 }, { 130, 8 }, { 250, 33 }, { 1000, 64 }, { 1030, 2 } };
    for (int64_t scoring = MOE__SOFTMAX; scoring <= MOE__SQRT_SOFTPLUS; scoring++)
      for (int64_t i = 0; i < (c->effort == SMALL ? 2 : 6); i++) {
        const int64_t *w = weighed[i], v = (scoring + i) % 3;
        struct select_how h = { tokens[(i + scoring) % 10],
                                w[0],
                                c_float(dtype, i),
                                TOPK(w[1]),
                                SPREAD,
                                c_layout(i),
                                0,
                                1,
                                { scoring, v > 0, 1.5, v > 1 ? 0.25 : 0 } };
        if (v == 1) h.logits = EXTREME;
        select_case(c, dtype, h);
      }
    static const int64_t groups[][5] = { /* E, K, groups, selected, top two */
                                         { 256, 8, 8, 4, 1 }, { 8, 3, 4, 2, 0 },    { 8, 2, 8, 2, 0 },
                                         { 64, 6, 8, 3, 1 },  { 160, 6, 8, 3, 0 },  { 12, 6, 3, 3, 1 },
                                         { 16, 4, 2, 1, 1 },  { 512, 8, 256, 9, 0 }
    };
    for (int64_t i = 0; i < 8; i++)
      for (int v = 0; v < (c->effort == SMALL ? 1 : 4); v++) {
        const int64_t *g = groups[i];
        struct select_how h = { tokens[(i + 3) % 10],
                                g[0],
                                c_float(dtype, i + v),
                                GROUPED(g[1], g[2], g[3], g[4]),
                                (enum logits)v,
                                c_layout(v),
                                (int)(i + v) % 2,
                                1,
                                { 0 } };
        h.s.renormalize = 1;
        h.s.scale = 2.5;
        select_case(c, dtype, h);
      }
    if (c->effort == LONG) {
      struct select_how h = { 2000, 256, MOE_F32, GROUPED(8, 8, 4, 1), SPREAD, T_PACKED, 1, 1, { 0 } };
      select_case(c, dtype, h);
      h = (struct select_how){ 70, 5003, MOE_F32, TOPK(16), TIES, T_PACKED, 0, 0, { 0 } };
      select_case(c, dtype, h);
    }
  }
  huge_select(c);
}

/* ---- weights and their gradient -------------------------------------------------------------------------------------- */
struct weigh_how {
  int64_t T, E, K, type;
  struct moe__weigh w;
  double size; /* of the logits, about `centre` */
  double centre;
  int layout, repeated, bad, accumulate;
};

static int weigh_begin(struct conform *c, int64_t dtype, const struct weigh_how *h)
{
  static const char *const names[] = { "", "softmax", "sigmoid", "softmax of the chosen", "sqrt softplus" };
  return c_begin(c, dtype, "%s T=%lld E=%lld K=%lld %s%s%s logits %g+-%g layout=%d%s%s%s", names[h->w.scoring],
                 (long long)h->T, (long long)h->E, (long long)h->K, moe_dtype_name(h->type),
                 h->w.renormalize ? " renormalized" : "", h->w.epsilon > 0 ? " epsilon" : "", h->centre, h->size,
                 h->layout, h->repeated ? " repeated ids" : "", h->bad ? " bad tokens" : "",
                 h->accumulate ? " +=" : "");
}

static num *weigh_inputs(struct conform *c, const struct weigh_how *h, int32_t **ids)
{
  num *logits = t_uniform(&c->m, h->T * h->E, MOE_F64, h->size);
  for (int64_t i = 0; i < h->T * h->E; i++) logits[i].v = ref_round(h->centre + logits[i].v, h->type);
  *ids = h->repeated ? t_ints(&c->m, h->T * h->K) : c_ids(c, h->T, h->K, h->E, 0);
  for (int64_t i = 0; i < h->T * h->K && h->repeated; i++) (*ids)[i] = (int32_t)t_below(&c->m, (h->E + 1) / 2);
  if (h->bad && h->T > 2) {
    (*ids)[h->K - 1] = (int32_t)h->E;
    (*ids)[(h->T - 1) * h->K] = -1;
    /* A NaN logit of a chosen expert. */
    logits[h->E + (*ids)[h->K]].v = NAN;
  }
  return logits;
}

static void weights_case(struct conform *c, int64_t dtype, struct weigh_how h)
{
  int32_t *ids, health = 0;
  if (!weigh_begin(c, dtype, &h)) return;
  struct moe__args_weights args = { .dtype = dtype, .T = h.T, .E = h.E, .K = h.K, .weigh = h.w };
  num *logits = weigh_inputs(c, &h, &ids), *want = t_nums(&c->m, h.T * h.K);
  args.logits = c_in(c, h.type, h.layout, logits, SHAPE(h.T, h.E));
  args.ids = c_in_ints(c, ids, SHAPE(h.T, h.K));
  args.weights = c_out(c, c_real(dtype), T_ODD, SHAPE(h.T, h.K));
  args.health = c_health(c);
  if (c_run_weights(c, &args)) {
    ref_weights(want, &health, logits, ids, h.T, h.E, h.K, h.w);
    c_check(c, "weights", &args.weights, want);
    c_check_ints(c, "health", &args.health, &health);
  }
  c_end(c);
}

static void weights_bwd_case(struct conform *c, int64_t dtype, struct weigh_how h)
{
  int32_t *ids;
  if (!weigh_begin(c, dtype, &h)) return;
  struct moe__args_weights_bwd args = { .dtype = dtype, .T = h.T, .E = h.E, .K = h.K, .accumulate = h.accumulate };
  args.weigh = h.w;
  num *logits = weigh_inputs(c, &h, &ids), *dweights = t_uniform(&c->m, h.T * h.K, c_real(dtype), 1);
  num *want = t_uniform(&c->m, h.T * h.E, h.type, 1);
  args.logits = c_in(c, h.type, h.layout, logits, SHAPE(h.T, h.E));
  args.ids = c_in_ints(c, ids, SHAPE(h.T, h.K));
  args.dweights = c_in(c, c_real(dtype), T_ODD, dweights, SHAPE(h.T, h.K));
  if (h.accumulate) args.dlogits = c_inout(c, h.type, h.layout ^ T_PAD, want, SHAPE(h.T, h.E));
  else args.dlogits = c_out(c, h.type, h.layout ^ T_PAD, SHAPE(h.T, h.E));
  if (c_run_weights_bwd(c, &args)) {
    ref_weights_bwd(want, dweights, logits, ids, h.T, h.E, h.K, h.accumulate, h.w);
    c_check(c, "dlogits", &args.dlogits, want);
    /* One slot, renormalized: the weight does not depend on its logit, and the gradient is 0, not small. */
    double *got = t_host(&c->m, h.T * h.E, sizeof *got);
    t_get(&c->m, &args.dlogits, got);
    int constant = h.K == 1 && h.w.renormalize && h.w.epsilon == 0 && !h.bad && !h.accumulate;
    for (int64_t i = 0; i < h.T * h.E && constant; i++)
      if (got[i] != 0) {
        c_fail(c, "dlogits[%lld] is %g, wanted 0", (long long)i, got[i]);
        break;
      }
  }
  c_end(c);
}

/* Weights and gradients known from elsewhere: cases.md B02 and B09. */
static void known_weights(struct conform *c, int64_t dtype)
{
  static const struct {
    double logits[4], want[2];
    int32_t ids[2], E, K;
    struct moe__weigh w;
  } known[] = {
    { { .4054651, 0, -.4054651 }, { .4, .6 }, { 2, 0 }, 3, 2, { MOE__SIGMOID, 1, 1, 0 } },
    { { 2, 1, 0 }, { .6652410, .2447285 }, { 0, 1 }, 3, 2, { MOE__SOFTMAX, 0, 1, 0 } },
    { { 2, 1, 0 }, { .7310586, .2689414 }, { 0, 1 }, 3, 2, { MOE__SOFTMAX, 1, 1, 0 } },
    { { 2, 1, 0 }, { .7310586, .2689414 }, { 0, 1 }, 3, 2, { MOE__SOFTMAX_CHOSEN, 0, 1, 0 } },
    { { 0, 0, 0, 0 }, { .625, .625 }, { 0, 1 }, 4, 2, { MOE__SOFTMAX, 0, 2.5, 0 } },
    { { 0, 0, 0, 0 }, { 1.25, 1.25 }, { 0, 1 }, 4, 2, { MOE__SOFTMAX, 1, 2.5, 0 } },
    { { 1, 0 }, { 1 }, { 0 }, 2, 1, { MOE__SOFTMAX, 1, 1, 0 } },
    { { -300, -301 }, { .7310586, .2689414 }, { 0, 1 }, 2, 2, { MOE__SIGMOID, 1, 1, 0 } },
    { { -300, -302 }, { .7310586, .2689414 }, { 0, 1 }, 2, 2, { MOE__SQRT_SOFTPLUS, 1, 1, 0 } },
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (!c_begin(c, dtype, "known weights %zu", i)) return;
    int64_t E = known[i].E, K = known[i].K;
    struct moe__args_weights args = { .dtype = dtype, .T = 1, .E = E, .K = K, .weigh = known[i].w };
    num *logits = t_nums(&c->m, E);
    double got[2] = { 0 };
    for (int64_t e = 0; e < E; e++) logits[e].v = ref_round(known[i].logits[e], c_real(dtype));
    args.logits = c_in(c, c_real(dtype), T_PACKED, logits, SHAPE(1, E));
    args.ids = c_in_ints(c, known[i].ids, SHAPE(1, K));
    args.weights = c_out(c, c_real(dtype), T_PACKED, SHAPE(1, K));
    if (c_run_weights(c, &args)) t_get(&c->m, &args.weights, got);
    /* The numbers have seven digits. */
    for (int64_t k = 0; k < K && c->m.status == MOE_OK && c->cases; k++)
      if (!(fabs(got[k] - known[i].want[k]) <= 5e-7))
        c_fail(c, "weights[%d] is %.8g, wanted %.7g", (int)k, got[k], known[i].want[k]);
    c_end(c);
  }
}

static void known_gradient(struct conform *c, int64_t dtype)
{
  if (!c_begin(c, dtype, "known gradient")) return;
  struct moe__args_weights_bwd args = { .dtype = dtype, .T = 1, .E = 2, .K = 1, .weigh = { MOE__SOFTMAX, 0, 1, 0 } };
  num logits[2] = { { 1, 0 }, { 0, 0 } }, one = n_exact(1);
  int32_t id = 0;
  double got[2];
  args.logits = c_in(c, c_real(dtype), T_PACKED, logits, SHAPE(1, 2));
  args.ids = c_in_ints(c, &id, SHAPE(1, 1));
  args.dweights = c_in(c, c_real(dtype), T_PACKED, &one, SHAPE(1, 1));
  args.dlogits = c_out(c, c_real(dtype), T_PACKED, SHAPE(1, 2));
  if (c_run_weights_bwd(c, &args)) {
    t_get(&c->m, &args.dlogits, got);
    if (!(fabs(got[0] - .1966119) <= 5e-7) || !(fabs(got[1] + .1966119) <= 5e-7))
      c_fail(c, "dlogits %.8g, %.8g, wanted +-.1966119", got[0], got[1]);
  }
  c_end(c);
}

static void each_weigh(struct conform *c, void (*one)(struct conform *, int64_t, struct weigh_how))
{
  static const int64_t experts[] = { 8, 1, 2, 3, 64, 129, 255, 256, 257, 512 },
                       tokens[] = { 3, 1, 0, 9, 33, 65, 127, 2, 31, 129 };
  static const double sizes[] = { 4, 1, 30, 4 }, centres[] = { 0, -200, 0, 60 };
  for (int64_t d = 0; d < 2; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < (c->effort == SMALL ? 3 : 10); i++)
      for (int64_t v = 0; v < 12; v++) {
        int64_t E = experts[i], K = v % 3 == 0 ? 1 : v % 3 == 1 ? (E < 6 ? E : 6) : (E < 2 ? 1 : 2);
        struct weigh_how h = { tokens[(i + v) % 10],
                               E,
                               K,
                               c_float(dtype, i + v),
                               { MOE__SOFTMAX + v % 4, v / 4 > 0, 1, v / 4 == 2 ? 1e-3 : 0 },
                               sizes[(i + v) % 4],
                               centres[(i + v) % 4],
                               c_layout(i + v),
                               0,
                               0,
                               0 };
        if (h.w.scoring == MOE__SOFTMAX_CHOSEN && h.w.epsilon > 0) h.w.epsilon = 0;
        h.w.scale = v % 2 ? 2.5 : 1;
        h.accumulate = (int)(i + v) % 3 == 0;
        one(c, dtype, h);
        h.repeated = (int)v % 2, h.bad = (int)(i + v) % 2, h.accumulate = 0, h.K = h.repeated ? 5 : K;
        one(c, dtype, h);
      }
    if (c->effort != SMALL)
      one(c, dtype, (struct weigh_how){ 700, 160, 6, MOE_F32, { MOE__SIGMOID, 1, 2.5, 0 }, 4, 0, T_PACKED, 0, 0, 0 });
    if (c->effort == LONG)
      one(c, dtype, (struct weigh_how){ 2000, 512, 10, MOE_F32, { MOE__SOFTMAX, 1, 1, 0 }, 4, 0, T_PACKED, 0, 0, 0 });
  }
}

void conform_weights(struct conform *c)
{
  for (int64_t d = 0; d < 2; d++) known_weights(c, c_dtypes[d]);
  each_weigh(c, weights_case);
  huge_weights(c);
}

void conform_weights_bwd(struct conform *c)
{
  for (int64_t d = 0; d < 2; d++) known_gradient(c, c_dtypes[d]);
  each_weigh(c, weights_bwd_case);
  huge_weights_bwd(c);
}

/* ---- balance ---------------------------------------------------------------------------------------------------- */
struct balance_how {
  int64_t S, N, E, K, type, scoring;
  int layout, masked, scaled, accumulate; /* masked 2: every token of every second sequence */
  double size;
};

static int balance_begin(struct conform *c, int64_t dtype, const struct balance_how *h)
{
  return c_begin(c, dtype, "%s S=%lld N=%lld E=%lld K=%lld %s layout=%d size=%g%s%s%s",
                 h->scoring == MOE__SIGMOID ? "sigmoid" : "softmax", (long long)h->S, (long long)h->N, (long long)h->E,
                 (long long)h->K, moe_dtype_name(h->type), h->layout, h->size, h->masked ? " masked" : "",
                 h->scaled ? " scale" : "", h->accumulate ? " +=" : "");
}

static num *make_mask(struct conform *c, const struct balance_how *h)
{
  num *mask = t_nums(&c->m, h->S * h->N);
  for (int64_t t = 0; t < h->S * h->N; t++)
    mask[t].v = h->masked == 2 ? t / h->N % 2 : t_below(&c->m, 3) ? 1 + (double)(t % 200) : 0;
  return mask;
}

static void balance_fwd_case(struct conform *c, int64_t dtype, struct balance_how h)
{
  if (!balance_begin(c, dtype, &h)) return;
  int64_t T = h.S * h.N, real = c_real(dtype);
  struct moe__args_balance_fwd args = { .dtype = dtype, .T = T, .S = h.S, .E = h.E, .K = h.K, .scoring = h.scoring };
  num *logits = t_uniform(&c->m, T * h.E, h.type, h.size), *mask = make_mask(c, &h), losses[2],
      *probs = t_nums(&c->m, h.S * h.E);
  int32_t *ids = c_ids(c, T, h.K, h.E, (int)(h.N % 3)), *counts = t_ints(&c->m, h.S * h.E),
          *tokens = t_ints(&c->m, h.S);
  args.logits = c_in(c, h.type, h.layout, logits, SHAPE(T, h.E));
  args.ids = c_in_ints(c, ids, SHAPE(T, h.K));
  if (h.masked) args.mask = c_in(c, MOE_U8, T_ODD, mask, SHAPE(T));
  args.losses = c_out(c, real, T_ODD, SHAPE(2));
  args.counts = c_out(c, MOE_I32, T_ODD, SHAPE(h.S, h.E));
  args.probs = c_out(c, real, T_PACKED, SHAPE(h.S, h.E));
  args.tokens = c_out(c, MOE_I32, T_PACKED, SHAPE(h.S));
  args.scratch = c_out(c, real, T_PACKED, SHAPE(moe__balance_scratch(T, h.S, h.E)));
  if (c_run_balance_fwd(c, &args)) {
    ref_balance_fwd(losses, counts, probs, tokens, logits, ids, h.masked ? mask : NULL, T, h.S, h.E, h.K, h.scoring);
    c_check_ints(c, "counts", &args.counts, counts);
    c_check_ints(c, "tokens", &args.tokens, tokens);
    c_check(c, "probs", &args.probs, probs);
    c_check(c, "losses", &args.losses, losses);
  }
  c_end(c);
}

static void balance_bwd_case(struct conform *c, int64_t dtype, struct balance_how h)
{
  if (!balance_begin(c, dtype, &h)) return;
  int64_t T = h.S * h.N, real = c_real(dtype);
  struct moe__args_balance_bwd args = { .dtype = dtype, .T = T, .S = h.S, .E = h.E, .K = h.K, .scoring = h.scoring };
  args.accumulate = h.accumulate, args.balance_coef = 0.3, args.z_coef = h.N % 2 ? 0.1 : 0;
  num *logits = t_uniform(&c->m, T * h.E, h.type, h.size), *mask = make_mask(c, &h), losses[2],
      *probs = t_nums(&c->m, h.S * h.E);
  num *want = t_uniform(&c->m, T * h.E, h.type, 1), *scale = t_uniform(&c->m, 1, real, 2);
  int32_t *ids = c_ids(c, T, h.K, h.E, (int)(h.N % 3)), *counts = t_ints(&c->m, h.S * h.E),
          *tokens = t_ints(&c->m, h.S);
  ref_balance_fwd(losses, counts, probs, tokens, logits, ids, h.masked ? mask : NULL, T, h.S, h.E, h.K, h.scoring);
  for (int64_t i = 0; i < h.S * h.E; i++) probs[i] = n_exact(ref_round(probs[i].v, real));
  args.logits = c_in(c, h.type, h.layout, logits, SHAPE(T, h.E));
  args.counts = c_in_ints(c, counts, SHAPE(h.S, h.E));
  args.probs = c_in(c, real, T_PACKED, probs, SHAPE(h.S, h.E));
  args.tokens = c_in_ints(c, tokens, SHAPE(h.S));
  if (h.masked) args.mask = c_in(c, MOE_U8, T_ODD, mask, SHAPE(T));
  if (h.scaled) args.scale = c_in(c, real, T_ODD, scale, SHAPE(1));
  if (h.accumulate) args.dlogits = c_inout(c, h.type, h.layout ^ T_PAD, want, SHAPE(T, h.E));
  else args.dlogits = c_out(c, h.type, h.layout ^ T_PAD, SHAPE(T, h.E));
  if (c_run_balance_bwd(c, &args)) {
    ref_balance_bwd(want, logits, counts, tokens, h.masked ? mask : NULL, h.scaled ? scale : NULL, T, h.S, h.E, h.K,
                    h.scoring, h.accumulate, args.balance_coef, args.z_coef);
    c_check(c, "dlogits", &args.dlogits, want);
  }
  c_end(c);
}

static void each_balance(struct conform *c, void (*one)(struct conform *, int64_t, struct balance_how))
{
  static const int64_t shapes[][4] = { /* S, N, E, K */
                                       { 1, 4, 4, 2 },     { 1, 1, 1, 1 },   { 2, 3, 8, 2 },  { 1, 0, 3, 1 },
                                       { 3, 33, 5, 2 },    { 1, 65, 64, 8 }, { 4, 1, 16, 4 }, { 2, 127, 3, 3 },
                                       { 1, 129, 129, 1 }, { 5, 9, 257, 2 }
  };
  for (int64_t d = 0; d < 2; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < (c->effort == SMALL ? 5 : 10); i++)
      for (int64_t v = 0; v < 4; v++) {
        const int64_t *s = shapes[i];
        struct balance_how h = { s[0],
                                 s[1],
                                 s[2],
                                 s[3],
                                 c_float(dtype, i + v),
                                 v % 2 ? MOE__SIGMOID : MOE__SOFTMAX,
                                 c_layout(i + v),
                                 (int)(v / 2 * (1 + i % 2)),
                                 (int)v % 2,
                                 (int)(i + v) % 2,
                                 v == 3 ? 20 : 2 };
        one(c, dtype, h);
      }
    if (c->effort != SMALL)
      one(c, dtype, (struct balance_how){ 2, 700, 33, 2, MOE_F32, MOE__SOFTMAX, T_PACKED, 1, 1, 1, 2 });
    if (c->effort == LONG)
      one(c, dtype, (struct balance_how){ 3, 2000, 160, 6, MOE_F32, MOE__SIGMOID, T_PACKED, 1, 1, 1, 4 });
  }
}

/* cases.md B12: the loss of one layer, and with a token masked out that of the other alone. */
static void known_balance(struct conform *c, int64_t dtype)
{
  for (int masked = 0; masked < 2; masked++) {
    if (!c_begin(c, dtype, "known balance%s", masked ? " masked" : "")) return;
    struct moe__args_balance_fwd args = { .dtype = dtype, .T = 2, .S = 1, .E = 2, .K = 1, .scoring = MOE__SOFTMAX };
    int64_t real = c_real(dtype);
    num logits[4] = { { 0, 0 } }, mask[2] = { { 1, 0 }, { 0, 0 } };
    int32_t ids[2] = { 0, 0 }, counts[2] = { 2 - masked, 0 };
    logits[0].v = ref_round(log(9), real), logits[2].v = logits[0].v;
    double got[2];
    args.logits = c_in(c, real, T_PACKED, logits, SHAPE(2, 2));
    args.ids = c_in_ints(c, ids, SHAPE(2, 1));
    if (masked) args.mask = c_in(c, MOE_U8, T_PACKED, mask, SHAPE(2));
    args.losses = c_out(c, real, T_PACKED, SHAPE(2));
    args.counts = c_out(c, MOE_I32, T_PACKED, SHAPE(1, 2));
    args.probs = c_out(c, real, T_PACKED, SHAPE(1, 2));
    args.tokens = c_out(c, MOE_I32, T_PACKED, SHAPE(1));
    args.scratch = c_out(c, real, T_PACKED, SHAPE(moe__balance_scratch(2, 1, 2)));
    if (c_run_balance_fwd(c, &args)) {
      t_get(&c->m, &args.losses, got);
      if (!(fabs(got[0] - 1.8) <= 1e-6)) c_fail(c, "balance loss %.8g, wanted 1.8", got[0]);
      c_check_ints(c, "counts", &args.counts, counts);
    }
    c_end(c);
  }
}

void conform_balance_fwd(struct conform *c)
{
  for (int64_t d = 0; d < 2; d++) known_balance(c, c_dtypes[d]);
  each_balance(c, balance_fwd_case);
}

void conform_balance_bwd(struct conform *c)
{
  each_balance(c, balance_bwd_case);
}

/* ---- counts ---------------------------------------------------------------------------------------------------- */
/* Counts of kind 0: random, 1: none, 2: all equal, 3: past 2^31 in sum. */
static int32_t *make_counts(struct conform *c, int64_t n, int kind)
{
  int32_t *counts = t_ints(&c->m, n);
  for (int64_t i = 0; i < n; i++)
    counts[i] = (int32_t)(kind == 0 ? t_below(&c->m, 5) : kind == 1 ? 0 : kind == 2 ? 7 : 2000000000 - i % 2);
  return counts;
}

static void bias_case(struct conform *c, int64_t dtype, int64_t S, int64_t E, int kind)
{
  if (!c_begin(c, dtype, "S=%lld E=%lld counts %d", (long long)S, (long long)E, kind)) return;
  struct moe__args_bias_step args = { .dtype = dtype, .S = S, .E = E, .rate = 1e-3 };
  num *bias = t_uniform(&c->m, E, c_real(dtype), 1);
  int32_t *counts = make_counts(c, S * E, kind);
  args.bias = c_inout(c, c_real(dtype), T_ODD, bias, SHAPE(E));
  args.counts = c_in_ints(c, counts, SHAPE(S, E));
  if (c_run_bias_step(c, &args)) {
    ref_bias_step(bias, counts, S, E, args.rate);
    c_check(c, "bias", &args.bias, bias);
  }
  c_end(c);
}

static void stats_case(struct conform *c, int64_t dtype, int64_t S, int64_t E, int kind)
{
  if (!c_begin(c, dtype, "S=%lld E=%lld counts %d", (long long)S, (long long)E, kind)) return;
  struct moe__args_load_stats args = { .dtype = dtype, .S = S, .E = E };
  num stats[4];
  int32_t *counts = make_counts(c, S * E, kind);
  args.stats = c_out(c, c_real(dtype), T_ODD, SHAPE(4));
  args.counts = c_in_ints(c, counts, SHAPE(S, E));
  if (c_run_load_stats(c, &args)) {
    ref_load_stats(stats, counts, S, E);
    c_check(c, "stats", &args.stats, stats);
  }
  c_end(c);
}

static void each_counts(struct conform *c, void (*one)(struct conform *, int64_t, int64_t, int64_t, int))
{
  static const int64_t experts[] = { 8, 1, 3, 255, 256, 257, 1000 };
  for (int64_t d = 0; d < 2; d++)
    for (int64_t i = 0; i < 7; i++)
      for (int kind = 0; kind < 4; kind++) one(c, c_dtypes[d], 1 + (i + kind) % 3, experts[i], kind);
}

void conform_bias_step(struct conform *c)
{
  each_counts(c, bias_case);
}

void conform_load_stats(struct conform *c)
{
  each_counts(c, stats_case);
}
