#include "plan/sizing.h"

#include <algorithm>

namespace mok {

int64_t default_saved_rows(const LayerShape& shape, int ranks, int64_t max_tokens) {
  const int64_t experts_local = shape.experts / ranks;
  const int64_t expected = max_tokens * shape.topk;  // of all ranks' tokens, one rank's share
  const int64_t tiles = experts_local * plan::kTileRows;
  const int64_t worst = ranks * expected + tiles;
  return std::min(worst, plan::ceil_div<int64_t>(expected * 5, 4) + tiles);
}

namespace plan {

Geometry workspace_geometry(const LayerShape& shape, int ranks, const WorkspaceOptions& options,
                            Precision precision) {
  Geometry g;
  g.ranks = ranks;
  g.experts = shape.experts;
  g.topk = shape.topk;
  g.hidden = static_cast<int32_t>(shape.hidden);
  g.intermediate = static_cast<int32_t>(shape.intermediate);
  g.shared_intermediate = static_cast<int32_t>(shape.shared_intermediate);
  g.shared_gate = shape.shared_gate;
  g.max_tokens = static_cast<int32_t>(options.max_tokens);
  const int64_t expected = default_saved_rows(shape, ranks, options.max_tokens);
  const int64_t tile = kTileRows;
  const int64_t ring = options.ring_rows > 0 ? options.ring_rows : expected;
  g.ring_tiles = static_cast<int32_t>(std::max<int64_t>(2, ceil_div(ring, tile)));
  g.minibatch_tiles = static_cast<int32_t>(ceil_div(options.minibatch_rows, tile));
  const int32_t pair = 2 * std::min(g.minibatch_tiles, g.ring_tiles / 2);
  if (options.ring_rows == 0) g.ring_tiles = ceil_div(g.ring_tiles, pair) * pair;
  g.normalize();
  g.saved_rows = options.saved_rows < 0 ? expected : options.saved_rows;
  g.block = block_size(precision);
  if (precision == Precision::fp8) g.tile_d_hidden = kTileDHiddenFp8;
  return g;
}

int32_t reduce_task_tokens(int64_t max_tokens) {
  constexpr int64_t kTasks = 128, kWarps = 8;
  const int64_t tokens = ceil_div(max_tokens, kTasks * kWarps) * kWarps;
  return static_cast<int32_t>(std::clamp<int64_t>(tokens, kWarps, 64));
}

}  // namespace plan

}  // namespace mok
