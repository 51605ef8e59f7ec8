#include "support/foreign_kernel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/check.h"

namespace mok::testing {

namespace {

constexpr int kMostBlocks = 1024;
constexpr int kThreads = 256;
constexpr int kWholeSm = 227 * 1024;

}  // namespace

struct ForeignKernel::Shared {
  uint32_t stop;
  uint32_t running[kMostBlocks];  // of each block, 1 while it runs
};

namespace {

__global__ void __launch_bounds__(kThreads)
    hold(volatile uint32_t* stop, volatile uint32_t* running, uint4* traffic, int64_t pieces,
         uint64_t nanoseconds) {
  const auto now = [] {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
  };
  const uint64_t begin = now();
  __shared__ uint32_t leave;
  if (threadIdx.x == 0) running[blockIdx.x] = 1;
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) leave = *stop != 0 || now() - begin > nanoseconds;
    __syncthreads();
    if (leave) break;
    if (pieces == 0) {
      __nanosleep(2000);
      continue;
    }
    for (int n = 0; n < 64; ++n) {
      uint4 v = traffic[i];
      v.x += 1;
      traffic[i] = v;
      i += int64_t{gridDim.x} * kThreads;
      if (i >= pieces) i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    }
  }
  if (threadIdx.x == 0) running[blockIdx.x] = 0;
}

}  // namespace

ForeignKernel::Load ForeignKernel::all_but(int device, int free_sms) {
  int sms = 0;
  cuda::check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "SM count");
  Load load;
  load.blocks = sms - free_sms;
  return load;
}

ForeignKernel::ForeignKernel(int device, const Load& load) : device_(device), blocks_(load.blocks) {
  const cuda::DeviceGuard guard(device);
  cuda::check(cudaHostAlloc(reinterpret_cast<void**>(&shared_), sizeof(Shared),
                            cudaHostAllocMapped | cudaHostAllocPortable),
              "foreign kernel");
  std::memset(shared_, 0, sizeof(Shared));
  int64_t pieces = load.traffic_bytes / static_cast<int64_t>(sizeof(uint4));
  if (pieces > 0) {
    pieces = std::max<int64_t>(pieces, int64_t{blocks_} * kThreads);
    cuda::check(cudaMalloc(reinterpret_cast<void**>(&traffic_), pieces * sizeof(uint4)), "traffic");
  }
  cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "foreign stream");
  constexpr int kBytes = kWholeSm - 64;  // the kernel has a few of its own
  cuda::check(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
              "foreign kernel");
  hold<<<blocks_, kThreads, kBytes, stream_>>>(&shared_->stop, shared_->running, traffic_, pieces,
                                               static_cast<uint64_t>(load.seconds * 1e9));
  cuda::check(cudaGetLastError(), "foreign kernel");
}

ForeignKernel::~ForeignKernel() {
  const_cast<volatile uint32_t&>(shared_->stop) = 1;
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
  cudaFree(traffic_);
  cudaFreeHost(shared_);
}

bool ForeignKernel::is_resident(double seconds) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  do {
    int running = 0;
    for (int b = 0; b < blocks_; ++b) {
      running += *const_cast<volatile uint32_t*>(&shared_->running[b]) != 0;
    }
    if (running == blocks_) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void ForeignKernel::stop() {
  const_cast<volatile uint32_t&>(shared_->stop) = 1;
  cuda::check(cudaStreamSynchronize(stream_), "foreign kernel");
}

bool ForeignKernel::is_running() const {
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state == cudaErrorNotReady) return true;
  cuda::check(state, "foreign kernel");
  return false;
}

}  // namespace mok::testing
