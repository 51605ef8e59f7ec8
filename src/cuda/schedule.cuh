// The schedule, built by the blocks of a rank before they take up their roles.
//
//   tickets   publish x 64   ids of own tokens -> symmetric memory, as int32
//             announce       header and `arrived` flag to every rank       after all publish
//             count x 64     rows of each local expert in a chunk of slots after all ranks arrived
//             layout         first row of each expert, tile table          after all count
//             segments       backward: of the weight gradients             after layout
//             place x 64     slot <-> row, in slot order; padding          after layout
//             mark x 64      rows that are fetched, and from where         after all place
//             list x 32      fetch lists of the minibatches                after all mark
//             phases         the two queues                                after segments, list
//
// Backward also publishes the router weights of own tokens and notes the weight of each row.
//
// Each step is a handful of dependent look-ups: what counts is that a thread's look-ups of one kind
// are all asked for before the first is used (kAtOnce), and that a step has a task for every SM.
//
// All threads of a block work on one ticket; a ticket waits for earlier ones only, so one resident
// block is enough. Shared memory is scratch here.
#pragma once

#include "cuda/segments.cuh"
#include "cuda/tile_types.cuh"
#include "cuda/wait.cuh"

namespace mok::cuda {

struct ScheduleShared {
  int32_t ticket;
  int32_t go;
  int32_t warp_sum[kThreads / kWarp];
  int32_t tokens[kMaxRanks];
  int32_t source_count[kMaxRanks];
  plan::Plan plan;
  alignas(16) int32_t scratch[(kThreads / kWarp) * kMaxExperts];
};

template <bool kBackward = false>
class ScheduleBuilder {
 public:
  __device__ ScheduleBuilder(const RankState& rank, const Waiter& waiter, ScheduleShared& shared)
      : rank_(rank), wait_(waiter), shared_(shared) {}

  // Returns when the plan is complete in rank.tables; false after an abort.
  __device__ bool run() {
    constexpr int kAnnounce = kPublishTasks;
    constexpr int kCount = kAnnounce + 1;
    constexpr int kLayout = kCount + kScheduleChunks;
    constexpr int kSegments = kLayout + 1;
    constexpr int kPlace = kSegments + kSegmentTasks;
    constexpr int kMark = kPlace + kScheduleChunks;
    constexpr int kList = kMark + kScheduleChunks;
    constexpr int kPhases = kList + kFetchListTasks;
    Tickets* t = rank_.tickets;
    while (true) {
      __syncthreads();
      if (threadIdx.x == 0) shared_.ticket = static_cast<int32_t>(atomicAdd(&t->schedule, 1));
      __syncthreads();
      const int i = shared_.ticket;
      if (i < kAnnounce) {
        publish(i);
        done(&t->published);
      } else if (i < kCount) {
        if (!after(&t->published, kPublishTasks)) return false;
        announce();
      } else if (i < kLayout) {
        if (!all_arrived()) return false;
        count(i - kCount);
        done(&t->counted);
      } else if (i < kSegments) {
        if (!after(&t->counted, kScheduleChunks)) return false;
        lay_out();
        done(&t->laid_out);
      } else if (kBackward && i < kPlace) {
        if (!after(&t->laid_out, 1)) return false;
        load_plan();
        cut_segments(rank_.tables, shared_.plan, shared_.scratch,
                     [&](int32_t value, int32_t* total) { return scan(value, total); });
        done(&t->listed);
      } else if (i < kMark) {
        if (!after(&t->laid_out, 1)) return false;
        place(i - kPlace);
        done(&t->placed);
      } else if (i < kList) {
        if (!after(&t->placed, kScheduleChunks)) return false;
        load_plan();
        mark(i - kMark);
        done(&t->marked);
      } else if (i < kPhases) {
        if (!after(&t->marked, kScheduleChunks)) return false;
        load_plan();
        for (int m = i - kList; m < shared_.plan.s.minibatches; m += kFetchListTasks) list(m);
        done(&t->listed);
      } else if (i == kPhases) {
        if (!after(&t->listed, kFetchListTasks + kSegmentTasks)) return false;
        load_plan();
        build_queues();
        done(&t->planned);
      } else {
        return after(&t->planned, 1);
      }
    }
  }

 private:
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kAtOnce = 4;
  static constexpr int kSegmentTasks = kBackward ? 1 : 0;
  __device__ const plan::Geometry& g() const { return rank_.g; }
  __device__ int lane() const { return threadIdx.x % kWarp; }
  __device__ int warp() const { return threadIdx.x / kWarp; }

  // All steps but the first need every rank's ids: progress is measured from their arrival on.
  __device__ bool after(const uint32_t* word, uint32_t target) {
    if (threadIdx.x == 0) {
      const auto look = [&] { return int64_t{ptx::load_acquire_gpu(word)}; };
      bool go = true;
      if (word != &rank_.tickets->published && look() < target) {
        for (int r = 0; go && r < g().ranks; ++r) go = wait_.flag(plan::Counter::arrived, r, -1);
      }
      shared_.go = go && wait_.until(look, target, rank_.progress_ns, ErrorRecord::schedule, -1,
                                     static_cast<int32_t>(word - &rank_.tickets->schedule));
    }
    __syncthreads();
    return shared_.go != 0;
  }

  // Counts the ticket in: the whole block's writes come before.
  __device__ void done(uint32_t* word) {
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::fence_gpu();
      ptx::add_release_gpu(word, 1);
    }
  }

  __device__ int64_t own_id(int64_t i) const {
    if (!rank_.ids_are_64) return static_cast<const int32_t*>(rank_.ids)[i];
    return static_cast<const int64_t*>(rank_.ids)[i];
  }

  // Calls load(i) for up to kAtOnce of the thread's i in [begin, end), then use(i, value) for each.
  template <class Load, class Use>
  __device__ void batches(int64_t begin, int64_t end, int64_t stride, Load&& load, Use&& use) {
    for (int64_t base = begin; base < end; base += kAtOnce * stride) {
      decltype(load(base)) value[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (base + u * stride < end) value[u] = load(base + u * stride);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (base + u * stride < end) use(base + u * stride, value[u]);
      }
    }
  }

  __device__ void publish(int task) {
    const int64_t n = int64_t{g().own_tokens()} * g().topk;
    const int64_t begin = n * task / kPublishTasks, end = n * (task + 1) / kPublishTasks;
    int32_t* out = rank_.at<int32_t>(plan::Buffer::ids, g().rank);
    batches(
        begin + threadIdx.x, end, kThreads, [&](int64_t i) { return own_id(i); },
        [&](int64_t i, int64_t id) {
          const bool fits = id > INT32_MIN && id <= INT32_MAX;
          if (!fits) atomicMax(&rank_.tickets->wide_id, ~static_cast<uint32_t>(i));
          out[i] = fits ? static_cast<int32_t>(id) : INT32_MIN;
        });
    if constexpr (kBackward) {
      auto* weights = rank_.at<float>(plan::Buffer::topk_weights, g().rank);
      batches(
          begin + threadIdx.x, end, kThreads, [&](int64_t i) { return rank_.weights[i]; },
          [&](int64_t i, float weight) { weights[i] = weight; });
    }
  }

  __device__ void announce() {
    if (threadIdx.x != 0) return;
    const uint32_t wide = *const_cast<volatile uint32_t*>(&rank_.tickets->wide_id);
    const int64_t wide_id = wide == 0 ? 0 : own_id(~wide);
    for (int r = 0; r < g().ranks; ++r) {
      Control::Header& header = rank_.control(r)->from[g().rank];
      header.tag = rank_.tag;
      header.wide_id = wide_id;
      header.tokens = g().own_tokens();
    }
    wait_.raise(plan::Counter::arrived);
  }

  __device__ bool all_arrived() {
    const int r = threadIdx.x;
    bool here = true;
    if (r < g().ranks) {
      here = wait_.flag(plan::Counter::arrived, r, -1);
      if (here && rank_.control(g().rank)->from[r].tag != rank_.tag) {
        wait_.fail(ErrorRecord::disagreement, -1, r, 0, 0);
        here = false;
      }
    }
    if (r < g().ranks) shared_.tokens[r] = rank_.control(g().rank)->from[r].tokens;
    return __syncthreads_and(here);
  }

  __device__ int chunk_slots() const {
    const int64_t per_warp_round = kThreads;
    const int64_t per_chunk = plan::ceil_div<int64_t>(g().slots(), kScheduleChunks);
    return static_cast<int>(plan::ceil_div(per_chunk, per_warp_round) * per_warp_round);
  }

  __device__ void count(int chunk) {
    int32_t* hist = shared_.scratch;
    const int experts = g().experts_local();
    for (int e = threadIdx.x; e < experts; e += kThreads) hist[e] = 0;
    __syncthreads();
    const int64_t begin = int64_t{chunk} * chunk_slots();
    const int64_t end = min(begin + chunk_slots(), g().slots());
    const int per_rank = g().max_tokens * g().topk;
    const auto look = [&](int64_t slot) {
      const int src = static_cast<int>(slot / per_rank);
      const int index = static_cast<int>(slot % per_rank);
      if (index >= shared_.tokens[src] * g().topk) return -1;
      return rank_.at<int32_t>(plan::Buffer::ids, src)[index];
    };
    batches(begin + threadIdx.x, end, kThreads, look, [&](int64_t slot, int32_t id) {
      if (id < -1 || id >= g().experts) atomicMax(&rank_.tickets->bad_id, ~uint32_t(slot));
      const int expert = id - g().first_expert();
      const bool local = id >= 0 && expert >= 0 && expert < experts;
      rank_.tables.slot_row[slot] = local ? expert : -1;  // a local copy for `place`
      if (local) atomicAdd(&hist[expert], 1);
    });
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += kThreads) {
      rank_.tables.chunk_count[chunk * experts + e] = hist[e];
    }
  }

  // Exclusive sum over the block's threads; `total` is the sum.
  __device__ int32_t scan(int32_t value, int32_t* total) {
    int32_t sum = value;
    for (int d = 1; d < kWarp; d *= 2) {
      const int32_t below = __shfl_up_sync(~0u, sum, d);
      if (lane() >= d) sum += below;
    }
    __syncthreads();
    if (lane() == kWarp - 1) shared_.warp_sum[warp()] = sum;
    __syncthreads();
    int32_t before = 0, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp()) before += shared_.warp_sum[w];
      all += shared_.warp_sum[w];
    }
    *total = all;
    return before + sum - value;
  }

  __device__ void lay_out() {
    const int experts = g().experts_local();
    const bool bad = rank_.tickets->bad_id != 0;          // then nothing is computed: y becomes NaN
    int32_t* rows = shared_.scratch;                      // [experts]
    int32_t* first_tile = shared_.scratch + kMaxExperts;  // [experts + 1]
    int32_t tiles = 0, real = 0;
    for (int base = 0; base < experts; base += kThreads) {
      const int e = base + threadIdx.x;
      int32_t sum = 0;
      if (e < experts) {
        constexpr int kLoads = 32;
        for (int c0 = 0; c0 < kScheduleChunks; c0 += kLoads) {
          int32_t n[kLoads];
#pragma unroll
          for (int c = 0; c < kLoads; ++c) {
            n[c] = rank_.tables.chunk_count[(c0 + c) * experts + e];
          }
#pragma unroll
          for (int c = 0; c < kLoads; ++c) {
            rank_.tables.chunk_count[(c0 + c) * experts + e] = sum;
            if (!bad) sum += n[c];
          }
        }
        rows[e] = sum;
      }
      int32_t total_tiles, total_rows;
      const int32_t before = scan(plan::ceil_div(sum, plan::kTileRows), &total_tiles);
      scan(sum, &total_rows);
      if (e < experts) {
        first_tile[e] = tiles + before;
        rank_.tables.expert_begin[e] = (tiles + before) * plan::kTileRows;
        rank_.tables.expert_rows[e] = sum;
      }
      tiles += total_tiles;
      real += total_rows;
    }
    if (threadIdx.x == 0) {
      if (bad) report_bad_id();
      first_tile[experts] = tiles;
      rank_.tables.expert_begin[experts] = tiles * plan::kTileRows;
    }
    __syncthreads();
    if (threadIdx.x == kThreads - 1) write_plan(tiles, real);  // beside its neighbours' tiles
    if (warp() == kWarps - 1) return;
    const int per_minibatch = g().minibatch_tiles;
    for (int t = threadIdx.x; t < tiles; t += kThreads - kWarp) {
      int low = 0, high = experts;  // last expert whose first tile is <= t, empty ones excluded
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_tile[middle] <= t) {
          low = middle;
        } else {
          high = middle;
        }
      }
      const int left = rows[low] - (t - first_tile[low]) * plan::kTileRows;
      const int m = t / per_minibatch;
      const int begin = max(first_tile[low], m * per_minibatch);
      const int end = min(first_tile[low + 1], (m + 1) * per_minibatch);
      plan::Tile tile;
      tile.expert = low;
      tile.rows = min(left, plan::kTileRows);
      tile.slice_begin = begin;
      tile.slice_tiles = end - begin;
      rank_.tables.tile[t] = tile;
    }
  }

  // The call goes on without rows; the host finds the record after it.
  __device__ void report_bad_id() {
    const auto slot = static_cast<int32_t>(~rank_.tickets->bad_id);
    const int src = g().slot_rank(slot);
    volatile ErrorRecord* out = rank_.record;
    out->rank = g().rank;
    out->entry = slot;
    const int32_t id = rank_.at<int32_t>(plan::Buffer::ids, src)[g().owner_index(slot)];
    out->seen = id == INT32_MIN ? rank_.control(g().rank)->from[src].wide_id : id;
    ptx::fence_system();
    out->kind = ErrorRecord::bad_id;
  }

  __device__ void write_plan(int tiles, int real) {
    plan::Plan& p = *rank_.tables.plan;
    p.g = g();
    for (int r = 0; r < g().ranks; ++r) {
      p.g.tokens[r] = rank_.control(g().rank)->from[r].tokens;
    }
    p.s.tiles = tiles;
    p.s.minibatches = max(1, plan::ceil_div(tiles, g().minibatch_tiles));
    p.s.windows = max(1, plan::ceil_div(tiles, g().window_tiles(tiles)));
    p.s.real_rows = real;
    p.s.expert_begin = rank_.tables.expert_begin;
    p.s.expert_rows = rank_.tables.expert_rows;
    p.s.row_slot = rank_.tables.row_slot;
    p.s.slot_row = rank_.tables.slot_row;
    p.s.tile = rank_.tables.tile;
    p.s.fetch_row = rank_.tables.fetch_row;
    p.s.fetch_count = rank_.tables.fetch_count;
    if constexpr (kBackward) {
      p.s.segment = rank_.tables.segment;
      p.s.segment_of_tile = rank_.tables.segment_of_tile;
      p.s.segment_begin = rank_.tables.segment_begin;
    }
    p.compute = rank_.tables.compute;
    p.communication = rank_.tables.communication;
  }

  __device__ void load_plan() {
    static_assert(sizeof(plan::Plan) % 4 == 0);
    constexpr int kWords = sizeof(plan::Plan) / 4;
    const auto* from = reinterpret_cast<const volatile uint32_t*>(rank_.tables.plan);
    auto* to = reinterpret_cast<uint32_t*>(&shared_.plan);
    for (int i = threadIdx.x; i < kWords; i += kThreads) to[i] = from[i];
    __syncthreads();
  }

  struct Routed {
    int32_t expert;  // local, or -1
    float weight;    // backward only
  };

  // The weight, maybe a peer's, is asked for before the expert is known: one wait for both.
  __device__ Routed routed(int64_t slot) const {
    Routed r{rank_.tables.slot_row[slot], 0};
    if constexpr (kBackward) {
      const int per_rank = g().max_tokens * g().topk;
      const int src = static_cast<int>(slot) / per_rank;
      r.weight = rank_.at<float>(plan::Buffer::topk_weights, src)[slot - int64_t{src} * per_rank];
    }
    return r;
  }

  // Rows behind those of every 64th expert.
  __device__ void pad(int chunk) {
    for (int e = chunk; e < g().experts_local(); e += kScheduleChunks) {
      const int32_t first = rank_.tables.expert_begin[e] + rank_.tables.expert_rows[e];
      const int32_t end = rank_.tables.expert_begin[e + 1];
      for (int row = first + threadIdx.x; row < end; row += kThreads) {
        rank_.tables.row_slot[row] = -1;
        rank_.tables.row_source[row] = -1;
        rank_.tables.row_destination[row] = 0;
        if constexpr (kBackward) rank_.tables.row_weight[row] = 0;
      }
    }
  }

  // Each warp owns a contiguous part of the chunk, so slot order is (warp, round, lane).
  __device__ void place(int chunk) {
    pad(chunk);
    const int experts = g().experts_local();
    int32_t* mine = shared_.scratch + warp() * experts;
    for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) shared_.scratch[i] = 0;
    __syncthreads();
    const int per_warp = chunk_slots() / kWarps;
    const int64_t begin = int64_t{chunk} * chunk_slots() + int64_t{warp()} * per_warp;
    const int64_t end = min(begin + per_warp, g().slots());
    const auto look = [&](int64_t slot) { return rank_.tables.slot_row[slot]; };
    batches(begin + lane(), end, kWarp, look, [&](int64_t, int32_t expert) {
      if (expert >= 0) atomicAdd(&mine[expert], 1);
    });
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += kThreads) {
      int32_t row = rank_.tables.expert_begin[e] + rank_.tables.chunk_count[chunk * experts + e];
      for (int w = 0; w < kWarps; ++w) {
        const int32_t n = shared_.scratch[w * experts + e];
        shared_.scratch[w * experts + e] = row;
        row += n;
      }
    }
    __syncthreads();
    const bool bad = rank_.tickets->bad_id != 0;
    const int64_t row_bytes = int64_t{g().hidden} * 2;
    // Warps whose part ends early still take part in the last match.
    const int64_t whole = begin < end ? begin + (end - begin + kWarp - 1) / kWarp * kWarp : begin;
    const auto look_within = [&](int64_t slot) {
      return slot < end ? routed(slot) : Routed{-1, 0};
    };
    batches(begin + lane(), whole, kWarp, look_within, [&](int64_t slot, const Routed& found) {
      const int32_t expert = found.expert;
      const uint32_t same = __match_any_sync(~0u, expert);
      const int before = __popc(same & ((1u << lane()) - 1));
      int32_t row = -1;
      if (expert >= 0) row = mine[expert] + before;
      __syncwarp();
      if (expert >= 0 && before == 0) mine[expert] += __popc(same);
      __syncwarp();
      if (slot >= end) return;
      rank_.tables.slot_row[slot] = bad ? -1 : row;
      if (row < 0 || bad) return;
      rank_.tables.row_slot[row] = static_cast<int32_t>(slot);
      if constexpr (kBackward) rank_.tables.row_weight[row] = found.weight;
      const int src = g().slot_rank(static_cast<int32_t>(slot));
      rank_.tables.row_destination[row] =
          reinterpret_cast<uint64_t>(rank_.at<uint8_t>(plan::Buffer::returned_rows, src)) +
          g().owner_index(static_cast<int32_t>(slot)) * row_bytes;
    });
  }

  __device__ void mark(int chunk) {
    struct Marked {
      int32_t row;
      bool fetched;
    };
    const int64_t begin = int64_t{chunk} * chunk_slots();
    const int64_t end = min(begin + chunk_slots(), g().slots());
    const auto look = [&](int64_t slot) {
      const int32_t row = rank_.tables.slot_row[slot];
      return Marked{row, is_fetched(row, static_cast<int32_t>(slot))};
    };
    batches(begin + threadIdx.x, end, kThreads, look, [&](int64_t slot, const Marked& m) {
      const int src = g().slot_rank(static_cast<int32_t>(slot));
      if (m.row >= 0) rank_.tables.row_source[m.row] = static_cast<int8_t>(m.fetched ? src : -1);
    });
  }

  // As plan::is_fetched, for a slot with a row; all look-ups at once.
  __device__ bool is_fetched(int32_t row, int32_t slot) const {
    const plan::Plan& p = shared_.plan;
    // A token with one slot has one row. Without an early way out here the compiler waits for every
    // wgmma of bf16's backward (warning C7511).
    if (p.g.topk == 1) return true;
    const int32_t window_rows = p.g.window_tiles(p.s.tiles) * plan::kTileRows;
    const int32_t window_begin = row / window_rows * window_rows;
    const int32_t* rows = p.s.slot_row + (slot - p.g.slot_k(slot));
    bool first = true;
    constexpr int kLoads = 8;
    for (int k0 = 0; k0 < p.g.topk; k0 += kLoads) {
      int32_t other[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) other[k] = k0 + k < p.g.topk ? rows[k0 + k] : -1;
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        first = first && !(other[k] >= window_begin && other[k] < row);
    }
    return first;
  }

  // Warps take groups of 32 rows: count the fetched rows of each source, sum over the groups, then
  // every fetched row knows its number among those of its source.
  __device__ void list(int m) {
    const plan::Plan& p = shared_.plan;
    const int first = plan::minibatch_begin(p, m) * plan::kTileRows;
    const int groups = plan::minibatch_tiles(p, m) * (plan::kTileRows / kWarp);
    int32_t* count = shared_.scratch;  // [groups][kMaxRanks], then sums of the groups before
    auto* source = reinterpret_cast<int8_t*>(  // [rows] rank, or -1
        shared_.scratch + kMostMinibatchTiles * (plan::kTileRows / kWarp) * kMaxRanks);
    __syncthreads();
    for (int i = threadIdx.x; i < groups * kMaxRanks; i += kThreads) count[i] = 0;
    __syncthreads();
    const auto look = [&](int64_t group) {
      return int32_t{rank_.tables.row_source[first + static_cast<int>(group) * kWarp + lane()]};
    };
    batches(warp(), groups, kWarps, look, [&](int64_t group, int32_t src) {
      const int i = static_cast<int>(group) * kWarp + lane();
      const uint32_t same = __match_any_sync(~0u, src);
      if (src >= 0 && (same & ((1u << lane()) - 1)) == 0) {
        count[group * kMaxRanks + src] = __popc(same);
      }
      source[i] = static_cast<int8_t>(src);
    });
    __syncthreads();
    if (warp() < p.g.ranks) {
      int32_t sum = 0;
      for (int base = 0; base < groups; base += kWarp) {
        int32_t* entry = &count[(base + lane()) * kMaxRanks + warp()];
        const int32_t mine = base + lane() < groups ? *entry : 0;
        int32_t upto = mine;
        for (int d = 1; d < kWarp; d *= 2) {
          const int32_t below = __shfl_up_sync(~0u, upto, d);
          if (lane() >= d) upto += below;
        }
        if (base + lane() < groups) *entry = sum + upto - mine;
        sum += __shfl_sync(~0u, upto, kWarp - 1);
      }
      if (lane() == 0) shared_.source_count[warp()] = sum;
    }
    __syncthreads();
    for (int group = warp(); group < groups; group += kWarps) {
      const int i = group * kWarp + lane();
      const int src = source[i];
      const uint32_t same = __match_any_sync(~0u, src);
      if (src < 0) continue;
      const int number = count[group * kMaxRanks + src] + __popc(same & ((1u << lane()) - 1));
      const int position = plan::fetch_position(p.g, shared_.source_count, src, number);
      rank_.tables.fetch_row[first + position] = first + i;
    }
    if (threadIdx.x == 0) {
      int32_t all = 0;
      for (int r = 0; r < p.g.ranks; ++r) all += shared_.source_count[r];
      rank_.tables.fetch_count[m] = all;
    }
    __syncthreads();
  }

  __device__ void build_queues() {
    plan::Plan& p = shared_.plan;
    int32_t* counts = shared_.scratch;  // close at hand: the phases are made one after another
    for (int m = threadIdx.x; m < p.s.minibatches; m += kThreads) {
      counts[m] = static_cast<const volatile int32_t*>(rank_.tables.fetch_count)[m];
    }
    constexpr int kRoom = kWarps * kMaxExperts / 2;
    int32_t* segments = shared_.scratch + kRoom;
    const bool fits = kBackward && p.s.minibatches < kRoom;
    for (int m = threadIdx.x; fits && m <= p.s.minibatches; m += kThreads) {
      segments[m] = static_cast<const volatile int32_t*>(rank_.tables.segment_begin)[m];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      p.s.fetch_count = counts;
      if (fits) p.s.segment_begin = segments;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      rank_.tables.plan->compute_phases =
          plan::build_phases(p, plan::Queue::compute, rank_.tables.compute);
    } else if (threadIdx.x == kWarp) {
      rank_.tables.plan->communication_phases =
          plan::build_phases(p, plan::Queue::communication, rank_.tables.communication);
    }
  }

  const RankState& rank_;
  const Waiter& wait_;
  ScheduleShared& shared_;
};

}  // namespace mok::cuda
