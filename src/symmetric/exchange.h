// What threads and processes share: the collective part of symmetric allocation, written against
// three primitives that each transport supplies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "mok/layer.h"

namespace mok::symmetric {

// What a rank tells its peers in one exchange.
struct Offer {
  enum class Kind : int32_t { size, attach } kind = Kind::size;
  int32_t failed = 0;  // errno of what went wrong on this rank, or 0
  int64_t bytes = 0;
  uint64_t address = 0;  // threads: of the block
  char what[64] = {};
};

class ExchangeGroup : public Group {
 public:
  std::vector<std::byte*> allocate_symmetric(const std::string& what, int64_t bytes) final;

 protected:
  using Group::Group;

  // This rank's own block of zeroed memory; null with errno set on failure.
  virtual std::byte* create_block(int64_t bytes) = 0;
  // Every peer's block in this process's addresses (own = `own`); false with errno set on failure.
  virtual bool attach_blocks(std::byte* own, const std::vector<Offer>& offers,
                             std::vector<std::byte*>& blocks) = 0;
  // No rank will attach to the block any more.
  virtual void all_attached() = 0;
  // Gives back the blocks that this rank took; entries may be null.
  virtual void discard(std::byte* own, std::vector<std::byte*>& blocks, int64_t bytes) noexcept = 0;
  // Publishes `mine`, waits for every rank's. Throws deadline, aborted; afterwards the group is
  // broken on all ranks.
  virtual std::vector<Offer> exchange(const Offer& mine, const std::string& what) = 0;

 private:
  void check(const std::vector<Offer>& offers, const std::string& what, int64_t bytes) const;
};

// Waits without burning a core: spins, then yields, then sleeps longer and longer.
class Backoff {
 public:
  void pause();
  bool slept() const { return round_ > kYields; }  // worth looking at clocks and peers now

 private:
  static constexpr int kSpins = 64, kYields = 80;
  int round_ = 0;
};

std::string describe_seconds(double seconds);

}  // namespace mok::symmetric
