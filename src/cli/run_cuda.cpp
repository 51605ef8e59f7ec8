// Ranks on GPUs, one process.
#include "cli/results.h"

namespace mok::cli {
Outcome run_on_cuda(const Spec&, const Sets&, Progress&) {
  throw Error(ErrorCode::unsupported, "this build has no CUDA executor");
}
}  // namespace mok::cli
