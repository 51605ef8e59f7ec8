// Forward's tasks, from the plan to the tile core. kFp8: routed products multiply codes.
#pragma once

#include "cuda/layer_kernel.cuh"

namespace mok::cuda {

template <bool kFp8>
struct ForwardHooks : HooksBase {
  struct Shared {};  // needs none

  __device__ ForwardHooks(const HooksBase& base, Shared*) : HooksBase(base) {}

  static __device__ plan::TaskKind plan_kind(const TileTask& task) {
    const bool shared = task.product >= kSharedGateUpProduct;
    return is_gate_up(task.kind)
               ? (shared ? plan::TaskKind::shared_gate_up : plan::TaskKind::gate_up)
               : (shared ? plan::TaskKind::shared_down : plan::TaskKind::down);
  }

  // Whole schedule warp.
  __device__ Drawn next_task(TileTask& out) const {
    const plan::Geometry& g = plan.g;
    plan::Task task;
    while (draw_task(&task)) {
      if (task.kind == plan::TaskKind::sigma) {  // part of reduce here
        if (leads()) signal(task);
        continue;
      }
      if (task.kind == plan::TaskKind::announce_returned) {
        if (wait_for(task)) announce();
        continue;
      }
      if (task.kind == plan::TaskKind::reduce) {
        if (!wait_for(task)) return Drawn::nothing;
        fill_reduce(task, out);
        return Drawn::tile;
      }
      const bool shared =
          task.kind == plan::TaskKind::shared_gate_up || task.kind == plan::TaskKind::shared_down;
      const bool gate_up =
          task.kind == plan::TaskKind::gate_up || task.kind == plan::TaskKind::shared_gate_up;
      const int inter = shared ? g.shared_intermediate : g.intermediate;
      const int row = task.tile * plan::kTileRows;
      const int width = gate_up ? inter : g.hidden;
      const int tile_width = gate_up ? plan::kTileInter : plan::kTileHidden;
      const bool fp8 = kFp8 && !shared;
      // A block of 32 columns that mxfp8 rounds together lies in two warps of a tall tile.
      const bool may_join = !shared && !kFp8 && (!gate_up || g.block == 0);
      if (may_join && has_joined(task.tile)) continue;
      const int tail = may_join ? tail_of(task.tile) : 0;
      if (fp8) {  // written once: all lanes write it
        out.kind = gate_up ? TaskKind::gate_up_fp8 : TaskKind::down_fp8;
      } else if (tail > 0) {
        out.kind = gate_up ? TaskKind::gate_up_tall : TaskKind::down_tall;
      } else {
        out.kind = gate_up ? TaskKind::gate_up : TaskKind::down;
      }
      out.product =
          static_cast<int16_t>(shared ? (gate_up ? kSharedGateUpProduct : kSharedDownProduct)
                                      : (gate_up ? kRoutedGateUp : kRoutedDown));
      out.steps = steps_of(gate_up ? g.hidden : inter, fp8);
      out.rows =
          shared ? min(g.own_tokens() - row, plan::kTileRows) : plan.s.tile[task.tile].rows + tail;
      out.tail_target = tail_target(task, tail);
      out.col0 = task.column * tile_width;
      out.cols = min(width - out.col0, tile_width);
      out.row0 = shared ? row : plan::ring_row(plan, row);
      out.save_row0 = row;
      const bool kept = shared ? g.keep_shared : plan::is_saved(plan, task.tile);
      out.save_rows = gate_up && kept ? out.rows : 0;
      out.expert = shared ? 0 : plan.s.tile[task.tile].expert;
      out.wait_counter = kNoCounter;
      plan::for_each_wait(plan, task, [&](plan::Wait w) {
        __syncwarp();
        if (leads()) set_wait(out, w);
      });
      plan::for_each_signal(plan, task, [&](plan::Counter c, int index) {
        if (c != plan::Counter::window_done) out.done_counter = entry(c, index);
      });
      return Drawn::tile;
    }
    return Drawn::nothing;
  }

  __device__ bool draws_early() const { return false; }
  __device__ void draw() const {}  // next_task does

  __device__ void wait_ready(const TileTask& task) const {
    HooksBase::wait_ready(task, plan_kind(task));
  }

  __device__ void publish(const TileTask& task) const {
    if (task.kind == TaskKind::reduce) return;
    // The red releases the tile's stores to this GPU; rows may have gone to others.
    if (!is_gate_up(task.kind) && rank.g.ranks > 1) ptx::fence_system();
    const int tiles = is_tall(task.kind) ? 2 : 1;
    const bool counted_alone = is_gate_up(task.kind);  // else one counter for all tiles
    ptx::add_release_gpu(at(task.done_counter), counted_alone ? 1 : tiles);
    if (counted_alone && tiles == 2) ptx::add_release_gpu(at(task.done_counter + 1), 1);
    if (plan.s.windows <= 2 || task.product >= kSharedGateUpProduct) return;
    const int tile = task.save_row0 / plan::kTileRows;
    ptx::add_release_gpu(at(entry(plan::Counter::window_done, plan::window_of_tile(plan, tile))),
                         tiles);
  }
};

template <bool kFp8Products>
struct Forward {
  static constexpr bool kBackward = false;
  static constexpr bool kFp8 = kFp8Products;
  template <int kRanks>
  using Tensors = ForwardTensors<kRanks, kFp8>;
  using Hooks = ForwardHooks<kFp8>;
  using Shared = typename Hooks::Shared;
};

}  // namespace mok::cuda
