// Blocks of E4M3 numbers with a common power of two, as precisions mxfp8 and fp8 lay them: a row of
// x, d_y, h, d_g or d_u in blocks of 32 or 128 elements, a weight in blocks of 1 x 32 or 128 x 128.
// The last block of a row or column may be partial.
#pragma once

#include <cstdint>

#include "numerics/mxfp8.h"

namespace mok::numerics {

MOK_HD constexpr int64_t blocks_of(int64_t n, int block) { return (n + block - 1) / block; }
MOK_HD constexpr int64_t block_length(int64_t n, int64_t first, int block) {
  return n - first < block ? n - first : block;
}

// ---- rows ------------------------------------------------------------------------------------

MOK_INLINE e8m0 block_scale(const bf16* x, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = mx_amax(amax, x[i]);
  return mx_scale(to_float(bf16{static_cast<uint16_t>(amax)}));
}

// n elements -> codes [n], scales [blocks_of(n, block)].
MOK_INLINE void quantize_row(const bf16* x, int64_t n, int block, e4m3* codes, e8m0* scales) {
  for (int64_t first = 0; first < n; first += block) {
    const int64_t length = block_length(n, first, block);
    const e8m0 scale = block_scale(x + first, length);
    const float inverse = mx_inverse(scale);
    for (int64_t i = first; i < first + length; ++i) {
      codes[i] = mx_quantize(to_float(x[i]), inverse);
    }
    scales[first / block] = scale;
  }
}

MOK_INLINE void dequantize_row(const e4m3* codes, const e8m0* scales, int64_t n, int block,
                               bf16* out) {
  for (int64_t first = 0; first < n; first += block) {
    const int64_t end = first + block_length(n, first, block);
    const MxFactors f = mx_factors(scales[first / block]);
    for (int64_t i = first; i < end; ++i) out[i] = mx_dequantize(codes[i], f);
  }
}

// There and back: what a product reads. `out` may be x.
MOK_INLINE void round_row(const bf16* x, int64_t n, int block, bf16* out) {
  for (int64_t first = 0; first < n; first += block) {
    const int64_t length = block_length(n, first, block);
    const e8m0 scale = block_scale(x + first, length);
    const float inverse = mx_inverse(scale);
    const MxFactors f = mx_factors(scale);
    for (int64_t i = first; i < first + length; ++i) {
      out[i] = mx_dequantize(mx_quantize(to_float(x[i]), inverse), f);
    }
  }
}

// ---- weights ---------------------------------------------------------------------------------

// One matrix [rows, columns], its products contracting over the columns. Scales: blocks of 32 as
// mx_scale_offset says; blocks of 128 x 128 as a row-major matrix [rows / 128, columns / 128].
struct BlockMatrix {
  const e4m3* codes;
  const e8m0* scales;
  int64_t rows, columns;
  int block;  // 32 or 128

  MOK_HD e8m0 scale(int64_t row, int64_t column) const {
    return scales[scale_offset(row, column, columns, block)];
  }

  MOK_HD static constexpr int64_t scale_offset(int64_t row, int64_t column, int64_t columns,
                                               int block) {
    return block == kMxBlock ? mx_scale_offset(row, column / kMxBlock, mx_tiles(columns))
                             : row / kMxTile * mx_tiles(columns) + column / kMxTile;
  }
  MOK_HD static constexpr int64_t scale_bytes(int64_t rows, int64_t columns, int block) {
    return mx_tiles(rows) * mx_tiles(columns) * (block == kMxBlock ? kMxTileBytes : 1);
  }
};

// Columns [first, first + n) of a row; `first` is a multiple of the block.
MOK_INLINE void dequantize_columns(const BlockMatrix& m, int64_t row, int64_t first, int64_t n,
                                   bf16* out) {
  const e4m3* codes = m.codes + row * m.columns + first;
  for (int64_t c = 0; c < n; c += m.block) {
    const int64_t end = c + block_length(n, c, m.block);
    const MxFactors f = mx_factors(m.scale(row, first + c));
    for (int64_t i = c; i < end; ++i) out[i] = mx_dequantize(codes[i], f);
  }
}

}  // namespace mok::numerics
