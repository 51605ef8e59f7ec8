// The schedule of one rank: where every routed row stands, and in which order rows are fetched.
//
// Rows are sorted by local expert; inside an expert they stand in global token order (rank, token,
// k) and start at a tile boundary. The place of a row depends on the routing alone, never on the
// number of ranks, which is what makes bits independent of EP. The order of *fetching* is free: it
// takes the source ranks in turn so that every link is loaded evenly.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/geometry.h"

namespace mok::plan {

struct Tile {
  int32_t expert = 0;       // local expert
  int32_t rows = 0;         // valid rows, 1..kTileRows; the rest is padding
  int32_t slice_begin = 0;  // first tile of the slice: same expert, same minibatch
  int32_t slice_tiles = 0;
};
static_assert(sizeof(Tile) == 16);

// The part of an expert's rows that lies in one window; an expert without rows has one empty
// segment. Weight gradients are computed segment by segment, accumulators carried on in order.
struct Segment {
  int32_t expert = 0;
  int32_t first_tile = 0;
  int32_t tiles = 0;
  int32_t rows = 0;  // valid rows; they are contiguous from the first tile's first row
  int32_t window = 0;
  int32_t minibatch = 0;  // of the last tile: when the segment is complete
  int32_t previous = -1;  // segment of the same expert in the window before: hands on its sums
  int32_t last = 1;       // 1 = no later segment of this expert
  // The one carry buffer is free for this segment's sums when that segment is done (-1: at once).
  int32_t carry_reader = -1;
};
static_assert(sizeof(Segment) == 36);

// One entry of the device-visible table; tables are read through these pointers on host and device.
struct Schedule {
  int32_t tiles = 0;
  int32_t minibatches = 0;  // at least 1
  int32_t windows = 0;      // at least 1
  int32_t segments = 0;
  int32_t real_rows = 0;                     // rows without padding
  const int32_t* expert_begin = nullptr;     // [E_local + 1] first row of each expert
  const int32_t* expert_rows = nullptr;      // [E_local] rows without padding
  const int32_t* row_slot = nullptr;         // [tiles * kTileRows] slot, -1 on padding
  const int32_t* slot_row = nullptr;         // [R * T_max * K] row on this rank, -1 = not here
  const Tile* tile = nullptr;                // [tiles]
  const Segment* segment = nullptr;          // [segments]
  const int32_t* segment_of_tile = nullptr;  // [tiles]
  const int32_t* segment_begin = nullptr;    // [minibatches + 1] first segment of each minibatch
  // Minibatch m's fetch list is fetch_row[m * minibatch rows + 0 .. fetch_count[m]).
  const int32_t* fetch_row = nullptr;    // [tiles * kTileRows]
  const int32_t* fetch_count = nullptr;  // [minibatches]
};

// Calls f(row, k) for each of a token's rows on this rank in `window`, in k order.
template <class F>
MOK_HD void for_each_token_row(const Geometry& g, const Schedule& s, int src, int token, int window,
                               F&& f) {
  const int32_t window_rows = g.window_tiles(s.tiles) * kTileRows;
  for (int k = 0; k < g.topk; ++k) {
    const int32_t row = s.slot_row[g.slot(src, token, k)];
    if (row >= 0 && row / window_rows == window) f(row, k);
  }
}

// Whether the row is in the fetch list: a token is fetched once per window, for the first of its
// rows, and stored to all of them. So it crosses the link once, and is expanded once if it is
// quantised.
MOK_HD inline bool is_fetched(const Geometry& g, const Schedule& s, int32_t row) {
  const int32_t slot = s.row_slot[row];
  if (slot < 0) return false;
  const int window = row / (g.window_tiles(s.tiles) * kTileRows);
  bool first = true;
  for_each_token_row(g, s, g.slot_rank(slot), g.slot_token(slot), window,
                     [&](int32_t other, int) { first = first && other >= row; });
  return first;
}

// Calls f(row) for each row that is stored when `fetched` (an entry of the fetch list) is pulled.
template <class F>
MOK_HD void for_each_stored_row(const Geometry& g, const Schedule& s, int32_t fetched, F&& f) {
  const int32_t slot = s.row_slot[fetched];
  const int window = fetched / (g.window_tiles(s.tiles) * kTileRows);
  for_each_token_row(g, s, g.slot_rank(slot), g.slot_token(slot), window,
                     [&](int32_t row, int) { f(row); });
}

// Position, inside a minibatch, of the i-th fetched row whose source is `src`: sources take turns,
// each rank beginning with itself. `count[r]` = fetched rows of the minibatch with source r.
MOK_HD inline int32_t fetch_position(const Geometry& g, const int32_t* count, int src, int32_t i) {
  int32_t position = 0;
  const int turn = (src - g.rank + g.ranks) % g.ranks;
  for (int r = 0; r < g.ranks; ++r) {
    position += count[r] < i ? count[r] : i;
    if ((r - g.rank + g.ranks) % g.ranks < turn && count[r] > i) ++position;
  }
  return position;
}

// ---- segments ---------------------------------------------------------------------------------
//
// Segments are numbered by expert, then by window. With one window every expert has one segment, of
// its own number.

struct ExpertTiles {
  int32_t expert;      // local
  int32_t begin, end;  // tiles; begin of the next expert where there is no row
  int32_t rows;        // without padding
};

MOK_HD inline int32_t segments_of(const ExpertTiles& e, int window_tiles) {
  return e.begin == e.end ? 1 : (e.end - 1) / window_tiles - e.begin / window_tiles + 1;
}

// The expert's i-th segment; its first one is number `first` of all. `tiles` of all experts.
// carry_reader is left to `carry_before`, which needs the tile table.
MOK_HD inline Segment segment_of(const Geometry& g, int tiles, const ExpertTiles& e, int32_t first,
                                 int i) {
  const int window_tiles = g.window_tiles(tiles);
  // Behind the last tile an expert without rows counts as in that tile's window and minibatch.
  const int last_of_all = tiles > 0 ? tiles - 1 : 0;
  const int window = (e.begin < last_of_all ? e.begin : last_of_all) / window_tiles + i;
  const int window_begin = window * window_tiles, window_end = window_begin + window_tiles;
  Segment s;
  s.expert = e.expert;
  s.window = window;
  s.first_tile = i == 0 ? e.begin : window_begin;
  const int end = e.end < window_end ? e.end : window_end;
  s.tiles = end - s.first_tile;
  const int32_t before = (s.first_tile - e.begin) * kTileRows;
  const int32_t upto = (end - e.begin) * kTileRows;
  s.rows = (upto < e.rows ? upto : e.rows) - before;
  const int last_tile = s.tiles > 0 ? end - 1 : e.begin < last_of_all ? e.begin : last_of_all;
  s.minibatch = last_tile / g.minibatch_tiles;
  s.previous = i == 0 ? -1 : first + i - 1;
  s.last = e.end <= window_end;
  return s;
}

// The last segment before `s` that reads the carry buffer, for an `s` that is the first to write
// it: the last segment of the last expert before that straddles a window boundary; -1 if none does.
MOK_HD inline int32_t carry_before(const Segment& s, int window_tiles, const Tile* tile,
                                   const int32_t* segment_of_tile) {
  for (int window = s.window; window > 0; --window) {
    const int boundary = window * window_tiles;
    if (tile[boundary - 1].expert == tile[boundary].expert) return segment_of_tile[boundary];
  }
  return -1;
}

// Host tables and their view.
struct HostSchedule {
  Schedule view() const;

  std::vector<int32_t> expert_begin, expert_rows, row_slot, slot_row, segment_of_tile,
      segment_begin, fetch_row, fetch_count;
  std::vector<Tile> tile;
  std::vector<Segment> segment;
  int32_t windows = 1;
  int32_t real_rows = 0;
};

struct BadId {  // the first id outside [-1, E) in global token order
  int32_t rank, token, k;
  int64_t id;
};

// ids[r]: [tokens[r], K] expert ids of rank r, each -1 or in [0, E) (see `find_bad_id`).
HostSchedule build_schedule(const Geometry& g, const int32_t* const* ids);

// Looks for an id outside [-1, E); returns true and fills `bad` when there is one.
bool find_bad_id(const Geometry& g, const int32_t* const* ids, BadId* bad);

}  // namespace mok::plan
