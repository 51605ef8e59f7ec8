#include "problem/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "mok/error.h"
#include "problem/problem.h"
#include "reference/reference.h"
#include "support/plain_layer.h"

namespace mok::problem {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Compare, EqualIsZero) {
  const std::vector<double> a = {1, -2, 0, 4};
  const Difference d = compare(a.data(), 2, a.data(), 2, 2);
  EXPECT_EQ(d.max_rel_err, 0);
  EXPECT_EQ(d.scaled_err, 0);
}

TEST(Compare, FindsTheWorstBlockAndItsPlace) {
  std::vector<double> b(3 * 130, 1.0);
  std::vector<double> a = b;
  a[0] += 0.1;              // block (0, 0): 0.1 / 8
  a[2 * 130 + 129] += 0.3;  // block (2, 128), two columns: 0.3 / sqrt(2)
  const Difference d = compare(a.data(), 130, b.data(), 3, 130);
  EXPECT_DOUBLE_EQ(d.max_rel_err, 0.3 / std::sqrt(2.0));
  EXPECT_EQ(d.row, 2);
  EXPECT_EQ(d.column, 128);
  EXPECT_DOUBLE_EQ(d.scaled_err, 0.3 / std::sqrt(2.0));
}

TEST(Compare, AbsoluteWhereTheExpectedBlockIsZero) {
  const std::vector<double> b = {0, 0, 3, 4};
  const std::vector<double> a = {0.5, 0, 3, 4};
  const Difference d = compare(a.data(), 2, b.data(), 2, 2);
  EXPECT_EQ(d.max_rel_err, 0.5);
  EXPECT_EQ(d.row, 0);
  EXPECT_NEAR(d.scaled_err, 0.5 / 5, 1e-12);  // the usual element is sqrt(12.5)
}

TEST(Compare, ASmallBlockIsJudgedByTheUsualSize) {
  const std::vector<double> b = {1e-6, 1, 1, 1, 1};
  const std::vector<double> a = {2e-6, 1, 1, 1, 1};
  const Difference d = compare(a.data(), 1, b.data(), 5, 1);
  EXPECT_NEAR(d.max_rel_err, 1, 1e-9);
  EXPECT_LT(d.scaled_err, 1.2e-6);
}

TEST(Compare, NanAndInfinityPassOnlyWhenBothHaveThem) {
  const std::vector<double> both = {kNan, kInf, 1};
  EXPECT_EQ(compare(both.data(), 3, both.data(), 1, 3).max_rel_err, 0);
  const std::vector<double> finite = {1, 1, 1};
  for (const double bad : {kNan, kInf, -kInf}) {
    const std::vector<double> one = {1, bad, 1};
    EXPECT_EQ(compare(one.data(), 3, finite.data(), 1, 3).scaled_err, kInf);
    EXPECT_EQ(compare(finite.data(), 3, one.data(), 1, 3).scaled_err, kInf);
    EXPECT_EQ(compare(finite.data(), 3, one.data(), 1, 3).max_rel_err, kInf);
  }
  const std::vector<double> plus = {kInf}, minus = {-kInf}, nan = {kNan};
  EXPECT_EQ(compare(plus.data(), 1, minus.data(), 1, 1).scaled_err, kInf);
  EXPECT_EQ(compare(plus.data(), 1, nan.data(), 1, 1).scaled_err, kInf);
}

TEST(Compare, AnInfinityDoesNotHideAnErrorBesideIt) {
  const std::vector<double> b = {kInf, 1, 1}, a = {kInf, 1, 2};
  EXPECT_GT(compare(a.data(), 3, b.data(), 1, 3).scaled_err, 0.5);
}

TEST(Compare, StridesAndTypes) {
  const std::vector<float> a = {1, 2, 99, 3, 4, 99};
  const std::vector<double> b = {1, 2, 3, 4};
  EXPECT_EQ(compare(a.data(), Precision::fp32, 3, b.data(), 2, 2).max_rel_err, 0);
  const std::vector<numerics::bf16> c = {numerics::to_bf16(1.0f), numerics::to_bf16(2.0f)};
  EXPECT_EQ(compare(c.data(), Precision::bf16, 2, b.data(), 1, 2).max_rel_err, 0);
}

TEST(Compare, PiecesAddUp) {
  Difference whole;
  whole.add({.max_rel_err = 0.1,
             .scaled_err = 0.3,
             .row = 1,
             .column = 0,
             .scaled_row = 2,
             .scaled_column = 64},
            10);
  whole.add({.max_rel_err = 0.2,
             .scaled_err = 0.2,
             .row = 3,
             .column = 64,
             .scaled_row = 0,
             .scaled_column = 0},
            20);
  EXPECT_EQ(whole.max_rel_err, 0.2);
  EXPECT_EQ(whole.row, 23);
  EXPECT_EQ(whole.column, 64);
  EXPECT_EQ(whole.scaled_err, 0.3);
  EXPECT_EQ(whole.scaled_row, 12);
}

struct Errors {
  double y, d_x, d_topk_weights, d_w_gate, d_w_up, d_w_down;
};

template <class T>
constexpr Precision kPrecision = sizeof(T) == 2   ? Precision::bf16
                                 : sizeof(T) == 4 ? Precision::fp32
                                                  : Precision::fp64;

template <class T>
Errors errors(const Problem& p, const test::PlainLayer<T>& have) {
  const LayerShape& s = p.shape();
  const int64_t size = s.hidden * s.intermediate;
  Difference gate, up, down;
  const reference::Outputs want = reference::run(
      oracle_inputs(p, kPrecision<T>, {p.tokens()}, true), [&](int e, const reference::Expert& d) {
        gate.add(
            compare(&have.d_w_gate[e * size], s.hidden, d.gate.data(), s.intermediate, s.hidden),
            e * s.intermediate);
        up.add(compare(&have.d_w_up[e * size], s.hidden, d.up.data(), s.intermediate, s.hidden),
               e * s.intermediate);
        down.add(compare(&have.d_w_down[e * size], s.intermediate, d.down.data(), s.hidden,
                         s.intermediate),
                 e * s.hidden);
      });
  const int64_t G = p.tokens();
  return {
      compare(have.y.data(), s.hidden, want.y.data(), G, s.hidden).scaled_err,
      compare(have.d_x.data(), s.hidden, want.d_x.data(), G, s.hidden).scaled_err,
      compare(have.d_topk_weights.data(), s.topk, want.d_topk_weights.data(), G, s.topk).scaled_err,
      gate.scaled_err,
      up.scaled_err,
      down.scaled_err};
}

// The largest share of a tolerance that an honest computation uses up.
double worst_share(const Errors& e, const Tolerances& t) {
  return std::max({e.y / t.y, e.d_x / t.d_x, e.d_topk_weights / t.d_topk_weights,
                   e.d_w_gate / t.d_w_gate_up, e.d_w_up / t.d_w_gate_up, e.d_w_down / t.d_w_down});
}

struct Case {
  LayerShape shape;
  int64_t tokens;
};

template <class T>
double worst_share_of_cases() {
  const std::vector<Case> cases = {
      {{.hidden = 1, .intermediate = 1, .experts = 3, .topk = 1}, 400},
      {{.hidden = 3, .intermediate = 2, .experts = 8, .topk = 3, .swiglu_limit = 0.7f}, 300},
      {{.hidden = 65, .intermediate = 33, .experts = 16, .topk = 2}, 40},
      {{.hidden = 256, .intermediate = 192, .experts = 32, .topk = 4}, 20},
      {{.hidden = 768, .intermediate = 256, .experts = 8, .topk = 8, .swiglu_limit = 1}, 10},
  };
  double worst = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      const Problem p(cases[i].shape, cases[i].tokens, {}, seed);
      const Tolerances t = tolerances(cases[i].shape, kPrecision<T>, cases[i].tokens);
      const Errors e = errors(p, test::PlainLayer<T>(p, kPrecision<T>));
      const double share = worst_share(e, t);
      EXPECT_LT(share, 1) << "case " << i << ", seed " << seed << ": y " << e.y << ", d_x " << e.d_x
                          << ", d_topk_weights " << e.d_topk_weights << ", d_w_gate " << e.d_w_gate
                          << ", d_w_up " << e.d_w_up << ", d_w_down " << e.d_w_down;
      worst = std::max(worst, share);
    }
  }
  return worst;
}

// They hold for an honest computation, and are not so wide that anything would pass.
TEST(Tolerances, HoldInBf16) {
  const double share = worst_share_of_cases<numerics::bf16>();
  RecordProperty("worst_share", std::to_string(share));
  EXPECT_GT(share, 0.05);
}
TEST(Tolerances, HoldInFp32) {
  const double share = worst_share_of_cases<float>();
  RecordProperty("worst_share", std::to_string(share));
  EXPECT_GT(share, 0.02);
}
TEST(Tolerances, HoldInFp64) {
  const double share = worst_share_of_cases<double>();
  RecordProperty("worst_share", std::to_string(share));
  EXPECT_GT(share, 0.02);
}

// One small fault in a computation of usual size; each must cost its tolerance.
TEST(Tolerances, CatchPlantedFaults) {
  const LayerShape shape{.hidden = 256, .intermediate = 192, .experts = 4, .topk = 2};
  const int64_t G = 24, H = shape.hidden;
  const Problem p(shape, G, {}, 3);
  const Tolerances t = tolerances(shape, Precision::bf16, G);
  const test::PlainLayer<numerics::bf16> good(p, Precision::bf16);
  ASSERT_LT(worst_share(errors(p, good), t), 1);

  auto swapped = good;  // two tokens' rows of y
  std::swap_ranges(&swapped.y[3 * H], &swapped.y[4 * H], &swapped.y[7 * H]);
  EXPECT_GT(errors(p, swapped).y, t.y);

  auto stale = good;  // one stripe of 8 columns of d_x not written
  std::fill_n(&stale.d_x[5 * H + 64], 8, numerics::bf16{0});
  EXPECT_GT(errors(p, stale).d_x, t.d_x);

  auto weight = good;  // a router weight's gradient in the neighbour's slot
  std::swap(weight.d_topk_weights[8], weight.d_topk_weights[9]);
  EXPECT_GT(errors(p, weight).d_topk_weights, t.d_topk_weights);

  auto lost = good;  // the last column tile of one row of one expert's gradient
  std::fill_n(&lost.d_w_down[(2 * H + 9) * 192 + 128], 64, 0.0f);
  EXPECT_GT(errors(p, lost).d_w_down, t.d_w_down);

  auto crossed = good;  // gate for up
  std::swap(crossed.d_w_gate, crossed.d_w_up);
  EXPECT_GT(errors(p, crossed).d_w_gate, t.d_w_gate_up);
  EXPECT_GT(errors(p, crossed).d_w_up, t.d_w_gate_up);
}

// What the cores of fewer bits may add, and that it is for them alone.
TEST(Tolerances, OfFp8TensorCores) {
  const LayerShape shape{.hidden = 512, .intermediate = 256, .experts = 8, .topk = 2};
  const auto of = [&](Precision p, E4m3Sums sums) { return tolerances(shape, p, 64, sums); };
  const Tolerances plain = of(Precision::fp8, E4m3Sums::fp32);
  const Tolerances cores = of(Precision::fp8, E4m3Sums::tensor_cores);
  const Tolerances whole = whole_tolerances(shape, Precision::fp8, 64);
  const Tolerances whole_cores =
      whole_tolerances(shape, Precision::fp8, 64, E4m3Sums::tensor_cores);
  // 2 sums, 5 flipping stages (2^-4 of the values, not 2^-8), 3 stages of jumps, the largest of
  // which is 7 standard deviations of 256 values and not 3.
  const double more = 2 * 0x1p-10 + 5 * 0x1p-7 * (1.0 / 4 - 1.0 / 16) +
                      0x1p-3 * (std::sqrt(3 * 0x1p-7) - std::sqrt(3 * 0x1p-11) + 4.0 / 16);
  EXPECT_NEAR(cores.y - plain.y, more, 1e-12);
  EXPECT_GT(cores.d_x, plain.d_x);
  EXPECT_GT(cores.d_topk_weights, plain.d_topk_weights);
  EXPECT_GT(whole_cores.y, whole.y);
  EXPECT_LT(1.5 * whole_cores.y, 6.6e-2);  // what quantising not at all would differ by
  EXPECT_EQ(of(Precision::bf16, E4m3Sums::tensor_cores).y, of(Precision::bf16, E4m3Sums::fp32).y);
}

TEST(Tolerances, AreOrderedByPrecision) {
  const LayerShape shape{.hidden = 2048, .intermediate = 768, .experts = 128, .topk = 8};
  const Tolerances b = tolerances(shape, Precision::bf16, 64);
  const Tolerances f = tolerances(shape, Precision::fp32, 64);
  const Tolerances d = tolerances(shape, Precision::fp64, 64);
  EXPECT_LT(b.y, 0.02);
  EXPECT_LT(b.d_w_gate_up, 0.06);
  EXPECT_LT(f.y, 5e-5);
  EXPECT_LT(d.d_w_down, 2e-13);
  EXPECT_LT(f.d_x, b.d_x);
  EXPECT_LT(d.d_x, f.d_x);
}

}  // namespace
}  // namespace mok::problem
