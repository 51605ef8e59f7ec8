#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "mok/error.h"
#include "numerics/bf16.h"

namespace mok::reference {
namespace {

using Vector = std::vector<double>;

double to_bf16_value(double v) { return numerics::to_float(numerics::to_bf16(v)); }

// The nearest of 0, +-2^-9 .. +-448, ties to even; NaN stays one.
double to_e4m3_value(double v) {
  if (!(std::fabs(v) < 448)) return std::isnan(v) ? v : std::copysign(448.0, v);
  const int exponent = std::max(v == 0 ? 0 : std::ilogb(v), -6);  // of numbers with 3 fraction bits
  const double step = std::ldexp(1.0, exponent - 3);
  return std::nearbyint(v / step) * step;
}

double sigmoid(double v) { return 1 / (1 + std::exp(-v)); }
double silu(double v) { return v * sigmoid(v); }
double silu_slope(double v) { return sigmoid(v) * (1 + v * (1 - sigmoid(v))); }

// In eight partial sums, for speed alone.
double dot(const double* a, const double* b, int64_t n) {
  double lane[8] = {};
  const int64_t whole = n / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    for (int l = 0; l < 8; ++l) lane[l] += a[i + l] * b[i + l];
  }
  double sum = 0;
  for (const double v : lane) sum += v;
  for (int64_t i = whole; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// out += factor * row
void add_scaled(double* out, double factor, const double* row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += factor * row[i];
}

// One row of an expert: which token it is, and the factor of its result.
struct Row {
  int64_t token;
  double weight;
};

struct RowResults {
  Vector r;         // [n, H]
  Vector d_x;       // [n, H]  d_g . w_gate + d_u . w_up
  Vector d_weight;  // [n]     d_h . h
};

class Layer {
 public:
  explicit Layer(const Inputs& in) : in_(in), H(in.shape.hidden), L(in.shape.swiglu_limit) {}

  double round(double v) const { return in_.round_bf16 ? to_bf16_value(v) : v; }

  enum class Kind { routed, shared };  // only a routed expert's operands are quantised

  // What an expert of width I does to its rows; adds its weight gradients to *d.
  RowResults expert(Kind kind, const Expert& w, int64_t I, const std::vector<Row>& rows,
                    Expert* d) const {
    const int64_t n = static_cast<int64_t>(rows.size());
    const bool rounds = kind == Kind::routed && in_.blocks.length > 0;
    const auto rounded = [&](const Vector& m, int64_t columns) {  // along rows
      return rounds ? quantized(m, n, columns, 1, in_.blocks.length) : m;
    };
    RowResults out;

    // Forward contracts over the columns of a weight, backward over its rows.
    const auto [length, across] = in_.blocks;
    const Expert w_q = rounds ? quantized(w, I, across, length) : Expert{};
    const Expert w_t = rounds && d ? quantized(w, I, length, across) : Expert{};
    const Expert& forward = rounds ? w_q : w;
    const Expert& backward = rounds ? w_t : w;
    const Vector x = rounded(gather(in_.x, rows), H);  // [n, H]

    // g, u [n, I]
    Vector g(n * I), u(n * I), h(n * I);
    for (int64_t i = 0; i < I; ++i) {
      for (int64_t row = 0; row < n; ++row) {
        g[row * I + i] = round(dot(&x[row * H], &forward.gate[i * H], H));
        u[row * I + i] = round(dot(&x[row * H], &forward.up[i * H], H));
      }
    }
    // h = silu(min(g, L)) * clamp(u, -L, L)
    for (int64_t j = 0; j < n * I; ++j) h[j] = round(silu(below(g[j])) * between(u[j]));
    h = rounded(h, I);

    out.r.resize(n * H);
    for (int64_t j = 0; j < H; ++j) {
      for (int64_t row = 0; row < n; ++row) {
        out.r[row * H + j] = round(dot(&h[row * I], &forward.down[j * I], I));
      }
    }
    if (!d) return out;

    // d_h = d_y . w_down, without the weight
    const Vector d_y = rounded(gather(in_.d_y, rows), H);  // [n, H]
    Vector d_h(n * I);
    for (int64_t j = 0; j < H; ++j) {
      for (int64_t row = 0; row < n; ++row) {
        add_scaled(&d_h[row * I], d_y[row * H + j], &backward.down[j * I], I);
      }
    }
    for (double& v : d_h) v = round(v);

    out.d_weight.resize(n);
    for (int64_t row = 0; row < n; ++row) {
      out.d_weight[row] = dot(&d_h[row * I], &h[row * I], I);
    }

    // d_g, d_u [n, I]; a value at its limit passes its gradient, one beyond it does not.
    Vector d_g(n * I), d_u(n * I), weighted_h(n * I);
    for (int64_t row = 0; row < n; ++row) {
      const double weight = rows[row].weight;
      for (int64_t j = row * I; j < (row + 1) * I; ++j) {
        const double gl = below(g[j]), ul = between(u[j]);
        d_g[j] = g[j] > L ? 0 : round(weight * d_h[j] * silu_slope(gl) * ul);
        d_u[j] = u[j] > L || u[j] < -L ? 0 : round(weight * d_h[j] * silu(gl));
        weighted_h[j] = round(weight * h[j]);
      }
    }
    d_g = rounded(d_g, I);
    d_u = rounded(d_u, I);

    for (int64_t j = 0; j < H; ++j) {
      for (int64_t row = 0; row < n; ++row) {
        add_scaled(&d->down[j * I], d_y[row * H + j], &weighted_h[row * I], I);
      }
    }
    out.d_x.resize(n * H);
    for (int64_t i = 0; i < I; ++i) {
      for (int64_t row = 0; row < n; ++row) {
        add_scaled(&d->gate[i * H], d_g[row * I + i], &x[row * H], H);
        add_scaled(&d->up[i * H], d_u[row * I + i], &x[row * H], H);
        add_scaled(&out.d_x[row * H], d_g[row * I + i], &backward.gate[i * H], H);
        add_scaled(&out.d_x[row * H], d_u[row * I + i], &backward.up[i * H], H);
      }
    }
    for (double& v : out.d_x) v = round(v);
    return out;
  }

 private:
  // The rows' tokens [n, H] of a tensor [G, H].
  Vector gather(const Vector& tokens, const std::vector<Row>& rows) const {
    Vector out;
    out.reserve(rows.size() * H);
    for (const Row& row : rows) {
      const auto from = tokens.begin() + row.token * H;
      out.insert(out.end(), from, from + H);
    }
    return out;
  }
  Expert quantized(const Expert& w, int64_t I, int64_t tall, int64_t wide) const {
    return {reference::quantized(w.gate, I, H, tall, wide),
            reference::quantized(w.up, I, H, tall, wide),
            reference::quantized(w.down, H, I, tall, wide)};
  }
  Vector quantized(const Vector& m, int64_t rows, int64_t columns, int64_t tall,
                   int64_t wide) const {
    return reference::quantized(m, rows, columns, tall, wide);
  }
  // NaN passes both.
  double below(double v) const { return v > L ? L : v; }
  double between(double v) const { return v > L ? L : v < -L ? -L : v; }

  const Inputs& in_;
  const int64_t H;
  const double L;
};

Expert zeros(int64_t I, int64_t H) { return {Vector(I * H), Vector(I * H), Vector(H * I)}; }

void require_size(const char* name, size_t have, int64_t want) {
  if (have != static_cast<size_t>(want)) {
    throw Error(ErrorCode::bad_argument, std::string(name) + ": has " + std::to_string(have) +
                                             " elements, the shape wants " + std::to_string(want));
  }
}

int64_t checked_tokens(const Inputs& in) {
  const LayerShape& s = in.shape;
  int64_t G = 0;
  for (const int64_t t : in.rank_tokens) G += t;
  require_size("x", in.x.size(), G * s.hidden);
  require_size("topk_ids", in.topk_ids.size(), G * s.topk);
  require_size("topk_weights", in.topk_weights.size(), G * s.topk);
  if (!in.d_y.empty()) require_size("d_y", in.d_y.size(), G * s.hidden);
  const int64_t shared = s.shared_intermediate * s.hidden;
  require_size("shared.gate", in.shared.gate.size(), shared);
  require_size("shared.up", in.shared.up.size(), shared);
  require_size("shared.down", in.shared.down.size(), shared);
  require_size("shared_gate", in.shared_gate.size(), s.shared_gate ? s.hidden : 0);
  for (size_t slot = 0; slot < in.topk_ids.size(); ++slot) {
    if (in.topk_ids[slot] < -1 || in.topk_ids[slot] >= s.experts) {
      throw Error(ErrorCode::bad_routing, "topk_ids: token " + std::to_string(slot / s.topk) +
                                              ", slot " + std::to_string(slot % s.topk) + ": " +
                                              std::to_string(in.topk_ids[slot]));
    }
  }
  return G;
}

}  // namespace

Vector quantized(const Vector& m, int64_t rows, int64_t columns, int64_t tall, int64_t wide) {
  Vector out(m.size());
  for (int64_t row0 = 0; row0 < rows; row0 += tall) {
    for (int64_t column0 = 0; column0 < columns; column0 += wide) {
      const int64_t row1 = std::min(row0 + tall, rows);
      const int64_t column1 = std::min(column0 + wide, columns);
      double amax = 1e-12;  // NaN is passed over
      for (int64_t r = row0; r < row1; ++r) {
        for (int64_t c = column0; c < column1; ++c) {
          amax = std::fmax(amax, std::fabs(m[r * columns + c]));
        }
      }
      const double unit = std::isinf(amax) ? 0x1p127 : std::exp2(std::ceil(std::log2(amax / 448)));
      for (int64_t r = row0; r < row1; ++r) {
        for (int64_t c = column0; c < column1; ++c) {
          out[r * columns + c] = to_bf16_value(to_e4m3_value(m[r * columns + c] / unit) * unit);
        }
      }
    }
  }
  return out;
}

Outputs run(const Inputs& in, const TakeGradient& take) {
  const LayerShape& shape = in.shape;
  const int64_t G = checked_tokens(in), H = shape.hidden, I = shape.intermediate, K = shape.topk;
  const int64_t I_s = shape.shared_intermediate;
  const bool backward = !in.d_y.empty();
  const Layer layer(in);

  Outputs out;
  Vector y(G * H), d_x(G * H);  // sums, rounded at the end
  out.d_topk_weights.assign(backward ? G * K : 0, 0.0);

  // The shared expert of each rank's own tokens: where the sums over rows begin.
  for (int64_t rank = 0, first = 0; rank < std::ssize(in.rank_tokens); ++rank) {
    const int64_t T = in.rank_tokens[rank];
    Expert d = zeros(I_s, H);
    Vector d_gate(shape.shared_gate ? H : 0);
    if (I_s > 0) {
      std::vector<Row> rows;
      for (int64_t t = first; t < first + T; ++t) {
        rows.push_back(
            {t, shape.shared_gate ? sigmoid(dot(&in.x[t * H], in.shared_gate.data(), H)) : 1.0});
      }
      const RowResults s =
          layer.expert(Layer::Kind::shared, in.shared, I_s, rows, backward ? &d : nullptr);
      for (int64_t row = 0; row < T; ++row) {
        const int64_t t = rows[row].token;
        const double sigma = rows[row].weight;
        add_scaled(&y[t * H], sigma, &s.r[row * H], H);
        if (!backward) continue;
        add_scaled(&d_x[t * H], 1, &s.d_x[row * H], H);
        if (shape.shared_gate) {
          const double d_sigma = dot(&in.d_y[t * H], &s.r[row * H], H);
          const double slope = sigma * (1 - sigma);
          add_scaled(d_gate.data(), d_sigma * slope, &in.x[t * H], H);
          add_scaled(&d_x[t * H], d_sigma * slope, in.shared_gate.data(), H);
        }
      }
    }
    out.d_shared.push_back(std::move(d));
    out.d_shared_gate.push_back(std::move(d_gate));
    first += T;
  }

  // The routed experts: rows in global token order. All rows' results wait for the sums over k.
  std::vector<std::vector<int64_t>> slots(shape.experts);  // of each expert: t * K + k
  for (int64_t slot = 0; slot < G * K; ++slot) {
    if (in.topk_ids[slot] >= 0) slots[in.topk_ids[slot]].push_back(slot);
  }
  std::vector<Vector> r(G * K), d_x_row(G * K);  // each [H]
  for (int e = 0; e < shape.experts; ++e) {
    Expert d = backward && take ? zeros(I, H) : Expert{};
    if (!slots[e].empty()) {
      if (backward && !take) d = zeros(I, H);
      std::vector<Row> rows;
      for (const int64_t slot : slots[e]) rows.push_back({slot / K, in.topk_weights[slot]});
      const RowResults result =
          layer.expert(Layer::Kind::routed, in.expert(e), I, rows, backward ? &d : nullptr);
      for (int64_t row = 0; row < std::ssize(rows); ++row) {
        const int64_t slot = slots[e][row];
        r[slot].assign(&result.r[row * H], &result.r[row * H] + H);
        if (!backward) continue;
        d_x_row[slot].assign(&result.d_x[row * H], &result.d_x[row * H] + H);
        out.d_topk_weights[slot] = result.d_weight[row];
      }
    }
    if (backward && take) take(e, d);
  }

  for (int64_t slot = 0; slot < G * K; ++slot) {
    if (in.topk_ids[slot] < 0) continue;
    add_scaled(&y[slot / K * H], in.topk_weights[slot], r[slot].data(), H);
    if (backward) add_scaled(&d_x[slot / K * H], 1, d_x_row[slot].data(), H);
  }
  for (double& v : y) v = layer.round(v);
  out.y = std::move(y);
  if (backward) {
    for (double& v : d_x) v = layer.round(v);
    out.d_x = std::move(d_x);
  }
  return out;
}

std::function<Expert(int e)> held(const LayerShape& shape, Expert all) {
  const int64_t size = shape.intermediate * shape.hidden;
  require_size("gate", all.gate.size(), shape.experts * size);
  require_size("up", all.up.size(), shape.experts * size);
  require_size("down", all.down.size(), shape.experts * size);
  return [size, all = std::make_shared<Expert>(std::move(all))](int e) {
    const auto part = [&](const Vector& v) {
      return Vector(v.begin() + e * size, v.begin() + (e + 1) * size);
    };
    return Expert{part(all->gate), part(all->up), part(all->down)};
  };
}

TakeGradient collect(Expert& all) {
  all = {};
  return [&all](int, const Expert& d) {
    all.gate.insert(all.gate.end(), d.gate.begin(), d.gate.end());
    all.up.insert(all.up.end(), d.up.begin(), d.up.end());
    all.down.insert(all.down.end(), d.down.begin(), d.down.end());
  };
}

}  // namespace mok::reference
