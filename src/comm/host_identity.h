#pragma once
// Which ranks can share memory.
#include <string>

namespace unshard::comm {

/// Equal on processes that can watch each other by pid, reach each other's abstract sockets and belong to one user: boot, namespaces, user.
std::string host_identity();

}  // namespace unshard::comm
