#include "problem/models.h"

#include <limits>

namespace mok::problem {
namespace {

constexpr float kNoLimit = std::numeric_limits<float>::infinity();
constexpr std::string_view kGptOss =
    "plain form: the published model has silu(1.702 g), (u + 1) and biases in each expert, which "
    "this layer does not compute";

constexpr LayerShape shape(int64_t hidden, int64_t intermediate, int experts, int topk,
                           int64_t shared = 0, bool shared_gate = false, float limit = kNoLimit) {
  return {hidden, intermediate, experts, topk, shared, shared_gate, limit};
}

constexpr Router softmax(std::optional<bool> renormalise) {
  return {.scoring = Scoring::softmax, .renormalise = renormalise};
}
// Softmax over the chosen logits alone: the weights add up to 1 by themselves.
constexpr Router softmax_of_chosen() {
  return {.scoring = Scoring::softmax, .scores_of_chosen = true, .renormalise = false};
}
constexpr Router biased_sigmoid(double scale, int groups = 1, int taken = 1) {
  return {.scoring = Scoring::sigmoid,
          .selection_bias = true,
          .renormalise = std::nullopt,
          .scale = scale,
          .groups = groups,
          .groups_taken = taken};
}
constexpr Router sqrt_softplus(std::optional<bool> renormalise, double scale) {
  return {.scoring = Scoring::sqrt_softplus, .renormalise = renormalise, .scale = scale};
}

constexpr Model kModels[] = {
    {"mixtral-8x7b", shape(4096, 14336, 8, 2), softmax_of_chosen(), ""},
    {"olmoe-7b", shape(2048, 1024, 64, 8), softmax(false), ""},
    {"qwen3-30b-a3b", shape(2048, 768, 128, 8), softmax(true), ""},
    {"qwen3-235b-a22b", shape(4096, 1536, 128, 8), softmax(true), ""},
    {"qwen3.5-35b-a3b", shape(2048, 512, 256, 8, 512, true), softmax({}), ""},
    {"qwen3.5-397b-a17b", shape(4096, 1024, 512, 10, 1024, true), softmax({}),
     "the shared expert's width is not confirmed in a published config", true},
    {"deepseek-v3", shape(7168, 2048, 256, 8, 2048), biased_sigmoid(2.5, 8, 4), ""},
    {"deepseek-v4-flash", shape(4096, 2048, 256, 6, 2048, false, 10), sqrt_softplus(true, 1.5), ""},
    {"deepseek-v4-pro", shape(7168, 3072, 384, 6, 3072, false, 10), sqrt_softplus({}, 2.5),
     "the router's scale is not confirmed in a published config", true},
    {"kimi-k2.5", shape(7168, 2048, 384, 8, 2048), biased_sigmoid(2.827), ""},
    {"glm-4.5", shape(5120, 1536, 160, 8, 1536), biased_sigmoid(2.5), ""},
    {"glm-5.2", shape(6144, 2048, 256, 8, 2048), biased_sigmoid(2.5), ""},
    {"gpt-oss-20b", shape(2880, 2880, 32, 4, 0, false, 7), softmax_of_chosen(), kGptOss},
    {"gpt-oss-120b", shape(2880, 2880, 128, 4, 0, false, 7), softmax_of_chosen(), kGptOss},
    {"minimax-m2", shape(3072, 1536, 256, 8), biased_sigmoid(1), ""},
};

}  // namespace

std::span<const Model> models() { return kModels; }

const Model* find_model(std::string_view name) {
  for (const Model& m : kModels) {
    if (m.name == name) return &m;
  }
  return nullptr;
}

}  // namespace mok::problem
