// MXFP8 of the OCP Microscaling Formats specification, 1.0: blocks of 32 elements in E4M3 that
// share a power of two (E8M0). Precision fp8 has the same numbers in larger blocks (blocks.h).
// Every function here works on bits or is exact, so host and device agree whatever their treatment
// of subnormal numbers. What becomes of infinities and NaN is in docs/numerics.md.
#pragma once

#include <cstdint>

#include "numerics/bf16.h"
#include "numerics/hd.h"

namespace mok::numerics {

struct e4m3 {  // 1 sign, 4 exponent (bias 7), 3 fraction bits; no infinity, NaN is S.1111.111
  uint8_t bits;
};

struct e8m0 {  // 2^(bits - 127); 255 is NaN
  uint8_t bits;
};

inline constexpr int kMxBlock = 32;            // elements of a block
inline constexpr float kE4m3Max = 448.0f;      // 1.75 * 2^8
inline constexpr float kMxAmaxFloor = 1e-12f;  // so that a block of zeros has a finite scale

// c ? a : b, by mask: a conditional would come back as a branch around a's computation, and the
// loop would not vectorise.
MOK_INLINE uint32_t mx_select(bool c, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(c);
  return (a & mask) | (b & ~mask);
}

// ---- E4M3 ------------------------------------------------------------------------------------

// To nearest, ties to even; beyond +-448 (infinities included) +-448; NaN gives 0x7f. No branches:
// loops over it vectorise.
MOK_INLINE e4m3 to_e4m3(float v) {
  const uint32_t bits = bit_cast<uint32_t>(v);
  const uint32_t size = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 24 & 0x80u;
  // Normal: 20 of 23 fraction bits go.
  const uint32_t rounded = size + 0x7ffffu + ((size >> 20) & 1u);
  const uint32_t normal = (rounded >> 20) - ((127u - 7u) << 3);
  // Below 2^-6: a multiple of 2^-9; that is the last place of numbers about 2^14.
  const uint32_t small =
      bit_cast<uint32_t>(bit_cast<float>(size) + 0x1p14f) - bit_cast<uint32_t>(0x1p14f);
  uint32_t code = mx_select(size < bit_cast<uint32_t>(0x1p-6f), small, normal);
  code = mx_select(size >= bit_cast<uint32_t>(kE4m3Max), 0x7eu, code) | sign;
  return e4m3{static_cast<uint8_t>(mx_select(size > 0x7f800000u, 0x7fu, code))};
}

MOK_INLINE float to_float(e4m3 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x80u) << 24;
  const uint32_t code = v.bits & 0x7fu;
  const uint32_t normal = (code << 20) + ((127u - 7u) << 23);
  const uint32_t small = bit_cast<uint32_t>(static_cast<float>(static_cast<int>(code)) * 0x1p-9f);
  const uint32_t size = mx_select(code < 8u, small, mx_select(code == 0x7fu, 0x7fc00000u, normal));
  return bit_cast<float>(sign | size);
}

// ---- E8M0 ------------------------------------------------------------------------------------

MOK_INLINE float to_float(e8m0 s) {
  if (s.bits == 255) return bit_cast<float>(0x7fc00000u);
  if (s.bits == 0) return bit_cast<float>(0x00400000u);  // 2^-127, a subnormal float
  return bit_cast<float>(static_cast<uint32_t>(s.bits) << 23);
}

// The largest |v| of a block as the bits of a bf16, taken one element at a time from 0: a NaN is
// passed over. On bits, so that loops over it vectorise.
MOK_INLINE uint32_t mx_amax(uint32_t amax, bf16 v) {
  const uint32_t bits = v.bits & 0x7fffu;
  const uint32_t size = mx_select(bits > 0x7f80u, 0u, bits);
  return amax > size ? amax : size;
}

// The smallest power of two >= max(amax, 1e-12) / 448, found by comparing fractions with 1.75: no
// division, no rounding. An infinite amax gives 2^127, the largest there is.
MOK_INLINE e8m0 mx_scale(float amax) {
  float floored = kMxAmaxFloor;  // a copy: device code has no address for the constant
  if (amax > floored) floored = amax;
  const uint32_t size = bit_cast<uint32_t>(floored);
  if (size >= 0x7f800000u) return e8m0{254};
  const uint32_t exponent = (size >> 23) - 8u;  // that of amax / 256
  const bool above = (size & 0x7fffffu) > 0x600000u;
  return e8m0{static_cast<uint8_t>(exponent + (above ? 1u : 0u))};
}

// 1 / scale, exact. For scales that mx_scale gives (>= 2^-48); 1 / 2^127 is a subnormal float.
MOK_INLINE float mx_inverse(e8m0 scale) {
  return to_float(e8m0{static_cast<uint8_t>(254 - scale.bits)});
}

// An element of a block. Where the product is not exact it is below the last place of E4M3.
MOK_INLINE e4m3 mx_quantize(float v, float inverse) { return to_e4m3(v * inverse); }

// scale = a * b, neither of which is subnormal; 255: NaN.
struct MxFactors {
  float a, b;
};
MOK_INLINE MxFactors mx_factors(e8m0 scale) {
  const int half = (static_cast<int>(scale.bits) - 127) / 2;
  const int rest = static_cast<int>(scale.bits) - 127 - half;
  const uint32_t a = scale.bits == 255 ? 0x7fc00000u : static_cast<uint32_t>(127 + half) << 23;
  return {bit_cast<float>(a), bit_cast<float>(static_cast<uint32_t>(127 + rest) << 23)};
}

// value * scale in bf16: exact for every scale that mx_scale gives, or infinity where it is 2^128
// or more: what was infinite, and finite numbers from 1.9375 * 2^127 on, which round up to 2^128.
// (Scales below 2^-117, of foreign tensors: rounded among bf16's subnormal numbers.)
MOK_INLINE bf16 mx_dequantize(e4m3 v, MxFactors f) { return to_bf16(to_float(v) * f.a * f.b); }
MOK_INLINE bf16 mx_dequantize(e4m3 v, e8m0 scale) { return mx_dequantize(v, mx_factors(scale)); }

// ---- where a scale lies ----------------------------------------------------------------------

// Scales of a matrix stand in tiles of 128 rows by 128 columns, 512 bytes each, tile rows first:
// uint8 [ceil(rows / 128), ceil(columns / 128), 32, 16]. Blocks outside the matrix hold the scale
// of a block of zeros.
inline constexpr int kMxTile = 128;
inline constexpr int kMxTileBytes = 512;
inline constexpr uint8_t kMxZeroScale = 79;  // 2^-48, mx_scale(0)

MOK_HD constexpr int64_t mx_tiles(int64_t size) { return (size + kMxTile - 1) / kMxTile; }

// Byte of the scale of row `row`, block `block` (32 columns); `tiles` = mx_tiles(columns).
MOK_HD constexpr int64_t mx_scale_offset(int64_t row, int64_t block, int64_t tiles) {
  const int64_t tile = row / kMxTile * tiles + block / 4;
  const int64_t r = row % kMxTile;
  return tile * kMxTileBytes + r % 32 * 16 + r / 32 * 4 + block % 4;
}

}  // namespace mok::numerics
