/* device.c - see device.h. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>

struct t_block {
  struct t_block *next;
  moe_span span, twin;
  uint64_t bytes;                     /* mirrored: all, or none of a huge one */
  unsigned char *sent, *got, *before; /* what was uploaded, downloaded last, and downloaded before that */
  unsigned char *own;                 /* 1 for each byte the kernel may write */
  unsigned char *theirs;              /* downloaded from the twin */
  int64_t dtype;
};
struct t_host {
  struct t_host *next;
  double data[]; /* aligned for every type used */
};

void t_memory_init(struct t_memory *m, moe_context *ctx, moe_queue *q, uint64_t seed)
{
  *m = (struct t_memory){ .ctx = ctx, .q = q, .guard = 4096, .seed = seed * 0x9e3779b97f4a7c15u + 0x1234567 };
}

void t_memory_free(struct t_memory *m)
{
  while (m->blocks) {
    struct t_block *b = m->blocks;
    m->blocks = b->next;
    moe_span_free(m->ctx, &b->span);
    moe_span_free(m->twin_ctx, &b->twin);
    free(b->sent);
    free(b->got);
    free(b->before);
    free(b->own);
    free(b->theirs);
    free(b);
  }
  while (m->hosts) {
    struct t_host *h = m->hosts;
    m->hosts = h->next;
    free(h);
  }
}

/* Pairs of bytes (0xf1..0xfd, 0xff): NaN in f64, f32, bf16 and f16, and of a kind that no arithmetic makes. */
static unsigned char pattern(uint64_t i)
{
  return i % 2 ? 0xff : (unsigned char)(0xf1 + i / 2 % 13);
}

static void *must(void *p)
{
  if (!p) {
    fputs("tests: out of host memory\n", stderr);
    abort();
  }
  return p;
}

/* Device memory for block b, which t begins in. */
static void allocate(struct t_memory *m, struct t_block *b, moe_tensor *t, uint64_t bytes)
{
  moe_status status = moe_span_alloc(&b->span, m->ctx, bytes);
  if (status && !m->status) m->status = status;
  b->next = m->blocks;
  m->blocks = b;
  t->handle = b->span.handle;
  t->offset += b->span.offset;
}

moe_tensor t_tensor(struct t_memory *m, int64_t dtype, int layout, int rank, const int64_t *shape)
{
  moe_tensor t = { .dtype = (int32_t)dtype, .rank = rank, .offset = m->guard };
  int64_t size = (int64_t)moe_dtype_size(dtype), stride = layout & T_STEP ? 2 : 1;
  for (int i = 0; i < rank; i++) {
    /* The i-th dimension from the innermost outwards. */
    int d = rank - 1 - i;
    if (layout & T_SWAP && rank > 1 && i < 2) d = rank - 2 + i;
    t.shape[d] = shape[d];
    t.stride[d] = layout & T_SCALAR ? 0 : stride;
    stride = stride * (shape[d] ? shape[d] : 1) + (layout & T_PAD ? 3 : 0) + (layout & T_PAD8 ? 8 : 0);
  }
  if (layout & T_ODD) t.offset += (uint64_t)size;

  struct t_block *b = must(calloc(1, sizeof *b));
  uint64_t bytes = t.offset + moe_tensor_extent(&t) + m->guard;
  b->dtype = dtype;
  b->sent = must(malloc(bytes + 1));
  b->got = must(malloc(bytes + 1));
  b->before = must(malloc(bytes + 1));
  b->own = must(calloc(1, bytes + 1));
  for (uint64_t i = 0; i < bytes; i++) b->sent[i] = pattern(i);
  allocate(m, b, &t, bytes);
  b->bytes = b->span.bytes;
  if (m->twin_ctx) {
    b->theirs = must(malloc(bytes + 1));
    moe_status status = moe_span_alloc(&b->twin, m->twin_ctx, bytes);
    if (status && !m->status) m->status = status;
  }
  return t;
}

moe_tensor t_huge(struct t_memory *m, int64_t dtype, uint8_t byte, int rank, const int64_t *shape)
{
  moe_tensor t = { .dtype = (int32_t)dtype, .rank = rank };
  int64_t stride = 1;
  for (int d = rank - 1; d >= 0; stride *= shape[d--]) t.shape[d] = shape[d], t.stride[d] = stride;
  struct t_block *b = must(calloc(1, sizeof *b));
  b->dtype = dtype;
  m->has_huge = 1;
  allocate(m, b, &t, (uint64_t)stride * moe_dtype_size(dtype));
  if (!m->status) m->status = moe_span_fill(m->q, b->span, byte);
  return t;
}

static struct t_block *block_of(struct t_memory *m, const moe_tensor *t)
{
  for (struct t_block *b = m->blocks; b; b = b->next)
    if (b->span.handle == t->handle) return b;
  if (!m->status) m->status = MOE_ERR_STATE;
  return NULL;
}

/* Byte offset in the block of the i-th element, counted with the last dimension fastest. */
static uint64_t place(const struct t_block *b, const moe_tensor *t, int64_t i)
{
  int64_t offset = 0;
  for (int d = t->rank - 1; d >= 0; d--) {
    offset += i % t->shape[d] * t->stride[d];
    i /= t->shape[d];
  }
  return t->offset - b->span.offset + (uint64_t)offset * moe_dtype_size(t->dtype);
}

void t_own(struct t_memory *m, const moe_tensor *t)
{
  struct t_block *b = block_of(m, t);
  int64_t n = b ? moe_tensor_count(t) : 0;
  for (int64_t i = 0; i < n; i++) memset(b->own + place(b, t, i), 1, moe_dtype_size(t->dtype));
}

/* ---- values and bytes ------------------------------------------------------------------------------------------ */
static uint16_t half_bits(double x)
{
  uint16_t sign = signbit(x) ? 0x8000 : 0;
  double a = fabs(ref_round(x, MOE_F16));
  if (isnan(a)) return 0x7e00;
  if (isinf(a)) return sign | 0x7c00;
  if (a < 0x1p-14) return sign | (uint16_t)(a * 0x1p24);
  int e = ilogb(a);
  return sign | (uint16_t)((e + 15) << 10 | (int)(ldexp(a, 10 - e) - 1024));
}

static double half_value(uint16_t bits)
{
  int e = bits >> 10 & 31, f = bits & 1023;
  double a = e == 31 ? (f ? (double)NAN : HUGE_VAL) : e ? ldexp(1024 + f, e - 25) : ldexp(f, -24);
  return bits & 0x8000 ? -a : a;
}

static void encode(unsigned char *p, int64_t dtype, double v)
{
  float f32 = (float)ref_round(v, dtype);
  int64_t i64 = dtype == MOE_I64 || dtype == MOE_I32 ? (int64_t)v : 0;
  int32_t i32 = (int32_t)i64;
  uint16_t bits = half_bits(v);
  uint32_t word;
  switch (dtype) {
  case MOE_F64: memcpy(p, &v, 8); break;
  case MOE_F32: memcpy(p, &f32, 4); break;
  case MOE_BF16:
    memcpy(&word, &f32, 4);
    bits = (uint16_t)(word >> 16);
    memcpy(p, &bits, 2);
    break;
  case MOE_F16: memcpy(p, &bits, 2); break;
  case MOE_I64: memcpy(p, &i64, 8); break;
  case MOE_I32: memcpy(p, &i32, 4); break;
  default: *p = (unsigned char)v;
  }
}

static double decode(const unsigned char *p, int64_t dtype)
{
  double f64;
  float f32;
  int64_t i64;
  int32_t i32;
  uint16_t bits;
  uint32_t word;
  switch (dtype) {
  case MOE_F64: memcpy(&f64, p, 8); return f64;
  case MOE_F32: memcpy(&f32, p, 4); return f32;
  case MOE_BF16:
    memcpy(&bits, p, 2);
    word = (uint32_t)bits << 16;
    memcpy(&f32, &word, 4);
    return f32;
  case MOE_F16: memcpy(&bits, p, 2); return half_value(bits);
  case MOE_I64: memcpy(&i64, p, 8); return (double)i64;
  case MOE_I32: memcpy(&i32, p, 4); return i32;
  default: return *p;
  }
}

void t_put(struct t_memory *m, const moe_tensor *t, const num *values)
{
  struct t_block *b = block_of(m, t);
  int64_t n = b ? moe_tensor_count(t) : 0;
  for (int64_t i = 0; i < n; i++) encode(b->sent + place(b, t, i), t->dtype, values[i].v);
}

void t_put_ints(struct t_memory *m, const moe_tensor *t, const int32_t *values)
{
  struct t_block *b = block_of(m, t);
  int64_t n = b ? moe_tensor_count(t) : 0;
  for (int64_t i = 0; i < n; i++) encode(b->sent + place(b, t, i), t->dtype, values[i]);
}

void t_get(struct t_memory *m, const moe_tensor *t, double *values)
{
  struct t_block *b = block_of(m, t);
  int64_t n = b ? moe_tensor_count(t) : 0;
  for (int64_t i = 0; i < n; i++) values[i] = decode(b->got + place(b, t, i), t->dtype);
}

void t_get_ints(struct t_memory *m, const moe_tensor *t, int32_t *values)
{
  struct t_block *b = block_of(m, t);
  int64_t n = b ? moe_tensor_count(t) : 0;
  for (int64_t i = 0; i < n; i++) values[i] = (int32_t)decode(b->got + place(b, t, i), t->dtype);
}

/* Rows [row, row+n) of a packed tensor as a span, and their elements. */
static moe_span rows_of(const moe_tensor *t, int64_t row, int64_t n, int64_t *count)
{
  uint64_t size = moe_dtype_size(t->dtype);
  *count = n * t->stride[0];
  return (moe_span){ t->handle, t->offset + (uint64_t)(row * t->stride[0]) * size, (uint64_t)*count * size };
}

void t_write_rows(struct t_memory *m, const moe_tensor *t, int64_t row, int64_t n, const num *values)
{
  int64_t count;
  moe_span span = rows_of(t, row, n, &count);
  unsigned char *bytes = must(malloc(span.bytes + 1));
  for (int64_t i = 0; i < count; i++) encode(bytes + (uint64_t)i * moe_dtype_size(t->dtype), t->dtype, values[i].v);
  if (!m->status) m->status = moe_span_write(m->q, span, bytes, span.bytes);
  free(bytes);
}

void t_read_rows(struct t_memory *m, const moe_tensor *t, int64_t row, int64_t n, double *values)
{
  int64_t count;
  moe_span span = rows_of(t, row, n, &count);
  unsigned char *bytes = must(malloc(span.bytes + 1));
  if (!m->status) m->status = moe_span_read(m->q, bytes, span, span.bytes);
  for (int64_t i = 0; i < count; i++) values[i] = decode(bytes + (uint64_t)i * moe_dtype_size(t->dtype), t->dtype);
  free(bytes);
}

/* ---- transfers ---------------------------------------------------------------------------------------------- */
void t_upload(struct t_memory *m)
{
  for (struct t_block *b = m->blocks; b && !m->status; b = b->next)
    m->status = moe_span_write(m->q, b->span, b->sent, b->bytes);
}

void t_download(struct t_memory *m)
{
  for (struct t_block *b = m->blocks; b && !m->status; b = b->next) {
    unsigned char *older = b->before;
    b->before = b->got;
    b->got = older;
    m->status = moe_span_read(m->q, b->got, b->span, b->bytes);
  }
}

/* ---- the twin ----------------------------------------------------------------------------------------------- */
void t_upload_twin(struct t_memory *m)
{
  for (struct t_block *b = m->blocks; b && !m->status; b = b->next)
    m->status = moe_span_write(m->twin_q, b->twin, b->sent, b->bytes);
}

void t_download_twin(struct t_memory *m)
{
  for (struct t_block *b = m->blocks; b && !m->status; b = b->next)
    m->status = moe_span_read(m->twin_q, b->theirs, b->twin, b->bytes);
}

void t_get_twin(struct t_memory *m, const moe_tensor *t, double *values)
{
  struct t_block *b = block_of(m, t);
  int64_t n = b ? moe_tensor_count(t) : 0;
  for (int64_t i = 0; i < n; i++) values[i] = decode(b->theirs + place(b, t, i), t->dtype);
}

void t_for_twin(const struct t_memory *m, void *args, size_t bytes)
{
  for (void **word = args; bytes >= sizeof *word; word++, bytes -= sizeof *word)
    for (const struct t_block *b = m->blocks; b; b = b->next)
      if (*word && *word == b->span.handle) {
        *word = b->twin.handle;
        break;
      }
}

/* ---- checks ------------------------------------------------------------------------------------------------- */
const char *t_guards(struct t_memory *m)
{
  static _Thread_local char text[160];
  for (struct t_block *b = m->blocks; b; b = b->next)
    for (uint64_t i = 0; i < b->bytes; i++)
      if (!b->own[i] && b->got[i] != b->sent[i]) {
        int64_t element = ((int64_t)i - (int64_t)m->guard) / (int64_t)moe_dtype_size(b->dtype);
        snprintf(text, sizeof text, "wrote where it must not: %s element %lld of a block of %lld",
                 moe_dtype_name(b->dtype), (long long)element,
                 (long long)((b->bytes - 2 * m->guard) / moe_dtype_size(b->dtype)));
        return text;
      }
  return NULL;
}

int t_repeats(struct t_memory *m)
{
  for (struct t_block *b = m->blocks; b; b = b->next)
    if (b->bytes && memcmp(b->before, b->got, b->bytes)) return 0;
  return 1;
}

/* ---- host arrays -------------------------------------------------------------------------------------------- */
void *t_host(struct t_memory *m, int64_t n, size_t size)
{
  struct t_host *h = must(calloc(1, sizeof *h + (size_t)n * size));
  h->next = m->hosts;
  m->hosts = h;
  return h->data;
}

num *t_nums(struct t_memory *m, int64_t n)
{
  return t_host(m, n, sizeof(num));
}

int32_t *t_ints(struct t_memory *m, int64_t n)
{
  return t_host(m, n, sizeof(int32_t));
}

/* splitmix64 */
uint64_t t_random(struct t_memory *m)
{
  uint64_t z = m->seed += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

int64_t t_below(struct t_memory *m, int64_t n)
{
  return (int64_t)(t_random(m) % (uint64_t)n);
}

num *t_uniform(struct t_memory *m, int64_t n, int64_t dtype, double size)
{
  num *x = t_nums(m, n);
  for (int64_t i = 0; i < n; i++) x[i].v = ref_round(size * ((double)(t_random(m) >> 11) * 0x1p-52 - 1), dtype);
  return x;
}

num *t_whole(struct t_memory *m, int64_t n, int64_t size)
{
  num *x = t_nums(m, n);
  for (int64_t i = 0; i < n; i++) x[i].v = (double)(t_below(m, 2 * size + 1) - size);
  return x;
}
