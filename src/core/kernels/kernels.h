/* kernels.h - what the launchers of the portable kernels share. */
#ifndef MOE_CORE_KERNELS_H
#define MOE_CORE_KERNELS_H

#include "core/backend.h"
#include "core/dlpack.h"

/* Variant of a program whose kernels know only REAL (route, plan). */
static inline int64_t moe__real(int64_t dtype)
{
  return dtype == MOE_F64 ? MOE_F64 : MOE_F32;
}
static inline int64_t moe__ceil_div(int64_t a, int64_t b)
{
  return (a + b - 1) / b;
}

/* CHUNK of common.clh in that variant. */
static inline int64_t moe__chunk(int64_t dtype)
{
  return dtype == MOE_BF16 || dtype == MOE_F16 ? 8 : 4;
}
/* `run` of MAP_CHUNKS, and the groups of moe__map_local items for n elements taken so. */
static inline int64_t moe__map_run(const moe_queue *q)
{
  return q->ctx->info->pub.kind == MOE_DEVICE_CPU ? 64 : 1;
}
static inline int64_t moe__chunk_groups(const moe_queue *q, int64_t dtype, int64_t n)
{
  return moe__map_groups(q, moe__ceil_div(n, moe__chunk(dtype) * moe__map_run(q)));
}
/* Items that share a row of `columns` (lanes of common.clh): as many as have a chunk, at most the group; but fewer, 32
   at least, where that leaves fewer of them without a last chunk. */
static inline int moe__lanes(const moe_queue *q, int64_t dtype, int64_t columns)
{
  const int64_t chunks = moe__ceil_div(columns, moe__chunk(dtype));
  int lanes = q->ctx->info->reduce_local, best;
  while (lanes > 1 && lanes / 2 >= chunks) lanes /= 2;
  best = lanes;
  for (; lanes >= 32; lanes /= 2)
    if (moe__ceil_div(chunks, lanes) * lanes < moe__ceil_div(chunks, best) * best) best = lanes;
  return best;
}
/* Groups of reduce_local items for so many rows. */
static inline int64_t moe__row_groups(const moe_queue *q, int64_t rows, int lanes)
{
  return moe__ceil_div(rows, q->ctx->info->reduce_local / lanes);
}

/* The op `weights` that gives the weights of a selection. */
static inline struct moe__args_weights moe__weights_of(const struct moe__args_select *args)
{
  const struct moe__select *s = &args->select;
  const int64_t scoring = s->kind == MOE__SELECT_GROUPED_SIGMOID ? MOE__SIGMOID : MOE__SOFTMAX;
  const struct moe__weigh own = { scoring, s->renormalize, s->scale, 0 };
  return (struct moe__args_weights){ .dtype = args->dtype,
                                     .weights = args->weights,
                                     .logits = args->logits,
                                     .ids = args->ids,
                                     .T = args->T,
                                     .E = args->E,
                                     .K = s->K,
                                     .weigh = args->weigh.scoring ? args->weigh : own };
}

/* y[0] (+)= alpha * sum(a), or of its squares (elt.c; needs the program "elt"). */
moe_status moe__sum(moe_queue *q, int64_t dtype, const moe_tensor *y, const moe_tensor *a, const moe_tensor *scratch,
                    int64_t n, int square, int64_t accumulate, double alpha);

/* n / div is n * mul >> shift for 0 <= n < 2^31 (row_map of gemm.cl). */
struct moe__divisor {
  int64_t mul;
  int shift;
};
static inline struct moe__divisor moe__divide(int64_t div)
{
  struct moe__divisor d = { 0, 31 };
  if (div > (int64_t)1 << 31) div = (int64_t)1 << 31;
  while ((int64_t)1 << (d.shift - 31) < div) d.shift++;
  d.mul = ((int64_t)1 << d.shift) / div + 1;
  return d;
}
/* Side of the tiles of gemm.cl for `count` products of rows x columns outputs: 128, or 64 where those would leave
   much of the device idle or cover little. */
static inline int moe__tile(const moe_queue *q, int64_t dtype, int64_t rows, int64_t columns, int64_t count)
{
  const int64_t large = moe__ceil_div(rows, 128) * moe__ceil_div(columns, 128) * count;
  return dtype != MOE_F64 && rows > 64 && columns > 64 && large >= q->ctx->info->pub.compute_units ? 128 : 64;
}
/* The product of gemm and ggemm_rows (gemm.c; needs the program "gemm"): c and bias may have dtypes of their own,
   c any strides; without offs every expert has R rows, in a and c so many elements behind those of the one before. */
moe_status moe__gemm(moe_queue *q, const struct moe__args_ggemm_rows *args, int64_t a_expert, int64_t c_expert,
                     double alpha, int64_t accumulate);

/* Where t begins, as far as alignment goes: on CUDA a handle is an address, elsewhere a buffer, which begins at a
   multiple of more than any access is wide. */
static inline uint64_t moe__begin(const moe_queue *q, const moe_tensor *t)
{
  return (q->ctx->info->dl_type == MOE__DL_CUDA ? (uint64_t)(uintptr_t)t->handle : 0) + t->offset;
}

/* For products without epilogues. */
static inline moe_status moe__can_plain(const struct moe__args_ggemm_rows *args, struct moe__why *why)
{
  return args->epilogue == MOE__PLAIN ? MOE_OK : moe__cannot(why, "has no epilogues");
}

/* ggemm_mma.c, for the lists of backends whose devices may have `ptx`. */
#define MMA(op)                                                                                                        \
  moe_status moe__mma_can_##op(const struct moe__dev_info *info, const struct moe__args_##op *args,                    \
                               struct moe__why *why);                                                                  \
  moe_status moe__mma_run_##op(moe_queue *q, const struct moe__args_##op *args);
MMA(ggemm_rows)
MMA(ggemm_wgrad)
#undef MMA
#define MOE__MMA_IMPL(op)                                                                                              \
  {                                                                                                                    \
#op ":mma", "ggemm_mma", MOE__TENSOR | MOE__TOTAL, moe__mma_can_##op, moe__mma_run_##op                            \
  }

/* These serve all that the check lets through. */
#define MOE__PORTABLE_IMPL(op, family)                                                                                 \
  static moe_status can_##op(const struct moe__dev_info *info, const struct moe__args_##op *args,                      \
                             struct moe__why *why)                                                                     \
  {                                                                                                                    \
    (void)info;                                                                                                        \
    (void)args;                                                                                                        \
    (void)why;                                                                                                         \
    return MOE_OK;                                                                                                     \
  }                                                                                                                    \
  const struct moe__impl_##op moe__portable_##op = { #op ":portable", family, MOE__PORTABLE | MOE__TOTAL, can_##op,    \
                                                     run_##op };

#endif
