// Faults reported in public against other implementations, each as a small input; a test is named
// after its row in the project's list of cases. Here: ranks as processes.
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "support/layer_case.h"
#include "support/processes.h"

namespace mok::test {
namespace {

constexpr int64_t kMega = int64_t{1} << 20;

bool says(const Error& e, const char* text) { return std::strstr(e.what(), text) != nullptr; }

TEST(Cases, H2_a_killed_rank_is_named_by_the_others) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(3, [&](int r) {
    Layer l({32, 32, 6, 2}, {20, 20, 20});
    auto group = Group::processes(name, r, 3, {30, 30});
    Workspace w(*group, {32, 32, 6, 2}, Precision::bf16, {.max_tokens = 20});
    const auto start = std::chrono::steady_clock::now();
    for (int step = 0; step < 10; ++step) {
      if (r == 1 && step == 3) raise(SIGKILL);
      try {
        w.forward(l.run->forward_args(r));
        w.backward(l.run->backward_args(r));
      } catch (const Error& e) {
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        return says(e, "rank 1") && took.count() < 10 ? 7 : 8;  // an exit status that is not 0
      }
    }
    return 0;
  });
  EXPECT_EQ(statuses, (std::vector<int>{7, -SIGKILL, 7}));
}

TEST(Cases, H2_a_stopped_rank_is_a_deadline_that_names_it) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(
      2,
      [&](int r) {
        Layer l({32, 32, 4, 2}, {20, 20});
        auto group = Group::processes(name, r, 2, {0.5, 0.5});
        Workspace w(*group, {32, 32, 4, 2}, Precision::bf16, {.max_tokens = 20});
        for (int step = 0; step < 5; ++step) {
          if (r == 1 && step == 2) raise(SIGSTOP);
          try {
            w.forward(l.run->forward_args(r));
          } catch (const Error& e) {
            return e.code() == ErrorCode::deadline && says(e, "rank 1") ? 7 : 8;
          }
        }
        return 0;
      },
      3);
  EXPECT_EQ(statuses, (std::vector<int>{7, -SIGKILL}));
}

TEST(Cases, Y5_different_sizes_and_too_little_memory_fail_alike) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(2, [&](int r) {
    auto group = Group::processes(name, r, 2, {20, 20});
    try {
      group->allocate_symmetric("buffer", r == 1 ? 2 * kMega : kMega);
      return 1;
    } catch (const Error& e) {
      if (e.code() != ErrorCode::disagreement || !says(e, "rank 1 asks for 2097152")) return 2;
    }
    try {  // far more than any machine has
      Workspace w(*group, {int64_t{1} << 20, 64, 2, 2}, Precision::fp64,
                  {.max_tokens = int64_t{1} << 24});
      return 3;
    } catch (const Error& e) {
      if (e.code() != ErrorCode::out_of_memory || !says(e, "workspace")) return 4;
    }
    group->free_symmetric(group->allocate_symmetric("buffer", kMega));
    return 0;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
  EXPECT_TRUE(shared_memory_names(name).empty());
}

TEST(Cases, Y3_each_way_not_to_meet_has_its_own_message) {
  const auto message = [](const std::string& name, int rank, int ranks) -> std::string {
    try {
      Group::processes(name, rank, ranks, {0.2, 1});
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const std::string nobody = message(unique_name(), 1, 2);
  EXPECT_NE(nobody.find("waited 0.2 s for rank 0 to make the group"), std::string::npos) << nobody;
  const std::string alone = message(unique_name(), 0, 2);
  EXPECT_NE(alone.find("waited for rank 1 to join the group"), std::string::npos) << alone;
  const std::string name = unique_name();
  const auto statuses = fork_ranks(2, [&](int r) {
    const std::string text = message(name, r, 2 + r);  // they do not agree how many they are
    return r == 0 || text.find("ranks is 2 on rank 0 and 3 on rank 1") != std::string::npos ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(Cases, B9_a_process_may_exit_without_destroying_anything) {
  const std::string name = unique_name();
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = fork_ranks(2, [&](int r) {
    Layer l({32, 32, 4, 2}, {20, 20});
    auto* group = Group::processes(name, r, 2, {30, 30}).release();
    auto* w = new Workspace(*group, {32, 32, 4, 2}, Precision::bf16, {.max_tokens = 20});
    w->forward(l.run->forward_args(r));
    if (r == 1) _exit(0);
    usleep(300000);
    try {
      w->forward(l.run->forward_args(r));
    } catch (const Error& e) {
      return says(e, "rank 1") ? 0 : 2;
    }
    return 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 15);
  EXPECT_TRUE(shared_memory_names(name).empty());
}

TEST(Cases, O3_set_ups_leave_no_mapping_and_no_name) {
  const std::string name = unique_name();
  const auto statuses = fork_ranks(2, [&](int r) {
    for (int i = 0; i < 100; ++i) {
      auto group = Group::processes(name + "-" + std::to_string(i), r, 2, {20, 20});
      group->free_symmetric(group->allocate_symmetric("block", kMega));
    }
    return 0;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
  EXPECT_TRUE(shared_memory_names(name).empty());
}

}  // namespace
}  // namespace mok::test
