// The inputs of src/problem, made on a GPU: the same bits, without gigabytes of copies.
#pragma once

#include <cstdint>

#include "problem/problem.h"

namespace mok::cli {

// Problem::fill for bf16 into `out` on the current GPU; enqueued on `stream` (cudaStream_t).
// The slice must have a multiple of 8 elements. Returns the launch's cudaError_t.
int fill_on_device(const problem::Problem& problem, problem::Tensor tensor, int64_t begin,
                   int64_t end, void* out, void* stream);

}  // namespace mok::cli
