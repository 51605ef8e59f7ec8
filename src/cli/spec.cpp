#include "cli/spec.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "plan/sizing.h"

namespace mok::cli {

int64_t Spec::global_tokens() const {
  return std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
}

int64_t Spec::first_token(int rank) const {
  return std::accumulate(tokens.begin(), tokens.begin() + rank, int64_t{0});
}

int Spec::physical_gpus() const {
  return static_cast<int>(std::set<int>(gpus.begin(), gpus.end()).size());
}

const char* to_string(Precision precision) {
  switch (precision) {
    case Precision::bf16:
      return "bf16";
    case Precision::fp32:
      return "fp32";
    case Precision::fp64:
      return "fp64";
    case Precision::mxfp8:
      return "mxfp8";
    case Precision::fp8:
      break;
  }
  return "fp8";
}

const char* to_string(GradMode grads) {
  switch (grads) {
    case GradMode::none:
      return "none";
    case GradMode::storage:
      return "bf16";
    case GradMode::sum:
      return "sum";
    case GradMode::accumulate:
      break;
  }
  return "accumulate";
}

const char* to_string(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

plan::Geometry geometry(const Spec& spec, plan::Direction direction) {
  plan::Geometry g =
      plan::workspace_geometry(spec.shape, spec.ranks(), spec.workspace, spec.precision);
  for (int r = 0; r < spec.ranks(); ++r) g.tokens[r] = static_cast<int32_t>(spec.tokens[r]);
  g.direction = direction;
  return g;
}

}  // namespace mok::cli
