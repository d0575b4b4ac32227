/* t_checkpoint.c - checkpoints: files that are wrong, each with its own error; everything that can be written comes back
   bit for bit; loads that are refused before the first byte.  On the fake device, whose memory is the host's. */
#include "files.h"

#include "core/backend.h"
#include "core/checkpoint.h"
#include "core/convert.h"
#include "core/safetensors.h"
#include "core/tensor.h"
#include "core/transfer.h"
#include "fake.h"
#include "../ref/ref.h"

#include <math.h>

static moe_context *ctx;
static moe_queue *q;

static moe_tensor on_device(int64_t dtype, int64_t rank, const int64_t *shape)
{
  moe_tensor t;
  moe_span span;
  int64_t bytes = (int64_t)moe_dtype_size(dtype);
  for (int64_t d = 0; d < rank; d++) bytes *= shape[d];
  OK(moe_span_alloc(&span, ctx, (uint64_t)bytes));
  OK(moe_tensor_packed(&t, span, dtype, rank, shape));
  return t;
}
#define ON_DEVICE(dtype, ...)                                                                                          \
  on_device(dtype, (int64_t)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),                              \
            (const int64_t[]){ __VA_ARGS__ })

static void release(moe_tensor *t)
{
  moe_span span = { t->handle, 0, 0 };
  moe_span_free(ctx, &span);
}

/* Bytes that differ from element to element and from tensor to tensor. */
static void scramble(void *data, size_t bytes, uint32_t seed)
{
  unsigned char *p = data;
  for (size_t i = 0; i < bytes; i++) {
    seed = seed * 1664525u + 1013904223u;
    p[i] = (unsigned char)(seed >> 24);
  }
}

/* ---- files that are wrong ---------------------------------------------------------------------------------------- */
#define E_(dtype, shape, begin, end)                                                                                   \
  "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"
#define A_(dtype, shape, begin, end) "{\"a\":" E_(dtype, shape, begin, end) "}"
static const struct bad_file {
  const char *header;
  int64_t length; /* -1: that of the header */
  size_t data;
  const char *text;
} bad_files[] = {
  /* The length of the header. */
  { "", 0, 0, "not { ... } and spaces" },
  { "{}", 3, 0, "a header of 3 bytes in a file of 10" },
  { "{}", 100000000, 0, "a header of 100000000 bytes in a file of 10" },
  { "{}", 100000001, 0, "at most 100000000 are legal" },
  { "{}", INT64_MAX, 0, "a header of 9223372036854775807 bytes, at most" },
  { "{}", 1, 0, "not { ... } and spaces" },
  /* What is around the JSON. */
  { " {}", -1, 0, "not { ... } and spaces" },
  { "{}\n", -1, 0, "not { ... } and spaces" },
  { "{}  x", -1, 0, "not { ... } and spaces" },
  { "    ", -1, 0, "not { ... } and spaces" },
  { "[]", -1, 0, "not { ... } and spaces" },
  { "{}{}", -1, 0, "JSON at byte" },
  { "{\"a\"}", -1, 0, "JSON at byte" },
  { "{\"a\":}", -1, 0, "JSON at byte" },
  { "{\"a\":{}", -1, 0, "JSON at byte" },
  { "{a:{}}", -1, 0, "JSON at byte" },
  { "{\"\xff\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "unable to decode byte" },
  { "{\"\xed\xa0\x80\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "unable to decode byte" },
  { "{\"\\ud800\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "JSON at byte" },
  { "{\"a\\u0000b\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "NUL" },
  { "{\"a\nb\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "unexpected newline" },
  /* Keys that are there twice, at each level. */
  { "{\"a\":" E_("U8", "[1]", 0, 1) ",\"a\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "duplicate" },
  { "{\"a\":" E_("U8", "[1]", 0, 1) ",\"\\u0061\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "duplicate" },
  { "{\"__metadata__\":{},\"__metadata__\":{}}", -1, 0, "duplicate" },
  { "{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", -1, 0, "duplicate" },
  { "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", -1, 1, "duplicate" },
  /* Entries. */
  { "{\"a\":1}", -1, 0, "tensor \"a\": an object is wanted" },
  { "{\"a\":null}", -1, 0, "tensor \"a\": an object is wanted" },
  { "{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", -1, 1, "tensor \"a\": dtype, a string" },
  { "{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", -1, 1, "tensor \"a\": dtype, a string" },
  { "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", -1, 1, "tensor \"a\": shape, an array" },
  { A_("U8", "1", 0, 1), -1, 1, "tensor \"a\": shape, an array" },
  { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", -1, 1, "tensor \"a\": data_offsets, an array of two" },
  { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", -1, 1, "data_offsets, an array of two" },
  { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", -1, 1, "data_offsets, an array of two" },
  { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":{\"0\":0}}}", -1, 1, "data_offsets, an array of two" },
  /* Numbers. */
  { A_("U8", "[1]", 0, 1.0), -1, 1, "data_offsets[1] is no integer" },
  { A_("U8", "[1]", 0, 1e0), -1, 1, "data_offsets[1] is no integer" },
  { A_("U8", "[1]", -1, 0), -1, 1, "data_offsets[0] is no integer from 0 up" },
  { A_("U8", "[1]", "0", 1), -1, 1, "data_offsets[0] is no integer" },
  { A_("U8", "[1]", 0, 01), -1, 1, "JSON at byte" },
  { A_("U8", "[1]", 0, 0x1), -1, 1, "JSON at byte" },
  { A_("U8", "[1]", 0, 9223372036854775808), -1, 1, "too big" },
  { A_("U8", "[1]", 0, 1e999), -1, 1, "overflow" },
  { A_("U8", "[-1]", 0, 1), -1, 1, "shape[0] is no integer from 0 up" },
  { A_("U8", "[1, 1.5]", 0, 1), -1, 1, "shape[1] is no integer" },
  { A_("U8", "[1, null]", 0, 1), -1, 1, "shape[1] is no integer" },
  { A_("U8", "[true]", 0, 1), -1, 1, "shape[0] is no integer" },
  { A_("U8", "[[1]]", 0, 1), -1, 1, "shape[0] is no integer" },
  { A_("U8", "[NaN]", 0, 1), -1, 1, "JSON at byte" },
  /* Sizes. */
  { A_("U8", "[4294967296,4294967296]", 0, 0), -1, 0, "more than 2^63-1 elements, with shape[1] = 4294967296" },
  { A_("U8", "[4294967296,4294967296,0]", 0, 0), -1, 0, "more than 2^63-1 elements" },
  { A_("F64", "[2305843009213693952]", 0, 0), -1, 0, "2305843009213693952 elements of F64 do not take 0 bytes" },
  { A_("F32", "[2]", 0, 4), -1, 4, "2 elements of F32 do not take 4 bytes" },
  { A_("F32", "[]", 0, 8), -1, 8, "1 elements of F32 do not take 8 bytes" },
  { A_("F32", "[0,3]", 0, 4), -1, 4, "0 elements of F32 do not take 4 bytes" },
  { A_("BF16", "[3]", 0, 3), -1, 3, "3 elements of BF16 do not take 3 bytes" },
  { A_("I16", "[3]", 0, 3), -1, 3, "3 elements of I16 do not take 3 bytes" },
  { A_("F4", "[3]", 0, 2), -1, 2, "3 elements of F4 do not take 2 bytes" },
  { A_("F4", "[3]", 0, 1), -1, 1, "3 elements of F4 do not take 1 bytes" },
  /* Places. */
  { A_("U8", "[1]", 1, 0), -1, 1, "begins at byte 1, behind its end at 0" },
  { A_("U8", "[2]", 0, 2), -1, 1, "ends at byte 2 of 1 of data" },
  { A_("U8", "[1]", 9223372036854775806, 9223372036854775807), -1, 1, "of 1 of data" },
  { A_("U8", "[1]", 1, 2), -1, 2, "tensor \"a\" begins at byte 1 of the data, behind a hole from 0" },
  { "{\"a\":" E_("U8", "[1]", 0, 1) ",\"b\":" E_("U8", "[1]", 2, 3) "}", -1, 3,
    "tensor \"b\" begins at byte 2 of the data, behind a hole from 1" },
  { "{\"b\":" E_("U8", "[2]", 1, 3) ",\"a\":" E_("U8", "[2]", 0, 2) "}", -1, 3,
    "tensor \"b\" begins at byte 1 of the data, inside one that ends at 2" },
  { "{\"a\":" E_("U8", "[1]", 0, 1) ",\"b\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "inside one that ends at 1" },
  { "{\"a\":" E_("U8", "[3]", 0, 3) ",\"b\":" E_("U8", "[0]", 1, 1) "}", -1, 3, "inside one that ends at 3" },
  { "{\"a\":" E_("X9", "[3]", 0, 3) ",\"b\":" E_("X9", "[1]", 2, 4) "}", -1, 4, "inside one that ends at 3" },
  { A_("U8", "[1]", 0, 1), -1, 2, "the tensors take 1 bytes, the file has 2 behind its header" },
  { "{}", -1, 1, "the tensors take 0 bytes, the file has 1" },
  /* Metadata. */
  { "{\"__metadata__\":[]}", -1, 0, "__metadata__: an object is wanted" },
  { "{\"__metadata__\":null}", -1, 0, "__metadata__: an object is wanted" },
  { "{\"__metadata__\":{\"k\":1}}", -1, 0, "metadata \"k\" is no string" },
  { "{\"__metadata__\":{\"k\":{}}}", -1, 0, "metadata \"k\" is no string" },
  { "{\"__metadata__\":{\"k\":\"a\\u0000b\"}}", -1, 0, "\\u0000" },
  { "{\"__metadata__\":{\"moe.format\":\"2\"}}", -1, 0, "moe.format is \"2\", this library (" },
  { "{\"__metadata__\":{\"moe.xxh3:a\":\"123\"},\"a\":" E_("U8", "[1]", 0, 1) "}", -1, 1, "16 hexadecimal digits" },
  { "{\"__metadata__\":{\"moe.xxh3:a\":\"0123456789ABCDEF\"},\"a\":" E_("U8", "[1]", 0, 1) "}", -1, 1,
    "16 hexadecimal digits" },
};
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static void each_wrong_file_has_its_own_error(void **state)
{
  (void)state;
  for (size_t i = 0; i < COUNT(bad_files); i++) {
    const struct bad_file *b = &bad_files[i];
    moe_checkpoint *c = (moe_checkpoint *)&c;
    size_t size;
    unsigned char *bytes = files_tensors(b->header, b->length, b->data, &size);
    files_write(files_path("bad.safetensors"), bytes, size);
    if (moe_checkpoint_open(&c, files_path("bad.safetensors")) != MOE_ERR_FORMAT || !strstr(moe_last_error(), b->text))
      fail_msg("%s: \"%s\", wanted \"%s\" in it", b->header, c ? "no error" : moe_last_error(), b->text);
    assert_null(c);
    if (!strstr(moe_last_error(), "moe_checkpoint_open: ") || !strstr(moe_last_error(), "bad.safetensors: "))
      fail_msg("%s: function or file is missing", moe_last_error());
    assert_null(strchr(moe_last_error(), '\n'));
    free(bytes);
  }
}

static void a_file_cut_anywhere_is_wrong(void **state)
{
  const char *header = "{\"a\":" E_("F32", "[2]", 0, 8) "}";
  size_t size;
  unsigned char *bytes = files_tensors(header, -1, 8, &size);
  struct moe__table t;
  (void)state;
  for (size_t cut = 0; cut < size; cut++) {
    unsigned char *copy = malloc(cut ? cut : 1); /* to the byte, for AddressSanitizer */
    memcpy(copy, bytes, cut);
    FAILS(MOE_ERR_FORMAT, "", moe__safetensors_parse(&t, copy, cut));
    assert_null(t.entries);
    free(copy);
  }
  FAILS(MOE_ERR_FORMAT, "7 bytes are no safetensors file", moe__safetensors_parse(&t, bytes, 7));
  OK(moe__safetensors_parse(&t, bytes, size));
  moe__table_free(&t);
  free(bytes);
}

static void deep_json_is_refused(void **state)
{
  const size_t depth = 100000;
  char *text = malloc(depth * 6 + 1), *at = text;
  struct moe__table t;
  size_t size;
  (void)state;
  for (size_t i = 0; i < depth; i++) at += sprintf(at, "{\"\":");
  for (size_t i = 0; i < depth; i++) *at++ = '}';
  *at = 0;
  unsigned char *bytes = files_tensors(text, -1, 0, &size);
  FAILS(MOE_ERR_FORMAT, "depth", moe__safetensors_parse(&t, bytes, size));
  free(bytes);
  free(text);
}

static void what_cannot_be_opened(void **state)
{
  moe_checkpoint *c = (moe_checkpoint *)&c;
  (void)state;
  FAILS(MOE_ERR_IO, "No such file", moe_checkpoint_open(&c, files_path("none.safetensors")));
  assert_null(c);
  FAILS(MOE_ERR_IO, "No such file", moe_checkpoint_open(&c, files_path("none.safetensors.index.json")));
  FAILS(MOE_ERR_IO, "model.safetensors", moe_checkpoint_open(&c, files_folder)); /* a folder without a model */
  FAILS(MOE_ERR_IO, "no regular file", moe_checkpoint_open(&c, "/dev/null"));
  assert_int_equal(mkfifo(files_path("pipe"), 0600), 0);
  FAILS(MOE_ERR_IO, "no regular file",
        moe_checkpoint_open(&c, files_path("pipe"))); /* and does not wait for a writer */
  files_write(files_path("empty"), "", 0);
  FAILS(MOE_ERR_FORMAT, "0 bytes", moe_checkpoint_open(&c, files_path("empty")));
  FAILS(MOE_ERR_FORMAT, "0 bytes", moe_raw_open(&c, files_path("empty")));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_checkpoint_open(NULL, "x"));
  FAILS(MOE_ERR_INVALID, "path is NULL", moe_checkpoint_open(&c, NULL));
  assert_null(c);
  moe_checkpoint_close(NULL);
}

/* ---- files that are odd, and right ------------------------------------------------------------------------------- */
static moe_checkpoint *open_text(const char *header, size_t data)
{
  size_t size;
  moe_checkpoint *c;
  unsigned char *bytes = files_tensors(header, -1, data, &size);
  files_write(files_path("odd.safetensors"), bytes, size);
  free(bytes);
  OK(moe_checkpoint_open(&c, files_path("odd.safetensors")));
  return c;
}

static void odd_files_that_are_right(void **state)
{
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  (void)state;
  moe_checkpoint *c = open_text("{}", 0);
  assert_int_equal(moe_checkpoint_count(c), 0);
  assert_null(moe_checkpoint_metadata_key(c, 0));
  FAILS(MOE_ERR_INVALID, "index 0, there are 0", moe_checkpoint_at(&e, c, 0));
  FAILS(MOE_ERR_NOT_FOUND, "no tensor \"a\" in ", moe_checkpoint_find(&e, c, "a"));
  moe_checkpoint_close(c);

  /* Members in another order, spaces, unknown members, an empty name, a name of other letters, empty tensors. */
  c = open_text("{ \"b\" : {\"data_offsets\":[2,6], \"shape\":[1 , 1], \"more\":[{}], \"dtype\":\"F32\"} ,"
                "\"\":" E_("U8", "[2]", 0, 2) ",\"\xc3\xa9\\n\":" E_("F64", "[3,0]", 2, 2) ",\"s\":" E_(
                    "I8", "[]", 6, 7) ","
                                      "\"z\":" E_("F16", "[0]", 7,
                                                  7) ",\"__metadata__\":{\"\":\"nothing\",\"b\":\"2\"} }         ",
                7);
  static const struct {
    const char *name, *dtype;
    int64_t kind, rank, shape[2], at, bytes;
  } want[] = {
    { "", "U8", MOE_U8, 1, { 2, 0 }, 0, 2 },
    { "b", "F32", MOE_F32, 2, { 1, 1 }, 2, 4 },
    { "s", "I8", MOE_NONE, 0, { 0, 0 }, 6, 1 },
    { "z", "F16", MOE_F16, 1, { 0, 0 }, 7, 0 },
    { "\xc3\xa9\n", "F64", MOE_F64, 2, { 3, 0 }, 2, 0 },
  };
  assert_int_equal(moe_checkpoint_count(c), COUNT(want));
  OK(moe_checkpoint_at(&e, c, 0));
  const unsigned char *data = e.data;
  for (size_t i = 0; i < COUNT(want); i++) {
    OK(moe_checkpoint_at(&e, c, (int64_t)i));
    assert_string_equal(e.name, want[i].name);
    assert_string_equal(e.dtype_name, want[i].dtype);
    assert_string_equal(e.file, files_path("odd.safetensors"));
    assert_int_equal(e.dtype, want[i].kind);
    assert_int_equal(e.rank, want[i].rank);
    assert_memory_equal(e.shape, want[i].shape, sizeof want[i].shape);
    assert_int_equal((const unsigned char *)e.data - data, want[i].at);
    assert_int_equal(e.bytes, want[i].bytes);
    assert_int_equal(e.hashed, 0);
    for (uint64_t k = 0; k < e.bytes; k++)
      assert_int_equal(((const unsigned char *)e.data)[k], (uint64_t)want[i].at + k);
    moe_checkpoint_entry f = moe_checkpoint_entry_init();
    OK(moe_checkpoint_find(&f, c, want[i].name));
    assert_memory_equal(&e, &f, sizeof e);
  }
  assert_string_equal(moe_checkpoint_metadata_key(c, 0), "");
  assert_string_equal(moe_checkpoint_metadata_key(c, 1), "b");
  assert_null(moe_checkpoint_metadata_key(c, 2));
  assert_null(moe_checkpoint_metadata_key(c, -1));
  assert_string_equal(moe_checkpoint_metadata(c, ""), "nothing");
  assert_null(moe_checkpoint_metadata(c, "a"));
  assert_null(moe_checkpoint_metadata(c, NULL));
  int64_t unhashed = -1;
  OK(moe_checkpoint_verify(c, &unhashed));
  assert_int_equal(unhashed, COUNT(want));
  FAILS(MOE_ERR_INVALID, "index 5, there are 5", moe_checkpoint_at(&e, c, 5));
  FAILS(MOE_ERR_INVALID, "index -1", moe_checkpoint_at(&e, c, -1));
  FAILS(MOE_ERR_INVALID, "checkpoint is NULL", moe_checkpoint_at(&e, NULL, 0));
  FAILS(MOE_ERR_INVALID, "name is NULL", moe_checkpoint_find(&e, c, NULL));
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_checkpoint_find(NULL, c, "b"));
  moe_checkpoint_close(c);
}

/* A dtype or a rank that libmoe does not have keeps nobody from the other tensors. */
static void foreign_tensors_are_listed_and_not_loaded(void **state)
{
  moe_checkpoint *c = open_text("{\"a\":" E_("F4", "[2,2]", 0, 2) ",\"b\":" E_("X\\u0039", "[5]", 2, 3) ",\"c\":" E_(
                                    "U8", "[1,2,1,1,1,1,2]", 3, 7) ",\"d\":" E_("U8", "[1]", 7, 8) "}",
                                8);
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  moe_tensor t = ON_DEVICE(MOE_U8, 1), s = ON_DEVICE(MOE_U8, 5), r = ON_DEVICE(MOE_U8, 1, 2, 1, 1, 1, 1);
  (void)state;
  OK(moe_checkpoint_find(&e, c, "a"));
  assert_int_equal(e.dtype, MOE_NONE);
  OK(moe_checkpoint_find(&e, c, "b"));
  assert_string_equal(e.dtype_name, "X9");
  OK(moe_checkpoint_find(&e, c, "c"));
  assert_int_equal(e.rank, 7);
  assert_int_equal(e.dtype, MOE_U8);
  assert_memory_equal(e.shape, ((const int64_t[]){ 1, 2, 1, 1, 1, 1 }), sizeof e.shape);
  OK(moe_checkpoint_load(c, q, &(moe_checkpoint_item){ "d", t }, 1, MOE_CHECKPOINT_PARTIAL));
  assert_int_equal(*(unsigned char *)fake_data(t.handle), 7);
  FAILS(MOE_ERR_FORMAT, "b (wanted u8 [5], got X9 [5])",
        moe_checkpoint_load(c, q, &(moe_checkpoint_item){ "b", s }, 1, MOE_CHECKPOINT_PARTIAL));
  FAILS(MOE_ERR_FORMAT, "c (wanted u8 [1,2,1,1,1,1], got U8 [1,2,1,1,1,1,...])",
        moe_checkpoint_load(c, q, &(moe_checkpoint_item){ "c", r }, 1, MOE_CHECKPOINT_PARTIAL));
  release(&t);
  release(&s);
  release(&r);
  moe_checkpoint_close(c);
}

/* ---- shards ------------------------------------------------------------------------------------------------------ */
static void write_shard(const char *name, const char *header, size_t data)
{
  size_t size;
  unsigned char *bytes = files_tensors(header, -1, data, &size);
  files_write(files_path(name), bytes, size);
  free(bytes);
}
static void write_text(const char *name, const char *text)
{
  files_write(files_path(name), text, strlen(text));
}

#define INDEX(map) "{\"metadata\":{\"total_size\":3},\"weight_map\":" map "}"
static void each_wrong_index_has_its_own_error(void **state)
{
  static const struct {
    const char *index;
    moe_status status;
    const char *text;
  } bad[] = {
    { "", MOE_ERR_FORMAT, "JSON at byte" },
    { "{", MOE_ERR_FORMAT, "JSON at byte" },
    { "[]", MOE_ERR_FORMAT, "an object is wanted" },
    { "{}", MOE_ERR_FORMAT, "weight_map, an object" },
    { "{\"weight_map\":[]}", MOE_ERR_FORMAT, "weight_map, an object" },
    { "{\"weight_map\":{},\"metadata\":[]}", MOE_ERR_FORMAT, "metadata, an object" },
    { "{\"weight_map\":{},\"metadata\":{\"moe.format\":\"9\"}}", MOE_ERR_FORMAT, "moe.format is \"9\"" },
    { "{\"weight_map\":{},\"metadata\":{\"moe.format\":1.5}}", MOE_ERR_FORMAT, "moe.format is \"1.5\"" },
    { INDEX("{\"a\":1}"), MOE_ERR_FORMAT, "\"a\" is in no file beside the index" },
    { INDEX("{\"a\":\"\"}"), MOE_ERR_FORMAT, "\"a\" is in no file beside the index" },
    { INDEX("{\"a\":\"..\"}"), MOE_ERR_FORMAT, "\"a\" is in no file beside the index" },
    { INDEX("{\"a\":\"../one.safetensors\"}"), MOE_ERR_FORMAT, "\"a\" is in no file beside the index" },
    { INDEX("{\"a\":\"/etc/passwd\"}"), MOE_ERR_FORMAT, "\"a\" is in no file beside the index" },
    { INDEX("{\"a\":\"x\\\\one.safetensors\"}"), MOE_ERR_FORMAT, "\"a\" is in no file beside the index" },
    { INDEX("{\"a\":\"none.safetensors\"}"), MOE_ERR_IO, "none.safetensors: No such file" },
    { INDEX("{\"a\":\"one.safetensors\",\"a\":\"two.safetensors\"}"), MOE_ERR_FORMAT, "duplicate" },
    { INDEX("{\"a\":\"one.safetensors\",\"x\":\"one.safetensors\"}"), MOE_ERR_FORMAT,
      "tensor \"x\" is not in one.safetensors" },
    { INDEX("{\"a\":\"one.safetensors\",\"c\":\"one.safetensors\",\"d\":\"two.safetensors\"}"), MOE_ERR_FORMAT,
      "tensor \"c\" is not in one.safetensors but in two.safetensors" },
    { INDEX("{\"a\":\"one.safetensors\",\"b\":\"again.safetensors\"}"), MOE_ERR_FORMAT,
      "tensor \"b\" is in two shards, " },
    { INDEX("{\"a\":\"one.safetensors\",\"c\":\"bad.safetensors\"}"), MOE_ERR_FORMAT, "bad.safetensors: the header" },
    { INDEX("{\"a\":\".\"}"), MOE_ERR_FORMAT, "in no file beside the index" },
  };
  (void)state;
  write_shard("one.safetensors", "{\"a\":" E_("U8", "[1]", 0, 1) ",\"b\":" E_("U8", "[2]", 1, 3) "}", 3);
  write_shard("two.safetensors", "{\"c\":" E_("U8", "[1]", 0, 1) ",\"d\":" E_("U8", "[1]", 1, 2) "}", 2);
  write_shard("again.safetensors", "{\"b\":" E_("U8", "[2]", 0, 2) "}", 2);
  write_shard("bad.safetensors", "[]", 2);
  for (size_t i = 0; i < COUNT(bad); i++) {
    moe_checkpoint *c = (moe_checkpoint *)&c;
    write_text("i.safetensors.index.json", bad[i].index);
    moe_status st = moe_checkpoint_open(&c, files_path("i.safetensors.index.json"));
    if (st != bad[i].status || !strstr(moe_last_error(), bad[i].text))
      fail_msg("%s: \"%s\", wanted \"%s\" in it", bad[i].index, st ? moe_last_error() : "no error", bad[i].text);
    assert_null(c);
  }
}

static void shards_are_one_checkpoint(void **state)
{
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  moe_checkpoint *c;
  (void)state;
  write_shard("one.safetensors",
              "{\"__metadata__\":{\"format\":\"pt\",\"k\":\"shard\",\"z\":\"one\"},\"c\":" E_(
                  "U8", "[1]", 0, 1) ",\"a\":" E_("U8", "[2]", 1, 3) "}",
              3);
  write_shard("two.safetensors",
              "{\"__metadata__\":{\"format\":\"pt\",\"z\":\"two\"},\"b\":" E_("U8", "[1]", 0, 1) ",\"unlisted\":" E_(
                  "U8", "[1]", 1, 2) "}",
              2);
  write_text("model.safetensors.index.json",
             "{\"metadata\":{\"total_size\":5,\"k\":\"index\",\"o\":{\"p\":[1,2]}},"
             "\"weight_map\":{\"b\":\"two.safetensors\",\"a\":\"one.safetensors\",\"c\":\"one.safetensors\"}}");
  write_shard("model.safetensors", "{}", 0);
  OK(moe_checkpoint_open(&c, files_folder)); /* the index, not model.safetensors */
  static const char *const names[] = { "a", "b", "c", "unlisted" }, *const in[] = { "one", "two", "one", "two" };
  assert_int_equal(moe_checkpoint_count(c), 4);
  for (int i = 0; i < 4; i++) {
    OK(moe_checkpoint_at(&e, c, i));
    assert_string_equal(e.name, names[i]);
    assert_non_null(strstr(e.file, in[i]));
  }
  static const char *const pairs[][2] = {
    { "format", "pt" }, { "k", "index" }, { "o", "{\"p\":[1,2]}" }, { "total_size", "5" }, { "z", "two" },
  };
  for (int i = 0; i < 5; i++) {
    assert_string_equal(moe_checkpoint_metadata_key(c, i), pairs[i][0]);
    assert_string_equal(moe_checkpoint_metadata(c, pairs[i][0]), pairs[i][1]);
  }
  assert_null(moe_checkpoint_metadata_key(c, 5));
  moe_checkpoint_close(c);
  unlink(files_path("model.safetensors.index.json"));
  OK(moe_checkpoint_open(&c, files_folder));
  assert_int_equal(moe_checkpoint_count(c), 0);
  moe_checkpoint_close(c);
}

/* ---- everything that can be written ------------------------------------------------------------------------------ */
static const int64_t all_dtypes[] = { MOE_F64,    MOE_F32, MOE_BF16, MOE_F16, MOE_F8E4M3,
                                      MOE_F8E5M2, MOE_I64, MOE_I32,  MOE_U8,  MOE_BOOL };
static const struct {
  int64_t rank, shape[6];
} all_shapes[] = {
  { 0, { 0 } },
  { 1, { 1 } },
  { 1, { 7 } },
  { 1, { 0 } },
  { 2, { 3, 5 } },
  { 2, { 3, 0 } },
  { 3, { 2, 3, 4 } },
  { 4, { 2, 1, 3, 5 } },
  { 5, { 1, 2, 3, 1, 7 } },
  { 6, { 2, 1, 3, 1, 2, 3 } },
  { 6, { 2, 0, 3, 1, 2, 3 } },
};
#define N_ALL (COUNT(all_dtypes) * COUNT(all_shapes))

struct made { /* a tensor of the round trip */
  char name[40];
  int64_t dtype, rank;
  const int64_t *shape;
  size_t bytes;
  void *data;
};

static struct made *make_all(void)
{
  struct made *all = calloc(N_ALL, sizeof *all);
  for (size_t i = 0; i < N_ALL; i++) {
    struct made *m = &all[i];
    m->dtype = all_dtypes[i % COUNT(all_dtypes)];
    m->rank = all_shapes[i / COUNT(all_dtypes)].rank;
    m->shape = all_shapes[i / COUNT(all_dtypes)].shape;
    snprintf(m->name, sizeof m->name, "%s.%zu", moe_dtype_name(m->dtype), (i * 37) % N_ALL);
    m->bytes = moe_dtype_size(m->dtype);
    for (int64_t d = 0; d < m->rank; d++) m->bytes *= (size_t)m->shape[d];
    m->data = malloc(m->bytes + 1);
    scramble(m->data, m->bytes, (uint32_t)i);
  }
  return all;
}

static void free_all(struct made *all)
{
  for (size_t i = 0; i < N_ALL; i++) free(all[i].data);
  free(all);
}

static void save_all(const char *path, const struct made *all, uint64_t shard_bytes)
{
  moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
  moe_checkpoint_writer *w;
  desc.shard_bytes = shard_bytes;
  OK(moe_checkpoint_writer_create(&w, path, &desc));
  OK(moe_checkpoint_writer_metadata(w, "config", "{\"d\":1,\"\xc3\xa9\":\"\\\"\"}"));
  for (size_t i = 0; i < N_ALL; i++)
    OK(moe_checkpoint_writer_add(w, all[i].name, all[i].dtype, all[i].rank, all[i].shape, all[i].data));
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
}

static void check_all(const char *path, const struct made *all)
{
  moe_checkpoint_item items[N_ALL];
  moe_checkpoint *c;
  int64_t unhashed = -1;
  OK(moe_checkpoint_open(&c, path));
  assert_int_equal(moe_checkpoint_count(c), N_ALL);
  OK(moe_checkpoint_verify(c, &unhashed));
  assert_int_equal(unhashed, 0);
  assert_string_equal(moe_checkpoint_metadata(c, "config"), "{\"d\":1,\"\xc3\xa9\":\"\\\"\"}");
  assert_string_equal(moe_checkpoint_metadata(c, "moe.format"), "1");
  assert_string_equal(moe_checkpoint_metadata(c, "moe.version"), moe_version_string());
  assert_string_equal(moe_checkpoint_metadata(c, "format"), "pt");
  for (size_t i = 0; i < N_ALL; i++) {
    moe_checkpoint_entry e = moe_checkpoint_entry_init();
    OK(moe_checkpoint_find(&e, c, all[i].name));
    assert_int_equal(e.dtype, all[i].dtype);
    assert_int_equal(e.rank, all[i].rank);
    assert_memory_equal(e.shape, all[i].shape, (size_t)e.rank * sizeof(int64_t));
    assert_int_equal(e.bytes, all[i].bytes);
    if (e.bytes) assert_memory_equal(e.data, all[i].data, e.bytes);
    assert_int_equal(e.hashed, 1);
    /* A mapping begins at a page, so others may see an array there. */
    if (e.bytes) assert_int_equal((uintptr_t)e.data % moe_dtype_size(e.dtype), 0);
    items[i] = (moe_checkpoint_item){ all[i].name, on_device(all[i].dtype, all[i].rank, all[i].shape) };
  }
  OK(moe_checkpoint_load(c, q, items, N_ALL, MOE_CHECKPOINT_VERIFY));
  for (size_t i = 0; i < N_ALL; i++) {
    if (all[i].bytes) assert_memory_equal(fake_data(items[i].tensor.handle), all[i].data, all[i].bytes);
    release(&items[i].tensor);
  }
  moe_checkpoint_close(c);
}

static void every_dtype_and_rank_comes_back(void **state)
{
  struct made *all = make_all();
  size_t size[2];
  (void)state;
  save_all(files_path("a.safetensors"), all, 0);
  check_all(files_path("a.safetensors"), all);
  /* The same save gives the same bytes; and none of them is waste. */
  save_all(files_path("b.safetensors"), all, 0);
  unsigned char *a = files_read(files_path("a.safetensors"), &size[0]),
                *b = files_read(files_path("b.safetensors"), &size[1]);
  assert_int_equal(size[0], size[1]);
  assert_memory_equal(a, b, size[0]);
  uint64_t head;
  memcpy(&head, a, 8);
  assert_int_equal(head % 8, 0);
  assert_true(a[8 + head - 1] == '}' || a[8 + head - 8] != ' ');
  json_t *header = json_loadb((char *)a + 8, head, 0, NULL), *value;
  const char *key, *last = "";
  assert_int_equal(json_object_size(header), N_ALL + 1);
  json_object_foreach(header, key, value)
  {
    assert_true(strcmp(last, key) < 0);
    last = key;
  }
  json_decref(header);
  free(a);
  free(b);
  assert_int_equal(files_count("", 0), 2);
  free_all(all);
}

static void shards_come_back_and_replace_each_other(void **state)
{
  static const uint64_t limits[] = { 1, 100, 1000, 1 << 30 };
  const char *path = files_path("m.safetensors.index.json");
  struct made *all = make_all();
  int shards = 0;
  (void)state;
  for (size_t i = 0; i < COUNT(limits); i++) {
    moe_checkpoint *before = NULL;
    moe_checkpoint_entry e = moe_checkpoint_entry_init();
    path = files_path("m.safetensors.index.json");
    if (i) OK(moe_checkpoint_open(&before, path));
    save_all(path, all, limits[i]);
    check_all(path, all);
    assert_int_equal(files_count(".tmp", 0), 0);
    const int now = files_count(".safetensors", 0);
    if (i) assert_true(now < shards); /* larger shards, and the old ones are gone */
    shards = now;
    if (before) { /* what is open stays readable */
      OK(moe_checkpoint_verify(before, NULL));
      OK(moe_checkpoint_find(&e, before, all[40].name));
      assert_memory_equal(e.data, all[40].data, e.bytes);
    }
    moe_checkpoint_close(before);
    /* Again: the same names, the same bytes. */
    size_t size[2];
    unsigned char *index[2];
    index[0] = files_read(path, &size[0]);
    save_all(path, all, limits[i]);
    index[1] = files_read(path, &size[1]);
    assert_int_equal(size[0], size[1]);
    assert_memory_equal(index[0], index[1], size[0]);
    free(index[0]);
    free(index[1]);
    check_all(path, all);
    assert_int_equal(files_count(".safetensors", 0), shards);
  }
  assert_int_equal(shards, 1);
  free_all(all);
}

static void nothing_is_a_checkpoint_too(void **state)
{
  (void)state;
  for (int sharded = 0; sharded < 2; sharded++) {
    const char *path = files_path(sharded ? "n.safetensors.index.json" : "n.safetensors");
    moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
    moe_checkpoint_writer *w;
    moe_checkpoint *c;
    desc.shard_bytes = sharded ? 100 : 0;
    OK(moe_checkpoint_writer_create(&w, path, &desc));
    OK(moe_checkpoint_writer_commit(w));
    moe_checkpoint_writer_free(w);
    OK(moe_checkpoint_open(&c, path));
    assert_int_equal(moe_checkpoint_count(c), 0);
    OK(moe_checkpoint_load(c, q, NULL, 0, 0));
    assert_string_equal(moe_checkpoint_metadata(c, "moe.format"), "1");
    moe_checkpoint_close(c);
  }
}

/* A file of much data keeps its reserve as spaces; a header larger than the reserve moves the data. */
static void large_headers_and_large_data(void **state)
{
  const int64_t rows = 17 << 20, n = 8000;
  unsigned char *data = malloc((size_t)rows);
  (void)state;
  scramble(data, (size_t)rows, 5);
  for (int many = 0; many < 2; many++)
    for (int large = 0; large < 2; large++) {
      const char *path = files_path("large.safetensors");
      moe_checkpoint_writer *w;
      moe_checkpoint *c;
      moe_checkpoint_entry e = moe_checkpoint_entry_init();
      OK(moe_checkpoint_writer_create(&w, path, NULL));
      if (large) OK(moe_checkpoint_writer_add(w, "large", MOE_U8, 1, &rows, data));
      for (int64_t i = 0; many && i < n; i++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.%lld.weight", (long long)i);
        OK(moe_checkpoint_writer_add(w, name, MOE_U8, 1, (const int64_t[]){ 1 + i % 9 }, data + i));
      }
      OK(moe_checkpoint_writer_commit(w));
      moe_checkpoint_writer_free(w);
      OK(moe_checkpoint_open(&c, path));
      OK(moe_checkpoint_verify(c, NULL));
      assert_int_equal(moe_checkpoint_count(c), (many ? n : 0) + large);
      if (large) {
        struct stat is;
        OK(moe_checkpoint_find(&e, c, "large"));
        assert_memory_equal(e.data, data, (size_t)rows);
        assert_int_equal(stat(path, &is), 0);
        if (!many) assert_int_equal(is.st_size, rows + (1 << 20)); /* what was written stayed where it was */
      }
      for (int64_t i = 0; many && i < n; i += 7) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.%lld.weight", (long long)i);
        OK(moe_checkpoint_find(&e, c, name));
        assert_int_equal(e.bytes, 1 + i % 9);
        assert_memory_equal(e.data, data + i, e.bytes);
      }
      moe_checkpoint_close(c);
    }
  free(data);
}

/* ---- views ------------------------------------------------------------------------------------------------------- */
static int64_t place_of(const moe_tensor *t, int64_t i)
{
  int64_t at = 0;
  for (int d = t->rank - 1; d >= 0; d--) {
    at += i % t->shape[d] * t->stride[d];
    i /= t->shape[d];
  }
  return (int64_t)t->offset + at * (int64_t)moe_dtype_size(t->dtype);
}

/* Saves the view, reads it in order; loads it into the same view of other memory: those bytes and no others. */
static void check_view(const char *what, const moe_tensor *t, size_t block)
{
  const size_t size = moe_dtype_size(t->dtype);
  const int64_t n = moe_tensor_count(t);
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  moe_tensor to = *t, whole = ON_DEVICE(MOE_U8, (int64_t)block);
  unsigned char *from = fake_data(t->handle), *got = fake_data(whole.handle), *want = malloc(block);
  OK(moe_checkpoint_writer_create(&w, files_path("v.safetensors"), NULL));
  OK(moe_checkpoint_writer_add_tensor(w, "v", q, t));
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path("v.safetensors")));
  OK(moe_checkpoint_verify(c, NULL));
  OK(moe_checkpoint_find(&e, c, "v"));
  assert_int_equal(e.bytes, (uint64_t)n * size);
  for (int64_t i = 0; i < n; i++)
    if (memcmp((const unsigned char *)e.data + (size_t)i * size, from + place_of(t, i), size) != 0)
      fail_msg("%s: element %lld was not saved", what, (long long)i);
  scramble(got, block, 99);
  memcpy(want, got, block);
  for (int64_t i = 0; i < n; i++) memcpy(want + place_of(t, i), from + place_of(t, i), size);
  to.handle = whole.handle;
  const moe_status st = moe_checkpoint_load(c, q, &(moe_checkpoint_item){ "v", to }, 1, 0);
  int repeated = 0;
  for (int d = 0; d < t->rank; d++) repeated |= t->shape[d] > 1 && !t->stride[d];
  if (repeated) assert_int_equal(st, MOE_ERR_INVALID);
  else if (st || memcmp(got, want, block) != 0) fail_msg("%s: loaded wrongly (%s)", what, st ? moe_last_error() : "");
  free(want);
  release(&whole);
  moe_checkpoint_close(c);
}

static void views_are_saved_and_loaded(void **state)
{
  static const int64_t dtypes[] = { MOE_F64, MOE_F32, MOE_BF16, MOE_U8 };
  (void)state;
  for (size_t k = 0; k < COUNT(dtypes); k++) {
    moe_tensor t = ON_DEVICE(dtypes[k], 4, 6, 5), v;
    const size_t block = 120 * moe_dtype_size(dtypes[k]);
    scramble(fake_data(t.handle), block, (uint32_t)k);
    check_view("packed", &t, block);
    for (int a = 0; a < 3; a++)
      for (int b = a + 1; b < 3; b++) {
        OK(moe_tensor_transpose(&v, &t, a, b));
        check_view("transposed", &v, block);
      }
    OK(moe_tensor_transpose(&v, &t, 0, 1));
    OK(moe_tensor_transpose(&v, &v, 0, 2));
    check_view("rotated", &v, block);
    for (int d = 0; d < 3; d++) {
      OK(moe_tensor_slice(&v, &t, d, 1, 3));
      check_view("slice", &v, block);
      OK(moe_tensor_every(&v, &t, d, 1, 2));
      check_view("every second", &v, block);
      OK(moe_tensor_transpose(&v, &v, 0, 2));
      check_view("every second, transposed", &v, block);
      OK(moe_tensor_slice(&v, &t, d, 2, 2));
      check_view("nothing", &v, block);
      OK(moe_tensor_slice(&v, &t, d, 2, 3));
      check_view("one", &v, block);
      v = t;
      v.stride[d] = 0;
      check_view("repeated", &v, block);
    }
    release(&t);
  }
}

/* Past the staging buffer, where each piece begins somewhere inside a row. */
static void large_views(void **state)
{
  moe_tensor t = ON_DEVICE(MOE_F32, 3, 1500, 523), v; /* 9.4 MB */
  const size_t block = (size_t)3 * 1500 * 523 * 4;
  (void)state;
  assert_true(block > 2 * MOE__STAGING);
  scramble(fake_data(t.handle), block, 3);
  check_view("packed", &t, block);
  OK(moe_tensor_transpose(&v, &t, 1, 2));
  fake_clear();
  check_view("transposed", &v, block);
  assert_true(fake.writes < 100000);
  OK(moe_tensor_transpose(&v, &t, 0, 2));
  check_view("transposed", &v, block);
  OK(moe_tensor_slice(&v, &t, 2, 0, 520));
  check_view("rows apart", &v, block);
  release(&t);
  t = ON_DEVICE(MOE_U8, 1, (int64_t)5 << 20, 1); /* one dimension to split */
  scramble(fake_data(t.handle), (size_t)5 << 20, 4);
  check_view("a row", &t, (size_t)5 << 20);
  release(&t);
}

/* Whatever is one piece of device memory is one call. */
static void long_runs_are_one_call(void **state)
{
  static const int64_t packed[] = { 30, 5, 1 };
  float host[120];
  moe_tensor t = ON_DEVICE(MOE_F32, 4, 6, 5), v;
  (void)state;
  scramble(host, sizeof host, 1);
#define CALLS(n, call)                                                                                                 \
  do {                                                                                                                 \
    fake_clear();                                                                                                      \
    OK(call);                                                                                                          \
    assert_int_equal(fake.writes, n);                                                                                  \
  } while (0)
  CALLS(1, moe__upload(q, &t, host, MOE_F32, packed));
  CALLS(1, moe__download(q, host, packed, &t));
  OK(moe_tensor_transpose(&v, &t, 0, 2));
  CALLS(1, moe__upload(q, &v, host, MOE_F32, (const int64_t[]){ 24, 4, 1 }));
  CALLS(1, moe__upload(q, &t, host, MOE_BF16, packed));
  OK(moe_tensor_slice(&v, &t, 1, 0, 3));
  CALLS(4, moe__upload(q, &v, host, MOE_F32, packed));
  OK(moe_tensor_slice(&v, &t, 2, 0, 3));
  CALLS(24, moe__upload(q, &v, host, MOE_F32, packed));
  OK(moe_tensor_slice(&v, &t, 0, 1, 3));
  CALLS(1, moe__upload(q, &v, host, MOE_F32, packed));
  v = t;
  v.stride[0] = 6;
  v.stride[1] = 1;
  v.stride[2] = 0;
  CALLS(5, moe__download(q, host, packed, &v)); /* each time all that is repeated */
#undef CALLS
  release(&t);
}

/* ---- conversion -------------------------------------------------------------------------------------------------- */
static double bits_value(uint32_t bits, int exponent, int mantissa)
{
  const int e = (int)(bits >> mantissa & ((1u << exponent) - 1)), bias = (1 << (exponent - 1)) - 1;
  const double m = ldexp((double)(bits & ((1u << mantissa) - 1)), -mantissa);
  const double v = e == 2 * bias + 1 ? (m != 0 ? (double)NAN : HUGE_VAL)
                   : e               ? ldexp(1 + m, e - bias)
                                     : ldexp(m, 1 - bias);
  return bits >> (exponent + mantissa) & 1 ? -v : v;
}
static double e4m3_value(uint32_t bits)
{
  const int e = (int)(bits >> 3 & 15), m = (int)(bits & 7);
  const double v = e == 15 && m == 7 ? (double)NAN : e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
  return bits & 128 ? -v : v;
}

static void same_value(double got, double want, const char *what, uint32_t bits)
{
  if (isnan(want) ? !isnan(got) : got != want || signbit(got) != signbit(want))
    fail_msg("%s %#x is %.17g, wanted %.17g", what, bits, got, want);
}

static void every_small_float_is_decoded(void **state)
{
  (void)state;
  for (uint32_t i = 0; i < 65536; i++) {
    const uint16_t h = (uint16_t)i;
    same_value(moe__to_double(&h, MOE_F16, 0), bits_value(i, 5, 10), "f16", i);
    same_value(moe__to_double(&h, MOE_BF16, 0), bits_value(i, 8, 7), "bf16", i);
  }
  for (uint32_t i = 0; i < 256; i++) {
    const uint8_t b = (uint8_t)i;
    same_value(moe__to_double(&b, MOE_F8E5M2, 0), bits_value(i, 5, 2), "f8e5m2", i);
    same_value(moe__to_double(&b, MOE_F8E4M3, 0), e4m3_value(i), "f8e4m3", i);
  }
  /* Numbers from the formats' own descriptions. */
  static const uint8_t max = 0x7e, tiny = 0x01, inf = 0x7c, last = 0x7b;
  assert_near(moe__to_double(&max, MOE_F8E4M3, 0), 448, 0);
  assert_near(moe__to_double(&tiny, MOE_F8E4M3, 0), 0x1p-9, 0);
  assert_near(moe__to_double(&tiny, MOE_F8E5M2, 0), 0x1p-16, 0);
  assert_near(moe__to_double(&last, MOE_F8E5M2, 0), 57344, 0);
  assert_true(isinf(moe__to_double(&inf, MOE_F8E5M2, 0)));
}

/* v as dtype is a value of that dtype with no other nearer to it, and the even one of two. */
static void check_rounding(double v, int64_t dtype)
{
  double got;
  uint64_t bits = 0;
  moe__convert(&bits, dtype, 1, &v, MOE_F64, 1, 1);
  got = moe__to_double(&bits, dtype, 0);
  same_value(got, ref_round(v, dtype), moe_dtype_name(dtype), (uint32_t)bits);
}

static void conversion_rounds_to_nearest_even(void **state)
{
  static const int64_t to[] = { MOE_F32, MOE_BF16, MOE_F16 };
  static const double special[] = { 0.0,          -0.0,           HUGE_VAL,
                                    -HUGE_VAL,    65504,          65519.999,
                                    65520,        -65520,         65536,
                                    0x1p-24,      0x1p-25,        0x1.0000001p-25,
                                    0x1p-26,      0x1.8p-24,      0x1p-133,
                                    0x1p-134,     0x1.8p-134,     0x1p-149,
                                    0x1p-150,     0x1.fffffep127, 0x1.ffffffp127,
                                    0x1.fep127,   0x1.ffp127,     0x1.feffffp127,
                                    1e308,        5e-324,         0x1.fffffffffffffp-1023,
                                    1 + 0x1p-8,   1 + 0x1.8p-7,   1 + 0x1p-11,
                                    1 + 0x1.8p-10 };
  uint64_t state_ = 1;
  (void)state;
  for (size_t k = 0; k < COUNT(to); k++) {
    for (size_t i = 0; i < COUNT(special); i++) check_rounding(special[i], to[k]);
    for (int i = 0; i < 200000; i++) {
      double v;
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      uint64_t bits = (state_ & 0x800fffffffffffff) | (uint64_t)(1023 - 160 + (state_ >> 32) % 320) << 52;
      if (i % 2) bits &= ~(uint64_t)0 << (52 - i % 14); /* short ones: exact, and in the middle of two */
      memcpy(&v, &bits, sizeof v);
      check_rounding(v, to[k]);
    }
    double nan = NAN;
    uint32_t bits = 0;
    moe__convert(&bits, to[k], 1, &nan, MOE_F64, 1, 1);
    assert_true(isnan(moe__to_double(&bits, to[k], 0)));
  }
  /* A payload whose upper bits are 0 must not become an infinity. */
  const uint64_t low = 0x7ff0000000000001;
  uint16_t half;
  moe__convert(&half, MOE_BF16, 1, &low, MOE_F64, 1, 1);
  assert_true(isnan(moe__to_double(&half, MOE_BF16, 0)));
  assert_int_equal(moe__converts(MOE_F8E4M3, MOE_F32), 0);
  assert_int_equal(moe__converts(MOE_F8E4M3, MOE_F8E4M3), 1);
  assert_int_equal(moe__converts(MOE_I32, MOE_F32), 0);
  assert_int_equal(moe__converts(MOE_F32, MOE_I32), 0);
  assert_int_equal(moe__converts(MOE_NONE, MOE_NONE), 0);
}

/* Loads every float dtype into every other, packed and as columns; integers convert to nothing. */
static void load_converts_floats(void **state)
{
  static const int64_t from[] = { MOE_F64, MOE_F32, MOE_BF16, MOE_F16, MOE_F8E4M3, MOE_F8E5M2 };
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  (void)state;
  OK(moe_checkpoint_writer_create(&w, files_path("c.safetensors"), NULL));
  OK(moe_checkpoint_writer_add(w, "odd", MOE_U8, 1, (const int64_t[]){ 3 }, "abc"));
  for (size_t i = 0; i < COUNT(all_dtypes); i++) {
    unsigned char data[24 * 8];
    scramble(data, sizeof data, (uint32_t)i);
    OK(moe_checkpoint_writer_add(w, moe_dtype_name(all_dtypes[i]), all_dtypes[i], 2, (const int64_t[]){ 4, 6 }, data));
  }
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path("c.safetensors")));
  for (size_t f = 0; f < COUNT(all_dtypes); f++)
    for (size_t t = 0; t < COUNT(all_dtypes); t++) {
      moe_checkpoint_entry e = moe_checkpoint_entry_init();
      moe_tensor whole = ON_DEVICE(all_dtypes[t], 6, 5), v;
      OK(moe_tensor_slice(&v, &whole, 1, 1, 5));
      OK(moe_tensor_transpose(&v, &v, 0, 1)); /* [4,6] */
      const char *name = moe_dtype_name(all_dtypes[f]);
      const moe_checkpoint_item item = { name, v };
      const int64_t flags = MOE_CHECKPOINT_PARTIAL | MOE_CHECKPOINT_CONVERT;
      int can = f == t;
      for (size_t i = 0; i < COUNT(from); i++) can |= from[i] == all_dtypes[f] && t < 4;
      if (f != t) FAILS(MOE_ERR_FORMAT, "wanted ", moe_checkpoint_load(c, q, &item, 1, MOE_CHECKPOINT_PARTIAL));
      if (!can) FAILS(MOE_ERR_FORMAT, "wanted ", moe_checkpoint_load(c, q, &item, 1, flags));
      else {
        OK(moe_checkpoint_load(c, q, &item, 1, flags));
        OK(moe_checkpoint_find(&e, c, name));
        for (int64_t i = 0; i < 24; i++) {
          const unsigned char *got = (unsigned char *)fake_data(v.handle) + place_of(&v, i);
          if (f == t) {
            assert_memory_equal(got, (const unsigned char *)e.data + (uint64_t)i * moe_dtype_size(e.dtype),
                                moe_dtype_size(e.dtype));
            continue;
          }
          same_value(moe__to_double(got, v.dtype, 0), ref_round(moe__to_double(e.data, e.dtype, i), v.dtype), name,
                     (uint32_t)i);
        }
      }
      release(&whole);
    }
  moe_checkpoint_close(c);
}

/* ---- loads that are refused -------------------------------------------------------------------------------------- */
static moe_checkpoint *three(void)
{
  static const float data[6] = { 1, 2, 3, 4, 5, 6 };
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  OK(moe_checkpoint_writer_create(&w, files_path("three.safetensors"), NULL));
  OK(moe_checkpoint_writer_add(w, "a", MOE_F32, 2, (const int64_t[]){ 2, 3 }, data));
  OK(moe_checkpoint_writer_add(w, "b", MOE_I32, 1, (const int64_t[]){ 6 }, data));
  OK(moe_checkpoint_writer_add(w, "b.c", MOE_F32, 1, (const int64_t[]){ 4 }, data));
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path("three.safetensors")));
  return c;
}

static void a_load_is_refused_before_the_first_byte(void **state)
{
  moe_checkpoint *c = three();
  moe_tensor a = ON_DEVICE(MOE_F32, 2, 3), b = ON_DEVICE(MOE_I32, 6), d = ON_DEVICE(MOE_F32, 4);
  moe_checkpoint_item items[] = { { "a", a }, { "b", b }, { "b.c", d } };
  moe_tensor t;
  (void)state;
  fake_clear();
#define REFUSED(status, text, n, flags) FAILS(status, text, moe_checkpoint_load(c, q, items, n, flags))
  REFUSED(MOE_ERR_FORMAT, "three.safetensors; unexpected: b.c", 2, 0);
  REFUSED(MOE_ERR_FORMAT, "unexpected: a, b, b.c", 0, 0);
  items[2].name = "nowhere";
  REFUSED(MOE_ERR_FORMAT, "; missing: nowhere; unexpected: b.c", 3, 0);
  REFUSED(MOE_ERR_FORMAT, "; missing: nowhere", 3, MOE_CHECKPOINT_PARTIAL);
  assert_null(strstr(moe_last_error(), "unexpected"));
  items[2].name = "b.c";
  items[2].tensor = b;
  REFUSED(MOE_ERR_FORMAT, "; different: b.c (wanted i32 [6], got F32 [4])", 3, MOE_CHECKPOINT_CONVERT);
  items[2].tensor = d;
  OK(moe_tensor_transpose(&items[0].tensor, &a, 0, 1));
  REFUSED(MOE_ERR_FORMAT, "; different: a (wanted f32 [3,2], got F32 [2,3])", 3, 0);
  items[0].tensor.rank = 1;
  REFUSED(MOE_ERR_FORMAT, "; different: a (wanted f32 [3], got F32 [2,3])", 3, 0);
  items[0].tensor = a;
  /* A name twice: each is compared. */
  items[1] = items[0];
  REFUSED(MOE_ERR_FORMAT, "three.safetensors; unexpected: b", 3, 0);
  items[1].tensor.shape[0] = 1;
  REFUSED(MOE_ERR_FORMAT, "; different: a (wanted f32 [1,3], got F32 [2,3])", 3, MOE_CHECKPOINT_PARTIAL);
  items[1].tensor = a;
  items[1].tensor.dtype = MOE_I32;
  REFUSED(MOE_ERR_FORMAT, "; different: a (wanted i32 [2,3], got F32 [2,3])", 3, MOE_CHECKPOINT_PARTIAL);
  items[1] = (moe_checkpoint_item){ "b", b };
  /* Arguments. */
  REFUSED(MOE_ERR_INVALID, "flags 8 are none", 3, 8);
  REFUSED(MOE_ERR_INVALID, "-1 items", -1, 0);
  FAILS(MOE_ERR_INVALID, "none given", moe_checkpoint_load(c, q, NULL, 1, 0));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_checkpoint_load(c, NULL, items, 3, 0));
  FAILS(MOE_ERR_INVALID, "checkpoint is NULL", moe_checkpoint_load(NULL, q, items, 3, 0));
#define SPOILT(what, text)                                                                                             \
  do {                                                                                                                 \
    t = items[1].tensor;                                                                                               \
    items[1].tensor.what;                                                                                              \
    REFUSED(MOE_ERR_INVALID, text, 3, 0);                                                                              \
    items[1].tensor = t;                                                                                               \
  } while (0)
  SPOILT(handle = NULL, "b is not given");
  SPOILT(dtype = 77, "b has dtype 77");
  SPOILT(dtype = MOE_NONE, "b has dtype 0");
  SPOILT(rank = 7, "b has rank 7");
  SPOILT(rank = -1, "b has rank -1");
  SPOILT(offset = 2, "b begins at byte 2");
  SPOILT(shape[0] = -6, "b has extent -6 in dimension 0");
  SPOILT(stride[0] = -1, "stride -1 in dimension 0");
  SPOILT(stride[0] = 0, "stride 0 in dimension 0");
  SPOILT(stride[0] = INT64_MAX, "stride 9223372036854775807 in dimension 0");
  SPOILT(stride[0] = INT64_MAX / 8, "past 2^63-1 bytes");
  items[1].name = NULL;
  REFUSED(MOE_ERR_INVALID, "items[1].name is NULL", 3, 0);
  items[1].name = "b";
  assert_int_equal(fake.writes, 0);
  OK(moe_checkpoint_load(c, q, items, 3, 0));
  assert_int_equal(fake.writes, 3);
  /* One tensor in two places is fine. */
  OK(moe_checkpoint_load(c, q, (const moe_checkpoint_item[]){ { "a", a }, { "a", a } }, 2, MOE_CHECKPOINT_PARTIAL));
  release(&a);
  release(&b);
  release(&d);
  moe_checkpoint_close(c);
}

/* Hundreds of faults of each sort: some are named, all are counted, in one sentence. */
static void long_lists_are_cut(void **state)
{
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  moe_checkpoint_item items[400];
  char names[400][64];
  moe_tensor t = ON_DEVICE(MOE_F32, 3);
  (void)state;
  OK(moe_checkpoint_writer_create(&w, files_path("many.safetensors"), NULL));
  for (int i = 0; i < 400; i++) {
    snprintf(names[i], sizeof names[i], "model.layers.%d.block_sparse_moe.experts.7.w1.weight", i);
    items[i] = (moe_checkpoint_item){ names[i], t };
    if (i >= 100) OK(moe_checkpoint_writer_add(w, names[i], MOE_BF16, 1, (const int64_t[]){ 2 }, "abcd"));
  }
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path("many.safetensors")));
  FAILS(MOE_ERR_FORMAT, "; missing: model.layers.0.", moe_checkpoint_load(c, q, items, 250, 0));
  const char *text = moe_last_error(), *different = strstr(text, "; different: model.layers.100."),
             *unexpected = strstr(text, "; unexpected: model.layers.");
  int shown[3] = { 0 }, more[3] = { 0 };
  assert_non_null(different);
  assert_non_null(unexpected);
  for (const char *p = text; (p = strstr(p, "model.layers.")); p++) shown[p > unexpected ? 2 : p > different ? 1 : 0]++;
  assert_int_equal(sscanf(strstr(text, " and "), " and %d more", &more[0]), 1);
  assert_int_equal(sscanf(strstr(different, " and "), " and %d more", &more[1]), 1);
  assert_int_equal(sscanf(strstr(unexpected, " and "), " and %d more", &more[2]), 1);
  assert_int_equal(shown[0] + more[0], 100);
  assert_int_equal(shown[1] + more[1], 150);
  assert_int_equal(shown[2] + more[2], 150);
  release(&t);
  moe_checkpoint_close(c);
}

/* Names of a hostile file stay on their line, and are cut. */
static void names_in_errors(void **state)
{
  char header[600], name[400];
  size_t size;
  struct moe__table t;
  (void)state;
  memset(name, 'n', sizeof name);
  name[sizeof name - 1] = 0;
  snprintf(header, sizeof header, "{\"%s\\n\\u001b[31m end\":1}", name);
  unsigned char *bytes = files_tensors(header, -1, 0, &size);
  FAILS(MOE_ERR_FORMAT, "tensor \"...nnn", moe__safetensors_parse(&t, bytes, size));
  assert_non_null(strstr(moe_last_error(), "n??[31m end\""));
  assert_true(strlen(moe_last_error()) < 200);
  free(bytes);
}

/* ---- hashes ------------------------------------------------------------------------------------------------------ */
static void a_changed_byte_is_found(void **state)
{
  moe_tensor a = ON_DEVICE(MOE_F32, 2, 3), d = ON_DEVICE(MOE_F32, 4);
  const moe_checkpoint_item items[] = { { "a", a }, { "b.c", d } };
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  int64_t unhashed = -1;
  size_t size;
  moe_checkpoint *c = three();
  (void)state;
  OK(moe_checkpoint_verify(c, &unhashed));
  assert_int_equal(unhashed, 0);
  OK(moe_checkpoint_find(&e, c, "a"));
  assert_int_equal(e.hash, 0xa6e707ccf7703447); /* as Python's xxhash computes it */
  assert_null(moe_checkpoint_metadata(c, "moe.xxh3:a"));
  moe_checkpoint_close(c);
  unsigned char *bytes = files_read(files_path("three.safetensors"), &size);
  bytes[size - 20] ^= 1; /* of b, behind a and before b.c */
  files_write(files_path("three.safetensors"), bytes, size);
  OK(moe_checkpoint_open(&c, files_path("three.safetensors")));
  FAILS(MOE_ERR_FORMAT, "tensor \"b\" has the hash ", moe_checkpoint_verify(c, &unhashed));
  assert_int_equal(unhashed, 0);
  const int64_t flags = MOE_CHECKPOINT_PARTIAL | MOE_CHECKPOINT_VERIFY;
  OK(moe_checkpoint_load(c, q, items, 2, flags)); /* of which b is none */
  fake_clear();
  FAILS(MOE_ERR_FORMAT, "moe_checkpoint_load: ",
        moe_checkpoint_load(
            c, q,
            (const moe_checkpoint_item[]){ items[0], { "b", (moe_tensor){ a.handle, 0, MOE_I32, 1, { 6 }, { 1 } } } },
            2, flags));
  assert_int_equal(fake.writes, 0);
  moe_checkpoint_close(c);
  free(bytes);
  /* A tensor that is gone, its hash still there. */
  c = open_text("{\"__metadata__\":{\"moe.xxh3:b\":\"0123456789abcdef\"},\"a\":" E_("U8", "[1]", 0, 1) "}", 1);
  FAILS(MOE_ERR_FORMAT, "tensor \"b\" has a hash and is not there", moe_checkpoint_verify(c, NULL));
  moe_checkpoint_close(c);
  FAILS(MOE_ERR_INVALID, "checkpoint is NULL", moe_checkpoint_verify(NULL, NULL));
  release(&a);
  release(&d);
}

/* ---- the writer's arguments -------------------------------------------------------------------------------------- */
static void the_writer_refuses(void **state)
{
  moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
  moe_checkpoint_writer *w = (moe_checkpoint_writer *)&w, *other;
  const int64_t shape[6] = { 1, 1, 1, 1, 1, 1 };
  moe_tensor t = ON_DEVICE(MOE_U8, 1);
  (void)state;
#define CREATE(status, text, path) FAILS(status, text, moe_checkpoint_writer_create(&w, path, &desc))
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_checkpoint_writer_create(NULL, "x", NULL));
  CREATE(MOE_ERR_INVALID, "path is NULL", NULL);
  assert_null(w);
  CREATE(MOE_ERR_INVALID, "names no file", "");
  CREATE(MOE_ERR_INVALID, "names no file", files_path(""));
  CREATE(MOE_ERR_INVALID, "no regular file", files_folder);
  CREATE(MOE_ERR_INVALID, "no regular file", "/dev/full");
  CREATE(MOE_ERR_IO, "No such file", files_path("none/x.safetensors"));
  desc.shard_bytes = 1;
  CREATE(MOE_ERR_INVALID, "does not end in NAME.safetensors.index.json", files_path("x.safetensors"));
  CREATE(MOE_ERR_INVALID, "does not end in NAME.safetensors.index.json", files_path(".safetensors.index.json"));
  desc.size = 4;
  CREATE(MOE_ERR_INVALID, "desc->size 4", files_path("x.safetensors"));
  desc = moe_checkpoint_writer_desc_init();
  assert_int_equal(files_count("", 0), 0);

  OK(moe_checkpoint_writer_create(&w, files_path("x.safetensors"), NULL));
  FAILS(MOE_ERR_STATE, "another writer is at work",
        moe_checkpoint_writer_create(&other, files_path("x.safetensors"), NULL));
  assert_null(other);
  OK(moe_checkpoint_writer_create(&other, files_path("y.safetensors"), NULL));
  moe_checkpoint_writer_free(other);
#define META(text, key, value) FAILS(MOE_ERR_INVALID, text, moe_checkpoint_writer_metadata(w, key, value))
  META("key is NULL", NULL, "");
  META("value is NULL", "k", NULL);
  META("begins with \"moe.\"", "moe.format", "7");
  META("key \"\xff\" is not UTF-8", "\xff", "");
  META("value \"\xc0\x80\" is not UTF-8", "k", "\xc0\x80");
  OK(moe_checkpoint_writer_metadata(w, "k", "v"));
  META("key \"k\" was given before", "k", "w");
#define ADD(text, name, dtype, rank, shape, data)                                                                      \
  FAILS(MOE_ERR_INVALID, text, moe_checkpoint_writer_add(w, name, dtype, rank, shape, data))
  ADD("name is NULL", NULL, MOE_U8, 0, NULL, "x");
  ADD("format's own", "__metadata__", MOE_U8, 0, NULL, "x");
  ADD("is not UTF-8", "\xed\xa0\x80", MOE_U8, 0, NULL, "x");
  ADD("n: dtype 0 is none", "n", MOE_NONE, 0, NULL, "x");
  ADD("n: dtype 11 is none", "n", MOE_BOOL + 1, 0, NULL, "x");
  ADD("n: rank -1", "n", MOE_U8, -1, shape, "x");
  ADD("n: rank 7", "n", MOE_U8, 7, shape, "x");
  ADD("n: rank 2 outside 0..6, or no shape", "n", MOE_U8, 2, NULL, "x");
  ADD("n: extent -1 in dimension 1", "n", MOE_U8, 2, ((const int64_t[]){ 1, -1 }), "x");
  ADD("n: extent 4611686018427387904 in dimension 1", "n", MOE_F32, 2, ((const int64_t[]){ 2, (int64_t)1 << 62 }), "x");
  ADD("n: data is NULL", "n", MOE_U8, 0, NULL, NULL);
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_checkpoint_writer_add_tensor(w, "n", NULL, &t));
  FAILS(MOE_ERR_INVALID, "tensor is NULL", moe_checkpoint_writer_add_tensor(w, "n", q, NULL));
  FAILS(MOE_ERR_INVALID, "name is NULL", moe_checkpoint_writer_add_tensor(w, NULL, q, &t));
  FAILS(MOE_ERR_INVALID, "n has dtype 55",
        moe_checkpoint_writer_add_tensor(w, "n", q, &(moe_tensor){ t.handle, 0, 55, 0, { 0 }, { 0 } }));
  FAILS(MOE_ERR_INVALID, "writer is NULL", moe_checkpoint_writer_add(NULL, "n", MOE_U8, 0, NULL, "x"));
  FAILS(MOE_ERR_INVALID, "writer is NULL", moe_checkpoint_writer_add_tensor(NULL, "n", q, &t));
  FAILS(MOE_ERR_INVALID, "writer is NULL", moe_checkpoint_writer_metadata(NULL, "k", "v"));
  FAILS(MOE_ERR_INVALID, "writer is NULL", moe_checkpoint_writer_commit(NULL));
  /* None of which has spoilt it. */
  OK(moe_checkpoint_writer_add(w, "n", MOE_U8, 0, NULL, "x"));
  ADD("name \"n\" was added before", "n", MOE_U8, 0, NULL, "x");
  OK(moe_checkpoint_writer_add(w, "", MOE_U8, 2, (const int64_t[]){ 0, 5 }, NULL));
  OK(moe_checkpoint_writer_commit(w));
  FAILS(MOE_ERR_STATE, "can only be freed", moe_checkpoint_writer_commit(w));
  FAILS(MOE_ERR_STATE, "can only be freed", moe_checkpoint_writer_add(w, "m", MOE_U8, 0, NULL, "x"));
  FAILS(MOE_ERR_STATE, "can only be freed", moe_checkpoint_writer_metadata(w, "m", "x"));
  moe_checkpoint_writer_free(w);
  moe_checkpoint_writer_free(NULL);
  moe_checkpoint *c;
  OK(moe_checkpoint_open(&c, files_path("x.safetensors")));
  assert_int_equal(moe_checkpoint_count(c), 2);
  moe_checkpoint_close(c);
  release(&t);
}

/* The caller's "format" stays; pieces of a tensor must be all of it. */
static void tensors_in_pieces(void **state)
{
  const int64_t shape[] = { 3, 2 };
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  (void)state;
  OK(moe_checkpoint_writer_create(&w, files_path("p.safetensors"), NULL));
  OK(moe_checkpoint_writer_metadata(w, "format", "np"));
  OK(moe__writer_begin("t", w, "p", MOE_U8, 2, shape));
  OK(moe__writer_append("t", w, "ab", 2));
  OK(moe__writer_append("t", w, NULL, 0));
  FAILS(MOE_ERR_STATE, "not ended", moe_checkpoint_writer_add(w, "m", MOE_U8, 0, NULL, "x"));
  FAILS(MOE_ERR_STATE, "not ended", moe_checkpoint_writer_commit(w));
  OK(moe__writer_append("t", w, "cdef", 4));
  OK(moe__writer_end("t", w));
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path("p.safetensors")));
  OK(moe_checkpoint_find(&e, c, "p"));
  assert_memory_equal(e.data, "abcdef", 6);
  assert_string_equal(moe_checkpoint_metadata(c, "format"), "np");
  OK(moe_checkpoint_verify(c, NULL));
  moe_checkpoint_close(c);
  for (int more = 0; more < 2; more++) {
    OK(moe_checkpoint_writer_create(&w, files_path("p.safetensors"), NULL));
    OK(moe__writer_begin("t", w, "p", MOE_U8, 2, shape));
    OK(moe__writer_append("t", w, "abcde", 5));
    if (more) FAILS(MOE_ERR_STATE, "t: 2 bytes, the tensor wants 1", moe__writer_append("t", w, "fg", 2));
    else FAILS(MOE_ERR_STATE, "t: 1 bytes of the tensor are missing", moe__writer_end("t", w));
    FAILS(MOE_ERR_STATE, "can only be freed", moe_checkpoint_writer_commit(w));
    moe_checkpoint_writer_free(w);
  }
}

/* ---- parts ------------------------------------------------------------------------------------------------------- */
/* Gate and up, interleaved and transposed in the file, apart on the device. */
static void parts_of_a_tensor(void **state)
{
  enum { E = 3, D = 4, F = 5 };
  static const int64_t file[] = { E, D, 2 * F };
  float data[E][D][2 * F];
  moe_checkpoint_writer *w;
  moe_checkpoint *c;
  struct moe__part parts[3];
  (void)state;
  scramble(data, sizeof data, 8);
  OK(moe_checkpoint_writer_create(&w, files_path("g.safetensors"), NULL));
  OK(moe_checkpoint_writer_add(w, "m.gate_up", MOE_F32, 3, file, data));
  OK(moe_checkpoint_writer_add(w, "m.rest", MOE_F32, 0, NULL, data));
  OK(moe_checkpoint_writer_add(w, "other", MOE_F32, 0, NULL, data));
  OK(moe_checkpoint_writer_commit(w));
  moe_checkpoint_writer_free(w);
  OK(moe_checkpoint_open(&c, files_path("g.safetensors")));
  for (int i = 0; i < 2; i++) { /* [E,F,D] */
    parts[i] = (struct moe__part){ .name = "m.gate_up", .rank = 3, .at = i, .stride = { D * 2 * F, 2, 2 * F } };
    memcpy(parts[i].shape, file, sizeof file);
    parts[i].to = ON_DEVICE(MOE_F32, E, F, D);
  }
  parts[2] = moe__part_whole("m.rest", &(moe_tensor){ NULL, 0, MOE_F32, 0, { 0 }, { 0 } }); /* only checked */
  FAILS(MOE_ERR_FORMAT, "t: ", moe__parts_check("t", c, parts, 2, "m.", 0));
  assert_non_null(strstr(moe_last_error(), "; unexpected: m.rest"));
  assert_null(strstr(moe_last_error(), "other"));
  OK(moe__parts_check("t", c, parts, 2, "m.", MOE_CHECKPOINT_PARTIAL));
  OK(moe__parts_check("t", c, parts, 3, "m.", MOE_CHECKPOINT_VERIFY));
  OK(moe__parts_copy("t", c, q, parts, 3));
  for (int i = 0; i < 2; i++) {
    const float *got = fake_data(parts[i].to.handle);
    for (int e = 0; e < E; e++)
      for (int f = 0; f < F; f++)
        for (int d = 0; d < D; d++) assert_memory_equal(&got[(e * F + f) * D + d], &data[e][d][2 * f + i], 4);
    release(&parts[i].to);
  }
  moe_checkpoint_close(c);
}

/* ---- raw --------------------------------------------------------------------------------------------------------- */
static void raw_layout(void **state)
{
  static const float w1[6] = { .1f, .2f, .3f, .4f, .5f, .6f }, w2[2] = { .7f, .8f };
  moe_tensor m[2] = { ON_DEVICE(MOE_F32, 3, 2), ON_DEVICE(MOE_F32, 2, 1) }, v;
  moe_checkpoint *c;
  moe_checkpoint_entry e = moe_checkpoint_entry_init();
  int64_t v64;
  size_t size;
  (void)state;
  memcpy(fake_data(m[0].handle), w1, sizeof w1);
  memcpy(fake_data(m[1].handle), w2, sizeof w2);
  OK(moe_raw_save(files_path("raw"), q, m, 2));
  unsigned char *bytes = files_read(files_path("raw"), &size);
  static const struct {
    size_t at;
    int64_t is;
  } numbers[] = { { 0, 2 }, { 8, 3 }, { 16, 2 }, { 48, 2 }, { 56, 1 } };
  assert_int_equal(size, 72);
  for (size_t i = 0; i < COUNT(numbers); i++) {
    memcpy(&v64, bytes + numbers[i].at, 8);
    assert_int_equal(v64, numbers[i].is);
  }
  assert_memory_equal(bytes + 24, w1, sizeof w1);
  assert_memory_equal(bytes + 64, w2, sizeof w2);
  OK(moe_raw_open(&c, files_path("raw")));
  assert_int_equal(moe_checkpoint_count(c), 2);
  memset(fake_data(m[0].handle), 0, sizeof w1);
  memset(fake_data(m[1].handle), 0, sizeof w2);
  OK(moe_checkpoint_load(c, q, (const moe_checkpoint_item[]){ { "0", m[0] }, { "1", m[1] } }, 2, 0));
  assert_memory_equal(fake_data(m[0].handle), w1, sizeof w1);
  assert_memory_equal(fake_data(m[1].handle), w2, sizeof w2);
  OK(moe_checkpoint_find(&e, c, "0"));
  assert_int_equal(e.hashed, 0);
  assert_string_equal(e.dtype_name, "F32");
  moe_checkpoint_close(c);
  /* Wrong ones. */
  for (size_t cut = 0; cut < size; cut++) {
    struct moe__table t;
    unsigned char *copy = malloc(cut ? cut : 1);
    memcpy(copy, bytes, cut);
    FAILS(MOE_ERR_FORMAT, "", moe__raw_parse(&t, copy, cut));
    free(copy);
  }
  static const struct {
    size_t at;
    int64_t is;
    const char *text;
  } bad[] = {
    { 0, 1, "24 bytes behind the last matrix" },
    { 0, 3, "matrix 2 of 3: the file ends before its sizes" },
    { 0, 5, "5 matrices in 72 bytes" },
    { 0, -1, "18446744073709551615 matrices" },
    { 8, -3, "matrix 0 of 2: -3 rows, 2 columns" },
    { 16, -1, "matrix 0 of 2: 3 rows, -1 columns" },
    { 8, (int64_t)1 << 62, "rows, 2 columns" },
    { 16, (int64_t)1 << 61, "3 rows, 2305843009213693952 columns" },
    { 48, 3, "matrix 1 of 2: 3 rows, 1 columns, 8 bytes are left" },
    { 56, 0, "8 bytes behind the last matrix" },
  };
  for (size_t i = 0; i < COUNT(bad); i++) {
    struct moe__table t;
    unsigned char *copy = malloc(size);
    memcpy(copy, bytes, size);
    memcpy(copy + bad[i].at, &bad[i].is, 8);
    FAILS(MOE_ERR_FORMAT, bad[i].text, moe__raw_parse(&t, copy, size));
    free(copy);
  }
  /* Views, none, many; and what is refused. */
  OK(moe_tensor_transpose(&v, &m[0], 0, 1));
  OK(moe_raw_save(files_path("raw"), q, &v, 1));
  OK(moe_raw_open(&c, files_path("raw")));
  OK(moe_checkpoint_find(&e, c, "0"));
  assert_memory_equal(e.data, ((const float[]){ .1f, .3f, .5f, .2f, .4f, .6f }), 24);
  moe_checkpoint_close(c);
  OK(moe_raw_save(files_path("raw"), q, NULL, 0));
  OK(moe_raw_open(&c, files_path("raw")));
  assert_int_equal(moe_checkpoint_count(c), 0);
  moe_checkpoint_close(c);
  moe_tensor many[12];
  for (int i = 0; i < 12; i++) OK(moe_tensor_slice(&many[i], &m[0], 1, 0, i % 2));
  OK(moe_raw_save(files_path("raw"), q, many, 12));
  OK(moe_raw_open(&c, files_path("raw")));
  assert_int_equal(moe_checkpoint_count(c), 12);
  OK(moe_checkpoint_find(&e, c, "11"));
  assert_int_equal(e.shape[1], 1);
  moe_checkpoint_close(c);
  v = m[0];
  v.rank = 1;
  FAILS(MOE_ERR_INVALID, "matrices[0] is f32 of rank 1", moe_raw_save(files_path("raw"), q, &v, 1));
  v = m[0];
  v.dtype = MOE_I32;
  FAILS(MOE_ERR_INVALID, "matrices[0] is i32 of rank 2", moe_raw_save(files_path("raw"), q, &v, 1));
  v.handle = NULL;
  FAILS(MOE_ERR_INVALID, "matrices[0] is not given", moe_raw_save(files_path("raw"), q, &v, 1));
  FAILS(MOE_ERR_INVALID, "path is NULL", moe_raw_save(NULL, q, m, 1));
  FAILS(MOE_ERR_INVALID, "queue is NULL", moe_raw_save(files_path("raw"), NULL, m, 1));
  FAILS(MOE_ERR_INVALID, "none given", moe_raw_save(files_path("raw"), q, NULL, 1));
  FAILS(MOE_ERR_INVALID, "-1 matrices", moe_raw_save(files_path("raw"), q, m, -1));
  free(bytes);
  release(&m[0]);
  release(&m[1]);
}

/* ---- the group --------------------------------------------------------------------------------------------------- */
static int open_all(void **state)
{
  fake_reset();
  ctx = fake_open();
  return !ctx || moe_queue_create(&q, ctx) || files_open(state);
}

static int close_all(void **state)
{
  moe_queue_free(q);
  moe_context_free(ctx);
  if (fake.blocks) print_error("%ld blocks of device memory are left\n", fake.blocks);
  return files_close(state) || fake.blocks;
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, NULL, files_clear)
  const struct CMUnitTest tests[] = {
    T(each_wrong_file_has_its_own_error),
    T(a_file_cut_anywhere_is_wrong),
    T(deep_json_is_refused),
    T(what_cannot_be_opened),
    T(odd_files_that_are_right),
    T(foreign_tensors_are_listed_and_not_loaded),
    T(each_wrong_index_has_its_own_error),
    T(shards_are_one_checkpoint),
    T(every_dtype_and_rank_comes_back),
    T(shards_come_back_and_replace_each_other),
    T(nothing_is_a_checkpoint_too),
    T(large_headers_and_large_data),
    T(views_are_saved_and_loaded),
    T(large_views),
    T(long_runs_are_one_call),
    T(every_small_float_is_decoded),
    T(conversion_rounds_to_nearest_even),
    T(load_converts_floats),
    T(a_load_is_refused_before_the_first_byte),
    T(long_lists_are_cut),
    T(names_in_errors),
    T(a_changed_byte_is_found),
    T(the_writer_refuses),
    T(tensors_in_pieces),
    T(parts_of_a_tensor),
    T(raw_layout),
  };
  return cmocka_run_group_tests(tests, open_all, close_all) ? 1 : 0;
}
