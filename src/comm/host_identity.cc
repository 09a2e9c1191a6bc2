#include "comm/host_identity.h"

#include <limits.h>
#include <unistd.h>

#include <fstream>

#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

std::string link_target(const char* path) {
  char target[PATH_MAX];
  const ssize_t length = ::readlink(path, target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<std::size_t>(length)) : "?";
}

}  // namespace

std::string host_identity(const std::string& name) {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  if (boot.empty())
    return name.empty() ? cat("unknown ", ::getpid()) : cat("named ", name);  // without a name equal to nobody's: no sharing
  return cat(name.empty() ? "" : cat("named ", name, " on "), boot, ' ', link_target("/proc/self/ns/pid"), ' ',
             link_target("/proc/self/ns/net"), ' ', link_target("/proc/self/ns/ipc"), ' ', ::getuid());
}

// "named NAME on BOOT pid:[..] net:[..] ipc:[..] UID"
std::string machine_of(const std::string& identity) {
  const auto network = identity.find(" net:[");
  if (network == std::string::npos) return {};
  const auto process = identity.rfind(" pid:[", network), boot = process == std::string::npos ? process : identity.rfind(' ', process - 1);
  if (process == std::string::npos) return {};
  return identity.substr(boot == std::string::npos ? 0 : boot + 1, process - boot - 1) +
         identity.substr(network, identity.find(']', network) + 1 - network);
}

}  // namespace unshard::comm
