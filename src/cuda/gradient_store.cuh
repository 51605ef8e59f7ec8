// Weight gradients that do not leave through the spread epilogue: fp32 sums, sums added to the
// caller's, sums of one window that the expert's next window goes on from, bf16 where there is no
// map of the gradient, and the zeros of an expert without rows. Stored from the accumulators at the
// tile's end.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

// One thread's share of a tile, laid out as the accumulators (ptx/wgmma.cuh).
class GradientStore {
 public:
  __device__ __forceinline__ GradientStore(const Product& product, const TileTask& task)
      : product_(product), task_(task) {}

  __device__ __forceinline__ bool leaves_accumulators() const {
    return product_.mode != GradMode::storage || carries_out() ||
           product_.weight_grad.map == Product::kNoMap;
  }

  __device__ __forceinline__ void carry_in(float (&acc)[kTileN / 2]) const {
    for_each_pair([&](int i, int64_t row, int column, bool inside) {
      float2 sum{0, 0};
      if (inside) sum = __ldcg(reinterpret_cast<const float2*>(carry(row, column)));
      acc[i] = sum.x;
      acc[i + 1] = sum.y;
    });
  }

  __device__ __forceinline__ void store(const float (&acc)[kTileN / 2]) const {
    const bool out = carries_out();
    const bool add = !out && product_.mode == GradMode::accumulate;
    const bool rounded = !out && product_.mode == GradMode::storage;
    for_each_pair([&](int i, int64_t row, int column, bool inside) {
      if (!inside) return;
      if (rounded) {
        *rounded_at(row, column) = ptx::pack_bf16(acc[i], acc[i + 1]);
        return;
      }
      auto* to = reinterpret_cast<float2*>(out ? carry(row, column) : sum_at(row, column));
      float2 sum{acc[i], acc[i + 1]};
      if (add) {
        const float2 old = *to;
        sum = {old.x + sum.x, old.y + sum.y};
      }
      *to = sum;
    });
  }

  // Of an expert without rows: zeros, or the caller's sum as it was. Of a bad call: NaN, or the
  // same.
  __device__ __forceinline__ void store_nothing() const {
    if (product_.mode == GradMode::accumulate) return;
    const uint32_t word = (task_.save_rows & TileTask::kBadCall) != 0 ? 0x7fff7fff : 0;  // NaN
    const float value = __uint_as_float(word);
    for_each_pair([&](int, int64_t row, int column, bool inside) {
      if (!inside) return;
      if (product_.mode == GradMode::sum) {
        *reinterpret_cast<float2*>(sum_at(row, column)) = {value, value};
      } else {
        *rounded_at(row, column) = word;
      }
    });
  }

 private:
  // f(index of the first accumulator, row and column in the matrix, whether they exist).
  template <class F>
  __device__ __forceinline__ void for_each_pair(F&& f) const {
    const auto thread = static_cast<int>(fresh_thread() - kWarpgroup);
    const int row = thread / kWarp * 16 + thread % kWarp / 4;
    const int column = thread % 4 * 2;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half, c = column + 8 * j;
        f(4 * j + 2 * half, int64_t{task_.row0} + r, task_.col0 + c,
          r < task_.rows && c < task_.cols);
      }
    }
  }
  __device__ __forceinline__ bool carries_out() const {
    return (task_.save_rows & TileTask::kCarryOut) != 0;
  }
  __device__ __forceinline__ int64_t element(int64_t row, int column) const {
    return task_.expert * product_.weight_grad.expert_elements +
           row * product_.weight_grad.row_elements + column;
  }
  __device__ __forceinline__ uint32_t* rounded_at(int64_t row, int column) const {  // a pair
    return reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(product_.weight_grad.out) +
                                       element(row, column));
  }
  __device__ __forceinline__ float* sum_at(int64_t row, int column) const {
    return static_cast<float*>(product_.weight_grad.out) + element(row, column);
  }
  __device__ __forceinline__ float* carry(int64_t row, int column) const {
    return product_.weight_grad.carry + row * product_.weight_grad.carry_elements + column;
  }

  const Product& product_;
  const TileTask& task_;
};

}  // namespace mok::cuda
