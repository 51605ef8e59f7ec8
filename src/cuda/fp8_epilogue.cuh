// Epilogues of fp8 tiles, stored where a tile ends. Sums stand as wgmma leaves them; a lane gets 16
// contiguous bytes by shuffles in its quad, as in epilogue.cuh.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/mx.cuh"
#include "cuda/swiglu.cuh"

namespace mok::cuda {

// A lane among the four that share a row.
struct QuadLane {
  bool odd, upper;
  __device__ __forceinline__ static QuadLane here() {
    const uint32_t thread = fresh_thread();
    return {(thread & 1) != 0, (thread & 2) != 0};
  }
  __device__ __forceinline__ int index() const { return (upper ? 2 : 0) + (odd ? 1 : 0); }
  __device__ __forceinline__ uint4 transpose(const uint32_t (&m)[4]) const {
    return transpose_quad(m, odd, upper);
  }
};

// Of a block of 128 columns of a row, of which the quad's lanes have the pairs h: the largest |h|,
// in each half of the word, and the scale.
template <int kWords>
__device__ __forceinline__ uint32_t quad_amax(const uint32_t (&h)[kWords]) {
  return mx_amax_across(mx_amax_across(mx_amax_of_halves(mx_amax(h)), 1), 2);
}
__device__ __forceinline__ numerics::e8m0 scale_of_amax(uint32_t amax) {
  return numerics::mx_scale(__uint_as_float(amax << 16));
}
__device__ __forceinline__ uint32_t codes_of_pair(uint32_t pair, float inverse) {
  return ptx::e4m3x2_of(low_float(pair) * inverse, high_float(pair) * inverse);
}

// Codes of the 128 columns of a row whose pairs h[j] are columns 8j + 2 (lane % 4) + {0, 1}: lane t
// gets columns 16 t .. of either half.
__device__ __forceinline__ void quantize_block(const uint32_t (&h)[16], float inverse,
                                               QuadLane lane, uint4 (&out)[2]) {
  const uint32_t quad = fresh_thread() % kWarp & ~3u;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    uint32_t four[4];  // columns 4 (lane % 4) .. of 16
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 8 * side + 2 * i;
      const uint32_t both = codes_of_pair(h[j], inverse) | codes_of_pair(h[j + 1], inverse) << 16;
      const uint32_t left = __shfl_sync(~0u, both, quad | (lane.odd ? 2 : 0));
      const uint32_t right = __shfl_sync(~0u, both, quad | (lane.odd ? 3 : 1));
      four[i] = __byte_perm(left, right, lane.upper ? 0x7632 : 0x5410);
    }
    out[side] = lane.transpose(four);
  }
}

// h in codes, gate and up (of rows that are kept) in bf16.
template <class Products>
__device__ __forceinline__ void store_gate_up_fp8(const float (&acc)[kTileN / 2],
                                                  const Products& products,
                                                  const Fp8Operands& operands,
                                                  const TileTask& task) {
  const Product& product = products.product[task.product];
  const QuadLane lane = QuadLane::here();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile_row(half);
    const uint64_t kept =
        uint64_t(task.save_row0 + row) * static_cast<uint32_t>(product.gate_up.row_elements) * 2 +
        (task.col0 + lane.index() * 8) * 2;
    uint32_t h[16];
#pragma unroll
    for (int q = 0; q < 4; ++q) {  // 32 columns
      uint32_t gate[4], up[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * q + i) + 2 * half;
        gate[i] = ptx::pack_bf16(acc[at], acc[at + 1]);
        up[i] = ptx::pack_bf16(acc[kTileN / 4 + at], acc[kTileN / 4 + at + 1]);
      }
      const bool inside = q * 32 < task.cols;
      if (task.save_rows > 0) {
        const uint4 g = lane.transpose(gate), u = lane.transpose(up);
        if (inside && row < task.save_rows) {
          ptx::store_global_16(reinterpret_cast<uint8_t*>(product.gate_up.gate) + kept + q * 64, g);
          ptx::store_global_16(reinterpret_cast<uint8_t*>(product.gate_up.up) + kept + q * 64, u);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        h[4 * q + i] = inside ? swiglu_pair(gate[i], up[i], products.swiglu_limit) : 0;
      }
    }
    if (operands.codes[0] == nullptr) continue;
    const numerics::e8m0 scale = scale_of_amax(quad_amax(h));
    uint4 codes[2];
    quantize_block(h, numerics::mx_inverse(scale), lane, codes);
    if (row >= task.rows) continue;
    uint8_t* to = operands.codes[0] + int64_t{task.row0 + row} * operands.codes_row_bytes;
    ptx::store_global_16(to + task.col0 + lane.index() * 16, codes[0]);
    if (task.cols > kGroupN) {
      ptx::store_global_16(to + task.col0 + kGroupN + lane.index() * 16, codes[1]);
    }
    if (lane.index() == 0) {
      ptx::store_global_byte(to + operands.codes_scales_at + task.col0 / kHalfN, scale.bits);
    }
  }
}

// Each row in bf16 at its own destination.
template <class Products>
__device__ __forceinline__ void store_rows(const float (&acc)[kTileN / 2], const Products& products,
                                           const TileTask& task) {
  const Product& product = products.product[task.product];
  const QuadLane lane = QuadLane::here();
  uint64_t to[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile_row(half);
    to[half] = row < task.rows
                   ? row_destination(task, product, row, (task.col0 + lane.index() * 8) * 2)
                   : 0;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int q = 0; q < 8; ++q) {  // 32 columns
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * q + i) + 2 * half;
        m[i] = ptx::pack_bf16(acc[at], acc[at + 1]);
      }
      const uint4 v = lane.transpose(m);
      if (to[half] != 0 && q * 32 < task.cols) {
        ptx::store_global_16(reinterpret_cast<void*>(to[half] + q * 64), v);
      }
    }
  }
}

}  // namespace mok::cuda
