/* moe_test.h - what every CMocka program needs: the headers in their order, checks that name what went wrong,
   and the device that MOE_TEST_DEVICE asks for.

   CMocka's exit status is the number of failures, so a program ends with TEST_MAIN; its float comparison lets NaN
   pass, so use assert_near. */
#ifndef MOE_TEST_H
#define MOE_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <moe/moe.h>

#include <stdio.h>
#include <stdlib.h>

/* The call succeeds. */
#define OK(call)                                                                                                       \
  do {                                                                                                                 \
    moe_status st_ = (call);                                                                                           \
    if (st_) fail_msg("%s: %s (%s)", #call, moe_strerror(st_), moe_last_error());                                      \
  } while (0)
/* The call fails with this status, and the last error holds `text`. */
#define FAILS(status, text, call)                                                                                      \
  do {                                                                                                                 \
    moe_status st_ = (call), want_ = (status);                                                                         \
    if (st_ != want_)                                                                                                  \
      fail_msg("%s: got \"%s\" (%s), wanted \"%s\"", #call, moe_strerror(st_), st_ ? moe_last_error() : "no error",    \
               moe_strerror(want_));                                                                                   \
    if (!strstr(moe_last_error(), text))                                                                               \
      fail_msg("%s: the last error is \"%s\", wanted \"%s\" in it", #call, moe_last_error(), (text));                  \
  } while (0)
/* |got - want| <= bound; NaN fails. */
#define assert_near(got, want, bound)                                                                                  \
  do {                                                                                                                 \
    double got_ = (got), want_ = (want), bound_ = (bound), err_ = got_ > want_ ? got_ - want_ : want_ - got_;          \
    if (!(err_ <= bound_)) fail_msg("%s is %.17g, wanted %.17g within %g", #got, got_, want_, bound_);                 \
  } while (0)

/* MOE_TEST_LONG and MOE_TEST_SHORT, set by make check-long and by sanitizer builds. */
static inline int test_long(void)
{
  return getenv("MOE_TEST_LONG") != NULL;
}
static inline int test_short(void)
{
  return getenv("MOE_TEST_SHORT") != NULL;
}

/* Opens the device of MOE_TEST_DEVICE (unset: the library's choice) and a queue on it.  1; or 0, with the line
   that makes the driver report a skip: then main returns 77. */
static inline int test_open(moe_context **ctx, moe_queue **queue)
{
  moe_context_desc desc = moe_context_desc_init();
  moe_status st;
  desc.device = getenv("MOE_TEST_DEVICE");
  st = moe_context_create(ctx, &desc);
  if (st == MOE_OK) st = moe_queue_create(queue, *ctx);
  if (st == MOE_OK) return 1;
  if (st != MOE_ERR_NO_DEVICE) { /* a device that is there and does not open is no reason to skip */
    printf("%s\n", moe_last_error());
    exit(1);
  }
  printf("SKIP: %s\n", moe_last_error());
  return 0;
}
static inline void test_close(moe_context *ctx, moe_queue *queue)
{
  moe_queue_free(queue);
  moe_context_free(ctx);
}
static inline int test_has_fp64(const moe_context *ctx)
{
  moe_device_info info = moe_device_info_init();
  return moe_context_info(ctx, &info) == MOE_OK && info.fp64;
}

/* The end of main: `return TEST_MAIN(tests);` */
#define TEST_MAIN(tests) (cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0)

#endif
