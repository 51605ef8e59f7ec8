// Which experts a token goes to: the routing kinds of `mok run --routing`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mok/types.h"
#include "problem/random.h"

namespace mok::problem {

struct Routing {
  enum class Kind {
    uniform,     // K distinct experts, all alike
    zipf,        // K distinct experts, weights rank^-exponent over a seed-shuffled order
    one_expert,  // slot 0 of every token goes to expert 0, the other slots are -1
    none,        // all -1
    file,        // an integer [G, K] array
  };
  Kind kind = Kind::uniform;
  double exponent = 0;
  std::string path;
};

// "uniform", "zipf:1.2", "one-expert", "none", "file:ids.npy". Throws bad_argument (names routing).
Routing parse_routing(const std::string& text);
std::string to_string(const Routing& routing);

// The ids of any token, computed when asked for.
class Routes {
 public:
  // Reads the file of kind file. Throws bad_argument (names routing) unless it is [G, K] with ids
  // in
  // [-1, E).
  Routes(const Routing& routing, const LayerShape& shape, int64_t tokens, uint64_t seed);
  void ids(int64_t token, int64_t* out) const;  // out: [K]

 private:
  int draw_zipf(double u, const int64_t* taken, int n) const;

  Routing::Kind kind_;
  int experts_, topk_;
  Stream stream_;
  std::vector<int> order_;          // zipf: [E] expert of each popularity rank
  std::vector<double> weight_;      // zipf: [E] by popularity rank
  std::vector<double> cumulative_;  // zipf: [E]
  std::vector<int64_t> file_;       // [G, K]
};

}  // namespace mok::problem
