// SwiGLU and its derivative on pairs of bf16, for the epilogues: numerics/swiglu.h with the
// device's fast exponential and reciprocal.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/ptx/wgmma.cuh"

namespace mok::cuda {

// min and max that let NaN through, as the contract asks.
__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// 1 / (1 + exp(-g)). Relative error about 1e-6 for |g| < 20, growing as |g| * 6e-8 below that;
// under g = -87 the true value (< 1e-36) is flushed to 0.
__device__ __forceinline__ float fast_sigmoid(float g) {
  constexpr float kLog2e = 1.4426950408889634f;
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(g * -kLog2e));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  return s;
}

// silu(g) * u in fp32, as IEEE orders it: silu(-inf) = -inf * 0 = NaN, silu(inf) = inf, NaN stays.
__device__ __forceinline__ float swiglu(float g, float u) { return g * fast_sigmoid(g) * u; }

__device__ __forceinline__ uint32_t swiglu_pair(uint32_t g, uint32_t u, float limit) {
  const float g0 = min_nan(low_float(g), limit), g1 = min_nan(high_float(g), limit);
  const float u0 = max_nan(min_nan(low_float(u), limit), -limit);
  const float u1 = max_nan(min_nan(high_float(u), limit), -limit);
  return ptx::pack_bf16(swiglu(g0, u0), swiglu(g1, u1));
}

// `value`, or 0 when `room` is negative. Without a predicate: an epilogue has more of these in
// flight than there are. NaN room leaves the value: its sign is + on this hardware.
__device__ __forceinline__ float within(float room, float value) {
  return __int_as_float(__float_as_int(value) & ~(__float_as_int(room) >> 31));
}

// What backward makes of one pair; h is not yet times w. kLimited: there is a limit; without one a
// third of the instructions go.
struct SwigluGrads {
  uint32_t d_gate, d_up, hidden;
};
template <bool kLimited>
__device__ __forceinline__ SwigluGrads swiglu_grad_pair(uint32_t g, uint32_t u, uint32_t d_h,
                                                        float w, float limit) {
  float d_gate[2], d_up[2], hidden[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float g_raw = i == 0 ? low_float(g) : high_float(g);
    const float u_raw = i == 0 ? low_float(u) : high_float(u);
    const float g_in = kLimited ? min_nan(g_raw, limit) : g_raw;
    const float u_in = kLimited ? max_nan(min_nan(u_raw, limit), -limit) : u_raw;
    const float s = fast_sigmoid(g_in);
    const float silu = g_in * s;
    const float d_silu = s * fmaf(g_in, 1.0f - s, 1.0f);
    const float scaled = w * (i == 0 ? low_float(d_h) : high_float(d_h));
    hidden[i] = silu * u_in;
    // Beyond a limit the gradient is 0; at it, and for NaN, it passes.
    d_gate[i] = scaled * (u_in * d_silu);
    d_up[i] = scaled * silu;
    if constexpr (kLimited) {
      d_gate[i] = within(limit - g_raw, d_gate[i]);
      d_up[i] = within(limit - fabsf(u_raw), d_up[i]);
    }
  }
  const uint32_t h = ptx::pack_bf16(hidden[0], hidden[1]);
  return {ptx::pack_bf16(d_gate[0], d_gate[1]), ptx::pack_bf16(d_up[0], d_up[1]), h};
}

// A pair of h: into its sum with d_h, then times the router weight.
__device__ __forceinline__ uint32_t weigh(uint32_t h, uint32_t d_h, float w, float& sum) {
  sum = fmaf(low_float(d_h), low_float(h), sum);
  sum = fmaf(high_float(d_h), high_float(h), sum);
  return ptx::pack_bf16(w * low_float(h), w * high_float(h));
}

}  // namespace mok::cuda
