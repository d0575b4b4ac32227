/* ref.h - the reference: every op of src/core/args.h in double, written from its formula and never from a kernel.

   Numbers carry their own error bound.  A `num` is a value in double and `e`, a bound on how far a kernel's value
   may be from it when each operation rounds as IEEE 754 and OpenCL C 1.2 section 7.4 allow: u for + - *, the ULPs
   of the table for functions, and what errors of the arguments become through the derivative.  For a sum of n
   terms in any order this is the classical gamma_n = n*u/(1 - n*u) times the sum of absolute terms, so nothing
   here is tuned.  compare.h adds one rounding of the storage type.

   Arrays are dense, last dimension fastest, whatever the device's strides are; the sizes and flags are those of
   the op's arguments.  Inputs hold values of their storage type exactly (e = 0).  "opt": NULL where not given. */
#ifndef MOE_REF_H
#define MOE_REF_H

#include "core/args.h"

#include <moe/context.h>

#include <math.h>

typedef struct num {
  double v, e;
} num;

/* Unit roundoff of the arithmetic (2^-53, 2^-24, or 0: exact) and its smallest normal number: results below it
   may be flushed to zero.  One per thread of tests, set by ref_arithmetic. */
extern _Thread_local double ref_u, ref_tiny;
/* Roundings that one addition of a sum may count as: 1, or 2 on matrix units, which cut instead of rounding. */
extern _Thread_local double ref_addition;
/* dtype: F64 or anything else (float arithmetic); MOE_NONE: exact, for small integers. */
void ref_arithmetic(int64_t dtype);

/* What a scalar argument (REAL) becomes on its way to the kernel. */
double ref_real(double x);
/* x rounded to the nearest value of dtype, ties to even; infinite past its range. */
double ref_round(double x, int64_t dtype);
/* Bound on the error of one rounding of a value of magnitude x. */
double ref_rounding(double x, int64_t dtype);

/* ---- arithmetic -------------------------------------------------------------------------------------------- */
static inline num n_exact(double v)
{
  return (num){ v, 0 };
}
/* A scalar argument: exact, or off by its rounding to REAL. */
static inline num n_real(double v)
{
  return (num){ v, fabs(v - ref_real(v)) };
}
/* `ulps` of the result on top of an error already there. */
static inline num n_ulps(double v, double e, double ulps)
{
  return (num){ v, ref_u == 0 ? e : e + 2 * ref_u * ulps * (fabs(v) + e) + ref_tiny };
}
static inline num n_neg(num a)
{
  return (num){ -a.v, a.e };
}
static inline num n_add(num a, num b)
{
  double v = a.v + b.v, e = a.e + b.e;
  return (num){ v, e + ref_u * (fabs(v) + e) };
}
static inline num n_sub(num a, num b)
{
  return n_add(a, n_neg(b));
}
/* No error stays none, of infinity too. */
static inline double n_times(double x, double e)
{
  return e == 0 ? 0 : x * e;
}
static inline num n_mul(num a, num b)
{
  return n_ulps(a.v * b.v, n_times(fabs(a.v), b.e) + n_times(fabs(b.v) + b.e, a.e), 0.5);
}
num n_div(num a, num b);
num n_sqrt(num a);
num n_exp(num a);
num n_expm1(num a);
num n_log(num a);
num n_log1p(num a);
num n_tanh(num a);
num n_erf(num a);
/* To first order in the errors of a and b, which are to be small. */
num n_pow(num a, num b);
num n_cos(num a);
/* 1 / (1 + exp(-a)); also right, with a relative bound, where a is very negative. */
num n_sigmoid(num a);
static inline num n_max(num a, num b)
{
  return (num){ a.v > b.v || isnan(a.v) ? a.v : b.v, a.e > b.e ? a.e : b.e };
}

/* A sum of terms whose order is the kernel's business. */
struct sum {
  double v, e, mag;
  int64_t n;
};
static inline void sum_add(struct sum *s, num a)
{
  s->v += a.v;
  s->e += a.e;
  s->mag += fabs(a.v) + a.e;
  s->n++;
}
/* Adds a*b; its rounding is the n-th of the sum's n (n - 1 additions). */
static inline void sum_mul(struct sum *s, num a, num b)
{
  double v = a.v * b.v, e = fabs(a.v) * b.e + fabs(b.v) * a.e + a.e * b.e + ref_tiny;
  sum_add(s, (num){ v, e });
}
num sum_end(const struct sum *s);

/* ---- elt ----------------------------------------------------------------------------------------------------- */
void ref_elt_map(num *y, const num *a, const num *b, const num *scale, int64_t op, int64_t n, double alpha);
void ref_elt_normal(num *y, int64_t n, int64_t seed, int64_t stream, double stddev);
/* Elements [first, first+n) of a longer tensor. */
void ref_elt_normal_at(num *y, int64_t first, int64_t n, int64_t seed, int64_t stream, double stddev);
/* y[0] is read where `accumulate`; so in all that follow. */
void ref_elt_sum(num *y, const num *a, int64_t n, int64_t accumulate, double alpha);

/* The words of Philox4x32-10 (Salmon et al. 2011) for the counter (counter, stream), low words first. */
void ref_philox(uint32_t words[4], uint64_t counter, uint64_t stream, uint64_t key);

/* ---- nd: inputs of maps are spread to y's shape ------------------------------------------------------------------ */
void ref_nd_map(num *y, const num *a, const num *b, const num *c, int64_t op, int64_t n, int64_t accumulate,
                double alpha); /* b, c: opt */
void ref_nd_reduce(num *y, const num *a, int64_t op, int64_t axes, int64_t rank, const int64_t *shape,
                   int64_t accumulate, double alpha);
/* Elements [first, first+n) of a longer tensor. */
void ref_nd_dropout_at(num *y, const num *a, int64_t first, int64_t n, int64_t seed, int64_t stream, int64_t step,
                       double p);

/* ---- move: the functions with `health` OR its bits into it ------------------------------------------------------ */
void ref_gather_rows(num *y, int32_t *health, const num *x, const int32_t *map, int64_t n, int64_t rows, int64_t D,
                     int64_t div);
void ref_combine(num *y, const num *rows, const num *weights, const int32_t *slot2row, const num *add, int64_t T,
                 int64_t K, int64_t D, int64_t unweighted);
void ref_row_dot(num *y, const num *a, const num *b, const int32_t *ids, int64_t T, int64_t K, int64_t E, int64_t D);
void ref_gather_cols(num *y, const num *x, const int32_t *ids, int64_t T, int64_t E, int64_t K);
void ref_scatter_cols(num *y, const num *x, const int32_t *ids, int64_t T, int64_t E, int64_t K);

/* ---- norm ---------------------------------------------------------------------------------------------------- */
void ref_rms_fwd(num *y, num *rstd, const num *x, const num *w, int64_t T, int64_t D, double eps);
void ref_rms_bwd(num *dx, num *dw, const num *dy, const num *x, const num *w, const num *rstd, int64_t T, int64_t D,
                 int64_t accumulate); /* dx, dw: opt */

/* ---- act: `rows` rows, those below offs[E] ------------------------------------------------------------------------ */
/* f(g) */
num ref_activation(struct moe__act act, num g);
void ref_act_fwd(num *a, const num *h, int64_t rows, int64_t F, struct moe__act act);
/* `st`: the storage type, as a may have been rounded to it before it is multiplied.  aw, dweights, weights and
   row2slot: opt. */
void ref_act_bwd(num *dh, num *aw, num *dweights, const num *da, const num *h, const num *weights,
                 const int32_t *row2slot, int64_t rows, int64_t F, int64_t accumulate, struct moe__act act, int64_t st);

/* ---- gemm ---------------------------------------------------------------------------------------------------- */
void ref_gemm(num *c, const num *a, const num *b, const num *bias, int64_t M, int64_t N, int64_t K, int64_t accumulate,
              double alpha);

/* ---- route ---------------------------------------------------------------------------------------------------- */
/* Are ids[K] of one token a right answer?  Exactly one is, unless scores are closer than their bounds.  NULL, or
   what is wrong. */
const char *ref_select_check(const int32_t *ids, const num *logits, const num *bias, int64_t E, struct moe__select s);
/* The selection's own weights for those ids. */
void ref_select_weights(num *weights, const int32_t *ids, const num *logits, int64_t T, int64_t E,
                        struct moe__select s);
void ref_weights(num *weights, int32_t *health, const num *logits, const int32_t *ids, int64_t T, int64_t E, int64_t K,
                 struct moe__weigh w);
void ref_weights_bwd(num *dlogits, const num *dweights, const num *logits, const int32_t *ids, int64_t T, int64_t E,
                     int64_t K, int64_t accumulate, struct moe__weigh w);
void ref_balance_fwd(num *losses, int32_t *counts, num *probs, int32_t *tokens, const num *logits, const int32_t *ids,
                     const num *mask, int64_t T, int64_t S, int64_t E, int64_t K, int64_t scoring);
/* probs is not needed: the loss is linear in it. */
void ref_balance_bwd(num *dlogits, const num *logits, const int32_t *counts, const int32_t *tokens, const num *mask,
                     const num *scale, int64_t T, int64_t S, int64_t E, int64_t K, int64_t scoring, int64_t accumulate,
                     double balance_coef, double z_coef);
void ref_bias_step(num *bias, const int32_t *counts, int64_t S, int64_t E, double rate);
void ref_load_stats(num *stats, const int32_t *counts, int64_t S, int64_t E);

/* ---- plan ---------------------------------------------------------------------------------------------------- */
void ref_plan(int32_t *offs, int32_t *row2slot, int32_t *slot2row, int32_t *health, const int32_t *ids,
              const num *weights, int64_t T, int64_t K, int64_t E);

/* ---- ggemm: b and c whole, whatever the split; rows past offs[E] are neither read nor written ---------------------- */
void ref_ggemm_rows(num *c, const num *a, const num *b, const num *bias, const int32_t *offs, const int32_t *map,
                    int64_t E, int64_t N, int64_t K, int64_t div);
void ref_ggemm_wgrad(num *c, const num *p, const num *q, const int32_t *offs, const int32_t *pmap, const int32_t *qmap,
                     int64_t E, int64_t M, int64_t N, int64_t pdiv, int64_t qdiv, int64_t accumulate);
void ref_ggemm_colsum(num *c, const num *p, const num *weights, const int32_t *offs, const int32_t *map, int64_t E,
                      int64_t N, int64_t div, int64_t accumulate);

/* ---- loss ---------------------------------------------------------------------------------------------------- */
struct ref_xent {
  int64_t T, V, ignoring, ignore_index;
  double smoothing;
};
void ref_xent_fwd(num *loss, num *lse, num *rowloss, num *counted, int32_t *health, const num *logits,
                  const int32_t *targets, const struct ref_xent *how);
void ref_xent_bwd(num *dlogits, num dloss, num counted, const num *logits, const num *lse, const int32_t *targets,
                  const struct ref_xent *how);

/* ---- optim: as struct moe__args_adamw; p, master (opt), m and v are updated ----------------------------------------- */
struct ref_adamw {
  double beta1, beta2, eps, decay, lr_mult;
  num lr, gscale;
  int64_t step;
};
void ref_adamw(num *p, num *master, num *m, num *v, const num *g, int64_t n, const struct ref_adamw *how);
void ref_sqnorm(num *y, const num *a, int64_t n, int64_t accumulate);
void ref_clip(num y[2], int32_t *health, num sq, const num *loss_scale, double max_norm);
/* Returns the new step. */
int64_t ref_lr_step(num *lr, int64_t step, const num *gscale, int64_t warmup, int64_t total, double peak, double floor);

/* ---- stats: record is {bad tensors, tag and index of the first} ------------------------------------------------------ */
void ref_watch(int64_t record[3], const double *a, int64_t n, int64_t tag, double limit);

#endif
