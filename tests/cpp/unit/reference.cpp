#include "reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "mok/error.h"
#include "numerics/bf16.h"

namespace mok::reference {
namespace {

using Vector = std::vector<double>;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A problem with its weights in vectors, which a test can change.
struct Small {
  Inputs in;
  Expert routed;  // [E, I, H] ...

  Outputs run(Expert* gradient = nullptr) {
    in.expert = held(in.shape, routed);
    return reference::run(in, gradient ? collect(*gradient) : TakeGradient{});
  }
};

// Ids hold -1 slots, one token twice at the same expert, a token that goes nowhere, and an expert
// (3) without rows. The limit cuts some of g and u.
Small small(uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 1);
  const auto vector = [&](int64_t n) {
    Vector v(n);
    for (double& e : v) e = normal(random);
    return v;
  };
  const int64_t G = 5, H = 6, I = 4, I_s = 3, E = 4, K = 3;
  Small s;
  s.in.shape = {.hidden = H,
                .intermediate = I,
                .experts = E,
                .topk = K,
                .shared_intermediate = I_s,
                .shared_gate = true,
                .swiglu_limit = 1.5f};
  s.in.rank_tokens = {2, 0, 3};
  s.in.x = vector(G * H);
  s.in.d_y = vector(G * H);
  s.in.topk_ids = {0, 1, 2, 2, -1, 2, -1, -1, -1, 1, 0, -1, -1, 2, 1};
  s.in.topk_weights = vector(G * K);
  s.in.topk_weights[1] = 0;
  s.in.shared = {vector(I_s * H), vector(I_s * H), vector(H * I_s)};
  s.in.shared_gate = vector(H);
  s.routed = {vector(E * I * H), vector(E * I * H), vector(E * H * I)};
  return s;
}

double loss(Small& s) {
  const Outputs out = s.run();
  double sum = 0;
  for (size_t i = 0; i < out.y.size(); ++i) sum += out.y[i] * s.in.d_y[i];
  return sum;
}

void check_gradient(Small& s, const char* name, Vector& input, const Vector& gradient) {
  ASSERT_EQ(input.size(), gradient.size()) << name;
  const double step = 1e-6;
  for (size_t i = 0; i < input.size(); ++i) {
    const double keep = input[i];
    input[i] = keep + step;
    const double above = loss(s);
    input[i] = keep - step;
    const double below = loss(s);
    input[i] = keep;
    EXPECT_NEAR(gradient[i], (above - below) / (2 * step), 2e-7 * (1 + std::fabs(gradient[i])))
        << name << "[" << i << "]";
  }
}

Vector sum_over_ranks(const std::vector<Expert>& parts, Vector Expert::* member) {
  Vector sum(((parts[0]).*member).size());
  for (const Expert& part : parts) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += (part.*member)[i];
  }
  return sum;
}

TEST(Reference, EveryGradientAgainstFiniteDifferences) {
  for (const uint32_t seed : {1u, 2u, 3u}) {
    Small s = small(seed);
    Expert d;
    const Outputs out = s.run(&d);
    check_gradient(s, "x", s.in.x, out.d_x);
    check_gradient(s, "w_gate", s.routed.gate, d.gate);
    check_gradient(s, "w_up", s.routed.up, d.up);
    check_gradient(s, "w_down", s.routed.down, d.down);
    check_gradient(s, "topk_weights", s.in.topk_weights, out.d_topk_weights);
    check_gradient(s, "shared.gate", s.in.shared.gate, sum_over_ranks(out.d_shared, &Expert::gate));
    check_gradient(s, "shared.up", s.in.shared.up, sum_over_ranks(out.d_shared, &Expert::up));
    check_gradient(s, "shared.down", s.in.shared.down, sum_over_ranks(out.d_shared, &Expert::down));
    Vector d_vector(s.in.shape.hidden);
    for (const Vector& part : out.d_shared_gate) {
      for (size_t i = 0; i < part.size(); ++i) d_vector[i] += part[i];
    }
    check_gradient(s, "shared_gate", s.in.shared_gate, d_vector);
  }
}

TEST(Reference, GradientsWithoutGateOrSharedExpert) {
  Small s = small();
  s.in.shape.shared_gate = false;
  s.in.shared_gate.clear();
  check_gradient(s, "x, no gate", s.in.x, s.run().d_x);
  s.in.shape.shared_intermediate = 0;
  s.in.shared = {};
  check_gradient(s, "x, no shared expert", s.in.x, s.run().d_x);
}

TEST(Reference, TheLimitCutsSomethingInThoseTests) {
  Small limited = small(), free = small();
  free.in.shape.swiglu_limit = std::numeric_limits<float>::infinity();
  EXPECT_NE(limited.run().y, free.run().y);
}

// One token, one expert, H = I = 1, by hand; every value rounded where the contract says so.
TEST(Reference, RoundingsByHand) {
  const auto b = [](double v) {
    return static_cast<double>(numerics::to_float(numerics::to_bf16(v)));
  };
  const double x = b(1.37), d_y = b(-0.61), w = 0.7;
  const double w_gate = b(0.9), w_up = b(-1.1), w_down = b(1.7);
  Small s;
  s.in.shape = {.hidden = 1, .intermediate = 1, .experts = 1, .topk = 1};
  s.in.rank_tokens = {1};
  s.in.x = {x};
  s.in.d_y = {d_y};
  s.in.topk_ids = {0};
  s.in.topk_weights = {w};
  s.in.round_bf16 = true;
  s.routed = {{w_gate}, {w_up}, {w_down}};
  Expert d;
  const Outputs out = s.run(&d);

  const double g = b(x * w_gate), u = b(x * w_up);
  const double sig = 1 / (1 + std::exp(-g));
  const double h = b(g * sig * u), r = b(h * w_down);
  EXPECT_EQ(out.y[0], b(w * r));
  const double d_h = b(d_y * w_down);
  EXPECT_EQ(out.d_topk_weights[0], d_h * h);
  const double d_g = b(w * d_h * sig * (1 + g * (1 - sig)) * u), d_u = b(w * d_h * g * sig);
  EXPECT_EQ(d.down[0], d_y * b(w * h));
  EXPECT_EQ(d.gate[0], d_g * x);
  EXPECT_EQ(d.up[0], d_u * x);
  EXPECT_EQ(out.d_x[0], b(d_g * w_gate + d_u * w_up));

  // And the gated shared expert with the same weights beside it.
  s.in.shape.shared_intermediate = 1;
  s.in.shape.shared_gate = true;
  s.in.shared = s.routed;
  s.in.shared_gate = {b(-0.4)};
  const Outputs both = s.run(&d);
  const double sigma = 1 / (1 + std::exp(-x * s.in.shared_gate[0])), slope = sigma * (1 - sigma);
  EXPECT_EQ(both.y[0], b(sigma * r + w * r));
  const double e_g = b(sigma * d_h * sig * (1 + g * (1 - sig)) * u), e_u = b(sigma * d_h * g * sig);
  const double d_sigma = d_y * r;
  const double d_s = b(e_g * w_gate + e_u * w_up) + d_sigma * slope * s.in.shared_gate[0];
  EXPECT_EQ(both.d_x[0], b(d_s + b(d_g * w_gate + d_u * w_up)));
  EXPECT_EQ(both.d_shared[0].gate[0], e_g * x);
  EXPECT_EQ(both.d_shared[0].up[0], e_u * x);
  EXPECT_EQ(both.d_shared[0].down[0], d_y * b(sigma * h));
  EXPECT_EQ(both.d_shared_gate[0][0], d_sigma * slope * x);
}

TEST(Reference, EveryTokenOutputIsABf16Value) {
  Small s = small();
  s.in.round_bf16 = true;
  const Outputs out = s.run();
  for (const Vector* v : {&out.y, &out.d_x}) {
    for (const double e : *v) EXPECT_EQ(numerics::to_float(numerics::to_bf16(e)), e);
  }
}

TEST(Reference, EachOfTwoEqualSlotsCounts) {
  Small twice = small(), once = small();
  // Token 1 has expert 2 in slots 0 and 2: the same as one slot with both weights.
  once.in.topk_ids[5] = -1;
  once.in.topk_weights[3] += once.in.topk_weights[5];
  Expert d_twice, d_once;
  const Outputs a = twice.run(&d_twice), b = once.run(&d_once);
  for (size_t i = 0; i < a.y.size(); ++i) {
    EXPECT_NEAR(a.y[i], b.y[i], 1e-13);
    EXPECT_NEAR(a.d_x[i], b.d_x[i], 1e-13);
  }
  for (size_t i = 0; i < d_once.down.size(); ++i) {
    EXPECT_NEAR(d_twice.down[i], d_once.down[i], 1e-13);
  }
  EXPECT_EQ(a.d_topk_weights[3], a.d_topk_weights[5]);
}

TEST(Reference, SlotsWithoutExpertAreInert) {
  Small s = small();
  const Outputs before = s.run();
  for (size_t slot = 0; slot < s.in.topk_ids.size(); ++slot) {
    if (s.in.topk_ids[slot] < 0) s.in.topk_weights[slot] = kNan;
  }
  const Outputs after = s.run();
  EXPECT_EQ(before.y, after.y);
  EXPECT_EQ(before.d_x, after.d_x);
  for (size_t slot = 0; slot < s.in.topk_ids.size(); ++slot) {
    if (s.in.topk_ids[slot] >= 0) continue;
    EXPECT_EQ(after.d_topk_weights[slot], 0);
    EXPECT_FALSE(std::signbit(after.d_topk_weights[slot]));
  }
}

TEST(Reference, AnExpertWithoutRowsGetsZeroAndIsNotAskedFor) {
  Small s = small();
  std::vector<int> asked, taken;
  const auto expert = held(s.in.shape, s.routed);
  s.in.expert = [&](int e) {
    asked.push_back(e);
    return expert(e);
  };
  reference::run(s.in, [&](int e, const Expert& d) {
    taken.push_back(e);
    if (e != 3) return;
    ASSERT_EQ(d.gate.size(), 24u);
    for (const Vector* v : {&d.gate, &d.up, &d.down}) {
      for (const double value : *v) EXPECT_TRUE(value == 0 && !std::signbit(value));
    }
  });
  EXPECT_EQ(asked, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(taken, (std::vector<int>{0, 1, 2, 3}));
}

TEST(Reference, OnlySharedGradientsKnowTheRanks) {
  Small split = small(), whole = small();
  whole.in.rank_tokens = {5};
  Expert d_split, d_whole;
  const Outputs a = split.run(&d_split), b = whole.run(&d_whole);
  EXPECT_EQ(a.y, b.y);
  EXPECT_EQ(a.d_x, b.d_x);
  EXPECT_EQ(a.d_topk_weights, b.d_topk_weights);
  EXPECT_EQ(d_split.gate, d_whole.gate);
  ASSERT_EQ(a.d_shared.size(), 3u);
  EXPECT_EQ(a.d_shared[1].gate, Vector(18));  // a rank without tokens
  const Vector sum = sum_over_ranks(a.d_shared, &Expert::down);
  for (size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(sum[i], b.d_shared[0].down[i], 1e-13);
}

TEST(Reference, NanReachesOnlyItsTokenAndTheGradientsItEnters) {
  Small s = small();
  s.in.x[3 * 6 + 2] = kNan;  // token 3 goes to experts 1 and 0
  Expert d;
  const Outputs out = s.run(&d);
  for (int t = 0; t < 5; ++t) {
    for (int j = 0; j < 6; ++j) {
      EXPECT_EQ(std::isnan(out.y[t * 6 + j]), t == 3);
      EXPECT_EQ(std::isnan(out.d_x[t * 6 + j]), t == 3);
    }
  }
  for (int e = 0; e < 4; ++e) EXPECT_EQ(std::isnan(d.down[e * 24]), e < 2);
  EXPECT_FALSE(std::isnan(out.d_shared[0].gate[0]));
  EXPECT_TRUE(std::isnan(out.d_shared[2].gate[0]));
}

TEST(Reference, ZeroWeightTimesNanIsNan) {
  Small s = small();
  s.routed.down[1 * 24] = kNan;  // expert 1; token 0 has it in slot 1 with weight 0
  EXPECT_TRUE(std::isnan(s.run().y[0]));
}

TEST(Reference, NothingToDo) {
  Small s = small();
  s.in.topk_ids.assign(15, -1);
  s.in.shape.shared_intermediate = 0;
  s.in.shape.shared_gate = false;
  s.in.shared = {};
  s.in.shared_gate = {};
  const Outputs out = s.run();
  EXPECT_EQ(out.y, Vector(30));
  EXPECT_EQ(out.d_x, Vector(30));

  s.in.rank_tokens = {0, 0};
  s.in.x = s.in.d_y = s.in.topk_weights = {};
  s.in.topk_ids = {};
  EXPECT_TRUE(s.run().y.empty());
}

TEST(Reference, ForwardOnly) {
  Small s = small();
  const Vector y = s.run().y;
  s.in.d_y.clear();
  Expert d;
  const Outputs out = s.run(&d);
  EXPECT_EQ(out.y, y);
  EXPECT_TRUE(out.d_x.empty());
  EXPECT_TRUE(d.gate.empty());
}

TEST(Reference, BadInputNamesTheField) {
  const auto message = [](const std::function<void(Small&)>& spoil) {
    Small s = small();
    spoil(s);
    try {
      s.run();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_TRUE(message([](Small& s) { s.in.x.pop_back(); }).starts_with("x:"));
  EXPECT_TRUE(message([](Small& s) { s.in.d_y.pop_back(); }).starts_with("d_y:"));
  EXPECT_TRUE(message([](Small& s) { s.in.shared.up.pop_back(); }).starts_with("shared.up:"));
  EXPECT_TRUE(message([](Small& s) { s.routed.up.pop_back(); }).starts_with("up:"));
  EXPECT_EQ(message([](Small& s) { s.in.topk_ids[4] = 4; }), "topk_ids: token 1, slot 1: 4");
  EXPECT_EQ(message([](Small& s) { s.in.topk_ids[0] = -2; }), "topk_ids: token 0, slot 0: -2");
}

}  // namespace
}  // namespace mok::reference
