#include "cuda/forward_hooks.cuh"
#include "cuda/layer_launch.cuh"

namespace mok::cuda {

void launch_forward(const ForwardLaunch& l) { launch_layer<Forward<false>>(l); }

}  // namespace mok::cuda
