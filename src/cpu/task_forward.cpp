// gate_up and down, of the routed experts and of the shared one.
#include <algorithm>

#include "cpu/call.h"

namespace mok::cpu {

using plan::Buffer;
using plan::kTileHidden;
using plan::kTileInter;
using plan::kTileRows;
using plan::Task;

namespace {

constexpr int kUp = kTileInter;  // where u begins in a row of sums

}  // namespace

template <class T>
void run_gate_up(const View<T>& v, const Task& t) {
  const int64_t inter = v.inter();
  const int64_t column = int64_t{t.column} * kTileInter;
  const int n = static_cast<int>(std::min<int64_t>(kTileInter, inter - column));
  const plan::Tile& tile = v.schedule().tile[t.tile];
  const int32_t row0 = t.tile * kTileRows;
  const LayerWeights& w = v.args().weights;
  v.clear_sums(tile.rows);
  const Product<T> p{.m = tile.rows,
                     .n = n,
                     .k = v.hidden(),
                     .a = v.ring(Buffer::ring_x, row0, v.hidden()),
                     .a_row = v.hidden(),
                     .a_k = 1};
  v.weight_product(p, w.gate, w.quantized.gate, tile.expert, inter, column, false);
  v.weight_product(p, w.up, w.quantized.up, tile.expert, inter, column, false, kUp);
  const bool forward = v.call.forward();
  const bool keep = forward && plan::is_saved(v.plan(), t.tile);
  for (int r = 0; r < tile.rows; ++r) {
    const int32_t row = row0 + r;
    T* g = v.scratch.row;
    T* u = g + kTileInter;
    if (keep) {
      g = static_cast<T*>(v.args().saved.gate) + row * inter + column;
      u = static_cast<T*>(v.args().saved.up) + row * inter + column;
    } else if (!forward) {
      g = v.ring(Buffer::ring_gate, row, inter) + column;
      u = v.ring(Buffer::ring_up, row, inter) + column;
    }
    v.kernels.store_row(g, v.sums(r), n);
    v.kernels.store_row(u, v.sums(r) + kUp, n);
    if (forward) {
      T* h = v.ring(Buffer::ring_hidden, row, inter) + column;
      v.kernels.swiglu_row(h, g, u, v.limit(), n);
      v.round_row(h, n);
    }
  }
}

template <class T>
void run_down(const View<T>& v, const Task& t) {
  const int64_t h = v.hidden();
  const int64_t column = int64_t{t.column} * kTileHidden;
  const int n = static_cast<int>(std::min<int64_t>(kTileHidden, h - column));
  const plan::Tile& tile = v.schedule().tile[t.tile];
  const int32_t row0 = t.tile * kTileRows;
  const LayerWeights& w = v.args().weights;
  v.clear_sums(tile.rows);
  const Product<T> p{.m = tile.rows,
                     .n = n,
                     .k = v.inter(),
                     .a = v.ring(Buffer::ring_hidden, row0, v.inter()),
                     .a_row = v.inter(),
                     .a_k = 1};
  v.weight_product(p, w.down, w.quantized.down, tile.expert, h, column, false);
  for (int r = 0; r < tile.rows; ++r) {
    const int32_t slot = v.schedule().row_slot[row0 + r];
    T* out =
        v.rows(Buffer::returned_rows, v.g().slot_rank(slot)) + v.g().owner_index(slot) * h + column;
    v.kernels.store_row(out, v.sums(r), n);
  }
}

template <class T>
void run_shared_gate_up(const View<T>& v, const Task& t) {
  const int64_t inter = v.shared();
  const int64_t column = int64_t{t.column} * kTileInter;
  const int n = static_cast<int>(std::min<int64_t>(kTileInter, inter - column));
  const int64_t row0 = int64_t{t.tile} * kTileRows;
  const int rows = static_cast<int>(std::min<int64_t>(kTileRows, v.g().own_tokens() - row0));
  const LayerWeights& w = v.args().weights;
  const ConstMatrix &gate = w.shared_gate_proj, &up = w.shared_up_proj;
  v.clear_sums(rows);
  Product<T> p{.m = rows,
               .n = n,
               .k = v.hidden(),
               .a = v.x_row(row0),
               .a_row = v.args().x.row_stride,
               .a_k = 1};
  p.b_k = 1;
  p.b = v.row_of(gate, column);
  p.b_column = gate.row_stride;
  v.product(p);
  p.b = v.row_of(up, column);
  p.b_column = up.row_stride;
  v.product(p, kUp);
  const bool forward = v.call.forward();
  const Saved& saved = v.args().saved;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (row0 + r) * inter + column;
    T* g = v.scratch.row;
    T* u = g + kTileInter;
    if (forward && saved.shared_gate) {
      g = static_cast<T*>(saved.shared_gate) + at;
      u = static_cast<T*>(saved.shared_up) + at;
    } else if (!forward) {
      g = v.rows(Buffer::shared_gate) + at;
      u = v.rows(Buffer::shared_up) + at;
    }
    v.kernels.store_row(g, v.sums(static_cast<int>(r)), n);
    v.kernels.store_row(u, v.sums(static_cast<int>(r)) + kUp, n);
    // Backward needs h only to make r_s again.
    if (forward || v.g().shared_gate) {
      v.kernels.swiglu_row(v.rows(Buffer::shared_hidden) + at, g, u, v.limit(), n);
    }
  }
}

template <class T>
void run_shared_down(const View<T>& v, const Task& t) {
  const int64_t h = v.hidden();
  const int64_t column = int64_t{t.column} * kTileHidden;
  const int n = static_cast<int>(std::min<int64_t>(kTileHidden, h - column));
  const int64_t row0 = int64_t{t.tile} * kTileRows;
  const int rows = static_cast<int>(std::min<int64_t>(kTileRows, v.g().own_tokens() - row0));
  const ConstMatrix& w = v.args().weights.shared_down_proj;
  v.clear_sums(rows);
  Product<T> p{.m = rows,
               .n = n,
               .k = v.shared(),
               .a = v.rows(Buffer::shared_hidden) + row0 * v.shared(),
               .a_row = v.shared(),
               .a_k = 1};
  p.b = v.row_of(w, column);
  p.b_k = 1;
  p.b_column = w.row_stride;
  v.product(p);
  T* kept = v.call.forward() ? static_cast<T*>(v.args().saved.shared_out) : nullptr;
  for (int r = 0; r < rows; ++r) {
    const int64_t at = (row0 + r) * h + column;
    T* out = v.rows(Buffer::shared_rows) + at;
    v.kernels.store_row(out, v.sums(r), n);
    if (kept) std::memcpy(kept + at, out, n * sizeof(T));
  }
}

#define MOK_INSTANTIATE(T)                                          \
  template void run_gate_up<T>(const View<T>&, const Task&);        \
  template void run_down<T>(const View<T>&, const Task&);           \
  template void run_shared_gate_up<T>(const View<T>&, const Task&); \
  template void run_shared_down<T>(const View<T>&, const Task&);
MOK_FOR_EACH_STORAGE(MOK_INSTANTIATE)

}  // namespace mok::cpu
