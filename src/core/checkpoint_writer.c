/* checkpoint_writer.c - checkpoints that are written.

   The header stands before the data, and its size is known only when the last tensor has been added.  So data is
   written behind a reserve.  When a file is finished, a small one is moved together; in a large one the rest of the
   reserve becomes spaces, which the format allows behind the header; and a header that is larger than the reserve
   pushes the data back, the only case in which much is copied.

   The format leaves no room between tensors, so that one whose size is no multiple of 8 would put those behind it where
   others cannot map them as arrays.  Such tensors go into a second file and then to the end, those of larger elements
   first: each tensor begins at a multiple of its element's size (the header ends at one of 8).

   Sharded: every save gives its shards names that no other save has (a hash of their headers, which hold the hashes of
   the data), so that the old shards stay until the new index is in place. */
#include "core/backend.h"
#include "core/checkpoint.h"
#include "core/hash.h"
#include "core/newfile.h"
#include "core/safetensors.h"
#include "core/tensor.h"
#include "core/transfer.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define RESERVE ((uint64_t)1 << 20) /* for length and header: some thousands of tensors */
#define SMALL ((uint64_t)16 << 20)  /* data of a file in which there shall be no spaces */
#define INDEX_END ".safetensors.index.json"

struct record {     /* a tensor of the file that is being written */
  const char *name; /* of `names` */
  int64_t dtype, rank, shape[MOE_RANK_MAX];
  uint64_t bytes, hash;
  uint64_t at;    /* where its data begin in the file that they are in for now */
  uint64_t place; /* where in the data section */
};

struct moe_checkpoint_writer {
  char *path;
  uint64_t shard_bytes;
  json_t *metadata;          /* the caller's */
  json_t *names;             /* every tensor, and the number of its shard */
  struct moe__newfile claim; /* sharded: holds the path; else it is `file` that does */
  struct moe__newfile file, odd;
  uint64_t even_bytes, odd_bytes; /* written into file, behind the reserve, and into odd */
  struct record *records;
  int64_t n, room;
  uint64_t left; /* bytes that are to come of the last record */
  int open;      /* it is not ended */
  XXH3_state_t *hash;
  struct moe__newfile *shards; /* finished, not renamed */
  int64_t n_shards, room_shards;
  uint64_t total, token; /* bytes of all tensors; hash of all shards' headers */
  int spent;             /* committed, or something failed: only free is legal */
};

static moe_status no_memory(const char *fn)
{
  return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
}

/* Anything that fails inside spoils the writer. */
static moe_status spend(moe_checkpoint_writer *w, moe_status st)
{
  if (st) w->spent = 1;
  return st;
}

static moe_status usable(const char *fn, const moe_checkpoint_writer *w)
{
  if (!w) return moe__fail(MOE_ERR_INVALID, "%s: writer is NULL", fn);
  if (w->spent) return moe__fail(MOE_ERR_STATE, "%s: after a commit or an error the writer can only be freed", fn);
  return MOE_OK;
}

/* As the Unicode standard's table of well-formed sequences has it. */
static int is_utf8(const char *text)
{
  for (const unsigned char *s = (const unsigned char *)text; *s;) {
    const unsigned char lead = *s++;
    const int more = lead < 0x80 ? 0 : lead < 0xc2 ? -1 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : lead < 0xf5 ? 3 : -1;
    const unsigned char low = lead == 0xe0   ? 0xa0
                              : lead == 0xf0 ? 0x90
                                             : 0x80,
                        high = lead == 0xed   ? 0x9f
                               : lead == 0xf4 ? 0x8f
                                              : 0xbf;
    if (more < 0 || (more > 0 && (*s < low || *s > high))) return 0;
    for (int i = 0; i < more; i++, s++)
      if ((*s & 0xc0) != 0x80) return 0;
  }
  return 1;
}

static moe_status check_text(const char *fn, const char *what, const char *text)
{
  if (!text) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, what);
  if (!is_utf8(text)) return moe__fail(MOE_ERR_INVALID, "%s: %s \"%s\" is not UTF-8", fn, what, moe__shown(text).text);
  return MOE_OK;
}

static int grow(void **array, int64_t n, int64_t *room, size_t size)
{
  if (n < *room) return 1;
  const int64_t more = *room ? *room * 2 : 16;
  void *bigger = realloc(*array, (size_t)more * size);
  if (!bigger) return 0;
  *array = bigger;
  *room = more;
  return 1;
}

/* ---- create and free --------------------------------------------------------------------------------------------- */
static moe_status check_path(const char *fn, const char *path, int sharded)
{
  const char *base = moe__base_name(path);
  const size_t length = strlen(base), end = strlen(INDEX_END);
  struct stat is;
  if (!*base) return moe__fail(MOE_ERR_INVALID, "%s: path \"%s\" names no file", fn, moe__shown(path).text);
  if (sharded && (length <= end || strcmp(base + length - end, INDEX_END) != 0))
    return moe__fail(MOE_ERR_INVALID, "%s: path \"%s\" of a sharded checkpoint does not end in NAME" INDEX_END, fn,
                     moe__shown(path).text);
  if (!lstat(path, &is) && !S_ISREG(is.st_mode) && !S_ISLNK(is.st_mode))
    return moe__fail(MOE_ERR_INVALID, "%s: %s is there and is no regular file", fn, moe__shown(path).text);
  return MOE_OK;
}

static moe_status open_writer(const char *fn, moe_checkpoint_writer *w, const char *path)
{
  struct moe__newfile *first = w->shard_bytes ? &w->claim : &w->file;
  w->path = strdup(path);
  w->metadata = json_object();
  w->names = json_object();
  w->hash = XXH3_createState();
  if (!w->path || !w->metadata || !w->names || !w->hash) return no_memory(fn);
  MOE__TRY(moe__newfile_open(fn, first, path));
  return moe__newfile_claim(fn, first, path);
}

moe_status moe_checkpoint_writer_create(moe_checkpoint_writer **out, const char *path,
                                        const moe_checkpoint_writer_desc *given)
{
  static const char fn[] = "moe_checkpoint_writer_create";
  moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (given) MOE__TRY(moe__struct_in(&desc, sizeof desc, given, fn, "desc"));
  if (!path) return moe__fail(MOE_ERR_INVALID, "%s: path is NULL", fn);
  MOE__TRY(check_path(fn, path, desc.shard_bytes != 0));
  moe_checkpoint_writer *w = calloc(1, sizeof *w);
  if (!w) return no_memory(fn);
  w->shard_bytes = desc.shard_bytes;
  moe_status st = open_writer(fn, w, path);
  if (st) moe_checkpoint_writer_free(w);
  else *out = w;
  return st;
}

void moe_checkpoint_writer_free(moe_checkpoint_writer *w)
{
  if (!w) return;
  for (int64_t i = 0; i < w->n_shards; i++) moe__newfile_discard(&w->shards[i]);
  moe__newfile_discard(&w->file);
  moe__newfile_discard(&w->odd);
  moe__newfile_discard(&w->claim);
  json_decref(w->metadata);
  json_decref(w->names);
  XXH3_freeState(w->hash);
  free(w->shards);
  free(w->records);
  free(w->path);
  free(w);
}

moe_status moe_checkpoint_writer_metadata(moe_checkpoint_writer *w, const char *key, const char *value)
{
  static const char fn[] = "moe_checkpoint_writer_metadata";
  MOE__TRY(usable(fn, w));
  MOE__TRY(check_text(fn, "key", key));
  MOE__TRY(check_text(fn, "value", value));
  if (!strncmp(key, MOE__KEYS, strlen(MOE__KEYS)))
    return moe__fail(MOE_ERR_INVALID, "%s: key \"%s\" begins with \"" MOE__KEYS "\"", fn, moe__shown(key).text);
  if (json_object_get(w->metadata, key))
    return moe__fail(MOE_ERR_INVALID, "%s: key \"%s\" was given before", fn, moe__shown(key).text);
  return json_object_set_new(w->metadata, key, json_string(value)) ? no_memory(fn) : MOE_OK;
}

/* ---- a file ------------------------------------------------------------------------------------------------------ */
static int is_odd(const struct record *r)
{
  return r->bytes % 8 != 0;
}

static void place_records(moe_checkpoint_writer *w)
{
  uint64_t at = w->even_bytes;
  for (int64_t i = 0; i < w->n; i++)
    if (!is_odd(&w->records[i])) w->records[i].place = w->records[i].at;
  for (uint64_t size = 4; size; size /= 2)
    for (int64_t i = 0; i < w->n; i++) {
      struct record *r = &w->records[i];
      if (!is_odd(r) || moe_dtype_size(r->dtype) != size) continue;
      r->place = at;
      at += r->bytes;
    }
}

/* Adds the library's own keys.  "format" is what other readers ask for: the framework that the tensors are for. */
static int stamp(json_t *metadata)
{
  return json_object_set_new(metadata, MOE__KEY_FORMAT, json_string(MOE__FORMAT)) ||
         json_object_set_new(metadata, MOE__KEY_VERSION, json_string(moe_version_string()));
}

static int add_to_header(json_t *header, json_t *metadata, const struct record *r)
{
  char digits[17], *key = malloc(strlen(MOE__KEY_HASH) + strlen(r->name) + 1);
  json_t *shape = json_array();
  int failed = !key || !shape;
  snprintf(digits, sizeof digits, "%016llx", (unsigned long long)r->hash);
  if (key) sprintf(key, "%s%s", MOE__KEY_HASH, r->name);
  for (int64_t d = 0; d < r->rank; d++) failed = failed || json_array_append_new(shape, json_integer(r->shape[d]));
  failed = failed || json_object_set_new(metadata, key, json_string(digits));
  free(key);
  json_t *entry = json_pack("{s:s, s:o, s:[I,I]}", "dtype", moe__safetensors_dtype(r->dtype), "shape", shape,
                            "data_offsets", (json_int_t)r->place, (json_int_t)(r->place + r->bytes));
  if (!entry) return 1; /* and shape is gone with it */
  return json_object_set_new(header, r->name, entry) || failed;
}

/* JSON as text.  (json_dumps does not see where it runs out of memory while it writes a key.) */
struct text {
  char *bytes;
  int64_t length, room;
  int failed;
};

static int add_text(const char *bytes, size_t n, void *user)
{
  struct text *t = user;
  while (!t->failed && t->room - t->length < (int64_t)n) t->failed = !grow((void **)&t->bytes, t->room, &t->room, 1);
  if (t->failed) return -1;
  memcpy(t->bytes + t->length, bytes, n);
  t->length += (int64_t)n;
  return 0;
}

/* In order of key, so that the same save gives the same bytes. */
static struct text text_of(const json_t *json, size_t flags)
{
  struct text t = { 0 };
  if (!json || json_dump_callback(json, add_text, &t, flags | JSON_SORT_KEYS)) t.failed = 1;
  if (!t.failed) return t;
  free(t.bytes);
  return (struct text){ .failed = 1 };
}

/* The header of the file's tensors, with `extra` among its metadata. */
static struct text make_header(const moe_checkpoint_writer *w, json_t *extra)
{
  json_t *header = json_object(), *metadata = json_object();
  int failed = !header || !metadata || (extra && json_object_update(metadata, extra)) || stamp(metadata);
  if (!failed && !json_object_get(metadata, "format"))
    failed = json_object_set_new(metadata, "format", json_string("pt"));
  for (int64_t i = 0; i < w->n && !failed; i++) failed = add_to_header(header, metadata, &w->records[i]);
  failed = failed || json_object_set(header, "__metadata__", metadata);
  const struct text text = text_of(failed ? NULL : header, JSON_COMPACT);
  json_decref(header);
  json_decref(metadata);
  return text;
}

/* Puts the file together: header, data, odd tensors; durable, not yet renamed. */
static moe_status assemble(const char *fn, moe_checkpoint_writer *w, const struct text *text)
{
  const uint64_t length = (uint64_t)text->length, head = 8 + (length + 7) / 8 * 8, data = w->even_bytes + w->odd_bytes,
                 base = head > RESERVE || data <= SMALL ? head : RESERVE;
  if (base - 8 > MOE__HEADER_MAX)
    return moe__fail(MOE_ERR_INVALID, "%s: a header of %llu bytes, at most %u are legal: too many tensors in one file",
                     fn, (unsigned long long)base - 8, MOE__HEADER_MAX);
  char *bytes = malloc((size_t)base);
  if (!bytes) return no_memory(fn);
  memset(bytes, ' ', (size_t)base);
  for (int i = 0; i < 8; i++) bytes[i] = (char)((base - 8) >> (8 * i) & 0xff);
  memcpy(bytes + 8, text->bytes, (size_t)length);
  moe_status st = moe__newfile_copy(fn, &w->file, base, &w->file, RESERVE, w->even_bytes);
  for (int64_t i = 0; i < w->n && !st; i++) {
    const struct record *r = &w->records[i];
    if (is_odd(r)) st = moe__newfile_copy(fn, &w->file, base + r->place, &w->odd, r->at, r->bytes);
  }
  if (!st) st = moe__newfile_write(fn, &w->file, 0, bytes, base);
  if (!st) st = moe__newfile_finish(fn, &w->file, base + data);
  free(bytes);
  return st;
}

static moe_status finish_file(const char *fn, moe_checkpoint_writer *w, json_t *extra)
{
  place_records(w);
  const struct text text = make_header(w, extra);
  if (text.failed) return no_memory(fn);
  moe_status st = assemble(fn, w, &text);
  w->token = XXH3_64bits_withSeed(text.bytes, (size_t)text.length, w->token);
  free(text.bytes);
  w->n = 0;
  w->even_bytes = w->odd_bytes = 0;
  moe__newfile_discard(&w->odd);
  return st;
}

static moe_status finish_shard(const char *fn, moe_checkpoint_writer *w)
{
  if (!w->file.temp) return MOE_OK;
  if (!grow((void **)&w->shards, w->n_shards, &w->room_shards, sizeof *w->shards)) return no_memory(fn);
  MOE__TRY(finish_file(fn, w, NULL));
  moe__newfile_close(&w->file);
  w->shards[w->n_shards++] = w->file;
  w->file.temp = NULL;
  return MOE_OK;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */
static moe_status check_tensor(const char *fn, const moe_checkpoint_writer *w, const char *name, int64_t dtype,
                               int64_t rank, const int64_t *shape, int64_t *bytes)
{
  MOE__TRY(usable(fn, w));
  if (w->open) return moe__fail(MOE_ERR_STATE, "%s: the tensor before is not ended", fn);
  MOE__TRY(check_text(fn, "name", name));
  if (!strcmp(name, "__metadata__")) return moe__fail(MOE_ERR_INVALID, "%s: name \"%s\" is the format's own", fn, name);
  if (json_object_get(w->names, name))
    return moe__fail(MOE_ERR_INVALID, "%s: name \"%s\" was added before", fn, moe__shown(name).text);
  if (!moe_dtype_size(dtype))
    return moe__fail(MOE_ERR_INVALID, "%s: %s: dtype %lld is none", fn, moe__shown(name).text, (long long)dtype);
  if (rank < 0 || rank > MOE_RANK_MAX || (rank && !shape))
    return moe__fail(MOE_ERR_INVALID, "%s: %s: rank %lld outside 0..%d, or no shape", fn, moe__shown(name).text,
                     (long long)rank, MOE_RANK_MAX);
  *bytes = (int64_t)moe_dtype_size(dtype);
  for (int64_t d = 0; d < rank; d++)
    if (moe__mul(bytes, *bytes, shape[d]))
      return moe__fail(MOE_ERR_INVALID, "%s: %s: extent %lld in dimension %lld is negative or too large", fn,
                       moe__shown(name).text, (long long)shape[d], (long long)d);
  return MOE_OK;
}

static moe_status begin(const char *fn, moe_checkpoint_writer *w, const char *name, const struct record *new)
{
  const uint64_t before = w->even_bytes + w->odd_bytes;
  if (w->shard_bytes && before && (new->bytes > w->shard_bytes || before > w->shard_bytes - new->bytes))
    MOE__TRY(finish_shard(fn, w));
  if (!w->file.temp) MOE__TRY(moe__newfile_open(fn, &w->file, w->path));
  if (is_odd(new) && !w->odd.temp) MOE__TRY(moe__newfile_open(fn, &w->odd, w->path));
  if (!grow((void **)&w->records, w->n, &w->room, sizeof *w->records) ||
      json_object_set_new(w->names, name, json_integer(w->n_shards)))
    return no_memory(fn);
  w->records[w->n] = *new;
  w->records[w->n].name = json_object_iter_key(json_object_iter_at(w->names, name));
  w->records[w->n++].at = is_odd(new) ? w->odd_bytes : w->even_bytes;
  w->total += new->bytes;
  w->left = new->bytes;
  w->open = 1;
  XXH3_64bits_reset(w->hash);
  return MOE_OK;
}

moe_status moe__writer_begin(const char *fn, moe_checkpoint_writer *w, const char *name, int64_t dtype, int64_t rank,
                             const int64_t *shape)
{
  int64_t bytes;
  MOE__TRY(check_tensor(fn, w, name, dtype, rank, shape, &bytes));
  struct record new = { .dtype = dtype, .rank = rank, .bytes = (uint64_t)bytes };
  if (rank) memcpy(new.shape, shape, (size_t)rank * sizeof *shape);
  return spend(w, begin(fn, w, name, &new));
}

moe_status moe__writer_append(const char *fn, moe_checkpoint_writer *w, const void *data, uint64_t bytes)
{
  MOE__TRY(usable(fn, w));
  if (!w->open || bytes > w->left)
    return spend(w, moe__fail(MOE_ERR_STATE, "%s: %llu bytes, the tensor wants %llu", fn, (unsigned long long)bytes,
                              w->open ? (unsigned long long)w->left : 0));
  const int odd = is_odd(&w->records[w->n - 1]);
  uint64_t *at = odd ? &w->odd_bytes : &w->even_bytes;
  MOE__TRY(spend(w, moe__newfile_write(fn, odd ? &w->odd : &w->file, odd ? *at : RESERVE + *at, data, bytes)));
  if (bytes) XXH3_64bits_update(w->hash, data, (size_t)bytes);
  *at += bytes;
  w->left -= bytes;
  return MOE_OK;
}

moe_status moe__writer_end(const char *fn, moe_checkpoint_writer *w)
{
  MOE__TRY(usable(fn, w));
  if (!w->open || w->left)
    return spend(w,
                 moe__fail(MOE_ERR_STATE, "%s: %llu bytes of the tensor are missing", fn, (unsigned long long)w->left));
  w->records[w->n - 1].hash = XXH3_64bits_digest(w->hash);
  w->open = 0;
  return MOE_OK;
}

moe_status moe_checkpoint_writer_add(moe_checkpoint_writer *w, const char *name, int64_t dtype, int64_t rank,
                                     const int64_t *shape, const void *data)
{
  static const char fn[] = "moe_checkpoint_writer_add";
  int64_t bytes;
  MOE__TRY(check_tensor(fn, w, name, dtype, rank, shape, &bytes));
  if (bytes && !data) return moe__fail(MOE_ERR_INVALID, "%s: %s: data is NULL", fn, moe__shown(name).text);
  MOE__TRY(moe__writer_begin(fn, w, name, dtype, rank, shape));
  MOE__TRY(moe__writer_append(fn, w, data, (uint64_t)bytes));
  return moe__writer_end(fn, w);
}

struct append {
  const char *fn;
  moe_checkpoint_writer *w;
};
static moe_status append_piece(void *user, const void *data, uint64_t bytes)
{
  const struct append *a = user;
  return moe__writer_append(a->fn, a->w, data, bytes);
}

moe_status moe_checkpoint_writer_add_tensor(moe_checkpoint_writer *w, const char *name, moe_queue *q,
                                            const moe_tensor *tensor)
{
  static const char fn[] = "moe_checkpoint_writer_add_tensor";
  struct append a = { fn, w };
  MOE__TRY(usable(fn, w));
  if (!name || !q || !tensor)
    return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, !name ? "name" : q ? "tensor" : "queue");
  MOE__TRY(moe__want_array(fn, moe__shown(name).text, tensor, 0));
  MOE__TRY(moe__writer_begin(fn, w, name, tensor->dtype, tensor->rank, tensor->shape));
  MOE__TRY(spend(w, moe__stream(q, tensor, append_piece, &a)));
  return moe__writer_end(fn, w);
}

/* ---- commit ------------------------------------------------------------------------------------------------------ */
/* After the last rename: the only failure that leaves the new checkpoint. */
static moe_status sync_last(const char *fn, const char *path)
{
  moe_status st = moe__sync_folder(fn, path);
  return st ? moe__fail(st, "%s (the new file is in place, but may not outlast a power failure)", moe_last_error())
            : st;
}

static moe_status commit_single(const char *fn, moe_checkpoint_writer *w)
{
  MOE__TRY(finish_file(fn, w, w->metadata));
  MOE__TRY(moe__newfile_publish(fn, &w->file, w->path));
  return sync_last(fn, w->path);
}

static char *shard_name(const moe_checkpoint_writer *w, int64_t i)
{
  const char *base = moe__base_name(w->path);
  const size_t stem = strlen(base) - strlen(INDEX_END), room = stem + 80;
  char *name = malloc(room);
  if (name)
    snprintf(name, room, "%.*s-%016llx-%05lld-of-%05lld.safetensors", (int)stem, base, (unsigned long long)w->token,
             (long long)i + 1, (long long)w->n_shards);
  return name;
}

/* Is it a name that shard_name could have made? */
static int is_shard(const moe_checkpoint_writer *w, const char *name)
{
  static const char digits[] = "0123456789abcdef";
  const char *base = moe__base_name(w->path);
  const size_t stem = strlen(base) - strlen(INDEX_END);
  if (strncmp(name, base, stem) != 0 || name[stem] != '-') return 0;
  name += stem + 1;
  if (strspn(name, digits) != 16 || name[16] != '-') return 0;
  name += 17;
  const size_t number = strspn(name, "0123456789");
  if (number < 5 || strncmp(name + number, "-of-", 4) != 0) return 0;
  name += number + 4;
  const size_t total = strspn(name, "0123456789");
  return total >= 5 && !strcmp(name + total, ".safetensors");
}

/* Removes shards of the path that the index in place does not name: those of the one before, and of writers that were
   killed. */
static void remove_old_shards(const moe_checkpoint_writer *w, const json_t *files)
{
  char *folder = moe__beside(w->path, ".");
  DIR *dir = folder ? opendir(folder) : NULL;
  const struct dirent *entry;
  while (dir && (entry = readdir(dir))) {
    if (!is_shard(w, entry->d_name) || json_object_get(files, entry->d_name)) continue;
    char *path = moe__beside(w->path, entry->d_name);
    if (path) unlink(path);
    free(path);
  }
  if (dir) closedir(dir);
  free(folder);
}

/* The index, as a temporary file. */
static moe_status write_index(const char *fn, moe_checkpoint_writer *w, json_t *map)
{
  json_t *metadata = json_object(), *index = NULL;
  if (metadata && !json_object_update(metadata, w->metadata) && !stamp(metadata) &&
      !json_object_set_new(metadata, "total_size", json_integer((json_int_t)w->total)))
    index = json_pack("{s:O, s:O}", "metadata", metadata, "weight_map", map);
  const struct text text = text_of(index, JSON_INDENT(2));
  json_decref(index);
  json_decref(metadata);
  if (text.failed) return no_memory(fn);
  moe_status st = moe__newfile_open(fn, &w->file, w->path);
  if (!st) st = moe__newfile_write(fn, &w->file, 0, text.bytes, (uint64_t)text.length);
  if (!st) st = moe__newfile_finish(fn, &w->file, (uint64_t)text.length);
  free(text.bytes);
  return st;
}

/* Shard i gets its name; *made: where the name was not there for certain, else it may replace its equal. */
static moe_status publish_shard(const char *fn, moe_checkpoint_writer *w, int64_t i, const char *name, char **made)
{
  struct stat is;
  char *path = moe__beside(w->path, name);
  if (!path) return no_memory(fn);
  const int is_new = lstat(path, &is) && errno == ENOENT;
  moe_status st = moe__newfile_publish(fn, &w->shards[i], path);
  if (!st && is_new) *made = path;
  else free(path);
  return st;
}

/* Everything up to the renaming of the index.  files: the shards' names; made: paths to remove where this fails. */
static moe_status publish_shards(const char *fn, moe_checkpoint_writer *w, json_t *files, char **made)
{
  json_t *map = json_object(), *value;
  const char *name;
  int64_t i = 0;
  moe_status st = map ? MOE_OK : no_memory(fn);
  for (; i < w->n_shards && !st; i++) {
    char *shard = shard_name(w, i);
    if (!shard || json_object_set_new(files, shard, json_integer(i))) st = no_memory(fn);
    else st = publish_shard(fn, w, i, shard, &made[i]);
    free(shard);
  }
  if (!st) st = moe__sync_folder(fn, w->path);
  json_object_foreach(w->names, name, value)
  {
    char *shard = st ? NULL : shard_name(w, json_integer_value(value));
    if (!st && (!shard || json_object_set_new(map, name, json_string(shard)))) st = no_memory(fn);
    free(shard);
  }
  if (!st) st = write_index(fn, w, map);
  json_decref(map);
  return st ? st : moe__newfile_publish(fn, &w->file, w->path);
}

static moe_status commit_sharded(const char *fn, moe_checkpoint_writer *w)
{
  MOE__TRY(finish_shard(fn, w));
  json_t *files = json_object();
  char **made = calloc((size_t)w->n_shards + 1, sizeof *made);
  moe_status st = files && made ? publish_shards(fn, w, files, made) : no_memory(fn);
  for (int64_t i = 0; made && i < w->n_shards; i++) {
    if (st && made[i]) unlink(made[i]);
    free(made[i]);
  }
  if (!st) st = sync_last(fn, w->path);
  if (!st) remove_old_shards(w, files);
  free(made);
  json_decref(files);
  return st;
}

moe_status moe_checkpoint_writer_commit(moe_checkpoint_writer *w)
{
  static const char fn[] = "moe_checkpoint_writer_commit";
  MOE__TRY(usable(fn, w));
  if (w->open) return moe__fail(MOE_ERR_STATE, "%s: a tensor is not ended", fn);
  w->spent = 1;
  if (w->shard_bytes) return commit_sharded(fn, w);
  return commit_single(fn, w);
}

/* ---- raw --------------------------------------------------------------------------------------------------------- */
struct raw {
  struct moe__newfile file;
  uint64_t at;
};

static moe_status write_raw(void *user, const void *data, uint64_t bytes)
{
  struct raw *r = user;
  MOE__TRY(moe__newfile_write("moe_raw_save", &r->file, r->at, data, bytes));
  r->at += bytes;
  return MOE_OK;
}

static moe_status save_raw(const char *fn, struct raw *r, const char *path, moe_queue *q, const moe_tensor *matrices,
                           int64_t n)
{
  MOE__TRY(moe__newfile_open(fn, &r->file, path));
  MOE__TRY(moe__newfile_claim(fn, &r->file, path));
  MOE__TRY(write_raw(r, &n, sizeof n));
  for (int64_t i = 0; i < n; i++) {
    MOE__TRY(write_raw(r, matrices[i].shape, 2 * sizeof matrices[i].shape[0]));
    MOE__TRY(moe__stream(q, &matrices[i], write_raw, r));
  }
  MOE__TRY(moe__newfile_finish(fn, &r->file, r->at));
  MOE__TRY(moe__newfile_publish(fn, &r->file, path));
  return sync_last(fn, path);
}

moe_status moe_raw_save(const char *path, moe_queue *q, const moe_tensor *matrices, int64_t n)
{
  static const char fn[] = "moe_raw_save";
  struct raw r = { 0 };
  if (!path || !q) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, path ? "queue" : "path");
  if (n < 0 || (n && !matrices))
    return moe__fail(MOE_ERR_INVALID, "%s: %lld matrices%s", fn, (long long)n, matrices ? "" : ", none given");
  MOE__TRY(check_path(fn, path, 0));
  for (int64_t i = 0; i < n; i++) {
    char name[40];
    snprintf(name, sizeof name, "matrices[%lld]", (long long)i);
    MOE__TRY(moe__want_array(fn, name, &matrices[i], 0));
    if (matrices[i].dtype != MOE_F32 || matrices[i].rank != 2)
      return moe__fail(MOE_ERR_INVALID, "%s: %s is %s of rank %d, f32 of rank 2 is wanted", fn, name,
                       moe_dtype_name(matrices[i].dtype), matrices[i].rank);
  }
  moe_status st = save_raw(fn, &r, path, q, matrices, n);
  moe__newfile_discard(&r.file);
  return st;
}
