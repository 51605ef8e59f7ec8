// Epilogue of weight gradients that are delivered as bf16: their tiles may have two steps of 64
// rows and still 64 KB of results, so a slot must be short. Four slots of 64 columns each:
//
//   registers --stmatrix--> 2 KB of shared memory a warp --tensor store--> the gradient
//
// The shared memory is the warpgroup's own half of A in the tile's last stage, which the loader
// gets back only when the last slot's store has read it. So slots are run at once: slot 0 at the
// tile's end, the others within the first two steps of the next tile, for its fourth step needs the
// stage. Other weight gradients leave through GradientStore, from the accumulators.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/gradient_store.cuh"
#include "cuda/ptx/copy.cuh"

namespace mok::cuda {

template <class Products>
class GradientEpilogue : public Epilogue<Products> {
  using Base = Epilogue<Products>;
  using Base::flags_, Base::products_, Base::product;

 public:
  static constexpr int kSlots = 4;
  static __device__ __forceinline__ bool takes(TaskKind kind) {
    return kind == TaskKind::weight_grad;
  }

  __device__ __forceinline__ explicit GradientEpilogue(const Products& products)
      : Base(products) {}

  // Before the last wait for products.
  __device__ __forceinline__ void prepare(const TileTask& task) {
    const Product& product = products_.product[task.product];
    flags_ = static_cast<uint32_t>(task.cols / kGroupN) |
             static_cast<uint32_t>(product.weight_grad.map) << kMapShift;
    if (GradientStore(product, task).leaves_accumulators()) flags_ |= kFromAccumulators;
  }
  __device__ __forceinline__ bool leaves_accumulators() const {
    return flags_ & kFromAccumulators;
  }

  // All warps of the warpgroup are done with the stage.
  __device__ __forceinline__ void hold(uint32_t stage) { flags_ |= stage << kStageShift; }
  __device__ __forceinline__ uint32_t held() const { return flags_ >> kStageShift & kStageMask; }

  __device__ __forceinline__ void pack(const float (&acc)[kTileN / 2], TileTask::Shape) {
    packed_.pack(acc);
  }

  // `staging`: the warpgroup's half of A in the stage that is held.
  template <int kSlot>
  __device__ __forceinline__ void run_slot(const TileTask& task, uint8_t* staging) {
    if (kSlot >= static_cast<int>(flags_ & kGroupsMask)) return;
    const uint32_t thread = fresh_thread();
    const uint32_t warp = thread / kWarp % (kWarpgroup / kWarp);
    if (kSlot > 0) wait_until_read();
    uint8_t* const own = staging + warp * kWarpBytes;
    // Lanes 0 .. 15: rows of the first eight columns of a pair, 16 .. 31: of the other eight.
    const uint32_t row = ptx::shared_address(own) + thread % kGradientBoxRows * kRowBytes;
    const uint32_t upper = thread / kGradientBoxRows % 2;
#pragma unroll
    for (int i = 0; i < kGroupN / 16; ++i) {
      const int j = kGroupN / 8 * kSlot + 2 * i;
      ptx::store_matrices(row + ((2 * i + upper) ^ thread % 8) * 16, packed_.pair(j, 0),
                          packed_.pair(j, 1), packed_.pair(j + 1, 0), packed_.pair(j + 1, 1));
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if constexpr (Products::kThere) {
      if (leads()) {
        ptx::store_tensor(&products_.gradient_map[flags_ >> kMapShift], own,
                          task.col0 + kSlot * kGroupN,
                          task.row0 + static_cast<int>((thread - kWarpgroup) / kWarp) * 16,
                          task.expert);
        ptx::commit_stores();
      }
    }
  }

  // What the warp has stored so far has left shared memory.
  __device__ __forceinline__ void wait_until_read() const {
    if (leads()) ptx::wait_stores_read<0>();
    __syncwarp();
  }

 private:
  static constexpr uint32_t kGroupsMask = 7;  // groups of 64 columns
  static constexpr int kStageShift = 4;
  static constexpr uint32_t kStageMask = kStages - 1;
  static constexpr uint32_t kFromAccumulators = 1 << 8;
  static constexpr int kMapShift = 16;
  static constexpr uint32_t kRowBytes = kGroupN * 2, kWarpBytes = kGradientBoxRows * kRowBytes;

  // Stores are counted by the thread that issues them.
  static __device__ __forceinline__ bool leads() { return fresh_thread() % kWarp == 0; }

  PackedTile packed_;
};

}  // namespace mok::cuda
