#!/bin/sh
# check-emulated.sh : the kernels on NVIDIA's matrix units on the host (tests/emulator), by moe-conform's small cases or,
# with MOE_TEST_LONG, by those of make check; in two random orders, or that of MOE_EMULATOR_SEED.
program=./tests/emulator/moe-conform-emulated
if test ! -x $program; then
  echo 'SKIP: the emulator of matrix units wants x86-64 and a C++17 compiler that works with the C compiler'
  exit 77
fi
effort=--sanitize-small
test -z "$MOE_TEST_LONG" || effort=
unset MOE_TEST_LONG
failed=0
for seed in ${MOE_EMULATOR_SEED:-1 2}; do
  echo "MOE_EMULATOR_SEED=$seed"
  MOE_EMULATOR_SEED=$seed $program --tuned $effort || failed=$?
done
exit $failed
