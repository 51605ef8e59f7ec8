// Dot products of two rows of one token: x . gate and d_y . r_s.
//
// The order of additions is fixed: 32 chains of fused multiply-adds, chain c over elements c, c +
// 32, ..., then the chains are added in pairs, c with c + 16, 8, 4, 2, 1. How many lanes share the
// chains of a token changes no bit.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/tile_types.cuh"
#include "numerics/exp.h"

namespace mok::cuda {

inline constexpr int kChains = 32;

// kCount consecutive elements as they lie in memory; aligned to their size.
template <int kCount>
struct Elements {
  __nv_bfloat16 e[kCount];
  __device__ __forceinline__ static Elements load(const __nv_bfloat16* from) {
    Elements out;
    if constexpr (kCount == 8) {
      const uint4 raw = *reinterpret_cast<const uint4*>(from);
      memcpy(&out, &raw, sizeof raw);
    } else {
      for (int i = 0; i < kCount; ++i) out.e[i] = from[i];
    }
    return out;
  }
  // Of a vector whose alignment nobody promised.
  __device__ __forceinline__ static Elements load_unaligned(const __nv_bfloat16* from) {
    Elements out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.e[i] = from[i];
    return out;
  }
};

// kLanes neighbouring lanes of a warp work on one token; all of them get the sum. n: a multiple of
// 64. Rows of `a` (and of `b`) are aligned to 16 bytes where kLanes is 4.
template <int kLanes, bool kAlignedB>
__device__ __forceinline__ float token_dot(const __nv_bfloat16* a, const __nv_bfloat16* b, int n) {
  constexpr int kOwn = kChains / kLanes;  // chains of a lane
  static_assert(kOwn == 1 || kOwn == 8);
  using Own = Elements<kOwn>;
  const int first = threadIdx.x % kLanes * kOwn;
  float sum[kOwn] = {};
  constexpr int kAtOnce = kOwn == 1 || kAlignedB ? 4 : 2;  // what registers there are
#pragma unroll kAtOnce
  for (int h = first; h < n; h += kChains) {
    const Own va = Own::load(a + h);
    const Own vb = kAlignedB ? Own::load(b + h) : Own::load_unaligned(b + h);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sum[i] = fmaf(__bfloat162float(va.e[i]), __bfloat162float(vb.e[i]), sum[i]);
    }
  }
#pragma unroll
  for (int d = kChains / 2; d > 0; d /= 2) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (d >= kOwn) {
        sum[i] += __shfl_xor_sync(~0u, sum[i], d / kOwn);
      } else if (i < d) {
        sum[i] += sum[i + d];
      }
    }
  }
  return sum[0];
}

// sigmoid(x . gate)
template <int kLanes>
__device__ __forceinline__ float shared_sigma(const __nv_bfloat16* x, const __nv_bfloat16* gate,
                                              int hidden) {
  const float dot = token_dot<kLanes, kLanes == kWarp>(x, gate, hidden);
  return 1.0f / (1.0f + numerics::exp_portable(-dot));
}

}  // namespace mok::cuda
