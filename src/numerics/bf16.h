// bf16 (1 sign, 8 exponent, 7 fraction bits) and the storage types of the layer.
#pragma once

#include <cstdint>

#include "numerics/hd.h"

namespace mok::numerics {

struct bf16 {
  uint16_t bits;
};

MOK_INLINE float to_float(bf16 v) { return bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }

// Round to nearest, ties to even. A NaN stays one (quiet); overflow gives infinity.
MOK_INLINE bf16 to_bf16(float v) {
  const uint32_t bits = bit_cast<uint32_t>(v);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x0040u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bf16{static_cast<uint16_t>(is_nan ? quiet : rounded)};
}

// One rounding, although a float stands in between: the float is rounded *to odd* (cut off, and the
// last bit set when anything was lost), which keeps the side of every bf16 tie; a float has more
// than the two extra bits that this takes, among the subnormal numbers too.
MOK_INLINE bf16 to_bf16(double v) {
  const float nearest = static_cast<float>(v);
  const double back = static_cast<double>(nearest);
  const bool lost = back != v && v == v;
  const bool too_big = (v < 0 ? -back : back) > (v < 0 ? -v : v);
  uint32_t bits = bit_cast<uint32_t>(nearest);
  if (lost) bits = (too_big ? bits - 1u : bits) | 1u;
  return to_bf16(bit_cast<float>(bits));
}

// How a storage type is accumulated and rounded. In fp32 and fp64 every rounding of the contract
// is left out, so load, store and round are the identity there.
template <class T>
struct Storage;

template <>
struct Storage<bf16> {
  using Acc = float;
  MOK_INLINE static float load(bf16 v) { return to_float(v); }
  MOK_INLINE static bf16 store(float v) { return to_bf16(v); }
  MOK_INLINE static float round(float v) { return to_float(to_bf16(v)); }
};

template <>
struct Storage<float> {
  using Acc = float;
  MOK_INLINE static float load(float v) { return v; }
  MOK_INLINE static float store(float v) { return v; }
  MOK_INLINE static float round(float v) { return v; }
};

template <>
struct Storage<double> {
  using Acc = double;
  MOK_INLINE static double load(double v) { return v; }
  MOK_INLINE static double store(double v) { return v; }
  MOK_INLINE static double round(double v) { return v; }
};

template <class T>
using Acc = typename Storage<T>::Acc;

}  // namespace mok::numerics
