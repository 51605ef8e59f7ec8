// Tiles of precision fp8: E4M3 operands, whose tensor core sums keep fewer bits than fp32. So a
// step of 128 along the contraction goes into a scratch of its own and is then added, times the
// scales of its row and its column block, to the tile's sums: exactly every 128.
//
//   per step and 64 columns (d_hidden: 128): 4 wgmma -> scratch -> fma -> sums (128 or 64 registers)
//
// Two scratches take turns, so that one is filled while the other is added. There is no room for a
// pending tile: a tile is stored where it ends (fp8_epilogue.cuh). The two warpgroups run up to a
// ring of stages apart, so one multiplies while the other stores.
//
// Scales of rows come from the rows of codes, of columns from the weights: a lane has those of some
// of the next 16 steps, and hands them out by shuffles.
#pragma once

#include "cuda/consumer.cuh"
#include "cuda/fp8_epilogue.cuh"
#include "cuda/mx.cuh"

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
class Fp8Consumer : protected Consumer<Products> {
  using Base = Consumer<Products>;

 protected:
  using Base::Base;
  using Base::shared_, Base::products_, Base::group_, Base::at_;

  // Until a task comes that is none, or an abort.
  __device__ __forceinline__ void run_fp8_tiles() {
    if constexpr (Products::kFp8) {
      do {
        const TileTask::Shape shape = this->next_shape();
        const TileTask& task = shared_.task[at_.low()];
        if (!is_fp8(shape.kind())) return;
        if (this->is_idle(shape)) {
          this->pass(shape.steps());
        } else {
          wait(shared_.task_loading[at_.low()], at_.low_phase(), shared_.abort);
          if (shape.kind() == TaskKind::gate_up_fp8) {
            run_gate_up(task, shape.steps());
          } else if (!kBackward) {
            run_rows<kFp8Down, 1>(task, shape.steps());
          } else if (shape.kind() == TaskKind::d_hidden_fp8) {
            run_d_hidden(task, shape.steps());
          } else {
            run_rows<kFp8DInput, 2>(task, shape.steps());
          }
        }
        this->finish(at_.low());
        at_.advance_low();
      } while (this->wait_for_task());
    }
  }

 private:
  static constexpr int kPartWords = kHalfN / 2;  // sums of 128 columns

  __device__ __forceinline__ void run_gate_up(const TileTask& task, int steps) {
    const Fp8Operands& operands = products_.fp8[kFp8GateUp];
    float acc[2 * kPartWords] = {};
    accumulate<2, true>(acc, task, operands, 0, steps);
    store_gate_up_fp8(acc, products_, operands, task);
  }
  template <Fp8Product kProduct, int kOperands>
  __device__ __forceinline__ void run_rows(const TileTask& task, int steps) {
    float acc[2 * kPartWords] = {};
#pragma unroll 1
    for (int which = 0; which < kOperands; ++which) {
      accumulate<2, false>(acc, task, products_.fp8[kProduct], which, steps / kOperands);
    }
    store_rows(acc, products_, task);
  }
  __device__ __forceinline__ void run_d_hidden(const TileTask& task, int steps) {
    const Fp8Operands& operands = products_.fp8[kFp8DHidden];
    float acc[kPartWords] = {};
    accumulate<1, false>(acc, task, operands, 0, steps);
    store_d_hidden_fp8(acc, products_, operands, task);
  }

  // Adds the products of `steps` steps to kParts times 128 columns; `which`: of the operands, for
  // d_input. kTwoWeights: the second column block is another weight's.
  template <int kParts, bool kTwoWeights>
  __device__ __forceinline__ void accumulate(float (&acc)[kParts * kPartWords],
                                             const TileTask& task, const Fp8Operands& operands,
                                             int which, int steps) {
    Fp8Scales scales;
    scales.template ask_for<kTwoWeights>(task, operands, which, 0);
    int step = 0;
    const auto chunk_begins = [&] {
      if (step % Fp8Scales::kChunk != 0) return;
      scales.advance();
      if (step + Fp8Scales::kChunk < steps) {
        scales.template ask_for<kTwoWeights>(task, operands, which, step + Fp8Scales::kChunk);
      }
    };
#pragma unroll 1
    for (; step + 2 <= steps; step += 2) {
      chunk_begins();
      run_steps<2, kParts>(acc, scales, step);
    }
    if (step < steps) {
      chunk_begins();
      run_steps<1, kParts>(acc, scales, step);
    }
  }

  // Pieces of kWidth columns of kSteps steps, each multiplied while the one before it is added. None
  // is in flight across a loop's end: the compiler would wait for every single wgmma.
  template <int kSteps, int kParts>
  __device__ __forceinline__ void run_steps(float (&acc)[kParts * kPartWords],
                                            const Fp8Scales& scales, int step) {
    constexpr int kWidth = kParts == 1 ? 128 : 64;
    constexpr int kWords = kWidth / 2;
    constexpr int kStepPieces = kParts * kHalfN / kWidth, kPieces = kSteps * kStepPieces;
    float sum[2][kWords];  // dead before: the first wgmma of a piece overwrites it
#pragma unroll
    for (int piece = 0; piece <= kPieces; ++piece) {
      if (piece < kPieces) {
        const int at = piece % kStepPieces;
        if (at == 0) {
          wait(shared_.full[at_.high()], at_.high_phase(), shared_.abort);
          at_.advance_high();
        }
        const uint32_t slot = at_.high_before(1);
        const ptx::Operand<false> a(ptx::shared_address(shared_.a[slot]) + group_ * kHalfBytesA);
        const ptx::Operand<false> b(ptx::shared_address(shared_.b[slot]) +
                                    at * kWidth * kTileK * 2);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK; k += 16) {  // in pairs of codes
          ptx::wgmma_e4m3<kWidth>(sum[piece % 2], a.at(k), b.at(k), k > 0);
        }
        ptx::wgmma_commit();
      }
      if (piece == 0) continue;
      constexpr int kBefore = 1;
      const int done = piece - kBefore, at = done % kStepPieces, of_step = step + done / kStepPieces;
      const float column = scales.of_columns(at * kWidth / kHalfN, of_step);
      const float scale[2] = {scales.of_row(0, of_step) * column,
                              scales.of_row(1, of_step) * column};
      if (piece < kPieces) {
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
      }
      ptx::wgmma_settle<kWidth>(sum[done % 2]);
      if (at == kStepPieces - 1) this->release(at_.high_before(piece < kPieces ? 2 : 1));
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        float& to = acc[at * kWords + i];
        to = fmaf(sum[done % 2][i], scale[i / 2 % 2], to);
      }
    }
  }
};

}  // namespace mok::cuda
