// Presets: the shapes of published models' MoE layers.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "mok/types.h"

namespace mok::problem {

enum class Scoring { softmax, sigmoid, sqrt_softplus };

// How a model turns logits into top-k ids and weights. Data only: the layer takes ids and weights.
struct Router {
  Scoring scoring = Scoring::softmax;
  bool scores_of_chosen = false;    // softmax over the chosen logits, not over all
  bool selection_bias = false;      // a bias per expert is added for the choice alone
  std::optional<bool> renormalise;  // chosen weights are made to add up to 1; empty: not stated
  double scale = 1;                 // factor of the weights
  int groups = 1;                   // experts stand in this many groups ...
  int groups_taken = 1;             // ... and only the best of them are chosen from
};

struct Model {
  std::string_view name;
  LayerShape shape;
  Router router;
  std::string_view note;     // what differs from the published model; empty when nothing does
  bool unconfirmed = false;  // a figure (named in note) was not found in a published config
};

std::span<const Model> models();
const Model* find_model(std::string_view name);  // null when there is none

}  // namespace mok::problem
