#!/bin/sh
# bench.sh 'PROGRAM [ARGUMENT...]'... : runs the benchmarks one after another, shows what they print, and counts:
# exit status 0 is passed (all floors reached), 77 skipped, any other failed. Ends with the line of counts.
passed=0 failed=0 skipped=0
for program do
  echo "== $program"
  ./$program
  case $? in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)); echo "FAIL: $program" ;;
  esac
done
echo "$passed passed, $failed failed, $skipped skipped"
test $failed = 0
