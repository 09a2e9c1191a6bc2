#pragma once
// What a touch is part of. Each mode has its own trace and plan, so that an evaluation between two steps costs training nothing.
#include <cstddef>
#include <cstdint>

namespace unshard::zero {

// [Note: modes] Told by what every rank sees alike and nobody has to say:
// - train: a step, which is what lies between two updates: forwards with gradients, all they call, and backwards.
// - eval: a forward of the engine while gradients are off; each is a pass.
// - generate: touches without gradients outside the engine's forward (generate(), a module that is called by itself), before the step has
//   begun; a pass ends where the parameter that it began with is touched again.
// Once a step has begun, touches without gradients outside the engine's forward are part of it: reentrant checkpointing runs whole layers
// that way. A forward that records a graph is training whatever module.training says: a backward may follow.
enum class Mode : std::uint8_t { train, eval, generate };
constexpr std::size_t kModes = 3;

/// The engine's forward, as it began.
enum class Forward : std::uint8_t { none, with_gradients, without_gradients };

/// \param step_begun  the step has had touches.
Mode mode_of_touch(Forward forward, bool step_begun);
/// On this thread gradients are on, or a backward runs (which turns them off).
bool touches_for_gradients();

}  // namespace unshard::zero
