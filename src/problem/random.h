// Numbers from a counter: value i of stream s under a seed is a pure function of (seed, s, i), made
// of integer arithmetic and single IEEE operations, so it is the same on every machine and can be
// computed anywhere in a tensor without what stands before it.
//
// Bits: the SplitMix64 sequence (Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", 2014) started at a hash of (seed, stream): mix(key + i * golden gamma).
// Normal values: the sum of the four 16-bit quarters of one such word, centred and scaled to
// variance 1 (Irwin-Hall of 4; within +-3.47).
#pragma once

#include <cstdint>

#include "numerics/bf16.h"

namespace mok::problem {

constexpr uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

class Stream {
 public:
  constexpr Stream(uint64_t seed, uint64_t stream)
      : key_(mix(mix(seed + kGolden) ^ (stream * kGolden))) {}

  constexpr uint64_t bits(uint64_t i) const { return mix(key_ + i * kGolden); }
  // Uniform in [0, n), n < 2^32 (the bias of 2^-32 n does not matter here).
  constexpr uint32_t below(uint64_t i, uint32_t n) const {
    return static_cast<uint32_t>(((bits(i) >> 32) * n) >> 32);
  }
  // Uniform in [0, 1), 53 bits.
  constexpr double uniform(uint64_t i) const {
    return static_cast<double>(static_cast<int64_t>(bits(i) >> 11)) * 0x1p-53;
  }
  // The four quarters' sum minus its mean; standard deviation 65536 / sqrt(3).
  constexpr int32_t bell(uint64_t i) const {
    const uint64_t z = bits(i);
    const uint64_t pairs = (z & 0x0000ffff0000ffffu) + ((z >> 16) & 0x0000ffff0000ffffu);
    return static_cast<int32_t>((pairs & 0xffffffffu) + (pairs >> 32)) - 131070;
  }

 private:
  uint64_t key_;
};

// What turns a bell value into a normal one of standard deviation `scale`.
template <class Acc>
constexpr Acc normal_factor(double scale) {
  constexpr double kSqrt3 = 1.7320508075688772;
  return static_cast<Acc>(scale * kSqrt3 / 65536);
}

// Values of whole steps: step * k for an integer |k| <= most, exact in every storage type. No step:
// any value.
struct Grid {
  float step = 0;  // a power of two
  int32_t most = 0;
};

// The step nearest to bell * factor, factor as normal_factor<float> of a scale counted in steps.
constexpr int32_t nearest_step(int32_t bell, float factor, int32_t most) {
  const float steps = static_cast<float>(bell) * factor;
  const int32_t k = static_cast<int32_t>(steps < 0 ? steps - 0.5f : steps + 0.5f);
  return k > most ? most : k < -most ? -most : k;
}

template <class T>
void fill_steps(const Stream& stream, uint64_t first, int64_t n, double scale, const Grid& grid,
                T* out) {
  using S = numerics::Storage<T>;
  const auto factor = normal_factor<float>(scale / static_cast<double>(grid.step));
  for (int64_t j = 0; j < n; ++j) {
    const int32_t bell = stream.bell(first + static_cast<uint64_t>(j));
    const float value = static_cast<float>(nearest_step(bell, factor, grid.most)) * grid.step;
    out[j] = S::store(static_cast<numerics::Acc<T>>(value));
  }
}

// out[j] = scale * normal(first + j). bf16 is the rounding of the fp32 value; fp64 has more digits.
template <class T>
void fill_normal(const Stream& stream, uint64_t first, int64_t n, double scale, T* out) {
  using S = numerics::Storage<T>;
  const auto factor = normal_factor<numerics::Acc<T>>(scale);
  constexpr int kChunk = 512;
  int32_t bell[kChunk];
  for (int64_t base = 0; base < n; base += kChunk) {
    const int m = static_cast<int>(n - base < kChunk ? n - base : kChunk);
    for (int j = 0; j < m; ++j) bell[j] = stream.bell(first + static_cast<uint64_t>(base + j));
    for (int j = 0; j < m; ++j) {
      out[base + j] = S::store(static_cast<numerics::Acc<T>>(bell[j]) * factor);
    }
  }
}

}  // namespace mok::problem
