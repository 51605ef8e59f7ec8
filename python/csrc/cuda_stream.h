// PyTorch's stream, for operators that launch work themselves.
#pragma once

namespace mok::torch_ops {

// The current CUDA stream of this thread on that GPU, a cudaStream_t. Throws `unsupported` where
// PyTorch has no CUDA.
void* current_stream(int device);

}  // namespace mok::torch_ops
