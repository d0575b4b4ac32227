/* backend.c - which backends there are, and the dispatch that ops.def generates: list, pick, prepare, run. */
#include "core/backend.h"

#include "config.h"

#include <moe/experts.h>

#include <stdarg.h>
#include <stdio.h>

const struct moe__backend *const moe__backends[] = {
#if MOE_HAVE_CUDA
  &moe__cuda_backend,
#endif
#if MOE_HAVE_OPENCL
  &moe__opencl_backend,
#endif
  NULL
};

moe_status moe__cannot(struct moe__why *why, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  vsnprintf(why->text, sizeof why->text, format, args);
  va_end(args);
  return MOE_ERR_UNSUPPORTED;
}

struct moe__karg moe__arg_tensor(const moe_tensor *t)
{
  struct moe__karg arg = { 0 };
  arg.u.buf.handle = t->handle;
  arg.u.buf.offset = t->handle ? (int64_t)(t->offset / moe_dtype_size(t->dtype)) : 0;
  return arg;
}

struct moe__karg moe__arg_int(int64_t v)
{
  struct moe__karg arg = { 1, { .i = (int32_t)v } };
  return arg;
}

struct moe__karg moe__arg_long(int64_t v)
{
  struct moe__karg arg = { 2, { .l = v } };
  return arg;
}

struct moe__karg moe__arg_real(double v)
{
  struct moe__karg arg = { 3, { .r = v } };
  return arg;
}

moe_status moe__launch(moe_queue *q, const struct moe__kernel *k, int64_t dtype, int64_t gx, int64_t gy, int64_t gz,
                       int local, const struct moe__karg *args, int n)
{
  const int64_t groups[3] = { gx, gy, gz };
  if (gx <= 0 || gy <= 0 || gz <= 0) return MOE_OK;
  return q->ctx->be->launch(q->be, k, (int)dtype, groups, local, args, n);
}

int moe__map_local(const moe_queue *q)
{
  return q->ctx->info->pub.kind == MOE_DEVICE_CPU ? 16 : 256;
}

int64_t moe__map_groups(const moe_queue *q, int64_t n)
{
  int64_t local = moe__map_local(q), groups = (n + local - 1) / local;
  int64_t most = q->ctx->info->pub.compute_units * (q->ctx->info->pub.kind == MOE_DEVICE_CPU ? 8 : 32);
  if (most < 1) most = 1;
  return groups < most ? groups : most;
}

static int allowed(int flags, int64_t strategy)
{
  if ((flags & MOE__EXPERIMENTAL) && !MOE_WITH_EXPERIMENTAL) return 0;
  return strategy == MOE_AUTO || (flags & (strategy == MOE_SCALAR ? MOE__PORTABLE : MOE__TENSOR));
}

#define OP(name, family)                                                                                               \
  const struct moe__impl_##name *moe__impl_##name##_at(const moe_context *ctx, int i)                                  \
  {                                                                                                                    \
    const struct moe__impl_##name *list = ctx->be->ops ? ctx->be->ops->name : NULL;                                    \
    int n = 0;                                                                                                         \
    while (list && list[n].id) n++;                                                                                    \
    return i < n ? &list[i] : i == n ? &moe__portable_##name : NULL;                                                   \
  }                                                                                                                    \
  const struct moe__impl_##name *moe__pick_##name(const moe_context *ctx, const struct moe__args_##name *args,         \
                                                  int64_t strategy, struct moe__why *why)                              \
  {                                                                                                                    \
    const struct moe__impl_##name *impl;                                                                               \
    if (why) why->text[0] = 0;                                                                                         \
    for (int i = 0; (impl = moe__impl_##name##_at(ctx, i)); i++) {                                                     \
      struct moe__why own = { "" };                                                                                    \
      if (!allowed(impl->flags, strategy)) continue;                                                                   \
      if (impl->can(ctx->info, args, &own) == MOE_OK) return impl;                                                     \
      if (why) snprintf(why->text, sizeof why->text, "%.40s: %.110s", impl->id, own.text);                             \
    }                                                                                                                  \
    if (why && !why->text[0]) snprintf(why->text, sizeof why->text, "there is no matrix-unit kernel for " #name);      \
    return NULL;                                                                                                       \
  }                                                                                                                    \
  moe_status moe__prepare_##name(moe_context *ctx, const struct moe__args_##name *args, int64_t strategy)              \
  {                                                                                                                    \
    const struct moe__impl_##name *impl;                                                                               \
    struct moe__why why = { "" };                                                                                      \
    if (!moe__pick_##name(ctx, args, strategy, &why))                                                                  \
      return moe__fail(MOE_ERR_UNSUPPORTED, "%s: %s", ctx->info->pub.id, why.text);                                    \
    for (int i = 0; (impl = moe__impl_##name##_at(ctx, i)); i++) {                                                     \
      if (!allowed(impl->flags, strategy) || impl->can(ctx->info, args, &why)) continue;                               \
      if (impl->program[0]) MOE__TRY(ctx->be->program(ctx->dev, impl->program, (int)args->dtype));                     \
      if (impl->flags & MOE__TOTAL) break;                                                                             \
    }                                                                                                                  \
    return MOE_OK;                                                                                                     \
  }                                                                                                                    \
  moe_status moe__run_##name(moe_queue *q, const struct moe__args_##name *args, int64_t strategy)                      \
  {                                                                                                                    \
    const struct moe__impl_##name *impl;                                                                               \
    struct moe__why why = { "" };                                                                                      \
    MOE__TRY(moe__check_##name(args));                                                                                 \
    impl = moe__pick_##name(q->ctx, args, strategy, &why);                                                             \
    if (!impl) return moe__fail(MOE_ERR_UNSUPPORTED, "%s: %s", q->ctx->info->pub.id, why.text);                        \
    return impl->run(q, args);                                                                                         \
  }
#include "core/ops.def"
