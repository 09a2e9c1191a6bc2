#pragma once
// One rank's events as a file in Chrome's trace format, whole after every write: what is added goes before the closing part, which is
// written anew. One event a line, so that a file cut short by a crash can be read up to its last line.
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

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
  void add(const TimelineEvent& event);
  void set_clock(const ClockReading& reading) { clock_.push_back(reading); }
  /// \return false: the file can't be written any more; errno says why.
  /// \param closed  the last time: nothing will be added.
  bool write(std::int64_t dropped, bool closed);
  const std::string& path() const { return path_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void append_text(std::string_view text);
  void append_us(std::int64_t ns);
  void begin_line();
  std::string thread_name(std::int32_t thread, unsigned lanes) const;
  std::string closing(std::int64_t dropped, bool closed) const;

  const TimelineOptions options_;
  const std::int32_t main_thread_;
  const std::int64_t origin_ns_ = Timeline::now_ns();
  double origin_unix_s_ = 0;
  std::string path_, pending_;
  std::unique_ptr<std::FILE, Close> file_;
  long end_ = 0;  ///< where the closing part begins
  bool has_lines_ = false;
  std::map<std::int32_t, unsigned> threads_;  ///< what each recorded: bits of lanes
  std::vector<ClockReading> clock_;
};

}  // namespace unshard
