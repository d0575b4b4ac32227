#!/bin/sh
# embed.sh cl FILE.cl...         writes the C table of the OpenCL sources
# embed.sh fatbin FILE.fatbin... writes the C table of the CUDA images
# Each file becomes an array of bytes; a text has a NUL behind its end that its size does not count. A
# table's names are the files' stems; an image F_TYPE.fatbin has the name F and the type MOE_TYPE. Images
# are megabytes, too much for a compiler to read as numbers, so the assembler takes them as they are.
set -e
mode=$1
shift

# bytes FILE: FILE as a list of numbers
bytes() {
  LC_ALL=C od -A n -v -t u1 "$1" | sed 's/  */,/g;s/^,//;s/$/,/'
  echo 0
}

printf '/* Written by build-aux/embed.sh. */\n#include "core/backend.h"\n'
case $mode in
  cl)
    for file do
      name=`basename "$file" | sed 's/\.clh*$//'`
      printf '\nstatic const unsigned char moe__cl_%s[] = {\n' "$name"
      bytes "$file"
      echo '};'
    done
    printf '\nconst struct moe__source moe__cl_sources[] = {\n'
    for file do
      name=`basename "$file" | sed 's/\.clh*$//'`
      printf '    {"%s", moe__cl_%s, sizeof moe__cl_%s - 1},\n' "$name" "$name" "$name"
    done
    printf '    {0, 0, 0},\n};\n'
    ;;
  fatbin)
    for file do
      name=moe__fatbin_`basename "$file" .fatbin`
      printf '\n__asm__(".section .rodata\\n.balign 16\\n.globl %s\\n.hidden %s\\n%s:\\n.incbin \\"%s\\"\\n.previous");\n' \
        "$name" "$name" "$name" "$file"
      printf 'extern const unsigned char %s[%d] __attribute__((visibility("hidden")));\n' "$name" `wc -c <"$file"`
    done
    printf '\nconst struct moe__image moe__cuda_images[] = {\n'
    for file do
      name=`basename "$file" .fatbin`
      type=`echo "${name##*_}" | tr a-z A-Z`
      printf '    {"%s", MOE_%s, moe__fatbin_%s, sizeof moe__fatbin_%s},\n' "${name%_*}" "$type" "$name" "$name"
    done
    printf '    {0, 0, 0, 0},\n};\n'
    ;;
esac
