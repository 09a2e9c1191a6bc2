#pragma once
// Ranks that get to know each other: who has come, who is silent, who is there no more, while nothing else connects them.
//
// A star: every rank has one connection to rank 0, which gathers small texts over it, hears twice a second that each rank lives, and tells
// all the others at once of one that ended or gave up. A thread of each process does that: a rank is heard while it waits in a store or
// connects to others, and one that is stopped isn't. Store and connections are that thread's business alone, so that a server that has
// stopped holds nobody beyond the time-out.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "unshard/core/error.h"

namespace c10d {
class Store;
}

namespace unshard::comm {

/// An error that names who is missing.
struct RollCallError : CommError {
  using CommError::CommError;
};

struct RollCallOptions {
  std::string place = "make_communicator";  ///< for messages: "[comm.make_communicator]"
  std::chrono::duration<double> timeout{1800};
  std::function<void()> interrupt_check;
  std::chrono::duration<double> report_after{5};  ///< then rank 0 says once who is waited for
};

class RollCall {
 public:
  /// Rank 0 leaves its address in `store`. Returns at once.
  RollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int size, RollCallOptions options);
  /// A rank that hasn't finished tells the others that it gave up.
  ~RollCall();
  RollCall(const RollCall&) = delete;
  RollCall& operator=(const RollCall&) = delete;

  /// Collective: every rank's text, by rank. \throws RollCallError naming who ended, or who didn't come within the time-out, and where they
  /// were last.
  std::vector<std::string> exchange(const std::string& mine, std::string_view where);
  /// What this rank does between two exchanges, for the others' messages.
  void set_place(std::string_view where);
  /// \throws RollCallError when a rank ended or gave up.
  void check() const;
  /// As check(), but waits a moment: connections close before the process can be seen to have ended. Else returns a sentence on who is
  /// missing.
  std::string explain() const;
  void fail(std::string_view why);
  /// Collective; from here on ranks may end.
  void finish();

  struct State;

 private:
  std::string prefix() const;
  void report(double waited_s);

  const int rank_, size_;
  const RollCallOptions options_;
  const std::shared_ptr<State> state_;  ///< shared with the thread, which may be stuck in the store
  std::thread thread_;
  bool over_ = false, reported_ = false;
};

}  // namespace unshard::comm
