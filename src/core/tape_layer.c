/* tape_layer.c - the Mixture-of-Experts layer on the tape: its fused forward and backward, and its expansion into
   primitive operations for further derivatives.

   A node's inputs are x and the layer's trainable parameters, in the order of moe_layer_param; each is a value of its
   own, a view into `params`, bound to its view of `grads`. */
#include "core/arena.h"
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

static const struct moe__rule rule_layer = { "moe_layer", back_layer, NULL, 1 };

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
    moe__tape_fail(t, moe_layer_param(&param, bound ? &grad : NULL, &info, l->layer, l->options.params,
                                      l->options.grads, i));
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
  if (t->segment && !replay.handle) {
    moe_tensor ids;
    moe__tape_fail(t, moe_layer_route_ids(&ids, &l->state));
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
