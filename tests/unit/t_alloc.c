/* t_alloc.c - every allocation on the host, and every call into the backend, fails once in turn: a clean status with
   its text, nothing lost, nothing half done, and the same objects work when asked again.

   The program is linked with --wrap for malloc and its kin, so host allocations of the library can be counted and
   refused; those of shared libraries are not touched. */
#include "files.h"

#include "config.h"
#include "core/backend.h"
#include "core/dlpack.h"
#include "fake.h"
#include "small.h"
#if MOE_HAVE_OPENCL
#include "opencl/loader.h"
#endif

#include <moe/dlpack.h>

#include <math.h>
#include <stdatomic.h>

/* ---- the host's memory ------------------------------------------------------------------------------------------- */
void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
char *__real_strdup(const char *text);
void __real_free(void *p);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);
char *__wrap_strdup(const char *text);
void __wrap_free(void *p);

static _Atomic long host_calls, host_fail_at, host_live;

static int refused(void)
{
  return atomic_fetch_add(&host_calls, 1) + 1 == host_fail_at;
}
static void *counted(void *p)
{
  host_live += p != NULL;
  return p;
}
void *__wrap_malloc(size_t size)
{
  return refused() ? NULL : counted(__real_malloc(size));
}
void *__wrap_calloc(size_t n, size_t size)
{
  return refused() ? NULL : counted(__real_calloc(n, size));
}
void *__wrap_realloc(void *p, size_t size)
{
  void *bigger = refused() ? NULL : __real_realloc(p, size);
  host_live += bigger && !p;
  return bigger;
}
char *__wrap_strdup(const char *text)
{
  return refused() ? NULL : counted(__real_strdup(text));
}
void __wrap_free(void *p)
{
  host_live -= p != NULL;
  __real_free(p);
}

struct live {
  long host, devices, queues, blocks, bytes;
};
static struct live live_now(void)
{
  return (struct live){ host_live, fake.devices, fake.queues, fake.blocks, fake.bytes };
}
static void assert_live(struct live want, const char *what, long n)
{
  struct live now = live_now();
  if (memcmp(&now, &want, sizeof now))
    fail_msg("%s, failure %ld: %+ld host allocations, %+ld devices, %+ld queues, %+ld blocks are left", what, n,
             now.host - want.host, now.devices - want.devices, now.queues - want.queues, now.blocks - want.blocks);
}

/* ---- objects: made, used once and freed -------------------------------------------------------------------------- */
struct rig {
  struct small s;
  moe_context *ctx;
  moe_queue *q;
  moe_router *router;
  moe_experts *experts;
  moe_layer *layer;
  moe_adamw *opt;
  moe_tape *tape;
  moe_tensor targets, table;
};

/* Calls of each sort so far, before anything is freed: a failure while freeing has nobody to tell. */
static long calls_made, host_calls_made;

static moe_status open_all(struct rig *r)
{
  moe_adamw_desc desc = moe_adamw_desc_init();
  moe_tape_desc tape = moe_tape_desc_init();
  memset(r, 0, sizeof *r);
  small_options(&r->s, MOE_BF16);
  r->s.selection.softmax_bias = r->s.layer_desc.correction_bias = 1;
  desc.dtype = MOE_F32;
  desc.peak = 1e-3;
  tape.block = 1 << 14; /* several blocks */
  tape.health_policy = MOE_HEALTH_POLICY_FAIL;
  tape.health_activations = 1;
  r->ctx = fake_open();
  if (!r->ctx) return moe__fail(MOE_ERR_NO_MEMORY, "no host memory for the fake context");
  MOE__TRY(moe_queue_create(&r->q, r->ctx));
  MOE__TRY(small_memory(&r->s, r->ctx, r->q));
  r->targets = moe__arena_flat(&r->s.arena, MOE_I32, SMALL_T);
  r->table = moe__arena_matrix(&r->s.arena, MOE_BF16, 10, SMALL_D);
  MOE__TRY(moe_router_create(&r->router, r->ctx, &r->s.router_desc));
  MOE__TRY(moe_experts_create(&r->experts, r->ctx, &r->s.experts_desc));
  MOE__TRY(moe_layer_create(&r->layer, r->ctx, &r->s.layer_desc));
  MOE__TRY(moe_adamw_create(&r->opt, r->ctx, &desc));
  for (int i = 0; i < 20; i++) MOE__TRY(moe_adamw_add(r->opt, &r->s.io.x, &r->s.grads.dx, 0.1, 1)); /* list grows */
  return moe_tape_create(&r->tape, r->q, &tape);
}

static void close_all(struct rig *r)
{
  calls_made = fake.calls;
  host_calls_made = host_calls;
  moe_tape_free(r->tape);
  moe_adamw_free(r->opt);
  moe_layer_free(r->layer);
  moe_experts_free(r->experts);
  moe_router_free(r->router);
  if (r->s.ctx) small_free(&r->s);
  moe_queue_free(r->q);
  moe_context_free(r->ctx);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */
static moe_status router_step(struct rig *r)
{
  moe_tensor w = r->s.grads.dgate_bias;
  w.shape[0] = SMALL_T;
  w.shape[1] = w.stride[0] = SMALL_K;
  MOE__TRY(moe_router_select(r->router, r->q, &r->s.ids, &w, &r->s.io.logits, NULL));
  MOE__TRY(moe_router_weights(r->router, r->q, &w, &r->s.io.logits, &r->s.ids));
  return moe_router_weights_backward(r->router, r->q, &r->s.grads.dlogits, &w, &r->s.io.logits, &r->s.ids);
}

static moe_status forward_step(struct rig *r)
{
  moe_state before = r->s.state;
  moe_status st = moe_experts_forward(r->experts, r->q, &r->s.io, &r->s.state);
  if (st) assert_memory_equal(&before, &r->s.state, sizeof before);
  return st;
}
static moe_status replay_step(struct rig *r)
{
  moe_experts_io io = r->s.io;
  io.ids = r->s.ids;
  return moe_experts_inference(r->experts, r->q, &io);
}
static moe_status backward_step(struct rig *r)
{
  moe_state before = r->s.state;
  moe_status st = moe_experts_backward(r->experts, r->q, &r->s.state, &r->s.io, &r->s.grads);
  assert_memory_equal(&before, &r->s.state, sizeof before);
  return st;
}

static moe_status layer_forward_step(struct rig *r)
{
  moe_layer_state before = r->s.layer_state;
  moe_status st = moe_layer_init(r->layer, r->q, r->s.layer_io.params, 1, 0.02);
  if (!st) st = moe_layer_forward(r->layer, r->q, &r->s.layer_io, &r->s.layer_state);
  if (st) assert_memory_equal(&before, &r->s.layer_state, sizeof before);
  return st;
}
static moe_status layer_inference_step(struct rig *r)
{
  return moe_layer_inference(r->layer, r->q, &r->s.layer_io);
}
static moe_status layer_backward_step(struct rig *r)
{
  moe_tensor counts;
  MOE__TRY(moe_layer_backward(r->layer, r->q, &r->s.layer_state, &r->s.layer_io));
  MOE__TRY(moe_layer_counts(&counts, &r->s.layer_state));
  return moe_layer_bias_step(r->layer, r->q, r->s.layer_io.params, &counts, 0.01);
}
static moe_status metrics_step(struct rig *r)
{
  moe_layer_metrics metrics = moe_layer_metrics_init(), before = metrics;
  int32_t load[SMALL_E];
  moe_status st = moe_layer_metrics_read(&metrics, load, r->layer, r->q, &r->s.layer_state);
  if (st) assert_memory_equal(&before, &metrics, sizeof before);
  return st;
}

static moe_status adamw_bind_step(struct rig *r)
{
  uint64_t bytes;
  MOE__TRY(moe_adamw_measure(&bytes, r->opt));
  assert_true(bytes <= r->s.layer_io.saved.bytes + r->s.layer_io.scratch.bytes); /* they lie side by side */
  moe_span state = r->s.layer_io.saved;
  state.bytes = bytes;
  return moe_adamw_bind(r->opt, r->q, state);
}
static moe_status adamw_step(struct rig *r)
{
  moe_adamw_info info = moe_adamw_info_init();
  MOE__TRY(moe_adamw_step(r->opt, r->q));
  return moe_adamw_read(&info, r->opt, r->q);
}

/* Functions that were given to tapes, and those that were released. */
static long given, released;
static moe_status same_forward(void *user, const moe_tape_call *call)
{
  (void)user;
  call->out[0] = call->in[0];
  return MOE_OK;
}
static moe_status same_backward(void *user, const moe_tape_call *call, const moe_value *dout, moe_value *din)
{
  (void)user;
  (void)call;
  din[0] = dout[0];
  return MOE_OK;
}
static void same_release(void *user)
{
  (void)user;
  released++;
}
static moe_status layer_segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out,
                                int64_t n_out)
{
  struct rig *r = user;
  moe_tape_moe options = moe_tape_moe_init();
  (void)n_in;
  (void)n_out;
  options.params = r->s.layer_io.params;
  options.grads = r->s.layer_io.grads;
  out[0] = moe_tape_moe_layer(t, r->layer, in[0], &options, NULL);
  return moe_tape_status(t);
}

static moe_status tape_step(struct rig *r)
{
  moe_tape *t = r->tape;
  moe_function same = moe_function_init();
  double read;
  same.forward = same_forward;
  same.backward = same_backward;
  same.release = same_release;
  same.n_out = 1;
  moe_tape_reset(t);
  moe_value table = moe_tape_leaf(t, &r->table, 1), targets = moe_tape_leaf(t, &r->targets, 0);
  moe_value w = moe_tape_param(t, &r->s.io.x, &r->s.grads.dx); /* [6,8] */
  moe_value x = moe_tape_embedding(t, table, targets);
  for (int i = 0; i < 2; i++) MOE__TRY(moe_tape_recompute(&x, 1, t, layer_segment, r, &x, 1));
  given++;
  MOE__TRY(moe_tape_custom(&x, t, &same, &x, 1));
  x = moe_tape_matmul(t, x, w, 0, 1);
  x = moe_tape_mul(t, moe_tape_add(t, x, x), moe_tape_scale(t, x, 0.5));
  moe_value loss = moe_tape_cross_entropy(t, x, targets);
  loss = moe_tape_add(t, loss, moe_tape_mean(t, moe_tape_reshape(t, w, 1, (const int64_t[]){ 48 })));
  for (int i = 0; i < 150; i++) loss = moe_tape_scale(t, loss, 1); /* lists grow, blocks are added */
  MOE__TRY(moe_tape_backward(t, loss, (moe_value){ 0 }, MOE_ACCUMULATE));
  return moe_tape_read(t, loss, &read, 1);
}

static moe_value square(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  (void)user;
  (void)n;
  return moe_tape_mul(t, in[0], in[0]);
}
/* No kernel runs here, so the numbers are NaN: any threshold but infinity would find them wrong. */
static moe_status check_step(struct rig *r)
{
  moe_tape_health_info health = moe_tape_health_info_init();
  moe_gradcheck_desc desc = moe_gradcheck_desc_init();
  moe_tensor in;
  moe_value hv;
  const int64_t two = 2;
  MOE__TRY(moe_tape_health(&health, r->tape));
  MOE__TRY(moe_tensor_packed(&in, r->s.layer_io.params, MOE_F64, 1, &two));
  desc.threshold = (double)INFINITY;
  for (desc.second = 0; desc.second < 2; desc.second++)
    MOE__TRY(moe_gradcheck(NULL, r->q, square, NULL, &in, 1, &desc));
  moe_tape_reset(r->tape);
  moe_value x = moe_tape_leaf(r->tape, &in, 1), y = moe_tape_sum(r->tape, moe_tape_mul(r->tape, x, x));
  return moe_hvp(&hv, r->tape, y, &x, &x, 1, 0);
}

static moe_status wait_step(struct rig *r)
{
  uint64_t bits;
  MOE__TRY(moe_queue_wait(r->q));
  return moe_health_read(r->q, &bits);
}

static moe_status span_step(struct rig *r)
{
  moe_span span, part = r->s.layer_io.params;
  unsigned char host[64] = { 0 };
  moe_status st = moe_span_alloc(&span, r->ctx, 64);
  if (st) {
    assert_null(span.handle);
    return st;
  }
  st = moe_span_write(r->q, span, host, 64);
  if (!st) st = moe_span_copy(r->q, part, span, 64);
  if (!st) st = moe_span_fill(r->q, span, 7);
  if (!st) st = moe_span_read(r->q, host, span, 64);
  moe_span_free(r->ctx, &span);
  return st;
}

static moe_status values_step(struct rig *r)
{
  double out[4];
  MOE__TRY(moe_tensor_fill(r->q, &r->s.io.x, 1));
  MOE__TRY(moe_tensor_normal(r->q, &r->s.io.x, 1, 2, 0.5));
  return moe_tensor_read(r->q, out, &r->s.io.x, 4);
}

/* Host memory through a copy, and device memory out and in again; a refused tensor is still its owner's. */
static int deleted;
static void delete (struct DLManagedTensorVersioned *self)
{
  (void)self;
  deleted++;
}
static moe_status dlpack_step(struct rig *r)
{
  float host[12] = { 0 };
  int64_t shape[2] = { 3, 2 }, stride[2] = { 1, 4 };
  struct moe__dl_tensor there = { host, MOE__DL_CPU, 0, 2, MOE__DL_FLOAT, 32, 1, shape, stride, 0 };
  struct DLManagedTensorVersioned managed = { 1, 0, NULL, delete, 0, there }, *out;
  moe_dlpack *holder;
  moe_tensor t;
  deleted = 0;
  moe_status st = moe_dlpack_import(&holder, &t, r->q, &managed, MOE_DLPACK_COPY);
  assert_true(!st == (holder != NULL) && !deleted);
  if (!st) st = moe_dlpack_wait(holder, r->q);
  if (!st) st = moe_dlpack_export(&out, r->q, &t, MOE_DLPACK_COPY, NULL, NULL);
  if (!st) out->deleter(out);
  moe_dlpack_free(holder);
  assert_true(deleted == (holder != NULL));
  MOE__TRY(st);
  MOE__TRY(moe_dlpack_export(&out, r->q, &r->s.io.x, 0, NULL, NULL));
  st = moe_dlpack_import(&holder, &t, r->q, out, 0);
  if (st) out->deleter(out);
  moe_dlpack_free(holder);
  return st;
}

static const struct step {
  const char *name;
  moe_status (*run)(struct rig *);
} steps[] = {
  { "router", router_step },
  { "experts forward", forward_step },
  { "experts replay", replay_step },
  { "experts backward", backward_step },
  { "layer forward", layer_forward_step },
  { "layer inference", layer_inference_step },
  { "layer backward", layer_backward_step },
  { "layer metrics", metrics_step },
  { "adamw bind", adamw_bind_step },
  { "adamw step", adamw_step },
  { "tape", tape_step },
  { "checks", check_step },
  { "wait", wait_step },
  { "spans", span_step },
  { "values", values_step },
  { "dlpack", dlpack_step },
};
enum { STEPS = sizeof steps / sizeof steps[0] };

/* ---- failing everywhere ------------------------------------------------------------------------------------------ */
static void clear(void)
{
  fake_clear();
  host_calls = host_fail_at = 0;
}
static void arm(int on_host, long n)
{
  clear();
  if (on_host) host_fail_at = n;
  else fake.fail_at = n;
}

static void assert_told(moe_status st, int on_host, const char *what, long n)
{
  int right = on_host ? st == MOE_ERR_NO_MEMORY
                      : st == MOE_ERR_NO_MEMORY || st == MOE_ERR_BACKEND || st == MOE_ERR_LAUNCH || st == MOE_ERR_BUILD;
  const char *text = on_host ? "no host memory" : "was told to fail";
  if (!right || !strstr(moe_last_error(), text))
    fail_msg("%s, %s failure %ld: \"%s\" (%s)", what, on_host ? "host" : "backend", n, moe_strerror(st),
             moe_last_error());
}

static moe_status life(void)
{
  struct rig r;
  moe_status st = open_all(&r);
  for (int i = 0; i < STEPS && !st; i++) st = steps[i].run(&r);
  close_all(&r);
  assert_int_equal(released, given);
  return st;
}

/* From nothing to nothing. */
static void every_life_ends_clean(void **state)
{
  (void)state;
  fake_reset();
  clear();
  struct live before = live_now();
  OK(life());
  assert_live(before, "a whole life", 0);
  long total[2] = { calls_made, host_calls_made }, with_free = fake.calls;
  assert_true(total[0] > 400 && total[1] > 20);
  for (int on_host = 0; on_host < 2; on_host++)
    for (long n = 1; n <= total[on_host]; n++) {
      arm(on_host, n);
      moe_status st = life();
      assert_told(st, on_host, "a whole life", n);
      assert_live(before, "a whole life", n);
    }
  for (long n = total[0] + 1; n <= with_free; n++) { /* waiting before memory is given back */
    arm(0, n);
    OK(life());
    assert_live(before, "freeing", n);
  }
  clear();
  OK(life());
}

/* The same objects, each step failing at each of its calls and then succeeding. */
static void every_step_can_be_repeated(void **state)
{
  struct rig r;
  (void)state;
  fake_reset();
  clear();
  struct live before = live_now();
  OK(open_all(&r));
  for (int i = 0; i < STEPS; i++) OK(steps[i].run(&r)); /* warm: the tape has its blocks, backward its state */
  struct live warm = live_now();
  for (int i = 0; i < STEPS; i++)
    for (int on_host = 0; on_host < 2; on_host++) {
      clear();
      OK(steps[i].run(&r));
      long total = on_host ? host_calls : fake.calls;
      for (long n = 1; n <= total; n++) {
        arm(on_host, n);
        moe_status st = steps[i].run(&r);
        assert_told(st, on_host, steps[i].name, n);
        assert_live(warm, steps[i].name, n);
        clear();
        OK(steps[i].run(&r));
        assert_live(warm, steps[i].name, n);
      }
    }
  close_all(&r);
  assert_live(before, "all steps", 0);
}

/* ---- checkpoints ------------------------------------------------------------------------------------------------- */
static moe_status write_all(struct rig *r, moe_checkpoint_writer *w)
{
  MOE__TRY(moe_checkpoint_save_layer(w, r->q, r->layer, r->s.layer_io.params, "layer.", MOE_NAMES_LIBMOE));
  MOE__TRY(moe_checkpoint_save_adamw(w, r->q, r->opt, "adamw."));
  return moe_checkpoint_writer_commit(w);
}
static moe_status save_step(struct rig *r)
{
  moe_checkpoint_writer *w;
  moe_status st = moe_checkpoint_writer_create(&w, files_path("all.safetensors"), NULL);
  if (!st) st = write_all(r, w);
  moe_checkpoint_writer_free(w);
  return st;
}
static moe_status load_step(struct rig *r)
{
  moe_checkpoint *c;
  moe_status st = moe_checkpoint_open(&c, files_path("all.safetensors"));
  if (!st) st = moe_checkpoint_load_layer(c, r->q, r->layer, r->s.layer_io.params, "layer.", MOE_NAMES_LIBMOE, 0);
  if (!st) st = moe_checkpoint_load_adamw(c, r->q, r->opt, "adamw.", 0);
  moe_checkpoint_close(c);
  return st;
}

/* A save and a load, failing at each of their calls.  A save bears failures while it clears away what others left. */
static void checkpoints_of_models_end_clean(void **state)
{
  static moe_status (*const run[])(struct rig *) = { save_step, load_step };
  struct rig r;
  (void)state;
  fake_reset();
  clear();
  struct live before = live_now();
  OK(open_all(&r));
  OK(layer_forward_step(&r));
  OK(adamw_bind_step(&r));
  struct live warm = live_now();
  for (int i = 0; i < 2; i++)
    for (int on_host = 0; on_host < 2; on_host++) {
      long borne = 0;
      clear();
      OK(run[i](&r));
      long total = on_host ? host_calls : fake.calls;
      assert_true(total > 10);
      for (long n = 1; n <= total; n++) {
        arm(on_host, n);
        moe_status st = run[i](&r);
        if (st) assert_told(st, on_host, i ? "load" : "save", n);
        else borne++;
        assert_live(warm, i ? "load" : "save", n);
        clear();
        OK(load_step(&r)); /* what was saved is there, whatever failed */
      }
      assert_true(borne <= (i == 0 && on_host ? 3 : 0));
    }
  close_all(&r);
  assert_live(before, "checkpoints", 0);
}

/* ---- the tape, lent memory, OpenCL ------------------------------------------------------------------------------- */
/* A cold tape, so that its lists and blocks are what fails. */
static void a_cold_tape_fails_and_recovers(void **state)
{
  struct rig r;
  (void)state;
  fake_reset();
  clear();
  OK(open_all(&r));
  OK(layer_forward_step(&r));
  struct live before = live_now();
  for (int on_host = 0; on_host < 2; on_host++)
    for (long n = 1, failed = 1; failed; n++) {
      moe_tape *warm = r.tape;
      moe_tape_desc desc = moe_tape_desc_init();
      desc.block = 1 << 14;
      OK(moe_tape_create(&r.tape, r.q, &desc));
      arm(on_host, n);
      moe_status st = tape_step(&r);
      failed = st != MOE_OK;
      if (failed) assert_told(st, on_host, "a cold tape", n);
      clear();
      OK(tape_step(&r));
      moe_tape_free(r.tape);
      r.tape = warm;
      assert_live(before, "a cold tape", n);
    }
  close_all(&r);
}

/* ---- the caller's allocator -------------------------------------------------------------------------------------- */
static long lent;
static void *lend(void *user, uint64_t bytes)
{
  void *handle = NULL;
  moe_context *ctx = *(moe_context **)user;
  if (ctx->be->alloc(ctx->dev, bytes, &handle)) return NULL;
  lent++;
  return handle;
}
static void take_back(void *user, void *handle)
{
  moe_context *ctx = *(moe_context **)user;
  lent--;
  ctx->be->release(ctx->dev, handle);
}

static void the_callers_allocator_serves_all_device_memory(void **state)
{
  moe_context *ctx = NULL;
  moe_queue *q = NULL;
  moe_tape *tape;
  moe_span span;
  (void)state;
  fake_reset();
  fake.desc.alloc = lend;
  fake.desc.release = take_back;
  fake.desc.user = &ctx;
  ctx = fake_open();
  assert_non_null(ctx);
  arm(0, 2); /* after the queue's opening: its memory */
  FAILS(MOE_ERR_NO_MEMORY, "moe_queue_create: the caller's alloc gave none", moe_queue_create(&q, ctx));
  assert_null(q);
  assert_true(lent == 0 && fake.blocks == 0 && fake.queues == 0);
  clear();
  OK(moe_queue_create(&q, ctx));
  OK(moe_span_alloc(&span, ctx, 100));
  OK(moe_tape_create(&tape, q, NULL));
  struct small s;
  small_options(&s, MOE_F32);
  OK(small_memory(&s, ctx, q));
  moe_value x = moe_tape_leaf(tape, &s.io.x, 1);
  OK(moe_tape_backward(tape, moe_tape_sum(tape, x), (moe_value){ 0 }, 0));
  assert_int_equal(lent, fake.blocks);
  assert_int_equal(lent, 4); /* health word, span, the small memory, one block of the tape */
  moe_tape_free(tape);
  small_free(&s);
  moe_span_free(ctx, &span);
  assert_null(span.handle);
  moe_span_free(ctx, &span); /* again: nothing */
  moe_queue_free(q);
  assert_true(lent == 0 && fake.blocks == 0);
  moe_context_free(ctx);
  fake_reset();
}

/* ---- OpenCL ------------------------------------------------------------------------------------------------------ */
#if MOE_HAVE_OPENCL
static long opencl_live(void)
{
#ifdef MOE_DEBUG
  return moe__cl_live();
#else
  return 0;
#endif
}

static moe_status opencl_life(void)
{
  struct small s;
  moe_context_desc desc = moe_context_desc_init();
  moe_context *ctx = NULL;
  moe_queue *q = NULL;
  moe_router *router = NULL;
  desc.device = "opencl:cpu";
  small_options(&s, MOE_F32);
  moe_status st = moe_context_create(&ctx, &desc);
  if (!st) st = moe_queue_create(&q, ctx);
  if (!st) st = small_memory(&s, ctx, q);
  if (!st) st = moe_router_create(&router, ctx, &s.router_desc);
  if (!st) st = moe_router_select(router, q, &s.ids, NULL, &s.io.logits, NULL);
  if (!st) st = moe_queue_wait(q);
  host_calls_made = host_calls;
  moe_router_free(router);
  if (s.memory.handle) small_free(&s);
  moe_queue_free(q);
  moe_context_free(ctx);
  return st;
}

static void opencl_lives_end_clean(void **state)
{
  (void)state;
  clear();
  if (opencl_life() == MOE_ERR_NO_DEVICE) skip();
  clear();
  long host = host_live, objects = opencl_live();
  OK(opencl_life());
  for (long n = 1, total = host_calls_made; n <= total; n++) {
    arm(1, n);
    assert_int_equal(opencl_life(), MOE_ERR_NO_MEMORY);
    assert_int_equal(host_live, host);
    assert_int_equal(opencl_live(), objects);
  }
  clear();
}
#else
static void opencl_lives_end_clean(void **state)
{
  (void)state;
  skip();
}
#endif

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_life_ends_clean),
    cmocka_unit_test(every_step_can_be_repeated),
    cmocka_unit_test(checkpoints_of_models_end_clean),
    cmocka_unit_test(a_cold_tape_fails_and_recovers),
    cmocka_unit_test(the_callers_allocator_serves_all_device_memory),
    cmocka_unit_test(opencl_lives_end_clean),
  };
  return cmocka_run_group_tests(tests, files_open, files_close) ? 1 : 0;
}
