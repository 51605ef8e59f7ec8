// A 64-bit fingerprint of a global tensor: XXH3 over its bytes, fed in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace mok::problem {

// Feed the ranks' parts in rank order: tokens and experts then stand in global order, and the
// result does not depend on where the parts were cut. Bits count: -0 and +0 differ, as do NaNs.
class Digest {
 public:
  Digest();
  ~Digest();
  Digest(Digest&&) noexcept;
  Digest& operator=(Digest&&) noexcept;

  void add(const void* data, size_t bytes);
  // A row-major matrix whose rows lie apart.
  void add_rows(const void* data, int64_t rows, size_t row_bytes, size_t stride_bytes);

  uint64_t value() const;   // of everything so far
  std::string hex() const;  // 16 digits

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mok::problem
