// Waits on counters and flags: each has a deadline and watches for an abort.
#pragma once

#include "cuda/pipeline.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/rank_state.h"

namespace mok::cuda {

__device__ __forceinline__ void stamp(const RankState& rank, Stamps::Point point) {
  const auto now = static_cast<unsigned long long>(ptx::global_timer());
  atomicMax(reinterpret_cast<unsigned long long*>(&rank.stamps->at[point]), now);
}

// By one thread of the last block that leaves a call: a rank that only followed a peer (or its own
// host) out of it says so too, since the peer's record may be in another process.
__device__ inline void record_abort(const RankState& rank) {
  const uint32_t by = *const_cast<volatile uint32_t*>(&rank.control(rank.g.rank)->abort);
  if (by == 0 || const_cast<volatile Tickets*>(rank.tickets)->recorded != 0) return;
  volatile ErrorRecord* out = rank.record;
  if (out->kind != ErrorRecord::none) return;  // of an earlier call: that one says why
  out->rank = rank.g.rank;
  out->entry = static_cast<int32_t>(by) - 1;
  ptx::fence_system();
  out->kind = ErrorRecord::aborted;
}

// One rank's waits, as seen by one block. `call` is the number of this call. Everything is inlined:
// a function call in the kernel would cost the consumers registers.
struct Waiter {
  const RankState& rank;
  AbortFlag* abort;  // of the block
  int64_t call;

  // All ranks leave; the first caller of the call writes the record. `entry`: see ErrorRecord.
  // Once a call was given up, nothing that looks wrong is a cause: the rank that gave it up may be
  // in its next call, whose header is another.
  __device__ __forceinline__ void fail(int32_t kind, int32_t task, int32_t entry, int64_t seen,
                                       int64_t awaited) const {
    if (*const_cast<volatile uint32_t*>(&rank.control(rank.g.rank)->abort) == 0) {
      if (atomicExch(&rank.tickets->recorded, 1) == 0) {
        volatile ErrorRecord* out = rank.record;
        out->rank = rank.g.rank;
        out->task = task;
        out->entry = entry;
        out->seen = seen;
        out->awaited = awaited;
        ptx::fence_system();
        out->kind = kind;
      }
      for (int r = 0; r < rank.g.ranks; ++r) {
        ptx::store_release_system(&rank.control(r)->abort, rank.g.rank + 1);
      }
    }
    abort->raised = 1;
  }

  // Spins until look() >= target or an abort.
  template <class Look>
  __device__ __forceinline__ bool until(Look&& look, int64_t target, uint64_t deadline_ns,
                                        int32_t kind, int32_t task, int32_t entry) const {
    constexpr uint32_t kLookAround = 1024;  // spins between two looks at the clock
    uint64_t start = 0;
    for (uint32_t spin = 1; look() < target; ++spin) {
      if (abort->raised != 0) return false;
      if (spin % kLookAround != 0) continue;
      if (*const_cast<volatile uint32_t*>(&rank.control(rank.g.rank)->abort) != 0) {
        abort->raised = 1;
        return false;
      }
      const uint64_t now = ptx::global_timer();
      if (start == 0) start = now;
      if (deadline_ns != 0 && now - start > deadline_ns) {
        fail(kind, task, entry, look(), target);
        return false;
      }
    }
    return true;
  }

  // Entry of the rank's local counters.
  __device__ __forceinline__ bool counter(int32_t entry, uint32_t target, int task) const {
    const uint32_t* at = rank.at<uint32_t>(plan::Buffer::counters) + entry;
    return until([&] { return int64_t{ptx::load_acquire_gpu(at)}; }, target, rank.progress_ns,
                 ErrorRecord::progress, task, entry);
  }

  // The flag that `source` raises here when it reaches the point in this call.
  __device__ __forceinline__ bool flag(plan::Counter c, int source, int task) const {
    const int64_t* at = rank.flag(c, rank.g.rank, source);
    const bool arrival = c == plan::Counter::arrived;
    return until([&] { return ptx::load_acquire_system(at); }, call,
                 arrival ? rank.arrival_ns : rank.progress_ns,
                 arrival ? ErrorRecord::arrival : ErrorRecord::flag, task,
                 rank.counter_first[static_cast<int>(c)] + source);
  }

  __device__ __forceinline__ bool wait(const plan::Wait& w, int task) const {
    return plan::is_flag(w.counter)
               ? flag(w.counter, w.index, task)
               : counter(rank.counter_first[static_cast<int>(w.counter)] + w.index, w.target, task);
  }

  // Raises this rank's flag on all ranks: everything that happened before is visible to them.
  __device__ __forceinline__ void raise(plan::Counter c) const {
    ptx::fence_system();
    for (int r = 0; r < rank.g.ranks; ++r) {
      ptx::store_release_system(rank.flag(c, r, rank.g.rank), call);
    }
  }
};

}  // namespace mok::cuda
