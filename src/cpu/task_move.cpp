// stage, fetch: rows of x and d_y from their owner to every rank that needs them. In the quantised
// precisions their owner quantises them, and they stand in the ring as bf16, which holds them
// exactly.
#include "cpu/call.h"

namespace mok::cpu {

using plan::Buffer;
using plan::Task;

namespace {

// Bytes of a row on its way: codes, then scales.
numerics::e4m3* codes_of(std::byte* row) { return reinterpret_cast<numerics::e4m3*>(row); }
numerics::e8m0* scales_of(std::byte* row, const plan::Geometry& g) {
  return reinterpret_cast<numerics::e8m0*>(row + g.wire_scales_at());
}

template <class T>
void stage_row(const View<T>& v, std::byte* to, const T* row) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (v.block() > 0) {
      return v.blocks.quantize_row(row, v.hidden(), v.block(), codes_of(to), scales_of(to, v.g()));
    }
  }
  std::memcpy(to, row, v.hidden() * sizeof(T));
}

// The row as products read it: `own` on its owner, else what its owner staged.
template <class T>
const T* arrived_row(const View<T>& v, const T* own, std::byte* staged, T* scratch) {
  if constexpr (std::is_same_v<T, bf16>) {
    const int block = v.block();
    if (block > 0 && own) v.blocks.round_row(own, v.hidden(), block, scratch);
    if (block > 0 && !own) {
      v.blocks.dequantize_row(codes_of(staged), scales_of(staged, v.g()), v.hidden(), block,
                              scratch);
    }
    if (block > 0) return scratch;
  }
  return own ? own : reinterpret_cast<const T*>(staged);
}

}  // namespace

template <class T>
void run_stage(const View<T>& v, const Task& t) {
  for (int64_t token = t.begin; token < t.end; ++token) {
    stage_row(v, v.staged(Buffer::staged_x, v.g().rank, token), v.x_row(token));
    if (v.call.forward()) continue;
    stage_row(v, v.staged(Buffer::staged_d_y, v.g().rank, token), v.d_y_row(token));
  }
}

template <class T>
void run_fetch(const View<T>& v, const Task& t) {
  const plan::Geometry& g = v.g();
  const int64_t h = v.hidden();
  const bool fetch_x = plan::needs_x(v.plan()), fetch_d_y = !v.call.forward();
  v.scratch.arrived.resize(2 * h);
  for (int32_t i = t.begin; i < t.end; ++i) {
    const int32_t fetched = v.schedule().fetch_row[i];
    const int32_t slot = v.schedule().row_slot[fetched];
    const int src = g.slot_rank(slot);
    const int64_t token = g.slot_token(slot);
    const bool own = src == g.rank;
    const auto arrived = [&](const T* row, Buffer staged, T* scratch) {
      return arrived_row(v, own ? row : nullptr, v.staged(staged, src, token), scratch);
    };
    const T *x = nullptr, *d_y = nullptr;
    if (fetch_x) x = arrived(v.x_row(token), Buffer::staged_x, v.scratch.arrived.data());
    if (fetch_d_y) d_y = arrived(v.d_y_row(token), Buffer::staged_d_y, &v.scratch.arrived[h]);
    plan::for_each_stored_row(g, v.schedule(), fetched, [&](int32_t row) {
      if (x) std::memcpy(v.ring(Buffer::ring_x, row, h), x, h * sizeof(T));
      if (d_y) std::memcpy(v.ring(Buffer::ring_d_y, row, h), d_y, h * sizeof(T));
    });
  }
}

#define MOK_INSTANTIATE(T)                                 \
  template void run_stage<T>(const View<T>&, const Task&); \
  template void run_fetch<T>(const View<T>&, const Task&);
MOK_FOR_EACH_STORAGE(MOK_INSTANTIATE)

}  // namespace mok::cpu
