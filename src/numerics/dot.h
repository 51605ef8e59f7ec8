// Dot products in one fixed order: d_topk_weights = d_h . h, the shared gate's x . gate, and
// d_sigma = d_y . r_s.
//
// The vector is cut into blocks of 64. Inside a block lane l of 16 takes elements l, l + 16, ... by
// fused multiply-adds, then the lanes are added as a tree (l += l + 8, 4, 2, 1). The blocks' sums
// are added in order, so the bits do not depend on the SIMD width. Where the vector is spread over
// tiles of columns (d_topk_weights: a d_hidden tile's, three blocks or two), a tile adds its blocks
// in order and the tiles' sums are added in column order.
#pragma once

#include <cstdint>

#include "numerics/bf16.h"
#include "numerics/hd.h"

namespace mok::numerics {

inline constexpr int kDotBlock = 64;
inline constexpr int kDotLanes = 16;

// One block: n <= 64 elements, those past n do not exist (they are not multiplied).
template <class A, class TA, class TB>
MOK_INLINE A dot_block(const TA* a, const TB* b, int n) {
  A lane[kDotLanes] = {};
  const int whole = n / kDotLanes * kDotLanes;
  for (int i = 0; i < whole; i += kDotLanes) {
    for (int l = 0; l < kDotLanes; ++l) {
      lane[l] = fused(A(Storage<TA>::load(a[i + l])), A(Storage<TB>::load(b[i + l])), lane[l]);
    }
  }
  for (int i = whole; i < n; ++i) {
    A& sum = lane[i - whole];
    sum = fused(A(Storage<TA>::load(a[i])), A(Storage<TB>::load(b[i])), sum);
  }
  for (int step = kDotLanes / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
  }
  return lane[0];
}

template <class A, class TA, class TB>
MOK_INLINE A dot(const TA* a, const TB* b, int64_t n) {
  A sum = 0;
  for (int64_t i = 0; i < n; i += kDotBlock) {
    const int64_t left = n - i;
    sum += dot_block<A>(a + i, b + i, static_cast<int>(left < kDotBlock ? left : kDotBlock));
  }
  return sum;
}

}  // namespace mok::numerics
