// Weights -> FP8 in pieces, for callers with threads of their own (mok/quantize.h is the whole).
#pragma once

#include "mok/quantize.h"
#include "numerics/blocks.h"

namespace mok::cpu {

// One matrix [rows, columns] and where its two forms go, as in QuantizedTarget.
struct QuantizeMatrix {
  const numerics::bf16* x;
  int64_t row_stride, rows, columns;
  int block;  // 32 or 128
  numerics::e4m3 *data, *data_t;
  numerics::e8m0 *scales, *scales_t;

  // Matrix `e` of a stack.
  QuantizeMatrix(Precision precision, const ConstStack& weights, int64_t e, int64_t rows,
                 int64_t columns, const QuantizedTarget& target);

  int64_t bands() const { return numerics::mx_tiles(rows); }
  // The scales of blocks outside the matrix: before any band.
  void clear_scales() const;
  // 128 rows; bands touch nothing in common.
  void band(int64_t i) const;

 private:
  void rows_1x32(int64_t row0, int64_t row1) const;
  void columns_1x32(int64_t row0, int64_t row1) const;
  void blocks_128(int64_t row0, int64_t row1) const;
};

}  // namespace mok::cpu
