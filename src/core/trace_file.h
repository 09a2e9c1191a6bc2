#pragma once
// One rank's events as a file in Chrome's trace format, whole after every write: what is added goes before the closing part, which is
// written anew. Whose file it is comes first and an event is a line, clock readings too, so that a file that a killed process cut short can
// be read up to its last whole line. A write that fails leaves the file as it was.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "unshard/core/timeline.h"

namespace unshard {

/// Fixed size: recording must not allocate. A counter has no end; its value is in `number`.
struct TimelineEvent {
  static constexpr std::int64_t kCounter = -1;
  std::int64_t begin_ns, end_ns, number;
  std::int32_t thread;
  Lane lane;
  char name[27], detail[72];
};

class TraceFile {
 public:
  /// \throws std::invalid_argument the directory or the file can't be written.
  TraceFile(const TimelineOptions& options, std::int32_t main_thread);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  void add(const TimelineEvent& event);
  void set_clock(const ClockReading& reading);
  /// \return false: the file can't be written any more; errno says why.
  /// \param closed  the last time: nothing will be added.
  bool write(std::int64_t dropped, bool closed);
  /// \return false: what was written may not have arrived (file servers say so late); errno says why.
  bool close();
  const std::string& path() const { return path_; }

 private:
  void append_text(std::string_view text);
  void append_us(std::int64_t ns);
  void begin_line();
  std::string thread_name(std::int32_t thread, unsigned lanes) const;
  std::string head() const;
  std::string closing(std::int64_t dropped, bool closed) const;
  bool replace_end(std::string_view text);

  const TimelineOptions options_;
  const std::int32_t main_thread_;
  const std::int64_t origin_ns_ = Timeline::now_ns();
  double origin_unix_s_ = 0;
  std::string path_, pending_;
  int file_ = -1;
  std::int64_t end_ = 0;      ///< where the closing part begins
  std::string closing_part_;  ///< as it is in the file
  bool has_lines_ = false;
  std::map<std::int32_t, unsigned> threads_;  ///< what each recorded: bits of lanes
};

}  // namespace unshard
