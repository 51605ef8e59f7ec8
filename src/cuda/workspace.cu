// Host side of the CUDA executor: memory, tensor maps, launches, errors.
#include <algorithm>
#include <map>
#include <memory>

#include "cuda/forward_kernel.cuh"
#include "cuda/rank_memory.h"
#include "cuda/tensor_map.h"
#include "mok/cuda.h"

namespace mok::cuda {

namespace {

constexpr int kWeightBoxRows = 64;
constexpr int kComputeCapability = 90;  // sm_90a code runs on exactly this

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::bad_argument, message);
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Destination of every row of the shared expert's down product: row t of `rows`.
__global__ void fill_shared_destinations(uint64_t* out, const __nv_bfloat16* rows, int tokens,
                                         int hidden) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t < tokens) out[t] = reinterpret_cast<uint64_t>(rows + int64_t{t} * hidden);
}

}  // namespace

int device_count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return n;
}

std::string why_not(int device) {
  cudaDeviceProp prop;
  if (device >= device_count()) return "there is no GPU " + std::to_string(device);
  check(cudaGetDeviceProperties(&prop, device), "properties of a GPU");
  if (prop.major * 10 + prop.minor == kComputeCapability) {
    return tensor_map_encoder() == nullptr ? "the driver has no tensor maps (CUDA 12 needed)" : "";
  }
  return "GPU " + std::to_string(device) + " (" + prop.name + ") has compute capability " +
         std::to_string(prop.major) + "." + std::to_string(prop.minor) +
         "; this build has code for 9.0 (Hopper) only";
}

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
  void validate_shape(int ranks) const;
  void open_peers(const std::vector<int>& devices);
  void make_rank(int r, int device);
  void reset();
  void raise_errors();
  void check_args(int r, const ForwardArgs& a) const;
  void fill(int r, const ForwardArgs& a, RankState* state, Products<kForwardProducts>* p) const;
  void lose_ticket(int rank, cudaStream_t stream) const;
  template <class Enqueue>
  void in_order(int device, cudaStream_t stream, Enqueue&& enqueue);
  template <int kRanks>
  void launch(int device, const std::vector<ForwardArgs>& args, cudaStream_t stream);
};

void Workspace::Impl::validate_shape(int count) const {
  require(count >= 1 && count <= kMaxRanks,
          "ranks must be 1.." + std::to_string(kMaxRanks) + ", not " + std::to_string(count));
  const auto size = [](const char* name, int64_t n, bool zero) {
    require((n > 0 || (zero && n == 0)) && n % 64 == 0 && n <= 1 << 20,
            std::string(name) + " must be a multiple of 64 on CUDA, not " + std::to_string(n));
  };
  size("hidden", shape.hidden, false);
  size("intermediate", shape.intermediate, false);
  size("shared_intermediate", shape.shared_intermediate, true);
  require(shape.experts >= 1 && shape.experts <= kMaxExperts && shape.experts % count == 0,
          "experts must be a multiple of the ranks, at most " + std::to_string(kMaxExperts) +
              ", not " + std::to_string(shape.experts));
  require(shape.topk >= 1 && shape.topk <= std::min(shape.experts, kMaxTopk),
          "topk must be 1..min(experts, " + std::to_string(kMaxTopk) + "), not " +
              std::to_string(shape.topk));
  const int64_t slots = count * options.workspace.max_tokens * shape.topk;
  require(options.workspace.max_tokens >= 0 && slots < int64_t{1} << 31,
          "max_tokens * ranks * topk must be under 2^31");
  require(shape.swiglu_limit > 0, "swiglu_limit must be positive");
}

Workspace::Impl::Impl(const LayerShape& s, const std::vector<int>& devices, const Options& o)
    : shape(s), options(o) {
  const int count = static_cast<int>(devices.size());
  validate_shape(count);
  for (const int device : devices) {
    const std::string reason = why_not(device);
    if (!reason.empty()) throw Error(ErrorCode::unsupported, reason);
  }
  open_peers(devices);
  plan::Geometry& g = geometry;
  g.ranks = count;
  g.experts = shape.experts;
  g.topk = shape.topk;
  g.hidden = static_cast<int32_t>(shape.hidden);
  g.intermediate = static_cast<int32_t>(shape.intermediate);
  g.shared_intermediate = static_cast<int32_t>(shape.shared_intermediate);
  g.shared_gate = shape.shared_gate;
  g.reduce_tokens = kMostReduceTokens;
  g.fetch_rows = kMostEntries;
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
    int sms = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "SM count");
    blocks_of_device[device] =
        std::max<int>(static_cast<int>(here.size()), sms - options.sm_reserve);
  }
  for (Rank& rank : ranks) {
    for (int r = 0; r < count; ++r) rank.state.symmetric[r] = ranks[r].symmetric.data();
  }
  reset();
}

void Workspace::Impl::open_peers(const std::vector<int>& devices) {
  for (const int a : devices) {
    for (const int b : devices) {
      if (a == b) continue;
      int can = 0;
      check(cudaDeviceCanAccessPeer(&can, a, b), "peer access query");
      if (!can) {
        throw Error(ErrorCode::unsupported, "GPU " + std::to_string(a) +
                                                " cannot reach the memory of GPU " +
                                                std::to_string(b) + " (no NVLink between them)");
      }
      const DeviceGuard guard(a);
      const cudaError_t error = cudaDeviceEnablePeerAccess(b, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        check(error, "peer access from GPU " + std::to_string(a) + " to " + std::to_string(b));
      }
    }
  }
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
    if (geometry.has_shared()) {
      fill_shared_destinations<<<plan::ceil_div(geometry.max_tokens, 256), 256>>>(
          s.tables.shared_destination, s.at<__nv_bfloat16>(plan::Buffer::shared_rows),
          geometry.max_tokens, geometry.hidden);
      check(cudaGetLastError(), "reset");
    }
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
  const std::string who = "rank " + std::to_string(e.rank);
  const plan::Geometry& g = geometry;
  if (e.kind == ErrorRecord::bad_id) {
    throw Error(ErrorCode::bad_routing, "topk_ids: rank " + std::to_string(g.slot_rank(e.entry)) +
                                            ", token " + std::to_string(g.slot_token(e.entry)) +
                                            ", slot " + std::to_string(g.slot_k(e.entry)) +
                                            ": id " + std::to_string(e.seen) + " is outside [-1, " +
                                            std::to_string(shape.experts) + ")");
  }
  if (e.kind == ErrorRecord::disagreement) {
    throw Error(ErrorCode::disagreement,
                who + " and rank " + std::to_string(e.entry) +
                    " made different calls (direction, shape, dtype or wanted gradients)");
  }
  constexpr const char* kScheduleSteps[] = {"published", "counted", "laid_out",
                                            "placed",    "listed",  "planned"};
  constexpr int kFirstStep = offsetof(Tickets, published) / sizeof(uint32_t);
  std::string what = kScheduleSteps[std::clamp(e.entry - kFirstStep, 0, 5)];
  if (e.kind != ErrorRecord::schedule) {
    const bool flags = e.kind != ErrorRecord::progress;
    const int first = flags ? static_cast<int>(plan::Counter::first_flag) : 0;
    const int end = flags ? plan::kCounters : static_cast<int>(plan::Counter::first_flag);
    int c = first;
    while (c + 1 < end && plan::counter_offset(g, static_cast<plan::Counter>(c + 1)) <= e.entry) {
      ++c;
    }
    const int index = e.entry - plan::counter_offset(g, static_cast<plan::Counter>(c));
    what = std::string(plan::to_string(static_cast<plan::Counter>(c))) + "[" +
           std::to_string(index) + "]";
    if (flags) what = "rank " + std::to_string(index) + ", " + what;
  }
  const std::string phase =
      e.task >= 0 ? plan::to_string(static_cast<plan::TaskKind>(e.task)) : "schedule";
  throw Error(ErrorCode::deadline, who + " waited too long in " + phase + " for " + what +
                                       ": seen " + std::to_string(e.seen) + ", awaited " +
                                       std::to_string(e.awaited));
}

void Workspace::Impl::check_args(int r, const ForwardArgs& a) const {
  const std::string where = " (rank " + std::to_string(r) + ")";
  require(a.tokens >= 0 && a.tokens <= geometry.max_tokens,
          "tokens must be 0.." + std::to_string(geometry.max_tokens) + ", not " +
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
  if (!geometry.has_shared()) return;
  rows("shared_gate_proj", w.shared_gate_proj.data, w.shared_gate_proj.row_stride, shape.hidden);
  rows("shared_up_proj", w.shared_up_proj.data, w.shared_up_proj.row_stride, shape.hidden);
  rows("shared_down_proj", w.shared_down_proj.data, w.shared_down_proj.row_stride,
       shape.shared_intermediate);
  require(!shape.shared_gate || w.shared_gate_vector != nullptr,
          "shared_gate_vector is null" + where);
}

void Workspace::Impl::fill(int r, const ForwardArgs& a, RankState* state,
                           Products<kForwardProducts>* p) const {
  RankState& s = *state;
  s = ranks[r].state;
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

  const plan::Geometry& g = geometry;
  const int64_t ring = int64_t{g.ring_tiles} * plan::kTileRows;
  const int64_t h = g.hidden, i = g.intermediate, shared = g.shared_intermediate;
  bool good = true;
  const auto matrix = [&](CUtensorMap* map, const void* data, int64_t columns, int64_t rows,
                          int64_t stride) {
    good = good && encode_tensor_map(map, {data, 2, columns, rows, 1, stride, 0, 64});
  };
  const auto stack = [&](CUtensorMap* map, const ConstStack& w, int64_t columns, int64_t rows) {
    good = good && encode_tensor_map(map, {w.data, 3, columns, rows, g.experts_local(),
                                           w.row_stride, w.expert_stride, kWeightBoxRows});
  };
  const auto single = [&](CUtensorMap* map, const ConstMatrix& w, int64_t columns, int64_t rows) {
    good = good && encode_tensor_map(map, {w.data, 3, columns, rows, 1, w.row_stride,
                                           rows * w.row_stride, kWeightBoxRows});
  };
  p->swiglu_limit = shape.swiglu_limit;
  Product& gate_up = p->product[kRoutedGateUp];
  matrix(&gate_up.a, s.at<void>(plan::Buffer::ring_x), h, ring, h);
  stack(&gate_up.b_low, a.weights.gate, h, i);
  stack(&gate_up.b_high, a.weights.up, h, i);
  gate_up.hidden = s.at<__nv_bfloat16>(plan::Buffer::ring_hidden);
  gate_up.gate = static_cast<__nv_bfloat16*>(a.saved.gate);
  gate_up.up = static_cast<__nv_bfloat16*>(a.saved.up);
  gate_up.row_elements = i;
  Product& down = p->product[kRoutedDown];
  matrix(&down.a, s.at<void>(plan::Buffer::ring_hidden), i, ring, i);
  stack(&down.b_low, a.weights.down, i, h);
  down.b_high = down.b_low;
  down.row_destination = s.tables.row_destination;
  if (g.has_shared()) {
    Product& shared_gate_up = p->product[kSharedGateUp];
    if (a.tokens > 0) matrix(&shared_gate_up.a, a.x.data, h, a.tokens, a.x.row_stride);
    single(&shared_gate_up.b_low, a.weights.shared_gate_proj, h, shared);
    single(&shared_gate_up.b_high, a.weights.shared_up_proj, h, shared);
    shared_gate_up.hidden = s.at<__nv_bfloat16>(plan::Buffer::shared_hidden);
    shared_gate_up.gate = static_cast<__nv_bfloat16*>(a.saved.shared_gate);
    shared_gate_up.up = static_cast<__nv_bfloat16*>(a.saved.shared_up);
    shared_gate_up.row_elements = shared;
    Product& shared_down = p->product[kSharedDown];
    matrix(&shared_down.a, s.at<void>(plan::Buffer::shared_hidden), shared, g.max_tokens, shared);
    single(&shared_down.b_low, a.weights.shared_down_proj, shared, h);
    shared_down.b_high = shared_down.b_low;
    shared_down.row_destination = s.tables.shared_destination;
  }
  if (!good) {
    throw Error(
        ErrorCode::bad_argument,
        "a tensor map was refused: check strides and alignment of x and the weights (rank " +
            std::to_string(r) + ")");
  }
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

template <int kRanks>
void Workspace::Impl::launch(int device, const std::vector<ForwardArgs>& args,
                             cudaStream_t stream) {
  std::vector<int> here = ranks_of_device.at(device);
  std::erase(here, fault.absent_rank);
  if (here.empty()) return;
  auto params = std::make_unique<ForwardParams<kRanks>>();
  params->ranks_here = static_cast<int32_t>(here.size());
  for (size_t i = 0; i < here.size(); ++i) {
    fill(here[i], args[here[i]], &params->rank[i], &params->products[i]);
  }
  const DeviceGuard guard(device);
  static_assert(sizeof(ForwardShared) <= 227 * 1024);
  check(cudaFuncSetAttribute(forward_kernel<kRanks>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(ForwardShared)),
        "shared memory of the forward kernel");
  forward_kernel<kRanks>
      <<<blocks_of_device.at(device), kThreads, sizeof(ForwardShared), stream>>>(*params);
  check(cudaGetLastError(), "launch of the forward kernel");
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
  for (size_t r = 0; r < args.size(); ++r) m.check_args(static_cast<int>(r), args[r]);
  for (const auto& [device, here] : m.ranks_of_device) {
    const auto stream = static_cast<cudaStream_t>(streams[here[0]]);
    m.in_order(device, stream, [&] {
      if (std::ranges::count(here, m.fault.losing_rank)) m.lose_ticket(m.fault.losing_rank, stream);
      if (here.size() == 1) {
        m.launch<1>(device, args, stream);
      } else {
        m.launch<kMaxRanks>(device, args, stream);
      }
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
