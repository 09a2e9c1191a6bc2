#include "zero/trace.h"

#include <algorithm>
#include <cstddef>

#include "unshard/core/error.h"

namespace unshard {
namespace {
// A step that never ends (generation for hours) must not grow memory for ever; what is beyond this is simply not foreseen.
constexpr std::size_t kMaxRecorded = (std::size_t{1} << 20) - 1;
constexpr std::size_t kNowhere = SIZE_MAX;
}  // namespace

struct TouchTrace::State {
  TraceOptions options;
  std::vector<std::int64_t> numels;            // by id
  std::vector<int> trace, recorded;            // the last step's touches; this step's
  std::vector<std::int64_t> elements_before;   // by position in `trace`: elements touched before it; one entry more than `trace`
  std::vector<std::vector<std::size_t>> uses;  // by id: positions in `trace`, rising
  std::uint64_t trace_hash = 0, recorded_hash = 0;
  std::uint64_t odd_hash = 0;       // of the last pass that was much shorter than the trace
  std::size_t next = 0;             // position in `trace` of the touch that is expected next
  int last = -1;                    // id touched last
  std::vector<std::uint64_t> seen;  // by id: equal to `stamp` when the current walk has met it
  std::uint64_t stamp = 0;

  bool follows(std::size_t position, int previous) const { return position > 0 && trace[position - 1] == previous; }
  std::size_t locate(int id) const;
  bool start(bool follow_recorded);
  void walk(const std::vector<std::uint8_t>& live, std::int64_t live_numel, TraceAdvice& advice);
  std::size_t next_use(std::size_t from, int id) const;
  std::int64_t distance(std::size_t from, int id) const;
};

// [Note: resynchronising] A touch that isn't the expected one is looked up among the places where the trace has this parameter. A place
// whose predecessor is the parameter touched just before is right far more often than the mere next one (a weight used twice, a second
// forward without a backward), so these come first; then the next place ahead; then the nearest one behind, for work that starts over.
std::size_t TouchTrace::State::locate(int id) const {
  if (next < trace.size() && trace[next] == id) return next;
  const auto& places = uses[id];
  const auto ahead = std::lower_bound(places.begin(), places.end(), next);
  for (auto it = ahead; it != places.end(); ++it)
    if (follows(*it, last)) return *it;
  for (auto it = ahead; it != places.begin();)
    if (follows(*--it, last)) return *it;
  if (ahead != places.end()) return *ahead;
  return places.empty() ? kNowhere : *(ahead - 1);
}

std::size_t TouchTrace::State::next_use(std::size_t from, int id) const {
  const auto& places = uses[id];
  const auto ahead = std::lower_bound(places.begin(), places.end(), from);
  return ahead == places.end() ? kNowhere : *ahead;
}

std::int64_t TouchTrace::State::distance(std::size_t from, int id) const {
  UNSHARD_DCHECK(id >= 0 && static_cast<std::size_t>(id) < numels.size(), "distance of parameter ", id, " of ", numels.size());
  const auto position = next_use(from, id);
  return position == kNowhere ? INT64_MAX : elements_before[position] - elements_before[from];
}

// The window ahead holds distinct parameters of at most prefetch_numel elements, those already live included: what was fetched for an
// earlier touch and isn't used yet still occupies the window, so the bytes in flight or waiting stay within it over many touches too.
// The very next parameter is advised whatever its size (if anything is): one larger than the window would otherwise never be fetched ahead.
void TouchTrace::State::walk(const std::vector<std::uint8_t>& live, std::int64_t live_numel, TraceAdvice& advice) {
  std::int64_t window = options.prefetch_numel, budget = options.max_live_numel - live_numel;
  if (window <= 0) return;
  seen[last] = ++stamp;
  bool first = true;
  for (std::size_t position = next; position < trace.size(); ++position) {
    const int id = trace[position];
    if (seen[id] == stamp) continue;
    seen[id] = stamp;
    window -= numels[id];
    if (window < 0 && !first) return;
    first = false;
    if (static_cast<std::size_t>(id) < live.size() && live[id]) continue;
    budget -= numels[id];
    if (budget < 0) return;
    advice.fetch.push_back(id);
  }
}

TouchTrace::TouchTrace(const TraceOptions& options) : state_(std::make_unique<State>()) { state_->options = options; }
TouchTrace::~TouchTrace() = default;

void TouchTrace::set_options(const TraceOptions& options) { state_->options = options; }

void TouchTrace::add(std::int64_t numel) {
  require(numel >= 0, "[zero.trace] a parameter of ", numel, " elements");
  state_->numels.push_back(numel);
  state_->uses.emplace_back();
  state_->seen.push_back(0);
}

bool TouchTrace::State::start(bool follow_recorded) {
  next = 0;
  last = -1;
  const bool other = follow_recorded && recorded != trace;
  if (other) {
    trace.swap(recorded);
    trace_hash = recorded_hash;
    elements_before.assign(1, 0);
    for (auto& places : uses) places.clear();
    for (std::size_t position = 0; position < trace.size(); ++position) {
      uses[trace[position]].push_back(position);
      elements_before.push_back(elements_before.back() + numels[trace[position]]);
    }
  }
  recorded.clear();
  recorded_hash = 0;
  return other;
}

bool TouchTrace::begin_step() { return state_->start(/*follow_recorded=*/!state_->recorded.empty()); }

bool TouchTrace::end_pass() {
  State& s = *state_;
  if (s.recorded.empty()) return s.start(false);
  const bool fits = s.recorded.size() <= s.trace.size();
  if (fits && std::equal(s.recorded.begin(), s.recorded.end(), s.trace.begin())) return s.start(false);
  const bool odd = 2 * s.recorded.size() < s.trace.size();
  const bool again = odd && s.recorded_hash == s.odd_hash;
  s.odd_hash = odd ? s.recorded_hash : 0;
  return s.start(!odd || again);
}

bool TouchTrace::advance(int id) {
  State& s = *state_;
  UNSHARD_DCHECK(id >= 0 && static_cast<std::size_t>(id) < s.numels.size(), "touch of parameter ", id, " of ", s.numels.size());
  const bool expected = s.next < s.trace.size() && s.trace[s.next] == id;
  if (const auto position = s.locate(id); position != kNowhere) s.next = position + 1;
  s.last = id;
  if (s.recorded.size() < kMaxRecorded) {
    s.recorded.push_back(id);
    s.recorded_hash = (s.recorded_hash ^ static_cast<std::uint64_t>(id + 1)) * 0x100000001b3ULL + s.recorded.size();
  }
  return expected;
}

TraceAdvice TouchTrace::touch(int id, const std::vector<std::uint8_t>& live, std::int64_t live_numel) {
  TraceAdvice advice;
  if (id == state_->last) return advice;  // the same touch still: advised already
  advance(id);
  state_->walk(live, live_numel, advice);
  return advice;
}

int TouchTrace::last() const { return state_->last; }
std::size_t TouchTrace::position() const { return state_->next; }
const std::vector<int>& TouchTrace::followed() const { return state_->trace; }
const std::vector<int>& TouchTrace::recorded() const { return state_->recorded; }
std::uint64_t TouchTrace::recorded_hash() const { return state_->recorded_hash; }
std::uint64_t TouchTrace::followed_hash() const { return state_->trace_hash; }
std::int64_t TouchTrace::distance_to_next_use(int id) const { return state_->distance(state_->next, id); }
std::int64_t TouchTrace::distance_from(std::size_t position, int id) const { return state_->distance(position, id); }

std::size_t TouchTrace::last_use_before(std::size_t position, int id) const {
  const auto& places = state_->uses[id];
  const auto ahead = std::lower_bound(places.begin(), places.end(), position);
  return ahead == places.begin() ? kNowhere : *(ahead - 1);
}

std::vector<int> TouchTrace::release_order(const std::vector<int>& candidates) const {
  std::vector<std::pair<std::int64_t, int>> order;
  order.reserve(candidates.size());
  for (const int id : candidates) order.emplace_back(distance_to_next_use(id), id);
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<int> ids;
  ids.reserve(order.size());
  for (const auto& entry : order) ids.push_back(entry.second);
  return ids;
}

}  // namespace unshard
