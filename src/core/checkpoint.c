/* checkpoint.c - checkpoints that are read: files mapped, their tables merged, parts of tensors checked and copied. */
#include "core/checkpoint.h"

#include "core/backend.h"
#include "core/convert.h"
#include "core/hash.h"
#include "core/newfile.h"
#include "core/safetensors.h"
#include "core/tensor.h"
#include "core/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct file {
  char *path;
  void *map; /* NULL where it is empty */
  uint64_t size;
  struct stat is;
  struct moe__table table;
};
struct item { /* a tensor, or a key of the metadata */
  const struct file *file;
  const struct moe__entry *entry;
};
struct pair {
  const char *key, *value;
  int64_t order; /* of two values of a key the first is kept */
};
struct moe_checkpoint {
  char *path; /* of the file or the index */
  struct file *files;
  int64_t n_files, n, n_pairs;
  struct item *items; /* in order of name */
  struct pair *pairs; /* in order of key */
  json_t *metadata;   /* of the index */
};

static moe_status no_memory(const char *fn)
{
  return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */
static void unmap(struct file *f)
{
  moe__table_free(&f->table);
  if (f->map) munmap(f->map, (size_t)f->size);
  free(f->path);
  memset(f, 0, sizeof *f);
}

/* Maps the file; takes the path over. */
static moe_status map_file(const char *fn, struct file *f, char *path)
{
  int fd, rc;
  memset(f, 0, sizeof *f);
  f->path = path;
  if (!path) return no_memory(fn);
  do fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a pipe must not make us wait */
  while (fd < 0 && errno == EINTR);
  if (fd < 0) return moe__fail_io(fn, "cannot open", path);
  rc = fstat(fd, &f->is);
  if (!rc && S_ISREG(f->is.st_mode) && (uint64_t)f->is.st_size <= SIZE_MAX) {
    f->size = (uint64_t)f->is.st_size;
    if (f->size) f->map = mmap(NULL, (size_t)f->size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (f->map == MAP_FAILED) {
      f->map = NULL;
      rc = -1;
    }
  } else if (!rc) {
    close(fd);
    return moe__fail(MOE_ERR_IO, "%s: %s is no regular file that fits into memory", fn, moe__shown(path).text);
  }
  const moe_status st = rc ? moe__fail_io(fn, "cannot map", path) : MOE_OK;
  close(fd);
  return st;
}

/* An error of a parser, which knows neither function nor file. */
static moe_status in_file(const char *fn, moe_status st, const char *path)
{
  if (st) {
    moe__fail_in(st, moe__shown(path).text);
    moe__fail_in(st, fn);
  }
  return st;
}

static moe_status open_file(const char *fn, struct file *f, char *path)
{
  MOE__TRY(map_file(fn, f, path));
  return in_file(fn, moe__safetensors_parse(&f->table, f->map, f->size), f->path);
}

/* ---- tables merged ----------------------------------------------------------------------------------------------- */
static int by_name(const void *a, const void *b)
{
  return strcmp(((const struct item *)a)->entry->name, ((const struct item *)b)->entry->name);
}
static int by_key(const void *a, const void *b)
{
  const struct pair *x = a, *y = b;
  const int rc = strcmp(x->key, y->key);
  return rc ? rc : (x->order > y->order) - (x->order < y->order);
}

static void add_pairs(moe_checkpoint *c, json_t *metadata)
{
  const char *key;
  json_t *value;
  json_object_foreach(metadata, key, value)
  {
    c->pairs[c->n_pairs] = (struct pair){ key, json_string_value(value), c->n_pairs };
    c->n_pairs++;
  }
}

static moe_status merge(const char *fn, moe_checkpoint *c)
{
  size_t items = 0, pairs = json_object_size(c->metadata);
  int64_t kept = 0;
  for (int64_t i = 0; i < c->n_files; i++) {
    items += (size_t)c->files[i].table.n;
    pairs += json_object_size(c->files[i].table.metadata);
  }
  c->items = calloc(items + 1, sizeof *c->items);
  c->pairs = calloc(pairs + 1, sizeof *c->pairs);
  if (!c->items || !c->pairs) return no_memory(fn);
  add_pairs(c, c->metadata);
  for (int64_t i = 0; i < c->n_files; i++) {
    const struct moe__table *t = &c->files[i].table;
    for (int64_t k = 0; k < t->n; k++) c->items[c->n++] = (struct item){ &c->files[i], &t->entries[k] };
    add_pairs(c, t->metadata);
  }
  qsort(c->items, (size_t)c->n, sizeof *c->items, by_name);
  qsort(c->pairs, (size_t)c->n_pairs, sizeof *c->pairs, by_key);
  for (int64_t i = 0; i < c->n_pairs; i++)
    if (!kept || strcmp(c->pairs[kept - 1].key, c->pairs[i].key) != 0) c->pairs[kept++] = c->pairs[i];
  c->n_pairs = kept;
  for (int64_t i = 1; i < c->n; i++)
    if (!by_name(&c->items[i - 1], &c->items[i]))
      return moe__fail(MOE_ERR_FORMAT, "%s: %s: tensor \"%s\" is in two shards, %s and %s", fn,
                       moe__shown(c->path).text, moe__shown(c->items[i].entry->name).text,
                       moe__shown(moe__base_name(c->items[i - 1].file->path)).text,
                       moe__shown(moe__base_name(c->items[i].file->path)).text);
  return MOE_OK;
}

static const struct item *find(const moe_checkpoint *c, const char *name)
{
  const struct moe__entry entry = { .name = name };
  const struct item wanted = { NULL, &entry };
  return c->n ? bsearch(&wanted, c->items, (size_t)c->n, sizeof wanted, by_name) : NULL;
}

/* ---- shards ------------------------------------------------------------------------------------------------------ */
/* The files that the index names, each once, and every tensor where the index says it is. */
static moe_status open_shards(const char *fn, moe_checkpoint *c, json_t *map)
{
  json_t *seen = json_object(), *value;
  const char *name;
  moe_status st = MOE_OK;
  c->files = calloc(json_object_size(map) + 1, sizeof *c->files);
  if (!seen || !c->files) st = no_memory(fn);
  json_object_foreach(map, name, value)
  {
    const char *file = json_string_value(value);
    if (st || json_object_get(seen, file)) continue;
    st = json_object_set(seen, file, value) ? no_memory(fn)
                                            : open_file(fn, &c->files[c->n_files++], moe__beside(c->path, file));
  }
  if (!st) st = merge(fn, c);
  json_object_foreach(map, name, value)
  {
    const char *file = json_string_value(value);
    const struct item *it = st ? NULL : find(c, name);
    if (!st && (!it || strcmp(moe__base_name(it->file->path), file) != 0))
      st = moe__fail(MOE_ERR_FORMAT, "%s: %s: tensor \"%s\" is not in %s%s%s", fn, moe__shown(c->path).text,
                     moe__shown(name).text, moe__shown(file).text, it ? " but in " : "",
                     it ? moe__shown(moe__base_name(it->file->path)).text : "");
  }
  json_decref(seen);
  return st;
}

static void clear(moe_checkpoint *c)
{
  for (int64_t i = 0; i < c->n_files; i++) unmap(&c->files[i]);
  free(c->files);
  free(c->items);
  free(c->pairs);
  json_decref(c->metadata);
  *c = (moe_checkpoint){ .path = c->path };
}

static moe_status open_index(const char *fn, moe_checkpoint *c, struct stat *is)
{
  struct file index;
  json_t *map = NULL;
  moe_status st = map_file(fn, &index, strdup(c->path));
  if (!st) st = in_file(fn, moe__index_parse(&map, &c->metadata, index.map, index.size), c->path);
  *is = index.is;
  unmap(&index);
  if (!st) st = open_shards(fn, c, map);
  json_decref(map);
  return st;
}

static int same(const struct stat *a, const struct stat *b)
{
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
         a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* A save may put a new index in place, and remove the old shards, while we open them: then it is opened again. */
static moe_status open_sharded(const char *fn, moe_checkpoint *c)
{
  for (int tries = 0;; tries++) {
    struct stat was, is;
    moe_status st = open_index(fn, c, &was);
    if (!st || !was.st_ino || tries == 10 || stat(c->path, &is) || same(&is, &was)) return st;
    clear(c);
  }
}

static moe_status open_single(const char *fn, moe_checkpoint *c)
{
  c->files = calloc(1, sizeof *c->files);
  if (!c->files) return no_memory(fn);
  c->n_files = 1;
  MOE__TRY(open_file(fn, c->files, strdup(c->path)));
  return merge(fn, c);
}

/* ---- open -------------------------------------------------------------------------------------------------------- */
static char *joined(const char *folder, const char *name)
{
  char *path = malloc(strlen(folder) + strlen(name) + 2);
  if (path) sprintf(path, "%s/%s", folder, name);
  return path;
}

/* What there is to open, for the caller to free: the path itself, or what the folder holds. */
static moe_status resolve(const char *fn, char **out, const char *path)
{
  struct stat is;
  *out = NULL;
  if (stat(path, &is)) return moe__fail_io(fn, "cannot open", path);
  *out = S_ISDIR(is.st_mode) ? joined(path, "model.safetensors.index.json") : strdup(path);
  if (!*out) return no_memory(fn);
  if (!S_ISDIR(is.st_mode) || !stat(*out, &is)) return MOE_OK;
  const moe_status st = errno == ENOENT ? MOE_OK : moe__fail_io(fn, "cannot open", *out);
  free(*out);
  *out = st ? NULL : joined(path, "model.safetensors");
  return st || *out ? st : no_memory(fn);
}

static moe_status open_as(const char *fn, moe_checkpoint **out, const char *path,
                          moe_status (*how)(const char *fn, moe_checkpoint *c))
{
  if (!out) return moe__fail(MOE_ERR_INVALID, "%s: out is NULL", fn);
  *out = NULL;
  if (!path) return moe__fail(MOE_ERR_INVALID, "%s: path is NULL", fn);
  moe_checkpoint *c = calloc(1, sizeof *c);
  if (!c) return no_memory(fn);
  moe_status st = resolve(fn, &c->path, path);
  if (!st && !how) {
    const size_t length = strlen(c->path);
    how = length > 5 && !strcmp(c->path + length - 5, ".json") ? open_sharded : open_single;
  }
  if (!st) st = how(fn, c);
  if (st) moe_checkpoint_close(c);
  else *out = c;
  return st;
}

moe_status moe_checkpoint_open(moe_checkpoint **out, const char *path)
{
  return open_as("moe_checkpoint_open", out, path, NULL);
}

static moe_status open_raw(const char *fn, moe_checkpoint *c)
{
  c->files = calloc(1, sizeof *c->files);
  if (!c->files) return no_memory(fn);
  c->n_files = 1;
  MOE__TRY(map_file(fn, c->files, strdup(c->path)));
  MOE__TRY(in_file(fn, moe__raw_parse(&c->files->table, c->files->map, c->files->size), c->path));
  return merge(fn, c);
}

moe_status moe_raw_open(moe_checkpoint **out, const char *path)
{
  return open_as("moe_raw_open", out, path, open_raw);
}

void moe_checkpoint_close(moe_checkpoint *c)
{
  if (!c) return;
  clear(c);
  free(c->path);
  free(c);
}

/* ---- what is there ----------------------------------------------------------------------------------------------- */
int64_t moe_checkpoint_count(const moe_checkpoint *c)
{
  return c ? c->n : 0;
}

static moe_status give(moe_checkpoint_entry *out, const struct item *it, const char *fn)
{
  moe_checkpoint_entry own = moe_checkpoint_entry_init();
  const struct moe__entry *e = it->entry;
  own.name = e->name;
  own.file = it->file->path;
  own.dtype_name = e->dtype_name;
  own.data = e->data;
  own.bytes = e->bytes;
  own.dtype = e->dtype;
  own.rank = e->rank;
  memcpy(own.shape, e->shape, sizeof own.shape);
  own.hashed = e->hashed;
  own.hash = e->hash;
  return moe__struct_out(out, &own, sizeof own, fn, "out");
}

moe_status moe_checkpoint_at(moe_checkpoint_entry *out, const moe_checkpoint *c, int64_t index)
{
  static const char fn[] = "moe_checkpoint_at";
  if (!c) return moe__fail(MOE_ERR_INVALID, "%s: checkpoint is NULL", fn);
  if (index < 0 || index >= c->n)
    return moe__fail(MOE_ERR_INVALID, "%s: index %lld, there are %lld tensors", fn, (long long)index, (long long)c->n);
  return give(out, &c->items[index], fn);
}

moe_status moe_checkpoint_find(moe_checkpoint_entry *out, const moe_checkpoint *c, const char *name)
{
  static const char fn[] = "moe_checkpoint_find";
  if (!c || !name) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, c ? "name" : "checkpoint");
  const struct item *it = find(c, name);
  if (!it)
    return moe__fail(MOE_ERR_NOT_FOUND, "%s: no tensor \"%s\" in %s", fn, moe__shown(name).text,
                     moe__shown(c->path).text);
  return give(out, it, fn);
}

static int has_key(const void *key, const void *pair)
{
  return strcmp(key, ((const struct pair *)pair)->key);
}

const char *moe_checkpoint_metadata(const moe_checkpoint *c, const char *key)
{
  const struct pair *p = NULL;
  if (c && key && c->n_pairs) p = bsearch(key, c->pairs, (size_t)c->n_pairs, sizeof *p, has_key);
  return p ? p->value : NULL;
}

const char *moe_checkpoint_metadata_key(const moe_checkpoint *c, int64_t index)
{
  return c && index >= 0 && index < c->n_pairs ? c->pairs[index].key : NULL;
}

static moe_status verify(const char *fn, const struct item *it)
{
  const struct moe__entry *e = it->entry;
  const uint64_t is = e->hashed ? moe__hash(e->data, e->bytes) : e->hash;
  if (is == e->hash) return MOE_OK;
  return moe__fail(MOE_ERR_FORMAT, "%s: %s: tensor \"%s\" has the hash %016llx, written was %016llx", fn,
                   moe__shown(it->file->path).text, moe__shown(e->name).text, (unsigned long long)is,
                   (unsigned long long)e->hash);
}

moe_status moe_checkpoint_verify(const moe_checkpoint *c, int64_t *unhashed)
{
  static const char fn[] = "moe_checkpoint_verify";
  int64_t without = 0;
  if (unhashed) *unhashed = 0;
  if (!c) return moe__fail(MOE_ERR_INVALID, "%s: checkpoint is NULL", fn);
  for (int64_t i = 0; i < c->n_files; i++)
    if (c->files[i].table.stray)
      return moe__fail(MOE_ERR_FORMAT, "%s: %s: tensor \"%s\" has a hash and is not there", fn,
                       moe__shown(c->files[i].path).text, moe__shown(c->files[i].table.stray).text);
  for (int64_t i = 0; i < c->n; i++) {
    MOE__TRY(verify(fn, &c->items[i]));
    without += !c->items[i].entry->hashed;
  }
  if (unhashed) *unhashed = without;
  return MOE_OK;
}

/* ---- load -------------------------------------------------------------------------------------------------------- */
/* "a, b and 3 more": as much as there is room for, so that each sort of fault has its share of the sentence. */
struct list {
  int64_t n, shown;
  size_t used;
  char text[280];
};

static void list_add(struct list *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void list_add(struct list *l, const char *format, ...)
{
  char text[sizeof l->text - 4];
  va_list args;
  l->n++;
  if (l->shown + 1 < l->n) return; /* one did not fit */
  va_start(args, format);
  const int length = vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (length < 0 || (l->shown && l->used + (size_t)length + 2 >= sizeof l->text)) return;
  l->used += (size_t)snprintf(l->text + l->used, sizeof l->text - l->used, "%s%s", l->shown ? ", " : "", text);
  l->shown++;
}

static const char *list_end(struct list *l, char *buffer, size_t room, const char *title)
{
  char more[40] = "";
  if (l->shown < l->n)
    snprintf(more, sizeof more, "%s%lld more", l->shown ? " and " : "", (long long)(l->n - l->shown));
  snprintf(buffer, room, l->n ? "; %s: %s%s" : "", title, l->text, more);
  return buffer;
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

static int is_wanted(const struct moe__part *p, const struct moe__entry *e, int64_t flags)
{
  return e->rank == p->rank && !memcmp(e->shape, p->shape, (size_t)p->rank * sizeof *p->shape) &&
         (flags & MOE_CHECKPOINT_CONVERT ? moe__converts(p->to.dtype, e->dtype) : p->to.dtype == e->dtype);
}

static int same_wish(const struct moe__part *a, const struct moe__part *b)
{
  return a->to.dtype == b->to.dtype && a->rank == b->rank &&
         !memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape);
}

moe_status moe__parts_check(const char *fn, const moe_checkpoint *c, const struct moe__part *parts, int64_t n,
                            const char *prefix, int64_t flags)
{
  const int64_t known = MOE_CHECKPOINT_CONVERT | MOE_CHECKPOINT_PARTIAL | MOE_CHECKPOINT_VERIFY;
  struct list missing = { 0 }, different = { 0 }, unexpected = { 0 };
  moe_status st = MOE_OK;
  if (flags & ~known) return moe__fail(MOE_ERR_INVALID, "%s: flags %lld are none", fn, (long long)flags);
  char *named = calloc((size_t)c->n + 1, 1);
  if (!named) return no_memory(fn);
  for (int64_t i = 0; i < n; i++) {
    const struct moe__part *p = &parts[i];
    const struct item *it = find(c, p->name);
    if (i > 0 && !strcmp(parts[i - 1].name, p->name) && same_wish(&parts[i - 1], p)) continue; /* was just looked at */
    if (it) named[it - c->items] = 1;
    if (!it) list_add(&missing, "%s", moe__shown(p->name).text);
    else if (!is_wanted(p, it->entry, flags))
      list_add(&different, "%s (wanted %s %s, got %s %s)", moe__shown(p->name).text, moe_dtype_name(p->to.dtype),
               moe__shape_text(p->rank, p->shape).text, moe__shown(it->entry->dtype_name).text,
               moe__shape_text(it->entry->rank, it->entry->shape).text);
  }
  for (int64_t i = 0; i < c->n && !(flags & MOE_CHECKPOINT_PARTIAL); i++)
    if (!named[i] && !strncmp(c->items[i].entry->name, prefix, strlen(prefix)))
      list_add(&unexpected, "%s", moe__shown(c->items[i].entry->name).text);
  if (missing.n || different.n || unexpected.n) {
    char text[3][sizeof missing.text + 64];
    st = moe__fail(MOE_ERR_FORMAT, "%s: %s%s%s%s", fn, moe__shown(c->path).text,
                   list_end(&missing, text[0], sizeof text[0], "missing"),
                   list_end(&different, text[1], sizeof text[1], "different"),
                   list_end(&unexpected, text[2], sizeof text[2], "unexpected"));
  }
  for (int64_t i = 0; i < c->n && !st && flags & MOE_CHECKPOINT_VERIFY; i++)
    if (named[i]) st = verify(fn, &c->items[i]);
  free(named);
  return st;
}

moe_status moe__parts_copy(const char *fn, const moe_checkpoint *c, moe_queue *q, const struct moe__part *parts,
                           int64_t n)
{
  moe_status st = MOE_OK;
  for (int64_t i = 0; i < n && !st; i++) {
    const struct moe__part *p = &parts[i];
    if (!p->to.handle || !moe_tensor_count(&p->to)) continue;
    const struct moe__entry *e = find(c, p->name)->entry;
    st = moe__upload(q, &p->to, e->data + p->at * (int64_t)moe_dtype_size(e->dtype), e->dtype, p->stride);
  }
  if (!st) st = q->ctx->be->wait(q->be);
  return st ? moe__fail_in(st, fn) : MOE_OK;
}

moe_status moe_checkpoint_load(const moe_checkpoint *c, moe_queue *q, const moe_checkpoint_item *items, int64_t n,
                               int64_t flags)
{
  static const char fn[] = "moe_checkpoint_load";
  if (!c || !q) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", fn, c ? "queue" : "checkpoint");
  if (n < 0 || (n && !items))
    return moe__fail(MOE_ERR_INVALID, "%s: %lld items%s", fn, (long long)n, items ? "" : ", none given");
  for (int64_t i = 0; i < n; i++) {
    if (!items[i].name) return moe__fail(MOE_ERR_INVALID, "%s: items[%lld].name is NULL", fn, (long long)i);
    MOE__TRY(moe__want_array(fn, moe__shown(items[i].name).text, &items[i].tensor, 1));
  }
  struct moe__part *parts = calloc((size_t)n + 1, sizeof *parts);
  if (!parts) return no_memory(fn);
  for (int64_t i = 0; i < n; i++) parts[i] = moe__part_whole(items[i].name, &items[i].tensor);
  moe_status st = moe__parts_check(fn, c, parts, n, "", flags);
  if (!st) st = moe__parts_copy(fn, c, q, parts, n);
  free(parts);
  return st;
}
