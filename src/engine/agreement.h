#pragma once
// Small things that all ranks must know of each other.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace unshard {

class Communicator;

/// Collective: equally long byte strings of every rank, in rank order. Small ones take a few microseconds in shared memory.
std::vector<std::byte> exchange_bytes(Communicator& comm, const void* mine, std::size_t bytes, std::string_view where);

/// Collective: each number becomes its sum over all ranks, added in the order of ranks: the same bits everywhere.
void sum_over_ranks(Communicator& comm, std::vector<double>& values, std::string_view where);

/// Collective: what one rank found wrong (empty: nothing), as each is to say it: its own error, or "[where] rank 2 failed: ..." with the
/// first other one's. Empty: nobody has an error.
std::string agree_on_error(Communicator& comm, const std::string& error, std::string_view where);

/// Collective: what one rank found wrong (empty: nothing) ends the call on all of them.
/// \throws std::invalid_argument with its own error on the ranks that have one, CommError naming rank and error on the others.
void agree_no_error(Communicator& comm, const std::string& error, std::string_view where);

/// Collective: lines that describe what must be alike (a model's parameters, settings: "key = value").
/// \throws CommError naming the first line that differs and the ranks; `advice` ends it.
void agree_same_lines(Communicator& comm, const std::vector<std::string>& lines, std::string_view where, std::string_view advice);

/// What a rank knows of its own gradient slices at the boundary.
struct GradientFacts {
  double squares = 0;      ///< of the accumulated sum, before any factor
  int bad_parameter = -1;  ///< first one with a non-finite element in this rank's pieces
  int bad_rank = -1;       ///< whose gradient it was, if known
  bool bad_loss = false;   ///< a loss of this rank was not finite
};

/// The same on every rank.
struct AgreedFacts {
  double squares = 0;
  int bad_parameter = -1, bad_rank = -1;
  std::vector<std::uint8_t> present;  ///< by parameter: some rank had a gradient
};

/// Collective: squares added in rank order, presence OR-ed; one message.
AgreedFacts agree_on_gradients(Communicator& comm, const GradientFacts& mine, const std::vector<std::uint8_t>& present);

}  // namespace unshard
