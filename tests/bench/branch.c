/* branch.c - the routed expert branch through moe_experts_*, and beside it the least that the same work costs with
   cuBLAS: the products as batches of equal experts, and for the activation and the sum over slots copies of as many
   bytes.  The bound routes nothing, gathers nothing, and computes no activation. */
#include "moe_layer.h"

#include "core/backend.h"

#include <moe/experts.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct peaks peaks;

enum { DENSE = 8192, TAIL = 64, SEED = 1 };

struct branch {
  struct shape s;
  int64_t R, dtype, m;     /* m: rows of an expert in the bound, R/E rounded up */
  moe_experts *experts[2]; /* weight gradients in dtype, and in F32 */
  int n;                   /* how many of the two there are */
  moe_experts_io io;
  moe_state state[2];
  moe_experts_grads grads[2];
  moe_experts_bytes bytes;
  moe_tensor w1, g1[2];        /* gate and up: [E,2F,D] */
  moe_tensor xg, yg, h, a, da; /* the bound's */
  moe_span spans[24];
  int n_spans, no_memory;
  struct point *middle; /* forward sets it at the end of the plan */
  int planned;
};

/* ---- memory ------------------------------------------------------------------------------------------------------ */
static moe_span take_bytes(struct branch *b, uint64_t bytes)
{
  moe_span span = { 0 };
  moe_status status = b->no_memory ? MOE_ERR_NO_MEMORY : moe_span_alloc(&span, bench.ctx, bytes);
  if (status == MOE_ERR_NO_MEMORY) b->no_memory = 1;
  else must(status);
  b->spans[b->n_spans++] = span;
  return span;
}

static moe_tensor take(struct branch *b, int64_t dtype, int rank, const int64_t *shape)
{
  moe_tensor t = { 0 };
  uint64_t bytes = moe_dtype_size(dtype);
  for (int d = 0; d < rank; d++) bytes *= (uint64_t)shape[d];
  moe_span span = take_bytes(b, bytes);
  if (!b->no_memory) must(moe_tensor_packed(&t, span, dtype, rank, shape));
  return t;
}
#define TAKE(b, dtype, ...)                                                                                            \
  take(b, dtype, (int)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]){ __VA_ARGS__ })

static void fill_normal(const moe_tensor *t, double stddev)
{
  static int64_t stream;
  must(moe_tensor_normal(bench.q, t, SEED, stream++, stddev));
}

/* ---- the branch -------------------------------------------------------------------------------------------------- */
static moe_experts *create(const struct branch *b, int64_t strategy, int64_t grad_dtype)
{
  moe_experts *experts;
  moe_selection_options select = moe_selection_options_init();
  moe_weights_options weights = moe_weights_options_init();
  moe_activation swiglu = moe_activation_init();
  moe_experts_desc desc = moe_experts_desc_init();
  select.kind = MOE_SELECT_SOFTMAX;
  select.top_k = b->s.K;
  weights.scoring = MOE_SOFTMAX;
  weights.renormalize = 1;
  weights.scale = 1;
  swiglu.kind = MOE_SILU;
  swiglu.gated = 1;
  desc.d_model = b->s.D;
  desc.d_ff = b->s.F;
  desc.n_experts = b->s.E;
  desc.dtype = b->dtype;
  desc.weight_grad_dtype = grad_dtype;
  desc.selection = &select;
  desc.weights = &weights;
  desc.activation = &swiglu;
  desc.forward_strategy = desc.backward_strategy = strategy;
  desc.reduction = MOE_PLANE;
  desc.gate = b->io.gate;
  desc.up = b->io.up;
  desc.down = b->io.down;
  must(moe_experts_create(&experts, bench.ctx, &desc));
  return experts;
}

struct branch *branch_open(const struct shape *shape, int64_t dtype, int64_t strategy)
{
  struct branch *b = allocate(1, sizeof *b);
  const int64_t T = shape->T, D = shape->D, F = shape->F, E = shape->E, rows = (T * shape->K + E - 1) / E * E;
  b->s = *shape;
  b->R = T * shape->K;
  b->m = rows / E;
  b->dtype = dtype;
  b->n = dtype == MOE_F32 ? 1 : 2;
  b->io = moe_experts_io_init();
  b->bytes = moe_experts_bytes_init();
  b->io.x = TAKE(b, dtype, T, D);
  b->io.y = TAKE(b, dtype, T, D);
  b->io.logits = TAKE(b, MOE_F32, T, E);
  b->w1 = TAKE(b, dtype, E, 2 * F, D);
  b->io.down = TAKE(b, dtype, E, D, F);
  moe_experts_grads g = moe_experts_grads_init();
  g.dy = TAKE(b, dtype, T, D);
  g.dx = TAKE(b, dtype, T, D);
  g.dlogits = TAKE(b, MOE_F32, T, E);
  /* Both dtypes of weight gradients in the same memory. */
  b->g1[1] = TAKE(b, MOE_F32, E, 2 * F, D);
  g.ddown = TAKE(b, MOE_F32, E, D, F);
  b->grads[0] = b->grads[1] = g;
  b->g1[0] = b->g1[1];
  b->g1[0].dtype = b->grads[0].ddown.dtype = (int32_t)dtype;
  if (!b->no_memory) {
    must(moe_tensor_slice(&b->io.gate, &b->w1, 1, 0, F));
    must(moe_tensor_slice(&b->io.up, &b->w1, 1, F, 2 * F));
    for (int i = 0; i < b->n; i++) {
      must(moe_tensor_slice(&b->grads[i].dgate, &b->g1[i], 1, 0, F));
      must(moe_tensor_slice(&b->grads[i].dup, &b->g1[i], 1, F, 2 * F));
      b->experts[i] = create(b, strategy, b->g1[i].dtype);
    }
    must(moe_experts_measure(&b->bytes, b->experts[0], T,
                             MOE_GRAD_INPUT | MOE_GRAD_LOGITS | MOE_GRAD_GATE | MOE_GRAD_UP | MOE_GRAD_DOWN));
  }
  b->io.saved = take_bytes(b, b->bytes.saved);
  b->io.scratch = take_bytes(b, b->bytes.scratch);
  if (bench.has_cublas) {
    b->xg = TAKE(b, dtype, rows, D);
    b->yg = TAKE(b, dtype, rows, D);
    b->h = TAKE(b, dtype, rows, 2 * F);
    b->a = TAKE(b, dtype, rows, F);
    b->da = TAKE(b, dtype, rows, F);
  }
  if (b->no_memory) {
    branch_close(b);
    return NULL;
  }
  fill_normal(&b->io.x, 1);
  fill_normal(&g.dy, 1);
  fill_normal(&b->w1, 1 / sqrt((double)D));
  fill_normal(&b->io.down, 1 / sqrt((double)F));
  if (bench.has_cublas) {
    fill_normal(&b->xg, 1);
    fill_normal(&b->h, 1);
    fill_normal(&b->a, 1);
  }
  return b;
}

void branch_close(struct branch *b)
{
  for (int i = 0; i < 2; i++) moe_experts_free(b->experts[i]);
  for (int i = 0; i < b->n_spans; i++) moe_span_free(bench.ctx, &b->spans[i]);
  free(b);
}

static void on_plan(void *user, const char *label)
{
  struct branch *b = user;
  if (strcmp(label, "plan")) return;
  point_set(b->middle);
  b->planned = 1;
}

static void forward(void *user)
{
  struct branch *b = user;
  bench.q->on_step = on_plan;
  bench.q->on_step_user = b;
  must(moe_experts_forward(b->experts[0], bench.q, &b->io, &b->state[0]));
  bench.q->on_step = NULL;
}

static void backward_in(struct branch *b, int grads)
{
  must(moe_experts_backward(b->experts[grads], bench.q, &b->state[grads], &b->io, &b->grads[grads]));
}

static void backward(void *user)
{
  backward_in(user, 0);
}

static void backward_f32(void *user)
{
  backward_in(user, 1);
}

static void both(void *user)
{
  forward(user);
  backward(user);
}

/* Finite and not all zero: the first elements. */
static void look_at(const char *name, const moe_tensor *t)
{
  double v[256], largest = 0;
  int64_t n = moe_tensor_count(t);
  if (n > 256) n = 256;
  must(moe_tensor_read(bench.q, v, t, n));
  for (int64_t i = 0; i < n; i++) {
    if (!isfinite(v[i])) give_up("bench: %s[%lld] is %g", name, (long long)i, v[i]);
    if (fabs(v[i]) > largest) largest = fabs(v[i]);
  }
  if (largest == 0) give_up("bench: %s is all zeros", name);
}

void branch_route(struct branch *b, int zipf)
{
  const int64_t T = b->s.T, E = b->s.E;
  float *logits = allocate((size_t)(T * E), sizeof *logits);
  uint64_t state = 88172645463325252u;
  /* log of the odds and a Gumbel variate: the K largest are K draws without return. */
  for (int64_t i = 0; i < T * E; i++) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const double u = ((double)(state >> 12) + 0.5) / 4503599627370496.0;
    logits[i] = (float)(-log(-log(u)) - (zipf ? log((double)(i % E + 1)) : 0));
  }
  must(moe_span_write(bench.q, (moe_span){ b->io.logits.handle, b->io.logits.offset, (uint64_t)(T * E) * 4 }, logits,
                      (uint64_t)(T * E) * 4));
  free(logits);
  /* Both objects keep the same bytes. */
  for (int i = b->n - 1; i >= 0; i--) {
    b->state[i] = moe_state_init();
    must(moe_experts_forward(b->experts[i], bench.q, &b->io, &b->state[i]));
    backward_in(b, i);
  }
  must(moe_queue_wait(bench.q));
  look_at("y", &b->io.y);
  look_at("dx", &b->grads[0].dx);
  look_at("dlogits", &b->grads[0].dlogits);
}

static void count_rows(const struct branch *b, struct result *r)
{
  moe_tensor ids;
  int32_t *host = allocate((size_t)b->R, sizeof *host);
  int64_t *rows = allocate((size_t)b->s.E, sizeof *rows);
  must(moe_experts_route_ids(&ids, &b->state[0]));
  must(moe_span_read(bench.q, host, (moe_span){ ids.handle, ids.offset, (uint64_t)b->R * 4 }, (uint64_t)b->R * 4));
  for (int64_t i = 0; i < b->R; i++) rows[host[i]]++;
  r->fewest = r->most = rows[0];
  for (int64_t e = 1; e < b->s.E; e++) {
    if (rows[e] < r->fewest) r->fewest = rows[e];
    if (rows[e] > r->most) r->most = rows[e];
  }
  free(rows);
  free(host);
}

/* ---- the bound --------------------------------------------------------------------------------------------------- */
/* Copies inside `area` until `bytes` were read or written. */
static void move_bytes(moe_span area, double bytes)
{
  const uint64_t half = area.bytes / 2 / 16 * 16;
  moe_span from = { area.handle, area.offset, half }, to = { area.handle, area.offset + half, half };
  for (uint64_t left = (uint64_t)bytes / 2; left; left -= left < half ? left : half)
    must(moe_span_copy(bench.q, to, from, left < half ? left : half));
}

/* Bytes of one element of data for each of: a row's F columns, the sum over slots. */
static double bytes_of_act(const struct branch *b)
{
  return (double)b->R * (double)b->s.F * (double)moe_dtype_size(b->dtype);
}

static double bytes_of_sum(const struct branch *b)
{
  return (double)(b->R + b->s.T) * (double)b->s.D * (double)moe_dtype_size(b->dtype);
}

static void bound_forward(void *user)
{
  const struct branch *b = user;
  const int64_t D = b->s.D, F = b->s.F, E = b->s.E;
  cublas_products(NT, E, b->m, 2 * F, D, &b->xg, &b->w1, &b->h);
  move_bytes(b->io.scratch, 3 * bytes_of_act(b)); /* H read, A written */
  cublas_products(NT, E, b->m, D, F, &b->a, &b->io.down, &b->yg);
  move_bytes(b->io.scratch, bytes_of_sum(b));
}

static void bound_backward_in(const struct branch *b, int grads)
{
  const int64_t D = b->s.D, F = b->s.F, E = b->s.E;
  cublas_products(NN, E, b->m, F, D, &b->xg, &b->io.down, &b->da);
  move_bytes(b->io.scratch, 6 * bytes_of_act(b)); /* dA, H read, dH, A' written */
  cublas_products(TN, E, D, F, b->m, &b->xg, &b->a, &b->grads[grads].ddown);
  cublas_products(NN, E, b->m, D, 2 * F, &b->h, &b->w1, &b->yg);
  move_bytes(b->io.scratch, bytes_of_sum(b));
  cublas_products(TN, E, 2 * F, D, b->m, &b->h, &b->xg, &b->g1[grads]);
}

static void bound_backward(void *user)
{
  bound_backward_in(user, 0);
}

static void bound_backward_f32(void *user)
{
  bound_backward_in(user, 1);
}

static void bound_both(void *user)
{
  bound_forward(user);
  bound_backward(user);
}

/* ---- peaks and floors -------------------------------------------------------------------------------------------- */
static void copy_halves(void *user)
{
  const moe_span *area = user;
  move_bytes(*area, (double)area->bytes);
}

static void dense_product(void *user)
{
  const moe_tensor *t = user;
  cublas_products(NT, 1, DENSE, DENSE, DENSE, &t[0], &t[1], &t[2]);
}

/* Its median, in seconds. */
static double seconds_of(void (*run)(void *user), void *user)
{
  struct lane *lane = allocate(1, sizeof *lane);
  lane->run = run;
  lane->user = user;
  race((struct lane *const[]){ lane }, 1);
  const double ms = spread_of(lane->ms, bench.rounds).median;
  lane_free(lane);
  free(lane);
  return 1e-3 * ms;
}

void measure_peaks(int64_t dtype)
{
  struct branch memory = { 0 };
  /* From one GiB to another; on a CPU less, but more than its caches. */
  int64_t bytes = bench.info.kind == MOE_DEVICE_GPU ? 2147483648 : 268435456;
  if (bytes > bench.info.max_alloc) bytes = bench.info.max_alloc;
  moe_span area = take_bytes(&memory, (uint64_t)bytes);
  if (memory.no_memory) give_up("bench: %s", moe_last_error());
  must(moe_span_fill(bench.q, area, 1));
  peaks.bytes = (double)area.bytes / seconds_of(copy_halves, &area);
  if (bench.has_cublas) {
    moe_tensor t[3];
    for (int i = 0; i < 3; i++) t[i] = TAKE(&memory, dtype, DENSE, DENSE);
    if (memory.no_memory) give_up("bench: %s", moe_last_error());
    for (int i = 0; i < 2; i++) fill_normal(&t[i], 1);
    peaks.flops = 2.0 * DENSE * DENSE * DENSE / seconds_of(dense_product, t);
  }
  for (int i = 0; i < memory.n_spans; i++) moe_span_free(bench.ctx, &memory.spans[i]);
}

/* The least time of a kernel that does so much arithmetic and moves so many bytes. */
static double kernel_ms(double flops, double bytes)
{
  return 1e3 * fmax(flops / peaks.flops, bytes / peaks.bytes);
}

/* The sum over the kernels of a layer that keeps H alone, takes an expert's rows in tiles of 128 (64 rows of them empty
   on average; of the steps of 64 in which weight gradients sum over rows, 32), and fetches a gathered operand once.
   g: bytes of a weight gradient's element. */
static double floor_forward(const struct branch *b)
{
  const double T = (double)b->s.T, D = (double)b->s.D, F = (double)b->s.F, E = (double)b->s.E, R = (double)b->R;
  const double s = (double)moe_dtype_size(b->dtype), padded = R + TAIL * E;
  if (peaks.flops == 0) return 0;
  return kernel_ms(4 * padded * D * F, s * (T * D + 2 * E * D * F + 3 * R * F)) + /* up and activation */
         kernel_ms(2 * padded * D * F, s * (R * F + E * D * F + R * D)) +         /* down */
         kernel_ms(0, s * (R * D + T * D));                                       /* sum over slots */
}

static double floor_backward(const struct branch *b, double g)
{
  const double T = (double)b->s.T, D = (double)b->s.D, F = (double)b->s.F, E = (double)b->s.E, R = (double)b->R;
  const double s = (double)moe_dtype_size(b->dtype), padded = R + TAIL * E, summed = R + TAIL / 2 * E;
  if (peaks.flops == 0) return 0;
  return kernel_ms(2 * padded * D * F, s * (T * D + E * D * F + 5 * R * F)) +         /* through down and activation */
         kernel_ms(2 * summed * D * F, s * (T * D + R * F) + g * E * D * F) +         /* down weights */
         kernel_ms(4 * padded * D * F, s * (2 * R * F + 2 * E * D * F + R * D)) +     /* through up */
         kernel_ms(4 * summed * D * F, s * (T * D + 2 * R * F) + g * 2 * E * D * F) + /* up weights */
         kernel_ms(0, s * (R * D + T * D));
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */
static const struct {
  const char *what;
  void (*ours)(void *user), (*bound)(void *user);
  int forward, backward, f32, graph; /* parts that it has; weight gradients in F32; a replayed CUDA graph */
} all[MOST_FIGURES] = {
  { "forward", forward, bound_forward, 1, 0, 0, 0 },
  { "backward", backward, bound_backward, 0, 1, 0, 0 },
  { "backward, f32 gradients", backward_f32, bound_backward_f32, 0, 1, 1, 0 },
  { "forward, graph", forward, bound_forward, 1, 0, 0, 1 },
  { "backward, graph", backward, bound_backward, 0, 1, 0, 1 },
  { "both, one graph", both, bound_both, 1, 1, 0, 1 },
};

struct contest {
  struct lane ours, bound;
  struct point middle;
  struct graph *graphs[2];
};

/* run(b), or the replay of what it enqueues now. */
static void prepare_lane(struct lane *lane, struct graph **graph, void (*run)(void *user), struct branch *b)
{
  if (graph) *graph = graph_capture(run, b);
  lane->run = graph ? graph_run : run;
  lane->user = graph ? (void *)*graph : b;
}

/* Times of each step, from one to the next. */
struct profile {
  int n, backward; /* steps met; the first of the backward pass */
  const char *label[MOST_STEPS];
  struct point begin[2], end[MOST_STEPS];
};

static void on_any_step(void *user, const char *label)
{
  struct profile *p = user;
  if (p->n == MOST_STEPS) give_up("bench: more than %d steps", MOST_STEPS);
  p->label[p->n] = label;
  point_set(&p->end[p->n++]);
}

/* The implementation that explain names behind a step's label. */
static void find_impl(char impl[48], const char *explain, const char *label)
{
  const size_t n = strlen(label);
  impl[0] = 0;
  for (const char *line = explain; line && *line; line = strchr(line, '\n'), line += line != NULL)
    if (!strncmp(line, label, n) && !strncmp(line + n, ": ", 2))
      snprintf(impl, 48, "%.*s", (int)strcspn(line + n + 2, " \n"), line + n + 2);
}

static void profile_steps(struct branch *b, struct result *r)
{
  struct profile *p = allocate(1, sizeof *p);
  double(*ms)[MOST_ROUNDS] = allocate(MOST_STEPS, sizeof *ms);
  for (int round = 0; round < bench.rounds; round++) {
    p->n = 0;
    bench.q->on_step_user = p;
    bench.q->on_step = on_any_step;
    flush_cache();
    point_set(&p->begin[0]);
    must(moe_experts_forward(b->experts[0], bench.q, &b->io, &b->state[0]));
    p->backward = p->n;
    flush_cache();
    point_set(&p->begin[1]);
    backward(b);
    bench.q->on_step = NULL;
    for (int i = 0; i < p->n; i++)
      ms[i][round] = point_ms(i == 0 ? &p->begin[0] : i == p->backward ? &p->begin[1] : &p->end[i - 1], &p->end[i]);
  }
  must(moe_queue_wait(bench.q));
  r->n_steps = p->n;
  for (int i = 0; i < p->n; i++) {
    r->steps[i].label = p->label[i];
    r->steps[i].ms = spread_of(ms[i], bench.rounds).median;
    find_impl(r->steps[i].impl, r->explain, p->label[i]);
  }
  for (int i = 0; i < MOST_STEPS; i++) point_free(&p->end[i]);
  for (int i = 0; i < 2; i++) point_free(&p->begin[i]);
  free(ms);
  free(p);
}

static char *explain(const struct branch *b)
{
  uint64_t needed = 0;
  must(moe_experts_explain(b->experts[0], b->s.T, NULL, 0, &needed));
  char *text = allocate(needed, 1);
  must(moe_experts_explain(b->experts[0], b->s.T, text, needed, NULL));
  return text;
}

void branch_measure(struct branch *b, int graph, struct result *r)
{
  struct contest *contests = allocate(MOST_FIGURES, sizeof *contests);
  struct lane *lanes[2 * MOST_FIGURES];
  int n_lanes = 0;
  memset(r, 0, sizeof *r);
  for (int i = MOST_FIGURES - 1; i >= 0; i--) { /* the captures first, so that the last middle is that of plain calls */
    struct contest *c = &contests[i];
    if ((all[i].f32 && b->n == 1) || (all[i].graph && !(graph && bench.stream))) continue;
    if (all[i].forward) c->ours.middle = b->middle = &c->middle;
    prepare_lane(&c->ours, all[i].graph ? &c->graphs[0] : NULL, all[i].ours, b);
    if (bench.has_cublas) prepare_lane(&c->bound, all[i].graph ? &c->graphs[1] : NULL, all[i].bound, b);
  }
  for (int i = 0; i < MOST_FIGURES; i++) {
    if (contests[i].ours.run) lanes[n_lanes++] = &contests[i].ours;
    if (contests[i].bound.run) lanes[n_lanes++] = &contests[i].bound;
  }
  race(lanes, n_lanes);
  if (!b->planned) give_up("bench: the forward pass has no step \"plan\"");

  const double rdf = (double)b->R * (double)b->s.D * (double)b->s.F;
  for (int i = 0; i < MOST_FIGURES; i++) {
    struct contest *c = &contests[i];
    struct figure *f = &r->figures[r->n_figures];
    if (!c->ours.run) continue;
    r->n_figures++;
    const double g = all[i].f32 ? 4 : (double)moe_dtype_size(b->dtype);
    f->what = all[i].what;
    f->flops = (6.0 * all[i].forward + 12.0 * all[i].backward) * rdf;
    f->floor_ms = all[i].forward * floor_forward(b) + all[i].backward * floor_backward(b, g);
    f->ms = spread_of(c->ours.ms, bench.rounds);
    f->whole = spread_of(c->ours.whole, bench.rounds);
    if (bench.has_cublas) f->bound = spread_of(c->bound.ms, bench.rounds);
    lane_free(&c->ours);
    lane_free(&c->bound);
    point_free(&c->middle);
    for (int k = 0; k < 2; k++) graph_free(c->graphs[k]);
  }
  free(contests);
  r->mhz = bench.mhz;
  r->watts = bench.watts;
  r->kept = (double)b->bytes.saved + 4.0 * (double)(b->s.T * b->s.E);
  r->scratch = (double)b->bytes.scratch;
  r->explain = explain(b);
  count_rows(b, r);
  profile_steps(b, r);
}
