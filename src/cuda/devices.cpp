#include "cuda/devices.h"

#include "cuda/check.h"
#include "cuda/tensor_map.h"

namespace mok::cuda {

namespace {
constexpr int kComputeCapability = 90;  // sm_90a code runs on exactly this
}

int device_count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return n;
}

std::string why_not(int device) {
  cudaDeviceProp prop;
  if (device < 0 || device >= device_count()) return "there is no GPU " + std::to_string(device);
  check(cudaGetDeviceProperties(&prop, device), "properties of a GPU");
  if (prop.major * 10 + prop.minor == kComputeCapability) {
    return tensor_map_encoder() == nullptr ? "the driver has no tensor maps (CUDA 12 needed)" : "";
  }
  return "GPU " + std::to_string(device) + " (" + prop.name + ") has compute capability " +
         std::to_string(prop.major) + "." + std::to_string(prop.minor) +
         "; this build has code for 9.0 (Hopper) only";
}

void require_hopper(const std::vector<int>& devices) {
  for (const int device : devices) {
    const std::string reason = why_not(device);
    if (!reason.empty()) throw Error(ErrorCode::unsupported, reason);
  }
}

void open_peers(const std::vector<int>& devices) {
  for (const int a : devices) {
    for (const int b : devices) {
      if (a == b) continue;
      int can = 0;
      check(cudaDeviceCanAccessPeer(&can, a, b), "peer access query");
      if (!can) {
        throw Error(ErrorCode::unsupported, "GPU " + std::to_string(a) +
                                                " cannot reach the memory of GPU " +
                                                std::to_string(b) + " (no NVLink between them)");
      }
      const DeviceGuard guard(a);
      const cudaError_t error = cudaDeviceEnablePeerAccess(b, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        check(error, "peer access from GPU " + std::to_string(a) + " to " + std::to_string(b));
      }
    }
  }
}

int sm_count(int device) {
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "SM count");
  return sms;
}

}  // namespace mok::cuda
