/* moe/base.h - version, status codes and the last error: what every other header of libmoe leans on.
   The headers compile as C11 and as C++11 and include no foreign header. */
#ifndef MOE_BASE_H
#define MOE_BASE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define MOE_API __attribute__((visibility("default")))
#define MOE_CHECKED __attribute__((warn_unused_result))
#else
#define MOE_API
#define MOE_CHECKED
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_VERSION_MAJOR 0
#define MOE_VERSION_MINOR 1
#define MOE_VERSION_PATCH 0
#define MOE_VERSION_HEX ((MOE_VERSION_MAJOR << 16) | (MOE_VERSION_MINOR << 8) | MOE_VERSION_PATCH)

/* Version of the library that runs, as MOE_VERSION_HEX is the version of the header. */
MOE_API uint32_t moe_version(void);
/* "0.1.0"; a static string. */
MOE_API const char *moe_version_string(void);

/* Structs that may grow begin with `uint64_t size`, hold members whose sizes are multiples of 8, and are made by their
   `_init()`, which zeroes them and stamps the size the caller was compiled with.  In a member added
   later, zero means what the library did before it was there.  An input struct whose unknown tail is
   not zero is refused with MOE_ERR_VERSION; an output struct is written up to the smaller size. */
#define MOE_INIT(type)                                                                                                 \
  static inline type type##_init(void)                                                                                 \
  {                                                                                                                    \
    type moe_new_;                                                                                                     \
    memset(&moe_new_, 0, sizeof moe_new_);                                                                             \
    moe_new_.size = sizeof moe_new_;                                                                                   \
    return moe_new_;                                                                                                   \
  }

/* Status: 0 is success, errors are negative; values never change their meaning, new ones are appended. */
#define MOE_STATUS_MAP(XX)                                                                                             \
  XX(OK, 0, "success")                                                                                                 \
  XX(ERR_INVALID, -1, "an argument is outside its documented range")                                                   \
  XX(ERR_NO_MEMORY, -2, "out of host or device memory")                                                                \
  XX(ERR_NO_DEVICE, -3, "no such backend or device")                                                                   \
  XX(ERR_UNSUPPORTED, -4, "the device has no kernel for the request")                                                  \
  XX(ERR_BACKEND, -5, "the CUDA or OpenCL runtime reported an error")                                                  \
  XX(ERR_LAUNCH, -6, "a kernel could not be launched")                                                                 \
  XX(ERR_BUILD, -7, "a kernel could not be built")                                                                     \
  XX(ERR_TOO_SMALL, -8, "a caller's buffer is smaller than needed")                                                    \
  XX(ERR_STATE, -9, "call out of order, or object still in use")                                                       \
  XX(ERR_NO_DERIVATIVE, -10, "the state cannot give this derivative")                                                  \
  XX(ERR_NO_SECOND_DERIVATIVE, -11, "a fused operation has first derivatives only")                                    \
  XX(ERR_VERSION, -12, "a struct sets a member this library does not know")                                            \
  XX(ERR_DATA, -13, "bad data was met on the device (health word set)")                                                \
  XX(ERR_IO, -14, "a file could not be read or written")                                                               \
  XX(ERR_FORMAT, -15, "a file does not hold what it should")                                                           \
  XX(ERR_NOT_FOUND, -16, "there is nothing of that name")                                                              \
  XX(ERR_CHECK, -17, "a check found a result outside its bound")

typedef enum moe_status {
#define XX(name, value, text) MOE_##name = value,
  MOE_STATUS_MAP(XX)
#undef XX
      MOE_STATUS_FORCE_INT = 0x7fffffff
} moe_status;

/* The sentence beside the status in MOE_STATUS_MAP; "unknown status" for any other value. */
MOE_API const char *moe_strerror(moe_status status);
/* Why the last failing call of this thread failed, in one line: function, argument, wanted, got; ""
   if none has.  Valid until the next failure on the thread. */
MOE_API const char *moe_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
