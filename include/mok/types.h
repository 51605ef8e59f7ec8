// Shapes, precisions and tensor views of the public API. Plain data; no CUDA and no Torch.
//
// Letters used everywhere: R expert-parallel (EP) ranks, T tokens on a rank, G tokens of all ranks,
// E routed experts in all (E_local = E / R on each rank), K experts per token (top-k), H hidden
// size, I intermediate size of a routed expert, I_s of the shared expert.
#pragma once

#include <cstdint>
#include <limits>

namespace mok {

inline constexpr int kMaxRanks = 8;
inline constexpr int kMaxTopk = 64;
inline constexpr int kMaxExperts = 4096;

// What is multiplied. mxfp8 and fp8: the operands of the routed experts' products are E4M3 numbers
// in blocks that share a power of two, of 32 and of 128 along the contraction; all else is as in
// bf16. docs/numerics.md, "Precisions", says which tensor is quantised where.
enum class Precision { bf16, fp32, fp64, mxfp8, fp8 };
enum class IdType { int32, int64 };

constexpr bool is_quantized(Precision p) { return p == Precision::mxfp8 || p == Precision::fp8; }
// Elements of a block along the contraction; 0 = nothing is quantised.
constexpr int block_size(Precision p) {
  return p == Precision::mxfp8 ? 32 : p == Precision::fp8 ? 128 : 0;
}
// The type of x, weights, rows and what is returned.
constexpr Precision storage_type(Precision p) { return is_quantized(p) ? Precision::bf16 : p; }

// Accumulation is fp32, in fp64 fp64; in fp32 and fp64 every rounding of the contract is left out.
// Router weights and their gradients are fp32 (fp64 in fp64).
constexpr int element_size(Precision p) {  // of the storage type
  return storage_type(p) == Precision::bf16 ? 2 : p == Precision::fp32 ? 4 : 8;
}
constexpr int weight_size(Precision p) { return p == Precision::fp64 ? 8 : 4; }

struct LayerShape {
  int64_t hidden = 0;               // H
  int64_t intermediate = 0;         // I
  int experts = 0;                  // E, of all ranks
  int topk = 0;                     // K
  int64_t shared_intermediate = 0;  // I_s; 0 = no shared expert
  bool shared_gate = false;         // the shared expert's output is scaled by sigmoid(x . gate)
  // g = min(g, limit), u = clamp(u, -limit, limit); infinity = no limit.
  float swiglu_limit = std::numeric_limits<float>::infinity();
};

// A row-major matrix whose rows are contiguous; strides are in elements.
template <class Void>
struct BasicMatrix {
  Void* data = nullptr;
  int64_t row_stride = 0;
};
using Matrix = BasicMatrix<void>;
using ConstMatrix = BasicMatrix<const void>;

// E_local row-major matrices, one per local expert; gate and up may be views of one [E, 2I, H].
template <class Void>
struct BasicStack {
  Void* data = nullptr;
  int64_t expert_stride = 0;
  int64_t row_stride = 0;
};
using Stack = BasicStack<void>;
using ConstStack = BasicStack<const void>;

}  // namespace mok
