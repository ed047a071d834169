#!/usr/bin/env bash
# Builds plans, folds and csrc/group without torch, with a sanitizer of the compiler, and runs their
# native tests: sanitize.sh [none|thread|address|undefined] [quick|full|build].
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
kind=${1:-thread} length=${2:-full}
folder=${BUILD_FOLDER:-$root/build/native-$kind}

flags=(-O1)
[[ $kind == none ]] || flags+=(-g -fno-omit-frame-pointer -fsanitize="$kind" -fno-sanitize-recover=all)
# Checks by calls instead of inline code halve the compile time, most of this script's time.
[[ $kind != address ]] || flags+=(--param asan-instrumentation-with-call-threshold=0)
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" ASAN_OPTIONS="detect_leaks=1 ${ASAN_OPTIONS:-}"
# ThreadSanitizer does not check other processes, and does not support a fork with threads.
[[ $kind != thread ]] || export NO_FORK=1

cases=400 worlds=(1 2 3 4 5 8) programs=12
[[ $length != quick ]] || cases=60 worlds=(1 2 3 5) programs=3

run() {  # test, arguments...
  local program
  program=$("$root/tests/native/build.sh" "$folder" "tests/native/$1.cpp" "${flags[@]}" | tail -n 1)
  [[ $length == build ]] || "$program" "${@:2}"
}
run passes_test "$length"
run executor_test "$cases" "${worlds[@]}"
run mailbox_test "$programs"
run group_test  # under ThreadSanitizer only its ranks that are threads
run failure_detector_test
if [[ $kind != thread ]]; then  # these tests fork
  for test in symmetric_heap fd_server limits isolation; do run "${test}_test"; done
fi
run scheduler_test
echo "sanitize.sh $kind $length: passed"
