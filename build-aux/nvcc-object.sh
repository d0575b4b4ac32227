#!/bin/sh
# nvcc-object.sh NVCC ARGS... : runs nvcc once where libtool asks twice.
# With static libraries enabled libtool asks for DIR/.libs/X.o and then for DIR/X.o. CUDA objects are
# position-independent either way, so the second is a copy of the first.
# Fails too where ptxas made wgmma instructions wait for each other, which it only mentions.
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
said=`"$@" 2>&1`
status=$?
test -z "$said" || printf '%s\n' "$said" >&2
case $said in
  *'Potential Performance Loss'*) rm -f "$out"; exit 1 ;;
esac
exit $status
