/* t_cache.c - the caller's cache of built programs: what is in the key, and entries that are cut off, damaged, of another
   program, refused by the driver, or not stored.  The driver's entry points are counted and bent through the table of
   OpenCL functions that the library calls through.  Other backends keep no programs and call nothing. */
#include "moe_test.h"

#include "config.h"

#include <pthread.h>
#include <time.h>

/* ---- a cache in memory ------------------------------------------------------------------------------------------- */
enum { MOST = 64, THREADS = 4 };
struct item {
  char key[40];
  unsigned char *data;
  uint64_t bytes;
};
static struct cache {
  pthread_mutex_t lock;
  struct item items[MOST];
  int n, loads, stores, lines;
  int deaf;  /* gives the first entry whatever the key */
  int lying; /* 1: more bytes than there are; 2: too many to be true; 3: another size at the second call; 4: too few */
  moe_status refuses;
  char line[256];
} cache = { .lock = PTHREAD_MUTEX_INITIALIZER };

static struct item *item_of(const char *key)
{
  for (int i = 0; i < cache.n; i++)
    if (cache.deaf || !strcmp(cache.items[i].key, key)) return &cache.items[i];
  return NULL;
}

/* user: how many calls with it are under way; of one context, never two. */
static void enter(void *user)
{
  if (__atomic_add_fetch((int *)user, 1, __ATOMIC_SEQ_CST) != 1) abort();
}
static void leave(void *user)
{
  __atomic_sub_fetch((int *)user, 1, __ATOMIC_SEQ_CST);
}

static uint64_t load(void *user, const char *key, void *to, uint64_t room)
{
  uint64_t bytes = 0;
  enter(user);
  pthread_mutex_lock(&cache.lock);
  struct item *item = item_of(key);
  cache.loads++;
  if (strlen(key) != 32 || strspn(key, "0123456789abcdef") != 32) abort();
  if (item) {
    bytes = item->bytes;
    if (room && bytes <= room) memcpy(to, item->data, bytes);
    if (cache.lying == 1) bytes = room ? room : bytes + 7;
    if (cache.lying == 2) bytes = UINT64_MAX;
    if (cache.lying == 3 && room) bytes--;
    if (cache.lying == 4) bytes = 3;
  }
  pthread_mutex_unlock(&cache.lock);
  leave(user);
  return bytes;
}

static moe_status store(void *user, const char *key, const void *from, uint64_t bytes)
{
  enter(user);
  pthread_mutex_lock(&cache.lock);
  cache.stores++;
  if (!cache.refuses) {
    int deaf = cache.deaf;
    cache.deaf = 0;
    struct item *item = item_of(key);
    cache.deaf = deaf;
    if (!item) item = &cache.items[cache.n++];
    if (cache.n > MOST) abort();
    free(item->data);
    snprintf(item->key, sizeof item->key, "%s", key);
    item->data = malloc(bytes);
    if (!item->data) abort();
    memcpy(item->data, from, bytes);
    item->bytes = bytes;
  }
  pthread_mutex_unlock(&cache.lock);
  nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL); /* long enough for another thread to come in, if it may */
  leave(user);
  return cache.refuses;
}

static void hear(void *user, int64_t level, const char *line)
{
  (void)user;
  pthread_mutex_lock(&cache.lock);
  cache.lines += level == 1;
  snprintf(cache.line, sizeof cache.line, "%s", line);
  pthread_mutex_unlock(&cache.lock);
}

static int calls[2]; /* under way, of two contexts */
static moe_context_desc hooks_of(int which)
{
  moe_context_desc desc = moe_context_desc_init();
  desc.device = getenv("MOE_TEST_DEVICE");
  desc.log = hear;
  desc.user = &calls[which];
  desc.cache_load = load;
  desc.cache_store = store;
  return desc;
}

static int empty(void **state)
{
  (void)state;
  for (int i = 0; i < cache.n; i++) free(cache.items[i].data);
  cache = (struct cache){ .lock = PTHREAD_MUTEX_INITIALIZER };
  return 0;
}

static const char *device_id; /* of the device under test */

#if MOE_HAVE_OPENCL
#include "opencl/program.h"

/* ---- the driver, counted and bent -------------------------------------------------------------------------------- */
static struct moe__cl real;
static int compiled, from_binary, refuses_binaries;
static const char *driver, *platform_version;

static cl_program CL_API_CALL with_source(cl_context context, cl_uint n, const char **strings, const size_t *sizes,
                                          cl_int *code)
{
  __atomic_add_fetch(&compiled, 1, __ATOMIC_SEQ_CST);
  return real.clCreateProgramWithSource(context, n, strings, sizes, code);
}
static cl_program CL_API_CALL with_binary(cl_context context, cl_uint n, const cl_device_id *devices,
                                          const size_t *sizes, const unsigned char **binaries, cl_int *status,
                                          cl_int *code)
{
  __atomic_add_fetch(&from_binary, 1, __ATOMIC_SEQ_CST);
  if (!refuses_binaries) return real.clCreateProgramWithBinary(context, n, devices, sizes, binaries, status, code);
  if (code) *code = CL_INVALID_BINARY;
  return NULL;
}
static cl_int said(const char *text, size_t size, void *value, size_t *needed)
{
  if (needed) *needed = strlen(text) + 1;
  if (value && size <= strlen(text)) return CL_INVALID_VALUE;
  if (value) memcpy(value, text, strlen(text) + 1);
  return CL_SUCCESS;
}
static cl_int CL_API_CALL device_info(cl_device_id device, cl_device_info what, size_t size, void *value,
                                      size_t *needed)
{
  if (what == CL_DRIVER_VERSION && driver) return said(driver, size, value, needed);
  return real.clGetDeviceInfo(device, what, size, value, needed);
}
static cl_int CL_API_CALL platform_info(cl_platform_id platform, cl_platform_info what, size_t size, void *value,
                                        size_t *needed)
{
  if (what == CL_PLATFORM_VERSION && platform_version) return said(platform_version, size, value, needed);
  return real.clGetPlatformInfo(platform, what, size, value, needed);
}

static cl_device_id device;
static cl_context context;
static cl_command_queue queue;

static int bend(void **state)
{
  cl_platform_id platforms[16];
  cl_device_id devices[64];
  int p, d;
  (void)state;
  if (sscanf(device_id, "opencl:%d:%d", &p, &d) != 2 || p > 15 || d > 63) return -1;
  real = moe__cl;
  moe__cl.clCreateProgramWithSource = with_source;
  moe__cl.clCreateProgramWithBinary = with_binary;
  moe__cl.clGetDeviceInfo = device_info;
  moe__cl.clGetPlatformInfo = platform_info;
  if (real.clGetPlatformIDs(16, platforms, NULL) ||
      real.clGetDeviceIDs(platforms[p], CL_DEVICE_TYPE_ALL, 64, devices, NULL))
    return -1;
  device = devices[d];
  context = real.clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
  queue = context ? real.clCreateCommandQueue(context, device, 0, NULL) : NULL;
  return queue ? 0 : -1;
}
static int unbend(void **state)
{
  real.clReleaseCommandQueue(queue);
  real.clReleaseContext(context);
  moe__cl = real;
  return empty(state);
}

static int setup(void **state)
{
  compiled = from_binary = refuses_binaries = 0;
  driver = platform_version = NULL;
  return empty(state);
}

/* What a program built from these texts computes; -1: it was not built. */
static int built(const char *included, const char *options)
{
  const struct moe__cl_text text = { { "#line 1 \"included.h\"\n", included, "\n#line 1 \"answer.cl\"\n",
                                       "__kernel void answer(__global int *out) { out[0] = INCLUDED + DEFINED; }\n" },
                                     options,
                                     "program answer" };
  const moe_context_desc hooks = hooks_of(0);
  const size_t one[3] = { 1, 1, 1 };
  cl_program program;
  cl_kernel kernel;
  cl_int answer = -1;
  if (moe__cl_build(&program, context, device, &text, &hooks)) {
    moe__cl_drop(Program, program);
    return -1;
  }
  cl_mem memory = real.clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof answer, NULL, NULL);
  kernel = real.clCreateKernel(program, "answer", NULL);
  if (!memory || !kernel || real.clSetKernelArg(kernel, 0, sizeof memory, &memory) ||
      real.clEnqueueNDRangeKernel(queue, kernel, 1, NULL, one, one, 0, NULL, NULL) ||
      real.clEnqueueReadBuffer(queue, memory, CL_TRUE, 0, sizeof answer, &answer, 0, NULL, NULL))
    fail_msg("the program does not run");
  real.clReleaseKernel(kernel);
  real.clReleaseMemObject(memory);
  moe__cl_drop(Program, program);
  return answer;
}
#define ONE "#define INCLUDED 1\n"
#define TWO "#define INCLUDED 2\n"

/* `compilations` and `binaries` since the last call. */
static void assert_calls(int compilations, int binaries)
{
  assert_int_equal(compiled, compilations);
  assert_int_equal(from_binary, binaries);
  compiled = from_binary = 0;
}

/* ---- the key ----------------------------------------------------------------------------------------------------- */
static void a_changed_text_or_option_gives_new_code(void **state)
{
  static const struct {
    const char *included, *options;
    int answer;
  } each[] = {
    { ONE, "-DDEFINED=10", 11 },
    { TWO, "-DDEFINED=10", 12 },                      /* a file that another includes */
    { TWO, "-DDEFINED=20", 22 },                      /* a define */
    { TWO "\n", "-DDEFINED=20", 22 },                 /* no other code, and yet another text */
    { TWO, "-DDEFINED=20 -cl-mad-enable", 22 },       /* an option */
    { "", "-DDEFINED=10 -DINCLUDED=1", 11 },          /* the same from elsewhere */
    { "#define INCLUDED 100\n", "-DDEFINED=7", 107 }, /* one byte longer, the other shorter */
  };
  enum { N = sizeof each / sizeof *each };
  (void)state;
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < N; i++) assert_int_equal(built(each[i].included, each[i].options), each[i].answer);
    if (round == 0) assert_calls(N, 0);
    else assert_calls(0, N);
  }
  assert_int_equal(cache.n, N);
  assert_int_equal(cache.stores, N);
  assert_int_equal(cache.lines, 0);
}

static void another_driver_or_platform_starts_afresh(void **state)
{
  (void)state;
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  driver = "99.1";
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  driver = "99.2";
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  platform_version = "OpenCL 3.0 of another day";
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  assert_calls(4, 0);
  assert_int_equal(cache.n, 4);
  driver = "99.1";
  platform_version = NULL;
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  assert_calls(0, 1);
  assert_int_equal(cache.lines, 0);
  /* A device that does not say what it is: nothing is kept or asked for. */
  static char endless[5000];
  memset(endless, 'x', sizeof endless - 1);
  driver = endless;
  cache.loads = cache.stores = 0;
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  assert_calls(1, 0);
  assert_int_equal(cache.loads + cache.stores, 0);
}

/* ---- bad entries ------------------------------------------------------------------------------------------------- */
/* The entry, as it is now, is not used: a line with `why`, the program from source, a sound entry in its place. */
static void refused(const char *why, int reaches_driver)
{
  cache.lines = cache.stores = 0;
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  assert_calls(1, reaches_driver);
  assert_int_equal(cache.stores, 1);
  assert_int_equal(cache.lines, 1);
  if (!strstr(cache.line, why) || !strstr(cache.line, "program answer"))
    fail_msg("the line is \"%s\", wanted \"%s\" in it", cache.line, why);
}

static void put(const struct item *sound, uint64_t bytes)
{
  struct item *item = &cache.items[0];
  unsigned char *data = calloc(1, bytes + 1);
  assert_non_null(data);
  memcpy(data, sound->data, bytes < sound->bytes ? bytes : sound->bytes);
  free(item->data);
  item->data = data;
  item->bytes = bytes;
}

static void damaged_entries_never_reach_the_driver(void **state)
{
  enum { HEADER = 40 };
  struct item sound;
  (void)state;
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  sound = cache.items[0];
  sound.data = malloc(sound.bytes);
  assert_non_null(sound.data);
  memcpy(sound.data, cache.items[0].data, sound.bytes);
  assert_calls(1, 0);
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  assert_calls(0, 1);

  /* A bit of each byte of the header, and of some of the binary. */
  for (uint64_t at = 0; at < sound.bytes; at += at < HEADER ? 1 : 1 + sound.bytes / 5) {
    put(&sound, sound.bytes);
    cache.items[0].data[at] ^= (unsigned char)(1 << at % 8);
    refused(at < 8 ? "none of this" : at < 24 ? "another program" : at < 32 ? "size" : "checksum", 0);
  }
  put(&sound, sound.bytes);
  cache.items[0].data[sound.bytes - 1] ^= 0x80;
  refused("checksum", 0);

  /* Cut off, and longer. */
  const uint64_t lengths[] = {
    1, 7, HEADER - 1, HEADER, HEADER + 1, sound.bytes / 2, sound.bytes - 1, sound.bytes + 1
  };
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    put(&sound, lengths[i]);
    refused(lengths[i] < HEADER ? "cut off" : "size", 0);
  }
  /* Empty: as if there were none. */
  put(&sound, 0);
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  assert_calls(1, 0);

  for (cache.lying = 1; cache.lying <= 4; cache.lying++) {
    put(&sound, sound.bytes);
    refused(cache.lying == 1 ? "size" : cache.lying == 4 ? "cut off" : "could not be read", 0);
  }
  cache.lying = 0;
  free(sound.data);
}

static void an_entry_of_another_program_is_refused(void **state)
{
  (void)state;
  assert_int_equal(built(TWO, "-DDEFINED=10"), 12);
  compiled = 0;
  cache.deaf = 1;
  refused("another program", 0);
  cache.deaf = 0;
  driver = "99.1";
  cache.deaf = 1;
  refused("another program, device, driver", 0);
}

static void a_binary_that_the_driver_refuses(void **state)
{
  (void)state;
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
  compiled = 0;
  refuses_binaries = 1;
  refused("the driver refused it", 1);
}

/* ---- the callbacks ----------------------------------------------------------------------------------------------- */
static void an_entry_that_is_not_stored(void **state)
{
  (void)state;
  cache.refuses = MOE_ERR_IO;
  for (int i = 1; i <= 2; i++) {
    assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
    assert_calls(1, 0);
    assert_int_equal(cache.stores, i);
    assert_int_equal(cache.lines, i);
    assert_non_null(strstr(cache.line, moe_strerror(MOE_ERR_IO)));
  }
}

static void a_text_that_does_not_build_is_not_stored(void **state)
{
  (void)state;
  assert_int_equal(built("#error no\n", "-DDEFINED=10"), -1);
  assert_int_equal(cache.stores, 0);
  assert_int_equal(built(ONE, "-DDEFINED=10"), 11);
}

/* Through the public interface: the second context compiles nothing and computes the same. */
static void a_second_context_compiles_nothing(void **state)
{
  enum { N = 1000 };
  static double values[4][N];
  static const int64_t shape[1] = { N };
  int stored = 0;
  (void)state;
  for (int i = 0; i < 4; i++) {
    moe_context_desc desc = hooks_of(0);
    moe_context *ctx;
    moe_queue *q;
    moe_span span;
    moe_tensor t;
    if (i == 2) desc.cache_store = NULL; /* reads only */
    if (i == 3) desc.cache_load = NULL;  /* writes only */
    compiled = 0;
    OK(moe_context_create(&ctx, &desc));
    OK(moe_queue_create(&q, ctx));
    OK(moe_span_alloc(&span, ctx, N * 4));
    OK(moe_tensor_packed(&t, span, MOE_F32, 1, shape));
    OK(moe_tensor_normal(q, &t, 5, 0, 1));
    OK(moe_tensor_read(q, values[i], &t, N));
    assert_memory_equal(values[i], values[0], sizeof *values);
    if (i == 0) stored = cache.stores;
    assert_true(stored > 0);
    assert_int_equal(compiled, i == 0 || i == 3 ? stored : 0);
    assert_int_equal(cache.stores, i == 3 ? 2 * stored : stored);
    moe_span_free(ctx, &span);
    moe_queue_free(q);
    moe_context_free(ctx);
  }
  assert_int_equal(cache.lines, 0);
}

/* Two contexts, two threads each, one cache: `enter` aborts where a context's calls overlap. */
static moe_context *shared[2];
static void *create_objects(void *number)
{
  static const int64_t shape[1] = { 64 };
  const int n = *(int *)number;
  moe_context *ctx = shared[n % 2];
  moe_queue *q;
  if (moe_queue_create(&q, ctx)) return NULL;
  for (int i = 0; i <= test_has_fp64(ctx); i++) {
    moe_span span;
    moe_tensor t;
    if (moe_span_alloc(&span, ctx, 512) || moe_tensor_packed(&t, span, i ? MOE_F64 : MOE_F32, 1, shape) ||
        moe_tensor_fill(q, &t, 1) || moe_queue_wait(q))
      return NULL;
    moe_span_free(ctx, &span);
  }
  moe_queue_free(q);
  return number;
}
static void several_threads(void **state)
{
  pthread_t threads[THREADS];
  int numbers[THREADS];
  void *done;
  (void)state;
  for (int i = 0; i < 2; i++) {
    moe_context_desc desc = hooks_of(i);
    OK(moe_context_create(&shared[i], &desc));
  }
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    assert_int_equal(pthread_create(&threads[i], NULL, create_objects, &numbers[i]), 0);
  }
  for (int i = 0; i < THREADS; i++) {
    pthread_join(threads[i], &done);
    assert_ptr_equal(done, &numbers[i]);
  }
  assert_int_equal(cache.n, 1 + test_has_fp64(shared[0]));
  for (int i = 0; i < 2; i++) moe_context_free(shared[i]);
  assert_int_equal(cache.lines, 0);
}
#endif

static void other_backends_call_nothing(void **state)
{
  static const int64_t shape[1] = { 64 };
  moe_context_desc desc = hooks_of(0);
  moe_context *ctx;
  moe_queue *q;
  moe_span span;
  moe_tensor t;
  (void)state;
  OK(moe_context_create(&ctx, &desc));
  OK(moe_queue_create(&q, ctx));
  OK(moe_span_alloc(&span, ctx, 256));
  OK(moe_tensor_packed(&t, span, MOE_F32, 1, shape));
  OK(moe_tensor_fill(q, &t, 1));
  OK(moe_queue_wait(q));
  moe_span_free(ctx, &span);
  moe_queue_free(q);
  moe_context_free(ctx);
  assert_int_equal(cache.loads + cache.stores + cache.lines, 0);
}

int main(void)
{
  moe_context *ctx;
  moe_queue *q;
  moe_device_info info = moe_device_info_init();
  if (!test_open(&ctx, &q)) return 77;
  if (moe_context_info(ctx, &info)) return 1;
  test_close(ctx, q);
  device_id = info.id;
#if MOE_HAVE_OPENCL
#define TEST(name) cmocka_unit_test_setup(name, setup)
  const struct CMUnitTest tests[] = {
    TEST(a_changed_text_or_option_gives_new_code),
    TEST(another_driver_or_platform_starts_afresh),
    TEST(damaged_entries_never_reach_the_driver),
    TEST(an_entry_of_another_program_is_refused),
    TEST(a_binary_that_the_driver_refuses),
    TEST(an_entry_that_is_not_stored),
    TEST(a_text_that_does_not_build_is_not_stored),
    TEST(a_second_context_compiles_nothing),
    TEST(several_threads),
  };
  if (!strcmp(info.backend, "opencl")) return cmocka_run_group_tests(tests, bend, unbend) ? 1 : 0;
#endif
  const struct CMUnitTest others[] = { cmocka_unit_test(other_backends_call_nothing) };
  return cmocka_run_group_tests(others, NULL, empty) ? 1 : 0;
}
