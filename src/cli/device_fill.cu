#include <cuda_runtime.h>

#include <algorithm>

#include "cli/device_fill.h"
#include "problem/random.h"

namespace mok::cli {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;  // elements per thread and step: one 16-byte store

// out[j] = factor * bell(first + j): see problem::fill_normal.
__global__ void fill_normal(problem::Stream random, uint64_t first, int64_t chunks, float factor,
                            uint4* out) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t c = int64_t{blockIdx.x} * kThreads + threadIdx.x; c < chunks; c += step) {
    union {
      uint4 all;
      numerics::bf16 each[kEach];
    } words;
    words.all = {};
    for (int j = 0; j < kEach; ++j) {
      const int32_t bell = random.bell(first + static_cast<uint64_t>(c * kEach + j));
      words.each[j] = numerics::to_bf16(static_cast<float>(bell) * factor);
    }
    out[c] = words.all;
  }
}

}  // namespace

int fill_on_device(const problem::Problem& problem, problem::Tensor tensor, int64_t begin,
                   int64_t end, void* out, void* stream) {
  const int64_t n = (end - begin) * problem.row_elements(tensor);
  if (n == 0) return cudaSuccess;
  if (n % kEach != 0) return cudaErrorInvalidValue;
  const problem::Stream random(problem.seed(), static_cast<uint64_t>(tensor));
  const int64_t chunks = n / kEach;
  const int64_t blocks = std::min<int64_t>((chunks + kThreads - 1) / kThreads, 1 << 16);
  fill_normal<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      random, static_cast<uint64_t>(begin * problem.row_elements(tensor)), chunks,
      problem::normal_factor<float>(problem.scale(tensor)), static_cast<uint4*>(out));
  return cudaGetLastError();
}

}  // namespace mok::cli
