// The layer written once more, in the storage type and accumulators of an executor, from the shared
// numerics headers and without any plan: what an executor's rounding errors look like. Routed
// experts only, all tokens on one rank.
#pragma once

#include <cstdint>
#include <vector>

#include "mok/types.h"
#include "numerics/bf16.h"
#include "numerics/dot.h"
#include "numerics/reduce.h"
#include "numerics/swiglu.h"
#include "problem/problem.h"

namespace mok::test {

template <class T>
struct PlainLayer {
  using A = numerics::Acc<T>;
  using S = numerics::Storage<T>;

  std::vector<T> y, d_x;                      // [G, H]
  std::vector<A> d_topk_weights;              // [G, K]
  std::vector<A> d_w_gate, d_w_up, d_w_down;  // sums: [E, I, H], [E, I, H], [E, H, I]

  PlainLayer(const problem::Problem& p, Precision precision) {
    using problem::Tensor;
    const auto get = [&](Tensor t) {
      std::vector<T> v(p.leading(t) * p.row_elements(t));
      p.fill(t, 0, p.leading(t), precision, v.data());
      return v;
    };
    const auto x = get(Tensor::x), d_y = get(Tensor::d_y);
    const auto w_gate = get(Tensor::w_gate), w_up = get(Tensor::w_up), w_down = get(Tensor::w_down);
    const int64_t G = p.tokens(), H = p.shape().hidden, I = p.shape().intermediate;
    const int K = p.shape().topk;
    const A limit = p.shape().swiglu_limit;
    std::vector<int64_t> ids(G * K);
    std::vector<A> weights(G * K);
    p.fill_topk_ids(0, G, ids.data());
    p.fill_topk_weights(0, G, weights.data());

    y.resize(G * H);
    d_x.resize(G * H);
    d_topk_weights.resize(G * K);
    d_w_gate.resize(w_gate.size());
    d_w_up.resize(w_up.size());
    d_w_down.resize(w_down.size());

    for (int64_t t = 0; t < G; ++t) {
      std::vector<std::vector<T>> r(K), rows(K);
      std::vector<const T*> r_rows(K), d_rows(K);
      for (int k = 0; k < K; ++k) {
        const int64_t e = ids[t * K + k];
        if (e < 0) continue;
        const A w = weights[t * K + k];
        std::vector<T> g(I), u(I), h(I), d_h(I), wh(I), d_g(I), d_u(I);
        for (int64_t i = 0; i < I; ++i) {
          g[i] = S::store(numerics::dot<A>(&x[t * H], &w_gate[(e * I + i) * H], H));
          u[i] = S::store(numerics::dot<A>(&x[t * H], &w_up[(e * I + i) * H], H));
          h[i] = numerics::swiglu(g[i], u[i], limit);
        }
        r[k].resize(H);
        std::vector<A> chain(I);
        for (int64_t j = 0; j < H; ++j) {
          r[k][j] = S::store(numerics::dot<A>(h.data(), &w_down[(e * H + j) * I], I));
          add(chain.data(), d_y[t * H + j], &w_down[(e * H + j) * I], I);
        }
        for (int64_t i = 0; i < I; ++i) {
          d_h[i] = S::store(chain[i]);
          const auto b = numerics::swiglu_backward(g[i], u[i], d_h[i], w, limit);
          wh[i] = b.wh;
          d_g[i] = b.d_g;
          d_u[i] = b.d_u;
        }
        d_topk_weights[t * K + k] = numerics::dot<A>(d_h.data(), h.data(), I);
        for (int64_t j = 0; j < H; ++j) {
          add(&d_w_down[(e * H + j) * I], d_y[t * H + j], wh.data(), I);
        }
        std::vector<A> row(H);
        for (int64_t i = 0; i < I; ++i) {
          add(row.data(), d_g[i], &w_gate[(e * I + i) * H], H);
          add(&d_w_gate[(e * I + i) * H], d_g[i], &x[t * H], H);
          add(&d_w_up[(e * I + i) * H], d_u[i], &x[t * H], H);
        }
        for (int64_t i = 0; i < I; ++i) add(row.data(), d_u[i], &w_up[(e * I + i) * H], H);
        rows[k].resize(H);
        for (int64_t j = 0; j < H; ++j) rows[k][j] = S::store(row[j]);
        r_rows[k] = r[k].data();
        d_rows[k] = rows[k].data();
      }
      numerics::combine_rows<T>(&y[t * H], nullptr, r_rows.data(), &weights[t * K], K, H);
      numerics::reduce_rows<T>(&d_x[t * H], nullptr, d_rows.data(), K, H);
    }
  }

 private:
  static void add(A* out, T factor, const T* row, int64_t n) {
    const A f = S::load(factor);
    for (int64_t i = 0; i < n; ++i) out[i] += f * S::load(row[i]);
  }
};

}  // namespace mok::test
