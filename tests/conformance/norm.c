/* norm.c - cases of RMS norm. */
#include "conform.h"

static const int64_t widths[] = { 1, 8, 64, 65, 127, 63, 129, 128, 1025, 257 };
static const int64_t tokens[] = { 3, 1, 2, 0, 9, 33, 65, 31, 5, 130 };
/* T, D of packed rows: those of models, and what a GPU's registers just have room for and not. */
static const int64_t rows[][2] = { { 37, 64 },  { 130, 264 }, { 300, 1032 }, { 19, 2048 }, { 5, 4096 },
                                   { 5, 4104 }, { 3, 7168 },  { 2, 8192 },   { 2, 8200 } };
enum { ROWS = sizeof rows / sizeof *rows };

static void fwd_case(struct conform *c, int64_t dtype, int64_t T, int64_t D, int layout, int y_layout, double size)
{
  if (!c_begin(c, dtype, "T=%lld D=%lld layout=%d size=%g", (long long)T, (long long)D, layout, size)) return;
  struct moe__args_rms_fwd args = { .dtype = dtype, .T = T, .D = D, .eps = 1e-5 };
  num *x = t_uniform(&c->m, T * D, dtype, size), *w = t_uniform(&c->m, D, dtype, 2);
  num *y = t_nums(&c->m, T * D), *rstd = t_nums(&c->m, T);
  args.x = c_in(c, dtype, layout, x, SHAPE(T, D));
  args.w = c_in(c, dtype, y_layout == T_PACKED ? T_PACKED : T_ODD, w, SHAPE(D));
  args.y = c_out(c, dtype, y_layout, SHAPE(T, D));
  args.rstd = c_out(c, c_real(dtype), T_ODD, SHAPE(T));
  if (c_run_rms_fwd(c, &args)) {
    ref_rms_fwd(y, rstd, x, w, T, D, args.eps);
    c_check(c, "y", &args.y, y);
    c_check(c, "rstd", &args.rstd, rstd);
  }
  c_end(c);
}

void conform_rms_fwd(struct conform *c)
{
  for (int64_t d = 0; d < C_DTYPES; d++)
    for (int64_t i = 0; i < (c->effort == SMALL ? 4 : 10); i++) {
      fwd_case(c, c_dtypes[d], tokens[i], widths[i], c_layout(i + d), c_layout(i + d) ^ T_PAD, 2);
      fwd_case(c, c_dtypes[d], tokens[(i + 4) % 10], widths[i], c_layout(i), c_layout(i) ^ T_PAD, i % 2 ? 0 : 1e-4);
    }
  for (int64_t d = 0; d < C_DTYPES && c->effort != SMALL; d++)
    for (int64_t i = 0; i < ROWS; i++) fwd_case(c, c_dtypes[d], rows[i][0], rows[i][1], T_PACKED, T_PACKED, 2);
  huge_rms_fwd(c);
}

struct bwd_how {
  int64_t T, D, accumulate;
  int dx, dw, layout, scalar_dy, packed;
};

static void bwd_case(struct conform *c, int64_t dtype, struct bwd_how h)
{
  if (!c_begin(c, dtype, "T=%lld D=%lld layout=%d%s%s%s%s", (long long)h.T, (long long)h.D, h.layout, h.dx ? " dx" : "",
               h.dw ? " dw" : "", h.accumulate ? " +=" : "", h.scalar_dy ? " dy broadcast" : ""))
    return;
  struct moe__args_rms_bwd args = { .dtype = dtype, .T = h.T, .D = h.D, .accumulate = h.accumulate };
  num *x = t_uniform(&c->m, h.T * h.D, dtype, 2), *w = t_uniform(&c->m, h.D, dtype, 2);
  num *dy = t_uniform(&c->m, h.T * h.D, dtype, 1), *rstd = t_nums(&c->m, h.T);
  num *dx = t_nums(&c->m, h.T * h.D), *dw = t_uniform(&c->m, h.D, MOE_F16, 1);
  int64_t dw_type = c_float(dtype, h.D);
  for (int64_t i = 0; i < h.T * h.D && h.scalar_dy; i++) dy[i] = dy[0];
  for (int64_t t = 0; t < h.T; t++) rstd[t].v = ref_round(0.5 + 0.01 * (double)t, c_real(dtype));
  /* Values of every type dw may have. */
  for (int64_t i = 0; i < h.D; i++) dw[i].v = ref_round(dw[i].v, MOE_BF16);
  args.dy = c_in(c, dtype, h.scalar_dy ? T_SCALAR : h.layout, dy, SHAPE(h.T, h.D));
  args.x = c_in(c, dtype, h.packed ? T_PACKED : c_layout(h.layout + h.T), x, SHAPE(h.T, h.D));
  args.w = c_in(c, dtype, T_PACKED, w, SHAPE(h.D));
  args.rstd = c_in(c, c_real(dtype), T_ODD, rstd, SHAPE(h.T));
  if (h.dx) args.dx = c_out(c, dtype, h.layout, SHAPE(h.T, h.D));
  if (h.dw && h.accumulate) args.dw = c_inout(c, dw_type, T_ODD, dw, SHAPE(h.D));
  else if (h.dw) args.dw = c_out(c, dw_type, T_ODD, SHAPE(h.D));
  if (h.dw) args.scratch = c_out(c, c_real(dtype), T_PACKED, SHAPE(MOE__PARTS, h.D));
  if (c_run_rms_bwd(c, &args)) {
    ref_rms_bwd(h.dx ? dx : NULL, h.dw ? dw : NULL, dy, x, w, rstd, h.T, h.D, h.accumulate);
    if (h.dx) c_check(c, "dx", &args.dx, dx);
    if (h.dw) c_check(c, "dw", &args.dw, dw);
  }
  c_end(c);
}

void conform_rms_bwd(struct conform *c)
{
  for (int64_t d = 0; d < C_DTYPES; d++) {
    for (int64_t i = 0; i < (c->effort == SMALL ? 4 : 10); i++) {
      bwd_case(c, c_dtypes[d], (struct bwd_how){ tokens[i], widths[i], i % 2, 1, 1, c_layout(i + d), 0, 0 });
      bwd_case(c, c_dtypes[d],
               (struct bwd_how){ tokens[(i + 3) % 10], widths[i], 0, i % 2, 1 - i % 2, c_layout(i), 0, 0 });
    }
    bwd_case(c, c_dtypes[d], (struct bwd_how){ 8, 16, 0, 1, 1, T_PACKED, 1, 0 });
    if (c->effort != SMALL) bwd_case(c, c_dtypes[d], (struct bwd_how){ 1031, 33, 1, 1, 1, T_PACKED, 0, 0 });
    for (int64_t i = 0; i < ROWS && c->effort != SMALL; i++)
      bwd_case(c, c_dtypes[d], (struct bwd_how){ rows[i][0], rows[i][1], i % 2, 1, 1, T_PACKED, 0, 1 });
    bwd_case(c, c_dtypes[d], (struct bwd_how){ 0, 9, 0, 1, 1, T_PACKED, 0, 0 });
  }
  huge_rms_bwd(c);
}
