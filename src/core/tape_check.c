/* tape_check.c - Hessian-vector products, and gradients checked against central differences. */
#include "core/tape.h"

#include <math.h>
#include <stdlib.h>

/* ---- hvp ----------------------------------------------------------------------------------------------------------- */
/* Those of g whose gradient can be taken come first, with the v they belong to.  How many there are. */
static int64_t varying(const moe_tape *t, moe_value *g, moe_value *seeds, const moe_value *v, int64_t n)
{
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i++)
    if (g[i].id && moe__tape_at(t, g[i])->needs_grad) {
      g[kept] = g[i];
      seeds[kept++] = v[i];
    }
  return kept;
}

moe_status moe_hvp(moe_value *hv, moe_tape *t, moe_value of, const moe_value *wrt, const moe_value *v, int64_t n,
                   int64_t flags)
{
  static const char fn[] = "moe_hvp";
  if (!t) return moe__fail(MOE_ERR_INVALID, "%s: tape is NULL", fn);
  for (int64_t i = 0; hv && i < n; i++) hv[i] = (moe_value){ 0 };
  if (!t->status && (!hv || !wrt || !v || n < 1))
    moe__tape_fail(t, moe__fail(MOE_ERR_INVALID, "%s: hv, wrt and v are wanted, at least one each", fn));
  if (!t->status && (flags & ~(int64_t)MOE_DECOMPOSE))
    moe__tape_fail(t, moe__fail(MOE_ERR_INVALID, "%s: flags 0x%llx", fn, (unsigned long long)flags));
  for (int64_t i = 0; i < n && !t->status; i++) {
    const struct moe__value *w = moe__tape_look(t, wrt[i], fn), *x = w ? moe__tape_look(t, v[i], fn) : NULL;
    if (x && (!moe__same_shape(&w->t, &x->t) || w->t.dtype != x->t.dtype))
      moe__tape_fail(t, moe__fail(MOE_ERR_INVALID, "%s: v[%lld] differs from wrt[%lld] in shape or dtype", fn,
                                  (long long)i, (long long)i));
  }
  if (t->status) return moe_tape_status(t);
  moe_value *g = calloc((size_t)n, 2 * sizeof *g);
  if (!g) {
    moe__tape_fail(t, moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn));
    return moe_tape_status(t);
  }
  /* The second pass starts at the first gradients, with v as what flows into them. */
  moe_status st = moe_tape_gradients(g, t, &of, NULL, 1, wrt, n, flags | MOE_CREATE_GRAPH);
  const int64_t kept = st ? 0 : varying(t, g, g + n, v, n);
  if (kept) st = moe_tape_gradients(hv, t, g, g + n, kept, wrt, n, flags);
  free(g);
  return st;
}

/* ---- gradcheck ----------------------------------------------------------------------------------------------------- */
struct check {
  moe_tape *tape;
  moe_recorded *function;
  void *user;
  const moe_tensor *inputs;
  int64_t n;
  moe_gradcheck_desc desc;
  moe_value *in, *grads;
  double **before, **analytic; /* of each input: its values, and the gradient */
};

static moe_span span_of(const moe_tensor *x, int64_t index, int64_t n)
{
  const uint64_t size = sizeof(double);
  return (moe_span){ x->handle, x->offset + (uint64_t)index * size, (uint64_t)n * size };
}

/* Random numbers in the shape of `like`, the same ones each time. */
static moe_value random_like(struct check *c, moe_value like, int64_t stream)
{
  moe_tape *t = c->tape;
  if (t->status) return (moe_value){ 0 };
  const moe_tensor x = moe__tape_at(t, like)->t, y = moe__tape_fresh(t, x.dtype, x.rank, x.shape);
  TAPE_RUN(t, elt_normal, .dtype = moe__real_of(y.dtype), .y = moe__flatten(y), .n = moe_tensor_count(&y),
           .seed = (int64_t)c->desc.seed, .stream = stream, .stddev = 1);
  return moe__tape_value(t, y, 0);
}

static moe_value weighed(struct check *c, moe_value y, int64_t stream)
{
  return moe_tape_sum(c->tape, moe_tape_mul(c->tape, y, random_like(c, y, stream)));
}

static int depends(const moe_tape *t, moe_value v)
{
  return !t->status && v.id && moe__tape_at(t, v)->needs_grad;
}

/* The number under test as a value of a clean tape: what the function gives, weighed where it is many; or the slope of
   that along the direction.  Null: it is the constant 0. */
static moe_value number(struct check *c)
{
  moe_tape *t = c->tape;
  moe_tape_reset(t);
  for (int64_t i = 0; i < c->n; i++) c->in[i] = moe_tape_leaf(t, &c->inputs[i], 1);
  moe_value y = c->function(c->user, t, c->in, c->n);
  const struct moe__value *made = moe__tape_look(t, y, "the function's result");
  if (!made) return (moe_value){ 0 };
  if (!moe__is_float(made->t.dtype))
    return TAPE_FAIL(t, MOE_ERR_INVALID, "the function's result is %s, a float is wanted",
                     moe_dtype_name(made->t.dtype));
  if (moe_tensor_count(&made->t) != 1) y = weighed(c, y, 0);
  if (!c->desc.second) return y;
  moe_value slope = { 0 };
  if (depends(t, y)) (void)!moe_tape_gradients(c->grads, t, &y, NULL, 1, c->in, c->n, c->desc.flags | MOE_CREATE_GRAPH);
  for (int64_t i = 0; i < c->n && depends(t, y); i++) {
    if (!c->grads[i].id) continue;
    moe_value part = weighed(c, c->grads[i], 1 + i);
    slope = slope.id ? moe_tape_add(t, slope, part) : part;
  }
  return slope;
}

static moe_status evaluate(struct check *c, double *out)
{
  moe_value v = number(c);
  *out = 0;
  MOE__TRY(moe_tape_status(c->tape));
  return v.id ? moe_tape_read(c->tape, v, out, 1) : MOE_OK;
}

static moe_status analyse(struct check *c)
{
  moe_value v = number(c);
  if (depends(c->tape, v)) {
    MOE__TRY(moe_tape_gradients(c->grads, c->tape, &v, NULL, 1, c->in, c->n, c->desc.flags));
    for (int64_t i = 0; i < c->n; i++)
      if (c->grads[i].id)
        MOE__TRY(moe_tape_read(c->tape, c->grads[i], c->analytic[i], moe_tensor_count(&c->inputs[i])));
  }
  return moe_tape_status(c->tape);
}

/* The function's number with input i's element k set to x. */
static moe_status evaluate_at(struct check *c, int64_t i, int64_t k, double x, double *out)
{
  MOE__TRY(moe_span_write(c->tape->q, span_of(&c->inputs[i], k, 1), &x, sizeof x));
  return evaluate(c, out);
}

static moe_status compare(struct check *c, moe_gradcheck_result *worst)
{
  const double step = c->desc.step;
  MOE__TRY(analyse(c));
  for (int64_t i = 0; i < c->n; i++) {
    const int64_t count = moe_tensor_count(&c->inputs[i]);
    const int64_t most = c->desc.elements && c->desc.elements < count ? c->desc.elements : count;
    for (int64_t k = 0; k < most; k++) {
      /* From the first element to the last, evenly. */
      const int64_t gaps = most > 1 ? most - 1 : 1, all = count - 1;
      const int64_t at = all / gaps * k + all % gaps * k / gaps;
      const double x = c->before[i][at], analytic = c->analytic[i][at];
      double above, below;
      MOE__TRY(evaluate_at(c, i, at, x + step, &above));
      MOE__TRY(evaluate_at(c, i, at, x - step, &below));
      MOE__TRY(moe_span_write(c->tape->q, span_of(&c->inputs[i], at, 1), &x, sizeof x));
      const double numeric = (above - below) / (2 * step);
      const double error = fabs(numeric - analytic) / fmax(fabs(numeric) + fabs(analytic), 1e-8);
      const double shown = isnan(error) ? (double)INFINITY : error;
      if (!worst->checked++ || shown > worst->error) {
        worst->input = i;
        worst->index = at;
        worst->numeric = numeric;
        worst->analytic = analytic;
        worst->error = shown;
      }
    }
  }
  return MOE_OK;
}

static moe_status check_arguments(const moe_queue *q, moe_recorded *function, const moe_tensor *inputs, int64_t n,
                                  moe_gradcheck_desc *desc, const moe_gradcheck_desc *given, const char *fn)
{
  *desc = moe_gradcheck_desc_init();
  if (!q || !function || !inputs)
    return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, !q ? "queue" : function ? "inputs" : "function");
  if (!q->ctx->info->pub.fp64)
    return moe__fail(MOE_ERR_UNSUPPORTED, "%s: %s has no fp64, in which differences are taken", fn,
                     q->ctx->info->pub.id);
  if (given) MOE__TRY(moe__struct_in(desc, sizeof *desc, given, fn, "desc"));
  if (desc->step == 0) desc->step = 1e-4;
  if (desc->threshold == 0) desc->threshold = 1e-4;
  if (!(desc->step > 0) || !isfinite(desc->step) || !(desc->threshold > 0))
    return moe__fail(MOE_ERR_INVALID, "%s: step %g and threshold %g, wanted > 0", fn, desc->step, desc->threshold);
  if (desc->second < 0 || desc->second > 1 || desc->elements < 0)
    return moe__fail(MOE_ERR_INVALID, "%s: second %lld, wanted 0 or 1; elements %lld, wanted >= 0", fn,
                     (long long)desc->second, (long long)desc->elements);
  if (desc->flags & ~(int64_t)MOE_DECOMPOSE)
    return moe__fail(MOE_ERR_INVALID, "%s: flags 0x%llx", fn, (unsigned long long)desc->flags);
  if (n < 1) return moe__fail(MOE_ERR_INVALID, "%s: n %lld, at least one input is wanted", fn, (long long)n);
  for (int64_t i = 0; i < n; i++)
    if (!inputs[i].handle || inputs[i].dtype != MOE_F64 || inputs[i].rank < 0 || inputs[i].rank > MOE_RANK_MAX ||
        !moe_tensor_is_packed(&inputs[i]) || inputs[i].offset % sizeof(double))
      return moe__fail(MOE_ERR_INVALID, "%s: inputs[%lld] is not a packed f64 tensor", fn, (long long)i);
  return MOE_OK;
}

moe_status moe_gradcheck(moe_gradcheck_result *out, moe_queue *q, moe_recorded *function, void *user,
                         const moe_tensor *inputs, int64_t n, const moe_gradcheck_desc *given)
{
  static const char fn[] = "moe_gradcheck";
  moe_gradcheck_result worst = moe_gradcheck_result_init();
  struct check c = { .function = function, .user = user, .inputs = inputs, .n = n };
  moe_tape_desc own = moe_tape_desc_init();
  int64_t kept = 0; /* inputs of which a copy was taken */
  MOE__TRY(check_arguments(q, function, inputs, n, &c.desc, given, fn));
  own.block = (uint64_t)1 << 20;
  c.in = calloc((size_t)n, 2 * sizeof *c.in);
  c.before = calloc((size_t)n, 2 * sizeof *c.before);
  moe_status st = c.in && c.before ? MOE_OK : moe__fail(MOE_ERR_NO_MEMORY, "no host memory");
  if (!st) {
    c.grads = c.in + n;
    c.analytic = c.before + n;
    st = moe_tape_create(&c.tape, q, &own);
  }
  for (int64_t i = 0; !st && i < n; i++) {
    const int64_t count = moe_tensor_count(&inputs[i]);
    const moe_span all = span_of(&inputs[i], 0, count);
    c.before[i] = malloc(all.bytes + 1);
    c.analytic[i] = calloc((size_t)count + 1, sizeof(double));
    st = c.before[i] && c.analytic[i] ? moe_span_read(q, c.before[i], all, all.bytes)
                                      : moe__fail(MOE_ERR_NO_MEMORY, "no host memory");
    if (!st) kept++;
  }
  if (!st) st = compare(&c, &worst);
  if (st) moe__fail_in(st, fn);
  for (int64_t i = 0; i < kept; i++) { /* bit for bit as they were */
    const moe_span all = span_of(&inputs[i], 0, moe_tensor_count(&inputs[i]));
    const moe_status back = moe_span_write(q, all, c.before[i], all.bytes);
    if (!st && back) st = moe__fail_in(back, fn);
  }
  const moe_status closed = moe__tape_close(c.tape);
  if (!st && closed) st = moe__fail_in(closed, fn);
  for (int64_t i = 0; c.before && i < n; i++) {
    free(c.before[i]);
    free(c.before[n + i]);
  }
  free(c.before);
  free(c.in);
  if (st) return st;
  if (out) MOE__TRY(moe__struct_out(out, &worst, sizeof worst, fn, "out"));
  if (!worst.checked || worst.error <= c.desc.threshold) return MOE_OK;
  return moe__fail(
      MOE_ERR_CHECK, "%s: input %lld, element %lld: %.9g by differences, %.9g by the tape: error %.4g > %g", fn,
      (long long)worst.input, (long long)worst.index, worst.numeric, worst.analytic, worst.error, c.desc.threshold);
}
