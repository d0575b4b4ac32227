/* convert.h - values of one dtype as another, on the host. */
#ifndef MOE_CORE_CONVERT_H
#define MOE_CORE_CONVERT_H

#include <moe/tensor.h>

/* Element i of host data. */
double moe__to_double(const void *data, int64_t dtype, int64_t i);
/* 1 where moe__convert can: the same dtype, or any float or F8 to F64, F32, BF16 or F16. */
int moe__converts(int64_t to_dtype, int64_t from_dtype);
/* n elements, `stride` elements from one to the next.  Of one dtype the bits stay as they are; between two, values are
   rounded once, to nearest even.  Neither side need be aligned. */
void moe__convert(void *to, int64_t to_dtype, int64_t to_stride, const void *from, int64_t from_dtype,
                  int64_t from_stride, int64_t n);

#endif
