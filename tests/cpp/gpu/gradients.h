// Backward of a GpuLayer: its tensors, calls, results, and the comparison with the oracle.
#pragma once

#include <array>
#include <cstddef>

#include "gpu/checks.h"

namespace mok::testing {

using Bytes = std::vector<std::byte>;

enum Grad {
  d_x,
  d_topk_weights,
  d_gate,
  d_up,
  d_down,
  d_shared_gate,
  d_shared_up,
  d_shared_down,
  d_shared_vector,
  kGrads
};
inline constexpr const char* kGradNames[kGrads] = {
    "d_x",           "d_topk_weights", "d_gate",        "d_up",           "d_down",
    "d_shared_gate", "d_shared_up",    "d_shared_down", "d_shared_vector"};
constexpr bool is_weight(int g) { return g >= d_gate; }
constexpr bool is_shared(int g) { return g >= d_shared_gate; }

// How each gradient is delivered; for d_x and d_topk_weights: none or not none.
using Modes = std::array<GradMode, kGrads>;
inline Modes all_modes(GradMode mode) {
  Modes m;
  m.fill(mode);
  return m;
}

// Outputs of both directions. Each is that of all ranks, one after the other: token tensors and
// routed gradients stand in global order, the shared expert's rank by rank.
struct Results {
  std::vector<bf16> y;
  std::array<Bytes, kGrads> grad;

  template <class T>
  std::vector<T> as(int g) const {
    std::vector<T> out(grad[g].size() / sizeof(T));
    std::memcpy(out.data(), grad[g].data(), out.size() * sizeof(T));
    return out;
  }
};

// Shared gradients are of a rank's own tokens: they differ between splits.
enum class Shared { compared, left_out };
inline void expect_same_bits(const Results& a, const Results& b, const std::string& what,
                             Shared shared = Shared::compared) {
  EXPECT_TRUE(same_bits(a.y, b.y)) << what << ": y";
  for (int g = 0; g < kGrads; ++g) {
    if (is_shared(g) && shared == Shared::left_out) continue;
    EXPECT_TRUE(a.grad[g] == b.grad[g]) << what << ": " << kGradNames[g];
  }
}

inline bool all_bytes_are(const Bytes& bytes, int value) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [&](std::byte b) { return b == static_cast<std::byte>(value); });
}
inline bool all_are_nan(const std::vector<float>& values) {
  return std::ranges::all_of(values, [](float v) { return std::isnan(v); });
}
inline bool all_are_nan(const std::vector<bf16>& values) {
  return all_nan(values.data(), static_cast<int64_t>(values.size()));
}

class BackwardLayer {
 public:
  explicit BackwardLayer(GpuLayer& layer, const Modes& modes = all_modes(GradMode::sum))
      : layer_(layer), modes_(modes) {
    for (int r = 0; r < ranks(); ++r) {
      Device& d = layer.memory(r);
      int64_t begin = 0;
      for (int i = 0; i < r; ++i) begin += tokens(i);
      std::vector<bf16> host(tokens(r) * shape().hidden);
      layer.problem().fill(problem::Tensor::d_y, begin, begin + tokens(r), Precision::bf16,
                           host.data());
      d_y_.push_back(d.put(host));
      out_.emplace_back();
      for (int g = 0; g < kGrads; ++g) out_[r][g] = d.take<float>(elements(r, g));
    }
  }

  GpuLayer& layer() { return layer_; }
  Modes& modes() { return modes_; }
  bf16* d_y(int rank) const { return d_y_[rank]; }
  void* out(int rank, int g) const { return out_[rank][g]; }

  // Elements of a gradient on a rank; 0 where the layer has none.
  int64_t elements(int rank, int g) const {
    const LayerShape& s = shape();
    const int64_t routed = s.experts / ranks() * s.intermediate * s.hidden;
    switch (g) {
      case d_x:
        return tokens(rank) * s.hidden;
      case d_topk_weights:
        return tokens(rank) * s.topk;
      case d_gate:
      case d_up:
      case d_down:
        return routed;
      case d_shared_vector:
        return s.shared_gate ? s.hidden : 0;
      default:
        return s.shared_intermediate * s.hidden;
    }
  }
  int element_size(int g) const {
    return g == d_x || (is_weight(g) && modes_[g] == GradMode::storage) ? 2 : 4;
  }

  std::vector<BackwardArgs> args() const {
    std::vector<BackwardArgs> all;
    for (int r = 0; r < ranks(); ++r) all.push_back(rank_args(r));
    return all;
  }

  // Fills y and all gradients with NaN, targets that are added to with `before`.
  void poison(float before = 0) {
    for (int r = 0; r < ranks(); ++r) {
      const cuda::DeviceGuard guard(layer_.setup().devices[r]);
      const cudaStream_t stream = stream_of(r);
      cuda::check(
          cudaMemsetAsync(layer_.args()[r].y.data, 0xff, tokens(r) * shape().hidden * 2, stream),
          "poison");
      for (int g = 0; g < kGrads; ++g) {
        const int64_t n = elements(r, g);
        if (!is_weight(g) || modes_[g] != GradMode::accumulate) {
          cuda::check(cudaMemsetAsync(out_[r][g], 0xff, n * 4, stream), "poison");
          continue;
        }
        const std::vector<float> values(n, before);
        cuda::check(cudaMemcpyAsync(out_[r][g], values.data(), n * 4, cudaMemcpyDefault, stream),
                    "poison");
      }
      cuda::check(cudaStreamSynchronize(stream), "poison");
    }
  }

  void enqueue() { layer_.workspace().backward(args(), layer_.streams()); }
  void enqueue_both() {
    layer_.enqueue();
    enqueue();
  }
  // Poisons, runs forward and backward, returns everything.
  Results run(float before = 0) {
    poison(before);
    enqueue_both();
    layer_.workspace().synchronize();
    return results();
  }
  // Waits for the layer's streams.
  Results results() const {
    Results all;
    for (int r = 0; r < ranks(); ++r) {
      const cuda::DeviceGuard guard(layer_.setup().devices[r]);
      std::vector<bf16> y(tokens(r) * shape().hidden);
      copy(y.data(), layer_.args()[r].y.data, y.size() * 2, r);
      all.y.insert(all.y.end(), y.begin(), y.end());
      for (int g = 0; g < kGrads; ++g) {
        Bytes part(elements(r, g) * element_size(g));
        copy(part.data(), out_[r][g], part.size(), r);
        all.grad[g].insert(all.grad[g].end(), part.begin(), part.end());
      }
    }
    return all;
  }

  // Every output that is wanted, against the oracle; accumulating targets began with 0.
  void expect_close(const Results& results, const reference::Inputs& in) const {
    reference::Expert routed;
    const reference::Outputs expected = reference::run(in, reference::collect(routed));
    const LayerShape& s = shape();
    const Precision precision = precision_of(in);
    const problem::Tolerances limit = tolerances(s, precision, layer_.tokens());
    const problem::Tolerances whole = whole_tolerances(s, precision, layer_.tokens());
    const int64_t h = s.hidden, i = s.intermediate, shared = s.shared_intermediate;
    const auto y = problem::compare(results.y.data(), h, expected.y.data(), layer_.tokens(), h);
    EXPECT_LE(y.scaled_err, limit.y) << "y: row " << y.scaled_row << ", column " << y.scaled_column;
    EXPECT_LE(y.whole_err(), whole.y) << "y";
    std::array<problem::Difference, kGrads> all;  // of what is routed
    const auto check = [&](int g, int64_t first, const double* wanted, int64_t rows,
                           int64_t columns, double bound, const std::string& of) {
      if (modes_[g] == GradMode::none) return;
      const Precision type = element_size(g) == 2 ? Precision::bf16 : Precision::fp32;
      const auto d = problem::compare(results.grad[g].data() + first * element_size(g), type,
                                      columns, wanted, rows, columns);
      EXPECT_LE(d.scaled_err, bound)
          << kGradNames[g] << of << ": max_rel_err " << d.max_rel_err << " at row " << d.scaled_row
          << ", column " << d.scaled_column;
      all[g].add(d, 0);
    };
    check(d_x, 0, expected.d_x.data(), layer_.tokens(), h, limit.d_x, "");
    check(d_topk_weights, 0, expected.d_topk_weights.data(), layer_.tokens(), s.topk,
          limit.d_topk_weights, "");
    for (int64_t e = 0; e < s.experts; ++e) {
      const int64_t at = e * i * h;
      const std::string of = " of expert " + std::to_string(e);
      check(d_gate, at, &routed.gate[at], i, h, limit.d_w_gate_up, of);
      check(d_up, at, &routed.up[at], i, h, limit.d_w_gate_up, of);
      check(d_down, at, &routed.down[at], h, i, limit.d_w_down, of);
    }
    const std::pair<Grad, double> bounds[] = {{d_x, whole.d_x},
                                              {d_topk_weights, whole.d_topk_weights},
                                              {d_gate, whole.d_w_gate_up},
                                              {d_up, whole.d_w_gate_up},
                                              {d_down, whole.d_w_down}};
    for (const auto& [g, bound] : bounds) {
      if (modes_[g] == GradMode::none) continue;
      EXPECT_LE(all[g].whole_err(), bound) << kGradNames[g];
    }
    for (int r = 0; r < ranks() && shared > 0; ++r) {
      const int64_t at = r * shared * h;
      const std::string of = " of rank " + std::to_string(r);
      const reference::Expert& wanted = expected.d_shared[r];
      check(d_shared_gate, at, wanted.gate.data(), shared, h, limit.d_w_gate_up, of);
      check(d_shared_up, at, wanted.up.data(), shared, h, limit.d_w_gate_up, of);
      check(d_shared_down, at, wanted.down.data(), h, shared, limit.d_w_down, of);
      if (!s.shared_gate) continue;
      check(d_shared_vector, r * h, expected.d_shared_gate[r].data(), 1, h, limit.d_shared_vector,
            of);
    }
  }

 private:
  int ranks() const { return static_cast<int>(layer_.setup().tokens.size()); }
  int64_t tokens(int rank) const { return layer_.setup().tokens[rank]; }
  const LayerShape& shape() const { return layer_.setup().shape; }
  cudaStream_t stream_of(int rank) const {
    return static_cast<cudaStream_t>(layer_.streams()[rank]);
  }
  void copy(void* to, const void* from, size_t bytes, int rank) const {
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(rank)), "download");
    cuda::check(cudaStreamSynchronize(stream_of(rank)), "download");
  }

  BackwardArgs rank_args(int r) const {
    const LayerShape& s = shape();
    const int64_t h = s.hidden, i = s.intermediate, shared = s.shared_intermediate;
    const ForwardArgs& f = layer_.args()[r];
    const auto& out = out_[r];
    BackwardArgs a;
    a.tokens = f.tokens;
    a.x = f.x;
    a.topk_ids = f.topk_ids;
    a.id_type = f.id_type;
    a.topk_weights = f.topk_weights;
    a.weights = f.weights;
    a.saved = f.saved;
    a.d_y = {d_y_[r], h};
    if (modes_[d_x] != GradMode::none) a.d_x = {out[d_x], h};
    if (modes_[d_topk_weights] != GradMode::none) a.d_topk_weights = out[d_topk_weights];
    a.d_gate = {{out[d_gate], i * h, h}, modes_[d_gate]};
    a.d_up = {{out[d_up], i * h, h}, modes_[d_up]};
    a.d_down = {{out[d_down], h * i, i}, modes_[d_down]};
    if (shared > 0) {
      a.d_shared_gate_proj = {{out[d_shared_gate], h}, modes_[d_shared_gate]};
      a.d_shared_up_proj = {{out[d_shared_up], h}, modes_[d_shared_up]};
      a.d_shared_down_proj = {{out[d_shared_down], shared}, modes_[d_shared_down]};
    }
    if (s.shared_gate) {
      a.d_shared_gate_vector = {{out[d_shared_vector], h}, modes_[d_shared_vector]};
    }
    return a;
  }

  GpuLayer& layer_;
  Modes modes_;
  std::vector<bf16*> d_y_;
  std::vector<std::array<float*, kGrads>> out_;
};

inline reference::Inputs backward_inputs(const GpuLayer& layer) {
  return problem::oracle_inputs(layer.problem(), layer.setup().options.precision,
                                layer.setup().tokens, true);
}

// Made, run once, compared with nothing.
inline Results run_both(const LayerSetup& setup, GradMode mode = GradMode::sum) {
  GpuLayer layer(setup);
  return BackwardLayer(layer, all_modes(mode)).run();
}

}  // namespace mok::testing
