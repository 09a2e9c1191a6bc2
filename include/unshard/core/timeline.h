#pragma once
// What one rank does when: spans and counters, written as a Chrome trace (Perfetto, chrome://tracing; `unshard timeline` merges ranks).
// Off until opened; then a span costs one relaxed load. On, it costs two reads of the clock and a copy into a bounded queue, about 0.1 us;
// nothing is allocated and no lock is taken. A communicator owns one, so every layer reaches it through the group it works for and nothing
// is global.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace unshard {

/// What a span is about. `gather` and `reduce` are time that somebody waits; what goes on beside the computation is `prefetch` and
/// `bucket`.
enum class Lane : std::uint8_t { step, compute, gather, prefetch, reduce, bucket, update, collective, other };
inline constexpr int kLanes = 9;
std::string_view lane_name(Lane lane);

struct TimelineOptions {
  std::string directory;  ///< made if missing; the file is timeline.rank<N>.json, or timeline.rank<N>.<name>.json
  std::string name;       ///< tells several engines of a process apart; letters, digits, _ and -
  std::string host;       ///< for people
  std::string run;        ///< equal on the ranks of one run: files of another aren't merged with these
  int rank = 0, world_size = 1;
  std::size_t capacity = 1 << 15;  ///< events between two writes; more are counted and lost. A power of two
};

/// The offset that turns this rank's clock into rank 0's, as it was at one time.
struct ClockReading {
  std::int64_t at_ns = 0, offset_ns = 0, uncertainty_ns = 0;
};

class Timeline {
 public:
  Timeline();
  ~Timeline();  ///< closes
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  bool is_on() const { return on_.load(std::memory_order_relaxed); }
  bool is_open() const;  ///< until close(), also when the file couldn't be written: the same on all ranks. The thread that runs the steps
  static std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  // Any thread.
  /// `bytes` < 0: none to show.
  void add(Lane lane, std::string_view name, std::string_view detail, std::int64_t bytes, std::int64_t begin_ns, std::int64_t end_ns);
  void count(std::string_view counter, std::int64_t value);

  // One thread at a time, the one that runs the steps. open() and close() while no other thread records.
  /// Starts the file. \throws std::invalid_argument the directory can't be written; names it and says why.
  void open(const TimelineOptions& options);
  void set_clock(const ClockReading& reading);
  /// The step that has just ended: a span from begin_step() on.
  void end_step(std::int64_t step);
  /// The first step begins here, if it is called before it ends, at the first of such calls: set-up is no part of it.
  void begin_first_step();
  /// Whether the step that just ended was to be recorded and is the first or a tenth one. The same on all ranks, whatever became of files.
  bool is_flush_step() const;
  /// The next step begins here; decides about it. The first 100 are recorded, then every 10th up to 1,000, every 100th up to 10,000, and
  /// so on, so that a file stays bounded however long the run is.
  void begin_step();
  /// To the file what was recorded. The file is whole after every call. Failure (disk full) is told once; recording ends.
  void flush();
  void close();

 private:
  struct State;
  void write(bool closed);
  std::atomic<bool> on_{false};
  std::atomic<State*> state_{nullptr};
};

/// Records the time from here to the end of the scope. Texts must live as long.
class TimelineSpan {
 public:
  TimelineSpan(Timeline& timeline, Lane lane, std::string_view name, std::string_view detail = {}, std::int64_t bytes = -1)
      : timeline_(timeline.is_on() ? &timeline : nullptr) {
    if (!timeline_) [[likely]]
      return;
    lane_ = lane, name_ = name, detail_ = detail, bytes_ = bytes;
    begin_ns_ = Timeline::now_ns();
  }
  ~TimelineSpan() {
    if (timeline_) [[unlikely]]
      timeline_->add(lane_, name_, detail_, bytes_, begin_ns_, Timeline::now_ns());
  }
  TimelineSpan(const TimelineSpan&) = delete;
  TimelineSpan& operator=(const TimelineSpan&) = delete;

 private:
  Timeline* timeline_;
  Lane lane_{};
  std::string_view name_, detail_;
  std::int64_t bytes_ = -1, begin_ns_ = 0;
};

}  // namespace unshard
