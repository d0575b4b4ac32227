#!/bin/sh
# check-fuzz.sh : any bytes as a checkpoint: the corpus, then mutations of it for some seconds (MOE_TEST_LONG: ten
# minutes). Runs in the build folder; prints CMocka's lines.
srcdir=${srcdir:-`dirname "$0"`/..}
seconds=5
test -z "$MOE_TEST_SHORT" || seconds=2
test -z "$MOE_TEST_LONG" || seconds=600
work=`mktemp -d` || exit 1
trap 'rm -rf "$work"' EXIT
fuzz() { tests/fuzz/fuzz_checkpoint -artifact_prefix=tests/fuzz/ "$@"; }

the_corpus_is_handled() {
  fuzz -runs=0 "$srcdir/tests/fuzz/corpus"
}
mutations_are_handled() {
  fuzz -max_total_time=$seconds -max_len=65536 -malloc_limit_mb=8 -rss_limit_mb=1024 \
    -dict="$srcdir/tests/fuzz/checkpoint.dict" -seed=$$ "$work" "$srcdir/tests/fuzz/corpus"
}

rc=0
echo '[==========] Running 2 test(s).'
for t in the_corpus_is_handled mutations_are_handled; do
  echo "[ RUN      ] $t"
  if $t >"$work.log" 2>&1; then echo "[       OK ] $t"; else cat "$work.log"; echo "[  FAILED  ] $t"; rc=1; fi
  grep '^Done ' "$work.log"
done
echo '[==========] 2 test(s) run.'
rm -f "$work.log"
exit $rc
