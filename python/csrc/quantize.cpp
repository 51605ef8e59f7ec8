// mok::mxfp8_quantize and mxfp8_dequantize, fp8_quantize and fp8_dequantize on CPU and CUDA
// tensors; the arithmetic is that of mok/quantize.h, bit for bit on either.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/quantize.h"
#include "numerics/blocks.h"
#include "tensors.h"

#ifdef MOK_WITH_CUDA
#include "cuda/check.h"
#include "cuda/quantize.h"
#include "cuda_stream.h"
#endif

namespace mok::torch_ops {
namespace {

using numerics::mx_tiles;

// Becomes ValueError.
void require(bool good, const std::string& message) {
  if (!good) throw std::invalid_argument("mok: " + message);
}

#ifdef MOK_WITH_CUDA
// launch(stream): on the tensor's GPU and PyTorch's current stream there.
template <class Launch>
void on_gpu_of(const Tensor& t, const Launch& launch) {
  const cuda::DeviceGuard guard(t.get_device_index());
  launch(static_cast<cudaStream_t>(current_stream(t.get_device_index())));
}
#endif

// [M, N] or [E, M, N], as E matrices.
struct Matrices {
  int64_t count, rows, columns;

  Matrices(const std::string& name, const Tensor& t, ScalarType type) {
    require(t.dim() == 2 || t.dim() == 3, name + ": not of shape [M, N] or [E, M, N]");
    require(t.is_cpu() || t.is_cuda(), name + ": neither a CPU nor a CUDA tensor");
    require(t.scalar_type() == type, name + ": dtype " +
                                         torch::headeronly::toString(t.scalar_type()) +
                                         ", expected " + torch::headeronly::toString(type));
    count = t.dim() == 3 ? t.size(0) : 1;
    rows = t.size(-2);
    columns = t.size(-1);
  }
};

Tensor empty_matrices(const Tensor& like, int64_t rows, int64_t columns, ScalarType type) {
  if (like.dim() == 3) return empty(like, {like.size(0), rows, columns}, type);
  return empty(like, {rows, columns}, type);
}

Tensor empty_scales(Precision precision, const Tensor& like, int64_t count, int64_t rows,
                    int64_t columns) {
  const int64_t tile_rows = count * mx_tiles(rows), tiles = mx_tiles(columns);
  if (precision == Precision::fp8) return empty(like, {tile_rows, tiles}, ScalarType::Byte);
  return empty(like, {tile_rows, tiles, 32, 16}, ScalarType::Byte);
}

// Both quantised precisions, as mok/quantize.h.
using Quantized = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

Quantized quantize(Precision precision, const Tensor& x_bf16, bool return_normal,
                   bool return_transposed) {
  const Matrices m("x_bf16", x_bf16, ScalarType::BFloat16);
  Arguments views;
  const ConstStack x = views.matrices(x_bf16);
  OptionalTensor normal, normal_scales, transposed, transposed_scales;
  QuantizedTarget target;
  if (return_normal) {
    normal = empty_matrices(x_bf16, m.rows, m.columns, ScalarType::Float8_e4m3fn);
    normal_scales = empty_scales(precision, x_bf16, m.count, m.rows, m.columns);
    target.data = data(*normal);
    target.scales = static_cast<uint8_t*>(data(*normal_scales));
  }
  if (return_transposed) {
    transposed = empty_matrices(x_bf16, m.columns, m.rows, ScalarType::Float8_e4m3fn);
    transposed_scales = empty_scales(precision, x_bf16, m.count, m.columns, m.rows);
    target.data_t = data(*transposed);
    target.scales_t = static_cast<uint8_t*>(data(*transposed_scales));
  }
#ifdef MOK_WITH_CUDA
  if (x_bf16.is_cuda()) {
    on_gpu_of(x_bf16, [&](cudaStream_t stream) {
      cuda::quantize_weights(precision, x, m.count, m.rows, m.columns, target, stream);
    });
    return {normal, normal_scales, transposed, transposed_scales};
  }
#endif
  const auto matrix = [&](int64_t e) {
    return cpu::QuantizeMatrix(precision, x, e, m.rows, m.columns, target);
  };
  for (int64_t e = 0; e < m.count; ++e) matrix(e).clear_scales();
  const int64_t bands = mx_tiles(m.rows);  // of one matrix
  torch::stable::parallel_for(0, m.count * bands, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) matrix(i / bands).band(i % bands);
  });
  return {normal, normal_scales, transposed, transposed_scales};
}

Tensor dequantize(Precision precision, const Tensor& x_fp8, const Tensor& x_sc) {
  const Matrices m("x_fp8", x_fp8, ScalarType::Float8_e4m3fn);
  try {
    check_scales("x_sc", precision, x_sc, m.count, m.rows, m.columns,
                 x_fp8.is_cuda() ? x_fp8.get_device_index() : kCpu);
  } catch (const Error& e) {
    require(false, e.what());
  }
  const Tensor x = torch::stable::contiguous(x_fp8), s = torch::stable::contiguous(x_sc);
  Tensor y = empty_matrices(x, m.rows, m.columns, ScalarType::BFloat16);
  const auto* in = static_cast<const std::byte*>(const_data(x));
  const auto* scales = static_cast<const uint8_t*>(const_data(s));
  auto* out = static_cast<std::byte*>(data(y));
#ifdef MOK_WITH_CUDA
  if (x.is_cuda()) {
    on_gpu_of(x, [&](cudaStream_t stream) {
      cuda::dequantize_weights(precision, in, scales, m.count, m.rows, m.columns, out, false,
                               stream);
    });
    return y;
  }
#endif
  const int64_t size = m.rows * m.columns, bytes = scale_bytes(precision, m.rows, m.columns);
  torch::stable::parallel_for(0, m.count, 1, [&](int64_t begin, int64_t end) {
    dequantize_weights(precision, in + begin * size, scales + begin * bytes, end - begin, m.rows,
                       m.columns, out + begin * size * 2);
  });
  return y;
}

// The weights of mxfp8 on GPUs: x rounded there and back along its rows, and along its columns.
std::tuple<OptionalTensor, OptionalTensor> mxfp8_round(Tensor x_bf16, bool along_rows,
                                                       bool along_columns) {
  const Matrices m("x_bf16", x_bf16, ScalarType::BFloat16);
  Arguments views;
  const ConstStack x = views.matrices(x_bf16);
  OptionalTensor rows, columns;
  const auto take = [&] { return empty_matrices(x_bf16, m.rows, m.columns, ScalarType::BFloat16); };
  if (along_rows) rows = take();
  if (along_columns) columns = take();
#ifdef MOK_WITH_CUDA
  if (x_bf16.is_cuda()) {
    try {
      on_gpu_of(x_bf16, [&](cudaStream_t stream) {
        cuda::round_weights(Precision::mxfp8, x, m.count, m.rows, m.columns,
                            rows ? data(*rows) : nullptr, columns ? data(*columns) : nullptr,
                            stream);
      });
    } catch (const Error& e) {
      require(false, std::string("x_bf16: ") + e.what());
    }
    return {rows, columns};
  }
#endif
  // A line: `n` elements, `step` apart.
  const auto round_lines = [&](Tensor& out, int64_t lines, int64_t n, bool down) {
    auto* to = static_cast<numerics::bf16*>(data(out));
    torch::stable::parallel_for(0, m.count * lines, 64, [&](int64_t begin, int64_t end) {
      std::vector<numerics::bf16> line(n);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t e = i / lines, l = i % lines;
        const auto* from = static_cast<const numerics::bf16*>(x.data) + e * x.expert_stride +
                           (down ? l : l * x.row_stride);
        auto* into = to + e * m.rows * m.columns + (down ? l : l * m.columns);
        for (int64_t j = 0; j < n; ++j) line[j] = from[down ? j * x.row_stride : j];
        numerics::round_row(line.data(), n, numerics::kMxBlock, line.data());
        for (int64_t j = 0; j < n; ++j) into[down ? j * m.columns : j] = line[j];
      }
    });
  };
  if (rows) round_lines(*rows, m.rows, m.columns, false);
  if (columns) round_lines(*columns, m.columns, m.rows, true);
  return {rows, columns};
}

Quantized mxfp8_quantize(Tensor x_bf16, bool return_normal, bool return_transposed) {
  return quantize(Precision::mxfp8, x_bf16, return_normal, return_transposed);
}
Quantized fp8_quantize(Tensor x_bf16, bool return_normal, bool return_transposed) {
  return quantize(Precision::fp8, x_bf16, return_normal, return_transposed);
}
Tensor mxfp8_dequantize(Tensor x_fp8, Tensor x_sc) {
  return dequantize(Precision::mxfp8, x_fp8, x_sc);
}
Tensor fp8_dequantize(Tensor x_fp8, Tensor x_sc) { return dequantize(Precision::fp8, x_fp8, x_sc); }

std::string quantize_schema(const std::string& name) {
  return name +
         "(Tensor x_bf16, bool return_normal, bool return_transposed) -> "
         "(Tensor? x_fp8, Tensor? x_sc, Tensor? x_fp8_t, Tensor? x_sc_t)";
}

}  // namespace

#ifdef MOK_WITH_CUDA
Tensor dequantize_on_gpu(Precision precision, const Tensor& data, const Tensor& scales,
                         bool transpose) {
  const Tensor x = torch::stable::contiguous(data), s = torch::stable::contiguous(scales);
  const int64_t rows = x.size(1), columns = x.size(2);
  const int64_t out_rows = transpose ? columns : rows, out_columns = transpose ? rows : columns;
  Tensor y = empty(x, {x.size(0), out_rows, out_columns}, ScalarType::BFloat16);
  on_gpu_of(x, [&](cudaStream_t stream) {
    cuda::dequantize_weights(precision, const_data(x), static_cast<const uint8_t*>(const_data(s)),
                             x.size(0), rows, columns, torch_ops::data(y), transpose, stream);
  });
  return y;
}
#else
Tensor dequantize_on_gpu(Precision, const Tensor&, const Tensor&, bool) {
  throw Error(ErrorCode::unsupported, "this build has no CUDA executor");
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(mok, m) {
  m.def(quantize_schema("mxfp8_quantize").c_str());
  m.def(quantize_schema("fp8_quantize").c_str());
  m.def(
      "mxfp8_round(Tensor x_bf16, bool along_rows, bool along_columns) -> (Tensor? along_rows, "
      "Tensor? along_columns)");
  m.def("mxfp8_dequantize(Tensor x_fp8, Tensor x_sc) -> Tensor");
  m.def("fp8_dequantize(Tensor x_fp8, Tensor x_sc) -> Tensor");
}

template <class Library>
void implement_quantizers(Library& m) {
  m.impl("mxfp8_quantize", TORCH_BOX(&mxfp8_quantize));
  m.impl("fp8_quantize", TORCH_BOX(&fp8_quantize));
  m.impl("mxfp8_round", TORCH_BOX(&mxfp8_round));
  m.impl("mxfp8_dequantize", TORCH_BOX(&mxfp8_dequantize));
  m.impl("fp8_dequantize", TORCH_BOX(&fp8_dequantize));
}

STABLE_TORCH_LIBRARY_IMPL(mok, CPU, m) { implement_quantizers(m); }
#ifdef MOK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, m) { implement_quantizers(m); }
#endif

}  // namespace mok::torch_ops
