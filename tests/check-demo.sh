#!/bin/sh
# check-demo.sh : the example train_lm as a user meets it, small: it learns, the same seed gives the same loss
# bits, the weights it saves have the documented layout, bad data and options are refused with a message, and an
# interrupt ends it cleanly. Prints CMocka's lines, which the driver counts.
device=${MOE_TEST_DEVICE:-opencl:cpu}
work=`mktemp -d` || exit 1
trap 'rm -rf "$work"' EXIT
small="--device $device --batch 64 --context 4 --embed 8 --width 16 --ff 16 --experts 16 --blocks 1 --seconds 0"
i=0
while test $i -lt 400; do
  echo "$i: the quick brown fox jumps over the lazy dog, $((i * i)) times."
  i=$((i + 1))
done >"$work/text"

if ! ./train_lm $small --data "$work/text" --steps 1 >"$work/log" 2>&1; then
  echo "SKIP: `tail -n 1 "$work/log"`"
  exit 77
fi

failed=0
begin() { name=$1; echo "[ RUN      ] $name"; }
end() { # end STATUS : 0 is good
  if test "$1" = 0; then echo "[       OK ] $name"; else failed=1; cat "$work/log"; echo "[  FAILED  ] $name"; fi
}
losses() { sed 's/.*"loss": \([^,]*\),.*/\1/' "$1"; }

echo '[==========] Running 5 test(s).'

begin same_seed_same_losses
for run in 1 2; do
  ./train_lm $small --data "$work/text" --steps 8 --seed 7 --metrics "$work/metrics.$run" >"$work/log" 2>&1
  losses "$work/metrics.$run" >"$work/losses.$run"
done
./train_lm $small --data "$work/text" --steps 8 --seed 8 --metrics "$work/metrics.3" >>"$work/log" 2>&1
losses "$work/metrics.3" >"$work/losses.3"
test "`wc -l <"$work/losses.1"`" -eq 8 && cmp "$work/losses.1" "$work/losses.2" >>"$work/log" &&
  ! cmp -s "$work/losses.1" "$work/losses.3"
end $?

begin it_learns
./train_lm $small --data "$work/text" --steps 60 --rate 0.01 --metrics "$work/metrics" >"$work/log" 2>&1 &&
  losses "$work/metrics" | awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < 0.7 * first) }'
end $?

# int64 count, then for each matrix int64 rows, int64 columns, f32 data
begin saved_layout
./train_lm $small --data "$work/text" --steps 1 --save "$work/weights" >"$work/log" 2>&1 &&
  test "`od -A n -t d8 -N 8 "$work/weights" | tr -d ' '`" -eq 9 &&
  test "`od -A n -t d8 -j 8 -N 16 "$work/weights" | tr -s ' '`" = ' 256 8' &&
  test "`wc -c <"$work/weights"`" -eq $((8 + 9 * 16 + 4 * (256*8 + 16*32 + 256*16 + 2*16 + 16*16 + 3*16*16*16)))
end $?

begin refusals
: >"$work/empty"
echo tiny >"$work/tiny"
ok=0
refused() { # refused PATTERN ARGUMENTS... : exit status 2 and the message
  pattern=$1
  shift
  ./train_lm "$@" >"$work/log" 2>&1
  status=$?
  if test $status != 2 || ! grep -q "$pattern" "$work/log"; then ok=1; echo "$*: exit status $status" >>"$work/log"; fi
}
refused 'at least 1000' --data "$work/empty"
test $ok = 0 && refused 'at least 1000' --data "$work/tiny"
test $ok = 0 && refused 'cannot read' --data "$work/missing"
test $ok = 0 && refused 'wanted a whole number' --data "$work/text" --steps 0
test $ok = 0 && refused 'wanted f64, f32' --data "$work/text" --dtype f33
end $ok

begin interrupt
rm -f "$work/metrics"
./train_lm $small --data "$work/text" --steps 1000000 --metrics "$work/metrics" >"$work/log" 2>&1 &
pid=$!
while kill -0 $pid 2>/dev/null && ! grep -q '"step": 3,' "$work/metrics" 2>/dev/null; do sleep 0.1; done
kill -INT $pid
wait $pid && grep -q '^interrupted after' "$work/log" && grep -q 'this model' "$work/log"
end $?

echo '[==========] 5 test(s) run.'
exit $failed
