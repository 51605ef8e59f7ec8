#include "cli/rank_inputs.h"

#include <algorithm>
#include <thread>

#include "mok/quantize.h"

namespace mok::cli {

using problem::Problem;
using problem::Tensor;

std::vector<Slice> token_slices(const Spec& spec, int rank) {
  const int64_t first = spec.first_token(rank), last = first + spec.tokens[rank];
  return {{Tensor::x, first, last}, {Tensor::d_y, first, spec.backward ? last : first}};
}

std::vector<Slice> weight_slices(const Spec& spec, int rank) {
  const LayerShape& s = spec.shape;
  const int64_t first = int64_t{rank} * spec.experts_local(), last = first + spec.experts_local();
  return {{Tensor::w_gate, first, last},
          {Tensor::w_up, first, last},
          {Tensor::w_down, first, last},
          {Tensor::shared_gate, 0, s.shared_intermediate},
          {Tensor::shared_up, 0, s.shared_intermediate},
          {Tensor::shared_down, 0, s.shared_intermediate > 0 ? s.hidden : 0},
          {Tensor::shared_vector, 0, s.shared_gate ? 1 : 0}};
}

int64_t slice_bytes(const Problem& problem, const Slice& slice, Precision precision) {
  return (slice.end - slice.begin) * problem.row_elements(slice.tensor) * element_size(precision);
}

namespace {

// Cuts [begin, end) into pieces, one a thread.
void in_pieces(int64_t begin, int64_t end, int threads,
               const std::function<void(int64_t, int64_t)>& f) {
  const int64_t n = end - begin;
  const int64_t pieces = std::clamp<int64_t>(threads, 1, std::max<int64_t>(1, n));
  std::vector<std::thread> others;
  for (int64_t i = 1; i < pieces; ++i) {
    others.emplace_back([=, &f] { f(begin + n * i / pieces, begin + n * (i + 1) / pieces); });
  }
  f(begin, begin + n / pieces);
  for (std::thread& t : others) t.join();
}

Memory make(const Problem& problem, const Slice& s, Precision precision, int threads) {
  Memory memory(slice_bytes(problem, s, precision));
  const int64_t step = problem.row_elements(s.tensor) * element_size(precision);
  const int useful = memory.bytes() < int64_t{1} << 20 ? 1 : threads;
  if (memory.bytes() == 0) return memory;
  in_pieces(s.begin, s.end, useful, [&](int64_t begin, int64_t end) {
    problem.fill(s.tensor, begin, end, precision, memory.data() + (begin - s.begin) * step);
  });
  return memory;
}

}  // namespace

TokenInputs make_tokens(const Spec& spec, const Problem& problem, int rank, int threads) {
  const std::vector<Slice> slices = token_slices(spec, rank);
  TokenInputs t;
  t.x = make(problem, slices[0], spec.precision, threads);
  t.d_y = make(problem, slices[1], spec.precision, threads);
  const int64_t first = spec.first_token(rank), last = first + spec.tokens[rank];
  const int64_t K = spec.shape.topk, slots = spec.tokens[rank] * K;
  t.ids = Memory(slots * 8);
  t.topk_weights = Memory(slots * weight_size(spec.precision));
  in_pieces(first, last, slots < 4096 ? 1 : threads, [&](int64_t begin, int64_t end) {
    const int64_t offset = (begin - first) * K;
    problem.fill_topk_ids(begin, end, t.ids.as<int64_t>() + offset);
    if (spec.precision == Precision::fp64) {
      problem.fill_topk_weights(begin, end, t.topk_weights.as<double>() + offset);
    } else {
      problem.fill_topk_weights(begin, end, t.topk_weights.as<float>() + offset);
    }
  });
  return t;
}

WeightInputs make_weights(const Spec& spec, const Problem& problem, int rank, int threads,
                          const std::function<void()>& step) {
  const std::vector<Slice> slices = weight_slices(spec, rank);
  WeightInputs w;
  Memory* const all[] = {&w.gate,      &w.up,          &w.down,         &w.shared_gate,
                         &w.shared_up, &w.shared_down, &w.shared_vector};
  for (size_t i = 0; i < slices.size(); ++i) {
    *all[i] = make(problem, slices[i], spec.precision, threads);
    step();
  }
  return w;
}

int64_t QuantizedInputs::bytes() const {
  int64_t sum = 0;
  for (const Stack* s : {&gate, &up, &down}) {
    sum += s->data.bytes() + s->scales.bytes() + s->data_t.bytes() + s->scales_t.bytes();
  }
  return sum;
}

QuantizedInputs quantize(const Spec& spec, const WeightInputs& weights, int threads) {
  const LayerShape& shape = spec.shape;
  const int64_t experts = spec.experts_local();
  const auto make_stack = [&](const Memory& from, int64_t rows, int64_t columns) {
    const int64_t scales = scale_bytes(spec.precision, rows, columns);
    const int64_t scales_t = scale_bytes(spec.precision, columns, rows);
    const int64_t size = rows * columns;
    QuantizedInputs::Stack s{Memory(experts * size), Memory(experts * scales),
                             Memory(experts * size), Memory(experts * scales_t)};
    in_pieces(0, experts, threads, [&](int64_t begin, int64_t end) {
      quantize_weights(
          spec.precision, {from.data() + begin * size * 2, size, columns}, end - begin, rows,
          columns,
          {s.data.data() + begin * size, s.scales.as<uint8_t>() + begin * scales,
           s.data_t.data() + begin * size, s.scales_t.as<uint8_t>() + begin * scales_t});
    });
    return s;
  };
  return {make_stack(weights.gate, shape.intermediate, shape.hidden),
          make_stack(weights.up, shape.intermediate, shape.hidden),
          make_stack(weights.down, shape.hidden, shape.intermediate)};
}

LayerWeights views(const LayerShape& s, const WeightInputs& w, const QuantizedInputs& q) {
  const int64_t h = s.hidden, i = s.intermediate, shared = s.shared_intermediate;
  LayerWeights out;
  out.gate = {w.gate.data(), i * h, h};
  out.up = {w.up.data(), i * h, h};
  out.down = {w.down.data(), h * i, i};
  out.shared_gate_proj = {w.shared_gate.data(), h};
  out.shared_up_proj = {w.shared_up.data(), h};
  out.shared_down_proj = {w.shared_down.data(), shared};
  out.shared_gate_vector = w.shared_vector.data();
  const auto normal = [](const QuantizedInputs::Stack& stack) {
    return QuantizedStack{stack.data.data(), stack.scales.as<uint8_t>()};
  };
  const auto transposed = [](const QuantizedInputs::Stack& stack) {
    return QuantizedStack{stack.data_t.data(), stack.scales_t.as<uint8_t>()};
  };
  out.quantized = {normal(q.gate),     normal(q.up),     normal(q.down),
                   transposed(q.gate), transposed(q.up), transposed(q.down)};
  return out;
}

}  // namespace mok::cli
