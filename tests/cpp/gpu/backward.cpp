// Backward on the GPU: every gradient against the oracle, bits against itself.
#include <gtest/gtest.h>

#include <random>

#include "gpu/gradients.h"

namespace mok::testing {
namespace {

void expect_oracle(const LayerSetup& setup, GradMode mode = GradMode::sum) {
  GpuLayer layer(setup);
  BackwardLayer backward(layer, all_modes(mode));
  backward.expect_close(backward.run(), backward_inputs(layer));
}

TEST(Backward, Smoke) {
  LayerSetup s;
  s.shape = shape_of(256, 192, 4, 2);
  s.tokens = {100};
  s.options.deadlines = {10, 5};
  expect_oracle(s);
}

struct Case {
  const char* name;
  LayerShape shape;
  std::vector<int64_t> tokens;
  const char* routing = "uniform";
  int64_t ring = 0, minibatch = 512, saved_rows = -1;
  bool keep = true;
  Precision precision = Precision::bf16;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  LayerShape limited = shape_of(256, 192, 8, 2, 128, true);
  limited.swiglu_limit = 0.5f;
  LayerShape tall = shape_of(4096, 448, 2, 1);  // d_hidden, too, has tall tiles
  tall.swiglu_limit = 0.5f;
  return {
      {"one_token", shape_of(64, 64, 1, 1), {1}},
      {"small", shape_of(128, 128, 4, 2), {100}},
      {"partial_tiles", shape_of(320, 192, 8, 3), {333}},
      {"gpt_oss_like", shape_of(2880, 2880, 4, 2), {40}},
      {"narrow_inter", shape_of(512, 704, 16, 4), {100}},
      {"wide_inter", shape_of(128, 1536, 4, 2), {200}},
      {"whole_tiles", shape_of(256, 256, 2, 1), {512}, "one-expert"},
      {"one_row_in_the_last_tile", shape_of(4096, 320, 2, 1), {129}, "one-expert"},
      {"few_rows_in_the_last_tile", shape_of(320, 448, 2, 1, 128), {144}, "one-expert"},
      {"few_rows_limited", tall, {140}, "one-expert"},
      {"few_rows_not_saved", shape_of(4096, 384, 2, 1), {272}, "one-expert", 0, 512, 0},
      {"few_rows_after_refills", shape_of(4096, 192, 4, 2), {1420}, "one-expert", 512, 256},
      {"few_rows_after_refills_not_saved",
       shape_of(4096, 192, 4, 2),
       {1420},
       "one-expert",
       512,
       256,
       0},
      {"shared", shape_of(256, 128, 8, 2, 192), {300}},
      {"shared_gated", shape_of(256, 128, 8, 2, 192, true), {300}},
      {"shared_gated_limit", limited, {300}},
      {"shared_not_kept", shape_of(256, 128, 8, 2, 192), {300}, "uniform", 0, 512, -1, false},
      {"shared_gated_not_kept", limited, {300}, "uniform", 0, 512, -1, false},
      {"one_expert", shape_of(256, 256, 8, 4), {700}, "one-expert"},
      {"none", shape_of(256, 256, 8, 4), {100}, "none"},
      {"none_shared", shape_of(256, 128, 8, 4, 64, true), {100}, "none"},
      {"topk_equals_experts", shape_of(128, 64, 40, 40), {60}},
      {"many_experts", shape_of(128, 64, 1024, 8), {200}},
      {"ring_refills", shape_of(256, 128, 8, 4), {900}, "uniform", 512, 128},
      {"carry", shape_of(256, 128, 4, 2), {1500}, "one-expert", 256, 128},
      {"carry_several_experts", shape_of(128, 192, 3, 2), {900}, "zipf:1.2", 512, 256},
      {"nothing_saved", shape_of(256, 192, 8, 3), {333}, "uniform", 0, 128, 0},
      {"rows_saved_in_part", shape_of(256, 192, 8, 3), {333}, "uniform", 0, 128, 500},
      {"refills_nothing_saved", shape_of(256, 128, 8, 4), {900}, "zipf:1.2", 512, 128, 0},
      {"refills_saved_in_part", shape_of(256, 128, 8, 4), {900}, "zipf:1.2", 512, 128, 1000},
      {"ep2", shape_of(256, 192, 8, 3), {200, 133}},
      {"ep2_shared", shape_of(256, 192, 8, 3, 128, true), {200, 133}},
      {"ep2_zero_tokens", shape_of(256, 192, 8, 3), {0, 133}},
      {"ep4_uneven", shape_of(192, 128, 8, 2), {1, 300, 0, 77}},
      {"ep4_one_expert", shape_of(192, 128, 8, 2), {1, 300, 0, 77}, "one-expert"},
      {"ep8", shape_of(256, 128, 16, 6), {64, 64, 64, 64, 64, 64, 64, 64}},
      {"ep3_refills", shape_of(256, 128, 9, 4), {300, 500, 10}, "zipf:1.2", 768, 128, 300},
  };
}

class GpuBackward : public ::testing::TestWithParam<Case> {
 protected:
  LayerSetup setup() const {
    const Case& c = GetParam();
    LayerSetup s;
    s.shape = c.shape;
    s.tokens = c.tokens;
    s.routing = problem::parse_routing(c.routing);
    s.options.precision = c.precision;
    s.options.workspace.ring_rows = c.ring;
    s.options.workspace.minibatch_rows = c.minibatch;
    s.options.workspace.saved_rows = c.saved_rows;
    s.options.deadlines = {20, 10};
    s.keep = c.keep;
    s.seed = std::random_device{}();
    std::cout << "seed " << s.seed << "\n";
    return s;
  }
};

TEST_P(GpuBackward, matches_the_oracle) {
  if (!has_room(GetParam().tokens, GetParam().precision)) GTEST_SKIP() << "needs more GPUs";
  expect_oracle(setup());
}

TEST_P(GpuBackward, repeats_bit_for_bit) {
  if (!has_room(GetParam().tokens, GetParam().precision)) GTEST_SKIP() << "needs more GPUs";
  GpuLayer layer(setup());
  BackwardLayer backward(layer);
  const Results first = backward.run();
  for (int i = 0; i < 5; ++i) expect_same_bits(first, backward.run(), "repeat");
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuBackward, ::testing::ValuesIn(in_each_precision(cases())),
                         case_name<Case>);

using GpuBackwardBits = InEachPrecision;
INSTANTIATE_TEST_SUITE_P(Gpu, GpuBackwardBits, each_precision(), precision_name);

// An expert's last rows, computed with the tile before them or, in a minibatch of their own, not.
TEST_P(GpuBackwardBits, same_for_an_experts_last_rows) {
  for (const int64_t rows : {129, 136, 143, 144, 145, 260, 384}) {
    LayerSetup s;
    s.options.precision = GetParam();
    s.shape = shape_of(4096, 448, 2, 1);
    s.seed = 12;
    s.routing = problem::parse_routing("one-expert");
    s.options.deadlines = {20, 10};
    s.options.workspace.minibatch_rows = 128;
    s.tokens = {rows};
    const Results alone = run_both(s);
    s.options.workspace.minibatch_rows = 4096;
    expect_same_bits(alone, run_both(s), std::to_string(rows) + " rows");
    s.options.workspace.saved_rows = 0;
    expect_same_bits(alone, run_both(s), std::to_string(rows) + " rows, not saved");
    s.options.workspace.saved_rows = -1;
    s.tokens = {100, rows - 100};
    expect_same_bits(alone, run_both(s), std::to_string(rows) + " rows, split");
  }
}

// One problem, split and tuned in every way: the same bits.
TEST_P(GpuBackwardBits, same_for_every_ep_and_knob) {
  LayerSetup base;
  base.options.precision = GetParam();
  base.shape = shape_of(512, 320, 24, 6, 128, true);
  base.seed = 11;
  base.options.deadlines = {20, 10};
  base.tokens = {840};
  const Results expected = run_both(base);
  const std::vector<std::vector<int64_t>> splits = {{420, 420},
                                                    {840, 0},
                                                    {1, 839},
                                                    {280, 280, 280},
                                                    {210, 210, 210, 210},
                                                    {700, 0, 40, 100},
                                                    {105, 105, 105, 105, 105, 105, 105, 105}};
  for (const auto& split : splits) {
    if (!has_room(split, GetParam())) continue;
    LayerSetup s = base;
    s.tokens = split;
    expect_same_bits(expected, run_both(s), "split over " + std::to_string(split.size()),
                     Shared::left_out);
  }
  struct Knob {
    int64_t ring, minibatch, saved_rows;
    int comm_blocks, sm_reserve;
    bool keep = true;
  };
  for (const Knob& k :
       {Knob{512, 128, -1, 0, 0}, Knob{256, 128, -1, 1, 0}, Knob{2048, 1024, -1, 3, 0},
        Knob{0, 4096, -1, 7, 100}, Knob{0, 256, -1, 21, 131}, Knob{1280, 256, -1, 0, 129},
        Knob{0, 4096, 0, 0, 0}, Knob{0, 256, 700, 0, 0}, Knob{512, 128, 1300, 0, 0},
        Knob{256, 128, 0, 0, 131}, Knob{0, 4096, -1, 0, 0, false}, Knob{512, 256, -1, 0, 0, false},
        Knob{0, 4096, 1 << 20, 0, 0, false}}) {
    for (const std::vector<int64_t>& split : {std::vector<int64_t>{840}, {300, 540}}) {
      LayerSetup s = base;
      s.tokens = split;
      s.options.workspace.ring_rows = k.ring;
      s.options.workspace.minibatch_rows = k.minibatch;
      s.options.workspace.saved_rows = k.saved_rows;
      s.options.comm_blocks = k.comm_blocks;
      s.options.sm_reserve = k.sm_reserve;
      s.keep = k.keep;
      expect_same_bits(expected, run_both(s),
                       "ring " + std::to_string(k.ring) + ", minibatch " +
                           std::to_string(k.minibatch) + ", saved " + std::to_string(k.saved_rows) +
                           (k.keep ? "" : ", nothing kept") + ", ranks " +
                           std::to_string(split.size()),
                       split.size() == 1 ? Shared::compared : Shared::left_out);
    }
  }
}

// ---- how weight gradients are delivered ---------------------------------------------------------

class GpuBackwardModes : public InEachPrecision {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuBackwardModes, each_precision(), precision_name);

void expect_one_sum_in_three_ways(const LayerSetup& setup, const std::string& what) {
  GpuLayer layer(setup);
  const Results sum = BackwardLayer(layer).run();
  const Results storage = BackwardLayer(layer, all_modes(GradMode::storage)).run();
  const float before = 256;
  const Results added = BackwardLayer(layer, all_modes(GradMode::accumulate)).run(before);
  for (int g = d_gate; g < kGrads; ++g) {
    const auto exact = sum.as<float>(g), total = added.as<float>(g);
    const auto rounded = storage.as<bf16>(g);
    int wrong = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      wrong += rounded[i].bits != numerics::to_bf16(exact[i]).bits;
      wrong += total[i] != before + exact[i];
    }
    EXPECT_EQ(wrong, 0) << kGradNames[g] << what;
  }
}

// Whatever the steps of a tile (1, 2, 3 and more), its rows (64 or 128) and columns (64 to 256); by
// one rank, whose bf16 results leave by the copy engine, and by two that share a GPU.
TEST_P(GpuBackwardModes, are_one_sum_delivered_in_three_ways) {
  const LayerShape shapes[] = {shape_of(512, 320, 24, 4, 128, true), shape_of(320, 192, 8, 3),
                               shape_of(704, 448, 4, 2)};
  for (const auto& tokens : {std::vector<int64_t>{333}, {200, 133}}) {
    LayerSetup s = virtual_ranks(tokens);
    s.options.workspace.minibatch_rows = 128;
    for (const LayerShape& shape : shapes) {
      s.shape = shape;
      for (const int64_t ring : {0, 512}) {
        s.options.workspace.ring_rows = ring;
        expect_one_sum_in_three_ways(s, ", H " + std::to_string(shape.hidden) + ", ring " +
                                            std::to_string(ring) + ", ranks " +
                                            std::to_string(tokens.size()));
      }
    }
  }
}

// A bf16 accumulator would have no place for 257.
TEST_P(GpuBackwardModes, accumulate_adds_one_to_256) {
  LayerSetup s;
  s.shape = shape_of(64, 64, 1, 1);
  s.tokens = {1};
  s.options.deadlines = {10, 5};
  s.options.precision = GetParam();
  GpuLayer layer(s);
  BackwardLayer backward(layer, all_modes(GradMode::accumulate));
  const ForwardArgs& a = layer.args()[0];
  const auto put = [](const void* to, const auto& values) {
    cuda::check(cudaMemcpy(const_cast<void*>(to), values.data(), values.size() * sizeof(values[0]),
                           cudaMemcpyDefault),
                "inputs");
  };
  // x = e_0, g = 32 = silu(g) in fp32, u = 1/32: h = 1; with d_y = 1 and w = 1 all of d_down is 1.
  const auto bf = [](float v) { return numerics::to_bf16(v); };
  std::vector<bf16> x(64, bf(0)), gate(64 * 64, bf(0)), up(64 * 64, bf(0)), ones(64, bf(1));
  x[0] = bf(1);
  for (int i = 0; i < 64; ++i) {
    gate[i * 64] = bf(32);
    up[i * 64] = bf(1.0f / 32);
  }
  put(a.x.data, x);
  put(a.weights.gate.data, gate);
  put(a.weights.up.data, up);
  layer.refresh_weights();
  put(backward.d_y(0), ones);
  put(a.topk_weights, std::vector<float>{1});
  const Results r = backward.run(256);
  for (const float v : r.as<float>(d_down)) ASSERT_EQ(v, 257);
}

TEST_P(GpuBackwardModes, experts_without_rows_get_plus_zero_or_keep_theirs) {
  for (const auto& tokens : {std::vector<int64_t>{200}, {50, 0, 100, 50}}) {
    LayerSetup s = virtual_ranks(tokens);
    s.routing = problem::parse_routing("one-expert");
    GpuLayer layer(s);
    for (const GradMode mode : {GradMode::sum, GradMode::storage, GradMode::accumulate}) {
      BackwardLayer backward(layer, all_modes(mode));
      const float nan = std::nanf("");
      const Results r = backward.run(nan);  // where nothing is added NaN stays
      const TokenInputs in = TokenInputs::of(layer);
      const int64_t each = s.shape.intermediate * s.shape.hidden;
      int without = 0;
      for (int64_t e = 0; e < s.shape.experts; ++e) {
        if (std::ranges::count(in.ids, e) > 0) continue;
        ++without;
        for (const int g : {d_gate, d_up, d_down}) {
          const int64_t size = each * backward.element_size(g);
          const Bytes part(r.grad[g].begin() + e * size, r.grad[g].begin() + (e + 1) * size);
          if (mode != GradMode::accumulate) {
            EXPECT_TRUE(all_bytes_are(part, 0)) << kGradNames[g] << " of expert " << e;
            continue;
          }
          std::vector<float> values(each);
          std::memcpy(values.data(), part.data(), part.size());
          EXPECT_TRUE(
              std::ranges::all_of(values, [&](float v) { return std::memcmp(&v, &nan, 4) == 0; }))
              << kGradNames[g] << " of expert " << e;
        }
      }
      EXPECT_GT(without, 10);
    }
  }
}

TEST_P(GpuBackwardModes, no_tokens_at_all_give_plus_zero) {
  for (const auto& tokens : {std::vector<int64_t>{0}, {0, 0}}) {
    GpuLayer layer(virtual_ranks(tokens));
    for (const GradMode mode : {GradMode::sum, GradMode::storage}) {
      const Results r = BackwardLayer(layer, all_modes(mode)).run();
      for (int g = d_gate; g < kGrads; ++g) {
        EXPECT_FALSE(r.grad[g].empty());
        EXPECT_TRUE(all_bytes_are(r.grad[g], 0)) << kGradNames[g];
      }
    }
  }
}

// What is not wanted is not touched, and changes nothing else.
TEST_P(GpuBackwardModes, every_gradient_can_be_left_out) {
  for (const int64_t ring : {0, 512}) {
    for (const auto& tokens : {std::vector<int64_t>{333}, {200, 133}}) {
      LayerSetup s = virtual_ranks(tokens);
      s.options.workspace.ring_rows = ring;
      s.options.workspace.minibatch_rows = 128;
      GpuLayer layer(s);
      const Results all = BackwardLayer(layer).run();
      std::vector<uint32_t> sets = {0, 1u << d_gate | 1u << d_up, 1u << d_x | 1u << d_topk_weights,
                                    (1u << kGrads) - 1};
      for (int g = 0; g < kGrads; ++g) {
        sets.push_back(1u << g);
        sets.push_back(((1u << kGrads) - 1) & ~(1u << g));
      }
      for (const uint32_t wanted : sets) {
        SCOPED_TRACE("wanted " + std::to_string(wanted) + ", ring " + std::to_string(ring));
        Modes modes;
        for (int g = 0; g < kGrads; ++g) {
          modes[g] = wanted >> g & 1 ? GradMode::sum : GradMode::none;
        }
        const Results some = BackwardLayer(layer, modes).run();
        for (int g = 0; g < kGrads; ++g) {
          if (wanted >> g & 1) {
            EXPECT_TRUE(some.grad[g] == all.grad[g]) << kGradNames[g];
          } else {
            EXPECT_TRUE(all_bytes_are(some.grad[g], 0xff)) << kGradNames[g] << " was written";
          }
        }
      }
    }
  }
}

TEST_P(GpuBackwardModes, one_mode_for_each_gradient) {
  GpuLayer layer(virtual_ranks({200, 133}));
  const Results sum = BackwardLayer(layer).run();
  Modes modes;
  for (int g = 0; g < kGrads; ++g) {
    modes[g] = std::array{GradMode::sum, GradMode::storage, GradMode::accumulate}[g % 3];
  }
  modes[d_x] = modes[d_topk_weights] = GradMode::sum;
  const Results mixed = BackwardLayer(layer, modes).run(1);
  for (int g = d_gate; g < kGrads; ++g) {
    const auto exact = sum.as<float>(g);
    int wrong = 0;
    if (modes[g] == GradMode::storage) {
      const auto rounded = mixed.as<bf16>(g);
      for (size_t i = 0; i < exact.size(); ++i) {
        wrong += rounded[i].bits != numerics::to_bf16(exact[i]).bits;
      }
    } else {
      const auto values = mixed.as<float>(g);
      const float before = modes[g] == GradMode::accumulate ? 1.0f : 0.0f;
      for (size_t i = 0; i < exact.size(); ++i) wrong += values[i] != before + exact[i];
    }
    EXPECT_EQ(wrong, 0) << kGradNames[g];
  }
}

// ---- calls --------------------------------------------------------------------------------------

class GpuBackwardCalls : public InEachPrecision {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuBackwardCalls, each_precision(), precision_name);

// Several forwards, then their backwards in any order, in one workspace.
TEST_P(GpuBackwardCalls, micro_batches_in_any_order) {
  for (const int64_t saved : {-1, 300}) {
    std::vector<std::unique_ptr<GpuLayer>> layers;
    std::vector<std::unique_ptr<BackwardLayer>> backwards;
    std::vector<Results> expected;
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      LayerSetup s = virtual_ranks({200, 133});
      s.options.workspace.saved_rows = saved;
      s.seed = seed;
      layers.push_back(std::make_unique<GpuLayer>(s));
      backwards.push_back(std::make_unique<BackwardLayer>(*layers.back()));
      expected.push_back(backwards.back()->run());
    }
    cuda::Workspace& one = layers[0]->workspace();
    for (std::vector<int> order = {0, 1, 2};;) {
      for (const auto& b : backwards) b->poison();
      for (const auto& l : layers) one.forward(l->args(), l->streams());
      for (const int i : order) one.backward(backwards[i]->args(), layers[i]->streams());
      one.synchronize();
      for (int i = 0; i < 3; ++i) {
        expect_same_bits(expected[i], backwards[i]->results(), "micro-batch");
      }
      if (!std::ranges::next_permutation(order).found) break;
    }
  }
}

// Forward of the next step before backward of this one's twin: nothing inside is kept for it.
TEST_P(GpuBackwardCalls, backward_twice_gives_the_same_bits) {
  GpuLayer layer(virtual_ranks({200, 133}));
  BackwardLayer backward(layer);
  const Results first = backward.run();
  for (int i = 0; i < 3; ++i) {
    backward.poison();
    layer.enqueue();
    layer.enqueue();
    backward.enqueue();
    layer.enqueue();
    backward.enqueue();
    layer.workspace().synchronize();
    expect_same_bits(first, backward.results(), "again");
  }
}

TEST_P(GpuBackwardCalls, ids_of_32_bits) {
  GpuLayer layer(virtual_ranks({200, 133}));
  BackwardLayer backward(layer);
  const Results expected = backward.run();
  for (size_t r = 0; r < layer.args().size(); ++r) {
    ForwardArgs& a = layer.args()[r];
    const auto wide =
        download(static_cast<const int64_t*>(a.topk_ids), a.tokens * layer.setup().shape.topk);
    a.topk_ids =
        layer.memory(static_cast<int>(r)).put(std::vector<int32_t>(wide.begin(), wide.end()));
    a.id_type = IdType::int32;
  }
  expect_same_bits(expected, backward.run(), "int32");
}

// Gate and up as halves of one tensor, gradients as halves of one, rows wider than needed.
TEST_P(GpuBackwardCalls, strided_views) {
  LayerSetup s = virtual_ranks({333});
  GpuLayer layer(s);
  BackwardLayer backward(layer);
  const Results expected = backward.run();
  const int64_t h = s.shape.hidden, i = s.shape.intermediate, e = s.shape.experts, wide = h + 64;
  Device& d = layer.memory(0);
  ForwardArgs& f = layer.args()[0];
  auto* both = d.take<bf16>(e * 2 * i * h);
  for (int64_t n = 0; n < e; ++n) {
    const auto copy = [&](int64_t to, const void* from) {
      cuda::check(cudaMemcpy(both + to, static_cast<const bf16*>(from) + n * i * h, i * h * 2,
                             cudaMemcpyDefault),
                  "weights");
    };
    copy(n * 2 * i * h, f.weights.gate.data);
    copy(n * 2 * i * h + i * h, f.weights.up.data);
  }
  f.weights.gate = {both, 2 * i * h, h};
  f.weights.up = {both + i * h, 2 * i * h, h};
  layer.refresh_weights();
  const auto widened = [&](const void* from) {
    auto* to = d.take<bf16>(333 * wide);
    cuda::check(cudaMemcpy2D(to, wide * 2, from, h * 2, h * 2, 333, cudaMemcpyDefault), "rows");
    return to;
  };
  f.x = {widened(f.x.data), wide};
  BackwardArgs a = backward.args()[0];
  a.d_y = {widened(a.d_y.data), wide};
  auto* d_x_wide = d.take<bf16>(333 * wide);
  a.d_x = {d_x_wide, wide};
  auto* d_both = d.take<float>(e * 2 * i * h);
  a.d_gate.target = {d_both, 2 * i * h, h};
  a.d_up.target = {d_both + i * h, 2 * i * h, h};
  backward.poison();
  layer.enqueue();
  layer.workspace().backward({a}, layer.streams());
  layer.workspace().synchronize();
  Results r = backward.results();
  cuda::check(
      cudaMemcpy2D(r.grad[d_x].data(), h * 2, d_x_wide, wide * 2, h * 2, 333, cudaMemcpyDefault),
      "rows");
  const auto grads = download(d_both, e * 2 * i * h);
  for (int64_t n = 0; n < e; ++n) {
    std::memcpy(r.grad[d_gate].data() + n * i * h * 4, &grads[n * 2 * i * h], i * h * 4);
    std::memcpy(r.grad[d_up].data() + n * i * h * 4, &grads[n * 2 * i * h + i * h], i * h * 4);
  }
  expect_same_bits(expected, r, "strided");
  const auto rows = download(d_x_wide, 333 * wide);
  for (int64_t t = 0; t < 333; ++t) {
    for (int64_t c = h; c < wide; ++c) ASSERT_EQ(rows[t * wide + c].bits, 0xffff) << "row " << t;
  }
}

TEST_P(GpuBackwardCalls, bad_arguments_are_named) {
  GpuLayer layer(virtual_ranks({50, 60}));
  BackwardLayer backward(layer);
  const Results good = backward.run();
  const auto expect_named = [&](const std::string& name, auto&& change,
                                ErrorCode code = ErrorCode::bad_argument) {
    auto args = backward.args();
    change(args[1]);
    try {
      layer.workspace().backward(args, layer.streams());
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("rank 1"), std::string::npos) << e.what();
    }
  };
  expect_named("tokens", [](BackwardArgs& a) { a.tokens = -1; });
  expect_named("d_y is null", [](BackwardArgs& a) { a.d_y.data = nullptr; });
  expect_named("d_x", [](BackwardArgs& a) { a.d_x.row_stride = 100; });
  expect_named("d_x", [](BackwardArgs& a) { a.d_x.data = static_cast<bf16*>(a.d_x.data) + 1; });
  expect_named("d_gate is null", [](BackwardArgs& a) { a.d_gate.target.data = nullptr; });
  expect_named("d_up.row_stride", [](BackwardArgs& a) { a.d_up.target.row_stride = 2; });
  expect_named("d_down.expert_stride", [](BackwardArgs& a) { a.d_down.target.expert_stride = 8; });
  expect_named("d_down.mode", [](BackwardArgs& a) { a.d_down.mode = static_cast<GradMode>(9); });
  expect_named("saved.gate, saved.up", [](BackwardArgs& a) { a.saved.up = nullptr; });
  expect_named("saved.shared_gate", [](BackwardArgs& a) { a.saved.shared_gate = nullptr; });
  expect_named(
      "d_up", [](BackwardArgs& a) { a.d_up.mode = GradMode::none; }, ErrorCode::disagreement);
  expect_named("d_x", [](BackwardArgs& a) { a.d_x.data = nullptr; }, ErrorCode::disagreement);
  expect_same_bits(good, backward.run(), "after bad arguments");
}

}  // namespace
}  // namespace mok::testing
