#pragma once
// The order of touches in a step, recorded; followed in later steps to know what to fetch ahead and what to let go.
// Pure: no tensors, no threads.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace unshard {

struct TraceOptions {
  std::int64_t prefetch_numel = 50'000'000;
  std::int64_t max_live_numel = 1'000'000'000;
  std::int64_t max_reuse_distance = 1'000'000'000;
};

/// What a store should do after a touch.
struct TraceAdvice {
  std::vector<int> fetch;  ///< ids to start fetching, in order, within prefetch_numel (the next one: at any size) and the live budget; none
                           ///< that are live
};

/// Follows one rank's touches. A touch that isn't the next one resynchronises at its next occurrence in the trace (branches, skipped
/// parts, other modes) and is recorded for the next step; consecutive touches of one parameter count as one.
class TouchTrace {
 public:
  /// \param numels elements of parameter id (full); grows with add().
  explicit TouchTrace(const TraceOptions& options);
  ~TouchTrace();
  void set_options(const TraceOptions& options);
  void add(std::int64_t numel);
  /// A new step: what was recorded becomes the trace to follow (if the step had any touches). \return whether that is another one.
  bool begin_step();
  /// As begin_step(), for turns of which one is like the other and some are cut short: what is only the beginning of the trace followed
  /// leaves it as it is, and so does anything less than half as long until it comes a second time.
  bool end_pass();
  /// \param live  ids that are resident or being fetched, by id. \param live_numel their elements together.
  TraceAdvice touch(int id, const std::vector<std::uint8_t>& live, std::int64_t live_numel);
  /// The recording half of touch(): notes the touch and finds its place. \return whether it was the next one expected.
  bool advance(int id);
  int last() const;  ///< id touched last in this turn; -1: none
  /// Position in followed() of the touch that is expected next.
  std::size_t position() const;
  const std::vector<int>& followed() const;  ///< the trace of the step before: what is expected
  const std::vector<int>& recorded() const;  ///< this step's touches so far
  std::uint64_t recorded_hash() const;       ///< of recorded(); equal traces have equal ones
  std::uint64_t followed_hash() const;
  /// As distance_to_next_use, seen from another place in followed().
  std::int64_t distance_from(std::size_t position, int id) const;
  /// The last expected use of `id` before `position`; SIZE_MAX: none.
  std::size_t last_use_before(std::size_t position, int id) const;
  /// Elements touched between now and the next expected use of `id`; INT64_MAX when it isn't expected.
  std::int64_t distance_to_next_use(int id) const;
  /// Among `candidates` (resident, unpinned), the order in which to release them: farthest next use first.
  std::vector<int> release_order(const std::vector<int>& candidates) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace unshard
