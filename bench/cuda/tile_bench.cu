// The tile core alone: both products of a MoE layer in one launch, from a task list made by
// tile_bench.py, which loads this file as a shared library, checks it and times it.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm_tile.cuh"
#include "cuda/tensor_map.h"

namespace {

using namespace mok::cuda;

constexpr int kProducts = 2;

struct Control {
  uint32_t ticket;
  uint32_t aborted;
  unsigned long long cycles;  // of the slowest block
};

// Tickets index a list; down tiles wait until all gate-up tiles of their rows are counted in.
struct ListHooks {
  const TileTask* tasks;
  uint32_t count;
  Control* control;
  uint32_t* counters;
  const AbortFlag* abort;

  __device__ bool next_task(TileTask& task) {
    uint32_t ticket = 0;
    if (threadIdx.x % kWarp == 0) ticket = atomicAdd(&control->ticket, 1);
    ticket = __shfl_sync(~0u, ticket, 0);
    if (ticket >= count || abort->raised != 0) return false;
    task = tasks[ticket];
    return true;
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

__global__ void __launch_bounds__(kThreads, 1)
    tile_kernel(const __grid_constant__ Products<kProducts> products,
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
        if (lane == 0) load_tiles(shared.tile, products, hooks);
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
    TileConsumer<kProducts>(shared.tile, products, group - 1).run();
  }
}

}  // namespace

extern "C" {

struct TileBench {
  const void *x, *w_gate, *w_up, *w_down;
  void *hidden, *gate, *up;
  const void *row_destination, *tasks;
  void *control, *counters;  // Control; one uint32 a tile of rows, then one more
  int64_t rows, experts, hidden_size, intermediate, gate_expert_stride, task_count, counter_count;
  float limit;
  int32_t blocks;
};

// 0, or a CUDA error, or -1 if a tensor map could not be made.
int tile_bench_launch(const TileBench* b, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  Products<kProducts> p{};
  p.swiglu_limit = b->limit;
  const int64_t h = b->hidden_size, i = b->intermediate;
  const BoxedTensor x{b->x, 2, h, b->rows, 1, h, 0, 64};
  const BoxedTensor gate{b->w_gate, 3, h, i, b->experts, h, b->gate_expert_stride, 64};
  BoxedTensor up = gate;
  up.data = b->w_up;
  const BoxedTensor hidden{b->hidden, 2, i, b->rows, 1, i, 0, 64};
  const BoxedTensor down{b->w_down, 3, i, h, b->experts, i, h * i, 64};
  Product& gu = p.product[0];
  Product& d = p.product[1];
  if (!encode_tensor_map(&gu.a, x) || !encode_tensor_map(&gu.b_low, gate) ||
      !encode_tensor_map(&gu.b_high, up) || !encode_tensor_map(&d.a, hidden) ||
      !encode_tensor_map(&d.b_low, down) || !encode_tensor_map(&d.b_high, down)) {
    return -1;
  }
  gu.hidden = static_cast<__nv_bfloat16*>(b->hidden);
  gu.gate = static_cast<__nv_bfloat16*>(b->gate);
  gu.up = static_cast<__nv_bfloat16*>(b->up);
  gu.row_elements = i;
  d.row_destination = static_cast<const uint64_t*>(b->row_destination);

  const ListHooks list{static_cast<const TileTask*>(b->tasks), uint32_t(b->task_count),
                       static_cast<Control*>(b->control), static_cast<uint32_t*>(b->counters),
                       nullptr};
  cudaMemsetAsync(b->control, 0, sizeof(Control), stream);
  cudaMemsetAsync(b->counters, 0, sizeof(uint32_t) * b->counter_count, stream);
  cudaError_t error = cudaFuncSetAttribute(tile_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           sizeof(BenchShared));
  if (error != cudaSuccess) return error;
  tile_kernel<<<b->blocks, kThreads, sizeof(BenchShared), stream>>>(p, list, 2'000'000'000);
  return cudaGetLastError();
}

int tile_bench_task_size() { return sizeof(TileTask); }
int tile_bench_shared_size() { return sizeof(TileShared); }
}
