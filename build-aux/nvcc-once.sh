#!/bin/sh
# nvcc-once.sh NVCC ARGS... : runs nvcc once where libtool asks twice.
# With static libraries enabled libtool asks for DIR/.libs/X.o and then for DIR/X.o. CUDA objects are
# position-independent either way, so the second is a copy of the first.
prev= out=
for arg do
  test "x$prev" = x-o && out=$arg
  prev=$arg
done
case $out in
  */.libs/*) ;;
  *)
    pic=`dirname "$out"`/.libs/`basename "$out"`
    test -f "$pic" && exec cp -f "$pic" "$out"
    ;;
esac
exec "$@"
