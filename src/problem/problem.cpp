#include "problem/problem.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "mok/error.h"
#include "numerics/bf16.h"
#include "problem/streams.h"

namespace mok::problem {
namespace {

using numerics::bf16;

void require(bool good, const char* argument, const std::string& what) {
  if (!good) throw Error(ErrorCode::bad_argument, std::string(argument) + ": " + what);
}

int64_t checked_tokens(int64_t tokens) {
  require(tokens >= 0, "tokens", std::to_string(tokens) + " is negative");
  return tokens;
}

const LayerShape& checked_shape(const LayerShape& shape) {
  check_shape(shape);
  return shape;
}

template <class T>
std::vector<double> widened(const std::vector<T>& from) {
  std::vector<double> to(from.size());
  std::transform(from.begin(), from.end(), to.begin(),
                 [](T v) { return static_cast<double>(numerics::Storage<T>::load(v)); });
  return to;
}

}  // namespace

void check_shape(const LayerShape& s) {
  const auto text = [](auto v) { return std::to_string(v); };
  require(s.hidden >= 1, "hidden", text(s.hidden) + " is not positive");
  require(s.intermediate >= 1, "intermediate", text(s.intermediate) + " is not positive");
  require(s.experts >= 1 && s.experts <= kMaxExperts, "experts",
          text(s.experts) + " is outside 1.." + text(kMaxExperts));
  const int most = std::min(s.experts, kMaxTopk);
  require(s.topk >= 1 && s.topk <= most, "topk", text(s.topk) + " is outside 1.." + text(most));
  require(s.shared_intermediate >= 0, "shared", text(s.shared_intermediate) + " is negative");
  require(!s.shared_gate || s.shared_intermediate > 0, "shared_gate", "without a shared expert");
  require(s.swiglu_limit > 0, "swiglu_limit", text(s.swiglu_limit) + " is not positive");
}

Problem::Problem(const LayerShape& shape, int64_t global_tokens, const Routing& routing,
                 uint64_t seed)
    : shape_(checked_shape(shape)),
      tokens_(checked_tokens(global_tokens)),
      seed_(seed),
      routes_(routing, shape, global_tokens, seed) {}

int64_t Problem::leading(Tensor t) const {
  switch (t) {
    case Tensor::x:
    case Tensor::d_y:
      return tokens_;
    case Tensor::w_gate:
    case Tensor::w_up:
    case Tensor::w_down:
      return shape_.experts;
    case Tensor::shared_gate:
    case Tensor::shared_up:
      return shape_.shared_intermediate;
    case Tensor::shared_down:
      return shape_.shared_intermediate > 0 ? shape_.hidden : 0;
    case Tensor::shared_vector:
      return shape_.shared_gate ? 1 : 0;
  }
  return 0;
}

int64_t Problem::row_elements(Tensor t) const {
  switch (t) {
    case Tensor::w_gate:
    case Tensor::w_up:
    case Tensor::w_down:
      return shape_.hidden * shape_.intermediate;
    case Tensor::shared_down:
      return shape_.shared_intermediate;
    default:
      return shape_.hidden;
  }
}

double Problem::scale(Tensor t) const {
  switch (t) {
    case Tensor::x:
    case Tensor::d_y:
      return 1;
    case Tensor::w_down:
      return 1 / std::sqrt(static_cast<double>(shape_.intermediate));
    case Tensor::shared_down:
      return 1 / std::sqrt(static_cast<double>(shape_.shared_intermediate));
    default:
      return 1 / std::sqrt(static_cast<double>(shape_.hidden));
  }
}

Grid Problem::grid(Tensor t) const {
  if (std::isinf(shape_.swiglu_limit)) return {};
  switch (t) {
    case Tensor::x:
      return {0.125f, kMostStepsX};
    case Tensor::w_gate:
    case Tensor::w_up:
    case Tensor::shared_gate:
    case Tensor::shared_up: {
      int exponent = 0;
      const double fraction = std::frexp(scale(t), &exponent);  // in [0.5, 1)
      return {std::ldexp(0.25f, fraction < 0.75 ? exponent - 1 : exponent), kMostStepsWeight};
    }
    default:
      return {};
  }
}

void Problem::fill(Tensor t, int64_t begin, int64_t end, Precision precision, void* out) const {
  require(0 <= begin && begin <= end && end <= leading(t), "slice",
          std::to_string(begin) + ".." + std::to_string(end) + " of " + std::to_string(leading(t)));
  const Stream stream(seed_, static_cast<uint64_t>(t));
  const auto first = static_cast<uint64_t>(begin * row_elements(t));
  const int64_t n = (end - begin) * row_elements(t);
  const Grid steps = grid(t);
  const auto fill_as = [&]<class T>(T* to) {
    if (steps.step > 0) {
      fill_steps(stream, first, n, scale(t), steps, to);
    } else {
      fill_normal(stream, first, n, scale(t), to);
    }
  };
  switch (storage_type(precision)) {
    case Precision::fp32:
      fill_as(static_cast<float*>(out));
      break;
    case Precision::fp64:
      fill_as(static_cast<double*>(out));
      break;
    default:
      fill_as(static_cast<bf16*>(out));
  }
}

std::vector<double> Problem::values(Tensor t, int64_t begin, int64_t end,
                                    Precision precision) const {
  const auto n = static_cast<size_t>((end - begin) * row_elements(t));
  if (storage_type(precision) == Precision::bf16) {
    std::vector<bf16> stored(n);
    fill(t, begin, end, precision, stored.data());
    return widened(stored);
  }
  if (precision == Precision::fp32) {
    std::vector<float> stored(n);
    fill(t, begin, end, precision, stored.data());
    return widened(stored);
  }
  std::vector<double> stored(n);
  fill(t, begin, end, precision, stored.data());
  return stored;
}

void Problem::fill_topk_ids(int64_t begin, int64_t end, int64_t* out) const {
  for (int64_t t = begin; t < end; ++t) routes_.ids(t, out + (t - begin) * shape_.topk);
}

void Problem::fill_topk_ids(int64_t begin, int64_t end, int32_t* out) const {
  int64_t ids[kMaxTopk];
  for (int64_t t = begin; t < end; ++t) {
    routes_.ids(t, ids);
    for (int k = 0; k < shape_.topk; ++k) *out++ = static_cast<int32_t>(ids[k]);
  }
}

void Problem::fill_topk_weights(int64_t begin, int64_t end, float* out) const {
  const Stream stream(seed_, streams::kWeights);
  const int K = shape_.topk;
  for (int64_t t = begin; t < end; ++t) {
    double share[kMaxTopk];
    double sum = 0;
    for (int k = 0; k < K; ++k) {
      const double u = stream.uniform(static_cast<uint64_t>(t * K + k));
      share[k] = 0.05 + u * u;
      sum += share[k];
    }
    for (int k = 0; k < K; ++k) *out++ = static_cast<float>(share[k] / sum);
  }
}

void Problem::fill_topk_weights(int64_t begin, int64_t end, double* out) const {
  float weights[kMaxTopk];
  for (int64_t t = begin; t < end; ++t) {
    fill_topk_weights(t, t + 1, weights);
    out = std::copy_n(weights, shape_.topk, out);
  }
}

reference::Inputs oracle_inputs(const Problem& problem, Precision precision,
                                const std::vector<int64_t>& rank_tokens, bool backward) {
  const auto all = [&](Tensor t) { return problem.values(t, 0, problem.leading(t), precision); };
  reference::Inputs in;
  in.shape = problem.shape();
  in.rank_tokens = rank_tokens;
  in.x = all(Tensor::x);
  if (backward) in.d_y = all(Tensor::d_y);
  const auto slots = static_cast<size_t>(problem.tokens() * in.shape.topk);
  in.topk_ids.resize(slots);
  in.topk_weights.resize(slots);
  problem.fill_topk_ids(0, problem.tokens(), in.topk_ids.data());
  problem.fill_topk_weights(0, problem.tokens(), in.topk_weights.data());
  in.expert = [&problem, precision](int e) {
    return reference::Expert{problem.values(Tensor::w_gate, e, e + 1, precision),
                             problem.values(Tensor::w_up, e, e + 1, precision),
                             problem.values(Tensor::w_down, e, e + 1, precision)};
  };
  in.shared = {all(Tensor::shared_gate), all(Tensor::shared_up), all(Tensor::shared_down)};
  in.shared_gate = all(Tensor::shared_vector);
  in.round_bf16 = storage_type(precision) == Precision::bf16;
  in.blocks.length = block_size(precision);
  if (precision == Precision::fp8) in.blocks.weight_rows = in.blocks.length;
  return in;
}

}  // namespace mok::problem
