/* checkpoint.h - what stands between the files of checkpoints and the models in them: parts of tensors, checked all
   together before the first is copied, and tensors written piece by piece. */
#ifndef MOE_CORE_CHECKPOINT_H
#define MOE_CORE_CHECKPOINT_H

#include <moe/checkpoint.h>

/* A part of a tensor of the file, and the device tensor that it goes to. */
struct moe__part {
  const char *name;
  int64_t rank, shape[MOE_RANK_MAX]; /* of the file's tensor, wanted; its dtype: that of `to` */
  /* In elements of the file's tensor: where the part begins, and how far it steps along each dimension of `to`. */
  int64_t at, stride[MOE_RANK_MAX];
  moe_tensor to; /* handle NULL: only checked, not copied */
};
/* The whole tensor of that name, in the order of its dimensions. */
struct moe__part moe__part_whole(const char *name, const moe_tensor *to);

/* Is all of it there?  Several parts may be of one tensor.  Tensors whose names begin with `prefix` and of which there
   is no part are unexpected, without MOE_CHECKPOINT_PARTIAL.  MOE_ERR_FORMAT lists all that is missing, different and
   unexpected; with MOE_CHECKPOINT_VERIFY hashes are compared too. */
moe_status moe__parts_check(const char *fn, const moe_checkpoint *c, const struct moe__part *parts, int64_t n,
                            const char *prefix, int64_t flags);
/* Copies parts that were checked; blocks. */
moe_status moe__parts_copy(const char *fn, const moe_checkpoint *c, moe_queue *q, const struct moe__part *parts,
                           int64_t n);

/* One tensor, its data in any number of pieces; end fails where they are not all of it. */
moe_status moe__writer_begin(const char *fn, moe_checkpoint_writer *w, const char *name, int64_t dtype, int64_t rank,
                             const int64_t *shape);
moe_status moe__writer_append(const char *fn, moe_checkpoint_writer *w, const void *data, uint64_t bytes);
moe_status moe__writer_end(const char *fn, moe_checkpoint_writer *w);

#endif
