// Rings of shared-memory slots guarded by pairs of mbarriers.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace mok::cuda {

// Position in a ring of kSlots. A reader waits for parity phase() of a slot's full barrier; a
// writer waits for parity phase() ^ 1 of its empty barrier, which a fresh barrier satisfies.
template <int kSlots>
struct RingCursor {
  static_assert((kSlots & (kSlots - 1)) == 0);
  uint32_t position = 0;

  __device__ __forceinline__ uint32_t slot() const { return position % kSlots; }
  __device__ __forceinline__ uint32_t phase() const { return position / kSlots & 1; }
  // The slot `back` positions ago.
  __device__ __forceinline__ uint32_t slot_before(int back) const {
    return (position - back) % kSlots;
  }
  __device__ __forceinline__ void advance() { ++position; }
};

// Set once by whoever finds a deadline passed or an abort requested. From then on no wait of the
// block blocks: the scheduler hands out nothing, the producer loads nothing, the consumers run
// through what they hold. Nobody leaves from the middle of a tile; that would cost spills.
struct AbortFlag {
  volatile uint32_t raised;
};

// Returns false when the wait ended because of an abort.
__device__ __forceinline__ bool wait(const ptx::Mbarrier& barrier, uint32_t parity,
                                     const AbortFlag& abort) {
  while (!barrier.try_wait(parity)) {
    if (abort.raised != 0) return false;
  }
  return true;
}

// Looks a few times without suspending.
template <int kLooks>
__device__ __forceinline__ bool poll(const ptx::Mbarrier& barrier, uint32_t parity) {
  for (int i = 0; i < kLooks; ++i) {
    if (barrier.test(parity)) return true;
  }
  return false;
}

}  // namespace mok::cuda
