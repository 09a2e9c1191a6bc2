#pragma once
// Which ranks can share memory.
#include <string>

namespace unshard::comm {

/// Equal on processes that can watch each other by pid, reach each other's abstract sockets and belong to one user: boot, namespaces, user.
/// `name` tells apart what would be one host (CommOptions::host_name); processes that can't share memory never get equal ones by it, unless
/// the system says nothing about itself.
std::string host_identity(const std::string& name = {});

/// The part of an identity that is alike for all processes of a machine's network, whatever they name their host; empty: it can't be told.
std::string machine_of(const std::string& identity);

}  // namespace unshard::comm
