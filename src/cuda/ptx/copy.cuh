// The copy engine: tensor loads (TMA) and bulk copies. One thread issues; bytes are counted in by
// an mbarrier (towards shared memory) or by a bulk group (away from it).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace mok::cuda::ptx {

__device__ __forceinline__ void load_tensor(void* to, const CUtensorMap* map, Mbarrier* full,
                                            int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(full)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void load_tensor(void* to, const CUtensorMap* map, Mbarrier* full,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(full)), "r"(c0), "r"(c1), "r"(c2),
      "r"(c3)
      : "memory");
}

__device__ __forceinline__ void store_tensor(const CUtensorMap* map, const void* from, int c0,
                                             int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          reinterpret_cast<uint64_t>(map)),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// Local or peer global memory -> shared memory. Addresses and size: multiples of 16 bytes.
__device__ __forceinline__ void load_bulk(void* to, const void* from, uint32_t bytes,
                                          Mbarrier* full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(full))
      : "memory");
}
// Local global memory -> L2 only: a hint. Address and size: multiples of 16 bytes.
__device__ __forceinline__ void prefetch_bulk(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Shared memory -> local or peer global memory. 128-byte alignment keeps the link full.
__device__ __forceinline__ void store_bulk(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// All but the newest kLeft groups have read their shared memory; it may be overwritten.
template <int kLeft>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
// All but the newest kLeft groups have written. A peer sees them after a system-scope release.
template <int kLeft>
__device__ __forceinline__ void wait_stores_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace mok::cuda::ptx
