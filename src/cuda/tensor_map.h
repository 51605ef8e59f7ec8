// Host: tensor maps of the tile core, without linking libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mok::cuda {

// nullptr if the driver lacks it.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &found);
    const bool good = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return good ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry) : nullptr;
  }();
  return encode;
}

// bf16, 128-byte swizzle, boxes of 64 columns (128 bytes) x box_rows; out of bounds reads as zero.
// rank 2: [rows, columns]; rank 3: [experts, rows, columns]. Strides in elements, multiples of 8.
// box_groups > 0, rank 3 only: seen as [experts, columns / 64, rows, 64], with boxes of so many
// groups of columns, one behind the other.
struct BoxedTensor {
  const void* data = nullptr;
  int rank = 2;
  int64_t columns = 0, rows = 0, experts = 1;
  int64_t row_stride = 0, expert_stride = 0;
  int box_rows = 64, box_groups = 0;

  bool operator==(const BoxedTensor&) const = default;
};

inline bool encode_tensor_map(CUtensorMap* map, const BoxedTensor& t) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const bool grouped = t.box_groups > 0;
  const cuuint64_t columns = t.columns, rows = t.rows, experts = t.experts;
  const cuuint64_t row_bytes = t.row_stride * 2, expert_bytes = t.expert_stride * 2;
  constexpr cuuint32_t kColumns = 64;
  const cuuint64_t size[] = {grouped ? kColumns : columns, rows,
                             grouped ? columns / kColumns : experts, experts};
  const cuuint64_t stride[] = {row_bytes, grouped ? kColumns * 2 : expert_bytes, expert_bytes};
  const cuuint32_t box[] = {kColumns, cuuint32_t(t.box_rows),
                            grouped ? cuuint32_t(t.box_groups) : 1, 1};
  const cuuint32_t element_stride[] = {1, 1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, grouped ? 4 : t.rank,
                const_cast<void*>(t.data), size, stride, box, element_stride,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The last map of each place in a kernel's parameters, with all that it was made from: the driver
// is asked again only for another tensor.
class TensorMapCache {
 public:
  bool encode(int place, const BoxedTensor& t, CUtensorMap* to) {
    if (static_cast<size_t>(place) >= entries_.size()) entries_.resize(place + 1);
    Entry& entry = entries_[place];
    if (!entry.filled || entry.tensor != t) {
      entry.filled = encode_tensor_map(&entry.map, t);
      entry.tensor = t;
    }
    if (entry.filled) *to = entry.map;
    return entry.filled;
  }

 private:
  struct Entry {
    CUtensorMap map{};
    BoxedTensor tensor;
    bool filled = false;
  };
  std::vector<Entry> entries_;
};

}  // namespace mok::cuda
