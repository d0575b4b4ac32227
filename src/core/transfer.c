/* transfer.c - see transfer.h.  Device memory is walked in its own order, so that each call to the device moves as long
   a run of bytes as there is: all of a tensor whose dimensions are only exchanged; a row where rows are apart. */
#include "core/transfer.h"

#include "core/backend.h"
#include "core/convert.h"

#include <stdlib.h>

/* The dimensions, outermost first in device memory; those of one element are left out, and those that follow one another
   on both sides are one. */
struct walk {
  int rank, run; /* dimensions [run, rank) are one piece of device memory */
  int64_t shape[MOE_RANK_MAX], device[MOE_RANK_MAX], host[MOE_RANK_MAX];
  int64_t length; /* elements of a run */
};

static struct walk plan(const moe_tensor *t, const int64_t *stride)
{
  struct walk w = { .length = 1 };
  int order[MOE_RANK_MAX], n = 0;
  for (int d = 0; d < t->rank; d++) {
    if (t->shape[d] == 1) continue;
    int at = n++; /* after all larger strides; a dimension that is repeated (stride 0) comes first */
    for (; at > 0 && t->stride[order[at - 1]] && (!t->stride[d] || t->stride[order[at - 1]] < t->stride[d]); at--)
      order[at] = order[at - 1];
    order[at] = d;
  }
  for (int i = 0; i < n; i++) {
    const int64_t shape = t->shape[order[i]], device = t->stride[order[i]], host = stride[order[i]];
    const int last = w.rank - 1;
    if (last < 0 || w.device[last] != shape * device || w.host[last] != shape * host) w.shape[w.rank++] = 1;
    w.shape[w.rank - 1] *= shape;
    w.device[w.rank - 1] = device;
    w.host[w.rank - 1] = host;
  }
  for (w.run = w.rank; w.run > 0 && w.device[w.run - 1] == w.length; w.run--) w.length *= w.shape[w.run - 1];
  return w;
}

/* Elements [begin, begin + n) of a run between the staging buffer and the host, whose run starts at `host`. */
static void stage(const struct walk *w, void *staging, int64_t dtype, unsigned char *host, int64_t host_dtype,
                  int64_t begin, int64_t n, int up)
{
  const int last = w->rank - 1;
  const int64_t size = (int64_t)moe_dtype_size(dtype), host_size = (int64_t)moe_dtype_size(host_dtype),
                row = w->run < w->rank ? w->shape[last] : 1, step = w->run < w->rank ? w->host[last] : 1;
  for (int64_t done = 0; done < n;) {
    int64_t i = begin + done, at = 0, left;
    for (int d = last; d >= w->run; d--) {
      at += i % w->shape[d] * w->host[d];
      i /= w->shape[d];
    }
    left = row - (begin + done) % row;
    if (left > n - done) left = n - done;
    unsigned char *s = (unsigned char *)staging + done * size, *h = host + at * host_size;
    if (up) moe__convert(s, dtype, 1, h, host_dtype, step, left);
    else moe__convert(h, host_dtype, step, s, dtype, 1, left);
    done += left;
  }
}

static moe_status transfer(moe_queue *q, const moe_tensor *t, unsigned char *host, int64_t host_dtype,
                           const int64_t *stride, int up)
{
  const struct walk w = plan(t, stride);
  const int64_t size = (int64_t)moe_dtype_size(t->dtype), host_size = (int64_t)moe_dtype_size(host_dtype);
  /* Nothing to convert or to put in order: straight from and to the host's memory. */
  const int straight = t->dtype == host_dtype && (w.run == w.rank || (w.run == w.rank - 1 && w.host[w.run] == 1));
  const int64_t room = MOE__STAGING / size, most = straight || w.length < room ? w.length : room;
  int64_t index[MOE_RANK_MAX] = { 0 };
  unsigned char *staging = NULL;
  moe_status st = MOE_OK;
  if (!moe_tensor_count(t)) return MOE_OK;
  if (!straight) staging = malloc((size_t)(most * size));
  if (!straight && !staging)
    return moe__fail(MOE_ERR_NO_MEMORY, "no host memory for %lld bytes", (long long)most * size);
  for (int d = 0; d >= 0 && !st;) {
    int64_t device = 0, at = 0;
    for (int i = 0; i < w.run; i++) {
      device += index[i] * w.device[i];
      at += index[i] * w.host[i];
    }
    for (int64_t begin = 0; begin < w.length && !st; begin += most) {
      const int64_t n = w.length - begin < most ? w.length - begin : most;
      const moe_span span = { t->handle, t->offset + (uint64_t)((device + begin) * size), (uint64_t)(n * size) };
      unsigned char *buffer = straight ? host + at * host_size : staging;
      if (up && !straight) stage(&w, staging, t->dtype, host + at * host_size, host_dtype, begin, n, 1);
      st = up ? q->ctx->be->write(q->be, span, buffer, span.bytes) : q->ctx->be->read(q->be, buffer, span, span.bytes);
      if (!up && !straight && !st) stage(&w, staging, t->dtype, host + at * host_size, host_dtype, begin, n, 0);
    }
    for (d = w.run - 1; d >= 0 && ++index[d] == w.shape[d]; d--) index[d] = 0;
  }
  free(staging);
  return st;
}

moe_status moe__upload(moe_queue *q, const moe_tensor *to, const void *from, int64_t dtype, const int64_t *stride)
{
  return transfer(q, to, (unsigned char *)(uintptr_t)from, dtype, stride, 1); /* which then only reads it */
}

moe_status moe__download(moe_queue *q, void *to, const int64_t *stride, const moe_tensor *from)
{
  return transfer(q, from, to, from->dtype, stride, 0);
}

/* ---- in order ---------------------------------------------------------------------------------------------------- */
static moe_status stream(moe_queue *q, const moe_tensor *t, void *buffer, moe__take *take, void *user)
{
  const int64_t bytes = moe_tensor_count(t) * (int64_t)moe_dtype_size(t->dtype);
  int64_t stride[MOE_RANK_MAX], step = 1, rows;
  int d = 0;
  if (bytes <= MOE__STAGING) {
    for (int i = t->rank - 1; i >= 0; i--) {
      stride[i] = step;
      step *= t->shape[i];
    }
    MOE__TRY(moe__download(q, buffer, stride, t));
    return take(user, buffer, (uint64_t)bytes);
  }
  while (t->shape[d] == 1) d++;
  rows = MOE__STAGING / (bytes / t->shape[d]);
  if (rows < 1) rows = 1;
  for (int64_t i = 0; i < t->shape[d]; i += rows) {
    moe_tensor part = *t;
    part.offset += (uint64_t)(i * t->stride[d]) * moe_dtype_size(t->dtype);
    part.shape[d] = t->shape[d] - i < rows ? t->shape[d] - i : rows;
    MOE__TRY(stream(q, &part, buffer, take, user));
  }
  return MOE_OK;
}

moe_status moe__stream(moe_queue *q, const moe_tensor *from, moe__take *take, void *user)
{
  const int64_t bytes = moe_tensor_count(from) * (int64_t)moe_dtype_size(from->dtype);
  if (!bytes) return MOE_OK;
  void *buffer = malloc((size_t)(bytes < MOE__STAGING ? bytes : MOE__STAGING));
  if (!buffer) return moe__fail(MOE_ERR_NO_MEMORY, "no host memory for a buffer");
  moe_status st = stream(q, from, buffer, take, user);
  free(buffer);
  return st;
}
