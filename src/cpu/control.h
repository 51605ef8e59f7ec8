// How ranks meet, fail and leave together. Lives in Buffer::control and Buffer::flags of every
// rank's symmetric memory.
//
// Calls of a workspace are numbered from 1 on every rank, failed ones too. What a rank tells all
// others about call n:
//
//   arrived   its tag, ids and weights of call n are published
//   failed    it cannot finish call n; its record says why
//   completed it has finished call n
//   left      it has finished or failed call n, and none of its threads is in it any more
//
// A rank that has failed call n waits, at the start of call n + 1, until all ranks have left n:
// only then does it overwrite what they may be reading. This is the collective reset; together with
// the arrival of all at n + 1, before which nobody runs a task, it keeps a late rank's writes out
// of live buffers. After a completed call no such wait is needed: the plan's last flags say the
// same.
//
// A rank that has run all its tasks of call n stays until all ranks have completed n, so that a
// call fails on every rank or on none, and ranks never disagree about which call comes next.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "mok/layer.h"
#include "plan/layout.h"

namespace mok::cpu {

// Why a call ended early.
struct Failure {
  ErrorCode code = ErrorCode::internal;
  int rank = 0;      // who found it
  std::string text;  // as the finder reports it
};

// The error that `rank` throws. What concerns all ranks alike keeps its code everywhere; what was
// wrong on one rank alone is `aborted` on the others.
Error to_error(const Failure& failure, int rank);

// What all ranks must have in common in one call.
struct Tag {
  int64_t call = 0;
  int32_t direction = 0;
  int32_t wanted = 0;       // bits, see wanted_bits
  int32_t indifferent = 0;  // bits that this rank has no opinion on (no tokens)
  int32_t tokens = 0;
  int64_t bad_id = 0;  // the first id outside [-1, E), as given
};

class Control {
 public:
  // `blocks`: every rank's symmetric block, zeroed at first.
  Control(Group& group, const plan::Layout& layout, const std::vector<std::byte*>& blocks);

  // Flags of the plan: raised on every rank.
  void raise(plan::Counter flag, int64_t call);
  int64_t flag(plan::Counter flag, int source) const;

  Tag& own_tag();
  const Tag& tag(int rank) const;

  // A counter of this rank has changed.
  void note_progress();
  int64_t progress_of_all() const;

  void post_failure(int64_t call, const Failure& failure);
  void complete(int64_t call);
  void leave(int64_t call);
  void say_goodbye();  // this rank's workspace is being destroyed

  // What ends call `call` for this rank: a peer has failed it, or is gone before completing it.
  // `look_closely`: ask the system, too, whether peers live.
  std::optional<Failure> find_failure(int64_t call, bool look_closely) const;

  // Waits until every rank has arrived at / completed / left the call.
  std::optional<Failure> wait_for_arrival(int64_t call, const char* direction);
  std::optional<Failure> wait_for_completion(int64_t call, const char* direction);
  std::optional<Failure> wait_for_leaving(int64_t call);

 private:
  static constexpr int kRecords = 4, kWords = 96;
  struct Record {
    std::atomic<int64_t> call;
    std::atomic<int32_t> code, rank;
    std::atomic<uint64_t> text[kWords];
  };
  struct Block {
    // By source rank, written by that rank.
    std::atomic<int64_t> failed[kMaxRanks], completed[kMaxRanks], left[kMaxRanks], gone[kMaxRanks];
    // Written by the owner.
    alignas(64) std::atomic<int64_t> progress;
    alignas(64) Tag tag;
    Record record[kRecords];  // of failed calls, by call number
  };
  static_assert(sizeof(Block) <= plan::kControlBytes);
  static_assert(std::atomic<int64_t>::is_always_lock_free);

  Block& block(int rank) const { return *blocks_[rank]; }
  std::atomic<int64_t>& flag_at(int rank, plan::Counter flag, int source) const;
  Failure read_record(int rank, int64_t call) const;
  // `limit` seconds; counted from the last progress of any rank when `by_progress`.
  template <class Ready>
  std::optional<Failure> wait_for_peers(int64_t call, const std::string& what, double limit,
                                        bool by_progress, Ready&& ready);

  Group& group_;
  Block* blocks_[kMaxRanks] = {};
  std::atomic<int64_t>* flags_[kMaxRanks] = {};
};

}  // namespace mok::cpu
