/* route_cpu.cl - selection, routing weights and their gradient, balance and z losses on CPU devices: kernels/route.cl
   has the formulas.

   T tokens, E experts, K slots of a token.  A work-group is one work-item and takes a run of tokens, one after
   another; a row of logits lies in local memory (the first-level cache) and is worked on in explicit vectors, without
   barriers.  An item for each token in scalar code, the obvious version, is several times slower: PoCL has no
   vector math but what is written as vectors.  Bytes: logits, ids, weights and gradients once. */
#pragma OPENCL FP_CONTRACT OFF

#define ROOM 1024 /* experts, and slots of a token */

#define SOFTMAX 1
#define SIGMOID 2
#define SQRT_SOFTPLUS 4
#define PLAIN 0
#define SHIFTED 1
#define EPSILON 2
#define BY_LOGIT 0
#define BY_SOFTMAX 1
#define BY_SIGMOID 2
#define HEALTH_ID 2

#ifdef MOE_ST_F64
typedef long key;
#define KEY_MOST 0x7fffffffffffffffL
#define AS_VEC CAT(as_double, VW)
#define AS_VINT CAT(as_long, VW)
#define AS_KEY as_long
#define AS_REAL as_double
#else
typedef int key;
#define KEY_MOST 0x7fffffff
#define AS_VEC CAT(as_float, VW)
#define AS_VINT CAT(as_int, VW)
#define AS_KEY as_int
#define AS_REAL as_float
#endif
#define KEY_NAN (-KEY_MOST)
#define KEY_NEVER (-KEY_MOST - 1) /* not a candidate */

/* This group's run of tokens. */
#define TOKENS(t) for (long t = T * GROUP(0) / GROUPS(0); t < T * (GROUP(0) + 1) / GROUPS(0); t++)
#define VECTORS(i, n) for (int i = 0; i < (n); i += VW)

/* ---- rows --------------------------------------------------------------------------------------------------------
   Rows of n elements in local memory are padded to a multiple of VW. */
FN void pad(LOCAL REAL *row, int n, REAL value)
{
  for (int i = n; i % VW; i++) row[i] = value;
}
/* n elements from `at` on; padded with NaN. */
FN void load_row(LOCAL REAL *row, const GLOBAL uchar *x, long at, long stride, int type, int n)
{
  int i = 0;
  if (type == DT_REAL && stride == 1)
    for (; i + VW <= n; i += VW) VSTORE(VLOAD(0, (const GLOBAL REAL *)x + at + i), 0, row + i);
  for (; i < n; i++) row[i] = ldx(x, at + i * stride, type);
  pad(row, n, REAL_NAN);
}
/* The largest of what is no NaN, -inf where there is none. */
FN REAL max_of(const LOCAL REAL *row, int n)
{
  VEC most = -REAL_INF;
  VECTORS(i, n)
  {
    const VEC x = VLOAD(0, row + i);
    most = select(most, x, x > most);
  }
  REAL lane[VW], top = -REAL_INF;
  VSTORE(most, 0, lane);
  UNROLL for (int j = 0; j < VW; j++) top = MAX2(top, lane[j]);
  return top;
}
FN REAL sum_lanes(VEC sum)
{
  REAL lane[VW];
  VSTORE(sum, 0, lane);
  UNROLL for (int h = VW / 2; h; h /= 2) UNROLL for (int j = 0; j < h; j++) lane[j] += lane[j + h];
  return lane[0];
}
/* Sum, the padding included; `some`: of what is no NaN. */
FN REAL sum_of(const LOCAL REAL *row, int n, int some)
{
  VEC sum = R(0.0);
  VECTORS(i, n)
  {
    const VEC x = VLOAD(0, row + i);
    sum += some ? select(x, (VEC)R(0.0), x != x) : x;
  }
  return sum_lanes(sum);
}
/* n elements (+)= row, at `at` of a tensor of run-time type. */
FN void store_row(GLOBAL uchar *y, long at, long stride, int type, const LOCAL REAL *row, int n, int add)
{
  int i = 0;
  if (type == DT_REAL && stride == 1) {
    GLOBAL REAL *to = (GLOBAL REAL *)y + at;
    for (; i + VW <= n; i += VW) {
      const VEC x = VLOAD(0, row + i);
      VSTORE(add ? VLOAD(0, to + i) + x : x, 0, to + i);
    }
  }
  for (; i < n; i++) stx(y, at + i * stride, type, add ? ldx(y, at + i * stride, type) + row[i] : row[i]);
}

/* ---- scores: as in kernels/route.cl ------------------------------------------------------------------------------- */
FN VEC negative_part(VEC l)
{
  return select((VEC)R(0.0), l, l < R(0.0));
}
FN VEC exponent(int score, VEC l)
{
  return score == SOFTMAX ? l : score == SIGMOID ? negative_part(l) : R(0.5) * negative_part(l);
}
FN VEC softplus_factor(VEC l)
{
  const VEC x = exp(-fabs(l)), log_x = log1p(x);
  return select(l + log_x, select((VEC)R(1.0), log_x / x, x > R(1e-30)), l < R(0.0));
}
FN VEC scored(int score, VEC l, REAL shift)
{
  const VEC e = exp(exponent(score, l) - shift);
  if (score == SOFTMAX) return e;
  if (score == SIGMOID) return e / (R(1.0) + exp(-fabs(l)));
  return e * sqrt(softplus_factor(l));
}
/* d log(score) / dl of the pointwise part */
FN VEC log_slope(int score, VEC l)
{
  if (score == SOFTMAX) return R(1.0);
  if (score == SIGMOID) return scored(SIGMOID, -l, R(0.0));
  return R(0.5) / ((R(1.0) + exp(-fabs(l))) * softplus_factor(l));
}
FN REAL share_of(REAL p, REAL sum)
{
  return p == sum ? R(1.0) : p / sum;
}
FN VEC shares_of(VEC p, REAL sum)
{
  return select(p / sum, (VEC)R(1.0), p == sum);
}

/* ---- selection ---------------------------------------------------------------------------------------------------
   Integers that have the order of the reals: -inf < ... < +inf, -0 = 0, NaN below all. */
FN VINT keys_of(VEC v)
{
  const VINT bits = AS_VINT(v);
  return select(select(bits, -(bits & KEY_MOST), bits < 0), (VINT)KEY_NAN, v != v);
}
FN key key_of(REAL v)
{
  const key bits = AS_KEY(v);
  return IS_NAN(v) ? KEY_NAN : bits < 0 ? -(bits & KEY_MOST) : bits;
}
FN REAL real_of(key k)
{
  return k == KEY_NAN ? REAL_NAN : k < 0 ? -AS_REAL(-k) : AS_REAL(k);
}
/* The place of the highest key, the first of equals, which becomes KEY_NEVER; `count` is a multiple of VW.  Lanes keep the
   best they have seen, so K passes cost K * n / VW steps. */
FN int take_best(LOCAL key *keys, int count)
{
  key best[VW], place[VW];
  UNROLL for (int j = 0; j < VW; j++) place[j] = j;
  const VINT lane = VLOAD(0, place);
  VINT most = KEY_NEVER, at = lane;
  VECTORS(i, count)
  {
    const VINT k = VLOAD(0, keys + i), higher = k > most;
    most = select(most, k, higher);
    at = select(at, lane + (key)i, higher);
  }
  VSTORE(most, 0, best);
  VSTORE(at, 0, place);
  UNROLL for (int n = VW / 2; n; n /= 2)
  {
    UNROLL for (int j = 0; j < n; j++)
    {
      const key k = best[j + n], p = place[j + n];
      const int other = k > best[j] || (k == best[j] && p < place[j]);
      best[j] = other ? k : best[j];
      place[j] = other ? p : place[j];
    }
  }
  keys[place[0]] = KEY_NEVER;
  return (int)place[0];
}

/* ids[t,:] = the K best experts of token t, best first; parameters as those of route_select (kernels/route.cl). */
LOCAL_SIZE(1)
KERNEL(select_rows)
(TENSOR(int, ids), TENSOR(const uchar, logits), int type, long s0, long s1, TENSOR(const REAL, bias), long T, int E,
 int K, int rule, int groups, int keep, int top_two)
{
  LOCAL_ARRAY(REAL, row, ROOM);
  LOCAL_ARRAY(key, keys, ROOM);
  LOCAL_ARRAY(REAL, shift, ROOM);
  LOCAL_ARRAY(key, group_keys, ROOM);
  AT(ids);
  AT_OPT(bias);
  const int size = groups ? E / groups : E, padded = (E + VW - 1) / VW * VW;
  const int padded_groups = (groups + VW - 1) / VW * VW;
  for (int e = 0; e < padded; e++) shift[e] = bias && e < E ? bias[e] : R(0.0);
  TOKENS(t)
  {
    REAL top = R(0.0), sum = R(1.0);
    load_row(row, logits, logits_at + t * s0, s1, type, E);
    if (rule == BY_SOFTMAX) {
      top = max_of(row, E);
      VECTORS(e, E) VSTORE(exp(VLOAD(0, row + e) - top), 0, row + e);
      sum = sum_of(row, E, 1);
    }
    VECTORS(e, E)
    {
      VEC v = VLOAD(0, row + e);
      if (rule == BY_SOFTMAX) v /= sum;
      if (rule == BY_SIGMOID) v = scored(SIGMOID, v, R(0.0));
      VSTORE(keys_of(bias ? v + VLOAD(0, shift + e) : v), 0, keys + e);
    }
    for (int e = E; e < padded; e++) keys[e] = KEY_NEVER;
    if (groups) {
      for (int g = 0; g < padded_groups; g++) {
        key first = KEY_NEVER, second = KEY_NEVER;
        for (int e = g * size; g < groups && e < (g + 1) * size; e++) {
          const key k = keys[e];
          second = MAX2(second, MIN2(first, k));
          first = MAX2(first, k);
        }
        group_keys[g] = top_two && g < groups ? key_of(real_of(first) + real_of(second)) : first;
      }
      for (int i = 0; i < keep; i++) take_best(group_keys, padded_groups);
      for (int g = 0; g < groups; g++)
        for (int e = g * size; group_keys[g] != KEY_NEVER && e < (g + 1) * size; e++) keys[e] = KEY_NEVER;
    }
    for (int k = 0; k < K; k++) ids[t * K + k] = take_best(keys, padded);
  }
}

/* ---- weights ------------------------------------------------------------------------------------------------------
   Both kernels begin with it: shift, D and Z as NORMALIZE of kernels/route.cl; `slots` has the chosen logits (NaN for an
   id out of range), `row` the logits where the score is a softmax over E.  *bad: an id is out of range. */
#define KNOWN(id) ((id) >= 0 && (id) < E)
#define OVER_EXPERTS (score == SOFTMAX && norm != SHIFTED)
struct norm {
  REAL shift, D, Z;
  int bad;
};
FN struct norm normalize(LOCAL REAL *row, LOCAL REAL *slots, LOCAL REAL *work, const GLOBAL uchar *logits, long at,
                         long stride, int type, const GLOBAL int *id, int E, int K, int score, int norm, REAL epsilon)
{
  struct norm n = { R(0.0), R(1.0), R(1.0), 0 };
  for (int k = 0; k < K; k++) {
    const int known = KNOWN(id[k]);
    slots[k] = known ? ldx(logits, at + id[k] * stride, type) : REAL_NAN;
    n.bad |= !known;
  }
  pad(slots, K, REAL_NAN);
  if (OVER_EXPERTS) {
    load_row(row, logits, at, stride, type, E);
    n.shift = max_of(row, E);
    VECTORS(e, E) VSTORE(exp(VLOAD(0, row + e) - n.shift), 0, work + e);
    pad(work, E, R(0.0));
    n.D = sum_of(work, E, 0);
  } else if (norm == SHIFTED) {
    VECTORS(k, K) VSTORE(exponent(score, VLOAD(0, slots + k)), 0, work + k);
    pad(work, K, REAL_NAN);
    n.shift = max_of(work, K);
  }
  n.Z = n.D;
  if (norm != PLAIN) {
    VECTORS(k, K) VSTORE(scored(score, VLOAD(0, slots + k), n.shift), 0, work + k);
    pad(work, K, R(0.0));
    n.Z = sum_of(work, K, 0);
    if (norm == EPSILON) n.Z += epsilon * n.D;
  }
  return n;
}

/* weights[t,k] = scale * s_k / Z; NaN and HEALTH_ID for a token with an id outside [0,E). */
LOCAL_SIZE(1)
KERNEL(weights_rows)
(TENSOR(REAL, weights), TENSOR(const uchar, logits), int type, long s0, long s1, TENSOR(const int, ids),
 TENSOR(int, health), long T, int E, int K, int score, int norm, REAL scale, REAL epsilon)
{
  LOCAL_ARRAY(REAL, row, ROOM);
  LOCAL_ARRAY(REAL, slots, ROOM);
  LOCAL_ARRAY(REAL, work, ROOM);
  AT(weights);
  AT(ids);
  AT_OPT(health);
  TOKENS(t)
  {
    const struct norm n =
        normalize(row, slots, work, logits, logits_at + t * s0, s1, type, ids + t * K, E, K, score, norm, epsilon);
    VECTORS(k, K)
    VSTORE(scale * shares_of(scored(score, VLOAD(0, slots + k), n.shift), n.Z), 0, work + k);
    for (int k = 0; k < K; k++) weights[t * K + k] = n.bad ? REAL_NAN : work[k];
    if (n.bad && health) ATOMIC_OR(health, HEALTH_ID);
  }
}

/* dlogits[t,:] (+)= the gradient of route_weights_bwd (kernels/route.cl): for a softmax over E every expert gets
   -p_e * sum_k w_k (d_k - c); then each expert among the ids, at its first slot, what flows through all its slots. */
LOCAL_SIZE(1)
KERNEL(weights_bwd_rows)
(TENSOR(uchar, dlogits), int d_type, long d0, long d1, TENSOR(const REAL, dweights), TENSOR(const uchar, logits),
 int type, long s0, long s1, TENSOR(const int, ids), long T, int E, int K, int score, int norm, REAL scale,
 REAL epsilon, int accumulate)
{
  LOCAL_ARRAY(REAL, row, ROOM);
  LOCAL_ARRAY(REAL, slots, ROOM);
  LOCAL_ARRAY(REAL, work, ROOM);
  AT(dweights);
  AT(ids);
  TOKENS(t)
  {
    const GLOBAL int *id = ids + t * K;
    const GLOBAL REAL *d = dweights + t * K;
    const struct norm n =
        normalize(row, slots, work, logits, logits_at + t * s0, s1, type, id, E, K, score, norm, epsilon);
    /* slots := u_k; work := d log(score)/dl there; row := exp(l - shift) for all experts */
    int bad = n.bad;
    REAL c = R(0.0), all = R(0.0);
    VECTORS(k, K)
    {
      const VEC l = VLOAD(0, slots + k);
      VSTORE(log_slope(score, l), 0, work + k);
      VSTORE(shares_of(scored(score, l, n.shift), n.Z), 0, slots + k);
    }
    for (int k = 0; k < K; k++) {
      bad |= !IS_FINITE(scale * slots[k]);
      if (norm != PLAIN) c += d[k] * slots[k];
    }
    for (int k = 0; k < K; k++) all += scale * slots[k] * (d[k] - c);
    VECTORS(e, E)
    {
      VEC g = R(0.0);
      if (OVER_EXPERTS) g -= shares_of(scored(score, VLOAD(0, row + e), n.shift), n.D) * all;
      VSTORE(bad ? (VEC)REAL_NAN : g, 0, row + e);
    }
    for (int k = 0; k < K && !bad; k++) {
      REAL flow = d[k] - c;
      int first = 1;
      for (int j = 0; j < k; j++) first &= id[j] != id[k];
      for (int j = k + 1; j < K && first; j++)
        if (id[j] == id[k]) flow += d[j] - c;
      if (first) row[id[k]] += scale * slots[k] * work[k] * flow;
    }
    store_row(dlogits, dlogits_at + t * d0, d1, d_type, row, E, accumulate);
  }
}

/* ---- balance and z losses: kernels/route.cl has the formulas ----------------------------------------------------- */
#define SPAN 256

/* A token's softmax (or sigmoid over its sum), from its logits in `row`: work := exp(l - top) or the like. */
struct scores {
  REAL top, sum_exp, sum; /* of exp(l - top), of the scores */
};
FN struct scores scores_of(const LOCAL REAL *row, LOCAL REAL *work, int E, int score)
{
  struct scores s;
  s.top = max_of(row, E);
  VECTORS(e, E) VSTORE(exp(VLOAD(0, row + e) - s.top), 0, work + e);
  pad(work, E, R(0.0));
  s.sum = s.sum_exp = sum_of(work, E, 0);
  if (score != SOFTMAX) {
    const REAL shift = MIN2(s.top, R(0.0)); /* the largest exponent of a sigmoid */
    VECTORS(e, E) VSTORE(scored(score, VLOAD(0, row + e), shift), 0, work + e);
    pad(work, E, R(0.0));
    s.sum = sum_of(work, E, 0);
  }
  return s;
}

/* Step 1: a span is up to SPAN tokens of a sequence of N.  Of span i, into the scratch: sum of p and slots (whole
   numbers, exact in REAL) of each expert, [spans,E] each; sum of z; unmasked tokens, [spans] each. */
LOCAL_SIZE(1)
KERNEL(balance_spans)
(TENSOR(REAL, scratch), TENSOR(const uchar, logits), int type, long s0, long s1, TENSOR(const int, ids),
 TENSOR(const uchar, mask), long N, long S, int E, int K, int score)
{
  LOCAL_ARRAY(REAL, row, ROOM);
  LOCAL_ARRAY(REAL, work, ROOM);
  LOCAL_ARRAY(REAL, probs, ROOM);
  LOCAL_ARRAY(int, counts, ROOM);
  AT(scratch);
  AT(ids);
  AT_OPT(mask);
  const long each = (N + SPAN - 1) / SPAN, spans = S * each;
  for (long i = spans * GROUP(0) / GROUPS(0); i < spans * (GROUP(0) + 1) / GROUPS(0); i++) {
    const long begin = i / each * N + i % each * SPAN, end = MIN2(begin + SPAN, (i / each + 1) * N);
    REAL z = R(0.0), tokens = R(0.0);
    VECTORS(e, E) VSTORE((VEC)R(0.0), 0, probs + e);
    for (int e = 0; e < E; e++) counts[e] = 0;
    for (long t = begin; t < end; t++) {
      if (mask && !mask[t]) continue;
      load_row(row, logits, logits_at + t * s0, s1, type, E);
      const struct scores s = scores_of(row, work, E, score);
      const REAL lse = s.top + log(s.sum_exp), share = R(1.0) / s.sum;
      VECTORS(e, E) VSTORE(VLOAD(0, probs + e) + VLOAD(0, work + e) * share, 0, probs + e);
      for (int k = 0; k < K; k++)
        if (ids[t * K + k] >= 0 && ids[t * K + k] < E) counts[ids[t * K + k]]++;
      z += lse * lse;
      tokens += R(1.0);
    }
    for (int e = 0; e < E; e++) {
      scratch[i * E + e] = probs[e];
      scratch[(spans + i) * E + e] = (REAL)counts[e];
    }
    scratch[2 * spans * E + i] = z;
    scratch[2 * spans * E + spans + i] = tokens;
  }
}

/* Step 2, one group: the spans of each sequence to probs, counts and tokens, and those to the two losses. */
LOCAL_SIZE(1)
KERNEL(balance_total)
(TENSOR(REAL, losses), TENSOR(int, counts), TENSOR(REAL, probs), TENSOR(int, tokens), TENSOR(const REAL, scratch),
 long N, long S, int E, int K)
{
  AT(losses);
  AT(counts);
  AT(probs);
  AT(tokens);
  AT(scratch);
  const long each = (N + SPAN - 1) / SPAN, spans = S * each;
  REAL balance = R(0.0), z = R(0.0);
  long n = 0, live = 0;
  for (long s = 0; s < S; s++) {
    REAL dot = R(0.0);
    int of_s = 0;
    for (long i = s * each; i < (s + 1) * each; i++) {
      z += scratch[2 * spans * E + i];
      of_s += (int)scratch[2 * spans * E + spans + i];
    }
    for (int e = 0; e < E; e++) {
      REAL p = R(0.0), count = R(0.0);
      for (long i = s * each; i < (s + 1) * each; i++) {
        p += scratch[i * E + e];
        count += scratch[(spans + i) * E + e];
      }
      probs[s * E + e] = p;
      counts[s * E + e] = (int)count;
      dot += count * p;
    }
    tokens[s] = of_s;
    n += of_s;
    if (of_s) {
      balance += dot / (REAL)of_s / (REAL)of_s;
      live++;
    }
  }
  losses[0] = live ? balance * ((REAL)E / (REAL)K) / (REAL)live : R(0.0);
  losses[1] = n ? z / (REAL)n : R(0.0);
}

/* dlogits[t,:] (+)= the gradient of route_balance_bwd (kernels/route.cl); 0 for masked tokens. */
LOCAL_SIZE(1)
KERNEL(balance_bwd_rows)
(TENSOR(uchar, dlogits), int d_type, long d0, long d1, TENSOR(const uchar, logits), int type, long s0, long s1,
 TENSOR(const int, counts), TENSOR(const int, tokens), TENSOR(const uchar, mask), TENSOR(const REAL, scale), long T,
 long S, int E, int K, int score, int accumulate, REAL balance_coef, REAL z_coef)
{
  LOCAL_ARRAY(REAL, row, ROOM);
  LOCAL_ARRAY(REAL, work, ROOM);
  LOCAL_ARRAY(REAL, load, ROOM); /* counts of the present sequence */
  AT(counts);
  AT(tokens);
  AT_OPT(mask);
  AT_OPT(scale);
  const REAL factor = scale ? scale[0] : R(1.0);
  long n = 0, live = 0, loaded = -1;
  for (long s = 0; s < S; s++) n += tokens[s], live += tokens[s] > 0;
  TOKENS(t)
  {
    const long s = t / (T / S);
    if (s != loaded) {
      for (int e = 0; e < E; e++) load[e] = (REAL)counts[s * E + e];
      pad(load, E, R(0.0));
      loaded = s;
    }
    if (mask && !mask[t]) {
      VECTORS(e, E) VSTORE((VEC)R(0.0), 0, row + e);
    } else {
      load_row(row, logits, logits_at + t * s0, s1, type, E);
      const struct scores p = scores_of(row, work, E, score);
      const REAL n_s = (REAL)tokens[s];
      const REAL balance = factor * balance_coef * ((REAL)E / (REAL)K) / (REAL)live / n_s / n_s;
      const REAL z = factor * z_coef * R(2.0) * (p.top + log(p.sum_exp)) / (REAL)n;
      VEC dot = R(0.0);
      VECTORS(e, E)
      {
        const VEC share = VLOAD(0, work + e) / p.sum;
        dot += share * VLOAD(0, load + e);
        VSTORE(share, 0, work + e);
      }
      const REAL mean = sum_lanes(dot);
      VECTORS(e, E)
      {
        const VEC l = VLOAD(0, row + e);
        VEC g = balance * VLOAD(0, work + e) * (VLOAD(0, load + e) - mean);
        if (score != SOFTMAX) g *= log_slope(SIGMOID, l);
        if (z_coef != R(0.0)) g += z * (exp(l - p.top) / p.sum_exp);
        VSTORE(g, 0, row + e);
      }
    }
    store_row(dlogits, dlogits_at + t * d0, d1, d_type, row, E, accumulate);
  }
}
