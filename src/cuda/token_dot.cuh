// Dot products of two rows of one token: x . gate and d_y . r_s.
//
// The order of additions is fixed: 32 chains of fused multiply-adds, lane c over elements c, c +
// 32,
// ..., then the chains are added in pairs, c with c + 16, 8, 4, 2, 1.
#pragma once

#include <cuda_bf16.h>

#include "cuda/tile_types.cuh"
#include "numerics/exp.h"

namespace mok::cuda {

// A warp; all lanes get the sum.
__device__ __forceinline__ float token_dot(const __nv_bfloat16* a, const __nv_bfloat16* b, int n) {
  float sum = 0;
#pragma unroll 4
  for (int h = threadIdx.x % kWarp; h < n; h += kWarp) {
    sum = fmaf(__bfloat162float(a[h]), __bfloat162float(b[h]), sum);
  }
  for (int d = kWarp / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}

// sigmoid(x . gate)
__device__ __forceinline__ float shared_sigma(const __nv_bfloat16* x, const __nv_bfloat16* gate,
                                              int hidden) {
  return 1.0f / (1.0f + numerics::exp_portable(-token_dot(x, gate, hidden)));
}

}  // namespace mok::cuda
