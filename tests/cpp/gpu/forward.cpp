// Forward on the GPU: values against the oracle, bits against itself, errors.
#include <gtest/gtest.h>

#include <random>

#include "gpu/checks.h"

namespace mok::testing {
namespace {

void expect_oracle(GpuLayer& layer) { expect_close(layer.forward(), oracle_inputs(layer)); }

struct Case {
  const char* name;
  LayerShape shape;
  std::vector<int64_t> tokens;
  const char* routing = "uniform";
  int64_t ring = 0, minibatch = 512;
  Precision precision = Precision::bf16;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  LayerShape limited = shape_of(256, 192, 8, 2, 128, true);
  limited.swiglu_limit = 0.5f;
  return {
      {"one_token", shape_of(64, 64, 1, 1), {1}},
      {"small", shape_of(128, 128, 4, 2), {100}},
      {"partial_tiles", shape_of(320, 192, 8, 3), {333}},
      {"gpt_oss_like", shape_of(2880, 2880, 8, 4), {200}},
      {"narrow_inter", shape_of(512, 704, 16, 4), {500}},
      {"shared", shape_of(256, 128, 8, 2, 192), {300}},
      {"shared_gated_limit", limited, {300}},
      {"one_expert", shape_of(256, 256, 8, 4), {700}, "one-expert"},
      {"few_rows_in_the_last_tile", shape_of(320, 192, 8, 4, 128), {140}, "one-expert"},
      {"one_row_in_the_last_tile", shape_of(256, 320, 8, 4), {129}, "one-expert"},
      {"few_rows_after_refills", shape_of(256, 128, 4, 2), {1420}, "one-expert", 512, 256},
      {"none", shape_of(256, 256, 8, 4), {100}, "none"},
      {"topk_equals_experts", shape_of(128, 64, 40, 40), {60}},
      {"many_experts", shape_of(128, 64, 1024, 8), {200}},
      {"ring_refills", shape_of(256, 128, 8, 4), {900}, "uniform", 512, 128},
      {"ring_refills_one_expert", shape_of(256, 128, 4, 2), {1500}, "one-expert", 256, 128},
      {"ep2", shape_of(256, 192, 8, 3), {200, 133}},
      {"ep2_shared", shape_of(256, 192, 8, 3, 128, true), {200, 133}},
      {"ep2_zero_tokens", shape_of(256, 192, 8, 3), {0, 133}},
      {"ep2_few_rows", shape_of(320, 192, 8, 4), {70, 63}, "one-expert"},
      {"ep4_uneven", shape_of(192, 128, 8, 2), {1, 300, 0, 77}},
      {"ep8", shape_of(256, 128, 16, 6), {64, 64, 64, 64, 64, 64, 64, 64}},
      {"ep3_refills", shape_of(256, 128, 9, 4), {300, 500, 10}, "zipf:1.2", 768, 128},
  };
}

class Forward : public ::testing::TestWithParam<Case> {
 protected:
  LayerSetup setup() const {
    LayerSetup s;
    s.shape = GetParam().shape;
    s.tokens = GetParam().tokens;
    s.routing = problem::parse_routing(GetParam().routing);
    s.options.precision = GetParam().precision;
    s.options.workspace.ring_rows = GetParam().ring;
    s.options.workspace.minibatch_rows = GetParam().minibatch;
    s.options.deadlines = {20, 10};
    s.seed = std::random_device{}();
    std::cout << "seed " << s.seed << "\n";
    return s;
  }
};

TEST_P(Forward, matches_the_oracle) {
  if (!has_room(GetParam().tokens, GetParam().precision)) GTEST_SKIP() << "needs more GPUs";
  GpuLayer layer(setup());
  expect_oracle(layer);
}

TEST_P(Forward, repeats_bit_for_bit) {
  if (!has_room(GetParam().tokens, GetParam().precision)) GTEST_SKIP() << "needs more GPUs";
  GpuLayer layer(setup());
  const auto first = layer.forward();
  for (int i = 0; i < 5; ++i) expect_same_bits(first, layer.forward(), "repeat");
}

INSTANTIATE_TEST_SUITE_P(Gpu, Forward, ::testing::ValuesIn(in_each_precision(cases())),
                         case_name<Case>);

using GpuForwardBits = InEachPrecision;
INSTANTIATE_TEST_SUITE_P(Gpu, GpuForwardBits, each_precision(), precision_name);

// One problem, split and tuned in every way: the same bits.
TEST_P(GpuForwardBits, same_for_every_ep_and_knob) {
  LayerSetup base;
  base.options.precision = GetParam();
  base.shape = shape_of(512, 320, 24, 6, 128, true);
  base.seed = 11;
  base.options.deadlines = {20, 10};
  base.tokens = {840};
  const auto expected = GpuLayer(base).forward();
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
    expect_same_bits(expected, GpuLayer(s).forward(), "split over " + std::to_string(split.size()));
  }
  struct Knob {
    int64_t ring, minibatch;
    int comm_blocks, sm_reserve;
  };
  for (const Knob& k : {Knob{512, 128, 0, 0}, Knob{256, 128, 1, 0}, Knob{2048, 1024, 3, 0},
                        Knob{0, 4096, 7, 100}, Knob{0, 256, 21, 131}, Knob{1280, 256, 0, 129}}) {
    for (const std::vector<int64_t>& split : {std::vector<int64_t>{840}, {300, 540}}) {
      LayerSetup s = base;
      s.tokens = split;
      s.options.workspace.ring_rows = k.ring;
      s.options.workspace.minibatch_rows = k.minibatch;
      s.options.comm_blocks = k.comm_blocks;
      s.options.sm_reserve = k.sm_reserve;
      expect_same_bits(
          expected, GpuLayer(s).forward(),
          "ring " + std::to_string(k.ring) + ", minibatch " + std::to_string(k.minibatch));
    }
  }
}

// An expert's last rows, computed with the tile before them or, in a minibatch of their own, not.
TEST_P(GpuForwardBits, same_for_an_experts_last_rows) {
  for (const int64_t rows : {129, 136, 143, 144, 145, 260, 384}) {
    LayerSetup s;
    s.options.precision = GetParam();
    s.shape = shape_of(320, 448, 2, 1);
    s.seed = 12;
    s.routing = problem::parse_routing("one-expert");
    s.options.deadlines = {20, 10};
    s.options.workspace.minibatch_rows = 128;
    s.tokens = {rows};
    const auto alone = GpuLayer(s).forward();
    s.options.workspace.minibatch_rows = 4096;
    expect_same_bits(alone, GpuLayer(s).forward(), std::to_string(rows) + " rows");
    s.tokens = {100, rows - 100};
    expect_same_bits(alone, GpuLayer(s).forward(), std::to_string(rows) + " rows, split");
  }
}

TEST(GpuForward, bad_id_is_named_and_the_next_call_works) {
  LayerSetup s;
  s.shape = shape_of(128, 128, 4, 2);
  s.tokens = {50, 60};
  s.options.deadlines = {20, 10};
  GpuLayer layer(s);
  const auto good = layer.forward();
  for (const int64_t bad : {int64_t{4}, int64_t{1} << 40, int64_t{-2}, -(int64_t{1} << 35)}) {
    const auto* ids = static_cast<const int64_t*>(layer.args()[1].topk_ids);
    auto host = download(ids, 120);
    const void* keep = layer.args()[1].topk_ids;
    host[7 * 2 + 1] = bad;
    layer.args()[1].topk_ids = layer.memory(1).put(host);
    layer.poison();
    layer.enqueue();
    try {
      layer.workspace().synchronize();
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_routing);
      const std::string place = "rank 1, token 7, slot 1: id " + std::to_string(bad) + " is";
      EXPECT_NE(std::string(e.what()).find(place), std::string::npos) << e.what();
    }
    for (const bf16 v : layer.y()) ASSERT_TRUE(std::isnan(numerics::to_float(v)));
    layer.args()[1].topk_ids = keep;
    expect_same_bits(good, layer.forward(), "after a bad id");
  }
}

TEST(GpuForward, bad_arguments_are_named) {
  const auto expect_named = [](auto&& call, const std::string& name) {
    try {
      call();
      FAIL() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_argument) << e.what();
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
    }
  };
  LayerSetup s;
  s.shape = shape_of(128, 128, 4, 2);
  s.tokens = {50};
  for (const auto& [shape, name] :
       {std::pair{shape_of(100, 128, 4, 2), "hidden"}, std::pair{shape_of(128, 32, 4, 2), "interm"},
        std::pair{shape_of(128, 128, 4, 2, 65), "shared_intermediate"}}) {
    expect_named([&] { cuda::Workspace(shape, {0}, s.options); }, name);
  }
  GpuLayer layer(s);
  const auto good = layer.forward();
  auto args = layer.args();
  args[0].tokens = 51;
  expect_named([&] { layer.workspace().forward(args, layer.streams()); }, "tokens");
  args = layer.args();
  args[0].x.data = nullptr;
  expect_named([&] { layer.workspace().forward(args, layer.streams()); }, "x");
  expect_same_bits(good, layer.forward(), "after bad arguments");
}

}  // namespace
}  // namespace mok::testing
