// Weights as products of precision mxfp8 read them: rounded there and back, along rows, along
// columns or both, from one read. A block of 256 threads takes a tile of 128 x 128 elements:
//
//   global -> registers: thread t has 16 elements of each of 4 rows (t / 8 + 32 pass)
//     along rows       a block of 32 is two threads', one shuffle; leaves from registers
//     shared tile -> along columns: a thread has two columns of 32 rows -> shared tile -> global
//
// The words (pairs of columns) of a row of the shared tile are rotated by 8 for each 32 rows, so
// that the four threads that share a column use other banks.
#include "cuda/check.h"
#include "cuda/mx.cuh"
#include "cuda/quantize.h"

namespace mok::cuda {
namespace {

using numerics::kMxBlock;

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kChunk = 16;                    // elements of a row that a thread takes
constexpr int kLanes = kTile / kChunk;        // threads of a row
constexpr int kPassRows = kThreads / kLanes;  // 32
constexpr int kPasses = kTile / kPassRows;
constexpr int kWords = kTile / 2;

struct RoundArgs {
  const uint8_t* from;
  int64_t expert_stride, row_stride;  // bytes
  int64_t rows, columns;
  uint8_t *along_rows, *along_columns;  // contiguous
};

__device__ int rotated(int row, int word) { return (word + 8 * (row / 32)) % kWords; }

// 16 elements.
__device__ void store(uint8_t* to, const uint32_t (&pair)[kChunk / 2]) {
  auto* out = reinterpret_cast<uint4*>(to);
  out[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  out[1] = make_uint4(pair[4], pair[5], pair[6], pair[7]);
}

__global__ void __launch_bounds__(kThreads) round_kernel(RoundArgs a) {
  __shared__ alignas(16) uint32_t word[kTile][kWords];
  const int64_t tiles_r = numerics::mx_tiles(a.rows), tiles_c = numerics::mx_tiles(a.columns);
  const int64_t tile = blockIdx.x, tile_c = tile % tiles_c, tile_r = tile / tiles_c % tiles_r;
  const int64_t e = tile / (tiles_c * tiles_r);
  const int lane = threadIdx.x % kLanes, first_row = threadIdx.x / kLanes;
  const int64_t column = tile_c * kTile + lane * kChunk, row0 = tile_r * kTile + first_row;
  // Sizes are multiples of 32: a chunk is in the matrix or not.
  const auto inside = [&](int pass) {
    return column < a.columns && row0 + pass * kPassRows < a.rows;
  };
  const auto place = [&](uint8_t* base, int pass) {
    return base + ((e * a.rows + row0 + pass * kPassRows) * a.columns + column) * 2;
  };
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int r = first_row + pass * kPassRows;
    uint4 part[2] = {};
    if (inside(pass)) {
      const auto* from = reinterpret_cast<const uint4*>(
          a.from + e * a.expert_stride + (row0 + pass * kPassRows) * a.row_stride + column * 2);
      part[0] = __ldg(from);
      part[1] = __ldg(from + 1);
    }
    if (a.along_columns != nullptr) {
      auto* to = reinterpret_cast<uint4*>(&word[r][rotated(r, lane * kChunk / 2)]);
      to[0] = part[0];
      to[1] = part[1];
    }
    if (a.along_rows == nullptr) continue;
    uint32_t v[kChunk / 2] = {part[0].x, part[0].y, part[0].z, part[0].w,
                              part[1].x, part[1].y, part[1].z, part[1].w};
    static_assert(kMxBlock == 2 * kChunk);
    const uint32_t small = mx_small(mx_amax_across(mx_amax_of_halves(mx_amax(v)), 1));
#pragma unroll
    for (uint32_t& pair : v) pair = mx_round_pair(pair, small);
    if (inside(pass)) store(place(a.along_rows, pass), v);
  }
  if (a.along_columns == nullptr) return;
  __syncthreads();
  {
    const int block = threadIdx.x % 4, which = threadIdx.x / 4;
    uint32_t pair[kMxBlock];
#pragma unroll
    for (int r = 0; r < kMxBlock; ++r) {
      const int row = block * kMxBlock + r;
      pair[r] = word[row][rotated(row, which)];
    }
    const uint32_t small = mx_small(mx_amax(pair));
#pragma unroll
    for (int r = 0; r < kMxBlock; ++r) {
      const int row = block * kMxBlock + r;
      word[row][rotated(row, which)] = mx_round_pair(pair[r], small);
    }
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (!inside(pass)) continue;
    const int r = first_row + pass * kPassRows;
    const auto* from = reinterpret_cast<const uint4*>(&word[r][rotated(r, lane * kChunk / 2)]);
    auto* to = reinterpret_cast<uint4*>(place(a.along_columns, pass));
    to[0] = from[0];
    to[1] = from[1];
  }
}

}  // namespace

void round_weights(Precision precision, const ConstStack& w, int64_t count, int64_t rows,
                   int64_t columns, void* along_rows, void* along_columns, cudaStream_t stream) {
  const auto require = [](bool holds, const char* message) {
    if (!holds) throw Error(ErrorCode::bad_argument, message);
  };
  require(precision == Precision::mxfp8, "precision: only mxfp8 has rounded weights");
  require(rows % kMxBlock == 0 && columns % kMxBlock == 0,
          "weights: rows and columns must be multiples of 32");
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  require(aligned(w.data) && w.row_stride % 8 == 0 && w.expert_stride % 8 == 0 &&
              aligned(along_rows) && aligned(along_columns),
          "weights: rows must be aligned to 16 bytes");
  const int64_t tiles = count * numerics::mx_tiles(rows) * numerics::mx_tiles(columns);
  if (tiles == 0) return;
  const RoundArgs args{static_cast<const uint8_t*>(w.data),
                       w.expert_stride * 2,
                       w.row_stride * 2,
                       rows,
                       columns,
                       static_cast<uint8_t*>(along_rows),
                       static_cast<uint8_t*>(along_columns)};
  round_kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch of a rounding of weights");
}

}  // namespace mok::cuda
