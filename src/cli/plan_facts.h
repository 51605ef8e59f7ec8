// A problem's plan on the host, and the numbers that are read off it.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "cli/spec.h"
#include "plan/layout.h"
#include "plan/validate.h"

namespace mok::cli {

// The ids of each rank.
class RankIds {
 public:
  RankIds(const Spec& spec, const problem::Problem& problem);
  const int32_t* const* pointers() const { return pointers_.data(); }

 private:
  std::vector<std::vector<int32_t>> ids_;
  std::vector<const int32_t*> pointers_;
};

// One direction's plans, of every rank.
std::vector<std::unique_ptr<plan::HostPlan>> make_plans(const Spec& spec, const RankIds& ids,
                                                        plan::Direction direction);
using Plans = std::vector<std::unique_ptr<plan::HostPlan>>;

struct Links {
  // bytes[from][to] that cross from one rank's memory to another's in one call: rows that are
  // pulled and pushed, ids, router weights and their gradients. Flags are left out.
  std::array<std::array<int64_t, kMaxRanks>, kMaxRanks> bytes = {};
  int64_t total() const;
  int64_t busiest() const;  // the most that one rank sends or receives
};
// `distinct[r]`: where rank r lives; ranks of one place have no link between them.
Links links(const Spec& spec, const Plans& plans, const std::vector<int>& place = {});

struct Rows {
  int64_t real = 0, padded = 0;  // of all ranks; padded: whole tiles
  double padding_share() const {
    return padded == 0 ? 0 : 1 - static_cast<double>(real) / static_cast<double>(padded);
  }
};
Rows rows(const Plans& plans);

}  // namespace mok::cli
