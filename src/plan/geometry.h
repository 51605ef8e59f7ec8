// What all ranks of a call agree on, and the tile sizes. Host + device; no I/O, no threads.
#pragma once

#include <cstdint>

#include "mok/types.h"
#include "numerics/hd.h"

namespace mok::plan {

// A tile of rows belongs to one expert. kTileInter columns of gate stand beside the same columns of
// up, so a gate-up tile is kTileRows x 2*kTileInter and a thread holds g and u of one element.
inline constexpr int kTileRows = 128;
inline constexpr int kTileInter = 128;  // columns of I in a gate-up tile
// Columns of I in a d_hidden tile: not 256, so that g and u can be fetched beside the accumulators.
inline constexpr int kTileDHidden = 192;
inline constexpr int kTileDHiddenFp8 = 256;  // two blocks of 128
inline constexpr int kTileHidden = 256;      // columns of H in a down or d_input tile
inline constexpr int kGradRows = 128;        // a weight-gradient tile is kGradRows x kGradCols
inline constexpr int kGradCols = 256;

enum class Direction : int32_t { forward, backward };

// Which gradients a backward call computes; products that nobody asked for are skipped.
struct Wanted {
  bool d_x = true;
  bool d_topk_weights = true;
  bool d_gate = true, d_up = true, d_down = true;
  bool d_shared_gate = true, d_shared_up = true, d_shared_down = true, d_shared_vector = true;
};

template <class Int>
MOK_HD constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

struct Geometry {
  int32_t ranks = 1;  // R
  int32_t rank = 0;   // whose plan this is
  int32_t experts = 0, topk = 0;
  int32_t hidden = 0, intermediate = 0, shared_intermediate = 0;
  bool shared_gate = false;
  int32_t max_tokens = 0;          // T_max
  int32_t tokens[kMaxRanks] = {};  // T of each rank in this call
  Direction direction = Direction::forward;
  Wanted wanted;                         // backward only
  bool keep_shared = true;               // backward: the shared expert's rows were kept by forward
  int32_t ring_tiles = 2;                // tiles of rows that may be in flight
  int32_t minibatch_tiles = 32;          // divides the window
  int64_t saved_rows = 0;                // backward: rows whose gate and up were kept by forward
  int32_t block = 0;                     // quantised: elements of a block of 32 or 128; else 0
  bool own_staged = false;               // own rows are fetched from the staging too
  bool codes_in_ring = false;            // quantised rows stay as they travel; backward has both
  int32_t tile_d_hidden = kTileDHidden;  // columns of a routed d_hidden tile: whole blocks
  int32_t stage_rows = 64;               // tokens of one stage task
  int32_t fetch_rows = 8;                // first rows of one fetch task
  int32_t reduce_tokens = 16;            // tokens of one reduce task

  MOK_HD int experts_local() const { return experts / ranks; }
  MOK_HD int first_expert() const { return rank * experts_local(); }
  MOK_HD int own_tokens() const { return tokens[rank]; }
  MOK_HD int own_tiles() const { return ceil_div(own_tokens(), kTileRows); }  // shared expert
  MOK_HD int columns_inter() const { return ceil_div(intermediate, kTileInter); }
  MOK_HD int columns_d_hidden() const {  // constants: kernels divide by them often
    return tile_d_hidden == kTileDHidden ? ceil_div(intermediate, kTileDHidden)
                                         : ceil_div(intermediate, kTileDHiddenFp8);
  }
  MOK_HD int columns_hidden() const { return ceil_div(hidden, kTileHidden); }
  MOK_HD int columns_shared() const { return ceil_div(shared_intermediate, kTileInter); }
  MOK_HD int columns_shared_d_hidden() const { return ceil_div(shared_intermediate, kTileDHidden); }
  MOK_HD bool has_shared() const { return shared_intermediate > 0; }
  // A row of x or d_y on its way to another rank, `element` bytes an element where it is not
  // quantised. Quantised: E4M3 codes, then the blocks' scales, both padded to what a bulk copy
  // moves.
  MOK_HD int64_t wire_scales_at() const { return scales_at(hidden); }
  MOK_HD int64_t wire_row_bytes(int element) const {
    return block == 0 ? int64_t{hidden} * element : code_row_bytes(hidden);
  }
  // The same of any row of `columns` codes.
  MOK_HD int64_t scales_at(int columns) const { return int64_t{ceil_div(columns, 16)} * 16; }
  MOK_HD int64_t code_row_bytes(int columns) const {
    return scales_at(columns) + int64_t{ceil_div(ceil_div(columns, block), 16)} * 16;
  }

  // Slot = one (rank, token, k); ascending slot number is the global token order.
  MOK_HD int64_t slots() const { return int64_t{ranks} * max_tokens * topk; }
  MOK_HD int32_t slot(int src, int token, int k) const {
    return (src * max_tokens + token) * topk + k;
  }
  MOK_HD int slot_rank(int32_t slot) const { return slot / topk / max_tokens; }
  MOK_HD int slot_token(int32_t slot) const { return slot / topk % max_tokens; }
  MOK_HD int slot_k(int32_t slot) const { return slot % topk; }
  // Place of a slot in its owner's [T_max * K] tables.
  MOK_HD int32_t owner_index(int32_t slot) const { return slot % (max_tokens * topk); }

  // Bounds over every routing, from which tables are sized.
  MOK_HD int64_t most_rows() const { return int64_t{most_tiles()} * kTileRows; }
  MOK_HD int most_tiles() const {
    return static_cast<int>(slots() / kTileRows) + experts_local() + 1;
  }
  MOK_HD int most_minibatches() const { return ceil_div(most_tiles(), minibatch_tiles); }
  MOK_HD int most_windows() const { return ceil_div(most_tiles(), ring_tiles / 2); }
  MOK_HD int most_segments() const { return experts_local() + most_windows(); }

  // The ring is one window when all rows fit; else two windows that take turns, so that fetching
  // into one overlaps with the products of the other. Needs `normalize`.
  MOK_HD int window_tiles(int tiles) const {
    return tiles <= ring_tiles ? ring_tiles : ring_tiles / 2;
  }

  // Rounds ring and minibatch so that both windows hold whole minibatches.
  MOK_HD void normalize() {
    if (ring_tiles < 2) ring_tiles = 2;
    if (minibatch_tiles < 1) minibatch_tiles = 1;
    if (minibatch_tiles > ring_tiles / 2) minibatch_tiles = ring_tiles / 2;
    ring_tiles = ring_tiles / (2 * minibatch_tiles) * (2 * minibatch_tiles);
  }
};

}  // namespace mok::plan
