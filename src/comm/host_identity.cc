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

}  // namespace unshard::comm
