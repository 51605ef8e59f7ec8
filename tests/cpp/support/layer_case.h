// A small layer on the executor, compared with the oracle.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/layer_run.h"

namespace mok::test {

struct Layer {
  Layer(LayerShape shape, std::vector<int64_t> tokens, RunOptions o = {},
        const char* routing = "uniform")
      : options(std::move(o)) {
    options.tokens = tokens;
    int64_t all = 0;
    for (const int64_t t : tokens) all += t;
    problem.emplace(shape, all, problem::parse_routing(routing), 21);
    run.emplace(*problem, options);
  }
  // Forward and backward, then the comparison.
  std::string differences() {
    run->poison_outputs();
    run->both();
    return compare_with_oracle(*problem, options, *run, true);
  }
  RunOptions options;
  std::optional<problem::Problem> problem;
  std::optional<LayerRun> run;
};

}  // namespace mok::test
