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
  /// Number among the collectives of this communicator, from 0: the same call on every rank. -1: not a collective (send, recv).
  std::int64_t index = -1;
  std::string op, detail;  ///< "reduce_scatter", "bucket 3: blocks.0.up.weight.."
  std::int64_t bytes = 0, step = 0;
  double started_s = 0, ended_s = -1;  ///< monotonic seconds; ended < 0: still running
};

class FlightRecorder {
 public:
  explicit FlightRecorder(std::size_t capacity = 512);
  ~FlightRecorder();
  /// Returns the sequence number for end(). `collective`: every rank of the group makes this call, at this place of the order.
  std::uint64_t begin(std::string_view op, std::string_view detail, std::int64_t bytes, std::int64_t step, bool collective = true);
  void end(std::uint64_t sequence);
  /// The call was refused before any communication: it doesn't count as a collective.
  void cancel(std::uint64_t sequence);
  /// Collectives begun so far.
  std::int64_t collectives() const;
  std::vector<FlightRecord> snapshot() const;  ///< oldest first

  /// What the rank does, for groups that have no HostGroup to publish it in.
  struct PhaseRecord {
    std::string name, detail;
    double for_s = 0;
  };
  void set_phase(std::string_view name, std::string_view detail);
  PhaseRecord phase() const;

  std::string to_text(std::size_t last = 16) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace unshard
