/* checkpoint_writer.c - a skeleton: every call fails. */
#include "core/checkpoint.h"
#include "core/status.h"

moe_status moe_checkpoint_writer_create(moe_checkpoint_writer **out, const char *path,
                                        const moe_checkpoint_writer_desc *desc)
{
  (void)out;
  (void)path;
  (void)desc;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_writer_create: not there yet");
}

void moe_checkpoint_writer_free(moe_checkpoint_writer *writer)
{
  (void)writer;
}

moe_status moe_checkpoint_writer_metadata(moe_checkpoint_writer *writer, const char *key, const char *value)
{
  (void)writer;
  (void)key;
  (void)value;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_writer_metadata: not there yet");
}

moe_status moe_checkpoint_writer_add(moe_checkpoint_writer *writer, const char *name, int64_t dtype, int64_t rank,
                                     const int64_t *shape, const void *data)
{
  (void)writer;
  (void)name;
  (void)dtype;
  (void)rank;
  (void)shape;
  (void)data;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_writer_add: not there yet");
}

moe_status moe_checkpoint_writer_add_tensor(moe_checkpoint_writer *writer, const char *name, moe_queue *queue,
                                            const moe_tensor *tensor)
{
  (void)writer;
  (void)name;
  (void)queue;
  (void)tensor;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_writer_add_tensor: not there yet");
}

moe_status moe_checkpoint_writer_commit(moe_checkpoint_writer *writer)
{
  (void)writer;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_checkpoint_writer_commit: not there yet");
}

moe_status moe_raw_save(const char *path, moe_queue *queue, const moe_tensor *matrices, int64_t n)
{
  (void)path;
  (void)queue;
  (void)matrices;
  (void)n;
  return moe__fail(MOE_ERR_UNSUPPORTED, "moe_raw_save: not there yet");
}

moe_status moe__writer_begin(const char *fn, moe_checkpoint_writer *w, const char *name, int64_t dtype, int64_t rank,
                             const int64_t *shape)
{
  (void)w;
  (void)name;
  (void)dtype;
  (void)rank;
  (void)shape;
  return moe__fail(MOE_ERR_UNSUPPORTED, "%s: not there yet", fn);
}
moe_status moe__writer_append(const char *fn, moe_checkpoint_writer *w, const void *data, uint64_t bytes)
{
  (void)w;
  (void)data;
  (void)bytes;
  return moe__fail(MOE_ERR_UNSUPPORTED, "%s: not there yet", fn);
}
moe_status moe__writer_end(const char *fn, moe_checkpoint_writer *w)
{
  (void)w;
  return moe__fail(MOE_ERR_UNSUPPORTED, "%s: not there yet", fn);
}
