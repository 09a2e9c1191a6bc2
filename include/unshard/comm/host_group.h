#pragma once
// Ranks that share one host's memory: a control block, shared segments, waits that notice dead or stalled peers.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace unshard {

/// What a rank is doing, published for its peers' error messages and for deadlock-free waits.
/// One word a state; moves: idle -> forward/backward (touch, hook) -> reducing -> updating -> publishing -> idle; any -> failed, gone.
enum class Phase : std::int32_t { starting, idle, forward, backward, blocked, reducing, updating, publishing, collective, failed, gone };
const char* phase_name(Phase phase);

/// How waits behave.
struct HostGroupOptions {
  std::chrono::duration<double> timeout{1800};  ///< then CommError says which rank waits where, for which parameter and step
  /// Called about every 50 ms inside waits, without locks held; throws to leave the wait (the binding checks for Ctrl-C here).
  std::function<void()> interrupt_check;
  /// After so long in one wait, the lowest waiting rank of a host logs once who is where. 0: never.
  std::chrono::duration<double> report_after{0};
  /// Called with the text of a CommError that a wait is about to throw.
  std::function<void(std::string_view)> on_failure;
};

/// Memory mapped by all ranks of a host (memfd: nothing is left behind when ranks die). Grows by `reserve`; never moves.
class SharedSegment {
 public:
  virtual ~SharedSegment() = default;
  virtual std::byte* data() const = 0;   ///< base address in this process; stable
  virtual std::size_t size() const = 0;  ///< bytes usable now
  /// Make at least `bytes` usable. Any rank, any time, idempotent; zero-filled. \throws CommError (no memory, with sizes).
  virtual void reserve(std::size_t bytes) = 0;
};

/// Thread-safe except where noted. All ranks must create it together.
class HostGroup {
 public:
  virtual ~HostGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Collective: a new segment, the same memory on every rank. `limit_bytes` of address space are set aside for growth.
  virtual std::shared_ptr<SharedSegment> create_segment(std::string_view name, std::size_t bytes, std::size_t limit_bytes) = 0;

  /// Collective. Returns when every rank has called it. \p where is named in errors ("step: publish").
  virtual void barrier(std::string_view where) = 0;

  /// Collective: bytes of every rank, in rank order, at most kSmallBytes each; the latency path (a few us).
  static constexpr std::size_t kSmallBytes = 4096;
  virtual void all_gather_small(const void* mine, std::size_t bytes, void* all, std::string_view where) = 0;

  /// Wait until `ready()` (polls shared memory, must not block or throw). Spins briefly, then sleeps on a futex that notify() wakes.
  /// \throws CommError a peer died (named at once, by pidfd), failed, or the time-out passed (with every rank's phase, step, detail).
  virtual void wait_until(const std::function<bool()>& ready, std::string_view where) = 0;
  /// wait_until for what another rank of this host does, which has the same time-out itself: here time counts from the last change of
  /// `progress()`, and is a second longer, so that the other rank's error, which knows more, comes first.
  virtual void wait_for_work(const std::function<bool()>& ready, const std::function<std::uint64_t()>& progress,
                             std::string_view where) = 0;
  /// Wake peers that wait_until on something this rank just wrote. Cheap when nobody sleeps.
  virtual void notify() = 0;

  /// Publish what this rank is doing. `detail` (a parameter or collective name) is truncated to 100 bytes. Cost: tens of ns.
  virtual void set_phase(Phase phase, std::int64_t step, std::string_view detail) = 0;
  virtual Phase phase_of(int rank) const = 0;
  /// "rank 0: backward, step 3, at 'blocks.1.up.weight' (12.0 s); rank 1: gone ..."
  virtual std::string describe_ranks() const = 0;
  /// Tell peers that this rank failed, so that their waits end at once with `reason` in the message.
  virtual void fail(std::string_view reason) = 0;

  /// Same memory for threads of one process (tests, sanitizers): element r is rank r's handle.
  static std::vector<std::shared_ptr<HostGroup>> in_process(int size, const HostGroupOptions& options = {});
  /// Across processes. `exchange(mine) -> all, by rank` is any small all-gather of strings (a c10d store). Descriptors travel over an
  /// abstract Unix socket. Collective.
  using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;
  static std::shared_ptr<HostGroup> connect(int rank, int size, const Exchange& exchange, const HostGroupOptions& options = {});
};

}  // namespace unshard
