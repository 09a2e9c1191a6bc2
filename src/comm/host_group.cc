// HostGroup: life, barriers, small gathers, segments.
#include "unshard/comm/host_group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/futex.h"
#include "comm/host_group_internal.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

/// Spinning is for peers that run now: with fewer cores than ranks it would keep them from running.
std::chrono::nanoseconds spin_time(int ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int usable = ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return ranks <= usable ? std::chrono::microseconds(20) : std::chrono::nanoseconds(0);
}

}  // namespace

HostGroupImpl::HostGroupImpl(Parts parts)
    : rank_(parts.rank),
      size_(parts.size),
      options_(std::move(parts.options)),
      spin_(spin_time(parts.size)),
      control_segment_(std::move(parts.control)),
      control_(reinterpret_cast<ControlBlock*>(control_segment_->data())),
      watch_(std::move(parts.watch)),
      channel_(std::move(parts.channel)),
      share_(std::move(parts.share)),
      names_(std::move(parts.names)),
      family_(std::move(parts.family)),
      family_ranks_(std::move(parts.family_ranks)) {
  mine().pid.store(::getpid(), std::memory_order_relaxed);
  mine().since_ns.store(monotonic_ns(), std::memory_order_release);
}

HostGroupImpl::~HostGroupImpl() {
  if (fork_guard_.in_owner()) leave(Phase::gone);
}

void HostGroupImpl::barrier(std::string_view where) {
  check_member("barrier");
  check_not_ended({"barrier", where});  // one that gave up doesn't arrive
  const std::uint64_t target = mine().barriers.load(std::memory_order_relaxed) + 1;
  mine().barriers.store(target, std::memory_order_release);
  notify();
  const auto owes = [this, target](int peer) { return block(peer).barriers.load(std::memory_order_acquire) < target; };
  const auto ready = [&] {
    for (int peer = 0; peer < size_; ++peer)
      if (owes(peer)) return false;
    return true;
  };
  if (!ready()) wait(ready, {"barrier", where}, {owes, {}});
}

void HostGroupImpl::all_gather_small(const void* mine_data, std::size_t bytes, void* all, std::string_view where) {
  check_member("all_gather_small");
  check_not_ended({"all_gather_small", where});
  require(bytes <= kSmallBytes, "[comm.all_gather_small '", where, "'] ", bytes, " bytes a rank; at most ", kSmallBytes);
  const std::uint64_t sequence = ++small_gathers_;
  SmallSlot& slot = mine().small[sequence % 2];
  if (bytes) std::memcpy(slot.data, mine_data, bytes);
  slot.bytes.store(static_cast<std::uint32_t>(bytes), std::memory_order_relaxed);
  slot.sequence.store(sequence, std::memory_order_release);
  notify();
  // A peer may be one gather ahead, never two; its slot of this parity then still holds this gather.
  const auto owes = [&](int peer) { return block(peer).small[sequence % 2].sequence.load(std::memory_order_acquire) < sequence; };
  for (int peer = 0; peer < size_; ++peer) {
    if (owes(peer)) wait([&] { return !owes(peer); }, {"all_gather_small", where}, {owes, {}});
    const SmallSlot& theirs = block(peer).small[sequence % 2];
    const std::uint32_t sent = theirs.bytes.load(std::memory_order_relaxed);
    if (sent != bytes)
      throw CommError(cat("[comm.all_gather_small '", where, "'] rank ", name(rank_), " brought ", bytes, " bytes, rank ", name(peer), " ",
                          sent, ": they are in different calls"));
    if (bytes) std::memcpy(static_cast<std::byte*>(all) + static_cast<std::size_t>(peer) * bytes, theirs.data, bytes);
  }
}

std::vector<std::string> HostGroupImpl::all_gather_strings(const std::string& mine_text, std::string_view where) {
  const auto ranks = static_cast<std::size_t>(size_);
  std::vector<std::uint64_t> lengths(ranks);
  const std::uint64_t length = mine_text.size();
  all_gather_small(&length, sizeof(length), lengths.data(), where);
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> texts(ranks);
  std::vector<char> piece(kSmallBytes), pieces(kSmallBytes * ranks);
  for (std::size_t at = 0; at < longest; at += kSmallBytes) {
    const std::size_t bytes = std::min(kSmallBytes, longest - at);
    if (at < length) std::memcpy(piece.data(), mine_text.data() + at, std::min<std::size_t>(bytes, length - at));
    all_gather_small(piece.data(), bytes, pieces.data(), where);
    for (std::size_t rank = 0; rank < ranks; ++rank)
      if (at < lengths[rank]) texts[rank].append(pieces.data() + rank * bytes, std::min<std::size_t>(bytes, lengths[rank] - at));
  }
  return texts;
}

std::shared_ptr<SharedSegment> HostGroupImpl::create_segment(std::string_view name, std::size_t bytes, std::size_t limit_bytes) {
  return create(name, bytes, limit_bytes, Backing::allocated);
}

// Rank 0 makes the segment and says how that went before any descriptor travels, so that all ranks throw or none.
std::shared_ptr<SharedSegment> HostGroupImpl::create(std::string_view name, std::size_t bytes, std::size_t limit_bytes, Backing backing) {
  check_member("create_segment");
  const std::string where = cat("create_segment ", name);
  const std::string wanted = cat(name, ", ", bytes, " bytes, limit ", limit_bytes);
  std::shared_ptr<MemfdSegment> segment;
  std::string problem;
  if (rank_ == 0) {
    try {
      segment = MemfdSegment::create(std::string(name), bytes, limit_bytes, backing);
    } catch (const CommError& error) {
      problem = error.what();
    }
  }
  const auto reports = all_gather_strings(wanted + '\n' + problem, where);
  for (int peer = 0; peer < size_; ++peer) {
    const std::string& report = reports[static_cast<std::size_t>(peer)];
    const auto line = report.find('\n');
    if (report.substr(0, line) != wanted)
      throw CommError(cat("[comm.create_segment] rank ", this->name(rank_), " asks for '", wanted, "', rank ", this->name(peer), " for '",
                          report.substr(0, line), "'"));
    if (line + 1 < report.size()) throw CommError(report.substr(line + 1));
  }
  if (size_ == 1) return segment;

  if (share_) {
    if (rank_ == 0) share_->segment = segment;
    barrier(where);
    segment = share_->segment;
    barrier(where);
    if (rank_ == 0) share_->segment.reset();  // nobody reads it before the next create, which begins with a gather
    return segment;
  }
  if (rank_ == 0) {
    channel_.send_to_all(segment->fd());
  } else {
    const Place place{"create_segment", name};
    const std::int64_t started = monotonic_ns();
    UniqueFd fd = channel_.receive([&] {
      WaitClock clock(monotonic_ns());
      look_for_ended_peers([] { return false; }, place, {}, clock);
      if (options_.interrupt_check) options_.interrupt_check();
      if (static_cast<double>(monotonic_ns() - started) * 1e-9 > options_.timeout.count())
        throw CommError(
            cat(place.text(), " rank ", this->name(0), " sent no memory for ", options_.timeout.count(), " s: ", describe_all()));
    });
    try {
      segment = MemfdSegment::map(std::move(fd), std::string(name), limit_bytes);
    } catch (const CommError& error) {
      problem = error.what();
    }
  }
  for (const auto& report : all_gather_strings(problem, where))
    if (!report.empty()) throw CommError(report);
  return segment;
}

}  // namespace unshard::comm
