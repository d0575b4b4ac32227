/* ops.c - single operations of the library, at the sizes of a large layer, to be seen beside the copy bandwidth. */
#include "moe_layer.h"

#include "core/backend.h"

#include <moe/experts.h>

#include <stdio.h>
#include <stdlib.h>

/* Memory of one operation. */
static moe_span spans[16];
static int n_spans;

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

static void finish(struct op_figure *f, void (*run)(void *args), void *args)
{
  struct lane *lane = allocate(1, sizeof *lane);
  lane->run = run;
  lane->user = args;
  race((struct lane *const[]){ lane }, 1);
  f->ms = spread_of(lane->ms, bench.rounds);
  lane_free(lane);
  free(lane);
  while (n_spans) moe_span_free(bench.ctx, &spans[--n_spans]);
}

/* run_<op>, and <op>(figure, args): compiles, times, frees the tensors. */
#define OP(name)                                                                                                       \
  static void run_##name(void *args)                                                                                   \
  {                                                                                                                    \
    must(moe__run_##name(bench.q, args, MOE_AUTO));                                                                    \
  }                                                                                                                    \
  static void time_##name(struct op_figure *f, struct moe__args_##name *args)                                          \
  {                                                                                                                    \
    struct moe__why why;                                                                                               \
    must(moe__prepare_##name(bench.ctx, args, MOE_AUTO));                                                              \
    f->op = #name;                                                                                                     \
    f->impl = moe__pick_##name(bench.ctx, args, MOE_AUTO, &why)->id;                                                   \
    finish(f, run_##name, args);                                                                                       \
  }
OP(select)
OP(weights)
OP(plan)
OP(combine)
OP(act_fwd)
OP(act_bwd)
OP(rms_fwd)
OP(rms_bwd)
OP(adamw)
#undef OP

/* Ids, T tokens of K different experts each. */
static moe_tensor some_ids(int64_t T, int64_t K, int64_t E)
{
  moe_tensor ids = tensor(MOE_I32, SHAPE(T, K));
  int32_t *host = allocate((size_t)(T * K), sizeof *host);
  for (int64_t i = 0; i < T * K; i++) host[i] = (int32_t)((i / K * 2654435761u + i % K) % (uint64_t)E);
  must(moe_span_write(bench.q, spans[n_spans - 1], host, (uint64_t)(T * K) * 4));
  free(host);
  return ids;
}

/* slot2row of experts that follow one another: as the plan spreads a token's rows. */
static moe_tensor some_rows(int64_t T, int64_t K)
{
  moe_tensor rows = tensor(MOE_I32, SHAPE(T, K));
  int32_t *host = allocate((size_t)(T * K), sizeof *host);
  for (int64_t i = 0; i < T * K; i++) host[i] = (int32_t)(i % K * T + i / K);
  must(moe_span_write(bench.q, spans[n_spans - 1], host, (uint64_t)(T * K) * 4));
  free(host);
  return rows;
}

void measure_ops(struct op_figure figures[OPS], int64_t dtype, int64_t scale)
{
  const int64_t T = 32768 / scale, D = 2048, F = 1024, E = 128, K = 8, R = T * K, n = 134217728 / scale;
  const double s = (double)moe_dtype_size(dtype), t = (double)T, r = (double)R, d = (double)D, f = (double)F;
  const struct moe__act swiglu = { MOE__ACT_SILU, 1, 0, 0, 0 };
  struct op_figure *o = figures;
  char routing[64], rows[64], wide[64];
  snprintf(routing, sizeof routing, "T=%lld E=%lld K=%lld", (long long)T, (long long)E, (long long)K);
  snprintf(rows, sizeof rows, "R=%lld F=%lld", (long long)R, (long long)F);
  snprintf(wide, sizeof wide, "T=%lld D=%lld", (long long)T, (long long)D);
#define FIGURE(text, moved)                                                                                            \
  snprintf(o->sizes, sizeof o->sizes, "%s", text);                                                                     \
  o->bytes = moved

  struct moe__args_select select = {
    .dtype = MOE_F32, .T = T, .E = E, .select = { .kind = MOE__SELECT_SOFTMAX, .K = K, .scale = 1 }
  };
  select.logits = random_tensor(MOE_F32, SHAPE(T, E));
  select.ids = tensor(MOE_I32, SHAPE(T, K));
  FIGURE(routing, 4 * t * (double)(E + K));
  time_select(o++, &select);

  /* Not renormalized, so that every logit must be read. */
  struct moe__args_weights weights = { .dtype = MOE_F32, .T = T, .E = E, .K = K, .weigh = { MOE__SOFTMAX, 0, 1, 0 } };
  weights.logits = random_tensor(MOE_F32, SHAPE(T, E));
  weights.ids = some_ids(T, K, E);
  weights.weights = tensor(MOE_F32, SHAPE(T, K));
  FIGURE(routing, 4 * t * (double)(E + 2 * K));
  time_weights(o++, &weights);

  struct moe__args_plan plan = { .dtype = MOE_F32, .T = T, .K = K, .E = E };
  plan.ids = some_ids(T, K, E);
  plan.weights = random_tensor(MOE_F32, SHAPE(T, K));
  plan.offs = tensor(MOE_I32, SHAPE(E + 1));
  plan.row2slot = tensor(MOE_I32, SHAPE(R));
  plan.slot2row = tensor(MOE_I32, SHAPE(R));
  plan.scratch = tensor(MOE_I32, SHAPE(moe__plan_scratch(R, E)));
  FIGURE(routing, 4 * 4 * r);
  time_plan(o++, &plan);

  struct moe__args_combine combine = { .dtype = dtype, .T = T, .K = K, .D = D };
  combine.rows = random_tensor(dtype, SHAPE(R, D));
  combine.weights = random_tensor(MOE_F32, SHAPE(T, K));
  combine.slot2row = some_rows(T, K);
  combine.y = tensor(dtype, SHAPE(T, D));
  snprintf(o->sizes, sizeof o->sizes, "%.40s K=%lld", wide, (long long)K);
  o->bytes = s * (r + t) * d + 8 * r;
  time_combine(o++, &combine);

  struct moe__args_act_fwd act_fwd = { .dtype = dtype, .R = R, .F = F, .act = swiglu };
  act_fwd.h = random_tensor(dtype, SHAPE(R, 2 * F));
  act_fwd.a = tensor(dtype, SHAPE(R, F));
  FIGURE(rows, s * 3 * r * f);
  time_act_fwd(o++, &act_fwd);

  struct moe__args_act_bwd act_bwd = { .dtype = dtype, .R = R, .F = F, .plane = 1, .act = swiglu };
  act_bwd.h = random_tensor(dtype, SHAPE(R, 2 * F));
  act_bwd.da = random_tensor(dtype, SHAPE(R, F));
  act_bwd.weights = random_tensor(MOE_F32, SHAPE(R));
  act_bwd.dh = tensor(dtype, SHAPE(R, 2 * F));
  act_bwd.aw = tensor(dtype, SHAPE(R, F));
  act_bwd.dweights = tensor(MOE_F32, SHAPE(R));
  FIGURE(rows, s * 6 * r * f + 8 * r);
  time_act_bwd(o++, &act_bwd);

  struct moe__args_rms_fwd rms_fwd = { .dtype = dtype, .T = T, .D = D, .eps = 1e-6 };
  rms_fwd.x = random_tensor(dtype, SHAPE(T, D));
  rms_fwd.w = random_tensor(dtype, SHAPE(D));
  rms_fwd.y = tensor(dtype, SHAPE(T, D));
  rms_fwd.rstd = tensor(MOE_F32, SHAPE(T));
  FIGURE(wide, s * 2 * t * d + 4 * t);
  time_rms_fwd(o++, &rms_fwd);

  struct moe__args_rms_bwd rms_bwd = { .dtype = dtype, .T = T, .D = D };
  rms_bwd.x = random_tensor(dtype, SHAPE(T, D));
  rms_bwd.w = random_tensor(dtype, SHAPE(D));
  rms_bwd.dy = random_tensor(dtype, SHAPE(T, D));
  rms_bwd.rstd = random_tensor(MOE_F32, SHAPE(T));
  rms_bwd.dx = tensor(dtype, SHAPE(T, D));
  rms_bwd.dw = tensor(MOE_F32, SHAPE(D));
  rms_bwd.scratch = tensor(MOE_F32, SHAPE(MOE__PARTS, D));
  FIGURE(wide, s * 3 * t * d + 4 * t);
  time_rms_bwd(o++, &rms_bwd);

  /* Gradients in FP32; parameters of 16 bits have FP32 masters. */
  struct moe__args_adamw adamw = { .dtype = MOE_F32, .n = n, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .lr_mult = 1 };
  const int64_t one = 1;
  adamw.p = random_tensor(dtype, SHAPE(n));
  adamw.m = tensor(MOE_F32, SHAPE(n));
  adamw.v = tensor(MOE_F32, SHAPE(n));
  adamw.g = random_tensor(MOE_F32, SHAPE(n));
  adamw.lr = tensor(MOE_F32, SHAPE(1));
  adamw.step = tensor(MOE_I64, SHAPE(1));
  must(moe_span_write(bench.q, spans[n_spans - 1], &one, sizeof one));
  if (dtype != MOE_F32) adamw.master = random_tensor(MOE_F32, SHAPE(n));
  snprintf(o->sizes, sizeof o->sizes, "n=%lld", (long long)n);
  o->bytes = (double)n * (2 * s + 16 + 4 + (dtype != MOE_F32 ? 8 : 0));
  time_adamw(o++, &adamw);
#undef FIGURE
}
