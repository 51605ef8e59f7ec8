// The memory of one rank on its GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/check.h"
#include "cuda/rank_state.h"

namespace mok::cuda {

class DeviceBlock {
 public:
  DeviceBlock(int device, int64_t bytes, const std::string& what) : device_(device), bytes_(bytes) {
    const DeviceGuard guard(device);
    check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes > 0 ? bytes : 1),
          what + " (" + std::to_string(bytes) + " bytes on GPU " + std::to_string(device) + ")");
  }
  DeviceBlock(DeviceBlock&& other) noexcept
      : device_(other.device_), bytes_(other.bytes_), data_(other.data_) {
    other.data_ = nullptr;
  }
  DeviceBlock& operator=(DeviceBlock&&) = delete;
  ~DeviceBlock() {
    if (data_ == nullptr) return;
    int former = 0;
    cudaGetDevice(&former);
    cudaSetDevice(device_);
    cudaFree(data_);
    cudaSetDevice(former);
  }
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int device_;
  int64_t bytes_;
  uint8_t* data_ = nullptr;
};

// Hands out aligned pieces; with a null base it only measures.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

// Words that must be zero before the first call and after an error, then the tables. `state` takes
// the addresses, if there is one.
inline void carve_tables(const plan::Geometry& g, Carver& carver, RankState* state) {
  RankState s{};
  Tables& t = s.tables;
  s.tickets = carver.take<Tickets>(1);
  s.call = carver.take<int64_t>(1);
  s.stamps = carver.take<Stamps>(1);
  t.plan = carver.take<plan::Plan>(1);
  t.compute = carver.take<plan::Phase>(plan::most_phases(g));
  t.communication = carver.take<plan::Phase>(plan::most_phases(g));
  t.chunk_count = carver.take<int32_t>(int64_t{kScheduleChunks} * g.experts_local());
  t.expert_begin = carver.take<int32_t>(g.experts_local() + 1);
  t.expert_rows = carver.take<int32_t>(g.experts_local());
  t.row_slot = carver.take<int32_t>(g.most_rows());
  t.slot_row = carver.take<int32_t>(g.slots());
  t.fetch_row = carver.take<int32_t>(g.most_rows());
  t.fetch_count = carver.take<int32_t>(g.most_minibatches());
  t.tile = carver.take<plan::Tile>(g.most_tiles());
  t.segment = carver.take<plan::Segment>(g.most_segments());
  t.segment_of_tile = carver.take<int32_t>(g.most_tiles());
  t.segment_begin = carver.take<int32_t>(g.most_minibatches() + 1);
  t.row_weight = carver.take<float>(g.most_rows());
  t.row_source = carver.take<int8_t>(g.most_rows());
  t.row_destination = carver.take<uint64_t>(g.most_rows());
  t.shared_destination = carver.take<uint64_t>(g.has_shared() ? g.max_tokens : 0);
  if (state == nullptr) return;
  state->tickets = s.tickets;
  state->call = s.call;
  state->stamps = s.stamps;
  state->tables = t;
}

}  // namespace mok::cuda
