#!/bin/sh
# check-oclgrind.sh : short conformance of the portable kernels under Oclgrind, an OpenCL device that
# reports out-of-bounds accesses and data races (PoCL lets many of them pass). Runs in the build folder.
runtime=
for folder in /usr/lib/oclgrind /usr/lib/*/oclgrind /usr/lib64/oclgrind /usr/local/lib/oclgrind; do
  test -f "$folder/liboclgrind-rt.so" && runtime=$folder/liboclgrind-rt.so
done
test -n "$runtime" || { echo 'SKIP: there is no Oclgrind (Debian, Ubuntu: oclgrind)'; exit 77; }

# The library loads libOpenCL.so.1 by name, so that is what Oclgrind's runtime must be called.
mkdir -p tests/oclgrind && ln -sf "$runtime" tests/oclgrind/libOpenCL.so.1
log=tests/oclgrind/log
LD_LIBRARY_PATH=$PWD/tests/oclgrind${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
OCLGRIND_DATA_RACES=1 OCLGRIND_LOG=$PWD/$log
export LD_LIBRARY_PATH OCLGRIND_DATA_RACES OCLGRIND_LOG
rm -f $log
./moe-conform --device opencl:0:0 --portable --sanitize-small "$@" >tests/oclgrind/out 2>&1
status=$?
cat tests/oclgrind/out
found=`cat $log tests/oclgrind/out 2>/dev/null | grep -c -E 'Invalid (read|write)|data race|Uninitialized value'`
if test "$found" != 0; then
  grep -h -E -A 8 'Invalid (read|write)|data race|Uninitialized value' $log tests/oclgrind/out | head -n 60
fi
set -- `sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' tests/oclgrind/out` 0 0 0
passed=$1 failed=$2 skipped=$3
echo "Oclgrind reported $found faults"
test $status = 0 || test "$failed" != 0 || failed=1
test "$found" = 0 || failed=$((failed + 1))
echo "$passed passed, $failed failed, $skipped skipped"
test "$failed" = 0
