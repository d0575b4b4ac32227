#!/bin/sh
# check-against.sh : moe-conform --against: a device against itself differs nowhere, a difference that is planted is
# found in every operation, and a device agrees with OpenCL's CPU. Prints CMocka's lines, which the driver counts.
device=${MOE_TEST_DEVICE:-opencl:cpu}
size=--sanitize-small
test -z "$MOE_TEST_LONG" || size=
log=`mktemp` || exit 1
trap 'rm -f "$log"' EXIT
failed=0
begin() { name=$1; echo "[ RUN      ] $name"; }
end() { # end STATUS : 0 is good
  if test "$1" = 0; then echo "[       OK ] $name"; else failed=1; sed "s/^/  /" "$log"; echo "[  FAILED  ] $name"; fi
}
count() { grep -c "$1" "$log"; }

./moe-conform --device "$device" --op clip --sanitize-small >"$log" 2>&1
if test $? = 77; then cat "$log"; exit 77; fi
tests=3
case $device in opencl:cpu) tests=2 ;; esac
echo "[==========] Running $tests test(s)."

begin a_device_equals_itself
./moe-conform --device "$device" --against "$device" --sanitize-small >"$log" 2>&1 &&
  test "`count ' cases, worst error '`" -gt 20 &&
  test "`count ' cases, worst error '`" = "`count 'worst difference 0 of both bounds (all equal)'`"
end $?

begin a_planted_difference_is_found
./moe-conform --device "$device" --against "$device" --sanitize-small --spoil >"$log" 2>&1
test $? = 1 && test "`count '^\[       OK \]'`" = 0 && test "`count '^\[  FAILED  \]'`" -gt 20
end $?

if test $tests = 3; then
  begin agrees_with_opencl_on_the_cpu
  ./moe-conform --device "$device" --against opencl:cpu $size >"$log" 2>&1
  status=$?
  if test $status = 77; then echo "[  SKIPPED ] $name"; else end $status; fi
fi

echo "[==========] $tests test(s) run."
exit $failed
