// What a tile task is, where its operands and results lie, and the shared memory of the tile core.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/pipeline.cuh"
#include "cuda/ptx/barrier.cuh"
#include "mok/layer.h"

namespace mok::cuda {

// Tile: kTileM rows x kTileN columns of wgmma, K in steps of kTileK.
inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;
inline constexpr int kHalfM = 64;           // rows of one consumer warpgroup
inline constexpr int kHalfN = 128;          // gate columns (and up columns) of a gate-up tile
inline constexpr int kTileInterGrad = 192;  // columns of a d_hidden tile
inline constexpr int kTailRows = 16;        // of a tall tile, beyond kTileM
inline constexpr int kPieceTokens = 16, kPieceColumns = 16;  // a warp stores of one at a time
inline constexpr int kGroupN = 64;  // sizes are multiples of it; a load of B, an epilogue slot
inline constexpr int kStages = 4;
inline constexpr int kTaskSlots = 4;  // drawn, loading, multiplying, storing

inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumerGroups = 2;
inline constexpr int kConsumerWarps = kConsumerGroups * kWarpgroup / kWarp;
inline constexpr int kThreads = (1 + kConsumerGroups) * kWarpgroup;
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;

// The thread's number, read anew: what is computed from it is not kept over a loop, where it would
// cost the consumers registers.
__device__ __forceinline__ uint32_t fresh_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The same for a value in a register.
__device__ __forceinline__ uint32_t fresh(uint32_t value) {
  uint32_t copy;
  asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(value));
  return copy;
}

// Warps of warpgroup 0; warpgroups 1 and 2 consume.
enum class ProducerWarp : int { load, schedule, publish, communicate };

// What a tile of 128 rows computes; operands and results are in its Product.
//   gate_up      128 + 128 columns: gate, up and h = silu(x w_gate^T) * (x w_up^T)
//   down         256 columns of h w_down^T, each row stored at its own destination
//   d_hidden     192 columns of d_h = d_y w_down, from which d_gate, d_up and w * h are made
//   d_input      256 columns of d_gate w_gate + d_up w_up, one chain; rows stored as for down
//   weight_grad  256 columns of rows^T rows, the contraction running over rows
//   ..._tall     the same of up to kTailRows more rows, those of the next tile
//   ..._fp8      the same of E4M3 codes, moved as pairs in the place of a bf16. Results of gate_up
//                and d_hidden leave as codes (d_gate and d_up as bf16 too); d_hidden: 256 columns
enum class TaskKind : int16_t {
  stop,
  gate_up,
  down,
  d_hidden,
  d_input,
  weight_grad,
  reduce,  // no tile: rows row0 .. of own tokens
  gate_up_fp8,
  down_fp8,
  d_hidden_fp8,
  d_input_fp8,
  gate_up_tall,
  down_tall,
  d_hidden_tall,
  d_input_tall
};
constexpr bool is_tall(TaskKind kind) { return kind >= TaskKind::gate_up_tall; }
constexpr bool is_fp8(TaskKind kind) { return kind >= TaskKind::gate_up_fp8 && !is_tall(kind); }
constexpr bool is_gate_up(TaskKind kind) {
  return kind == TaskKind::gate_up || kind == TaskKind::gate_up_fp8 ||
         kind == TaskKind::gate_up_tall;
}

// Whether the rows (a box row each) of an operand run along the contraction.
constexpr bool a_is_transposed(TaskKind kind) { return kind == TaskKind::weight_grad; }
constexpr bool b_is_transposed(TaskKind kind) {
  return (kind >= TaskKind::d_hidden && kind <= TaskKind::weight_grad) ||
         kind >= TaskKind::d_hidden_tall;
}
// Columns that a whole tile multiplies at once.
constexpr int product_columns(TaskKind kind) {
  return kind == TaskKind::d_hidden ? kTileInterGrad : kTileN;
}
// Columns of the result that a whole tile covers: those of gate and up are the same.
constexpr int result_columns(TaskKind kind) {
  return kind == TaskKind::gate_up ? kHalfN : product_columns(kind);
}

// Drawn and decoded once by the scheduler; nobody else divides.
struct alignas(16) TileTask {
  TaskKind kind;
  int16_t product;    // index into Products
  int32_t steps;      // of the contraction, kTileK (pairs of codes) each; 0: an expert without rows
  int32_t rows;       // valid rows of the result, 1 .. kTileM, or up to kTailRows more
  int32_t cols;       // valid columns, a multiple of kGroupN
  int32_t row0;       // first row in A and in hidden, d_gate, d_up; of a gradient: in the matrix
  int32_t col0;       // first column of the result; row of the weight matrix
  int32_t save_row0;  // first row in gate and up, in the destination table or in row_weight; of a
                      // weight gradient: first row of the contraction
  int32_t save_rows;  // gate_up: rows of the tile whose gate and up are kept; d_hidden: rows to
                      // write, those beyond `rows` as zeros; weight_grad: GradFlags
  int32_t expert;     // third coordinate of the weight maps and gradients
  int32_t wait_counter;  // from here on for the hooks alone
  int32_t wait_target;
  int32_t tail_target;  // of the counter behind wait_counter; 0: not waited for
  int32_t done_counter;

  // Of a weight gradient: sums that come from or go to another window of the ring; a call with an
  // id outside [-1, E), whose results are NaN.
  enum GradFlags : int32_t { kCarryIn = 1, kCarryOut = 2, kBadCall = 4 };

  // What a consumer must know before it starts, in one word.
  struct Shape {
    uint32_t word;
    __device__ __forceinline__ int steps() const { return static_cast<int>(word & 0xfffff); }
    __device__ __forceinline__ bool low_half_only() const { return word >> 20 & 1; }  // of rows
    __device__ __forceinline__ bool narrow() const { return word >> 21 & 1; }  // 128 columns do
    __device__ __forceinline__ bool carried_in() const { return word >> 22 & 1; }
    __device__ __forceinline__ bool spreads() const { return word >> 23 & 1; }
    __device__ __forceinline__ TaskKind kind() const { return static_cast<TaskKind>(word >> 24); }
  };
  __device__ __forceinline__ Shape shape_of() const {
    if (kind == TaskKind::stop) return {0};  // the rest is not filled in
    const bool pair = kind == TaskKind::gate_up || kind == TaskKind::gate_up_tall;
    const bool narrow = kind != TaskKind::gate_up_fp8 && kind != TaskKind::d_hidden_tall &&
                        cols * (pair ? 2 : 1) <= kTileN / 2;
    const bool low_half = rows <= kHalfM;
    const bool carried_in = kind == TaskKind::weight_grad && (save_rows & kCarryIn) != 0;
    const bool spreads = !narrow && !carried_in && steps > 0 && kind < TaskKind::gate_up_fp8;
    return {static_cast<uint32_t>(steps) | uint32_t{low_half} << 20 | uint32_t{narrow} << 21 |
            uint32_t{carried_in} << 22 | uint32_t{spreads} << 23 |
            static_cast<uint32_t>(kind) << 24};
  }
};
static_assert(sizeof(TileTask) == 64);

// A product's operands and results. Results are row-major bf16 with `row_elements` a row unless
// said otherwise.
struct Product {
  int8_t a[2], b[2];  // maps; the second ones are those of up: of b in gate_up, of both in d_input
  int8_t wide_a, tall_a, wide_b[2];  // the same among the wide maps, tall_a for tall tiles; kNoMap
  int8_t a_slice;     // weight_grad: third coordinate in a's map (of d_input: 0 of gate, 1 of up)
  bool gate_in_ring;  // d_hidden: gate and up stand where d_gate does, at row0
  bool mx;            // hidden, d_gate and d_up are rounded to their MX blocks
  GradMode mode;      // weight_grad
  static constexpr int32_t kNoMap = -1;
  union {
    struct {
      __nv_bfloat16 *hidden, *gate, *up;  // hidden: null = not wanted; gate, up: for kept rows
      int64_t row_elements;
    } gate_up;
    // down, d_input: address of each row's result, local or in a peer; 0 = do not store.
    const uint64_t* row_destination;
    struct {
      const __nv_bfloat16 *gate, *up;         // rows from save_row0 on
      __nv_bfloat16 *d_gate, *d_up, *hidden;  // rows from row0 on; hidden: w * h
      const float* row_weight;                // w, rows from save_row0 on; null: 1
      float* partials;  // [rows from row0 on, columns of tiles] sums of d_h * h; null: none
      int32_t row_elements, partial_columns;
    } d_hidden;
    struct {
      void* out;  // [experts, rows, columns] in the type that `mode` asks for
      int64_t row_elements, expert_elements;
      float* carry;  // [rows, columns] sums of the windows before
      int32_t carry_elements;
      int32_t map;  // of `out` among the gradient maps, if it is bf16; kNoMap: there is none
    } weight_grad;
  };
};

// Maps of weight gradients, with boxes of 64 columns x 16 rows, a warp's rows of a tile. The kernel
// of ranks that share a GPU has none: eight ranks' maps are more than a kernel's parameters may be.
template <int kCount>
struct GradientMaps {
  static constexpr bool kThere = true;
  CUtensorMap gradient_map[kCount];
};
template <>
struct GradientMaps<0> {
  static constexpr bool kThere = false;
};
inline constexpr int kGradientBoxRows = 16;

// Maps of routed products with boxes of a whole operand, so that the loading thread has two or
// three loads a step to issue instead of six. The kernel of ranks that share a GPU has none: its
// parameters would be too many.
template <int kCount>
struct WideMaps {
  static constexpr bool kWide = true;
  CUtensorMap wide_map[kCount];
};
template <>
struct WideMaps<0> {
  static constexpr bool kWide = false;
};

// Scales and codes of an fp8 product, E8M0 and E4M3. Rows of codes have their scales behind them:
// one for each 128 codes, padded to 16 bytes.
struct Fp8Operands {
  const uint8_t* a[2];  // scales of row 0; the second one is d_up's
  const uint8_t*
      b[2];           // of blocks of 128 x 128: [experts, column_blocks, k_blocks]; of gate and up
  uint8_t* codes[2];  // rows of results: h; d_gate, d_up
  int32_t a_row_bytes, codes_row_bytes;
  int32_t codes_scales_at;  // in a row
  int32_t k_blocks, column_blocks;
};
enum Fp8Product : int8_t { kFp8GateUp, kFp8Down, kFp8DHidden = kFp8Down, kFp8DInput };

template <int kCount>
struct Fp8Products {
  static constexpr bool kFp8 = true;
  Fp8Operands fp8[kCount];
};
template <>
struct Fp8Products<0> {
  static constexpr bool kFp8 = false;
};

// Kernel parameter (__grid_constant__): the copy engine reads the maps from it. All maps: bf16,
// 128-byte swizzle, {columns, rows, experts}; those of operands with boxes of 64 x 64 x 1.
template <int kMaps, int kProducts, int kGradientMaps = 0, int kFp8Count = 0, int kWideMaps = 0>
struct Products : GradientMaps<kGradientMaps>, Fp8Products<kFp8Count>, WideMaps<kWideMaps> {
  static constexpr bool kTall = WideMaps<kWideMaps>::kWide && !Fp8Products<kFp8Count>::kFp8;
  CUtensorMap map[kMaps];
  Product product[kProducts];
  float swiglu_limit;  // +infinity: none
};

// Dynamic shared memory; 1024-byte aligned because the kernel has no static shared memory.
struct TileShared {
  alignas(1024) uint8_t a[kStages][(kTileM + kTailRows) * kTileK * 2];
  alignas(1024) uint8_t b[kStages][kTileN * kTileK * 2];
  alignas(16) uint8_t piece[kConsumerWarps][kPieceTokens * kPieceColumns * 2];  // of tall tiles
  TileTask task[kTaskSlots];
  TileTask::Shape shape[kTaskSlots];
  ptx::Mbarrier full[kStages], empty[kStages];
  ptx::Mbarrier task_full[kTaskSlots], task_loading[kTaskSlots];
  ptx::Mbarrier task_done[kTaskSlots], task_empty[kTaskSlots];
  ptx::Mbarrier draw;
  AbortFlag abort;

  // One thread; a block barrier must follow.
  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kConsumerWarps);
    }
    // Whoever writes or reads a task arrives for itself, so that the tools can follow who waits for
    // whom; one lane for its warp was no faster.
    for (int i = 0; i < kTaskSlots; ++i) {
      task_full[i].init(kWarp);
      task_loading[i].init(1);
      task_done[i].init(kConsumerWarps * kWarp);
      task_empty[i].init(2);  // load, publish
    }
    draw.init(1);
    abort.raised = 0;
    ptx::fence_mbarrier_init();
  }
};

}  // namespace mok::cuda
