#include "plan/layout.h"
#include "plan/tasks.h"

namespace mok::plan {

namespace {

template <int N, class Enum>
const char* name_of(const char* const (&names)[N], Enum value) {
  const int i = static_cast<int>(value);
  return i >= 0 && i < N ? names[i] : "unknown";
}

constexpr const char* kTaskNames[] = {"stage",
                                      "announce_staged",
                                      "fetch",
                                      "sigma",
                                      "shared_gate_up",
                                      "shared_down",
                                      "gate_up",
                                      "down",
                                      "announce_returned",
                                      "reduce",
                                      "d_hidden",
                                      "router_grad",
                                      "d_input",
                                      "weight_grad",
                                      "shared_d_hidden",
                                      "shared_d_input",
                                      "shared_weight_grad",
                                      "vector_grad"};
static_assert(sizeof(kTaskNames) / sizeof(*kTaskNames) == kTaskKinds);

constexpr const char* kCounterNames[] = {
    "staged",        "fetched",      "hidden",          "pushed",        "window_done",
    "sigma",         "sigma_all",    "shared_hidden",   "shared_rows",   "d_hidden",
    "segment_ready", "segment_done", "shared_d_hidden", "shared_d_rows", "shared_ready",
    "arrived",       "staged_flag",  "returned_flag"};
static_assert(sizeof(kCounterNames) / sizeof(*kCounterNames) == kCounters);

constexpr const char* kBufferNames[] = {"control",
                                        "flags",
                                        "ids",
                                        "topk_weights",
                                        "staged_x",
                                        "staged_d_y",
                                        "returned_rows",
                                        "returned_grads",
                                        "counters",
                                        "ring_x",
                                        "ring_hidden",
                                        "ring_d_y",
                                        "ring_gate",
                                        "ring_up",
                                        "ring_d_gate",
                                        "ring_d_up",
                                        "ring_x_codes",
                                        "ring_d_y_codes",
                                        "ring_d_gate_codes",
                                        "ring_d_up_codes",
                                        "router_partials",
                                        "carry",
                                        "sigma",
                                        "d_sigma",
                                        "shared_hidden",
                                        "shared_rows",
                                        "shared_gate",
                                        "shared_up",
                                        "shared_d_gate",
                                        "shared_d_up"};
static_assert(sizeof(kBufferNames) / sizeof(*kBufferNames) == kBuffers);

}  // namespace

const char* to_string(TaskKind kind) { return name_of(kTaskNames, kind); }
const char* to_string(Counter counter) { return name_of(kCounterNames, counter); }
const char* to_string(Buffer buffer) { return name_of(kBufferNames, buffer); }

}  // namespace mok::plan
