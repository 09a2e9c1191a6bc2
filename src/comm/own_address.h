#pragma once
// The address under which ranks of other hosts reach this one.
#include <string>

namespace unshard::comm {

/// Numeric. Chosen as Gloo chooses: the first address of the interface GLOO_SOCKET_IFNAME names, else one of this machine's that its name
/// resolves to, else loopback.
std::string own_address();

}  // namespace unshard::comm
