/* tape_health.c - gradients that are not finite, found on the device.

   Tensors are collected and looked at 16 in one launch (the op `watch`), before their memory is reused: at the end of
   a walk, at reset, before a rewind past them, and before one is added to.  The launch adds to a record on the device:
   how many tensors were bad, and which element of which was the first, in order of the work; so nothing is lost
   however many steps lie between two waits, nothing is copied to the device, and a CUDA graph can hold it all.  Who
   gave the tensor goes with the launch as a number: place on the tape, input or output, and a name, of which the tape
   keeps a copy. */
#include "core/tape.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define DEFAULT_LIMIT 1e10
#define NAMES_MAX 0xffff /* those past it share the last */
#define NO_NODE 0x1fffffff
#define RECORD 3 /* words of I64: moe__args_watch */

typedef char name[sizeof((moe_tape_health_info *)NULL)->name];

struct moe__health {
  struct moe__health *next; /* of the queue */
  moe_tape *tape;
  int64_t policy, activations;
  moe_span memory;
  struct moe__args_watch batch; /* what is collected */
  int n;
  struct moe__mark top[MOE__TAPE_DEPTH]; /* of the pools, when the last tensor was collected */
  name *names;
  int64_t n_names, room;
  moe_tape_health_info met; /* what was read and not told yet */
};

/* ---- who: 16 bits of name, 1 of "a result", 16 of input or output, 29 of node ---------------------------------------- */
static int64_t name_index(moe_tape *t, const char *outer, const char *inner)
{
  struct moe__health *h = t->health;
  name text;
  snprintf(text, sizeof text, "%s%s%s", outer, inner ? ": " : "", inner ? inner : "");
  for (int64_t i = 0; i < h->n_names; i++)
    if (!strcmp(h->names[i], text)) return i;
  if (h->n_names == NAMES_MAX) return NAMES_MAX - 1;
  if (h->n_names == h->room) {
    const int64_t more = h->room ? 2 * h->room : 64;
    name *names = realloc(h->names, (size_t)more * sizeof *names);
    if (!names) return moe__tape_fail(t, moe__fail(MOE_ERR_NO_MEMORY, "moe_tape: no host memory")), 0;
    h->names = names;
    h->room = more;
  }
  memcpy(h->names[h->n_names], text, sizeof text);
  return h->n_names++;
}

static int64_t clipped(int64_t x, int64_t most)
{
  return x < most ? x : most;
}

static int64_t tag_of(int64_t name_at, int is_result, int64_t port, int64_t node)
{
  return ((name_at << 1 | is_result) << 16 | clipped(port, 0xffff)) << 29 | (node < 0 ? NO_NODE : node);
}

static void who(const struct moe__health *h, int64_t tag, int64_t index, moe_tape_health_info *out)
{
  const int64_t port = tag >> 29 & 0xffff, node = tag & NO_NODE;
  const int is_result = tag >> 45 & 1;
  memcpy(out->name, h->names[tag >> 46], sizeof out->name);
  out->node = node == NO_NODE ? -1 : node;
  out->input = is_result ? -1 : port;
  out->output = is_result ? port : -1;
  out->index = index;
}

/* ---- collecting ------------------------------------------------------------------------------------------------------ */
static int before(struct moe__mark a, struct moe__mark b)
{
  return a.block < b.block || (a.block == b.block && a.used < b.used);
}

static moe_status flush(moe_tape *t)
{
  struct moe__health *h = t->health;
  if (!h->n) return MOE_OK;
  moe_status st = moe__run_watch(t->q, &h->batch, MOE_AUTO);
  memset(h->batch.a, 0, sizeof h->batch.a);
  memset(h->top, 0, sizeof h->top);
  h->n = 0;
  moe__tape_fail(t, st);
  return st;
}

void moe__health_flush(moe_tape *t)
{
  (void)flush(t);
}

static void collect(moe_tape *t, const moe_tensor *x, int64_t tag)
{
  struct moe__health *h = t->health;
  if (!moe_tensor_count(x)) return;
  if (h->n == MOE__WATCHED) moe__health_flush(t);
  h->batch.a[h->n] = moe__flatten(*x);
  h->batch.tag[h->n++] = tag;
  for (int d = 0; d < MOE__TAPE_DEPTH; d++) h->top[d] = t->pools[d].at;
}

static int64_t place(const moe_tape *t, const struct moe__node *n)
{
  return moe__tape_at(t, n->out[0])->node;
}

/* Whether g is the gradient that flowed into the node, handed on (by add, say): it has been looked at. */
static int handed_on(const moe_tape *t, const struct moe__node *n, const moe_tensor *g)
{
  int same = 0;
  for (int64_t i = 0; n && i < n->n_out; i++) {
    const moe_value d = moe__tape_at(t, n->out[i])->grad;
    const moe_tensor *x = d.id ? &moe__tape_at(t, d)->t : NULL;
    same |= x && x->handle == g->handle && x->offset == g->offset;
  }
  return same;
}

void moe__health_watch(moe_tape *t, const struct moe__node *n, moe_value v, const moe_tensor *g)
{
  const struct moe__node *outer = t->expanded ? t->expanded : n;
  int64_t input = 0;
  if (t->status || handed_on(t, n, g)) return;
  while (n && input + 1 < n->n_in && n->in[input].id != v.id) input++;
  const char *seed = "seed", *inner = n ? n->name : seed; /* in an expansion too: of moe_tape_gradients in a function */
  const int64_t at = name_index(t, outer ? outer->name : seed, outer && outer != n ? inner : NULL);
  if (!t->status) collect(t, g, tag_of(at, 0, input, outer ? place(t, outer) : -1));
}

void moe__health_results(moe_tape *t, const struct moe__node *n)
{
  const int64_t at = t->health->activations ? name_index(t, n->name, NULL) : 0;
  for (int64_t i = 0; i < n->n_out && t->health->activations && !t->status; i++) {
    const moe_tensor x = moe__tape_at(t, n->out[i])->t;
    if (moe__is_float(x.dtype)) collect(t, &x, tag_of(at, 1, i, place(t, n)));
  }
}

void moe__health_settle(moe_tape *t, const moe_tensor *soon)
{
  const struct moe__health *h = t->health;
  for (int i = 0; i < h->n; i++) {
    const moe_tensor *x = &h->batch.a[i];
    if (x->handle == soon->handle && x->offset < soon->offset + moe_tensor_extent(soon) &&
        soon->offset < x->offset + moe_tensor_extent(x)) {
      moe__health_flush(t);
      return;
    }
  }
}

void moe__health_rewind(moe_tape *t, struct moe__mark mark)
{
  if (before(mark, t->health->top[t->depth])) moe__health_flush(t);
}

/* ---- lifetime -------------------------------------------------------------------------------------------------------- */
moe_status moe__health_create(moe_tape *t, const moe_tape_desc *desc)
{
  moe_context *ctx = t->q->ctx;
  if (desc->health_policy < MOE_HEALTH_POLICY_OFF || desc->health_policy > MOE_HEALTH_POLICY_FAIL)
    return moe__fail(MOE_ERR_INVALID, "health_policy %lld is none", (long long)desc->health_policy);
  if (!(desc->health_limit >= 0))
    return moe__fail(MOE_ERR_INVALID, "health_limit %g, wanted > 0, or 0 for the default", desc->health_limit);
  if (desc->health_activations < 0 || desc->health_activations > 1)
    return moe__fail(MOE_ERR_INVALID, "health_activations %lld, wanted 0 or 1", (long long)desc->health_activations);
  if (desc->health_policy == MOE_HEALTH_POLICY_OFF) return MOE_OK;
  struct moe__health *h = calloc(1, sizeof *h);
  if (!h) return moe__fail(MOE_ERR_NO_MEMORY, "no host memory");
  *h = (struct moe__health){ .tape = t, .policy = desc->health_policy, .activations = desc->health_activations };
  h->met = moe_tape_health_info_init();
  const uint64_t scratch = MOE__WATCHED * sizeof(int32_t), all = scratch + RECORD * sizeof(int64_t);
  moe_status st = moe__alloc(ctx, all, &h->memory);
  const moe_span s = h->memory;
  h->batch.dtype = MOE_F32;
  h->batch.limit = desc->health_limit > 0 ? desc->health_limit : DEFAULT_LIMIT;
  h->batch.scratch = moe__flat(s.handle, s.offset, MOE_I32, MOE__WATCHED);
  h->batch.record = moe__flat(s.handle, s.offset + scratch, MOE_I64, RECORD);
  if (!st) st = moe__prepare_watch(ctx, &h->batch, MOE_AUTO);
  if (!st) st = ctx->be->fill(t->q->be, s, 0, all);
  if (!st) st = ctx->be->fill(t->q->be, s, 0xff, scratch);
  if (st) {
    moe__release(ctx, &h->memory);
    free(h);
    return st;
  }
  h->next = t->q->tapes;
  t->q->tapes = h;
  t->health = h;
  return MOE_OK;
}

void moe__health_free(moe_tape *t)
{
  struct moe__health *h = t->health, **at = &t->q->tapes;
  while (*at != h) at = &(*at)->next;
  *at = h->next;
  moe__release(t->q->ctx, &h->memory);
  free(h->names);
  free(h);
}

/* ---- telling --------------------------------------------------------------------------------------------------------- */
/* Moves the record from the device into h->met; *now: tensors that were bad since the last time, *first: of those. */
static moe_status take(struct moe__health *h, int64_t *now, moe_tape_health_info *first)
{
  moe_tape *t = h->tape;
  const struct moe__backend *be = t->q->ctx->be;
  const moe_span at = { h->batch.record.handle, h->batch.record.offset, RECORD * sizeof(int64_t) };
  int64_t record[RECORD];
  MOE__TRY(flush(t));
  MOE__TRY(be->read(t->q->be, record, at, at.bytes));
  *now = record[0];
  if (!*now) return MOE_OK;
  MOE__TRY(be->fill(t->q->be, at, 0, at.bytes));
  who(h, record[1], record[2], first);
  const int64_t bad = h->met.bad + record[0];
  if (!h->met.bad) h->met = *first;
  h->met.bad = bad;
  return MOE_OK;
}

moe_status moe__queue_gradients(moe_queue *q, char *text, size_t room)
{
  for (struct moe__health *h = q->tapes; h; h = h->next) {
    moe_tape_health_info first = moe_tape_health_info_init();
    int64_t now;
    if (h->policy != MOE_HEALTH_POLICY_FAIL) continue;
    MOE__TRY(take(h, &now, &first));
    if (!now || text[0]) continue;
    const int is_result = first.output >= 0;
    int n = snprintf(text, room, "%s of %s, %s %lld, element %lld is not finite or >= %g",
                     is_result ? "result" : "gradient", first.name, is_result ? "output" : "input",
                     (long long)(is_result ? first.output : first.input), (long long)first.index, h->batch.limit);
    if (first.node >= 0 && n > 0 && (size_t)n < room)
      snprintf(text + n, room - (size_t)n, " (tape node %lld)", (long long)first.node);
  }
  return MOE_OK;
}

moe_status moe_tape_health(moe_tape_health_info *out, moe_tape *t)
{
  static const char fn[] = "moe_tape_health";
  moe_tape_health_info first = moe_tape_health_info_init();
  int64_t now;
  if (!out || !t) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, out ? "tape" : "out");
  if (!t->health) return moe__fail(MOE_ERR_STATE, "%s: the tape's health_policy is off", fn);
  MOE__TRY(take(t->health, &now, &first));
  MOE__TRY(moe__struct_out(out, &t->health->met, sizeof t->health->met, fn, "out"));
  t->health->met = moe_tape_health_info_init();
  return MOE_OK;
}
