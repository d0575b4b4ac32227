/* dlpack.c - tensors of other libraries as moe_tensor, and the way back; see moe/dlpack.h. */
#include "core/dlpack.h"

#include "core/backend.h"
#include "core/tensor.h"
#include "core/transfer.h"

#include <moe/dlpack.h>

#include <stdlib.h>

static const struct {
  uint8_t code, bits;
  int dtype;
} types[] = {
  { MOE__DL_FLOAT, 64, MOE_F64 },
  { MOE__DL_FLOAT, 32, MOE_F32 },
  { MOE__DL_BFLOAT, 16, MOE_BF16 },
  { MOE__DL_FLOAT, 16, MOE_F16 },
  { MOE__DL_FLOAT8_E4M3FN, 8, MOE_F8E4M3 },
  { MOE__DL_FLOAT8_E5M2, 8, MOE_F8E5M2 },
  { MOE__DL_INT, 64, MOE_I64 },
  { MOE__DL_INT, 32, MOE_I32 },
  { MOE__DL_UINT, 8, MOE_U8 },
  { MOE__DL_BOOL, 8, MOE_BOOL },
};
enum { TYPES = sizeof types / sizeof *types };

enum { ALIGNMENT = 256 }; /* of a copy, as DLPack wishes */

/* ---- import ------------------------------------------------------------------------------------------------------ */
struct moe_dlpack {
  moe_context *ctx;
  struct DLManagedTensor *unversioned; /* one of the two */
  struct DLManagedTensorVersioned *versioned;
  void *made;   /* a handle of the backend's over the producer's memory */
  moe_span own; /* memory of ours: a copy */
  moe_tensor t;
  unsigned char *host; /* where moe_dlpack_wait brings the values, with these strides; NULL: nowhere */
  int64_t stride[MOE_RANK_MAX];
};

/* dtype, shape and strides, checked; the place is still open. */
static moe_status read_layout(moe_tensor *t, const struct moe__dl_tensor *dl, const char *fn)
{
  const moe_span anywhere = { t, 0, UINT64_MAX };
  int type = 0;
  if (dl->lanes != 1) return moe__fail(MOE_ERR_INVALID, "%s: %u lanes, 1 is wanted", fn, (unsigned)dl->lanes);
  while (type < TYPES && (types[type].code != dl->code || types[type].bits != dl->bits)) type++;
  if (type == TYPES)
    return moe__fail(MOE_ERR_INVALID, "%s: there is no dtype for code %u of %u bits", fn, (unsigned)dl->code,
                     (unsigned)dl->bits);
  if (moe_tensor_packed(t, anywhere, types[type].dtype, dl->ndim, dl->shape)) return moe__fail_in(MOE_ERR_INVALID, fn);
  /* The stride of an extent of 1 has no meaning: anything may stand there; and none has where there is no element. */
  for (int d = 0; d < dl->ndim && dl->strides && moe_tensor_count(t); d++)
    if (dl->shape[d] != 1) t->stride[d] = dl->strides[d];
  return moe__want_array(fn, "the tensor", t, 0);
}

static int is_host(const struct moe__dl_tensor *dl)
{
  return dl->device_type == MOE__DL_CPU || dl->device_type == MOE__DL_CUDA_HOST;
}

static unsigned char *start_of(const struct moe__dl_tensor *dl)
{
  return (unsigned char *)dl->data + dl->byte_offset;
}

/* A packed tensor of our own with the values of host memory. */
static moe_status copy_in(moe_dlpack *d, moe_queue *q, const struct moe__dl_tensor *dl, int64_t flags)
{
  const moe_tensor from = d->t;
  const uint64_t bytes = (uint64_t)moe_tensor_count(&from) * moe_dtype_size(from.dtype);
  for (int i = 0; i < from.rank && !(flags & MOE_DLPACK_READ_ONLY); i++)
    if (from.shape[i] > 1 && !from.stride[i])
      return moe__fail(MOE_ERR_INVALID, "stride 0 in dimension %d of a tensor that is not MOE_DLPACK_READ_ONLY", i);
  MOE__TRY(moe__alloc(d->ctx, bytes, &d->own));
  MOE__TRY(moe_tensor_packed(&d->t, d->own, from.dtype, from.rank, from.shape));
  return moe__upload(q, &d->t, start_of(dl), from.dtype, from.stride);
}

/* Where the tensor lies, or lies now. */
static moe_status find_place(moe_dlpack *d, moe_queue *q, const struct moe__dl_tensor *dl, int64_t flags)
{
  const uint64_t bytes = moe_tensor_extent(&d->t);
  struct moe__foreign there = { dl->device_type, dl->device_id, dl->data, dl->byte_offset, bytes };
  struct moe__adopted here = { NULL, 0, 0 };
  moe_status st;
  if (!bytes) { /* no element; but a handle of NULL would be "not given" */
    MOE__TRY(moe__alloc(d->ctx, 0, &d->own));
    d->t.handle = d->own.handle;
    return MOE_OK;
  }
  if (!dl->data) return moe__fail(MOE_ERR_INVALID, "data is NULL");
  if (dl->byte_offset > UINT64_MAX / 2) return moe__fail(MOE_ERR_INVALID, "byte_offset is past 2^63-1");
  st = d->ctx->be->adopt(d->ctx->dev, &there, &here);
  if (st == MOE_ERR_UNSUPPORTED && is_host(dl)) {
    if (!(flags & MOE_DLPACK_COPY)) return moe__fail_in(st, "host memory without MOE_DLPACK_COPY");
    MOE__TRY(copy_in(d, q, dl, flags));
  } else {
    if (st) return st;
    d->t.handle = here.handle;
    d->t.offset = here.offset;
    if (here.is_new) d->made = here.handle;
    if (here.offset % moe_dtype_size(d->t.dtype))
      return moe__fail(MOE_ERR_INVALID, "the data is not aligned to %s's %llu bytes", moe_dtype_name(d->t.dtype),
                       (unsigned long long)moe_dtype_size(d->t.dtype));
  }
  if (is_host(dl) && !(flags & MOE_DLPACK_READ_ONLY) && (d->made || d->own.handle)) d->host = start_of(dl);
  return MOE_OK;
}

static void give_back(moe_dlpack *d)
{
  if (d->made) d->ctx->be->release(d->ctx->dev, d->made);
  moe__release(d->ctx, &d->own);
}

static moe_status import(moe_dlpack **holder, moe_tensor *out, moe_queue *q, const moe_dlpack *managed,
                         const struct moe__dl_tensor *dl, int64_t flags, const char *fn)
{
  moe_dlpack *d, new = *managed;
  moe_status st;
  MOE__TRY(read_layout(&new.t, dl, fn));
  memcpy(new.stride, new.t.stride, sizeof new.stride);
  new.ctx = q->ctx;
  st = find_place(&new, q, dl, flags);
  if (st) moe__fail_in(st, fn);
  d = st ? NULL : malloc(sizeof *d);
  if (!d) {
    give_back(&new);
    return st ? st : moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  }
  *d = new;
  moe__context_ref(d->ctx);
  *out = d->t;
  *holder = d;
  return MOE_OK;
}

static moe_status check_import(moe_dlpack **holder, moe_tensor *out, const moe_queue *q, const void *managed,
                               int64_t flags, const char *fn)
{
  if (holder) *holder = NULL;
  if (out) memset(out, 0, sizeof *out);
  if (!holder || !out || !q || !managed)
    return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn,
                     !holder ? "holder"
                     : !out  ? "out"
                     : !q    ? "queue"
                             : "managed");
  if (flags & ~(MOE_DLPACK_READ_ONLY | MOE_DLPACK_COPY))
    return moe__fail(MOE_ERR_INVALID, "%s: flags %lld", fn, (long long)flags);
  return MOE_OK;
}

moe_status moe_dlpack_import(moe_dlpack **holder, moe_tensor *out, moe_queue *q,
                             struct DLManagedTensorVersioned *managed, int64_t flags)
{
  static const char fn[] = "moe_dlpack_import";
  MOE__TRY(check_import(holder, out, q, managed, flags, fn));
  if (managed->major != MOE__DL_MAJOR)
    return moe__fail(MOE_ERR_VERSION, "%s: DLPack %u.%u, %d.x is wanted", fn, (unsigned)managed->major,
                     (unsigned)managed->minor, MOE__DL_MAJOR);
  if ((managed->flags & MOE__DL_READ_ONLY) && !(flags & MOE_DLPACK_READ_ONLY))
    return moe__fail(MOE_ERR_INVALID, "%s: the tensor is read-only and flags lack MOE_DLPACK_READ_ONLY", fn);
  return import(holder, out, q, &(moe_dlpack){ .versioned = managed }, &managed->t, flags, fn);
}

moe_status moe_dlpack_import_unversioned(moe_dlpack **holder, moe_tensor *out, moe_queue *q,
                                         struct DLManagedTensor *managed, int64_t flags)
{
  static const char fn[] = "moe_dlpack_import_unversioned";
  MOE__TRY(check_import(holder, out, q, managed, flags, fn));
  return import(holder, out, q, &(moe_dlpack){ .unversioned = managed }, &managed->t, flags, fn);
}

moe_status moe_dlpack_wait(moe_dlpack *d, moe_queue *q)
{
  static const char fn[] = "moe_dlpack_wait";
  moe_status st;
  if (!d || !q) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, d ? "queue" : "holder");
  if (d->ctx != q->ctx) return moe__fail(MOE_ERR_INVALID, "%s: the queue is of another context", fn);
  st = q->ctx->be->wait(q->be);
  if (!st && d->host) st = moe__download(q, d->host, d->stride, &d->t);
  return st ? moe__fail_in(st, fn) : MOE_OK;
}

void moe_dlpack_free(moe_dlpack *d)
{
  if (!d) return;
  give_back(d);
  if (d->versioned && d->versioned->deleter) d->versioned->deleter(d->versioned);
  if (d->unversioned && d->unversioned->deleter) d->unversioned->deleter(d->unversioned);
  moe__context_unref(d->ctx);
  free(d);
}

/* ---- export ------------------------------------------------------------------------------------------------------ */
struct exported {
  struct DLManagedTensorVersioned dl;
  int64_t shape[MOE_RANK_MAX], stride[MOE_RANK_MAX];
  moe_context *ctx;
  void (*release)(void *user);
  void *user;
  unsigned char copy[];
};

static void delete_exported(struct DLManagedTensorVersioned *dl)
{
  struct exported *e = dl->manager_ctx;
  if (e->release) e->release(e->user);
  moe__context_unref(e->ctx);
  free(e);
}

/* The packed values of t behind the struct. */
static moe_status copy_out(struct exported *e, moe_queue *q, const moe_tensor *t)
{
  moe_tensor packed;
  unsigned char *data = e->copy + (ALIGNMENT - (uintptr_t)e->copy % ALIGNMENT) % ALIGNMENT;
  MOE__TRY(moe_tensor_packed(&packed, (moe_span){ data, 0, UINT64_MAX }, t->dtype, t->rank, t->shape));
  MOE__TRY(moe__download(q, data, packed.stride, t));
  memcpy(e->stride, packed.stride, sizeof e->stride);
  e->dl.flags |= MOE__DL_IS_COPIED;
  e->dl.t.data = data;
  e->dl.t.byte_offset = 0;
  e->dl.t.device_type = MOE__DL_CPU;
  e->dl.t.device_id = 0;
  return MOE_OK;
}

moe_status moe_dlpack_export(struct DLManagedTensorVersioned **out, moe_queue *q, const moe_tensor *t, int64_t flags,
                             void (*release)(void *user), void *user)
{
  static const char fn[] = "moe_dlpack_export";
  struct exported *e;
  uint64_t room;
  int type = 0;
  moe_status st = MOE_OK;
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (!q || !t) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, q ? "t" : "queue");
  if (flags & ~(MOE_DLPACK_READ_ONLY | MOE_DLPACK_COPY))
    return moe__fail(MOE_ERR_INVALID, "%s: flags %lld", fn, (long long)flags);
  MOE__TRY(moe__want_array(fn, "t", t, 0));
  while (types[type].dtype != t->dtype) type++;
  room = flags & MOE_DLPACK_COPY ? (uint64_t)moe_tensor_count(t) * moe_dtype_size(t->dtype) + ALIGNMENT : 0;
  e = malloc(sizeof *e + room);
  if (!e) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  *e = (struct exported){ .ctx = q->ctx, .release = release, .user = user };
  e->dl.major = MOE__DL_MAJOR;
  e->dl.minor = MOE__DL_MINOR;
  e->dl.manager_ctx = e;
  e->dl.deleter = delete_exported;
  if (flags & MOE_DLPACK_READ_ONLY) e->dl.flags |= MOE__DL_READ_ONLY;
  memcpy(e->shape, t->shape, sizeof e->shape);
  memcpy(e->stride, t->stride, sizeof e->stride);
  e->dl.t = (struct moe__dl_tensor){ t->handle,
                                     q->ctx->info->dl_type,
                                     q->ctx->info->dl_id,
                                     t->rank,
                                     types[type].code,
                                     types[type].bits,
                                     1,
                                     e->shape,
                                     e->stride,
                                     t->offset };
  if (flags & MOE_DLPACK_COPY) st = copy_out(e, q, t);
  if (st) {
    free(e);
    return moe__fail_in(st, fn);
  }
  moe__context_ref(e->ctx);
  *out = &e->dl;
  return MOE_OK;
}
