// Runs a problem on the CPU executor with ranks as threads, and gives its results back globally.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mok/layer.h"
#include "problem/problem.h"

namespace mok::test {

// Plays f(rank) on a thread per rank; what each rank threw, if it did.
std::vector<std::optional<Error>> on_ranks(int ranks, const std::function<void(int)>& f);
// The same; throws the first rank's error.
void on_ranks_or_throw(int ranks, const std::function<void(int)>& f);

using Bytes = std::vector<std::byte>;

struct RunOptions {
  Precision precision = Precision::bf16;
  std::vector<int64_t> tokens;  // of each rank
  WorkspaceOptions workspace;   // max_tokens 0 = the most of `tokens`
  GroupOptions group{60, 30};
  bool save = true;  // gate and up rows, the shared expert's rows
  GradMode mode = GradMode::sum;
  IdType id_type = IdType::int64;
  double input_factor = 1;  // of x and d_y, a power of two
};

// One rank's tensors, in memory of exactly their size.
struct RankTensors {
  int64_t tokens = 0;
  Bytes x, ids, topk_weights, d_y;
  Bytes w_gate, w_up, w_down, w_sg, w_su, w_sd, w_vector;
  struct Quantized {  // of w_gate, w_up, w_down; empty unless the precision is quantised
    Bytes data, scales, data_t, scales_t;
  } q_gate, q_up, q_down;
  Bytes saved_gate, saved_up, saved_sg, saved_su, saved_out;
  Bytes y, d_x, d_topk_weights;
  Bytes d_gate, d_up, d_down, d_sg, d_su, d_sd, d_vector;
};

class LayerRun {
 public:
  // Set-up of groups, workspaces and inputs; outputs are filled with garbage (all bits one: NaN).
  LayerRun(const problem::Problem& problem, const RunOptions& options);

  int ranks() const { return static_cast<int>(options_.tokens.size()); }
  void forward();
  void backward();
  void both() {
    forward();
    backward();
  }
  ForwardArgs forward_args(int rank);
  BackwardArgs backward_args(int rank);
  Workspace& workspace(int rank) { return *workspaces_[rank]; }
  Group& group(int rank) { return *groups_[rank]; }
  void destroy(int rank);  // its workspace and group
  RankTensors& rank(int r) { return tensors_[r]; }
  void poison_outputs();

  int64_t id(int rank, int64_t slot) const;
  void set_id(int rank, int64_t slot, int64_t id);
  void set_ids(const std::vector<std::vector<int64_t>>& ids);  // [rank][token * K + k]
  double topk_weight(int rank, int64_t slot) const;
  void set_topk_weight(int rank, int64_t slot, double w);

  // One tensor of all ranks, in rank order: tokens and experts then stand in global order.
  Bytes global(Bytes RankTensors::* tensor) const;
  // y, d_x, d_topk_weights and the routed weight gradients, one after the other.
  Bytes all_outputs(bool backward = true) const;

 private:
  RunOptions options_;
  LayerShape shape_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<Workspace>> workspaces_;
  std::vector<RankTensors> tensors_;
};

// Scaled error of every output against the oracle, as a multiple of the tolerance; > 1 fails.
// Empty text: everything passes.
std::string compare_with_oracle(const problem::Problem& problem, const RunOptions& options,
                                LayerRun& run, bool backward);

std::vector<int64_t> split(int64_t tokens, int ranks);  // evenly, the first ranks get the rest

}  // namespace mok::test
