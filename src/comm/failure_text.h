#pragma once
// What ranks tell each other of their failures. A failure is handed on from rank to rank (one waits for another, which waited for a third);
// it is told once, with the rank where it began.
#include <string>
#include <string_view>

namespace unshard::comm {

/// For the others: where `reason` only says what became of another rank ("[comm.x] rank 2 failed: why; this is rank 1 of 3 in step 4"),
/// just that ("rank 2 failed: why"); else `reason` without the place of the one that says it. Cut at some length.
std::string failure_to_tell(std::string_view reason);

/// What `rank` told of its failure, for a message of rank `self`: "rank 1 failed: why", or "rank 2 failed: why" where it handed that on.
std::string failure_told_by(int rank, std::string_view told, int self);

/// Whether it is of another rank's failure.
bool is_handed_on(std::string_view told);

/// How a rank left that had `reason` to (an exception's text), or none that is known.
std::string departure(std::string_view reason);

/// The rank that a text begins with, and what follows its number; rank -1: it begins with none that ended.
struct Origin {
  int rank = -1;
  std::string_view rest;
};
Origin origin_of(std::string_view told);

/// The same text with the rank that it begins with called `number(rank)`.
template <class Number>
std::string with_origin_called(std::string_view told, Number&& number) {
  const Origin origin = origin_of(told);
  if (origin.rank < 0) return std::string(told);
  return "rank " + std::to_string(number(origin.rank)).append(origin.rest);
}

}  // namespace unshard::comm
