// The layer: an EP group, the workspace that its ranks share, and the two directions.
//
//   auto groups = mok::Group::threads(2);                     // or Group::processes(...)
//   mok::Workspace ws(*groups[rank], shape, mok::Precision::bf16, {.max_tokens = 4096});
//   ws.forward(args);  ws.backward(args);                     // every rank makes the same calls
//
// What is computed: contract in docs/numerics.md. Calls block until the rank's outputs are
// complete.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mok/error.h"
#include "mok/types.h"

namespace mok {

struct GroupOptions {
  double arrival_seconds = 600;  // deadline for a peer to arrive at a call; 0 = none
  double progress_seconds = 60;  // deadline without progress inside a call; 0 = none
};

// One rank's membership of an EP group. Movable by pointer only.
class Group {
 public:
  virtual ~Group() = default;
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  const GroupOptions& options() const { return options_; }

  // R ranks as threads of this process; element r is for the thread that plays rank r.
  // Throws bad_argument unless 1 <= ranks <= kMaxRanks.
  static std::vector<std::unique_ptr<Group>> threads(int ranks, GroupOptions options = {});

  // One rank of R processes of one machine that meet in POSIX shared memory under `name` (letters,
  // digits, '-' and '_'; unique to this group, the same on all ranks). Collective. Throws
  // out_of_memory when /dev/shm is too small, deadline when a peer does not come.
  static std::unique_ptr<Group> processes(const std::string& name, int rank, int ranks,
                                          GroupOptions options = {});

  // Collective: `bytes` (the same on every rank) of zeroed memory on each rank that all ranks see.
  // Returns this process's addresses of each rank's block. `what` names it in errors.
  virtual std::vector<std::byte*> allocate_symmetric(const std::string& what, int64_t bytes) = 0;
  // Gives back this rank's mapping; never waits for peers. `blocks` as returned above.
  virtual void free_symmetric(const std::vector<std::byte*>& blocks) noexcept = 0;
  // True when the peer is known to be gone (its process has ended).
  virtual bool peer_is_gone(int rank) const = 0;

 protected:
  Group(int rank, int ranks, GroupOptions options)
      : rank_(rank), ranks_(ranks), options_(options) {}
  int rank_;
  int ranks_;
  GroupOptions options_;
};

struct WorkspaceOptions {
  int64_t max_tokens = 0;         // T_max: most tokens on any rank in any call; agreed by all ranks
  int64_t ring_rows = 0;          // rows of x and hidden in flight; 0 = what fits the expected rows
  int64_t minibatch_rows = 4096;  // rows between two interleavings of the two products
  int64_t saved_rows = -1;        // rows of gate and up that forward keeps for backward; -1 = all
                                  // that fit `default_saved_rows`; the rest is recomputed
  int compute_workers = 0;        // CPU threads per rank; 0 = cores / local ranks
  int comm_workers = 1;           // CPU threads per rank that stage and fetch rows
  uint64_t delay_seed = 0;        // tests: not 0 = random delays before tasks
};

// A routed weight in FP8, one matrix after the other; made by `quantize_weights` (mok/quantize.h).
struct QuantizedStack {
  const void* data = nullptr;       // E4M3 [E_local, rows, columns], blocks along the columns
  const uint8_t* scales = nullptr;  // E8M0; layout: mok/quantize.h
};
struct QuantizedWeights {
  QuantizedStack gate, up, down;        // [E_local, I, H], [E_local, I, H], [E_local, H, I]
  QuantizedStack gate_t, up_t, down_t;  // the transposed matrices, quantised along *their* rows
};

// What products of precision mxfp8 read on GPUs: bf16 tensors of the shapes of gate, up and down
// whose numbers are those of the quantised weights, which bf16 holds exactly. Made from bf16
// weights or from quantised ones by src/cuda/quantize.h.
struct RoundedWeights {
  ConstStack gate, up, down;                             // rounded along the last dimension
  ConstStack gate_backward, up_backward, down_backward;  // rounded along the one before
};

struct LayerWeights {
  ConstStack gate, up;                       // [E_local, I, H]
  ConstStack down;                           // [E_local, H, I]
  ConstMatrix shared_gate_proj;              // [I_s, H], null without a shared expert
  ConstMatrix shared_up_proj;                // [I_s, H]
  ConstMatrix shared_down_proj;              // [H, I_s]
  const void* shared_gate_vector = nullptr;  // [H], only with shape.shared_gate
  // mxfp8 and fp8 read these instead of gate, up and down, which may be null: `quantized` on CPUs,
  // on GPUs in fp8 too, and in mxfp8 `rounded`. Forward: gate, up, down. Backward: gate_t, up_t,
  // down_t (or gate_backward, up_backward, down_backward), and gate, up to recompute rows that were
  // not saved. Whoever changes the weights makes these anew; the layer has no way to see it.
  QuantizedWeights quantized;
  RoundedWeights rounded;
};

// What forward leaves for backward, in the caller's memory, all in the storage type, contiguous.
// Null pointers: nothing is kept, and backward recomputes it.
struct Saved {
  void* gate = nullptr;         // [saved_rows, I] in the rank's row order
  void* up = nullptr;           // [saved_rows, I]
  void* shared_gate = nullptr;  // [T, I_s]
  void* shared_up = nullptr;    // [T, I_s]
  void* shared_out = nullptr;   // [T, H]   r_s, needed only with shape.shared_gate
};

struct ForwardArgs {
  int64_t tokens = 0;              // T of this rank, 0..max_tokens
  ConstMatrix x;                   // [T, H]
  const void* topk_ids = nullptr;  // [T, K] contiguous, global expert ids, -1 = routes nowhere
  IdType id_type = IdType::int64;
  const void* topk_weights = nullptr;  // [T, K] contiguous, fp32 (fp64 in fp64)
  LayerWeights weights;
  Saved saved;
  Matrix y;  // [T, H] out
};

// How a weight gradient is delivered; S is the complete sum (fp32; fp64 in fp64).
enum class GradMode {
  none,        // not wanted: its products are skipped
  storage,     // S rounded to the storage type
  sum,         // S itself
  accumulate,  // target = target + S (fp32; fp64 in fp64)
};
struct StackGrad {
  Stack target;
  GradMode mode = GradMode::none;
};
struct MatrixGrad {
  Matrix target;
  GradMode mode = GradMode::none;
};

struct BackwardArgs {
  // As given to forward.
  int64_t tokens = 0;
  ConstMatrix x;
  const void* topk_ids = nullptr;
  IdType id_type = IdType::int64;
  const void* topk_weights = nullptr;
  LayerWeights weights;
  Saved saved;
  ConstMatrix d_y;  // [T, H]
  // Out. d_x and d_topk_weights may be null (not wanted).
  Matrix d_x;                      // [T, H]
  void* d_topk_weights = nullptr;  // [T, K] contiguous
  StackGrad d_gate, d_up, d_down;  // as the weights
  MatrixGrad d_shared_gate_proj, d_shared_up_proj, d_shared_down_proj;
  MatrixGrad d_shared_gate_vector;  // [1, H]
};

// Rows that forward keeps by default: the expected share of a rank, a quarter more, and a tile for
// each local expert, never more than the worst case.
int64_t default_saved_rows(const LayerShape& shape, int ranks, int64_t max_tokens);

// One rank's part of the memory of a layer configuration; shared by all layers of that shape.
class Workspace {
 public:
  // Collective. Throws bad_argument (names the argument), disagreement, out_of_memory.
  Workspace(Group& group, const LayerShape& shape, Precision precision, WorkspaceOptions options);
  ~Workspace();  // never waits for peers
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Collective, in the same order on all ranks. Several forwards may be in flight before their
  // backwards. Errors: see ErrorCode; after one, the next call on all ranks works.
  void forward(const ForwardArgs& args);
  void backward(const BackwardArgs& args);

  const LayerShape& shape() const;
  Precision precision() const;
  const WorkspaceOptions& options() const;  // with the defaults filled in
  int64_t memory_bytes() const;             // symmetric + local memory of this rank

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mok
