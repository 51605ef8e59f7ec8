// The segments of the weight gradients, backward only: which tiles of an expert lie in one window.
// The arithmetic is plan::segment_of's, which the CPU executor's schedule is made of, too.
#pragma once

#include "cuda/rank_state.h"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

// Fills in segment, segment_of_tile, segment_begin and the plan's number of segments from the tile
// table. All threads of a block. `first`: shared memory, [E_local]. scan(value, &total): exclusive
// sum over the block's threads.
template <class Scan>
__device__ __forceinline__ void cut_segments(const Tables& tables, const plan::Plan& p,
                                             int32_t* first, Scan&& scan) {
  const plan::Geometry& g = p.g;
  const int experts = g.experts_local();
  const int tiles = p.s.tiles;
  const int window_tiles = g.window_tiles(tiles);
  const auto begin_of = [&](int e) { return tables.expert_begin[e] / plan::kTileRows; };
  int32_t segments = 0;
  for (int base = 0; base < experts; base += kThreads) {  // the same rounds for all: scan
    const int e = base + threadIdx.x;
    plan::ExpertTiles expert{};
    int32_t mine = 0, total = 0;
    if (e < experts) {
      expert = {e, begin_of(e), begin_of(e + 1), tables.expert_rows[e]};
      mine = plan::segments_of(expert, window_tiles);
    }
    const int32_t number = segments + scan(mine, &total);
    if (e < experts) first[e] = number;
    for (int i = 0; i < mine; ++i) {
      tables.segment[number + i] = plan::segment_of(g, tiles, expert, number, i);
    }
    segments += total;
  }
  __syncthreads();
  for (int t = threadIdx.x; t < tiles; t += kThreads) {
    const int e = tables.tile[t].expert;
    tables.segment_of_tile[t] = first[e] + t / window_tiles - begin_of(e) / window_tiles;
  }
  __syncthreads();
  // Segments ascend in their minibatches: each opens those after its forerunner's.
  for (int i = threadIdx.x; i <= segments; i += kThreads) {
    const int after = i > 0 ? tables.segment[i - 1].minibatch + 1 : 0;
    const int upto = i < segments ? tables.segment[i].minibatch : p.s.minibatches;
    for (int m = after; m <= upto; ++m) tables.segment_begin[m] = i;
    if (i == segments) continue;
    const plan::Segment segment = tables.segment[i];
    if (segment.last || segment.previous >= 0) continue;
    tables.segment[i].carry_reader =
        plan::carry_before(segment, window_tiles, tables.tile, tables.segment_of_tile);
  }
  if (threadIdx.x == 0) tables.plan->s.segments = segments;
}

}  // namespace mok::cuda
