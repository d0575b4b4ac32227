/* driver.c - what libFuzzer does, in small, where there is none: runs the target on every file of the folders given,
   then on mutations of them.  Options as libFuzzer's:
     -runs=0            the files only
     -max_total_time=S  mutations for so many seconds
     -seed=N            the first number of a mutation; each has its number, which alone decides what it is
   A failure's input is written to fuzz-input. */
#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MOST (1 << 16) /* bytes of an input */
#define FILES 1024

static struct {
  uint8_t *data;
  size_t size;
} files[FILES];
static int n_files;
static const uint8_t *input; /* what runs */
static size_t input_size;
static uint64_t random_state;

static uint32_t draw(uint32_t below)
{
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return below ? (uint32_t)((random_state >> 11) % below) : 0;
}

static void on_signal(int number)
{
  FILE *f = fopen("fuzz-input", "wb");
  if (f) {
    fwrite(input, 1, input_size, f);
    fclose(f);
  }
  signal(number, SIG_DFL);
  raise(number);
}

/* In memory of just its size, so that AddressSanitizer sees the first byte past it. */
static void run(const uint8_t *data, size_t size)
{
  uint8_t *copy = malloc(size ? size : 1);
  if (!copy) exit(1);
  memcpy(copy, data, size);
  input = copy;
  input_size = size;
  LLVMFuzzerTestOneInput(copy, size);
  free(copy);
}

static void read_file(const char *path)
{
  FILE *f = fopen(path, "rb");
  uint8_t *data = malloc(MOST);
  if (!f || !data) exit(1);
  files[n_files].size = fread(data, 1, MOST, f);
  files[n_files++].data = data;
  fclose(f);
}

static void read_folder(const char *folder)
{
  struct dirent **names;
  const int n = scandir(folder, &names, NULL, alphasort);
  for (int i = 0; i < n; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
    if (names[i]->d_name[0] != '.' && n_files < FILES) read_file(path);
    free(names[i]);
  }
  if (n < 0) {
    perror(folder);
    exit(1);
  }
  free(names);
}

static size_t mutate(uint8_t *data, size_t size)
{
  static const char *const words[] = { "[]",
                                       "{}",
                                       "\"",
                                       "0",
                                       "-1",
                                       "1e9",
                                       "18446744073709551615",
                                       "9223372036854775807",
                                       "\"F32\"",
                                       "\"BF16\"",
                                       "\"data_offsets\"",
                                       "\"shape\":[0]",
                                       "\\u0000",
                                       "null" };
  const uint32_t at = draw((uint32_t)size + 1), n = 1 + draw(16);
  switch (draw(8)) {
  case 0:
    if (at < size) data[at] ^= (uint8_t)(1 << draw(8));
    return size;
  case 1:
    if (at < size) data[at] = (uint8_t)draw(256);
    return size;
  case 2: /* a piece goes */
    if (at + n > size) return size;
    memmove(data + at, data + at + n, size - at - n);
    return size - n;
  case 3: /* the header's length, or the first number of a matrix */
    if (size >= 8) memset(data + draw(8), (int)draw(256), 1);
    return size;
  case 4: { /* a word */
    const char *word = words[draw(sizeof words / sizeof words[0])];
    const size_t length = strlen(word);
    if (size + length > MOST) return size;
    memmove(data + at + length, data + at, size - at);
    memcpy(data + at, word, length);
    return size + length;
  }
  case 5: { /* a piece again, elsewhere */
    const uint32_t from = draw((uint32_t)size + 1);
    if (from + n > size || at + n > size) return size;
    memmove(data + at, data + from, n);
    return size;
  }
  case 6: { /* the end of another file */
    const int other = (int)draw((uint32_t)n_files);
    const size_t from = draw((uint32_t)files[other].size + 1), length = files[other].size - from;
    if (at + length > MOST) return size;
    memcpy(data + at, files[other].data + from, length);
    return at + length;
  }
  default: /* cut, and the length of the header put right */
    if (size < 8) return size;
    for (int i = 0; i < 8; i++) data[i] = (uint8_t)((uint64_t)(size - 8 - draw((uint32_t)(size - 8) + 1)) >> (8 * i));
    return size;
  }
}

int main(int argc, char **argv)
{
  static uint8_t data[MOST + 32];
  double seconds = 10;
  uint64_t seed = 1, done = 0;
  const time_t start = time(NULL);
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "-runs=0")) seconds = 0;
    else if (!strncmp(argv[i], "-max_total_time=", 16)) seconds = atof(argv[i] + 16);
    else if (!strncmp(argv[i], "-seed=", 6)) seed = strtoull(argv[i] + 6, NULL, 10);
    else if (argv[i][0] != '-') read_folder(argv[i]);
  }
  if (!n_files) return 2;
  signal(SIGABRT, on_signal);
  for (int i = 0; i < n_files; i++) run(files[i].data, files[i].size);
  for (; difftime(time(NULL), start) < seconds; done++) {
    random_state = (seed + done) * 0x9e3779b97f4a7c15u;
    const int file = (int)draw((uint32_t)n_files);
    size_t size = files[file].size;
    memcpy(data, files[file].data, size);
    for (uint32_t n = 1 + draw(6); n; n--) size = mutate(data, size);
    run(data, size);
  }
  fprintf(stderr, "Done %llu runs\n", (unsigned long long)done + (unsigned long long)n_files);
  for (int i = 0; i < n_files; i++) free(files[i].data);
  return 0;
}
