// The executor under random delays, many workers and little room; also built with ThreadSanitizer
// and AddressSanitizer. All results must have the bits of the plainest run.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "support/layer_run.h"

namespace mok::test {
namespace {

using problem::Problem;

struct Draw {
  LayerShape shape;
  int64_t tokens = 0;
  int ranks = 1;
  RunOptions options;
  std::string routing;
};

Draw draw(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  Draw d;
  d.ranks = static_cast<int>(pick(1, 4));
  d.shape.hidden = pick(1, 70);
  d.shape.intermediate = pick(1, 70);
  d.shape.experts = d.ranks * static_cast<int>(pick(1, 3));
  d.shape.topk = static_cast<int>(pick(1, std::min(d.shape.experts, 4)));
  if (pick(0, 1)) d.shape.shared_intermediate = pick(1, 40);
  d.shape.shared_gate = d.shape.shared_intermediate > 0 && pick(0, 1);
  if (pick(0, 2) == 0) d.shape.swiglu_limit = 0.5f;
  static constexpr const char* kRoutings[] = {"uniform", "zipf:1.5", "one-expert", "none"};
  d.routing = kRoutings[pick(0, 9) < 8 ? pick(0, 1) : pick(2, 3)];
  for (int r = 0; r < d.ranks; ++r) {
    d.options.tokens.push_back(pick(0, 4) == 0 ? 0 : pick(1, 300));
    d.tokens += d.options.tokens.back();
  }
  d.options.precision = static_cast<Precision>(pick(0, 4));
  d.options.save = pick(0, 3) > 0;
  WorkspaceOptions& w = d.options.workspace;
  w.max_tokens = 300;
  if (pick(0, 1)) w.ring_rows = pick(1, 6) * 128;
  w.minibatch_rows = pick(1, 4) * 128;
  if (pick(0, 1)) w.saved_rows = pick(0, 6) * 128;
  w.compute_workers = static_cast<int>(pick(1, 3));
  w.comm_workers = static_cast<int>(pick(1, 2));
  w.delay_seed = seed;
  return d;
}

class Random : public testing::TestWithParam<int> {};

TEST_P(Random, ProblemsHaveTheBitsOfThePlainestRun) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t seed = static_cast<uint64_t>(GetParam()) * 100 + i + 1;
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Draw d = draw(seed);
    const Problem problem(d.shape, d.tokens, problem::parse_routing(d.routing), seed);
    LayerRun run(problem, d.options);
    run.both();
    const Bytes first = run.all_outputs();
    run.poison_outputs();
    run.both();
    EXPECT_EQ(run.all_outputs(), first);
    RunOptions plain;
    plain.precision = d.options.precision;
    plain.tokens = {d.tokens};
    plain.workspace.compute_workers = 1;
    LayerRun reference(problem, plain);
    reference.both();
    EXPECT_EQ(first, reference.all_outputs());
  }
}
INSTANTIATE_TEST_SUITE_P(Stress, Random, testing::Range(0, 8));

TEST(Stress, SuccessiveCallsDoNotRace) {
  // Calls of different token counts follow each other without anything between them.
  const LayerShape shape{24, 20, 6, 2, 12, true};
  RunOptions options;
  options.workspace = {.max_tokens = 200,
                       .ring_rows = 256,
                       .minibatch_rows = 128,
                       .compute_workers = 2,
                       .comm_workers = 2,
                       .delay_seed = 77};
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<std::unique_ptr<LayerRun>> runs;
  std::vector<Bytes> expected;
  for (const auto& tokens :
       std::vector<std::vector<int64_t>>{{200, 0, 31}, {0, 200, 200}, {1, 1, 1}, {7, 150, 0}}) {
    const int64_t all = tokens[0] + tokens[1] + tokens[2];
    problems.push_back(std::make_unique<Problem>(shape, all, problem::Routing{}, 3));
    options.tokens = tokens;
    runs.push_back(std::make_unique<LayerRun>(*problems.back(), options));
    runs.back()->both();
    expected.push_back(runs.back()->all_outputs());
    runs.back()->poison_outputs();
  }
  on_ranks_or_throw(3, [&](int r) {
    Workspace& workspace = runs[0]->workspace(r);
    for (int repeat = 0; repeat < 5; ++repeat) {
      for (auto& run : runs) workspace.forward(run->forward_args(r));
      for (auto& run : runs) workspace.backward(run->backward_args(r));
    }
  });
  for (size_t i = 0; i < runs.size(); ++i) EXPECT_EQ(runs[i]->all_outputs(), expected[i]);
}

TEST(Stress, TheMachineIsBusy) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> load;
  for (int i = 0; i < 6; ++i) {
    load.emplace_back([&] {
      while (!stop.load(std::memory_order_relaxed)) std::this_thread::yield();
    });
  }
  const Problem problem({40, 30, 8, 3}, 150, {}, 4);
  RunOptions options;
  options.tokens = split(150, 4);
  LayerRun run(problem, options);
  run.both();
  const Bytes first = run.all_outputs();
  for (int repeat = 0; repeat < 3; ++repeat) {
    run.poison_outputs();
    run.both();
    EXPECT_EQ(run.all_outputs(), first);
  }
  stop = true;
  for (std::thread& t : load) t.join();
}

TEST(Stress, FailuresAtRandomRanksAndCallsLeaveNothingBehind) {
  const Problem problem({16, 12, 8, 2, 8, true}, 80, {}, 5);
  RunOptions options;
  options.tokens = {30, 0, 20, 30};
  options.workspace.max_tokens = 30;
  LayerRun run(problem, options);
  run.both();
  const Bytes expected = run.all_outputs();
  on_ranks_or_throw(4, [&](int r) {
    std::mt19937_64 shared_dice(6), own_dice(r);  // the former falls alike on all ranks
    for (int call = 0; call < 60; ++call) {
      const int culprit = static_cast<int>(shared_dice() % 8);  // 4..7: nobody
      if (own_dice() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      ForwardArgs a = run.forward_args(r);
      if (culprit == r) a.weights.down.data = nullptr;
      bool failed = false;
      try {
        run.workspace(r).forward(a);
      } catch (const Error&) {
        failed = true;
      }
      if (failed != (culprit < 4)) {
        throw Error(ErrorCode::internal,
                    "call " + std::to_string(call) + " on rank " + std::to_string(r));
      }
    }
  });
  run.poison_outputs();
  run.both();
  EXPECT_EQ(run.all_outputs(), expected);
}

}  // namespace
}  // namespace mok::test
