// Arithmetic on pairs: bf16 x 2, half x 2, E4M3 x 2, 16-bit integers x 2.
#pragma once

#include <cstdint>

namespace mok::cuda::ptx {

__device__ __forceinline__ uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Of a number and a NaN: the number.
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t abs_bf16x2(uint32_t a) { return a & 0x7fff7fffu; }
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// The low two E4M3 codes of a word, as half-precision numbers, which hold them exactly.
__device__ __forceinline__ uint32_t half_of_e4m3x2(uint32_t codes) {
  uint32_t r;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n"
      " cvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(r)
      : "r"(codes));
  return r;
}
// The other way: to nearest, ties to even, saturating; a NaN gives 0x7f. In the low half.
__device__ __forceinline__ uint32_t e4m3x2_of(float low, float high) {
  uint32_t r;
  asm("{\n .reg .b16 pair;\n cvt.rn.satfinite.e4m3x2.f32 pair, %1, %2;\n cvt.u32.u16 %0, pair;\n}"
      : "=r"(r)
      : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float low_half(uint32_t pair) {
  float r;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.f32.f16 %0, low;\n}"
      : "=f"(r)
      : "r"(pair));
  return r;
}
__device__ __forceinline__ float high_half(uint32_t pair) {
  float r;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.f32.f16 %0, high;\n}"
      : "=f"(r)
      : "r"(pair));
  return r;
}

}  // namespace mok::cuda::ptx
