/* t_faults.c - every function that can fail does so at each thing that it asks for: each allocation on the host, each call
   into the device's backend, each call into the system, each call into an OpenCL driver fails once in turn.  A status of
   the right kind with its text, nothing lost, nothing half done, and the same objects work when asked again.

   One line of a table for each exported function; the last test compares them with tests/abi/moe.syms, so that a new
   function is here or the test fails. */
#include "faults.h"
#include "files.h"

#include "config.h"
#include "core/backend.h"
#include "core/dlpack.h"
#include "core/tape.h"
#include "fake.h"
#include "small.h"
#if MOE_HAVE_OPENCL
#include "opencl/loader.h"
#endif

#include <moe/cuda.h>
#include <moe/dlpack.h>
#include <moe/opencl.h>

#include <jansson.h>
#include <math.h>

#define SHAPE(...)                                                                                                     \
  (const int64_t[])                                                                                                    \
  {                                                                                                                    \
    __VA_ARGS__                                                                                                        \
  }

/* ---- the OpenCL driver --------------------------------------------------------------------------------------------- */
static int bent; /* what a driver does with files is its own */
#if MOE_HAVE_OPENCL
/* The driver, of which each function may fail. */
#define DRIVER_CALLS(X)                                                                                                \
  X(clGetPlatformIDs, (cl_uint n, cl_platform_id * ids, cl_uint * count), (n, ids, count))                             \
  X(clGetDeviceIDs, (cl_platform_id p, cl_device_type type, cl_uint n, cl_device_id * ids, cl_uint * count),           \
    (p, type, n, ids, count))                                                                                          \
  X(clGetPlatformInfo, (cl_platform_id of, cl_platform_info what, size_t n, void *to, size_t *is),                     \
    (of, what, n, to, is))                                                                                             \
  X(clGetDeviceInfo, (cl_device_id of, cl_device_info what, size_t n, void *to, size_t *is), (of, what, n, to, is))    \
  X(clGetContextInfo, (cl_context of, cl_context_info what, size_t n, void *to, size_t *is), (of, what, n, to, is))    \
  X(clGetCommandQueueInfo, (cl_command_queue of, cl_command_queue_info what, size_t n, void *to, size_t *is),          \
    (of, what, n, to, is))                                                                                             \
  X(clGetMemObjectInfo, (cl_mem of, cl_mem_info what, size_t n, void *to, size_t *is), (of, what, n, to, is))          \
  X(clGetProgramInfo, (cl_program of, cl_program_info what, size_t n, void *to, size_t *is), (of, what, n, to, is))    \
  X(clRetainDevice, (cl_device_id it), (it))                                                                           \
  X(clRetainContext, (cl_context it), (it))                                                                            \
  X(clRetainCommandQueue, (cl_command_queue it), (it))                                                                 \
  X(clRetainMemObject, (cl_mem it), (it))                                                                              \
  X(clBuildProgram,                                                                                                    \
    (cl_program it, cl_uint n, const cl_device_id *on, const char *options,                                            \
     void(CL_CALLBACK * told)(cl_program, void *), void *user),                                                        \
    (it, n, on, options, told, user))                                                                                  \
  X(clSetKernelArg, (cl_kernel of, cl_uint i, size_t n, const void *value), (of, i, n, value))                         \
  X(clEnqueueNDRangeKernel,                                                                                            \
    (cl_command_queue q, cl_kernel k, cl_uint rank, const size_t *from, const size_t *all, const size_t *group,        \
     cl_uint n, const cl_event *after, cl_event *event),                                                               \
    (q, k, rank, from, all, group, n, after, event))                                                                   \
  X(clEnqueueWriteBuffer,                                                                                              \
    (cl_command_queue q, cl_mem to, cl_bool block, size_t at, size_t bytes, const void *from, cl_uint n,               \
     const cl_event *after, cl_event *event),                                                                          \
    (q, to, block, at, bytes, from, n, after, event))                                                                  \
  X(clEnqueueReadBuffer,                                                                                               \
    (cl_command_queue q, cl_mem from, cl_bool block, size_t at, size_t bytes, void *to, cl_uint n,                     \
     const cl_event *after, cl_event *event),                                                                          \
    (q, from, block, at, bytes, to, n, after, event))                                                                  \
  X(clEnqueueCopyBuffer,                                                                                               \
    (cl_command_queue q, cl_mem from, cl_mem to, size_t from_at, size_t to_at, size_t bytes, cl_uint n,                \
     const cl_event *after, cl_event *event),                                                                          \
    (q, from, to, from_at, to_at, bytes, n, after, event))                                                             \
  X(clEnqueueFillBuffer,                                                                                               \
    (cl_command_queue q, cl_mem to, const void *with, size_t size, size_t at, size_t bytes, cl_uint n,                 \
     const cl_event *after, cl_event *event),                                                                          \
    (q, to, with, size, at, bytes, n, after, event))                                                                   \
  X(clFlush, (cl_command_queue q), (q))                                                                                \
  X(clFinish, (cl_command_queue q), (q))
#define DRIVER_MAKES(X)                                                                                                \
  X(cl_context, clCreateContext,                                                                                       \
    (const cl_context_properties *with, cl_uint n, const cl_device_id *on,                                             \
     void(CL_CALLBACK * say)(const char *, const void *, size_t, void *), void *user, cl_int *code),                   \
    (with, n, on, say, user, code))                                                                                    \
  X(cl_command_queue, clCreateCommandQueue,                                                                            \
    (cl_context in, cl_device_id on, cl_command_queue_properties with, cl_int * code), (in, on, with, code))           \
  X(cl_mem, clCreateBuffer, (cl_context in, cl_mem_flags with, size_t bytes, void *from, cl_int *code),                \
    (in, with, bytes, from, code))                                                                                     \
  X(cl_program, clCreateProgramWithSource,                                                                             \
    (cl_context in, cl_uint n, const char **text, const size_t *sizes, cl_int *code), (in, n, text, sizes, code))      \
  X(cl_program, clCreateProgramWithBinary,                                                                             \
    (cl_context in, cl_uint n, const cl_device_id *on, const size_t *sizes, const unsigned char **binaries,            \
     cl_int *each, cl_int *code),                                                                                      \
    (in, n, on, sizes, binaries, each, code))                                                                          \
  X(cl_kernel, clCreateKernel, (cl_program of, const char *name, cl_int *code), (of, name, code))

static struct moe__cl driver;
static int driver_fails(const char *name)
{
  if (!armed || fault != OTHER || ++calls != fault_at) return 0;
  hit = name;
  return 1;
}
#define X(f, parameters, arguments)                                                                                    \
  static cl_int CL_API_CALL bent_##f parameters                                                                        \
  {                                                                                                                    \
    return driver_fails(#f) ? CL_OUT_OF_RESOURCES : driver.f arguments;                                                \
  }
DRIVER_CALLS(X)
#undef X
#define X(type, f, parameters, arguments)                                                                              \
  static type CL_API_CALL bent_##f parameters                                                                          \
  {                                                                                                                    \
    if (!driver_fails(#f)) return driver.f arguments;                                                                  \
    if (code) *code = CL_OUT_OF_RESOURCES;                                                                             \
    return NULL;                                                                                                       \
  }
DRIVER_MAKES(X)
#undef X

static void bend(void)
{
  bent = 1;
  driver = moe__cl;
#define X(f, parameters, arguments) moe__cl.f = bent_##f;
  DRIVER_CALLS(X)
#undef X
#define X(type, f, parameters, arguments) moe__cl.f = bent_##f;
  DRIVER_MAKES(X)
#undef X
}
static void unbend(void)
{
  bent = 0;
  moe__cl = driver;
}
static long driver_live(void)
{
#ifdef MOE_DEBUG
  return moe__cl_live();
#else
  return 0;
#endif
}
#else
static void bend(void)
{
}
static void unbend(void)
{
}
static long driver_live(void)
{
  return 0;
}
#endif

/* ---- what is alive ------------------------------------------------------------------------------------------------- */
struct live {
  long host, maps, descriptors, files, devices, queues, blocks, bytes, driver;
};
static struct live live_now(void)
{
  return (struct live){ host_live,          maps_live,    bent ? 0 : descriptors(),
                        files_count("", 0), fake.devices, fake.queues,
                        fake.blocks,        fake.bytes,   driver_live() };
}
static void assert_live(struct live want, const char *what, const char *sort, long n)
{
  struct live now = live_now();
  if (hit && !strcmp(hit, "unlink")) now.files = want.files; /* for the next writer to remove */
  if (memcmp(&now, &want, sizeof now))
    fail_msg(
        "%s, %s failure %ld (%s): %+ld host allocations, %+ld mappings, %+ld descriptors, %+ld files, %+ld devices, "
        "%+ld queues, %+ld blocks, %+ld bytes, %+ld objects of the driver are left",
        what, sort, n, hit ? hit : "-", now.host - want.host, now.maps - want.maps, now.descriptors - want.descriptors,
        now.files - want.files, now.devices - want.devices, now.queues - want.queues, now.blocks - want.blocks,
        now.bytes - want.bytes, now.driver - want.driver);
}

/* ---- the next fault ------------------------------------------------------------------------------------------------ */
enum sort { HOST, DEVICE, SYSTEM, DRIVER, SORTS };
static const char *const sort_names[SORTS] = { "host", "device", "system", "driver" };
static enum sort next_sort;
static long next_at; /* 0: none */

/* Around the call under test, and nothing else. */
static void begin(void)
{
  static const enum fault faults[SORTS] = { MEMORY, NONE, FAIL, OTHER };
  moe__clear_error();
  fake_clear();
  if (next_sort == DEVICE) fake.fail_at = next_at;
  arm(faults[next_sort], next_sort == DEVICE ? 0 : next_at);
}
static void end(void)
{
  disarm();
  fake.fail_at = 0;
}
/* A failure, told again after other calls. */
struct failure {
  moe_status status;
  char text[1024];
};
static struct failure keep_failure(moe_status st)
{
  struct failure f = { st, "" };
  snprintf(f.text, sizeof f.text, "%s", moe_last_error());
  return f;
}
static moe_status failure(const struct failure *f)
{
  return f->status ? moe__fail(f->status, "%s", f->text) : MOE_OK;
}
static int was_met(void)
{
  return next_at && (next_sort == DEVICE ? fake.failed != MOE_OK : hit != NULL);
}

/* ---- objects --------------------------------------------------------------------------------------------------------- */
enum { ROWS = 10 };

/* What calls write: as it was after a failure. */
struct outs {
  uint64_t bytes, bits;
  moe_adamw_info adamw;
  moe_state state;
  moe_layer_state layer_state;
  moe_layer_metrics metrics;
  moe_tape_health_info health;
  moe_gradcheck_result check;
  int32_t load[SMALL_E];
  double read[64];
  unsigned char host[64];
};

struct rig {
  struct small s;
  moe_context *ctx, *cuda, *opencl; /* the last two: the fake under these names */
  struct moe__backend named[2];
  moe_queue *q, *cuda_q, *opencl_q;
  moe_router *router;
  moe_experts *experts;
  moe_layer *layer, *plain; /* plain: nothing but what Qwen3's names have */
  moe_adamw *opt;
  moe_adamw_desc adamw_desc;
  moe_layer_desc plain_desc;
  moe_tape_desc tape_desc, watching; /* small blocks; every gradient and result looked at, too */
  moe_gradcheck_desc check_desc[2];  /* of first and second derivatives */
  moe_selection_options selection;
  moe_span state, plain_params; /* of opt, of plain */
  moe_tensor weights, counts;   /* the router's [T,K]; [1,E] */
  moe_tensor y, row, table, cube, targets, mask, step;
  moe_tensor matrices[2], exact; /* exact: F64 */
  moe_checkpoint_item items[2];
  moe_checkpoint *file, *some, *bits; /* of layer and opt; of items; of plain, in F8 */
  moe_tape_moe moe, free_moe;         /* the layer on the tape: with the caller's gradients; without */
  moe_tape *tape;                     /* a layer's result is on it */
  moe_value on_tape;
  struct outs out;
};

static void close_rig(struct rig *r)
{
  moe_checkpoint_close(r->file);
  moe_checkpoint_close(r->some);
  moe_checkpoint_close(r->bits);
  moe_tape_free(r->tape);
  moe_adamw_free(r->opt);
  moe_layer_free(r->layer);
  moe_layer_free(r->plain);
  moe_experts_free(r->experts);
  moe_router_free(r->router);
  small_free(&r->s);
  moe_queue_free(r->q);
  moe_queue_free(r->cuda_q);
  moe_queue_free(r->opencl_q);
  moe_context_free(r->ctx);
  moe_context_free(r->cuda);
  moe_context_free(r->opencl);
}

static moe_checkpoint_writer *writer_of(const char *name, uint64_t shard_bytes)
{
  moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
  moe_checkpoint_writer *w;
  desc.shard_bytes = shard_bytes;
  OK(moe_checkpoint_writer_create(&w, files_path(name), &desc));
  return w;
}
static void commit(moe_checkpoint_writer *w)
{
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
}

static void add_values(moe_checkpoint_writer *w)
{
  static const float values[12] = { 1, 2, 3 };
  static const double one = 1;
  static const unsigned char odd[3] = { 1, 2, 3 };
  OK(moe_checkpoint_writer_metadata(w, "what", "some values"));
  OK(moe_checkpoint_writer_add(w, "values", MOE_F32, 2, SHAPE(4, 3), values));
  OK(moe_checkpoint_writer_add(w, "one", MOE_F64, 1, SHAPE(1), &one));
  OK(moe_checkpoint_writer_add(w, "odd", MOE_U8, 1, SHAPE(3), odd));
}

/* plain under Qwen3's names, matrices in F8_E4M3. */
static void write_bits(const struct rig *r)
{
  static const char *const names[] = { "gate_proj", "up_proj", "down_proj" };
  static const unsigned char values[SMALL_D * SMALL_F];
  static const float scale = 1;
  const int64_t F = r->plain_desc.d_ff, D = SMALL_D;
  moe_checkpoint_writer *w = writer_of("bits.safetensors", 0);
  OK(moe_checkpoint_writer_add(w, "mlp.gate.weight", MOE_BF16, 2, SHAPE(SMALL_E, D), values));
  for (int e = 0; e < SMALL_E; e++)
    for (int i = 0; i < 3; i++) {
      char name[80];
      snprintf(name, sizeof name, "mlp.experts.%d.%s.weight", e, names[i]);
      OK(moe_checkpoint_writer_add(w, name, MOE_F8E4M3, 2, SHAPE(i < 2 ? F : D, i < 2 ? D : F), values));
      strcat(name, "_scale_inv");
      OK(moe_checkpoint_writer_add(w, name, MOE_F32, 2, SHAPE(1, 1), &scale));
    }
  commit(w);
}

static void write_files(struct rig *r)
{
  moe_checkpoint_writer *w = writer_of("all.safetensors", 0);
  OK(moe_checkpoint_save_layer(w, r->q, r->layer, r->s.layer_io.params, "layer.", MOE_NAMES_LIBMOE));
  OK(moe_checkpoint_save_adamw(w, r->q, r->opt, "adamw."));
  commit(w);
  w = writer_of("some.safetensors", 0);
  add_values(w);
  commit(w);
  w = writer_of("model.safetensors.index.json", 40);
  add_values(w);
  commit(w);
  write_bits(r);
  OK(moe_raw_save(files_path("raw"), r->q, r->matrices, 2));
  OK(moe_checkpoint_open(&r->file, files_path("all.safetensors")));
  OK(moe_checkpoint_open(&r->some, files_path("some.safetensors")));
  OK(moe_checkpoint_open(&r->bits, files_path("bits.safetensors")));
}

/* The fake under the name of a backend that lends and gives queues. */
static moe_context *named(struct moe__backend *be, const char *name)
{
  moe_context *ctx = fake_open();
  *be = *ctx->be;
  be->name = name;
  ctx->be = be;
  return ctx;
}

static void open_rig(struct rig *r, moe_context *ctx)
{
  memset(r, 0, sizeof *r);
  small_options(&r->s, MOE_BF16);
  r->s.selection.softmax_bias = r->s.layer_desc.correction_bias = 1;
  r->ctx = ctx;
  r->cuda = named(&r->named[0], "cuda");
  r->opencl = named(&r->named[1], "opencl");
  OK(moe_queue_create(&r->q, r->ctx));
  OK(moe_queue_from_cuda(&r->cuda_q, r->cuda, NULL));
  OK(moe_queue_from_opencl(&r->opencl_q, r->opencl, (struct _cl_command_queue *)r));
  OK(small_memory(&r->s, r->ctx, r->q));
  OK(moe_span_fill(r->q, r->s.memory, 0));
  struct moe__arena *a = &r->s.arena;
  r->state = (moe_span){ 0 };
  r->weights = moe__arena_matrix(a, MOE_F32, SMALL_T, SMALL_K);
  r->y = moe__arena_matrix(a, MOE_BF16, SMALL_T, SMALL_D);
  r->row = moe__arena_flat(a, MOE_BF16, SMALL_D);
  r->table = moe__arena_matrix(a, MOE_BF16, ROWS, SMALL_D);
  r->cube = moe__arena_tensor(a, MOE_BF16, 3, SHAPE(2, SMALL_T, SMALL_D));
  r->targets = moe__arena_flat(a, MOE_I32, SMALL_T);
  r->mask = moe__arena_matrix(a, MOE_U8, SMALL_T, SMALL_D);
  r->step = moe__arena_flat(a, MOE_I64, 1);
  r->matrices[0] = moe__arena_matrix(a, MOE_F32, 3, 4);
  r->matrices[1] = moe__swapped(moe__arena_matrix(a, MOE_F32, 2, 5), 0, 1);
  r->exact = moe__arena_flat(a, MOE_F64, 2);
  r->items[0] = (moe_checkpoint_item){ "values", moe__swapped(moe__arena_matrix(a, MOE_BF16, 3, 4), 0, 1) };
  r->items[1] = (moe_checkpoint_item){ "odd", moe__arena_flat(a, MOE_U8, 3) };
  moe_tensor params = moe__arena_flat(a, MOE_U8, 1 << 14), state = moe__arena_flat(a, MOE_U8, 1 << 15);
  r->plain_params = (moe_span){ params.handle, params.offset, 1 << 14 };
  r->state = (moe_span){ state.handle, state.offset, 1 << 15 };
  OK(moe__arena_check(a, "open_rig", "memory"));

  OK(moe_router_create(&r->router, r->ctx, &r->s.router_desc));
  OK(moe_experts_create(&r->experts, r->ctx, &r->s.experts_desc));
  OK(moe_layer_create(&r->layer, r->ctx, &r->s.layer_desc));
  r->plain_desc = r->s.layer_desc;
  r->selection = r->s.selection;
  r->selection.softmax_bias = 0;
  r->plain_desc.selection = &r->selection;
  r->plain_desc.router_bias = r->plain_desc.hidden_bias = r->plain_desc.down_bias = r->plain_desc.correction_bias = 0;
  r->plain_desc.d_shared = r->plain_desc.shared_gate = 0;
  OK(moe_layer_create(&r->plain, r->ctx, &r->plain_desc));
  r->adamw_desc = moe_adamw_desc_init();
  r->adamw_desc.dtype = MOE_F32;
  r->adamw_desc.peak = 1e-3;
  OK(moe_adamw_create(&r->opt, r->ctx, &r->adamw_desc));
  OK(moe_adamw_add(r->opt, &r->s.io.x, &r->s.grads.dx, 0.1, 1));
  OK(moe_adamw_bind(r->opt, r->q, r->state));

  OK(moe_experts_forward(r->experts, r->q, &r->s.io, &r->s.state));
  OK(moe_layer_init(r->layer, r->q, r->s.layer_io.params, 1, 0.02));
  OK(moe_layer_forward(r->layer, r->q, &r->s.layer_io, &r->s.layer_state));
  OK(moe_layer_counts(&r->counts, &r->s.layer_state));
  r->moe = r->free_moe = moe_tape_moe_init();
  r->moe.params = r->free_moe.params = r->s.layer_io.params;
  r->moe.grads = r->s.layer_io.grads;
  r->moe.mask = r->s.layer_io.mask;
  r->free_moe.differentiate = 1;
  r->tape_desc = moe_tape_desc_init();
  r->tape_desc.block = 1 << 12;
  r->watching = r->tape_desc;
  r->watching.health_policy = MOE_HEALTH_POLICY_FAIL;
  r->watching.health_activations = 1;
  for (int i = 0; i < 2; i++) {
    r->check_desc[i] = moe_gradcheck_desc_init();
    r->check_desc[i].second = i;
    r->check_desc[i].threshold = INFINITY; /* where no kernel runs all numbers are wrong */
  }
  OK(moe_tape_create(&r->tape, r->q, NULL));
  r->on_tape = moe_tape_moe_layer(r->tape, r->layer, moe_tape_leaf(r->tape, &r->s.io.x, 1), &r->moe, NULL);
  write_files(r);

  r->out.adamw = moe_adamw_info_init();
  r->out.state = moe_state_init();
  r->out.layer_state = moe_layer_state_init();
  r->out.metrics = moe_layer_metrics_init();
  r->out.health = moe_tape_health_info_init();
  r->out.check = moe_gradcheck_result_init();
}

/* ---- the sweep ------------------------------------------------------------------------------------------------------- */
struct values;
enum { ALL = 1 << 30 };
struct row {
  const char *name;
  moe_status (*run)(struct rig *, const struct row *);
  moe_value (*op)(moe_tape *, struct rig *, const struct values *); /* of an operation on the tape */
  int bears;         /* up to so many faults of one sort change nothing: what fails has nobody to tell, or need not */
  const char *never; /* why there is nothing in it that could fail */
  int alone;         /* 1: nothing outlives it that could be asked again */
};

static void assert_told(moe_status st, enum sort sort, const char *what, long n)
{
  static const char *const text[SORTS] = { "host memory", "was told to fail", "Input/output error", "" };
  const int right[SORTS] = { st == MOE_ERR_NO_MEMORY, st == fake.failed, st == MOE_ERR_IO, 1 };
  if (sort == DRIVER && strncmp(hit, "clGet", 5) != 0 && !strstr(moe_last_error(), "CL_OUT_OF_RESOURCES"))
    fail_msg("%s, driver failure %ld (%s): no reason in \"%s\"", what, n, hit, moe_last_error());
  if (!right[sort] || !*moe_last_error() || !strstr(moe_last_error(), text[sort]))
    fail_msg("%s, %s failure %ld (%s): \"%s\" (%s)", what, sort_names[sort], n, hit ? hit : "-", moe_strerror(st),
             moe_last_error());
}

/* What may go on where this call fails: a look at what others left, and its removal; a fact that a driver does not tell,
   which is then 0, or ""; a platform that does not tell its devices, where another does. */
static int tidies(void)
{
  static const char *const names[] = { "unlink",          "opendir",           "lstat",         "flock",
                                       "clGetDeviceInfo", "clGetPlatformInfo", "clGetDeviceIDs" };
  for (size_t i = 0; hit && i < sizeof names / sizeof *names; i++)
    if (!strcmp(hit, names[i])) return 1;
  return 0;
}

static void sweep(struct rig *r, const struct row *row, moe_status (*run)(struct rig *, const struct row *),
                  const char *how)
{
  const struct outs before = r->out;
  long faults = 0;
  char what[160];
  snprintf(what, sizeof what, "%s%s", row->name, how);
  parses = !strcmp(row->name, "moe_checkpoint_open");
  next_at = 0;
  OK(run(r, row)); /* what is made once, is made */
  r->out = before;
  const struct live live = live_now();
  for (int sort = 0; sort < SORTS; sort++) {
    long borne = 0;
    for (long n = 1;; n++) {
      next_sort = sort;
      next_at = n;
      moe_status st = run(r, row);
      const int met = was_met();
      if (met && st) assert_told(st, sort, what, n);
      if (!met && st) fail_msg("%s, without a fault: \"%s\" (%s)", what, moe_strerror(st), moe_last_error());
      if (st && memcmp(&before, &r->out, sizeof before))
        fail_msg("%s, %s failure %ld (%s): what it writes has changed", what, sort_names[sort], n, hit ? hit : "-");
      r->out = before;
      assert_live(live, what, sort_names[sort], n);
      if (!met) break;
      faults++;
      borne += !st && !tidies();
      if (row->alone) continue;
      next_at = 0;
      st = run(r, row);
      if (st)
        fail_msg("%s, again after %s failure %ld (%s): \"%s\" (%s)", what, sort_names[sort], n, hit ? hit : "-",
                 moe_strerror(st), moe_last_error());
      r->out = before;
      assert_live(live, what, sort_names[sort], n);
    }
    if (borne > row->bears) fail_msg("%s: %ld %s faults went unseen", what, borne, sort_names[sort]);
  }
  if (row->never && faults) fail_msg("%s: it has %ld things that can fail", what, faults);
  if (!row->never && row->bears != ALL && !faults) fail_msg("%s: nothing in it can fail", what);
}

/* ---- calls that enqueue, read and write ------------------------------------------------------------------------------ */
#define CALLS(X)                                                                                                       \
  X(moe_adamw_measure, (&r->out.bytes, r->opt))                                                                        \
  X(moe_adamw_bind, (r->opt, r->q, r->state))                                                                          \
  X(moe_adamw_step, (r->opt, r->q))                                                                                    \
  X(moe_adamw_read, (&r->out.adamw, r->opt, r->q))                                                                     \
  X(moe_checkpoint_load, (r->some, r->q, r->items, 2, FLAGS))                                                          \
  X(moe_checkpoint_load_adamw, (r->file, r->q, r->opt, "adamw.", 0))                                                   \
  X(moe_checkpoint_load_layer, (r->file, r->q, r->layer, PARAMS, "layer.", MOE_NAMES_LIBMOE, 0))                       \
  X(moe_experts_forward, (r->experts, r->q, &r->s.io, &r->out.state))                                                  \
  X(moe_experts_forward_selected, (r->experts, r->q, &r->s.io, MOE_GRAD_INPUT, &r->out.state))                         \
  X(moe_experts_inference, (r->experts, r->q, &r->s.io))                                                               \
  X(moe_experts_backward, (r->experts, r->q, &r->s.state, &r->s.io, &r->s.grads))                                      \
  X(moe_experts_backward_selected, (r->experts, r->q, &r->s.state, &r->s.io, &r->s.grads, MOE_GRAD_INPUT))             \
  X(moe_health_read, (r->q, &r->out.bits))                                                                             \
  X(moe_layer_init, (r->layer, r->q, PARAMS, 1, 0.02))                                                                 \
  X(moe_layer_forward, (r->layer, r->q, &r->s.layer_io, &r->out.layer_state))                                          \
  X(moe_layer_inference, (r->layer, r->q, &r->s.layer_io))                                                             \
  X(moe_layer_backward, (r->layer, r->q, &r->s.layer_state, &r->s.layer_io))                                           \
  X(moe_layer_bias_step, (r->layer, r->q, PARAMS, &r->counts, 0.01))                                                   \
  X(moe_layer_metrics_read, (&r->out.metrics, r->out.load, r->layer, r->q, &r->s.layer_state))                         \
  X(moe_queue_wait, (r->q))                                                                                            \
  X(moe_router_select, (r->router, r->q, &r->s.ids, &r->weights, &r->s.io.logits, NULL))                               \
  X(moe_router_weights, (r->router, r->q, &r->weights, &r->s.io.logits, &r->s.ids))                                    \
  X(moe_router_weights_backward, (r->router, r->q, &r->s.grads.dlogits, &r->weights, &r->s.io.logits, &r->s.ids))      \
  X(moe_span_write, (r->q, r->state, r->out.host, 64))                                                                 \
  X(moe_span_read, (r->q, r->out.host, r->state, 64))                                                                  \
  X(moe_span_copy, (r->q, r->state, PARAMS, 64))                                                                       \
  X(moe_span_fill, (r->q, r->state, 7))                                                                                \
  X(moe_tensor_fill, (r->q, &r->y, 1))                                                                                 \
  X(moe_tensor_normal, (r->q, &r->y, 1, 2, 0.5))                                                                       \
  X(moe_tensor_read, (r->q, r->out.read, &r->y, 48))
#define PARAMS r->s.layer_io.params
#define FLAGS MOE_CHECKPOINT_CONVERT | MOE_CHECKPOINT_PARTIAL | MOE_CHECKPOINT_VERIFY

#define X(fn, args)                                                                                                    \
  static moe_status run_##fn(struct rig *r, const struct row *row)                                                     \
  {                                                                                                                    \
    (void)row;                                                                                                         \
    begin();                                                                                                           \
    moe_status st = fn args;                                                                                           \
    end();                                                                                                             \
    return st;                                                                                                         \
  }
CALLS(X)
#undef X

/* ---- objects: made, and freed ---------------------------------------------------------------------------------------- */
#define OBJECTS(X)                                                                                                     \
  X(moe_adamw, create, free, (&out, r->ctx, &r->adamw_desc), 0)                                                        \
  X(moe_checkpoint, open, close, (&out, files_path("all.safetensors")), 0)                                             \
  X(moe_checkpoint_writer, create, free, (&out, files_path("new.safetensors"), NULL), 4)                               \
  X(moe_experts, create, free, (&out, r->ctx, &r->s.experts_desc), 0)                                                  \
  X(moe_layer, create, free, (&out, r->ctx, &r->s.layer_desc), 0)                                                      \
  X(moe_queue, create, free, (&out, r->ctx), 0)                                                                        \
  X(moe_router, create, free, (&out, r->ctx, &r->s.router_desc), 0)                                                    \
  X(moe_tape, create, free, (&out, r->q, &r->watching), 0)

#define MAKES(name, type, make, drop, args)                                                                            \
  static moe_status name(struct rig *r, const struct row *row)                                                         \
  {                                                                                                                    \
    type *out = (type *)r; /* which it may not stay */                                                                 \
    (void)row;                                                                                                         \
    begin();                                                                                                           \
    moe_status st = make args;                                                                                         \
    end();                                                                                                             \
    assert_true(out != (type *)r && !out == (st != MOE_OK));                                                           \
    drop(out);                                                                                                         \
    return st;                                                                                                         \
  }
#define X(type, make, drop, args, bears)                                                                               \
  MAKES(run_##type##_##make, type, type##_##make, type##_##drop, args)                                                 \
  static moe_status run_##type##_##drop(struct rig *r, const struct row *row)                                          \
  {                                                                                                                    \
    type *out;                                                                                                         \
    (void)r;                                                                                                           \
    (void)row;                                                                                                         \
    OK(type##_##make args);                                                                                            \
    begin();                                                                                                           \
    type##_##drop(out);                                                                                                \
    end();                                                                                                             \
    return MOE_OK;                                                                                                     \
  }
OBJECTS(X)
#undef X
MAKES(open_shards, moe_checkpoint, moe_checkpoint_open, moe_checkpoint_close,
      (&out, files_path("model.safetensors.index.json")))
MAKES(open_folder, moe_checkpoint, moe_checkpoint_open, moe_checkpoint_close, (&out, files_folder))
MAKES(open_raw, moe_checkpoint, moe_raw_open, moe_checkpoint_close, (&out, files_path("raw")))
MAKES(lend_cuda, moe_queue, moe_queue_from_cuda, moe_queue_free, (&out, r->cuda, (struct CUstream_st *)r))
MAKES(lend_opencl, moe_queue, moe_queue_from_opencl, moe_queue_free, (&out, r->opencl, (struct _cl_command_queue *)r))

static moe_status free_context(struct rig *r, const struct row *row)
{
  moe_context *ctx = fake_open();
  (void)r;
  (void)row;
  begin();
  moe_context_free(ctx);
  end();
  return MOE_OK;
}

static moe_status alloc_span(struct rig *r, const struct row *row)
{
  moe_span span = r->state;
  (void)row;
  begin();
  moe_status st = moe_span_alloc(&span, r->ctx, 64);
  end();
  assert_true(span.handle != r->state.handle && !span.handle == (st != MOE_OK));
  moe_span_free(r->ctx, &span);
  return st;
}
static moe_status free_span(struct rig *r, const struct row *row)
{
  moe_span span;
  (void)row;
  OK(moe_span_alloc(&span, r->ctx, 64));
  begin();
  moe_span_free(r->ctx, &span);
  end();
  assert_null(span.handle);
  return MOE_OK;
}

/* The 17th parameter, at which the list grows. */
static moe_status add_parameter(struct rig *r, const struct row *row)
{
  moe_adamw *opt;
  uint64_t before, after;
  (void)row;
  OK(moe_adamw_create(&opt, r->ctx, &r->adamw_desc));
  for (int i = 0; i < 16; i++) OK(moe_adamw_add(opt, &r->s.io.x, &r->s.grads.dx, 0.1, 1));
  OK(moe_adamw_measure(&before, opt));
  begin();
  moe_status st = moe_adamw_add(opt, &r->s.io.x, &r->s.grads.dx, 0.1, 1);
  end();
  OK(moe_adamw_measure(&after, opt));
  assert_true(st ? after == before : after > before);
  moe_adamw_free(opt);
  return st;
}

/* An optimizer that could not be bound is not: what it was bound to before may be half of something else. */
static void a_failed_bind_leaves_the_optimizer_unbound(void **state)
{
  struct rig *r = *state;
  next_sort = DEVICE;
  for (long n = 1;; n++) {
    next_at = n;
    moe_status st = run_moe_adamw_bind(r, NULL);
    if (!st) break;
    FAILS(MOE_ERR_STATE, "before moe_adamw_bind", moe_adamw_step(r->opt, r->q));
  }
  OK(moe_adamw_step(r->opt, r->q));
}

/* ---- checkpoints ------------------------------------------------------------------------------------------------------- */
static moe_status load_bits(struct rig *r, const struct row *row)
{
  (void)row;
  begin();
  moe_status st = moe_checkpoint_load_layer(r->bits, r->q, r->plain, r->plain_params, "", MOE_NAMES_QWEN3, 0);
  end();
  return st;
}

/* A failure has spoilt the writer, or it has done nothing. */
#define WRITES(name, shard_bytes, call)                                                                                \
  static moe_status name(struct rig *r, const struct row *row)                                                         \
  {                                                                                                                    \
    moe_checkpoint_writer *w = writer_of("new.safetensors.index.json", shard_bytes);                                   \
    (void)row;                                                                                                         \
    (void)r;                                                                                                           \
    if (shard_bytes) add_values(w);                                                                                    \
    begin();                                                                                                           \
    moe_status st = call;                                                                                              \
    end();                                                                                                             \
    const struct failure met = keep_failure(st);                                                                       \
    moe_status again = st ? call : MOE_OK;                                                                             \
    assert_true(!again || again == MOE_ERR_STATE);                                                                     \
    moe_checkpoint_writer_free(w);                                                                                     \
    return failure(&met);                                                                                              \
  }
WRITES(add_first, 0, moe_checkpoint_writer_add(w, "a", MOE_F32, 1, SHAPE(3), r->out.host))
WRITES(add_next, 40, moe_checkpoint_writer_add(w, "a", MOE_F32, 1, SHAPE(16), r->out.host))
WRITES(add_tensor, 40, moe_checkpoint_writer_add_tensor(w, "a", r->q, &r->matrices[1]))
WRITES(add_metadata, 0, moe_checkpoint_writer_metadata(w, "key", "value"))
WRITES(save_layer, 0, moe_checkpoint_save_layer(w, r->q, r->layer, PARAMS, "layer.", MOE_NAMES_LIBMOE))
WRITES(save_named, 1 << 10, moe_checkpoint_save_layer(w, r->q, r->plain, r->plain_params, "a.", MOE_NAMES_QWEN3))
WRITES(save_adamw, 0, moe_checkpoint_save_adamw(w, r->q, r->opt, "adamw."))

/* Over a checkpoint that is there before and after. */
static moe_status commit_over(const char *name, uint64_t shard_bytes)
{
  moe_checkpoint_writer *w = writer_of(name, shard_bytes);
  moe_checkpoint *c;
  add_values(w);
  begin();
  moe_status st = moe_checkpoint_writer_commit(w);
  end();
  const struct failure met = keep_failure(st);
  FAILS(MOE_ERR_STATE, "can only be freed", moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path(name)));
  OK(moe_checkpoint_verify(c, NULL));
  assert_int_equal(moe_checkpoint_count(c), 3);
  moe_checkpoint_close(c);
  return failure(&met);
}
static moe_status commit_one(struct rig *r, const struct row *row)
{
  (void)r;
  (void)row;
  return commit_over("some.safetensors", 0);
}
static moe_status commit_shards(struct rig *r, const struct row *row)
{
  (void)r;
  (void)row;
  return commit_over("model.safetensors.index.json", 40);
}
static moe_status save_raw(struct rig *r, const struct row *row)
{
  moe_checkpoint *c;
  (void)row;
  begin();
  moe_status st = moe_raw_save(files_path("raw"), r->q, r->matrices, 2);
  end();
  OK(moe_raw_open(&c, files_path("raw")));
  moe_checkpoint_close(c);
  return st;
}

/* ---- DLPack ------------------------------------------------------------------------------------------------------------ */
/* A tensor of another library; every other column of its memory. */
struct foreign {
  struct DLManagedTensorVersioned versioned;
  struct DLManagedTensor unversioned;
  float host[12];
  int64_t shape[2], stride[2];
  int deleted;
};
static void delete_versioned(struct DLManagedTensorVersioned *self)
{
  ((struct foreign *)self->manager_ctx)->deleted++;
}
static void delete_unversioned(struct DLManagedTensor *self)
{
  ((struct foreign *)self->manager_ctx)->deleted++;
}
static void make_foreign(struct foreign *f, const moe_tensor *on_device)
{
  *f = (struct foreign){ .shape = { 3, 2 }, .stride = { 1, 4 } };
  const struct moe__dl_tensor t = { on_device ? on_device->handle : f->host,
                                    on_device ? FAKE_DL_TYPE : MOE__DL_CPU,
                                    0,
                                    2,
                                    MOE__DL_FLOAT,
                                    32,
                                    1,
                                    f->shape,
                                    f->stride,
                                    on_device ? on_device->offset : 0 };
  f->versioned = (struct DLManagedTensorVersioned){ 1, 0, f, delete_versioned, 0, t };
  f->unversioned = (struct DLManagedTensor){ t, f, delete_unversioned };
}

/* Whose tensor it is, is the caller's still where the import failed. */
static moe_status import(struct rig *r, const moe_tensor *on_device, int unversioned, int64_t rows)
{
  static moe_tensor zero;
  struct foreign f;
  moe_dlpack *holder = (moe_dlpack *)r;
  moe_tensor t = r->y;
  make_foreign(&f, on_device);
  f.shape[0] = rows;
  begin();
  moe_status st = unversioned ? moe_dlpack_import_unversioned(&holder, &t, r->q, &f.unversioned, MOE_DLPACK_COPY)
                              : moe_dlpack_import(&holder, &t, r->q, &f.versioned, MOE_DLPACK_COPY);
  end();
  assert_true(holder != (moe_dlpack *)r && !holder == (st != MOE_OK) && !f.deleted);
  if (st) assert_memory_equal(&t, &zero, sizeof t);
  moe_dlpack_free(holder);
  assert_true(f.deleted == !st);
  return st;
}
static moe_status import_copy(struct rig *r, const struct row *row)
{
  (void)row;
  return import(r, NULL, 0, 3);
}
static moe_status import_in_place(struct rig *r, const struct row *row)
{
  (void)row;
  return import(r, &r->matrices[0], 0, 3);
}
static moe_status import_empty(struct rig *r, const struct row *row)
{
  (void)row;
  return import(r, NULL, 0, 0);
}
static moe_status import_unversioned(struct rig *r, const struct row *row)
{
  (void)row;
  return import(r, NULL, 1, 3);
}

/* The holder of a copy, waited for and freed. */
static moe_status hold(struct rig *r, int freeing)
{
  struct foreign f;
  moe_dlpack *holder;
  moe_tensor t;
  moe_status st = MOE_OK;
  make_foreign(&f, NULL);
  OK(moe_dlpack_import(&holder, &t, r->q, &f.versioned, MOE_DLPACK_COPY));
  begin();
  if (freeing) moe_dlpack_free(holder);
  else st = moe_dlpack_wait(holder, r->q);
  end();
  if (!freeing) moe_dlpack_free(holder);
  assert_int_equal(f.deleted, 1);
  return st;
}
static moe_status wait_foreign(struct rig *r, const struct row *row)
{
  (void)row;
  return hold(r, 0);
}
static moe_status free_foreign(struct rig *r, const struct row *row)
{
  (void)row;
  return hold(r, 1);
}

static void count(void *user)
{
  ++*(int *)user;
}
static moe_status export(struct rig *r, const moe_tensor *t, int64_t flags)
{
  struct DLManagedTensorVersioned *out = (struct DLManagedTensorVersioned *)r;
  int released = 0;
  begin();
  moe_status st = moe_dlpack_export(&out, r->q, t, flags, count, &released);
  end();
  assert_true(out != (struct DLManagedTensorVersioned *)r && !out == (st != MOE_OK) && !released);
  if (out) out->deleter(out);
  assert_true(released == !st);
  return st;
}
static moe_status export_in_place(struct rig *r, const struct row *row)
{
  (void)row;
  return export(r, &r->y, 0);
}
static moe_status export_copy(struct rig *r, const struct row *row)
{
  (void)row;
  return export(r, &r->matrices[1], MOE_DLPACK_COPY);
}

/* ---- the tape ------------------------------------------------------------------------------------------------------------ */
enum { WRT = 5 };
struct values {
  union {
    struct {
      moe_value x, y, row, table, cube;
    };
    moe_value wrt[WRT];
  }; /* floats that need gradients */
  moe_value targets, mask, step;
};

/* What the caller's functions are called for, and what was released. */
static long given, released;
static void same_release(void *user)
{
  (void)user;
  released++;
}
static moe_status square(void *user, const moe_tape_call *call)
{
  (void)user;
  call->saved[0] = moe_tape_scale(call->tape, call->in[0], 2);
  call->out[0] = moe_tape_mul(call->tape, call->in[0], call->in[0]);
  return moe_tape_status(call->tape);
}
/* By a walk inside the walk. */
static moe_status square_backward(void *user, const moe_tape_call *call, const moe_value *dout, moe_value *din)
{
  moe_tape *t = call->tape;
  (void)user;
  const int64_t recording = moe_tape_set_recording(t, 1);
  moe_value y = moe_tape_mul(t, call->in[0], call->in[0]);
  moe_tape_set_recording(t, recording);
  return moe_tape_gradients(din, t, &y, dout, 1, call->in, 1, recording ? MOE_CREATE_GRAPH : 0);
}
static moe_value custom(moe_tape *t, struct rig *r, moe_value x)
{
  moe_function f = moe_function_init();
  (void)r;
  f.forward = square;
  f.backward = square_backward;
  f.release = same_release;
  f.n_out = f.n_saved = 1;
  given++;
  moe_status st = moe_tape_custom(&x, t, &f, &x, 1);
  assert_true(!st == (x.id != 0) && st == moe_tape_status(t));
  return x;
}
static moe_status segment(void *user, moe_tape *t, const moe_value *in, int64_t n_in, moe_value *out, int64_t n_out)
{
  struct rig *r = user;
  (void)n_in;
  (void)n_out;
  moe_value x = moe_tape_moe_layer(t, r->layer, in[0], &r->moe, NULL);
  x = moe_tape_mul(t, moe_tape_dropout(t, x, 0.5, 1, 2, in[1]), moe_tape_leaf(t, &r->row, 1));
  out[0] = custom(t, r, x);
  return moe_tape_status(t);
}
static moe_value recompute(moe_tape *t, struct rig *r, moe_value x, moe_value step)
{
  moe_value v[2] = { x, step };
  moe_status st = moe_tape_recompute(v, 1, t, segment, r, v, 2);
  assert_true(!st == (v[0].id != 0) && st == moe_tape_status(t));
  return v[0];
}

static moe_value entropy(moe_tape *t, moe_value logits, moe_value targets)
{
  moe_cross_entropy options = moe_cross_entropy_init();
  options.ignore = 1;
  options.smoothing = 0.1;
  return moe_tape_cross_entropy_options(t, logits, targets, &options);
}

/* A small model: one number. */
static moe_value model(moe_tape *t, struct rig *r, const struct values *v)
{
  moe_value x = recompute(t, r, moe_tape_embedding(t, v->table, v->targets), v->step);
  x = moe_tape_rms_norm(t, moe_tape_matmul(t, x, moe_tape_matmul(t, v->x, v->y, 1, 0), 0, 0), v->row, 1e-5);
  return moe_tape_add(t, entropy(t, x, v->targets), moe_tape_mean(t, moe_tape_cast(t, v->cube, MOE_F32)));
}

#define OPERATIONS(X)                                                                                                  \
  X(moe_tape_leaf, , (t, &r->y, 1))                                                                                    \
  X(moe_tape_param, , (t, &r->s.io.x, &r->s.grads.dx))                                                                 \
  X(moe_tape_empty, , (t, MOE_BF16, 2, SHAPE(2, 3)))                                                                   \
  X(moe_tape_detach, , (t, v->x))                                                                                      \
  X(moe_tape_add, , (t, v->x, v->row))                                                                                 \
  X(moe_tape_sub, , (t, v->row, v->x))                                                                                 \
  X(moe_tape_mul, , (t, v->x, v->row))                                                                                 \
  X(moe_tape_div, , (t, v->x, v->row))                                                                                 \
  X(moe_tape_maximum, , (t, v->x, v->row))                                                                             \
  X(moe_tape_where, , (t, v->mask, v->x, v->row))                                                                      \
  X(moe_tape_greater, , (t, v->x, v->row))                                                                             \
  X(moe_tape_broadcast, , (t, v->row, 3, SHAPE(2, SMALL_T, SMALL_D)))                                                  \
  X(moe_tape_neg, , (t, v->x))                                                                                         \
  X(moe_tape_scale, , (t, v->x, 3))                                                                                    \
  X(moe_tape_pow, , (t, v->x, 3))                                                                                      \
  X(moe_tape_exp, , (t, v->x))                                                                                         \
  X(moe_tape_log, , (t, v->x))                                                                                         \
  X(moe_tape_sqrt, , (t, v->x))                                                                                        \
  X(moe_tape_tanh, , (t, v->x))                                                                                        \
  X(moe_tape_sigmoid, , (t, v->x))                                                                                     \
  X(moe_tape_relu, , (t, v->x))                                                                                        \
  X(moe_tape_silu, , (t, v->x))                                                                                        \
  X(moe_tape_erf, , (t, v->x))                                                                                         \
  X(moe_tape_gelu, , (t, v->x))                                                                                        \
  X(moe_tape_gelu_tanh, , (t, v->x))                                                                                   \
  X(moe_tape_cast, , (t, v->x, MOE_F32))                                                                               \
  X(moe_tape_sum, , (t, v->x))                                                                                         \
  X(moe_tape_mean, , (t, v->x))                                                                                        \
  X(moe_tape_sum_axes, , (t, v->cube, 2, SHAPE(0, 2), 0))                                                              \
  X(moe_tape_mean_axes, , (t, v->cube, 1, SHAPE(1), 1))                                                                \
  X(moe_tape_max_axes, , (t, v->cube, 1, SHAPE(1), 0))                                                                 \
  X(moe_tape_reshape, , (t, v->x, 1, SHAPE(SMALL_T * SMALL_D)))                                                        \
  X(moe_tape_permute, , (t, v->cube, SHAPE(2, 0, 1)))                                                                  \
  X(moe_tape_slice, , (t, v->x, 0, 1, 3))                                                                              \
  X(moe_tape_concat, , (t, v->wrt, 2, 0))                                                                              \
  X(moe_tape_gather_rows, , (t, v->x, v->targets))                                                                     \
  X(moe_tape_scatter_rows, , (t, v->x, v->targets, ROWS))                                                              \
  X(moe_tape_embedding, , (t, v->table, v->targets))                                                                   \
  X(moe_tape_matmul, , (t, v->x, v->y, 0, 1))                                                                          \
  X(moe_tape_matmul, _batch, (t, v->cube, v->x, 1, 0))                                                                 \
  X(moe_tape_softmax, , (t, v->x, 1))                                                                                  \
  X(moe_tape_log_softmax, , (t, v->x, 1))                                                                              \
  X(moe_tape_rms_norm, , (t, v->x, v->row, 1e-5))                                                                      \
  X(moe_tape_layer_norm, , (t, v->x, v->row, v->row, 1e-5))                                                            \
  X(moe_tape_cross_entropy, , (t, v->x, v->targets))                                                                   \
  X(moe_tape_dropout, , (t, v->x, 0.5, 1, 2, v->step))                                                                 \
  X(moe_tape_moe_layer, , (t, r->layer, v->x, &r->moe, NULL))                                                          \
  X(moe_tape_moe_layer, _free, (t, r->layer, v->x, &r->free_moe, NULL))

#define X(fn, variant, args)                                                                                           \
  static moe_value op_##fn##variant(moe_tape *t, struct rig *r, const struct values *v)                                \
  {                                                                                                                    \
    (void)r;                                                                                                           \
    (void)v;                                                                                                           \
    return fn args;                                                                                                    \
  }
OPERATIONS(X)
#undef X
static moe_value op_options(moe_tape *t, struct rig *r, const struct values *v)
{
  (void)r;
  return entropy(t, v->x, v->targets);
}
static moe_value op_custom(moe_tape *t, struct rig *r, const struct values *v)
{
  return custom(t, r, v->x);
}
static moe_value op_recompute(moe_tape *t, struct rig *r, const struct values *v)
{
  return recompute(t, r, v->x, v->step);
}

/* The values that operations take; x a parameter where gradients are written. */
static struct values inputs(moe_tape *t, struct rig *r, int param)
{
  struct values v;
  v.x = param ? moe_tape_param(t, &r->s.io.x, &r->s.grads.dx) : moe_tape_leaf(t, &r->s.io.x, 1);
  v.y = moe_tape_leaf(t, &r->y, 1);
  v.row = moe_tape_leaf(t, &r->row, 1);
  v.table = moe_tape_leaf(t, &r->table, 1);
  v.cube = moe_tape_leaf(t, &r->cube, 1);
  v.targets = moe_tape_leaf(t, &r->targets, 0);
  v.mask = moe_tape_leaf(t, &r->mask, 0);
  v.step = moe_tape_leaf(t, &r->step, 0);
  OK(moe_tape_status(t));
  return v;
}
/* The next value wants a new page. */
static void fill_page(moe_tape *t, struct rig *r)
{
  while (t->n_values % MOE__PAGE) (void)moe_tape_leaf(t, &r->targets, 0);
  OK(moe_tape_status(t));
}
static moe_tape *new_tape(struct rig *r, int watching)
{
  moe_tape *t;
  OK(moe_tape_create(&t, r->q, watching ? &r->watching : &r->tape_desc));
  return t;
}

/* How a tape is used: what is made before the call under test, and the call. */
enum { FORWARD, BACKWARD, SECOND, HVP };
static moe_status use(moe_tape *t, struct rig *r, const struct row *row, int how, int armed_now)
{
  struct values v = inputs(t, r, how == BACKWARD);
  moe_value y = { 0 }, g[WRT], h[WRT], of[WRT];
  int64_t n = 0;
  if (how != FORWARD) {
    y = row->op(t, r, &v);
    OK(moe_tape_status(t));
  }
  fill_page(t, r);
  moe_value seed = y;
  if (armed_now) begin();
  if (how == FORWARD) y = row->op(t, r, &v);
  if (how == BACKWARD) {
    moe_status st = moe_tape_backward(t, y, seed, MOE_ACCUMULATE);
    assert_int_equal(st, moe_tape_status(t));
  }
  if (how == SECOND) {
    moe_status st = moe_tape_gradients(g, t, &y, &seed, 1, v.wrt, WRT, MOE_CREATE_GRAPH | MOE_DECOMPOSE);
    for (int i = 0; i < WRT; i++) {
      assert_true(!st || !g[i].id);
      if (g[i].id && moe__tape_at(t, g[i])->needs_grad) of[n++] = g[i];
    }
    if (n) st = moe_tape_gradients(h, t, of, of, n, v.wrt, WRT, MOE_DECOMPOSE);
    for (int i = 0; i < WRT && n; i++) assert_true(!st || !h[i].id);
  }
  if (how == HVP) {
    moe_status st = moe_hvp(h, t, y, v.wrt, v.wrt, WRT, MOE_DECOMPOSE);
    for (int i = 0; i < WRT; i++) assert_true(!st || !h[i].id);
  }
  moe_status st = moe_tape_status(t);
  if (armed_now) end();
  if (how == FORWARD) assert_true(!y.id == (st != MOE_OK));
  return st;
}

static moe_status run_tape(struct rig *r, const struct row *row, int how)
{
  moe_tape *t = new_tape(r, how == BACKWARD);
  const struct failure met = keep_failure(use(t, r, row, how, 1));
  if (met.status) { /* it stays with the tape until reset; then the tape is as new */
    assert_true(!moe_tape_leaf(t, &r->y, 1).id);
    FAILS(met.status, met.text, moe_tape_status(t));
    moe_tape_reset(t);
    OK(use(t, r, row, how, 0));
  }
  moe_tape_free(t);
  assert_int_equal(released, given);
  return failure(&met);
}
static moe_status forward(struct rig *r, const struct row *row)
{
  return run_tape(r, row, FORWARD);
}
static moe_status backward(struct rig *r, const struct row *row)
{
  return run_tape(r, row, BACKWARD);
}
static moe_status second(struct rig *r, const struct row *row)
{
  return run_tape(r, row, SECOND);
}

static moe_status hvp(struct rig *r, const struct row *row)
{
  return run_tape(r, row, HVP);
}

/* The inputs are put back whatever happens. */
static moe_value cube(void *user, moe_tape *t, const moe_value *in, int64_t n)
{
  (void)user;
  (void)n;
  return moe_tape_mul(t, in[0], moe_tape_mul(t, in[0], in[0]));
}
static moe_status check_gradient(struct rig *r, int second)
{
  const moe_span at = { r->exact.handle, r->exact.offset, 2 * sizeof(double) };
  const double before[2] = { 1.5, -0.25 };
  double after[2];
  OK(moe_span_write(r->q, at, before, sizeof before));
  begin();
  moe_status st = moe_gradcheck(&r->out.check, r->q, cube, NULL, &r->exact, 1, &r->check_desc[second]);
  end();
  OK(moe_span_read(r->q, after, at, sizeof after));
  assert_memory_equal(before, after, sizeof before);
  return st;
}
static moe_status check_first(struct rig *r, const struct row *row)
{
  (void)row;
  return check_gradient(r, 0);
}
static moe_status check_second(struct rig *r, const struct row *row)
{
  (void)row;
  return check_gradient(r, 1);
}

/* With results on a tape that are still to be looked at. */
static moe_status wait_watching(struct rig *r, const struct row *row)
{
  moe_tape *t = new_tape(r, 1);
  struct values v = inputs(t, r, 0);
  (void)row;
  assert_true(moe_tape_neg(t, v.x).id);
  begin();
  moe_status st = moe_queue_wait(r->q);
  end();
  moe_tape_free(t);
  return st;
}
static moe_status tell_health(struct rig *r, const struct row *row)
{
  moe_tape *t = new_tape(r, 1);
  struct values v = inputs(t, r, 0);
  (void)row;
  assert_true(moe_tape_neg(t, v.x).id);
  begin();
  moe_status st = moe_tape_health(&r->out.health, t);
  end();
  moe_tape_free(t);
  return st;
}

/* Bad data that a failed wait did not tell, the next one does. */
static void a_wait_that_fails_loses_nothing(void **state)
{
  struct rig *r = *state;
  moe_tape *t = new_tape(r, 1);
  unsigned char *word = (unsigned char *)fake_data(r->q->health.handle) + r->q->health.offset;
  long failures = 0;
  next_sort = DEVICE;
  for (next_at = 1;; next_at++) {
    *word = MOE_HEALTH_ID;
    begin();
    moe_status st = moe_queue_wait(r->q);
    end();
    if (st == MOE_ERR_DATA) break;
    assert_int_equal(st, fake.failed);
    failures++;
    FAILS(MOE_ERR_DATA, "an id out of range", moe_queue_wait(r->q));
  }
  assert_true(failures > 2);
  moe_tape_free(t);
}

/* Reading leaves no error on the tape. */
static moe_status read_value(struct rig *r, const struct row *row)
{
  moe_tape *t = new_tape(r, 0);
  moe_value x = moe_tape_leaf(t, &r->y, 1);
  (void)row;
  begin();
  moe_status st = moe_tape_read(t, x, r->out.read, 48);
  end();
  OK(moe_tape_status(t));
  moe_tape_free(t);
  return st;
}

/* What the device refuses at a reset is the new tape's first error. */
static moe_status reset_tape(struct rig *r, const struct row *row)
{
  moe_tape *t = new_tape(r, 1);
  struct values v = inputs(t, r, 0);
  (void)row;
  assert_true(custom(t, r, v.x).id);
  begin();
  moe_tape_reset(t);
  const struct failure met = keep_failure(moe_tape_status(t));
  end();
  assert_int_equal(released, given);
  moe_tape_reset(t);
  OK(moe_tape_status(t));
  moe_tape_free(t);
  return failure(&met);
}
static moe_status free_tape(struct rig *r, const struct row *row)
{
  moe_tape *t = new_tape(r, 0);
  struct values v = inputs(t, r, 0);
  (void)row;
  (void)custom(t, r, v.x);
  begin();
  moe_tape_free(t);
  end();
  assert_int_equal(released, given);
  return MOE_OK;
}

/* ---- what cannot fail -------------------------------------------------------------------------------------------------- */
static struct {
  moe_tensor tensor;
  moe_checkpoint_entry entry;
  moe_device_info info;
  moe_experts_bytes experts;
  moe_layer_bytes layer;
  struct CUstream_st *stream;
  struct _cl_command_queue *queue;
  char text[4096];
} any;

static const char arithmetic[] = "arithmetic", view[] = "names memory that is there", known[] = "gives what is known",
                  mapped[] = "reads memory that is mapped";

/* With a status; and without. */
#define SURE(X)                                                                                                        \
  X(moe_checkpoint_at, (&any.entry, r->file, 0), mapped)                                                               \
  X(moe_checkpoint_find, (&any.entry, r->some, "one"), mapped)                                                         \
  X(moe_checkpoint_verify, (r->file, NULL), mapped)                                                                    \
  X(moe_context_info, (r->ctx, &any.info), known)                                                                      \
  X(moe_experts_explain, (r->experts, SMALL_T, any.text, sizeof any.text, NULL), known)                                \
  X(moe_experts_measure, (&any.experts, r->experts, SMALL_T, 0), arithmetic)                                           \
  X(moe_experts_route_ids, (&any.tensor, &r->s.state), view)                                                           \
  X(moe_experts_route_weights, (&any.tensor, &r->s.state), view)                                                       \
  X(moe_layer_counts, (&any.tensor, &r->s.layer_state), view)                                                          \
  X(moe_layer_explain, (r->layer, SMALL_T, any.text, sizeof any.text, NULL), known)                                    \
  X(moe_layer_logits, (&any.tensor, &r->s.layer_state), view)                                                          \
  X(moe_layer_losses, (&any.tensor, &r->s.layer_state), view)                                                          \
  X(moe_layer_measure, (&any.layer, r->layer, SMALL_T, 1), arithmetic)                                                 \
  X(moe_layer_param, (&any.tensor, NULL, NULL, r->layer, PARAMS, PARAMS, 0), view)                                     \
  X(moe_layer_parameter_counts, (NULL, NULL, r->layer), arithmetic)                                                    \
  X(moe_layer_route_ids, (&any.tensor, &r->s.layer_state), view)                                                       \
  X(moe_layer_route_weights, (&any.tensor, &r->s.layer_state), view)                                                   \
  X(moe_parameter_counts, (NULL, NULL, 1, 2, 3, 1, 0), arithmetic)                                                     \
  X(moe_queue_to_cuda, (&any.stream, r->cuda_q), known)                                                                \
  X(moe_queue_to_opencl, (&any.queue, r->opencl_q), known)                                                             \
  X(moe_tape_status, (r->tape), known)                                                                                 \
  X(moe_tape_tensor, (&any.tensor, r->tape, r->on_tape), view)                                                         \
  X(moe_tensor_every, (&any.tensor, &r->y, 0, 0, 2), view)                                                             \
  X(moe_tensor_packed, (&any.tensor, r->state, MOE_F32, 1, SHAPE(2)), view)                                            \
  X(moe_tensor_slice, (&any.tensor, &r->y, 0, 1, 2), view)                                                             \
  X(moe_tensor_transpose, (&any.tensor, &r->y, 0, 1), view)
#define SURE_VALUES(X)                                                                                                 \
  X(moe_checkpoint_count, (r->file), mapped)                                                                           \
  X(moe_checkpoint_metadata, (r->some, "what"), mapped)                                                                \
  X(moe_checkpoint_metadata_key, (r->some, 0), mapped)                                                                 \
  X(moe_dtype_name, (MOE_F32), known)                                                                                  \
  X(moe_dtype_size, (MOE_F32), known)                                                                                  \
  X(moe_last_error, (), known)                                                                                         \
  X(moe_strerror, (MOE_OK), known)                                                                                     \
  X(moe_tape_grad, (r->tape, r->on_tape), view)                                                                        \
  X(moe_tape_memory, (r->tape, NULL, NULL), arithmetic)                                                                \
  X(moe_tape_moe_param, (r->tape, r->on_tape, 0), view)                                                                \
  X(moe_tape_set_recording, (r->tape, 1), known)                                                                       \
  X(moe_tensor_count, (&r->y), arithmetic)                                                                             \
  X(moe_tensor_extent, (&r->y), arithmetic)                                                                            \
  X(moe_tensor_is_packed, (&r->y), arithmetic)                                                                         \
  X(moe_version, (), known)                                                                                            \
  X(moe_version_string, (), known)

#define RUNS(fn, call)                                                                                                 \
  static moe_status run_##fn(struct rig *r, const struct row *row)                                                     \
  {                                                                                                                    \
    moe_status st = MOE_OK;                                                                                            \
    (void)r;                                                                                                           \
    (void)row;                                                                                                         \
    any.entry = moe_checkpoint_entry_init();                                                                           \
    any.info = moe_device_info_init();                                                                                 \
    any.experts = moe_experts_bytes_init();                                                                            \
    any.layer = moe_layer_bytes_init();                                                                                \
    begin();                                                                                                           \
    call;                                                                                                              \
    end();                                                                                                             \
    return st;                                                                                                         \
  }
#define X(fn, args, never) RUNS(fn, st = fn args)
SURE(X)
#undef X
#define X(fn, args, never) RUNS(fn, (void)fn args)
SURE_VALUES(X)
#undef X

/* What a backend's being looked for meets is the text that it gives. */
static moe_status give_reason(struct rig *r, const struct row *row)
{
  (void)r;
  (void)row;
  begin();
  const char *text = moe_backend_reason("opencl");
  end();
  assert_non_null(text);
  return MOE_OK;
}

/* ---- the table ----------------------------------------------------------------------------------------------------------- */
#define ROW(fn, ...)                                                                                                   \
  {                                                                                                                    \
    .name = fn, .run = __VA_ARGS__                                                                                     \
  }
#define CALL_ROW(fn, args) ROW(#fn, run_##fn),
#define OBJECT_ROWS(type, make, drop, args, borne)                                                                     \
  ROW(#type "_" #make, run_##type##_##make, .bears = borne), ROW(#type "_" #drop, run_##type##_##drop, .bears = ALL),
#define OPERATION_ROW(fn, variant, args) ROW(#fn, forward, .op = op_##fn##variant),
#define SURE_ROW(fn, args, why) ROW(#fn, run_##fn, .never = why),

static const struct row rows[] = {
  CALLS(CALL_ROW) OBJECTS(OBJECT_ROWS) OPERATIONS(OPERATION_ROW) SURE(SURE_ROW) SURE_VALUES(SURE_ROW)
      ROW("moe_adamw_add", add_parameter),
  ROW("moe_backend_reason", give_reason, .bears = ALL),
  ROW("moe_checkpoint_load_layer", load_bits),
  ROW("moe_checkpoint_open", open_shards),
  ROW("moe_checkpoint_open", open_folder),
  ROW("moe_checkpoint_save_adamw", save_adamw),
  ROW("moe_checkpoint_save_layer", save_layer),
  ROW("moe_checkpoint_save_layer", save_named),
  ROW("moe_checkpoint_writer_add", add_first),
  ROW("moe_checkpoint_writer_add", add_next),
  ROW("moe_checkpoint_writer_add_tensor", add_tensor),
  ROW("moe_checkpoint_writer_commit", commit_one),
  ROW("moe_checkpoint_writer_commit", commit_shards, .bears = 1),
  ROW("moe_checkpoint_writer_metadata", add_metadata),
  ROW("moe_context_free", free_context, .bears = ALL),
  ROW("moe_dlpack_export", export_copy),
  ROW("moe_dlpack_export", export_in_place),
  ROW("moe_dlpack_free", free_foreign, .bears = ALL),
  ROW("moe_dlpack_import", import_copy),
  ROW("moe_dlpack_import", import_empty),
  ROW("moe_dlpack_import", import_in_place),
  ROW("moe_dlpack_import_unversioned", import_unversioned),
  ROW("moe_dlpack_wait", wait_foreign),
  ROW("moe_queue_from_cuda", lend_cuda),
  ROW("moe_queue_from_opencl", lend_opencl),
  ROW("moe_raw_open", open_raw),
  ROW("moe_raw_save", save_raw, .bears = 4),
  ROW("moe_span_alloc", alloc_span),
  ROW("moe_span_free", free_span, .bears = ALL),
  ROW("moe_gradcheck", check_first),
  ROW("moe_gradcheck", check_second),
  ROW("moe_hvp", hvp, .op = op_options),
  ROW("moe_queue_wait", wait_watching),
  ROW("moe_tape_health", tell_health),
  ROW("moe_tape_backward", backward, .op = model),
  ROW("moe_tape_cross_entropy_options", forward, .op = op_options),
  ROW("moe_tape_custom", forward, .op = op_custom),
  ROW("moe_tape_free", free_tape, .bears = ALL),
  ROW("moe_tape_gradients", second, .op = model),
  ROW("moe_tape_read", read_value),
  ROW("moe_tape_recompute", forward, .op = op_recompute),
  ROW("moe_tape_reset", reset_tape),
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

static void every_function_fails_cleanly(void **state)
{
  for (int i = 0; i < N_ROWS; i++) sweep(*state, &rows[i], rows[i].run, "");
}

/* Does a gradient flow through it? */
static int differentiates(struct rig *r, const struct row *row)
{
  moe_tape *t = new_tape(r, 0);
  struct values v = inputs(t, r, 0);
  moe_value y = row->op(t, r, &v);
  const int yes = y.id && moe__tape_at(t, y)->node >= 0;
  moe_tape_free(t);
  return yes;
}

static void every_gradient_fails_cleanly(void **state)
{
  int n = 0;
  for (int i = 0; i < N_ROWS; i++) {
    if (rows[i].run != forward || !differentiates(*state, &rows[i])) continue;
    sweep(*state, &rows[i], backward, ", backward");
    sweep(*state, &rows[i], second, ", twice");
    n++;
  }
  assert_true(n > 40);
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
  const long blocks = fake.blocks, queues = fake.queues;
  fake_reset();
  fake.desc.alloc = lend;
  fake.desc.release = take_back;
  fake.desc.user = &ctx;
  ctx = fake_open();
  assert_non_null(ctx);
  next_sort = DEVICE;
  next_at = 2; /* after the queue's opening: its memory */
  begin();
  FAILS(MOE_ERR_NO_MEMORY, "moe_queue_create: the caller's alloc gave none", moe_queue_create(&q, ctx));
  end();
  assert_null(q);
  assert_true(lent == 0 && fake.blocks == blocks && fake.queues == queues);
  OK(moe_queue_create(&q, ctx));
  OK(moe_span_alloc(&span, ctx, 100));
  OK(moe_tape_create(&tape, q, NULL));
  struct small s;
  small_options(&s, MOE_F32);
  OK(small_memory(&s, ctx, q));
  moe_value x = moe_tape_leaf(tape, &s.io.x, 1);
  OK(moe_tape_backward(tape, moe_tape_sum(tape, x), (moe_value){ 0 }, 0));
  assert_int_equal(lent, fake.blocks - blocks);
  assert_int_equal(lent, 4); /* health word, span, the small memory, one block of the tape */
  moe_tape_free(tape);
  small_free(&s);
  moe_span_free(ctx, &span);
  assert_null(span.handle);
  moe_span_free(ctx, &span); /* again: nothing */
  moe_queue_free(q);
  assert_true(lent == 0 && fake.blocks == blocks);
  moe_context_free(ctx);
  fake_reset();
}

/* ---- OpenCL ------------------------------------------------------------------------------------------------------ */
/* What only a device of OpenCL has. */
static struct _cl_context *lent_context;
static struct _cl_device_id *lent_device;
static struct _cl_command_queue *lent_queue;
static int listed; /* the index of one of its devices among all */

MAKES(create_any, moe_context, moe_context_create, moe_context_free, (&out, NULL))
MAKES(lend_context, moe_context, moe_context_from_opencl, moe_context_free, (&out, lent_context, lent_device, NULL))
MAKES(lend_queue, moe_queue, moe_queue_from_opencl, moe_queue_free, (&out, r->ctx, lent_queue))

static moe_status list_device(struct rig *r, const struct row *row)
{
  moe_device_info info = moe_device_info_init(), before = info;
  (void)r;
  (void)row;
  begin();
  moe_status st = moe_device_list(&info, listed);
  end();
  if (st) assert_memory_equal(&info, &before, sizeof info);
  return st;
}

/* The caller's cache, of one program. */
static struct {
  char key[40];
  unsigned char bytes[1 << 20];
  uint64_t size;
} cached;
static uint64_t cache_load(void *user, const char *key, void *to, uint64_t room)
{
  (void)user;
  if (strcmp(cached.key, key) != 0) return 0;
  if (cached.size <= room) memcpy(to, cached.bytes, cached.size);
  return cached.size;
}
static moe_status cache_store(void *user, const char *key, const void *from, uint64_t size)
{
  (void)user;
  if (size > sizeof cached.bytes) return MOE_ERR_TOO_SMALL;
  snprintf(cached.key, sizeof cached.key, "%s", key);
  memcpy(cached.bytes, from, size);
  cached.size = size;
  return MOE_OK;
}

/* A program and a kernel, made and run for the first time. */
static moe_status run_first(moe_context_desc desc)
{
  moe_context *ctx;
  moe_queue *q;
  moe_span span;
  moe_tensor t;
  desc.device = "opencl:cpu";
  OK(moe_context_create(&ctx, &desc));
  OK(moe_queue_create(&q, ctx));
  OK(moe_span_alloc(&span, ctx, 64));
  OK(moe_tensor_packed(&t, span, MOE_F32, 1, SHAPE(16)));
  begin();
  moe_status st = moe_tensor_fill(q, &t, 1);
  end();
  moe_span_free(ctx, &span);
  moe_queue_free(q);
  moe_context_free(ctx);
  return st;
}
static moe_status build(struct rig *r, const struct row *row)
{
  (void)r;
  (void)row;
  return run_first(moe_context_desc_init());
}
/* Into the cache, and from it: what fails there is never an error. */
static moe_status build_cached(int there)
{
  moe_context_desc desc = moe_context_desc_init();
  desc.cache_load = cache_load;
  desc.cache_store = cache_store;
  if (!there) cached.size = cached.key[0] = 0;
  return run_first(desc);
}
static moe_status build_and_store(struct rig *r, const struct row *row)
{
  (void)r;
  (void)row;
  return build_cached(0);
}
static moe_status build_from_cache(struct rig *r, const struct row *row)
{
  (void)r;
  (void)row;
  return build_cached(1);
}

static const struct row opencl_rows[] = {
  CALLS(CALL_ROW) ROW("moe_tensor_fill", build, .alone = 1),
  ROW("moe_tensor_fill", build_and_store, .bears = ALL, .alone = 1),
  ROW("moe_tensor_fill", build_from_cache, .bears = ALL, .alone = 1),
  ROW("moe_context_create", create_any),
  ROW("moe_context_from_opencl", lend_context),
  ROW("moe_device_list", list_device),
  ROW("moe_queue_from_opencl", lend_queue),
};
enum { N_OPENCL_ROWS = sizeof opencl_rows / sizeof opencl_rows[0] };

static void every_function_fails_cleanly_on_opencl(void **state)
{
  static struct rig r;
  moe_context *ctx;
  (void)state;
  moe_context_desc desc = moe_context_desc_init();
  desc.device = "opencl:cpu";
  moe_device_info info = moe_device_info_init();
  if (moe_context_create(&ctx, &desc) == MOE_ERR_NO_DEVICE) skip();
  for (listed = 0; !moe_device_list(&info, listed) && strcmp(info.backend, "opencl"); listed++) continue;
  bend();
  open_rig(&r, ctx);
#if MOE_HAVE_OPENCL
  OK(moe_queue_to_opencl(&lent_queue, r.q));
  driver.clGetCommandQueueInfo(lent_queue, CL_QUEUE_CONTEXT, sizeof lent_context, &lent_context, NULL);
  driver.clGetCommandQueueInfo(lent_queue, CL_QUEUE_DEVICE, sizeof lent_device, &lent_device, NULL);
#endif
  for (int i = 0; i < N_OPENCL_ROWS; i++) sweep(&r, &opencl_rows[i], opencl_rows[i].run, ", OpenCL");
  close_rig(&r);
  unbend();
}

/* ---- everything is here -------------------------------------------------------------------------------------------------- */
static int is_swept(const char *name)
{
  for (int i = 0; i < N_ROWS; i++)
    if (!strcmp(rows[i].name, name)) return 1;
  for (int i = 0; i < N_OPENCL_ROWS; i++)
    if (!strcmp(opencl_rows[i].name, name)) return 1;
  return 0;
}

static void every_exported_function_is_here(void **state)
{
  const char *srcdir = getenv("MOE_TEST_SRCDIR");
  char path[512], name[80];
  int n = 0;
  (void)state;
  if (!srcdir) skip();
  snprintf(path, sizeof path, "%s/tests/abi/moe.syms", srcdir);
  FILE *f = fopen(path, "r");
  if (!f) fail_msg("%s: cannot be read", path);
  for (; fscanf(f, "%79s", name) == 1; n++)
    if (!is_swept(name)) fail_msg("%s is in no sweep", name);
  fclose(f);
  assert_true(n > 100);
}

static int open_all(void **state)
{
  static struct rig r;
  if (files_open(state)) return -1;
  fake_reset();
  open_rig(&r, fake_open());
  *state = &r;
  return 0;
}
static int close_all(void **state)
{
  close_rig(*state);
  return files_close(state);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_function_fails_cleanly),
    cmocka_unit_test(every_gradient_fails_cleanly),
    cmocka_unit_test(a_failed_bind_leaves_the_optimizer_unbound),
    cmocka_unit_test(a_wait_that_fails_loses_nothing),
    cmocka_unit_test(the_callers_allocator_serves_all_device_memory),
    cmocka_unit_test(every_function_fails_cleanly_on_opencl),
    cmocka_unit_test(every_exported_function_is_here),
  };
  json_set_alloc_funcs(json_memory, __wrap_free);
  return cmocka_run_group_tests(tests, open_all, close_all) ? 1 : 0;
}
