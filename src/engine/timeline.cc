// The engine's part of the timeline: opening it, memory counters, and the clock against rank 0's. Spans are recorded where things happen.
#include "unshard/core/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <string>

#include "agreement.h"
#include "comm/clock_offset.h"
#include "engine_state.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

std::string host_label(const Communicator& comm) {
  if (!comm.options().host_name.empty()) return comm.options().host_name;
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// Of the process, in bytes.
std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t whole = 0, resident = 0;
  file >> whole >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

/// As resident_bytes(), with shared memory divided among those that map it. Milliseconds for a large process.
std::int64_t proportional_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  while (file >> word) {
    std::int64_t kib = 0;
    if (word == "Pss:" && file >> kib) return kib * 1024;
  }
  return 0;
}

/// Collective.
bool is_open_everywhere(Communicator& comm) {
  const std::uint8_t mine = comm.timeline().is_open();
  const auto all = exchange_bytes(comm, &mine, 1, "engine: opening the timeline");
  const auto first = all.front();
  const auto other = std::find_if(all.begin(), all.end(), [first](std::byte open) { return open != first; });
  if (other == all.end()) return first != std::byte{0};
  throw CommError(cat("[engine: opening the timeline] the timeline of rank ", first != std::byte{0} ? 0 : other - all.begin(),
                      " is still open and that of rank ", first != std::byte{0} ? other - all.begin() : 0,
                      " isn't; call close_timeline() of the engine before on all ranks"));
}

}  // namespace

void Engine::State::open_timeline() {
  auto& timeline = comm->timeline();
  if (is_open_everywhere(*comm)) return;  // another engine's over the same group: this one's spans are there too
  TimelineOptions opening;
  opening.directory = config.unshard.timeline;
  opening.name = options.name;
  opening.host = host_label(*comm);
  opening.rank = comm->rank();
  opening.world_size = comm->world_size();
  opening.run = comm->all_gather_strings(cat(Timeline::now_ns(), '-', ::getpid())).front();
  std::string error;
  try {
    timeline.open(opening);
  } catch (const std::invalid_argument& failure) {
    error = failure.what();
  }
  try {
    agree_no_error(*comm, error, "engine: opening the timeline");
  } catch (...) {
    timeline.close();  // a second attempt finds it as the first did
    throw;
  }
  writes_timeline = true;
  timeline.set_clock(read_clock_offset(*comm));
  count_memory();
  timeline.flush();
}

void Engine::State::count_memory() {
  auto& timeline = comm->timeline();
  if (!timeline.is_on()) return;
  const auto at_rest = store->bytes();
  timeline.count("parameters at rest", at_rest.parameters);
  const auto held = store->stats();
  timeline.count("gathered parameters", held.live_bytes + held.host_live_bytes);
  timeline.count("gradients", gradients->bytes() + pipeline->reducer().bytes());
  timeline.count("optimizer", masters->bytes() + (optimizer ? optimizer->state_bytes() : 0));
  timeline.count("process (RSS)", resident_bytes());
}

// All ranks are here, and agree about which steps are recorded, also one whose file can't be written any more.
void Engine::State::end_timeline_step(std::int64_t step) {
  if (!writes_timeline) return;
  auto& timeline = comm->timeline();
  count_memory();
  timeline.end_step(step);
  if (timeline.is_flush_step()) {
    const TimelineSpan span(timeline, Lane::other, "timeline: clock, file");
    timeline.count("process (PSS)", proportional_bytes());
    timeline.set_clock(read_clock_offset(*comm, kLaterClockRounds));
    timeline.flush();
  }
  timeline.begin_step();
}

void Engine::State::close_timeline() {
  if (writes_timeline) comm->timeline().close();
  writes_timeline = false;
}

void Engine::close_timeline() { state_->close_timeline(); }
bool Engine::writes_timeline() const { return state_->writes_timeline; }

}  // namespace unshard
