// Host side of the CUDA executor: the order of calls, launches, errors.
#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/arguments.h"
#include "cuda/call_state.h"
#include "cuda/devices.h"
#include "cuda/errors.h"
#include "cuda/launch.h"
#include "cuda/local_rank.h"
#include "cuda/quantize.h"
#include "mok/cuda.h"

namespace mok::cuda {

namespace {

// What the host keeps of a GPU of this process.
class Gpu {
 public:
  Gpu(int device, int blocks) : device_(device), blocks_(blocks) {
    const DeviceGuard guard(device);
    check(cudaStreamCreateWithFlags(&service_, cudaStreamNonBlocking), "stream");
    check(cudaEventCreateWithFlags(&over_, cudaEventDisableTiming), "event");
  }
  Gpu(const Gpu&) = delete;
  ~Gpu() {
    cudaEventDestroy(over_);
    cudaStreamDestroy(service_);
  }

  int blocks() const { return blocks_; }
  cudaStream_t service() const { return service_; }  // beside all calls

  // A call comes after the one before, whichever stream that was on. What is captured into a graph
  // is ordered by whoever replays it.
  // The GPU is current.
  template <class Enqueue>
  void in_order(cudaStream_t stream, Enqueue&& enqueue) {
    cudaStreamCaptureStatus capture;
    check(cudaStreamIsCapturing(stream, &capture), "state of the stream");
    if (capture != cudaStreamCaptureStatusNone) {
      captured_ = true;
      return enqueue();
    }
    if (called_ && stream != last_) {
      check(cudaStreamWaitEvent(stream, over_), "order of two streams");
    }
    enqueue();
    check(cudaEventRecord(over_, stream), "event");
    last_ = stream;
    called_ = true;
  }

  void wait_for_last_call() const { check(cudaEventSynchronize(over_), "the last call"); }
  // Replays included, wherever they run.
  void wait_for_all_calls() const {
    wait_for_last_call();
    const DeviceGuard guard(device_);
    if (captured_) check(cudaDeviceSynchronize(), "replayed calls");
  }
  void wait_for_service() const { check(cudaStreamSynchronize(service_), "service stream"); }

 private:
  int device_, blocks_;
  cudaStream_t service_ = nullptr, last_ = nullptr;
  cudaEvent_t over_ = nullptr;  // waits for nothing before it is recorded
  bool called_ = false, captured_ = false;
};

}  // namespace

int64_t symmetric_bytes(const LayerShape& shape, int ranks, const Options& options) {
  check_shape(shape, ranks, options);
  return plan::make_layout(workspace_geometry(shape, ranks, options), 2, 4).symmetric_bytes;
}

struct Workspace::Impl {
  LayerShape shape;
  Options options;  // with the defaults filled in
  plan::Geometry geometry;
  plan::Layout layout;
  std::map<int, Gpu> gpus;
  std::vector<LocalRank> ranks;                     // of this process, ascending
  std::map<int, std::vector<int>> ranks_of_device;  // places in `ranks`
  Fault fault;                                      // tests only
  std::string broken;                               // not empty: why `recover` is needed
  std::mutex abort_mutex;
  std::string aborted;  // not empty: why `abort` was called

  Impl(const LayerShape& s, int count, const Options& o) : shape(s), options(o) {
    check_shape(shape, count, options);
    geometry = workspace_geometry(shape, count, options);
    options.workspace.saved_rows = geometry.saved_rows;
    options.workspace.ring_rows = int64_t{geometry.ring_tiles} * plan::kTileRows;
    options.workspace.minibatch_rows = int64_t{geometry.minibatch_tiles} * plan::kTileRows;
    layout = plan::make_layout(geometry, 2, 4);
  }

  bool has_all_ranks() const { return static_cast<int>(ranks.size()) == geometry.ranks; }
  Limits limits(const LocalRank& rank) const {
    return {shape, options.precision, rank.rank(), geometry.ranks, geometry.max_tokens};
  }

  void add_rank(int rank, int device, void* block) {
    ranks_of_device[device].push_back(static_cast<int>(ranks.size()));
    ranks.emplace_back(rank, device, geometry, layout, block, options);
  }

  // After all ranks are there and know each other.
  void start() {
    for (const auto& [device, here] : ranks_of_device) {
      const int blocks =
          std::max(static_cast<int>(here.size()), sm_count(device) - options.sm_reserve);
      gpus.try_emplace(device, device, blocks);
    }
    clear();
  }

  // Nobody is inside a call.
  void clear() {
    for (LocalRank& rank : ranks) rank.clear(gpus.at(rank.device()).service());
    for (const auto& [device, gpu] : gpus) gpu.wait_for_service();
    for (LocalRank& rank : ranks) rank.forget_record();
    const std::lock_guard lock(abort_mutex);
    aborted.clear();
    broken.clear();
  }

  std::string abort_text() {
    const std::lock_guard lock(abort_mutex);
    return aborted;
  }

  // Throws what went wrong in a call before. All ranks find bad ids, but each process sees them
  // when its own GPU is that far: one that stopped between forward and backward would leave its
  // peers' backward waiting. So with several processes backward is called all the same.
  void raise_errors(bool in_backward = false) {
    if (!broken.empty()) {
      throw Error(ErrorCode::aborted, "an earlier call failed (" + broken +
                                          "): all processes must call recover() first");
    }
    const auto failed = [](const LocalRank& r) { return r.record().kind != ErrorRecord::none; };
    const std::string why = abort_text();
    if (why.empty() && std::ranges::none_of(ranks, failed)) return;
    if (in_backward && !has_all_ranks() && why.empty() &&
        ranks[0].record().kind == ErrorRecord::bad_id) {
      return;
    }
    for (const auto& [device, gpu] : gpus) gpu.wait_for_all_calls();
    // The first cause: who only followed another out of the call comes last.
    std::optional<ErrorRecord> cause;
    bool only_bad_ids = why.empty();
    for (const LocalRank& rank : ranks) {
      if (!failed(rank)) continue;
      const ErrorRecord record = const_cast<const ErrorRecord&>(rank.record());
      if (!cause || cause->kind == ErrorRecord::aborted) cause = record;
      only_bad_ids = only_bad_ids && record.kind == ErrorRecord::bad_id;
    }
    const bool own_abort = !why.empty() && (!cause || cause->kind == ErrorRecord::aborted);
    const Error error = own_abort ? Error(ErrorCode::aborted, why) : to_error(*cause, geometry);
    if (only_bad_ids) {  // on every rank the call has ended as calls do
      for (LocalRank& rank : ranks) rank.forget_record();
    } else if (has_all_ranks()) {
      clear();
    } else {
      broken = error.what();
    }
    throw error;
  }

  // Tests only: the first drawer of the queue's tickets gets number 1.
  static void lose_ticket(const Fault& f, const LocalRank& rank, cudaStream_t stream) {
    Tickets* tickets = rank.state().tickets;
    uint32_t* queue = f.lost == Fault::schedule  ? &tickets->schedule
                      : f.lost == Fault::compute ? &tickets->compute
                                                 : &tickets->communication;
    check(cudaMemsetAsync(queue, 1, 1, stream), "injected fault");
  }

  // Enqueues the conversion of a rank's rows of x and d_y, which all ranks then fetch from here. No
  // peer reads the rows of an earlier call any more: that call's kernel ended here only after every
  // peer had said that it had returned all rows, which comes after the last one was fetched
  // (plan/counters.h: `returned_flag`, `pushed`); a call that was cut short ended on all ranks
  // before this one (`clear`, `recover`).
  void stage_quantized(const LocalRank& rank, const ConstMatrix& rows, int64_t tokens,
                       plan::Buffer to, cudaStream_t stream) const {
    if (geometry.block == 0) return;
    quantize_rows(options.precision, rows, tokens, shape.hidden,
                  rank.state().at<void>(to, rank.rank()), geometry.wire_row_bytes(2),
                  geometry.wire_scales_at(), stream);
  }

  // One launch on each GPU. state_of(i): of the i-th rank; before(i, stream), after(i, stream):
  // what stands around the launch on its stream.
  template <class Args, class StateOf, class Before, class After>
  void call(const std::vector<Args>& args, const std::vector<void*>& streams,
            void (*launch)(const Launch<Args>&), StateOf&& state_of, Before&& before,
            After&& after) {
    const Fault now = std::exchange(fault, {});
    bool launched = false;
    const auto start_all = [&] {
      for (const auto& [device, here] : ranks_of_device) {
        const auto stream = static_cast<cudaStream_t>(streams[here[0]]);
        Gpu& gpu = gpus.at(device);
        const DeviceGuard guard(device);
        Launch<Args> l;
        l.shape = shape;
        l.device = device;
        l.stream = stream;
        l.blocks = gpu.blocks();
        for (const int i : here) {
          if (ranks[i].rank() == now.absent_rank) continue;
          const RankState state = state_of(i);
          l.ranks.push_back({state, &args[i], &ranks[i].maps(state.g.direction)});
        }
        gpu.in_order(stream, [&] {
          for (const int i : here) {
            if (ranks[i].rank() == now.losing_rank) lose_ticket(now, ranks[i], stream);
            before(i, stream);
          }
          if (!l.ranks.empty()) launch(l);
          launched = true;
          for (const int i : here) after(i, stream);
        });
      }
    };
    try {
      start_all();
    } catch (const Error& e) {  // a launch was refused: those before it wait for peers in vain
      if (launched) give_up(e.what());
      throw;
    }
  }

  void post_abort() {
    const LocalRank& own = ranks[0];
    const DeviceGuard guard(own.device());
    const Gpu& gpu = gpus.at(own.device());
    const uint32_t word = static_cast<uint32_t>(own.rank()) + 1;
    for (int r = 0; r < geometry.ranks; ++r) {
      check(cudaMemcpyAsync(&own.state().control(r)->abort, &word, sizeof(word), cudaMemcpyDefault,
                            gpu.service()),
            "abort");
    }
    gpu.wait_for_service();
  }

  void give_up(const std::string& why) {
    post_abort();
    for (const auto& [device, gpu] : gpus) gpu.wait_for_all_calls();
    if (has_all_ranks()) return clear();
    broken = why;
  }

  void check_call(size_t args, const std::vector<void*>& streams) const {
    require(args == ranks.size() && streams.size() == ranks.size(),
            "args and streams must have one entry for each rank of this process");
    for (const auto& [device, here] : ranks_of_device) {
      for (const int i : here) {
        if (streams[i] == streams[here[0]]) continue;
        require(false, "ranks that share a GPU must have one stream (rank " +
                           std::to_string(ranks[i].rank()) + ")");
      }
    }
  }
};

Workspace::Workspace(const LayerShape& shape, const std::vector<int>& devices,
                     const Options& options)
    : impl_(std::make_unique<Impl>(shape, static_cast<int>(devices.size()), options)) {
  Impl& m = *impl_;
  require_hopper(devices);
  const int most = most_ranks_of_a_gpu(options.precision);
  for (const int device : devices) {
    const auto here = std::ranges::count(devices, device);
    if (here > most) {
      throw Error(ErrorCode::unsupported,
                  std::to_string(here) + " ranks would share GPU " + std::to_string(device) +
                      "; in this precision at most " + std::to_string(most) + " can");
    }
  }
  open_peers(devices);
  m.ranks.reserve(devices.size());
  for (size_t r = 0; r < devices.size(); ++r) {
    m.add_rank(static_cast<int>(r), devices[r], nullptr);
  }
  for (LocalRank& rank : m.ranks) {
    for (const LocalRank& peer : m.ranks) rank.connect(peer.rank(), peer.block());
  }
  m.start();
}

Workspace::Workspace(const LayerShape& shape, const SymmetricMemory& memory, const Options& options)
    : impl_(std::make_unique<Impl>(shape, static_cast<int>(memory.blocks.size()), options)) {
  Impl& m = *impl_;
  const int count = static_cast<int>(memory.blocks.size());
  require(memory.rank >= 0 && memory.rank < count,
          "rank must be 0.." + std::to_string(count - 1) + ", not " + std::to_string(memory.rank));
  for (int r = 0; r < count; ++r) {
    require(memory.blocks[r] != nullptr &&
                reinterpret_cast<uintptr_t>(memory.blocks[r]) % plan::kAlignment == 0,
            "the symmetric block of rank " + std::to_string(r) + " must be aligned to " +
                std::to_string(plan::kAlignment) + " bytes");
  }
  require_hopper({memory.device});
  m.add_rank(memory.rank, memory.device, memory.blocks[memory.rank]);
  for (int r = 0; r < count; ++r) m.ranks[0].connect(r, memory.blocks[r]);
  m.start();
}

Workspace::~Workspace() {
  for (const auto& [device, gpu] : impl_->gpus) {
    try {
      gpu.wait_for_all_calls();
    } catch (const Error&) {  // the context is gone, and the calls with it
    }
  }
}

void Workspace::forward(const std::vector<ForwardArgs>& args, const std::vector<void*>& streams) {
  Impl& m = *impl_;
  m.check_call(args.size(), streams);
  m.raise_errors();
  for (size_t i = 0; i < args.size(); ++i) check_forward(m.limits(m.ranks[i]), args[i]);
  m.call(
      args, streams, m.options.precision == Precision::fp8 ? launch_forward_fp8 : launch_forward,
      [&](int i) { return forward_state(m.ranks[i], m.shape, args[i]); },
      [&](int i, cudaStream_t stream) {
        m.stage_quantized(m.ranks[i], args[i].x, args[i].tokens, plan::Buffer::staged_x, stream);
      },
      [&](int i, cudaStream_t stream) {
        const ForwardArgs& a = args[i];
        if (!m.shape.shared_gate || a.saved.shared_out == nullptr || a.tokens == 0) return;
        check(cudaMemcpyAsync(a.saved.shared_out,
                              m.ranks[i].state().at<void>(plan::Buffer::shared_rows),
                              a.tokens * m.shape.hidden * 2, cudaMemcpyDeviceToDevice, stream),
              "saved.shared_out");
      });
}

void Workspace::backward(const std::vector<BackwardArgs>& args, const std::vector<void*>& streams) {
  Impl& m = *impl_;
  m.check_call(args.size(), streams);
  m.raise_errors(/*in_backward=*/true);
  std::vector<int> numbers;
  for (size_t i = 0; i < args.size(); ++i) {
    check_backward(m.limits(m.ranks[i]), args[i]);
    numbers.push_back(m.ranks[i].rank());
  }
  const plan::Wanted all = wanted(args, numbers);
  m.call(
      args, streams, m.options.precision == Precision::fp8 ? launch_backward_fp8 : launch_backward,
      [&](int i) { return backward_state(m.ranks[i], m.shape, args[i], all); },
      [&](int i, cudaStream_t stream) {
        const BackwardArgs& a = args[i];
        m.stage_quantized(m.ranks[i], a.x, a.tokens, plan::Buffer::staged_x, stream);
        m.stage_quantized(m.ranks[i], a.d_y, a.tokens, plan::Buffer::staged_d_y, stream);
      },
      [](int, cudaStream_t) {});
}

void Workspace::synchronize() {
  for (const auto& [device, gpu] : impl_->gpus) gpu.wait_for_last_call();
  impl_->raise_errors();
}

void Workspace::abort(const std::string& why) {
  Impl& m = *impl_;
  {
    const std::lock_guard lock(m.abort_mutex);
    if (m.aborted.empty()) m.aborted = why.empty() ? "the call was given up" : why;
  }
  m.post_abort();
}

void Workspace::recover() {
  for (const auto& [device, gpu] : impl_->gpus) gpu.wait_for_all_calls();
  impl_->clear();
}

const WorkspaceOptions& Workspace::options() const { return impl_->options.workspace; }

int64_t Workspace::memory_bytes(int i) const { return impl_->ranks.at(i).memory_bytes(); }

void Workspace::inject(const Fault& fault) { impl_->fault = fault; }

Phases Workspace::phases(int i) {
  Stamps s;
  check(cudaMemcpy(&s, impl_->ranks.at(i).state().stamps, sizeof(s), cudaMemcpyDefault), "phases");
  const auto us = [&](Stamps::Point a, Stamps::Point b) {
    return static_cast<double>(s.at[b] - s.at[a]) * 1e-3;
  };
  return {us(Stamps::begin, Stamps::planned), us(Stamps::planned, Stamps::returned),
          us(Stamps::returned, Stamps::end)};
}

}  // namespace mok::cuda
