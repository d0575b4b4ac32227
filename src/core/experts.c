/* experts.c - the routed expert branch as straight sequences of ops (walk_forward, walk_backward), and
   where each of its arrays lies (lay_*).

   Kept for backward, exactly: H [R,F or 2F] before the activation, weights, ids, offs, row2slot, slot2row.
   Neither Y, nor the gathered x, nor A: the routing-weight gradient is <dA', A> with A recomputed from H. */
#include "core/experts.h"

#include "core/arena.h"
#include "core/tensor.h"

#include <stdlib.h>

struct moe_experts {
  moe_context *ctx;
  int64_t D, F, E, K, H; /* H: width of the hidden rows, F or 2F */
  int64_t dtype, real, logits_dtype, grad_dtype;
  int64_t softmax_bias, hidden_bias, down_bias, wanted, forward_strategy, backward_strategy, plane;
  struct moe__select select;
  struct moe__weigh weigh;
  struct moe__act act;
  moe_tensor gate, up, down; /* declared layouts, no handles */
};

static const moe_tensor none;

/* ---- where the arrays lie --------------------------------------------------------------------------------- */
struct kept {
  moe_tensor h, weights, ids, offs, row2slot, slot2row;
};
struct work {
  moe_tensor a, rows, plan;                 /* forward */
  moe_tensor da, dh, aw, dx_rows, dweights; /* backward */
};

static int64_t bias_only(int64_t wanted)
{
  return wanted && !(wanted & ~(int64_t)MOE_GRAD_DOWN_BIAS);
}

static int keeps_hidden(int64_t wanted)
{
  return wanted && !bias_only(wanted);
}

/* `with_h`: the hidden rows too. */
static void lay_kept(const moe_experts *e, int64_t T, int with_h, struct moe__arena *a, struct kept *k)
{
  int64_t R = T * e->K;
  k->weights = moe__arena_matrix(a, e->real, T, e->K);
  k->ids = moe__arena_matrix(a, MOE_I32, T, e->K);
  k->offs = moe__arena_flat(a, MOE_I32, e->E + 1);
  k->row2slot = moe__arena_flat(a, MOE_I32, R);
  k->slot2row = moe__arena_matrix(a, MOE_I32, T, e->K);
  if (with_h) k->h = moe__arena_matrix(a, e->dtype, R, e->H);
}

static void lay_forward(const moe_experts *e, int64_t T, int64_t wanted, struct moe__arena *saved,
                        struct moe__arena *scratch, struct kept *k, struct work *w)
{
  int64_t R = T * e->K;
  int keeps_h = keeps_hidden(wanted);
  lay_kept(e, T, keeps_h, wanted ? saved : scratch, k);
  if (!keeps_h) k->h = moe__arena_matrix(scratch, e->dtype, R, e->H);
  w->a = moe__arena_matrix(scratch, e->dtype, R, e->F);
  w->rows = moe__arena_matrix(scratch, e->dtype, R, e->D);
  w->plan = moe__arena_flat(scratch, MOE_I32, moe__plan_scratch(R, e->E));
}

static void lay_backward(const moe_experts *e, int64_t T, int64_t wanted, struct moe__arena *scratch, struct work *w)
{
  int64_t R = T * e->K;
  if (bias_only(wanted)) return;
  w->da = moe__arena_matrix(scratch, e->dtype, R, e->F);
  w->dh = moe__arena_matrix(scratch, e->dtype, R, e->H);
  if (wanted & MOE_GRAD_DOWN) w->aw = moe__arena_matrix(scratch, e->dtype, R, e->F);
  if (wanted & MOE_GRAD_INPUT) w->dx_rows = moe__arena_matrix(scratch, e->dtype, R, e->D);
  if (wanted & MOE_GRAD_LOGITS) w->dweights = moe__arena_matrix(scratch, e->real, T, e->K);
}

/* ---- the sequences ------------------------------------------------------------------------------------------ */
static moe_status walk_forward(struct moe__walk *w, const moe_experts *e, int64_t T, const moe_experts_io *io,
                               const moe_tensor *add, const struct kept *k, const struct work *s)
{
  int64_t R = T * e->K, E = e->E, gated = e->act.gated, how = e->forward_strategy;
  moe_tensor health = w->q ? w->q->health : none;
  if (!io->ids.handle || w->mode != MOE__RUN)
    STEP(w, "select", select, MOE_AUTO, .dtype = e->real, .ids = k->ids, .weights = k->weights, .logits = io->logits,
         .bias = io->correction_bias, .T = T, .E = E, .select = e->select, .weigh = e->weigh);
  else if (R)
    MOE__TRY(w->ctx->be->copy(w->q->be, (moe_span){ k->ids.handle, k->ids.offset, (uint64_t)R * 4 },
                              (moe_span){ io->ids.handle, io->ids.offset, (uint64_t)R * 4 }, (uint64_t)R * 4));
  if (io->ids.handle || w->mode != MOE__RUN)
    STEP(w, "weights of given ids", weights, MOE_AUTO, .dtype = e->real, .weights = k->weights, .logits = io->logits,
         .ids = k->ids, .health = health, .T = T, .E = E, .K = e->K, .weigh = e->weigh);
  STEP(w, "plan", plan, MOE_AUTO, .dtype = e->real, .offs = k->offs, .row2slot = k->row2slot,
       .slot2row = moe__flatten(k->slot2row), .ids = k->ids, .weights = k->weights, .health = health,
       .scratch = s->plan, .T = T, .K = e->K, .E = E);
  STEP(w, "forward up", ggemm_rows, how, .dtype = e->dtype, .c = k->h, .a = io->x,
       .b = { gated ? io->gate : io->up, gated ? io->up : none },
       .bias = { gated ? io->gate_bias : io->up_bias, gated ? io->up_bias : none }, .offs = k->offs, .map = k->row2slot,
       .R = R, .E = E, .N = e->H, .K = e->D, .split = gated ? MOE__SPLIT_N : MOE__SPLIT_NONE, .div = e->K);
  STEP(w, "forward activation", act_fwd, MOE_AUTO, .dtype = e->dtype, .a = s->a, .h = k->h, .offs = k->offs, .R = R,
       .F = e->F, .E = E, .act = e->act);
  STEP(w, "forward down", ggemm_rows, how, .dtype = e->dtype, .c = s->rows, .a = s->a, .b = { io->down },
       .bias = { io->down_bias }, .offs = k->offs, .R = R, .E = E, .N = e->D, .K = e->F, .div = 1);
  STEP(w, "forward combine", combine, MOE_AUTO, .dtype = e->dtype, .y = io->y, .rows = s->rows, .weights = k->weights,
       .slot2row = k->slot2row, .add = add ? *add : none, .T = T, .K = e->K, .D = e->D);
  return MOE_OK;
}

static moe_status walk_backward(struct moe__walk *w, const moe_experts *e, int64_t T, int64_t wanted,
                                const moe_state *state, const moe_experts_io *io, const moe_experts_grads *g,
                                const moe_tensor *add, const struct kept *k, const struct work *s)
{
  int64_t R = T * e->K, E = e->E, D = e->D, F = e->F, gated = e->act.gated, how = e->backward_strategy;
  int64_t both = MOE_GRAD_GATE | MOE_GRAD_UP, bias_both = MOE_GRAD_GATE_BIAS | MOE_GRAD_UP_BIAS;
  int fused = 0;
  if (wanted & MOE_GRAD_DOWN_BIAS)
    STEP(w, "backward down bias", ggemm_colsum, MOE_AUTO, .dtype = e->dtype, .c = { g->ddown_bias }, .p = g->dy,
         .weights = moe__flatten(k->weights), .offs = k->offs, .map = k->row2slot, .R = R, .E = E, .N = D, .div = e->K,
         .accumulate = g->accumulate);
  if (bias_only(wanted)) return MOE_OK;

  if (wanted & MOE_GRAD_LOGITS) {
    if (e->down_bias)
      STEP(w, "backward weights of down bias", row_dot, MOE_AUTO, .dtype = e->dtype, .y = moe__flatten(s->dweights),
           .a = g->dy, .b = io->down_bias, .ids = moe__flatten(k->ids), .T = T, .K = e->K, .E = E, .D = D);
    else if (w->mode == MOE__RUN && R) /* slots outside the plan */
      MOE__TRY(w->ctx->be->fill(
          w->q->be, (moe_span){ s->dweights.handle, s->dweights.offset, (uint64_t)R * moe_dtype_size(e->real) }, 0,
          (uint64_t)R * moe_dtype_size(e->real)));
  }
#define THROUGH_DOWN                                                                                                   \
  .dtype = e->dtype, .c = s->da, .a = g->dy, .b = { moe__swapped(io->down, 1, 2) }, .offs = k->offs,                   \
  .map = k->row2slot, .R = R, .E = E, .N = F, .K = D, .div = e->K
#define THROUGH_ACTIVATION                                                                                             \
  .dh = s->dh, .aw = s->aw, .dweights = moe__flatten(s->dweights), .h = k->h, .weights = moe__flatten(k->weights),     \
  .accumulate = 1, .act = e->act
  if (e->plane || !(wanted & MOE_GRAD_LOGITS))
    STEP_IF(w, fused, "backward through down and activation", ggemm_rows, how, THROUGH_DOWN, THROUGH_ACTIVATION,
            .epilogue = MOE__ACT_GRAD);
  if (!fused) {
    STEP(w, "backward through down", ggemm_rows, how, THROUGH_DOWN);
    STEP(w, "backward activation", act_bwd, MOE_AUTO, THROUGH_ACTIVATION, .dtype = e->dtype, .da = s->da,
         .row2slot = k->row2slot, .offs = k->offs, .R = R, .F = F, .E = E, .plane = e->plane);
  }
  if (wanted & MOE_GRAD_LOGITS)
    STEP(w, "backward weights", weights_bwd, MOE_AUTO, .dtype = e->real, .dlogits = g->dlogits, .dweights = s->dweights,
         .logits = state->logits, .ids = k->ids, .T = T, .E = E, .K = e->K, .weigh = e->weigh);
  if (wanted & MOE_GRAD_DOWN)
    STEP(w, "backward down weights", ggemm_wgrad, how, .dtype = e->dtype, .c = { g->ddown }, .p = g->dy, .q = s->aw,
         .offs = k->offs, .pmap = k->row2slot, .R = R, .E = E, .M = D, .N = F, .pdiv = e->K, .qdiv = 1,
         .accumulate = g->accumulate);
  if (wanted & MOE_GRAD_INPUT) {
    STEP(w, "backward through up", ggemm_rows, how, .dtype = e->dtype, .c = s->dx_rows, .a = s->dh,
         .b = { moe__swapped(gated ? io->gate : io->up, 1, 2), gated ? moe__swapped(io->up, 1, 2) : none },
         .offs = k->offs, .R = R, .E = E, .N = D, .K = e->H, .split = gated ? MOE__SPLIT_K : MOE__SPLIT_NONE, .div = 1);
    STEP(w, "backward combine", combine, MOE_AUTO, .dtype = e->dtype, .y = g->dx, .rows = s->dx_rows,
         .weights = k->weights, .slot2row = k->slot2row, .add = add ? *add : none, .T = T, .K = e->K, .D = D,
         .unweighted = 1);
  }
  if (wanted & both) {
    int split = gated && (wanted & both) == both;
    moe_tensor p = s->dh;
    if (gated && !split) p = moe__columns(s->dh, wanted & MOE_GRAD_UP ? F : 0, F);
    STEP(w, "backward up weights", ggemm_wgrad, how, .dtype = e->dtype,
         .c = { wanted & MOE_GRAD_GATE ? g->dgate : g->dup, split ? g->dup : none }, .p = p, .q = state->x,
         .offs = k->offs, .qmap = k->row2slot, .R = R, .E = E, .M = split ? 2 * F : F, .N = D, .split = split,
         .pdiv = 1, .qdiv = e->K, .accumulate = g->accumulate);
  }
  if (wanted & bias_both) {
    int split = gated && (wanted & bias_both) == bias_both;
    moe_tensor p = s->dh;
    if (gated && !split) p = moe__columns(s->dh, wanted & MOE_GRAD_UP_BIAS ? F : 0, F);
    STEP(w, "backward up bias", ggemm_colsum, MOE_AUTO, .dtype = e->dtype,
         .c = { wanted & MOE_GRAD_GATE_BIAS ? g->dgate_bias : g->dup_bias, split ? g->dup_bias : none }, .p = p,
         .offs = k->offs, .R = R, .E = E, .N = split ? 2 * F : F, .split = split, .div = 1,
         .accumulate = g->accumulate);
  }
  return MOE_OK;
}

/* Both sequences over tensors that are never read: at create, and for explain. */
static moe_status walk_unrun(const moe_experts *e, struct moe__walk *w, int64_t T)
{
  moe_span nowhere = { moe__placeholder(), 0, UINT64_MAX / 2 };
  struct moe__arena saved = moe__arena_over(nowhere), scratch = moe__arena_over(nowhere);
  struct kept k = { 0 };
  struct work s = { 0 };
  moe_experts_io io = moe_experts_io_init();
  moe_experts_grads g = moe_experts_grads_init();
  moe_state state = moe_state_init();
  void *at = moe__placeholder();
  lay_forward(e, T, e->wanted, &saved, &scratch, &k, &s);
  lay_backward(e, T, e->wanted, &scratch, &s);
  io.x = io.y = g.dy = g.dx = moe__matrix(at, 0, e->dtype, T, e->D);
  io.logits = g.dlogits = moe__matrix(at, 0, e->logits_dtype, T, e->E);
  io.gate = e->gate;
  io.up = e->up;
  io.down = e->down;
  io.gate.handle = e->act.gated ? at : NULL;
  io.up.handle = io.down.handle = at;
  g.dgate = g.dup = moe__arena_tensor(&scratch, e->grad_dtype, 3, (const int64_t[]){ e->E, e->F, e->D });
  g.ddown = moe__arena_tensor(&scratch, e->grad_dtype, 3, (const int64_t[]){ e->E, e->D, e->F });
  if (e->hidden_bias) io.gate_bias = io.up_bias = moe__matrix(at, 0, e->dtype, e->E, e->F);
  if (e->down_bias) io.down_bias = moe__matrix(at, 0, e->dtype, e->E, e->D);
  g.dgate_bias = g.dup_bias = moe__matrix(at, 0, e->grad_dtype, e->E, e->F);
  g.ddown_bias = moe__matrix(at, 0, e->grad_dtype, e->E, e->D);
  state.x = io.x;
  state.logits = io.logits;
  MOE__TRY(walk_forward(w, e, T, &io, NULL, &k, &s));
  return e->wanted ? walk_backward(w, e, T, e->wanted, &state, &io, &g, NULL, &k, &s) : MOE_OK;
}

/* ---- create --------------------------------------------------------------------------------------------------- */
int64_t moe__experts_all(const moe_experts *e)
{
  int64_t all = MOE_GRAD_INPUT | MOE_GRAD_LOGITS | MOE_GRAD_UP | MOE_GRAD_DOWN;
  if (e->act.gated) all |= MOE_GRAD_GATE;
  if (e->hidden_bias) all |= MOE_GRAD_UP_BIAS | (e->act.gated ? MOE_GRAD_GATE_BIAS : 0);
  if (e->down_bias) all |= MOE_GRAD_DOWN_BIAS;
  return all;
}

/* A declared layout, packed where rank is 0. */
static moe_status read_layout(moe_tensor *out, const moe_tensor *given, const moe_experts *e, int64_t rows,
                              int64_t cols, const char *name, const char *fn)
{
  moe_tensor t = *given;
  if (t.rank == 0) {
    t = moe__matrix(NULL, 0, e->dtype, rows, cols);
    t.rank = 3;
    t.shape[0] = e->E;
    t.shape[1] = rows;
    t.shape[2] = cols;
    t.stride[2] = 1;
    t.stride[1] = cols;
    if (moe__mul(&t.stride[0], rows, cols))
      return moe__fail(MOE_ERR_INVALID, "%s: %s has more than 2^63-1 elements", fn, name);
  }
  int64_t all;
  if (moe__mul(&all, rows, cols) || moe__mul(&all, all, e->E) || moe__mul(&all, all, 8))
    return moe__fail(MOE_ERR_INVALID, "%s: %s has more than 2^63-1 bytes", fn, name);
  t.handle = moe__placeholder();
  t.offset = 0;
  t.dtype = (int32_t)e->dtype;
  MOE__TRY(moe__want(fn, name, &t, e->dtype, 3, (const int64_t[]){ e->E, rows, cols }));
  t.handle = NULL;
  *out = t;
  return MOE_OK;
}

static moe_status one_of(const char *fn, const char *name, int64_t v, int64_t low, int64_t high)
{
  if (v >= low && v <= high) return MOE_OK;
  return moe__fail(MOE_ERR_INVALID, "%s: %s %lld outside %lld..%lld", fn, name, (long long)v, (long long)low,
                   (long long)high);
}

moe_status moe_experts_create(moe_experts **out, moe_context *ctx, const moe_experts_desc *given)
{
  static const char fn[] = "moe_experts_create";
  moe_experts_desc desc;
  moe_experts e;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (!ctx) return moe__fail(MOE_ERR_INVALID, "%s: ctx is NULL", fn);
  MOE__TRY(moe__struct_in(&desc, sizeof desc, given, fn, "desc"));
  memset(&e, 0, sizeof e);
  e.ctx = ctx;
  e.D = desc.d_model;
  e.F = desc.d_ff;
  e.E = desc.n_experts;
  MOE__TRY(one_of(fn, "d_model", e.D, 1, 1 << 24));
  MOE__TRY(one_of(fn, "d_ff", e.F, 1, 1 << 24));
  MOE__TRY(one_of(fn, "n_experts", e.E, 1, 1 << 20));
  e.dtype = desc.dtype;
  if (!moe__is_float(e.dtype))
    return moe__fail(MOE_ERR_INVALID, "%s: dtype %s, wanted f64, f32, bf16 or f16", fn, moe_dtype_name(e.dtype));
  if (e.dtype == MOE_F64 && !ctx->info->pub.fp64)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: dtype f64: %s (%s) has no fp64", fn, ctx->info->pub.id,
                     ctx->info->pub.name);
  e.real = e.dtype == MOE_F64 ? MOE_F64 : MOE_F32;
  e.logits_dtype = desc.logits_dtype ? desc.logits_dtype : e.real;
  e.grad_dtype = desc.weight_grad_dtype ? desc.weight_grad_dtype : e.real;
  if (!moe__is_float(e.logits_dtype) || (e.logits_dtype == MOE_F64) > (e.real == MOE_F64))
    return moe__fail(MOE_ERR_INVALID, "%s: logits_dtype %s with dtype %s", fn, moe_dtype_name(e.logits_dtype),
                     moe_dtype_name(e.dtype));
  if (!moe__is_float(e.grad_dtype) || (e.grad_dtype == MOE_F64) != (e.real == MOE_F64))
    return moe__fail(MOE_ERR_INVALID, "%s: weight_grad_dtype %s with dtype %s", fn, moe_dtype_name(e.grad_dtype),
                     moe_dtype_name(e.dtype));
  MOE__TRY(moe__read_selection(&e.select, &e.softmax_bias, desc.selection, e.E, fn));
  MOE__TRY(moe__read_weights(&e.weigh, desc.weights, fn));
  MOE__TRY(moe__read_activation(&e.act, desc.activation, fn));
  e.K = e.select.K;
  e.H = e.act.gated ? 2 * e.F : e.F;
  e.hidden_bias = desc.hidden_bias != 0;
  e.down_bias = desc.down_bias != 0;
  MOE__TRY(one_of(fn, "forward_strategy", desc.forward_strategy, MOE_AUTO, MOE_TENSOR));
  MOE__TRY(one_of(fn, "backward_strategy", desc.backward_strategy, MOE_AUTO, MOE_TENSOR));
  MOE__TRY(one_of(fn, "reduction", desc.reduction, MOE_SERIAL, MOE_PLANE));
  if (desc.backward_strategy == MOE_TENSOR && desc.reduction != MOE_PLANE)
    return moe__fail(MOE_ERR_INVALID, "%s: backward_strategy MOE_TENSOR wants reduction MOE_PLANE", fn);
  if ((desc.forward_strategy == MOE_TENSOR || desc.backward_strategy == MOE_TENSOR) && e.dtype != MOE_BF16 &&
      e.dtype != MOE_F16)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: MOE_TENSOR wants dtype bf16 or f16, got %s", fn,
                     moe_dtype_name(e.dtype));
  e.forward_strategy = desc.forward_strategy;
  e.backward_strategy = desc.backward_strategy;
  e.plane = desc.reduction == MOE_PLANE;
  e.wanted = desc.wanted ? desc.wanted : moe__experts_all(&e);
  if (e.wanted & ~moe__experts_all(&e))
    return moe__fail(MOE_ERR_INVALID, "%s: wanted 0x%llx has gradients this branch has not (0x%llx)", fn,
                     (unsigned long long)e.wanted, (unsigned long long)moe__experts_all(&e));
  if (e.act.gated) MOE__TRY(read_layout(&e.gate, &desc.gate, &e, e.F, e.D, "gate", fn));
  MOE__TRY(read_layout(&e.up, &desc.up, &e, e.F, e.D, "up", fn));
  MOE__TRY(read_layout(&e.down, &desc.down, &e, e.D, e.F, "down", fn));

  struct moe__walk w = { .mode = MOE__PREPARE, .ctx = ctx };
  moe_status st = walk_unrun(&e, &w, 0);
  if (st) return moe__fail_in(st, fn);
  *out = malloc(sizeof e);
  if (!*out) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  **out = e;
  moe__context_ref(ctx);
  moe__warn_constant_weights(ctx, &e.select, &e.weigh);
  return MOE_OK;
}

void moe_experts_free(moe_experts *e)
{
  if (!e) return;
  moe__context_unref(e->ctx);
  free(e);
}

/* ---- measure, explain ----------------------------------------------------------------------------------------- */
static moe_status check_tokens(const char *fn, const moe_experts *e, int64_t T)
{
  int64_t R;
  if (T < 0 || moe__mul(&R, T, e->K) || R > INT32_MAX)
    return moe__fail(MOE_ERR_INVALID, "%s: %lld tokens of top_k %lld, wanted 0 <= T*K < 2^31", fn, (long long)T,
                     (long long)e->K);
  return MOE_OK;
}

moe_status moe_experts_measure(moe_experts_bytes *out, const moe_experts *e, int64_t T, int64_t wanted)
{
  static const char fn[] = "moe_experts_measure";
  moe_experts_bytes own = moe_experts_bytes_init();
  struct moe__arena saved = { { 0 }, 0 }, forward = saved, backward = saved;
  struct kept k;
  struct work s;
  if (!e) return moe__fail(MOE_ERR_INVALID, "%s: experts is NULL", fn);
  MOE__TRY(check_tokens(fn, e, T));
  if (wanted & ~e->wanted)
    return moe__fail(MOE_ERR_INVALID, "%s: wanted 0x%llx, created for 0x%llx", fn, (unsigned long long)wanted,
                     (unsigned long long)e->wanted);
  lay_forward(e, T, wanted, &saved, &forward, &k, &s);
  if (wanted) lay_backward(e, T, wanted, &backward, &s);
  own.saved = saved.used;
  own.scratch = forward.used > backward.used ? forward.used : backward.used;
  if (own.saved > INT64_MAX || own.scratch > INT64_MAX)
    return moe__fail(MOE_ERR_INVALID, "%s: more than 2^63-1 bytes", fn);
  return moe__struct_out(out, &own, sizeof own, fn, "out");
}

moe_status moe__experts_explain(const moe_experts *e, struct moe__walk *w, int64_t T)
{
  return walk_unrun(e, w, T);
}

moe_status moe_experts_explain(const moe_experts *e, int64_t T, char *text, uint64_t bytes, uint64_t *needed)
{
  static const char fn[] = "moe_experts_explain";
  if (!e || (bytes && !text)) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, e ? "text" : "experts");
  MOE__TRY(check_tokens(fn, e, T));
  struct moe__walk w = { .mode = MOE__EXPLAIN, .ctx = e->ctx, .text = text, .room = bytes };
  if (bytes) text[0] = 0;
  MOE__TRY(walk_unrun(e, &w, T));
  if (needed) *needed = w.used + 1;
  return MOE_OK;
}

/* ---- forward --------------------------------------------------------------------------------------------------- */
static moe_status check_weight(const char *fn, const char *name, const moe_tensor *t, const moe_tensor *declared)
{
  MOE__TRY(moe__want(fn, name, t, declared->dtype, 3, declared->shape));
  for (int d = 0; d < 3; d++)
    if (t->shape[d] > 1 && t->stride[d] != declared->stride[d])
      return moe__fail(MOE_ERR_INVALID, "%s: %s has stride %lld in dimension %d, declared %lld", fn, name,
                       (long long)t->stride[d], d, (long long)declared->stride[d]);
  return MOE_OK;
}

static moe_status check_model(const char *fn, const moe_experts *e, const moe_experts_io *io)
{
  if (e->act.gated) MOE__TRY(check_weight(fn, "gate", &io->gate, &e->gate));
  else if (io->gate.handle) return moe__fail(MOE_ERR_INVALID, "%s: gate is given to a plain activation", fn);
  MOE__TRY(check_weight(fn, "up", &io->up, &e->up));
  MOE__TRY(check_weight(fn, "down", &io->down, &e->down));
  if (e->hidden_bias) {
    if (e->act.gated) MOE__TRY(WANT(fn, io->gate_bias, e->dtype, e->E, e->F));
    MOE__TRY(WANT(fn, io->up_bias, e->dtype, e->E, e->F));
  } else if (io->gate_bias.handle || io->up_bias.handle)
    return moe__fail(MOE_ERR_INVALID, "%s: gate_bias or up_bias is given, created without hidden_bias", fn);
  if (e->down_bias) MOE__TRY(WANT(fn, io->down_bias, e->dtype, e->E, e->D));
  else if (io->down_bias.handle) return moe__fail(MOE_ERR_INVALID, "%s: down_bias is given, created without it", fn);
  return MOE_OK;
}

static moe_status check_objects(const char *fn, const moe_experts *e, const moe_queue *q)
{
  if (!e || !q) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, e ? "queue" : "experts");
  if (e->ctx != q->ctx) return moe__fail(MOE_ERR_INVALID, "%s: queue and experts are of different contexts", fn);
  return MOE_OK;
}

moe_status moe__experts_forward(moe_experts *e, moe_queue *q, const moe_experts_io *given, int64_t wanted,
                                moe_state *state, const moe_tensor *add, const char *fn)
{
  moe_experts_io io;
  MOE__TRY(check_objects(fn, e, q));
  MOE__TRY(moe__struct_in(&io, sizeof io, given, fn, "io"));
  if (io.x.rank != 2) return moe__fail(MOE_ERR_INVALID, "%s: x has rank %d, 2 is wanted", fn, io.x.rank);
  int64_t T = io.x.shape[0];
  MOE__TRY(check_tokens(fn, e, T));
  if (wanted & ~e->wanted)
    return moe__fail(MOE_ERR_INVALID, "%s: wanted 0x%llx, created for 0x%llx", fn, (unsigned long long)wanted,
                     (unsigned long long)e->wanted);
  MOE__TRY(WANT(fn, io.x, e->dtype, T, e->D));
  MOE__TRY(WANT(fn, io.logits, e->logits_dtype, T, e->E));
  MOE__TRY(WANT_OUT(fn, io.y, e->dtype, T, e->D));
  MOE__TRY(moe__apart(fn, "y", &io.y, "x", &io.x));
  MOE__TRY(moe__check_bias(&io.correction_bias, &e->select, e->softmax_bias, e->E, e->real, fn));
  if (io.ids.handle) {
    MOE__TRY(WANT(fn, io.ids, MOE_I32, T, e->K));
    if (!moe_tensor_is_packed(&io.ids)) return moe__fail(MOE_ERR_INVALID, "%s: ids is not packed", fn);
  }
  MOE__TRY(check_model(fn, e, &io));
  struct moe__arena saved = moe__arena_over(io.saved), scratch = moe__arena_over(io.scratch);
  struct kept k = { 0 };
  struct work s = { 0 };
  lay_forward(e, T, wanted, &saved, &scratch, &k, &s);
  if (wanted) MOE__TRY(moe__arena_check(&saved, fn, "saved"));
  MOE__TRY(moe__arena_check(&scratch, fn, "scratch"));
  moe_state own = moe_state_init();
  own.experts = e;
  own.tokens = T;
  own.wanted = wanted;
  own.x = io.x;
  own.logits = io.logits;
  own.saved = io.saved;
  if (state) MOE__TRY(moe__struct_out(state, &own, 8, fn, "state")); /* refuse a bad struct before anything runs */
  struct moe__walk w = { .mode = MOE__CHECK, .ctx = e->ctx, .q = q };
  if (e->forward_strategy == MOE_TENSOR) MOE__TRY(walk_forward(&w, e, T, &io, add, &k, &s));
  w.mode = MOE__RUN;
  MOE__TRY(walk_forward(&w, e, T, &io, add, &k, &s));
  MOE__TRY(e->ctx->be->flush(q->be));
  return state ? moe__struct_out(state, &own, sizeof own, fn, "state") : MOE_OK;
}

moe_status moe_experts_forward(moe_experts *e, moe_queue *q, const moe_experts_io *io, moe_state *state)
{
  static const char fn[] = "moe_experts_forward";
  if (!state) return moe__fail(MOE_ERR_INVALID, "%s: state is NULL", fn);
  return moe__experts_forward(e, q, io, e ? e->wanted : 0, state, NULL, fn);
}

moe_status moe_experts_forward_selected(moe_experts *e, moe_queue *q, const moe_experts_io *io, int64_t wanted,
                                        moe_state *state)
{
  static const char fn[] = "moe_experts_forward_selected";
  if (!state) return moe__fail(MOE_ERR_INVALID, "%s: state is NULL", fn);
  return moe__experts_forward(e, q, io, wanted, state, NULL, fn);
}

moe_status moe_experts_inference(moe_experts *e, moe_queue *q, const moe_experts_io *io)
{
  return moe__experts_forward(e, q, io, 0, NULL, NULL, "moe_experts_inference");
}

static moe_status kept_of(struct kept *k, const moe_state *given, moe_state *own, const char *fn)
{
  MOE__TRY(moe__struct_in(own, sizeof *own, given, fn, "state"));
  if (!own->experts) return moe__fail(MOE_ERR_STATE, "%s: state was not filled by a forward", fn);
  struct moe__arena saved = moe__arena_over(own->saved);
  memset(k, 0, sizeof *k);
  if (!own->wanted) return moe__fail(MOE_ERR_NO_DERIVATIVE, "%s: the forward kept nothing", fn);
  lay_kept(own->experts, own->tokens, !bias_only(own->wanted), &saved, k);
  return MOE_OK;
}

moe_status moe__experts_routed(struct moe__routed *out, const moe_state *state, const char *fn)
{
  struct kept k;
  moe_state own;
  MOE__TRY(kept_of(&k, state, &own, fn));
  const moe_experts *e = own.experts;
  *out = (struct moe__routed){ k.ids, k.weights, k.offs, k.row2slot, k.slot2row, own.tokens, e->E, e->K, e->weigh };
  return MOE_OK;
}

moe_status moe_experts_route_ids(moe_tensor *ids, const moe_state *state)
{
  struct kept k;
  moe_state own;
  if (!ids) return moe__fail(MOE_ERR_INVALID, "moe_experts_route_ids: ids is NULL");
  MOE__TRY(kept_of(&k, state, &own, "moe_experts_route_ids"));
  *ids = k.ids;
  return MOE_OK;
}

moe_status moe_experts_route_weights(moe_tensor *weights, const moe_state *state)
{
  struct kept k;
  moe_state own;
  if (!weights) return moe__fail(MOE_ERR_INVALID, "moe_experts_route_weights: weights is NULL");
  MOE__TRY(kept_of(&k, state, &own, "moe_experts_route_weights"));
  *weights = k.weights;
  return MOE_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */
moe_status moe__experts_backward(moe_experts *e, moe_queue *q, const moe_state *given_state,
                                 const moe_experts_io *given_io, const moe_experts_grads *given, int64_t wanted,
                                 const moe_tensor *add, const char *fn)
{
  moe_experts_io io;
  moe_experts_grads g;
  moe_state state;
  struct kept k;
  struct work s = { 0 };
  MOE__TRY(check_objects(fn, e, q));
  MOE__TRY(kept_of(&k, given_state, &state, fn));
  MOE__TRY(moe__struct_in(&io, sizeof io, given_io, fn, "io"));
  MOE__TRY(moe__struct_in(&g, sizeof g, given, fn, "grads"));
  if (state.experts != e) return moe__fail(MOE_ERR_STATE, "%s: state is of another moe_experts", fn);
  if (wanted & ~state.wanted)
    return moe__fail(MOE_ERR_NO_DERIVATIVE, "%s: wanted 0x%llx, the forward kept what 0x%llx needs", fn,
                     (unsigned long long)wanted, (unsigned long long)state.wanted);
  int64_t T = state.tokens, E = e->E, D = e->D, F = e->F;
  MOE__TRY(check_model(fn, e, &io));
  MOE__TRY(WANT(fn, g.dy, e->dtype, T, D));
  if (wanted & MOE_GRAD_INPUT) {
    MOE__TRY(WANT_OUT(fn, g.dx, e->dtype, T, D));
    MOE__TRY(moe__apart(fn, "dx", &g.dx, "x", &state.x));
    MOE__TRY(moe__apart(fn, "dx", &g.dx, "dy", &g.dy));
  }
  if (wanted & MOE_GRAD_LOGITS) {
    if (g.dlogits.dtype != e->logits_dtype && g.dlogits.dtype != e->real && g.dlogits.handle)
      return moe__fail(MOE_ERR_INVALID, "%s: dlogits is %s, %s or %s is wanted", fn, moe_dtype_name(g.dlogits.dtype),
                       moe_dtype_name(e->logits_dtype), moe_dtype_name(e->real));
    MOE__TRY(WANT_OUT(fn, g.dlogits, g.dlogits.dtype, T, E));
  }
  if (wanted & MOE_GRAD_GATE) MOE__TRY(WANT_OUT(fn, g.dgate, e->grad_dtype, E, F, D));
  if (wanted & MOE_GRAD_UP) MOE__TRY(WANT_OUT(fn, g.dup, e->grad_dtype, E, F, D));
  if (wanted & MOE_GRAD_DOWN) MOE__TRY(WANT_OUT(fn, g.ddown, e->grad_dtype, E, D, F));
  if (wanted & MOE_GRAD_GATE_BIAS) MOE__TRY(WANT_OUT(fn, g.dgate_bias, e->grad_dtype, E, F));
  if (wanted & MOE_GRAD_UP_BIAS) MOE__TRY(WANT_OUT(fn, g.dup_bias, e->grad_dtype, E, F));
  if (wanted & MOE_GRAD_DOWN_BIAS) MOE__TRY(WANT_OUT(fn, g.ddown_bias, e->grad_dtype, E, D));
  if (!wanted) return MOE_OK;
  struct moe__arena scratch = moe__arena_over(io.scratch);
  lay_backward(e, T, wanted, &scratch, &s);
  MOE__TRY(moe__arena_check(&scratch, fn, "scratch"));
  struct moe__walk w = { .mode = MOE__CHECK, .ctx = e->ctx, .q = q };
  if (e->backward_strategy == MOE_TENSOR) MOE__TRY(walk_backward(&w, e, T, wanted, &state, &io, &g, add, &k, &s));
  w.mode = MOE__RUN;
  MOE__TRY(walk_backward(&w, e, T, wanted, &state, &io, &g, add, &k, &s));
  return e->ctx->be->flush(q->be);
}

moe_status moe_experts_backward(moe_experts *e, moe_queue *q, const moe_state *state, const moe_experts_io *io,
                                const moe_experts_grads *grads)
{
  static const char fn[] = "moe_experts_backward";
  moe_state own;
  MOE__TRY(moe__struct_in(&own, sizeof own, state, fn, "state"));
  return moe__experts_backward(e, q, state, io, grads, own.wanted, NULL, fn);
}

moe_status moe_experts_backward_selected(moe_experts *e, moe_queue *q, const moe_state *state, const moe_experts_io *io,
                                         const moe_experts_grads *grads, int64_t wanted)
{
  return moe__experts_backward(e, q, state, io, grads, wanted, NULL, "moe_experts_backward_selected");
}
