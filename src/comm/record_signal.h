#pragma once
// SIGUSR1 as an event that a thread can wait for.
#include <cstdint>

namespace unshard::comm {

/// Between its construction and its end SIGUSR1 adds to fd(). Handlers of others are called as well, also those installed meanwhile
/// (adopt() finds them). At most one at a time in a process; a second one doesn't listen.
class RecordSignal {
 public:
  RecordSignal();
  ~RecordSignal();
  RecordSignal(const RecordSignal&) = delete;
  RecordSignal& operator=(const RecordSignal&) = delete;

  bool listens() const { return listens_; }
  int fd() const;  ///< readable when a signal came; -1: doesn't listen
  /// Signals since the last call.
  std::uint64_t take();
  /// Put our handler before one that was installed since.
  void adopt();

 private:
  bool listens_ = false;
};

}  // namespace unshard::comm
