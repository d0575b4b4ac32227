/* train_lm.c - trains a Mixture-of-Experts byte-level language model on real text, with libmoe alone.

   The previous N bytes are embedded and mixed by one linear layer; then come residual blocks
       x = x + MoE(RMSNorm(x))
   and a last RMSNorm and linear layer give the logits of the next byte.  At the end the held-out tenth of
   the data is scored in bits per byte, beside an order-2 byte model and `xz -9e`.

   --save writes a checkpoint: parameters, optimizer, step, where the batches are, and the configuration.  Training that
   --resume continues gives the bits of training that was never stopped.

   Build: cc train_lm.c $(pkg-config --cflags --libs moe) -lm */
#define _POSIX_C_SOURCE 200809L
#include <moe/moe.h>

#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define VOCAB 256
#define MAX_BLOCKS 32
#define DEFAULT_TEXT "/usr/share/games/fortunes"

/* ---- options ----------------------------------------------------------------------------------------------- */
struct options {
  const char *device, *metrics, *save, *resume;
  int64_t dtype, context, embed, width, ff, experts, top_k, blocks, batch, steps, seed, save_every, until;
  double seconds, rate, balance;
  int health;
};

static const struct {
  const char *name, *text;
} help[] = {
  { "device D", "cuda[:N], opencl[:gpu|:cpu|:PLATFORM:DEVICE]; default: the best there is" },
  { "dtype T", "f32 (default), bf16, f16 or f64" },
  { "data FILE", "training text; may be repeated; default: the English texts of the package fortunes" },
  { "steps N", "optimizer steps of the whole training (default 2500)" },
  { "until N", "stop after step N of them" },
  { "seconds S", "stop training after S seconds (default 240; 0: no limit)" },
  { "seed N", "of the initial values and of the batches (default 2)" },
  { "batch T", "bytes predicted in a step (default 1024)" },
  { "context N", "bytes seen before each prediction (default 16)" },
  { "embed D", "width of a byte's embedding (default 32)" },
  { "width D", "model width (default 192)" },
  { "ff F", "width of an expert (default 192)" },
  { "experts E", "experts in a layer (default 16)" },
  { "top-k K", "experts that see a byte (default 2)" },
  { "blocks N", "residual blocks (default 3)" },
  { "rate R", "peak learning rate (default 0.002)" },
  { "balance C", "coefficient of the balance loss (default 0.01)" },
  { "health", "look at every gradient; stop at one that is not finite, naming the operation" },
  { "metrics FILE", "one JSON object a step" },
  { "save FILE", "a checkpoint (safetensors) of the whole training, when it stops" },
  { "save-every N", "and after every N steps" },
  { "resume FILE", "continue a training that was saved, with the options it had" },
  { "help", "this text" },
};

static void usage(FILE *to)
{
  fprintf(to, "usage: train_lm [options]\nTrains a Mixture-of-Experts byte-level language model.\n\n");
  for (size_t i = 0; i < sizeof help / sizeof help[0]; i++) fprintf(to, "  --%-14s %s\n", help[i].name, help[i].text);
}

/* ---- failures -------------------------------------------------------------------------------------------------- */
#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    moe_status st_ = (call);                                                                                           \
    if (st_ != MOE_OK) {                                                                                               \
      fprintf(stderr, "train_lm: %s (%s)\n", moe_last_error(), moe_strerror(st_));                                     \
      return 1;                                                                                                        \
    }                                                                                                                  \
  } while (0)

static volatile sig_atomic_t interrupted;
static void on_interrupt(int signal_number)
{
  interrupted = 1;
  signal(signal_number, SIG_DFL); /* a second one ends at once */
}

static double now(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- data -------------------------------------------------------------------------------------------------------- */
struct text {
  unsigned char *bytes;
  int64_t count, train; /* the first `train` bytes train, the rest is held out */
};

static int append_file(struct text *t, const char *path)
{
  FILE *f = fopen(path, "rb");
  long size = -1;
  if (f && !fseek(f, 0, SEEK_END)) size = ftell(f);
  if (!f || size < 0 || fseek(f, 0, SEEK_SET)) {
    fprintf(stderr, "train_lm: cannot read %s: %s\n", path, strerror(errno));
    if (f) fclose(f);
    return 0;
  }
  unsigned char *bytes = realloc(t->bytes, (size_t)(t->count + size + 1));
  if (!bytes) {
    fprintf(stderr, "train_lm: no memory for %ld bytes of %s\n", size, path);
    fclose(f);
    return 0;
  }
  t->bytes = bytes;
  size_t got = fread(bytes + t->count, 1, (size_t)size, f);
  fclose(f);
  if (got != (size_t)size) {
    fprintf(stderr, "train_lm: %s: read %zu of %ld bytes\n", path, got, size);
    return 0;
  }
  t->count += size;
  return 1;
}

static int is_plain_text(const struct dirent *e)
{
  return e->d_name[0] != '.' && !strchr(e->d_name, '.'); /* not the indexes (.dat) nor the links (.u8) */
}

static int default_text(struct text *t)
{
  struct dirent **list;
  int n = scandir(DEFAULT_TEXT, &list, is_plain_text, alphasort), ok = 1;
  if (n <= 0) {
    fprintf(stderr, "train_lm: no text in " DEFAULT_TEXT ": install the package fortunes, or give --data FILE\n");
    return 0;
  }
  for (int i = 0; i < n; i++) {
    char path[4096];
    struct stat s;
    snprintf(path, sizeof path, DEFAULT_TEXT "/%s", list[i]->d_name);
    if (ok && !stat(path, &s) && S_ISREG(s.st_mode)) ok = append_file(t, path);
    free(list[i]);
  }
  free(list);
  return ok;
}

/* xorshift64*: batches depend on the seed alone. */
static uint64_t next_random(uint64_t *state)
{
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return *state * 2685821657736338717u;
}

/* The N bytes before position p and the byte at p; before the text there are newlines. */
static void example(const struct text *t, int64_t p, int64_t N, int32_t *context, int32_t *target)
{
  for (int64_t i = 0; i < N; i++) context[i] = p - N + i < 0 ? '\n' : t->bytes[p - N + i];
  *target = t->bytes[p];
}

/* ---- the two baselines --------------------------------------------------------------------------------------------- */
/* Order-2 model of the training part; each order adds one pseudo-count spread by the order below:
   p0(c) = (n(c)+1)/(n+256), p1(c|b) = (n(bc)+p0(c))/(n(b)+1), p2(c|ab) = (n(abc)+p1(c|b))/(n(ab)+1). */
static double order2_bits(const struct text *t)
{
  uint32_t *n3 = calloc(256 * 65536, sizeof *n3), *n2 = calloc(65536, sizeof *n2), *c2 = calloc(65536, sizeof *c2);
  uint32_t n1[256] = { 0 }, c1[256] = { 0 };
  double bits = 0;
  if (!n3 || !n2 || !c2) {
    free(n3);
    free(n2);
    free(c2);
    return NAN;
  }
  for (int64_t i = 0; i < t->count; i++) {
    unsigned c = t->bytes[i], b = i > 0 ? t->bytes[i - 1] : '\n', a = i > 1 ? t->bytes[i - 2] : '\n';
    if (i < t->train) {
      n1[c]++;
      n2[b << 8 | c]++;
      c1[b]++;
      n3[a << 16 | b << 8 | c]++;
      c2[a << 8 | b]++;
      continue;
    }
    double p0 = (n1[c] + 1.0) / ((double)t->train + 256);
    double p1 = (n2[b << 8 | c] + p0) / (c1[b] + 1.0);
    double p2 = (n3[a << 16 | b << 8 | c] + p1) / (c2[a << 8 | b] + 1.0);
    bits -= log2(p2);
  }
  free(n3);
  free(n2);
  free(c2);
  return bits / (double)(t->count - t->train);
}

/* Bytes that `xz -9e` makes of the first n bytes; -1 where xz is not there. */
static int64_t xz_size(const struct text *t, int64_t n)
{
  char path[] = "/tmp/train_lm.XXXXXX", command[64];
  char buffer[65536];
  int64_t size = 0, got;
  int fd = mkstemp(path);
  if (fd < 0) return -1;
  FILE *f = fdopen(fd, "wb");
  int ok = f && fwrite(t->bytes, 1, (size_t)n, f) == (size_t)n;
  if (f ? fclose(f) : close(fd)) ok = 0;
  snprintf(command, sizeof command, "xz -9e -c %s 2>/dev/null", path);
  FILE *pipe = ok ? popen(command, "r") : NULL;
  if (!pipe) ok = 0;
  while (ok && (got = (int64_t)fread(buffer, 1, sizeof buffer, pipe)) > 0) size += got;
  if (pipe && pclose(pipe)) ok = 0;
  unlink(path);
  return ok ? size : -1;
}

/* ---- the model -------------------------------------------------------------------------------------------------------- */
struct matrix { /* a parameter of ours: value and gradient */
  moe_span memory, grad_memory;
  moe_tensor t, grad;
};
struct model {
  struct options o;
  moe_context *ctx;
  moe_queue *q;
  moe_tape *tape;
  moe_adamw *adamw;
  moe_layer *layer; /* one description serves every block */
  struct matrix embed, mix, norm[MAX_BLOCKS + 1], head;
  moe_span params[MAX_BLOCKS], grads[MAX_BLOCKS], adamw_state, batch_memory;
  moe_tensor ids, targets;
  moe_layer_state states[MAX_BLOCKS];
  int32_t *host_ids, *host_targets;
  int64_t streams; /* of initial values, used so far */
  int64_t step;    /* taken */
  uint64_t random; /* where the batches are */
};

/* The parameters outside the blocks. */
static int64_t own_matrices(struct model *m, struct matrix *own[MAX_BLOCKS + 4])
{
  int64_t n = 0;
  own[n++] = &m->embed;
  own[n++] = &m->mix;
  own[n++] = &m->head;
  for (int64_t b = 0; b <= m->o.blocks; b++) own[n++] = &m->norm[b];
  return n;
}

/* Values: normal of this standard deviation (a stream of their own), or all 1 where it is 0. */
static moe_status make_matrix(struct model *m, struct matrix *x, int64_t rank, int64_t rows, int64_t cols,
                              double stddev, double decay)
{
  const int64_t shape[2] = { rows, cols };
  int64_t n = rank == 2 ? rows * cols : rows, grad_dtype = m->o.dtype == MOE_F64 ? MOE_F64 : MOE_F32;
  uint64_t bytes = (uint64_t)n * moe_dtype_size(m->o.dtype), grad_bytes = (uint64_t)n * moe_dtype_size(grad_dtype);
  moe_status st = moe_span_alloc(&x->memory, m->ctx, bytes);
  if (!st) st = moe_span_alloc(&x->grad_memory, m->ctx, grad_bytes);
  if (!st) st = moe_tensor_packed(&x->t, x->memory, m->o.dtype, rank, shape);
  if (!st) st = moe_tensor_packed(&x->grad, x->grad_memory, grad_dtype, rank, shape);
  if (!st && stddev > 0) st = moe_tensor_normal(m->q, &x->t, (uint64_t)m->o.seed, m->streams++, stddev);
  else if (!st) st = moe_tensor_fill(m->q, &x->t, 1);
  if (!st) st = moe_adamw_add(m->adamw, &x->t, &x->grad, decay, 1);
  return st;
}

static int build(struct model *m)
{
  const struct options *o = &m->o;
  int64_t in = o->context * o->embed, real = o->dtype == MOE_F64 ? MOE_F64 : MOE_F32;

  moe_context_desc cd = moe_context_desc_init();
  cd.device = o->device;
  TRY(moe_context_create(&m->ctx, &cd));
  TRY(moe_queue_create(&m->q, m->ctx));
  moe_tape_desc td = moe_tape_desc_init();
  td.health_policy = o->health ? MOE_HEALTH_POLICY_FAIL : MOE_HEALTH_POLICY_OFF;
  TRY(moe_tape_create(&m->tape, m->q, &td));

  moe_selection_options selection = moe_selection_options_init();
  selection.kind = MOE_SELECT_SOFTMAX;
  selection.top_k = o->top_k;
  moe_weights_options weights = moe_weights_options_init();
  weights.scoring = MOE_SOFTMAX;
  weights.renormalize = o->top_k > 1;
  weights.scale = 1;
  moe_activation activation = moe_activation_init();
  activation.kind = MOE_SILU;
  activation.gated = 1;
  moe_layer_desc ld = moe_layer_desc_init();
  ld.d_model = o->width;
  ld.d_ff = o->ff;
  ld.n_experts = o->experts;
  ld.dtype = o->dtype;
  ld.selection = &selection;
  ld.weights = &weights;
  ld.activation = &activation;
  ld.balance_coef = o->balance;
  ld.reduction = MOE_PLANE;
  TRY(moe_layer_create(&m->layer, m->ctx, &ld));

  moe_adamw_desc ad = moe_adamw_desc_init();
  ad.dtype = real;
  ad.peak = o->rate;
  ad.floor = 0.05 * o->rate;
  ad.warmup = o->steps / 20 + 1;
  ad.total = o->steps > ad.warmup ? o->steps : ad.warmup;
  ad.max_norm = 1;
  TRY(moe_adamw_create(&m->adamw, m->ctx, &ad));

  TRY(make_matrix(m, &m->embed, 2, VOCAB, o->embed, 1, 0));
  TRY(make_matrix(m, &m->mix, 2, o->width, in, 1 / sqrt((double)in), 0.05));
  TRY(make_matrix(m, &m->head, 2, VOCAB, o->width, 0.5 / sqrt((double)o->width), 0.05));
  moe_layer_bytes bytes = moe_layer_bytes_init();
  TRY(moe_layer_measure(&bytes, m->layer, o->batch, 0));
  for (int64_t b = 0; b <= o->blocks; b++) {
    TRY(make_matrix(m, &m->norm[b], 1, o->width, 0, 0, 0));
    if (b == o->blocks) break;
    TRY(moe_span_alloc(&m->params[b], m->ctx, bytes.params));
    TRY(moe_span_alloc(&m->grads[b], m->ctx, bytes.grads));
    TRY(moe_layer_init(m->layer, m->q, m->params[b], (uint64_t)(o->seed * 1000 + b), 1 / sqrt((double)o->width)));
    moe_tensor p, g;
    moe_layer_param_info info = moe_layer_param_info_init();
    for (int64_t i = 0; moe_layer_param(&p, &g, &info, m->layer, m->params[b], m->grads[b], i) == MOE_OK; i++)
      if (info.trainable) TRY(moe_adamw_add(m->adamw, &p, &g, info.decays ? 0.05 : 0, 1));
    m->states[b] = moe_layer_state_init();
  }
  uint64_t state;
  TRY(moe_adamw_measure(&state, m->adamw));
  TRY(moe_span_alloc(&m->adamw_state, m->ctx, state));
  TRY(moe_adamw_bind(m->adamw, m->q, m->adamw_state));

  const int64_t n = o->batch * o->context;
  TRY(moe_span_alloc(&m->batch_memory, m->ctx, (uint64_t)(n + o->batch) * 4));
  TRY(moe_tensor_packed(&m->ids, m->batch_memory, MOE_I32, 1, &n));
  moe_span rest = { m->batch_memory.handle, (uint64_t)n * 4, (uint64_t)o->batch * 4 };
  TRY(moe_tensor_packed(&m->targets, rest, MOE_I32, 1, &o->batch));
  m->host_ids = malloc((size_t)(n + o->batch) * sizeof *m->host_ids);
  if (!m->host_ids) return 1;
  m->host_targets = m->host_ids + n;
  return 0;
}

/* Loss of the batch that lies in host_ids and host_targets; its first T examples count. */
static int forward(struct model *m, int64_t T, int training, moe_value *loss)
{
  const struct options *o = &m->o;
  moe_tape *t = m->tape;
  int64_t N = o->context, n = T * N;
  moe_tensor ids = m->ids, targets = m->targets;
  ids.shape[0] = n;
  targets.shape[0] = T;
  TRY(moe_span_write(m->q, (moe_span){ ids.handle, ids.offset, (uint64_t)n * 4 }, m->host_ids, (uint64_t)n * 4));
  TRY(moe_span_write(m->q, (moe_span){ targets.handle, targets.offset, (uint64_t)T * 4 }, m->host_targets,
                     (uint64_t)T * 4));
  moe_tape_reset(t);
#define PARAM(x) (training ? moe_tape_param(t, &(x).t, &(x).grad) : moe_tape_leaf(t, &(x).t, 0))
  moe_value e = moe_tape_embedding(t, PARAM(m->embed), moe_tape_leaf(t, &ids, 0));
  e = moe_tape_reshape(t, e, 2, (const int64_t[]){ T, N * o->embed });
  moe_value x = moe_tape_matmul(t, e, PARAM(m->mix), 0, 1);
  for (int64_t b = 0; b < o->blocks; b++) {
    moe_tape_moe options = moe_tape_moe_init();
    options.params = m->params[b];
    if (training) options.grads = m->grads[b];
    moe_value h = moe_tape_rms_norm(t, x, PARAM(m->norm[b]), 1e-6);
    x = moe_tape_add(t, x, moe_tape_moe_layer(t, m->layer, h, &options, &m->states[b]));
  }
  x = moe_tape_rms_norm(t, x, PARAM(m->norm[o->blocks]), 1e-6);
  *loss = moe_tape_cross_entropy(t, moe_tape_matmul(t, x, PARAM(m->head), 0, 1), moe_tape_leaf(t, &targets, 0));
#undef PARAM
  TRY(moe_tape_status(t));
  return 0;
}

/* Mean loss in bits per byte over the held-out part. */
static int evaluate(struct model *m, const struct text *t, double *bits)
{
  double sum = 0;
  for (int64_t p = t->train; p < t->count; p += m->o.batch) {
    int64_t T = t->count - p < m->o.batch ? t->count - p : m->o.batch;
    moe_value loss;
    double value;
    for (int64_t i = 0; i < T; i++)
      example(t, p + i, m->o.context, m->host_ids + i * m->o.context, m->host_targets + i);
    if (forward(m, T, 0, &loss)) return 1;
    TRY(moe_tape_read(m->tape, loss, &value, 1));
    sum += value * (double)T;
  }
  *bits = sum / log(2) / (double)(t->count - t->train);
  return 0;
}

/* ---- checkpoints ------------------------------------------------------------------------------------------------------ */
/* What must be the same for training to go on as it would have. */
enum kind { AS_WHOLE, AS_REAL, AS_DTYPE };
static const struct {
  const char *name;
  enum kind kind;
  size_t at;
} config[] = {
#define OPTION(name, kind, member)                                                                                     \
  {                                                                                                                    \
    name, kind, offsetof(struct options, member)                                                                       \
  }
  OPTION("dtype", AS_DTYPE, dtype),    OPTION("context", AS_WHOLE, context), OPTION("embed", AS_WHOLE, embed),
  OPTION("width", AS_WHOLE, width),    OPTION("ff", AS_WHOLE, ff),           OPTION("experts", AS_WHOLE, experts),
  OPTION("top-k", AS_WHOLE, top_k),    OPTION("blocks", AS_WHOLE, blocks),   OPTION("batch", AS_WHOLE, batch),
  OPTION("steps", AS_WHOLE, steps),    OPTION("seed", AS_WHOLE, seed),       OPTION("rate", AS_REAL, rate),
  OPTION("balance", AS_REAL, balance),
#undef OPTION
};
#define N_CONFIG (sizeof config / sizeof config[0])

static const char *config_text(const struct options *o, size_t i, char text[32])
{
  const char *member = (const char *)o + config[i].at;
  int64_t whole;
  double real;
  if (config[i].kind == AS_REAL) {
    memcpy(&real, member, sizeof real);
    snprintf(text, 32, "%.17g", real);
    return text;
  }
  memcpy(&whole, member, sizeof whole);
  if (config[i].kind == AS_DTYPE) return moe_dtype_name(whole);
  snprintf(text, 32, "%" PRId64, whole);
  return text;
}

/* FNV-1a, to tell one text from another. */
static const char *text_sum(const struct text *t, char text[64])
{
  uint64_t sum = 14695981039346656037u;
  for (int64_t i = 0; i < t->count; i++) sum = (sum ^ t->bytes[i]) * 1099511628211u;
  snprintf(text, 64, "%" PRId64 " bytes, FNV-1a %016" PRIx64, t->count, sum);
  return text;
}

struct names {
  char text[MAX_BLOCKS + 4][16];
};
static int64_t own_items(struct model *m, moe_checkpoint_item *items, struct names *names)
{
  static const char *const first[] = { "embed", "mix", "head" };
  struct matrix *own[MAX_BLOCKS + 4];
  int64_t n = own_matrices(m, own);
  for (int64_t i = 0; i < n; i++) {
    if (i < 3) snprintf(names->text[i], sizeof names->text[i], "%s", first[i]);
    else snprintf(names->text[i], sizeof names->text[i], "norm.%d", (int)(i - 3));
    items[i] = (moe_checkpoint_item){ names->text[i], own[i]->t };
  }
  return n;
}

static moe_status write_model(struct model *m, const struct text *t, moe_checkpoint_writer *w)
{
  moe_checkpoint_item items[MAX_BLOCKS + 4];
  struct names names;
  char text[64];
  int64_t n = own_items(m, items, &names);
  moe_status st = moe_checkpoint_writer_metadata(w, "text", text_sum(t, text));
  for (size_t i = 0; !st && i < N_CONFIG; i++)
    st = moe_checkpoint_writer_metadata(w, config[i].name, config_text(&m->o, i, text));
  snprintf(text, sizeof text, "%" PRId64, m->step);
  if (!st) st = moe_checkpoint_writer_metadata(w, "step", text);
  snprintf(text, sizeof text, "%" PRIu64, m->random);
  if (!st) st = moe_checkpoint_writer_metadata(w, "random", text);
  for (int64_t i = 0; !st && i < n; i++)
    st = moe_checkpoint_writer_add_tensor(w, items[i].name, m->q, &items[i].tensor);
  for (int64_t b = 0; !st && b < m->o.blocks; b++) {
    snprintf(text, sizeof text, "blocks.%d.", (int)b);
    st = moe_checkpoint_save_layer(w, m->q, m->layer, m->params[b], text, MOE_NAMES_LIBMOE);
  }
  if (!st) st = moe_checkpoint_save_adamw(w, m->q, m->adamw, "adamw.");
  return st ? st : moe_checkpoint_writer_commit(w);
}

static int save(struct model *m, const struct text *t)
{
  moe_checkpoint_writer *w;
  TRY(moe_checkpoint_writer_create(&w, m->o.save, NULL));
  moe_status st = write_model(m, t, w);
  moe_checkpoint_writer_free(w);
  TRY(st);
  return 0;
}

/* The number under a metadata key. */
static int metadata_number(const moe_checkpoint *c, const char *key, uint64_t *out)
{
  const char *text = moe_checkpoint_metadata(c, key);
  char *end;
  errno = 0;
  *out = text ? strtoull(text, &end, 10) : 0;
  return text && !errno && end != text && !*end;
}

static int read_model(struct model *m, const struct text *t, const moe_checkpoint *c)
{
  moe_checkpoint_item items[MAX_BLOCKS + 4];
  struct names names;
  char text[64];
  uint64_t step;
  int same = 1;
  for (size_t i = 0; i <= N_CONFIG; i++) {
    const char *name = i < N_CONFIG ? config[i].name : "text", *saved = moe_checkpoint_metadata(c, name);
    const char *own = i < N_CONFIG ? config_text(&m->o, i, text) : text_sum(t, text);
    if (saved && !strcmp(saved, own)) continue;
    fprintf(stderr, "train_lm: %s has %s %s, this training %s\n", m->o.resume, name, saved ? saved : "(none)", own);
    same = 0;
  }
  if (!same) return 1;
  if (!metadata_number(c, "step", &step) || step > INT64_MAX || !metadata_number(c, "random", &m->random)) {
    fprintf(stderr, "train_lm: %s has no step and random number to go on from\n", m->o.resume);
    return 1;
  }
  m->step = (int64_t)step;
  TRY(moe_checkpoint_load(c, m->q, items, own_items(m, items, &names), MOE_CHECKPOINT_PARTIAL));
  for (int64_t b = 0; b < m->o.blocks; b++) {
    snprintf(text, sizeof text, "blocks.%d.", (int)b);
    TRY(moe_checkpoint_load_layer(c, m->q, m->layer, m->params[b], text, MOE_NAMES_LIBMOE, 0));
  }
  TRY(moe_checkpoint_load_adamw(c, m->q, m->adamw, "adamw.", 0));
  return 0;
}

static int resume(struct model *m, const struct text *t)
{
  moe_checkpoint *c;
  TRY(moe_checkpoint_open(&c, m->o.resume));
  TRY(moe_checkpoint_verify(c, NULL));
  int rc = read_model(m, t, c);
  moe_checkpoint_close(c);
  return rc;
}

/* ---- training ---------------------------------------------------------------------------------------------------------- */
static int train(struct model *m, const struct text *t, FILE *metrics)
{
  const struct options *o = &m->o;
  double start = now(), shown = start, imbalance = 0;
  int terminal = isatty(STDOUT_FILENO);
  int64_t first = m->step, end = o->until && o->until < o->steps ? o->until : o->steps;
  while (m->step < end && !interrupted) {
    moe_value loss;
    double value;
    for (int64_t i = 0; i < o->batch; i++)
      example(t, (int64_t)(next_random(&m->random) % (uint64_t)t->train), o->context, m->host_ids + i * o->context,
              m->host_targets + i);
    if (forward(m, o->batch, 1, &loss)) return 1;
    TRY(moe_tape_backward(m->tape, loss, (moe_value){ 0 }, 0));
    TRY(moe_adamw_step(m->adamw, m->q));
    TRY(moe_tape_read(m->tape, loss, &value, 1));
    int64_t step = ++m->step, taken = step - first;
    double t1 = now(), spent = t1 - start, speed = (double)(taken * o->batch) / spent;
    double left = spent / (double)taken * (double)(end - step);
    int last = step == end || (o->seconds > 0 && spent > o->seconds);
    if (o->seconds > 0 && left > o->seconds - spent) left = o->seconds - spent > 0 ? o->seconds - spent : 0;
    int show = last || taken == 1 || t1 - shown > (terminal ? 0.25 : 10);
    /* The gradients' record keeps the first bad one, so it can be asked for now and then. */
    if (o->health && (show || !isfinite(value))) TRY(moe_queue_wait(m->q));
    if (show || metrics) {
      moe_layer_metrics load = moe_layer_metrics_init();
      imbalance = 0;
      for (int64_t b = 0; b < o->blocks; b++) {
        TRY(moe_layer_metrics_read(&load, NULL, m->layer, m->q, &m->states[b]));
        if (load.imbalance > imbalance) imbalance = load.imbalance;
      }
      if (metrics) {
        moe_adamw_info info = moe_adamw_info_init();
        TRY(moe_adamw_read(&info, m->adamw, m->q));
        fprintf(metrics,
                "{\"step\": %" PRId64 ", \"loss\": %.9g, \"bits_per_byte\": %.9g, \"rate\": %.6g, "
                "\"grad_norm\": %.6g, \"bytes_per_second\": %.1f, \"imbalance\": %.4f}\n",
                step, value, value / log(2), info.rate, info.norm, speed, imbalance);
      }
    }
    if (show) {
      shown = t1;
      printf("%sstep %" PRId64 "/%" PRId64 "  loss %.4f  %.4f bits/byte  %.0f bytes/s  imbalance %.2f  %.0f s left%s",
             terminal ? "\r\033[K" : "", step, o->steps, value, value / log(2), speed, imbalance, left,
             terminal ? "" : "\n");
      fflush(stdout);
    }
    if (!isfinite(value)) {
      fprintf(stderr, "%strain_lm: the loss is not finite at step %" PRId64 "\n", terminal ? "\n" : "", step);
      return 1;
    }
    if (last) break;
    if (o->save_every && step % o->save_every == 0 && save(m, t)) return 1;
  }
  TRY(moe_queue_wait(m->q));
  printf("%s%s after %" PRId64 " steps, %.1f s, %.0f bytes/s\n", terminal ? "\n" : "",
         interrupted ? "interrupted" : "trained", m->step, now() - start,
         (double)((m->step - first) * o->batch) / (now() - start));
  return o->save ? save(m, t) : 0;
}

static int report(struct model *m, const struct text *t)
{
  double bits, start = now();
  if (evaluate(m, t, &bits)) return 1;
  printf("\nheld-out tenth, %" PRId64 " bytes, in bits per byte (%.1f s):\n", t->count - t->train, now() - start);
  printf("  this model      %.4f\n", bits);
  printf("  order-2 bytes   %.4f\n", order2_bits(t));
  int64_t whole = xz_size(t, t->count), part = xz_size(t, t->train);
  if (whole < 0 || part < 0) printf("  xz -9e          (xz is not installed)\n");
  else printf("  xz -9e          %.4f\n", 8.0 * (double)(whole - part) / (double)(t->count - t->train));
  return 0;
}

static void release(struct model *m)
{
  struct matrix *own[MAX_BLOCKS + 4];
  int64_t n = own_matrices(m, own);
  if (m->q) (void)!moe_queue_wait(m->q);
  for (int64_t i = 0; i < n; i++) {
    moe_span_free(m->ctx, &own[i]->memory);
    moe_span_free(m->ctx, &own[i]->grad_memory);
  }
  for (int b = 0; b < MAX_BLOCKS; b++) {
    moe_span_free(m->ctx, &m->params[b]);
    moe_span_free(m->ctx, &m->grads[b]);
  }
  moe_span_free(m->ctx, &m->adamw_state);
  moe_span_free(m->ctx, &m->batch_memory);
  free(m->host_ids);
  moe_tape_free(m->tape);
  moe_adamw_free(m->adamw);
  moe_layer_free(m->layer);
  moe_queue_free(m->q);
  moe_context_free(m->ctx);
}

/* ---- main --------------------------------------------------------------------------------------------------------------- */
static int whole_number(const char *name, const char *text, int64_t low, int64_t high, int64_t *out)
{
  char *end;
  errno = 0;
  long long v = strtoll(text, &end, 10);
  if (errno || *end || end == text || v < low || v > high) {
    fprintf(stderr, "train_lm: --%s %s: wanted a whole number in %" PRId64 "..%" PRId64 "\n", name, text, low, high);
    return 0;
  }
  *out = v;
  return 1;
}

static int number(const char *name, const char *text, double low, double *out)
{
  char *end;
  double v = strtod(text, &end);
  if (*end || end == text || !isfinite(v) || v < low) {
    fprintf(stderr, "train_lm: --%s %s: wanted a number >= %g\n", name, text, low);
    return 0;
  }
  *out = v;
  return 1;
}

static int parse(int argc, char **argv, struct options *o, struct text *t)
{
  enum {
    DEVICE = 256,
    DTYPE,
    DATA,
    STEPS,
    SECONDS,
    SEED,
    BATCH,
    CONTEXT,
    EMBED,
    WIDTH,
    FF,
    EXPERTS,
    TOP_K,
    BLOCKS,
    RATE,
    BALANCE,
    HEALTH,
    METRICS,
    SAVE,
    SAVE_EVERY,
    RESUME,
    UNTIL,
    HELP
  };
  static const struct option known[] = { { "device", 1, 0, DEVICE },   { "dtype", 1, 0, DTYPE },
                                         { "data", 1, 0, DATA },       { "steps", 1, 0, STEPS },
                                         { "seconds", 1, 0, SECONDS }, { "seed", 1, 0, SEED },
                                         { "batch", 1, 0, BATCH },     { "context", 1, 0, CONTEXT },
                                         { "embed", 1, 0, EMBED },     { "width", 1, 0, WIDTH },
                                         { "ff", 1, 0, FF },           { "experts", 1, 0, EXPERTS },
                                         { "top-k", 1, 0, TOP_K },     { "blocks", 1, 0, BLOCKS },
                                         { "rate", 1, 0, RATE },       { "balance", 1, 0, BALANCE },
                                         { "health", 0, 0, HEALTH },   { "metrics", 1, 0, METRICS },
                                         { "save", 1, 0, SAVE },       { "save-every", 1, 0, SAVE_EVERY },
                                         { "resume", 1, 0, RESUME },   { "until", 1, 0, UNTIL },
                                         { "help", 0, 0, HELP },       { 0, 0, 0, 0 } };
  int c;
  while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
    int ok = 1;
    switch (c) {
    case DEVICE: o->device = optarg; break;
    case DTYPE:
      o->dtype = 0;
      for (int64_t d = MOE_F64; d <= MOE_F16; d++)
        if (!strcmp(optarg, moe_dtype_name(d))) o->dtype = d;
      if (!o->dtype) fprintf(stderr, "train_lm: --dtype %s: wanted f64, f32, bf16 or f16\n", optarg);
      ok = o->dtype != 0;
      break;
    case DATA: ok = append_file(t, optarg); break;
    case STEPS: ok = whole_number("steps", optarg, 1, 1000000000, &o->steps); break;
    case SECONDS: ok = number("seconds", optarg, 0, &o->seconds); break;
    case SEED: ok = whole_number("seed", optarg, 0, 1000000000, &o->seed); break;
    case BATCH: ok = whole_number("batch", optarg, 1, 1 << 20, &o->batch); break;
    case CONTEXT: ok = whole_number("context", optarg, 1, 1024, &o->context); break;
    case EMBED: ok = whole_number("embed", optarg, 1, 4096, &o->embed); break;
    case WIDTH: ok = whole_number("width", optarg, 1, 65536, &o->width); break;
    case FF: ok = whole_number("ff", optarg, 1, 65536, &o->ff); break;
    case EXPERTS: ok = whole_number("experts", optarg, 1, 4096, &o->experts); break;
    case TOP_K: ok = whole_number("top-k", optarg, 1, 4096, &o->top_k); break;
    case BLOCKS: ok = whole_number("blocks", optarg, 1, MAX_BLOCKS, &o->blocks); break;
    case RATE: ok = number("rate", optarg, 1e-12, &o->rate); break;
    case BALANCE: ok = number("balance", optarg, 0, &o->balance); break;
    case HEALTH: o->health = 1; break;
    case METRICS: o->metrics = optarg; break;
    case SAVE: o->save = optarg; break;
    case SAVE_EVERY: ok = whole_number("save-every", optarg, 1, 1000000000, &o->save_every); break;
    case RESUME: o->resume = optarg; break;
    case UNTIL: ok = whole_number("until", optarg, 1, 1000000000, &o->until); break;
    case HELP: usage(stdout); exit(0);
    default: usage(stderr); return 0;
    }
    if (!ok) return 0;
  }
  if (optind < argc) {
    fprintf(stderr, "train_lm: unexpected argument %s\n", argv[optind]);
    return 0;
  }
  if (o->save_every && !o->save) {
    fprintf(stderr, "train_lm: --save-every without --save\n");
    return 0;
  }
  if (!t->bytes && !default_text(t)) return 0;
  t->train = t->count - t->count / 10;
  if (t->count < 1000) {
    fprintf(stderr, "train_lm: %" PRId64 " bytes of text: at least 1000 are needed, 1 MB or more is recommended\n",
            t->count);
    return 0;
  }
  return 1;
}

int main(int argc, char **argv)
{
  static struct model m; /* zero */
  struct text t = { 0 };
  FILE *metrics = NULL;
  m.o = (struct options){ .dtype = MOE_F32,
                          .context = 16,
                          .embed = 32,
                          .width = 192,
                          .ff = 192,
                          .experts = 16,
                          .top_k = 2,
                          .blocks = 3,
                          .batch = 1024,
                          .steps = 2500,
                          .seed = 2,
                          .seconds = 240,
                          .rate = 0.002,
                          .balance = 0.01 };
  if (!parse(argc, argv, &m.o, &t)) {
    free(t.bytes);
    return 2;
  }
  int rc = 0;
  if (m.o.metrics && !(metrics = fopen(m.o.metrics, m.o.resume ? "a" : "w"))) {
    fprintf(stderr, "train_lm: cannot write %s: %s\n", m.o.metrics, strerror(errno));
    rc = 1;
  }
  if (metrics) setvbuf(metrics, NULL, _IOLBF, 0); /* can be followed while it trains */
  signal(SIGINT, on_interrupt);
  m.random = 0xd1342543de82ef95u * (uint64_t)(m.o.seed + 1) | 1;
  if (!rc) rc = build(&m);
  if (!rc && m.o.resume) rc = resume(&m, &t);
  if (!rc) {
    moe_device_info info = moe_device_info_init();
    int64_t all, active;
    if (moe_context_info(m.ctx, &info) == MOE_OK && moe_layer_parameter_counts(&all, &active, m.layer) == MOE_OK)
      printf("%s (%s), %s; %" PRId64 " bytes of text, the last %" PRId64 " held out\n"
             "%" PRId64 " blocks of %" PRId64 " experts, top %" PRId64 ": %" PRId64 " parameters each, %" PRId64
             " active\n",
             info.id, info.name, moe_dtype_name(m.o.dtype), t.count, t.count - t.train, m.o.blocks, m.o.experts,
             m.o.top_k, all, active);
    fflush(stdout);
    rc = train(&m, &t, metrics);
  }
  if (!rc) rc = report(&m, &t);
  if (metrics && fclose(metrics)) rc = 1;
  release(&m);
  free(t.bytes);
  return rc;
}
