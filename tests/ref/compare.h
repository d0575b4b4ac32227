/* compare.h - the one comparison of computed values with the reference.

   |got - want| <= want.e + one rounding of the storage type, element by element, written !(err <= bound) so that
   NaN fails.  Where the reference is NaN the value must be NaN; where it is exact (e = 0) the value must be the
   rounded reference itself.  In f64 arithmetic the reference errs as much as the kernel may: e counts twice. */
#ifndef MOE_COMPARE_H
#define MOE_COMPARE_H

#include "ref.h"

struct ref_worst {
  double share;   /* worst error as a share of its bound; > 1 or infinite where it failed */
  int64_t at;     /* its element; -1: there was none */
  int64_t failed; /* elements past their bound */
  double got, want, bound;
};
/* The same between two devices, each within its own bound: |got - other| <= `times` of that bound (2; more where one of
   them may err more than `want` says). */
struct ref_worst ref_compare_two(const double *got, const double *other, const num *want, int64_t n, int64_t dtype,
                                 double times);
struct ref_worst ref_compare(const double *got, const num *want, int64_t n, int64_t dtype);

#endif
