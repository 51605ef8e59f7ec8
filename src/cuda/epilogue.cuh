// What the epilogues of all tiles share. An epilogue is cut into slots that run between the wgmma
// groups of the next tile; at a tile's end the fp32 accumulators become registers of bf16 pairs
// (one rounding), which the slots store:
//
//   gate_up_epilogue.cuh   gate_up, down
//   row_epilogue.cuh       d_input
//   gradient_epilogue.cuh  weight_grad
//   d_hidden_epilogue.cuh  d_hidden
//
// The four lanes that share a row exchange words until each has 16 contiguous bytes. Shuffles, not
// staging (but for weight gradients): two warpgroups' operands and the tensor loads fill the
// bandwidth of shared memory. Hardly any wgmma is queued while a warpgroup is in a slot (their
// issue blocks), so slots are short and find their addresses ready. They use nothing outside their
// warp: warps need not agree on when they run.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

inline constexpr int kPackedRegisters = kTileN / 4;

// pair(j, half): columns 8j + 2*(lane%4) + {0, 1} of row lane/4 + 8*half of the warp's 16 rows.
struct PackedTile {
  // Defined before the first tile, else the compiler keeps it through the loops of other epilogues.
  uint32_t word[kPackedRegisters] = {};

  __device__ __forceinline__ uint32_t pair(int j, int half) const { return word[2 * j + half]; }

  __device__ __forceinline__ void pack(const float (&acc)[kTileN / 2]) {
#pragma unroll
    for (int i = 0; i < kPackedRegisters; ++i) {
      word[i] = ptx::pack_bf16(acc[2 * i], acc[2 * i + 1]);
    }
  }
};

// Lane t of a quad has 4 bytes of each of four 16-byte chunks; it gets the whole of chunk t. `odd`,
// `upper`: the bits of t.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&m)[4], bool odd, bool upper) {
  const uint32_t a = __shfl_xor_sync(~0u, odd ? m[0] : m[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? m[2] : m[3], 1);
  const uint32_t a0 = odd ? a : m[0], a1 = odd ? m[1] : a;  // chunk 0 or 1, two lanes' words
  const uint32_t b0 = odd ? b : m[2], b1 = odd ? m[3] : b;  // chunk 2 or 3
  const uint32_t c0 = __shfl_xor_sync(~0u, upper ? a0 : b0, 2);
  const uint32_t c1 = __shfl_xor_sync(~0u, upper ? a1 : b1, 2);
  return upper ? uint4{c0, c1, b0, b1} : uint4{a0, a1, c0, c1};
}

// The thread's row of a tile.
__device__ __forceinline__ int tile_row(int half) {
  const uint32_t thread = fresh_thread();
  return static_cast<int>((thread - kWarpgroup) / kWarp * 16 + thread % kWarp / 4) + 8 * half;
}

// One warp's pending tile. What a slot needs besides comes from shared or constant memory: with a
// few more registers in use here, the compiler waits for every single wgmma (warning C7511).
template <class Products>
class Epilogue {
 public:
  __device__ __forceinline__ bool pending() const { return flags_ != 0; }
  __device__ __forceinline__ void clear() { flags_ = 0; }

 protected:
  static constexpr uint32_t kPart0 = 1, kPart1 = 1 << 2, kHidden = 1 << 4;  // << column group
  static constexpr uint32_t kMx = 1 << 7;
  static constexpr uint32_t kRow = 1 << 8, kKeptRow = 1 << 12;  // << row half
  static constexpr uint32_t kLane = 1 << 14;                    // lane % 4, two bits
  static constexpr int kKindShift = 16, kProductShift = 24;

  __device__ __forceinline__ explicit Epilogue(const Products& products) : products_(products) {}

  // The lane's row of the tile.
  static __device__ __forceinline__ int row_of(int half) { return tile_row(half); }
  // The first of the lane's eight columns of a group, in bytes from the matrix's first one.
  static __device__ __forceinline__ uint32_t column_bytes(const TileTask& task) {
    return (task.col0 + fresh_thread() % 4 * 8) * 2;
  }

  __device__ __forceinline__ void set_flags(const TileTask& task) {
    const int row = row_of(0);
    flags_ = static_cast<uint32_t>(task.product) << kProductShift |
             static_cast<uint32_t>(task.kind) << kKindShift | fresh_thread() % 4 * kLane;
    if (products_.product[task.product].mx) flags_ |= kMx;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < task.rows) flags_ |= kRow << half;
      if (row + 8 * half < task.save_rows) flags_ |= kKeptRow << half;
    }
  }
  __device__ __forceinline__ TaskKind kind() const {
    return static_cast<TaskKind>(flags_ >> kKindShift & 0xff);
  }
  __device__ __forceinline__ const Product& product() const {
    return products_.product[fresh(flags_) >> kProductShift];
  }

  __device__ __forceinline__ uint4 transpose(const uint32_t (&m)[4]) const {
    const uint32_t flags = fresh(flags_);
    return transpose_quad(m, flags & kLane, flags & 2 * kLane);
  }

  const Products& products_;
  uint32_t flags_ = 0;  // 0: nothing is pending
};

// Where the lane's first column of a row goes that has a destination of its own; 0: nowhere.
__device__ __forceinline__ uint64_t row_destination(const TileTask& task, const Product& product,
                                                    int row, uint32_t column_bytes) {
  const uint64_t to = ptx::load_relaxed_gpu(product.row_destination + task.save_row0 + row);
  return to != 0 ? to + column_bytes : 0;
}

}  // namespace mok::cuda
