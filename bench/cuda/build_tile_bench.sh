#!/bin/sh
# Usage: bench/cuda/build_tile_bench.sh [OUTPUT.so]; from the repository root. Needs nvcc 13.0.
set -eu
out=${1:-build/gpu/tile_bench.so}
mkdir -p "$(dirname "$out")"
nvcc -std=c++20 -gencode=arch=compute_90a,code=sm_90a -O3 -lineinfo -Xptxas -v -Iinclude -Isrc --fmad=false --expt-relaxed-constexpr \
  -Xcompiler -fPIC -shared -o "$out" bench/cuda/tile_bench.cu
