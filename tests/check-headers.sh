#!/bin/sh
# check-headers.sh : does every public header compile alone, twice over, as C11 and as C++11, with
# warnings as errors? Prints CMocka's lines.
srcdir=${srcdir:-`dirname "$0"`/..}
set -- "$srcdir"/include/moe/*.h
warnings='-Wall -Wextra -Wpedantic -Wshadow -Wundef -Wcast-qual -Werror'
work=`mktemp -d` || exit 1
trap 'rm -rf "$work"' EXIT
rc=0

# check LANGUAGE COMPILER STANDARD HEADER
check() {
  name=$1_`basename "$4"`
  printf '#include <moe/%s>\n#include <moe/%s>\nint moe_header_test;\n' "${4##*/}" "${4##*/}" >"$work/t.$1"
  if test -z "$2" || ! echo 'int x;' | $2 -x $1 -fsyntax-only - 2>/dev/null; then echo "[  SKIPPED ] $name"
  elif $2 $3 $warnings -I"$srcdir/include" -fsyntax-only "$work/t.$1"; then echo "[       OK ] $name"
  else echo "[  FAILED  ] $name"; rc=1
  fi
}

echo "[==========] Running $(($# * 2)) test(s)."
for header do
  check c "${CC:-cc}" -std=c11 "$header"
  check c++ "${CXX-c++}" '-std=c++11' "$header"
done
echo "[==========] $(($# * 2)) test(s) run."
exit $rc
