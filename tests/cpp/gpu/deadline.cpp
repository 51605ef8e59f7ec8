// Peers that never come and work that never gets done: an error that says so, and the next call
// gives the right bits.
#include <gtest/gtest.h>

#include <chrono>
#include <regex>
#include <thread>

#include "gpu/checks.h"
#include "support/foreign_kernel.h"

namespace mok::testing {
namespace {

using cuda::Fault;

// Arrival has more time, as by default: whatever waits for a peer behind the scenes must grant it.
LayerSetup hasty(const std::vector<int64_t>& tokens) {
  LayerSetup s = virtual_ranks(tokens);
  s.options.deadlines = {1, 0.4};
  return s;
}

// The call must fail with a deadline whose text matches `pattern`.
template <class Call>
void expect_deadline(const std::string& pattern, Call&& call) {
  const auto begin = std::chrono::steady_clock::now();
  std::string text;
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::deadline) << e.what();
    text = e.what();
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  ASSERT_NE(text, "") << "no error";
  std::cout << text << "\n";
  EXPECT_GE(seconds, text.find("arrived") != text.npos ? 0.9 : 0.35);
  EXPECT_LT(seconds, 5);
  EXPECT_TRUE(std::regex_search(text, std::regex(pattern))) << text;
  std::smatch found;
  ASSERT_TRUE(std::regex_search(text, found, std::regex("seen ([0-9]+), awaited ([0-9]+)")))
      << text;
  EXPECT_LT(std::stol(found[1]), std::stol(found[2])) << text;
}

void expect_untouched(const GpuLayer& layer) {
  for (const bf16 v : layer.y()) ASSERT_EQ(v.bits, 0xffff) << "y was written";
}

void expect_fault(GpuLayer& layer, const Fault& fault, const std::string& pattern) {
  layer.poison();
  expect_deadline(pattern, [&] {
    layer.workspace().inject(fault);
    layer.enqueue();
    layer.workspace().synchronize();
  });
}

void expect_usable_context() {
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  Device memory(0);
  const std::vector<float> there(1000, 1.5f);
  EXPECT_EQ(download(memory.put(there), there.size()), there);
  ForeignKernel other(0, {});
  EXPECT_TRUE(other.is_resident(2));
}

Fault absent(int rank) {
  Fault f;
  f.absent_rank = rank;
  return f;
}

Fault losing(int rank, Fault::Queue queue) {
  Fault f;
  f.losing_rank = rank;
  f.lost = queue;
  return f;
}

TEST(GpuDeadline, a_peer_that_never_comes) {
  GpuLayer layer(hasty({200, 0, 133}));
  const auto good = layer.forward();
  for (const int rank : {2, 0, 1}) {
    const std::string who = std::to_string(rank);
    expect_fault(layer, absent(rank),
                 "^rank [0-2] waited too long in schedule for rank " + who + ", arrived\\[" + who +
                     "\\]: seen [01], awaited [12]$");
    expect_untouched(layer);
    expect_usable_context();
    expect_same_bits(good, layer.forward(), "after the deadline");
  }
}

// The number of the call is what a flag shows.
TEST(GpuDeadline, the_values_are_those_of_the_flag) {
  GpuLayer layer(hasty({50, 60}));
  const auto good = layer.forward();
  layer.forward();
  expect_fault(layer, absent(1), "^rank 0 .* for rank 1, arrived\\[1\\]: seen 2, awaited 3$");
  expect_same_bits(good, layer.forward(), "after the deadline");
  expect_fault(layer, absent(0), "^rank 1 .* for rank 0, arrived\\[0\\]: seen 1, awaited 2$");
  expect_same_bits(good, layer.forward(), "after the second");
}

// One block, so that tasks are waited for in the plan's order and the first wait is known.
TEST(GpuDeadline, a_lost_task_is_named) {
  LayerSetup s = hasty({840});
  s.shape.shared_intermediate = 0;
  s.shape.shared_gate = false;
  s.options.sm_reserve = 10000;
  GpuLayer layer(s);
  const auto good = layer.forward();
  expect_fault(layer, losing(0, Fault::schedule),
               "^rank 0 waited too long in schedule for published: seen [0-9]+, awaited [0-9]+$");
  expect_same_bits(good, layer.forward(), "after a lost step of the schedule");
  expect_fault(layer, losing(0, Fault::compute),
               "^rank 0 waited too long in down for hidden\\[0\\]: seen 2, awaited 3$");
  expect_untouched(layer);
  expect_same_bits(good, layer.forward(), "after a lost tile");
  expect_fault(
      layer, losing(0, Fault::communication),
      "^rank 0 waited too long in gate_up for fetched\\[0\\]: seen [0-9]+, awaited [0-9]+$");
  expect_same_bits(good, layer.forward(), "after a lost fetch");
}

// All blocks: whichever wait that hangs on the lost task runs out first.
TEST(GpuDeadline, a_lost_task_among_many_blocks) {
  LayerSetup s = hasty({500, 340});
  s.shape.shared_gate = false;  // else the first ticket of compute is sigma's, part of reduce here
  GpuLayer layer(s);
  const auto good = layer.forward();
  for (const int rank : {0, 1}) {
    for (const auto& [queue, waits] :
         {std::pair{Fault::schedule, "published|arrived"},
          std::pair{Fault::compute, "shared_hidden|shared_rows|hidden|pushed|returned_flag"},
          std::pair{Fault::communication, "staged|fetched|hidden|pushed|returned_flag"}}) {
      expect_fault(layer, losing(rank, queue),
                   "^rank [01] waited too long in [a-z_]+ for (rank [01], )?(" +
                       std::string(waits) + ")[a-z_]*(\\[[0-9]+\\])?: ");
      expect_same_bits(good, layer.forward(), "after the deadline");
    }
  }
}

TEST(GpuDeadline, the_next_call_raises_it_too) {
  GpuLayer layer(hasty({50, 60}));
  const auto good = layer.forward();
  expect_deadline("rank 1, arrived", [&] {
    layer.workspace().inject(absent(1));
    layer.enqueue();
    cuda::check(cudaDeviceSynchronize(), "the failing call");
    layer.enqueue();  // raises and starts nothing
  });
  expect_same_bits(good, layer.forward(), "after the deadline");
}

// Rank 1's blocks find no SM until somebody else has gone.
TEST(GpuDeadline, a_late_peer_is_waited_for) {
  LayerSetup s = hasty({200, 133});
  s.options.deadlines = {8, 0.4};
  GpuLayer layer(s);
  const Stream stream;
  const auto good = stream.forward(layer);
  ForeignKernel other(0, ForeignKernel::all_but(0, 1));
  ASSERT_TRUE(other.is_resident(2));
  stream.poison(layer);
  layer.enqueue();
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  EXPECT_TRUE(stream.is_busy()) << "rank 1 ran without an SM";
  other.stop();
  expect_same_bits(good, stream.y(layer), "after a late peer");
  layer.workspace().synchronize();
}

// Past the deadline, its blocks come after the others have left: they leave too.
TEST(GpuDeadline, a_peer_that_comes_too_late) {
  GpuLayer layer(hasty({200, 133}));
  const Stream stream;
  const auto good = stream.forward(layer);
  layer.poison();
  ForeignKernel other(0, ForeignKernel::all_but(0, 1));
  ASSERT_TRUE(other.is_resident(2));
  expect_deadline("^rank 0 waited too long in schedule for rank 1, arrived\\[1\\]", [&] {
    layer.enqueue();
    stream.wait();  // ends although the SMs are still held
    EXPECT_TRUE(other.is_running());
    other.stop();
    layer.workspace().synchronize();
  });
  expect_untouched(layer);
  expect_same_bits(good, stream.forward(layer), "after the deadline");
}

}  // namespace
}  // namespace mok::testing
