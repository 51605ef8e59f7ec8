// The geometry that a workspace's options stand for: the one place that states the defaults.
#pragma once

#include "mok/layer.h"
#include "plan/geometry.h"

namespace mok::plan {

// Ring and minibatch in whole tiles and normalized, saved rows filled in; rank 0, no tokens yet. A
// ring that the caller left open holds the expected rows, rounded up to whole minibatches.
Geometry workspace_geometry(const LayerShape& shape, int ranks, const WorkspaceOptions& options,
                            Precision precision = Precision::bf16);

// Tokens of a GPU's reduce task, one for each of its eight warps at a time: a multiple of 8 up to
// 64, so that there are at most 128 tasks of up to 8192 tokens.
int32_t reduce_task_tokens(int64_t max_tokens);

}  // namespace mok::plan
