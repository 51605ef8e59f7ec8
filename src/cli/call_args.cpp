#include "cli/call_args.h"

namespace mok::cli {

void want_gradients(const Spec& spec, const std::function<void*(Out)>& out, BackwardArgs* args) {
  const LayerShape& s = spec.shape;
  const int64_t h = s.hidden, i = s.intermediate, shared = s.shared_intermediate;
  BackwardArgs& a = *args;
  a.d_x = {out(Out::d_x), h};
  a.d_topk_weights = out(Out::d_topk_weights);
  a.d_gate = {{out(Out::d_w_gate), i * h, h}, spec.grads};
  a.d_up = {{out(Out::d_w_up), i * h, h}, spec.grads};
  a.d_down = {{out(Out::d_w_down), h * i, i}, spec.grads};
  if (shared > 0) {
    a.d_shared_gate_proj = {{out(Out::d_shared_gate), h}, spec.grads};
    a.d_shared_up_proj = {{out(Out::d_shared_up), h}, spec.grads};
    a.d_shared_down_proj = {{out(Out::d_shared_down), shared}, spec.grads};
  }
  if (s.shared_gate) a.d_shared_gate_vector = {{out(Out::d_shared_vector), h}, spec.grads};
}

ForwardArgs forward_of(const BackwardArgs& backward, Matrix y) {
  ForwardArgs a;
  a.tokens = backward.tokens;
  a.x = backward.x;
  a.topk_ids = backward.topk_ids;
  a.id_type = backward.id_type;
  a.topk_weights = backward.topk_weights;
  a.weights = backward.weights;
  a.saved = backward.saved;
  a.y = y;
  return a;
}

}  // namespace mok::cli
