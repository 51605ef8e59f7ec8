// Where the ranks of a group meet on the host, in memory that all of them see.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "mok/layer.h"

namespace mok::torch_ops {

class Meeting {
 public:
  // Collective.
  explicit Meeting(Group& group)
      : group_(group), blocks_(group.allocate_symmetric("a place to meet", sizeof(Word))) {}
  ~Meeting() { group_.free_symmetric(blocks_); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Returns when all ranks have come to this meeting or a later one; `number` grows from 1. Throws
  // deadline and aborted (a peer is gone); this rank may come again, and counts as having come.
  void attend(int64_t number, const std::string& what) {
    word(group_.rank()).store(number, std::memory_order_release);
    const auto begin = std::chrono::steady_clock::now();
    const double most = group_.options().arrival_seconds;
    for (int r = 0; r < group_.ranks(); ++r) {
      while (word(r).load(std::memory_order_acquire) < number) {
        const std::string who = "rank " + std::to_string(group_.rank()) + " waited for rank " +
                                std::to_string(r) + " to " + what + ": it ";
        if (group_.peer_is_gone(r)) throw Error(ErrorCode::aborted, who + "is gone");
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
        if (most > 0 && waited.count() > most) {
          throw Error(ErrorCode::deadline, who + "has not come; the next call waits again");
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  }

 private:
  using Word = std::atomic<int64_t>;
  Word& word(int rank) { return *reinterpret_cast<Word*>(blocks_[rank]); }

  Group& group_;
  const std::vector<std::byte*> blocks_;
};

}  // namespace mok::torch_ops
