// FP8 conversions on the device: bit for bit those of mok/quantize.h and numerics/blocks.h (a NaN
// stays a NaN). All pointers are device memory; each call enqueues one kernel on `stream` and
// returns. Any sizes; sizes and strides that are multiples of 16 elements, with pointers aligned to
// 16 bytes, go at the speed of memory.
#pragma once

#include <cuda_runtime_api.h>

#include "mok/quantize.h"

namespace mok::cuda {

// As mok::quantize_weights. Throws bad_argument for a precision that has no FP8.
void quantize_weights(Precision precision, const ConstStack& weights, int64_t count, int64_t rows,
                      int64_t columns, const QuantizedTarget& target, cudaStream_t stream);

// FP8 matrices [count, rows, columns] -> bf16 [count, rows, columns], or with `transpose`
// [count, columns, rows]: of data_t and scales_t that is the layout of the weights again.
void dequantize_weights(Precision precision, const void* data, const uint8_t* scales, int64_t count,
                        int64_t rows, int64_t columns, void* out, bool transpose,
                        cudaStream_t stream);

// mok::RoundedWeights from bf16 weights, [count, rows, columns] each, contiguous: rounded there and
// back along the columns of a row, and along the rows of a column. Null: not wanted. Throws
// bad_argument unless rows and columns are multiples of 32 and rows are aligned to 16 bytes.
// (From quantised weights: dequantize_weights, of the transposed form with `transpose`.)
void round_weights(Precision precision, const ConstStack& weights, int64_t count, int64_t rows,
                   int64_t columns, void* along_rows, void* along_columns, cudaStream_t stream);

// Rows of x or d_y [rows, columns] in bf16 as they travel: each row's codes, from `scales_at` on
// its scales (blocks of 32 or 128 along the row), `row_bytes` apart (plan::Geometry::wire_*).
void quantize_rows(Precision precision, const ConstMatrix& x, int64_t rows, int64_t columns,
                   void* out, int64_t row_bytes, int64_t scales_at, cudaStream_t stream);

}  // namespace mok::cuda
