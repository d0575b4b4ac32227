/* transfer.h - arrays of any strides between host and device, through a staging buffer of bounded size. */
#ifndef MOE_CORE_TRANSFER_H
#define MOE_CORE_TRANSFER_H

#include <moe/context.h>

#define MOE__STAGING ((int64_t)4 << 20) /* bytes */

/* Every element of `to` (no stride 0) from host memory: of `dtype`, converted where it is not to's (moe__converts),
   element (i, j, ...) at from + (i*stride[0] + j*stride[1] + ...) elements, not necessarily aligned.  What lies
   between the elements of `to` is not touched.  `from` has been read when it returns. */
moe_status moe__upload(moe_queue *q, const moe_tensor *to, const void *from, int64_t dtype, const int64_t *stride);
/* Every element of `from` to host memory that steps by `stride`; blocks. */
moe_status moe__download(moe_queue *q, void *to, const int64_t *stride, const moe_tensor *from);
/* All elements in the order of their indices (row-major, packed), in pieces of at most MOE__STAGING bytes. */
typedef moe_status moe__take(void *user, const void *data, uint64_t bytes);
moe_status moe__stream(moe_queue *q, const moe_tensor *from, moe__take *take, void *user);

#endif
