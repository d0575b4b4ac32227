/* tape_fixture.h - what the tests of the tape share: a device and a queue for all of them; for each a tape, and device
   memory of known seed. */
#ifndef MOE_TEST_TAPE_FIXTURE_H
#define MOE_TEST_TAPE_FIXTURE_H

#include "moe_test.h"
#include "../ref/device.h"

static moe_context *ctx;
static moe_queue *q;
static moe_tape *tape;
static struct t_memory m;
static const moe_value none;

static inline int setup(void **state)
{
  (void)state;
  t_memory_init(&m, ctx, q, 1);
  return moe_tape_create(&tape, q, NULL) != MOE_OK;
}
static inline int teardown(void **state)
{
  uint64_t bits;
  (void)state;
  moe_tape_free(tape);
  t_memory_free(&m);
  return moe_health_read(q, &bits) != MOE_OK;
}
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#define NEEDS_FP64                                                                                                     \
  do {                                                                                                                 \
    if (!test_has_fp64(ctx)) skip();                                                                                   \
  } while (0)

static inline double number_of(moe_value v)
{
  double x = NAN;
  OK(moe_tape_read(tape, v, &x, 1));
  return x;
}
/* A loss that is not linear in y. */
static inline moe_value square(moe_value y)
{
  return moe_tape_sum(tape, moe_tape_mul(tape, y, y));
}

#endif
