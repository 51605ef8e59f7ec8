#!/usr/bin/env bash
# Builds and runs every test that needs no GPU, goes on after a failure, and ends with a summary.
#   MAX_JOBS=N, MOK_WERROR=1   as for build.sh
#   MOK_SANITIZERS="asan tsan" the sanitizer builds to run ("" for none)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
jobs=${MAX_JOBS:-$(nproc)}
reports=$PWD/build/reports
rm -rf "$reports"
mkdir -p "$reports"
lines=()
failed=0

step() { # NAME COMMAND...: runs it, and notes how it went and how long it took
  local name=$1 begin=$SECONDS result=ok rc=0
  shift
  printf '\n== %s\n' "$name"
  "$@" || rc=$?
  if [[ $rc -ne 0 ]]; then
    result=FAILED
    failed=$((failed + 1))
  fi
  lines+=("$(printf '%-28s %-7s %4d s' "$name" "$result" $((SECONDS - begin)))")
  return "$rc"
}

# shellcheck disable=SC2317  # called by step
run_ctest() { # PRESET
  # ThreadSanitizer of older compilers cannot place its shadow memory under a large address
  # space randomisation; setarch -R switches that off for the tests.
  local prefix=()
  setarch -R true 2>/dev/null && prefix=(setarch -R)
  "${prefix[@]}" ctest --preset "$1" --parallel "$jobs" --output-junit "$reports/ctest-$1.xml"
}

# shellcheck disable=SC2317  # called by step
run_pytest() {
  .venv/bin/python -m pytest tests/python --junitxml "$reports/pytest.xml"
  local rc=$?
  [[ $rc -eq 5 ]] && return 0 # no test collected; the count in the summary says so
  return "$rc"
}

step "setup" scripts/setup.sh || exit 1
if step "build cpu" scripts/build.sh cpu; then
  step "C++ tests" run_ctest cpu
  step "Python tests" run_pytest
fi
for preset in ${MOK_SANITIZERS-asan tsan}; do
  step "build $preset" scripts/build.sh "$preset" && step "C++ tests, $preset" run_ctest "$preset"
done

printf '\n== summary\n'
printf '%s\n' "${lines[@]}"
.venv/bin/python scripts/count_tests.py "$reports"/*.xml || failed=$((failed + 1))
if [[ $failed -ne 0 ]]; then
  echo "make test: FAILED, see the summary"
  exit 1
fi
