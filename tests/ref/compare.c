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

struct ref_worst ref_compare(const double *got, const num *want, int64_t n, int64_t dtype)
{
  struct ref_worst worst = { .at = -1 };
  for (int64_t i = 0; i < n; i++) {
    double err, bound = bound_of(got[i], want[i], dtype, &err);
    int bad = !(err <= bound);
    double share = bad && !(err < HUGE_VAL) ? HUGE_VAL : err > 0 ? err / bound : 0;
    worst.failed += bad;
    if (worst.at < 0 || share > worst.share)
      worst = (struct ref_worst){ share, i, worst.failed, got[i], want[i].v, bound };
  }
  return worst;
}
