#include "cli/check_cases.h"

#include "problem/random.h"

namespace mok::cli {
namespace {

constexpr float kNoLimit = std::numeric_limits<float>::infinity();

LayerShape shape(int64_t hidden, int64_t inter, int experts, int topk, int64_t shared = 0,
                 bool gate = false, float limit = kNoLimit) {
  return {hidden, inter, experts, topk, shared, gate, limit};
}

}  // namespace

std::vector<CheckCase> check_cases() {
  std::vector<CheckCase> all;
  const auto add = [&](CheckCase c) { all.push_back(std::move(c)); };

  // Rows beside the edges of a tile, of one expert.
  for (const int64_t rows : {1, 127, 128, 129, 144, 145, 255, 257}) {
    add({"rows " + std::to_string(rows), shape(128, 128, 2, 1), {rows}, "one-expert"});
  }
  // Sizes beside the edges of a column tile.
  add({"H 64, I 64", shape(64, 64, 4, 2), {96}});
  add({"H 192, I 320", shape(192, 320, 4, 2), {70, 58}});
  add({"H 320, I 192", shape(320, 192, 4, 2), {70, 58}});
  add({"H 576, I 448", shape(576, 448, 4, 2), {50}});
  add({"H 7, I 5", shape(7, 5, 3, 2), {33}});
  add({"H 1, I 1", shape(1, 1, 2, 1), {40}});
  add({"H 257, I 129", shape(257, 129, 4, 2), {40, 25}});
  // K and E.
  add({"K 1", shape(128, 64, 8, 1), {100}});
  add({"K 8 of 8", shape(128, 64, 8, 8), {40}});
  add({"K 64", shape(64, 64, 64, 64), {9, 8}});
  add({"E 1", shape(128, 128, 1, 1), {130}});
  add({"E 256", shape(64, 64, 256, 8), {48, 48}});
  add({"E 4096", shape(64, 64, 4096, 4), {64}});
  // Ranks, even and not, and the same problem at every split and size of the ring.
  const LayerShape split = shape(192, 128, 24, 3, 64, true, 3);
  add({"EP 1", split, {480}, "zipf:1.2", Precision::bf16, 0, 4096, -1, false, "split"});
  add({"EP 2", split, {240, 240}, "zipf:1.2", Precision::bf16, 0, 4096, -1, false, "split"});
  add({"EP 3, uneven",
       split,
       {1, 400, 79},
       "zipf:1.2",
       Precision::bf16,
       0,
       4096,
       -1,
       false,
       "split"});
  add({"EP 4, a rank without tokens",
       split,
       {200, 0, 150, 130},
       "zipf:1.2",
       Precision::bf16,
       0,
       4096,
       -1,
       false,
       "split"});
  add({"EP 8",
       split,
       {60, 60, 60, 60, 60, 60, 60, 60},
       "zipf:1.2",
       Precision::bf16,
       0,
       4096,
       -1,
       false,
       "split"});
  add({"ring 256: refills",
       split,
       {480},
       "zipf:1.2",
       Precision::bf16,
       256,
       128,
       -1,
       false,
       "split"});
  add({"ring 512, EP 2: refills",
       split,
       {100, 380},
       "zipf:1.2",
       Precision::bf16,
       512,
       256,
       -1,
       false,
       "split"});
  add({"nothing saved",
       split,
       {240, 240},
       "zipf:1.2",
       Precision::bf16,
       512,
       128,
       0,
       false,
       "split"});
  add({"300 rows saved",
       split,
       {240, 240},
       "zipf:1.2",
       Precision::bf16,
       256,
       128,
       300,
       false,
       "split"});
  add({"EP 2, processes",
       split,
       {240, 240},
       "zipf:1.2",
       Precision::bf16,
       0,
       4096,
       -1,
       true,
       "split"});
  // Routings.
  const LayerShape plain = shape(128, 192, 8, 2);
  add({"one expert, EP 2", plain, {150, 150}, "one-expert"});
  add({"one expert, refills", plain, {300, 300}, "one-expert", Precision::bf16, 256, 128});
  add({"no slot routes", plain, {40, 30}, "none"});
  add({"no slot routes, shared", shape(128, 64, 8, 2, 64), {40, 30}, "none"});
  add({"-1 and repeated experts", plain, {90, 60}, "holes"});
  add({"no tokens at all", plain, {0, 0}});
  add({"one token", plain, {0, 1}});
  add({"zipf:3", plain, {200, 100}, "zipf:3"});
  // Shared expert and limits.
  add({"shared", shape(128, 64, 8, 2, 192), {60, 70}});
  add({"shared, gated", shape(192, 64, 8, 2, 128, true), {129, 70}});
  add({"shared of odd width, gated", shape(96, 40, 8, 2, 33, true), {60, 70}});
  add({"limit 0.5", shape(128, 128, 8, 2, 0, false, 0.5F), {80, 60}});
  add({"limit 1, shared, gated", shape(128, 128, 8, 2, 64, true, 1), {80, 60}});
  // Precisions.
  add({"fp32", shape(160, 96, 8, 2, 64, true), {100, 70}, "uniform", Precision::fp32});
  add({"fp32, refills", shape(96, 96, 8, 2), {300}, "zipf:2", Precision::fp32, 256, 128, 0});
  add({"fp64", shape(160, 96, 8, 2, 64, true), {100, 70}, "uniform", Precision::fp64});
  add({"fp64, odd sizes",
       shape(37, 29, 6, 3, 11, false, 1),
       {50, 33, 1},
       "uniform",
       Precision::fp64});
  // Quantised: sizes with partial blocks, the same problem at several splits, refills, holes.
  for (const Precision p : {Precision::mxfp8, Precision::fp8}) {
    const std::string name = p == Precision::mxfp8 ? "mxfp8" : "fp8";
    add({name, shape(160, 96, 8, 2, 64, true), {100, 70}, "uniform", p});
    add({name + ", odd sizes", shape(137, 203, 6, 3, 11, false, 1), {50, 33, 1}, "uniform", p});
    add({name + ", holes", plain, {90, 60}, "holes", p});
    const auto in_group = [&](const char* what, std::vector<int64_t> tokens, int64_t ring,
                              int64_t minibatch, int64_t saved, bool processes) {
      add({name + what, split, std::move(tokens), "zipf:1.2", p, ring, minibatch, saved, processes,
           name + " split"});
    };
    in_group(", 1 rank", {480}, 0, 4096, -1, false);
    in_group(", 2 ranks, refills", {100, 380}, 512, 256, -1, false);
    in_group(", 2 ranks, nothing saved", {240, 240}, 512, 128, 0, false);
    in_group(", 4 ranks, one empty", {200, 0, 150, 130}, 256, 128, 300, false);
    in_group(", 2 ranks, processes", {240, 240}, 0, 4096, -1, true);
  }
  return all;
}

std::vector<int64_t> ids_with_holes(const LayerShape& shape, int64_t tokens) {
  const problem::Stream random(11, 0);
  std::vector<int64_t> ids(static_cast<size_t>(tokens * shape.topk));
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool hole = random.below(2 * i, 3) == 0;
    const int64_t expert = random.below(2 * i + 1, static_cast<uint32_t>(shape.experts));
    ids[i] = hole ? -1 : expert;
  }
  return ids;
}

}  // namespace mok::cli
