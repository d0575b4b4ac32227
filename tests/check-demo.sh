#!/bin/sh
# check-demo.sh : the example train_lm as a user meets it, small: it learns, the same seed gives the same loss
# bits, a training that was stopped, or killed, goes on as if it had not been, bad data, options and checkpoints are
# refused with a message, and an interrupt ends it cleanly. Prints CMocka's lines, which the driver counts.
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

echo '[==========] Running 9 test(s).'

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

# It changes no number, and where the rate is absurd it names an operation.
begin health_names_the_operation
./train_lm $small --data "$work/text" --steps 8 --seed 7 --health --metrics "$work/metrics.4" >"$work/log" 2>&1 &&
  losses "$work/metrics.4" >"$work/losses.4" && cmp "$work/losses.1" "$work/losses.4" >>"$work/log" &&
  ! ./train_lm $small --data "$work/text" --steps 50 --rate 1e20 --health >>"$work/log" 2>&1 &&
  grep -q 'moe_queue_wait: gradient of [a-z_]*, input [0-9]*, element' "$work/log"
end $?

begin it_learns
./train_lm $small --data "$work/text" --steps 60 --rate 0.01 --metrics "$work/metrics" >"$work/log" 2>&1 &&
  losses "$work/metrics" | awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < 0.7 * first) }'
end $?

# Six steps, and three, a checkpoint and three: the same losses and, byte for byte, the same checkpoint.
for dtype in f32 bf16; do
  begin resumed_training_is_the_same_$dtype
  run="$small --data $work/text --dtype $dtype --steps 6"
  rm -f "$work/metrics.1" "$work/metrics.2"
  ./train_lm $run --metrics "$work/metrics.1" --save "$work/whole" >"$work/log" 2>&1 &&
    ./train_lm $run --metrics "$work/metrics.2" --save "$work/half" --until 3 >>"$work/log" 2>&1 &&
    test "`wc -l <"$work/metrics.2"`" -eq 3 &&
    ./train_lm $run --metrics "$work/metrics.2" --save "$work/resumed" --resume "$work/half" >>"$work/log" 2>&1 &&
    losses "$work/metrics.1" >"$work/losses.1" && losses "$work/metrics.2" >"$work/losses.2" &&
    cmp "$work/losses.1" "$work/losses.2" >>"$work/log" 2>&1 && cmp "$work/whole" "$work/resumed" >>"$work/log" 2>&1
  end $?
done

# Killed at any moment, training goes on from the last step that was saved.
begin killed_training_resumes
run="$small --data $work/text --steps 1000000"
rm -f "$work/metrics.1" "$work/metrics.2"
./train_lm $run --metrics "$work/metrics.1" --save "$work/killed" --save-every 1 >"$work/log" 2>&1 &
pid=$!
while kill -0 $pid 2>/dev/null && ! grep -q '"step": 5,' "$work/metrics.1" 2>/dev/null; do sleep 0.05; done
kill -KILL $pid
wait $pid 2>/dev/null
losses "$work/metrics.1" >"$work/losses.1"
./train_lm $run --metrics "$work/metrics.2" --resume "$work/killed" --until 1000 --seconds 1 >>"$work/log" 2>&1 &&
  first=`sed -n '1s/.*"step": \([0-9]*\),.*/\1/p' "$work/metrics.2"` && test "$first" -ge 5 &&
  last=$((first + 2)) && rm -f "$work/metrics.1" &&
  ./train_lm $run --metrics "$work/metrics.1" --until $last >>"$work/log" 2>&1 &&
  losses "$work/metrics.1" | tail -n 3 >"$work/losses.1" &&
  losses "$work/metrics.2" | head -n 3 | cmp - "$work/losses.1" >>"$work/log" 2>&1
end $?

begin resume_refuses_another_training
ok=0
other() { # other PATTERN ARGUMENTS... : exit status 1 and the message
  pattern=$1
  shift
  ./train_lm $small --steps 6 "$@" >"$work/log" 2>&1
  status=$?
  if test $status != 1 || ! grep -q "$pattern" "$work/log"; then ok=1; echo "$*: exit status $status" >>"$work/log"; fi
}
./train_lm $small --steps 6 --data "$work/text" --until 1 --save "$work/saved" >"$work/log" 2>&1 || ok=1
head -c 2000 "$work/text" >"$work/other"
head -c 2000 "$work/saved" >"$work/cut"
test $ok = 0 && other 'has seed 2, this training 3' --data "$work/text" --resume "$work/saved" --seed 3
test $ok = 0 && other 'has width 16, this training 24' --data "$work/text" --resume "$work/saved" --width 24
test $ok = 0 && other 'has dtype f32, this training bf16' --data "$work/text" --resume "$work/saved" --dtype bf16
test $ok = 0 && other 'has rate 0.002' --data "$work/text" --resume "$work/saved" --rate 0.003
test $ok = 0 && other 'has text .*, this training 2000 bytes' --data "$work/other" --resume "$work/saved"
test $ok = 0 && other "$work/cut" --data "$work/text" --resume "$work/cut"
test $ok = 0 && other "$work/missing" --data "$work/text" --resume "$work/missing"
end $ok
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
test $ok = 0 && refused 'without --save' --data "$work/text" --save-every 2
end $ok

begin interrupt
rm -f "$work/metrics"
./train_lm $small --data "$work/text" --steps 1000000 --metrics "$work/metrics" >"$work/log" 2>&1 &
pid=$!
while kill -0 $pid 2>/dev/null && ! grep -q '"step": 3,' "$work/metrics" 2>/dev/null; do sleep 0.1; done
kill -INT $pid
wait $pid && grep -q '^interrupted after' "$work/log" && grep -q 'this model' "$work/log"
end $?

echo '[==========] 9 test(s) run.'
exit $failed
