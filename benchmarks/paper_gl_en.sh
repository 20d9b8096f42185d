#!/usr/bin/env bash
# The paper's smallest pair: both systems trained side by side on one GPU to their own stopping rule, then scored; and
# QKNorm once more in float32, without bfloat16 or compiled code, to see that these do not change what is learned.
#   qknorm prepare DATA --corpus ted-gl-en --subwords.pretokenized --subwords.merges 3000
#   benchmarks/paper_gl_en.sh DATA RUNS [SEED]
set -euo pipefail
data=$1 runs=$2 seed=${3:-0}
mkdir -p "$runs"
train() { # NAME SYSTEM OPTION…
  local name=$1 system=$2
  shift 2
  python3 -m qknorm train "$data" --run "$runs/$name-$seed" --preset "paper-$system-gl-en" --training.seed "$seed" "$@" > "$runs/$name-$seed.log" 2>&1
}
pids=()
train qknorm qknorm & pids+=($!)
train baseline baseline & pids+=($!)
train float32 qknorm --training.precision float32 --training.compile False & pids+=($!)
failed=0
for pid in "${pids[@]}"; do # a bare wait would not tell of failures
  wait "$pid" || failed=1
done
if ((failed)); then
  echo "a training failed; see $runs/*-$seed.log" >&2
  exit 1
fi
COLUMNS=160 python3 -m qknorm score "$runs/baseline-$seed" "$runs/qknorm-$seed" "$runs/float32-$seed" --data "$data" --split test > "$runs/score-$seed.txt"
