// Backward's tasks, from the plan to the tile core. What is no tile is done by the scheduler's warp
// itself: it draws far ahead of the tiles, and these tasks are small.
#pragma once

#include "cuda/layer_kernel.cuh"
#include "cuda/small_tasks.cuh"

namespace mok::cuda {

struct BackwardHooks : HooksBase {
  // Whole schedule warp.
  __device__ bool next_task(TileTask& out) const {
    plan::Task task;
    while (draw(&task)) {
      out.wait_counter = kNoCounter;
      switch (task.kind) {
        case plan::TaskKind::announce_returned:
          announce(task);
          break;
        case plan::TaskKind::router_grad:
        case plan::TaskKind::sigma:
        case plan::TaskKind::vector_grad:
          small_task(task);
          break;
        case plan::TaskKind::gate_up:
        case plan::TaskKind::shared_gate_up:
        case plan::TaskKind::shared_down:
          return recompute(task, out);
        case plan::TaskKind::weight_grad:
          return weight_grad(task, out);
        case plan::TaskKind::shared_weight_grad:
          return shared_weight_grad(task, out);
        default:
          return rows_grad(task, out);
      }
    }
    return false;
  }

  __device__ void wait_ready(const TileTask& task) const {
    HooksBase::wait_ready(task, plan_kind(task));
  }

  // The plan's task again: a tile signals more than one counter.
  __device__ void publish(const TileTask& task) const {
    plan::Task done;
    done.kind = plan_kind(task);
    done.tile = task.done_counter;
    if (task.kind == TaskKind::d_input && rank.g.ranks > 1) ptx::fence_system();
    // Results that the copy engine or wgmma of other blocks read: the release below is enough, the
    // reader crosses the proxy.
    signal(done);
  }

 private:
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

  __device__ void small_task(const plan::Task& task) const {
    if (!wait_for(task)) return;
    __syncwarp();
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

  __device__ bool recompute(const plan::Task& task, TileTask& out) const {
    const plan::Geometry& g = plan.g;
    const bool routed = task.kind == plan::TaskKind::gate_up;
    const bool gate_up = task.kind != plan::TaskKind::shared_down;
    const int inter = routed ? g.intermediate : g.shared_intermediate;
    const int row = task.tile * plan::kTileRows;
    out.kind = gate_up ? TaskKind::gate_up : TaskKind::down;
    out.product = routed    ? kRecomputeGateUp
                  : gate_up ? kRecomputeSharedGateUp
                            : kRecomputeSharedDown;
    out.steps = (gate_up ? g.hidden : inter) / kTileK;
    out.rows = routed ? plan.s.tile[task.tile].rows : min(g.own_tokens() - row, plan::kTileRows);
    out.col0 = task.column * (gate_up ? plan::kTileInter : plan::kTileHidden);
    out.cols = gate_up ? min(inter - out.col0, plan::kTileInter)
                       : min(g.hidden - out.col0, plan::kTileHidden);
    out.row0 = routed ? plan::ring_row(plan, row) : row;
    out.save_row0 = out.row0;
    out.save_rows = gate_up ? out.rows : 0;
    out.expert = routed ? plan.s.tile[task.tile].expert : 0;
    out.done_counter = task.tile;
    plan::for_each_wait(plan, task, [&](plan::Wait w) { set_wait(out, w); });
    return true;
  }

  // d_hidden, d_input and the shared expert's.
  __device__ bool rows_grad(const plan::Task& task, TileTask& out) const {
    const plan::Geometry& g = plan.g;
    const bool routed =
        task.kind == plan::TaskKind::d_hidden || task.kind == plan::TaskKind::d_input;
    const bool d_hidden =
        task.kind == plan::TaskKind::d_hidden || task.kind == plan::TaskKind::shared_d_hidden;
    const int inter = routed ? g.intermediate : g.shared_intermediate;
    const int row = task.tile * plan::kTileRows;
    out.rows = routed ? plan.s.tile[task.tile].rows : min(g.own_tokens() - row, plan::kTileRows);
    out.row0 = routed ? plan::ring_row(plan, row) : row;
    out.save_row0 = row;
    out.save_rows = out.rows;
    out.expert = routed ? plan.s.tile[task.tile].expert : 0;
    out.done_counter = task.tile;
    if (d_hidden) {
      const bool kept = !routed || plan::is_saved(plan, task.tile);
      out.kind = TaskKind::d_hidden;
      out.product = !routed ? kSharedDHidden : kept ? kDHidden : kDHiddenRecomputed;
      out.steps = g.hidden / kTileK;
      out.col0 = task.column * plan::kTileDHidden;
      out.cols = min(inter - out.col0, plan::kTileDHidden);
      // Weight gradients run over whole steps of rows: what stands behind the last one is zeroed.
      if (routed) out.save_rows = plan::ceil_div(out.rows, kTileK) * kTileK;
      if (routed && task.column == 0 && out.rows < out.save_rows) {
        // In a ring that was in use before, the rows must have come.
        if (plan.s.windows > 2 && !wait_for(task)) return true;
        zero_padding(rank, plan, task.tile);
      }
    } else {
      out.kind = TaskKind::d_input;
      out.product = routed ? kDInput : kSharedDInput;
      out.steps = 2 * inter / kTileK;
      out.col0 = task.column * plan::kTileHidden;
      out.cols = min(g.hidden - out.col0, plan::kTileHidden);
    }
    bool first = true;
    plan::for_each_wait(plan, task, [&](plan::Wait w) {
      if (first) {
        set_wait(out, w);
      } else if (leads()) {  // shared_d_hidden may wait for two
        waiter.wait(w, static_cast<int>(task.kind));
      }
      first = false;
    });
    return true;
  }

  // Known since the schedule was made.
  __device__ bool bad_call() const {
    return *const_cast<volatile uint32_t*>(&rank.tickets->bad_id) != 0;
  }

  __device__ void grad_block(const plan::Task& task, int hidden, int inter, TileTask& out) const {
    const bool down = task.matrix == plan::WeightMatrix::down;
    out.kind = TaskKind::weight_grad;
    out.row0 = task.row_block * plan::kGradRows;
    out.rows = min((down ? hidden : inter) - out.row0, plan::kGradRows);
    out.col0 = task.column * plan::kGradCols;
    out.cols = min((down ? inter : hidden) - out.col0, plan::kGradCols);
    out.done_counter = task.tile;
  }

  __device__ bool weight_grad(const plan::Task& task, TileTask& out) const {
    const plan::Segment& segment = plan.s.segment[task.tile];
    grad_block(task, plan.g.hidden, plan.g.intermediate, out);
    out.product = static_cast<int16_t>(kGradGate + static_cast<int>(task.matrix));
    out.steps = plan::ceil_div(segment.rows, kTileK);
    out.save_row0 = plan::ring_row(plan, segment.first_tile * plan::kTileRows);
    out.save_rows = (bad_call() ? TileTask::kBadCall : 0) |
                    (segment.previous >= 0 ? TileTask::kCarryIn : 0) |
                    (segment.last == 0 ? TileTask::kCarryOut : 0);
    out.expert = segment.expert;
    // The carry's hand-over first; it is rare.
    plan::for_each_wait(plan, task, [&](plan::Wait w) {
      if (w.counter == plan::Counter::segment_ready) {
        set_wait(out, w);
      } else if (leads()) {
        waiter.wait(w, static_cast<int>(task.kind));
      }
    });
    __syncwarp();
    return true;
  }

  __device__ bool shared_weight_grad(const plan::Task& task, TileTask& out) const {
    grad_block(task, plan.g.hidden, plan.g.shared_intermediate, out);
    out.product = static_cast<int16_t>(kSharedGradGate + static_cast<int>(task.matrix));
    out.steps = bad_call() ? 0 : plan::ceil_div(plan.g.own_tokens(), kTileK);
    out.save_row0 = 0;
    out.save_rows = bad_call() ? TileTask::kBadCall : 0;
    out.expert = 0;
    plan::for_each_wait(plan, task, [&](plan::Wait w) { set_wait(out, w); });
    return true;
  }
};

static_assert(kTileInterGrad == plan::kTileDHidden && kTileM == plan::kGradRows &&
              kTileN == plan::kGradCols);

struct Backward {
  static constexpr bool kBackward = true;
  using Tensors = BackwardTensors;
  using Hooks = BackwardHooks;
};

}  // namespace mok::cuda
