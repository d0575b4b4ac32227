/* ggemm_sm90.c - launchers of the Hopper products over ragged experts: what they can serve, and the descriptors by
   which TMA reads and writes the operands.  Descriptors travel in the kernel's parameters, so a launch can be
   captured, and nothing is cached. */
#include "cuda/ggemm_sm90.h"
#include "cuda/impls.h"

#include <cudaTypedefs.h>
#include <math.h>
#include <stdatomic.h>

enum { SIDE = 128, STORED = 16 /* rows that a warp of rows_sm90.cu stores */ };

/* ---- descriptors ---------------------------------------------------------------------------------------------- */

static PFN_cuTensorMapEncodeTiled_v12000 encoder(void)
{
  static _Atomic(PFN_cuTensorMapEncodeTiled_v12000) known;
  PFN_cuTensorMapEncodeTiled_v12000 encode = atomic_load(&known);
  enum cudaDriverEntryPointQueryResult found;
  void *f = NULL;
  if (encode) return encode;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found)) return NULL;
  memcpy(&encode, &f, sizeof encode);
  atomic_store(&known, encode);
  return encode;
}

static unsigned char *first(const moe_tensor *t)
{
  return (unsigned char *)t->handle + t->offset;
}

/* Elements at `base`, the fastest dimension first, read or written in boxes of 128 bytes x `rows`. */
static moe_status describe(CUtensorMap *out, int64_t dtype, void *base, int rank, const int64_t *shape,
                           const int64_t *stride, int rows)
{
  const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  const cuuint64_t size = moe_dtype_size(dtype);
  const cuuint32_t box[3] = { (cuuint32_t)(128 / size), (cuuint32_t)rows, 1 }, every[3] = { 1, 1, 1 };
  cuuint64_t dims[3], bytes[2];
  CUresult result;
  for (int d = 0; d < rank; d++) dims[d] = (cuuint64_t)shape[d];
  for (int d = 1; d < rank; d++)
    bytes[d - 1] = shape[d] > 1 ? size * (cuuint64_t)stride[d] : d > 1 ? bytes[d - 2] * dims[d - 1] : size * dims[0];
  if (!encode) return moe__fail(MOE_ERR_LAUNCH, "the NVIDIA driver has no cuTensorMapEncodeTiled");
  result = encode(out,
                  dtype == MOE_F32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                  : dtype == MOE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                  (cuuint32_t)rank, base, dims, bytes, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return MOE_OK;
  return moe__fail(MOE_ERR_LAUNCH, "cuTensorMapEncodeTiled: error %d for %lld x %lld elements, rows %lld bytes apart",
                   (int)result, (long long)shape[1], (long long)shape[0], (long long)bytes[0]);
}

static moe_status describe_rows(CUtensorMap *out, const moe_tensor *t, int64_t column, int64_t rows, int64_t columns,
                                int box)
{
  return describe(out, t->dtype, first(t) + 2 * column, 2, (const int64_t[]){ columns, rows },
                  (const int64_t[]){ 1, t->stride[0] }, box);
}

/* [E,.,.] of which dimension `fast` is contiguous. */
static moe_status describe_stack(CUtensorMap *out, const moe_tensor *t, int fast, int box)
{
  const int slow = 3 - fast;
  return describe(out, t->dtype, first(t), 3, (const int64_t[]){ t->shape[fast], t->shape[slow], t->shape[0] },
                  (const int64_t[]){ 1, t->stride[slow], t->stride[0] }, box);
}

/* ---- what can be served ----------------------------------------------------------------------------------------- */

static moe_status can_run(const struct moe__dev_info *info, int64_t dtype, int64_t E, struct moe__why *why)
{
  if (info->pub.arch != 90)
    return moe__cannot(why, "wants compute capability 9.0, got %d.%d", (int)info->pub.arch / 10,
                       (int)info->pub.arch % 10);
  if (dtype != MOE_BF16 && dtype != MOE_F16)
    return moe__cannot(why, "wants bf16 or f16, got %s", moe_dtype_name(dtype));
  if (E > MOE__SM90_EXPERTS)
    return moe__cannot(why, "wants at most %d experts, got %lld", MOE__SM90_EXPERTS, (long long)E);
  return MOE_OK;
}

static moe_status can_count(const char *name, int64_t n, struct moe__why *why)
{
  if (n > 0 && n % 8 == 0) return MOE_OK;
  return moe__cannot(why, "wants %s a positive multiple of 8, got %lld", name, (long long)n);
}

/* Rows of 16-byte units: dimension `fast` contiguous, the other strides and the base multiples of 16 bytes. */
static moe_status can_tensor(const char *name, const moe_tensor *t, int fast, struct moe__why *why)
{
  const int64_t unit = 16 / (int64_t)moe_dtype_size(t->dtype), most = (int64_t)1 << 37;
  if (t->stride[fast] != 1)
    return moe__cannot(why, "wants %s contiguous along dimension %d, got stride %lld", name, fast,
                       (long long)t->stride[fast]);
  for (int d = 0; d < t->rank; d++)
    if (d != fast && t->shape[d] > 1 && (t->stride[d] % unit || t->stride[d] < unit || t->stride[d] > most))
      return moe__cannot(why, "wants strides of %s to be multiples of %d up to 2^37, got %lld in dimension %d", name,
                         (int)unit, (long long)t->stride[d], d);
  if (((uintptr_t)t->handle + t->offset) % 16)
    return moe__cannot(why, "wants %s at a multiple of 16 bytes, got %llu over", name,
                       (unsigned long long)(((uintptr_t)t->handle + t->offset) % 16));
  return MOE_OK;
}

static moe_status can_bias(const moe_tensor *t, struct moe__why *why)
{
  if (!t->handle) return MOE_OK;
  if (t->stride[1] == 1 && (t->shape[0] == 1 || t->stride[0] % 2 == 0) && ((uintptr_t)t->handle + t->offset) % 4 == 0)
    return MOE_OK;
  return moe__cannot(why, "wants bias rows contiguous and at multiples of 4 bytes, got strides %lld, %lld",
                     (long long)t->stride[0], (long long)t->stride[1]);
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

static int n_first(const struct moe__args_ggemm_rows *a)
{
  return a->b[0].stride[2] != 1;
}

/* Columns of a tile: SIDE of each half, or twice SIDE. */
static int64_t column_tiles(const struct moe__args_ggemm_rows *a)
{
  return a->split == MOE__SPLIT_N ? moe__ceil_div(a->N / 2, SIDE) : moe__ceil_div(a->N, 2 * SIDE);
}

static moe_status can_epilogue(const struct moe__args_ggemm_rows *a, struct moe__why *why)
{
  if (a->epilogue == MOE__PLAIN) return MOE_OK;
  if (!a->map.handle) return moe__cannot(why, "has epilogues with a map only");
  if (a->bias[0].handle) return moe__cannot(why, "has no bias with the gradient of an activation");
  MOE__TRY(can_tensor("h", &a->h, 1, why));
  MOE__TRY(can_tensor("dh", &a->dh, 1, why));
  return a->aw.handle ? can_tensor("aw", &a->aw, 1, why) : MOE_OK;
}

moe_status moe__sm90_can_ggemm_rows(const struct moe__dev_info *info, const struct moe__args_ggemm_rows *a,
                                    struct moe__why *why)
{
  const int fast = n_first(a) ? 1 : 2;
  MOE__TRY(can_run(info, a->dtype, a->E, why));
  MOE__TRY(can_count("columns of each half", a->split == MOE__SPLIT_N ? a->N / 2 : a->N, why));
  MOE__TRY(can_count("K of each half", a->split == MOE__SPLIT_K ? a->K / 2 : a->K, why));
  MOE__TRY(can_tensor("a", &a->a, 1, why));
  MOE__TRY(can_tensor("b[0]", &a->b[0], fast, why));
  if (a->split) MOE__TRY(can_tensor("b[1]", &a->b[1], fast, why));
  MOE__TRY(can_tensor("c", &a->c, 1, why));
  MOE__TRY(can_epilogue(a, why));
  MOE__TRY(can_bias(&a->bias[0], why));
  if (a->split == MOE__SPLIT_N) MOE__TRY(can_bias(&a->bias[1], why));
  if ((a->R / SIDE + a->E) * column_tiles(a) > INT32_MAX)
    return moe__cannot(why, "wants fewer than 2^31 tiles, got %lld rows of %lld columns", (long long)a->R,
                       (long long)a->N);
  return MOE_OK;
}

static moe_status describe_epilogue(struct moe__sm90_rows *p, const struct moe__args_ggemm_rows *a)
{
  const struct moe__act *act = &a->act;
  if (a->epilogue == MOE__PLAIN) return MOE_OK;
  p->act.kind = (int32_t)act->kind;
  p->act.gated = act->gated != 0;
  p->act.alpha = act->alpha == 0 ? 1.0f : (float)act->alpha;
  p->act.limit = act->limit == 0 ? HUGE_VALF : (float)act->limit;
  p->act.up_offset = (float)act->up_offset;
  for (int i = 0; i < 1 + p->act.gated; i++) MOE__TRY(describe_rows(&p->h[i], &a->h, i * p->N, a->R, p->N, SIDE));
  p->dh = first(&a->dh);
  p->dh_stride = 2 * a->dh.stride[0];
  if (a->aw.handle) p->aw = first(&a->aw);
  p->aw_stride = 2 * a->aw.stride[0];
  if (a->weights.handle) p->weights = (const float *)(void *)first(&a->weights);
  if (a->dweights.handle) p->parts = first(&a->c); /* 4 bytes for 512 of its rows */
  p->parts_stride = 2 * a->c.stride[0];
  return MOE_OK;
}

/* dweights from what the column tiles gave. */
static moe_status start_sums(moe_queue *q, const struct moe__sm90_rows *rows, const struct moe__args_ggemm_rows *a)
{
  static const struct moe__kernel name = { "sm90_rows", "sums" };
  const struct moe__sm90_kernel *k = &moe__sm90_sums_kernel;
  const struct moe__cuda_object object = { name.program, k->function, k->threads, k->shared };
  const struct moe__sm90_sums p = { .parts = rows->parts,
                                    .stride = rows->parts_stride,
                                    .offs = rows->offs,
                                    .map = rows->map,
                                    .sums = (float *)(void *)first(&a->dweights),
                                    .E = rows->E,
                                    .n = (int32_t)column_tiles(a),
                                    .accumulate = a->accumulate != 0 };
  return moe__cuda_start(q->be, &name, &object, moe__ceil_div(a->R, k->threads), &p);
}

/* Whether clusters of two blocks, with neighbouring rows of an expert, share what they read of b.  The last of an
   expert's rows may leave them with little to share. */
static int in_pairs(const struct moe__args_ggemm_rows *a)
{
  return a->R >= 4 * SIDE * a->E;
}

static moe_status start_rows(moe_queue *q, const struct moe__args_ggemm_rows *a)
{
  static const struct moe__kernel name = { "sm90_rows", "rows" };
  const int sn = a->split == MOE__SPLIT_N, sk = a->split == MOE__SPLIT_K, by_n = n_first(a);
  const int f16 = a->dtype == MOE_F16, pairs = in_pairs(a), blocks = 1 + pairs;
  const struct moe__sm90_kernel *k = a->epilogue == MOE__ACT_GRAD
                                         ? &moe__sm90_act_grad_kernels[pairs][f16][by_n]
                                         : &moe__sm90_rows_kernels[pairs][f16][a->map.handle != NULL][by_n];
  const struct moe__cuda_object object = { name.program, k->function, k->threads, k->shared };
  const struct moe__divisor div = moe__divide(a->map.handle ? a->div : 1);
  const int64_t tiles = (a->R / (blocks * SIDE) + (a->E < a->R ? a->E : a->R)) * column_tiles(a); /* of clusters */
  const int64_t fill = q->ctx->info->pub.compute_units / blocks;
  const int stored = a->epilogue == MOE__PLAIN;
  struct moe__sm90_rows p;
  memset(&p, 0, sizeof p);
  p.N = (int32_t)(sn ? a->N / 2 : a->N);
  p.K = (int32_t)(sk ? a->K / 2 : a->K);
  for (int i = 0; i < 2; i++) {
    MOE__TRY(describe_rows(&p.a[i], &a->a, sk ? i * p.K : 0, a->map.handle ? a->a.shape[0] : a->R, p.K, SIDE));
    MOE__TRY(describe_stack(&p.b[i], &a->b[a->split ? i : 0], by_n ? 1 : 2, by_n ? 64 : SIDE));
    if (stored) MOE__TRY(describe_rows(&p.c[i], &a->c, sn ? i * p.N : 0, a->R, p.N, STORED));
    if (a->bias[sn ? i : 0].handle) {
      p.bias[i] = first(&a->bias[sn ? i : 0]);
      p.bias_stride[i] = 2 * a->bias[sn ? i : 0].stride[0];
    }
  }
  p.offs = (const int32_t *)(void *)first(&a->offs);
  if (a->map.handle) p.map = (const int32_t *)(void *)first(&a->map);
  p.x = first(&a->a);
  p.x_stride = 2 * a->a.stride[0];
  if (stored) p.y = first(&a->c);
  p.y_stride = 2 * a->c.stride[0];
  p.div_mul = div.mul;
  p.div_shift = div.shift;
  p.E = (int32_t)a->E;
  p.split = (int32_t)a->split;
  p.slot = tiles > fill ? moe__cuda_slot(q->be, MOE__SM90_SLOTS) : -1;
  MOE__TRY(describe_epilogue(&p, a));
  MOE__TRY(moe__cuda_start(q->be, &name, &object, blocks * (tiles < fill ? tiles : fill), &p));
  return p.parts ? start_sums(q, &p, a) : MOE_OK;
}

/* Descriptors are encoded in the device's context. */
moe_status moe__sm90_run_ggemm_rows(moe_queue *q, const struct moe__args_ggemm_rows *a)
{
  int pushed;
  moe_status st;
  if (a->R == 0) return MOE_OK;
  MOE__TRY(moe__cuda_enter(q->be, &pushed));
  st = start_rows(q, a);
  moe__cuda_leave(q->be, pushed);
  return st;
}

/* ---- wgrad ------------------------------------------------------------------------------------------------------ */

/* c's contiguous dimension is m. */
static int m_fast(const struct moe__args_ggemm_wgrad *a)
{
  return a->c[0].stride[2] != 1;
}

moe_status moe__sm90_can_ggemm_wgrad(const struct moe__dev_info *info, const struct moe__args_ggemm_wgrad *a,
                                     struct moe__why *why)
{
  const int64_t halves = a->split ? 2 : 1, M = a->M / halves;
  const int fast = m_fast(a) ? 1 : 2;
  MOE__TRY(can_run(info, a->dtype, a->E, why));
  if (a->c[0].dtype != MOE_F32 && a->c[0].dtype != a->dtype)
    return moe__cannot(why, "wants c in f32 or %s, got %s", moe_dtype_name(a->dtype), moe_dtype_name(a->c[0].dtype));
  MOE__TRY(can_count("M of each half", M, why));
  MOE__TRY(can_count("N", a->N, why));
  MOE__TRY(can_tensor("p", &a->p, 1, why));
  MOE__TRY(can_tensor("q", &a->q, 1, why));
  MOE__TRY(can_tensor("c[0]", &a->c[0], fast, why));
  if (a->split) MOE__TRY(can_tensor("c[1]", &a->c[1], fast, why));
  if ((a->pmap.handle && 2 * a->p.stride[0] > UINT32_MAX) || (a->qmap.handle && 2 * a->q.stride[0] > UINT32_MAX))
    return moe__cannot(why, "wants gathered rows less than 2^32 bytes apart, got strides %lld, %lld",
                       (long long)a->p.stride[0], (long long)a->q.stride[0]);
  if (a->E * moe__ceil_div(a->M + SIDE, SIDE) * moe__ceil_div(a->N + SIDE, SIDE) > INT32_MAX)
    return moe__cannot(why, "wants fewer than 2^31 tiles, got %lld experts of %lld x %lld", (long long)a->E,
                       (long long)a->M, (long long)a->N);
  return MOE_OK;
}

/* Rows of ragged experts, described such that a box is clipped where its expert's rows end: as [R+1,R,columns], both
   strides one row, R rows before the operand.  Row r of an expert's n that end at `end` is [end,R-n+r], and the tensor
   ends where r is n.  Without rows nothing is read, and a descriptor would be refused. */
static moe_status operand(struct moe__sm90_rows_of *out, const moe_tensor *t, const moe_tensor *map, int64_t div,
                          int64_t R)
{
  const struct moe__divisor d = moe__divide(map->handle ? div : 1);
  const int64_t stride = t->shape[0] > 1 ? t->stride[0] : t->shape[1];
  out->x = first(t);
  out->stride = (uint32_t)(2 * stride);
  out->div_mul = d.mul;
  out->div_shift = d.shift;
  out->columns = (int32_t)t->shape[1];
  if (map->handle) out->map = (const int32_t *)(void *)first(map);
  else if (R)
    return describe(&out->tensor, t->dtype, (void *)((uintptr_t)first(t) - (uintptr_t)(2 * R * stride)), 3,
                    (const int64_t[]){ t->shape[1], R, R + 1 }, (const int64_t[]){ 1, stride, stride }, 64);
  return MOE_OK;
}

/* The kernel's m and n: those of the product or, where only q has a map, the other way round. */
static moe_status start_wgrad(moe_queue *q, const struct moe__args_ggemm_wgrad *a)
{
  static const struct moe__kernel name = { "sm90_wgrad", "wgrad" };
  const int swap = a->qmap.handle && !a->pmap.handle, m = swap ? 2 : 1, n = 3 - m, m_first = m_fast(a) != swap;
  const struct moe__sm90_kernel *k = &moe__sm90_wgrad_kernels[a->dtype == MOE_F16][a->c[0].dtype == MOE_F32];
  const struct moe__cuda_object object = { name.program, k->function, k->threads, k->shared };
  const int64_t size = (int64_t)moe_dtype_size(a->c[0].dtype), fill = q->ctx->info->pub.compute_units / 2;
  struct moe__sm90_wgrad p;
  int64_t pairs;
  memset(&p, 0, sizeof p);
  MOE__TRY(operand(swap ? &p.q : &p.p, &a->p, &a->pmap, a->pdiv, a->R));
  MOE__TRY(operand(swap ? &p.p : &p.q, &a->q, &a->qmap, a->qdiv, a->R));
  for (int i = 0; i < (a->split ? 2 : 1); i++) {
    MOE__TRY(describe_stack(&p.c[i], &a->c[i], m_first ? m : n, m_first && a->c[i].dtype == MOE_F32 ? 32 : 64));
    p.y[i] = first(&a->c[i]);
    p.y_stride[i][0] = size * a->c[i].stride[0];
    p.y_stride[i][1] = size * a->c[i].stride[m];
    p.y_stride[i][2] = size * a->c[i].stride[n];
  }
  p.offs = (const int32_t *)(void *)first(&a->offs);
  p.R = (int32_t)a->R;
  p.E = (int32_t)a->E;
  p.M = (int32_t)a->c[0].shape[m];
  p.N = (int32_t)a->c[0].shape[n];
  p.accumulate = a->accumulate != 0;
  p.turned = m_first;
  p.m_tiles = 2 * (int32_t)moe__ceil_div(p.M, 2 * SIDE);
  p.n_tiles = (int32_t)moe__ceil_div(p.N, 2 * SIDE);
  p.pairs = p.m_tiles / 2 * (a->split && !swap ? 2 : 1);
  p.columns = p.n_tiles * (a->split && swap ? 2 : 1);
  pairs = a->E * p.pairs * p.columns;
  return moe__cuda_start(q->be, &name, &object, 2 * (pairs < fill ? pairs : fill), &p);
}

moe_status moe__sm90_run_ggemm_wgrad(moe_queue *q, const struct moe__args_ggemm_wgrad *a)
{
  int pushed;
  moe_status st;
  if (a->R == 0 && a->accumulate) return MOE_OK;
  MOE__TRY(moe__cuda_enter(q->be, &pushed));
  st = start_wgrad(q, a);
  moe__cuda_leave(q->be, pushed);
  return st;
}
