// Epilogue of fp8's d_hidden tiles: from d_h = d_y w_down, g and u of 256 columns, two blocks of
// codes, to d_gate and d_up, rounded to their blocks, in bf16 and in codes; to bf16(w * h), h
// rounded; and to the tile's part of the router gradient.
//
//   for each half (8 of a warp's 16 rows) and block of 128 columns
//     for each chunk of 32 columns   g, u, d_h -> d_gate, d_up, h
//     largest of the row in each     -> scales
//     for each chunk                 round, weigh, add to the router gradient, store
//
// Loops, not straight code: straight, instructions came too late (33 thousand cycles for 128
// columns). A chunk is the first four words of each array, which move up a chunk each time; a block
// is the first 16 words of d_h. g and u are asked for a block ahead.
#pragma once

#include "cuda/fp8_epilogue.cuh"

namespace mok::cuda {

inline constexpr int kDHiddenChunks = kHalfN / 32;
inline constexpr int kDHiddenWords = kHalfN / 8;  // pairs that a lane has of a row of a block
inline constexpr int kDHiddenBlocks = kTileN / kHalfN;

// A lane's part of a row of a block: columns 32 q + 8 (lane % 4) .. in words 4 q ..
struct DHiddenInputs {
  uint32_t gate[kDHiddenWords], up[kDHiddenWords];
  float weight;
};

// Columns of a tile that are in a block, a multiple of 64.
__device__ __forceinline__ int columns_of_block(const TileTask& task, int block) {
  return min(max(task.cols - block * kHalfN, 0), kHalfN);
}

// `part`: kDHiddenBlocks * half + block. Zeros, and a weight of 1, where there is no such half, row
// or column.
template <class Products>
__device__ __forceinline__ void ask_for_inputs(const Products& products, const TileTask& task,
                                               int part, DHiddenInputs& to) {
  const Product& product = products.product[task.product];
  const int half = part / kDHiddenBlocks, block = part % kDHiddenBlocks;
  const int row = tile_row(half);
  const uint64_t at = uint64_t(row + (product.gate_in_ring ? task.row0 : task.save_row0)) *
                          static_cast<uint32_t>(product.d_hidden.row_elements) * 2 +
                      (task.col0 + block * kHalfN + QuadLane::here().index() * 8) * 2;
  to = {};
  to.weight = 1;
  if (half > 1 || row >= task.rows) return;
  if (product.d_hidden.row_weight != nullptr) {
    to.weight = ptx::load_relaxed_gpu(product.d_hidden.row_weight + task.save_row0 + row);
  }
  const int columns = columns_of_block(task, block);
#pragma unroll
  for (int q = 0; q < kDHiddenChunks; ++q) {
    if (q * 32 >= columns) continue;
    ptx::load_global_16(to.gate + 4 * q,
                        reinterpret_cast<const uint8_t*>(product.d_hidden.gate) + at + q * 64);
    ptx::load_global_16(to.up + 4 * q,
                        reinterpret_cast<const uint8_t*>(product.d_hidden.up) + at + q * 64);
  }
}

// The next chunk becomes the first; `last` becomes the last.
__device__ __forceinline__ void move_up(uint32_t (&words)[kDHiddenWords],
                                        const uint32_t (&last)[4]) {
#pragma unroll
  for (int i = 0; i < kDHiddenWords; ++i) {
    words[i] = i + 4 < kDHiddenWords ? words[i + 4] : last[i + 4 - kDHiddenWords];
  }
}
__device__ __forceinline__ void move_up(uint32_t (&words)[kDHiddenWords]) {
#pragma unroll
  for (int i = 0; i + 4 < kDHiddenWords; ++i) words[i] = words[i + 4];
}

// d_gate, d_up and h of a chunk.
template <bool kLimited>
__device__ __forceinline__ void make_chunk(const DHiddenInputs& in, const uint32_t (&d_h)[4],
                                           float limit, uint32_t (&d_gate)[4], uint32_t (&d_up)[4],
                                           uint32_t (&h)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const SwigluGrads out =
        swiglu_grad_pair<kLimited>(in.gate[i], in.up[i], d_h[i], in.weight, limit);
    d_gate[i] = out.d_gate;
    d_up[i] = out.d_up;
    h[i] = out.hidden;
  }
}

template <class Products>
__device__ __forceinline__ void store_d_hidden_fp8(const float (&acc)[kTileN / 2],
                                                   const Products& products,
                                                   const Fp8Operands& operands,
                                                   const TileTask& task) {
  constexpr int kParts = 2 * kDHiddenBlocks;
  const auto& of = products.product[task.product].d_hidden;
  const QuadLane lane = QuadLane::here();
  const bool limited = products.swiglu_limit != INFINITY;
  DHiddenInputs in;
  ask_for_inputs(products, task, 0, in);
  // Of the part in hand and of the later ones. A lane's sums: pairs of half 0 and of half 1 in
  // turn.
  uint32_t d_h[kDHiddenWords], d_h_later[(kParts - 1) * kDHiddenWords];
#pragma unroll
  for (int i = 0; i < kParts * kDHiddenWords; ++i) {
    const int half = i / (kDHiddenBlocks * kDHiddenWords), j = i % (kDHiddenBlocks * kDHiddenWords);
    const uint32_t pair = ptx::pack_bf16(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
    (i < kDHiddenWords ? d_h[i] : d_h_later[i - kDHiddenWords]) = pair;
  }
  float dot = 0;
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    const int half = part / kDHiddenBlocks, block = part % kDHiddenBlocks;
    const int chunks = columns_of_block(task, block) / 32;
    const int col0 = task.col0 + block * kHalfN;
    DHiddenInputs next;
    ask_for_inputs(products, task, part + 1, next);
    const int row = tile_row(half);
    const bool valid = row < task.rows;
    if (block == 0) dot = 0;

    uint32_t hidden[kDHiddenWords] = {};
#pragma unroll 1
    for (int q = 0; q < kDHiddenChunks; ++q) {
      const uint32_t m[4] = {d_h[0], d_h[1], d_h[2], d_h[3]};
      const uint4 v = lane.transpose(m);
      uint32_t d[4] = {v.x, v.y, v.z, v.w}, d_gate[4], d_up[4], h[4];
      const bool inside = valid && q < chunks;
      limited ? make_chunk<true>(in, d, products.swiglu_limit, d_gate, d_up, h)
              : make_chunk<false>(in, d, INFINITY, d_gate, d_up, h);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!inside) d[i] = d_gate[i] = d_up[i] = h[i] = 0;
      }
      move_up(d_h, d);
      move_up(in.gate, d_gate);
      move_up(in.up, d_up);
      move_up(hidden, h);
    }

    const uint32_t amax[3] = {quad_amax(in.gate), quad_amax(in.up), quad_amax(hidden)};
    const uint32_t small[3] = {mx_small(amax[0]), mx_small(amax[1]), mx_small(amax[2])};
    const numerics::e8m0 scale[2] = {scale_of_amax(amax[0]), scale_of_amax(amax[1])};
    const float inverse[2] = {numerics::mx_inverse(scale[0]), numerics::mx_inverse(scale[1])};
    const uint64_t at = (uint64_t(task.row0 + row) * static_cast<uint32_t>(of.row_elements) + col0 +
                         lane.index() * 8) *
                        2;
    const int64_t codes_row = int64_t{task.row0 + row} * operands.codes_row_bytes;
    const int64_t codes_at = codes_row + col0 + lane.index() * 8;
#pragma unroll 1
    for (int q = 0; q < chunks; ++q) {
      uint32_t d_gate[4], d_up[4], h[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d_gate[i] = mx_round_pair(in.gate[i], small[0]);
        d_up[i] = mx_round_pair(in.up[i], small[1]);
        h[i] = mx_round_pair(hidden[i], small[2]);
        dot = fmaf(low_float(d_h[i]), low_float(h[i]), dot);
        dot = fmaf(high_float(d_h[i]), high_float(h[i]), dot);
        h[i] = ptx::pack_bf16(in.weight * low_float(h[i]), in.weight * high_float(h[i]));
      }
      if (row < task.save_rows) {
        const auto store = [&](__nv_bfloat16* base, const uint32_t (&v)[4]) {
          ptx::store_global_16(reinterpret_cast<uint8_t*>(base) + at + q * 64,
                               uint4{v[0], v[1], v[2], v[3]});
        };
        store(of.d_gate, d_gate);
        store(of.d_up, d_up);
        store(of.hidden, h);
      }
      if (valid) {
        const auto store_codes = [&](uint8_t* base, const uint32_t (&v)[4], float inverse) {
          const auto four = [&](int i) {
            return codes_of_pair(v[i], inverse) | codes_of_pair(v[i + 1], inverse) << 16;
          };
          ptx::store_global_8(base + codes_at + q * 32, four(0), four(2));
        };
        store_codes(operands.codes[0], d_gate, inverse[0]);
        store_codes(operands.codes[1], d_up, inverse[1]);
      }
      move_up(d_h);
      move_up(in.gate);
      move_up(in.up);
      move_up(hidden);
    }
    if (valid && chunks > 0 && lane.index() == 0) {
      const int64_t scale_at = codes_row + operands.codes_scales_at + col0 / kHalfN;
      ptx::store_global_byte(operands.codes[0] + scale_at, scale[0].bits);
      ptx::store_global_byte(operands.codes[1] + scale_at, scale[1].bits);
    }
    if (block == kDHiddenBlocks - 1) {
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      if (valid && of.partials != nullptr && lane.index() == 0) {
        of.partials[int64_t{task.row0 + row} * of.partial_columns + task.col0 / kTileN] = dot;
      }
    }
    in = next;
#pragma unroll
    for (int i = 0; i < kDHiddenWords; ++i) d_h[i] = d_h_later[i];
#pragma unroll
    for (int i = 0; i < (kParts - 2) * kDHiddenWords; ++i) {
      d_h_later[i] = d_h_later[i + kDHiddenWords];
    }
  }
}

}  // namespace mok::cuda
