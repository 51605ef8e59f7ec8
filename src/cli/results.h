// What a run leaves: outputs of each rank on the host, times, memory; and what is made of them.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cli/memory.h"
#include "cli/progress.h"
#include "cli/spec.h"

namespace mok::cli {

enum class Out : int {
  y,               // [T, H]
  d_x,             // [T, H]
  d_topk_weights,  // [T, K]
  // As spec.grads says: sums (fp32; fp64 in fp64) or bf16
  d_w_gate,         // [E_local, I, H]
  d_w_up,           // [E_local, I, H]
  d_w_down,         // [E_local, H, I]
  d_shared_gate,    // [I_s, H], of the rank's own tokens; so are the rest
  d_shared_up,      // [I_s, H]
  d_shared_down,    // [H, I_s]
  d_shared_vector,  // [1, H]
  count
};
inline constexpr int kOuts = static_cast<int>(Out::count);
const char* to_string(Out out);
constexpr bool is_shared(Out out) { return out >= Out::d_shared_gate; }
constexpr bool is_weight_grad(Out out) { return out >= Out::d_w_gate; }

// A rank's part of a tensor: 0 rows where the problem has none.
struct Extent {
  int64_t groups = 0;  // experts, or 1
  int64_t rows = 0;    // of one group
  int64_t columns = 0;
  Precision type = Precision::fp32;
  int64_t elements() const { return groups * rows * columns; }
  int64_t bytes() const { return elements() * element_size(type); }
};
Extent extent(const Spec& spec, int rank, Out out);

using Outputs = std::array<Memory, kOuts>;

struct Outcome {
  std::vector<Outputs> outputs;                 // of each rank
  std::vector<double> forward_ms, backward_ms;  // of each timed call: the slowest rank's
  double quantize_ms = 0;                       // of the weights, once; the slowest rank's
  std::vector<int64_t> memory_bytes;            // of each rank: the workspace
  std::vector<int64_t> tensor_bytes;            // of each rank: inputs, weights, outputs
  std::string changed;                          // not empty: a repeat gave other bits
};

// Runs one problem, or several of the same shape in turn (the weights are the first one's), and
// leaves the outputs of the last call (CUDA: only where bits are compared). Throws Error.
using Sets = std::vector<const problem::Problem*>;
Outcome run_on_cpu(const Spec& spec, const Sets& sets, Progress& progress);
Outcome run_on_cuda(const Spec& spec, const Sets& sets, Progress& progress);
Outcome run(const Spec& spec, const Sets& sets, Progress& progress);

// The hash of each global tensor, in global token and expert order; shared: one per rank.
std::string global_digest(const Spec& spec, const Outcome& outcome, Out out);
std::string rank_digest(const Outcome& outcome, int rank, Out out);

struct CheckedTensor {
  Out out;
  double max_rel_err, scaled_err, tolerance;
  double whole_err,
      whole_tolerance;  // of the tensor; the latter is infinite where it is not judged
  bool pass;
};
// Against the oracle.
std::vector<CheckedTensor> check(const Spec& spec, const problem::Problem& problem,
                                 const Outcome& outcome, Progress& progress);
bool all_pass(const std::vector<CheckedTensor>& checked);

double median(std::vector<double> values);  // 0 when there are none

}  // namespace mok::cli
