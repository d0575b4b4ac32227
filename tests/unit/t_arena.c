/* t_arena.c - measuring and laying out are one walk: equal sizes, aligned places, and sizes that do not wrap. */
#include "moe_test.h"

#include "core/arena.h"

static unsigned char memory[1];

static moe_span span_of(uint64_t offset, uint64_t bytes)
{
  return (moe_span){ memory, offset, bytes };
}

/* An odd mixture. */
static void lay(struct moe__arena *a, moe_tensor out[6])
{
  out[0] = moe__arena_flat(a, MOE_U8, 1);
  out[1] = moe__arena_matrix(a, MOE_F64, 7, 11);
  out[2] = moe__arena_flat(a, MOE_F32, 0);
  out[3] = moe__arena_tensor(a, MOE_BF16, 3, (const int64_t[]){ 3, 5, 7 });
  out[4] = moe__arena_flat(a, MOE_I32, 64); /* 256 bytes to the byte */
  out[5] = moe__arena_flat(a, MOE_I64, 1);
}

static void measure_equals_the_run(void **state)
{
  struct moe__arena measured = moe__arena_over((moe_span){ 0 }), run = moe__arena_over(span_of(512, 4096));
  moe_tensor none[6], real[6];
  (void)state;
  lay(&measured, none);
  lay(&run, real);
  assert_int_equal(measured.used, run.used);
  assert_int_equal(run.used, 256 + 768 + 0 + 256 + 256 + 256);
  for (int i = 0; i < 6; i++) {
    assert_null(none[i].handle);
    assert_ptr_equal(real[i].handle, memory);
    assert_int_equal(real[i].offset, none[i].offset + 512);
    assert_int_equal(none[i].dtype, real[i].dtype);
    assert_memory_equal(none[i].shape, real[i].shape, sizeof real[i].shape);
    assert_memory_equal(none[i].stride, real[i].stride, sizeof real[i].stride);
  }
  OK(moe__arena_check(&run, "f", "scratch"));
}

static void tensors_are_aligned_packed_and_apart(void **state)
{
  struct moe__arena a = moe__arena_over(span_of(256, 1 << 20));
  moe_tensor t[6];
  uint64_t end = 256;
  (void)state;
  lay(&a, t);
  for (int i = 0; i < 6; i++) {
    assert_int_equal(t[i].offset % MOE__ALIGN, 0);
    assert_true(moe_tensor_is_packed(&t[i]));
    assert_true(t[i].offset >= end);
    end = t[i].offset + moe_tensor_extent(&t[i]);
  }
  assert_int_equal(t[1].shape[0], 7);
  assert_int_equal(t[1].stride[0], 11);
  assert_int_equal(t[3].rank, 3);
  assert_int_equal(t[3].stride[0], 35);
  assert_true(end <= 256 + a.used);
}

static void too_small_by_one_byte(void **state)
{
  struct moe__arena a = moe__arena_over(span_of(0, 1791));
  moe_tensor t[6];
  (void)state;
  lay(&a, t);
  assert_int_equal(a.used, 1792);
  FAILS(MOE_ERR_TOO_SMALL, "f: scratch has 1791 bytes, 1792 wanted", moe__arena_check(&a, "f", "scratch"));
  a.span.bytes = 1792;
  OK(moe__arena_check(&a, "f", "scratch"));
}

static void absent_and_misplaced_spans(void **state)
{
  struct moe__arena a = moe__arena_over((moe_span){ NULL, 0, 4096 });
  (void)state;
  OK(moe__arena_check(&a, "f", "saved")); /* nothing wanted, nothing needed */
  (void)moe__arena_flat(&a, MOE_F32, 1);
  FAILS(MOE_ERR_INVALID, "f: saved is not given, 256 bytes wanted", moe__arena_check(&a, "f", "saved"));
  a = moe__arena_over(span_of(8, 4096));
  (void)moe__arena_flat(&a, MOE_F32, 1);
  FAILS(MOE_ERR_INVALID, "offset 8", moe__arena_check(&a, "f", "saved"));
  a = moe__arena_over(span_of(16, 4096));
  (void)moe__arena_flat(&a, MOE_F32, 1);
  OK(moe__arena_check(&a, "f", "saved"));
}

static void sizes_saturate(void **state)
{
  static const int64_t shapes[][2] = {
    { INT64_MAX, 1 },                       /* times 4 bytes */
    { (int64_t)1 << 31, (int64_t)1 << 31 }, /* 2^62 elements */
    { INT64_MAX, INT64_MAX },               /* the count itself */
    { -1, 4 },                              /* no size at all */
    { ((int64_t)1 << 62) - 1, 4 },          /* just below 2^64 bytes: rounding up would wrap */
  };
  (void)state;
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    struct moe__arena a = moe__arena_over(span_of(0, UINT64_MAX));
    (void)moe__arena_flat(&a, MOE_F32, 1);
    (void)moe__arena_matrix(&a, MOE_F32, shapes[i][0], shapes[i][1]);
    assert_true(a.used > INT64_MAX);
    (void)moe__arena_flat(&a, MOE_F32, 1); /* stays there */
    (void)moe__arena_flat(&a, MOE_F32, 0);
    assert_true(a.used > INT64_MAX);
    FAILS(MOE_ERR_INVALID, "f: scratch would need more than 2^63-1 bytes", moe__arena_check(&a, "f", "scratch"));
  }
  struct moe__arena a = moe__arena_over((moe_span){ 0 });
  for (int i = 0; i < 8; i++) (void)moe__arena_flat(&a, MOE_U8, (int64_t)1 << 61); /* each alone is fine */
  assert_int_equal(a.used, UINT64_MAX);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(measure_equals_the_run), cmocka_unit_test(tensors_are_aligned_packed_and_apart),
    cmocka_unit_test(too_small_by_one_byte),  cmocka_unit_test(absent_and_misplaced_spans),
    cmocka_unit_test(sizes_saturate),
  };
  return TEST_MAIN(tests);
}
