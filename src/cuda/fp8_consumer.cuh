// Tiles of precision fp8: E4M3 operands, whose tensor core sums keep fewer bits than fp32. So a
// step of 128 along the contraction goes into a scratch of its own and is then added, times the
// scales of its row and its column block, to the tile's sums: exactly every 128.
//
//   per step and 128 columns: 4 wgmma -> scratch (64 registers) -> 64 fma -> sums (128)
//
// There is no room for a second scratch (two of 64 columns each, taking turns, were no faster:
// docs/measured.md), nor for a pending tile: a tile is stored where it ends (fp8_epilogue.cuh).
// The two warpgroups run up to a ring of stages apart, so one multiplies while the other adds or
// stores.
//
// Scales of rows come from the rows of codes, of columns from the weights: a lane has those of some
// of the next 16 steps, and hands them out by shuffles.
#pragma once

#include "cuda/consumer.cuh"
#include "cuda/fp8_d_hidden_epilogue.cuh"
#include "cuda/fp8_epilogue.cuh"
#include "cuda/mx.cuh"
#include "cuda/tall_consumer.cuh"

namespace mok::cuda {

// A lane's scales of the 16 steps in hand and of the next 16. Where they stand is found anew for
// each: that costs no register meanwhile.
class Fp8Scales {
 public:
  static constexpr int kChunk = 16;  // steps; scales of a row are padded to 16 bytes

  // From step `step` on, a multiple of kChunk. kTwoWeights: the second column block is another
  // weight's; `which`: of the operands.
  template <bool kTwoWeights>
  __device__ __forceinline__ void ask_for(const TileTask& task, const Fp8Operands& operands,
                                          int which, int step) {
    const uint32_t lane = fresh_thread() % kWarp;
    const uint8_t* row = operands.a[which] +
                         int64_t{task.row0 + tile_row(0)} * operands.a_row_bytes + step +
                         lane % 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next_[half] = ptx::load_relaxed_gpu(
          reinterpret_cast<const uint32_t*>(row + 8 * half * operands.a_row_bytes));
    }
    const int part = static_cast<int>(lane) / kChunk;
    const int block = task.col0 / kHalfN + (kTwoWeights ? 0 : part);
    const int mine = step + static_cast<int>(lane) % kChunk;
    next_[2] = 0;
    if (block < operands.column_blocks && mine < operands.k_blocks) {
      const int64_t first = (int64_t{task.expert} * operands.column_blocks + block);
      next_[2] = __ldg(operands.b[kTwoWeights ? part : which] + first * operands.k_blocks + mine);
    }
  }
  // Those asked for last are in hand from now on.
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < 3; ++i) now_[i] = next_[i];
  }

  // Of the row `half` of the lane, of column block `part`.
  __device__ __forceinline__ float of_row(int half, int step) const {
    const uint32_t in = step % kChunk;
    const uint32_t word = __shfl_sync(~0u, now_[half], (fresh_thread() % kWarp & ~3u) | in / 4);
    return __uint_as_float((word >> in % 4 * 8 & 0xff) << 23);
  }
  __device__ __forceinline__ float of_columns(int part, int step) const {
    const uint32_t byte = __shfl_sync(~0u, now_[2], part * kChunk + step % kChunk);
    return __uint_as_float(byte << 23);
  }

 private:
  uint32_t now_[3] = {}, next_[3] = {};
};

template <bool kBackward, class Products>
class Fp8Consumer : protected TallConsumer<kBackward, Products> {
  using Base = TallConsumer<kBackward, Products>;

 protected:
  using Base::Base;
  using Base::shared_, Base::products_, Base::group_, Base::at_;

  // Until a task comes that is none, or an abort.
  __device__ __forceinline__ void run_fp8_tiles() {
    if constexpr (Products::kFp8) {
      Fp8Scales scales;
      bool asked = false;  // for the scales of the task at at_; warps may differ
      do {
        const TileTask::Shape shape = this->next_shape();
        if (!is_fp8(shape.kind())) return;
        const TileTask& task = shared_.task[at_.low()];
        if (this->is_idle(shape)) {
          this->pass(shape.steps());
          this->finish(at_.low());
          at_.advance_low();
          asked = false;
          continue;
        }
        if (!asked) {
          wait(shared_.task_loading[at_.low()], at_.low_phase(), shared_.abort);
          ask_for_first(scales, shape.kind(), task);
        }
        if (shape.kind() == TaskKind::gate_up_fp8) {
          asked = run_tile<TaskKind::gate_up_fp8>(scales, task, shape.steps());
        } else if (!kBackward) {
          asked = run_tile<TaskKind::down_fp8>(scales, task, shape.steps());
        } else if (shape.kind() == TaskKind::d_hidden_fp8) {
          asked = run_tile<TaskKind::d_hidden_fp8>(scales, task, shape.steps());
        } else {
          asked = run_tile<TaskKind::d_input_fp8>(scales, task, shape.steps());
        }
        this->finish(at_.low_before(1));
      } while (this->wait_for_task());
    }
  }

 private:
  static constexpr int kPartWords = kHalfN / 2;  // sums of 128 columns
  static constexpr int kParts = kTileN / kHalfN;

  static constexpr Fp8Product product_of(TaskKind kind) {
    return kind == TaskKind::gate_up_fp8   ? kFp8GateUp
           : kind == TaskKind::d_input_fp8 ? kFp8DInput
                                           : kFp8Down;
  }

  // Leaves at_ at the next task; whether its scales are asked for.
  template <TaskKind kKind>
  __device__ __forceinline__ bool run_tile(Fp8Scales& scales, const TileTask& task, int steps) {
    constexpr bool kGateUp = kKind == TaskKind::gate_up_fp8;
    const Fp8Operands& operands = products_.fp8[product_of(kKind)];
    float acc[kTileN / 2] = {};
    if constexpr (kKind == TaskKind::d_input_fp8) {
      accumulate<kGateUp>(acc, scales, task, operands, 0, steps / 2, true);
      accumulate<kGateUp>(acc, scales, task, operands, 1, steps / 2, false);
    } else {
      accumulate<kGateUp>(acc, scales, task, operands, 0, steps, false);
    }
    at_.advance_low();
    const bool asked = ask_for_next(scales);
    if constexpr (kGateUp) {
      store_gate_up_fp8(acc, products_, operands, task);
    } else if constexpr (kKind == TaskKind::d_hidden_fp8) {
      store_d_hidden_fp8(acc, products_, operands, task);
    } else {
      store_rows(acc, products_, task);
    }
    return asked;
  }

  __device__ __forceinline__ void ask_for_first(Fp8Scales& scales, TaskKind kind,
                                                const TileTask& task) const {
    if (kind == TaskKind::gate_up_fp8) {
      scales.template ask_for<true>(task, products_.fp8[kFp8GateUp], 0, 0);
    } else if (kBackward && kind == TaskKind::d_input_fp8) {
      scales.template ask_for<false>(task, products_.fp8[product_of(TaskKind::d_input_fp8)], 0, 0);
    } else {
      scales.template ask_for<false>(task, products_.fp8[kFp8Down], 0, 0);
    }
  }
  // While a tile is stored, if the next one's rows are known to have come.
  __device__ __forceinline__ bool ask_for_next(Fp8Scales& scales) const {
    const uint32_t slot = at_.low(), phase = at_.low_phase();
    const bool there =
        shared_.task_full[slot].test(phase) && shared_.task_loading[slot].test(phase);
    if (!__all_sync(~0u, there)) return false;
    const TaskKind kind = this->next_shape().kind();
    if (!is_fp8(kind)) return false;
    ask_for_first(scales, kind, shared_.task[slot]);
    return true;
  }

  // Adds the products of `steps` steps to kParts times 128 columns. The scales of the first of them
  // are asked for. `which`: of the operands; `more`: there is another. kTwoWeights: the second
  // column block is another weight's.
  template <bool kTwoWeights>
  __device__ __forceinline__ void accumulate(float (&acc)[kTileN / 2], Fp8Scales& scales,
                                             const TileTask& task, const Fp8Operands& operands,
                                             int which, int steps, bool more) {
    float sum[kPartWords];  // dead between parts: the first wgmma overwrites it
    // What the next part needs is made ready while one is multiplied.
    wait(shared_.full[at_.high()], at_.high_phase(), shared_.abort);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const uint32_t slot = __shfl_sync(~0u, at_.high(), 0);  // known to be the same in all lanes
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const ptx::Operand<false> a(ptx::shared_address(shared_.a[slot]) + group_ * kHalfBytesA);
        const ptx::Operand<false> b(ptx::shared_address(shared_.b[slot]) + part * 2 * kGroupBytesB);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK; k += 16) {  // in pairs of codes
          ptx::wgmma_e4m3_n128(sum, a.at(k), b.at(k), k > 0);
        }
        ptx::wgmma_commit();
        if (part == 0 && step % Fp8Scales::kChunk == 0) {
          scales.advance();
          const int next = step + Fp8Scales::kChunk;
          if (next < steps || more) {
            scales.template ask_for<kTwoWeights>(task, operands, next < steps ? which : which + 1,
                                                 next < steps ? next : 0);
          }
        }
        const float column = scales.of_columns(part, step);
        float scale[2] = {scales.of_row(0, step) * column, scales.of_row(1, step) * column};
        asm volatile("" : "+f"(scale[0]), "+f"(scale[1]));  // now
        if (part == kParts - 1) {
          at_.advance_high();
          if (step + 1 < steps) wait(shared_.full[at_.high()], at_.high_phase(), shared_.abort);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_settle<kHalfN>(sum);
        if (part == kParts - 1) this->release(slot);
#pragma unroll
        for (int i = 0; i < kPartWords; ++i) {
          float& to = acc[part * kPartWords + i];
          to = fmaf(sum[i], scale[i / 2 % 2], to);
        }
      }
    }
  }
};

}  // namespace mok::cuda
