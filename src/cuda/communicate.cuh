// The communication warp of a block: stages own rows, pulls rows of peers, copies own rows.
//
//   global/peer --cp.async.bulk--> buffer[i % 5] --cp.async.bulk, one per destination row--> ring
//
// Three pieces of rows are being loaded while the stores of two drain. Lane k issues the store of
// the token's k-th row, so bulk groups are per lane and every lane commits one for each piece.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/tile_types.cuh"
#include "cuda/wait.cuh"

namespace mok::cuda {

inline constexpr int kPieceBytes = 4096;
inline constexpr int kPieces = 5;
inline constexpr int kLoading = 3;      // pieces on their way in
inline constexpr int kMostEntries = 8;  // rows that a task moves at once

struct CommShared {
  alignas(128) uint8_t buffer[kPieces][kPieceBytes];
  uint64_t source[kMostEntries];           // address of the token's row
  int32_t slot[kMostEntries];              // its first slot; -1: own token, one row
  int32_t stored[kMostEntries][kMaxTopk];  // rows that get a copy, or -1
  struct Piece {
    int32_t entry, offset, bytes;
  } piece[kPieces];
  ptx::Mbarrier full[kPieces];

  __device__ void init() {
    for (int i = 0; i < kPieces; ++i) full[i].init(1);
  }
};

class CommunicationWarp {
 public:
  __device__ CommunicationWarp(const RankState& rank, const plan::Plan& p, const Waiter& waiter,
                               CommShared& shared)
      : rank_(rank), plan_(p), wait_(waiter), shared_(shared), lane_(threadIdx.x % kWarp) {}

  __device__ void run() {
    const int32_t end = plan::tickets(plan_, plan::Queue::communication);
    while (true) {
      int32_t ticket = 0;
      if (lane_ == 0) {
        ticket = static_cast<int32_t>(atomicAdd(&rank_.tickets->communication, 1));
      }
      ticket = __shfl_sync(~0u, ticket, 0);
      if (ticket >= end || wait_.abort->raised != 0) return;
      const plan::Task task = plan::decode(plan_, plan::Queue::communication, ticket);
      bool go = true;
      if (task.kind == plan::TaskKind::stage) {
        stage(task);
      } else if (task.kind == plan::TaskKind::announce_staged) {
        go = ready(task);
        if (go && lane_ == 0) wait_.raise(plan::Counter::staged_flag);
      } else {
        go = ready(task);
        if (go) fetch(task);
      }
      if (!go) return;
    }
  }

 private:
  // Everything that the task waits for, as the plan states it.
  __device__ bool ready(const plan::Task& task) {
    bool go = true;
    if (lane_ == 0) {
      plan::for_each_wait(plan_, task, [&](plan::Wait w) {
        if (go) go = wait_.wait(w, static_cast<int>(task.kind));
      });
      ptx::fence_proxy_async();
    }
    return __shfl_sync(~0u, go, 0);
  }

  // Where the entry's k-th copy of a piece goes; 0 = nowhere.
  __device__ uint64_t destination(const CommShared::Piece& piece, int k) const {
    if (k >= copies_) return 0;
    const int32_t row = shared_.stored[piece.entry][k];
    if (row < 0) return 0;
    return reinterpret_cast<uint64_t>(base_) + int64_t{row % base_rows_} * row_bytes() +
           piece.offset;
  }
  __device__ int64_t row_bytes() const { return int64_t{plan_.g.hidden} * 2; }

  // Waits for the oldest piece that is still loading and stores its copies.
  __device__ void store_oldest() {
    const uint32_t slot = stored_ % kPieces;
    while (!shared_.full[slot].try_wait(stored_ / kPieces & 1)) {
    }
    const CommShared::Piece piece = shared_.piece[slot];
    for (int k = lane_; k < copies_; k += kWarp) {
      const uint64_t to = destination(piece, k);
      if (to != 0) ptx::store_bulk(reinterpret_cast<void*>(to), shared_.buffer[slot], piece.bytes);
    }
    ptx::commit_stores();
    ++stored_;
  }

  // Moves the task's entries: source -> every stored row of `base`, a ring of `base_rows`.
  __device__ void move(int entries, int copies, uint8_t* base, int32_t base_rows) {
    base_ = base;
    base_rows_ = base_rows;
    copies_ = copies;
    for (int entry = 0; entry < entries; ++entry) {
      for (int32_t offset = 0; offset < row_bytes(); offset += kPieceBytes) {
        const auto left = static_cast<int32_t>(row_bytes()) - offset;
        const int32_t bytes = left < kPieceBytes ? left : kPieceBytes;
        const uint32_t slot = issued_ % kPieces;
        ptx::wait_stores_read<kPieces - kLoading - 1>();  // the buffer's last piece has left it
        __syncwarp();
        if (lane_ == 0) {
          shared_.piece[slot] = {entry, offset, bytes};
          shared_.full[slot].arrive_expect(bytes);
          ptx::load_bulk(shared_.buffer[slot],
                         reinterpret_cast<const uint8_t*>(shared_.source[entry]) + offset, bytes,
                         &shared_.full[slot]);
        }
        __syncwarp();
        if (++issued_ - stored_ > kLoading) store_oldest();
      }
    }
    while (stored_ != issued_) store_oldest();
    ptx::wait_stores_written<0>();
    ptx::fence_proxy_async();
    __syncwarp();
  }

  __device__ void stage(const plan::Task& task) {
    for (int first = task.begin; first < task.end; first += kMostEntries) {
      const int entries = min(task.end - first, kMostEntries);
      if (static_cast<int>(lane_) < entries) {
        const int token = first + lane_;
        shared_.source[lane_] = reinterpret_cast<uint64_t>(rank_.x + token * rank_.x_stride);
        shared_.stored[lane_][0] = token;
      }
      __syncwarp();
      move(entries, 1, rank_.at<uint8_t>(plan::Buffer::staged_x, plan_.g.rank), plan_.g.max_tokens);
    }
    if (lane_ == 0) {
      ptx::fence_system();
      ptx::add_release_gpu(rank_.counter(plan::Counter::staged, 0), 1);
    }
    __syncwarp();
  }

  // Fills in source, slot and stored of the task's entries: all look-ups of a kind at once.
  __device__ void look_up(const plan::Task& task, int entries) {
    const plan::Geometry& g = plan_.g;
    const int32_t window_rows = g.window_tiles(plan_.s.tiles) * plan::kTileRows;
    if (static_cast<int>(lane_) < entries) {
      const int32_t row = plan_.s.fetch_row[task.begin + lane_];
      const int32_t slot = plan_.s.row_slot[row];
      const int src = g.slot_rank(slot);
      const int token = g.slot_token(slot);
      const bool own = src == g.rank;
      const __nv_bfloat16* from =
          own ? rank_.x + token * rank_.x_stride
              : rank_.at<__nv_bfloat16>(plan::Buffer::staged_x, src) + int64_t{token} * g.hidden;
      shared_.source[lane_] = reinterpret_cast<uint64_t>(from);
      shared_.slot[lane_] = own ? -1 : g.slot(src, token, 0);
      if (own) {
        for (int k = 1; k < g.topk; ++k) shared_.stored[lane_][k] = -1;
        shared_.stored[lane_][0] = row;
      }
    }
    __syncwarp();
    const int window = task.minibatch / plan::window_minibatches(plan_);
    for (int i = lane_; i < entries * g.topk; i += kWarp) {
      const int entry = i / g.topk, k = i % g.topk;
      if (shared_.slot[entry] < 0) continue;
      const int32_t row = plan_.s.slot_row[shared_.slot[entry] + k];
      shared_.stored[entry][k] = row >= 0 && row / window_rows == window ? row : -1;
    }
    __syncwarp();
  }

  __device__ void fetch(const plan::Task& task) {
    const int entries = task.end - task.begin;
    look_up(task, entries);
    move(entries, plan_.g.topk, rank_.at<uint8_t>(plan::Buffer::ring_x),
         plan_.g.ring_tiles * plan::kTileRows);
    ptx::fence_gpu();
    for (int i = lane_; i < entries * plan_.g.topk; i += kWarp) {
      const int32_t row = shared_.stored[i / plan_.g.topk][i % plan_.g.topk];
      if (row < 0) continue;
      atomicAdd(rank_.counter(plan::Counter::fetched, row / plan::kTileRows), 1);
    }
    __syncwarp();  // `stored` is free
  }

  const RankState& rank_;
  const plan::Plan& plan_;
  const Waiter& wait_;
  CommShared& shared_;
  const uint32_t lane_;
  uint32_t issued_ = 0;  // pieces whose load was issued
  uint32_t stored_ = 0;  // pieces whose stores were issued
  uint8_t* base_ = nullptr;
  int32_t base_rows_ = 1;
  int32_t copies_ = 0;
};

}  // namespace mok::cuda
