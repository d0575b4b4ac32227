/* program.c - see program.h.  An entry of the cache is a header and the driver's binary; nothing of it reaches the
   driver before both were verified, since drivers crash on binaries that are not theirs. */
#include "opencl/program.h"

#include "core/hash.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST_BYTES = 1 << 28 }; /* larger than any program */

struct header {
  char magic[8];
  XXH128_hash_t key;
  uint64_t bytes, checksum; /* of the binary */
};
static const char magic[8] = "moe-cl1";

static void say(const moe_context_desc *hooks, const struct moe__cl_text *text, const char *what, const char *why)
{
  char line[256];
  if (!hooks->log) return;
  snprintf(line, sizeof line, "%s: %s%s", text->name, what, why);
  hooks->log(hooks->user, 1, line);
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

/* With its end, so that no two lists of texts are the same bytes. */
static void add(XXH3_state_t *hash, const char *text)
{
  (void)XXH3_128bits_update(hash, text, strlen(text) + 1);
}

/* 0 where the device does not tell what it is. */
static int add_device(XXH3_state_t *hash, cl_device_id device)
{
  static const cl_device_info of_device[] = { CL_DEVICE_NAME, CL_DEVICE_VENDOR, CL_DEVICE_VERSION, CL_DRIVER_VERSION,
                                              CL_DEVICE_OPENCL_C_VERSION };
  static const cl_platform_info of_platform[] = { CL_PLATFORM_NAME, CL_PLATFORM_VENDOR, CL_PLATFORM_VERSION };
  cl_platform_id platform = NULL;
  char text[1024];
  if (moe__cl.clGetDeviceInfo(device, CL_DEVICE_PLATFORM, sizeof platform, &platform, NULL)) return 0;
  for (size_t i = 0; i < sizeof of_device / sizeof *of_device; i++) {
    if (moe__cl.clGetDeviceInfo(device, of_device[i], sizeof text, text, NULL)) return 0;
    add(hash, text);
  }
  for (size_t i = 0; i < sizeof of_platform / sizeof *of_platform; i++) {
    if (moe__cl.clGetPlatformInfo(platform, of_platform[i], sizeof text, text, NULL)) return 0;
    add(hash, text);
  }
  return 1;
}

static int make_key(XXH128_hash_t *key, cl_device_id device, const struct moe__cl_text *text)
{
  XXH3_state_t *hash = XXH3_createState();
  int good;
  if (!hash) return 0;
  (void)XXH3_128bits_reset(hash);
  add(hash, moe_version_string());
  for (int i = 0; i < MOE__CL_STRINGS; i++) add(hash, text->strings[i]);
  add(hash, text->options);
  good = add_device(hash, device);
  *key = XXH3_128bits_digest(hash);
  (void)XXH3_freeState(hash);
  return good;
}

/* ---- the cache --------------------------------------------------------------------------------------------------- */
struct entry {
  XXH128_hash_t key;
  char name[33]; /* the key in hexadecimal digits */
};

/* The entry's bytes, for the caller to free; NULL: there are none, or not as many as the first call said. */
static unsigned char *read_entry(uint64_t *bytes, const struct entry *e, const moe_context_desc *hooks)
{
  unsigned char *data;
  *bytes = hooks->cache_load(hooks->user, e->name, NULL, 0);
  if (!*bytes || *bytes > MOST_BYTES) return NULL;
  data = malloc(*bytes);
  if (data && hooks->cache_load(hooks->user, e->name, data, *bytes) == *bytes) return data;
  free(data);
  return NULL;
}

/* Why an entry of so many bytes is not to be used; NULL: it is sound. */
static const char *fault_of(const unsigned char *data, uint64_t bytes, const struct entry *e)
{
  struct header h;
  if (bytes < sizeof h) return "it is cut off";
  memcpy(&h, data, sizeof h);
  if (memcmp(h.magic, magic, sizeof magic)) return "it is none of this library's";
  if (!XXH128_isEqual(h.key, e->key)) return "it is of another program, device, driver or library";
  if (h.bytes != bytes - sizeof h) return "its size is wrong";
  if (h.checksum != moe__hash(data + sizeof h, h.bytes)) return "its checksum is wrong";
  return NULL;
}

static cl_program load(cl_context context, cl_device_id device, const struct moe__cl_text *text, const struct entry *e,
                       const moe_context_desc *hooks)
{
  cl_program program = NULL;
  uint64_t bytes;
  unsigned char *data = read_entry(&bytes, e, hooks);
  const char *fault = data ? fault_of(data, bytes, e) : bytes ? "it could not be read" : NULL;
  if (data && !fault) {
    const unsigned char *binary = data + sizeof(struct header);
    const size_t size = bytes - sizeof(struct header);
    program = moe__cl_made(moe__cl.clCreateProgramWithBinary(context, 1, &device, &size, &binary, NULL, NULL));
    if (!program || moe__cl.clBuildProgram(program, 1, &device, text->options, NULL, NULL)) {
      fault = "the driver refused it";
      moe__cl_drop(Program, program);
      program = NULL;
    }
  }
  if (fault) say(hooks, text, "the cached binary is not used: ", fault);
  free(data);
  return program;
}

/* The driver's binary behind room for a header, for the caller to free; NULL: it gives none. */
static unsigned char *binary_of(uint64_t *bytes, cl_program program, cl_device_id device)
{
  enum { MOST_DEVICES = 64 };
  cl_device_id devices[MOST_DEVICES];
  size_t sizes[MOST_DEVICES], n = 0, at = 0;
  unsigned char *binaries[MOST_DEVICES] = { NULL };
  if (moe__cl.clGetProgramInfo(program, CL_PROGRAM_DEVICES, sizeof devices, devices, &n) ||
      moe__cl.clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof sizes, sizes, NULL))
    return NULL;
  n /= sizeof *devices;
  while (at < n && devices[at] != device) at++;
  if (at == n || !sizes[at] || sizes[at] > MOST_BYTES - sizeof(struct header)) return NULL;
  unsigned char *data = malloc(sizeof(struct header) + sizes[at]);
  if (!data) return NULL;
  binaries[at] = data + sizeof(struct header);
  *bytes = sizes[at];
  if (!moe__cl.clGetProgramInfo(program, CL_PROGRAM_BINARIES, n * sizeof *binaries, binaries, NULL)) return data;
  free(data);
  return NULL;
}

static void store(cl_program program, cl_device_id device, const struct moe__cl_text *text, const struct entry *e,
                  const moe_context_desc *hooks)
{
  struct header h = { .key = e->key };
  unsigned char *data = binary_of(&h.bytes, program, device);
  moe_status status;
  if (!data) {
    say(hooks, text, "not cached: ", "the driver gives no binary");
    return;
  }
  memcpy(h.magic, magic, sizeof magic);
  h.checksum = moe__hash(data + sizeof h, h.bytes);
  memcpy(data, &h, sizeof h);
  status = hooks->cache_store(hooks->user, e->name, data, sizeof h + h.bytes);
  if (status) say(hooks, text, "not cached: ", moe_strerror(status));
  free(data);
}

cl_int moe__cl_build(cl_program *out, cl_context context, cl_device_id device, const struct moe__cl_text *text,
                     const moe_context_desc *hooks)
{
  struct entry e;
  const int keyed = (hooks->cache_load || hooks->cache_store) && make_key(&e.key, device, text);
  const char *strings[MOE__CL_STRINGS];
  cl_int code = CL_INVALID_PROGRAM;
  if (keyed)
    snprintf(e.name, sizeof e.name, "%016llx%016llx", (unsigned long long)e.key.high64,
             (unsigned long long)e.key.low64);
  if (keyed && hooks->cache_load && (*out = load(context, device, text, &e, hooks))) return CL_SUCCESS;
  memcpy(strings, text->strings, sizeof strings); /* the call's type is not const */
  *out = moe__cl_made(moe__cl.clCreateProgramWithSource(context, MOE__CL_STRINGS, strings, NULL, &code));
  if (*out) code = moe__cl.clBuildProgram(*out, 1, &device, text->options, NULL, NULL);
  if (!code && keyed && hooks->cache_store) store(*out, device, text, &e, hooks);
  return code;
}
