#!/bin/sh
# cmocka-driver.sh OPTIONS -- PROGRAM ARGS... : Automake test driver for programs that print CMocka's lines.
# Runs the program into the log file and writes one result for each test case to the .trs file. Exit
# status 77 is a skip, with the reason of a line "SKIP: reason". A crash, a time-out, a sanitizer's exit
# status, a test case that never ended and a program without tests are failures; such a failure, of the program and
# of no test case, comes with 15 lines of the log: those from a sanitizer's report on, else the last ones.
# MOE_TEST_TIMEOUT is the time limit of one program in seconds [600]; MOE_TEST_REQUIRE lists the kinds of
# device (cuda,opencl:gpu,opencl:cpu) whose absence is a failure: of a test X.KIND a skip as a whole.
name= log= trs= color=no
while test $# -gt 0; do
  case $1 in
    --test-name) name=$2; shift ;;
    --log-file) log=$2; shift ;;
    --trs-file) trs=$2; shift ;;
    --color-tests) color=$2; shift ;;
    --) shift; break ;;
    *) shift ;;
  esac
  shift
done

kind=`echo "${name##*.}" | tr - :`
case ,$MOE_TEST_REQUIRE, in *,$kind,*) required=1 ;; *) required=0 ;; esac
limit=${MOE_TEST_TIMEOUT:-600}
timeout -k 10 "$limit" "$@" >"$log" 2>&1
rc=$?

awk -v rc=$rc -v required=$required -v limit="$limit" -v name="$name" -v color=$color -v trs="$trs.tmp" '
function add(res, what) { r[++n] = res; t[n] = what; c[res]++ }
function fault(what)    { add("FAIL", what); why = what; at_fault = 1 }
function said(what)     { if (lines < 5) text = text "\n        " what; lines++ }
/^==[0-9]+== *ERROR: |: runtime error: /      { reported = 1 }
!reported || reported++ <= 15                 { end[NR % 15] = $0; at = NR }
/^\[==========\] (.*: )?Running [0-9]+ test/  { open = 1; s = $0; sub(/.*Running /, "", s); want += s + 0; next }
/^\[==========\] .*test\(s\) run\.$/          { open = 0; next }
!open && /^SKIP: /                            { why = substr($0, 7) }
!open                                         { next }  # the lists after a group repeat the names
/^\[ RUN      \] /                            { text = ""; lines = 0 }
/^ERROR: /                                    { said(substr($0, 8)) }
/^\[ +(ERROR|LINE) +\] ---/                   { s = $0; sub(/.*\] --- /, "", s); said(s) }
/^\[       OK \] /                            { add("PASS", substr($0, 14)) }
/^\[  SKIPPED \] /                            { add("SKIP", substr($0, 14)) }
/^\[  FAILED  \] /                            { add("FAIL", substr($0, 14)); m[n] = text }
/^\[  ERROR   \] / && !/^\[  ERROR   \] ---/  { add("FAIL", substr($0, 14)) }
END {
  if (rc == 77 && required)       { n = 0; split("", c); fault("required, but: " why) }
  else if (rc == 77)              { n = 0; split("", c); add("SKIP", why) }
  else if (rc == 124)             fault("no end after " limit " s")
  else if (rc > 128 && rc < 193)  fault("killed by signal " rc - 128)
  else if (rc == 255)             fault("exit status 255, as after a crash in a thread other than the test\047s")
  else if (rc != 0 && !c["FAIL"]) fault("exit status " rc " with no failed test")
  else if (rc == 0 && c["FAIL"])  fault("exit status 0 with a failed test")
  else if (n == 0)                fault("ran no test")
  else if (open || n != want)     fault("ended after " n " of " want " tests")

  all = c["FAIL"] ? "FAIL" : c["PASS"] ? "PASS" : "SKIP"
  on = off = ""
  if (color == "yes") { on = all == "FAIL" ? "\033[0;31m" : all == "PASS" ? "\033[0;32m" : "\033[1;34m"; off = "\033[m" }
  if (all == "SKIP" && rc == 77) printf "%s%s%s: %s: %s\n", on, all, off, name, why
  else printf "%s%s%s: %s (%d passed, %d failed, %d skipped)%s\n", on, all, off, name, c["PASS"], c["FAIL"], c["SKIP"], \
    why != "" && all == "FAIL" ? ": " why : ""
  for (i = 1; i <= n; i++) {
    printf ":test-result: %s %s\n", r[i], t[i] >trs
    if (r[i] == "FAIL") printf "  FAIL: %s%s\n", t[i], m[i]
  }
  for (i = at - 14; at_fault && i <= at; i++) if (i > 0) print "        | " end[i % 15]
  printf ":global-test-result: %s\n:recheck: %s\n:copy-in-global-log: %s\n", all, \
    all == "FAIL" ? "yes" : "no", all == "PASS" ? "no" : "yes" >trs
}' "$log" && mv -f "$trs.tmp" "$trs"
