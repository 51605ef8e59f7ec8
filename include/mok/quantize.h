// Routed weights -> FP8, once per change of the weights, for precisions mxfp8 and fp8.
//
//   mxfp8   E4M3 in blocks of 1 x 32 along the contraction (OCP Microscaling 1.0)
//   fp8     E4M3 in blocks of 128 x 128
//
// A block's scale is the smallest power of two >= max(amax, 1e-12) / 448, stored as E8M0 (exponent
// + 127); elements are rounded to nearest, ties to even. docs/numerics.md, "MXFP8", has the corner
// cases. Host memory only.
#pragma once

#include <cstdint>

#include "mok/types.h"

namespace mok {

// Scales of one matrix [rows, columns], in bytes: with tiles(n) = ceil(n / 128)
//   mxfp8   [tiles(rows), tiles(columns), 32, 16]: in a tile of 128 x 128 elements the scale of row
//           r and block b is byte r % 32 * 16 + r / 32 * 4 + b; blocks outside the matrix hold 79
//   fp8     [tiles(rows), tiles(columns)]
// Throws bad_argument for another precision.
int64_t scale_bytes(Precision precision, int64_t rows, int64_t columns);

// Where the results go, each for all matrices one after the other; null: not wanted.
struct QuantizedTarget {
  void* data = nullptr;       // E4M3 [count, rows, columns], blocks along the columns
  uint8_t* scales = nullptr;  // scale_bytes(precision, rows, columns) for each matrix
  void* data_t = nullptr;     // E4M3 [count, columns, rows]: the transposed matrices, blocks along
  uint8_t* scales_t = nullptr;  // their columns; scale_bytes(precision, columns, rows) each
};

// `weights`: bf16, `count` matrices [rows, columns]. Elements of one matrix come from that matrix
// alone, so slices of the stack may be quantised by several threads.
void quantize_weights(Precision precision, const ConstStack& weights, int64_t count, int64_t rows,
                      int64_t columns, const QuantizedTarget& target);
// The inverse of the normal form, in bf16: out [count, rows, columns], contiguous.
void dequantize_weights(Precision precision, const void* data, const uint8_t* scales, int64_t count,
                        int64_t rows, int64_t columns, void* out);

}  // namespace mok
