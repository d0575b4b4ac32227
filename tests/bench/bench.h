/* bench.h - what the benchmarks share: clocks, lanes that are timed in turn, and CUDA's own libraries, which are
   opened at run time so that no build needs them. */
#ifndef MOE_BENCH_H
#define MOE_BENCH_H

#include <moe/context.h>

/* Prints what failed and ends the program. */
void must(moe_status status);
_Noreturn void give_up(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *allocate(size_t n, size_t size);
/* Seconds, monotonic. */
double now(void);
/* The symbol of a library (from dlopen) as the pointer to a function that the caller wants; 0 where there is none. */
int find_symbol(void *library, const char *name, void *function);

/* ---- the device under test ------------------------------------------------------------------------------------- */
struct bench {
  moe_context *ctx;
  moe_queue *q; /* over `stream` on CUDA */
  moe_device_info info;
  struct CUstream_st *stream; /* NULL: not CUDA, or its runtime library was not found */
  char driver[80];            /* NVIDIA's driver, where NVML tells */
  char cublas[80];            /* "13.0.2", or why there is none */
  int has_cublas;
  int cold;          /* the L2 cache is overwritten before each timed call */
  int rounds;        /* timed */
  double warm;       /* seconds of untimed rounds before them (one at least) */
  double mhz, watts; /* near the end of the last race; 0: unknown */
};
extern struct bench bench;

/* Opens the device and, on CUDA, a stream of the CUDA runtime and cuBLAS; `libraries` is a folder to look for them
   first, or NULL.  MOE_ERR_NO_DEVICE is returned, other failures end the program. */
moe_status bench_open(const char *device, const char *libraries);
void bench_close(void);

/* ---- time -------------------------------------------------------------------------------------------------------- */
/* A point of the queue: a CUDA event, elsewhere the clock after a wait. */
struct point {
  void *event;
  double at;
};
void point_set(struct point *p);
/* Milliseconds from a to b; waits for b. */
double point_ms(const struct point *a, const struct point *b);
void point_free(struct point *p);

/* Where bench.cold is set: overwrites the L2 cache. */
void flush_cache(void);

enum { MOST_ROUNDS = 1000 };
/* Calls that are timed in turn with others. */
struct lane {
  void (*run)(void *user);
  void *user;
  const struct point *middle; /* opt: set by run; times count from there, and `whole` from the start */
  struct point start, end;
  double ms[MOST_ROUNDS], whole[MOST_ROUNDS];
};
/* Warms up, then takes bench.rounds times of each lane, one after another in each round. */
void race(struct lane *const *lanes, int n);
void lane_free(struct lane *lane);

struct spread {
  double median, low, high; /* low, high: quartiles */
};
struct spread spread_of(const double *ms, int n);

/* ---- CUDA: graphs, and cuBLAS ------------------------------------------------------------------------------------ */
/* What run(user) enqueues, as a graph; NULL where there is no CUDA stream. */
struct graph;
struct graph *graph_capture(void (*run)(void *user), void *user);
void graph_run(void *graph);
void graph_free(struct graph *graph);

/* NT: c[M,N] = a[M,K] b[N,K]'   NN: c = a[M,K] b[K,N]   TN: c = a[K,M]' b[K,N];  E of each, packed one behind another;
   a and b in dtype, c in c_dtype, sums in FP32. */
enum layout { NT, NN, TN };
void cublas_products(enum layout layout, int64_t E, int64_t M, int64_t N, int64_t K, const moe_tensor *a,
                     const moe_tensor *b, const moe_tensor *c);

#endif
