#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace mok::cli {

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::show(const std::string& what, int64_t done, int64_t all) {
  if (!terminal_ || all <= 0) return;
  const Clock::time_point now = Clock::now();
  if (what != what_) {
    what_ = what;
    begun_ = now;
  }
  // Work of less than half a second shows nothing.
  if (now - begun_ < std::chrono::milliseconds(500)) return;
  if (shown_ && now - last_ < std::chrono::milliseconds(100)) return;
  constexpr int kWidth = 30;
  done = std::clamp<int64_t>(done, 0, all);
  const int filled = static_cast<int>(done * kWidth / all);
  const double seconds = std::chrono::duration<double>(now - begun_).count();
  std::string bar(static_cast<size_t>(filled), '#');
  bar.resize(kWidth, '.');
  std::fprintf(stderr, "\r\033[K%-20s [%s] %3d%% %5.0f s", what.c_str(), bar.c_str(),
               static_cast<int>(done * 100 / all), seconds);
  std::fflush(stderr);
  shown_ = true;
  last_ = now;
}

void Progress::clear() {
  if (!shown_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace mok::cli
