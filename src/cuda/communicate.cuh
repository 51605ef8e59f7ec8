// The communication warp of a block: stages own rows, pulls rows of peers, copies own rows.
//
//   global/peer --cp.async.bulk--> buffer[i % 5] --cp.async.bulk, one per destination row--> ring
//
// Backward moves rows of d_y and of x, d_y first: d_hidden needs it, x is for weight gradients and
// for rows that are recomputed. A row is fetched when both have landed.
//
// Three pieces of rows are being loaded while the stores of two drain. Lane k issues the store of
// the token's k-th row, so bulk groups are per lane and every lane commits one for each piece.
//
// Tasks overlap: the next ticket is drawn and looked up before the rows of a task are moved, and a
// task is counted in when its stores have landed, while rows of the next one are on their way. What
// is not counted in yet is counted in before the warp waits for anything.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/tile_types.cuh"
#include "cuda/wait.cuh"

namespace mok::cuda {

inline constexpr int kPieceBytes = 4096;
inline constexpr int kPieces = 5;
inline constexpr int kLoading = 3;      // pieces on their way in
inline constexpr int kRowSets = 3;      // landing, moving, looked up
inline constexpr int kMostEntries = 8;  // rows that a task moves at once

enum Operand : int8_t { kOperandX, kOperandDY };

struct CommShared {
  alignas(128) uint8_t buffer[kPieces][kPieceBytes];
  struct Rows {                              // of one task
    uint64_t source[2][kMostEntries];        // address of the token's row, by Operand
    int32_t slot[kMostEntries];              // its first slot; -1: own token, one row
    int32_t stored[kMostEntries][kMaxTopk];  // rows that get a copy, or -1
  } rows[kRowSets];
  struct Piece {
    int8_t rows, operand;
    int16_t entry;
    int32_t offset, bytes;
  } piece[kPieces];
  ptx::Mbarrier full[kPieces];

  __device__ void init() {
    for (int i = 0; i < kPieces; ++i) full[i].init(1);
  }
};

template <bool kBackward = false>
class CommunicationWarp {
 public:
  __device__ CommunicationWarp(const RankState& rank, const plan::Plan& p, const Waiter& waiter,
                               CommShared& shared)
      : rank_(rank), plan_(p), wait_(waiter), shared_(shared), lane_(threadIdx.x % kWarp) {
    if constexpr (kBackward) fetches_x_ = plan::needs_x(p);
  }

  __device__ void run() {
    int which = 0;
    plan::Task task;
    if (!next(&task, which)) return;
    while (true) {
      plan::Task following;
      const int next_which = which + 1 < kRowSets ? which + 1 : 0;
      const bool more = next(&following, next_which);
      if (!needs_no_wait(task)) {
        finish_pending();
        if (!ready(task)) return;
      }
      switch (task.kind) {
        case plan::TaskKind::stage:
          stage(task, which);
          break;
        case plan::TaskKind::announce_staged:
          if (lane_ == 0) wait_.raise(plan::Counter::staged_flag);
          break;
        default:
          fetch(task, which);
          break;
      }
      if (!more) break;
      task = following;
      which = next_which;
    }
    finish_pending();
  }

 private:
  // Draws a ticket and looks up what it moves.
  __device__ bool next(plan::Task* task, int which) {
    int32_t ticket = 0;
    if (lane_ == 0) ticket = static_cast<int32_t>(atomicAdd(&rank_.tickets->communication, 1));
    ticket = __shfl_sync(~0u, ticket, 0);
    if (ticket >= plan::tickets(plan_, plan::Queue::communication)) return false;
    if (wait_.abort->raised != 0) return false;
    *task = plan::decode(plan_, plan::Queue::communication, ticket);
    if (task->kind == plan::TaskKind::fetch) look_up(*task, shared_.rows[which]);
    return true;
  }

  // Staged flags are looked at once; the ring is new in its first two windows.
  __device__ bool needs_no_wait(const plan::Task& task) const {
    if (task.kind == plan::TaskKind::stage) return true;
    return task.kind == plan::TaskKind::fetch && (all_staged_ || plan_.g.ranks == 1) &&
           task.minibatch / plan::window_minibatches(plan_) < 2;
  }

  // Everything that the task waits for, as the plan states it.
  __device__ bool ready(const plan::Task& task) {
    bool go = true;
    if (lane_ == 0) {
      plan::for_each_wait(plan_, task, [&](plan::Wait w) {
        if (go) go = wait_.wait(w, static_cast<int>(task.kind));
      });
      ptx::fence_proxy_async();
    }
    all_staged_ = all_staged_ || task.kind == plan::TaskKind::fetch;
    return __shfl_sync(~0u, go, 0);
  }

  // Where the entry's k-th copy of a piece goes; 0 = nowhere.
  __device__ uint64_t destination(const CommShared::Piece& piece, int k) const {
    if (k >= copies_) return 0;
    const int32_t row = shared_.rows[piece.rows].stored[piece.entry][k];
    if (row < 0) return 0;
    const uint8_t* base = kBackward && piece.operand == kOperandDY ? base_d_y_ : base_x_;
    return reinterpret_cast<uint64_t>(base) + int64_t{row % base_rows_} * row_bytes() +
           piece.offset;
  }
  __device__ uint8_t* base_of(plan::Buffer b) const {
    return plan::is_symmetric(b) ? rank_.at<uint8_t>(b, plan_.g.rank) : rank_.at<uint8_t>(b);
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
    // Groups complete in order: with this many newer ones left, the task before has landed.
    if (pending_ >= 0 && stored_ - pending_end_ == kPieces) {
      ptx::wait_stores_written<kPieces>();
      count_in();
    }
  }

  // Moves the entries of rows[which]: source -> every stored row of `x` (and of `d_y`), which are
  // rings of `base_rows` rows.
  __device__ void move(int which, int entries, int copies, plan::Buffer x, plan::Buffer d_y,
                       bool with_x, int32_t base_rows) {
    base_x_ = base_of(x);
    if constexpr (kBackward) base_d_y_ = base_of(d_y);
    base_rows_ = base_rows;
    copies_ = copies;
    const int moves = kBackward && with_x ? 2 * entries : entries;
    for (int i = 0; i < moves; ++i) {
      const bool second = kBackward && i >= entries;
      const int entry = second ? i - entries : i;
      const Operand operand = kBackward && !second ? kOperandDY : kOperandX;
      for (int32_t offset = 0; offset < row_bytes(); offset += kPieceBytes) {
        const auto left = static_cast<int32_t>(row_bytes()) - offset;
        const int32_t bytes = left < kPieceBytes ? left : kPieceBytes;
        const uint32_t slot = issued_ % kPieces;
        ptx::wait_stores_read<kPieces - kLoading - 1>();  // the buffer's last piece has left it
        __syncwarp();
        if (lane_ == 0) {
          shared_.piece[slot] = {static_cast<int8_t>(which), operand, static_cast<int16_t>(entry),
                                 offset, bytes};
          shared_.full[slot].arrive_expect(bytes);
          const uint64_t source = shared_.rows[which].source[operand][entry];
          ptx::load_bulk(shared_.buffer[slot], reinterpret_cast<const uint8_t*>(source) + offset,
                         bytes, &shared_.full[slot]);
        }
        __syncwarp();
        if (++issued_ - stored_ > kLoading) store_oldest();
      }
    }
    while (stored_ != issued_) store_oldest();
  }

  // Counts in the task whose stores may not have landed when it was left.
  __device__ void finish_pending() {
    if (pending_ < 0) return;
    ptx::wait_stores_written<0>();
    count_in();
  }

  // All stores of the pending task have landed.
  __device__ void count_in() {
    ptx::fence_proxy_async();
    __syncwarp();
    if (pending_kind_ == plan::TaskKind::stage) {
      if (lane_ == 0) {
        ptx::fence_system();
        ptx::add_release_gpu(rank_.counter(plan::Counter::staged, 0), 1);
      }
    } else {
      ptx::fence_gpu();
      const CommShared::Rows& rows = shared_.rows[pending_];
      for (int i = lane_; i < pending_entries_ * plan_.g.topk; i += kWarp) {
        const int32_t row = rows.stored[i / plan_.g.topk][i % plan_.g.topk];
        if (row < 0) continue;
        atomicAdd(rank_.counter(plan::Counter::fetched, row / plan::kTileRows), 1);
      }
    }
    pending_ = -1;
    __syncwarp();  // `stored` is free
  }

  __device__ void leave_pending(plan::TaskKind kind, int which, int entries) {
    pending_ = which;
    pending_kind_ = kind;
    pending_entries_ = entries;
    pending_end_ = stored_;
  }

  __device__ void stage(const plan::Task& task, int which) {
    CommShared::Rows& rows = shared_.rows[which];
    finish_pending();
    for (int first = task.begin; first < task.end; first += kMostEntries) {
      const int entries = min(task.end - first, kMostEntries);
      if (static_cast<int>(lane_) < entries) {
        const int token = first + lane_;
        rows.source[kOperandX][lane_] =
            reinterpret_cast<uint64_t>(rank_.x + token * rank_.x_stride);
        if constexpr (kBackward) {
          rows.source[kOperandDY][lane_] =
              reinterpret_cast<uint64_t>(rank_.d_y + token * rank_.d_y_stride);
        }
        rows.stored[lane_][0] = token;
      }
      __syncwarp();
      // x always: whether a peer needs it depends on the peer's rows.
      move(which, entries, 1, plan::Buffer::staged_x, plan::Buffer::staged_d_y, true,
           plan_.g.max_tokens);
      __syncwarp();
    }
    leave_pending(plan::TaskKind::stage, which, 0);
  }

  // Fills in source, slot and stored of the task's entries: all look-ups of a kind at once.
  __device__ void look_up(const plan::Task& task, CommShared::Rows& rows) {
    const int entries = task.end - task.begin;
    const plan::Geometry& g = plan_.g;
    const int32_t window_rows = g.window_tiles(plan_.s.tiles) * plan::kTileRows;
    if (static_cast<int>(lane_) < entries) {
      const int32_t row = plan_.s.fetch_row[task.begin + lane_];
      const int32_t slot = plan_.s.row_slot[row];
      const int src = g.slot_rank(slot);
      const int token = g.slot_token(slot);
      const bool own = src == g.rank;
      const auto staged = [&](plan::Buffer b) {
        return rank_.at<__nv_bfloat16>(b, src) + int64_t{token} * g.hidden;
      };
      const __nv_bfloat16* from =
          own ? rank_.x + token * rank_.x_stride : staged(plan::Buffer::staged_x);
      rows.source[kOperandX][lane_] = reinterpret_cast<uint64_t>(from);
      if constexpr (kBackward) {
        from = own ? rank_.d_y + token * rank_.d_y_stride : staged(plan::Buffer::staged_d_y);
        rows.source[kOperandDY][lane_] = reinterpret_cast<uint64_t>(from);
      }
      rows.slot[lane_] = own ? -1 : g.slot(src, token, 0);
      if (own) {
        for (int k = 1; k < g.topk; ++k) rows.stored[lane_][k] = -1;
        rows.stored[lane_][0] = row;
      }
    }
    __syncwarp();
    const int window = task.minibatch / plan::window_minibatches(plan_);
    for (int i = lane_; i < entries * g.topk; i += kWarp) {
      const int entry = i / g.topk, k = i % g.topk;
      if (rows.slot[entry] < 0) continue;
      const int32_t row = plan_.s.slot_row[rows.slot[entry] + k];
      rows.stored[entry][k] = row >= 0 && row / window_rows == window ? row : -1;
    }
    __syncwarp();
  }

  __device__ void fetch(const plan::Task& task, int which) {
    const int entries = task.end - task.begin;
    move(which, entries, plan_.g.topk, plan::Buffer::ring_x, plan::Buffer::ring_d_y, fetches_x_,
         plan_.g.ring_tiles * plan::kTileRows);
    finish_pending();
    leave_pending(plan::TaskKind::fetch, which, entries);
  }

  const RankState& rank_;
  const plan::Plan& plan_;
  const Waiter& wait_;
  CommShared& shared_;
  const uint32_t lane_;
  uint32_t issued_ = 0;  // pieces whose load was issued
  uint32_t stored_ = 0;  // pieces whose stores were issued
  uint8_t* base_x_ = nullptr;
  uint8_t* base_d_y_ = nullptr;
  bool fetches_x_ = true;
  int32_t base_rows_ = 1;
  int32_t copies_ = 0;
  int32_t pending_ = -1;  // rows[] of the task that is not counted in, or -1
  int32_t pending_entries_ = 0;
  plan::TaskKind pending_kind_ = plan::TaskKind::fetch;
  uint32_t pending_end_ = 0;  // stored_ when it was left
  bool all_staged_ = false;
};

}  // namespace mok::cuda
