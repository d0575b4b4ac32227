/* tape.c - the tape: eager operations, each recorded as a node with a rule, and backward as a walk over the
   rules in reverse.  Rules of primitive operations are written in the tape's own operations, so that with
   MOE_CREATE_GRAPH gradients are recorded like anything else; rules of fused operations launch their
   backward op and record its results under a rule that has no derivative. */
#include "core/arena.h"
#include "core/tensor.h"
#include "core/walk.h"

#include <moe/tape.h>

#include <stdlib.h>

#define DEFAULT_BLOCK ((uint64_t)64 << 20)
#define ALIGNMENT 256

struct block {
  moe_span span;
};
struct mark { /* a place in the arena */
  int64_t block;
  uint64_t used;
};

struct value {
  moe_tensor t;
  moe_tensor bound; /* a parameter's gradient tensor */
  int64_t node;     /* that made it; -1: leaf, or not recorded */
  int needs_grad;
  int written; /* bound was written in the present backward */
  moe_value grad;
};

struct node;
/* Adds to the gradients of node's inputs, given that of its output.  NULL: no derivative. */
typedef void rule_fn(moe_tape *, const struct node *, moe_value dout);
struct rule {
  const char *name;
  rule_fn *backward;
};
struct node {
  const struct rule *rule;
  moe_value in[3], out;
  double alpha;
  int64_t flag[2];
  moe_tensor kept; /* rstd, lse */
  moe_layer *layer;
  moe_layer_state state;
  moe_tape_moe options;
};

struct moe_tape {
  moe_queue *q;
  uint64_t block_bytes;
  struct block *blocks;
  int64_t n_blocks;
  struct mark at;
  struct value *values;
  int64_t n_values, room_values;
  struct node *nodes;
  int64_t n_nodes, room_nodes;
  uint64_t generation;
  int recording; /* 0 inside a backward without MOE_CREATE_GRAPH */
  int64_t flags; /* of the present backward */
  moe_status status;
  char error[512];
};

/* ---- errors, values, memory ------------------------------------------------------------------------------------ */
static void fail(moe_tape *t, moe_status st)
{
  if (t->status || !st) return;
  t->status = st;
  strncpy(t->error, moe_last_error(), sizeof t->error - 1);
}
#define FAIL(t, st, ...) (fail(t, moe__fail(st, __VA_ARGS__)), (moe_value){ 0 })

/* Runs an op on the tape's queue; compiles it where this is its first use. */
#define RUN(t, op, ...)                                                                                                \
  do {                                                                                                                 \
    const struct moe__args_##op args_ = { __VA_ARGS__ };                                                               \
    moe_status st_;                                                                                                    \
    if ((t)->status) break;                                                                                            \
    st_ = moe__prepare_##op((t)->q->ctx, &args_, MOE_AUTO);                                                            \
    if (!st_) st_ = moe__run_##op((t)->q, &args_, MOE_AUTO);                                                           \
    fail(t, st_);                                                                                                      \
  } while (0)

static struct value *look(moe_tape *t, moe_value v, const char *fn)
{
  uint64_t index = v.id & 0xffffffffu;
  if (t->status) return NULL;
  if (!v.id) return fail(t, moe__fail(MOE_ERR_INVALID, "%s: the null value", fn)), NULL;
  if (v.id >> 32 != t->generation || index > (uint64_t)t->n_values)
    return fail(t, moe__fail(MOE_ERR_STATE, "%s: a value from before moe_tape_reset", fn)), NULL;
  return &t->values[index - 1];
}

/* The value, known to be good. */
static struct value *at(const moe_tape *t, moe_value v)
{
  return &t->values[(v.id & 0xffffffffu) - 1];
}

static int grow(moe_tape *t, void **list, int64_t *room, int64_t count, size_t size)
{
  if (count < *room) return 1;
  int64_t more = *room ? 2 * *room : 256;
  void *bigger = realloc(*list, (size_t)more * size);
  if (!bigger) return fail(t, moe__fail(MOE_ERR_NO_MEMORY, "moe_tape: no host memory")), 0;
  *list = bigger;
  *room = more;
  return 1;
}

static moe_span take(moe_tape *t, uint64_t bytes)
{
  moe_span none = { 0 };
  if (t->status) return none;
  bytes = (bytes ? bytes + ALIGNMENT - 1 : ALIGNMENT) / ALIGNMENT * ALIGNMENT;
  for (; t->at.block < t->n_blocks; t->at.block++, t->at.used = 0) {
    moe_span s = t->blocks[t->at.block].span;
    if (s.bytes - t->at.used < bytes) continue;
    s.offset += t->at.used;
    s.bytes = bytes;
    t->at.used += bytes;
    return s;
  }
  struct block *blocks = realloc(t->blocks, (size_t)(t->n_blocks + 1) * sizeof *blocks);
  if (!blocks) return fail(t, moe__fail(MOE_ERR_NO_MEMORY, "moe_tape: no host memory")), none;
  t->blocks = blocks;
  moe_status st = moe__alloc(t->q->ctx, bytes > t->block_bytes ? bytes : t->block_bytes, &blocks[t->n_blocks].span);
  if (st) return fail(t, st), none;
  t->at.block = t->n_blocks++;
  t->at.used = bytes;
  moe_span s = blocks[t->at.block].span;
  s.bytes = bytes;
  return s;
}

static moe_tensor fresh(moe_tape *t, int64_t dtype, int64_t rank, const int64_t *shape)
{
  moe_tensor out = { 0 };
  int64_t count = moe_dtype_size(dtype) ? (int64_t)moe_dtype_size(dtype) : 1;
  for (int64_t d = 0; d < rank; d++)
    if (moe__mul(&count, count, shape[d]))
      return fail(t, moe__fail(MOE_ERR_INVALID, "moe_tape: a tensor of more than 2^63-1 bytes")), out;
  moe_span s = take(t, (uint64_t)count);
  if (!t->status) fail(t, moe_tensor_packed(&out, s, dtype, rank, shape));
  return out;
}

static moe_tensor fresh_flat(moe_tape *t, int64_t dtype, int64_t n)
{
  return fresh(t, dtype, 1, &n);
}

static moe_value new_value(moe_tape *t, moe_tensor tensor, int needs_grad)
{
  if (t->status || !grow(t, (void **)&t->values, &t->room_values, t->n_values, sizeof *t->values))
    return (moe_value){ 0 };
  struct value *v = &t->values[t->n_values++];
  memset(v, 0, sizeof *v);
  v->t = tensor;
  v->node = -1;
  v->needs_grad = needs_grad;
  return (moe_value){ t->generation << 32 | (uint64_t)t->n_values };
}

/* Records the node (its `in` filled) that made `tensor`, where a gradient can flow through it. */
static moe_value record(moe_tape *t, struct node n, moe_tensor tensor)
{
  int needs = 0;
  for (int i = 0; i < 3; i++) needs |= n.in[i].id && at(t, n.in[i])->needs_grad;
  needs &= t->recording;
  if (t->status) return (moe_value){ 0 };
  if (needs && !grow(t, (void **)&t->nodes, &t->room_nodes, t->n_nodes, sizeof *t->nodes)) return (moe_value){ 0 };
  n.out = new_value(t, tensor, needs);
  if (!n.out.id || !needs) return n.out;
  at(t, n.out)->node = t->n_nodes;
  t->nodes[t->n_nodes++] = n;
  return n.out;
}

static int64_t real_of(int64_t dtype)
{
  return dtype == MOE_F64 ? MOE_F64 : MOE_F32;
}

static int same_shape(const moe_tensor *a, const moe_tensor *b)
{
  int same = a->rank == b->rank;
  for (int d = 0; same && d < a->rank; d++) same = a->shape[d] == b->shape[d];
  return same;
}

/* ---- lifetime ---------------------------------------------------------------------------------------------------- */
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
  t->generation = ((uintptr_t)t >> 4 & 0xffffffffu) | 1; /* values of other tapes are not taken for ours */
  t->recording = 1;
  moe__context_ref(q->ctx);
  *out = t;
  return MOE_OK;
}

void moe_tape_free(moe_tape *t)
{
  if (!t) return;
  moe_context *ctx = t->q->ctx;
  (void)ctx->be->wait(t->q->be);
  for (int64_t i = 0; i < t->n_blocks; i++) moe__release(ctx, &t->blocks[i].span);
  free(t->blocks);
  free(t->values);
  free(t->nodes);
  free(t);
  moe__context_unref(ctx);
}

void moe_tape_reset(moe_tape *t)
{
  if (!t) return;
  t->n_values = t->n_nodes = 0;
  t->at = (struct mark){ 0, 0 };
  t->generation = t->generation % 0xffffffffu + 1;
  t->status = MOE_OK;
  t->recording = 1;
}

moe_status moe_tape_status(const moe_tape *t)
{
  if (!t) return moe__fail(MOE_ERR_INVALID, "moe_tape_status: tape is NULL");
  return t->status ? moe__fail(t->status, "%s", t->error) : MOE_OK;
}

void moe_tape_memory(const moe_tape *t, uint64_t *held, uint64_t *used)
{
  uint64_t h = 0, u = 0;
  for (int64_t i = 0; t && i < t->n_blocks; i++) {
    h += t->blocks[i].span.bytes;
    if (i < t->at.block) u += t->blocks[i].span.bytes;
    else if (i == t->at.block) u += t->at.used;
  }
  if (held) *held = h;
  if (used) *used = u;
}

/* ---- leaves --------------------------------------------------------------------------------------------------------- */
static moe_value leaf(moe_tape *t, const moe_tensor *tensor, const moe_tensor *grad, int needs, const char *fn)
{
  if (!t || t->status) return (moe_value){ 0 };
  if (!tensor || !tensor->handle) return FAIL(t, MOE_ERR_INVALID, "%s: tensor is not given", fn);
  if (!moe_dtype_size(tensor->dtype) || tensor->rank < 0 || tensor->rank > MOE_RANK_MAX ||
      !moe_tensor_is_packed(tensor))
    return FAIL(t, MOE_ERR_INVALID, "%s: tensor is not a packed tensor", fn);
  if (needs && !moe__is_float(tensor->dtype))
    return FAIL(t, MOE_ERR_INVALID, "%s: %s has no gradient", fn, moe_dtype_name(tensor->dtype));
  if (grad && (!grad->handle || !moe__is_float(grad->dtype) || !same_shape(tensor, grad) ||
               !moe_tensor_is_packed(grad) || (grad->dtype == MOE_F64) != (tensor->dtype == MOE_F64)))
    return FAIL(t, MOE_ERR_INVALID, "%s: grad wants the shape of the tensor, packed, a float (f64 with f64 only)", fn);
  moe_value v = new_value(t, *tensor, needs);
  if (v.id && grad) at(t, v)->bound = *grad;
  return v;
}

moe_value moe_tape_leaf(moe_tape *t, const moe_tensor *tensor, int64_t needs_grad)
{
  return leaf(t, tensor, NULL, needs_grad != 0, "moe_tape_leaf");
}

moe_value moe_tape_param(moe_tape *t, const moe_tensor *tensor, const moe_tensor *grad)
{
  if (t && !t->status && !grad) return FAIL(t, MOE_ERR_INVALID, "moe_tape_param: grad is NULL");
  return leaf(t, tensor, grad, 1, "moe_tape_param");
}

moe_status moe_tape_tensor(moe_tensor *out, const moe_tape *t, moe_value v)
{
  if (!out || !t) return moe__fail(MOE_ERR_INVALID, "moe_tape_tensor: %s is NULL", out ? "tape" : "out");
  if (t->status) return moe_tape_status(t);
  if (!v.id) return moe__fail(MOE_ERR_INVALID, "moe_tape_tensor: the null value");
  if (v.id >> 32 != t->generation || (v.id & 0xffffffffu) > (uint64_t)t->n_values)
    return moe__fail(MOE_ERR_STATE, "moe_tape_tensor: a value from before moe_tape_reset");
  *out = at(t, v)->t;
  return MOE_OK;
}

moe_status moe_tape_read(moe_tape *t, moe_value v, double *out, int64_t n)
{
  moe_tensor x;
  MOE__TRY(moe_tape_tensor(&x, t, v));
  return moe_tensor_read(t->q, out, &x, n);
}

/* ---- gradients of inputs, as rules add them ------------------------------------------------------------------------ */
static int same_place(const moe_tensor *a, const moe_tensor *b)
{
  return a->handle == b->handle && a->offset == b->offset;
}

/* Whether the present backward has written this gradient tensor, which several values may share. */
static int bound_written(const moe_tape *t, const moe_tensor *bound)
{
  for (int64_t i = 0; i < t->n_values; i++)
    if (t->values[i].written && same_place(&t->values[i].bound, bound)) return 1;
  return 0;
}

/* Where a rule may write the gradient of a parameter at once: its bound tensor; *accumulate says whether to
   add.  0 where v is no such parameter, or gradients are to be values of their own. */
static int sink(moe_tape *t, moe_value v, moe_tensor *to, int64_t *accumulate)
{
  struct value *p = at(t, v);
  if (!p->bound.handle || (t->flags & MOE_CREATE_GRAPH)) return 0;
  *to = p->bound;
  *accumulate = bound_written(t, &p->bound) || (t->flags & MOE_ACCUMULATE);
  p->written = 1;
  return 1;
}

/* bound (+)= g */
static void into_bound(moe_tape *t, moe_tensor bound, moe_tensor g, int64_t accumulate)
{
  int64_t dtype = real_of(bound.dtype), n = moe_tensor_count(&bound);
  RUN(t, elt_map, .dtype = dtype, .y = moe__flatten(bound), .a = moe__flatten(g),
      .b = accumulate ? moe__flatten(bound) : (moe_tensor){ 0 }, .op = accumulate ? MOE__ELT_ADD : MOE__ELT_COPY,
      .n = n, .alpha = 1);
}

static void contribute(moe_tape *t, moe_value v, moe_value g)
{
  moe_tensor to;
  int64_t accumulate;
  if (t->status || !g.id || !at(t, v)->needs_grad) return;
  if (sink(t, v, &to, &accumulate)) {
    into_bound(t, to, at(t, g)->t, accumulate);
    return;
  }
  moe_value sum = at(t, v)->grad.id ? moe_tape_add(t, at(t, v)->grad, g) : g;
  if (sum.id) at(t, v)->grad = sum;
}

static int wants(const moe_tape *t, moe_value v)
{
  return v.id && at(t, v)->needs_grad;
}

/* ---- primitive operations --------------------------------------------------------------------------------------------- */
static moe_value map(moe_tape *t, const struct rule *rule, int64_t op, moe_value a, moe_value b, double alpha,
                     const char *fn)
{
  if (!t) return (moe_value){ 0 };
  const struct value *va = look(t, a, fn),
                     *vb = b.id || op == MOE__ELT_ADD || op == MOE__ELT_MUL ? look(t, b, fn) : NULL;
  if (t->status) return (moe_value){ 0 };
  if (!moe__is_float(va->t.dtype)) return FAIL(t, MOE_ERR_INVALID, "%s: a is %s", fn, moe_dtype_name(va->t.dtype));
  if (vb && (!same_shape(&va->t, &vb->t) || va->t.dtype != vb->t.dtype))
    return FAIL(t, MOE_ERR_INVALID, "%s: a and b differ in shape or dtype", fn);
  moe_tensor ta = va->t, tb = vb ? vb->t : (moe_tensor){ 0 };
  moe_tensor y = fresh(t, ta.dtype, ta.rank, ta.shape);
  RUN(t, elt_map, .dtype = real_of(ta.dtype), .y = moe__flatten(y), .a = moe__flatten(ta),
      .b = vb ? moe__flatten(tb) : tb, .op = op, .n = moe_tensor_count(&ta), .alpha = alpha);
  return record(t, (struct node){ .rule = rule, .in = { a, b }, .alpha = alpha }, y);
}

static void back_add(moe_tape *t, const struct node *n, moe_value dout)
{
  contribute(t, n->in[0], dout);
  contribute(t, n->in[1], dout);
}
static const struct rule rule_add = { "add", back_add };
moe_value moe_tape_add(moe_tape *t, moe_value a, moe_value b)
{
  return map(t, &rule_add, MOE__ELT_ADD, a, b, 1, "moe_tape_add");
}

static void back_mul(moe_tape *t, const struct node *n, moe_value dout)
{
  if (wants(t, n->in[0])) contribute(t, n->in[0], moe_tape_mul(t, dout, n->in[1]));
  if (wants(t, n->in[1])) contribute(t, n->in[1], moe_tape_mul(t, dout, n->in[0]));
}
static const struct rule rule_mul = { "mul", back_mul };
moe_value moe_tape_mul(moe_tape *t, moe_value a, moe_value b)
{
  return map(t, &rule_mul, MOE__ELT_MUL, a, b, 1, "moe_tape_mul");
}

static void back_scale(moe_tape *t, const struct node *n, moe_value dout)
{
  contribute(t, n->in[0], moe_tape_scale(t, dout, n->alpha));
}
static const struct rule rule_scale = { "scale", back_scale };
moe_value moe_tape_scale(moe_tape *t, moe_value a, double factor)
{
  return map(t, &rule_scale, MOE__ELT_COPY, a, (moe_value){ 0 }, factor, "moe_tape_scale");
}

static void back_reshape(moe_tape *t, const struct node *n, moe_value dout)
{
  const moe_tensor *x = &at(t, n->in[0])->t;
  int64_t shape[MOE_RANK_MAX];
  memcpy(shape, x->shape, sizeof shape);
  contribute(t, n->in[0], moe_tape_reshape(t, dout, x->rank, shape));
}
static const struct rule rule_reshape = { "reshape", back_reshape };
moe_value moe_tape_reshape(moe_tape *t, moe_value a, int64_t rank, const int64_t *shape)
{
  static const char fn[] = "moe_tape_reshape";
  moe_tensor y;
  if (!t) return (moe_value){ 0 };
  const struct value *va = look(t, a, fn);
  if (!va) return (moe_value){ 0 };
  moe_span where = { va->t.handle, va->t.offset, moe_tensor_extent(&va->t) };
  moe_status st = moe_tensor_packed(&y, where, va->t.dtype, rank, shape);
  if (st) return fail(t, st), (moe_value){ 0 };
  if (moe_tensor_count(&y) != moe_tensor_count(&va->t))
    return FAIL(t, MOE_ERR_INVALID, "%s: %lld elements, shape has %lld", fn, (long long)moe_tensor_count(&va->t),
                (long long)moe_tensor_count(&y));
  return record(t, (struct node){ .rule = &rule_reshape, .in = { a } }, y);
}

/* c (+)= op(a) op(b) */
static void product(moe_tape *t, moe_tensor c, moe_tensor a, moe_tensor b, int64_t ta, int64_t tb, int64_t accumulate)
{
  if (ta) a = moe__swapped(a, 0, 1);
  if (!tb) b = moe__swapped(b, 0, 1);
  RUN(t, gemm, .dtype = a.dtype, .c = c, .a = a, .b = b, .M = a.shape[0], .N = b.shape[0], .K = a.shape[1],
      .accumulate = accumulate, .alpha = 1);
}

/* The gradient of `v` is op(a) op(b): written where it belongs, or as a value. */
static void contribute_product(moe_tape *t, moe_value v, moe_value a, moe_value b, int64_t ta, int64_t tb)
{
  moe_tensor to;
  int64_t accumulate;
  if (t->status || !wants(t, v)) return;
  if (sink(t, v, &to, &accumulate)) product(t, to, at(t, a)->t, at(t, b)->t, ta, tb, accumulate);
  else contribute(t, v, moe_tape_matmul(t, a, b, ta, tb));
}

static void back_matmul(moe_tape *t, const struct node *n, moe_value d)
{
  moe_value a = n->in[0], b = n->in[1];
  int64_t ta = n->flag[0], tb = n->flag[1];
  if (ta) contribute_product(t, a, b, d, tb, 1);
  else contribute_product(t, a, d, b, 0, !tb);
  if (tb) contribute_product(t, b, d, a, 1, ta);
  else contribute_product(t, b, a, d, !ta, 0);
}
static const struct rule rule_matmul = { "matmul", back_matmul };
moe_value moe_tape_matmul(moe_tape *t, moe_value a, moe_value b, int64_t transpose_a, int64_t transpose_b)
{
  static const char fn[] = "moe_tape_matmul";
  if (!t) return (moe_value){ 0 };
  const struct value *va = look(t, a, fn), *vb = look(t, b, fn);
  if (t->status) return (moe_value){ 0 };
  moe_tensor ta = va->t, tb = vb->t;
  int64_t flip_a = transpose_a != 0, flip_b = transpose_b != 0;
  if (ta.rank != 2 || tb.rank != 2 || ta.dtype != tb.dtype || !moe__is_float(ta.dtype))
    return FAIL(t, MOE_ERR_INVALID, "%s: wanted two matrices of one float dtype, got rank %d %s and rank %d %s", fn,
                ta.rank, moe_dtype_name(ta.dtype), tb.rank, moe_dtype_name(tb.dtype));
  if (ta.shape[!flip_a] != tb.shape[flip_b])
    return FAIL(t, MOE_ERR_INVALID, "%s: inner extents %lld and %lld", fn, (long long)ta.shape[!flip_a],
                (long long)tb.shape[flip_b]);
  moe_tensor y = fresh(t, ta.dtype, 2, (const int64_t[]){ ta.shape[flip_a], tb.shape[!flip_b] });
  product(t, y, ta, tb, flip_a, flip_b, 0);
  return record(t, (struct node){ .rule = &rule_matmul, .in = { a, b }, .flag = { flip_a, flip_b } }, y);
}

/* s [1] repeated to a shape; the inverse of sum. */
static moe_value expand(moe_tape *t, moe_value s, int64_t dtype, int64_t rank, const int64_t *shape);

static void back_sum(moe_tape *t, const struct node *n, moe_value dout)
{
  moe_tensor x = at(t, n->in[0])->t;
  if (wants(t, n->in[0])) contribute(t, n->in[0], expand(t, dout, x.dtype, x.rank, x.shape));
}
static const struct rule rule_sum = { "sum", back_sum };
moe_value moe_tape_sum(moe_tape *t, moe_value a)
{
  static const char fn[] = "moe_tape_sum";
  if (!t) return (moe_value){ 0 };
  const struct value *va = look(t, a, fn);
  if (!va) return (moe_value){ 0 };
  moe_tensor x = va->t;
  if (!moe__is_float(x.dtype)) return FAIL(t, MOE_ERR_INVALID, "%s: a is %s", fn, moe_dtype_name(x.dtype));
  int64_t real = real_of(x.dtype);
  moe_tensor y = fresh_flat(t, real, 1);
  struct mark mark = t->at;
  moe_tensor parts = fresh_flat(t, real, MOE__PARTS);
  RUN(t, elt_sum, .dtype = real, .y = y, .a = moe__flatten(x), .scratch = parts, .n = moe_tensor_count(&x), .alpha = 1);
  t->at = mark;
  return record(t, (struct node){ .rule = &rule_sum, .in = { a } }, y);
}

static void back_expand(moe_tape *t, const struct node *n, moe_value dout)
{
  contribute(t, n->in[0], moe_tape_sum(t, dout));
}
static const struct rule rule_expand = { "expand", back_expand };
static moe_value expand(moe_tape *t, moe_value s, int64_t dtype, int64_t rank, const int64_t *shape)
{
  moe_tensor y = fresh(t, dtype, rank, shape);
  if (t->status) return (moe_value){ 0 };
  int64_t real = real_of(dtype), n = moe_tensor_count(&y);
  RUN(t, elt_map, .dtype = real, .y = moe__flatten(y), .op = MOE__ELT_FILL, .n = n, .alpha = 1);
  RUN(t, elt_map, .dtype = real, .y = moe__flatten(y), .a = moe__flatten(y), .scale = at(t, s)->t, .op = MOE__ELT_COPY,
      .n = n, .alpha = 1);
  return record(t, (struct node){ .rule = &rule_expand, .in = { s } }, y);
}

moe_value moe_tape_mean(moe_tape *t, moe_value a)
{
  if (!t) return (moe_value){ 0 };
  const struct value *va = look(t, a, "moe_tape_mean");
  if (!va) return (moe_value){ 0 };
  int64_t n = moe_tensor_count(&va->t);
  return moe_tape_scale(t, moe_tape_sum(t, a), n ? 1.0 / (double)n : 0);
}

/* ---- fused operations: first derivatives only --------------------------------------------------------------------------- */
/* A gradient computed by a fused backward: a value that, differentiated, is an error naming `rule`. */
static void contribute_fused(moe_tape *t, const struct rule *rule, const struct node *n, moe_value dout, moe_value v,
                             moe_tensor g)
{
  contribute(t, v, record(t, (struct node){ .rule = rule, .in = { n->in[0], n->in[1], dout } }, g));
}

static const struct rule rule_embedding_grad = { "gradient of embedding", NULL };
static void back_embedding(moe_tape *t, const struct node *n, moe_value dout)
{
  moe_tensor table = at(t, n->in[0])->t, ids = at(t, n->in[1])->t, d = at(t, dout)->t, to;
  int64_t accumulate = 0, V = table.shape[0], D = table.shape[1], rows = moe_tensor_count(&ids);
  if (!wants(t, n->in[0])) return;
  int direct = sink(t, n->in[0], &to, &accumulate);
  if (!direct) to = fresh(t, table.dtype, 2, table.shape);
  struct mark mark = t->at;
  int64_t real = real_of(table.dtype);
  moe_tensor offs = fresh_flat(t, MOE_I32, V + 1), row2slot = fresh_flat(t, MOE_I32, rows),
             slot2row = fresh_flat(t, MOE_I32, rows), scratch = fresh_flat(t, MOE_I32, moe__plan_scratch(rows, V));
  RUN(t, plan, .dtype = real, .offs = offs, .row2slot = row2slot, .slot2row = slot2row,
      .ids = moe__matrix(ids.handle, ids.offset, MOE_I32, rows, 1), .health = t->q->health, .scratch = scratch,
      .T = rows, .K = 1, .E = V);
  RUN(t, ggemm_colsum, .dtype = table.dtype, .c = { to }, .p = d, .offs = offs, .map = row2slot, .R = rows, .E = V,
      .N = D, .div = 1, .accumulate = accumulate);
  t->at = mark;
  if (!direct) contribute_fused(t, &rule_embedding_grad, n, dout, n->in[0], to);
}
static const struct rule rule_embedding = { "embedding", back_embedding };
moe_value moe_tape_embedding(moe_tape *t, moe_value table, moe_value ids)
{
  static const char fn[] = "moe_tape_embedding";
  if (!t) return (moe_value){ 0 };
  const struct value *vt = look(t, table, fn), *vi = look(t, ids, fn);
  if (t->status) return (moe_value){ 0 };
  moe_tensor w = vt->t, i = vi->t;
  if (w.rank != 2 || !moe__is_float(w.dtype) || i.rank != 1 || i.dtype != MOE_I32 || w.shape[0] < 1)
    return FAIL(t, MOE_ERR_INVALID, "%s: wanted a float table [V,D] and i32 ids [n]", fn);
  int64_t n = i.shape[0], D = w.shape[1];
  moe_tensor y = fresh(t, w.dtype, 2, (const int64_t[]){ n, D });
  RUN(t, gather_rows, .dtype = w.dtype, .y = y, .x = w, .map = i, .health = t->q->health, .n = n, .rows = w.shape[0],
      .D = D, .div = 1);
  return record(t, (struct node){ .rule = &rule_embedding, .in = { table, ids } }, y);
}

static const struct rule rule_rms_grad = { "gradient of rms_norm", NULL };
static void back_rms(moe_tape *t, const struct node *n, moe_value dout)
{
  moe_value vx = n->in[0], vw = n->in[1];
  moe_tensor x = at(t, vx)->t, w = at(t, vw)->t, d = at(t, dout)->t, dx = { 0 }, dw = { 0 }, scratch = { 0 };
  int64_t accumulate = 0, T = x.shape[0], D = x.shape[1];
  int direct = 0;
  if (wants(t, vx)) dx = fresh(t, x.dtype, 2, x.shape);
  if (wants(t, vw)) {
    direct = sink(t, vw, &dw, &accumulate);
    if (!direct) dw = fresh_flat(t, w.dtype, D);
  }
  struct mark mark = t->at;
  if (dw.handle) scratch = fresh(t, real_of(x.dtype), 2, (const int64_t[]){ MOE__PARTS, D });
  RUN(t, rms_bwd, .dtype = x.dtype, .dx = dx, .dw = dw, .dy = d, .x = x, .w = w, .rstd = n->kept, .scratch = scratch,
      .T = T, .D = D, .accumulate = accumulate);
  t->at = mark;
  if (dx.handle) contribute_fused(t, &rule_rms_grad, n, dout, vx, dx);
  if (dw.handle && !direct) contribute_fused(t, &rule_rms_grad, n, dout, vw, dw);
}
static const struct rule rule_rms = { "rms_norm", back_rms };
moe_value moe_tape_rms_norm(moe_tape *t, moe_value x, moe_value w, double eps)
{
  static const char fn[] = "moe_tape_rms_norm";
  if (!t) return (moe_value){ 0 };
  const struct value *vx = look(t, x, fn), *vw = look(t, w, fn);
  if (t->status) return (moe_value){ 0 };
  moe_tensor tx = vx->t, tw = vw->t;
  if (tx.rank != 2 || !moe__is_float(tx.dtype) || tw.rank != 1 || tw.dtype != tx.dtype || tw.shape[0] != tx.shape[1])
    return FAIL(t, MOE_ERR_INVALID, "%s: wanted x [T,D] and w [D] of one float dtype", fn);
  moe_tensor y = fresh(t, tx.dtype, 2, tx.shape), rstd = fresh_flat(t, real_of(tx.dtype), tx.shape[0]);
  RUN(t, rms_fwd, .dtype = tx.dtype, .y = y, .rstd = rstd, .x = tx, .w = tw, .T = tx.shape[0], .D = tx.shape[1],
      .eps = eps);
  return record(t, (struct node){ .rule = &rule_rms, .in = { x, w }, .kept = rstd }, y);
}

static const struct rule rule_xent_grad = { "gradient of cross_entropy", NULL };
static void back_xent(moe_tape *t, const struct node *n, moe_value dout)
{
  moe_tensor logits = at(t, n->in[0])->t, targets = at(t, n->in[1])->t;
  if (!wants(t, n->in[0])) return;
  moe_tensor d = fresh(t, logits.dtype, 2, logits.shape);
  RUN(t, xent_bwd, .dtype = real_of(logits.dtype), .dlogits = d, .dloss = at(t, dout)->t, .logits = logits,
      .lse = n->kept, .targets = targets, .T = logits.shape[0], .V = logits.shape[1]);
  contribute_fused(t, &rule_xent_grad, n, dout, n->in[0], d);
}
static const struct rule rule_xent = { "cross_entropy", back_xent };
moe_value moe_tape_cross_entropy(moe_tape *t, moe_value logits, moe_value targets)
{
  static const char fn[] = "moe_tape_cross_entropy";
  if (!t) return (moe_value){ 0 };
  const struct value *vl = look(t, logits, fn), *vt = look(t, targets, fn);
  if (t->status) return (moe_value){ 0 };
  moe_tensor l = vl->t, y = vt->t;
  if (l.rank != 2 || !moe__is_float(l.dtype) || y.rank != 1 || y.dtype != MOE_I32 || y.shape[0] != l.shape[0] ||
      l.shape[1] < 1)
    return FAIL(t, MOE_ERR_INVALID, "%s: wanted float logits [T,V] and i32 targets [T]", fn);
  int64_t real = real_of(l.dtype), T = l.shape[0];
  moe_tensor loss = fresh_flat(t, real, 1), lse = fresh_flat(t, real, T);
  struct mark mark = t->at;
  moe_tensor rows = fresh_flat(t, real, T);
  RUN(t, xent_fwd, .dtype = real, .loss = loss, .lse = lse, .rowloss = rows, .logits = l, .targets = y,
      .health = t->q->health, .T = T, .V = l.shape[1]);
  t->at = mark;
  return record(t, (struct node){ .rule = &rule_xent, .in = { logits, targets }, .kept = lse }, loss);
}

/* ---- the layer -------------------------------------------------------------------------------------------------------- */
/* Whether the present backward has written these gradients, which several nodes may share. */
static int grads_written(const moe_tape *t, const moe_span *grads)
{
  for (const struct node *n = t->nodes; n < t->nodes + t->n_nodes; n++)
    if (n->layer && n->options.grads.handle == grads->handle && n->options.grads.offset == grads->offset &&
        at(t, n->out)->written)
      return 1;
  return 0;
}

static const struct rule rule_layer_grad = { "gradient of moe_layer", NULL };
static void back_layer(moe_tape *t, const struct node *n, moe_value dout)
{
  struct node self = *n; /* recording may move the list */
  moe_tensor x = at(t, n->in[0])->t, dx = { 0 };
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_layer_io io = moe_layer_io_init();
  if (t->status) return;
  if (wants(t, n->in[0])) dx = fresh(t, x.dtype, 2, x.shape);
  struct mark mark = t->at;
  fail(t, moe_layer_measure(&bytes, n->layer, n->state.tokens, n->state.sequences));
  io.params = n->options.params;
  io.grads = n->options.grads.handle ? n->options.grads : take(t, bytes.grads);
  io.scratch = take(t, bytes.scratch);
  io.aux_scale = n->options.aux_scale;
  io.dy = at(t, dout)->t;
  io.dx = dx;
  io.accumulate = n->options.grads.handle && ((t->flags & MOE_ACCUMULATE) || grads_written(t, &n->options.grads));
  if (!t->status) fail(t, moe_layer_backward(n->layer, t->q, &n->state, &io));
  t->at = mark;
  at(t, self.out)->written = 1;
  if (dx.handle) contribute_fused(t, &rule_layer_grad, &self, dout, self.in[0], dx);
}
static const struct rule rule_layer = { "moe_layer", back_layer };
moe_value moe_tape_moe_layer(moe_tape *t, moe_layer *layer, moe_value x, const moe_tape_moe *given,
                             moe_layer_state *state)
{
  static const char fn[] = "moe_tape_moe_layer";
  struct node n = { .rule = &rule_layer, .layer = layer };
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_layer_io io = moe_layer_io_init();
  if (!t) return (moe_value){ 0 };
  const struct value *vx = look(t, x, fn);
  if (!vx) return (moe_value){ 0 };
  moe_tensor tx = vx->t;
  fail(t, moe__struct_in(&n.options, sizeof n.options, given, fn, "options"));
  if (!layer) return FAIL(t, MOE_ERR_INVALID, "%s: layer is NULL", fn);
  if (tx.rank != 2) return FAIL(t, MOE_ERR_INVALID, "%s: x has rank %d, 2 is wanted", fn, tx.rank);
  fail(t, moe_layer_measure(&bytes, layer, tx.shape[0], n.options.sequences));
  if (n.options.grads.handle && !t->status) {
    struct moe__arena grads = moe__arena_over(n.options.grads);
    grads.used = bytes.grads;
    fail(t, moe__arena_check(&grads, fn, "grads"));
  }
  moe_tensor y = fresh(t, tx.dtype, 2, tx.shape);
  io.x = tx;
  io.y = y;
  io.mask = n.options.mask;
  io.ids = n.options.ids;
  io.sequences = n.options.sequences;
  io.params = n.options.params;
  io.saved = take(t, bytes.saved);
  struct mark mark = t->at;
  io.scratch = take(t, bytes.scratch);
  n.state = moe_layer_state_init();
  if (!t->status) fail(t, moe_layer_forward(layer, t->q, &io, &n.state));
  t->at = mark;
  if (t->status) return (moe_value){ 0 };
  if (state) {
    uint64_t size = state->size;
    fail(t, moe__struct_out(state, &n.state, size < sizeof n.state ? size : sizeof n.state, fn, "state"));
  }
  n.in[0] = x;
  moe_value out = record(t, n, y);
  if (out.id && n.options.grads.handle && t->recording && !at(t, out)->needs_grad) {
    /* x is a constant but the layer's parameters train */
    if (!grow(t, (void **)&t->nodes, &t->room_nodes, t->n_nodes, sizeof *t->nodes)) return (moe_value){ 0 };
    n.out = out;
    at(t, out)->needs_grad = 1;
    at(t, out)->node = t->n_nodes;
    t->nodes[t->n_nodes++] = n;
  }
  return out;
}

/* ---- backward ------------------------------------------------------------------------------------------------------------ */
/* The gradients of parameters that are values of their own go where they belong; those that `of` does not depend
   on become zero, not what an earlier call left. */
static void finish_params(moe_tape *t)
{
  for (int64_t i = 0; i < t->n_values && !t->status; i++) {
    const struct value v = t->values[i];
    if (!v.bound.handle) continue;
    if (v.written) {
      moe_value g = new_value(t, v.bound, 0);
      if (g.id) t->values[i].grad = g;
    } else if (v.grad.id) {
      into_bound(t, v.bound, at(t, v.grad)->t, bound_written(t, &v.bound) || (t->flags & MOE_ACCUMULATE));
      t->values[i].written = 1;
    } else if (!(t->flags & MOE_ACCUMULATE) && !bound_written(t, &v.bound)) {
      RUN(t, elt_map, .dtype = real_of(v.bound.dtype), .y = moe__flatten(v.bound), .op = MOE__ELT_FILL,
          .n = moe_tensor_count(&v.bound));
    }
  }
}

static void clear_unreached_layers(moe_tape *t)
{
  if (t->flags & MOE_ACCUMULATE) return;
  for (const struct node *n = t->nodes; n < t->nodes + t->n_nodes && !t->status; n++) {
    moe_layer_bytes bytes = moe_layer_bytes_init();
    if (!n->layer || !n->options.grads.handle || grads_written(t, &n->options.grads)) continue;
    fail(t, moe_layer_measure(&bytes, n->layer, n->state.tokens, n->state.sequences));
    if (!t->status && bytes.grads) fail(t, t->q->ctx->be->fill(t->q->be, n->options.grads, 0, bytes.grads));
  }
}

static void walk_back(moe_tape *t, moe_value of, moe_value seed)
{
  struct value *root = look(t, of, "moe_tape_backward: of");
  if (!root) return;
  int64_t real = real_of(root->t.dtype), from = root->node;
  if (moe_tensor_count(&root->t) != 1 || root->t.dtype != real) {
    fail(t, moe__fail(MOE_ERR_INVALID, "moe_tape_backward: wanted one f32 or f64 element, got %lld of %s",
                      (long long)moe_tensor_count(&root->t), moe_dtype_name(root->t.dtype)));
    return;
  }
  if (!root->needs_grad) {
    fail(t, moe__fail(MOE_ERR_INVALID, "moe_tape_backward: `of` depends on nothing that needs a gradient"));
    return;
  }
  if (seed.id) {
    const struct value *s = look(t, seed, "moe_tape_backward: seed");
    if (!s) return;
    if (!same_shape(&s->t, &root->t) || s->t.dtype != root->t.dtype) {
      fail(t, moe__fail(MOE_ERR_INVALID, "moe_tape_backward: seed differs from `of` in shape or dtype"));
      return;
    }
  } else {
    moe_tensor one = fresh(t, real, root->t.rank, root->t.shape);
    RUN(t, elt_map, .dtype = real, .y = moe__flatten(one), .op = MOE__ELT_FILL, .n = 1, .alpha = 1);
    seed = new_value(t, one, 0);
  }
  for (int64_t i = 0; i < t->n_values; i++) {
    t->values[i].grad = (moe_value){ 0 };
    t->values[i].written = 0;
  }
  if (t->status) return;
  at(t, of)->grad = seed;
  for (int64_t i = from; i >= 0 && !t->status; i--) {
    struct node n = t->nodes[i];
    moe_value dout = at(t, n.out)->grad;
    if (!dout.id) continue;
    if (n.rule->backward) n.rule->backward(t, n.rule == &rule_layer ? &t->nodes[i] : &n, dout);
    else
      fail(t, moe__fail(MOE_ERR_NO_SECOND_DERIVATIVE, "moe_tape_backward: node %lld, %s, has no derivative",
                        (long long)i, n.rule->name));
  }
  finish_params(t);
  clear_unreached_layers(t);
}

moe_status moe_tape_backward(moe_tape *t, moe_value of, moe_value seed, int64_t flags)
{
  if (!t) return moe__fail(MOE_ERR_INVALID, "moe_tape_backward: tape is NULL");
  if (!t->status && (flags & ~(int64_t)(MOE_CREATE_GRAPH | MOE_ACCUMULATE)))
    fail(t, moe__fail(MOE_ERR_INVALID, "moe_tape_backward: flags 0x%llx", (unsigned long long)flags));
  t->flags = flags;
  t->recording = (flags & MOE_CREATE_GRAPH) != 0;
  if (!t->status) walk_back(t, of, seed);
  t->recording = 1;
  t->flags = 0;
  if (!t->status) fail(t, t->q->ctx->be->flush(t->q->be));
  return moe_tape_status(t);
}

moe_value moe_tape_grad(const moe_tape *t, moe_value v)
{
  uint64_t index = v.id & 0xffffffffu;
  if (!t || t->status || !v.id || v.id >> 32 != t->generation || index > (uint64_t)t->n_values) return (moe_value){ 0 };
  return t->values[index - 1].grad;
}
