#include "cli/results.h"

#include <algorithm>
#include <array>

#include "problem/compare.h"
#include "problem/digest.h"

namespace mok::cli {

const char* to_string(Out out) {
  constexpr const char* kNames[] = {
      "y",        "d_x",           "d_topk_weights", "d_w_gate",      "d_w_up",
      "d_w_down", "d_shared_gate", "d_shared_up",    "d_shared_down", "d_shared_vector"};
  static_assert(std::size(kNames) == kOuts);
  return kNames[static_cast<int>(out)];
}

Extent extent(const Spec& spec, int rank, Out out) {
  const LayerShape& s = spec.shape;
  const int64_t tokens = spec.tokens[rank], h = s.hidden, i = s.intermediate;
  const int64_t shared = s.shared_intermediate, experts = spec.experts_local();
  const Precision scalar = spec.precision == Precision::fp64 ? Precision::fp64 : Precision::fp32;
  const Precision storage = storage_type(spec.precision);
  const Precision grad = spec.grads == GradMode::storage ? storage : scalar;
  if (!spec.backward && out != Out::y) return {};
  switch (out) {
    case Out::y:
    case Out::d_x:
      return {1, tokens, h, storage};
    case Out::d_topk_weights:
      return {1, tokens, s.topk, scalar};
    case Out::d_w_gate:
    case Out::d_w_up:
      return {experts, i, h, grad};
    case Out::d_w_down:
      return {experts, h, i, grad};
    case Out::d_shared_gate:
    case Out::d_shared_up:
      return {1, shared, h, grad};
    case Out::d_shared_down:
      return {1, shared > 0 ? h : 0, shared, grad};
    case Out::d_shared_vector:
      return {1, s.shared_gate ? 1 : 0, h, grad};
    case Out::count:
      break;
  }
  return {};
}

Outcome run(const Spec& spec, const Sets& sets, Progress& progress) {
  Outcome outcome = spec.device == Device::cuda ? run_on_cuda(spec, sets, progress)
                                                : run_on_cpu(spec, sets, progress);
  progress.clear();
  return outcome;
}

std::string global_digest(const Spec& spec, const Outcome& outcome, Out out) {
  problem::Digest digest;
  for (int r = 0; r < spec.ranks(); ++r) {
    const Memory& part = outcome.outputs[r][static_cast<int>(out)];
    digest.add(part.data(), static_cast<size_t>(part.bytes()));
  }
  return digest.hex();
}

std::string rank_digest(const Outcome& outcome, int rank, Out out) {
  problem::Digest digest;
  const Memory& part = outcome.outputs[rank][static_cast<int>(out)];
  digest.add(part.data(), static_cast<size_t>(part.bytes()));
  return digest.hex();
}

namespace {

class Checker {
 public:
  Checker(const Spec& spec, const Outcome& outcome) : spec_(spec), outcome_(outcome) {}

  // Group `group` of rank `rank`'s part of a tensor.
  void compare(Out out, int rank, int64_t group, const double* expected) {
    const Extent e = extent(spec_, rank, out);
    const Memory& memory = outcome_.outputs[rank][static_cast<int>(out)];
    const std::byte* begin = memory.data() + group * e.rows * e.columns * element_size(e.type);
    add(out, problem::compare(begin, e.type, e.columns, expected, e.rows, e.columns));
  }
  // A tensor of tokens is one group over all ranks.
  void compare_tokens(Out out, const std::vector<double>& expected) {
    const Extent e = extent(spec_, 0, out);
    const int64_t row_bytes = e.columns * element_size(e.type);
    Memory all(spec_.global_tokens() * row_bytes);
    for (int r = 0; r < spec_.ranks(); ++r) {
      const Memory& part = outcome_.outputs[r][static_cast<int>(out)];
      std::copy_n(part.data(), part.bytes(), all.data() + spec_.first_token(r) * row_bytes);
    }
    add(out, problem::compare(all.data(), e.type, e.columns, expected.data(), spec_.global_tokens(),
                              e.columns));
  }

  std::vector<CheckedTensor> results() const {
    const auto sums = spec_.device == Device::cuda ? problem::sums_on_gpus(spec_.precision)
                                                   : problem::E4m3Sums::fp32;
    const problem::Tolerances t =
        problem::tolerances(spec_.shape, spec_.precision, spec_.global_tokens(), sums);
    const problem::Tolerances whole =
        problem::whole_tolerances(spec_.shape, spec_.precision, spec_.global_tokens(), sums);
    const auto by_out = [](const problem::Tolerances& v) {
      return std::array<double, kOuts>{
          v.y,        v.d_x,         v.d_topk_weights, v.d_w_gate_up, v.d_w_gate_up,
          v.d_w_down, v.d_w_gate_up, v.d_w_gate_up,    v.d_w_down,    v.d_shared_vector};
    };
    const std::array<double, kOuts> limits = by_out(t), whole_limits = by_out(whole);
    // The oracle's gradients are sums: rounding one to bf16 moves it by up to half an ulp.
    const double rounding = spec_.grads == GradMode::storage ? 0x1p-8 : 0;
    std::vector<CheckedTensor> out;
    for (int i = 0; i < kOuts; ++i) {
      if (!met_[i]) continue;
      const problem::Difference& d = worst_[i];
      const double more = is_weight_grad(static_cast<Out>(i)) ? rounding : 0;
      const double limit = limits[i] + more, whole_limit = whole_limits[i] + more;
      out.push_back({static_cast<Out>(i), d.max_rel_err, d.scaled_err, limit, d.whole_err(),
                     whole_limit, d.scaled_err <= limit && d.whole_err() <= whole_limit});
    }
    return out;
  }

 private:
  void add(Out out, const problem::Difference& d) {
    worst_[static_cast<int>(out)].add(d, 0);
    met_[static_cast<int>(out)] = true;
  }

  const Spec& spec_;
  const Outcome& outcome_;
  problem::Difference worst_[kOuts];
  bool met_[kOuts] = {};
};

}  // namespace

std::vector<CheckedTensor> check(const Spec& spec, const problem::Problem& problem,
                                 const Outcome& outcome, Progress& progress) {
  Checker checker(spec, outcome);
  const LayerShape& s = spec.shape;
  reference::Inputs inputs =
      problem::oracle_inputs(problem, spec.precision, spec.tokens, spec.backward);
  const auto weights = std::move(inputs.expert);
  inputs.expert = [&](int e) {
    progress.show("oracle", e, s.experts);
    return weights(e);
  };
  reference::TakeGradient take;
  if (spec.backward) {
    take = [&](int e, const reference::Expert& gradient) {
      const int rank = e / spec.experts_local(), local = e % spec.experts_local();
      checker.compare(Out::d_w_gate, rank, local, gradient.gate.data());
      checker.compare(Out::d_w_up, rank, local, gradient.up.data());
      checker.compare(Out::d_w_down, rank, local, gradient.down.data());
    };
  }
  const reference::Outputs expected = reference::run(inputs, take);
  checker.compare_tokens(Out::y, expected.y);
  if (spec.backward) {
    checker.compare_tokens(Out::d_x, expected.d_x);
    checker.compare_tokens(Out::d_topk_weights, expected.d_topk_weights);
    for (int r = 0; r < spec.ranks() && s.shared_intermediate > 0; ++r) {
      checker.compare(Out::d_shared_gate, r, 0, expected.d_shared[r].gate.data());
      checker.compare(Out::d_shared_up, r, 0, expected.d_shared[r].up.data());
      checker.compare(Out::d_shared_down, r, 0, expected.d_shared[r].down.data());
      if (s.shared_gate) {
        checker.compare(Out::d_shared_vector, r, 0, expected.d_shared_gate[r].data());
      }
    }
  }
  progress.clear();
  return checker.results();
}

bool all_pass(const std::vector<CheckedTensor>& checked) {
  return std::all_of(checked.begin(), checked.end(), [](const auto& c) { return c.pass; });
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

}  // namespace mok::cli
