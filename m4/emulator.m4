# MOE_EMULATOR
# Whether tests/emulator can be built: its fibres switch in assembly of x86-64, and it is C++17 in a program that the C
# compiler links. Sets the conditional EMULATOR and substitutes EMULATOR_LIBS.
AC_DEFUN([MOE_EMULATOR], [
  AC_MSG_CHECKING([for C++17 on x86-64, for the emulator])
  have_emulator=no EMULATOR_LIBS=-lstdc++
  mkdir conftest.dir
  cat >conftest.dir/k.cpp <<'_END'
#include <functional>
#ifndef __x86_64__
#error other registers
#endif
extern "C" int k() { if constexpr (sizeof(int) == 4) return std::function<int()>([[]] { return 0; })(); }
_END
  echo 'int k(void); int main(void) { return k(); }' >conftest.dir/m.c
  AS_IF([test -n "$CXX" && (cd conftest.dir && $CXX -std=c++17 -c k.cpp &&
         $CC -o m m.c k.o $EMULATOR_LIBS && ./m) >/dev/null 2>&1], [have_emulator=yes])
  rm -rf conftest.dir
  AC_MSG_RESULT([$have_emulator])
  AC_SUBST([EMULATOR_LIBS])
  AM_CONDITIONAL([EMULATOR], [test $have_emulator = yes])
])
