#!/bin/sh
# check-inspect.sh : moe-inspect as a user meets it: what it prints, and what its exit status says. Runs in the build
# folder; prints CMocka's lines.
srcdir=${srcdir:-`dirname "$0"`/..}
corpus=$srcdir/tests/fuzz/corpus
work=`mktemp -d` || exit 1
trap 'rm -rf "$work"' EXIT
mkdir "$work/folder"
printf '{"weight_map":{"a":"one.safetensors"}}' >"$work/folder/model.safetensors.index.json"
cp "$corpus/metadata" "$work/folder/one.safetensors"

status() { # status WANTED ARGUMENTS... : into $work/out and $work/err
  wanted=$1
  shift
  ./moe-inspect "$@" >"$work/out" 2>"$work/err"
  test $? = "$wanted"
}
has() { grep -q -- "$1" "$work/${2:-out}"; }

tensors_are_printed() {
  status 0 "$corpus/every_dtype" && has '^  BF16  *\[2,3\]  *12  -  *bf16$' && has '^  10 tensors, 60 elements, 192 bytes$'
}
metadata_are_printed() {
  status 0 "$corpus/metadata" && has '^  format = pt$' && has '^  1 tensors, 1 elements, 1 bytes$'
}
hashes_are_compared() {
  status 0 --verify "$corpus/hashes" && has '^  hashes: 1 right, 0 tensors have none$' &&
    status 0 --verify "$work/folder" && has '^  hashes: 0 right, 1 tensors have none$' &&
    status 1 --verify "$corpus/stray_hash" && has 'tensor "gone" has a hash and is not there' err &&
    status 0 --verify --quiet "$corpus/metadata" && test ! -s "$work/out"
}
wrong_bytes_are_found() {
  sed 's/a$/b/' "$corpus/hashes" >"$work/wrong" && ! cmp -s "$corpus/hashes" "$work/wrong" && status 0 "$work/wrong" &&
    status 1 --verify "$work/wrong" && has 'tensor "a" has the hash ' err
}
folders_and_indexes_are_opened() {
  status 0 "$work/folder" && has '^  U8 ' && status 0 "$work/folder/model.safetensors.index.json" && has '^  U8 '
}
raw_files_are_opened() {
  status 0 --raw "$corpus/raw" && has '^  F32  *\[3,2\]  *24  -  *0$' && status 1 "$corpus/raw" &&
    has 'raw opens as a file of the raw layout: --raw$' err && status 1 "$corpus/hole" && ! has '--raw' err
}
unsound_files_fail() {
  status 1 "$corpus/hole" && has 'behind a hole' err && status 1 "$work/none" && has 'No such file' err &&
    status 1 "$corpus/metadata" "$corpus/overlap" && has '^  format = pt$'
}
arguments_are_checked() {
  status 2 && has 'no path' err && status 2 --what x && has 'unknown argument: --what' err &&
    status 0 --help && has '^Exit status' && status 0 --version && has '^moe-inspect (libmoe) '
}

tests='tensors_are_printed metadata_are_printed hashes_are_compared wrong_bytes_are_found folders_and_indexes_are_opened
  raw_files_are_opened unsound_files_fail arguments_are_checked'
rc=0
echo '[==========] Running 8 test(s).'
for t in $tests; do
  echo "[ RUN      ] $t"
  if $t; then echo "[       OK ] $t"; else cat "$work/out" "$work/err"; echo "[  FAILED  ] $t"; rc=1; fi
done
echo '[==========] 8 test(s) run.'
exit $rc
