// Ranks as processes of one machine: POSIX shared memory.
//
// Rank 0 makes the meeting page /mok-NAME; the others find it and take their place in it. As soon
// as all have, the name is removed, so that nothing outlives the processes. Symmetric blocks are
// one object per rank under names that a random number makes unique; their names, too, are gone as
// soon as every rank has them mapped.
//
// Whether a peer lives is asked of the kernel: each rank holds a record lock on its own byte of the
// meeting page for as long as its process lives, however it ends (a zombie holds none), and
// whatever process namespaces lie between.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>

#include "symmetric/exchange.h"

namespace mok {
namespace {

using symmetric::Backoff;
using symmetric::Offer;
using Clock = std::chrono::steady_clock;

struct Seat {
  std::atomic<int64_t> pid;    // 0 = free
  std::atomic<int64_t> round;  // exchanges begun
  std::atomic<int64_t> left;   // group destroyed, or given up
  Offer offer[2];              // by parity of the round: nobody is two ahead
};

struct Page {  // zeroed when made
  std::atomic<int64_t> ready;
  int64_t nonce;
  int32_t ranks;
  std::atomic<int64_t> attached;
  Seat seat[kMaxRanks];
};
constexpr int64_t kReady = 0x6d6f6b2d70616765;  // and the version of this layout

std::string system_text(const std::string& what, int error) {
  return what + ": " + std::strerror(error);
}

class ProcessGroup final : public symmetric::ExchangeGroup {
 public:
  ProcessGroup(const std::string& name, int rank, int ranks, GroupOptions options)
      : ExchangeGroup(rank, ranks, options), name_("/mok-" + name) {
    try {
      rank == 0 ? create_page() : find_page();
      take_seat();
      wait_for_all();
    } catch (...) {
      leave();
      throw;
    }
    unlink_page();
  }

  ~ProcessGroup() override { leave(); }

  void free_symmetric(const std::vector<std::byte*>& blocks) noexcept override {
    for (size_t i = 0; i < allocations_.size(); ++i) {
      if (allocations_[i].blocks != blocks) continue;
      unmap(allocations_[i]);
      allocations_.erase(allocations_.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }

  bool peer_is_gone(int rank) const override {
    if (rank == rank_ || page_ == nullptr) return false;
    const Seat& seat = page_->seat[rank];
    if (seat.left.load(std::memory_order_acquire)) return true;
    const int64_t pid = seat.pid.load(std::memory_order_acquire);
    return pid != 0 && pid != getpid() && !holds_lock(rank);
  }

 protected:
  std::byte* create_block(int64_t bytes) override {
    ++serial_;
    const std::string name = block_name(rank_);
    const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return nullptr;
    own_block_named_ = true;
    // Takes the pages now: a full /dev/shm is an error here and not a SIGBUS later.
    int error = posix_fallocate(fd, 0, bytes);
    void* address = MAP_FAILED;
    if (error == 0) {
      address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (address == MAP_FAILED) error = errno;
    }
    close(fd);
    if (error != 0) {
      unlink_block();
      errno = error;
      return nullptr;
    }
    return static_cast<std::byte*>(address);
  }

  bool attach_blocks(std::byte* own, const std::vector<Offer>& offers,
                     std::vector<std::byte*>& blocks) override {
    for (int r = 0; r < ranks_; ++r) {
      if (r == rank_) {
        blocks[r] = own;
        continue;
      }
      const int fd = shm_open(block_name(r).c_str(), O_RDWR | O_CLOEXEC, 0);
      if (fd < 0) return false;
      void* address = mmap(nullptr, offers[r].bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      const int error = errno;
      close(fd);
      if (address == MAP_FAILED) {
        errno = error;
        return false;
      }
      blocks[r] = static_cast<std::byte*>(address);
    }
    allocations_.push_back({blocks, offers[rank_].bytes});
    return true;
  }

  void all_attached() override { unlink_block(); }

  void discard(std::byte* own, std::vector<std::byte*>& blocks, int64_t bytes) noexcept override {
    // Those of ranks that have died meanwhile, too.
    for (int r = 0; r < ranks_; ++r) shm_unlink(block_name(r).c_str());
    own_block_named_ = false;
    if (!allocations_.empty() && own && allocations_.back().blocks[rank_] == own) {
      unmap(allocations_.back());
      allocations_.pop_back();
      return;
    }
    blocks[rank_] = own;
    unmap({blocks, bytes});
  }

  std::vector<Offer> exchange(const Offer& mine, const std::string& what) override {
    if (!broken_.empty()) throw Error(ErrorCode::aborted, broken_);
    Seat& seat = page_->seat[rank_];
    const int64_t round = seat.round.load(std::memory_order_relaxed) + 1;
    seat.offer[round % 2] = mine;
    seat.round.store(round, std::memory_order_release);
    std::vector<Offer> offers;
    for (int r = 0; r < ranks_; ++r) {
      const Seat& theirs = page_->seat[r];
      wait_for(r, "allocate '" + what + "'",
               [&] { return theirs.round.load(std::memory_order_acquire) >= round; });
      offers.push_back(theirs.offer[round % 2]);
    }
    return offers;
  }

 private:
  struct Allocation {
    std::vector<std::byte*> blocks;
    int64_t bytes;
  };

  static void unmap(const Allocation& a) noexcept {
    for (std::byte* address : a.blocks) {
      if (address) munmap(address, a.bytes);
    }
  }

  std::string block_name(int rank) const {
    char text[64];
    std::snprintf(text, sizeof text, "-%016llx-%lld-%d",
                  static_cast<unsigned long long>(page_->nonce), static_cast<long long>(serial_),
                  rank);
    return name_ + text;
  }

  void unlink_block() noexcept {
    if (own_block_named_) shm_unlink(block_name(rank_).c_str());
    own_block_named_ = false;
  }

  // Rank 0 takes the name away when all have come, and when it gives up.
  void unlink_page() noexcept {
    if (page_named_) shm_unlink(name_.c_str());
    page_named_ = false;
  }

  struct flock lock_of(int rank) const {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
  }
  bool holds_lock(int rank) const {  // some other process, that is
    struct flock lock = lock_of(rank);
    return fcntl(fd_, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  }
  bool take_lock() {
    struct flock lock = lock_of(rank_);
    return fcntl(fd_, F_SETLK, &lock) == 0;
  }

  void create_page() {
    for (int attempt = 0; attempt < 100 && fd_ < 0; ++attempt) {
      fd_ = shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
      if (fd_ >= 0) break;
      if (errno != EEXIST) {
        throw Error(ErrorCode::unsupported, system_text("cannot make " + name_, errno));
      }
      remove_stale_page();
    }
    if (fd_ < 0) {
      throw Error(ErrorCode::bad_argument, "name: " + name_ + " is in use by another group");
    }
    page_named_ = true;
    if (!take_lock()) throw Error(ErrorCode::unsupported, system_text("cannot lock", errno));
    const int error = posix_fallocate(fd_, 0, sizeof(Page));
    if (error != 0) {
      throw Error(ErrorCode::out_of_memory, system_text("rank 0 cannot take shared memory", error));
    }
    map_page();
    std::random_device random;
    page_->nonce = static_cast<int64_t>(uint64_t{random()} << 32 | random());
    page_->ranks = ranks_;
    page_->ready.store(kReady, std::memory_order_release);
  }

  // Left by a run that was killed before all had attached: its rank 0 lives no more.
  void remove_stale_page() {
    fd_ = shm_open(name_.c_str(), O_RDWR | O_CLOEXEC, 0);
    const bool stale = fd_ >= 0 && !holds_lock(0);
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
    if (stale) {
      shm_unlink(name_.c_str());
    } else {
      usleep(10000);
    }
  }

  void find_page() {
    const Clock::time_point start = Clock::now();
    Backoff backoff;
    while (!try_page()) {
      if (page_) munmap(page_, sizeof(Page));
      page_ = nullptr;
      if (fd_ >= 0) close(fd_);
      fd_ = -1;
      backoff.pause();
      if (backoff.slept() && late(start)) {
        throw Error(ErrorCode::deadline, "rank " + std::to_string(rank_) + " waited " +
                                             symmetric::describe_seconds(options_.arrival_seconds) +
                                             " for rank 0 to make the group " + name_);
      }
    }
    if (page_->ranks != ranks_) {
      throw Error(ErrorCode::disagreement, "ranks is " + std::to_string(page_->ranks) +
                                               " on rank 0 and " + std::to_string(ranks_) +
                                               " on rank " + std::to_string(rank_));
    }
  }

  // A page whose rank 0 lives and that is complete.
  bool try_page() {
    fd_ = shm_open(name_.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (fd_ < 0) return false;
    struct stat info;
    if (fstat(fd_, &info) != 0 || info.st_size < static_cast<off_t>(sizeof(Page))) return false;
    map_page();
    if (page_->ready.load(std::memory_order_acquire) != kReady) return false;
    return page_->seat[0].pid.load(std::memory_order_acquire) == getpid() || holds_lock(0);
  }

  void map_page() {
    void* address = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (address == MAP_FAILED) {
      throw Error(ErrorCode::out_of_memory, system_text("cannot map " + name_, errno));
    }
    page_ = static_cast<Page*>(address);
  }

  void take_seat() {
    if (rank_ != 0 && !take_lock()) {
      throw Error(ErrorCode::bad_argument,
                  "rank: another process is rank " + std::to_string(rank_) + " of " + name_);
    }
    int64_t free = 0;
    if (!page_->seat[rank_].pid.compare_exchange_strong(free, getpid())) {
      throw Error(ErrorCode::bad_argument, "rank: process " + std::to_string(free) + " is rank " +
                                               std::to_string(rank_) + " of " + name_);
    }
    seated_ = true;
    page_->attached.fetch_add(1);
  }

  void wait_for_all() {
    for (int r = 0; r < ranks_; ++r) {
      wait_for(r, "join the group " + name_,
               [&] { return page_->seat[r].pid.load(std::memory_order_acquire) != 0; });
    }
  }

  bool late(Clock::time_point start) const {
    return options_.arrival_seconds > 0 &&
           std::chrono::duration<double>(Clock::now() - start).count() > options_.arrival_seconds;
  }

  // After a failure no exchange can succeed any more, on any rank.
  template <class Ready>
  void wait_for(int rank, const std::string& what, Ready&& ready) {
    const Clock::time_point start = Clock::now();
    Backoff backoff;
    while (!ready()) {
      backoff.pause();
      if (!backoff.slept()) continue;
      const bool gone = peer_is_gone(rank);
      if (!gone && !late(start)) continue;
      if (ready()) return;
      broken_ = "rank " + std::to_string(rank_) + " waited for rank " + std::to_string(rank) +
                " to " + what + ": it " +
                (gone ? "is gone (its process has ended or has left the group)"
                      : "did not within " + symmetric::describe_seconds(options_.arrival_seconds));
      page_->seat[rank_].left.store(1, std::memory_order_release);
      throw Error(gone ? ErrorCode::aborted : ErrorCode::deadline, broken_);
    }
  }

  void leave() noexcept {
    if (page_ && seated_) page_->seat[rank_].left.store(1, std::memory_order_release);
    unlink_page();
    for (const Allocation& a : allocations_) unmap(a);
    allocations_.clear();
    if (page_) munmap(page_, sizeof(Page));
    page_ = nullptr;
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  const std::string name_;
  int fd_ = -1;
  Page* page_ = nullptr;
  bool page_named_ = false, seated_ = false, own_block_named_ = false;
  int64_t serial_ = 0;
  std::string broken_;
  std::vector<Allocation> allocations_;
};

}  // namespace

std::unique_ptr<Group> Group::processes(const std::string& name, int rank, int ranks,
                                        GroupOptions options) {
  if (ranks < 1 || ranks > kMaxRanks) {
    throw Error(ErrorCode::bad_argument,
                "ranks is " + std::to_string(ranks) + ", not in 1.." + std::to_string(kMaxRanks));
  }
  if (rank < 0 || rank >= ranks) {
    throw Error(ErrorCode::bad_argument,
                "rank is " + std::to_string(rank) + ", not in 0.." + std::to_string(ranks - 1));
  }
  const bool plain = name.find_first_not_of(
                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                         "0123456789-_") == std::string::npos;
  if (name.empty() || name.size() > 150 || !plain) {
    throw Error(ErrorCode::bad_argument,
                "name: '" + name + "' is not 1 to 150 letters, digits, '-' or '_'");
  }
  return std::make_unique<ProcessGroup>(name, rank, ranks, options);
}

}  // namespace mok
