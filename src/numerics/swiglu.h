// The clamped SwiGLU and its derivative, once for all executors: in Acc (fp32 for bf16) from the
// rounded g and u. limit = infinity: no limit.
//
// Each function exists on values (Acc in, Acc out, nothing rounded) and on storage types (all the
// contract's roundings applied).
#pragma once

#include "numerics/bf16.h"
#include "numerics/exp.h"
#include "numerics/hd.h"

namespace mok::numerics {

template <class A>
MOK_INLINE A sigmoid(A x) {
  return A(1) / (A(1) + exp_portable(-x));
}

// min(g, limit) and clamp(u, -limit, limit). NaN passes through both: no comparison holds for it.
template <class A>
MOK_INLINE A clamp_gate(A g, A limit) {
  return g > limit ? limit : g;
}
template <class A>
MOK_INLINE A clamp_up(A u, A limit) {
  u = u > limit ? limit : u;
  return u < -limit ? -limit : u;
}

// silu(g) * u
template <class A>
MOK_INLINE A swiglu_value(A g, A u, A limit) {
  g = clamp_gate(g, limit);
  return g * sigmoid(g) * clamp_up(u, limit);
}

template <class A>
struct GateUp {
  A g, u;
};

// +0 where cut, else v. By mask: a conditional would come back as a branch around v's computation,
// and the loop would not vectorise.
MOK_INLINE float zero_if(bool cut, float v) {
  return bit_cast<float>(bit_cast<uint32_t>(v) & (static_cast<uint32_t>(cut) - 1u));
}
MOK_INLINE double zero_if(bool cut, double v) {
  return bit_cast<double>(bit_cast<uint64_t>(v) & (static_cast<uint64_t>(cut) - 1u));
}

// w * d_h * d(silu(g) * u). A value at the limit passes its gradient, one beyond it gets 0; NaN
// passes, so a NaN in g or u cannot end as a harmless zero.
template <class A>
MOK_INLINE GateUp<A> swiglu_derivative(A g, A u, A d_h, A w, A limit) {
  const bool g_cut = g > limit;
  const bool u_cut = (u > limit) | (u < -limit);
  g = clamp_gate(g, limit);
  u = clamp_up(u, limit);
  const A s = sigmoid(g);
  const A d_silu = s * fused(g, A(1) - s, A(1));
  const A scaled = w * d_h;
  const A d_g = scaled * (u * d_silu);
  const A d_u = scaled * (g * s);
  return {zero_if(g_cut, d_g), zero_if(u_cut, d_u)};
}

// h = bf16(silu(g) * u)
template <class T>
MOK_INLINE T swiglu(T g, T u, Acc<T> limit) {
  using S = Storage<T>;
  return S::store(swiglu_value(S::load(g), S::load(u), limit));
}

template <class T>
struct SwigluBackward {
  T h;         // as in forward
  T wh;        // bf16(w * h), what d_w_down is made of
  T d_g, d_u;  // bf16(w * d_h * ...)
};

template <class T>
MOK_INLINE SwigluBackward<T> swiglu_backward(T g, T u, T d_h, Acc<T> w, Acc<T> limit) {
  using S = Storage<T>;
  const T h = swiglu(g, u, limit);
  const GateUp<Acc<T>> d = swiglu_derivative(S::load(g), S::load(u), S::load(d_h), w, limit);
  return {h, S::store(w * S::load(h)), S::store(d.g), S::store(d.u)};
}

}  // namespace mok::numerics
