/* newfile.h - a file that appears under its name whole or not at all: written under another name in the same folder,
   synced, renamed.  `path` is always the name that is to appear; fn names the public call in errors. */
#ifndef MOE_CORE_NEWFILE_H
#define MOE_CORE_NEWFILE_H

#include <moe/base.h>

struct moe__newfile {
  int fd;     /* -1: closed */
  char *temp; /* its name for now: FOLDER/.NAME.<16 hex digits>.tmp */
};

/* A new empty file that nobody else has. */
moe_status moe__newfile_open(const char *fn, struct moe__newfile *f, const char *path);
/* Holds the path until discard: MOE_ERR_STATE where another writer does; removes what writers that were killed have
   left.  (Where the file system has no locks: nothing.) */
moe_status moe__newfile_claim(const char *fn, struct moe__newfile *f, const char *path);
moe_status moe__newfile_write(const char *fn, const struct moe__newfile *f, uint64_t at, const void *data,
                              uint64_t bytes);
/* Copies a range from `from` into `to`, which may be the same file and the ranges may overlap. */
moe_status moe__newfile_copy(const char *fn, const struct moe__newfile *to, uint64_t to_at,
                             const struct moe__newfile *from, uint64_t from_at, uint64_t bytes);
/* Sets its length and makes it durable. */
moe_status moe__newfile_finish(const char *fn, const struct moe__newfile *f, uint64_t bytes);
/* Gives the file descriptor back; what is held is let go. */
void moe__newfile_close(struct moe__newfile *f);
/* Gives it its name, in place of what has it now, and closes it. */
moe_status moe__newfile_publish(const char *fn, struct moe__newfile *f, const char *path);
/* Removes it; {0} and one that was published are fine. */
void moe__newfile_discard(struct moe__newfile *f);
/* Makes renames in the folder of `path` durable. */
moe_status moe__sync_folder(const char *fn, const char *path);

/* "FOLDER/" of a path, with `name` behind it; NULL where there is no memory. */
char *moe__beside(const char *path, const char *name);
/* The last part of a path. */
const char *moe__base_name(const char *path);

#endif
