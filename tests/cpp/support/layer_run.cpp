#include "support/layer_run.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "mok/quantize.h"
#include "numerics/bf16.h"
#include "problem/compare.h"
#include "reference/reference.h"

namespace mok::test {

using problem::Problem;
using problem::Tensor;

std::vector<std::optional<Error>> on_ranks(int ranks, const std::function<void(int)>& f) {
  std::vector<std::optional<Error>> errors(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        f(r);
      } catch (const Error& e) {
        errors[r] = e;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

void on_ranks_or_throw(int ranks, const std::function<void(int)>& f) {
  for (const auto& error : on_ranks(ranks, f)) {
    if (error) throw *error;
  }
}

std::vector<int64_t> split(int64_t tokens, int ranks) {
  std::vector<int64_t> out(ranks, tokens / ranks);
  for (int r = 0; r < tokens % ranks; ++r) ++out[r];
  return out;
}

namespace {

template <class T>
void scale_as(Bytes& b, double factor) {
  using S = numerics::Storage<T>;
  auto* v = reinterpret_cast<T*>(b.data());
  for (size_t i = 0; i < b.size() / sizeof(T); ++i) {
    v[i] = S::store(S::load(v[i]) * static_cast<numerics::Acc<T>>(factor));
  }
}

void scale(Bytes& b, Precision precision, double factor) {
  switch (storage_type(precision)) {
    case Precision::fp32:
      return scale_as<float>(b, factor);
    case Precision::fp64:
      return scale_as<double>(b, factor);
    default:
      return scale_as<numerics::bf16>(b, factor);
  }
}

RankTensors::Quantized quantized(Precision precision, const Bytes& weight, int64_t experts,
                                 int64_t rows, int64_t columns) {
  RankTensors::Quantized q;
  q.data.resize(experts * rows * columns);
  q.data_t.resize(q.data.size());
  q.scales.resize(experts * scale_bytes(precision, rows, columns));
  q.scales_t.resize(experts * scale_bytes(precision, columns, rows));
  quantize_weights(precision, {weight.data(), rows * columns, columns}, experts, rows, columns,
                   {q.data.data(), reinterpret_cast<uint8_t*>(q.scales.data()), q.data_t.data(),
                    reinterpret_cast<uint8_t*>(q.scales_t.data())});
  return q;
}

}  // namespace

LayerRun::LayerRun(const Problem& problem, const RunOptions& options)
    : options_(options), shape_(problem.shape()), tensors_(options.tokens.size()) {
  const int n = ranks();
  const int64_t element = element_size(options.precision);
  const int64_t scalar = weight_size(options.precision);
  WorkspaceOptions w = options.workspace;
  if (w.max_tokens == 0) {
    w.max_tokens = *std::max_element(options.tokens.begin(), options.tokens.end());
  }
  groups_ = Group::threads(n, options.group);
  workspaces_.resize(n);
  on_ranks_or_throw(n, [&](int r) {
    workspaces_[r] = std::make_unique<Workspace>(*groups_[r], shape_, options.precision, w);
  });
  const int64_t experts = shape_.experts / n;
  int64_t first = 0;
  for (int r = 0; r < n; ++r) {
    RankTensors& t = tensors_[r];
    t.tokens = options.tokens[r];
    const auto slice = [&](Tensor which, int64_t begin, int64_t end) {
      Bytes out((end - begin) * problem.row_elements(which) * element);
      problem.fill(which, begin, end, options.precision, out.data());
      return out;
    };
    const auto whole = [&](Tensor which) { return slice(which, 0, problem.leading(which)); };
    const int64_t last = first + t.tokens, slots = t.tokens * shape_.topk;
    t.x = slice(Tensor::x, first, last);
    t.d_y = slice(Tensor::d_y, first, last);
    if (options.input_factor != 1) {
      for (Bytes* b : {&t.x, &t.d_y}) scale(*b, options.precision, options.input_factor);
    }
    t.topk_weights.resize(slots * scalar);
    if (options.precision == Precision::fp64) {
      problem.fill_topk_weights(first, last, reinterpret_cast<double*>(t.topk_weights.data()));
    } else {
      problem.fill_topk_weights(first, last, reinterpret_cast<float*>(t.topk_weights.data()));
    }
    if (options.id_type == IdType::int64) {
      t.ids.resize(slots * 8);
      problem.fill_topk_ids(first, last, reinterpret_cast<int64_t*>(t.ids.data()));
    } else {
      t.ids.resize(slots * 4);
      problem.fill_topk_ids(first, last, reinterpret_cast<int32_t*>(t.ids.data()));
    }
    t.w_gate = slice(Tensor::w_gate, r * experts, (r + 1) * experts);
    t.w_up = slice(Tensor::w_up, r * experts, (r + 1) * experts);
    t.w_down = slice(Tensor::w_down, r * experts, (r + 1) * experts);
    if (is_quantized(options.precision)) {
      const int64_t h = shape_.hidden, i = shape_.intermediate;
      t.q_gate = quantized(options.precision, t.w_gate, experts, i, h);
      t.q_up = quantized(options.precision, t.w_up, experts, i, h);
      t.q_down = quantized(options.precision, t.w_down, experts, h, i);
    }
    t.w_sg = whole(Tensor::shared_gate);
    t.w_su = whole(Tensor::shared_up);
    t.w_sd = whole(Tensor::shared_down);
    if (shape_.shared_gate) t.w_vector = whole(Tensor::shared_vector);
    const int64_t shared = shape_.shared_intermediate;
    if (options.save) {
      const int64_t saved = workspaces_[r]->options().saved_rows * shape_.intermediate * element;
      t.saved_gate.resize(saved);
      t.saved_up.resize(saved);
      t.saved_sg.resize(t.tokens * shared * element);
      t.saved_su.resize(t.tokens * shared * element);
      if (shape_.shared_gate) t.saved_out.resize(t.tokens * shape_.hidden * element);
    }
    t.y.resize(t.x.size());
    t.d_x.resize(t.x.size());
    t.d_topk_weights.resize(slots * scalar);
    const int64_t size = options.mode == GradMode::storage ? element : scalar;
    const auto like = [&](const Bytes& weight) { return weight.size() / element * size; };
    t.d_gate.resize(like(t.w_gate));
    t.d_up.resize(like(t.w_up));
    t.d_down.resize(like(t.w_down));
    t.d_sg.resize(like(t.w_sg));
    t.d_su.resize(like(t.w_su));
    t.d_sd.resize(like(t.w_sd));
    t.d_vector.resize(like(t.w_vector));
    first = last;
  }
  poison_outputs();
}

void LayerRun::poison_outputs() {
  for (RankTensors& t : tensors_) {
    for (Bytes* b : {&t.y, &t.d_x, &t.d_topk_weights, &t.d_gate, &t.d_up, &t.d_down, &t.d_sg,
                     &t.d_su, &t.d_sd, &t.d_vector}) {
      const bool adds = options_.mode == GradMode::accumulate && b != &t.y && b != &t.d_x &&
                        b != &t.d_topk_weights;
      std::fill(b->begin(), b->end(), adds ? std::byte{0} : std::byte{0xff});
    }
  }
}

namespace {

void* data_or_null(Bytes& b) { return b.empty() ? nullptr : b.data(); }

}  // namespace

BackwardArgs LayerRun::backward_args(int r) {
  RankTensors& t = tensors_[r];
  const int64_t h = shape_.hidden, i = shape_.intermediate, shared = shape_.shared_intermediate;
  BackwardArgs a;
  a.tokens = t.tokens;
  a.x = {data_or_null(t.x), h};
  a.topk_ids = data_or_null(t.ids);
  a.id_type = options_.id_type;
  a.topk_weights = data_or_null(t.topk_weights);
  a.weights.gate = {t.w_gate.data(), i * h, h};
  a.weights.up = {t.w_up.data(), i * h, h};
  a.weights.down = {t.w_down.data(), h * i, i};
  a.weights.shared_gate_proj = {data_or_null(t.w_sg), h};
  a.weights.shared_up_proj = {data_or_null(t.w_su), h};
  a.weights.shared_down_proj = {data_or_null(t.w_sd), shared};
  a.weights.shared_gate_vector = data_or_null(t.w_vector);
  if (is_quantized(options_.precision)) {
    const auto normal = [](const RankTensors::Quantized& q) {
      return QuantizedStack{q.data.data(), reinterpret_cast<const uint8_t*>(q.scales.data())};
    };
    const auto transposed = [](const RankTensors::Quantized& q) {
      return QuantizedStack{q.data_t.data(), reinterpret_cast<const uint8_t*>(q.scales_t.data())};
    };
    a.weights.gate = a.weights.up = a.weights.down = {};
    a.weights.quantized = {normal(t.q_gate),     normal(t.q_up),     normal(t.q_down),
                           transposed(t.q_gate), transposed(t.q_up), transposed(t.q_down)};
  }
  a.saved = {data_or_null(t.saved_gate), data_or_null(t.saved_up), data_or_null(t.saved_sg),
             data_or_null(t.saved_su), data_or_null(t.saved_out)};
  a.d_y = {data_or_null(t.d_y), h};
  a.d_x = {data_or_null(t.d_x), h};
  a.d_topk_weights = data_or_null(t.d_topk_weights);
  a.d_gate = {{t.d_gate.data(), i * h, h}, options_.mode};
  a.d_up = {{t.d_up.data(), i * h, h}, options_.mode};
  a.d_down = {{t.d_down.data(), h * i, i}, options_.mode};
  if (shared > 0) {
    a.d_shared_gate_proj = {{t.d_sg.data(), h}, options_.mode};
    a.d_shared_up_proj = {{t.d_su.data(), h}, options_.mode};
    a.d_shared_down_proj = {{t.d_sd.data(), shared}, options_.mode};
  }
  if (shape_.shared_gate) a.d_shared_gate_vector = {{t.d_vector.data(), h}, options_.mode};
  return a;
}

ForwardArgs LayerRun::forward_args(int r) {
  const BackwardArgs b = backward_args(r);
  ForwardArgs a;
  a.tokens = b.tokens;
  a.x = b.x;
  a.topk_ids = b.topk_ids;
  a.id_type = b.id_type;
  a.topk_weights = b.topk_weights;
  a.weights = b.weights;
  a.saved = b.saved;
  a.y = {data_or_null(tensors_[r].y), shape_.hidden};
  return a;
}

void LayerRun::forward() {
  on_ranks_or_throw(ranks(), [&](int r) { workspaces_[r]->forward(forward_args(r)); });
}
void LayerRun::backward() {
  on_ranks_or_throw(ranks(), [&](int r) { workspaces_[r]->backward(backward_args(r)); });
}

int64_t LayerRun::id(int r, int64_t slot) const {
  if (options_.id_type == IdType::int64) {
    return reinterpret_cast<const int64_t*>(tensors_[r].ids.data())[slot];
  }
  return reinterpret_cast<const int32_t*>(tensors_[r].ids.data())[slot];
}
void LayerRun::set_id(int r, int64_t slot, int64_t id) {
  if (options_.id_type == IdType::int64) {
    reinterpret_cast<int64_t*>(tensors_[r].ids.data())[slot] = id;
  } else {
    reinterpret_cast<int32_t*>(tensors_[r].ids.data())[slot] = static_cast<int32_t>(id);
  }
}
void LayerRun::set_ids(const std::vector<std::vector<int64_t>>& ids) {
  for (int r = 0; r < ranks(); ++r) {
    for (size_t i = 0; i < ids[r].size(); ++i) set_id(r, static_cast<int64_t>(i), ids[r][i]);
  }
}
double LayerRun::topk_weight(int r, int64_t slot) const {
  const auto* data = tensors_[r].topk_weights.data();
  return options_.precision == Precision::fp64 ? reinterpret_cast<const double*>(data)[slot]
                                               : reinterpret_cast<const float*>(data)[slot];
}
void LayerRun::set_topk_weight(int r, int64_t slot, double w) {
  auto* data = tensors_[r].topk_weights.data();
  if (options_.precision == Precision::fp64) {
    reinterpret_cast<double*>(data)[slot] = w;
  } else {
    reinterpret_cast<float*>(data)[slot] = static_cast<float>(w);
  }
}

void LayerRun::destroy(int r) {
  workspaces_[r].reset();
  groups_[r].reset();
}

Bytes LayerRun::global(Bytes RankTensors::* tensor) const {
  Bytes out;
  for (const RankTensors& t : tensors_) {
    out.insert(out.end(), (t.*tensor).begin(), (t.*tensor).end());
  }
  return out;
}

Bytes LayerRun::all_outputs(bool backward) const {
  Bytes out = global(&RankTensors::y);
  if (!backward) return out;
  for (const auto tensor : {&RankTensors::d_x, &RankTensors::d_topk_weights, &RankTensors::d_gate,
                            &RankTensors::d_up, &RankTensors::d_down}) {
    const Bytes part = global(tensor);
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

std::string compare_with_oracle(const Problem& problem, const RunOptions& options, LayerRun& run,
                                bool backward) {
  const LayerShape& s = problem.shape();
  reference::Inputs inputs =
      problem::oracle_inputs(problem, options.precision, options.tokens, backward);
  for (std::vector<double>* v : {&inputs.x, &inputs.d_y}) {
    for (double& e : *v) e *= options.input_factor;
  }
  // What was really given: tests change ids and weights.
  inputs.topk_ids.clear();
  inputs.topk_weights.clear();
  for (int r = 0; r < run.ranks(); ++r) {
    for (int64_t i = 0; i < run.rank(r).tokens * s.topk; ++i) {
      inputs.topk_ids.push_back(run.id(r, i));
      inputs.topk_weights.push_back(run.topk_weight(r, i));
    }
  }
  reference::Expert grads;
  reference::Outputs expected =
      reference::run(inputs, backward ? reference::collect(grads) : reference::TakeGradient{});
  // Without any token the oracle takes an empty d_y for "forward only": all gradients are zero.
  const auto at_least = [](std::vector<double>& v, int64_t n) { v.resize(n); };
  const int64_t matrix = s.experts * s.intermediate * s.hidden;
  at_least(grads.gate, matrix);
  at_least(grads.up, matrix);
  at_least(grads.down, matrix);
  expected.d_shared.resize(run.ranks());
  expected.d_shared_gate.resize(run.ranks());
  for (int r = 0; r < run.ranks(); ++r) {
    const int64_t shared_matrix = s.shared_intermediate * s.hidden;
    at_least(expected.d_shared[r].gate, shared_matrix);
    at_least(expected.d_shared[r].up, shared_matrix);
    at_least(expected.d_shared[r].down, shared_matrix);
    if (s.shared_gate) at_least(expected.d_shared_gate[r], s.hidden);
  }
  const problem::Tolerances limits = problem::tolerances(s, options.precision, problem.tokens());
  const Precision scalar = options.precision == Precision::fp64 ? Precision::fp64 : Precision::fp32;
  const Precision grad = options.mode == GradMode::storage ? options.precision : scalar;
  const problem::Tolerances whole =
      problem::whole_tolerances(s, options.precision, problem.tokens());
  std::string text;
  const auto check = [&](const std::string& name, const Bytes& actual, Precision type,
                         const double* wanted, int64_t rows, int64_t columns, double limit) {
    const auto d = problem::compare(actual.data(), type, columns, wanted, rows, columns);
    if (d.scaled_err > limit) {
      text += name + ": scaled error " + std::to_string(d.scaled_err) + " above " +
              std::to_string(limit) + " at row " + std::to_string(d.scaled_row) + ", column " +
              std::to_string(d.scaled_column) + "\n";
    }
    return d;
  };
  const auto check_whole = [&](const std::string& name, const problem::Difference& d,
                               double limit) {
    if (d.whole_err() <= limit) return;
    text += name + ": whole error " + std::to_string(d.whole_err()) + " above " +
            std::to_string(limit) + "\n";
  };
  const int64_t tokens = problem.tokens(), h = s.hidden, i = s.intermediate;
  check_whole("y",
              check("y", run.global(&RankTensors::y), options.precision, expected.y.data(), tokens,
                    h, limits.y),
              whole.y);
  if (!backward) return text;
  check_whole("d_x",
              check("d_x", run.global(&RankTensors::d_x), options.precision, expected.d_x.data(),
                    tokens, h, limits.d_x),
              whole.d_x);
  check_whole("d_topk_weights",
              check("d_topk_weights", run.global(&RankTensors::d_topk_weights), scalar,
                    expected.d_topk_weights.data(), tokens, s.topk, limits.d_topk_weights),
              whole.d_topk_weights);
  const auto experts = [&](const std::string& name, Bytes RankTensors::* tensor,
                           const std::vector<double>& wanted, int64_t rows, int64_t columns,
                           double limit, double whole_limit) {
    const Bytes all = run.global(tensor);
    const int64_t size = element_size(grad);
    problem::Difference together;
    for (int e = 0; e < s.experts; ++e) {
      const auto* begin = all.data() + e * rows * columns * size;
      together.add(check(name + " of expert " + std::to_string(e),
                         Bytes(begin, begin + rows * columns * size), grad,
                         wanted.data() + e * rows * columns, rows, columns, limit),
                   0);
    }
    check_whole(name, together, whole_limit);
  };
  experts("d_w_gate", &RankTensors::d_gate, grads.gate, i, h, limits.d_w_gate_up,
          whole.d_w_gate_up);
  experts("d_w_up", &RankTensors::d_up, grads.up, i, h, limits.d_w_gate_up, whole.d_w_gate_up);
  experts("d_w_down", &RankTensors::d_down, grads.down, h, i, limits.d_w_down, whole.d_w_down);
  const int64_t shared = s.shared_intermediate;
  for (int r = 0; r < run.ranks() && shared > 0; ++r) {
    const RankTensors& t = run.rank(r);
    const std::string of = " of rank " + std::to_string(r);
    const reference::Expert& wanted = expected.d_shared[r];
    check("d_shared_gate" + of, t.d_sg, grad, wanted.gate.data(), shared, h, limits.d_w_gate_up);
    check("d_shared_up" + of, t.d_su, grad, wanted.up.data(), shared, h, limits.d_w_gate_up);
    check("d_shared_down" + of, t.d_sd, grad, wanted.down.data(), h, shared, limits.d_w_down);
    if (!s.shared_gate) continue;
    check("d_shared_vector" + of, t.d_vector, grad, expected.d_shared_gate[r].data(), 1, h,
          limits.d_shared_vector);
  }
  return text;
}

}  // namespace mok::test
