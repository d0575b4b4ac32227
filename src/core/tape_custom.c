/* tape_custom.c - the caller's own functions, and segments that are computed again in backward. */
#include "core/tape.h"

#include <stdio.h>

#define IN_MAX 4096 /* values that a call takes, or saves */
#define OUT_MAX 512 /* and gives; their tensors are one piece of the tape's host memory */
#define CALLBACKS_MAX 64

static const moe_value none;

/* ---- running a function of the caller ------------------------------------------------------------------------------ */
/* What is put back whatever the function does. */
struct before {
  int recording, records;
  int64_t n_nodes, n_values;
  uint64_t failures;
};

/* 0 with the tape failed.  records: whether what it does is; if not, neither is what it records all the same, for
   moe_tape_gradients inside it. */
static int enter(moe_tape *t, struct before *before, int records, const char *name)
{
  if (t->status) return 0;
  if (t->callbacks == CALLBACKS_MAX) /* a backward that differentiates its own output has no end */
    return TAPE_FAIL(t, MOE_ERR_STATE, "%s: %d functions inside one another", name, CALLBACKS_MAX), 0;
  *before = (struct before){ t->recording, records, t->n_nodes, t->n_values, moe__failures() };
  t->recording = records;
  t->callbacks++;
  return 1;
}

static void leave(moe_tape *t, const struct before *before)
{
  t->callbacks--;
  t->recording = before->recording;
  if (!before->records) moe__tape_forget(t, before->n_nodes, before->n_values);
}

/* "name: text" of an error of the tape's, or of `st`, which a function returned; once, where it is in itself. */
static void blame(moe_tape *t, const struct before *before, const char *name, moe_status st)
{
  const char *text = t->status ? t->error : moe__error_since(before->failures, st);
  const size_t length = strlen(name);
  if (t->status) st = t->status;
  if (!st || (t->status && !strncmp(text, name, length) && text[length] == ':')) return;
  t->status = MOE_OK;
  moe__tape_fail(t, moe__fail(st, "%s: %s", name, text));
}

/* A value that a function made: none of another tape, and not the null value. */
static const struct moe__value *made(moe_tape *t, moe_value v, const char *name, const char *array, int64_t i)
{
  char where[128];
  snprintf(where, sizeof where, "%s: %s[%lld]", name, array, (long long)i);
  return moe__tape_look(t, v, where);
}

/* Arrays of a call that are as they must be; 0 with the tape failed. */
static int arrays(moe_tape *t, const char *fn, const moe_value *out, int64_t n_out, const moe_value *in, int64_t n_in)
{
  if (t->status) return 0;
  if (n_out < 1 || n_out > OUT_MAX || n_in < 0 || n_in > IN_MAX)
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %lld outputs of %lld inputs, wanted 1 to %d of 0 to %d", fn,
                     (long long)n_out, (long long)n_in, OUT_MAX, IN_MAX),
           0;
  if (!out || (n_in && !in)) return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: %s is NULL", fn, out ? "in" : "out"), 0;
  for (int64_t i = 0; i < n_in; i++)
    if (!made(t, in[i], fn, "in", i)) return 0;
  return 1;
}

/* The results of a call, null after an error: last, since `out` may be the caller's `in`. */
static moe_status finish(moe_tape *t, moe_value *out, int64_t n_out, const struct moe__node *n)
{
  for (int64_t i = 0; out && i < n_out && n_out <= OUT_MAX; i++) out[i] = t->status || !n ? none : n->out[i];
  return moe_tape_status(t);
}

/* ---- custom functions -------------------------------------------------------------------------------------------------- */
struct custom { /* node->more */
  moe_function f;
  moe_value *saved;
};

static moe_tape_call call_of(moe_tape *t, const struct moe__node *n, moe_value *out, moe_value *saved)
{
  const struct custom *c = n->more;
  return (moe_tape_call){ sizeof(moe_tape_call), t, n->in, out, saved, n->n_in, n->n_out, c->f.n_saved };
}

static void back_custom(moe_tape *t, struct moe__node *n, const moe_value *dout)
{
  const struct custom *c = n->more;
  struct before before;
  moe_value *din = moe__tape_host(t, (uint64_t)n->n_in * sizeof *din),
            *out = moe__tape_host(t, (uint64_t)n->n_out * sizeof *out), /* copies: the node's are not to be changed */
                *saved = moe__tape_host(t, (uint64_t)c->f.n_saved * sizeof *saved);
  if (!c->f.backward) {
    TAPE_FAIL(t, MOE_ERR_NO_DERIVATIVE, "moe_tape: %s has no backward", n->name);
    return;
  }
  if (!enter(t, &before, t->recording, n->name)) return;
  memcpy(out, n->out, (size_t)n->n_out * sizeof *out);
  memcpy(saved, c->saved, (size_t)c->f.n_saved * sizeof *saved);
  const moe_tape_call call = call_of(t, n, out, saved);
  moe_status st = c->f.backward(c->f.user, &call, dout, din);
  leave(t, &before);
  blame(t, &before, n->name, st);
  for (int64_t i = 0; i < n->n_in && !t->status; i++) {
    const moe_tensor *x = &moe__tape_at(t, n->in[i])->t;
    const struct moe__value *g = din[i].id ? made(t, din[i], n->name, "din", i) : NULL;
    if (g && (g->t.dtype != x->dtype || !moe__same_shape(&g->t, x)))
      TAPE_FAIL(t, MOE_ERR_INVALID, "%s: din[%lld] differs from in[%lld] in shape or dtype", n->name, (long long)i,
                (long long)i);
  }
  for (int64_t i = 0; i < n->n_in; i++) moe__tape_contribute(t, n->in[i], din[i]);
}

static const struct moe__rule rule_custom = { "custom", back_custom, NULL, 0 };

/* The node, after its forward; NULL with the tape failed. */
static struct moe__node *run_custom(moe_tape *t, const moe_function *f, const moe_value *in, int64_t n_in)
{
  struct moe__node *n = moe__tape_node(t, &rule_custom, n_in, in, f->n_out);
  struct custom *c = moe__tape_host(t, sizeof *c);
  moe_value *out = moe__tape_host(t, (uint64_t)f->n_out * sizeof *out);
  moe_tensor *tensors = moe__tape_host(t, (uint64_t)f->n_out * sizeof *tensors);
  const size_t length = f->name ? strnlen(f->name, 63) : 0;
  char *name = moe__tape_host(t, length + 1);
  struct before before;
  if (!t->status) c->saved = moe__tape_host(t, (uint64_t)f->n_saved * sizeof *c->saved);
  if (t->status) return NULL;
  if (length) n->name = memcpy(name, f->name, length);
  c->f = *f;
  c->f.name = n->name;
  n->more = c;
  if (!enter(t, &before, 0, n->name)) return NULL;
  const moe_tape_call call = call_of(t, n, out, c->saved);
  moe_status st = f->forward(f->user, &call);
  leave(t, &before);
  blame(t, &before, n->name, st);
  for (int64_t i = 0; i < f->n_saved && !t->status; i++)
    if (c->saved[i].id) (void)made(t, c->saved[i], n->name, "saved", i);
  for (int64_t i = 0; i < f->n_out; i++) {
    const struct moe__value *v = made(t, out[i], n->name, "out", i);
    if (!v) return NULL;
    tensors[i] = v->t;
  }
  moe__tape_record_all(t, n, tensors);
  return n;
}

moe_status moe_tape_custom(moe_value *out, moe_tape *t, const moe_function *given, const moe_value *in, int64_t n_in)
{
  static const char fn[] = "moe_tape_custom";
  moe_function f = moe_function_init();
  const struct moe__node *n = NULL;
  if (!t) return moe__fail(MOE_ERR_INVALID, "%s: tape is NULL", fn);
  moe_status st = moe__struct_in(&f, sizeof f, given, fn, "function");
  if (st) return moe__tape_fail(t, st), moe_tape_status(t);
  if (f.release) moe__tape_on_reset(t, f.release, f.user);
  if (!t->status && (!f.forward || f.n_saved < 0 || f.n_saved > IN_MAX))
    TAPE_FAIL(t, MOE_ERR_INVALID, "%s: forward is NULL, or n_saved %lld not in 0..%d", fn, (long long)f.n_saved,
              IN_MAX);
  if (arrays(t, fn, out, f.n_out, in, n_in)) n = run_custom(t, &f, in, n_in);
  return finish(t, out, f.n_out, n);
}

moe_value moe_tape_empty(moe_tape *t, int64_t dtype, int64_t rank, const int64_t *shape)
{
  static const char fn[] = "moe_tape_empty";
  if (!t || t->status) return none;
  if (!moe_dtype_size(dtype) || rank < 0 || rank > MOE_RANK_MAX || (rank && !shape))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: dtype %lld, rank %lld, or no shape", fn, (long long)dtype,
                     (long long)rank);
  for (int64_t d = 0; d < rank; d++)
    if (shape[d] < 0)
      return TAPE_FAIL(t, MOE_ERR_INVALID, "%s: extent %lld of dimension %lld", fn, (long long)shape[d], (long long)d);
  moe_tensor x = moe__tape_fresh(t, dtype, rank, shape);
  return moe__tape_value(t, x, 0);
}

/* ---- segments: what their runs have in common ------------------------------------------------------------------------------
   The first run finds out what the segment depends on: it is recorded, in a pool of its own; then its nodes are forgotten,
   its values are dead and the pool is free again.  Each later run is the expansion of the segment's one node.

   Leaves that need gradients belong to no run: they are made once and outlive the segment, so that gradients, and what
   has been written to parameters' tensors, need no translation from one run to another. */
struct kept {
  struct kept *next;
  moe_tensor ids; /* of a layer call, or: */
  moe_value leaf;
};

struct moe__segment { /* node->more */
  moe_segment *run;
  void *user;
  moe_value *in;
  int64_t n_in;
  int depth; /* of the pool its outputs are in */
  int again; /* its first run is done */
  struct kept *first, **end;
  const struct kept *next;    /* in a later run: what comes next */
  struct moe__segment *outer; /* while it runs: the one that it runs inside */
};

static const char segment_name[] = "moe_tape_recompute";

/* The segment nearest around this place that is being run again. */
static struct moe__segment *running_again(const moe_tape *t)
{
  struct moe__segment *s = t->segment;
  while (s && !s->again) s = s->outer;
  return s;
}

/* The next thing kept, which must be ids or a leaf; NULL where there is nothing to replay, or with the tape failed. */
static const struct kept *replay(moe_tape *t, int leaf)
{
  struct moe__segment *s = running_again(t);
  if (!s || t->status) return NULL;
  const struct kept *k = s->next;
  if (!k || (k->leaf.id != 0) != leaf)
    return TAPE_FAIL(t, MOE_ERR_STATE, "%s: a layer call, or a leaf that needs a gradient, that its first run had not",
                     segment_name),
           NULL;
  s->next = k->next;
  return k;
}

/* For the later runs of every segment that now has its first. */
static void keep(moe_tape *t, struct kept what)
{
  for (struct moe__segment *s = t->segment; s && !s->again; s = s->outer) {
    struct kept *k = moe__tape_host(t, sizeof *k);
    if (!k) return;
    *k = what;
    k->next = NULL;
    *s->end = k;
    s->end = &k->next;
  }
}

/* Of the pool that outlives every segment which now has its first run. */
static int lasting_depth(const moe_tape *t)
{
  int depth = t->depth;
  for (const struct moe__segment *s = t->segment; s && !s->again; s = s->outer) depth = s->depth;
  return depth;
}

moe_tensor moe__segment_replay(moe_tape *t)
{
  const struct kept *k = replay(t, 0);
  return k ? k->ids : (moe_tensor){ 0 };
}

void moe__segment_keep(moe_tape *t, const moe_tensor *ids)
{
  const int depth = t->depth;
  if (t->status || !t->segment || t->segment->again) return;
  struct kept what = { .ids = *ids };
  if (!running_again(t)) { /* else they are kept already */
    t->depth = lasting_depth(t);
    what.ids = moe__tape_copy(t, ids);
    t->depth = depth;
  }
  keep(t, what);
}

moe_value moe__segment_replay_leaf(moe_tape *t, const moe_tensor *tensor, const moe_tensor *grad)
{
  const struct kept *k = replay(t, 1);
  if (!k) return none;
  struct moe__value *v = moe__tape_at(t, k->leaf);
  if (v->t.dtype != tensor->dtype || !moe__same_shape(&v->t, tensor) ||
      v->bound.handle != (grad ? grad->handle : NULL) || (grad && v->bound.offset != grad->offset))
    return TAPE_FAIL(t, MOE_ERR_STATE, "%s: a leaf that needs a gradient is not that of the first run", segment_name);
  v->t = *tensor;
  keep(t, *k);
  return k->leaf;
}

void moe__segment_keep_leaf(moe_tape *t, moe_value leaf)
{
  moe__tape_at(t, leaf)->depth = lasting_depth(t);
  keep(t, (struct kept){ .leaf = leaf });
}

/* One run; out[0..n_out-1] are values of the tape, or it has failed. */
static void run_segment(moe_tape *t, struct moe__segment *s, moe_value *out, int64_t n_out)
{
  struct before before;
  if (!enter(t, &before, t->recording, segment_name)) return;
  struct moe__segment *outer = s->outer = t->segment;
  s->next = s->first;
  t->segment = s;
  moe_status st = s->run(s->user, t, s->in, s->n_in, out, n_out);
  if (!st && !t->status && s->again && s->next)
    TAPE_FAIL(t, MOE_ERR_STATE, "%s: fewer layer calls, or leaves that need gradients, than in its first run",
              segment_name);
  t->segment = outer;
  leave(t, &before);
  if (!t->status) blame(t, &before, segment_name, st);
  for (int64_t i = 0; i < n_out && !t->status; i++) (void)made(t, out[i], segment_name, "out", i);
}

/* A pool of its own for a run, and what becomes of it. */
static int open_pool(moe_tape *t, struct before *before, struct moe__mark *mark)
{
  if (t->status) return 0;
  if (t->depth + 1 == MOE__TAPE_DEPTH)
    return TAPE_FAIL(t, MOE_ERR_STATE, "%s: more than %d segments inside one another", segment_name,
                     MOE__TAPE_DEPTH - 1),
           0;
  t->depth++;
  *mark = moe__tape_mark(t);
  *before = (struct before){ .n_nodes = t->n_nodes, .n_values = t->n_values };
  return 1;
}

static int in_pool(const struct moe__pool *p, const moe_tensor *x)
{
  for (int64_t i = 0; i < p->n_blocks; i++)
    if (p->blocks[i].handle == x->handle) return 1;
  return 0;
}

static void close_pool(moe_tape *t, const struct moe__segment *s, const struct before *before, struct moe__mark mark)
{
  moe__tape_rewind(t, mark);
  t->depth--;
  moe__tape_forget(t, before->n_nodes, before->n_values);
  for (int64_t i = before->n_values; i < t->n_values; i++) {
    struct moe__value *v = &t->values[i / MOE__PAGE][i % MOE__PAGE];
    if (v->depth > t->depth) v->t.handle = NULL;
  }
  for (const struct kept *k = s->first; k; k = k->next) { /* leaves over memory of the pool, or of one inside it */
    moe_tensor *x = k->leaf.id ? &moe__tape_at(t, k->leaf)->t : NULL;
    for (int d = t->depth + 1; x && x->handle && d < MOE__TAPE_DEPTH; d++)
      if (in_pool(&t->pools[d], x)) x->handle = NULL;
  }
}

/* ---- later runs ------------------------------------------------------------------------------------------------------------ */
static void expand_segment(moe_tape *t, struct moe__node *n, moe_value *out)
{
  run_segment(t, n->more, out, n->n_out);
  for (int64_t i = 0; i < n->n_out && !t->status; i++) {
    const struct moe__value *was = moe__tape_at(t, n->out[i]), *is = moe__tape_at(t, out[i]);
    if (is->t.dtype != was->t.dtype || !moe__same_shape(&is->t, &was->t) || is->needs_grad != was->needs_grad)
      TAPE_FAIL(t, MOE_ERR_STATE,
                "%s: out[%lld] has another shape or dtype than in the first run, or depends on others", segment_name,
                (long long)i);
  }
}

static void back_segment(moe_tape *t, struct moe__node *n, const moe_value *dout)
{
  struct before before;
  struct moe__mark mark;
  if (!open_pool(t, &before, &mark)) return;
  moe__tape_through_expansion(t, n, dout);
  close_pool(t, n->more, &before, mark);
}

static const struct moe__rule rule_segment = { "recomputed segment", back_segment, expand_segment, 0 };

/* ---- the first run --------------------------------------------------------------------------------------------------------- */
/* Values from outside the segment, or leaves that outlive it, that v may be: counted, or written to list[n]. */
static void depends_on(const moe_tape *t, moe_value v, moe_value *list, int64_t *n)
{
  struct moe__value *x = v.id ? moe__tape_at(t, v) : NULL;
  if (!x || !x->needs_grad || x->depth >= t->depth || x->listed == !list) return;
  x->listed = !list;
  if (list) list[*n] = v;
  ++*n;
}

static int64_t list_all(const moe_tape *t, int64_t first_node, const moe_value *out, int64_t n_out, moe_value *list)
{
  int64_t n = 0;
  for (int64_t k = first_node; k < t->n_nodes; k++)
    for (int64_t i = 0; i < t->nodes[k]->n_in; i++) depends_on(t, t->nodes[k]->in[i], list, &n);
  for (int64_t i = 0; i < n_out; i++) depends_on(t, out[i], list, &n);
  return n;
}

/* The segment's node, after its first run; NULL with the tape failed. */
static struct moe__node *first_run(moe_tape *t, struct moe__segment *s, int64_t n_out)
{
  struct before before;
  struct moe__mark mark;
  moe_value *out = moe__tape_host(t, (uint64_t)n_out * sizeof *out), *on = NULL;
  moe_tensor *tensors = moe__tape_host(t, (uint64_t)n_out * sizeof *tensors);
  int *needs = moe__tape_host(t, (uint64_t)n_out * sizeof *needs), any = 0;
  int64_t n_on = 0;
  if (!open_pool(t, &before, &mark)) return NULL;
  run_segment(t, s, out, n_out);
  for (int64_t i = 0; i < n_out && !t->status; i++) any |= needs[i] = moe__tape_at(t, out[i])->needs_grad;
  if (any) {
    n_on = list_all(t, before.n_nodes, out, n_out, NULL);
    on = moe__tape_host(t, (uint64_t)n_on * sizeof *on);
    if (on) (void)list_all(t, before.n_nodes, out, n_out, on);
  }
  t->depth--;
  for (int64_t i = 0; i < n_out && !t->status; i++) tensors[i] = moe__tape_copy(t, &moe__tape_at(t, out[i])->t);
  t->depth++;
  close_pool(t, s, &before, mark);
  s->again = 1;
  struct moe__node *n = moe__tape_node(t, &rule_segment, n_on, on, n_out);
  if (!n) return NULL;
  n->more = s;
  moe__tape_record_all(t, n, tensors);
  for (int64_t i = 0; i < n_out && !t->status; i++) {
    struct moe__value *v = moe__tape_at(t, n->out[i]);
    if (needs[i] || !v->needs_grad) continue;
    v->needs_grad = 0;
    v->node = -1;
  }
  return n;
}

moe_status moe_tape_recompute(moe_value *out, int64_t n_out, moe_tape *t, moe_segment *run, void *user,
                              const moe_value *in, int64_t n_in)
{
  const struct moe__node *n = NULL;
  if (!t) return moe__fail(MOE_ERR_INVALID, "%s: tape is NULL", segment_name);
  if (!t->status && !run) TAPE_FAIL(t, MOE_ERR_INVALID, "%s: segment is NULL", segment_name);
  if (arrays(t, segment_name, out, n_out, in, n_in)) {
    struct moe__segment *s = moe__tape_host(t, sizeof *s);
    moe_value *copy = moe__tape_host(t, (uint64_t)n_in * sizeof *copy);
    if (copy) {
      if (n_in) memcpy(copy, in, (size_t)n_in * sizeof *copy);
      *s = (struct moe__segment){ .run = run, .user = user, .in = copy, .n_in = n_in, .depth = t->depth };
      s->end = &s->first;
      n = first_run(t, s, n_out);
    }
  }
  return finish(t, out, n_out, n);
}
