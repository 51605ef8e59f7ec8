// Forward in one launch: schedule, fetch, both products, push, reduce.
//
//   block of 384 threads, one per SM
//     all            schedule tickets (schedule.cuh) until the rank's plan is complete
//     warpgroup 0    load | schedule | publish | communicate     (gemm_tile.cuh, communicate.cuh)
//     warpgroups 1,2 multiply and store tiles                    (gemm_tile.cuh, epilogue.cuh)
//     warpgroups 1,2 reduce tickets, when no tile is left (reduce.cuh)
//     last block     zeroes counters and tickets for the next call
//
// Blocks of one launch are divided among the ranks that live on the GPU. Nothing waits for a
// block: every wait is for tasks that stand earlier in the plan's order.
#pragma once

#include "cuda/communicate.cuh"
#include "cuda/gemm_tile.cuh"
#include "cuda/reduce.cuh"
#include "cuda/schedule.cuh"

namespace mok::cuda {

enum ForwardProduct : int16_t { kRoutedGateUp, kRoutedDown, kSharedGateUp, kSharedDown };
inline constexpr int kForwardProducts = 4;

template <int kRanks>
struct ForwardParams {
  int32_t ranks_here;  // 1 .. kRanks
  RankState rank[kRanks];
  Products<kForwardProducts> products[kRanks];
};

// From the plan's tasks to the tile core's.
struct ForwardHooks {
  const RankState& rank;
  const plan::Plan& plan;
  const Waiter& waiter;
  int32_t* first_reduce;  // shared memory: the reduce ticket that this block drew

  static constexpr int32_t kNoCounter = -1;

  __device__ int32_t entry(plan::Counter c, int index) const {
    return rank.counter_first[static_cast<int>(c)] + index;
  }
  __device__ uint32_t* at(int32_t entry) const {
    return rank.at<uint32_t>(plan::Buffer::counters) + entry;
  }

  static __device__ int plan_kind(const TileTask& task) {
    const bool shared = task.product >= kSharedGateUp;
    return static_cast<int>(
        task.kind == TaskKind::gate_up
            ? (shared ? plan::TaskKind::shared_gate_up : plan::TaskKind::gate_up)
            : (shared ? plan::TaskKind::shared_down : plan::TaskKind::down));
  }

  __device__ bool next_task(TileTask& out) {
    const plan::Geometry& g = plan.g;
    while (true) {
      int32_t ticket = 0;
      if (threadIdx.x % kWarp == 0) {
        ticket = static_cast<int32_t>(atomicAdd(&rank.tickets->compute, 1));
      }
      ticket = __shfl_sync(~0u, ticket, 0);
      if (waiter.abort->raised != 0 || ticket >= plan::tickets(plan, plan::Queue::compute)) {
        return false;
      }
      const plan::Task task = plan::decode(plan, plan::Queue::compute, ticket);
      switch (task.kind) {
        case plan::TaskKind::reduce:
          if (threadIdx.x % kWarp == 0) *first_reduce = ticket;
          return false;
        case plan::TaskKind::sigma:
          continue;  // part of reduce here
        case plan::TaskKind::announce_returned:
          announce(task);
          continue;
        default:
          break;
      }
      const bool shared =
          task.kind == plan::TaskKind::shared_gate_up || task.kind == plan::TaskKind::shared_down;
      const bool gate_up =
          task.kind == plan::TaskKind::gate_up || task.kind == plan::TaskKind::shared_gate_up;
      const int inter = shared ? g.shared_intermediate : g.intermediate;
      const int row = task.tile * plan::kTileRows;
      const int width = gate_up ? inter : g.hidden;
      const int tile_width = gate_up ? plan::kTileInter : plan::kTileHidden;
      out.kind = gate_up ? TaskKind::gate_up : TaskKind::down;
      out.product = static_cast<int16_t>(shared ? (gate_up ? kSharedGateUp : kSharedDown)
                                                : (gate_up ? kRoutedGateUp : kRoutedDown));
      out.steps = (gate_up ? g.hidden : inter) / kTileK;
      out.rows = shared ? min(g.own_tokens() - row, plan::kTileRows) : plan.s.tile[task.tile].rows;
      out.col0 = task.column * tile_width;
      out.cols = min(width - out.col0, tile_width);
      out.row0 = shared ? row : plan::ring_row(plan, row);
      out.save_row0 = row;
      const bool kept = shared ? g.keep_shared : plan::is_saved(plan, task.tile);
      out.save_rows = gate_up && kept ? out.rows : 0;
      out.expert = shared ? 0 : plan.s.tile[task.tile].expert;
      out.wait_counter = kNoCounter;
      plan::for_each_wait(plan, task, [&](plan::Wait w) {
        out.wait_counter = entry(w.counter, w.index);
        out.wait_target = w.target;
      });
      // Mostly the inputs are there by now: then the loads need not look again.
      if (threadIdx.x % kWarp == 0 && out.wait_counter != kNoCounter &&
          ptx::load_acquire_gpu(at(out.wait_counter)) >= static_cast<uint32_t>(out.wait_target)) {
        out.wait_counter = kNoCounter;
      }
      plan::for_each_signal(plan, task, [&](plan::Counter c, int index) {
        if (c != plan::Counter::window_done) out.done_counter = entry(c, index);
      });
      return true;
    }
  }

  __device__ void announce(const plan::Task& task) {
    if (threadIdx.x % kWarp == 0) {
      bool go = true;
      plan::for_each_wait(plan, task,
                          [&](plan::Wait w) { go = waiter.wait(w, static_cast<int>(task.kind)); });
      if (go) waiter.raise(plan::Counter::returned_flag);
      stamp(rank, Stamps::returned);
    }
    __syncwarp();
  }

  __device__ void wait_ready(const TileTask& task) {
    if (task.wait_counter != kNoCounter) {
      waiter.counter(task.wait_counter, task.wait_target, plan_kind(task));
    }
    ptx::fence_proxy_async();
  }

  __device__ void publish(const TileTask& task) {
    // The red releases the tile's stores to this GPU; rows may have gone to others.
    if (task.kind == TaskKind::down && rank.g.ranks > 1) ptx::fence_system();
    ptx::add_release_gpu(at(task.done_counter), 1);
    if (plan.s.windows <= 2 || task.product >= kSharedGateUp) return;
    const int tile = task.save_row0 / plan::kTileRows;
    ptx::add_release_gpu(at(entry(plan::Counter::window_done, plan::window_of_tile(plan, tile))),
                         1);
  }
};

// Phases that are kept in shared memory when they fit; a longer queue is read from where it is.
inline constexpr int kPhasesAtHand = 64;

struct ForwardShared {
  union {
    TileShared tile;
    ScheduleShared schedule;
  };
  ReduceShared reduce;
  CommShared comm;
  plan::Plan plan;
  plan::Phase compute[kPhasesAtHand], communication[kPhasesAtHand];
  AbortFlag abort;  // outlives the phases
  int64_t call;
  int32_t first_reduce;
  uint32_t left;
  __device__ ForwardShared() {}
};

// The block that leaves last makes the rank ready for its next call.
__device__ inline void leave(const RankState& rank, int blocks, int64_t call, uint32_t* left) {
  __syncthreads();
  if (threadIdx.x == 0) {
    stamp(rank, Stamps::end);
    ptx::fence_gpu();
    *left = atomicAdd(&rank.tickets->left, 1);
    ptx::fence_gpu();
  }
  __syncthreads();
  if (*left != static_cast<uint32_t>(blocks) - 1) return;
  const int32_t counters = plan::local_counters(rank.g);
  for (int i = threadIdx.x; i < counters; i += kThreads) {
    rank.at<uint32_t>(plan::Buffer::counters)[i] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    record_abort(rank);
    *rank.tickets = Tickets{};
    *rank.call = call;
  }
}

// Which rank a block works for, and how many do.
template <int kRanks>
struct Share {
  int which = 0, block = blockIdx.x, blocks = gridDim.x;
  __device__ explicit Share(const ForwardParams<kRanks>& params) {
    if constexpr (kRanks > 1) {
      const int here = params.ranks_here;
      which = blockIdx.x % here;
      block = blockIdx.x / here;
      blocks = (gridDim.x - which + here - 1) / here;
    }
  }
};

// All threads.
__device__ __forceinline__ void bring_phases(const plan::Phase* from, int phases,
                                             plan::Phase (&to)[kPhasesAtHand]) {
  if (phases >= kPhasesAtHand) return;
  const auto* words = reinterpret_cast<const volatile uint32_t*>(from);
  constexpr int kWords = sizeof(plan::Phase) / 4;
  for (int i = threadIdx.x; i < (phases + 1) * kWords; i += kThreads) {
    reinterpret_cast<uint32_t*>(to)[i] = words[i];
  }
}

template <int kRanks>
__device__ __forceinline__ bool prepare(const ForwardParams<kRanks>& params,
                                        ForwardShared& shared) {
  const RankState& rank = params.rank[Share<kRanks>(params).which];
  if (threadIdx.x == 0) {
    shared.abort.raised = 0;
    shared.first_reduce = -1;
    shared.call = *const_cast<volatile int64_t*>(rank.call) + 1;
  }
  __syncthreads();
  const Waiter waiter{rank, &shared.abort, shared.call};
  if (threadIdx.x == 0) stamp(rank, Stamps::begin);
  if (!ScheduleBuilder(rank, waiter, shared.schedule).run()) return false;
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
    if (shared.plan.compute_phases < kPhasesAtHand) shared.plan.compute = shared.compute;
    if (shared.plan.communication_phases < kPhasesAtHand) {
      shared.plan.communication = shared.communication;
    }
    shared.tile.init();
    shared.comm.init();
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  return true;
}

template <int kRanks>
__device__ __forceinline__ void produce(const ForwardParams<kRanks>& params,
                                        ForwardShared& shared) {
  const Share<kRanks> share(params);
  const RankState& rank = params.rank[share.which];
  const Waiter waiter{rank, &shared.tile.abort, shared.call};
  ForwardHooks hooks{rank, shared.plan, waiter, &shared.first_reduce};
  const uint32_t lane = threadIdx.x % kWarp;
  switch (static_cast<ProducerWarp>(__shfl_sync(~0u, threadIdx.x / kWarp, 0))) {
    case ProducerWarp::load:
      if (lane == 0) load_tiles(shared.tile, params.products[share.which], hooks);
      break;
    case ProducerWarp::schedule:
      schedule_tasks(shared.tile, hooks);
      break;
    case ProducerWarp::publish:
      if (lane == 0) publish_tiles(shared.tile, hooks);
      break;
    case ProducerWarp::communicate:
      if (share.block < rank.comm_blocks) {
        CommunicationWarp(rank, shared.plan, waiter, shared.comm).run();
      }
      break;
  }
  __syncwarp();
}

template <int kRanks>
__device__ __forceinline__ void reduce(const ForwardParams<kRanks>& params, ForwardShared& shared) {
  const RankState& rank = params.rank[Share<kRanks>(params).which];
  const Waiter waiter{rank, &shared.tile.abort, shared.call};
  Reducer(rank, shared.plan, waiter, shared.reduce).run(shared.first_reduce);
}

// Nothing but the shared memory is carried from one part to the next: the consumers have no
// register to spare.
template <int kRanks>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams<kRanks> params) {
  extern __shared__ uint8_t raw[];
  ForwardShared& shared = *reinterpret_cast<ForwardShared*>(raw);
  if (prepare(params, shared)) {
    if (threadIdx.x < kWarpgroup) {
      ptx::lower_registers<kProducerRegisters>();
      produce(params, shared);
    } else {
      ptx::raise_registers<kConsumerRegisters>();
      const uint32_t group = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
      TileConsumer<kForwardProducts>(shared.tile, params.products[Share<kRanks>(params).which],
                                     group)
          .run();
      reduce(params, shared);
    }
  }
  const Share<kRanks> share(params);
  leave(params.rank[share.which], share.blocks, shared.call, &shared.left);
}

}  // namespace mok::cuda
