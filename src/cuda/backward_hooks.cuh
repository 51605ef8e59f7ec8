// Backward's tasks, from the plan to the tile core. What is no tile is done by the scheduler's warp
// itself: it draws far ahead of the tiles, and these tasks are small.
#pragma once

#include "cuda/layer_kernel.cuh"
#include "cuda/small_tasks.cuh"

namespace mok::cuda {

// Tasks that are drawn and filled in together, a lane each. Weight gradients of experts with few
// rows last hardly longer than a draw with its look-ups; of longer ones a block would sit on too
// many. Instead of 6 steps 4: gpt-oss +2.6%; 9: qwen3-30b +9%.
inline constexpr int kBatch = 4;
inline constexpr int kFewSteps = 6;

// Steps of d_hidden's contraction from which on it has tall tiles: with fewer, what their loads
// save is less than what their end costs, which nothing hides (45 steps: +0.9%, 64: -0.7%).
inline constexpr int kTallSteps = 64;

struct BackwardShared {
  TileTask drawn[kBatch];
  plan::Task task[kBatch];
  bool waits_here[kBatch];
};

template <bool kFp8>
struct BackwardHooks : HooksBase {
  BackwardShared* more;

  __device__ BackwardHooks(const HooksBase& base, BackwardShared* shared)
      : HooksBase(base), more(shared) {}

  // Whole schedule warp.
  __device__ Drawn next_task(TileTask& out) {
    if (!more_ || waiter.abort->raised != 0) return Drawn::nothing;
    const int which = at_++;
    const plan::Task& task = more->task[which];
    if (may_join(task) && has_joined(task.tile)) return Drawn::no_tile;
    if (more->waits_here[which]) {
      if (!wait_for(task) || !wait_for_tail(task)) return Drawn::nothing;
      ptx::fence_proxy_async_global();
    }
    if (!is_tile(task.kind)) {
      small_task(task);
      return Drawn::no_tile;
    }
    if (padding_rows(task) > 0) {
      zero_padding(rank, plan, last_tile(task));
      // That takes a while, and a tile must be taken by both warpgroups or by none.
      if (waiter.abort->raised != 0) return Drawn::nothing;
    }
    const auto* words = reinterpret_cast<const uint32_t*>(&more->drawn[which]);
    if (threadIdx.x % kWarp < sizeof(TileTask) / 4) {
      reinterpret_cast<uint32_t*>(&out)[threadIdx.x % kWarp] = words[threadIdx.x % kWarp];
    }
    __syncwarp();
    return Drawn::tile;
  }

  // Weight gradients of few rows last hardly longer than a draw. Nobody waits for one, so a block
  // may sit on the next four.
  __device__ bool draws_early() const { return small_tiles_; }
  __device__ void draw() {
    if (at_ == drawn_) more_ = draw_batch();
  }

  __device__ void wait_ready(const TileTask& task) const {
    HooksBase::wait_ready(task, plan_kind(task));
  }

  // The plan's task again: a tile signals more than one counter.
  __device__ void publish(const TileTask& task) const {
    if (task.kind == TaskKind::reduce) return;
    plan::Task done;
    done.kind = plan_kind(task);
    done.tile = task.done_counter;
    const bool pushes = done.kind == plan::TaskKind::d_input;
    if (pushes && rank.g.ranks > 1) ptx::fence_system();
    // Results that the copy engine or wgmma of other blocks read: the release below is enough, the
    // reader crosses the proxy.
    signal(done);
    if (!is_tall(task.kind)) return;
    ++done.tile;
    signal(done);
  }

 private:
  // Whether a short tile's task may be part of the one before. What mxfp8 rounds together, 32
  // columns, lies in two warps of a tall tile.
  __device__ bool may_join(const plan::Task& task) const {
    if (kFp8) return false;
    if (task.kind == plan::TaskKind::d_input) return true;
    const int columns = plan.g.intermediate - task.column * plan::kTileDHidden;
    return task.kind == plan::TaskKind::d_hidden && plan.g.block == 0 && columns > kGroupN &&
           plan.g.hidden / kTileK >= kTallSteps;
  }
  // Of the rows that the task computes.
  __device__ int last_tile(const plan::Task& task) const {
    return task.tile + (may_join(task) && tail_of(task.tile) > 0 ? 1 : 0);
  }
  __device__ bool wait_for_tail(const plan::Task& task) const {
    plan::Task next = task;
    next.tile = is_tile(task.kind) ? last_tile(task) : task.tile;
    return next.tile == task.tile || wait_for(next);
  }
  static __device__ plan::TaskKind plan_kind(const TileTask& task) {
    switch (task.product) {
      case kRecomputeGateUp:
        return plan::TaskKind::gate_up;
      case kDHidden:
      case kDHiddenRecomputed:
        return plan::TaskKind::d_hidden;
      case kDInput:
        return plan::TaskKind::d_input;
      case kRecomputeSharedGateUp:
        return plan::TaskKind::shared_gate_up;
      case kRecomputeSharedDown:
        return plan::TaskKind::shared_down;
      case kSharedDHidden:
        return plan::TaskKind::shared_d_hidden;
      case kSharedDInput:
        return plan::TaskKind::shared_d_input;
      default:
        return task.product < kRecomputeSharedGateUp ? plan::TaskKind::weight_grad
                                                     : plan::TaskKind::shared_weight_grad;
    }
  }

  // Draws tickets and fills in their tasks; false when there are no more.
  __device__ bool draw_batch() {
    const int lane = threadIdx.x % kWarp;
    const int wanted = small_tiles_ ? kBatch : 1;
    const int32_t end = plan::tickets(plan, plan::Queue::compute);
    int32_t ticket = 0;
    if (leads()) ticket = static_cast<int32_t>(atomicAdd(&rank.tickets->compute, wanted));
    first_ = __shfl_sync(~0u, ticket, 0);
    if (first_ >= end) return false;
    at_ = 0;
    drawn_ = min(wanted, end - first_);
    __syncwarp();  // all lanes have read the batch before
    if (lane < drawn_) {
      const plan::Task mine = plan::decode(plan, plan::Queue::compute, first_ + lane);
      more->task[lane] = mine;
      // A tile's loads can wait for one counter. What waits for more (hand-overs of the carry, the
      // shared expert's gate) is rare, and waited for by this warp; so is what it does itself.
      int waits = 0;
      plan::for_each_wait(plan, mine, [&](plan::Wait) { ++waits; });
      const bool tile = is_tile(mine.kind);
      const bool here = !tile || mine.kind == plan::TaskKind::reduce || waits != 1 ||
                        (plan.s.windows > 2 && padding_rows(mine) > 0);
      more->waits_here[lane] = here;
      if (tile) {
        TileTask& out = more->drawn[lane];
        fill(mine, out);
        out.wait_counter = kNoCounter;
        if (!here) {
          plan::for_each_wait(plan, mine, [&](plan::Wait w) { set_wait(out, w); });
        }
      }
    }
    __syncwarp();
    small_tiles_ =
        more->task[0].kind == plan::TaskKind::weight_grad && more->drawn[0].steps <= kFewSteps;
    return true;
  }
  static __device__ bool is_tile(plan::TaskKind kind) {
    return kind != plan::TaskKind::announce_returned && kind != plan::TaskKind::router_grad &&
           kind != plan::TaskKind::sigma && kind != plan::TaskKind::vector_grad;
  }

  // Weight gradients run over whole steps of rows: what stands behind a tile's last row is zeroed
  // when its first task is handed out. In a ring that was in use before, the rows must have come.
  __device__ int padding_rows(const plan::Task& task) const {
    if (task.kind != plan::TaskKind::d_hidden || task.column != 0) return 0;
    return -plan.s.tile[last_tile(task)].rows & (kTileK - 1);
  }

  // Known since the schedule was made.
  __device__ bool bad_call() const {
    return *const_cast<volatile uint32_t*>(&rank.tickets->bad_id) != 0;
  }

  // What it waits for has come.
  __device__ void small_task(const plan::Task& task) const {
    __syncwarp();
    if (task.kind == plan::TaskKind::announce_returned) return announce();
    if (task.kind == plan::TaskKind::router_grad) {
      router_grad(rank, plan, task);
    } else if (task.kind == plan::TaskKind::sigma) {
      sigma(rank, plan, task);
    } else {
      vector_grad(rank, plan, task);
    }
    if (rank.g.ranks > 1) ptx::fence_system();  // each lane's stores, to peers among others
    __syncwarp();
    if (leads()) signal(task);
    __syncwarp();
  }

  __device__ void fill(const plan::Task& task, TileTask& out) const {
    const plan::Geometry& g = plan.g;
    const plan::TaskKind kind = task.kind;
    if (kind == plan::TaskKind::reduce) return fill_reduce(task, out);
    const bool routed = kind == plan::TaskKind::gate_up || kind == plan::TaskKind::d_hidden ||
                        kind == plan::TaskKind::d_input || kind == plan::TaskKind::weight_grad;
    const int inter = routed ? g.intermediate : g.shared_intermediate;
    out.done_counter = task.tile;
    if (kind == plan::TaskKind::weight_grad || kind == plan::TaskKind::shared_weight_grad) {
      out.tail_target = 0;
      return fill_weight_grad(task, routed, inter, out);
    }
    const int row = task.tile * plan::kTileRows;
    const plan::Tile tile = routed ? plan.s.tile[task.tile] : plan::Tile{};
    const int tail = may_join(task) ? tail_of(task.tile) : 0;
    out.tail_target = tail_target(task, tail);
    out.rows = routed ? tile.rows + tail : min(g.own_tokens() - row, plan::kTileRows);
    out.row0 = routed ? plan::ring_row(plan, row) : row;
    out.expert = tile.expert;
    out.save_row0 = row;
    out.save_rows = 0;
    int columns = g.hidden, tile_columns = plan::kTileHidden;
    const bool fp8 = kFp8 && routed;
    switch (kind) {
      case plan::TaskKind::gate_up:
      case plan::TaskKind::shared_gate_up:
        out.kind = fp8 ? TaskKind::gate_up_fp8 : TaskKind::gate_up;
        out.product = routed ? kRecomputeGateUp : kRecomputeSharedGateUp;
        out.steps = steps_of(g.hidden, fp8);
        out.save_row0 = out.row0;
        out.save_rows = out.rows;
        columns = inter, tile_columns = plan::kTileInter;
        break;
      case plan::TaskKind::shared_down:
        out.kind = TaskKind::down;
        out.product = kRecomputeSharedDown;
        out.steps = inter / kTileK;
        break;
      case plan::TaskKind::d_hidden:
      case plan::TaskKind::shared_d_hidden:
        out.kind = fp8        ? TaskKind::d_hidden_fp8
                   : tail > 0 ? TaskKind::d_hidden_tall
                              : TaskKind::d_hidden;
        out.product = !routed                           ? kSharedDHidden
                      : plan::is_saved(plan, task.tile) ? kDHidden
                                                        : kDHiddenRecomputed;
        out.steps = steps_of(g.hidden, fp8);
        out.save_rows = routed ? plan::ceil_div(out.rows, kTileK) * kTileK : out.rows;
        columns = inter, tile_columns = fp8 ? plan::kTileDHiddenFp8 : plan::kTileDHidden;
        break;
      default:  // d_input, shared_d_input
        out.kind = fp8        ? TaskKind::d_input_fp8
                   : tail > 0 ? TaskKind::d_input_tall
                              : TaskKind::d_input;
        out.product = routed ? kDInput : kSharedDInput;
        out.steps = 2 * steps_of(inter, fp8);
        break;
    }
    out.col0 = task.column * tile_columns;
    out.cols = min(columns - out.col0, tile_columns);
  }

  __device__ void fill_weight_grad(const plan::Task& task, bool routed, int inter,
                                   TileTask& out) const {
    const bool down = task.matrix == plan::WeightMatrix::down;
    const bool bad = bad_call();
    plan::Segment segment;  // the shared expert's rows are one
    if (routed) segment = plan.s.segment[task.tile];
    out.kind = TaskKind::weight_grad;
    out.product = static_cast<int16_t>((routed ? kGradGate : kSharedGradGate) +
                                       static_cast<int>(task.matrix));
    out.row0 = task.row_block * plan::kGradRows;
    out.rows = min((down ? plan.g.hidden : inter) - out.row0, plan::kGradRows);
    out.col0 = task.column * plan::kGradCols;
    out.cols = min((down ? inter : plan.g.hidden) - out.col0, plan::kGradCols);
    const int contraction = routed ? segment.rows : bad ? 0 : plan.g.own_tokens();
    out.steps = plan::ceil_div(contraction, kTileK);
    out.save_row0 = plan::ring_row(plan, segment.first_tile * plan::kTileRows);
    out.save_rows = (segment.previous >= 0 ? TileTask::kCarryIn : 0) |
                    (segment.last == 0 ? TileTask::kCarryOut : 0) | (bad ? TileTask::kBadCall : 0);
    out.expert = segment.expert;
  }

  // The batch in hand: tickets first_ .. first_ + drawn_ - 1, of which at_ are handed out.
  int32_t first_ = 0;
  int at_ = 0, drawn_ = 0;
  bool small_tiles_ = false;
  bool more_ = true;
};

static_assert(kTileInterGrad == plan::kTileDHidden && kTileM == plan::kGradRows &&
              kTileN == plan::kGradCols && kTileN == plan::kTileDHiddenFp8);

template <bool kFp8Products>
struct Backward {
  using Shared = BackwardShared;
  static constexpr bool kBackward = true;
  static constexpr bool kFp8 = kFp8Products;
  template <int kRanks>
  using Tensors = BackwardTensors<kRanks, kFp8>;
  using Hooks = BackwardHooks<kFp8>;
};

}  // namespace mok::cuda
