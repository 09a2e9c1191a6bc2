#pragma once
// The timeline's counter of what was gathered: private copies, and between hosts what this host holds of other hosts' pieces.
#include "zero/host_copy.h"
#include "zero/state.h"

namespace unshard::zero {

/// The store's lock is held. Ranks of one host show the same for what they share.
inline void count_gathered(const StoreState& state) {
  state.comm->timeline().count("gathered parameters", state.live_bytes + (state.host_copy ? state.host_copy->live_bytes() : 0));
}

}  // namespace unshard::zero
