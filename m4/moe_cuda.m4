# MOE_CUDA
# Looks for the CUDA toolkit: --with-cuda[=DIR], --without-cuda, --with-cuda-arch=LIST.
# Sets have_cuda (yes or no), cuda_why (the reason for a no), sm90 (yes or no), and substitutes NVCC,
# NVCCFLAGS, CUDA_CPPFLAGS, CUDA_LIBS, CUDA_GENCODE and CUDA_GENCODE_SM90A.
AC_DEFUN([MOE_CUDA], [
  AC_ARG_WITH([cuda],
    [AS_HELP_STRING([--with-cuda@<:@=DIR@:>@],
      [build the CUDA backend with nvcc of PATH, of DIR/bin or of /usr/local/cuda/bin [default: if there is one]])],
    [], [with_cuda=check])
  AC_ARG_WITH([cuda-arch],
    [AS_HELP_STRING([--with-cuda-arch=LIST],
      [compute capabilities with machine code; the lowest also gets PTX for all later ones @<:@80,90@:>@])],
    [], [with_cuda_arch=80,90])
  AC_ARG_VAR([NVCC], [CUDA compiler])
  AC_ARG_VAR([NVCCFLAGS], [flags for nvcc, those for its host compiler as --compiler-options=A,B])
  have_cuda=no cuda_why= sm90=no
  AS_CASE([$with_cuda],
    [no], [cuda_why='configured --without-cuda'],
    [MOE_CUDA_FIND
     AS_IF([test "$with_cuda" != check && test "$have_cuda" = no],
       [AC_MSG_ERROR([--with-cuda was given, but: $cuda_why])])])
])

AC_DEFUN([MOE_CUDA_FIND], [
  AS_CASE([$with_cuda],
    [check|yes], [AC_PATH_PROG([NVCC], [nvcc], [], [$PATH$PATH_SEPARATOR/usr/local/cuda/bin])],
    [AS_IF([test -x "$with_cuda/bin/nvcc"], [NVCC=$with_cuda/bin/nvcc],
       [AC_MSG_ERROR([--with-cuda=$with_cuda: there is no $with_cuda/bin/nvcc])])])

  # One -gencode for each capability; PTX goes with the lowest.
  CUDA_GENCODE= moe_low=
  for moe_arch in `echo "$with_cuda_arch" | tr ', ' '\n\n' | sort -n`; do
    AS_CASE([$moe_arch], [*@<:@!0-9@:>@*],
      [AC_MSG_ERROR([--with-cuda-arch takes numbers like 80,90, not '$moe_arch'])])
    CUDA_GENCODE="$CUDA_GENCODE -gencode=arch=compute_$moe_arch,code=sm_$moe_arch"
    test -n "$moe_low" || moe_low=$moe_arch
  done
  CUDA_GENCODE="$CUDA_GENCODE -gencode=arch=compute_$moe_low,code=compute_$moe_low"
  CUDA_GENCODE_SM90A=-gencode=arch=compute_90a,code=sm_90a

  AC_MSG_CHECKING([for a working CUDA toolkit])
  AS_IF([test -z "$NVCC"], [cuda_why='no nvcc found'], [
    # nvcc may be a wrapper and distributions scatter the folders: nvcc itself knows them.
    moe_inc= moe_lib=
    eval `"$NVCC" -dryrun -x cu /dev/null 2>&1 | sed -n \
      -e 's/^#\\$ INCLUDES= *\(.*\)$/moe_inc='"'\1'"'/p' -e 's/^#\\$ LIBRARIES= *\(.*\)$/moe_lib='"'\1'"'/p'`
    CUDA_CPPFLAGS= CUDA_LIBS=
    for moe_word in `echo "$moe_inc" | tr -d '"'`; do
      moe_dir=`echo "$moe_word" | sed 's/^-I//'`
      AS_IF([test -f "$moe_dir/cuda_runtime_api.h"],
        [test "$moe_dir" = /usr/include || CUDA_CPPFLAGS="-isystem $moe_dir"])
    done
    for moe_word in `echo "$moe_lib" | tr -d '"'`; do
      moe_dir=`echo "$moe_word" | sed 's/^-L//'`
      AS_IF([test -f "$moe_dir/libcudart_static.a"], [CUDA_LIBS="-L`cd "$moe_dir" && pwd`"])
    done
    CUDA_LIBS="$CUDA_LIBS -lcudart_static -ldl -lrt"

    # A kernel must really compile (nvcc without a C++ compiler, or with one too new, exists and fails) ...
    mkdir conftest.dir
    echo 'extern "C" __global__ void k(float *x) { *x = 1; }' >conftest.dir/k.cu
    AS_IF([(cd conftest.dir && "$NVCC" $NVCCFLAGS $CUDA_GENCODE -fatbin -o k.fatbin k.cu) >conftest.log 2>&1], [
      # ... and a C program link with the runtime alone.
      moe_saved_CPPFLAGS=$CPPFLAGS moe_saved_LIBS=$LIBS
      CPPFLAGS="$CPPFLAGS $CUDA_CPPFLAGS" LIBS="$CUDA_LIBS -lpthread $LIBS"
      AC_LINK_IFELSE([AC_LANG_PROGRAM([[#include <cuda_runtime_api.h>
          #if CUDART_VERSION < 12050
          #error too old
          #endif]], [[int n; return cudaGetDeviceCount(&n);]])],
        [have_cuda=yes], [cuda_why="a program with cuda_runtime_api.h (12.5 or later) and cudart_static does not link"])
      CPPFLAGS=$moe_saved_CPPFLAGS LIBS=$moe_saved_LIBS
    ], [cat conftest.log >&AS_MESSAGE_LOG_FD
        cuda_why="$NVCC does not compile: `sed 's/"//g;q' conftest.log`"])

    AS_IF([test $have_cuda = yes], [
      AS_IF([(cd conftest.dir && "$NVCC" $CUDA_GENCODE --compress-mode=size -fatbin -o k.fatbin k.cu) >/dev/null 2>&1],
        [CUDA_GENCODE="$CUDA_GENCODE --compress-mode=size"
         CUDA_GENCODE_SM90A="$CUDA_GENCODE_SM90A --compress-mode=size"])
      echo '__global__ void k(void) { asm volatile("wgmma.fence.sync.aligned;"); }' >conftest.dir/w.cu
      AS_IF([(cd conftest.dir && "$NVCC" $CUDA_GENCODE_SM90A -fatbin -o w.fatbin w.cu) >/dev/null 2>&1], [sm90=yes])
    ])
    rm -rf conftest.dir conftest.log
  ])
  AC_MSG_RESULT([$have_cuda${cuda_why:+ ($cuda_why)}])
  AC_SUBST([CUDA_CPPFLAGS])
  AC_SUBST([CUDA_LIBS])
  AC_SUBST([CUDA_GENCODE])
  AC_SUBST([CUDA_GENCODE_SM90A])
])
