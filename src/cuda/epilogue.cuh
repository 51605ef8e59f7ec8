// Epilogue of a tile, cut into pieces that fit between the wgmma groups of the next tile.
//
// At a tile's end the fp32 accumulators become 64 registers of bf16 pairs (one rounding). Then 16
// slots store them, 8 rows x 64 columns of each warp at a time: stmatrix into the warp's staging,
// 16-byte loads, whole 128-byte lines to memory. Slot 4q + part, q = 2 * column group + row half:
//
//   part 0      gate_up: gate (if kept)                            down: columns   0 .. 127
//   part 1      gate_up: up (if kept)                              down: columns 128 .. 255
//   part 2, 3   gate_up: hidden, computed in two halves            down: nothing
//
// A warpgroup has hardly any wgmma queued while it is in a slot (their issue blocks), so a slot
// must be shorter than the other warpgroup's products of one step: addresses are ready before.
// Slots use nothing outside their warp: warps need not agree on when they run.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

inline constexpr int kEpilogueSlots = 16;
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
__device__ __forceinline__ float swiglu(float g, float u) {
  constexpr float kLog2e = 1.4426950408889634f;
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(g * -kLog2e));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  return g * s * u;
}

// Pairs of bf16.
__device__ __forceinline__ uint32_t swiglu_pair(uint32_t g, uint32_t u, float limit) {
  float g0 = __uint_as_float(g << 16), g1 = __uint_as_float(g & 0xffff0000u);
  float u0 = __uint_as_float(u << 16), u1 = __uint_as_float(u & 0xffff0000u);
  g0 = min_nan(g0, limit), g1 = min_nan(g1, limit);
  u0 = max_nan(min_nan(u0, limit), -limit), u1 = max_nan(min_nan(u1, limit), -limit);
  return ptx::pack_bf16(swiglu(g0, u0), swiglu(g1, u1));
}

// One warp's pending tile.
template <int kProducts>
class PendingTile {
 public:
  PackedTile packed;

  __device__ __forceinline__ PendingTile(TileShared& shared, const Products<kProducts>& products,
                                         uint32_t warp)
      : shared_(shared), products_(products), lane_(threadIdx.x % kWarp), warp_(warp) {}

  // Before the last wait for products: finds the addresses, and for a down tile asks for the row
  // destinations, which are here when its first slot is due.
  __device__ __forceinline__ void prepare(const TileTask& task) {
    const Product& product = products_.product[task.product];
    const bool gate_up = task.kind == TaskKind::gate_up;
    const int first_row = warp_ * 16;
    const int lane_row = first_row + lane_ / 8;
    flags_ = gate_up ? kGateUp : 0;
    row_bytes_ = static_cast<uint32_t>(product.row_elements) * 2;
    const int64_t column = (task.col0 + lane_ % 8 * 8) * 2;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const bool low = group * kGroupN < task.cols;
      const bool high = kHalfN + group * kGroupN < task.cols;
      const bool kept = low && task.save_rows > 0;
      if (gate_up ? kept : low) flags_ |= kPart0 << group;
      if (gate_up ? kept : high) flags_ |= kPart1 << group;
      if (gate_up && low) flags_ |= kHidden << group;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (lane_row + 4 * i < task.rows) flags_ |= kRow << i;
      if (lane_row + 4 * i < task.save_rows) flags_ |= kKeptRow << i;
    }
    if (gate_up) {
      first_ = reinterpret_cast<uint64_t>(product.hidden) + column +
               uint64_t{row_bytes_} * (task.row0 + lane_row);
      second_ = reinterpret_cast<uint64_t>(product.gate) + column +
                uint64_t{row_bytes_} * (task.save_row0 + lane_row);
    } else {
      first_ = column;
      const int row = first_row + lane_;
      second_ = 0;
      if (lane_ < 16 && row < task.rows) {
        second_ = ptx::load_relaxed_gpu(product.row_destination + task.row0 + row);
      }
    }
    product_ = task.product;
  }

  __device__ __forceinline__ bool is_gate_up() const { return flags_ & kGateUp; }

  // Before slot 0.
  __device__ __forceinline__ void keep_destinations() {
    if (!is_gate_up()) {
      if (lane_ < 16) shared_.row_destination[warp_][lane_] = second_;
      __syncwarp();
    }
  }

  template <int kSlot>
  __device__ __forceinline__ void run_slot() {
    constexpr int kPart = kSlot % 4;
    constexpr int kQuarter = kSlot / 4;
    constexpr int kGroup = kQuarter / 2;
    constexpr int kRowHalf = kQuarter % 2;
    constexpr uint32_t kWanted = (kPart == 0 ? kPart0 : kPart == 1 ? kPart1 : kHidden) << kGroup;
    if ((flags_ & kWanted) == 0) return;

    if constexpr (kPart < 2) {
      uint32_t m[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) m[j] = packed.pair(16 * kPart + 8 * kGroup + j, kRowHalf);
      stage(0, m);
      stage(4, m + 4);
    } else {
      constexpr int kFirst = kPart == 2 ? 0 : 4;
      uint32_t m[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        m[j] = swiglu_pair(packed.pair(8 * kGroup + kFirst + j, kRowHalf),
                           packed.pair(16 + 8 * kGroup + kFirst + j, kRowHalf),
                           products_.swiglu_limit);
      }
      stage(kFirst, m);
      if constexpr (kPart == 2) return;
    }
    __syncwarp();
    const uint32_t from = staging() + lane_ / 8 * Staging::kPitch + lane_ % 8 * 16;
    const uint4 upper = ptx::load_shared_16(from);
    const uint4 lower = ptx::load_shared_16(from + 4 * Staging::kPitch);  // 4 rows below
    uint64_t to[2];
    bool valid[2];
    if (is_gate_up()) {
      uint64_t base = kPart < 2 ? second_ : first_;
      if constexpr (kPart == 1) base += up_minus_gate();
      base += uint64_t{row_bytes_} * (8 * kRowHalf);
      constexpr uint32_t kRows = (kPart < 2 ? kKeptRow : kRow) << (2 * kRowHalf);
      to[0] = base, to[1] = base + uint64_t{row_bytes_} * 4;
      valid[0] = flags_ & kRows, valid[1] = flags_ & kRows << 1;
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[i] = shared_.row_destination[warp_][8 * kRowHalf + 4 * i + lane_ / 8];
        valid[i] = to[i] != 0;
        to[i] += first_ + kPart * kHalfN * 2;
      }
    }
    constexpr int kColumn = kGroup * kGroupN * 2;
    if (valid[0]) ptx::store_global_16(reinterpret_cast<void*>(to[0] + kColumn), upper);
    if (valid[1]) ptx::store_global_16(reinterpret_cast<void*>(to[1] + kColumn), lower);
    __syncwarp();  // before the staging is written again
  }

 private:
  static constexpr uint32_t kPart0 = 1, kPart1 = 1 << 2, kHidden = 1 << 4;  // << column group
  static constexpr uint32_t kRow = 1 << 8, kKeptRow = 1 << 12;              // << lane's row
  static constexpr uint32_t kGateUp = 1 << 16;

  __device__ __forceinline__ uint32_t staging() const {
    return ptx::shared_address(shared_.staging[warp_].bytes);
  }
  __device__ __forceinline__ uint64_t up_minus_gate() const {
    const Product& product = products_.product[product_];
    return reinterpret_cast<uint64_t>(product.up) - reinterpret_cast<uint64_t>(product.gate);
  }
  // 8 rows x 32 columns from matrix `first` on.
  __device__ __forceinline__ void stage(int first, const uint32_t* m) {
    ptx::store_matrices(staging() + lane_ % 8 * Staging::kPitch + (first + lane_ / 8) * 16, m[0],
                        m[1], m[2], m[3]);
  }

  TileShared& shared_;
  const Products<kProducts>& products_;
  const uint32_t lane_;
  const uint32_t warp_;  // of all consumer warps
  uint64_t first_;       // lane's address in hidden; down: its byte offset in a row
  uint64_t second_;      // lane's address in gate; down: destination of row `lane`
  uint32_t row_bytes_;
  uint32_t flags_;
  int product_;
};

}  // namespace mok::cuda
