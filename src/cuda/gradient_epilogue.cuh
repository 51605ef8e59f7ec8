// Epilogue of weight gradients that are delivered as bf16: their tiles may have two steps of 64
// rows and still 64 KB of results, so it must be short. Two slots of 128 columns each:
//
//   registers --stmatrix--> 4 KB of shared memory a warp --tensor stores--> the gradient
//
// The shared memory is B of the tile's last stage, half of it for each warpgroup, which the loader
// gets back only when the second slot's stores have read it. So slots are run soon: slot 0 at the
// tile's end, slot 1 in the first step of the next tile, for its fourth step needs the stage. Other
// weight gradients leave through GradientStore, from the accumulators.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/gradient_store.cuh"
#include "cuda/ptx/copy.cuh"

namespace mok::cuda {

template <class Products>
class GradientEpilogue : public Epilogue<Products> {
  using Base = Epilogue<Products>;
  using Base::flags_, Base::products_;

 public:
  static constexpr int kSlots = 2;
  static constexpr uint32_t kStagingBytes = kHalfN * kHalfM * 2;  // of a warpgroup
  static __device__ __forceinline__ bool takes(TaskKind kind) {
    return kind == TaskKind::weight_grad;
  }

  __device__ __forceinline__ explicit GradientEpilogue(const Products& products) : Base(products) {}

  // Before the last wait for products.
  __device__ __forceinline__ void prepare(const TileTask& task) {
    const Product& product = products_.product[task.product];
    row_ = task.row0 + static_cast<int>((fresh_thread() - kWarpgroup) / kWarp) * kGradientBoxRows;
    column_ = task.col0;
    expert_ = task.expert;
    flags_ = static_cast<uint32_t>(task.cols / kGroupN) |
             static_cast<uint32_t>(product.weight_grad.map) << kMapShift;
    if (GradientStore(product, task).leaves_accumulators()) flags_ |= kFromAccumulators;
  }
  __device__ __forceinline__ bool leaves_accumulators() const { return flags_ & kFromAccumulators; }

  // All warps of the block that read the stage are done with it.
  __device__ __forceinline__ void hold(uint32_t stage) { flags_ |= stage << kStageShift; }
  __device__ __forceinline__ uint32_t held() const { return flags_ >> kStageShift & kStageMask; }

  __device__ __forceinline__ void pack(const float (&acc)[kTileN / 2], TileTask::Shape) {
    packed_.pack(acc);
  }

  // `staging`: the warpgroup's half of B in the stage that is held.
  template <int kSlot>
  __device__ __forceinline__ void run_slot(uint8_t* staging) {
    const int groups = static_cast<int>(flags_ & kGroupsMask) - kSlot * kSlotGroups;
    if (groups <= 0) return;
    if (kSlot > 0) wait_until_read();
    const uint32_t thread = fresh_thread();
    uint8_t* const own = staging + thread / kWarp % (kWarpgroup / kWarp) * kSlotGroups * kBoxBytes;
    // Lanes 0 .. 15 have the rows of the first eight columns of a pair, 16 .. 31 of the other
    // eight. The swizzle: 16-byte piece p of row r stands at p ^ r % 8.
    const uint32_t at = ptx::shared_address(own) + thread % kGradientBoxRows * kRowBytes +
                        ((thread / kGradientBoxRows ^ thread) % 2 | (thread & 6)) * 16;
#pragma unroll
    for (int group = 0; group < kSlotGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kGroupN / 16; ++i) {
        const int j = kGroupN / 8 * (kSlotGroups * kSlot + group) + 2 * i;
        ptx::store_matrices((at + group * kBoxBytes) ^ i * 32, packed_.pair(j, 0),
                            packed_.pair(j, 1), packed_.pair(j + 1, 0), packed_.pair(j + 1, 1));
      }
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if constexpr (Products::kThere) {
      if (ptx::elect()) {
        const CUtensorMap* map = &products_.gradient_map[flags_ >> kMapShift];
        const int column = column_ + kSlot * kSlotGroups * kGroupN;
        ptx::store_tensor(map, own, column, row_, expert_);
        if (groups > 1) ptx::store_tensor(map, own + kBoxBytes, column + kGroupN, row_, expert_);
        ptx::commit_stores();
      }
    }
  }

  // What the warp has stored so far has left shared memory.
  __device__ __forceinline__ void wait_until_read() const {
    if (ptx::elect()) ptx::wait_stores_read<0>();  // by the thread that issued them
    __syncwarp();
  }

 private:
  static constexpr uint32_t kGroupsMask = 7;  // groups of 64 columns
  static constexpr int kStageShift = 4;
  static constexpr uint32_t kStageMask = kStages - 1;
  static constexpr uint32_t kFromAccumulators = 1 << 8;
  static constexpr int kMapShift = 16;
  static constexpr uint32_t kRowBytes = kGroupN * 2, kBoxBytes = kGradientBoxRows * kRowBytes;
  static constexpr int kSlotGroups = 2;
  static_assert(kSlotGroups * kSlots * kGroupN == kTileN);

  PackedTile packed_;
  int row_ = 0, column_ = 0, expert_ = 0;  // of the warp's first result
};

}  // namespace mok::cuda
