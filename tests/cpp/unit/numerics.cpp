#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "numerics/bf16.h"
#include "numerics/dot.h"
#include "numerics/exp.h"
#include "numerics/reduce.h"
#include "numerics/swiglu.h"

namespace mok::numerics {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double value(uint32_t bits) { return to_float(bf16{static_cast<uint16_t>(bits)}); }

// The magnitude's two neighbours (bit patterns `low` and `low + 1`), the nearer wins, even if tied.
// Past the largest number the next "value" is 2^128, which stands for infinity.
uint16_t nearest_bf16(double v) {
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  const double m = std::fabs(v);
  uint32_t low = 0, high = 0x7f80;  // value(low) <= m < value(high)
  if (m >= 0x1p128) return sign | 0x7f80;
  while (high - low > 1) {
    const uint32_t mid = (low + high) / 2;
    (value(mid) <= m ? low : high) = mid;
  }
  const double below = m - value(low);
  const double above = (high == 0x7f80 ? 0x1p128 : value(high)) - m;
  const bool up = above < below || (above == below && (low & 1));
  return sign | static_cast<uint16_t>(up ? high : low);
}

TEST(Bf16, EveryValueSurvivesBothRoundings) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const bf16 v{static_cast<uint16_t>(bits)};
    const float f = to_float(v);
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(f))));
      EXPECT_TRUE(std::isnan(to_float(to_bf16(static_cast<double>(f)))));
      continue;
    }
    ASSERT_EQ(to_bf16(f).bits, bits);
    ASSERT_EQ(to_bf16(static_cast<double>(f)).bits, bits);
  }
}

// At, just below and just above every point between two neighbours (infinity's too).
TEST(Bf16, RoundsEveryTieToEvenAndItsSurroundingsToNearest) {
  for (uint32_t low = 0; low < 0x7f80; ++low) {
    const double next = low + 1 == 0x7f80 ? 0x1p128 : value(low + 1);
    for (const double sign : {1.0, -1.0}) {
      const double middle = sign * (value(low) + next) / 2;  // exact, and a float
      const auto f = static_cast<float>(middle);
      ASSERT_EQ(static_cast<double>(f), middle);
      for (const float v : {f, std::nextafter(f, 0.0f), std::nextafter(f, f * 2)}) {
        ASSERT_EQ(to_bf16(v).bits, nearest_bf16(v)) << v;
      }
      // So close that a detour over the nearest float would land on the tie.
      for (const double v :
           {middle, std::nextafter(middle, 0.0), std::nextafter(middle, middle * 2)}) {
        ASSERT_EQ(to_bf16(v).bits, nearest_bf16(v)) << v;
      }
    }
  }
}

TEST(Bf16, RoundsRandomDoubles) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 300000; ++i) {
    const double m = std::ldexp(static_cast<double>(random() >> 11), -53);
    const double v = std::ldexp(i % 2 ? m : -m, static_cast<int>(random() % 300) - 160);
    ASSERT_EQ(to_bf16(v).bits, nearest_bf16(v)) << v;
    const auto f = static_cast<float>(v);
    ASSERT_EQ(to_bf16(f).bits, nearest_bf16(f)) << f;
  }
}

TEST(Bf16, Extremes) {
  EXPECT_EQ(to_bf16(kInf).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-kInf).bits, 0xff80);
  EXPECT_EQ(to_bf16(1e300).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-1e300).bits, 0xff80);
  EXPECT_EQ(to_bf16(1e-300).bits, 0);
  EXPECT_EQ(to_bf16(-1e-300).bits, 0x8000);
  EXPECT_EQ(to_bf16(-0.0).bits, 0x8000);
  // A NaN whose payload sits only in the bits that are cut off stays a NaN, and is quiet.
  EXPECT_EQ(to_bf16(bit_cast<float>(0x7f800001u)).bits, 0x7fc0);
  EXPECT_EQ(to_bf16(bit_cast<float>(0xff800001u)).bits, 0xffc0);
}

TEST(Exp, FloatErrorOverAllExponents) {
  double worst = 0;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 1009) {
    const auto x = bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(exp_portable(x)));
      continue;
    }
    const double want = std::exp(static_cast<double>(x));
    const double have = exp_portable(x);
    if (want < 0x1p-126) {
      ASSERT_LE(std::fabs(have - want), 0.75 * 0x1p-149) << x;
    } else if (want < 0x1.fffffep127) {
      worst = std::max(worst, std::fabs(have - want) / want);
    } else {
      ASSERT_GE(have, 0x1.fffff0p127) << x;
    }
  }
  EXPECT_LT(worst, 1.2e-7);
}

TEST(Exp, DoubleError) {
  long double worst = 0;
  for (double x = -708; x < 709.5; x += 0.00371) {
    const long double want = std::exp(static_cast<long double>(x));
    worst = std::max(worst, std::fabs((exp_portable(x) - want) / want));
  }
  EXPECT_LT(static_cast<double>(worst), 3e-16);
}

TEST(Exp, Extremes) {
  EXPECT_EQ(exp_portable(0.0f), 1.0f);
  EXPECT_EQ(exp_portable(-0.0f), 1.0f);
  EXPECT_EQ(exp_portable(1e-45f), 1.0f);
  EXPECT_EQ(exp_portable(kInf), kInf);
  EXPECT_EQ(exp_portable(88.73f), kInf);
  EXPECT_LT(exp_portable(88.72f), kInf);
  EXPECT_EQ(bit_cast<uint32_t>(exp_portable(-kInf)), 0u);
  EXPECT_EQ(exp_portable(-103.97f), 0x1p-149f);
  EXPECT_EQ(exp_portable(-104.0f), 0.0f);
  EXPECT_TRUE(std::isnan(exp_portable(kNan)));
  EXPECT_TRUE(std::isnan(exp_portable(-kNan)));
  EXPECT_EQ(exp_portable(0.0), 1.0);
  EXPECT_EQ(exp_portable(1e9), std::numeric_limits<double>::infinity());
  EXPECT_EQ(exp_portable(-745.0), 0x1p-1074);
  EXPECT_EQ(exp_portable(-1e9), 0.0);
  EXPECT_TRUE(std::isnan(exp_portable(static_cast<double>(kNan))));
}

TEST(Swiglu, ValuesAgainstTheFormula) {
  for (double g = -20; g <= 20; g += 0.37) {
    for (double u = -12; u <= 12; u += 1.7) {
      for (const double limit : {0.5, 7.0, static_cast<double>(kInf)}) {
        const double gl = std::min(g, limit), ul = std::clamp(u, -limit, limit);
        const double want = gl / (1 + std::exp(-gl)) * ul;
        EXPECT_NEAR(swiglu_value(g, u, limit), want, 1e-15 * (1 + std::fabs(want)));
        EXPECT_NEAR(
            swiglu_value(static_cast<float>(g), static_cast<float>(u), static_cast<float>(limit)),
            want, 4e-6 * (1 + std::fabs(want)));
      }
    }
  }
}

TEST(Swiglu, DerivativeAgainstFiniteDifferences) {
  const double step = 1e-6, limit = 3;
  int cut = 0;
  for (double g = -6.05; g <= 6; g += 0.31) {
    for (double u = -5.05; u <= 5; u += 0.43) {
      const auto d = swiglu_derivative(g, u, -1.7, 0.6, limit);
      const auto f = [&](double a, double b) { return 0.6 * -1.7 * swiglu_value(a, b, limit); };
      EXPECT_NEAR(d.g, (f(g + step, u) - f(g - step, u)) / (2 * step), 1e-8) << g << " " << u;
      EXPECT_NEAR(d.u, (f(g, u + step) - f(g, u - step)) / (2 * step), 1e-8) << g << " " << u;
      cut += d.g == 0;
    }
  }
  EXPECT_GT(cut, 100);
}

TEST(Swiglu, GradientPassesAtTheLimitAndStopsBeyond) {
  const float limit = 2, beyond = std::nextafter(2.0f, 3.0f);
  EXPECT_NE(swiglu_derivative(limit, 1.0f, 1.0f, 1.0f, limit).g, 0.0f);
  EXPECT_NE(swiglu_derivative(1.0f, limit, 1.0f, 1.0f, limit).u, 0.0f);
  EXPECT_NE(swiglu_derivative(1.0f, -limit, 1.0f, 1.0f, limit).u, 0.0f);
  EXPECT_EQ(bit_cast<uint32_t>(swiglu_derivative(beyond, 1.0f, -1.0f, 1.0f, limit).g), 0u);
  EXPECT_EQ(bit_cast<uint32_t>(swiglu_derivative(1.0f, beyond, -1.0f, 1.0f, limit).u), 0u);
  EXPECT_EQ(bit_cast<uint32_t>(swiglu_derivative(1.0f, -beyond, -1.0f, 1.0f, limit).u), 0u);
  // There is no lower limit on g.
  EXPECT_NE(swiglu_derivative(-5.0f, 1.0f, 1.0f, 1.0f, limit).g, 0.0f);
  // No limit at all.
  EXPECT_EQ(swiglu_derivative(50.0f, 2.0f, 1.0f, 1.0f, kInf).g, 2.0f);
}

TEST(Swiglu, NanPassesTheLimits) {
  EXPECT_TRUE(std::isnan(swiglu_value(kNan, 1.0f, 2.0f)));
  EXPECT_TRUE(std::isnan(swiglu_value(1.0f, kNan, 2.0f)));
  EXPECT_TRUE(std::isnan(swiglu_derivative(kNan, 1.0f, 1.0f, 1.0f, 2.0f).g));
  EXPECT_TRUE(std::isnan(swiglu_derivative(1.0f, kNan, 1.0f, 1.0f, 2.0f).g));
  EXPECT_TRUE(std::isnan(swiglu_derivative(kNan, 1.0f, 1.0f, 1.0f, 2.0f).u));
}

TEST(Swiglu, StorageFormsRoundAsTheContractSays) {
  const bf16 g = to_bf16(1.3f), u = to_bf16(-0.7f), d_h = to_bf16(0.31f);
  const float w = 0.123f, limit = kInf;
  const auto d = swiglu_derivative(to_float(g), to_float(u), to_float(d_h), w, limit);
  const SwigluBackward<bf16> b = swiglu_backward(g, u, d_h, w, limit);
  const bf16 h = to_bf16(swiglu_value(to_float(g), to_float(u), limit));
  EXPECT_EQ(swiglu(g, u, limit).bits, h.bits);
  EXPECT_EQ(b.h.bits, h.bits);
  EXPECT_EQ(b.wh.bits, to_bf16(w * to_float(h)).bits);
  EXPECT_EQ(b.d_g.bits, to_bf16(d.g).bits);
  EXPECT_EQ(b.d_u.bits, to_bf16(d.u).bits);
  EXPECT_EQ(swiglu(1.3f, -0.7f, limit), swiglu_value(1.3f, -0.7f, limit));  // fp32: not rounded
}

std::vector<bf16> random_bf16(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<bf16> v(n);
  for (bf16& e : v) e = to_bf16(normal(random));
  return v;
}

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void backward_wide(const bf16* g, const bf16* u, const bf16* d_h,
                                               bf16* __restrict d_g, bf16* __restrict h, int n) {
  for (int i = 0; i < n; ++i) {
    const auto b = swiglu_backward(g[i], u[i], d_h[i], 0.37f, 7.0f);
    d_g[i] = b.d_g;
    h[i] = b.h;
  }
}
[[gnu::target("avx2,fma")]] float dot_wide(const bf16* a, const bf16* b, int64_t n) {
  return dot<float>(a, b, n);
}

TEST(Numerics, SameBitsForEveryInstructionSet) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP();
  const int n = 10007;
  const auto g = random_bf16(n, 1), u = random_bf16(n, 2), d_h = random_bf16(n, 3);
  std::vector<bf16> d_g(n), h(n);
  backward_wide(g.data(), u.data(), d_h.data(), d_g.data(), h.data(), n);
  for (int i = 0; i < n; ++i) {
    const auto b = swiglu_backward(g[i], u[i], d_h[i], 0.37f, 7.0f);
    ASSERT_EQ(b.d_g.bits, d_g[i].bits);
    ASSERT_EQ(b.h.bits, h[i].bits);
  }
  EXPECT_EQ(dot_wide(g.data(), u.data(), n), (dot<float>(g.data(), u.data(), n)));
}
#endif

TEST(Dot, FollowsTheStatedOrder) {
  for (const int n : {0, 1, 15, 16, 17, 48, 63, 64, 65, 100, 128, 1000}) {
    const auto a = random_bf16(n, 4), b = random_bf16(n, 5);
    float want = 0;
    for (int block = 0; block < n; block += 64) {
      float lane[16] = {};
      for (int i = block; i < std::min(n, block + 64); ++i) {
        lane[i % 16] = std::fma(to_float(a[i]), to_float(b[i]), lane[i % 16]);
      }
      for (const int step : {8, 4, 2, 1}) {
        for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
      }
      want += lane[0];
    }
    EXPECT_EQ((dot<float>(a.data(), b.data(), n)), want) << n;
  }
}

TEST(Dot, IsTheSumOfItsBlocksParts) {
  const auto a = random_bf16(300, 6), b = random_bf16(300, 7);
  float sum = 0;
  for (int i = 0; i < 300; i += 64) {
    sum += dot_block<float>(&a[i], &b[i], std::min(64, 300 - i));
  }
  EXPECT_EQ((dot<float>(a.data(), b.data(), 300)), sum);
}

TEST(Reduce, AddsInSlotOrderAndSkipsMissingRows) {
  const int columns = 150;  // more than one chunk
  const auto r0 = random_bf16(columns, 8), r2 = random_bf16(columns, 9);
  const bf16* rows[] = {r0.data(), nullptr, r2.data()};
  const float weights[] = {0.3f, kNan, -1.7f};
  std::vector<float> start(columns);
  for (int c = 0; c < columns; ++c) start[c] = 0.01f * static_cast<float>(c);
  std::vector<bf16> y(columns), d_x(columns), y0(columns);
  combine_rows<bf16>(y.data(), start.data(), rows, weights, 3, columns);
  combine_rows<bf16>(y0.data(), nullptr, rows, weights, 2, columns);
  reduce_rows<bf16>(d_x.data(), start.data(), rows, 3, columns);
  for (int c = 0; c < columns; ++c) {
    const float a = to_float(r0[c]), b = to_float(r2[c]);
    EXPECT_EQ(y[c].bits, to_bf16(std::fma(-1.7f, b, std::fma(0.3f, a, start[c]))).bits);
    EXPECT_EQ(y0[c].bits, to_bf16(std::fma(0.3f, a, 0.0f)).bits);
    EXPECT_EQ(d_x[c].bits, to_bf16((start[c] + a) + b).bits);
  }
}

TEST(Reduce, NoRowsAtAllGivesPositiveZero) {
  const bf16* rows[] = {nullptr, nullptr};
  const float weights[] = {kNan, kInf};
  bf16 y[3] = {{1}, {1}, {1}};
  combine_rows<bf16>(y, nullptr, rows, weights, 2, 3);
  for (const bf16 v : y) EXPECT_EQ(v.bits, 0);
}

TEST(Reduce, SharedGateFormulas) {
  EXPECT_EQ(sigmoid_slope(0.25f), 0.1875f);
  EXPECT_EQ(shared_d_x(1.5f, 2.0f, -0.25f), 1.0f);
  EXPECT_NEAR(sigmoid(1.0), 0.7310585786300049, 1e-15);
}

}  // namespace
}  // namespace mok::numerics
