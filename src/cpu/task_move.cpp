// stage, fetch: rows of x and d_y from their owner to every rank that needs them.
#include "cpu/call.h"

namespace mok::cpu {

using plan::Buffer;
using plan::Task;

template <class T>
void run_stage(const View<T>& v, const Task& t) {
  const int64_t h = v.hidden();
  for (int64_t token = t.begin; token < t.end; ++token) {
    std::memcpy(v.rows(Buffer::staged_x) + token * h, v.x_row(token), h * sizeof(T));
    if (v.call.forward()) continue;
    std::memcpy(v.rows(Buffer::staged_d_y) + token * h, v.d_y_row(token), h * sizeof(T));
  }
}

template <class T>
void run_fetch(const View<T>& v, const Task& t) {
  const plan::Geometry& g = v.g();
  const int64_t h = v.hidden();
  const bool fetch_x = plan::needs_x(v.plan());
  for (int32_t i = t.begin; i < t.end; ++i) {
    const int32_t fetched = v.schedule().fetch_row[i];
    const int32_t slot = v.schedule().row_slot[fetched];
    const int src = g.slot_rank(slot);
    const int64_t token = g.slot_token(slot);
    const bool own = src == g.rank;
    const T* x = own ? v.x_row(token) : v.rows(Buffer::staged_x, src) + token * h;
    const T* d_y = nullptr;
    if (!v.call.forward()) {
      d_y = own ? v.d_y_row(token) : v.rows(Buffer::staged_d_y, src) + token * h;
    }
    plan::for_each_stored_row(g, v.schedule(), fetched, [&](int32_t row) {
      if (fetch_x) std::memcpy(v.ring(Buffer::ring_x, row, h), x, h * sizeof(T));
      if (d_y) std::memcpy(v.ring(Buffer::ring_d_y, row, h), d_y, h * sizeof(T));
    });
  }
}

#define MOK_INSTANTIATE(T)                                 \
  template void run_stage<T>(const View<T>&, const Task&); \
  template void run_fetch<T>(const View<T>&, const Task&);
MOK_FOR_EACH_STORAGE(MOK_INSTANTIATE)

}  // namespace mok::cpu
