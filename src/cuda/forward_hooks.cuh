// Forward's tasks, from the plan to the tile core.
//
// Tall tiles: when an expert's last tile has at most 16 rows, they are computed with the tile
// before it, which saves loading the expert's weights again. Of the plan's two tasks the second
// does nothing, and the first signals what others wait for of both.
#pragma once

#include "cuda/layer_kernel.cuh"

namespace mok::cuda {

struct ForwardHooks : HooksBase {
  struct Shared {};  // needs none

  __device__ ForwardHooks(const HooksBase& base, Shared*) : HooksBase(base) {}

  static __device__ plan::TaskKind plan_kind(const TileTask& task) {
    const bool shared = task.product >= kSharedGateUpProduct;
    return task.kind == TaskKind::gate_up
               ? (shared ? plan::TaskKind::shared_gate_up : plan::TaskKind::gate_up)
               : (shared ? plan::TaskKind::shared_down : plan::TaskKind::down);
  }

  // Rows of the tile behind `tile`, number t, that are computed with it.
  __device__ int joined_rows(const plan::Tile& tile, int t) const {
    const int last = tile.slice_begin + tile.slice_tiles - 1;
    if (t + 1 != last || !joins(last)) return 0;
    const int rows = plan.s.tile[last].rows;
    return rows <= kTallRows ? rows : 0;
  }
  // Whether the slice's last tile stands right behind the one before it in the ring.
  __device__ bool joins(int last) const {
    return plan::ring_row(plan, last * plan::kTileRows) != 0;
  }
  __device__ bool is_joined(const plan::Tile& tile, int t) const {
    return tile.rows <= kTallRows && t > tile.slice_begin &&
           t == tile.slice_begin + tile.slice_tiles - 1 && joins(t);
  }

  // Whole schedule warp.
  __device__ Drawn next_task(TileTask& out) const {
    const plan::Geometry& g = plan.g;
    plan::Task task;
    while (draw_task(&task)) {
      if (task.kind == plan::TaskKind::sigma) continue;  // part of reduce here
      if (task.kind == plan::TaskKind::announce_returned) {
        if (wait_for(task)) announce();
        continue;
      }
      const bool shared =
          task.kind == plan::TaskKind::shared_gate_up || task.kind == plan::TaskKind::shared_down;
      const bool gate_up =
          task.kind == plan::TaskKind::gate_up || task.kind == plan::TaskKind::shared_gate_up;
      const plan::Tile tile = shared ? plan::Tile{} : plan.s.tile[task.tile];
      if (!shared && is_joined(tile, task.tile)) continue;
      const int more = shared ? 0 : joined_rows(tile, task.tile);
      const int inter = shared ? g.shared_intermediate : g.intermediate;
      const int row = task.tile * plan::kTileRows;
      const int width = gate_up ? inter : g.hidden;
      const int tile_width = gate_up ? plan::kTileInter : plan::kTileHidden;
      out.kind = gate_up ? TaskKind::gate_up : TaskKind::down;
      out.product =
          static_cast<int16_t>(shared ? (gate_up ? kSharedGateUpProduct : kSharedDownProduct)
                                      : (gate_up ? kRoutedGateUp : kRoutedDown));
      out.steps = (gate_up ? g.hidden : inter) / kTileK;
      out.rows = shared ? min(g.own_tokens() - row, plan::kTileRows) : tile.rows + more;
      out.col0 = task.column * tile_width;
      out.cols = min(width - out.col0, tile_width);
      out.row0 = shared ? row : plan::ring_row(plan, row);
      out.save_row0 = row;
      const bool kept = shared ? g.keep_shared : plan::is_saved(plan, task.tile);
      out.save_rows = gate_up && kept ? out.rows : 0;
      out.expert = tile.expert;
      out.wait_counter = kNoCounter;
      plan::for_each_wait(plan, task, [&](plan::Wait w) {
        __syncwarp();
        if (leads()) set_wait(out, w);
      });
      if (more > 0 && gate_up && leads()) set_second_wait(out, tile.rows, more);
      plan::for_each_signal(plan, task, [&](plan::Counter c, int index) {
        if (c != plan::Counter::window_done) out.done_counter = entry(c, index);
      });
      return Drawn::tile;
    }
    return Drawn::nothing;
  }

  // A tall gate-up tile waits for the fetched rows of two tiles, whose counters are neighbours.
  __device__ void set_second_wait(TileTask& out, int rows, int more) const {
    const int32_t first = entry(plan::Counter::fetched, out.save_row0 / plan::kTileRows);
    if (ptx::load_acquire_gpu(at(first + 1)) >= static_cast<uint32_t>(more)) {
      ptx::fence_proxy_async_global();
    } else {
      out.wait_counter = first;
      out.wait_target = rows;
    }
  }

  __device__ bool draws_early() const { return false; }
  __device__ void draw() const {}  // next_task does

  __device__ void wait_ready(const TileTask& task) const {
    HooksBase::wait_ready(task, plan_kind(task));
    const bool two = task.rows > kTileM && task.kind == TaskKind::gate_up;
    if (!two || task.wait_counter == kNoCounter) return;
    waiter.counter(task.wait_counter + 1, task.rows - kTileM, static_cast<int>(plan_kind(task)));
    ptx::fence_proxy_async_global();
  }

  __device__ void publish(const TileTask& task) const {
    // The red releases the tile's stores to this GPU; rows may have gone to others.
    if (task.kind == TaskKind::down && rank.g.ranks > 1) ptx::fence_system();
    const int tiles = task.rows > kTileM ? 2 : 1;
    // Of a joined tile nobody waits for hidden rows.
    ptx::add_release_gpu(at(task.done_counter), task.kind == TaskKind::down ? tiles : 1);
    if (plan.s.windows <= 2 || task.product >= kSharedGateUpProduct) return;
    const int tile = task.save_row0 / plan::kTileRows;
    ptx::add_release_gpu(at(entry(plan::Counter::window_done, plan::window_of_tile(plan, tile))),
                         tiles);
  }
};

struct Forward {
  using Shared = ForwardHooks::Shared;
  static constexpr bool kBackward = false;
  template <int>
  using Tensors = ForwardTensors;
  using Hooks = ForwardHooks;
};

}  // namespace mok::cuda
