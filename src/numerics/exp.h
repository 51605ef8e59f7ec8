// exp for the CPU executor: no libm, no branch, no table. The same bits on every machine, and a
// loop over it vectorises at any width.
//
//   n = round(x / ln 2),  r = x - n ln 2 (|r| <= 0.35, two fused steps),  exp(x) = 2^n * p(r)
//
// p is the Taylor polynomial, long enough for its remainder to vanish below half an ulp. 2^n is
// applied in two halves: all of it does not fit one factor where the result is subnormal or about
// to overflow, and then only the second product rounds. NaN passes: each comparison is false for
// it, and NaN times whatever the exponent bits become stays NaN.
#pragma once

#include <cstdint>

#include "numerics/hd.h"

namespace mok::numerics {

// Relative error below 1.2e-7 where the result is normal, half a step below that.
MOK_INLINE float exp_portable(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x > 89.0f ? 89.0f : x;             // infinity from 88.73 on
  x = x < -104.0f ? -104.0f : x;         // zero from -103.98 on
  const float shifted = fused(x, 1.44269504f, kShift);
  const float n = shifted - kShift;
  float r = fused(n, -0x1.62e430p-1f, x);
  r = fused(n, 0x1.05c610p-29f, r);
  float p = 1.0f / 5040;
  p = fused(p, r, 1.0f / 720);
  p = fused(p, r, 1.0f / 120);
  p = fused(p, r, 1.0f / 24);
  p = fused(p, r, 1.0f / 6);
  p = fused(p, r, 0.5f);
  p = fused(p * r, r, r) + 1.0f;
  const int32_t exponent =
      static_cast<int32_t>(bit_cast<uint32_t>(shifted) - bit_cast<uint32_t>(kShift));
  const int32_t half = exponent >> 1;
  const uint32_t bits0 = static_cast<uint32_t>(half + 127) << 23;
  const uint32_t bits1 = (static_cast<uint32_t>(exponent) - static_cast<uint32_t>(half) + 127u)
                         << 23;
  return p * bit_cast<float>(bits0) * bit_cast<float>(bits1);
}

// Relative error below 3e-16.
MOK_INLINE double exp_portable(double x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  x = x > 710.0 ? 710.0 : x;
  x = x < -746.0 ? -746.0 : x;
  const double shifted = fused(x, 1.4426950408889634, kShift);
  const double n = shifted - kShift;
  double r = fused(n, -0x1.62e42fefa39efp-1, x);
  r = fused(n, -0x1.abc9e3b39803fp-56, r);
  double p = 1.0 / 6227020800;
  p = fused(p, r, 1.0 / 479001600);
  p = fused(p, r, 1.0 / 39916800);
  p = fused(p, r, 1.0 / 3628800);
  p = fused(p, r, 1.0 / 362880);
  p = fused(p, r, 1.0 / 40320);
  p = fused(p, r, 1.0 / 5040);
  p = fused(p, r, 1.0 / 720);
  p = fused(p, r, 1.0 / 120);
  p = fused(p, r, 1.0 / 24);
  p = fused(p, r, 1.0 / 6);
  p = fused(p, r, 0.5);
  p = fused(p * r, r, r) + 1.0;
  const int64_t exponent =
      static_cast<int64_t>(bit_cast<uint64_t>(shifted) - bit_cast<uint64_t>(kShift));
  const int64_t half = exponent >> 1;
  const uint64_t bits0 = static_cast<uint64_t>(half + 1023) << 52;
  const uint64_t bits1 = (static_cast<uint64_t>(exponent) - static_cast<uint64_t>(half) + 1023u)
                         << 52;
  return p * bit_cast<double>(bits0) * bit_cast<double>(bits1);
}

}  // namespace mok::numerics
