// The last tasks of a call, for own tokens, k in order:
//
//   forward    y_t   = bf16(sigma * r_s + sum over k of w_k * r_k)
//   backward   d_x_t = bf16(d_s + sum over k of row_k),  d_s = row_s + d_sigma * sigma' * gate
//              d_topk_weights[t, k], +0 where the id is -1
//
// The consumer warps' task after the tiles: a warp a token, whose slots its lanes look up a token
// ahead. After a bad id everything is NaN.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/rank_state.h"
#include "cuda/tile_types.cuh"
#include "cuda/token_dot.cuh"

namespace mok::cuda {

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

template <bool kBackward>
class Reducer {
 public:
  // `g`: with the tokens of this call.
  __device__ __forceinline__ Reducer(const RankState& rank, const plan::Geometry& g)
      : rank_(rank), g_(g) {}

  // Each of the consumer warps.
  __device__ __forceinline__ void run(const TileTask& task) const {
    const int end = task.row0 + task.rows;
    int token = task.row0 + static_cast<int>(fresh_thread() / kWarp) - kWarpgroup / kWarp;
    Slots next = look_up(token, end);
#pragma unroll 1
    for (; token < end; token += kConsumerWarps) {
      const Slots slots = next;
      next = look_up(token + kConsumerWarps, end);
      reduce(token, slots);
    }
  }

 private:
  static constexpr int kOwn = 8;                   // columns of a lane
  static constexpr int kPiece = kOwn * kWarp;      // of the warp
  static constexpr int kPieces = 4, kAtOnce = 4;   // pieces and rows on their way together
  static constexpr int kWords = kMaxTopk / kWarp;  // slots of a lane

  // Slot k of a token belongs to lane k % 32.
  struct Slots {
    int32_t id[kWords];
    float weight[kWords];  // forward
  };

  __device__ __forceinline__ uint32_t lane() const { return fresh_thread() % kWarp; }

  __device__ __forceinline__ Slots look_up(int token, int end) const {
    Slots s;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int k = i * kWarp + static_cast<int>(lane());
      const int64_t slot = int64_t{token} * g_.topk + k;
      const bool there = token < end && k < g_.topk;
      s.id[i] = there ? rank_.at<int32_t>(plan::Buffer::ids, g_.rank)[slot] : -1;
      s.weight[i] = !kBackward && there ? rank_.weights[slot] : 0.0f;
    }
    return s;
  }

  __device__ __forceinline__ void reduce(int token, const Slots& slots) const {
    const bool bad = rank_.tickets->bad_id != 0;
    uint32_t routed[kWords];  // bit k: slot k has a row
#pragma unroll
    for (int i = 0; i < kWords; ++i) routed[i] = __ballot_sync(~0u, slots.id[i] >= 0);
    float factor = 1;  // of the shared expert's row, or of its gate vector
    if constexpr (kBackward) {
      if (rank_.d_topk_weights != nullptr) router_grads(token, slots, bad);
      if (rank_.d_x == nullptr) return;
      if (g_.shared_gate) factor = rank_.at<float>(plan::Buffer::d_sigma)[token];
    } else if (g_.shared_gate) {
      factor = shared_sigma(rank_.x + token * rank_.x_stride, rank_.shared_vector, g_.hidden);
    }
#pragma unroll 1
    for (int column = 0; column < g_.hidden; column += kPieces * kPiece) {
      add(token, slots, routed, factor, bad, column);
    }
  }

  __device__ __forceinline__ void router_grads(int token, const Slots& slots, bool bad) const {
    const auto* grads = rank_.at<float>(plan::Buffer::returned_grads, g_.rank);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int k = i * kWarp + static_cast<int>(lane());
      if (k >= g_.topk) continue;
      const int64_t slot = int64_t{token} * g_.topk + k;
      const float grad = slots.id[i] >= 0 ? grads[slot] : 0.0f;
      rank_.d_topk_weights[slot] = bad ? __int_as_float(0x7fffffff) : grad;
    }
  }

  // Predicated, so that many are issued in a row.
  __device__ static __forceinline__ uint4 load_if(bool wanted, const uint8_t* from) {
    uint4 v;
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
        " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
        " @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(from), "r"(uint32_t{wanted}));
    return v;
  }

  // What the sums of the lane's eight columns begin with.
  __device__ __forceinline__ void start(float (&acc)[kOwn], int token, float factor, int column,
                                        bool here) const {
    for (float& a : acc) a = 0;
    if (!g_.has_shared() || !here) return;
    const auto* row =
        rank_.at<uint8_t>(plan::Buffer::shared_rows) + (int64_t{token} * g_.hidden + column) * 2;
    const Eight r = Eight::unpack(load_if(true, row));
    if constexpr (kBackward) {
      for (int j = 0; j < kOwn; ++j) acc[j] = r.v[j];
      if (!g_.shared_gate) return;
      const __nv_bfloat16* gate = rank_.shared_vector + column;  // of no alignment
      for (int j = 0; j < kOwn; ++j) acc[j] = fmaf(factor, __bfloat162float(gate[j]), acc[j]);
    } else {
      for (int j = 0; j < kOwn; ++j) acc[j] = factor * r.v[j];
    }
  }

  // kPieces pieces of a token's columns from `first` on, their loads on the way together.
  __device__ __forceinline__ void add(int token, const Slots& slots,
                                      const uint32_t (&routed)[kWords], float factor, bool bad,
                                      int first) const {
    const int column = first + static_cast<int>(lane()) * kOwn;
    const int64_t row_bytes = int64_t{g_.hidden} * 2;
    const uint8_t* row = rank_.at<uint8_t>(plan::Buffer::returned_rows, g_.rank) +
                         int64_t{token} * g_.topk * row_bytes + column * 2;
    float acc[kPieces][kOwn];
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      start(acc[n], token, factor, column + n * kPiece, column + n * kPiece < g_.hidden);
    }
#pragma unroll 1
    for (int k0 = 0; k0 < g_.topk; k0 += kAtOnce) {
      const bool low = k0 < kWarp;
      const uint32_t wanted = (low ? routed[0] : routed[1]) >> k0 % kWarp;
      const float weights = low ? slots.weight[0] : slots.weight[1];
      uint4 raw[kAtOnce][kPieces];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
          raw[k][n] = load_if((wanted >> k & 1) != 0 && column + n * kPiece < g_.hidden,
                              row + n * kPiece * 2);
        }
        row += row_bytes;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float weight = __shfl_sync(~0u, weights, (k0 + k) % kWarp);
        if ((wanted >> k & 1) == 0) continue;
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
          const Eight r = Eight::unpack(raw[k][n]);
          for (int j = 0; j < kOwn; ++j) {
            acc[n][j] = kBackward ? acc[n][j] + r.v[j] : fmaf(weight, r.v[j], acc[n][j]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int at = column + n * kPiece;
      if (at >= g_.hidden) continue;
      if (bad) {
        for (float& a : acc[n]) a = __int_as_float(0x7fffffff);
      }
      const uint4 out{ptx::pack_bf16(acc[n][0], acc[n][1]), ptx::pack_bf16(acc[n][2], acc[n][3]),
                      ptx::pack_bf16(acc[n][4], acc[n][5]), ptx::pack_bf16(acc[n][6], acc[n][7])};
      ptx::store_global_16(kBackward ? rank_.d_x + token * rank_.d_x_stride + at
                                     : rank_.y + token * rank_.y_stride + at,
                           out);
    }
  }

  const RankState& rank_;
  const plan::Geometry& g_;
};

}  // namespace mok::cuda
