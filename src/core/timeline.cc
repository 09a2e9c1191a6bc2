#include "unshard/core/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "core/event_queue.h"
#include "core/trace_file.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard {
namespace {

constexpr std::array<std::string_view, kLanes> kLaneNames = {"step",   "compute", "gather",     "prefetch", "reduce",
                                                             "bucket", "update",  "collective", "other"};
constexpr std::int64_t kEverySteps = 100, kFlushSteps = 10;

std::int32_t this_thread() {
  thread_local const auto id = static_cast<std::int32_t>(gettid());
  return id;
}

// A text that is too long keeps its end, where parameter names differ, and stays valid UTF-8.
template <std::size_t kSize>
void copy_text(char (&to)[kSize], std::string_view from) {
  constexpr std::string_view kCut = "..";
  std::size_t used = 0;
  if (from.size() > kSize - 1) {
    from.remove_prefix(from.size() - (kSize - 1 - kCut.size()));
    while (!from.empty() && (static_cast<unsigned char>(from.front()) & 0xC0U) == 0x80U) from.remove_prefix(1);
    std::memcpy(to, kCut.data(), used = kCut.size());
  }
  from.copy(to + used, from.size());
  to[used + from.size()] = '\0';
}

/// Of the steps since the start, counted from 0: 100, then every 10th up to 1,000, every 100th up to 10,000, ...
bool is_recorded(std::int64_t step) {
  std::int64_t every = 1;
  for (auto limit = kEverySteps; step >= limit; limit *= 10) every *= 10;
  return step % every == 0;
}

}  // namespace

std::string_view lane_name(Lane lane) { return kLaneNames[static_cast<std::size_t>(lane)]; }

struct Timeline::State {
  explicit State(std::size_t capacity) : queue(capacity) {}

  EventQueue<TimelineEvent> queue;
  std::optional<TraceFile> file;  ///< none any more once it couldn't be written
  int rank = 0;
  std::int64_t step_begin_ns = 0;
  std::int64_t steps = 0;     ///< ended since the start
  std::int64_t recorded = 0;  ///< of these
  bool begun = false;         ///< the first of them
  bool last_recorded = false;
  bool opened = false;              ///< until close(): what ranks do together goes by this, not by one rank's file
  std::int64_t dropped_before = 0;  ///< by the queue, before it was opened
};

Timeline::Timeline() = default;
Timeline::~Timeline() {
  close();
  delete state_.load();
}

bool Timeline::is_open() const {
  const auto* state = state_.load(std::memory_order_acquire);
  return state != nullptr && state->opened;
}

void Timeline::add(Lane lane, std::string_view name, std::string_view detail, std::int64_t bytes, std::int64_t begin_ns,
                   std::int64_t end_ns) {
  auto* state = state_.load(std::memory_order_acquire);
  if (state == nullptr) return;
  state->queue.push([&](TimelineEvent& event) {
    event.begin_ns = begin_ns, event.end_ns = std::max(begin_ns, end_ns), event.number = bytes;
    event.thread = this_thread(), event.lane = lane;
    copy_text(event.name, name);
    copy_text(event.detail, detail);
  });
}

void Timeline::count(std::string_view counter, std::int64_t value) {
  auto* state = state_.load(std::memory_order_acquire);
  if (state == nullptr || !is_on()) return;
  state->queue.push([&](TimelineEvent& event) {
    event.begin_ns = now_ns(), event.end_ns = TimelineEvent::kCounter, event.number = value;
    event.thread = this_thread(), event.lane = Lane::other;
    copy_text(event.name, counter);
    event.detail[0] = '\0';
  });
}

void Timeline::open(const TimelineOptions& options) {
  auto* state = state_.load();
  require(!is_open(), "[timeline] '", options.directory, "' can't be opened: this group writes a timeline already");
  if (state == nullptr) state = new State(options.capacity);  // kept until the end: a thread may be late
  state_.store(state, std::memory_order_release);
  state->queue.drain([](const TimelineEvent&) {});
  state->file.emplace(options, this_thread());
  state->opened = true;
  state->dropped_before = state->queue.dropped();
  state->rank = options.rank;
  state->steps = state->recorded = 0;
  state->begun = state->last_recorded = false;
  state->step_begin_ns = now_ns();
  on_.store(true, std::memory_order_release);
}

void Timeline::set_clock(const ClockReading& reading) {
  if (auto* state = state_.load(); is_open() && state->file) state->file->set_clock(reading);
}

void Timeline::begin_first_step() {
  if (auto* state = state_.load(); is_on() && !std::exchange(state->begun, true)) state->step_begin_ns = now_ns();
}

void Timeline::end_step(std::int64_t step) {
  if (!is_open()) return;
  auto& state = *state_.load();
  const auto now = now_ns();
  if (is_on()) add(Lane::step, cat("step ", step), {}, step, state.step_begin_ns, now);
  state.last_recorded = is_recorded(state.steps);
  if (state.last_recorded) ++state.recorded;
  ++state.steps;
  state.begun = true;
  state.step_begin_ns = now;
}

bool Timeline::is_flush_step() const {
  if (!is_open()) return false;
  const auto& state = *state_.load();
  return state.last_recorded && (state.recorded == 1 || state.recorded % kFlushSteps == 0);
}

void Timeline::begin_step() {
  if (!is_open()) return;
  auto& state = *state_.load();
  if (state.queue.size() > state.queue.capacity() / 4) flush();
  on_.store(state.file && is_recorded(state.steps), std::memory_order_relaxed);
  state.step_begin_ns = now_ns();  // what was written since the last one ended is no part of it
}

void Timeline::flush() { write(/*closed=*/false); }

void Timeline::write(bool closed) {
  auto* const opened = state_.load();
  if (opened == nullptr || !opened->file) return;
  auto& state = *opened;
  state.queue.drain([&](const TimelineEvent& event) { state.file->add(event); });
  if (state.file->write(state.queue.dropped() - state.dropped_before, closed) && (!closed || state.file->close())) return;
  log_warning(state.rank, cat("[timeline] '", state.file->path(), "' can't be written: ", std::strerror(errno), "; recording ends"));
  on_.store(false);
  state.file.reset();
}

void Timeline::close() {
  on_.store(false);
  write(/*closed=*/true);
  if (auto* state = state_.load()) {
    state->file.reset();
    state->opened = false;
  }
}

}  // namespace unshard
