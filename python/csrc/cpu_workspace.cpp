#include <exception>

#include "executors.h"

namespace mok::torch_ops {
namespace {

class CpuWorkspace final : public WorkspaceEntry {
 public:
  explicit CpuWorkspace(const WorkspaceSettings& s)
      : WorkspaceEntry(s, kCpu), core_(*s.group->group, s.shape, s.precision, s.options) {}

  void forward(const ForwardArgs& args) override { core_.forward(args); }
  void backward(const BackwardArgs& args) override { core_.backward(args); }
  void synchronize() override {}  // calls are over when they return
  const WorkspaceOptions& options() const override { return core_.options(); }
  int64_t memory_bytes() const override { return core_.memory_bytes(); }

  void abort_call() noexcept override {
    try {
      const std::lock_guard lock(mutex);
      if (ranks() == 1) return;
      ForwardArgs refused;
      refused.tokens = -1;  // refused at once, and the refusal is posted to the peers
      core_.forward(refused);
    } catch (const std::exception&) {
    }
  }

 private:
  Workspace core_;
};

}  // namespace

std::shared_ptr<WorkspaceEntry> make_cpu_workspace(const WorkspaceSettings& settings) {
  return std::make_shared<CpuWorkspace>(settings);
}

}  // namespace mok::torch_ops
