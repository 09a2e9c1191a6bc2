#pragma once
// Who is where while ranks that share no memory wait for each other: each rank that waits for more than a second says so in the store, and
// reads there what the others say. Nothing is sent while all goes well.
//
// [Note: same place, other call] The collectives of a group are numbered, and a rank says which number it is in. A rank that is in number k
// has not left it, and every rank must be in the same k: if two of them are there in different operations, neither can go on.
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class Store;
}

namespace unshard::comm {

/// A collective, as other ranks see it.
struct Named {
  std::string op;
  std::int64_t bytes = 0;  ///< alike on all ranks, or 0
  std::string text;        ///< "step 3, [comm.all_gather 'engine.step']"
};

/// What a rank is in, and was in before: one whose message was shorter than the others expected may have gone on.
struct Doing {
  Named now, before;
};

class StallWatch {
 public:
  /// `report_after_s`: then the lowest waiting rank logs once who is where, unless a watch that shares `last_report` (steady ns) has just
  /// done so: one stall is seen in several groups.
  StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, double report_after_s, double timeout_s,
             std::shared_ptr<std::atomic<std::int64_t>> last_report = {});
  ~StallWatch();

  /// Who tells of a rank that has said nothing here, and of one that has (`said`: "waiting in ...", or empty), which may not be
  /// reached any more; `waits`: whether it does, as far as is known. Set before the group is used; called on any thread.
  using Describe = std::function<std::string(int rank, const std::string& said, bool& waits)>;
  void set_describe(Describe describe) { describe_ = std::move(describe); }
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  /// Called about every 50 ms by a wait in collective number `index`.
  /// \throws CommError another rank is in another operation at this place.
  void waiting(std::int64_t index, const Doing& doing, double waited_s) { wait(index, doing, waited_s, -1); }
  /// The same in a send or recv, which has no number: it isn't compared with others. `peer`: whom it waits for.
  void waiting_for(int peer, const Named& pair, double waited_s) { wait(kPair, {pair, {}}, waited_s, peer); }
  /// For an error in collective number `index` that says nothing of the others: "the ranks are in different calls: ..." where they are,
  /// else describe_ranks(). Asks the store, for at most 1.5 s.
  std::string explain(std::int64_t index, const Doing& doing);
  /// The same for an error in a send or recv, for who waits in one: what `peer` does, and who else waits.
  std::string explain_pair(int peer, const Named& pair);
  /// The collective has ended. Cheap where nothing was told.
  void leave();
  /// "rank 1 waits for nobody: ...; rank 0: waiting in step 3, all_gather 'engine.step'"; empty where this rank hasn't waited for a second
  /// yet
  /// \param peer  the only one whose absence means something; -1: everybody's
  std::string describe_ranks(int peer = -1) const;

 private:
  struct State;
  static constexpr std::int64_t kPair = -1;
  void wait(std::int64_t index, const Doing& doing, double waited_s, int peer);
  bool is_told(int peer) const;
  void tell(std::int64_t index, Doing doing);
  /// "rank 0 is in ..., rank 1 is in ...", or empty. `sizes`: those count too. Under the state's lock.
  std::string other_call(bool sizes) const;
  std::string describe(int rank, const std::string& said, bool& waits) const;
  Describe describe_;
  const int rank_;
  const double report_after_s_, timeout_s_;
  bool is_first_report() const;
  bool reported_ = false;
  const std::shared_ptr<std::atomic<std::int64_t>> last_report_;
  std::shared_ptr<State> state_;  ///< shared with a thread, which may be stuck in a store whose server has stopped
};

}  // namespace unshard::comm
