// sigma and reduce: per token, on its owner.
#include <algorithm>

#include "cpu/call.h"
#include "numerics/reduce.h"
#include "numerics/swiglu.h"

namespace mok::cpu {

using plan::Buffer;
using plan::Task;

template <class T>
void run_sigma(const View<T>& v, const Task& t) {
  const int64_t h = v.hidden();
  const int64_t begin = int64_t{t.tile} * plan::kTileRows;
  const int64_t end = std::min<int64_t>(begin + plan::kTileRows, v.g().own_tokens());
  const T* gate = static_cast<const T*>(v.args().weights.shared_gate_vector);
  const T* r_s = v.g().keep_shared ? static_cast<const T*>(v.args().saved.shared_out)
                                   : v.rows(Buffer::shared_rows);
  for (int64_t token = begin; token < end; ++token) {
    const Acc<T> sigma = numerics::sigmoid(v.kernels.dot(v.x_row(token), gate, h));
    v.scalars(Buffer::sigma)[token] = sigma;
    if (v.call.forward()) continue;
    v.scalars(Buffer::d_sigma)[token] =
        v.kernels.dot(v.d_y_row(token), r_s + token * h, h) * numerics::sigmoid_slope(sigma);
  }
}

template <class T>
void run_reduce(const View<T>& v, const Task& t) {
  const plan::Geometry& g = v.g();
  const int64_t h = v.hidden();
  const int topk = g.topk;
  const T* rows[kMaxTopk];
  v.scratch.wide.resize(h);
  Acc<T>* start = g.has_shared() ? v.scratch.wide.data() : nullptr;
  for (int64_t token = t.begin; token < t.end; ++token) {
    const int32_t* ids = v.own_ids() + token * topk;
    for (int k = 0; k < topk; ++k) {
      rows[k] = ids[k] < 0 ? nullptr : v.rows(Buffer::returned_rows) + (token * topk + k) * h;
    }
    const T* shared = v.rows(Buffer::shared_rows) + token * h;
    if (v.call.forward()) {
      const Acc<T> sigma = g.shared_gate ? v.scalars(Buffer::sigma)[token] : Acc<T>(1);
      if (start) v.kernels.scale_row(start, shared, sigma, h);
      v.kernels.combine_rows(v.row_of(v.args().y, token), start, rows,
                             v.scalars(Buffer::topk_weights) + token * topk, topk, h);
      continue;
    }
    if (g.wanted.d_x) {
      if (start) {
        const T* gate =
            g.shared_gate ? static_cast<const T*>(v.args().weights.shared_gate_vector) : nullptr;
        const Acc<T> coefficient = gate ? v.scalars(Buffer::d_sigma)[token] : Acc<T>(0);
        v.kernels.shared_d_x_row(start, shared, coefficient, gate, h);
      }
      v.kernels.reduce_rows(v.row_of(v.args().d_x, token), start, rows, topk, h);
    }
    if (!g.wanted.d_topk_weights) continue;
    auto* out = static_cast<Acc<T>*>(v.args().d_topk_weights) + token * topk;
    const Acc<T>* in = v.scalars(Buffer::returned_grads) + token * topk;
    for (int k = 0; k < topk; ++k) out[k] = ids[k] < 0 ? Acc<T>(0) : in[k];
  }
}

template <class T>
void run_task(const View<T>& v, const Task& t) {
  using plan::TaskKind;
  switch (t.kind) {
    case TaskKind::stage:
      return run_stage(v, t);
    case TaskKind::fetch:
      return run_fetch(v, t);
    case TaskKind::sigma:
      return run_sigma(v, t);
    case TaskKind::shared_gate_up:
      return run_shared_gate_up(v, t);
    case TaskKind::shared_down:
      return run_shared_down(v, t);
    case TaskKind::gate_up:
      return run_gate_up(v, t);
    case TaskKind::down:
      return run_down(v, t);
    case TaskKind::reduce:
      return run_reduce(v, t);
    case TaskKind::d_hidden:
      return run_d_hidden(v, t);
    case TaskKind::router_grad:
      return run_router_grad(v, t);
    case TaskKind::d_input:
      return run_d_input(v, t);
    case TaskKind::weight_grad:
      return run_weight_grad(v, t);
    case TaskKind::shared_d_hidden:
      return run_shared_d_hidden(v, t);
    case TaskKind::shared_d_input:
      return run_shared_d_input(v, t);
    case TaskKind::shared_weight_grad:
      return run_shared_weight_grad(v, t);
    case TaskKind::vector_grad:
      return run_vector_grad(v, t);
    case TaskKind::announce_staged:
    case TaskKind::announce_returned:
    case TaskKind::count:
      return;
  }
}

#define MOK_INSTANTIATE(T)                                  \
  template void run_sigma<T>(const View<T>&, const Task&);  \
  template void run_reduce<T>(const View<T>&, const Task&); \
  template void run_task<T>(const View<T>&, const Task&);
MOK_FOR_EACH_STORAGE(MOK_INSTANTIATE)

}  // namespace mok::cpu
