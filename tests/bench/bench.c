/* bench.c - see bench.h. */
#include "bench.h"

#include "core/backend.h"

#include <moe/cuda.h>
#include <moe/experts.h>

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct bench bench;

_Noreturn void give_up(const char *format, ...)
{
  va_list list;
  fflush(stdout);
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fputc('\n', stderr);
  exit(1);
}

void must(moe_status status)
{
  if (status != MOE_OK) give_up("bench: %s", moe_last_error());
}

void *allocate(size_t n, size_t size)
{
  void *p = calloc(n ? n : 1, size);
  if (!p) give_up("bench: no host memory");
  return p;
}

double now(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int find_symbol(void *library, const char *name, void *function)
{
  void *symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

/* ---- CUDA's libraries: the functions used here, as their headers declare them ------------------------------------ */
#define CUDART(X)                                                                                                      \
  X(cudaSetDevice, int)                                                                                                \
  X(cudaDeviceGetPCIBusId, char *, int, int)                                                                           \
  X(cudaStreamCreateWithFlags, struct CUstream_st **, unsigned)                                                        \
  X(cudaStreamDestroy, struct CUstream_st *)                                                                           \
  X(cudaStreamBeginCapture, struct CUstream_st *, int)                                                                 \
  X(cudaStreamEndCapture, struct CUstream_st *, void **)                                                               \
  X(cudaEventCreateWithFlags, void **, unsigned)                                                                       \
  X(cudaEventRecordWithFlags, void *, struct CUstream_st *, unsigned)                                                  \
  X(cudaEventSynchronize, void *)                                                                                      \
  X(cudaEventElapsedTime, float *, void *, void *)                                                                     \
  X(cudaEventDestroy, void *)                                                                                          \
  X(cudaGraphInstantiateWithFlags, void **, void *, unsigned long long)                                                \
  X(cudaGraphDestroy, void *)                                                                                          \
  X(cudaGraphLaunch, void *, struct CUstream_st *)                                                                     \
  X(cudaGraphExecDestroy, void *)
#define CUBLAS(X)                                                                                                      \
  X(cublasCreate_v2, void **)                                                                                          \
  X(cublasDestroy_v2, void *)                                                                                          \
  X(cublasGetVersion_v2, void *, int *)                                                                                \
  X(cublasSetStream_v2, void *, struct CUstream_st *)                                                                  \
  X(cublasSetWorkspace_v2, void *, void *, size_t)                                                                     \
  X(cublasGemmStridedBatchedEx, void *, int, int, int, int, int, const void *, const void *, int, int, long long,      \
    const void *, int, int, long long, const void *, void *, int, int, long long, int, int, int)
#define NVML(X)                                                                                                        \
  X(nvmlInit_v2, void)                                                                                                 \
  X(nvmlSystemGetDriverVersion, char *, unsigned)                                                                      \
  X(nvmlDeviceGetHandleByPciBusId_v2, const char *, void **)                                                           \
  X(nvmlDeviceGetClockInfo, void *, int, unsigned *)                                                                   \
  X(nvmlDeviceGetPowerUsage, void *, unsigned *)

#define X(name, ...) static int (*name)(__VA_ARGS__);
CUDART(X)
CUBLAS(X)
NVML(X)
#undef X

enum {
  NON_BLOCKING = 1,      /* cudaStreamNonBlocking */
  THREAD_LOCAL = 1,      /* cudaStreamCaptureModeThreadLocal */
  EXTERNAL = 1,          /* cudaEventRecordExternal: a captured event is recorded by each replay */
  PLAIN = 0,             /* CUBLAS_OP_N */
  TRANSPOSED = 1,        /* CUBLAS_OP_T */
  IN_FP32 = 68,          /* CUBLAS_COMPUTE_32F */
  CHOSEN_BY_CUBLAS = -1, /* CUBLAS_GEMM_DEFAULT */
  SM_CLOCK = 1,          /* NVML_CLOCK_SM */
  WORKSPACE = 64 << 20,  /* bytes that cuBLAS may use: it cannot allocate under capture */
  FLUSHED = 256 << 20    /* bytes written before a cold call: more than any L2 holds */
};

static void *cublas, *nvml_device;
static moe_span workspace, flushed, sums;
static int capturing;

/* cudaError_t, cublasStatus_t */
static void done(int status, const char *what)
{
  if (status) give_up("bench: %s: error %d", what, status);
}
#define DO(call) done(call, #call)

static void *open_library(const char *folder, const char *const *names)
{
  static const char *const usual = "/usr/local/cuda/lib64";
  void *library = NULL;
  char path[4096];
  for (int i = 0; names[i] && folder && !library; i++) {
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  }
  for (int i = 0; names[i] && !library; i++) library = dlopen(names[i], RTLD_NOW | RTLD_GLOBAL);
  if (!library && folder != usual) return open_library(usual, names);
  return library;
}

/* Why the CUDA runtime cannot be used; "" where it can. */
static const char *open_cudart(const char *folder)
{
  static const char *const names[] = { "libcudart.so.13", "libcudart.so.12", "libcudart.so", NULL };
  void *library = open_library(folder, names);
  if (!library) return "libcudart.so cannot be opened";
#define X(name, ...)                                                                                                   \
  if (!find_symbol(library, #name, &name)) return "libcudart.so has no " #name;
  CUDART(X)
#undef X
  return "";
}

static const char *open_cublas(const char *folder)
{
  static const char *const names[] = { "libcublas.so.13", "libcublas.so.12", "libcublas.so", NULL };
  void *library = open_library(folder, names);
  if (!library) return "libcublas.so cannot be opened";
#define X(name, ...)                                                                                                   \
  if (!find_symbol(library, #name, &name)) return "libcublas.so has no " #name;
  CUBLAS(X)
#undef X
  return "";
}

static void open_nvml(int ordinal)
{
  static const char *const names[] = { "libnvidia-ml.so.1", NULL };
  void *library = open_library(NULL, names);
  char bus[32] = "";
  if (!library) return;
#define X(name, ...)                                                                                                   \
  if (!find_symbol(library, #name, &name)) return;
  NVML(X)
#undef X
  if (nvmlInit_v2() || cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal)) return;
  if (nvmlSystemGetDriverVersion(bench.driver, sizeof bench.driver)) bench.driver[0] = 0;
  if (nvmlDeviceGetHandleByPciBusId_v2(bus, &nvml_device)) nvml_device = NULL;
}

static void open_cuda(const char *libraries)
{
  int ordinal = atoi(strchr(bench.info.id, ':') + 1), version = 0;
  const char *why = open_cudart(libraries);
  if (why[0]) {
    snprintf(bench.cublas, sizeof bench.cublas, "%s", why);
    printf("%s: times are the host's, and there are no graphs\n", why);
    return;
  }
  DO(cudaSetDevice(ordinal));
  DO(cudaStreamCreateWithFlags(&bench.stream, NON_BLOCKING));
  must(moe_queue_from_cuda(&bench.q, bench.ctx, bench.stream));
  open_nvml(ordinal);
  why = open_cublas(libraries);
  if (why[0]) {
    snprintf(bench.cublas, sizeof bench.cublas, "%s", why);
    return;
  }
  must(moe_span_alloc(&workspace, bench.ctx, WORKSPACE));
  DO(cublasCreate_v2(&cublas));
  DO(cublasSetStream_v2(cublas, bench.stream));
  DO(cublasSetWorkspace_v2(cublas, workspace.handle, WORKSPACE));
  DO(cublasGetVersion_v2(cublas, &version));
  snprintf(bench.cublas, sizeof bench.cublas, "%d", version);
  bench.has_cublas = 1;
}

moe_status bench_open(const char *device, const char *libraries)
{
  moe_context_desc desc = moe_context_desc_init();
  desc.device = device;
  moe_status status = moe_context_create(&bench.ctx, &desc);
  if (status == MOE_ERR_NO_DEVICE) return status;
  must(status);
  bench.info = moe_device_info_init();
  must(moe_context_info(bench.ctx, &bench.info));
  snprintf(bench.cublas, sizeof bench.cublas, "%s is not a CUDA device", bench.info.id);
  if (!strcmp(bench.info.backend, "cuda")) open_cuda(libraries);
  if (!bench.q) must(moe_queue_create(&bench.q, bench.ctx));
  return MOE_OK;
}

void bench_close(void)
{
  if (cublas) cublasDestroy_v2(cublas);
  moe_span_free(bench.ctx, &workspace);
  moe_span_free(bench.ctx, &flushed);
  moe_span_free(bench.ctx, &sums);
  moe_queue_free(bench.q);
  if (bench.stream) cudaStreamDestroy(bench.stream);
  moe_context_free(bench.ctx);
}

/* ---- time -------------------------------------------------------------------------------------------------------- */
void point_set(struct point *p)
{
  if (!bench.stream) {
    must(moe_queue_wait(bench.q));
    p->at = now();
    return;
  }
  if (!p->event) DO(cudaEventCreateWithFlags(&p->event, 0));
  DO(cudaEventRecordWithFlags(p->event, bench.stream, capturing ? EXTERNAL : 0));
}

double point_ms(const struct point *a, const struct point *b)
{
  float ms = 0;
  if (!bench.stream) return 1e3 * (b->at - a->at);
  DO(cudaEventSynchronize(b->event));
  DO(cudaEventElapsedTime(&ms, a->event, b->event));
  return (double)ms;
}

void point_free(struct point *p)
{
  if (p->event) DO(cudaEventDestroy(p->event));
  p->event = NULL;
}

static void read_gpu(void)
{
  unsigned mhz = 0, milliwatts = 0;
  if (!nvml_device || nvmlDeviceGetClockInfo(nvml_device, SM_CLOCK, &mhz)) mhz = 0;
  if (!nvml_device || nvmlDeviceGetPowerUsage(nvml_device, &milliwatts)) milliwatts = 0;
  bench.mhz = mhz;
  bench.watts = milliwatts / 1e3;
}

/* Written, then read: what is left in the cache needs no writing back in the call's time. */
void flush_cache(void)
{
  static struct moe__args_elt_sum sum = { .dtype = MOE_F32, .n = FLUSHED / 4 };
  const int64_t parts = MOE__PARTS, one = 1;
  if (!bench.cold) return;
  if (!flushed.handle) {
    must(moe_span_alloc(&flushed, bench.ctx, FLUSHED));
    must(moe_tensor_packed(&sum.a, flushed, MOE_F32, 1, &sum.n));
    must(moe_span_alloc(&sums, bench.ctx, 4 * (MOE__PARTS + 1)));
    must(moe_tensor_packed(&sum.scratch, sums, MOE_F32, 1, &parts));
    must(moe_tensor_packed(&sum.y, (moe_span){ sums.handle, 4 * MOE__PARTS, 4 }, MOE_F32, 1, &one));
    must(moe__prepare_elt_sum(bench.ctx, &sum, MOE_AUTO));
  }
  must(moe_span_fill(bench.q, flushed, 0));
  must(moe__run_elt_sum(bench.q, &sum, MOE_AUTO));
}

static void run_round(struct lane *const *lanes, int n)
{
  for (int i = 0; i < n; i++) {
    flush_cache();
    point_set(&lanes[i]->start);
    lanes[i]->run(lanes[i]->user);
    point_set(&lanes[i]->end);
  }
}

void race(struct lane *const *lanes, int n)
{
  const double begin = now();
  do {
    run_round(lanes, n);
    must(moe_queue_wait(bench.q));
  } while (now() - begin < bench.warm);
  for (int round = 0; round < bench.rounds; round++) {
    run_round(lanes, n);
    if (round == bench.rounds - 1) read_gpu(); /* while the device works */
    for (int i = 0; i < n; i++) {
      struct lane *lane = lanes[i];
      lane->whole[round] = point_ms(&lane->start, &lane->end);
      lane->ms[round] = lane->middle ? point_ms(lane->middle, &lane->end) : lane->whole[round];
    }
  }
  must(moe_queue_wait(bench.q));
}

void lane_free(struct lane *lane)
{
  point_free(&lane->start);
  point_free(&lane->end);
}

static int ascending(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

struct spread spread_of(const double *ms, int n)
{
  double sorted[MOST_ROUNDS];
  memcpy(sorted, ms, (size_t)n * sizeof *sorted);
  qsort(sorted, (size_t)n, sizeof *sorted, ascending);
  return (struct spread){ (sorted[(n - 1) / 2] + sorted[n / 2]) / 2, sorted[n / 4], sorted[3 * n / 4] };
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */
struct graph {
  void *exec;
};

struct graph *graph_capture(void (*run)(void *user), void *user)
{
  struct graph *graph;
  void *captured = NULL;
  if (!bench.stream) return NULL;
  graph = allocate(1, sizeof *graph);
  run(user); /* whatever is loaded at the first call is loaded outside the capture */
  must(moe_queue_wait(bench.q));
  DO(cudaStreamBeginCapture(bench.stream, THREAD_LOCAL));
  capturing = 1;
  run(user);
  capturing = 0;
  DO(cudaStreamEndCapture(bench.stream, &captured));
  DO(cudaGraphInstantiateWithFlags(&graph->exec, captured, 0));
  DO(cudaGraphDestroy(captured));
  return graph;
}

void graph_run(void *graph)
{
  DO(cudaGraphLaunch(((struct graph *)graph)->exec, bench.stream));
}

void graph_free(struct graph *graph)
{
  if (graph) DO(cudaGraphExecDestroy(graph->exec));
  free(graph);
}

/* ---- cuBLAS ------------------------------------------------------------------------------------------------------ */
/* cudaDataType */
static int type_of(int64_t dtype)
{
  return dtype == MOE_BF16 ? 14 : dtype == MOE_F16 ? 2 : 0;
}

static void *data(const moe_tensor *t)
{
  return (char *)t->handle + t->offset;
}

/* cuBLAS counts columns first, so it computes c' = b' a' of the same bytes. */
void cublas_products(enum layout layout, int64_t E, int64_t M, int64_t N, int64_t K, const moe_tensor *a,
                     const moe_tensor *b, const moe_tensor *c)
{
  static const float one = 1, zero = 0;
  const int b_op = layout == NT ? TRANSPOSED : PLAIN, a_op = layout == TN ? TRANSPOSED : PLAIN;
  DO(cublasGemmStridedBatchedEx(cublas, b_op, a_op, (int)N, (int)M, (int)K, &one, data(b), type_of(b->dtype),
                                (int)(layout == NT ? K : N), N * K, data(a), type_of(a->dtype),
                                (int)(layout == TN ? M : K), M * K, &zero, data(c), type_of(c->dtype), (int)N, M * N,
                                (int)E, IN_FP32, CHOSEN_BY_CUBLAS));
}
