// One call of one rank as its tasks see it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>

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
  Scratch<T>& scratch;

  const plan::Plan& plan() const { return call.plan; }
  const plan::Schedule& schedule() const { return call.plan.s; }
  const plan::Geometry& g() const { return call.plan.g; }
  const CallArgs& args() const { return call.args; }
  int64_t hidden() const { return g().hidden; }
  int64_t inter() const { return g().intermediate; }
  int64_t shared() const { return g().shared_intermediate; }
  Acc<T> limit() const { return limit_value; }

  T* rows(plan::Buffer b, int rank) const { return reinterpret_cast<T*>(call.address(b, rank)); }
  T* rows(plan::Buffer b) const { return rows(b, g().rank); }
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
