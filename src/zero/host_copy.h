#pragma once
// Which parameters are whole on this host, for all its ranks together: one copy a host, whoever brings it in. Holds no bytes of parameters.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace unshard {
class HostGroup;
class SharedSegment;
}  // namespace unshard

namespace unshard::zero {

/// The other hosts' pieces of one parameter, in this host's memory. Legal moves:
/// unborn -> busy -> absent -> busy -> present -> busy ...; present, stale -> busy -> absent (let go).
enum class Presence : std::uint8_t {
  unborn,   ///< no rank of this host has added the parameter yet
  absent,   ///< not here, takes no memory
  stale,    ///< memory is set aside, its bytes are not the value: a fetch failed, or (for who knows a later epoch) the value moved on
  present,  ///< here: the whole value can be read
  busy,     ///< one rank brings it in or lets it go; the others wait
};

// [Note: one copy a host] Ranks of a host map one segment in which every parameter has room for its whole value. The pieces of the host's
// own ranks are always valid there; those of other hosts only while the parameter is present. A word in shared memory says which, and how
// many ranks use it now. Whoever needs an absent parameter first claims it (compare-and-swap), pulls the pieces one-sided straight into
// place and says so; the others wait for that, so that each byte crosses the link once a host. No rank needs another rank's control flow:
// a claim is held only over a fetch from serving threads, never over a wait for a peer's progress. A rank that dies with a claim ends the
// others' waits by its death; one whose fetch fails says why and gives the claim back: who waits for it has the same error at once (a rank
// that doesn't answer is waited for once, not by each in turn), and who comes later tries again.
//
// [Note: epochs] How often a parameter's value has changed is counted by every rank for itself, behind the fence that closes the change
// (Entry::epoch): all count the same changes. A claim writes its rank's count beside the presence, and what arrives is present for ranks
// that have counted no further. So a fetch that began before the end of a change, and may have brought old bytes, new ones or some of each,
// is never read after it, however late it ends and whoever made it; and nobody has to visit the cells when values change.
//
// Thread-safe, except add().
class HostCopy {
 public:
  /// Collective over the host's ranks.
  explicit HostCopy(HostGroup& host);
  ~HostCopy();

  /// Every rank of the host, in the same order of ids. The first one to come runs `set_up` (memory), the others wait for it.
  void add(int id, const std::string& name, const std::function<void()>& set_up);

  /// One more rank uses the parameter, if it is present. A held parameter stays present memory until drop().
  bool hold(int id, std::uint32_t epoch);
  void drop(int id);
  /// For who has counted `epoch` changes of its value.
  Presence presence(int id, std::uint32_t epoch) const;
  std::uint32_t users(int id) const;

  /// absent or stale -> busy by this rank; *before becomes what it was. false: it is neither.
  /// After absent, room must be taken with take_room() (or the claim given back with absent) before bytes are written.
  bool claim(int id, std::uint32_t epoch, Presence* before);
  /// busy -> present since the claim's epoch, with this rank as a user when `held`.
  void arrived(int id, bool held);
  /// busy -> absent or stale.
  void give_back(int id, Presence to);
  /// busy -> stale, each: a fetch by this rank failed.
  void fail(const std::vector<int>& ids, std::string_view why);
  /// present or stale, without users -> busy by this rank: it lets the memory go, then give_back(absent) and leave_room().
  bool claim_unused(int id);
  /// A number that changes when a fetch fails: of this parameter, of any.
  std::uint32_t failures(int id) const;
  std::uint32_t failures() const;
  /// Wait while another thread or rank is busy with it, from when failures(id) was `failures`.
  /// \throws CommError its fetch failed, with its error; that rank died.
  void wait_while_busy(int id, const std::string& name, std::uint32_t failures);
  /// Wait for what other fetches of this host bring about, from when failures() was `failures`.
  /// \throws CommError one failed, with its error; a rank died.
  void wait_until(const std::function<bool()>& ready, const std::string& where, std::uint32_t failures);
  void notify();
  /// Moves whenever this rank's fetches get on.
  std::atomic<std::uint64_t>& moved();

  // [Note: the budget] Elements of other hosts' pieces that memory is set aside for, over all ranks of the host. What is fetched ahead
  // takes room only below the limit; a touch, which can't wait for others' progress, takes it in any case, after everything unused has
  // gone.
  bool take_room(std::int64_t numel, std::int64_t bytes, std::int64_t limit_numel);
  void leave_room(std::int64_t numel, std::int64_t bytes);
  std::int64_t live_numel() const;
  std::int64_t live_bytes() const;
  std::int64_t peak_numel() const;
  std::int64_t peak_bytes() const;
  void reset_peak();
  /// Fetches ahead that hold room and are under way, on this host.
  std::atomic<std::int32_t>& fetching_ahead();
  /// How many of them have ended: counted after they have left fetching_ahead().
  std::atomic<std::uint64_t>& ended_ahead();
  /// Ranks that wait for others' progress: those who move on notify() then.
  std::atomic<std::int32_t>& progress_waiters();

  int local_rank() const;
  int local_ranks() const;
  // Several plans may be under way, one a mode. See PlanFollower for the words.
  static constexpr std::size_t kPlans = 3;
  /// Where a rank of this host is in a plan.
  std::atomic<std::uint64_t>& progress(std::size_t plan, int local_rank);
  /// A plan's next gather, which whoever is free takes.
  std::atomic<std::uint64_t>& cursor(std::size_t plan);
  /// A number that changes when another rank of the host moves in any plan.
  std::uint64_t others_progress();

 private:
  struct Cell;
  struct Header;
  struct Line;
  Cell& cell(int id) const;
  Header& header() const;
  Line& line(int local_rank) const;
  std::string why(std::uint32_t failures) const;

  HostGroup& host_;
  std::shared_ptr<SharedSegment> segment_;
  std::size_t header_bytes_;
  std::mutex failing_;  ///< this rank's threads
};

}  // namespace unshard::zero
