// Precisions mxfp8 and fp8: the conversion of weights, the wire, and the layer against the oracle,
// which quantises by a formula of its own.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "mok/quantize.h"
#include "numerics/blocks.h"
#include "plan/layout.h"
#include "plan/sizing.h"
#include "problem/compare.h"
#include "support/layer_case.h"

namespace mok::test {
namespace {

using numerics::bf16;
using numerics::to_bf16;
using numerics::to_float;

constexpr float kInf = std::numeric_limits<float>::infinity();

const char* name(Precision p) { return p == Precision::mxfp8 ? "mxfp8" : "fp8"; }

class Quantized : public testing::TestWithParam<Precision> {};
INSTANTIATE_TEST_SUITE_P(Precisions, Quantized, testing::Values(Precision::mxfp8, Precision::fp8),
                         [](const auto& p) { return name(p.param); });

// ---- weights ------------------------------------------------------------------------------------

// Values over 40 powers of two, with a zero block, a NaN and an infinity.
std::vector<bf16> wide_values(int64_t n) {
  const problem::Stream random(5, 0);
  std::vector<bf16> v(n);
  for (int64_t i = 0; i < n; ++i) {
    const double size = std::exp2(-20 + 40 * random.uniform(2 * i));
    v[i] = to_bf16(random.uniform(2 * i + 1) < 0.5 ? -size : size);
  }
  for (int64_t i = 0; i < std::min<int64_t>(n, 70); ++i) v[i] = bf16{0};
  if (n > 5000) {
    v[n / 2] = to_bf16(std::nanf(""));
    v[n / 3] = to_bf16(kInf);
    v[n / 4] = bf16{0x7f7f};  // the largest
  }
  return v;
}

void expect_values(const std::vector<bf16>& got, const std::vector<double>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double value = to_float(got[i]);
    ASSERT_TRUE(value == wanted[i] || (std::isnan(value) && std::isnan(wanted[i])))
        << i << ": " << value << ", not " << wanted[i];
  }
}

TEST_P(Quantized, WeightsAreTheOraclesBothWays) {
  const Precision p = GetParam();
  const int64_t across = p == Precision::fp8 ? 128 : 1, length = block_size(p);
  for (const auto& [rows, columns] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {5, 33}, {130, 95}, {257, 300}}) {
    constexpr int64_t kCount = 2;
    const int64_t stride = columns + 3, size = rows * columns, apart = rows * stride + 8;
    const std::vector<bf16> values = wide_values(kCount * apart);
    std::vector<uint8_t> codes(kCount * size), codes_t(kCount * size);
    std::vector<uint8_t> scales(kCount * scale_bytes(p, rows, columns));
    std::vector<uint8_t> scales_t(kCount * scale_bytes(p, columns, rows));
    quantize_weights(p, {values.data(), apart, stride}, kCount, rows, columns,
                     {codes.data(), scales.data(), codes_t.data(), scales_t.data()});
    std::vector<bf16> back(kCount * size), back_t(kCount * size);
    dequantize_weights(p, codes.data(), scales.data(), kCount, rows, columns, back.data());
    dequantize_weights(p, codes_t.data(), scales_t.data(), kCount, columns, rows, back_t.data());

    std::vector<double> wanted, wanted_t(kCount * size);
    for (int64_t e = 0; e < kCount; ++e) {
      std::vector<double> m(size);
      for (int64_t i = 0; i < size; ++i) {
        m[i] = to_float(values[e * apart + i / columns * stride + i % columns]);
      }
      const auto q = reference::quantized(m, rows, columns, across, length);
      const auto t = reference::quantized(m, rows, columns, length, across);
      wanted.insert(wanted.end(), q.begin(), q.end());
      for (int64_t i = 0; i < size; ++i) {
        wanted_t[e * size + i % columns * rows + i / columns] = t[i];
      }
    }
    expect_values(back, wanted);
    expect_values(back_t, wanted_t);

    std::vector<uint8_t> alone(codes.size()), alone_scales(scales.size());  // one form alone
    quantize_weights(p, {values.data(), apart, stride}, kCount, rows, columns,
                     {.data = alone.data(), .scales = alone_scales.data()});
    EXPECT_EQ(alone, codes);
    EXPECT_EQ(alone_scales, scales);
  }
}

TEST(QuantizeWeights, RefusesOtherPrecisions) {
  EXPECT_THROW(scale_bytes(Precision::bf16, 1, 1), Error);
}

// bf16 holds every code times every scale that can come about, but for what overflows.
TEST(QuantizeWeights, Bf16HoldsEveryElementExactly) {
  for (int scale = numerics::kMxZeroScale; scale < 255; ++scale) {
    for (int code = 0; code < 256; ++code) {
      const numerics::e4m3 e{static_cast<uint8_t>(code)};
      if ((code & 0x7f) == 0x7f) continue;
      const double exact = std::ldexp(static_cast<double>(to_float(e)), scale - 127);
      const double got =
          to_float(numerics::mx_dequantize(e, numerics::e8m0{static_cast<uint8_t>(scale)}));
      ASSERT_EQ(got, std::fabs(exact) < 0x1p128 ? exact : std::copysign(HUGE_VAL, exact))
          << scale << ", " << code;
    }
  }
}

// ---- the wire -----------------------------------------------------------------------------------

TEST_P(Quantized, ARowOnTheWireIsHalfAsLong) {
  const Precision p = GetParam();
  const LayerShape shape{.hidden = 4096, .intermediate = 64, .experts = 8, .topk = 2};
  const WorkspaceOptions options{.max_tokens = 100};
  const auto wide = plan::make_layout(plan::workspace_geometry(shape, 2, options), 2, 4);
  const auto narrow = plan::make_layout(plan::workspace_geometry(shape, 2, options, p), 2, 4);
  const int64_t row = p == Precision::mxfp8 ? 4096 + 128 : 4096 + 32;
  for (const plan::Buffer b : {plan::Buffer::staged_x, plan::Buffer::staged_d_y}) {
    EXPECT_EQ(wide.bytes[static_cast<int>(b)], 100 * 8192);
    EXPECT_EQ(narrow.bytes[static_cast<int>(b)], 100 * row);
    plan::Geometry alone = plan::workspace_geometry(shape, 1, options, p);
    EXPECT_EQ(plan::make_layout(alone, 2, 4).bytes[static_cast<int>(b)], 0);
    alone.own_staged = true;
    EXPECT_EQ(plan::make_layout(alone, 2, 4).bytes[static_cast<int>(b)], 100 * row);
  }
  plan::Geometry odd = plan::workspace_geometry(shape, 2, options, p);
  odd.hidden = 33;  // codes and scales both padded to 16
  EXPECT_EQ(odd.wire_row_bytes(2), 48 + 16);
}

// Where codes stay in the ring, rows of it are as on the wire, and those of I have scales too.
TEST_P(Quantized, RowsOfCodesInTheRing) {
  const Precision p = GetParam();
  const LayerShape shape{.hidden = 4096, .intermediate = 192, .experts = 8, .topk = 2};
  plan::Geometry g = plan::workspace_geometry(shape, 2, {.max_tokens = 100}, p);
  const int64_t ring = int64_t{g.ring_tiles} * plan::kTileRows;
  const int64_t inter = 192 + 16;  // 6 scales or 2, padded
  const auto bytes = [&](plan::Buffer b) {
    return plan::make_layout(g, 2, 4).bytes[static_cast<int>(b)];
  };
  for (const bool codes : {false, true}) {
    g.codes_in_ring = codes;
    const int64_t rows = codes ? ring : 0;
    EXPECT_EQ(bytes(plan::Buffer::ring_x_codes), rows * g.wire_row_bytes(2));
    EXPECT_EQ(bytes(plan::Buffer::ring_d_y_codes), rows * g.wire_row_bytes(2));
    EXPECT_EQ(bytes(plan::Buffer::ring_d_gate_codes), rows * inter);
    EXPECT_EQ(bytes(plan::Buffer::ring_d_up_codes), rows * inter);
    EXPECT_EQ(bytes(plan::Buffer::ring_x), ring * 8192);  // weight gradients read bf16
  }
}

// ---- the layer ----------------------------------------------------------------------------------

// Sizes with partial blocks, ranks of all kinds, refills, holes, both ways of keeping rows.
TEST_P(Quantized, LayerAgainstTheOracleAtManyScales) {
  for (const int exponent : {-60, -24, -9, 0, 9, 30}) {
    for (const auto& tokens : std::vector<std::vector<int64_t>>{{61}, {40, 21}, {7, 0, 50, 4}}) {
      RunOptions o;
      o.precision = GetParam();
      o.input_factor = std::exp2(exponent);
      Layer l({200, 168, 8, 3}, tokens, o);
      EXPECT_EQ(l.differences(), "") << "2^" << exponent << ", " << tokens.size() << " ranks";
    }
  }
}

TEST_P(Quantized, HolesRefillsAndAccumulation) {
  RunOptions o;
  o.precision = GetParam();
  o.mode = GradMode::accumulate;
  for (const bool save : {true, false}) {
    o.save = save;
    o.workspace = {.ring_rows = 256, .minibatch_rows = 128, .saved_rows = 128};
    Layer l({96, 160, 4, 2, 40, true}, {150, 250}, o, "zipf:1.5");
    for (int r = 0; r < 2; ++r) {
      for (int64_t i = 0; i < l.run->rank(r).tokens * 2; i += 3) {
        l.run->set_id(r, i, -1);
        l.run->set_topk_weight(r, i, std::nan(""));
      }
    }
    EXPECT_EQ(l.differences(), "") << save;
  }
}

// The bound of a whole tensor is narrow enough to see what is quantised and what is not.
TEST_P(Quantized, TheOracleTellsQuantisedFromPlain) {
  RunOptions o;
  Layer plain({256, 192, 4, 2}, {96}, o);
  plain.run->both();
  RunOptions quantised = plain.options;
  quantised.precision = GetParam();
  const std::string text = compare_with_oracle(*plain.problem, quantised, *plain.run, true);
  for (const char* tensor : {"y", "d_x", "d_topk_weights", "d_w_gate", "d_w_up", "d_w_down"}) {
    EXPECT_NE(text.find(std::string(tensor) + ": whole error"), std::string::npos)
        << tensor << " in:\n"
        << text;
  }
}

// y is linear in the router weights, so d_y . (y with w_k = 1 minus y with w_k = 0) is the true
// gradient; d_topk_weights takes the way over the hidden side, with its own quantised operands.
TEST_P(Quantized, RouterGradientsFollowForward) {
  RunOptions o;
  o.precision = GetParam();
  Layer l({512, 384, 4, 1}, {64}, o);
  for (int64_t i = 0; i < 64; ++i) l.run->set_topk_weight(0, i, 1);
  l.run->both();
  const RankTensors& t = l.run->rank(0);
  const auto* y = reinterpret_cast<const bf16*>(t.y.data());
  const auto* d_y = reinterpret_cast<const bf16*>(t.d_y.data());
  const auto* got = reinterpret_cast<const float*>(t.d_topk_weights.data());
  double off = 0, size = 0;
  for (int64_t token = 0; token < 64; ++token) {
    double wanted = 0;
    for (int64_t i = 0; i < 512; ++i) {
      wanted += static_cast<double>(to_float(y[token * 512 + i])) * to_float(d_y[token * 512 + i]);
    }
    off += (got[token] - wanted) * (got[token] - wanted);
    size += wanted * wanted;
  }
  // d_y and one W_down of two are quantised anew: three independent errors of 2.6e-2.
  EXPECT_LT(std::sqrt(off / size), 2.6e-2 * std::sqrt(3.0) * 1.3);
  EXPECT_GT(std::sqrt(off / size), 1e-3);
}

// NaN in a token reaches its own outputs alone; an infinity likewise, and it saturates nothing
// outside its block.
TEST_P(Quantized, OneTokensNanStaysItsOwn) {
  RunOptions o;
  o.precision = GetParam();
  Layer good({96, 64, 4, 2}, {20, 12}, o), bad({96, 64, 4, 2}, {20, 12}, o);
  auto* x = reinterpret_cast<bf16*>(bad.run->rank(0).x.data());
  x[3 * 96 + 50] = to_bf16(std::nanf(""));
  x[7 * 96 + 2] = to_bf16(kInf);
  good.run->both();
  bad.run->both();
  for (const auto tensor : {&RankTensors::y, &RankTensors::d_x}) {
    const Bytes a = good.run->global(tensor), b = bad.run->global(tensor);
    for (int64_t token = 0; token < 32; ++token) {
      const bool same = std::memcmp(&a[token * 192], &b[token * 192], 192) == 0;
      EXPECT_EQ(same, token != 3 && token != 7) << token;
    }
  }
  const auto* y = reinterpret_cast<const bf16*>(bad.run->rank(0).y.data());
  for (int64_t i = 0; i < 96; ++i) EXPECT_TRUE(std::isnan(to_float(y[3 * 96 + i])));
}

TEST_P(Quantized, MissingWeightsAreNamed) {
  RunOptions o;
  o.precision = GetParam();
  Layer l({32, 32, 2, 1}, {4}, o);
  l.run->both();
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  ForwardArgs f = l.run->forward_args(0);
  f.weights.quantized.down.scales = nullptr;
  EXPECT_EQ(message([&] { l.run->workspace(0).forward(f); }),
            "rank 0: weights.quantized.down.scales is null");
  BackwardArgs b = l.run->backward_args(0);
  b.weights.quantized.gate_t.data = nullptr;
  EXPECT_EQ(message([&] { l.run->workspace(0).backward(b); }),
            "rank 0: weights.quantized.gate_t.data is null");
  EXPECT_EQ(l.differences(), "");
}

}  // namespace
}  // namespace mok::test
