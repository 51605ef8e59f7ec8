// What a subcommand was asked to do, after all checks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mok/layer.h"
#include "plan/geometry.h"
#include "problem/problem.h"

namespace mok::cli {

enum class Device { cpu, cuda };

struct Spec {
  std::string model;  // empty: the shape was given by its sizes
  std::string note;   // of the preset
  LayerShape shape;
  std::vector<int64_t> tokens;  // of each rank
  problem::Routing routing;
  uint64_t seed = 1;
  Precision precision = Precision::bf16;
  bool backward = true;
  GradMode grads = GradMode::sum;  // of all weight gradients; never none
  Device device = Device::cpu;
  WorkspaceOptions workspace;  // max_tokens is filled in
  GroupOptions deadlines;
  bool processes = false;  // CPU: ranks are processes
  int repeat = 1;
  int warm_up = 0;           // calls before those that are timed
  bool compare_bits = true;  // every repeat must give the bits of the first

  // CUDA
  std::vector<int> gpus;  // GPU of each rank
  int comm_blocks = 0;
  int sm_reserve = 0;

  int ranks() const { return static_cast<int>(tokens.size()); }
  int64_t global_tokens() const;
  int64_t first_token(int rank) const;
  int experts_local() const { return shape.experts / ranks(); }
  int physical_gpus() const;  // CUDA: GPUs that the ranks share
  bool is_virtual() const { return device == Device::cuda && physical_gpus() < ranks(); }
};

const char* to_string(Precision precision);
const char* to_string(Device device);
const char* to_string(GradMode grads);  // as --grads names them

// Sizes as the executors choose them from these options, for any rank.
plan::Geometry geometry(const Spec& spec, plan::Direction direction);

}  // namespace mok::cli
