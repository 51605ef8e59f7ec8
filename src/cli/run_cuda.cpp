// Ranks on GPUs of one process: device tensors, launches, events.
#include "cli/results.h"

#ifdef MOK_WITH_CUDA

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>

#include "cli/call_args.h"
#include "cli/device_fill.h"
#include "cli/rank_inputs.h"
#include "cuda/quantize.h"
#include "mok/cuda.h"
#include "problem/digest.h"

namespace mok::cli {
namespace {

using problem::Problem;

void check_cuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::internal,
              what + ": " + cudaGetErrorString(error));
}

void use_gpu(int gpu) { check_cuda(cudaSetDevice(gpu), "GPU " + std::to_string(gpu)); }

class GpuMemory {
 public:
  GpuMemory() = default;
  GpuMemory(int gpu, int64_t bytes, const std::string& what) : gpu_(gpu), bytes_(bytes) {
    if (bytes == 0) return;
    use_gpu(gpu);
    check_cuda(cudaMalloc(&data_, static_cast<size_t>(bytes)),
               "GPU " + std::to_string(gpu) + ": " + std::to_string(bytes) + " bytes for " + what);
  }
  ~GpuMemory() {
    if (data_ && cudaSetDevice(gpu_) == cudaSuccess) cudaFree(data_);
  }
  GpuMemory(GpuMemory&& other) noexcept { *this = std::move(other); }
  GpuMemory& operator=(GpuMemory&& other) noexcept {
    std::swap(gpu_, other.gpu_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int gpu_ = 0;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

struct Event {
  cudaEvent_t handle = nullptr;
  Event() { check_cuda(cudaEventCreate(&handle), "event"); }
  ~Event() { cudaEventDestroy(handle); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
};

struct Lane {  // a GPU's stream, and events around forward and backward of each call
  int gpu = 0;
  cudaStream_t stream = nullptr;
  std::vector<std::unique_ptr<Event>> begin, middle, end;

  Lane(int device, int calls) : gpu(device) {
    use_gpu(gpu);
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    for (int i = 0; i < calls; ++i) {
      begin.push_back(std::make_unique<Event>());
      middle.push_back(std::make_unique<Event>());
      end.push_back(std::make_unique<Event>());
    }
  }
  ~Lane() {
    if (cudaSetDevice(gpu) != cudaSuccess) return;
    begin.clear();
    middle.clear();
    end.clear();
    cudaStreamDestroy(stream);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
};

struct GpuTokens {  // of one problem
  GpuMemory x, d_y, ids, topk_weights;
};

struct GpuRank {
  std::vector<GpuTokens> tokens;
  std::vector<GpuMemory> weights;  // in the order of weight_slices
  // gate, up and down as quantised products of forward read them, then as those of backward do:
  // mxfp8 bf16, fp8 codes with scales.
  std::array<GpuMemory, 6> quantized, scales;
  // What forward keeps for backward.
  GpuMemory saved_gate, saved_up, saved_shared_gate, saved_shared_up, saved_shared_out;
  std::array<GpuMemory, kOuts> outputs;
  int64_t bytes() const {
    int64_t sum = saved_gate.bytes() + saved_up.bytes() + saved_shared_gate.bytes() +
                  saved_shared_up.bytes() + saved_shared_out.bytes();
    for (const GpuMemory& m : outputs) sum += m.bytes();
    for (const GpuMemory& m : weights) sum += m.bytes();
    for (const GpuMemory& m : quantized) sum += m.bytes();
    for (const GpuMemory& m : scales) sum += m.bytes();
    for (const GpuTokens& t : tokens) {
      sum += t.x.bytes() + t.d_y.bytes() + t.ids.bytes() + t.topk_weights.bytes();
    }
    return sum;
  }
};

class CudaRun {
 public:
  CudaRun(const Spec& spec, const Sets& sets, Progress& progress)
      : spec_(spec), sets_(sets), progress_(progress), calls_(spec.warm_up + spec.repeat) {
    cuda::Options options;
    options.workspace = spec.workspace;
    options.precision = spec.precision;
    options.deadlines = spec.deadlines;
    options.comm_blocks = spec.comm_blocks;
    options.sm_reserve = spec.sm_reserve;
    workspace_ = std::make_unique<cuda::Workspace>(spec.shape, spec.gpus, options);
    for (const int gpu : spec.gpus) {
      if (!lanes_.contains(gpu)) lanes_.emplace(gpu, std::make_unique<Lane>(gpu, calls_));
    }
    for (int r = 0; r < spec.ranks(); ++r) {
      make_rank(r);
      progress_.show("inputs", r + 1, spec.ranks());
    }
    for (const auto& [gpu, lane] : lanes_) wait(*lane);
    if (is_quantized(spec.precision)) {
      for (int r = 0; r < spec.ranks(); ++r) quantize(r);
    }
  }

  Outcome play() {
    Outcome out;
    out.quantize_ms = quantize_ms_;
    for (int r = 0; r < spec_.ranks(); ++r) {
      out.outputs.emplace_back();
      for (int o = 0; spec_.compare_bits && o < kOuts; ++o) {
        out.outputs[r][o] = Memory(ranks_[r].outputs[o].bytes());
      }
      out.memory_bytes.push_back(workspace_->memory_bytes(r));
      out.tensor_bytes.push_back(ranks_[r].bytes());
    }
    std::vector<Digests> first;
    for (int call = 0; call < calls_; ++call) {
      prepare_outputs();
      launch(call);
      if (spec_.compare_bits) {
        workspace_->synchronize();
        fetch(out);
        compare_bits(call, first, out);
        progress_.show("layer", call + 1, calls_);
      }
    }
    workspace_->synchronize();
    for (int call = spec_.warm_up; call < calls_; ++call) {
      out.forward_ms.push_back(time(call, &Lane::begin, &Lane::middle));
      if (spec_.backward) out.backward_ms.push_back(time(call, &Lane::middle, &Lane::end));
    }
    return out;
  }

 private:
  using Digests = std::array<uint64_t, kOuts>;
  using Events = std::vector<std::unique_ptr<Event>>;

  Lane& lane(int rank) const { return *lanes_.at(spec_.gpus[rank]); }

  void wait(const Lane& l) const {
    use_gpu(l.gpu);
    check_cuda(cudaStreamSynchronize(l.stream), "inputs");
  }

  GpuMemory slice(int rank, const Problem& problem, const Slice& s, const char* what) {
    GpuMemory memory(spec_.gpus[rank], slice_bytes(problem, s, Precision::bf16), what);
    if (memory.bytes() == 0) return memory;
    check_cuda(static_cast<cudaError_t>(fill_on_device(problem, s.tensor, s.begin, s.end,
                                                       memory.data(), lane(rank).stream)),
               what);
    return memory;
  }

  GpuMemory copy(int rank, const Memory& from, const char* what) {
    GpuMemory memory(spec_.gpus[rank], from.bytes(), what);
    if (from.bytes() == 0) return memory;
    check_cuda(cudaMemcpy(memory.data(), from.data(), static_cast<size_t>(from.bytes()),
                          cudaMemcpyHostToDevice),
               what);
    return memory;
  }

  void make_rank(int r) {
    use_gpu(spec_.gpus[r]);
    GpuRank rank;
    for (const Slice& s : weight_slices(spec_, r)) {
      rank.weights.push_back(slice(r, *sets_[0], s, "weights"));
    }
    for (const Problem* problem : sets_) {
      GpuTokens t;
      t.x = slice(r, *problem, token_slices(spec_, r)[0], "x");
      t.d_y = slice(r, *problem, token_slices(spec_, r)[1], "d_y");
      const int64_t begin = spec_.first_token(r), end = begin + spec_.tokens[r];
      const int64_t slots = spec_.tokens[r] * spec_.shape.topk;
      const Memory ids(slots * 8), weights(slots * 4);
      problem->fill_topk_ids(begin, end, ids.as<int64_t>());
      problem->fill_topk_weights(begin, end, weights.as<float>());
      t.ids = copy(r, ids, "topk_ids");
      t.topk_weights = copy(r, weights, "topk_weights");
      rank.tokens.push_back(std::move(t));
    }
    for (int o = 0; o < kOuts; ++o) {
      const Out out = static_cast<Out>(o);
      rank.outputs[o] = GpuMemory(spec_.gpus[r], extent(spec_, r, out).bytes(), to_string(out));
    }
    if (spec_.backward) {
      const LayerShape& s = spec_.shape;
      const int64_t rows = workspace_->options().saved_rows, tokens = spec_.tokens[r];
      const auto take = [&](int64_t elements) {
        return GpuMemory(spec_.gpus[r], elements * 2, "what forward keeps");
      };
      rank.saved_gate = take(rows * s.intermediate);
      rank.saved_up = take(rows * s.intermediate);
      rank.saved_shared_gate = take(tokens * s.shared_intermediate);
      rank.saved_shared_up = take(tokens * s.shared_intermediate);
      if (s.shared_gate) rank.saved_shared_out = take(tokens * s.hidden);
    }
    ranks_.push_back(std::move(rank));
  }

  // What products read of the routed weights, and the time that takes: of the slowest rank.
  void quantize(int r) {
    const int64_t h = spec_.shape.hidden, i = spec_.shape.intermediate;
    const int64_t experts = spec_.experts_local();
    const bool fp8 = spec_.precision == Precision::fp8;
    GpuRank& rank = ranks_[r];
    for (int w = 0; w < 6; ++w) {
      const auto take = [&](int64_t bytes) {
        return GpuMemory(spec_.gpus[r], experts * bytes, "quantised weights");
      };
      rank.quantized[w] = take(h * i * (fp8 ? 1 : 2));
      const bool across = w == 2 || w == 3 || w == 4;  // [H, I] and the transposed others
      if (fp8) rank.scales[w] = take(scale_bytes(spec_.precision, across ? h : i, across ? i : h));
    }
    use_gpu(spec_.gpus[r]);
    const Event begin, end;
    const auto convert = [&] {
      for (int w = 0; w < 3; ++w) {
        const int64_t rows = w < 2 ? i : h, columns = w < 2 ? h : i;
        const ConstStack from{rank.weights[w].data(), rows * columns, columns};
        void* const first = rank.quantized[w].data();
        void* const second = spec_.backward ? rank.quantized[3 + w].data() : nullptr;
        if (fp8) {
          const auto scales = [&](int which) {
            return static_cast<uint8_t*>(rank.scales[which].data());
          };
          cuda::quantize_weights(
              spec_.precision, from, experts, rows, columns,
              {first, scales(w), second, second != nullptr ? scales(3 + w) : nullptr},
              lane(r).stream);
        } else {
          cuda::round_weights(spec_.precision, from, experts, rows, columns, first, second,
                              lane(r).stream);
        }
      }
    };
    convert();  // what is timed is not the first
    record(lane(r), begin);
    convert();
    record(lane(r), end);
    wait(lane(r));
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin.handle, end.handle), "event");
    quantize_ms_ = std::max<double>(quantize_ms_, ms);
  }

  BackwardArgs backward_args(int r, int call) const {
    const LayerShape& s = spec_.shape;
    const GpuRank& rank = ranks_[r];
    const GpuTokens& t = rank.tokens[call % rank.tokens.size()];
    const int64_t h = s.hidden, i = s.intermediate, shared = s.shared_intermediate;
    const auto out = [&](Out o) { return rank.outputs[static_cast<int>(o)].data(); };
    BackwardArgs a;
    a.tokens = spec_.tokens[r];
    a.x = {t.x.data(), h};
    a.topk_ids = t.ids.data();
    a.topk_weights = t.topk_weights.data();
    a.weights.gate = {rank.weights[0].data(), i * h, h};
    a.weights.up = {rank.weights[1].data(), i * h, h};
    a.weights.down = {rank.weights[2].data(), h * i, i};
    if (spec_.precision == Precision::fp8) {
      const auto stack = [&](int which) {
        return QuantizedStack{rank.quantized[which].data(),
                              static_cast<const uint8_t*>(rank.scales[which].data())};
      };
      a.weights.quantized = {stack(0), stack(1), stack(2), stack(3), stack(4), stack(5)};
    } else if (is_quantized(spec_.precision)) {
      const auto stack = [&](int which, int64_t columns) {
        return ConstStack{rank.quantized[which].data(), i * h, columns};
      };
      a.weights.rounded = {stack(0, h), stack(1, h), stack(2, i),
                           stack(3, h), stack(4, h), stack(5, i)};
    }
    a.weights.shared_gate_proj = {rank.weights[3].data(), h};
    a.weights.shared_up_proj = {rank.weights[4].data(), h};
    a.weights.shared_down_proj = {rank.weights[5].data(), shared};
    a.weights.shared_gate_vector = rank.weights[6].data();
    a.saved = {rank.saved_gate.data(), rank.saved_up.data(), rank.saved_shared_gate.data(),
               rank.saved_shared_up.data(), rank.saved_shared_out.data()};
    if (!spec_.backward) return a;
    a.d_y = {t.d_y.data(), h};
    want_gradients(spec_, out, &a);
    return a;
  }

  ForwardArgs forward_args(int r, int call) const {
    return forward_of(backward_args(r, call),
                      {ranks_[r].outputs[static_cast<int>(Out::y)].data(), spec_.shape.hidden});
  }

  // NaN, where that shows what was not written; zeros where gradients are added to. Before the
  // events that time the call.
  void prepare_outputs() {
    for (int r = 0; r < spec_.ranks(); ++r) {
      use_gpu(spec_.gpus[r]);
      for (int o = 0; o < kOuts; ++o) {
        const GpuMemory& m = ranks_[r].outputs[o];
        const bool zero =
            spec_.grads == GradMode::accumulate && is_weight_grad(static_cast<Out>(o));
        if (m.bytes() == 0 || !(zero || spec_.compare_bits)) continue;
        check_cuda(cudaMemsetAsync(m.data(), zero ? 0 : 0xff, static_cast<size_t>(m.bytes()),
                                   lane(r).stream),
                   "outputs");
      }
    }
  }

  void launch(int call) {
    std::vector<ForwardArgs> forward;
    std::vector<BackwardArgs> backward;
    std::vector<void*> streams;
    for (int r = 0; r < spec_.ranks(); ++r) {
      forward.push_back(forward_args(r, call));
      backward.push_back(backward_args(r, call));
      streams.push_back(lane(r).stream);
    }
    begin_together(call);
    workspace_->forward(forward, streams);
    for (const auto& [gpu, l] : lanes_) record(*l, *l->middle[call]);
    if (spec_.backward) workspace_->backward(backward, streams);
    for (const auto& [gpu, l] : lanes_) record(*l, *l->end[call]);
  }

  // A rank may leave a call long before another (backward's last weight gradients concern nobody
  // else). Its wait for that one in the next call would count as time of the next call.
  void begin_together(int call) {
    for (const auto& [gpu, l] : lanes_) record(*l, *l->begin[call]);
    for (const auto& [gpu, l] : lanes_) {
      use_gpu(gpu);
      for (const auto& [peer, other] : lanes_) {
        if (peer == gpu) continue;
        check_cuda(cudaStreamWaitEvent(l->stream, other->begin[call]->handle), "event");
      }
    }
    for (const auto& [gpu, l] : lanes_) record(*l, *l->begin[call]);  // what is timed
  }

  static void record(const Lane& l, const Event& event) {
    use_gpu(l.gpu);
    check_cuda(cudaEventRecord(event.handle, l.stream), "event");
  }

  double time(int call, Events Lane::* from, Events Lane::* to) const {  // of the slowest GPU
    float slowest = 0;
    for (const auto& [gpu, l] : lanes_) {
      use_gpu(gpu);
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, ((*l).*from)[call]->handle, ((*l).*to)[call]->handle),
                 "event");
      slowest = std::max(slowest, ms);
    }
    return slowest;
  }

  void fetch(Outcome& out) const {
    for (int r = 0; r < spec_.ranks(); ++r) {
      use_gpu(spec_.gpus[r]);
      for (int o = 0; o < kOuts; ++o) {
        const GpuMemory& from = ranks_[r].outputs[o];
        if (from.bytes() == 0) continue;
        check_cuda(cudaMemcpy(out.outputs[r][o].data(), from.data(),
                              static_cast<size_t>(from.bytes()), cudaMemcpyDeviceToHost),
                   to_string(static_cast<Out>(o)));
      }
    }
  }

  void compare_bits(int call, std::vector<Digests>& first, Outcome& out) const {
    if (calls_ == 1) return;
    first.resize(spec_.ranks());
    for (int r = 0; r < spec_.ranks(); ++r) {
      for (int o = 0; o < kOuts; ++o) {
        problem::Digest digest;
        const Memory& m = out.outputs[r][o];
        digest.add(m.data(), static_cast<size_t>(m.bytes()));
        if (call == 0) first[r][o] = digest.value();
        if (digest.value() != first[r][o] && out.changed.empty()) {
          out.changed = "repeat " + std::to_string(call + 1) +
                        " gave other bits than the first: " + to_string(static_cast<Out>(o)) +
                        " of rank " + std::to_string(r);
        }
      }
    }
  }

  const Spec& spec_;
  const Sets& sets_;
  Progress& progress_;
  const int calls_;
  double quantize_ms_ = 0;
  std::map<int, std::unique_ptr<Lane>> lanes_;
  std::vector<GpuRank> ranks_;
  std::unique_ptr<cuda::Workspace> workspace_;  // goes first: it waits for its calls
};

}  // namespace

Outcome run_on_cuda(const Spec& spec, const Sets& sets, Progress& progress) {
  return CudaRun(spec, sets, progress).play();
}

}  // namespace mok::cli

#else

namespace mok::cli {

Outcome run_on_cuda(const Spec&, const Sets&, Progress&) {
  throw Error(ErrorCode::unsupported, "--device cuda: this build has no CUDA executor");
}

}  // namespace mok::cli

#endif
