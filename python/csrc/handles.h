// Groups and workspaces behind the integer handles that the operators take.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "mok/layer.h"

namespace mok::torch_ops {

struct GroupEntry {
  std::unique_ptr<Group> group;
};

inline constexpr int kCpu = -1;

struct WorkspaceSettings {
  std::shared_ptr<GroupEntry> group;  // outlives the workspace
  LayerShape shape;
  Precision precision = Precision::bf16;
  WorkspaceOptions options;
  int comm_blocks = 0, sm_reserve = 0;  // mok::cuda::Options
};

// A workspace of either executor. All but `abort_call` need the mutex: one call at a time.
class WorkspaceEntry {
 public:
  virtual ~WorkspaceEntry() = default;
  const LayerShape& shape() const { return settings_.shape; }
  Precision precision() const { return settings_.precision; }
  int ranks() const { return settings_.group->group->ranks(); }
  int device() const { return device_; }  // the GPU, or kCpu

  virtual void forward(const ForwardArgs& args) = 0;
  virtual void backward(const BackwardArgs& args) = 0;
  // Throws what went wrong in calls that are over.
  virtual void synchronize() = 0;
  virtual const WorkspaceOptions& options() const = 0;  // with the defaults filled in
  virtual int64_t memory_bytes() const = 0;
  // Lets the peers' present call fail at once instead of at its deadline, when this rank cannot
  // make it. Takes the mutex; never throws.
  virtual void abort_call() noexcept = 0;

  std::mutex mutex;

 protected:
  WorkspaceEntry(WorkspaceSettings settings, int device)
      : settings_(std::move(settings)), device_(device) {}
  const WorkspaceSettings settings_;

 private:
  const int device_;
};

// Throw bad_argument for a handle that does not exist.
std::shared_ptr<GroupEntry> find_group(int64_t handle);
std::shared_ptr<WorkspaceEntry> find_workspace(int64_t handle);

}  // namespace mok::torch_ops
