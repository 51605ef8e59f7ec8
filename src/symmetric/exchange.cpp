#include "symmetric/exchange.h"

#include <sched.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

namespace mok::symmetric {

void Backoff::pause() {
  ++round_;
  if (round_ <= kSpins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return;
  }
  if (round_ <= kYields) {
    sched_yield();
    return;
  }
  const int step = round_ - kYields < 8 ? round_ - kYields : 8;
  std::this_thread::sleep_for(std::chrono::microseconds(20 * step));
}

std::string describe_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

void ExchangeGroup::check(const std::vector<Offer>& offers, const std::string& what,
                          int64_t bytes) const {
  for (int r = 0; r < ranks_; ++r) {
    const Offer& o = offers[r];
    if (o.kind != offers[0].kind || std::strncmp(o.what, offers[0].what, sizeof o.what) != 0) {
      throw Error(ErrorCode::disagreement, "rank " + std::to_string(r) + " allocates '" + o.what +
                                               "', rank 0 '" + offers[0].what + "'");
    }
    if (o.bytes != offers[0].bytes) {
      throw Error(ErrorCode::disagreement, "rank " + std::to_string(r) + " asks for " +
                                               std::to_string(o.bytes) + " bytes of '" + what +
                                               "', rank 0 for " + std::to_string(offers[0].bytes));
    }
  }
  for (int r = 0; r < ranks_; ++r) {
    if (offers[r].failed == 0) continue;
    throw Error(ErrorCode::out_of_memory, "rank " + std::to_string(r) + " cannot take " +
                                              std::to_string(bytes) + " bytes for '" + what +
                                              "': " + std::strerror(offers[r].failed));
  }
}

std::vector<std::byte*> ExchangeGroup::allocate_symmetric(const std::string& what, int64_t bytes) {
  if (bytes <= 0) {
    throw Error(ErrorCode::bad_argument, "rank " + std::to_string(rank_) + ": bytes of '" + what +
                                             "' is " + std::to_string(bytes));
  }
  std::byte* own = create_block(bytes);
  Offer mine;
  mine.bytes = bytes;
  mine.failed = own == nullptr ? (errno != 0 ? errno : ENOMEM) : 0;
  mine.address = reinterpret_cast<uint64_t>(own);
  std::snprintf(mine.what, sizeof mine.what, "%s", what.c_str());
  std::vector<std::byte*> blocks(ranks_, nullptr);
  try {
    std::vector<Offer> offers = exchange(mine, what);
    check(offers, what, bytes);
    mine.kind = Offer::Kind::attach;
    if (!attach_blocks(own, offers, blocks)) mine.failed = errno != 0 ? errno : ENOMEM;
    offers = exchange(mine, what);
    check(offers, what, bytes);
  } catch (...) {
    discard(own, blocks, bytes);
    throw;
  }
  all_attached();
  return blocks;
}

}  // namespace mok::symmetric
