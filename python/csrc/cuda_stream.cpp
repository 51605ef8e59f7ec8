#include "cuda_stream.h"

#include <dlfcn.h>

#include <cstdint>

#include "mok/error.h"

namespace mok::torch_ops {

// The function lives in libtorch_cuda, which a PyTorch without CUDA lacks; so it is looked up, not
// linked.
void* current_stream(int device) {
  using Getter = int32_t (*)(int32_t device, void** stream);
  static const Getter get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (get == nullptr || get(device, &stream) != 0) {
    throw Error(ErrorCode::unsupported, "PyTorch's current CUDA stream cannot be found");
  }
  return stream;
}

}  // namespace mok::torch_ops
