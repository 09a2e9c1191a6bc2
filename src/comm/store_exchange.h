#pragma once
// Small messages through a c10d store: the way ranks speak where no transport serves.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class Store;
}

namespace unshard::comm {

struct StoreRules {
  std::chrono::duration<double> timeout{1800};
  /// Called about every 50 ms of waiting with where that is, "[comm.check_all_in] save(DIR):"; throws to leave.
  std::function<void(std::string_view place)> check;
  std::function<std::string()> explain;  ///< who is where, for a time-out's message
};

/// The store is asked on a thread of its own: one whose server has stopped holds nobody beyond the limits. After an error the exchange is
/// out of step, and not used again.
class StoreExchange {
 public:
  /// `store`'s keys under `prefix` are this exchange's own, alike on all ranks.
  StoreExchange(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank, int size, StoreRules rules);

  /// Collective: every rank's string, in rank order. \throws CommError naming the ranks that didn't come.
  std::vector<std::string> all_gather(const std::string& mine, std::string_view where);

  /// See Communicator::check_all_in.
  void check_all_in(std::string_view call, std::chrono::duration<double> limit);

 private:
  struct State;
  void say_who_ended(std::string_view place) const;  ///< \throws what the rules' check throws
  [[noreturn]] void raise_late(std::string_view place, double limit_s, const std::string& call) const;

  const int rank_, size_;
  const StoreRules rules_;
  const std::shared_ptr<State> state_;  ///< shared with a thread, which may be stuck in the store
};

}  // namespace unshard::comm
