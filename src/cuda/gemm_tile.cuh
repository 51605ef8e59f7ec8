// The tile core of the forward megakernel: one block per SM, 384 threads, tasks until none is left.
//
//   warpgroup 0 (40 registers a thread)
//     load         waits for a task's inputs, then tensor loads into the stage ring
//     schedule     draws a ticket, decodes it, fills a task slot
//     publish      waits until a tile's stores are issued, makes them visible, counts the tile in
//     communicate  free for the caller
//   warpgroups 1, 2 (232 registers): 64 rows x 256 columns each; 128 accumulators a thread, and the
//     previous tile's 64 registers of bf16, stored piece by piece between the wgmma groups
//
//   shared memory                     written by   full             read by     empty
//     a[4] 16 KB, b[4] 32 KB          load (TMA)   full: bytes      consumers   empty: 8 warps
//     task[4]                         schedule     task_full        all         task_empty: publish
//     staging[8], row_destination[8]  a consumer warp, for itself
//   task_done: 8 consumer warps -> publish       draw: load -> schedule (draw the next ticket now)
//
// A pending epilogue may be what the next task's inputs wait for, here or in another block. So a
// consumer stores it at once unless the next tile's first stage is already full.
//
// Bits: an element's products are added in one chain, K ascending in steps of 16, whichever tile
// row, warpgroup or column width it falls in.
#pragma once

#include <utility>

#include "cuda/epilogue.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

// What the core needs from its caller.
//   bool next_task(TileTask& task)     whole schedule warp; lane 0's task counts; false = no more
//   void wait_ready(const TileTask&)   one thread, before the task's first load of A. Must end with
//                                      an acquire and fence_proxy_async, and return on abort
//   void publish(const TileTask&)      one thread, after all stores of the tile by all threads were
//                                      issued before it: release at the scope of the readers
template <class T>
concept TileHooks = requires(T hooks, TileTask& task, const TileTask& filled) {
  { hooks.next_task(task) } -> std::same_as<bool>;
  hooks.wait_ready(filled);
  hooks.publish(filled);
};

// The next ticket is drawn this many steps before the last load of a task: late, so that a block
// sits on no work that another could begin, but early enough to hide the draw and its decoding.
inline constexpr int kDrawLead = 4;

inline constexpr uint32_t kHalfBytesA = kHalfM * kTileK * 2;
inline constexpr uint32_t kGroupBytesB = kGroupN * kTileK * 2;

template <class Hooks>
__device__ __forceinline__ void schedule_tasks(TileShared& shared, Hooks& hooks) {
  RingCursor<kTaskSlots> at;
  for (uint32_t drawn = 0;; ++drawn) {
    if (!wait(shared.task_empty[at.slot], at.phase ^ 1, shared.abort)) return;
    if (drawn > 0 && !wait(shared.draw, (drawn - 1) & 1, shared.abort)) return;
    TileTask task;
    const bool more = hooks.next_task(task);
    if (!more) task.kind = TaskKind::stop;
    if (threadIdx.x % kWarp == 0) {
      shared.task[at.slot] = task;
      shared.task_full[at.slot].arrive();
    }
    __syncwarp();
    if (!more) return;
    at.advance();
  }
}

// One thread.
template <int kProducts, class Hooks>
__device__ __forceinline__ void load_tiles(TileShared& shared, const Products<kProducts>& products,
                                           Hooks& hooks) {
  RingCursor<kTaskSlots> task_at;
  RingCursor<kStages> stage;
  while (wait(shared.task_full[task_at.slot], task_at.phase, shared.abort)) {
    const TileTask task = shared.task[task_at.slot];
    if (task.kind == TaskKind::stop) return;
    const Product& product = products.product[task.product];
    const bool both_halves = task.rows > kHalfM;
    const int side = (task.narrow() ? kTileN / 4 : kTileN / 2) / kGroupN;  // loads from each map
    const int high_row =
        task.kind == TaskKind::gate_up ? task.col0 : task.col0 + side * kGroupN;
    const uint32_t bytes = (both_halves ? 2 : 1) * kHalfBytesA + 2 * side * kGroupBytesB;
    const int draw_at = task.steps > kDrawLead ? task.steps - kDrawLead : 0;

    hooks.wait_ready(task);
    for (int step = 0; step < task.steps; ++step) {
      if (step == draw_at) shared.draw.arrive();
      if (!wait(shared.empty[stage.slot], stage.phase ^ 1, shared.abort)) return;
      ptx::Mbarrier* full = &shared.full[stage.slot];
      uint8_t* a = shared.a[stage.slot];
      uint8_t* b = shared.b[stage.slot];
      full->arrive_expect(bytes);
      const int k = step * kTileK;
      ptx::load_tensor_2d(a, &product.a, full, k, task.row0);
      if (both_halves) {
        ptx::load_tensor_2d(a + kHalfBytesA, &product.a, full, k, task.row0 + kHalfM);
      }
      for (int i = 0; i < side; ++i, b += kGroupBytesB) {
        ptx::load_tensor_3d(b, &product.b_low, full, k, task.col0 + i * kGroupN, task.expert);
      }
      for (int i = 0; i < side; ++i, b += kGroupBytesB) {
        ptx::load_tensor_3d(b, &product.b_high, full, k, high_row + i * kGroupN, task.expert);
      }
      stage.advance();
    }
    task_at.advance();
  }
}

// One thread. Its release covers the consumers' stores: they came before their arrivals at
// task_done, and those before this thread's wait.
template <class Hooks>
__device__ __forceinline__ void publish_tiles(TileShared& shared, Hooks& hooks) {
  RingCursor<kTaskSlots> at;
  while (wait(shared.task_full[at.slot], at.phase, shared.abort)) {
    if (shared.task[at.slot].kind == TaskKind::stop) return;
    if (!wait(shared.task_done[at.slot], at.phase, shared.abort)) return;
    hooks.publish(shared.task[at.slot]);
    shared.task_empty[at.slot].arrive();
    at.advance();
  }
}

// One of the consumer warpgroups.
template <int kProducts>
class TileConsumer {
 public:
  __device__ __forceinline__ TileConsumer(TileShared& shared, const Products<kProducts>& products,
                                          uint32_t group)
      : shared_(shared),
        products_(products),
        group_(group),
        epilogue_(shared, group * (kWarpgroup / kWarp) + threadIdx.x % kWarpgroup / kWarp,
                  threadIdx.x % kWarp) {}

  __device__ __forceinline__ void run() {
    PackedTile packed;
    const TileTask* pending = nullptr;  // packed, not yet stored
    RingCursor<kTaskSlots> task_at;

    while (true) {
      const ptx::Mbarrier& task_full = shared_.task_full[task_at.slot];
      const TileTask& task = shared_.task[task_at.slot];
      if (pending != nullptr && !(look(task_full, task_at.phase) && can_start(task))) {
        store_all(packed, *pending);
        finish(*pending);
        pending = nullptr;
      }
      if (!wait(task_full, task_at.phase, shared_.abort)) return;
      if (task.kind == TaskKind::stop) return;

      if (is_idle(task)) {
        pass(task.steps);
        finish(task);
      } else {
        const int steps = __shfl_sync(~0u, task.steps, 0);
        const bool narrow = is_narrow(task);
        float acc[kTileN / 2];  // dead between tiles: nothing must carry it round the loop
        if (narrow) {
          multiply_narrow(acc, steps);
        } else {
          multiply_whole(acc, packed, steps, pending);
        }
        fetch_row_destinations(shared_, epilogue_, task, products_);
        ptx::wgmma_wait<0>();
        ptx::wgmma_settle(acc);
        release(previous_);
        packed.pack(acc);
        if (narrow && task.kind == TaskKind::gate_up) packed.move_up();
        pending = &task;
      }
      task_at.advance();
    }
  }

 private:
  // About the time of one piece; a longer look would only delay the flush.
  static constexpr int kLooks = 16;

  // Whether the tile needs none of this warpgroup's rows.
  __device__ __forceinline__ bool is_idle(const TileTask& task) const {
    return __shfl_sync(~0u, group_ * kHalfM >= task.rows, 0);
  }
  __device__ __forceinline__ bool is_narrow(const TileTask& task) const {
    return __shfl_sync(~0u, task.narrow(), 0);
  }
  // Whether a pending epilogue may be spread over the task. Warps may differ: which instructions
  // issue wgmma does not depend on it.
  __device__ __forceinline__ bool can_start(const TileTask& task) const {
    return task.kind != TaskKind::stop && !is_idle(task) && !is_narrow(task) &&
           look(shared_.full[stage_.slot], stage_.phase);
  }
  // One answer for the warp; every lane has acquired when it is true.
  __device__ __forceinline__ bool look(const ptx::Mbarrier& barrier, uint32_t parity) const {
    return __all_sync(~0u, poll<kLooks>(barrier, parity));
  }

  __device__ __forceinline__ void release(uint32_t slot) {
    if (epilogue_.lane == 0) shared_.empty[slot].arrive();
  }
  // This warp has issued all its stores of the task.
  __device__ __forceinline__ void finish(const TileTask& task) {
    __syncwarp();
    if (epilogue_.lane == 0) shared_.task_done[&task - shared_.task].arrive();
  }

  __device__ __forceinline__ void store_all(const PackedTile& packed, const TileTask& task) {
    [&]<int... kSlot>(std::integer_sequence<int, kSlot...>) {
      (run_slot<kSlot>(epilogue_, packed, task, products_), ...);
    }(std::make_integer_sequence<int, kEpilogueSlots>{});
  }

  __device__ __forceinline__ void pass(int steps) {
    for (int step = 0; step < steps; ++step) {
      wait(shared_.full[stage_.slot], stage_.phase, shared_.abort);
      release(stage_.slot);
      stage_.advance();
    }
  }

  __device__ __forceinline__ uint64_t a_descriptor() const {
    return ptx::wgmma_descriptor(ptx::shared_address(shared_.a[stage_.slot]) +
                                 group_ * kHalfBytesA);
  }
  __device__ __forceinline__ uint64_t b_descriptor() const {
    return ptx::wgmma_descriptor(ptx::shared_address(shared_.b[stage_.slot]));
  }

  // Issues one step and frees the stage of the step before.
  template <class Issue>
  __device__ __forceinline__ void one_step(int step, Issue&& issue) {
    wait(shared_.full[stage_.slot], stage_.phase, shared_.abort);
    ptx::wgmma_fence();
    issue(a_descriptor(), b_descriptor());
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (step > 0) release(previous_);
    previous_ = stage_.slot;
    stage_.advance();
  }

  // All columns of the tile; the pending tile's slots run while a step's products are in flight,
  // slot s after step s * steps / kEpilogueSlots.
  __device__ __forceinline__ void multiply_whole(float (&acc)[kTileN / 2], const PackedTile& packed,
                                                 int steps, const TileTask* pending) {
    const bool store = __shfl_sync(~0u, pending != nullptr, 0);
    int step = 0;
    auto advance_to = [&](int end) {
      for (; step < end; ++step) {
        one_step(step, [&](uint64_t a, uint64_t b) {
#pragma unroll
          for (int k = 0; k < kTileK / 16; ++k) {
            ptx::wgmma_n256(acc, a + k * ptx::kWgmmaStepK, b + k * ptx::kWgmmaStepK,
                            k > 0 || step > 0);
          }
        });
      }
    };
    [&]<int... kSlot>(std::integer_sequence<int, kSlot...>) {
      (
          [&] {
            // step * slot / 12 without a division; exact for every slot and up to 4096 steps.
            constexpr uint32_t kTwelfth = (1u << 20) / kEpilogueSlots + 1;
            advance_to(((kSlot * steps * kTwelfth) >> 20) + 1);
            if (store) run_slot<kSlot>(epilogue_, packed, *pending, products_);
          }(),
          ...);
    }(std::make_integer_sequence<int, kEpilogueSlots>{});
    if (store) finish(*pending);
    advance_to(steps);
  }

  // At most half of the columns; nothing is spread over so short a tile.
  __device__ __forceinline__ void multiply_narrow(float (&acc)[kTileN / 2], int steps) {
    for (int step = 0; step < steps; ++step) {
      one_step(step, [&](uint64_t a, uint64_t b) {
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
          ptx::wgmma_n128(acc, a + k * ptx::kWgmmaStepK, b + k * ptx::kWgmmaStepK,
                          k > 0 || step > 0);
        }
      });
    }
  }

  TileShared& shared_;
  const Products<kProducts>& products_;
  const uint32_t group_;
  const EpilogueWarp epilogue_;
  RingCursor<kStages> stage_;
  uint32_t previous_ = 0;  // stage of the newest issued step
};

}  // namespace mok::cuda
