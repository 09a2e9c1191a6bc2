#pragma once
// The dispatcher's side of touch: boxed handlers at the two keys.
namespace unshard::zero {

/// Registers the handlers, once per process. \throws std::runtime_error another library holds the keys.
void install_touch();

/// How many operators have a handler of their own at the lower key (those with composite kernels).
int net_operators();

}  // namespace unshard::zero
