/* program.h - a built program: out of the caller's cache where that has a sound entry, else from source. */
#ifndef MOE_OPENCL_PROGRAM_H
#define MOE_OPENCL_PROGRAM_H

#include "opencl/loader.h"

#include <moe/context.h>

enum { MOE__CL_STRINGS = 4 };

/* All that the caller decides of a program. */
struct moe__cl_text {
  const char *strings[MOE__CL_STRINGS]; /* its source: these, one behind the other */
  const char *options;
  const char *name; /* for log lines */
};

/* CL_SUCCESS: *out is built.  Else *out is NULL, or the program whose build failed and whose log can be read.
   hooks: cache_load, cache_store and log. */
cl_int moe__cl_build(cl_program *out, cl_context context, cl_device_id device, const struct moe__cl_text *text,
                     const moe_context_desc *hooks);

#endif
