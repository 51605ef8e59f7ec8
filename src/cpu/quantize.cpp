#include "cpu/quantize.h"

#include <algorithm>
#include <cstring>

#include "mok/error.h"

namespace mok {

using numerics::bf16;
using numerics::BlockMatrix;
using numerics::e4m3;
using numerics::e8m0;
using numerics::kMxBlock;
using numerics::kMxTile;

namespace {

int checked_block(Precision precision) {
  if (!is_quantized(precision)) {
    throw Error(ErrorCode::bad_argument, "precision: neither mxfp8 nor fp8");
  }
  return block_size(precision);
}

constexpr int64_t kWidth = 64;  // columns that are taken together

// amax[c] = the largest of `width` columns over rows that begin at x.
void column_amax(const bf16* x, int64_t row_stride, int64_t rows, int64_t width, uint32_t* amax) {
  std::fill_n(amax, width, 0u);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      amax[c] = numerics::mx_amax(amax[c], x[r * row_stride + c]);
    }
  }
}

e8m0 scale_of(uint32_t amax) {
  return numerics::mx_scale(to_float(bf16{static_cast<uint16_t>(amax)}));
}

}  // namespace

namespace cpu {

QuantizeMatrix::QuantizeMatrix(Precision precision, const ConstStack& weights, int64_t e,
                               int64_t rows_, int64_t columns_, const QuantizedTarget& t)
    : x(static_cast<const bf16*>(weights.data) + e * weights.expert_stride),
      row_stride(weights.row_stride),
      rows(rows_),
      columns(columns_),
      block(checked_block(precision)),
      data(t.data ? static_cast<e4m3*>(t.data) + e * rows * columns : nullptr),
      data_t(t.data_t ? static_cast<e4m3*>(t.data_t) + e * rows * columns : nullptr),
      scales(nullptr),
      scales_t(nullptr) {
  const auto at = [&](uint8_t* s, int64_t bytes) { return reinterpret_cast<e8m0*>(s + e * bytes); };
  if (data) scales = at(t.scales, BlockMatrix::scale_bytes(rows, columns, block));
  if (data_t) scales_t = at(t.scales_t, BlockMatrix::scale_bytes(columns, rows, block));
}

void QuantizeMatrix::clear_scales() const {
  const auto clear = [this](e8m0* s, int64_t r, int64_t c) {
    if (s) std::memset(s, numerics::kMxZeroScale, BlockMatrix::scale_bytes(r, c, block));
  };
  clear(scales, rows, columns);
  clear(scales_t, columns, rows);
}

void QuantizeMatrix::band(int64_t i) const {
  const int64_t row0 = i * kMxTile, row1 = std::min<int64_t>(row0 + kMxTile, rows);
  if (block != kMxBlock) return blocks_128(row0, row1);
  if (data) rows_1x32(row0, row1);
  for (int64_t r = row0; data_t && r < row1; r += kMxBlock) {
    columns_1x32(r, std::min<int64_t>(r + kMxBlock, row1));
  }
}

void QuantizeMatrix::rows_1x32(int64_t row0, int64_t row1) const {
  for (int64_t r = row0; r < row1; ++r) {
    for (int64_t c = 0; c < columns; c += kMxBlock) {
      numerics::quantize_row(x + r * row_stride + c, std::min<int64_t>(kMxBlock, columns - c),
                             kMxBlock, data + r * columns + c,
                             scales + BlockMatrix::scale_offset(r, c, columns, block));
    }
  }
}

// A block is a column of up to 32 rows.
void QuantizeMatrix::columns_1x32(int64_t row0, int64_t row1) const {
  for (int64_t c0 = 0; c0 < columns; c0 += kWidth) {
    const int64_t width = std::min(kWidth, columns - c0);
    const bf16* from = x + row0 * row_stride + c0;
    uint32_t amax[kWidth];
    column_amax(from, row_stride, row1 - row0, width, amax);
    for (int64_t c = 0; c < width; ++c) {
      const e8m0 scale = scale_of(amax[c]);
      const float inverse = numerics::mx_inverse(scale);
      e4m3* out = data_t + (c0 + c) * rows + row0;
      for (int64_t r = 0; r < row1 - row0; ++r) {
        out[r] = numerics::mx_quantize(to_float(from[r * row_stride + c]), inverse);
      }
      scales_t[BlockMatrix::scale_offset(c0 + c, row0, rows, block)] = scale;
    }
  }
}

// Both forms have the same blocks, and so the same codes.
void QuantizeMatrix::blocks_128(int64_t row0, int64_t row1) const {
  for (int64_t c0 = 0; c0 < columns; c0 += kMxTile) {
    const int64_t width = std::min<int64_t>(kMxTile, columns - c0);
    uint32_t amax[kMxTile];
    column_amax(x + row0 * row_stride + c0, row_stride, row1 - row0, width, amax);
    const e8m0 scale = scale_of(*std::max_element(amax, amax + width));
    const float inverse = numerics::mx_inverse(scale);
    for (int64_t r = row0; r < row1; ++r) {
      const bf16* from = x + r * row_stride + c0;
      e4m3 codes[kMxTile];
      for (int64_t c = 0; c < width; ++c) {
        codes[c] = numerics::mx_quantize(to_float(from[c]), inverse);
      }
      if (data) std::copy_n(codes, width, data + r * columns + c0);
      for (int64_t c = 0; data_t && c < width; ++c) data_t[(c0 + c) * rows + r] = codes[c];
    }
    if (data) scales[BlockMatrix::scale_offset(row0, c0, columns, block)] = scale;
    if (data_t) scales_t[BlockMatrix::scale_offset(c0, row0, rows, block)] = scale;
  }
}

}  // namespace cpu

int64_t scale_bytes(Precision precision, int64_t rows, int64_t columns) {
  return BlockMatrix::scale_bytes(rows, columns, checked_block(precision));
}

void quantize_weights(Precision precision, const ConstStack& weights, int64_t count, int64_t rows,
                      int64_t columns, const QuantizedTarget& target) {
  for (int64_t e = 0; e < count; ++e) {
    const cpu::QuantizeMatrix matrix(precision, weights, e, rows, columns, target);
    matrix.clear_scales();
    for (int64_t i = 0; i < matrix.bands(); ++i) matrix.band(i);
  }
}

void dequantize_weights(Precision precision, const void* data, const uint8_t* scales, int64_t count,
                        int64_t rows, int64_t columns, void* out) {
  const int block = checked_block(precision);
  const int64_t bytes = scale_bytes(precision, rows, columns);
  for (int64_t e = 0; e < count; ++e) {
    const BlockMatrix m{static_cast<const e4m3*>(data) + e * rows * columns,
                        reinterpret_cast<const e8m0*>(scales + e * bytes), rows, columns, block};
    for (int64_t row = 0; row < rows; ++row) {
      numerics::dequantize_columns(m, row, 0, columns,
                                   static_cast<bf16*>(out) + (e * rows + row) * columns);
    }
  }
}

}  // namespace mok
