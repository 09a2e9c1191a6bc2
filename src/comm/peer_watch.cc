#include "comm/peer_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "unshard/core/error.h"

namespace unshard::comm {

PeerWatch::PeerWatch(const std::vector<int>& pids, const std::vector<int>& names) {
  for (std::size_t rank = 0; rank < pids.size(); ++rank) {
    if (pids[rank] == 0 || pids[rank] == ::getpid()) continue;
    UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pids[rank], 0)));  // close-on-exec by itself
    if (!fd)
      throw CommError(cat("[comm.connect] rank ", names.empty() ? static_cast<int>(rank) : names[rank], " (pid ", pids[rank],
                          ") can't be watched: ", errno == ESRCH ? "it is gone" : std::strerror(errno)));
    ranks_.push_back(static_cast<int>(rank));
    pidfds_.push_back(std::move(fd));
  }
}

std::vector<int> PeerWatch::dead() const {
  if (ranks_.empty()) return {};
  std::vector<pollfd> polls;
  polls.reserve(ranks_.size());
  for (const auto& fd : pidfds_) polls.push_back({fd.get(), POLLIN, 0});
  std::vector<int> ended;
  if (::poll(polls.data(), polls.size(), 0) <= 0) return ended;
  for (std::size_t i = 0; i < polls.size(); ++i)
    if (polls[i].revents & (POLLIN | POLLHUP)) ended.push_back(ranks_[i]);
  return ended;
}

}  // namespace unshard::comm
