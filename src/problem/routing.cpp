#include "problem/routing.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "mok/error.h"
#include "problem/npy.h"
#include "problem/streams.h"

namespace mok::problem {
namespace {

[[noreturn]] void bad(const std::string& what) {
  throw Error(ErrorCode::bad_argument, "routing: " + what);
}

// n^-a, n >= 1, from IEEE operations alone: libm's pow may differ in its last bit from machine to
// machine. ln by the series of atanh over [1, 2), exp by Taylor over [0, ln 2].
double inverse_power(int n, double a) {
  constexpr double kLn2 = 0.6931471805599453;
  int e = 0;
  const double m = std::frexp(static_cast<double>(n), &e) * 2;  // n = m * 2^(e - 1), m in [1, 2)
  const double z = (m - 1) / (m + 1), zz = z * z;
  double series = 0;
  for (int k = 39; k >= 1; k -= 2) series = series * zz + 1.0 / k;
  const double exponent = a * (2 * z * series + (e - 1) * kLn2);  // n^-a = exp(-exponent)
  if (exponent > 700) return 0;
  const int halvings = static_cast<int>(exponent / kLn2);
  const double r = halvings * kLn2 - exponent;
  double power = 1;
  for (int k = 24; k >= 1; --k) power = 1 + power * r / k;
  return std::ldexp(power, -halvings);
}

bool contains(const int64_t* ids, int n, int64_t id) {
  return std::find(ids, ids + n, id) != ids + n;
}

}  // namespace

Routing parse_routing(const std::string& text) {
  if (text == "uniform") return {Routing::Kind::uniform, 0, {}};
  if (text == "one-expert") return {Routing::Kind::one_expert, 0, {}};
  if (text == "none") return {Routing::Kind::none, 0, {}};
  if (text.starts_with("file:")) {
    if (text.size() == 5) bad("'file:' wants a path");
    return {Routing::Kind::file, 0, text.substr(5)};
  }
  if (text.starts_with("zipf:")) {
    double a = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + 5, end, a);
    if (error != std::errc() || stop != end || !std::isfinite(a) || a < 0) {
      bad("'" + text + "': the exponent of zipf:A is a number >= 0");
    }
    return {Routing::Kind::zipf, a, {}};
  }
  bad("'" + text + "' is none of uniform, zipf:A, one-expert, none, file:IDS.npy");
}

std::string to_string(const Routing& routing) {
  switch (routing.kind) {
    case Routing::Kind::uniform:
      return "uniform";
    case Routing::Kind::one_expert:
      return "one-expert";
    case Routing::Kind::none:
      return "none";
    case Routing::Kind::file:
      return "file:" + routing.path;
    case Routing::Kind::zipf:
      break;
  }
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, routing.exponent).ptr;
  return "zipf:" + std::string(digits, end);
}

Routes::Routes(const Routing& routing, const LayerShape& shape, int64_t tokens, uint64_t seed)
    : kind_(routing.kind),
      experts_(shape.experts),
      topk_(shape.topk),
      stream_(seed, streams::kIds) {
  if (kind_ == Routing::Kind::zipf) {
    order_.resize(static_cast<size_t>(experts_));
    std::iota(order_.begin(), order_.end(), 0);
    const Stream shuffle(seed, streams::kOrder);
    for (int i = experts_ - 1; i > 0; --i) {
      std::swap(order_[i], order_[shuffle.below(i, static_cast<uint32_t>(i + 1))]);
    }
    double sum = 0;
    for (int rank = 0; rank < experts_; ++rank) {
      weight_.push_back(inverse_power(rank + 1, routing.exponent));
      cumulative_.push_back(sum += weight_.back());
    }
  }
  if (kind_ == Routing::Kind::file) {
    NpyInts file = read_npy_ints(routing.path);
    const std::vector<int64_t> want = {tokens, topk_};
    const bool column = topk_ == 1 && file.shape == std::vector<int64_t>{tokens};
    if (file.shape != want && !column) {
      bad(routing.path + " has shape " + shape_text(file.shape) + ", wanted " + shape_text(want) +
          " (tokens of all ranks, top-k)");
    }
    for (size_t i = 0; i < file.values.size(); ++i) {
      if (file.values[i] < -1 || file.values[i] >= experts_) {
        bad(routing.path + ": token " + std::to_string(i / topk_) + ", slot " +
            std::to_string(i % topk_) + ": expert " + std::to_string(file.values[i]) +
            " is outside [-1, " + std::to_string(experts_) + ")");
      }
    }
    file_ = std::move(file.values);
  }
}

// The popularity ranks not in `taken`, by weight; u in [0, 1).
int Routes::draw_zipf(double u, const int64_t* taken, int n) const {
  double left = 0;
  for (int rank = 0; rank < experts_; ++rank) {
    if (!contains(taken, n, order_[rank])) left += weight_[rank];
  }
  double target = u * left;
  int last = -1;
  for (int rank = 0; rank < experts_; ++rank) {
    if (contains(taken, n, order_[rank])) continue;
    // Weights that underflowed are all 0: the most popular rank left is as good as any.
    if (target < weight_[rank] || left == 0) return rank;
    target -= weight_[rank];
    if (weight_[rank] > 0) last = rank;
  }
  return last;  // rounding carried the target past the end
}

void Routes::ids(int64_t token, int64_t* out) const {
  std::fill(out, out + topk_, -1);
  // Draws of this token: counters token * 2^20 + 0, 1, ...
  uint64_t counter = static_cast<uint64_t>(token) << 20;
  switch (kind_) {
    case Routing::Kind::none:
      break;
    case Routing::Kind::one_expert:
      out[0] = 0;
      break;
    case Routing::Kind::file:
      std::copy_n(file_.begin() + token * topk_, topk_, out);
      break;
    case Routing::Kind::uniform:
      for (int k = 0; k < topk_; ++k) {
        do {
          out[k] = stream_.below(counter++, static_cast<uint32_t>(experts_));
        } while (contains(out, k, out[k]));
      }
      break;
    case Routing::Kind::zipf:
      for (int k = 0; k < topk_; ++k) {
        // Drawing anew after a repetition is the same distribution as drawing from what is left;
        // a steep one would repeat for ever, so after some tries the sum over the rest is taken.
        for (int tries = 0; out[k] < 0; ++tries) {
          const double u = stream_.uniform(counter++);
          int rank = 0;
          if (tries < 16) {
            const double target = u * cumulative_.back();
            const auto at = std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, target);
            rank = static_cast<int>(at - cumulative_.begin());
          } else {
            rank = draw_zipf(u, out, k);
          }
          if (!contains(out, k, order_[rank])) out[k] = order_[rank];
        }
      }
      break;
  }
}

}  // namespace mok::problem
