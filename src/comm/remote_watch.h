#pragma once
// Notices that ranks with which this one shares no memory ended or failed: one idle connection to each, which the kernel closes with its
// process.
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "comm/fork_guard.h"
#include "comm/host_map.h"
#include "comm/unique_fd.h"
#include "unshard/comm/host_group.h"

namespace unshard::comm {

class RemoteWatch {
 public:
  /// Collective over all ranks. `address`: this host's, as others reach it. A peer that can't be connected isn't watched. `check` is called
  /// in waits and throws to leave them. A machine that goes without a word (power, cable) is noticed after 9 s.
  static std::unique_ptr<RemoteWatch> connect(const HostMap& map, int rank, const std::string& address, const HostGroup::Exchange& exchange,
                                              const std::function<void()>& check);
  /// Says that this rank leaves, unless it failed.
  ~RemoteWatch();

  /// Tell the ranks of other hosts what this one waits in ("waiting in ..."; empty: nothing any more). Cheap, and seldom done.
  void say(std::string_view text);
  /// Why this rank is about to leave without having failed; see HostGroupImpl::set_departure.
  void set_departure(std::string_view why);

  /// Tell the ranks of other hosts why this one gives up.
  void fail(std::string_view reason);

  enum class Kind { died, failed, left };
  struct End {
    int rank = -1;
    Kind kind = Kind::died;
    std::string how;  ///< "is gone (...)", "left the group ..."; of one that failed what it told, see failure_told_by()
  };
  std::vector<End> ended();

  /// What is known of a rank of another host that hasn't ended.
  struct Word {
    bool connected = false;  ///< else nothing below is known
    double silent_s = 0;     ///< its host has answered nothing for so long; 0: it answers (whatever the process does)
    std::string says;        ///< see say()
  };
  Word word_of(int rank);

 private:
  struct Peer {
    int rank = -1;
    UniqueFd fd;
    std::string heard;
    bool greeted = false;  ///< it is the one: whoever else answered a call isn't listened to
    bool closed = false;
    std::string says = {};
    bool choked = false;  ///< it doesn't read, and what was sent last ends in the middle
  };
  RemoteWatch() = default;
  void tell_last(std::string_view text);
  static bool send_to(Peer& peer, std::string_view text);
  static void take_saying(Peer& peer);
  static void listen_to(Peer& peer);

  std::mutex mutex_;
  std::vector<Peer> peers_;
  bool told_ = false;
  std::string departure_;
  const ForkGuard fork_guard_;
};

}  // namespace unshard::comm
