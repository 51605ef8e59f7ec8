// What the device wrote about a call that failed, as mok::Error.
#pragma once

#include "cuda/rank_state.h"
#include "mok/error.h"

namespace mok::cuda {

// `g`: the workspace's sizes. The record is not `none`.
Error to_error(const ErrorRecord& record, const plan::Geometry& g);

}  // namespace mok::cuda
