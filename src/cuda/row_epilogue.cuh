// Epilogue of d_input tiles: each row is stored at its own destination. Four slots, 2 * row half +
// column group, of twice 64 columns each: two at once take hardly longer than one.
#pragma once

#include "cuda/epilogue.cuh"

namespace mok::cuda {

template <class Products>
class RowEpilogue : public Epilogue<Products> {
  using Base = Epilogue<Products>;
  using Base::flags_, Base::products_, Base::product, Base::transpose;
  using Base::kPart0, Base::kPart1, Base::kRow;

 public:
  static constexpr int kSlots = 4;
  static __device__ __forceinline__ bool takes(TaskKind kind) { return kind == TaskKind::d_input; }

  __device__ __forceinline__ explicit RowEpilogue(const Products& products) : Base(products) {}

  // Before the last wait for products: finds the first row's address.
  __device__ __forceinline__ void prepare(const TileTask& task) {
    const Product& product = products_.product[task.product];
    this->set_flags(task);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      if (group * kGroupN < task.cols) flags_ |= kPart0 << group;
      if (kHalfN + group * kGroupN < task.cols) flags_ |= kPart1 << group;
    }
    to_ = destination(task, product, 0);
  }

  __device__ __forceinline__ void pack(const float (&acc)[kTileN / 2], TileTask::Shape) {
    packed_.pack(acc);
  }

  template <int kSlot>
  __device__ __forceinline__ void run_slot(const TileTask& task) {
    constexpr int kRowHalf = kSlot / 2;
    constexpr int kGroup = kSlot % 2;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const bool wanted = to_ != 0 && (flags_ & (part == 0 ? kPart0 : kPart1) << kGroup) != 0;
      const uint64_t to = to_ + (part * kHalfN + kGroup * kGroupN) * 2;
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        uint32_t m[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) m[i] = packed_.pair(16 * part + 8 * kGroup + j + i, kRowHalf);
        const uint4 v = transpose(m);
        if (wanted) ptx::store_global_16(reinterpret_cast<void*>(to + j * 16), v);
      }
    }
    if constexpr (kSlot == 1) to_ = destination(task, product(), 1);
  }

 private:
  // Where the lane's first column of its row goes; 0: nowhere.
  __device__ __forceinline__ uint64_t destination(const TileTask& task, const Product& product,
                                                  int half) const {
    if ((flags_ & kRow << half) == 0) return 0;
    return row_destination(task, product, Base::row_of(half), Base::column_bytes(task));
  }

  PackedTile packed_;
  uint64_t to_ = 0;  // of the row in hand
};

}  // namespace mok::cuda
