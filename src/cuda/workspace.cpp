// Host side of the CUDA executor: memory, order of calls, launches.
#include <algorithm>
#include <map>
#include <memory>

#include "cuda/arguments.h"
#include "cuda/devices.h"
#include "cuda/errors.h"
#include "cuda/launch.h"
#include "cuda/rank_memory.h"
#include "mok/cuda.h"

namespace mok::cuda {

namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

struct Workspace::Impl {
  struct Rank {
    int device;
    DeviceBlock symmetric, local, tables;
    ErrorRecord* record;  // mapped host memory
    RankState state;
  };

  LayerShape shape;
  Options options;
  plan::Geometry geometry;
  plan::Layout layout;
  std::vector<Rank> ranks;
  std::map<int, std::vector<int>> ranks_of_device;
  std::map<int, int> blocks_of_device;
  struct LastCall {
    cudaStream_t stream = nullptr;
    cudaEvent_t over = nullptr;
  };
  std::map<int, LastCall> last_call;  // of each GPU
  Fault fault;                        // tests only

  Impl(const LayerShape& s, const std::vector<int>& devices, const Options& o);
  ~Impl() {
    for (auto& [device, last] : last_call) cudaEventDestroy(last.over);
    for (Rank& rank : ranks) cudaFreeHost(rank.record);
  }
  void make_rank(int r, int device);
  void reset();
  void raise_errors();
  RankState state_for(int r, const ForwardArgs& a) const;
  void lose_ticket(int rank, cudaStream_t stream) const;
  template <class Enqueue>
  void in_order(int device, cudaStream_t stream, Enqueue&& enqueue);
  void launch(int device, const std::vector<ForwardArgs>& args, cudaStream_t stream);
};

Workspace::Impl::Impl(const LayerShape& s, const std::vector<int>& devices, const Options& o)
    : shape(s), options(o) {
  const int count = static_cast<int>(devices.size());
  check_shape(shape, count, options.workspace);
  require_hopper(devices);
  open_peers(devices);
  plan::Geometry& g = geometry;
  g.ranks = count;
  g.experts = shape.experts;
  g.topk = shape.topk;
  g.hidden = static_cast<int32_t>(shape.hidden);
  g.intermediate = static_cast<int32_t>(shape.intermediate);
  g.shared_intermediate = static_cast<int32_t>(shape.shared_intermediate);
  g.shared_gate = shape.shared_gate;
  g.reduce_tokens = kReduceTaskTokens;
  g.fetch_rows = kFetchTaskRows;
  g.max_tokens = static_cast<int32_t>(std::max<int64_t>(1, o.workspace.max_tokens));
  const int64_t expected =
      default_saved_rows(shape, count, g.max_tokens) + int64_t{plan::kTileRows};
  const int64_t ring =
      o.workspace.ring_rows > 0 ? o.workspace.ring_rows : std::min(expected, g.most_rows());
  g.minibatch_tiles = static_cast<int32_t>(
      std::clamp<int64_t>(o.workspace.minibatch_rows / plan::kTileRows, 1, kMostMinibatchTiles));
  g.ring_tiles = static_cast<int32_t>(
      round_up(plan::ceil_div(ring, int64_t{plan::kTileRows}), 2 * g.minibatch_tiles));
  if (o.workspace.ring_rows > 0) {
    g.ring_tiles = static_cast<int32_t>(o.workspace.ring_rows / plan::kTileRows);
  }
  g.normalize();
  g.saved_rows = o.workspace.saved_rows < 0 ? expected : o.workspace.saved_rows;
  layout = plan::make_layout(g, 2, 4);
  for (int r = 0; r < count; ++r) {
    make_rank(r, devices[r]);
    ranks_of_device[devices[r]].push_back(r);
  }
  for (const auto& [device, here] : ranks_of_device) {
    blocks_of_device[device] =
        std::max<int>(static_cast<int>(here.size()), sm_count(device) - options.sm_reserve);
  }
  for (Rank& rank : ranks) {
    for (int r = 0; r < count; ++r) rank.state.symmetric[r] = ranks[r].symmetric.data();
  }
  reset();
}

void Workspace::Impl::make_rank(int r, int device) {
  plan::Geometry g = geometry;
  g.rank = r;
  Carver measure(nullptr);
  Tickets* tickets;
  int64_t* call;
  Stamps* stamps;
  carve_tables(g, measure, &tickets, &call, &stamps);
  const std::string who = " of rank " + std::to_string(r);
  Rank rank{device,
            DeviceBlock(device, layout.symmetric_bytes, "symmetric memory" + who),
            DeviceBlock(device, layout.local_bytes, "local memory" + who),
            DeviceBlock(device, measure.used(), "tables" + who),
            nullptr,
            {}};
  check(cudaHostAlloc(reinterpret_cast<void**>(&rank.record), sizeof(ErrorRecord),
                      cudaHostAllocMapped | cudaHostAllocPortable),
        "error record");
  *rank.record = {};
  RankState& s = rank.state;
  s.g = g;
  s.layout = layout;
  for (int c = 0; c < plan::kCounters; ++c) {
    s.counter_first[c] = plan::counter_offset(g, static_cast<plan::Counter>(c));
  }
  Carver carver(rank.tables.data());
  s.tables = carve_tables(g, carver, &s.tickets, &s.call, &s.stamps);
  s.local = rank.local.data();
  s.record = rank.record;
  s.arrival_ns = static_cast<uint64_t>(options.deadlines.arrival_seconds * 1e9);
  s.progress_ns = static_cast<uint64_t>(options.deadlines.progress_seconds * 1e9);
  s.comm_blocks = options.comm_blocks > 0 ? options.comm_blocks : 1 << 20;
  if (g.has_shared()) {  // row t of the shared expert's down product
    std::vector<uint64_t> rows(g.max_tokens);
    auto* first = s.at<__nv_bfloat16>(plan::Buffer::shared_rows);
    for (int64_t t = 0; t < g.max_tokens; ++t) {
      rows[t] = reinterpret_cast<uint64_t>(first + t * g.hidden);
    }
    const DeviceGuard guard(device);
    check(cudaMemcpy(s.tables.shared_destination, rows.data(), rows.size() * sizeof(rows[0]),
                     cudaMemcpyHostToDevice),
          "tables" + who);
  }
  ranks.push_back(std::move(rank));
}

// A new generation: every flag, counter and ticket starts again. Nobody is inside a call.
void Workspace::Impl::reset() {
  for (Rank& rank : ranks) {
    const DeviceGuard guard(rank.device);
    const RankState& s = rank.state;
    check(cudaDeviceSynchronize(), "reset");
    check(cudaMemset(s.tickets, 0, sizeof(Tickets)), "reset");
    check(cudaMemset(s.call, 0, sizeof(int64_t)), "reset");
    check(cudaMemset(s.stamps, 0, sizeof(Stamps)), "reset");
    const auto clear = [&](plan::Buffer b) {
      uint8_t* base = plan::is_symmetric(b) ? rank.symmetric.data() : rank.local.data();
      const int i = static_cast<int>(b);
      check(cudaMemset(base + layout.offset[i], 0, layout.bytes[i]), "reset");
    };
    clear(plan::Buffer::control);
    clear(plan::Buffer::flags);
    clear(plan::Buffer::counters);
    check(cudaDeviceSynchronize(), "reset");
    *rank.record = {};
  }
}

void Workspace::Impl::raise_errors() {
  const auto failed = std::find_if(ranks.begin(), ranks.end(), [](const Rank& r) {
    return *const_cast<volatile int32_t*>(&r.record->kind) != ErrorRecord::none;
  });
  if (failed == ranks.end()) return;
  for (Rank& rank : ranks) {
    const DeviceGuard guard(rank.device);
    check(cudaDeviceSynchronize(), "after an error");
  }
  const ErrorRecord e = *failed->record;
  reset();
  throw to_error(e, geometry);
}

RankState Workspace::Impl::state_for(int r, const ForwardArgs& a) const {
  RankState s = ranks[r].state;
  s.g.tokens[r] = static_cast<int32_t>(a.tokens);
  s.g.direction = plan::Direction::forward;
  s.g.keep_shared = a.saved.shared_gate != nullptr;
  if (a.saved.gate == nullptr) s.g.saved_rows = 0;
  s.tag = 1;  // forward; shapes are the workspace's own
  s.x = static_cast<const __nv_bfloat16*>(a.x.data);
  s.x_stride = a.x.row_stride;
  s.ids = a.topk_ids;
  s.ids_are_64 = a.id_type == IdType::int64;
  s.weights = static_cast<const float*>(a.topk_weights);
  s.shared_vector = static_cast<const __nv_bfloat16*>(a.weights.shared_gate_vector);
  s.y = static_cast<__nv_bfloat16*>(a.y.data);
  s.y_stride = a.y.row_stride;
  return s;
}

// A call comes after the one before, whichever stream that was on. What is captured into a graph is
// ordered by whoever replays it.
template <class Enqueue>
void Workspace::Impl::in_order(int device, cudaStream_t stream, Enqueue&& enqueue) {
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus capture;
  check(cudaStreamIsCapturing(stream, &capture), "state of the stream");
  if (capture != cudaStreamCaptureStatusNone) return enqueue();
  LastCall& last = last_call[device];
  if (last.over == nullptr) {
    check(cudaEventCreateWithFlags(&last.over, cudaEventDisableTiming), "event");
  } else if (stream != last.stream) {
    check(cudaStreamWaitEvent(stream, last.over), "order of two streams");
  }
  enqueue();
  check(cudaEventRecord(last.over, stream), "event");
  last.stream = stream;
}

// Tests only: the first drawer of the queue's tickets gets number 1.
void Workspace::Impl::lose_ticket(int rank, cudaStream_t stream) const {
  Tickets* tickets = ranks.at(rank).state.tickets;
  uint32_t* queue = fault.lost == Fault::schedule  ? &tickets->schedule
                    : fault.lost == Fault::compute ? &tickets->compute
                                                   : &tickets->communication;
  const DeviceGuard guard(ranks.at(rank).device);
  check(cudaMemsetAsync(queue, 1, 1, stream), "injected fault");
}

void Workspace::Impl::launch(int device, const std::vector<ForwardArgs>& args,
                             cudaStream_t stream) {
  ForwardLaunch l;
  for (const int r : ranks_of_device.at(device)) {
    if (r != fault.absent_rank) l.ranks.push_back({state_for(r, args[r]), &args[r]});
  }
  if (l.ranks.empty()) return;
  l.shape = shape;
  l.blocks = blocks_of_device.at(device);
  l.stream = stream;
  launch_forward(l);
}

Workspace::Workspace(const LayerShape& shape, const std::vector<int>& devices,
                     const Options& options)
    : impl_(std::make_unique<Impl>(shape, devices, options)) {}
Workspace::~Workspace() = default;

void Workspace::forward(const std::vector<ForwardArgs>& args, const std::vector<void*>& streams) {
  Impl& m = *impl_;
  require(args.size() == m.ranks.size() && streams.size() == m.ranks.size(),
          "args and streams must have one entry for each rank");
  m.raise_errors();
  for (size_t r = 0; r < args.size(); ++r) {
    check_forward(m.shape, static_cast<int>(r), m.geometry.max_tokens, args[r]);
  }
  for (const auto& [device, here] : m.ranks_of_device) {
    const auto stream = static_cast<cudaStream_t>(streams[here[0]]);
    m.in_order(device, stream, [&] {
      if (std::ranges::count(here, m.fault.losing_rank)) m.lose_ticket(m.fault.losing_rank, stream);
      m.launch(device, args, stream);
    });
  }
  m.fault = {};
}

void Workspace::inject(const Fault& fault) { impl_->fault = fault; }

void Workspace::synchronize() {
  for (const auto& [device, here] : impl_->ranks_of_device) {
    const DeviceGuard guard(device);
    check(cudaDeviceSynchronize(), "synchronize");
  }
  impl_->raise_errors();
}

Phases Workspace::phases(int rank) {
  const Impl::Rank& r = impl_->ranks.at(rank);
  Stamps s;
  check(cudaMemcpy(&s, r.state.stamps, sizeof(s), cudaMemcpyDefault), "phases");
  const auto us = [&](Stamps::Point a, Stamps::Point b) {
    return static_cast<double>(s.at[b] - s.at[a]) * 1e-3;
  };
  return {us(Stamps::begin, Stamps::planned), us(Stamps::planned, Stamps::returned),
          us(Stamps::returned, Stamps::end)};
}

int64_t Workspace::memory_bytes(int rank) const {
  const Impl::Rank& r = impl_->ranks.at(rank);
  return r.symmetric.bytes() + r.local.bytes() + r.tables.bytes();
}

}  // namespace mok::cuda
