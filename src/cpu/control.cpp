#include "cpu/control.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "symmetric/exchange.h"

namespace mok::cpu {

using Clock = std::chrono::steady_clock;

namespace {

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Error to_error(const Failure& failure, int rank) {
  const bool of_all = failure.code == ErrorCode::deadline || failure.code == ErrorCode::aborted ||
                      failure.code == ErrorCode::disagreement ||
                      failure.code == ErrorCode::bad_routing;
  if (of_all || failure.rank == rank) return {failure.code, failure.text};
  return {ErrorCode::aborted, rank_name(failure.rank) + " failed: " + failure.text};
}

Control::Control(Group& group, const plan::Layout& layout, const std::vector<std::byte*>& blocks)
    : group_(group) {
  for (int r = 0; r < group.ranks(); ++r) {
    const auto at = [&](plan::Buffer b) { return blocks[r] + layout.offset[static_cast<int>(b)]; };
    // The memory is zeroed and may be in use by a peer already: nothing is constructed in it.
    blocks_[r] = reinterpret_cast<Block*>(at(plan::Buffer::control));
    flags_[r] = reinterpret_cast<std::atomic<int64_t>*>(at(plan::Buffer::flags));
  }
}

std::atomic<int64_t>& Control::flag_at(int rank, plan::Counter flag, int source) const {
  const int kind = static_cast<int>(flag) - static_cast<int>(plan::Counter::first_flag);
  return flags_[rank][kind * group_.ranks() + source];
}

void Control::raise(plan::Counter flag, int64_t call) {
  for (int r = 0; r < group_.ranks(); ++r) {
    flag_at(r, flag, group_.rank()).store(call, std::memory_order_release);
  }
}

int64_t Control::flag(plan::Counter flag, int source) const {
  return flag_at(group_.rank(), flag, source).load(std::memory_order_acquire);
}

Tag& Control::own_tag() { return block(group_.rank()).tag; }
const Tag& Control::tag(int rank) const { return block(rank).tag; }

void Control::note_progress() {
  block(group_.rank()).progress.fetch_add(1, std::memory_order_relaxed);
}

int64_t Control::progress_of_all() const {
  int64_t sum = 0;
  for (int r = 0; r < group_.ranks(); ++r) {
    sum += block(r).progress.load(std::memory_order_relaxed);
  }
  return sum;
}

void Control::post_failure(int64_t call, const Failure& failure) {
  const int self = group_.rank();
  if (block(self).failed[self].load(std::memory_order_relaxed) >= call) return;  // posted already
  Record& record = block(self).record[call % kRecords];
  record.call.store(0, std::memory_order_release);
  record.code.store(static_cast<int32_t>(failure.code), std::memory_order_relaxed);
  record.rank.store(failure.rank, std::memory_order_relaxed);
  char text[kWords * 8] = {};
  std::memcpy(text, failure.text.data(), std::min(failure.text.size(), sizeof text - 1));
  for (int w = 0; w < kWords; ++w) {
    uint64_t word;
    std::memcpy(&word, text + 8 * w, 8);
    record.text[w].store(word, std::memory_order_release);  // not before call = 0
  }
  record.call.store(call, std::memory_order_release);
  for (int r = 0; r < group_.ranks(); ++r) {
    block(r).failed[self].store(call, std::memory_order_release);
  }
}

Failure Control::read_record(int rank, int64_t call) const {
  const Record& record = block(rank).record[call % kRecords];
  Failure failure;
  failure.code = ErrorCode::aborted;
  failure.rank = rank;
  failure.text = rank_name(rank) + " failed call " + std::to_string(call);
  if (record.call.load(std::memory_order_acquire) != call) return failure;
  char text[kWords * 8];
  for (int w = 0; w < kWords; ++w) {
    const uint64_t word = record.text[w].load(std::memory_order_acquire);
    std::memcpy(text + 8 * w, &word, 8);
  }
  const auto code = static_cast<ErrorCode>(record.code.load(std::memory_order_relaxed));
  const int finder = record.rank.load(std::memory_order_relaxed);
  if (record.call.load(std::memory_order_relaxed) != call) return failure;  // overwritten meanwhile
  text[sizeof text - 1] = 0;
  return {code, finder, text};
}

void Control::complete(int64_t call) {
  for (int r = 0; r < group_.ranks(); ++r) {
    block(r).completed[group_.rank()].store(call, std::memory_order_release);
  }
}

void Control::leave(int64_t call) {
  for (int r = 0; r < group_.ranks(); ++r) {
    block(r).left[group_.rank()].store(call, std::memory_order_release);
  }
}

void Control::say_goodbye() {
  for (int r = 0; r < group_.ranks(); ++r) {
    block(r).gone[group_.rank()].store(1, std::memory_order_release);
  }
}

std::optional<Failure> Control::find_failure(int64_t call, bool look_closely) const {
  const Block& own = block(group_.rank());
  for (int r = 0; r < group_.ranks(); ++r) {
    if (r == group_.rank()) continue;
    // `completed` is read last: a peer completes a call before it fails the next one or leaves.
    const bool failed = own.failed[r].load(std::memory_order_acquire) >= call;
    const bool left = own.gone[r].load(std::memory_order_acquire) != 0;
    const bool dead = !failed && !left && look_closely && group_.peer_is_gone(r);
    if (!failed && !left && !dead) continue;
    if (own.completed[r].load(std::memory_order_acquire) >= call) continue;
    if (own.failed[r].load(std::memory_order_acquire) >= call) return read_record(r, call);
    return Failure{ErrorCode::aborted, group_.rank(),
                   rank_name(r) +
                       (left ? " has left (its workspace was destroyed)"
                             : " is gone (its process has ended or its group was "
                               "destroyed)") +
                       " while " + rank_name(group_.rank()) + " was in call " +
                       std::to_string(call)};
  }
  return std::nullopt;
}

template <class Ready>
std::optional<Failure> Control::wait_for_peers(int64_t call, const std::string& what, double limit,
                                               bool by_progress, Ready&& ready) {
  Clock::time_point start = Clock::now();
  int64_t progress = -1;
  for (int r = 0; r < group_.ranks(); ++r) {
    symmetric::Backoff backoff;
    Clock::time_point looked = Clock::now();
    while (!ready(r)) {
      backoff.pause();
      if (!backoff.slept()) continue;
      const bool closely = seconds_since(looked) > 0.02;
      if (closely) looked = Clock::now();
      if (auto failure = find_failure(call, closely)) return failure;
      if (by_progress && progress_of_all() != progress) {
        progress = progress_of_all();
        start = Clock::now();
      }
      if (limit > 0 && seconds_since(start) > limit && !ready(r)) {
        return Failure{ErrorCode::deadline, group_.rank(),
                       rank_name(group_.rank()) + " waited " + symmetric::describe_seconds(limit) +
                           " for " + rank_name(r) + " to " + what};
      }
    }
  }
  return std::nullopt;
}

std::optional<Failure> Control::wait_for_arrival(int64_t call, const char* direction) {
  const std::string number = std::to_string(call);
  const std::string what = "arrive at call " + number + " (" + direction +
                           "): counter arrived, value seen below " + number + ", awaited " + number;
  auto failure = wait_for_peers(call, what, group_.options().arrival_seconds, false,
                                [&](int r) { return flag(plan::Counter::arrived, r) >= call; });
  // A rank that has gone past this call has failed it.
  return failure ? failure : find_failure(call, false);
}

std::optional<Failure> Control::wait_for_completion(int64_t call, const char* direction) {
  const auto& own = block(group_.rank());
  // Holds back a little: a peer that is stuck itself says more precisely where.
  auto failure = wait_for_peers(
      call, "complete call " + std::to_string(call) + " (" + direction + "), without progress",
      1.4 * group_.options().progress_seconds, true, [&](int r) {
        return r == group_.rank() || own.completed[r].load(std::memory_order_acquire) >= call;
      });
  // A peer may have lost patience right here, with its own tasks done.
  for (int r = 0; r < group_.ranks() && !failure; ++r) {
    const Record& record = block(r).record[call % kRecords];
    if (record.call.load(std::memory_order_acquire) == call) failure = read_record(r, call);
  }
  return failure;
}

std::optional<Failure> Control::wait_for_leaving(int64_t call) {
  const auto& own = block(group_.rank());
  return wait_for_peers(call + 1, "leave call " + std::to_string(call) + ", which failed",
                        group_.options().arrival_seconds, false,
                        [&](int r) { return own.left[r].load(std::memory_order_acquire) >= call; });
}

}  // namespace mok::cpu
