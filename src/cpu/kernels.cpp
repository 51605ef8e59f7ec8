#include "cpu/kernels.h"

#include <atomic>
#include <type_traits>

#include "numerics/dot.h"
#include "numerics/reduce.h"
#include "numerics/swiglu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mok::cpu {

// Any machine: the compiler's vectors where it has a fused multiply-add, else the C library's.
namespace generic {
#define MOK_TARGET
#define MOK_ISA_NAME "generic"
inline constexpr int kMicroRows = 4;

template <class A>
struct Vec {
  static constexpr int lanes = 16 / static_cast<int>(sizeof(A)) * 2;
  struct Reg {
    A lane[lanes];
  };
  static Reg load(const A* p) {
    Reg r;
    for (int i = 0; i < lanes; ++i) r.lane[i] = p[i];
    return r;
  }
  static void store(A* p, const Reg& r) {
    for (int i = 0; i < lanes; ++i) p[i] = r.lane[i];
  }
  static Reg set(A v) {
    Reg r;
    for (int i = 0; i < lanes; ++i) r.lane[i] = v;
    return r;
  }
  static Reg fma(const Reg& a, const Reg& b, const Reg& c) {
    Reg r;
    for (int i = 0; i < lanes; ++i) r.lane[i] = numerics::fused(a.lane[i], b.lane[i], c.lane[i]);
    return r;
  }
};

template <class T>
struct Transpose {
  static constexpr int columns = 1, depth = 1;
  static void run(Acc<T>* out, int, const T* in, int64_t) {
    *out = numerics::Storage<T>::load(*in);
  }
};

#include "cpu/kernels.inc"
#undef MOK_TARGET
#undef MOK_ISA_NAME
}  // namespace generic

#if defined(__x86_64__)

namespace avx2 {
#define MOK_TARGET __attribute__((target("avx2,fma")))
#define MOK_ISA_NAME "avx2"
inline constexpr int kMicroRows = 6;

template <class A>
struct Vec;
template <>
struct Vec<float> {
  static constexpr int lanes = 8;
  using Reg = __m256;
  MOK_TARGET static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  MOK_TARGET static void store(float* p, Reg v) { _mm256_storeu_ps(p, v); }
  MOK_TARGET static Reg set(float v) { return _mm256_set1_ps(v); }
  MOK_TARGET static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
};
template <>
struct Vec<double> {
  static constexpr int lanes = 4;
  using Reg = __m256d;
  MOK_TARGET static Reg load(const double* p) { return _mm256_loadu_pd(p); }
  MOK_TARGET static void store(double* p, Reg v) { _mm256_storeu_pd(p, v); }
  MOK_TARGET static Reg set(double v) { return _mm256_set1_pd(v); }
  MOK_TARGET static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_pd(a, b, c); }
};

// columns x depth elements of K-contiguous rows -> [depth][columns] accumulators.
template <class T>
struct Transpose {
  static constexpr int columns = 1, depth = 1;
  static void run(Acc<T>* out, int, const T* in, int64_t) { *out = *in; }
};

MOK_TARGET inline void transpose_8x8(__m256i (&r)[8]) {
  __m256 t[8], s[8];
  for (int i = 0; i < 8; i += 2) {
    const __m256 a = _mm256_castsi256_ps(r[i]), b = _mm256_castsi256_ps(r[i + 1]);
    t[i] = _mm256_unpacklo_ps(a, b);
    t[i + 1] = _mm256_unpackhi_ps(a, b);
  }
  for (int i = 0; i < 8; i += 4) {
    s[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    s[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    s[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    s[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_castps_si256(_mm256_permute2f128_ps(s[i], s[i + 4], 0x20));
    r[i + 4] = _mm256_castps_si256(_mm256_permute2f128_ps(s[i], s[i + 4], 0x31));
  }
}

template <>
struct Transpose<float> {
  static constexpr int columns = 8, depth = 8;
  MOK_TARGET static void run(float* out, int pitch, const float* in, int64_t stride) {
    __m256i r[8];
    for (int i = 0; i < 8; ++i) {
      r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i * stride));
    }
    transpose_8x8(r);
    for (int i = 0; i < 8; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * pitch), r[i]);
    }
  }
};

// Pairs of bf16 are moved as 32-bit values and taken apart afterwards.
template <>
struct Transpose<bf16> {
  static constexpr int columns = 8, depth = 16;
  MOK_TARGET static void run(float* out, int pitch, const bf16* in, int64_t stride) {
    __m256i r[8];
    for (int i = 0; i < 8; ++i) {
      r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i * stride));
    }
    transpose_8x8(r);
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    for (int i = 0; i < 8; ++i) {
      float* even = out + 2 * i * pitch;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(even), _mm256_slli_epi32(r[i], 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(even + pitch), _mm256_and_si256(r[i], high));
    }
  }
};

#include "cpu/kernels.inc"
#undef MOK_TARGET
#undef MOK_ISA_NAME
}  // namespace avx2

namespace avx512 {
#define MOK_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define MOK_ISA_NAME "avx512"
inline constexpr int kMicroRows = 12;

template <class A>
struct Vec;
template <>
struct Vec<float> {
  static constexpr int lanes = 16;
  using Reg = __m512;
  MOK_TARGET static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  MOK_TARGET static void store(float* p, Reg v) { _mm512_storeu_ps(p, v); }
  MOK_TARGET static Reg set(float v) { return _mm512_set1_ps(v); }
  MOK_TARGET static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
};
template <>
struct Vec<double> {
  static constexpr int lanes = 8;
  using Reg = __m512d;
  MOK_TARGET static Reg load(const double* p) { return _mm512_loadu_pd(p); }
  MOK_TARGET static void store(double* p, Reg v) { _mm512_storeu_pd(p, v); }
  MOK_TARGET static Reg set(double v) { return _mm512_set1_pd(v); }
  MOK_TARGET static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_pd(a, b, c); }
};

using avx2::Transpose;

#include "cpu/kernels.inc"
#undef MOK_TARGET
#undef MOK_ISA_NAME
}  // namespace avx512

#endif  // __x86_64__

bool isa_available(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::avx512) {
    return isa_available(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::generic;
}

Isa best_isa() {
  return isa_available(Isa::avx512) ? Isa::avx512
         : isa_available(Isa::avx2) ? Isa::avx2
                                    : Isa::generic;
}

namespace {
std::atomic<Isa>& current_isa() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}
}  // namespace

bool use_isa(Isa isa) {
  if (!isa_available(isa)) return false;
  current_isa() = isa;
  return true;
}

template <class T>
const Kernels<T>& kernels() {
#if defined(__x86_64__)
  const Isa isa = current_isa();
  if (isa == Isa::avx512) return avx512::table<T>();
  if (isa == Isa::avx2) return avx2::table<T>();
#endif
  return generic::table<T>();
}

const BlockKernels& block_kernels() {
#if defined(__x86_64__)
  const Isa isa = current_isa();
  if (isa == Isa::avx512) return avx512::kBlockKernels;
  if (isa == Isa::avx2) return avx2::kBlockKernels;
#endif
  return generic::kBlockKernels;
}

template const Kernels<bf16>& kernels<bf16>();
template const Kernels<float>& kernels<float>();
template const Kernels<double>& kernels<double>();

}  // namespace mok::cpu
