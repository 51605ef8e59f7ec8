// Host: starts a direction's kernel.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/check.h"
#include "cuda/launch.h"
#include "cuda/layer_kernel.cuh"
#include "mok/cuda.h"

namespace mok::cuda {

// Says how much shared memory the kernel takes, once for each GPU.
template <class Direction, int kRanks>
void allow_shared_memory(int device) {
  static std::mutex mutex;
  static std::vector<bool> said;  // of each GPU
  const std::lock_guard lock(mutex);
  const auto place = static_cast<size_t>(device);
  if (place < said.size() && said[place]) return;
  constexpr int kBytes = sizeof(LayerShared<Direction>);
  static_assert(kBytes <= 227 * 1024);
  check(cudaFuncSetAttribute(layer_kernel<Direction, kRanks>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "shared memory of the layer's kernel");
  if (place >= said.size()) said.resize(place + 1);
  said[place] = true;
}

template <class Direction, int kRanks, class Args>
void launch_for(const Launch<Args>& l) {
  auto params = std::make_unique<LayerParams<Direction, kRanks>>();
  params->ranks_here = static_cast<int32_t>(l.ranks.size());
  for (size_t i = 0; i < l.ranks.size(); ++i) {
    const auto& [state, args, maps] = l.ranks[i];
    params->rank[i] = state;
    if constexpr (Direction::template Tensors<kRanks>::kTall) params->rank[i].tail_rows = kTailRows;
    fill_products(state, l.shape, *args, *maps, &params->tensors[i]);
  }
  constexpr int kBytes = sizeof(LayerShared<Direction>);
  static_assert(sizeof(LayerParams<Direction, kRanks>) <= 32764);
  static_assert(kFetchTaskRows == kMostEntries && kFetchTaskCopies == kMostCopies);
  allow_shared_memory<Direction, kRanks>(l.device);
  layer_kernel<Direction, kRanks><<<l.blocks, kThreads, kBytes, l.stream>>>(*params);
  check(cudaGetLastError(), "launch of the layer's kernel");
}

// Two kernels: the usual one of a rank for each GPU, and one for ranks that share a GPU.
template <class Direction, class Args>
void launch_layer(const Launch<Args>& l) {
  constexpr int kMost = most_ranks_of_a_gpu(Direction::kFp8 ? Precision::fp8 : Precision::bf16);
  l.ranks.size() == 1 ? launch_for<Direction, 1>(l) : launch_for<Direction, kMost>(l);
}

}  // namespace mok::cuda
