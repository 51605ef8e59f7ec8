// A workspace for each rank, as R processes have them, over memory that the caller gives. Here the
// ranks share GPU 0 and its SMs, half for each.
#include <gtest/gtest.h>

#include <chrono>

#include "gpu/gradients.h"

namespace mok::testing {
namespace {

class TwoWorkspaces {
 public:
  explicit TwoWorkspaces(const LayerSetup& setup)
      : setup_(setup), layer_(setup), backward_(layer_), memory_(0) {
    expected_ = backward_.run();
    cuda::Options options = layer_.setup().options;
    int sms = 0;
    cuda::check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "SMs");
    options.sm_reserve = sms / 2;
    const int64_t bytes = cuda::symmetric_bytes(setup.shape, 2, options);
    constexpr int64_t kAlignment = 1024;
    std::vector<void*> blocks;
    for (int r = 0; r < 2; ++r) {
      auto at = reinterpret_cast<uintptr_t>(memory_.take<std::byte>(bytes + kAlignment));
      blocks.push_back(reinterpret_cast<void*>((at + kAlignment - 1) / kAlignment * kAlignment));
    }
    for (int r = 0; r < 2; ++r) {
      workspace_.push_back(std::make_unique<cuda::Workspace>(
          setup.shape, cuda::SymmetricMemory(r, 0, blocks), options));
    }
    expect_good("at first");  // loads all code: that cannot be done beside a kernel that waits
  }

  cuda::Workspace& operator[](int r) { return *workspace_[r]; }
  BackwardLayer& tensors() { return backward_; }
  void forward(int r) { workspace_[r]->forward({layer_.args()[r]}, {stream_[r].get()}); }
  void backward(int r) { workspace_[r]->backward({backward_.args()[r]}, {stream_[r].get()}); }

  void expect_good(const std::string& what) {
    backward_.poison();
    for (int r = 0; r < 2; ++r) forward(r);
    for (int r = 0; r < 2; ++r) backward(r);
    for (int r = 0; r < 2; ++r) workspace_[r]->synchronize();
    expect_same_bits(expected_, backward_.results(), what);
  }
  void recover() {
    for (int r = 0; r < 2; ++r) workspace_[r]->recover();
  }

 private:
  LayerSetup setup_;
  GpuLayer layer_;
  BackwardLayer backward_;
  Device memory_;
  Stream stream_[2];
  Results expected_;
  std::vector<std::unique_ptr<cuda::Workspace>> workspace_;
};

template <class Call>
std::string expect_error(ErrorCode code, Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

LayerSetup hasty() {
  LayerSetup s = virtual_ranks({200, 133});
  s.options.deadlines = {1, 0.4};
  return s;
}

TEST(GpuSymmetric, same_bits_as_in_one_workspace) {
  TwoWorkspaces two(virtual_ranks({200, 133}));
  for (int i = 0; i < 10; ++i) two.expect_good("round " + std::to_string(i));
}

// Ranks that share a launch have no tall tiles (cuda/tall_consumer.cuh); these have, and push half
// of their rows to the peer. Hidden: so long that d_hidden has them, too.
TEST(GpuSymmetric, an_experts_last_rows) {
  for (const int experts : {2, 8}) {
    LayerSetup setup = virtual_ranks({70, 63});
    setup.shape = shape_of(4096, 384, experts, experts / 2);
    setup.routing = problem::parse_routing("one-expert");
    TwoWorkspaces two(setup);
    for (int i = 0; i < 5; ++i) two.expect_good("round " + std::to_string(i));
  }
}

TEST(GpuSymmetric, a_rank_without_tokens) {
  TwoWorkspaces two(virtual_ranks({0, 133}));
  two.expect_good("no tokens on rank 0");
}

TEST(GpuSymmetric, a_deadline_and_recovery) {
  TwoWorkspaces two(hasty());
  two.forward(0);
  const std::string text = expect_error(ErrorCode::deadline, [&] { two[0].synchronize(); });
  EXPECT_NE(text.find("rank 1, arrived[1]"), std::string::npos) << text;
  const std::string again = expect_error(ErrorCode::aborted, [&] { two.forward(0); });
  EXPECT_NE(again.find("recover"), std::string::npos) << again;
  two.forward(1);  // comes too late
  const std::string late = expect_error(ErrorCode::aborted, [&] { two[1].synchronize(); });
  EXPECT_NE(late.find("rank 0"), std::string::npos) << late;
  two.recover();
  two.expect_good("after recovery");
}

TEST(GpuSymmetric, a_late_rank_finds_its_peers_next_call) {
  TwoWorkspaces two(hasty());
  two.forward(0);
  two.backward(0);  // enqueued before the host knows that forward failed
  const std::string text = expect_error(ErrorCode::deadline, [&] { two[0].synchronize(); });
  EXPECT_NE(text.find("rank 1, arrived[1]"), std::string::npos) << text;
  two.forward(1);  // meets the header of rank 0's backward
  const std::string late = expect_error(ErrorCode::aborted, [&] { two[1].synchronize(); });
  EXPECT_NE(late.find("because rank 0 gave it up"), std::string::npos) << late;
  two.recover();
  two.expect_good("after recovery");
}

TEST(GpuSymmetric, an_abort_ends_the_peers_call) {
  LayerSetup s = virtual_ranks({200, 133});
  s.options.deadlines = {60, 60};
  TwoWorkspaces two(s);
  for (int i = 0; i < 2; ++i) {
    two.tensors().poison();
    two.forward(0);
    const auto begin = std::chrono::steady_clock::now();
    two[1].abort("x has a wrong type");
    const std::string peer = expect_error(ErrorCode::aborted, [&] { two[0].synchronize(); });
    EXPECT_NE(peer.find("rank 1"), std::string::npos) << peer;
    const std::string own = expect_error(ErrorCode::aborted, [&] { two.forward(1); });
    EXPECT_NE(own.find("x has a wrong type"), std::string::npos) << own;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    EXPECT_LT(seconds.count(), 5);
    two.recover();
    two.expect_good("after an abort");
  }
}

TEST(GpuSymmetric, different_calls_are_a_disagreement) {
  TwoWorkspaces two(hasty());
  const auto expect_both = [&](auto&& zero, auto&& one) {
    zero();
    one();
    int disagree = 0;
    for (int r = 0; r < 2; ++r) {
      try {
        two[r].synchronize();
        ADD_FAILURE() << "rank " << r << " saw no error";
      } catch (const Error& e) {
        EXPECT_TRUE(e.code() == ErrorCode::disagreement || e.code() == ErrorCode::aborted)
            << e.what();
        disagree += e.code() == ErrorCode::disagreement;
      }
    }
    EXPECT_GE(disagree, 1);
    two.recover();
    two.expect_good("after a disagreement");
  };
  expect_both([&] { two.forward(0); }, [&] { two.backward(1); });
  expect_both([&] { two.backward(0); },
              [&] {
                two.tensors().modes()[d_up] = GradMode::none;
                two.backward(1);
                two.tensors().modes()[d_up] = GradMode::sum;
              });
}

TEST(GpuSymmetric, a_bad_id_needs_no_recovery) {
  TwoWorkspaces two(virtual_ranks({200, 133}));
  GpuLayer& layer = two.tensors().layer();
  const TokenInputs original = TokenInputs::of(layer);
  TokenInputs bad = original;
  bad.ids[201 * layer.setup().shape.topk] = -7;
  bad.write(layer);
  for (int r = 0; r < 2; ++r) two.forward(r);
  for (int r = 0; r < 2; ++r) {
    const std::string text = expect_error(ErrorCode::bad_routing, [&] { two[r].synchronize(); });
    EXPECT_NE(text.find("rank 1, token 1, slot 0"), std::string::npos) << text;
  }
  original.write(layer);
  two.expect_good("after a bad id");
}

TEST(GpuSymmetric, an_abort_in_one_process) {
  GpuLayer layer(virtual_ranks({200, 133}));
  const auto good = layer.forward();
  layer.workspace().abort("enough");
  const std::string text = expect_error(ErrorCode::aborted, [&] { layer.enqueue(); });
  EXPECT_EQ(text, "enough");
  expect_same_bits(good, layer.forward(), "after an abort");
}

}  // namespace
}  // namespace mok::testing
