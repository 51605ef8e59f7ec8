// The oracle: the layer of all ranks at once, forward and backward, in float64, written to be read.
//
// Nothing here is clever. Tensors are global (all G tokens in rank order, all E experts), a routed
// slot (t, k) is one row, experts are taken one after the other, and what an expert does to its
// rows is one function, used by the shared expert too. It shares no formula with the executors,
// only the conversion to bf16.
//
// Quantised precisions (docs/numerics.md, "Precisions"): the oracle rounds each operand of a routed
// product to the format and goes on in float64, so quantisation is part of what is computed, and
// the gradients are those of the rounded values with every rounding passed straight through.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "mok/types.h"

namespace mok::reference {

// The three matrices of an expert, or their gradients. I is I_s for the shared expert.
struct Expert {
  std::vector<double> gate;  // [I, H]
  std::vector<double> up;    // [I, H]
  std::vector<double> down;  // [H, I]
};

struct Inputs {
  LayerShape shape;
  std::vector<int64_t> rank_tokens;  // T of each rank, in rank order; they add up to G
  std::vector<double> x;             // [G, H]
  std::vector<int64_t> topk_ids;     // [G, K], -1 = routes nowhere
  std::vector<double> topk_weights;  // [G, K]
  std::vector<double> d_y;           // [G, H]; empty: forward only

  // Expert e's weights; called once for each expert that has rows, in order. A function, so that a
  // large model need not be held in float64. See `held` for weights that are.
  std::function<Expert(int e)> expert;
  Expert shared;                    // empty without a shared expert
  std::vector<double> shared_gate;  // [H]; empty: sigma = 1

  // The roundings to bf16 that the contract states; else none at all (what fp32 and fp64 compute).
  // Sums stay in float64 either way.
  bool round_bf16 = false;
  // Blocks of the routed experts' operands: `length` elements along each contraction (0: nothing is
  // quantised), for weights times `weight_rows` across it.
  struct Blocks {
    int64_t length = 0, weight_rows = 1;
  } blocks;
};

// m [rows, columns], each element rounded to the E4M3 numbers of its block of `tall` rows and
// `wide` columns; a block's unit is the smallest power of two >= max(largest |element|, 1e-12) /
// 448.
std::vector<double> quantized(const std::vector<double>& m, int64_t rows, int64_t columns,
                              int64_t tall, int64_t wide);

struct Outputs {
  std::vector<double> y;               // [G, H]
  std::vector<double> d_x;             // [G, H]
  std::vector<double> d_topk_weights;  // [G, K]
  // The shared expert's, for each rank: of that rank's own tokens.
  std::vector<Expert> d_shared;
  std::vector<std::vector<double>> d_shared_gate;  // R x [H]; empty vectors without a gate
};

// Takes the weight gradients S of expert e, in order, e = 0..E-1; zeros for one without rows.
using TakeGradient = std::function<void(int e, const Expert& gradient)>;

// Without d_y only y is computed and `take` is not called. Throws bad_argument (names the field)
// when a size does not fit the shape, bad_routing for an id outside [-1, E).
Outputs run(const Inputs& in, const TakeGradient& take = {});

// Weights held in vectors: [E, I, H], [E, I, H], [E, H, I].
std::function<Expert(int e)> held(const LayerShape& shape, Expert all);
// Collects gradients into `all`, as [E, I, H], [E, I, H], [E, H, I]; it must outlive the call.
TakeGradient collect(Expert& all);

}  // namespace mok::reference
