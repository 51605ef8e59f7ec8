#include "cpu/arguments.h"

#include <cmath>
#include <string>

namespace mok::cpu {

namespace {

[[noreturn]] void refuse(int rank, const std::string& text) {
  throw Error(ErrorCode::bad_argument, "rank " + std::to_string(rank) + ": " + text);
}

std::string with_value(const char* name, int64_t value) {
  return std::string(name) + " is " + std::to_string(value);
}

class Checker {
 public:
  explicit Checker(const Limits& limits) : limits_(limits) {}

  void range(const char* name, int64_t value, int64_t low, int64_t high) const {
    if (value >= low && value <= high) return;
    refuse(limits_.rank, with_value(name, value) + ", not in " + std::to_string(low) + ".." +
                             std::to_string(high));
  }
  void pointer(const char* name, const void* p) const {
    if (p == nullptr) refuse(limits_.rank, std::string(name) + " is null");
  }
  template <class Void>
  void matrix(const char* name, const BasicMatrix<Void>& m, int64_t rows, int64_t columns) const {
    if (rows == 0) return;
    pointer(name, m.data);
    row_stride(name, m.row_stride, rows, columns);
  }
  template <class Void>
  void stack(const char* name, const BasicStack<Void>& s, int64_t rows, int64_t columns) const {
    pointer(name, s.data);
    row_stride(name, s.row_stride, rows, columns);
    const int64_t least = (rows - 1) * s.row_stride + columns;
    if (limits_.shape.experts / limits_.ranks > 1 && s.expert_stride < least) {
      refuse(limits_.rank,
             with_value((std::string(name) + ".expert_stride").c_str(), s.expert_stride) +
                 ", but one expert takes " + std::to_string(least));
    }
  }

 private:
  void row_stride(const char* name, int64_t stride, int64_t rows, int64_t columns) const {
    if (rows <= 1 || stride >= columns) return;
    refuse(limits_.rank, with_value((std::string(name) + ".row_stride").c_str(), stride) +
                             ", but a row has " + std::to_string(columns) + " elements");
  }
  const Limits& limits_;
};

void check_inputs(const Limits& l, const CallArgs& a) {
  const Checker check(l);
  const LayerShape& s = l.shape;
  check.range("tokens", a.tokens, 0, l.max_tokens);
  if (a.id_type != IdType::int32 && a.id_type != IdType::int64) {
    throw Error(ErrorCode::bad_type,
                "rank " + std::to_string(l.rank) + ": topk_ids is neither int32 nor int64");
  }
  check.matrix("x", a.x, a.tokens, s.hidden);
  if (a.tokens > 0) {
    check.pointer("topk_ids", a.topk_ids);
    check.pointer("topk_weights", a.topk_weights);
  }
  if (!is_quantized(l.precision)) {
    check.stack("weights.gate", a.weights.gate, s.intermediate, s.hidden);
    check.stack("weights.up", a.weights.up, s.intermediate, s.hidden);
    check.stack("weights.down", a.weights.down, s.hidden, s.intermediate);
  }
  const int64_t shared = s.shared_intermediate;
  check.matrix("weights.shared_gate_proj", a.weights.shared_gate_proj, shared, s.hidden);
  check.matrix("weights.shared_up_proj", a.weights.shared_up_proj, shared, s.hidden);
  if (shared > 0) {
    check.matrix("weights.shared_down_proj", a.weights.shared_down_proj, s.hidden, shared);
  }
  if (s.shared_gate) check.pointer("weights.shared_gate_vector", a.weights.shared_gate_vector);
  const auto pair = [&](const char* names, const void* one, const void* other) {
    if ((one == nullptr) != (other == nullptr)) {
      refuse(l.rank, std::string(names) + ": one is null, the other is not");
    }
  };
  pair("saved.gate, saved.up", a.saved.gate, a.saved.up);
  pair("saved.shared_gate, saved.shared_up", a.saved.shared_gate, a.saved.shared_up);
}

void check_quantized(const Limits& l, const char* name, const QuantizedStack& q) {
  const Checker check(l);
  const std::string full = std::string("weights.quantized.") + name;
  check.pointer((full + ".data").c_str(), q.data);
  check.pointer((full + ".scales").c_str(), q.scales);
}

void check_mode(const Limits& l, const char* name, GradMode mode) {
  if (mode < GradMode::none || mode > GradMode::accumulate) {
    refuse(l.rank, with_value((std::string(name) + ".mode").c_str(), static_cast<int>(mode)));
  }
}

}  // namespace

void check_workspace(const Group& group, const LayerShape& shape, Precision precision,
                     const WorkspaceOptions& o) {
  const Limits limits{shape, group.rank(), group.ranks(), o.max_tokens};
  const Checker check(limits);
  constexpr int64_t kMost = int64_t{1} << 24;  // of any dimension: index arithmetic fits
  if (precision < Precision::bf16 || precision > Precision::fp8) {
    throw Error(ErrorCode::bad_type,
                "rank " + std::to_string(group.rank()) + ": precision is unknown");
  }
  check.range("hidden", shape.hidden, 1, kMost);
  check.range("intermediate", shape.intermediate, 1, kMost);
  check.range("experts", shape.experts, 1, kMaxExperts);
  if (shape.experts % group.ranks() != 0) {
    refuse(group.rank(), with_value("experts", shape.experts) + ", not a multiple of " +
                             std::to_string(group.ranks()) + " ranks");
  }
  check.range("topk", shape.topk, 1, std::min(shape.experts, kMaxTopk));
  check.range("shared_intermediate", shape.shared_intermediate, 0, kMost);
  if (shape.shared_gate && shape.shared_intermediate == 0) {
    refuse(group.rank(), "shared_gate is set without a shared expert (shared_intermediate is 0)");
  }
  if (!(shape.swiglu_limit > 0)) {
    refuse(group.rank(), "swiglu_limit is " + std::to_string(shape.swiglu_limit) + ", not above 0");
  }
  // Slots and rows are numbered in 32 bits.
  const int64_t most = ((int64_t{1} << 31) - 1 - int64_t{shape.experts + 1} * plan::kTileRows) /
                       (int64_t{group.ranks()} * shape.topk);
  check.range("max_tokens", o.max_tokens, 0, most);
  check.range("ring_rows", o.ring_rows, 0, int64_t{1} << 31);
  check.range("minibatch_rows", o.minibatch_rows, 1, int64_t{1} << 31);
  check.range("saved_rows", o.saved_rows, -1, int64_t{1} << 31);
  check.range("compute_workers", o.compute_workers, 0, 4096);
  check.range("comm_workers", o.comm_workers, 1, 4096);
}

void check_forward(const Limits& l, const CallArgs& a) {
  check_inputs(l, a);
  if (is_quantized(l.precision)) {
    const QuantizedWeights& q = a.weights.quantized;
    check_quantized(l, "gate", q.gate);
    check_quantized(l, "up", q.up);
    check_quantized(l, "down", q.down);
  }
  Checker(l).matrix("y", a.y, a.tokens, l.shape.hidden);
}

void check_backward(const Limits& l, const CallArgs& a) {
  check_inputs(l, a);
  const Checker check(l);
  const LayerShape& s = l.shape;
  if (is_quantized(l.precision)) {
    const QuantizedWeights& q = a.weights.quantized;
    check_quantized(l, "gate", q.gate);
    check_quantized(l, "up", q.up);
    check_quantized(l, "gate_t", q.gate_t);
    check_quantized(l, "up_t", q.up_t);
    check_quantized(l, "down_t", q.down_t);
  }
  check.matrix("d_y", a.d_y, a.tokens, s.hidden);
  if (a.d_x.data) check.matrix("d_x", a.d_x, a.tokens, s.hidden);
  const auto stack = [&](const char* name, const StackGrad& g, int64_t rows, int64_t columns) {
    check_mode(l, name, g.mode);
    if (g.mode != GradMode::none) check.stack(name, g.target, rows, columns);
  };
  stack("d_gate", a.d_gate, s.intermediate, s.hidden);
  stack("d_up", a.d_up, s.intermediate, s.hidden);
  stack("d_down", a.d_down, s.hidden, s.intermediate);
  const auto matrix = [&](const char* name, const MatrixGrad& g, int64_t rows, int64_t columns,
                          bool exists) {
    check_mode(l, name, g.mode);
    if (g.mode == GradMode::none) return;
    if (!exists) refuse(l.rank, std::string(name) + " is wanted, but the layer has no such weight");
    check.matrix(name, g.target, rows, columns);
  };
  const int64_t shared = s.shared_intermediate;
  matrix("d_shared_gate_proj", a.d_shared_gate_proj, shared, s.hidden, shared > 0);
  matrix("d_shared_up_proj", a.d_shared_up_proj, shared, s.hidden, shared > 0);
  matrix("d_shared_down_proj", a.d_shared_down_proj, s.hidden, shared, shared > 0);
  matrix("d_shared_gate_vector", a.d_shared_gate_vector, 1, s.hidden, s.shared_gate);
}

int32_t wanted_bits(const CallArgs& a) {
  const auto bit = [](bool wanted, int32_t value) { return wanted ? value : 0; };
  const auto of = [&](GradMode mode, int32_t value) { return bit(mode != GradMode::none, value); };
  return bit(a.d_x.data != nullptr, kWantDx) | bit(a.d_topk_weights != nullptr, kWantTopk) |
         of(a.d_gate.mode, kWantGate) | of(a.d_up.mode, kWantUp) | of(a.d_down.mode, kWantDown) |
         of(a.d_shared_gate_proj.mode, kWantSharedGate) |
         of(a.d_shared_up_proj.mode, kWantSharedUp) |
         of(a.d_shared_down_proj.mode, kWantSharedDown) |
         of(a.d_shared_gate_vector.mode, kWantSharedVector);
}

int32_t indifferent_bits(const CallArgs& a) {
  // The tensors would be empty, and empty tensors often have null data.
  return a.tokens == 0 ? kWantDx | kWantTopk : 0;
}

plan::Wanted to_wanted(int32_t bits) {
  plan::Wanted w;
  w.d_x = bits & kWantDx;
  w.d_topk_weights = bits & kWantTopk;
  w.d_gate = bits & kWantGate;
  w.d_up = bits & kWantUp;
  w.d_down = bits & kWantDown;
  w.d_shared_gate = bits & kWantSharedGate;
  w.d_shared_up = bits & kWantSharedUp;
  w.d_shared_down = bits & kWantSharedDown;
  w.d_shared_vector = bits & kWantSharedVector;
  return w;
}

std::string describe_wanted(int32_t bits) {
  static constexpr const char* kNames[] = {"d_x",
                                           "d_topk_weights",
                                           "d_gate",
                                           "d_up",
                                           "d_down",
                                           "d_shared_gate_proj",
                                           "d_shared_up_proj",
                                           "d_shared_down_proj",
                                           "d_shared_gate_vector"};
  std::string text;
  for (int i = 0; i < 9; ++i) {
    if (bits >> i & 1) text += (text.empty() ? "" : ", ") + std::string(kNames[i]);
  }
  return text.empty() ? "none" : text;
}

}  // namespace mok::cpu
