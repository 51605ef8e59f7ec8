#include "cuda/local_rank.h"

#include <algorithm>

#include "plan/sizing.h"

namespace mok::cuda {

namespace {

int64_t table_bytes(const plan::Geometry& g) {
  Carver measure(nullptr);
  carve_tables(g, measure, nullptr);
  return measure.used();
}

std::string name(const char* what, int rank) {
  return std::string(what) + " of rank " + std::to_string(rank);
}

// Memory may be taken while the caller captures: it is no part of the graph.
class Uncaptured {
 public:
  Uncaptured() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "capture mode"); }
  ~Uncaptured() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  Uncaptured(const Uncaptured&) = delete;
  Uncaptured& operator=(const Uncaptured&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

plan::Geometry workspace_geometry(const LayerShape& shape, int ranks, const Options& options) {
  WorkspaceOptions o = options.workspace;
  o.max_tokens = std::max<int64_t>(1, o.max_tokens);  // no table is empty
  o.minibatch_rows =
      std::min<int64_t>(o.minibatch_rows, int64_t{kMostMinibatchTiles} * plan::kTileRows);
  plan::Geometry g = plan::workspace_geometry(shape, ranks, o, options.precision);
  g.own_staged = is_quantized(options.precision);
  g.codes_in_ring = options.precision == Precision::fp8;
  g.reduce_tokens = plan::reduce_task_tokens(g.max_tokens);
  g.fetch_rows = std::min(kFetchTaskRows, kFetchTaskCopies / g.topk);
  return g;
}

LocalRank::LocalRank(int rank, int device, const plan::Geometry& geometry,
                     const plan::Layout& layout, void* block, const Options& options)
    : device_(device),
      layout_(layout),
      local_(device, layout.local_bytes, name("local memory", rank)),
      tables_(device, table_bytes(geometry), name("tables", rank)) {
  if (block == nullptr) {
    symmetric_.emplace(device, layout.symmetric_bytes, name("symmetric memory", rank));
    block = symmetric_->data();
  }
  ErrorRecord* record = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&record), sizeof(ErrorRecord),
                      cudaHostAllocMapped | cudaHostAllocPortable),
        "error record");
  record_.reset(record);
  *record = {};
  RankState& s = state_;
  s.g = geometry;
  s.g.rank = rank;
  std::copy(std::begin(layout.offset), std::end(layout.offset), s.offset);
  for (int c = 0; c < plan::kCounters; ++c) {
    s.counter_first[c] = plan::counter_offset(s.g, static_cast<plan::Counter>(c));
  }
  Carver carver(tables_.data());
  carve_tables(s.g, carver, &s);
  s.local = local_.data();
  s.record = record;
  s.arrival_ns = static_cast<uint64_t>(options.deadlines.arrival_seconds * 1e9);
  s.progress_ns = static_cast<uint64_t>(options.deadlines.progress_seconds * 1e9);
  s.comm_blocks = options.comm_blocks > 0 ? options.comm_blocks : 1 << 20;
  connect(rank, block);
  if (!s.g.has_shared()) return;
  std::vector<uint64_t> rows(s.g.max_tokens);  // row t of the shared expert's down product
  auto* first = s.at<__nv_bfloat16>(plan::Buffer::shared_rows);
  for (int64_t t = 0; t < s.g.max_tokens; ++t) {
    rows[t] = reinterpret_cast<uint64_t>(first + t * s.g.hidden);
  }
  const DeviceGuard guard(device);
  check(cudaMemcpy(s.tables.shared_destination, rows.data(), rows.size() * sizeof(rows[0]),
                   cudaMemcpyHostToDevice),
        name("tables", rank));
}

int64_t LocalRank::memory_bytes() const {
  return layout_.symmetric_bytes + local_.bytes() + tables_.bytes() +
         (recomputed_ ? recomputed_->bytes() : 0);
}

void LocalRank::place_recomputed_rows(RankState& s) {
  const int gate = static_cast<int>(plan::Buffer::ring_gate);
  const int up = static_cast<int>(plan::Buffer::ring_up);
  if (layout_.bytes[gate] > 0) return;
  const int64_t bytes = int64_t{s.g.ring_tiles} * plan::kTileRows * s.g.intermediate * 2;
  if (!recomputed_) {
    const Uncaptured here;
    recomputed_.emplace(device_, 2 * bytes, name("recomputed rows", rank()));
  }
  // Buffers are found by their distance from `local`.
  s.offset[gate] = recomputed_->data() - s.local;
  s.offset[up] = s.offset[gate] + bytes;
}

void LocalRank::clear(cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const auto zero = [&](void* at, int64_t bytes) {
    check(cudaMemsetAsync(at, 0, bytes, stream), "a new generation");
  };
  const RankState& s = state_;
  zero(s.tickets, sizeof(Tickets));
  zero(s.call, sizeof(int64_t));
  zero(s.stamps, sizeof(Stamps));
  for (const plan::Buffer b :
       {plan::Buffer::control, plan::Buffer::flags, plan::Buffer::counters}) {
    uint8_t* base = plan::is_symmetric(b) ? block() : s.local;
    zero(base + s.offset[static_cast<int>(b)], layout_.bytes[static_cast<int>(b)]);
  }
}

}  // namespace mok::cuda
