// The PyTorch operators, in LibTorch's stable ABI. python/mok/ops.py holds the fake kernels, which
// repeat the shapes of the outputs, and python/mok/autograd.py the autograd formula.
// A gradient that is not wanted is None; of backward_accumulate, whose outputs torch.compile wants
// to be tensors, one of shape [0].
#include <torch/csrc/stable/library.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "handles.h"
#include "tensors.h"

namespace mok::torch_ops {
namespace {

// ---- errors ----------------------------------------------------------------------------------

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// PyTorch's binding turns std::invalid_argument into ValueError, std::bad_alloc into MemoryError
// and other exceptions into RuntimeError.
[[noreturn]] void rethrow(const Error& e) {
  const std::string message = std::string("mok [") + to_string(e.code()) + "]: " + e.what();
  switch (e.code()) {
    case ErrorCode::bad_argument:
    case ErrorCode::bad_type:
    case ErrorCode::bad_routing:
    case ErrorCode::disagreement:
      throw std::invalid_argument(message);
    case ErrorCode::out_of_memory:
      throw OutOfMemory(message);
    default:
      throw std::runtime_error(message);
  }
}

// Runs body(entry, reached_core). An error before the core was reached is posted to the peers,
// which wait for this rank already; later ones the core posts itself.
template <class Body>
auto run(int64_t handle, const Body& body) {
  std::shared_ptr<WorkspaceEntry> entry;
  bool reached_core = false;
  try {
    entry = find_workspace(handle);
    return body(*entry, reached_core);
  } catch (const Error& e) {
    if (entry && !reached_core) entry->abort_call();
    rethrow(e);
  }
}

// ---- the routing's hash ----------------------------------------------------------------------

template <class Id>
int64_t hash_ids(const void* ids, int64_t count) {
  uint64_t h = static_cast<uint64_t>(count);
  for (int64_t i = 0; i < count; ++i) {  // splitmix64's step (Steele, Lea and Flood, 2014)
    h += static_cast<uint64_t>(int64_t{static_cast<const Id*>(ids)[i]}) + 0x9e3779b97f4a7c15u;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    h ^= h >> 31;
  }
  return static_cast<int64_t>(h);
}

int64_t hash_ids(const void* ids, IdType type, int64_t count) {
  return type == IdType::int64 ? hash_ids<int64_t>(ids, count) : hash_ids<int32_t>(ids, count);
}

// What backward compares its topk_ids with. Empty on a GPU: the host would have to wait for the
// ids.
Tensor routing_hash(Tensor topk_ids) {
  const ScalarType type = topk_ids.scalar_type();
  if (type != ScalarType::Long && type != ScalarType::Int) {
    throw std::invalid_argument("mok: topk_ids: neither int32 nor int64");
  }
  if (!topk_ids.is_cpu()) return empty(topk_ids, {0}, ScalarType::Long);
  Tensor hash = empty(topk_ids, {1}, ScalarType::Long);
  Arguments views;
  *static_cast<int64_t*>(hash.mutable_data_ptr()) =
      hash_ids(views.contiguous(topk_ids), id_type(topk_ids), topk_ids.numel());
  return hash;
}

// What forward keeps, one part after the other in one tensor, because each tensor costs the host
// microseconds: gate, up [saved_rows, I]; of the shared expert gate, up [T, I_s], and of one with a
// gate the output [T, H].
class SavedParts {
 public:
  // rows: saved_rows; 0 = nothing is kept.
  SavedParts(const Sizes& s, int64_t rows, int64_t tokens) {
    const int64_t kept = rows > 0 ? tokens : 0;
    const int64_t parts[kParts] = {rows * s.intermediate, rows * s.intermediate, kept * s.shared,
                                   kept * s.shared, s.shared_gate ? kept * s.hidden : 0};
    for (int i = 0; i < kParts; ++i) {
      begin_[i + 1] = begin_[i] + (parts[i] + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  int64_t elements() const { return begin_[kParts]; }
  // `t` has so many elements, at least one.
  Saved in(const Tensor& t, const Sizes& s) const {
    auto* first = static_cast<std::byte*>(t.mutable_data_ptr());
    const auto at = [&](int i) { return first + begin_[i] * element_size(s.precision); };
    Saved saved;
    saved.gate = at(0);
    saved.up = at(1);
    if (s.shared > 0) {
      saved.shared_gate = at(2);
      saved.shared_up = at(3);
    }
    if (s.shared_gate) saved.shared_out = at(4);
    return saved;
  }

 private:
  static constexpr int kParts = 5;
  static constexpr int64_t kAlignment = 64;  // elements; as python/mok/ops.py
  int64_t begin_[kParts + 1] = {};
};

// ---- forward ---------------------------------------------------------------------------------

constexpr const char* kArguments =
    "(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate, Tensor? w_up, "
    "Tensor w_down, Tensor? w_shared_gate, Tensor? w_shared_up, Tensor? w_shared_down, "
    "Tensor? shared_gate_vector, ";
// Not read: the autograd formula carries them to backward_accumulate.
constexpr const char* kCarried =
    "Tensor? main_gate, Tensor? main_up, Tensor? main_down, Tensor? main_shared_gate, "
    "Tensor? main_shared_up, Tensor? main_shared_down, Tensor? main_shared_gate_vector, ";
// quantized: null rather than empty, for a list costs the host two microseconds, empty or not.
constexpr const char* kSettings = "int saved_rows, int layout, Tensor[]? quantized)";

// keep: there will be a backward. A part of what it needs that is empty is no tensor here, because
// each costs the host microseconds.
auto compute(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
             const Weights& weights, int64_t workspace, bool keep, int64_t saved_rows,
             int64_t layout, const OptionalTensors& quantized) {
  return run(workspace, [&](WorkspaceEntry& entry, bool& reached_core) {
    const Sizes s(entry);
    Arguments views;
    ForwardArgs args;
    args.tokens = check_tokens(x, topk_ids, topk_weights, s);
    check_weights(weights, layout, s);
    if (saved_rows < 0) refuse(ErrorCode::bad_argument, "saved_rows: negative");
    args.x = views.matrix(x);
    args.topk_ids = views.contiguous(topk_ids);
    args.id_type = id_type(topk_ids);
    args.topk_weights = views.contiguous(topk_weights);
    args.weights = views.weights(weights, layout, s);
    views.quantized_forward(quantized, s, args.weights);

    Tensor y = empty(x, {args.tokens, s.hidden}, s.type);
    args.y = {data(y), s.hidden};
    OptionalTensor hash, saved;
    if (keep && s.device == kCpu) hash = routing_hash(topk_ids);
    if (saved_rows > 0) {
      const SavedParts parts(s, saved_rows, args.tokens);
      saved = empty(x, {parts.elements()}, s.type);
      args.saved = parts.in(*saved, s);
    }

    const std::lock_guard lock(entry.mutex);
    if (saved_rows > 0 && saved_rows != entry.options().saved_rows) {
      refuse(ErrorCode::bad_argument, "saved_rows: " + std::to_string(saved_rows) +
                                          ", but the workspace keeps " +
                                          std::to_string(entry.options().saved_rows));
    }
    reached_core = true;
    entry.forward(args);
    return std::tuple(y, hash, saved);
  });
}

// In graphs every output is a tensor.
auto forward(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate, OptionalTensor up,
             Tensor down, OptionalTensor shared_gate, OptionalTensor shared_up,
             OptionalTensor shared_down, OptionalTensor gate_vector, OptionalTensor, OptionalTensor,
             OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
             int64_t workspace, int64_t saved_rows, int64_t layout, OptionalTensors quantized) {
  auto [y, hash, saved] = compute(
      x, topk_ids, topk_weights, {gate, up, down, shared_gate, shared_up, shared_down, gate_vector},
      workspace, true, saved_rows, layout, quantized);
  if (!hash) hash = empty(topk_ids, {0}, ScalarType::Long);
  if (!saved) saved = empty(x, {0}, x.scalar_type());
  return std::tuple(y, *hash, *saved);
}

auto forward_eager(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate, OptionalTensor up,
                   Tensor down, OptionalTensor shared_gate, OptionalTensor shared_up,
                   OptionalTensor shared_down, OptionalTensor gate_vector, int64_t workspace,
                   bool keep, int64_t saved_rows, int64_t layout, OptionalTensors quantized) {
  return compute(x, topk_ids, topk_weights,
                 {std::move(gate), std::move(up), std::move(down), std::move(shared_gate),
                  std::move(shared_up), std::move(shared_down), std::move(gate_vector)},
                 workspace, keep, saved_rows, layout, quantized);
}

// ---- backward --------------------------------------------------------------------------------

// Bits of `needs`: d_x, d_topk_weights, then the weights in the order of enum Weight.
constexpr int64_t kNeedX = 1, kNeedTopkWeights = 2;
constexpr int kFirstWeightBit = 2;

// In the order of these bits.
using Gradients = std::array<OptionalTensor, kFirstWeightBit + kWeights>;

// Calls make(gradient of bit 0), ... and returns the results as the tuple that an operator returns.
template <size_t... kBit, class Make>
auto outputs(std::index_sequence<kBit...>, const Make& make) {
  return std::tuple(make(kBit)...);
}
template <class Make>
auto outputs(const Make& make) {
  return outputs(std::make_index_sequence<std::tuple_size_v<Gradients>>(), make);
}

std::string backward_schema(const std::string& name, const std::string& more_arguments,
                            const std::string& returned) {
  return name +
         "(Tensor d_y, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate, "
         "Tensor? w_up, Tensor w_down, Tensor? w_shared_gate, Tensor? w_shared_up, "
         "Tensor? w_shared_down, Tensor? shared_gate_vector, Tensor? routing_hash, "
         "Tensor? saved, int workspace, int layout, int needs, "
         "Tensor[]? quantized" +
         more_arguments + ") -> (" + returned + ")";
}

constexpr const char* kGradients =
    "Tensor? d_x, Tensor? d_topk_weights, Tensor? d_gate, Tensor? d_up, Tensor? d_down, "
    "Tensor? d_shared_gate, Tensor? d_shared_up, Tensor? d_shared_down, "
    "Tensor? d_shared_gate_vector";
constexpr const char* kGradientsOrEmpty =
    "Tensor d_x, Tensor d_topk_weights, Tensor d_gate, Tensor d_up, Tensor d_down, "
    "Tensor d_shared_gate, Tensor d_shared_up, Tensor d_shared_down, "
    "Tensor d_shared_gate_vector";
// Those of a letter share a block of memory, each with a part of its own.
constexpr const char* kGradientsInBlocks =
    "Tensor? d_x, Tensor? d_topk_weights, Tensor(r)? d_gate, Tensor(r)? d_up, Tensor(r)? d_down, "
    "Tensor(s)? d_shared_gate, Tensor(s)? d_shared_up, Tensor(s)? d_shared_down, "
    "Tensor(s)? d_shared_gate_vector";

// Of backward_accumulate: the gradient of a weight with a main_grad is added there, not returned.
constexpr const char* kMainGrads =
    ", Tensor(a!)? main_gate, Tensor(b!)? main_up, Tensor(c!)? main_down, "
    "Tensor(d!)? main_shared_gate, Tensor(e!)? main_shared_up, Tensor(f!)? main_shared_down, "
    "Tensor(g!)? main_shared_gate_vector";

void check_main_grad(const std::string& name, const Tensor& main_grad, const Tensor& weight,
                     const Sizes& s) {
  const auto want = weight.sizes(), have = main_grad.sizes();
  bool same = on_device(main_grad, s.device) && main_grad.scalar_type() == s.sum_type &&
              want.size() == have.size();
  for (size_t i = 0; same && i < want.size(); ++i) same = want[i] == have[i];
  const int64_t last = main_grad.dim() - 1;
  if (!same || (main_grad.size(last) > 1 && main_grad.stride(last) != 1)) {
    refuse(ErrorCode::bad_argument, name + ": main_grad must be a tensor on " +
                                        device_text(s.device) +
                                        " of the weight's shape with contiguous rows, and of "
                                        "dtype " +
                                        torch::headeronly::toString(s.sum_type));
  }
}

// How new gradients of weights are taken from PyTorch.
enum class Allocation {
  each,   // for itself, as graphs must have it: an operator's outputs do not share memory there
  blocks  // of the routed experts in one block, of the shared expert in another: an allocation
          // costs the host microseconds. The memory goes back with a block's last gradient
};

// Where the weights' gradients go: into new tensors, or into main_grads, or nowhere.
struct WeightGradients {
  std::array<OptionalTensor, kWeights> out;
  std::array<GradMode, kWeights> mode{};
  std::array<const Tensor*, kWeights> target{};

  WeightGradients(const Weights& weights, const Weights& main_grads, int64_t needs, const Sizes& s,
                  const Tensor& like, Allocation allocation) {
    for (int i = 0; i < kWeights; ++i) {
      const bool wanted = weights[i].has_value() && ((needs >> (kFirstWeightBit + i)) & 1) != 0;
      if (wanted && main_grads[i]) {
        check_main_grad(kWeightNames[i], *main_grads[i], *weights[i], s);
        mode[i] = GradMode::accumulate;
        target[i] = &*main_grads[i];
      } else if (wanted) {
        mode[i] = GradMode::storage;
      }
    }
    if (allocation == Allocation::blocks) {
      take_block(weights, w_gate, w_down, s, like);
      take_block(weights, w_shared_gate, shared_gate_vector, s, like);
    }
    for (int i = 0; i < kWeights; ++i) {
      if (mode[i] != GradMode::storage) continue;
      if (!out[i]) {
        const auto sizes = weights[i]->sizes();
        out[i] = empty(like, sizes.data(), sizes.size(), s.type);
      }
      target[i] = &*out[i];
    }
  }
  WeightGradients(const WeightGradients&) = delete;  // `target` points into `out`
  WeightGradients& operator=(const WeightGradients&) = delete;

  StackGrad stack(Weight i) const {
    if (mode[i] == GradMode::none) return {};
    return {{data(*target[i]), target[i]->stride(0), target[i]->stride(1)}, mode[i]};
  }
  MatrixGrad matrix(Weight i) const {
    if (mode[i] == GradMode::none) return {};
    return {{data(*target[i]), target[i]->stride(0)}, mode[i]};
  }

 private:
  // For the new gradients from `first` to `last`, if there are several.
  void take_block(const Weights& weights, int first, int last, const Sizes& s, const Tensor& like) {
    constexpr int64_t kAlignment = 256;  // elements: as far apart as PyTorch's own
    std::array<int64_t, kWeights> begin{};
    int64_t elements = 0;
    int count = 0;
    for (int i = first; i <= last; ++i) {
      if (mode[i] != GradMode::storage) continue;
      begin[i] = elements;
      elements += (weights[i]->numel() + kAlignment - 1) / kAlignment * kAlignment;
      ++count;
    }
    if (count < 2) return;
    const Tensor block = empty(like, {elements}, s.type);
    for (int i = first; i <= last; ++i) {
      if (mode[i] != GradMode::storage) continue;
      const auto sizes = weights[i]->sizes();
      out[i] = part(block, begin[i], sizes.data(), sizes.size());
    }
  }
};

Gradients differentiate(Allocation allocation, const Weights& main_grads, const Tensor& d_y,
                        const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                        const Weights& weights, const OptionalTensor& hash,
                        const OptionalTensor& saved, int64_t workspace, int64_t layout,
                        int64_t needs, const OptionalTensors& quantized) {
  return run(workspace, [&](WorkspaceEntry& entry, bool& reached_core) {
    const Sizes s(entry);
    Arguments views;
    BackwardArgs args;
    args.tokens = check_tokens(x, topk_ids, topk_weights, s);
    check_weights(weights, layout, s);
    check("d_y", d_y, {args.tokens, s.hidden}, s.type, s.device);
    if (s.device == kCpu) {
      if (!hash) refuse(ErrorCode::bad_argument, "routing_hash: missing");
      check("routing_hash", *hash, {1}, ScalarType::Long, s.device);
    }
    args.x = views.matrix(x);
    args.d_y = views.matrix(d_y);
    args.topk_ids = views.contiguous(topk_ids);
    args.id_type = id_type(topk_ids);
    args.topk_weights = views.contiguous(topk_weights);
    args.weights = views.weights(weights, layout, s);
    views.quantized_backward(quantized, s, args.weights);
    if (s.device == kCpu && hash_ids(args.topk_ids, args.id_type, args.tokens * s.topk) !=
                                *static_cast<const int64_t*>(hash->const_data_ptr())) {
      refuse(ErrorCode::bad_routing,
             "topk_ids: not those of the forward pass. Under activation checkpointing the routing "
             "was computed again and came out differently; mok.checkpoint_policy() keeps it");
    }

    const bool want_x = (needs & kNeedX) != 0, want_weights = (needs & kNeedTopkWeights) != 0;
    OptionalTensor d_x, d_topk_weights;
    if (want_x) {
      d_x = empty(x, {args.tokens, s.hidden}, s.type);
      args.d_x = {data(*d_x), s.hidden};
    }
    if (want_weights) {
      d_topk_weights = empty(x, {args.tokens, s.topk}, s.sum_type);
      args.d_topk_weights = data(*d_topk_weights);
    }
    const WeightGradients grads(weights, main_grads, needs, s, x, allocation);
    args.d_gate = grads.stack(w_gate);
    if (layout == split) {
      args.d_up = grads.stack(w_up);
    } else if (args.d_gate.mode != GradMode::none) {
      args.d_up.mode = args.d_gate.mode;
      const int64_t element = args.d_gate.mode == GradMode::accumulate ? weight_size(s.precision)
                                                                       : element_size(s.precision);
      take_apart(args.d_gate.target, layout, s, element, args.d_gate.target, args.d_up.target);
    }
    args.d_down = grads.stack(w_down);
    args.d_shared_gate_proj = grads.matrix(w_shared_gate);
    args.d_shared_up_proj = grads.matrix(w_shared_up);
    args.d_shared_down_proj = grads.matrix(w_shared_down);
    args.d_shared_gate_vector = grads.matrix(shared_gate_vector);

    const std::lock_guard lock(entry.mutex);
    if (saved && saved->numel() > 0) {
      const SavedParts parts(s, entry.options().saved_rows, args.tokens);
      check("saved", *saved, {parts.elements()}, s.type, s.device);
      if (!saved->is_contiguous()) refuse(ErrorCode::bad_argument, "saved: not contiguous");
      args.saved = parts.in(*saved, s);
    }
    reached_core = true;
    entry.backward(args);
    return Gradients{d_x,          d_topk_weights, grads.out[0], grads.out[1], grads.out[2],
                     grads.out[3], grads.out[4],   grads.out[5], grads.out[6]};
  });
}

// Of graphs, or of the eager path.
template <bool kEager>
auto backward(Tensor d_y, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate,
              OptionalTensor up, Tensor down, OptionalTensor shared_gate, OptionalTensor shared_up,
              OptionalTensor shared_down, OptionalTensor gate_vector, OptionalTensor routing_hash,
              OptionalTensor saved, int64_t workspace, int64_t layout, int64_t needs,
              OptionalTensors quantized) {
  Gradients grads = differentiate(
      kEager ? Allocation::blocks : Allocation::each, {}, d_y, x, topk_ids, topk_weights,
      {std::move(gate), std::move(up), std::move(down), std::move(shared_gate),
       std::move(shared_up), std::move(shared_down), std::move(gate_vector)},
      routing_hash, saved, workspace, layout, needs, quantized);
  return outputs([&](size_t i) { return std::move(grads[i]); });
}

template <bool kEager>
auto backward_accumulate(Tensor d_y, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate,
                         OptionalTensor up, Tensor down, OptionalTensor shared_gate,
                         OptionalTensor shared_up, OptionalTensor shared_down,
                         OptionalTensor gate_vector, OptionalTensor routing_hash,
                         OptionalTensor saved, int64_t workspace, int64_t layout, int64_t needs,
                         OptionalTensors quantized, OptionalTensor main_gate,
                         OptionalTensor main_up, OptionalTensor main_down,
                         OptionalTensor main_shared_gate, OptionalTensor main_shared_up,
                         OptionalTensor main_shared_down, OptionalTensor main_gate_vector) {
  const Gradients grads =
      differentiate(kEager ? Allocation::blocks : Allocation::each,
                    {main_gate, main_up, main_down, main_shared_gate, main_shared_up,
                     main_shared_down, main_gate_vector},
                    d_y, x, topk_ids, topk_weights,
                    {gate, up, down, shared_gate, shared_up, shared_down, gate_vector},
                    routing_hash, saved, workspace, layout, needs, quantized);
  return outputs([&](size_t i) {
    if constexpr (kEager) {
      return grads[i];
    } else {
      return grads[i] ? *grads[i]
                      : empty(x, {0}, i == 1 ? topk_weights.scalar_type() : x.scalar_type());
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(mok, m) {
  m.def("routing_hash(Tensor topk_ids) -> Tensor");
  m.def((std::string("forward") + kArguments + kCarried + "int workspace, " + kSettings +
         " -> (Tensor y, Tensor routing_hash, Tensor saved)")
            .c_str());
  m.def(backward_schema("backward", "", kGradients).c_str());
  m.def(backward_schema("backward_accumulate", kMainGrads, kGradientsOrEmpty).c_str());
  // The eager path's (python/mok/autograd.py): without a formula of their own, without arguments
  // that are not read and outputs that are empty.
  m.def((std::string("forward_eager") + kArguments + "int workspace, bool keep, " + kSettings +
         " -> (Tensor y, Tensor? routing_hash, Tensor? saved)")
            .c_str());
  m.def(backward_schema("backward_eager", "", kGradientsInBlocks).c_str());
  m.def(backward_schema("backward_accumulate_eager", kMainGrads, kGradientsInBlocks).c_str());
}

// The workspace knows its executor.
template <class Library>
void implement(Library& m) {
  m.impl("routing_hash", TORCH_BOX(&routing_hash));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward<false>));
  m.impl("backward_accumulate", TORCH_BOX(&backward_accumulate<false>));
  m.impl("forward_eager", TORCH_BOX(&forward_eager));
  m.impl("backward_eager", TORCH_BOX(&backward<true>));
  m.impl("backward_accumulate_eager", TORCH_BOX(&backward_accumulate<true>));
}

STABLE_TORCH_LIBRARY_IMPL(mok, CPU, m) { implement(m); }
#ifdef MOK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, m) { implement(m); }
#endif

}  // namespace mok::torch_ops
