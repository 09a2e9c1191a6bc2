#pragma once
// Strings of all ranks over a c10d group: whoever dies meanwhile is noticed by its connection, where a store would be waited for in vain.
#include <string>
#include <vector>

#include "comm/c10d_transport.h"

namespace unshard::comm {

/// Collective: every rank's string, in rank order. Needs a backend for CPU tensors.
std::vector<std::string> exchange_texts(C10dTransport& transport, const Call& call, const std::string& mine, int size);

}  // namespace unshard::comm
