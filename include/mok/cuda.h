// The layer on Hopper GPUs (sm_90a): the ranks that this process plays, on GPUs that reach each
// other over NVLink. No CUDA headers here: streams are cudaStream_t passed as void*.
//
//   one process, R GPUs                        R processes, a GPU each
//   Workspace ws(shape, {0, 1, 2, 3}, o);      Workspace ws(shape, symmetric_memory, o);
//   ws.forward(args, streams);                 ws.forward({args}, {stream});
//   ws.backward(args, streams);                ws.backward({args}, {stream});
//
// Every rank makes the same calls in the same order. Several forwards may be in flight before
// their backwards, whose order is free.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mok/layer.h"

namespace mok::cuda {

// Whether the kernels compute in that precision.
constexpr bool runs(Precision precision) {
  return precision == Precision::bf16 || is_quantized(precision);
}

// How many ranks may share a GPU: what fits the parameters of a kernel.
constexpr int most_ranks_of_a_gpu(Precision precision) {
  return precision == Precision::fp8 ? 6 : kMaxRanks;
}

struct Options {
  WorkspaceOptions workspace;             // workers and delays are the CPU executor's
  Precision precision = Precision::bf16;  // mxfp8 reads LayerWeights::rounded, fp8 ::quantized
  GroupOptions deadlines;
  int comm_blocks = 0;  // blocks of each rank that communicate; 0 = all
  int sm_reserve = 0;   // SMs of each GPU left to others
};

// Why the layer cannot run on `device`; empty when it can.
std::string why_not(int device);
int device_count();

// One rank of R processes, and memory that all of them can reach: for example PyTorch's symmetric
// memory. The blocks are the caller's and outlive the workspace.
struct SymmetricMemory {
  SymmetricMemory(int rank_, int device_, std::vector<void*> blocks_)
      : rank(rank_), device(device_), blocks(std::move(blocks_)) {}
  int rank;
  int device;                 // of this process's rank
  std::vector<void*> blocks;  // [R] every rank's block, mapped here; aligned to 1024 bytes
};
// Bytes of each rank's block: the same on all ranks for the same shape, ranks, max_tokens and
// precision.
int64_t symmetric_bytes(const LayerShape& shape, int ranks, const Options& options);

// For tests: what is wrong with the next call. Made by the host alone; the kernel does not know.
struct Fault {
  enum Queue { schedule, compute, communication };
  int absent_rank = -1;  // its blocks are not launched: a peer that never comes
  int losing_rank = -1;  // loses the first ticket of `lost`: more is awaited than will come
  Queue lost = schedule;
};

// How long the parts of a call took, in microseconds, to the last block of each.
struct Phases {
  double schedule;  // ids exchanged, rows placed
  double tiles;     // all products, rows pushed everywhere
  double reduce;
};

class Workspace {
 public:
  // All R ranks, rank r on devices[r]; ranks that share a GPU are *virtual*: one launch, its blocks
  // divided among them, each with its own memory.
  // Takes all memory. Throws bad_argument (sizes: H, I, I_s multiples of 64), unsupported (names
  // the GPU, the pair of GPUs without peer access, the precision, or how many ranks share a GPU),
  // out_of_memory.
  Workspace(const LayerShape& shape, const std::vector<int>& devices, const Options& options);
  // One rank; the others are other processes'. Collective: a barrier of all processes must come
  // between this and the first call, because each clears its own block here.
  Workspace(const LayerShape& shape, const SymmetricMemory& memory, const Options& options);
  ~Workspace();  // waits for this process's calls, never for peers
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Each enqueues one launch on each GPU and returns. args[i], streams[i]: of this process's i-th
  // rank, in its GPU's memory; ranks that share a GPU have one stream. Rows of matrices are aligned
  // to 16 bytes, in memory and by their strides. Throws bad_argument, and what an earlier call left
  // behind (see synchronize); then nothing was enqueued.
  //
  // All ranks must want the same gradients, else disagreement. A rank without tokens has no say
  // about d_x and d_topk_weights beside other ranks of its process; alone in its process it wants
  // what is not null, so an empty tensor needs some address that is not null.
  // Saved pointers that are null: see mok::Saved; backward recomputes, with the same bits.
  void forward(const std::vector<ForwardArgs>& args, const std::vector<void*>& streams);
  void backward(const std::vector<BackwardArgs>& args, const std::vector<void*>& streams);

  // Waits for this process's last call and throws what went wrong: bad_routing, deadline,
  // disagreement, aborted. Calls that a graph replays are not known here: wait for them before.
  //
  // With all ranks in one process the next call works. With one rank a process it does after
  // bad_routing, which all ranks find; after the others every call throws `aborted` until
  // `recover`, because a peer may still be inside.
  void synchronize();

  // Ends the call that is running, and any later one, on all ranks: their next call or
  // `synchronize` throws `aborted`, and so does this workspace's, with `why`. From any thread.
  // For a rank that cannot make a call that its peers make.
  void abort(const std::string& why);

  // After an error of R processes, on all of them, whether they saw it or not:
  //   synchronize() (what it throws is known); barrier; recover(); barrier
  // The first barrier says that nobody is inside a call, the second that all blocks are clear.
  void recover();

  const WorkspaceOptions& options() const;  // with the defaults filled in
  int64_t memory_bytes(int i) const;  // of this process's i-th rank, symmetric memory included

  void inject(const Fault& fault);  // tests only
  Phases phases(int i);             // of the i-th rank's last call, which must be over

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mok::cuda
