/* route.cl - the router behind its logits: selection, routing weights and their gradient, balance and z losses,
   the correction-bias step, load statistics.

   T tokens, E experts, K slots of a token; logits l [T,E] of any float type and strides, all arithmetic in REAL.
   A row of logits is shared by `lanes` items (common.clh), so a group serves LSIZE/lanes tokens and reads them
   coalesced; a device whose groups are small gets one item a token and no reductions.  Rows past T work on row T-1
   again and write nothing: every item meets every barrier.  On CPUs no barrier stands under an `if`, not even a uniform
   one (PoCL's compiler copies what follows it, and the copies double with every one): a reduction that a call does not
   need runs on zeros. */
#ifndef MOE_CUDA
#pragma OPENCL FP_CONTRACT OFF
#endif

/* enum moe__scoring of args.h; softmax over the chosen slots comes as SOFTMAX with SHIFTED */
#define SOFTMAX 1
#define SIGMOID 2
#define SQRT_SOFTPLUS 4
/* what a score is divided by: nothing (a softmax: its sum over E); the slots' sum, shifted; that plus epsilon */
#define PLAIN 0
#define SHIFTED 1
#define EPSILON 2
/* what selection ranks by: the logit; softmax + bias; sigmoid + bias */
#define BY_LOGIT 0
#define BY_SOFTMAX 1
#define BY_SIGMOID 2

#define HEALTH_ID 2

/* ---- scores ------------------------------------------------------------------------------------------------
   Every score is exp(a) * g with g between 2^-1 and about sqrt(l):
     softmax         a = l             g = 1               (before its division by the sum)
     sigmoid         a = min(l,0)      g = 1/(1+exp(-|l|))
     sqrt softplus   a = min(l,0)/2    g = sqrt(log(1+exp(l)) / exp(min(l,0)))
   Only differences of a enter a normalized score, so exp(a - shift) with shift = max a neither overflows nor
   vanishes, wherever the logits are.  NaN stays NaN: through a, or through g. */
FN REAL exponent(int score, REAL l)
{
  if (score == SOFTMAX) return l;
  const REAL a = MIN2(l, R(0.0));
  return score == SIGMOID ? a : R(0.5) * a;
}
/* log(1+exp(l)) / exp(min(l,0)) */
FN REAL softplus_factor(REAL l)
{
  const REAL x = exp(-fabs(l));
  if (!(l < R(0.0))) return l + log1p(x);
  return x > R(1e-30) ? log1p(x) / x : R(1.0);
}
/* sigmoid(l) / exp(min(l,0)) = 1 / (1+exp(-|l|)) is 1 over this */
FN REAL sigmoid_divisor(REAL l)
{
  return R(1.0) + exp(-fabs(l));
}
FN REAL scored(int score, REAL l, REAL shift)
{
  const REAL e = exp(exponent(score, l) - shift);
  if (score == SOFTMAX) return e;
  if (score == SIGMOID) return e / sigmoid_divisor(l);
  return e * sqrt(softplus_factor(l));
}
FN REAL sigmoid(REAL l)
{
  const REAL x = exp(-fabs(l));
  return (l < R(0.0) ? x : R(1.0)) / (R(1.0) + x);
}
/* d log(score) / dl of the pointwise part (a softmax's sum over E comes on top of it) */
FN REAL log_slope(int score, REAL l)
{
  if (score == SOFTMAX) return R(1.0);
  if (score == SIGMOID) return sigmoid(-l);
  return R(0.5) / (sigmoid_divisor(l) * softplus_factor(l));
}
/* p/sum, 1 where they are equal: OpenCL lets x/x differ from 1, and top-1 renormalized must not. */
FN REAL share_of(REAL p, REAL sum)
{
  return p == sum ? R(1.0) : p / sum;
}

/* ---- selection ---------------------------------------------------------------------------------------------
   Scores are ranked as integers that have the order of the reals: -inf < ... < +inf, -0 = 0, NaN below all. */
#ifdef MOE_ST_F64
typedef long key;
#define KEY_MOST 0x7fffffffffffffffL
#define KEY_BITS(v) as_long(v)
#define KEY_REAL(k) as_double(k)
#define ROOM 2176
#else
typedef int key;
#define KEY_MOST 0x7fffffff
#define KEY_BITS(v) as_int(v)
#define KEY_REAL(k) as_float(k)
#define ROOM 4352
#endif
#define KEY_NAN (-KEY_MOST)
#define KEY_NEVER (-KEY_MOST - 1) /* not a candidate */
#define GROUPS_MOST 1024

FN key key_of(REAL v)
{
  const key bits = KEY_BITS(v);
  if (IS_NAN(v)) return KEY_NAN;
  return bits < 0 ? -(bits & KEY_MOST) : bits;
}
FN REAL real_of(key k)
{
  if (k == KEY_NAN) return REAL_NAN;
  return k < 0 ? -KEY_REAL(-k) : KEY_REAL(k);
}
/* Does (a, i) stand before (b, j): higher key, then lower id? */
FN int before(key a, int i, key b, int j)
{
  return a > b || (a == b && i < j);
}
FN key expert_key(const GLOBAL uchar *logits, long at, int dt, const GLOBAL REAL *bias, int e, int rule, REAL top,
                  REAL sum)
{
  REAL v = ldx(logits, at, dt);
  if (rule == BY_SOFTMAX) v = exp(v - top) / sum;
  else if (rule == BY_SIGMOID) v = sigmoid(v);
  return key_of(bias ? v + bias[e] : v);
}

/* (chosen, chosen_id) := the best of (KEY(j), j), j in [0, n), strictly after what it was.  Lanes take every
   lanes-th j (SCAN), then a tree (AGREE).  Passes of this need no marks on what was chosen, so nothing has to be kept
   per expert, and K is free.  (A sorted list per lane, the obvious version, is K registers or a spill.) */
#define SCAN(n, KEY)                                                                                                   \
  for (int j = lane; j < (n); j += lanes) {                                                                            \
    const key c_ = KEY(j);                                                                                             \
    if (c_ > mine && before(chosen, chosen_id, c_, j)) mine = c_, mine_id = j;                                         \
  }
#define AGREE()                                                                                                        \
  do {                                                                                                                 \
    GROUP_BARRIER();                                                                                                   \
    best[LID] = mine;                                                                                                  \
    best_id[LID] = mine_id;                                                                                            \
    for (int h_ = lanes >> 1; h_ > 0; h_ >>= 1) {                                                                      \
      GROUP_BARRIER();                                                                                                 \
      if (lane < h_ && before(best[LID + h_], best_id[LID + h_], best[LID], best_id[LID])) {                           \
        best[LID] = best[LID + h_];                                                                                    \
        best_id[LID] = best_id[LID + h_];                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
    GROUP_BARRIER();                                                                                                   \
    chosen = best[LID - lane];                                                                                         \
    chosen_id = best_id[LID - lane];                                                                                   \
  } while (0)
/* key of expert e from its logit; the row's kept keys; those of the groups */
#define FRESH_KEY(e) expert_key(logits, row + (e) * s1, dt, bias, e, rule, top, sum)
#define OPEN_KEY(e) (GROUP_CLOSED(e) ? KEY_NEVER : FRESH_KEY(e))
#define KEPT_KEY(e) kept[kept_at + (e)]
#define GROUP_KEY(g) group_keys[group_at + (g)]
#define GROUP_CLOSED(e) (groups && before(last_group, last_group_id, GROUP_KEY((e) / size), (e) / size))

/* ids[t,:] = the K best experts of token t, best first.
     key(e) = l[e], or softmax(l)[e] + bias[e], or sigmoid(l[e]) + bias[e]   (`rule`)
   `groups` > 0: a group of E/groups neighbours scores by its best key or by the sum of its two best; experts
   outside the `keep` best groups are no candidates.
   A group of items takes LSIZE/lanes tokens.  Keys are computed once, from one coalesced reading of the logits,
   and kept in local memory (E + lanes apart, so that rows lie in different banks) where `cached`; past ROOM (over
   4000 experts) each pass reads the logits again, from cache.  Then K passes of SCAN and AGREE.  NaN logits are
   left out of a softmax's maximum and sum: they rank last, and the others keep their order.  Bytes: l once, ids once.
   Comparisons (E*K a token) bound it from about K = 8 on. */
KERNEL(route_select)(TENSOR(int, ids), TENSOR(const uchar, logits), int dt, long s0, long s1, TENSOR(const REAL, bias),
                     long T, int E, int K, int lanes, int cached, int rule, int groups, int keep, int top_two)
{
  LOCAL_ARRAY(key, kept, ROOM);
  LOCAL_ARRAY(key, group_keys, GROUPS_MOST);
  LOCAL_ARRAY(key, best, 256);
  LOCAL_ARRAY(int, best_id, 256);
  LOCAL_ARRAY(REAL, buf, 256);
  AT(ids);
  AT_OPT(bias);
  const int lane = LANE(lanes), kept_at = LID / lanes * (E + lanes), group_at = LID / lanes * groups;
  const long t = ROW(lanes), row = logits_at + MIN2(t, T - 1) * s0;
  REAL top = -REAL_INF, sum = R(0.0);
  const int summed = rule == BY_SOFTMAX ? E : 0;
  for (int e = lane; e < summed; e += lanes) {
    const REAL l = ldx(logits, row + e * s1, dt);
    if (l > top) top = l;
  }
  ROW_MAX(top, top, buf, lanes);
  for (int e = lane; e < summed; e += lanes) {
    const REAL l = ldx(logits, row + e * s1, dt);
    if (!IS_NAN(l)) sum += exp(l - top);
  }
  ROW_SUM(sum, sum, buf, lanes);
  for (int e = lane; cached && e < E; e += lanes) KEPT_KEY(e) = FRESH_KEY(e);
  GROUP_BARRIER();

  const int size = groups ? E / groups : E;
  key chosen = KEY_MOST;
  int chosen_id = -1;
  for (int g = lane; g < groups; g += lanes) {
    key first = KEY_NEVER, second = KEY_NEVER;
    for (int e = g * size; e < (g + 1) * size; e++) {
      const key k = cached ? KEPT_KEY(e) : FRESH_KEY(e);
      if (k > first) second = first, first = k;
      else if (k > second) second = k;
    }
    GROUP_KEY(g) = top_two ? key_of(real_of(first) + real_of(second)) : first;
  }
  GROUP_BARRIER();
  for (int i = 0; i < keep; i++) {
    key mine = KEY_NEVER;
    int mine_id = groups;
    SCAN(groups, GROUP_KEY);
    AGREE();
  }
  const key last_group = chosen;
  const int last_group_id = chosen_id;
  for (int e = lane; cached && e < E; e += lanes)
    if (GROUP_CLOSED(e)) KEPT_KEY(e) = KEY_NEVER;

  chosen = KEY_MOST, chosen_id = -1;
  for (int k = 0; k < K; k++) {
    key mine = KEY_NEVER;
    int mine_id = E;
    if (cached) {
      SCAN(E, KEPT_KEY);
    } else {
      SCAN(E, OPEN_KEY);
    }
    AGREE();
    if (lane == 0 && t < T) ids[t * K + k] = chosen_id;
  }
}

/* ---- weights -----------------------------------------------------------------------------------------------
   u_k = s_k / Z,  w_k = scale * u_k,  s_k = scored(l[id_k], shift):
     PLAIN, EPSILON  softmax: shift = max l over E, D = sum over E of exp(l - shift); else shift = 0, D = 1
     SHIFTED         shift = max over the slots of a_k, D = 1
     Z = D (PLAIN), sum over slots of s_k (SHIFTED), that + epsilon * D (EPSILON)
   Both kernels begin with it.  Lanes take every lanes-th slot (or expert); sums are trees over the lanes. */
#define LOGIT(e) ldx(logits, row + (e) * s1, dt)
#define KNOWN(id) ((id) >= 0 && (id) < E)
#define OVER_EXPERTS (score == SOFTMAX && norm != SHIFTED)
#define NORMALIZE(shift, D, Z, bad)                                                                                    \
  REAL shift, D, Z, bad;                                                                                               \
  do {                                                                                                                 \
    const int experts_ = OVER_EXPERTS ? E : 0, slots_ = norm != PLAIN ? K : 0;                                         \
    REAL top_ = -REAL_INF, all_ = R(0.0), sum_ = R(0.0), bad_ = R(0.0);                                                \
    for (int e = lane; e < experts_; e += lanes) top_ = MAX2(top_, LOGIT(e));                                          \
    if (norm == SHIFTED)                                                                                               \
      for (int k = lane; k < K; k += lanes)                                                                            \
        if (KNOWN(id[k])) top_ = MAX2(top_, exponent(score, LOGIT(id[k])));                                            \
    ROW_MAX(shift, top_, buf, lanes);                                                                                  \
    if (!OVER_EXPERTS && norm != SHIFTED) shift = R(0.0);                                                              \
    for (int e = lane; e < experts_; e += lanes) all_ += exp(LOGIT(e) - shift);                                        \
    ROW_SUM(D, all_, buf, lanes);                                                                                      \
    if (!OVER_EXPERTS) D = R(1.0);                                                                                     \
    for (int k = lane; k < slots_; k += lanes)                                                                         \
      if (KNOWN(id[k])) sum_ += scored(score, LOGIT(id[k]), shift);                                                    \
    ROW_SUM(Z, sum_, buf, lanes);                                                                                      \
    if (norm == PLAIN) Z = D;                                                                                          \
    if (norm == EPSILON) Z += epsilon * D;                                                                             \
    for (int k = lane; k < K; k += lanes)                                                                              \
      if (!KNOWN(id[k])) bad_ = R(1.0);                                                                                \
    ROW_MAX(bad, bad_, buf, lanes);                                                                                    \
  } while (0)

/* weights[t,k] = w_k; a token with an id outside [0,E): all its weights NaN, HEALTH_ID.
   Bytes: ids and weights once; the chosen logits, or for a softmax over E the whole row (from cache the second
   time).  One pass with a running maximum was not kept: rescaling its sum rounds once more per expert. */
KERNEL(route_weights)(TENSOR(REAL, weights), TENSOR(const uchar, logits), int dt, long s0, long s1,
                      TENSOR(const int, ids), TENSOR(int, health), long T, int E, int K, int lanes, int score,
                      int norm, REAL scale, REAL epsilon)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(weights);
  AT(ids);
  AT_OPT(health);
  const int lane = LANE(lanes);
  const long t = ROW(lanes), live = MIN2(t, T - 1), row = logits_at + live * s0;
  const GLOBAL int *id = ids + live * K;
  NORMALIZE(shift, D, Z, bad);
  if (t >= T) return;
  for (int k = lane; k < K; k += lanes)
    weights[t * K + k] = bad > R(0.0) ? REAL_NAN : scale * share_of(scored(score, LOGIT(id[k]), shift), Z);
  if (bad > R(0.0) && lane == 0 && health) ATOMIC_OR(health, HEALTH_ID);
}

/* With d = dweights and c = sum_k d_k u_k where the slots are normalized, else 0:
     dl[e] = w(e) s'(e)/s(e) * sum over slots k with id_k = e of (d_k - c)   [ - p_e sum_k w_k (d_k - c) ]
   w(e) is the weight a slot with expert e has; the bracket is there for a softmax over E, p_e = exp(l_e-shift)/D.
   Slots of one expert share everything but d, so repeated ids need no atomics, no list and no second rounding:
   lanes walk the experts and look for each among the K ids (a scatter of slots would have to add into dlogits).
   A row of which a weight is not finite is NaN.  Bytes: dlogits once (twice if accumulated), the logits once where
   over E, else the chosen ones. */
KERNEL(route_weights_bwd)(TENSOR(uchar, dlogits), int ddt, long d0, long d1, TENSOR(const REAL, dweights),
                          TENSOR(const uchar, logits), int dt, long s0, long s1, TENSOR(const int, ids), long T, int E,
                          int K, int lanes, int score, int norm, REAL scale, REAL epsilon, int accumulate)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(dweights);
  AT(ids);
  const int lane = LANE(lanes);
  const long t = ROW(lanes), live = MIN2(t, T - 1), row = logits_at + live * s0;
  const GLOBAL int *id = ids + live * K;
  const GLOBAL REAL *d = dweights + live * K;
  NORMALIZE(shift, D, Z, bad);

  REAL c = R(0.0), all = R(0.0);
  for (int k = lane; k < K; k += lanes) {
    const REAL u = KNOWN(id[k]) ? share_of(scored(score, LOGIT(id[k]), shift), Z) : REAL_NAN;
    if (!IS_FINITE(scale * u)) bad = R(1.0);
    if (norm != PLAIN) c += d[k] * u;
  }
  ROW_MAX(bad, bad, buf, lanes);
  ROW_SUM(c, c, buf, lanes);
  for (int k = lane; k < K; k += lanes)
    if (OVER_EXPERTS && KNOWN(id[k])) all += scale * share_of(scored(score, LOGIT(id[k]), shift), Z) * (d[k] - c);
  ROW_SUM(all, all, buf, lanes);

  if (t >= T) return;
  for (int e = lane; e < E; e += lanes) {
    REAL flow = R(0.0), g = R(0.0);
    int n = 0;
    for (int k = 0; k < K; k++)
      if (id[k] == e) flow += d[k] - c, n++;
    if (n || OVER_EXPERTS) {
      const REAL l = LOGIT(e), s = scored(score, l, shift);
      if (n) g = scale * share_of(s, Z) * log_slope(score, l) * flow;
      if (OVER_EXPERTS) g -= share_of(s, D) * all;
    }
    if (bad > R(0.0)) g = REAL_NAN;
    const long at = dlogits_at + t * d0 + e * d1;
    stx(dlogits, at, ddt, accumulate ? ldx(dlogits, at, ddt) + g : g);
  }
}

/* ---- by warps: up to 1024 experts, 64 slots -----------------------------------------------------------------------
   A warp takes a token; lane k has the slots k and k+32.  No barriers of the group. */
#if defined(MOE_PTX) && !defined(MOE_ST_F64)
typedef struct {
  REAL shift, D, Z; /* as NORMALIZE has them */
  REAL s[2];        /* scored() of the lane's slots */
} norms;
/* l: the logits of the lane's slots, where `has`. */
FN norms normalize(const REAL *l, const int *has, const GLOBAL uchar *logits, long row, long s1, int dt, int E,
                   int score, int norm, REAL epsilon)
{
  norms z;
  const int lane = LID & 31;
  z.shift = R(0.0), z.D = R(1.0);
  if (norm == SHIFTED || OVER_EXPERTS) {
    REAL top = -REAL_INF;
    for (int e = lane; OVER_EXPERTS && e < E; e += 32) top = MAX2(top, LOGIT(e));
    UNROLL for (int h = 0; h < 2; h++)
      if (norm == SHIFTED && has[h]) top = MAX2(top, exponent(score, l[h]));
    WARP_TREE(top, 32, MAX2);
    z.shift = top;
  }
  if (OVER_EXPERTS) {
    REAL all = R(0.0);
    for (int e = lane; e < E; e += 32) all += exp(LOGIT(e) - z.shift);
    WARP_TREE(all, 32, SUM2);
    z.D = all;
  }
  UNROLL for (int h = 0; h < 2; h++) z.s[h] = has[h] ? scored(score, l[h], z.shift) : R(0.0);
  z.Z = z.D;
  if (norm != PLAIN) {
    REAL sum = z.s[0] + z.s[1];
    WARP_TREE(sum, 32, SUM2);
    z.Z = norm == EPSILON ? sum + epsilon * z.D : sum;
  }
  return z;
}

FN void load_keys(key *keys, int n, const GLOBAL uchar *logits, long row, long s1, int dt, int E, int lane)
{
  UNROLL for (int i = 0; i < n; i++) {
    const int e = lane + 32 * i;
    keys[i] = as_int(ldx(logits, row + MIN2(e, E - 1) * s1, dt));
  }
}
/* ids[t,:] as route_select chooses them, without groups, and weights[t,:] (opt) as route_weights has them, for up to
   32*n experts.  Lane i has the keys of the experts i, i+32, ... in registers.  A round finds the largest key of the
   warp, and the lowest expert that has it, in one instruction each, and strikes it out.
   Bytes: the logits once (for a softmax over E again, from cache), ids and weights once. */
FN void route(TENSOR(int, ids), TENSOR(REAL, weights), TENSOR(const uchar, logits), int dt, long s0, long s1,
              TENSOR(const REAL, bias), long T, int E, int K, int rule, int score, int norm, REAL scale, REAL epsilon,
              int n)
{
  AT(ids);
  AT_OPT(weights);
  AT_OPT(bias);
  const int lane = LID & 31;
  const long t = ROW(32), row = logits_at + t * s0;
  key keys[32];
  if (t >= T) return;
  if (dt == DT_F32) load_keys(keys, n, logits, row, s1, DT_F32, E, lane);
  else if (dt == DT_BF16) load_keys(keys, n, logits, row, s1, DT_BF16, E, lane);
  else load_keys(keys, n, logits, row, s1, DT_F16, E, lane);
  REAL top = -REAL_INF, sum = R(0.0);
  if (rule == BY_SOFTMAX) {
    UNROLL for (int i = 0; i < n; i++)
      if (lane + 32 * i < E) top = as_float(keys[i]) > top ? as_float(keys[i]) : top;
    WARP_TREE(top, 32, MAX2);
    UNROLL for (int i = 0; i < n; i++)
      if (lane + 32 * i < E && !IS_NAN(as_float(keys[i]))) sum += exp(as_float(keys[i]) - top);
    WARP_TREE(sum, 32, SUM2);
  }
  UNROLL for (int i = 0; i < n; i++) {
    const int e = lane + 32 * i;
    REAL v = as_float(keys[i]);
    if (rule == BY_SOFTMAX) v = exp(v - top) / sum;
    else if (rule == BY_SIGMOID) v = sigmoid(v);
    if (bias && e < E) v += bias[e];
    keys[i] = e < E ? key_of(v) : KEY_NEVER;
  }

  int id[2], has[2];
  REAL l[2];
  UNROLL for (int h = 0; h < 2; h++) id[h] = 0, l[h] = R(0.0), has[h] = lane + 32 * h < K;
  for (int k = 0; k < K; k++) {
    key best = keys[0];
    int e = E;
    UNROLL for (int i = 1; i < n; i++) best = MAX2(best, keys[i]);
    best = warp_max(best);
    UNROLL for (int i = n - 1; i >= 0; i--)
      if (keys[i] == best) e = lane + 32 * i;
    e = warp_min(e);
    UNROLL for (int i = 0; i < n; i++)
      if (lane + 32 * i == e) keys[i] = KEY_NEVER;
    UNROLL for (int h = 0; h < 2; h++)
      if (lane + 32 * h == k) id[h] = e, l[h] = real_of(best);
  }
  UNROLL for (int h = 0; h < 2; h++)
    if (has[h]) ids[t * K + lane + 32 * h] = id[h];
  if (!weights) return;
  UNROLL for (int h = 0; h < 2; h++)
    if (has[h] && (rule != BY_LOGIT || bias)) l[h] = LOGIT(id[h]);
  const norms z = normalize(l, has, logits, row, s1, dt, E, score, norm, epsilon);
  UNROLL for (int h = 0; h < 2; h++)
    if (has[h]) weights[t * K + lane + 32 * h] = scale * share_of(z.s[h], z.Z);
}
#define ROUTE(n)                                                                                                       \
  KERNEL(route_##n)                                                                                                    \
  (TENSOR(int, ids), TENSOR(REAL, weights), TENSOR(const uchar, logits), int dt, long s0, long s1,                     \
   TENSOR(const REAL, bias), long T, int E, int K, int rule, int score, int norm, REAL scale, REAL epsilon)            \
  {                                                                                                                    \
    route(ids, ids_at, weights, weights_at, logits, logits_at, dt, s0, s1, bias, bias_at, T, E, K, rule, score, norm,  \
          scale, epsilon, n);                                                                                          \
  }
ROUTE(2)
ROUTE(4)
ROUTE(8)
ROUTE(32)

/* route_weights_bwd: the slots' gradients are put into a row of local memory, from where dlogits is written once.
   Slots of one expert take turns, in order. */
KERNEL(route_bwd)(TENSOR(uchar, dlogits), int ddt, long d0, long d1, TENSOR(const REAL, dweights),
                  TENSOR(const uchar, logits), int dt, long s0, long s1, TENSOR(const int, ids), long T, int E, int K,
                  int lanes, int score, int norm, REAL scale, REAL epsilon, int accumulate)
{
  LOCAL_ARRAY(REAL, rows, 8 * 1024);
  AT(dweights);
  AT(ids);
  const int lane = LID & 31;
  const long t = ROW(lanes), row = logits_at + t * s0;
  LOCAL REAL *mine = rows + LID / 32 * E;
  if (t >= T) return;
  int id[2], has[2], bad = 0;
  REAL d[2], l[2], u[2], flow[2], c = R(0.0), all = R(0.0);
  UNROLL for (int h = 0; h < 2; h++) {
    const int k = lane + 32 * h;
    id[h] = k < K ? ids[t * K + k] : 0;
    d[h] = k < K ? dweights[t * K + k] : R(0.0);
    has[h] = k < K && KNOWN(id[h]);
    bad |= k < K && !KNOWN(id[h]);
  }
  UNROLL for (int h = 0; h < 2; h++) l[h] = has[h] ? LOGIT(id[h]) : R(0.0);
  for (int e = lane; e < E; e += 32) mine[e] = R(0.0);
  const norms z = normalize(l, has, logits, row, s1, dt, E, score, norm, epsilon);
  UNROLL for (int h = 0; h < 2; h++) {
    u[h] = share_of(z.s[h], z.Z);
    if (has[h] && !IS_FINITE(scale * u[h])) bad = 1;
    if (has[h]) c += d[h] * u[h];
  }
  bad = warp_max(bad);
  if (norm != PLAIN) {
    WARP_TREE(c, 32, SUM2);
  } else {
    c = R(0.0);
  }
  if (OVER_EXPERTS) {
    UNROLL for (int h = 0; h < 2; h++)
      if (has[h]) all += scale * u[h] * (d[h] - c);
    WARP_TREE(all, 32, SUM2);
  }
  WARP_BARRIER();
  UNROLL for (int h = 0; h < 2; h++)
    if (32 * h < K) {
      const int turn = popcount(warp_match(has[h] ? id[h] : -1 - lane) & ((1u << lane) - 1)), turns = warp_max(turn);
      for (int i = 0; i <= turns; i++) {
        if (has[h] && turn == i) mine[id[h]] += d[h] - c;
        WARP_BARRIER();
      }
    }
  UNROLL for (int h = 0; h < 2; h++) flow[h] = has[h] ? mine[id[h]] : R(0.0);
  WARP_BARRIER();
  UNROLL for (int h = 0; h < 2; h++)
    if (has[h]) mine[id[h]] = scale * u[h] * log_slope(score, l[h]) * flow[h];
  WARP_BARRIER();
  for (int e = lane; e < E; e += 32) {
    const long at = dlogits_at + t * d0 + e * d1;
    REAL g = mine[e];
    if (OVER_EXPERTS) g -= share_of(exp(LOGIT(e) - z.shift), z.D) * all;
    if (bad) g = REAL_NAN;
    stx(dlogits, at, ddt, accumulate ? ldx(dlogits, at, ddt) + g : g);
  }
}
#endif

/* ---- balance and z losses ----------------------------------------------------------------------------------
   T = S*N tokens; p[t,:] = scored(l, shift_t) / sum_t;  z_t = logsumexp(l)^2.  `score` is SOFTMAX or SIGMOID.
   Sums over tokens go by spans of SPAN tokens of a sequence, then over spans: a shape that T, S and the local size
   fix.  A block is BLOCK neighbouring experts.  Rows are read by chunks (common.clh), for exp on vectors. */
#define SPAN 64
#define BLOCK 32

/* scored() of a chunk of logits; `score` is SOFTMAX or SIGMOID */
FN chunk scored_chunk(int score, chunk l, REAL shift)
{
  chunk p;
  UNROLL EACH(j) p.v[j] = exponent(score, l.v[j]) - shift;
  p = exp_chunk(p);
  if (score == SIGMOID) {
    UNROLL EACH(j) l.v[j] = -fabs(l.v[j]);
    l = exp_chunk(l);
    UNROLL EACH(j) p.v[j] /= R(1.0) + l.v[j];
  }
  return p;
}

#define EACH_CHUNK(e) for (int e = lane * CHUNK; e < E; e += lanes * CHUNK)
#define LOGITS(e) ldx_chunk(logits, row + (e)*s1, s1, E - (e), wide, dt)
/* Of a row of E logits: top = max l, sum_exp = sum of exp(l - top), sum = sum of scored(l, shift). */
#define ROW_SUMS(top, sum_exp, shift, sum)                                                                             \
  REAL top = -REAL_INF, sum_exp = R(0.0), shift, sum = R(0.0);                                                         \
  do {                                                                                                                 \
    EACH_CHUNK(e) {                                                                                                    \
      const chunk l_ = LOGITS(e);                                                                                      \
      UNROLL EACH(j) if (e + j < E) top = MAX2(top, l_.v[j]);                                                          \
    }                                                                                                                  \
    ROW_MAX(top, top, buf, lanes);                                                                                     \
    shift = exponent(score, top);                                                                                      \
    EACH_CHUNK(e) {                                                                                                    \
      const chunk l_ = LOGITS(e), x_ = scored_chunk(SOFTMAX, l_, top);                                                 \
      UNROLL EACH(j) if (e + j < E) sum_exp += x_.v[j];                                                                \
      if (score != SOFTMAX) {                                                                                          \
        const chunk p_ = scored_chunk(score, l_, shift);                                                               \
        UNROLL EACH(j) if (e + j < E) sum += p_.v[j];                                                                  \
      }                                                                                                                \
    }                                                                                                                  \
    ROW_SUM(sum_exp, sum_exp, buf, lanes);                                                                             \
    ROW_SUM(sum, sum, buf, lanes);                                                                                     \
    if (score == SOFTMAX) sum = sum_exp;                                                                               \
  } while (0)

/* Step 1: rows[0..2][t] = shift, 1/sum, z.  Reads the logits once from memory.  Masked tokens get z = 0; what else
   stands in their rows is not used. */
KERNEL(route_balance_rows)(TENSOR(REAL, rows), TENSOR(const uchar, logits), int dt, long s0, long s1,
                           TENSOR(const uchar, mask), long T, int E, int lanes, int score)
{
  LOCAL_ARRAY(REAL, buf, 256);
  AT(rows);
  AT_OPT(mask);
  const int lane = LANE(lanes), wide = CHUNK_OK(logits, logits_at, dt, s0, s1);
  const long t = ROW(lanes), row = logits_at + MIN2(t, T - 1) * s0;
  ROW_SUMS(top, sum_exp, shift, sum);
  if (lane != 0 || t >= T) return;
  const REAL lse = top + log(sum_exp);
  rows[t] = shift;
  rows[T + t] = R(1.0) / sum;
  rows[2 * T + t] = mask && !mask[t] ? R(0.0) : lse * lse;
}

/* Step 2: group (s*spans + i, b) sums span i of sequence s over the experts of block b: part_probs[s,i,e] = sum of p,
   part_counts[s,i,e] = slots that chose e (whole numbers, exact in REAL: at most SPAN*K), and block 0 the sum of z and
   the number of unmasked tokens.  An item takes a chunk of columns and every parts-th token.  Counting is a histogram
   in local memory, whose integer atomics have one result in any order.  Reads the logits once more (from cache on a
   GPU: step 1 was just there) and the ids once a block.
   One group per expert over all tokens was not kept: it reads columns, and has E groups only. */
KERNEL(route_balance_spans)(TENSOR(REAL, part_probs), TENSOR(REAL, part_counts), TENSOR(REAL, part_z),
                            TENSOR(REAL, part_tokens), TENSOR(const REAL, rows), TENSOR(const uchar, logits), int dt,
                            long s0, long s1, TENSOR(const int, ids), TENSOR(const uchar, mask), long T, long N,
                            long spans, int E, int K, int score)
{
  LOCAL_ARRAY(REAL, buf, 256 * CHUNK);
  LOCAL_ARRAY(int, hist, BLOCK);
  AT(part_probs);
  AT(part_counts);
  AT(part_z);
  AT(part_tokens);
  AT(rows);
  AT(ids);
  AT_OPT(mask);
  const long span = GROUP(0), begin = span / spans * N + span % spans * SPAN;
  const long end = MIN2(begin + SPAN, (span / spans + 1) * N);
  const int first = (int)GROUP(1) * BLOCK, columns = BLOCK / CHUNK, parts = MAX2(1, LSIZE / columns);
  const int wide = CHUNK_OK(logits, logits_at, dt, s0, s1);

  for (int i = LID; i < BLOCK; i += LSIZE) hist[i] = 0;
  for (int i = LID; i < parts * columns; i += LSIZE) {
    const int e = first + i % columns * CHUNK;
    chunk sum;
    UNROLL EACH(j) sum.v[j] = R(0.0);
    for (long t = begin + i / columns; t < end && e < E; t += parts) {
      if (mask && !mask[t]) continue;
      const chunk l = ldx_chunk(logits, logits_at + t * s0 + e * s1, s1, E - e, wide, dt);
      const chunk p = scored_chunk(score, l, rows[t]);
      UNROLL EACH(j) sum.v[j] += p.v[j] * rows[T + t];
    }
    UNROLL EACH(j) buf[i * CHUNK + j] = sum.v[j];
  }
  GROUP_BARRIER();
  for (long i = begin * K + LID; i < end * K; i += LSIZE) {
    const int e = ids[i];
    if (e >= first && e < MIN2(first + BLOCK, E) && (!mask || mask[i / K])) atomic_inc(&hist[e - first]);
  }
  GROUP_BARRIER();
  for (int i = LID; i < BLOCK && first + i < E; i += LSIZE) {
    REAL sum = R(0.0);
    for (int part = 0; part < parts; part++) sum += buf[part * BLOCK + i];
    part_probs[span * E + first + i] = sum;
    part_counts[span * E + first + i] = (REAL)hist[i];
  }
  REAL z = R(0.0), tokens = R(0.0);
  for (long t = begin + LID; t < end; t += LSIZE) {
    z += rows[2 * T + t];
    if (!mask || mask[t]) tokens += R(1.0);
  }
  GROUP_SUM(z, z, buf);
  GROUP_SUM(tokens, tokens, buf);
  if (LID == 0 && GROUP(1) == 0) part_z[span] = z, part_tokens[span] = tokens;
}

/* Step 3: group (s, b) sums the spans of sequence s for the experts of block b into probs[s,e] and counts[s,e], an
   item one expert and every parts-th span;
   dots[s,b] = sum over the block of count*prob; block 0 also tokens[s]. */
KERNEL(route_balance_sums)(TENSOR(int, counts), TENSOR(REAL, probs), TENSOR(int, tokens), TENSOR(REAL, dots),
                           TENSOR(const REAL, part_probs), TENSOR(const REAL, part_counts),
                           TENSOR(const REAL, part_tokens), long spans, int E)
{
  LOCAL_ARRAY(REAL, buf, 256);
  LOCAL_ARRAY(int, ibuf, 256);
  AT(counts);
  AT(probs);
  AT(tokens);
  AT(dots);
  AT(part_probs);
  AT(part_counts);
  AT(part_tokens);
  const long s = GROUP(0);
  const int first = (int)GROUP(1) * BLOCK, parts = MAX2(1, LSIZE / BLOCK);
  for (int i = LID; i < parts * BLOCK; i += LSIZE) {
    const int e = first + i % BLOCK;
    REAL sum = R(0.0);
    int count = 0;
    if (e < E) {
      UNROLL_BY(8) for (long j = s * spans + i / BLOCK; j < (s + 1) * spans; j += parts) {
        sum += part_probs[j * E + e];
        count += (int)part_counts[j * E + e];
      }
    }
    buf[i] = sum;
    ibuf[i] = count;
  }
  GROUP_BARRIER();
  REAL dot = R(0.0);
  for (int i = LID; i < BLOCK && first + i < E; i += LSIZE) {
    REAL sum = R(0.0);
    int count = 0;
    for (int part = 0; part < parts; part++) sum += buf[part * BLOCK + i], count += ibuf[part * BLOCK + i];
    probs[s * E + first + i] = sum;
    counts[s * E + first + i] = count;
    dot += (REAL)count * sum;
  }
  GROUP_SUM(dot, dot, buf);
  if (LID == 0) dots[s * GROUPS(1) + GROUP(1)] = dot;
  int n = 0;
  for (long j = s * spans + LID; j < (s + 1) * spans; j += LSIZE) n += (int)part_tokens[j];
  GROUP_SUM(n, n, ibuf);
  if (LID == 0 && GROUP(1) == 0) tokens[s] = n;
}

/* Step 4, one group: losses[0] = mean over the sequences s with n_s > 0 tokens of E/(K n_s^2) sum_e count*prob;
   losses[1] = sum z / sum n_s; 0 where there is no token. */
KERNEL(route_balance_losses)(TENSOR(REAL, losses), TENSOR(const int, tokens), TENSOR(const REAL, dots),
                             TENSOR(const REAL, part_z), long S, long spans, long blocks, int E, int K)
{
  LOCAL_ARRAY(REAL, buf, 256);
  LOCAL_ARRAY(long, lbuf, 256);
  AT(losses);
  AT(tokens);
  AT(dots);
  AT(part_z);
  REAL balance = R(0.0), z = R(0.0);
  long n = 0, live = 0;
  for (long s = LID; s < S; s += LSIZE) {
    REAL dot = R(0.0);
    if (tokens[s] == 0) continue;
    for (long b = 0; b < blocks; b++) dot += dots[s * blocks + b];
    balance += dot / (REAL)tokens[s] / (REAL)tokens[s];
    n += tokens[s];
    live++;
  }
  for (long i = LID; i < S * spans; i += LSIZE) z += part_z[i];
  GROUP_SUM(balance, balance, buf);
  GROUP_SUM(z, z, buf);
  GROUP_SUM(n, n, lbuf);
  GROUP_SUM(live, live, lbuf);
  if (LID == 0) {
    losses[0] = live ? balance * ((REAL)E / (REAL)K) / (REAL)live : R(0.0);
    losses[1] = n ? z / (REAL)n : R(0.0);
  }
}

/* dlogits[t,:] (+)= scale * (balance_coef * E/(K n_s^2 live) * p'(count[s,:]) + z_coef * 2 lse/n * softmax(l))
   for unmasked tokens, 0 for masked ones.  Counts are constants, so
     p'(v)[e] = p_e (v_e - sum_j p_j v_j)                  softmax
                p_e (1 - sigmoid(l_e)) (v_e - sum_j p_j v_j)   sigmoid(l)/sum
   and a NaN logit stays in its row.  n and live are summed over the S sequences by every group (S is small beside
   T; the sums are of integers).  Bytes: logits once from memory, dlogits once (twice if accumulated). */
KERNEL(route_balance_bwd)(TENSOR(uchar, dlogits), int ddt, long d0, long d1, TENSOR(const uchar, logits), int dt,
                          long s0, long s1, TENSOR(const int, counts), TENSOR(const int, tokens),
                          TENSOR(const uchar, mask), TENSOR(const REAL, scale), long T, long S, int E, int K, int score,
                          int accumulate, REAL balance_coef, REAL z_coef, int lanes)
{
  LOCAL_ARRAY(REAL, buf, 256);
  LOCAL_ARRAY(long, lbuf, 256);
  AT(counts);
  AT(tokens);
  AT_OPT(mask);
  AT_OPT(scale);
  const int lane = LANE(lanes), wide = CHUNK_OK(logits, logits_at, dt, s0, s1);
  const long t = ROW(lanes), live_t = MIN2(t, T - 1), s = live_t / (T / S), row = logits_at + live_t * s0;
  const REAL factor = scale ? scale[0] : R(1.0), n_s = (REAL)tokens[s];
  const GLOBAL int *count = counts + s * E;
  long n = 0, live = 0;
  for (long i = LID; i < S; i += LSIZE) n += tokens[i], live += tokens[i] > 0;
  GROUP_SUM(n, n, lbuf);
  GROUP_SUM(live, live, lbuf);

  ROW_SUMS(top, sum_exp, shift, sum);
  REAL mean = R(0.0);
  EACH_CHUNK(e) {
    const chunk p = scored_chunk(score, LOGITS(e), shift);
    UNROLL EACH(j) if (e + j < E) mean += p.v[j] / sum * (REAL)count[e + j];
  }
  ROW_SUM(mean, mean, buf, lanes);

  if (t >= T) return;
  const int used = !mask || mask[t];
  const REAL balance = used ? factor * balance_coef * ((REAL)E / (REAL)K) / (REAL)live / n_s / n_s : R(0.0);
  const REAL z = used ? factor * z_coef * R(2.0) * (top + log(sum_exp)) / (REAL)n : R(0.0);
  const int d_wide = CHUNK_OK(dlogits, dlogits_at, ddt, d0, d1);
  EACH_CHUNK(e) {
    const long at = dlogits_at + t * d0 + e * d1;
    chunk g;
    UNROLL EACH(j) g.v[j] = R(0.0);
    if (used) {
      const chunk l = LOGITS(e), p = scored_chunk(score, l, shift);
      const chunk q = score == SOFTMAX ? p : scored_chunk(SOFTMAX, l, top);
      UNROLL EACH(j) {
        const REAL v = e + j < E ? (REAL)count[e + j] : R(0.0), slope = score == SOFTMAX ? R(1.0) : sigmoid(-l.v[j]);
        g.v[j] = balance * (p.v[j] / sum) * slope * (v - mean) + z * (q.v[j] / sum_exp);
      }
    }
    if (accumulate) {
      const chunk old = ldx_chunk(dlogits, at, d1, E - e, d_wide, ddt);
      UNROLL EACH(j) g.v[j] += old.v[j];
    }
    stx_chunk(dlogits, at, d1, E - e, d_wide, ddt, g);
  }
}

/* Both by warps, a token each, with its logits in registers: lane i has those of the experts i, i+32, ... */
#if defined(MOE_PTX) && !defined(MOE_ST_F64)
#define EACH_OWN(i) UNROLL for (int i = 0; i < n; i++) if (lane + 32 * i < E)
/* top, sum_exp, shift, sum as ROW_SUMS has them; p[i] = scored(l[i], shift) */
#define OWN_SUMS(l, p)                                                                                                 \
  REAL l[8], p[8], top = -REAL_INF, sum_exp = R(0.0), shift, sum = R(0.0);                                           \
  do {                                                                                                                 \
    EACH_OWN(i) l[i] = ldx(logits, row + (lane + 32 * i) * s1, dt);                                                    \
    EACH_OWN(i) top = MAX2(top, l[i]);                                                                                 \
    WARP_TREE(top, 32, MAX2);                                                                                          \
    shift = exponent(score, top);                                                                                      \
    EACH_OWN(i) p[i] = exp(l[i] - top), sum_exp += p[i];                                                               \
    WARP_TREE(sum_exp, 32, SUM2);                                                                                      \
    sum = sum_exp;                                                                                                     \
    if (score != SOFTMAX) {                                                                                            \
      sum = R(0.0);                                                                                                    \
      EACH_OWN(i) p[i] = scored(score, l[i], shift), sum += p[i];                                                      \
      WARP_TREE(sum, 32, SUM2);                                                                                        \
    }                                                                                                                  \
  } while (0)

/* Steps 1 and 2 at once: group s*spans + i takes span i of sequence s, a warp every eighth of its tokens, whose p it
   adds up in registers.  Reads the logits once. */
FN void balance_fwd(TENSOR(REAL, part_probs), TENSOR(REAL, part_counts), TENSOR(REAL, part_z),
                    TENSOR(REAL, part_tokens), TENSOR(const uchar, logits), int dt, long s0, long s1,
                    TENSOR(const int, ids), TENSOR(const uchar, mask), long N, long spans, int E, int K, int score,
                    LOCAL REAL *sums, LOCAL REAL *buf, LOCAL int *hist, int n)
{
  AT(part_probs);
  AT(part_counts);
  AT(part_z);
  AT(part_tokens);
  AT(ids);
  AT_OPT(mask);
  const long span = GROUP(0), begin = span / spans * N + span % spans * SPAN;
  const long end = MIN2(begin + SPAN, (span / spans + 1) * N);
  const int lane = LID & 31, warps = LSIZE / 32;
  REAL own[8], z = R(0.0), tokens = R(0.0);
  UNROLL for (int i = 0; i < n; i++) own[i] = R(0.0);
  for (int e = LID; e < E; e += LSIZE) hist[e] = 0;
  for (long t = begin + LID / 32; t < end; t += warps) {
    const long row = logits_at + t * s0;
    if (mask && !mask[t]) continue;
    OWN_SUMS(l, p);
    const REAL share = R(1.0) / sum, lse = top + log(sum_exp);
    EACH_OWN(i) own[i] += p[i] * share;
    if (lane == 0) z += lse * lse, tokens += R(1.0);
  }
  EACH_OWN(i) sums[LID / 32 * E + lane + 32 * i] = own[i];
  GROUP_SUM(z, z, buf);
  GROUP_SUM(tokens, tokens, buf);
  GROUP_BARRIER();
  for (long i = begin * K + LID; i < end * K; i += LSIZE) {
    const int e = ids[i];
    if (KNOWN(e) && (!mask || mask[i / K])) atomic_inc(&hist[e]);
  }
  GROUP_BARRIER();
  for (int e = LID; e < E; e += LSIZE) {
    REAL all = R(0.0);
    for (int w = 0; w < warps; w++) all += sums[w * E + e];
    part_probs[span * E + e] = all;
    part_counts[span * E + e] = (REAL)hist[e];
  }
  if (LID == 0) part_z[span] = z, part_tokens[span] = tokens;
}

FN void balance_bwd(TENSOR(uchar, dlogits), int ddt, long d0, long d1, TENSOR(const uchar, logits), int dt, long s0,
                    long s1, TENSOR(const int, counts), TENSOR(const int, tokens), TENSOR(const uchar, mask),
                    TENSOR(const REAL, scale), long T, long S, int E, int K, int score, int accumulate,
                    REAL balance_coef, REAL z_coef, LOCAL long *lbuf, int n)
{
  AT(counts);
  AT(tokens);
  AT_OPT(mask);
  AT_OPT(scale);
  long many = 0, live = 0;
  for (long i = LID; i < S; i += LSIZE) many += tokens[i], live += tokens[i] > 0;
  GROUP_SUM(many, many, lbuf);
  GROUP_SUM(live, live, lbuf);
  const int lane = LID & 31;
  const long t = ROW(32), row = logits_at + t * s0;
  if (t >= T) return;
  const long s = t / (T / S);
  const REAL factor = scale ? scale[0] : R(1.0), n_s = (REAL)tokens[s];
  const int used = !mask || mask[t];
  const GLOBAL int *count = counts + s * E;
  OWN_SUMS(l, p);
  REAL mean = R(0.0);
  const REAL share = R(1.0) / sum, share_exp = R(1.0) / sum_exp;
  EACH_OWN(i) mean += p[i] * share * (REAL)count[lane + 32 * i];
  WARP_TREE(mean, 32, SUM2);
  const REAL balance = used ? factor * balance_coef * ((REAL)E / (REAL)K) / (REAL)live / n_s / n_s : R(0.0);
  const REAL z = used ? factor * z_coef * R(2.0) * (top + log(sum_exp)) / (REAL)many : R(0.0);
  EACH_OWN(i) {
    const int e = lane + 32 * i;
    const long at = dlogits_at + t * d0 + e * d1;
    REAL g = R(0.0);
    if (used) {
      const REAL slope = score == SOFTMAX ? R(1.0) : sigmoid(-l[i]), q = score == SOFTMAX ? p[i] : exp(l[i] - top);
      g = balance * (p[i] * share) * slope * ((REAL)count[e] - mean) + z * (q * share_exp);
    }
    stx(dlogits, at, ddt, accumulate ? ldx(dlogits, at, ddt) + g : g);
  }
}
#define BALANCE(n)                                                                                                     \
  KERNEL(balance_fwd_##n)                                                                                              \
  (TENSOR(REAL, part_probs), TENSOR(REAL, part_counts), TENSOR(REAL, part_z), TENSOR(REAL, part_tokens),               \
   TENSOR(const uchar, logits), int dt, long s0, long s1, TENSOR(const int, ids), TENSOR(const uchar, mask), long N,   \
   long spans, int E, int K, int score)                                                                                \
  {                                                                                                                    \
    LOCAL_ARRAY(REAL, sums, 8 * 32 * n);                                                                               \
    LOCAL_ARRAY(REAL, buf, 256);                                                                                       \
    LOCAL_ARRAY(int, hist, 32 * n);                                                                                    \
    balance_fwd(part_probs, part_probs_at, part_counts, part_counts_at, part_z, part_z_at, part_tokens,                \
                part_tokens_at, logits, logits_at, dt, s0, s1, ids, ids_at, mask, mask_at, N, spans, E, K, score,      \
                sums, buf, hist, n);                                                                                   \
  }                                                                                                                    \
  KERNEL(balance_bwd_##n)                                                                                              \
  (TENSOR(uchar, dlogits), int ddt, long d0, long d1, TENSOR(const uchar, logits), int dt, long s0, long s1,           \
   TENSOR(const int, counts), TENSOR(const int, tokens), TENSOR(const uchar, mask), TENSOR(const REAL, scale), long T, \
   long S, int E, int K, int score, int accumulate, REAL balance_coef, REAL z_coef)                                    \
  {                                                                                                                    \
    LOCAL_ARRAY(long, lbuf, 256);                                                                                      \
    balance_bwd(dlogits, dlogits_at, ddt, d0, d1, logits, logits_at, dt, s0, s1, counts, counts_at, tokens, tokens_at, \
                mask, mask_at, scale, scale_at, T, S, E, K, score, accumulate, balance_coef, z_coef, lbuf, n);         \
  }
BALANCE(2)
BALANCE(4)
BALANCE(8)
#endif

/* ---- counts ------------------------------------------------------------------------------------------------ */
/* Slots of expert e over the S sequences. */
FN long load_of(const GLOBAL int *counts, long S, int E, int e)
{
  long load = 0;
  for (long s = 0; s < S; s++) load += counts[s * E + e];
  return load;
}

/* bias[e] += rate * sign(sum/E - load_e), the sign of the 64-bit integer sum - E*load_e: no mean is rounded.  One
   group (the sum is over everything); reads the counts twice. */
KERNEL(route_bias_step)(TENSOR(REAL, bias), TENSOR(const int, counts), long S, int E, REAL rate)
{
  LOCAL_ARRAY(long, lbuf, 256);
  AT(bias);
  AT(counts);
  long sum = 0;
  for (int e = LID; e < E; e += LSIZE) sum += load_of(counts, S, E, e);
  GROUP_SUM(sum, sum, lbuf);
  for (int e = LID; e < E; e += LSIZE) {
    const long excess = E * load_of(counts, S, E, e);
    if (excess != sum) bias[e] += excess < sum ? rate : -rate;
  }
}

/* stats = { -sum q ln q, max load * E / sum, experts with load 0, sum },  q_e = load_e / sum; the first two are 0
   where sum is.  One group; reads the counts twice. */
KERNEL(route_load_stats)(TENSOR(REAL, stats), TENSOR(const int, counts), long S, int E)
{
  LOCAL_ARRAY(REAL, buf, 256);
  LOCAL_ARRAY(long, lbuf, 256);
  AT(stats);
  AT(counts);
  long sum = 0, most = 0, dead = 0;
  for (int e = LID; e < E; e += LSIZE) {
    const long load = load_of(counts, S, E, e);
    sum += load;
    most = MAX2(most, load);
    dead += load == 0;
  }
  GROUP_SUM(sum, sum, lbuf);
  GROUP_MAX(most, most, lbuf);
  GROUP_SUM(dead, dead, lbuf);
  REAL entropy = R(0.0);
  for (int e = LID; e < E; e += LSIZE) {
    const long load = load_of(counts, S, E, e);
    if (load > 0) entropy -= (REAL)load / (REAL)sum * log((REAL)load / (REAL)sum);
  }
  GROUP_SUM(entropy, entropy, buf);
  if (LID == 0) {
    stats[0] = entropy;
    stats[1] = sum ? (REAL)most * (REAL)E / (REAL)sum : R(0.0);
    stats[2] = (REAL)dead;
    stats[3] = (REAL)sum;
  }
}
