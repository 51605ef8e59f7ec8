#include "cpu/pool.h"

namespace mok::cpu {

Pool::Pool(int threads, std::function<void(int)> work) : work_(std::move(work)) {
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this, i] { loop(i); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  begin_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Pool::start() {
  {
    const std::lock_guard lock(mutex_);
    running_ = static_cast<int>(threads_.size());
    ++round_;
  }
  begin_.notify_all();
}

void Pool::finish() {
  std::unique_lock lock(mutex_);
  end_.wait(lock, [&] { return running_ == 0; });
}

void Pool::loop(int index) {
  int64_t done = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      begin_.wait(lock, [&] { return stop_ || round_ > done; });
      if (round_ == done) return;
      done = round_;
    }
    work_(index);
    const std::lock_guard lock(mutex_);
    if (--running_ == 0) end_.notify_all();
  }
}

}  // namespace mok::cpu
