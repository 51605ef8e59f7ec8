// The CPU executor against the oracle, and its bits against themselves.
#include <gtest/gtest.h>

#include <cstring>

#include "cpu/kernels.h"
#include "support/layer_run.h"

namespace mok::test {
namespace {

using problem::parse_routing;
using problem::Problem;

LayerShape shape_of(int64_t hidden, int64_t inter, int experts, int topk, int64_t shared = 0,
                    bool gate = false, float limit = std::numeric_limits<float>::infinity()) {
  return {hidden, inter, experts, topk, shared, gate, limit};
}

struct Case {
  const char* name;
  LayerShape shape;
  std::vector<int64_t> tokens;
  const char* routing = "uniform";
  WorkspaceOptions workspace = {};
  bool save = true;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Oracle : public testing::TestWithParam<std::tuple<Case, Precision>> {};

TEST_P(Oracle, ForwardAndBackward) {
  const auto& [c, precision] = GetParam();
  int64_t tokens = 0;
  for (const int64_t t : c.tokens) tokens += t;
  const Problem problem(c.shape, tokens, parse_routing(c.routing), 7);
  RunOptions options;
  options.precision = precision;
  options.tokens = c.tokens;
  options.workspace = c.workspace;
  options.save = c.save;
  LayerRun run(problem, options);
  run.both();
  EXPECT_EQ(compare_with_oracle(problem, options, run, true), "");
}

INSTANTIATE_TEST_SUITE_P(
    Executor, Oracle,
    testing::Combine(
        testing::Values(Case{"one_rank", shape_of(64, 64, 4, 2), {100}},
                        Case{"two_ranks", shape_of(64, 96, 4, 2), {70, 50}},
                        Case{"odd_sizes", shape_of(37, 23, 6, 3), {33, 5, 0}},
                        Case{"tile_edges", shape_of(257, 129, 2, 1), {128, 129}},
                        Case{"shared", shape_of(64, 64, 4, 2, 48), {90, 40}},
                        Case{"shared_gated", shape_of(64, 64, 4, 2, 136, true), {150, 131}},
                        Case{"shared_recomputed",
                             shape_of(64, 64, 4, 2, 136, true),
                             {150, 3},
                             "uniform",
                             {},
                             false},
                        Case{"clamped", shape_of(64, 64, 4, 2, 32, true, 0.75f), {64, 64, 1, 90}},
                        Case{"small_ring",
                             shape_of(64, 64, 4, 2),
                             {700, 300},
                             "zipf:1.2",
                             {.ring_rows = 256, .minibatch_rows = 128, .saved_rows = 256}},
                        Case{"four_windows",
                             shape_of(32, 32, 2, 1),
                             {1500, 1},
                             "one-expert",
                             {.ring_rows = 512, .minibatch_rows = 128}},
                        Case{"no_rows", shape_of(64, 64, 4, 2, 16), {8, 9}, "none"},
                        Case{"wide", shape_of(600, 300, 2, 2), {40}}),
        testing::Values(Precision::bf16, Precision::fp32, Precision::fp64, Precision::mxfp8,
                        Precision::fp8)));

// ---- the same bits ------------------------------------------------------------------------------

class Bits : public testing::TestWithParam<Precision> {
 protected:
  static LayerShape shape() { return shape_of(80, 136, 24, 3, 0, false, 1.5f); }
  static Bytes outputs(const Problem& problem, std::vector<int64_t> tokens,
                       WorkspaceOptions workspace = {}, bool save = true) {
    RunOptions options;
    options.precision = GetParam();
    options.tokens = std::move(tokens);
    options.workspace = workspace;
    options.save = save;
    LayerRun run(problem, options);
    run.both();
    return run.all_outputs();
  }
};
INSTANTIATE_TEST_SUITE_P(Executor, Bits,
                         testing::Values(Precision::bf16, Precision::fp32, Precision::fp64,
                                         Precision::mxfp8, Precision::fp8));

TEST_P(Bits, DoNotDependOnTheNumberOfRanksOrTheSplit) {
  const Problem problem(shape(), 230, parse_routing("zipf:1.1"), 3);
  const Bytes one = outputs(problem, {230});
  for (const auto& tokens :
       {split(230, 2), split(230, 3), split(230, 4), split(230, 6), split(230, 8),
        std::vector<int64_t>{0, 230}, std::vector<int64_t>{1, 0, 200, 29},
        std::vector<int64_t>{100, 3, 127}, std::vector<int64_t>{0, 0, 0, 0, 230, 0, 0, 0}}) {
    EXPECT_EQ(outputs(problem, tokens), one) << testing::PrintToString(tokens);
  }
}

TEST_P(Bits, DoNotDependOnAnyKnob) {
  const Problem problem(shape(), 700, parse_routing("zipf:1.4"), 4);
  const std::vector<int64_t> tokens{400, 300};
  const Bytes expected = outputs(problem, tokens);
  for (const WorkspaceOptions& w : std::vector<WorkspaceOptions>{
           {.ring_rows = 256, .minibatch_rows = 128},
           {.ring_rows = 512, .minibatch_rows = 256, .saved_rows = 256},
           {.ring_rows = 1024, .minibatch_rows = 128, .saved_rows = 0},
           {.minibatch_rows = 384, .compute_workers = 3},
           {.minibatch_rows = 128, .compute_workers = 5, .comm_workers = 4},
           {.max_tokens = 1000, .compute_workers = 1, .comm_workers = 3},
           {.ring_rows = 256, .minibatch_rows = 128, .compute_workers = 2, .delay_seed = 9}}) {
    EXPECT_EQ(outputs(problem, tokens, w), expected)
        << "ring " << w.ring_rows << ", minibatch " << w.minibatch_rows << ", saved "
        << w.saved_rows << ", workers " << w.compute_workers << " + " << w.comm_workers;
  }
  EXPECT_EQ(outputs(problem, tokens, {}, false), expected) << "nothing saved";
}

TEST_P(Bits, DoNotDependOnTheInstructionSet) {
  const Problem problem(shape_of(70, 45, 4, 2, 33, true), 60, parse_routing("uniform"), 5);
  const cpu::Isa best = cpu::best_isa();
  const Bytes expected = outputs(problem, {60});
  for (const cpu::Isa isa : {cpu::Isa::generic, cpu::Isa::avx2, cpu::Isa::avx512}) {
    if (!cpu::use_isa(isa)) continue;
    EXPECT_EQ(outputs(problem, {60}), expected) << static_cast<int>(isa);
  }
  cpu::use_isa(best);
}

TEST_P(Bits, AreTheSameEveryTimeAndInAnyOrderOfBackwards) {
  const Problem a(shape(), 90, parse_routing("uniform"), 6), b(shape(), 81, {}, 7);
  RunOptions options;
  options.precision = GetParam();
  options.tokens = {60, 30};
  options.workspace.max_tokens = 100;
  LayerRun run_a(a, options);
  options.tokens = {0, 81};
  LayerRun run_b(b, options);
  run_a.both();
  run_b.both();
  const Bytes bits_a = run_a.all_outputs(), bits_b = run_b.all_outputs();
  run_a.poison_outputs();
  run_b.poison_outputs();
  // Two forwards in flight in one workspace, backwards in the order of the forwards.
  const auto on_all = [&](auto&& f) { on_ranks_or_throw(2, f); };
  on_all([&](int r) {
    Workspace& w = run_a.workspace(r);
    w.forward(run_a.forward_args(r));
    w.forward(run_b.forward_args(r));
    w.backward(run_a.backward_args(r));
    w.backward(run_b.backward_args(r));
  });
  EXPECT_EQ(run_a.all_outputs(), bits_a);
  EXPECT_EQ(run_b.all_outputs(), bits_b);
}

// ---- how gradients are delivered, and what is skipped -------------------------------------------

TEST(Gradients, ModesDeliverTheSameSum) {
  const Problem problem(shape_of(48, 40, 4, 2, 20, true), 64, {}, 8);
  RunOptions options;
  options.tokens = {40, 24};
  LayerRun sum(problem, options);
  sum.both();
  options.mode = GradMode::storage;
  LayerRun storage(problem, options);
  storage.both();
  options.mode = GradMode::accumulate;
  LayerRun twice(problem, options);
  twice.both();
  twice.backward();
  for (const auto tensor : {&RankTensors::d_gate, &RankTensors::d_up, &RankTensors::d_down,
                            &RankTensors::d_sg, &RankTensors::d_sd, &RankTensors::d_vector}) {
    const Bytes s = sum.global(tensor), b = storage.global(tensor), t = twice.global(tensor);
    ASSERT_EQ(s.size(), 2 * b.size());
    for (size_t i = 0; i < s.size() / 4; ++i) {
      float value, doubled;
      numerics::bf16 rounded;
      std::memcpy(&value, &s[4 * i], 4);
      std::memcpy(&rounded, &b[2 * i], 2);
      std::memcpy(&doubled, &t[4 * i], 4);
      ASSERT_EQ(rounded.bits, numerics::to_bf16(value).bits);
      ASSERT_EQ(doubled, value + value);
    }
  }
}

TEST(Gradients, WhatIsNotWantedIsLeftAloneAndChangesNothing) {
  const Problem problem(shape_of(48, 40, 4, 2, 20, true), 64, {}, 9);
  RunOptions options;
  options.tokens = {40, 24};
  LayerRun full(problem, options);
  full.both();
  for (int mask = 0; mask < 512; ++mask) {
    if (mask % 7 != 3 && mask != 0 && mask != 1 && mask != 2) continue;  // some of all
    LayerRun part(problem, options);
    part.forward();
    on_ranks_or_throw(2, [&](int r) {
      BackwardArgs a = part.backward_args(r);
      if (!(mask & 1)) a.d_x = {};
      if (!(mask & 2)) a.d_topk_weights = nullptr;
      if (!(mask & 4)) a.d_gate = {};
      if (!(mask & 8)) a.d_up = {};
      if (!(mask & 16)) a.d_down = {};
      if (!(mask & 32)) a.d_shared_gate_proj = {};
      if (!(mask & 64)) a.d_shared_up_proj = {};
      if (!(mask & 128)) a.d_shared_down_proj = {};
      if (!(mask & 256)) a.d_shared_gate_vector = {};
      part.workspace(r).backward(a);
    });
    int bit = 0;
    for (const auto tensor : {&RankTensors::d_x, &RankTensors::d_topk_weights, &RankTensors::d_gate,
                              &RankTensors::d_up, &RankTensors::d_down, &RankTensors::d_sg,
                              &RankTensors::d_su, &RankTensors::d_sd, &RankTensors::d_vector}) {
      const Bytes got = part.global(tensor);
      const bool wanted = mask >> bit++ & 1;
      const Bytes expected = wanted ? full.global(tensor) : Bytes(got.size(), std::byte{0xff});
      EXPECT_EQ(got, expected) << "mask " << mask << ", tensor " << bit - 1;
    }
  }
}

// Gate and up as views of one [E, 2I, H]; x, d_y, y and d_x with rows apart.
TEST(Strides, OfEveryArgumentAreHonoured) {
  const int64_t h = 20, i = 12;
  const Problem problem(shape_of(h, i, 2, 2), 30, {}, 10);
  RunOptions options;
  options.precision = Precision::fp32;
  options.tokens = {30};
  LayerRun run(problem, options);
  run.both();
  const Bytes expected = run.all_outputs();
  RankTensors& t = run.rank(0);
  const auto spread = [](const Bytes& from, int64_t rows, int64_t columns, int64_t stride) {
    Bytes to(rows * stride * 4, std::byte{0xff});
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(&to[r * stride * 4], &from[r * columns * 4], columns * 4);
    }
    return to;
  };
  const Bytes x = spread(t.x, 30, h, 27), d_y = spread(t.d_y, 30, h, 31);
  Bytes fused(2 * 2 * i * h * 4), d_fused(fused.size());
  for (int e = 0; e < 2; ++e) {
    std::memcpy(&fused[e * 2 * i * h * 4], &t.w_gate[e * i * h * 4], i * h * 4);
    std::memcpy(&fused[(e * 2 + 1) * i * h * 4], &t.w_up[e * i * h * 4], i * h * 4);
  }
  Bytes y(30 * 25 * 4), d_x(30 * 23 * 4);
  ForwardArgs f = run.forward_args(0);
  f.x = {x.data(), 27};
  f.y = {y.data(), 25};
  f.weights.gate = {fused.data(), 2 * i * h, h};
  f.weights.up = {fused.data() + i * h * 4, 2 * i * h, h};
  run.workspace(0).forward(f);
  BackwardArgs b = run.backward_args(0);
  b.x = f.x;
  b.weights = f.weights;
  b.d_y = {d_y.data(), 31};
  b.d_x = {d_x.data(), 23};
  b.d_gate.target = {d_fused.data(), 2 * i * h, h};
  b.d_up.target = {d_fused.data() + i * h * 4, 2 * i * h, h};
  run.workspace(0).backward(b);
  for (int64_t r = 0; r < 30; ++r) {
    EXPECT_EQ(std::memcmp(&y[r * 25 * 4], &t.y[r * h * 4], h * 4), 0);
    EXPECT_EQ(std::memcmp(&d_x[r * 23 * 4], &t.d_x[r * h * 4], h * 4), 0);
  }
  for (int e = 0; e < 2; ++e) {
    EXPECT_EQ(std::memcmp(&d_fused[e * 2 * i * h * 4], &t.d_gate[e * i * h * 4], i * h * 4), 0);
    EXPECT_EQ(std::memcmp(&d_fused[(e * 2 + 1) * i * h * 4], &t.d_up[e * i * h * 4], i * h * 4), 0);
  }
  EXPECT_EQ(run.all_outputs(), expected);
}

}  // namespace
}  // namespace mok::test
