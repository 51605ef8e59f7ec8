// What the loops of a consumer warpgroup share: its place in the rings of tasks and stages.
#pragma once

#include "cuda/pipeline.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

inline constexpr uint32_t kHalfBytesA = kHalfM * kTileK * 2;
inline constexpr uint32_t kGroupBytesB = kGroupN * kTileK * 2;

template <class Products>
class Consumer {
 protected:
  __device__ __forceinline__ Consumer(TileShared& shared, const Products& products, uint32_t group)
      : shared_(shared), products_(products), group_(group) {}

  // Named barriers: the first warpgroup's, both warpgroups'.
  static constexpr uint32_t kFirstGroup = 2, kBothGroups = 3;

  // False after an abort: there is no next task. One may just have been handed out when the flag
  // was raised, and a tile must be taken by all warps or by none.
  __device__ __forceinline__ bool wait_for_task() const {
    if (wait(shared_.task_full[at_.low()], at_.low_phase(), shared_.abort)) return true;
    constexpr unsigned kHandingOut = 50'000;  // nanoseconds
    __nanosleep(kHandingOut);
    return shared_.task_full[at_.low()].test(at_.low_phase());
  }

  // Uniform over the warp, which the compiler must know of whatever steers wgmma.
  __device__ __forceinline__ TileTask::Shape next_shape() const {
    return {__shfl_sync(~0u, shared_.shape[at_.low()].word, 0)};
  }
  // Whether the tile needs none of this warpgroup's rows.
  __device__ __forceinline__ bool is_idle(TileTask::Shape shape) const {
    return group_ > 0 && shape.low_half_only();
  }

  __device__ __forceinline__ bool leads() const { return ptx::elect(); }
  __device__ __forceinline__ void release(uint32_t slot) {
    if (leads()) shared_.empty[slot].arrive();
  }
  // Whole warp. It has issued all its stores of the task.
  __device__ __forceinline__ void finish(uint32_t task_slot) {
    __syncwarp();
    shared_.task_done[task_slot].arrive();
  }
  __device__ __forceinline__ void pass(int steps) {
    for (int step = 0; step < steps; ++step) {
      wait(shared_.full[at_.high()], at_.high_phase(), shared_.abort);
      release(at_.high());
      at_.advance_high();
    }
  }

  TileShared& shared_;
  const Products& products_;
  const uint32_t group_;
  CursorPair<kTaskSlots, kStages> at_;
};

}  // namespace mok::cuda
