/* t_oracle.c - blocks computed by Hugging Face transformers (README.md), run by the library: every output and every
   gradient within a relative L2 of 5e-6 of the file's, in f32 and f64.  The files are float32, and agree with a
   computation in double to about 3e-7.

   Each block goes twice through the library: through moe_experts_*, with the files' weights as views (halves of
   [E,2n,d]; interleaved and transposed out of [E,d,2n]) and gradients written into tensors of the same layout, the
   router's product on the host; and through moe_layer_*, with weights copied into its packed parameters. */
#include "../unit/fixture.h"

#include <jansson.h>
#include <math.h>

#define TOLERANCE 5e-6

static moe_context *ctx;
static moe_queue *queue;

/* ---- files ------------------------------------------------------------------------------------------------------- */
struct file {
  moe_checkpoint *tensors;
  json_t *config;
};

static struct file open_file(const char *name)
{
  struct file f = { 0 };
  char path[512];
  const char *srcdir = getenv("MOE_TEST_SRCDIR");
  snprintf(path, sizeof path, "%s/tests/oracle/%s.safetensors", srcdir ? srcdir : ".", name);
  OK(moe_checkpoint_open(&f.tensors, path));
  const char *config = moe_checkpoint_metadata(f.tensors, "config");
  f.config = config ? json_loads(config, JSON_REJECT_DUPLICATES, NULL) : NULL;
  if (!f.config) fail_msg("%s: no config", path);
  return f;
}

static void close_file(struct file *f)
{
  moe_checkpoint_close(f->tensors);
  json_decref(f->config);
}

static int64_t config_of(const struct file *f, const char *key)
{
  return json_integer_value(json_object_get(f->config, key));
}

static int config_is(const struct file *f, const char *key, const char *value)
{
  const char *is = json_string_value(json_object_get(f->config, key));
  return is && !strcmp(is, value);
}

static int has(const struct file *f, const char *name)
{
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  return moe_checkpoint_find(&e, f->tensors, name) == MOE_OK;
}

/* The F32 tensor of `n` elements. */
static num *tensor_of(const struct file *f, struct t_memory *m, const char *name, int64_t n)
{
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  OK(moe_checkpoint_find(&e, f->tensors, name));
  if (e.dtype != MOE_F32 || e.bytes != (uint64_t)n * 4) fail_msg("%s is not %lld F32", name, (long long)n);
  num *x = t_nums(m, n);
  for (int64_t i = 0; i < n; i++) {
    float value;
    memcpy(&value, (const char *)e.data + 4 * i, 4);
    x[i].v = (double)value;
  }
  return x;
}

/* ---- comparison -------------------------------------------------------------------------------------------------- */
static void check(const struct file *f, struct t_memory *m, const char *name, const double *got, int64_t n)
{
  const num *want = tensor_of(f, m, name, n);
  double error = 0, size = 0;
  for (int64_t i = 0; i < n; i++) {
    error += (got[i] - want[i].v) * (got[i] - want[i].v);
    size += want[i].v * want[i].v;
  }
  error = sqrt(error / size);
  if (!(error <= TOLERANCE)) fail_msg("%s: relative L2 %.3g", name, error);
}

static void check_on_device(const struct file *f, struct t_memory *m, const char *name, const moe_tensor *t)
{
  check(f, m, name, values_of(m, t), moe_tensor_count(t));
}

/* ---- what a block is --------------------------------------------------------------------------------------------- */
struct block {
  struct file f;
  struct t_memory m;
  int64_t dtype, T, D, F, E, K;
  int gpt_oss;
  const char *router; /* the stem of its names */
  moe_selection_options selection;
  moe_weights_options weights;
  moe_activation activation;
};

static struct block open_block(const char *name, int64_t dtype)
{
  struct block b = { .f = open_file(name), .dtype = dtype };
  const struct file *f = &b.f;
  t_memory_init(&b.m, ctx, queue, 1);
  b.T = config_of(f, "tokens");
  b.D = config_of(f, "d");
  b.F = config_of(f, "n");
  b.E = config_of(f, "experts");
  b.K = config_of(f, "top_k");
  b.gpt_oss = config_is(f, "family", "gpt_oss");
  b.router = b.gpt_oss ? "router" : "gate";
  b.selection = moe_selection_options_init();
  b.selection.kind = MOE_SELECT_SOFTMAX;
  b.selection.top_k = b.K;
  b.weights = moe_weights_options_init();
  b.weights.scoring = MOE_SOFTMAX;
  /* Mixtral always renormalizes; Qwen3 and OLMoE say. */
  b.weights.renormalize = config_is(f, "family", "mixtral") || json_is_true(json_object_get(f->config, "renormalize"));
  b.weights.scale = 1;
  b.activation = moe_activation_init();
  b.activation.kind = MOE_SILU;
  b.activation.gated = 1;
  if (config_is(f, "family", "deepseek_v3")) {
    b.selection.kind = MOE_SELECT_GROUPED_SIGMOID;
    b.selection.groups = config_of(f, "groups");
    b.selection.selected_groups = config_of(f, "selected_groups");
    b.selection.group_top_two = 1;
    b.selection.scale = 1;
    b.weights.scoring = MOE_SIGMOID;
    b.weights.renormalize = 1;
    b.weights.scale = json_number_value(json_object_get(f->config, "scale"));
  }
  if (b.gpt_oss) {
    b.weights.scoring = MOE_SOFTMAX_CHOSEN;
    b.activation.alpha = 1.702;
    b.activation.limit = 7;
    b.activation.up_offset = 1;
  }
  return b;
}

static void close_block(struct block *b)
{
  t_memory_free(&b->m);
  close_file(&b->f);
}

static num *input(struct block *b, const char *name, int64_t n)
{
  return tensor_of(&b->f, &b->m, name, n);
}

/* The router's weight, or bias: "in.gate.weight", "grad.router.bias". */
static const char *router_name(const struct block *b, const char *which, const char *what)
{
  static char name[64];
  snprintf(name, sizeof name, "%s.%s.%s", which, b->router, what);
  return name;
}

/* gate, up [E,n,d] and down [E,d,n] as views of tensors laid out as the files have them. */
struct views {
  moe_tensor gate_up, down_whole; /* what lies in memory */
  moe_tensor gate, up, down;
};

static struct views views_of(struct block *b)
{
  struct views w;
  int64_t E = b->E, n = b->F, d = b->D;
  if (!b->gpt_oss) {
    w.gate_up = t_tensor(&b->m, b->dtype, T_PACKED, SHAPE(E, 2 * n, d));
    w.down_whole = w.down = t_tensor(&b->m, b->dtype, T_PACKED, SHAPE(E, d, n));
    OK(moe_tensor_slice(&w.gate, &w.gate_up, 1, 0, n));
    OK(moe_tensor_slice(&w.up, &w.gate_up, 1, n, 2 * n));
    return w;
  }
  moe_tensor half;
  w.gate_up = t_tensor(&b->m, b->dtype, T_PACKED, SHAPE(E, d, 2 * n));
  w.down_whole = t_tensor(&b->m, b->dtype, T_PACKED, SHAPE(E, n, d));
  OK(moe_tensor_every(&half, &w.gate_up, 2, 0, 2));
  OK(moe_tensor_transpose(&w.gate, &half, 1, 2));
  OK(moe_tensor_every(&half, &w.gate_up, 2, 1, 2));
  OK(moe_tensor_transpose(&w.up, &half, 1, 2));
  OK(moe_tensor_transpose(&w.down, &w.down_whole, 1, 2));
  return w;
}

/* ---- the routed branch ------------------------------------------------------------------------------------------- */
/* logits = x router' + bias, in double. */
static num *router_forward(struct block *b)
{
  const num *x = input(b, "in.x", b->T * b->D), *w = input(b, router_name(b, "in", "weight"), b->E * b->D),
            *bias = NULL;
  num *logits = t_nums(&b->m, b->T * b->E);
  if (b->gpt_oss) bias = input(b, router_name(b, "in", "bias"), b->E);
  for (int64_t i = 0; i < b->T * b->E; i++) {
    logits[i].v = bias ? bias[i % b->E].v : 0;
    for (int64_t d = 0; d < b->D; d++) logits[i].v += x[i / b->E * b->D + d].v * w[i % b->E * b->D + d].v;
  }
  return logits;
}

/* Checks the router's gradients; adds its part to dx, and the shared expert's, which is not the branch's. */
static void router_backward(struct block *b, double *dx, const double *dlogits)
{
  int64_t T = b->T, D = b->D, E = b->E;
  const num *x = input(b, "in.x", T * D), *w = input(b, router_name(b, "in", "weight"), E * D);
  double *dw = t_host(&b->m, E * D, sizeof *dw), *dbias = t_host(&b->m, E, sizeof *dbias);
  for (int64_t t = 0; t < T; t++)
    for (int64_t e = 0; e < E; e++) {
      double dl = dlogits[t * E + e];
      dbias[e] += dl;
      for (int64_t d = 0; d < D; d++) {
        dw[e * D + d] += dl * x[t * D + d].v;
        dx[t * D + d] += dl * w[e * D + d].v;
      }
    }
  check(&b->f, &b->m, router_name(b, "grad", "weight"), dw, E * D);
  if (b->gpt_oss) check(&b->f, &b->m, router_name(b, "grad", "bias"), dbias, E);
}

static double sigmoid(double x)
{
  return 1 / (1 + exp(-x));
}

/* DeepSeek-V3's shared expert, in double: y and dx grow by its part. */
static void add_shared(struct block *b, double *y, double *dx)
{
  int64_t n = b->F, d = b->D;
  const num *x = input(b, "in.x", b->T * d), *dy = input(b, "in.dy", b->T * d);
  const num *wg = input(b, "in.shared_experts.gate_proj.weight", n * d);
  const num *wu = input(b, "in.shared_experts.up_proj.weight", n * d);
  const num *wd = input(b, "in.shared_experts.down_proj.weight", d * n);
  for (int64_t t = 0; t < b->T; t++)
    for (int64_t f = 0; f < n; f++) {
      double g = 0, u = 0, da = 0;
      for (int64_t i = 0; i < d; i++) {
        g += wg[f * d + i].v * x[t * d + i].v;
        u += wu[f * d + i].v * x[t * d + i].v;
        da += wd[i * n + f].v * dy[t * d + i].v;
      }
      double s = sigmoid(g), dg = da * u * s * (1 + g * (1 - s)), du = da * g * s;
      for (int64_t i = 0; i < d; i++) {
        y[t * d + i] += wd[i * n + f].v * g * s * u;
        dx[t * d + i] += dg * wg[f * d + i].v + du * wu[f * d + i].v;
      }
    }
}

static void run_branch(struct block *b)
{
  struct t_memory *m = &b->m;
  int64_t T = b->T, D = b->D, F = b->F, E = b->E;
  struct views w = views_of(b), dw = views_of(b);
  moe_experts *experts;
  moe_experts_desc desc = moe_experts_desc_init();
  moe_experts_bytes bytes = moe_experts_bytes_init();
  moe_experts_io io = moe_experts_io_init();
  moe_experts_grads g = moe_experts_grads_init();
  moe_state state = moe_state_init();
  moe_tensor bias = { 0 }, dbias = { 0 };
  desc.d_model = D;
  desc.d_ff = F;
  desc.n_experts = E;
  desc.dtype = b->dtype;
  desc.selection = &b->selection;
  desc.weights = &b->weights;
  desc.activation = &b->activation;
  desc.hidden_bias = desc.down_bias = b->gpt_oss;
  desc.gate = w.gate;
  desc.up = w.up;
  desc.down = w.down;
  OK(moe_experts_create(&experts, ctx, &desc));
  OK(moe_experts_measure(&bytes, experts, T, b->gpt_oss ? 255 : 31));

  io.x = t_tensor(m, b->dtype, T_PACKED, SHAPE(T, D));
  io.y = output_of(m, b->dtype, SHAPE(T, D));
  io.logits = t_tensor(m, b->dtype, T_PACKED, SHAPE(T, E));
  io.gate = w.gate;
  io.up = w.up;
  io.down = w.down;
  g.dy = t_tensor(m, b->dtype, T_PACKED, SHAPE(T, D));
  g.dx = output_of(m, b->dtype, SHAPE(T, D));
  g.dlogits = output_of(m, b->dtype, SHAPE(T, E));
  g.dgate = dw.gate;
  g.dup = dw.up;
  g.ddown = dw.down;
  io.saved = span_of(m, bytes.saved);
  io.scratch = span_of(m, bytes.scratch);
  t_put(m, &io.x, input(b, "in.x", T * D));
  t_put(m, &g.dy, input(b, "in.dy", T * D));
  t_put(m, &io.logits, router_forward(b));
  t_put(m, &w.gate_up, input(b, "in.experts.gate_up_proj", E * 2 * F * D));
  t_put(m, &w.down_whole, input(b, "in.experts.down_proj", E * D * F));
  if (b->gpt_oss) {
    bias = t_tensor(m, b->dtype, T_PACKED, SHAPE(E, 2 * F));
    dbias = output_of(m, b->dtype, SHAPE(E, 2 * F));
    OK(moe_tensor_every(&io.gate_bias, &bias, 1, 0, 2));
    OK(moe_tensor_every(&io.up_bias, &bias, 1, 1, 2));
    OK(moe_tensor_every(&g.dgate_bias, &dbias, 1, 0, 2));
    OK(moe_tensor_every(&g.dup_bias, &dbias, 1, 1, 2));
    io.down_bias = t_tensor(m, b->dtype, T_PACKED, SHAPE(E, D));
    g.ddown_bias = output_of(m, b->dtype, SHAPE(E, D));
    t_put(m, &bias, input(b, "in.experts.gate_up_proj_bias", E * 2 * F));
    t_put(m, &io.down_bias, input(b, "in.experts.down_proj_bias", E * D));
  }
  if (has(&b->f, "in.gate.e_score_correction_bias")) {
    io.correction_bias = t_tensor(m, b->dtype, T_PACKED, SHAPE(E));
    t_put(m, &io.correction_bias, input(b, "in.gate.e_score_correction_bias", E));
  }
  t_own(m, &dw.gate);
  t_own(m, &dw.up);
  t_own(m, &dw.down);
  send(m);
  OK(moe_experts_forward(experts, queue, &io, &state));
  OK(moe_experts_backward(experts, queue, &state, &io, &g));
  fetch(m);

  double *y = values_of(m, &io.y), *dx = values_of(m, &g.dx);
  router_backward(b, dx, values_of(m, &g.dlogits));
  if (config_of(&b->f, "shared")) add_shared(b, y, dx);
  check(&b->f, m, "out.y", y, T * D);
  check(&b->f, m, "grad.x", dx, T * D);
  check_on_device(&b->f, m, "grad.experts.gate_up_proj", &dw.gate_up);
  check_on_device(&b->f, m, "grad.experts.down_proj", &dw.down_whole);
  if (b->gpt_oss) {
    check_on_device(&b->f, m, "grad.experts.gate_up_proj_bias", &dbias);
    check_on_device(&b->f, m, "grad.experts.down_proj_bias", &g.ddown_bias);
  }
  moe_experts_free(experts);
}

/* ---- the layer --------------------------------------------------------------------------------------------------- */
/* Where a parameter of the layer lies in a file: the tensor, and of its elements [E,rows,cols] those at `first` with
   these strides. */
struct source {
  const char *param;
  char tensor[64]; /* behind "in." and "grad." */
  int64_t whole, first, stride[3];
};

static int sources_of(const struct block *b, struct source *s)
{
  int64_t n = b->F, d = b->D, E = b->E;
  int count = 0;
#define FROM(name, stem, ...)                                                                                          \
  s[count++] = (struct source)                                                                                         \
  {                                                                                                                    \
    name, stem, __VA_ARGS__                                                                                            \
  }
  if (b->gpt_oss) {
    FROM("router", "router.weight", E * d, 0, { 0, d, 1 });
    FROM("router_bias", "router.bias", E, 0, { 0, 0, 1 });
    FROM("gate", "experts.gate_up_proj", E * d * 2 * n, 0, { 2 * n * d, 2, 2 * n });
    FROM("up", "experts.gate_up_proj", E * d * 2 * n, 1, { 2 * n * d, 2, 2 * n });
    FROM("down", "experts.down_proj", E * n * d, 0, { n * d, 1, d });
    FROM("gate_bias", "experts.gate_up_proj_bias", E * 2 * n, 0, { 0, 2 * n, 2 });
    FROM("up_bias", "experts.gate_up_proj_bias", E * 2 * n, 1, { 0, 2 * n, 2 });
    FROM("down_bias", "experts.down_proj_bias", E * d, 0, { 0, d, 1 });
    return count;
  }
  FROM("router", "gate.weight", E * d, 0, { 0, d, 1 });
  FROM("gate", "experts.gate_up_proj", E * 2 * n * d, 0, { 2 * n * d, d, 1 });
  FROM("up", "experts.gate_up_proj", E * 2 * n * d, n * d, { 2 * n * d, d, 1 });
  FROM("down", "experts.down_proj", E * d * n, 0, { d * n, n, 1 });
  FROM("correction_bias", "gate.e_score_correction_bias", E, 0, { 0, 0, 1 });
  FROM("shared_gate_proj", "shared_experts.gate_proj.weight", n * d, 0, { 0, d, 1 });
  FROM("shared_up", "shared_experts.up_proj.weight", n * d, 0, { 0, d, 1 });
  FROM("shared_down", "shared_experts.down_proj.weight", d * n, 0, { 0, n, 1 });
#undef FROM
  return count;
}

/* The place in the file's tensor of element i of a parameter. */
static int64_t place_in(const struct source *s, const moe_tensor *t, int64_t i)
{
  int64_t at = s->first;
  for (int d = t->rank - 1; d >= 0; d--) {
    at += i % t->shape[d] * s->stride[d + 3 - t->rank];
    i /= t->shape[d];
  }
  return at;
}

static const struct source *source_of(const struct source *s, int n, const char *param)
{
  for (int i = 0; i < n; i++)
    if (!strcmp(s[i].param, param)) return &s[i];
  fail_msg("the file has no %s", param);
  return s;
}

/* The parameters of `layer`, one call each: into the mirror, or its gradient into whole[source]. */
static void move_params(struct block *b, const moe_layer *layer, const moe_layer_io *io, const struct source *s, int n,
                        double **whole)
{
  char name[80];
  moe_layer_param_info info = moe_layer_param_info_init();
  for (int64_t i = 0; !moe_layer_param(NULL, NULL, &info, layer, io->params, io->grads, i); i++) {
    moe_tensor param, grad;
    OK(moe_layer_param(&param, &grad, &info, layer, io->params, io->grads, i));
    const struct source *from = source_of(s, n, info.name);
    int64_t count = moe_tensor_count(&param);
    if (whole) {
      double *values = grad.handle ? values_of(&b->m, &grad) : NULL;
      for (int64_t k = 0; values && k < count; k++) whole[from - s][place_in(from, &param, k)] = values[k];
      continue;
    }
    snprintf(name, sizeof name, "in.%s", from->tensor);
    const num *all = input(b, name, from->whole);
    num *mine = t_nums(&b->m, count);
    for (int64_t k = 0; k < count; k++) mine[k] = all[place_in(from, &param, k)];
    t_put(&b->m, &param, mine);
  }
}

static void run_layer(struct block *b)
{
  struct t_memory *m = &b->m;
  int64_t T = b->T, D = b->D;
  struct source s[8];
  int n = sources_of(b, s);
  double *whole[8];
  char name[80];
  moe_layer *layer;
  moe_layer_desc desc = moe_layer_desc_init();
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_layer_io io = moe_layer_io_init();
  moe_layer_state state = moe_layer_state_init();
  desc.d_model = D;
  desc.d_ff = b->F;
  desc.n_experts = b->E;
  desc.dtype = b->dtype;
  desc.selection = &b->selection;
  desc.weights = &b->weights;
  desc.activation = &b->activation;
  desc.router_bias = desc.hidden_bias = desc.down_bias = b->gpt_oss;
  desc.correction_bias = has(&b->f, "in.gate.e_score_correction_bias");
  desc.d_shared = config_of(&b->f, "shared") * b->F;
  OK(moe_layer_create(&layer, ctx, &desc));
  OK(moe_layer_measure(&bytes, layer, T, 1));
  io.x = t_tensor(m, b->dtype, T_PACKED, SHAPE(T, D));
  io.dy = t_tensor(m, b->dtype, T_PACKED, SHAPE(T, D));
  io.y = output_of(m, b->dtype, SHAPE(T, D));
  io.dx = output_of(m, b->dtype, SHAPE(T, D));
  io.params = inputs_of(m, bytes.params);
  io.grads = span_of(m, bytes.grads);
  io.saved = span_of(m, bytes.saved);
  io.scratch = span_of(m, bytes.scratch);
  t_put(m, &io.x, input(b, "in.x", T * D));
  t_put(m, &io.dy, input(b, "in.dy", T * D));
  move_params(b, layer, &io, s, n, NULL);
  send(m);
  OK(moe_layer_forward(layer, queue, &io, &state));
  OK(moe_layer_backward(layer, queue, &state, &io));
  fetch(m);

  check_on_device(&b->f, m, "out.y", &io.y);
  check_on_device(&b->f, m, "grad.x", &io.dx);
  for (int i = 0; i < n; i++) {
    /* gate and up are of one tensor */
    int shared = i > 0 && !strcmp(s[i].tensor, s[i - 1].tensor);
    whole[i] = shared ? whole[i - 1] : t_host(m, s[i].whole, sizeof **whole);
  }
  move_params(b, layer, &io, s, n, whole);
  for (int i = 0; i < n; i++) {
    snprintf(name, sizeof name, "grad.%s", s[i].tensor);
    if (has(&b->f, name)) check(&b->f, m, name, whole[i], s[i].whole);
  }
  moe_layer_free(layer);
}

/* ---- the balance loss -------------------------------------------------------------------------------------------- */
/* Hugging Face's load_balancing_loss_func joins the tokens of all layers, and divides the counts by the tokens but
   not by K:  loss = E sum_e (count_e / 2T) P_e  over the 2T tokens of two layers, which is K times the library's
   balance of a micro-batch of those 2T tokens (and not a mean of the two layers' own losses: a layer's imbalance can
   hide in the other's).  So: one micro-batch of both, coefficient K, in a layer whose router is the identity, so that
   x are the logits; dy is 0, so that dx is the loss's gradient by them. */
static void balance(int64_t dtype)
{
  struct file f = open_file("load_balancing_loss");
  int64_t T = config_of(&f, "tokens"), E = config_of(&f, "experts"), K = config_of(&f, "top_k"), n = T * E;
  struct layer l = layer_of(options_of(dtype, 2 * T, E, 1, E, K));
  moe_tensor losses;
  l.desc.balance_coef = (double)K;
  layer_make(&l, ctx, queue, 0);
  memcpy(l.x, tensor_of(&f, &l.m, "in.logits0", n), (size_t)n * sizeof *l.x);
  memcpy(l.x + n, tensor_of(&f, &l.m, "in.logits1", n), (size_t)n * sizeof *l.x);
  for (int64_t i = 0; i < 2 * n; i++) l.dy[i].v = 0;
  for (int64_t i = 0; i < E * E; i++) l.value[REF_ROUTER][i].v = i / E == i % E;
  layer_send(&l);
  layer_forward(&l);
  layer_backward(&l);
  fetch(&l.m);
  OK(moe_layer_losses(&losses, &l.state));
  double loss = (double)K * values_of(&l.m, &losses)[0], *dx = values_of(&l.m, &l.io.dx);
  check(&f, &l.m, "out.loss", &loss, 1);
  check(&f, &l.m, "grad.logits0", dx, n);
  check(&f, &l.m, "grad.logits1", dx + n, n);
  layer_free(&l);
  close_file(&f);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */
static const int64_t dtypes[] = { MOE_F32, MOE_F64 };

static int n_dtypes(void)
{
  return test_has_fp64(ctx) ? 2 : 1;
}

static void run_block(const char *name, void (*run)(struct block *))
{
  for (int i = 0; i < n_dtypes(); i++) {
    struct block b = open_block(name, dtypes[i]);
    run(&b);
    close_block(&b);
  }
}

static void branch(void **state)
{
  run_block(*state, run_branch);
}

static void layer(void **state)
{
  run_block(*state, run_layer);
}

static void load_balancing_loss(void **state)
{
  (void)state;
  for (int i = 0; i < n_dtypes(); i++) balance(dtypes[i]);
}

int main(void)
{
  static char mixtral[] = "mixtral_block", qwen3_norm0[] = "qwen3_block_norm0", qwen3_norm1[] = "qwen3_block_norm1",
              olmoe[] = "olmoe_block", deepseek[] = "deepseek_v3_block", gpt_oss[] = "gpt_oss_block";
#define BLOCK(file)                                                                                                    \
  { #file "_branch", branch, NULL, NULL, file },                                                                       \
  {                                                                                                                    \
#file "_layer", layer, NULL, NULL, file                                                                            \
  }
  const struct CMUnitTest tests[] = {
    BLOCK(mixtral),
    BLOCK(qwen3_norm0),
    BLOCK(qwen3_norm1),
    BLOCK(olmoe),
    BLOCK(deepseek),
    BLOCK(gpt_oss),
    cmocka_unit_test(load_balancing_loss),
  };
  if (!test_open(&ctx, &queue)) return 77;
  int rc = TEST_MAIN(tests);
  test_close(ctx, queue);
  return rc;
}
