/* t_checkpoint_models.c - layers under published names, against files that transformers wrote (tests/oracle) and
   against what the names promise; and the optimizer's state. */
#include "files.h"
#include "fixture.h"

#include <math.h>

static moe_context *ctx;
static moe_queue *queue;

static moe_checkpoint *open_oracle(const char *name)
{
  char path[512];
  moe_checkpoint *c;
  const char *srcdir = getenv("MOE_TEST_SRCDIR");
  snprintf(path, sizeof path, "%s/tests/oracle/%s.safetensors", srcdir ? srcdir : ".", name);
  OK(moe_checkpoint_open(&c, path));
  return c;
}

static moe_checkpoint_entry find(const moe_checkpoint *c, const char *name)
{
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  OK(moe_checkpoint_find(&e, c, name));
  return e;
}

static moe_checkpoint_entry entry_at(const moe_checkpoint *c, int64_t i)
{
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  OK(moe_checkpoint_at(&e, c, i));
  return e;
}

static int starts(const char *text, const char *with)
{
  return !strncmp(text, with, strlen(with));
}

/* Element i, of data that need not be aligned: F32 or BF16, the upper half of one. */
static double element(const moe_checkpoint_entry *e, int64_t i)
{
  const unsigned size = e->dtype == MOE_BF16 ? 2 : 4;
  unsigned char bytes[4] = { 0 };
  float value;
  if (e->dtype != MOE_F32 && e->dtype != MOE_BF16) fail_msg("%s is %s", e->name, moe_dtype_name(e->dtype));
  memcpy(bytes + 4 - size, (const char *)e->data + i * (int64_t)size, size);
  memcpy(&value, bytes, 4);
  return (double)value;
}

/* ---- families ------------------------------------------------------------------------------------------------------ */
static const struct family {
  const char *name, *module;
  int64_t names;
} families[] = {
  { "libmoe", "", MOE_NAMES_LIBMOE },         { "mixtral", "block_sparse_moe.", MOE_NAMES_MIXTRAL },
  { "qwen3", "mlp.", MOE_NAMES_QWEN3 },       { "olmoe", "mlp.", MOE_NAMES_OLMOE },
  { "deepseek", "mlp.", MOE_NAMES_DEEPSEEK }, { "gpt_oss", "mlp.", MOE_NAMES_GPT_OSS },
};
#define N_FAMILIES (int)(sizeof families / sizeof families[0])

/* A layer as the family has it, with random parameters, into which a load may write. */
static struct layer layer_for(const struct family *f, int64_t dtype, int64_t T, int64_t D, int64_t F, int64_t E,
                              uint64_t seed)
{
  struct options o = options_of(dtype, T, D, F, E, 2);
  struct layer l;
  o.seed = seed;
  if (f->names == MOE_NAMES_OLMOE) o.weights.renormalize = 0;
  if (f->names == MOE_NAMES_DEEPSEEK) {
    options_sigmoid(&o);
    o.selection.groups = 2;
    o.selection.selected_groups = 1;
    o.selection.group_top_two = E >= 4;
    if (E < 4) o.selection.groups = 1;
    o.weights.scale = 2.5;
  }
  if (f->names == MOE_NAMES_GPT_OSS) {
    o.weights.scoring = MOE_SOFTMAX_CHOSEN;
    o.activation.alpha = 1.702;
    o.activation.limit = 7;
    o.activation.up_offset = 1;
  }
  l = layer_of(o);
  if (f->names == MOE_NAMES_DEEPSEEK) {
    l.desc.correction_bias = 1;
    l.desc.d_shared = F;
  }
  if (f->names == MOE_NAMES_GPT_OSS) l.desc.router_bias = l.desc.hidden_bias = l.desc.down_bias = 1;
  return l;
}

static void make(struct layer *l)
{
  layer_make(l, ctx, queue, 0);
  for (int p = 0; p < REF_PARAMS; p++)
    if (l->param[p].handle) t_own(&l->m, &l->param[p]);
}

/* The parameters, as they are on the device now. */
struct values {
  double *of[REF_PARAMS];
};
static struct values params_of(struct layer *l)
{
  struct values v = { { NULL } };
  fetch(&l->m);
  for (int p = 0; p < REF_PARAMS; p++)
    if (l->param[p].handle) v.of[p] = values_of(&l->m, &l->param[p]);
  return v;
}

static void same_params(struct layer *l, const struct values *a, const struct values *b)
{
  for (int p = 0; p < REF_PARAMS; p++) {
    if (!l->param[p].handle) continue;
    if (memcmp(a->of[p], b->of[p], (size_t)moe_tensor_count(&l->param[p]) * sizeof(double)))
      fail_msg("%s differs", ref_param_names[p]);
  }
}

static moe_checkpoint *save_and_open(struct layer *l, const char *file, const char *prefix, int64_t names)
{
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  OK(moe_checkpoint_writer_create(&w, files_path(file), NULL));
  OK(moe_checkpoint_save_layer(w, queue, l->layer, l->io.params, prefix, names));
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path(file)));
  return c;
}

/* A copy of the file without the tensor `without`, and with `with` (a F32 scalar). */
static moe_checkpoint *edited(const moe_checkpoint *from, const char *without, const char *with)
{
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  const float one = 1;
  OK(moe_checkpoint_writer_create(&w, files_path("edited.safetensors"), NULL));
  for (int64_t i = 0; i < moe_checkpoint_count(from); i++) {
    moe_checkpoint_entry e = entry_at(from, i);
    if (!without || strcmp(e.name, without)) OK(moe_checkpoint_writer_add(w, e.name, e.dtype, e.rank, e.shape, e.data));
  }
  if (with) OK(moe_checkpoint_writer_add(w, with, MOE_F32, 0, NULL, &one));
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path("edited.safetensors")));
  return c;
}

/* ---- files that transformers wrote ----------------------------------------------------------------------------------- */
/* Every tensor of `a` under the prefix is in `b`, bit for bit, and there are no others in `b`. */
static void same_tensors(const moe_checkpoint *a, const moe_checkpoint *b, const char *prefix)
{
  int64_t n = 0;
  for (int64_t i = 0; i < moe_checkpoint_count(a); i++) {
    moe_checkpoint_entry x = entry_at(a, i);
    if (!starts(x.name, prefix)) continue;
    moe_checkpoint_entry y = find(b, x.name);
    n++;
    if (x.dtype != y.dtype || x.rank != y.rank || memcmp(x.shape, y.shape, (size_t)x.rank * sizeof *x.shape) ||
        x.bytes != y.bytes || memcmp(x.data, y.data, x.bytes))
      fail_msg("%s differs", x.name);
  }
  assert_true(n > 0);
  assert_int_equal(n, moe_checkpoint_count(b));
}

/* Loaded, the layer computes what transformers' block did; saved, its tensors are the file's. */
static void transformers_files(void **state)
{
  moe_checkpoint *io = open_oracle("names_io");
  (void)state;
  for (int i = 0; i < N_FAMILIES; i++) {
    const struct family *f = &families[i];
    char name[64], prefix[64];
    double error = 0, size = 0;
    if (f->names == MOE_NAMES_LIBMOE) continue;
    snprintf(name, sizeof name, "names_%s", f->name);
    moe_checkpoint *c = open_oracle(name);
    struct layer l = layer_for(f, MOE_F32, 5, 16, 8, 4, 1);
    make(&l);
    t_own(&l.m, &l.io.x);
    OK(moe_checkpoint_load_layer(c, queue, l.layer, l.io.params, "model.layers.0.", f->names, 0));
    snprintf(name, sizeof name, "%s.x", f->name);
    const moe_checkpoint_item x = { name, l.io.x };
    OK(moe_checkpoint_load(io, queue, &x, 1, MOE_CHECKPOINT_PARTIAL));
    layer_forward(&l);
    fetch(&l.m);
    snprintf(name, sizeof name, "%s.y", f->name);
    moe_checkpoint_entry want = find(io, name);
    double *y = values_of(&l.m, &l.io.y);
    for (int64_t k = 0; k < 5 * 16; k++) {
      double w = element(&want, k);
      error += (y[k] - w) * (y[k] - w);
      size += w * w;
    }
    if (!(sqrt(error / size) <= 5e-6)) fail_msg("%s: relative L2 %g", f->name, sqrt(error / size));

    snprintf(name, sizeof name, "saved_%s.safetensors", f->name);
    moe_checkpoint *saved = save_and_open(&l, name, "model.layers.0.", f->names);
    snprintf(prefix, sizeof prefix, "model.layers.0.%s", f->module);
    same_tensors(c, saved, prefix);
    moe_checkpoint_close(saved);
    moe_checkpoint_close(c);
    layer_free(&l);
  }
  moe_checkpoint_close(io);
}

static void transformers_mxfp4(void **state)
{
  static const int64_t dtypes[] = { MOE_BF16, MOE_F32, MOE_F64 };
  moe_checkpoint *c = open_oracle("names_mxfp4");
  moe_checkpoint_entry both = find(c, "out.gate_up_proj"), down = find(c, "out.down_proj");
  const int64_t E = 2, F = 32, D = 64;
  int infinite = 0;
  (void)state;
  for (int i = 0; i < (test_has_fp64(ctx) ? 3 : 2); i++) {
    struct layer l = layer_for(&families[5], dtypes[i], 3, D, F, E, 1);
    make(&l);
    /* the router and the biases are BF16 */
    OK(moe_checkpoint_load_layer(c, queue, l.layer, l.io.params, "model.layers.0.", MOE_NAMES_GPT_OSS,
                                 dtypes[i] == MOE_BF16 ? 0 : MOE_CHECKPOINT_CONVERT));
    struct values v = params_of(&l);
    for (int64_t e = 0; e < E; e++)
      for (int64_t r = 0; r < F; r++)
        for (int64_t d = 0; d < D; d++) {
          int64_t at = (e * F + r) * D + d;
          const double got[3] = { v.of[REF_GATE][at], v.of[REF_UP][at], v.of[REF_DOWN][(e * D + d) * F + r] };
          const double want[3] = { element(&both, (e * D + d) * 2 * F + 2 * r),
                                   element(&both, (e * D + d) * 2 * F + 2 * r + 1), element(&down, at) };
          for (int k = 0; k < 3; k++) {
            infinite += isinf(want[k]);
            if (memcmp(&got[k], &want[k], sizeof *got))
              fail_msg("%s of [%d,%d,%d]: %g, wanted %g", k ? k > 1 ? "down" : "up" : "gate", (int)e, (int)r, (int)d,
                       got[k], want[k]);
          }
        }
    layer_free(&l);
  }
  assert_true(infinite > 0);
  /* half of it there */
  moe_checkpoint *less = edited(c, "model.layers.0.mlp.experts.down_proj_scales", NULL);
  struct layer l = layer_for(&families[5], MOE_BF16, 3, D, F, E, 1);
  make(&l);
  FAILS(MOE_ERR_FORMAT, "model.layers.0.mlp.experts.down_proj_scales",
        moe_checkpoint_load_layer(less, queue, l.layer, l.io.params, "model.layers.0.", MOE_NAMES_GPT_OSS, 0));
  layer_free(&l);
  moe_checkpoint_close(less);
  moe_checkpoint_close(c);
}

/* ---- F8 with block scales ------------------------------------------------------------------------------------------ */
static double e4m3(uint8_t code)
{
  int exponent = code >> 3 & 15;
  double v = exponent ? ldexp(1 + (code & 7) / 8.0, exponent - 7) : ldexp((code & 7) / 8.0, -6);
  return code & 128 ? -v : v;
}

/* An expert's weights in blocks of 128 x 128, one of them zeros with the least scale there is; the rest in BF16. */
static void fp8_blocks(void **state)
{
  enum { D = 140, F = 130, E = 2 };
  static const char *const stems[] = { "gate_proj", "up_proj", "down_proj" };
  static const int params[] = { REF_GATE, REF_UP, REF_DOWN };
  static uint8_t codes[E][3][D * F];
  static float scales[E][3][4];
  struct family f = families[2];
  struct layer l = layer_for(&f, MOE_BF16, 3, D, F, E, 1);
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  (void)state;
  make(&l);
  OK(moe_checkpoint_writer_create(&w, files_path("fp8.safetensors"), NULL));
  OK(moe_checkpoint_writer_add_tensor(w, "x.mlp.gate.weight", queue, &l.param[REF_ROUTER]));
  for (int e = 0; e < E; e++)
    for (int k = 0; k < 3; k++) {
      char name[64];
      const int64_t shape[2] = { k < 2 ? F : D, k < 2 ? D : F }, blocks[2] = { 2, 2 };
      for (int64_t i = 0; i < D * F; i++) {
        codes[e][k][i] = (uint8_t)t_below(&l.m, 256);
        if ((codes[e][k][i] & 127) == 127) codes[e][k][i] = 0; /* NaN */
        if (i / shape[1] < 128 && i % shape[1] >= 128) codes[e][k][i] = 0;
      }
      for (int i = 0; i < 4; i++) scales[e][k][i] = i == 1 ? 1e-45f : (float)(1 + t_below(&l.m, 1000)) / 7;
      snprintf(name, sizeof name, "x.mlp.experts.%d.%s.weight", e, stems[k]);
      OK(moe_checkpoint_writer_add(w, name, MOE_F8E4M3, 2, shape, codes[e][k]));
      snprintf(name, sizeof name, "x.mlp.experts.%d.%s.weight_scale_inv", e, stems[k]);
      OK(moe_checkpoint_writer_add(w, name, MOE_F32, 2, blocks, scales[e][k]));
    }
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path("fp8.safetensors")));
  OK(moe_checkpoint_load_layer(c, queue, l.layer, l.io.params, "x.", f.names, MOE_CHECKPOINT_VERIFY));
  struct values v = params_of(&l);
  for (int e = 0; e < E; e++)
    for (int k = 0; k < 3; k++)
      for (int64_t i = 0; i < D * F; i++) {
        int64_t cols = k < 2 ? D : F;
        float product = (float)e4m3(codes[e][k][i]) * scales[e][k][i / cols / 128 * 2 + i % cols / 128];
        assert_near(v.of[params[k]][e * D * F + i], ref_round((double)product, MOE_BF16), 0.0);
      }
  moe_checkpoint *less = edited(c, "x.mlp.experts.1.up_proj.weight_scale_inv", NULL);
  FAILS(MOE_ERR_FORMAT, "missing: x.mlp.experts.1.up_proj.weight_scale_inv",
        moe_checkpoint_load_layer(less, queue, l.layer, l.io.params, "x.", f.names, MOE_CHECKPOINT_CONVERT));
  moe_checkpoint_close(less);
  moe_checkpoint_close(c);
  layer_free(&l);
}

/* ---- layouts come from the names ------------------------------------------------------------------------------------ */
/* Where 2F = D a matrix [D,2F] is square, and where 2F < D it is not: both read and written by the names alone. */
static void layouts(void **state)
{
  static const int64_t widths[] = { 8, 16 }, dtypes[] = { MOE_F32, MOE_BF16, MOE_F16, MOE_F64 };
  const int64_t E = 2, F = 4;
  (void)state;
  for (int i = 0; i < N_FAMILIES; i++)
    for (int k = 0; k < 2; k++)
      for (int d = 0; d < (test_has_fp64(ctx) ? 4 : 3); d++) {
        int64_t D = widths[k];
        struct layer a = layer_for(&families[i], dtypes[d], 3, D, F, E, 1),
                     b = layer_for(&families[i], dtypes[d], 3, D, F, E, 2);
        make(&a);
        make(&b);
        struct values va = params_of(&a);
        moe_checkpoint *c = save_and_open(&a, "layout.safetensors", "m.", families[i].names);
        OK(moe_checkpoint_load_layer(c, queue, b.layer, b.io.params, "m.", families[i].names, MOE_CHECKPOINT_VERIFY));
        struct values vb = params_of(&b);
        same_params(&a, &va, &vb);
        if (families[i].names == MOE_NAMES_GPT_OSS && d < 2) {
          moe_checkpoint_entry both = find(c, "m.mlp.experts.gate_up_proj"), down = find(c, "m.mlp.experts.down_proj"),
                               bias = find(c, "m.mlp.experts.gate_up_proj_bias");
          assert_true(both.rank == 3 && both.shape[1] == D && both.shape[2] == 2 * F && down.shape[1] == F);
          for (int64_t e = 0; e < E; e++)
            for (int64_t r = 0; r < F; r++) {
              assert_near(element(&bias, e * 2 * F + 2 * r), va.of[REF_GATE_BIAS][e * F + r], 0.0);
              assert_near(element(&bias, e * 2 * F + 2 * r + 1), va.of[REF_UP_BIAS][e * F + r], 0.0);
              for (int64_t x = 0; x < D; x++) {
                assert_near(element(&both, (e * D + x) * 2 * F + 2 * r), va.of[REF_GATE][(e * F + r) * D + x], 0.0);
                assert_near(element(&both, (e * D + x) * 2 * F + 2 * r + 1), va.of[REF_UP][(e * F + r) * D + x], 0.0);
                assert_near(element(&down, (e * F + r) * D + x), va.of[REF_DOWN][(e * D + x) * F + r], 0.0);
              }
            }
        }
        moe_checkpoint_close(c);
        layer_free(&a);
        layer_free(&b);
      }
}

/* Every tensor of a layer in turn is missing, and one too many is there: an error that names it, and the layer is as
   it was. */
static void missing_and_unexpected(void **state)
{
  (void)state;
  for (int i = 0; i < N_FAMILIES; i++) {
    const struct family *f = &families[i];
    struct layer l = layer_for(f, MOE_F32, 3, 16, 4, 2, 1), other = layer_for(f, MOE_F32, 3, 16, 4, 2, 2);
    char extra[64];
    make(&l);
    make(&other);
    struct values before = params_of(&l), after;
    moe_checkpoint *c = save_and_open(&other, "all.safetensors", "m.", f->names);
    for (int64_t k = 0; k < moe_checkpoint_count(c); k++) {
      const char *name = entry_at(c, k).name;
      moe_checkpoint *less = edited(c, name, "elsewhere.weight");
      FAILS(MOE_ERR_FORMAT, name,
            moe_checkpoint_load_layer(less, queue, l.layer, l.io.params, "m.", f->names, MOE_CHECKPOINT_PARTIAL));
      moe_checkpoint_close(less);
    }
    snprintf(extra, sizeof extra, "m.%sextra", f->module);
    moe_checkpoint *more = edited(c, NULL, extra);
    FAILS(MOE_ERR_FORMAT, extra, moe_checkpoint_load_layer(more, queue, l.layer, l.io.params, "m.", f->names, 0));
    after = params_of(&l);
    same_params(&l, &before, &after);
    OK(moe_checkpoint_load_layer(more, queue, l.layer, l.io.params, "m.", f->names, MOE_CHECKPOINT_PARTIAL));
    moe_checkpoint_close(more);
    moe_checkpoint_close(c);
    layer_free(&l);
    layer_free(&other);
  }
}

/* A bias that the file has and the layer has not, and the other way round; a shape; a dtype. */
static void differences(void **state)
{
  const struct family *f = &families[5];
  struct layer l = layer_for(f, MOE_F32, 3, 16, 4, 2, 1), plain = layer_for(f, MOE_F32, 3, 16, 4, 2, 1),
               wide = layer_for(f, MOE_F32, 3, 16, 8, 2, 1), half = layer_for(f, MOE_BF16, 3, 16, 4, 2, 1);
  (void)state;
  plain.desc.hidden_bias = plain.desc.down_bias = plain.desc.router_bias = 0;
  make(&l);
  make(&plain);
  make(&wide);
  make(&half);
  moe_checkpoint *c = save_and_open(&l, "l.safetensors", "", f->names),
                 *p = save_and_open(&plain, "p.safetensors", "", f->names);
#define LOAD(c, l, flags) moe_checkpoint_load_layer(c, queue, (l).layer, (l).io.params, "", f->names, flags)
  struct values before = params_of(&plain), after;
  FAILS(MOE_ERR_FORMAT, "mlp.experts.gate_up_proj_bias", LOAD(c, plain, 0));
  FAILS(MOE_ERR_FORMAT, "mlp.experts.down_proj_bias", LOAD(c, plain, 0));
  FAILS(MOE_ERR_FORMAT, "mlp.router.bias", LOAD(c, plain, 0));
  after = params_of(&plain);
  same_params(&plain, &before, &after);
  before = params_of(&l);
  FAILS(MOE_ERR_FORMAT, "mlp.experts.gate_up_proj_bias", LOAD(p, l, 0));
  FAILS(MOE_ERR_FORMAT, "mlp.router.bias", LOAD(p, l, MOE_CHECKPOINT_PARTIAL));
  after = params_of(&l);
  same_params(&l, &before, &after);
  before = params_of(&wide);
  FAILS(MOE_ERR_FORMAT, "mlp.experts.down_proj", LOAD(c, wide, 0));
  after = params_of(&wide);
  same_params(&wide, &before, &after);
  before = params_of(&half);
  FAILS(MOE_ERR_FORMAT, "bf16", LOAD(c, half, 0));
  after = params_of(&half);
  same_params(&half, &before, &after);
  OK(LOAD(c, half, MOE_CHECKPOINT_CONVERT));
  before = params_of(&l);
  after = params_of(&half);
  for (int i = 0; i < REF_PARAMS; i++)
    for (int64_t k = 0; before.of[i] && k < moe_tensor_count(&l.param[i]); k++)
      assert_near(after.of[i][k], ref_round(before.of[i][k], MOE_BF16), 0.0);
#undef LOAD
  moe_checkpoint_close(c);
  moe_checkpoint_close(p);
  layer_free(&l);
  layer_free(&plain);
  layer_free(&wide);
  layer_free(&half);
}

/* The bias chooses between scores that differ by less than BF16 can tell: it stays FP32, in files too. */
static void correction_bias_is_exact(void **state)
{
  static const double biases[] = { 7.0, 7.01, 6.817, 7.063 };
  const struct family *f = &families[4];
  (void)state;
  for (int published = 0; published < 2; published++) {
    struct layer a = layer_for(f, MOE_BF16, 3, 16, 4, 4, 1), b = layer_for(f, MOE_BF16, 3, 16, 4, 4, 2);
    make(&a);
    make(&b);
    for (int i = 0; i < 4; i++) a.value[REF_CORRECTION_BIAS][i].v = (double)(float)biases[i];
    layer_send(&a);
    int64_t names = published ? f->names : MOE_NAMES_LIBMOE;
    moe_checkpoint *c = save_and_open(&a, "bias.safetensors", "", names);
    assert_int_equal(find(c, published ? "mlp.gate.e_score_correction_bias" : "correction_bias").dtype, MOE_F32);
    OK(moe_checkpoint_load_layer(c, queue, b.layer, b.io.params, "", names, 0));
    struct values v = params_of(&b);
    for (int i = 0; i < 4; i++) assert_near(v.of[REF_CORRECTION_BIAS][i], (double)(float)biases[i], 0.0);
    moe_checkpoint_close(c);
    layer_free(&a);
    layer_free(&b);
  }
}

/* Qwen2-MoE's and Qwen3-Next's shared expert has a gate. */
static void shared_gate(void **state)
{
  const struct family *f = &families[2];
  struct layer a = layer_for(f, MOE_F32, 3, 16, 4, 2, 1), b = layer_for(f, MOE_F32, 3, 16, 4, 2, 2);
  (void)state;
  a.desc.d_shared = b.desc.d_shared = 6;
  a.desc.shared_gate = b.desc.shared_gate = 1;
  make(&a);
  make(&b);
  moe_checkpoint *c = save_and_open(&a, "shared.safetensors", "", f->names);
  moe_checkpoint_entry gate = find(c, "mlp.shared_expert_gate.weight"),
                       up = find(c, "mlp.shared_expert.up_proj.weight");
  assert_true(gate.rank == 2 && gate.shape[0] == 1 && gate.shape[1] == 16);
  assert_true(up.rank == 2 && up.shape[0] == 6 && up.shape[1] == 16);
  OK(moe_checkpoint_load_layer(c, queue, b.layer, b.io.params, "", f->names, 0));
  struct values va = params_of(&a), vb = params_of(&b);
  same_params(&a, &va, &vb);
  moe_checkpoint_close(c);
  layer_free(&a);
  layer_free(&b);
}

static void refusals(void **state)
{
  struct layer l = layer_for(&families[4], MOE_F32, 3, 16, 4, 4, 1),
               plain = layer_for(&families[1], MOE_F32, 3, 16, 4, 2, 1);
  moe_checkpoint_writer *w;
  (void)state;
  plain.o.activation.gated = 0;
  make(&l);
  make(&plain);
  moe_checkpoint *c = save_and_open(&l, "refusals.safetensors", "", MOE_NAMES_DEEPSEEK);
  moe_context *other_ctx;
  moe_queue *other;
  assert_true(test_open(&other_ctx, &other));
  moe_span params = l.io.params, small = { params.handle, params.offset, 64 };
  OK(moe_checkpoint_writer_create(&w, files_path("refused.safetensors"), NULL));
  FAILS(MOE_ERR_UNSUPPORTED, "Mixtral names have none for correction_bias",
        moe_checkpoint_save_layer(w, queue, l.layer, params, "", MOE_NAMES_MIXTRAL));
  FAILS(MOE_ERR_UNSUPPORTED, "gpt-oss names have none for correction_bias",
        moe_checkpoint_load_layer(c, queue, l.layer, params, "", MOE_NAMES_GPT_OSS, 0));
  FAILS(MOE_ERR_UNSUPPORTED, "gated",
        moe_checkpoint_save_layer(w, queue, plain.layer, plain.io.params, "", MOE_NAMES_MIXTRAL));
  OK(moe_checkpoint_save_layer(w, queue, plain.layer, plain.io.params, "", MOE_NAMES_LIBMOE));
  FAILS(MOE_ERR_INVALID, "names 6", moe_checkpoint_save_layer(w, queue, l.layer, params, "", 6));
  FAILS(MOE_ERR_INVALID, "names -1", moe_checkpoint_load_layer(c, queue, l.layer, params, "", -1, 0));
  FAILS(MOE_ERR_INVALID, "checkpoint is NULL", moe_checkpoint_load_layer(NULL, queue, l.layer, params, "", 4, 0));
  FAILS(MOE_ERR_INVALID, "writer is NULL", moe_checkpoint_save_layer(NULL, queue, l.layer, params, "", 4));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_checkpoint_load_layer(c, NULL, l.layer, params, "", 4, 0));
  FAILS(MOE_ERR_INVALID, "layer is NULL", moe_checkpoint_load_layer(c, queue, NULL, params, "", 4, 0));
  FAILS(MOE_ERR_INVALID, "prefix is NULL", moe_checkpoint_load_layer(c, queue, l.layer, params, NULL, 4, 0));
  FAILS(MOE_ERR_INVALID, "different contexts", moe_checkpoint_load_layer(c, other, l.layer, params, "", 4, 0));
  FAILS(MOE_ERR_INVALID, "different contexts", moe_checkpoint_save_layer(w, other, l.layer, params, "", 4));
  FAILS(MOE_ERR_INVALID, "flags", moe_checkpoint_load_layer(c, queue, l.layer, params, "", 4, 64));
  FAILS(MOE_ERR_TOO_SMALL, "params", moe_checkpoint_load_layer(c, queue, l.layer, small, "", 4, 0));
  FAILS(MOE_ERR_INVALID, "params", moe_checkpoint_load_layer(c, queue, l.layer, (moe_span){ 0 }, "", 4, 0));
  OK(moe_checkpoint_load_layer(c, queue, l.layer, params, "", 4, 0));
  test_close(other_ctx, other);
  moe_checkpoint_writer_free(w);
  moe_checkpoint_close(c);
  layer_free(&l);
  layer_free(&plain);
}

/* ---- the optimizer ----------------------------------------------------------------------------------------------------- */
/* A matrix and a vector, with gradients; their optimizer. */
struct training {
  struct t_memory m;
  moe_adamw *opt;
  moe_tensor p[2], g[2];
  moe_span state;
  int64_t n;
};

static void training_make(struct training *t, int64_t dtype, int64_t n, int64_t rows, int64_t cols)
{
  moe_adamw_desc desc = moe_adamw_desc_init();
  uint64_t bytes;
  int64_t real = dtype == MOE_F64 ? MOE_F64 : MOE_F32;
  t_memory_init(&t->m, ctx, queue, 3);
  t->n = n;
  desc.dtype = real;
  desc.peak = 0.01;
  desc.warmup = 2;
  desc.total = 9;
  desc.max_norm = 1;
  OK(moe_adamw_create(&t->opt, ctx, &desc));
  for (int64_t i = 0; i < n; i++) {
    const int64_t shape[2] = { rows, cols };
    t->p[i] = output_of(&t->m, dtype, 2 - (int)i, shape);
    t->g[i] = t_tensor(&t->m, real, T_PACKED, 2 - (int)i, shape);
    OK(moe_adamw_add(t->opt, &t->p[i], &t->g[i], 0.1, 1));
  }
  OK(moe_adamw_measure(&bytes, t->opt));
  t->state = span_of(&t->m, bytes);
  for (int64_t i = 0; i < n; i++) {
    t_put(&t->m, &t->p[i], t_uniform(&t->m, moe_tensor_count(&t->p[i]), dtype, 1));
    t_put(&t->m, &t->g[i], t_uniform(&t->m, moe_tensor_count(&t->g[i]), real, 1));
  }
  send(&t->m);
  OK(moe_adamw_bind(t->opt, queue, t->state));
}

static void training_free(struct training *t)
{
  moe_adamw_free(t->opt);
  t_memory_free(&t->m);
}

static void steps(struct training *t, int n)
{
  while (n--) OK(moe_adamw_step(t->opt, queue));
}

/* Parameters and optimizer into a file; out of one. */
static moe_checkpoint *training_save(struct training *t, const char *file)
{
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  OK(moe_checkpoint_writer_create(&w, files_path(file), NULL));
  for (int64_t i = 0; i < t->n; i++) OK(moe_checkpoint_writer_add_tensor(w, i ? "p1" : "p0", queue, &t->p[i]));
  OK(moe_checkpoint_save_adamw(w, queue, t->opt, "adamw."));
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path(file)));
  return c;
}

static void training_load(struct training *t, const moe_checkpoint *c)
{
  const moe_checkpoint_item items[] = { { "p0", t->p[0] }, { "p1", t->p[1] } };
  OK(moe_checkpoint_load(c, queue, items, t->n, MOE_CHECKPOINT_PARTIAL));
  OK(moe_checkpoint_load_adamw(c, queue, t->opt, "adamw.", 0));
}

/* Five steps give the bits of three, a file, and two in another optimizer that had begun elsewhere. */
static void resumed_steps_are_the_same(void **state)
{
  static const int64_t dtypes[] = { MOE_F32, MOE_BF16, MOE_F16, MOE_F64 };
  (void)state;
  for (int i = 0; i < (test_has_fp64(ctx) ? 4 : 3); i++) {
    struct training a, b;
    training_make(&a, dtypes[i], 2, 4, 6);
    training_make(&b, dtypes[i], 2, 4, 6);
    steps(&b, 1);
    steps(&a, 3);
    moe_checkpoint *c = training_save(&a, "steps3.safetensors");
    training_load(&b, c);
    moe_checkpoint_close(c);
    moe_adamw_info ia = moe_adamw_info_init(), ib = moe_adamw_info_init();
    OK(moe_adamw_read(&ia, a.opt, queue));
    OK(moe_adamw_read(&ib, b.opt, queue));
    assert_int_equal(ib.step, 3);
    assert_memory_equal(&ia.rate, &ib.rate, sizeof ia.rate);
    steps(&a, 2);
    steps(&b, 2);
    moe_checkpoint *ca = training_save(&a, "a.safetensors"), *cb = training_save(&b, "b.safetensors");
    same_tensors(ca, cb, "");
    assert_int_equal(moe_checkpoint_count(ca), dtypes[i] == MOE_F32 || dtypes[i] == MOE_F64 ? 8 : 10);
    moe_checkpoint_close(ca);
    moe_checkpoint_close(cb);
    training_free(&a);
    training_free(&b);
  }
}

/* The state of other parameters is refused, and nothing has changed. */
static void other_parameters(void **state)
{
  struct training t, fewer, turned, half;
  (void)state;
  training_make(&t, MOE_F32, 2, 4, 6);
  training_make(&fewer, MOE_F32, 1, 4, 6);
  training_make(&turned, MOE_F32, 2, 6, 4);
  training_make(&half, MOE_BF16, 2, 4, 6);
  steps(&t, 2);
  moe_checkpoint *c = training_save(&t, "t.safetensors"), *f = training_save(&fewer, "f.safetensors"),
                 *before[4] = { training_save(&t, "b0.safetensors"), training_save(&fewer, "b1.safetensors"),
                                training_save(&turned, "b2.safetensors"), training_save(&half, "b3.safetensors") };
  struct training *all[4] = { &t, &fewer, &turned, &half };
  FAILS(MOE_ERR_FORMAT, "adamw.1.v", moe_checkpoint_load_adamw(f, queue, t.opt, "adamw.", 0));
  FAILS(MOE_ERR_FORMAT, "adamw.1.m", moe_checkpoint_load_adamw(c, queue, fewer.opt, "adamw.", 0));
  FAILS(MOE_ERR_FORMAT, "adamw.0.m", moe_checkpoint_load_adamw(c, queue, turned.opt, "adamw.", 0));
  FAILS(MOE_ERR_FORMAT, "adamw.0.master", moe_checkpoint_load_adamw(c, queue, half.opt, "adamw.", 0));
  FAILS(MOE_ERR_FORMAT, "other.step", moe_checkpoint_load_adamw(c, queue, t.opt, "other.", 0));
  for (int i = 0; i < 4; i++) {
    moe_checkpoint *after = training_save(all[i], "after.safetensors");
    same_tensors(before[i], after, "");
    moe_checkpoint_close(after);
    moe_checkpoint_close(before[i]);
  }
  moe_adamw *unbound;
  moe_adamw_desc desc = moe_adamw_desc_init();
  desc.dtype = MOE_F32;
  desc.peak = 1;
  OK(moe_adamw_create(&unbound, ctx, &desc));
  FAILS(MOE_ERR_STATE, "bind", moe_checkpoint_load_adamw(c, queue, unbound, "adamw.", 0));
  FAILS(MOE_ERR_INVALID, "opt is NULL", moe_checkpoint_load_adamw(c, queue, NULL, "adamw.", 0));
  FAILS(MOE_ERR_INVALID, "prefix is NULL", moe_checkpoint_load_adamw(c, queue, t.opt, NULL, 0));
  FAILS(MOE_ERR_INVALID, "writer is NULL", moe_checkpoint_save_adamw(NULL, queue, t.opt, ""));
  moe_adamw_free(unbound);
  moe_checkpoint_close(c);
  moe_checkpoint_close(f);
  for (int i = 0; i < 4; i++) training_free(all[i]);
}

/* tests/check_files.py wants the files of one test and removes them itself. */
static int close_files(void **state)
{
  return getenv("MOE_TEST_KEEP") ? 0 : files_close(state);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(transformers_files),
    cmocka_unit_test(transformers_mxfp4),
    cmocka_unit_test(fp8_blocks),
    cmocka_unit_test(layouts),
    cmocka_unit_test(missing_and_unexpected),
    cmocka_unit_test(differences),
    cmocka_unit_test(correction_bias_is_exact),
    cmocka_unit_test(shared_gate),
    cmocka_unit_test(refusals),
    cmocka_unit_test(resumed_steps_are_the_same),
    cmocka_unit_test(other_parameters),
  };
  if (!test_open(&ctx, &queue)) return 77;
  if (getenv("MOE_TEST_KEEP")) cmocka_set_test_filter("transformers_files");
  int rc = cmocka_run_group_tests(tests, files_open, close_files) ? 1 : 0;
  test_close(ctx, queue);
  return rc;
}
