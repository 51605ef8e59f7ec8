// The arithmetic of one task, compiled once per instruction set and chosen at run time.
//
// Every output element is one chain of fused multiply-adds over its contraction, in order, so the
// vectors run over output columns and the bits are the same for every instruction set.
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/bf16.h"
#include "numerics/blocks.h"

namespace mok::cpu {

using numerics::Acc;
using numerics::bf16;

inline constexpr int kBlockRows = 128;     // most rows of a product
inline constexpr int kBlockColumns = 256;  // most columns of a product
inline constexpr int kBlockDepth = 256;    // of the contraction, converted and packed at once
inline constexpr int kBlockPitch = kBlockDepth + 16;  // keeps rows of A out of each other's sets

// C(m, n) = C(m, n) + sum over k of A(m, k) * B(k, n), k ascending, one chain per element. Of each
// pair of strides one is 1. Columns of C up to the next multiple of 32 are scratch.
template <class T>
struct Product {
  int m = 0, n = 0;
  int64_t k = 0;
  const T* a = nullptr;
  int64_t a_row = 0, a_k = 0;
  const T* b = nullptr;
  int64_t b_k = 0, b_column = 0;
  Acc<T>* c = nullptr;
  int64_t c_row = 0;
};

// A worker's own memory.
template <class T>
struct Scratch {
  alignas(64) Acc<T> c[kBlockRows * kBlockColumns];
  alignas(64) Acc<T> a[kBlockRows * kBlockPitch];
  alignas(64) Acc<T> b[kBlockDepth * 32];
  alignas(64) T row[3 * kBlockColumns];
  std::vector<Acc<T>> wide;  // a row of H accumulators
  // Quantised precisions: a piece of a weight in bf16, [kBlockColumns, kBlockDepth], and a fetched
  // row of x and of d_y, [2, H].
  std::vector<T> weight, arrived;
};

template <class T>
struct Kernels {
  const char* name;
  void (*product)(const Product<T>&, Scratch<T>&);
  void (*store_row)(T* out, const Acc<T>* in, int64_t n);
  // h from g and u
  void (*swiglu_row)(T* h, const T* g, const T* u, Acc<T> limit, int64_t n);
  // From d_h (accumulators): w * h, d_g, d_u; returns the sum of d_h * h. With `block` > 0 h, d_g
  // and d_u are rounded to the format first.
  Acc<T> (*swiglu_backward_row)(T* wh, T* d_g, T* d_u, const Acc<T>* d_h, const T* g, const T* u,
                                Acc<T> w, Acc<T> limit, int n, int block, T* scratch);
  Acc<T> (*dot)(const T* a, const T* b, int64_t n);
  void (*scale_row)(Acc<T>* out, const T* row, Acc<T> factor, int64_t n);  // factor * row
  // row + coefficient * gate; without gate: row
  void (*shared_d_x_row)(Acc<T>* out, const T* row, Acc<T> coefficient, const T* gate, int64_t n);
  void (*axpy_row)(Acc<T>* out, const T* row, Acc<T> factor, int64_t n);  // fma into out
  void (*combine_rows)(T* y, const Acc<T>* s, const T* const* rows, const Acc<T>* weights,
                       int slots, int64_t n);
  void (*reduce_rows)(T* d_x, const Acc<T>* d_s, const T* const* rows, int slots, int64_t n);
};

// Conversions of the quantised precisions, as numerics/blocks.h.
struct BlockKernels {
  void (*quantize_row)(const bf16* x, int64_t n, int block, numerics::e4m3* codes,
                       numerics::e8m0* scales);
  void (*dequantize_row)(const numerics::e4m3* codes, const numerics::e8m0* scales, int64_t n,
                         int block, bf16* out);
  void (*round_row)(const bf16* x, int64_t n, int block, bf16* out);
  // Rows [row, row + rows), columns [first, first + n) of a weight; rows of out lie `pitch` apart.
  void (*dequantize_weight)(const numerics::BlockMatrix& m, int64_t row, int rows, int64_t first,
                            int n, bf16* out, int64_t pitch);
};

enum class Isa { generic, avx2, avx512 };
bool isa_available(Isa isa);
Isa best_isa();
// The instruction set of all later calls; for tests. False when this machine has not got it.
bool use_isa(Isa isa);

template <class T>
const Kernels<T>& kernels();
const BlockKernels& block_kernels();

}  // namespace mok::cpu
