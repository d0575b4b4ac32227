#!/bin/sh
# check-files.sh : files of libmoe in Python's safetensors and the other way round (check_files.py), where
# there is a python3 with numpy and safetensors. Runs in the build folder; prints CMocka's lines.
srcdir=${srcdir:-`dirname "$0"`/..}
lib=$PWD/.libs/libmoe.so
skip() { echo "SKIP: $*"; exit 77; }
test -f "$lib" || skip 'no shared library was built'
! readelf -d "$lib" | grep -q 'libasan' || skip 'AddressSanitizer does not come into a running Python'
python3 -c 'import numpy, safetensors' 2>/dev/null || skip 'there is no python3 with numpy and safetensors'
exec python3 "$srcdir/tests/check_files.py" "$lib"
