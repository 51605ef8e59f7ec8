// Ranks as threads of this process, or as processes forked from it.
//
// Outputs, times and errors lie in memory that the ranks share with the program's first process,
// which alone reports.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "cli/call_args.h"
#include "cli/rank_inputs.h"
#include "cli/results.h"
#include "plan/layout.h"
#include "problem/digest.h"

namespace mok::cli {
namespace {

using problem::Problem;

struct CallTimes {  // seconds of the monotonic clock, which all processes share
  double forward_begin, forward_end, backward_begin, backward_end;
};

// What a rank tells the first process. Zeroed at the start.
struct RankRecord {
  std::atomic<int64_t> steps;
  int64_t memory_bytes;
  int64_t tensor_bytes;
  double quantize_seconds;
  int32_t failed;
  int32_t killed;
  ErrorCode code;
  char text[1024];
  int32_t changed_repeat;  // 0 = none
  int32_t changed_out;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int kWeightTensors = 7;
int64_t steps_of_rank(const Spec& spec, size_t sets) {
  const int calls = spec.warm_up + spec.repeat;
  return kWeightTensors + static_cast<int64_t>(sets) + calls * (spec.backward ? 2 : 1);
}

// One rank's part of the run.
class RankRun {
 public:
  RankRun(const Spec& spec, const Sets& sets, int rank, Outputs& outputs, RankRecord& record,
          CallTimes* times)
      : spec_(spec), sets_(sets), rank_(rank), outputs_(outputs), record_(record), times_(times) {}

  void play(Group& group) {
    workspace_.emplace(group, spec_.shape, spec_.precision, spec_.workspace);
    record_.memory_bytes = workspace_->memory_bytes();
    const int threads = std::max(1, usable_cores() / spec_.ranks());
    const auto step = [&] { record_.steps.fetch_add(1, std::memory_order_relaxed); };
    weights_ = make_weights(spec_, *sets_[0], rank_, threads, step);
    if (is_quantized(spec_.precision)) {
      const double begin = now();
      quantized_ = quantize(spec_, weights_, threads);
      record_.quantize_seconds = now() - begin;
    }
    for (const Problem* problem : sets_) {
      tokens_.push_back(make_tokens(spec_, *problem, rank_, threads));
      step();
    }
    take_saved();
    count_bytes();
    const int calls = spec_.warm_up + spec_.repeat;
    for (int call = 0; call < calls; ++call) {
      const TokenInputs& in = tokens_[call % tokens_.size()];
      prepare_outputs();
      CallTimes t = {};
      t.forward_begin = now();
      workspace_->forward(forward_args(in));
      t.forward_end = now();
      step();
      if (spec_.backward) {
        const BackwardArgs args = backward_args(in);
        t.backward_begin = now();
        workspace_->backward(args);
        t.backward_end = now();
        step();
      }
      times_[call] = t;
      if (spec_.compare_bits && calls > 1) compare_bits(call);
    }
  }

 private:
  std::byte* out(Out o) const { return outputs_[static_cast<int>(o)].data(); }

  // NaN, where that shows what was not written; zeros where gradients are added to.
  void prepare_outputs() {
    for (int o = 0; o < kOuts; ++o) {
      const Memory& m = outputs_[o];
      const bool zero = spec_.grads == GradMode::accumulate && is_weight_grad(static_cast<Out>(o));
      if (m.bytes() == 0 || !(zero || spec_.compare_bits)) continue;
      std::memset(m.data(), zero ? 0 : 0xff, static_cast<size_t>(m.bytes()));
    }
  }

  void take_saved() {
    if (!spec_.backward) return;
    const int64_t element = element_size(spec_.precision);
    const int64_t rows = workspace_->options().saved_rows, tokens = spec_.tokens[rank_];
    const LayerShape& s = spec_.shape;
    saved_gate_ = Memory(rows * s.intermediate * element);
    saved_up_ = Memory(rows * s.intermediate * element);
    saved_shared_gate_ = Memory(tokens * s.shared_intermediate * element);
    saved_shared_up_ = Memory(tokens * s.shared_intermediate * element);
    if (s.shared_gate) saved_out_ = Memory(tokens * s.hidden * element);
  }

  void count_bytes() {
    int64_t bytes = 0;
    for (const TokenInputs& t : tokens_) {
      bytes += t.x.bytes() + t.d_y.bytes() + t.ids.bytes() + t.topk_weights.bytes();
    }
    for (const Memory* m : {&weights_.gate, &weights_.up, &weights_.down, &weights_.shared_gate,
                            &weights_.shared_up, &weights_.shared_down, &saved_gate_, &saved_up_,
                            &saved_shared_gate_, &saved_shared_up_, &saved_out_}) {
      bytes += m->bytes();
    }
    bytes += quantized_.bytes();
    for (const Memory& m : outputs_) bytes += m.bytes();
    record_.tensor_bytes = bytes;
  }

  BackwardArgs backward_args(const TokenInputs& in) const {
    const int64_t h = spec_.shape.hidden;
    BackwardArgs a;
    a.tokens = spec_.tokens[rank_];
    a.x = {in.x.data(), h};
    a.topk_ids = in.ids.data();
    a.topk_weights = in.topk_weights.data();
    a.weights = views(spec_.shape, weights_, quantized_);
    a.saved = {saved_gate_.data(), saved_up_.data(), saved_shared_gate_.data(),
               saved_shared_up_.data(), saved_out_.data()};
    a.d_y = {in.d_y.data(), h};
    if (!spec_.backward) return a;
    want_gradients(spec_, [this](Out o) -> void* { return out(o); }, &a);
    return a;
  }

  ForwardArgs forward_args(const TokenInputs& in) const {
    return forward_of(backward_args(in), {out(Out::y), spec_.shape.hidden});
  }

  void compare_bits(int call) {
    for (int o = 0; o < kOuts; ++o) {
      problem::Digest digest;
      digest.add(outputs_[o].data(), static_cast<size_t>(outputs_[o].bytes()));
      if (call == 0) first_[o] = digest.value();
      if (digest.value() != first_[o] && record_.changed_repeat == 0) {
        record_.changed_repeat = call;
        record_.changed_out = o;
      }
    }
  }

  const Spec& spec_;
  const Sets& sets_;
  const int rank_;
  Outputs& outputs_;
  RankRecord& record_;
  CallTimes* const times_;
  std::optional<Workspace> workspace_;
  WeightInputs weights_;
  QuantizedInputs quantized_;
  std::vector<TokenInputs> tokens_;
  Memory saved_gate_, saved_up_, saved_shared_gate_, saved_shared_up_, saved_out_;
  uint64_t first_[kOuts] = {};
};

void note_failure(RankRecord& record, ErrorCode code, const char* text) {
  record.failed = 1;
  record.code = code;
  std::snprintf(record.text, sizeof record.text, "%s", text);
}

// Never throws: what goes wrong is in the record.
template <class MakeGroup>
void play_rank(RankRun& run, RankRecord& record, MakeGroup&& make_group) {
  try {
    auto&& group = make_group();
    run.play(*group);
  } catch (const Error& e) {
    note_failure(record, e.code(), e.what());
  } catch (const std::bad_alloc&) {
    note_failure(record, ErrorCode::out_of_memory, "no memory left");
  } catch (const std::exception& e) {
    note_failure(record, ErrorCode::internal, e.what());
  }
}

// Everything of a run that all ranks and the first process see.
class SharedRun {
 public:
  SharedRun(const Spec& spec, const Sets& sets)
      : spec_(spec),
        sets_(sets),
        calls_(spec.warm_up + spec.repeat),
        records_(sizeof(RankRecord) * spec.ranks(), sharing()),
        times_(sizeof(CallTimes) * calls_ * spec.ranks(), sharing()) {
    for (int r = 0; r < spec.ranks(); ++r) {
      outputs_.emplace_back();
      for (int o = 0; o < kOuts; ++o) {
        outputs_[r][o] = Memory(extent(spec, r, static_cast<Out>(o)).bytes(), sharing());
      }
    }
  }

  void on_threads(Progress& progress) {
    auto groups = Group::threads(spec_.ranks(), spec_.deadlines);
    std::mutex mutex;
    std::condition_variable changed;
    int finished = 0;
    std::vector<std::thread> threads;
    for (int r = 0; r < spec_.ranks(); ++r) {
      threads.emplace_back([&, r] {
        RankRun run = rank_run(r);
        play_rank(run, record(r), [&] { return groups[r].get(); });
        const std::lock_guard lock(mutex);
        ++finished;
        changed.notify_one();
      });
    }
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, std::chrono::milliseconds(50),
                             [&] { return finished == spec_.ranks(); })) {
      show(progress);
    }
    lock.unlock();
    for (std::thread& t : threads) t.join();
  }

  // No thread may exist yet.
  void on_processes(Progress& progress) {
    const std::string name = "run-" + std::to_string(getpid());
    const pid_t parent = getpid();
    std::vector<pid_t> children(spec_.ranks(), 0);
    std::fflush(nullptr);
    for (int r = 0; r < spec_.ranks(); ++r) {
      children[r] = fork();
      if (children[r] < 0) {
        note_failure(record(r), ErrorCode::out_of_memory, "cannot start a process");
        break;  // the others' arrival deadline would pass first: see below
      }
      if (children[r] == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        RankRun run = rank_run(r);
        play_rank(run, record(r),
                  [&] { return Group::processes(name, r, spec_.ranks(), spec_.deadlines); });
        _exit(0);
      }
    }
    const bool incomplete =
        std::any_of(children.begin(), children.end(), [](pid_t pid) { return pid <= 0; });
    for (const pid_t pid : children) {
      if (incomplete && pid > 0) kill(pid, SIGKILL);
    }
    for (int r = 0; r < spec_.ranks(); ++r) {
      if (children[r] <= 0) continue;
      int status = 0;
      while (waitpid(children[r], &status, WNOHANG) == 0) {
        show(progress);
        usleep(5000);
      }
      if (WIFSIGNALED(status)) {
        const std::string text = "rank " + std::to_string(r) + " was ended by signal " +
                                 std::to_string(WTERMSIG(status));
        note_failure(record(r), ErrorCode::aborted, text.c_str());
        record(r).killed = 1;
      }
    }
  }

  Outcome outcome() {
    raise();
    Outcome out;
    out.outputs = std::move(outputs_);
    const auto time_of = [&](int call, double CallTimes::* begin, double CallTimes::* end) {
      double first = 0, last = 0;
      for (int r = 0; r < spec_.ranks(); ++r) {
        const CallTimes& t = times(r)[call];
        first = r == 0 ? t.*begin : std::max(first, t.*begin);
        last = r == 0 ? t.*end : std::max(last, t.*end);
      }
      return (last - first) * 1e3;  // from when all had come
    };
    for (int call = spec_.warm_up; call < calls_; ++call) {
      out.forward_ms.push_back(time_of(call, &CallTimes::forward_begin, &CallTimes::forward_end));
      if (!spec_.backward) continue;
      out.backward_ms.push_back(
          time_of(call, &CallTimes::backward_begin, &CallTimes::backward_end));
    }
    for (int r = 0; r < spec_.ranks(); ++r) {
      out.quantize_ms = std::max(out.quantize_ms, record(r).quantize_seconds * 1e3);
      out.memory_bytes.push_back(record(r).memory_bytes);
      out.tensor_bytes.push_back(record(r).tensor_bytes);
      if (record(r).changed_repeat > 0 && out.changed.empty()) {
        out.changed = "repeat " + std::to_string(record(r).changed_repeat + 1) +
                      " gave other bits than the first: " +
                      to_string(static_cast<Out>(record(r).changed_out)) + " of rank " +
                      std::to_string(r);
      }
    }
    return out;
  }

 private:
  Sharing sharing() const { return spec_.processes ? Sharing::with_children : Sharing::own; }
  RankRecord& record(int r) const { return records_.as<RankRecord>()[r]; }
  CallTimes* times(int r) const { return times_.as<CallTimes>() + int64_t{r} * calls_; }
  RankRun rank_run(int r) { return RankRun(spec_, sets_, r, outputs_[r], record(r), times(r)); }

  void show(Progress& progress) const {
    int64_t steps = 0;
    for (int r = 0; r < spec_.ranks(); ++r) {
      steps += record(r).steps.load(std::memory_order_relaxed);
    }
    const int64_t of_rank = steps_of_rank(spec_, sets_.size());
    const bool filling = steps < spec_.ranks() * (kWeightTensors + std::ssize(sets_));
    progress.show(filling ? "inputs" : "layer", steps, spec_.ranks() * of_rank);
  }

  // The first cause: a rank that was only told of a peer's failure comes last.
  void raise() const {
    const RankRecord* worst = nullptr;
    const auto order = [](const RankRecord& r) {
      return r.killed                        ? 0
             : r.code == ErrorCode::aborted  ? 2
             : r.code == ErrorCode::deadline ? 1
                                             : 0;
    };
    for (int r = 0; r < spec_.ranks(); ++r) {
      if (!record(r).failed) continue;
      if (!worst || order(record(r)) < order(*worst)) worst = &record(r);
    }
    if (worst) throw Error(worst->code, worst->text);
  }

  const Spec& spec_;
  const Sets& sets_;
  const int calls_;
  Memory records_, times_;
  std::vector<Outputs> outputs_;
};

int64_t needed_bytes(const Spec& spec, const Sets& sets) {
  int64_t bytes = 0;
  const plan::Geometry g = geometry(spec, plan::Direction::forward);
  const plan::Layout layout =
      plan::make_layout(g, element_size(spec.precision), weight_size(spec.precision));
  for (int r = 0; r < spec.ranks(); ++r) {
    bytes += layout.symmetric_bytes;  // local memory is taken as it is touched
    if (spec.backward) {
      bytes += 2 * g.saved_rows * spec.shape.intermediate * element_size(spec.precision);
    }
    for (int o = 0; o < kOuts; ++o) bytes += extent(spec, r, static_cast<Out>(o)).bytes();
    for (const Slice& s : weight_slices(spec, r)) bytes += slice_bytes(*sets[0], s, spec.precision);
    if (is_quantized(spec.precision)) {  // two forms of each routed weight, and their scales
      const int64_t elements =
          spec.experts_local() * 3 * spec.shape.hidden * spec.shape.intermediate;
      bytes += 2 * (elements + elements / block_size(spec.precision));
    }
    for (const Slice& s : token_slices(spec, r)) {
      bytes += slice_bytes(*sets[0], s, spec.precision) * std::ssize(sets);
    }
  }
  return bytes;
}

}  // namespace

Outcome run_on_cpu(const Spec& spec, const Sets& sets, Progress& progress) {
  const int64_t needed = needed_bytes(spec, sets), available = available_bytes();
  if (needed > available) {
    char text[160];
    std::snprintf(text, sizeof text,
                  "the tensors take %.1f GiB and this machine has %.1f GiB left: fewer tokens or a "
                  "smaller shape is needed",
                  static_cast<double>(needed) / 0x1p30, static_cast<double>(available) / 0x1p30);
    throw Error(ErrorCode::out_of_memory, text);
  }
  SharedRun shared(spec, sets);
  spec.processes ? shared.on_processes(progress) : shared.on_threads(progress);
  return shared.outcome();
}

}  // namespace mok::cli
