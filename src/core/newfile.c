/* newfile.c - see newfile.h.  Every call into the system is made again where a signal broke it off. */
#include "core/newfile.h"

#include "core/hash.h"
#include "core/status.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define AGAIN(result, call)                                                                                            \
  do (result) = (call);                                                                                                \
  while ((result) < 0 && errno == EINTR)

const char *moe__base_name(const char *path)
{
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

char *moe__beside(const char *path, const char *name)
{
  const size_t folder = (size_t)(moe__base_name(path) - path), length = strlen(name);
  char *out = malloc(folder + length + 1);
  if (!out) return NULL;
  memcpy(out, path, folder);
  memcpy(out + folder, name, length + 1);
  return out;
}

/* The folder of a path: "." where the path names none. */
static char *folder_of(const char *path)
{
  char *folder = moe__beside(path, "");
  if (!folder || *folder) return folder;
  free(folder);
  return strdup(".");
}

static moe_status no_memory(const char *fn)
{
  return moe__fail(MOE_ERR_NO_MEMORY, "%s: no host memory", fn);
}

/* ---- names ------------------------------------------------------------------------------------------------------- */
/* The rest of the name: not to be guessed, and never the same twice; that nobody has the name is for O_EXCL to say. */
static uint64_t token(const void *salt)
{
  static _Atomic uint64_t counter;
  struct {
    struct timespec now;
    const void *salt;
    uint64_t pid, count;
  } all;
  memset(&all, 0, sizeof all);
  clock_gettime(CLOCK_REALTIME, &all.now);
  all.salt = salt;
  all.pid = (uint64_t)getpid();
  all.count = ++counter;
  return moe__hash(&all, sizeof all);
}

/* Is this a temporary name of the file `base`? */
static int is_temporary(const char *name, const char *base)
{
  const size_t length = strlen(base);
  return strlen(name) == length + 22 && name[0] == '.' && !memcmp(name + 1, base, length) && name[length + 1] == '.' &&
         strspn(name + length + 2, "0123456789abcdef") == 16 && !strcmp(name + length + 18, ".tmp");
}

moe_status moe__newfile_open(const char *fn, struct moe__newfile *f, const char *path)
{
  const char *base = moe__base_name(path);
  const size_t room = strlen(base) + 23;
  char *name = malloc(room);
  int tries = 0;
  f->temp = NULL;
  if (!name) return no_memory(fn);
  do {
    snprintf(name, room, ".%s.%016llx.tmp", base, (unsigned long long)token(f));
    free(f->temp);
    f->temp = moe__beside(path, name);
    if (!f->temp) break;
    AGAIN(f->fd, open(f->temp, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  } while (f->fd < 0 && errno == EEXIST && ++tries < 100);
  free(name);
  if (!f->temp) return no_memory(fn);
  if (f->fd >= 0) return MOE_OK;
  moe__fail_io(fn, "cannot create", f->temp);
  free(f->temp);
  f->temp = NULL;
  return MOE_ERR_IO;
}

/* ---- one writer at a time ---------------------------------------------------------------------------------------- */
enum { HELD, REMOVE };
static int look_at(const char *other, int what)
{
  int fd, rc;
  AGAIN(fd, open(other, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (fd < 0) return 0; /* gone, or somebody else's */
  if (what == REMOVE) rc = unlink(other);
  else AGAIN(rc, flock(fd, LOCK_EX | LOCK_NB));
  rc = what == HELD && rc < 0 && errno == EWOULDBLOCK;
  close(fd);
  return rc;
}

/* HELD: is a temporary file of the path but `own` held by a writer?  REMOVE: removes them all. */
static int others(const char *path, const char *own, int what)
{
  char *folder = folder_of(path);
  DIR *dir = folder ? opendir(folder) : NULL;
  const struct dirent *entry;
  int held = 0;
  while (dir && !held && (entry = readdir(dir))) {
    if (!is_temporary(entry->d_name, moe__base_name(path)) || !strcmp(entry->d_name, moe__base_name(own))) continue;
    char *other = moe__beside(path, entry->d_name);
    held = other && look_at(other, what);
    free(other);
  }
  if (dir) closedir(dir);
  free(folder);
  return held;
}

/* The lock is on our temporary file, so the system lets go of it when we are killed.  Whoever sees the other's first
   gives way; both may. */
moe_status moe__newfile_claim(const char *fn, struct moe__newfile *f, const char *path)
{
  int rc;
  AGAIN(rc, flock(f->fd, LOCK_EX | LOCK_NB));
  if (rc < 0 && errno != EWOULDBLOCK) return MOE_OK;
  if (rc < 0 || others(path, f->temp, HELD))
    return moe__fail(MOE_ERR_STATE, "%s: another writer is at work on %s", fn, moe__shown(path).text);
  others(path, f->temp, REMOVE);
  return MOE_OK;
}

/* ---- content ----------------------------------------------------------------------------------------------------- */
static moe_status failed(const char *fn, const char *what, const struct moe__newfile *f)
{
  return moe__fail_io(fn, what, f->temp);
}

moe_status moe__newfile_write(const char *fn, const struct moe__newfile *f, uint64_t at, const void *data,
                              uint64_t bytes)
{
  const char *from = data;
  while (bytes) {
    const size_t most = bytes < (size_t)1 << 30 ? (size_t)bytes : (size_t)1 << 30;
    ssize_t n;
    AGAIN(n, pwrite(f->fd, from, most, (off_t)at));
    if (n == 0) errno = ENOSPC;
    if (n <= 0) return failed(fn, "cannot write", f);
    from += n;
    at += (uint64_t)n;
    bytes -= (uint64_t)n;
  }
  return MOE_OK;
}

moe_status moe__newfile_copy(const char *fn, const struct moe__newfile *to, uint64_t to_at,
                             const struct moe__newfile *from, uint64_t from_at, uint64_t bytes)
{
  const size_t room = (size_t)1 << 20;
  const int backwards = to_at > from_at; /* so that what is still to be read is not written over */
  char *buffer = bytes && (to->fd != from->fd || to_at != from_at) ? malloc(room) : NULL;
  moe_status st = MOE_OK;
  if (!bytes || (to->fd == from->fd && to_at == from_at)) return MOE_OK;
  if (!buffer) return no_memory(fn);
  for (uint64_t done = 0, n; done < bytes && !st; done += n) {
    n = bytes - done < room ? bytes - done : room;
    const uint64_t at = backwards ? bytes - done - n : done;
    for (uint64_t got = 0; got < n && !st;) {
      ssize_t r;
      AGAIN(r, pread(from->fd, buffer + got, (size_t)(n - got), (off_t)(from_at + at + got)));
      if (r == 0) errno = EIO;
      if (r <= 0) st = failed(fn, "cannot read", from);
      else got += (uint64_t)r;
    }
    if (!st) st = moe__newfile_write(fn, to, to_at + at, buffer, n);
  }
  free(buffer);
  return st;
}

moe_status moe__newfile_finish(const char *fn, const struct moe__newfile *f, uint64_t bytes)
{
  int rc;
  AGAIN(rc, ftruncate(f->fd, (off_t)bytes));
  if (rc < 0) return failed(fn, "cannot set the length of", f);
  AGAIN(rc, fsync(f->fd));
  return rc < 0 ? failed(fn, "cannot sync", f) : MOE_OK;
}

void moe__newfile_close(struct moe__newfile *f)
{
  if (f->temp && f->fd >= 0) close(f->fd);
  f->fd = -1;
}

static void forget(struct moe__newfile *f)
{
  moe__newfile_close(f);
  free(f->temp);
  f->temp = NULL;
}

moe_status moe__newfile_publish(const char *fn, struct moe__newfile *f, const char *path)
{
  if (rename(f->temp, path)) return moe__fail_io(fn, "cannot rename a temporary file to", path);
  forget(f);
  return MOE_OK;
}

void moe__newfile_discard(struct moe__newfile *f)
{
  if (!f->temp) return;
  unlink(f->temp);
  forget(f);
}

moe_status moe__sync_folder(const char *fn, const char *path)
{
  char *folder = folder_of(path);
  int fd, rc;
  if (!folder) return no_memory(fn);
  AGAIN(fd, open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  rc = fd;
  if (fd >= 0) AGAIN(rc, fsync(fd));
  if (rc < 0 && errno == EINVAL) rc = 0; /* a file system that has no such thing */
  moe_status st = rc < 0 ? moe__fail_io(fn, "cannot sync the folder", folder) : MOE_OK;
  if (fd >= 0) close(fd);
  free(folder);
  return st;
}
