#include "cuda/backward_hooks.cuh"
#include "cuda/layer_launch.cuh"

namespace mok::cuda {

void launch_backward_fp8(const BackwardLaunch& l) { launch_layer<Backward<true>>(l); }

}  // namespace mok::cuda
