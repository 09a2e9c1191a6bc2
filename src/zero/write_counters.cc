#include "zero/write_counters.h"

#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"
#include "zero/phase_scope.h"

namespace unshard::zero {
namespace {
constexpr std::size_t kLimitBytes = std::size_t{1} << 32;  // address space only
}

WriteCounters::WriteCounters(Communicator& comm)
    : comm_(comm), host_(*comm.local_host()), segment_(host_.create_segment("parameter writes", 4096, kLimitBytes)) {
  const auto hosts = comm.hosts();
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    if (hosts[static_cast<std::size_t>(rank)] == hosts[static_cast<std::size_t>(comm.rank())]) ranks_.push_back(rank);
  }
}
WriteCounters::~WriteCounters() = default;

WriteCounters::Cell& WriteCounters::cell(int id, int rank) const {
  auto* cells = reinterpret_cast<Cell*>(segment_->data());
  return cells[static_cast<std::size_t>(id) * static_cast<std::size_t>(host_.size()) + static_cast<std::size_t>(rank)];
}

void WriteCounters::add(int id) {
  const std::size_t needed = (static_cast<std::size_t>(id) + 1) * static_cast<std::size_t>(host_.size()) * sizeof(Cell);
  if (needed > segment_->size()) segment_->reserve(needed * 2);
  start(id);
  stored(id);
}

std::uint32_t WriteCounters::start(int id) {
  auto& started = cell(id, host_.rank()).started;
  const auto number = started.load(std::memory_order_relaxed) + 1;
  started.store(number, std::memory_order_release);
  host_.notify();
  return number;
}

void WriteCounters::stored(int id) {
  auto& mine = cell(id, host_.rank());
  mine.stored.store(mine.started.load(std::memory_order_relaxed), std::memory_order_release);
  host_.notify();
}

bool WriteCounters::all_started(int id) const {
  const auto mine = cell(id, host_.rank()).started.load(std::memory_order_relaxed);
  for (int rank = 0; rank < host_.size(); ++rank) {
    if (static_cast<std::int32_t>(cell(id, rank).started.load(std::memory_order_acquire) - mine) < 0) return false;
  }
  return true;
}

bool WriteCounters::all_stored(int id) const {
  const auto mine = cell(id, host_.rank()).stored.load(std::memory_order_relaxed);
  for (int rank = 0; rank < host_.size(); ++rank) {
    if (static_cast<std::int32_t>(cell(id, rank).stored.load(std::memory_order_acquire) - mine) < 0) return false;
  }
  return true;
}

void WriteCounters::wait(int id, const std::string& name, bool (WriteCounters::*ready)(int) const, const char* what) {
  if ((this->*ready)(id)) return;
  const PhaseScope phase(comm_, Phase::blocked, name);
  std::string behind;
  for (int rank = 0; rank < host_.size(); ++rank) {
    const auto& theirs = cell(id, rank);
    const auto& mine = cell(id, host_.rank());
    if (theirs.stored.load(std::memory_order_relaxed) < mine.stored.load(std::memory_order_relaxed) ||
        theirs.started.load(std::memory_order_relaxed) < mine.started.load(std::memory_order_relaxed)) {
      behind += cat(behind.empty() ? "" : ", ", ranks_[static_cast<std::size_t>(rank)]);
    }
  }
  host_.wait_until([this, id, ready] { return (this->*ready)(id); },
                   cat(what, " parameter '", name, "' (rank ", comm_.rank(), " waits for rank ", behind, ")"));
}

void WriteCounters::wait_all_started(int id, const std::string& name) { wait(id, name, &WriteCounters::all_started, "lockstep write of"); }
void WriteCounters::wait_all_stored(int id, const std::string& name) { wait(id, name, &WriteCounters::all_stored, "read of"); }

}  // namespace unshard::zero
