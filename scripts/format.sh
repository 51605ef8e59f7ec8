#!/usr/bin/env bash
# format.sh [--check]: clang-format and ruff over the files that git knows or would know.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$PWD/.venv/bin
mapfile -t cpp < <(git ls-files -co --exclude-standard -- '*.h' '*.hpp' '*.cpp' '*.cu' '*.cuh' |
  while read -r file; do [[ -f $file ]] && echo "$file"; done)
if [[ ${1:-} == --check ]]; then
  rc=0
  [[ ${#cpp[@]} -eq 0 ]] || "$bin/clang-format" --dry-run --Werror "${cpp[@]}" || rc=1
  "$bin/ruff" format --check --quiet . || rc=1
  "$bin/ruff" check . || rc=1
  [[ $rc -eq 0 ]] || echo "'make format' mends the formatting" >&2
  exit "$rc"
fi
[[ ${#cpp[@]} -eq 0 ]] || "$bin/clang-format" -i "${cpp[@]}"
"$bin/ruff" format --quiet .
"$bin/ruff" check --fix .
