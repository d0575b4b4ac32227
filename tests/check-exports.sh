#!/bin/sh
# check-exports.sh        : is what libmoe.so exports just what tests/abi/moe.syms lists, and does it need
#                           no more than the C library? Runs in the build folder; prints CMocka's lines.
# check-exports.sh --list : prints the exported names (make update-abi).
srcdir=${srcdir:-`dirname "$0"`/..}
lib=.libs/libmoe.so
test -f $lib || { echo "SKIP: no shared library was built"; exit 77; }

exported() { ${NM:-nm} -D --defined-only $lib | awk '{ print $NF }' | LC_ALL=C sort; }
if test "x$1" = x--list; then exported; exit; fi

exported_names_are_the_listed_ones() {
  exported | diff "$srcdir/tests/abi/moe.syms" - || { echo 'if that is meant: make update-abi'; return 1; }
}
only_public_names_are_exported() {
  ! exported | grep -v '^moe_[^_]'
}
no_cxx_runtime_is_needed() {
  ! ${NM:-nm} -D --undefined-only $lib | grep -E '_Z|__gxx|_Unwind|__cxa_(throw|guard|pure)'
}
only_the_c_library_and_jansson_are_needed() {
  ! readelf -d $lib | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -Ev '^(libc|libm|libdl|libpthread|librt|ld-linux.*|libjansson|libasan|libubsan)\.so'
}

tests='exported_names_are_the_listed_ones only_public_names_are_exported no_cxx_runtime_is_needed
  only_the_c_library_and_jansson_are_needed'
rc=0
echo '[==========] Running 4 test(s).'
for t in $tests; do
  if $t; then echo "[       OK ] $t"; else echo "[  FAILED  ] $t"; rc=1; fi
done
echo '[==========] 4 test(s) run.'
exit $rc
