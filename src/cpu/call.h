// One call of one rank as its tasks see it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "cpu/kernels.h"
#include "mok/layer.h"
#include "plan/counters.h"
#include "plan/layout.h"

namespace mok::cpu {

// Arguments of either direction.
struct CallArgs : BackwardArgs {
  Matrix y;
};

struct Call {
  plan::Plan plan;
  CallArgs args;
  const plan::Layout* layout = nullptr;
  std::byte* symmetric[kMaxRanks] = {};
  std::byte* local = nullptr;
  std::byte* spare_gate = nullptr;  // ring_gate and ring_up where the layout has none (nothing
  std::byte* spare_up = nullptr;    // was saved although all rows would fit)
  int64_t number = 0;
  double swiglu_limit = 0;

  const plan::Geometry& g() const { return plan.g; }
  bool forward() const { return plan.g.direction == plan::Direction::forward; }

  std::byte* address(plan::Buffer b, int rank) const {
    if (b == plan::Buffer::ring_gate && spare_gate) return spare_gate;
    if (b == plan::Buffer::ring_up && spare_up) return spare_up;
    std::byte* base = plan::is_symmetric(b) ? symmetric[rank] : local;
    return base + layout->offset[static_cast<int>(b)];
  }
};

// The call with its storage type.
template <class T>
struct View {
  const Call& call;
  const Kernels<T>& kernels;
  const BlockKernels& blocks;
  Scratch<T>& scratch;

  const plan::Plan& plan() const { return call.plan; }
  const plan::Schedule& schedule() const { return call.plan.s; }
  const plan::Geometry& g() const { return call.plan.g; }
  const CallArgs& args() const { return call.args; }
  int64_t hidden() const { return g().hidden; }
  int64_t inter() const { return g().intermediate; }
  int64_t shared() const { return g().shared_intermediate; }
  int block() const { return g().block; }
  Acc<T> limit() const { return limit_value; }

  T* rows(plan::Buffer b, int rank) const { return reinterpret_cast<T*>(call.address(b, rank)); }
  T* rows(plan::Buffer b) const { return rows(b, g().rank); }
  // A staged row, as it lies in `rank`'s memory.
  std::byte* staged(plan::Buffer b, int rank, int64_t token) const {
    return call.address(b, rank) + token * g().wire_row_bytes(sizeof(T));
  }
  Acc<T>* scalars(plan::Buffer b, int rank) const {
    return reinterpret_cast<Acc<T>*>(call.address(b, rank));
  }
  Acc<T>* scalars(plan::Buffer b) const { return scalars(b, g().rank); }
  // Row of a ring buffer with `width` columns.
  T* ring(plan::Buffer b, int32_t row, int64_t width) const {
    return rows(b) + plan::ring_row(plan(), row) * width;
  }
  const int32_t* own_ids() const {
    return reinterpret_cast<const int32_t*>(call.address(plan::Buffer::ids, g().rank));
  }

  const T* x_row(int64_t token) const { return row_of(args().x, token); }
  const T* d_y_row(int64_t token) const { return row_of(args().d_y, token); }
  static const T* row_of(const ConstMatrix& m, int64_t row) {
    return static_cast<const T*>(m.data) + row * m.row_stride;
  }
  static T* row_of(const Matrix& m, int64_t row) {
    return static_cast<T*>(m.data) + row * m.row_stride;
  }
  static const T* matrix_of(const ConstStack& s, int expert) {
    return static_cast<const T*>(s.data) + expert * s.expert_stride;
  }

  // A product into scratch.c, columns from `column`; start from zeros or go on.
  void product(Product<T> p, int column = 0) const {
    p.c = scratch.c + column;
    p.c_row = kBlockColumns;
    kernels.product(p, scratch);
  }
  // The same with a routed weight of expert `expert`: p's columns are rows `first`.. of the matrix
  // [columns, p.k] whose rows run along the contraction. In bf16 that is w, or with `transposed` w
  // read down its columns; a quantised weight has a form of its own for either.
  void weight_product(Product<T> p, const ConstStack& w, const QuantizedStack& q, int expert,
                      int64_t columns, int64_t first, bool transposed, int column = 0) const {
    if constexpr (std::is_same_v<T, bf16>) {
      if (block() > 0) return quantized_product(p, q, expert, columns, first, column);
    }
    p.b = matrix_of(w, expert) + first * (transposed ? 1 : w.row_stride);
    p.b_k = transposed ? w.row_stride : 1;
    p.b_column = transposed ? 1 : w.row_stride;
    product(p, column);
  }
  void quantized_product(const Product<T>& p, const QuantizedStack& q, int expert, int64_t columns,
                         int64_t first, int column) const {
    using numerics::BlockMatrix;
    const int64_t bytes = BlockMatrix::scale_bytes(columns, p.k, block());
    const BlockMatrix m{static_cast<const numerics::e4m3*>(q.data) + expert * columns * p.k,
                        reinterpret_cast<const numerics::e8m0*>(q.scales) + expert * bytes, columns,
                        p.k, block()};
    scratch.weight.resize(int64_t{kBlockColumns} * kBlockDepth);
    for (int64_t k0 = 0; k0 < p.k; k0 += kBlockDepth) {  // the chains go on from piece to piece
      Product<T> piece = p;
      piece.k = std::min<int64_t>(kBlockDepth, p.k - k0);
      blocks.dequantize_weight(m, first, p.n, k0, static_cast<int>(piece.k), scratch.weight.data(),
                               kBlockDepth);
      piece.a = p.a + k0;
      piece.b = scratch.weight.data();
      piece.b_k = 1;
      piece.b_column = kBlockDepth;
      product(piece, column);
    }
  }
  // What the next product reads: in the quantised precisions the row is rounded to the format.
  void round_row(T* row, int n) const {
    if constexpr (std::is_same_v<T, bf16>) {
      if (block() > 0) blocks.round_row(row, n, block(), row);
    }
  }
  void clear_sums(int rows) const {
    std::memset(scratch.c, 0, sizeof(Acc<T>) * kBlockColumns * rows);
  }
  const Acc<T>* sums(int row) const { return scratch.c + row * kBlockColumns; }

  Acc<T> limit_value;
};

// ---- tasks, by family -------------------------------------------------------------------------

template <class T>
void run_stage(const View<T>& v, const plan::Task& t);
template <class T>
void run_fetch(const View<T>& v, const plan::Task& t);
template <class T>
void run_gate_up(const View<T>& v, const plan::Task& t);
template <class T>
void run_down(const View<T>& v, const plan::Task& t);
template <class T>
void run_shared_gate_up(const View<T>& v, const plan::Task& t);
template <class T>
void run_shared_down(const View<T>& v, const plan::Task& t);
template <class T>
void run_d_hidden(const View<T>& v, const plan::Task& t);
template <class T>
void run_router_grad(const View<T>& v, const plan::Task& t);
template <class T>
void run_d_input(const View<T>& v, const plan::Task& t);
template <class T>
void run_shared_d_hidden(const View<T>& v, const plan::Task& t);
template <class T>
void run_shared_d_input(const View<T>& v, const plan::Task& t);
template <class T>
void run_weight_grad(const View<T>& v, const plan::Task& t);
template <class T>
void run_shared_weight_grad(const View<T>& v, const plan::Task& t);
template <class T>
void run_vector_grad(const View<T>& v, const plan::Task& t);
template <class T>
void run_sigma(const View<T>& v, const plan::Task& t);
template <class T>
void run_reduce(const View<T>& v, const plan::Task& t);

#define MOK_FOR_EACH_STORAGE(f) f(bf16) f(float) f(double)

// Runs any task but the announcements.
template <class T>
void run_task(const View<T>& v, const plan::Task& t);

}  // namespace mok::cpu
