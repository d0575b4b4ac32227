/* args.h - the contract of every op: shape, type and direction of each field, written only here.

   T tokens, D model width, F expert width, E experts, K chosen per token, R = T*K rows.
   REAL: double when `dtype` is F64, else float.  ST: the storage type `dtype`.  "float": F64, F32, BF16
   or F16, each tensor its own.  In F64 calls floats may be F64 or F32; in others no F64.
   "opt": the handle may be NULL.  Strides are arbitrary (non-negative) unless "packed" is said.
   Outputs do not overlap inputs unless said.  Every struct begins with `dtype`, the program variant. */
#ifndef MOE_CORE_ARGS_H
#define MOE_CORE_ARGS_H

#include <moe/tensor.h>

/* ---- elt: maps over n elements, packed ---------------------------------------------------------------- */
enum moe__elt { MOE__ELT_COPY, MOE__ELT_FILL, MOE__ELT_ADD, MOE__ELT_MUL, MOE__ELT_AXPY, MOE__ELT_SIGMOID };
/* COPY y = alpha*s*a (casts)   FILL y = alpha   ADD y = a + b   MUL y = a*b   AXPY y = alpha*s*a + b
   SIGMOID y = 1/(1+exp(-a));   s = scale[0], 1 where not given.  y may be a or b. */
struct moe__args_elt_map {
  int64_t dtype;    /* of the arithmetic: F64 or F32 */
  moe_tensor y;     /* [n] out float, packed */
  moe_tensor a, b;  /* [n] in float, packed; those the operation names */
  moe_tensor scale; /* [1] opt REAL */
  int64_t op, n;
  double alpha;
};
/* y[i] = stddev * z(seed, stream, i): z is a sum of Philox words times one constant, the same bits on every
   device (kernels/elt.cl has the formula).  */
struct moe__args_elt_normal {
  int64_t dtype;
  moe_tensor y; /* [n] out float, packed */
  int64_t n, seed, stream;
  double stddev;
};
/* y[0] (+)= alpha * sum(a): fixed-shape sum. */
struct moe__args_elt_sum {
  int64_t dtype;
  moe_tensor y;       /* [1] out REAL */
  moe_tensor a;       /* [n] in float, packed */
  moe_tensor scratch; /* [MOE__PARTS] REAL */
  int64_t n, accumulate;
  double alpha;
};
#define MOE__PARTS 256 /* partial results of a two-step reduction */

/* ---- nd: maps and reductions over strided tensors of rank 0 to MOE_RANK_MAX ------------------------------ */
enum moe__nd {
  MOE__ND_COPY, /* alpha*a: casts, scales, permutes, slices, broadcasts; a may be U8 or I32 */
  MOE__ND_ADD,
  MOE__ND_SUB,
  MOE__ND_MUL,
  MOE__ND_DIV,
  MOE__ND_MAX,     /* of a and b; NaN where either is */
  MOE__ND_GREATER, /* a > b: 1, else 0; NaN is neither greater nor equal */
  MOE__ND_EQUAL,
  MOE__ND_WHERE, /* a is not 0: b, else c; a may be U8 or I32; NaN is not 0 */
  MOE__ND_POW,   /* a^alpha; a < 0 with a whole alpha is right; x^0 = 1, of 0 and NaN too */
  MOE__ND_EXP,
  MOE__ND_LOG,
  MOE__ND_SQRT,
  MOE__ND_TANH,
  MOE__ND_ERF,
  MOE__ND_RELU,
  MOE__ND_SIGMOID,
  MOE__ND_SILU,
  MOE__ND_GELU, /* by erf */
  MOE__ND_GELU_TANH
};
/* y (+)= op(a, b, c).  All tensors have y's shape: whoever broadcasts sets strides of 0.  y's elements are
   distinct (no stride of 0 over an extent past 1).  y may be any of the inputs, as the very same view. */
struct moe__args_nd_map {
  int64_t dtype; /* of the arithmetic; the storage type most tensors have is the fastest */
  moe_tensor y;  /* any shape, out float */
  moe_tensor a;  /* in float; where the operation says so U8 or I32 */
  moe_tensor b;  /* in float: ADD..WHERE */
  moe_tensor c;  /* in float: WHERE */
  int64_t op, accumulate;
  double alpha; /* COPY and POW */
};
enum moe__nd_reduction { MOE__ND_SUM, MOE__ND_LARGEST };
/* y (+)= alpha * (sum or largest of a over the dimensions d with bit d of `axes`).  SUM: of nothing 0, in a fixed
   shape.  LARGEST: of nothing -inf, NaN where one is; never accumulates. */
struct moe__args_nd_reduce {
  int64_t dtype;
  moe_tensor y;       /* a's shape with extent 1 in `axes`, out float */
  moe_tensor a;       /* any shape, in float */
  moe_tensor scratch; /* [moe__nd_reduce_scratch(a,axes)] opt REAL, packed; wanted where that is not 0 */
  int64_t op, axes, accumulate;
  double alpha;
};
/* Elements (REAL) of nd_reduce's scratch: often 0, at most an eighth of a's. */
int64_t moe__nd_reduce_scratch(const moe_tensor *a, int64_t axes);
/* y[i] = keep(i) ? a[i] * (1/(1-p)) : 0, the same bits on every device; p = 1 drops all.  keep(i): word i mod 4 of
   Philox4x32-10 with the 64-bit counters i/4 and `stream` (low words first) and the key
   seed + 0x9E3779B97F4A7C15 * step[0] (mod 2^64; step 0 where not given) is at least round(p * 2^32). */
struct moe__args_nd_dropout {
  int64_t dtype;
  moe_tensor y;    /* [n] out float, packed; may be a */
  moe_tensor a;    /* [n] in float, packed */
  moe_tensor step; /* [1] opt I32 or I64 */
  int64_t n, seed, stream;
  double p;
};

/* ---- move -------------------------------------------------------------------------------------------- */
/* y[i,:] = x[map[i]/div,:]; a row whose map entry is outside [0, rows*div) becomes NaN and sets
   MOE_HEALTH_ID. */
struct moe__args_gather_rows {
  int64_t dtype;
  moe_tensor y;      /* [n,D] out ST */
  moe_tensor x;      /* [rows,D] in ST */
  moe_tensor map;    /* [n] in I32, packed */
  moe_tensor health; /* [1] opt I32 */
  int64_t n, rows, D, div;
};
/* y[t,:] (+)= sum over k in order of w[t,k] * rows[slot2row[t,k],:] (w = 1 where weights is not given or
   `unweighted`).  A slot with slot2row < 0 adds 0 where its weight is finite (dropped), NaN where not.
   slot2row not given: row t*K+k.  `add`: y[t,:] = add[t,:] + sum. */
struct moe__args_combine {
  int64_t dtype;
  moe_tensor y;        /* [T,D] out ST */
  moe_tensor rows;     /* [R,D] in ST */
  moe_tensor weights;  /* [T,K] opt REAL, packed */
  moe_tensor slot2row; /* [T,K] opt I32, packed */
  moe_tensor add;      /* [T,D] opt ST; may be y */
  int64_t T, K, D, unweighted;
};
/* y[s] = <a[s/K,:], b[ids[s],:]> for each slot s; 0 for ids outside [0,E). */
struct moe__args_row_dot {
  int64_t dtype;
  moe_tensor y;   /* [T*K] out REAL, packed */
  moe_tensor a;   /* [T,D] in ST */
  moe_tensor b;   /* [E,D] in ST */
  moe_tensor ids; /* [T*K] in I32, packed */
  int64_t T, K, E, D;
};
/* y[t,k] = x[t,ids[t,k]]; NaN for ids outside [0,E). */
struct moe__args_gather_cols {
  int64_t dtype;
  moe_tensor y;   /* [T,K] out ST */
  moe_tensor x;   /* [T,E] in ST */
  moe_tensor ids; /* [T,K] in I32, packed; may repeat in a row */
  int64_t T, E, K;
};
/* y[t,e] = sum of x[t,k] over the k with ids[t,k] = e, in order of k; ids outside [0,E) count for nothing. */
struct moe__args_scatter_cols {
  int64_t dtype;
  moe_tensor y;   /* [T,E] out ST */
  moe_tensor x;   /* [T,K] in ST */
  moe_tensor ids; /* as above */
  int64_t T, E, K;
};

/* ---- norm: y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps) -------------------------------------------- */
struct moe__args_rms_fwd {
  int64_t dtype;
  moe_tensor y;    /* [T,D] out ST */
  moe_tensor rstd; /* [T] out REAL, packed */
  moe_tensor x;    /* [T,D] in ST */
  moe_tensor w;    /* [D] in ST, packed */
  int64_t T, D;
  double eps;
};
struct moe__args_rms_bwd {
  int64_t dtype;
  moe_tensor dx;             /* [T,D] opt out ST */
  moe_tensor dw;             /* [D] opt out float, packed; (+)= */
  moe_tensor dy, x, w, rstd; /* as above, in */
  moe_tensor scratch;        /* [MOE__PARTS, D] REAL; wanted with dw */
  int64_t T, D, accumulate;  /* accumulate: dw += (dx never) */
};

/* ---- act: activations of the expert MLP ----------------------------------------------------------------
   Plain: a = f(min(h, limit)), h [.,F].  Gated: h [., gate 0..F-1 | up F..2F-1], g = min(gate, limit),
   u = clamp(up, -limit, limit), a = f(g) * (u + up_offset), with f(g) = g*sigmoid(alpha*g) for SILU.
   limit 0: no clamp; alpha 0: 1.  At the limit the gradient passes. */
enum moe__act_kind {
  MOE__ACT_IDENTITY = 1,
  MOE__ACT_RELU,
  MOE__ACT_RELU2,
  MOE__ACT_GELU,
  MOE__ACT_GELU_TANH,
  MOE__ACT_SILU,
  MOE__ACT_SIGMOID
};
struct moe__act {
  int64_t kind, gated;
  double alpha, limit, up_offset;
};
struct moe__args_act_fwd {
  int64_t dtype;
  moe_tensor a;    /* [R,F] out ST, packed */
  moe_tensor h;    /* [R,F or 2F] in ST, packed */
  moe_tensor offs; /* [E+1] opt I32: only rows below offs[E]; rows past it stay untouched */
  int64_t R, F, E;
  struct moe__act act;
};
/* da is the gradient of a before the routing weight w:  dh = f'(h) * w*da,  aw = w*a,
   dweights[slot] (+)= <da, a>  (SERIAL: one accumulator over ascending F; PLANE: a fixed tree). */
struct moe__args_act_bwd {
  int64_t dtype;
  moe_tensor dh;                      /* [R,F or 2F] out ST, packed */
  moe_tensor aw;                      /* [R,F] opt out ST, packed */
  moe_tensor dweights;                /* [R] opt out REAL, packed, by slot */
  moe_tensor da;                      /* [R,F] in ST, packed */
  moe_tensor h;                       /* as in act_fwd; dh may be h */
  moe_tensor weights;                 /* [R] opt REAL, packed, by slot; 1 where not given */
  moe_tensor row2slot;                /* [R] opt I32, packed; the identity where not given */
  moe_tensor offs;                    /* [E+1] opt I32 */
  int64_t R, F, E, plane, accumulate; /* accumulate: dweights += */
  struct moe__act act;
};

/* ---- gemm: c[m,n] = alpha * sum_k a[m,k] b[n,k] + bias[n] (+ c) -----------------------------------------
   batch > 0: so many products, every tensor but bias with one more dimension in front ([batch,M,N], ...), whose
   stride may be 0 in a and b. */
struct moe__args_gemm {
  int64_t dtype;
  moe_tensor c;    /* [M,N] out float (own dtype: F32 logits of bf16 operands) */
  moe_tensor a;    /* [M,K] in ST */
  moe_tensor b;    /* [N,K] in ST */
  moe_tensor bias; /* [N] opt float, any stride */
  int64_t M, N, K, accumulate, batch;
  double alpha;
};

/* ---- route ------------------------------------------------------------------------------------------------
   score(l): SOFTMAX exp(l)/sum over all E; SIGMOID; SQRT_SOFTPLUS sqrt(log(1+exp(l)));
   SOFTMAX_CHOSEN softmax over the chosen slots.  NaN logits rank last; exact ties go to the lower id; slots are
   ordered by descending selection score, then id. */
enum moe__scoring { MOE__SOFTMAX = 1, MOE__SIGMOID, MOE__SOFTMAX_CHOSEN, MOE__SQRT_SOFTPLUS };
enum moe__selection { MOE__SELECT_SOFTMAX = 1, MOE__SELECT_GROUPED_SIGMOID };
struct moe__select {
  int64_t kind, K, groups, selected_groups, group_top_two, renormalize;
  double scale; /* of the selection's own weights */
};
/* ids[t,:] = top K.  SOFTMAX: by logit (+ bias on the probability where bias is given);
   GROUPED_SIGMOID: by sigmoid + bias within the best groups.  weights: those of the chosen slots as the op `weights`
   gives them by `weigh` (below); with weigh.scoring 0 the selection's own inference weights (scores without bias),
   renormalized over the slots if asked, times scale. */
struct moe__weigh {
  int64_t scoring, renormalize;
  double scale, epsilon;
};
struct moe__args_select {
  int64_t dtype;      /* F64 or F32 */
  moe_tensor ids;     /* [T,K] out I32, packed */
  moe_tensor weights; /* [T,K] opt out REAL, packed */
  moe_tensor logits;  /* [T,E] in float */
  moe_tensor bias;    /* [E] opt F32 (F64 in f64), packed */
  int64_t T, E;
  struct moe__select select;
  struct moe__weigh weigh;
};
/* weights[t,k] = scale * score(logits[t, ids[t,k]]) / (renormalize ? sum over slots + epsilon : 1);
   renormalized forms with epsilon 0 are computed shifted, exact far from zero.  An id outside [0,E): the
   token's whole row is NaN, MOE_HEALTH_ID.  ids may repeat. */
struct moe__args_weights {
  int64_t dtype;
  moe_tensor weights; /* [T,K] out REAL, packed */
  moe_tensor logits;  /* [T,E] in float */
  moe_tensor ids;     /* [T,K] in I32, packed */
  moe_tensor health;  /* [1] opt I32 */
  int64_t T, E, K;
  struct moe__weigh weigh;
};
/* dlogits (+)= (d weights / d logits)' dweights for fixed ids, every expert (zero where none flows).  A token
   with an id out of range or weights that are not finite: its row is NaN. */
struct moe__args_weights_bwd {
  int64_t dtype;
  moe_tensor dlogits;  /* [T,E] out float */
  moe_tensor dweights; /* [T,K] in REAL, packed */
  moe_tensor logits;   /* [T,E] in float */
  moe_tensor ids;      /* [T,K] in I32, packed */
  int64_t T, E, K, accumulate;
  struct moe__weigh weigh;
};
/* Balance and z losses over T = S*N tokens in S sequences of N (S = 1: the micro-batch form).
   p[t,:] = softmax(l) or sigmoid(l)/sum.  Per sequence, over its unmasked tokens n_s:
   f_e = count_e/(K n_s), P_e = mean p_e, L_s = E sum_e f_e P_e;  balance = mean over sequences that have
   a token.  z = mean over unmasked tokens of logsumexp(l)^2.  No token: both are 0. */
struct moe__args_balance_fwd {
  int64_t dtype;
  moe_tensor losses;           /* [2] out REAL: balance, z (not multiplied by coefficients) */
  moe_tensor counts;           /* [S,E] out I32, packed: chosen slots of unmasked tokens */
  moe_tensor probs;            /* [S,E] out REAL, packed: sum over tokens of p */
  moe_tensor tokens;           /* [S] out I32: n_s */
  moe_tensor logits;           /* [T,E] in float */
  moe_tensor ids;              /* [T,K] in I32, packed */
  moe_tensor mask;             /* [T] opt U8: 0 leaves the token out */
  moe_tensor scratch;          /* [moe__balance_scratch(T,S,E)] REAL */
  int64_t T, S, E, K, scoring; /* scoring: MOE__SOFTMAX or MOE__SIGMOID */
};
/* Elements (REAL) of balance_fwd's scratch. */
int64_t moe__balance_scratch(int64_t T, int64_t S, int64_t E);
/* dlogits (+)= scale[0] * (balance_coef * d balance/dl + z_coef * d z/dl). */
struct moe__args_balance_bwd {
  int64_t dtype;
  moe_tensor dlogits;                             /* [T,E] out float */
  moe_tensor logits, counts, probs, tokens, mask; /* as above, in */
  moe_tensor scale;                               /* [1] opt REAL */
  int64_t T, S, E, K, scoring, accumulate;
  double balance_coef, z_coef;
};
/* bias[e] += rate * sign(mean(counts) - counts[e]): exact integer comparison E*counts[e] against the sum. */
struct moe__args_bias_step {
  int64_t dtype;
  moe_tensor bias;   /* [E] in/out F32 (F64 in f64), packed */
  moe_tensor counts; /* [S,E] in I32, packed: summed over S */
  int64_t S, E;
  double rate;
};
/* stats = {entropy of the load in nats, max load / mean load, experts without a token, slots counted}; the first two
   are 0 where no slot was counted. */
struct moe__args_load_stats {
  int64_t dtype;
  moe_tensor stats;  /* [4] out REAL */
  moe_tensor counts; /* [S,E] in I32, packed */
  int64_t S, E;
};

/* ---- plan: stable counting sort of the slots by expert ----------------------------------------------------
   row2slot: slots by (expert, slot), ascending; slot2row its inverse; offs[e]..offs[e+1]: rows of expert e.
   A token one of whose ids is outside [0,E), or one of whose weights is not finite, leaves the plan with
   all its slots (slot2row -1; MOE_HEALTH_ID or MOE_HEALTH_ROUTE); rows at and past offs[E] of row2slot
   are -1. */
struct moe__args_plan {
  int64_t dtype;
  moe_tensor offs;     /* [E+1] out I32, packed */
  moe_tensor row2slot; /* [R] out I32, packed */
  moe_tensor slot2row; /* [R] out I32, packed */
  moe_tensor ids;      /* [T,K] in I32, packed */
  moe_tensor weights;  /* [T,K] opt REAL, packed */
  moe_tensor health;   /* [1] opt I32 */
  moe_tensor scratch;  /* [moe__plan_scratch(T*K,E)] I32 */
  int64_t T, K, E;
};
/* Elements (I32) of plan's scratch. */
int64_t moe__plan_scratch(int64_t R, int64_t E);

/* ---- ggemm: matrix products over ragged experts ----------------------------------------------------------
   Rows r in [offs[e], offs[e+1]) belong to expert e.  Row r of an operand with a map is row map[r]/div of
   the tensor.  Rows at or past offs[E] are neither read nor written.  Experts without rows are legal. */
enum moe__split { MOE__SPLIT_NONE = 0, MOE__SPLIT_N = 1, MOE__SPLIT_K = 2 };
/* What becomes of the sums v[r,n] of a product over rows.  PLAIN: c = v.  An implementation may refuse the other;
   then the product and act_bwd stand for it.  (act_fwd behind the product was slower than by itself, at the speed of a
   copy: doc/performance.md.)
   ACT_GRAD: v is the da of act_bwd, never rounded (SPLIT_NONE, F = N, slots by map; <da, a> in a fixed shape).  c is
   scratch. */
enum moe__epilogue { MOE__PLAIN = 0, MOE__ACT_GRAD = 1 };
/* c[r,n] = sum_k a[map(r),k] b[e(r),n,k] + bias[e(r),n].
   SPLIT_N: columns 0..N/2-1 from b[0], the rest from b[1] (each [E,N/2,K]).
   SPLIT_K: k in 0..K/2-1 with b[0], the rest with b[1] (each [E,N,K/2]). */
struct moe__args_ggemm_rows {
  int64_t dtype;
  moe_tensor c;       /* [R,N] out ST, rows packed or strided, columns packed */
  moe_tensor a;       /* [R,K] (no map) or [rows,K] in ST */
  moe_tensor b[2];    /* in ST; b[1] where split */
  moe_tensor bias[2]; /* opt ST [E,N] or halves [E,N/2] with SPLIT_N; with SPLIT_K only bias[0] */
  moe_tensor offs;    /* [E+1] in I32, packed */
  moe_tensor map;     /* [R] opt I32, packed */
  int64_t R, E, N, K, split, div, epilogue;
  struct moe__act act;
  moe_tensor dh, aw, dweights, weights; /* ACT_GRAD: as in act_bwd, rows packed or strided */
  moe_tensor h;                         /* ACT_GRAD: [R,F or 2F] in ST, columns packed */
  int64_t accumulate;                   /* ACT_GRAD: dweights += */
};
/* c[e,m,n] (+)= sum over rows r of e of p[pmap(r),m] q[qmap(r),n]; an expert without rows gives 0 (or
   leaves c where accumulate).  split: p's columns 0..M/2-1 go to c[0], the rest to c[1]. */
struct moe__args_ggemm_wgrad {
  int64_t dtype;
  moe_tensor c[2];       /* [E,M,N] out float (one dtype), any strides; halves [E,M/2,N] where split */
  moe_tensor p;          /* [R,M] or [rows,M] in ST */
  moe_tensor q;          /* [R,N] or [rows,N] in ST */
  moe_tensor offs;       /* [E+1] in I32, packed */
  moe_tensor pmap, qmap; /* [R] opt I32, packed */
  int64_t R, E, M, N, split, pdiv, qdiv, accumulate;
};
/* c[e,n] (+)= sum over rows r of e of w[map(r) or r] * p[map(r)/div,n] (w = 1 where not given), in
   a fixed shape. */
struct moe__args_ggemm_colsum {
  int64_t dtype;
  moe_tensor c[2];    /* [E,N] out float; halves where split (columns) */
  moe_tensor p;       /* [R,N] or [rows,N] in ST */
  moe_tensor weights; /* [R] opt REAL, packed, by slot (map[r]); by row without a map */
  moe_tensor offs;    /* [E+1] in I32, packed */
  moe_tensor map;     /* [R] opt I32, packed */
  int64_t R, E, N, split, div, accumulate;
};

/* ---- loss ------------------------------------------------------------------------------------------------ */
/* loss[0] = mean of rowloss over the rows that count, 0 where there is none.  With nll(v) = lse[t] - logits[t,v],
   rowloss[t] = (1-smoothing) * nll(target[t]) + smoothing * (mean over v of nll(v)).
   `ignoring`: a row whose target is ignore_index (in or outside [0,V)) has rowloss 0 and does not count.
   Any other target outside [0,V): NaN and MOE_HEALTH_ID. */
struct moe__args_xent_fwd {
  int64_t dtype;
  moe_tensor loss;    /* [1] out REAL */
  moe_tensor lse;     /* [T] out REAL, packed */
  moe_tensor rowloss; /* [T] out REAL, packed */
  moe_tensor logits;  /* [T,V] in float */
  moe_tensor targets; /* [T] in I32, packed */
  moe_tensor health;  /* [1] opt I32 */
  moe_tensor counted; /* [1] opt out REAL: how many rows count */
  int64_t T, V, ignoring, ignore_index;
  double smoothing; /* in [0,1) */
};
/* dlogits = (softmax - ((1-smoothing)*onehot + smoothing/V)) * dloss[0] / counted[0]; 0 in rows that do not count. */
struct moe__args_xent_bwd {
  int64_t dtype;
  moe_tensor dlogits;              /* [T,V] out float */
  moe_tensor dloss;                /* [1] in REAL */
  moe_tensor logits, lse, targets; /* as above, in */
  moe_tensor counted;              /* [1] in REAL, as forward wrote it; T where not `ignoring`, and not needed */
  int64_t T, V, ignoring, ignore_index;
  double smoothing;
};

/* ---- optim ----------------------------------------------------------------------------------------------- */
/* m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p -= lr*(m/(1-b1^t)/(sqrt(v/(1-b2^t)) + eps) + decay*p) with
   g = gscale[0]*grad, lr = lr[0]*lr_mult, t = step[0].  master (F32): updated, then p = round(master).  Nothing
   changes where gscale[0] is not finite or is negative (the overflow skip). */
struct moe__args_adamw {
  int64_t dtype;     /* F64, or F32 */
  moe_tensor p;      /* [n] in/out float, packed */
  moe_tensor master; /* [n] opt in/out F32, packed; wanted where p is BF16 or F16 */
  moe_tensor m, v;   /* [n] in/out REAL, packed */
  moe_tensor g;      /* [n] in float, packed */
  moe_tensor lr;     /* [1] in REAL */
  moe_tensor step;   /* [1] in I64: t, from 1 */
  moe_tensor gscale; /* [1] opt REAL */
  int64_t n;
  double beta1, beta2, eps, decay, lr_mult;
};
/* y[0] (+)= sum(a^2): fixed-shape sum. */
struct moe__args_sqnorm {
  int64_t dtype;
  moe_tensor y;       /* [1] out REAL */
  moe_tensor a;       /* [n] in float, packed */
  moe_tensor scratch; /* [MOE__PARTS] REAL */
  int64_t n, accumulate;
};
/* norm = sqrt(sq[0]) * inv;  y[0] = inv * (max_norm > 0 and norm > max_norm ? max_norm/norm : 1), y[1] = norm;
   inv = 1/loss_scale[0] (1 where not given).  Where norm is not finite or inv is not positive: y[0] = -1 (adamw skips) and
   MOE_HEALTH_OVERFLOW. */
struct moe__args_clip {
  int64_t dtype;
  moe_tensor y;          /* [2] out REAL */
  moe_tensor sq;         /* [1] in REAL */
  moe_tensor loss_scale; /* [1] opt REAL */
  moe_tensor health;     /* [1] opt I32 */
  double max_norm;
};
/* step[0] += 1 (not where gscale[0] is given and adamw skips for it); lr[0] by warm-up and cosine:
   t < warmup: peak*t/warmup;  else floor + (peak-floor)*(1+cos(pi*min(1,(t-warmup)/(total-warmup))))/2;
   total 0: peak after the warm-up. */
struct moe__args_lr_step {
  int64_t dtype;
  moe_tensor lr;     /* [1] out REAL */
  moe_tensor step;   /* [1] in/out I64 */
  moe_tensor gscale; /* [1] opt REAL */
  int64_t warmup, total;
  double peak, floor;
};

/* ---- stats ----------------------------------------------------------------------------------------------- */
#define MOE__WATCHED 16
/* An element is bad where it is NaN, infinite, or >= limit in magnitude.  For each i in order whose a[i] has one:
   record[0] += 1 and, where that was 0, record[1] = tag[i] and record[2] = the index of the first one (2^32-2 past
   that). */
struct moe__args_watch {
  int64_t dtype;              /* F32: elements are compared as bits, whatever their type */
  moe_tensor record;          /* [3] in/out I64, packed */
  moe_tensor scratch;         /* [MOE__WATCHED] in/out I32, packed: all -1 before, and again after */
  moe_tensor a[MOE__WATCHED]; /* opt, any length, in float (F64 too), packed */
  int64_t tag[MOE__WATCHED];
  double limit; /* > 0 */
};

#endif
