#!/bin/sh
# run-device.sh [--demo] [--sanitizer] [--bench] [--compare] [--long] [--no-check] [--logs DIR]
# On a GPU machine: builds libmoe from the folder that pack.sh made and runs make check with every device
# required (CUDA, NVIDIA's OpenCL, PoCL); prints a summary and keeps the logs in DIR.
#   --demo       also train the demo's model, on each device    --bench      also run the benchmarks
#   --compare    also the branch beside PyTorch's and others' (COMPARE_ARGS are for compare_torch.py)
#   --sanitizer  also run short conformance under compute-sanitizer (memcheck and racecheck)
#   --long       make check-long instead of make check          --no-check   neither
# MOE_DEVICE_DIR is where it builds [/tmp/libmoe-device]; a second run there builds only what changed.
# MOE_TEST_REQUIRE is which devices must be there [cuda,opencl:gpu,opencl:cpu]; DEMO_ARGS are for the demo.
demo= sanitizer= bench= compare= check=check logs=
while test $# -gt 0; do
  case $1 in
    --demo) demo=1 ;;
    --sanitizer) sanitizer=1 ;;
    --bench) bench=1 ;;
    --compare) compare=1 ;;
    --long) check=check-long ;;
    --no-check) check= ;;
    --logs) logs=$2; shift ;;
    *) sed -n '2,/^demo/s/^# //p' "$0" >&2; exit 2 ;;
  esac
  shift
done

pack=`cd "\`dirname "$0"\`" && pwd`
test -d "$pack/third" || pack=`cd "$pack/.." && pwd`/.pack
test -d "$pack/third" || { echo 'there is no .pack: run tests/pack.sh first, where packages can be installed' >&2; exit 1; }
work=${MOE_DEVICE_DIR:-/tmp/libmoe-device}
mkdir -p "$work" && cp -R "$pack/third" "$work/" && tar -xzf "$pack"/libmoe-*.tar.gz -C "$work" || exit 1
tarball=`basename "$pack"/libmoe-*.tar.gz`
build=$work/${tarball%.tar.gz}/build
logs=${logs:-$build}
mkdir -p "$build" "$logs" && cd "$build" || exit 1
MOE_TEST_REQUIRE=${MOE_TEST_REQUIRE-cuda,opencl:gpu,opencl:cpu}
POCL_CACHE_DIR=$build/tests/pocl-cache
export MOE_TEST_REQUIRE POCL_CACHE_DIR
failures=0

# step NAME COMMAND... : into a log; says how it went and how long it took
step() {
  name=$1
  shift
  start=`date +%s`
  "$@" >"$logs/$name.log" 2>&1
  status=$?
  echo "== $name: exit status $status after $((`date +%s` - start)) s"
  test $status = 0 || { failures=$((failures + 1)); tail -n "${lines:-25}" "$logs/$name.log"; }
  return $status
}

configure() {
  test -f Makefile || ../configure -q --disable-maintainer-mode --disable-static --with-cuda \
    CPPFLAGS="-I$work/third/include" LDFLAGS="-Wl,-rpath,$work/third/lib" \
    CMOCKA_CFLAGS=' ' CMOCKA_LIBS="-L$work/third/lib -lcmocka" \
    JANSSON_CFLAGS=' ' JANSSON_LIBS="-L$work/third/lib -ljansson"
}
step configure configure && step build make -s -j"`nproc`" || exit 1
ldd .libs/libmoe.so
./moe-info

if test -n "$check"; then
  lines=80
  step "$check" make -s -k -j4 $check
  grep -E '^(PASS|FAIL|SKIP|  FAIL|[0-9]+ passed)' "$logs/$check.log"
  cp test-suite.log "$logs/" 2>/dev/null
  lines=
fi

if test -n "$sanitizer"; then
  for tool in memcheck racecheck; do
    # The driver tells how many parameters a kernel has by an error past the last: not one to report.
    step $tool compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 ./moe-conform --device cuda --sanitize-small
    tail -n 2 "$logs/$tool.log"
  done
fi

if test -n "$demo"; then
  data=`LC_ALL=C; for file in "$pack"/text/*; do echo "--data $file"; done`
  for device in `echo "$MOE_TEST_REQUIRE" | tr , ' '`; do
    name=demo-`echo $device | tr : -`
    step $name ./train_lm --device $device $data $DEMO_ARGS && tail -n 12 "$logs/$name.log"
  done
fi

if test -n "$bench"; then
  step bench make -s bench
  cat "$logs/bench.log"
  cp tests/bench/moe_layer.json "$logs/" 2>/dev/null
fi

if test -n "$compare"; then
  step compare python3 ../tests/bench/compare_torch.py --json "$logs/compare_torch.json" $COMPARE_ARGS
  cat "$logs/compare.log"
fi
echo "$failures steps failed"
test $failures = 0
