#include "cli/plan_facts.h"

#include <algorithm>

namespace mok::cli {

RankIds::RankIds(const Spec& spec, const problem::Problem& problem) {
  for (int r = 0; r < spec.ranks(); ++r) {
    const int64_t first = spec.first_token(r);
    ids_.emplace_back(static_cast<size_t>(spec.tokens[r] * spec.shape.topk));
    problem.fill_topk_ids(first, first + spec.tokens[r], ids_.back().data());
  }
  for (const auto& ids : ids_) pointers_.push_back(ids.data());
}

Plans make_plans(const Spec& spec, const RankIds& ids, plan::Direction direction) {
  return plan::make_plans(geometry(spec, direction), ids.pointers());
}

int64_t Links::total() const {
  int64_t sum = 0;
  for (const auto& row : bytes) {
    for (const int64_t b : row) sum += b;
  }
  return sum;
}

int64_t Links::busiest() const {
  int64_t most = 0;
  for (int r = 0; r < kMaxRanks; ++r) {
    int64_t out = 0, in = 0;
    for (int other = 0; other < kMaxRanks; ++other) {
      out += bytes[r][other];
      in += bytes[other][r];
    }
    most = std::max({most, out, in});
  }
  return most;
}

Links links(const Spec& spec, const Plans& plans, const std::vector<int>& place) {
  Links links;
  const int64_t element = element_size(spec.precision), scalar = weight_size(spec.precision);
  const int64_t row = spec.shape.hidden * element;
  const auto move = [&](int from, int to, int64_t bytes) {
    if (from == to || (!place.empty() && place[from] == place[to])) return;
    links.bytes[from][to] += bytes;
  };
  for (const auto& host : plans) {
    const plan::Plan& p = host->plan;
    const int rank = p.g.rank;
    const bool forward = p.g.direction == plan::Direction::forward;
    const bool wanted = p.g.wanted.d_gate || p.g.wanted.d_up;
    const bool recomputes = !forward && plan::saved_minibatches(p) < p.s.minibatches;
    const bool x = forward || wanted || recomputes;
    const int64_t wire = p.g.wire_row_bytes(static_cast<int>(element));
    const int64_t fetched = (x ? wire : 0) + (forward ? 0 : wire);
    const int32_t minibatch_rows = p.g.minibatch_tiles * plan::kTileRows;
    for (int m = 0; m < p.s.minibatches; ++m) {
      for (int32_t i = 0; i < p.s.fetch_count[m]; ++i) {
        const int32_t slot = p.s.row_slot[p.s.fetch_row[m * minibatch_rows + i]];
        move(p.g.slot_rank(slot), rank, fetched);
      }
    }
    for (int32_t i = 0; i < p.s.tiles * plan::kTileRows; ++i) {
      const int32_t slot = p.s.row_slot[i];
      if (slot < 0) continue;
      const int owner = p.g.slot_rank(slot);
      if (forward || p.g.wanted.d_x) move(rank, owner, row);
      if (!forward) {
        move(owner, rank, scalar);  // the router weight
        if (p.g.wanted.d_topk_weights) move(rank, owner, scalar);
      }
    }
    for (int r = 0; r < p.g.ranks; ++r) move(r, rank, int64_t{p.g.tokens[r]} * p.g.topk * 4);
  }
  return links;
}

Rows rows(const Plans& plans) {
  Rows rows;
  for (const auto& p : plans) {
    rows.real += p->plan.s.real_rows;
    rows.padded += int64_t{p->plan.s.tiles} * plan::kTileRows;
  }
  return rows;
}

}  // namespace mok::cli
