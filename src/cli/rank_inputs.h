// One rank's tensors on the host, filled from problems.
#pragma once

#include <functional>
#include <vector>

#include "cli/memory.h"
#include "cli/results.h"
#include "cli/spec.h"

namespace mok::cli {

// Which part of which tensor a rank holds.
struct Slice {
  problem::Tensor tensor;
  int64_t begin, end;  // of the leading dimension
};

struct TokenInputs {  // of one problem
  Memory x, d_y, ids, topk_weights;
};

struct WeightInputs {
  Memory gate, up, down, shared_gate, shared_up, shared_down, shared_vector;
};

// The routed weights in FP8, of a quantised precision.
struct QuantizedInputs {
  struct Stack {
    Memory data, scales, data_t, scales_t;
  };
  Stack gate, up, down;
  int64_t bytes() const;
};

std::vector<Slice> token_slices(const Spec& spec, int rank);   // x and d_y
std::vector<Slice> weight_slices(const Spec& spec, int rank);  // in the order of WeightInputs
int64_t slice_bytes(const problem::Problem& problem, const Slice& slice, Precision precision);

// `threads` fill large tensors together; `step` is called after each tensor.
TokenInputs make_tokens(const Spec& spec, const problem::Problem& problem, int rank, int threads);
WeightInputs make_weights(const Spec& spec, const problem::Problem& problem, int rank, int threads,
                          const std::function<void()>& step);

// From the bf16 weights; experts are shared out among `threads`.
QuantizedInputs quantize(const Spec& spec, const WeightInputs& weights, int threads);

LayerWeights views(const LayerShape& shape, const WeightInputs& weights,
                   const QuantizedInputs& quantized);

}  // namespace mok::cli
