// A tall tile of d_hidden: 192 columns, three boxes of weights. Warpgroup g multiplies its own box,
// 2 * g, with all 144 tokens and box 1 with tokens 64 * g .. 64 * g + 79; the 16 that both have
// are stored by the first one.
//
// From d_h to d_gate, d_up and w * h as in d_hidden_epilogue.cuh, a piece of 16 tokens and 16
// columns at a time, g and u asked for a piece ahead. A lane's sum of d_h * h over its eight
// columns goes to shared memory, B of the tile's last stage, where a thread for each token adds
// them up in the order in which a lane of any other tile does.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/swiglu.cuh"
#include "cuda/tall_piece.cuh"

namespace mok::cuda {

template <class Products>
class TallDHiddenEpilogue {
 public:
  static constexpr int kTokens = kTileM + kTailRows;
  static constexpr int kSharedTokens = 80;  // of box 1
  static constexpr int kOwnPieces = kTokens / 16, kPieces = kOwnPieces + kSharedTokens / 16;
  static constexpr int kWords = 4 * kPieces;        // an even number of pieces
  static constexpr int kSums = kTileInterGrad / 8;  // of a token
  static_assert(kTokens * kSums * sizeof(float) <= kTileN * kTileK * 2);

  __device__ __forceinline__ TallDHiddenEpilogue(const Products& products, TileShared& shared,
                                                 const TileTask& task, uint32_t group, float* sums)
      : products_(products),
        turner_(shared),
        task_(task),
        out_(products.product[task.product].d_hidden),
        in_ring_(products.product[task.product].gate_in_ring),
        group_(static_cast<int>(group)),
        sums_(sums) {}

  __device__ __forceinline__ void run(uint32_t (&word)[kWords]) {
    ask_for(0);
#pragma unroll 1
    for (int piece = 0; piece < kPieces; piece += 2) {
      make_piece(piece, word);
      make_piece(piece + 1, word + 4);
      move_up<8>(word);
    }
    zero_rows();
  }

  // All threads of both warpgroups, when all have run: the tile's part of the router gradient.
  __device__ __forceinline__ void store_sums() const {
    const int token = static_cast<int>(fresh_thread()) - kWarpgroup;
    if (token >= task_.rows || out_.partials == nullptr) return;
    const int chunks = task_.cols / 32;
    float lane_sum[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      lane_sum[t] = 0;
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) lane_sum[t] += sums_[token * kSums + 4 * c + t];
    }
    out_.partials[int64_t{task_.row0 + token} * out_.partial_columns +
                  task_.col0 / kTileInterGrad] =
        (lane_sum[0] + lane_sum[1]) + (lane_sum[2] + lane_sum[3]);
  }

 private:
  __device__ __forceinline__ void make_piece(int piece, const uint32_t* word) {
    uint32_t m[4];
    take_piece(word, m);
    const uint4 d_h = turner_.turn(m);
    products_.swiglu_limit != INFINITY ? make<true>(piece, d_h) : make<false>(piece, d_h);
  }
  __device__ __forceinline__ int token_of(int piece) const {
    const int first = piece < kOwnPieces ? 16 * piece : 64 * group_ + 16 * (piece - kOwnPieces);
    return first + turner_.token();
  }
  // The first of the lane's eight columns in the tile.
  __device__ __forceinline__ int column_of(int piece) const {
    return (piece < kOwnPieces ? 2 * group_ : 1) * kGroupN + turner_.column();
  }

  // g, u and the router weight of a piece. Not through L1: they may have been written in this call.
  __device__ __forceinline__ void ask_for(int piece) {
#pragma unroll
    for (int i = 0; i < 8; ++i) inputs_[i] = 0;
    weight_ = 1;
    if (piece >= kPieces) return;
    const int token = token_of(piece), column = column_of(piece);
    if (token >= task_.rows || column >= task_.cols) return;
    const int64_t row = (in_ring_ ? task_.row0 : task_.save_row0) + token;
    const int64_t at = row * out_.row_elements + task_.col0 + column;
    ptx::load_global_16(inputs_, out_.gate + at);
    ptx::load_global_16(inputs_ + 4, out_.up + at);
    if (out_.row_weight != nullptr) {
      weight_ = ptx::load_relaxed_gpu(out_.row_weight + task_.save_row0 + token);
    }
  }

  template <bool kLimited>
  __device__ __forceinline__ void make(int piece, uint4 d_h) {
    const uint32_t d[4] = {d_h.x, d_h.y, d_h.z, d_h.w};
    uint32_t d_gate[4], d_up[4], hidden[4];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SwigluGrads made = swiglu_grad_pair<kLimited>(inputs_[i], inputs_[4 + i], d[i], weight_,
                                                          products_.swiglu_limit);
      d_gate[i] = made.d_gate;
      d_up[i] = made.d_up;
      hidden[i] = weigh(made.hidden, d[i], weight_, sum);
    }
    ask_for(piece + 1);
    const int token = token_of(piece), column = column_of(piece);
    const bool twice = group_ > 0 && piece == kOwnPieces;
    if (column >= task_.cols || twice) return;
    const bool valid = token < task_.rows;
    if (valid) sums_[token * kSums + column / 8] = sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (valid) continue;
      d_gate[i] = d_up[i] = hidden[i] = 0;
    }
    const int64_t at = int64_t{task_.row0 + token} * out_.row_elements + task_.col0 + column;
    store(out_.d_gate + at, d_gate);
    store(out_.d_up + at, d_up);
    store(out_.hidden + at, hidden);
  }
  static __device__ __forceinline__ void store(__nv_bfloat16* to, const uint32_t (&v)[4]) {
    ptx::store_global_16(to, uint4{v[0], v[1], v[2], v[3]});
  }

  // Weight gradients run over whole steps of rows.
  __device__ __forceinline__ void zero_rows() const {
    const int pieces = task_.cols / 8;
    const auto thread = static_cast<int>(fresh_thread()) - kWarpgroup;
#pragma unroll 1
    for (int i = thread; i < (task_.save_rows - kTokens) * pieces;
         i += kConsumerGroups * kWarpgroup) {
      const int64_t at = int64_t{task_.row0 + kTokens + i / pieces} * out_.row_elements +
                         task_.col0 + i % pieces * 8;
      const uint32_t zeros[4] = {0, 0, 0, 0};
      store(out_.d_gate + at, zeros);
      store(out_.d_up + at, zeros);
      store(out_.hidden + at, zeros);
    }
  }

  const Products& products_;
  const PieceTurner turner_;
  const TileTask& task_;
  const decltype(Product::d_hidden)& out_;
  const bool in_ring_;
  const int group_;
  float* sums_;         // [token, 8 columns]
  uint32_t inputs_[8];  // g and u
  float weight_;
};

}  // namespace mok::cuda
