/* route.c - launches the kernels of route.cl. */
#include "core/kernels/kernels.h"

/* Codes and sizes of route.cl. */
enum { PLAIN, SHIFTED, EPSILON };
enum { BY_LOGIT, BY_SOFTMAX, BY_SIGMOID };
enum { ROOM_BYTES = 17408, GROUPS_MOST = 1024, SPAN = 64, BLOCK = 32 };

/* Items that share a row with `work` elements: eight or more elements each. */
static int lanes_of(const moe_queue *q, int64_t work)
{
  int lanes = 1;
  while (lanes < q->ctx->info->reduce_local && lanes * 8 < work) lanes *= 2;
  return lanes;
}

/* How a call of weights or weights_bwd looks to the kernels. */
struct norm {
  int64_t score, norm;
  double scale;
  int lanes; /* for weights */
};
static struct norm norm_of(const moe_queue *q, const struct moe__weigh *w, int64_t E, int64_t K)
{
  struct norm n = { w->scoring, PLAIN, w->scale, 0 };
  if (w->scoring == MOE__SOFTMAX_CHOSEN) {
    n.score = MOE__SOFTMAX; /* a softmax renormalized over the slots; those already sum to 1 */
    n.norm = SHIFTED;
    if (w->renormalize) n.scale /= 1 + w->epsilon;
  } else if (w->renormalize) {
    n.norm = w->epsilon > 0 ? EPSILON : SHIFTED;
  }
  n.lanes = lanes_of(q, n.score == MOE__SOFTMAX && n.norm != SHIFTED ? E : K);
  return n;
}

static moe_status run_weights(moe_queue *q, const struct moe__args_weights *args)
{
  static const struct moe__kernel K = { "route", "route_weights" };
  const struct norm n = norm_of(q, &args->weigh, args->E, args->K);
  return LAUNCH(q, &K, moe__real(args->dtype), moe__row_groups(q, args->T, n.lanes), 1, 1, q->ctx->info->reduce_local,
                T_(args->weights), T_(args->logits), I_(args->logits.dtype), L_(args->logits.stride[0]),
                L_(args->logits.stride[1]), T_(args->ids), T_(args->health), L_(args->T), I_(args->E), I_(args->K),
                I_(n.lanes), I_(n.score), I_(n.norm), R_(n.scale), R_(args->weigh.epsilon));
}
MOE__PORTABLE_IMPL(weights, "route")

enum { WARP_EXPERTS = 1024, WARP_SLOTS = 64 }; /* what the kernels of warps have room for */

/* Of n kernels of warps that have 32*2, 4, 8 and 32 experts in registers, that for E; NULL where there is none. */
static const struct moe__kernel *of_warps(const moe_queue *q, const struct moe__kernel *kernels, int n, int64_t dtype,
                                          int64_t E)
{
  static const int keys[] = { 2, 4, 8, WARP_EXPERTS / 32 };
  for (int i = 0; i < n && q->ctx->info->ptx && dtype != MOE_F64; i++)
    if (E <= 32 * keys[i]) return &kernels[i];
  return NULL;
}

static moe_status run_weights_bwd(moe_queue *q, const struct moe__args_weights_bwd *args)
{
  static const struct moe__kernel ANY = { "route", "route_weights_bwd" }, WARPS = { "route", "route_bwd" };
  const int warps = q->ctx->info->ptx && args->dtype != MOE_F64 && args->E <= WARP_EXPERTS && args->K <= WARP_SLOTS;
  const struct norm n = norm_of(q, &args->weigh, args->E, args->K);
  const int lanes = warps ? 32 : lanes_of(q, args->E);
  return LAUNCH(q, warps ? &WARPS : &ANY, moe__real(args->dtype), moe__row_groups(q, args->T, lanes), 1, 1,
                q->ctx->info->reduce_local, T_(args->dlogits), I_(args->dlogits.dtype), L_(args->dlogits.stride[0]),
                L_(args->dlogits.stride[1]), T_(args->dweights), T_(args->logits), I_(args->logits.dtype),
                L_(args->logits.stride[0]), L_(args->logits.stride[1]), T_(args->ids), L_(args->T), I_(args->E),
                I_(args->K), I_(lanes), I_(n.score), I_(n.norm), R_(n.scale), R_(args->weigh.epsilon),
                I_(args->accumulate));
}
MOE__PORTABLE_IMPL(weights_bwd, "route")

/* Without groups that would leave experts out: one kernel, for ids and weights. */
static const struct moe__kernel *fused(const moe_queue *q, const struct moe__args_select *args)
{
  static const struct moe__kernel WARPS[] = {
    { "route", "route_2" }, { "route", "route_4" }, { "route", "route_8" }, { "route", "route_32" }
  };
  const struct moe__select *s = &args->select;
  if (s->K > WARP_SLOTS || (s->kind == MOE__SELECT_GROUPED_SIGMOID && s->selected_groups < s->groups)) return NULL;
  return of_warps(q, WARPS, sizeof WARPS / sizeof *WARPS, args->dtype, args->E);
}

static moe_status run_select(moe_queue *q, const struct moe__args_select *args)
{
  static const struct moe__kernel K = { "route", "route_select" };
  const struct moe__kernel *one = fused(q, args);
  const struct moe__select *s = &args->select;
  const struct moe__args_weights weights = moe__weights_of(args);
  const int sigmoid = s->kind == MOE__SELECT_GROUPED_SIGMOID, local = q->ctx->info->reduce_local;
  const int rule = sigmoid ? BY_SIGMOID : args->bias.handle ? BY_SOFTMAX : BY_LOGIT;
  const int64_t groups = sigmoid ? s->groups : 0, room = ROOM_BYTES / (args->dtype == MOE_F64 ? 8 : 4);
  int lanes = 1; /* as few as local memory has rows for */
  if (one) {
    const struct norm n = norm_of(q, &weights.weigh, args->E, s->K);
    return LAUNCH(q, one, MOE_F32, moe__row_groups(q, args->T, 32), 1, 1, local, T_(args->ids), T_(args->weights),
                  T_(args->logits), I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]),
                  T_(args->bias), L_(args->T), I_(args->E), I_(s->K), I_(rule), I_(n.score), I_(n.norm), R_(n.scale),
                  R_(weights.weigh.epsilon));
  }
  while (lanes < local && (local / lanes * (args->E + lanes) > room || local / lanes * groups > GROUPS_MOST))
    lanes *= 2;
  const int cached = local / lanes * (args->E + lanes) <= room;
  MOE__TRY(LAUNCH(q, &K, moe__real(args->dtype), moe__row_groups(q, args->T, lanes), 1, 1, local, T_(args->ids),
                  T_(args->logits), I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]),
                  T_(args->bias), L_(args->T), I_(args->E), I_(s->K), I_(lanes), I_(cached), I_(rule), I_(groups),
                  I_(sigmoid ? s->selected_groups : 0), I_(s->group_top_two)));
  return args->weights.handle ? run_weights(q, &weights) : MOE_OK;
}
MOE__PORTABLE_IMPL(select, "route")

/* Where balance_fwd's steps leave their results in the scratch. */
struct balance {
  int64_t spans, blocks;
  int64_t probs, counts, z, tokens, dots, end; /* begins, after rows [3,T] */
};
static struct balance balance_of(int64_t T, int64_t S, int64_t E)
{
  struct balance b = { .spans = S ? moe__ceil_div(T / S, SPAN) : 0, .blocks = moe__ceil_div(E, BLOCK) };
  b.probs = 3 * T;
  b.counts = b.probs + S * b.spans * E;
  b.z = b.counts + S * b.spans * E;
  b.tokens = b.z + S * b.spans;
  b.dots = b.tokens + S * b.spans;
  b.end = b.dots + S * b.blocks;
  return b;
}
int64_t moe__balance_scratch(int64_t T, int64_t S, int64_t E)
{
  return balance_of(T, S, E).end;
}
static moe_tensor part(const struct moe__args_balance_fwd *args, int64_t begin)
{
  moe_tensor t = args->scratch;
  t.offset += (uint64_t)begin * moe_dtype_size(t.dtype);
  return t;
}

static moe_status run_balance_fwd(moe_queue *q, const struct moe__args_balance_fwd *args)
{
  static const struct moe__kernel ROWS = { "route", "route_balance_rows" }, SPANS = { "route", "route_balance_spans" },
                                  SUMS = { "route", "route_balance_sums" },
                                  LOSSES = { "route", "route_balance_losses" },
                                  WARPS[] = { { "route", "balance_fwd_2" },
                                              { "route", "balance_fwd_4" },
                                              { "route", "balance_fwd_8" } };
  const struct moe__kernel *warps = of_warps(q, WARPS, sizeof WARPS / sizeof *WARPS, args->dtype, args->E);
  const struct balance b = balance_of(args->T, args->S, args->E);
  const int64_t dtype = moe__real(args->dtype), T = args->T, S = args->S, E = args->E;
  const int local = q->ctx->info->reduce_local, lanes = lanes_of(q, E);
  const moe_tensor rows = part(args, 0), probs = part(args, b.probs), counts = part(args, b.counts),
                   z = part(args, b.z), tokens = part(args, b.tokens), dots = part(args, b.dots);
  if (warps) {
    MOE__TRY(LAUNCH(q, warps, dtype, S * b.spans, 1, 1, local, T_(probs), T_(counts), T_(z), T_(tokens),
                    T_(args->logits), I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]),
                    T_(args->ids), T_(args->mask), L_(S ? T / S : 0), L_(b.spans), I_(E), I_(args->K),
                    I_(args->scoring)));
  } else {
    MOE__TRY(LAUNCH(q, &ROWS, dtype, moe__row_groups(q, T, lanes), 1, 1, local, T_(rows), T_(args->logits),
                    I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]), T_(args->mask),
                    L_(T), I_(E), I_(lanes), I_(args->scoring)));
    MOE__TRY(LAUNCH(q, &SPANS, dtype, S * b.spans, b.blocks, 1, local, T_(probs), T_(counts), T_(z), T_(tokens),
                    T_(rows), T_(args->logits), I_(args->logits.dtype), L_(args->logits.stride[0]),
                    L_(args->logits.stride[1]), T_(args->ids), T_(args->mask), L_(T), L_(S ? T / S : 0), L_(b.spans),
                    I_(E), I_(args->K), I_(args->scoring)));
  }
  MOE__TRY(LAUNCH(q, &SUMS, dtype, S, b.blocks, 1, local, T_(args->counts), T_(args->probs), T_(args->tokens), T_(dots),
                  T_(probs), T_(counts), T_(tokens), L_(b.spans), I_(E)));
  return LAUNCH(q, &LOSSES, dtype, 1, 1, 1, local, T_(args->losses), T_(args->tokens), T_(dots), T_(z), L_(S),
                L_(b.spans), L_(b.blocks), I_(E), I_(args->K));
}
MOE__PORTABLE_IMPL(balance_fwd, "route")

static moe_status run_balance_bwd(moe_queue *q, const struct moe__args_balance_bwd *args)
{
  static const struct moe__kernel ANY = { "route", "route_balance_bwd" }, WARPS[] = { { "route", "balance_bwd_2" },
                                                                                      { "route", "balance_bwd_4" },
                                                                                      { "route", "balance_bwd_8" } };
  const struct moe__kernel *warps = of_warps(q, WARPS, sizeof WARPS / sizeof *WARPS, args->dtype, args->E);
  const int64_t dtype = moe__real(args->dtype);
  const int local = q->ctx->info->reduce_local, lanes = lanes_of(q, args->E);
#define BOTH                                                                                                           \
  T_(args->dlogits), I_(args->dlogits.dtype), L_(args->dlogits.stride[0]), L_(args->dlogits.stride[1]),                \
      T_(args->logits), I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]),                \
      T_(args->counts), T_(args->tokens), T_(args->mask), T_(args->scale), L_(args->T), L_(args->S), I_(args->E),      \
      I_(args->K), I_(args->scoring), I_(args->accumulate), R_(args->balance_coef), R_(args->z_coef)
  if (warps) return LAUNCH(q, warps, dtype, moe__row_groups(q, args->T, 32), 1, 1, local, BOTH);
  return LAUNCH(q, &ANY, dtype, moe__row_groups(q, args->T, lanes), 1, 1, local, BOTH, I_(lanes));
#undef BOTH
}
MOE__PORTABLE_IMPL(balance_bwd, "route")

static moe_status run_bias_step(moe_queue *q, const struct moe__args_bias_step *args)
{
  static const struct moe__kernel K = { "route", "route_bias_step" };
  return LAUNCH(q, &K, moe__real(args->dtype), 1, 1, 1, q->ctx->info->reduce_local, T_(args->bias), T_(args->counts),
                L_(args->S), I_(args->E), R_(args->rate));
}
MOE__PORTABLE_IMPL(bias_step, "route")

static moe_status run_load_stats(moe_queue *q, const struct moe__args_load_stats *args)
{
  static const struct moe__kernel K = { "route", "route_load_stats" };
  return LAUNCH(q, &K, moe__real(args->dtype), 1, 1, 1, q->ctx->info->reduce_local, T_(args->stats), T_(args->counts),
                L_(args->S), I_(args->E));
}
MOE__PORTABLE_IMPL(load_stats, "route")
