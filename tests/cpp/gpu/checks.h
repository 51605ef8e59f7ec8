// What the GPU tests share: shapes, comparisons, inputs changed in place, calls on a stream.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/layer.h"
#include "problem/compare.h"

namespace mok::testing {

inline LayerShape shape_of(int64_t h, int64_t i, int e, int k, int64_t shared = 0,
                           bool gate = false) {
  LayerShape s;
  s.hidden = h;
  s.intermediate = i;
  s.experts = e;
  s.topk = k;
  s.shared_intermediate = shared;
  s.shared_gate = gate;
  return s;
}

// A layer with everything in it on GPU 0, all ranks virtual there.
inline LayerSetup virtual_ranks(const std::vector<int64_t>& tokens) {
  LayerSetup s;
  s.shape = shape_of(512, 320, 24, 4, 128, true);
  s.tokens = tokens;
  s.devices.assign(tokens.size(), 0);
  s.options.deadlines = {10, 5};
  s.seed = 7;
  return s;
}

// Whether the ranks that would share a GPU of this machine may.
inline bool has_room(const std::vector<int64_t>& tokens, Precision precision) {
  const int gpus = std::max(1, cuda::device_count());
  return (static_cast<int>(tokens.size()) + gpus - 1) / gpus <=
         cuda::most_ranks_of_a_gpu(precision);
}

inline const char* name_of(Precision p) {
  return p == Precision::bf16 ? "bf16" : p == Precision::mxfp8 ? "mxfp8" : "fp8";
}

// Tests that run in each precision: what follows a test's name, and a list of cases in each (with a
// name and a precision).
inline std::string precision_name(const ::testing::TestParamInfo<Precision>& info) {
  return name_of(info.param);
}
inline auto each_precision() {
  return ::testing::Values(Precision::bf16, Precision::mxfp8, Precision::fp8);
}
class InEachPrecision : public ::testing::TestWithParam<Precision> {
 protected:
  static LayerSetup virtual_ranks(const std::vector<int64_t>& tokens) {
    LayerSetup s = testing::virtual_ranks(tokens);
    s.options.precision = GetParam();
    return s;
  }
};
template <class Case>
std::vector<Case> in_each_precision(std::vector<Case> cases) {
  for (size_t i = 0, n = cases.size(); i < n; ++i) {
    for (const Precision precision : {Precision::mxfp8, Precision::fp8}) {
      cases.push_back(cases[i]);
      cases.back().precision = precision;
    }
  }
  return cases;
}
template <class Case>
std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Precision p = info.param.precision;
  return std::string(info.param.name) + (p == Precision::bf16 ? "" : std::string("_") + name_of(p));
}

inline bool same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
}

inline void expect_same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b,
                             const std::string& what) {
  EXPECT_TRUE(same_bits(a, b)) << what;
}

// The precision that the inputs say.
inline Precision precision_of(const reference::Inputs& in) {
  return in.blocks.length == 0    ? Precision::bf16
         : in.blocks.length < 128 ? Precision::mxfp8
                                  : Precision::fp8;
}

// Of a result of the GPU.
inline problem::Tolerances tolerances(const LayerShape& s, Precision precision, int64_t tokens) {
  return problem::tolerances(s, precision, tokens, problem::sums_on_gpus(precision));
}
inline problem::Tolerances whole_tolerances(const LayerShape& s, Precision precision,
                                            int64_t tokens) {
  return problem::whole_tolerances(s, precision, tokens, problem::sums_on_gpus(precision));
}

inline void expect_close(const std::vector<bf16>& y, const reference::Inputs& in) {
  const auto out = reference::run(in);
  int64_t tokens = 0;
  for (const int64_t t : in.rank_tokens) tokens += t;
  const auto d = problem::compare(y.data(), in.shape.hidden, out.y.data(), tokens, in.shape.hidden);
  const Precision precision = precision_of(in);
  EXPECT_LE(d.scaled_err, tolerances(in.shape, precision, tokens).y)
      << "max_rel_err " << d.max_rel_err << " at row " << d.scaled_row << ", column "
      << d.scaled_column;
  EXPECT_LE(d.whole_err(), whole_tolerances(in.shape, precision, tokens).y);
}

inline reference::Inputs oracle_inputs(const GpuLayer& layer) {
  return problem::oracle_inputs(layer.problem(), layer.setup().options.precision,
                                layer.setup().tokens, false);
}

// What belongs to tokens, of all ranks in global order: read, changed, written back in place.
struct TokenInputs {
  std::vector<bf16> x;
  std::vector<int64_t> ids;
  std::vector<float> weights;

  static TokenInputs of(GpuLayer& layer) {
    TokenInputs all;
    const LayerShape& s = layer.setup().shape;
    for (const ForwardArgs& a : layer.args()) {
      const auto add = [](auto& to, const auto& piece) {
        to.insert(to.end(), piece.begin(), piece.end());
      };
      add(all.x, download(static_cast<const bf16*>(a.x.data), a.tokens * s.hidden));
      add(all.ids, download(static_cast<const int64_t*>(a.topk_ids), a.tokens * s.topk));
      add(all.weights, download(static_cast<const float*>(a.topk_weights), a.tokens * s.topk));
    }
    return all;
  }

  void write(GpuLayer& layer) const {
    const LayerShape& s = layer.setup().shape;
    int64_t token = 0;
    for (const ForwardArgs& a : layer.args()) {
      const auto put = [&](const void* to, const auto& from, int64_t each) {
        cuda::check(cudaMemcpy(const_cast<void*>(to), from.data() + token * each,
                               a.tokens * each * sizeof(from[0]), cudaMemcpyDefault),
                    "inputs");
      };
      put(a.x.data, x, s.hidden);
      put(a.topk_ids, ids, s.topk);
      put(a.topk_weights, weights, s.topk);
      token += a.tokens;
    }
  }
};

// Which tokens have only NaN in y, which have any.
inline bool all_nan(const bf16* row, int64_t n) {
  return std::all_of(row, row + n, [](bf16 v) { return std::isnan(numerics::to_float(v)); });
}
inline bool any_nan(const bf16* row, int64_t n) {
  return std::any_of(row, row + n, [](bf16 v) { return std::isnan(numerics::to_float(v)); });
}

// A stream of GPU 0 that waits for no other stream.
class Stream {
 public:
  Stream() {
    cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "test stream");
  }
  Stream(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void wait() const { cuda::check(cudaStreamSynchronize(stream_), "test stream"); }
  bool is_busy() const { return cudaStreamQuery(stream_) == cudaErrorNotReady; }

  // The layer's ranks, all on GPU 0, call here from now on.
  void take(GpuLayer& layer) const { layer.streams().assign(layer.streams().size(), stream_); }
  void poison(GpuLayer& layer) const {
    for (const ForwardArgs& a : layer.args()) {
      cuda::check(cudaMemsetAsync(a.y.data, 0xff, a.tokens * a.y.row_stride * 2, stream_),
                  "poison");
    }
  }
  std::vector<bf16> y(GpuLayer& layer) const {
    std::vector<bf16> all(layer.tokens() * layer.setup().shape.hidden);
    bf16* to = all.data();
    for (const ForwardArgs& a : layer.args()) {
      const int64_t n = a.tokens * a.y.row_stride;
      cuda::check(cudaMemcpyAsync(to, a.y.data, n * 2, cudaMemcpyDefault, stream_), "download");
      to += n;
    }
    wait();
    return all;
  }
  // Poisons, calls, returns y, waiting for nothing but this stream.
  std::vector<bf16> forward(GpuLayer& layer) const {
    take(layer);
    poison(layer);
    layer.enqueue();
    return y(layer);
  }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace mok::testing
