#!/bin/sh
# lint.sh FILE... : the checks of make lint: format, cppcheck, exports, headers. (Kernels in .cl are not among the
# files: clang-format takes the macros that make them both OpenCL C and CUDA for declarations.)
# Runs in the build folder with srcdir set. Ends with the line of counts.
passed=0 failed=0 skipped=0
count() {
  case $1 in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)); echo "FAIL: $2" ;;
  esac
}
in_tree() {
  for file do
    test -f "$file" || file=$srcdir/$file
    echo "$file"
  done
}

if clang-format --version >/dev/null 2>&1; then
  for file in `in_tree "$@"`; do
    clang-format --style=file --dry-run -Werror "$file" 2>/dev/null
    count $? "$file is not formatted (clang-format -i)"
  done
else
  echo 'SKIP: clang-format is not installed'
  count 77
fi

if cppcheck --version >/dev/null 2>&1; then
  cppcheck --quiet --language=c --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=1 \
    --suppress=missingInclude --suppress=unusedStructMember -j 2 -I "$srcdir/include" -I "$srcdir/src" \
    `in_tree "$@" | grep '\.c$'`
  count $? cppcheck
else
  echo 'SKIP: cppcheck is not installed'
  count 77
fi

for script in check-exports.sh check-headers.sh; do
  sh "$srcdir/tests/$script" >lint.log 2>&1
  rc=$?
  test $rc = 0 || cat lint.log
  passed=$((passed + `grep -c '^\[       OK' lint.log`))
  failed=$((failed + `grep -c '^\[  FAILED' lint.log`))
  skipped=$((skipped + `grep -c '^\[  SKIPPED' lint.log`))
  case $rc in 0|1) ;; *) count $rc "$script" ;; esac
done
rm -f lint.log

echo "$passed passed, $failed failed, $skipped skipped"
test $failed = 0
