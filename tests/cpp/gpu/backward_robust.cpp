// Backward with NaN, Inf and -1 where they must do no harm, under load, in graphs, and when a call
// goes wrong.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <regex>

#include "gpu/gradients.h"
#include "support/foreign_kernel.h"

namespace mok::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- values -------------------------------------------------------------------------------------

class GpuBackwardValues : public InEachPrecision {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuBackwardValues, each_precision(), precision_name);

TEST_P(GpuBackwardValues, zero_and_negative_router_weights) {
  for (const auto& tokens : {std::vector<int64_t>{333}, {200, 133}}) {
    GpuLayer layer(virtual_ranks(tokens));
    BackwardLayer backward(layer);
    TokenInputs in = TokenInputs::of(layer);
    reference::Inputs oracle = backward_inputs(layer);
    for (size_t slot = 0; slot < in.weights.size(); ++slot) {
      if (slot % 3 == 0) in.weights[slot] = slot % 2 ? 0.0f : -0.0f;
      if (slot % 5 == 1) in.weights[slot] = -0.75f;
      oracle.topk_weights[slot] = in.weights[slot];
    }
    in.write(layer);
    backward.expect_close(backward.run(), oracle);
  }
}

TEST_P(GpuBackwardValues, a_slot_that_routes_nowhere) {
  for (const auto& tokens : {std::vector<int64_t>{333}, {200, 133}}) {
    GpuLayer layer(virtual_ranks(tokens));
    BackwardLayer backward(layer);
    const int topk = layer.setup().shape.topk;
    // What peers return for these slots is NaN from this call on.
    const TokenInputs original = TokenInputs::of(layer);
    TokenInputs nan = original;
    for (bf16& v : nan.x) v = numerics::to_bf16(kNaN);
    nan.write(layer);
    backward.run();

    TokenInputs in = original;
    reference::Inputs oracle = backward_inputs(layer);
    for (int64_t slot = 0; slot < static_cast<int64_t>(in.ids.size()); slot += 3) {
      in.ids[slot] = oracle.topk_ids[slot] = -1;
      in.weights[slot] = slot % 2 == 0 ? kNaN : kInf;
      oracle.topk_weights[slot] = 0;
    }
    for (int k = 0; k < topk; ++k) in.ids[100 * topk + k] = oracle.topk_ids[100 * topk + k] = -1;
    in.write(layer);
    const Results r = backward.run();
    backward.expect_close(r, oracle);
    const auto grads = r.as<uint32_t>(d_topk_weights);
    for (size_t slot = 0; slot < grads.size(); ++slot) {
      EXPECT_TRUE(in.ids[slot] >= 0 || grads[slot] == 0) << "slot " << slot;
    }
  }
}

TEST_P(GpuBackwardValues, an_expert_several_times_in_a_token) {
  std::vector<Results> results;
  for (const auto& tokens : {std::vector<int64_t>{333}, {200, 133}, {0, 300, 33}}) {
    GpuLayer layer(virtual_ranks(tokens));
    BackwardLayer backward(layer);
    const LayerShape& s = layer.setup().shape;
    TokenInputs in = TokenInputs::of(layer);
    reference::Inputs oracle = backward_inputs(layer);
    for (int64_t t = 0; t < layer.tokens(); ++t) {
      for (int k = 1; k < s.topk; ++k) {
        const bool twice = t % 3 == 0 ? k == 2 : t % 3 == 1;  // slots 0 and 2; all; none
        if (twice) in.ids[t * s.topk + k] = in.ids[t * s.topk];
        oracle.topk_ids[t * s.topk + k] = in.ids[t * s.topk + k];
      }
    }
    in.write(layer);
    results.push_back(backward.run());
    backward.expect_close(results.back(), oracle);
    expect_same_bits(results[0], results.back(), "ranks " + std::to_string(tokens.size()),
                     Shared::left_out);
  }
}

// NaN in one token's d_y: its own d_x and d_topk_weights, the weights of its experts, no more.
TEST_P(GpuBackwardValues, nan_stays_in_its_token) {
  GpuLayer layer(virtual_ranks({200, 133}));
  BackwardLayer backward(layer);
  const LayerShape& s = layer.setup().shape;
  const Results good = backward.run();
  const TokenInputs in = TokenInputs::of(layer);
  constexpr int64_t kToken = 17;
  const bf16 nan = numerics::to_bf16(kNaN);
  cuda::check(cudaMemcpy(backward.d_y(0) + kToken * s.hidden + 5, &nan, 2, cudaMemcpyDefault),
              "d_y");
  const Results bad = backward.run();
  EXPECT_TRUE(same_bits(good.y, bad.y));
  const auto dx = bad.as<bf16>(d_x), dx_good = good.as<bf16>(d_x);
  const auto dw = bad.as<float>(d_topk_weights), dw_good = good.as<float>(d_topk_weights);
  for (int64_t t = 0; t < layer.tokens(); ++t) {
    if (t == kToken) {
      EXPECT_TRUE(all_nan(&dx[t * s.hidden], s.hidden));
      for (int k = 0; k < s.topk; ++k) EXPECT_TRUE(std::isnan(dw[t * s.topk + k]));
      continue;
    }
    EXPECT_EQ(std::memcmp(&dx[t * s.hidden], &dx_good[t * s.hidden], s.hidden * 2), 0) << t;
    EXPECT_EQ(std::memcmp(&dw[t * s.topk], &dw_good[t * s.topk], s.topk * 4), 0) << t;
  }
  const int64_t each = s.intermediate * s.hidden * 4;
  for (int64_t e = 0; e < s.experts; ++e) {
    const auto* ids = &in.ids[kToken * s.topk];
    if (std::find(ids, ids + s.topk, e) != ids + s.topk) continue;
    for (const int g : {d_gate, d_up, d_down}) {
      EXPECT_EQ(std::memcmp(&bad.grad[g][e * each], &good.grad[g][e * each], each), 0)
          << kGradNames[g] << " of expert " << e;
    }
  }
}

// Every buffer inside is full of NaN after the first call: none may come through.
TEST_P(GpuBackwardValues, nothing_stays_from_a_call_full_of_nan) {
  for (const int64_t ring : {0, 512}) {
    for (const bool keep : {true, false}) {
      LayerSetup s = virtual_ranks({200, 133});
      s.options.workspace.ring_rows = ring;
      s.options.workspace.minibatch_rows = 128;
      s.keep = keep;
      GpuLayer layer(s);
      BackwardLayer backward(layer);
      const TokenInputs original = TokenInputs::of(layer);
      const Results good = backward.run();
      TokenInputs nan = original;
      for (bf16& v : nan.x) v = numerics::to_bf16(kNaN);
      nan.write(layer);
      EXPECT_TRUE(all_are_nan(backward.run().as<bf16>(d_x)));
      original.write(layer);
      expect_same_bits(good, backward.run(), "after NaN everywhere");
    }
  }
}

TEST_P(GpuBackwardValues, inf_in_a_weight_stays_in_its_expert) {
  GpuLayer layer(virtual_ranks({200, 133}));
  BackwardLayer backward(layer);
  const LayerShape& s = layer.setup().shape;
  const TokenInputs in = TokenInputs::of(layer);
  const Results good = backward.run();
  TokenInputs nan = in;  // rows of padding hold what an earlier call left
  for (bf16& v : nan.x) v = numerics::to_bf16(kNaN);
  nan.write(layer);
  backward.run();
  in.write(layer);
  constexpr int kExpert = 14;  // of rank 1, whose third expert it is
  const bf16 inf = numerics::to_bf16(kInf);
  for (const ConstStack* w : {&layer.args()[1].weights.gate, &layer.args()[1].weights.up,
                              &layer.args()[1].weights.down}) {
    auto* to = static_cast<bf16*>(const_cast<void*>(w->data)) + 2 * w->expert_stride;
    cuda::check(cudaMemcpy(to, &inf, sizeof(inf), cudaMemcpyDefault), "weight");
  }
  layer.refresh_weights();
  const Results r = backward.run();
  const auto dx = r.as<bf16>(d_x), dx_good = good.as<bf16>(d_x);
  for (int64_t t = 0; t < layer.tokens(); ++t) {
    const auto* ids = &in.ids[t * s.topk];
    if (std::find(ids, ids + s.topk, kExpert) != ids + s.topk) continue;
    EXPECT_EQ(std::memcmp(&dx[t * s.hidden], &dx_good[t * s.hidden], s.hidden * 2), 0) << t;
  }
  const int64_t each = s.intermediate * s.hidden * 4;
  for (int64_t e = 0; e < s.experts; ++e) {
    if (e == kExpert) continue;
    for (const int g : {d_gate, d_up, d_down}) {
      EXPECT_EQ(std::memcmp(&r.grad[g][e * each], &good.grad[g][e * each], each), 0)
          << kGradNames[g] << " of expert " << e;
    }
  }
}

// ---- repeats ------------------------------------------------------------------------------------

void repeat_under_load(const LayerSetup& setup) {
  GpuLayer layer(setup);
  const Stream stream;
  stream.take(layer);
  BackwardLayer backward(layer);
  const auto run = [&] {
    backward.poison();
    backward.enqueue_both();
    return backward.results();
  };
  const Results expected = run();
  for (const int blocks : {20, 60, 100, 130}) {  // an SM each
    ForeignKernel::Load load;
    load.blocks = blocks;
    load.traffic_bytes = int64_t{256} << 20;
    load.seconds = 60;
    ForeignKernel other(0, load);
    ASSERT_TRUE(other.is_resident(2));
    for (int i = 0; i < 25; ++i) expect_same_bits(expected, run(), "under load");
    EXPECT_TRUE(other.is_running()) << "the load ended early";
    other.stop();
  }
  layer.workspace().synchronize();
}

class GpuBackwardRepeat : public InEachPrecision {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuBackwardRepeat, each_precision(), precision_name);

TEST_P(GpuBackwardRepeat, a_hundred_times_under_load) {
  repeat_under_load(virtual_ranks({500, 340}));
}

TEST_P(GpuBackwardRepeat, a_hundred_times_under_load_with_ring_refills) {
  LayerSetup s = virtual_ranks({840});
  s.options.workspace.ring_rows = 512;
  s.options.workspace.minibatch_rows = 128;
  s.options.workspace.saved_rows = 1000;
  repeat_under_load(s);
}

TEST_P(GpuBackwardRepeat, on_one_sm_for_each_rank) {
  for (const auto& tokens : {std::vector<int64_t>{840}, {200, 133, 0, 500}}) {
    LayerSetup s = virtual_ranks(tokens);
    s.options.workspace.saved_rows = 300;
    GpuLayer layer(s);
    const Stream stream;
    stream.take(layer);
    BackwardLayer backward(layer);
    const auto run = [&] {
      backward.poison();
      backward.enqueue_both();
      return backward.results();
    };
    const Results expected = run();
    ForeignKernel::Load load = ForeignKernel::all_but(0, static_cast<int>(tokens.size()));
    load.seconds = 60;  // tests of other processes may have most of the GPU's time
    ForeignKernel other(0, load);
    ASSERT_TRUE(other.is_resident(2));
    for (int i = 0; i < 2; ++i) {
      expect_same_bits(expected, run(), "beside a neighbour");
      ASSERT_TRUE(other.is_running()) << "the layer waited for its neighbour";
    }
    other.stop();
    layer.workspace().synchronize();
  }
}

TEST_P(GpuBackwardRepeat, replays_of_a_graph) {
  for (const bool keep : {true, false}) {
    LayerSetup s = virtual_ranks({300, 133});
    s.keep = keep;
    GpuLayer layer(s);
    const Stream stream;
    stream.take(layer);
    BackwardLayer backward(layer);
    cudaGraphExec_t exec = nullptr;
    cudaGraph_t graph = nullptr;
    // The first thing that ever runs in the workspace.
    cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
    backward.enqueue_both();
    cuda::check(cudaStreamEndCapture(stream.get(), &graph), "capture");
    cuda::check(cudaGraphInstantiate(&exec, graph, 0), "graph");
    const TokenInputs original = TokenInputs::of(layer);
    for (int i = 0; i < 5; ++i) {
      TokenInputs in = original;
      for (size_t slot = 0; slot < in.ids.size(); ++slot) {
        in.ids[slot] = (in.ids[slot] + i) % s.shape.experts;
        in.weights[slot] *= static_cast<float>(i) - 1;
      }
      in.write(layer);
      backward.poison();
      cuda::check(cudaGraphLaunch(exec, stream.get()), "replay");
      cuda::check(cudaGraphLaunch(exec, stream.get()), "replay");
      const Results replayed = backward.results();
      backward.poison();
      backward.enqueue_both();
      expect_same_bits(replayed, backward.results(), "direct call");
    }
    layer.workspace().synchronize();
    cuda::check(cudaGraphExecDestroy(exec), "graph");
    cuda::check(cudaGraphDestroy(graph), "graph");
  }
}

// ---- errors -------------------------------------------------------------------------------------

TEST(GpuBackwardErrors, a_bad_id) {
  GpuLayer layer(virtual_ranks({50, 60}));
  const LayerShape& s = layer.setup().shape;
  const TokenInputs original = TokenInputs::of(layer);
  TokenInputs bad = original;
  bad.ids[(50 + 7) * s.topk + 1] = s.experts;
  for (const GradMode mode : {GradMode::sum, GradMode::storage, GradMode::accumulate}) {
    BackwardLayer backward(layer, all_modes(mode));
    original.write(layer);
    const Results good = backward.run(3);
    bad.write(layer);
    backward.poison(3);
    backward.enqueue();
    try {
      layer.workspace().synchronize();
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_routing);
      EXPECT_NE(std::string(e.what()).find("rank 1, token 7, slot 1"), std::string::npos)
          << e.what();
    }
    const Results r = backward.results();
    EXPECT_TRUE(all_are_nan(r.as<bf16>(d_x)));
    EXPECT_TRUE(all_are_nan(r.as<float>(d_topk_weights)));
    for (int g = d_gate; g < kGrads; ++g) {
      if (mode == GradMode::accumulate) {
        EXPECT_TRUE(std::ranges::all_of(r.as<float>(g), [](float v) { return v == 3; }))
            << kGradNames[g] << " was touched";
      } else {
        EXPECT_TRUE(mode == GradMode::sum ? all_are_nan(r.as<float>(g))
                                          : all_are_nan(r.as<bf16>(g)))
            << kGradNames[g];
      }
    }
    original.write(layer);
    expect_same_bits(good, backward.run(3), "after a bad id");
  }
}

LayerSetup hasty(const std::vector<int64_t>& tokens) {
  LayerSetup s = virtual_ranks(tokens);
  s.options.deadlines = {1, 0.4};
  return s;
}

// Backward with the fault must fail with a deadline whose text matches.
void expect_fault(BackwardLayer& backward, const cuda::Fault& fault, const std::string& pattern) {
  backward.layer().enqueue();
  backward.layer().workspace().synchronize();
  backward.layer().workspace().inject(fault);
  const auto begin = std::chrono::steady_clock::now();
  try {
    backward.enqueue();
    backward.layer().workspace().synchronize();
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::deadline) << e.what();
    EXPECT_TRUE(std::regex_search(e.what(), std::regex(pattern))) << e.what();
    std::cout << e.what() << "\n";
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(seconds.count(), 5);
}

TEST(GpuBackwardErrors, a_peer_that_never_comes) {
  GpuLayer layer(hasty({200, 0, 133}));
  BackwardLayer backward(layer);
  const Results good = backward.run();
  for (const int rank : {2, 0, 1}) {
    cuda::Fault fault;
    fault.absent_rank = rank;
    const std::string who = std::to_string(rank);
    expect_fault(backward, fault,
                 "^rank [0-2] waited too long in schedule for rank " + who + ", arrived\\[" + who);
    expect_same_bits(good, backward.run(), "after the deadline");
  }
}

TEST(GpuBackwardErrors, a_lost_task) {
  for (const int64_t ring : {0, 512}) {
    for (const auto& tokens : {std::vector<int64_t>{840}, {500, 340}}) {
      LayerSetup s = hasty(tokens);
      s.shape.shared_gate = false;
      s.options.workspace.ring_rows = ring;
      s.options.workspace.minibatch_rows = 128;
      GpuLayer layer(s);
      BackwardLayer backward(layer);
      const Results good = backward.run();
      for (int rank = 0; rank < static_cast<int>(tokens.size()); ++rank) {
        for (const cuda::Fault::Queue queue :
             {cuda::Fault::schedule, cuda::Fault::compute, cuda::Fault::communication}) {
          cuda::Fault fault;
          fault.losing_rank = rank;
          fault.lost = queue;
          expect_fault(backward, fault, "^rank [01] waited too long in [a-z_]+ for ");
          expect_same_bits(good, backward.run(), "after the deadline");
        }
      }
    }
  }
}

}  // namespace
}  // namespace mok::testing
