// Beside kernels of others that hold SMs: the layer finishes on what is left.
#include <gtest/gtest.h>

#include "gpu/checks.h"
#include "support/foreign_kernel.h"

namespace mok::testing {
namespace {

LayerSetup reserving(std::vector<int64_t> tokens, int sm_reserve, int64_t ring = 0) {
  LayerSetup s = virtual_ranks(tokens);
  s.options.sm_reserve = sm_reserve;
  s.options.workspace.ring_rows = ring;
  s.options.workspace.minibatch_rows = ring > 0 ? 128 : 4096;
  return s;
}

// One SM for each rank is left.
void expect_finish(const LayerSetup& setup) {
  GpuLayer layer(setup);
  const Stream stream;
  const auto expected = stream.forward(layer);
  ForeignKernel other(0, ForeignKernel::all_but(0, static_cast<int>(setup.tokens.size())));
  ASSERT_TRUE(other.is_resident(2));
  for (int i = 0; i < 3; ++i) {
    expect_same_bits(expected, stream.forward(layer), "beside a neighbour");
    ASSERT_TRUE(other.is_running()) << "the layer waited for its neighbour";
  }
  other.stop();
  layer.workspace().synchronize();
  expect_same_bits(expected, stream.forward(layer), "alone again");
}

TEST(GpuNeighbour, all_but_one_sm_is_taken) { expect_finish(reserving({840}, 0)); }
TEST(GpuNeighbour, all_but_one_sm_is_taken_ring_refills) {
  expect_finish(reserving({840}, 0, 512));
}
TEST(GpuNeighbour, all_but_one_sm_of_each_rank_is_taken) {
  expect_finish(reserving({200, 133, 0, 500}, 0));
}
TEST(GpuNeighbour, all_but_one_sm_is_taken_with_reserve) {
  for (const int reserve : {1, 32, 131, 1000}) expect_finish(reserving({840}, reserve));
}

// Reserved SMs can be had while the layer holds its own, here because a peer does not come.
TEST(GpuNeighbour, reserved_sms_are_free) {
  constexpr int kReserve = 16;
  LayerSetup s = reserving({200, 133}, kReserve);
  s.options.deadlines = {3, 3};
  GpuLayer layer(s);
  const Stream stream;
  const auto expected = stream.forward(layer);
  ForeignKernel::Load load;
  load.blocks = kReserve;
  ForeignKernel(0, load).stop();  // loads its code, which cannot be done beside a running kernel
  cuda::Fault fault;
  fault.absent_rank = 1;
  layer.workspace().inject(fault);
  layer.enqueue();
  ForeignKernel other(0, load);
  EXPECT_TRUE(other.is_resident(1));
  EXPECT_TRUE(stream.is_busy()) << "the layer has ended before its deadline";
  other.stop();
  EXPECT_THROW(layer.workspace().synchronize(), Error);
  expect_same_bits(expected, stream.forward(layer), "after the deadline");
}

// As with collectives that two GPUs start in opposite order: on GPU 1 the neighbour is first, on
// GPU 0 the layer; each neighbour stays until both run.
TEST(GpuNeighbour, collectives_in_opposite_order) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  LayerSetup s = virtual_ranks({200, 133});
  s.devices = {0, 1};
  GpuLayer layer(s);
  const auto expected = layer.forward();
  cudaStream_t streams[2];
  for (int d = 0; d < 2; ++d) {
    const cuda::DeviceGuard guard(d);
    cuda::check(cudaStreamCreateWithFlags(&streams[d], cudaStreamNonBlocking), "stream");
    layer.streams()[d] = streams[d];
  }
  for (int i = 0; i < 10; ++i) {
    layer.poison();
    ForeignKernel first(1, ForeignKernel::all_but(1, 1));
    layer.enqueue();
    ForeignKernel second(0, ForeignKernel::all_but(0, 1));
    EXPECT_TRUE(first.is_resident(5) && second.is_resident(5));
    first.stop();
    second.stop();
    layer.workspace().synchronize();
    ASSERT_TRUE(same_bits(expected, layer.y())) << "round " << i;
  }
  for (int d = 0; d < 2; ++d) cudaStreamDestroy(streams[d]);
}

}  // namespace
}  // namespace mok::testing
