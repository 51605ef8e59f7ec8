#include "plan/schedule.h"

#include <algorithm>

namespace mok::plan {

Schedule HostSchedule::view() const {
  Schedule s;
  s.tiles = static_cast<int32_t>(tile.size());
  s.minibatches = static_cast<int32_t>(fetch_count.size());
  s.windows = windows;
  s.segments = static_cast<int32_t>(segment.size());
  s.real_rows = real_rows;
  s.expert_begin = expert_begin.data();
  s.expert_rows = expert_rows.data();
  s.row_slot = row_slot.data();
  s.slot_row = slot_row.data();
  s.tile = tile.data();
  s.segment = segment.data();
  s.segment_of_tile = segment_of_tile.data();
  s.segment_begin = segment_begin.data();
  s.fetch_row = fetch_row.data();
  s.fetch_count = fetch_count.data();
  return s;
}

namespace {

// Rows of each expert, the tile table and the place of every slot.
void place_rows(const Geometry& g, const int32_t* const* ids, HostSchedule& out) {
  const int local = g.experts_local();
  const int first = g.first_expert();
  const auto for_each_local_slot = [&](auto&& f) {  // in global token order
    for (int src = 0; src < g.ranks; ++src) {
      for (int token = 0; token < g.tokens[src]; ++token) {
        for (int k = 0; k < g.topk; ++k) {
          const int expert = ids[src][int64_t{token} * g.topk + k] - first;
          if (expert >= 0 && expert < local) f(g.slot(src, token, k), expert);
        }
      }
    }
  };
  out.expert_rows.assign(local, 0);
  for_each_local_slot([&](int32_t, int expert) { ++out.expert_rows[expert]; });
  out.expert_begin.assign(local + 1, 0);
  for (int e = 0; e < local; ++e) {
    const int32_t rows = out.expert_rows[e];
    out.real_rows += rows;
    out.expert_begin[e + 1] = out.expert_begin[e] + ceil_div(rows, kTileRows) * kTileRows;
    for (int32_t done = 0; done < rows; done += kTileRows) {
      out.tile.push_back({.expert = e, .rows = std::min(rows - done, kTileRows)});
    }
  }
  out.row_slot.assign(out.tile.size() * kTileRows, -1);
  out.slot_row.assign(g.slots(), -1);
  std::vector<int32_t> next(out.expert_begin.begin(), out.expert_begin.end() - 1);
  for_each_local_slot([&](int32_t slot, int expert) {
    const int32_t row = next[expert]++;
    out.row_slot[row] = slot;
    out.slot_row[slot] = row;
  });
}

void cut_slices(const Geometry& g, HostSchedule& out) {
  const int tiles = static_cast<int>(out.tile.size());
  for (int begin = 0; begin < tiles;) {
    int end = begin + 1;
    while (end < tiles && out.tile[end].expert == out.tile[begin].expert &&
           end % g.minibatch_tiles != 0) {
      ++end;
    }
    for (int t = begin; t < end; ++t) {
      out.tile[t].slice_begin = begin;
      out.tile[t].slice_tiles = end - begin;
    }
    begin = end;
  }
}

void cut_segments(const Geometry& g, int minibatches, HostSchedule& out) {
  const int tiles = static_cast<int>(out.tile.size());
  const int window_tiles = g.window_tiles(tiles);
  out.segment_of_tile.assign(tiles, -1);
  for (int e = 0; e < g.experts_local(); ++e) {
    const ExpertTiles expert{e, out.expert_begin[e] / kTileRows,
                             out.expert_begin[e + 1] / kTileRows, out.expert_rows[e]};
    const auto first = static_cast<int32_t>(out.segment.size());
    for (int i = 0; i < segments_of(expert, window_tiles); ++i) {
      const Segment s = segment_of(g, tiles, expert, first, i);
      std::fill_n(out.segment_of_tile.begin() + s.first_tile, s.tiles, first + i);
      out.segment.push_back(s);
    }
  }
  out.segment_begin.assign(minibatches + 1, static_cast<int32_t>(out.segment.size()));
  int m = 0;
  for (size_t i = 0; i < out.segment.size(); ++i) {
    Segment& s = out.segment[i];
    while (m <= s.minibatch) out.segment_begin[m++] = static_cast<int32_t>(i);
    if (s.last || s.previous >= 0) continue;
    s.carry_reader = carry_before(s, window_tiles, out.tile.data(), out.segment_of_tile.data());
  }
}

void order_fetches(const Geometry& g, int minibatches, HostSchedule& out) {
  out.fetch_count.assign(minibatches, 0);
  out.fetch_row.assign(out.row_slot.size(), -1);
  const Schedule s = out.view();
  const int32_t minibatch_rows = g.minibatch_tiles * kTileRows;
  std::vector<int32_t> fetched;
  for (int m = 0; m < minibatches; ++m) {
    const int32_t begin = m * minibatch_rows;
    const int32_t end = std::min(begin + minibatch_rows, s.tiles * kTileRows);
    int32_t count[kMaxRanks] = {};
    fetched.clear();
    for (int32_t row = begin; row < end; ++row) {
      if (!is_fetched(g, s, row)) continue;
      fetched.push_back(row);
      ++count[g.slot_rank(out.row_slot[row])];
    }
    out.fetch_count[m] = static_cast<int32_t>(fetched.size());
    int32_t seen[kMaxRanks] = {};
    for (const int32_t row : fetched) {
      const int src = g.slot_rank(out.row_slot[row]);
      out.fetch_row[begin + fetch_position(g, count, src, seen[src]++)] = row;
    }
  }
}

}  // namespace

HostSchedule build_schedule(const Geometry& g, const int32_t* const* ids) {
  HostSchedule out;
  place_rows(g, ids, out);
  const int tiles = static_cast<int>(out.tile.size());
  const int minibatches = std::max(1, ceil_div(tiles, g.minibatch_tiles));
  out.windows = std::max(1, ceil_div(tiles, g.window_tiles(tiles)));
  cut_slices(g, out);
  cut_segments(g, minibatches, out);
  order_fetches(g, minibatches, out);
  return out;
}

bool find_bad_id(const Geometry& g, const int32_t* const* ids, BadId* bad) {
  for (int src = 0; src < g.ranks; ++src) {
    for (int token = 0; token < g.tokens[src]; ++token) {
      for (int k = 0; k < g.topk; ++k) {
        const int32_t id = ids[src][int64_t{token} * g.topk + k];
        if (id >= -1 && id < g.experts) continue;
        *bad = {src, token, k, id};
        return true;
      }
    }
  }
  return false;
}

}  // namespace mok::plan
