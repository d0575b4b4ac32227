/* moe/checkpoint.h - checkpoints: safetensors files, read memory-mapped and written atomically; the weights of
   layers under the tensor names that published models use; the training state of an optimizer.

   Reading: open checks the whole header (all names, dtypes, shapes, offsets) before anything else is possible; data
   is touched only where it is asked for.  Nothing is half-loaded: a load checks every tensor that it will need and
   copies the first byte after the last check.
   Writing: tensors are added, then one commit makes the file appear under its name; until then, and whenever
   anything fails, what was there before is untouched. */
#ifndef MOE_CHECKPOINT_H
#define MOE_CHECKPOINT_H

#include <moe/layer.h>
#include <moe/optim.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- reading ------------------------------------------------------------------------------------------------ */
typedef struct moe_checkpoint moe_checkpoint; /* read-only; may be shared by threads */

/* path: a .safetensors file, an index (a name that ends in .json) with its shards beside it, or a folder that holds
   model.safetensors.index.json or else model.safetensors.  The files may be renamed, replaced or removed while the
   checkpoint is open; they may not be cut or rewritten in place.
   Errors: MOE_ERR_IO (the system's text), MOE_ERR_FORMAT (file, what was wanted, what came). */
MOE_API MOE_CHECKED moe_status moe_checkpoint_open(moe_checkpoint **out, const char *path);
MOE_API void moe_checkpoint_close(moe_checkpoint *checkpoint); /* NULL is fine */

typedef struct moe_checkpoint_entry {
  uint64_t size;
  const char *name;       /* these pointers live as long as the checkpoint */
  const char *file;       /* the path of the file that holds it */
  const char *dtype_name; /* as the file spells it: "BF16" */
  const void *data;       /* mapped, read-only, little-endian, packed; not necessarily aligned to the element */
  uint64_t bytes;
  int64_t dtype; /* MOE_NONE: one that libmoe does not have; data can be looked at, not loaded */
  int64_t rank;  /* past MOE_RANK_MAX: shape holds the first MOE_RANK_MAX extents; not loaded */
  int64_t shape[MOE_RANK_MAX];
  int64_t hashed; /* 1: the metadata gives an xxHash (XXH3, 64 bits) of the data */
  uint64_t hash;
} moe_checkpoint_entry;
MOE_INIT(moe_checkpoint_entry)

MOE_API int64_t moe_checkpoint_count(const moe_checkpoint *checkpoint); /* tensors, in order of name */
MOE_API MOE_CHECKED moe_status moe_checkpoint_at(moe_checkpoint_entry *out, const moe_checkpoint *checkpoint,
                                                 int64_t index);
/* MOE_ERR_NOT_FOUND names the tensor and the file. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_find(moe_checkpoint_entry *out, const moe_checkpoint *checkpoint,
                                                   const char *name);
/* The value of a __metadata__ key (of an index's "metadata", then of the shards'); NULL where there is none.  The hashes
   are not among them: they are the entries'. */
MOE_API const char *moe_checkpoint_metadata(const moe_checkpoint *checkpoint, const char *key);
/* Key number `index` in order; NULL past the last. */
MOE_API const char *moe_checkpoint_metadata_key(const moe_checkpoint *checkpoint, int64_t index);
/* Reads every tensor that has a hash and compares; MOE_ERR_FORMAT names the first that differs, or the first hash
   without its tensor.  *unhashed, where not NULL: how many tensors have none. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_verify(const moe_checkpoint *checkpoint, int64_t *unhashed);

/* One tensor of a load: `tensor` is device memory, packed or a view with any strides (none 0). */
typedef struct moe_checkpoint_item {
  const char *name;
  moe_tensor tensor;
} moe_checkpoint_item;
typedef enum moe_checkpoint_flags {
  /* Float dtypes may differ: values are converted, rounded to nearest even.  F8 is converted from, not to. */
  MOE_CHECKPOINT_CONVERT = 1,
  MOE_CHECKPOINT_PARTIAL = 2, /* tensors of the file that no item names are fine (otherwise they are unexpected) */
  MOE_CHECKPOINT_VERIFY = 4   /* hashes of the tensors to load are compared before the first byte is copied */
} moe_checkpoint_flags;
/* Checks all items (present, dtype, shape), then copies them to the device; blocks until done.  MOE_ERR_FORMAT lists
   what is missing, different (wanted, got) and unexpected, in this order, and says how many more there are. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_load(const moe_checkpoint *checkpoint, moe_queue *queue,
                                                   const moe_checkpoint_item *items, int64_t n, int64_t flags);

/* ---- writing ------------------------------------------------------------------------------------------------ */
typedef struct moe_checkpoint_writer moe_checkpoint_writer;
typedef struct moe_checkpoint_writer_desc {
  uint64_t size;
  /* 0: one file.  Else a shard is closed before the tensor that would take it past so many bytes of data (one larger
     tensor has a shard to itself), and path is the index: FOLDER/model.safetensors.index.json, say. */
  uint64_t shard_bytes;
} moe_checkpoint_writer_desc;
MOE_INIT(moe_checkpoint_writer_desc)
/* path: what will appear.  Temporary files are made beside it, and those of writers that were killed are removed.
   desc may be NULL.  A path that is there and no regular file is MOE_ERR_INVALID, and so is a sharded one that does not
   end in .safetensors.index.json; another writer at work on the path is MOE_ERR_STATE. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_writer_create(moe_checkpoint_writer **out, const char *path,
                                                            const moe_checkpoint_writer_desc *desc);
/* Without a commit: removes the temporary files.  NULL is fine. */
MOE_API void moe_checkpoint_writer_free(moe_checkpoint_writer *writer);
/* Model configuration and whatever else should stay with the tensors.  Keys that begin with "moe." are the library's.
   A key twice is MOE_ERR_INVALID, and so is text that is not UTF-8. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_writer_metadata(moe_checkpoint_writer *writer, const char *key,
                                                              const char *value);
/* Host data, packed, little-endian, written to the temporary file at once.  MOE_ERR_INVALID: a name twice, or one that is
   "__metadata__" or not UTF-8; a dtype that is none; a rank outside 0..6; a negative extent.  After any other error the
   writer can only be freed. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_writer_add(moe_checkpoint_writer *writer, const char *name, int64_t dtype,
                                                         int64_t rank, const int64_t *shape, const void *data);
/* A device tensor, packed or a view; blocks. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_writer_add_tensor(moe_checkpoint_writer *writer, const char *name,
                                                                moe_queue *queue, const moe_tensor *tensor);
/* Writes header and metadata (format and library version, hashes), syncs, renames, syncs the folder; then removes the
   shards of the index that was replaced.  After it only free is legal.  On failure the previous checkpoint is as it was;
   but for a folder that cannot be synced: the text says that the new one is in place. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_writer_commit(moe_checkpoint_writer *writer);

/* ---- layers under published names ----------------------------------------------------------------------------- */
typedef enum moe_names {
  MOE_NAMES_LIBMOE = 0,   /* <prefix><parameter>: the names of moe_layer_param */
  MOE_NAMES_MIXTRAL = 1,  /* <prefix>block_sparse_moe.gate.weight, .experts.N.w1 (gate) w3 (up) w2 (down) .weight */
  MOE_NAMES_QWEN3 = 2,    /* <prefix>mlp.gate.weight, mlp.experts.N.gate_proj up_proj down_proj .weight; Qwen2-MoE's and
                             Qwen3-Next's mlp.shared_expert.*, mlp.shared_expert_gate.weight */
  MOE_NAMES_OLMOE = 3,    /* as Qwen3, without a shared expert */
  MOE_NAMES_DEEPSEEK = 4, /* as Qwen3 + mlp.gate.e_score_correction_bias, mlp.shared_experts.* */
  MOE_NAMES_GPT_OSS = 5   /* <prefix>mlp.router.weight .bias, mlp.experts.gate_up_proj [E,D,2F] interleaved, ..._bias,
                             down_proj [E,F,D], ..._bias; or MXFP4 ..._blocks, ..._scales (load only) */
} moe_names;
/* prefix: "model.layers.0.", say.  The layer decides which tensors there must be, with which shapes and dtypes; the
   layout comes from `names` only, never from shapes.  A layer without a parameter that the file has under the prefix, or
   the other way round, is MOE_ERR_FORMAT, which lists both.  flags: moe_checkpoint_flags (PARTIAL is about names under
   prefix + the scheme's module, since other modules are not the layer's).  MOE_ERR_UNSUPPORTED where the scheme has no
   name for a parameter, or the layer's experts are not gated, as those of all published schemes are.
   Weights of few bits are computed in FP32 and rounded to the layer's dtype, with any flags: MXFP4; F8_E4M3 with
   <name>_scale_inv for blocks of 128 x 128. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_load_layer(const moe_checkpoint *checkpoint, moe_queue *queue,
                                                         const moe_layer *layer, moe_span params, const char *prefix,
                                                         int64_t names, int64_t flags);
/* In the dtypes of the parameters; bit-equal after a load of the same names.  MOE_ERR_UNSUPPORTED as above, before
   anything is written. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_save_layer(moe_checkpoint_writer *writer, moe_queue *queue,
                                                         const moe_layer *layer, moe_span params, const char *prefix,
                                                         int64_t names);

/* ---- optimizer ---------------------------------------------------------------------------------------------------- */
/* <prefix>step, <prefix>rate; of parameter N, counted as they were added, <prefix>N.m, N.v and, of a BF16 or F16
   parameter, N.master, shaped as it.  Training that goes on from them, and from the parameters, gives the bits of
   training that never stopped.  Descriptor and groups (decay, rate_scale) are not in it: the caller makes the same ones.
   MOE_ERR_STATE before moe_adamw_bind. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_save_adamw(moe_checkpoint_writer *writer, moe_queue *queue,
                                                         const moe_adamw *opt, const char *prefix);
/* All of it must be there, and nothing else under the prefix (or PARTIAL); MOE_ERR_FORMAT lists the differences, and
   nothing has changed. */
MOE_API MOE_CHECKED moe_status moe_checkpoint_load_adamw(const moe_checkpoint *checkpoint, moe_queue *queue,
                                                         moe_adamw *opt, const char *prefix, int64_t flags);

/* ---- the raw layout ------------------------------------------------------------------------------------------------- */
/* int64 count, then per matrix int64 rows, int64 columns, f32 row-major data; little-endian.  No version, dtype or
   checksum: for exchange only.  Open gives a checkpoint whose tensors are "0", "1", ...: read it as any other. */
MOE_API MOE_CHECKED moe_status moe_raw_open(moe_checkpoint **out, const char *path);
/* matrices: F32, rank 2, packed or views; blocks.  Written as atomically as a checkpoint. */
MOE_API MOE_CHECKED moe_status moe_raw_save(const char *path, moe_queue *queue, const moe_tensor *matrices, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
