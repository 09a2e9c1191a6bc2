#include "comm/gloo_group.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/aside.h"
#include "comm/gloo_mismatch.h"
#include "comm/own_address.h"

namespace unshard::comm {

namespace {

using Device = std::shared_ptr<::gloo::transport::Device>;

Device default_device() {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");  // torch's own variable, read where torch's Python front reads it
  if (interfaces && *interfaces) {
    const std::string names(interfaces);
    return c10d::ProcessGroupGloo::createDeviceForInterface(names.substr(0, names.find(',')));
  }
  return c10d::ProcessGroupGloo::createDeviceForHostname(own_address());
}

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::duration<double> timeout, Device device) {
  catch_gloo_mismatches();
  auto options = c10d::ProcessGroupGloo::Options::create(to_milliseconds(timeout));
  options->devices.push_back(std::move(device));
  options->threads = 2;
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return group;
}

}  // namespace

std::chrono::milliseconds to_milliseconds(std::chrono::duration<double> time) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::clamp(time.count(), 0.001, 1e9) * 1000));
}

c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                       std::chrono::duration<double> timeout, const std::function<void(double)>& watch) {
  return aside([=] { return make_group(store, rank, size, timeout, default_device()); }, watch);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_loopback_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                           std::chrono::duration<double> timeout) {
  return make_group(store, rank, size, timeout, c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
}

}  // namespace unshard::comm
