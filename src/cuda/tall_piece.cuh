// Results of tall tiles (tall_consumer.cuh), a piece of 16 tokens and 16 columns at a time. A
// warp's accumulators are turned over: a word is a pair of tokens of one column, word 2 * i + half
// has tokens 8i .. and columns 8 * half .. of the piece. Through 512 bytes of shared memory each
// lane gets eight columns of one token.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

class PieceTurner {
 public:
  __device__ __forceinline__ explicit PieceTurner(TileShared& shared) {
    const uint32_t thread = fresh_thread(), lane = thread % kWarp;
    const uint32_t own = ptx::shared_address(shared.piece[thread / kWarp - kWarpgroup / kWarp]);
    // Lanes 8i .. have the rows of matrix i.
    write_ = own + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    read_ = own + place(lane / 2, lane % 2);
  }

  // The lane's token and first column in a piece, the warp's columns of a box of 64 included.
  static __device__ __forceinline__ int token() {
    return static_cast<int>(fresh_thread() % kWarp / 2);
  }
  static __device__ __forceinline__ int column() {
    const uint32_t thread = fresh_thread();
    return static_cast<int>(thread % kWarpgroup / kWarp * kPieceColumns + thread % 2 * 8);
  }

  __device__ __forceinline__ uint4 turn(const uint32_t (&m)[4]) const {
    __syncwarp();  // the piece before has been read
    ptx::store_matrices_turned(write_, m);
    __syncwarp();
    return ptx::load_shared_16(read_);
  }

 private:
  // In bytes. Halves change places every four tokens, so that eight rows touch all banks.
  static __device__ __forceinline__ uint32_t place(uint32_t token, uint32_t half) {
    return token * kPieceColumns * 2 + (half ^ (token / 4 & 1)) * 16;
  }

  uint32_t write_, read_;
};

// The words of a piece.
__device__ __forceinline__ void take_piece(const uint32_t* word, uint32_t (&m)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) m[i] = word[i];
}
// The first kFirst words make room for the next ones.
template <int kFirst, int kWords>
__device__ __forceinline__ void move_up(uint32_t (&word)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords - kFirst; ++i) word[i] = word[i + kFirst];
}

}  // namespace mok::cuda
