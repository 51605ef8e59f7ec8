// A kernel of somebody else that runs beside the layer: holds SMs, and memory bandwidth if asked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mok::testing {

class ForeignKernel {
 public:
  struct Load {
    int blocks = 1;             // an SM each, which nobody else fits on
    int64_t traffic_bytes = 0;  // read and written over and over
    double seconds = 10;        // ends by itself after this long
  };
  static Load all_but(int device, int free_sms);

  // Launches on a stream of its own that waits for no other.
  ForeignKernel(int device, const Load& load);
  ~ForeignKernel();  // stops it and waits
  ForeignKernel(const ForeignKernel&) = delete;
  ForeignKernel& operator=(const ForeignKernel&) = delete;

  // True when all its blocks run at the same time; looks for up to `seconds`.
  bool is_resident(double seconds) const;
  void stop();  // tells it to end and waits until it has
  // True when it is still running: nobody told it to stop, and its time is not over.
  bool is_running() const;

 private:
  struct Shared;  // with the kernel, in mapped host memory
  int device_;
  int blocks_;
  Shared* shared_ = nullptr;
  uint4* traffic_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace mok::testing
