/* checkpoint_models.c - layers under the tensor names of published models, and the optimizer's state: both become lists
   of parts (checkpoint.h), which are checked together before the first is copied.

   Which tensor holds which parameter, and in which order of dimensions, is the table below and nothing else: no layout
   is guessed from a shape. */
#include "core/checkpoint.h"
#include "core/convert.h"
#include "core/layer.h"
#include "core/optim.h"
#include "core/tensor.h"
#include "core/transfer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- names -------------------------------------------------------------------------------------------------------- */
#define OF(scheme) (1 << MOE_NAMES_##scheme)
#define PER_EXPERT (OF(QWEN3) | OF(OLMOE) | OF(DEEPSEEK))

/* name: behind prefix and module; a star is the expert's number.  shape: the dimensions in the file, slowest first, as
   moe__param_dims names them; behind one of them g or u: it is twice as long, gate's and up's in turn.  mxfp4: the
   same for what <name>_blocks and <name>_scales hold, whose blocks lie along the last dimension. */
struct row {
  int schemes;
  const char *param, *name, *shape, *mxfp4;
};
static const struct row table[] = {
  { OF(MIXTRAL) | PER_EXPERT, "router", "gate.weight", "ED", NULL },
  { OF(MIXTRAL), "gate", "experts.*.w1.weight", "FD", NULL },
  { OF(MIXTRAL), "up", "experts.*.w3.weight", "FD", NULL },
  { OF(MIXTRAL), "down", "experts.*.w2.weight", "DF", NULL },
  { PER_EXPERT, "gate", "experts.*.gate_proj.weight", "FD", NULL },
  { PER_EXPERT, "up", "experts.*.up_proj.weight", "FD", NULL },
  { PER_EXPERT, "down", "experts.*.down_proj.weight", "DF", NULL },
  { OF(QWEN3), "shared_gate_proj", "shared_expert.gate_proj.weight", "SD", NULL },
  { OF(QWEN3), "shared_up", "shared_expert.up_proj.weight", "SD", NULL },
  { OF(QWEN3), "shared_down", "shared_expert.down_proj.weight", "DS", NULL },
  { OF(QWEN3), "shared_gate", "shared_expert_gate.weight", "1D", NULL },
  { OF(DEEPSEEK), "correction_bias", "gate.e_score_correction_bias", "E", NULL },
  { OF(DEEPSEEK), "shared_gate_proj", "shared_experts.gate_proj.weight", "SD", NULL },
  { OF(DEEPSEEK), "shared_up", "shared_experts.up_proj.weight", "SD", NULL },
  { OF(DEEPSEEK), "shared_down", "shared_experts.down_proj.weight", "DS", NULL },
  { OF(GPT_OSS), "router", "router.weight", "ED", NULL },
  { OF(GPT_OSS), "router_bias", "router.bias", "E", NULL },
  { OF(GPT_OSS), "gate", "experts.gate_up_proj", "EDFg", "EFgD" },
  { OF(GPT_OSS), "up", "experts.gate_up_proj", "EDFu", "EFuD" },
  { OF(GPT_OSS), "down", "experts.down_proj", "EFD", "EDF" },
  { OF(GPT_OSS), "gate_bias", "experts.gate_up_proj_bias", "EFg", NULL },
  { OF(GPT_OSS), "up_bias", "experts.gate_up_proj_bias", "EFu", NULL },
  { OF(GPT_OSS), "down_bias", "experts.down_proj_bias", "ED", NULL },
};
#define N_ROWS ((int)(sizeof table / sizeof table[0]))

static const struct {
  const char *name, *module;
} schemes[] = {
  [MOE_NAMES_LIBMOE] = { "libmoe", "" },         [MOE_NAMES_MIXTRAL] = { "Mixtral", "block_sparse_moe." },
  [MOE_NAMES_QWEN3] = { "Qwen3", "mlp." },       [MOE_NAMES_OLMOE] = { "OLMoE", "mlp." },
  [MOE_NAMES_DEEPSEEK] = { "DeepSeek", "mlp." }, [MOE_NAMES_GPT_OSS] = { "gpt-oss", "mlp." },
};
#define N_SCHEMES ((int64_t)(sizeof schemes / sizeof schemes[0]))

/* 0 where the scheme has no name for the parameter. */
static int find_row(struct row *out, int64_t names, const char *param, const char *dims)
{
  if (names == MOE_NAMES_LIBMOE) {
    *out = (struct row){ OF(LIBMOE), param, param, dims, NULL };
    return 1;
  }
  for (int i = 0; i < N_ROWS; i++) {
    if (!(table[i].schemes & 1 << names) || strcmp(table[i].param, param)) continue;
    *out = table[i];
    return 1;
  }
  return 0;
}

/* The part of a tensor with dimensions `shape` that is `to`, whose dimensions are `dims`. */
static struct moe__part part_of(const char *name, const char *shape, const char *dims, const moe_tensor *to)
{
  struct moe__part p = { .name = name, .to = *to };
  int64_t step = 1, pair = 1;
  for (const char *c = shape; *c; c++) p.rank += *c != 'g' && *c != 'u';
  int64_t d = p.rank;
  for (size_t i = strlen(shape); i-- > 0;) {
    if (shape[i] == 'g' || shape[i] == 'u') {
      if (shape[i] == 'u') p.at = step;
      pair = 2;
      continue;
    }
    int64_t of = strchr(dims, shape[i]) - dims;
    p.stride[of] = step * pair;
    p.shape[--d] = to->shape[of] * pair;
    step *= p.shape[d];
    pair = 1;
  }
  return p;
}

/* ---- a layer's tensors --------------------------------------------------------------------------------------------- */
/* Weights of few bits, which are not copied but computed. */
enum code { MXFP4, FP8 };
struct coded {
  enum code code;
  const char *codes, *scales; /* names in the file */
  struct moe__part part;      /* as if each code were an element; rows lie in the file as in the parameter */
};

struct plan {
  struct moe__part *parts;
  struct coded *coded;
  int64_t n, n_coded;
  char *text; /* names, `width` bytes each: three for a parameter, and the caller's */
  size_t width, used;
};

static void free_plan(struct plan *p)
{
  free(p->parts);
  free(p->coded);
  free(p->text);
}

static const char *name_of(struct plan *p, const char *prefix, const char *module, const char *name, int64_t expert,
                           const char *suffix)
{
  char *text = p->text + p->used;
  const char *star = strchr(name, '*');
  p->used += p->width;
  if (!star) snprintf(text, p->width, "%s%s%s%s", prefix, module, name, suffix);
  else
    snprintf(text, p->width, "%s%s%.*s%lld%s%s", prefix, module, (int)(star - name), name, (long long)expert, star + 1,
             suffix);
  return text;
}

/* A tensor that is only checked, once for gate and up. */
static void check_only(struct plan *p, const char *name, int64_t dtype, int64_t rank, const int64_t *shape)
{
  for (int64_t i = p->n - 1; i >= 0 && i >= p->n - 2; i--)
    if (!strcmp(p->parts[i].name, name)) return;
  struct moe__part *part = &p->parts[p->n++];
  *part = (struct moe__part){ .name = name, .rank = rank };
  part->to.dtype = (int32_t)dtype;
  memcpy(part->shape, shape, (size_t)rank * sizeof *shape);
}

static int in_file(const moe_checkpoint *c, const char *name, moe_checkpoint_entry *entry)
{
  *entry = moe_checkpoint_entry_init();
  return moe_checkpoint_find(entry, c, name) == MOE_OK;
}

/* One tensor of the file, for a load (c given) in the form that the file has. */
static void add(struct plan *p, const moe_checkpoint *c, const struct row *row, const char *dims, const char *prefix,
                const char *module, int64_t expert, const moe_tensor *to)
{
  const char *name = name_of(p, prefix, module, row->name, expert, "");
  struct moe__part part = part_of(name, row->shape, dims, to);
  moe_checkpoint_entry entry, scales;
  struct coded *coded = &p->coded[p->n_coded];
  int there = c && in_file(c, name, &entry);
  if (c && !there && row->mxfp4) {
    coded->code = MXFP4;
    coded->codes = name_of(p, prefix, module, row->name, expert, "_blocks");
    coded->scales = name_of(p, prefix, module, row->name, expert, "_scales");
    coded->part = part_of(name, row->mxfp4, dims, to);
    if (coded->part.shape[2] % 32 == 0 && (in_file(c, coded->codes, &entry) || in_file(c, coded->scales, &scales))) {
      const int64_t shape[4] = { coded->part.shape[0], coded->part.shape[1], coded->part.shape[2] / 32, 16 };
      check_only(p, coded->codes, MOE_U8, 4, shape);
      check_only(p, coded->scales, MOE_U8, 3, shape);
      p->n_coded++;
      return;
    }
  }
  if (there && entry.dtype == MOE_F8E4M3 && part.rank == 2) { /* never without its scales */
    const int64_t shape[2] = { (part.shape[0] + 127) / 128, (part.shape[1] + 127) / 128 };
    coded->code = FP8;
    coded->codes = name;
    coded->scales = name_of(p, prefix, module, row->name, expert, "_scale_inv");
    coded->part = part;
    check_only(p, coded->codes, MOE_F8E4M3, 2, part.shape);
    check_only(p, coded->scales, MOE_F32, 2, shape);
    p->n_coded++;
    return;
  }
  p->parts[p->n++] = part;
}

static moe_status make_plan(struct plan *p, const moe_checkpoint *c, const moe_layer *layer, moe_span params,
                            const char *prefix, int64_t names, const char *fn)
{
  moe_layer_param_info info = moe_layer_param_info_init();
  moe_tensor t;
  struct row row;
  int64_t count = 0, gated = 0;
  memset(p, 0, sizeof *p);
  if (names < 0 || names >= N_SCHEMES)
    return moe__fail(MOE_ERR_INVALID, "%s: names %lld is none of moe_names", fn, (long long)names);
  for (int64_t i = 0; !moe_layer_param(NULL, NULL, &info, layer, params, (moe_span){ 0 }, i); i++) {
    if (!find_row(&row, names, info.name, moe__param_dims(info.name)))
      return moe__fail(MOE_ERR_UNSUPPORTED, "%s: %s names have none for %s", fn, schemes[names].name, info.name);
    moe_status st = moe_layer_param(&t, NULL, NULL, layer, params, (moe_span){ 0 }, i);
    if (st) return moe__fail_in(st, fn);
    count += strchr(row.name, '*') ? t.shape[0] : 1;
    gated |= !strcmp(info.name, "gate");
  }
  if (names != MOE_NAMES_LIBMOE && !gated)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: %s names are of gated experts", fn, schemes[names].name);

  p->width = strlen(prefix) + 80;
  p->parts = calloc((size_t)count * 2, sizeof *p->parts);
  p->coded = calloc((size_t)count, sizeof *p->coded);
  p->text = malloc((size_t)(count * 3 + 1) * p->width);
  if (!p->parts || !p->coded || !p->text) {
    free_plan(p);
    return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  }
  const char *module = schemes[names].module;
  for (int64_t i = 0; !moe_layer_param(&t, NULL, &info, layer, params, (moe_span){ 0 }, i); i++) {
    const char *dims = moe__param_dims(info.name);
    find_row(&row, names, info.name, dims);
    if (!strchr(row.name, '*')) add(p, c, &row, dims, prefix, module, 0, &t);
    else
      for (int64_t e = 0; e < t.shape[0]; e++) {
        moe_tensor one = moe__view(t, e * t.stride[0], t.rank - 1, t.shape + 1, t.stride + 1);
        add(p, c, &row, dims + 1, prefix, module, e, &one);
      }
  }
  return MOE_OK;
}

/* ---- few bits -------------------------------------------------------------------------------------------------------- */
/* Rows of MXFP4, as transformers' convert_moe_packed_tensors reads them: 32 values of E2M1 share a scale 2^(s-127); a
   byte holds two, the first in its low half.  `at`, `step`: elements, multiples of 32. */
static void decode_mxfp4(float *out, const uint8_t *codes, const uint8_t *scales, int64_t at, int64_t step,
                         int64_t rows, int64_t cols)
{
  static const float e2m1[16] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6 };
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c += 32) {
      int64_t block = (at + r * step + c) / 32;
      float scale = ldexpf(1, scales[block] - 127);
      for (int64_t i = 16 * block; i < 16 * block + 16; i++) {
        *out++ = scale * e2m1[codes[i] & 15];
        *out++ = scale * e2m1[codes[i] >> 4];
      }
    }
}

/* F8_E4M3 with a scale for each block of 128 x 128. */
static void decode_fp8(float *out, const uint8_t *codes, const float *scales, int64_t rows, int64_t cols)
{
  uint8_t all[256];
  float e4m3[256];
  for (int i = 0; i < 256; i++) all[i] = (uint8_t)i;
  moe__convert(e4m3, MOE_F32, 1, all, MOE_F8E4M3, 1, 256);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++)
      out[r * cols + c] = e4m3[codes[r * cols + c]] * scales[r / 128 * ((cols + 127) / 128) + c / 128];
}

/* To the device as F32, an expert at a time; `room`: floats for its values and, behind them, for the scales. */
static moe_status decode(const moe_checkpoint *c, moe_queue *q, const struct coded *w, float *room)
{
  moe_checkpoint_entry codes, scales;
  const struct moe__part *p = &w->part;
  int d = p->to.rank - 2;
  int64_t rows = p->to.shape[d], cols = p->to.shape[d + 1], experts = d ? p->to.shape[0] : 1;
  const int64_t stride[3] = { rows * cols, cols, 1 };
  if (!in_file(c, w->codes, &codes) || !in_file(c, w->scales, &scales)) return MOE_ERR_NOT_FOUND;
  for (int64_t e = 0; e < experts; e++) {
    moe_tensor to = p->to;
    if (d) MOE__TRY(moe_tensor_slice(&to, &p->to, 0, e, e + 1));
    if (w->code == MXFP4)
      decode_mxfp4(room, codes.data, scales.data, p->at + e * p->stride[0], p->stride[d], rows, cols);
    else {
      float *s = room + rows * cols;
      moe__convert(s, MOE_F32, 1, scales.data, scales.dtype, 1, scales.shape[0] * scales.shape[1]);
      decode_fp8(room, codes.data, s, rows, cols);
    }
    MOE__TRY(moe__upload(q, &to, room, MOE_F32, stride + 1 - d));
  }
  return MOE_OK;
}

/* ---- load and save ---------------------------------------------------------------------------------------------------- */
static moe_status check_objects(const char *fn, const void *file, const char *file_name, const char *prefix)
{
  return file && prefix ? MOE_OK : moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, file ? "prefix" : file_name);
}

static moe_status load(const moe_checkpoint *c, moe_queue *q, const struct plan *p, const char *scope, int64_t flags,
                       const char *fn)
{
  int64_t most = 0;
  MOE__TRY(moe__parts_check(fn, c, p->parts, p->n, scope, flags));
  for (int64_t i = 0; i < p->n_coded; i++) {
    const moe_tensor *to = &p->coded[i].part.to;
    int64_t n = to->shape[to->rank - 2] * to->shape[to->rank - 1];
    if (n > most) most = n;
  }
  float *room = malloc((size_t)(2 * most + 1) * sizeof *room); /* there are no more scales than values */
  if (!room) return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  moe_status st = MOE_OK;
  for (int64_t i = 0; !st && i < p->n_coded; i++) {
    st = decode(c, q, &p->coded[i], room);
    if (st) moe__fail_in(st, fn);
  }
  if (!st) st = moe__parts_copy(fn, c, q, p->parts, p->n);
  free(room);
  return st;
}

moe_status moe_checkpoint_load_layer(const moe_checkpoint *c, moe_queue *q, const moe_layer *layer, moe_span params,
                                     const char *prefix, int64_t names, int64_t flags)
{
  static const char fn[] = "moe_checkpoint_load_layer";
  struct plan p;
  MOE__TRY(check_objects(fn, c, "checkpoint", prefix));
  MOE__TRY(moe__layer_check(fn, layer, q));
  MOE__TRY(make_plan(&p, c, layer, params, prefix, names, fn));
  char *scope = p.text + p.used;
  snprintf(scope, p.width, "%s%s", prefix, schemes[names].module);
  moe_status st = load(c, q, &p, scope, flags, fn);
  free_plan(&p);
  return st;
}

/* The `n` parts of one tensor, slice by slice of its first dimension where it has three. */
static moe_status write_tensor(moe_checkpoint_writer *w, moe_queue *q, const struct moe__part *parts, int64_t n,
                               char *data, const char *fn)
{
  const struct moe__part *p = parts;
  uint64_t size = moe_dtype_size(p->to.dtype);
  int64_t slices = p->rank > 2 ? p->shape[0] : 1, count = 1;
  for (int64_t d = p->rank > 2; d < p->rank; d++) count *= p->shape[d];
  MOE__TRY(moe__writer_begin(fn, w, p->name, p->to.dtype, p->rank, p->shape));
  for (int64_t s = 0; s < slices; s++) {
    for (int64_t i = 0; i < n; i++) {
      moe_tensor from = parts[i].to;
      if (p->rank > 2) MOE__TRY(moe_tensor_slice(&from, &parts[i].to, 0, s, s + 1));
      MOE__TRY(moe__download(q, data + (uint64_t)parts[i].at * size, parts[i].stride, &from));
    }
    MOE__TRY(moe__writer_append(fn, w, data, (uint64_t)count * size));
  }
  return moe__writer_end(fn, w);
}

moe_status moe_checkpoint_save_layer(moe_checkpoint_writer *w, moe_queue *q, const moe_layer *layer, moe_span params,
                                     const char *prefix, int64_t names)
{
  static const char fn[] = "moe_checkpoint_save_layer";
  struct plan p;
  uint64_t room = 1;
  MOE__TRY(check_objects(fn, w, "writer", prefix));
  MOE__TRY(moe__layer_check(fn, layer, q));
  MOE__TRY(make_plan(&p, NULL, layer, params, prefix, names, fn));
  for (int64_t i = 0; i < p.n; i++) {
    uint64_t bytes = moe_dtype_size(p.parts[i].to.dtype);
    for (int64_t d = p.parts[i].rank > 2; d < p.parts[i].rank; d++) bytes *= (uint64_t)p.parts[i].shape[d];
    if (bytes > room) room = bytes;
  }
  char *data = malloc(room);
  moe_status st = data ? MOE_OK : moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  for (int64_t i = 0, n; !st && i < p.n; i += n) {
    /* gate and up, neighbours among the layer's parameters, may be of one tensor */
    n = i + 1 < p.n && !strcmp(p.parts[i].name, p.parts[i + 1].name) ? 2 : 1;
    st = write_tensor(w, q, &p.parts[i], n, data, fn);
  }
  free(data);
  free_plan(&p);
  return st;
}

/* ---- the optimizer ---------------------------------------------------------------------------------------------------- */
struct state {
  struct moe__adamw_part *parts;
  int64_t n;
  char *text;
  size_t width;
};

static moe_status open_state(struct state *s, const moe_adamw *opt, const moe_queue *q, const char *prefix,
                             const char *fn)
{
  MOE__TRY(moe__adamw_parts(&s->parts, &s->n, opt, q, fn));
  s->width = strlen(prefix) + sizeof s->parts->name;
  s->text = malloc((size_t)s->n * s->width);
  if (!s->text) {
    free(s->parts);
    return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  }
  for (int64_t i = 0; i < s->n; i++)
    snprintf(s->text + (size_t)i * s->width, s->width, "%s%s", prefix, s->parts[i].name);
  return MOE_OK;
}

static void close_state(struct state *s)
{
  free(s->parts);
  free(s->text);
}

moe_status moe_checkpoint_save_adamw(moe_checkpoint_writer *w, moe_queue *q, const moe_adamw *opt, const char *prefix)
{
  static const char fn[] = "moe_checkpoint_save_adamw";
  struct state s;
  MOE__TRY(check_objects(fn, w, "writer", prefix));
  MOE__TRY(open_state(&s, opt, q, prefix, fn));
  moe_status st = MOE_OK;
  for (int64_t i = 0; !st && i < s.n; i++) {
    st = moe_checkpoint_writer_add_tensor(w, s.text + (size_t)i * s.width, q, &s.parts[i].t);
    if (st) moe__fail_in(st, fn);
  }
  close_state(&s);
  return st;
}

moe_status moe_checkpoint_load_adamw(const moe_checkpoint *c, moe_queue *q, moe_adamw *opt, const char *prefix,
                                     int64_t flags)
{
  static const char fn[] = "moe_checkpoint_load_adamw";
  struct state s;
  MOE__TRY(check_objects(fn, c, "checkpoint", prefix));
  MOE__TRY(open_state(&s, opt, q, prefix, fn));
  struct moe__part *parts = malloc((size_t)s.n * sizeof *parts);
  moe_status st = parts ? MOE_OK : moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
  for (int64_t i = 0; !st && i < s.n; i++) parts[i] = moe__part_whole(s.text + (size_t)i * s.width, &s.parts[i].t);
  if (!st) st = moe__parts_check(fn, c, parts, s.n, prefix, flags);
  if (!st) st = moe__parts_copy(fn, c, q, parts, s.n);
  free(parts);
  close_state(&s);
  return st;
}
