// Functions that run on host and device, and the two primitives that they need on both.
#pragma once

#include <math.h>

#ifdef __CUDACC__
#define MOK_HD __host__ __device__
#define MOK_INLINE __host__ __device__ __forceinline__
#else
#define MOK_HD
// Always inlined: a caller compiled for a wider instruction set gets its own copy, which its loops
// can vectorise, and no copy made for another instruction set is ever linked in its place.
#define MOK_INLINE [[gnu::always_inline]] inline
#endif

namespace mok::numerics {

template <class To, class From>
MOK_INLINE constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// a * b + c with one rounding. Written out wherever it is meant: the library is compiled without
// contraction, so that every machine computes the same bits.
MOK_INLINE float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
MOK_INLINE double fused(double a, double b, double c) { return ::fma(a, b, c); }

}  // namespace mok::numerics
