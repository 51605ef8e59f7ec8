// The GPUs of this process and what they can do.
#pragma once

#include <vector>

#include "mok/cuda.h"

namespace mok::cuda {

// Throws unsupported for a GPU that cannot run the layer, or a pair that cannot reach each other.
void require_hopper(const std::vector<int>& devices);
void open_peers(const std::vector<int>& devices);

int sm_count(int device);

}  // namespace mok::cuda
