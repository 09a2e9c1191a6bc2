#pragma once
// Tensor parallelism's ranks over a Communicator: shared memory on a host, c10d between hosts.
#include <memory>

#include "inference/model/shard.h"
#include "unshard/comm/communicator.h"

namespace unshard::inference {

std::shared_ptr<Peers> peers_over(std::shared_ptr<Communicator> comm);

}  // namespace unshard::inference
