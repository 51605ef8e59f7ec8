#include "cuda/call_state.h"

#include <bit>
#include <cstdlib>

#include "cuda/arguments.h"

namespace mok::cuda {

namespace {

// All that ranks must agree on, in 64 bits: sizes are hashed, the call's kind is legible.
uint64_t tag_of(const plan::Geometry& g, const LayerShape& shape) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint64_t value :
       {uint64_t(g.ranks), uint64_t(g.experts), uint64_t(g.topk), uint64_t(g.hidden),
        uint64_t(g.intermediate), uint64_t(g.shared_intermediate), uint64_t(g.shared_gate),
        uint64_t(g.max_tokens), uint64_t(g.block),
        uint64_t(std::bit_cast<uint32_t>(shape.swiglu_limit))}) {
    hash = (hash ^ value) * 0x100000001b3;
    hash ^= hash >> 32;
  }
  const bool backward = g.direction == plan::Direction::backward;
  return hash << 16 | uint64_t{backward ? wanted_bits(g.wanted) : 0} << 1 | uint64_t{backward};
}

// What both directions are given.
template <class Args>
RankState common_state(const LocalRank& rank, const Args& a) {
  RankState s = rank.state();
  s.g.tokens[s.g.rank] = static_cast<int32_t>(a.tokens);
  if (a.saved.gate == nullptr) s.g.saved_rows = 0;
  s.x = static_cast<const __nv_bfloat16*>(a.x.data);
  s.x_stride = a.x.row_stride;
  s.ids = a.topk_ids;
  s.ids_are_64 = a.id_type == IdType::int64;
  s.weights = static_cast<const float*>(a.topk_weights);
  s.shared_vector = static_cast<const __nv_bfloat16*>(a.weights.shared_gate_vector);
  return s;
}

// Tiles of a minibatch in backward: about four times forward's, so that a block has several tiles
// of a kind in a row (an epilogue hides under the next tile of its kind); windows still hold whole
// minibatches. Rows that forward kept stay known as kept, but for the last few.
int32_t backward_minibatch(const plan::Geometry& g) {
  constexpr int32_t kWanted = 4;
  const int32_t pairs = g.ring_tiles / (2 * g.minibatch_tiles);  // minibatches in half a ring
  int32_t best = 1;
  for (int32_t f = 1; f <= pairs && f * g.minibatch_tiles <= kMostMinibatchTiles; ++f) {
    if (pairs % f == 0 && std::abs(f - kWanted) < std::abs(best - kWanted)) best = f;
  }
  return best * g.minibatch_tiles;
}

}  // namespace

RankState forward_state(const LocalRank& rank, const LayerShape& shape, const ForwardArgs& a) {
  RankState s = common_state(rank, a);
  s.g.direction = plan::Direction::forward;
  s.g.keep_shared = a.saved.shared_gate != nullptr;
  s.y = static_cast<__nv_bfloat16*>(a.y.data);
  s.y_stride = a.y.row_stride;
  s.tag = tag_of(s.g, shape);
  return s;
}

RankState backward_state(LocalRank& rank, const LayerShape& shape, const BackwardArgs& a,
                         const plan::Wanted& wanted) {
  RankState s = common_state(rank, a);
  s.g.direction = plan::Direction::backward;
  s.g.wanted = wanted;
  s.g.minibatch_tiles = backward_minibatch(s.g);
  s.g.keep_shared =
      a.saved.shared_gate != nullptr && (!shape.shared_gate || a.saved.shared_out != nullptr);
  if (a.saved.gate == nullptr) rank.place_recomputed_rows(s);
  s.d_y = static_cast<const __nv_bfloat16*>(a.d_y.data);
  s.d_y_stride = a.d_y.row_stride;
  if (s.g.keep_shared) {
    s.saved_shared_out = static_cast<const __nv_bfloat16*>(a.saved.shared_out);
  }
  s.d_x = static_cast<__nv_bfloat16*>(a.d_x.data);
  s.d_x_stride = a.d_x.row_stride;
  s.d_topk_weights = static_cast<float*>(a.d_topk_weights);
  s.d_shared_vector = a.d_shared_gate_vector.target.data;
  s.d_shared_vector_mode = a.d_shared_gate_vector.mode;
  s.tag = tag_of(s.g, shape);
  return s;
}

}  // namespace mok::cuda
