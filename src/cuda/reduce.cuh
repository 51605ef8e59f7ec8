// The last tasks of a call, for own tokens, k in order:
//
//   forward    y_t   = bf16(sigma * r_s + sum over k of w_k * r_k)
//   backward   d_x_t = bf16(d_s + sum over k of row_k),  d_s = row_s + d_sigma * sigma' * gate
//              d_topk_weights[t, k], +0 where the id is -1
//
// The consumer warpgroups of a block run them when no tile is left. After a bad id everything is
// NaN.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile_types.cuh"
#include "cuda/token_dot.cuh"
#include "cuda/wait.cuh"

namespace mok::cuda {

inline constexpr int kMostReduceTokens = 8;

// Tickets of reduce tasks that a block has drawn among those of tiles.
struct ReduceTickets {
  int32_t first, count;
};

struct ReduceShared {
  int32_t ticket;
  int32_t go;
  float sigma[kMostReduceTokens];  // forward, as the next one
  float weight[kMostReduceTokens * kMaxTopk];
  uint32_t routed[kMostReduceTokens][kMaxTopk / 32];  // bit k: slot k of the token has a row
};

// Eight bf16 of one 16-byte piece.
struct Eight {
  float v[8];
  __device__ static Eight unpack(uint4 raw) {
    Eight e;
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
    for (int i = 0; i < 4; ++i) {
      e.v[2 * i] = __uint_as_float(word[i] << 16);
      e.v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
    return e;
  }
};

template <bool kBackward = false>
class Reducer {
 public:
  __device__ Reducer(const RankState& rank, const plan::Plan& p, const Waiter& waiter,
                     ReduceShared& shared)
      : rank_(rank), plan_(p), wait_(waiter), shared_(shared) {}

  // `mine`: what this block has drawn already. The next ticket is drawn while the rows of this one
  // are on their way.
  __device__ void run(ReduceTickets mine) {
    const int32_t end = plan::tickets(plan_, plan::Queue::compute);
    const plan::Phase last = plan_.compute[plan_.compute_phases - 1];  // reduce
    const auto draw = [&] {
      if (--mine.count > 0) {
        if (thread_ == 0) shared_.ticket = ++mine.first;
      } else if (thread_ == 0) {
        shared_.ticket = static_cast<int32_t>(atomicAdd(&rank_.tickets->compute, 1));
      }
    };
    int32_t ticket = mine.first;
    if (mine.count == 0) {
      draw();
      sync();
      ticket = shared_.ticket;
    }
    while (ticket < end) {
      const plan::Task task = plan::decode_in_phase(plan_, last, ticket - last.first_ticket);
      if (!ready(task)) return;
      draw();
      reduce(task);
      sync();
      ticket = shared_.ticket;
    }
  }

 private:
  static constexpr int kReducers = kConsumerGroups * kWarpgroup;
  static constexpr int kBarrier = 1;
  __device__ static void sync() { ptx::named_barrier_sync(kBarrier, kReducers); }

  __device__ bool ready(const plan::Task& task) {
    for (int i = thread_; i < kMostReduceTokens * kMaxTopk / 32; i += kReducers) {
      shared_.routed[i / (kMaxTopk / 32)][i % (kMaxTopk / 32)] = 0;
    }
    sync();  // warps come here at their own time
    if (thread_ == 0) {
      bool go = true;
      plan::for_each_wait(plan_, task, [&](plan::Wait w) {
        if (!go) return;
        if (!kBackward && w.counter == plan::Counter::sigma) return;  // computed right here
        if (plan::is_flag(w.counter) && all_returned_) return;
        go = wait_.wait(w, static_cast<int>(task.kind));
      });
      shared_.go = go;
    }
    all_returned_ = true;
    for (int i = thread_; i < (task.end - task.begin) * plan_.g.topk; i += kReducers) {
      const int64_t slot = int64_t{task.begin} * plan_.g.topk + i;
      const int token = i / plan_.g.topk, k = i % plan_.g.topk;
      if constexpr (!kBackward) shared_.weight[i] = rank_.weights[slot];
      if (rank_.at<int32_t>(plan::Buffer::ids, plan_.g.rank)[slot] >= 0) {
        atomicOr(&shared_.routed[token][k / 32], 1u << k % 32);
      }
    }
    sync();
    return shared_.go != 0;
  }

  // sigmoid of the shared gate for the task's tokens, a warp each.
  __device__ void sigmas(const plan::Task& task) {
    for (int token = task.begin + thread_ / kWarp; token < task.end; token += kReducers / kWarp) {
      const float sigma =
          shared_sigma(rank_.x + token * rank_.x_stride, rank_.shared_vector, plan_.g.hidden);
      if (thread_ % kWarp == 0) shared_.sigma[token - task.begin] = sigma;
    }
    sync();
  }

  __device__ static uint4 load(const uint8_t* from) { return load_if(1, from); }
  // Predicated, so that many are issued in a row.
  __device__ static uint4 load_if(uint32_t wanted, const uint8_t* from) {
    uint4 v;
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
        " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
        " @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(from), "r"(wanted));
    return v;
  }

  __device__ void reduce(const plan::Task& task) {
    if constexpr (kBackward) {
      if (rank_.d_topk_weights != nullptr) router_grads(task);
      if (rank_.d_x == nullptr) return;
    } else {
      if (plan_.g.shared_gate) sigmas(task);
    }
    const int items = (task.end - task.begin) * (plan_.g.hidden / 8);
    constexpr int kItems = 2;  // at once: enough loads in flight to fill the memory's pipe
    int i = thread_;
    for (; i + kReducers < items; i += kItems * kReducers) reduce_items<kItems>(task, i);
    if (i < items) reduce_items<1>(task, i);
  }

  __device__ void router_grads(const plan::Task& task) {
    const bool bad = rank_.tickets->bad_id != 0;
    const int topk = plan_.g.topk;
    const auto* grads = rank_.at<float>(plan::Buffer::returned_grads, plan_.g.rank);
    for (int i = thread_; i < (task.end - task.begin) * topk; i += kReducers) {
      const int64_t slot = int64_t{task.begin} * topk + i;
      const int k = i % topk;
      float grad = 0;
      if (shared_.routed[i / topk][k / 32] >> k % 32 & 1) grad = grads[slot];
      rank_.d_topk_weights[slot] = bad ? __int_as_float(0x7fffffff) : grad;
    }
  }

  // The token's d_sigma * sigma' times eight elements of the gate vector, added to d_s's row.
  __device__ __forceinline__ void add_gate(float (&acc)[8], int token, int column) const {
    const float coefficient = rank_.at<float>(plan::Buffer::d_sigma)[token];
    const __nv_bfloat16* gate = rank_.shared_vector + column;  // of no alignment
    for (int j = 0; j < 8; ++j) acc[j] = fmaf(coefficient, __bfloat162float(gate[j]), acc[j]);
  }

  // Items i, i + kReducers, ...: eight columns of a token each.
  template <int kItems>
  __device__ __forceinline__ void reduce_items(const plan::Task& task, int first) {
    const plan::Geometry& g = plan_.g;
    const int pieces = g.hidden / 8;
    int local[kItems], column[kItems];
    float acc[kItems][8];
    const uint8_t* row[kItems];  // this item's piece of the token's next row
    const int64_t row_bytes = int64_t{g.hidden} * 2;
    const auto* rows = rank_.at<uint8_t>(plan::Buffer::returned_rows, g.rank);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      local[n] = (first + n * kReducers) / pieces;
      column[n] = (first + n * kReducers) % pieces * 8;
      row[n] = rows + int64_t{task.begin + local[n]} * g.topk * row_bytes + column[n] * 2;
      for (int j = 0; j < 8; ++j) acc[n][j] = 0;
      if (!g.has_shared()) continue;
      const auto* r_s = rank_.at<uint8_t>(plan::Buffer::shared_rows) +
                        int64_t{task.begin + local[n]} * row_bytes + column[n] * 2;
      const Eight r = Eight::unpack(load(r_s));
      if constexpr (kBackward) {
        for (int j = 0; j < 8; ++j) acc[n][j] = r.v[j];
        if (g.shared_gate) add_gate(acc[n], task.begin + local[n], column[n]);
        continue;
      }
      const float sigma = g.shared_gate ? shared_.sigma[local[n]] : 1.0f;
      for (int j = 0; j < 8; ++j) acc[n][j] = sigma * r.v[j];
    }
    constexpr int kAtOnce = 8;  // divides 32
    for (int k0 = 0; k0 < g.topk; k0 += kAtOnce) {
      uint4 raw[kItems][kAtOnce];
      uint32_t routed[kItems];
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        routed[n] = shared_.routed[local[n]][k0 / 32] >> k0 % 32;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          raw[n][k] = load_if(routed[n] >> k & 1, row[n]);
          row[n] += row_bytes;
        }
      }
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        const float* weight = &shared_.weight[local[n] * g.topk + k0];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if ((routed[n] >> k & 1) == 0) continue;
          const Eight r = Eight::unpack(raw[n][k]);
          for (int j = 0; j < 8; ++j) {
            acc[n][j] = kBackward ? acc[n][j] + r.v[j] : fmaf(weight[k], r.v[j], acc[n][j]);
          }
        }
      }
    }
    const bool bad = rank_.tickets->bad_id != 0;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      if (bad) {
        for (int j = 0; j < 8; ++j) acc[n][j] = __int_as_float(0x7fffffff);
      }
      const uint4 out{ptx::pack_bf16(acc[n][0], acc[n][1]), ptx::pack_bf16(acc[n][2], acc[n][3]),
                      ptx::pack_bf16(acc[n][4], acc[n][5]), ptx::pack_bf16(acc[n][6], acc[n][7])};
      const int64_t token = task.begin + local[n];
      ptx::store_global_16(kBackward ? rank_.d_x + token * rank_.d_x_stride + column[n]
                                     : rank_.y + token * rank_.y_stride + column[n],
                           out);
    }
  }

  const RankState& rank_;
  const plan::Plan& plan_;
  const Waiter& wait_;
  ReduceShared& shared_;
  const int thread_ = static_cast<int>(fresh_thread() - kWarpgroup);
  bool all_returned_ = false;
};

}  // namespace mok::cuda
