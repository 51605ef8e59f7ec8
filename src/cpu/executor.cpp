#include "cpu/executor.h"

#include <chrono>
#include <new>
#include <system_error>

#include "cpu/faults.h"
#include "cpu/pool.h"
#include "plan/counters.h"
#include "symmetric/exchange.h"

namespace mok::cpu {

using plan::Counter;
using plan::Queue;
using plan::Task;
using plan::TaskKind;
using plan::Wait;
using Clock = std::chrono::steady_clock;

namespace {

std::string describe(const Task& t) {
  std::string text = plan::to_string(t.kind);
  switch (t.kind) {
    case TaskKind::stage:
    case TaskKind::reduce:
      return text + " (tokens " + std::to_string(t.begin) + ".." + std::to_string(t.end) + ")";
    case TaskKind::fetch:
      return text + " (minibatch " + std::to_string(t.minibatch) + ", entries " +
             std::to_string(t.begin) + ".." + std::to_string(t.end) + ")";
    case TaskKind::announce_staged:
    case TaskKind::announce_returned:
      return text;
    default:
      return text + " (minibatch " + std::to_string(t.minibatch) + ", " +
             (t.kind == TaskKind::weight_grad ? "segment " : "tile ") + std::to_string(t.tile) +
             ", column " + std::to_string(t.column) + ")";
  }
}

uint64_t mix(uint64_t x) {  // a bijection whose output bits all depend on all input bits
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class T>
class ExecutorOf final : public Executor {
 public:
  ExecutorOf(Group& group, Control& control, const ExecutorOptions& options)
      : group_(group), control_(control), options_(options) {
    const int workers = options.compute_workers + options.comm_workers;
    for (int i = 0; i < workers; ++i) scratch_.push_back(std::make_unique<Scratch<T>>());
    pool_ = std::make_unique<Pool>(workers - 1, [this](int i) { work(i + 1); });
  }

  std::optional<Failure> run(const Call& call) override {
    call_ = &call;
    const plan::Geometry& g = call.g();
    for (int c = 0; c < static_cast<int>(Counter::first_flag); ++c) {
      offset_[c] = plan::counter_offset(g, static_cast<Counter>(c));
    }
    counters_ =
        reinterpret_cast<std::atomic<int32_t>*>(call.address(plan::Buffer::counters, g.rank));
    const int32_t counters = plan::local_counters(g);
    for (int32_t i = 0; i < counters; ++i) counters_[i].store(0, std::memory_order_relaxed);
    for (auto& next : next_) next.store(0, std::memory_order_relaxed);
    stop_.store(false, std::memory_order_relaxed);
    failure_.reset();
    pool_->start();
    work(0);
    pool_->finish();
    return failure_;
  }

 private:
  // Worker 0 is the calling thread.
  void work(int worker) {
    const Queue queue = worker < options_.compute_workers ? Queue::compute : Queue::communication;
    try {
      const View<T> view{*call_, kernels<T>(), block_kernels(), *scratch_[worker],
                         static_cast<Acc<T>>(call_->swiglu_limit)};
      draw_tickets(view, queue);
    } catch (const Error& e) {
      fail({e.code(), group_.rank(), e.what()});
    } catch (const std::bad_alloc&) {
      fail({ErrorCode::out_of_memory, group_.rank(), "a worker ran out of memory"});
    } catch (const std::exception& e) {
      fail({ErrorCode::internal, group_.rank(), e.what()});
    }
  }

  void draw_tickets(const View<T>& view, Queue queue) {
    const plan::Plan& p = call_->plan;
    const int32_t tickets = plan::tickets(p, queue);
    std::atomic<int32_t>& next = next_[static_cast<int>(queue)];
    while (!stop_.load(std::memory_order_relaxed)) {
      const int32_t ticket = next.fetch_add(1, std::memory_order_relaxed);
      if (ticket >= tickets) return;
      const Task task = plan::decode(p, queue, ticket);
      delay(queue, ticket, 0);
      bool ready = true;
      plan::for_each_wait(p, task, [&](const Wait& w) { ready = ready && wait(task, w); });
      if (!ready) return;
      const Fault* fault = planted(task.kind);
      if (fault) suffer(*fault, task);
      run_task(view, task);
      delay(queue, ticket, 1);
      if (fault && fault->what == Fault::What::skip_signal) continue;
      signal(task);
    }
  }

  void signal(const Task& task) {
    plan::for_each_signal(call_->plan, task, [&](Counter c, int32_t index) {
      counter(c, index).fetch_add(1, std::memory_order_release);
    });
    const Counter flag = plan::announced_flag(task.kind);
    if (flag != Counter::count) control_.raise(flag, call_->number);
    control_.note_progress();
  }

  std::atomic<int32_t>& counter(Counter c, int32_t index) {
    return counters_[offset_[static_cast<int>(c)] + index];
  }

  int64_t seen(const Wait& w) {
    return plan::is_flag(w.counter) ? control_.flag(w.counter, w.index)
                                    : counter(w.counter, w.index).load(std::memory_order_acquire);
  }
  int64_t awaited(const Wait& w) const {
    return plan::is_flag(w.counter) ? call_->number : w.target;
  }

  // False: the call has failed.
  bool wait(const Task& task, const Wait& w) {
    const int64_t target = awaited(w);
    symmetric::Backoff backoff;
    int64_t progress = -1;
    Clock::time_point changed, looked;
    while (seen(w) < target) {
      if (stop_.load(std::memory_order_relaxed)) return false;
      backoff.pause();
      if (!backoff.slept()) continue;
      const Clock::time_point now = Clock::now();
      const int64_t progress_now = control_.progress_of_all();
      if (progress_now != progress) {
        if (progress < 0) looked = now;
        progress = progress_now;
        changed = now;
      }
      const bool closely = now - looked > std::chrono::milliseconds(20);
      if (closely) looked = now;
      if (auto failure = control_.find_failure(call_->number, closely)) {
        fail(*failure);
        return false;
      }
      // A wait for a peer's flag names that peer; those for this rank's own counters hold back a
      // little, as they often wait for the former.
      double limit = group_.options().progress_seconds;
      if (!plan::is_flag(w.counter)) limit *= 1.2;
      if (limit > 0 && std::chrono::duration<double>(now - changed).count() > limit &&
          seen(w) < target) {
        fail(late(task, w, target));
        return false;
      }
    }
    return true;
  }

  Failure late(const Task& task, const Wait& w, int64_t target) {
    const bool flag = plan::is_flag(w.counter);
    const int peer = flag ? w.index : group_.rank();
    return {ErrorCode::deadline, group_.rank(),
            "no progress for " + symmetric::describe_seconds(group_.options().progress_seconds) +
                " in call " + std::to_string(call_->number) + " (" +
                (call_->forward() ? "forward" : "backward") + "): rank " +
                std::to_string(group_.rank()) + ", " + describe(task) + ", waits for " +
                (peer == group_.rank() ? "itself" : "rank " + std::to_string(peer)) + ": counter " +
                plan::to_string(w.counter) + "[" + std::to_string(w.index) + "], value seen " +
                std::to_string(seen(w)) + ", awaited " + std::to_string(target)};
  }

  void fail(const Failure& failure) {
    {
      const std::lock_guard lock(failure_mutex_);
      if (failure_) return;
      failure_ = failure;
    }
    control_.post_failure(call_->number, failure);
    stop_.store(true, std::memory_order_relaxed);
  }

  const Fault* planted(TaskKind kind) const {
    const Fault* fault = planted_fault.load(std::memory_order_acquire);
    return fault && fault->rank == group_.rank() && fault->kind == kind ? fault : nullptr;
  }

  void suffer(const Fault& fault, const Task& task) {
    if (fault.what == Fault::What::sleep) {
      std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds));
    }
    if (fault.what == Fault::What::fail) {
      throw Error(ErrorCode::internal, "planted fault in " + describe(task));
    }
  }

  void delay(Queue queue, int32_t ticket, int point) const {
    if (options_.delay_seed == 0) return;
    uint64_t h = mix(options_.delay_seed + static_cast<uint64_t>(call_->number));
    h = mix(h + static_cast<uint64_t>(group_.rank()) * 4 + static_cast<uint64_t>(queue) * 2 +
            static_cast<uint64_t>(point));
    h = mix(h + static_cast<uint64_t>(ticket));
    if (h % 4 != 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds((h >> 8) % 700));
  }

  Group& group_;
  Control& control_;
  const ExecutorOptions options_;
  std::vector<std::unique_ptr<Scratch<T>>> scratch_;

  const Call* call_ = nullptr;
  std::atomic<int32_t>* counters_ = nullptr;
  int32_t offset_[plan::kCounters] = {};
  alignas(64) std::atomic<int32_t> next_[2] = {};
  alignas(64) std::atomic<bool> stop_{false};
  std::mutex failure_mutex_;
  std::optional<Failure> failure_;
  std::unique_ptr<Pool> pool_;  // last: its threads use the rest
};

template <class T>
std::unique_ptr<Executor> make(Group& group, Control& control, const ExecutorOptions& options) {
  return std::make_unique<ExecutorOf<T>>(group, control, options);
}

}  // namespace

std::unique_ptr<Executor> make_executor(Group& group, Control& control, Precision precision,
                                        const ExecutorOptions& options) {
  try {
    const Precision type = storage_type(precision);
    if (type == Precision::bf16) return make<bf16>(group, control, options);
    if (type == Precision::fp32) return make<float>(group, control, options);
    return make<double>(group, control, options);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory, "no memory for the workers");
  } catch (const std::system_error& e) {
    throw Error(ErrorCode::out_of_memory, std::string("cannot start the workers: ") + e.what());
  }
}

}  // namespace mok::cpu
