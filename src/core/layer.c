/* layer.c - the layer around the routed branch: parameters as a table, where arrays lie, and the two
   sequences of ops (walk_forward, walk_backward) in which moe_experts_* is one step. */
#include "core/layer.h"

#include "core/arena.h"
#include "core/convert.h"
#include "core/experts.h"
#include "core/tensor.h"

#include <math.h>
#include <stdlib.h>

/* ---- parameters ------------------------------------------------------------------------------------------- */
/* clang-format off */
enum param {
  P_ROUTER, P_ROUTER_BIAS, P_CORRECTION, P_GATE, P_UP, P_DOWN, P_GATE_BIAS, P_UP_BIAS, P_DOWN_BIAS,
  P_SHARED_GATE_PROJ, P_SHARED_UP, P_SHARED_DOWN, P_SHARED_GATE, P_COUNT
};
/* clang-format on */
static const struct {
  const char *name;
  const char *shape; /* E, D, F, S (shared width), 1 */
  int matrix, expert;
} params[P_COUNT] = {
  [P_ROUTER] = { "router", "ED", 1, 0 },
  [P_ROUTER_BIAS] = { "router_bias", "E", 0, 0 },
  [P_CORRECTION] = { "correction_bias", "E", 0, 0 },
  [P_GATE] = { "gate", "EFD", 1, 1 },
  [P_UP] = { "up", "EFD", 1, 1 },
  [P_DOWN] = { "down", "EDF", 1, 1 },
  [P_GATE_BIAS] = { "gate_bias", "EF", 0, 1 },
  [P_UP_BIAS] = { "up_bias", "EF", 0, 1 },
  [P_DOWN_BIAS] = { "down_bias", "ED", 0, 1 },
  [P_SHARED_GATE_PROJ] = { "shared_gate_proj", "SD", 1, 0 },
  [P_SHARED_UP] = { "shared_up", "SD", 1, 0 },
  [P_SHARED_DOWN] = { "shared_down", "DS", 1, 0 },
  [P_SHARED_GATE] = { "shared_gate", "1D", 1, 0 },
};

struct moe_layer {
  moe_context *ctx;
  moe_experts *experts;
  int64_t D, F, E, K, Fs, Hs;
  int64_t dtype, real;
  int64_t shared_gate, frozen, gated, wanted; /* wanted: of the branch, with dx */
  int64_t balance_scoring;
  int has[P_COUNT];
  double balance_coef, z_coef;
  struct moe__act act;
};

const char *moe__param_dims(const char *name)
{
  for (int p = 0; p < P_COUNT; p++)
    if (!strcmp(params[p].name, name)) return params[p].shape;
  return NULL;
}

static const moe_tensor none;

static int trains(const moe_layer *l, int p)
{
  return p != P_CORRECTION && !(l->frozen && params[p].expert);
}

static int64_t extent(const moe_layer *l, char dim)
{
  switch (dim) {
  case 'E': return l->E;
  case 'D': return l->D;
  case 'F': return l->F;
  case 'S': return l->Fs;
  default: return 1;
  }
}

/* All parameters at their places (absent ones have no handle); grads: their gradients instead. */
static void lay_params(const moe_layer *l, int grads, struct moe__arena *a, moe_tensor out[P_COUNT])
{
  memset(out, 0, P_COUNT * sizeof *out);
  for (int p = 0; p < P_COUNT; p++) {
    int64_t shape[3], rank = (int64_t)strlen(params[p].shape);
    if (!l->has[p] || (grads && !trains(l, p))) continue;
    for (int64_t d = 0; d < rank; d++) shape[d] = extent(l, params[p].shape[d]);
    out[p] = moe__arena_tensor(a, grads || p == P_CORRECTION ? l->real : l->dtype, rank, shape);
  }
}

/* ---- where the arrays lie --------------------------------------------------------------------------------- */
struct kept {
  moe_tensor logits, losses, stats, counts, probs, tokens, hs, sg, z;
  moe_span branch;
};
struct work {
  moe_tensor balance, zeros, as, ys;                                  /* forward */
  moe_tensor dlogits, dlogits_st, das, dhs, aws, dsg, dz, dz_st, one; /* backward; zeros too */
  moe_span branch;
};

static moe_span lay_span(struct moe__arena *a, uint64_t bytes)
{
  moe_tensor t = moe__arena_flat(a, MOE_U8, (int64_t)bytes);
  return (moe_span){ t.handle, t.offset, bytes };
}

static void lay_kept(const moe_layer *l, int64_t T, int64_t S, uint64_t branch, struct moe__arena *a, struct kept *k)
{
  memset(k, 0, sizeof *k);
  k->logits = moe__arena_matrix(a, l->real, T, l->E);
  k->losses = moe__arena_flat(a, l->real, 2);
  k->stats = moe__arena_flat(a, l->real, 4);
  k->counts = moe__arena_matrix(a, MOE_I32, S, l->E);
  k->probs = moe__arena_matrix(a, l->real, S, l->E);
  k->tokens = moe__arena_flat(a, MOE_I32, S);
  if (l->Fs) k->hs = moe__arena_matrix(a, l->dtype, T, l->Hs);
  if (l->shared_gate) {
    k->z = moe__arena_matrix(a, l->real, T, 1);
    k->sg = moe__arena_matrix(a, l->real, T, 1);
  }
  k->branch = lay_span(a, branch);
}

static void lay_forward(const moe_layer *l, int64_t T, int64_t S, uint64_t branch, struct moe__arena *a, struct work *w)
{
  w->balance = moe__arena_flat(a, l->real, moe__balance_scratch(T, S, l->E));
  if (l->Fs) w->as = moe__arena_matrix(a, l->dtype, T, l->Fs);
  if (l->shared_gate) {
    w->ys = moe__arena_matrix(a, l->dtype, T, l->D);
    w->zeros = moe__arena_matrix(a, MOE_I32, T, 1);
  }
  w->branch = lay_span(a, branch);
}

static void lay_backward(const moe_layer *l, int64_t T, uint64_t branch, struct moe__arena *a, struct work *w)
{
  w->dlogits = moe__arena_matrix(a, l->real, T, l->E);
  w->dlogits_st = l->dtype == l->real ? w->dlogits : moe__arena_matrix(a, l->dtype, T, l->E);
  w->one = moe__arena_flat(a, l->dtype, 1);
  if (l->Fs) {
    w->das = moe__arena_matrix(a, l->dtype, T, l->Fs);
    w->dhs = moe__arena_matrix(a, l->dtype, T, l->Hs);
    w->aws = moe__arena_matrix(a, l->dtype, T, l->Fs);
  }
  if (l->shared_gate) {
    w->zeros = moe__arena_matrix(a, MOE_I32, T, 1);
    w->dsg = moe__arena_matrix(a, l->real, T, 1);
    w->dz = moe__arena_matrix(a, l->real, T, 1);
    w->dz_st = l->dtype == l->real ? w->dz : moe__arena_matrix(a, l->dtype, T, 1);
  }
  w->branch = lay_span(a, branch);
}

/* ---- the sequences ------------------------------------------------------------------------------------------ */
/* c (+)= a b', all as matrices. */
static moe_status product(struct moe__walk *w, const char *label, const moe_layer *l, int64_t how, moe_tensor c,
                          moe_tensor a, moe_tensor b, moe_tensor bias, int64_t accumulate)
{
  STEP(w, label, gemm, how, .dtype = l->dtype, .c = c, .a = a, .b = b, .bias = bias, .M = a.shape[0], .N = b.shape[0],
       .K = a.shape[1], .accumulate = accumulate, .alpha = 1);
  return MOE_OK;
}

static const struct moe__weigh sigmoid_weight = { MOE__SIGMOID, 0, 1, 0 };

static moe_status zero(struct moe__walk *w, moe_tensor t)
{
  uint64_t bytes = moe_tensor_extent(&t);
  if (w->mode != MOE__RUN || !bytes) return MOE_OK;
  return w->ctx->be->fill(w->q->be, (moe_span){ t.handle, t.offset, bytes }, 0, bytes);
}

static moe_status walk_shared_forward(struct moe__walk *w, const moe_layer *l, int64_t T, const moe_layer_io *io,
                                      const moe_tensor *p, const struct kept *k, const struct work *s)
{
  if (l->gated)
    MOE__TRY(product(w, "shared gate projection", l, MOE_AUTO, moe__columns(k->hs, 0, l->Fs), io->x,
                     p[P_SHARED_GATE_PROJ], none, 0));
  MOE__TRY(
      product(w, "shared up", l, MOE_AUTO, moe__columns(k->hs, l->Hs - l->Fs, l->Fs), io->x, p[P_SHARED_UP], none, 0));
  STEP(w, "shared activation", act_fwd, MOE_AUTO, .dtype = l->dtype, .a = s->as, .h = k->hs, .R = T, .F = l->Fs,
       .act = l->act);
  MOE__TRY(product(w, "shared down", l, MOE_AUTO, l->shared_gate ? s->ys : io->y, s->as, p[P_SHARED_DOWN], none, 0));
  if (!l->shared_gate) return MOE_OK;
  MOE__TRY(product(w, "shared gate", l, MOE_AUTO, k->z, io->x, p[P_SHARED_GATE], none, 0));
  MOE__TRY(zero(w, s->zeros));
  STEP(w, "shared gate sigmoid", weights, MOE_AUTO, .dtype = l->real, .weights = k->sg, .logits = k->z, .ids = s->zeros,
       .T = T, .E = 1, .K = 1, .weigh = sigmoid_weight);
  STEP(w, "shared gate product", combine, MOE_AUTO, .dtype = l->dtype, .y = io->y, .rows = s->ys, .weights = k->sg,
       .T = T, .K = 1, .D = l->D);
  return MOE_OK;
}

static moe_status walk_balance(struct moe__walk *w, const moe_layer *l, int64_t T, int64_t S, moe_tensor ids,
                               moe_tensor mask, const struct kept *k, const struct work *s)
{
  STEP(w, "losses", balance_fwd, MOE_AUTO, .dtype = l->real, .losses = k->losses, .counts = k->counts,
       .probs = k->probs, .tokens = k->tokens, .logits = k->logits, .ids = ids, .mask = mask, .scratch = s->balance,
       .T = T, .S = S, .E = l->E, .K = l->K, .scoring = l->balance_scoring);
  return MOE_OK;
}

static moe_status walk_router(struct moe__walk *w, const moe_layer *l, const moe_layer_io *io, const moe_tensor *p,
                              const struct kept *k)
{
  return product(w, "router", l, MOE_AUTO, k->logits, io->x, p[P_ROUTER], p[P_ROUTER_BIAS], 0);
}

static moe_status walk_shared_backward(struct moe__walk *w, const moe_layer *l, int64_t T, const moe_layer_io *io,
                                       moe_tensor x, const moe_tensor *p, const moe_tensor *g, const struct kept *k,
                                       const struct work *s)
{
  int64_t Fs = l->Fs, add = io->accumulate;
  moe_tensor dup = moe__columns(s->dhs, l->Hs - Fs, Fs), dgate = moe__columns(s->dhs, 0, Fs);
  MOE__TRY(product(w, "shared backward through down", l, MOE_AUTO, s->das, io->dy, moe__swapped(p[P_SHARED_DOWN], 0, 1),
                   none, 0));
  STEP(w, "shared backward activation", act_bwd, MOE_AUTO, .dtype = l->dtype, .dh = s->dhs, .aw = s->aws,
       .dweights = moe__flatten(s->dsg), .da = s->das, .h = k->hs, .weights = moe__flatten(k->sg), .R = T, .F = Fs,
       .plane = 1, .act = l->act);
  MOE__TRY(product(w, "shared down weights", l, MOE_AUTO, g[P_SHARED_DOWN], moe__swapped(io->dy, 0, 1),
                   moe__swapped(s->aws, 0, 1), none, add));
  MOE__TRY(product(w, "shared up weights", l, MOE_AUTO, g[P_SHARED_UP], moe__swapped(dup, 0, 1), moe__swapped(x, 0, 1),
                   none, add));
  if (l->gated)
    MOE__TRY(product(w, "shared gate projection weights", l, MOE_AUTO, g[P_SHARED_GATE_PROJ], moe__swapped(dgate, 0, 1),
                     moe__swapped(x, 0, 1), none, add));
  if (io->dx.handle) {
    MOE__TRY(product(w, "shared backward through up", l, MOE_AUTO, io->dx, dup, moe__swapped(p[P_SHARED_UP], 0, 1),
                     none, 0));
    if (l->gated)
      MOE__TRY(product(w, "shared backward through gate projection", l, MOE_AUTO, io->dx, dgate,
                       moe__swapped(p[P_SHARED_GATE_PROJ], 0, 1), none, 1));
  }
  if (!l->shared_gate) return MOE_OK;
  MOE__TRY(zero(w, s->zeros));
  STEP(w, "shared gate sigmoid backward", weights_bwd, MOE_AUTO, .dtype = l->real, .dlogits = s->dz, .dweights = s->dsg,
       .logits = k->z, .ids = s->zeros, .T = T, .E = 1, .K = 1, .weigh = sigmoid_weight);
  if (l->dtype != l->real)
    STEP(w, "shared gate cast", elt_map, MOE_AUTO, .dtype = l->real, .y = moe__flatten(s->dz_st),
         .a = moe__flatten(s->dz), .op = MOE__ELT_COPY, .n = T, .alpha = 1);
  MOE__TRY(product(w, "shared gate weights", l, MOE_AUTO, g[P_SHARED_GATE], moe__swapped(s->dz_st, 0, 1),
                   moe__swapped(x, 0, 1), none, add));
  if (io->dx.handle)
    MOE__TRY(product(w, "shared backward through gate", l, MOE_AUTO, io->dx, s->dz_st,
                     moe__swapped(p[P_SHARED_GATE], 0, 1), none, 1));
  return MOE_OK;
}

static moe_status walk_router_backward(struct moe__walk *w, const moe_layer *l, int64_t T, int64_t S,
                                       const moe_layer_io *io, moe_tensor x, moe_tensor mask, const moe_tensor *p,
                                       const moe_tensor *g, const struct kept *k, const struct work *s)
{
  if (l->balance_coef != 0 || l->z_coef != 0)
    STEP(w, "losses backward", balance_bwd, MOE_AUTO, .dtype = l->real, .dlogits = s->dlogits, .logits = k->logits,
         .counts = k->counts, .probs = k->probs, .tokens = k->tokens, .mask = mask, .scale = io->aux_scale, .T = T,
         .S = S, .E = l->E, .K = l->K, .scoring = l->balance_scoring, .accumulate = 1, .balance_coef = l->balance_coef,
         .z_coef = l->z_coef);
  if (l->dtype != l->real)
    STEP(w, "router cast", elt_map, MOE_AUTO, .dtype = l->real, .y = moe__flatten(s->dlogits_st),
         .a = moe__flatten(s->dlogits), .op = MOE__ELT_COPY, .n = T * l->E, .alpha = 1);
  MOE__TRY(product(w, "router weights", l, MOE_AUTO, g[P_ROUTER], moe__swapped(s->dlogits_st, 0, 1),
                   moe__swapped(x, 0, 1), none, io->accumulate));
  if (l->has[P_ROUTER_BIAS]) { /* column sums: a product with a row of ones, one element read T times */
    STEP(w, "one", elt_map, MOE_AUTO, .dtype = l->real, .y = s->one, .op = MOE__ELT_FILL, .n = 1, .alpha = 1);
    moe_tensor ones = moe__view(s->one, 0, 2, (const int64_t[]){ 1, T }, (const int64_t[]){ 0, 0 });
    moe_tensor db = moe__view(g[P_ROUTER_BIAS], 0, 2, (const int64_t[]){ 1, l->E }, (const int64_t[]){ l->E, 1 });
    MOE__TRY(product(w, "router bias", l, MOE_AUTO, db, ones, moe__swapped(s->dlogits_st, 0, 1), none, io->accumulate));
  }
  if (io->dx.handle)
    MOE__TRY(product(w, "backward through router", l, MOE_AUTO, io->dx, s->dlogits_st, moe__swapped(p[P_ROUTER], 0, 1),
                     none, 1));
  return MOE_OK;
}

/* Everything but the branch, over tensors that are never read. */
static moe_status walk_unrun(const moe_layer *l, struct moe__walk *w, int64_t T)
{
  moe_span nowhere = { moe__placeholder(), 0, UINT64_MAX / 2 };
  struct moe__arena a = moe__arena_over(nowhere);
  moe_tensor p[P_COUNT], g[P_COUNT];
  struct kept k;
  struct work s = { 0 };
  moe_layer_io io = moe_layer_io_init();
  lay_params(l, 0, &a, p);
  lay_params(l, 1, &a, g);
  lay_kept(l, T, 1, 0, &a, &k);
  lay_forward(l, T, 1, 0, &a, &s);
  lay_backward(l, T, 0, &a, &s);
  io.x = io.y = io.dx = io.dy = moe__matrix(moe__placeholder(), 0, l->dtype, T, l->D);
  MOE__TRY(walk_router(w, l, &io, p, &k));
  if (l->Fs) MOE__TRY(walk_shared_forward(w, l, T, &io, p, &k, &s));
  MOE__TRY(walk_balance(w, l, T, 1, moe__matrix(moe__placeholder(), 0, MOE_I32, T, l->K), none, &k, &s));
  if (w->mode == MOE__EXPLAIN) MOE__TRY(moe__experts_explain(l->experts, w, T));
  if (l->Fs) MOE__TRY(walk_shared_backward(w, l, T, &io, io.x, p, g, &k, &s));
  MOE__TRY(walk_router_backward(w, l, T, 1, &io, io.x, none, p, g, &k, &s));
  if (w->mode == MOE__EXPLAIN) return MOE_OK;
  STEP(w, "init", elt_normal, MOE_AUTO, .dtype = l->real);
  STEP(w, "metrics", load_stats, MOE_AUTO, .dtype = l->real, .E = l->E);
  STEP(w, "bias step", bias_step, MOE_AUTO, .dtype = l->real, .E = l->E);
  return MOE_OK;
}

/* ---- create ---------------------------------------------------------------------------------------------------- */
moe_status moe_layer_create(moe_layer **out, moe_context *ctx, const moe_layer_desc *given)
{
  static const char fn[] = "moe_layer_create";
  moe_layer_desc desc;
  moe_layer l;
  moe_status st;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (!ctx) return moe__fail(MOE_ERR_INVALID, "%s: ctx is NULL", fn);
  MOE__TRY(moe__struct_in(&desc, sizeof desc, given, fn, "desc"));
  memset(&l, 0, sizeof l);
  if (desc.d_shared < 0 || desc.d_shared > 1 << 24)
    return moe__fail(MOE_ERR_INVALID, "%s: d_shared %lld outside 0..2^24", fn, (long long)desc.d_shared);
  if (desc.shared_gate && !desc.d_shared) return moe__fail(MOE_ERR_INVALID, "%s: shared_gate without d_shared", fn);
  if (!isfinite(desc.balance_coef) || !isfinite(desc.z_coef) || desc.balance_coef < 0 || desc.z_coef < 0)
    return moe__fail(MOE_ERR_INVALID, "%s: balance_coef %g, z_coef %g: wanted finite and >= 0", fn, desc.balance_coef,
                     desc.z_coef);
  l.balance_scoring = desc.balance_scoring ? desc.balance_scoring : MOE_SOFTMAX;
  if (l.balance_scoring != MOE_SOFTMAX && l.balance_scoring != MOE_SIGMOID)
    return moe__fail(MOE_ERR_INVALID, "%s: balance_scoring %lld, wanted MOE_SOFTMAX or MOE_SIGMOID", fn,
                     (long long)l.balance_scoring);

  moe_experts_desc ed = moe_experts_desc_init();
  ed.d_model = desc.d_model;
  ed.d_ff = desc.d_ff;
  ed.n_experts = desc.n_experts;
  ed.dtype = desc.dtype;
  ed.selection = desc.selection;
  ed.weights = desc.weights;
  ed.activation = desc.activation;
  ed.hidden_bias = desc.hidden_bias;
  ed.down_bias = desc.down_bias;
  ed.forward_strategy = desc.forward_strategy;
  ed.backward_strategy = desc.backward_strategy;
  ed.reduction = desc.reduction;
  if (desc.frozen_experts) ed.wanted = MOE_GRAD_INPUT | MOE_GRAD_LOGITS;
  st = moe_experts_create(&l.experts, ctx, &ed);
  if (st) return moe__fail_in(st, fn);

  struct moe__select select;
  int64_t softmax_bias;
  st = moe__read_selection(&select, &softmax_bias, desc.selection, desc.n_experts, fn);
  if (!st) st = moe__read_activation(&l.act, desc.activation, fn);
  if (!st && desc.correction_bias && select.kind != MOE__SELECT_GROUPED_SIGMOID && !softmax_bias)
    st = moe__fail(MOE_ERR_INVALID, "%s: correction_bias belongs to grouped sigmoid selection (or softmax_bias)", fn);
  l.ctx = ctx;
  l.D = desc.d_model;
  l.F = desc.d_ff;
  l.E = desc.n_experts;
  l.K = select.K;
  l.Fs = desc.d_shared;
  l.gated = l.act.gated;
  l.Hs = l.gated ? 2 * l.Fs : l.Fs;
  l.dtype = desc.dtype;
  l.real = l.dtype == MOE_F64 ? MOE_F64 : MOE_F32;
  l.shared_gate = desc.shared_gate != 0;
  l.frozen = desc.frozen_experts != 0;
  l.balance_coef = desc.balance_coef;
  l.z_coef = desc.z_coef;
  l.wanted = desc.frozen_experts ? ed.wanted : moe__experts_all(l.experts);
  l.has[P_ROUTER] = l.has[P_UP] = l.has[P_DOWN] = 1;
  l.has[P_GATE] = l.gated != 0;
  l.has[P_ROUTER_BIAS] = desc.router_bias != 0;
  l.has[P_CORRECTION] = desc.correction_bias != 0;
  l.has[P_UP_BIAS] = desc.hidden_bias != 0;
  l.has[P_GATE_BIAS] = desc.hidden_bias && l.gated;
  l.has[P_DOWN_BIAS] = desc.down_bias != 0;
  l.has[P_SHARED_UP] = l.has[P_SHARED_DOWN] = l.Fs != 0;
  l.has[P_SHARED_GATE_PROJ] = l.Fs && l.gated;
  l.has[P_SHARED_GATE] = l.shared_gate != 0;
  struct moe__walk w = { .mode = MOE__PREPARE, .ctx = ctx };
  if (!st) {
    st = walk_unrun(&l, &w, 0);
    if (st) moe__fail_in(st, fn);
  }
  if (!st && !(*out = malloc(sizeof l))) st = moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  if (st) {
    moe_experts_free(l.experts);
    return st;
  }
  **out = l;
  moe__context_ref(ctx);
  return MOE_OK;
}

void moe_layer_free(moe_layer *l)
{
  if (!l) return;
  moe_experts_free(l->experts);
  moe__context_unref(l->ctx);
  free(l);
}

moe_status moe_layer_param(moe_tensor *param, moe_tensor *grad, moe_layer_param_info *info, const moe_layer *l,
                           moe_span param_span, moe_span grad_span, int64_t index)
{
  static const char fn[] = "moe_layer_param";
  moe_tensor p[P_COUNT], g[P_COUNT];
  struct moe__arena pa = moe__arena_over(param_span), ga = moe__arena_over(grad_span);
  int64_t at = index;
  int i = 0;
  if (!l) return moe__fail(MOE_ERR_INVALID, "%s: layer is NULL", fn);
  while (index >= 0 && i < P_COUNT && (!l->has[i] || at-- > 0)) i++;
  if (index < 0 || i == P_COUNT)
    return moe__fail(MOE_ERR_INVALID, "%s: index %lld is past the last", fn, (long long)index);
  lay_params(l, 0, &pa, p);
  lay_params(l, 1, &ga, g);
  if (param) MOE__TRY(moe__arena_check(&pa, fn, "params"));
  if (grad && trains(l, i)) MOE__TRY(moe__arena_check(&ga, fn, "grads"));
  if (info) {
    moe_layer_param_info own = moe_layer_param_info_init();
    own.name = params[i].name;
    own.trainable = trains(l, i);
    own.decays = params[i].matrix;
    MOE__TRY(moe__struct_out(info, &own, sizeof own, fn, "info"));
  }
  if (param) *param = p[i];
  if (grad) *grad = g[i];
  return MOE_OK;
}

moe_status moe_layer_parameter_counts(int64_t *all, int64_t *active, const moe_layer *l)
{
  if (!l) return moe__fail(MOE_ERR_INVALID, "moe_layer_parameter_counts: layer is NULL");
  int64_t router = l->E * l->D + (l->has[P_ROUTER_BIAS] ? l->E : 0), shared = 0, per_expert = 0;
  for (int p = 0; p < P_COUNT; p++) {
    int64_t count = 1;
    if (!l->has[p]) continue;
    for (const char *d = params[p].shape; *d; d++) count *= extent(l, *d);
    if (params[p].expert) per_expert += count / l->E;
    else if (p >= P_SHARED_GATE_PROJ) shared += count;
  }
  return moe_parameter_counts(all, active, router, per_expert, l->E, l->K, shared);
}

/* ---- measure, explain, init ------------------------------------------------------------------------------------ */
static moe_status check_tokens(const char *fn, const moe_layer *l, int64_t T, int64_t S)
{
  int64_t R;
  if (T < 0 || moe__mul(&R, T, l->K) || R > INT32_MAX)
    return moe__fail(MOE_ERR_INVALID, "%s: %lld tokens of top_k %lld, wanted 0 <= T*K < 2^31", fn, (long long)T,
                     (long long)l->K);
  if (S < 1 || T % S)
    return moe__fail(MOE_ERR_INVALID, "%s: %lld sequences do not divide %lld tokens", fn, (long long)S, (long long)T);
  return MOE_OK;
}

static moe_status measure(const moe_layer *l, int64_t T, int64_t S, moe_layer_bytes *out, const char *fn)
{
  moe_experts_bytes train = moe_experts_bytes_init(), infer = moe_experts_bytes_init();
  struct moe__arena p = moe__arena_over((moe_span){ 0 }), g = p, saved = p, forward = p, backward = p, alone = p;
  moe_tensor ignored[P_COUNT];
  struct kept k;
  struct work s = { 0 };
  MOE__TRY(moe_experts_measure(&train, l->experts, T, l->wanted));
  MOE__TRY(moe_experts_measure(&infer, l->experts, T, 0));
  lay_params(l, 0, &p, ignored);
  lay_params(l, 1, &g, ignored);
  lay_kept(l, T, S, train.saved, &saved, &k);
  lay_forward(l, T, S, train.scratch, &forward, &s);
  lay_backward(l, T, train.scratch, &backward, &s);
  lay_kept(l, T, S, 0, &alone, &k);
  lay_forward(l, T, S, infer.scratch, &alone, &s);
  out->params = p.used;
  out->grads = g.used;
  out->saved = saved.used;
  out->scratch = forward.used > backward.used ? forward.used : backward.used;
  out->inference = alone.used;
  if (out->params > INT64_MAX || out->grads > INT64_MAX || out->saved > INT64_MAX || out->scratch > INT64_MAX ||
      out->inference > INT64_MAX)
    return moe__fail(MOE_ERR_INVALID, "%s: more than 2^63-1 bytes", fn);
  return MOE_OK;
}

moe_status moe_layer_measure(moe_layer_bytes *out, const moe_layer *l, int64_t T, int64_t S)
{
  static const char fn[] = "moe_layer_measure";
  moe_layer_bytes own = moe_layer_bytes_init();
  if (!l) return moe__fail(MOE_ERR_INVALID, "%s: layer is NULL", fn);
  MOE__TRY(check_tokens(fn, l, T, S ? S : 1));
  MOE__TRY(measure(l, T, S ? S : 1, &own, fn));
  return moe__struct_out(out, &own, sizeof own, fn, "out");
}

moe_status moe_layer_explain(const moe_layer *l, int64_t T, char *text, uint64_t bytes, uint64_t *needed)
{
  static const char fn[] = "moe_layer_explain";
  if (!l || (bytes && !text)) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, l ? "text" : "layer");
  MOE__TRY(check_tokens(fn, l, T, 1));
  struct moe__walk w = { .mode = MOE__EXPLAIN, .ctx = l->ctx, .text = text, .room = bytes };
  if (bytes) text[0] = 0;
  MOE__TRY(walk_unrun(l, &w, T));
  if (needed) *needed = w.used + 1;
  return MOE_OK;
}

moe_status moe__layer_check(const char *fn, const moe_layer *l, const moe_queue *q)
{
  if (!l || !q) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, l ? "queue" : "layer");
  if (l->ctx != q->ctx) return moe__fail(MOE_ERR_INVALID, "%s: queue and layer are of different contexts", fn);
  return MOE_OK;
}

moe_status moe_layer_init(moe_layer *l, moe_queue *q, moe_span span, uint64_t seed, double stddev)
{
  static const char fn[] = "moe_layer_init";
  struct moe__arena a = moe__arena_over(span);
  moe_tensor p[P_COUNT];
  MOE__TRY(moe__layer_check(fn, l, q));
  if (!isfinite(stddev) || stddev < 0)
    return moe__fail(MOE_ERR_INVALID, "%s: stddev %g, wanted finite and >= 0", fn, stddev);
  lay_params(l, 0, &a, p);
  MOE__TRY(moe__arena_check(&a, fn, "params"));
  struct moe__walk w = { .mode = MOE__RUN, .ctx = l->ctx, .q = q };
  for (int i = 0; i < P_COUNT; i++) {
    if (!p[i].handle) continue;
    if (!params[i].matrix) {
      MOE__TRY(zero(&w, p[i]));
      continue;
    }
    STEP(&w, "init", elt_normal, MOE_AUTO, .dtype = l->real, .y = moe__flatten(p[i]), .n = moe_tensor_count(&p[i]),
         .seed = (int64_t)seed, .stream = i, .stddev = stddev);
  }
  return l->ctx->be->flush(q->be);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */
static void model_of(const moe_tensor *p, moe_experts_io *e)
{
  e->gate = p[P_GATE];
  e->up = p[P_UP];
  e->down = p[P_DOWN];
  e->gate_bias = p[P_GATE_BIAS];
  e->up_bias = p[P_UP_BIAS];
  e->down_bias = p[P_DOWN_BIAS];
}

static moe_status forward(moe_layer *l, moe_queue *q, const moe_layer_io *given, moe_layer_state *state, int training,
                          const char *fn)
{
  moe_layer_io io;
  moe_experts_bytes branch = moe_experts_bytes_init();
  moe_tensor p[P_COUNT];
  struct kept k;
  struct work s = { 0 };
  MOE__TRY(moe__layer_check(fn, l, q));
  MOE__TRY(moe__struct_in(&io, sizeof io, given, fn, "io"));
  if (io.x.rank != 2) return moe__fail(MOE_ERR_INVALID, "%s: x has rank %d, 2 is wanted", fn, io.x.rank);
  int64_t T = io.x.shape[0], S = io.sequences ? io.sequences : 1;
  MOE__TRY(check_tokens(fn, l, T, S));
  MOE__TRY(WANT(fn, io.x, l->dtype, T, l->D));
  MOE__TRY(WANT_OUT(fn, io.y, l->dtype, T, l->D));
  MOE__TRY(moe__apart(fn, "y", &io.y, "x", &io.x));
  if (io.mask.handle) {
    MOE__TRY(WANT(fn, io.mask, MOE_U8, T));
    if (!moe_tensor_is_packed(&io.mask)) return moe__fail(MOE_ERR_INVALID, "%s: mask is not packed", fn);
  }
  struct moe__arena pa = moe__arena_over(io.params), saved = moe__arena_over(io.saved),
                    scratch = moe__arena_over(io.scratch);
  lay_params(l, 0, &pa, p);
  MOE__TRY(moe__arena_check(&pa, fn, "params"));
  MOE__TRY(moe_experts_measure(&branch, l->experts, T, training ? l->wanted : 0));
  lay_kept(l, T, S, branch.saved, training ? &saved : &scratch, &k);
  lay_forward(l, T, S, branch.scratch, &scratch, &s);
  if (training) MOE__TRY(moe__arena_check(&saved, fn, "saved"));
  MOE__TRY(moe__arena_check(&scratch, fn, "scratch"));

  moe_experts_io e = moe_experts_io_init();
  moe_state inner = moe_state_init();
  e.x = io.x;
  e.logits = k.logits;
  e.correction_bias = p[P_CORRECTION];
  e.ids = io.ids;
  e.y = io.y;
  e.saved = k.branch;
  e.scratch = s.branch;
  model_of(p, &e);
  if (io.ids.handle) {
    MOE__TRY(WANT(fn, io.ids, MOE_I32, T, l->K));
    if (!moe_tensor_is_packed(&io.ids)) return moe__fail(MOE_ERR_INVALID, "%s: ids is not packed", fn);
  }

  moe_layer_state own = moe_layer_state_init();
  own.layer = l;
  own.tokens = T;
  own.sequences = S;
  own.x = io.x;
  own.mask = io.mask;
  own.saved = io.saved;
  if (training) MOE__TRY(moe__struct_out(state, &own, 8, fn, "state")); /* refuse a bad struct before anything runs */
  struct moe__walk w = { .mode = MOE__RUN, .ctx = l->ctx, .q = q };
  MOE__TRY(walk_router(&w, l, &io, p, &k));
  if (l->Fs) MOE__TRY(walk_shared_forward(&w, l, T, &io, p, &k, &s));
  MOE__TRY(moe__experts_forward(l->experts, q, &e, training ? l->wanted : 0, training ? &inner : NULL,
                                l->Fs ? &io.y : NULL, fn));
  if (!training) return MOE_OK;
  moe_tensor ids;
  MOE__TRY(moe_experts_route_ids(&ids, &inner));
  MOE__TRY(walk_balance(&w, l, T, S, ids, io.mask, &k, &s));
  MOE__TRY(l->ctx->be->flush(q->be));
  return moe__struct_out(state, &own, sizeof own, fn, "state");
}

moe_status moe_layer_forward(moe_layer *l, moe_queue *q, const moe_layer_io *io, moe_layer_state *state)
{
  static const char fn[] = "moe_layer_forward";
  if (!state) return moe__fail(MOE_ERR_INVALID, "%s: state is NULL", fn);
  return forward(l, q, io, state, 1, fn);
}

moe_status moe_layer_inference(moe_layer *l, moe_queue *q, const moe_layer_io *io)
{
  return forward(l, q, io, NULL, 0, "moe_layer_inference");
}

/* ---- states -------------------------------------------------------------------------------------------------------- */
static moe_status open_state(moe_layer_state *own, struct kept *k, moe_state *inner, const moe_layer_state *given,
                             const char *fn)
{
  moe_experts_bytes branch = moe_experts_bytes_init();
  MOE__TRY(moe__struct_in(own, sizeof *own, given, fn, "state"));
  const moe_layer *l = own->layer;
  if (!l) return moe__fail(MOE_ERR_STATE, "%s: state was not filled by moe_layer_forward", fn);
  MOE__TRY(moe_experts_measure(&branch, l->experts, own->tokens, l->wanted));
  struct moe__arena saved = moe__arena_over(own->saved);
  lay_kept(l, own->tokens, own->sequences, branch.saved, &saved, k);
  MOE__TRY(moe__arena_check(&saved, fn, "saved"));
  *inner = moe_state_init();
  inner->experts = l->experts;
  inner->tokens = own->tokens;
  inner->wanted = l->wanted;
  inner->x = own->x;
  inner->logits = k->logits;
  inner->saved = k->branch;
  return MOE_OK;
}

#define VIEW(name, what)                                                                                               \
  moe_status moe_layer_##name(moe_tensor *name, const moe_layer_state *state)                                          \
  {                                                                                                                    \
    moe_layer_state own;                                                                                               \
    moe_state inner;                                                                                                   \
    struct kept k;                                                                                                     \
    if (!name) return moe__fail(MOE_ERR_INVALID, "moe_layer_" #name ": " #name " is NULL");                            \
    MOE__TRY(open_state(&own, &k, &inner, state, "moe_layer_" #name));                                                 \
    what;                                                                                                              \
    return MOE_OK;                                                                                                     \
  }
VIEW(route_ids, MOE__TRY(moe_experts_route_ids(route_ids, &inner)))
VIEW(route_weights, MOE__TRY(moe_experts_route_weights(route_weights, &inner)))
VIEW(logits, *logits = k.logits)
VIEW(counts, *counts = k.counts)
VIEW(losses, *losses = k.losses)

moe_status moe__layer_view(struct moe__layer_view *out, const moe_layer_state *state, const char *fn)
{
  moe_layer_state own;
  moe_state inner;
  struct kept k;
  MOE__TRY(open_state(&own, &k, &inner, state, fn));
  const moe_layer *l = own.layer;
  MOE__TRY(moe__experts_routed(&out->routed, &inner, fn));
  out->act = l->act;
  out->counts = k.counts;
  out->tokens = k.tokens;
  out->balance_scoring = l->balance_scoring;
  out->balance_coef = l->balance_coef;
  out->z_coef = l->z_coef;
  return MOE_OK;
}

static moe_status read_tensor(moe_queue *q, void *to, moe_tensor t)
{
  uint64_t bytes = moe_tensor_extent(&t);
  return moe_span_read(q, to, (moe_span){ t.handle, t.offset, bytes }, bytes);
}

moe_status moe_layer_metrics_read(moe_layer_metrics *out, int32_t *load, moe_layer *l, moe_queue *q,
                                  const moe_layer_state *state)
{
  static const char fn[] = "moe_layer_metrics_read";
  moe_layer_metrics m = moe_layer_metrics_init();
  moe_layer_state own;
  moe_state inner;
  struct kept k;
  double losses[2], stats[4];
  MOE__TRY(moe__layer_check(fn, l, q));
  MOE__TRY(open_state(&own, &k, &inner, state, fn));
  if (own.layer != l) return moe__fail(MOE_ERR_STATE, "%s: state is of another layer", fn);
  struct moe__walk w = { .mode = MOE__RUN, .ctx = l->ctx, .q = q };
  STEP(&w, "metrics", load_stats, MOE_AUTO, .dtype = l->real, .stats = k.stats, .counts = k.counts, .S = own.sequences,
       .E = l->E);
  MOE__TRY(read_tensor(q, losses, k.losses));
  MOE__TRY(read_tensor(q, stats, k.stats));
  m.balance = moe__to_double(losses, l->real, 0);
  m.z = moe__to_double(losses, l->real, 1);
  m.entropy = moe__to_double(stats, l->real, 0);
  m.imbalance = moe__to_double(stats, l->real, 1);
  m.dead = (int64_t)moe__to_double(stats, l->real, 2);
  m.slots = (int64_t)moe__to_double(stats, l->real, 3);
  if (load) {
    int32_t *counts = malloc((size_t)(own.sequences * l->E) * sizeof *counts);
    if (!counts) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
    moe_status st = read_tensor(q, counts, k.counts);
    for (int64_t e = 0; !st && e < l->E; e++) {
      load[e] = 0;
      for (int64_t i = 0; i < own.sequences; i++) load[e] += counts[i * l->E + e];
    }
    free(counts);
    MOE__TRY(st);
  }
  return moe__struct_out(out, &m, sizeof m, fn, "out");
}

moe_status moe_layer_bias_step(moe_layer *l, moe_queue *q, moe_span span, const moe_tensor *counts, double rate)
{
  static const char fn[] = "moe_layer_bias_step";
  struct moe__arena a = moe__arena_over(span);
  moe_tensor p[P_COUNT];
  MOE__TRY(moe__layer_check(fn, l, q));
  if (!l->has[P_CORRECTION]) return moe__fail(MOE_ERR_INVALID, "%s: the layer has no correction_bias", fn);
  if (!counts || counts->rank != 2) return moe__fail(MOE_ERR_INVALID, "%s: counts wants rank 2", fn);
  if (!isfinite(rate)) return moe__fail(MOE_ERR_INVALID, "%s: rate is not finite", fn);
  const int64_t S = counts->shape[0];
  MOE__TRY(moe__want(fn, "counts", counts, MOE_I32, 2, (const int64_t[]){ S, l->E }));
  lay_params(l, 0, &a, p);
  MOE__TRY(moe__arena_check(&a, fn, "params"));
  struct moe__walk w = { .mode = MOE__RUN, .ctx = l->ctx, .q = q };
  STEP(&w, "bias step", bias_step, MOE_AUTO, .dtype = l->real, .bias = p[P_CORRECTION], .counts = *counts, .S = S,
       .E = l->E, .rate = rate);
  return l->ctx->be->flush(q->be);
}

/* ---- backward ------------------------------------------------------------------------------------------------------- */
moe_status moe_layer_backward(moe_layer *l, moe_queue *q, const moe_layer_state *given_state, const moe_layer_io *given)
{
  static const char fn[] = "moe_layer_backward";
  moe_layer_io io;
  moe_layer_state own;
  moe_state inner;
  moe_experts_bytes branch = moe_experts_bytes_init();
  moe_tensor p[P_COUNT], g[P_COUNT];
  struct kept k;
  struct work s = { 0 };
  MOE__TRY(moe__layer_check(fn, l, q));
  MOE__TRY(open_state(&own, &k, &inner, given_state, fn));
  MOE__TRY(moe__struct_in(&io, sizeof io, given, fn, "io"));
  if (own.layer != l) return moe__fail(MOE_ERR_STATE, "%s: state is of another layer", fn);
  int64_t T = own.tokens, S = own.sequences;
  MOE__TRY(WANT(fn, io.dy, l->dtype, T, l->D));
  if (io.dx.handle) MOE__TRY(WANT_OUT(fn, io.dx, l->dtype, T, l->D));
  MOE__TRY(moe__apart(fn, "dx", &io.dx, "x", &own.x));
  MOE__TRY(moe__apart(fn, "dx", &io.dx, "dy", &io.dy));
  if (io.aux_scale.handle) MOE__TRY(WANT(fn, io.aux_scale, l->real, 1));
  struct moe__arena pa = moe__arena_over(io.params), ga = moe__arena_over(io.grads),
                    scratch = moe__arena_over(io.scratch);
  lay_params(l, 0, &pa, p);
  lay_params(l, 1, &ga, g);
  MOE__TRY(moe_experts_measure(&branch, l->experts, T, l->wanted));
  lay_backward(l, T, branch.scratch, &scratch, &s);
  MOE__TRY(moe__arena_check(&pa, fn, "params"));
  MOE__TRY(moe__arena_check(&ga, fn, "grads"));
  MOE__TRY(moe__arena_check(&scratch, fn, "scratch"));

  moe_experts_io e = moe_experts_io_init();
  moe_experts_grads eg = moe_experts_grads_init();
  e.scratch = s.branch;
  model_of(p, &e);
  eg.dy = io.dy;
  eg.dx = io.dx;
  eg.dlogits = s.dlogits;
  eg.dgate = g[P_GATE];
  eg.dup = g[P_UP];
  eg.ddown = g[P_DOWN];
  eg.dgate_bias = g[P_GATE_BIAS];
  eg.dup_bias = g[P_UP_BIAS];
  eg.ddown_bias = g[P_DOWN_BIAS];
  eg.accumulate = io.accumulate;
  struct moe__walk w = { .mode = MOE__RUN, .ctx = l->ctx, .q = q };
  if (l->Fs) MOE__TRY(walk_shared_backward(&w, l, T, &io, own.x, p, g, &k, &s));
  MOE__TRY(moe__experts_backward(l->experts, q, &inner, &e, &eg,
                                 io.dx.handle ? l->wanted : l->wanted & ~(int64_t)MOE_GRAD_INPUT,
                                 l->Fs && io.dx.handle ? &io.dx : NULL, fn));
  MOE__TRY(walk_router_backward(&w, l, T, S, &io, own.x, own.mask, p, g, &k, &s));
  return l->ctx->be->flush(q->be);
}
