/* moe-inspect - what a checkpoint holds, and whether it is sound.  Uses the public interface only. */
#include <moe/checkpoint.h>

#include <stdio.h>
#include <stdlib.h>

static const char usage[] =
    "Usage: moe-inspect [--verify] [--raw] [--quiet] PATH...\n"
    "       moe-inspect --help | --version\n"
    "Prints the metadata and the tensors of checkpoints: dtype, shape, bytes, hash, name and, where there are\n"
    "several, the file of each; then the totals.  PATH is a .safetensors file, an index (.safetensors.index.json)\n"
    "with its shards beside it, or a folder that holds model.safetensors.index.json or model.safetensors.\n"
    "\n"
    "  --verify   also read all data and compare it with the hashes that libmoe writes\n"
    "  --raw      PATH is of the raw layout (count; rows, columns, f32 data of each)\n"
    "  --quiet    print errors only\n"
    "\n"
    "Exit status: 0 where all are sound, 1 where one cannot be opened or has data that are not what was written\n"
    "(the reason is printed to standard error), 2 where the arguments are wrong.  A tensor without a hash is sound.\n";

/* Foreign text on one line. */
struct line {
  char text[512];
};
static struct line line_of(const char *text)
{
  struct line line;
  snprintf(line.text, sizeof line.text, "%s", text);
  for (char *c = line.text; *c; c++)
    if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
  return line;
}

static void print_tensor(const moe_checkpoint_entry *e, int with_file)
{
  char shape[200] = "[", hash[20] = "-";
  size_t used = 1;
  for (int64_t d = 0; d < e->rank && d < MOE_RANK_MAX; d++)
    used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%lld", d ? "," : "", (long long)e->shape[d]);
  snprintf(shape + used, sizeof shape - used, e->rank > MOE_RANK_MAX ? ",...]" : "]");
  if (e->hashed) snprintf(hash, sizeof hash, "%016llx", (unsigned long long)e->hash);
  printf("  %-8s %-20s %14llu  %-16s  %s", line_of(e->dtype_name).text, shape, (unsigned long long)e->bytes, hash,
         line_of(e->name).text);
  if (with_file) {
    const char *slash = strrchr(e->file, '/');
    printf("  %s", line_of(slash ? slash + 1 : e->file).text);
  }
  printf("\n");
}

static void print(const moe_checkpoint *c, const char *path)
{
  moe_checkpoint_entry e = moe_checkpoint_entry_init(), first = moe_checkpoint_entry_init();
  const int64_t n = moe_checkpoint_count(c);
  unsigned long long bytes = 0, elements = 0;
  int several = 0;
  const char *key;
  printf("%s\n", line_of(path).text);
  for (int64_t i = 0; (key = moe_checkpoint_metadata_key(c, i)); i++) {
    printf("  %s = %s\n", line_of(key).text, line_of(moe_checkpoint_metadata(c, key)).text);
  }
  for (int64_t i = 0; i < n && moe_checkpoint_at(&e, c, i) == MOE_OK; i++) {
    if (!i) first = e;
    several |= strcmp(first.file, e.file) != 0;
  }
  for (int64_t i = 0; i < n && moe_checkpoint_at(&e, c, i) == MOE_OK; i++) {
    const uint64_t size = moe_dtype_size(e.dtype);
    print_tensor(&e, several);
    bytes += e.bytes;
    elements += size ? e.bytes / size : 0;
  }
  printf("  %lld tensors, %llu elements, %llu bytes\n", (long long)n, elements, bytes);
}

static int inspect(const char *path, int raw, int verify, int quiet)
{
  moe_checkpoint *c;
  int64_t unhashed;
  int rc = 0;
  if (raw ? moe_raw_open(&c, path) : moe_checkpoint_open(&c, path)) {
    fprintf(stderr, "moe-inspect: %s\n", moe_last_error());
    if (!raw && moe_raw_open(&c, path) == MOE_OK) {
      fprintf(stderr, "moe-inspect: %s opens as a file of the raw layout: --raw\n", path);
      moe_checkpoint_close(c);
    }
    return 1;
  }
  if (!quiet) print(c, path);
  if (verify && moe_checkpoint_verify(c, &unhashed)) {
    fprintf(stderr, "moe-inspect: %s\n", moe_last_error());
    rc = 1;
  } else if (verify && !quiet) {
    printf("  hashes: %lld right, %lld tensors have none\n", (long long)(moe_checkpoint_count(c) - unhashed),
           (long long)unhashed);
  }
  moe_checkpoint_close(c);
  return rc;
}

int main(int argc, char **argv)
{
  int raw = 0, verify = 0, quiet = 0, rc = 0, at = 1;
  for (; at < argc && argv[at][0] == '-'; at++) {
    if (!strcmp(argv[at], "--verify")) verify = 1;
    else if (!strcmp(argv[at], "--raw")) raw = 1;
    else if (!strcmp(argv[at], "--quiet")) quiet = 1;
    else if (!strcmp(argv[at], "--help")) return fputs(usage, stdout) < 0;
    else if (!strcmp(argv[at], "--version")) return printf("moe-inspect (libmoe) %s\n", moe_version_string()) < 0;
    else {
      fprintf(stderr, "moe-inspect: unknown argument: %s\n%s", argv[at], usage);
      return 2;
    }
  }
  if (at == argc) {
    fprintf(stderr, "moe-inspect: no path is given\n%s", usage);
    return 2;
  }
  for (; at < argc; at++) rc |= inspect(argv[at], raw, verify, quiet);
  return fflush(stdout) ? 1 : rc;
}
