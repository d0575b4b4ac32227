/* t_dlpack.c - DLPack in and out: the layout of its structs, every dtype, shapes and strides, versions, read-only tensors,
   memory of the device, of the host in place and by copy, refusals, and deleters that are called once or not at all. */
#include "moe_test.h"

#include "config.h"
#include "core/backend.h"
#include "core/dlpack.h"

#include <moe/cuda.h>
#include <moe/dlpack.h>
#include <moe/opencl.h>

#if MOE_HAVE_OPENCL
#include "opencl/loader.h"
#endif

enum { N = 24 };

/* As the specification lays them out where pointers have 64 bits. */
_Static_assert(sizeof(struct moe__dl_tensor) == 48, "DLTensor");
_Static_assert(offsetof(struct moe__dl_tensor, device_type) == 8, "DLTensor.device");
_Static_assert(offsetof(struct moe__dl_tensor, ndim) == 16, "DLTensor.ndim");
_Static_assert(offsetof(struct moe__dl_tensor, code) == 20, "DLTensor.dtype");
_Static_assert(offsetof(struct moe__dl_tensor, lanes) == 22, "DLTensor.dtype.lanes");
_Static_assert(offsetof(struct moe__dl_tensor, shape) == 24, "DLTensor.shape");
_Static_assert(offsetof(struct moe__dl_tensor, byte_offset) == 40, "DLTensor.byte_offset");
_Static_assert(sizeof(struct DLManagedTensor) == 64, "DLManagedTensor");
_Static_assert(offsetof(struct DLManagedTensor, manager_ctx) == 48, "DLManagedTensor.manager_ctx");
_Static_assert(sizeof(struct DLManagedTensorVersioned) == 80, "DLManagedTensorVersioned");
_Static_assert(offsetof(struct DLManagedTensorVersioned, manager_ctx) == 8, "DLManagedTensorVersioned.manager_ctx");
_Static_assert(offsetof(struct DLManagedTensorVersioned, deleter) == 16, "DLManagedTensorVersioned.deleter");
_Static_assert(offsetof(struct DLManagedTensorVersioned, flags) == 24, "DLManagedTensorVersioned.flags");
_Static_assert(offsetof(struct DLManagedTensorVersioned, t) == 32, "DLManagedTensorVersioned.dl_tensor");

static moe_context *ctx;
static moe_queue *q;
static moe_span memory; /* N floats of the device: 0, 1, 2, ... */

/* ---- a producer -------------------------------------------------------------------------------------------------- */
static int deleted;
static void delete (struct DLManagedTensorVersioned *self)
{
  assert_ptr_equal(self->manager_ctx, &deleted);
  deleted++;
}
static void delete_unversioned(struct DLManagedTensor *self)
{
  assert_ptr_equal(self->manager_ctx, &deleted);
  deleted++;
}

static int64_t shape[8], stride[8];
static struct moe__dl_tensor at(int device_type, int device_id, void *data, int rank, const int64_t *extents,
                                const int64_t *strides)
{
  struct moe__dl_tensor t = { data, device_type, device_id, rank, MOE__DL_FLOAT, 32, 1, shape, NULL, 0 };
  memcpy(shape, extents, (size_t)rank * sizeof *shape);
  if (strides) {
    memcpy(stride, strides, (size_t)rank * sizeof *stride);
    t.strides = stride;
  }
  return t;
}
#define D(...) ((const int64_t[]){ __VA_ARGS__ })

/* On the device under test. */
static struct moe__dl_tensor on_device(int rank, const int64_t *extents, const int64_t *strides)
{
  return at(ctx->info->dl_type, ctx->info->dl_id, memory.handle, rank, extents, strides);
}
static struct DLManagedTensorVersioned managed(struct moe__dl_tensor t)
{
  return (struct DLManagedTensorVersioned){ 1, 1, &deleted, delete, 0, t };
}

static int setup(void **state)
{
  float values[N];
  (void)state;
  for (int i = 0; i < N; i++) values[i] = (float)i;
  if (moe_span_write(q, memory, values, sizeof values)) return -1;
  deleted = 0;
  return 0;
}

/* The values of a tensor in the order of its indices, through a copy. */
static void values_of(float *values, const moe_tensor *t)
{
  struct DLManagedTensorVersioned *copy;
  OK(moe_dlpack_export(&copy, q, t, MOE_DLPACK_COPY, NULL, NULL));
  memcpy(values, copy->t.data, (size_t)moe_tensor_count(t) * sizeof *values);
  copy->deleter(copy);
}

/* ---- the struct -------------------------------------------------------------------------------------------------- */
static const struct {
  int code, bits;
  int64_t dtype;
} types[] = {
  { 2, 64, MOE_F64 },    { 2, 32, MOE_F32 }, { 4, 16, MOE_BF16 }, { 2, 16, MOE_F16 }, { 10, 8, MOE_F8E4M3 },
  { 12, 8, MOE_F8E5M2 }, { 0, 64, MOE_I64 }, { 0, 32, MOE_I32 },  { 1, 8, MOE_U8 },   { 6, 8, MOE_BOOL },
};

static void every_dtype_both_ways(void **state)
{
  (void)state;
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    struct DLManagedTensorVersioned m = managed(on_device(2, D(2, 3), NULL)), *back;
    moe_dlpack *holder;
    moe_tensor t;
    m.t.code = (uint8_t)types[i].code;
    m.t.bits = (uint8_t)types[i].bits;
    m.t.byte_offset = 8;
    OK(moe_dlpack_import(&holder, &t, q, &m, 0));
    assert_int_equal(t.dtype, types[i].dtype);
    assert_int_equal(t.rank, 2);
    assert_true(t.shape[0] == 2 && t.shape[1] == 3 && t.stride[0] == 3 && t.stride[1] == 1);
    OK(moe_dlpack_export(&back, q, &t, 0, NULL, NULL));
    assert_int_equal(back->t.code, types[i].code);
    assert_int_equal(back->t.bits, types[i].bits);
    assert_int_equal(back->t.lanes, 1);
    back->deleter(back);
    moe_dlpack_free(holder);
  }
  /* And none of the others. */
  for (int code = 0; code < 20; code++)
    for (int bits = 0; bits <= 128; bits += bits < 8 ? 1 : 8) {
      struct DLManagedTensorVersioned m = managed(on_device(1, D(1), NULL));
      moe_dlpack *holder;
      moe_tensor t;
      int known = 0;
      for (size_t i = 0; i < sizeof types / sizeof *types; i++) known |= types[i].code == code && types[i].bits == bits;
      m.t.code = (uint8_t)code;
      m.t.bits = (uint8_t)bits;
      if (!known) FAILS(MOE_ERR_INVALID, "no dtype for code", moe_dlpack_import(&holder, &t, q, &m, 0));
    }
}

static void shapes_and_strides(void **state)
{
  static const struct {
    int rank;
    int64_t extents[6], given[6], strides[6];
    int is_packed; /* strides are NULL */
    uint64_t offset;
    float first, last;
  } each[] = {
    { 0, { 0 }, { 0 }, { 0 }, 1, 12, 3, 3 },
    { 1, { 5 }, { 0 }, { 1 }, 1, 0, 0, 4 },
    { 2, { 4, 6 }, { 0 }, { 6, 1 }, 1, 0, 0, 23 },
    { 2, { 3, 6 }, { 0 }, { 6, 1 }, 1, 24, 6, 23 },
    { 2, { 6, 4 }, { 1, 6 }, { 1, 6 }, 0, 0, 0, 23 },                  /* transposed */
    { 2, { 4, 2 }, { 6, 3 }, { 6, 3 }, 0, 4, 1, 22 },                  /* every third column */
    { 2, { 3, 5 }, { 0, 1 }, { 0, 1 }, 0, 0, 0, 4 },                   /* a row, repeated */
    { 3, { 1, 4, 1 }, { -7, 2, INT64_MAX }, { 4, 2, 1 }, 0, 0, 0, 6 }, /* what stands beside 1 is nothing */
    { 6, { 1, 2, 1, 3, 2, 2 }, { 0 }, { 24, 12, 12, 4, 2, 1 }, 1, 0, 0, 23 },
  };
  (void)state;
  for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
    struct DLManagedTensorVersioned m =
        managed(on_device(each[i].rank, each[i].extents, each[i].is_packed ? NULL : each[i].given));
    float values[N] = { 0 };
    moe_dlpack *holder;
    moe_tensor t;
    m.t.byte_offset = memory.offset + each[i].offset;
    if (!each[i].rank) m.t.shape = NULL;
    OK(moe_dlpack_import(&holder, &t, q, &m, 0));
    assert_int_equal(t.rank, each[i].rank);
    for (int d = 0; d < t.rank; d++) {
      assert_int_equal(t.shape[d], each[i].extents[d]);
      assert_int_equal(t.stride[d], each[i].strides[d]);
    }
    values_of(values, &t);
    assert_near((double)values[0], (double)each[i].first, 0);
    assert_near((double)values[moe_tensor_count(&t) - 1], (double)each[i].last, 0);
    moe_dlpack_free(holder);
  }
  assert_int_equal(deleted, sizeof each / sizeof *each);
}

static void tensors_without_elements(void **state)
{
  const int places[] = { ctx->info->dl_type, MOE__DL_CPU, 7 };
  (void)state;
  for (int i = 0; i < 3; i++) {
    struct DLManagedTensorVersioned m = managed(at(places[i], 3, NULL, 3, D(2, 0, 4), i == 1 ? D(-4, 9, 1) : NULL)), *e;
    moe_dlpack *holder;
    moe_tensor t;
    OK(moe_dlpack_import(&holder, &t, q, &m, 0));
    assert_non_null(t.handle);
    assert_int_equal(moe_tensor_count(&t), 0);
    assert_true(moe_tensor_is_packed(&t));
    OK(moe_dlpack_wait(holder, q));
    OK(moe_dlpack_export(&e, q, &t, i ? MOE_DLPACK_COPY : 0, NULL, NULL));
    assert_int_equal(e->t.shape[1], 0);
    e->deleter(e);
    moe_dlpack_free(holder);
  }
  assert_int_equal(deleted, 3);
}

static void versions(void **state)
{
  struct DLManagedTensorVersioned m = managed(on_device(1, D(4), NULL));
  moe_dlpack *holder;
  moe_tensor t;
  (void)state;
  const uint32_t others[] = { 0, 2, UINT32_MAX };
  for (int i = 0; i < 3; i++) {
    m.major = others[i];
    FAILS(MOE_ERR_VERSION, "1.x is wanted", moe_dlpack_import(&holder, &t, q, &m, 0));
    assert_true(!holder && !t.handle && !deleted);
  }
  m.major = 1;
  m.minor = 99; /* minor versions add what can be passed over */
  m.flags = ~(uint64_t)1;
  OK(moe_dlpack_import(&holder, &t, q, &m, 0));
  moe_dlpack_free(holder);
  assert_int_equal(deleted, 1);

  struct DLManagedTensor old = { on_device(1, D(4), NULL), &deleted, delete_unversioned };
  float values[4];
  OK(moe_dlpack_import_unversioned(&holder, &t, q, &old, 0));
  values_of(values, &t);
  assert_near((double)values[3], 3, 0);
  moe_dlpack_free(holder);
  assert_int_equal(deleted, 2);
  old.deleter = NULL;
  OK(moe_dlpack_import_unversioned(&holder, &t, q, &old, MOE_DLPACK_READ_ONLY));
  moe_dlpack_free(holder);
  assert_int_equal(deleted, 2);
}

static void read_only_is_for_those_who_ask(void **state)
{
  struct DLManagedTensorVersioned m = managed(on_device(1, D(4), NULL));
  moe_dlpack *holder;
  moe_tensor t;
  (void)state;
  m.flags = MOE__DL_READ_ONLY;
  FAILS(MOE_ERR_INVALID, "read-only", moe_dlpack_import(&holder, &t, q, &m, 0));
  FAILS(MOE_ERR_INVALID, "read-only", moe_dlpack_import(&holder, &t, q, &m, MOE_DLPACK_COPY));
  OK(moe_dlpack_import(&holder, &t, q, &m, MOE_DLPACK_READ_ONLY));
  moe_dlpack_free(holder);
  assert_int_equal(deleted, 1);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */
static void refused_imports_take_nothing(void **state)
{
  struct DLManagedTensorVersioned m = managed(on_device(1, D(4), NULL));
  moe_dlpack *holder = (void *)&m;
  moe_tensor t = { .handle = &m };
  (void)state;
  FAILS(MOE_ERR_INVALID, "holder is NULL", moe_dlpack_import(NULL, &t, q, &m, 0));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_dlpack_import(&holder, NULL, q, &m, 0));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_dlpack_import(&holder, &t, NULL, &m, 0));
  FAILS(MOE_ERR_INVALID, "managed is NULL", moe_dlpack_import(&holder, &t, q, NULL, 0));
  FAILS(MOE_ERR_INVALID, "managed is NULL", moe_dlpack_import_unversioned(&holder, &t, q, NULL, 0));
  FAILS(MOE_ERR_INVALID, "flags 4", moe_dlpack_import(&holder, &t, q, &m, 4));
  FAILS(MOE_ERR_INVALID, "flags -1", moe_dlpack_import(&holder, &t, q, &m, -1));
  assert_true(!holder && !t.handle);

#define REFUSED(status, text, change)                                                                                  \
  do {                                                                                                                 \
    m = managed(on_device(2, D(2, 3), D(3, 1)));                                                                       \
    change;                                                                                                            \
    holder = (void *)&m;                                                                                               \
    t.handle = &m;                                                                                                     \
    FAILS(status, text, moe_dlpack_import(&holder, &t, q, &m, MOE_DLPACK_COPY));                                       \
    assert_true(!holder && !t.handle);                                                                                 \
  } while (0)
  REFUSED(MOE_ERR_INVALID, "4 lanes", m.t.lanes = 4);
  REFUSED(MOE_ERR_INVALID, "0 lanes", m.t.lanes = 0);
  REFUSED(MOE_ERR_INVALID, "code 5 of 64 bits", (m.t.code = 5, m.t.bits = 64));
  REFUSED(MOE_ERR_INVALID, "rank 7", m.t.ndim = 7);
  REFUSED(MOE_ERR_INVALID, "rank -1", m.t.ndim = -1);
  REFUSED(MOE_ERR_INVALID, "no shape", m.t.shape = NULL);
  REFUSED(MOE_ERR_INVALID, "shape[1] is -3", m.t.shape[1] = -3);
  REFUSED(MOE_ERR_INVALID, "stride -3", m.t.strides[0] = -3);
  REFUSED(MOE_ERR_INVALID, "2^63-1", (m.t.shape[0] = INT64_MAX / 2, m.t.shape[1] = 3));
  REFUSED(MOE_ERR_INVALID, "2^63-1", m.t.strides[0] = INT64_MAX / 2);
  REFUSED(MOE_ERR_INVALID, "stride 9223372036854775807", (m.t.shape[0] = 3, m.t.strides[0] = INT64_MAX));
  REFUSED(MOE_ERR_INVALID, "data is NULL", m.t.data = NULL);
  REFUSED(MOE_ERR_INVALID, "byte_offset", m.t.byte_offset = UINT64_MAX - 3);
  REFUSED(MOE_ERR_INVALID, "not aligned", m.t.byte_offset = 2);
  REFUSED(MOE_ERR_UNSUPPORTED, "device type 10", m.t.device_type = 10); /* ROCm */
  assert_int_equal(deleted, 0);
}

static void exports_refuse(void **state)
{
  const int64_t extents[2] = { 2, 3 };
  struct DLManagedTensorVersioned *out = (void *)&out;
  moe_tensor t, bad;
  (void)state;
  OK(moe_tensor_packed(&t, memory, MOE_F32, 2, extents));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_dlpack_export(NULL, q, &t, 0, NULL, NULL));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_dlpack_export(&out, NULL, &t, 0, NULL, NULL));
  assert_null(out);
  FAILS(MOE_ERR_INVALID, "t is NULL", moe_dlpack_export(&out, q, NULL, 0, NULL, NULL));
  FAILS(MOE_ERR_INVALID, "flags 8", moe_dlpack_export(&out, q, &t, 8, NULL, NULL));
  bad = t, bad.dtype = 99;
  FAILS(MOE_ERR_INVALID, "dtype 99", moe_dlpack_export(&out, q, &bad, 0, NULL, NULL));
  bad = t, bad.rank = 7;
  FAILS(MOE_ERR_INVALID, "rank 7", moe_dlpack_export(&out, q, &bad, 0, NULL, NULL));
  bad = t, bad.handle = NULL;
  FAILS(MOE_ERR_INVALID, "not given", moe_dlpack_export(&out, q, &bad, 0, NULL, NULL));
  bad = t, bad.shape[0] = -2;
  FAILS(MOE_ERR_INVALID, "extent -2", moe_dlpack_export(&out, q, &bad, 0, NULL, NULL));
}

/* ---- host memory ------------------------------------------------------------------------------------------------- */
/* Read through the tensor, written through it, and back: what lies between its elements stays. */
static void use_host_memory(int64_t flags, int expect_copy)
{
  static float host[64];
  const float *const before = host + 7; /* aligned to no more than an element */
  struct DLManagedTensorVersioned m;
  float values[N];
  moe_dlpack *holder;
  moe_tensor t;

  for (int i = 0; i < 64; i++) host[i] = (float)i;
  m = managed(at(MOE__DL_CPU, 0, host, 1, D(20), NULL));
  m.t.byte_offset = 7 * sizeof *host;
  OK(moe_dlpack_import(&holder, &t, q, &m, flags));
  values_of(values, &t);
  assert_memory_equal(values, before, 20 * sizeof *values);
  OK(moe_tensor_fill(q, &t, -1));
  OK(moe_dlpack_wait(holder, q));
  for (int i = 0; i < 64; i++) assert_near((double)host[i], i >= 7 && i < 27 ? -1 : i, 0);
  moe_dlpack_free(holder);
  assert_int_equal(deleted, 1);

  /* Columns 2 and 3 of rows of 8, transposed; another thread's values between them are not ours to write. */
  for (int i = 0; i < 64; i++) host[i] = (float)i;
  m = managed(at(MOE__DL_CUDA_HOST, 0, host + 2, 2, D(2, 4), D(1, 8)));
  OK(moe_dlpack_import(&holder, &t, q, &m, flags));
  assert_int_equal(moe_tensor_is_packed(&t), expect_copy);
  values_of(values, &t);
  const float wanted[8] = { 2, 10, 18, 26, 3, 11, 19, 27 };
  assert_memory_equal(values, wanted, sizeof wanted);
  host[4] = host[12] = 1000; /* after the import */
  moe_tensor all = t;
  all.rank = 1;
  if (expect_copy) {
    all.shape[0] = 8;
    all.stride[0] = 1;
    OK(moe_tensor_fill(q, &all, 5));
  } else {
    all.shape[0] = 2;
    all.stride[0] = 1;
    for (int i = 0; i < 4; i++, all.offset += 8 * sizeof *host) OK(moe_tensor_fill(q, &all, 5));
  }
  OK(moe_dlpack_wait(holder, q));
  for (int i = 0; i < 64; i++)
    assert_near((double)host[i], i < 32 && (i % 8 == 2 || i % 8 == 3) ? 5 : i == 4 || i == 12 ? 1000 : i, 0);
  moe_dlpack_free(holder);

  /* Imported to be read: a copy of it is nobody's business, and in place nothing is written either. */
  m = managed(at(MOE__DL_CPU, 0, host, 2, D(3, 4), D(0, 1)));
  m.flags = MOE__DL_READ_ONLY;
  OK(moe_dlpack_import(&holder, &t, q, &m, flags | MOE_DLPACK_READ_ONLY));
  values_of(values, &t);
  assert_near((double)values[9], 1, 0);
  if (expect_copy) OK(moe_tensor_fill(q, &t, 9));
  OK(moe_dlpack_wait(holder, q));
  assert_near((double)host[1], 1, 0);
  moe_dlpack_free(holder);
  assert_int_equal(deleted, 3);

  m = managed(at(MOE__DL_CPU, 0, (char *)host + 1, 1, D(4), NULL));
  if (expect_copy) { /* the copy is aligned */
    OK(moe_dlpack_import(&holder, &t, q, &m, flags));
    moe_dlpack_free(holder);
    m = managed(at(MOE__DL_CPU, 0, host, 2, D(3, 4), D(0, 1)));
    FAILS(MOE_ERR_INVALID, "stride 0 in dimension 0", moe_dlpack_import(&holder, &t, q, &m, flags));
    m = managed(at(MOE__DL_CPU, 0, host, 1, D(4), NULL));
    FAILS(MOE_ERR_UNSUPPORTED, "MOE_DLPACK_COPY", moe_dlpack_import(&holder, &t, q, &m, 0));
    assert_int_equal(deleted, 4);
  } else {
    FAILS(MOE_ERR_INVALID, "not aligned", moe_dlpack_import(&holder, &t, q, &m, flags));
    assert_int_equal(deleted, 3);
  }
}

static void host_memory_in_place(void **state)
{
  (void)state;
  if (ctx->info->pub.kind != MOE_DEVICE_CPU) skip();
  use_host_memory(0, 0);
  deleted = 0;
  use_host_memory(MOE_DLPACK_COPY, 0); /* may be copied, need not be */
}

static moe_status adopt_nothing(struct moe__dev *dev, const struct moe__foreign *there, struct moe__adopted *here)
{
  (void)dev;
  (void)here;
  return moe__fail(MOE_ERR_UNSUPPORTED, "device type %d", there->dl_type);
}
static void host_memory_by_copy(void **state)
{
  const struct moe__backend *be = ctx->be;
  struct moe__backend without = *be;
  (void)state;
  without.adopt = adopt_nothing;
  ctx->be = &without;
  use_host_memory(MOE_DLPACK_COPY, 1);
  ctx->be = be;
}

static void a_queue_of_another_context(void **state)
{
  struct DLManagedTensorVersioned m = managed(on_device(1, D(4), NULL));
  moe_context *other;
  moe_queue *queue;
  moe_dlpack *holder;
  moe_tensor t;
  (void)state;
  if (!test_open(&other, &queue)) fail();
  OK(moe_dlpack_import(&holder, &t, q, &m, 0));
  FAILS(MOE_ERR_INVALID, "another context", moe_dlpack_wait(holder, queue));
  FAILS(MOE_ERR_INVALID, "holder is NULL", moe_dlpack_wait(NULL, q));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_dlpack_wait(holder, NULL));
  OK(moe_dlpack_wait(holder, q));
  moe_dlpack_free(holder);
  moe_dlpack_free(NULL);
  test_close(other, queue);
}

/* ---- export ------------------------------------------------------------------------------------------------------ */
static int released;
static void release(void *user)
{
  assert_ptr_equal(user, &released);
  released++;
}

static void exports_are_released_once(void **state)
{
  const int64_t extents[2] = { 4, 6 };
  struct DLManagedTensorVersioned *out;
  moe_tensor t;
  (void)state;
  OK(moe_tensor_packed(&t, memory, MOE_F32, 2, extents));
  OK(moe_tensor_transpose(&t, &t, 0, 1));
  OK(moe_tensor_slice(&t, &t, 0, 1, 4));
  const long refs = ctx->refs;
  for (int copy = 0; copy < 2; copy++) {
    released = 0;
    OK(moe_dlpack_export(&out, q, &t, copy ? MOE_DLPACK_COPY : MOE_DLPACK_READ_ONLY, release, &released));
    assert_int_equal(ctx->refs, refs + 1);
    assert_int_equal(out->major, 1);
    assert_int_equal(out->flags, copy ? MOE__DL_IS_COPIED : MOE__DL_READ_ONLY);
    assert_int_equal(out->t.ndim, 2);
    assert_true(out->t.shape[0] == 3 && out->t.shape[1] == 4);
    if (copy) {
      const float *values = out->t.data;
      assert_int_equal(out->t.device_type, MOE__DL_CPU);
      assert_int_equal((uintptr_t)values % 256, 0);
      assert_true(out->t.strides[0] == 4 && out->t.strides[1] == 1);
      for (int i = 0; i < 3; i++)
        for (int k = 0; k < 4; k++) assert_near((double)values[4 * i + k], 6 * k + 1 + i, 0);
    } else {
      assert_int_equal(out->t.device_type, ctx->info->dl_type);
      assert_int_equal(out->t.device_id, ctx->info->dl_id);
      assert_ptr_equal(out->t.data, t.handle);
      assert_int_equal(out->t.byte_offset, t.offset);
      assert_true(out->t.strides[0] == 1 && out->t.strides[1] == 6);
    }
    assert_int_equal(released, 0);
    out->deleter(out);
    assert_int_equal(released, 1);
    assert_int_equal(ctx->refs, refs);
  }
}

static void out_and_in_again(void **state)
{
  const int64_t extents[1] = { N };
  struct DLManagedTensorVersioned *out;
  moe_tensor t, back;
  moe_dlpack *holder;
  float values[N];
  (void)state;
  released = 0;
  OK(moe_tensor_packed(&t, memory, MOE_F32, 1, extents));
  OK(moe_dlpack_export(&out, q, &t, 0, release, &released));
  OK(moe_dlpack_import(&holder, &back, q, out, 0));
  OK(moe_tensor_fill(q, &back, 2.5));
  values_of(values, &t);
  for (int i = 0; i < N; i++) assert_near((double)values[i], 2.5, 0);
  moe_dlpack_free(holder);
  assert_int_equal(released, 1);
}

/* ---- the runtimes ------------------------------------------------------------------------------------------------ */
static void queues_give_their_own(void **state)
{
  const int is_cuda = !strcmp(ctx->be->name, "cuda");
  struct CUstream_st *stream = (void *)&stream;
  struct _cl_command_queue *queue = (void *)&queue;
  moe_queue *lent;
  (void)state;
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_queue_to_cuda(NULL, q));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_queue_to_opencl(NULL, q));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_queue_to_cuda(&stream, NULL));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_queue_to_opencl(&queue, NULL));
  if (is_cuda) {
    FAILS(MOE_ERR_INVALID, "wanted opencl", moe_queue_to_opencl(&queue, q));
    assert_null(queue);
    OK(moe_queue_to_cuda(&stream, q));
    assert_non_null(stream);
    OK(moe_queue_from_cuda(&lent, ctx, stream));
  } else {
    FAILS(MOE_ERR_INVALID, "wanted cuda", moe_queue_to_cuda(&stream, q));
    assert_null(stream);
    OK(moe_queue_to_opencl(&queue, q));
    assert_non_null(queue);
    OK(moe_queue_from_opencl(&lent, ctx, queue));
    queue = NULL;
    OK(moe_queue_to_opencl(&queue, lent));
    assert_non_null(queue);
  }
  moe_queue_free(lent);
}

#if MOE_HAVE_OPENCL
static void memory_of_another_context(void **state)
{
  struct _cl_command_queue *queue;
  struct DLManagedTensorVersioned m;
  cl_device_id device;
  cl_context mine, context;
  moe_dlpack *holder;
  moe_tensor t;
  (void)state;
  if (strcmp(ctx->be->name, "opencl")) skip();
  OK(moe_queue_to_opencl(&queue, q));
  assert_int_equal(moe__cl.clGetCommandQueueInfo(queue, CL_QUEUE_DEVICE, sizeof device, &device, NULL), 0);
  assert_int_equal(moe__cl.clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof mine, &mine, NULL), 0);
  context = moe__cl.clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
  cl_mem theirs = moe__cl.clCreateBuffer(context, CL_MEM_READ_WRITE, 64, NULL, NULL);
  cl_mem ours = moe__cl.clCreateBuffer(mine, CL_MEM_READ_WRITE, 64, NULL, NULL);
  assert_true(context && theirs && ours);
  m = managed(at(MOE__DL_OPENCL, 0, theirs, 1, D(4), NULL));
  FAILS(MOE_ERR_INVALID, "another cl_context", moe_dlpack_import(&holder, &t, q, &m, 0));
  m = managed(at(MOE__DL_OPENCL, 5, ours, 1, D(16), NULL)); /* the id says nothing */
  OK(moe_dlpack_import(&holder, &t, q, &m, 0));
  moe__cl.clReleaseMemObject(ours); /* retained */
  OK(moe_tensor_fill(q, &t, 1));
  OK(moe_dlpack_wait(holder, q));
  m.t.byte_offset = 4;
  moe_dlpack *second;
  FAILS(MOE_ERR_INVALID, "has 64 bytes", moe_dlpack_import(&second, &t, q, &m, 0));
  m.t.byte_offset = 68;
  FAILS(MOE_ERR_INVALID, "has 64 bytes", moe_dlpack_import(&second, &t, q, &m, 0));
  moe_dlpack_free(holder);
  moe__cl.clReleaseMemObject(theirs);
  moe__cl.clReleaseContext(context);
  assert_int_equal(deleted, 1);
}
#endif

static void memory_that_is_not_the_gpus(void **state)
{
  float host[4] = { 0 };
  struct DLManagedTensorVersioned m;
  moe_dlpack *holder;
  moe_tensor t;
  (void)state;
  if (strcmp(ctx->be->name, "cuda")) skip();
  m = managed(at(MOE__DL_CUDA, ctx->info->dl_id, host, 1, D(4), NULL));
  FAILS(MOE_ERR_INVALID, "data", moe_dlpack_import(&holder, &t, q, &m, MOE_DLPACK_COPY));
  m = managed(on_device(1, D(4), NULL));
  m.t.device_id = ctx->info->dl_id + 1;
  FAILS(MOE_ERR_INVALID, "says that it lies on device", moe_dlpack_import(&holder, &t, q, &m, 0));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, setup)
  const struct CMUnitTest tests[] = {
    TEST(every_dtype_both_ways),
    TEST(shapes_and_strides),
    TEST(tensors_without_elements),
    TEST(versions),
    TEST(read_only_is_for_those_who_ask),
    TEST(refused_imports_take_nothing),
    TEST(exports_refuse),
    TEST(host_memory_in_place),
    TEST(host_memory_by_copy),
    TEST(a_queue_of_another_context),
    TEST(exports_are_released_once),
    TEST(out_and_in_again),
    TEST(queues_give_their_own),
#if MOE_HAVE_OPENCL
    TEST(memory_of_another_context),
#endif
    TEST(memory_that_is_not_the_gpus),
  };
  if (!test_open(&ctx, &q)) return 77;
  int rc = moe_span_alloc(&memory, ctx, N * 4) ? 1 : TEST_MAIN(tests);
  moe_span_free(ctx, &memory);
  test_close(ctx, q);
  return rc;
}
