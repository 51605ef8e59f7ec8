// Faults reported in public against other implementations, each as a small input; a test is named
// after its row in the project's list of cases. Here: repeated calls, ranks, hangs, memory.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "cpu/faults.h"
#include "support/layer_case.h"

namespace mok::test {
namespace {

// ---- the same bits ------------------------------------------------------------------------------

TEST(Cases, R1_a_hundred_runs_have_the_same_bits) {
  Layer l({64, 32, 8, 4}, {64, 64});
  l.run->both();
  const Bytes first = l.run->all_outputs();
  for (int i = 0; i < 100; ++i) {
    l.run->poison_outputs();
    l.run->both();
    ASSERT_EQ(l.run->all_outputs(), first) << i;
  }
}

TEST(Cases, R2_the_order_of_other_layers_calls_does_not_matter) {
  Layer a({32, 32, 4, 2}, {20, 10}), b({48, 16, 4, 1}, {5, 9});
  a.run->both();
  b.run->both();
  const Bytes bits_a = a.run->all_outputs(), bits_b = b.run->all_outputs();
  b.run->forward();
  a.run->forward();
  a.run->backward();
  b.run->backward();
  EXPECT_EQ(a.run->all_outputs(), bits_a);
  EXPECT_EQ(b.run->all_outputs(), bits_b);
}

TEST(Cases, R6_delays_change_nothing) {
  Layer plain({32, 24, 8, 2}, {40, 30, 0, 50});
  plain.run->both();
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    RunOptions o;
    o.workspace.delay_seed = seed;
    o.workspace.compute_workers = 2;
    Layer delayed({32, 24, 8, 2}, {40, 30, 0, 50}, o);
    delayed.run->both();
    EXPECT_EQ(delayed.run->all_outputs(), plain.run->all_outputs()) << seed;
  }
}

TEST(Cases, E1_gradients_are_the_same_for_every_number_of_ranks) {
  Layer one({8, 8, 4, 2}, {32});
  EXPECT_EQ(one.differences(), "");
  for (const int ranks : {2, 4}) {
    Layer l({8, 8, 4, 2}, split(32, ranks));
    l.run->both();
    EXPECT_EQ(l.run->all_outputs(), one.run->all_outputs()) << ranks;
  }
}

TEST(Cases, E3_one_rank_is_a_full_path) {
  Layer l({16, 16, 4, 2}, {3});
  EXPECT_EQ(l.differences(), "");
}

// ---- hangs --------------------------------------------------------------------------------------

TEST(Cases, H1_a_slow_rank_is_named_with_counter_and_counts) {
  for (const plan::TaskKind kind : {plan::TaskKind::stage, plan::TaskKind::reduce}) {
    RunOptions o;
    o.group = {30, 0.3};
    Layer l({16, 16, 2, 1}, {20, 20}, o);
    l.run->both();
    const Bytes expected = l.run->all_outputs();
    const cpu::Fault fault{1, kind, cpu::Fault::What::sleep, 0.7};
    cpu::planted_fault = &fault;
    const auto errors =
        on_ranks(2, [&](int r) { l.run->workspace(r).forward(l.run->forward_args(r)); });
    cpu::planted_fault = nullptr;
    for (const auto& e : errors) {
      ASSERT_TRUE(e) << plan::to_string(kind);
      EXPECT_EQ(e->code(), ErrorCode::deadline) << e->what();
      EXPECT_NE(std::strstr(e->what(), "for rank 1"), nullptr) << e->what();
    }
    l.run->both();
    EXPECT_EQ(l.run->all_outputs(), expected);
  }
}

TEST(Cases, H3_a_late_first_call_is_no_error_before_the_arrival_deadline) {
  RunOptions o;
  o.group = {30, 0.2};  // progress inside a call is another matter
  Layer l({16, 16, 2, 1}, {4, 4}, o);
  on_ranks_or_throw(2, [&](int r) {
    if (r == 0) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    l.run->workspace(r).forward(l.run->forward_args(r));
  });
}

TEST(Cases, H9_a_stall_says_which_task_waits_for_what) {
  RunOptions o;
  o.group = {30, 0.3};
  Layer l({16, 16, 2, 1}, {20, 20}, o);
  const cpu::Fault fault{0, plan::TaskKind::gate_up, cpu::Fault::What::skip_signal};
  cpu::planted_fault = &fault;
  const auto errors =
      on_ranks(2, [&](int r) { l.run->workspace(r).forward(l.run->forward_args(r)); });
  cpu::planted_fault = nullptr;
  bool named = false;
  for (const auto& e : errors) {
    ASSERT_TRUE(e);
    named = named || std::strstr(e->what(), "down (minibatch 0, tile 0, column 0)") ||
            std::strstr(e->what(), "returned_flag[0]");
    EXPECT_NE(std::strstr(e->what(), "value seen"), nullptr) << e->what();
  }
  EXPECT_TRUE(named) << errors[0]->what();
}

// ---- buffers and memory -------------------------------------------------------------------------

TEST(Cases, B1_calls_from_two_threads_of_a_rank_follow_each_other) {
  Layer l({16, 16, 2, 1}, {20});
  l.run->both();
  const Bytes expected = l.run->global(&RankTensors::y);
  on_ranks_or_throw(4, [&](int) {
    Bytes y(expected.size());
    for (int i = 0; i < 10; ++i) {
      ForwardArgs a = l.run->forward_args(0);
      a.saved = {};
      a.y.data = y.data();
      l.run->workspace(0).forward(a);
      if (y != expected) throw Error(ErrorCode::internal, "other bits");
    }
  });
}

TEST(Cases, B3_many_layers_share_one_workspace) {
  Layer l({32, 32, 4, 2}, {10, 6});
  const int64_t before = l.run->workspace(0).memory_bytes();
  for (int layer = 0; layer < 64; ++layer) l.run->forward();
  for (int layer = 0; layer < 64; ++layer) l.run->backward();
  EXPECT_EQ(l.run->workspace(0).memory_bytes(), before);
}

TEST(Cases, B4_memory_stays_flat) {
  Layer l({16, 16, 2, 1}, {4, 4});
  l.run->both();
  const int64_t before = l.run->workspace(0).memory_bytes();
  on_ranks_or_throw(2, [&](int r) {
    for (int i = 0; i < 1000; ++i) l.run->workspace(r).forward(l.run->forward_args(r));
    for (int i = 0; i < 200; ++i) l.run->workspace(r).backward(l.run->backward_args(r));
  });
  EXPECT_EQ(l.run->workspace(0).memory_bytes(), before);
}

TEST(Cases, B8_making_and_destroying_is_cheap) {
  const auto start = std::chrono::steady_clock::now();
  auto groups = Group::threads(4);
  on_ranks_or_throw(4, [&](int r) {
    for (int i = 0; i < 20; ++i) {
      Workspace w(*groups[r], {256, 256, 8, 2}, Precision::bf16, {.max_tokens = 4096});
    }
  });
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10);
}

TEST(Cases, B9_leaving_never_waits_for_peers) {
  auto groups = Group::threads(2);
  std::vector<std::unique_ptr<Workspace>> workspaces(2);
  on_ranks_or_throw(2, [&](int r) {
    workspaces[r] = std::make_unique<Workspace>(*groups[r], LayerShape{16, 16, 2, 1},
                                                Precision::bf16, WorkspaceOptions{.max_tokens = 4});
  });
  workspaces[1].reset();
  groups[1].reset();
  workspaces[0].reset();
  groups[0].reset();
}

TEST(Cases, O2_memory_follows_the_formula) {
  auto groups = Group::threads(1);
  const LayerShape shape{1536, 128, 48, 8};
  const Workspace w(*groups[0], shape, Precision::bf16, {.max_tokens = 256});
  // Staging is not needed on one rank; returned rows, and x, d_y, h, g, u, d_g, d_u in the ring.
  const int64_t ring = w.options().ring_rows, slots = 256 * 8;
  const int64_t most = ((slots + 127) / 128 + 49) * 128;
  const double expected = 2.0 * (slots * 1536 + 2 * ring * 1536 + 3 * ring * 128 +
                                 (w.options().saved_rows < most ? 2 * ring * 128 : 0)) +
                          (ring < most ? 4.0 * 3 * 1536 * 128 : 0);
  EXPECT_NEAR(static_cast<double>(w.memory_bytes()) / expected, 1, 0.05);
}

TEST(Cases, O3_five_hundred_set_ups) {
  for (int i = 0; i < 500; ++i) {
    auto groups = Group::threads(2);
    on_ranks_or_throw(2, [&](int r) {
      groups[r]->free_symmetric(groups[r]->allocate_symmetric("block", 1 << 20));
    });
  }
}

}  // namespace
}  // namespace mok::test
