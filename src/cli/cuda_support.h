// What the CUDA executor of this build can do here. Without CUDA every answer is a reason why not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/spec.h"

namespace mok::cli {

int gpu_count();
std::string why_no_gpu();  // empty: at least one GPU can run the layer

// What the CUDA executor does not do, naming the option; empty when it can run this.
std::string cuda_refuses(const Spec& spec);

struct Gpu {
  std::string name;
  int major = 0, minor = 0;
  int sms = 0;
  int64_t memory_bytes = 0;
  std::string why_not;        // empty: can run the layer
  std::vector<bool> reaches;  // GPU i's memory
};
std::vector<Gpu> list_gpus();
std::string cuda_versions();  // of the runtime and the driver

}  // namespace mok::cli
