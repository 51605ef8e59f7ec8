// mok::mxfp8_quantize and mok::mxfp8_dequantize on CPU tensors; the arithmetic is that of
// src/numerics/mxfp8.h.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

#include "numerics/mxfp8.h"
#include "tensors.h"

namespace mok::torch_ops {
namespace {

using numerics::bf16;
using numerics::e4m3;
using numerics::e8m0;
using numerics::kMxBlock;
using numerics::kMxTile;
using numerics::mx_tiles;

// Becomes ValueError.
void require(bool good, const std::string& message) {
  if (!good) throw std::invalid_argument("mok: " + message);
}

// [M, N] or [E, M, N], as E matrices.
struct Matrices {
  int64_t count, rows, columns;

  Matrices(const std::string& name, const Tensor& t, ScalarType type) {
    require(t.dim() == 2 || t.dim() == 3, name + ": not of shape [M, N] or [E, M, N]");
    require(t.is_cpu(), name + ": not a CPU tensor");
    require(t.scalar_type() == type, name + ": dtype " +
                                         torch::headeronly::toString(t.scalar_type()) +
                                         ", expected " + torch::headeronly::toString(type));
    count = t.dim() == 3 ? t.size(0) : 1;
    rows = t.size(-2);
    columns = t.size(-1);
  }

  int64_t tile_rows() const { return mx_tiles(rows); }
  int64_t tile_columns() const { return mx_tiles(columns); }
};

Tensor empty_matrices(const Tensor& like, int64_t rows, int64_t columns, ScalarType type) {
  if (like.dim() == 3) return empty(like, {like.size(0), rows, columns}, type);
  return empty(like, {rows, columns}, type);
}

Tensor zero_scales(const Tensor& like, const Matrices& m, bool transposed) {
  const int64_t tile_rows = transposed ? m.tile_columns() : m.tile_rows();
  const int64_t tile_columns = transposed ? m.tile_rows() : m.tile_columns();
  Tensor scales = empty(like, {m.count * tile_rows, tile_columns, kMxBlock, 16}, ScalarType::Byte);
  std::memset(data(scales), numerics::kMxZeroScale, static_cast<size_t>(scales.numel()));
  return scales;
}

// A strip: up to 32 rows and all columns of one matrix; `x` points to its first row.
void quantize_rows(const bf16* x, int64_t row, int64_t rows, int64_t columns, e4m3* out,
                   uint8_t* scales) {
  for (int64_t r = 0; r < rows; ++r, x += columns, out += columns) {
    for (int64_t first = 0; first < columns; first += kMxBlock) {
      const int64_t end = std::min<int64_t>(first + kMxBlock, columns);
      float amax = 0.0f;
      for (int64_t c = first; c < end; ++c) amax = numerics::mx_amax(amax, to_float(x[c]));
      const e8m0 scale = numerics::mx_scale(amax);
      const float inverse = numerics::mx_inverse(scale);
      for (int64_t c = first; c < end; ++c) out[c] = numerics::mx_quantize(to_float(x[c]), inverse);
      scales[numerics::mx_scale_offset(row + r, first / kMxBlock, mx_tiles(columns))] = scale.bits;
    }
  }
}

// The same strip, a block being a column of it; `out` points to column `row` of [columns, M].
void quantize_columns(const bf16* x, int64_t row, int64_t rows, int64_t columns, int64_t all_rows,
                      e4m3* out, uint8_t* scales) {
  constexpr int64_t kWidth = 64;
  for (int64_t first = 0; first < columns; first += kWidth) {
    const int64_t width = std::min(kWidth, columns - first);
    std::array<float, kWidth> amax{};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < width; ++c) {
        amax[c] = numerics::mx_amax(amax[c], to_float(x[r * columns + first + c]));
      }
    }
    for (int64_t c = 0; c < width; ++c) {
      const e8m0 scale = numerics::mx_scale(amax[c]);
      const float inverse = numerics::mx_inverse(scale);
      for (int64_t r = 0; r < rows; ++r) {
        out[(first + c) * all_rows + r] =
            numerics::mx_quantize(to_float(x[r * columns + first + c]), inverse);
      }
      scales[numerics::mx_scale_offset(first + c, row / kMxBlock, mx_tiles(all_rows))] = scale.bits;
    }
  }
}

std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor> mxfp8_quantize(
    Tensor x_bf16, bool return_normal, bool return_transposed) {
  const Matrices m("x_bf16", x_bf16, ScalarType::BFloat16);
  const Tensor x = torch::stable::contiguous(x_bf16);
  OptionalTensor normal, normal_scales, transposed, transposed_scales;
  if (return_normal) {
    normal = empty_matrices(x, m.rows, m.columns, ScalarType::Float8_e4m3fn);
    normal_scales = zero_scales(x, m, false);
  }
  if (return_transposed) {
    transposed = empty_matrices(x, m.columns, m.rows, ScalarType::Float8_e4m3fn);
    transposed_scales = zero_scales(x, m, true);
  }

  const auto* in = static_cast<const bf16*>(const_data(x));
  const auto pointer = [](const OptionalTensor& t) { return t ? data(*t) : nullptr; };
  auto* out = static_cast<e4m3*>(pointer(normal));
  auto* out_scales = static_cast<uint8_t*>(pointer(normal_scales));
  auto* out_t = static_cast<e4m3*>(pointer(transposed));
  auto* out_t_scales = static_cast<uint8_t*>(pointer(transposed_scales));

  const int64_t size = m.rows * m.columns;
  const int64_t scales = m.tile_rows() * m.tile_columns() * numerics::kMxTileBytes;
  const int64_t strips = (m.rows + kMxBlock - 1) / kMxBlock;  // of one matrix
  torch::stable::parallel_for(0, m.count * strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / strips, row = i % strips * kMxBlock;
      const int64_t rows = std::min<int64_t>(kMxBlock, m.rows - row);
      const bf16* strip = in + e * size + row * m.columns;
      if (return_normal) {
        quantize_rows(strip, row, rows, m.columns, out + e * size + row * m.columns,
                      out_scales + e * scales);
      }
      if (return_transposed) {
        quantize_columns(strip, row, rows, m.columns, m.rows, out_t + e * size + row,
                         out_t_scales + e * scales);
      }
    }
  });
  return {normal, normal_scales, transposed, transposed_scales};
}

Tensor mxfp8_dequantize(Tensor x_fp8, Tensor x_sc) {
  const Matrices m("x_fp8", x_fp8, ScalarType::Float8_e4m3fn);
  require(x_sc.is_cpu() && x_sc.scalar_type() == ScalarType::Byte, "x_sc: not a CPU uint8 tensor");
  require(x_sc.dim() == 4 && x_sc.size(0) == m.count * m.tile_rows() &&
              x_sc.size(1) == m.tile_columns() && x_sc.size(2) == kMxBlock && x_sc.size(3) == 16,
          "x_sc: shape is not [" + std::to_string(m.count * m.tile_rows()) + ", " +
              std::to_string(m.tile_columns()) + ", 32, 16]");
  const Tensor x = torch::stable::contiguous(x_fp8), s = torch::stable::contiguous(x_sc);
  Tensor y = empty_matrices(x, m.rows, m.columns, ScalarType::BFloat16);
  const auto* in = static_cast<const e4m3*>(const_data(x));
  const auto* scale = static_cast<const uint8_t*>(const_data(s));
  auto* out = static_cast<bf16*>(data(y));
  const int64_t scales = m.tile_rows() * m.tile_columns() * numerics::kMxTileBytes;
  torch::stable::parallel_for(0, m.count * m.rows, kMxBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / m.rows, row = i % m.rows;
      for (int64_t c = 0; c < m.columns; ++c) {
        const int64_t place = numerics::mx_scale_offset(row, c / kMxBlock, m.tile_columns());
        out[i * m.columns + c] =
            numerics::mx_dequantize(in[i * m.columns + c], e8m0{scale[e * scales + place]});
      }
    }
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok, m) {
  m.def(
      "mxfp8_quantize(Tensor x_bf16, bool return_normal, bool return_transposed) -> "
      "(Tensor? x_fp8, Tensor? x_sc, Tensor? x_fp8_t, Tensor? x_sc_t)");
  m.def("mxfp8_dequantize(Tensor x_fp8, Tensor x_sc) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mok, CPU, m) {
  m.impl("mxfp8_quantize", TORCH_BOX(&mxfp8_quantize));
  m.impl("mxfp8_dequantize", TORCH_BOX(&mxfp8_dequantize));
}

}  // namespace mok::torch_ops
