// The tile core alone: both products of a MoE layer in one launch, from a task list made by
// tile_bench.py, which loads this file as a shared library, checks it and times it.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/gemm_tile.cuh"
#include "cuda/tensor_map.h"

namespace {

using namespace mok::cuda;

constexpr int kMaps = 8, kProducts = 4;
using BenchProducts = Products<kMaps, kProducts>;

struct Control {
  uint32_t ticket;
  uint32_t aborted;
  unsigned long long cycles;  // of the slowest block
};

// Tickets index a list; a task may wait for a counter, as down tiles do for the gate-up tiles of
// their rows.
struct ListHooks {
  const TileTask* tasks;
  uint32_t count;
  Control* control;
  uint32_t* counters;
  const AbortFlag* abort;

  __device__ bool draws_early() const { return false; }
  __device__ void draw() const {}  // next_task does

  __device__ Drawn next_task(TileTask& task) {
    uint32_t ticket = 0;
    if (threadIdx.x % kWarp == 0) ticket = atomicAdd(&control->ticket, 1);
    ticket = __shfl_sync(~0u, ticket, 0);
    if (ticket >= count || abort->raised != 0) return Drawn::nothing;
    task = tasks[ticket];  // by all lanes alike
    return Drawn::tile;
  }
  __device__ void wait_ready(const TileTask& task) {
    if (task.wait_target != 0) {
      while (ptx::load_acquire_gpu(counters + task.wait_counter) < task.wait_target) {
        if (abort->raised != 0) break;
      }
    }
    ptx::fence_proxy_async();
  }
  __device__ void publish(const TileTask& task) {
    ptx::add_release_gpu(counters + task.done_counter, 1);
  }
};

struct BenchShared {
  TileShared tile;
  ptx::Mbarrier done;
};

// Looks at the clock for the whole block and raises its abort flag.
__device__ void watch(BenchShared& shared, Control* control, uint64_t limit_ns) {
  const uint64_t start = ptx::global_timer();
  const long long cycles = clock64();
  while (!shared.done.try_wait(0)) {
    if (ptx::global_timer() - start > limit_ns) control->aborted = 1;
    if (*reinterpret_cast<volatile uint32_t*>(&control->aborted) != 0) {
      shared.tile.abort.raised = 1;
      return;
    }
  }
  atomicMax(&control->cycles, static_cast<unsigned long long>(clock64() - cycles));
}

template <bool kBackward>
__global__ void __launch_bounds__(kThreads, 1)
    tile_kernel(const __grid_constant__ BenchProducts products,
                const __grid_constant__ ListHooks list, uint64_t limit_ns) {
  extern __shared__ uint8_t raw[];
  BenchShared& shared = *reinterpret_cast<BenchShared*>(raw);
  if (threadIdx.x == 0) {
    shared.tile.init();
    shared.done.init(1);
  }
  __syncthreads();

  const uint32_t group = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (group == 0) {
    ptx::lower_registers<kProducerRegisters>();
    ListHooks hooks = list;
    hooks.abort = &shared.tile.abort;
    const uint32_t lane = threadIdx.x % kWarp;
    switch (static_cast<ProducerWarp>(__shfl_sync(~0u, threadIdx.x / kWarp, 0))) {
      case ProducerWarp::load:
        if (lane == 0) TileLoader(shared.tile, products, hooks).template run<kBackward>();
        break;
      case ProducerWarp::schedule:
        schedule_tasks(shared.tile, hooks);
        break;
      case ProducerWarp::publish:
        if (lane == 0) {
          publish_tiles(shared.tile, hooks);
          shared.done.arrive();
        }
        break;
      case ProducerWarp::communicate:
        if (lane == 0) watch(shared, list.control, limit_ns);
        break;
    }
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    TileConsumer<kBackward, BenchProducts>(shared.tile, products, group - 1).run();
  }
}

}  // namespace

extern "C" {

struct BenchTensor {  // bf16 [experts, rows, columns]
  const void* data;
  int64_t columns, rows, experts, row_stride, expert_stride;
};

struct TileBench {
  const BenchTensor* tensors;  // the maps
  const Product* products;
  const void* tasks;         // device
  void *control, *counters;  // Control; one uint32 a counter
  int64_t tensor_count, product_count, task_count, counter_count;
  float limit;
  int32_t blocks, backward;
};

// 0, or a CUDA error, or -1 if a tensor map could not be made.
int tile_bench_launch(const TileBench* b, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  BenchProducts p;
  p.swiglu_limit = b->limit;
  for (int64_t i = 0; i < b->tensor_count; ++i) {
    const BenchTensor& t = b->tensors[i];
    if (!encode_tensor_map(&p.map[i], {t.data, 3, t.columns, t.rows, t.experts, t.row_stride,
                                       t.expert_stride, 64})) {
      return -1;
    }
  }
  std::copy(b->products, b->products + b->product_count, p.product);
  const ListHooks list{static_cast<const TileTask*>(b->tasks), uint32_t(b->task_count),
                       static_cast<Control*>(b->control), static_cast<uint32_t*>(b->counters),
                       nullptr};
  cudaMemsetAsync(b->control, 0, sizeof(Control), stream);
  cudaMemsetAsync(b->counters, 0, sizeof(uint32_t) * b->counter_count, stream);
  const auto kernel = b->backward ? tile_kernel<true> : tile_kernel<false>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           sizeof(BenchShared));
  if (error != cudaSuccess) return error;
  kernel<<<b->blocks, kThreads, sizeof(BenchShared), stream>>>(p, list, 2'000'000'000);
  return cudaGetLastError();
}

int tile_bench_product_size() { return sizeof(Product); }
int tile_bench_task_size() { return sizeof(TileTask); }
int tile_bench_shared_size() { return sizeof(TileShared); }
}
