/* tape_custom.c - the caller's own functions, and segments that are computed again in backward. */
#include "core/tape.h"

moe_tensor moe__segment_replay(moe_tape *t)
{
  (void)t;
  return (moe_tensor){ 0 };
}
void moe__segment_keep(moe_tape *t, const moe_tensor *ids)
{
  (void)t;
  (void)ids;
}
