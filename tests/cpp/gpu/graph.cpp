// Forward captured into CUDA graphs: replays see what the tensors hold then.
#include <gtest/gtest.h>

#include "gpu/checks.h"

namespace mok::testing {
namespace {

class Graph {
 public:
  // One call of `workspace` with the tensors of `layer`.
  Graph(cuda::Workspace& workspace, GpuLayer& layer, const Stream& stream) {
    stream.take(layer);
    cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
    workspace.forward(layer.args(), layer.streams());
    cudaGraph_t graph = nullptr;
    cuda::check(cudaStreamEndCapture(stream.get(), &graph), "capture");
    cuda::check(cudaGraphInstantiate(&exec_, graph, 0), "graph");
    cuda::check(cudaGraphDestroy(graph), "graph");
  }
  Graph(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(exec_); }
  void replay(const Stream& stream) const {
    cuda::check(cudaGraphLaunch(exec_, stream.get()), "replay");
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

LayerSetup seeded(uint64_t seed) {
  LayerSetup s = virtual_ranks({300, 133});
  s.seed = seed;
  return s;
}

// All inputs of `from` into the memory of `to`.
void copy_inputs(GpuLayer& from, GpuLayer& to) {
  TokenInputs::of(from).write(to);
  const LayerShape& s = from.setup().shape;
  const int64_t local = s.experts / static_cast<int64_t>(from.args().size());
  for (size_t r = 0; r < from.args().size(); ++r) {
    const auto copy = [&](const void* a, const void* b, int64_t elements) {
      cuda::check(cudaMemcpy(const_cast<void*>(b), a, elements * 2, cudaMemcpyDefault), "copy");
    };
    const LayerWeights &a = from.args()[r].weights, &b = to.args()[r].weights;
    const int64_t routed = local * s.intermediate * s.hidden;
    copy(a.gate.data, b.gate.data, routed);
    copy(a.up.data, b.up.data, routed);
    copy(a.down.data, b.down.data, routed);
    const int64_t shared = s.shared_intermediate * s.hidden;
    copy(a.shared_gate_proj.data, b.shared_gate_proj.data, shared);
    copy(a.shared_up_proj.data, b.shared_up_proj.data, shared);
    copy(a.shared_down_proj.data, b.shared_down_proj.data, shared);
    copy(a.shared_gate_vector, b.shared_gate_vector, s.hidden);
  }
}

TEST(GpuGraph, replays_with_changed_contents) {
  GpuLayer layer(seeded(1));
  const auto first = layer.forward();  // a direct call before; none is needed, see below
  const Stream stream;
  const Graph graph(layer.workspace(), layer, stream);
  std::vector<std::vector<bf16>> seen = {first};
  for (uint64_t seed = 2; seed < 7; ++seed) {
    GpuLayer other(seeded(seed));
    const auto expected = other.forward();
    EXPECT_FALSE(same_bits(expected, seen.back()));
    copy_inputs(other, layer);
    layer.poison();
    graph.replay(stream);
    seen.push_back(stream.y(layer));
    expect_same_bits(expected, seen.back(), "replay with seed " + std::to_string(seed));
    expect_same_bits(expected, stream.forward(layer), "direct call after it");
  }
  layer.workspace().synchronize();
}

// The first thing that ever runs in the workspace; back to back, nothing waits between replays.
TEST(GpuGraph, first_call_is_a_replay) {
  const auto expected = GpuLayer(seeded(1)).forward();
  GpuLayer layer(seeded(1));
  const Stream stream;
  const Graph graph(layer.workspace(), layer, stream);
  layer.poison();
  for (int i = 0; i < 20; ++i) graph.replay(stream);
  expect_same_bits(expected, stream.y(layer), "20 replays");
  layer.workspace().synchronize();
}

TEST(GpuGraph, two_captures_interleaved) {
  GpuLayer a(seeded(1)), b(seeded(2));
  const auto expected_a = a.forward(), expected_b = b.forward();
  const Stream stream;
  cuda::Workspace& shared = a.workspace();
  const Graph graph_a(shared, a, stream), graph_b(shared, b, stream);
  for (int i = 0; i < 5; ++i) {
    a.poison();
    b.poison();
    for (int n = 0; n < 4; ++n) {
      graph_a.replay(stream);
      graph_b.replay(stream);
      if (n == 2) shared.forward(a.args(), a.streams());
    }
    expect_same_bits(expected_a, stream.y(a), "first graph");
    expect_same_bits(expected_b, stream.y(b), "second graph");
  }
  shared.synchronize();
}

TEST(GpuGraph, a_bad_id_in_a_replay) {
  GpuLayer layer(seeded(1));
  const auto good = layer.forward();
  const Stream stream;
  const Graph graph(layer.workspace(), layer, stream);
  const TokenInputs original = TokenInputs::of(layer);
  TokenInputs bad = original;
  bad.ids[301 * layer.setup().shape.topk + 2] = layer.setup().shape.experts;
  bad.write(layer);
  graph.replay(stream);
  const auto y = stream.y(layer);
  EXPECT_TRUE(all_nan(y.data(), y.size()));
  try {
    layer.workspace().synchronize();
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_routing);
    EXPECT_NE(std::string(e.what()).find("rank 1, token 1, slot 2"), std::string::npos) << e.what();
  }
  original.write(layer);
  layer.poison();
  graph.replay(stream);
  expect_same_bits(good, stream.y(layer), "the next replay");
  layer.workspace().synchronize();
}

}  // namespace
}  // namespace mok::testing
