// Between the host code, which g++ compiles, and the kernels: what one launch of each direction
// needs, and the functions that start it. A direction is a unit of its own (forward_launch.cu,
// backward_launch.cu, and those of fp8), so that kernels compile side by side and host code without
// them.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/rank_state.h"
#include "cuda/tensor_map.h"

namespace mok::cuda {

template <class Args>
struct Launch {
  struct Rank {
    RankState state;       // filled in for this call
    const Args* args;      // the caller's tensors, checked
    TensorMapCache* maps;  // of this direction
  };
  std::vector<Rank> ranks;  // that share the current GPU, 1 .. kMaxRanks; blocks are divided
  LayerShape shape;
  int device = 0;  // the current GPU
  int blocks = 0;
  cudaStream_t stream = nullptr;
};
using ForwardLaunch = Launch<ForwardArgs>;
using BackwardLaunch = Launch<BackwardArgs>;

// Enqueue one kernel on the current GPU. Throw bad_argument when a tensor map is refused.
void launch_forward(const ForwardLaunch& launch);
void launch_forward_fp8(const ForwardLaunch& launch);
void launch_backward(const BackwardLaunch& launch);
void launch_backward_fp8(const BackwardLaunch& launch);

}  // namespace mok::cuda
