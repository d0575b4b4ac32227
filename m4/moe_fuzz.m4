# MOE_FUZZ
# How the fuzzing target is built: with clang's libFuzzer where that works, else with CC and a small driver; with
# AddressSanitizer and UndefinedBehaviorSanitizer where that works. Substitutes FUZZ_CC, FUZZ_CFLAGS and FUZZ_DRIVER.
AC_DEFUN([MOE_FUZZ], [
  AC_CHECK_PROGS([CLANG], [clang])
  AC_MSG_CHECKING([how to build the fuzzing target])
  FUZZ_CC=$CC FUZZ_CFLAGS= FUZZ_DRIVER=tests/fuzz/driver.c
  moe_sanitize="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
  mkdir conftest.dir
  echo 'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return n ? *d & 0 : 0; }' >conftest.dir/f.c
  echo 'int main(void) { return 0; }' >conftest.dir/m.c
  AS_IF(
    [test -n "$CLANG" && (cd conftest.dir && $CLANG $moe_sanitize -fsanitize=fuzzer -o f f.c && ./f -runs=1) >/dev/null 2>&1],
    [FUZZ_CC=$CLANG FUZZ_CFLAGS="$moe_sanitize -fsanitize=fuzzer" FUZZ_DRIVER=],
    [(cd conftest.dir && $CC $moe_sanitize -o m m.c && ./m) >/dev/null 2>&1],
    [FUZZ_CFLAGS=$moe_sanitize])
  rm -rf conftest.dir
  AC_MSG_RESULT([$FUZZ_CC $FUZZ_CFLAGS])
  AC_SUBST([FUZZ_CC])
  AC_SUBST([FUZZ_CFLAGS])
  AC_SUBST([FUZZ_DRIVER])
])
