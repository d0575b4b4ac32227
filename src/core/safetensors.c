/* safetensors.c - see safetensors.h.  Checks are those of the format's reference implementation, and its bound on the
   header; where it is laxer (a byte other than a space behind the header, "\u0000" in text, a duplicate key inside an
   entry) the text of the format decides. */
#include "core/safetensors.h"

#include "core/status.h"
#include "core/tensor.h"

#include <stdio.h>
#include <stdlib.h>

static const struct {
  const char *name;
  int dtype, bits;
} dtypes[] = {
  { "F64", MOE_F64, 64 },
  { "F32", MOE_F32, 32 },
  { "BF16", MOE_BF16, 16 },
  { "F16", MOE_F16, 16 },
  { "F8_E4M3", MOE_F8E4M3, 8 },
  { "F8_E5M2", MOE_F8E5M2, 8 },
  { "I64", MOE_I64, 64 },
  { "I32", MOE_I32, 32 },
  { "U8", MOE_U8, 8 },
  { "BOOL", MOE_BOOL, 8 },
  /* These have no tensors here, but their sizes can be checked. */
  { "U64", MOE_NONE, 64 },
  { "U32", MOE_NONE, 32 },
  { "I16", MOE_NONE, 16 },
  { "U16", MOE_NONE, 16 },
  { "I8", MOE_NONE, 8 },
  { "C64", MOE_NONE, 64 },
  { "F8_E8M0", MOE_NONE, 8 },
  { "F6_E2M3", MOE_NONE, 6 },
  { "F6_E3M2", MOE_NONE, 6 },
  { "F4", MOE_NONE, 4 },
};
#define N_DTYPES (sizeof dtypes / sizeof dtypes[0])

const char *moe__safetensors_dtype(int64_t dtype)
{
  for (size_t i = 0; i < N_DTYPES; i++)
    if (dtype && dtypes[i].dtype == dtype) return dtypes[i].name;
  return NULL;
}

struct moe__shape_text moe__shape_text(int64_t rank, const int64_t *shape)
{
  struct moe__shape_text out;
  size_t used = (size_t)snprintf(out.text, sizeof out.text, "[");
  for (int64_t d = 0; d < rank && d < MOE_RANK_MAX; d++)
    used += (size_t)snprintf(out.text + used, sizeof out.text - used, "%s%lld", d ? "," : "", (long long)shape[d]);
  snprintf(out.text + used, sizeof out.text - used, rank > MOE_RANK_MAX ? ",...]" : "]");
  return out;
}

#define BAD(...) moe__fail(MOE_ERR_FORMAT, __VA_ARGS__)
#define NO_MEMORY() moe__fail(MOE_ERR_NO_MEMORY, "no host memory for the header")
#define N_(x) ((unsigned long long)(x))

static uint64_t little(const unsigned char *p)
{
  uint64_t v = 0;
  for (int i = 7; i >= 0; i--) v = v << 8 | p[i];
  return v;
}

/* The object that the text is.  Where memory runs out inside a string jansson (to 2.14, its issue 362) may call the text
   wrong, cut the string short, or go past its buffer. */
static moe_status parse_object(json_t **out, const void *text, size_t length)
{
  json_error_t error;
  *out = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
  if (!*out && (!error.text[0] || json_error_code(&error) == json_error_out_of_memory)) return NO_MEMORY();
  if (!*out) return BAD("JSON at byte %d: %s", error.position, moe__shown(error.text).text);
  if (json_is_object(*out)) return MOE_OK;
  json_decref(*out);
  *out = NULL;
  return BAD("JSON: an object is wanted");
}

/* ---- entries ----------------------------------------------------------------------------------------------------- */
static int by_name(const void *a, const void *b)
{
  return strcmp(((const struct moe__entry *)a)->name, ((const struct moe__entry *)b)->name);
}

static int by_place(const void *a, const void *b)
{
  const struct moe__entry *x = a, *y = b;
  if (x->data != y->data) return x->data < y->data ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty ones first */
}

static char *keep(char **text, const char *s)
{
  const size_t room = strlen(s) + 1;
  char *at = memcpy(*text, s, room);
  *text += room;
  return at;
}

/* One tensor of the header; its place as the file gives it, in [data, data + size). */
static moe_status parse_entry(struct moe__entry *e, const char *name, const json_t *value, const unsigned char *data,
                              uint64_t size, char **text)
{
#define BAD_ENTRY(format, ...) BAD("tensor \"%s\": " format, moe__shown(name).text, __VA_ARGS__)
  const json_t *dtype = json_object_get(value, "dtype"), *shape = json_object_get(value, "shape"),
               *offsets = json_object_get(value, "data_offsets"), *extent;
  int64_t place[2], count = 1, bits = 0;
  size_t i;
  if (!json_is_object(value)) return BAD_ENTRY("%s", "an object is wanted");
  if (!json_is_string(dtype)) return BAD_ENTRY("%s", "dtype, a string, is wanted");
  if (!json_is_array(shape)) return BAD_ENTRY("%s", "shape, an array, is wanted");
  if (!json_is_array(offsets) || json_array_size(offsets) != 2)
    return BAD_ENTRY("%s", "data_offsets, an array of two, is wanted");
  for (i = 0; i < 2; i++) {
    const json_t *offset = json_array_get(offsets, i);
    place[i] = json_integer_value(offset);
    if (!json_is_integer(offset) || place[i] < 0) return BAD_ENTRY("data_offsets[%d] is no integer from 0 up", (int)i);
  }
  if (place[0] > place[1]) return BAD_ENTRY("begins at byte %llu, behind its end at %llu", N_(place[0]), N_(place[1]));
  if ((uint64_t)place[1] > size) return BAD_ENTRY("ends at byte %llu of %llu of data", N_(place[1]), N_(size));

  e->rank = (int64_t)json_array_size(shape);
  json_array_foreach(shape, i, extent)
  {
    const int64_t n = json_integer_value(extent);
    if (!json_is_integer(extent) || n < 0) return BAD_ENTRY("shape[%llu] is no integer from 0 up", N_(i));
    if (moe__mul(&count, count, n))
      return BAD_ENTRY("more than 2^63-1 elements, with shape[%llu] = %llu", N_(i), N_(n));
    if (i < MOE_RANK_MAX) e->shape[i] = n;
  }
  for (i = 0; i < N_DTYPES && strcmp(dtypes[i].name, json_string_value(dtype)) != 0; i++) {
  }
  e->dtype = i < N_DTYPES ? dtypes[i].dtype : MOE_NONE;
  e->dtype_name = i < N_DTYPES ? dtypes[i].name : keep(text, json_string_value(dtype));
  e->bytes = (uint64_t)(place[1] - place[0]);
  if (i < N_DTYPES && (moe__mul(&bits, count, dtypes[i].bits) || bits % 8 || (uint64_t)bits / 8 != e->bytes))
    return BAD_ENTRY("%llu elements of %s do not take %llu bytes", N_(count), e->dtype_name, N_(e->bytes));
  e->data = data + place[0];
  e->name = keep(text, name);
  return MOE_OK;
}

/* Each begins where the one before ends, the last ends where the data does. */
static moe_status check_places(struct moe__table *t, const unsigned char *data, uint64_t size)
{
  const unsigned char *at = data;
  qsort(t->entries, (size_t)t->n, sizeof *t->entries, by_place);
  for (int64_t i = 0; i < t->n; i++) {
    const struct moe__entry *e = &t->entries[i];
    if (e->data != at)
      return BAD("tensor \"%s\" begins at byte %llu of the data, %s %llu", moe__shown(e->name).text, N_(e->data - data),
                 e->data < at ? "inside one that ends at" : "behind a hole from", N_(at - data));
    at += e->bytes;
  }
  if (at != data + size)
    return BAD("the tensors take %llu bytes, the file has %llu behind its header", N_(at - data), N_(size));
  return MOE_OK;
}

/* ---- metadata ---------------------------------------------------------------------------------------------------- */
/* Takes the hashes out of the metadata and puts them to their tensors. */
static moe_status take_hashes(struct moe__table *t)
{
  const size_t prefix = strlen(MOE__KEY_HASH);
  const char *key;
  json_t *value;
  void *next;
  json_object_foreach_safe(t->metadata, next, key, value)
  {
    const char *text = json_string_value(value);
    if (strncmp(key, MOE__KEY_HASH, prefix) != 0) continue;
    const struct moe__entry wanted = { .name = key + prefix };
    struct moe__entry *e = t->n ? bsearch(&wanted, t->entries, (size_t)t->n, sizeof wanted, by_name) : NULL;
    if (strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16)
      return BAD("metadata \"%s\" is no 16 hexadecimal digits", moe__shown(key).text);
    if (e) {
      e->hash = strtoull(text, NULL, 16);
      e->hashed = 1;
    } else if (!t->stray && !(t->stray = strdup(wanted.name))) return NO_MEMORY();
    json_object_del(t->metadata, key);
  }
  return MOE_OK;
}

static moe_status check_metadata(const json_t *metadata)
{
  const char *key, *format;
  json_t *value;
  if (metadata && !json_is_object(metadata)) return BAD("__metadata__: an object is wanted");
  json_object_foreach((json_t *)(uintptr_t)metadata, key, value) if (!json_is_string(value)) return BAD(
      "metadata \"%s\" is no string", moe__shown(key).text);
  format = json_string_value(json_object_get(metadata, MOE__KEY_FORMAT));
  if (format && strcmp(format, MOE__FORMAT) != 0)
    return BAD("metadata " MOE__KEY_FORMAT " is \"%s\", this library (%s) knows \"" MOE__FORMAT "\"",
               moe__shown(format).text, moe_version_string());
  return MOE_OK;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */
void moe__table_free(struct moe__table *t)
{
  free(t->entries);
  free(t->text);
  free(t->stray);
  json_decref(t->metadata);
  memset(t, 0, sizeof *t);
}

static moe_status fill(struct moe__table *t, json_t *header, size_t length, const unsigned char *data, uint64_t size)
{
  json_t *metadata = json_object_get(header, "__metadata__"), *value;
  const char *name;
  char *text;
  MOE__TRY(check_metadata(metadata));
  t->metadata = json_incref(metadata);
  t->entries = calloc(json_object_size(header) + 1, sizeof *t->entries);
  t->text = text = malloc(length); /* in JSON a name takes more room than with a NUL behind it */
  if (!t->entries || !text) return NO_MEMORY();
  json_object_foreach(header, name, value)
  {
    if (value == metadata) continue;
    MOE__TRY(parse_entry(&t->entries[t->n], name, value, data, size, &text));
    t->n++;
  }
  MOE__TRY(check_places(t, data, size));
  qsort(t->entries, (size_t)t->n, sizeof *t->entries, by_name);
  return metadata ? take_hashes(t) : MOE_OK;
}

moe_status moe__safetensors_parse(struct moe__table *out, const void *data, uint64_t size)
{
  const unsigned char *bytes = data;
  json_t *header;
  moe_status st;
  memset(out, 0, sizeof *out);
  if (size < 8) return BAD("%llu bytes are no safetensors file", N_(size));
  const uint64_t length = little(bytes);
  if (length > MOE__HEADER_MAX) return BAD("a header of %llu bytes, at most %u are legal", N_(length), MOE__HEADER_MAX);
  if (length > size - 8) return BAD("a header of %llu bytes in a file of %llu", N_(length), N_(size));
  uint64_t end = length;
  while (end && bytes[8 + end - 1] == ' ') end--;
  if (!end || bytes[8] != '{' || bytes[8 + end - 1] != '}') return BAD("the header is not { ... } and spaces");
  MOE__TRY(parse_object(&header, bytes + 8, (size_t)end));
  st = fill(out, header, (size_t)end, bytes + 8 + length, size - 8 - length);
  json_decref(header);
  if (st) moe__table_free(out);
  return st;
}

static moe_status fill_raw(struct moe__table *t, const unsigned char *data, uint64_t size)
{
  const uint64_t count = size < 8 ? 0 : little(data);
  uint64_t at = 8;
  char *text;
  if (size < 8) return BAD("%llu bytes, the count alone takes 8", N_(size));
  if (count > (size - 8) / 16) return BAD("%llu matrices in %llu bytes", N_(count), N_(size));
  t->entries = calloc((size_t)count + 1, sizeof *t->entries);
  t->text = text = malloc((size_t)count * 21 + 1);
  if (!t->entries || !text) return NO_MEMORY();
  for (; t->n < (int64_t)count; t->n++) {
    struct moe__entry *e = &t->entries[t->n];
    int64_t elements, bytes;
    if (size - at < 16) return BAD("matrix %lld of %llu: the file ends before its sizes", (long long)t->n, N_(count));
    for (int d = 0; d < 2; d++) e->shape[d] = (int64_t)little(data + at + 8 * d);
    at += 16;
    if (moe__mul(&elements, e->shape[0], e->shape[1]) || moe__mul(&bytes, elements, 4) || (uint64_t)bytes > size - at)
      return BAD("matrix %lld of %llu: %lld rows, %lld columns, %llu bytes are left", (long long)t->n, N_(count),
                 (long long)e->shape[0], (long long)e->shape[1], N_(size - at));
    e->name = text;
    text += sprintf(text, "%lld", (long long)t->n) + 1;
    e->dtype = MOE_F32;
    e->dtype_name = moe__safetensors_dtype(MOE_F32);
    e->rank = 2;
    e->data = data + at;
    e->bytes = (uint64_t)bytes;
    at += e->bytes;
  }
  if (at != size) return BAD("%llu bytes behind the last matrix", N_(size - at));
  qsort(t->entries, (size_t)t->n, sizeof *t->entries, by_name);
  return MOE_OK;
}

moe_status moe__raw_parse(struct moe__table *out, const void *data, uint64_t size)
{
  memset(out, 0, sizeof *out);
  moe_status st = fill_raw(out, data, size);
  if (st) moe__table_free(out);
  return st;
}

/* ---- index ------------------------------------------------------------------------------------------------------- */
/* A name in the index's own folder, and in no other. */
static int is_plain(const char *name)
{
  return *name && !strchr(name, '/') && !strchr(name, '\\') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static moe_status check_index(const json_t *root)
{
  json_t *map = json_object_get(root, "weight_map"), *metadata = json_object_get(root, "metadata"), *value;
  const char *key;
  void *next;
  if (!json_is_object(map)) return BAD("weight_map, an object, is wanted");
  json_object_foreach(map, key, value) if (!json_is_string(value) || !is_plain(json_string_value(value))) return BAD(
      "weight_map: tensor \"%s\" is in no file beside the index", moe__shown(key).text);
  if (metadata && !json_is_object(metadata)) return BAD("metadata, an object, is wanted");
  json_object_foreach_safe(metadata, next, key, value) /* total_size is a number, and other writers have objects */
  {
    if (json_is_string(value)) continue;
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    const int failed = !text || json_object_set_new(metadata, key, json_string(text));
    free(text);
    if (failed) return NO_MEMORY();
  }
  return check_metadata(metadata);
}

moe_status moe__index_parse(json_t **map, json_t **metadata, const void *data, uint64_t size)
{
  json_t *root;
  moe_status st;
  *map = *metadata = NULL;
  if (size > MOE__HEADER_MAX) return BAD("an index of %llu bytes, at most %u are legal", N_(size), MOE__HEADER_MAX);
  MOE__TRY(parse_object(&root, data, (size_t)size));
  st = check_index(root);
  if (!st) {
    *map = json_incref(json_object_get(root, "weight_map"));
    *metadata = json_incref(json_object_get(root, "metadata"));
  }
  json_decref(root);
  return st;
}
