#pragma once
// Starting the service from any small all-gather of strings: what ShardService::start does with a Communicator, and tests without one.
#include "unshard/comm/host_group.h"
#include "zero/shard_peer.h"
#include "zero/shard_service.h"

namespace unshard {

std::unique_ptr<ShardService> start_shard_service(int rank, int world_size, const HostGroup::Exchange& exchange,
                                                  ShardService::Lookup lookup, const ShardWait& wait, const std::vector<int>& nearby = {});

}  // namespace unshard
