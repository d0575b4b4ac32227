/* fake.c - see fake.h. */
#include "fake.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

struct fake fake;

struct moe__dev {
  struct moe__dev_info info;
};
struct moe__queue_be {
  struct moe__dev *dev;
};
struct block { /* a handle of device memory */
  struct block *next;
  uint64_t bytes;
  unsigned char data[];
};

static struct block *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int alive(const void *handle)
{
  pthread_mutex_lock(&lock);
  const struct block *b = blocks;
  while (b && b != handle) b = b->next;
  pthread_mutex_unlock(&lock);
  return b != NULL;
}

static moe_status call(moe_status failure, const char *what)
{
  long n = atomic_fetch_add(&fake.calls, 1) + 1;
  if (n != fake.fail_at) return MOE_OK;
  fake.failed = failure;
  return moe__fail(failure, "fake: call %ld, %s, was told to fail", n, what);
}

void *fake_data(void *handle)
{
  return ((struct block *)handle)->data;
}

/* ---- devices ----------------------------------------------------------------------------------------------------- */
static moe_status fake_count(int *n)
{
  *n = 1;
  return MOE_OK;
}

static moe_status fake_probe(int index, moe_device_info *out)
{
  (void)index;
  (void)out;
  return MOE_OK;
}

static moe_status fake_dev_open(struct moe__dev **out, const struct moe__open *how)
{
  (void)how;
  *out = calloc(1, sizeof **out);
  if (!*out) return moe__fail(MOE_ERR_NO_MEMORY, "fake: no host memory");
  struct moe__dev_info *info = &(*out)->info;
  info->pub = moe_device_info_init();
  strcpy(info->pub.backend, "fake");
  strcpy(info->pub.id, "fake:0");
  strcpy(info->pub.name, "no device at all");
  info->pub.kind = MOE_DEVICE_CPU;
  info->pub.compute_units = 2;
  info->pub.fp64 = !fake.no_fp64;
  info->vector_width = info->reduce_local = 1;
  info->dl_type = FAKE_DL_TYPE;
  fake.devices++;
  return MOE_OK;
}

static void fake_close(struct moe__dev *dev)
{
  fake.devices--;
  free(dev);
}

static const struct moe__dev_info *fake_info(const struct moe__dev *dev)
{
  return &dev->info;
}

/* ---- memory and queues ------------------------------------------------------------------------------------------- */
static moe_status fake_alloc(struct moe__dev *dev, uint64_t bytes, void **handle)
{
  (void)dev;
  *handle = NULL;
  MOE__TRY(call(MOE_ERR_NO_MEMORY, "alloc"));
  struct block *b = malloc(sizeof *b + bytes);
  if (!b) return moe__fail(MOE_ERR_NO_MEMORY, "fake: no host memory");
  memset(b->data, 0xff, bytes);
  b->bytes = bytes;
  pthread_mutex_lock(&lock);
  b->next = blocks;
  blocks = b;
  pthread_mutex_unlock(&lock);
  fake.blocks++;
  fake.bytes += (long)bytes;
  *handle = b;
  return MOE_OK;
}

static void fake_release(struct moe__dev *dev, void *handle)
{
  struct block **at = &blocks, *b = handle;
  (void)dev;
  pthread_mutex_lock(&lock);
  while (*at && *at != b) at = &(*at)->next;
  if (!*at) abort(); /* never given out, or given back before */
  *at = b->next;
  pthread_mutex_unlock(&lock);
  fake.blocks--;
  fake.bytes -= (long)b->bytes;
  free(b);
}

/* Its own blocks, as device type FAKE_DL_TYPE. */
static moe_status fake_adopt(struct moe__dev *dev, const struct moe__foreign *there, struct moe__adopted *here)
{
  (void)dev;
  MOE__TRY(call(MOE_ERR_BACKEND, "adopt"));
  if (there->dl_type != FAKE_DL_TYPE) return moe__fail(MOE_ERR_UNSUPPORTED, "fake: device type %d", there->dl_type);
  *here = (struct moe__adopted){ there->data, there->offset, 0 };
  return MOE_OK;
}

static moe_status fake_queue_open(struct moe__dev *dev, int is_lent, void *lent, struct moe__queue_be **out)
{
  (void)is_lent;
  (void)lent;
  *out = NULL;
  MOE__TRY(call(MOE_ERR_BACKEND, "queue_open"));
  *out = calloc(1, sizeof **out);
  if (!*out) return moe__fail(MOE_ERR_NO_MEMORY, "fake: no host memory");
  (*out)->dev = dev;
  fake.queues++;
  return MOE_OK;
}

static void fake_queue_close(struct moe__queue_be *q)
{
  fake.queues--;
  free(q);
}

static void *fake_queue_native(const struct moe__queue_be *q)
{
  return q->dev;
}

/* Where the span's bytes lie; aborts where they are no memory of ours. */
static unsigned char *place(moe_span s, uint64_t bytes)
{
  struct block *b = s.handle;
  if (!alive(b) || s.offset > b->bytes || bytes > b->bytes - s.offset) abort();
  return b->data + s.offset;
}

static moe_status fake_write(struct moe__queue_be *q, moe_span to, const void *from, uint64_t bytes)
{
  (void)q;
  MOE__TRY(call(MOE_ERR_BACKEND, "write"));
  fake.writes++;
  memcpy(place(to, bytes), from, bytes);
  return MOE_OK;
}

static moe_status fake_read(struct moe__queue_be *q, void *to, moe_span from, uint64_t bytes)
{
  (void)q;
  MOE__TRY(call(MOE_ERR_BACKEND, "read"));
  fake.writes++;
  memcpy(to, place(from, bytes), bytes);
  return MOE_OK;
}

static moe_status fake_copy(struct moe__queue_be *q, moe_span to, moe_span from, uint64_t bytes)
{
  (void)q;
  MOE__TRY(call(MOE_ERR_BACKEND, "copy"));
  fake.writes++;
  memmove(place(to, bytes), place(from, bytes), bytes);
  return MOE_OK;
}

static moe_status fake_fill(struct moe__queue_be *q, moe_span to, uint8_t byte, uint64_t bytes)
{
  (void)q;
  MOE__TRY(call(MOE_ERR_BACKEND, "fill"));
  fake.writes++;
  memset(place(to, bytes), byte, bytes);
  return MOE_OK;
}

static moe_status fake_wait(struct moe__queue_be *q)
{
  (void)q;
  return call(MOE_ERR_BACKEND, "wait");
}

static moe_status fake_flush(struct moe__queue_be *q)
{
  (void)q;
  return call(MOE_ERR_BACKEND, "flush");
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */
static moe_status fake_program(struct moe__dev *dev, const char *name, int dtype)
{
  (void)dtype;
  if (dtype == MOE_F64 && !dev->info.pub.fp64) return moe__fail(MOE_ERR_UNSUPPORTED, "fake: no fp64 for %s", name);
  return call(MOE_ERR_BUILD, "program");
}

static moe_status fake_launch(struct moe__queue_be *q, const struct moe__kernel *k, int dtype, const int64_t groups[3],
                              int local, const struct moe__karg *args, int n)
{
  (void)q;
  (void)dtype;
  (void)groups;
  MOE__TRY(call(MOE_ERR_LAUNCH, k->name));
  if (local < 1) abort();
  for (int i = 0; i < n; i++)
    if (args[i].kind == 0 && args[i].u.buf.handle && !alive(args[i].u.buf.handle)) abort();
  fake.launches++;
  return MOE_OK;
}

static int has_epilogue(enum fake_op op, const void *args)
{
  return op == FAKE_ggemm_rows && ((const struct moe__args_ggemm_rows *)args)->epilogue != MOE__PLAIN;
}

/* An implementation of each op that counts and keeps its arguments. */
#define OP(name, family)                                                                                               \
  static moe_status run_##name(moe_queue *q, const struct moe__args_##name *args)                                      \
  {                                                                                                                    \
    (void)q;                                                                                                           \
    MOE__TRY(call(MOE_ERR_LAUNCH, #name));                                                                             \
    fake.launches++;                                                                                                   \
    fake.ops[FAKE_##name]++;                                                                                           \
    fake.last.name = *args;                                                                                            \
    return MOE_OK;                                                                                                     \
  }                                                                                                                    \
  static moe_status can_##name(const struct moe__dev_info *info, const struct moe__args_##name *args,                  \
                               struct moe__why *why)                                                                   \
  {                                                                                                                    \
    (void)info;                                                                                                        \
    if (!fake.fuse && has_epilogue(FAKE_##name, args)) return moe__cannot(why, "has no epilogues");                    \
    return fake.refuse ? moe__cannot(why, "was told to refuse %s", moe_dtype_name(args->dtype)) : MOE_OK;              \
  }                                                                                                                    \
  static const struct moe__impl_##name list_##name[] = { { #name ":fake", "", MOE__TENSOR, can_##name, run_##name },   \
                                                         { 0 } };
#include "core/ops.def"
#undef OP

static const struct moe__ops own_ops = {
#define OP(name, family) .name = list_##name,
#include "core/ops.def"
#undef OP
};

#define BACKEND(list)                                                                                                  \
  {                                                                                                                    \
    "fake", fake_count, fake_probe, fake_dev_open, fake_close, fake_info, fake_alloc, fake_release, fake_adopt,        \
        fake_queue_open, fake_queue_close, fake_queue_native, fake_write, fake_read, fake_copy, fake_fill, fake_wait,  \
        fake_program, fake_launch, fake_flush, list                                                                    \
  }
static const struct moe__backend counting = BACKEND(NULL), own = BACKEND(&own_ops);

/* ---- for tests --------------------------------------------------------------------------------------------------- */
void fake_clear(void)
{
  fake.calls = fake.launches = fake.writes = fake.fail_at = 0;
  fake.failed = MOE_OK;
  for (int i = 0; i < FAKE_OPS; i++) fake.ops[i] = 0;
  memset(&fake.last, 0, sizeof fake.last);
}

void fake_reset(void)
{
  fake_clear();
  fake.own_ops = fake.refuse = fake.fuse = fake.no_fp64 = 0;
  fake.desc = moe_context_desc_init();
}

moe_context *fake_open(void)
{
  const struct moe__backend *be = fake.own_ops ? &own : &counting;
  const struct moe__open how = { "", NULL, NULL, NULL };
  moe_context *ctx = calloc(1, sizeof *ctx);
  if (!ctx) return NULL;
  if (be->open(&ctx->dev, &how)) {
    free(ctx);
    return NULL;
  }
  ctx->be = be;
  ctx->info = be->info(ctx->dev);
  ctx->desc = fake.desc;
  ctx->refs = 1;
  return ctx;
}
