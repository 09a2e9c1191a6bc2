#pragma once
// A c10d process group for CPU tensors. The only place that knows ProcessGroupGloo.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace unshard::comm {

/// Collective; ranks find each other through `store` (its keys must be this group's own). The interface is GLOO_SOCKET_IFNAME's, else
/// that of own_address(). `watch(seconds waited)` is called about every 50 ms and throws to leave.
c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                       std::chrono::duration<double> timeout,
                                                       const std::function<void(double)>& watch = {});
/// As above, over the loopback interface.
c10::intrusive_ptr<c10d::ProcessGroup> make_loopback_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                           std::chrono::duration<double> timeout);

/// For interfaces of torch that take milliseconds.
std::chrono::milliseconds to_milliseconds(std::chrono::duration<double> time);

}  // namespace unshard::comm
