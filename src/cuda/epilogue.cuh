// Epilogue of a tile, cut into pieces that fit between the wgmma groups of the next tile.
//
// At a tile's end the fp32 accumulators become 64 registers of bf16 pairs (one rounding). A slot
// then stores 8 rows x 64 columns of each warp: stmatrix into the warp's staging, 16-byte loads,
// whole 128-byte lines to memory. Slot 3q + part, q = 2 * column group + row half:
//
//   part 0   gate_up: gate (if kept)      down: columns   0 .. 127
//   part 1   gate_up: up   (if kept)      down: columns 128 .. 255
//   part 2   gate_up: hidden              down: nothing
//
// Pieces use nothing outside their warp, so warps need not agree on when they run.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

inline constexpr int kEpilogueSlots = 12;
inline constexpr int kPackedRegisters = kTileN / 4;

// pair(j, half): columns 8j + 2*(lane%4) + {0, 1} of row lane/4 + 8*half of the warp's 16 rows.
struct PackedTile {
  uint32_t word[kPackedRegisters];

  __device__ __forceinline__ uint32_t pair(int j, int half) const { return word[2 * j + half]; }

  __device__ __forceinline__ void pack(const float (&acc)[kTileN / 2]) {
#pragma unroll
    for (int i = 0; i < kPackedRegisters; ++i) {
      word[i] = ptx::pack_bf16(acc[2 * i], acc[2 * i + 1]);
    }
  }
  // A narrow gate-up tile has its 64 columns of up right behind those of gate.
  __device__ __forceinline__ void move_up() {
#pragma unroll
    for (int i = 0; i < kPackedRegisters / 4; ++i) {
      word[kPackedRegisters / 2 + i] = word[kPackedRegisters / 4 + i];
    }
  }
};

// min and max that let NaN through, as the contract asks.
__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// silu(g) * u in fp32, g / (1 + exp(-g)) as IEEE orders it: silu(-inf) = -inf / inf = NaN,
// silu(inf) = inf, NaN stays. Relative error about 1e-6 for |g| < 20, growing as |g| * 6e-8 below
// that; under g = -87 the true value (< 1e-36) is flushed to -0.
__device__ __forceinline__ float swiglu(float g, float u, float limit) {
  g = min_nan(g, limit);
  u = max_nan(min_nan(u, limit), -limit);
  return __fdividef(g, 1.0f + __expf(-g)) * u;
}

__device__ __forceinline__ uint32_t swiglu_pair(uint32_t g, uint32_t u, float limit) {
  const float low = swiglu(__uint_as_float(g << 16), __uint_as_float(u << 16), limit);
  const float high =
      swiglu(__uint_as_float(g & 0xffff0000u), __uint_as_float(u & 0xffff0000u), limit);
  return ptx::pack_bf16(low, high);
}

struct EpilogueWarp {
  uint32_t lane;
  uint32_t row;        // first of the warp's 16 rows in the tile
  uint32_t write_at;   // shared address for stmatrix
  uint32_t read_at;    // shared address for the 16-byte loads
  const uint64_t* row_destination;  // shared memory, 16 rows

  __device__ __forceinline__ EpilogueWarp(TileShared& shared, uint32_t warp, uint32_t lane)
      : lane(lane), row(warp * 16), row_destination(shared.row_destination[warp]) {
    const uint32_t base = ptx::shared_address(shared.staging[warp].bytes);
    write_at = base + lane % 8 * Staging::kPitch + lane / 8 * 16;
    read_at = base + lane / 8 * Staging::kPitch + lane % 8 * 16;
  }
};

// Stores 8 rows x 64 columns; address(i) gives this lane's 16 bytes of rows lane/8 + 4i, or 0.
template <class Address>
__device__ __forceinline__ void store_piece(const EpilogueWarp& at, const uint32_t (&m)[8],
                                            Address&& address) {
  __syncwarp();  // the piece before has been read
  ptx::store_matrices(at.write_at, m[0], m[1], m[2], m[3]);
  ptx::store_matrices(at.write_at + 64, m[4], m[5], m[6], m[7]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 v = ptx::load_shared_16(at.read_at + 4 * i * Staging::kPitch);
    const uint64_t to = address(i);
    if (to != 0) ptx::store_global_16(reinterpret_cast<void*>(to), v);
  }
}

// `task` is in shared memory: the registers belong to the accumulators.
template <int kSlot, int kProducts>
__device__ __forceinline__ void run_slot(const EpilogueWarp& at, const PackedTile& tile,
                                         const TileTask& task,
                                         const Products<kProducts>& products) {
  constexpr int kPart = kSlot % 3;
  constexpr int kRowHalf = kSlot / 3 % 2;
  constexpr int kGroup = kSlot / 6;
  const Product& product = products.product[task.product];
  const bool gate_up = task.kind == TaskKind::gate_up;
  const uint32_t first_row = at.row + 8 * kRowHalf + at.lane / 8;  // + 4i
  const uint32_t lane_column = at.lane % 8 * 8;
  uint32_t m[8];

  if constexpr (kPart == 2) {
    if (!gate_up || kGroup * kGroupN >= task.cols) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      m[j] = swiglu_pair(tile.pair(8 * kGroup + j, kRowHalf),
                         tile.pair(16 + 8 * kGroup + j, kRowHalf), products.swiglu_limit);
    }
    store_piece(at, m, [&](int i) {
      const uint32_t row = first_row + 4 * i;
      const int64_t element = (task.row0 + row) * product.row_elements + task.col0 +
                              kGroup * kGroupN + lane_column;
      return row < task.rows ? reinterpret_cast<uint64_t>(product.hidden + element) : 0;
    });
  } else {
    const int column = kGroup * kGroupN + (gate_up ? 0 : kPart * kHalfN);
    if (column >= task.cols || (gate_up && task.save_rows == 0)) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) m[j] = tile.pair(16 * kPart + 8 * kGroup + j, kRowHalf);
    store_piece(at, m, [&](int i) -> uint64_t {
      const uint32_t row = first_row + 4 * i;
      if (gate_up) {
        const int64_t element =
            (task.save_row0 + row) * product.row_elements + task.col0 + column + lane_column;
        return row < task.save_rows
                   ? reinterpret_cast<uint64_t>((kPart == 0 ? product.gate : product.up) + element)
                   : 0;
      }
      const uint64_t to = at.row_destination[row - at.row];
      return to != 0 ? to + (task.col0 + column + lane_column) * 2 : 0;
    });
  }
}

// A down tile's row destinations: asked for while the last products run, kept by the warp.
template <int kProducts>
__device__ __forceinline__ void fetch_row_destinations(TileShared& shared, const EpilogueWarp& at,
                                                       const TileTask& task,
                                                       const Products<kProducts>& products) {
  if (task.kind != TaskKind::down) return;
  if (at.lane < 16) {
    const uint32_t row = at.row + at.lane;
    uint64_t to = 0;
    if (row < task.rows) {
      to = ptx::load_relaxed_gpu(products.product[task.product].row_destination + task.row0 + row);
    }
    const_cast<uint64_t*>(at.row_destination)[at.lane] = to;
  }
  __syncwarp();
}

}  // namespace mok::cuda
