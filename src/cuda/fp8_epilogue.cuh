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

// From d_h, g and u of 128 columns, a block: d_gate and d_up rounded to it, in bf16 and in codes;
// bf16(w * h), h rounded; the block's part of the router gradient.
template <class Products>
__device__ __forceinline__ void store_d_hidden_fp8(const float (&acc)[kHalfN / 2],
                                                   const Products& products,
                                                   const Fp8Operands& operands,
                                                   const TileTask& task) {
  const Product& product = products.product[task.product];
  const auto& of = product.d_hidden;
  const QuadLane lane = QuadLane::here();
  const bool limited = products.swiglu_limit != INFINITY;
  const uint64_t row_bytes = static_cast<uint32_t>(of.row_elements) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile_row(half);
    const bool valid = row < task.rows;
    const uint32_t column = (task.col0 + lane.index() * 8) * 2;
    const uint64_t in =
        uint64_t(row + (product.gate_in_ring ? task.row0 : task.save_row0)) * row_bytes + column;
    uint32_t gate[16] = {}, up[16] = {};  // columns 32 q + 8 (lane % 4) .. in words 4 q ..
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (!valid || q * 32 >= task.cols) continue;
      ptx::load_global_16(gate + 4 * q, reinterpret_cast<const uint8_t*>(of.gate) + in + q * 64);
      ptx::load_global_16(up + 4 * q, reinterpret_cast<const uint8_t*>(of.up) + in + q * 64);
    }
    float weight = 1;
    if (of.row_weight != nullptr && valid) {
      weight = ptx::load_relaxed_gpu(of.row_weight + task.save_row0 + row);
    }
    uint32_t d_h[16], d_gate[16], d_up[16], hidden[16];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * q + i) + 2 * half;
        m[i] = ptx::pack_bf16(acc[at], acc[at + 1]);
      }
      const uint4 v = lane.transpose(m);
      d_h[4 * q] = v.x, d_h[4 * q + 1] = v.y, d_h[4 * q + 2] = v.z, d_h[4 * q + 3] = v.w;
      const bool inside = valid && q * 32 < task.cols;
#pragma unroll
      for (int i = 4 * q; i < 4 * q + 4; ++i) {
        const SwigluGrads out =
            limited ? swiglu_grad_pair<true>(gate[i], up[i], d_h[i], weight, products.swiglu_limit)
                    : swiglu_grad_pair<false>(gate[i], up[i], d_h[i], weight, INFINITY);
        d_gate[i] = inside ? out.d_gate : 0;
        d_up[i] = inside ? out.d_up : 0;
        hidden[i] = inside ? out.hidden : 0;
        if (!inside) d_h[i] = 0;
      }
    }
    const uint32_t amax[3] = {quad_amax(d_gate), quad_amax(d_up), quad_amax(hidden)};
    const uint32_t small[3] = {mx_small(amax[0]), mx_small(amax[1]), mx_small(amax[2])};
    float dot = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      d_gate[i] = mx_round_pair(d_gate[i], small[0]);
      d_up[i] = mx_round_pair(d_up[i], small[1]);
      const uint32_t h = mx_round_pair(hidden[i], small[2]);
      dot = fmaf(low_float(d_h[i]), low_float(h), dot);
      dot = fmaf(high_float(d_h[i]), high_float(h), dot);
      hidden[i] = ptx::pack_bf16(weight * low_float(h), weight * high_float(h));
    }
    if (row < task.save_rows) {
      const uint64_t at = uint64_t(task.row0 + row) * row_bytes + column;
      const auto store = [&](__nv_bfloat16* base, const uint32_t (&v)[16]) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          if (q * 32 >= task.cols) continue;
          ptx::store_global_16(reinterpret_cast<uint8_t*>(base) + at + q * 64,
                               uint4{v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]});
        }
      };
      store(of.d_gate, d_gate);
      store(of.d_up, d_up);
      store(of.hidden, hidden);
    }
    dot += __shfl_xor_sync(~0u, dot, 1);
    dot += __shfl_xor_sync(~0u, dot, 2);
    if (!valid) continue;
    const int64_t codes_row = int64_t{task.row0 + row} * operands.codes_row_bytes;
    const auto store_codes = [&](uint8_t* base, const uint32_t (&v)[16], uint32_t of_block) {
      const numerics::e8m0 scale = scale_of_amax(of_block);
      const float inverse = numerics::mx_inverse(scale);
      uint8_t* const to = base + codes_row;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (q * 32 >= task.cols) continue;
        const auto four = [&](int i) {
          return codes_of_pair(v[i], inverse) | codes_of_pair(v[i + 1], inverse) << 16;
        };
        ptx::store_global_8(to + task.col0 + q * 32 + lane.index() * 8, four(4 * q),
                            four(4 * q + 2));
      }
      if (lane.index() == 0) {
        ptx::store_global_byte(to + operands.codes_scales_at + task.col0 / kHalfN, scale.bits);
      }
    };
    store_codes(operands.codes[0], d_gate, amax[0]);
    store_codes(operands.codes[1], d_up, amax[1]);
    if (of.partials != nullptr && lane.index() == 0) {
      of.partials[int64_t{task.row0 + row} * of.partial_columns + task.col0 / kHalfN] = dot;
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
