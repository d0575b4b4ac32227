/* files.h - a folder of its own for a test's files, and their bytes. */
#ifndef MOE_TEST_FILES_H
#define MOE_TEST_FILES_H

#include "moe_test.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

static char files_folder[256];

static inline int files_open(void **state)
{
  const char *tmp = getenv("TMPDIR");
  (void)state;
  snprintf(files_folder, sizeof files_folder, "%s/moe-test.XXXXXX", tmp ? tmp : "/tmp");
  return mkdtemp(files_folder) ? 0 : -1;
}

/* FOLDER/name; good until four more were asked for. */
static inline const char *files_path(const char *name)
{
  static char paths[4][512];
  static int next;
  char *path = paths[next++ % 4];
  snprintf(path, sizeof paths[0], "%s/%s", files_folder, name);
  return path;
}

/* How many files there are whose names end so; removes them where asked to. */
static inline int files_count(const char *end, int and_remove)
{
  DIR *dir = opendir(files_folder);
  const struct dirent *entry;
  int n = 0;
  if (!dir) fail_msg("%s: cannot be opened", files_folder);
  while ((entry = readdir(dir))) {
    const size_t length = strlen(entry->d_name), wanted = strlen(end);
    if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
    if (length < wanted || strcmp(entry->d_name + length - wanted, end) != 0) continue;
    n++;
    if (and_remove) unlink(files_path(entry->d_name));
  }
  closedir(dir);
  return n;
}

static inline int files_clear(void **state)
{
  (void)state;
  files_count("", 1);
  return 0;
}

static inline int files_close(void **state)
{
  files_clear(state);
  return rmdir(files_folder);
}

static inline void files_write(const char *path, const void *data, size_t size)
{
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(data, 1, size, f) != size || fclose(f)) fail_msg("%s: cannot be written", path);
}

static inline unsigned char *files_read(const char *path, size_t *size)
{
  FILE *f = fopen(path, "rb");
  if (!f || fseek(f, 0, SEEK_END)) fail_msg("%s: cannot be read", path);
  *size = (size_t)ftell(f);
  rewind(f);
  unsigned char *data = malloc(*size + 1);
  if (!data || fread(data, 1, *size, f) != *size) fail_msg("%s: cannot be read", path);
  fclose(f);
  return data;
}

/* A safetensors file of this header and so many bytes of data, each one its own number; length: what the file says
   of its header, or -1 for the truth. */
static inline unsigned char *files_tensors(const char *header, int64_t length, size_t data, size_t *size)
{
  const size_t is = strlen(header);
  const uint64_t said = length < 0 ? is : (uint64_t)length;
  unsigned char *bytes = malloc(8 + is + data + 1);
  *size = 8 + is + data;
  for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(said >> (8 * i));
  memcpy(bytes + 8, header, is);
  for (size_t i = 0; i < data; i++) bytes[8 + is + i] = (unsigned char)i;
  return bytes;
}

#endif
