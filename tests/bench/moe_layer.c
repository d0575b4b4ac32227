/* moe_layer.c - times of the routed expert branch, forward and backward, and of single operations, beside what the
   device can do in the same run: a large copy, a dense product, and the layer's products in cuBLAS.

   What is timed: moe_experts_forward and moe_experts_backward over inputs of order 1 and the top K of random logits.
   "forward" counts from the end of the plan, so that router, selection, routing weights and plan are outside, as
   peers are timed; `whole` is all of the call (selection, weights, plan and branch; the router's own product is not
   part of moe_experts).  "backward" is all of the call: dx, dlogits and weight gradients in the layer's dtype, and
   again with FP32 weight gradients.  Times are medians of single calls; calls of libmoe and of the bound take turns.
   Useful operations: 6*R*D*F forward, 12*R*D*F backward.

   0: measured, 1: an error, 2: wrong usage, 77: no such device. */
#include "moe_layer.h"

#include <jansson.h>
#include <moe/experts.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct shape shapes[] = {
  { "small", 8192, 768, 256, 64, 4, 1 },           { "s-7b-256", 24576, 1536, 256, 128, 8, 1 },
  { "s-30b-512", 32768, 4096, 512, 128, 8, 1 },    { "s-120b-1024", 32768, 4096, 1024, 128, 8, 1 },
  { "olmoe", 32768, 2048, 1024, 64, 8, 1 },        { "qwen3-30b", 32768, 2048, 768, 128, 8, 1 },
  { "qwen3-30b-8k", 8192, 2048, 768, 128, 8, 1 },  { "mixtral-8k", 8192, 4096, 14336, 8, 2, 1 },
  { "deepseek-v3", 16384, 7168, 2048, 256, 8, 1 }, { "gpt-oss-120b", 16384, 2880, 2880, 128, 4, 1 },
  { "qwen3-235b", 32768, 4096, 1536, 128, 8, 0 },  { "mixtral", 16384, 4096, 14336, 8, 2, 0 },
  { "s-1.4b-256", 40960, 768, 256, 128, 8, 0 },    { "s-1.4b-512", 40960, 768, 512, 64, 4, 0 },
  { "s-1.4b-1024", 40960, 768, 1024, 32, 2, 0 },   { "s-7b-512", 24576, 1536, 512, 64, 4, 0 },
  { "s-7b-1024", 24576, 1536, 1024, 32, 2, 0 },    { "s-30b-256", 32768, 4096, 256, 256, 16, 0 },
  { "s-30b-1024", 32768, 4096, 1024, 64, 4, 0 },   { "s-120b-512", 32768, 4096, 512, 256, 16, 0 },
  { "s-120b-2048", 32768, 4096, 2048, 64, 4, 0 },
};
enum { SHAPES = sizeof shapes / sizeof *shapes, MOST_ASKED = 64 };

/* ---- options ----------------------------------------------------------------------------------------------------- */
static const char usage[] =
    "usage: moe_layer [OPTION...]\n"
    "  --device NAME       cuda, opencl:gpu, opencl:cpu, ... [the best there is]\n"
    "  --shape NAME        a shape of --list, T,D,F,E,K, `targets' or `all'; may be repeated\n"
    "                      [CUDA: targets; elsewhere: small]\n"
    "  --dtype TYPE        bf16, f16 or f32 [GPU: bf16; CPU: f32]\n"
    "  --strategy NAME     auto, scalar or tensor [auto]\n"
    "  --router NAME       even, zipf (experts with odds 1, 1/2, 1/3, ...) or both [both]\n"
    "  --scale N           tokens divided by N [CPU: 16; elsewhere: 1]\n"
    "  --rounds N          timed calls of each kind [GPU: 25; CPU: 5]\n"
    "  --warm SECONDS      untimed before them [GPU: 0.5; CPU: 0]\n"
    "  --l2 cold|warm      whether the cache is overwritten before each call [GPU: cold; CPU: warm]\n"
    "  --graph             also as replayed CUDA graphs (the shape small always is)\n"
    "  --steps             also print each step of the calls\n"
    "  --no-ops            without the single operations\n"
    "  --products          also the branch's products, by each implementation on matrix units\n"
    "  --no-branch         without the branch\n"
    "  --cuda-libs DIR     where libcudart.so and libcublas.so are looked for first\n"
    "  --json FILE         everything as one JSON object\n"
    "  --list              print the shapes and run nothing\n";

struct options {
  const char *device, *libraries, *json, *router;
  struct shape asked[MOST_ASKED];
  int n_asked, graph, steps, ops, products, branch, list, cold;
  int64_t dtype, strategy, scale;
};

static void ask_for(struct options *o, struct shape shape)
{
  if (o->n_asked < MOST_ASKED) o->asked[o->n_asked++] = shape;
}

/* Returns whether there is such a shape. */
static int ask_by_name(struct options *o, const char *name)
{
  long long n[5];
  char rest;
  int before = o->n_asked;
  for (int i = 0; i < SHAPES; i++)
    if (!strcmp(name, shapes[i].name) || !strcmp(name, "all") || (shapes[i].target && !strcmp(name, "targets")))
      ask_for(o, shapes[i]);
  if (sscanf(name, "%lld,%lld,%lld,%lld,%lld%c", &n[0], &n[1], &n[2], &n[3], &n[4], &rest) == 5)
    ask_for(o, (struct shape){ "given", n[0], n[1], n[2], n[3], n[4], 0 });
  return o->n_asked > before;
}

/* The place of a word in a list that ends with NULL; -1 where it is not there. */
static int place_of(const char *word, const char *const *list)
{
  int i = 0;
  while (list[i] && strcmp(word, list[i])) i++;
  return list[i] ? i : -1;
}

static int parse(struct options *o, int argc, char **argv)
{
  static const char *const dtypes[] = { "f32", "bf16", "f16", NULL };
  static const char *const strategies[] = { "auto", "scalar", "tensor", NULL };
  static const char *const routers[] = { "even", "zipf", "both", NULL };
  static const char *const caches[] = { "warm", "cold", NULL };
  int i, at = 0;
  for (i = 1; i < argc && at >= 0; i++) {
    const char *option = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
    if (!strcmp(option, "--graph")) o->graph = 1;
    else if (!strcmp(option, "--steps")) o->steps = 1;
    else if (!strcmp(option, "--no-ops")) o->ops = 0;
    else if (!strcmp(option, "--products")) o->products = 1;
    else if (!strcmp(option, "--no-branch")) o->branch = 0;
    else if (!strcmp(option, "--list")) o->list = 1;
    else if (!value) return 0;
    else {
      i++;
      if (!strcmp(option, "--device")) o->device = value;
      else if (!strcmp(option, "--cuda-libs")) o->libraries = value;
      else if (!strcmp(option, "--json")) o->json = value;
      else if (!strcmp(option, "--scale")) at = (o->scale = atoll(value)) >= 1 ? 0 : -1;
      else if (!strcmp(option, "--rounds"))
        at = (bench.rounds = atoi(value)) >= 1 && bench.rounds <= MOST_ROUNDS ? 0 : -1;
      else if (!strcmp(option, "--warm")) bench.warm = atof(value);
      else if (!strcmp(option, "--shape")) at = ask_by_name(o, value) ? 0 : -1;
      else if (!strcmp(option, "--dtype")) o->dtype = MOE_F32 + (at = place_of(value, dtypes));
      else if (!strcmp(option, "--strategy")) o->strategy = at = place_of(value, strategies);
      else if (!strcmp(option, "--l2")) o->cold = at = place_of(value, caches);
      else if (!strcmp(option, "--router")) {
        at = place_of(value, routers);
        o->router = value;
      } else return 0;
    }
  }
  return at >= 0;
}

/* What was not asked for, by the kind of device. */
static void set_defaults(struct options *o)
{
  const int gpu = bench.info.kind == MOE_DEVICE_GPU;
  if (!o->n_asked) ask_by_name(o, strcmp(bench.info.backend, "cuda") ? "small" : "targets");
  if (!o->dtype) o->dtype = gpu ? MOE_BF16 : MOE_F32;
  if (!o->scale) o->scale = gpu ? 1 : 16;
  if (!bench.rounds) bench.rounds = gpu ? 25 : 5;
  if (bench.warm < 0) bench.warm = gpu ? 0.5 : 0;
  bench.cold = o->cold >= 0 ? o->cold : gpu;
}

/* ---- output ------------------------------------------------------------------------------------------------------ */
static json_t *spread_json(struct spread s)
{
  return json_pack("{s:f, s:f, s:f}", "median", s.median, "low", s.low, "high", s.high);
}

static double rate(double amount, double ms)
{
  return ms > 0 ? amount / (1e-3 * ms) : 0;
}

/* "0.93", or "-" where there is nothing to compare with. */
static const char *share(char text[16], double of, double ms)
{
  if (of > 0) snprintf(text, 16, "%.2f", of / ms);
  else snprintf(text, 16, "-");
  return text;
}

static const char *milliseconds(char text[16], double ms)
{
  if (ms > 0) snprintf(text, 16, "%.3f", ms);
  else snprintf(text, 16, "-");
  return text;
}

static json_t *figure_json(const struct figure *f)
{
  return json_pack("{s:s, s:f, s:o, s:o, s:f, s:f, s:o, s:f}", "what", f->what, "flops", f->flops, "ms",
                   spread_json(f->ms), "whole_ms", spread_json(f->whole), "tflops",
                   1e-12 * rate(f->flops, f->ms.median), "floor_ms", f->floor_ms, "bound_ms", spread_json(f->bound),
                   "bound_tflops", 1e-12 * rate(f->flops, f->bound.median));
}

static void print_figure(const struct figure *f)
{
  char of_floor[16], of_bound[16], bound[16];
  printf("  %-24s %9.3f %9.3f..%-9.3f %9.3f %8s %9s %8s", f->what, f->ms.median, f->ms.low, f->ms.high,
         1e-12 * rate(f->flops, f->ms.median), share(of_floor, f->floor_ms, f->ms.median),
         milliseconds(bound, f->bound.median), share(of_bound, f->bound.median, f->ms.median));
  if (f->whole.median > f->ms.median) printf(" %9.3f", f->whole.median);
  putchar('\n');
}

static json_t *result_json(const struct shape *s, const char *router, const struct result *r)
{
  json_t *figures = json_array(), *steps = json_array();
  for (int i = 0; i < r->n_figures; i++) json_array_append_new(figures, figure_json(&r->figures[i]));
  for (int i = 0; i < r->n_steps; i++)
    json_array_append_new(
        steps, json_pack("{s:s, s:s, s:f}", "step", r->steps[i].label, "impl", r->steps[i].impl, "ms", r->steps[i].ms));
  return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I, s:f, s:f, s:f, s:f, s:o, s:o, s:s}", "shape", s->name,
                   "T", (json_int_t)s->T, "D", (json_int_t)s->D, "F", (json_int_t)s->F, "E", (json_int_t)s->E, "K",
                   (json_int_t)s->K, "router", router, "fewest_rows", (json_int_t)r->fewest, "most_rows",
                   (json_int_t)r->most, "kept_mib", r->kept / 1048576, "scratch_mib", r->scratch / 1048576, "sm_mhz",
                   r->mhz, "watts", r->watts, "figures", figures, "steps", steps, "explain", r->explain);
}

static void print_result(const struct shape *s, const char *router, const struct result *r, int steps)
{
  printf("\n%s (T,D,F,E,K = %lld,%lld,%lld,%lld,%lld), %s router: %lld to %lld rows of an expert; kept %.1f MiB, "
         "scratch %.1f MiB",
         s->name, (long long)s->T, (long long)s->D, (long long)s->F, (long long)s->E, (long long)s->K, router,
         (long long)r->fewest, (long long)r->most, r->kept / 1048576, r->scratch / 1048576);
  if (r->mhz > 0) printf("; %.0f MHz, %.0f W", r->mhz, r->watts);
  printf("\n  %-24s %9s %20s %9s %8s %9s %8s %9s\n", "", "ms", "quartiles", "TFLOP/s", "of floor", "bound ms",
         "of bound", "whole ms");
  for (int i = 0; i < r->n_figures; i++) print_figure(&r->figures[i]);
  for (int i = 0; i < r->n_steps && steps; i++)
    printf("    %-30s %9.3f ms  %s\n", r->steps[i].label, r->steps[i].ms, r->steps[i].impl);
  fflush(stdout);
}

static void run_shape(const struct shape *asked, const struct options *o, json_t *results)
{
  static const char *const routers[] = { "even", "zipf" };
  struct shape s = *asked;
  struct result *r = allocate(1, sizeof *r);
  s.T = s.T / o->scale > 0 ? s.T / o->scale : 1;
  struct branch *b = branch_open(&s, o->dtype, o->strategy);
  if (!b) {
    printf("\n%s: skipped: %s\n", s.name, moe_last_error());
    json_array_append_new(results, json_pack("{s:s, s:s}", "shape", s.name, "skipped", moe_last_error()));
  }
  for (int zipf = 0; zipf < 2 && b; zipf++) {
    if (strcmp(o->router, "both") && strcmp(o->router, routers[zipf])) continue;
    branch_route(b, zipf);
    branch_measure(b, o->graph || !strcmp(s.name, "small"), r);
    print_result(&s, routers[zipf], r, o->steps);
    json_array_append_new(results, result_json(&s, routers[zipf], r));
    free(r->explain);
  }
  if (b) branch_close(b);
  free(r);
}

static void run_ops(const struct shape *asked, const struct options *o, json_t *list)
{
  struct op_figure figures[MOST_OPS];
  struct shape s = *asked;
  s.T = s.T / o->scale > 0 ? s.T / o->scale : 1;
  const int n = measure_ops(figures, &s, o->dtype);
  printf("\n%-14s %10s %20s %9s %8s  %s\n", s.name, "us", "quartiles", "GB/s", "of copy", "implementation");
  for (int i = 0; i < n; i++) {
    const struct op_figure *f = &figures[i];
    const double bytes = rate(f->bytes, f->ms.median);
    printf("  %-12s %10.1f %9.1f..%-9.1f %9.1f %8.2f  %s\n", f->op, 1e3 * f->ms.median, 1e3 * f->ms.low,
           1e3 * f->ms.high, 1e-9 * bytes, bytes / peaks.bytes, f->impl);
    json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:f, s:o, s:f}", "op", f->op, "shape", s.name, "impl",
                                          f->impl, "bytes", f->bytes, "ms", spread_json(f->ms), "gbs", 1e-9 * bytes));
  }
  fflush(stdout);
}

static void run_products(const struct shape *asked, const struct options *o, json_t *list)
{
  struct op_figure figures[MOST_PRODUCTS];
  struct shape s = *asked;
  s.T = s.T / o->scale > 0 ? s.T / o->scale : 1;
  const int n = measure_products(figures, &s, o->dtype);
  printf("\n%s (T,D,F,E,K = %lld,%lld,%lld,%lld,%lld)\n  %-12s %10s %20s %9s %8s  %s\n", s.name, (long long)s.T,
         (long long)s.D, (long long)s.F, (long long)s.E, (long long)s.K, "", "ms", "quartiles", "TFLOP/s", "of dense",
         "implementation");
  for (int i = 0; i < n; i++) {
    const struct op_figure *f = &figures[i];
    const double flops = rate(f->flops, f->ms.median);
    printf("  %-12s %10.3f %9.3f..%-9.3f %9.1f %8.2f  %s\n", f->op, f->ms.median, f->ms.low, f->ms.high, 1e-12 * flops,
           peaks.flops > 0 ? flops / peaks.flops : 0, f->impl);
    json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:I, s:I, s:f, s:o, s:f}", "product", f->op, "shape", s.name,
                                          "impl", f->impl, "D", (json_int_t)s.D, "F", (json_int_t)s.F, "flops",
                                          f->flops, "ms", spread_json(f->ms), "tflops", 1e-12 * flops));
  }
  fflush(stdout);
}

static char *joined(int argc, char **argv)
{
  size_t n = 1;
  for (int i = 0; i < argc; i++) n += strlen(argv[i]) + 1;
  char *line = allocate(n, 1);
  for (int i = 0; i < argc; i++) {
    if (i) strcat(line, " ");
    strcat(line, argv[i]);
  }
  return line;
}

static json_t *heading(const struct options *o, int argc, char **argv)
{
  const time_t seconds = time(NULL);
  char date[32] = "", *command = joined(argc, argv);
  struct tm utc;
  if (gmtime_r(&seconds, &utc)) strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
  printf("%s: %s, %s%s%s; libmoe %s; cuBLAS: %s\n", bench.info.id, bench.info.name, bench.info.driver,
         bench.driver[0] ? ", " : "", bench.driver, moe_version_string(), bench.cublas);
  printf("%s, %s, medians of %d rounds; a copy moves %.1f GB/s", moe_dtype_name(o->dtype),
         bench.cold ? "L2 cache overwritten before each call" : "caches as the calls before left them", bench.rounds,
         1e-9 * peaks.bytes);
  if (peaks.flops > 0) printf(", a dense product runs at %.1f TFLOP/s", 1e-12 * peaks.flops);
  putchar('\n');
  json_t *all = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:b, s:b, s:i, s:I, s:f, s:f}", "bench",
                          "moe_layer", "date", date, "command", command, "device", bench.info.name, "id", bench.info.id,
                          "runtime", bench.info.driver, "driver", bench.driver, "library", moe_version_string(),
                          "cublas", bench.cublas, "dtype", moe_dtype_name(o->dtype), "cuda_events",
                          bench.stream != NULL, "l2_cold", bench.cold, "rounds", bench.rounds, "scale",
                          (json_int_t)o->scale, "copy_gbs", 1e-9 * peaks.bytes, "dense_tflops", 1e-12 * peaks.flops);
  free(command);
  return all;
}

static void list_shapes(void)
{
  printf("%-14s %7s %6s %6s %5s %3s\n", "", "T", "D", "F", "E", "K");
  for (int i = 0; i < SHAPES; i++)
    printf("%-14s %7lld %6lld %6lld %5lld %3lld%s\n", shapes[i].name, (long long)shapes[i].T, (long long)shapes[i].D,
           (long long)shapes[i].F, (long long)shapes[i].E, (long long)shapes[i].K, shapes[i].target ? "  target" : "");
}

int main(int argc, char **argv)
{
  struct options o = { .router = "both", .ops = 1, .branch = 1, .cold = -1 };
  bench.warm = -1;
  if (argc == 2 && !strcmp(argv[1], "--help")) {
    fputs(usage, stdout);
    return 0;
  }
  if (!parse(&o, argc, argv)) {
    fputs(usage, stderr);
    return 2;
  }
  if (o.list) {
    list_shapes();
    return 0;
  }
  if (bench_open(o.device, o.libraries)) {
    printf("skipped: %s\n", moe_last_error());
    return 77;
  }
  set_defaults(&o);
  measure_peaks(o.dtype);
  json_t *all = heading(&o, argc, argv), *results = json_array(), *ops = json_array(), *products = json_array();
  for (int i = 0; i < o.n_asked && o.branch; i++) run_shape(&o.asked[i], &o, results);
  for (int i = 0; i < o.n_asked && o.ops; i++) run_ops(&o.asked[i], &o, ops);
  for (int i = 0; i < o.n_asked && o.products; i++) run_products(&o.asked[i], &o, products);
  json_object_set_new(all, "shapes", results);
  json_object_set_new(all, "ops", ops);
  json_object_set_new(all, "products", products);
  if (o.json && json_dump_file(all, o.json, JSON_INDENT(1) | JSON_REAL_PRECISION(8)))
    give_up("bench: %s cannot be written", o.json);
  json_decref(all);
  bench_close();
  return 0;
}
