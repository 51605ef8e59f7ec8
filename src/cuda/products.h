// The products of each direction: which tensors the copy engine reads and where results go.
#pragma once

#include "cuda/launch.h"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

// Tensors with a map. Backward has all, forward the first ones. Precision fp8: of codes, for
// the routed weights and, in forward, kRingX and kRingHidden.
enum Map : int8_t {
  kRingX,
  kRingHidden,
  kGate,
  kUp,
  kDown,  // in mxfp8 the form that the direction reads
  kOwnX,  // the shared expert's: the caller's rows
  kSharedHidden,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kForwardMaps,
  kRingDY = kForwardMaps,
  kRingDGateUp,  // slice 0: d_gate, 1: d_up
  kOwnDY,
  kSharedDGateUp,
  kGateBackward,  // mxfp8: d_input's, rounded along I. fp8: transposed
  kUpBackward,
  kBackwardMaps,
  kRingXCodes = kBackwardMaps,  // fp8
  kRingDYCodes,
  kRingDGateUpCodes,  // slices as of kRingDGateUp
  kBackwardFp8Maps
};

enum ForwardProduct : int16_t {
  kRoutedGateUp,
  kRoutedDown,
  kSharedGateUpProduct,
  kSharedDownProduct,
  kForwardProducts
};

enum BackwardProduct : int16_t {
  kRecomputeGateUp,
  kDHidden,            // from what forward kept
  kDHiddenRecomputed,  // from the ring
  kDInput,
  kGradGate,  // in the order of plan::WeightMatrix, as the shared ones
  kGradUp,
  kGradDown,
  kRecomputeSharedGateUp,
  kRecomputeSharedDown,
  kSharedDHidden,
  kSharedDInput,
  kSharedGradGate,
  kSharedGradUp,
  kSharedGradDown,
  kBackwardProducts
};

// Weight gradients, in the order of their products.
inline constexpr int kGradientMaps = 6;

// Of the routed products, A with 128 and with 144 rows, and B: gate_up (two of these) and down;
// gate_up, d_hidden, d_input (two) and the weight gradients.
inline constexpr int kForwardWideMaps = 4 + 3, kBackwardWideMaps = 4 + 3 + 4 + 4;

template <int kRanks, bool kFp8>
using ForwardTensors = Products<kForwardMaps, kForwardProducts, 0, kFp8 ? kFp8Down + 1 : 0,
                                kRanks == 1 ? kForwardWideMaps : 0>;
template <int kRanks, bool kFp8>
using BackwardTensors = Products<kFp8 ? kBackwardFp8Maps : kBackwardMaps, kBackwardProducts,
                                 kRanks == 1 ? kGradientMaps : 0, kFp8 ? kFp8DInput + 1 : 0,
                                 kRanks == 1 ? kBackwardWideMaps : 0>;

// Throw bad_argument when a tensor map is refused.
void fill_products(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                   TensorMapCache& cache, ForwardTensors<1, false>* out);
void fill_products(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                   TensorMapCache& cache, ForwardTensors<kMaxRanks, false>* out);
void fill_products(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                   TensorMapCache& cache, ForwardTensors<1, true>* out);
void fill_products(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                   TensorMapCache& cache, ForwardTensors<kMaxRanks, true>* out);
void fill_products(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, BackwardTensors<1, false>* out);
void fill_products(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, BackwardTensors<kMaxRanks, false>* out);
void fill_products(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, BackwardTensors<1, true>* out);
void fill_products(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, BackwardTensors<kMaxRanks, true>* out);

}  // namespace mok::cuda
