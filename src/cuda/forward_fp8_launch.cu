#include "cuda/forward_hooks.cuh"
#include "cuda/layer_launch.cuh"

namespace mok::cuda {

void launch_forward_fp8(const ForwardLaunch& l) { launch_layer<Forward<true>>(l); }

}  // namespace mok::cuda
