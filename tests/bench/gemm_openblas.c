/* gemm_openblas.c - the matrix products of the OpenCL CPU device beside OpenBLAS, with the floors they must reach:
   dense f32 in all four layouts, and ragged experts (one launch, offsets on the device) against a loop of sgemm.

   gemm_openblas [seconds of a case]     0: all floors reached, 1: not, 77: no OpenCL CPU device or no OpenBLAS

   OpenBLAS is opened at run time, so the build does not need it.  Both sides compute the same products from the same
   values, call by call in turn, at least 9 rounds; the ratio is that of their best times. */
#define _GNU_SOURCE
#include "bench.h"

#include "core/backend.h"

#include <moe/experts.h>

#include <dlfcn.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112, ROUNDS = 9, N = 1024, K = 512 };

static void (*sgemm)(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                     const float *b, int ldb, float beta, float *c, int ldc);
static moe_context *ctx;
static moe_queue *q;
static double seconds = 1;
static int failures, cases;

/* PoCL does not pin its threads by itself; pinning aborts where the process may not use CPUs 0, 1, ... */
static void set_environment(void)
{
  const long cpus = sysconf(_SC_NPROCESSORS_CONF);
  cpu_set_t set;
  int all = sched_getaffinity(0, sizeof set, &set) == 0;
  for (long i = 0; i < cpus && all; i++) all = CPU_ISSET((int)i, &set) != 0;
  if (all) setenv("POCL_AFFINITY", "1", 0);
  unsetenv("OPENBLAS_CORETYPE");
  unsetenv("OPENBLAS_L2_SIZE");
}

static int open_openblas(void)
{
  char *(*corename)(void) = NULL;
  int (*threads)(void) = NULL;
  void *library = dlopen("libopenblas.so.0", RTLD_NOW);
  if (!library) return 0;
  if (!find_symbol(library, "cblas_sgemm", &sgemm) || !find_symbol(library, "openblas_get_corename", &corename) ||
      !find_symbol(library, "openblas_get_num_threads", &threads))
    return 0;
  printf("OpenBLAS: kernel %s, %d threads\n", corename(), threads());
  return 1;
}

/* Values of a packed f32 tensor on both sides; values NULL: ints are given, or there is nothing to write. */
static moe_tensor tensor(int dtype, int rank, const int64_t *shape, const void *values)
{
  moe_tensor t;
  moe_span span;
  uint64_t bytes = moe_dtype_size(dtype);
  for (int d = 0; d < rank; d++) bytes *= (uint64_t)shape[d];
  must(moe_span_alloc(&span, ctx, bytes));
  must(moe_tensor_packed(&t, span, dtype, rank, shape));
  if (values) must(moe_span_write(q, span, values, bytes));
  return t;
}
static void release(moe_tensor *t)
{
  moe_span span = { t->handle, 0, 0 };
  moe_span_free(ctx, &span);
}

static float *random_values(int64_t n)
{
  static uint32_t state = 1;
  float *values = malloc((size_t)n * sizeof *values);
  if (!values) exit(1);
  for (int64_t i = 0; i < n; i++) {
    state = state * 1664525u + 1013904223u;
    values[i] = (float)(state >> 8) / (float)(1 << 23) - 1;
  }
  return values;
}

static double times[2];
/* Runs both sides in turn, the best times to `times`. */
#define RACE(blas, ours)                                                                                               \
  do {                                                                                                                 \
    double start_ = now(), end_;                                                                                       \
    times[0] = times[1] = INFINITY;                                                                                    \
    for (int i_ = 0; i_ < ROUNDS || now() - start_ < seconds; i_++) {                                                  \
      double t_ = now();                                                                                               \
      blas;                                                                                                            \
      end_ = now();                                                                                                    \
      if (end_ - t_ < times[0]) times[0] = end_ - t_;                                                                  \
      t_ = now();                                                                                                      \
      ours;                                                                                                            \
      must(moe_queue_wait(q));                                                                                         \
      end_ = now();                                                                                                    \
      if (end_ - t_ < times[1]) times[1] = end_ - t_;                                                                  \
    }                                                                                                                  \
  } while (0)

/* floor 0: none. */
static void report(const char *what, double flops, double floor, const float *want, moe_tensor *c, int64_t n)
{
  const double ratio = times[0] / times[1];
  double worst = 0;
  float *got = malloc((size_t)n * sizeof *got);
  moe_span span = { c->handle, 0, (uint64_t)n * sizeof *got };
  if (!got) exit(1);
  must(moe_span_read(q, got, span, span.bytes));
  for (int64_t i = 0; i < n; i++) {
    const double error = fabs((double)got[i] - (double)want[i]);
    if (!(error <= worst)) worst = error;
  }
  free(got);
  cases++;
  const int bad = !(worst < 1e-3) || ratio < floor;
  failures += bad;
  printf("%-36s OpenBLAS %6.1f  libmoe %6.1f GFLOP/s  ratio %5.2f", what, flops / times[0] * 1e-9,
         flops / times[1] * 1e-9, ratio);
  if (floor > 0) printf("  floor %.2f", floor);
  printf("%s%s\n", worst < 1e-3 ? "" : "  WRONG RESULT", bad ? "  FAILED" : "");
  fflush(stdout);
}

/* a [M,K] or its transpose, b [N,K] or its transpose: "NT" is the forward product of a linear layer. */
static void dense(int m, int n, int k, int ta, int tb, double floor)
{
  const int64_t as[2] = { ta ? k : m, ta ? m : k }, bs[2] = { tb ? n : k, tb ? k : n }, cs[2] = { m, n };
  float *a = random_values((int64_t)m * k), *b = random_values((int64_t)n * k), *c = random_values((int64_t)m * n);
  struct moe__args_gemm args = { .dtype = MOE_F32, .M = m, .N = n, .K = k, .alpha = 1 };
  char what[64];
  args.a = tensor(MOE_F32, 2, as, a);
  args.b = tensor(MOE_F32, 2, bs, b);
  args.c = tensor(MOE_F32, 2, cs, NULL);
  if (ta) must(moe_tensor_transpose(&args.a, &args.a, 0, 1));
  if (!tb) must(moe_tensor_transpose(&args.b, &args.b, 0, 1));
  must(moe__prepare_gemm(ctx, &args, MOE_AUTO));
  RACE(sgemm(ROW_MAJOR, ta ? TRANSPOSED : PLAIN, tb ? TRANSPOSED : PLAIN, m, n, k, 1, a, ta ? m : k, b, tb ? k : n, 0,
             c, n),
       must(moe__run_gemm(q, &args, MOE_AUTO)));
  snprintf(what, sizeof what, "dense %dx%dx%d %c%c", m, n, k, ta ? 'T' : 'N', tb ? 'T' : 'N');
  report(what, 2.0 * m * n * k, floor, c, &args.c, (int64_t)m * n);
  release(&args.a);
  release(&args.b);
  release(&args.c);
  free(a);
  free(b);
  free(c);
}

/* T tokens over E experts: as many each, or drawn with weights 1, 1/2, 1/3, ... */
static void share_out(int32_t *offs, int E, int T, int skewed)
{
  uint32_t state = 7;
  double total = 0;
  memset(offs, 0, ((size_t)E + 1) * sizeof *offs);
  for (int e = 0; e < E; e++) total += 1.0 / (e + 1);
  for (int t = 0; t < T; t++) {
    int e = t % E;
    if (skewed) {
      double place;
      state = state * 1664525u + 1013904223u;
      place = (double)state / 4294967296.0 * total;
      for (e = 0; e < E - 1 && place > 1.0 / (e + 1); e++) place -= 1.0 / (e + 1);
    }
    offs[e + 1]++;
  }
  for (int e = 0; e < E; e++) offs[e + 1] += offs[e];
}

/* Weights [E,N,K] ("NT") or [E,K,N] ("NN"). */
static void grouped(int E, int T, int skewed, int tb, double floor)
{
  const int64_t as[2] = { T, K }, bs[3] = { E, tb ? N : K, tb ? K : N }, cs[2] = { T, N }, os[1] = { E + 1 };
  float *a = random_values((int64_t)T * K), *b = random_values((int64_t)E * N * K), *c = random_values((int64_t)T * N);
  int32_t *offs = malloc(((size_t)E + 1) * sizeof *offs);
  struct moe__args_ggemm_rows args = { .dtype = MOE_F32, .R = T, .E = E, .N = N, .K = K, .div = 1 };
  char what[64];
  if (!offs) exit(1);
  share_out(offs, E, T, skewed);
  args.a = tensor(MOE_F32, 2, as, a);
  args.b[0] = tensor(MOE_F32, 3, bs, b);
  args.c = tensor(MOE_F32, 2, cs, NULL);
  args.offs = tensor(MOE_I32, 1, os, offs);
  if (!tb) must(moe_tensor_transpose(&args.b[0], &args.b[0], 1, 2));
  must(moe__prepare_ggemm_rows(ctx, &args, MOE_AUTO));
  RACE(for (int e = 0; e < E; e++) if (offs[e + 1] > offs[e])
           sgemm(ROW_MAJOR, PLAIN, tb ? TRANSPOSED : PLAIN, offs[e + 1] - offs[e], N, K, 1, a + (int64_t)offs[e] * K, K,
                 b + (int64_t)e * N * K, tb ? K : N, 0, c + (int64_t)offs[e] * N, N),
       must(moe__run_ggemm_rows(q, &args, MOE_AUTO)));
  snprintf(what, sizeof what, "%d experts, %d tokens, %s, %s", E, T, skewed ? "skewed" : "even", tb ? "NT" : "NN");
  report(what, 2.0 * T * N * K, floor, c, &args.c, (int64_t)T * N);
  release(&args.a);
  release(&args.b[0]);
  release(&args.c);
  release(&args.offs);
  free(a);
  free(b);
  free(c);
  free(offs);
}

int main(int argc, char **argv)
{
  moe_context_desc desc = moe_context_desc_init();
  struct moe__args_gemm probe = { .dtype = MOE_F32 };
  struct moe__why why;
  if (argc > 1) seconds = atof(argv[1]);
  set_environment();
  desc.device = "opencl:cpu";
  if (moe_context_create(&ctx, &desc)) {
    printf("skipped: %s\n", moe_last_error());
    return 77;
  }
  if (!open_openblas()) {
    printf("skipped: libopenblas.so.0 cannot be opened (Debian, Ubuntu: libopenblas0-pthread)\n");
    return 77;
  }
  must(moe_queue_create(&q, ctx));
  printf("libmoe: %s, %s, %lld compute units\n", moe__pick_gemm(ctx, &probe, MOE_AUTO, &why)->id, ctx->info->pub.name,
         (long long)ctx->info->pub.compute_units);

  for (int size = 512; size <= 1024; size *= 2)
    for (int i = 0; i < 4; i++) dense(size, size, size, i / 2, i % 2, 0.85);
  for (int i = 0; i < 8; i++) grouped(i / 4 ? 64 : 8, 4096, i / 2 % 2, i % 2, 0.95);
  for (int i = 0; i < 2; i++) grouped(64, 64, 1, i, 1.5);
  /* No floors: one row an expert streams all weights from memory on both sides. */
  for (int i = 0; i < 2; i++) grouped(64, 64, 0, i, 0);
  for (int i = 0; i < 4; i++) grouped(8, 64, i / 2, i % 2, 0);

  printf("%d cases, %d failures\n", cases, failures);
  moe_queue_free(q);
  moe_context_free(ctx);
  return failures != 0;
}
