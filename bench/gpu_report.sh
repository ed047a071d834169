#!/usr/bin/env bash
# Build, test and measure on a machine with a GPU, in stages of under nine minutes each. A killed
# stage leaves its log up to then, and one JSON record of all runs, also of the one that was killed.
set -uo pipefail

usage() {
  cat <<'END'
usage: bench/gpu_report.sh [--dry-run] [STAGE | all]...

  first      build; a small all_reduce; a test of each way of synchronising; waits between processes
  speed      the main paths beside their peers: all_reduce of lists, of processes and of threads,
             training steps, graphs
  test       tests of lists of tensors and of ranks that are threads
  dist       tests of processes that share the GPU: values, streams, memory, faults, training
  bench      all other benchmarks: collectives, algorithms, copies, overlap, training, programs
  questions  measurements behind design choices: waits, folds, staging
  sanitize   memcheck and initcheck over a reduced matrix
  slow       slow tests, and tests that need no GPU
  build      only install into the environment of $PYTHON, which must have torch

The stages run in the given order; without any, all run, as listed. Where pycollect is not built, a
stage builds it. --dry-run prints the commands. tests/gpu_tests.txt has the tests of each stage.
Environment: PYTHON (python3), OUT for logs and record (bench/results/run), RESULTS for the record
of this GPU (bench/results), LIMIT seconds of a stage (500), TOTAL seconds of all stages (no limit),
DEVICES (cuda:0), QUICK=1 for sizes that take seconds, COMMIT for a copy without git's folder. The
exit status is 1 if a step failed; a missed speed target is not a failure. What several commands
left in OUT is merged by `bench/merge_results.py folders`.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
out=${OUT:-bench/results/run}
results=${RESULTS:-bench/results}
limit=${LIMIT:-500} total=${TOTAL:-0}
devices=${DEVICES:-cuda:0}
quick=${QUICK:-0}
# Seconds from the signal that ends a step to the one that kills it. A benchmark between processes
# waits up to 30 s for ranks that hang in the driver, and then writes its results.
grace=40
dry_run=0 log=/dev/null
failed=() summary=() stages=()
all_stages=(first speed test dist bench questions sanitize slow)

while (($#)); do
  case $1 in
    --dry-run) dry_run=1 ;;
    all) stages+=("${all_stages[@]}") ;;
    -h | --help) usage; exit 0 ;;
    *)
      [[ " ${all_stages[*]} build " == *" $1 "* ]] || { usage >&2; exit 2; }
      stages+=("$1")
      ;;
  esac
  shift
done
((${#stages[@]})) || stages=("${all_stages[@]}")

mkdir -p "$out" "$results" || exit 1
[[ $out == bench/results/run ]] && printf '*\n' >"$out/.gitignore"
# Gloo otherwise resolves the host's name, which takes long on a machine without a network.
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

say() { printf '== %s\n' "$*" | tee -a "$log"; }
skip() { say "SKIPPED: $*"; }

fail() {  # step, reason: returns 1
  failed+=("$1")
  say "FAILED: $*"
  return 1
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

# name, status, seconds, content file, command: adds a run to both records, or replaces it. A run
# without a status has not ended.
note() {
  "$python" bench/merge_results.py add "$out/$record" "$results/$record" --name "$1" \
    ${2:+--status "$2"} --seconds "$3" --content "$4" --log "$log" --command "$5" --gpu "$gpu" \
    --driver "$driver" --cuda "${cuda:-}" --torch "${torch:-}" --commit "$commit" ||
    say "the record of $1 could not be written"
}

# command...: runs it for at most $left seconds and logs its output; sets $status. Processes that it
# leaves behind would use the GPU during the next step, and are killed. One that hangs in the driver
# or has left the process group may keep the pipe to tee open, so the wait for tee is short.
run_logged() {
  local group tee
  exec 3> >(exec tee -a "$log")
  tee=$!
  timeout --signal="${signal:-TERM}" --kill-after="$grace" "$left" "$@" >&3 2>&1 3>&- </dev/null &
  group=$!
  exec 3>&-
  wait "$group"
  status=$?
  kill -KILL -- "-$group" 2>/dev/null
  timeout 2 tail --pid="$tee" -s 0.05 -f /dev/null
  kill "$tee" 2>/dev/null
}

# name, command...: runs, logs and records the command, with what it has written to $out/NAME.json.
# Its time limit is the rest of the stage or of all stages, or $most seconds if that is less.
step() {
  local name=$1 begin=$SECONDS status=0 left content command
  shift
  content=$out/$name.json
  printf -v command '%q ' "$@"
  ((dry_run)) && { printf '%s: %s\n' "$name" "$command"; return; }
  left=$((limit - (SECONDS - stage_begin)))
  ((total && total - SECONDS < left)) && left=$((total - SECONDS))
  ((left >= 2)) || { fail "$name" "no time left"; return; }
  ((${most:-left} < left)) && left=$most
  rm -f "$content"
  say "$name [at most $left s]: $command"
  note "$name" "" 0 "$content" "$command"
  run_logged "$@"
  note "$name" "$status" $((SECONDS - begin)) "$content" "$command"
  rm -f "$content"
  summary+=("$name: status $status, $((SECONDS - begin)) s")
  # Status 3: a speed target of the table was missed. Status 77: it cannot run on this machine.
  case $status in
    0 | 3) ;;
    77) skip "$name: $(grep -v '^==' "$log" | tail -n 1)" ;;
    *) fail "$name" "status $status after $((SECONDS - begin)) s" ;;
  esac
}

# name, script of bench/, arguments...: a step that measures.
measure() { step "$1" "$python" "bench/$2.py" "${@:3}" --json "$out/$1.json"; }

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
  # Without a list of architectures the build is for this machine's GPU alone.
  step build env -u TORCH_CUDA_ARCH_LIST PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install \
    --no-build-isolation --no-deps -e . || return
  step info "$python" -m pycollect.cli info
}

run_tests() {  # stage, options of pytest...: the runs of this stage in tests/gpu_tests.txt
  local stage name seconds words lacks workers=() arguments
  lacks=$(missing pytest hypothesis numpy)
  [[ -z $lacks ]] || { fail "$1" "this environment lacks $lacks; the tests need them" || return; }
  lacks=$(missing cupy sklearn tqdm matplotlib)
  [[ -z $lacks ]] || say "this environment lacks $lacks: tests of these are skipped"
  # shellcheck disable=SC2034  # the words of a line may use it
  [[ -n $(missing xdist) ]] || workers=(-n 6 --dist worksteal)
  while read -r stage name seconds words; do
    [[ $stage == "$1" ]] || continue
    eval "arguments=($words)"
    # At SIGINT pytest prints the failures up to then.
    most=$seconds signal=INT grace=10 PYCOLLECT_REQUIRE_CUDA=1 step "$name" "$python" -m pytest \
      -q -rfEs --tb=short -p no:cacheprovider "${@:2}" "${arguments[@]}"
  done <tests/gpu_tests.txt
}

stage_first() {
  local few=() call="x = [torch.full((8,), r + 1.0, device='${devices%%,*}') for r in range(4)]"
  call="import torch, pycollect; $call; pycollect.all_reduce(x); print([t.tolist() for t in x])"
  call+="; assert all((t == 10).all() for t in x)"
  ((quick)) && few=(--rounds 5)
  most=330 stage_build || return
  most=60 step one_call env PYTHONFAULTHANDLER=1 "$python" -c "$call"
  PYCOLLECT_TEST_SECONDS=35 run_tests first -x
  # Last, because a stream that its GPU never releases would disturb what follows.
  most=90 measure gpu_waits gpu_waits --world 2 --bytes 4K --seconds 6 "${few[@]}"
}

stage_test() { PYCOLLECT_TEST_SECONDS=20 run_tests test --maxfail=50; }

# A job may create the CUDA contexts of four processes, or sweep many calls: 45 s. After five hangs
# no test of the run is likely to end.
stage_dist() { PYCOLLECT_TEST_SECONDS=45 run_tests dist --maxfail=5; }

stage_slow() { PYCOLLECT_TEST_CYCLES=200 run_tests slow --maxfail=50; }

set_sizes() {  # the sizes that several stages use
  on=(--devices "$devices") lists=(-b 4K -e 256M -f 4 --world '4,8' --seconds 1.5)
  few=(-b 64K -e 64M -f 32 --world '4,8' --seconds 1.5) processes=4 others=2,8
  large=(-b 64K -e 64M -f 16) small=(-b 4 -e 4K -f 1024) ends=(-b 1M -e 64M -f 64) effort=(--seconds 1)
  if ((quick)); then
    lists=(-b 4K -e 16K -f 4 --world 2 --seconds 0.01) few=(-b 4K -e 4K --world 2 --seconds 0.01)
    processes=2 others=3 effort=(-n 1 -w 1)
    large=(-b 4K -e 4K) small=(-b 4 -e 4) ends=(-b 4 -e 4)
  fi
}

stage_speed() {
  local bandwidth=allreduce_bandwidth between steps=(--batch 256 --seconds 5)
  local training=(--batch 256 --seconds 20) replays=(-f 16)
  local threads=(--sizes "4,64K,1M,16M,64M" --seconds 3)
  set_sizes
  if ((quick)); then
    steps=(--batch 8 -n 1 -w 1) training=(--batch 8 -n 1) replays=(-e 4K -n 1 -w 1)
    threads=(--quick --seconds 0.01)
  fi
  between=("${on[@]}" --processes "$processes" "${effort[@]}")
  most=100 measure all_reduce-float32 $bandwidth "${on[@]}" "${lists[@]}" -d float32 --targets
  most=150 measure dist-targets $bandwidth "${between[@]}" "${ends[@]}" --peer-limit 25 --targets
  most=60 measure rank_threads rank_threads --device "$devices" --parts all_reduce \
    "${threads[@]}" --targets
  most=40 measure train_step train_step "${on[@]}" "${steps[@]}" --targets
  most=40 measure graph_replay graph_replay "${on[@]}" "${replays[@]}"
  most=80 measure all_reduce-bfloat16 $bandwidth "${on[@]}" "${lists[@]}" -d bfloat16 --targets
  most=90 measure dist-large $bandwidth "${between[@]}" "${large[@]}" --peers gloo
  most=60 measure dist-small $bandwidth "${between[@]}" "${small[@]}" --peers gloo
  measure dist-train train "${on[@]}" --models lenet --worlds "$processes" --no-loading \
    --targets "${training[@]}"
}

stage_bench() {
  local collective copies=(-b 1M -e 256M -f 16 --seconds 1.5) products=(--size 4000 --products 12)
  local training=(--batch 256 --seconds 10) programs=() between=(-b 4K -e 16M -f 64)
  set_sizes
  if ((quick)); then
    copies=(-b 64K -e 64K --seconds 0.01) products=(--size 64 --products 2) between=(-b 4K -e 4K)
    training=(--models lenet --worlds 2 --batch 8 -n 1) programs=(--quick)
  fi
  measure copies copy_bandwidth "${on[@]}" "${copies[@]}" --targets
  measure overlap overlap "${on[@]}" "${products[@]}"
  for collective in reduce broadcast all_gather reduce_scatter; do
    measure "$collective" allreduce_bandwidth "${on[@]}" "${few[@]}" --collective "$collective"
  done
  measure algorithms allreduce_bandwidth "${on[@]}" "${few[@]}" --algorithms all
  measure dist-worlds allreduce_bandwidth "${on[@]}" --processes "$others" "${effort[@]}" \
    "${between[@]}" --peers gloo
  most=150 measure train train "${on[@]}" "${training[@]}"
  measure thread_programs rank_threads --device "$devices" --parts "worlds,programs" --rounds 1 \
    "${programs[@]}"
}

stage_questions() {
  local worlds=2,4,8 few=()
  ((quick)) && worlds=2 few=(--rounds 5)
  most=280 measure gpu_waits-all gpu_waits --world "$worlds" "${few[@]}"
  most=110 measure reduce_kernels reduce_kernels --seconds 60
  most=90 measure pinned_ring pinned_ring --seconds 60
}

stage_sanitize() {
  local tool check first refusal
  local what=(tests/test_cuda_sanitize.py -k "sanitize and not cpu and not several")
  tool=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/cuda/compute-sanitizer
    command -v compute-sanitizer) || { skip "sanitize: there is no compute-sanitizer"; return; }
  first="import torch; print(torch.ones(3, device='$devices').sum().item())"
  if ! refusal=$( ((dry_run)) ||
    timeout --kill-after=10 $((limit / 12 + 1)) "$tool" "$python" -c "$first" 2>&1); then
    skip "sanitize: compute-sanitizer does not run here: $(grep -m 1 -i -e 'not supported' \
      -e error -e fail <<<"$refusal" || tail -n 1 <<<"$refusal" | grep . || echo it hangs)"
    return
  fi
  for check in memcheck initcheck; do
    # Without torch's cache every tensor is a separate allocation, and its bounds are checked.
    step "sanitize-$check" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYCOLLECT_REQUIRE_CUDA=1 \
      "$tool" --tool "$check" --error-exitcode 99 --print-limit 20 "$python" -m pytest -q -x -rs \
      -p no:cacheprovider "${what[@]}"
  done
}

describe_machine
[[ -n $commit ]] || say "the commit is unknown; COMMIT=... names it in the record"
for stage in "${stages[@]}"; do
  stage_begin=$SECONDS
  ((dry_run)) || log=$out/$stage.log
  ((dry_run)) || : >"$log"
  say "$stage on $gpu, driver ${driver:-unknown}, CUDA ${cuda:-unknown}, torch ${torch:-unknown}," \
    "commit ${commit:-unknown}"
  if ((dry_run)) || [[ $stage == first || $stage == build ]] || "$python" -c 'import pycollect'; then
    "stage_$stage"
  else
    stage_build && "stage_$stage"
  fi
  say "$stage: $((SECONDS - stage_begin)) s"
done
((${#summary[@]})) && printf '%s\n' "${summary[@]}"
if ((${#failed[@]})); then
  printf 'gpu_report: failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
