#pragma once
// What the scheduler knows of one sequence.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "inference/schedule/scheduler.h"

namespace unshard::inference {

/// Where a sequence is. Moves: held -> waiting (its parent's prompt is computed, or the parent is gone); waiting -> running (admitted);
/// running -> waiting (preempted); any -> gone; running -> ended -> gone when removed while a step computes it.
enum class Place {
  held,     ///< a fork whose parent's prompt isn't computed yet; in the parent's `held_forks`
  waiting,  ///< has no blocks
  running,  ///< has blocks for all its tokens but perhaps the last
  ended,    ///< removed, but the step under way still uses its blocks
};

/// So many tokens that were computed of others while a prompt waits count as one less that it lacks.
inline constexpr std::int64_t kPatience = 4;

struct Sequence {
  SequenceId id = 0;
  std::vector<Token> tokens;  ///< prompt, then what was generated
  std::int64_t prompt = 0;    ///< tokens of the prompt
  std::int64_t max_tokens = 0;
  std::int64_t priority = 0;
  std::int64_t arrival = 0;  ///< counts up over all sequences
  std::int64_t since = 0;    ///< tokens of prompts that had been scheduled then, and since then for it
  std::uint64_t salt = 0;
  std::optional<SequenceId> parent;  ///< of a fork that has not been admitted yet
  std::vector<Sequence*> held_forks;
  Place place = Place::waiting;

  std::vector<std::int32_t> blocks;  ///< the block table; shared ones are full and never written again
  std::int64_t computed = 0;         ///< tokens whose keys and values are in `blocks`
  std::int64_t scheduled = 0;        ///< tokens that the step under way computes after those
  std::int64_t indexed = 0;          ///< leading blocks that are in the prefix index
  std::uint64_t chain = 0;           ///< their chain hash
  bool index_more = false;           ///< blocks that become full enter the index; false for good once one could not
  std::vector<Token> guesses;        ///< proposed for the next step; while it is under way: those that it computes
  std::span<const Token> chosen;     ///< during finish_step()

  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t drafts() const { return scheduled > 0 ? static_cast<std::int64_t>(guesses.size()) : 0; }
  std::int64_t remaining() const { return length() - computed - scheduled; }
  std::int64_t due() const { return since + kPatience * remaining(); }  ///< see [Note: how prompts share a step]
  bool wants_token() const { return scheduled > 0 && remaining() == 0; }
};

/// The order of everything: lower priority number first, then first come, first served. Total, as arrivals differ.
struct Before {
  bool operator()(const Sequence* a, const Sequence* b) const {
    return a->priority != b->priority ? a->priority < b->priority : a->arrival < b->arrival;
  }
};

}  // namespace unshard::inference
