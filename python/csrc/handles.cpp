// The table of handles, and the C functions that python/mok/_library.py calls through ctypes.
// Each returns -1 after an error, which mok_error_code and mok_error_message then describe.
#include "handles.h"

#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <utility>

#include "plan/geometry.h"

#define MOK_EXPORT extern "C" __attribute__((visibility("default")))

namespace mok::torch_ops {
namespace {

struct Tables {
  std::mutex mutex;
  int64_t next = 1;
  std::map<int64_t, std::shared_ptr<GroupEntry>> groups;
  std::map<int64_t, std::shared_ptr<WorkspaceEntry>> workspaces;
};

// Never destroyed: Python's atexit hook empties it, and a process that dies otherwise must not run
// destructors after its threads are gone.
Tables& tables() {
  static Tables* const t = new Tables;
  return *t;
}

template <class Entry>
std::shared_ptr<Entry> find(const std::map<int64_t, std::shared_ptr<Entry>>& map, int64_t handle,
                            const char* what) {
  const auto it = map.find(handle);
  if (it == map.end()) {
    throw Error(ErrorCode::bad_argument,
                std::string(what) + ": no such handle, " + std::to_string(handle));
  }
  return it->second;
}

thread_local int last_code = -1;
thread_local std::string last_message;

template <class Body>
int64_t guarded(const Body& body) {
  try {
    return body();
  } catch (const Error& e) {
    last_code = static_cast<int>(e.code());
    last_message = e.what();
  } catch (const std::bad_alloc&) {
    last_code = static_cast<int>(ErrorCode::out_of_memory);
    last_message = "out of memory";
  } catch (const std::exception& e) {
    last_code = static_cast<int>(ErrorCode::internal);
    last_message = e.what();
  }
  return -1;
}

}  // namespace

void WorkspaceEntry::abort_call() noexcept {
  try {
    const std::lock_guard lock(mutex);
    if (group->group->ranks() == 1) return;
    ForwardArgs refused;
    refused.tokens = -1;  // refused at once, and the refusal is posted to the peers
    workspace->forward(refused);
  } catch (const std::exception&) {
  }
}

std::shared_ptr<GroupEntry> find_group(int64_t handle) {
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  return find(t.groups, handle, "group");
}

std::shared_ptr<WorkspaceEntry> find_workspace(int64_t handle) {
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  return find(t.workspaces, handle, "workspace");
}

}  // namespace mok::torch_ops

using namespace mok::torch_ops;

MOK_EXPORT int mok_error_code() { return last_code; }
MOK_EXPORT const char* mok_error_message() { return last_message.c_str(); }
MOK_EXPORT const char* mok_version() { return MOK_VERSION; }
MOK_EXPORT int mok_tile_rows() { return mok::plan::kTileRows; }

// One rank of `ranks` processes that meet under `name`; the name is not used by a single rank.
MOK_EXPORT int64_t mok_group_create(const char* name, int rank, int ranks, double arrival_seconds,
                                    double progress_seconds) {
  return guarded([&] {
    const mok::GroupOptions options{arrival_seconds, progress_seconds};
    auto entry = std::make_shared<GroupEntry>();
    if (ranks == 1) {
      entry->group = std::move(mok::Group::threads(1, options).front());
    } else {
      entry->group = mok::Group::processes(name, rank, ranks, options);
    }
    Tables& t = tables();
    const std::lock_guard lock(t.mutex);
    t.groups[t.next] = std::move(entry);
    return t.next++;
  });
}

// The group lives on until its last workspace is gone.
MOK_EXPORT void mok_group_destroy(int64_t handle) {
  std::shared_ptr<GroupEntry> last;
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  if (const auto it = t.groups.find(handle); it != t.groups.end()) {
    last = std::move(it->second);
    t.groups.erase(it);
  }
}

// What python/mok/_library.py's WorkspaceRequest mirrors, field by field.
struct MokWorkspaceRequest {
  int64_t hidden, intermediate, experts, topk, shared_intermediate, shared_gate;
  double swiglu_limit;
  int64_t precision;  // 0 bf16, 1 fp32, 2 fp64, 3 mxfp8, 4 fp8
  int64_t max_tokens, ring_rows, minibatch_rows, saved_rows, compute_workers, comm_workers;
  uint64_t delay_seed;
};

MOK_EXPORT int64_t mok_workspace_create(int64_t group, const MokWorkspaceRequest* r) {
  return guarded([&] {
    auto entry = std::make_shared<WorkspaceEntry>();
    entry->group = find_group(group);
    entry->shape = {r->hidden,
                    r->intermediate,
                    static_cast<int>(r->experts),
                    static_cast<int>(r->topk),
                    r->shared_intermediate,
                    r->shared_gate != 0,
                    static_cast<float>(r->swiglu_limit)};
    entry->precision = static_cast<mok::Precision>(r->precision);
    mok::WorkspaceOptions o;
    o.max_tokens = r->max_tokens;
    o.ring_rows = r->ring_rows;
    if (r->minibatch_rows > 0) o.minibatch_rows = r->minibatch_rows;
    o.saved_rows = r->saved_rows;
    o.compute_workers = static_cast<int>(r->compute_workers);
    if (r->comm_workers > 0) o.comm_workers = static_cast<int>(r->comm_workers);
    o.delay_seed = r->delay_seed;
    entry->workspace =
        std::make_unique<mok::Workspace>(*entry->group->group, entry->shape, entry->precision, o);
    Tables& t = tables();
    const std::lock_guard lock(t.mutex);
    t.workspaces[t.next] = std::move(entry);
    return t.next++;
  });
}

// out: max_tokens, saved_rows, ring_rows, minibatch_rows, memory_bytes.
MOK_EXPORT int64_t mok_workspace_info(int64_t handle, int64_t* out) {
  return guarded([&]() -> int64_t {
    const auto entry = find_workspace(handle);
    const std::lock_guard lock(entry->mutex);
    const mok::Workspace& workspace = *entry->workspace;
    const mok::WorkspaceOptions& o = workspace.options();
    const int64_t values[] = {o.max_tokens, o.saved_rows, o.ring_rows, o.minibatch_rows,
                              workspace.memory_bytes()};
    std::memcpy(out, values, sizeof(values));
    return 0;
  });
}

MOK_EXPORT void mok_workspace_abort_call(int64_t handle) {
  guarded([&]() -> int64_t {
    find_workspace(handle)->abort_call();
    return 0;
  });
}

MOK_EXPORT void mok_workspace_destroy(int64_t handle) {
  std::shared_ptr<WorkspaceEntry> last;  // destroyed after the lock is given back
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  if (const auto it = t.workspaces.find(handle); it != t.workspaces.end()) {
    last = std::move(it->second);
    t.workspaces.erase(it);
  }
}
