#!/bin/sh
# check-dlpack.sh : tensors between libmoe and PyTorch (check_dlpack.py), where there is a python3 with torch.
# PYTHON is the interpreter. Prints CMocka's lines, which the driver counts.
here=`dirname "$0"`
python=${PYTHON:-python3}
skip() {
  echo '[==========] Running 1 test(s).'
  echo "[ RUN      ] torch"
  echo "[  SKIPPED ] torch ($*)"
  echo '[==========] 1 test(s) run.'
  exit 0
}
test -f .libs/libmoe.so || skip 'there is no shared library'
if ldd .libs/libmoe.so | grep -q libasan; then skip 'Python has no AddressSanitizer'; fi
"$python" -c 'import torch' >/dev/null 2>&1 || skip "$python has no torch"
exec "$python" "$here/check_dlpack.py" ./.libs/libmoe.so
