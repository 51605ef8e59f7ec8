// Proves, for given routings, what the executors rely on. Host only.
//
// `make_program` writes down every task of every rank over several successive calls: its place in
// its queue, its waits and signals, and every cell of memory it reads or writes. `validate` checks
//
//   counters  each wait is for the sum of all signals to that counter, so that it means "all of
//             them are done"; each flag is raised exactly once
//   order     one total order over all tasks extends every queue and every wait points backwards
//             in it: with any number >= 1 of workers per queue the calls finish, because the
//             earliest unfinished task can always run; also where a task that computes a tile waits
//             for what the minibatch's next tile waits for, which it may compute as well
//   memory    every two accesses to a cell, one of them a write, are ordered by waits (or by the
//             end of a rank's call); every read sees the write it is meant to see; so no ring row
//             and no cross-rank buffer is overwritten while it is needed, from call to call too
//   outputs   every output element is written exactly once
//
// The program is plain data: tests plant faults in it (or in the schedule) and see them caught.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/counters.h"
#include "plan/layout.h"
#include "plan/schedule.h"
#include "plan/tasks.h"

namespace mok::plan {

// A plan with its tables, on the host. Not copyable: `plan` points into it.
class HostPlan {
 public:
  HostPlan(const Geometry& g, const int32_t* const* ids);
  HostPlan(const HostPlan&) = delete;
  HostPlan& operator=(const HostPlan&) = delete;

  HostSchedule schedule;
  std::vector<Phase> compute, communication;
  Plan plan;
};

enum class Output : int32_t { y, d_topk_weights, weight_grad, shared_weight_grad, vector_grad };

struct Access {
  uint64_t cell;
  int64_t version;  // what a write leaves there, what a read expects
  bool write;
};

struct Node {
  enum class Kind { arrive, schedule, task, leave } kind = Kind::task;
  int call = 0, rank = 0;
  Queue queue = Queue::compute;
  int32_t ticket = 0;
  Task task = {};
  std::vector<Wait> waits = {};
  std::vector<Wait> signals = {};  // target unused; flags are raised on every rank
  std::vector<Access> accesses = {};
};

struct Program {
  int ranks = 1, calls = 1;
  std::vector<Node> nodes;
  std::vector<uint64_t> outputs;  // every output cell that must be written once
};

// calls[c][r] = rank r's plan of call c.
using Calls = std::vector<std::vector<std::unique_ptr<HostPlan>>>;

Program make_program(const Calls& calls);

// Empty when everything holds; else one line per violation (at most `limit`).
std::vector<std::string> validate(const Program& program, int limit = 20);

// The tables of one rank against its ids: every slot of a local expert has one row, in its expert,
// in ascending slot order from a tile boundary, known to the inverse table. Empty when so.
std::vector<std::string> validate_schedule(const HostPlan& plan, const int32_t* const* ids);

// The plans of one call: `base` gives everything but rank; ids as for build_schedule.
std::vector<std::unique_ptr<HostPlan>> make_plans(const Geometry& base, const int32_t* const* ids);

}  // namespace mok::plan
