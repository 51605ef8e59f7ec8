#include "problem/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "numerics/bf16.h"

namespace mok::problem {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool both_nan_or_equal(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Root mean square of the finite non-zero elements; 0 when there are none.
double usual_size(const double* v, int64_t n) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (v[i] == 0 || !std::isfinite(v[i])) continue;
    sum += v[i] * v[i];
    ++count;
  }
  return count > 0 ? std::sqrt(sum / static_cast<double>(count)) : 0;
}

}  // namespace

void Difference::add(const Difference& piece, int64_t first_row) {
  if (piece.max_rel_err > max_rel_err || row < 0) {
    max_rel_err = piece.max_rel_err;
    row = piece.row < 0 ? -1 : piece.row + first_row;
    column = piece.column;
  }
  if (piece.scaled_err > scaled_err || scaled_row < 0) {
    scaled_err = piece.scaled_err;
    scaled_row = piece.scaled_row < 0 ? -1 : piece.scaled_row + first_row;
    scaled_column = piece.scaled_column;
  }
  off_squares += piece.off_squares;
  size_squares += piece.size_squares;
}

double Difference::whole_err() const {
  return size_squares > 0 ? std::sqrt(off_squares / size_squares) : std::sqrt(off_squares);
}

template <class T>
Difference compare(const T* actual, int64_t row_stride, const double* expected, int64_t rows,
                   int64_t columns) {
  Difference out;
  const double usual = usual_size(expected, rows * columns);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += kCompareBlock) {
      const int64_t n = std::min(kCompareBlock, columns - column);
      const T* a = actual + row * row_stride + column;
      const double* b = expected + row * columns + column;
      double off = 0, size = 0;
      for (int64_t i = 0; i < n; ++i) {
        const double v = static_cast<double>(numerics::Storage<T>::load(a[i]));
        if (both_nan_or_equal(v, b[i])) {
          if (std::isfinite(b[i])) size += b[i] * b[i];
        } else if (std::isfinite(v) && std::isfinite(b[i])) {
          off += (v - b[i]) * (v - b[i]);
          size += b[i] * b[i];
        } else {
          off = kInfinity;
        }
      }
      const double distance = std::sqrt(off), norm = std::sqrt(size);
      const double scale = std::max(norm, usual * std::sqrt(static_cast<double>(n)));
      Difference block;
      block.max_rel_err = norm > 0 ? distance / norm : distance;
      block.scaled_err = scale > 0 ? distance / scale : distance;
      block.off_squares = off;
      block.size_squares = size;
      block.row = block.scaled_row = 0;
      block.column = block.scaled_column = column;
      out.add(block, row);
    }
  }
  return out;
}

template Difference compare(const numerics::bf16*, int64_t, const double*, int64_t, int64_t);
template Difference compare(const float*, int64_t, const double*, int64_t, int64_t);
template Difference compare(const double*, int64_t, const double*, int64_t, int64_t);

Difference compare(const void* actual, Precision type, int64_t row_stride, const double* expected,
                   int64_t rows, int64_t columns) {
  switch (storage_type(type)) {
    case Precision::fp32:
      return compare(static_cast<const float*>(actual), row_stride, expected, rows, columns);
    case Precision::fp64:
      return compare(static_cast<const double*>(actual), row_stride, expected, rows, columns);
    default:
      return compare(static_cast<const numerics::bf16*>(actual), row_stride, expected, rows,
                     columns);
  }
}

// Where the tolerances come from.
//
// fp32 and fp64. Nothing is rounded but the sums. A sum of n terms of random sign in arithmetic of
// unit roundoff e errs by about e * sqrt(n) times its usual size; the factor 8 takes in the largest
// of 10^6 outputs (5 standard deviations) and the silu and exp. The contractions in a chain add.
//
// bf16. The oracle applies the same roundings, so that what remains is this: a sum that errs by
// 2^-24 * sqrt(n) is now and then rounded to the *other* neighbour, a flip of one ulp, at most
// 2^-7 of the value. A fraction p of about (error) / (half ulp) = 2^-24 sqrt(n) / 2^-9, below 2^-8
// up to n = 2^14, of the values of a stage flips. Seen through a sum over n values (a contraction,
// or the norm of a block) flips average out: their root mean square is sqrt(p) <= 1/16 of an ulp,
// and one flip of the largest value (3 standard deviations) is 3 / sqrt(n) of one; for small n all
// may flip. Hence
//
//   flips(n) = 2^-7 * min(1, sqrt(p) + 3 / sqrt(n))
//
// is what one flipping stage adds to a result that sees n values of it, and the stages add up:
//
//   h    3 stages: g (slope of silu in relative terms about 1), u, h itself
//   y    h through I; r and y within the block of H
//   d_g  7: d_h, u, d_g itself, and g, whose flip moves silu'(g) by up to 2^-7 |g silu''(g)| <= 0.5
//        of an ulp of |w d_h u|, but |w d_h u| is a product of normals with a tail: 4 stages' worth
//   d_x  d_g and d_u through 2 I; the row and d_x within the block of H
//   d_topk_weights   d_h and h through I
//   d_w_down         of an expert with one row: bf16(w h), 4 stages, within the block of I
//   d_w_gate, d_w_up of an expert with one row: one value of d_g is all of the block: undamped
//   d_shared_vector  d_sigma sees r_s through H, 1 + 3 stages of h through I
//
// The fp32 sums themselves are added too; they matter only for the gradients of very many rows.
//
// mxfp8, fp8. Quantisation is part of what the oracle computes, so it costs nothing where the same
// bf16 number is quantised: x, d_y and the weights. But h, d_g and d_u may have flipped, and where
// the flip crosses a border between two E4M3 numbers the rounded value jumps by a step, up to 2^-3
// of it. A step holds 16 bf16 numbers or more and a border may be one of them: at most one flip in
// 8 crosses. (A scale that flips changes nothing else: E4M3 has the same numbers at either, but for
// those below 2^-14 of the largest.) Of a value behind s stages of bf16 at most s * 2^-8 / 8 jump:
//
//   jumps(s, n) = 2^-3 * min(1, sqrt(s * p / 8) + 3 / sqrt(n))
//
// is what one quantised stage adds to a result that sees n values of it; the second term is one
// jump of the largest. It is wide for a single block, where n is I or 64 (d_w_gate and d_w_up of an
// expert with one row: 1), and falls with all rows of a whole tensor, n = rows * I, which is
// therefore judged as well: quantising along a wrong dimension, or not at all, moves a result by
// 6.6e-2.
//
// FP8 tensor cores cut each product at about 2^-13 of the largest in hand (14 bits), so a sum errs
// by 2^-13 of its usual size however long it is (measured: 1.3e-4), 8 times that at most. A
// fraction p of 2^-13 / 2^-9 = 2^-4 of the values flips instead of 2^-8, and s * 2^-4 / 8 jump.
// Then it is no longer one jump that matters but their sum: a block's norm averages over it, but a
// gradient of a router weight is one number, and the largest of 10^4 is 4 times the usual.
// And with one value in 50 jumping, large ones do: h, d_g and d_u are products of normals,
// P(|v| > t) about exp(-t), so that of some 10^3 jumps the largest is 7 standard deviations, not 3.
namespace {
// How often a value flips, and the largest jump in standard deviations of the values.
struct Flipping {
  double fraction, largest;
};
constexpr Flipping flipping(bool tensor_cores) {
  return tensor_cores ? Flipping{0x1p-4, 7} : Flipping{0x1p-8, 3};
}

double flips(double n, Flipping f) {
  return 0x1p-7 * std::min(1.0, std::sqrt(f.fraction) + 3 / std::sqrt(n));
}
// `spread`: of the sum of the jumps, above the usual.
double jumps(int stages, double n, Flipping f, double spread = 1) {
  return 0x1p-3 *
         std::min(1.0, spread * std::sqrt(stages * f.fraction / 8) + f.largest / std::sqrt(n));
}
// Of one contraction.
double sum_of_codes(E4m3Sums sums) { return sums == E4m3Sums::fp32 ? 0 : 8 * 0x1p-13; }
}  // namespace

Tolerances tolerances(const LayerShape& shape, Precision precision, int64_t global_tokens,
                      E4m3Sums sums) {
  const double H = static_cast<double>(shape.hidden);
  const double I = static_cast<double>(shape.shared_intermediate > 0
                                           ? std::min(shape.intermediate, shape.shared_intermediate)
                                           : shape.intermediate);
  const double widest =
      static_cast<double>(std::max(shape.intermediate, shape.shared_intermediate));
  const double rows = static_cast<double>(global_tokens) * shape.topk;

  const double unit = precision == Precision::fp64 ? 0x1p-53 : 0x1p-24;
  const auto sum = [&](double n) { return 8 * unit * std::sqrt(n + 1); };
  const double codes = is_quantized(precision) ? sum_of_codes(sums) : 0;
  const double forward = sum(H) + sum(widest) + 2 * codes + sum(shape.topk);
  const double backward = 2 * sum(H) + 2 * sum(widest) + 4 * codes + sum(shape.topk);
  const double gradient = backward + sum(rows);
  Tolerances t{forward, backward, backward, gradient, gradient, gradient};
  if (storage_type(precision) != Precision::bf16) return t;

  const double block_H = std::min<double>(H, kCompareBlock);
  const double block_I = std::min<double>(I, kCompareBlock);
  const bool fp8 = codes > 0;
  const Flipping p = flipping(fp8);
  t.y += 3 * flips(I, p) + 2 * flips(block_H, p);
  t.d_x += 7 * flips(2 * I, p) + 2 * flips(block_H, p);
  t.d_topk_weights += 4 * flips(I, p);
  t.d_w_down += 4 * flips(block_I, p);
  t.d_w_gate_up += 7 * 0x1p-7;
  t.d_shared_vector += flips(H, p) + 3 * flips(I, p);
  if (!is_quantized(precision)) return t;

  const double routed = static_cast<double>(shape.intermediate);
  t.y += jumps(3, routed, p);
  t.d_x += jumps(7, 2 * routed, p);
  t.d_topk_weights += jumps(3, routed, p, fp8 ? 4 : 1);
  t.d_w_down += jumps(3, std::min<double>(routed, kCompareBlock), p);
  t.d_w_gate_up += jumps(7, 1, p);
  return t;
}

Tolerances whole_tolerances(const LayerShape& shape, Precision precision, int64_t global_tokens,
                            E4m3Sums sums) {
  if (!is_quantized(precision)) {
    return {kInfinity, kInfinity, kInfinity, kInfinity, kInfinity, kInfinity};
  }
  const double rows = static_cast<double>(std::max<int64_t>(1, global_tokens * shape.topk));
  const double values = rows * static_cast<double>(shape.intermediate);
  const double shared = static_cast<double>(global_tokens * shape.shared_intermediate);
  const double fewest = shared > 0 ? std::min(values, shared) : values;
  const Flipping p = flipping(sums == E4m3Sums::tensor_cores);
  const auto with = [&](int bf16_stages, int stages_before) {
    return 4 * sum_of_codes(sums) + bf16_stages * flips(fewest, p) +
           jumps(stages_before, values, p);
  };
  Tolerances t = tolerances(shape, Precision::fp32, global_tokens);  // sums
  t.y += with(5, 3);
  t.d_x += with(9, 7);
  t.d_topk_weights += with(4, 3);
  t.d_w_down += with(4, 3);
  t.d_w_gate_up += with(7, 7);
  t.d_shared_vector = kInfinity;  // a single row
  return t;
}

}  // namespace mok::problem
