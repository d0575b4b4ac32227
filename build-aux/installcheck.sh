#!/bin/sh
# installcheck.sh : builds and runs a program with the installed library, through pkg-config: with the
# shared library, and with the static one where it is installed. Wants CC, PKG_CONFIG, libdir, bindir.
set -e
test -n "$PKG_CONFIG" || { echo 'installcheck needs pkg-config' >&2; exit 1; }
work=`mktemp -d`
trap 'rm -rf "$work"' EXIT
PKG_CONFIG_PATH=$libdir/pkgconfig
LD_LIBRARY_PATH=$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PKG_CONFIG_PATH LD_LIBRARY_PATH
if test -n "$DESTDIR"; then PKG_CONFIG_SYSROOT_DIR=$DESTDIR; export PKG_CONFIG_SYSROOT_DIR; fi

cat >"$work/t.c" <<'END'
#include <moe/moe.h>
#include <stdio.h>
int main(void)
{
    moe_device_info info = moe_device_info_init();
    int devices = 0;
    while (moe_device_list(&info, devices) == MOE_OK) devices++;
    printf("libmoe %s, %d devices\n", moe_version_string(), devices);
    return moe_version() != MOE_VERSION_HEX;
}
END

cd "$work"
$CC -Wall -Werror -o shared t.c `$PKG_CONFIG --cflags --libs moe`
printf 'shared: '
./shared
if test -f "$libdir/libmoe.a"; then
  $CC -Wall -Werror -o static t.c `$PKG_CONFIG --cflags --libs --static moe | sed "s|-lmoe|$libdir/libmoe.a|"`
  printf 'static: '
  LD_LIBRARY_PATH= ./static
fi
"$bindir/moe-info" >/dev/null
"$bindir/moe-inspect" --version >/dev/null
