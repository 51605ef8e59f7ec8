#include "cuda/backward_hooks.cuh"
#include "cuda/layer_launch.cuh"

namespace mok::cuda {

void launch_backward(const BackwardLaunch& l) { launch_layer<Backward<false>>(l); }

}  // namespace mok::cuda
