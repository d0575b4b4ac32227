/* conform.h - how the cases of one op are written.

   Each family's file has `void conform_<op>(struct conform *c)` for its ops: it makes inputs, calls
   c_run_<op>, which forces the implementation under test, and compares with tests/ref.  A case:

     if (!c_begin(c, dtype, "M=%lld", M)) return;           a device without that dtype: no case
     args.a = c_in(c, dtype, T_PAD, a, SHAPE(M, K));        values in, by any layout
     args.c = c_out(c, dtype, T_PACKED, SHAPE(M, N));       NaN before the run
     if (c_run_gemm(c, &args)) c_check(c, "c", &args.c, want);
     c_end(c);

   c_run checks the arguments as the library does, asks can(), runs twice (or `runs` times) from the same
   memory, and wants the same bits and untouched guard bands each time.  Refused by can(): no case, and 0. */
#ifndef MOE_CONFORM_H
#define MOE_CONFORM_H

#include "../ref/compare.h"
#include "../ref/device.h"

#include "core/backend.h"

enum effort { SMALL, SHORT, LONG }; /* for sanitizers; make check; make check-long */

struct conform {
  moe_context *ctx, *other; /* other: the device to compare with, or NULL */
  moe_queue *q, *other_q;
  enum effort effort;
  int runs;          /* of each case, from the same memory and with equal results */
  const char *id;    /* the implementation under test */
  const void *impl;  /* struct moe__impl_<op> */
  struct t_memory m; /* of the present case */
  char name[160];    /* of the present case */
  int64_t cases, failures;
  int tensor;   /* it uses matrix units */
  int broken;   /* its program cannot be built: no more cases */
  double share; /* worst error as a share of its bound */
  char worst[256];
  int compare;        /* the other device has run the present case */
  int spoil;          /* spoil what it gave */
  double times;       /* how many bounds of ours the two may be apart */
  double apart_share; /* the worst difference as a share of that */
  char apart[256];
};

/* Starts a case in the arithmetic of dtype; 0 where the device lacks it, or the program could not be built. */
int c_begin(struct conform *c, int64_t dtype, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* From here on sums are exact: whole numbers in, equal bits wanted. */
void c_exact(void);
void c_end(struct conform *c);
/* Says what is wrong with the present case. */
void c_fail(struct conform *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

moe_tensor c_in(struct conform *c, int64_t dtype, int layout, const num *values, int rank, const int64_t *shape);
moe_tensor c_in_ints(struct conform *c, const int32_t *values, int rank, const int64_t *shape);
moe_tensor c_out(struct conform *c, int64_t dtype, int layout, int rank, const int64_t *shape);
moe_tensor c_inout(struct conform *c, int64_t dtype, int layout, const num *values, int rank, const int64_t *shape);
/* One I32 word, 0 before the run. */
moe_tensor c_health(struct conform *c);

void c_check(struct conform *c, const char *what, const moe_tensor *t, const num *want);
/* What the other device gave; 0: there is none, or it has not run the case. */
int c_other(struct conform *c, const moe_tensor *t, double *values);
/* The same for values already read, of t's shape and dtype. */
void c_check_values(struct conform *c, const char *what, const moe_tensor *t, const double *got, const num *want);
void c_check_ints(struct conform *c, const char *what, const moe_tensor *t, const int32_t *want);

/* A packed tensor as one row. */
moe_tensor c_flat(const moe_tensor *t);

/* Dtypes of programs and of storage; REAL of a call. */
#define C_DTYPES 4
extern const int64_t c_dtypes[C_DTYPES]; /* F32 first */
static inline int64_t c_real(int64_t dtype)
{
  return dtype == MOE_F64 ? MOE_F64 : MOE_F32;
}
/* The i-th of the float types that a tensor of run-time type may have in a call. */
int64_t c_float(int64_t call, int64_t i);
/* Layouts to go through: packed, padded rows, transposed, every second element, shifted by one element. */
int c_layout(int64_t i);

/* Routing data: ids[T,K], distinct in a token, K <= E; pattern 0 random, 1 all to the last experts, 2 round robin
   over half of the experts. */
int32_t *c_ids(struct conform *c, int64_t T, int64_t K, int64_t E, int pattern);

#define OP(name, family)                                                                                               \
  void conform_##name(struct conform *c);                                                                              \
  int c_run_##name(struct conform *c, const struct moe__args_##name *args);
#include "core/ops.def"
#undef OP

/* huge.c: tensors of more than 2^31 elements; called at the end of the op's own cases. */
void huge_elt_map(struct conform *c);
void huge_elt_normal(struct conform *c);
void huge_elt_sum(struct conform *c);
void huge_nd_map(struct conform *c);
void huge_nd_reduce(struct conform *c);
void huge_nd_dropout(struct conform *c);
void huge_sqnorm(struct conform *c);
void huge_gather_rows(struct conform *c);
void huge_combine(struct conform *c);
void huge_rms_fwd(struct conform *c);
void huge_rms_bwd(struct conform *c);
void huge_act_fwd(struct conform *c);
void huge_act_bwd(struct conform *c);
void huge_gemm(struct conform *c);
void huge_select(struct conform *c);
void huge_weights(struct conform *c);
void huge_weights_bwd(struct conform *c);
void huge_ggemm_rows(struct conform *c);
void huge_ggemm_wgrad(struct conform *c);
void huge_ggemm_colsum(struct conform *c);
void huge_adamw(struct conform *c);
void huge_xent(struct conform *c, int backward);

#endif
