/* t_abi.c - what a program compiled with these headers takes for granted: sizes, first members, values of constants.
   A change that this refuses breaks programs that are already compiled: append, and mind libtool's -version-info. */
#include "moe_test.h"

#include <moe/cuda.h>
#include <moe/dlpack.h>
#include <moe/opencl.h>

/* Structs that grow: size now; 8-byte members or char arrays, `size` first, stamped and zeroed by their init. */
static void structs_that_grow(void **state)
{
  (void)state;
#define GROWS(type, bytes)                                                                                             \
  do {                                                                                                                 \
    type new_ = type##_init();                                                                                         \
    assert_int_equal(sizeof(type), bytes);                                                                             \
    assert_int_equal(sizeof(type) % 8, 0);                                                                             \
    assert_int_equal(_Alignof(type), 8);                                                                               \
    assert_int_equal(offsetof(type, size), 0);                                                                         \
    assert_int_equal(sizeof new_.size, 8);                                                                             \
    assert_int_equal(new_.size, bytes);                                                                                \
    for (size_t i_ = 8; i_ < sizeof new_; i_++) assert_int_equal(((unsigned char *)&new_)[i_], 0);                     \
  } while (0)
  GROWS(moe_context_desc, 64);
  GROWS(moe_device_info, 376);
  GROWS(moe_weights_options, 40);
  GROWS(moe_selection_options, 72);
  GROWS(moe_activation, 48);
  GROWS(moe_router_desc, 48);
  GROWS(moe_experts_desc, 488);
  GROWS(moe_experts_bytes, 24);
  GROWS(moe_experts_io, 1376);
  GROWS(moe_state, 296);
  GROWS(moe_experts_grads, 1096);
  GROWS(moe_layer_desc, 168);
  GROWS(moe_layer_bytes, 48);
  GROWS(moe_layer_param_info, 32);
  GROWS(moe_layer_io, 960);
  GROWS(moe_layer_state, 296);
  GROWS(moe_layer_metrics, 56);
  GROWS(moe_adamw_desc, 200);
  GROWS(moe_adamw_info, 32);
  GROWS(moe_tape_desc, 40);
  GROWS(moe_tape_health_info, 112);
  GROWS(moe_gradcheck_desc, 56);
  GROWS(moe_gradcheck_result, 56);
  GROWS(moe_tape_moe, 432);
  GROWS(moe_function, 64);
  GROWS(moe_checkpoint_entry, 128);
  GROWS(moe_checkpoint_writer_desc, 16);
}

static void structs_that_are_frozen(void **state)
{
  (void)state;
  assert_int_equal(sizeof(moe_tensor), 120);
  assert_int_equal(offsetof(moe_tensor, handle), 0);
  assert_int_equal(offsetof(moe_tensor, offset), 8);
  assert_int_equal(offsetof(moe_tensor, dtype), 16);
  assert_int_equal(offsetof(moe_tensor, rank), 20);
  assert_int_equal(offsetof(moe_tensor, shape), 24);
  assert_int_equal(offsetof(moe_tensor, stride), 72);
  assert_int_equal(sizeof(moe_span), 24);
  assert_int_equal(offsetof(moe_span, handle), 0);
  assert_int_equal(offsetof(moe_span, offset), 8);
  assert_int_equal(offsetof(moe_span, bytes), 16);
  assert_int_equal(sizeof(moe_value), 8);
  assert_int_equal(sizeof(moe_tape_call), 64);
  assert_int_equal(sizeof(moe_status), 4);
  assert_int_equal(MOE_RANK_MAX, 6);
}

static void constants(void **state)
{
  static const struct {
    const char *name;
    int64_t is, was;
  } all[] = {
#define IS(name, value) { #name, name, value }
    IS(MOE_OK, 0),
    IS(MOE_ERR_INVALID, -1),
    IS(MOE_ERR_NO_MEMORY, -2),
    IS(MOE_ERR_NO_DEVICE, -3),
    IS(MOE_ERR_UNSUPPORTED, -4),
    IS(MOE_ERR_BACKEND, -5),
    IS(MOE_ERR_LAUNCH, -6),
    IS(MOE_ERR_BUILD, -7),
    IS(MOE_ERR_TOO_SMALL, -8),
    IS(MOE_ERR_STATE, -9),
    IS(MOE_ERR_NO_DERIVATIVE, -10),
    IS(MOE_ERR_NO_SECOND_DERIVATIVE, -11),
    IS(MOE_ERR_VERSION, -12),
    IS(MOE_ERR_DATA, -13),
    IS(MOE_ERR_IO, -14),
    IS(MOE_ERR_FORMAT, -15),
    IS(MOE_ERR_NOT_FOUND, -16),
    IS(MOE_NONE, 0),
    IS(MOE_F64, 1),
    IS(MOE_F32, 2),
    IS(MOE_BF16, 3),
    IS(MOE_F16, 4),
    IS(MOE_F8E4M3, 5),
    IS(MOE_F8E5M2, 6),
    IS(MOE_I64, 7),
    IS(MOE_I32, 8),
    IS(MOE_U8, 9),
    IS(MOE_BOOL, 10),
    IS(MOE_DEVICE_GPU, 1),
    IS(MOE_DEVICE_CPU, 2),
    IS(MOE_DEVICE_OTHER, 3),
    IS(MOE_HEALTH_ROUTE, 1),
    IS(MOE_HEALTH_ID, 2),
    IS(MOE_HEALTH_OVERFLOW, 4),
    IS(MOE_SOFTMAX, 1),
    IS(MOE_SIGMOID, 2),
    IS(MOE_SOFTMAX_CHOSEN, 3),
    IS(MOE_SQRT_SOFTPLUS, 4),
    IS(MOE_SELECT_SOFTMAX, 1),
    IS(MOE_SELECT_GROUPED_SIGMOID, 2),
    IS(MOE_IDENTITY, 1),
    IS(MOE_RELU, 2),
    IS(MOE_RELU2, 3),
    IS(MOE_GELU, 4),
    IS(MOE_GELU_TANH, 5),
    IS(MOE_SILU, 6),
    IS(MOE_ACT_SIGMOID, 7),
    IS(MOE_AUTO, 0),
    IS(MOE_SCALAR, 1),
    IS(MOE_TENSOR, 2),
    IS(MOE_SERIAL, 0),
    IS(MOE_PLANE, 1),
    IS(MOE_GRAD_INPUT, 1),
    IS(MOE_GRAD_LOGITS, 2),
    IS(MOE_GRAD_GATE, 4),
    IS(MOE_GRAD_UP, 8),
    IS(MOE_GRAD_DOWN, 16),
    IS(MOE_GRAD_GATE_BIAS, 32),
    IS(MOE_GRAD_UP_BIAS, 64),
    IS(MOE_GRAD_DOWN_BIAS, 128),
    IS(MOE_CREATE_GRAPH, 1),
    IS(MOE_ACCUMULATE, 2),
    IS(MOE_DLPACK_READ_ONLY, 1),
    IS(MOE_DLPACK_COPY, 2),
    IS(MOE_CHECKPOINT_CONVERT, 1),
    IS(MOE_CHECKPOINT_PARTIAL, 2),
    IS(MOE_CHECKPOINT_VERIFY, 4),
    IS(MOE_NAMES_LIBMOE, 0),
    IS(MOE_NAMES_MIXTRAL, 1),
    IS(MOE_NAMES_QWEN3, 2),
    IS(MOE_NAMES_OLMOE, 3),
    IS(MOE_NAMES_DEEPSEEK, 4),
    IS(MOE_NAMES_GPT_OSS, 5),
  };
  (void)state;
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
    if (all[i].is != all[i].was)
      fail_msg("%s is %lld, was %lld", all[i].name, (long long)all[i].is, (long long)all[i].was);
}

/* The headers and the library are of one version, and the functions that lend are there whatever was built in. */
static void the_library_answers(void **state)
{
  moe_queue *q = NULL;
  moe_context *ctx = NULL;
  (void)state;
  assert_int_equal(moe_version(), MOE_VERSION_HEX);
  FAILS(MOE_ERR_INVALID, "ctx is NULL", moe_queue_from_cuda(&q, NULL, NULL));
  FAILS(MOE_ERR_INVALID, "ctx is NULL", moe_queue_from_opencl(&q, NULL, NULL));
  FAILS(MOE_ERR_INVALID, "context is NULL", moe_context_from_opencl(&ctx, NULL, NULL, NULL));
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(structs_that_grow),
    cmocka_unit_test(structs_that_are_frozen),
    cmocka_unit_test(constants),
    cmocka_unit_test(the_library_answers),
  };
  return TEST_MAIN(tests);
}
