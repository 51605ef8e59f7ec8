#include <cuda_runtime.h>

#include <algorithm>

#include "cli/device_fill.h"
#include "problem/random.h"

namespace mok::cli {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;  // elements per thread and step: one 16-byte store

// out[j] = factor * bell(first + j), or the step nearest to that: see problem::fill_normal and
// fill_steps.
template <bool kSteps>
__global__ void fill(problem::Stream random, uint64_t first, int64_t chunks, float factor,
                     problem::Grid grid, uint4* out) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t c = int64_t{blockIdx.x} * kThreads + threadIdx.x; c < chunks; c += step) {
    union {
      uint4 all;
      numerics::bf16 each[kEach];
    } words;
    words.all = {};
    for (int j = 0; j < kEach; ++j) {
      const int32_t bell = random.bell(first + static_cast<uint64_t>(c * kEach + j));
      const float value =
          kSteps ? static_cast<float>(problem::nearest_step(bell, factor, grid.most)) * grid.step
                 : static_cast<float>(bell) * factor;
      words.each[j] = numerics::to_bf16(value);
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
  const problem::Grid grid = problem.grid(tensor);
  const bool steps = grid.step > 0;
  const double scale = problem.scale(tensor) / (steps ? static_cast<double>(grid.step) : 1);
  const auto kernel = steps ? fill<true> : fill<false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      random, static_cast<uint64_t>(begin * problem.row_elements(tensor)), chunks,
      problem::normal_factor<float>(scale), grid, static_cast<uint4*>(out));
  return cudaGetLastError();
}

}  // namespace mok::cli
