// What a tile task is, where its operands and results lie, and the shared memory of the tile core.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/pipeline.cuh"
#include "cuda/ptx/barrier.cuh"

namespace mok::cuda {

// Tile: kTileM rows x kTileN columns of wgmma, K in steps of kTileK.
inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;
inline constexpr int kHalfM = 64;   // rows of one consumer warpgroup
inline constexpr int kHalfN = 128;  // gate columns (and up columns) of a gate-up tile
inline constexpr int kGroupN = 64;  // sizes are multiples of it; a load of B, an epilogue slot
inline constexpr int kStages = 4;
inline constexpr int kTaskSlots = 4;  // drawn, loading, multiplying, storing

inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumerGroups = 2;
inline constexpr int kConsumerWarps = kConsumerGroups * kWarpgroup / kWarp;
inline constexpr int kThreads = (1 + kConsumerGroups) * kWarpgroup;
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;

// Warps of warpgroup 0; warpgroups 1 and 2 consume.
enum class ProducerWarp : int { load, schedule, publish, communicate };

enum class TaskKind : int16_t { stop, gate_up, down };

// gate_up: rows x cols of hidden = silu(x w_gate^T) * (x w_up^T); col0 and cols count gate columns.
// down: rows x cols of hidden w_down^T, each row stored at its own destination.
// Drawn and decoded once by the scheduler; nobody else divides.
struct alignas(16) TileTask {
  TaskKind kind;
  int16_t product;       // index into Products
  int32_t steps;         // K / kTileK
  int32_t rows;          // valid rows, 1 .. kTileM
  int32_t cols;          // valid columns, a multiple of kGroupN
  int32_t row0;          // first row in A and in hidden
  int32_t col0;          // first column of the result; row of the weight matrix
  int32_t save_row0;     // first row in gate and up, or in the destination table
  int32_t save_rows;     // gate_up: rows of the tile whose gate and up are kept
  int32_t expert;        // third coordinate of the weight maps
  int32_t wait_counter;  // the last three are for the hooks alone
  int32_t wait_target;
  int32_t done_counter;

  // What a consumer must know before it starts, in one word.
  struct Shape {
    uint32_t word;
    __device__ __forceinline__ int steps() const { return static_cast<int>(word & 0xffff); }
    __device__ __forceinline__ bool low_half_only() const { return word >> 16 & 1; }  // of rows
    __device__ __forceinline__ bool narrow() const { return word >> 17 & 1; }  // half of kTileN
    __device__ __forceinline__ bool stop() const { return word >> 18 & 1; }
  };
  __device__ __forceinline__ Shape shape_of() const {
    const int whole = kind == TaskKind::gate_up ? kHalfN : kTileN;
    return {static_cast<uint32_t>(steps) | uint32_t{rows <= kHalfM} << 16 |
            uint32_t{cols <= whole / 2} << 17 | uint32_t{kind == TaskKind::stop} << 18};
  }
};
static_assert(sizeof(TileTask) == 48);

// One product's operands and results. All maps: bf16, 128-byte swizzle, 64 columns a box.
struct Product {
  CUtensorMap a;       // {K, rows}, box 64 x 64
  CUtensorMap b_low;   // {K, N, experts}, box 64 x 64 x 1: gate, or down
  CUtensorMap b_high;  // up, or down again
  // gate_up: row-major, `row_elements` a row; gate and up are touched only where save_rows > 0.
  __nv_bfloat16* hidden;
  __nv_bfloat16* gate;
  __nv_bfloat16* up;
  int64_t row_elements;
  // down: address of each row's result, local or in a peer; 0 = do not store.
  const uint64_t* row_destination;
};

// Kernel parameter (__grid_constant__): the copy engine reads the maps from it.
template <int kProducts>
struct Products {
  Product product[kProducts];
  float swiglu_limit;  // +infinity: none
};

// Dynamic shared memory; 1024-byte aligned because the kernel has no static shared memory.
struct TileShared {
  alignas(1024) uint8_t a[kStages][kTileM * kTileK * 2];
  alignas(1024) uint8_t b[kStages][kTileN * kTileK * 2];
  TileTask task[kTaskSlots];
  TileTask::Shape shape[kTaskSlots];
  ptx::Mbarrier full[kStages], empty[kStages];
  ptx::Mbarrier task_full[kTaskSlots], task_done[kTaskSlots], task_empty[kTaskSlots];
  ptx::Mbarrier draw;
  AbortFlag abort;

  // One thread; a block barrier must follow.
  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < kTaskSlots; ++i) {
      task_full[i].init(1);
      task_done[i].init(kConsumerWarps);
      task_empty[i].init(1);
    }
    draw.init(1);
    abort.raised = 0;
    ptx::fence_mbarrier_init();
  }
};

}  // namespace mok::cuda
