/* moe/moe.h - all of libmoe except the headers that name a runtime (moe/cuda.h, moe/opencl.h, moe/dlpack.h). */
#ifndef MOE_MOE_H
#define MOE_MOE_H

#include <moe/base.h>
#include <moe/checkpoint.h>
#include <moe/context.h>
#include <moe/experts.h>
#include <moe/layer.h>
#include <moe/optim.h>
#include <moe/tape.h>
#include <moe/tensor.h>

#endif
