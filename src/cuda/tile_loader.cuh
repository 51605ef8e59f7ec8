// The loading thread: a task's operands, step by step, into the ring of stages.
#pragma once

#include "cuda/consumer.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

// The next ticket is drawn this many steps before the last load of a task: late, so that a block
// sits on no work that another could begin, but early enough to hide the draw, its decoding and the
// look at its counter (5000 cycles; a step is 1024).
inline constexpr int kDrawLead = 10;
inline constexpr int kDrawLeadDHidden = 18;  // its steps are shorter, its look-up is longer

// After an abort: loads that are on their way must not outlive the block's shared memory.
__device__ __forceinline__ void land_loads(TileShared& shared, const RingCursor<kStages>& next) {
  for (uint32_t back = 1; back <= kStages && back <= next.position; ++back) {
    const RingCursor<kStages> at{next.position - back};
    while (!shared.full[at.slot()].try_wait(at.phase())) {
    }
  }
}

// The loads of one tile task, by one thread. What differs between kinds is known at compile time:
// every instruction between two loads delays the ring.
template <class Products, class Hooks>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(TileShared& shared, const Products& products, Hooks& hooks)
      : shared_(shared), products_(products), hooks_(hooks) {}

  template <bool kBackward>
  __device__ __forceinline__ void run() {
    RingCursor<kTaskSlots> task_at;
    bool go = true;
    while (go && wait(shared_.task_full[task_at.slot()], task_at.phase(), shared_.abort)) {
      const TileTask& task = shared_.task[task_at.slot()];
      if (task.kind == TaskKind::stop) return;
      hooks_.wait_ready(task);
      shared_.task_loading[task_at.slot()].arrive();
      const bool d_hidden =
          kBackward && (task.kind == TaskKind::d_hidden ||
                        (Products::kFp8 && task.kind == TaskKind::d_hidden_fp8) ||
                        (Products::kTall && task.kind == TaskKind::d_hidden_tall));
      to_draw_ = max(task.steps - (d_hidden ? kDrawLeadDHidden : kDrawLead), 0);
      if (task.steps == 0) shared_.draw.arrive();
      const Product& product = products_.product[task.product];
      const bool both_halves = task.rows > kHalfM;
      if (Products::kWide && is_wide(task, product)) {
        go = load_wide_operands<kBackward>(task, product);
      } else if (Products::kFp8 && !Products::kWide && is_fp8(task.kind)) {
        go = load_fp8(task, product, both_halves);
      } else if (task.kind == TaskKind::gate_up) {
        go = task.shape_of().narrow() ? load_gate_up<1, 1>(task, product, both_halves)
                                      : load_gate_up<2, 2>(task, product, both_halves);
      } else if (!kBackward || task.kind == TaskKind::down) {
        go = load<false, false>(task, product, 0, task.steps, both_halves);
      } else if (task.kind == TaskKind::weight_grad) {
        go = load<true, true>(task, product, 0, task.steps, both_halves);
      } else if (task.kind == TaskKind::d_input) {
        go = load<false, true>(task, product, 0, task.steps / 2, both_halves) &&
             load<false, true>(task, product, 1, task.steps / 2, both_halves);
      } else {
        go = load<false, true>(task, product, 0, task.steps, both_halves);
      }
      shared_.task_empty[task_at.slot()].arrive();
      task_at.advance();
    }
    land_loads(shared_, stage_);
  }

 private:
  // Waits for a free stage; false after an abort.
  __device__ __forceinline__ bool begin(uint32_t bytes) {
    if (to_draw_-- == 0) shared_.draw.arrive();
    if (!wait(shared_.empty[stage_.slot()], stage_.phase() ^ 1, shared_.abort)) return false;
    shared_.full[stage_.slot()].arrive_expect(bytes);
    return true;
  }

  // Codes: all operands lie along the contraction.
  __device__ __forceinline__ bool load_fp8(const TileTask& task, const Product& product,
                                           bool both_halves) {
    if (task.kind == TaskKind::gate_up_fp8) {
      return task.cols <= kGroupN ? load_gate_up<1, 2>(task, product, both_halves)
                                  : load_gate_up<2, 2>(task, product, both_halves);
    }
    if (task.kind != TaskKind::d_input_fp8) {
      return load<false, false>(task, product, 0, task.steps, both_halves);
    }
    return load<false, false>(task, product, 0, task.steps / 2, both_halves) &&
           load<false, false>(task, product, 1, task.steps / 2, both_halves);
  }

  // A narrow gate-up tile has its columns of up right behind those of gate.
  static __device__ __forceinline__ bool is_wide(const TileTask& task, const Product& product) {
    return product.wide_b[0] != Product::kNoMap &&
           !(task.kind == TaskKind::gate_up && task.shape_of().narrow());
  }
  // What a box has beyond the matrix are zeros.
  template <bool kBackward>
  __device__ __forceinline__ bool load_wide_operands(const TileTask& task, const Product& product) {
    if constexpr (Products::kWide) {
      if (is_gate_up(task.kind)) return load_wide_gate_up(task, product);
      if (!kBackward) return load_wide<kTileN, false>(task, product, 0, task.steps);
      if (task.kind == TaskKind::weight_grad) return load_wide_gradient(task, product);
      constexpr bool kAcross = !Products::kFp8;  // the contraction: how B lies
      if (task.kind == TaskKind::d_input || task.kind == TaskKind::d_input_fp8 ||
          task.kind == TaskKind::d_input_tall) {
        return load_wide<kTileN, kAcross>(task, product, 0, task.steps / 2) &&
               load_wide<kTileN, kAcross>(task, product, 1, task.steps / 2);
      }
      return load_wide<Products::kFp8 ? kTileN : kTileInterGrad, kAcross>(task, product, 0,
                                                                          task.steps);
    }
    return false;
  }

  // The rows of A that a tile has.
  struct WideA {
    const CUtensorMap* map;
    uint32_t bytes;
  };
  __device__ __forceinline__ WideA wide_a(const TileTask& task, const Product& product,
                                          int part) const {
    if (Products::kTall && is_tall(task.kind)) {
      return {&products_.wide_map[product.tall_a], (kTileM + kTailRows) * kTileK * 2};
    }
    if (task.rows > kHalfM) return {&products_.wide_map[product.wide_a], 2 * kHalfBytesA};
    return {&products_.map[product.a[part]], kHalfBytesA};
  }

  __device__ __forceinline__ bool load_wide_gate_up(const TileTask& task, const Product& product) {
    const WideA a = wide_a(task, product, 0);
    const CUtensorMap* gate = &products_.wide_map[product.wide_b[0]];
    const CUtensorMap* up = &products_.wide_map[product.wide_b[1]];
    const int steps = task.steps, row = task.row0, column = task.col0, expert = task.expert;
    for (int k = 0; k < steps * kTileK; k += kTileK) {
      if (!begin(a.bytes + kTileN / kGroupN * kGroupBytesB)) return false;
      ptx::Mbarrier* full = &shared_.full[stage_.slot()];
      uint8_t* b = shared_.b[stage_.slot()];
      ptx::load_tensor(shared_.a[stage_.slot()], a.map, full, k, row, 0);
      ptx::load_tensor(b, gate, full, k, column, expert);
      ptx::load_tensor(b + kHalfN / kGroupN * kGroupBytesB, up, full, k, column, expert);
      stage_.advance();
    }
    return true;
  }

  // kAcross: rows of B are steps of the contraction.
  template <int kColumns, bool kAcross>
  __device__ __forceinline__ bool load_wide(const TileTask& task, const Product& product, int part,
                                            int steps) {
    const WideA a = wide_a(task, product, part);
    const CUtensorMap* b_map = &products_.wide_map[product.wide_b[part]];
    const int row = task.row0, column = task.col0, group = column / kGroupN, expert = task.expert;
    for (int k = 0; k < steps * kTileK; k += kTileK) {
      if (!begin(a.bytes + kColumns / kGroupN * kGroupBytesB)) return false;
      ptx::Mbarrier* full = &shared_.full[stage_.slot()];
      uint8_t* b = shared_.b[stage_.slot()];
      ptx::load_tensor(shared_.a[stage_.slot()], a.map, full, k, row, part);
      if constexpr (kAcross) {
        ptx::load_tensor(b, b_map, full, 0, k, group, expert);
      } else {
        ptx::load_tensor(b, b_map, full, k, column, expert);
      }
      stage_.advance();
    }
    return true;
  }

  __device__ __forceinline__ bool load_wide_gradient(const TileTask& task, const Product& product) {
    const CUtensorMap* a_map = &products_.wide_map[product.wide_a];
    const CUtensorMap* b_map = &products_.wide_map[product.wide_b[0]];
    const int a_group = task.row0 / kGroupN, b_group = task.col0 / kGroupN;
    const int slice = product.a_slice, k0 = task.save_row0, steps = task.steps;
    for (int k = k0; k < k0 + steps * kTileK; k += kTileK) {
      if (!begin(2 * kHalfBytesA + kTileN / kGroupN * kGroupBytesB)) return false;
      ptx::Mbarrier* full = &shared_.full[stage_.slot()];
      ptx::load_tensor(shared_.a[stage_.slot()], a_map, full, 0, k, a_group, slice);
      ptx::load_tensor(shared_.b[stage_.slot()], b_map, full, 0, k, b_group, 0);
      stage_.advance();
    }
    return true;
  }

  // kSide boxes of gate and, from box kUpAt on, as many of up.
  template <int kSide, int kUpAt>
  __device__ __forceinline__ bool load_gate_up(const TileTask& task, const Product& product,
                                               bool both_halves) {
    const CUtensorMap* a_map = &products_.map[product.a[0]];
    const CUtensorMap* gate = &products_.map[product.b[0]];
    const CUtensorMap* up = &products_.map[product.b[1]];
    const int steps = task.steps, row = task.row0, column = task.col0, expert = task.expert;
    const uint32_t bytes = (both_halves ? 2 : 1) * kHalfBytesA + 2 * kSide * kGroupBytesB;
    for (int k = 0; k < steps * kTileK; k += kTileK) {
      if (!begin(bytes)) return false;
      ptx::Mbarrier* full = &shared_.full[stage_.slot()];
      uint8_t* a = shared_.a[stage_.slot()];
      uint8_t* b = shared_.b[stage_.slot()];
      ptx::load_tensor(a, a_map, full, k, row, 0);
      if (both_halves) ptx::load_tensor(a + kHalfBytesA, a_map, full, k, row + kHalfM, 0);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        ptx::load_tensor(b + i * kGroupBytesB, gate, full, k, column + i * kGroupN, expert);
      }
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        ptx::load_tensor(b + (kUpAt + i) * kGroupBytesB, up, full, k, column + i * kGroupN, expert);
      }
      stage_.advance();
    }
    return true;
  }

  // `part`: which of the product's operands, for d_input.
  template <bool kTransposedA, bool kTransposedB>
  __device__ __forceinline__ bool load(const TileTask& task, const Product& product, int part,
                                       int steps, bool both_halves) {
    const CUtensorMap* a_map = &products_.map[product.a[part]];
    const CUtensorMap* b_map = &products_.map[product.b[part]];
    const int row = task.row0, column = task.col0, boxes = task.cols / kGroupN;
    // A weight gradient's contraction runs over rows of the ring.
    const int expert = kTransposedA ? 0 : task.expert;
    const int slice = kTransposedA ? product.a_slice : part;
    const int k0 = kTransposedA ? task.save_row0 : 0;
    const uint32_t bytes = (both_halves ? 2 : 1) * kHalfBytesA + boxes * kGroupBytesB;
    for (int k = k0; k < k0 + steps * kTileK; k += kTileK) {
      if (!begin(bytes)) return false;
      ptx::Mbarrier* full = &shared_.full[stage_.slot()];
      uint8_t* a = shared_.a[stage_.slot()];
      uint8_t* b = shared_.b[stage_.slot()];
      load_box<kTransposedA>(a, a_map, full, k, row, slice);
      if (both_halves) load_box<kTransposedA>(a + kHalfBytesA, a_map, full, k, row + kHalfM, slice);
#pragma unroll
      for (int i = 0; i < kTileN / kGroupN; ++i) {
        if (i < boxes) {
          load_box<kTransposedB>(b + i * kGroupBytesB, b_map, full, k, column + i * kGroupN,
                                 expert);
        }
      }
      stage_.advance();
    }
    return true;
  }

  template <bool kTransposed>
  __device__ __forceinline__ void load_box(uint8_t* to, const CUtensorMap* map, ptx::Mbarrier* full,
                                           int k, int row, int expert) {
    ptx::load_tensor(to, map, full, kTransposed ? row : k, kTransposed ? k : row, expert);
  }

  TileShared& shared_;
  const Products& products_;
  Hooks& hooks_;
  RingCursor<kStages> stage_;
  int to_draw_ = 0;  // steps until the next ticket is to be drawn
};

}  // namespace mok::cuda
