// Groups and symmetric memory: threads of one process, and processes (forked here).
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>

#include "support/layer_run.h"
#include "support/processes.h"

namespace mok::test {
namespace {

constexpr int64_t kMega = int64_t{1} << 20;

TEST(Threads, RanksOutsideTheirRangeAreRefused) {
  EXPECT_THROW(Group::threads(0), Error);
  EXPECT_THROW(Group::threads(9), Error);
}

TEST(Threads, EveryRankSeesEveryBlock) {
  auto groups = Group::threads(3, {10, 10});
  std::vector<std::vector<std::byte*>> blocks(3);
  on_ranks_or_throw(3, [&](int r) { blocks[r] = groups[r]->allocate_symmetric("test", kMega); });
  EXPECT_EQ(blocks[0], blocks[1]);
  EXPECT_EQ(blocks[0], blocks[2]);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(blocks[0][r][kMega - 1], std::byte{0});
  groups[0]->free_symmetric(blocks[0]);
  blocks[1][0][5] = std::byte{1};  // lives until the last rank gives it back
  groups[0].reset();
  EXPECT_TRUE(groups[1]->peer_is_gone(0));
  EXPECT_FALSE(groups[1]->peer_is_gone(2));
  groups[1]->free_symmetric(blocks[1]);
  groups[2]->free_symmetric(blocks[2]);
}

TEST(Threads, DifferentSizesFailAlikeAndTheGroupWorksOn) {
  auto groups = Group::threads(2, {10, 10});
  const auto errors = on_ranks(
      2, [&](int r) { groups[r]->allocate_symmetric("buffer", r == 0 ? kMega : 2 * kMega); });
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(errors[r]);
    EXPECT_EQ(errors[r]->code(), ErrorCode::disagreement);
    EXPECT_STREQ(errors[r]->what(), errors[0]->what());
  }
  EXPECT_NE(std::strstr(errors[0]->what(), "rank 1 asks for"), nullptr) << errors[0]->what();
  on_ranks_or_throw(
      2, [&](int r) { groups[r]->free_symmetric(groups[r]->allocate_symmetric("buffer", kMega)); });
}

TEST(Threads, APeerThatNeverComesIsADeadlineForAll) {
  auto groups = Group::threads(3, {0.2, 10});
  const auto errors = on_ranks(3, [&](int r) {
    if (r != 1) groups[r]->allocate_symmetric("buffer", kMega);
  });
  for (const int r : {0, 2}) {
    ASSERT_TRUE(errors[r]);
    EXPECT_NE(std::strstr(errors[r]->what(), "waited for rank 1"), nullptr) << errors[r]->what();
  }
}

TEST(Processes, NamesAndRanksAreChecked) {
  EXPECT_THROW(Group::processes("a/b", 0, 1), Error);
  EXPECT_THROW(Group::processes("", 0, 1), Error);
  EXPECT_THROW(Group::processes("x", 2, 2), Error);
  EXPECT_THROW(Group::processes("x", 0, 9), Error);
}

TEST(Processes, EveryRankSeesEveryBlockAndNoNameIsLeft) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(3, [&](int r) {
    auto group = Group::processes(name, r, 3, {20, 10});
    const auto blocks = group->allocate_symmetric("test", kMega);
    auto* seen = reinterpret_cast<std::atomic<int>*>(blocks[r]);
    for (int p = 0; p < 3; ++p) {
      reinterpret_cast<std::atomic<int>*>(blocks[p])[r].store(100 + r);
    }
    for (int p = 0; p < 3; ++p) {
      while (seen[p].load() != 100 + p) usleep(100);
    }
    // All have attached, so names go, at the latest when each rank returns from the allocation.
    for (int i = 0; !shared_memory_names(name).empty(); ++i) {
      if (i == 1000) return 2;
      usleep(5000);
    }
    group->free_symmetric(blocks);
    return 0;
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
  EXPECT_TRUE(shared_memory_names(name).empty());
}

TEST(Processes, ASecondProcessOfTheSameRankIsRefused) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(3, [&](int i) {
    const int rank = i == 0 ? 0 : 1;
    try {
      auto group = Group::processes(name, rank, 2, {1.5, 5});
      usleep(500000);
      return 0;
    } catch (const Error& e) {
      // A late one may find that the group is complete, and the name gone.
      return e.code() == ErrorCode::bad_argument || e.code() == ErrorCode::deadline ? 10 : 1;
    }
  });
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[1] + statuses[2], 10);
}

TEST(Processes, APeerThatNeverComesIsADeadlineAndNothingIsLeft) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(2, [&](int i) {
    try {
      Group::processes(name, i, 3, {0.3, 5});
      return 1;
    } catch (const Error& e) {
      const bool names_it = std::strstr(e.what(), "rank 2") || std::strstr(e.what(), "rank 0");
      return (e.code() == ErrorCode::deadline || e.code() == ErrorCode::aborted) && names_it ? 0
                                                                                             : 2;
    }
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
  EXPECT_TRUE(shared_memory_names(name).empty());
}

TEST(Processes, WhatAKilledRunLeftIsTakenOver) {
  const std::string name = unique_name();
  const auto killed = fork_ranks(
      1,
      [&](int) {
        try {
          Group::processes(name, 0, 2, {0, 5});  // waits for a peer that does not come
        } catch (...) {
        }
        return 0;
      },
      0.3);
  EXPECT_EQ(killed[0], -SIGKILL);
  EXPECT_EQ(shared_memory_names(name).size(), 1u);
  const auto statuses = fork_ranks(2, [&](int r) {
    Group::processes(name, r, 2, {10, 5});
    return 0;
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
  EXPECT_TRUE(shared_memory_names(name).empty());
}

TEST(Processes, AKilledPeerIsGoneEvenBeforeItsParentAsksForIt) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(2, [&](int r) {
    auto group = Group::processes(name, r, 2, {20, 5});
    if (r == 1) {
      usleep(100000);
      raise(SIGKILL);  // a zombie until both have ended: fork_ranks waits for rank 0 first
    }
    if (group->peer_is_gone(1)) return 1;
    for (int i = 0; i < 500; ++i) {
      usleep(10000);
      if (group->peer_is_gone(1)) return 0;
    }
    return 2;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, -SIGKILL}));
}

TEST(Processes, MoreThanSharedMemoryHoldsIsAnErrorOnAllRanks) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(2, [&](int r) {
    auto group = Group::processes(name, r, 2, {20, 5});
    try {
      group->allocate_symmetric("huge", int64_t{1} << 46);
      return 1;
    } catch (const Error& e) {
      if (e.code() != ErrorCode::out_of_memory) return 2;
      if (!std::strstr(e.what(), "huge")) return 3;
    }
    group->free_symmetric(group->allocate_symmetric("small", kMega));  // all is well again
    return 0;
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
  EXPECT_TRUE(shared_memory_names(name).empty());
}

TEST(Processes, TheLayerHasTheBitsOfThreads) {
  const LayerShape shape{48, 40, 4, 2, 24, true};
  const problem::Problem problem(shape, 90, {}, 5);
  RunOptions options;
  options.tokens = {50, 40};
  LayerRun run(problem, options);  // each process writes into its own copy
  const std::string name = unique_name();
  const auto statuses = fork_ranks(2, [&](int r) {
    auto group = Group::processes(name, r, 2, {30, 20});
    Workspace workspace(*group, shape, Precision::bf16, {.max_tokens = 50});
    run.poison_outputs();
    for (int repeat = 0; repeat < 3; ++repeat) {
      workspace.forward(run.forward_args(r));
      workspace.backward(run.backward_args(r));
    }
    LayerRun as_threads(problem, options);
    as_threads.both();
    const RankTensors &a = run.rank(r), &b = as_threads.rank(r);
    return a.y == b.y && a.d_x == b.d_x && a.d_gate == b.d_gate && a.d_down == b.d_down &&
                   a.d_topk_weights == b.d_topk_weights && a.d_vector == b.d_vector
               ? 0
               : 1;
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
}

TEST(Processes, AKilledRankMakesTheOthersRaiseAndNamesIt) {
  const LayerShape shape{64, 64, 3, 2};
  const problem::Problem problem(shape, 300, {}, 5);
  RunOptions options;
  options.tokens = {100, 100, 100};
  const std::string name = unique_name();
  const auto statuses = fork_ranks(3, [&](int r) {
    auto group = Group::processes(name, r, 3, {30, 30});
    Workspace workspace(*group, shape, Precision::bf16, {.max_tokens = 100});
    LayerRun run(problem, options);
    const auto start = std::chrono::steady_clock::now();
    try {
      for (int step = 0; step < 100000; ++step) {
        if (r == 1 && step == 3) raise(SIGKILL);
        workspace.forward(run.forward_args(r));
        workspace.backward(run.backward_args(r));
      }
    } catch (const Error& e) {
      if (e.code() != ErrorCode::aborted || !std::strstr(e.what(), "rank 1")) return 1;
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      return took.count() < 20 ? 0 : 2;
    }
    return 3;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, -SIGKILL, 0}));
  EXPECT_TRUE(shared_memory_names(name).empty());
}

}  // namespace
}  // namespace mok::test
