// Faults that tests plant: nothing else sets them.
#pragma once

#include <atomic>
#include <string>

#include "plan/tasks.h"

namespace mok::cpu {

struct Fault {
  enum class What {
    skip_signal,  // the task is done but nobody hears of it
    sleep,        // the task takes `seconds` longer
    fail,         // the task throws
  };
  int rank = 0;
  plan::TaskKind kind = plan::TaskKind::count;
  What what = What::skip_signal;
  double seconds = 0;
};

// Null, or a fault that must outlive its being planted.
inline std::atomic<const Fault*> planted_fault{nullptr};

}  // namespace mok::cpu
