// The tile core of the megakernels: one block per SM, 384 threads, tasks until none is left.
//
//   warpgroup 0 (56 registers a thread)
//     load         waits for a task's inputs, then tensor loads into the stage ring
//                  (tile_loader.cuh)
//     schedule     draws a ticket, decodes it, fills a task slot
//     publish      waits until a tile's stores are issued, makes them visible, counts the tile in
//     communicate  free for the caller
//   warpgroups 1, 2 (224 registers): 64 rows x 256 columns each; 128 accumulators a thread, and the
//     previous tile's 64 registers of bf16, stored slot by slot between the wgmma groups; a loop
//     for each kind of epilogue, which stores what is pending before it leaves. fp8: 128
//     accumulators and 64 of scratch, stored at a tile's end (fp8_consumer.cuh); tall tiles, an
//     expert's last rows with the 128 before them: 144 accumulators (tall_consumer.cuh)
//
//   shared memory                     written by   full             read by     empty
//     a[4] 18 KB, b[4] 32 KB          load (TMA)   full: bytes      consumers   empty: 8 warps
//     b of a weight gradient's last   consumers    (a warp's own)   tensor      the same, after
//       stage, once it is multiplied                               stores        its 2nd slot
//     b of a tall d_hidden tile's     consumers    both groups'     consumers   the same, when
//       last stage: sums                           barrier                      they are added
//     piece[8] 512 bytes              a consumer warp of a tall tile, for itself
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
#include "cuda/tile_loader.cuh"
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
