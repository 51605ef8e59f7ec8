#include "tensors.h"

#include "numerics/mxfp8.h"

namespace mok::torch_ops {
namespace {

std::string type_text(ScalarType type) { return torch::headeronly::toString(type); }

std::string shape_text(const int64_t* sizes, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// Rows of `columns` contiguous elements that do not overlap; strides of single rows mean nothing.
bool rows_fit(const Tensor& t) {
  const int64_t row = t.dim() - 2, column = t.dim() - 1;
  return (t.stride(column) == 1 || t.size(column) <= 1) &&
         (t.stride(row) >= t.size(column) || t.size(row) <= 1);
}
int64_t row_stride(const Tensor& t) {
  const int64_t row = t.dim() - 2;
  return t.size(row) <= 1 ? t.size(row + 1) : t.stride(row);
}

}  // namespace

Sizes::Sizes(const WorkspaceEntry& entry)
    : hidden(entry.shape.hidden),
      intermediate(entry.shape.intermediate),
      local_experts(entry.shape.experts / entry.group->group->ranks()),
      topk(entry.shape.topk),
      shared(entry.shape.shared_intermediate),
      shared_gate(entry.shape.shared_gate),
      precision(entry.precision),
      type(storage_type(precision) == Precision::bf16 ? ScalarType::BFloat16
           : precision == Precision::fp32             ? ScalarType::Float
                                                      : ScalarType::Double),
      sum_type(precision == Precision::fp64 ? ScalarType::Double : ScalarType::Float) {}

void check(const std::string& name, const Tensor& t, std::initializer_list<int64_t> sizes,
           ScalarType type) {
  if (!t.is_cpu()) refuse(ErrorCode::bad_argument, name + ": not a CPU tensor");
  if (t.scalar_type() != type) {
    refuse(ErrorCode::bad_type,
           name + ": dtype " + type_text(t.scalar_type()) + ", expected " + type_text(type));
  }
  const auto have = t.sizes();
  bool same = have.size() == sizes.size();
  for (size_t i = 0; same && i < sizes.size(); ++i) same = have[i] == sizes.begin()[i];
  if (!same) {
    refuse(ErrorCode::bad_argument,
           name + ": shape " + shape_text(have.data(), static_cast<int64_t>(have.size())) +
               ", expected " + shape_text(sizes.begin(), static_cast<int64_t>(sizes.size())));
  }
}

void check_scales(const std::string& name, Precision precision, const Tensor& t, int64_t count,
                  int64_t rows, int64_t columns) {
  const int64_t tile_rows = count * numerics::mx_tiles(rows), tiles = numerics::mx_tiles(columns);
  if (precision == Precision::fp8) return check(name, t, {tile_rows, tiles}, ScalarType::Byte);
  check(name, t, {tile_rows, tiles, 32, 16}, ScalarType::Byte);
}

int64_t check_tokens(const Tensor& x, const Tensor& ids, const Tensor& weights, const Sizes& s) {
  if (x.dim() != 2) refuse(ErrorCode::bad_argument, "x: not of shape [T, H]");
  const int64_t tokens = x.size(0);
  check("x", x, {tokens, s.hidden}, s.type);
  const ScalarType type = ids.scalar_type();
  if (type != ScalarType::Long && type != ScalarType::Int) {
    refuse(ErrorCode::bad_type, "topk_ids: dtype " + type_text(type) + ", expected Int or Long");
  }
  check("topk_ids", ids, {tokens, s.topk}, type);
  check("topk_weights", weights, {tokens, s.topk}, s.sum_type);
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
    if (present[i]) check(kWeightNames[i], *w[i], sizes, s.type);
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
  if (!rows_fit(t)) return matrix(copies_.emplace_back(torch::stable::contiguous(t)));
  return {const_data(t), row_stride(t)};
}

ConstStack Arguments::stack(const Tensor& t) {
  const int64_t least = t.size(1) * row_stride(t);
  if (!rows_fit(t) || (t.size(0) > 1 && t.stride(0) < least)) {
    return stack(copies_.emplace_back(torch::stable::contiguous(t)));
  }
  return {const_data(t), t.size(0) <= 1 ? least : t.stride(0), row_stride(t)};
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
  check(full, q[i], {s.local_experts, rows, columns}, ScalarType::Float8_e4m3fn);
  check_scales(full + " scales", s.precision, q[i + 1], s.local_experts, rows, columns);
  return {contiguous(q[i]), static_cast<const uint8_t*>(contiguous(q[i + 1]))};
}

QuantizedWeights Arguments::quantized_forward(const std::vector<Tensor>& q, const Sizes& s) {
  const int64_t h = s.hidden, i = s.intermediate;
  const bool wanted = is_quantized(s.precision);
  if (wanted ? q.size() != 6 && q.size() != 12 : !q.empty()) {
    refuse(ErrorCode::bad_argument, "quantized: " + std::to_string(q.size()) + " tensors");
  }
  QuantizedWeights out;
  if (!wanted) return out;
  out.gate = quantized("gate", q, 0, s, i, h);
  out.up = quantized("up", q, 2, s, i, h);
  out.down = quantized("down", q, 4, s, h, i);
  return out;
}

QuantizedWeights Arguments::quantized_backward(const std::vector<Tensor>& q, const Sizes& s) {
  const int64_t h = s.hidden, i = s.intermediate;
  const bool wanted = is_quantized(s.precision);
  if (q.size() != (wanted ? 10 : 0)) {
    refuse(ErrorCode::bad_argument, "quantized: " + std::to_string(q.size()) + " tensors");
  }
  QuantizedWeights out;
  if (!wanted) return out;
  out.gate = quantized("gate", q, 0, s, i, h);
  out.up = quantized("up", q, 2, s, i, h);
  out.gate_t = quantized("gate_t", q, 4, s, h, i);
  out.up_t = quantized("up_t", q, 6, s, h, i);
  out.down_t = quantized("down_t", q, 8, s, i, h);
  return out;
}

}  // namespace mok::torch_ops
