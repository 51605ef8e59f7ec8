// Starts the forward kernel.
#include <memory>

#include "cuda/check.h"
#include "cuda/forward_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace mok::cuda {

namespace {

constexpr int kWeightBoxRows = 64;

void fill(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
          Products<kForwardProducts>* p) {
  const plan::Geometry& g = s.g;
  const int64_t ring = int64_t{g.ring_tiles} * plan::kTileRows;
  const int64_t h = g.hidden, i = g.intermediate, shared = g.shared_intermediate;
  bool good = true;
  const auto matrix = [&](CUtensorMap* map, const void* data, int64_t columns, int64_t rows,
                          int64_t stride) {
    good = good && encode_tensor_map(map, {data, 2, columns, rows, 1, stride, 0, 64});
  };
  const auto stack = [&](CUtensorMap* map, const ConstStack& w, int64_t columns, int64_t rows) {
    good = good && encode_tensor_map(map, {w.data, 3, columns, rows, g.experts_local(),
                                           w.row_stride, w.expert_stride, kWeightBoxRows});
  };
  const auto single = [&](CUtensorMap* map, const ConstMatrix& w, int64_t columns, int64_t rows) {
    good = good && encode_tensor_map(map, {w.data, 3, columns, rows, 1, w.row_stride,
                                           rows * w.row_stride, kWeightBoxRows});
  };
  p->swiglu_limit = shape.swiglu_limit;
  Product& gate_up = p->product[kRoutedGateUp];
  matrix(&gate_up.a, s.at<void>(plan::Buffer::ring_x), h, ring, h);
  stack(&gate_up.b_low, a.weights.gate, h, i);
  stack(&gate_up.b_high, a.weights.up, h, i);
  gate_up.hidden = s.at<__nv_bfloat16>(plan::Buffer::ring_hidden);
  gate_up.gate = static_cast<__nv_bfloat16*>(a.saved.gate);
  gate_up.up = static_cast<__nv_bfloat16*>(a.saved.up);
  gate_up.row_elements = i;
  Product& down = p->product[kRoutedDown];
  matrix(&down.a, s.at<void>(plan::Buffer::ring_hidden), i, ring, i);
  stack(&down.b_low, a.weights.down, i, h);
  down.b_high = down.b_low;
  down.row_destination = s.tables.row_destination;
  if (g.has_shared()) {
    Product& shared_gate_up = p->product[kSharedGateUp];
    if (a.tokens > 0) matrix(&shared_gate_up.a, a.x.data, h, a.tokens, a.x.row_stride);
    single(&shared_gate_up.b_low, a.weights.shared_gate_proj, h, shared);
    single(&shared_gate_up.b_high, a.weights.shared_up_proj, h, shared);
    shared_gate_up.hidden = s.at<__nv_bfloat16>(plan::Buffer::shared_hidden);
    shared_gate_up.gate = static_cast<__nv_bfloat16*>(a.saved.shared_gate);
    shared_gate_up.up = static_cast<__nv_bfloat16*>(a.saved.shared_up);
    shared_gate_up.row_elements = shared;
    Product& shared_down = p->product[kSharedDown];
    matrix(&shared_down.a, s.at<void>(plan::Buffer::shared_hidden), shared, g.max_tokens, shared);
    single(&shared_down.b_low, a.weights.shared_down_proj, shared, h);
    shared_down.b_high = shared_down.b_low;
    shared_down.row_destination = s.tables.shared_destination;
  }
  if (!good) {
    throw Error(
        ErrorCode::bad_argument,
        "a tensor map was refused: check strides and alignment of x and the weights (rank " +
            std::to_string(g.rank) + ")");
  }
}

template <int kRanks>
void launch(const ForwardLaunch& l) {
  auto params = std::make_unique<ForwardParams<kRanks>>();
  params->ranks_here = static_cast<int32_t>(l.ranks.size());
  for (size_t i = 0; i < l.ranks.size(); ++i) {
    params->rank[i] = l.ranks[i].state;
    fill(l.ranks[i].state, l.shape, *l.ranks[i].args, &params->products[i]);
  }
  static_assert(sizeof(ForwardShared) <= 227 * 1024);
  static_assert(kFetchTaskRows == kMostEntries && kReduceTaskTokens == kMostReduceTokens);
  check(cudaFuncSetAttribute(forward_kernel<kRanks>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(ForwardShared)),
        "shared memory of the forward kernel");
  forward_kernel<kRanks><<<l.blocks, kThreads, sizeof(ForwardShared), l.stream>>>(*params);
  check(cudaGetLastError(), "launch of the forward kernel");
}

}  // namespace

void launch_forward(const ForwardLaunch& l) {
  l.ranks.size() == 1 ? launch<1>(l) : launch<kMaxRanks>(l);
}

}  // namespace mok::cuda
