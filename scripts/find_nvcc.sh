#!/usr/bin/env bash
# find_nvcc.sh [--install]: prints the path of nvcc (CUDA 12.8 or newer); exit code 1 where there is
# none. With --install a missing one is put together in .cuda from NVIDIA's Python packages (no
# driver, no GPU: enough to compile).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
toolkit=$root/.cuda/nvidia/cu13

recent() { # NVCC
  local version
  version=$("$1" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  [[ -n $version && $(printf '%s\n' 12.8 "$version" | sort -V | head -n1) == 12.8 ]]
}

for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" "${CUDA_HOME:-/nonexistent}/bin/nvcc" \
  /usr/local/cuda/bin/nvcc "$toolkit/bin/nvcc"; do
  if [[ -n $nvcc && -x $nvcc ]] && recent "$nvcc"; then
    echo "$nvcc"
    exit 0
  fi
done
[[ ${1:-} == --install ]] || exit 1

echo "find_nvcc: installing CUDA's compiler into .cuda" >&2
"$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade \
  --target "$root/.cuda" 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' \
  'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*' >&2 || exit 1
# The names by which a toolkit is searched.
ln -sfn lib "$toolkit/lib64"
ln -sfn libcudart.so.13 "$toolkit/lib/libcudart.so"
recent "$toolkit/bin/nvcc" || exit 1
echo "$toolkit/bin/nvcc"
