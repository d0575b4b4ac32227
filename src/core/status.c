/* status.c - status texts, the thread's last error, and the rules of structs that grow. */
#include "core/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[1024];
static _Thread_local moe_status last_status;
static _Thread_local uint64_t failures;

const char *moe_strerror(moe_status status)
{
  switch (status) {
#define XX(name, value, text)                                                                                          \
  case MOE_##name: return text;
    MOE_STATUS_MAP(XX)
#undef XX
  default: return "unknown status";
  }
}

const char *moe_last_error(void)
{
  return last_error;
}

uint32_t moe_version(void)
{
  return MOE_VERSION_HEX;
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
const char *moe_version_string(void)
{
  return TEXT(MOE_VERSION_MAJOR) "." TEXT(MOE_VERSION_MINOR) "." TEXT(MOE_VERSION_PATCH);
}

moe_status moe__fail(moe_status status, const char *format, ...)
{
  char text[sizeof last_error]; /* the arguments may point into last_error */
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  memcpy(last_error, text, sizeof text);
  failures++;
  return last_status = status;
}

moe_status moe__fail_in(moe_status status, const char *prefix)
{
  return moe__fail(status, "%s: %s", prefix, last_error);
}

void moe__clear_error(void)
{
  last_error[0] = 0;
}

struct moe__shown moe__shown(const char *text)
{
  struct moe__shown shown;
  const size_t room = sizeof shown.text - 1, length = strlen(text);
  const int cut = length > room;
  if (cut) text += length - (room - 3);
  while (cut && ((unsigned char)*text & 0xc0) == 0x80) text++; /* the rest of a character */
  snprintf(shown.text, sizeof shown.text, "%s%s", cut ? "..." : "", text);
  for (char *c = shown.text; *c; c++)
    if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
  return shown;
}

moe_status moe__fail_io(const char *fn, const char *what, const char *path)
{
  char reason[128];
  if (strerror_r(errno, reason, sizeof reason)) snprintf(reason, sizeof reason, "error %d", errno);
  return moe__fail(MOE_ERR_IO, "%s: %s %s: %s", fn, what, moe__shown(path).text, reason);
}

uint64_t moe__failures(void)
{
  return failures;
}

const char *moe__error_since(uint64_t before, moe_status status)
{
  return failures != before && last_status == status ? last_error : moe_strerror(status);
}

moe_status moe__struct_in(void *own, uint64_t own_size, const void *given, const char *function, const char *name)
{
  uint64_t size;
  if (!given) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", function, name);
  memcpy(&size, given, sizeof size);
  if (size < 8 || size % 8 || size > 1u << 20)
    return moe__fail(MOE_ERR_INVALID, "%s: %s->size %llu is not a struct made by its _init function", function, name,
                     (unsigned long long)size);
  for (uint64_t at = own_size; at < size; at++)
    if (((const unsigned char *)given)[at])
      return moe__fail(MOE_ERR_VERSION, "%s: %s sets byte %llu of %llu, this library (%s) knows %llu", function, name,
                       (unsigned long long)at, (unsigned long long)size, moe_version_string(),
                       (unsigned long long)own_size);
  memset(own, 0, own_size);
  memcpy(own, given, size < own_size ? size : own_size);
  memcpy(own, &own_size, sizeof own_size);
  return MOE_OK;
}

moe_status moe__struct_out(void *given, const void *own, uint64_t own_size, const char *function, const char *name)
{
  uint64_t size;
  if (!given) return moe__fail(MOE_ERR_INVALID, "%s: %s is NULL", function, name);
  memcpy(&size, given, sizeof size);
  if (size < 8 || size % 8)
    return moe__fail(MOE_ERR_INVALID, "%s: %s->size %llu is not a struct made by its _init function", function, name,
                     (unsigned long long)size);
  if (size > own_size) size = own_size;
  memcpy((char *)given + 8, (const char *)own + 8, size - 8);
  return MOE_OK;
}
