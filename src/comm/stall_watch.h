#pragma once
// Who is where while ranks that share no memory wait for each other: each rank that waits for more than a second says so in the store, and
// reads there what the others say. Nothing is sent while all goes well.
//
// [Note: same place, other call] The collectives of a group are numbered, and a rank says which number it is in. A rank that is in number k
// has not left it, and every rank must be in the same k: if one of them is there in check_all_in, and another in anything else, neither
// can go on.
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class Store;
}

namespace unshard::comm {

class StallWatch {
 public:
  /// `report_after_s`: then the lowest waiting rank logs once who is where.
  StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, double report_after_s, double timeout_s);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  /// This rank is in check_all_in: told at once.
  void announce(std::int64_t index, std::string_view call);
  /// Called about every 50 ms by a wait in collective number `index` ("step 3, all_gather 'engine.step'").
  /// \throws CommError another rank is in another call at this place.
  void waiting(std::int64_t index, std::string_view where, double waited_s);
  /// The collective has ended. Cheap where nothing was told.
  void leave();
  /// "rank 1 waits for nobody: it computes, or is stopped; rank 0: waiting in step 3, all_gather 'engine.step'"; empty where this rank
  /// hasn't waited for a second yet
  std::string describe_ranks() const;

 private:
  struct State;
  void tell(char kind, std::int64_t index, std::string_view text);
  const int rank_;
  const double report_after_s_, timeout_s_;
  bool reported_ = false;
  std::shared_ptr<State> state_;  ///< shared with a thread, which may be stuck in a store whose server has stopped
};

}  // namespace unshard::comm
