#pragma once
// What this rank does now, for its peers' error messages; the phase before comes back at the end.
#include <string_view>

#include "unshard/comm/communicator.h"

namespace unshard::zero {

class PhaseScope {
 public:
  PhaseScope(Communicator& comm, Phase phase, std::string_view detail) : comm_(comm) {
    auto* host = comm_.local_host();
    if (!host) return;
    before_ = host->phase_of(host->rank());
    host->set_phase(phase, comm_.step(), detail);
  }
  ~PhaseScope() {
    if (auto* host = comm_.local_host()) host->set_phase(before_, comm_.step(), {});
  }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Communicator& comm_;
  Phase before_ = Phase::idle;
};

}  // namespace unshard::zero
