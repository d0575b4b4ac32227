/* loader.c - finds libOpenCL at run time; names of OpenCL's error codes. */
#include "opencl/loader.h"

#include <dlfcn.h>
#include <pthread.h>

struct moe__cl moe__cl;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int opened;
static const char *missing; /* the first function that the loader lacks */

static void load(void)
{
  void *library = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) library = dlopen("libOpenCL.so", RTLD_NOW | RTLD_LOCAL);
  opened = library != NULL;
  if (!opened) return;
#define X(f)                                                                                                           \
  *(void **)&moe__cl.f = dlsym(library, #f);                                                                           \
  if (!moe__cl.f && !missing) missing = #f;
  MOE__CL_FUNCTIONS(X)
#undef X
}

moe_status moe__cl_load(void)
{
  pthread_once(&once, load);
  if (!opened) return moe__fail(MOE_ERR_NO_DEVICE, "libOpenCL.so.1 is not installed: apt install ocl-icd-libopencl1");
  if (missing)
    return moe__fail(MOE_ERR_NO_DEVICE, "libOpenCL.so.1 lacks %s of OpenCL 1.2: apt install ocl-icd-libopencl1",
                     missing);
  return MOE_OK;
}

const char *moe__cl_error(cl_int code)
{
  switch (code) {
#define X(name)                                                                                                        \
  case name: return #name;
    X(CL_DEVICE_NOT_FOUND)
    X(CL_DEVICE_NOT_AVAILABLE)
    X(CL_COMPILER_NOT_AVAILABLE)
    X(CL_MEM_OBJECT_ALLOCATION_FAILURE)
    X(CL_OUT_OF_RESOURCES)
    X(CL_OUT_OF_HOST_MEMORY)
    X(CL_PROFILING_INFO_NOT_AVAILABLE)
    X(CL_MEM_COPY_OVERLAP)
    X(CL_IMAGE_FORMAT_MISMATCH)
    X(CL_IMAGE_FORMAT_NOT_SUPPORTED)
    X(CL_BUILD_PROGRAM_FAILURE)
    X(CL_MAP_FAILURE)
    X(CL_MISALIGNED_SUB_BUFFER_OFFSET)
    X(CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST)
    X(CL_COMPILE_PROGRAM_FAILURE)
    X(CL_LINKER_NOT_AVAILABLE)
    X(CL_LINK_PROGRAM_FAILURE)
    X(CL_DEVICE_PARTITION_FAILED)
    X(CL_KERNEL_ARG_INFO_NOT_AVAILABLE)
    X(CL_INVALID_VALUE)
    X(CL_INVALID_DEVICE_TYPE)
    X(CL_INVALID_PLATFORM)
    X(CL_INVALID_DEVICE)
    X(CL_INVALID_CONTEXT)
    X(CL_INVALID_QUEUE_PROPERTIES)
    X(CL_INVALID_COMMAND_QUEUE)
    X(CL_INVALID_HOST_PTR)
    X(CL_INVALID_MEM_OBJECT)
    X(CL_INVALID_IMAGE_FORMAT_DESCRIPTOR)
    X(CL_INVALID_IMAGE_SIZE)
    X(CL_INVALID_SAMPLER)
    X(CL_INVALID_BINARY)
    X(CL_INVALID_BUILD_OPTIONS)
    X(CL_INVALID_PROGRAM)
    X(CL_INVALID_PROGRAM_EXECUTABLE)
    X(CL_INVALID_KERNEL_NAME)
    X(CL_INVALID_KERNEL_DEFINITION)
    X(CL_INVALID_KERNEL)
    X(CL_INVALID_ARG_INDEX)
    X(CL_INVALID_ARG_VALUE)
    X(CL_INVALID_ARG_SIZE)
    X(CL_INVALID_KERNEL_ARGS)
    X(CL_INVALID_WORK_DIMENSION)
    X(CL_INVALID_WORK_GROUP_SIZE)
    X(CL_INVALID_WORK_ITEM_SIZE)
    X(CL_INVALID_GLOBAL_OFFSET)
    X(CL_INVALID_EVENT_WAIT_LIST)
    X(CL_INVALID_EVENT)
    X(CL_INVALID_OPERATION)
    X(CL_INVALID_GL_OBJECT)
    X(CL_INVALID_BUFFER_SIZE)
    X(CL_INVALID_MIP_LEVEL)
    X(CL_INVALID_GLOBAL_WORK_SIZE)
    X(CL_INVALID_PROPERTY)
    X(CL_INVALID_IMAGE_DESCRIPTOR)
    X(CL_INVALID_COMPILER_OPTIONS)
    X(CL_INVALID_LINKER_OPTIONS)
    X(CL_INVALID_DEVICE_PARTITION_COUNT)
#undef X
  case -1001: return "CL_PLATFORM_NOT_FOUND_KHR";
  case -9999: return "NVIDIA's code for an illegal access to a buffer";
  default: return "unknown error";
  }
}

#ifdef MOE_DEBUG
static _Atomic long live;

void moe__cl_count(int change)
{
  live += change;
}

long moe__cl_live(void)
{
  return live;
}
#endif
