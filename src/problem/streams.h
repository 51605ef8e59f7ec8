// The numbers of the random streams. Part of the meaning of a seed: never renumber.
#pragma once

#include <cstdint>

namespace mok::problem::streams {

// Streams 0..15: the tensors, in the order of enum Tensor.
inline constexpr uint64_t kIds = 16;
inline constexpr uint64_t kOrder = 17;
inline constexpr uint64_t kWeights = 18;

}  // namespace mok::problem::streams
