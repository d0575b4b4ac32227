/* t_tensor.c - dtypes, packed tensors and views: strides, extents, and sizes around 2^63. */
#include "moe_test.h"

#include "core/convert.h"
#include "core/tensor.h"

#define HUGE_SPAN ((moe_span){ &place, 0, UINT64_MAX })
static int place;

#define assert_shape(t, ...) assert_list((t).shape, (t).rank, (const int64_t[]){ __VA_ARGS__ })
#define assert_stride(t, ...) assert_list((t).stride, (t).rank, (const int64_t[]){ __VA_ARGS__ })
static void assert_list(const int64_t *got, int rank, const int64_t *want)
{
  for (int d = 0; d < rank; d++) assert_int_equal(got[d], want[d]);
}

static void dtypes(void **state)
{
  static const struct {
    int64_t dtype;
    uint64_t size;
    const char *name;
    int is_float;
  } all[] = {
    { MOE_F64, 8, "f64", 1 },       { MOE_F32, 4, "f32", 1 },
    { MOE_BF16, 2, "bf16", 1 },     { MOE_F16, 2, "f16", 1 },
    { MOE_F8E4M3, 1, "f8e4m3", 0 }, { MOE_F8E5M2, 1, "f8e5m2", 0 },
    { MOE_I64, 8, "i64", 0 },       { MOE_I32, 4, "i32", 0 },
    { MOE_U8, 1, "u8", 0 },         { MOE_BOOL, 1, "bool", 0 },
    { MOE_NONE, 0, "?", 0 },        { -1, 0, "?", 0 },
    { MOE_BOOL + 1, 0, "?", 0 },    { INT64_MAX, 0, "?", 0 },
    { INT64_MIN, 0, "?", 0 },       { MOE_F32 + ((int64_t)1 << 32), 0, "?", 0 },
  };
  (void)state;
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    assert_int_equal(moe_dtype_size(all[i].dtype), all[i].size);
    assert_string_equal(moe_dtype_name(all[i].dtype), all[i].name);
    assert_int_equal(moe__is_float(all[i].dtype), all[i].is_float);
  }
}

static void packed(void **state)
{
  moe_span span = { &place, 48, 1000 };
  moe_tensor t;
  (void)state;
  OK(moe_tensor_packed(&t, span, MOE_F32, 3, (const int64_t[]){ 2, 3, 5 }));
  assert_ptr_equal(t.handle, &place);
  assert_int_equal(t.offset, 48);
  assert_int_equal(t.dtype, MOE_F32);
  assert_int_equal(t.rank, 3);
  assert_shape(t, 2, 3, 5);
  assert_stride(t, 15, 5, 1);
  for (int d = 3; d < MOE_RANK_MAX; d++) assert_true(t.shape[d] == 0 && t.stride[d] == 0);
  assert_int_equal(moe_tensor_count(&t), 30);
  assert_int_equal(moe_tensor_extent(&t), 120);
  assert_true(moe_tensor_is_packed(&t));

  OK(moe_tensor_packed(&t, span, MOE_F32, 2, (const int64_t[]){ 5, 0 }));
  assert_true(moe_tensor_is_packed(&t));
  OK(moe_tensor_packed(&t, span, MOE_F32, 2, t.shape)); /* its own shape */
  assert_true(t.shape[0] == 5 && t.shape[1] == 0);

  OK(moe_tensor_packed(&t, span, MOE_F64, 0, NULL));
  assert_int_equal(moe_tensor_count(&t), 1);
  assert_int_equal(moe_tensor_extent(&t), 8);
  assert_true(moe_tensor_is_packed(&t));

  OK(moe_tensor_packed(&t, span, MOE_U8, 6, (const int64_t[]){ 1, 2, 1, 3, 1, 4 }));
  assert_stride(t, 24, 12, 12, 4, 4, 1);
  assert_int_equal(moe_tensor_extent(&t), 24);
}

static void packed_of_nothing(void **state)
{
  moe_tensor t;
  (void)state;
  OK(moe_tensor_packed(&t, (moe_span){ 0 }, MOE_F32, 2, (const int64_t[]){ 0, 7 }));
  assert_int_equal(moe_tensor_count(&t), 0);
  assert_int_equal(moe_tensor_extent(&t), 0);
  assert_true(moe_tensor_is_packed(&t));
  OK(moe_tensor_packed(&t, (moe_span){ 0 }, MOE_F32, 3, (const int64_t[]){ 4, 7, 0 }));
  assert_int_equal(moe_tensor_extent(&t), 0);
}

static void packed_fits_to_the_byte(void **state)
{
  moe_span span = { &place, 0, 119 };
  moe_tensor t;
  (void)state;
  FAILS(MOE_ERR_TOO_SMALL, "needs 120 bytes, the span has 119",
        moe_tensor_packed(&t, span, MOE_F32, 2, (const int64_t[]){ 5, 6 }));
  assert_null(t.handle);
  span.bytes = 120;
  OK(moe_tensor_packed(&t, span, MOE_F32, 2, (const int64_t[]){ 5, 6 }));
}

static void packed_refuses(void **state)
{
  static const int64_t shape[7] = { 1, 1, 1, 1, 1, 1, 1 }, negative[2] = { 3, -1 };
  static const struct {
    int64_t dtype, rank;
    const int64_t *shape;
    uint64_t offset;
    const char *text;
  } bad[] = {
    { MOE_NONE, 1, shape, 0, "dtype 0" },
    { MOE_BOOL + 1, 1, shape, 0, "dtype 11" },
    { -3, 1, shape, 0, "dtype -3" },
    { MOE_F32, -1, shape, 0, "rank -1" },
    { MOE_F32, 7, shape, 0, "rank 7" },
    { MOE_F32, INT64_MAX, shape, 0, "rank" },
    { MOE_F32, 2, negative, 0, "shape[1] is -1" },
    { MOE_F32, 1, NULL, 0, "no shape" },
    { MOE_F64, 1, shape, 4, "offset 4" },
    { MOE_F32, 1, shape, 2, "offset 2" },
    { MOE_BF16, 1, shape, 1, "offset 1" },
    { MOE_I64, 1, shape, 12, "offset 12" },
  };
  (void)state;
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    moe_tensor t;
    memset(&t, 'x', sizeof t);
    FAILS(MOE_ERR_INVALID, bad[i].text,
          moe_tensor_packed(&t, (moe_span){ &place, bad[i].offset, 64 }, bad[i].dtype, bad[i].rank, bad[i].shape));
    assert_null(t.handle);
  }
  FAILS(MOE_ERR_INVALID, "out is NULL", moe_tensor_packed(NULL, HUGE_SPAN, MOE_F32, 1, shape));
}

static void sizes_around_2_to_the_63(void **state)
{
  const int64_t big = (int64_t)1 << 31;
  moe_tensor t;
  (void)state;
  /* 2^62 elements of a byte, of two: 2^63 is too many. */
  OK(moe_tensor_packed(&t, HUGE_SPAN, MOE_U8, 2, (const int64_t[]){ big, big }));
  assert_int_equal(moe_tensor_extent(&t), (uint64_t)1 << 62);
  FAILS(MOE_ERR_INVALID, "2^63-1", moe_tensor_packed(&t, HUGE_SPAN, MOE_BF16, 2, (const int64_t[]){ big, big }));
  assert_null(t.handle);
  OK(moe_tensor_packed(&t, HUGE_SPAN, MOE_BF16, 2, (const int64_t[]){ big, big - 1 }));
  FAILS(MOE_ERR_INVALID, "2^63-1", moe_tensor_packed(&t, HUGE_SPAN, MOE_U8, 3, (const int64_t[]){ big, big, 2 }));
  /* A product that comes out small again in 64 bits. */
  FAILS(MOE_ERR_INVALID, "2^63-1", moe_tensor_packed(&t, HUGE_SPAN, MOE_U8, 3, (const int64_t[]){ big, big, 4 }));
  FAILS(MOE_ERR_INVALID, "2^63-1", moe_tensor_packed(&t, HUGE_SPAN, MOE_F64, 1, (const int64_t[]){ (int64_t)1 << 61 }));
  OK(moe_tensor_packed(&t, HUGE_SPAN, MOE_U8, 1, (const int64_t[]){ INT64_MAX }));
  assert_int_equal(moe_tensor_extent(&t), INT64_MAX);
  FAILS(MOE_ERR_INVALID, "2^63-1", moe_tensor_packed(&t, HUGE_SPAN, MOE_F32, 1, (const int64_t[]){ INT64_MAX }));
  /* An extent of 0 does not hide strides that overflow. */
  FAILS(MOE_ERR_INVALID, "2^63-1", moe_tensor_packed(&t, HUGE_SPAN, MOE_U8, 3, (const int64_t[]){ 0, INT64_MAX, 3 }));
  /* DeepSeek-V3's up-projections: more than 2^31 elements. */
  OK(moe_tensor_packed(&t, HUGE_SPAN, MOE_BF16, 3, (const int64_t[]){ 256, 4096, 7168 }));
  assert_int_equal(moe_tensor_count(&t), (int64_t)7516192768);
  assert_int_equal(t.stride[0], 29360128);
  assert_int_equal(moe_tensor_extent(&t), (uint64_t)15032385536);
}

static void products_refuse_overflow(void **state)
{
  int64_t out = 5;
  (void)state;
  OK(moe__mul(&out, (int64_t)1 << 31, (int64_t)1 << 31));
  assert_int_equal(out, (int64_t)1 << 62);
  assert_int_equal(moe__mul(&out, (int64_t)1 << 32, (int64_t)1 << 31), MOE_ERR_INVALID);
  assert_int_equal(moe__mul(&out, -1, 1), MOE_ERR_INVALID);
  assert_int_equal(moe__mul(&out, 1, -1), MOE_ERR_INVALID);
  assert_int_equal(moe__mul(&out, INT64_MIN, INT64_MIN), MOE_ERR_INVALID);
  OK(moe__mul(&out, 0, INT64_MAX));
  assert_int_equal(out, 0);
}

static moe_tensor matrix(int64_t dtype, int64_t rows, int64_t cols)
{
  moe_tensor t;
  OK(moe_tensor_packed(&t, HUGE_SPAN, dtype, 2, (const int64_t[]){ rows, cols }));
  return t;
}

static void slices(void **state)
{
  moe_tensor t = matrix(MOE_F32, 6, 10), v;
  (void)state;
  OK(moe_tensor_slice(&v, &t, 0, 2, 5));
  assert_shape(v, 3, 10);
  assert_stride(v, 10, 1);
  assert_int_equal(v.offset, 80);
  assert_true(moe_tensor_is_packed(&v));
  assert_int_equal(moe_tensor_extent(&v), 120);
  OK(moe_tensor_slice(&v, &v, 1, 4, 10)); /* a slice of a slice, in place */
  assert_shape(v, 3, 6);
  assert_int_equal(v.offset, 96);
  assert_false(moe_tensor_is_packed(&v));
  assert_int_equal(moe_tensor_extent(&v), 4 * (2 * 10 + 6));
  OK(moe_tensor_slice(&v, &t, 0, 6, 6));
  assert_int_equal(moe_tensor_count(&v), 0);
  assert_int_equal(moe_tensor_extent(&v), 0);
  OK(moe_tensor_slice(&v, &t, 1, 0, 10));
  assert_memory_equal(&v, &t, sizeof v);
}

static void every_second_row_is_an_interleaved_half(void **state)
{
  moe_tensor t, gate, up, v;
  (void)state;
  OK(moe_tensor_packed(&t, HUGE_SPAN, MOE_BF16, 3, (const int64_t[]){ 4, 6, 5 })); /* [E,2F,D] */
  OK(moe_tensor_every(&gate, &t, 1, 0, 2));
  OK(moe_tensor_every(&up, &t, 1, 1, 2));
  assert_shape(gate, 4, 3, 5);
  assert_shape(up, 4, 3, 5);
  assert_stride(up, 30, 10, 1);
  assert_int_equal(gate.offset, 0);
  assert_int_equal(up.offset, 10);
  assert_int_equal(moe_tensor_extent(&up), 2 * (3 * 30 + 2 * 10 + 5));
  OK(moe_tensor_every(&v, &t, 1, 0, 4)); /* rounds up: rows 0 and 4 */
  assert_shape(v, 4, 2, 5);
  OK(moe_tensor_every(&v, &t, 1, 5, 100));
  assert_shape(v, 4, 1, 5);
  OK(moe_tensor_every(&v, &t, 1, 6, 2));
  assert_shape(v, 4, 0, 5);
  OK(moe_tensor_every(&v, &t, 1, 0, INT64_MAX)); /* the first row alone */
  assert_shape(v, 4, 1, 5);
  assert_int_equal(moe_tensor_extent(&v), 2 * (3 * 30 + 5));
}

static void transposed(void **state)
{
  moe_tensor t = matrix(MOE_F32, 6, 10), v;
  (void)state;
  OK(moe_tensor_transpose(&v, &t, 0, 1));
  assert_shape(v, 10, 6);
  assert_stride(v, 1, 10);
  assert_false(moe_tensor_is_packed(&v));
  assert_int_equal(moe_tensor_extent(&v), moe_tensor_extent(&t));
  OK(moe_tensor_transpose(&v, &v, 1, 0));
  assert_memory_equal(&v, &t, sizeof v);
  OK(moe_tensor_transpose(&v, &t, 1, 1));
  assert_memory_equal(&v, &t, sizeof v);
}

static void views_refuse(void **state)
{
  moe_tensor t = matrix(MOE_F32, 6, 10), v, before;
  memset(&v, 'x', sizeof v);
  before = v;
  (void)state;
  FAILS(MOE_ERR_INVALID, "dimension 2", moe_tensor_slice(&v, &t, 2, 0, 1));
  FAILS(MOE_ERR_INVALID, "dimension -1", moe_tensor_slice(&v, &t, -1, 0, 1));
  FAILS(MOE_ERR_INVALID, "[-1, 3)", moe_tensor_slice(&v, &t, 0, -1, 3));
  FAILS(MOE_ERR_INVALID, "[4, 3)", moe_tensor_slice(&v, &t, 0, 4, 3));
  FAILS(MOE_ERR_INVALID, "[0, 7)", moe_tensor_slice(&v, &t, 0, 0, 7));
  FAILS(MOE_ERR_INVALID, "outside", moe_tensor_slice(&v, &t, 0, INT64_MAX, INT64_MAX));
  FAILS(MOE_ERR_INVALID, "NULL", moe_tensor_slice(NULL, &t, 0, 0, 1));
  FAILS(MOE_ERR_INVALID, "NULL", moe_tensor_slice(&v, NULL, 0, 0, 1));
  FAILS(MOE_ERR_INVALID, "dimension 2", moe_tensor_every(&v, &t, 2, 0, 1));
  FAILS(MOE_ERR_INVALID, "step 0", moe_tensor_every(&v, &t, 0, 0, 0));
  FAILS(MOE_ERR_INVALID, "step -2", moe_tensor_every(&v, &t, 0, 0, -2));
  FAILS(MOE_ERR_INVALID, "begin 7", moe_tensor_every(&v, &t, 0, 7, 1));
  FAILS(MOE_ERR_INVALID, "begin -1", moe_tensor_every(&v, &t, 0, -1, 1));
  FAILS(MOE_ERR_INVALID, "NULL", moe_tensor_every(NULL, &t, 0, 0, 1));
  FAILS(MOE_ERR_INVALID, "dimension 3", moe_tensor_transpose(&v, &t, 0, 3));
  FAILS(MOE_ERR_INVALID, "dimension -1", moe_tensor_transpose(&v, &t, -1, 0));
  FAILS(MOE_ERR_INVALID, "NULL", moe_tensor_transpose(&v, NULL, 0, 1));
  assert_memory_equal(&v, &before, sizeof v);
}

static void packed_ignores_strides_of_single_elements(void **state)
{
  moe_tensor t = matrix(MOE_F32, 1, 10);
  (void)state;
  t.stride[0] = 12345;
  assert_true(moe_tensor_is_packed(&t));
  t = matrix(MOE_F32, 10, 1);
  t.stride[1] = 0;
  assert_true(moe_tensor_is_packed(&t));
  t = matrix(MOE_F32, 2, 2);
  t.stride[0] = 3;
  assert_false(moe_tensor_is_packed(&t));
  t = matrix(MOE_U8, 1, (int64_t)1 << 62);
  t.rank = 3;
  t.shape[2] = t.stride[1] = 4;
  t.stride[2] = 1;
  assert_false(moe_tensor_is_packed(&t)); /* more than 2^63-1 elements */
}

static void a_broadcast_is_one_element_long(void **state)
{
  moe_tensor t = matrix(MOE_F32, 1000, 1000);
  (void)state;
  t.stride[0] = t.stride[1] = 0;
  assert_int_equal(moe_tensor_extent(&t), 4);
  assert_int_equal(moe_tensor_count(&t), 1000000);
  t.stride[1] = 1;
  assert_int_equal(moe_tensor_extent(&t), 4000);
}

static void wanted_tensors(void **state)
{
  static const int64_t shape[2] = { 6, 10 }, empty[2] = { 0, 10 };
  moe_tensor t = matrix(MOE_F32, 6, 10), bad;
  (void)state;
  OK(moe__want("f", "x", &t, MOE_F32, 2, shape));
  OK(moe__want("f", "x", &t, 0, 2, shape));
  FAILS(MOE_ERR_INVALID, "f: x is f32, bf16 is wanted", moe__want("f", "x", &t, MOE_BF16, 2, shape));
  FAILS(MOE_ERR_INVALID, "f: x has rank 2, 1 is wanted", moe__want("f", "x", &t, MOE_F32, 1, shape));
  FAILS(MOE_ERR_INVALID, "extent 6 in dimension 0, 5 is wanted",
        moe__want("f", "x", &t, MOE_F32, 2, (const int64_t[]){ 5, 10 }));
  bad = t;
  bad.handle = NULL;
  FAILS(MOE_ERR_INVALID, "f: x is not given", moe__want("f", "x", &bad, MOE_F32, 2, shape));
  OK(moe__want("f", "x", &bad, MOE_F32, 2, empty)); /* nothing needs no memory */
  bad = t;
  bad.offset = 2;
  FAILS(MOE_ERR_INVALID, "begins at byte 2", moe__want("f", "x", &bad, MOE_F32, 2, shape));
  bad = t;
  bad.stride[0] = -1;
  FAILS(MOE_ERR_INVALID, "stride -1", moe__want("f", "x", &bad, MOE_F32, 2, shape));
  bad = t;
  bad.dtype = MOE_I32;
  FAILS(MOE_ERR_INVALID, "f64, f32, bf16 or f16", moe__want("f", "x", &bad, 0, 2, shape));
}

static void host_values_as_double(void **state)
{
  static const double f64[] = { -1.5 };
  static const float f32[] = { 0, 0.25f };
  static const uint16_t bf16[] = { 0x3f80, 0xc040, 0x7fc0, 0x7f80 };
  static const uint16_t f16[] = { 0x3c00, 0xc200, 0x7e00, 0xfc00, 0x0001, 0x7bff, 0x8000 };
  static const int64_t i64[] = { -7 };
  static const int32_t i32[] = { INT32_MIN };
  static const uint8_t u8[] = { 255 };
  (void)state;
  assert_near(moe__to_double(f64, MOE_F64, 0), -1.5, 0);
  assert_near(moe__to_double(f32, MOE_F32, 1), 0.25, 0);
  assert_near(moe__to_double(bf16, MOE_BF16, 0), 1, 0);
  assert_near(moe__to_double(bf16, MOE_BF16, 1), -3, 0);
  assert_true(moe__to_double(bf16, MOE_BF16, 2) != moe__to_double(bf16, MOE_BF16, 2));
  assert_true(moe__to_double(bf16, MOE_BF16, 3) > 1e300);
  assert_near(moe__to_double(f16, MOE_F16, 0), 1, 0);
  assert_near(moe__to_double(f16, MOE_F16, 1), -3, 0);
  assert_true(moe__to_double(f16, MOE_F16, 2) != moe__to_double(f16, MOE_F16, 2));
  assert_true(moe__to_double(f16, MOE_F16, 3) < -1e300);
  assert_near(moe__to_double(f16, MOE_F16, 4), 0x1p-24, 0);
  assert_near(moe__to_double(f16, MOE_F16, 5), 65504, 0);
  assert_near(moe__to_double(f16, MOE_F16, 6), 0, 0);
  assert_near(moe__to_double(i64, MOE_I64, 0), -7, 0);
  assert_near(moe__to_double(i32, MOE_I32, 0), -2147483648.0, 0);
  assert_near(moe__to_double(u8, MOE_U8, 0), 255, 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(dtypes),
    cmocka_unit_test(packed),
    cmocka_unit_test(packed_of_nothing),
    cmocka_unit_test(packed_fits_to_the_byte),
    cmocka_unit_test(packed_refuses),
    cmocka_unit_test(sizes_around_2_to_the_63),
    cmocka_unit_test(products_refuse_overflow),
    cmocka_unit_test(slices),
    cmocka_unit_test(every_second_row_is_an_interleaved_half),
    cmocka_unit_test(transposed),
    cmocka_unit_test(views_refuse),
    cmocka_unit_test(packed_ignores_strides_of_single_elements),
    cmocka_unit_test(a_broadcast_is_one_element_long),
    cmocka_unit_test(wanted_tensors),
    cmocka_unit_test(host_values_as_double),
  };
  return TEST_MAIN(tests);
}
