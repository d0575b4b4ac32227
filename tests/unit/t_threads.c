/* t_threads.c - a context shared by threads: a queue each gives each its own right results, objects are created and
   freed by many at once, and every thread has its own last error.  On an OpenCL CPU device where there is one. */
#include "moe_test.h"

#include "core/backend.h"
#include "fake.h"
#include "small.h"

#include <pthread.h>

enum { THREADS = 8, ROUNDS = 20 };

static moe_context *ctx, *other; /* other: of a second device, where there is one */
static int real;                 /* a device that computes */

static int open_context(void **state)
{
  moe_context_desc desc = moe_context_desc_init();
  (void)state;
  desc.device = "opencl:cpu";
  real = moe_context_create(&ctx, &desc) == MOE_OK;
  fake_reset();
  if (!real) ctx = fake_open();
  moe_device_info first = moe_device_info_init(), info = first;
  if (real && moe_context_info(ctx, &first) == MOE_OK)
    for (int64_t i = 0; !other && moe_device_list(&info, i) == MOE_OK; i++)
      if (info.kind == MOE_DEVICE_CPU && strcmp(info.id, first.id)) {
        desc.device = info.id;
        if (moe_context_create(&other, &desc)) other = NULL;
      }
  return ctx == NULL;
}
static int close_context(void **state)
{
  (void)state;
  moe_context_free(ctx);
  moe_context_free(other);
  return 0;
}

/* Lets `run` loose in n threads at once; fails with the first text that one leaves in its job. */
struct job {
  int number, rounds;
  moe_context *on; /* NULL: ctx */
  pthread_barrier_t *start;
  char failure[512];
  moe_layer *layer;     /* shared by nobody */
  unsigned char *bytes; /* y and every gradient of the first round */
};
#define JOB_OK(job, call)                                                                                              \
  do {                                                                                                                 \
    moe_status st_ = (call);                                                                                           \
    if (st_) {                                                                                                         \
      snprintf((job)->failure, sizeof(job)->failure, "%s: %s", #call, moe_last_error());                               \
      return NULL;                                                                                                     \
    }                                                                                                                  \
  } while (0)

static void run_all(struct job *jobs, int n, void *(*run)(void *))
{
  pthread_t threads[THREADS];
  pthread_barrier_t start;
  pthread_barrier_init(&start, NULL, (unsigned)n);
  for (int i = 0; i < n; i++) {
    jobs[i].number = i;
    jobs[i].start = &start;
    assert_int_equal(pthread_create(&threads[i], NULL, run, &jobs[i]), 0);
  }
  for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
  pthread_barrier_destroy(&start);
  for (int i = 0; i < n; i++)
    if (jobs[i].failure[0]) fail_msg("thread %d: %s", i, jobs[i].failure);
}

/* ---- work on a queue each ---------------------------------------------------------------------------------------- */
#define COMPARED ((uint64_t)32768)

/* Forward and backward over and over, on data that depend on the thread; every round gives the same bits. */
static void *train(void *arg)
{
  struct job *job = arg;
  moe_context *on = job->on ? job->on : ctx;
  struct small s;
  moe_queue *q;
  float x[SMALL_T * SMALL_D];
  unsigned char *now = calloc(1, COMPARED);
  small_options(&s, MOE_F32);
  for (int i = 0; i < SMALL_T * SMALL_D; i++) x[i] = (float)((i * 7 + job->number * 13) % 11) / 8 - 0.5f;
  JOB_OK(job, moe_queue_create(&q, on));
  JOB_OK(job, small_memory(&s, on, q));
  JOB_OK(job, moe_layer_create(&job->layer, on, &s.layer_desc));
  s.layer_io.mask.handle = NULL;
  moe_span in = { s.io.x.handle, s.io.x.offset, sizeof x }, dy = { s.grads.dy.handle, s.grads.dy.offset, sizeof x };
  moe_span y = { s.io.y.handle, s.io.y.offset, sizeof x };
  moe_layer_bytes bytes = moe_layer_bytes_init();
  JOB_OK(job, moe_layer_measure(&bytes, job->layer, SMALL_T, 1));
  JOB_OK(job, moe_span_write(q, in, x, sizeof x));
  JOB_OK(job, moe_span_write(q, dy, x, sizeof x));
  JOB_OK(job, moe_layer_init(job->layer, q, s.layer_io.params, (uint64_t)job->number, 0.3));
  JOB_OK(job, moe_span_fill(q, s.layer_io.grads, 0));
  pthread_barrier_wait(job->start);
  for (int i = 0; i < job->rounds; i++) {
    JOB_OK(job, moe_layer_forward(job->layer, q, &s.layer_io, &s.layer_state));
    JOB_OK(job, moe_layer_backward(job->layer, q, &s.layer_state, &s.layer_io));
    if (real) JOB_OK(job, moe_queue_wait(q)); /* the fake's numbers are no numbers */
    JOB_OK(job, moe_span_read(q, now, y, sizeof x));
    JOB_OK(job, moe_span_read(q, now + sizeof x, s.layer_io.grads, bytes.grads));
    if (!job->bytes) {
      job->bytes = now;
      now = calloc(1, COMPARED);
    } else if (memcmp(now, job->bytes, COMPARED)) {
      snprintf(job->failure, sizeof job->failure, "round %d has other bits than the first", i);
      return NULL;
    }
  }
  free(now);
  moe_layer_free(job->layer);
  small_free(&s);
  moe_queue_free(q);
  return NULL;
}

static void two_threads_with_a_queue_each(void **state)
{
  struct job together[2] = { { .rounds = ROUNDS }, { .rounds = ROUNDS } };
  (void)state;
  run_all(together, 2, train);
  for (int i = 0; i < 2; i++) { /* the same, alone */
    struct job alone = { .rounds = 1 };
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, 1);
    alone.number = i;
    alone.start = &start;
    train(&alone);
    pthread_barrier_destroy(&start);
    assert_string_equal(alone.failure, "");
    assert_memory_equal(alone.bytes, together[i].bytes, COMPARED);
    free(alone.bytes);
  }
  if (real) assert_memory_not_equal(together[0].bytes, together[1].bytes, COMPARED);
  for (int i = 0; i < 2; i++) free(together[i].bytes);
}

/* ---- creating at once -------------------------------------------------------------------------------------------- */
/* bf16: programs that nobody has built yet. */
static void *create(void *arg)
{
  struct job *job = arg;
  pthread_barrier_wait(job->start);
  for (int i = 0; i < job->rounds; i++) {
    struct small s;
    moe_queue *q;
    moe_tape *tape;
    moe_router *router;
    moe_span span;
    small_options(&s, MOE_BF16);
    JOB_OK(job, moe_queue_create(&q, ctx));
    JOB_OK(job, moe_layer_create(&job->layer, ctx, &s.layer_desc));
    JOB_OK(job, moe_router_create(&router, ctx, &s.router_desc));
    JOB_OK(job, moe_tape_create(&tape, q, NULL));
    JOB_OK(job, moe_span_alloc(&span, ctx, 1000));
    JOB_OK(job, moe_span_fill(q, span, (uint8_t)i));
    JOB_OK(job, moe_queue_wait(q));
    moe_span_free(ctx, &span);
    moe_tape_free(tape);
    moe_router_free(router);
    moe_layer_free(job->layer);
    moe_queue_free(q);
  }
  return NULL;
}

static void many_threads_create_and_free(void **state)
{
  struct job jobs[THREADS];
  long refs = ctx->refs;
  (void)state;
  memset(jobs, 0, sizeof jobs);
  for (int i = 0; i < THREADS; i++) jobs[i].rounds = ROUNDS;
  run_all(jobs, THREADS, create);
  assert_int_equal(ctx->refs, refs);
}

/* The last one to let go of the context is whoever it is. */
static void *drop(void *arg)
{
  struct job *job = arg;
  moe_queue *q = NULL;
  JOB_OK(job, moe_queue_create(&q, ctx));
  pthread_barrier_wait(job->start);
  moe_queue_free(q);
  return NULL;
}

static void the_context_closes_once(void **state)
{
  moe_context *outer = ctx;
  struct job jobs[THREADS];
  long devices = fake.devices;
  (void)state;
  for (int i = 0; i < ROUNDS; i++) {
    memset(jobs, 0, sizeof jobs);
    ctx = fake_open();
    moe_context *mine = ctx;
    run_all(jobs, THREADS, drop);
    moe_context_free(mine);
    assert_int_equal(fake.devices, devices);
  }
  ctx = outer;
}

/* ---- errors ------------------------------------------------------------------------------------------------------ */
static void *err(void *arg)
{
  struct job *job = arg;
  struct small s;
  moe_experts *experts;
  char want[64];
  small_options(&s, MOE_F32);
  pthread_barrier_wait(job->start);
  for (int i = 0; i < 1000; i++) {
    int64_t top_k = 100 + job->number * 1000 + i;
    s.selection.top_k = top_k;
    if (moe_experts_create(&experts, ctx, &s.experts_desc) != MOE_ERR_INVALID) {
      snprintf(job->failure, sizeof job->failure, "top_k %lld was taken", (long long)top_k);
      return NULL;
    }
    snprintf(want, sizeof want, "top_k %lld ", (long long)top_k);
    if (!strstr(moe_last_error(), want)) {
      snprintf(job->failure, sizeof job->failure, "wanted \"%s\", got \"%s\"", want, moe_last_error());
      return NULL;
    }
  }
  return NULL;
}

static void each_thread_has_its_own_error(void **state)
{
  struct job jobs[THREADS];
  (void)state;
  memset(jobs, 0, sizeof jobs);
  (void)!moe_queue_wait(NULL);
  run_all(jobs, THREADS, err);
  assert_string_equal(moe_last_error(), "moe_queue_wait: queue is NULL");
}

/* A thread on each of two devices: the same bits, and what belongs to one is refused by the other. */
static void two_devices_in_one_process(void **state)
{
  struct job jobs[2] = { { .rounds = ROUNDS }, { .rounds = ROUNDS } }, again[2] = { { .rounds = 1 }, { .rounds = 1 } };
  moe_queue *here, *there;
  moe_layer *layer;
  struct small s;
  (void)state;
  if (!other) skip();
  jobs[1].on = other;
  again[0].on = other;
  run_all(jobs, 2, train);
  run_all(again, 2, train); /* the devices exchanged */
  for (int i = 0; i < 2; i++) {
    assert_memory_equal(jobs[i].bytes, again[i].bytes, COMPARED);
    free(jobs[i].bytes);
    free(again[i].bytes);
  }
  OK(moe_queue_create(&here, ctx));
  OK(moe_queue_create(&there, other));
  small_options(&s, MOE_F32);
  OK(small_memory(&s, ctx, here));
  OK(moe_layer_create(&layer, ctx, &s.layer_desc));
  assert_int_equal(moe_layer_forward(layer, there, &s.layer_io, &s.layer_state), MOE_ERR_INVALID);
  moe_layer_free(layer);
  small_free(&s);
  moe_queue_free(there);
  moe_queue_free(here);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(many_threads_create_and_free), cmocka_unit_test(two_threads_with_a_queue_each),
    cmocka_unit_test(the_context_closes_once),      cmocka_unit_test(each_thread_has_its_own_error),
    cmocka_unit_test(two_devices_in_one_process),
  };
  setenv("POCL_DEVICES", "pthread pthread cpu cpu", 0); /* PoCL: two devices; by their names up to 3.1, and from 4.0 */
  return cmocka_run_group_tests(tests, open_context, close_context) ? 1 : 0;
}
