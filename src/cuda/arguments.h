// What the host can see to be wrong, before anything is enqueued. Each throws bad_argument with a
// message that names the argument and the rank.
#pragma once

#include "mok/cuda.h"

namespace mok::cuda {

void require(bool holds, const std::string& message);

void check_shape(const LayerShape& shape, int ranks, const WorkspaceOptions& options);
void check_forward(const LayerShape& shape, int rank, int64_t max_tokens, const ForwardArgs& args);

}  // namespace mok::cuda
