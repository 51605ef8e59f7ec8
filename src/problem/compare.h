// How far a result lies from the oracle's, and how far it may.
#pragma once

#include <cstdint>

#include "mok/types.h"

namespace mok::problem {

inline constexpr int64_t kCompareBlock = 64;  // columns

// Two measures, each the maximum over all blocks (a block: one row, up to 64 columns of it).
//
//   max_rel_err   ||a - b|| / ||b||, or ||a - b|| where ||b|| = 0: as one reads it
//   scaled_err    ||a - b|| / max(||b||, size of a usual block of the same group): what is judged
//
// The second is needed because a block may be small by chance alone. The weight gradient of an
// expert with one row is d_g[i] * x[h]: all of row i is as small as that one d_g[i], the smallest
// of 10^5 such numbers lies 10^5 times below the usual, and its *relative* error has no bound
// although its error is of the usual size. A usual block is the root mean square of the group's
// non-zero elements times the square root of the block's columns.
//
//   whole_err     ||a - b|| / ||b|| of all that was taken in: judged where the format makes a
//   single
//                 block's bound wide (mxfp8, fp8)
//
// NaN passes only where both have one; an infinity only where both have the same.
struct Difference {
  double max_rel_err = 0;
  double scaled_err = 0;
  double off_squares = 0, size_squares = 0;  // of all elements
  double whole_err() const;
  int64_t row = -1, column = -1;                // first element of the block of max_rel_err
  int64_t scaled_row = -1, scaled_column = -1;  // and of scaled_err

  // Takes in another piece of the same tensor, whose row 0 is row `first_row` of the whole.
  void add(const Difference& piece, int64_t first_row);
};

// actual [rows, columns] as bf16, float or double, rows `row_stride` elements apart; expected
// [rows, columns] contiguous. One call is one group: a whole token tensor; one expert's gradient.
template <class T>
Difference compare(const T* actual, int64_t row_stride, const double* expected, int64_t rows,
                   int64_t columns);
Difference compare(const void* actual, Precision type, int64_t row_stride, const double* expected,
                   int64_t rows, int64_t columns);

// The largest scaled_err that passes, per tensor. Derived in compare.cpp.
struct Tolerances {
  double y, d_x, d_topk_weights;
  double d_w_gate_up, d_w_down;  // routed and shared
  double d_shared_vector;        // gradient of the shared gate
};
// How products of E4M3 numbers were added: in fp32, or by Hopper's FP8 tensor cores, 128 at a time.
enum class E4m3Sums { fp32, tensor_cores };
// On GPUs.
constexpr E4m3Sums sums_on_gpus(Precision p) {
  return p == Precision::fp8 ? E4m3Sums::tensor_cores : E4m3Sums::fp32;
}
Tolerances tolerances(const LayerShape& shape, Precision precision, int64_t global_tokens,
                      E4m3Sums sums = E4m3Sums::fp32);
// The largest whole_err that passes; infinity, everywhere, unless the precision is quantised.
Tolerances whole_tolerances(const LayerShape& shape, Precision precision, int64_t global_tokens,
                            E4m3Sums sums = E4m3Sums::fp32);

}  // namespace mok::problem
