// Forward under load, over scales of x, with NaN, Inf and -1 where they must do no harm.
#include <gtest/gtest.h>

#include <limits>

#include "gpu/checks.h"
#include "support/foreign_kernel.h"

namespace mok::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class GpuRobust : public InEachPrecision {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuRobust, each_precision(), precision_name);

void repeat_under_load(LayerSetup setup) {
  GpuLayer layer(setup);
  const Stream stream;
  const auto expected = stream.forward(layer);
  EXPECT_FALSE(any_nan(expected.data(), expected.size()));
  int different = 0;
  for (const int blocks : {20, 60, 100, 130}) {  // an SM each
    ForeignKernel::Load load;
    load.blocks = blocks;
    load.traffic_bytes = int64_t{256} << 20;
    ForeignKernel other(0, load);
    ASSERT_TRUE(other.is_resident(2));
    for (int i = 0; i < 25; ++i) different += !same_bits(expected, stream.forward(layer));
    EXPECT_TRUE(other.is_running()) << "the load ended early";
    other.stop();
  }
  layer.workspace().synchronize();
  EXPECT_EQ(different, 0) << "of 100";
}

TEST_P(GpuRobust, hundred_repeats_under_load) { repeat_under_load(virtual_ranks({500, 340})); }

TEST_P(GpuRobust, hundred_repeats_under_load_with_ring_refills) {
  LayerSetup s = virtual_ranks({840});
  s.options.workspace.ring_rows = 512;
  s.options.workspace.minibatch_rows = 128;
  repeat_under_load(s);
}

TEST_P(GpuRobust, scales_of_x) {
  GpuLayer layer(virtual_ranks({200, 133}));
  const TokenInputs original = TokenInputs::of(layer);
  for (const double scale : {0x1p-8, 1.0, 0x1p+6}) {
    TokenInputs scaled = original;
    for (bf16& v : scaled.x) {
      v = numerics::to_bf16(static_cast<float>(numerics::to_float(v) * scale));
    }
    scaled.write(layer);
    reference::Inputs in = oracle_inputs(layer);
    for (double& v : in.x) v *= scale;
    SCOPED_TRACE("scale " + std::to_string(scale));
    expect_close(layer.forward(), in);
  }
}

TEST_P(GpuRobust, nan_stays_in_its_token) {
  GpuLayer layer(virtual_ranks({200, 133}));
  const int64_t h = layer.setup().shape.hidden;
  const auto good = layer.forward();
  TokenInputs in = TokenInputs::of(layer);
  in.x[17 * h + 5] = numerics::to_bf16(kNaN);
  in.x[250 * h + h - 1] = numerics::to_bf16(kNaN);
  in.weights[331 * layer.setup().shape.topk + 1] = kNaN;
  in.write(layer);
  const auto y = layer.forward();
  for (int64_t t = 0; t < layer.tokens(); ++t) {
    if (t == 17 || t == 250 || t == 331) {
      EXPECT_TRUE(all_nan(&y[t * h], h)) << "token " << t;
    } else {
      EXPECT_EQ(std::memcmp(&y[t * h], &good[t * h], h * sizeof(bf16)), 0) << "token " << t;
    }
  }
}

// Every buffer inside is full of NaN after the first call: none may come through.
TEST_P(GpuRobust, nothing_stays_from_a_call_full_of_nan) {
  for (const int64_t ring : {0, 512}) {
    LayerSetup s = virtual_ranks({200, 133});
    s.options.workspace.ring_rows = ring;
    s.options.workspace.minibatch_rows = 128;
    GpuLayer layer(s);
    const TokenInputs original = TokenInputs::of(layer);
    const auto good = layer.forward();
    EXPECT_FALSE(any_nan(good.data(), good.size()));
    TokenInputs nan = original;
    for (bf16& v : nan.x) v = numerics::to_bf16(kNaN);
    nan.write(layer);
    const auto bad = layer.forward();
    EXPECT_TRUE(all_nan(bad.data(), bad.size()));
    original.write(layer);
    expect_same_bits(good, layer.forward(), "after NaN everywhere");
  }
}

TEST_P(GpuRobust, inf_in_a_weight_stays_in_its_expert) {
  GpuLayer layer(virtual_ranks({200, 133}));
  const LayerShape& s = layer.setup().shape;
  const TokenInputs in = TokenInputs::of(layer);
  const auto good = layer.forward();
  // Rows of padding hold what an earlier call left: 0 * Inf, NaN * Inf.
  TokenInputs nan = in;
  for (bf16& v : nan.x) v = numerics::to_bf16(kNaN);
  nan.write(layer);
  layer.forward();
  in.write(layer);
  constexpr int kExpert = 14;  // of rank 1, whose third expert it is
  const bf16 inf = numerics::to_bf16(kInf);
  for (const ConstStack* w : {&layer.args()[1].weights.gate, &layer.args()[1].weights.up,
                              &layer.args()[1].weights.down}) {
    auto* to = static_cast<bf16*>(const_cast<void*>(w->data)) + 2 * w->expert_stride;
    cuda::check(cudaMemcpy(to, &inf, sizeof(inf), cudaMemcpyDefault), "weight");
  }
  layer.refresh_weights();
  const auto y = layer.forward();
  int touched = 0;
  for (int64_t t = 0; t < layer.tokens(); ++t) {
    const auto* ids = &in.ids[t * s.topk];
    if (std::find(ids, ids + s.topk, kExpert) != ids + s.topk) {
      ++touched;
      EXPECT_FALSE(std::isfinite(numerics::to_float(y[t * s.hidden]))) << "token " << t;
    } else {
      EXPECT_EQ(std::memcmp(&y[t * s.hidden], &good[t * s.hidden], s.hidden * sizeof(bf16)), 0)
          << "token " << t;
    }
  }
  EXPECT_GT(touched, 0);
}

TEST_P(GpuRobust, a_slot_that_routes_nowhere_adds_nothing) {
  GpuLayer layer(virtual_ranks({200, 133}));
  const int topk = layer.setup().shape.topk;
  // The rows that peers return for these slots hold NaN from this call on.
  const TokenInputs original = TokenInputs::of(layer);
  TokenInputs nan = original;
  for (bf16& v : nan.x) v = numerics::to_bf16(kNaN);
  nan.write(layer);
  layer.forward();

  TokenInputs in = original;
  reference::Inputs oracle = oracle_inputs(layer);
  for (int64_t slot = 0; slot < static_cast<int64_t>(in.ids.size()); slot += 3) {
    in.ids[slot] = oracle.topk_ids[slot] = -1;
    in.weights[slot] = slot % 2 == 0 ? kNaN : kInf;
    oracle.topk_weights[slot] = 0;
  }
  for (int k = 0; k < topk; ++k) in.ids[100 * topk + k] = oracle.topk_ids[100 * topk + k] = -1;
  in.write(layer);
  expect_close(layer.forward(), oracle);
}

TEST_P(GpuRobust, no_slot_at_all_gives_plus_zero) {
  LayerSetup s = virtual_ranks({100, 33});
  s.shape.shared_intermediate = 0;
  s.shape.shared_gate = false;
  s.routing = problem::parse_routing("none");
  for (const bf16 v : GpuLayer(s).forward()) ASSERT_EQ(v.bits, 0);
}

// Each slot counts, in slot order; a token is fetched once and stored to several rows of an expert.
TEST_P(GpuRobust, an_expert_several_times_in_a_token) {
  std::vector<std::vector<bf16>> results;
  for (const auto& tokens : {std::vector<int64_t>{333}, {200, 133}, {0, 300, 33}}) {
    GpuLayer layer(virtual_ranks(tokens));
    const LayerShape& s = layer.setup().shape;
    TokenInputs in = TokenInputs::of(layer);
    reference::Inputs oracle = oracle_inputs(layer);
    for (int64_t t = 0; t < layer.tokens(); ++t) {
      for (int k = 1; k < s.topk; ++k) {
        const bool twice = t % 3 == 0 ? k == 2 : t % 3 == 1;  // slots 0 and 2; all; none
        if (twice) in.ids[t * s.topk + k] = in.ids[t * s.topk];
        oracle.topk_ids[t * s.topk + k] = in.ids[t * s.topk + k];
      }
    }
    in.write(layer);
    results.push_back(layer.forward());
    expect_close(results.back(), oracle);
    expect_same_bits(results[0], results.back(), "ranks " + std::to_string(tokens.size()));
  }
}

// Calls on two streams and nothing between them: the second comes after the first.
TEST_P(GpuRobust, calls_on_two_streams_are_ordered) {
  GpuLayer layer(virtual_ranks({500, 340}));
  const Stream one, two;
  const auto expected = one.forward(layer);
  for (int i = 0; i < 10; ++i) {
    layer.poison();
    for (int n = 0; n < 10; ++n) {
      (n % 2 == 0 ? one : two).take(layer);
      layer.enqueue();
    }
    layer.workspace().synchronize();
    ASSERT_TRUE(same_bits(expected, layer.y())) << "round " << i;
  }
}

}  // namespace
}  // namespace mok::testing
