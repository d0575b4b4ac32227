/* tensor.h - internal shape helpers. */
#ifndef MOE_CORE_TENSOR_H
#define MOE_CORE_TENSOR_H

#include <moe/tensor.h>

/* F64, F32, BF16, F16. */
int moe__is_float(int64_t dtype);
/* *out = a*b; MOE_ERR_INVALID (no text) for a negative factor or an overflow. */
moe_status moe__mul(int64_t *out, int64_t a, int64_t b);
/* View of base from element `element`; a NULL base stays NULL. */
moe_tensor moe__view(moe_tensor base, int64_t element, int64_t rank, const int64_t *shape, const int64_t *stride);
/* Packed [n] and [rows,cols]. */
moe_tensor moe__flat(void *handle, uint64_t offset, int64_t dtype, int64_t n);
moe_tensor moe__matrix(void *handle, uint64_t offset, int64_t dtype, int64_t rows, int64_t cols);
/* All elements of a packed tensor as [n]; a NULL one stays as it is. */
moe_tensor moe__flatten(moe_tensor t);
/* Columns [from, from + n) of a matrix. */
moe_tensor moe__columns(moe_tensor t, int64_t from, int64_t n);
/* Two dimensions exchanged. */
moe_tensor moe__swapped(moe_tensor t, int d0, int d1);
/* A public call's tensor: given, of this dtype (0: any float, no F64 where real is F32), rank and shape,
   strides not negative, aligned to its elements.  The text names function, tensor, wanted and got. */
moe_status moe__want(const char *fn, const char *name, const moe_tensor *t, int64_t dtype, int64_t rank,
                     const int64_t *shape);
#define WANT(fn, t, dtype, ...)                                                                                        \
  moe__want(fn, #t, &(t), dtype, (int64_t)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),                \
            (const int64_t[]){ __VA_ARGS__ })

/* The same for an output: no two elements may share a place through a stride of 0. */
moe_status moe__want_out(const char *fn, const char *name, const moe_tensor *t, int64_t dtype, int64_t rank,
                         const int64_t *shape);
#define WANT_OUT(fn, t, dtype, ...)                                                                                    \
  moe__want_out(fn, #t, &(t), dtype, (int64_t)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),            \
                (const int64_t[]){ __VA_ARGS__ })
/* A tensor of any dtype and shape: given, its dtype one of moe_dtype, aligned to its elements, all of it within 2^63-1
   bytes, strides not negative; written: none 0. */
moe_status moe__want_array(const char *fn, const char *name, const moe_tensor *t, int written);
/* Refuses an output that begins where an input that is still needed begins. */
moe_status moe__apart(const char *fn, const char *out_name, const moe_tensor *out, const char *in_name,
                      const moe_tensor *in);

#endif
