// Threads that stay: each runs the same function once per round, next to the calling thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mok::cpu {

class Pool {
 public:
  // `work(i)` is called on thread i in 0..threads-1 of each round; it must not throw.
  Pool(int threads, std::function<void(int)> work);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void start();   // begins a round
  void finish();  // waits for its end

 private:
  void loop(int index);
  void stop();

  std::function<void(int)> work_;
  std::mutex mutex_;
  std::condition_variable begin_, end_;
  int64_t round_ = 0;
  int running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace mok::cpu
