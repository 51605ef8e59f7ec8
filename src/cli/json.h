// What several subcommands print.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/spec.h"

namespace mok::cli {

using Json = nlohmann::ordered_json;

inline Json shape_json(const Spec& spec) {
  const LayerShape& s = spec.shape;
  Json j;
  if (!spec.model.empty()) j["model"] = spec.model;
  if (!spec.note.empty()) j["note"] = spec.note;
  j["hidden"] = s.hidden;
  j["intermediate"] = s.intermediate;
  j["experts"] = s.experts;
  j["topk"] = s.topk;
  j["shared"] = s.shared_intermediate;
  j["shared_gate"] = s.shared_gate;
  j["swiglu_limit"] = std::isinf(s.swiglu_limit) ? Json() : Json(s.swiglu_limit);
  return j;
}

// "qwen3-30b-a3b (H 2048, I 768, E 128, K 8)"
inline std::string shape_text(const Spec& spec) {
  const LayerShape& s = spec.shape;
  std::string sizes = "H " + std::to_string(s.hidden) + ", I " + std::to_string(s.intermediate) +
                      ", E " + std::to_string(s.experts) + ", K " + std::to_string(s.topk);
  if (s.shared_intermediate > 0) {
    sizes += ", shared " + std::to_string(s.shared_intermediate) + (s.shared_gate ? " gated" : "");
  }
  if (!std::isinf(s.swiglu_limit)) sizes += ", limit " + Json(s.swiglu_limit).dump();
  return spec.model.empty() ? sizes : spec.model + " (" + sizes + ")";
}

}  // namespace mok::cli
