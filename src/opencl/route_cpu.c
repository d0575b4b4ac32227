/* route_cpu.c - launches the kernels of route_cpu.cl. */
#include "opencl/impls.h"

/* Codes and sizes of route_cpu.cl. */
enum { PLAIN, SHIFTED, EPSILON };
enum { BY_LOGIT, BY_SOFTMAX, BY_SIGMOID };
enum { ROOM = 1024 };

static moe_status fits(const struct moe__dev_info *info, int64_t E, int64_t K, struct moe__why *why)
{
  if (moe__cl_on_cpu(info, why)) return MOE_ERR_UNSUPPORTED;
  if (E > ROOM) return moe__cannot(why, "wants at most %d experts, got %lld", ROOM, (long long)E);
  if (K > ROOM) return moe__cannot(why, "wants at most %d slots a token, got %lld", ROOM, (long long)K);
  return MOE_OK;
}

/* Which score, and what it is divided by. */
struct norm {
  int64_t score, norm;
  double scale;
};
static struct norm norm_of(const struct moe__weigh *w)
{
  if (w->scoring == MOE__SOFTMAX_CHOSEN) /* a softmax renormalized over the slots; those already sum to 1 */
    return (struct norm){ MOE__SOFTMAX, SHIFTED, w->renormalize ? w->scale / (1 + w->epsilon) : w->scale };
  return (struct norm){ w->scoring, !w->renormalize ? PLAIN : w->epsilon > 0 ? EPSILON : SHIFTED, w->scale };
}

static moe_status can_weights(const struct moe__dev_info *info, const struct moe__args_weights *args,
                              struct moe__why *why)
{
  return fits(info, args->E, args->K, why);
}

static moe_status run_weights(moe_queue *q, const struct moe__args_weights *args)
{
  static const struct moe__kernel K = { "route_cpu", "weights_rows" };
  const struct norm n = norm_of(&args->weigh);
  if (args->T == 0) return MOE_OK;
  return LAUNCH(q, &K, moe__real(args->dtype), moe__cl_groups(q), 1, 1, 1, T_(args->weights), T_(args->logits),
                I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]), T_(args->ids),
                T_(args->health), L_(args->T), I_(args->E), I_(args->K), I_(n.score), I_(n.norm), R_(n.scale),
                R_(args->weigh.epsilon));
}

const struct moe__impl_weights moe__cl_weights[] = { { "weights:cpu", "route_cpu", 0, can_weights, run_weights },
                                                     { 0 } };

static moe_status can_weights_bwd(const struct moe__dev_info *info, const struct moe__args_weights_bwd *args,
                                  struct moe__why *why)
{
  return fits(info, args->E, args->K, why);
}

static moe_status run_weights_bwd(moe_queue *q, const struct moe__args_weights_bwd *args)
{
  static const struct moe__kernel K = { "route_cpu", "weights_bwd_rows" };
  const struct norm n = norm_of(&args->weigh);
  if (args->T == 0) return MOE_OK;
  return LAUNCH(q, &K, moe__real(args->dtype), moe__cl_groups(q), 1, 1, 1, T_(args->dlogits), I_(args->dlogits.dtype),
                L_(args->dlogits.stride[0]), L_(args->dlogits.stride[1]), T_(args->dweights), T_(args->logits),
                I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]), T_(args->ids),
                L_(args->T), I_(args->E), I_(args->K), I_(n.score), I_(n.norm), R_(n.scale), R_(args->weigh.epsilon),
                I_(args->accumulate));
}

const struct moe__impl_weights_bwd moe__cl_weights_bwd[] = {
  { "weights_bwd:cpu", "route_cpu", 0, can_weights_bwd, run_weights_bwd }, { 0 }
};

static moe_status can_select(const struct moe__dev_info *info, const struct moe__args_select *args,
                             struct moe__why *why)
{
  return fits(info, args->E, args->select.K, why);
}

/* The selection's own weights are a call of weights with its scores. */
static moe_status run_select(moe_queue *q, const struct moe__args_select *args)
{
  static const struct moe__kernel K = { "route_cpu", "select_rows" };
  const struct moe__select *s = &args->select;
  const int sigmoid = s->kind == MOE__SELECT_GROUPED_SIGMOID;
  const struct moe__args_weights weights = moe__weights_of(args);
  if (args->T == 0) return MOE_OK;
  MOE__TRY(LAUNCH(q, &K, moe__real(args->dtype), moe__cl_groups(q), 1, 1, 1, T_(args->ids), T_(args->logits),
                  I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]), T_(args->bias),
                  L_(args->T), I_(args->E), I_(s->K),
                  I_(sigmoid             ? BY_SIGMOID
                     : args->bias.handle ? BY_SOFTMAX
                                         : BY_LOGIT),
                  I_(sigmoid ? s->groups : 0), I_(s->selected_groups), I_(s->group_top_two)));
  return args->weights.handle ? run_weights(q, &weights) : MOE_OK;
}

const struct moe__impl_select moe__cl_select[] = { { "select:cpu", "route_cpu", 0, can_select, run_select }, { 0 } };

static moe_status can_balance_fwd(const struct moe__dev_info *info, const struct moe__args_balance_fwd *args,
                                  struct moe__why *why)
{
  return fits(info, args->E, 0, why);
}

static moe_status run_balance_fwd(moe_queue *q, const struct moe__args_balance_fwd *args)
{
  static const struct moe__kernel SPANS = { "route_cpu", "balance_spans" }, TOTAL = { "route_cpu", "balance_total" };
  const int64_t dtype = moe__real(args->dtype), N = args->T / args->S;
  MOE__TRY(LAUNCH(q, &SPANS, dtype, moe__cl_groups(q), 1, 1, 1, T_(args->scratch), T_(args->logits),
                  I_(args->logits.dtype), L_(args->logits.stride[0]), L_(args->logits.stride[1]), T_(args->ids),
                  T_(args->mask), L_(N), L_(args->S), I_(args->E), I_(args->K), I_(args->scoring)));
  return LAUNCH(q, &TOTAL, dtype, 1, 1, 1, 1, T_(args->losses), T_(args->counts), T_(args->probs), T_(args->tokens),
                T_(args->scratch), L_(N), L_(args->S), I_(args->E), I_(args->K));
}

const struct moe__impl_balance_fwd moe__cl_balance_fwd[] = {
  { "balance_fwd:cpu", "route_cpu", 0, can_balance_fwd, run_balance_fwd }, { 0 }
};

static moe_status can_balance_bwd(const struct moe__dev_info *info, const struct moe__args_balance_bwd *args,
                                  struct moe__why *why)
{
  return fits(info, args->E, 0, why);
}

static moe_status run_balance_bwd(moe_queue *q, const struct moe__args_balance_bwd *args)
{
  static const struct moe__kernel K = { "route_cpu", "balance_bwd_rows" };
  if (args->T == 0) return MOE_OK;
  return LAUNCH(q, &K, moe__real(args->dtype), moe__cl_groups(q), 1, 1, 1, T_(args->dlogits), I_(args->dlogits.dtype),
                L_(args->dlogits.stride[0]), L_(args->dlogits.stride[1]), T_(args->logits), I_(args->logits.dtype),
                L_(args->logits.stride[0]), L_(args->logits.stride[1]), T_(args->counts), T_(args->tokens),
                T_(args->mask), T_(args->scale), L_(args->T), L_(args->S), I_(args->E), I_(args->K), I_(args->scoring),
                I_(args->accumulate), R_(args->balance_coef), R_(args->z_coef));
}

const struct moe__impl_balance_bwd moe__cl_balance_bwd[] = {
  { "balance_bwd:cpu", "route_cpu", 0, can_balance_bwd, run_balance_bwd }, { 0 }
};
