/* faults.h - what a program asks of memory and of the system, counted, and refused once where a test says so.

   For programs that are linked with $(faults) of Makefile.am, --wrap for each of these names: calls of the program and of
   the library in it go through here, those of shared libraries do not. */
#ifndef MOE_TEST_FAULTS_H
#define MOE_TEST_FAULTS_H

#include "moe_test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum fault {
  NONE,
  FAIL,
  FULL,
  INTERRUPT,
  SHORT,
  KILL_BEFORE,
  KILL_AFTER,
  MEMORY,
  OTHER
}; /* OTHER: the program's own */
static enum fault fault;
static _Atomic long calls;       /* of the sort that the fault concerns */
static long fault_at, fault_too; /* which of them; and another one, where not 0 */
static const char *hit;          /* the call that it met */
static int armed;
static char trace[1024]; /* pwrite W, fsync S, rename R, in order; while armed */
static _Atomic long host_live, maps_live;

static inline void arm(enum fault what, long at)
{
  fault = what;
  fault_at = at;
  fault_too = 0;
  calls = 0;
  hit = NULL;
  memset(trace, 0, sizeof trace);
  armed = 1;
}
static inline void disarm(void)
{
  armed = 0;
}

/* ---- the system -------------------------------------------------------------------------------------------------- */
/* Does this call not happen? */
static inline int met(const char *name, int again)
{
  const size_t length = strlen(trace);
  if (armed && length + 1 < sizeof trace)
    trace[length] = !strcmp(name, "pwrite") ? 'W' : !strcmp(name, "fsync") ? 'S' : !strcmp(name, "rename") ? 'R' : 0;
  if (!armed || fault >= MEMORY || (fault == INTERRUPT && !again) || (fault == SHORT && again < 2)) return 0;
  if (++calls != fault_at && calls != fault_too) return 0;
  hit = name;
  if (fault == KILL_BEFORE) kill(getpid(), SIGKILL);
  errno = fault == INTERRUPT ? EINTR : fault == FULL ? ENOSPC : EIO;
  return fault == FAIL || fault == FULL || fault == INTERRUPT;
}
static inline void done(void)
{
  if (armed && fault == KILL_AFTER && calls == fault_at) kill(getpid(), SIGKILL);
}

/* again: 1 for calls that signals break off, 2 for those that may also do less. */
#define WRAP(type, name, again, failed, parameters, arguments)                                                         \
  type __real_##name parameters;                                                                                       \
  type __wrap_##name parameters;                                                                                       \
  type __wrap_##name parameters                                                                                        \
  {                                                                                                                    \
    if (met(#name, again)) return failed;                                                                              \
    type result = __real_##name arguments;                                                                             \
    done();                                                                                                            \
    return result;                                                                                                     \
  }
WRAP(int, fstat, 0, -1, (int fd, struct stat *is), (fd, is))
WRAP(int, stat, 0, -1, (const char *path, struct stat *is), (path, is))
WRAP(int, lstat, 0, -1, (const char *path, struct stat *is), (path, is))
WRAP(int, ftruncate, 1, -1, (int fd, off_t size), (fd, size))
WRAP(int, flock, 1, -1, (int fd, int how), (fd, how))
WRAP(int, rename, 0, -1, (const char *from, const char *to), (from, to))
WRAP(int, unlink, 0, -1, (const char *path), (path))
WRAP(DIR *, opendir, 0, NULL, (const char *path), (path))
WRAP(ssize_t, pread, 2, -1, (int fd, void *to, size_t n, off_t at),
     (fd, to, hit &&fault == SHORT ? (n + 1) / 2 : n, at))
WRAP(ssize_t, pwrite, 2, -1, (int fd, const void *from, size_t n, off_t at),
     (fd, from, hit &&fault == SHORT ? (n + 1) / 2 : n, at))

/* Not done: nothing here loses power, and a disk takes its time. */
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
  (void)fd;
  if (met("fsync", 1)) return -1;
  done();
  return 0;
}

void *__real_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
  if (met("mmap", 0)) return MAP_FAILED;
  void *map = __real_mmap(at, n, prot, flags, fd, offset);
  maps_live += map != MAP_FAILED;
  done();
  return map;
}
int __real_munmap(void *at, size_t n);
int __wrap_munmap(void *at, size_t n);
int __wrap_munmap(void *at, size_t n)
{
  maps_live--;
  return __real_munmap(at, n);
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
  va_list args;
  va_start(args, flags);
  const mode_t mode = flags & O_CREAT ? (mode_t)va_arg(args, int) : 0;
  va_end(args);
  if (met("open", 1)) return -1;
  const int fd = __real_open(path, flags, mode);
  done();
  return fd;
}

static inline int descriptors(void)
{
  DIR *dir = opendir("/proc/self/fd");
  int n = 0;
  while (dir && readdir(dir)) n++;
  if (dir) closedir(dir);
  return n;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */
void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
void __real_free(void *p);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);
char *__wrap_strdup(const char *s);
void __wrap_free(void *p);

static inline int refused(void)
{
  if (!armed || fault != MEMORY || ++calls != fault_at) return 0;
  hit = "malloc";
  return 1;
}
void *__wrap_malloc(size_t size)
{
  void *p = refused() ? NULL : __real_malloc(size);
  host_live += p != NULL;
  return p;
}
void *__wrap_calloc(size_t n, size_t size)
{
  void *p = refused() ? NULL : __real_calloc(n, size);
  host_live += p != NULL;
  return p;
}
void *__wrap_realloc(void *p, size_t size)
{
  void *bigger = refused() ? NULL : __real_realloc(p, size);
  host_live += bigger && !p;
  return bigger;
}
char *__wrap_strdup(const char *s)
{
  char *copy = __wrap_malloc(strlen(s) + 1);
  return copy ? strcpy(copy, s) : NULL;
}
void __wrap_free(void *p)
{
  host_live -= p != NULL;
  __real_free(p);
}

/* For json_set_alloc_funcs.  While `parses`, it is not refused: jansson's parser then takes some want of memory for a wrong
   text, and writes behind its buffer (github.com/akheron/jansson, issue 362). */
static int parses;
static inline void *json_memory(size_t size)
{
  const int was = armed;
  if (parses) armed = 0;
  void *p = __wrap_malloc(size);
  armed = was;
  return p;
}

#endif
