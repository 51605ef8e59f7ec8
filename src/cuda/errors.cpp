#include "cuda/errors.h"

#include <algorithm>
#include <cstddef>

namespace mok::cuda {

namespace {

// The counter, flag or step of the schedule that was waited for.
std::string awaited_entry(const ErrorRecord& e, const plan::Geometry& g) {
  if (e.kind == ErrorRecord::schedule) {
    constexpr const char* kSteps[] = {"published", "counted", "laid_out", "placed",
                                      "marked",    "listed",  "planned"};
    constexpr int kFirst = offsetof(Tickets, published) / sizeof(uint32_t);
    return kSteps[std::clamp(e.entry - kFirst, 0, 6)];
  }
  const bool flags = e.kind != ErrorRecord::progress;
  const int first = flags ? static_cast<int>(plan::Counter::first_flag) : 0;
  const int end = flags ? plan::kCounters : static_cast<int>(plan::Counter::first_flag);
  int c = first;
  while (c + 1 < end && plan::counter_offset(g, static_cast<plan::Counter>(c + 1)) <= e.entry) {
    ++c;
  }
  const std::string index =
      std::to_string(e.entry - plan::counter_offset(g, static_cast<plan::Counter>(c)));
  const std::string entry =
      std::string(plan::to_string(static_cast<plan::Counter>(c))) + "[" + index + "]";
  return flags ? "rank " + index + ", " + entry : entry;
}

}  // namespace

Error to_error(const ErrorRecord& e, const plan::Geometry& g) {
  const std::string who = "rank " + std::to_string(e.rank);
  switch (e.kind) {
    case ErrorRecord::bad_id:
      return {ErrorCode::bad_routing, "topk_ids: rank " + std::to_string(g.slot_rank(e.entry)) +
                                          ", token " + std::to_string(g.slot_token(e.entry)) +
                                          ", slot " + std::to_string(g.slot_k(e.entry)) + ": id " +
                                          std::to_string(e.seen) + " is outside [-1, " +
                                          std::to_string(g.experts) + ")"};
    case ErrorRecord::disagreement:
      return {ErrorCode::disagreement,
              who + " and rank " + std::to_string(e.entry) +
                  " made different calls (direction, shape, dtype or wanted gradients)"};
    case ErrorRecord::aborted:
      return {ErrorCode::aborted,
              who + " left the call because rank " + std::to_string(e.entry) + " gave it up"};
    default:
      break;
  }
  const std::string phase =
      e.task >= 0 ? plan::to_string(static_cast<plan::TaskKind>(e.task)) : "schedule";
  return {ErrorCode::deadline, who + " waited too long in " + phase + " for " +
                                   awaited_entry(e, g) + ": seen " + std::to_string(e.seen) +
                                   ", awaited " + std::to_string(e.awaited)};
}

}  // namespace mok::cuda
