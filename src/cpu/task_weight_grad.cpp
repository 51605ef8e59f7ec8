// weight_grad, shared_weight_grad, vector_grad: complete sums over rows, delivered as asked.
#include <algorithm>

#include "cpu/call.h"

namespace mok::cpu {

using plan::Buffer;
using plan::kGradCols;
using plan::kGradRows;
using plan::Task;
using plan::WeightMatrix;

namespace {

struct Block {  // of a weight matrix
  int64_t row0 = 0, column0 = 0;
  int rows = 0, columns = 0;
};

Block block_of(const Task& t, int64_t matrix_rows, int64_t matrix_columns) {
  Block b;
  b.row0 = int64_t{t.row_block} * kGradRows;
  b.column0 = int64_t{t.column} * kGradCols;
  b.rows = static_cast<int>(std::min<int64_t>(kGradRows, matrix_rows - b.row0));
  b.columns = static_cast<int>(std::min<int64_t>(kGradCols, matrix_columns - b.column0));
  return b;
}

// `rows` > 0: of the whole sum; without rows an accumulating target stays as it was.
template <class T>
void deliver(const View<T>& v, void* target, int64_t row_stride, GradMode mode, const Block& b,
             int64_t rows) {
  for (int r = 0; r < b.rows; ++r) {
    const int64_t at = (b.row0 + r) * row_stride + b.column0;
    const Acc<T>* sum = v.sums(r);
    auto* out = static_cast<Acc<T>*>(target) + at;
    switch (mode) {
      case GradMode::none:
        break;
      case GradMode::storage:
        v.kernels.store_row(static_cast<T*>(target) + at, sum, b.columns);
        break;
      case GradMode::sum:
        std::copy(sum, sum + b.columns, out);
        break;
      case GradMode::accumulate:
        if (rows == 0) break;
        for (int c = 0; c < b.columns; ++c) out[c] = out[c] + sum[c];
        break;
    }
  }
}

// Sums so far of an expert that goes on in the next window.
template <class T>
Acc<T>* carry_row(const View<T>& v, WeightMatrix matrix, int64_t row, int64_t column,
                  int64_t width) {
  return v.scalars(Buffer::carry) + static_cast<int>(matrix) * v.hidden() * v.inter() +
         row * width + column;
}

}  // namespace

template <class T>
void run_weight_grad(const View<T>& v, const Task& t) {
  const plan::Segment& segment = v.schedule().segment[t.tile];
  const bool down = t.matrix == WeightMatrix::down;
  const int64_t h = v.hidden(), inter = v.inter();
  const int64_t width = down ? inter : h;
  const Block b = block_of(t, down ? h : inter, width);
  v.clear_sums(b.rows);
  if (segment.previous >= 0) {
    for (int r = 0; r < b.rows; ++r) {
      const Acc<T>* in = carry_row(v, t.matrix, b.row0 + r, b.column0, width);
      std::copy(in, in + b.columns, v.scratch.c + r * kBlockColumns);
    }
  }
  if (segment.rows > 0) {
    const int32_t row0 = segment.first_tile * plan::kTileRows;
    const Buffer left = down                             ? Buffer::ring_d_y
                        : t.matrix == WeightMatrix::gate ? Buffer::ring_d_gate
                                                         : Buffer::ring_d_up;
    const int64_t left_width = down ? h : inter;
    Product<T> p{.m = b.rows,
                 .n = b.columns,
                 .k = segment.rows,
                 .a = v.ring(left, row0, left_width) + b.row0,
                 .a_row = 1,
                 .a_k = left_width};
    p.b = v.ring(down ? Buffer::ring_hidden : Buffer::ring_x, row0, width) + b.column0;
    p.b_k = width;
    p.b_column = 1;
    v.product(p);
  }
  if (!segment.last) {
    for (int r = 0; r < b.rows; ++r) {
      std::copy(v.sums(r), v.sums(r) + b.columns,
                carry_row(v, t.matrix, b.row0 + r, b.column0, width));
    }
    return;
  }
  const CallArgs& a = v.args();
  const StackGrad& grad = down ? a.d_down : t.matrix == WeightMatrix::gate ? a.d_gate : a.d_up;
  const int64_t size = grad.mode == GradMode::storage ? sizeof(T) : sizeof(Acc<T>);
  deliver(
      v,
      static_cast<std::byte*>(grad.target.data) + segment.expert * grad.target.expert_stride * size,
      grad.target.row_stride, grad.mode, b, v.schedule().expert_rows[segment.expert]);
}

template <class T>
void run_shared_weight_grad(const View<T>& v, const Task& t) {
  const bool down = t.matrix == WeightMatrix::down;
  const bool gate = t.matrix == WeightMatrix::gate;
  const int64_t h = v.hidden(), inter = v.shared();
  const Block b = block_of(t, down ? h : inter, down ? inter : h);
  const CallArgs& a = v.args();
  const int64_t tokens = v.g().own_tokens();
  v.clear_sums(b.rows);
  if (tokens > 0) {
    Product<T> p{.m = b.rows, .n = b.columns, .k = tokens};
    p.a_row = 1;
    p.b_column = 1;
    if (down) {
      p.a = v.d_y_row(0) + b.row0;
      p.a_k = a.d_y.row_stride;
      p.b = v.rows(Buffer::shared_hidden) + b.column0;
      p.b_k = inter;
    } else {
      p.a = v.rows(gate ? Buffer::shared_d_gate : Buffer::shared_d_up) + b.row0;
      p.a_k = inter;
      p.b = v.x_row(0) + b.column0;
      p.b_k = a.x.row_stride;
    }
    v.product(p);
  }
  const MatrixGrad& grad = down   ? a.d_shared_down_proj
                           : gate ? a.d_shared_gate_proj
                                  : a.d_shared_up_proj;
  deliver(v, grad.target.data, grad.target.row_stride, grad.mode, b, tokens);
}

template <class T>
void run_vector_grad(const View<T>& v, const Task& t) {
  Block b;
  b.column0 = int64_t{t.column} * plan::kTileHidden;
  b.rows = 1;
  b.columns = static_cast<int>(std::min<int64_t>(plan::kTileHidden, v.hidden() - b.column0));
  v.clear_sums(1);
  const int64_t tokens = v.g().own_tokens();
  for (int64_t token = 0; token < tokens; ++token) {
    v.kernels.axpy_row(v.scratch.c, v.x_row(token) + b.column0, v.scalars(Buffer::d_sigma)[token],
                       b.columns);
  }
  const MatrixGrad& grad = v.args().d_shared_gate_vector;
  deliver(v, grad.target.data, grad.target.row_stride, grad.mode, b, tokens);
}

#define MOK_INSTANTIATE(T)                                              \
  template void run_weight_grad<T>(const View<T>&, const Task&);        \
  template void run_shared_weight_grad<T>(const View<T>&, const Task&); \
  template void run_vector_grad<T>(const View<T>&, const Task&);
MOK_FOR_EACH_STORAGE(MOK_INSTANTIATE)

}  // namespace mok::cpu
