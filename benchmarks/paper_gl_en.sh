#!/usr/bin/env bash
# The paper's smallest pair, both systems, trained side by side on one GPU to their own stopping rule, then scored.
#   benchmarks/paper_gl_en.sh DATA RUNS [SEED]      DATA: qknorm prepare DATA --corpus ted-gl-en --subwords.pretokenized --subwords.merges 3000
set -euo pipefail
data=$1 runs=$2 seed=${3:-0}
for system in qknorm baseline; do
  python3 -m qknorm train "$data" --run "$runs/$system-$seed" --preset "paper-$system-gl-en" --training.seed "$seed" > "$runs/$system-$seed.log" 2>&1 &
done
wait
COLUMNS=160 python3 -m qknorm score "$runs/baseline-$seed" "$runs/qknorm-$seed" --data "$data" --split test > "$runs/score-$seed.txt"
