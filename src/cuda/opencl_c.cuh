/* opencl_c.cuh - lets nvcc compile the portable kernels: the part of OpenCL C 1.2 that they use, in CUDA.
   Included before common.clh, which defines the rest for both languages.

   CUDA itself has exp, log, log1p, expm1, sqrt, erfc, fma, fabs, fmax, cos, min, max, NAN, INFINITY and the vector
   types with their x, y, z, w, all with OpenCL's meaning for
   float, double and the integers (not for NaN: see common.clh).  There are no vector operators or literals. */
#ifndef MOE_OPENCL_C_CUH
#define MOE_OPENCL_C_CUH

#define MOE_CUDA 1
#define MOE_PTX 1

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong; /* 64 bits, as in OpenCL C */
typedef unsigned short half; /* storage only: vload_half and vstore_half_rte */

#define GLOBAL
#define LOCAL
#define KERNEL(name) extern "C" __global__ void name
#define FN static __device__ __forceinline__
#define LOCAL_ARRAY(type, name, n) __shared__ type name[n]
#define BARRIER() __syncthreads()
#define GROUP_BARRIER() __syncthreads()
#define GROUP_BARRIER_GLOBAL() __syncthreads()
#define GROUP(d) ((long)((d) == 0 ? blockIdx.x : (d) == 1 ? blockIdx.y : blockIdx.z))
#define GROUPS(d) ((long)((d) == 0 ? gridDim.x : (d) == 1 ? gridDim.y : gridDim.z))
#define LID ((int)threadIdx.x)
#define LSIZE ((int)blockDim.x)
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(n) UNROLL_BY_(unroll n)
#define UNROLL_BY_(text) _Pragma(#text)
#define ATOMIC_OR(p, v) atomicOr((int *)(p), v)
#define ATOMIC_MIN(p, v) atomicMin((unsigned int *)(p), v)
#define LOCAL_SIZE(n) __launch_bounds__(n, 2) /* two groups in a multiprocessor: 3 to 5% in GEMM */
#ifdef MOE_ST_F64
#define RESIDENT(n)
#else
#define RESIDENT(n) __launch_bounds__(256, n) /* registers for n groups of up to 256 in a multiprocessor */
#endif
#define AS_UINT(x) __float_as_uint(x)
#define AS_FLOAT(x) __uint_as_float(x)

FN float vload_half(long i, const half *p)
{
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(p[i]));
  return f;
}
FN void vstore_half_rte(float f, long i, half *p)
{
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  p[i] = h;
}

FN int clz(int i)
{
  return __clz(i);
}
FN int popcount(uint i)
{
  return __popc(i);
}
FN int as_int(float f)
{
  return __float_as_int(f);
}
FN float as_float(int i)
{
  return __int_as_float(i);
}
FN long as_long(double d)
{
  return __double_as_longlong(d);
}
FN double as_double(long l)
{
  return __longlong_as_double(l);
}

/* On int, in global and local memory. */
#define atomic_inc(p) atomicAdd(p, 1)
#define atomic_add(p, v) atomicAdd(p, v)

#endif
