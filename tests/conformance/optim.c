/* optim.c - cases of AdamW, the squared norm, clipping and the learning-rate schedule. */
#include "conform.h"

static const int64_t sizes[] = { 1, 0, 65, 127, 64, 129, 63, 128, 1009, 257 };

struct how {
  int64_t n, p, g, step;
  int master, scaled;
  double gscale;
};

static void adamw_case(struct conform *c, int64_t dtype, struct how h)
{
  if (!c_begin(c, dtype, "n=%lld p %s g %s step=%lld%s%s", (long long)h.n, moe_dtype_name(h.p), moe_dtype_name(h.g),
               (long long)h.step, h.master ? " master" : "", h.scaled ? " gscale" : ""))
    return;
  int64_t real = c_real(dtype);
  struct moe__args_adamw args = { .dtype = dtype, .n = h.n, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .decay = 0.1 };
  args.lr_mult = 0.5;
  num *p = t_uniform(&c->m, h.n, h.p, 1), *master = t_uniform(&c->m, h.n, MOE_F32, 1),
      *m = t_uniform(&c->m, h.n, real, 0.1);
  num *v = t_uniform(&c->m, h.n, real, 0.01), *g = t_uniform(&c->m, h.n, h.g, 1);
  num lr = n_exact(ref_round(0.01, real)), gscale = n_exact(ref_round(h.gscale, real));
  int32_t step = (int32_t)h.step;
  for (int64_t i = 0; i < h.n; i++) {
    v[i].v = h.step > 1 ? fabs(v[i].v) : 0;
    if (h.step == 1) m[i].v = 0;
    if (h.master) p[i].v = ref_round(master[i].v, h.p);
  }
  args.p = c_inout(c, h.p, T_ODD, p, SHAPE(h.n));
  if (h.master) args.master = c_inout(c, MOE_F32, T_PACKED, master, SHAPE(h.n));
  args.m = c_inout(c, real, T_PACKED, m, SHAPE(h.n));
  args.v = c_inout(c, real, T_ODD, v, SHAPE(h.n));
  args.g = c_in(c, h.g, T_PACKED, g, SHAPE(h.n));
  args.lr = c_in(c, real, T_ODD, &lr, SHAPE(1));
  args.step = t_tensor(&c->m, MOE_I64, T_ODD, SHAPE(1));
  t_put_ints(&c->m, &args.step, &step);
  if (h.scaled) args.gscale = c_in(c, real, T_ODD, &gscale, SHAPE(1));
  if (c_run_adamw(c, &args)) {
    struct ref_adamw how = { args.beta1, args.beta2, args.eps, args.decay, args.lr_mult, lr, n_exact(1), h.step };
    if (h.scaled) how.gscale = gscale;
    ref_adamw(p, h.master ? master : NULL, m, v, g, h.n, &how);
    c_check(c, "m", &args.m, m);
    c_check(c, "v", &args.v, v);
    c_check(c, "p", &args.p, p);
    if (h.master) c_check(c, "master", &args.master, master);
  }
  c_end(c);
}

void conform_adamw(struct conform *c)
{
  static const double scales[] = { 0.25, 1, -1, NAN, INFINITY, 0 };
  static const int64_t steps[] = { 1, 2, 10, 1000, 100000 };
  for (int64_t d = 0; d < 2; d++) {
    int64_t dtype = c_dtypes[d];
    for (int64_t i = 0; i < (c->effort == SMALL ? 6 : 20); i++) {
      struct how h = { sizes[i % 10], c_float(dtype, i), c_float(dtype, i / 2), steps[i % 5], 0, (int)(i % 2), 1 };
      h.master = h.p == MOE_BF16 || h.p == MOE_F16 || i % 4 == 0;
      h.gscale = scales[i / 2 % 6];
      adamw_case(c, dtype, h);
    }
    if (c->effort != SMALL) adamw_case(c, dtype, (struct how){ 70001, MOE_F32, MOE_F32, 5, 0, 1, 0.1 });
  }
  huge_adamw(c);
}

static void sqnorm_case(struct conform *c, int64_t dtype, int64_t type, int64_t n, int64_t accumulate, int whole)
{
  if (!c_begin(c, dtype, "%s n=%lld%s%s", moe_dtype_name(type), (long long)n, accumulate ? " +=" : "",
               whole ? " whole numbers" : ""))
    return;
  if (whole) c_exact();
  struct moe__args_sqnorm args = { .dtype = dtype, .n = n, .accumulate = accumulate };
  num *a = whole ? t_whole(&c->m, n, 4) : t_uniform(&c->m, n, type, 1), *y = t_whole(&c->m, 1, 9);
  args.a = c_in(c, type, n % 2 ? T_ODD : T_PACKED, a, SHAPE(n));
  if (accumulate) args.y = c_inout(c, c_real(dtype), T_ODD, y, SHAPE(1));
  else args.y = c_out(c, c_real(dtype), T_PACKED, SHAPE(1));
  args.scratch = c_out(c, c_real(dtype), T_PACKED, SHAPE(MOE__PARTS));
  if (c_run_sqnorm(c, &args)) {
    ref_sqnorm(y, a, n, accumulate);
    c_check(c, "y", &args.y, y);
  }
  c_end(c);
}

void conform_sqnorm(struct conform *c)
{
  static const int64_t large[] = { 4096, 4097, 70001, 300007 };
  for (int64_t d = 0; d < 2; d++)
    for (int64_t i = 0; i < (c->effort == SMALL ? 11 : c->effort == SHORT ? 13 : 14); i++) {
      int64_t n = i < 10 ? sizes[i] : large[i - 10];
      sqnorm_case(c, c_dtypes[d], c_float(c_dtypes[d], i), n, i % 2, 0);
      sqnorm_case(c, c_dtypes[d], c_float(c_dtypes[d], i + 1), n, (i + 1) % 2, 1);
    }
  huge_sqnorm(c);
}

static void clip_case(struct conform *c, int64_t dtype, double sq_value, double max_norm, double loss_scale)
{
  if (!c_begin(c, dtype, "sq=%g max=%g loss_scale=%g", sq_value, max_norm, loss_scale)) return;
  struct moe__args_clip args = { .dtype = dtype, .max_norm = max_norm };
  int64_t real = c_real(dtype);
  num sq = n_exact(ref_round(sq_value, real)), scale = n_exact(loss_scale), y[2];
  int32_t health = 0;
  args.sq = c_in(c, real, T_ODD, &sq, SHAPE(1));
  if (loss_scale != 0) args.loss_scale = c_in(c, real, T_ODD, &scale, SHAPE(1));
  args.y = c_out(c, real, T_ODD, SHAPE(2));
  args.health = c_health(c);
  if (c_run_clip(c, &args)) {
    ref_clip(y, &health, sq, loss_scale != 0 ? &scale : NULL, max_norm);
    c_check(c, "y", &args.y, y);
    c_check_ints(c, "health", &args.health, &health);
  }
  c_end(c);
}

void conform_clip(struct conform *c)
{
  static const double squares[] = { 0, 0.25, 9, 1e12, INFINITY, NAN };
  for (int64_t d = 0; d < 2; d++)
    for (int i = 0; i < 6; i++) {
      clip_case(c, c_dtypes[d], squares[i], 1, 0);
      clip_case(c, c_dtypes[d], squares[i], i % 2, 1024);
      clip_case(c, c_dtypes[d], squares[i], 1, -8);
    }
}

static void rate_case(struct conform *c, int64_t dtype, int32_t step, int64_t warmup, int64_t total,
                      double gscale_value)
{
  if (!c_begin(c, dtype, "step=%d warmup=%lld total=%lld gscale=%g", (int)step, (long long)warmup, (long long)total,
               gscale_value))
    return;
  struct moe__args_lr_step args = { .dtype = dtype, .warmup = warmup, .total = total, .peak = 3e-3, .floor = 1e-4 };
  num gscale = n_exact(gscale_value), lr;
  args.step = t_tensor(&c->m, MOE_I64, T_ODD, SHAPE(1));
  t_put_ints(&c->m, &args.step, &step);
  t_own(&c->m, &args.step);
  args.lr = c_out(c, c_real(dtype), T_ODD, SHAPE(1));
  if (gscale_value != 0) args.gscale = c_in(c, c_real(dtype), T_ODD, &gscale, SHAPE(1));
  if (c_run_lr_step(c, &args)) {
    int32_t next =
        (int32_t)ref_lr_step(&lr, step, gscale_value != 0 ? &gscale : NULL, warmup, total, args.peak, args.floor);
    c_check(c, "lr", &args.lr, &lr);
    c_check_ints(c, "step", &args.step, &next);
  }
  c_end(c);
}

void conform_lr_step(struct conform *c)
{
  static const int32_t steps[] = { 0, 1, 8, 9, 10, 55, 98, 99, 100, 5000 };
  for (int64_t d = 0; d < 2; d++)
    for (int i = 0; i < 10; i++) {
      rate_case(c, c_dtypes[d], steps[i], 10, 100, 0);
      rate_case(c, c_dtypes[d], steps[i], 10, 0, 0);
      rate_case(c, c_dtypes[d], steps[i], 0, 100, i % 2 ? 0.5 : -1);
    }
}
