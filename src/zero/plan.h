#pragma once
// What a host brings in, when, in which messages, and what it lets go, in the next step: made from the trace of the last one.
// Pure: no tensors, no threads. The same inputs give the same plan, on every rank.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace unshard::zero {

struct PlanOptions {
  std::int64_t budget_numel = 1'000'000'000;  ///< gathered elements that may be here at once (stage3_max_live_parameters)
  std::int64_t prefetch_numel = 50'000'000;   ///< gathered ahead of their use (stage3_prefetch_bucket_size); 0: nothing is
  std::int64_t max_reuse_distance = 1'000'000'000;
  std::int64_t fuse_bytes = 1 << 20;  ///< small gathers travel together up to this; one message costs a round trip
};

struct PlanParameter {
  std::int64_t numel = 0;         ///< of the whole value: what distances are counted in
  std::int64_t gather_numel = 0;  ///< what a gather brings in, and what it occupies until the release
  std::int64_t gather_bytes = 0;
};

/// Parameters brought in by one message.
struct PlanGather {
  std::size_t issue = 0;      ///< may start once this many touches of the trace have begun
  std::size_t first_use = 0;  ///< position in the trace of the touch that needs its first parameter
  std::size_t last_use = 0;   ///< of the touch that needs its last one first
  std::vector<int> ids;       ///< in order of use
  bool operator==(const PlanGather&) const = default;
};

// [Note: the plan's order] Gathers are in the order of their first use, and their issues never fall, so that following the list in order
// needs no more than one cursor. A parameter whose `release_after` is set leaves after that touch, before a later gather takes its room.
struct Plan {
  std::vector<PlanGather> gathers;
  std::vector<std::uint8_t> release_after;  ///< by position: the parameter touched there is let go after it
  bool keeps_all = false;                   ///< everything fits: each parameter is gathered once and stays
  std::int64_t peak_numel = 0;              ///< most elements here at once
  std::int64_t gathered_numel = 0;          ///< elements brought in over the step

  /// Index of the first gather whose first use is at or after `position`.
  std::size_t gather_from(std::size_t position) const;
  bool operator==(const Plan&) const = default;
};

/// \param trace       ids in the order of touches, no two equal ones in a row.
/// \param parameters  by id.
/// The plan stays within the budget, except for a single parameter that is larger: it is then here alone.
/// Cost: O(n log n) for n touches.
/// Idea: Belady's rule (what is used last leaves first) over the known future.
Plan make_plan(const std::vector<int>& trace, const std::vector<PlanParameter>& parameters, const PlanOptions& options);

}  // namespace unshard::zero
