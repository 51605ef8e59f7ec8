// MXFP8 (numerics/mxfp8.h) on pairs of bf16 in registers: for rows on their way and for epilogues.
#pragma once

#include "cuda/ptx/pairs.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "numerics/mxfp8.h"

namespace mok::cuda {

// ---- codes -> bf16 --------------------------------------------------------------------------

// Scales that quantisers here give, 2^-48 .. 2^127.
__device__ __forceinline__ float mx_scale_of(uint8_t bits) {
  return __uint_as_float(uint32_t{bits} << 23);
}

// Eight codes in order times their scale: numerics::mx_dequantize.
__device__ __forceinline__ uint4 mx_dequantize_eight(uint32_t low4, uint32_t high4, float scale) {
  const auto pair = [&](uint32_t codes) {
    const uint32_t h = ptx::half_of_e4m3x2(codes);
    return ptx::pack_bf16(ptx::low_half(h) * scale, ptx::high_half(h) * scale);
  };
  return uint4{pair(low4), pair(low4 >> 16), pair(high4), pair(high4 >> 16)};
}

// ---- bf16 -> E4M3 and back, in one -----------------------------------------------------------
//
// What a product reads of a block is each element rounded to nearest at some last place: 2^-3 of
// its own power of two, or, below 2^-6 of the scale, 2^-9 of the scale. Adding 1.5 * 2^7 of that
// place to a bf16 rounds there, with ties to even, and subtracting it leaves the rounded element.
// So no conversion is needed, and both of a pair are done at once; all of it divided by 2^8, lest
// what is added overflows. A NaN stays one, infinity too, as they do on the way through E4M3.

// The largest |v| of a lane's part of a block, in each half of the word.
template <int kWords>
__device__ __forceinline__ uint32_t mx_amax(const uint32_t (&v)[kWords]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) amax = ptx::max_bf16x2(amax, ptx::abs_bf16x2(v[i]));
  return amax;
}
// Of both halves, where they are of one block.
__device__ __forceinline__ uint32_t mx_amax_of_halves(uint32_t amax) {
  return ptx::max_bf16x2(amax, __byte_perm(amax, 0, 0x1032));
}
// With that of the lane `distance` away, which has another part.
__device__ __forceinline__ uint32_t mx_amax_across(uint32_t amax, int distance) {
  return ptx::max_bf16x2(amax, __shfl_xor_sync(~0u, amax, distance));
}
// amax, two blocks at once -> 2^-6 of the scale of each. The scale is numerics::mx_scale's.
__device__ __forceinline__ uint32_t mx_small(uint32_t amax) {
  constexpr uint32_t kFloor = 0x2b802b80u;  // 2^-40, whose scale is that of 1e-12
  const uint32_t size = ptx::max_u16x2(amax, kFloor);
  // Up by one power of two where the fraction is above 1.75; amax / 256, and 2^-6 of that.
  const uint32_t small = (size + 0x001f001fu - 0x07000700u) & 0xff80ff80u;
  // An infinite amax has the scale 2^127, 2^7 more.
  const uint32_t infinite = (size + 0x00800080u) & 0x80008000u;
  return (infinite >> 8) * 7 + small;
}
// A pair of one block; `small` in both halves.
__device__ __forceinline__ uint32_t mx_round_pair(uint32_t v, uint32_t small) {
  constexpr uint32_t kDown = 0x3b803b80u, kUp = 0x43804380u;  // 2^-8, 2^8
  // 1.5 * 2^7 * 2^-3 of the element's power of two, divided by 2^8.
  const uint32_t shift = ptx::max_u16x2(v & 0x7f807f80u, small) - 0x01c001c0u;
  const uint32_t rounded =
      ptx::mul_bf16x2(ptx::sub_bf16x2(ptx::fma_bf16x2(v, kDown, shift), shift), kUp);
  return (rounded & 0x7fff7fffu) | (v & 0x80008000u);  // -0 stays -0
}

// A block of 32 of which each of a quad's lanes has eight: whole warp.
__device__ __forceinline__ void mx_round_block(uint32_t (&v)[4]) {
  const uint32_t amax = mx_amax_across(mx_amax_across(mx_amax(v), 1), 2);
  const uint32_t small = mx_small(mx_amax_of_halves(amax));
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = mx_round_pair(v[i], small);
}
// Three such blocks: their shuffles are on their way together.
__device__ __forceinline__ void mx_round_blocks(uint32_t (&a)[4], uint32_t (&b)[4],
                                                uint32_t (&c)[4]) {
  const uint32_t of_a = mx_amax(a), of_b = mx_amax(b);
  uint32_t ab = ptx::max_bf16x2(__byte_perm(of_a, of_b, 0x5410), __byte_perm(of_a, of_b, 0x7632));
  uint32_t cc = mx_amax(c);
#pragma unroll
  for (int distance = 1; distance <= 2; ++distance) {
    const uint32_t other_ab = __shfl_xor_sync(~0u, ab, distance);
    const uint32_t other_cc = __shfl_xor_sync(~0u, cc, distance);
    ab = ptx::max_bf16x2(ab, other_ab);
    cc = ptx::max_bf16x2(cc, other_cc);
  }
  ab = mx_small(ab);
  cc = mx_small(mx_amax_of_halves(cc));
  const uint32_t small_a = __byte_perm(ab, 0, 0x1010), small_b = __byte_perm(ab, 0, 0x3232);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = mx_round_pair(a[i], small_a);
    b[i] = mx_round_pair(b[i], small_b);
    c[i] = mx_round_pair(c[i], cc);
  }
}

}  // namespace mok::cuda
