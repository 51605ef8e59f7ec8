// Kernels of quantize.h. A block of 256 threads takes a tile of 128 x 128 elements, which it reads
// once for both forms:
//
//   global bf16 -> registers: thread t has 16 elements of each of 4 rows (t / 8 + 32 pass)
//     row form         a block of 32 is two threads', one shuffle; codes leave from registers
//     shared bf16 tile -> transposed form: a thread has two columns of 32 rows
//
// In shared memory the words (pairs of columns) of a row are rotated by 8 for each 32 rows, so that
// the four threads that share a column read other banks; they lie side by side in a warp, so that
// their codes, 128 bytes of a column, leave together.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "cuda/check.h"
#include "cuda/quantize.h"
#include "numerics/blocks.h"

namespace mok::cuda {
namespace {

using numerics::bf16;
using numerics::BlockMatrix;
using numerics::e4m3;
using numerics::e8m0;
using numerics::kMxBlock;
using numerics::kMxTile;
using numerics::kMxTileBytes;

constexpr int kThreads = 256;
constexpr int kChunk = 16;                    // elements of a row that a thread takes
constexpr int kLanes = kMxTile / kChunk;      // threads of a row
constexpr int kPassRows = kThreads / kLanes;  // 32
constexpr int kPasses = kMxTile / kPassRows;  // 4
constexpr int kWords = kMxTile / 2;           // pairs of columns
constexpr unsigned kAll = 0xffffffffu;

// ---- pieces of a row ------------------------------------------------------------------------

struct Chunk {
  uint32_t pair[kChunk / 2];  // bf16 x 2
};
struct Codes {
  uint32_t four[kChunk / 4];
};

// Elements past `left` are zeros. kAligned: all or none.
template <bool kAligned>
__device__ Chunk load_chunk(const bf16* x, int64_t left) {
  Chunk c = {};
  if constexpr (kAligned) {
    if (left <= 0) return c;
    const uint4* from = reinterpret_cast<const uint4*>(x);
    const uint4 a = __ldg(from), b = __ldg(from + 1);
    c = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t v = i < left ? x[i].bits : 0u;
      c.pair[i / 2] |= v << (16 * (i % 2));
    }
  }
  return c;
}

template <bool kAligned>
__device__ void store_codes(uint8_t* out, const Codes& c, int64_t left) {
  if constexpr (kAligned) {
    if (left > 0) {
      *reinterpret_cast<uint4*>(out) = make_uint4(c.four[0], c.four[1], c.four[2], c.four[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < left) out[i] = static_cast<uint8_t>(c.four[i / 4] >> (8 * (i % 4)));
    }
  }
}

// max.bf16x2 passes NaN over: of a number and a NaN it gives the number, and `amax` is one.
__device__ uint32_t max_pair(uint32_t amax, uint32_t pair) {
  const uint32_t size = pair & 0x7fff7fffu;
  const __nv_bfloat162 m = __hmax2(reinterpret_cast<const __nv_bfloat162&>(amax),
                                   reinterpret_cast<const __nv_bfloat162&>(size));
  return reinterpret_cast<const uint32_t&>(m);
}
__device__ uint32_t max_of(const Chunk& c) {
  uint32_t amax = 0;
#pragma unroll
  for (const uint32_t pair : c.pair) amax = max_pair(amax, pair);
  return amax;
}
// Of `lanes` neighbouring threads.
template <int lanes>
__device__ uint32_t max_across(uint32_t amax) {
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) {
    amax = max_pair(amax, __shfl_xor_sync(kAll, amax, step));
  }
  return amax;
}
__device__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// The larger of the two.
__device__ e8m0 scale_of(uint32_t amax) { return numerics::mx_scale(fmaxf(low(amax), high(amax))); }

__device__ uint32_t codes_of(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}
__device__ Codes quantize(const Chunk& c, float inverse) {
  Codes out;
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) {
    const uint32_t p = c.pair[2 * i], q = c.pair[2 * i + 1];
    out.four[i] = codes_of(low(p) * inverse, high(p) * inverse) |
                  codes_of(low(q) * inverse, high(q) * inverse) << 16;
  }
  return out;
}

// ---- weights --------------------------------------------------------------------------------

struct QuantizeArgs {
  const bf16* x;
  int64_t expert_stride, row_stride, rows, columns;
  uint8_t *data, *scales, *data_t, *scales_t;
};

struct alignas(16) QuantizeShared {
  uint32_t word[kMxTile][kWords];  // rotated, see above
  uint8_t scales[kMxTileBytes], scales_t[kMxTileBytes];
  uint32_t amax[kThreads / 32];
};

__device__ int rotated(int row, int word) { return (word + 8 * (row / 32)) % kWords; }

// Place of the scale of row r, block b in a tile.
__device__ int in_tile(int r, int b) { return r % 32 * 16 + r / 32 * 4 + b; }

// The transposed form of a tile at `out`, column 0 of whose rows is row0 of x.
template <int kBlock, bool kAligned>
__device__ void store_transposed(QuantizeShared& s, const QuantizeArgs& a, uint8_t* out,
                                 int64_t columns_left, int64_t rows_left, e8m0 whole) {
  const int block = threadIdx.x % 4, word = threadIdx.x / 4;
  uint32_t pair[32];
  uint32_t amax = 0;
#pragma unroll
  for (int r = 0; r < 32; ++r) {
    const int row = block * 32 + r;
    pair[r] = s.word[row][rotated(row, word)];
    amax = max_pair(amax, pair[r]);
  }
  e8m0 scale[2] = {whole, whole};
  if constexpr (kBlock == kMxBlock) {
    scale[0] = scale_of(amax & 0xffffu);
    scale[1] = scale_of(amax & 0xffff0000u);
    s.scales_t[in_tile(2 * word, block)] = scale[0].bits;
    s.scales_t[in_tile(2 * word + 1, block)] = scale[1].bits;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = numerics::mx_inverse(scale[half]);
    uint32_t four[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[j] = (half == 0 ? low(pair[4 * i + j]) : high(pair[4 * i + j])) * inverse;
      }
      four[i] = codes_of(v[0], v[1]) | codes_of(v[2], v[3]) << 16;
    }
    const int column = 2 * word + half;
    uint8_t* to = out + column * a.rows;
    const bool inside = column < columns_left;
    if constexpr (kAligned) {
      // Neighbours swap halves, so that both write 16 bytes of the same 32.
      const bool odd = block % 2 == 1;
      Codes mine, theirs;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t got = __shfl_xor_sync(kAll, odd ? four[i] : four[4 + i], 1);
        mine.four[i] = odd ? got : four[i];        // of the even block
        theirs.four[i] = odd ? four[4 + i] : got;  // of the odd block
      }
      const int first = block / 2 * 64 + (odd ? 16 : 0);
      store_codes<true>(to + first, mine, inside ? rows_left - first : 0);
      store_codes<true>(to + first + 32, theirs, inside ? rows_left - first - 32 : 0);
    } else if (inside) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int row = block * 32 + i;
        if (row < rows_left) to[row] = static_cast<uint8_t>(four[i / 4] >> (8 * (i % 4)));
      }
    }
  }
}

template <int kBlock, bool kAligned>
__global__ void __launch_bounds__(kThreads) quantize_kernel(QuantizeArgs a) {
  __shared__ QuantizeShared s;
  const int64_t tiles_r = numerics::mx_tiles(a.rows), tiles_c = numerics::mx_tiles(a.columns);
  const int64_t tile = blockIdx.x, tile_c = tile % tiles_c, tile_r = tile / tiles_c % tiles_r;
  const int64_t e = tile / (tiles_c * tiles_r), size = a.rows * a.columns;
  const int64_t row0 = tile_r * kMxTile, column0 = tile_c * kMxTile;
  const int64_t rows_left = a.rows - row0, columns_left = a.columns - column0;
  const int lane = threadIdx.x % kLanes, first_row = threadIdx.x / kLanes;

  Chunk chunk[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int r = first_row + pass * kPassRows;
    const bf16* from =
        a.x + e * a.expert_stride + (row0 + r) * a.row_stride + column0 + lane * kChunk;
    chunk[pass] = load_chunk<kAligned>(from, r < rows_left ? columns_left - lane * kChunk : 0);
  }
  if (a.data_t) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = first_row + pass * kPassRows;
      const uint32_t* p = chunk[pass].pair;
      uint4* to = reinterpret_cast<uint4*>(&s.word[r][rotated(r, lane * kChunk / 2)]);
      to[0] = make_uint4(p[0], p[1], p[2], p[3]);
      to[1] = make_uint4(p[4], p[5], p[6], p[7]);
    }
  }
  e8m0 whole = {};
  if constexpr (kBlock != kMxBlock) {
    uint32_t amax = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) amax = max_pair(amax, max_of(chunk[pass]));
    amax = max_across<32>(amax);
    if (threadIdx.x % 32 == 0) s.amax[threadIdx.x / 32] = amax;
    __syncthreads();
    amax = max_across<kThreads / 32>(s.amax[threadIdx.x % (kThreads / 32)]);
    whole = scale_of(amax);
    if (threadIdx.x == 0 && a.scales)
      a.scales[(e * tiles_r + tile_r) * tiles_c + tile_c] = whole.bits;
    if (threadIdx.x == 0 && a.scales_t) {
      a.scales_t[(e * tiles_c + tile_c) * tiles_r + tile_r] = whole.bits;
    }
  }
  if (a.data) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = first_row + pass * kPassRows;
      e8m0 scale = whole;
      if constexpr (kBlock == kMxBlock) {
        scale = scale_of(max_across<kMxBlock / kChunk>(max_of(chunk[pass])));
        if (lane % 2 == 0) s.scales[in_tile(r, lane / 2)] = scale.bits;
      }
      const Codes codes = quantize(chunk[pass], numerics::mx_inverse(scale));
      uint8_t* to = a.data + e * size + (row0 + r) * a.columns + column0 + lane * kChunk;
      store_codes<kAligned>(to, codes, r < rows_left ? columns_left - lane * kChunk : 0);
    }
  }
  if (a.data_t) {
    __syncthreads();
    uint8_t* out = a.data_t + e * size + column0 * a.rows + row0;
    store_transposed<kBlock, kAligned>(s, a, out, columns_left, rows_left, whole);
  }
  if constexpr (kBlock == kMxBlock) {
    __syncthreads();
    const int i = threadIdx.x % 128;  // 4 bytes each
    const bool transposed = threadIdx.x / 128 == 1;
    uint8_t* to = transposed ? a.scales_t : a.scales;
    if (!to) return;
    const int64_t at = transposed ? (e * tiles_c + tile_c) * tiles_r + tile_r : tile;
    reinterpret_cast<uint32_t*>(to + at * kMxTileBytes)[i] =
        reinterpret_cast<const uint32_t*>(transposed ? s.scales_t : s.scales)[i];
  }
}

// ---- back -----------------------------------------------------------------------------------

struct DequantizeArgs {
  const uint8_t* data;
  const e8m0* scales;
  int64_t rows, columns;
  bf16* out;
};

// Two codes -> bf16 x 2. E4M3 numbers are half-precision numbers.
__device__ uint32_t pair_of(uint32_t two, numerics::MxFactors f) {
  const __half2_raw h =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  const float2 v = __half22float2(__half2(h));
  const __nv_bfloat162 b = __floats2bfloat162_rn(v.x * f.a * f.b, v.y * f.a * f.b);
  return reinterpret_cast<const uint32_t&>(b);
}

template <bool kAligned>
__device__ Codes load_codes(const uint8_t* from, int64_t left) {
  Codes c = {};
  if constexpr (kAligned) {
    if (left <= 0) return c;
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
    c = {{v.x, v.y, v.z, v.w}};
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      c.four[i / 4] |= (i < left ? uint32_t{from[i]} : 0u) << (8 * (i % 4));
    }
  }
  return c;
}

// `n` = 8 or 16 elements as pairs.
template <bool kAligned, int n>
__device__ void store_pairs(bf16* out, const uint32_t (&pair)[n / 2], int64_t left) {
  if constexpr (kAligned) {
    if (left <= 0) return;
#pragma unroll
    for (int i = 0; i < n / 8; ++i) {
      reinterpret_cast<uint4*>(out)[i] =
          make_uint4(pair[4 * i], pair[4 * i + 1], pair[4 * i + 2], pair[4 * i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i < left) out[i] = bf16{static_cast<uint16_t>(pair[i / 2] >> (16 * (i % 2)))};
    }
  }
}

// A tile; transposed: through shared memory, 4 codes a word, words of a row exchanged by row / 8
// so that the threads that gather 8 rows of a column read other banks.
template <int kBlock, bool kAligned, bool kTranspose>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(DequantizeArgs a) {
  __shared__ uint32_t shared[kTranspose ? kMxTile : 1][kMxTile / 4];
  const int64_t tiles_r = numerics::mx_tiles(a.rows), tiles_c = numerics::mx_tiles(a.columns);
  const int64_t tile = blockIdx.x, tile_c = tile % tiles_c, tile_r = tile / tiles_c % tiles_r;
  const int64_t e = tile / (tiles_c * tiles_r), size = a.rows * a.columns;
  const int64_t row0 = tile_r * kMxTile, column0 = tile_c * kMxTile;
  const int64_t rows_left = a.rows - row0, columns_left = a.columns - column0;
  const int lane = threadIdx.x % kLanes, first_row = threadIdx.x / kLanes;
  const BlockMatrix m{reinterpret_cast<const e4m3*>(a.data) + e * size,
                      a.scales + e * BlockMatrix::scale_bytes(a.rows, a.columns, kBlock), a.rows,
                      a.columns, kBlock};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int r = first_row + pass * kPassRows;
    const int64_t left = r < rows_left ? columns_left - lane * kChunk : 0;
    const int64_t at = (row0 + r) * a.columns + column0 + lane * kChunk;
    const Codes codes = load_codes<kAligned>(a.data + e * size + at, left);
    if constexpr (kTranspose) {
#pragma unroll
      for (int i = 0; i < 4; ++i) shared[r][(lane * 4 + i) ^ (r / 8)] = codes.four[i];
    } else {
      if (left <= 0) continue;
      const auto f = numerics::mx_factors(m.scale(row0 + r, column0 + lane * kChunk));
      uint32_t pair[kChunk / 2];
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i)
        pair[i] = pair_of(codes.four[i / 2] >> (16 * (i % 2)) & 0xffffu, f);
      store_pairs<kAligned, kChunk>(a.out + e * size + at, pair, left);
    }
  }
  if constexpr (kTranspose) {
    __syncthreads();
    const int rows8 = threadIdx.x % 16;  // 8 rows each
    for (int c = threadIdx.x / 16; c < kMxTile; c += kThreads / 16) {
      const int64_t left = c < columns_left ? rows_left - rows8 * 8 : 0;
      if (left <= 0) continue;
      uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t v[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int r = rows8 * 8 + 2 * i + j;
          const uint32_t code = shared[r][c / 4 ^ rows8] >> (8 * (c % 4)) & 0xffu;
          // A row past the last has no scale; its code is 0.
          const int64_t row = 2 * i + j < left ? row0 + r : row0;
          v[j] = pair_of(code, numerics::mx_factors(m.scale(row, column0 + c))) & 0xffffu;
        }
        pair[i] = v[0] | v[1] << 16;
      }
      bf16* to = a.out + e * size + (column0 + c) * a.rows + row0 + rows8 * 8;
      store_pairs<kAligned, 8>(to, pair, left);
    }
  }
}

// ---- rows on their way ----------------------------------------------------------------------

struct RowsArgs {
  const bf16* x;
  int64_t row_stride, rows, columns;
  uint8_t* out;
  int64_t row_bytes, scales_at;
};

// Eight threads take 128 columns of a row.
template <int kBlock, bool kAligned>
__global__ void __launch_bounds__(kThreads) rows_kernel(RowsArgs a) {
  const int64_t groups = numerics::mx_tiles(a.columns);  // of a row
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int64_t row = i / groups;
  const int64_t column = i % groups * kMxTile + threadIdx.x % kLanes * kChunk;
  const int64_t left = row < a.rows ? a.columns - column : 0;
  const Chunk chunk = load_chunk<kAligned>(a.x + row * a.row_stride + column, left);
  const e8m0 scale = scale_of(max_across<kBlock / kChunk>(max_of(chunk)));
  const Codes codes = quantize(chunk, numerics::mx_inverse(scale));
  uint8_t* out = a.out + row * a.row_bytes;
  store_codes<kAligned>(out + column, codes, left);
  if (left > 0 && column % kBlock == 0) out[a.scales_at + column / kBlock] = scale.bits;
}

// ---- launches -------------------------------------------------------------------------------

int checked_block(Precision precision) {
  if (!is_quantized(precision)) {
    throw Error(ErrorCode::bad_argument, "precision: neither mxfp8 nor fp8");
  }
  return block_size(precision);
}

bool all_multiples(std::initializer_list<int64_t> values, int64_t of) {
  return std::all_of(values.begin(), values.end(), [=](int64_t v) { return v % of == 0; });
}
bool all_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

// f(block, aligned) with both as constants.
template <class F>
void with_constants(int block, bool aligned, F&& f) {
  const auto with_block = [&](auto b) {
    aligned ? f(b, std::true_type{}) : f(b, std::false_type{});
  };
  block == kMxBlock ? with_block(std::integral_constant<int, kMxBlock>{})
                    : with_block(std::integral_constant<int, kMxTile>{});
  check(cudaGetLastError(), "launch of an FP8 conversion");
}

unsigned tiles_of(int64_t count, int64_t rows, int64_t columns) {
  return static_cast<unsigned>(count * numerics::mx_tiles(rows) * numerics::mx_tiles(columns));
}

}  // namespace

void quantize_weights(Precision precision, const ConstStack& w, int64_t count, int64_t rows,
                      int64_t columns, const QuantizedTarget& t, cudaStream_t stream) {
  const int block = checked_block(precision);
  const unsigned tiles = tiles_of(count, rows, columns);
  if (tiles == 0 || (!t.data && !t.data_t)) return;
  const QuantizeArgs args{static_cast<const bf16*>(w.data),
                          w.expert_stride,
                          w.row_stride,
                          rows,
                          columns,
                          static_cast<uint8_t*>(t.data),
                          t.data ? t.scales : nullptr,
                          static_cast<uint8_t*>(t.data_t),
                          t.data_t ? t.scales_t : nullptr};
  const bool aligned = all_multiples({rows, columns}, kChunk) &&
                       all_multiples({w.row_stride, w.expert_stride}, 8) &&
                       all_aligned({w.data, t.data, t.data_t});
  with_constants(block, aligned, [&](auto b, auto a) {
    quantize_kernel<b.value, a.value><<<tiles, kThreads, 0, stream>>>(args);
  });
}

void dequantize_weights(Precision precision, const void* data, const uint8_t* scales, int64_t count,
                        int64_t rows, int64_t columns, void* out, bool transpose,
                        cudaStream_t stream) {
  const int block = checked_block(precision);
  const unsigned tiles = tiles_of(count, rows, columns);
  if (tiles == 0) return;
  const DequantizeArgs args{static_cast<const uint8_t*>(data),
                            reinterpret_cast<const e8m0*>(scales), rows, columns,
                            static_cast<bf16*>(out)};
  const bool aligned = all_multiples({rows, columns}, kChunk) && all_aligned({data, out});
  with_constants(block, aligned, [&](auto b, auto a) {
    if (transpose) {
      dequantize_kernel<b.value, a.value, true><<<tiles, kThreads, 0, stream>>>(args);
    } else {
      dequantize_kernel<b.value, a.value, false><<<tiles, kThreads, 0, stream>>>(args);
    }
  });
}

void quantize_rows(Precision precision, const ConstMatrix& x, int64_t rows, int64_t columns,
                   void* out, int64_t row_bytes, int64_t scales_at, cudaStream_t stream) {
  const int block = checked_block(precision);
  const int64_t threads = rows * numerics::mx_tiles(columns) * kLanes;
  if (threads == 0) return;
  const RowsArgs args{static_cast<const bf16*>(x.data), x.row_stride, rows,     columns,
                      static_cast<uint8_t*>(out),       row_bytes,    scales_at};
  const bool aligned = all_multiples({columns, row_bytes}, kChunk) &&
                       all_multiples({x.row_stride}, 8) && all_aligned({x.data, out});
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  with_constants(block, aligned, [&](auto b, auto a) {
    rows_kernel<b.value, a.value><<<blocks, kThreads, 0, stream>>>(args);
  });
}

}  // namespace mok::cuda
