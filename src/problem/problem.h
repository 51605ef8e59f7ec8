// A problem: shape, global token count, routing and seed, and from these every input of the layer.
//
// Inputs belong to *global* tokens and experts. A rank asks for its slice and gets the same bits
// however the tokens and experts are split, on every machine. Nothing global is ever held.
//
//   x, d_y   N(0, 1)                weights   N(0, 1) / sqrt(fan-in)
//   topk_weights   positive, of one token adding up to 1 (over all K slots, -1 or not)
//
// With a finite swiglu_limit the gradient jumps where a gate or an up reaches it, so a sum that
// another order of addition rounds to the other side of the limit would be all wrong there. Hence x
// and the inward weights (w_gate, w_up, shared_gate, shared_up) are then whole steps (Grid): x
// multiples of 1/8 within +-4, weights multiples of q within +-16 q, 4 q being the power of two
// nearest to 1 / sqrt(H). A product is a multiple of q/8 of at most 32 * 16 of them; up to
// H = kMostExactHidden their sum stays within 2^24 of them, so it is exact in fp32 in whichever
// order, and gate and up have the same bits everywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "mok/types.h"
#include "problem/random.h"
#include "problem/routing.h"
#include "reference/reference.h"

namespace mok::problem {

// The leading dimension is what a slice is cut from. Part of the meaning of a seed: never reorder.
enum class Tensor {
  x,              // [G, H]
  d_y,            // [G, H]
  w_gate,         // [E, I, H]
  w_up,           // [E, I, H]
  w_down,         // [E, H, I]
  shared_gate,    // [I_s, H]
  shared_up,      // [I_s, H]
  shared_down,    // [H, I_s]
  shared_vector,  // [1, H]
};

inline constexpr int32_t kMostStepsX = 32;       // of 1/8
inline constexpr int32_t kMostStepsWeight = 16;  // of q
inline constexpr int64_t kMostExactHidden = (int64_t{1} << 24) / (kMostStepsX * kMostStepsWeight);

// Throws bad_argument, naming the argument, unless 1 <= H, I; 1 <= E <= kMaxExperts;
// 1 <= K <= min(E, kMaxTopk); 0 <= I_s; a gate only with a shared expert; limit > 0.
void check_shape(const LayerShape& shape);

class Problem {
 public:
  // Throws bad_argument (names the argument). Reads the routing's file, if it is one.
  Problem(const LayerShape& shape, int64_t global_tokens, const Routing& routing, uint64_t seed);

  const LayerShape& shape() const { return shape_; }
  int64_t tokens() const { return tokens_; }  // G
  uint64_t seed() const { return seed_; }

  int64_t leading(Tensor t) const;       // G, E, I_s, H or 1 (0 where there is no shared expert)
  int64_t row_elements(Tensor t) const;  // elements of one step of the leading dimension
  double scale(Tensor t) const;          // standard deviation of the elements, before any steps
  Grid grid(Tensor t) const;             // step 0 where any value may come

  // Elements [begin, end) of the leading dimension, contiguous, in the storage type of `precision`
  // (numerics::bf16, float, double). Safe to call from several threads.
  void fill(Tensor t, int64_t begin, int64_t end, Precision precision, void* out) const;

  // The same values, widened: what an executor is given, as the oracle wants it.
  std::vector<double> values(Tensor t, int64_t begin, int64_t end, Precision precision) const;

  // Tokens [begin, end): ids [n, K] and router weights [n, K]. The weights are fp32 values in
  // either type.
  void fill_topk_ids(int64_t begin, int64_t end, int32_t* out) const;
  void fill_topk_ids(int64_t begin, int64_t end, int64_t* out) const;
  void fill_topk_weights(int64_t begin, int64_t end, float* out) const;
  void fill_topk_weights(int64_t begin, int64_t end, double* out) const;

 private:
  LayerShape shape_;
  int64_t tokens_;
  uint64_t seed_;
  Routes routes_;
};

// The whole problem for the oracle, with the contract's roundings in bf16 and none otherwise.
// `rank_tokens` adds up to problem.tokens(). `problem` must outlive the result.
reference::Inputs oracle_inputs(const Problem& problem, Precision precision,
                                const std::vector<int64_t>& rank_tokens, bool backward);

}  // namespace mok::problem
