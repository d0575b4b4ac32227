/* tape_layer.c - the Mixture-of-Experts layer on the tape: its fused forward and backward, and its expansion into
   primitive operations for further derivatives.

   A node's inputs are x and the layer's trainable parameters, in the order of moe_layer_param; each is a value of its
   own, a view into `params`, bound to its view of `grads`. */
#include "core/arena.h"
#include "core/layer.h"
#include "core/tape.h"

struct layer_node { /* node->more */
  moe_layer *layer;
  moe_layer_state state;
  moe_tape_moe options;
  int64_t n_params;
  moe_value *params; /* by index of moe_layer_param; null: not trainable */
};

/* Writes to grads at once, or into memory of the tape, from where each parameter's gradient is a value. */
static void back_layer(moe_tape *t, struct moe__node *n, const moe_value *dout)
{
  const struct layer_node *l = n->more;
  moe_tensor x = moe__tape_at(t, n->in[0])->t, dx = { 0 }, to;
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_layer_io io = moe_layer_io_init();
  int64_t accumulate = 0, any = 0;
  int direct = 0, wanted = 0;
  if (moe__tape_wants(t, n->in[0])) dx = moe__tape_fresh(t, x.dtype, x.rank, x.shape);
  for (int64_t i = 1; i < n->n_in; i++) {
    if (!moe__tape_wants(t, n->in[i])) continue;
    wanted = 1;
    if (moe__tape_sink(t, n->in[i], &to, &accumulate)) direct = 1;
    any |= accumulate;
  }
  moe__tape_fail(t, moe_layer_measure(&bytes, l->layer, l->state.tokens, l->state.sequences));
  if (wanted && !direct) io.grads = moe__tape_take(t, bytes.grads);
  struct moe__mark mark = moe__tape_mark(t);
  io.params = l->options.params;
  if (direct) io.grads = l->options.grads;
  else if (!wanted) io.grads = moe__tape_take(t, bytes.grads); /* nobody reads them */
  io.scratch = moe__tape_take(t, bytes.scratch);
  io.aux_scale = l->options.aux_scale;
  if (!moe__tape_joins(t, n)) { /* the losses are not what is differentiated */
    io.aux_scale = moe__tape_flat(t, moe__real_of(x.dtype), 1);
    TAPE_RUN(t, elt_map, .dtype = io.aux_scale.dtype, .y = io.aux_scale, .op = MOE__ELT_FILL, .n = 1);
  }
  io.dy = moe__tape_at(t, dout[0])->t;
  io.dx = dx;
  io.accumulate = any;
  if (!t->status) moe__tape_fail(t, moe_layer_backward(l->layer, t->q, &l->state, &io));
  moe__tape_rewind(t, mark);
  for (int64_t i = 0; i < l->n_params && !t->status; i++) {
    moe_tensor grad;
    if (!moe__tape_wants(t, l->params[i])) continue;
    if (direct) moe__tape_sunk(t, l->params[i]);
    else {
      moe__tape_fail(t, moe_layer_param(NULL, &grad, NULL, l->layer, io.params, io.grads, i));
      moe__tape_contribute_fused(t, l->params[i], grad);
    }
  }
  if (dx.handle) moe__tape_contribute_fused(t, n->in[0], dx);
}

/* ---- expansion: the formulas of doc/math.md ---------------------------------------------------------------------------- */
static const moe_value none;

/* The parameter of that name as the call's value, a constant where it is not trainable, null where there is none. */
static moe_value param(moe_tape *t, const struct layer_node *l, const char *name)
{
  moe_layer_param_info info = moe_layer_param_info_init();
  for (int64_t i = 0; i < l->n_params && !t->status; i++) {
    moe_tensor p;
    moe__tape_fail(t, moe_layer_param(&p, NULL, &info, l->layer, l->options.params, (moe_span){ 0 }, i));
    if (!t->status && !strcmp(info.name, name)) return l->params[i].id ? l->params[i] : moe__tape_value(t, p, 0);
  }
  return none;
}

/* log(1 + exp(a)) = max(a,0) + log1p(x), x = exp(-|a|); log1p(x) = x log(u)/(u-1) with u = 1 + x, as x in u is rounded. */
static void back_softplus(moe_tape *t, struct moe__node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], moe_tape_mul(t, d[0], moe_tape_sigmoid(t, n->in[0])));
}
static const struct moe__rule rule_softplus = { "softplus", back_softplus, NULL, 0 };
static moe_value softplus(moe_tape *t, moe_value a)
{
  const int64_t recording = moe_tape_set_recording(t, 0);
  moe_value zero = moe__tape_constant(t, a, 0), one = moe__tape_constant(t, a, 1);
  moe_value positive = moe_tape_greater(t, a, zero), high = moe_tape_where(t, positive, a, zero);
  moe_value x = moe_tape_exp(t, moe_tape_sub(t, moe_tape_where(t, positive, zero, a), high));
  moe_value u = moe_tape_add(t, one, x);
  moe_value tail = moe_tape_mul(t, x, moe_tape_div(t, moe_tape_log(t, u), moe_tape_sub(t, u, one)));
  moe_value y = moe_tape_add(t, high, moe_tape_where(t, moe_tape_greater(t, u, one), tail, x));
  moe_tape_set_recording(t, recording);
  return t->status ? none : moe__tape_record(t, moe__tape_node(t, &rule_softplus, 1, &a, 1), moe__tape_at(t, y)->t);
}
/* log(softplus(a))/2; a/2 where softplus(a) is exp(a), to double precision */
static moe_value log_sqrt_softplus(moe_tape *t, moe_value a)
{
  moe_value least = moe__tape_constant(t, a, -40), more = moe_tape_greater(t, a, least);
  moe_value y = moe_tape_log(t, softplus(t, moe_tape_where(t, more, a, least)));
  return moe_tape_scale(t, moe_tape_where(t, more, y, a), 0.5);
}
/* For a softmax over the rows of a, log(sigmoid(a)) = min(a,0) - log(1 + exp(-|a|)), less the largest min(a,0) of its
   row: exact however far from 0. */
static moe_value log_sigmoid(moe_tape *t, moe_value a)
{
  const int64_t columns = 1;
  moe_value zero = moe__tape_constant(t, a, 0), positive = moe_tape_greater(t, a, zero);
  moe_value low = moe_tape_where(t, positive, zero, a), high = moe_tape_where(t, positive, a, zero);
  moe_value top = moe_tape_max_axes(t, moe_tape_detach(t, low), 1, &columns, 1);
  moe_value x = moe_tape_exp(t, moe_tape_sub(t, low, high));
  return moe_tape_sub(t, moe_tape_sub(t, low, top), moe_tape_log(t, moe_tape_add(t, moe__tape_constant(t, a, 1), x)));
}

/* Routing weights [T,K] from logits [T,E]. */
static moe_value weights(moe_tape *t, struct moe__routed *r, moe_value logits)
{
  const struct moe__weigh *w = &r->weigh;
  const int64_t slots = 1;
  const int chosen = w->scoring == MOE__SOFTMAX_CHOSEN, shifted = chosen || (w->renormalize && !(w->epsilon > 0));
  const double scale = chosen && w->renormalize ? w->scale / (1 + w->epsilon) : w->scale;
  if (w->scoring == MOE__SOFTMAX && !shifted) logits = moe_tape_softmax(t, logits, 1);
  moe_value score = moe__tape_pick(t, r, logits);
  if (w->scoring == MOE__SQRT_SOFTPLUS) score = log_sqrt_softplus(t, score);
  if (shifted) {
    if (w->scoring == MOE__SIGMOID) score = log_sigmoid(t, score);
    return moe_tape_scale(t, moe_tape_softmax(t, score, 1), scale);
  }
  if (w->scoring == MOE__SQRT_SOFTPLUS) score = moe_tape_exp(t, score);
  if (w->scoring == MOE__SIGMOID) score = moe_tape_sigmoid(t, score);
  if (w->renormalize)
    score = moe_tape_div(
        t, score, moe_tape_add(t, moe_tape_sum_axes(t, score, 1, &slots, 1), moe__tape_constant(t, score, w->epsilon)));
  return moe_tape_scale(t, score, scale);
}

/* min(a, limit); at the limit the gradient passes */
static moe_value at_most(moe_tape *t, moe_value a, double limit)
{
  moe_value most = moe__tape_constant(t, a, limit);
  return moe_tape_where(t, moe_tape_greater(t, a, most), most, a);
}
static moe_value at_least(moe_tape *t, moe_value a, double limit)
{
  moe_value least = moe__tape_constant(t, a, limit);
  return moe_tape_where(t, moe_tape_greater(t, least, a), least, a);
}

static moe_value activated(moe_tape *t, const struct moe__act *act, moe_value a)
{
  switch (act->kind) {
  case MOE__ACT_RELU: return moe_tape_relu(t, a);
  case MOE__ACT_RELU2: a = moe_tape_relu(t, a); return moe_tape_mul(t, a, a);
  case MOE__ACT_GELU: return moe_tape_gelu(t, a);
  case MOE__ACT_GELU_TANH: return moe_tape_gelu_tanh(t, a);
  case MOE__ACT_SIGMOID: return moe_tape_sigmoid(t, a);
  case MOE__ACT_SILU:
    return moe_tape_mul(t, a, moe_tape_sigmoid(t, act->alpha != 0 ? moe_tape_scale(t, a, act->alpha) : a));
  default: return a; /* MOE__ACT_IDENTITY */
  }
}

/* x w' + factor bias in FP32 (FP64), of each row's expert where there is a routing; the factor [R,1] is 1 where none is
   given. */
static moe_value project(moe_tape *t, struct moe__routed *r, moe_value x, moe_value w, moe_value bias, moe_value factor)
{
  if (t->status) return none;
  const int64_t real = moe__real_of(moe__tape_at(t, x)->t.dtype);
  moe_value y = r ? moe__tape_grouped(t, r, x, w, 0) : moe_tape_matmul(t, x, w, 0, 1);
  y = moe_tape_cast(t, y, real);
  if (!bias.id || t->status) return y;
  const moe_tensor b = moe__tape_at(t, bias)->t;
  bias = moe_tape_reshape(t, moe_tape_cast(t, bias, real), 3, (const int64_t[]){ b.shape[0], b.shape[1], 1 });
  if (!factor.id)
    factor = moe_tape_broadcast(t, moe__tape_constant(t, bias, 1), 2, (const int64_t[]){ r->T * r->K, 1 });
  return moe_tape_add(t, y, moe__tape_grouped(t, r, factor, bias, 0));
}

/* factor * MLP(x) for rows x, in FP32 (FP64) but for the products' operands; without a routing, of the shared expert.
   The factor comes before the down projection, as in the fused backward: in 16-bit types the same things are rounded. */
static moe_value mlp(moe_tape *t, const struct layer_node *l, const struct moe__act *act, struct moe__routed *r,
                     moe_value x, moe_value factor)
{
  if (t->status) return none;
  const int64_t dtype = moe__tape_at(t, x)->t.dtype;
  moe_value bias[3] = { r ? param(t, l, "gate_bias") : none, r ? param(t, l, "up_bias") : none,
                        r ? param(t, l, "down_bias") : none };
  moe_value h = project(t, r, x, param(t, l, r ? "up" : "shared_up"), bias[1], none);
  if (act->limit > 0) h = at_most(t, h, act->limit);
  if (act->gated) {
    moe_value g = project(t, r, x, param(t, l, r ? "gate" : "shared_gate_proj"), bias[0], none);
    if (act->limit > 0) {
      g = at_most(t, g, act->limit);
      h = at_least(t, h, -act->limit);
    }
    if (act->up_offset != 0) h = moe_tape_add(t, h, moe__tape_constant(t, h, act->up_offset));
    h = moe_tape_mul(t, activated(t, act, g), h);
  } else {
    h = activated(t, act, h);
  }
  if (factor.id) h = moe_tape_mul(t, h, factor);
  return project(t, r, moe_tape_cast(t, h, dtype), param(t, l, r ? "down" : "shared_down"), bias[2], factor);
}

/* Counts as numbers [S,n]; a constant. */
static moe_value numbers(moe_tape *t, moe_tensor counts, int64_t S, int64_t n, int64_t real)
{
  moe_tensor y = moe__tape_fresh(t, real, counts.rank, counts.shape);
  TAPE_RUN(t, nd_map, .dtype = real, .y = y, .a = counts, .op = MOE__ND_COPY, .alpha = 1);
  return moe_tape_reshape(t, moe__tape_value(t, y, 0), 2, (const int64_t[]){ S, n });
}

/* a [T,n], 0 where the token is masked out. */
static moe_value unmasked(moe_tape *t, const struct layer_node *l, moe_value a)
{
  if (!l->options.mask.handle || t->status) return a;
  moe_value mask =
      moe_tape_reshape(t, moe__tape_value(t, l->options.mask, 0), 2, (const int64_t[]){ l->state.tokens, 1 });
  return moe_tape_where(t, mask, a, moe__tape_constant(t, a, 0));
}

/* coef * balance = sum over s,e of c[s,e] P[s,e], with P the sum of p over the sequence's tokens and the constants
   c = coef E count / (K n_s^2 (sequences that have a token)), 0 for those that have none. */
static moe_value balance(moe_tape *t, const struct layer_node *l, const struct moe__layer_view *v, moe_value logits)
{
  const int64_t S = l->state.sequences, E = v->routed.E, N = v->routed.T / S, tokens = 1;
  const int64_t real = t->status ? MOE_F32 : moe__tape_at(t, logits)->t.dtype;
  moe_value n = numbers(t, v->tokens, S, 1, real), c = numbers(t, v->counts, S, E, real);
  moe_value zero = moe__tape_constant(t, n, 0), one = moe__tape_constant(t, n, 1);
  moe_value live = moe_tape_sum(t, moe_tape_where(t, n, one, zero));
  c = moe_tape_scale(t, c, v->balance_coef * (double)E / (double)v->routed.K);
  c = moe_tape_where(t, n, moe_tape_div(t, c, moe_tape_mul(t, moe_tape_mul(t, n, n), live)), zero);
  if (v->balance_scoring == MOE__SIGMOID) logits = log_sigmoid(t, logits);
  moe_value p = unmasked(t, l, moe_tape_softmax(t, logits, 1));
  moe_value sums = moe_tape_sum_axes(t, moe_tape_reshape(t, p, 3, (const int64_t[]){ S, N, E }), 1, &tokens, 0);
  return moe_tape_sum(t, moe_tape_mul(t, c, sums));
}

/* coef * z, z the mean over unmasked tokens of (log sum exp)^2, 0 where there is none. */
static moe_value z_loss(moe_tape *t, const struct layer_node *l, const struct moe__layer_view *v, moe_value logits)
{
  const int64_t experts = 1, real = t->status ? MOE_F32 : moe__tape_at(t, logits)->t.dtype;
  moe_value n = moe_tape_sum(t, numbers(t, v->tokens, l->state.sequences, 1, real));
  moe_value top = moe_tape_max_axes(t, moe_tape_detach(t, logits), 1, &experts, 1);
  moe_value sum = moe_tape_sum_axes(t, moe_tape_exp(t, moe_tape_sub(t, logits, top)), 1, &experts, 1);
  moe_value lse = moe_tape_add(t, top, moe_tape_log(t, sum));
  moe_value all = moe_tape_sum(t, unmasked(t, l, moe_tape_mul(t, lse, lse)));
  moe_value share = moe_tape_div(t, moe__tape_constant(t, n, v->z_coef), n);
  return moe_tape_mul(t, all, moe_tape_where(t, n, share, moe__tape_constant(t, n, 0)));
}

/* y, and the losses, which join with their scale wherever y's gradient does. */
static void back_join(moe_tape *t, struct moe__node *n, const moe_value *d)
{
  moe__tape_contribute(t, n->in[0], d[0]);
  if (moe__tape_joins(t, n)) moe__tape_contribute(t, n->in[1], n->in[2]);
}
static const struct moe__rule rule_join = { "losses", back_join, NULL, 0 };
static moe_value join(moe_tape *t, const struct layer_node *l, moe_value y, moe_value losses)
{
  if (!losses.id || t->status) return y;
  const moe_tensor scale = l->options.aux_scale;
  moe_value s = scale.handle ? moe__tape_value(t, scale, 0) : moe__tape_one(t, moe__tape_at(t, losses)->t.dtype);
  struct moe__node *n = moe__tape_node(t, &rule_join, 3, (const moe_value[]){ y, losses, s }, 1);
  return t->status ? none : moe__tape_record(t, n, moe__tape_at(t, y)->t);
}

/* The layer again, its choice and its plan being constants. */
static void expand_layer(moe_tape *t, struct moe__node *n, moe_value *out)
{
  const struct layer_node *l = n->more;
  struct moe__layer_view *v = moe__tape_host(t, sizeof *v);
  if (!v) return;
  moe__tape_fail(t, moe__layer_view(v, &l->state, "moe_tape_moe_layer"));
  struct moe__routed *r = &v->routed;
  moe_value x = n->in[0], losses = none;
  const int64_t dtype = moe__tape_at(t, x)->t.dtype, real = moe__real_of(dtype);
  moe_value exact = moe_tape_cast(t, x, real); /* routing is in FP32, or FP64 */
  moe_value logits = moe_tape_matmul(t, exact, moe_tape_cast(t, param(t, l, "router"), real), 0, 1);
  moe_value bias = param(t, l, "router_bias");
  if (bias.id) logits = moe_tape_add(t, logits, moe_tape_cast(t, bias, real));

  moe_value w = moe_tape_reshape(t, weights(t, r, logits), 2, (const int64_t[]){ r->T * r->K, 1 });
  moe_value rows = mlp(t, l, &v->act, r, moe__tape_dispatch(t, r, x, r->K), moe__tape_dispatch(t, r, w, 1));
  moe_value y = moe__tape_collect(t, r, rows, r->K);
  if (param(t, l, "shared_up").id) {
    moe_value gate = param(t, l, "shared_gate");
    if (gate.id) gate = moe_tape_sigmoid(t, moe_tape_matmul(t, exact, moe_tape_cast(t, gate, real), 0, 1));
    y = moe_tape_add(t, y, mlp(t, l, &v->act, NULL, x, gate));
  }
  if (v->balance_coef != 0) losses = balance(t, l, v, logits);
  if (v->z_coef != 0) {
    moe_value z = z_loss(t, l, v, logits);
    losses = losses.id ? moe_tape_add(t, losses, z) : z;
  }
  out[0] = join(t, l, moe_tape_cast(t, y, dtype), losses);
}

static const struct moe__rule rule_layer = { "moe_layer", back_layer, expand_layer, 1 };

/* ---- the call ------------------------------------------------------------------------------------------------------------- */

/* The values of the trainable parameters. */
static void layer_params(moe_tape *t, struct layer_node *l)
{
  const int trains = l->options.grads.handle || l->options.differentiate;
  moe_layer_param_info info = moe_layer_param_info_init();
  while (moe_layer_param(NULL, NULL, &info, l->layer, l->options.params, l->options.grads, l->n_params) == MOE_OK)
    l->n_params++;
  l->params = moe__tape_host(t, (uint64_t)l->n_params * sizeof *l->params);
  for (int64_t i = 0; i < l->n_params && trains && !t->status; i++) {
    moe_tensor param, grad;
    const int bound = l->options.grads.handle != NULL;
    moe__tape_fail(
        t, moe_layer_param(&param, bound ? &grad : NULL, &info, l->layer, l->options.params, l->options.grads, i));
    if (t->status || !info.trainable) continue;
    l->params[i] = bound ? moe_tape_param(t, &param, &grad) : moe_tape_leaf(t, &param, 1);
  }
}

moe_value moe_tape_moe_layer(moe_tape *t, moe_layer *layer, moe_value x, const moe_tape_moe *given,
                             moe_layer_state *state)
{
  static const char fn[] = "moe_tape_moe_layer";
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_layer_io io = moe_layer_io_init();
  const struct moe__value *vx = moe__tape_look(t, x, fn);
  struct layer_node *l = vx ? moe__tape_host(t, sizeof *l) : NULL;
  if (!l) return (moe_value){ 0 };
  moe_tensor tx = vx->t;
  moe__tape_fail(t, moe__struct_in(&l->options, sizeof l->options, given, fn, "options"));
  if (!layer) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: layer is NULL", fn);
  if (tx.rank != 2) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: x has rank %d, 2 is wanted", fn, tx.rank);
  l->layer = layer;
  moe__tape_fail(t, moe_layer_measure(&bytes, layer, tx.shape[0], l->options.sequences));
  if (l->options.grads.handle && !t->status) {
    struct moe__arena grads = moe__arena_over(l->options.grads);
    grads.used = bytes.grads;
    moe__tape_fail(t, moe__arena_check(&grads, fn, "grads"));
  }
  const moe_tensor replay = moe__segment_replay(t);
  moe_tensor y = moe__tape_fresh(t, tx.dtype, 2, tx.shape);
  io.x = tx;
  io.y = y;
  io.mask = l->options.mask;
  io.ids = replay.handle ? replay : l->options.ids;
  io.sequences = l->options.sequences;
  io.params = l->options.params;
  io.saved = moe__tape_take(t, bytes.saved);
  struct moe__mark mark = moe__tape_mark(t);
  io.scratch = moe__tape_take(t, bytes.scratch);
  l->state = moe_layer_state_init();
  if (!t->status) moe__tape_fail(t, moe_layer_forward(layer, t->q, &io, &l->state));
  moe__tape_rewind(t, mark);
  if (t->status) return (moe_value){ 0 };
  if (t->segment) {
    moe_tensor ids = replay;
    if (!ids.handle) moe__tape_fail(t, moe_layer_route_ids(&ids, &l->state));
    moe__segment_keep(t, &ids);
  }
  if (state) {
    uint64_t size = state->size;
    moe__tape_fail(t, moe__struct_out(state, &l->state, size < sizeof l->state ? size : sizeof l->state, fn, "state"));
  }
  layer_params(t, l);
  moe_value *in = moe__tape_host(t, (uint64_t)(l->n_params + 1) * sizeof *in);
  if (!in) return (moe_value){ 0 };
  int64_t n_in = 0;
  in[n_in++] = x;
  for (int64_t i = 0; i < l->n_params; i++)
    if (l->params[i].id) in[n_in++] = l->params[i];
  struct moe__node *n = moe__tape_node(t, &rule_layer, n_in, in, 1);
  if (n) n->more = l;
  return moe__tape_record(t, n, y);
}

moe_value moe_tape_moe_param(moe_tape *t, moe_value y, int64_t index)
{
  static const char fn[] = "moe_tape_moe_param";
  const struct moe__value *v = moe__tape_look(t, y, fn);
  if (!v) return (moe_value){ 0 };
  const struct moe__node *n = v->node < 0 ? NULL : t->nodes[v->node];
  if (!n || n->rule != &rule_layer)
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: y is not the recorded result of moe_tape_moe_layer", fn);
  const struct layer_node *l = n->more;
  if (index < 0 || index >= l->n_params)
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: index %lld, the layer has %lld parameters", fn, (long long)index,
                     (long long)l->n_params);
  return l->params[index];
}
