// A rank that this process plays: its memory on its GPU, and what the kernel knows of it between
// calls.
#pragma once

#include <memory>
#include <optional>

#include "cuda/rank_memory.h"
#include "cuda/tensor_map.h"
#include "mok/cuda.h"

namespace mok::cuda {

// The geometry of a workspace within the kernel's limits; rank 0, no tokens yet.
plan::Geometry workspace_geometry(const LayerShape& shape, int ranks, const Options& options);

class LocalRank {
 public:
  // `block`: its symmetric memory, or null: takes it. Throws out_of_memory.
  LocalRank(int rank, int device, const plan::Geometry& geometry, const plan::Layout& layout,
            void* block, const Options& options);
  LocalRank(LocalRank&&) = default;

  int rank() const { return state_.g.rank; }
  int device() const { return device_; }
  int64_t memory_bytes() const;
  uint8_t* block() const { return state_.symmetric[rank()]; }
  void connect(int peer, void* block) { state_.symmetric[peer] = static_cast<uint8_t*>(block); }

  const RankState& state() const { return state_; }
  // For a backward call that recomputes although all rows would have been kept: places of gate and
  // up, taken at the first such call.
  void place_recomputed_rows(RankState& state);

  // Of the calls of a direction.
  TensorMapCache& maps(plan::Direction d) {
    return d == plan::Direction::forward ? forward_maps_ : backward_maps_;
  }

  // Enqueues a new generation: every flag, counter and ticket starts again. Nobody is in a call.
  void clear(cudaStream_t stream);
  // What the device wrote last; volatile, because it may be writing.
  const volatile ErrorRecord& record() const { return *record_; }
  void forget_record() { *record_ = {}; }

 private:
  struct FreeHost {
    void operator()(void* p) const { cudaFreeHost(p); }
  };
  int device_;
  plan::Layout layout_;
  std::optional<DeviceBlock> symmetric_;
  DeviceBlock local_, tables_;
  std::optional<DeviceBlock> recomputed_;
  std::unique_ptr<ErrorRecord, FreeHost> record_;  // mapped host memory
  RankState state_{};
  TensorMapCache forward_maps_, backward_maps_;
};

}  // namespace mok::cuda
