#include "executors.h"

#ifdef MOK_WITH_CUDA

#include <exception>
#include <optional>

#include "cuda_stream.h"
#include "meeting.h"
#include "mok/cuda.h"

namespace mok::torch_ops {
namespace {

cuda::Options cuda_options(const WorkspaceSettings& s) {
  cuda::Options o;
  o.workspace = s.options;
  o.precision = s.precision;
  o.deadlines = s.group->group->options();
  o.comm_blocks = s.comm_blocks;
  o.sm_reserve = s.sm_reserve;
  return o;
}

// One rank on its GPU.
//
// After an error the ranks of several processes must meet, because a peer may still be inside the
// call. They do so at the next call, which each rank makes after the error was raised to it.
class CudaWorkspace final : public WorkspaceEntry {
 public:
  CudaWorkspace(const WorkspaceSettings& s, int device, const std::vector<void*>& blocks)
      : WorkspaceEntry(s, device) {
    if (blocks.empty()) {
      core_.emplace(s.shape, std::vector<int>{device}, cuda_options(s));
    } else {
      meeting_.emplace(*s.group->group);
      const cuda::SymmetricMemory memory(s.group->group->rank(), device, blocks);
      core_.emplace(s.shape, memory, cuda_options(s));
    }
  }

  void forward(const ForwardArgs& args) override {
    call([&] { core_->forward({args}, {current_stream(device())}); });
  }
  void backward(const BackwardArgs& args) override {
    call([&] { core_->backward({args}, {current_stream(device())}); });
  }
  void synchronize() override {
    if (!broken_) noting_errors([&] { core_->synchronize(); });
  }
  const WorkspaceOptions& options() const override { return core_->options(); }
  int64_t memory_bytes() const override { return core_->memory_bytes(0); }

  void abort_call() noexcept override {
    if (ranks() == 1) return;
    try {
      const std::lock_guard lock(mutex);
      recover();
      give_up("the call was refused");
    } catch (const std::exception&) {
    }
  }

 private:
  template <class Call>
  void call(const Call& make) {
    recover();
    noting_errors(make);
  }

  template <class Call>
  void noting_errors(const Call& make) {
    try {
      make();
    } catch (const Error& e) {
      if (ranks() == 1) throw;
      switch (e.code()) {
        case ErrorCode::bad_routing:  // found by all ranks, and the call ended as calls do
          break;
        case ErrorCode::deadline:
        case ErrorCode::disagreement:
        case ErrorCode::aborted:
          broken_ = true;
          break;
        default:  // refused here, while the peers wait
          give_up(e.what());
      }
      throw;
    }
  }

  void give_up(const std::string& why) {
    core_->abort(why);
    broken_ = true;
  }

  void recover() {
    if (!broken_) return;
    try {
      core_->synchronize();
    } catch (const Error&) {  // was raised before
    }
    // Nobody is in a call any more; then all memory is clear.
    meeting_->attend(2 * recoveries_ + 1, "make its next call after an error");
    core_->recover();
    meeting_->attend(2 * recoveries_ + 2, "recover from an error");
    ++recoveries_;
    broken_ = false;
  }

  std::optional<Meeting> meeting_;  // of several ranks
  std::optional<cuda::Workspace> core_;
  bool broken_ = false;
  int64_t recoveries_ = 0;
};

}  // namespace

bool has_cuda() { return true; }

void require_gpu(int device) {
  const std::string reason = cuda::why_not(device);
  if (!reason.empty()) throw Error(ErrorCode::unsupported, reason);
}

int64_t cuda_symmetric_bytes(const WorkspaceSettings& s) {
  return cuda::symmetric_bytes(s.shape, s.group->group->ranks(), cuda_options(s));
}

std::shared_ptr<WorkspaceEntry> make_cuda_workspace(const WorkspaceSettings& settings, int device,
                                                    const std::vector<void*>& blocks) {
  return std::make_shared<CudaWorkspace>(settings, device, blocks);
}

}  // namespace mok::torch_ops

#else

namespace mok::torch_ops {

bool has_cuda() { return false; }
void require_gpu(int) { throw Error(ErrorCode::unsupported, "this build has no CUDA executor"); }
int64_t cuda_symmetric_bytes(const WorkspaceSettings&) {
  require_gpu(0);
  return 0;
}
std::shared_ptr<WorkspaceEntry> make_cuda_workspace(const WorkspaceSettings&, int device,
                                                    const std::vector<void*>&) {
  require_gpu(device);
  return nullptr;
}

}  // namespace mok::torch_ops

#endif
