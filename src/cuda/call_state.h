// What the kernel is told of one rank for one call. Arguments are checked.
#pragma once

#include "cuda/local_rank.h"

namespace mok::cuda {

RankState forward_state(const LocalRank& rank, const LayerShape& shape, const ForwardArgs& args);
RankState backward_state(LocalRank& rank, const LayerShape& shape, const BackwardArgs& args,
                         const plan::Wanted& wanted);

}  // namespace mok::cuda
