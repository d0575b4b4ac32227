/* safetensors.h - the format, in memory: 8 bytes length of the header (little-endian), the header in JSON and spaces,
   the data of all tensors with nothing between them.  Whatever the bytes are, nothing is read outside [data, data +
   size), and memory taken is at most about 100 times the header's size, which is bounded by the data's. */
#ifndef MOE_CORE_SAFETENSORS_H
#define MOE_CORE_SAFETENSORS_H

#include <moe/checkpoint.h>

#include <jansson.h>

#define MOE__HEADER_MAX 100000000u /* bytes, as in the reference implementation */

/* Keys of __metadata__. */
#define MOE__KEYS "moe."
#define MOE__KEY_FORMAT "moe.format"
#define MOE__KEY_VERSION "moe.version"
#define MOE__KEY_HASH "moe.xxh3:" /* and the tensor's name: 16 hexadecimal digits */
#define MOE__FORMAT "1"

struct moe__entry {
  const char *name, *dtype_name;
  int64_t dtype, rank, shape[MOE_RANK_MAX]; /* as in moe_checkpoint_entry */
  const unsigned char *data;
  uint64_t bytes, hash;
  int hashed;
};
/* What a file holds: the entries in order of name; the metadata but for hashes, all strings (NULL: none).  Entries lean
   on the bytes that were parsed and on `text`. */
struct moe__table {
  struct moe__entry *entries;
  int64_t n;
  json_t *metadata;
  char *text;
  char *stray; /* a hash whose tensor is not there; or NULL */
};

/* These fail with MOE_ERR_FORMAT or MOE_ERR_NO_MEMORY, name neither function nor file, and then leave {0}. */
moe_status moe__safetensors_parse(struct moe__table *out, const void *data, uint64_t size);
/* int64 count, then per matrix int64 rows, int64 columns, f32 data. */
moe_status moe__raw_parse(struct moe__table *out, const void *data, uint64_t size);
void moe__table_free(struct moe__table *t);

/* An index: tensor names to names of files beside it (*map), and metadata of which all values are strings. */
moe_status moe__index_parse(json_t **map, json_t **metadata, const void *data, uint64_t size);

/* How files spell a dtype; NULL where they do not. */
const char *moe__safetensors_dtype(int64_t dtype);

/* "[2,3]"; the first MOE_RANK_MAX extents, and dots where there are more. */
struct moe__shape_text {
  char text[160];
};
struct moe__shape_text moe__shape_text(int64_t rank, const int64_t *shape);

#endif
