#include "tensors.h"

#include <algorithm>

#include "numerics/mxfp8.h"

namespace mok::torch_ops {
namespace {

std::string type_text(ScalarType type) { return torch::headeronly::toString(type); }

std::string shape_text(const int64_t* sizes, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// Each question to a tensor is a call into PyTorch, so sizes and strides are fetched once.
struct Extent {
  explicit Extent(const Tensor& t) : sizes(t.sizes()), strides(t.strides()) {}

  // Rows of `columns` contiguous elements that do not overlap; strides of single rows mean nothing.
  bool rows_fit() const {
    return (strides[column()] == 1 || sizes[column()] <= 1) &&
           (strides[row()] >= sizes[column()] || sizes[row()] <= 1);
  }
  int64_t row_stride() const { return sizes[row()] <= 1 ? sizes[column()] : strides[row()]; }

  torch::headeronly::IntHeaderOnlyArrayRef sizes, strides;

 private:
  size_t row() const { return sizes.size() - 2; }
  size_t column() const { return sizes.size() - 1; }
};

// Not Tensor::scalar_type, which tries one dtype after the other.
bool has_type(const Tensor& t, ScalarType type) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype == torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

}  // namespace

Sizes::Sizes(const WorkspaceEntry& entry)
    : hidden(entry.shape().hidden),
      intermediate(entry.shape().intermediate),
      local_experts(entry.shape().experts / entry.ranks()),
      topk(entry.shape().topk),
      shared(entry.shape().shared_intermediate),
      shared_gate(entry.shape().shared_gate),
      device(entry.device()),
      precision(entry.precision()),
      type(storage_type(precision) == Precision::bf16 ? ScalarType::BFloat16
           : precision == Precision::fp32             ? ScalarType::Float
                                                      : ScalarType::Double),
      sum_type(precision == Precision::fp64 ? ScalarType::Double : ScalarType::Float) {}

bool on_device(const Tensor& t, int device) {
  return device == kCpu ? t.is_cpu() : t.is_cuda() && t.get_device_index() == device;
}

std::string device_text(int device) {
  return device == kCpu ? "cpu" : "cuda:" + std::to_string(device);
}

void check(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type,
           int device) {
  if (!on_device(t, device)) {
    const std::string own = t.is_cpu()    ? "cpu"
                            : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index())
                                          : "another device";
    refuse(ErrorCode::bad_argument,
           std::string(name) + ": on " + own + ", the workspace is on " + device_text(device));
  }
  if (!has_type(t, type)) {
    refuse(ErrorCode::bad_type, std::string(name) + ": dtype " + type_text(t.scalar_type()) +
                                    ", expected " + type_text(type));
  }
  const auto have = t.sizes();
  bool same = have.size() == sizes.size();
  for (size_t i = 0; same && i < sizes.size(); ++i) same = have[i] == sizes.begin()[i];
  if (!same) {
    refuse(ErrorCode::bad_argument,
           std::string(name) + ": shape " +
               shape_text(have.data(), static_cast<int64_t>(have.size())) + ", expected " +
               shape_text(sizes.begin(), static_cast<int64_t>(sizes.size())));
  }
}

namespace {
std::array<int64_t, 4> contiguous_strides(const int64_t* sizes, size_t dimensions) {
  std::array<int64_t, 4> strides{};
  int64_t stride = 1;
  for (size_t i = dimensions; i-- > 0; stride *= std::max<int64_t>(1, sizes[i])) {
    strides[i] = stride;
  }
  return strides;
}
}  // namespace

// Not torch::stable::new_empty, which looks an operator up by its name: microseconds each time.
Tensor empty(const Tensor& like, const int64_t* sizes, size_t dimensions, ScalarType type) {
  const auto strides = contiguous_strides(sizes, dimensions);
  int32_t device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(dimensions), sizes,
                                                         strides.data(), dtype, device_type,
                                                         device_index, &made));
  return Tensor(made);
}

Tensor part(const Tensor& block, int64_t first, const int64_t* sizes, size_t dimensions) {
  const auto strides = contiguous_strides(sizes, dimensions);
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      block.get(), static_cast<int64_t>(dimensions), sizes, strides.data(), first, &made));
  return Tensor(made);
}

void check_scales(const char* name, Precision precision, const Tensor& t, int64_t count,
                  int64_t rows, int64_t columns, int device) {
  const int64_t tile_rows = count * numerics::mx_tiles(rows), tiles = numerics::mx_tiles(columns);
  if (precision == Precision::fp8) {
    return check(name, t, {tile_rows, tiles}, ScalarType::Byte, device);
  }
  check(name, t, {tile_rows, tiles, 32, 16}, ScalarType::Byte, device);
}

int64_t check_tokens(const Tensor& x, const Tensor& ids, const Tensor& weights, const Sizes& s) {
  if (x.dim() != 2) refuse(ErrorCode::bad_argument, "x: not of shape [T, H]");
  const int64_t tokens = x.size(0);
  check("x", x, {tokens, s.hidden}, s.type, s.device);
  const ScalarType type = ids.scalar_type();
  if (type != ScalarType::Long && type != ScalarType::Int) {
    refuse(ErrorCode::bad_type, "topk_ids: dtype " + type_text(type) + ", expected Int or Long");
  }
  check("topk_ids", ids, {tokens, s.topk}, type, s.device);
  check("topk_weights", weights, {tokens, s.topk}, s.sum_type, s.device);
  return tokens;
}

void check_weights(const Weights& w, int64_t layout, const Sizes& s) {
  if (layout < split || layout > interleaved) refuse(ErrorCode::bad_argument, "layout: not 0..2");
  const bool present[kWeights] = {true,         layout == split, true,         s.shared > 0,
                                  s.shared > 0, s.shared > 0,    s.shared_gate};
  for (int i = 0; i < kWeights; ++i) {
    if (w[i].has_value() != present[i]) {
      refuse(ErrorCode::bad_argument, std::string(kWeightNames[i]) +
                                          (present[i] ? ": missing" : ": given, but not expected"));
    }
  }
  const auto one = [&](Weight i, std::initializer_list<int64_t> sizes) {
    if (present[i]) check(kWeightNames[i], *w[i], sizes, s.type, s.device);
  };
  const int64_t gate_rows = layout == split ? s.intermediate : 2 * s.intermediate;
  one(w_gate, {s.local_experts, gate_rows, s.hidden});
  one(w_up, {s.local_experts, s.intermediate, s.hidden});
  one(w_down, {s.local_experts, s.hidden, s.intermediate});
  one(w_shared_gate, {s.shared, s.hidden});
  one(w_shared_up, {s.shared, s.hidden});
  one(w_shared_down, {s.hidden, s.shared});
  one(shared_gate_vector, {1, s.hidden});
}

ConstMatrix Arguments::matrix(const Tensor& t) {
  const Extent e(t);
  if (!e.rows_fit()) return matrix(copies_.emplace_back(torch::stable::contiguous(t)));
  return {const_data(t), e.row_stride()};
}

ConstStack Arguments::stack(const Tensor& t) {
  const Extent e(t);
  const int64_t least = e.sizes[1] * e.row_stride();
  if (!e.rows_fit() || (e.sizes[0] > 1 && e.strides[0] < least)) {
    return stack(copies_.emplace_back(torch::stable::contiguous(t)));
  }
  return {const_data(t), e.sizes[0] <= 1 ? least : e.strides[0], e.row_stride()};
}

const void* Arguments::contiguous(const Tensor& t) {
  if (t.is_contiguous()) return const_data(t);
  return const_data(copies_.emplace_back(torch::stable::contiguous(t)));
}

LayerWeights Arguments::weights(const Weights& w, int64_t layout, const Sizes& s) {
  LayerWeights v;
  if (!is_quantized(s.precision)) {
    v.gate = stack(*w[w_gate]);
    if (layout == split) {
      v.up = stack(*w[w_up]);
    } else {
      take_apart(v.gate, layout, s, element_size(s.precision), v.gate, v.up);
    }
    v.down = stack(*w[w_down]);
  }
  if (s.shared > 0) {
    v.shared_gate_proj = matrix(*w[w_shared_gate]);
    v.shared_up_proj = matrix(*w[w_shared_up]);
    v.shared_down_proj = matrix(*w[w_shared_down]);
  }
  if (s.shared_gate) v.shared_gate_vector = contiguous(*w[shared_gate_vector]);
  return v;
}

ConstStack Arguments::matrices(const Tensor& t) {
  if (t.dim() == 3) return stack(t);
  const ConstMatrix m = matrix(t);
  return {m.data, t.size(0) * m.row_stride, m.row_stride};
}

QuantizedStack Arguments::quantized(const char* name, const std::vector<Tensor>& q, size_t i,
                                    const Sizes& s, int64_t rows, int64_t columns) {
  const std::string full = std::string("quantized.") + name;
  check(full.c_str(), q[i], {s.local_experts, rows, columns}, ScalarType::Float8_e4m3fn, s.device);
  check_scales((full + " scales").c_str(), s.precision, q[i + 1], s.local_experts, rows, columns,
               s.device);
  return {contiguous(q[i]), static_cast<const uint8_t*>(contiguous(q[i + 1]))};
}

void Arguments::quantized_one(const std::vector<Tensor>& q, const Sizes& s, const QuantizedOne& one,
                              LayerWeights& w) {
  const bool reads_rounded = s.device != kCpu && s.precision == Precision::mxfp8;
  if (reads_rounded && q[0].scalar_type() == ScalarType::BFloat16) {
    const auto& t = q[one.place];
    const int64_t rows = one.transposed ? one.columns : one.rows;
    const int64_t columns = one.transposed ? one.rows : one.columns;
    check((std::string("quantized.") + one.rounded_name).c_str(), t,
          {s.local_experts, rows, columns}, ScalarType::BFloat16, s.device);
    w.rounded.*one.rounded = stack(t);
    return;
  }
  const size_t at = 2 * one.place;
  const QuantizedStack fp8 = quantized(one.name, q, at, s, one.rows, one.columns);
  if (!reads_rounded) {
    w.quantized.*one.quantized = fp8;
  } else {
    w.rounded.*one.rounded = stack(
        copies_.emplace_back(dequantize_on_gpu(s.precision, q[at], q[at + 1], one.transposed)));
  }
}

void Arguments::quantized_forward(const OptionalTensors& given, const Sizes& s, LayerWeights& w) {
  using Q = QuantizedWeights;
  using R = RoundedWeights;
  const int64_t h = s.hidden, i = s.intermediate;
  const bool wanted = is_quantized(s.precision);
  const size_t count = given ? given->size() : 0;
  if (wanted ? count != 6 && count != 12 : count != 0) {
    refuse(ErrorCode::bad_argument, "quantized: " + std::to_string(count) + " tensors");
  }
  if (!wanted) return;
  const auto& q = *given;
  quantized_one(q, s, {"gate", "gate", 0, i, h, false, &Q::gate, &R::gate}, w);
  quantized_one(q, s, {"up", "up", 1, i, h, false, &Q::up, &R::up}, w);
  quantized_one(q, s, {"down", "down", 2, h, i, false, &Q::down, &R::down}, w);
}

void Arguments::quantized_backward(const OptionalTensors& given, const Sizes& s, LayerWeights& w) {
  using Q = QuantizedWeights;
  using R = RoundedWeights;
  const int64_t h = s.hidden, i = s.intermediate;
  const bool wanted = is_quantized(s.precision);
  const size_t count = given ? given->size() : 0;
  if (wanted ? count != 10 && (count != 5 || s.device == kCpu) : count != 0) {
    refuse(ErrorCode::bad_argument, "quantized: " + std::to_string(count) + " tensors");
  }
  if (!wanted) return;
  const auto& q = *given;
  quantized_one(q, s, {"gate", "gate", 0, i, h, false, &Q::gate, &R::gate}, w);
  quantized_one(q, s, {"up", "up", 1, i, h, false, &Q::up, &R::up}, w);
  quantized_one(q, s, {"gate_t", "gate_backward", 2, h, i, true, &Q::gate_t, &R::gate_backward}, w);
  quantized_one(q, s, {"up_t", "up_backward", 3, h, i, true, &Q::up_t, &R::up_backward}, w);
  quantized_one(q, s, {"down_t", "down_backward", 4, i, h, true, &Q::down_t, &R::down_backward}, w);
}

}  // namespace mok::torch_ops
