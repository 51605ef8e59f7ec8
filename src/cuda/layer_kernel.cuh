// A direction of the layer in one launch.
//
//   block of 384 threads, one per SM
//     all            schedule tickets (schedule.cuh) until the rank's plan is complete
//     warpgroup 0    load | schedule | publish | communicate     (gemm_tile.cuh, communicate.cuh)
//     warpgroups 1,2 multiply and store tiles                    (gemm_tile.cuh, epilogue.cuh)
//                    reduce tickets between them                 (reduce.cuh)
//     last block     zeroes counters and tickets for the next call
//
// Blocks of one launch are divided among the ranks that live on the GPU. Nothing waits for a
// block: every wait is for tasks that stand earlier in the plan's order.
#pragma once

#include "cuda/communicate.cuh"
#include "cuda/gemm_tile.cuh"
#include "cuda/products.h"
#include "cuda/reduce.cuh"
#include "cuda/schedule.cuh"

namespace mok::cuda {

// A direction: kBackward, Tensors<ranks of the launch> (its Products) and Hooks (from the plan's
// tasks to the tile core's: forward_hooks.cuh, backward_hooks.cuh).
template <class Direction, int kRanks>
struct LayerParams {
  int32_t ranks_here;  // 1 .. kRanks
  RankState rank[kRanks];
  typename Direction::template Tensors<kRanks> tensors[kRanks];
};

// Phases are kept in shared memory when they fit; a longer queue is read from where it is.
template <class Direction>
struct LayerShared {
  static constexpr bool kBackward = Direction::kBackward;
  static constexpr int kComputePhases = kBackward ? 160 : 64;
  static constexpr int kCommunicationPhases = 64;
  union {
    TileShared tile;
    ScheduleShared schedule;
  };
  typename CommunicationWarp<Direction::kBackward, Direction::kFp8>::Shared comm;
  plan::Plan plan;
  plan::Phase compute[kComputePhases], communication[kCommunicationPhases];
  AbortFlag abort;  // outlives the phases
  int64_t call;
  uint32_t left;
  typename Direction::Shared hooks;
  __device__ LayerShared() {}
};

// What the hooks of both directions share.
struct HooksBase {
  const RankState& rank;
  const plan::Plan& plan;
  const Waiter& waiter;

  static constexpr int32_t kNoCounter = -1;

  // Of a contraction over n elements.
  static __device__ int steps_of(int n, bool fp8) {
    return fp8 ? plan::ceil_div(n, 2 * kTileK) : n / kTileK;
  }

  __device__ int32_t entry(plan::Counter c, int index) const {
    return rank.counter_first[static_cast<int>(c)] + index;
  }
  __device__ uint32_t* at(int32_t entry) const {
    return rank.at<uint32_t>(plan::Buffer::counters) + entry;
  }
  __device__ bool leads() const { return threadIdx.x % kWarp == 0; }

  // Whole warp. Draws a task; false when there is none.
  __device__ bool draw_task(plan::Task* task) const {
    int32_t ticket = 0;
    if (leads()) ticket = static_cast<int32_t>(atomicAdd(&rank.tickets->compute, 1));
    ticket = __shfl_sync(~0u, ticket, 0);
    if (waiter.abort->raised != 0 || ticket >= plan::tickets(plan, plan::Queue::compute)) {
      return false;
    }
    *task = plan::decode(plan, plan::Queue::compute, ticket);
    return true;
  }

  // A tall tile's rows beyond the first kTileM, those of the next tile; 0: the tile stands alone.
  __device__ int tail_of(int tile) const {
    if (rank.tail_rows == 0) return 0;
    const plan::Tile& t = plan.s.tile[tile];
    if (tile + 1 >= t.slice_begin + t.slice_tiles) return 0;
    const int rows = plan.s.tile[tile + 1].rows;
    return rows <= rank.tail_rows ? rows : 0;
  }
  // Whether the tile is computed with the one before it.
  __device__ bool has_joined(int tile) const {
    if (rank.tail_rows == 0) return false;
    const plan::Tile& t = plan.s.tile[tile];
    return t.rows <= rank.tail_rows && tile > t.slice_begin;
  }

  // What the rows of the next tile wait for, behind what those of `task` do; 0: there are none.
  __device__ int32_t tail_target(const plan::Task& task, int tail) const {
    int32_t target = 0;
    if (tail == 0) return target;
    plan::Task next = task;
    ++next.tile;
    plan::for_each_wait(plan, next, [&](plan::Wait w) { target = w.target; });
    return target;
  }

  // Waited for by the scheduler's warp.
  __device__ void fill_reduce(const plan::Task& task, TileTask& out) const {
    out.kind = TaskKind::reduce;
    out.product = 0;
    out.steps = 0;
    out.row0 = task.begin;
    out.rows = task.end - task.begin;
    out.wait_counter = kNoCounter;
    out.tail_target = 0;
  }

  // Whole warp. What the plan states, waited for by one thread.
  __device__ bool wait_for(const plan::Task& task) const {
    bool go = true;
    if (leads()) {
      plan::for_each_wait(plan, task, [&](plan::Wait w) {
        if (go) go = waiter.wait(w, static_cast<int>(task.kind));
      });
    }
    return __shfl_sync(~0u, go, 0);
  }
  // One thread.
  __device__ void signal(const plan::Task& task) const {
    plan::for_each_signal(plan, task, [&](plan::Counter c, int index) {
      ptx::add_release_gpu(at(entry(c, index)), 1);
    });
  }

  // What it waits for has come.
  __device__ void announce() const {
    if (leads()) {
      waiter.raise(plan::Counter::returned_flag);
      stamp(rank, Stamps::returned);
    }
    __syncwarp();
  }

  // The counter that the loads of a tile task wait for; by one thread. Mostly the inputs are there
  // by now: then they need not look again, nor pay for a fence, which waits for the stores of the
  // whole SM.
  __device__ void set_wait(TileTask& out, plan::Wait w) const {
    out.wait_counter = entry(w.counter, w.index);
    out.wait_target = w.target;
    if (ptx::load_acquire_gpu(at(out.wait_counter)) >= static_cast<uint32_t>(w.target) &&
        (out.tail_target == 0 || ptx::load_acquire_gpu(at(out.wait_counter + 1)) >=
                                     static_cast<uint32_t>(out.tail_target))) {
      out.wait_counter = kNoCounter;
      ptx::fence_proxy_async_global();  // for the loads, which come after this thread's arrival
    }
  }

  __device__ void wait_ready(const TileTask& task, plan::TaskKind kind) const {
    if (task.wait_counter == kNoCounter) return;
    waiter.counter(task.wait_counter, task.wait_target, static_cast<int>(kind));
    if (task.tail_target > 0) {
      waiter.counter(task.wait_counter + 1, task.tail_target, static_cast<int>(kind));
    }
    ptx::fence_proxy_async_global();
  }
};

// The block that leaves last makes the rank ready for its next call.
__device__ inline void leave(const RankState& rank, int blocks, int64_t call, uint32_t* left) {
  const uint32_t thread = fresh_thread();
  __syncthreads();
  if (thread == 0) {
    stamp(rank, Stamps::end);
    ptx::fence_gpu();
    *left = atomicAdd(&rank.tickets->left, 1);
    ptx::fence_gpu();
  }
  __syncthreads();
  if (*left != static_cast<uint32_t>(blocks) - 1) return;
  const int32_t counters = plan::local_counters(rank.g);
  for (int i = static_cast<int>(thread); i < counters; i += kThreads) {
    rank.at<uint32_t>(plan::Buffer::counters)[i] = 0;
  }
  __syncthreads();
  if (thread == 0) {
    record_abort(rank);
    *rank.tickets = Tickets{};
    *rank.call = call;
  }
}

// Which rank a block works for, and how many do.
template <int kRanks>
struct Share {
  int which = 0, block = blockIdx.x, blocks = gridDim.x;
  __device__ explicit Share(int ranks_here) {
    if constexpr (kRanks > 1) {
      which = blockIdx.x % ranks_here;
      block = blockIdx.x / ranks_here;
      blocks = (gridDim.x - which + ranks_here - 1) / ranks_here;
    }
  }
};

// All threads.
template <int kRoom>
__device__ __forceinline__ void bring_phases(const plan::Phase* from, int phases,
                                             plan::Phase (&to)[kRoom]) {
  if (phases >= kRoom) return;
  const auto* words = reinterpret_cast<const volatile uint32_t*>(from);
  constexpr int kWords = sizeof(plan::Phase) / 4;
  for (int i = threadIdx.x; i < (phases + 1) * kWords; i += kThreads) {
    reinterpret_cast<uint32_t*>(to)[i] = words[i];
  }
}

template <class Direction, int kRanks>
__device__ __forceinline__ bool prepare(const LayerParams<Direction, kRanks>& params,
                                        LayerShared<Direction>& shared) {
  const RankState& rank = params.rank[Share<kRanks>(params.ranks_here).which];
  if (threadIdx.x == 0) {
    shared.abort.raised = 0;
    shared.call = *const_cast<volatile int64_t*>(rank.call) + 1;
  }
  __syncthreads();
  const Waiter waiter{rank, &shared.abort, shared.call};
  if (threadIdx.x == 0) stamp(rank, Stamps::begin);
  if (!ScheduleBuilder<Direction::kBackward>(rank, waiter, shared.schedule).run()) return false;
  if (threadIdx.x == 0) stamp(rank, Stamps::planned);
  __syncthreads();
  const auto* from = reinterpret_cast<const volatile uint32_t*>(rank.tables.plan);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(plan::Plan) / 4); i += kThreads) {
    reinterpret_cast<uint32_t*>(&shared.plan)[i] = from[i];
  }
  __syncthreads();
  bring_phases(shared.plan.compute, shared.plan.compute_phases, shared.compute);
  bring_phases(shared.plan.communication, shared.plan.communication_phases, shared.communication);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (shared.plan.compute_phases < shared.kComputePhases) shared.plan.compute = shared.compute;
    if (shared.plan.communication_phases < shared.kCommunicationPhases) {
      shared.plan.communication = shared.communication;
    }
    shared.tile.init();
    shared.comm.init();
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  return true;
}

template <class Direction, int kRanks>
__device__ __forceinline__ void produce(const LayerParams<Direction, kRanks>& params,
                                        LayerShared<Direction>& shared) {
  const Share<kRanks> share(params.ranks_here);
  const RankState& rank = params.rank[share.which];
  const Waiter waiter{rank, &shared.tile.abort, shared.call};
  typename Direction::Hooks hooks({rank, shared.plan, waiter}, &shared.hooks);
  const uint32_t lane = threadIdx.x % kWarp;
  switch (static_cast<ProducerWarp>(__shfl_sync(~0u, threadIdx.x / kWarp, 0))) {
    case ProducerWarp::load:
      if (lane == 0) {
        TileLoader(shared.tile, params.tensors[share.which], hooks)
            .template run<Direction::kBackward>();
      }
      break;
    case ProducerWarp::schedule:
      schedule_tasks(shared.tile, hooks);
      break;
    case ProducerWarp::publish:
      if (lane == 0) publish_tiles(shared.tile, hooks);
      break;
    case ProducerWarp::communicate:
      if (share.block < rank.comm_blocks) {
        CommunicationWarp<Direction::kBackward, Direction::kFp8>(rank, shared.plan, waiter,
                                                                 shared.comm)
            .run();
      }
      break;
  }
  __syncwarp();
}

template <class Direction>
__device__ __forceinline__ LayerShared<Direction>& shared_memory() {
  extern __shared__ uint8_t raw[];
  return *reinterpret_cast<LayerShared<Direction>*>(raw);
}

// Nothing but the shared memory is carried from one part to the next: the consumers have no
// register to spare.
template <class Direction, int kRanks>
__global__ void __launch_bounds__(kThreads, 1)
    layer_kernel(const __grid_constant__ LayerParams<Direction, kRanks> params) {
  if (prepare(params, shared_memory<Direction>())) {
    if (threadIdx.x < kWarpgroup) {
      ptx::lower_registers<kProducerRegisters>();
      produce(params, shared_memory<Direction>());
    } else {
      ptx::raise_registers<kConsumerRegisters>();
      const uint32_t group = __shfl_sync(~0u, fresh_thread() / kWarpgroup - 1, 0);
      TileConsumer<Direction::kBackward, typename Direction::template Tensors<kRanks>>(
          shared_memory<Direction>().tile, params.tensors[Share<kRanks>(params.ranks_here).which],
          group)
          .run([&](const TileTask& task) {
            Reducer<Direction::kBackward>(params.rank[Share<kRanks>(params.ranks_here).which],
                                          shared_memory<Direction>().plan.g)
                .run(task);
          });
    }
  }
  auto& shared = shared_memory<Direction>();
  const Share<kRanks> share(params.ranks_here);
  leave(params.rank[share.which], share.blocks, shared.call, &shared.left);
}

}  // namespace mok::cuda
