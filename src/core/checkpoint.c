/* checkpoint.c - a skeleton: every call fails. */
#include "core/checkpoint.h"
#include "core/status.h"

moe_status moe_checkpoint_open(moe_checkpoint **out, const char *path)
{
  (void)out;
  (void)path;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_open: not there yet");
}

void moe_checkpoint_close(moe_checkpoint *checkpoint)
{
  (void)checkpoint;
}

int64_t moe_checkpoint_count(const moe_checkpoint *checkpoint)
{
  (void)checkpoint;
  return 0;
}

moe_status moe_checkpoint_at(moe_checkpoint_entry *out, const moe_checkpoint *checkpoint, int64_t index)
{
  (void)out;
  (void)checkpoint;
  (void)index;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_at: not there yet");
}

moe_status moe_checkpoint_find(moe_checkpoint_entry *out, const moe_checkpoint *checkpoint, const char *name)
{
  (void)out;
  (void)checkpoint;
  (void)name;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_find: not there yet");
}

const char *moe_checkpoint_metadata(const moe_checkpoint *checkpoint, const char *key)
{
  (void)checkpoint;
  (void)key;
  return NULL;
}

const char *moe_checkpoint_metadata_key(const moe_checkpoint *checkpoint, int64_t index)
{
  (void)checkpoint;
  (void)index;
  return NULL;
}

moe_status moe_checkpoint_verify(const moe_checkpoint *checkpoint, int64_t *unhashed)
{
  (void)checkpoint;
  (void)unhashed;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_verify: not there yet");
}

moe_status moe_checkpoint_load(const moe_checkpoint *checkpoint, moe_queue *queue, const moe_checkpoint_item *items,
                               int64_t n, int64_t flags)
{
  (void)checkpoint;
  (void)queue;
  (void)items;
  (void)n;
  (void)flags;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_load: not there yet");
}

moe_status moe_raw_open(moe_checkpoint **out, const char *path)
{
  (void)out;
  (void)path;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_raw_open: not there yet");
}

struct moe__part moe__part_whole(const char *name, const moe_tensor *to)
{
  struct moe__part p = { .name = name, .rank = to->rank, .to = *to };
  int64_t stride = 1;
  for (int d = to->rank - 1; d >= 0; d--) {
    p.shape[d] = to->shape[d];
    p.stride[d] = stride;
    stride *= to->shape[d];
  }
  return p;
}
moe_status moe__parts_check(const char *fn, const moe_checkpoint *c, const struct moe__part *parts, int64_t n,
                            const char *prefix, int64_t flags)
{
  (void)c;
  (void)parts;
  (void)n;
  (void)prefix;
  (void)flags;
  return moe__fail(MOE_ERR_UNSUPPORTED, "%s: not there yet", fn);
}
moe_status moe__parts_copy(const char *fn, const moe_checkpoint *c, moe_queue *q, const struct moe__part *parts,
                           int64_t n)
{
  (void)c;
  (void)q;
  (void)parts;
  (void)n;
  return moe__fail(MOE_ERR_UNSUPPORTED, "%s: not there yet", fn);
}
