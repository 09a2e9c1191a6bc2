#pragma once
// Small messages through a c10d store: the way ranks speak before, or without, a transport.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <optional>
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
};

class StoreExchange {
 public:
  /// `store`'s keys under `prefix` are this exchange's own, alike on all ranks.
  StoreExchange(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank, int size, StoreRules rules);

  /// Collective: every rank's string, in rank order. \throws CommError naming the ranks that didn't come.
  std::vector<std::string> all_gather(const std::string& mine, std::string_view where);

  /// See Communicator::check_all_in.
  void check_all_in(std::string_view call, std::chrono::duration<double> limit);

 private:
  std::string key(std::uint64_t round, int rank) const;
  void post(const std::string& text);
  std::string fetch(int rank) const;
  std::optional<std::vector<std::string>> fetch_all() const;  ///< none: not all are there, or the store can't give several at once
  void say_who_ended(std::string_view place) const;           ///< \throws what the rules' check throws
  bool present(int rank) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const int rank_, size_;
  const StoreRules rules_;
  std::uint64_t round_ = 0;
  std::vector<std::string> last_;  ///< what each rank announced last, for messages
};

}  // namespace unshard::comm
