/* tape.c - the tape's memory, values and recording, and backward as a walk over the rules in reverse. */
#include "core/tape.h"

#include <stdlib.h>

#define DEFAULT_BLOCK ((uint64_t)64 << 20)
#define ALIGNMENT 256
#define HOST_CHUNK ((uint64_t)64 << 10)

static const moe_value no_value;

/* ---- errors, values, memory ------------------------------------------------------------------------------------ */
void moe__tape_fail(moe_tape *t, moe_status st)
{
  if (t->status || !st) return;
  t->status = st;
  strncpy(t->error, moe_last_error(), sizeof t->error - 1);
}

struct moe__value *moe__tape_at(const moe_tape *t, moe_value v)
{
  uint64_t index = (v.id & 0xffffffffu) - 1;
  return &t->values[index / MOE__PAGE][index % MOE__PAGE];
}

static int is_own(const moe_tape *t, moe_value v)
{
  return v.id >> 32 == t->generation && (v.id & 0xffffffffu) - 1 < (uint64_t)t->n_values;
}

/* Why v is no value of the tape: MOE_OK where it is one. */
static moe_status known(const moe_tape *t, moe_value v, const char *fn)
{
  if (!v.id) return moe__fail(MOE_ERR_INVALID, "%s: the null value", fn);
  if (!is_own(t, v)) return moe__fail(MOE_ERR_STATE, "%s: a value from before moe_tape_reset, or of another tape", fn);
  if (!moe__tape_at(t, v)->t.handle)
    return moe__fail(MOE_ERR_STATE, "%s: a value from inside a recomputed segment", fn);
  return MOE_OK;
}

struct moe__value *moe__tape_look(moe_tape *t, moe_value v, const char *fn)
{
  if (!t || t->status) return NULL;
  moe__tape_fail(t, known(t, v, fn));
  return t->status ? NULL : moe__tape_at(t, v);
}

static int grow(moe_tape *t, void **list, int64_t *room, int64_t count, size_t size)
{
  if (count < *room) return 1;
  int64_t more = *room ? 2 * *room : 256;
  void *bigger = realloc(*list, (size_t)more * size);
  if (!bigger) return moe__tape_fail(t, moe__fail(MOE_ERR_NO_MEMORY, "moe_tape: no host memory")), 0;
  *list = bigger;
  *room = more;
  return 1;
}

void *moe__tape_host(moe_tape *t, uint64_t bytes)
{
  bytes = (bytes + 15) / 16 * 16;
  if (t->status) return NULL;
  if (bytes > HOST_CHUNK)
    return moe__tape_fail(t, moe__fail(MOE_ERR_INVALID, "moe_tape: a node of %llu bytes", (unsigned long long)bytes)),
           NULL;
  if (t->at_host < t->n_host && t->used_host + bytes > HOST_CHUNK) {
    t->at_host++;
    t->used_host = 0;
  }
  if (t->at_host == t->n_host) {
    void **host = realloc(t->host, (size_t)(t->n_host + 1) * sizeof *host), *chunk = NULL;
    if (host) t->host = host;
    if (host) chunk = malloc(HOST_CHUNK);
    if (!chunk) return moe__tape_fail(t, moe__fail(MOE_ERR_NO_MEMORY, "moe_tape: no host memory")), NULL;
    t->host[t->n_host++] = chunk;
    t->used_host = 0;
  }
  void *at = (char *)t->host[t->at_host] + t->used_host;
  t->used_host += bytes;
  return memset(at, 0, bytes);
}

moe_span moe__tape_take(moe_tape *t, uint64_t bytes)
{
  struct moe__pool *p = &t->pools[t->depth];
  moe_span none = { 0 };
  if (t->status) return none;
  bytes = (bytes ? bytes + ALIGNMENT - 1 : ALIGNMENT) / ALIGNMENT * ALIGNMENT;
  for (; p->at.block < p->n_blocks; p->at.block++, p->at.used = 0) {
    moe_span s = p->blocks[p->at.block];
    if (s.bytes - p->at.used < bytes) continue;
    s.offset += p->at.used;
    s.bytes = bytes;
    p->at.used += bytes;
    return s;
  }
  moe_span *blocks = realloc(p->blocks, (size_t)(p->n_blocks + 1) * sizeof *blocks);
  if (!blocks) return moe__tape_fail(t, moe__fail(MOE_ERR_NO_MEMORY, "moe_tape: no host memory")), none;
  p->blocks = blocks;
  moe_status st = moe__alloc(t->q->ctx, bytes > t->block_bytes ? bytes : t->block_bytes, &blocks[p->n_blocks]);
  if (st) return moe__tape_fail(t, st), none;
  p->at.block = p->n_blocks++;
  p->at.used = bytes;
  moe_span s = blocks[p->at.block];
  s.bytes = bytes;
  return s;
}

moe_tensor moe__tape_fresh(moe_tape *t, int64_t dtype, int64_t rank, const int64_t *shape)
{
  moe_tensor out = { 0 };
  int64_t count = moe_dtype_size(dtype) ? (int64_t)moe_dtype_size(dtype) : 1;
  for (int64_t d = 0; d < rank; d++)
    if (moe__mul(&count, count, shape[d]))
      return moe__tape_fail(t, moe__fail(MOE_ERR_INVALID, "moe_tape: a tensor of more than 2^63-1 bytes")), out;
  moe_span s = moe__tape_take(t, (uint64_t)count);
  if (!t->status) moe__tape_fail(t, moe_tensor_packed(&out, s, dtype, rank, shape));
  return out;
}

moe_tensor moe__tape_flat(moe_tape *t, int64_t dtype, int64_t n)
{
  return moe__tape_fresh(t, dtype, 1, &n);
}

moe_tensor moe__tape_copy(moe_tape *t, const moe_tensor *x)
{
  moe_tensor y = moe__tape_fresh(t, x->dtype, x->rank, x->shape);
  const uint64_t bytes = moe_tensor_extent(x);
  if (!t->status && bytes)
    moe__tape_fail(t, t->q->ctx->be->copy(t->q->be, (moe_span){ y.handle, y.offset, bytes },
                                          (moe_span){ x->handle, x->offset, bytes }, bytes));
  return y;
}

moe_value moe__tape_value(moe_tape *t, moe_tensor tensor, int needs_grad)
{
  if (t->status) return (moe_value){ 0 };
  if (t->n_values == t->n_pages * MOE__PAGE) {
    struct moe__value **pages = realloc(t->values, (size_t)(t->n_pages + 1) * sizeof *pages);
    if (pages) t->values = pages;
    struct moe__value *page = pages ? malloc(MOE__PAGE * sizeof *page) : NULL;
    if (!page) return TAPE_FAIL(t, MOE_ERR_NO_MEMORY, "moe_tape: no host memory");
    t->values[t->n_pages++] = page;
  }
  moe_value id = { t->generation << 32 | (uint64_t)++t->n_values };
  *moe__tape_at(t, id) = (struct moe__value){ .t = tensor, .node = -1, .depth = t->depth, .needs_grad = needs_grad };
  return id;
}

int moe__same_shape(const moe_tensor *a, const moe_tensor *b)
{
  int same = a->rank == b->rank;
  for (int d = 0; same && d < a->rank; d++) same = a->shape[d] == b->shape[d];
  return same;
}

moe_value moe__tape_one(moe_tape *t, int64_t dtype)
{
  moe_value *one = &t->ones[dtype == MOE_F64];
  if (t->status || one->id) return *one;
  const int depth = t->depth;
  t->depth = 0; /* it outlives a segment */
  moe_tensor x = moe__tape_flat(t, moe__real_of(dtype), 1);
  TAPE_RUN(t, elt_map, .dtype = x.dtype, .y = x, .op = MOE__ELT_FILL, .n = 1, .alpha = 1);
  *one = moe__tape_value(t, x, 0);
  t->depth = depth;
  return *one;
}

/* ---- recording --------------------------------------------------------------------------------------------------- */
struct moe__node *moe__tape_node(moe_tape *t, const struct moe__rule *rule, int64_t n_in, const moe_value *in,
                                 int64_t n_out)
{
  struct moe__node *n = moe__tape_host(t, sizeof *n);
  moe_value *links = moe__tape_host(t, (uint64_t)(n_in + n_out) * sizeof *links);
  if (!links) return NULL;
  n->rule = rule;
  n->name = rule->name;
  n->order = t->order;
  n->n_in = n_in;
  n->n_out = n_out;
  n->in = links;
  n->out = links + n_in;
  for (int64_t i = 0; i < n_in; i++) n->in[i] = in[i];
  return n;
}

void moe__tape_record_all(moe_tape *t, struct moe__node *n, const moe_tensor *tensors)
{
  int needs = 0;
  if (t->status || !n) return;
  for (int64_t i = 0; i < n->n_in; i++) needs |= n->in[i].id && moe__tape_at(t, n->in[i])->needs_grad;
  needs &= t->recording;
  if (needs && !grow(t, (void **)&t->nodes, &t->room_nodes, t->n_nodes, sizeof *t->nodes)) return;
  for (int64_t i = 0; i < n->n_out; i++) {
    n->out[i] = moe__tape_value(t, tensors[i], needs && moe__is_float(tensors[i].dtype));
    if (!n->out[i].id) return;
    if (needs) moe__tape_at(t, n->out[i])->node = t->n_nodes;
  }
  if (!needs) return;
  t->nodes[t->n_nodes++] = n;
  if (t->health && !t->walking) moe__health_results(t, n);
}

moe_value moe__tape_record(moe_tape *t, struct moe__node *n, moe_tensor tensor)
{
  moe__tape_record_all(t, n, &tensor);
  return t->status ? no_value : n->out[0];
}

void moe__tape_forget(moe_tape *t, int64_t node, int64_t value)
{
  t->n_nodes = node;
  for (int64_t i = value; i < t->n_values; i++) {
    struct moe__value *v = &t->values[i / MOE__PAGE][i % MOE__PAGE];
    if (v->node < node) continue;
    v->node = -1;
    v->needs_grad = 0;
  }
}

void moe__tape_on_reset(moe_tape *t, void (*call)(void *user), void *user)
{
  if (grow(t, (void **)&t->releases, &t->room_releases, t->n_releases, sizeof *t->releases))
    t->releases[t->n_releases++] = (struct moe__release){ call, user };
  else call(user);
}

/* ---- lifetime ---------------------------------------------------------------------------------------------------- */
/* One of its own for every tape, from every reset on, so that no tape takes another's values for its own. */
static uint64_t new_generation(void)
{
  static _Atomic uint32_t last;
  uint32_t next;
  do next = ++last;
  while (!next);
  return next;
}

moe_status moe_tape_create(moe_tape **out, moe_queue *q, const moe_tape_desc *given)
{
  static const char fn[] = "moe_tape_create";
  moe_tape_desc desc = moe_tape_desc_init();
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (!q) return moe__fail(MOE_ERR_INVALID, "%s: queue is NULL", fn);
  if (given) MOE__TRY(moe__struct_in(&desc, sizeof desc, given, fn, "desc"));
  moe_tape *t = calloc(1, sizeof *t);
  if (!t) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  t->q = q;
  t->block_bytes = desc.block ? desc.block : DEFAULT_BLOCK;
  t->generation = new_generation();
  t->recording = 1;
  moe_status st = moe__health_create(t, &desc);
  if (st) {
    free(t);
    return moe__fail_in(st, fn);
  }
  moe__context_ref(q->ctx);
  *out = t;
  return MOE_OK;
}

moe_status moe__tape_outside(moe_tape *t, const char *fn)
{
  if (t->callbacks) moe__tape_fail(t, moe__fail(MOE_ERR_STATE, "%s: inside a function of the same tape", fn));
  return t->callbacks ? MOE_ERR_STATE : MOE_OK;
}

/* Calls what the caller left to be called when the tape forgets, last one first. */
static void release_all(moe_tape *t)
{
  while (t->n_releases) {
    const struct moe__release r = t->releases[--t->n_releases];
    r.call(r.user);
  }
}

moe_status moe__tape_close(moe_tape *t)
{
  if (!t) return MOE_OK;
  MOE__TRY(moe__tape_outside(t, "moe_tape_free"));
  moe_context *ctx = t->q->ctx;
  moe_status st = ctx->be->wait(t->q->be);
  if (t->health) moe__health_free(t);
  release_all(t);
  for (int d = 0; d < MOE__TAPE_DEPTH; d++) {
    for (int64_t i = 0; i < t->pools[d].n_blocks; i++) moe__release(ctx, &t->pools[d].blocks[i]);
    free(t->pools[d].blocks);
  }
  for (int64_t i = 0; i < t->n_pages; i++) free(t->values[i]);
  for (int64_t i = 0; i < t->n_host; i++) free(t->host[i]);
  free(t->values);
  free(t->host);
  free(t->nodes);
  free(t->params);
  free(t->releases);
  free(t);
  moe__context_unref(ctx);
  return st;
}

void moe_tape_free(moe_tape *t)
{
  (void)moe__tape_close(t);
}

void moe_tape_reset(moe_tape *t)
{
  if (!t || moe__tape_outside(t, "moe_tape_reset")) return;
  release_all(t);
  t->n_values = t->n_nodes = t->n_params = 0;
  t->at_host = 0;
  t->used_host = 0;
  memset(t->ones, 0, sizeof t->ones);
  for (int d = 0; d < MOE__TAPE_DEPTH; d++) t->pools[d].at = (struct moe__mark){ 0, 0 };
  t->depth = 0;
  t->generation = new_generation();
  t->status = MOE_OK;
  t->recording = 1;
  if (t->health) moe__health_flush(t);
}

moe_status moe_tape_status(const moe_tape *t)
{
  if (!t) return moe__fail(MOE_ERR_INVALID, "moe_tape_status: tape is NULL");
  return t->status ? moe__fail(t->status, "%s", t->error) : MOE_OK;
}

void moe_tape_memory(const moe_tape *t, uint64_t *held, uint64_t *used)
{
  uint64_t h = 0, u = 0;
  for (int d = 0; t && d < MOE__TAPE_DEPTH; d++)
    for (int64_t i = 0; i < t->pools[d].n_blocks; i++) {
      const struct moe__pool *p = &t->pools[d];
      h += p->blocks[i].bytes;
      if (i < p->at.block) u += p->blocks[i].bytes;
      else if (i == p->at.block) u += p->at.used;
    }
  if (held) *held = h;
  if (used) *used = u;
}

int64_t moe_tape_set_recording(moe_tape *t, int64_t on)
{
  if (!t) return 0;
  int64_t before = t->recording;
  t->recording = on != 0;
  return before;
}

/* ---- leaves --------------------------------------------------------------------------------------------------------- */
static moe_value leaf(moe_tape *t, const moe_tensor *tensor, const moe_tensor *grad, int needs, const char *fn)
{
  if (!t || t->status) return (moe_value){ 0 };
  if (!tensor || !tensor->handle) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: tensor is not given", fn);
  moe_status st = moe__want_array(fn, "tensor", tensor, 0);
  if (!st && grad) st = moe__want_out(fn, "grad", grad, 0, tensor->rank, tensor->shape);
  if (st) return moe__tape_fail(t, st), (moe_value){ 0 };
  if (!moe_tensor_is_packed(tensor)) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: tensor is not a packed tensor", fn);
  if (needs && !moe__is_float(tensor->dtype))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %s has no gradient", fn, moe_dtype_name(tensor->dtype));
  if (grad && !grad->handle) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: grad is not given", fn);
  if (grad && !moe_tensor_is_packed(grad)) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: grad is not packed", fn);
  if (grad && (grad->dtype == MOE_F64) != (tensor->dtype == MOE_F64))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: grad is %s of a tensor of %s, f64 goes with f64 only", fn,
                     moe_dtype_name(grad->dtype), moe_dtype_name(tensor->dtype));
  if (grad && !grow(t, (void **)&t->params, &t->room_params, t->n_params, sizeof *t->params)) return (moe_value){ 0 };
  moe_value v = needs ? moe__segment_replay_leaf(t, tensor, grad) : no_value;
  if (v.id || t->status) return v;
  v = moe__tape_value(t, *tensor, needs);
  if (v.id && grad) {
    moe__tape_at(t, v)->bound = *grad;
    t->params[t->n_params++] = (int64_t)v.id;
  }
  if (v.id && needs) moe__segment_keep_leaf(t, v);
  return v;
}

moe_value moe_tape_leaf(moe_tape *t, const moe_tensor *tensor, int64_t needs_grad)
{
  return leaf(t, tensor, NULL, needs_grad != 0, "moe_tape_leaf");
}

moe_value moe_tape_param(moe_tape *t, const moe_tensor *tensor, const moe_tensor *grad)
{
  if (t && !t->status && !grad) return TAPE_FAIL(t, MOE_ERR_INVALID, "moe_tape_param: grad is NULL");
  return leaf(t, tensor, grad, 1, "moe_tape_param");
}

moe_value moe_tape_detach(moe_tape *t, moe_value v)
{
  const struct moe__value *x = moe__tape_look(t, v, "moe_tape_detach");
  return x ? moe__tape_value(t, x->t, 0) : (moe_value){ 0 };
}

moe_status moe_tape_tensor(moe_tensor *out, const moe_tape *t, moe_value v)
{
  if (!out || !t) return moe__fail(MOE_ERR_INVALID, "moe_tape_tensor: %s is NULL", out ? "tape" : "out");
  if (t->status) return moe_tape_status(t);
  MOE__TRY(known(t, v, "moe_tape_tensor"));
  *out = moe__tape_at(t, v)->t;
  return MOE_OK;
}

moe_status moe_tape_read(moe_tape *t, moe_value v, double *out, int64_t n)
{
  moe_tensor x;
  MOE__TRY(moe_tape_tensor(&x, t, v));
  return moe_tensor_read(t->q, out, &x, n);
}

/* ---- gradients of inputs, as rules add them ------------------------------------------------------------------------ */
/* Whether the present walk has written this gradient tensor, which several values may share. */
static int bound_written(const moe_tape *t, const moe_tensor *bound)
{
  for (int64_t i = 0; i < t->n_params; i++) {
    const struct moe__value *p = moe__tape_at(t, (moe_value){ (uint64_t)t->params[i] });
    if (p->written && p->bound.handle == bound->handle && p->bound.offset == bound->offset) return 1;
  }
  return 0;
}

int moe__tape_sink(moe_tape *t, moe_value v, moe_tensor *to, int64_t *accumulate)
{
  const struct moe__value *p = moe__tape_at(t, v);
  if (!p->bound.handle || !t->direct || (t->flags & MOE_CREATE_GRAPH)) return 0;
  *to = p->bound;
  *accumulate = bound_written(t, &p->bound) || (t->flags & MOE_ACCUMULATE);
  if (t->health) moe__health_settle(t, to);
  return 1;
}

void moe__tape_sunk(moe_tape *t, moe_value v)
{
  struct moe__value *p = moe__tape_at(t, v);
  p->written = 1;
  if (t->health) moe__health_watch(t, t->walking, v, &p->bound);
}

/* bound (+)= g */
static void into_bound(moe_tape *t, moe_tensor bound, moe_tensor g, int64_t accumulate)
{
  int64_t n = moe_tensor_count(&bound);
  TAPE_RUN(t, elt_map, .dtype = moe__real_of(bound.dtype), .y = moe__flatten(bound), .a = moe__flatten(g),
           .b = accumulate ? moe__flatten(bound) : (moe_tensor){ 0 }, .op = accumulate ? MOE__ELT_ADD : MOE__ELT_COPY,
           .n = n, .alpha = 1);
}

int moe__tape_wants(const moe_tape *t, moe_value v)
{
  return !t->status && v.id && moe__tape_at(t, v)->needs_grad && !moe__tape_at(t, v)->skip;
}

int moe__tape_joins(const moe_tape *t, const struct moe__node *n)
{
  int joins = 0;
  for (int64_t i = 0; i < n->n_out; i++) joins |= moe__tape_at(t, n->out[i])->joins;
  return joins;
}

void moe__tape_contribute(moe_tape *t, moe_value v, moe_value g)
{
  moe_tensor to;
  int64_t accumulate;
  if (t->status || !g.id || !moe__tape_wants(t, v)) return;
  if (moe__tape_sink(t, v, &to, &accumulate)) {
    into_bound(t, to, moe__tape_at(t, g)->t, accumulate);
    moe__tape_sunk(t, v);
    return;
  }
  const int depth = t->depth;
  moe_value before = moe__tape_at(t, v)->grad, sum = g;
  if (!(t->flags & MOE_CREATE_GRAPH)) t->depth = moe__tape_at(t, v)->depth; /* a gradient lives where its value does */
  if (before.id) sum = moe_tape_add(t, before, g);
  else if (moe__tape_at(t, g)->depth > t->depth) sum = moe__tape_value(t, moe__tape_copy(t, &moe__tape_at(t, g)->t), 0);
  t->depth = depth;
  if (!sum.id) return;
  moe__tape_at(t, v)->grad = sum;
  if (t->health) moe__health_watch(t, t->walking, v, &moe__tape_at(t, sum)->t);
}

static const struct moe__rule rule_gradient = { "gradient", NULL, NULL, 1 };
void moe__tape_contribute_fused(moe_tape *t, moe_value v, moe_tensor g)
{
  const struct moe__node *walking = t->walking;
  const int64_t n_in = walking->n_in + walking->n_out;
  moe_value *in = moe__tape_host(t, (uint64_t)n_in * sizeof *in);
  if (!in) return;
  for (int64_t i = 0; i < n_in; i++)
    in[i] = i < walking->n_in ? walking->in[i] : moe__tape_at(t, walking->out[i - walking->n_in])->grad;
  struct moe__node *n = moe__tape_node(t, &rule_gradient, n_in, in, 1);
  if (n) n->name = walking->name;
  moe__tape_contribute(t, v, moe__tape_record(t, n, g));
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */
static void step_back(moe_tape *t, int64_t index);

/* Where gradients are no graph of their own, the nodes are forgotten again. */
void moe__tape_through_expansion(moe_tape *t, struct moe__node *n, const moe_value *dout)
{
  const int64_t first = t->n_nodes;
  const int recording = t->recording, order = t->order;
  const struct moe__node *outermost = t->expanded;
  moe_value *out = moe__tape_host(t, (uint64_t)n->n_out * sizeof *out);
  if (!out) return;
  if (!outermost) t->expanded = n;
  t->recording = 1;
  t->order = n->order; /* in n's place */
  n->rule->expand(t, n, out);
  t->order = order;
  t->recording = recording;
  for (int64_t i = 0; i < n->n_out && !t->status; i++) {
    if (!out[i].id || !dout[i].id || !moe__tape_at(t, out[i])->needs_grad) continue;
    moe__tape_at(t, out[i])->joins |= moe__tape_at(t, n->out[i])->joins;
    moe__tape_contribute(t, out[i], dout[i]);
  }
  for (int64_t i = t->n_nodes - 1; i >= first && !t->status; i--) step_back(t, i);
  if (!recording) t->n_nodes = first;
  t->expanded = outermost;
}

static void step_back(moe_tape *t, int64_t index)
{
  struct moe__node *n = t->nodes[index], *outer = t->walking;
  const struct moe__rule *rule = n->rule;
  const int graph = (t->flags & MOE_CREATE_GRAPH) != 0, decompose = (t->flags & MOE_DECOMPOSE) != 0;
  moe_value *dout = moe__tape_host(t, (uint64_t)n->n_out * sizeof *dout);
  int flows = 0, wanted = 0;
  if (!dout) return;
  for (int64_t i = 0; i < n->n_out; i++) {
    dout[i] = moe__tape_at(t, n->out[i])->grad;
    flows |= dout[i].id != 0;
  }
  for (int64_t i = 0; i < n->n_in; i++) wanted |= moe__tape_wants(t, n->in[i]);
  if (!flows || !wanted) return;
  if (n->order < t->order && moe__tape_joins(t, n))
    for (int64_t i = 0; i < n->n_in; i++)
      if (n->in[i].id) moe__tape_at(t, n->in[i])->joins = 1;
  t->walking = n;
  if (rule->expand && (!rule->backward || (graph && (!rule->fused || decompose))))
    moe__tape_through_expansion(t, n, dout);
  else if (rule->backward) rule->backward(t, n, dout);
  else
    moe__tape_fail(t,
                   moe__fail(MOE_ERR_NO_SECOND_DERIVATIVE,
                             "moe_tape: node %lld, gradient of %s, has no derivative; MOE_DECOMPOSE in the call that "
                             "made it gives one",
                             (long long)index, n->name));
  t->walking = outer;
}

/* The gradient that starts at `of`: the given seed, or 1. */
static moe_value seed_of(moe_tape *t, moe_value of, moe_value seed, const char *fn)
{
  const struct moe__value *root = moe__tape_look(t, of, fn);
  if (!root) return seed;
  if (!root->needs_grad)
    return TAPE_FAIL(t, MOE_ERR_INVALID,
                     "%s: `of` depends on nothing that needs a gradient (gradients do with MOE_CREATE_GRAPH only)", fn);
  if (!seed.id) {
    if (moe_tensor_count(&root->t) != 1)
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: `of` has %lld elements, without a seed 1 is wanted", fn,
                       (long long)moe_tensor_count(&root->t));
    moe_tensor one = moe__tape_fresh(t, root->t.dtype, root->t.rank, root->t.shape);
    TAPE_RUN(t, elt_map, .dtype = moe__real_of(one.dtype), .y = moe__flatten(one), .op = MOE__ELT_FILL, .n = 1,
             .alpha = 1);
    return moe__tape_value(t, one, 0);
  }
  const struct moe__value *s = moe__tape_look(t, seed, fn);
  if (s && (!moe__same_shape(&s->t, &root->t) || s->t.dtype != root->t.dtype))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: seed differs from `of` in shape or dtype", fn);
  return seed;
}

static void clear_gradients(moe_tape *t)
{
  for (int64_t i = 0; i < t->n_values; i++) {
    struct moe__value *v = &t->values[i / MOE__PAGE][i % MOE__PAGE];
    v->grad = (moe_value){ 0 };
    v->written = v->skip = v->joins = 0;
  }
}

/* From clean gradients, those of everything the outputs depend on. */
static void walk_back(moe_tape *t, const moe_value *of, const moe_value *seed, int64_t n, int joins, const char *fn)
{
  moe_value *seeds = moe__tape_host(t, (uint64_t)n * sizeof *seeds);
  int64_t last = -1;
  for (int64_t i = 0; i < n && !t->status; i++) {
    seeds[i] = seed_of(t, of[i], seed ? seed[i] : (moe_value){ 0 }, fn);
    if (!t->status && moe__tape_at(t, of[i])->node > last) last = moe__tape_at(t, of[i])->node;
  }
  for (int64_t i = 0; i < n && !t->status; i++) {
    moe__tape_at(t, of[i])->joins = joins;
    moe__tape_contribute(t, of[i], seeds[i]);
  }
  for (int64_t i = last; i >= 0 && !t->status; i--) step_back(t, i);
  if (t->health) moe__health_flush(t);
}

/* The gradients of parameters that are values of their own go where they belong; those that `of` does not depend
   on become zero, not what an earlier call left. */
static void finish_params(moe_tape *t)
{
  for (int64_t i = 0; i < t->n_params && !t->status; i++) {
    struct moe__value *v = moe__tape_at(t, (moe_value){ (uint64_t)t->params[i] });
    if (v->written) {
      v->grad = moe__tape_value(t, v->bound, 0);
    } else if (v->grad.id) {
      into_bound(t, v->bound, moe__tape_at(t, v->grad)->t, bound_written(t, &v->bound) || (t->flags & MOE_ACCUMULATE));
      v->written = 1;
    } else if (!(t->flags & MOE_ACCUMULATE) && !bound_written(t, &v->bound)) {
      TAPE_RUN(t, elt_map, .dtype = moe__real_of(v->bound.dtype), .y = moe__flatten(v->bound), .op = MOE__ELT_FILL,
               .n = moe_tensor_count(&v->bound));
    }
  }
}

#define ALL_FLAGS (MOE_CREATE_GRAPH | MOE_ACCUMULATE | MOE_DECOMPOSE)

moe_status moe_tape_backward(moe_tape *t, moe_value of, moe_value seed, int64_t flags)
{
  static const char fn[] = "moe_tape_backward";
  if (!t) return moe__fail(MOE_ERR_INVALID, "%s: tape is NULL", fn);
  if (moe__tape_outside(t, fn)) return moe_tape_status(t);
  if (!t->status && (flags & ~(int64_t)ALL_FLAGS))
    moe__tape_fail(t, moe__fail(MOE_ERR_INVALID, "%s: flags 0x%llx", fn, (unsigned long long)flags));
  const int recording = t->recording;
  t->flags = flags;
  t->direct = 1;
  t->recording = (flags & MOE_CREATE_GRAPH) != 0;
  t->order++;
  if (!t->status) {
    clear_gradients(t);
    walk_back(t, &of, &seed, 1, 1, fn);
  }
  finish_params(t);
  t->order--;
  t->recording = recording;
  t->flags = t->direct = 0;
  if (!t->status) moe__tape_fail(t, t->q->ctx->be->flush(t->q->be));
  return moe_tape_status(t);
}

/* Marks with `skip` every value from which no wanted one can be reached. */
static void skip_others(moe_tape *t, const moe_value *wrt, int64_t n)
{
  for (int64_t i = 0; i < t->n_values; i++) t->values[i / MOE__PAGE][i % MOE__PAGE].skip = 1;
  for (int64_t i = 0; i < n; i++) moe__tape_at(t, wrt[i])->skip = 0;
  for (int64_t k = 0; k < t->n_nodes; k++) {
    const struct moe__node *node = t->nodes[k];
    int leads = 0;
    for (int64_t i = 0; i < node->n_in; i++) leads |= moe__tape_wants(t, node->in[i]);
    for (int64_t i = 0; leads && i < node->n_out; i++) moe__tape_at(t, node->out[i])->skip = 0;
  }
}

moe_status moe_tape_gradients(moe_value *grads, moe_tape *t, const moe_value *of, const moe_value *seeds, int64_t n_of,
                              const moe_value *wrt, int64_t n_wrt, int64_t flags)
{
  static const char fn[] = "moe_tape_gradients";
  if (!t) return moe__fail(MOE_ERR_INVALID, "%s: tape is NULL", fn);
  if (!t->status && (!grads || !of || !wrt || n_of < 1 || n_wrt < 1))
    moe__tape_fail(t, moe__fail(MOE_ERR_INVALID, "%s: grads, of and wrt are wanted, at least one each", fn));
  if (!t->status && (flags & ~(int64_t)(MOE_CREATE_GRAPH | MOE_DECOMPOSE)))
    moe__tape_fail(t, moe__fail(MOE_ERR_INVALID, "%s: flags 0x%llx", fn, (unsigned long long)flags));
  for (int64_t i = 0; i < n_wrt && !t->status; i++) (void)moe__tape_look(t, wrt[i], fn);
  for (int64_t i = 0; t->status && grads && i < n_wrt; i++) grads[i] = no_value;
  if (t->status) return moe_tape_status(t);

  /* What the last moe_tape_backward gave, or the walk inside which this one runs has so far, is put aside. */
  struct outer {
    moe_value grad;
    int skip, written, joins;
  } *outer = NULL;
  const int64_t n_outer = t->n_values, outer_flags = t->flags;
  const int recording = t->recording, direct = t->direct;
  struct moe__node *walking = t->walking;
  const int joins = !walking || moe__tape_joins(t, walking);
  if (!(outer = malloc((size_t)n_outer * sizeof *outer)))
    moe__tape_fail(t, moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn));
  for (int64_t i = 0; outer && i < n_outer; i++) {
    const struct moe__value *v = &t->values[i / MOE__PAGE][i % MOE__PAGE];
    outer[i] = (struct outer){ v->grad, v->skip, v->written, v->joins };
  }
  t->flags = flags;
  t->direct = 0;
  t->walking = NULL;
  t->recording = (flags & MOE_CREATE_GRAPH) != 0;
  t->order++;
  if (!t->status) {
    clear_gradients(t);
    skip_others(t, wrt, n_wrt);
    walk_back(t, of, seeds, n_of, joins, fn);
  }
  t->order--;
  if (!t->status) moe__tape_fail(t, t->q->ctx->be->flush(t->q->be));
  for (int64_t i = 0; i < n_wrt; i++) /* last: grads may be `of`, or wrt */
    grads[i] = t->status ? no_value : moe__tape_at(t, wrt[i])->grad;
  for (int64_t i = 0; outer && i < n_outer; i++) {
    struct moe__value *v = &t->values[i / MOE__PAGE][i % MOE__PAGE];
    v->grad = outer[i].grad;
    v->skip = outer[i].skip;
    v->written = outer[i].written;
    v->joins = outer[i].joins;
  }
  free(outer);
  t->recording = recording;
  t->flags = outer_flags;
  t->direct = direct;
  t->walking = walking;
  return moe_tape_status(t);
}

moe_value moe_tape_grad(const moe_tape *t, moe_value v)
{
  return t && !t->status && is_own(t, v) ? moe__tape_at(t, v)->grad : no_value;
}
