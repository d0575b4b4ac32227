# MOE_ADD_CFLAGS(VARIABLE, FLAGS)
# Appends to VARIABLE each of FLAGS that the C compiler takes without a warning about INFINITY as a double.
# (A loop variable named "f" would become an m4 macro and spoil every "rm -f" of configure.)
AC_DEFUN([MOE_ADD_CFLAGS], [
  moe_saved_CFLAGS=$CFLAGS
  for moe_flag in m4_normalize([$2]); do
    CFLAGS="$moe_saved_CFLAGS -Werror $moe_flag"
    AC_MSG_CHECKING([whether $CC takes $moe_flag])
    AC_COMPILE_IFELSE([AC_LANG_SOURCE([[#include <math.h>
      double moe_probe(void);
      double moe_probe(void) { return INFINITY; }]])],
      [AC_MSG_RESULT([yes]); $1="$$1 $moe_flag"],
      [AC_MSG_RESULT([no])])
  done
  CFLAGS=$moe_saved_CFLAGS
])
