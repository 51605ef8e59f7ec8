// Workspace: memory, and what happens around the tasks of a call.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <thread>

#include "cpu/arguments.h"
#include "cpu/executor.h"
#include "plan/sizing.h"
#include "plan/validate.h"

namespace mok {

using cpu::Failure;
using cpu::Tag;
using plan::Buffer;
using plan::Direction;

namespace {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// Zeroed pages that cost nothing until they are touched.
class LocalMemory {
 public:
  explicit LocalMemory(int64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
      throw Error(ErrorCode::out_of_memory,
                  "cannot take " + std::to_string(bytes) + " bytes of local memory");
    }
    data_ = static_cast<std::byte*>(p);
  }
  ~LocalMemory() {
    if (data_) munmap(data_, bytes_);
  }
  LocalMemory(const LocalMemory&) = delete;
  LocalMemory& operator=(const LocalMemory&) = delete;
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// What ranks compare when a workspace is made. Fixed size, so that ranks that differ can say so.
struct Agreement {
  std::atomic<int64_t> ready;  // 1 = the rest is written
  LayerShape shape;
  Precision precision;
  int64_t max_tokens;
  int32_t failed;
  char text[512];
};

const char* name(Direction d) { return d == Direction::forward ? "forward" : "backward"; }

}  // namespace

struct Workspace::Impl {
  Impl(Group& g, const LayerShape& s, Precision p, const WorkspaceOptions& o)
      : group(g), shape(s), precision(p), options(o) {
    agree();
    fill_options();
    layout = plan::make_layout(geometry, element_size(p), weight_size(p));
    blocks = group.allocate_symmetric("workspace", layout.symmetric_bytes);
    control.emplace(group, layout, blocks);
    std::optional<Failure> failure;
    try {
      local = std::make_unique<LocalMemory>(layout.local_bytes);
      executor = cpu::make_executor(
          group, *control, p, {options.compute_workers, options.comm_workers, options.delay_seed});
    } catch (const Error& e) {
      failure = Failure{e.code(), group.rank(), e.what()};
    }
    // Call 1 is the construction itself: all ranks have a workspace, or none has.
    call_number = 1;
    if (!failure) {
      control->raise(plan::Counter::arrived, call_number);
      failure = control->wait_for_arrival(call_number, "set-up");
    }
    if (failure) {
      finish(failure);
      release();
      throw cpu::to_error(*failure, group.rank());
    }
    control->complete(call_number);
    control->leave(call_number);
  }

  ~Impl() { release(); }

  void run(cpu::CallArgs& args, Direction direction) {
    const std::lock_guard lock(mutex);  // calls of several threads follow each other
    ++call_number;
    std::optional<Failure> failure;
    try {
      const cpu::Limits limits{shape, group.rank(), group.ranks(), options.max_tokens, precision};
      direction == Direction::forward ? check_forward(limits, args) : check_backward(limits, args);
      failure = attempt(args, direction);
    } catch (const Error& e) {
      failure = Failure{e.code(), group.rank(), e.what()};
    } catch (const std::bad_alloc&) {
      failure = Failure{ErrorCode::out_of_memory, group.rank(),
                        "rank " + std::to_string(group.rank()) + ": no memory for the schedule"};
    }
    finish(failure);
    if (failure) throw cpu::to_error(*failure, group.rank());
  }

  Group& group;
  const LayerShape shape;
  const Precision precision;
  WorkspaceOptions options;
  plan::Geometry geometry;  // what does not change from call to call
  plan::Layout layout;
  std::vector<std::byte*> blocks;
  std::optional<cpu::Control> control;
  std::unique_ptr<LocalMemory> local, spare;
  std::unique_ptr<cpu::Executor> executor;
  std::mutex mutex;
  int64_t call_number = 0;
  bool last_failed = false;

 private:
  // Every rank learns whether all agree, and what was wrong on any of them.
  void agree() {
    std::optional<Error> own;
    try {
      cpu::check_workspace(group, shape, precision, options);
    } catch (const Error& e) {
      own = e;
    }
    const std::vector<std::byte*> pages = group.allocate_symmetric("agreement", sizeof(Agreement));
    struct Free {
      Group& group;
      const std::vector<std::byte*>& pages;
      ~Free() { group.free_symmetric(pages); }
    } free{group, pages};
    const auto page = [&](int r) { return reinterpret_cast<Agreement*>(pages[r]); };
    Agreement& mine = *page(group.rank());
    mine.shape = shape;
    mine.precision = precision;
    mine.max_tokens = options.max_tokens;
    mine.failed = own.has_value();
    if (own) std::snprintf(mine.text, sizeof mine.text, "%s", own->what());
    mine.ready.store(1, std::memory_order_release);
    // Another collective step is the barrier: whoever has taken part has written its page.
    group.free_symmetric(group.allocate_symmetric("agreement, written", 1));
    if (own) throw *own;
    for (int r = 0; r < group.ranks(); ++r) {
      const Agreement& theirs = *page(r);
      if (theirs.ready.load(std::memory_order_acquire) != 1) {
        throw Error(ErrorCode::unsupported, "what rank " + std::to_string(r) +
                                                " wrote to shared memory is not seen by rank " +
                                                std::to_string(group.rank()));
      }
      if (theirs.failed) {
        throw Error(ErrorCode::aborted, std::string(theirs.text));
      }
    }
    const Agreement& first = *page(0);
    for (int r = 1; r < group.ranks(); ++r) compare(first, *page(r), r);
  }

  static void compare(const Agreement& a, const Agreement& b, int rank) {
    const auto same = [&](const char* field, double x, double y) {
      if (x == y) return;
      char text[160];
      std::snprintf(text, sizeof text, "%s is %g on rank 0 and %g on rank %d", field, x, y, rank);
      throw Error(ErrorCode::disagreement, text);
    };
    const auto number = [](auto v) { return static_cast<double>(v); };
    same("hidden", number(a.shape.hidden), number(b.shape.hidden));
    same("intermediate", number(a.shape.intermediate), number(b.shape.intermediate));
    same("experts", a.shape.experts, b.shape.experts);
    same("topk", a.shape.topk, b.shape.topk);
    same("shared_intermediate", number(a.shape.shared_intermediate),
         number(b.shape.shared_intermediate));
    same("shared_gate", a.shape.shared_gate, b.shape.shared_gate);
    same("swiglu_limit", number(a.shape.swiglu_limit), number(b.shape.swiglu_limit));
    same("precision", static_cast<int>(a.precision), static_cast<int>(b.precision));
    same("max_tokens", number(a.max_tokens), number(b.max_tokens));
  }

  void fill_options() {
    geometry = plan::workspace_geometry(shape, group.ranks(), options, precision);
    geometry.rank = group.rank();
    options.saved_rows = geometry.saved_rows;
    options.ring_rows = int64_t{geometry.ring_tiles} * plan::kTileRows;
    options.minibatch_rows = int64_t{geometry.minibatch_tiles} * plan::kTileRows;
    if (options.compute_workers == 0) {
      options.compute_workers = std::max(1, usable_cores() / group.ranks());
    }
  }

  std::optional<Failure> attempt(cpu::CallArgs& args, Direction direction) {
    if (last_failed) {
      if (auto failure = control->wait_for_leaving(call_number - 1)) return failure;
    }
    publish(args, direction);
    control->raise(plan::Counter::arrived, call_number);
    if (auto failure = control->wait_for_arrival(call_number, name(direction))) return failure;
    plan::Geometry g = geometry;
    g.direction = direction;
    if (auto failure = compare_tags(g)) return failure;
    cpu::Call call;
    call.args = args;
    if (args.saved.gate == nullptr) g.saved_rows = 0;
    g.keep_shared = args.saved.shared_gate && (args.saved.shared_out || !shape.shared_gate);
    const int32_t* ids[kMaxRanks];
    for (int r = 0; r < group.ranks(); ++r) {
      ids[r] = reinterpret_cast<const int32_t*>(address(Buffer::ids, r));
    }
    plan::BadId bad;
    if (plan::find_bad_id(g, ids, &bad)) return bad_routing(bad);
    const plan::HostPlan host(g, ids);
    call.plan = host.plan;
    call.layout = &layout;
    std::copy(blocks.begin(), blocks.end(), call.symmetric);
    call.local = local->data();
    call.number = call_number;
    call.swiglu_limit = shape.swiglu_limit;
    const bool recompute = direction == Direction::backward &&
                           plan::saved_minibatches(call.plan) < call.plan.s.minibatches;
    if (recompute && layout.bytes[static_cast<int>(Buffer::ring_gate)] == 0) use_spare(call);
    if (auto failure = executor->run(call)) return failure;
    control->complete(call_number);
    return control->wait_for_completion(call_number, name(direction));
  }

  std::byte* address(Buffer b, int rank) const {
    return blocks[rank] + layout.offset[static_cast<int>(b)];
  }

  // Nothing was saved although all rows would have fit: the layout has no place for g and u.
  void use_spare(cpu::Call& call) {
    const int64_t bytes = int64_t{geometry.ring_tiles} * plan::kTileRows * shape.intermediate *
                          element_size(precision);
    if (!spare) spare = std::make_unique<LocalMemory>(2 * bytes);
    call.spare_gate = spare->data();
    call.spare_up = spare->data() + bytes;
  }

  // Tag, ids and weights, for every rank to read.
  void publish(const cpu::CallArgs& args, Direction direction) {
    Tag& tag = control->own_tag();
    tag = {};
    tag.call = call_number;
    tag.direction = static_cast<int32_t>(direction);
    tag.tokens = static_cast<int32_t>(args.tokens);
    if (direction == Direction::backward) {
      tag.wanted = cpu::wanted_bits(args);
      tag.indifferent = cpu::indifferent_bits(args);
    }
    auto* ids = reinterpret_cast<int32_t*>(address(Buffer::ids, group.rank()));
    const int64_t slots = args.tokens * shape.topk;
    constexpr int32_t kBad = -2;
    bool met_bad = false;
    for (int64_t i = 0; i < slots; ++i) {
      const int64_t id = args.id_type == IdType::int64
                             ? static_cast<const int64_t*>(args.topk_ids)[i]
                             : static_cast<const int32_t*>(args.topk_ids)[i];
      const bool good = id >= -1 && id < shape.experts;
      if (!good && !met_bad) tag.bad_id = id;
      met_bad = met_bad || !good;
      ids[i] = good ? static_cast<int32_t>(id) : kBad;
    }
    if (slots > 0) {
      std::memcpy(address(Buffer::topk_weights, group.rank()), args.topk_weights,
                  slots * weight_size(precision));
    }
  }

  // Fills in every rank's tokens and what is wanted.
  std::optional<Failure> compare_tags(plan::Geometry& g) const {
    const auto differ = [&](const std::string& text) {
      return Failure{ErrorCode::disagreement, group.rank(),
                     "call " + std::to_string(call_number) + ": " + text};
    };
    const Tag& first = control->tag(0);
    int32_t wanted = first.wanted, undecided = first.indifferent;
    int decider = 0;
    for (int r = 0; r < group.ranks(); ++r) {
      const Tag& tag = control->tag(r);
      if (tag.call != call_number) {
        return differ("rank " + std::to_string(r) + " is in call " + std::to_string(tag.call));
      }
      if (tag.direction != first.direction) {
        return differ("direction is " + std::string(name(static_cast<Direction>(first.direction))) +
                      " on rank 0 and " + name(static_cast<Direction>(tag.direction)) +
                      " on rank " + std::to_string(r));
      }
      const int32_t decided = ~(undecided | tag.indifferent);
      if ((wanted & decided) != (tag.wanted & decided)) {
        return differ("wanted gradients are " + cpu::describe_wanted(wanted) + " on rank " +
                      std::to_string(decider) + " and " + cpu::describe_wanted(tag.wanted) +
                      " on rank " + std::to_string(r));
      }
      if (undecided & ~tag.indifferent) {
        wanted = (wanted & ~undecided) | (tag.wanted & undecided);
        undecided = 0;
        decider = r;
      }
      g.tokens[r] = tag.tokens;
    }
    g.wanted = cpu::to_wanted(wanted);
    return std::nullopt;
  }

  Failure bad_routing(const plan::BadId& bad) const {
    return {ErrorCode::bad_routing, group.rank(),
            "topk_ids of rank " + std::to_string(bad.rank) + ", token " +
                std::to_string(bad.token) + ", slot " + std::to_string(bad.k) + ": expert id " +
                std::to_string(control->tag(bad.rank).bad_id) + " is not in -1.." +
                std::to_string(shape.experts - 1)};
  }

  void finish(const std::optional<Failure>& failure) {
    if (failure) control->post_failure(call_number, *failure);
    control->leave(call_number);
    last_failed = failure.has_value();
  }

  void release() {
    executor.reset();
    if (control) control->say_goodbye();
    control.reset();
    if (!blocks.empty()) group.free_symmetric(blocks);
    blocks.clear();
  }
};

Workspace::Workspace(Group& group, const LayerShape& shape, Precision precision,
                     WorkspaceOptions options)
    : impl_(std::make_unique<Impl>(group, shape, precision, options)) {}

Workspace::~Workspace() = default;

void Workspace::forward(const ForwardArgs& a) {
  cpu::CallArgs args;
  args.tokens = a.tokens;
  args.x = a.x;
  args.topk_ids = a.topk_ids;
  args.id_type = a.id_type;
  args.topk_weights = a.topk_weights;
  args.weights = a.weights;
  args.saved = a.saved;
  args.y = a.y;
  impl_->run(args, Direction::forward);
}

void Workspace::backward(const BackwardArgs& a) {
  cpu::CallArgs args;
  static_cast<BackwardArgs&>(args) = a;
  impl_->run(args, Direction::backward);
}

const LayerShape& Workspace::shape() const { return impl_->shape; }
Precision Workspace::precision() const { return impl_->precision; }
const WorkspaceOptions& Workspace::options() const { return impl_->options; }
int64_t Workspace::memory_bytes() const {
  return impl_->layout.symmetric_bytes + impl_->layout.local_bytes +
         (impl_->spare ? impl_->spare->bytes() : 0);
}

}  // namespace mok
