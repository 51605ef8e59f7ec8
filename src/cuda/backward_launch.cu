// Starts the backward kernel.
#include "cuda/launch.h"
#include "mok/error.h"

namespace mok::cuda {

void launch_backward(const BackwardLaunch&) {
  throw Error(ErrorCode::unsupported, "backward is not there yet on CUDA");
}

}  // namespace mok::cuda
