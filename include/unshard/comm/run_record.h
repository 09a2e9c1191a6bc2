#pragma once
// What one rank knows about its run, as a file that `unshard doctor` compares with the other ranks': rank<N>.json in the run's folder,
// written when this rank fails, when another rank of the run does, on SIGUSR1, when asked, and at the end if wished.
//
// Everything is taken from the recorders of this rank's communicators, on whatever thread: a rank whose main thread is stuck in a
// collective, with or without Python's lock, still writes.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "unshard/comm/flight_recorder.h"

namespace unshard {

/// What a communicator tells about itself.
struct GroupRecord {
  std::string name;               ///< the same on every rank
  std::vector<int> ranks, hosts;  ///< members, as ranks of the run; the host of each
  std::string transport;          ///< "shared memory", "hierarchical", "c10d", "alone"
  std::int64_t step = 0;
  std::string phase, detail;  ///< "backward", "blocks.1.up.weight"; empty: never said
  double phase_for_s = 0;
  std::string waiting;  ///< where this rank sleeps now; empty: it doesn't
  double waiting_for_s = 0;
  std::string peers;  ///< HostGroup::describe_ranks
  std::vector<FlightRecord> entries;
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> counts;  ///< calls and bytes by operation
  bool closed = false;                                                  ///< it has gone; this was its last state
};

struct RunRecordOptions {
  int rank = 0, world_size = 1;
  std::string host;  ///< empty: the machine's name
  /// Where files go; it is made if missing. Empty: nowhere. On SIGUSR1 there is also <temporary folder>/unshard-<user>/asked.<pid>.json.
  std::string directory;
  bool at_end = false;    ///< end() writes
  bool on_signal = true;  ///< write on SIGUSR1. A handler that was there, or comes later, is called too. One record a process can.
  std::map<std::string, std::string> versions;
  /// The main thread's position as JSON: {"from": ..., "frames": [{file, line, function, code}], innermost last}. Must not wait long.
  std::function<std::string()> position;
};

/// Thread-safe. Communicators made with CommOptions::record report to it, and so do their sub-groups.
class RunRecord {
 public:
  static std::shared_ptr<RunRecord> start(RunRecordOptions options);
  /// Where UNSHARD_RUN_DIR is set it wins, UNSHARD_RECORD_AT_END=1 sets at_end. Null where UNSHARD_RECORD=off.
  static std::shared_ptr<RunRecord> from_environment(RunRecordOptions options);
  ~RunRecord();

  /// Write the file now and return its path ("" without a folder, or if it can't be written). `reason`: "asked", "exception", ...
  /// A file that shows this rank when another one failed stays as it is.
  std::string write(std::string_view reason, std::string_view text = {});
  /// This rank fails: remember `error`, write, and have the other ranks of the run write theirs. After a time-out it waits up to 1.5 s for
  /// them, because the end of this rank may be the end of all. The same error again changes nothing.
  void fail(std::string_view error);
  /// An exception that nobody catches ends this rank: write, and let the ranks that wait for this one hear why it ends.
  void raise(std::string_view exception);
  /// The run ends in good order: write, if options say so. Once.
  void end();
  void set_directory(const std::string& directory);
  std::string directory() const;

  /// For communicators: `source` is called until remove(), on other threads; `fail` by raise(), with why this rank ends; `hear_wait` by
  /// waits(), of whatever group.
  using HearWait = std::function<void(std::string_view group, std::string_view place)>;
  std::uint64_t add(std::function<GroupRecord()> source, std::function<void(std::string_view)> fail = {}, HearWait hear_wait = {});
  void remove(std::uint64_t id);
  /// This rank waits in `place` of its group `group`, for long already: all its groups are told, because the others may wait for it in
  /// any of them. Empty `place`: it has ended.
  void waits(std::uint64_t id, std::string_view group, std::string_view place);
  /// Number of the next communicator that isn't a sub-group: all ranks make them in the same order.
  int next_root();

 private:
  struct State;
  explicit RunRecord(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// "time-out", "lost rank", "disagreement" or "error": what kind of CommError this text is.
std::string_view kind_of_failure(std::string_view error);

}  // namespace unshard
