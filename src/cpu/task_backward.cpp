// d_hidden, router_grad and d_input, of the routed experts and of the shared one.
#include <algorithm>

#include "cpu/call.h"

namespace mok::cpu {

using plan::Buffer;
using plan::kTileDHidden;
using plan::kTileHidden;
using plan::kTileRows;
using plan::Task;

template <class T>
void run_d_hidden(const View<T>& v, const Task& t) {
  const int64_t inter = v.inter();
  const int64_t column = int64_t{t.column} * v.g().tile_d_hidden;
  const int n = static_cast<int>(std::min<int64_t>(v.g().tile_d_hidden, inter - column));
  const plan::Tile& tile = v.schedule().tile[t.tile];
  const int32_t row0 = t.tile * kTileRows;
  const LayerWeights& weights = v.args().weights;
  v.clear_sums(tile.rows);
  const Product<T> p{.m = tile.rows,
                     .n = n,
                     .k = v.hidden(),
                     .a = v.ring(Buffer::ring_d_y, row0, v.hidden()),
                     .a_row = v.hidden(),
                     .a_k = 1};
  v.weight_product(p, weights.down, weights.quantized.down_t, tile.expert, inter, column, true);
  const bool saved = plan::is_saved(v.plan(), t.tile);
  const int columns = v.g().columns_d_hidden();
  for (int r = 0; r < tile.rows; ++r) {
    const int32_t row = row0 + r;
    const T* g = saved ? static_cast<const T*>(v.args().saved.gate) + row * inter
                       : v.ring(Buffer::ring_gate, row, inter);
    const T* u = saved ? static_cast<const T*>(v.args().saved.up) + row * inter
                       : v.ring(Buffer::ring_up, row, inter);
    const int32_t slot = v.schedule().row_slot[row];
    const Acc<T> w =
        v.scalars(Buffer::topk_weights, v.g().slot_rank(slot))[v.g().owner_index(slot)];
    v.scalars(
        Buffer::router_partials)[int64_t{plan::ring_row(v.plan(), row)} * columns + t.column] =
        v.kernels.swiglu_backward_row(v.ring(Buffer::ring_hidden, row, inter) + column,
                                      v.ring(Buffer::ring_d_gate, row, inter) + column,
                                      v.ring(Buffer::ring_d_up, row, inter) + column, v.sums(r),
                                      g + column, u + column, w, v.limit(), n, v.block(),
                                      v.scratch.row);
  }
}

template <class T>
void run_router_grad(const View<T>& v, const Task& t) {
  const int columns = v.g().columns_d_hidden();
  for (int r = 0; r < v.schedule().tile[t.tile].rows; ++r) {
    const int32_t row = t.tile * kTileRows + r;
    const Acc<T>* part =
        v.scalars(Buffer::router_partials) + int64_t{plan::ring_row(v.plan(), row)} * columns;
    Acc<T> sum = 0;
    for (int c = 0; c < columns; ++c) sum += part[c];
    const int32_t slot = v.schedule().row_slot[row];
    v.scalars(Buffer::returned_grads, v.g().slot_rank(slot))[v.g().owner_index(slot)] = sum;
  }
}

template <class T>
void run_d_input(const View<T>& v, const Task& t) {
  const int64_t h = v.hidden();
  const int64_t column = int64_t{t.column} * kTileHidden;
  const int n = static_cast<int>(std::min<int64_t>(kTileHidden, h - column));
  const plan::Tile& tile = v.schedule().tile[t.tile];
  const int32_t row0 = t.tile * kTileRows;
  const LayerWeights& w = v.args().weights;
  v.clear_sums(tile.rows);
  // One chain over [I of gate | I of up].
  Product<T> p{.m = tile.rows,
               .n = n,
               .k = v.inter(),
               .a = v.ring(Buffer::ring_d_gate, row0, v.inter()),
               .a_row = v.inter(),
               .a_k = 1};
  v.weight_product(p, w.gate, w.quantized.gate_t, tile.expert, h, column, true);
  p.a = v.ring(Buffer::ring_d_up, row0, v.inter());
  v.weight_product(p, w.up, w.quantized.up_t, tile.expert, h, column, true);
  for (int r = 0; r < tile.rows; ++r) {
    const int32_t slot = v.schedule().row_slot[row0 + r];
    T* out =
        v.rows(Buffer::returned_rows, v.g().slot_rank(slot)) + v.g().owner_index(slot) * h + column;
    v.kernels.store_row(out, v.sums(r), n);
  }
}

template <class T>
void run_shared_d_hidden(const View<T>& v, const Task& t) {
  const int64_t inter = v.shared();
  const int64_t column = int64_t{t.column} * kTileDHidden;
  const int n = static_cast<int>(std::min<int64_t>(kTileDHidden, inter - column));
  const int64_t row0 = int64_t{t.tile} * kTileRows;
  const int rows = static_cast<int>(std::min<int64_t>(kTileRows, v.g().own_tokens() - row0));
  const ConstMatrix& w_down = v.args().weights.shared_down_proj;
  v.clear_sums(rows);
  Product<T> p{.m = rows,
               .n = n,
               .k = v.hidden(),
               .a = v.d_y_row(row0),
               .a_row = v.args().d_y.row_stride,
               .a_k = 1};
  p.b = v.row_of(w_down, 0) + column;
  p.b_k = w_down.row_stride;
  p.b_column = 1;
  v.product(p);
  const bool kept = v.g().keep_shared;
  const T* gate =
      kept ? static_cast<const T*>(v.args().saved.shared_gate) : v.rows(Buffer::shared_gate);
  const T* up = kept ? static_cast<const T*>(v.args().saved.shared_up) : v.rows(Buffer::shared_up);
  for (int r = 0; r < rows; ++r) {
    const int64_t at = (row0 + r) * inter + column;
    const Acc<T> w = v.g().shared_gate ? v.scalars(Buffer::sigma)[row0 + r] : Acc<T>(1);
    v.kernels.swiglu_backward_row(v.rows(Buffer::shared_hidden) + at,
                                  v.rows(Buffer::shared_d_gate) + at,
                                  v.rows(Buffer::shared_d_up) + at, v.sums(r), gate + at, up + at,
                                  w, v.limit(), n, 0, v.scratch.row);
  }
}

template <class T>
void run_shared_d_input(const View<T>& v, const Task& t) {
  const int64_t h = v.hidden();
  const int64_t column = int64_t{t.column} * kTileHidden;
  const int n = static_cast<int>(std::min<int64_t>(kTileHidden, h - column));
  const int64_t row0 = int64_t{t.tile} * kTileRows;
  const int rows = static_cast<int>(std::min<int64_t>(kTileRows, v.g().own_tokens() - row0));
  const LayerWeights& w = v.args().weights;
  v.clear_sums(rows);
  Product<T> p{.m = rows,
               .n = n,
               .k = v.shared(),
               .a = v.rows(Buffer::shared_d_gate) + row0 * v.shared(),
               .a_row = v.shared(),
               .a_k = 1};
  p.b = v.row_of(w.shared_gate_proj, 0) + column;
  p.b_k = w.shared_gate_proj.row_stride;
  p.b_column = 1;
  v.product(p);
  p.a = v.rows(Buffer::shared_d_up) + row0 * v.shared();
  p.b = v.row_of(w.shared_up_proj, 0) + column;
  p.b_k = w.shared_up_proj.row_stride;
  v.product(p);
  for (int r = 0; r < rows; ++r) {
    v.kernels.store_row(v.rows(Buffer::shared_rows) + (row0 + r) * h + column, v.sums(r), n);
  }
}

#define MOK_INSTANTIATE(T)                                           \
  template void run_d_hidden<T>(const View<T>&, const Task&);        \
  template void run_router_grad<T>(const View<T>&, const Task&);     \
  template void run_d_input<T>(const View<T>&, const Task&);         \
  template void run_shared_d_hidden<T>(const View<T>&, const Task&); \
  template void run_shared_d_input<T>(const View<T>&, const Task&);
MOK_FOR_EACH_STORAGE(MOK_INSTANTIATE)

}  // namespace mok::cpu
