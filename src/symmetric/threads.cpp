// Ranks as threads of one process: symmetric memory is ordinary memory.
#include <sys/mman.h>

#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>

#include "symmetric/exchange.h"

namespace mok {
namespace {

using symmetric::Offer;

struct Block {
  int64_t bytes = 0;
  int users = 0;
};

// Lives until the last rank's group is gone; memory that was never freed goes with it.
struct Shared {
  explicit Shared(int n) : ranks(n), round(n, 0), gone(n, 0), offers{} {
    for (auto& side : offers) side.resize(n);
  }
  ~Shared() {
    for (const auto& [address, block] : blocks) munmap(address, block.bytes);
  }

  const int ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int64_t> round;     // exchanges begun by each rank
  std::vector<char> gone;         // group destroyed
  std::string broken;             // why no exchange can succeed any more
  std::vector<Offer> offers[2];   // by parity of the round: nobody is two ahead
  std::map<void*, Block> blocks;  // by address: every rank's block
};

class ThreadGroup final : public symmetric::ExchangeGroup {
 public:
  ThreadGroup(std::shared_ptr<Shared> shared, int rank, GroupOptions options)
      : ExchangeGroup(rank, shared->ranks, options), shared_(std::move(shared)) {}

  ~ThreadGroup() override {
    const std::lock_guard lock(shared_->mutex);
    shared_->gone[rank_] = 1;
    shared_->changed.notify_all();
  }

  void free_symmetric(const std::vector<std::byte*>& blocks) noexcept override {
    const std::lock_guard lock(shared_->mutex);
    for (std::byte* address : blocks) drop(address);
  }

  bool peer_is_gone(int rank) const override {
    const std::lock_guard lock(shared_->mutex);
    return shared_->gone[rank] != 0;
  }

 protected:
  std::byte* create_block(int64_t bytes) override {
    void* address =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return nullptr;
    const std::lock_guard lock(shared_->mutex);
    shared_->blocks[address] = {bytes, 1};
    return static_cast<std::byte*>(address);
  }

  bool attach_blocks(std::byte* own, const std::vector<Offer>& offers,
                     std::vector<std::byte*>& blocks) override {
    const std::lock_guard lock(shared_->mutex);
    for (int r = 0; r < ranks_; ++r) {
      blocks[r] = reinterpret_cast<std::byte*>(offers[r].address);
      if (blocks[r] == own) continue;
      const auto found = shared_->blocks.find(blocks[r]);
      if (found == shared_->blocks.end()) {  // its owner gave up meanwhile
        blocks[r] = nullptr;
        errno = ECANCELED;
        return false;
      }
      ++found->second.users;
    }
    return true;
  }

  void all_attached() override {}

  void discard(std::byte* own, std::vector<std::byte*>& blocks, int64_t) noexcept override {
    const std::lock_guard lock(shared_->mutex);
    for (std::byte* address : blocks) {
      if (address != own) drop(address);
    }
    drop(own);
  }

  std::vector<Offer> exchange(const Offer& mine, const std::string& what) override {
    Shared& s = *shared_;
    std::unique_lock lock(s.mutex);
    if (!s.broken.empty()) throw Error(ErrorCode::aborted, s.broken);
    const int64_t round = ++s.round[rank_];
    s.offers[round % 2][rank_] = mine;
    s.changed.notify_all();
    const auto missing = [&] {
      for (int r = 0; r < ranks_; ++r) {
        if (s.round[r] < round) return r;
      }
      return -1;
    };
    const auto ready = [&] {
      const int r = missing();
      return r < 0 || s.gone[r] || !s.broken.empty();
    };
    if (options_.arrival_seconds > 0) {
      s.changed.wait_for(lock, std::chrono::duration<double>(options_.arrival_seconds), ready);
    } else {
      s.changed.wait(lock, ready);
    }
    const int late = missing();
    if (late < 0) return s.offers[round % 2];
    const bool was_broken = !s.broken.empty();
    if (!was_broken) {
      s.broken = "rank " + std::to_string(rank_) + " waited for rank " + std::to_string(late) +
                 " to allocate '" + what + "': it " +
                 (s.gone[late]
                      ? "has left the group"
                      : "did not within " + symmetric::describe_seconds(options_.arrival_seconds));
      s.changed.notify_all();
    }
    throw Error(was_broken || s.gone[late] ? ErrorCode::aborted : ErrorCode::deadline, s.broken);
  }

 private:
  void drop(std::byte* address) noexcept {
    const auto found = shared_->blocks.find(address);
    if (found == shared_->blocks.end() || --found->second.users > 0) return;
    munmap(address, found->second.bytes);
    shared_->blocks.erase(found);
  }

  std::shared_ptr<Shared> shared_;
};

}  // namespace

std::vector<std::unique_ptr<Group>> Group::threads(int ranks, GroupOptions options) {
  if (ranks < 1 || ranks > kMaxRanks) {
    throw Error(ErrorCode::bad_argument,
                "ranks is " + std::to_string(ranks) + ", not in 1.." + std::to_string(kMaxRanks));
  }
  auto shared = std::make_shared<Shared>(ranks);
  std::vector<std::unique_ptr<Group>> groups;
  for (int r = 0; r < ranks; ++r) {
    groups.push_back(std::make_unique<ThreadGroup>(shared, r, options));
  }
  return groups;
}

}  // namespace mok
