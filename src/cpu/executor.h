// Runs the tasks of one call on threads: compute workers and communication workers draw tickets,
// wait on the plan's counters, run the task and signal.
#pragma once

#include <memory>
#include <optional>

#include "cpu/call.h"
#include "cpu/control.h"

namespace mok::cpu {

struct ExecutorOptions {
  int compute_workers = 1;  // the calling thread is one of them
  int comm_workers = 1;
  uint64_t delay_seed = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;
  // Every rank has arrived. Returns when no worker is in the call any more: empty when the call is
  // complete, else why not; peers know of the failure by then.
  virtual std::optional<Failure> run(const Call& call) = 0;
};

// Throws out_of_memory when threads or their memory cannot be had.
std::unique_ptr<Executor> make_executor(Group& group, Control& control, Precision precision,
                                        const ExecutorOptions& options);

}  // namespace mok::cpu
