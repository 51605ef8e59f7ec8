// The CPU executor against the oracle, and its bits against themselves.
#include <gtest/gtest.h>

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
        testing::Values(Precision::bf16, Precision::fp32, Precision::fp64)));

}  // namespace
}  // namespace mok::test
