/* compare.c - see compare.h. */
#include "compare.h"

/* Bound of one element and, in *err, its error. */
static double bound_of(double got, num want, int64_t dtype, double *err)
{
  double e = ref_u == 0x1p-53 ? 2 * want.e : want.e, largest = fabs(want.v) + e;
  *err = fabs(got - want.v);
  if (want.e == 0) {
    double rounded = ref_round(want.v, dtype);
    *err = got == rounded || (isnan(got) && isnan(rounded)) ? 0 : INFINITY;
    return 0;
  }
  if (isnan(want.v)) {
    *err = isnan(got) ? 0 : INFINITY;
    return 0;
  }
  /* Past the range of the type infinity is the right answer. */
  if (isinf(got) && (got > 0) == (want.v > 0) && isinf(ref_round(largest, dtype))) *err = 0;
  return e + ref_rounding(largest, dtype);
}

/* Takes element i, whose error and bound these are. */
static void take(struct ref_worst *w, int64_t i, double err, double bound, double got, double want)
{
  int bad = !(err <= bound);
  double share = bad && !(err < HUGE_VAL) ? HUGE_VAL : err > 0 ? err / bound : 0;
  w->failed += bad;
  if (w->at < 0 || share > w->share) *w = (struct ref_worst){ share, i, w->failed, got, want, bound };
}

struct ref_worst ref_compare(const double *got, const num *want, int64_t n, int64_t dtype)
{
  struct ref_worst worst = { .at = -1 };
  for (int64_t i = 0; i < n; i++) {
    double err, bound = bound_of(got[i], want[i], dtype, &err);
    take(&worst, i, err, bound, got[i], want[i].v);
  }
  return worst;
}

struct ref_worst ref_compare_two(const double *got, const double *other, const num *want, int64_t n, int64_t dtype,
                                 double times)
{
  struct ref_worst worst = { .at = -1 };
  for (int64_t i = 0; i < n; i++) {
    double mine, theirs, bound = times * bound_of(got[i], want[i], dtype, &mine), err = fabs(got[i] - other[i]);
    (void)bound_of(other[i], want[i], dtype, &theirs);
    /* Equal, or both what NaN or infinity stands for. */
    if (got[i] == other[i] || (isnan(got[i]) && isnan(other[i])) || (isinf(err) && mine == 0 && theirs == 0)) err = 0;
    take(&worst, i, err, bound, got[i], other[i]);
  }
  return worst;
}
