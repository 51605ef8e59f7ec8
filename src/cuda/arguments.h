// What the host can see to be wrong, before anything is enqueued. Each check throws bad_argument
// with a message that names the argument and the rank.
#pragma once

#include "mok/cuda.h"
#include "plan/geometry.h"

namespace mok::cuda {

void require(bool holds, const std::string& message);
// No text is made while it holds.
inline void require(bool holds, const char* message) {
  if (!holds) require(false, std::string(message));
}

void check_shape(const LayerShape& shape, int ranks, const Options& options);

// Where the checks of one call read what they need.
struct Limits {
  const LayerShape& shape;
  Precision precision;
  int rank, ranks;
  int64_t max_tokens;
};
void check_forward(const Limits& limits, const ForwardArgs& args);
void check_backward(const Limits& limits, const BackwardArgs& args);

// The gradients that all of this process's ranks want. Throws disagreement when they differ;
// ranks[i] is the number of args[i]'s rank.
plan::Wanted wanted(const std::vector<BackwardArgs>& args, const std::vector<int>& ranks);
uint32_t wanted_bits(const plan::Wanted& wanted);

}  // namespace mok::cuda
