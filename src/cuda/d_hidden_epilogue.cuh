// Epilogue of d_hidden tiles: from d_h = d_y w_down, g and u to d_gate, d_up, w * h and the tile's
// part of the router gradient.
//
// Chunks of 32 columns of a row half, twelve of them, in a loop of pairs: the registers move up by
// a pair each time, because instructions come too late when every chunk has code of its own. g and
// u of a chunk are asked for a pair ahead, into registers that the 192 columns leave free: they
// come from HBM.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/mx.cuh"
#include "cuda/swiglu.cuh"

namespace mok::cuda {

template <class Products>
class DHiddenEpilogue : public Epilogue<Products> {
  using Base = Epilogue<Products>;
  using Base::flags_, Base::products_, Base::product, Base::transpose, Base::row_of;
  using Base::kRow, Base::kKeptRow, Base::kLane, Base::kMx;

 public:
  static constexpr int kPairs = 6;
  static __device__ __forceinline__ bool takes(TaskKind kind) { return kind == TaskKind::d_hidden; }

  __device__ __forceinline__ explicit DHiddenEpilogue(const Products& products) : Base(products) {}

  // Before the last wait for products: finds the addresses and asks for what the first pair needs.
  __device__ __forceinline__ void prepare(const TileTask& task) {
    const Product& product = products_.product[task.product];
    this->set_flags(task);
    flags_ |= static_cast<uint32_t>(task.cols) / kChunkColumns;
    const int row = row_of(0);
    const uint32_t column = Base::column_bytes(task) / 16;
    const uint32_t row_pieces = static_cast<uint32_t>(product.d_hidden.row_elements) / 8;
    const uint32_t row_in = (product.gate_in_ring ? task.row0 : task.save_row0) + row;
    in_ = row_pieces * row_in + column;
    out_ = row_pieces * (task.row0 + row) + column;
    ask_for<0>(0, 0);
    ask_for<1>(0, 0);
    begin_row(task, 0);
  }

  __device__ __forceinline__ void pack(const float (&acc)[kTileN / 2], TileTask::Shape) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      word_[i % 2 * (kWords / 2) + i / 2] = ptx::pack_bf16(acc[2 * i], acc[2 * i + 1]);
    }
  }

  // A chunk of pair number `pair`; the two of a pair in turn, then end_pair.
  template <int kChunk>
  __device__ __forceinline__ void run_chunk(const TileTask& task, int pair) {
    pair = fresh(pair);
    const int groups = static_cast<int>(fresh(flags_) & kGroupsMask);  // an even number
    const int half = pair / kHalfPairs;
    if (pair % kHalfPairs * 2 < groups) {
      const bool limited = products_.swiglu_limit != INFINITY;
      if (fresh(flags_) & kMx) {
        limited ? make_chunk<kChunk, true, true>(half) : make_chunk<kChunk, false, true>(half);
      } else {
        limited ? make_chunk<kChunk, true, false>(half) : make_chunk<kChunk, false, false>(half);
      }
      // The last chunk of these rows: the sums become the tile's part of the router gradient.
      if (kChunk == 1 && pair % kHalfPairs * 2 + 2 == groups) store_dot(task, half);
    }
    pair = fresh(pair);
    ask_for<kChunk>(pair + 1, step_after(pair));
  }
  __device__ __forceinline__ void end_pair(const TileTask& task, int pair) {
    pair = fresh(pair);
#pragma unroll
    for (int i = 0; i < kWords - kPairWords; ++i) word_[i] = word_[i + kPairWords];
    in_ += step_after(pair);
    out_ += step_after(pair);
    if (pair + 1 == kHalfPairs) begin_row(task, 1);
  }

 private:
  static constexpr int kHalfPairs = kPairs / 2;
  static constexpr int kChunkColumns = 32;
  static_assert(kPairs * 2 * kChunkColumns == 2 * kTileInterGrad);
  static constexpr int kWords = kTileInterGrad / 4, kPairWords = kWords / kPairs;
  static constexpr int kGroupsMask = 7;  // in flags_: groups of 32 columns

  // From the lane's piece of one pair to that of the next, in pieces of 16 bytes.
  __device__ __forceinline__ uint32_t step_after(int pair) const {
    constexpr int kPieces = 2 * kChunkColumns / 8;
    const int below = product().d_hidden.row_elements;  // 8 rows
    return pair + 1 == kHalfPairs ? below - (kHalfPairs - 1) * kPieces : kPieces;
  }
  template <int kChunk>
  static __device__ __forceinline__ uint64_t place(uint32_t piece) {
    return uint64_t{piece + kChunk * kChunkColumns / 8} * 16;
  }

  // The router weight of the lane's row, and a fresh sum.
  __device__ __forceinline__ void begin_row(const TileTask& task, int half) {
    const float* weight = product().d_hidden.row_weight;
    weight_ = 1;
    if (weight != nullptr && (flags_ & kRow << half) != 0) {
      weight_ = ptx::load_relaxed_gpu(weight + task.save_row0 + row_of(half));
    }
    dot_ = 0;
  }

  // g and u of a chunk of a pair, `step` pieces from the pair in hand. Not through L1: they may
  // have been written in this call.
  template <int kChunk>
  __device__ __forceinline__ void ask_for(int pair, uint32_t step) {
    uint32_t* next = inputs_[kChunk];
#pragma unroll
    for (int i = 0; i < 8; ++i) next[i] = 0;  // else what stood there would have to be kept
    const uint32_t row = pair < kHalfPairs ? kRow : pair < kPairs ? kRow << 1 : 0;
    const uint32_t flags = fresh(flags_);  // nothing of it is kept through the loop
    if (pair % kHalfPairs * 2 >= static_cast<int>(flags & kGroupsMask) || (flags & row) == 0)
      return;
    const uint64_t at = place<kChunk>(in_ + step);
    ptx::load_global_16(next, reinterpret_cast<const uint8_t*>(product().d_hidden.gate) + at);
    ptx::load_global_16(next + 4, reinterpret_cast<const uint8_t*>(product().d_hidden.up) + at);
  }

  // kMxBlocks: a chunk is an MX block of each of h, d_gate and d_up.
  template <int kChunk, bool kLimited, bool kMxBlocks>
  __device__ __forceinline__ void make_chunk(int half) {
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = word_[4 * kChunk + i];
    const uint4 d_h = transpose(m);
    const uint32_t d[4] = {d_h.x, d_h.y, d_h.z, d_h.w};
    const bool valid = fresh(flags_) & kRow << half;
    const uint32_t* inputs = inputs_[kChunk];
    uint32_t d_gate[4], d_up[4], hidden[4];
    float sum = 0;  // of these columns
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SwigluGrads out = swiglu_grad_pair<kLimited>(inputs[i], inputs[4 + i], d[i], weight_,
                                                         products_.swiglu_limit);
      d_gate[i] = out.d_gate;
      d_up[i] = out.d_up;
      hidden[i] = out.hidden;
      if constexpr (!kMxBlocks) hidden[i] = weigh(hidden[i], d[i], weight_, sum);
    }
    if constexpr (kMxBlocks) {
      mx_round_blocks(d_gate, d_up, hidden);
#pragma unroll
      for (int i = 0; i < 4; ++i) hidden[i] = weigh(hidden[i], d[i], weight_, sum);
    }
    dot_ += sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (valid) continue;
      d_gate[i] = d_up[i] = hidden[i] = 0;
    }
    if (fresh(flags_) & kKeptRow << half) {
      const uint64_t at = place<kChunk>(out_);
      const auto store = [&](__nv_bfloat16* base, const uint32_t (&v)[4]) {
        ptx::store_global_16(reinterpret_cast<uint8_t*>(base) + at, uint4{v[0], v[1], v[2], v[3]});
      };
      store(product().d_hidden.d_gate, d_gate);
      store(product().d_hidden.d_up, d_up);
      store(product().d_hidden.hidden, hidden);
    }
  }

  __device__ __forceinline__ void store_dot(const TileTask& task, int half) {
    float dot = dot_;
    dot += __shfl_xor_sync(~0u, dot, 1);
    dot += __shfl_xor_sync(~0u, dot, 2);
    float* partials = product().d_hidden.partials;
    if (partials == nullptr || (flags_ & 3 * kLane) != 0 || (flags_ & kRow << half) == 0) return;
    partials[int64_t{task.row0 + row_of(half)} * product().d_hidden.partial_columns +
             task.col0 / kTileInterGrad] = dot;
  }

  // Defined before the first tile: see PackedTile. Word 24 * half + j is its pair(j, half): a chunk
  // is four words.
  uint32_t word_[kWords] = {};
  uint32_t inputs_[2][8] = {};  // of a pair: g and u of either chunk
  uint32_t in_ = 0, out_ = 0;   // the lane's place in g and u, and in the results, in pieces
  float weight_ = 0, dot_ = 0;  // of the row in hand
};

}  // namespace mok::cuda
