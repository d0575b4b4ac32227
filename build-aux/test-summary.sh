#!/bin/sh
# test-summary.sh FILE.trs... : the one line "N passed, N failed, N skipped" that ends make check.
cat "$@" | awk '
$1 == ":test-result:" { c[$2]++ }
END {
  failed = c["FAIL"] + c["ERROR"] + c["XPASS"]
  printf "%d passed, %d failed, %d skipped\n", c["PASS"] + c["XFAIL"], failed, c["SKIP"]
  exit failed > 0
}'
