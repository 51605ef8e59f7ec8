// Where every buffer of a rank lies. Sizes and offsets come from the one list in `make_layout`;
// the executors, `mok plan` and the memory formula all read it.
#pragma once

#include <cstdint>

#include "plan/counters.h"
#include "plan/geometry.h"

namespace mok::plan {

enum class Buffer : int32_t {
  // symmetric: the same offset on every rank, all ranks read or write it
  control,         // call header, abort word, tags: laid out by the executor
  flags,           // [3][R] int64 number of the last call, by Counter >= first_flag, source rank
  ids,             // [T_max, K] int32
  topk_weights,    // [T_max, K] fp32 (fp64)
  staged_x,        // [T_max, H]; quantised: [T_max] rows of Geometry::wire_row_bytes
  staged_d_y,      // as staged_x
  returned_rows,   // [T_max * K, H] rows of y or of d_x, by the owner's (token, k)
  returned_grads,  // [T_max * K] gradients of router weights, fp32 (fp64)
  // local
  counters,           // [local_counters] int32
  ring_x,             // [ring, H]
  ring_hidden,        // [ring, I] h in forward, bf16(w * h) in backward
  ring_d_y,           // [ring, H]
  ring_gate,          // [ring, I] recomputed g
  ring_up,            // [ring, I] recomputed u
  ring_d_gate,        // [ring, I]
  ring_d_up,          // [ring, I]
  ring_x_codes,       // [ring] rows of Geometry::wire_row_bytes, where codes stay in the ring
  ring_d_y_codes,     // as ring_x_codes
  ring_d_gate_codes,  // [ring] rows of I codes and their scales; in forward those of h
  ring_d_up_codes,    // as ring_d_gate_codes
  router_partials,    // [ring, column tiles of d_hidden] fp32 (fp64), summed in column order
  carry,              // fp32 (fp64) accumulators of the experts that straddle windows
  sigma,              // [T_max] fp32 (fp64) sigmoid of the shared gate
  d_sigma,            // [T_max] d_sigma * sigma'
  shared_hidden,      // [T_max, I_s] h, or bf16(sigma * h)
  shared_rows,        // [T_max, H] r_s, or the chain of d_s
  shared_gate,        // [T_max, I_s] recomputed g
  shared_up,          // [T_max, I_s] recomputed u
  shared_d_gate,      // [T_max, I_s]
  shared_d_up,        // [T_max, I_s]
  count
};
inline constexpr int kBuffers = static_cast<int>(Buffer::count);
inline constexpr Buffer kFirstLocal = Buffer::counters;
MOK_HD constexpr bool is_symmetric(Buffer b) { return b < kFirstLocal; }
const char* to_string(Buffer buffer);

inline constexpr int64_t kAlignment = 1024;  // of every buffer, in bytes
inline constexpr int64_t kControlBytes = 16384;

struct Layout {
  int64_t offset[kBuffers] = {};  // in the rank's symmetric or local block
  int64_t bytes[kBuffers] = {};   // 0 = this configuration has no such buffer
  int64_t symmetric_bytes = 0;
  int64_t local_bytes = 0;
};

// `g` gives the sizes that do not change from call to call (tokens are ignored); `element` and
// `scalar` are bytes of the storage type and of accumulators (4, or 8 in fp64).
MOK_HD inline Layout make_layout(const Geometry& g, int element, int scalar) {
  Layout l;
  const auto place = [&](Buffer b, int64_t bytes) {
    int64_t& end = is_symmetric(b) ? l.symmetric_bytes : l.local_bytes;
    l.offset[static_cast<int>(b)] = end;
    l.bytes[static_cast<int>(b)] = bytes;
    end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  const int64_t tokens = g.max_tokens;
  const int64_t h = g.hidden, i = g.intermediate, shared = g.shared_intermediate;
  const int64_t most = g.most_rows();
  const int64_t ring = int64_t{g.ring_tiles} * kTileRows;
  const int64_t staged = g.ranks > 1 || g.own_staged ? tokens * g.wire_row_bytes(element) : 0;
  const int64_t recompute = g.saved_rows < most ? ring * i * element : 0;
  const int64_t carry = ring < most ? (2 * i * h + h * i) * scalar : 0;
  const auto codes = [&](int columns) {
    return g.codes_in_ring ? ring * g.code_row_bytes(columns) : 0;
  };
  const int64_t gated = g.shared_gate ? tokens * scalar : 0;

  place(Buffer::control, kControlBytes);
  place(Buffer::flags, int64_t{kCounters - static_cast<int>(Counter::first_flag)} * g.ranks * 8);
  place(Buffer::ids, tokens * g.topk * 4);
  place(Buffer::topk_weights, tokens * g.topk * scalar);
  place(Buffer::staged_x, staged);
  place(Buffer::staged_d_y, staged);
  place(Buffer::returned_rows, tokens * g.topk * h * element);
  place(Buffer::returned_grads, tokens * g.topk * scalar);
  place(Buffer::counters, int64_t{local_counters(g)} * 4);
  place(Buffer::ring_x, ring * h * element);
  place(Buffer::ring_hidden, ring * i * element);
  place(Buffer::ring_d_y, ring * h * element);
  place(Buffer::ring_gate, recompute);
  place(Buffer::ring_up, recompute);
  place(Buffer::ring_d_gate, ring * i * element);
  place(Buffer::ring_d_up, ring * i * element);
  place(Buffer::ring_x_codes, codes(g.hidden));
  place(Buffer::ring_d_y_codes, codes(g.hidden));
  place(Buffer::ring_d_gate_codes, codes(g.intermediate));
  place(Buffer::ring_d_up_codes, codes(g.intermediate));
  place(Buffer::router_partials, ring * g.columns_d_hidden() * scalar);
  place(Buffer::carry, carry);
  place(Buffer::sigma, gated);
  place(Buffer::d_sigma, gated);
  place(Buffer::shared_hidden, tokens * shared * element);
  place(Buffer::shared_rows, shared > 0 ? tokens * h * element : 0);
  place(Buffer::shared_gate, tokens * shared * element);
  place(Buffer::shared_up, tokens * shared * element);
  place(Buffer::shared_d_gate, tokens * shared * element);
  place(Buffer::shared_d_up, tokens * shared * element);
  return l;
}

}  // namespace mok::plan
