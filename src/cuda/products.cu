#include "cuda/products.h"

#include <string>

#include "cuda/tensor_map.h"
#include "mok/error.h"

namespace mok::cuda {

namespace {

using plan::Buffer;

__nv_bfloat16* rows_of(const RankState& s, Buffer b) { return s.at<__nv_bfloat16>(b); }

// Encodes maps and remembers whether the driver took all of them.
class Encoder {
 public:
  Encoder(const RankState& s, TensorMapCache& cache, CUtensorMap* maps)
      : state_(s), cache_(cache), maps_(maps) {}

  void matrix(Map which, const void* data, int64_t columns, int64_t rows, int64_t stride) {
    encode(which, {data, 3, columns, rows, 1, stride, rows * stride, kBox});
  }
  void matrix(Map which, const ConstMatrix& m, int64_t columns, int64_t rows) {
    matrix(which, m.data, columns, rows, m.row_stride);
  }
  void buffer(Map which, Buffer b, int64_t columns, int64_t rows) {
    matrix(which, state_.at<void>(b), columns, rows, columns);
  }
  // Two buffers of the same size, one after the other.
  void buffers(Map which, Buffer first, Buffer second, int64_t columns, int64_t rows) {
    const auto *from = state_.at<uint8_t>(first), *to = state_.at<uint8_t>(second);
    encode(which, {from, 3, columns, rows, 2, columns, (to - from) / 2, kBox});
  }
  void stack(Map which, const ConstStack& w, int64_t columns, int64_t rows) {
    encode(which, {w.data, 3, columns, rows, state_.g.experts_local(), w.row_stride,
                   w.expert_stride, kBox});
  }

  // Of `p`, a weight gradient [rows, columns] of each expert, if it is bf16: map number `number`.
  template <class Tensors>
  void gradient(Tensors* out, int number, Product& p, int64_t columns, int64_t rows,
                int64_t experts) {
    if constexpr (Tensors::kThere) {
      if (p.mode != GradMode::storage) return;
      const int64_t expert_stride = experts > 1 ? p.weight_grad.expert_elements : rows * columns;
      encode(kBackwardFp8Maps + number,
             {p.weight_grad.out, 3, columns, rows, experts, p.weight_grad.row_elements,
              expert_stride, kGradientBoxRows},
             &out->gradient_map[number]);
      p.weight_grad.map = number;
    }
  }

  // Another map of the same tensor, with boxes of so many rows (and groups of 64 columns).
  template <class Tensors>
  int8_t widen(Tensors* out, int8_t which, int rows, int groups = 0) {
    BoxedTensor t = tensors_[which];
    t.box_rows = rows;
    t.box_groups = groups;
    encode(kBackwardFp8Maps + kGradientMaps + wide_maps_, t, &out->wide_map[wide_maps_]);
    return wide_maps_++;
  }
  // A and B of `p` lie along the contraction, B with `columns` rows a load; two of gate and up.
  template <class Tensors>
  void widen_rows(Tensors* out, Product& p, int columns) {
    widen_a(out, p);
    for (int i = 0; i < 2; ++i) {
      p.wide_b[i] = i > 0 && p.b[1] == p.b[0] ? p.wide_b[0] : widen(out, p.b[i], columns);
    }
  }
  // B lies across it.
  template <class Tensors>
  void widen_columns(Tensors* out, Product& p, int columns) {
    widen_a(out, p);
    for (int i = 0; i < 2; ++i) {
      p.wide_b[i] =
          i > 0 && p.b[1] == p.b[0] ? p.wide_b[0] : widen(out, p.b[i], kBox, columns / kBox);
    }
  }
  template <class Tensors>
  void widen_gradient(Tensors* out, Product& p) {
    p.wide_a = widen(out, p.a[0], kBox, kTileM / kBox);
    p.wide_b[0] = p.wide_b[1] = widen(out, p.b[0], kBox, kTileN / kBox);
  }

  // Codes, of which two stand for a bf16: rows of the ring, with their scales behind them.
  void codes(Map which, Buffer b, int64_t columns) {
    matrix(which, state_.at<void>(b), columns / 2, ring_rows(),
           state_.g.code_row_bytes(static_cast<int>(columns)) / 2);
  }
  void codes(Map which, Buffer first, Buffer second, int64_t columns) {
    const auto *from = state_.at<uint8_t>(first), *to = state_.at<uint8_t>(second);
    encode(which, {from, 3, columns / 2, ring_rows(), 2,
                   state_.g.code_row_bytes(static_cast<int>(columns)) / 2, (to - from) / 2, kBox});
  }
  void codes(Map which, const QuantizedStack& w, int64_t columns, int64_t rows) {
    stack(which, {w.data, rows * columns / 2, columns / 2}, columns / 2, rows);
  }

  void ring() {
    buffer(kRingX, Buffer::ring_x, state_.g.hidden, ring_rows());
    buffer(kRingHidden, Buffer::ring_hidden, state_.g.intermediate, ring_rows());
  }
  // What routed products of both directions read. `gate`, `up`, `down`: the weights as they do.
  void routed(const ConstStack& gate, const ConstStack& up, const ConstStack& down) {
    const int64_t h = state_.g.hidden, i = state_.g.intermediate;
    ring();
    stack(kGate, gate, h, i);
    stack(kUp, up, h, i);
    stack(kDown, down, i, h);
  }
  // The same of the shared expert's.
  void shared(const LayerWeights& w, const ConstMatrix& x) {
    const plan::Geometry& g = state_.g;
    const int64_t h = g.hidden, shared = g.shared_intermediate;
    if (!g.has_shared()) return;
    if (g.own_tokens() > 0) matrix(kOwnX, x, h, g.own_tokens());
    // Rows beyond the tokens read as zeros, which weight gradients rely on.
    buffer(kSharedHidden, Buffer::shared_hidden, shared, own_rows());
    matrix(kSharedGate, w.shared_gate_proj, h, shared);
    matrix(kSharedUp, w.shared_up_proj, h, shared);
    matrix(kSharedDown, w.shared_down_proj, shared, h);
  }

  int64_t ring_rows() const { return int64_t{state_.g.ring_tiles} * plan::kTileRows; }
  int64_t own_rows() const { return state_.g.own_tokens() > 0 ? state_.g.own_tokens() : 1; }

  void finish() const {
    if (good_) return;
    throw Error(ErrorCode::bad_argument,
                "a tensor map was refused: check strides and alignment of x, d_y, the weights and "
                "their gradients (rank " +
                    std::to_string(state_.g.rank) + ")");
  }

 private:
  static constexpr int kBox = 64;
  // `place`: in the cache; gradients come after the others.
  void encode(int place, const BoxedTensor& t, CUtensorMap* to) {
    good_ = good_ && cache_.encode(place, t, to);
  }
  void encode(Map which, const BoxedTensor& t) {
    tensors_[which] = t;
    encode(which, t, &maps_[which]);
  }
  template <class Tensors>
  void widen_a(Tensors* out, Product& p) {
    p.wide_a = widen(out, p.a[0], kTileM);
    if (Tensors::kTall) p.tall_a = widen(out, p.a[0], kTileM + kTailRows);
  }

  const RankState& state_;
  TensorMapCache& cache_;
  CUtensorMap* maps_;
  BoxedTensor tensors_[kBackwardFp8Maps];
  int8_t wide_maps_ = 0;
  bool good_ = true;
};

Product product_of(int8_t a, int8_t b, int8_t second_a, int8_t second_b) {
  Product p{};
  p.a[0] = a, p.a[1] = second_a;
  p.b[0] = b, p.b[1] = second_b;
  p.wide_a = p.tall_a = p.wide_b[0] = p.wide_b[1] = Product::kNoMap;
  return p;
}
Product product_of(int8_t a, int8_t b) { return product_of(a, b, a, b); }

Product gate_up(Map x, Map gate, Map up, __nv_bfloat16* hidden, void* kept_gate, void* kept_up,
                int64_t columns) {
  Product p = product_of(x, gate, x, up);
  p.gate_up = {hidden, static_cast<__nv_bfloat16*>(kept_gate), static_cast<__nv_bfloat16*>(kept_up),
               columns};
  return p;
}

Product rows_to(Product p, const uint64_t* destination) {
  p.row_destination = destination;
  return p;
}

Product weight_grad(Map a, Map b, GradMode mode, void* out, int64_t row_stride,
                    int64_t expert_stride) {
  Product p = product_of(a, b);
  p.mode = mode;
  p.weight_grad = {out, row_stride, expert_stride, nullptr, 0, Product::kNoMap};
  return p;
}
Product weight_grad(Map a, Map b, const MatrixGrad& g) {
  return weight_grad(a, b, g.mode, g.target.data, g.target.row_stride, 0);
}

// What a product of fp8 reads besides: the scales of `rows`, rows of `contraction` codes, and of
// weights [experts, columns, contraction].
Fp8Operands fp8_operands(const RankState& s, Buffer rows, const uint8_t* weights, int columns,
                         int contraction) {
  Fp8Operands o{};
  o.a[0] = o.a[1] = s.at<uint8_t>(rows) + s.g.scales_at(contraction);
  o.a_row_bytes = static_cast<int32_t>(s.g.code_row_bytes(contraction));
  o.b[0] = o.b[1] = weights;
  o.column_blocks = plan::ceil_div(columns, s.g.block);
  o.k_blocks = plan::ceil_div(contraction, s.g.block);
  return o;
}
// Its results, rows of `columns` codes.
void codes_to(Fp8Operands& o, const RankState& s, Buffer first, Buffer second, int columns) {
  o.codes[0] = s.at<uint8_t>(first);
  o.codes[1] = s.at<uint8_t>(second);
  o.codes_row_bytes = static_cast<int32_t>(s.g.code_row_bytes(columns));
  o.codes_scales_at = static_cast<int32_t>(s.g.scales_at(columns));
}

Fp8Operands fp8_gate_up(const RankState& s, const QuantizedWeights& w) {
  Fp8Operands o =
      fp8_operands(s, Buffer::ring_x_codes, w.gate.scales, s.g.intermediate, s.g.hidden);
  o.b[1] = w.up.scales;
  return o;
}

template <class Tensors>
void fill_backward(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, Tensors* out) {
  const plan::Geometry& g = s.g;
  const int64_t h = g.hidden, i = g.intermediate, shared = g.shared_intermediate;
  const bool mx = g.block > 0;
  const LayerWeights& w = a.weights;
  Encoder maps(s, cache, out->map);
  if constexpr (Tensors::kFp8) {
    const QuantizedWeights& q = w.quantized;
    maps.ring();
    maps.codes(kGate, q.gate, h, i);
    maps.codes(kUp, q.up, h, i);
    maps.codes(kDown, q.down_t, h, i);
    maps.codes(kGateBackward, q.gate_t, i, h);
    maps.codes(kUpBackward, q.up_t, i, h);
    maps.codes(kRingXCodes, Buffer::ring_x_codes, h);
    maps.codes(kRingDYCodes, Buffer::ring_d_y_codes, h);
    maps.codes(kRingDGateUpCodes, Buffer::ring_d_gate_codes, Buffer::ring_d_up_codes, i);
    out->fp8[kFp8GateUp] = fp8_gate_up(s, q);
    out->fp8[kFp8DHidden] =
        fp8_operands(s, Buffer::ring_d_y_codes, q.down_t.scales, g.intermediate, g.hidden);
    codes_to(out->fp8[kFp8DHidden], s, Buffer::ring_d_gate_codes, Buffer::ring_d_up_codes,
             g.intermediate);
    Fp8Operands& d_input = out->fp8[kFp8DInput];
    d_input = fp8_operands(s, Buffer::ring_d_gate_codes, q.gate_t.scales, g.hidden, g.intermediate);
    d_input.a[1] = s.at<uint8_t>(Buffer::ring_d_up_codes) + g.scales_at(g.intermediate);
    d_input.b[1] = q.up_t.scales;
  } else if (mx) {
    maps.routed(w.rounded.gate, w.rounded.up, w.rounded.down_backward);
    maps.stack(kGateBackward, w.rounded.gate_backward, h, i);
    maps.stack(kUpBackward, w.rounded.up_backward, h, i);
  } else {
    maps.routed(w.gate, w.up, w.down);
  }
  maps.shared(w, a.x);
  maps.buffer(kRingDY, Buffer::ring_d_y, h, maps.ring_rows());
  maps.buffers(kRingDGateUp, Buffer::ring_d_gate, Buffer::ring_d_up, i, maps.ring_rows());
  if (g.has_shared()) {
    if (a.tokens > 0) maps.matrix(kOwnDY, a.d_y, h, a.tokens);
    maps.buffers(kSharedDGateUp, Buffer::shared_d_gate, Buffer::shared_d_up, shared,
                 maps.own_rows());
  }
  out->swiglu_limit = shape.swiglu_limit;
  const auto product = [&](BackwardProduct which) -> Product& { return out->product[which]; };

  const bool fp8 = Tensors::kFp8;
  product(kRecomputeGateUp) =
      gate_up(fp8 ? kRingXCodes : kRingX, kGate, kUp, nullptr, rows_of(s, Buffer::ring_gate),
              rows_of(s, Buffer::ring_up), i);
  Product& d_hidden = product(kDHidden);
  d_hidden = product_of(fp8 ? kRingDYCodes : kRingDY, kDown);
  d_hidden.mx = mx;
  d_hidden.d_hidden = {static_cast<const __nv_bfloat16*>(a.saved.gate),
                       static_cast<const __nv_bfloat16*>(a.saved.up),
                       rows_of(s, Buffer::ring_d_gate),
                       rows_of(s, Buffer::ring_d_up),
                       rows_of(s, Buffer::ring_hidden),
                       s.tables.row_weight,
                       s.at<float>(Buffer::router_partials),
                       g.intermediate,
                       g.columns_d_hidden()};
  if constexpr (Tensors::kWide) {
    fp8 ? maps.widen_rows(out, d_hidden, kTileN)
        : maps.widen_columns(out, d_hidden, kTileInterGrad);
  }
  Product& recomputed = product(kDHiddenRecomputed);
  recomputed = d_hidden;
  recomputed.gate_in_ring = true;
  recomputed.d_hidden.gate = rows_of(s, Buffer::ring_gate);
  recomputed.d_hidden.up = rows_of(s, Buffer::ring_up);
  const Map d_gate_up = fp8 ? kRingDGateUpCodes : kRingDGateUp;
  product(kDInput) =
      rows_to(product_of(d_gate_up, mx ? kGateBackward : kGate, d_gate_up, mx ? kUpBackward : kUp),
              s.tables.row_destination);
  if constexpr (Tensors::kWide) {
    maps.widen_rows(out, product(kRecomputeGateUp), kHalfN);
    Product& d_input = product(kDInput);
    fp8 ? maps.widen_rows(out, d_input, kTileN) : maps.widen_columns(out, d_input, kTileN);
  }
  const auto routed = [&](Map left, Map right, const StackGrad& grad, plan::WeightMatrix matrix,
                          int64_t width) {
    Product p = weight_grad(left, right, grad.mode, grad.target.data, grad.target.row_stride,
                            grad.target.expert_stride);
    p.weight_grad.carry = s.at<float>(Buffer::carry) + static_cast<int>(matrix) * h * i;
    p.weight_grad.carry_elements = static_cast<int32_t>(width);
    return p;
  };
  product(kGradGate) = routed(kRingDGateUp, kRingX, a.d_gate, plan::WeightMatrix::gate, h);
  product(kGradUp) = routed(kRingDGateUp, kRingX, a.d_up, plan::WeightMatrix::up, h);
  product(kGradUp).a_slice = 1;
  product(kGradDown) = routed(kRingDY, kRingHidden, a.d_down, plan::WeightMatrix::down, i);
  if constexpr (Tensors::kWide) {
    maps.widen_gradient(out, product(kGradGate));
    product(kGradUp).wide_a = product(kGradGate).wide_a;  // the other slice
    product(kGradUp).wide_b[0] = product(kGradGate).wide_b[0];
    maps.widen_gradient(out, product(kGradDown));
  }

  product(kRecomputeSharedGateUp) = gate_up(
      kOwnX, kSharedGate, kSharedUp, g.shared_gate ? rows_of(s, Buffer::shared_hidden) : nullptr,
      rows_of(s, Buffer::shared_gate), rows_of(s, Buffer::shared_up), shared);
  product(kRecomputeSharedDown) =
      rows_to(product_of(kSharedHidden, kSharedDown), s.tables.shared_destination);
  Product& shared_d_hidden = product(kSharedDHidden);
  shared_d_hidden = product_of(kOwnDY, kSharedDown);
  shared_d_hidden.d_hidden = {g.keep_shared ? static_cast<const __nv_bfloat16*>(a.saved.shared_gate)
                                            : rows_of(s, Buffer::shared_gate),
                              g.keep_shared ? static_cast<const __nv_bfloat16*>(a.saved.shared_up)
                                            : rows_of(s, Buffer::shared_up),
                              rows_of(s, Buffer::shared_d_gate),
                              rows_of(s, Buffer::shared_d_up),
                              rows_of(s, Buffer::shared_hidden),
                              g.shared_gate ? s.at<float>(Buffer::sigma) : nullptr,
                              nullptr,
                              g.shared_intermediate,
                              0};
  product(kSharedDInput) =
      rows_to(product_of(kSharedDGateUp, kSharedGate, kSharedDGateUp, kSharedUp),
              s.tables.shared_destination);
  product(kSharedGradGate) = weight_grad(kSharedDGateUp, kOwnX, a.d_shared_gate_proj);
  product(kSharedGradUp) = weight_grad(kSharedDGateUp, kOwnX, a.d_shared_up_proj);
  product(kSharedGradUp).a_slice = 1;
  product(kSharedGradDown) = weight_grad(kOwnDY, kSharedHidden, a.d_shared_down_proj);

  const int experts = g.experts_local();
  maps.gradient(out, 0, product(kGradGate), h, i, experts);
  maps.gradient(out, 1, product(kGradUp), h, i, experts);
  maps.gradient(out, 2, product(kGradDown), i, h, experts);
  maps.gradient(out, 3, product(kSharedGradGate), h, shared, 1);
  maps.gradient(out, 4, product(kSharedGradUp), h, shared, 1);
  maps.gradient(out, 5, product(kSharedGradDown), shared, h, 1);
  maps.finish();
}

template <class Tensors>
void fill_forward(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                  TensorMapCache& cache, Tensors* out) {
  const bool mx = s.g.block > 0;
  const int64_t h = s.g.hidden, i = s.g.intermediate;
  const LayerWeights& w = a.weights;
  Encoder maps(s, cache, out->map);
  if constexpr (Tensors::kFp8) {
    const QuantizedWeights& q = w.quantized;
    maps.codes(kRingX, Buffer::ring_x_codes, h);
    maps.codes(kRingHidden, Buffer::ring_d_gate_codes, i);
    maps.codes(kGate, q.gate, h, i);
    maps.codes(kUp, q.up, h, i);
    maps.codes(kDown, q.down, i, h);
    out->fp8[kFp8GateUp] = fp8_gate_up(s, q);
    codes_to(out->fp8[kFp8GateUp], s, Buffer::ring_d_gate_codes, Buffer::ring_d_gate_codes,
             s.g.intermediate);
    out->fp8[kFp8Down] =
        fp8_operands(s, Buffer::ring_d_gate_codes, q.down.scales, s.g.hidden, s.g.intermediate);
  } else if (mx) {
    maps.routed(w.rounded.gate, w.rounded.up, w.rounded.down);
  } else {
    maps.routed(w.gate, w.up, w.down);
  }
  maps.shared(w, a.x);
  out->swiglu_limit = shape.swiglu_limit;
  out->product[kRoutedGateUp] = gate_up(kRingX, kGate, kUp, rows_of(s, Buffer::ring_hidden),
                                        a.saved.gate, a.saved.up, s.g.intermediate);
  out->product[kRoutedGateUp].mx = mx;
  out->product[kRoutedDown] = rows_to(product_of(kRingHidden, kDown), s.tables.row_destination);
  out->product[kSharedGateUpProduct] =
      gate_up(kOwnX, kSharedGate, kSharedUp, rows_of(s, Buffer::shared_hidden), a.saved.shared_gate,
              a.saved.shared_up, s.g.shared_intermediate);
  out->product[kSharedDownProduct] =
      rows_to(product_of(kSharedHidden, kSharedDown), s.tables.shared_destination);
  if constexpr (Tensors::kWide) {
    maps.widen_rows(out, out->product[kRoutedGateUp], kHalfN);
    maps.widen_rows(out, out->product[kRoutedDown], kTileN);
  }
  maps.finish();
}

}  // namespace

void fill_products(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                   TensorMapCache& cache, ForwardTensors<1, false>* out) {
  fill_forward(s, shape, a, cache, out);
}
void fill_products(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                   TensorMapCache& cache, ForwardTensors<kMaxRanks, false>* out) {
  fill_forward(s, shape, a, cache, out);
}
void fill_products(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                   TensorMapCache& cache, ForwardTensors<1, true>* out) {
  fill_forward(s, shape, a, cache, out);
}
void fill_products(const RankState& s, const LayerShape& shape, const ForwardArgs& a,
                   TensorMapCache& cache, ForwardTensors<kMaxRanks, true>* out) {
  fill_forward(s, shape, a, cache, out);
}
void fill_products(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, BackwardTensors<1, false>* out) {
  fill_backward(s, shape, a, cache, out);
}
void fill_products(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, BackwardTensors<kMaxRanks, false>* out) {
  fill_backward(s, shape, a, cache, out);
}
void fill_products(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, BackwardTensors<1, true>* out) {
  fill_backward(s, shape, a, cache, out);
}
void fill_products(const RankState& s, const LayerShape& shape, const BackwardArgs& a,
                   TensorMapCache& cache, BackwardTensors<kMaxRanks, true>* out) {
  fill_backward(s, shape, a, cache, out);
}

}  // namespace mok::cuda
