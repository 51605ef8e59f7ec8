// The layer on Hopper GPUs (sm_90a): the ranks that this process plays, on one GPU or several that
// reach each other over NVLink. No CUDA headers here: streams are cudaStream_t passed as void*.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mok/layer.h"

namespace mok::cuda {

struct Options {
  WorkspaceOptions workspace;  // workers and delays are the CPU executor's
  GroupOptions deadlines;
  int comm_blocks = 0;  // blocks of each rank that communicate; 0 = all
  int sm_reserve = 0;   // SMs of each GPU left to others
};

// Why the layer cannot run on `device`; empty when it can.
std::string why_not(int device);
int device_count();

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
  double tiles;     // both products, rows pushed everywhere
  double reduce;
};

// R ranks, rank r on devices[r]; ranks that share a GPU are *virtual*: one launch, its blocks
// divided among them, each with its own memory.
class Workspace {
 public:
  // Takes all memory. Throws bad_argument (sizes: H, I, I_s multiples of 64), unsupported (names
  // the GPU, or the pair of GPUs without peer access), out_of_memory.
  Workspace(const LayerShape& shape, const std::vector<int>& devices, const Options& options);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Enqueues one launch on each GPU and returns. args[r]: rank r's tensors in its GPU's memory,
  // bf16 rows aligned to 16 bytes; streams[r]: of the rank's GPU, the same for ranks that share
  // one. Throws bad_argument, and what an earlier call left behind (see synchronize).
  void forward(const std::vector<ForwardArgs>& args, const std::vector<void*>& streams);

  // Waits for all calls and throws what went wrong in the last one: bad_routing, deadline,
  // disagreement, aborted. After that the next call works.
  void synchronize();

  void inject(const Fault& fault);  // tests only
  Phases phases(int rank);          // of the rank's last call, which must be over
  int64_t memory_bytes(int rank) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mok::cuda
