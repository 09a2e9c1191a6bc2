#pragma once
// A ring buffer of the last collectives, for reports when something goes wrong. Recording costs tens of ns and never allocates.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace unshard {

struct FlightRecord {
  std::uint64_t sequence = 0;  ///< per communicator, from 0
  std::string op, detail;      ///< "reduce_scatter", "bucket 3: blocks.0.up.weight.."
  std::int64_t bytes = 0, step = 0;
  double started_s = 0, ended_s = -1;  ///< monotonic seconds; ended < 0: still running
};

class FlightRecorder {
 public:
  explicit FlightRecorder(std::size_t capacity = 512);
  ~FlightRecorder();
  /// Returns the sequence number for end().
  std::uint64_t begin(std::string_view op, std::string_view detail, std::int64_t bytes, std::int64_t step);
  void end(std::uint64_t sequence);
  std::vector<FlightRecord> snapshot() const;  ///< oldest first
  std::string to_text(std::size_t last = 16) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace unshard
