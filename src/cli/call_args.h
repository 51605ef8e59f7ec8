// The part of a call's arguments that is the same on every executor.
#pragma once

#include <functional>

#include "cli/results.h"
#include "cli/spec.h"

namespace mok::cli {

// Asks for every gradient that the shape has, as spec.grads says, at out(its output).
void want_gradients(const Spec& spec, const std::function<void*(Out)>& out, BackwardArgs* args);

// The forward call that goes before.
ForwardArgs forward_of(const BackwardArgs& backward, Matrix y);

}  // namespace mok::cli
