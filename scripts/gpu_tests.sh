#!/usr/bin/env bash
# gpu_tests.sh [PROGRAM...]: on a machine with a GPU, every test with the label gpu, each in a
# process of its own (an error that spoils the CUDA context spoils one test), then
# compute-sanitizer's memcheck and racecheck on small cases, then PyTorch's tests (tests/python/gpu;
# with two GPUs also those of two processes). The last line counts.
#   PROGRAM        test programs that are built already; else the preset cuda is built
#   PYTHON=...     a Python with PyTorch for CUDA, pytest and pytest-timeout (default python3);
#                  empty: no tests of PyTorch
#   FILTER=...     GoogleTest filter of the tests to run; SANITIZE=0 leaves compute-sanitizer out
#   JOBS=N         tests at a time (default 1: some measure how long they wait)
#   TIMEOUT=N      seconds a test may take (default 120)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
filter=${FILTER:-*}
limit=${TIMEOUT:-120}
python=${PYTHON-python3}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

if [[ $# -eq 0 ]]; then
  options=(-DMOK_CLI=OFF)
  if [[ -n $python ]]; then
    options+=(-DMOK_TORCH=ON "-DMOK_PYTHON=$(command -v "$python")")
  fi
  scripts/build.sh cuda "${options[@]}" || exit 1
  set -- build/cuda/tests/test_gpu_*
fi

# The program's tests, one "program test" a line.
list_tests() { # PROGRAM FILTER
  "$1" --gtest_list_tests --gtest_filter="$2" | awk -v program="$1" '
    /^[^ ].*\.( |$)/ { suite = $1 }
    /^  /            { print program, suite $1 }'
}

run_one() { # LIMIT LOGS PROGRAM TEST [PREFIX...]: one line, "ok", "FAILED" or "skipped" first
  local limit=$1 logs=$2 program=$3 test=$4 begin=$SECONDS result=ok rc=0
  shift 4
  local log="$logs/${1:+sanitizer.}${test//[^A-Za-z0-9_]/_}.$BASHPID"
  timeout -k 10 "$limit" "$@" "$program" --gtest_filter="$test" --gtest_brief=1 >"$log" 2>&1 || rc=$?
  if [[ $# -gt 0 ]] && grep -qi 'device not supported' "$log"; then
    result=skipped # the machine gives compute-sanitizer no access
  elif [[ $rc -ne 0 ]] || { [[ $# -gt 0 ]] && ! grep -q "SUMMARY: 0 \(errors\|hazards\)" "$log"; }; then
    result=FAILED
  elif grep -q '^\[  SKIPPED \]' "$log"; then
    result=skipped
  fi
  printf '%-8s %3d s  %s %s\n' "$result" $((SECONDS - begin)) "${*:+${*: -1} }" "$test"
  if [[ $result == FAILED ]]; then
    echo "  exit status $rc$([[ $rc -eq 124 || $rc -eq 137 ]] && echo ', ran too long')"
    tail -n 40 "$log" | sed 's/^/  | /'
  fi
}
export -f run_one

for program; do list_tests "$program" "$filter"; done >"$logs/tests"
xargs -P "${JOBS:-1}" -L 1 bash -c 'run_one "$@"' run_one "$limit" "$logs" <"$logs/tests" |
  tee "$logs/results"

if [[ ${SANITIZE:-1} != 0 ]]; then
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  for program; do
    list_tests "$program" '*matches_the_oracle/small:*matches_the_oracle/ep2_shared:*matches_the_oracle/ring_refills'
  done >"$logs/small"
  for tool in memcheck racecheck; do
    while read -r program test; do
      if [[ -z $sanitizer ]]; then
        printf 'skipped    0 s  --tool=%s %s (no compute-sanitizer)\n' "$tool" "$test"
      else
        run_one $((3 * limit)) "$logs" "$program" "$test" "$sanitizer" --error-exitcode=99 \
          --print-limit=10 "--tool=$tool"
      fi
    done <"$logs/small"
  done | tee -a "$logs/results"
fi

run_python() { # FILE: one line like run_one's
  local begin=$SECONDS result=ok rc=0 log
  log="$logs/$(basename "$1")"
  timeout -k 10 $((5 * limit)) "$python" -m pytest -q -p no:cacheprovider "$1" >"$log" 2>&1 || rc=$?
  if [[ $rc -ne 0 ]]; then
    result=FAILED
  elif ! tail -n 1 "$log" | grep -q passed; then
    result=skipped
  fi
  printf '%-8s %3d s  %s: %s\n' "$result" $((SECONDS - begin)) "$1" "$(tail -n 1 "$log")"
  [[ $result != FAILED ]] || tail -n 60 "$log" | sed 's/^/  | /'
}

if [[ -n $python ]]; then
  for file in tests/python/gpu/test_*.py; do run_python "$file"; done | tee -a "$logs/results"
fi

count() { grep -c "^$1 " "$logs/results"; }
[[ $(count skipped) -eq 0 ]] || echo "$(count skipped) skipped"
echo "$(count ok) passed, $(count FAILED) failed"
[[ $(count FAILED) -eq 0 && $(count ok) -gt 0 ]]
