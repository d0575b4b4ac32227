/* t_graph.c - whole steps of a layer in CUDA graphs: forward, backward and AdamW are captured once and replayed with
   other tokens, other routing and another queue at work, and give what the same calls give uncaptured, to the bit.
   The watch over gradients, too. */
#include "moe_test.h"

#include "core/backend.h"
#include "core/tensor.h"

#include "config.h"

#if MOE_HAVE_CUDA
#include <moe/cuda.h>

#include <cuda_runtime_api.h>
#include <math.h>

enum { STEPS = 20, T = 384, D = 64, F = 96, E = 16, K = 4, PARAMS = 16 };

static moe_context *ctx;
static moe_queue *queue, *other;

static void cuda(cudaError_t e)
{
  if (e) fail_msg("%s", cudaGetErrorString(e));
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */
static cudaGraphExec_t captured(void (*enqueue)(void *user), void *user)
{
  struct CUstream_st *stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(moe_queue_to_cuda(&stream, queue));
  cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue(user);
  cuda(cudaStreamEndCapture(stream, &graph));
  cuda(cudaGraphInstantiate(&exec, graph, 0));
  cuda(cudaGraphDestroy(graph));
  return exec;
}

static void replay(cudaGraphExec_t exec)
{
  struct CUstream_st *stream;
  OK(moe_queue_to_cuda(&stream, queue));
  cuda(cudaGraphLaunch(exec, stream));
}

/* ---- a layer and its optimizer ----------------------------------------------------------------------------------- */
struct training {
  moe_layer *layer;
  moe_adamw *optimizer;
  moe_layer_io io;
  moe_layer_state state;
  moe_span spans[10];
  uint64_t params;
  int n;
};

static moe_span span(struct training *t, uint64_t bytes)
{
  moe_span *s = &t->spans[t->n++];
  OK(moe_span_alloc(s, ctx, bytes));
  OK(moe_span_fill(queue, *s, 0xff)); /* NaN */
  return *s;
}

static moe_tensor tokens(struct training *t, int64_t dtype)
{
  moe_tensor x;
  OK(moe_tensor_packed(&x, span(t, moe_dtype_size(dtype) * T * D), dtype, 2, (const int64_t[]){ T, D }));
  return x;
}

static struct training open_training(int64_t dtype)
{
  struct training t = { 0 };
  moe_selection_options selection = moe_selection_options_init();
  moe_weights_options weights = moe_weights_options_init();
  moe_activation activation = moe_activation_init();
  moe_layer_desc desc = moe_layer_desc_init();
  moe_layer_bytes bytes = moe_layer_bytes_init();
  moe_adamw_desc adamw = moe_adamw_desc_init();
  selection.kind = MOE_SELECT_SOFTMAX;
  selection.top_k = K;
  weights.scoring = MOE_SOFTMAX;
  weights.renormalize = 1;
  weights.scale = 1;
  activation.kind = MOE_SILU;
  activation.gated = 1;
  desc.d_model = D;
  desc.d_ff = F;
  desc.n_experts = E;
  desc.dtype = dtype;
  desc.selection = &selection;
  desc.weights = &weights;
  desc.activation = &activation;
  desc.router_bias = desc.hidden_bias = desc.down_bias = desc.shared_gate = 1;
  desc.d_shared = F;
  desc.balance_coef = 0.01;
  desc.z_coef = 0.001;
  OK(moe_layer_create(&t.layer, ctx, &desc));
  OK(moe_layer_measure(&bytes, t.layer, T, 1));
  t.io = moe_layer_io_init();
  t.state = moe_layer_state_init();
  t.io.x = tokens(&t, dtype);
  t.io.y = tokens(&t, dtype);
  t.io.dy = tokens(&t, dtype);
  t.io.dx = tokens(&t, dtype);
  t.io.params = span(&t, t.params = bytes.params);
  t.io.grads = span(&t, bytes.grads);
  t.io.saved = span(&t, bytes.saved);
  t.io.scratch = span(&t, bytes.scratch);

  adamw.dtype = MOE_F32;
  adamw.peak = 0.01;
  adamw.warmup = 5;
  adamw.total = STEPS;
  adamw.max_norm = 1;
  OK(moe_adamw_create(&t.optimizer, ctx, &adamw));
  moe_tensor param, grad;
  moe_layer_param_info info = moe_layer_param_info_init();
  for (int64_t i = 0; moe_layer_param(&param, &grad, &info, t.layer, t.io.params, t.io.grads, i) == MOE_OK; i++)
    if (info.trainable) OK(moe_adamw_add(t.optimizer, &param, &grad, 0.1 * (double)info.decays, 1));
  uint64_t state;
  OK(moe_adamw_measure(&state, t.optimizer));
  span(&t, state);
  return t;
}

/* To where a run of steps begins. */
static void start(struct training *t)
{
  OK(moe_layer_init(t->layer, queue, t->io.params, 1, 0.3));
  OK(moe_adamw_bind(t->optimizer, queue, t->spans[t->n - 1]));
}

static void close_training(struct training *t)
{
  moe_layer_free(t->layer);
  moe_adamw_free(t->optimizer);
  while (t->n) moe_span_free(ctx, &t->spans[--t->n]);
}

/* The tokens of a step; experts are chosen otherwise in each. */
static void feed(struct training *t, int step)
{
  OK(moe_tensor_normal(queue, &t->io.x, 2, step, 1));
  OK(moe_tensor_normal(queue, &t->io.dy, 3, step, 1));
}

static void whole_step(void *user)
{
  struct training *t = user;
  OK(moe_layer_forward(t->layer, queue, &t->io, &t->state));
  OK(moe_layer_backward(t->layer, queue, &t->state, &t->io));
  OK(moe_adamw_step(t->optimizer, queue));
}

/* ---- what a step leaves ------------------------------------------------------------------------------------------ */
struct outcome {
  unsigned char *bytes[4]; /* y, dx, params, ids */
  uint64_t n[4];
};

static struct outcome outcome_of(const struct training *t)
{
  moe_tensor ids;
  OK(moe_layer_route_ids(&ids, &t->state));
  const moe_span from[] = { { t->io.y.handle, t->io.y.offset, moe_tensor_extent(&t->io.y) },
                            { t->io.dx.handle, t->io.dx.offset, moe_tensor_extent(&t->io.dx) },
                            { t->io.params.handle, t->io.params.offset, t->params },
                            { ids.handle, ids.offset, moe_tensor_extent(&ids) } };
  struct outcome o;
  for (int i = 0; i < 4; i++) {
    o.n[i] = from[i].bytes;
    o.bytes[i] = malloc(o.n[i]);
    assert_non_null(o.bytes[i]);
    OK(moe_span_read(queue, o.bytes[i], from[i], o.n[i]));
  }
  return o;
}

static void drop(struct outcome *o)
{
  for (int i = 0; i < 4; i++) free(o->bytes[i]);
}

static void assert_equal(const struct outcome *got, const struct outcome *want, int step, const char *how)
{
  static const char *const names[] = { "y", "dx", "the parameters", "ids" };
  for (int i = 0; i < 4; i++)
    if (memcmp(got->bytes[i], want->bytes[i], want->n[i])) fail_msg("%s: %s of step %d differ", how, names[i], step);
}

/* Work of another queue while a step is under way: random numbers and copies. */
struct load {
  moe_span span;
  moe_tensor a, b;
};
static struct load open_load(void)
{
  const int64_t n = 1 << 22;
  struct load l;
  OK(moe_span_alloc(&l.span, ctx, 8 * (uint64_t)n));
  OK(moe_tensor_packed(&l.a, (moe_span){ l.span.handle, 0, 4 * (uint64_t)n }, MOE_F32, 1, &n));
  OK(moe_tensor_packed(&l.b, (moe_span){ l.span.handle, 4 * (uint64_t)n, 4 * (uint64_t)n }, MOE_F32, 1, &n));
  return l;
}
static void put_on(const struct load *l, int step)
{
  const uint64_t bytes = moe_tensor_extent(&l->a);
  for (int i = 0; i < 8; i++) {
    OK(moe_tensor_normal(other, &l->a, 4, step, 1));
    OK(moe_span_copy(other, (moe_span){ l->b.handle, l->b.offset, bytes },
                     (moe_span){ l->a.handle, l->a.offset, bytes }, bytes));
  }
}

static void steps_replay_to_the_bit(void **state)
{
  static const int64_t dtypes[] = { MOE_BF16, MOE_F32 };
  struct load load = open_load();
  (void)state;
  for (int i = 0; i < 2; i++) {
    struct training t = open_training(dtypes[i]);
    struct outcome want[STEPS];
    int moved = 0;
    start(&t);
    for (int step = 0; step < STEPS; step++) {
      feed(&t, step);
      whole_step(&t);
      want[step] = outcome_of(&t);
      moved += step && memcmp(want[step].bytes[3], want[0].bytes[3], want[0].n[3]);
    }
    assert_int_equal(moved, STEPS - 1);

    cudaGraphExec_t exec = captured(whole_step, &t);
    for (int busy = 0; busy < 2; busy++) {
      start(&t);
      for (int step = 0; step < STEPS; step++) {
        feed(&t, step);
        if (busy) put_on(&load, step);
        replay(exec);
        if (busy) put_on(&load, step);
        struct outcome got = outcome_of(&t);
        assert_equal(&got, &want[step], step, busy ? "replayed beside another queue" : "replayed");
        drop(&got);
      }
    }
    OK(moe_queue_wait(other));

    /* The same step again and again: the optimizer's state starts anew, so each run has the first one's result. */
    for (int run = 0; run < STEPS; run++) {
      start(&t);
      feed(&t, 0);
      put_on(&load, run);
      replay(exec);
      struct outcome got = outcome_of(&t);
      assert_equal(&got, &want[0], run, "run again");
      drop(&got);
    }
    OK(moe_queue_wait(other));
    cuda(cudaGraphExecDestroy(exec));
    for (int step = 0; step < STEPS; step++) drop(&want[step]);
    close_training(&t);
  }
  moe_span_free(ctx, &load.span);
}

/* ---- the watch --------------------------------------------------------------------------------------------------- */
static void watch(void *user)
{
  OK(moe__run_watch(queue, user, MOE_AUTO));
}

static void a_watch_replays(void **state)
{
  enum { N = 100000 };
  const int64_t n = N, three = 3, scratch = MOE__WATCHED;
  struct moe__args_watch args = { .dtype = MOE_F32, .tag = { 7, 8 }, .limit = 1e10 };
  static const float bad = INFINITY, good = 1;
  int64_t record[3];
  moe_span span;
  (void)state;
  OK(moe_span_alloc(&span, ctx, 8 * N + 256));
  OK(moe_tensor_packed(&args.a[0], (moe_span){ span.handle, 0, 4 * N }, MOE_F32, 1, &n));
  OK(moe_tensor_packed(&args.a[1], (moe_span){ span.handle, 4 * N, 4 * N }, MOE_F32, 1, &n));
  OK(moe_tensor_packed(&args.record, (moe_span){ span.handle, 8 * N, 24 }, MOE_I64, 1, &three));
  OK(moe_tensor_packed(&args.scratch, (moe_span){ span.handle, 8 * N + 32, 4 * MOE__WATCHED }, MOE_I32, 1, &scratch));
  OK(moe_tensor_normal(queue, &args.a[0], 1, 0, 1));
  OK(moe_tensor_normal(queue, &args.a[1], 1, 1, 1));
  OK(moe_span_fill(queue, (moe_span){ span.handle, 8 * N, 32 }, 0));
  OK(moe_span_fill(queue, (moe_span){ span.handle, 8 * N + 32, 4 * MOE__WATCHED }, 0xff));
  OK(moe__prepare_watch(ctx, &args, MOE_AUTO));
  cudaGraphExec_t exec = captured(watch, &args);
  for (int64_t run = 0; run < 20; run++) {
    const int64_t at = 4 * (N + 977 * run); /* in the second tensor, in every second run */
    if (run % 2) OK(moe_span_write(queue, (moe_span){ span.handle, (uint64_t)at, 4 }, &bad, 4));
    replay(exec);
    OK(moe_span_read(queue, record, (moe_span){ span.handle, 8 * N, 24 }, sizeof record));
    assert_int_equal(record[0], run % 2);
    if (run % 2) {
      assert_int_equal(record[1], 8);
      assert_int_equal(record[2], 977 * run);
    }
    if (run % 2) OK(moe_span_write(queue, (moe_span){ span.handle, (uint64_t)at, 4 }, &good, 4));
    OK(moe_span_fill(queue, (moe_span){ span.handle, 8 * N, 24 }, 0));
  }
  cuda(cudaGraphExecDestroy(exec));
  moe_span_free(ctx, &span);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(steps_replay_to_the_bit),
    cmocka_unit_test(a_watch_replays),
  };
  if (!test_open(&ctx, &queue)) return 77;
  int rc = 77;
  if (strcmp(ctx->be->name, "cuda")) {
    printf("SKIP: %s is not a CUDA device\n", ctx->info->pub.id);
  } else {
    OK(moe_queue_create(&other, ctx));
    rc = TEST_MAIN(tests);
    moe_queue_free(other);
  }
  test_close(ctx, queue);
  return rc;
}

#else
int main(void)
{
  printf("SKIP: the library is built without CUDA\n");
  return 77;
}
#endif
