#!/usr/bin/env bash
# Build, test and measure on a machine with a GPU, in stages of under eight minutes each. A killed
# stage leaves its log up to then, and one JSON record of all finished runs.
set -uo pipefail

usage() {
  cat <<'END'
usage: bench/gpu_report.sh [--dry-run] [STAGE | all]...

  build         install into the environment of $PYTHON, which must have torch
  test          the CUDA tests, quick ones first; then all other tests
  sanitize      memcheck and initcheck over a reduced matrix
  bench         all-reduce against its peers, copies, overlap, a training step
  dist          one process per rank on one GPU: a few tests, all-reduce against its peers, DDP
  dist-test     tests of the same: values, streams, rendezvous
  dist-memory   tests of the same: zero-copy, symmetric memory, messages
  dist-faults   tests of the same: ranks that die, are late or disagree; training
  dist-slow     tests of the same: many ranks, CUDA settings, 200 groups one after the other
  threads       one thread per rank on one GPU: tests, whole worlds, all-reduce against its peers
  questions     measurements behind design choices: waits between processes, folds, staging, graphs

The stages run in the given order; without any, all run. --dry-run prints the commands.
Environment: PYTHON (python3), OUT for logs, record and plots (bench/results/run), RESULTS for the
record of this GPU (bench/results), LIMIT seconds of a stage (450), DEVICES (cuda:0), QUICK=1 for
sizes that take seconds, COMMIT for a copy without git's folder. The exit status is 1 if a step
failed; a missed speed target is not a failure.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
out=${OUT:-bench/results/run}
results=${RESULTS:-bench/results}
limit=${LIMIT:-450}
devices=${DEVICES:-cuda:0}
quick=${QUICK:-0}
dry_run=0
failed=()
stages=()
all_stages=(build test sanitize bench dist threads dist-test dist-memory dist-faults dist-slow
  questions)

while (($#)); do
  case $1 in
    --dry-run) dry_run=1 ;;
    all) stages+=("${all_stages[@]}") ;;
    -h | --help) usage; exit 0 ;;
    *)
      [[ " ${all_stages[*]} " == *" $1 "* ]] || { usage >&2; exit 2; }
      stages+=("$1")
      ;;
  esac
  shift
done
((${#stages[@]})) || stages=("${all_stages[@]}")

mkdir -p "$out" "$results" || exit 1
[[ $out == bench/results/run ]] && printf '*\n' >"$out/.gitignore"
export PYTHONUNBUFFERED=1
log=/dev/null

say() { printf '== %s\n' "$*" | tee -a "$log"; }
skip() { say "SKIPPED: $*"; }

fail() {
  failed+=("$1")
  say "FAILED: $*"
}

describe_machine() {  # sets GPU, versions and commit, which every record contains; called once
  local found
  found=$(timeout 30 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
  gpu=${found%%,*}
  gpu=${gpu:-no GPU}
  driver=${found##*, }
  read -r torch cuda < <("$python" -c \
    'import torch; print(torch.__version__, torch.version.cuda or "none")' 2>/dev/null) || true
  commit=${COMMIT:-$(git describe --always --dirty --exclude='*' 2>/dev/null)}
  record=$(tr '[:upper:] ' '[:lower:]-' <<<"${gpu#NVIDIA }" | tr -cd 'a-z0-9.-').json
}

note() {  # name, status, seconds, content file, command: adds a run to both records
  "$python" bench/merge_results.py "$out/$record" "$results/$record" --name "$1" --status "$2" \
    --seconds "$3" --content "$4" --log "$log" --command "$5" --gpu "$gpu" --driver "$driver" \
    --cuda "${cuda:-}" --torch "${torch:-}" --commit "$commit" ||
    say "the record of $1 could not be written"
}

# name, command...: runs, logs and records the command. Its time limit is the rest of the stage, or
# $most seconds if that is less.
step() {
  local name=$1 begin=$SECONDS status=0 left content command
  shift
  printf -v command '%q ' "$@"
  if ((dry_run)); then
    printf '%s: %s\n' "$name" "$command"
    return 0
  fi
  left=$((limit - (SECONDS - stage_begin)))
  if ((left < 2)); then
    fail "$name" "no time left in this stage"
    return 1
  fi
  ((${most:-left} < left)) && left=$most
  content=$out/.content.json
  rm -f "$content"
  say "$name [at most $left s]: $command"
  timeout --kill-after=10 "$left" "$@" 2>&1 | tee -a "$log"
  status=${PIPESTATUS[0]}
  note "$name" "$status" $((SECONDS - begin)) "$content" "$command"
  rm -f "$content"
  # Status 3: a speed target of the table was missed. Status 77: it cannot run on this machine.
  if ((status == 77)); then
    skip "$name: $(grep -v '^==' "$log" | tail -n 1)"
    return 0
  fi
  ((status == 0 || status == 3)) || fail "$name" "status $status after $((SECONDS - begin)) s"
  return 0
}

missing() {  # modules...: prints the modules that the environment lacks
  "$python" - "$@" <<'END'
import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))
END
}

stage_build() {
  local lacks
  lacks=$(missing torch setuptools ninja pip)
  [[ -z $lacks ]] || say "this environment lacks: $lacks"
  step build "$python" -m pip install --no-build-isolation --no-deps -e .
  step info "$python" -m pycollect.cli info
}

tests=(-q -rfEs --tb=short --maxfail=50 -p no:cacheprovider)

can_test() {  # name: fails this step if modules are missing that the tests need
  local lacks
  lacks=$(missing pytest hypothesis numpy)
  [[ -z $lacks ]] && return
  fail "$1" "this environment lacks $lacks; the tests need them"
  return 1
}

stage_test() {
  local lacks new=(tests/test_cuda_*.py) old=(tests pycollect) all=("${tests[@]}") ours=()
  # Thousands of small tests, which mostly use the CPU: run them in several processes.
  local matrix=(tests/test_cuda_{all_reduce,collectives,contract,layouts,large}.py) workers=()
  local file rest=()
  for file in "${new[@]}"; do
    [[ $file == tests/test_cuda_dist_* ]] && continue  # the dist stages run these on a GPU
    ours+=("$file")
    [[ " ${matrix[*]} " == *" $file "* ]] || rest+=("$file")
  done
  can_test test || return
  lacks=$(missing cupy sklearn tqdm matplotlib)
  [[ -z $lacks ]] || say "this environment lacks $lacks: tests of these are skipped"
  [[ -n $(missing xdist) ]] || workers=(-n 6 --dist worksteal)
  export PYCOLLECT_REQUIRE_CUDA=1
  step test-cuda "$python" -m pytest "${all[@]}" -m "cuda and not slow" "${rest[@]}"
  step test-cuda-matrix "$python" -m pytest "${all[@]}" "${workers[@]}" -m "cuda and not slow" \
    "${matrix[@]}"
  step test-cuda-slow "$python" -m pytest "${all[@]}" -m "cuda and slow" "${ours[@]}"
  step test-others "$python" -m pytest "${all[@]}" -m "not (cuda and slow)" "${old[@]}" \
    "${new[@]/#/--ignore=}"
  step test-emulated "$python" -m pytest "${all[@]}" "${workers[@]}" -m "not cuda and not slow" \
    -k test_cuda_dist_ tests
  unset PYCOLLECT_REQUIRE_CUDA
}

sanitizer() {  # prints the tool's path: from PATH, beside nvcc, or from usual toolkit folders
  local nvcc at
  command -v compute-sanitizer && return
  nvcc=$(command -v nvcc || true)
  for at in "${nvcc%/*}" "${CUDA_HOME:-/usr/local/cuda}/bin" /usr/local/cuda/compute-sanitizer; do
    [[ -x $at/compute-sanitizer ]] && printf '%s\n' "$at/compute-sanitizer" && return
  done
  return 1
}

stage_sanitize() {
  local tool check first
  local what=(-m pytest -q -x -rs -p no:cacheprovider tests/test_cuda_sanitize.py)
  what+=(-k "sanitize and not cpu and not several")
  if ! tool=$(sanitizer); then
    skip "sanitize: there is no compute-sanitizer"
    return
  fi
  first="import torch; print(torch.ones(3, device='$devices').sum().item())"
  if ! ((dry_run)) && ! timeout --kill-after=10 $((limit / 3)) "$tool" "$python" -c "$first" \
    >"$out/.refusal" 2>&1; then
    skip "sanitize: compute-sanitizer does not run here: $(grep -m 1 -i -e 'not supported' \
      -e error -e fail "$out/.refusal" || tail -n 1 "$out/.refusal" | grep . || echo it hangs)"
    rm -f "$out/.refusal"
    return
  fi
  rm -f "$out/.refusal"
  for check in memcheck initcheck; do
    # Without torch's cache every tensor is a separate allocation, and its bounds are checked.
    step "sanitize-$check" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYCOLLECT_REQUIRE_CUDA=1 \
      "$tool" --tool "$check" --error-exitcode 99 --print-limit 20 "$python" "${what[@]}"
  done
}

stage_bench() {
  local dtype sizes=(-b 4K -e 256M -f 4) few=(-b 64K -e 64M -f 32) seconds=1.5
  local worlds=4,8 copies=(-b 1M -e 256M -f 16) products=(--size 4000 --products 50)
  local steps=(--batch 256 --seconds 5) training=(--batch 256 --seconds 10)
  local json=(--json "$out/.content.json") on=(--devices "$devices") plot=()
  if ((quick)); then
    sizes=(-b 4K -e 16K -f 4) few=(-b 4K -e 4K) seconds=0.01
    worlds=2 copies=(-b 64K -e 64K) products=(--size 64 --products 2)
    steps=(--batch 8 -n 1 -w 1) training=(--models lenet --worlds 2 --batch 8 -n 1)
  fi
  local measure=("$python" bench/allreduce_bandwidth.py "${on[@]}" --seconds "$seconds")
  [[ -n $(missing matplotlib) ]] || plot=(yes)
  for dtype in float32 bfloat16; do
    step "all_reduce-$dtype" "${measure[@]}" "${json[@]}" "${sizes[@]}" --world "$worlds" \
      -d "$dtype" --targets "${plot[@]/yes/--plot=$out/all_reduce-$dtype.png}"
  done
  step copies "$python" bench/copy_bandwidth.py "${on[@]}" --seconds "$seconds" \
    "${copies[@]}" --targets "${json[@]}"
  step overlap "$python" bench/overlap.py "${on[@]}" "${products[@]}" "${json[@]}"
  step train_step "$python" bench/train_step.py "${on[@]}" "${steps[@]}" --targets "${json[@]}"
  step train "$python" bench/train.py "${on[@]}" "${training[@]}" "${json[@]}"
  step algorithms "${measure[@]}" "${json[@]}" "${few[@]}" --world "$worlds" --algorithms all
  for collective in reduce broadcast all_gather reduce_scatter; do
    step "$collective" "${measure[@]}" "${json[@]}" "${few[@]}" --world "$worlds" \
      --collective "$collective"
  done
}

stage_dist() {
  local sizes=(-b 4 -e 64M -f 8) few=(-b 4K -e 16M -f 64) seconds=1 world=4 others=2,8
  local json=(--json "$out/.content.json") plot=() training=(--batch 256 --seconds 20)
  local some=(tests/test_cuda_dist_{matrix,streams,p2p}.py -k "float32 or by_tag or auto")
  if ((quick)); then
    sizes=(-b 4 -e 4K -f 1024 -n 1 -w 1) few=(-b 4K -e 4K -n 1 -w 1) seconds=0.01
    world=2 others=3 training=(--batch 8 -n 1)
  fi
  local measure=("$python" bench/allreduce_bandwidth.py --devices "$devices" --seconds "$seconds")
  [[ -n $(missing matplotlib) ]] || plot=(yes)
  if can_test dist-some; then
    PYCOLLECT_REQUIRE_CUDA=1 most=130 step dist-some "$python" -m pytest "${tests[@]}" -m cuda \
      "${some[@]}"
  fi
  most=180 step dist-all_reduce "${measure[@]}" "${json[@]}" "${sizes[@]}" --processes "$world" \
    --peer-limit 25 --targets "${plot[@]/yes/--plot=$out/dist-all_reduce.png}"
  most=80 step dist-train "$python" bench/train.py --devices "$devices" --models lenet \
    --worlds "$world" --no-loading --targets "${training[@]}" "${json[@]}"
  step dist-worlds "${measure[@]}" "${json[@]}" "${few[@]}" --processes "$others" --peers gloo
}

dist_tests() {  # name, arguments of pytest...
  can_test "$1" || return
  PYCOLLECT_REQUIRE_CUDA=1 step "$1" "$python" -m pytest "${tests[@]}" -m cuda "${@:2}"
}

stage_dist_test() {
  local files=(tests/test_cuda_dist_{matrix,streams,rendezvous}.py)
  files+=(tests/test_bench_dist.py tests/test_bench_training.py tests/test_bench_graph_replay.py)
  dist_tests dist-test "${files[@]}"
}

stage_dist_memory() { dist_tests dist-memory tests/test_cuda_dist_{zero_copy,symmetric_memory,p2p,p2p_order}.py; }

# Most of these tests start their own processes and take seconds each, on any GPU.
stage_dist_faults() {
  dist_tests dist-faults tests/test_cuda_dist_{faults,deaths,p2p_faults,training}.py
}

stage_dist_slow() {
  local lifecycle=tests/test_cuda_dist_lifecycle.py
  most=$((limit * 2 / 3)) dist_tests dist-settings -k "not nothing_behind" "$lifecycle" \
    tests/test_cuda_dist_settings.py
  PYCOLLECT_TEST_CYCLES=200 dist_tests dist-cycles -k nothing_behind "$lifecycle"
}

stage_threads() {
  local json=(--json "$out/.content.json") sizes=(--sizes 4,64K,1M,16M,64M --seconds 3)
  ((quick)) && sizes=(--quick --parts all_reduce --seconds 0.01)
  most=$((limit / 2)) dist_tests threads-test tests/test_threads_*.py \
    tests/test_cuda_rank_threads*.py
  step rank_threads "$python" bench/rank_threads.py --device "$devices" "${sizes[@]}" --targets "${json[@]}"
}

stage_questions() {
  local json=(--json "$out/.content.json") worlds=2,4,8 few=() sizes=()
  ((quick)) && worlds=2 few=(--rounds 5) sizes=(-e 4K -n 1 -w 1)
  most=190 step gpu_waits "$python" bench/gpu_waits.py --world "$worlds" "${few[@]}" "${json[@]}"
  most=110 step reduce_kernels "$python" bench/reduce_kernels.py --seconds 60 "${json[@]}"
  most=90 step pinned_ring "$python" bench/pinned_ring.py --seconds 60 "${json[@]}"
  step graph_replay "$python" bench/graph_replay.py --devices "$devices" "${sizes[@]}" "${json[@]}"
}

describe_machine
for stage in "${stages[@]}"; do
  stage_begin=$SECONDS
  ((dry_run)) || log=$out/$stage.log
  ((dry_run)) || : >"$log"
  say "$stage on $gpu, driver ${driver:-unknown}, CUDA ${cuda:-unknown}, torch ${torch:-unknown}," \
    "commit ${commit:-unknown}"
  "stage_${stage/-/_}"
  say "$stage: $((SECONDS - stage_begin)) s"
done
if ((${#failed[@]})); then
  printf 'gpu_report: failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
