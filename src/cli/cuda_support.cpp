#include "cli/cuda_support.h"

#include "mok/cuda.h"

#ifdef MOK_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace mok::cli {

std::string cuda_refuses(const Spec& spec) {
  const auto size = [](const char* option, int64_t n) {
    return n % 64 == 0 ? ""
                       : std::string(option) + ": " + std::to_string(n) +
                             " is not a multiple of 64, which --device cuda needs";
  };
  const LayerShape& s = spec.shape;
  if (!cuda::runs(spec.precision)) {
    return std::string("--precision: ") + to_string(spec.precision) +
           " runs on the CPU only, not with --device cuda";
  }
  if (spec.processes) return "--ranks: processes are there on the CPU only, not with --device cuda";
  for (const std::string& text : {std::string(size("--hidden", s.hidden)),
                                  std::string(size("--intermediate", s.intermediate)),
                                  std::string(size("--shared", s.shared_intermediate))}) {
    if (!text.empty()) return text;
  }
  return "";
}

#ifdef MOK_WITH_CUDA

int gpu_count() { return cuda::device_count(); }

std::string why_no_gpu() {
  const int count = gpu_count();
  std::string reason;
  for (int i = 0; i < count; ++i) {
    const std::string why = cuda::why_not(i);
    if (why.empty()) return "";
    if (reason.empty()) reason = why;
  }
  return count == 0 ? "no NVIDIA GPU and driver was found" : reason;
}

std::vector<Gpu> list_gpus() {
  std::vector<Gpu> gpus;
  const int count = gpu_count();
  for (int i = 0; i < count; ++i) {
    Gpu gpu;
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess) {
      gpu.name = properties.name;
      gpu.major = properties.major;
      gpu.minor = properties.minor;
      gpu.sms = properties.multiProcessorCount;
      gpu.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    }
    gpu.why_not = cuda::why_not(i);
    for (int j = 0; j < count; ++j) {
      int can = i == j;
      if (i != j && cudaDeviceCanAccessPeer(&can, i, j) != cudaSuccess) can = 0;
      gpu.reaches.push_back(can != 0);
    }
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

std::string cuda_versions() {
  const auto text = [](int v) {
    return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
  };
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  return "runtime " + text(runtime) + ", driver " + (driver == 0 ? "none" : text(driver));
}

#else

int gpu_count() { return 0; }
std::string why_no_gpu() { return "this build has no CUDA executor"; }
std::vector<Gpu> list_gpus() { return {}; }
std::string cuda_versions() { return ""; }

#endif

}  // namespace mok::cli
