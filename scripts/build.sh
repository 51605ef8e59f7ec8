#!/usr/bin/env bash
# build.sh PRESET [CMAKE-OPTION...]: configures and builds build/PRESET.
#   MAX_JOBS=N     compile jobs at a time (default: one a core)
#   MOK_WERROR=1   warnings are errors
#   MOK_TARGET=T   what is built (default: all of the preset)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset=$1
shift
options=("-DMOK_WERROR=$([[ ${MOK_WERROR:-0} == 1 ]] && echo ON || echo OFF)")
[[ $preset == cpu ]] && options+=(-DMOK_TORCH=ON "-DMOK_PYTHON=$PWD/.venv/bin/python")
cmake --preset "$preset" --log-level=WARNING "${options[@]}" "$@" >/dev/null
cmake --build --preset "$preset" --parallel "${MAX_JOBS:-$(nproc)}" \
  ${MOK_TARGET:+--target "$MOK_TARGET"}
