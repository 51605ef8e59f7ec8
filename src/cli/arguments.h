// The options that subcommands share, and how they become a Spec. Whatever is wrong throws
// bad_argument with a text that names the option.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/spec.h"

namespace mok::cli {

class Arguments {
 public:
  void add_shape(CLI::App& app);      // --model, or its sizes
  void add_problem(CLI::App& app);    // --tokens, --ep, --routing, --seed, --precision, --pass
  void add_execution(CLI::App& app);  // --device, --ranks, workers, deadlines, GPUs, --grads
  void add_knobs(CLI::App& app);      // --ring, --minibatch, --saved-rows

  // For subcommands that hold several values of one option: sets what was not given.
  Arguments with(const std::string& model, const std::string& routing) const;

  // Shape, tokens, routing and knobs are checked; with `execution`, the device is chosen and what
  // it asks for is checked too (unsupported when it is not there).
  enum class Use { plan, execution };
  Spec spec(Use use) const;

  bool has_sizes() const { return hidden_ || intermediate_ || experts_ || topk_; }

  std::string model, routing = "uniform", tokens, pass;
  std::string device = "auto", grads;  // grads: empty = sum

 private:
  LayerShape shape(Spec& spec) const;
  void choose_device(Spec& spec) const;

  std::optional<int64_t> hidden_, intermediate_, experts_, topk_, shared_;
  std::optional<double> limit_;
  bool shared_gate_ = false;
  int64_t ep_ = 1;
  std::string seed_ = "1", precision_ = "bf16", ranks_ = "threads", gpus_;
  int64_t ring_ = 0, minibatch_ = 4096, saved_rows_ = -1;
  int64_t workers_ = 0, comm_workers_ = 1;
  double arrival_ = 600, progress_ = 60;
  bool virtual_ = false;
  int64_t sm_reserve_ = 0, comm_blocks_ = 0;
};

// Reads the routing's file, if it is one; what is wrong with it names --routing.
problem::Problem make_problem(const Spec& spec, uint64_t seed);

std::vector<std::string> split(const std::string& text, char separator);
int64_t parse_integer(const std::string& option, const std::string& text);
void require(bool good, const std::string& option, const std::string& what);

}  // namespace mok::cli
