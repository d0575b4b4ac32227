/* ops.c - what of a layer is no matrix product, operation by operation, to be seen beside the copy bandwidth; and its
   products by each implementation on matrix units. */
#include "moe_layer.h"

#include "core/backend.h"
#include "core/tensor.h"

#include <moe/experts.h>

#include <stdio.h>
#include <stdlib.h>

/* Memory: the first `shared` spans are the shape's, those behind them one operation's. */
static moe_span spans[32];
static int n_spans, shared;

static moe_tensor tensor(int64_t dtype, int rank, const int64_t *shape)
{
  moe_tensor t;
  uint64_t bytes = moe_dtype_size(dtype);
  for (int d = 0; d < rank; d++) bytes *= (uint64_t)shape[d];
  must(moe_span_alloc(&spans[n_spans], bench.ctx, bytes));
  must(moe_span_fill(bench.q, spans[n_spans], 0));
  must(moe_tensor_packed(&t, spans[n_spans++], dtype, rank, shape));
  return t;
}

static moe_tensor random_tensor(int64_t dtype, int rank, const int64_t *shape)
{
  moe_tensor t = tensor(dtype, rank, shape);
  must(moe_tensor_normal(bench.q, &t, 1, n_spans, 1));
  return t;
}
#define SHAPE(...)                                                                                                     \
  (int)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[])                                 \
  {                                                                                                                    \
    __VA_ARGS__                                                                                                        \
  }

static void release(int left)
{
  while (n_spans > left) moe_span_free(bench.ctx, &spans[--n_spans]);
}

static void finish(struct op_figure *f, void (*run)(void *args), void *args)
{
  struct lane *lane = allocate(1, sizeof *lane);
  lane->run = run;
  lane->user = args;
  race((struct lane *const[]){ lane }, 1);
  f->ms = spread_of(lane->ms, bench.rounds);
  lane_free(lane);
  free(lane);
  release(shared);
}

/* run_<op>, and time_<op>(figure, what, bytes, args): compiles, times, frees the operation's tensors. */
#define OP(name)                                                                                                       \
  static void run_##name(void *args)                                                                                   \
  {                                                                                                                    \
    must(moe__run_##name(bench.q, args, MOE_AUTO));                                                                    \
  }                                                                                                                    \
  static void time_##name(struct op_figure *f, const char *what, double bytes, struct moe__args_##name *args)          \
  {                                                                                                                    \
    struct moe__why why;                                                                                               \
    must(moe__prepare_##name(bench.ctx, args, MOE_AUTO));                                                              \
    f->op = what;                                                                                                      \
    f->impl = moe__pick_##name(bench.ctx, args, MOE_AUTO, &why)->id;                                                   \
    f->bytes = bytes;                                                                                                  \
    finish(f, run_##name, args);                                                                                       \
  }
OP(select)
OP(weights)
OP(weights_bwd)
OP(balance_fwd)
OP(balance_bwd)
OP(plan)
OP(combine)
OP(act_fwd)
OP(act_bwd)
OP(rms_fwd)
OP(rms_bwd)
OP(adamw)
OP(sqnorm)
OP(watch)
#undef OP

int measure_ops(struct op_figure figures[MOST_OPS], const struct shape *shape, int64_t dtype)
{
  const int64_t T = shape->T, D = shape->D, F = shape->F, E = shape->E, K = shape->K, R = T * K, one = 1;
  const int64_t parameters = 3 * E * D * F, n = parameters < MOST_PARAMETERS ? parameters : MOST_PARAMETERS;
  const double s = (double)moe_dtype_size(dtype), t = (double)T, e = (double)E, k = (double)K, r = (double)R,
               d = (double)D, f = (double)F;
  const struct moe__act swiglu = { MOE__ACT_SILU, 1, 0, 0, 0 };
  const struct moe__weigh weigh = { MOE__SOFTMAX, 1, 1, 0 };
  struct op_figure *o = figures;

  /* The shape's: real top K of random logits, and their plan. */
  const moe_tensor logits = random_tensor(MOE_F32, SHAPE(T, E)), ids = tensor(MOE_I32, SHAPE(T, K)),
                   weights = tensor(MOE_F32, SHAPE(T, K)), flat = tensor(MOE_F32, SHAPE(R)),
                   offs = tensor(MOE_I32, SHAPE(E + 1)), row2slot = tensor(MOE_I32, SHAPE(R)),
                   slot2row = tensor(MOE_I32, SHAPE(T, K)), table = tensor(MOE_I32, SHAPE(moe__plan_scratch(R, E)));
  shared = n_spans;

  struct moe__args_select select = { .dtype = MOE_F32,
                                     .ids = ids,
                                     .logits = logits,
                                     .T = T,
                                     .E = E,
                                     .select = { MOE__SELECT_SOFTMAX, .K = K, .scale = 1 } };
  time_select(o++, "select", 4 * t * (e + k), &select);

  struct moe__args_weights weighing = {
    .dtype = MOE_F32, .weights = weights, .logits = logits, .ids = ids, .T = T, .E = E, .K = K, .weigh = weigh
  };
  time_weights(o++, "weights", 4 * 3 * r, &weighing);

  struct moe__args_plan plan = { .dtype = MOE_F32,
                                 .offs = offs,
                                 .row2slot = row2slot,
                                 .slot2row = moe__flatten(slot2row),
                                 .ids = ids,
                                 .weights = weights,
                                 .scratch = table,
                                 .T = T,
                                 .K = K,
                                 .E = E };
  time_plan(o++, "plan", 4 * 4 * r, &plan);

  struct moe__args_weights_bwd weights_bwd = {
    .dtype = MOE_F32, .logits = logits, .ids = ids, .T = T, .E = E, .K = K, .weigh = weigh
  };
  weights_bwd.dlogits = tensor(MOE_F32, SHAPE(T, E));
  weights_bwd.dweights = random_tensor(MOE_F32, SHAPE(T, K));
  time_weights_bwd(o++, "weights_bwd", 4 * (t * e + 3 * r), &weights_bwd);

  struct moe__args_balance_fwd balance_fwd = {
    .dtype = MOE_F32, .logits = logits, .ids = ids, .T = T, .S = 1, .E = E, .K = K, .scoring = MOE__SOFTMAX
  };
  balance_fwd.losses = tensor(MOE_F32, SHAPE(2));
  balance_fwd.counts = tensor(MOE_I32, SHAPE(1, E));
  balance_fwd.probs = tensor(MOE_F32, SHAPE(1, E));
  balance_fwd.tokens = tensor(MOE_I32, SHAPE(1));
  balance_fwd.scratch = tensor(MOE_F32, SHAPE(moe__balance_scratch(T, 1, E)));
  time_balance_fwd(o++, "balance_fwd", 4 * t * (e + k), &balance_fwd);

  struct moe__args_balance_bwd balance_bwd = { .dtype = MOE_F32,
                                               .logits = logits,
                                               .T = T,
                                               .S = 1,
                                               .E = E,
                                               .K = K,
                                               .scoring = MOE__SOFTMAX,
                                               .balance_coef = 0.01,
                                               .z_coef = 0.001 };
  balance_bwd.dlogits = tensor(MOE_F32, SHAPE(T, E));
  balance_bwd.counts = tensor(MOE_I32, SHAPE(1, E));
  balance_bwd.probs = tensor(MOE_F32, SHAPE(1, E));
  balance_bwd.tokens = tensor(MOE_I32, SHAPE(1));
  time_balance_bwd(o++, "balance_bwd", 4 * 2 * t * e, &balance_bwd);

  struct moe__args_combine combine = {
    .dtype = dtype, .weights = weights, .slot2row = slot2row, .T = T, .K = K, .D = D
  };
  combine.rows = random_tensor(dtype, SHAPE(R, D));
  combine.y = tensor(dtype, SHAPE(T, D));
  time_combine(o++, "combine", s * (r + t) * d + 8 * r, &combine);

  struct moe__args_combine combine_bwd = {
    .dtype = dtype, .weights = weights, .slot2row = slot2row, .T = T, .K = K, .D = D, .unweighted = 1
  };
  combine_bwd.rows = random_tensor(dtype, SHAPE(R, D));
  combine_bwd.y = tensor(dtype, SHAPE(T, D));
  time_combine(o++, "combine bwd", s * (r + t) * d + 4 * r, &combine_bwd);

  struct moe__args_act_fwd act_fwd = { .dtype = dtype, .offs = offs, .R = R, .F = F, .E = E, .act = swiglu };
  act_fwd.h = random_tensor(dtype, SHAPE(R, 2 * F));
  act_fwd.a = tensor(dtype, SHAPE(R, F));
  time_act_fwd(o++, "act_fwd", s * 3 * r * f, &act_fwd);

  struct moe__args_act_bwd act_bwd = { .dtype = dtype,
                                       .weights = flat,
                                       .row2slot = row2slot,
                                       .offs = offs,
                                       .R = R,
                                       .F = F,
                                       .E = E,
                                       .plane = 1,
                                       .accumulate = 1,
                                       .act = swiglu };
  act_bwd.h = random_tensor(dtype, SHAPE(R, 2 * F));
  act_bwd.da = random_tensor(dtype, SHAPE(R, F));
  act_bwd.dh = tensor(dtype, SHAPE(R, 2 * F));
  act_bwd.aw = tensor(dtype, SHAPE(R, F));
  act_bwd.dweights = tensor(MOE_F32, SHAPE(R));
  time_act_bwd(o++, "act_bwd", s * 6 * r * f + 16 * r, &act_bwd);

  struct moe__args_rms_fwd rms_fwd = { .dtype = dtype, .T = T, .D = D, .eps = 1e-6 };
  rms_fwd.x = random_tensor(dtype, SHAPE(T, D));
  rms_fwd.w = random_tensor(dtype, SHAPE(D));
  rms_fwd.y = tensor(dtype, SHAPE(T, D));
  rms_fwd.rstd = tensor(MOE_F32, SHAPE(T));
  time_rms_fwd(o++, "rms_fwd", s * 2 * t * d + 4 * t, &rms_fwd);

  struct moe__args_rms_bwd rms_bwd = { .dtype = dtype, .T = T, .D = D };
  rms_bwd.x = random_tensor(dtype, SHAPE(T, D));
  rms_bwd.w = random_tensor(dtype, SHAPE(D));
  rms_bwd.dy = random_tensor(dtype, SHAPE(T, D));
  rms_bwd.rstd = random_tensor(MOE_F32, SHAPE(T));
  rms_bwd.dx = tensor(dtype, SHAPE(T, D));
  rms_bwd.dw = tensor(MOE_F32, SHAPE(D));
  rms_bwd.scratch = tensor(MOE_F32, SHAPE(MOE__PARTS, D));
  time_rms_bwd(o++, "rms_bwd", s * 3 * t * d + 4 * t, &rms_bwd);

  /* Gradients in FP32; parameters of 16 bits have FP32 masters. */
  struct moe__args_adamw adamw = { .dtype = MOE_F32, .n = n, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .lr_mult = 1 };
  adamw.step = tensor(MOE_I64, SHAPE(1));
  must(moe_span_write(bench.q, spans[n_spans - 1], &one, sizeof one));
  adamw.p = random_tensor(dtype, SHAPE(n));
  adamw.m = tensor(MOE_F32, SHAPE(n));
  adamw.v = tensor(MOE_F32, SHAPE(n));
  adamw.g = random_tensor(MOE_F32, SHAPE(n));
  adamw.lr = tensor(MOE_F32, SHAPE(1));
  if (dtype != MOE_F32) adamw.master = random_tensor(MOE_F32, SHAPE(n));
  time_adamw(o++, "adamw", (double)n * (dtype == MOE_F32 ? 28 : s + 28), &adamw);

  struct moe__args_sqnorm sqnorm = { .dtype = MOE_F32, .n = n };
  sqnorm.a = random_tensor(MOE_F32, SHAPE(n));
  sqnorm.y = tensor(MOE_F32, SHAPE(1));
  sqnorm.scratch = tensor(MOE_F32, SHAPE(MOE__PARTS));
  time_sqnorm(o++, "sqnorm", 4 * (double)n, &sqnorm);

  struct moe__args_watch watch = { .dtype = MOE_F32, .limit = 1e30 };
  watch.record = tensor(MOE_I64, SHAPE(3));
  watch.scratch = tensor(MOE_I32, SHAPE(MOE__WATCHED));
  must(moe_span_fill(bench.q, spans[n_spans - 1], 0xff));
  watch.a[0] = random_tensor(MOE_F32, SHAPE(n));
  time_watch(o++, "watch", 4 * (double)n, &watch);

  release(shared = 0);
  return (int)(o - figures);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */
/* The plan of R = T*K slots that go to random experts. */
static void random_plan(const struct shape *shape, const moe_tensor *offs, const moe_tensor *row2slot)
{
  const int64_t R = shape->T * shape->K, E = shape->E;
  int32_t *expert = allocate((size_t)R, sizeof *expert), *slot = allocate((size_t)R, sizeof *slot),
          *end = allocate((size_t)E + 1, sizeof *end), *next = allocate((size_t)E + 1, sizeof *next);
  uint64_t seed = 1;
  for (int64_t i = 0; i < R; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    expert[i] = (int32_t)((seed >> 33) % (uint64_t)E);
    end[expert[i] + 1]++;
  }
  for (int64_t e = 0; e < E; e++) end[e + 1] += end[e], next[e] = end[e];
  for (int64_t i = 0; i < R; i++) slot[next[expert[i]]++] = (int32_t)i;
  must(moe_span_write(bench.q, (moe_span){ offs->handle, offs->offset, (uint64_t)(E + 1) * 4 }, end,
                      (uint64_t)(E + 1) * 4));
  must(moe_span_write(bench.q, (moe_span){ row2slot->handle, row2slot->offset, (uint64_t)R * 4 }, slot,
                      (uint64_t)R * 4));
  free(expert);
  free(slot);
  free(end);
  free(next);
}

/* time_<op>_product: a figure for each implementation on matrix units that can; frees the operation's tensors. */
#define PRODUCT(name)                                                                                                  \
  struct product_##name {                                                                                              \
    const struct moe__impl_##name *impl;                                                                               \
    const struct moe__args_##name *args;                                                                               \
  };                                                                                                                   \
  static void run_product_##name(void *user)                                                                           \
  {                                                                                                                    \
    const struct product_##name *p = user;                                                                             \
    must(p->impl->run(bench.q, p->args));                                                                              \
  }                                                                                                                    \
  static struct op_figure *time_product_##name(struct op_figure *f, const char *what, double flops,                    \
                                               const struct moe__args_##name *args)                                    \
  {                                                                                                                    \
    const int left = shared;                                                                                           \
    struct product_##name p = { .args = args };                                                                        \
    struct moe__why why;                                                                                               \
    shared = n_spans;                                                                                                  \
    must(moe__check_##name(args));                                                                                     \
    for (int i = 0; (p.impl = moe__impl_##name##_at(bench.ctx, i)); i++) {                                             \
      if (!(p.impl->flags & MOE__TENSOR) || p.impl->can(bench.ctx->info, args, &why)) continue;                        \
      must(bench.ctx->be->program(bench.ctx->dev, p.impl->program, (int)args->dtype));                                 \
      *f = (struct op_figure){ .op = what, .impl = p.impl->id, .flops = flops };                                       \
      finish(f++, run_product_##name, &p);                                                                             \
    }                                                                                                                  \
    release(shared = left);                                                                                            \
    return f;                                                                                                          \
  }
PRODUCT(ggemm_rows)
PRODUCT(ggemm_wgrad)
#undef PRODUCT

/* [E,m,n] as [E,n,m]. */
static moe_tensor turned(moe_tensor t)
{
  moe_tensor r = t;
  r.shape[1] = t.shape[2], r.shape[2] = t.shape[1];
  r.stride[1] = t.stride[2], r.stride[2] = t.stride[1];
  return r;
}

int measure_products(struct op_figure figures[MOST_PRODUCTS], const struct shape *shape, int64_t dtype)
{
  const int64_t T = shape->T, D = shape->D, F = shape->F, E = shape->E, K = shape->K, R = T * K;
  const double flops = 2.0 * (double)R * (double)D * (double)F;
  struct op_figure *o = figures;
  const moe_tensor offs = tensor(MOE_I32, SHAPE(E + 1)), row2slot = tensor(MOE_I32, SHAPE(R));
  random_plan(shape, &offs, &row2slot);
  shared = n_spans;

  struct moe__args_ggemm_rows up = {
    .dtype = dtype, .offs = offs, .map = row2slot, .R = R, .E = E, .N = 2 * F, .K = D, .div = K
  };
  const moe_tensor w1 = random_tensor(dtype, SHAPE(E, 2 * F, D));
  up.split = MOE__SPLIT_N;
  up.a = random_tensor(dtype, SHAPE(T, D));
  up.c = tensor(dtype, SHAPE(R, 2 * F));
  for (int i = 0; i < 2; i++) must(moe_tensor_slice(&up.b[i], &w1, 1, i * F, (i + 1) * F));
  o = time_product_ggemm_rows(o, "up", 2 * flops, &up);

  struct moe__args_ggemm_rows down = { .dtype = dtype, .offs = offs, .R = R, .E = E, .N = D, .K = F };
  down.a = random_tensor(dtype, SHAPE(R, F));
  down.b[0] = random_tensor(dtype, SHAPE(E, D, F));
  down.c = tensor(dtype, SHAPE(R, D));
  o = time_product_ggemm_rows(o, "down", flops, &down);

  struct moe__args_ggemm_rows da = {
    .dtype = dtype, .offs = offs, .map = row2slot, .R = R, .E = E, .N = F, .K = D, .div = K
  };
  da.a = random_tensor(dtype, SHAPE(T, D));
  da.b[0] = turned(random_tensor(dtype, SHAPE(E, D, F)));
  da.c = tensor(dtype, SHAPE(R, F));
  o = time_product_ggemm_rows(o, "da", flops, &da);

  struct moe__args_ggemm_rows dx = { .dtype = dtype, .offs = offs, .R = R, .E = E, .N = D, .K = 2 * F };
  const moe_tensor again = random_tensor(dtype, SHAPE(E, 2 * F, D));
  dx.split = MOE__SPLIT_K;
  dx.a = random_tensor(dtype, SHAPE(R, 2 * F));
  for (int i = 0; i < 2; i++) {
    must(moe_tensor_slice(&dx.b[i], &again, 1, i * F, (i + 1) * F));
    dx.b[i] = turned(dx.b[i]);
  }
  dx.c = tensor(dtype, SHAPE(R, D));
  o = time_product_ggemm_rows(o, "dx", 2 * flops, &dx);

  struct moe__args_ggemm_wgrad dw2 = {
    .dtype = dtype, .offs = offs, .pmap = row2slot, .pdiv = K, .R = R, .E = E, .M = D, .N = F
  };
  dw2.p = random_tensor(dtype, SHAPE(T, D));
  dw2.q = random_tensor(dtype, SHAPE(R, F));
  dw2.c[0] = tensor(dtype, SHAPE(E, D, F));
  o = time_product_ggemm_wgrad(o, "dw2", flops, &dw2);

  struct moe__args_ggemm_wgrad dw1 = {
    .dtype = dtype, .offs = offs, .qmap = row2slot, .qdiv = K, .R = R, .E = E, .M = 2 * F, .N = D, .split = 1
  };
  const moe_tensor both = tensor(dtype, SHAPE(E, 2 * F, D));
  dw1.p = random_tensor(dtype, SHAPE(R, 2 * F));
  dw1.q = random_tensor(dtype, SHAPE(T, D));
  for (int i = 0; i < 2; i++) must(moe_tensor_slice(&dw1.c[i], &both, 1, i * F, (i + 1) * F));
  o = time_product_ggemm_wgrad(o, "dw1", 2 * flops, &dw1);

  release(shared = 0);
  return (int)(o - figures);
}
