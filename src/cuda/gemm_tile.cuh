// The tile core of the megakernels: one block per SM, 384 threads, tasks until none is left.
//
//   warpgroup 0 (56 registers a thread)
//     load         waits for a task's inputs, then tensor loads into the stage ring
//     schedule     draws a ticket, decodes it, fills a task slot
//     publish      waits until a tile's stores are issued, makes them visible, counts the tile in
//     communicate  free for the caller
//   warpgroups 1, 2 (224 registers): 64 rows x 256 columns each; 128 accumulators a thread, and the
//     previous tile's 64 registers of bf16, stored slot by slot between the wgmma groups; a loop
//     for each kind of epilogue, which stores what is pending before it leaves. fp8: 128
//     accumulators and 64 of scratch, stored at a tile's end (fp8_consumer.cuh)
//
//   shared memory                     written by   full             read by     empty
//     a[4] 16 KB, b[4] 32 KB          load (TMA)   full: bytes      consumers   empty: 8 warps
//     b of a weight gradient's last   consumers    (a warp's own)   tensor      the same, after
//       stage, once it is multiplied                               stores        its 2nd slot
//     task[4], shape[4]               schedule     task_full        all         task_empty: load,
//                                                                                 publish
//   task_done: consumers -> publish              draw: load -> schedule (draw the next ticket now)
//   task_loading: load -> consumers (the task's inputs are there)
//
// A pending epilogue may be what the next task's inputs wait for, here or in another block. So a
// consumer stores it at once unless the next tile is already being loaded.
//
// Bits: an element's products are added in one chain, K ascending in steps of 16, whichever tile
// row, warpgroup or column width it falls in.
#pragma once

#include "cuda/consumer.cuh"
#include "cuda/d_hidden_epilogue.cuh"
#include "cuda/fp8_consumer.cuh"
#include "cuda/gate_up_epilogue.cuh"
#include "cuda/gradient_epilogue.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/row_epilogue.cuh"
#include "cuda/tall_consumer.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

// What the core needs from its caller.
//   void draw()                        whole schedule warp: before each next_task, when the next
//                                      task is due, or as soon as there was one if draws_early()
//   Drawn next_task(TileTask& task)    the same; task is in shared memory: all lanes write the
//                                      same
//   void wait_ready(const TileTask&)   one thread, before the task's first load of A. Must end with
//                                      an acquire and a proxy fence unless next_task has done both;
//                                      returns on abort
//   void publish(const TileTask&)      one thread, after all stores of the tile by all threads were
//                                      issued before it: release at the scope of the readers
enum class Drawn { tile, no_tile, nothing };  // no_tile: the hooks have done it, draw again

template <class T>
concept TileHooks = requires(T hooks, TileTask& task, const TileTask& filled) {
  { hooks.next_task(task) } -> std::same_as<Drawn>;
  { hooks.draws_early() } -> std::same_as<bool>;
  hooks.draw();
  hooks.wait_ready(filled);
  hooks.publish(filled);
};

// The next ticket is drawn this many steps before the last load of a task: late, so that a block
// sits on no work that another could begin, but early enough to hide the draw, its decoding and the
// look at its counter (5000 cycles; a step is 1024).
inline constexpr int kDrawLead = 10;
inline constexpr int kDrawLeadDHidden = 18;  // its steps are shorter, its look-up is longer

template <class Hooks>
__device__ __forceinline__ void schedule_tasks(TileShared& shared, Hooks& hooks) {
  RingCursor<kTaskSlots> at;
  for (uint32_t asked = 0;; ++asked) {
    const auto is_due = [&] {
      return wait(shared.task_empty[at.slot()], at.phase() ^ 1, shared.abort) &&
             (asked == 0 || wait(shared.draw, (asked - 1) & 1, shared.abort));
    };
    const bool early = hooks.draws_early();
    if (!early && !is_due()) return;
    TileTask& task = shared.task[at.slot()];  // made in place: in registers it would not fit
    Drawn drawn;
    do {
      hooks.draw();
      if (early && !is_due()) return;
      drawn = hooks.next_task(task);
    } while (drawn == Drawn::no_tile);
    const bool more = drawn == Drawn::tile;
    __syncwarp();
    if (!more) task.kind = TaskKind::stop;
    shared.shape[at.slot()] = task.shape_of();
    shared.task_full[at.slot()].arrive();
    __syncwarp();
    if (!more) return;
    at.advance();
  }
}

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
      if (Products::kFp8 && is_fp8(task.kind)) {
        go = load_fp8(task, product, both_halves);
      } else if (Products::kTall && is_tall(task.kind)) {
        go = load_tall<kBackward>(task, product);
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

  template <bool kBackward>
  __device__ __forceinline__ bool load_tall(const TileTask& task, const Product& product) {
    if constexpr (Products::kTall) {
      if (!kBackward && task.kind == TaskKind::gate_up_tall) {
        return task.cols <= kGroupN ? load_gate_up<1, 2, true>(task, product, true)
                                    : load_gate_up<2, 2, true>(task, product, true);
      }
      if (!kBackward) {
        return load<false, false, true>(task, product, 0, task.steps, true);
      }
      if (task.kind == TaskKind::d_hidden_tall) {
        return load<false, true, true>(task, product, 0, task.steps, true);
      }
      return load<false, true, true>(task, product, 0, task.steps / 2, true) &&
             load<false, true, true>(task, product, 1, task.steps / 2, true);
    }
    return false;
  }

  // kSide boxes of gate and, from box kUpAt on, as many of up.
  template <int kSide, int kUpAt, bool kTail = false>
  __device__ __forceinline__ bool load_gate_up(const TileTask& task, const Product& product,
                                               bool both_halves) {
    const CUtensorMap* a_map = &products_.map[product.a[0]];
    const CUtensorMap* gate = &products_.map[product.b[0]];
    const CUtensorMap* up = &products_.map[product.b[1]];
    const int steps = task.steps, row = task.row0, column = task.col0, expert = task.expert;
    const uint32_t bytes =
        (both_halves ? 2 : 1) * kHalfBytesA + 2 * kSide * kGroupBytesB + (kTail ? kTailBytes : 0);
    for (int k = 0; k < steps * kTileK; k += kTileK) {
      if (!begin(bytes)) return false;
      ptx::Mbarrier* full = &shared_.full[stage_.slot()];
      uint8_t* a = shared_.a[stage_.slot()];
      uint8_t* b = shared_.b[stage_.slot()];
      ptx::load_tensor(a, a_map, full, k, row, 0);
      if (both_halves) ptx::load_tensor(a + kHalfBytesA, a_map, full, k, row + kHalfM, 0);
      if constexpr (kTail) load_tail(a, product, full, k, row, 0);
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
  template <bool kTransposedA, bool kTransposedB, bool kTail = false>
  __device__ __forceinline__ bool load(const TileTask& task, const Product& product, int part,
                                       int steps, bool both_halves) {
    const CUtensorMap* a_map = &products_.map[product.a[part]];
    const CUtensorMap* b_map = &products_.map[product.b[part]];
    const int row = task.row0, column = task.col0, boxes = task.cols / kGroupN;
    // A weight gradient's contraction runs over rows of the ring.
    const int expert = kTransposedA ? 0 : task.expert;
    const int slice = kTransposedA ? product.a_slice : part;
    const int k0 = kTransposedA ? task.save_row0 : 0;
    const uint32_t bytes =
        (both_halves ? 2 : 1) * kHalfBytesA + boxes * kGroupBytesB + (kTail ? kTailBytes : 0);
    for (int k = k0; k < k0 + steps * kTileK; k += kTileK) {
      if (!begin(bytes)) return false;
      ptx::Mbarrier* full = &shared_.full[stage_.slot()];
      uint8_t* a = shared_.a[stage_.slot()];
      uint8_t* b = shared_.b[stage_.slot()];
      load_box<kTransposedA>(a, a_map, full, k, row, slice);
      if (both_halves) load_box<kTransposedA>(a + kHalfBytesA, a_map, full, k, row + kHalfM, slice);
      if constexpr (kTail) load_tail(a, product, full, k, row, slice);
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

  // A tall tile's rows beyond the first kTileM.
  __device__ __forceinline__ void load_tail(uint8_t* a, const Product& product, ptx::Mbarrier* full,
                                            int k, int row, int slice) {
    ptx::load_tensor(a + 2 * kHalfBytesA, &products_.tail_map[product.tail], full, k, row + kTileM,
                     slice);
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

// One thread. Its release covers the consumers' stores: they came before their arrivals at
// task_done, and those before this thread's wait.
template <class Hooks>
__device__ __forceinline__ void publish_tiles(TileShared& shared, Hooks& hooks) {
  RingCursor<kTaskSlots> at;
  while (wait(shared.task_full[at.slot()], at.phase(), shared.abort)) {
    if (shared.task[at.slot()].kind == TaskKind::stop) return;
    if (!wait(shared.task_done[at.slot()], at.phase(), shared.abort)) return;
    hooks.publish(shared.task[at.slot()]);
    shared.task_empty[at.slot()].arrive();
    at.advance();
  }
}

// One of the consumer warpgroups. Tiles with one kind of epilogue have a loop of their own, so that
// the registers of one epilogue are not kept in another's loop.
template <bool kBackward, class Products>
class TileConsumer : Fp8Consumer<kBackward, Products> {
  using Base = Consumer<Products>;
  using Base::finish, Base::pass;
  using Base::kFirstGroup, Base::kBothGroups;
  using Base::shared_, Base::products_, Base::group_, Base::at_;
  using Base::wait_for_task, Base::next_shape, Base::is_idle, Base::leads, Base::release;

 public:
  __device__ __forceinline__ TileConsumer(TileShared& shared, const Products& products,
                                          uint32_t group)
      : Fp8Consumer<kBackward, Products>(shared, products, group) {}

  // `reduce`: called by each warp with a task of that kind.
  template <class Reduce>
  __device__ __forceinline__ void run(Reduce&& reduce) {
    while (wait_for_task()) {
      const TaskKind kind = next_shape().kind();
      if (kind == TaskKind::stop) return;
      if (kind == TaskKind::reduce) {
        reduce(shared_.task[at_.low()]);
        finish(at_.low());
        at_.advance_low();
      } else if (Products::kFp8 && is_fp8(kind)) {
        this->run_fp8_tiles();
      } else if (Products::kTall && is_tall(kind)) {
        this->run_tall_tiles();
      } else if (!kBackward || GateUpEpilogue<Products>::takes(kind)) {
        run_tiles<GateUpEpilogue<Products>>();
      } else if (kind == TaskKind::d_hidden) {
        run_tiles<DHiddenEpilogue<Products>>();
      } else if (kind == TaskKind::weight_grad) {
        run_tiles<GradientEpilogue<Products>>();
      } else {
        run_tiles<RowEpilogue<Products>>();
      }
    }
  }

 private:
  // About the time of one slot; a longer look would only delay the flush.
  static constexpr int kLooks = 16;

  // What is known of the next task. Warps may differ in it: which instructions issue wgmma does
  // not depend on it.
  enum class Next {
    unknown,
    known,   // the task is there
    spread,  // it can take a pending epilogue in, and is being loaded
  };

  // Recomputed tiles are rare, and so are the shared expert's beside fp8 ones (where they would
  // bring that warning back).
  template <class Epilogue>
  static constexpr bool kSpread =
      Products::kFp8 ? std::is_same_v<Epilogue, GradientEpilogue<Products>>
                     : !kBackward || !std::is_same_v<Epilogue, GateUpEpilogue<Products>>;

  // Until a task comes that the epilogue does not take.
  template <class Epilogue>
  __device__ __forceinline__ void run_tiles() {
    constexpr bool kGradient = std::is_same_v<Epilogue, GradientEpilogue<Products>>;
    Epilogue tile(products_);  // what is pending is of the task before at_'s
    Next next = Next::known;
    float acc[kTileN / 2];  // the first products of a tile overwrite it
    if constexpr (Products::kFp8 || Products::kTall) {
      // Left undefined, it would share registers with the sums of fp8 and tall tiles in a way that
      // has the compiler wait for every wgmma (warning C7515).
#pragma unroll
      for (float& sum : acc) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sum));
    }
    while (true) {
      if (tile.pending() && next != Next::spread) {
        next = look_ahead<kLooks, Epilogue>();
        if (next != Next::spread) {
          store_pending(tile);
          finish_pending(tile);
        }
      }
      if (next == Next::unknown && !wait_for_task()) return;
      const TileTask::Shape shape = next_shape();
      if (!Epilogue::takes(shape.kind())) return;

      const TileTask& task = shared_.task[at_.low()];
      if (is_idle(shape)) {
        pass(shape.steps());
        finish(at_.low());
        at_.advance_low();
        next = look_ahead<1, Epilogue>();
        continue;
      }
      if (kGradient && shape.steps() == 0) {
        GradientStore(products_.product[task.product], task).store_nothing();
        finish(at_.low());
        at_.advance_low();
        next = look_ahead<1, Epilogue>();
        continue;
      }
      if (kGradient && shape.carried_in()) {
        GradientStore(products_.product[task.product], task).carry_in(acc);
        ptx::wgmma_settle<kTileN>(acc);
        multiply_flat<TaskKind::weight_grad, kTileN>(acc, shape.steps(), true);
      } else {
        multiply(acc, shape, tile);
      }
      // While the last products are in flight.
      at_.advance_low();
      tile.prepare(task);
      next = look_ahead<1, Epilogue>();
      ptx::wgmma_wait<0>();
      if constexpr (kGradient) {
        end_gradient(tile, acc, task, shape);
      } else {
        release(at_.high_before(1));
        ptx::wgmma_settle<std::is_same_v<Epilogue, DHiddenEpilogue<Products>> ? kTileInterGrad
                                                                              : kTileN>(acc);
        tile.pack(acc, shape);
      }
    }
  }

  // All products of a weight gradient's tile are done.
  __device__ __forceinline__ void end_gradient(GradientEpilogue<Products>& tile,
                                               float (&acc)[kTileN / 2], const TileTask& task,
                                               TileTask::Shape shape) {
    const uint32_t last = at_.high_before(1);
    ptx::wgmma_settle<kTileN>(acc);
    if (tile.leaves_accumulators()) {
      release(last);
      GradientStore(products_.product[task.product], task).store(acc);
      finish(at_.low_before(1));
      tile.clear();
    } else {
      tile.pack(acc, shape);
      tile.hold(last);
      if (shape.low_half_only()) {
        ptx::named_barrier_sync(kFirstGroup, kWarpgroup);
      } else {
        ptx::named_barrier_sync(kBothGroups, kConsumerGroups * kWarpgroup);
      }
      run_slot<0>(tile);
    }
  }

  template <int kLooks, class Epilogue>
  __device__ __forceinline__ Next look_ahead() const {
    if (!look<kLooks>(shared_.task_full[at_.low()], at_.low_phase())) return Next::unknown;
    if (!kSpread<Epilogue>) return Next::known;
    const TileTask::Shape shape = next_shape();
    const bool spread = shape.spreads() && Epilogue::takes(shape.kind()) && !is_idle(shape) &&
                        look<kLooks>(shared_.task_loading[at_.low()], at_.low_phase());
    return spread ? Next::spread : Next::known;
  }
  // One answer for the warp; every lane has acquired when it is true.
  template <int kLooks>
  __device__ __forceinline__ bool look(const ptx::Mbarrier& barrier, uint32_t parity) const {
    return __all_sync(~0u, poll<kLooks>(barrier, parity));
  }

  __device__ __forceinline__ const TileTask& pending_task() const {
    return shared_.task[fresh(at_.low_before(1))];
  }
  template <class Epilogue>
  __device__ __forceinline__ void finish_pending(Epilogue& tile) {
    if constexpr (std::is_same_v<Epilogue, GradientEpilogue<Products>>) {
      tile.wait_until_read();
      release(tile.held());
    }
    finish(at_.low_before(1));
    tile.clear();
  }
  template <int kSlot, class Epilogue>
  __device__ __forceinline__ void run_slot(Epilogue& tile) {
    if constexpr (std::is_same_v<Epilogue, GradientEpilogue<Products>>) {
      tile.template run_slot<kSlot>(shared_.b[tile.held()] + group_ * tile.kStagingBytes);
    } else {
      tile.template run_slot<kSlot>(pending_task());
    }
  }
  template <int kSlot = 0, class Epilogue>
  __device__ __forceinline__ void store_pending(Epilogue& tile) {
    if constexpr (kSlot < Epilogue::kSlots) {
      run_slot<kSlot>(tile);
      store_pending<kSlot + 1>(tile);
    }
  }
  __device__ __forceinline__ void store_pending(GradientEpilogue<Products>& tile) {
    store_pending<1>(tile);  // slot 0 ran at the tile's end
  }
  __device__ __forceinline__ void store_pending(DHiddenEpilogue<Products>& tile) {
#pragma unroll 1
    for (int pair = 0; pair < tile.kPairs; ++pair) {
      tile.template run_chunk<0>(pending_task(), pair);
      tile.template run_chunk<1>(pending_task(), pair);
      tile.end_pair(pending_task(), pair);
    }
  }

  // Waits for the next stage and issues its products; `add`: to what acc holds.
  template <TaskKind kKind, int kColumns>
  __device__ __forceinline__ void issue_step(float (&acc)[kTileN / 2], bool add) {
    wait(shared_.full[at_.high()], at_.high_phase(), shared_.abort);
    ptx::wgmma_fence();
    const ptx::Operand<a_is_transposed(kKind)> a(ptx::shared_address(shared_.a[at_.high()]) +
                                                 group_ * kHalfBytesA);
    const ptx::Operand<b_is_transposed(kKind)> b(ptx::shared_address(shared_.b[at_.high()]));
#pragma unroll
    for (int k = 0; k < kTileK; k += 16) {
      ptx::wgmma<kColumns, a_is_transposed(kKind), b_is_transposed(kKind)>(acc, a.at(k), b.at(k),
                                                                           k > 0 || add);
    }
    ptx::wgmma_commit();
    at_.advance_high();
  }
  // All steps but the newest are done; frees the stage of the one before it.
  __device__ __forceinline__ void retire_step() {
    ptx::wgmma_wait<1>();
    release(at_.high_before(2));
  }

  // The whole product of a tile; kinds differ in how their operands lie and in columns. `tile`: the
  // pending one, if there is one.
  __device__ __forceinline__ void multiply(float (&acc)[kTileN / 2], TileTask::Shape shape,
                                           GateUpEpilogue<Products>& tile) {
    multiply_one<TaskKind::down>(acc, shape, tile);
  }
  __device__ __forceinline__ void multiply(float (&acc)[kTileN / 2], TileTask::Shape shape,
                                           DHiddenEpilogue<Products>& tile) {
    multiply_one<TaskKind::d_hidden>(acc, shape, tile);
  }
  __device__ __forceinline__ void multiply(float (&acc)[kTileN / 2], TileTask::Shape shape,
                                           RowEpilogue<Products>& tile) {
    multiply_one<TaskKind::d_input>(acc, shape, tile);
  }
  __device__ __forceinline__ void multiply(float (&acc)[kTileN / 2], TileTask::Shape shape,
                                           GradientEpilogue<Products>& tile) {
    multiply_one<TaskKind::weight_grad>(acc, shape, tile);
  }
  template <TaskKind kKind, class Epilogue>
  __device__ __forceinline__ void multiply_one(float (&acc)[kTileN / 2], TileTask::Shape shape,
                                               Epilogue& tile) {
    if constexpr (kSpread<Epilogue>) {
      multiply_as<kKind>(acc, shape, tile);
    } else {
      multiply_flat<kKind, product_columns(kKind)>(acc, shape.steps(), false);
    }
  }
  template <TaskKind kKind, class Epilogue>
  __device__ __forceinline__ void multiply_as(float (&acc)[kTileN / 2], TileTask::Shape shape,
                                              Epilogue& tile) {
    constexpr int kColumns = product_columns(kKind);
    if (shape.narrow()) return multiply_flat<kKind, kTileN / 2>(acc, shape.steps(), false);
    issue_step<kKind, kColumns>(acc, false);
    int step = 1;
    spread<kKind>(acc, shape.steps(), step, tile);
    if (tile.pending()) finish_pending(tile);
    advance_to<kKind, kColumns>(acc, step, shape.steps());
  }
  // Nothing is spread over it. `add`: acc holds sums already.
  template <TaskKind kKind, int kColumns>
  __device__ __forceinline__ void multiply_flat(float (&acc)[kTileN / 2], int steps, bool add) {
    issue_step<kKind, kColumns>(acc, add);
    int step = 1;
    advance_to<kKind, kColumns>(acc, step, steps);
  }
  // The pending tile's slots run while products are in flight, spread evenly: slot s after step
  // s * steps / kSlots. By recursion: a lambda of this size would not be inlined, and the
  // accumulators would go to memory.
  template <TaskKind kKind, int kSlot = 0>
  __device__ __forceinline__ void spread(float (&acc)[kTileN / 2], int steps, int& step,
                                         GateUpEpilogue<Products>& tile) {
    if constexpr (kSlot < tile.kSlots) {
      advance_to<kKind, product_columns(kKind)>(acc, step, kSlot * steps / tile.kSlots + 1);
      if (tile.pending()) run_slot<kSlot>(tile);
      spread<kKind, kSlot + 1>(acc, steps, step, tile);
    }
  }
  // At once: the fourth step cannot be loaded before.
  template <TaskKind kKind>
  __device__ __forceinline__ void spread(float (&acc)[kTileN / 2], int steps, int& step,
                                         GradientEpilogue<Products>& tile) {
    if (tile.pending()) run_slot<1>(tile);
    advance_to<kKind, kTileN>(acc, step, min(2, steps));
  }
  // A slot a step from the first on, also where there are fewer steps.
  template <TaskKind kKind, int kSlot = 0>
  __device__ __forceinline__ void spread(float (&acc)[kTileN / 2], int steps, int& step,
                                         RowEpilogue<Products>& tile) {
    if constexpr (kSlot < tile.kSlots) {
      if (tile.pending()) run_slot<kSlot>(tile);
      advance_to<kKind, kTileN>(acc, step, min(step + 1, steps));
      spread<kKind, kSlot + 1>(acc, steps, step, tile);
    }
  }
  // Evenly.
  template <TaskKind kKind>
  __device__ __forceinline__ void spread(float (&acc)[kTileN / 2], int steps, int& step,
                                         DHiddenEpilogue<Products>& tile) {
    if (!tile.pending()) return;
#pragma unroll 1
    for (int pair = 0; pair < tile.kPairs; ++pair) {
      advance_to<kKind, kTileInterGrad>(acc, step, pair * steps / tile.kPairs + 1);
      tile.template run_chunk<0>(pending_task(), pair);
      advance_to<kKind, kTileInterGrad>(acc, step, (2 * pair + 1) * steps / (2 * tile.kPairs) + 1);
      tile.template run_chunk<1>(pending_task(), pair);
      tile.end_pair(pending_task(), pair);
    }
  }
  template <TaskKind kKind, int kColumns>
  __device__ __forceinline__ void advance_to(float (&acc)[kTileN / 2], int& step, int end) {
    for (; step < end; ++step) {
      issue_step<kKind, kColumns>(acc, true);
      retire_step();
    }
  }
};

}  // namespace mok::cuda
