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

// Two rings' positions in one register, for those who have none to spare.
template <int kLowSlots, int kHighSlots>
class CursorPair {
 public:
  __device__ __forceinline__ uint32_t low() const { return word_ % kLowSlots; }
  __device__ __forceinline__ uint32_t low_phase() const { return word_ / kLowSlots & 1; }
  __device__ __forceinline__ uint32_t low_before(int back) const {
    return (word_ - back) % kLowSlots;
  }
  __device__ __forceinline__ void advance_low() { ++word_; }
  __device__ __forceinline__ uint32_t high() const { return word_ / kHigh % kHighSlots; }
  __device__ __forceinline__ uint32_t high_phase() const { return word_ >> 31; }
  __device__ __forceinline__ uint32_t high_before(int back) const {
    return (word_ / kHigh - back) % kHighSlots;
  }
  __device__ __forceinline__ void advance_high() { word_ += kHigh; }  // wraps with the word

 private:
  static_assert((kLowSlots & (kLowSlots - 1)) == 0 && (kHighSlots & (kHighSlots - 1)) == 0);
  static constexpr uint32_t kHigh = 0x80000000u / kHighSlots;  // 2 * kHighSlots positions
  uint32_t word_ = 0;
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
