/* context.c - contexts, queues, spans: lifetimes and copies; nothing of the method. */
#include "core/backend.h"
#include "core/tensor.h"

#include <moe/cuda.h>
#include <moe/opencl.h>

#include <stdio.h>
#include <stdlib.h>

#define HEALTH_WORDS 4

void moe__context_ref(moe_context *ctx)
{
  __atomic_add_fetch(&ctx->refs, 1, __ATOMIC_RELAXED);
}

void moe__context_unref(moe_context *ctx)
{
  if (__atomic_sub_fetch(&ctx->refs, 1, __ATOMIC_ACQ_REL)) return;
  ctx->be->close(ctx->dev);
  free(ctx);
}

static moe_status open_on(moe_context **out, const struct moe__backend *be, const char *spec, void *lent_context,
                          void *lent_device, const moe_context_desc *desc)
{
  moe_context *ctx = calloc(1, sizeof *ctx);
  moe_status st;
  if (!ctx) return moe__fail(MOE_ERR_NO_MEMORY, "no host memory for a context");
  ctx->be = be;
  ctx->desc = *desc;
  ctx->desc.device = NULL;
  ctx->refs = 1;
  st = be->open(&ctx->dev, &(struct moe__open){ spec, lent_context, lent_device, &ctx->desc });
  if (st) {
    free(ctx);
    return st;
  }
  ctx->info = be->info(ctx->dev);
  *out = ctx;
  return MOE_OK;
}

static const struct moe__backend *backend_by_name(const char *name, size_t length)
{
  for (int i = 0; moe__backends[i]; i++)
    if (strlen(moe__backends[i]->name) == length && !strncmp(moe__backends[i]->name, name, length))
      return moe__backends[i];
  return NULL;
}

/* A backend this build was made without. */
static const char *known_but_absent(const char *name, size_t length)
{
  if (length == 4 && !strncmp(name, "cuda", 4)) return "this libmoe was built without CUDA";
  if (length == 6 && !strncmp(name, "opencl", 6)) return "this libmoe was built without OpenCL";
  return NULL;
}

moe_status moe_context_create(moe_context **out, const moe_context_desc *given)
{
  static const char fn[] = "moe_context_create";
  moe_context_desc desc = moe_context_desc_init();
  moe_status st;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (given) MOE__TRY(moe__struct_in(&desc, sizeof desc, given, fn, "desc"));
  if (!desc.alloc != !desc.release) return moe__fail(MOE_ERR_INVALID, "%s: alloc and release go together", fn);
  if (desc.device) {
    const char *colon = strchr(desc.device, ':');
    size_t length = colon ? (size_t)(colon - desc.device) : strlen(desc.device);
    const struct moe__backend *be = backend_by_name(desc.device, length);
    if (!be) {
      const char *absent = known_but_absent(desc.device, length);
      if (absent) return moe__fail(MOE_ERR_NO_DEVICE, "%s: %s", fn, absent);
      return moe__fail(MOE_ERR_INVALID,
                       "%s: device \"%s\", wanted cuda[:N], opencl[:gpu|:cpu|:PLATFORM:DEVICE] or NULL", fn,
                       desc.device);
    }
    st = open_on(out, be, colon ? colon + 1 : "", NULL, NULL, &desc);
    return st ? moe__fail_in(st, fn) : MOE_OK;
  }
  char reasons[512] = "";
  size_t used = 0;
  for (int i = 0; moe__backends[i]; i++) {
    int n = 0;
    st = moe__backends[i]->count(&n);
    if (st == MOE_OK && n > 0) st = open_on(out, moe__backends[i], "", NULL, NULL, &desc);
    else if (st == MOE_OK) st = MOE_ERR_NO_DEVICE;
    if (st == MOE_OK) return MOE_OK;
    if (st == MOE_ERR_NO_MEMORY) return moe__fail_in(st, fn); /* says nothing of devices */
    if (used < sizeof reasons)
      used += (size_t)snprintf(reasons + used, sizeof reasons - used, "%s%s", used ? "; " : "", moe_last_error());
  }
  return moe__fail(MOE_ERR_NO_DEVICE, "%s: no device (%s)", fn, reasons[0] ? reasons : "no backend was built");
}

void moe_context_free(moe_context *ctx)
{
  if (ctx) moe__context_unref(ctx);
}

moe_status moe_context_info(const moe_context *ctx, moe_device_info *out)
{
  if (!ctx) return moe__fail(MOE_ERR_INVALID, "moe_context_info: ctx is NULL");
  return moe__struct_out(out, &ctx->info->pub, sizeof ctx->info->pub, "moe_context_info", "out");
}

moe_status moe_device_list(moe_device_info *out, int64_t index)
{
  static const char fn[] = "moe_device_list";
  int64_t past = 0;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  for (int i = 0; moe__backends[i]; i++) {
    int n = 0;
    moe_status st = moe__backends[i]->count(&n);
    if (st) return moe__fail_in(st, fn);
    if (index >= past && index < past + n) {
      moe_device_info own = moe_device_info_init();
      MOE__TRY(moe__backends[i]->probe((int)(index - past), &own));
      return moe__struct_out(out, &own, sizeof own, fn, "out");
    }
    past += n;
  }
  return moe__fail(MOE_ERR_INVALID, "%s: index %lld, there are %lld devices", fn, (long long)index, (long long)past);
}

const char *moe_backend_reason(const char *backend)
{
  static _Thread_local char text[512];
  const struct moe__backend *be = backend ? backend_by_name(backend, strlen(backend)) : NULL;
  int n = 0;
  text[0] = 0;
  if (be) {
    if (be->count(&n) != MOE_OK || n == 0) snprintf(text, sizeof text, "%s", moe_last_error());
  } else {
    const char *absent = backend ? known_but_absent(backend, strlen(backend)) : NULL;
    snprintf(text, sizeof text, "%s", absent ? absent : "there is no such backend");
  }
  return text;
}

/* ---- queues ----------------------------------------------------------------------------------------------- */
static moe_status queue_over(moe_queue **out, moe_context *ctx, int is_lent, void *lent, const char *fn)
{
  moe_queue *q;
  moe_status st;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (!ctx) return moe__fail(MOE_ERR_INVALID, "%s: ctx is NULL", fn);
  q = calloc(1, sizeof *q);
  if (!q) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  q->ctx = ctx;
  st = ctx->be->queue_open(ctx->dev, is_lent, lent, &q->be);
  if (st) {
    free(q);
    return moe__fail_in(st, fn);
  }
  st = moe__alloc(ctx, HEALTH_WORDS * sizeof(int32_t), &q->health_span);
  if (!st) st = ctx->be->fill(q->be, q->health_span, 0, HEALTH_WORDS * sizeof(int32_t));
  if (st) {
    moe__fail_in(st, fn);
    moe__release(ctx, &q->health_span);
    ctx->be->queue_close(q->be);
    free(q);
    return st;
  }
  q->health = moe__flat(q->health_span.handle, q->health_span.offset, MOE_I32, 1);
  moe__context_ref(ctx);
  *out = q;
  return MOE_OK;
}

moe_status moe_queue_create(moe_queue **out, moe_context *ctx)
{
  return queue_over(out, ctx, 0, NULL, "moe_queue_create");
}

static moe_status wrong_backend(const moe_context *ctx, const char *name, const char *fn)
{
  if (!ctx) return moe__fail(MOE_ERR_INVALID, "%s: ctx is NULL", fn);
  if (strcmp(ctx->be->name, name))
    return moe__fail(MOE_ERR_INVALID, "%s: ctx is on %s, wanted %s", fn, ctx->be->name, name);
  return MOE_OK;
}

moe_status moe_queue_from_cuda(moe_queue **out, moe_context *ctx, struct CUstream_st *stream)
{
  static const char fn[] = "moe_queue_from_cuda";
  if (out) *out = NULL;
  MOE__TRY(wrong_backend(ctx, "cuda", fn));
  return queue_over(out, ctx, 1, stream, fn);
}

moe_status moe_queue_from_opencl(moe_queue **out, moe_context *ctx, struct _cl_command_queue *queue)
{
  static const char fn[] = "moe_queue_from_opencl";
  if (out) *out = NULL;
  MOE__TRY(wrong_backend(ctx, "opencl", fn));
  if (!queue) return moe__fail(MOE_ERR_INVALID, "%s: queue is NULL", fn);
  return queue_over(out, ctx, 1, queue, fn);
}

static moe_status native_of(void *out, const moe_queue *q, const char *backend, const char *fn)
{
  void *native = NULL;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  memcpy(out, &native, sizeof native);
  if (!q) return moe__fail(MOE_ERR_INVALID, "%s: queue is NULL", fn);
  MOE__TRY(wrong_backend(q->ctx, backend, fn));
  native = q->ctx->be->queue_native(q->be);
  memcpy(out, &native, sizeof native);
  return MOE_OK;
}

moe_status moe_queue_to_cuda(struct CUstream_st **out, const moe_queue *q)
{
  return native_of(out, q, "cuda", "moe_queue_to_cuda");
}

moe_status moe_queue_to_opencl(struct _cl_command_queue **out, const moe_queue *q)
{
  return native_of(out, q, "opencl", "moe_queue_to_opencl");
}

moe_status moe_context_from_opencl(moe_context **out, struct _cl_context *context, struct _cl_device_id *device,
                                   const moe_context_desc *given)
{
  static const char fn[] = "moe_context_from_opencl";
  const struct moe__backend *be = backend_by_name("opencl", 6);
  moe_context_desc desc = moe_context_desc_init();
  moe_status st;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (given) MOE__TRY(moe__struct_in(&desc, sizeof desc, given, fn, "desc"));
  if (!desc.alloc != !desc.release) return moe__fail(MOE_ERR_INVALID, "%s: alloc and release go together", fn);
  if (!context || !device) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, context ? "device" : "context");
  if (!be) return moe__fail(MOE_ERR_NO_DEVICE, "%s: %s", fn, known_but_absent("opencl", 6));
  st = open_on(out, be, "", context, device, &desc);
  return st ? moe__fail_in(st, fn) : MOE_OK;
}

void moe_queue_free(moe_queue *q)
{
  if (!q) return;
  moe_context *ctx = q->ctx;
  (void)ctx->be->wait(q->be); /* the health word may still be written */
  moe__release(ctx, &q->health_span);
  ctx->be->queue_close(q->be);
  free(q);
  moe__context_unref(ctx);
}

static moe_status take_health(moe_queue *q, uint64_t *bits)
{
  int32_t word = 0;
  MOE__TRY(q->ctx->be->read(q->be, &word, q->health_span, sizeof word));
  if (word) MOE__TRY(q->ctx->be->fill(q->be, q->health_span, 0, HEALTH_WORDS * sizeof(int32_t)));
  *bits = (uint64_t)(uint32_t)word;
  return MOE_OK;
}

moe_status moe_queue_wait(moe_queue *q)
{
  static const char fn[] = "moe_queue_wait";
  char gradient[256] = "";
  uint64_t bits;
  moe_status st;
  if (!q) return moe__fail(MOE_ERR_INVALID, "%s: queue is NULL", fn);
  st = q->ctx->be->wait(q->be);
  if (!st) st = moe__queue_gradients(q, gradient, sizeof gradient); /* which moe_tape_health tells all the same */
  if (!st) st = take_health(q, &bits);
  if (st) return moe__fail_in(st, fn);
  if (!bits && !gradient[0]) return MOE_OK;
  return moe__fail(MOE_ERR_DATA, "%s: %s%s%s%s%s%s", fn, gradient, bits && gradient[0] ? "; " : "",
                   bits ? "bad data since the last wait:" : "",
                   bits & MOE_HEALTH_ROUTE ? " [routing weights that are not finite: those tokens are NaN]" : "",
                   bits & MOE_HEALTH_ID ? " [an id out of range: those rows are NaN]" : "",
                   bits & MOE_HEALTH_OVERFLOW ? " [gradients that are not finite: the optimizer step was skipped]"
                                              : "");
}

moe_status moe_health_read(moe_queue *q, uint64_t *bits)
{
  moe_status st;
  if (!q || !bits) return moe__fail(MOE_ERR_INVALID, "moe_health_read: %s is NULL", q ? "bits" : "queue");
  st = q->ctx->be->wait(q->be);
  if (!st) st = take_health(q, bits);
  return st ? moe__fail_in(st, "moe_health_read") : MOE_OK;
}

/* ---- memory ------------------------------------------------------------------------------------------------ */
moe_status moe__alloc(moe_context *ctx, uint64_t bytes, moe_span *out)
{
  moe_span span = { NULL, 0, bytes };
  if (ctx->desc.alloc) {
    span.handle = ctx->desc.alloc(ctx->desc.user, bytes ? bytes : 1);
    if (!span.handle)
      return moe__fail(MOE_ERR_NO_MEMORY, "the caller's alloc gave none for %llu bytes", (unsigned long long)bytes);
  } else MOE__TRY(ctx->be->alloc(ctx->dev, bytes, &span.handle));
  *out = span;
  return MOE_OK;
}

void moe__release(moe_context *ctx, moe_span *span)
{
  if (!span->handle) return;
  if (ctx->desc.release) ctx->desc.release(ctx->desc.user, span->handle);
  else ctx->be->release(ctx->dev, span->handle);
  memset(span, 0, sizeof *span);
}

moe_status moe_span_alloc(moe_span *out, moe_context *ctx, uint64_t bytes)
{
  moe_status st;
  if (!out || !ctx) return moe__fail(MOE_ERR_INVALID, "moe_span_alloc: %s is NULL", out ? "ctx" : "out");
  memset(out, 0, sizeof *out);
  st = moe__alloc(ctx, bytes, out);
  return st ? moe__fail_in(st, "moe_span_alloc") : MOE_OK;
}

void moe_span_free(moe_context *ctx, moe_span *span)
{
  if (ctx && span) moe__release(ctx, span);
}

static moe_status fits(const char *fn, const char *name, const moe_queue *q, const moe_span *s, uint64_t bytes)
{
  if (!q) return moe__fail(MOE_ERR_INVALID, "%s: queue is NULL", fn);
  if (bytes && !s->handle) return moe__fail(MOE_ERR_INVALID, "%s: %s is not given", fn, name);
  if (bytes > s->bytes)
    return moe__fail(MOE_ERR_TOO_SMALL, "%s: %s has %llu bytes, %llu wanted", fn, name, (unsigned long long)s->bytes,
                     (unsigned long long)bytes);
  return MOE_OK;
}

moe_status moe_span_write(moe_queue *q, moe_span to, const void *from, uint64_t bytes)
{
  static const char fn[] = "moe_span_write";
  MOE__TRY(fits(fn, "to", q, &to, bytes));
  if (!bytes) return MOE_OK;
  if (!from) return moe__fail(MOE_ERR_INVALID, "%s: from is NULL", fn);
  return q->ctx->be->write(q->be, to, from, bytes);
}

moe_status moe_span_read(moe_queue *q, void *to, moe_span from, uint64_t bytes)
{
  static const char fn[] = "moe_span_read";
  MOE__TRY(fits(fn, "from", q, &from, bytes));
  if (!bytes) return MOE_OK;
  if (!to) return moe__fail(MOE_ERR_INVALID, "%s: to is NULL", fn);
  return q->ctx->be->read(q->be, to, from, bytes);
}

moe_status moe_span_copy(moe_queue *q, moe_span to, moe_span from, uint64_t bytes)
{
  static const char fn[] = "moe_span_copy";
  MOE__TRY(fits(fn, "to", q, &to, bytes));
  MOE__TRY(fits(fn, "from", q, &from, bytes));
  if (bytes) MOE__TRY(q->ctx->be->copy(q->be, to, from, bytes));
  return q->ctx->be->flush(q->be);
}

moe_status moe_span_fill(moe_queue *q, moe_span to, uint8_t byte)
{
  MOE__TRY(fits("moe_span_fill", "to", q, &to, to.bytes));
  if (to.bytes) MOE__TRY(q->ctx->be->fill(q->be, to, byte, to.bytes));
  return q->ctx->be->flush(q->be);
}
