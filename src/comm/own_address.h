#pragma once
// The address under which ranks of other hosts reach this one.
#include <string>

namespace unshard::comm {

/// Numeric. The first address of the interface GLOO_SOCKET_IFNAME names; else one of this machine's that its name resolves to, as Gloo
/// chooses; where that is none or a loopback address (as some systems set names up), the one from which MASTER_ADDR is reached; else
/// loopback.
std::string own_address();

/// What GLOO_SOCKET_IFNAME must be for torch's own groups to use own_address(); empty where they do anyway.
std::string interface_for_gloo();

bool is_loopback(const std::string& address);

}  // namespace unshard::comm
