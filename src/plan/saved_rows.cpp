#include <algorithm>

#include "mok/layer.h"
#include "plan/geometry.h"

namespace mok {

int64_t default_saved_rows(const LayerShape& shape, int ranks, int64_t max_tokens) {
  const int64_t experts_local = shape.experts / ranks;
  const int64_t expected = max_tokens * shape.topk;  // of all ranks' tokens, one rank's share
  const int64_t tiles = experts_local * plan::kTileRows;
  const int64_t worst = ranks * expected + tiles;
  return std::min(worst, plan::ceil_div<int64_t>(expected * 5, 4) + tiles);
}

}  // namespace mok
