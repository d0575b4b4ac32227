/* loader.h - the OpenCL functions that the backend uses, found at run time.

   libmoe does not link libOpenCL: moe__cl_load opens it at the first use, so the library loads where it
   is not installed, and a program that lends a context shares the loader with us.  Objects are made
   through moe__cl_made or moe__cl_keep and given back through moe__cl_drop: debug builds count them,
   since a leak checker cannot see a forgotten clRelease. */
#ifndef MOE_OPENCL_LOADER_H
#define MOE_OPENCL_LOADER_H

#include "core/status.h"

#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>

#define MOE__CL_FUNCTIONS(X)                                                                                           \
  X(clGetPlatformIDs)                                                                                                  \
  X(clGetPlatformInfo)                                                                                                 \
  X(clGetDeviceIDs)                                                                                                    \
  X(clGetDeviceInfo)                                                                                                   \
  X(clRetainDevice)                                                                                                    \
  X(clReleaseDevice)                                                                                                   \
  X(clCreateContext)                                                                                                   \
  X(clGetContextInfo)                                                                                                  \
  X(clRetainContext)                                                                                                   \
  X(clReleaseContext)                                                                                                  \
  X(clCreateCommandQueue)                                                                                              \
  X(clGetCommandQueueInfo)                                                                                             \
  X(clRetainCommandQueue)                                                                                              \
  X(clReleaseCommandQueue)                                                                                             \
  X(clCreateBuffer)                                                                                                    \
  X(clGetMemObjectInfo)                                                                                                \
  X(clRetainMemObject)                                                                                                 \
  X(clReleaseMemObject)                                                                                                \
  X(clCreateProgramWithSource)                                                                                         \
  X(clCreateProgramWithBinary)                                                                                         \
  X(clBuildProgram)                                                                                                    \
  X(clGetProgramInfo)                                                                                                  \
  X(clGetProgramBuildInfo)                                                                                             \
  X(clReleaseProgram)                                                                                                  \
  X(clCreateKernel)                                                                                                    \
  X(clSetKernelArg)                                                                                                    \
  X(clReleaseKernel)                                                                                                   \
  X(clEnqueueNDRangeKernel)                                                                                            \
  X(clEnqueueWriteBuffer)                                                                                              \
  X(clEnqueueReadBuffer)                                                                                               \
  X(clEnqueueCopyBuffer)                                                                                               \
  X(clEnqueueFillBuffer)                                                                                               \
  X(clFlush)                                                                                                           \
  X(clFinish)

/* Valid after moe__cl_load returned MOE_OK. */
extern struct moe__cl {
#define X(f) __typeof__(&f) f;
  MOE__CL_FUNCTIONS(X)
#undef X
} moe__cl;

/* Once per process, thread safe.  MOE_ERR_NO_DEVICE, with what to install, at this and every later call. */
moe_status moe__cl_load(void);
/* "CL_OUT_OF_RESOURCES"; "unknown error" for a code that is none. */
const char *moe__cl_error(cl_int code);

#ifdef MOE_DEBUG
void moe__cl_count(int change);
long moe__cl_live(void); /* objects made and not given back */
#else
static inline void moe__cl_count(int change)
{
  (void)change;
}
#endif
/* What a clCreate call gave: an object or NULL. */
static inline void *moe__cl_made(void *object)
{
  if (object) moe__cl_count(1);
  return object;
}
/* The object with one more reference; NULL, with the reason in *code, where the driver refuses. */
#define moe__cl_keep(Type, object, code)                                                                               \
  ((*(code) = moe__cl.clRetain##Type(object)) == CL_SUCCESS ? moe__cl_made(object) : NULL)
/* NULL is fine. */
#define moe__cl_drop(Type, object)                                                                                     \
  do {                                                                                                                 \
    if (object) {                                                                                                      \
      moe__cl.clRelease##Type(object);                                                                                 \
      moe__cl_count(-1);                                                                                               \
    }                                                                                                                  \
  } while (0)

/* impls.c: the tuned implementations. */
extern const struct moe__ops moe__opencl_ops;

#endif
