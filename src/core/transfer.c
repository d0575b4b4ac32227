/* transfer.c - a skeleton. */
#include "core/transfer.h"

#include "core/status.h"

moe_status moe__upload(moe_queue *q, const moe_tensor *to, const void *from, int64_t dtype, const int64_t *stride)
{
  (void)q;
  (void)to;
  (void)from;
  (void)dtype;
  (void)stride;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe__upload: not there yet");
}

moe_status moe__download(moe_queue *q, void *to, const int64_t *stride, const moe_tensor *from)
{
  (void)q;
  (void)to;
  (void)stride;
  (void)from;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe__download: not there yet");
}
