// Tall tiles: an expert's last kTailRows rows or fewer, computed with the tile of 128 rows before
// them, so that its weights are loaded once for both. The product is turned over: weights are
// wgmma's rows, tokens its columns, of which there may be any multiple of eight.
//
//   warpgroup g   times 144 tokens, the stage's a (d_hidden: tall_d_hidden.cuh)
//     gate_up     boxes g and 2 + g of its b: 64 columns of gate and of up
//     others      boxes 2 g and 2 g + 1: 128 columns
//
// A tile is stored where it ends, a piece at a time (tall_piece.cuh): with 144 accumulators there
// is no room for a pending one. Its three rounds have code for three pieces each: for all nine of
// them instructions would come too late.
//
// Bits: as in other tiles an element's products are added in one chain, K ascending.
#pragma once

#include "cuda/consumer.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/swiglu.cuh"
#include "cuda/tall_d_hidden.cuh"
#include "cuda/tall_piece.cuh"

namespace mok::cuda {

template <bool kBackward, class Products>
class TallConsumer : protected Consumer<Products> {
  using Base = Consumer<Products>;

 protected:
  using Base::Base;
  using Base::shared_, Base::products_, Base::group_, Base::at_;

  // Until a task comes that is none, or an abort.
  __device__ __forceinline__ void run_tall_tiles() {
    if constexpr (Products::kTall) {
      do {
        const TileTask::Shape shape = this->next_shape();
        if (!is_tall(shape.kind())) return;
        if (group_ > 0 && shape.narrow()) {
          this->pass(shape.steps());
          this->finish(at_.low());
          at_.advance_low();
          continue;
        }
        if (kBackward && shape.kind() == TaskKind::d_hidden_tall) {
          run_d_hidden(shape);
        } else if (!kBackward && shape.kind() == TaskKind::gate_up_tall) {
          run_tile<TaskKind::gate_up_tall>(shape);
        } else {
          run_tile<kBackward ? TaskKind::d_input_tall : TaskKind::down_tall>(shape);
        }
        this->finish(at_.low_before(1));
      } while (this->wait_for_task());
    }
  }

 private:
  static constexpr int kTokens = kTileM + kTailRows;
  static constexpr int kWords = kTokens / 2;
  static constexpr int kPieceWords = 8;  // of both boxes

  template <TaskKind kKind>
  __device__ __forceinline__ void run_tile(TileTask::Shape shape) {
    // Word kPieceWords * p + 4 * box + 2 * i + half: of piece p, tokens 8i .., columns 8 * half ..
    uint32_t word[kWords];
    multiply<kKind>(word, shape.steps());
    const TileTask& task = shared_.task[at_.low_before(1)];
    if constexpr (kKind == TaskKind::gate_up_tall) {
      store_gate_up(word, task);
    } else {
      store_rows(word, task);
    }
  }

  template <TaskKind kKind>
  __device__ __forceinline__ void multiply(uint32_t (&word)[kWords], int steps) {
    float acc[kTokens];  // of the first box, then of the second one
    issue_step<kKind>(acc, false);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      issue_step<kKind>(acc, true);
      ptx::wgmma_wait<1>();
      this->release(at_.high_before(2));
    }
    at_.advance_low();
    ptx::wgmma_wait<0>();
    this->release(at_.high_before(1));
    ptx::wgmma_settle<2 * kTokens>(acc);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const int box = i / (kTokens / 4), in_box = i % (kTokens / 4);
      const int piece = in_box / 4, in_piece = in_box % 4;
      word[kPieceWords * piece + 4 * box + in_piece] = ptx::pack_bf16(acc[2 * i], acc[2 * i + 1]);
    }
  }

  template <TaskKind kKind>
  __device__ __forceinline__ void issue_step(float (&acc)[kTokens], bool add) {
    constexpr bool kTransposed = b_is_transposed(kKind);
    constexpr bool kGateUp = kKind == TaskKind::gate_up_tall;
    wait(shared_.full[at_.high()], at_.high_phase(), shared_.abort);
    ptx::wgmma_fence();
    const uint32_t b =
        ptx::shared_address(shared_.b[at_.high()]) + group_ * (kGateUp ? 1 : 2) * kGroupBytesB;
    const ptx::Operand<kTransposed> first(b);
    const ptx::Operand<kTransposed> second(b + (kGateUp ? 2 : 1) * kGroupBytesB);
    const ptx::Operand<false> tokens(ptx::shared_address(shared_.a[at_.high()]));
#pragma unroll
    for (int k = 0; k < kTileK; k += 16) {
      ptx::wgmma<kTokens, kTransposed, false>(acc, first.at(k), tokens.at(k), k > 0 || add);
      ptx::wgmma<kTokens, kTransposed, false>(acc + kTokens / 2, second.at(k), tokens.at(k),
                                              k > 0 || add);
    }
    ptx::wgmma_commit();
    at_.advance_high();
  }

  __device__ __forceinline__ void run_d_hidden(TileTask::Shape shape) {
    using Epilogue = TallDHiddenEpilogue<Products>;
    uint32_t word[Epilogue::kWords];
    multiply_d_hidden(word, shape.steps());
    const uint32_t last = at_.high_before(1);
    Epilogue epilogue(products_, shared_, shared_.task[at_.low_before(1)], group_,
                      reinterpret_cast<float*>(shared_.b[last]));
    // Until both are done with the stage; until all sums are there.
    ptx::named_barrier_sync(this->kBothGroups, kConsumerGroups * kWarpgroup);
    epilogue.run(word);
    ptx::named_barrier_sync(this->kBothGroups, kConsumerGroups * kWarpgroup);
    epilogue.store_sums();
    ptx::fence_proxy_async_shared();
    __syncwarp();
    this->release(last);
  }

  // The last stage is kept.
  __device__ __forceinline__ void multiply_d_hidden(
      uint32_t (&word)[TallDHiddenEpilogue<Products>::kWords], int steps) {
    constexpr int kSharedTokens = TallDHiddenEpilogue<Products>::kSharedTokens;
    float own[kTokens / 2], shared[kSharedTokens / 2];  // of box 2 * group_, of box 1
    issue_d_hidden(own, shared, false);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      issue_d_hidden(own, shared, true);
      ptx::wgmma_wait<1>();
      this->release(at_.high_before(2));
    }
    at_.advance_low();
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle<kTokens>(own);
    ptx::wgmma_settle<kSharedTokens>(shared);
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) word[i] = ptx::pack_bf16(own[2 * i], own[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < kSharedTokens / 4; ++i) {
      word[kTokens / 4 + i] = ptx::pack_bf16(shared[2 * i], shared[2 * i + 1]);
    }
  }
  template <int kOwn, int kShared>
  __device__ __forceinline__ void issue_d_hidden(float (&own)[kOwn], float (&shared)[kShared],
                                                 bool add) {
    wait(shared_.full[at_.high()], at_.high_phase(), shared_.abort);
    ptx::wgmma_fence();
    const uint32_t b = ptx::shared_address(shared_.b[at_.high()]);
    const uint32_t a = ptx::shared_address(shared_.a[at_.high()]);
    const ptx::Operand<true> own_box(b + group_ * 2 * kGroupBytesB), box(b + kGroupBytesB);
    const ptx::Operand<false> tokens(a), some(a + group_ * kHalfBytesA);
#pragma unroll
    for (int k = 0; k < kTileK; k += 16) {
      ptx::wgmma<2 * kOwn, true, false>(own, own_box.at(k), tokens.at(k), k > 0 || add);
      ptx::wgmma<2 * kShared, true, false>(shared, box.at(k), some.at(k), k > 0 || add);
    }
    ptx::wgmma_commit();
    at_.advance_high();
  }

  static constexpr int kRounds = 3, kRoundPieces = kTokens / kPieceTokens / kRounds;

  static __device__ __forceinline__ void store(uint64_t to, uint4 v, bool valid) {
    if (valid) ptx::store_global_16(reinterpret_cast<void*>(to), v);
  }

  __device__ __forceinline__ void store_gate_up(uint32_t (&word)[kWords], const TileTask& task) {
    const auto& out = products_.product[task.product].gate_up;
    const uint32_t row_bytes = static_cast<uint32_t>(out.row_elements) * 2;
    const int columns = group_ * kGroupN;
    if (columns >= task.cols) return;
    const PieceTurner turner(shared_);
    const uint32_t column = (task.col0 + columns + turner.column()) * 2;
    int token = turner.token();
    uint64_t hidden =
        reinterpret_cast<uint64_t>(out.hidden) + column + uint64_t{row_bytes} * (task.row0 + token);
    uint64_t gate = reinterpret_cast<uint64_t>(out.gate) + column +
                    uint64_t{row_bytes} * (task.save_row0 + token);
    const uint64_t up_minus_gate =
        reinterpret_cast<uint64_t>(out.up) - reinterpret_cast<uint64_t>(out.gate);
    const bool wanted = out.hidden != nullptr, kept = task.save_rows > 0;
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
      for (int piece = 0; piece < kRoundPieces; ++piece) {
        uint32_t g[4], u[4], h[4];
        take_piece(word + kPieceWords * piece, g);
        take_piece(word + kPieceWords * piece + 4, u);
#pragma unroll
        for (int i = 0; i < 4; ++i) h[i] = swiglu_pair(g[i], u[i], products_.swiglu_limit);
        if (kept) {
          store(gate, turner.turn(g), token < task.save_rows);
          store(gate + up_minus_gate, turner.turn(u), token < task.save_rows);
        }
        store(hidden, turner.turn(h), wanted && token < task.rows);
        token += kPieceTokens;
        hidden += uint64_t{row_bytes} * kPieceTokens;
        gate += uint64_t{row_bytes} * kPieceTokens;
      }
      move_up<kPieceWords * kRoundPieces>(word);
    }
  }

  // Each row at its own destination.
  __device__ __forceinline__ void store_rows(uint32_t (&word)[kWords], const TileTask& task) {
    const Product& product = products_.product[task.product];
    const int columns = group_ * 2 * kGroupN;
    const PieceTurner turner(shared_);
    const uint32_t column = (task.col0 + columns + turner.column()) * 2;
    const bool both = columns + kGroupN < task.cols;
    int token = turner.token();
    const auto destination = [&]() -> uint64_t {
      return token < task.rows ? row_destination(task, product, token, column) : 0;
    };
    uint64_t next[kRoundPieces];
    const auto ask_for_round = [&] {
#pragma unroll
      for (uint64_t& to : next) {
        to = destination();
        token += kPieceTokens;
      }
    };
    ask_for_round();
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      uint64_t to[kRoundPieces];
#pragma unroll
      for (int piece = 0; piece < kRoundPieces; ++piece) to[piece] = next[piece];
      ask_for_round();
#pragma unroll
      for (int piece = 0; piece < kRoundPieces; ++piece) {
        uint32_t m[4];
        take_piece(word + kPieceWords * piece, m);
        store(to[piece], turner.turn(m), to[piece] != 0);
        take_piece(word + kPieceWords * piece + 4, m);
        store(to[piece] + kGroupN * 2, turner.turn(m), to[piece] != 0 && both);
      }
      move_up<kPieceWords * kRoundPieces>(word);
    }
  }
};

}  // namespace mok::cuda
