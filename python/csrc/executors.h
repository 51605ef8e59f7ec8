// The two kinds of workspace.
#pragma once

#include <memory>
#include <vector>

#include "handles.h"

namespace mok::torch_ops {

std::shared_ptr<WorkspaceEntry> make_cpu_workspace(const WorkspaceSettings& settings);

// In a build without CUDA the following throw `unsupported`.
bool has_cuda();
// Why the layer cannot run on that GPU, thrown as `unsupported`.
void require_gpu(int device);
// Bytes of each rank's block of symmetric memory.
int64_t cuda_symmetric_bytes(const WorkspaceSettings& settings);
// blocks: [ranks], every rank's block as this process sees it; empty with a single rank, whose
// workspace takes all memory itself.
std::shared_ptr<WorkspaceEntry> make_cuda_workspace(const WorkspaceSettings& settings, int device,
                                                    const std::vector<void*>& blocks);

}  // namespace mok::torch_ops
