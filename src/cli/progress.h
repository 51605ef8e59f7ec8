// One line on stderr that shows how far long work has come; nothing where stderr is no terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace mok::cli {

class Progress {
 public:
  Progress();
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& what, int64_t done, int64_t all);  // seldom enough by itself
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  const bool terminal_;
  bool shown_ = false;
  std::string what_;
  Clock::time_point begun_, last_;
};

}  // namespace mok::cli
