// The communication warp of a block: stages own rows, pulls rows of peers, copies own rows.
//
//   global/peer --cp.async.bulk--> buffer[lane] --cp.async.bulk, one per destination row--> ring
//
// Rows move in pieces, a lane a piece: in a round each of the first lanes loads a piece into its
// buffer, waits for it and stores its copies. (One warp's instructions take so long that moving
// pieces one after the other was three times slower.)
//
// Quantised rows were staged before the kernel, own ones too (workspace.cpp). Their pieces come as
// codes and scales, and the whole warp turns one after the other into the bf16 that leaves:
//
//   buffer, 4 KB   | (scales in `scales`)  codes, 2 KB |  ->  | bf16, 4 KB |
//
// In fp8 products multiply codes. Forward stores rows as they came; backward both as they came and
// in bf16, which weight gradients need.
//
// Backward moves rows of d_y and of x, d_y first: d_hidden needs it, x is for weight gradients and
// for rows that are recomputed. A row is fetched when both have landed.
//
// Tasks overlap: the next one is drawn and looked up a step at a time while pieces are on their way
// in, and a task is counted in when its stores have landed, which is looked at after the first
// round of the next one. What is not counted in yet is counted in before the warp waits for
// anything.
#pragma once

#include "cuda/mx.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/tile_types.cuh"
#include "cuda/wait.cuh"

namespace mok::cuda {

inline constexpr int kPieceBytes = 4096;
inline constexpr int kCodePieceBytes = 4224;  // a row of 4096 codes and its scales is one piece
inline constexpr int kPieceElements = kPieceBytes / 2;
inline constexpr int kPieceScales = kPieceElements / numerics::kMxBlock;  // bytes
inline constexpr int kPieces = 3;                                         // in a round
inline constexpr int kRowSets = 3;       // landing, moving, looked up
inline constexpr int kMostEntries = 12;  // rows that a task moves at once
inline constexpr int kMostCopies = 256;  // of all its rows

static_assert(kMostCopies >= kMaxTopk);

enum Operand : int8_t { kOperandX, kOperandDY };

// kCodes: rows stay codes.
template <bool kCodes>
struct CommShared {
  static constexpr int kMostBytes = kCodes ? kCodePieceBytes : kPieceBytes;
  alignas(128) uint8_t buffer[kPieces][kMostBytes];
  alignas(16) uint8_t scales[kPieces][kPieceScales];
  struct Rows {                        // of one task
    uint64_t source[2][kMostEntries];  // address of the token's row, by Operand
    int32_t slot[kMostEntries];        // the token's first slot
    int32_t stored[kMostCopies];       // [entry, k] rows that get a copy, or -1
  } rows[kRowSets];
  ptx::Mbarrier full[kPieces];

  __device__ void init() {
    for (int i = 0; i < kPieces; ++i) full[i].init(1);
  }
};

template <bool kBackward, bool kFp8>
class CommunicationWarp {
 public:
  static constexpr bool kCodes = kFp8 && !kBackward;
  using Shared = CommShared<kCodes>;

  __device__ CommunicationWarp(const RankState& rank, const plan::Plan& p, const Waiter& waiter,
                               Shared& shared)
      : rank_(rank), plan_(p), wait_(waiter), shared_(shared), lane_(threadIdx.x % kWarp) {
    if constexpr (kBackward) fetches_x_ = plan::needs_x(p);
    if constexpr (kBackward && kFp8) keeps_x_codes_ = plan::saved_minibatches(p) < p.s.minibatches;
  }

  __device__ void run() {
    while (finish_look_up()) {
      const plan::Task task = next_;
      const int which = next_rows_;
      next_rows_ = which + 1 < kRowSets ? which + 1 : 0;
      step_ = 0;
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
    }
    finish_pending();
  }

 private:
  // Draws the next ticket and looks up what it moves, into rows[next_rows_]: a memory latency each
  // step, waited for in the step after it.
  __device__ void look_up_step() {
    const plan::Schedule& s = plan_.s;
    switch (step_++) {
      case 0:
        if (lane_ == 0) {
          found_ = static_cast<int32_t>(atomicAdd(&rank_.tickets->communication, 1));
        }
        break;
      case 1: {
        const int32_t ticket = __shfl_sync(~0u, found_, 0);
        if (ticket >= plan::tickets(plan_, plan::Queue::communication) ||
            wait_.abort->raised != 0) {
          next_.kind = plan::TaskKind::count;
          step_ = kSteps;
          break;
        }
        next_ = plan::decode(plan_, plan::Queue::communication, ticket);
        if (next_.kind != plan::TaskKind::fetch) {
          step_ = kSteps;
        } else if (is_entry()) {
          found_ = s.fetch_row[next_.begin + lane_];
        }
        break;
      }
      case 2:
        if (is_entry()) found_ = s.row_slot[found_];
        break;
      case 3:
        set_rows(shared_.rows[next_rows_]);
        break;
      default:
        break;
    }
  }
  // False: no more tasks.
  __device__ bool finish_look_up() {
    while (step_ < kSteps) look_up_step();
    return next_.kind != plan::TaskKind::count;
  }
  __device__ bool is_entry() const { return static_cast<int>(lane_) < next_.end - next_.begin; }

  __device__ void set_rows(typename Shared::Rows& rows) {
    const plan::Geometry& g = plan_.g;
    if (is_entry()) {
      const int src = g.slot_rank(found_);
      const int token = g.slot_token(found_);
      const bool own = src == g.rank;
      const auto source = [&](plan::Buffer staged, const __nv_bfloat16* row) {
        return own && !quantized() ? reinterpret_cast<uint64_t>(row)
                                   : reinterpret_cast<uint64_t>(rank_.at<uint8_t>(staged, src) +
                                                                token * g.wire_row_bytes(2));
      };
      rows.source[kOperandX][lane_] =
          source(plan::Buffer::staged_x, rank_.x + token * rank_.x_stride);
      if constexpr (kBackward) {
        rows.source[kOperandDY][lane_] =
            source(plan::Buffer::staged_d_y, rank_.d_y + token * rank_.d_y_stride);
      }
      rows.slot[lane_] = g.slot(src, token, 0);
    }
    __syncwarp();
    const int32_t window_rows = g.window_tiles(plan_.s.tiles) * plan::kTileRows;
    const int window = next_.minibatch / plan::window_minibatches(plan_);
    for (int i = lane_; i < (next_.end - next_.begin) * g.topk; i += kWarp) {
      const int entry = i / g.topk;
      const int32_t row = plan_.s.slot_row[rows.slot[entry] + i % g.topk];
      rows.stored[i] = row >= 0 && row / window_rows == window ? row : -1;
    }
    __syncwarp();
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

  __device__ uint8_t* base_of(plan::Buffer b) const {
    return plan::is_symmetric(b) ? rank_.at<uint8_t>(b, plan_.g.rank) : rank_.at<uint8_t>(b);
  }

  __device__ bool quantized() const { return plan_.g.block > 0; }

  // What a lane has to do with a task's piece number `i`.
  struct Piece {
    int entry;
    bool is_x;
    int32_t offset, bytes;  // in the row as it is stored
  };
  static constexpr int kMostBytes = Shared::kMostBytes;
  static constexpr int kBlock = kFp8 ? 128 : numerics::kMxBlock;
  __device__ int32_t stored_row_bytes() const {
    return kCodes ? static_cast<int32_t>(plan_.g.wire_row_bytes(2)) : plan_.g.hidden * 2;
  }
  __device__ Piece piece(int i, int entries) const {
    const int32_t row_bytes = stored_row_bytes();
    const int row_pieces = plan::ceil_div(row_bytes, kMostBytes);
    const int number = i / row_pieces;  // rows of d_y, then rows of x
    const bool is_x = !kBackward || number >= entries;
    const int32_t offset = (i - number * row_pieces) * kMostBytes;
    return {kBackward && is_x ? number - entries : number, is_x, offset,
            min(row_bytes - offset, kMostBytes)};
  }

  // Moves the entries of a task: source -> every stored row of `x` (and of `d_y`), which are rings
  // of `base_rows` rows. Entry e has stored[e * most_copies ...].
  template <bool kQuantized>
  __device__ void move(const typename Shared::Rows& rows, int entries, int most_copies,
                       plan::Buffer x, plan::Buffer d_y, bool with_x, int32_t base_rows) {
    const int32_t row_bytes = stored_row_bytes();
    const int pieces =
        (kBackward && with_x ? 2 : 1) * entries * plan::ceil_div(row_bytes, kMostBytes);
    for (int first = 0; first < pieces; first += kPieces) {
      const bool mine = static_cast<int>(lane_) < min(pieces - first, kPieces);
      Piece p = piece(first + static_cast<int>(lane_), entries);
      if (mine) {
        ptx::wait_stores_read<0>();  // the buffer's last piece has left it
        load<kQuantized>(rows, p);
      }
      __syncwarp();
      look_up_step();
      if constexpr (kQuantized && kFp8) {
        if (mine) store_codes(rows, p, most_copies, base_rows);
        __syncwarp();
      }
      if constexpr (kQuantized) {
        expand(p.bytes, min(pieces - first, kPieces));
        p = piece(fresh(first) + static_cast<int>(lane_), entries);  // not kept: registers are few
      }
      if (mine) {
        while (!shared_.full[lane_].try_wait(phase_)) {
        }
        phase_ ^= 1;
        uint8_t* const base = base_of(kBackward && !p.is_x ? d_y : x) + p.offset;
#pragma unroll 1
        for (int k = 0; k < most_copies; ++k) {
          const int32_t row = rows.stored[p.entry * most_copies + k];
          if (row < 0) continue;
          ptx::store_bulk(base + int64_t{row % base_rows} * row_bytes, shared_.buffer[lane_],
                          p.bytes);
        }
      }
      ptx::commit_stores();
      if (pending_ >= 0) {
        ptx::wait_stores_written<1>();  // all but those of this round
        count_in();
      }
      __syncwarp();
    }
  }

  // Asks for a piece, into the lane's buffer.
  template <bool kQuantized>
  __device__ void load(const typename Shared::Rows& rows, const Piece& p) {
    ptx::Mbarrier& full = shared_.full[lane_];
    const auto* row =
        reinterpret_cast<const uint8_t*>(rows.source[p.is_x ? kOperandX : kOperandDY][p.entry]);
    if constexpr (kQuantized) {
      const int32_t codes = p.bytes / 2;
      const int32_t scales = scale_bytes(p);
      full.arrive_expect(codes + scales);
      ptx::load_bulk(codes_of(lane_), row + p.offset / 2, codes, &full);
      ptx::load_bulk(shared_.scales[lane_], row + scales_at(p), scales, &full);
    } else {
      full.arrive_expect(p.bytes);
      ptx::load_bulk(shared_.buffer[lane_], row + p.offset, p.bytes, &full);
    }
  }
  // Scales of a piece, with padding, and where they stand in a row.
  static __device__ int32_t scale_bytes(const Piece& p) {
    return plan::ceil_div(plan::ceil_div(p.bytes / 2, kBlock), 16) * 16;
  }
  __device__ int64_t scales_at(const Piece& p) const {
    return plan_.g.wire_scales_at() + p.offset / (2 * kBlock);
  }
  // One lane: its piece as it came, to all copies. Ends when the buffer has been read, since
  // expand overwrites it.
  __device__ void store_codes(const typename Shared::Rows& rows, const Piece& p, int most_copies,
                              int32_t base_rows) {
    while (!shared_.full[lane_].try_wait(phase_)) {
    }
    if (p.is_x && !keeps_x_codes_) return;
    uint8_t* const base =
        base_of(p.is_x ? plan::Buffer::ring_x_codes : plan::Buffer::ring_d_y_codes);
#pragma unroll 1
    for (int k = 0; k < most_copies; ++k) {
      const int32_t row = rows.stored[p.entry * most_copies + k];
      if (row < 0) continue;
      uint8_t* const to = base + int64_t{row % base_rows} * plan_.g.wire_row_bytes(2);
      ptx::store_bulk(to + p.offset / 2, codes_of(lane_), p.bytes / 2);
      ptx::store_bulk(to + scales_at(p), shared_.scales[lane_], scale_bytes(p));
    }
    ptx::commit_stores();
    ptx::wait_stores_read<0>();
  }
  __device__ uint8_t* codes_of(int piece) const {
    return shared_.buffer[piece] + kPieceBytes - kPieceElements;
  }

  // Whole warp. Codes -> bf16, in the buffers of the first `pieces` lanes; `bytes`: of the lane's
  // piece. Front to back, 1024 codes a step: every lane has read a step's codes before any writes
  // what they become, which ends before the next step's codes begin.
  __device__ void expand(int32_t bytes, int pieces) {
    constexpr int kOwn = 16;  // codes of a lane, one after the other; they have one scale
    constexpr int kLots = 2;  // of which a lane has so many in a step: their latencies overlap
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
      const uint32_t phase = __shfl_sync(~0u, phase_, piece);
      const int elements = __shfl_sync(~0u, bytes, piece) / 2;
      while (!shared_.full[piece].try_wait(phase)) {
      }
#pragma unroll 1
      for (int begin = 0; begin < elements; begin += kLots * kWarp * kOwn) {
        const int first = begin + static_cast<int>(lane_) * kOwn;
        uint4 codes[kLots];
        float scale[kLots];
#pragma unroll
        for (int i = 0; i < kLots; ++i) {
          const int at = min(first + i * kWarp * kOwn, kPieceElements - kOwn);
          codes[i] = *reinterpret_cast<const uint4*>(codes_of(piece) + at);
          scale[i] = mx_scale_of(shared_.scales[piece][at / kBlock]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kLots; ++i) {
          const int at = first + i * kWarp * kOwn;
          if (at >= elements) continue;
          auto* to = reinterpret_cast<uint4*>(shared_.buffer[piece] + at * 2);
          to[0] = mx_dequantize_eight(codes[i].x, codes[i].y, scale[i]);
          to[1] = mx_dequantize_eight(codes[i].z, codes[i].w, scale[i]);
        }
      }
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
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
    if (pending_entries_ == 0) {
      if (lane_ == 0) {
        ptx::fence_system();
        ptx::add_release_gpu(rank_.counter(plan::Counter::staged, 0), 1);
      }
    } else {
      ptx::fence_gpu();
      const typename Shared::Rows& rows = shared_.rows[pending_];
      for (int i = lane_; i < pending_entries_ * plan_.g.topk; i += kWarp) {
        const int32_t row = rows.stored[i];
        if (row < 0) continue;
        atomicAdd(rank_.counter(plan::Counter::fetched, row / plan::kTileRows), 1);
      }
    }
    pending_ = -1;
    __syncwarp();  // `stored` is free
  }

  __device__ void leave_pending(int which, int entries) {
    pending_ = which;
    pending_entries_ = entries;
  }

  __device__ void stage(const plan::Task& task, int which) {
    typename Shared::Rows& rows = shared_.rows[which];
    finish_pending();
    const int begin = quantized() ? task.end : task.begin;  // quantised rows are there already
    for (int first = begin; first < task.end; first += kMostEntries) {
      const int entries = min(task.end - first, kMostEntries);
      if (static_cast<int>(lane_) < entries) {
        const int token = first + lane_;
        rows.source[kOperandX][lane_] =
            reinterpret_cast<uint64_t>(rank_.x + token * rank_.x_stride);
        if constexpr (kBackward) {
          rows.source[kOperandDY][lane_] =
              reinterpret_cast<uint64_t>(rank_.d_y + token * rank_.d_y_stride);
        }
        rows.stored[lane_] = token;
      }
      __syncwarp();
      // x always: whether a peer needs it depends on the peer's rows.
      move<false>(rows, entries, 1, plan::Buffer::staged_x, plan::Buffer::staged_d_y, true,
                  plan_.g.max_tokens);
    }
    leave_pending(which, 0);
  }

  __device__ void fetch(const plan::Task& task, int which) {
    const int entries = task.end - task.begin;
    const int32_t ring_rows = plan_.g.ring_tiles * plan::kTileRows;
    if constexpr (kCodes) {
      move<false>(shared_.rows[which], entries, plan_.g.topk, plan::Buffer::ring_x_codes,
                  plan::Buffer::ring_d_y_codes, fetches_x_, ring_rows);
    } else if (quantized()) {
      move<true>(shared_.rows[which], entries, plan_.g.topk, plan::Buffer::ring_x,
                 plan::Buffer::ring_d_y, fetches_x_, ring_rows);
    } else {
      move<false>(shared_.rows[which], entries, plan_.g.topk, plan::Buffer::ring_x,
                  plan::Buffer::ring_d_y, fetches_x_, ring_rows);
    }
    leave_pending(which, entries);
  }

  const RankState& rank_;
  const plan::Plan& plan_;
  const Waiter& wait_;
  Shared& shared_;
  const uint32_t lane_;
  bool fetches_x_ = true, keeps_x_codes_ = true;
  uint32_t phase_ = 0;  // of the lane's buffer
  // The look-up of the next task.
  static constexpr int kSteps = 4;
  plan::Task next_;
  int step_ = 0, next_rows_ = 0;
  int32_t found_ = 0;            // the ticket, then each lane's row, then its slot
  int32_t pending_ = -1;         // rows[] of the task that is not counted in, or -1
  int32_t pending_entries_ = 0;  // of a fetch task; 0: it stages
  bool all_staged_ = false;
};

}  // namespace mok::cuda
