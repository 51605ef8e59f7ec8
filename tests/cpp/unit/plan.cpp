// The plan: schedules by value, `validate` over random routings, planted faults.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <random>
#include <set>
#include <string>

#include "plan/sizing.h"
#include "plan/validate.h"

namespace mok::plan {
namespace {

struct Routing {
  std::vector<std::vector<int32_t>> ids;
  std::vector<const int32_t*> pointers() const {
    std::vector<const int32_t*> p;
    for (const auto& v : ids) p.push_back(v.data());
    return p;
  }
};

int uniform(std::mt19937& rng, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(rng);
}

Geometry random_geometry(std::mt19937& rng) {
  Geometry g;
  g.ranks = uniform(rng, 1, 4);
  g.experts = g.ranks * uniform(rng, 1, 4);
  g.topk = uniform(rng, 1, std::min(4, g.experts));
  g.hidden = 64 * uniform(rng, 1, 9);
  g.intermediate = 64 * uniform(rng, 1, 5);
  if (uniform(rng, 0, 1)) g.shared_intermediate = 64 * uniform(rng, 1, 4);
  g.shared_gate = g.has_shared() && uniform(rng, 0, 1);
  g.keep_shared = uniform(rng, 0, 1);
  g.max_tokens = uniform(rng, 1, 300);
  g.ring_tiles = uniform(rng, 1, 8);
  g.minibatch_tiles = uniform(rng, 1, 4);
  g.stage_rows = uniform(rng, 1, 80);
  g.fetch_rows = uniform(rng, 1, 40);
  g.reduce_tokens = uniform(rng, 1, 300);
  g.saved_rows = uniform(rng, 0, 1) ? g.most_rows() : uniform(rng, 0, 900);
  g.normalize();
  return g;
}

void new_call(std::mt19937& rng, Geometry& g) {
  for (int r = 0; r < g.ranks; ++r) {
    g.tokens[r] = uniform(rng, 0, 4) == 0 ? 0 : uniform(rng, 0, g.max_tokens);
  }
  g.direction = uniform(rng, 0, 1) ? Direction::forward : Direction::backward;
  Wanted& w = g.wanted;
  for (bool* b : {&w.d_x, &w.d_topk_weights, &w.d_gate, &w.d_up, &w.d_down, &w.d_shared_gate,
                  &w.d_shared_up, &w.d_shared_down, &w.d_shared_vector}) {
    *b = uniform(rng, 0, 3) != 0;
  }
}

Routing random_routing(std::mt19937& rng, const Geometry& g) {
  Routing routing;
  const int kind = uniform(rng, 0, 4);  // 0 all on one expert, 1 none, else random
  const int only = uniform(rng, 0, g.experts - 1);
  for (int r = 0; r < g.ranks; ++r) {
    auto& ids = routing.ids.emplace_back(int64_t{g.tokens[r]} * g.topk);
    for (int32_t& id : ids) {
      id = kind == 0 ? only : kind == 1 ? -1 : uniform(rng, -1, g.experts - 1);
    }
  }
  return routing;
}

std::string join(const std::vector<std::string>& lines) {
  std::string all;
  for (const auto& line : lines) all += line + "\n";
  return all;
}

TEST(Plan, every_random_program_is_valid) {
  const unsigned first = std::random_device{}();
  const int problems = MOK_SANITIZED ? 500 : 2000;
  std::cout << "first seed " << first << "\n";
  for (int n = 0; n < problems; ++n) {
    const unsigned seed = first + n;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    Geometry g = random_geometry(rng);
    Calls calls;
    for (int c = 0; c < 2; ++c) {
      new_call(rng, g);
      const Routing routing = random_routing(rng, g);
      calls.push_back(make_plans(g, routing.pointers().data()));
      for (const auto& plan : calls.back()) {
        ASSERT_EQ(join(validate_schedule(*plan, routing.pointers().data())), "");
      }
    }
    const auto errors = validate(make_program(calls));
    ASSERT_TRUE(errors.empty()) << join(errors);
  }
}

// The schedule against a direct reading of the contract.
TEST(Plan, rows_stand_in_global_token_order_whatever_the_split) {
  const unsigned first = std::random_device{}();
  std::cout << "first seed " << first << "\n";
  for (int n = 0; n < 200; ++n) {
    const unsigned seed = first + n;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    Geometry g = random_geometry(rng);
    new_call(rng, g);
    const Routing routing = random_routing(rng, g);
    const auto plans = make_plans(g, routing.pointers().data());
    std::vector<int> seen(g.slots(), 0);
    for (const auto& host : plans) {
      const HostSchedule& s = host->schedule;
      for (int e = 0; e < g.experts_local(); ++e) {
        ASSERT_EQ(s.expert_begin[e] % kTileRows, 0);
        std::vector<int32_t> expected;
        for (int r = 0; r < g.ranks; ++r) {
          for (int t = 0; t < g.tokens[r]; ++t) {
            for (int k = 0; k < g.topk; ++k) {
              if (routing.ids[r][t * g.topk + k] == host->plan.g.first_expert() + e) {
                expected.push_back(g.slot(r, t, k));
              }
            }
          }
        }
        ASSERT_EQ(s.expert_rows[e], static_cast<int>(expected.size()));
        for (int row = s.expert_begin[e]; row < s.expert_begin[e + 1]; ++row) {
          const int i = row - s.expert_begin[e];
          const bool valid = i < static_cast<int>(expected.size());
          ASSERT_EQ(s.row_slot[row], valid ? expected[i] : -1);
          if (valid) {
            ASSERT_EQ(s.slot_row[expected[i]], row);
            ++seen[expected[i]];
          }
        }
      }
      // A token is fetched once per window, for its first row.
      std::set<int32_t> fetched;
      for (size_t m = 0; m < s.fetch_count.size(); ++m) {
        const auto begin = s.fetch_row.begin() + m * g.minibatch_tiles * kTileRows;
        for (auto row = begin; row != begin + s.fetch_count[m]; ++row) {
          ASSERT_TRUE(fetched.insert(*row).second);
          ASSERT_EQ(*row / (g.minibatch_tiles * kTileRows), static_cast<int>(m));
        }
      }
      std::set<std::pair<int, int>> pulls;
      const int window_rows = g.window_tiles(static_cast<int>(s.tile.size())) * kTileRows;
      for (size_t row = 0; row < s.row_slot.size(); ++row) {
        if (s.row_slot[row] < 0) continue;
        const int window = static_cast<int>(row) / window_rows;
        const bool first_of_token = pulls.insert({window, s.row_slot[row] / g.topk}).second;
        ASSERT_EQ(fetched.count(static_cast<int32_t>(row)) == 1, first_of_token) << "row " << row;
      }
    }
    for (int r = 0; r < g.ranks; ++r) {
      for (int t = 0; t < g.max_tokens; ++t) {
        for (int k = 0; k < g.topk; ++k) {
          const bool routed = t < g.tokens[r] && routing.ids[r][t * g.topk + k] >= 0;
          ASSERT_EQ(seen[g.slot(r, t, k)], routed ? 1 : 0);
        }
      }
    }
  }
}

TEST(Plan, tokens_of_a_reduce_task) {
  for (int64_t tokens = 1; tokens < 20000; tokens += 7) {
    const int32_t of_task = reduce_task_tokens(tokens);
    ASSERT_EQ(of_task % 8, 0) << tokens;
    ASSERT_TRUE(of_task >= 8 && of_task <= 64) << tokens;
    ASSERT_TRUE(ceil_div<int64_t>(tokens, of_task) <= 128 || of_task == 64) << tokens;
  }
}

TEST(Plan, fetches_take_the_sources_in_turn) {
  Geometry g;
  g.ranks = 4;
  g.rank = 2;
  g.experts = 4;
  g.topk = 1;
  g.hidden = g.intermediate = 64;
  g.max_tokens = 8;
  g.ring_tiles = 4;
  g.minibatch_tiles = 2;
  for (int r = 0; r < 4; ++r) g.tokens[r] = 8;
  Routing routing;
  for (int r = 0; r < 4; ++r) routing.ids.emplace_back(8, 2);  // everything to rank 2
  routing.ids[0].assign(8, -1);
  const HostPlan plan(g, routing.pointers().data());
  std::vector<int> sources;
  ASSERT_EQ(plan.schedule.fetch_count, std::vector<int32_t>{24});
  for (int i = 0; i < 24; ++i) {
    sources.push_back(g.slot_rank(plan.schedule.row_slot[plan.schedule.fetch_row[i]]));
  }
  std::vector<int> expected;
  for (int i = 0; i < 8; ++i) expected.insert(expected.end(), {2, 3, 1});
  EXPECT_EQ(sources, expected);
}

TEST(Plan, finds_the_first_bad_id) {
  Geometry g;
  g.ranks = 2;
  g.experts = 4;
  g.topk = 2;
  g.max_tokens = g.tokens[0] = g.tokens[1] = 3;
  Routing routing;
  routing.ids = {{0, 1, -1, 3, 2, 2}, {0, 0, 1, 4, -2, 1 << 30}};
  BadId bad{};
  ASSERT_TRUE(find_bad_id(g, routing.pointers().data(), &bad));
  EXPECT_EQ(bad.rank, 1);
  EXPECT_EQ(bad.token, 1);
  EXPECT_EQ(bad.k, 1);
  EXPECT_EQ(bad.id, 4);
  routing.ids[1] = {0, 0, 1, 3, -1, 2};
  EXPECT_FALSE(find_bad_id(g, routing.pointers().data(), &bad));
}

// ---- planted faults: each must be seen ----

class PlantedFault : public ::testing::Test {
 protected:
  void SetUp() override { build(1); }
  void build(int minibatch_tiles) {
    calls_.clear();
    routing_ = {};
    std::mt19937 rng(7);
    Geometry g;
    g.ranks = 2;
    g.experts = 4;
    g.topk = 2;
    g.hidden = 320;
    g.intermediate = 192;
    g.shared_intermediate = 64;
    g.shared_gate = true;
    g.max_tokens = 400;
    g.ring_tiles = 4;
    g.minibatch_tiles = minibatch_tiles;
    g.reduce_tokens = 64;
    g.saved_rows = 256;
    g.normalize();
    for (const Direction d : {Direction::forward, Direction::backward, Direction::forward}) {
      g.direction = d;
      g.tokens[0] = 400;
      g.tokens[1] = 250;
      Routing routing;
      for (int r = 0; r < 2; ++r) {
        auto& ids = routing.ids.emplace_back(g.tokens[r] * g.topk);
        for (auto& id : ids) id = uniform(rng, -1, 3);
      }
      calls_.push_back(make_plans(g, routing.pointers().data()));
      if (routing_.ids.empty()) routing_ = routing;
    }
    program_ = make_program(calls_);
    ASSERT_EQ(join(validate(program_)), "");
  }
  template <class F>
  int count_caught(F&& plant, const char* kind) {
    int caught = 0;
    for (size_t n = 0; n < program_.nodes.size(); ++n) {
      Program broken = program_;
      if (!plant(broken.nodes[n])) continue;
      const auto errors = validate(broken, 1);
      EXPECT_FALSE(errors.empty()) << "node " << n;
      if (!errors.empty() && errors[0].starts_with(kind)) ++caught;
      n += 16;  // a sample: every node would take minutes
    }
    return caught;
  }

  Calls calls_;
  Routing routing_;  // of the first call
  Program program_;
};

TEST_F(PlantedFault, wrong_target) {
  EXPECT_GT(count_caught(
                [](Node& node) {
                  if (node.waits.empty() || node.kind != Node::Kind::task) return false;
                  node.waits[0].target -= 1;
                  return true;
                },
                "counter"),
            10);
}

TEST_F(PlantedFault, missing_signal) {
  EXPECT_GT(count_caught(
                [](Node& node) {
                  // window_done of the last windows has no waiter; every other signal has one.
                  if (node.signals.empty() || node.signals[0].counter == Counter::window_done ||
                      node.task.kind == TaskKind::weight_grad) {
                    return false;
                  }
                  node.signals.erase(node.signals.begin());
                  return true;
                },
                "counter"),
            10);
}

TEST_F(PlantedFault, missing_wait) {
  EXPECT_GT(count_caught(
                [](Node& node) {
                  // Flags of ranks that share nothing with the task may be redundant.
                  if (node.waits.empty() || is_flag(node.waits[0].counter) ||
                      node.task.kind == TaskKind::weight_grad ||
                      node.task.kind == TaskKind::shared_weight_grad ||
                      announced_flag(node.task.kind) != Counter::count) {
                    return false;
                  }
                  node.waits.erase(node.waits.begin());
                  return true;
                },
                "memory"),
            10);
}

TEST_F(PlantedFault, queue_out_of_order) {
  Program broken = program_;
  std::vector<Node>& nodes = broken.nodes;
  const auto is_compute = [](const Node& n) {
    return n.kind == Node::Kind::task && n.queue == Queue::compute && n.call == 0 && n.rank == 0;
  };
  const auto first = std::find_if(nodes.begin(), nodes.end(), is_compute);
  const auto last = std::find_if(nodes.rbegin(), nodes.rend(), is_compute);
  std::swap(*first, *last);  // reduce first, the tiles that it waits for behind it
  const auto errors = validate(broken, 1);
  ASSERT_FALSE(errors.empty());
  EXPECT_TRUE(errors[0].starts_with("order")) << errors[0];
}

// A tile that waits for the tile before it: in order as it stands, but not when they are joined.
TEST_F(PlantedFault, a_tile_that_cannot_be_joined) {
  ASSERT_NO_FATAL_FAILURE(build(2));
  Program broken = program_;
  std::vector<Node>& nodes = broken.nodes;
  const auto is_gate_up = [](const Node& n) {
    return n.kind == Node::Kind::task && n.task.kind == TaskKind::gate_up && n.call == 0 &&
           n.rank == 0;
  };
  int32_t columns = 0;
  for (const Node& n : nodes) {
    if (is_gate_up(n)) columns = std::max(columns, n.task.column + 1);
  }
  const auto second = std::find_if(nodes.begin(), nodes.end(), [&](const Node& n) {
    return is_gate_up(n) && n.task.tile % 2 == 1 && n.task.column == columns - 1;
  });
  ASSERT_NE(second, nodes.end());
  second->waits.push_back({Counter::hidden, second->task.tile - 1, columns});
  const auto errors = validate(broken, 1);
  ASSERT_FALSE(errors.empty());
  EXPECT_TRUE(errors[0].starts_with("order")) << errors[0];
}

TEST_F(PlantedFault, swapped_rows) {
  HostPlan& plan = *calls_[0][0];
  auto& slots = plan.schedule.row_slot;
  // Two rows of different experts change places, the inverse table does not.
  std::swap(slots.front(), slots[plan.schedule.expert_begin[1]]);
  EXPECT_NE(join(validate_schedule(plan, routing_.pointers().data())), "");
}

TEST_F(PlantedFault, ring_released_too_early) {
  Program broken = program_;
  int planted = 0;
  for (Node& node : broken.nodes) {
    planted += static_cast<int>(
        std::erase_if(node.waits, [](const Wait& w) { return w.counter == Counter::window_done; }));
  }
  ASSERT_GT(planted, 0);
  const auto errors = validate(broken, 1);
  ASSERT_FALSE(errors.empty());
  EXPECT_TRUE(errors[0].starts_with("memory")) << errors[0];
}

TEST_F(PlantedFault, rank_leaves_before_its_peers_have_returned) {
  Program broken = program_;
  for (Node& node : broken.nodes) {
    std::erase_if(node.waits, [](const Wait& w) { return w.counter == Counter::returned_flag; });
  }
  const auto errors = validate(broken, 1);
  ASSERT_FALSE(errors.empty());
  EXPECT_TRUE(errors[0].starts_with("memory")) << errors[0];
}

}  // namespace
}  // namespace mok::plan
