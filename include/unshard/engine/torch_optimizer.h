#pragma once
// Any torch::optim optimizer of a C++ program, run on this rank's pieces.
#include <memory>

#include "unshard/engine/engine.h"

namespace torch::optim {
class Optimizer;
}

namespace unshard {

/// Wrap `client`, which was built on the model's parameters: its groups' parameters are replaced by this rank's flat fp32 pieces (call
/// groups_of() first); hyperparameters stay the client's own (change them there), learning rates follow the engine's schedule if there is
/// one. Element-wise optimizers equal their dense selves. \param parameters  the same named parameters the engine gets; checked against the
/// client's. \return            an Optimizer for EngineOptions::optimizer; fill EngineOptions::groups with groups_of().
std::shared_ptr<Optimizer> wrap_torch_optimizer(std::shared_ptr<torch::optim::Optimizer> client, const NamedParameters& parameters);
std::vector<ParamGroup> groups_of(const torch::optim::Optimizer& client, const NamedParameters& parameters);

}  // namespace unshard
