// Epilogue of gate_up and down tiles, in 16 slots: 64 columns in slot 4q + part, a part of the
// columns of 8 rows of each warp, q = 2 * column group + row half:
//
//     part 0      gate_up: gate (if kept)                 down: columns   0 .. 127
//     part 1      gate_up: up (if kept)                   down: columns 128 .. 255
//     part 2, 3   gate_up: hidden, computed in two halves down: nothing
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/mx.cuh"
#include "cuda/swiglu.cuh"

namespace mok::cuda {

template <class Products>
class GateUpEpilogue : public Epilogue<Products> {
  using Base = Epilogue<Products>;
  using Base::flags_, Base::products_, Base::product, Base::transpose, Base::kind;
  using Base::kPart0, Base::kPart1, Base::kHidden, Base::kMx, Base::kRow, Base::kKeptRow;

 public:
  static constexpr int kSlots = 16;
  static __device__ __forceinline__ bool takes(TaskKind kind) {
    return kind == TaskKind::gate_up || kind == TaskKind::down;
  }

  __device__ __forceinline__ explicit GateUpEpilogue(const Products& products) : Base(products) {}

  // Before the last wait for products: finds the addresses.
  __device__ __forceinline__ void prepare(const TileTask& task) {
    const Product& product = products_.product[task.product];
    this->set_flags(task);
    const bool gate_up = task.kind == TaskKind::gate_up;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const bool low = group * kGroupN < task.cols;
      const bool high = kHalfN + group * kGroupN < task.cols;
      const bool kept = low && task.save_rows > 0;
      if (gate_up ? kept : low) flags_ |= kPart0 << group;
      if (gate_up ? kept : high) flags_ |= kPart1 << group;
      if (gate_up && low && product.gate_up.hidden != nullptr) flags_ |= kHidden << group;
    }
    const uint32_t column = Base::column_bytes(task);
    const int row = Base::row_of(0);
    if (gate_up) {
      const uint32_t row_bytes = static_cast<uint32_t>(product.gate_up.row_elements) * 2;
      first_ = reinterpret_cast<uint64_t>(product.gate_up.hidden) + column +
               uint64_t{row_bytes} * (task.row0 + row);
      second_ = reinterpret_cast<uint64_t>(product.gate_up.gate) + column +
                uint64_t{row_bytes} * (task.save_row0 + row);
    } else {
      first_ = flags_ & kRow ? row_destination(task, product, row, column) : 0;
      second_ = flags_ & kRow << 1 ? row_destination(task, product, row + 8, column) : 0;
    }
  }

  __device__ __forceinline__ void pack(const float (&acc)[kTileN / 2], TileTask::Shape shape) {
    packed_.pack(acc);
    if (!shape.narrow() || shape.kind() != TaskKind::gate_up) return;
    // A narrow gate-up tile has its 64 columns of up right behind those of gate.
#pragma unroll
    for (int i = 0; i < kPackedRegisters / 4; ++i) {
      packed_.word[kPackedRegisters / 2 + i] = packed_.word[kPackedRegisters / 4 + i];
    }
  }

  template <int kSlot>
  __device__ __forceinline__ void run_slot(const TileTask&) {
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
    if (kind() == TaskKind::gate_up) {
      to = (kPart < 2 ? second_ : first_) + kRowHalf * 16 * product().gate_up.row_elements;
      if constexpr (kPart == 1) to += up_minus_gate();
      valid = flags_ & (kPart < 2 ? kKeptRow : kRow) << kRowHalf;
    } else {
      to = kRowHalf == 0 ? first_ : second_;
      valid = to != 0;
      to += kPart * kHalfN * 2;
    }
    to += (kGroup * kGroupN + kFirst * 8) * 2;
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * kGroup + kFirst + j + i;
        m[i] = kPart < 2 ? packed_.pair(16 * kPart + at, kRowHalf)
                         : swiglu_pair(packed_.pair(at, kRowHalf), packed_.pair(16 + at, kRowHalf),
                                       products_.swiglu_limit);
      }
      // Four matrices are a block.
      if (kPart >= 2 && (flags_ & kMx) != 0) mx_round_block(m);
      const uint4 v = transpose(m);
      if (valid) ptx::store_global_16(reinterpret_cast<void*>(to + j * 16), v);
    }
  }

 private:
  __device__ __forceinline__ uint64_t up_minus_gate() const {
    return reinterpret_cast<uint64_t>(product().gate_up.up) -
           reinterpret_cast<uint64_t>(product().gate_up.gate);
  }

  PackedTile packed_;
  // gate_up: the lane's place in hidden and in gate. down: destinations of the lane's row and of
  // the row 8 below.
  uint64_t first_ = 0, second_ = 0;
};

}  // namespace mok::cuda
