/* fixture.h - a layer, or the routed branch alone, with every tensor it needs on the device between guard bands:
   what the end-to-end tests share.

   options_of gives the usual choices (softmax top-k, renormalized, SwiGLU); a test changes what it is about, then
   calls layer_make or branch_make, which fills inputs and parameters with seeded random values and sends them.
   Outputs, gradients, saved and scratch start as NaN.  A test may write other values into the host arrays and send
   again.  layer_check and branch_check compare everything with the reference (tests/ref), whose bounds follow from
   the dtype. */
#ifndef MOE_TEST_FIXTURE_H
#define MOE_TEST_FIXTURE_H

#include "moe_test.h"
#include "../ref/compare.h"
#include "../ref/layer.h"

struct options {
  int64_t dtype, T, D, F, E, K;
  uint64_t seed;
  moe_selection_options selection;
  moe_weights_options weights;
  moe_activation activation;
};

static inline struct options options_of(int64_t dtype, int64_t T, int64_t D, int64_t F, int64_t E, int64_t K)
{
  struct options o = { .dtype = dtype, .T = T, .D = D, .F = F, .E = E, .K = K, .seed = 1 };
  o.selection = moe_selection_options_init();
  o.selection.kind = MOE_SELECT_SOFTMAX;
  o.selection.top_k = K;
  o.weights = moe_weights_options_init();
  o.weights.scoring = MOE_SOFTMAX;
  o.weights.renormalize = 1;
  o.weights.scale = 1;
  o.activation = moe_activation_init();
  o.activation.kind = MOE_SILU;
  o.activation.gated = 1;
  return o;
}

/* Grouped sigmoid selection without groups, weighed by renormalized sigmoids: DeepSeek-V3's. */
static inline void options_sigmoid(struct options *o)
{
  o->selection.kind = MOE_SELECT_GROUPED_SIGMOID;
  o->selection.groups = o->selection.selected_groups = 1;
  o->selection.scale = 1;
  o->weights.scoring = MOE_SIGMOID;
}

static inline int64_t real_of(int64_t dtype)
{
  return dtype == MOE_F64 ? MOE_F64 : MOE_F32;
}

/* What the reference needs to know of the options. */
static inline struct ref_layer ref_of(const struct options *o)
{
  return (struct ref_layer){
    .T = o->T,
    .D = o->D,
    .F = o->F,
    .E = o->E,
    .K = o->K,
    .dtype = o->dtype,
    .weigh = { o->weights.scoring, o->weights.renormalize, o->weights.scale, o->weights.epsilon },
    .act = { o->activation.kind, o->activation.gated, o->activation.alpha, o->activation.limit,
             o->activation.up_offset },
  };
}

static inline struct moe__select select_of(const struct options *o)
{
  const moe_selection_options *s = &o->selection;
  return (struct moe__select){ s->kind, s->top_k, s->groups, s->selected_groups, s->group_top_two, s->renormalize, 1 };
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */
static inline void good(const struct t_memory *m)
{
  if (m->status) fail_msg("device memory: %s (%s)", moe_strerror(m->status), moe_last_error());
}

/* Memory that no call may write in, and memory that one may write anywhere in. */
static inline moe_span inputs_of(struct t_memory *m, uint64_t bytes)
{
  moe_tensor t = t_tensor(m, MOE_U8, T_PACKED, SHAPE((int64_t)bytes));
  return (moe_span){ t.handle, t.offset, bytes };
}

static inline moe_span span_of(struct t_memory *m, uint64_t bytes)
{
  moe_tensor t = t_tensor(m, MOE_U8, T_PACKED, SHAPE((int64_t)bytes));
  t_own(m, &t);
  return (moe_span){ t.handle, t.offset, bytes };
}

static inline moe_tensor output_of(struct t_memory *m, int64_t dtype, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(m, dtype, T_PACKED, rank, shape);
  t_own(m, &t);
  return t;
}

/* Waits, fetches everything, and looks at the guard bands. */
static inline void fetch(struct t_memory *m)
{
  const char *touched;
  OK(moe_queue_wait(m->q));
  t_download(m);
  good(m);
  touched = t_guards(m);
  if (touched) fail_msg("%s", touched);
}

static inline void send(struct t_memory *m)
{
  t_upload(m);
  good(m);
}

/* The tensor as last fetched. */
static inline double *values_of(struct t_memory *m, const moe_tensor *t)
{
  double *v = t_host(m, moe_tensor_count(t), sizeof *v);
  t_get(m, t, v);
  return v;
}

static inline int32_t *ints_of(struct t_memory *m, const moe_tensor *t)
{
  int32_t *v = t_ints(m, moe_tensor_count(t));
  t_get_ints(m, t, v);
  return v;
}

static inline num *nums_of(struct t_memory *m, int64_t n, const double *v)
{
  num *x = t_nums(m, n);
  for (int64_t i = 0; i < n; i++) x[i].v = v[i];
  return x;
}

/* The same bits (values as fetched: exact in double). */
#define assert_same(a, b, n) assert_memory_equal(a, b, (size_t)(n) * sizeof *(a))

static inline void check_tensor(struct t_memory *m, const char *name, const moe_tensor *t, const num *want)
{
  int64_t n = moe_tensor_count(t);
  struct ref_worst w = ref_compare(values_of(m, t), want, n, t->dtype);
  if (w.failed)
    fail_msg("%s[%lld] is %.9g, wanted %.9g within %.3g (%lld of %lld elements are off)", name, (long long)w.at, w.got,
             w.want, w.bound, (long long)w.failed, (long long)n);
}

/* Ids as the device chose them, which must be right for these logits (with bounds). */
static inline int32_t *checked_ids(struct t_memory *m, const struct options *o, const moe_tensor *ids,
                                   const num *logits, const num *bias)
{
  int32_t *chosen = ints_of(m, ids);
  for (int64_t t = 0; t < o->T; t++) {
    const char *wrong = ref_select_check(chosen + t * o->K, logits + t * o->E, bias, o->E, select_of(o));
    if (wrong) fail_msg("token %lld: %s", (long long)t, wrong);
  }
  return chosen;
}

/* ids[T,K] at random, distinct in a token. */
static inline int32_t *random_ids(struct t_memory *m, int64_t T, int64_t E, int64_t K)
{
  int32_t *ids = t_ints(m, T * K), *deck = t_ints(m, E);
  for (int64_t e = 0; e < E; e++) deck[e] = (int32_t)e;
  for (int64_t i = 0; i < T * K; i++) {
    int64_t k = i % K, at = k + t_below(m, E - k);
    int32_t id = deck[at];
    deck[at] = deck[k];
    deck[k] = ids[i] = id;
  }
  return ids;
}

/* ---- kinks ------------------------------------------------------------------------------------------------------- */
static inline int near_kink(const moe_activation *a, double gate, double up, double margin)
{
  int corner = a->kind == MOE_RELU || a->kind == MOE_RELU2;
  if (corner && fabs(gate) < margin) return 1;
  if (a->limit > 0 && fabs(gate - a->limit) < margin) return 1;
  return a->limit > 0 && a->gated && fabs(fabs(up) - a->limit) < margin;
}

/* Does any activation of these hidden rows come nearer to one than that? */
static inline int any_kink(const moe_activation *a, const num *h, int64_t rows, int64_t F, double margin)
{
  int64_t width = a->gated ? 2 * F : F;
  for (int64_t r = 0; h && r < rows; r++)
    for (int64_t f = 0; f < F; f++)
      if (near_kink(a, h[r * width + f].v, a->gated ? h[r * width + F + f].v : 0, margin)) return 1;
  return 0;
}

/* ---- the layer --------------------------------------------------------------------------------------------------- */
struct layer {
  struct options o;
  moe_layer_desc desc; /* its sizes and options are taken from o */
  struct t_memory m;
  moe_layer *layer;
  moe_layer_bytes bytes;
  moe_layer_io io;
  moe_layer_state state;
  moe_tensor param[REF_PARAMS], grad[REF_PARAMS]; /* no handle: absent */
  num *x, *dy, *value[REF_PARAMS];
  int32_t *ids; /* NULL: the layer chooses */
  struct ref_layer ref;
};

static inline struct layer layer_of(struct options o)
{
  return (struct layer){ .o = o, .desc = moe_layer_desc_init() };
}

static inline int64_t ref_param_of(const char *name)
{
  int64_t p = 0;
  while (p < REF_PARAMS && strcmp(name, ref_param_names[p])) p++;
  if (p == REF_PARAMS) fail_msg("a parameter named %s", name);
  return p;
}

/* Host arrays to the device; everything else becomes NaN. */
static inline void layer_send(struct layer *l)
{
  t_put(&l->m, &l->io.x, l->x);
  t_put(&l->m, &l->io.dy, l->dy);
  for (int p = 0; p < REF_PARAMS; p++)
    if (l->param[p].handle) t_put(&l->m, &l->param[p], l->value[p]);
  if (l->ids) t_put_ints(&l->m, &l->io.ids, l->ids);
  send(&l->m);
}

/* Makes the tensor for given ids; the next send has them. */
static inline void layer_replay(struct layer *l, const int32_t *ids)
{
  if (!l->ids) {
    l->ids = t_ints(&l->m, l->o.T * l->o.K);
    l->io.ids = t_tensor(&l->m, MOE_I32, T_PACKED, SHAPE(l->o.T, l->o.K));
  }
  memcpy(l->ids, ids, (size_t)(l->o.T * l->o.K) * sizeof *ids);
}

/* The tokens of `mask` [T] that are 0 do not count. */
static inline void layer_mask(struct layer *l, const int32_t *mask)
{
  num *values = t_nums(&l->m, l->o.T);
  for (int64_t t = 0; t < l->o.T; t++) values[t].v = mask[t];
  l->io.mask = t_tensor(&l->m, MOE_U8, T_PACKED, SHAPE(l->o.T));
  t_put_ints(&l->m, &l->io.mask, mask);
  l->ref.mask = values;
}

static inline void layer_aux_scale(struct layer *l, double scale)
{
  num *value = t_nums(&l->m, 1);
  value->v = scale;
  l->io.aux_scale = t_tensor(&l->m, real_of(l->o.dtype), T_PACKED, SHAPE(1));
  t_put(&l->m, &l->io.aux_scale, value);
  l->ref.aux_scale = value;
}

static inline void layer_make(struct layer *l, moe_context *ctx, moe_queue *q, int64_t sequences)
{
  struct options *o = &l->o;
  struct t_memory *m = &l->m;
  moe_layer_param_info info = moe_layer_param_info_init();
  l->desc.d_model = o->D;
  l->desc.d_ff = o->F;
  l->desc.n_experts = o->E;
  l->desc.dtype = o->dtype;
  l->desc.selection = &o->selection;
  l->desc.weights = &o->weights;
  l->desc.activation = &o->activation;
  OK(moe_layer_create(&l->layer, ctx, &l->desc));
  l->bytes = moe_layer_bytes_init();
  OK(moe_layer_measure(&l->bytes, l->layer, o->T, sequences));

  ref_arithmetic(o->dtype);
  t_memory_init(m, ctx, q, o->seed);
  l->io = moe_layer_io_init();
  l->state = moe_layer_state_init();
  l->io.sequences = sequences;
  l->io.x = t_tensor(m, o->dtype, T_PACKED, SHAPE(o->T, o->D));
  l->io.dy = t_tensor(m, o->dtype, T_PACKED, SHAPE(o->T, o->D));
  l->io.y = output_of(m, o->dtype, SHAPE(o->T, o->D));
  l->io.dx = output_of(m, o->dtype, SHAPE(o->T, o->D));
  l->io.params = inputs_of(m, l->bytes.params);
  l->io.grads = span_of(m, l->bytes.grads);
  l->io.saved = span_of(m, l->bytes.saved);
  l->io.scratch = span_of(m, l->bytes.scratch > l->bytes.inference ? l->bytes.scratch : l->bytes.inference);
  l->x = t_uniform(m, o->T * o->D, o->dtype, 1);
  l->dy = t_uniform(m, o->T * o->D, o->dtype, 1);

  l->ref = ref_of(o);
  l->ref.Fs = l->desc.d_shared;
  l->ref.S = sequences;
  l->ref.balance_scoring = l->desc.balance_scoring;
  l->ref.balance_coef = l->desc.balance_coef;
  l->ref.z_coef = l->desc.z_coef;
  l->ref.x = l->x;
  l->ref.dy = l->dy;
  for (int64_t i = 0;; i++) {
    moe_tensor param, grad;
    if (moe_layer_param(NULL, NULL, &info, l->layer, l->io.params, l->io.grads, i)) break;
    int64_t p = ref_param_of(info.name);
    OK(moe_layer_param(&param, &grad, &info, l->layer, l->io.params, l->io.grads, i));
    l->param[p] = param;
    l->grad[p] = grad;
    /* So that every product is of the size of one. */
    double size = info.decays ? 2 / sqrt((double)param.shape[param.rank - 1]) : 0.5;
    l->value[p] = t_uniform(m, moe_tensor_count(&param), param.dtype, size);
    l->ref.p[p] = l->value[p];
  }
  layer_send(l);
}

static inline void layer_free(struct layer *l)
{
  t_memory_free(&l->m);
  moe_layer_free(l->layer);
}

static inline void layer_forward(struct layer *l)
{
  OK(moe_layer_forward(l->layer, l->m.q, &l->io, &l->state));
}

static inline void layer_backward(struct layer *l)
{
  OK(moe_layer_backward(l->layer, l->m.q, &l->state, &l->io));
}

/* Fetches; compares output, losses and counts with the reference. */
static inline void layer_check_forward(struct layer *l)
{
  struct t_memory *m = &l->m;
  moe_tensor ids, weights, logits, losses, counts;
  fetch(m);
  OK(moe_layer_route_ids(&ids, &l->state));
  OK(moe_layer_route_weights(&weights, &l->state));
  OK(moe_layer_logits(&logits, &l->state));
  OK(moe_layer_losses(&losses, &l->state));
  OK(moe_layer_counts(&counts, &l->state));
  l->ref.ids = l->ids ? l->ids : ints_of(m, &ids);
  ref_arithmetic(l->o.dtype);
  ref_layer_forward(&l->ref, m);
  if (!l->ids) checked_ids(m, &l->o, &ids, l->ref.logits, l->ref.p[REF_CORRECTION_BIAS]);
  check_tensor(m, "logits", &logits, l->ref.logits);
  check_tensor(m, "weights", &weights, l->ref.weights);
  check_tensor(m, "y", &l->io.y, l->ref.y);
  check_tensor(m, "losses", &losses, l->ref.losses);
  assert_same(ints_of(m, &counts), l->ref.counts, moe_tensor_count(&counts));
}

/* After layer_check_forward and a backward: fetches and compares every gradient. */
static inline void layer_check_backward(struct layer *l)
{
  fetch(&l->m);
  ref_arithmetic(l->o.dtype);
  ref_layer_backward(&l->ref, &l->m);
  if (l->io.dx.handle) check_tensor(&l->m, "dx", &l->io.dx, l->ref.dx);
  for (int p = 0; p < REF_PARAMS; p++)
    if (l->grad[p].handle) check_tensor(&l->m, ref_param_names[p], &l->grad[p], l->ref.d[p]);
}

/* Forward and backward, compared. */
static inline void layer_check(struct layer *l)
{
  layer_forward(l);
  layer_check_forward(l);
  layer_backward(l);
  layer_check_backward(l);
}

/* ---- the branch -------------------------------------------------------------------------------------------------- */
/* How gate, up and down lie in memory: each packed; halves of one [E,2F,D]; its rows in turn; columns in turn of one
   [E,D,2F], down as [E,F,D] (gpt-oss). */
enum place { PACKED, HALVES, INTERLEAVED, TRANSPOSED, PLACES };

struct mlp {
  moe_tensor gate, up, down;
};

static inline struct mlp mlp_place(struct t_memory *m, int64_t dtype, enum place place, int64_t E, int64_t F, int64_t D)
{
  struct mlp w;
  moe_tensor both, half;
  if (place == PACKED) {
    w.gate = t_tensor(m, dtype, T_PACKED, SHAPE(E, F, D));
    w.up = t_tensor(m, dtype, T_PACKED, SHAPE(E, F, D));
  } else if (place == HALVES) {
    both = t_tensor(m, dtype, T_PACKED, SHAPE(E, 2 * F, D));
    OK(moe_tensor_slice(&w.gate, &both, 1, 0, F));
    OK(moe_tensor_slice(&w.up, &both, 1, F, 2 * F));
  } else if (place == INTERLEAVED) {
    both = t_tensor(m, dtype, T_PACKED, SHAPE(E, 2 * F, D));
    OK(moe_tensor_every(&w.gate, &both, 1, 0, 2));
    OK(moe_tensor_every(&w.up, &both, 1, 1, 2));
  } else {
    both = t_tensor(m, dtype, T_PACKED, SHAPE(E, D, 2 * F));
    OK(moe_tensor_every(&half, &both, 2, 0, 2));
    OK(moe_tensor_transpose(&w.gate, &half, 1, 2));
    OK(moe_tensor_every(&half, &both, 2, 1, 2));
    OK(moe_tensor_transpose(&w.up, &half, 1, 2));
  }
  if (place == TRANSPOSED) {
    both = t_tensor(m, dtype, T_PACKED, SHAPE(E, F, D));
    OK(moe_tensor_transpose(&w.down, &both, 1, 2));
  } else {
    w.down = t_tensor(m, dtype, place == PACKED ? T_PACKED : T_PAD, SHAPE(E, D, F));
  }
  return w;
}

struct branch {
  struct options o;
  enum place place;
  moe_experts_desc desc; /* its sizes, options and layouts are taken from o and place */
  struct t_memory m;
  moe_experts *experts;
  moe_experts_io io;
  moe_experts_grads g;
  moe_state state;
  int64_t all; /* gradients there are */
  num *x, *dy, *logits, *value[REF_PARAMS];
  int32_t *ids; /* NULL: the branch chooses */
  struct ref_layer ref;
};

static inline struct branch branch_of(struct options o)
{
  return (struct branch){ .o = o, .desc = moe_experts_desc_init() };
}

/* The branch's parameters and their gradients; NULL for those of the layer. */
static inline moe_tensor *branch_param(struct branch *b, int p)
{
  moe_tensor *const param[REF_PARAMS] = {
    [REF_CORRECTION_BIAS] = &b->io.correction_bias,
    [REF_GATE] = &b->io.gate,
    [REF_UP] = &b->io.up,
    [REF_DOWN] = &b->io.down,
    [REF_GATE_BIAS] = &b->io.gate_bias,
    [REF_UP_BIAS] = &b->io.up_bias,
    [REF_DOWN_BIAS] = &b->io.down_bias,
  };
  return param[p];
}
static inline moe_tensor *branch_grad(struct branch *b, int p)
{
  moe_tensor *const grad[REF_PARAMS] = {
    [REF_GATE] = &b->g.dgate,           [REF_UP] = &b->g.dup,           [REF_DOWN] = &b->g.ddown,
    [REF_GATE_BIAS] = &b->g.dgate_bias, [REF_UP_BIAS] = &b->g.dup_bias, [REF_DOWN_BIAS] = &b->g.ddown_bias,
  };
  return grad[p];
}
/* The bit that asks for it. */
static inline int64_t branch_bit(int p)
{
  static const int64_t bit[REF_PARAMS] = {
    [REF_GATE] = MOE_GRAD_GATE,           [REF_UP] = MOE_GRAD_UP,           [REF_DOWN] = MOE_GRAD_DOWN,
    [REF_GATE_BIAS] = MOE_GRAD_GATE_BIAS, [REF_UP_BIAS] = MOE_GRAD_UP_BIAS, [REF_DOWN_BIAS] = MOE_GRAD_DOWN_BIAS,
  };
  return bit[p];
}

static inline void branch_send(struct branch *b)
{
  t_put(&b->m, &b->io.x, b->x);
  t_put(&b->m, &b->g.dy, b->dy);
  t_put(&b->m, &b->io.logits, b->logits);
  for (int p = 0; p < REF_PARAMS; p++)
    if (b->value[p]) t_put(&b->m, branch_param(b, p), b->value[p]);
  if (b->ids) t_put_ints(&b->m, &b->io.ids, b->ids);
  send(&b->m);
}

static inline void branch_replay(struct branch *b, const int32_t *ids)
{
  if (!b->ids) {
    b->ids = t_ints(&b->m, b->o.T * b->o.K);
    b->io.ids = t_tensor(&b->m, MOE_I32, T_PACKED, SHAPE(b->o.T, b->o.K));
  }
  memcpy(b->ids, ids, (size_t)(b->o.T * b->o.K) * sizeof *ids);
}

/* Fills the parameter, where there is one, with values of that size. */
static inline void branch_fill(struct branch *b, int p, double size)
{
  moe_tensor *t = branch_param(b, p);
  if (!t || !t->handle) return;
  b->value[p] = t_uniform(&b->m, moe_tensor_count(t), t->dtype, size);
  b->ref.p[p] = b->value[p];
}

/* New random inputs and parameters. */
static inline void branch_values(struct branch *b)
{
  struct options *o = &b->o;
  struct t_memory *m = &b->m;
  b->ref.x = b->x = t_uniform(m, o->T * o->D, o->dtype, 1);
  b->ref.dy = b->dy = t_uniform(m, o->T * o->D, o->dtype, 1);
  b->ref.logits = b->logits = t_uniform(m, o->T * o->E, b->io.logits.dtype, 2);
  branch_fill(b, REF_GATE, 2 / sqrt((double)o->D));
  branch_fill(b, REF_UP, 2 / sqrt((double)o->D));
  branch_fill(b, REF_DOWN, 2 / sqrt((double)o->F));
  for (int p = REF_GATE_BIAS; p <= REF_DOWN_BIAS; p++) branch_fill(b, p, 0.5);
  branch_fill(b, REF_CORRECTION_BIAS, 0.5);
}

static inline void branch_make(struct branch *b, moe_context *ctx, moe_queue *q)
{
  struct options *o = &b->o;
  struct t_memory *m = &b->m;
  moe_experts_bytes bytes = moe_experts_bytes_init();
  moe_experts_desc *d = &b->desc;
  int64_t real = real_of(o->dtype), E = o->E, F = o->F, D = o->D;
  ref_arithmetic(o->dtype);
  t_memory_init(m, ctx, q, o->seed);
  struct mlp w = mlp_place(m, o->dtype, b->place, E, F, D), dw = mlp_place(m, real, b->place, E, F, D);
  d->d_model = D;
  d->d_ff = F;
  d->n_experts = E;
  d->dtype = o->dtype;
  d->selection = &o->selection;
  d->weights = &o->weights;
  d->activation = &o->activation;
  d->gate = o->activation.gated ? w.gate : (moe_tensor){ 0 };
  d->up = w.up;
  d->down = w.down;
  OK(moe_experts_create(&b->experts, ctx, d));
  OK(moe_experts_measure(&bytes, b->experts, o->T, 0));
  uint64_t scratch = bytes.scratch;
  b->all = MOE_GRAD_INPUT | MOE_GRAD_LOGITS | MOE_GRAD_UP | MOE_GRAD_DOWN;
  if (d->hidden_bias) b->all |= MOE_GRAD_UP_BIAS;
  if (d->down_bias) b->all |= MOE_GRAD_DOWN_BIAS;
  if (o->activation.gated) b->all |= MOE_GRAD_GATE | (d->hidden_bias ? MOE_GRAD_GATE_BIAS : 0);
  OK(moe_experts_measure(&bytes, b->experts, o->T, d->wanted ? d->wanted : b->all));

  b->io = moe_experts_io_init();
  b->g = moe_experts_grads_init();
  b->state = moe_state_init();
  b->io.x = t_tensor(m, o->dtype, T_PACKED, SHAPE(o->T, D));
  b->io.logits = t_tensor(m, d->logits_dtype ? d->logits_dtype : real, T_PACKED, SHAPE(o->T, E));
  b->io.y = output_of(m, o->dtype, SHAPE(o->T, D));
  b->io.saved = span_of(m, bytes.saved);
  b->io.scratch = span_of(m, scratch > bytes.scratch ? scratch : bytes.scratch);
  b->g.dy = t_tensor(m, o->dtype, T_PACKED, SHAPE(o->T, D));
  b->g.dx = output_of(m, o->dtype, SHAPE(o->T, D));
  b->g.dlogits = output_of(m, b->io.logits.dtype, SHAPE(o->T, E));
  b->io.up = w.up;
  b->io.down = w.down;
  b->g.dup = dw.up;
  b->g.ddown = dw.down;
  if (o->activation.gated) {
    b->io.gate = w.gate;
    b->g.dgate = dw.gate;
  }
  if (d->hidden_bias) {
    b->io.up_bias = t_tensor(m, o->dtype, T_PAD, SHAPE(E, F));
    b->g.dup_bias = t_tensor(m, real, T_STEP, SHAPE(E, F));
  }
  if (d->hidden_bias && o->activation.gated) {
    b->io.gate_bias = t_tensor(m, o->dtype, T_STEP, SHAPE(E, F));
    b->g.dgate_bias = t_tensor(m, real, T_PAD, SHAPE(E, F));
  }
  if (d->down_bias) {
    b->io.down_bias = t_tensor(m, o->dtype, T_PACKED, SHAPE(E, D));
    b->g.ddown_bias = t_tensor(m, real, T_PACKED, SHAPE(E, D));
  }
  if (o->selection.kind == MOE_SELECT_GROUPED_SIGMOID || o->selection.softmax_bias)
    b->io.correction_bias = t_tensor(m, real, T_PACKED, SHAPE(E));
  for (int p = 0; p < REF_PARAMS; p++)
    if (branch_grad(b, p) && branch_grad(b, p)->handle) t_own(m, branch_grad(b, p));
  b->ref = ref_of(o);
  branch_values(b);
  branch_send(b);
}

static inline void branch_free(struct branch *b)
{
  t_memory_free(&b->m);
  moe_experts_free(b->experts);
}

static inline void branch_forward(struct branch *b)
{
  OK(moe_experts_forward(b->experts, b->m.q, &b->io, &b->state));
}

static inline void branch_backward(struct branch *b)
{
  OK(moe_experts_backward(b->experts, b->m.q, &b->state, &b->io, &b->g));
}

/* Forward and backward, everything compared with the reference. */
static inline void branch_check(struct branch *b)
{
  struct t_memory *m = &b->m;
  moe_tensor ids;
  branch_forward(b);
  branch_backward(b);
  fetch(m);
  OK(moe_experts_route_ids(&ids, &b->state));
  b->ref.ids = b->ids ? b->ids : checked_ids(m, &b->o, &ids, b->ref.logits, b->ref.p[REF_CORRECTION_BIAS]);
  ref_arithmetic(b->o.dtype);
  ref_layer_forward(&b->ref, m);
  ref_layer_backward(&b->ref, m);
  check_tensor(m, "y", &b->io.y, b->ref.y);
  check_tensor(m, "dx", &b->g.dx, b->ref.dx);
  check_tensor(m, "dlogits", &b->g.dlogits, b->ref.dlogits);
  for (int p = 0; p < REF_PARAMS; p++)
    if (branch_grad(b, p) && branch_grad(b, p)->handle)
      check_tensor(m, ref_param_names[p], branch_grad(b, p), b->ref.d[p]);
}

#endif
