// Checks of what a caller gives, before anything is written or any peer is met. Each throws
// bad_argument with a message that names the rank and the argument.
#pragma once

#include "cpu/call.h"

namespace mok::cpu {

void check_workspace(const Group& group, const LayerShape& shape, Precision precision,
                     const WorkspaceOptions& options);

// Where the checks of one call read what they need.
struct Limits {
  const LayerShape& shape;
  int rank = 0, ranks = 1;
  int64_t max_tokens = 0;
  Precision precision = Precision::bf16;
};
void check_forward(const Limits& limits, const CallArgs& args);
void check_backward(const Limits& limits, const CallArgs& args);

// What backward computes for these arguments, as bits of a tag. A rank without tokens has no
// opinion on outputs that would be empty: see `indifferent_bits`.
enum : int32_t {
  kWantDx = 1,
  kWantTopk = 2,
  kWantGate = 4,
  kWantUp = 8,
  kWantDown = 16,
  kWantSharedGate = 32,
  kWantSharedUp = 64,
  kWantSharedDown = 128,
  kWantSharedVector = 256,
};
int32_t wanted_bits(const CallArgs& args);
int32_t indifferent_bits(const CallArgs& args);
plan::Wanted to_wanted(int32_t bits);
std::string describe_wanted(int32_t bits);

}  // namespace mok::cpu
