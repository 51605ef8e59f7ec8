// Backward's tasks that are no matrix tiles. One warp runs each, all 32 lanes; the caller has
// waited for what the plan states and signals afterwards:
//
//   router_grad    a tile's rows: d_topk_weights, to the owners. With peers a system fence is due
//                  before the signal.
//   sigma          own tile: sigmoid(x . gate), and d_sigma * sigma'
//   vector_grad    256 columns of the shared gate vector's gradient
//
// and zero_padding, which belongs to d_hidden. What a lone warp lacks in loads on their way is made
// up for by asking the L2 for rows in advance.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/rank_state.h"
#include "cuda/token_dot.cuh"

namespace mok::cuda {

// Sums each row's partials [ring rows, column tiles of d_hidden] in column order.
__device__ __forceinline__ void router_grad(const RankState& rank, const plan::Plan& p,
                                            const plan::Task& task) {
  const plan::Geometry& g = p.g;
  const int columns = g.columns_d_hidden();
  const int rows = p.s.tile[task.tile].rows;
  const int32_t row0 = task.tile * plan::kTileRows;
  const float* partials =
      rank.at<float>(plan::Buffer::router_partials) + int64_t{plan::ring_row(p, row0)} * columns;
#pragma unroll 1
  for (int r = threadIdx.x % kWarp; r < rows; r += kWarp) {
    float sum = 0;
#pragma unroll 4
    for (int c = 0; c < columns; ++c) sum += partials[r * columns + c];
    const int32_t slot = p.s.row_slot[row0 + r];
    rank.at<float>(plan::Buffer::returned_grads, g.slot_rank(slot))[g.owner_index(slot)] = sum;
  }
}

// A token at a time, as forward's sigma: the same bits.
__device__ __forceinline__ void sigma(const RankState& rank, const plan::Plan& p,
                                      const plan::Task& task) {
  const plan::Geometry& g = p.g;
  const int lane = threadIdx.x % kWarp;
  const int begin = task.tile * plan::kTileRows;
  const int end = min(begin + plan::kTileRows, g.own_tokens());
  const __nv_bfloat16* r_s =
      g.keep_shared ? rank.saved_shared_out : rank.at<__nv_bfloat16>(plan::Buffer::shared_rows);
#pragma unroll 1
  for (int t = begin + lane; t < end; t += kWarp) {
    const uint32_t bytes = g.hidden * 2;
    ptx::prefetch_bulk(rank.x + t * rank.x_stride, bytes);
    ptx::prefetch_bulk(rank.d_y + t * rank.d_y_stride, bytes);
    ptx::prefetch_bulk(r_s + int64_t{t} * g.hidden, bytes);
  }
#pragma unroll 1
  for (int64_t t = begin; t < end; ++t) {
    const float s = shared_sigma(rank.x + t * rank.x_stride, rank.shared_vector, g.hidden);
    const float d = token_dot(rank.d_y + t * rank.d_y_stride, r_s + t * g.hidden, g.hidden);
    if (lane != 0) continue;
    rank.at<float>(plan::Buffer::sigma)[t] = s;
    rank.at<float>(plan::Buffer::d_sigma)[t] = d * (s * (1.0f - s));
  }
}

// Sum over own tokens, ascending, of d_sigma * sigma' * x: eight columns a lane. After a bad id
// NaN, but an accumulated target is left alone, as it is without tokens.
__device__ __forceinline__ void vector_grad(const RankState& rank, const plan::Plan& p,
                                            const plan::Task& task) {
  constexpr int kOwn = 8;
  static_assert(kOwn * kWarp == plan::kTileHidden);
  const plan::Geometry& g = p.g;
  const int lane = threadIdx.x % kWarp;
  const int column0 = task.column * plan::kTileHidden;
  const int column = column0 + lane * kOwn;
  const bool here = column < g.hidden;  // H is a multiple of 64: all eight or none
  const int tokens = g.own_tokens();
  const uint32_t bytes = min(g.hidden - column0, plan::kTileHidden) * 2;
  const auto prefetch = [&](int t) {
    if (t < tokens) ptx::prefetch_bulk(rank.x + t * rank.x_stride + column0, bytes);
  };
  float sum[kOwn] = {};
  prefetch(lane);
  for (int base = 0; base < tokens; base += kWarp) {
    prefetch(base + kWarp + lane);
    const float* d_sigma = rank.at<float>(plan::Buffer::d_sigma) + base;
    const int n = min(tokens - base, kWarp);
    const float mine = lane < n ? d_sigma[lane] : 0.0f;
#pragma unroll 2
    for (int i = 0; i < n; ++i) {
      const float factor = __shfl_sync(~0u, mine, i);
      if (!here) continue;
      const auto* x = reinterpret_cast<const uint4*>(rank.x + (base + i) * rank.x_stride + column);
      const uint4 raw = *x;
      const uint32_t pair[kOwn / 2] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        sum[j] = fmaf(factor,
                      __uint_as_float(j % 2 == 0 ? pair[j / 2] << 16 : pair[j / 2] & 0xffff0000u),
                      sum[j]);
      }
    }
  }
  const bool bad = rank.tickets->bad_id != 0;
  if (!here) return;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (bad) sum[j] = __int_as_float(0x7fffffff);
    auto* fp32 = static_cast<float*>(rank.d_shared_vector) + column + j;
    switch (rank.d_shared_vector_mode) {
      case GradMode::none:
        break;
      case GradMode::storage:
        static_cast<__nv_bfloat16*>(rank.d_shared_vector)[column + j] = __float2bfloat16_rn(sum[j]);
        break;
      case GradMode::sum:
        *fp32 = sum[j];
        break;
      case GradMode::accumulate:
        if (tokens > 0 && !bad) *fp32 = *fp32 + sum[j];
        break;
    }
  }
}

// Zeros from the tile's last row to the end of its step of 64 rows, so that weight gradients may
// run over whole steps; for a tile whose rows have been fetched: before that, its place in the ring
// may still be read as rows of an earlier window. The copy engine of any block may read them once
// the tile's d_hidden task is signalled.
__device__ __forceinline__ void zero_padding(const RankState& rank, const plan::Plan& p, int tile) {
  constexpr int kStep = 64;
  const int64_t row_bytes = int64_t{p.g.hidden} * 2;
  const int rows = p.s.tile[tile].rows;
  const int padding = plan::ceil_div(rows, kStep) * kStep - rows;
  const int64_t first = (int64_t{plan::ring_row(p, tile * plan::kTileRows)} + rows) * row_bytes;
  const auto zero = [&](plan::Buffer b) {
    uint8_t* to = rank.at<uint8_t>(b) + first;
    const int64_t bytes = padding * row_bytes;
#pragma unroll 1
    for (int64_t i = threadIdx.x % kWarp * 16; i < bytes; i += kWarp * 16) {
      ptx::store_global_16(to + i, uint4{0, 0, 0, 0});
    }
  };
  zero(plan::Buffer::ring_d_y);
  if (plan::needs_x(p)) zero(plan::Buffer::ring_x);
  ptx::fence_proxy_async();
  __syncwarp();
}

}  // namespace mok::cuda
