// The last tasks of forward: y_t = bf16(sigma * r_s + sum over k of w_k * r_k), k in order.
// The consumer warpgroups of a block run them when no tile is left.
#pragma once

#include "cuda/tile_types.cuh"
#include "cuda/wait.cuh"
#include "numerics/exp.h"

namespace mok::cuda {

struct ReduceShared {
  int32_t ticket;
  int32_t go;
  float sigma[plan::kTileRows];  // of the task's tokens
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

class Reducer {
 public:
  __device__ Reducer(const RankState& rank, const plan::Plan& p, const Waiter& waiter,
                     ReduceShared& shared)
      : rank_(rank), plan_(p), wait_(waiter), shared_(shared) {}

  // `ticket`: the first one, already drawn by this block, or -1.
  __device__ void run(int32_t ticket) {
    const int32_t end = plan::tickets(plan_, plan::Queue::compute);
    while (true) {
      if (ticket < 0) {
        if (thread_ == 0) {
          shared_.ticket = static_cast<int32_t>(atomicAdd(&rank_.tickets->compute, 1));
        }
        sync();
        ticket = shared_.ticket;
      }
      if (ticket >= end) return;
      const plan::Task task = plan::decode(plan_, plan::Queue::compute, ticket);
      if (!ready(task)) return;
      reduce(task);
      ticket = -1;
      sync();
    }
  }

 private:
  static constexpr int kReducers = kConsumerGroups * kWarpgroup;
  static constexpr int kBarrier = 1;
  __device__ static void sync() { ptx::named_barrier_sync(kBarrier, kReducers); }

  __device__ bool ready(const plan::Task& task) {
    if (thread_ == 0) {
      bool go = true;
      plan::for_each_wait(plan_, task, [&](plan::Wait w) {
        if (!go || w.counter == plan::Counter::sigma) return;  // computed right here
        go = wait_.wait(w, static_cast<int>(task.kind));
      });
      shared_.go = go;
    }
    sync();
    return shared_.go != 0;
  }

  // sigmoid of the shared gate for the task's tokens, a warp each; lane sums are added in a fixed
  // tree.
  __device__ void sigmas(const plan::Task& task) {
    const int lane = thread_ % kWarp;
    for (int token = task.begin + thread_ / kWarp; token < task.end; token += kReducers / kWarp) {
      float sum = 0;
      for (int h = lane; h < plan_.g.hidden; h += kWarp) {
        sum = fmaf(__bfloat162float(rank_.x[token * rank_.x_stride + h]),
                   __bfloat162float(rank_.shared_vector[h]), sum);
      }
      for (int d = kWarp / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (lane == 0) {
        shared_.sigma[token - task.begin] = 1.0f / (1.0f + numerics::exp_portable(-sum));
      }
    }
    sync();
  }

  __device__ static uint4 load(const __nv_bfloat16* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
  }

  __device__ void reduce(const plan::Task& task) {
    const plan::Geometry& g = plan_.g;
    if (g.shared_gate) sigmas(task);
    const int pieces = g.hidden / 8;  // of a row
    const bool bad = rank_.tickets->bad_id != 0;
    const auto* rows = rank_.at<__nv_bfloat16>(plan::Buffer::returned_rows, g.rank);
    const auto* shared_rows = rank_.at<__nv_bfloat16>(plan::Buffer::shared_rows);
    const auto* ids = rank_.at<int32_t>(plan::Buffer::ids, g.rank);
    const int items = (task.end - task.begin) * pieces;
    for (int i = thread_; i < items; i += kReducers) {
      const int token = task.begin + i / pieces;
      const int column = i % pieces * 8;
      float acc[8] = {};
      if (g.has_shared()) {
        const Eight r = Eight::unpack(load(shared_rows + int64_t{token} * g.hidden + column));
        const float sigma = g.shared_gate ? shared_.sigma[token - task.begin] : 1.0f;
        for (int j = 0; j < 8; ++j) acc[j] = sigma * r.v[j];
      }
      constexpr int kAtOnce = 8;
      for (int k0 = 0; k0 < g.topk; k0 += kAtOnce) {
        uint4 raw[kAtOnce];
        float weight[kAtOnce];
        bool routed[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int64_t slot = int64_t{token} * g.topk + k0 + k;
          routed[k] = k0 + k < g.topk && ids[slot] >= 0;
          if (!routed[k]) continue;
          weight[k] = rank_.weights[slot];
          raw[k] = load(rows + slot * g.hidden + column);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (!routed[k]) continue;
          const Eight r = Eight::unpack(raw[k]);
          for (int j = 0; j < 8; ++j) acc[j] = fmaf(weight[k], r.v[j], acc[j]);
        }
      }
      if (bad) {
        for (int j = 0; j < 8; ++j) acc[j] = __int_as_float(0x7fffffff);
      }
      uint4 out;
      out.x = ptx::pack_bf16(acc[0], acc[1]);
      out.y = ptx::pack_bf16(acc[2], acc[3]);
      out.z = ptx::pack_bf16(acc[4], acc[5]);
      out.w = ptx::pack_bf16(acc[6], acc[7]);
      ptx::store_global_16(rank_.y + token * rank_.y_stride + column, out);
    }
  }

  const RankState& rank_;
  const plan::Plan& plan_;
  const Waiter& wait_;
  ReduceShared& shared_;
  const int thread_ = threadIdx.x - kWarpgroup;
};

}  // namespace mok::cuda
