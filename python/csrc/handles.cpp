// The table of handles, and the C functions that python/mok/_library.py calls through ctypes.
// Each returns -1 after an error, which mok_error_code and mok_error_message then describe.
#include "handles.h"

#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <utility>

#include "executors.h"
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
  int64_t comm_blocks, sm_reserve;  // CUDA
};

namespace {

WorkspaceSettings settings_of(int64_t group, const MokWorkspaceRequest& r) {
  WorkspaceSettings s;
  s.group = find_group(group);
  s.shape = {r.hidden,
             r.intermediate,
             static_cast<int>(r.experts),
             static_cast<int>(r.topk),
             r.shared_intermediate,
             r.shared_gate != 0,
             static_cast<float>(r.swiglu_limit)};
  s.precision = static_cast<mok::Precision>(r.precision);
  s.options.max_tokens = r.max_tokens;
  s.options.ring_rows = r.ring_rows;
  if (r.minibatch_rows > 0) s.options.minibatch_rows = r.minibatch_rows;
  s.options.saved_rows = r.saved_rows;
  s.options.compute_workers = static_cast<int>(r.compute_workers);
  if (r.comm_workers > 0) s.options.comm_workers = static_cast<int>(r.comm_workers);
  s.options.delay_seed = r.delay_seed;
  s.comm_blocks = static_cast<int>(r.comm_blocks);
  s.sm_reserve = static_cast<int>(r.sm_reserve);
  return s;
}

}  // namespace

MOK_EXPORT int mok_has_cuda() { return has_cuda(); }

// 0, or -1: the layer cannot run on that GPU.
MOK_EXPORT int64_t mok_cuda_check(int device) {
  return guarded([&]() -> int64_t {
    require_gpu(device);
    return 0;
  });
}

// Bytes of each rank's block of symmetric memory.
MOK_EXPORT int64_t mok_cuda_symmetric_bytes(int64_t group, const MokWorkspaceRequest* r) {
  return guarded([&] { return cuda_symmetric_bytes(settings_of(group, *r)); });
}

// device: a GPU, or -1 for the CPU. blocks: on a GPU with several ranks, the address of each one's
// block of symmetric memory, which outlives the workspace; else null.
MOK_EXPORT int64_t mok_workspace_create(int64_t group, const MokWorkspaceRequest* r, int device,
                                        void* const* blocks) {
  return guarded([&] {
    const WorkspaceSettings settings = settings_of(group, *r);
    std::shared_ptr<WorkspaceEntry> entry;
    if (device == kCpu) {
      entry = make_cpu_workspace(settings);
    } else {
      const int given = blocks == nullptr ? 0 : settings.group->group->ranks();
      entry = make_cuda_workspace(settings, device, {blocks, blocks + given});
    }
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
    const mok::WorkspaceOptions& o = entry->options();
    const int64_t values[] = {o.max_tokens, o.saved_rows, o.ring_rows, o.minibatch_rows,
                              entry->memory_bytes()};
    std::memcpy(out, values, sizeof(values));
    return 0;
  });
}

// Waits for the last call and reports what went wrong in it, or in one before.
MOK_EXPORT int64_t mok_workspace_synchronize(int64_t handle) {
  return guarded([&]() -> int64_t {
    const auto entry = find_workspace(handle);
    const std::lock_guard lock(entry->mutex);
    entry->synchronize();
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
