/* optim.c - moe_adamw: a list of parameters, one state span, one straight sequence of ops per step. */
#include "core/optim.h"

#include "core/arena.h"
#include "core/convert.h"
#include "core/tensor.h"
#include "core/walk.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct item {
  moe_tensor p, g;   /* flat */
  moe_tensor shaped; /* the parameter as it was given */
  double decay, rate_scale;
  moe_tensor m, v, master; /* laid out by bind */
};

struct moe_adamw {
  moe_context *ctx;
  moe_adamw_desc desc;
  struct item *items;
  int64_t count, room;
  int bound;
  moe_tensor step, lr, sq, clip, parts; /* device scalars */
};

static void lay(moe_adamw *o, struct moe__arena *a)
{
  o->step = moe__arena_flat(a, MOE_I64, 1);
  o->lr = moe__arena_flat(a, o->desc.dtype, 1);
  o->sq = moe__arena_flat(a, o->desc.dtype, 1);
  o->clip = moe__arena_flat(a, o->desc.dtype, 2);
  o->parts = moe__arena_flat(a, o->desc.dtype, MOE__PARTS);
  for (int64_t i = 0; i < o->count; i++) {
    struct item *it = &o->items[i];
    int64_t n = it->p.shape[0];
    it->m = moe__arena_flat(a, o->desc.dtype, n);
    it->v = moe__arena_flat(a, o->desc.dtype, n);
    memset(&it->master, 0, sizeof it->master);
    if (it->p.dtype == MOE_BF16 || it->p.dtype == MOE_F16) it->master = moe__arena_flat(a, MOE_F32, n);
  }
}

static moe_status walk(struct moe__walk *w, const moe_adamw *o)
{
  int64_t dtype = o->desc.dtype;
  for (int64_t i = 0; i < o->count; i++)
    STEP(w, "norm", sqnorm, MOE_AUTO, .dtype = dtype, .y = o->sq, .a = o->items[i].g, .scratch = o->parts,
         .n = o->items[i].g.shape[0], .accumulate = i > 0);
  STEP(w, "clip", clip, MOE_AUTO, .dtype = dtype, .y = o->clip, .sq = o->sq, .loss_scale = o->desc.loss_scale,
       .health = w->q ? w->q->health : (moe_tensor){ 0 }, .max_norm = o->desc.max_norm);
  STEP(w, "rate", lr_step, MOE_AUTO, .dtype = dtype, .lr = o->lr, .step = o->step,
       .gscale = moe__flat(o->clip.handle, o->clip.offset, dtype, 1), .warmup = o->desc.warmup, .total = o->desc.total,
       .peak = o->desc.peak, .floor = o->desc.floor);
  for (int64_t i = 0; i < o->count; i++) {
    const struct item *it = &o->items[i];
    STEP(w, "adamw", adamw, MOE_AUTO, .dtype = dtype, .p = it->p, .master = it->master, .m = it->m, .v = it->v,
         .g = it->g, .lr = o->lr, .step = o->step, .gscale = moe__flat(o->clip.handle, o->clip.offset, dtype, 1),
         .n = it->p.shape[0], .beta1 = o->desc.beta1, .beta2 = o->desc.beta2, .eps = o->desc.eps, .decay = it->decay,
         .lr_mult = it->rate_scale);
  }
  return MOE_OK;
}

moe_status moe_adamw_create(moe_adamw **out, moe_context *ctx, const moe_adamw_desc *given)
{
  static const char fn[] = "moe_adamw_create";
  moe_adamw_desc d;
  moe_adamw *o;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (!ctx) return moe__fail(MOE_ERR_INVALID, "%s: ctx is NULL", fn);
  MOE__TRY(moe__struct_in(&d, sizeof d, given, fn, "desc"));
  if (d.beta1 == 0) d.beta1 = 0.9;
  if (d.beta2 == 0) d.beta2 = 0.95;
  if (d.eps == 0) d.eps = 1e-8;
  if (d.dtype != MOE_F32 && d.dtype != MOE_F64)
    return moe__fail(MOE_ERR_INVALID, "%s: dtype %s, wanted f32 or f64", fn, moe_dtype_name(d.dtype));
  if (!(d.beta1 > 0 && d.beta1 < 1 && d.beta2 > 0 && d.beta2 < 1 && d.eps > 0 && isfinite(d.eps)))
    return moe__fail(MOE_ERR_INVALID, "%s: beta1 %g, beta2 %g, eps %g: wanted betas in (0,1), eps > 0", fn, d.beta1,
                     d.beta2, d.eps);
  if (!(d.peak > 0 && isfinite(d.peak) && d.floor >= 0 && d.floor <= d.peak))
    return moe__fail(MOE_ERR_INVALID, "%s: peak %g, floor %g: wanted 0 <= floor <= peak, peak > 0", fn, d.peak,
                     d.floor);
  if (d.warmup < 0 || d.total < 0 || (d.total && d.total < d.warmup))
    return moe__fail(MOE_ERR_INVALID, "%s: warmup %lld, total %lld: wanted 0 <= warmup <= total, or total 0", fn,
                     (long long)d.warmup, (long long)d.total);
  if (!(d.max_norm >= 0 && isfinite(d.max_norm)))
    return moe__fail(MOE_ERR_INVALID, "%s: max_norm %g, wanted finite and >= 0", fn, d.max_norm);
  if (d.loss_scale.handle) MOE__TRY(WANT(fn, d.loss_scale, d.dtype, 1));
  o = calloc(1, sizeof *o);
  if (!o) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  o->ctx = ctx;
  o->desc = d;
  struct item one = { 0 };
  o->items = &one; /* every kernel a step can need */
  o->count = 1;
  struct moe__walk w = { .mode = MOE__PREPARE, .ctx = ctx };
  moe_status st = walk(&w, o);
  if (!st)
    st = moe__prepare_elt_map(ctx, &(struct moe__args_elt_map){ .dtype = d.dtype, .op = MOE__ELT_COPY }, MOE_AUTO);
  o->items = NULL;
  o->count = 0;
  if (st) {
    free(o);
    return moe__fail_in(st, fn);
  }
  moe__context_ref(ctx);
  *out = o;
  return MOE_OK;
}

void moe_adamw_free(moe_adamw *o)
{
  if (!o) return;
  moe__context_unref(o->ctx);
  free(o->items);
  free(o);
}

static moe_status flat_tensor(moe_tensor *out, const moe_tensor *t, int64_t real, const char *name, const char *fn)
{
  if (!t || !t->handle) return moe__fail(MOE_ERR_INVALID, "%s: %s is not given", fn, name);
  if (!moe__is_float(t->dtype) || (t->dtype == MOE_F64 && real != MOE_F64))
    return moe__fail(MOE_ERR_INVALID, "%s: %s is %s in a %s optimizer", fn, name, moe_dtype_name(t->dtype),
                     moe_dtype_name(real));
  if (t->rank < 0 || t->rank > MOE_RANK_MAX || !moe_tensor_is_packed(t) || moe_tensor_count(t) < 0)
    return moe__fail(MOE_ERR_INVALID, "%s: %s is not packed", fn, name);
  MOE__TRY(moe__want(fn, name, t, 0, t->rank, t->shape)); /* the offset */
  *out = moe__flat(t->handle, t->offset, t->dtype, moe_tensor_count(t));
  return MOE_OK;
}

moe_status moe_adamw_add(moe_adamw *o, const moe_tensor *param, const moe_tensor *grad, double decay, double rate_scale)
{
  static const char fn[] = "moe_adamw_add";
  struct item it = { 0 };
  if (!o) return moe__fail(MOE_ERR_INVALID, "%s: opt is NULL", fn);
  if (o->bound) return moe__fail(MOE_ERR_STATE, "%s: after moe_adamw_bind", fn);
  MOE__TRY(flat_tensor(&it.p, param, o->desc.dtype, "param", fn));
  MOE__TRY(flat_tensor(&it.g, grad, o->desc.dtype, "grad", fn));
  if (it.p.shape[0] != it.g.shape[0])
    return moe__fail(MOE_ERR_INVALID, "%s: grad has %lld elements, param %lld", fn, (long long)it.g.shape[0],
                     (long long)it.p.shape[0]);
  if (!(decay >= 0 && isfinite(decay) && isfinite(rate_scale) && rate_scale >= 0))
    return moe__fail(MOE_ERR_INVALID, "%s: decay %g, rate_scale %g: wanted finite and >= 0", fn, decay, rate_scale);
  it.shaped = *param;
  it.decay = decay;
  it.rate_scale = rate_scale;
  if (o->count == o->room) {
    int64_t room = o->room ? 2 * o->room : 16;
    struct item *items = realloc(o->items, (size_t)room * sizeof *items);
    if (!items) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
    o->items = items;
    o->room = room;
  }
  o->items[o->count++] = it;
  return MOE_OK;
}

moe_status moe_adamw_measure(uint64_t *bytes, const moe_adamw *o)
{
  static const char fn[] = "moe_adamw_measure";
  struct moe__arena a = moe__arena_over((moe_span){ 0 });
  if (!o || !bytes) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, o ? "bytes" : "opt");
  moe_adamw copy = *o;
  copy.items = malloc((size_t)(o->count ? o->count : 1) * sizeof *copy.items);
  if (!copy.items) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  if (o->count) memcpy(copy.items, o->items, (size_t)o->count * sizeof *copy.items);
  lay(&copy, &a);
  free(copy.items);
  if (a.used > INT64_MAX) return moe__fail(MOE_ERR_INVALID, "%s: more than 2^63-1 bytes", fn);
  *bytes = a.used;
  return MOE_OK;
}

static moe_status check_objects(const char *fn, const moe_adamw *o, const moe_queue *q)
{
  if (!o || !q) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, o ? "queue" : "opt");
  if (o->ctx != q->ctx) return moe__fail(MOE_ERR_INVALID, "%s: queue and opt are of different contexts", fn);
  return MOE_OK;
}

moe_status moe_adamw_bind(moe_adamw *o, moe_queue *q, moe_span state)
{
  static const char fn[] = "moe_adamw_bind";
  uint64_t bytes;
  struct moe__arena a = moe__arena_over(state);
  MOE__TRY(check_objects(fn, o, q));
  MOE__TRY(moe_adamw_measure(&bytes, o));
  a.used = bytes;
  MOE__TRY(moe__arena_check(&a, fn, "state"));
  a.used = 0;
  o->bound = 0; /* until all of it is there */
  lay(o, &a);
  MOE__TRY(o->ctx->be->fill(q->be, state, 0, bytes));
  struct moe__walk w = { .mode = MOE__RUN, .ctx = o->ctx, .q = q };
  for (int64_t i = 0; i < o->count; i++) {
    const struct item *it = &o->items[i];
    if (it->master.handle)
      STEP(&w, "master", elt_map, MOE_AUTO, .dtype = o->desc.dtype, .y = it->master, .a = it->p, .op = MOE__ELT_COPY,
           .n = it->p.shape[0], .alpha = 1);
  }
  MOE__TRY(o->ctx->be->flush(q->be));
  o->bound = 1;
  return MOE_OK;
}

moe_status moe_adamw_step(moe_adamw *o, moe_queue *q)
{
  static const char fn[] = "moe_adamw_step";
  MOE__TRY(check_objects(fn, o, q));
  if (!o->bound) return moe__fail(MOE_ERR_STATE, "%s: before moe_adamw_bind", fn);
  if (!o->count) return MOE_OK;
  struct moe__walk w = { .mode = MOE__RUN, .ctx = o->ctx, .q = q };
  moe_status st = walk(&w, o);
  return st ? moe__fail_in(st, fn) : o->ctx->be->flush(q->be);
}

moe_status moe_adamw_read(moe_adamw_info *out, moe_adamw *o, moe_queue *q)
{
  static const char fn[] = "moe_adamw_read";
  moe_adamw_info info = moe_adamw_info_init();
  double rate[1], clip[2];
  MOE__TRY(check_objects(fn, o, q));
  if (!o->bound) return moe__fail(MOE_ERR_STATE, "%s: before moe_adamw_bind", fn);
  uint64_t size = moe_dtype_size(o->desc.dtype);
  MOE__TRY(moe_span_read(q, &info.step, (moe_span){ o->step.handle, o->step.offset, 8 }, 8));
  MOE__TRY(moe_span_read(q, rate, (moe_span){ o->lr.handle, o->lr.offset, size }, size));
  MOE__TRY(moe_span_read(q, clip, (moe_span){ o->clip.handle, o->clip.offset, 2 * size }, 2 * size));
  info.rate = moe__to_double(rate, o->desc.dtype, 0);
  info.norm = moe__to_double(clip, o->desc.dtype, 1);
  return moe__struct_out(out, &info, sizeof info, fn, "out");
}

moe_status moe__adamw_parts(struct moe__adamw_part **out, int64_t *n, const moe_adamw *o, const moe_queue *q,
                            const char *fn)
{
  MOE__TRY(check_objects(fn, o, q));
  if (!o->bound) return moe__fail(MOE_ERR_STATE, "%s: before moe_adamw_bind", fn);
  struct moe__adamw_part *part = calloc((size_t)(2 + 3 * o->count), sizeof *part);
  if (!part) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  *out = part;
  *part++ = (struct moe__adamw_part){ "step", o->step };
  *part++ = (struct moe__adamw_part){ "rate", o->lr };
  for (int64_t i = 0; i < o->count; i++) {
    const struct item *it = &o->items[i];
    const struct {
      const char *name;
      moe_tensor t;
    } of[] = { { "m", it->m }, { "v", it->v }, { "master", it->master } };
    for (int k = 0; k < 3; k++) {
      if (!of[k].t.handle) continue;
      snprintf(part->name, sizeof part->name, "%lld.%s", (long long)i, of[k].name);
      part->t = it->shaped;
      part->t.handle = of[k].t.handle;
      part->t.offset = of[k].t.offset;
      part->t.dtype = of[k].t.dtype;
      part++;
    }
  }
  *n = part - *out;
  return MOE_OK;
}
