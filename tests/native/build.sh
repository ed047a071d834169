#!/usr/bin/env bash
# Builds a native program of the core without torch: build.sh FOLDER MAIN.cpp [compiler flags...].
# Compiles only what has changed, and prints the path of the program.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$1 main=$2
shift 2
flags=(-std=c++20 -Wall -Wextra -ffp-contract=off -pthread "$@")
mkdir -p "$folder"
cd "$root"

sources=("$main" csrc/plan/*.cpp csrc/algorithms/*.cpp csrc/cpu/*.cpp csrc/group/*.cpp
  csrc/rank_executor/*.cpp csrc/hosts/*.cpp csrc/send_recv/*.cpp csrc/rank_threads/*.cpp csrc/analysis/races.cpp)

is_current() {  # object, dependency file: is the object newer than every file it depends on?
  [[ -f $1 && -f $2 ]] || return 1
  local from
  for from in $(sed -e 's/^[^:]*://' -e 's/\\$//' "$2"); do
    [[ $from -ot $1 || $from == "$1" ]] || return 1
  done
}

objects=()
compile() {
  local object=$folder/${1//\//_}.o
  objects+=("$object")
  is_current "$object" "${object%.o}.d" && return
  while (($(jobs -rp | wc -l) >= ${MAX_JOBS:-$(nproc)})); do wait -n; done
  ${CXX:-g++} "${flags[@]}" -MMD -MF "${object%.o}.d" -c "$1" -o "$object.new" &&
    mv "$object.new" "$object" &
}
for source in "${sources[@]}"; do compile "$source"; done
wait

program=$folder/$(basename "$main" .cpp)
${CXX:-g++} "${flags[@]}" "${objects[@]}" -o "$program"
echo "$program"
