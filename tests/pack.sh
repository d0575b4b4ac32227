#!/bin/sh
# pack.sh : packs what a GPU machine without libtoolize, CMocka, jansson, xxHash, CL headers and network needs to
# build and test libmoe, into the one folder .pack/ of the source tree: the distribution's tarball, other
# people's headers and libraries, and the demo's text. run-device.sh uses it there.
set -e
cd "`dirname "$0"`/.."
test -f build/Makefile || ./bootstrap build
rm -rf .pack
mkdir -p .pack/third/include/CL .pack/third/lib .pack/text

rm -f build/libmoe-*.tar.gz
make -C build -s dist >/dev/null
cp build/libmoe-*.tar.gz .pack/

# find FILE : its path, in the folders that the C compiler looks through
header() { echo "#include <$1>" | cc -M -x c -include setjmp.h -include stdarg.h -include stddef.h -include stdint.h - |
  tr ' \\' '\n\n' | grep "/$1\$"; }
for name in cmocka.h jansson.h jansson_config.h xxhash.h CL/cl.h CL/cl_version.h CL/cl_platform.h; do
  cp "`header $name`" .pack/third/include/$name
done
# Shared libraries, since Debian's archives are not position-independent: as -l finds them, and as the loader does.
for name in libcmocka.so libjansson.so; do
  file=`cc -print-file-name=$name`
  cp -L "$file" .pack/third/lib/$name
  soname=`readelf -d "$file" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p'`
  test "$soname" = $name || cp -L "$file" ".pack/third/lib/$soname"
done

for file in /usr/share/games/fortunes/*; do
  case $file in *.dat | *.u8) ;; *) if test -s "$file"; then cp "$file" .pack/text/; fi ;; esac
done
cp tests/run-device.sh .pack/
du -sh .pack
