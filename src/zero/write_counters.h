#pragma once
// How often each rank has written each parameter, in shared memory: what a reader waits on before ranks have fenced.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace unshard {
class Communicator;
class HostGroup;
class SharedSegment;
}  // namespace unshard

namespace unshard::zero {

// [Note: lockstep writes] All ranks run the same writes in the same order, without fences. Write k of a parameter goes: every rank
// announces that it started write k (it took its copy of the old value, or needs none); does the operator on its copy; waits until all
// ranks have started write k (so none still reads the value before); stores its own slice; announces write k stored. A read waits until all
// ranks have stored as many writes as this rank has. Adding a parameter is write 1. Ranks may read unequally; only writes run in step.
class WriteCounters {
 public:
  /// Collective over the ranks of this host. `comm` must have a HostGroup of them.
  explicit WriteCounters(Communicator& comm);
  ~WriteCounters();

  void add(int id);                                        ///< room for a parameter; counts as its first write
  std::uint32_t start(int id);                             ///< \return the number of the write that starts
  void stored(int id);                                     ///< publishes the write that was started last
  void wait_all_started(int id, const std::string& name);  ///< \throws CommError naming parameter and rank
  void wait_all_stored(int id, const std::string& name);
  bool all_stored(int id) const;

 private:
  struct Cell {
    std::atomic<std::uint32_t> started, stored;
  };
  Cell& cell(int id, int rank) const;
  void wait(int id, const std::string& name, bool (WriteCounters::*ready)(int) const, const char* what);
  bool all_started(int id) const;

  Communicator& comm_;
  HostGroup& host_;
  std::vector<int> ranks_;  // of the host's ranks in `comm`, for messages
  std::shared_ptr<SharedSegment> segment_;
};

}  // namespace unshard::zero
