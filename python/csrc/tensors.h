// Tensors -> the views of mok/layer.h, with checks that name the argument.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "handles.h"

namespace mok::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalTensors = std::optional<std::vector<Tensor>>;

// The weights in the order of every operator's arguments and of the bits of `needs`.
enum Weight { w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down, shared_gate_vector };
inline constexpr int kWeights = 7;
inline constexpr const char* kWeightNames[kWeights] = {"w_gate",
                                                       "w_up",
                                                       "w_down",
                                                       "w_shared_gate",
                                                       "w_shared_up",
                                                       "w_shared_down",
                                                       "shared_gate_vector"};
using Weights = std::array<OptionalTensor, kWeights>;  // gradients and main_grads too

// How gate and up are laid out: two tensors [E_local, I, H], or one [E_local, 2I, H] (w_gate; then
// there is no w_up) with gate's rows first, or with gate's rows at even places and up's at odd
// ones.
enum Layout : int64_t { split = 0, stacked = 1, interleaved = 2 };

// What the operators need of a workspace.
struct Sizes {
  int64_t hidden, intermediate, local_experts, topk, shared;
  bool shared_gate;
  int device;  // the GPU, or kCpu
  Precision precision;
  ScalarType type;      // of x, the weights and the rows
  ScalarType sum_type;  // of router weights and main_grad

  explicit Sizes(const WorkspaceEntry& entry);
};

[[noreturn]] inline void refuse(ErrorCode code, const std::string& message) {
  throw Error(code, message);
}

// Of the device, shape and dtype; `device` is that of the workspace.
void check(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type,
           int device);
bool on_device(const Tensor& t, int device);
std::string device_text(int device);
// Scales of `count` matrices [rows, columns], as mok/quantize.h lays them out.
void check_scales(const char* name, Precision precision, const Tensor& t, int64_t count,
                  int64_t rows, int64_t columns, int device);
// x [T, H], topk_ids [T, K], topk_weights [T, K]; returns T.
int64_t check_tokens(const Tensor& x, const Tensor& ids, const Tensor& weights, const Sizes& s);
void check_weights(const Weights& w, int64_t layout, const Sizes& s);

// Views of tensors that a call reads. Copies of those whose rows are not contiguous live as long as
// this does.
class Arguments {
 public:
  ConstMatrix matrix(const Tensor& t);      // [rows, columns]
  ConstStack stack(const Tensor& t);        // [experts, rows, columns]
  const void* contiguous(const Tensor& t);  // any shape
  // Without the routed weights where the precision is quantised: those given stand for their shapes
  // and gradients alone.
  LayerWeights weights(const Weights& w, int64_t layout, const Sizes& s);
  ConstStack matrices(const Tensor& t);  // [rows, columns] or [count, rows, columns]
  // What products read in a quantised precision, into `w`. Of forward: gate, up, down, each data
  // and scales; backward's transposed ones may follow. Of backward: gate, up, gate_t, up_t, down_t.
  // On a GPU also a bf16 tensor each, rounded; FP8 is turned into those here, at every call.
  void quantized_forward(const OptionalTensors& q, const Sizes& s, LayerWeights& w);
  void quantized_backward(const OptionalTensors& q, const Sizes& s, LayerWeights& w);

 private:
  // One of either list: `place` counts weights.
  struct QuantizedOne {
    const char* name;          // of the FP8 form,
    const char* rounded_name;  // of bf16
    size_t place;
    int64_t rows, columns;  // of the FP8 form
    bool transposed;        // against the weight
    QuantizedStack QuantizedWeights::* quantized;
    ConstStack RoundedWeights::* rounded;
  };
  void quantized_one(const std::vector<Tensor>& q, const Sizes& s, const QuantizedOne& one,
                     LayerWeights& w);
  QuantizedStack quantized(const char* name, const std::vector<Tensor>& q, size_t i, const Sizes& s,
                           int64_t rows, int64_t columns);

  std::vector<Tensor> copies_;
};

// Gate and up in one tensor (elements of `element` bytes) -> a view of each.
template <class AnyStack>
void take_apart(AnyStack both, int64_t layout, const Sizes& s, int64_t element, AnyStack& gate,
                AnyStack& up) {
  using Byte = std::conditional_t<std::is_same_v<AnyStack, ConstStack>, const char, char>;
  const int64_t rows = layout == interleaved ? 1 : s.intermediate;
  gate = up = both;
  up.data = static_cast<Byte*>(both.data) + rows * both.row_stride * element;
  if (layout == interleaved) gate.row_stride = up.row_stride = 2 * both.row_stride;
}

// FP8 matrices on a GPU -> bf16, the transposed ones with `transpose` (quantize.cpp). Checked.
Tensor dequantize_on_gpu(Precision precision, const Tensor& data, const Tensor& scales,
                         bool transpose);

// A new contiguous tensor on the device of `like`.
Tensor empty(const Tensor& like, const int64_t* sizes, size_t dimensions, ScalarType type);
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return empty(like, sizes.begin(), sizes.size(), type);
}
// A contiguous tensor in the memory of a new one, from its element `first` on.
Tensor part(const Tensor& block, int64_t first, const int64_t* sizes, size_t dimensions);

// The core takes a null pointer for "not wanted" or "not kept", which an empty tensor is not.
inline void* data(const Tensor& t) {
  alignas(64) static std::byte nothing[64];
  return t.numel() == 0 ? static_cast<void*>(nothing) : t.mutable_data_ptr();
}
inline const void* const_data(const Tensor& t) {
  return t.numel() == 0 ? data(t) : t.const_data_ptr();
}

inline IdType id_type(const Tensor& ids) {
  return ids.scalar_type() == ScalarType::Long ? IdType::int64 : IdType::int32;
}

}  // namespace mok::torch_ops
