/* t_status.c - status texts, the last error of each thread, versions, and the rules of structs that grow. */
#include "moe_test.h"

#include "core/status.h"
#include "fake.h"

#include <pthread.h>

/* ---- texts ------------------------------------------------------------------------------------------------------- */
static void every_status_has_its_own_text(void **state)
{
  static const moe_status all[] = {
#define XX(name, value, text) MOE_##name,
    MOE_STATUS_MAP(XX)
#undef XX
  };
  const int n = (int)(sizeof all / sizeof all[0]);
  (void)state;
  assert_string_equal(moe_strerror(MOE_OK), "success");
  for (int i = 0; i < n; i++) {
    assert_true(strlen(moe_strerror(all[i])) > 0);
    assert_string_not_equal(moe_strerror(all[i]), "unknown status");
    assert_true(i == 0 || all[i] < 0);
    for (int k = 0; k < i; k++) {
      assert_true(all[i] != all[k]);
      assert_string_not_equal(moe_strerror(all[i]), moe_strerror(all[k]));
    }
  }
  assert_string_equal(moe_strerror((moe_status)-1000), "unknown status");
  assert_string_equal(moe_strerror((moe_status)1), "unknown status");
  assert_string_equal(moe_strerror(MOE_STATUS_FORCE_INT), "unknown status");
}

static void version_is_that_of_the_header(void **state)
{
  char text[32];
  (void)state;
  assert_int_equal(moe_version(), MOE_VERSION_HEX);
  snprintf(text, sizeof text, "%d.%d.%d", MOE_VERSION_MAJOR, MOE_VERSION_MINOR, MOE_VERSION_PATCH);
  assert_string_equal(moe_version_string(), text);
}

/* ---- the last error ---------------------------------------------------------------------------------------------- */
struct thread_result {
  char before[64], after[256];
  pthread_barrier_t *both_failed;
};

static void *fail_in_a_thread(void *arg)
{
  struct thread_result *r = arg;
  snprintf(r->before, sizeof r->before, "%s", moe_last_error());
  (void)moe__fail(MOE_ERR_INVALID, "thread %p", arg);
  pthread_barrier_wait(r->both_failed);
  snprintf(r->after, sizeof r->after, "%s", moe_last_error());
  return NULL;
}

static void last_error_belongs_to_its_thread(void **state)
{
  pthread_t threads[4];
  pthread_barrier_t barrier;
  struct thread_result results[4];
  (void)state;
  (void)moe__fail(MOE_ERR_INVALID, "of the first thread");
  pthread_barrier_init(&barrier, NULL, 4);
  for (int i = 0; i < 4; i++) {
    results[i].both_failed = &barrier;
    assert_int_equal(pthread_create(&threads[i], NULL, fail_in_a_thread, &results[i]), 0);
  }
  for (int i = 0; i < 4; i++) {
    char want[64];
    pthread_join(threads[i], NULL);
    snprintf(want, sizeof want, "thread %p", (void *)&results[i]);
    assert_string_equal(results[i].before, "");
    assert_string_equal(results[i].after, want);
  }
  pthread_barrier_destroy(&barrier);
  assert_string_equal(moe_last_error(), "of the first thread");
}

static void last_error_is_one_line_of_the_caller(void **state)
{
  moe_context *ctx = (moe_context *)&ctx;
  (void)state;
  FAILS(MOE_ERR_INVALID, "moe_context_create: ",
        moe_context_create(&ctx, &(moe_context_desc){ .size = sizeof(moe_context_desc), .device = "abacus" }));
  assert_null(strchr(moe_last_error(), '\n'));
  assert_non_null(strstr(moe_last_error(), "abacus"));
  assert_null(ctx);
}

static void last_error_may_quote_itself_and_be_cut(void **state)
{
  char long_text[4000];
  (void)state;
  memset(long_text, 'x', sizeof long_text - 1);
  long_text[sizeof long_text - 1] = 0;
  (void)moe__fail(MOE_ERR_BACKEND, "inner");
  assert_int_equal(moe__fail_in(MOE_ERR_BACKEND, "outer"), MOE_ERR_BACKEND);
  assert_string_equal(moe_last_error(), "outer: inner");
  assert_int_equal(moe__fail(MOE_ERR_BACKEND, "%s", long_text), MOE_ERR_BACKEND);
  assert_true(strlen(moe_last_error()) > 500 && strlen(moe_last_error()) < sizeof long_text);
  moe__clear_error();
  assert_string_equal(moe_last_error(), "");
}

static void success_leaves_the_last_error(void **state)
{
  moe_tensor t;
  moe_span span = { &t, 0, 64 };
  (void)state;
  (void)moe__fail(MOE_ERR_INVALID, "from before");
  OK(moe_tensor_packed(&t, span, MOE_F32, 1, (const int64_t[]){ 4 }));
  assert_string_equal(moe_last_error(), "from before");
}

/* ---- structs that grow ------------------------------------------------------------------------------------------- */
/* The library's struct, and what callers compiled with an older and with a newer header have. */
struct now {
  uint64_t size;
  int64_t a, b;
};
struct older {
  uint64_t size;
  int64_t a;
};
struct newer {
  uint64_t size;
  int64_t a, b, c, d;
};

static void input_of_a_newer_caller(void **state)
{
  struct newer given = { sizeof given, 1, 2, 0, 0 };
  struct now own = { 0 };
  (void)state;
  OK(moe__struct_in(&own, sizeof own, &given, "f", "desc"));
  assert_int_equal(own.size, sizeof own);
  assert_int_equal(own.a, 1);
  assert_int_equal(own.b, 2);
  for (int byte = 0; byte < 16; byte++) { /* anything in the unknown tail */
    struct now before = own;
    given.c = given.d = 0;
    ((unsigned char *)&given)[offsetof(struct newer, c) + (size_t)byte] = 0x80;
    FAILS(MOE_ERR_VERSION, "f: desc sets byte ", moe__struct_in(&own, sizeof own, &given, "f", "desc"));
    assert_memory_equal(&own, &before, sizeof own);
  }
}

static void input_of_an_older_caller(void **state)
{
  struct older *given = malloc(sizeof *given); /* not a byte more */
  struct now own = { 9, 9, 9 };
  (void)state;
  assert_non_null(given);
  *given = (struct older){ sizeof *given, 7 };
  OK(moe__struct_in(&own, sizeof own, given, "f", "desc"));
  assert_int_equal(own.size, sizeof own);
  assert_int_equal(own.a, 7);
  assert_int_equal(own.b, 0);
  free(given);
}

static void input_that_no_init_made(void **state)
{
  static const uint64_t bad[] = { 0, 4, 7, 12, 17, sizeof(struct now) + 1, (uint64_t)1 << 40, UINT64_MAX };
  struct now own = { 1, 2, 3 }, before = own;
  (void)state;
  FAILS(MOE_ERR_INVALID, "f: desc is NULL", moe__struct_in(&own, sizeof own, NULL, "f", "desc"));
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    struct now given = { bad[i], 4, 5 };
    FAILS(MOE_ERR_INVALID, "_init", moe__struct_in(&own, sizeof own, &given, "f", "desc"));
    assert_memory_equal(&own, &before, sizeof own);
  }
}

static void output_is_written_up_to_the_smaller_size(void **state)
{
  const struct now own = { sizeof own, 1, 2 };
  struct newer newer = { sizeof newer, 9, 9, 9, 9 };
  struct older *older = malloc(sizeof *older);
  uint64_t only_size = 8, bad[3] = { 12, 9, 9 };
  (void)state;
  OK(moe__struct_out(&newer, &own, sizeof own, "f", "out"));
  assert_int_equal(newer.size, sizeof newer);
  assert_int_equal(newer.a, 1);
  assert_int_equal(newer.b, 2);
  assert_int_equal(newer.c, 9);
  assert_int_equal(newer.d, 9);
  assert_non_null(older);
  older->size = sizeof *older;
  OK(moe__struct_out(older, &own, sizeof own, "f", "out"));
  assert_int_equal(older->size, sizeof *older);
  assert_int_equal(older->a, 1);
  free(older);
  OK(moe__struct_out(&only_size, &own, sizeof own, "f", "out"));
  assert_int_equal(only_size, 8);
  FAILS(MOE_ERR_INVALID, "f: out is NULL", moe__struct_out(NULL, &own, sizeof own, "f", "out"));
  FAILS(MOE_ERR_INVALID, "_init", moe__struct_out(bad, &own, sizeof own, "f", "out"));
  bad[0] = 0;
  FAILS(MOE_ERR_INVALID, "_init", moe__struct_out(bad, &own, sizeof own, "f", "out"));
  assert_int_equal(bad[1], 9);
}

static void *no_memory(void *user, uint64_t bytes)
{
  (void)user;
  (void)bytes;
  return NULL;
}

/* The same rules through a public function. */
static void public_structs_grow(void **state)
{
  struct {
    moe_context_desc known;
    int64_t later;
  } input = { .known = moe_context_desc_init() };
  struct {
    moe_device_info known;
    int64_t later;
  } output = { .known = moe_device_info_init(), .later = 77 };
  moe_context *ctx = (moe_context *)&ctx;
  (void)state;
  input.known.size = sizeof input;
  input.known.device = "abacus";
  FAILS(MOE_ERR_INVALID, "abacus", moe_context_create(&ctx, &input.known));
  input.later = 1;
  FAILS(MOE_ERR_VERSION, "moe_context_create: desc sets byte", moe_context_create(&ctx, &input.known));
  assert_null(ctx);
  input.known.size = 16; /* up to `device`; the rest is not looked at */
  input.known.device = "sundial";
  input.known.alloc = no_memory; /* without release: refused where it is seen */
  FAILS(MOE_ERR_INVALID, "sundial", moe_context_create(&ctx, &input.known));

  fake_reset();
  ctx = fake_open();
  assert_non_null(ctx);
  output.known.size = sizeof output;
  OK(moe_context_info(ctx, &output.known));
  assert_string_equal(output.known.id, "fake:0");
  assert_int_equal(output.known.size, sizeof output);
  assert_int_equal(output.later, 77);
  memset(&output, 'x', sizeof output);
  output.known.size = 8 + sizeof output.known.backend;
  OK(moe_context_info(ctx, &output.known));
  assert_string_equal(output.known.backend, "fake");
  assert_int_equal(output.known.id[0], 'x');
  moe_context_free(ctx);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_status_has_its_own_text),
    cmocka_unit_test(version_is_that_of_the_header),
    cmocka_unit_test(last_error_belongs_to_its_thread),
    cmocka_unit_test(last_error_is_one_line_of_the_caller),
    cmocka_unit_test(last_error_may_quote_itself_and_be_cut),
    cmocka_unit_test(success_leaves_the_last_error),
    cmocka_unit_test(input_of_a_newer_caller),
    cmocka_unit_test(input_of_an_older_caller),
    cmocka_unit_test(input_that_no_init_made),
    cmocka_unit_test(output_is_written_up_to_the_smaller_size),
    cmocka_unit_test(public_structs_grow),
  };
  return TEST_MAIN(tests);
}
