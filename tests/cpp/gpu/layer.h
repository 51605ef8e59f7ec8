// Runs a problem on the GPUs and brings the results back in global order.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/check.h"
#include "cuda/quantize.h"
#include "mok/cuda.h"
#include "numerics/bf16.h"
#include "problem/problem.h"

namespace mok::testing {

using numerics::bf16;

// Memory of one GPU, freed at the end.
class Device {
 public:
  explicit Device(int device) : device_(device) {}
  Device(const Device&) = delete;
  ~Device() {
    const cuda::DeviceGuard guard(device_);
    for (void* p : owned_) cudaFree(p);
  }
  template <class T>
  T* take(size_t count, int fill = 0xff) {
    const cuda::DeviceGuard guard(device_);
    void* p = nullptr;
    cuda::check(cudaMalloc(&p, std::max<size_t>(count * sizeof(T), 16)), "test memory");
    owned_.push_back(p);
    cuda::check(cudaMemset(p, fill, std::max<size_t>(count * sizeof(T), 16)), "test memory");
    return static_cast<T*>(p);
  }
  template <class T>
  T* put(const std::vector<T>& host) {
    T* p = take<T>(host.size());
    const cuda::DeviceGuard guard(device_);
    cuda::check(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
                "upload");
    return p;
  }
  int device() const { return device_; }

 private:
  int device_;
  std::vector<void*> owned_;
};

template <class T>
std::vector<T> download(const T* from, size_t count) {
  std::vector<T> host(count);
  cuda::check(cudaMemcpy(host.data(), from, count * sizeof(T), cudaMemcpyDefault), "download");
  return host;
}

struct LayerSetup {
  LayerShape shape;
  std::vector<int64_t> tokens;  // of each rank
  std::vector<int> devices;     // of each rank; empty: rank r on GPU r % GPUs
  problem::Routing routing;
  uint64_t seed = 1;
  cuda::Options options;
  bool keep = true;  // what forward can keep for backward is kept
};

class GpuLayer {
 public:
  explicit GpuLayer(LayerSetup s) : setup_(std::move(s)) {
    const int ranks = static_cast<int>(setup_.tokens.size());
    const int gpus = std::max(1, cuda::device_count());
    if (setup_.devices.empty()) {
      for (int r = 0; r < ranks; ++r) setup_.devices.push_back(r % gpus);
    }
    global_ = std::accumulate(setup_.tokens.begin(), setup_.tokens.end(), int64_t{0});
    problem_ =
        std::make_unique<problem::Problem>(setup_.shape, global_, setup_.routing, setup_.seed);
    for (const int64_t t : setup_.tokens) {
      setup_.options.workspace.max_tokens = std::max(setup_.options.workspace.max_tokens, t);
    }
    workspace_ = std::make_unique<cuda::Workspace>(setup_.shape, setup_.devices, setup_.options);
    int64_t begin = 0;
    for (int r = 0; r < ranks; ++r) {
      memory_.push_back(std::make_unique<Device>(setup_.devices[r]));
      args_.push_back(upload(r, begin));
      begin += setup_.tokens[r];
      streams_.push_back(nullptr);
    }
    refresh_weights();
  }

  const problem::Problem& problem() const { return *problem_; }
  cuda::Workspace& workspace() { return *workspace_; }
  std::vector<ForwardArgs>& args() { return args_; }
  std::vector<void*>& streams() { return streams_; }
  Device& memory(int r) { return *memory_[r]; }
  int64_t tokens() const { return global_; }
  const LayerSetup& setup() const { return setup_; }

  // After a change of the weights: what a quantised precision reads of them.
  void refresh_weights() {
    if (!is_quantized(setup_.options.precision)) return;
    const int64_t h = setup_.shape.hidden, i = setup_.shape.intermediate;
    const int64_t local = setup_.shape.experts / static_cast<int64_t>(args_.size());
    for (size_t r = 0; r < args_.size(); ++r) {
      const cuda::DeviceGuard guard(setup_.devices[r]);
      LayerWeights& w = args_[r].weights;
      if (setup_.options.precision == Precision::fp8) {
        QuantizedWeights& q = w.quantized;
        quantize(r, w.gate, local, i, h, q.gate, q.gate_t);
        quantize(r, w.up, local, i, h, q.up, q.up_t);
        quantize(r, w.down, local, h, i, q.down, q.down_t);
        cuda::check(cudaDeviceSynchronize(), "weights");
        continue;
      }
      const auto make = [&](const ConstStack& from, int64_t rows, int64_t columns, ConstStack& to,
                            ConstStack& to_backward) {
        const auto data = [&](ConstStack& stack) {
          if (stack.data == nullptr) {
            stack = {memory_[r]->take<bf16>(local * rows * columns), rows * columns, columns};
          }
          return const_cast<void*>(stack.data);
        };
        cuda::round_weights(setup_.options.precision, from, local, rows, columns, data(to),
                            data(to_backward), nullptr);
      };
      make(w.gate, i, h, w.rounded.gate, w.rounded.gate_backward);
      make(w.up, i, h, w.rounded.up, w.rounded.up_backward);
      make(w.down, h, i, w.rounded.down, w.rounded.down_backward);
      cuda::check(cudaDeviceSynchronize(), "weights");
    }
  }

  void enqueue() { workspace_->forward(args_, streams_); }

  void poison() {
    for (size_t r = 0; r < args_.size(); ++r) {
      const cuda::DeviceGuard guard(setup_.devices[r]);
      cuda::check(cudaMemset(args_[r].y.data, 0xff, setup_.tokens[r] * setup_.shape.hidden * 2),
                  "poison");
      cuda::check(cudaDeviceSynchronize(), "poison");
    }
  }

  // Poisons, runs, returns y of all tokens.
  std::vector<bf16> forward() {
    poison();
    enqueue();
    workspace_->synchronize();
    return y();
  }

  std::vector<bf16> y() const {
    std::vector<bf16> all;
    for (size_t r = 0; r < args_.size(); ++r) {
      const auto part = download(static_cast<const bf16*>(args_[r].y.data),
                                 setup_.tokens[r] * setup_.shape.hidden);
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

 private:
  // `to`, `transposed`: taken when they are null.
  void quantize(size_t r, const ConstStack& from, int64_t count, int64_t rows, int64_t columns,
                QuantizedStack& to, QuantizedStack& transposed) {
    const auto take = [&](QuantizedStack& stack, int64_t scales) {
      if (stack.data != nullptr) return;
      stack.data = memory_[r]->template take<uint8_t>(count * rows * columns);
      stack.scales = memory_[r]->template take<uint8_t>(count * scales);
    };
    take(to, scale_bytes(Precision::fp8, rows, columns));
    take(transposed, scale_bytes(Precision::fp8, columns, rows));
    cuda::quantize_weights(
        Precision::fp8, from, count, rows, columns,
        {const_cast<void*>(to.data), const_cast<uint8_t*>(to.scales),
         const_cast<void*>(transposed.data), const_cast<uint8_t*>(transposed.scales)},
        nullptr);
  }

  bf16* matrix(Device& d, problem::Tensor t, int64_t begin, int64_t end) {
    std::vector<bf16> host((end - begin) * problem_->row_elements(t));
    problem_->fill(t, begin, end, Precision::bf16, host.data());
    return d.put(host);
  }

  ForwardArgs upload(int r, int64_t begin) {
    using problem::Tensor;
    Device& d = *memory_[r];
    const LayerShape& s = setup_.shape;
    const int64_t tokens = setup_.tokens[r], end = begin + tokens;
    const int local = s.experts / static_cast<int>(setup_.tokens.size());
    ForwardArgs a;
    a.tokens = tokens;
    a.x = {matrix(d, Tensor::x, begin, end), s.hidden};
    std::vector<int64_t> ids(tokens * s.topk);
    problem_->fill_topk_ids(begin, end, ids.data());
    a.topk_ids = d.put(ids);
    a.id_type = IdType::int64;
    std::vector<float> weights(tokens * s.topk);
    problem_->fill_topk_weights(begin, end, weights.data());
    a.topk_weights = d.put(weights);
    const int64_t e0 = int64_t{r} * local, e1 = e0 + local;
    a.weights.gate = {matrix(d, Tensor::w_gate, e0, e1), s.intermediate * s.hidden, s.hidden};
    a.weights.up = {matrix(d, Tensor::w_up, e0, e1), s.intermediate * s.hidden, s.hidden};
    a.weights.down = {matrix(d, Tensor::w_down, e0, e1), s.intermediate * s.hidden, s.intermediate};
    if (s.shared_intermediate > 0) {
      const int64_t i = s.shared_intermediate;
      a.weights.shared_gate_proj = {matrix(d, Tensor::shared_gate, 0, i), s.hidden};
      a.weights.shared_up_proj = {matrix(d, Tensor::shared_up, 0, i), s.hidden};
      a.weights.shared_down_proj = {matrix(d, Tensor::shared_down, 0, s.hidden), i};
      if (s.shared_gate) a.weights.shared_gate_vector = matrix(d, Tensor::shared_vector, 0, 1);
    }
    if (setup_.keep) {
      const int64_t rows = workspace_->options().saved_rows;
      a.saved.gate = d.take<bf16>(rows * s.intermediate);
      a.saved.up = d.take<bf16>(rows * s.intermediate);
      if (s.shared_intermediate > 0) {
        a.saved.shared_gate = d.take<bf16>(tokens * s.shared_intermediate);
        a.saved.shared_up = d.take<bf16>(tokens * s.shared_intermediate);
      }
      if (s.shared_gate) a.saved.shared_out = d.take<bf16>(tokens * s.hidden);
    }
    a.y = {d.take<bf16>(tokens * s.hidden), s.hidden};
    return a;
  }

  LayerSetup setup_;
  int64_t global_ = 0;
  std::unique_ptr<problem::Problem> problem_;
  std::unique_ptr<cuda::Workspace> workspace_;
  std::vector<std::unique_ptr<Device>> memory_;
  std::vector<ForwardArgs> args_;
  std::vector<void*> streams_;
};

}  // namespace mok::testing
