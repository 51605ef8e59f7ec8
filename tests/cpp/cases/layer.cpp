// Faults reported in public against other implementations, each as a small input; a test is named
// after its row in the project's list of cases. Here: numbers, sizes, ids, gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "support/layer_case.h"

namespace mok::test {
namespace {

bool all_zero_bits(const Bytes& b, size_t begin, size_t end) {
  return std::all_of(b.begin() + static_cast<std::ptrdiff_t>(begin),
                     b.begin() + static_cast<std::ptrdiff_t>(end),
                     [](std::byte v) { return v == std::byte{0}; });
}

template <class T>
std::vector<T> as(const Bytes& b) {
  std::vector<T> v(b.size() / sizeof(T));
  std::memcpy(v.data(), b.data(), b.size());
  return v;
}

bool any_nan(const std::vector<float>& v) {
  return std::any_of(v.begin(), v.end(), [](float f) { return std::isnan(f); });
}
bool any_nan(const std::vector<numerics::bf16>& v) {
  return std::any_of(v.begin(), v.end(),
                     [](numerics::bf16 f) { return std::isnan(numerics::to_float(f)); });
}

// ids of K = 1 such that expert e gets counts[e] tokens.
std::vector<int64_t> ids_with_counts(const std::vector<int>& counts) {
  std::vector<int64_t> ids;
  for (size_t e = 0; e < counts.size(); ++e) ids.insert(ids.end(), counts[e], e);
  // Not sorted: a fixed shuffle.
  for (size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[(i * 7919) % i]);
  return ids;
}

// ---- zero rows ----------------------------------------------------------------------------------

TEST(Cases, Z1_empty_groups_have_zero_weight_gradient) {
  Layer l({128, 64, 6, 1}, {255});
  l.run->set_ids({ids_with_counts({17, 0, 200, 33, 0, 5})});
  EXPECT_EQ(l.differences(), "");
  for (const auto tensor : {&RankTensors::d_gate, &RankTensors::d_up, &RankTensors::d_down}) {
    const Bytes& grad = l.run->rank(0).*tensor;
    const size_t size = grad.size() / 6;
    for (const size_t e : {1, 4}) EXPECT_TRUE(all_zero_bits(grad, e * size, (e + 1) * size));
    EXPECT_FALSE(all_zero_bits(grad, 0, size));
  }
}

TEST(Cases, Z2_every_slice_is_written_on_every_call) {
  Layer few({32, 32, 64, 1}, {4});
  EXPECT_EQ(few.differences(), "");
  EXPECT_FALSE(any_nan(as<float>(few.run->rank(0).d_gate)));
  few.run->set_ids({{-1, -1, -1, -1}});
  EXPECT_EQ(few.differences(), "");
  EXPECT_TRUE(all_zero_bits(few.run->rank(0).d_down, 0, few.run->rank(0).d_down.size()));
  Layer partial({32, 32, 4, 1}, {1 + 127 + 64 + 100});
  partial.run->set_ids({ids_with_counts({1, 127, 64, 100})});
  EXPECT_EQ(partial.differences(), "");
}

TEST(Cases, Z3_a_rank_that_receives_no_row_takes_part_in_backward) {
  Layer l({48, 32, 4, 1}, {8, 8});
  l.run->set_ids({{0, 1, 0, 1, 1, 1, 0, 0}, {0, 0, 0, 1, 0, 1, 1, 1}});
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(l.differences(), "");
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10);
}

TEST(Cases, Z5_ranks_without_tokens) {
  for (const auto& tokens : std::vector<std::vector<int64_t>>{{0, 5}, {5, 0}, {0, 0}}) {
    RunOptions o;
    o.workspace.max_tokens = 5;
    Layer l({32, 32, 4, 2, 16, true}, tokens, o);
    EXPECT_EQ(l.differences(), "");
    EXPECT_EQ(l.differences(), "") << "second time";
  }
}

TEST(Cases, Z8_all_tokens_on_one_expert_fit) {
  Layer l({32, 32, 4, 1}, {1024, 1024, 1024, 1024});
  l.run->set_ids(std::vector<std::vector<int64_t>>(4, std::vector<int64_t>(1024, 0)));
  EXPECT_EQ(l.differences(), "");
}

// ---- tiles --------------------------------------------------------------------------------------

TEST(Cases, T1_any_row_count) {
  Layer l({256, 128, 7, 1}, {1 + 15 + 16 + 17 + 31 + 33});
  l.run->set_ids({ids_with_counts({1, 15, 16, 17, 31, 33, 0})});
  EXPECT_EQ(l.differences(), "");
}

TEST(Cases, T3_correct_from_one_row_up) {
  for (const int most : {1, 8, 16, 32, 63, 64, 65, 127, 128, 129}) {
    const std::vector<int> counts{most, most / 2, 0, 1};
    Layer l({64, 64, 4, 1}, {most + most / 2 + 1});
    l.run->set_ids({ids_with_counts(counts)});
    EXPECT_EQ(l.differences(), "") << most;
  }
}

// ---- uneven ranks -------------------------------------------------------------------------------

TEST(Cases, U1_token_counts_that_change_from_call_to_call) {
  for (const auto& tokens :
       std::vector<std::vector<int64_t>>{{7, 7}, {7, 300}, {300, 7}, {0, 300}}) {
    RunOptions o;
    o.workspace.max_tokens = 300;
    Layer l({32, 32, 4, 2}, tokens, o);
    EXPECT_EQ(l.differences(), "") << testing::PrintToString(tokens);
  }
}

TEST(Cases, U3_fewer_tokens_than_ranks) {
  for (const auto& tokens :
       std::vector<std::vector<int64_t>>{{1, 0, 0, 0}, {0, 0, 2, 0}, {2, 1, 0, 0}, {2, 1, 1, 1}}) {
    Layer l({32, 32, 4, 2}, tokens);
    EXPECT_EQ(l.differences(), "") << testing::PrintToString(tokens);
  }
}

TEST(Cases, U4_counts_come_from_the_ids_that_place_the_rows) {
  Layer l({32, 32, 4, 2}, {6, 6});
  // Both slots on one rank for half of the tokens, some of them -1.
  l.run->set_ids({{0, 1, 0, 1, 0, 1, 2, 0, -1, 3, -1, -1}, {2, 3, 3, 2, 2, 3, 1, 3, 1, -1, 0, 2}});
  EXPECT_EQ(l.differences(), "");
}

// ---- ids ----------------------------------------------------------------------------------------

TEST(Cases, M1_negative_id_drops_the_slot) {
  for (const IdType type : {IdType::int32, IdType::int64}) {
    RunOptions o;
    o.id_type = type;
    Layer l({32, 32, 4, 2}, {3}, o);
    l.run->set_ids({{0, -1, -1, -1, 3, 2}});
    // The dropped slots' weights may be anything.
    l.run->set_topk_weight(0, 1, std::nan(""));
    l.run->set_topk_weight(0, 2, HUGE_VAL);
    l.run->both();
    const auto grads = as<float>(l.run->rank(0).d_topk_weights);
    for (const int slot : {1, 2, 3}) {
      EXPECT_EQ(grads[slot], 0);
      EXPECT_FALSE(std::signbit(grads[slot]));
    }
    l.run->set_topk_weight(0, 1, 0.25);
    l.run->set_topk_weight(0, 2, 0.5);
    const Bytes with_nan = l.run->all_outputs();
    EXPECT_EQ(l.differences(), "");
    EXPECT_EQ(l.run->all_outputs(), with_nan);
  }
}

TEST(Cases, M3_ids_beyond_the_table_are_an_error_on_all_ranks) {
  Layer l({32, 32, 4, 1}, {1, 1});
  for (const int64_t id : {int64_t{4}, int64_t{1} << 30, -(int64_t{1} << 31)}) {
    const int64_t good = l.run->id(1, 0);
    l.run->set_id(1, 0, id);
    const auto errors =
        on_ranks(2, [&](int r) { l.run->workspace(r).forward(l.run->forward_args(r)); });
    l.run->set_id(1, 0, good);
    for (const auto& e : errors) {
      ASSERT_TRUE(e);
      EXPECT_EQ(e->code(), ErrorCode::bad_routing);
      EXPECT_NE(std::strstr(e->what(), "rank 1, token 0, slot 0"), nullptr) << e->what();
      EXPECT_NE(std::strstr(e->what(), std::to_string(id).c_str()), nullptr) << e->what();
    }
    EXPECT_EQ(l.differences(), "");
  }
}

TEST(Cases, N3_the_marker_for_not_here_is_minus_one_only) {
  Layer l({32, 32, 2, 1}, {6});
  l.run->set_ids({{0, 1, -1, 1, -1, 0}});
  EXPECT_EQ(l.differences(), "");
  l.run->set_id(0, 2, 2);  // "number of experts" as a marker is refused
  EXPECT_THROW(l.run->forward(), Error);
}

TEST(Cases, Duplicates_of_an_expert_in_one_token_each_count) {
  Layer l({32, 32, 4, 3}, {5, 4});
  l.run->set_ids(
      {{1, 1, 1, 2, 0, 2, 3, 3, 0, 1, 2, 1, 0, 0, 0}, {1, 1, -1, 2, 2, 2, 3, 0, 3, 1, 0, 1}});
  EXPECT_EQ(l.differences(), "");
}

// ---- sizes --------------------------------------------------------------------------------------

TEST(Cases, S1_hidden_sizes_that_are_no_multiple_of_256) {
  for (const int64_t hidden : {192, 320, 2688}) {
    Layer l({hidden, 64, 2, 1}, {5});
    EXPECT_EQ(l.differences(), "") << hidden;
  }
}

TEST(Cases, S2_hidden_size_is_a_run_time_value) {
  for (const int64_t hidden : {1536, 2880, 3072, 4096, 6144}) {
    Layer l({hidden, 32, 2, 1}, {3});
    EXPECT_EQ(l.differences(), "") << hidden;
  }
}

TEST(Cases, S7_any_number_of_experts) {
  for (const int experts : {3, 5, 60, 257, 384, 513, 1025}) {
    const int topk = std::min(experts, 10);
    Layer l({16, 8, experts, topk}, {12});
    if (experts > 266) {  // the best ids all beyond 255
      for (int64_t i = 0; i < 12 * topk; ++i) l.run->set_id(0, i, 256 + i % (experts - 256));
    }
    EXPECT_EQ(l.differences(), "") << experts;
  }
  auto groups = Group::threads(1);
  EXPECT_THROW(Workspace(*groups[0], {16, 8, 4097, 1}, Precision::bf16, {.max_tokens = 1}), Error);
}

TEST(Cases, S8_topk_from_one_to_all_experts) {
  for (const int topk : {1, 9, 22, 32, 64}) {
    Layer l({24, 16, 64, topk}, {7, 6});
    EXPECT_EQ(l.differences(), "") << topk;
  }
  Layer all({24, 16, 8, 8}, {7});
  EXPECT_EQ(all.differences(), "");
}

TEST(Cases, S9_any_number_of_ranks) {
  for (const int ranks : {1, 3, 5, 6, 7, 8}) {
    for (const int each : {1, 2}) {
      Layer l({24, 16, ranks * each, 1}, split(29, ranks));
      EXPECT_EQ(l.differences(), "") << ranks << " ranks, " << each << " experts on each";
    }
  }
}

// ---- NaN ----------------------------------------------------------------------------------------

TEST(Cases, N1_padding_rows_are_never_read) {
  // The ring holds NaN from the call before wherever this call has padding.
  RunOptions o;
  o.workspace = {.max_tokens = 256, .ring_rows = 512};
  Layer bad({32, 32, 2, 1}, {256}, o), good({32, 32, 2, 1}, {40}, o);
  good.run->set_ids({ids_with_counts({30, 10})});
  good.run->both();
  const Bytes expected = good.run->all_outputs();
  std::memset(bad.run->rank(0).x.data(), 0xff, bad.run->rank(0).x.size());
  std::memset(bad.run->rank(0).d_y.data(), 0xff, bad.run->rank(0).d_y.size());
  for (int repeat = 0; repeat < 3; ++repeat) {
    Workspace& w = bad.run->workspace(0);
    w.forward(bad.run->forward_args(0));
    w.backward(bad.run->backward_args(0));
    good.run->poison_outputs();
    w.forward(good.run->forward_args(0));
    w.backward(good.run->backward_args(0));
    EXPECT_EQ(good.run->all_outputs(), expected);
  }
}

TEST(Cases, N1_a_nan_token_reaches_only_what_it_enters) {
  Layer l({32, 32, 4, 1}, {40, 20});
  l.run->set_ids({std::vector<int64_t>(40, 1), std::vector<int64_t>(20, 2)});
  l.run->set_id(0, 7, 0);  // the only row of expert 0
  l.run->both();
  const Bytes y = l.run->global(&RankTensors::y), d_gate = l.run->global(&RankTensors::d_gate);
  for (int c = 0; c < 32; ++c) l.run->rank(0).x[(7 * 32 + c) * 2 + 1] = std::byte{0x7f};
  for (int c = 0; c < 32; ++c) l.run->rank(0).x[(7 * 32 + c) * 2] = std::byte{0xc0};
  l.run->both();
  Bytes y_nan = l.run->global(&RankTensors::y), d_nan = l.run->global(&RankTensors::d_gate);
  for (int i = 0; i < 64; ++i) {
    if (i % 2 == 0) {
      EXPECT_TRUE(any_nan(as<numerics::bf16>(Bytes(&y_nan[7 * 64 + i], &y_nan[7 * 64 + i] + 2))));
    }
    y_nan[7 * 64 + i] = y[7 * 64 + i];
  }
  EXPECT_EQ(y_nan, y);
  const size_t expert = d_gate.size() / 4;
  EXPECT_TRUE(any_nan(as<float>(Bytes(d_nan.begin(), d_nan.begin() + 64))));
  EXPECT_TRUE(std::equal(d_gate.begin() + static_cast<std::ptrdiff_t>(expert), d_gate.end(),
                         d_nan.begin() + static_cast<std::ptrdiff_t>(expert)));
}

TEST(Cases, N1_infinite_weights_do_not_meet_padding) {
  Layer l({32, 32, 2, 1}, {10});
  l.run->set_ids({std::vector<int64_t>(10, 0)});
  l.run->both();
  const Bytes expected = l.run->all_outputs();
  auto& gate = l.run->rank(0).w_gate;  // expert 1 has no rows: its weights are never used
  for (size_t i = gate.size() / 2; i < gate.size(); i += 2) {
    gate[i] = std::byte{0x80};
    gate[i + 1] = std::byte{0x7f};
  }
  l.run->poison_outputs();
  l.run->both();
  EXPECT_EQ(l.run->all_outputs(), expected);
}

// ---- gradients ----------------------------------------------------------------------------------

TEST(Cases, G1_router_weights_have_exact_gradients) {
  RunOptions o;
  o.precision = Precision::fp64;
  Layer l({8, 6, 2, 2}, {4}, o);
  l.run->both();
  const auto grads = as<double>(l.run->rank(0).d_topk_weights);
  const auto d_y = as<double>(l.run->rank(0).d_y);
  const auto loss = [&] {
    l.run->forward();
    const auto y = as<double>(l.run->rank(0).y);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * d_y[i];
    return sum;
  };
  for (int slot = 0; slot < 8; ++slot) {
    const double w = l.run->topk_weight(0, slot), step = 1e-4;
    l.run->set_topk_weight(0, slot, w + step);
    const double above = loss();
    l.run->set_topk_weight(0, slot, w - step);
    const double below = loss();
    l.run->set_topk_weight(0, slot, w);
    EXPECT_NEAR(grads[slot], (above - below) / (2 * step), 1e-9);
  }
}

TEST(Cases, G2_router_gradients_do_not_depend_on_the_ranks) {
  Layer one({32, 16, 8, 2}, {24}), two({32, 16, 8, 2}, {12, 12});
  one.run->both();
  two.run->both();
  EXPECT_EQ(one.run->global(&RankTensors::d_topk_weights),
            two.run->global(&RankTensors::d_topk_weights));
}

TEST(Cases, G4_topk_one_with_weight_one_has_a_gradient) {
  Layer l({16, 16, 2, 1}, {3});
  for (int t = 0; t < 3; ++t) l.run->set_topk_weight(0, t, 1);
  EXPECT_EQ(l.differences(), "");
  for (const float g : as<float>(l.run->rank(0).d_topk_weights)) EXPECT_NE(g, 0);
}

TEST(Cases, G10_router_weights_are_applied_once) {
  RunOptions o;
  o.precision = Precision::fp32;
  Layer l({32, 16, 4, 2}, {20}, o);
  const auto run_with = [&](double w) {
    for (int64_t i = 0; i < 40; ++i) l.run->set_topk_weight(0, i, w);
    l.run->forward();
    return as<float>(l.run->rank(0).y);
  };
  const auto half = run_with(0.5), whole = run_with(1);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(half[i], 0.5f * whole[i]);
}

TEST(Cases, G10_zero_and_negative_router_weights_have_right_gradients) {
  Layer l({32, 16, 4, 2}, {20, 4});
  for (int64_t i = 0; i < 8; ++i) l.run->set_topk_weight(1, i, i % 2 ? 0 : -0.75);
  for (int64_t i = 0; i < 20; ++i) l.run->set_topk_weight(0, i, 0);
  EXPECT_EQ(l.differences(), "");
}

TEST(Cases, A1_gradients_arrive_in_the_promised_place) {
  for (const GradMode mode : {GradMode::sum, GradMode::accumulate, GradMode::storage}) {
    RunOptions o;
    o.mode = mode;
    Layer l({16, 32, 2, 1}, {8}, o);
    l.run->set_ids({{0, 1, 0, 1, 0, 1, 0, 1}});
    EXPECT_EQ(l.differences(), "");
    const auto& d = l.run->rank(0).d_gate;
    EXPECT_FALSE(all_zero_bits(d, 0, d.size() / 2));
    EXPECT_FALSE(all_zero_bits(d, d.size() / 2, d.size()));
  }
}

TEST(Cases, A1_accumulating_leaves_experts_without_rows_alone) {
  RunOptions o;
  o.mode = GradMode::accumulate;
  Layer l({16, 16, 4, 1}, {6}, o);
  l.run->set_ids({{0, 0, 2, 2, 0, 2}});
  std::memset(l.run->rank(0).d_gate.data(), 0xff, l.run->rank(0).d_gate.size());  // NaN
  l.run->both();
  const Bytes& d = l.run->rank(0).d_gate;
  const size_t size = d.size() / 4;
  EXPECT_TRUE(std::all_of(d.begin() + static_cast<std::ptrdiff_t>(size),
                          d.begin() + static_cast<std::ptrdiff_t>(2 * size),
                          [](std::byte b) { return b == std::byte{0xff}; }));
}

}  // namespace
}  // namespace mok::test
