#!/bin/sh
# coverage.sh GCOV SRCDIR SOURCE... : which share of the lines of each source file has run, and of all of them, in a build
# with --enable-coverage. Where lcov is, also its report in coverage/.
gcov=$1
srcdir=$2
shift 2
test -n "$gcov" || { echo 'make coverage needs gcov' >&2; exit 1; }
test -n "`find . -name '*.gcda' | head -n 1`" || {
  echo 'nothing was counted: make coverage needs a build with --enable-coverage' >&2
  exit 1
}

# Objects of the shared library before those of the static one; a file that never ran has a .gcno alone.
for source do
  case $source in *.c) ;; *) continue ;; esac
  folder=`dirname "$source"`
  stem=`basename "$source" .c`
  for object in "$folder/.libs/$stem.gcno" "$folder/$stem.gcno"; do
    test -f "$object" && break
  done
  test -f "$object" || continue
  "$gcov" -n "$object" 2>/dev/null | awk -v source="$source" -v file="$srcdir/$source" '
    /^File / { mine = index($0, file "\047") > 0 }
    mine && /^Lines executed:/ { split($0, part, /[:%]| of /); print source, part[2], part[4]; exit }'
done | awk '
  { run = $2 * $3 / 100; printf "%6.1f%% of %5d lines  %s\n", $2, $3, $1; lines += $3; sum += run }
  END { if (lines) printf "%6.1f%% of %5d lines  in all\n", 100 * sum / lines, lines; exit !lines }' || exit 1

if command -v lcov >/dev/null && command -v genhtml >/dev/null; then
  lcov -q --capture --directory . --gcov-tool "$gcov" --output-file coverage.info >/dev/null 2>&1 &&
    genhtml -q --output-directory coverage coverage.info >/dev/null 2>&1 && echo 'coverage/index.html has each line'
fi
exit 0
