/* fuzz_checkpoint.c - any bytes as a checkpoint: as a safetensors file, as an index, as the raw layout.  Nothing is read
   outside them (AddressSanitizer, undefined behaviour too), memory taken stays in proportion to them, and what a
   successful parse promises holds.

   LLVMFuzzerTestOneInput is libFuzzer's entry; where there is no libFuzzer, driver.c calls it. */
#include "core/hash.h"
#include "core/safetensors.h"

#include <stdio.h>
#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__)
#define HAVE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAVE_ASAN 1
#endif
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void promise(int holds, const char *what)
{
  if (holds) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

/* ---- memory: live bytes of an input, and the most that there were ------------------------------------------------ */
static size_t live, most;

#ifdef HAVE_ASAN
/* As in sanitizer/allocator_interface.h, which gcc does not bring along. */
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));
size_t __sanitizer_get_allocated_size(const volatile void *p);

static _Thread_local int counting; /* libFuzzer has a thread of its own */
static void on_malloc(const volatile void *p, size_t n)
{
  (void)p;
  if (!counting) return;
  live += n;
  if (live > most) most = live;
}
static void on_free(const volatile void *p)
{
  if (counting && p) live -= __sanitizer_get_allocated_size(p);
}
static void count(int on)
{
  static int installed;
  if (!installed) installed = __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
  live = most = 0;
  counting = on;
}
#else
static void count(int on)
{
  (void)on;
}
#endif

/* ---- tables ------------------------------------------------------------------------------------------------------ */
static void check_table(struct moe__table *t, const uint8_t *data, size_t size)
{
  volatile uint64_t sum = 0; /* so that everything is read */
  uint64_t bytes = 0;
  const char *key;
  json_t *value;
  for (int64_t i = 0; i < t->n; i++) {
    const struct moe__entry *e = &t->entries[i];
    promise(i == 0 || strcmp(t->entries[i - 1].name, e->name) < 0, "names are not in order");
    promise(e->data >= data && e->bytes <= size && (size_t)(e->data - data) <= size - e->bytes, "data outside");
    promise(e->dtype == MOE_NONE || strcmp(e->dtype_name, moe__safetensors_dtype(e->dtype)) == 0, "a dtype's name");
    uint64_t count = moe_dtype_size(e->dtype);
    for (int64_t d = 0; d < e->rank && d < MOE_RANK_MAX; d++) count *= (uint64_t)e->shape[d];
    promise(e->dtype == MOE_NONE || e->rank > MOE_RANK_MAX || count == e->bytes, "a size");
    bytes += e->bytes;
    sum += moe__hash(e->data, e->bytes) + strlen(moe__shape_text(e->rank, e->shape).text);
  }
  promise(bytes <= size, "tensors overlap");
  json_object_foreach(t->metadata, key, value)
  {
    sum += strlen(json_string_value(value));
  }
  moe__table_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  struct moe__table t;
  json_t *map, *metadata;
  count(1);
  if (moe__safetensors_parse(&t, data, size) == MOE_OK) check_table(&t, data, size);
  else promise(!t.entries && !t.text && !t.metadata && !t.stray, "something is left of a failed parse");
  if (moe__raw_parse(&t, data, size) == MOE_OK) check_table(&t, data, size);
  else promise(!t.entries && !t.text, "something is left of a failed parse");
  if (moe__index_parse(&map, &metadata, data, size) == MOE_OK) {
    const char *key;
    json_t *value;
    json_object_foreach(map, key, value)
    {
      promise(!strchr(json_string_value(value), '/'), "a file elsewhere");
    }
    json_object_foreach(metadata, key, value)
    {
      promise(json_is_string(value), "metadata that are no text");
    }
    json_decref(map);
    json_decref(metadata);
  } else promise(!map && !metadata, "something is left of a failed parse");
  promise(live == 0, "memory is left");
  promise(most <= 128 * size + 16384, "memory out of proportion");
  count(0);
  return 0;
}
