// Epilogue of a tile, cut into slots that run between the wgmma groups of the next tile.
//
// At a tile's end the fp32 accumulators become 64 registers of bf16 pairs (one rounding). Then 16
// slots store them, 8 rows x 64 columns of each warp at a time. Slot 4q + part, q = 2 * column
// group + row half:
//
//   part 0      gate_up: gate (if kept)                            down: columns   0 .. 127
//   part 1      gate_up: up (if kept)                              down: columns 128 .. 255
//   part 2, 3   gate_up: hidden, computed in two halves            down: nothing
//
// The four lanes that share a row exchange words until each has 16 contiguous bytes. Shuffles, not
// staging: two warpgroups' operands and the tensor loads fill the bandwidth of shared memory.
// Hardly any wgmma is queued while a warpgroup is in a slot (their issue blocks), so slots are
// short and find their addresses ready. They use nothing outside their warp: warps need not agree
// on when they run.
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

// One warp's pending tile: packed results and where they go.
template <int kProducts>
class PendingTile {
 public:
  PackedTile packed;

  __device__ __forceinline__ explicit PendingTile(const Products<kProducts>& products)
      : products_(products), lane_(threadIdx.x % kWarp) {}

  // Before the last wait for products: finds the addresses, and for a down tile asks for the row
  // destinations, which are here when its first slot is due.
  __device__ __forceinline__ void prepare(const TileTask& task) {
    const Product& product = products_.product[task.product];
    const bool gate_up = task.kind == TaskKind::gate_up;
    // Volatile: computed here, for each tile; kept over the loop it would cost two registers.
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int row = (thread - kWarpgroup) / kWarp * 16 + thread % kWarp / 4;  // and 8 rows below
    flags_ = (gate_up ? kGateUp : 0) | static_cast<uint32_t>(task.product) << kProductShift;
    const uint32_t column = (task.col0 + lane_ % 4 * 8) * 2;
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
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < task.rows) flags_ |= kRow << half;
      if (row + 8 * half < task.save_rows) flags_ |= kKeptRow << half;
    }
    if (gate_up) {
      const uint32_t row_bytes = static_cast<uint32_t>(product.row_elements) * 2;
      first_ = reinterpret_cast<uint64_t>(product.hidden) + column +
               uint64_t{row_bytes} * (task.row0 + row);
      second_ = reinterpret_cast<uint64_t>(product.gate) + column +
                uint64_t{row_bytes} * (task.save_row0 + row);
    } else {
      const uint64_t* table = product.row_destination + task.save_row0 + row;
      first_ = flags_ & kRow ? ptx::load_relaxed_gpu(table) : 0;
      second_ = flags_ & kRow << 1 ? ptx::load_relaxed_gpu(table + 8) : 0;
    }
  }

  __device__ __forceinline__ bool is_gate_up() const { return flags_ & kGateUp; }

  template <int kSlot>
  __device__ __forceinline__ void run_slot(const TileTask& task) {
    constexpr int kPart = kSlot % 4;
    constexpr int kQuarter = kSlot / 4;
    constexpr int kGroup = kQuarter / 2;
    constexpr int kRowHalf = kQuarter % 2;
    constexpr uint32_t kWanted = (kPart == 0 ? kPart0 : kPart == 1 ? kPart1 : kHidden) << kGroup;
    if ((flags_ & kWanted) == 0) return;

    constexpr int kFirst = kPart == 3 ? 4 : 0;  // matrices of 8 columns
    constexpr int kCount = kPart < 2 ? 8 : 4;
    uint64_t to;
    bool valid;
    if (is_gate_up()) {
      to = (kPart < 2 ? second_ : first_) + kRowHalf * 16 * product().row_elements;
      if constexpr (kPart == 1) to += up_minus_gate();
      valid = flags_ & (kPart < 2 ? kKeptRow : kRow) << kRowHalf;
    } else {
      to = kRowHalf == 0 ? first_ : second_;
      valid = to != 0;
      to += (task.col0 + lane_ % 4 * 8 + kPart * kHalfN) * 2;
    }
    to += (kGroup * kGroupN + kFirst * 8) * 2;
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * kGroup + kFirst + j + i;
        m[i] = kPart < 2 ? packed.pair(16 * kPart + at, kRowHalf)
                         : swiglu_pair(packed.pair(at, kRowHalf), packed.pair(16 + at, kRowHalf),
                                       products_.swiglu_limit);
      }
      const uint4 v = transpose(m);
      if (valid) ptx::store_global_16(reinterpret_cast<void*>(to + j * 16), v);
    }
  }

 private:
  static constexpr uint32_t kPart0 = 1, kPart1 = 1 << 2, kHidden = 1 << 4;  // << column group
  static constexpr uint32_t kRow = 1 << 8, kKeptRow = 1 << 12;              // << row half
  static constexpr uint32_t kGateUp = 1 << 16;
  static constexpr int kProductShift = 24;

  __device__ __forceinline__ const Product& product() const {
    return products_.product[flags_ >> kProductShift];
  }
  __device__ __forceinline__ uint64_t up_minus_gate() const {
    return reinterpret_cast<uint64_t>(product().up) - reinterpret_cast<uint64_t>(product().gate);
  }
  // Lane t of a quad has 4 bytes of each of four 16-byte chunks; it gets the whole of chunk t.
  __device__ __forceinline__ uint4 transpose(const uint32_t (&m)[4]) const {
    const bool odd = lane_ & 1, upper = lane_ & 2;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? m[0] : m[1], 1);
    const uint32_t b = __shfl_xor_sync(~0u, odd ? m[2] : m[3], 1);
    const uint32_t a0 = odd ? a : m[0], a1 = odd ? m[1] : a;  // chunk 0 or 1, two lanes' words
    const uint32_t b0 = odd ? b : m[2], b1 = odd ? m[3] : b;  // chunk 2 or 3
    const uint32_t c0 = __shfl_xor_sync(~0u, upper ? a0 : b0, 2);
    const uint32_t c1 = __shfl_xor_sync(~0u, upper ? a1 : b1, 2);
    return upper ? uint4{c0, c1, b0, b1} : uint4{a0, a1, c0, c1};
  }

  const Products<kProducts>& products_;
  const uint32_t lane_;
  // gate_up: the lane's place in hidden and in gate. down: destinations of the lane's row and of
  // the row 8 below. What else a slot needs comes from shared or constant memory: with a few more
  // registers in use here, the compiler waits for every single wgmma (warning C7511).
  uint64_t first_, second_;
  uint32_t flags_;
};

}  // namespace mok::cuda
