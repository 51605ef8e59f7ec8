#include "cuda/arguments.h"

#include <algorithm>

namespace mok::cuda {

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::bad_argument, message);
}

void check_shape(const LayerShape& shape, int ranks, const WorkspaceOptions& options) {
  require(ranks >= 1 && ranks <= kMaxRanks,
          "ranks must be 1.." + std::to_string(kMaxRanks) + ", not " + std::to_string(ranks));
  const auto size = [](const char* name, int64_t n, bool zero) {
    require((n > 0 || (zero && n == 0)) && n % 64 == 0 && n <= 1 << 20,
            std::string(name) + " must be a multiple of 64 on CUDA, not " + std::to_string(n));
  };
  size("hidden", shape.hidden, false);
  size("intermediate", shape.intermediate, false);
  size("shared_intermediate", shape.shared_intermediate, true);
  require(shape.experts >= 1 && shape.experts <= kMaxExperts && shape.experts % ranks == 0,
          "experts must be a multiple of the ranks, at most " + std::to_string(kMaxExperts) +
              ", not " + std::to_string(shape.experts));
  require(shape.topk >= 1 && shape.topk <= std::min(shape.experts, kMaxTopk),
          "topk must be 1..min(experts, " + std::to_string(kMaxTopk) + "), not " +
              std::to_string(shape.topk));
  const int64_t slots = ranks * options.max_tokens * shape.topk;
  require(options.max_tokens >= 0 && slots < int64_t{1} << 31,
          "max_tokens * ranks * topk must be under 2^31");
  require(shape.swiglu_limit > 0, "swiglu_limit must be positive");
}

void check_forward(const LayerShape& shape, int rank, int64_t max_tokens, const ForwardArgs& a) {
  const std::string where = " (rank " + std::to_string(rank) + ")";
  require(a.tokens >= 0 && a.tokens <= max_tokens, "tokens must be 0.." +
                                                       std::to_string(max_tokens) + ", not " +
                                                       std::to_string(a.tokens) + where);
  const auto rows = [&](const char* name, const void* data, int64_t stride, int64_t least) {
    require(data != nullptr, std::string(name) + " is null" + where);
    require(reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0,
            std::string(name) + " must have rows aligned to 16 bytes" + where);
    require(stride >= least, std::string(name) + ": row stride is below the row length" + where);
  };
  if (a.tokens > 0) {
    rows("x", a.x.data, a.x.row_stride, shape.hidden);
    rows("y", a.y.data, a.y.row_stride, shape.hidden);
    require(a.topk_ids != nullptr, "topk_ids is null" + where);
    require(a.topk_weights != nullptr, "topk_weights is null" + where);
  }
  const LayerWeights& w = a.weights;
  rows("w_gate", w.gate.data, w.gate.row_stride, shape.hidden);
  rows("w_up", w.up.data, w.up.row_stride, shape.hidden);
  rows("w_down", w.down.data, w.down.row_stride, shape.intermediate);
  require(
      w.gate.expert_stride % 8 == 0 && w.up.expert_stride % 8 == 0 && w.down.expert_stride % 8 == 0,
      "weights: expert strides must be multiples of 8" + where);
  if (shape.shared_intermediate == 0) return;
  rows("shared_gate_proj", w.shared_gate_proj.data, w.shared_gate_proj.row_stride, shape.hidden);
  rows("shared_up_proj", w.shared_up_proj.data, w.shared_up_proj.row_stride, shape.hidden);
  rows("shared_down_proj", w.shared_down_proj.data, w.shared_down_proj.row_stride,
       shape.shared_intermediate);
  require(!shape.shared_gate || w.shared_gate_vector != nullptr,
          "shared_gate_vector is null" + where);
}

}  // namespace mok::cuda
