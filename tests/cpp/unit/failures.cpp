// What goes wrong on one rank is an error on all of them, nothing is written, and the next call
// works.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "cpu/faults.h"
#include "support/layer_run.h"

namespace mok::test {
namespace {

using problem::Problem;
using std::chrono::steady_clock;

const LayerShape kShape{32, 24, 4, 2, 16, true};

bool says(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

class Failures : public testing::Test {
 protected:
  Failures() { make({60, 30}); }
  void make(GroupOptions group, std::vector<int64_t> tokens = {20, 30, 10}) {
    run_.reset();
    problem_.emplace(LayerShape{32, 24, 6, 2, 16, true}, 60, problem::Routing{}, 11);
    options_.tokens = std::move(tokens);
    options_.group = group;
    run_.emplace(*problem_, options_);
    run_->both();
    good_ = run_->all_outputs();
    run_->poison_outputs();
    poison_ = run_->all_outputs();
  }
  void expect_all_is_well() {
    run_->poison_outputs();
    run_->both();
    EXPECT_EQ(run_->all_outputs(), good_);
    run_->poison_outputs();
  }
  void expect_nothing_written() { EXPECT_EQ(run_->all_outputs(), poison_); }

  template <class Change>
  std::vector<std::optional<Error>> forward(int who, Change&& change) {
    return on_ranks(run_->ranks(), [&](int r) {
      ForwardArgs a = run_->forward_args(r);
      if (r == who) change(a);
      run_->workspace(r).forward(a);
    });
  }
  template <class Change>
  std::vector<std::optional<Error>> backward(int who, Change&& change) {
    return on_ranks(run_->ranks(), [&](int r) {
      BackwardArgs a = run_->backward_args(r);
      if (r == who) change(a);
      run_->workspace(r).backward(a);
    });
  }
  // Rank `who` has `code`, the others are told its message.
  void expect_told(const std::vector<std::optional<Error>>& errors, int who,
                   const std::string& argument) {
    for (size_t r = 0; r < errors.size(); ++r) {
      ASSERT_TRUE(errors[r]) << "rank " << r;
      EXPECT_TRUE(says(*errors[r], argument)) << errors[r]->what();
      EXPECT_TRUE(says(*errors[r], "rank " + std::to_string(who))) << errors[r]->what();
      EXPECT_EQ(errors[r]->code(),
                static_cast<int>(r) == who ? ErrorCode::bad_argument : ErrorCode::aborted);
    }
    expect_nothing_written();
  }

  std::optional<Problem> problem_;
  RunOptions options_;
  std::optional<LayerRun> run_;
  Bytes good_, poison_;
};

TEST_F(Failures, BadForwardArgumentsAreNamedOnEveryRank) {
  const auto expect = [&](const std::string& name, auto&& change) {
    expect_told(forward(1, change), 1, name);
  };
  expect("tokens", [](ForwardArgs& a) { a.tokens = -1; });
  expect("tokens", [](ForwardArgs& a) { a.tokens = 31; });
  expect("x is null", [](ForwardArgs& a) { a.x.data = nullptr; });
  expect("x.row_stride", [](ForwardArgs& a) { a.x.row_stride = 31; });
  expect("topk_ids", [](ForwardArgs& a) { a.topk_ids = nullptr; });
  expect("topk_weights", [](ForwardArgs& a) { a.topk_weights = nullptr; });
  expect("weights.gate", [](ForwardArgs& a) { a.weights.gate.data = nullptr; });
  expect("weights.up.row_stride", [](ForwardArgs& a) { a.weights.up.row_stride = 1; });
  expect("weights.shared_gate_vector",
         [](ForwardArgs& a) { a.weights.shared_gate_vector = nullptr; });
  expect("weights.shared_down_proj", [](ForwardArgs& a) { a.weights.shared_down_proj = {}; });
  expect("saved.gate", [](ForwardArgs& a) { a.saved.up = nullptr; });
  expect("y is null", [](ForwardArgs& a) { a.y.data = nullptr; });
  expect_all_is_well();
}

TEST_F(Failures, BadBackwardArgumentsAreNamedOnEveryRank) {
  run_->forward();
  poison_ = run_->all_outputs();
  const auto expect = [&](const std::string& name, auto&& change) {
    expect_told(backward(2, change), 2, name);
  };
  expect("d_y", [](BackwardArgs& a) { a.d_y = {}; });
  expect("d_x.row_stride", [](BackwardArgs& a) { a.d_x.row_stride = 2; });
  expect("d_gate", [](BackwardArgs& a) { a.d_gate.target.data = nullptr; });
  expect("d_down.mode", [](BackwardArgs& a) { a.d_down.mode = static_cast<GradMode>(9); });
  expect("d_shared_up_proj.row_stride",
         [](BackwardArgs& a) { a.d_shared_up_proj.target.row_stride = 3; });
  expect_all_is_well();
}

TEST_F(Failures, ManyFailedCallsInARowOnOneRank) {
  // The others meet all of them, one by one, however far ahead the failing rank is.
  const auto errors = on_ranks(3, [&](int r) {
    int failed = 0;
    for (int i = 0; i < 20; ++i) {
      ForwardArgs a = run_->forward_args(r);
      if (r == 0) a.x.row_stride = 1;
      try {
        run_->workspace(r).forward(a);
      } catch (const Error&) {
        ++failed;
      }
    }
    if (failed != 20) throw Error(ErrorCode::internal, std::to_string(failed) + " failed");
  });
  for (const auto& e : errors) EXPECT_FALSE(e) << e->what();
  expect_all_is_well();
}

TEST_F(Failures, DifferentDirectionsAreADisagreement) {
  const auto errors = on_ranks(3, [&](int r) {
    if (r == 1) {
      run_->workspace(r).backward(run_->backward_args(r));
    } else {
      run_->workspace(r).forward(run_->forward_args(r));
    }
  });
  for (const auto& e : errors) {
    ASSERT_TRUE(e);
    EXPECT_EQ(e->code(), ErrorCode::disagreement);
    EXPECT_TRUE(says(*e, "direction is forward on rank 0 and backward on rank 1")) << e->what();
  }
  expect_nothing_written();
  expect_all_is_well();
}

TEST_F(Failures, DifferentWantedGradientsAreADisagreement) {
  run_->forward();
  poison_ = run_->all_outputs();
  const auto errors = backward(1, [](BackwardArgs& a) { a.d_gate = {}; });
  for (const auto& e : errors) {
    ASSERT_TRUE(e);
    EXPECT_EQ(e->code(), ErrorCode::disagreement);
    EXPECT_TRUE(says(*e, "rank 1") && says(*e, "d_gate")) << e->what();
  }
  expect_nothing_written();
  expect_all_is_well();
}

TEST_F(Failures, ARankWithoutTokensHasNoOpinionOnEmptyGradients) {
  make({60, 30}, {0, 60, 0});
  run_->forward();
  on_ranks_or_throw(3, [&](int r) {
    BackwardArgs a = run_->backward_args(r);
    EXPECT_EQ(a.d_x.data == nullptr, r != 1);
    run_->workspace(r).backward(a);
  });
  EXPECT_EQ(run_->all_outputs(), good_);
}

TEST(SetUp, DifferentShapesAreADisagreementThatNamesTheField) {
  auto groups = Group::threads(2, {20, 20});
  const auto expect = [&](const std::string& field, auto&& change) {
    const auto errors = on_ranks(2, [&](int r) {
      LayerShape shape = kShape;
      WorkspaceOptions options{.max_tokens = 8};
      Precision precision = Precision::bf16;
      if (r == 1) change(shape, precision, options);
      Workspace w(*groups[r], shape, precision, options);
    });
    for (const auto& e : errors) {
      ASSERT_TRUE(e);
      EXPECT_EQ(e->code(), ErrorCode::disagreement) << e->what();
      EXPECT_TRUE(says(*e, field) && says(*e, "rank 1")) << e->what();
    }
  };
  using S = LayerShape;
  using P = Precision;
  using W = WorkspaceOptions;
  expect("hidden", [](S& s, P&, W&) { s.hidden = 64; });
  expect("intermediate", [](S& s, P&, W&) { s.intermediate = 25; });
  expect("experts", [](S& s, P&, W&) { s.experts = 6; });
  expect("topk", [](S& s, P&, W&) { s.topk = 1; });
  expect("shared_gate", [](S& s, P&, W&) { s.shared_gate = false; });
  expect("swiglu_limit", [](S& s, P&, W&) { s.swiglu_limit = 7; });
  expect("precision", [](S&, P& p, W&) { p = Precision::fp32; });
  expect("max_tokens", [](S&, P&, W& w) { w.max_tokens = 9; });
  on_ranks_or_throw(2, [&](int r) {  // the group works on
    Workspace w(*groups[r], kShape, Precision::bf16, {.max_tokens = 8});
  });
}

TEST(SetUp, BadShapesAndOptionsAreNamedOnEveryRank) {
  auto groups = Group::threads(2, {20, 20});
  const auto expect = [&](const std::string& field, auto&& change) {
    const auto errors = on_ranks(2, [&](int r) {
      LayerShape shape = kShape;
      WorkspaceOptions options{.max_tokens = 8};
      if (r == 1) change(shape, options);
      Workspace w(*groups[r], shape, Precision::bf16, options);
    });
    for (int r = 0; r < 2; ++r) {
      ASSERT_TRUE(errors[r]) << field;
      EXPECT_EQ(errors[r]->code(), r == 1 ? ErrorCode::bad_argument : ErrorCode::aborted);
      EXPECT_TRUE(says(*errors[r], field) && says(*errors[r], "rank 1")) << errors[r]->what();
    }
  };
  using S = LayerShape;
  using W = WorkspaceOptions;
  expect("hidden", [](S& s, W&) { s.hidden = 0; });
  expect("intermediate", [](S& s, W&) { s.intermediate = -5; });
  expect("experts", [](S& s, W&) { s.experts = 5; });
  expect("experts", [](S& s, W&) { s.experts = 4098; });
  expect("topk", [](S& s, W&) { s.topk = 5; });
  expect("topk", [](S& s, W&) { s.topk = 0; });
  expect("shared_gate", [](S& s, W&) { s.shared_intermediate = 0; });
  expect("swiglu_limit", [](S& s, W&) { s.swiglu_limit = 0; });
  expect("swiglu_limit", [](S& s, W&) { s.swiglu_limit = std::nanf(""); });
  expect("max_tokens", [](S&, W& w) { w.max_tokens = -1; });
  expect("max_tokens", [](S&, W& w) { w.max_tokens = int64_t{1} << 30; });
  expect("ring_rows", [](S&, W& w) { w.ring_rows = -1; });
  expect("minibatch_rows", [](S&, W& w) { w.minibatch_rows = 0; });
  expect("saved_rows", [](S&, W& w) { w.saved_rows = -2; });
  expect("compute_workers", [](S&, W& w) { w.compute_workers = -1; });
  expect("comm_workers", [](S&, W& w) { w.comm_workers = 0; });
}

// ---- time ---------------------------------------------------------------------------------------

TEST_F(Failures, APeerThatDoesNotArriveIsADeadlineForAllAndLaterCallsWork) {
  make({0.3, 30});
  const auto start = steady_clock::now();
  const auto errors = on_ranks(3, [&](int r) {
    if (r != 2) run_->workspace(r).forward(run_->forward_args(r));
  });
  EXPECT_LT(std::chrono::duration<double>(steady_clock::now() - start).count(), 5);
  for (const int r : {0, 1}) {
    ASSERT_TRUE(errors[r]);
    EXPECT_EQ(errors[r]->code(), ErrorCode::deadline);
    EXPECT_TRUE(says(*errors[r], "for rank 2 to arrive") && says(*errors[r], "forward"))
        << errors[r]->what();
  }
  // The late rank hears of it; then all of them are in step again.
  try {
    run_->workspace(2).forward(run_->forward_args(2));
    FAIL() << "the call had failed on the others";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::deadline) << e.what();
  }
  expect_nothing_written();
  expect_all_is_well();
}

class Planted : public Failures {
 protected:
  ~Planted() override { cpu::planted_fault = nullptr; }
};

TEST_F(Planted, AMissingSignalIsADeadlineThatNamesTheCounter) {
  make({30, 0.4});
  for (const plan::TaskKind kind :
       {plan::TaskKind::stage, plan::TaskKind::announce_staged, plan::TaskKind::fetch,
        plan::TaskKind::gate_up, plan::TaskKind::down, plan::TaskKind::announce_returned,
        plan::TaskKind::shared_gate_up, plan::TaskKind::sigma}) {
    const cpu::Fault fault{1, kind};
    cpu::planted_fault = &fault;
    const auto errors = forward(-1, [](ForwardArgs&) {});
    cpu::planted_fault = nullptr;
    for (const auto& e : errors) {
      ASSERT_TRUE(e) << plan::to_string(kind);
      EXPECT_EQ(e->code(), ErrorCode::deadline) << e->what();
      EXPECT_TRUE(says(*e, "no progress for 0.4 s in call") && says(*e, "(forward): rank ") &&
                  says(*e, "waits for") && says(*e, "counter ") && says(*e, "value seen ") &&
                  says(*e, "awaited "))
          << e->what();
    }
    expect_all_is_well();
  }
}

TEST_F(Planted, AMissingSignalInBackwardIsADeadlineToo) {
  make({30, 0.4});
  for (const plan::TaskKind kind :
       {plan::TaskKind::d_hidden, plan::TaskKind::d_input, plan::TaskKind::router_grad,
        plan::TaskKind::shared_d_hidden, plan::TaskKind::shared_d_input}) {
    run_->forward();
    const cpu::Fault fault{2, kind};
    cpu::planted_fault = &fault;
    const auto errors = backward(-1, [](BackwardArgs&) {});
    cpu::planted_fault = nullptr;
    for (const auto& e : errors) {
      ASSERT_TRUE(e) << plan::to_string(kind);
      EXPECT_EQ(e->code(), ErrorCode::deadline) << e->what();
      EXPECT_TRUE(says(*e, "(backward)")) << e->what();
    }
    expect_all_is_well();
  }
}

TEST_F(Planted, ATaskThatThrowsIsAnErrorOnEveryRank) {
  const cpu::Fault fault{0, plan::TaskKind::down, cpu::Fault::What::fail};
  cpu::planted_fault = &fault;
  const auto errors = forward(-1, [](ForwardArgs&) {});
  cpu::planted_fault = nullptr;
  for (const auto& e : errors) {
    ASSERT_TRUE(e);
    EXPECT_TRUE(says(*e, "planted fault in down")) << e->what();
  }
  expect_all_is_well();
}

TEST_F(Planted, ASlowRankIsNoDeadlineWhileItMakesProgress) {
  make({30, 0.5});
  const cpu::Fault fault{1, plan::TaskKind::gate_up, cpu::Fault::What::sleep, 0.2};
  cpu::planted_fault = &fault;
  run_->forward();  // several tasks of 0.2 s; the others wait longer than 0.5 s in all
  cpu::planted_fault = nullptr;
  expect_all_is_well();
}

// ---- leaving ------------------------------------------------------------------------------------

TEST_F(Failures, ARankThatLeavesMakesTheOthersRaise) {
  const auto errors = on_ranks(3, [&](int r) {
    if (r == 1) {
      run_->destroy(r);
    } else {
      run_->workspace(r).forward(run_->forward_args(r));
    }
  });
  EXPECT_FALSE(errors[1]);
  for (const int r : {0, 2}) {
    ASSERT_TRUE(errors[r]);
    EXPECT_EQ(errors[r]->code(), ErrorCode::aborted);
    EXPECT_TRUE(says(*errors[r], "rank 1")) << errors[r]->what();
  }
}

TEST_F(Failures, ARankThatHasFinishedMayLeaveAtOnce) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    LayerRun run(*problem_, options_);
    on_ranks_or_throw(3, [&](int r) {
      run.workspace(r).forward(run.forward_args(r));
      run.workspace(r).backward(run.backward_args(r));
      run.destroy(r);
    });
    EXPECT_EQ(run.all_outputs(), good_);
  }
}

// ---- ids ----------------------------------------------------------------------------------------

TEST_F(Failures, BadIdsAreNamedOnEveryRankWithTheirOwnValue) {
  const auto expect = [&](int64_t id) {
    auto& ids = run_->rank(1).ids;
    int64_t old;
    std::memcpy(&old, &ids[8 * (7 * 2 + 1)], 8);
    std::memcpy(&ids[8 * (7 * 2 + 1)], &id, 8);
    const auto errors = forward(-1, [](ForwardArgs&) {});
    std::memcpy(&ids[8 * (7 * 2 + 1)], &old, 8);
    for (const auto& e : errors) {
      ASSERT_TRUE(e);
      EXPECT_EQ(e->code(), ErrorCode::bad_routing);
      EXPECT_TRUE(says(*e, "rank 1, token 7, slot 1: expert id " + std::to_string(id) + " "))
          << e->what();
    }
    expect_nothing_written();
  };
  for (const int64_t id :
       {int64_t{6}, int64_t{-2}, int64_t{1} << 30, -(int64_t{1} << 31), int64_t{1} << 32,
        (int64_t{1} << 32) + 1, std::numeric_limits<int64_t>::min()}) {
    expect(id);
  }
  expect_all_is_well();
}

}  // namespace
}  // namespace mok::test
