// The order in which a token's rows are added, forward (combine) and backward (d_x).
//
//   combine   acc = sigma * r_s (0 without a shared expert);  acc = fma(w_k, r_k, acc), k in order
//   d_x       acc = d_s (0 without one);                       acc = acc + row_k,       k in order
//
// One rounding at the end. A slot with id -1 is skipped, not multiplied: its weight and its row may
// hold anything.
#pragma once

#include <cstdint>

#include "numerics/bf16.h"
#include "numerics/hd.h"

namespace mok::numerics {

template <class A>
MOK_INLINE A combine_step(A weight, A row, A acc) {
  return fused(weight, row, acc);
}
template <class A>
MOK_INLINE A reduce_step(A row, A acc) {
  return acc + row;
}

// d_s = the shared expert's row + coefficient * gate, where coefficient = d_sigma * sigma';
// without a gate vector d_s is the row alone.
template <class A>
MOK_INLINE A shared_d_x(A row, A coefficient, A gate) {
  return fused(coefficient, gate, row);
}
// sigma' from sigma
template <class A>
MOK_INLINE A sigmoid_slope(A sigma) {
  return sigma * (A(1) - sigma);
}

// Whole rows on the host: out[c] = round(start[c] + ...), c < columns. rows[k] is null where the id
// is -1; start may be null (zeros).
template <bool kWeighted, class T>
MOK_INLINE void add_rows(T* out, const Acc<T>* start, const T* const* rows, const Acc<T>* weights,
                         int slots, int64_t columns) {
  using S = Storage<T>;
  constexpr int kChunk = 128;  // columns whose accumulators stay in registers or L1
  Acc<T> acc[kChunk];
  for (int64_t base = 0; base < columns; base += kChunk) {
    const int n = static_cast<int>(columns - base < kChunk ? columns - base : kChunk);
    for (int c = 0; c < n; ++c) acc[c] = start ? start[base + c] : Acc<T>(0);
    for (int k = 0; k < slots; ++k) {
      if (!rows[k]) continue;
      const T* row = rows[k] + base;
      if constexpr (kWeighted) {
        const Acc<T> w = weights[k];
        for (int c = 0; c < n; ++c) acc[c] = combine_step(w, S::load(row[c]), acc[c]);
      } else {
        for (int c = 0; c < n; ++c) acc[c] = reduce_step(S::load(row[c]), acc[c]);
      }
    }
    for (int c = 0; c < n; ++c) out[base + c] = S::store(acc[c]);
  }
}

template <class T>
MOK_INLINE void combine_rows(T* y, const Acc<T>* s, const T* const* rows, const Acc<T>* weights,
                             int slots, int64_t columns) {
  add_rows<true>(y, s, rows, weights, slots, columns);
}
template <class T>
MOK_INLINE void reduce_rows(T* d_x, const Acc<T>* d_s, const T* const* rows, int slots,
                            int64_t columns) {
  add_rows<false, T>(d_x, d_s, rows, nullptr, slots, columns);
}

}  // namespace mok::numerics
