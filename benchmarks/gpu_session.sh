#!/usr/bin/env bash
# What is to be known of a GPU in one sitting of at most nine minutes: tests first, then times. Every step has a time
# limit of its own and writes to a file of its own; one that fails or is cut short leaves the others to go on.
#   benchmarks/gpu_session.sh FOLDER                        # tests attention kernels training decoding
#   benchmarks/gpu_session.sh FOLDER tune profile lp        # any of these steps, in this order
# It is started from the root of the repository, with the packages that the tests need (pytest, hypothesis; with
# pytest-xdist they compile their kernels side by side) where PYTHONPATH says. Set PYTHON to take another interpreter.
set -uo pipefail
folder=${1:?say in which folder the results go: benchmarks/gpu_session.sh FOLDER [STEP…]}
shift
steps=("$@")
((${#steps[@]})) || steps=(tests attention kernels training decoding)
python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:-src:.vendor} PYTHONUNBUFFERED=1 COLUMNS=160 HYPOTHESIS_STORAGE_DIRECTORY=${TMPDIR:-/tmp}/hypothesis
ends=$((SECONDS + ${SESSION_SECONDS:-520}))
mkdir -p "$folder"
summary=$folder/summary.txt
: > "$summary"

once=() # --foreground: the interrupt reaches one process and not its children too
say() { echo "$*" | tee -a "$summary"; }

run() { # SECONDS FILE COMMAND…
  local limit=$1 file=$folder/$2 left=$((ends - SECONDS)) began=$SECONDS status=0
  shift 2
  if ((left < 15)); then
    say "left out, the time is over: $*"
    return
  fi
  ((limit < left)) || limit=$left
  echo "\$ $*" >> "$file"
  # an interrupt lets pytest tell of its failures; who does not heed it is killed
  timeout "${once[@]}" --signal=INT --kill-after=15 "$limit" env --default-signal=INT "$@" >> "$file" 2>&1 || status=$?
  case $status in
    0) say "$((SECONDS - began)) s, well: $*" ;;
    124 | 137) say "$((SECONDS - began)) s, CUT SHORT: $*" ;;
    *) say "$((SECONDS - began)) s, FAILED with status $status: $*" ;;
  esac
}

has() { "$python" -c "import $1" 2> /dev/null; }

run_tests() {
  if ! has pytest || ! has hypothesis; then
    say "no tests: pytest or hypothesis is not installed where PYTHONPATH=$PYTHONPATH"
    return
  fi
  local together=() cases
  has xdist && together=(-n "${TEST_PROCESSES:-8}")
  # the files of cases by themselves: within test_the_kernels_on_the_gpu they would be one test each
  cases=(tests/*/fused*_cases.py)
  # with eight processes at work, each one's compiler needs no processes of its own
  local pytest=(env TORCHINDUCTOR_COMPILE_THREADS=2 "$python" -m pytest -v --tb=short -p no:cacheprovider "${together[@]}")
  once=(--foreground) # a second interrupt, passed on by the first's children, would stop pytest in telling
  run 150 tests.txt "${pytest[@]}" "${cases[@]}"
  local marked
  mapfile -t marked < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
  run 130 tests.txt "${pytest[@]}" -m gpu -k "not kernels_on_the_gpu" "${marked[@]}"
  once=()
}

"$python" -c "import torch, triton; print('PyTorch', torch.__version__, 'Triton', triton.__version__, torch.cuda.get_device_name())" 2>&1 | tail -1 | tee -a "$summary"
for step in "${steps[@]}"; do
  case $step in
    tests) run_tests ;;
    attention) run 100 attention.txt "$python" benchmarks/attention.py --no-compile --rounds 20 ;;
    short) run 100 short.txt "$python" benchmarks/attention.py --training ;;
    compiled) run 200 compiled.txt "$python" benchmarks/attention.py --lengths 64 2048 ;;
    tune) run 240 tune.txt "$python" benchmarks/attention.py --tune --rounds 15 ;;
    launches) run 100 launches.txt "$python" benchmarks/step_kernels.py --tune ;;
    kernels) run 60 kernels.txt "$python" benchmarks/step_kernels.py ;;
    training) run 150 training.txt "$python" benchmarks/training.py --seconds 110 --row-seconds 40 ;;
    own) run 150 own.txt "$python" benchmarks/training.py --only "ours, QKNorm" --seconds 110 --row-seconds 60 ;;
    peers) run 300 peers.txt "$python" benchmarks/training.py --only "+ all + attention|dot product + all|released|torch.nn|Marian|x-transformers" --seconds 260 --row-seconds 120 ;;
    profile) run 90 profile.txt "$python" benchmarks/training.py --only "+ all" --profile --seconds 60 --row-seconds 40 ;;
    decoding) run 60 decoding.txt "$python" benchmarks/decoding.py ;;
    lp) run 240 lp.txt "$python" benchmarks/lp_overhead.py --skip-processes --models 1 2 5 --timeout 55 ${LP_TEXT:+--text "$LP_TEXT"} ;;
    growth) run 120 growth.txt "$python" benchmarks/growth.py --precision bfloat16 ;;
    *) say "no step is called $step" ;;
  esac
done

for file in "$folder"/*.txt; do # the ends, for who sees nothing but what is printed last
  [[ $file == "$summary" ]] && continue
  printf '\n== %s\n' "$file"
  tail -n 25 "$file" | cut -c -200
done
printf '\n'
cat "$summary"
