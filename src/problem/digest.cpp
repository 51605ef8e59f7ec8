#include "problem/digest.h"

#include <cinttypes>
#include <cstdio>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace mok::problem {

struct Digest::State {
  XXH3_state_t xxh;  // aligned to 64 by its own declaration
};

Digest::Digest() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh); }
Digest::~Digest() = default;
Digest::Digest(Digest&&) noexcept = default;
Digest& Digest::operator=(Digest&&) noexcept = default;

void Digest::add(const void* data, size_t bytes) {
  if (bytes > 0) XXH3_64bits_update(&state_->xxh, data, bytes);
}

void Digest::add_rows(const void* data, int64_t rows, size_t row_bytes, size_t stride_bytes) {
  if (row_bytes == stride_bytes) return add(data, static_cast<size_t>(rows) * row_bytes);
  const auto* row = static_cast<const std::byte*>(data);
  for (int64_t i = 0; i < rows; ++i, row += stride_bytes) add(row, row_bytes);
}

uint64_t Digest::value() const { return XXH3_64bits_digest(&state_->xxh); }

std::string Digest::hex() const {
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, value());
  return text;
}

}  // namespace mok::problem
