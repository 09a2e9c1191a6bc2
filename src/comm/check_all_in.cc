// Calls that every rank must be in: announced in shared memory, compared, waited for.
#include "comm/host_group_internal.h"
#include "unshard/core/error.h"

namespace unshard::comm {

// Two announcements a rank: a rank announces number k + 2 only after number k + 1 ended, by when every rank has read number k.
void HostGroupImpl::check_all_in(std::string_view call, std::chrono::duration<double> limit) {
  check_member("check_all_in");
  call = call.substr(0, kMaxAnnounceBytes);
  const std::uint64_t sequence = ++announcements_;
  Announcement& announcement = mine().announced[sequence % 2];
  announcement.call.set(call);
  announcement.sequence.store(sequence, std::memory_order_release);
  notify();

  const auto slot = [&](int peer) -> const Announcement& { return block(peer).announced[sequence % 2]; };
  const auto owes = [&](int peer) { return slot(peer).sequence.load(std::memory_order_acquire) < sequence; };
  // Stop at the first peer that announced something else: the others may never come.
  int other = -1;
  const auto ready = [&] {
    bool all = true;
    for (int peer = 0; peer < size_; ++peer) {
      if (owes(peer)) {
        all = false;
      } else if (peer != rank_ && slot(peer).call.get() != call) {
        other = peer;
        return true;
      }
    }
    return all;
  };
  const bool came = wait(ready, {"check_all_in", call}, {owes, limit});
  if (other >= 0)
    throw CommError(cat("[comm.check_all_in] the ranks are in different calls: rank ", name(rank_), " is in ", call, ", rank ", name(other),
                        " is in ", slot(other).call.get(), "; every rank must make the same calls in the same order"));
  if (!came) throw CommError(cat("[comm.check_all_in] not every rank came within ", limit.count(), " s: ", absence_text(call, sequence)));
}

std::string HostGroupImpl::absence_text(std::string_view call, std::uint64_t sequence) const {
  std::string text;
  for (int rank = 0; rank < size_; ++rank) {
    const bool here = block(rank).announced[sequence % 2].sequence.load(std::memory_order_acquire) >= sequence;
    text += rank ? ", " : "";
    if (const std::string stopped = here ? std::string() : describe_stopped(rank); !stopped.empty()) {
      text += stopped;
      continue;
    }
    text += cat("rank ", name(rank), " is in ", here ? std::string(call) : last_seen(rank));
    if (!here && block(rank).waits.load(std::memory_order_acquire) > 0) text += cat(", waiting in ", block(rank).waiting.get());
  }
  return text;
}

}  // namespace unshard::comm
