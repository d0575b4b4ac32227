/* stats.c - reference of the search for values that are not finite. */
#include "ref.h"

void ref_watch(int64_t record[3], const double *a, int64_t n, int64_t tag, double limit)
{
  int64_t i = 0;
  while (i < n && fabs(a[i]) < limit && isfinite(a[i])) i++;
  if (i == n) return;
  if (!record[0]) record[1] = tag, record[2] = i;
  record[0]++;
}
