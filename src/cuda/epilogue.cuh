// Epilogue of a tile, cut into slots that run between the wgmma groups of the next tile.
//
// At a tile's end the fp32 accumulators become 64 registers of bf16 pairs (one rounding). Then 16
// slots store them, a part of the columns of 8 rows of each warp at a time.
//
//   gate_up, down: 64 columns in slot 4q + part, q = 2 * column group + row half:
//     part 0      gate_up: gate (if kept)                 down: columns   0 .. 127
//     part 1      gate_up: up (if kept)                   down: columns 128 .. 255
//     part 2, 3   gate_up: hidden, computed in two halves down: nothing
//   d_input, weight_grad: 2 * 64 columns in slot 4q, q = 2 * row half + column group
//   d_hidden: 32 columns in slot 4q + part, part < 3, chunk 3q + part = 6 * row half + column
//   group; g and u of the next chunk are asked for a slot ahead, into registers that its 192 columns
//     leave free.
//
// The four lanes that share a row exchange words until each has 16 contiguous bytes. Shuffles, not
// staging: two warpgroups' operands and the tensor loads fill the bandwidth of shared memory.
// Hardly any wgmma is queued while a warpgroup is in a slot (their issue blocks), so slots are
// short and find their addresses ready. They use nothing outside their warp: warps need not agree
// on when they run.
#pragma once

#include "cuda/gradient_store.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/swiglu.cuh"
#include "cuda/tile_types.cuh"

namespace mok::cuda {

inline constexpr int kEpilogueSlots = 16;
inline constexpr int kPackedRegisters = kTileN / 4;
inline constexpr int kAhead = 2;  // chunks of d_hidden whose g and u are on their way

// pair(j, half): columns 8j + 2*(lane%4) + {0, 1} of row lane/4 + 8*half of the warp's 16 rows.
struct PackedTile {
  // d_hidden: what follows its 192 columns is g and u of kAhead chunks, in turns.
  static constexpr int kInputs = kTileInterGrad / 4;
  static_assert(kInputs + 8 * kAhead <= kPackedRegisters);

  uint32_t word[kPackedRegisters];

  __device__ __forceinline__ uint32_t pair(int j, int half) const { return word[2 * j + half]; }

  template <int kColumns>
  __device__ __forceinline__ void pack(const float (&acc)[kTileN / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      word[i] = ptx::pack_bf16(acc[2 * i], acc[2 * i + 1]);
    }
  }
  // A narrow gate-up tile has its 64 columns of up right behind those of gate.
  __device__ __forceinline__ void move_up() {
#pragma unroll
    for (int i = 0; i < kPackedRegisters / 4; ++i) {
      word[kPackedRegisters / 2 + i] = word[kPackedRegisters / 4 + i];
    }
  }
};

// One warp's pending tile: packed results and where they go.
template <class Products, bool kBackward>
class PendingTile {
 public:
  PackedTile packed;

  __device__ __forceinline__ explicit PendingTile(const Products& products) : products_(products) {}

  // Before the last wait for products: finds the addresses, and asks for what the first slots need:
  // row destinations, or router weights and the first g and u.
  __device__ __forceinline__ void prepare(const TileTask& task) {
    const Product& product = products_.product[task.product];
    const uint32_t thread = fresh_thread();
    const int row = (thread - kWarpgroup) / kWarp * 16 + thread % kWarp / 4;  // and 8 rows below
    const uint32_t column = (task.col0 + thread % 4 * 8) * 2;                 // in bytes
    flags_ = static_cast<uint32_t>(task.product) << kProductShift |
             static_cast<uint32_t>(task.kind) << kKindShift | thread % 4 * kLane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < task.rows) flags_ |= kRow << half;
      if (row + 8 * half < task.save_rows) flags_ |= kKeptRow << half;
    }
    if (kBackward && task.kind == TaskKind::d_hidden) {
      return prepare_d_hidden(task, product, row, column);
    }

    const bool gate_up = task.kind == TaskKind::gate_up;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const bool low = group * kGroupN < task.cols;
      const bool high = kHalfN + group * kGroupN < task.cols;
      const bool kept = low && task.save_rows > 0;
      if (gate_up ? kept : low) flags_ |= kPart0 << group;
      if (gate_up ? kept : high) flags_ |= kPart1 << group;
      if (gate_up && low && (!kBackward || product.gate_up.hidden != nullptr)) {
        flags_ |= kHidden << group;
      }
    }
    if (gate_up) {
      const uint32_t row_bytes = static_cast<uint32_t>(product.gate_up.row_elements) * 2;
      first_ = reinterpret_cast<uint64_t>(product.gate_up.hidden) + column +
               uint64_t{row_bytes} * (task.row0 + row);
      second_ = reinterpret_cast<uint64_t>(product.gate_up.gate) + column +
                uint64_t{row_bytes} * (task.save_row0 + row);
    } else if constexpr (kBackward) {
      weight_ = dot_ = 0;  // not carried through tiles that have no register for it
      if (task.kind == TaskKind::weight_grad && GradientStore(product, task).in_fp32()) {
        flags_ |= kInFp32;
      }
      first_ = row_destination(task, product, 0);
    } else {
      first_ = row_destination(task, product, 0);
      second_ = row_destination(task, product, 1);
    }
  }

  __device__ __forceinline__ bool pending() const { return flags_ != 0; }
  __device__ __forceinline__ void clear() { flags_ = 0; }
  // A weight gradient that leaves from the accumulators, not by slots.
  __device__ __forceinline__ bool in_fp32() const { return flags_ & kInFp32; }
  __device__ __forceinline__ TaskKind kind() const {
    return static_cast<TaskKind>(flags_ >> kKindShift & 0xff);
  }

  template <int kSlot>
  __device__ __forceinline__ void run_d_hidden_slot(const TileTask& task) {
    if constexpr (kSlot % 4 < 3) run_chunk<kSlot / 4 * 3 + kSlot % 4>(task);
  }

  // gate_up's; forward's down tiles share the slots.
  template <int kSlot>
  __device__ __forceinline__ void run_slot() {
    constexpr int kPart = kSlot % 4;
    constexpr int kQuarter = kSlot / 4;
    constexpr int kGroup = kQuarter / 2;
    constexpr int kRowHalf = kQuarter % 2;
    constexpr uint32_t kWanted = (kPart == 0 ? kPart0 : kPart == 1 ? kPart1 : kHidden) << kGroup;
    if ((flags_ & kWanted) == 0) return;

    constexpr int kFirst = kPart == 3 ? 4 : 0;  // matrices of 8 columns
    constexpr int kCount = kPart < 2 ? 8 : 4;
    uint64_t to;
    bool valid;
    if (kind() == TaskKind::gate_up) {
      to = (kPart < 2 ? second_ : first_) + kRowHalf * 16 * product().gate_up.row_elements;
      if constexpr (kPart == 1) to += up_minus_gate();
      valid = flags_ & (kPart < 2 ? kKeptRow : kRow) << kRowHalf;
    } else {
      to = kRowHalf == 0 ? first_ : second_;
      valid = to != 0;
      to += kPart * kHalfN * 2;
    }
    to += (kGroup * kGroupN + kFirst * 8) * 2;
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * kGroup + kFirst + j + i;
        m[i] = kPart < 2 ? packed.pair(16 * kPart + at, kRowHalf)
                         : swiglu_pair(packed.pair(at, kRowHalf), packed.pair(16 + at, kRowHalf),
                                       products_.swiglu_limit);
      }
      const uint4 v = transpose(m);
      if (valid) ptx::store_global_16(reinterpret_cast<void*>(to + j * 16), v);
    }
  }

  // Of rows that are only stored: both parts of a quarter at once, which takes hardly longer than
  // one of them. A weight gradient's tile may have fewer steps than there are slots.
  template <int kSlot>
  __device__ __forceinline__ void run_row_slot(const TileTask& task) {
    if constexpr (kSlot % 4 == 0) {
      constexpr int kRowHalf = kSlot / 8;
      constexpr int kGroup = kSlot / 4 % 2;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const bool wanted = first_ != 0 && (flags_ & (part == 0 ? kPart0 : kPart1) << kGroup) != 0;
        const uint64_t to = first_ + (part * kHalfN + kGroup * kGroupN) * 2;
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          uint32_t m[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) m[i] = packed.pair(16 * part + 8 * kGroup + j + i, kRowHalf);
          const uint4 v = transpose(m);
          if (wanted) ptx::store_global_16(reinterpret_cast<void*>(to + j * 16), v);
        }
      }
      if constexpr (kSlot == 4) first_ = row_destination(task, product(), 1);
    }
  }

 private:
  static constexpr uint32_t kPart0 = 1, kPart1 = 1 << 2, kHidden = 1 << 4;  // << column group
  static constexpr uint32_t kInFp32 = 1 << 6;
  static constexpr uint32_t kRow = 1 << 8, kKeptRow = 1 << 12;  // << row half
  static constexpr int kGroupsMask = 7;  // d_hidden, in place of the parts: groups of 32 columns
  static constexpr uint32_t kLane = 1 << 14;  // lane % 4, two bits
  static constexpr int kKindShift = 16, kProductShift = 24;
  static constexpr int kChunkColumns = 32, kGroups = kTileInterGrad / kChunkColumns;
  static constexpr int kChunks = 2 * kGroups;

  __device__ __forceinline__ const Product& product() const {
    return products_.product[fresh(flags_) >> kProductShift];
  }
  __device__ __forceinline__ uint64_t up_minus_gate() const {
    return reinterpret_cast<uint64_t>(product().gate_up.up) -
           reinterpret_cast<uint64_t>(product().gate_up.gate);
  }

  __device__ __forceinline__ void prepare_d_hidden(const TileTask& task, const Product& product,
                                                   int row, uint32_t column) {
    flags_ |= static_cast<uint32_t>(task.cols) / kChunkColumns;
    const uint32_t row_pieces = static_cast<uint32_t>(product.d_hidden.row_elements) / 8;
    const uint32_t row_in = (product.gate_in_ring ? task.row0 : task.save_row0) + row;
    first_ = uint64_t{row_pieces * (task.row0 + row) + column / 16} << 32 |
             (row_pieces * row_in + column / 16);
    ask_for<0>(task);
    begin_row(task, 0);
  }

  // Where the lane's first column of its row goes, for rows that are only stored; 0: nowhere.
  __device__ __forceinline__ uint64_t row_destination(const TileTask& task, const Product& product,
                                                      int half) const {
    if ((flags_ & kRow << half) == 0) return 0;
    const int row = row_of(half);
    const uint64_t column = (task.col0 + flags_ / kLane % 4 * 8) * 2;
    if (kBackward && task.kind == TaskKind::weight_grad) {
      const int64_t element = task.expert * product.weight_grad.expert_elements +
                              (task.row0 + row) * product.weight_grad.row_elements;
      return reinterpret_cast<uint64_t>(product.weight_grad.out) + element * 2 + column;
    }
    const uint64_t to = ptx::load_relaxed_gpu(product.row_destination + task.save_row0 + row);
    return to != 0 ? to + column : 0;
  }

  // Of a chunk, in bytes.
  template <int kChunk>
  __device__ __forceinline__ uint64_t place(uint32_t piece) const {
    constexpr uint32_t kGroup = kChunk % kGroups, kHalf = kChunk / kGroups;
    piece +=
        kHalf * static_cast<uint32_t>(product().d_hidden.row_elements) + kGroup * kChunkColumns / 8;
    return uint64_t{piece} * 16;
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

  // g and u of a chunk. Not through L1: they may have been written in this call.
  template <int kChunk>
  __device__ __forceinline__ void ask_for(const TileTask& task) {
    constexpr int kGroup = kChunk % kGroups, kHalf = kChunk / kGroups;
    uint32_t* next = packed.word + inputs_of(kChunk);
#pragma unroll
    for (int i = 0; i < 8; ++i) next[i] = 0;  // else what stood there would have to be kept
    if (kGroup >= static_cast<int>(flags_ & kGroupsMask) || (flags_ & kRow << kHalf) == 0) return;
    const uint64_t at = place<kChunk>(static_cast<uint32_t>(first_));
    ptx::load_global_16(next, reinterpret_cast<const uint8_t*>(product().d_hidden.gate) + at);
    ptx::load_global_16(next + 4, reinterpret_cast<const uint8_t*>(product().d_hidden.up) + at);
  }

  template <int kChunk>
  __device__ __forceinline__ void run_chunk(const TileTask& task) {
    constexpr int kGroup = kChunk % kGroups, kHalf = kChunk / kGroups;
    if (kGroup < static_cast<int>(flags_ & kGroupsMask)) {
      if (products_.swiglu_limit == INFINITY) {
        make_chunk<kGroup, kHalf, false>(task);
      } else {
        make_chunk<kGroup, kHalf, true>(task);
      }
    }
    if constexpr (kChunk + 1 == kGroups) begin_row(task, 1);
    // The first ones are asked for when there are registers free.
    if constexpr (kChunk < kAhead) ask_for<kChunk + 1>(task);
    if constexpr (kChunk + 1 >= kAhead && kChunk + kAhead < kChunks) ask_for<kChunk + kAhead>(task);
  }
  static constexpr int inputs_of(int chunk) { return PackedTile::kInputs + 8 * (chunk % kAhead); }

  template <int kGroup, int kHalf, bool kLimited>
  __device__ __forceinline__ void make_chunk(const TileTask& task) {
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = packed.pair(4 * kGroup + i, kHalf);
    const uint4 d_h = transpose(m);
    const uint32_t d[4] = {d_h.x, d_h.y, d_h.z, d_h.w};
    const bool valid = flags_ & kRow << kHalf;
    const uint32_t* inputs = packed.word + inputs_of(kHalf * kGroups + kGroup);
    uint32_t d_gate[4], d_up[4], hidden[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SwigluGrads out = swiglu_grad_pair<kLimited>(inputs[i], inputs[4 + i], d[i], weight_,
                                                         products_.swiglu_limit, &dot_);
      d_gate[i] = valid ? out.d_gate : 0;
      d_up[i] = valid ? out.d_up : 0;
      hidden[i] = valid ? out.weighted_hidden : 0;
    }
    if (flags_ & kKeptRow << kHalf) {
      const uint64_t at = place<kHalf * kGroups + kGroup>(static_cast<uint32_t>(first_ >> 32));
      const auto store = [&](__nv_bfloat16* base, const uint32_t (&v)[4]) {
        ptx::store_global_16(reinterpret_cast<uint8_t*>(base) + at, uint4{v[0], v[1], v[2], v[3]});
      };
      store(product().d_hidden.d_gate, d_gate);
      store(product().d_hidden.d_up, d_up);
      store(product().d_hidden.hidden, hidden);
    }
    // The last chunk of these rows: the quad's sums become the tile's part of the router gradient.
    if (kGroup + 1 == static_cast<int>(flags_ & kGroupsMask)) store_dot(task, kHalf);
  }

  // The lane's row of the tile.
  __device__ __forceinline__ int row_of(int half) const {
    const uint32_t thread = fresh_thread();
    return static_cast<int>((thread - kWarpgroup) / kWarp * 16 + thread % kWarp / 4) + 8 * half;
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

  // Lane t of a quad has 4 bytes of each of four 16-byte chunks; it gets the whole of chunk t.
  __device__ __forceinline__ uint4 transpose(const uint32_t (&m)[4]) const {
    const bool odd = flags_ & kLane, upper = flags_ & 2 * kLane;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? m[0] : m[1], 1);
    const uint32_t b = __shfl_xor_sync(~0u, odd ? m[2] : m[3], 1);
    const uint32_t a0 = odd ? a : m[0], a1 = odd ? m[1] : a;  // chunk 0 or 1, two lanes' words
    const uint32_t b0 = odd ? b : m[2], b1 = odd ? m[3] : b;  // chunk 2 or 3
    const uint32_t c0 = __shfl_xor_sync(~0u, upper ? a0 : b0, 2);
    const uint32_t c1 = __shfl_xor_sync(~0u, upper ? a1 : b1, 2);
    return upper ? uint4{c0, c1, b0, b1} : uint4{a0, a1, c0, c1};
  }

  const Products& products_;
  // gate_up: the lane's place in hidden and in gate. down: destinations of the lane's row and of
  // the row 8 below. d_input, weight_grad: of the row in hand. What else a slot needs comes from shared or constant
  // memory: with a few more registers in use here, the compiler waits for every single wgmma
  // (warning C7511).
  // d_hidden: the lane's place in gate and up (low word of first_) and in d_gate and the rest (high
  // word), in pieces of 16 bytes; in place of second_ what belongs to the row in hand.
  uint64_t first_;
  union {
    uint64_t second_;
    struct {
      float weight_, dot_;
    };
  };
  uint32_t flags_ = 0;  // 0: nothing is pending
};

}  // namespace mok::cuda
