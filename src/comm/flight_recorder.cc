#include "unshard/comm/flight_recorder.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <mutex>
#include <sstream>

#include "comm/futex.h"

namespace unshard {

namespace {

/// Fixed size: recording must not allocate.
struct Entry {
  std::uint64_t sequence = 0;
  std::int64_t index = -1;
  char op[24] = {}, detail[104] = {};
  std::int64_t bytes = 0, step = 0;
  double started_s = 0, ended_s = -1;
};

template <std::size_t kSize>
void copy_text(char (&to)[kSize], std::string_view from) {
  const std::size_t length = std::min(from.size(), kSize - 1);
  std::copy_n(from.begin(), length, to);
  to[length] = 0;
}

double now_s() { return static_cast<double>(comm::monotonic_ns()) * 1e-9; }

}  // namespace

struct FlightRecorder::State {
  explicit State(std::size_t capacity) : ring(std::max<std::size_t>(capacity, 1)) {}
  mutable std::mutex mutex;  // hardly ever contended: tens of ns
  std::vector<Entry> ring;
  std::uint64_t next = 0;
  std::int64_t collectives = 0;
  char phase[24] = {}, phase_detail[104] = {};
  double phase_since_s = 0;
};

FlightRecorder::FlightRecorder(std::size_t capacity) : state_(std::make_unique<State>(capacity)) {}
FlightRecorder::~FlightRecorder() = default;

std::uint64_t FlightRecorder::begin(std::string_view op, std::string_view detail, std::int64_t bytes, std::int64_t step, bool collective) {
  const double started = now_s();
  std::lock_guard<std::mutex> lock(state_->mutex);
  const std::uint64_t sequence = state_->next++;
  Entry& entry = state_->ring[sequence % state_->ring.size()];
  entry.sequence = sequence;
  entry.index = collective ? state_->collectives++ : -1;
  copy_text(entry.op, op);
  copy_text(entry.detail, detail);
  entry.bytes = bytes;
  entry.step = step;
  entry.started_s = started;
  entry.ended_s = -1;
  return sequence;
}

void FlightRecorder::end(std::uint64_t sequence) {
  const double ended = now_s();
  std::lock_guard<std::mutex> lock(state_->mutex);
  Entry& entry = state_->ring[sequence % state_->ring.size()];
  if (entry.sequence == sequence) entry.ended_s = ended;  // else overwritten by a later one
}

void FlightRecorder::cancel(std::uint64_t sequence) {
  const double ended = now_s();
  std::lock_guard<std::mutex> lock(state_->mutex);
  Entry& entry = state_->ring[sequence % state_->ring.size()];
  if (entry.sequence != sequence) return;
  if (entry.index >= 0 && entry.index == state_->collectives - 1) --state_->collectives;
  entry.index = -1;
  entry.ended_s = ended;
}

void FlightRecorder::set_phase(std::string_view name, std::string_view detail) {
  const double now = now_s();
  std::lock_guard<std::mutex> lock(state_->mutex);
  copy_text(state_->phase, name);
  copy_text(state_->phase_detail, detail);
  state_->phase_since_s = now;
}

FlightRecorder::PhaseRecord FlightRecorder::phase() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return {state_->phase, state_->phase_detail, now_s() - state_->phase_since_s};
}

std::int64_t FlightRecorder::collectives() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->collectives;
}

std::vector<FlightRecord> FlightRecorder::snapshot() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<FlightRecord> records;
  const std::uint64_t held = std::min<std::uint64_t>(state_->next, state_->ring.size());
  for (std::uint64_t sequence = state_->next - held; sequence < state_->next; ++sequence) {
    const Entry& e = state_->ring[sequence % state_->ring.size()];
    records.push_back({e.sequence, e.index, e.op, e.detail, e.bytes, e.step, e.started_s, e.ended_s});
  }
  return records;
}

std::string FlightRecorder::to_text(std::size_t last) const {
  const auto records = snapshot();
  std::ostringstream out;
  out << std::fixed << std::setprecision(3);
  for (std::size_t i = records.size() - std::min(last, records.size()); i < records.size(); ++i) {
    const FlightRecord& r = records[i];
    out << '#' << r.sequence << " step " << r.step << ' ' << r.op;
    if (!r.detail.empty()) out << " '" << r.detail << '\'';
    out << ' ' << r.bytes << " bytes, ";
    if (r.ended_s < 0) {
      out << "running for " << (now_s() - r.started_s) * 1e3 << " ms\n";
    } else {
      out << (r.ended_s - r.started_s) * 1e3 << " ms\n";
    }
  }
  return out.str();
}

}  // namespace unshard
