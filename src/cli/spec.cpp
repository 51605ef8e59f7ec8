#include "cli/spec.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace mok::cli {

int64_t Spec::global_tokens() const {
  return std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
}

int64_t Spec::first_token(int rank) const {
  return std::accumulate(tokens.begin(), tokens.begin() + rank, int64_t{0});
}

int Spec::physical_gpus() const {
  return static_cast<int>(std::set<int>(gpus.begin(), gpus.end()).size());
}

const char* to_string(Precision precision) {
  return precision == Precision::bf16 ? "bf16" : precision == Precision::fp32 ? "fp32" : "fp64";
}

const char* to_string(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

plan::Geometry geometry(const Spec& spec, plan::Direction direction) {
  plan::Geometry g;
  const LayerShape& s = spec.shape;
  const WorkspaceOptions& o = spec.workspace;
  g.ranks = spec.ranks();
  g.experts = s.experts;
  g.topk = s.topk;
  g.hidden = static_cast<int32_t>(s.hidden);
  g.intermediate = static_cast<int32_t>(s.intermediate);
  g.shared_intermediate = static_cast<int32_t>(s.shared_intermediate);
  g.shared_gate = s.shared_gate;
  g.max_tokens = static_cast<int32_t>(o.max_tokens);
  for (int r = 0; r < spec.ranks(); ++r) g.tokens[r] = static_cast<int32_t>(spec.tokens[r]);
  g.direction = direction;
  const int64_t expected = default_saved_rows(s, g.ranks, o.max_tokens);
  const int64_t tile = plan::kTileRows;
  const int64_t ring = o.ring_rows > 0 ? o.ring_rows : expected;
  g.ring_tiles = static_cast<int32_t>(std::max<int64_t>(2, plan::ceil_div(ring, tile)));
  g.minibatch_tiles = static_cast<int32_t>(plan::ceil_div(o.minibatch_rows, tile));
  const int32_t pair = 2 * std::min(g.minibatch_tiles, g.ring_tiles / 2);
  if (o.ring_rows == 0) g.ring_tiles = plan::ceil_div(g.ring_tiles, pair) * pair;
  g.normalize();
  g.saved_rows = o.saved_rows < 0 ? expected : o.saved_rows;
  return g;
}

}  // namespace mok::cli
