// The table of `mok check`.
#pragma once

#include <string>
#include <vector>

#include "cli/spec.h"

namespace mok::cli {

struct CheckCase {
  std::string name;
  LayerShape shape;
  std::vector<int64_t> tokens;  // of each rank
  std::string routing = "uniform";
  Precision precision = Precision::bf16;
  int64_t ring = 0, minibatch = 4096, saved_rows = -1;
  bool processes = false;
  // Cases of one group are the same problem: their global digests must be equal.
  std::string same_bits = {};
};

std::vector<CheckCase> check_cases();

// "holes" is the routing of a file that is written for it: a third of the slots is -1, and some
// tokens have the same expert twice. Returns its ids [tokens, K].
std::vector<int64_t> ids_with_holes(const LayerShape& shape, int64_t tokens);

}  // namespace mok::cli
