// Groups and workspaces behind the integer handles that the operators take.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "mok/layer.h"

namespace mok::torch_ops {

struct GroupEntry {
  std::unique_ptr<Group> group;
};

struct WorkspaceEntry {
  std::shared_ptr<GroupEntry> group;  // outlives the workspace
  LayerShape shape;
  Precision precision = Precision::bf16;
  std::mutex mutex;  // one call at a time
  std::unique_ptr<Workspace> workspace;

  // Lets the peers' present call fail at once instead of at its deadline, when this rank cannot
  // make it. Takes the mutex; never throws.
  void abort_call() noexcept;
};

// Throw bad_argument for a handle that does not exist.
std::shared_ptr<GroupEntry> find_group(int64_t handle);
std::shared_ptr<WorkspaceEntry> find_workspace(int64_t handle);

}  // namespace mok::torch_ops
