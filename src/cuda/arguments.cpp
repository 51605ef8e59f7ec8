#include "cuda/arguments.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace mok::cuda {

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::bad_argument, message);
}

void check_shape(const LayerShape& shape, int ranks, const Options& options) {
  if (!runs(options.precision)) {
    throw Error(ErrorCode::unsupported,
                "precision: GPUs run bf16, mxfp8 and fp8; fp32 and fp64 run on the CPU only");
  }
  require(ranks >= 1 && ranks <= kMaxRanks,
          "ranks must be 1.." + std::to_string(kMaxRanks) + ", not " + std::to_string(ranks));
  const auto size = [](const char* name, int64_t n, bool zero) {
    require((n > 0 || (zero && n == 0)) && n % 64 == 0 && n <= 1 << 20,
            std::string(name) + " must be a multiple of 64 on CUDA, not " + std::to_string(n));
  };
  size("hidden", shape.hidden, false);
  size("intermediate", shape.intermediate, false);
  size("shared_intermediate", shape.shared_intermediate, true);
  require(!shape.shared_gate || shape.shared_intermediate > 0,
          "shared_gate is set without a shared expert (shared_intermediate is 0)");
  require(shape.experts >= 1 && shape.experts <= kMaxExperts && shape.experts % ranks == 0,
          "experts must be a multiple of the ranks, at most " + std::to_string(kMaxExperts) +
              ", not " + std::to_string(shape.experts));
  require(shape.topk >= 1 && shape.topk <= std::min(shape.experts, kMaxTopk),
          "topk must be 1..min(experts, " + std::to_string(kMaxTopk) + "), not " +
              std::to_string(shape.topk));
  require(shape.swiglu_limit > 0, "swiglu_limit must be positive");
  const auto range = [](const char* name, int64_t value, int64_t low, int64_t high) {
    require(value >= low && value <= high, std::string(name) + " must be " + std::to_string(low) +
                                               ".." + std::to_string(high) + ", not " +
                                               std::to_string(value));
  };
  // Slots and rows are numbered in 32 bits.
  const WorkspaceOptions& w = options.workspace;
  constexpr int64_t kMost = int64_t{1} << 31;
  range("max_tokens", w.max_tokens, 0,
        (kMost - 1 - int64_t{shape.experts + 1} * plan::kTileRows) / (int64_t{ranks} * shape.topk));
  range("ring_rows", w.ring_rows, 0, kMost);
  range("minibatch_rows", w.minibatch_rows, 1, kMost);
  range("saved_rows", w.saved_rows, -1, kMost);
  range("comm_blocks", options.comm_blocks, 0, 1 << 20);
  range("sm_reserve", options.sm_reserve, 0, 1 << 20);
  const auto seconds = [](const char* name, double value) {
    require(value >= 0 && value <= 1e9, std::string(name) + " must be 0..1e9");
  };
  seconds("arrival_seconds", options.deadlines.arrival_seconds);
  seconds("progress_seconds", options.deadlines.progress_seconds);
}

namespace {

constexpr int kAlignment = 16;  // bytes, of every row: tensor maps and vector accesses need it

// Texts are made only for what is wrong: this runs at every call.
class Checker {
 public:
  explicit Checker(const Limits& limits) : limits_(limits) {}

  template <class Text>
  void that(bool holds, Text&& text) const {
    if (!holds) require(false, text() + " (rank " + std::to_string(limits_.rank) + ")");
  }
  void pointer(const char* name, const void* p, int64_t alignment = kAlignment) const {
    that(p != nullptr, [&] { return std::string(name) + " is null"; });
    that(reinterpret_cast<uintptr_t>(p) % alignment == 0, [&] {
      return std::string(name) + " must be aligned to " + std::to_string(alignment) + " bytes";
    });
  }
  // A tensor that may be null.
  void optional(const char* name, const void* p) const {
    if (p != nullptr) pointer(name, p);
  }
  // `element`: bytes.
  template <class Void>
  void matrix(const char* name, const BasicMatrix<Void>& m, int64_t columns,
              int element = 2) const {
    rows(name, m.data, m.row_stride, columns, element);
  }
  template <class Void>
  void stack(const char* name, const BasicStack<Void>& s, int64_t rows_of_one, int64_t columns,
             int element = 2) const {
    rows(name, s.data, s.row_stride, columns, element);
    if (limits_.shape.experts == limits_.ranks) return;  // one expert: never used
    stride(name, ".expert_stride", s.expert_stride, (rows_of_one - 1) * s.row_stride + columns,
           element);
  }

 private:
  void rows(const char* name, const void* data, int64_t row_stride, int64_t columns,
            int element) const {
    that(data != nullptr, [&] { return std::string(name) + " is null"; });
    that(reinterpret_cast<uintptr_t>(data) % kAlignment == 0,
         [&] { return std::string(name) + " must have rows aligned to 16 bytes"; });
    stride(name, ".row_stride", row_stride, columns, element);
  }
  void stride(const char* name, const char* which, int64_t value, int64_t least,
              int element) const {
    const auto is = [&] { return std::string(name) + which + " is " + std::to_string(value); };
    that(value >= least,
         [&] { return is() + ", but " + std::to_string(least) + " elements are needed"; });
    that(value * element % kAlignment == 0,
         [&] { return is() + ": rows must be aligned to 16 bytes"; });
    that(value * element < int64_t{1} << 40,
         [&] { return is() + ", more than tensor maps allow"; });
  }

  const Limits& limits_;
};

// What products read in mxfp8.
void check_rounded(const Limits& l, const RoundedWeights& w, bool backward) {
  const Checker check(l);
  const LayerShape& s = l.shape;
  const int64_t h = s.hidden, i = s.intermediate;
  check.stack("weights.rounded.gate", w.gate, i, h);
  check.stack("weights.rounded.up", w.up, i, h);
  if (!backward) return check.stack("weights.rounded.down", w.down, h, i);
  check.stack("weights.rounded.gate_backward", w.gate_backward, i, h);
  check.stack("weights.rounded.up_backward", w.up_backward, i, h);
  check.stack("weights.rounded.down_backward", w.down_backward, h, i);
}

// In fp8.
void check_quantized(const Limits& l, const QuantizedWeights& w, bool backward) {
  const Checker check(l);
  const auto stack = [&](const char* data, const char* scales, const QuantizedStack& s) {
    check.pointer(data, s.data);
    check.pointer(scales, s.scales, 1);
  };
  stack("weights.quantized.gate.data", "weights.quantized.gate.scales", w.gate);
  stack("weights.quantized.up.data", "weights.quantized.up.scales", w.up);
  if (!backward) {
    return stack("weights.quantized.down.data", "weights.quantized.down.scales", w.down);
  }
  stack("weights.quantized.gate_t.data", "weights.quantized.gate_t.scales", w.gate_t);
  stack("weights.quantized.up_t.data", "weights.quantized.up_t.scales", w.up_t);
  stack("weights.quantized.down_t.data", "weights.quantized.down_t.scales", w.down_t);
}

// What both directions read.
template <class Args>
void check_inputs(const Limits& l, const Args& a) {
  const Checker check(l);
  const LayerShape& s = l.shape;
  check.that(a.tokens >= 0 && a.tokens <= l.max_tokens, [&] {
    return "tokens must be 0.." + std::to_string(l.max_tokens) + ", not " +
           std::to_string(a.tokens);
  });
  if (a.id_type != IdType::int32 && a.id_type != IdType::int64) {
    throw Error(ErrorCode::bad_type,
                "topk_ids is neither int32 nor int64 (rank " + std::to_string(l.rank) + ")");
  }
  if (a.tokens > 0) {
    check.matrix("x", a.x, s.hidden);
    check.pointer("topk_ids", a.topk_ids, a.id_type == IdType::int64 ? 8 : 4);
    check.pointer("topk_weights", a.topk_weights, 4);
  }
  const LayerWeights& w = a.weights;
  if (l.precision == Precision::fp8) {
    check_quantized(l, w.quantized, std::is_same_v<Args, BackwardArgs>);
  } else if (is_quantized(l.precision)) {
    check_rounded(l, w.rounded, std::is_same_v<Args, BackwardArgs>);
  } else {
    check.stack("w_gate", w.gate, s.intermediate, s.hidden);
    check.stack("w_up", w.up, s.intermediate, s.hidden);
    check.stack("w_down", w.down, s.hidden, s.intermediate);
  }
  if (s.shared_intermediate > 0) {
    check.matrix("shared_gate_proj", w.shared_gate_proj, s.hidden);
    check.matrix("shared_up_proj", w.shared_up_proj, s.hidden);
    check.matrix("shared_down_proj", w.shared_down_proj, s.shared_intermediate);
  }
  if (s.shared_gate) check.pointer("shared_gate_vector", w.shared_gate_vector);
  const auto pair = [&](const char* names, const void* one, const void* other) {
    check.that((one == nullptr) == (other == nullptr),
               [&] { return std::string(names) + ": one is null, the other is not"; });
  };
  pair("saved.gate, saved.up", a.saved.gate, a.saved.up);
  pair("saved.shared_gate, saved.shared_up", a.saved.shared_gate, a.saved.shared_up);
  check.optional("saved.gate", a.saved.gate);
  check.optional("saved.up", a.saved.up);
  check.optional("saved.shared_gate", a.saved.shared_gate);
  check.optional("saved.shared_up", a.saved.shared_up);
  check.optional("saved.shared_out", a.saved.shared_out);
}

constexpr struct {
  const char* name;
  bool plan::Wanted::* field;
} kWanted[] = {
    {"d_x", &plan::Wanted::d_x},
    {"d_topk_weights", &plan::Wanted::d_topk_weights},
    {"d_gate", &plan::Wanted::d_gate},
    {"d_up", &plan::Wanted::d_up},
    {"d_down", &plan::Wanted::d_down},
    {"d_shared_gate_proj", &plan::Wanted::d_shared_gate},
    {"d_shared_up_proj", &plan::Wanted::d_shared_up},
    {"d_shared_down_proj", &plan::Wanted::d_shared_down},
    {"d_shared_gate_vector", &plan::Wanted::d_shared_vector},
};

plan::Wanted wanted_of(const BackwardArgs& a) {
  const auto is = [](const auto& grad) { return grad.mode != GradMode::none; };
  plan::Wanted w;
  w.d_x = a.d_x.data != nullptr;
  w.d_topk_weights = a.d_topk_weights != nullptr;
  w.d_gate = is(a.d_gate);
  w.d_up = is(a.d_up);
  w.d_down = is(a.d_down);
  w.d_shared_gate = is(a.d_shared_gate_proj);
  w.d_shared_up = is(a.d_shared_up_proj);
  w.d_shared_down = is(a.d_shared_down_proj);
  w.d_shared_vector = is(a.d_shared_gate_vector);
  return w;
}

}  // namespace

void check_forward(const Limits& l, const ForwardArgs& a) {
  check_inputs(l, a);
  if (a.tokens > 0) Checker(l).matrix("y", a.y, l.shape.hidden);
}

void check_backward(const Limits& l, const BackwardArgs& a) {
  check_inputs(l, a);
  const Checker check(l);
  const LayerShape& s = l.shape;
  if (a.tokens > 0) {
    check.matrix("d_y", a.d_y, s.hidden);
    if (a.d_x.data != nullptr) check.matrix("d_x", a.d_x, s.hidden);
    if (a.d_topk_weights != nullptr) check.pointer("d_topk_weights", a.d_topk_weights, 4);
  }
  // Whether the target is to be looked at.
  const auto is_wanted = [&](const char* name, GradMode mode, bool exists) {
    check.that(mode >= GradMode::none && mode <= GradMode::accumulate, [&] {
      return std::string(name) + ".mode is " + std::to_string(static_cast<int>(mode));
    });
    check.that(exists || mode == GradMode::none,
               [&] { return std::string(name) + " is wanted, but the layer has no such weight"; });
    return mode != GradMode::none;
  };
  const auto element = [](GradMode mode) { return mode == GradMode::storage ? 2 : 4; };
  const auto stack = [&](const char* name, const StackGrad& g, int64_t rows, int64_t columns) {
    if (!is_wanted(name, g.mode, true)) return;
    check.stack(name, g.target, rows, columns, element(g.mode));
  };
  stack("d_gate", a.d_gate, s.intermediate, s.hidden);
  stack("d_up", a.d_up, s.intermediate, s.hidden);
  stack("d_down", a.d_down, s.hidden, s.intermediate);
  const auto matrix = [&](const char* name, const MatrixGrad& g, int64_t columns, bool exists) {
    if (!is_wanted(name, g.mode, exists)) return;
    check.matrix(name, g.target, columns, element(g.mode));
  };
  const bool shared = s.shared_intermediate > 0;
  matrix("d_shared_gate_proj", a.d_shared_gate_proj, s.hidden, shared);
  matrix("d_shared_up_proj", a.d_shared_up_proj, s.hidden, shared);
  matrix("d_shared_down_proj", a.d_shared_down_proj, s.shared_intermediate, shared);
  if (is_wanted("d_shared_gate_vector", a.d_shared_gate_vector.mode, s.shared_gate)) {
    check.pointer("d_shared_gate_vector", a.d_shared_gate_vector.target.data);
  }
}

plan::Wanted wanted(const std::vector<BackwardArgs>& args, const std::vector<int>& ranks) {
  // Whose word counts: a rank with tokens, if there is one.
  const auto with_tokens =
      std::find_if(args.begin(), args.end(), [](const BackwardArgs& a) { return a.tokens > 0; });
  const auto decider = with_tokens != args.end() ? with_tokens : args.begin();
  const plan::Wanted all = wanted_of(*decider);
  for (size_t i = 0; i < args.size(); ++i) {
    plan::Wanted own = wanted_of(args[i]);
    if (args[i].tokens == 0) {  // empty tensors often have null data
      own.d_x = all.d_x;
      own.d_topk_weights = all.d_topk_weights;
    }
    for (const auto& gradient : kWanted) {
      if (own.*gradient.field == all.*gradient.field) continue;
      const std::string one = std::to_string(ranks[decider - args.begin()]);
      throw Error(ErrorCode::disagreement,
                  std::string(gradient.name) + " is wanted on rank " +
                      (own.*gradient.field ? std::to_string(ranks[i]) : one) + " and not on rank " +
                      (own.*gradient.field ? one : std::to_string(ranks[i])));
    }
  }
  return all;
}

uint32_t wanted_bits(const plan::Wanted& w) {
  uint32_t bits = 0;
  for (size_t i = 0; i < std::size(kWanted); ++i) bits |= uint32_t{w.*kWanted[i].field} << i;
  return bits;
}

}  // namespace mok::cuda
