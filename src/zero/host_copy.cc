#include "zero/host_copy.h"

#include <algorithm>

#include "comm/shared_text.h"
#include "unshard/comm/host_group.h"
#include "unshard/core/error.h"

namespace unshard::zero {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kLimitBytes = std::size_t{1} << 32;  // address space only

// A cell's word: presence (low 8 bits), users (24 bits), epoch of the bytes (high 32 bits).
constexpr std::uint64_t kUser = std::uint64_t{1} << 8, kUsers = std::uint64_t{0xffffff} << 8;
std::uint32_t users_of(std::uint64_t word) { return static_cast<std::uint32_t>((word & kUsers) >> 8); }
std::uint64_t with(std::uint64_t word, Presence presence) { return (word & ~std::uint64_t{0xff}) | static_cast<std::uint64_t>(presence); }
std::uint64_t with(std::uint64_t word, Presence presence, std::uint32_t epoch) {
  return (std::uint64_t{epoch} << 32) | (word & kUsers) | static_cast<std::uint64_t>(presence);
}
Presence presence_of(std::uint64_t word) { return static_cast<Presence>(word & 0xff); }
Presence presence_of(std::uint64_t word, std::uint32_t epoch) {
  const auto presence = presence_of(word);
  const bool old = static_cast<std::int32_t>(static_cast<std::uint32_t>(word >> 32) - epoch) < 0;
  return presence == Presence::present && old ? Presence::stale : presence;
}

void raise(std::atomic<std::int64_t>& peak, std::int64_t value) {
  auto seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// A count of failures: the local rank of the last one (low 16 bits), how many.
std::uint32_t one_more(std::uint32_t failures, int local_rank) {
  return ((failures >> 16) + 1) << 16 | (static_cast<std::uint32_t>(local_rank) & 0xffff);
}

}  // namespace

// Zero-filled memory is the valid initial state of all three.
struct alignas(16) HostCopy::Cell {
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint32_t> failures;  ///< of fetches
  std::atomic<std::int32_t> claimer;    ///< local rank that was busy with it last
};
struct HostCopy::Header {
  alignas(kLine) std::atomic<std::int64_t> live_numel;
  std::atomic<std::int64_t> live_bytes, peak_numel, peak_bytes;
  std::atomic<std::int32_t> fetching_ahead, progress_waiters;
  std::atomic<std::uint32_t> failures;
  std::atomic<std::uint64_t> ended_ahead;
  struct alignas(kLine) Cursor {
    std::atomic<std::uint64_t> word;
  } cursors[kPlans];
};

/// What one rank tells the others.
struct alignas(kLine) HostCopy::Line {
  std::atomic<std::uint64_t> progress[kPlans];
  alignas(kLine) std::atomic<std::uint64_t> moved;
  comm::SharedText<1016> failure;  ///< of its last fetch that failed
};

HostCopy::HostCopy(HostGroup& host) : host_(host), header_bytes_(sizeof(Header) + sizeof(Line) * static_cast<std::size_t>(host.size())) {
  segment_ = host.create_segment("parameter presence", std::max<std::size_t>(header_bytes_, 4096), kLimitBytes);
}
HostCopy::~HostCopy() = default;

HostCopy::Header& HostCopy::header() const { return *reinterpret_cast<Header*>(segment_->data()); }
HostCopy::Cell& HostCopy::cell(int id) const {
  return reinterpret_cast<Cell*>(segment_->data() + header_bytes_)[static_cast<std::size_t>(id)];
}

int HostCopy::local_rank() const { return host_.rank(); }
int HostCopy::local_ranks() const { return host_.size(); }

HostCopy::Line& HostCopy::line(int local_rank) const {
  return reinterpret_cast<Line*>(segment_->data() + sizeof(Header))[static_cast<std::size_t>(local_rank)];
}

std::atomic<std::uint64_t>& HostCopy::progress(std::size_t plan, int local_rank) { return line(local_rank).progress[plan]; }
std::atomic<std::uint64_t>& HostCopy::moved() { return line(local_rank()).moved; }
std::atomic<std::uint64_t>& HostCopy::cursor(std::size_t plan) { return header().cursors[plan].word; }

std::uint64_t HostCopy::others_progress() {
  std::uint64_t sum = 0;
  for (int rank = 0; rank < local_ranks(); ++rank) {
    for (std::size_t plan = 0; plan < kPlans && rank != local_rank(); ++plan)
      sum += progress(plan, rank).load(std::memory_order_acquire) * (2 * (static_cast<unsigned>(rank) * kPlans + plan) + 1);
  }
  return sum;
}

void HostCopy::add(int id, const std::string& name, const std::function<void()>& set_up) {
  const auto needed = header_bytes_ + (static_cast<std::size_t>(id) + 1) * sizeof(Cell);
  if (needed > segment_->size()) segment_->reserve(needed * 2);
  auto& word = cell(id).word;
  for (;;) {
    std::uint64_t unborn = 0;
    if (!word.compare_exchange_strong(unborn, with(0, Presence::busy))) {
      host_.wait_until([&] { return presence_of(word.load(std::memory_order_acquire)) != Presence::busy; },
                       cat("parameter '", name, "' is set up by a rank of this host"));
      if (presence_of(word.load(std::memory_order_acquire)) != Presence::unborn) return;
      continue;  // it failed for the one who tried
    }
    try {
      set_up();
    } catch (...) {
      give_back(id, Presence::unborn);
      throw;
    }
    return give_back(id, Presence::absent);
  }
}

Presence HostCopy::presence(int id, std::uint32_t epoch) const { return presence_of(cell(id).word.load(std::memory_order_acquire), epoch); }
std::uint32_t HostCopy::users(int id) const { return users_of(cell(id).word.load(std::memory_order_acquire)); }

bool HostCopy::hold(int id, std::uint32_t epoch) {
  auto& word = cell(id).word;
  auto seen = word.load(std::memory_order_acquire);
  while (presence_of(seen, epoch) == Presence::present) {
    if (word.compare_exchange_weak(seen, seen + kUser, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void HostCopy::drop(int id) { cell(id).word.fetch_sub(kUser, std::memory_order_acq_rel); }

bool HostCopy::claim(int id, std::uint32_t epoch, Presence* before) {
  auto& word = cell(id).word;
  auto seen = word.load(std::memory_order_acquire);
  for (;;) {
    *before = presence_of(seen, epoch);
    if (*before != Presence::absent && *before != Presence::stale) return false;
    if (word.compare_exchange_weak(seen, with(seen, Presence::busy, epoch), std::memory_order_acq_rel)) break;
  }
  cell(id).claimer.store(local_rank(), std::memory_order_release);
  return true;
}

void HostCopy::arrived(int id, bool held) {
  auto& word = cell(id).word;
  auto seen = word.load(std::memory_order_acquire);
  while (!word.compare_exchange_weak(seen, with(seen, Presence::present) + (held ? kUser : 0), std::memory_order_acq_rel)) {
  }
}

void HostCopy::give_back(int id, Presence to) {
  auto& word = cell(id).word;
  auto seen = word.load(std::memory_order_acquire);
  while (!word.compare_exchange_weak(seen, with(seen, to), std::memory_order_acq_rel)) {
  }
  notify();
}

void HostCopy::fail(const std::vector<int>& ids, std::string_view why) {
  const std::lock_guard lock(failing_);
  line(local_rank()).failure.set(why);
  auto seen = header().failures.load(std::memory_order_relaxed);
  while (!header().failures.compare_exchange_weak(seen, one_more(seen, local_rank()), std::memory_order_acq_rel)) {
  }
  for (const int id : ids) {
    auto& failures = cell(id).failures;  // the claim's holder is the only writer
    failures.store(one_more(failures.load(std::memory_order_relaxed), local_rank()), std::memory_order_release);
    give_back(id, Presence::stale);
  }
}

std::uint32_t HostCopy::failures(int id) const { return cell(id).failures.load(std::memory_order_acquire); }
std::uint32_t HostCopy::failures() const { return header().failures.load(std::memory_order_acquire); }
std::string HostCopy::why(std::uint32_t failures) const { return line(static_cast<int>(failures & 0xffff)).failure.get(); }

bool HostCopy::claim_unused(int id) {
  auto& word = cell(id).word;
  auto seen = word.load(std::memory_order_acquire);
  while ((presence_of(seen) == Presence::present || presence_of(seen) == Presence::stale) && users_of(seen) == 0) {
    if (!word.compare_exchange_weak(seen, with(seen, Presence::busy), std::memory_order_acq_rel)) continue;
    cell(id).claimer.store(local_rank(), std::memory_order_release);
    return true;
  }
  return false;
}

void HostCopy::wait_while_busy(int id, const std::string& name, std::uint32_t failures) {
  Cell& one = cell(id);
  const auto failed = [&] { return one.failures.load(std::memory_order_acquire) != failures; };
  const auto ready = [&] { return presence_of(one.word.load(std::memory_order_acquire)) != Presence::busy || failed(); };
  const auto progress = [&] { return line(one.claimer.load(std::memory_order_acquire)).moved.load(std::memory_order_relaxed); };
  if (!ready()) host_.wait_for_work(ready, progress, cat("parameter '", name, "' is brought in by a rank of this host"));
  if (failed()) throw CommError(cat("[zero.touch '", name, "'] ", why(one.failures.load(std::memory_order_acquire))));
}

void HostCopy::wait_until(const std::function<bool()>& ready, const std::string& where, std::uint32_t failures) {
  const auto failed = [&] { return this->failures() != failures; };
  const auto progress = [&] {
    std::uint64_t sum = 0;
    for (int rank = 0; rank < local_ranks(); ++rank) sum += line(rank).moved.load(std::memory_order_relaxed);
    return sum;
  };
  host_.wait_for_work([&] { return failed() || ready(); }, progress, where);
  if (failed()) throw CommError(cat("[zero.touch] ", where, ": ", why(this->failures())));
}
void HostCopy::notify() { host_.notify(); }

bool HostCopy::take_room(std::int64_t numel, std::int64_t bytes, std::int64_t limit_numel) {
  auto& live = header().live_numel;
  auto seen = live.load(std::memory_order_relaxed);
  do {
    if (numel > limit_numel - seen) return false;
  } while (!live.compare_exchange_weak(seen, seen + numel, std::memory_order_acquire, std::memory_order_relaxed));
  raise(header().peak_numel, seen + numel);
  raise(header().peak_bytes, header().live_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  return true;
}

void HostCopy::leave_room(std::int64_t numel, std::int64_t bytes) {
  header().live_bytes.fetch_sub(bytes, std::memory_order_relaxed);  // first: whoever is given the elements' room adds its bytes after it
  header().live_numel.fetch_sub(numel, std::memory_order_release);
}

std::int64_t HostCopy::live_numel() const { return header().live_numel.load(std::memory_order_relaxed); }
std::int64_t HostCopy::live_bytes() const { return header().live_bytes.load(std::memory_order_relaxed); }
std::int64_t HostCopy::peak_numel() const { return header().peak_numel.load(std::memory_order_relaxed); }
std::int64_t HostCopy::peak_bytes() const { return header().peak_bytes.load(std::memory_order_relaxed); }
std::atomic<std::int32_t>& HostCopy::progress_waiters() { return header().progress_waiters; }
std::atomic<std::int32_t>& HostCopy::fetching_ahead() { return header().fetching_ahead; }
std::atomic<std::uint64_t>& HostCopy::ended_ahead() { return header().ended_ahead; }

void HostCopy::reset_peak() {
  header().peak_numel.store(live_numel(), std::memory_order_relaxed);
  header().peak_bytes.store(live_bytes(), std::memory_order_relaxed);
}

}  // namespace unshard::zero
