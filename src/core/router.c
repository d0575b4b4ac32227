/* router.c - the router's options, and moe_router: selection and routing weights on their own. */
#include "core/router.h"

#include "core/tensor.h"

#include <math.h>
#include <stdlib.h>

moe_status moe__read_selection(struct moe__select *out, int64_t *softmax_bias, const moe_selection_options *given,
                               int64_t E, const char *fn)
{
  moe_selection_options o;
  MOE__TRY(moe__struct_in(&o, sizeof o, given, fn, "selection"));
  if (o.kind != MOE_SELECT_SOFTMAX && o.kind != MOE_SELECT_GROUPED_SIGMOID)
    return moe__fail(MOE_ERR_INVALID, "%s: selection->kind %lld, wanted MOE_SELECT_SOFTMAX or _GROUPED_SIGMOID", fn,
                     (long long)o.kind);
  if (o.top_k < 1 || o.top_k > E)
    return moe__fail(MOE_ERR_INVALID, "%s: selection->top_k %lld outside 1..%lld experts", fn, (long long)o.top_k,
                     (long long)E);
  if (o.kind == MOE_SELECT_SOFTMAX) {
    if (o.groups || o.selected_groups || o.group_top_two)
      return moe__fail(MOE_ERR_INVALID,
                       "%s: selection->groups, selected_groups and group_top_two belong to grouped "
                       "sigmoid, wanted 0",
                       fn);
    if (o.scale != 0 && o.scale != 1)
      return moe__fail(MOE_ERR_INVALID, "%s: selection->scale %g with softmax, wanted 0 or 1", fn, o.scale);
    o.scale = 1;
    o.groups = o.selected_groups = 1;
  } else {
    if (o.softmax_bias)
      return moe__fail(MOE_ERR_INVALID, "%s: selection->softmax_bias with grouped sigmoid, wanted 0", fn);
    if (!isfinite(o.scale) || o.scale <= 0)
      return moe__fail(MOE_ERR_INVALID, "%s: selection->scale %g, wanted finite and > 0", fn, o.scale);
    if (o.groups < 1 || o.groups > 1024 || E % o.groups)
      return moe__fail(MOE_ERR_INVALID, "%s: selection->groups %lld, wanted 1..1024 and a divisor of %lld experts", fn,
                       (long long)o.groups, (long long)E);
    if (o.selected_groups < 1 || o.selected_groups > o.groups)
      return moe__fail(MOE_ERR_INVALID, "%s: selection->selected_groups %lld outside 1..%lld groups", fn,
                       (long long)o.selected_groups, (long long)o.groups);
    if (o.top_k > o.selected_groups * (E / o.groups))
      return moe__fail(MOE_ERR_INVALID, "%s: selection->top_k %lld > %lld experts in the selected groups", fn,
                       (long long)o.top_k, (long long)(o.selected_groups * (E / o.groups)));
    if (o.group_top_two && E / o.groups < 2)
      return moe__fail(MOE_ERR_INVALID, "%s: selection->group_top_two wants groups of 2 experts or more, got 1", fn);
  }
  *out = (struct moe__select){ o.kind, o.top_k, o.groups, o.selected_groups, o.group_top_two != 0, o.renormalize != 0,
                               o.scale };
  *softmax_bias = o.softmax_bias != 0;
  return MOE_OK;
}

moe_status moe__read_weights(struct moe__weigh *out, const moe_weights_options *given, const char *fn)
{
  moe_weights_options o;
  MOE__TRY(moe__struct_in(&o, sizeof o, given, fn, "weights"));
  if (o.scoring < MOE_SOFTMAX || o.scoring > MOE_SQRT_SOFTPLUS)
    return moe__fail(MOE_ERR_INVALID, "%s: weights->scoring %lld is none", fn, (long long)o.scoring);
  if (!isfinite(o.scale) || o.scale <= 0)
    return moe__fail(MOE_ERR_INVALID, "%s: weights->scale %g, wanted finite and > 0", fn, o.scale);
  if (!isfinite(o.epsilon) || o.epsilon < 0)
    return moe__fail(MOE_ERR_INVALID, "%s: weights->epsilon %g, wanted finite and >= 0", fn, o.epsilon);
  *out = (struct moe__weigh){ o.scoring, o.renormalize != 0, o.scale, o.epsilon };
  return MOE_OK;
}

moe_status moe__read_activation(struct moe__act *out, const moe_activation *given, const char *fn)
{
  moe_activation o;
  MOE__TRY(moe__struct_in(&o, sizeof o, given, fn, "activation"));
  if (o.kind < MOE_IDENTITY || o.kind > MOE_ACT_SIGMOID)
    return moe__fail(MOE_ERR_INVALID, "%s: activation->kind %lld is none", fn, (long long)o.kind);
  if (!isfinite(o.alpha) || !isfinite(o.limit) || o.limit < 0 || !isfinite(o.up_offset))
    return moe__fail(MOE_ERR_INVALID, "%s: activation alpha %g, limit %g, up_offset %g: wanted finite, limit >= 0", fn,
                     o.alpha, o.limit, o.up_offset);
  if (o.alpha != 0 && o.kind != MOE_SILU)
    return moe__fail(MOE_ERR_INVALID, "%s: activation->alpha %g belongs to MOE_SILU", fn, o.alpha);
  if (o.up_offset != 0 && !o.gated)
    return moe__fail(MOE_ERR_INVALID, "%s: activation->up_offset %g without gated", fn, o.up_offset);
  *out = (struct moe__act){ o.kind, o.gated != 0, o.alpha, o.limit, o.up_offset };
  return MOE_OK;
}

moe_status moe__check_bias(const moe_tensor *bias, const struct moe__select *select, int64_t softmax_bias, int64_t E,
                           int64_t real, const char *fn)
{
  if (!bias->handle) return MOE_OK;
  if (select->kind != MOE_SELECT_GROUPED_SIGMOID && !softmax_bias)
    return moe__fail(MOE_ERR_INVALID, "%s: correction_bias belongs to grouped sigmoid selection (or softmax_bias)", fn);
  MOE__TRY(moe__want(fn, "correction_bias", bias, real, 1, &E));
  if (!moe_tensor_is_packed(bias)) return moe__fail(MOE_ERR_INVALID, "%s: correction_bias is not packed", fn);
  return MOE_OK;
}

void moe__warn_constant_weights(const moe_context *ctx, const struct moe__select *select,
                                const struct moe__weigh *weigh)
{
  if (select->K != 1 || (!weigh->renormalize && weigh->scoring != MOE_SOFTMAX_CHOSEN) || !ctx->desc.log) return;
  ctx->desc.log(ctx->desc.user, 1,
                "libmoe: top_k 1 with renormalized weights: every weight is the scale and the router gets no gradient");
}

/* ---- moe_router -------------------------------------------------------------------------------------------- */
struct moe_router {
  moe_context *ctx;
  int64_t E, dtype, logits_dtype, softmax_bias;
  struct moe__select select;
  struct moe__weigh weigh;
};

static moe_status walk_select(struct moe__walk *w, const moe_router *r, int64_t T, const moe_tensor *ids,
                              const moe_tensor *weights, const moe_tensor *logits, const moe_tensor *bias)
{
  STEP(w, "select", select, MOE_AUTO, .dtype = r->dtype, .ids = *ids, .weights = *weights, .logits = *logits,
       .bias = *bias, .T = T, .E = r->E, .select = r->select);
  return MOE_OK;
}

static moe_status walk_weights(struct moe__walk *w, const moe_router *r, int64_t T, const moe_tensor *weights,
                               const moe_tensor *logits, const moe_tensor *ids)
{
  STEP(w, "weights", weights, MOE_AUTO, .dtype = r->dtype, .weights = *weights, .logits = *logits, .ids = *ids,
       .health = w->q ? w->q->health : *ids, .T = T, .E = r->E, .K = r->select.K, .weigh = r->weigh);
  return MOE_OK;
}

static moe_status walk_weights_bwd(struct moe__walk *w, const moe_router *r, int64_t T, const moe_tensor *dlogits,
                                   const moe_tensor *dweights, const moe_tensor *logits, const moe_tensor *ids)
{
  STEP(w, "weights backward", weights_bwd, MOE_AUTO, .dtype = r->dtype, .dlogits = *dlogits, .dweights = *dweights,
       .logits = *logits, .ids = *ids, .T = T, .E = r->E, .K = r->select.K, .weigh = r->weigh);
  return MOE_OK;
}

moe_status moe_router_create(moe_router **out, moe_context *ctx, const moe_router_desc *given)
{
  static const char fn[] = "moe_router_create";
  moe_router_desc desc;
  moe_router r = { 0 };
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (!ctx) return moe__fail(MOE_ERR_INVALID, "%s: ctx is NULL", fn);
  MOE__TRY(moe__struct_in(&desc, sizeof desc, given, fn, "desc"));
  r.ctx = ctx;
  r.E = desc.n_experts;
  r.dtype = desc.dtype;
  r.logits_dtype = desc.logits_dtype ? desc.logits_dtype : desc.dtype;
  if (r.E < 1 || r.E > 1 << 20)
    return moe__fail(MOE_ERR_INVALID, "%s: n_experts %lld outside 1..2^20", fn, (long long)r.E);
  if (r.dtype != MOE_F32 && r.dtype != MOE_F64)
    return moe__fail(MOE_ERR_INVALID, "%s: dtype %s, wanted f32 or f64", fn, moe_dtype_name(r.dtype));
  if (!moe__is_float(r.logits_dtype) || (r.logits_dtype == MOE_F64 && r.dtype != MOE_F64))
    return moe__fail(MOE_ERR_INVALID, "%s: logits_dtype %s with dtype %s", fn, moe_dtype_name(r.logits_dtype),
                     moe_dtype_name(r.dtype));
  MOE__TRY(moe__read_selection(&r.select, &r.softmax_bias, desc.selection, r.E, fn));
  MOE__TRY(moe__read_weights(&r.weigh, desc.weights, fn));

  struct moe__walk w = { .mode = MOE__PREPARE, .ctx = ctx };
  moe_tensor any = moe__flat(moe__placeholder(), 0, r.dtype, 0);
  moe_status st = walk_select(&w, &r, 0, &any, &any, &any, &any);
  if (!st) st = walk_weights(&w, &r, 0, &any, &any, &any);
  if (!st) st = walk_weights_bwd(&w, &r, 0, &any, &any, &any, &any);
  if (st) return moe__fail_in(st, fn);

  *out = malloc(sizeof r);
  if (!*out) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  **out = r;
  moe__context_ref(ctx);
  moe__warn_constant_weights(ctx, &r.select, &r.weigh);
  return MOE_OK;
}

void moe_router_free(moe_router *router)
{
  if (!router) return;
  moe__context_unref(router->ctx);
  free(router);
}

/* router, queue, logits [T,E] and one packed [T,K] tensor. */
static moe_status check_call(const char *fn, const moe_router *r, const moe_queue *q, const moe_tensor *logits,
                             const char *name, const moe_tensor *tk, int64_t dtype)
{
  if (!r || !q || !logits || !tk)
    return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, !r ? "router" : !q ? "queue" : !logits ? "logits" : name);
  if (q->ctx != r->ctx) return moe__fail(MOE_ERR_INVALID, "%s: queue and router are of different contexts", fn);
  if (logits->rank != 2) return moe__fail(MOE_ERR_INVALID, "%s: logits has rank %d, 2 is wanted", fn, logits->rank);
  const int64_t te[2] = { logits->shape[0], r->E }, tks[2] = { logits->shape[0], r->select.K };
  MOE__TRY(moe__want(fn, "logits", logits, r->logits_dtype, 2, te));
  MOE__TRY(moe__want(fn, name, tk, dtype, 2, tks));
  if (!moe_tensor_is_packed(tk)) return moe__fail(MOE_ERR_INVALID, "%s: %s is not packed", fn, name);
  return MOE_OK;
}

static const moe_tensor none;

moe_status moe_router_select(moe_router *r, moe_queue *q, const moe_tensor *ids, const moe_tensor *weights,
                             const moe_tensor *logits, const moe_tensor *bias)
{
  static const char fn[] = "moe_router_select";
  if (!bias) bias = &none;
  MOE__TRY(check_call(fn, r, q, logits, "ids", ids, MOE_I32));
  if (weights && weights->handle) MOE__TRY(check_call(fn, r, q, logits, "weights", weights, r->dtype));
  MOE__TRY(moe__check_bias(bias, &r->select, r->softmax_bias, r->E, r->dtype, fn));
  struct moe__walk w = { .mode = MOE__RUN, .ctx = r->ctx, .q = q };
  MOE__TRY(walk_select(&w, r, logits->shape[0], ids, weights ? weights : &none, logits, bias));
  return r->ctx->be->flush(q->be);
}

moe_status moe_router_weights(moe_router *r, moe_queue *q, const moe_tensor *weights, const moe_tensor *logits,
                              const moe_tensor *ids)
{
  static const char fn[] = "moe_router_weights";
  MOE__TRY(check_call(fn, r, q, logits, "weights", weights, r ? r->dtype : 0));
  MOE__TRY(check_call(fn, r, q, logits, "ids", ids, MOE_I32));
  struct moe__walk w = { .mode = MOE__RUN, .ctx = r->ctx, .q = q };
  MOE__TRY(walk_weights(&w, r, logits->shape[0], weights, logits, ids));
  return r->ctx->be->flush(q->be);
}

moe_status moe_router_weights_backward(moe_router *r, moe_queue *q, const moe_tensor *dlogits,
                                       const moe_tensor *dweights, const moe_tensor *logits, const moe_tensor *ids)
{
  static const char fn[] = "moe_router_weights_backward";
  MOE__TRY(check_call(fn, r, q, logits, "dweights", dweights, r ? r->dtype : 0));
  MOE__TRY(check_call(fn, r, q, logits, "ids", ids, MOE_I32));
  if (!dlogits) return moe__fail(MOE_ERR_INVALID, "%s: dlogits is NULL", fn);
  const int64_t te[2] = { logits->shape[0], r->E };
  MOE__TRY(moe__want_out(fn, "dlogits", dlogits, 0, 2, te));
  struct moe__walk w = { .mode = MOE__RUN, .ctx = r->ctx, .q = q };
  MOE__TRY(walk_weights_bwd(&w, r, logits->shape[0], dlogits, dweights, logits, ids));
  return r->ctx->be->flush(q->be);
}

moe_status moe_parameter_counts(int64_t *all, int64_t *active, int64_t router, int64_t per_expert, int64_t n_experts,
                                int64_t top_k, int64_t shared)
{
  static const char fn[] = "moe_parameter_counts";
  int64_t every, used, sum_all, sum_used;
  if (router < 0 || per_expert < 0 || n_experts < 1 || shared < 0)
    return moe__fail(MOE_ERR_INVALID, "%s: router, per_expert and shared want >= 0, n_experts >= 1", fn);
  if (top_k < 1 || top_k > n_experts)
    return moe__fail(MOE_ERR_INVALID, "%s: top_k %lld outside 1..%lld experts", fn, (long long)top_k,
                     (long long)n_experts);
  if (moe__mul(&every, per_expert, n_experts) || moe__mul(&used, per_expert, top_k) ||
      __builtin_add_overflow(every, router, &sum_all) || __builtin_add_overflow(sum_all, shared, &sum_all) ||
      __builtin_add_overflow(used, router, &sum_used) || __builtin_add_overflow(sum_used, shared, &sum_used))
    return moe__fail(MOE_ERR_INVALID, "%s: more than 2^63-1 parameters", fn);
  if (all) *all = sum_all;
  if (active) *active = sum_used;
  return MOE_OK;
}
