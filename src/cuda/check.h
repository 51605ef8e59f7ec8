// CUDA errors as mok::Error.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "mok/error.h"

namespace mok::cuda {

inline void check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call starts clean
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::internal,
              what + ": " + cudaGetErrorString(error));
}
// No text is made while all is well.
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) check(error, std::string(what));
}

// Makes `device` current and puts the former one back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check(cudaGetDevice(&former_), "current device");
    if (former_ != device) check(cudaSetDevice(device), "device " + std::to_string(device));
  }
  ~DeviceGuard() {
    if (former_ != device_) cudaSetDevice(former_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, former_ = 0;
};

}  // namespace mok::cuda
