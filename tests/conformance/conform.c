/* conform.c - moe-conform: runs every op on one device, each implementation in turn, against the reference in
   double, and prints the worst error of each as a share of its bound.  Its lines are CMocka's. */
#include "conform.h"

#include "core/backend.h"

#include "config.h"

#include <moe/experts.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_LINES = 8 }; /* failures printed for one implementation */

/* ---- cases ---------------------------------------------------------------------------------------------------- */
const int64_t c_dtypes[C_DTYPES] = { MOE_F32, MOE_F64, MOE_BF16, MOE_F16 };

int64_t c_float(int64_t call, int64_t i)
{
  static const int64_t real64[2] = { MOE_F64, MOE_F32 }, others[3] = { MOE_F32, MOE_BF16, MOE_F16 };
  return call == MOE_F64 ? real64[i % 2] : others[i % 3];
}

int c_layout(int64_t i)
{
  static const int layouts[5] = { T_PACKED, T_PAD, T_SWAP, T_STEP | T_PAD, T_ODD };
  return layouts[i % 5];
}

int32_t *c_ids(struct conform *c, int64_t T, int64_t K, int64_t E, int pattern)
{
  int32_t *ids = t_ints(&c->m, T * K);
  for (int64_t i = 0; i < T * K; i++) {
    int64_t t = i / K, k = i % K, tries = 0;
    int64_t id = pattern == 1 ? E - 1 - k : pattern == 2 ? (t + k) % ((E + 1) / 2) : t_below(&c->m, E);
    for (int64_t j = 0; j < k && tries <= E; j++)
      if (ids[t * K + j] == id) {
        id = (id + 1) % E;
        tries++;
        j = -1;
      }
    ids[i] = (int32_t)id;
  }
  return ids;
}

int c_begin(struct conform *c, int64_t dtype, const char *format, ...)
{
  moe_device_info info = c->ctx->info->pub;
  if (c->broken || (dtype == MOE_F64 && !(info.fp64 && (!c->other || c->other->info->pub.fp64)))) return 0;
  va_list list;
  va_start(list, format);
  int n = snprintf(c->name, sizeof c->name, "%s ", moe_dtype_name(dtype));
  vsnprintf(c->name + n, sizeof c->name - (size_t)n, format, list);
  va_end(list);
  ref_arithmetic(dtype);
  ref_addition = c->tensor ? 2 : 1;
  uint64_t seed = 0;
  for (const char *p = c->name; *p; p++) seed = seed * 31 + (unsigned char)*p;
  t_memory_init(&c->m, c->ctx, c->q, seed);
  if (c->effort == SMALL) c->m.guard = 0;
  c->m.twin_ctx = c->other;
  c->m.twin_q = c->other_q;
  c->compare = 0;
  return 1;
}

void c_exact(void)
{
  ref_arithmetic(MOE_NONE);
}

void c_end(struct conform *c)
{
  t_memory_free(&c->m);
}

void c_fail(struct conform *c, const char *format, ...)
{
  if (c->failures++ >= MOST_LINES) return;
  va_list list;
  va_start(list, format);
  printf("  %s, %s: ", c->id, c->name);
  vprintf(format, list);
  putchar('\n');
  va_end(list);
}

moe_tensor c_in(struct conform *c, int64_t dtype, int layout, const num *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&c->m, dtype, layout, rank, shape);
  t_put(&c->m, &t, values);
  return t;
}

moe_tensor c_in_ints(struct conform *c, const int32_t *values, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&c->m, MOE_I32, T_ODD, rank, shape);
  t_put_ints(&c->m, &t, values);
  return t;
}

moe_tensor c_out(struct conform *c, int64_t dtype, int layout, int rank, const int64_t *shape)
{
  moe_tensor t = t_tensor(&c->m, dtype, layout, rank, shape);
  t_own(&c->m, &t);
  return t;
}

moe_tensor c_inout(struct conform *c, int64_t dtype, int layout, const num *values, int rank, const int64_t *shape)
{
  moe_tensor t = c_in(c, dtype, layout, values, rank, shape);
  t_own(&c->m, &t);
  return t;
}

moe_tensor c_flat(const moe_tensor *t)
{
  moe_tensor flat = { .handle = t->handle, .offset = t->offset, .dtype = t->dtype, .rank = 1 };
  flat.shape[0] = moe_tensor_count(t);
  flat.stride[0] = 1;
  return flat;
}

moe_tensor c_health(struct conform *c)
{
  int32_t zero = 0;
  moe_tensor t = c_in_ints(c, &zero, SHAPE(1));
  t_own(&c->m, &t);
  return t;
}

/* "name[3,4]" */
static const char *element(char text[96], const char *what, const moe_tensor *t, int64_t at)
{
  int64_t index[MOE_RANK_MAX] = { 0 };
  for (int d = t->rank - 1; d >= 0; d--) {
    index[d] = at % t->shape[d];
    at /= t->shape[d];
  }
  int n = snprintf(text, 96, "%s", what);
  for (int d = 0; d < t->rank; d++)
    n += snprintf(text + n, 96 - (size_t)n, "%c%lld", d ? ',' : '[', (long long)index[d]);
  snprintf(text + n, 96 - (size_t)n, "]");
  return text;
}

void c_check_values(struct conform *c, const char *what, const moe_tensor *t, const double *got, const num *want)
{
  char where[96];
  int64_t n = moe_tensor_count(t);
  struct ref_worst w = ref_compare(got, want, n, t->dtype);
  if (w.at < 0) return;
  if (w.failed)
    c_fail(c, "%s is %.9g, wanted %.9g within %.3g (%lld of %lld elements)", element(where, what, t, w.at), w.got,
           w.want, w.bound, (long long)w.failed, (long long)n);
  if (!(w.share <= c->share)) {
    c->share = w.share;
    snprintf(c->worst, sizeof c->worst, "%s of %s", element(where, what, t, w.at), c->name);
  }
}

int c_other(struct conform *c, const moe_tensor *t, double *values)
{
  int64_t n = moe_tensor_count(t);
  if (!c->compare) return 0;
  t_get_twin(&c->m, t, values);
  if (c->spoil && n) values[n / 2] = values[n / 2] > 0 ? -1 - values[n / 2] : 1 - 3 * values[n / 2]; /* NaN stays */
  return 1;
}

/* What the two devices gave for a value: each may be off by its bound. */
static void compare_other(struct conform *c, const char *what, const moe_tensor *t, const double *got, const num *want)
{
  char where[96];
  int64_t n = moe_tensor_count(t);
  double *other = t_host(&c->m, n, sizeof *other);
  if (!c_other(c, t, other)) return;
  struct ref_worst w = ref_compare_two(got, other, want, n, t->dtype, c->times);
  if (w.at < 0) return;
  if (w.failed)
    c_fail(c, "%s is %.9g, and %.9g on %s: apart by more than %.3g (%lld of %lld elements)",
           element(where, what, t, w.at), w.got, w.want, c->other->info->pub.id, w.bound, (long long)w.failed,
           (long long)n);
  if (!(w.share <= c->apart_share)) {
    c->apart_share = w.share;
    snprintf(c->apart, sizeof c->apart, "%s of %s", element(where, what, t, w.at), c->name);
  }
}

void c_check(struct conform *c, const char *what, const moe_tensor *t, const num *want)
{
  double *got = t_host(&c->m, moe_tensor_count(t), sizeof *got);
  t_get(&c->m, t, got);
  c_check_values(c, what, t, got, want);
  compare_other(c, what, t, got, want);
}

void c_check_ints(struct conform *c, const char *what, const moe_tensor *t, const int32_t *want)
{
  char where[96];
  int64_t n = moe_tensor_count(t);
  int32_t *got = t_ints(&c->m, n);
  double *other = t_host(&c->m, n, sizeof *other);
  int compare = c_other(c, t, other);
  t_get_ints(&c->m, t, got);
  for (int64_t i = 0; i < n; i++) {
    if (got[i] == want[i] && !(compare && other[i] != want[i])) continue;
    if (got[i] != want[i]) c_fail(c, "%s is %d, wanted %d", element(where, what, t, i), (int)got[i], (int)want[i]);
    else
      c_fail(c, "%s is %d, and %.9g on %s", element(where, what, t, i), (int)got[i], other[i], c->other->info->pub.id);
    return;
  }
}

/* ---- the implementation under test, forced ---------------------------------------------------------------------- */
static int ready(struct conform *c, const char *program, int64_t dtype)
{
  if (program[0] && c->ctx->be->program(c->ctx->dev, program, (int)dtype)) {
    c_fail(c, "%s", moe_last_error());
    c->broken = 1;
    return 0;
  }
  c->cases++;
  return 1;
}

/* After a run: waits, looks at what it wrote and, after the first time, whether it wrote the same. */
static int finished(struct conform *c, moe_status status, int pass)
{
  if (!status) status = moe_queue_wait(c->q);
  if (!status) {
    t_download(&c->m);
    status = c->m.status;
  }
  if (status) {
    c_fail(c, "%s: %s", moe_strerror(status), moe_last_error());
    return 0;
  }
  const char *touched = t_guards(&c->m);
  if (touched) c_fail(c, "%s", touched);
  else if (pass > 0 && !t_repeats(&c->m)) c_fail(c, "another run gave other bits");
  return 1;
}

static void finished_other(struct conform *c, moe_status status, const char *id, int tensor)
{
  if (!status) status = moe_queue_wait(c->other_q);
  if (!status) {
    t_download_twin(&c->m);
    status = c->m.status;
  }
  if (status) c_fail(c, "%s on %s: %s: %s", id, c->other->info->pub.id, moe_strerror(status), moe_last_error());
  c->compare = !status;
  c->times = tensor && !c->tensor ? 3 : 2; /* sums on matrix units may err twice as much (ref_addition) */
}

/* The same case on the other device, from the same bytes: by the implementation of that name where it has it, else
   by the first that can. */
#define OP(op, family)                                                                                                 \
  static void run_other_##op(struct conform *c, const struct moe__args_##op *args)                                     \
  {                                                                                                                    \
    struct moe__args_##op there = *args;                                                                               \
    const struct moe__impl_##op *impl = NULL, *at;                                                                     \
    struct moe__why why;                                                                                               \
    if (!c->other || c->m.has_huge) return;                                                                            \
    t_for_twin(&c->m, &there, sizeof there);                                                                           \
    for (int i = 0; (at = moe__impl_##op##_at(c->other, i)); i++)                                                      \
      if (!strcmp(at->id, c->id) && !at->can(c->other->info, &there, &why)) impl = at;                                 \
    if (!impl) impl = moe__pick_##op(c->other, &there, MOE_AUTO, &why);                                                \
    if (!impl) return; /* it has none for such optional parts of an op */                                              \
    moe_status st = impl->program[0] ? c->other->be->program(c->other->dev, impl->program, (int)there.dtype) : MOE_OK; \
    if (!st) t_upload_twin(&c->m);                                                                                     \
    if (!st) st = c->m.status ? c->m.status : impl->run(c->other_q, &there);                                           \
    finished_other(c, st, impl->id, (impl->flags & MOE__TENSOR) != 0);                                                 \
  }                                                                                                                    \
  int c_run_##op(struct conform *c, const struct moe__args_##op *args)                                                 \
  {                                                                                                                    \
    const struct moe__impl_##op *impl = c->impl;                                                                       \
    struct moe__why why;                                                                                               \
    if (moe__check_##op(args)) {                                                                                       \
      c_fail(c, "%s", moe_last_error());                                                                               \
      return 0;                                                                                                        \
    }                                                                                                                  \
    if (impl->can(c->ctx->info, args, &why)) return 0;                                                                 \
    int good = ready(c, impl->program, args->dtype);                                                                   \
    for (int pass = 0; good && pass < c->runs; pass++) {                                                               \
      t_upload(&c->m);                                                                                                 \
      good = finished(c, c->m.status ? c->m.status : impl->run(c->q, args), pass);                                     \
    }                                                                                                                  \
    if (good) run_other_##op(c, args);                                                                                 \
    return good;                                                                                                       \
  }
#include "core/ops.def"
#undef OP

/* ---- the list of tests --------------------------------------------------------------------------------------------- */
struct test {
  const char *op, *id;
  const void *impl; /* NULL: expected, and not in the device's list */
  void (*cases)(struct conform *);
  int portable, tensor, expected;
};
struct tests {
  struct test *list;
  int n;
};

static void add(struct tests *all, struct test test)
{
  struct test *list = realloc(all->list, (size_t)(all->n + 1) * sizeof *list);
  if (!list) abort();
  all->list = list;
  list[all->n++] = test;
}

static void collect(struct tests *all, const moe_context *ctx)
{
#define OP(op, family)                                                                                                 \
  for (int i = 0; moe__impl_##op##_at(ctx, i); i++) {                                                                  \
    const struct moe__impl_##op *impl = moe__impl_##op##_at(ctx, i);                                                   \
    int portable = (impl->flags & MOE__PORTABLE) != 0, tensor = (impl->flags & MOE__TENSOR) != 0;                      \
    add(all, (struct test){ #op, impl->id, impl, conform_##op, portable, tensor, portable });                          \
  }
#include "core/ops.def"
#undef OP

  enum { CUDA = 1, CUDA_SM90 = 2, OPENCL_GPU = 4, OPENCL_CPU = 8, OPENCL_NVIDIA = 16 };
  int kind = ctx->info->pub.kind == MOE_DEVICE_CPU ? OPENCL_CPU : OPENCL_GPU;
  if (kind == OPENCL_GPU && ctx->info->pub.arch >= 80) kind |= OPENCL_NVIDIA;
  if (!strcmp(ctx->be->name, "cuda")) kind = MOE_HAVE_SM90 && ctx->info->pub.arch == 90 ? CUDA | CUDA_SM90 : CUDA;
  static const struct {
    int kind;
    const char *id;
  } expected[] = {
#define EXPECT(on, name) { on, name },
#include "expect.def"
#undef EXPECT
  };
  for (size_t e = 0; e < sizeof expected / sizeof *expected; e++) {
    int found = 0;
    if (!(expected[e].kind & kind)) continue;
    for (int i = 0; i < all->n; i++)
      if (!strcmp(all->list[i].id, expected[e].id)) found = all->list[i].expected = 1;
    if (!found) add(all, (struct test){ "", expected[e].id, NULL, NULL, 0, 0, 1 });
  }
}

/* 1 passed, 0 failed, -1 skipped */
static int run_test(struct conform *c, const struct test *t)
{
  printf("[ RUN      ] %s\n", t->id);
  c->id = t->id;
  c->impl = t->impl;
  c->cases = c->failures = 0;
  c->broken = 0;
  c->tensor = t->tensor;
  c->share = 0;
  snprintf(c->worst, sizeof c->worst, "all exact");
  c->apart_share = 0;
  snprintf(c->apart, sizeof c->apart, "all equal");
  if (t->cases) t->cases(c);
  int result = c->failures ? 0 : 1;
  if (!t->impl) {
    printf("  %s: expected on this kind of device, and not in its list\n", t->id);
    result = 0;
  } else if (!c->cases && result) {
    printf("  %s: accepted no case\n", t->id);
    result = t->expected && c->effort != SMALL ? 0 : -1;
  } else {
    printf("  %s: %lld cases, worst error %.3g of its bound (%s)\n", t->id, (long long)c->cases, c->share, c->worst);
    if (c->other) printf("  %s: worst difference %.3g of both bounds (%s)\n", t->id, c->apart_share, c->apart);
  }
  printf("%s %s\n", result > 0 ? "[       OK ]" : result ? "[  SKIPPED ]" : "[  FAILED  ]", t->id);
  fflush(stdout);
  return result;
}

/* ---- the program --------------------------------------------------------------------------------------------------- */
static const char usage[] =
    "usage: moe-conform [--device NAME] [--op NAME] [--impl ID] [--portable | --tuned] [--long | --sanitize-small]\n"
    "                   [--list] [--against NAME]\n"
    "Tests a device: every operation, each of its implementations, against a reference in double precision.\n"
    "  --device NAME      cuda, opencl:gpu, opencl:cpu, opencl:PLATFORM:DEVICE; as moe_context_desc takes it\n"
    "  --op NAME          only this operation            --impl ID    only this implementation\n"
    "  --portable         only the portable ones         --tuned      only the others\n"
    "  --list             print what there is and run nothing\n"
    "  --against NAME     also run each case on a second device, from the same bytes, and compare the two: values may\n"
    "                     be apart by the sum of both bounds, integers not at all (ids where the margins allow)\n"
    "  --spoil            spoil what the second device gave: every comparison must fail (this program's own test)\n"
    "  --long             more and larger cases          --sanitize-small  few small ones, for slow checkers\n"
    "Exit status: 0 all passed, 1 some failed, 2 wrong usage, 77 there is no such device.\n";

struct options {
  const char *device, *op, *impl, *against;
  int portable, tuned, list, spoil;
  enum effort effort;
};

static int parse(struct options *o, int argc, char **argv)
{
  for (int i = 1; i < argc; i++) {
    const char **value = NULL;
    if (!strcmp(argv[i], "--device")) value = &o->device;
    else if (!strcmp(argv[i], "--op")) value = &o->op;
    else if (!strcmp(argv[i], "--impl")) value = &o->impl;
    else if (!strcmp(argv[i], "--against")) value = &o->against;
    else if (!strcmp(argv[i], "--spoil")) o->spoil = 1;
    else if (!strcmp(argv[i], "--portable")) o->portable = 1;
    else if (!strcmp(argv[i], "--tuned")) o->tuned = 1;
    else if (!strcmp(argv[i], "--list")) o->list = 1;
    else if (!strcmp(argv[i], "--long")) o->effort = LONG;
    else if (!strcmp(argv[i], "--sanitize-small")) o->effort = SMALL;
    else return 0;
    if (value && !(*value = argv[++i])) return 0;
  }
  return 1;
}

/* Is `device` in the comma separated list of devices that must be there? */
static int required(const char *device)
{
  const char *list = getenv("MOE_TEST_REQUIRE"), *at = list && device ? strstr(list, device) : NULL;
  if (!at) return 0;
  char after = at[strlen(device)];
  return (at == list || at[-1] == ',') && (!after || after == ',');
}

static void list_tests(const struct tests *all)
{
  for (int i = 0; i < all->n; i++)
    printf("%-14s %s%s\n", all->list[i].op, all->list[i].id, all->list[i].impl ? "" : " (missing)");
}

/* Drops what the options leave out. */
static void choose(struct tests *all, const struct options *o)
{
  int kept = 0;
  for (int i = 0; i < all->n; i++) {
    const struct test *t = &all->list[i];
    if ((!o->op || !strcmp(o->op, t->op)) && (!o->impl || !strcmp(o->impl, t->id)) && (!o->portable || t->portable) &&
        !(o->tuned && t->portable))
      all->list[kept++] = *t;
  }
  all->n = kept;
}

static int run_tests(struct conform *c, const struct tests *all)
{
  int failed = 0, skipped = 0;
  printf("device %s: %s (%s)\n", c->ctx->info->pub.id, c->ctx->info->pub.name, c->ctx->info->pub.driver);
  if (c->other)
    printf("against %s: %s (%s)\n", c->other->info->pub.id, c->other->info->pub.name, c->other->info->pub.driver);
  printf("[==========] Running %d test(s).\n", all->n);
  for (int i = 0; i < all->n; i++) {
    int result = run_test(c, &all->list[i]);
    failed += result == 0;
    skipped += result < 0;
  }
  printf("[==========] %d test(s) run.\n", all->n);
  printf("%d passed, %d failed, %d skipped\n", all->n - failed - skipped, failed, skipped);
  return failed ? 1 : 0;
}

static moe_status open_device(moe_context **ctx, moe_queue **q, const char *name)
{
  moe_context_desc desc = moe_context_desc_init();
  desc.device = name;
  MOE__TRY(moe_context_create(ctx, &desc));
  return moe_queue_create(q, *ctx);
}

int main(int argc, char **argv)
{
  struct options o = { .effort = getenv("MOE_TEST_LONG") ? LONG : SHORT };
  struct conform c = { 0 };
  struct tests all = { 0 };
  int rc = 2;
  if (argc > 1 && !strcmp(argv[1], "--help")) {
    fputs(usage, stdout);
    return 0;
  }
  if (!parse(&o, argc, argv) || (o.spoil && !o.against)) {
    fputs(usage, stderr);
    return 2;
  }
  c.effort = o.effort;
  c.runs = o.effort == LONG ? 6 : 2;
  c.spoil = o.spoil;
  const char *device = o.device;
  moe_status status = open_device(&c.ctx, &c.q, device);
  if (!status && o.against) status = open_device(&c.other, &c.other_q, device = o.against);
  if (status == MOE_ERR_NO_DEVICE && !required(device)) {
    printf("SKIP: %s\n", moe_last_error());
    rc = 77;
  } else if (status) {
    fprintf(stderr, "moe-conform: %s\n", moe_last_error());
    rc = status == MOE_ERR_INVALID ? 2 : 1;
  } else {
    collect(&all, c.ctx);
    choose(&all, &o);
    if (all.n == 0) fprintf(stderr, "moe-conform: there is no such operation or implementation here\n");
    else if (o.list) list_tests(&all);
    rc = all.n == 0 ? 2 : o.list ? 0 : run_tests(&c, &all);
  }
  free(all.list);
  moe_queue_free(c.other_q);
  moe_context_free(c.other);
  moe_queue_free(c.q);
  moe_context_free(c.ctx);
  return rc;
}
